"""The partition of a model into fragments, computed from parameter names and sizes."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

# The default maximum number of repeated blocks in a fragment, as in the paper.
_MOST_BLOCKS = 3

# The approximate default number of fragments, as in the paper's 1B model.
_ENOUGH_FRAGMENTS = 8

# The default limit on the number of fragments of blocks, and the approximate limit on the number of
# fragments of other parameters. Every launch costs messages.
_MOST_FRAGMENTS = 32

# Two blocks are alike if they share at least this fraction of the smaller block's names. They need
# not be equal, because a ResNet stage starts with a block that has a shortcut, and some transformer
# layers have experts.
_ALIKE = 0.5

# The number of names that a message shows.
_SHOWN = 5


class Parameter(NamedTuple):
    name: str
    nbytes: int
    ndim: int = 2


class Stack(NamedTuple):
    """The number and shape of a parameter's matrices.

    Examples:
        >>> Stack(2, 3, 4).multiplications
        198
    """

    number: int
    rows: int
    columns: int

    @property
    def multiplications(self) -> int:
        """The number of multiplications for a polynomial of degree five."""
        shorter, longer = sorted((self.rows, self.columns))
        return self.number * shorter**2 * (2 * longer + shorter)


@dataclass(frozen=True)
class Fragment:
    """Parameters that are exchanged together.

    Attributes:
        names: The names of the parameters, in the order of ``named_parameters()``.
        sizes: The sizes of the parameters in bytes, in the same order.
        stacks: The matrices of each parameter in the outer step, or None if the values are treated
            separately.

    Examples:
        >>> Fragment(("head.weight", "head.bias"), (4096, 16)).nbytes
        4112
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stacks: tuple[Stack | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of the whole fragment in bytes."""
        return sum(self.sizes)


class Partition(NamedTuple):
    fragments: tuple[Fragment, ...]
    fell_back: bool = False


def partition(
    parameters: Sequence[Parameter],
    fragments: int | str | Sequence[Sequence[str]] = "strided",
    aliases: Mapping[str, str] | None = None,
    frozen: Sequence[str] = (),
) -> Partition:
    """Divides a model into fragments. Every parameter is in exactly one fragment.

    ``"strided:3"`` and ``"sequential:3"`` search for repeated blocks and put at most three blocks
    into a fragment. With ``"strided"``, block ``l`` is in fragment ``l % P``, as in the paper. With
    ``"sequential"``, the blocks of a fragment are consecutive. Without a number, a fragment
    contains an eighth of the blocks (at least one and at most three), or more if there would
    otherwise be more than 32 fragments. Parameters outside the blocks (embeddings, head, last norm)
    form additional fragments. Such a fragment is no larger than the largest fragment of blocks,
    unless a single tensor is larger or, if no number is given, there would be many more than 32
    fragments. An integer distributes the tensors among that many fragments of similar size.
    ``"balanced"`` does the same with as many fragments as ``"strided"``.

    Args:
        parameters: The trainable parameters, without duplicates, in the order of
            ``named_parameters()``.
        fragments: One of the choices above, or a list of shell-style patterns for each fragment.
        aliases: Other names of tied parameters, mapped to their names in ``parameters``.
        frozen: Names of the parameters that are not trainable. A pattern that matches only such
            parameters is allowed, because they may become trainable later. A list that matches no
            trainable parameter does not form a fragment.

    Examples:
        >>> layers = [Parameter(f"blocks.{i}.weight", 16) for i in range(4)]
        >>> cut = partition([Parameter("embedding.weight", 24), *layers], "strided:2")
        >>> for fragment in cut.fragments:
        ...     print(fragment.names, fragment.nbytes)
        ('blocks.0.weight', 'blocks.2.weight') 32
        ('blocks.1.weight', 'blocks.3.weight') 32
        ('embedding.weight',) 24
    """
    if not parameters:
        raise ValueError(
            "The model has no trainable parameters, so worker groups have nothing to exchange. Set"
            " requires_grad=True for at least one parameter, or train without this strategy."
        )
    fragments = checked_fragments(fragments)
    if isinstance(fragments, int):
        if fragments > len(parameters):
            raise ValueError(
                f"fragments={fragments} exceeds the number of trainable tensors in the model, and"
                f" tensors are never divided. Choose at most {len(parameters)}."
            )
        return Partition(_balanced(parameters, fragments))
    if not isinstance(fragments, str):
        return Partition(_by_patterns(parameters, fragments, aliases or {}, frozen))
    blocks = find_blocks(parameters)
    if not blocks:
        # More fragments would not lower the peak, because the largest tensor is not divided.
        useful = _nbytes(parameters) // max(1, max(parameter.nbytes for parameter in parameters))
        count = max(1, min(useful, _ENOUGH_FRAGMENTS))
        return Partition(_balanced(parameters, count), fell_back=fragments != "balanced")
    order, _, number = fragments.partition(":")
    most_outside: float
    if number:
        most_blocks = int(number)
        most_outside = math.inf
    else:
        most_blocks = _blocks_per_fragment(len(blocks))
        most_outside = _MOST_FRAGMENTS
    cut = _by_blocks(parameters, blocks, most_blocks, most_outside, strided=order != "sequential")
    if order == "balanced":
        cut = _balanced(parameters, len(cut))
    return Partition(cut)


def _blocks_per_fragment(blocks: int) -> int:
    some_eight_fragments = max(1, min(_MOST_BLOCKS, round(blocks / _ENOUGH_FRAGMENTS)))
    return max(some_eight_fragments, fewest_blocks(blocks))


def fewest_blocks(blocks: int) -> int:
    """Returns the smallest number of blocks per fragment that avoids too many fragments."""
    return max(1, math.ceil(blocks / _MOST_FRAGMENTS))


def checked_fragments(
    fragments: int | str | Sequence[Sequence[str]],
) -> int | str | Sequence[Sequence[str]]:
    """Validates and returns a choice of fragments."""
    if isinstance(fragments, str):
        is_right = bool(re.fullmatch(r"balanced|(strided|sequential)(:[1-9]\d*)?", fragments))
    elif type(fragments) is int:
        is_right = fragments > 0
    elif isinstance(fragments, Sequence) and fragments and all(map(_are_patterns, fragments)):
        is_right = True
    else:
        raise ValueError(
            f"fragments={fragments!r} is not a list of non-empty lists of patterns. Pass a list of"
            " shell-style patterns for each fragment, such as [['net.0.*'], ['net.1.*']], or a"
            " number of fragments."
        )
    if is_right:
        return fragments
    raise ValueError(
        f"fragments={fragments!r} is unknown. Choose 'strided' or 'sequential', optionally with the"
        " number of repeated blocks in a fragment, as in 'strided:3'. You can also choose"
        " 'balanced', a number of fragments, or a list of lists of shell-style patterns such as"
        " [['net.0.*'], ['net.1.*']]. Both numbers must be whole and at least 1."
    )


def _are_patterns(patterns: object) -> bool:
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        return False
    return len(patterns) > 0 and all(isinstance(pattern, str) for pattern in patterns)


def find_blocks(parameters: Sequence[Parameter]) -> list[list[str]]:
    """Finds the repeated blocks of a model in order, based on parameter names.

    A stack is a module with numbered children, such as ``nn.ModuleList`` or ``nn.Sequential``. A
    stack is used if at least two of its children are alike and together contain at least half of
    its parameters. The blocks are the similar children of the outermost stacks that are used. A
    child that contains only vectors, such as a normalisation between two linear layers, belongs to
    the previous block.
    """
    vectors = {parameter.name for parameter in parameters if parameter.ndim < 2}
    return _blocks_below("", [parameter.name for parameter in parameters], vectors)


def _blocks_below(prefix: str, names: list[str], vectors: set[str]) -> list[list[str]]:
    children: dict[str, list[str]] = {}
    for name in names:
        child = name[len(prefix) :].split(".")[0]
        children.setdefault(child, []).append(name)
    repeated = _repeated(prefix, children)
    blocks: list[list[str]] = []
    for child, inside in children.items():
        if not repeated:
            if inside != [prefix + child]:
                blocks += _blocks_below(f"{prefix}{child}.", inside, vectors)
        elif child in repeated:
            if blocks and vectors.issuperset(inside):
                blocks[-1] = blocks[-1] + inside
            else:
                blocks.append(inside)
    return blocks


def _repeated(prefix: str, children: dict[str, list[str]]) -> set[str]:
    """Returns the numbered children that are alike. The result is empty unless there are at least
    two such children, which together have at least half of the parameters of all numbered children.
    """
    # Children with equal parameter names are compared only once, because a model may have a
    # thousand such children.
    children_by_names = _numbered_children_by_names(prefix, children)
    largest = set[str]()
    most_names = 0
    all_names = 0
    for names_of_child, equal_children in children_by_names.items():
        all_names += len(names_of_child) * len(equal_children)
        alike = set[str]()
        number = 0
        for names, children_of_names in children_by_names.items():
            if _are_alike(names_of_child, names):
                alike.update(children_of_names)
                number += len(names) * len(children_of_names)
        if number > most_names:
            largest = alike
            most_names = number
    if len(largest) < 2 or 2 * most_names < all_names:
        return set()
    return largest


def _numbered_children_by_names(
    prefix: str, children: dict[str, list[str]]
) -> dict[frozenset[str], list[str]]:
    children_by_names = dict[frozenset[str], list[str]]()
    for child, names in children.items():
        if re.fullmatch(r"\d+", child):
            start = len(prefix) + len(child) + 1
            inner_names = frozenset(name[start:] for name in names)
            children_by_names.setdefault(inner_names, []).append(child)
    return children_by_names


def _are_alike(left: frozenset[str], right: frozenset[str]) -> bool:
    return len(left & right) / min(len(left), len(right)) >= _ALIKE


def _by_blocks(
    parameters: Sequence[Parameter],
    blocks: list[list[str]],
    most_blocks: int,
    most_outside: float,
    strided: bool,
) -> tuple[Fragment, ...]:
    count = -(-len(blocks) // most_blocks)
    members: list[list[Parameter]] = [[] for _ in range(count)]
    outside: list[Parameter] = []
    members_of = dict[str, list[Parameter]]()
    for block, names in enumerate(blocks):
        index = block * count // len(blocks)
        if strided:
            index = block % count
        members_of.update(dict.fromkeys(names, members[index]))
    for parameter in parameters:
        members_of.get(parameter.name, outside).append(parameter)
    # The other parameters form consecutive runs. No run is larger than the largest fragment of
    # blocks, unless a single tensor is larger or small blocks would cause too many runs.
    largest = max(*map(_nbytes, members), _nbytes(outside) / most_outside)
    for parameter in outside:
        if len(members) == count or _nbytes(members[-1]) + parameter.nbytes > largest:
            members.append([])
        members[-1].append(parameter)
    return tuple(map(_fragment, members))


def _balanced(parameters: Sequence[Parameter], count: int) -> tuple[Fragment, ...]:
    """Assigns each tensor, in order of decreasing size, to the fragment that is smallest so far."""
    members: list[list[int]] = [[] for _ in range(min(count, len(parameters)))]
    sizes = [0] * len(members)
    for index in sorted(range(len(parameters)), key=lambda i: (-parameters[i].nbytes, i)):
        smallest = sizes.index(min(sizes))
        members[smallest].append(index)
        sizes[smallest] += parameters[index].nbytes
    fragments = list[Fragment]()
    for indices in filter(None, members):
        fragments.append(_fragment([parameters[index] for index in sorted(indices)]))
    return tuple(fragments)


def _by_patterns(
    parameters: Sequence[Parameter],
    fragments: Sequence[Sequence[str]],
    aliases: Mapping[str, str],
    frozen: Sequence[str],
) -> tuple[Fragment, ...]:
    # Maps every name of a parameter to the parameter.
    parameter_of = {parameter.name: parameter.name for parameter in parameters} | dict(aliases)
    claims: dict[str, _Claim] = {}
    for index, patterns in enumerate(fragments):
        for pattern in patterns:
            for name in _matches(pattern, parameter_of, frozen):
                _claim(claims, parameter_of[name], name, _Claim(index, pattern))
    left_out = [parameter.name for parameter in parameters if parameter.name not in claims]
    if left_out:
        raise ValueError(
            f"fragments: {len(left_out)} of {len(parameters)} trainable parameters match no"
            f" pattern: {_some(left_out)}. Every parameter must be in exactly one fragment. Add"
            " patterns for these parameters, or freeze them."
        )
    members: list[list[Parameter]] = [[] for _ in fragments]
    for parameter in parameters:
        members[claims[parameter.name].fragment].append(parameter)
    return tuple(_fragment(member) for member in members if member)


def _matches(pattern: str, names: Collection[str], frozen: Sequence[str]) -> list[str]:
    """Returns the names that a pattern matches. Refuses a pattern that matches no parameter."""
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if not matches and not any(fnmatchcase(name, pattern) for name in frozen):
        raise ValueError(
            f"fragments: the pattern {pattern!r} matches no parameter. The names in"
            f" named_parameters() are {_some(names)}. Correct the pattern or remove it."
        )
    return matches


class _Claim(NamedTuple):
    fragment: int
    pattern: str


def _claim(claims: dict[str, _Claim], parameter: str, name: str, claim: _Claim) -> None:
    """Records that a pattern matches a parameter under one of its names. Refuses a second pattern
    for the same parameter.
    """
    first = claims.setdefault(parameter, claim)
    if first != claim:
        tied = ""
        if name != parameter:
            tied = f" (tied to {name!r})"
        raise ValueError(
            f"fragments: the parameter {parameter!r}{tied} is matched by two patterns,"
            f" {first.pattern!r} of fragment {first.fragment} and {claim.pattern!r} of fragment"
            f" {claim.fragment}. Every parameter must be matched by exactly one pattern. Narrow one"
            " of the patterns."
        )


def _some(names: Collection[str]) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:_SHOWN])
    if len(names) > _SHOWN:
        shown += f" and {len(names) - _SHOWN} more"
    return shown


def _nbytes(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _fragment(parameters: Sequence[Parameter]) -> Fragment:
    return Fragment(tuple(p.name for p in parameters), tuple(p.nbytes for p in parameters))


# Parameters as matrices, for outer steps that do not treat values separately


def stack_of(
    shape: Sequence[int], groups: int | None = None, parts: int | None = None
) -> Stack | None:
    """Returns the matrices of a parameter, or None if its values are treated separately.

    ======================================  =================================================
    parameter                               matrices
    ======================================  =================================================
    of one dimension, or none               none
    of two                                  one
    of a convolution ``(out, in, ...)``     one for each of its groups, ``(out, in * ...)``
    of three, of any other module           one for each position along the first, as experts
    of more, of any other module            none
    whose matrices have one row or column   none
    ======================================  =================================================

    Args:
        shape: The shape of the whole parameter.
        groups: The number of groups of the convolution, or None for other parameters.
        parts: The number of matrices along the first dimension, if set by the user. 0 means no
            matrices.

    Raises:
        ValueError: If the first dimension cannot be divided into that many parts.

    Examples:
        >>> stack_of((96, 32)), stack_of((96, 32), parts=3), stack_of((96, 32), parts=0)
        (Stack(number=1, rows=96, columns=32), Stack(number=3, rows=32, columns=32), None)
        >>> stack_of((64, 16, 3, 3), groups=2), stack_of((64, 1, 3, 3), groups=64), stack_of((8, 32, 64))
        (Stack(number=2, rows=32, columns=144), None, Stack(number=8, rows=32, columns=64))
    """
    if parts is None:
        parts = _usual_parts(shape, groups)
    if parts == 0:
        return None
    if not shape or shape[0] % parts:
        raise ValueError(
            f"it has the shape {tuple(shape)}, whose first dimension is not divisible by {parts}"
        )
    part = [shape[0] // parts, *shape[1:]]
    if part[0] == 1:
        part = part[1:]
    rows = math.prod(part[:1])
    columns = math.prod(part[1:])
    if min(rows, columns) <= 1:
        return None
    return Stack(parts, rows, columns)


def _usual_parts(shape: Sequence[int], groups: int | None) -> int:
    if len(shape) < 2:
        return 0
    if groups is not None:
        return groups
    return {2: 1, 3: shape[0]}.get(len(shape), 0)

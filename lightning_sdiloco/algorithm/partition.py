"""Which parameters travel together: names and sizes go in, fragments come out. No tensors here."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

# The most repeated blocks in a fragment if their number is not given: the paper's choice.
_MOST_BLOCKS = 3

# The fragments that a model is cut into if their number is not given, about: as many as the paper's
# 1B model has.
_ENOUGH_FRAGMENTS = 8

# The most fragments of blocks, and about the most of other parameters, if no number is given:
# launches cost messages.
_MOST_FRAGMENTS = 32

# Two blocks are alike when they share at least this part of the names of the smaller one. They need
# not be the same: a stage of a ResNet starts with a block that has its own shortcut, and some
# layers of a transformer have experts.
_ALIKE = 0.5


class Parameter(NamedTuple):
    name: str
    nbytes: int
    ndim: int = 2


class Stack(NamedTuple):
    """The matrices of a parameter: how many, and of which shape.

    Examples:
        >>> Stack(2, 3, 4).multiplications
        198
    """

    number: int
    rows: int
    columns: int

    @property
    def multiplications(self) -> int:
        """How many multiplications a polynomial of fifth degree takes."""
        shorter, longer = sorted((self.rows, self.columns))
        return self.number * shorter**2 * (2 * longer + shorter)


@dataclass(frozen=True)
class Fragment:
    """Parameters that travel together.

    Attributes:
        names: Names of the parameters as in ``named_parameters()``, in that order.
        sizes: Their sizes in bytes, in the same order.
        stacks: As what matrices the outer step sees each of them; None where every value is by
            itself.

    Examples:
        >>> Fragment(("head.weight", "head.bias"), (4096, 16)).nbytes
        4112
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stacks: tuple[Stack | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the whole fragment in bytes."""
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
    """Cuts a model into fragments; every parameter is in exactly one of them.

    ``"strided:3"`` and ``"sequential:3"`` look for repeated blocks and put at most three of them
    into a fragment: interleaved (block ``l`` into fragment ``l % P``, the paper's choice) or
    consecutive. Without a number it is an eighth of the blocks, at least one and at most three, or
    more to make at most 32 fragments of them. What stands outside the blocks (embeddings, head,
    last norm) forms its own fragments, none larger than the largest fragment of blocks, unless a
    single tensor is, or without a number there would be many more than 32. A number distributes the
    tensors over that many fragments of equal size, and ``"balanced"`` over as many as ``"strided"``
    makes.

    Args:
        parameters: The trainable parameters, each once, in the order of ``named_parameters()``.
        fragments: One of these, or a list of lists of shell-style patterns, one list for each
            fragment.
        aliases: Further names of tied parameters, each with the name under which the parameter is
            in ``parameters``.
        frozen: Names of the parameters that are not trainable. A pattern may match only these,
            because they may become trainable later; a list that matches no trainable parameter
            makes no fragment.

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
            "The model has no trainable parameters, so worker groups have nothing to exchange."
            " Give it at least one"
            " parameter with requires_grad=True, or train it without this strategy."
        )
    fragments = checked_fragments(fragments)
    if isinstance(fragments, int):
        if fragments > len(parameters):
            raise ValueError(
                f"fragments={fragments} is more than the {len(parameters)} trainable tensors of"
                " the model, which are not divided. Give at most that number."
            )
        return Partition(_balanced(parameters, fragments))
    if not isinstance(fragments, str):
        return Partition(_by_patterns(parameters, fragments, aliases or {}, frozen))
    blocks = find_blocks(parameters)
    if not blocks:
        # More fragments than this would not lower the peak: the largest tensor is sent whole.
        useful = _nbytes(parameters) // max(1, max(parameter.nbytes for parameter in parameters))
        count = max(1, min(useful, _ENOUGH_FRAGMENTS))
        return Partition(_balanced(parameters, count), fell_back=fragments != "balanced")
    order, _, layers = fragments.partition(":")
    most = int(layers) if layers else _blocks_per_fragment(len(blocks))
    most_outside = math.inf if layers else _MOST_FRAGMENTS
    cut = _by_blocks(parameters, blocks, most, most_outside, strided=order != "sequential")
    return Partition(_balanced(parameters, len(cut)) if order == "balanced" else cut)


def _blocks_per_fragment(blocks: int) -> int:
    some_eight_fragments = max(1, min(_MOST_BLOCKS, round(blocks / _ENOUGH_FRAGMENTS)))
    return max(some_eight_fragments, fewest_blocks(blocks))


def fewest_blocks(blocks: int) -> int:
    """Returns how many of the repeated blocks of a model a fragment holds at least, so that there
    are not too many.
    """
    return max(1, math.ceil(blocks / _MOST_FRAGMENTS))


def checked_fragments(fragments: Any) -> int | str | Sequence[Sequence[str]]:
    """Returns a choice of fragments, or refuses it."""
    if isinstance(fragments, str):
        if fragments == "balanced" or re.fullmatch(r"(strided|sequential)(:[1-9]\d*)?", fragments):
            return fragments
    elif type(fragments) is int:
        if fragments > 0:
            return fragments
    elif _is_list(fragments) and all(
        _is_list(patterns) and all(isinstance(pattern, str) for pattern in patterns)
        for patterns in fragments
    ):
        return fragments
    else:
        raise ValueError(
            f"fragments={fragments!r} is not a list of non-empty lists of patterns. Give one list"
            " of shell-style patterns for each fragment, such as [['net.0.*'], ['net.1.*']], or a"
            " number of fragments."
        )
    raise ValueError(
        f"fragments={fragments!r} is unknown. It is 'strided' or 'sequential', optionally with the"
        " number of repeated blocks in a fragment, as in 'strided:3'; 'balanced'; a number of"
        " fragments; or a list of lists of shell-style patterns such as [['net.0.*'],"
        " ['net.1.*']]; both numbers are whole and at least 1. Choose one of them."
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def find_blocks(parameters: Sequence[Parameter]) -> list[list[str]]:
    """Finds the repeated blocks of a model from the names of its parameters, in order; none if
    there are none.

    A stack is a module with numbered children, such as ``nn.ModuleList`` and ``nn.Sequential``. It
    counts when at least two of its children are alike and these hold at least half of its
    parameters. The blocks are the children that are alike in the outermost stacks that count. A
    child that holds nothing but vectors, such as a normalisation between two linear layers, belongs
    to the block before it.
    """
    vectors = {parameter.name for parameter in parameters if parameter.ndim < 2}
    return _blocks_below("", [parameter.name for parameter in parameters], vectors)


def _blocks_below(prefix: str, names: list[str], vectors: set[str]) -> list[list[str]]:
    children: dict[str, list[str]] = {}
    for name in names:
        children.setdefault(name[len(prefix) :].split(".")[0], []).append(name)
    blocks: list[list[str]] = []
    repeated = _repeated(
        prefix, {child: inside for child, inside in children.items() if re.fullmatch(r"\d+", child)}
    )
    for child, inside in children.items():
        if child in repeated and blocks and vectors.issuperset(inside):
            blocks[-1] = blocks[-1] + inside
        elif child in repeated:
            blocks.append(inside)
        elif not repeated and inside != [prefix + child]:
            blocks += _blocks_below(f"{prefix}{child}.", inside, vectors)
    return blocks


def _repeated(prefix: str, numbered: dict[str, list[str]]) -> set[str]:
    """Returns the children that are alike, if there are at least two and they hold at least half
    of the parameters.
    """
    inner = {
        child: {name[len(prefix) + len(child) + 1 :] for name in names}
        for child, names in numbered.items()
    }
    alike = [
        {
            other
            for other in inner
            if len(own & inner[other]) / min(len(own), len(inner[other])) >= _ALIKE
        }
        for own in inner.values()
    ]
    most = max(
        alike, key=lambda children: sum(len(inner[child]) for child in children), default=set()
    )
    held = sum(len(inner[child]) for child in most)
    return most if len(most) >= 2 and 2 * held >= sum(map(len, inner.values())) else set()


def _by_blocks(
    parameters: Sequence[Parameter],
    blocks: list[list[str]],
    most: int,
    most_outside: float,
    strided: bool,
) -> tuple[Fragment, ...]:
    count = -(-len(blocks) // most)
    fragment_of = {
        name: block % count if strided else block * count // len(blocks)
        for block, names in enumerate(blocks)
        for name in names
    }
    members: list[list[Parameter]] = [[] for _ in range(count)]
    outside: list[Parameter] = []
    for parameter in parameters:
        index = fragment_of.get(parameter.name)
        (outside if index is None else members[index]).append(parameter)
    # Consecutive runs, none larger than the largest fragment of blocks unless a single tensor is,
    # or small blocks would make too many.
    largest = max(*map(_nbytes, members), _nbytes(outside) / most_outside)
    for index, parameter in enumerate(outside):
        if not index or _nbytes(members[-1]) + parameter.nbytes > largest:
            members.append([])
        members[-1].append(parameter)
    return tuple(map(_fragment, members))


def _balanced(parameters: Sequence[Parameter], count: int) -> tuple[Fragment, ...]:
    """Puts each tensor, the largest first, into the fragment that is smallest so far."""
    members: list[list[int]] = [[] for _ in range(min(count, len(parameters)))]
    sizes = [0] * len(members)
    for index in sorted(range(len(parameters)), key=lambda i: (-parameters[i].nbytes, i)):
        smallest = sizes.index(min(sizes))
        members[smallest].append(index)
        sizes[smallest] += parameters[index].nbytes
    return tuple(_fragment([parameters[i] for i in sorted(chosen)]) for chosen in members if chosen)


def _by_patterns(
    parameters: Sequence[Parameter],
    fragments: Sequence[Sequence[str]],
    aliases: Mapping[str, str],
    frozen: Sequence[str],
) -> tuple[Fragment, ...]:
    known = {parameter.name: parameter.name for parameter in parameters} | dict(aliases)
    claims: dict[str, tuple[int, str]] = {}
    for index, pattern in [
        (index, pattern) for index, group in enumerate(fragments) for pattern in group
    ]:
        matched = [name for name in known if fnmatchcase(name, pattern)]
        if not matched and not any(fnmatchcase(name, pattern) for name in frozen):
            raise ValueError(
                f"fragments: the pattern {pattern!r} matches no parameter. The names come from"
                f" named_parameters(), such as {_some(known)}. Correct the pattern or take it out."
            )
        for name in matched:
            first = claims.setdefault(known[name], (index, pattern))
            if first != (index, pattern):
                tied = "" if name == known[name] else f" (tied to {name!r})"
                raise ValueError(
                    f"fragments: the parameter {known[name]!r}{tied} is claimed by two patterns,"
                    f" {first[1]!r} of fragment {first[0]} and {pattern!r} of fragment {index}."
                    " Every parameter must be matched by exactly one. Narrow one of them."
                )
    left_out = [parameter.name for parameter in parameters if parameter.name not in claims]
    if left_out:
        raise ValueError(
            f"fragments: {len(left_out)} of {len(parameters)} trainable parameters match no"
            f" pattern: {_some(left_out)}. Every parameter must be in exactly one fragment. Add a"
            " pattern for them, or freeze them."
        )
    members: list[list[Parameter]] = [[] for _ in fragments]
    for parameter in parameters:
        members[claims[parameter.name][0]].append(parameter)
    return tuple(_fragment(member) for member in members if member)


def _some(names: Sequence[str] | Mapping[str, str], most: int = 5) -> str:
    shown = [repr(name) for name in list(names)[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _nbytes(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _fragment(parameters: Sequence[Parameter]) -> Fragment:
    return Fragment(tuple(p.name for p in parameters), tuple(p.nbytes for p in parameters))


# Parameters as matrices, for outer steps that see more than single values


def stack_of(
    shape: Sequence[int], groups: int | None = None, parts: int | None = None
) -> Stack | None:
    """Returns how a parameter is seen as matrices; None if every value of it is by itself.

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
        groups: The groups of the convolution that it belongs to; None if it belongs to none.
        parts: The number of matrices that a user asks for, along the first dimension, in place of
            that; 0 for none.

    Raises:
        ValueError: If the first dimension has no such parts.

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
            f"it has the shape {tuple(shape)}, whose first dimension has no {parts} equal parts"
        )
    part = [shape[0] // parts, *shape[1:]]
    if part[0] == 1:
        part = part[1:]
    rows = part[0] if part else 1
    columns = math.prod(part[1:])
    return Stack(parts, rows, columns) if min(rows, columns) > 1 else None


def _usual_parts(shape: Sequence[int], groups: int | None) -> int:
    if groups is not None:
        return groups if len(shape) > 1 else 0
    return {2: 1, 3: shape[0]}.get(len(shape), 0) if len(shape) > 1 else 0

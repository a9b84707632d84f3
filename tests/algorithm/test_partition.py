"""Fragments of ordinary models: blocks are found, assigned as asked, and every parameter is in exactly one fragment."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.algorithm.partition import Parameter, Partition, find_blocks, partition
from lightning_sdiloco.engine.shards import aliases, described, trainable, unwrapped
from tests.ranks import run_ranks

# Models


class Block(nn.Module):
    """A transformer block with a Sequential of its own inside, which must not be taken for the stack."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)})
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class GPT(nn.Module):
    def __init__(self, layers: int, vocabulary: int = 11, width: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Residual(nn.Module):
    """A basic block of a ResNet; the first of a stage has a shortcut of its own."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        if inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside))


class ResNet(nn.Module):
    """As in torchvision: four stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        for stage, (inside, outside) in enumerate([(4, 4), (4, 8), (8, 16), (16, 32)], start=1):
            setattr(self, f"layer{stage}", nn.Sequential(Residual(inside, outside), Residual(outside, outside)))
        self.fc = nn.Linear(32, 10)


def transformer(encoder: int = 3, decoder: int = 2) -> nn.Transformer:
    return nn.Transformer(8, 2, encoder, decoder, dim_feedforward=16, batch_first=True)


def mlp(layers: int, between: list[type[nn.Module]], bias: bool = True) -> nn.Sequential:
    """Linear layers with other modules between them."""
    width = 6
    parts: list[nn.Module] = [nn.Linear(5, width, bias)]
    for _ in range(layers - 1):
        parts += [kind(width) if kind is nn.BatchNorm1d else kind() for kind in between]
        parts.append(nn.Linear(width, width, bias))
    return nn.Sequential(*parts)


class Wrapped(nn.Module):
    """A model as a LightningModule holds it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def cut(model: nn.Module, *choices: Any) -> Partition:
    return partition(described(trainable(model)), *choices, aliases=aliases(model))


def blocks_of(model: nn.Module) -> list[set[str]]:
    """The parameters of each block."""
    return [set(names) for names in find_blocks(described(trainable(model)))]


def below(model: nn.Module, *prefixes: str) -> set[str]:
    """The parameters of some modules."""
    return {name for name in trainable(model) if any(name.startswith(f"{prefix}.") for prefix in prefixes)}


def fragments_of(cut: Partition) -> list[set[str]]:
    return [set(fragment.names) for fragment in cut.fragments]


# Blocks

LAYERS_OF_BOTH = [f"{part}.layers.{layer}" for part in ("encoder", "decoder") for layer in range(3)]
IN_A_SEQUENTIAL = nn.Sequential(nn.Embedding(11, 8), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(8, 11))
BLOCKS: list[tuple[nn.Module, list[tuple[str, ...]]]] = [
    (GPT(12), [(f"blocks.{layer}",) for layer in range(12)]),
    (GPT(12, tied=True), [(f"blocks.{layer}",) for layer in range(12)]),
    (ResNet(), [(f"layer{stage}.{block}",) for stage in range(1, 5) for block in range(2)]),
    (transformer(3, 3), [(layer,) for layer in LAYERS_OF_BOTH]),
    (mlp(4, [nn.ReLU]), [("0",), ("2",), ("4",), ("6",)]),
    (mlp(4, [nn.ReLU], bias=False), [("0",), ("2",), ("4",), ("6",)]),
    # A normalisation belongs to the layer before it.
    (mlp(3, [nn.BatchNorm1d, nn.ReLU, nn.Dropout]), [("0", "1"), ("4", "5"), ("8",)]),
    (IN_A_SEQUENTIAL, [(f"1.{layer}",) for layer in range(4)]),
]


@pytest.mark.parametrize(("model", "expected"), BLOCKS, ids=lambda value: type(value).__name__)
def test_the_blocks_of_a_model_are_found_also_inside_another_module_and_compiled(
    model: nn.Module, expected: list[tuple[str, ...]]
) -> None:
    held, compiled = Wrapped(model), torch.compile(model)
    assert blocks_of(model) == [below(model, *block) for block in expected]
    assert blocks_of(held) == [below(held, *(f"net.{prefix}" for prefix in block)) for block in expected]
    assert isinstance(compiled, nn.Module)
    assert blocks_of(compiled) == blocks_of(model)


def test_names_are_those_of_the_module_of_the_user_whatever_wraps_it_or_its_submodules() -> None:
    def function(rank: int, world_size: int) -> list[list[str]]:
        wrapped = [
            torch.compile(mlp(2, [nn.ReLU])),
            DistributedDataParallel(mlp(2, [nn.ReLU])),
            DistributedDataParallel(torch.compile(mlp(2, [nn.ReLU]))),
            torch.compile(DistributedDataParallel(mlp(2, [nn.ReLU]))),
        ]
        return [list(trainable(unwrapped(model))) for model in wrapped]

    assert run_ranks(function, 1) == [[["0.weight", "0.bias", "2.weight", "2.bias"]] * 4]
    model = GPT(4)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block)
    assert "blocks.0._orig_mod.norm.weight" in dict(model.named_parameters())
    assert cut(model) == cut(GPT(4))
    # What stands in the Sequential of the blocks need not be one.
    model = nn.Sequential(nn.Embedding(999, 8), *(Block() for _ in range(4)), nn.LayerNorm(8), nn.Linear(8, 999))
    blocks = set().union(*blocks_of(model))
    assert below(model, "1", "2", "3", "4") <= blocks
    assert not blocks & below(model, "0", "6")


def test_a_model_without_blocks_falls_back_to_balanced_which_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for model in (nn.Linear(4, 3), nn.LSTM(4, 5, num_layers=2), nn.Bilinear(3, 4, 5)):
        assert blocks_of(model) == []
        balanced = cut(model, "balanced")
        for fragments in ("strided", "sequential"):
            assert cut(model, fragments) == balanced._replace(fell_back=True)
        assert not balanced.fell_back
    assert not cut(GPT(4), "strided").fell_back
    engine = StreamingDiLoCo(nn.LSTM(4, 5), compression="fp32")
    (said,) = (record.getMessage() for record in caplog.records if "no repeated blocks" in record.getMessage())
    assert "fragments='strided:3'" in said
    assert f"{len(engine.fragments)} balanced fragments" in said


# Assignments


def test_strided_takes_turns_and_sequential_takes_neighbours() -> None:
    model = GPT(7)
    turns, neighbours = (fragments_of(cut(model, f"{name}:3")) for name in ("strided", "sequential"))
    for fragments, layers in ((turns, ([0, 3, 6], [1, 4], [2, 5])), (neighbours, ([0, 1, 2], [3, 4], [5, 6]))):
        assert fragments[:3] == [below(model, *(f"blocks.{layer}" for layer in own)) for own in layers]


@pytest.mark.parametrize("fragments", ["strided", "sequential"])
def test_the_number_of_blocks_is_the_most_and_the_rest_is_even(fragments: str) -> None:
    for layers in (2, 5, 7, 12):
        model = GPT(layers)
        blocks = blocks_of(model)
        for most in (1, 2, 3, 5, 100):
            found = fragments_of(cut(model, f"{fragments}:{most}"))
            counts = [count for own in found if (count := sum(block <= own for block in blocks))]
            assert sum(counts) == layers
            assert len(counts) == math.ceil(layers / most)
            assert max(counts) <= most
            assert max(counts) - min(counts) <= 1


def test_balanced_fragments_differ_by_no_more_than_one_tensor_and_a_number_is_theirs() -> None:
    balanced = cut(GPT(9), "balanced").fragments
    assert len(balanced) == len(cut(GPT(9), "strided:3").fragments)
    sizes = [fragment.nbytes for fragment in balanced]
    assert max(sizes) - min(sizes) <= max(size for fragment in balanced for size in fragment.sizes)
    for count in (1, 2, 5):
        sizes = [fragment.nbytes for fragment in cut(GPT(12), count).fragments]
        assert (len(sizes), max(sizes) <= 1.1 * min(sizes)) == (count, True)


@pytest.mark.parametrize("fragments", ["strided", "sequential"])
def test_what_stands_outside_the_blocks_has_fragments_of_its_own(fragments: str) -> None:
    for vocabulary in (2, 11, 300):
        model = GPT(4, vocabulary)
        found = cut(model, f"{fragments}:2").fragments
        inside = [one for one in found if below(model, "blocks") & set(one.names)]
        outside = [one for one in found if one not in inside]
        assert set().union(*(one.names for one in inside)) == below(model, "blocks")
        largest = max(one.nbytes for one in inside)
        assert all(one.nbytes <= largest or len(one.names) == 1 for one in outside)
        if vocabulary == 2:
            assert len(outside) == 1, "small ones share one"
        if vocabulary == 300:
            assert {("embedding.weight",), ("head.weight",)} <= {one.names for one in outside}, (
                "large ones travel alone"
            )


def test_what_stands_outside_shares_a_fragment_up_to_the_size_of_the_largest_one_of_blocks() -> None:
    blocks = [Parameter(f"blocks.{index}.weight", 16) for index in range(4)]
    for size, names in ((16, [("a", "b"), ("c",)]), (17, [("a",), ("b",), ("c",)])):
        outside = [Parameter(name, size) for name in "abc"]
        assert [one.names for one in partition([*blocks, *outside], "strided:2").fragments[2:]] == names


# Every parameter exactly once


@st.composite
def named_parameters(draw: st.DrawFn) -> list[Parameter]:
    """Names of any module tree: no name is the beginning of another."""
    part = st.sampled_from(["0", "1", "2", "10", "01", "layers", "weight", "bias", "a b", "net-1", "[x]*?", "é"])
    paths = draw(st.lists(st.lists(part, min_size=1, max_size=4).map(tuple), min_size=1, max_size=25, unique=True))
    leaves = [path for path in paths if not any(other[: len(path)] == path and other != path for other in paths)]
    return [Parameter(".".join(path), draw(st.integers(0, 50)), draw(st.integers(0, 3))) for path in leaves]


@settings(max_examples=200, deadline=None)
@given(
    parameters=named_parameters(),
    fragments=st.sampled_from(["strided", "sequential", "balanced"]),
    layers=st.integers(1, 6),
)
def test_every_parameter_is_in_exactly_one_fragment(parameters: list[Parameter], fragments: str, layers: int) -> None:
    cut = partition(parameters, fragments if fragments == "balanced" else f"{fragments}:{layers}")
    sizes = [(name, size) for f in cut.fragments for name, size in zip(f.names, f.sizes, strict=True)]
    assert sorted(sizes) == sorted((parameter.name, parameter.nbytes) for parameter in parameters)
    order = {parameter.name: index for index, parameter in enumerate(parameters)}
    for fragment in cut.fragments:
        assert fragment.names
        assert list(fragment.names) == sorted(fragment.names, key=order.__getitem__)
        assert fragment.nbytes == sum(fragment.sizes)

    names = [name for block in find_blocks(parameters) for name in block]
    assert len(names) == len(set(names))
    assert set(names) <= set(order)


@pytest.mark.parametrize("fragments", ["strided", "sequential", "balanced"])
def test_the_sizes_of_the_fragments_are_those_of_the_model(fragments: str) -> None:
    for model in (GPT(5), GPT(5, tied=True), ResNet(), mlp(5, [nn.BatchNorm1d, nn.ReLU]), nn.LSTM(4, 5)):
        sizes = {name: 4 * parameter.numel() for name, parameter in model.named_parameters()}
        found = [(n, size) for f in cut(model, fragments).fragments for n, size in zip(f.names, f.sizes, strict=True)]
        assert sorted(found) == sorted(sizes.items()), "a tied one once"


def test_frozen_parameters_are_left_alone_and_patterns_need_not_name_them() -> None:
    model = GPT(2)
    for module in (model.blocks[1], model.embedding, model.norm, model.head):
        module.requires_grad_(False)
    left = below(model, "blocks.0") | {"positions"}
    assert set().union(*fragments_of(cut(model))) == left
    assert set(StreamingDiLoCo(model, compression="fp32").outer_state_dict()) == left
    model.positions.requires_grad_(False)
    assert fragments_of(cut(model, [["blocks.0.*"]])) == [below(model, "blocks.0")]
    # A pattern may match frozen parameters only, and then makes no fragment.
    head, patterns = [Parameter("head.weight", 8), Parameter("head.bias", 4)], [["backbone.*"], ["head.*"]]
    (fragment,) = partition(head, patterns, frozen=["backbone.weight"]).fragments
    assert fragment.names == ("head.weight", "head.bias")
    with pytest.raises(ValueError, match=r"'backbone.\*' matches no parameter"):
        partition(head, patterns)


# Explicit patterns


@settings(max_examples=50, deadline=None)
@given(home=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_patterns_that_name_every_parameter_once_are_taken_as_they_are(home: list[int]) -> None:
    model = mlp(4, [nn.ReLU])
    used = sorted(set(home))
    wanted = [[name for name, chosen in zip(trainable(model), home, strict=True) if chosen == index] for index in used]
    assert [list(fragment.names) for fragment in cut(model, wanted).fragments] == wanted


def test_patterns_choose_the_fragments_and_their_order_and_any_name_of_a_tied_parameter() -> None:
    found = cut(mlp(4, [nn.ReLU]), [["6.*", "2.weight"], ["0.?eight", "2.bias"], ["[04].bias", "4.weight"]])
    assert [fragment.names for fragment in found.fragments] == [
        ("2.weight", "6.weight", "6.bias"),
        ("0.weight", "2.bias"),
        ("0.bias", "4.weight", "4.bias"),
    ]
    assert not found.fell_back
    rest = ["positions", "norm.*", "blocks.*"]
    for pattern in ("embedding.weight", "head.weight", "[eh]*.weight"):
        assert fragments_of(cut(GPT(2, tied=True), [rest, [pattern]]))[1] == {"embedding.weight"}


LIST = ("list of non-empty lists of patterns", "[['net.0.*'], ['net.1.*']]")
MALFORMED: list[Any] = [[], [[]], [["*"], []], ["*"], ["0.*", "2.*"], [[1]], [["*", None]], None, 3.0, [[["*"]]]]
UNKNOWN: list[Any] = ["striped", "", "Strided", "*", "strided:", "strided:0", "balanced:2", 0]
BY_TWO = ("'0.weight' is claimed by two patterns", "'0.*' of fragment 0", "exactly one", "Narrow one of them")
REFUSED: list[tuple[nn.Module, Any, tuple[str, ...]]] = [
    *((mlp(2, [nn.ReLU]), wrong, (f"fragments={wrong!r}", *LIST)) for wrong in MALFORMED),
    *(
        (mlp(2, [nn.ReLU]), wrong, (f"fragments={wrong!r} is unknown", "'strided:3' or 'sequential:3'", "[['net.0.*']"))
        for wrong in UNKNOWN
    ),
    (mlp(2, [nn.ReLU]), 5, ("fragments=5 is more than the 4 trainable tensors",)),
    (
        GPT(2, tied=True),
        [["embedding.*", "positions", "norm.*", "blocks.*"], ["head.*"]],
        ("fragments", "'embedding.weight'", "'head.weight'", "tied", "'embedding.*'", "'head.*'", "Narrow"),
    ),
    (Wrapped(mlp(2, [nn.ReLU])), [["NET.*"]], ("'NET.*'",)),
    (
        mlp(2, [nn.ReLU]),
        [["*"], ["3.*"]],
        ("the pattern '3.*' matches no parameter", "'0.weight'", "Correct the pattern"),
    ),
    *((mlp(2, [nn.ReLU]), both, BY_TWO) for both in ([["0.*"], ["*"]], [["0.*", "*"]], [["0.*"], ["0.*", "2.*"]])),
    (
        mlp(2, [nn.ReLU]),
        [["0.weight"], ["2.weight"]],
        ("2 of 4 trainable parameters match no pattern", "'0.bias', '2.bias'", "Add a pattern", "freeze"),
    ),
    (GPT(12), [["blocks.0.*"]], ("115 of 125", "and 110 more")),  # cut short
]


@pytest.mark.parametrize(("model", "fragments", "told"), REFUSED, ids=lambda value: repr(value)[:30])
def test_what_cannot_be_is_refused(model: nn.Module, fragments: Any, told: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="fragments") as caught:
        cut(model, fragments)
    message = str(caught.value)
    assert [part for part in told if part not in message] == []
    assert len(message) < 500

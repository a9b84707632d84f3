"""Fragments of ordinary models: blocks are found, assigned as asked, and every parameter is in
exactly one fragment.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.algorithm.partition import Parameter, Partition, find_blocks, partition
from lightning_sdiloco.engine.shards import aliases, described, trainable


class Block(nn.Module):
    """A transformer block with a Sequential of its own inside, which must not be taken for the
    stack.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )


class GPT(nn.Module):
    def __init__(self, layers: int, tied: bool = False, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.positions = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def residual(inside: int, outside: int) -> nn.Module:
    """A basic block of a ResNet; the first of a stage has a shortcut of its own."""
    conv = nn.Conv2d(inside, outside, 3, bias=False)
    norm = nn.BatchNorm2d(outside)
    block = nn.ModuleDict(
        {"conv1": conv, "bn1": norm, "conv2": nn.Conv2d(outside, outside, 3, bias=False)}
    )
    block["bn2"] = nn.BatchNorm2d(outside)
    if inside != outside:
        block["downsample"] = nn.Sequential(
            nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside)
        )
    return block


def resnet() -> nn.Module:
    """As in torchvision: four stages of two blocks."""
    model = nn.ModuleDict({"conv1": nn.Conv2d(3, 4, 7, bias=False), "bn1": nn.BatchNorm2d(4)})
    for stage, (inside, outside) in enumerate([(4, 4), (4, 8), (8, 16), (16, 32)], start=1):
        model[f"layer{stage}"] = nn.Sequential(
            residual(inside, outside), residual(outside, outside)
        )
    model["fc"] = nn.Linear(32, 10)
    return model


def mlp(layers: int, *between: type[nn.Module], bias: bool = True) -> nn.Sequential:
    """Linear layers with other modules between them."""
    parts: list[nn.Module] = [nn.Linear(5, 6, bias)]
    for _ in range(layers - 1):
        parts += [kind(6) if kind is nn.BatchNorm1d else kind() for kind in between]
        parts.append(nn.Linear(6, 6, bias))
    return nn.Sequential(*parts)


def cut(model: nn.Module, *choices: Any) -> Partition:
    return partition(described(trainable(model)), *choices, aliases=aliases(model))


def blocks_of(model: nn.Module) -> list[set[str]]:
    return [set(names) for names in find_blocks(described(trainable(model)))]


def below(model: nn.Module, *prefixes: str) -> set[str]:
    """The parameters of some modules."""
    return {
        name
        for name in trainable(model)
        if any(name.startswith(f"{prefix}.") for prefix in prefixes)
    }


def fragments_of(cut: Partition) -> list[set[str]]:
    return [set(fragment.names) for fragment in cut.fragments]


def test_blocks_are_found_in_wrapped_and_compiled_models_and_every_tensor_goes_once() -> None:
    of_both = [f"{part}.layers.{layer}" for part in ("encoder", "decoder") for layer in range(3)]
    stack = nn.Sequential(
        nn.Embedding(999, 8), *(Block() for _ in range(4)), nn.LayerNorm(8), nn.Linear(8, 999)
    )
    cases: list[tuple[nn.Module, list[str]]] = [
        (GPT(12), [f"blocks.{layer}" for layer in range(12)]),
        (GPT(12, tied=True), [f"blocks.{layer}" for layer in range(12)]),
        (resnet(), [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)]),
        (nn.Transformer(8, 2, 3, 3, dim_feedforward=16, batch_first=True), of_both),
        (mlp(4, nn.ReLU), ["0", "2", "4", "6"]),
        (mlp(4, nn.ReLU, bias=False), ["0", "2", "4", "6"]),
        # A normalisation belongs to the layer before it.
        (mlp(3, nn.BatchNorm1d, nn.ReLU, nn.Dropout), ["0 1", "4 5", "8"]),
        (
            nn.Sequential(nn.Embedding(11, 8), nn.Sequential(*(Block() for _ in range(4)))),
            [f"1.{n}" for n in range(4)],
        ),
        (
            stack,
            ["1", "2", "3", "4"],
        ),  # what stands in the Sequential of the blocks need not be one
        (nn.LSTM(4, 5, num_layers=2), []),
    ]
    for model, blocks in cases:
        held: Any = nn.ModuleDict({"net": model})
        assert blocks_of(model) == [below(model, *block.split()) for block in blocks]
        assert blocks_of(held) == [
            below(held, *(f"net.{own}" for own in block.split())) for block in blocks
        ]
        assert blocks_of(torch.compile(model)) == blocks_of(model)
        sizes = {name: 4 * parameter.numel() for name, parameter in model.named_parameters()}
        for fragments in ("strided", "sequential", "balanced"):
            found = [
                pair
                for own in cut(model, fragments).fragments
                for pair in zip(own.names, own.sizes, strict=True)
            ]
            assert sorted(found) == sorted(sizes.items()), "a tied one once"
    # Names are those of the user where submodules are compiled.
    model = GPT(4)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block)
    assert "blocks.0._orig_mod.norm.weight" in dict(model.named_parameters())
    assert cut(model) == cut(GPT(4))


def test_a_model_without_blocks_falls_back_to_balanced_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for model in (nn.Linear(4, 3), nn.LSTM(4, 5, num_layers=2), nn.Bilinear(3, 4, 5)):
        balanced = cut(model, "balanced")
        for fragments in ("strided", "sequential"):
            assert cut(model, fragments) == balanced._replace(fell_back=True)
        assert not balanced.fell_back
    assert not cut(GPT(4), "strided").fell_back
    engine = StreamingDiLoCo(nn.LSTM(4, 5), compression="fp32")
    (said,) = (
        record.getMessage()
        for record in caplog.records
        if "no repeated blocks" in record.getMessage()
    )
    assert "fragments='strided'" in said
    assert f"{len(engine.fragments)} balanced fragments" in said


@settings(max_examples=100, deadline=None)
@given(
    layers=st.lists(st.integers(1, 50), min_size=2, max_size=12),
    most=st.integers(1, 13),
    outside=st.lists(st.integers(0, 120), max_size=7),
)
def test_blocks_alternate_or_stay_adjacent_and_other_parameters_share_fragments(
    layers: list[int], most: int, outside: list[int]
) -> None:
    """Fragments of parameters outside the blocks are no larger than those of the blocks."""
    blocks = [Parameter(f"blocks.{n}.weight", size) for n, size in enumerate(layers)]
    others = [Parameter(f"outside {n}", size) for n, size in enumerate(outside)]
    count = math.ceil(len(layers) / most)
    for way in ("strided", "sequential"):
        found = partition([*blocks, *others], f"{way}:{most}").fragments
        homes = [
            next(n for n, own in enumerate(found) if block.name in own.names) for block in blocks
        ]
        assert homes == (
            [n % count for n in range(len(layers))] if way == "strided" else sorted(homes)
        )
        sizes = [homes.count(n) for n in range(count)]
        assert (sum(sizes), max(sizes) - min(sizes) <= 1, max(sizes) <= most) == (
            len(layers),
            True,
            True,
        )
        largest = max(own.nbytes for own in found[:count])
        shared = found[count:]
        assert [name for own in shared for name in own.names] == [other.name for other in others]
        assert all(own.nbytes <= largest or len(own.names) == 1 for own in shared)
        assert all(
            own.nbytes + after.sizes[0] > largest for own, after in itertools.pairwise(shared)
        )


def test_a_model_gets_about_eight_fragments_of_blocks_and_at_most_32() -> None:
    """A given number of blocks per fragment overrides both."""
    few = ((2, 2), (3, 3), (11, 11), (12, 6), (16, 8), (20, 10), (24, 8), (32, 11), (96, 32))
    for layers, count in (*few, (97, 25), (128, 32), (200, 29), (1500, 32)):
        blocks = [Parameter(f"blocks.{n}.weight", 4) for n in range(layers)]
        for way in ("strided", "sequential", "balanced"):
            assert len(partition(blocks, way).fragments) == count
        assert len(partition(blocks, "strided:3").fragments) == math.ceil(layers / 3)
    others = [Parameter(f"outside {n}", 1000) for n in range(200)]
    assert 32 <= len(partition([*blocks[:2], *others], "strided").fragments) <= 2 + 2 * 32
    assert len(partition([*blocks[:2], *others], "strided:1").fragments) == 2 + 200


def test_balanced_fragments_differ_by_no_more_than_one_tensor_and_a_number_is_theirs() -> None:
    as_many = len(cut(GPT(9), "strided").fragments)
    for layers, way, count, within in (
        (9, "balanced", as_many, 2),
        (12, 1, 1, 1),
        (12, 2, 2, 1.1),
        (12, 5, 5, 1.1),
    ):
        fragments = cut(GPT(layers), way).fragments
        sizes = [fragment.nbytes for fragment in fragments]
        assert (len(sizes), max(sizes) <= within * min(sizes)) == (count, True)
        assert max(sizes) - min(sizes) <= max(
            size for fragment in fragments for size in fragment.sizes
        )


@st.composite
def named_parameters(draw: st.DrawFn) -> list[Parameter]:
    """Names of any module tree: no name is the beginning of another."""
    part = st.sampled_from(
        ["0", "1", "2", "10", "01", "layers", "weight", "bias", "a b", "net-1", "[x]*?", "é"]
    )
    paths = draw(
        st.lists(
            st.lists(part, min_size=1, max_size=4).map(tuple), min_size=1, max_size=25, unique=True
        )
    )
    leaves = [
        path
        for path in paths
        if not any(other[: len(path)] == path and other != path for other in paths)
    ]
    return [
        Parameter(".".join(path), draw(st.integers(0, 50)), draw(st.integers(0, 3)))
        for path in leaves
    ]


@settings(max_examples=200, deadline=None)
@given(
    parameters=named_parameters(),
    way=st.sampled_from(["strided", "sequential", "balanced"]),
    most=st.integers(1, 6),
)
def test_every_parameter_is_in_exactly_one_fragment(
    parameters: list[Parameter], way: str, most: int
) -> None:
    found = partition(parameters, way if way == "balanced" else f"{way}:{most}").fragments
    sizes = [pair for one in found for pair in zip(one.names, one.sizes, strict=True)]
    assert sorted(sizes) == sorted((parameter.name, parameter.nbytes) for parameter in parameters)
    order = [parameter.name for parameter in parameters]
    for fragment in found:
        assert list(fragment.names) == sorted(fragment.names, key=order.index) != []
        assert fragment.nbytes == sum(fragment.sizes)
    names = [name for block in find_blocks(parameters) for name in block]
    assert sorted(names) == sorted(set(names) & set(order))


def test_patterns_choose_fragments_and_their_order_and_skip_frozen_parameters() -> None:
    """A tied parameter matches by any of its names."""
    found = cut(
        mlp(4, nn.ReLU), [["6.*", "2.weight"], ["0.?eight", "2.bias"], ["[04].bias", "4.weight"]]
    )
    assert [fragment.names for fragment in found.fragments] == [
        ("2.weight", "6.weight", "6.bias"),
        ("0.weight", "2.bias"),
        ("0.bias", "4.weight", "4.bias"),
    ]
    assert not found.fell_back
    rest = ["positions", "norm.*", "blocks.*"]
    for pattern in ("embedding.weight", "head.weight", "[eh]*.weight"):
        assert fragments_of(cut(GPT(2, tied=True), [rest, [pattern]]))[1] == {"embedding.weight"}
    # Frozen parameters are left alone, and need not be named.
    model = GPT(2)
    for module in (model.blocks[1], model.embedding, model.norm, model.head):
        module.requires_grad_(False)
    left = below(model, "blocks.0") | {"positions"}
    assert set().union(*fragments_of(cut(model))) == left
    assert set(StreamingDiLoCo(model, compression="fp32").outer_state_dict()) == left
    model.positions.requires_grad_(False)
    assert fragments_of(cut(model, [["blocks.0.*"]])) == [below(model, "blocks.0")]
    # A pattern may match frozen parameters only, and then makes no fragment.
    head = [Parameter("head.weight", 8), Parameter("head.bias", 4)]
    patterns = [["backbone.*"], ["head.*"]]
    (fragment,) = partition(head, patterns, frozen=["backbone.weight"]).fragments
    assert fragment.names == ("head.weight", "head.bias")
    with pytest.raises(ValueError, match=r"'backbone.\*' matches no parameter"):
        partition(head, patterns)


def test_impossible_fragments_are_refused() -> None:
    small = mlp(2, nn.ReLU)
    no_lists = ("list of non-empty lists of patterns", "[['net.0.*'], ['net.1.*']]")
    malformed: list[Any] = [
        [],
        [[]],
        [["*"], []],
        ["*"],
        ["0.*", "2.*"],
        [[1]],
        [["*", None]],
        None,
        3.0,
        [[["*"]]],
    ]
    unknown: list[Any] = ["striped", "", "Strided", "*", "strided:", "strided:0", "balanced:2", 0]
    by_two = (
        "'0.weight' is claimed by two patterns",
        "'0.*' of fragment 0",
        "exactly one",
        "Narrow one of them",
    )
    tied = [["embedding.*", "positions", "norm.*", "blocks.*"], ["head.*"]]
    both = "'strided' or 'sequential'"
    by_tied = ("'embedding.weight'", "'head.weight'", "tied", "'embedding.*'", "'head.*'", "Narrow")
    cases: list[tuple[nn.Module, Any, tuple[str, ...]]] = [
        *((small, wrong, (f"fragments={wrong!r}", *no_lists)) for wrong in malformed),
        *(
            (small, wrong, (f"fragments={wrong!r} is unknown", both, "[['net.0.*']"))
            for wrong in unknown
        ),
        (small, 5, ("fragments=5 is more than the 4 trainable tensors",)),
        (GPT(2, tied=True), tied, by_tied),
        (small, [["NET.*"]], ("'NET.*'",)),
        (
            small,
            [["*"], ["3.*"]],
            ("the pattern '3.*' matches no parameter", "'0.weight'", "Correct the pattern"),
        ),
        *(
            (small, twice, by_two)
            for twice in ([["0.*"], ["*"]], [["0.*", "*"]], [["0.*"], ["0.*", "2.*"]])
        ),
        (
            small,
            [["0.weight"], ["2.weight"]],
            ("2 of 4 trainable", "'0.bias', '2.bias'", "Add a pattern", "freeze"),
        ),
        (GPT(12), [["blocks.0.*"]], ("115 of 125", "and 110 more")),  # cut short
    ]
    for model, fragments, told in cases:
        with pytest.raises(ValueError, match="fragments") as caught:
            cut(model, fragments)
        message = str(caught.value)
        assert [part for part in told if part not in message] == [], fragments
        assert len(message) < 500

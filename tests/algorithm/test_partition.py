"""Fragments of ordinary models: blocks are found, assigned as asked, and every parameter is in
exactly one fragment.
"""

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.algorithm.partition import (
    Fragment,
    Parameter,
    Partition,
    find_blocks,
    partition,
)
from lightning_sdiloco.engine.shards import aliases, described, trainable

WAYS = ("strided", "sequential", "balanced")


class Block(nn.Module):
    """A transformer block with a Sequential inside, which must not be taken for the stack."""

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


def convolution(inside: int, outside: int, size: int) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, size, bias=False)


def residual(inside: int, outside: int) -> nn.Module:
    """A basic block of a ResNet; the first of a stage has a shortcut of its own."""
    block = nn.ModuleDict()
    block["conv1"] = convolution(inside, outside, 3)
    block["bn1"] = nn.BatchNorm2d(outside)
    block["conv2"] = convolution(outside, outside, 3)
    block["bn2"] = nn.BatchNorm2d(outside)
    if inside != outside:
        shortcut = convolution(inside, outside, 1)
        block["downsample"] = nn.Sequential(shortcut, nn.BatchNorm2d(outside))
    return block


def resnet() -> nn.Module:
    """As in torchvision: four stages of two blocks."""
    model = nn.ModuleDict({"conv1": convolution(3, 4, 7), "bn1": nn.BatchNorm2d(4)})
    for stage, (inside, outside) in enumerate([(4, 4), (4, 8), (8, 16), (16, 32)], start=1):
        first_block = residual(inside, outside)
        model[f"layer{stage}"] = nn.Sequential(first_block, residual(outside, outside))
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


def below(model: nn.Module, *modules: str) -> set[str]:
    """The parameters of some modules."""
    prefixes = tuple(f"{module}." for module in modules)
    return {name for name in trainable(model) if name.startswith(prefixes)}


def fragments_of(cut: Partition) -> list[set[str]]:
    return [set(fragment.names) for fragment in cut.fragments]


def parameter_sizes(cut: Partition) -> list[tuple[str, int]]:
    """The parameters of all fragments, with their bytes."""
    sizes = list[tuple[str, int]]()
    for fragment in cut.fragments:
        sizes += zip(fragment.names, fragment.sizes, strict=True)
    return sizes


def transformer_blocks() -> list[Block]:
    return [Block() for _ in range(4)]


TWELVE = [f"blocks.{layer}" for layer in range(12)]
MODELS: dict[str, tuple[nn.Module, list[str]]] = {
    # With the modules of each block.
    "gpt": (GPT(12), TWELVE),
    "tied gpt": (GPT(12, tied=True), TWELVE),
    "resnet": (resnet(), [f"layer{number // 2}.{number % 2}" for number in range(2, 10)]),
    "encoder and decoder": (
        nn.Transformer(8, 2, 3, 3, dim_feedforward=16, batch_first=True),
        [f"encoder.layers.{n}" for n in range(3)] + [f"decoder.layers.{n}" for n in range(3)],
    ),
    "mlp": (mlp(4, nn.ReLU), ["0", "2", "4", "6"]),
    "mlp without biases": (mlp(4, nn.ReLU, bias=False), ["0", "2", "4", "6"]),
    # A normalisation belongs to the layer before it.
    "normalised mlp": (mlp(3, nn.BatchNorm1d, nn.ReLU, nn.Dropout), ["0 1", "4 5", "8"]),
    "nested": (
        nn.Sequential(nn.Embedding(11, 8), nn.Sequential(*transformer_blocks())),
        ["1.0", "1.1", "1.2", "1.3"],
    ),
    # Other modules in the Sequential of the blocks need not be blocks.
    "flat": (
        nn.Sequential(
            nn.Embedding(999, 8), *transformer_blocks(), nn.LayerNorm(8), nn.Linear(8, 999)
        ),
        ["1", "2", "3", "4"],
    ),
    "lstm": (nn.LSTM(4, 5, num_layers=2), []),
}


@pytest.mark.parametrize(("model", "blocks"), MODELS.values(), ids=MODELS)
def test_blocks_are_found_in_wrapped_and_compiled_models_and_every_tensor_goes_once(
    model: nn.Module, blocks: list[str]
) -> None:
    assert blocks_of(model) == [below(model, *block.split()) for block in blocks]
    assert blocks_of(torch.compile(model)) == blocks_of(model)
    wrapped = nn.ModuleDict({"net": model})
    expected = []
    for block in blocks:
        modules = [f"net.{module}" for module in block.split()]
        expected.append(below(wrapped, *modules))
    assert blocks_of(wrapped) == expected
    sizes = {name: 4 * parameter.numel() for name, parameter in model.named_parameters()}
    for way in WAYS:
        partition_sizes = parameter_sizes(cut(model, way))
        assert sorted(partition_sizes) == sorted(sizes.items()), "a tied one once"


def test_thousands_of_blocks_are_found_in_less_than_a_second() -> None:
    parameters = [Parameter(f"layers.{layer}.weight", 4, 2) for layer in range(5000)]
    start = time.process_time()
    assert len(find_blocks(parameters)) == 5000
    assert time.process_time() - start < 1


def test_names_are_those_of_the_user_where_submodules_are_compiled() -> None:
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
    (warning,) = (text for text in caplog.messages if "requires repeated blocks" in text)
    assert "fragments='strided'" in warning
    assert f"{len(engine.fragments)} balanced fragments" in warning


def parameters_of(name: str, sizes: Iterable[int]) -> list[Parameter]:
    return [Parameter(name.format(number), size) for number, size in enumerate(sizes)]


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
    blocks = parameters_of("blocks.{}.weight", layers)
    outer = parameters_of("outside {}", outside)
    count = math.ceil(len(layers) / most)
    for way in ("strided", "sequential"):
        fragments = partition([*blocks, *outer], f"{way}:{most}").fragments
        homes = []
        for block in blocks:
            (home,) = (n for n, fragment in enumerate(fragments) if block.name in fragment.names)
            homes.append(home)
        strided = [n % count for n in range(len(layers))]
        assert homes == (strided if way == "strided" else sorted(homes))
        block_counts = [homes.count(n) for n in range(count)]
        assert sum(block_counts) == len(layers)
        assert max(block_counts) - min(block_counts) <= 1
        assert max(block_counts) <= most
        check_fragments_outside_the_blocks(fragments[:count], fragments[count:], outer)


def check_fragments_outside_the_blocks(
    of_blocks: Sequence[Fragment], shared: Sequence[Fragment], outer: list[Parameter]
) -> None:
    largest = max(fragment.nbytes for fragment in of_blocks)
    names = itertools.chain.from_iterable(fragment.names for fragment in shared)
    assert list(names) == [parameter.name for parameter in outer]
    assert all(fragment.nbytes <= largest or len(fragment.names) == 1 for fragment in shared)
    for fragment, following in itertools.pairwise(shared):
        assert fragment.nbytes + following.sizes[0] > largest


# Numbers of fragments, by numbers of layers.
FRAGMENT_COUNTS = {2: 2, 3: 3, 11: 11, 12: 6, 16: 8, 20: 10, 24: 8, 32: 11, 96: 32}
FRAGMENT_COUNTS |= {97: 25, 128: 32, 200: 29, 1500: 32}


def test_a_model_gets_about_eight_fragments_of_blocks_and_at_most_32() -> None:
    """A given number of blocks per fragment overrides both."""
    for layers, count in FRAGMENT_COUNTS.items():
        blocks = parameters_of("blocks.{}.weight", [4] * layers)
        for way in WAYS:
            assert len(partition(blocks, way).fragments) == count
        assert len(partition(blocks, "strided:3").fragments) == math.ceil(layers / 3)
    few_blocks = parameters_of("blocks.{}.weight", [4] * 2)
    parameters = [*few_blocks, *parameters_of("outside {}", [1000] * 200)]
    assert 32 <= len(partition(parameters, "strided").fragments) <= 2 + 2 * 32
    assert len(partition(parameters, "strided:1").fragments) == 2 + 200


def test_balanced_fragments_differ_by_no_more_than_one_tensor_and_a_number_is_theirs() -> None:
    strided_count = len(cut(GPT(9), "strided").fragments)
    check_balance(GPT(9), "balanced", strided_count, ratio=2)
    check_balance(GPT(12), 1, 1, ratio=1)
    check_balance(GPT(12), 2, 2, ratio=1.1)
    check_balance(GPT(12), 5, 5, ratio=1.1)


def check_balance(model: nn.Module, way: Any, count: int, ratio: float) -> None:
    """The largest fragment is larger than the smallest one by a ratio, and a tensor, at most."""
    fragments = cut(model, way).fragments
    sizes = [fragment.nbytes for fragment in fragments]
    largest_tensor = max(max(fragment.sizes) for fragment in fragments)
    assert len(sizes) == count
    assert max(sizes) <= ratio * min(sizes)
    assert max(sizes) - min(sizes) <= largest_tensor


PARTS = ["0", "1", "2", "10", "01", "layers", "weight", "bias", "a b", "net-1", "[x]*?", "é"]
PATHS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(".".join)


@st.composite
def named_parameters(draw: st.DrawFn) -> list[Parameter]:
    """Names of any module tree: a leaf is not a part of the path of another one."""
    paths = draw(st.lists(PATHS, min_size=1, max_size=25, unique=True))
    parameters = []
    for path in paths:
        if not any(longer.startswith(f"{path}.") for longer in paths):
            parameters.append(Parameter(path, draw(st.integers(0, 50)), draw(st.integers(0, 3))))
    return parameters


@settings(max_examples=200, deadline=None)
@given(parameters=named_parameters(), way=st.sampled_from(WAYS), most=st.integers(1, 6))
def test_every_parameter_is_in_exactly_one_fragment(
    parameters: list[Parameter], way: str, most: int
) -> None:
    parts = partition(parameters, way if way == "balanced" else f"{way}:{most}")
    sizes = [(parameter.name, parameter.nbytes) for parameter in parameters]
    assert sorted(parameter_sizes(parts)) == sorted(sizes)
    order = [parameter.name for parameter in parameters]
    for fragment in parts.fragments:
        assert list(fragment.names) == sorted(fragment.names, key=order.index) != []
        assert fragment.nbytes == sum(fragment.sizes)
    names = list(itertools.chain.from_iterable(find_blocks(parameters)))
    assert sorted(names) == sorted(set(names) & set(order))


def test_patterns_choose_fragments_and_their_order_and_skip_frozen_parameters() -> None:
    """A tied parameter matches by any of its names."""
    patterns = [["6.*", "2.weight"], ["0.?eight", "2.bias"], ["[04].bias", "4.weight"]]
    parts = cut(mlp(4, nn.ReLU), patterns)
    assert [fragment.names for fragment in parts.fragments] == [
        ("2.weight", "6.weight", "6.bias"),
        ("0.weight", "2.bias"),
        ("0.bias", "4.weight", "4.bias"),
    ]
    assert not parts.fell_back
    first_fragment = ["positions", "norm.*", "blocks.*"]
    for pattern in ("embedding.weight", "head.weight", "[eh]*.weight"):
        parts = cut(GPT(2, tied=True), [first_fragment, [pattern]])
        assert fragments_of(parts)[1] == {"embedding.weight"}
    # Frozen parameters are left alone, and need not be named.
    model = GPT(2)
    for module in (model.blocks[1], model.embedding, model.norm, model.head):
        module.requires_grad_(False)
    unfrozen = below(model, "blocks.0") | {"positions"}
    assert set().union(*fragments_of(cut(model))) == unfrozen
    assert set(StreamingDiLoCo(model, compression="fp32").outer_state_dict()) == unfrozen
    model.positions.requires_grad_(False)
    assert fragments_of(cut(model, [["blocks.0.*"]])) == [below(model, "blocks.0")]


def test_a_pattern_of_frozen_parameters_only_makes_no_fragment() -> None:
    head = [Parameter("head.weight", 8), Parameter("head.bias", 4)]
    patterns = [["backbone.*"], ["head.*"]]
    (fragment,) = partition(head, patterns, frozen=["backbone.weight"]).fragments
    assert fragment.names == ("head.weight", "head.bias")
    with pytest.raises(ValueError, match=r"'backbone.\*' matches no parameter"):
        partition(head, patterns)


def refused(model: nn.Module, fragments: Any, *parts: str) -> None:
    """Checks that fragments are refused, with a message that has these parts and is short."""
    with pytest.raises(ValueError, match="fragments") as caught:
        cut(model, fragments)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], fragments
    assert len(message) < 500


MALFORMED: list[Any] = [
    *([], [[]], [["*"], []], ["*"], ["0.*", "2.*"]),
    *([[1]], [["*", None]], None, 3.0, [[["*"]]]),
]
UNKNOWN: list[Any] = ["striped", "", "Strided", "*", "strided:", "strided:0", "balanced:2", 0]


def test_impossible_fragments_are_refused() -> None:
    small = mlp(2, nn.ReLU)
    for fragments in MALFORMED:
        lists = "[['net.0.*'], ['net.1.*']]"
        text = f"fragments={fragments!r}"
        refused(small, fragments, text, "list of non-empty lists of patterns", lists)
    for fragments in UNKNOWN:
        text = f"fragments={fragments!r} is unknown"
        refused(small, fragments, text, "'strided' or 'sequential'", "[['net.0.*']")
    refused(small, 5, "fragments=5 exceeds the number of trainable tensors in the model")
    refused(small, [["NET.*"]], "'NET.*'")
    unmatched = "the pattern '3.*' matches no parameter"
    refused(small, [["*"], ["3.*"]], unmatched, "'0.weight'", "Correct the pattern")
    for fragments in ([["0.*"], ["*"]], [["0.*", "*"]], [["0.*"], ["0.*", "2.*"]]):
        claimed = "'0.weight' is matched by two patterns"
        refused(
            small,
            fragments,
            claimed,
            "'0.*' of fragment 0",
            "exactly one",
            "Narrow one of the patterns",
        )
    uncovered = ("2 of 4 trainable", "'0.bias', '2.bias'")
    refused(small, [["0.weight"], ["2.weight"]], *uncovered, "Add patterns", "freeze")
    tied = [["embedding.*", "positions", "norm.*", "blocks.*"], ["head.*"]]
    names = ("'embedding.weight'", "'head.weight'", "'embedding.*'", "'head.*'")
    refused(GPT(2, tied=True), tied, *names, "tied", "Narrow")
    refused(GPT(12), [["blocks.0.*"]], "115 of 125", "and 110 more")  # cut short

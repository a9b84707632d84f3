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
from lightning_sdiloco.algorithm.partition import Fragment, Parameter, Partition, find_blocks, partition
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


# What is read of them


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


def assert_blocks(model: nn.Module, *prefixes: str | tuple[str, ...]) -> None:
    """The blocks of a model are exactly these modules; also inside another module, and under torch.compile."""
    expected = [(prefix,) if isinstance(prefix, str) else prefix for prefix in prefixes]
    assert blocks_of(model) == [below(model, *block) for block in expected]
    held = Wrapped(model)
    assert blocks_of(held) == [below(held, *(f"net.{prefix}" for prefix in block)) for block in expected]
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)
    assert blocks_of(compiled) == [below(model, *block) for block in expected]


# Blocks


@pytest.mark.parametrize("tied", [False, True])
def test_the_blocks_of_a_gpt_are_its_layers_and_not_the_sequential_inside(tied: bool) -> None:
    assert_blocks(GPT(12, tied=tied), *(f"blocks.{layer}" for layer in range(12)))


def test_the_blocks_of_a_resnet_are_those_of_its_stages() -> None:
    assert_blocks(ResNet(), *(f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)))


def test_the_blocks_of_an_encoder_and_a_decoder_are_the_layers_of_both() -> None:
    encoder, decoder = ([f"{part}.layers.{layer}" for layer in range(3)] for part in ("encoder", "decoder"))
    assert_blocks(transformer(3, 3), *encoder, *decoder)


@pytest.mark.parametrize("bias", [True, False])
def test_the_blocks_of_an_mlp_are_its_layers(bias: bool) -> None:
    assert_blocks(mlp(4, [nn.ReLU], bias), "0", "2", "4", "6")


def test_a_normalisation_belongs_to_the_layer_before_it() -> None:
    model = mlp(3, [nn.BatchNorm1d, nn.ReLU, nn.Dropout])
    assert_blocks(model, ("0", "1"), ("4", "5"), "8")


def test_blocks_between_an_embedding_and_a_head_in_a_nested_sequential() -> None:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(8, 11))
    assert_blocks(model, *(f"1.{layer}" for layer in range(4)))


def test_an_embedding_and_a_head_in_the_sequential_of_the_blocks_stand_outside_them() -> None:
    model = nn.Sequential(nn.Embedding(999, 8), *(Block() for _ in range(4)), nn.LayerNorm(8), nn.Linear(8, 999))
    blocks = set().union(*blocks_of(model))
    assert below(model, "1", "2", "3", "4") <= blocks
    assert not blocks & below(model, "0", "6")


def test_blocks_in_which_every_submodule_is_compiled() -> None:
    model = GPT(4)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block)
    assert "blocks.0._orig_mod.norm.weight" in dict(model.named_parameters())
    assert blocks_of(model) == blocks_of(GPT(4))
    assert cut(model) == cut(GPT(4))


def test_names_are_those_of_the_module_of_the_user_whatever_wraps_it() -> None:
    def function(rank: int, world_size: int) -> list[list[str]]:
        wrapped = [
            torch.compile(mlp(2, [nn.ReLU])),
            DistributedDataParallel(mlp(2, [nn.ReLU])),
            DistributedDataParallel(torch.compile(mlp(2, [nn.ReLU]))),
            torch.compile(DistributedDataParallel(mlp(2, [nn.ReLU]))),
        ]
        return [list(trainable(unwrapped(model))) for model in wrapped]

    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert run_ranks(function, 1) == [[names] * 4]


@pytest.mark.parametrize("model", [nn.Linear(4, 3), nn.LSTM(4, 5, num_layers=2), nn.Bilinear(3, 4, 5)])
@pytest.mark.parametrize("fragments", ["strided", "sequential"])
def test_a_model_without_blocks_falls_back_to_balanced(model: nn.Module, fragments: str) -> None:
    assert blocks_of(model) == []
    fallen = cut(model, fragments)
    assert fallen.fell_back
    assert fallen.fragments == cut(model, "balanced").fragments


def test_balanced_on_request_is_no_fall_back() -> None:
    assert not cut(nn.LSTM(4, 5), "balanced").fell_back
    assert not cut(GPT(4), "balanced").fell_back
    assert not cut(GPT(4), "strided").fell_back


def test_the_fall_back_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = StreamingDiLoCo(nn.LSTM(4, 5), compression="fp32")
    said = [record.getMessage() for record in caplog.records if "no repeated blocks" in record.getMessage()]
    assert len(said) == 1
    assert "fragments='strided:3'" in said[0]
    assert f"{len(engine.fragments)} balanced fragments" in said[0]


# Assignments


def test_strided_puts_block_l_into_fragment_l_modulo_p() -> None:
    model = GPT(7)
    fragments = fragments_of(cut(model, "strided:3"))
    assert fragments[0] == below(model, "blocks.0", "blocks.3", "blocks.6")
    assert fragments[1] == below(model, "blocks.1", "blocks.4")
    assert fragments[2] == below(model, "blocks.2", "blocks.5")


def test_sequential_puts_neighbours_together() -> None:
    model = GPT(6)
    fragments = fragments_of(cut(model, "sequential:3"))
    assert fragments[0] == below(model, "blocks.0", "blocks.1", "blocks.2")
    assert fragments[1] == below(model, "blocks.3", "blocks.4", "blocks.5")


@pytest.mark.parametrize("fragments", ["strided", "sequential"])
@pytest.mark.parametrize("layers", [2, 5, 7, 12])
@pytest.mark.parametrize("most", [1, 2, 3, 5, 100])
def test_the_number_of_blocks_is_the_most_and_the_rest_is_even(fragments: str, layers: int, most: int) -> None:
    model = GPT(layers)
    blocks = blocks_of(model)
    counts = [
        sum(block <= fragment for block in blocks) for fragment in fragments_of(cut(model, f"{fragments}:{most}"))
    ]
    counts = [count for count in counts if count]
    assert sum(counts) == layers
    assert len(counts) == math.ceil(layers / most)
    assert max(counts) <= most
    assert max(counts) - min(counts) <= 1


def test_sequential_fragments_keep_the_order_of_the_layers() -> None:
    model = GPT(7)
    fragments = fragments_of(cut(model, "sequential:3"))
    home = [
        next(i for i, names in enumerate(fragments) if f"blocks.{layer}.norm.weight" in names) for layer in range(7)
    ]
    assert home == sorted(home)


def test_balanced_fragments_differ_by_no_more_than_one_tensor() -> None:
    model = GPT(9)
    balanced = cut(model, "balanced").fragments
    assert len(balanced) == len(cut(model, "strided:3").fragments)
    sizes = [fragment.nbytes for fragment in balanced]
    assert max(sizes) - min(sizes) <= max(size for fragment in balanced for size in fragment.sizes)


# Parameters outside the blocks


def outside_of(model: nn.Module, cut: Partition) -> tuple[list[Fragment], list[Fragment]]:
    """The fragments of blocks, and the others."""
    blocks = set().union(*blocks_of(model))
    inside = [fragment for fragment in cut.fragments if blocks & set(fragment.names)]
    return inside, [fragment for fragment in cut.fragments if fragment not in inside]


@pytest.mark.parametrize("vocabulary", [2, 11, 300])
@pytest.mark.parametrize("fragments", ["strided", "sequential"])
def test_what_stands_outside_the_blocks_has_fragments_of_its_own(vocabulary: int, fragments: str) -> None:
    model = GPT(4, vocabulary)
    inside, outside = outside_of(model, cut(model, f"{fragments}:2"))
    assert set().union(*(fragment.names for fragment in inside)) == below(model, "blocks")
    names = {"embedding.weight", "positions", "norm.weight", "norm.bias", "head.weight"}
    assert set().union(*(fragment.names for fragment in outside)) == names
    largest = max(fragment.nbytes for fragment in inside)
    assert all(fragment.nbytes <= largest or len(fragment.names) == 1 for fragment in outside)


def test_an_embedding_larger_than_the_blocks_travels_alone() -> None:
    cut_ = cut(GPT(4, vocabulary=300), "strided:2")
    assert {"embedding.weight"} in fragments_of(cut_)
    assert {"head.weight"} in fragments_of(cut_)


def test_small_parameters_outside_share_one_fragment() -> None:
    model = GPT(4, vocabulary=2)
    _, outside = outside_of(model, cut(model, "strided:2"))
    assert len(outside) == 1


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


@settings(max_examples=100, deadline=None)
@given(parameters=named_parameters())
def test_blocks_do_not_overlap(parameters: list[Parameter]) -> None:
    names = [name for block in find_blocks(parameters) for name in block]
    assert len(names) == len(set(names))
    assert set(names) <= {parameter.name for parameter in parameters}


MODELS = [GPT(5), GPT(5, tied=True), ResNet(), transformer(), mlp(5, [nn.BatchNorm1d, nn.ReLU]), nn.LSTM(4, 5)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("fragments", ["strided", "sequential", "balanced"])
def test_the_sizes_of_the_fragments_are_those_of_the_model(model: nn.Module, fragments: str) -> None:
    sizes = {name: 4 * parameter.numel() for name, parameter in model.named_parameters()}
    found = {name: size for f in cut(model, fragments).fragments for name, size in zip(f.names, f.sizes, strict=True)}
    assert found == sizes


def test_a_number_is_that_of_the_fragments_of_equal_size() -> None:
    model = GPT(12)
    for count in (1, 2, 5):
        fragments = cut(model, count).fragments
        assert len(fragments) == count
        assert max(one.nbytes for one in fragments) <= 1.1 * min(one.nbytes for one in fragments)
    assert "fragments=5 is more than the 4 trainable tensors" in refusal(mlp(2, [nn.ReLU]), 5)


# Frozen and tied


def test_frozen_parameters_are_left_alone() -> None:
    model = GPT(4)
    left = set(trainable(model)) - below(model, "blocks.2", "embedding")
    model.blocks[2].requires_grad_(False)
    model.embedding.requires_grad_(False)
    names = set().union(*fragments_of(cut(model)))
    assert names == left
    engine = StreamingDiLoCo(model, compression="fp32")
    assert set(engine.outer_state_dict()) == names


def test_patterns_need_not_name_what_is_frozen() -> None:
    model = GPT(2)
    for module in (model.embedding, model.norm, model.head):
        module.requires_grad_(False)
    model.positions.requires_grad_(False)
    assert fragments_of(cut(model, [["blocks.0.*"], ["blocks.1.*"]])) == [
        below(model, "blocks.0"),
        below(model, "blocks.1"),
    ]


def test_a_tied_parameter_travels_once() -> None:
    names = [name for fragment in cut(GPT(4, tied=True)).fragments for name in fragment.names]
    assert names.count("embedding.weight") == 1
    assert "head.weight" not in names


@pytest.mark.parametrize("pattern", ["embedding.weight", "head.weight", "[eh]*.weight"])
def test_a_pattern_may_use_any_name_of_a_tied_parameter(pattern: str) -> None:
    rest = ["positions", "norm.*", "blocks.*"]
    assert fragments_of(cut(GPT(2, tied=True), [rest, [pattern]]))[1] == {"embedding.weight"}


def test_two_fragments_cannot_claim_one_tied_parameter_by_its_two_names() -> None:
    message = refusal(GPT(2, tied=True), [["embedding.*", "positions", "norm.*", "blocks.*"], ["head.*"]])
    for part in ("fragments", "'embedding.weight'", "'head.weight'", "tied", "'embedding.*'", "'head.*'", "Narrow"):
        assert part in message


# Explicit patterns


def refusal(model: nn.Module, fragments: Any) -> str:
    with pytest.raises(ValueError, match="fragments") as caught:
        cut(model, fragments)
    return str(caught.value)


def test_patterns_choose_the_fragments_and_their_order() -> None:
    model = mlp(4, [nn.ReLU])
    cut_ = cut(model, [["6.*", "2.weight"], ["0.?eight", "2.bias"], ["[04].bias", "4.weight"]])
    assert [fragment.names for fragment in cut_.fragments] == [
        ("2.weight", "6.weight", "6.bias"),
        ("0.weight", "2.bias"),
        ("0.bias", "4.weight", "4.bias"),
    ]
    assert not cut_.fell_back


def test_patterns_distinguish_upper_and_lower_case() -> None:
    assert "'NET.*'" in refusal(Wrapped(mlp(2, [nn.ReLU])), [["NET.*"]])


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    message = refusal(mlp(2, [nn.ReLU]), [["*"], ["3.*"]])
    for part in ("the pattern '3.*' matches no parameter", "'0.weight'", "Correct the pattern"):
        assert part in message


@pytest.mark.parametrize("fragments", [[["0.*"], ["*"]], [["0.*", "*"]], [["0.*"], ["0.*", "2.*"]]])
def test_two_patterns_that_claim_one_parameter_are_refused(fragments: list[list[str]]) -> None:
    message = refusal(mlp(2, [nn.ReLU]), fragments)
    for part in ("'0.weight' is claimed by two patterns", "'0.*' of fragment 0", "exactly one", "Narrow one of them"):
        assert part in message


def test_parameters_left_out_are_refused_by_name() -> None:
    message = refusal(mlp(2, [nn.ReLU]), [["0.weight"], ["2.weight"]])
    for part in ("2 of 4 trainable parameters match no pattern", "'0.bias', '2.bias'", "Add a pattern", "freeze"):
        assert part in message


def test_a_long_list_of_parameters_left_out_is_cut_short() -> None:
    message = refusal(GPT(12), [["blocks.0.*"]])
    assert len(message) < 500
    left_out = len(trainable(GPT(12))) - len(below(GPT(12), "blocks.0"))
    assert f"{left_out} of {len(trainable(GPT(12)))}" in message
    assert f"and {left_out - 5} more" in message


MALFORMED: list[Any] = [[], [[]], [["*"], []], ["*"], ["0.*", "2.*"], [[1]], [["*", None]], None, 3.0, [[["*"]]]]


@pytest.mark.parametrize("fragments", MALFORMED, ids=repr)
def test_what_is_not_a_list_of_lists_of_patterns_is_refused(fragments: Any) -> None:
    message = refusal(mlp(2, [nn.ReLU]), fragments)
    for part in (f"fragments={fragments!r}", "list of non-empty lists of patterns", "[['net.0.*'], ['net.1.*']]"):
        assert part in message


@pytest.mark.parametrize("fragments", ["striped", "", "Strided", "*", "strided:", "strided:0", "balanced:2", 0])
def test_an_unknown_name_is_refused(fragments: Any) -> None:
    message = refusal(mlp(2, [nn.ReLU]), fragments)
    for part in (f"fragments={fragments!r} is unknown", "'strided:3' or 'sequential:3'", "[['net.0.*']"):
        assert part in message


@settings(max_examples=50, deadline=None)
@given(home=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_patterns_that_name_every_parameter_once_are_taken_as_they_are(home: list[int]) -> None:
    model = mlp(4, [nn.ReLU])
    used = sorted(set(home))
    wanted = [[name for name, chosen in zip(trainable(model), home, strict=True) if chosen == index] for index in used]
    assert [list(fragment.names) for fragment in cut(model, wanted).fragments] == wanted


def test_a_pattern_may_match_frozen_parameters_only_and_then_makes_no_fragment() -> None:
    head = [Parameter("head.weight", 8), Parameter("head.bias", 4)]
    patterns = [["backbone.*"], ["head.*"]]
    cut = partition(head, patterns, frozen=["backbone.weight"])
    assert [fragment.names for fragment in cut.fragments] == [("head.weight", "head.bias")]
    with pytest.raises(ValueError, match=r"'backbone.\*' matches no parameter"):
        partition(head, patterns)

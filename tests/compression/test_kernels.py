"""Encoding and the mean give the same bits eagerly and compiled into one pass, whatever the values."""

import shutil
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.compression import (
    COMPRESSIONS,
    FP4,
    ByLink,
    Compression,
    ErrorFeedback,
    Float32,
    Int2,
    Int4,
    RandomBlock,
    RandomK,
    Threshold,
    TopK,
    blockwise,
    casts,
    kernels,
    random_k,
    resolve,
    topk,
)
from lightning_sdiloco.compression.blockwise import Blockwise, Scratch
from lightning_sdiloco.compression.kernels import (
    CompiledKernels,
    EagerKernels,
    kernels_for,
    missing_for,
    weighted_mean,
)
from lightning_sdiloco.engine import cut_model
from tests.ranks import run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step

GROUPS = 3  # always, since another number of payloads is compiled anew
BIG = torch.finfo(torch.float32).max

HAS_COMPILER = any(map(shutil.which, ("g++", "c++", "clang++")))

anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
near = st.floats(min_value=-1.0, max_value=1.0, width=32)
lists = st.one_of(st.lists(anything, min_size=1, max_size=40), st.lists(near, min_size=1, max_size=40))


class Halves(Blockwise):
    """What a user writes: a byte for each value, in steps of a 64th of the largest magnitude of 64 values."""

    block: ClassVar[int] = 64
    bits: ClassVar[int] = 8
    scale: ClassVar[torch.dtype] = torch.float32

    def encode_blocks(self, values: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        blocks = values.view(-1, self.block)
        largest = blocks.abs().amax(1).clamp(1e-30, 1e30)
        return largest, (blocks / largest[:, None] * 64).round().clamp(-64, 64).to(torch.int8).view(torch.uint8).view(
            -1
        )

    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        torch.mul(codes.view(torch.int8).view(-1, self.block) * 0.015625, scales[:, None], out=out)


class Untraceable(Halves):
    """Asks for a value, as a compiled program cannot."""

    def encode_blocks(self, values: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        return super().encode_blocks(values if float(values[0]) < 2 else values * 1, scratch)


class Otherwise(Halves):
    """Gives other bits where it is compiled."""

    def decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor, scratch: Scratch) -> None:
        super().decode_blocks(scales * (2 if torch.compiler.is_compiling() else 1), codes, out, scratch)


BLOCKWISE = {name: codec for name, codec in COMPRESSIONS.items() if codec.blocks() is not None} | {"user": Halves()}

# A compilation takes ten seconds, and minutes on a busy machine: every family once, and one of a user.
every_codec = pytest.mark.parametrize(
    "name", [name if name in ("fp4", "user") else pytest.param(name, marks=pytest.mark.slow) for name in BLOCKWISE]
)


def vector(values: list[float], numel: int) -> Tensor:
    return torch.tensor(values).repeat(-(-numel // len(values)))[:numel].contiguous()


def runs_compiled(codec: Compression) -> bool:
    return all(program is not None for key, program in kernels._PROGRAMS.made.items() if key[0] is type(codec))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


# --- compiled on a CPU, where nobody would, to compare ---------------------------------------------------------------


def test_every_blockwise_compression_is_compiled() -> None:
    members = {name for name, codec in COMPRESSIONS.items() if isinstance(codec, Blockwise)}
    assert members == BLOCKWISE.keys() - {"user"} == {"fp8", "int8", "int4", "fp4", "mxfp4", "int2"}


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@every_codec
@given(values=lists, numel=st.integers(129, 1500))
@example(values=[0.0, -0.0, 1e-45, -1e-39, BIG], numel=129)
@example(values=[1.5, 0.75, -0.0117187500, 0.0117187490], numel=256)
@settings(max_examples=60, deadline=None)
@torch.no_grad()  # as in the lane; with gradients all is compiled anew
def test_codes_are_the_same_bits(name: str, values: list[float], numel: int) -> None:
    gradient, codec = vector(values, numel), BLOCKWISE[name]
    assert torch.equal(CompiledKernels().encode(gradient, codec), EagerKernels().encode(gradient, codec))
    assert runs_compiled(codec)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@every_codec
@given(
    values=st.lists(lists, min_size=GROUPS, max_size=GROUPS),
    numel=st.integers(129, 1500),
    factors=st.dictionaries(st.integers(0, GROUPS - 1), st.floats(0.01, 3.0)),
)
@example(values=[[1.0], [-1.0, 3e-39], [0.1, -0.0]], numel=300, factors={0: 1.0, 2: 1.0})
@example(values=[[0.3, 1.0], [BIG], [-7e-3]], numel=300, factors={2: 0.7, 0: 1.1})
@settings(max_examples=60, deadline=None)
@torch.no_grad()  # as in the lane; with gradients all is compiled anew
def test_the_mean_is_the_same_bits(name: str, values: list[list[float]], numel: int, factors: dict[int, float]) -> None:
    codec = BLOCKWISE[name]
    payloads = [codec.encode(vector(group, numel)) for group in values]
    # As they come out of a gathered message: anywhere.
    payloads = [torch.cat((payload[:1], payload))[1:] for payload in payloads]
    factors, like = dict(sorted(factors.items())), torch.empty(numel)
    one = CompiledKernels().mean(payloads, factors, codec, like)
    assert same_bits(one, EagerKernels().mean(payloads, factors, codec, like))
    assert one.shape == like.shape
    assert runs_compiled(codec)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", [name for name in COMPRESSIONS if name != "sparse"])
def test_the_mean_of_stretches_has_the_bits_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    like, compression = torch.empty(10_001), COMPRESSIONS[name].at(7)
    values = torch.randn(GROUPS, like.numel(), generator=torch.Generator().manual_seed(0))
    payloads, factors = [compression.encode(one) for one in values], {0: 1.0, 1: 0.7, 2: 1.0}
    whole = EagerKernels().mean(payloads, factors, compression, like)
    monkeypatch.setattr(blockwise, "chunk_length", lambda device: 1024)
    monkeypatch.setattr(casts, "_STRETCH", 1024)
    found = EagerKernels().mean(payloads, factors, compression, like)
    assert torch.equal(found.view(torch.int32), whole.view(torch.int32))


SPARSE = {
    "sparse": COMPRESSIONS["sparse"],
    "top-k": TopK(1 / 16, Int2()),
    "threshold": Threshold(1 / 8, Float32(), least=2.0),
    "kept threshold": Threshold(1 / 8, Int4(), every=4),
    "random": RandomK(5, Int4()),
    "random top-k": RandomK(3, TopK(1 / 16, Int2())),
    "random block": RandomBlock(3, FP4()),
    "by link": ByLink(("fp4", TopK(1 / 16, Int2()))).with_names(resolve).chosen(1),
}


@pytest.mark.parametrize("name", SPARSE)
def test_stretches_and_the_mean_of_few_values_have_the_bits_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compression, numel = SPARSE[name].at(7), 5 * 4096 + 77
    values = torch.randn(GROUPS, numel, generator=torch.Generator().manual_seed(0))
    sent = [(compression.encode(one), factor) for one, factor in zip(values, (1.0, 0.7, 1.0), strict=True)]
    wholes = [(torch.empty(numel), factor) for _, factor in sent]
    for (payload, _), (whole, _) in zip(sent, wholes, strict=True):
        compression.decode(payload, whole)
    for module in (blockwise, topk, random_k):
        monkeypatch.setattr(module, "chunk_length", lambda device: 8192)
    mean, found = torch.empty(numel), torch.full((numel,), torch.nan)
    compression.mean(sent, mean)
    for where, stretch in compression.stretches(sent[0][0], numel):
        found[where] = stretch
    assert same_bits(found, wholes[0][0])
    assert same_bits(mean, weighted_mean([(whole, factor) for whole, factor in wholes], like=mean))


def test_outer_parameters_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(passes: Any) -> dict[str, Tensor]:
        monkeypatch.setattr(cut_model, "kernels_for", lambda device: passes)
        torch.manual_seed(0)
        # Fragments of more than one block: a single one is compiled anew.
        models = [nn.Sequential(nn.Linear(5, 44), nn.Tanh(), nn.Linear(44, 3)) for _ in range(GROUPS)]
        optimizers = [inner_optimizer("adamw", model) for model in models]
        groups = SimulatedGroups(models, sync_every=4, overlap_steps=1, fragments=[["0.*"], ["2.*"]])
        for step in range(20):
            for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                train_step(model, optimizer, group, step)
            groups.step(idle={1} if step % 3 == 0 else ())
        groups.finish()
        return groups.outer_state_dict()

    compiled, eager = trained(CompiledKernels()), trained(EagerKernels())
    assert all(same_bits(compiled[name], eager[name]) for name in eager)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@torch.no_grad()
def test_what_error_feedback_wraps_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    values = torch.randn(300)
    payload = CompiledKernels().encode(values, ErrorFeedback(FP4(), decay=0.5))
    assert torch.equal(payload, FP4().encode(values))
    assert ErrorFeedback(FP4()).blocks() == FP4()
    assert caplog.text == ""


def test_what_is_not_blockwise_runs_eagerly_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    values = torch.randn(300)
    for compression in (Float32(), ErrorFeedback(Float32())):
        payload = CompiledKernels().encode(values, compression)
        assert torch.equal(payload, compression.encode(values))
        mean = CompiledKernels().mean([payload], {0: 1.0}, compression, values)
        assert same_bits(mean, EagerKernels().mean([payload], {0: 1.0}, compression, values))
    assert caplog.text == ""


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@torch.no_grad()
@pytest.mark.parametrize(
    ("codec", "reason"),
    [
        (Untraceable(), "Untraceable() runs eagerly where it encodes, which gives the same values and takes longer"),
        (Otherwise(), "Otherwise() runs eagerly where it decodes, which gives the same values and takes longer"),
    ],
)
def test_what_cannot_be_compiled_says_why_once_and_runs_eagerly(
    codec: Compression, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    values = torch.randn(300)
    for _ in range(2):
        payloads = [CompiledKernels().encode(values, codec)]
        assert torch.equal(payloads[0], codec.encode(values))
        mean = CompiledKernels().mean(payloads, {0: 1.0}, codec, values)
        assert same_bits(mean, EagerKernels().mean(payloads, {0: 1.0}, codec, values))
    assert caplog.text.count("runs eagerly") == caplog.text.count(reason) == 1
    assert ("gives other bits" if isinstance(codec, Otherwise) else "torch.compile cannot") in caplog.text


# --- which kind is chosen --------------------------------------------------------------------------------------------


def test_a_cpu_goes_operation_by_operation_and_says_nothing() -> None:
    assert isinstance(kernels_for(torch.device("cpu")), EagerKernels)
    assert missing_for(torch.device("cpu")) == ""


def test_an_accelerator_without_triton_goes_operation_by_operation_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sdiloco.compression.kernels.find_spec", lambda name: None)
    assert isinstance(kernels_for(torch.device("cuda")), EagerKernels)
    assert "Triton is not installed" in missing_for(torch.device("cuda"))


def test_an_accelerator_with_triton_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sdiloco.compression.kernels.find_spec", lambda name: object())
    assert isinstance(kernels_for(torch.device("cuda")), CompiledKernels)
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["emulate_precision_casts"])
    assert isinstance(kernels_for(torch.device("cuda")), EagerKernels)
    assert "eager_numerics.disable_ftz" in missing_for(torch.device("cuda"))


def one_differs(rank: int, world_size: int) -> None:
    cut_model.kernels_for = lambda device: CompiledKernels() if rank == 1 else EagerKernels()
    StreamingDiLoCo(mlp(), fragments=LAYERS)


def test_ranks_with_different_kernels_are_refused() -> None:
    report = run_ranks(one_differs, 2, expect_failure=True)
    assert "kernels is eager on rank 0, compiled on rank 1" in str(report)

"""Encoding and the mean give the same bits operation by operation and compiled into one pass, whatever the values."""

import shutil
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.compression import FP4, ErrorFeedback, Int8
from lightning_sdiloco.compression.kernels import Compiled, Eager, kernels_for, missing_for
from lightning_sdiloco.engine import engine
from tests.ranks import run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step

GROUPS = 3  # always, since another number of payloads is compiled anew
BIG = torch.finfo(torch.float32).max

HAS_COMPILER = any(map(shutil.which, ("g++", "c++", "clang++")))

anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
near = st.floats(min_value=-1.0, max_value=1.0, width=32)
lists = st.one_of(st.lists(anything, min_size=1, max_size=40), st.lists(near, min_size=1, max_size=40))


def vector(values: list[float], numel: int) -> Tensor:
    return torch.tensor(values).repeat(-(-numel // len(values)))[:numel].contiguous()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


# --- compiled on a CPU, where nobody would, to compare ---------------------------------------------------------------


@pytest.mark.timeout(900)  # a compilation takes ten seconds, and minutes on a busy machine
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@given(values=lists, numel=st.integers(129, 1500))
@example(values=[0.0, -0.0, 1e-45, -1e-39, BIG], numel=129)
@example(values=[1.5, 0.75, -0.0117187500, 0.0117187490], numel=256)
@settings(max_examples=60, deadline=None)
@torch.no_grad()  # as in the lane; with gradients all is compiled anew
def test_codes_are_the_same_bits(values: list[float], numel: int) -> None:
    gradient = vector(values, numel)
    assert torch.equal(Compiled().encode(gradient, FP4()), Eager().encode(gradient, FP4()))


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@given(
    values=st.lists(lists, min_size=GROUPS, max_size=GROUPS),
    numel=st.integers(129, 1500),
    factors=st.dictionaries(st.integers(0, GROUPS - 1), st.floats(0.01, 3.0)),
)
@example(values=[[1.0], [-1.0, 3e-39], [0.1, -0.0]], numel=300, factors={0: 1.0, 2: 1.0})
@example(values=[[0.3, 1.0], [BIG], [-7e-3]], numel=300, factors={2: 0.7, 0: 1.1})
@settings(max_examples=60, deadline=None)
@torch.no_grad()  # as in the lane; with gradients all is compiled anew
def test_the_mean_is_the_same_bits(values: list[list[float]], numel: int, factors: dict[int, float]) -> None:
    payloads = [FP4().encode(vector(group, numel)) for group in values]
    # As they come out of a gathered message: anywhere.
    payloads = [torch.cat((payload[:1], payload))[1:] for payload in payloads]
    factors, like = dict(sorted(factors.items())), torch.empty(numel)
    one = Compiled().mean(payloads, factors, FP4(), like)
    assert same_bits(one, Eager().mean(payloads, factors, FP4(), like))
    assert one.shape == like.shape


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_outer_parameters_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(passes: Any) -> dict[str, Tensor]:
        monkeypatch.setattr(engine, "kernels_for", lambda device: passes)
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

    compiled, eager = trained(Compiled()), trained(Eager())
    assert all(same_bits(compiled[name], eager[name]) for name in eager)


def test_what_is_not_compiled_goes_operation_by_operation() -> None:
    values = torch.randn(300)
    for compression in (Int8(), ErrorFeedback(FP4())):
        payload = Compiled().encode(values, compression)
        assert torch.equal(payload, compression.encode(values))
        mean = Compiled().mean([payload], {0: 1.0}, compression, values)
        assert same_bits(mean, Eager().mean([payload], {0: 1.0}, compression, values))


# --- which kind is chosen --------------------------------------------------------------------------------------------


def test_a_cpu_goes_operation_by_operation_and_says_nothing() -> None:
    assert isinstance(kernels_for(torch.device("cpu")), Eager)
    assert missing_for(torch.device("cpu")) == ""


def test_an_accelerator_without_triton_goes_operation_by_operation_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sdiloco.compression.kernels.find_spec", lambda name: None)
    assert isinstance(kernels_for(torch.device("cuda")), Eager)
    assert "Triton is not installed" in missing_for(torch.device("cuda"))


def test_an_accelerator_with_triton_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sdiloco.compression.kernels.find_spec", lambda name: object())
    assert isinstance(kernels_for(torch.device("cuda")), Compiled)
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["emulate_precision_casts"])
    assert isinstance(kernels_for(torch.device("cuda")), Eager)
    assert "eager_numerics.disable_ftz" in missing_for(torch.device("cuda"))


def one_differs(rank: int, world_size: int) -> None:
    engine.kernels_for = lambda device: Compiled() if rank == 1 else Eager()
    StreamingDiLoCo(mlp(), fragments=LAYERS)


def test_ranks_with_different_kernels_are_refused() -> None:
    report = run_ranks(one_differs, 2, expect_failure=True)
    assert "kernels is eager on rank 0, compiled on rank 1" in str(report)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_bits_compiled_operation_by_operation_and_on_the_host() -> None:
    values = [torch.randn(300_001) * torch.randn(300_001).exp() for _ in range(GROUPS)]
    payloads = [Compiled().encode(value.cuda(), FP4()) for value in values]
    for payload, value in zip(payloads, values, strict=True):
        assert torch.equal(payload, Eager().encode(value.cuda(), FP4()))
        assert torch.equal(payload.cpu(), FP4().encode(value))
    for factors in ({0: 1.0, 1: 1.0, 2: 1.0}, {0: 0.7, 2: 1.3}):
        mean = Compiled().mean(payloads, factors, FP4(), values[0].cuda())
        assert same_bits(mean, Eager().mean(payloads, factors, FP4(), values[0].cuda()))
        assert same_bits(mean.cpu(), Eager().mean([p.cpu() for p in payloads], factors, FP4(), values[0]))

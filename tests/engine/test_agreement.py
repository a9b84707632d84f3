"""State that all groups share: the same outer parameters or an error, the mean of an evaluation,
buffers, the end.
"""

import copy
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_sdiloco import (
    AgreementError,
    OuterOptimizer,
    SimulatedGroups,
    StreamingDiLoCo,
    WorkerGroups,
)
from lightning_sdiloco.compression import ByLink, ErrorFeedback, Int4, RandomK
from lightning_sdiloco.engine import start
from lightning_sdiloco.engine.turns import turns_of
from tests.engine.groups import MEAN, Groups, Values, copied, message, unlike, with_statistics
from tests.ranks import run_ranks
from tests.training import LAYERS, mlp

Choices = dict[str, Any]


def train(groups: SimulatedGroups) -> None:
    for _ in range(8):
        groups.step()


def spoil_outer(state: Any) -> None:
    state["fragments"][2]["outer"][5] += 1e-7


def spoil_buffers(state: Any) -> None:
    state["fragments"][3]["buffers"][0][1] += 1e-6


def spoil_steps(state: Any) -> None:
    state["counts"]["inner_steps"] = 0


def differ(kind: str, fragment: int) -> str:
    return (
        rf"do not hold the same outer {kind} at the launch of fragment {fragment} .*"
        r"\(group 0: .*, group 1: "
    )


DIFFERENT_POINTS = r"not at the same point .* \(group 0: \(0, 8\), group 1: \(0, 4\)\)"
SPOILED = {
    "sync_every": 4,
    "overlap_steps": 0,
    "fragments": [*LAYERS[:3], ["6.*", "7.*"]],
}
WHOLE = {**SPOILED, "fragments": [["*"]]}


@pytest.mark.parametrize(
    ("spoil", "act", "choices", "error"),
    [
        (spoil_outer, train, SPOILED, differ("parameters", 2)),
        (spoil_outer, SimulatedGroups.group_mean, SPOILED, differ("parameters", 2)),
        (spoil_outer, SimulatedGroups.finish, SPOILED, differ("parameters", 2)),
        (spoil_buffers, train, SPOILED, differ("parameters and buffers", 3)),
        (spoil_steps, train, WHOLE, DIFFERENT_POINTS),
    ],
    ids=["launch", "mean", "end", "buffers", "steps"],
)
def test_any_difference_of_the_outer_state_is_an_error_before_it_lands(
    spoil: Any, act: Any, choices: Choices, error: str
) -> None:
    """Groups take up the outer state at a launch, where they take their mean, and where they
    end.
    """
    run = Groups(net=with_statistics, **choices)
    run.until(4)
    state = copy.deepcopy(run.engines[1].state_dict())
    spoil(state)
    run.engines[1].load_state_dict(state)
    with pytest.raises(AgreementError, match=error):
        act(run.groups)


def swapped(rank: int, world_size: int) -> None:
    """The ranks of the second group hold the shards of one another."""
    run = Groups(joined=WorkerGroups(2), **WHOLE)
    run.until(6)
    (engine,) = run.engines
    state = engine.state_dict()
    outer = torch.cat([values.flatten() for values in engine.outer_state_dict().values()])
    if rank > 1:
        state["fragments"][0]["outer"] = outer.chunk(2)[3 - rank]
    engine.load_state_dict(state)
    run.until(9)


def test_shards_that_the_ranks_of_a_group_swapped_are_an_error_before_they_land() -> None:
    errors = run_ranks(swapped, 4, expect_failure=True)
    assert sorted(errors) == [0, 1, 2, 3]
    for error in errors.values():
        assert re.search(differ("parameters", 0), message(error))


def test_a_rank_whose_processor_rounds_differently_is_named() -> None:
    def begin(rank: int, world_size: int) -> None:
        if rank == 1:
            # torch takes these instructions where the processor multiplies and adds in two
            # roundings; only a new process can choose.
            program = "from lightning_sdiloco.engine import start; print(start.rounding())"
            command = [sys.executable, "-c", program]
            environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
            output = subprocess.check_output(command, env=environment, text=True)
            start.rounding = output.strip
        StreamingDiLoCo(mlp(), fragments=LAYERS)

    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no instructions for that")
    report = str(run_ranks(begin, 2, expect_failure=True))
    words = (
        "round differently: the digest of a test calculation is"
        r" [0-9a-f]+ on rank 0, [0-9a-f]+ on rank 1\. "
    )
    assert re.search(words, report)
    assert "set ATEN_CPU_CAPABILITY=default on all ranks" in report


SETTINGS = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:2"}


def trained(groups: int, steps: int, **choices: Any) -> Groups:
    run = Groups(groups, net=with_statistics, **{**SETTINGS, **choices})
    run.until(steps)
    return run


def shown(run: Groups, group: int = 0) -> Values:
    """The values of the model of a group while it shows the mean."""
    with run.engines[group].evaluate(run.groups.group_mean()):
        return copied(run.models[group].state_dict())


def compared(state: Any) -> dict[str, Any]:
    """The leaves of a nested state, except for bytes that were sent and seconds that it took."""
    leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]}
    return {
        key: leaf
        for key, leaf in leaves.items()
        if "'bytes_" not in key and not key.endswith("_s']")
    }


def equal_leaves(leaf: Any, expected: Any) -> bool:
    return torch.equal(leaf, expected) if isinstance(leaf, Tensor) else leaf == expected


def same(state: Any, expected: Any) -> bool:
    """True if two nested states hold the same bits."""
    leaves = compared(state)
    expected_leaves = compared(expected)
    return leaves.keys() == expected_leaves.keys() and all(
        equal_leaves(leaf, expected_leaves[key]) for key, leaf in leaves.items()
    )


def floating(values: Values) -> Values:
    pairs = values.items()
    return {name: tensor.clone() for name, tensor in pairs if tensor.is_floating_point()}


def assert_plain_mean(mean: Values, models: list[Any]) -> None:
    states = [model.state_dict() for model in models]
    for name, values in mean.items():
        expected = torch.stack([state[name].double() for state in states]).mean(dim=0)
        torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "choices",
    [
        {"compression": "fp32"},
        {},
        {"compression": "sparse"},
        {"compression": ByLink()},
        {"compression": "int2", "exchange": "two_shot"},
    ],
    ids=str,
)
def test_the_group_mean_is_the_plain_mean_of_local_values_whatever_is_shown(
    choices: Choices,
) -> None:
    """In four bits of the whole training's change, weights that all groups have at 0.999 came out
    as 0.74 to 1.28.
    """
    run = trained(3, 1, **choices)
    model = run.models[0]
    for local in run.models:
        nn.init.constant_(local[0].bias, 0.999)
    mean = floating(shown(run, 1))
    assert_plain_mean(mean, run.models)
    for engine in run.engines:
        engine.fragmented_model.view.show()
    outer = copied(model.state_dict())
    mean_while_outer_is_shown = run.groups.group_mean()
    assert unlike(copied(model.state_dict()), outer) == []
    for engine in run.engines:
        engine.fragmented_model.view.show_local()
    with run.engines[0].evaluate(mean_while_outer_is_shown):
        assert unlike(floating(model.state_dict()), mean) == []
    run.until(3)
    mean = floating(shown(run))
    run.groups.finish()
    assert unlike(floating(run.models[1].state_dict()), mean) == []


GUARDED = {
    "compression": Int4(),
    "exchange": "two_shot",
    "outer_optimizer": OuterOptimizer(outlier_guard=3.0),
}


@pytest.mark.parametrize(
    ("groups", "choices"),
    [
        (2, {"compression": "sparse"}),
        (2, {"compression": ErrorFeedback(RandomK(8, Int4()))}),
        (3, GUARDED),
    ],
    ids=["sparse", "chance", "guarded"],
)
def test_taking_the_group_mean_after_every_step_changes_no_bit_of_training(
    groups: int, choices: Choices
) -> None:
    plain = trained(groups, 0, **choices)
    evaluated = trained(groups, 0, **choices)
    for step in range(1, 10):
        torch.manual_seed(step)
        plain.step()
        random_numbers = torch.get_rng_state()
        torch.manual_seed(step)
        evaluated.step()
        shown(evaluated)
        assert torch.equal(torch.get_rng_state(), random_numbers)
        if step % 3 == 0:  # before any launch, in flight, and after landings
            for engine, expected in zip(evaluated.engines, plain.engines, strict=True):
                assert same(engine.state_dict(), expected.state_dict())
    assert bytes_sent(evaluated.groups) > bytes_sent(plain.groups)
    plain.groups.finish()
    evaluated.groups.finish()
    assert same(plain.models[0].state_dict(), evaluated.models[0].state_dict())
    with pytest.raises(RuntimeError, match=r"group_mean\(\) was called after finish"):
        evaluated.groups.group_mean()


def bytes_sent(groups: SimulatedGroups) -> int:
    return groups.engines[0].report()["bytes_sent"]


def test_the_end_has_no_more_in_flight_than_a_round_and_is_the_end() -> None:
    models = [nn.Sequential(*(nn.Linear(5, 5) for _ in range(12))) for _ in range(2)]
    groups = SimulatedGroups(models, compression="fp32", sync_every=100, fragments="strided:1")
    for model in models:
        model(torch.ones(5)).sum().backward()
    turns = zip(*(turns_of(engine.finish) for engine in groups.engines), strict=True)
    assert [len(groups.engines[0].rounds.in_flight) for _ in turns] == [0, *[1] * 12, 0]
    assert all(engine.is_finished for engine in groups.engines)
    assert all(parameter.grad is None for model in models for parameter in model.parameters())


def test_an_engine_finishes_once_and_then_takes_no_step() -> None:
    engine = StreamingDiLoCo(mlp(), sync_every=4, overlap_steps=0)
    engine.step()
    assert [engine.finish(), engine.finish()] == [[], []]
    with pytest.raises(RuntimeError, match=r"after finish\(\)"):
        engine.step()


class Counted(nn.Module):
    """A model of one parameter and some buffers of one value, which a group sets by hand."""

    def __init__(self, buffers: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))
        for index in range(buffers):
            self.register_buffer(f"buffer_{index}", torch.zeros((), dtype=dtype))


class Played:
    """Two groups whose models a test sets by hand."""

    def __init__(
        self, buffers: int = 1, dtype: torch.dtype = torch.float32, **choices: Any
    ) -> None:
        self.models = [Counted(buffers, dtype) for _ in range(2)]
        defaults = {"sync_every": 2, "overlap_steps": 0, "mixing": 0.0}
        untrained = {"buffer_*": "mean"}
        self.groups = SimulatedGroups(self.models, untrained=untrained, **{**defaults, **choices})

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.groups.step()

    def write_buffer(self, number: int) -> None:
        """Sets a buffer to 1 and 3, whose mean is 2."""
        for model, value in zip(self.models, (1.0, 3.0), strict=True):
            model.get_buffer(f"buffer_{number}").fill_(value)

    def write(self, *values: float) -> None:
        """Sets everything that a group holds to its value."""
        for model, value in zip(self.models, values, strict=True):
            for tensor in model.state_dict().values():
                tensor.fill_(value)

    def buffers(self) -> list[float]:
        return [model.buffer_0.item() for model in self.models]


def test_a_buffer_that_changes_once_becomes_the_mean_of_all_groups_and_others_stay() -> None:
    sent = []
    for number in (0, 61, 62, 63, 69):  # more than a control vector has bits
        run = Played(buffers=70)
        run.train(2)
        run.write_buffer(number)
        run.train(6)
        expected = [2.0 * (index == number) for index in range(70)]
        for model in run.models:
            assert [values.item() for values in model.buffers()] == expected
        sent.append(bytes_sent(run.groups))
    additional_bytes = [count - sent[0] for count in sent]
    # A buffer with a bit travels alone; those beyond travel together.
    assert additional_bytes == [0, 0, *[7 * 4] * 3]


@pytest.mark.parametrize(
    ("step", "mixing"),
    [(7, 0.0), (11, 0.5), (22, 0.5)],
    ids=["in rounds", "in flight", "after the last launch"],
)
def test_a_buffer_that_changes_once_ends_as_the_mean_of_all_groups(
    step: int, mixing: float
) -> None:
    run = Played(sync_every=4, overlap_steps=2, mixing=mixing)
    run.train(step - 1)
    run.write_buffer(0)
    run.train(23 - step)
    run.groups.finish()
    assert run.buffers() == [2.0, 2.0]


def test_a_group_that_recovers_takes_the_outer_value_of_a_buffer_that_did_not_travel() -> None:
    """Its value that is not finite would spread with the next launch."""
    run = Played(mixing=0.5)
    run.train(2)
    for values in run.models[1].state_dict().values():
        values.fill_(float("nan"))
    run.train(4)
    assert run.buffers() == [0.0, 0.0]


QUARTER_KEPT = {**MEAN, "sync_every": 1, "compression": "fp32", "mixing": 0.25}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_landing_keeps_the_share_of_the_local_values_whatever_their_dtype(
    dtype: torch.dtype,
) -> None:
    run = Played(dtype=dtype, **QUARTER_KEPT)
    run.write(4.0, 8.0)
    run.train(1)
    # A quarter of the local value, and three quarters of the mean, which is 6.
    assert [model.weight.tolist() for model in run.models] == [[5.5] * 3, [6.5] * 3]
    assert run.buffers() == [5.5, 6.5]


def test_the_share_of_the_local_values_is_not_rounded_to_float32() -> None:
    run = Played(dtype=torch.float64, **QUARTER_KEPT)
    run.write(4.0 + 2**-40, 8.0 + 2**-40)
    run.train(1)
    assert run.models[0].weight.tolist() == [5.5 + 2**-42] * 3

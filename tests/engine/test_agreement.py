"""What all groups hold: the same outer parameters or an error, the mean that evaluation shows,
buffers, the end.
"""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
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
from tests.engine.groups import MEAN, Groups, Values, copied, message, unlike, with_statistics
from tests.ranks import run_ranks
from tests.training import LAYERS, mlp


def test_any_difference_of_the_outer_state_is_an_error_before_it_lands() -> None:
    """Of what groups take up where they go on: at a launch, where they take their mean, and where
    they end.
    """

    def train(groups: SimulatedGroups) -> None:
        for _ in range(8):
            groups.step()

    settings: dict[str, Any] = {
        "sync_every": 4,
        "overlap_steps": 0,
        "fragments": [*LAYERS[:3], ["6.*", "7.*"]],
    }
    told = r"do not hold the same outer {} at the launch of fragment {} .*\(group 0: .*, group 1: "
    late = r"not at the same point .* \(group 0: \(0, 8\), group 1: \(0, 4\)\)"
    for spoiled, act, choices, words in (
        ("outer", train, {}, told.format("parameters", 2)),
        ("outer", SimulatedGroups.group_mean, {}, told.format("parameters", 2)),
        ("outer", SimulatedGroups.finish, {}, told.format("parameters", 2)),
        ("buffers", train, {}, told.format("parameters and buffers", 3)),
        ("steps", train, {"fragments": [["*"]]}, late),
    ):
        run = Groups(net=with_statistics, **{**settings, **choices})
        run.until(4)
        state = copy.deepcopy(run.engines[1].state_dict())
        fragments = state["fragments"]
        if spoiled == "outer":
            fragments[2]["outer"][5] += 1e-7
        elif spoiled == "buffers":
            fragments[3]["buffers"][0][1] += 1e-6
        else:
            state["counts"]["inner_steps"] = 0
        run.engines[1].load_state_dict(state)
        with pytest.raises(AgreementError, match=words):
            act(run.groups)

    def swapped(rank: int, world_size: int) -> None:
        """The ranks of the second group hold the shards of one another."""
        here = Groups(joined=WorkerGroups(2), **{**settings, "fragments": [["*"]]})
        here.until(6)
        (engine,) = here.engines
        state = engine.state_dict()
        whole = torch.cat([own.flatten() for own in engine.outer_state_dict().values()])
        if rank > 1:
            state["fragments"][0]["outer"] = whole.chunk(2)[3 - rank]
        engine.load_state_dict(state)
        here.until(9)

    errors = run_ranks(swapped, 4, expect_failure=True)
    assert sorted(errors) == [0, 1, 2, 3]
    told = told.format("parameters", 0)
    assert [error for error in map(message, errors.values()) if not re.search(told, error)] == []


def test_a_rank_whose_processor_rounds_differently_is_named() -> None:
    def begin(rank: int, world_size: int) -> None:
        if rank == 1:
            # What torch takes where the processor multiplies and adds in two roundings; only a new
            # process can choose.
            program = "from lightning_sdiloco.engine import start; print(start.rounding())"
            other = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
            made = subprocess.check_output([sys.executable, "-c", program], env=other, text=True)
            start.rounding = made.strip
        StreamingDiLoCo(mlp(), fragments=LAYERS)

    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no instructions for that")
    report = str(run_ranks(begin, 2, expect_failure=True))
    assert re.search(
        "round differently: what known values give is [0-9a-f]+ on rank 0, [0-9a-f]+ on rank 1. ",
        report,
    )
    assert "set ATEN_CPU_CAPABILITY=default on all ranks" in report


SETTINGS: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:2"}


def trained(groups: int, steps: int, **choices: Any) -> Groups:
    run = Groups(groups, net=with_statistics, **{**SETTINGS, **choices})
    run.until(steps)
    return run


def shown(run: Groups, group: int = 0) -> Values:
    """What the model of a group holds where it shows the mean."""
    with run.engines[group].evaluate(run.groups.group_mean()):
        return copied(run.models[group].state_dict())


def same(one: Any, other: Any) -> bool:
    """Whether two nested states hold the same bits, except for bytes that were sent and seconds
    that it took.
    """
    ours, theirs = (
        {keystr(path): own for path, own in tree_flatten_with_path(state)[0]}
        for state in (one, other)
    )
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[key]) if isinstance(value, Tensor) else value == theirs[key]
        for key, value in ours.items()
        if "'bytes_" not in key and not key.endswith("_s']")
    )


def floating(values: Values) -> Values:
    return {name: own.clone() for name, own in values.items() if own.is_floating_point()}


def test_the_group_mean_is_the_plain_mean_of_local_values_whatever_is_shown() -> None:
    """In four bits of the whole training's change, weights that all groups have at 0.999 came out
    as 0.74 to 1.28.
    """
    two_shots = {"compression": "int2", "exchange": "two_shot"}
    for choices in (
        {"compression": "fp32"},
        {},
        {"compression": "sparse"},
        {"compression": ByLink()},
        two_shots,
    ):
        run = trained(3, 1, **choices)
        for model in run.models:
            nn.init.constant_(model[0].bias, 0.999)
        mean = floating(shown(run, 1))
        states = [model.state_dict() for model in run.models]
        for name, values in mean.items():
            expected = torch.stack([state[name].double() for state in states]).mean(dim=0)
            torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
        for engine in run.engines:
            engine.show_outer()
        outer = copied(run.models[0].state_dict())
        of_shown = run.groups.group_mean()
        assert unlike(copied(run.models[0].state_dict()), outer) == []
        for engine in run.engines:
            engine.show_local()
        with run.engines[0].evaluate(of_shown):
            assert unlike(floating(run.models[0].state_dict()), mean) == []
        run.until(3)
        mean = floating(shown(run))
        run.groups.finish()
        assert unlike(floating(run.models[1].state_dict()), mean) == []


def test_taking_the_group_mean_after_every_step_changes_no_bit_of_training() -> None:
    guarded = {
        "compression": Int4(),
        "exchange": "two_shot",
        "outer_optimizer": OuterOptimizer(outlier_guard=3.0),
    }
    chance = {"compression": ErrorFeedback(RandomK(8, Int4()))}
    for groups, choices in ((2, {"compression": "sparse"}), (2, chance), (3, guarded)):
        plain = trained(groups, 0, **choices)
        looked = trained(groups, 0, **choices)
        for step in range(1, 10):
            torch.manual_seed(step)
            plain.step()
            random = torch.get_rng_state()
            torch.manual_seed(step)
            looked.step()
            shown(looked)
            assert torch.equal(torch.get_rng_state(), random)
            # Before any launch, in flight, and after landings.
            for one, other in (
                zip(plain.engines, looked.engines, strict=True) if step % 3 == 0 else ()
            ):
                assert same(one.state_dict(), other.state_dict())
        assert looked.engines[0].report()["bytes_sent"] > plain.engines[0].report()["bytes_sent"]
        plain.groups.finish()
        looked.groups.finish()
        assert same(plain.models[0].state_dict(), looked.models[0].state_dict())
        with pytest.raises(RuntimeError, match=r"group_mean\(\) was called after finish"):
            looked.groups.group_mean()


def test_the_end_has_no_more_in_flight_than_a_round_and_is_the_end() -> None:
    models = [nn.Sequential(*(nn.Linear(5, 5) for _ in range(12))) for _ in range(2)]
    groups = SimulatedGroups(models, compression="fp32", sync_every=100, fragments="strided:1")
    for model in models:
        model(torch.ones(5)).sum().backward()
    turns = zip(*(engine.finishing() for engine in groups.engines), strict=True)
    assert [len(groups.engines[0].in_flight) for _ in turns] == [0, *[1] * 12, 0]
    assert all(engine.is_finished for engine in groups.engines)
    assert all(parameter.grad is None for model in models for parameter in model.parameters())
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


def played(
    steps: int,
    at: int,
    do: Callable[[Any, int], object],
    buffers: int = 1,
    dtype: Any = torch.float32,
    **choices: Any,
) -> tuple[list[Any], SimulatedGroups]:
    """Plays two groups, to whose models something is done before one of the inner steps."""
    models = [Counted(buffers, dtype) for _ in range(2)]
    defaults: dict[str, Any] = {"sync_every": 2, "overlap_steps": 0, "mixing": 0.0}
    groups = SimulatedGroups(models, **{**defaults, "untrained": {"buffer_*": "mean"}, **choices})
    for step in range(1, steps + 1):
        for group, model in enumerate(models if step == at else ()):
            do(model, group)
        groups.step()
    return models, groups


def test_a_buffer_that_changes_once_becomes_the_mean_of_all_groups_and_others_stay() -> None:
    def write(model: Any, group: int) -> None:
        model.get_buffer(f"buffer_{written}").fill_(1.0 + 2 * group)

    sent = []
    for written in (0, 61, 62, 63, 69):  # more than a control vector has bits
        models, groups = played(8, 3, write, 70)
        for model in models:
            assert [values.item() for values in model.buffers()] == [
                2.0 * (index == written) for index in range(70)
            ]
        sent.append(groups.engines[0].report()["bytes_sent"])
    assert [more - sent[0] for more in sent] == [0, 0, *[7 * 4] * 3], (
        "those beyond travel together, others alone"
    )
    written = 0
    for at, mixing in (
        (7, 0.0),
        (11, 0.5),
        (22, 0.5),
    ):  # in rounds, in flight, and after the last launch
        models, groups = played(22, at, write, sync_every=4, overlap_steps=2, mixing=mixing)
        groups.finish()
        assert [model.buffer_0.item() for model in models] == [2.0, 2.0]

    def spoil(model: Any, group: int) -> None:
        for values in model.state_dict().values() if group else ():
            values.fill_(float("nan"))

    # Who recovers takes the outer value of a buffer that did not travel: it would spread with the
    # next launch.
    assert [model.buffer_0.item() for model in played(6, 3, spoil, mixing=0.5)[0]] == [0.0, 0.0]


def test_a_landing_keeps_the_share_of_the_local_values_whatever_their_dtype() -> None:
    def write(model: Any, group: int, more: float = 0.0) -> None:
        for values in model.state_dict().values():
            values.fill_((4.0, 8.0)[group] + more)

    choices = {**MEAN, "sync_every": 1, "compression": "fp32", "mixing": 0.25}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        models, _ = played(1, 1, write, dtype=dtype, **choices)
        # A quarter of the own value, and three quarters of the mean, which is 6.
        assert [model.weight.tolist() for model in models] == [[5.5] * 3, [6.5] * 3]
        assert [model.buffer_0.item() for model in models] == [5.5, 6.5]
    models, _ = played(1, 1, partial(write, more=2**-40), dtype=torch.float64, **choices)
    assert models[0].weight.tolist() == [5.5 + 2**-42] * 3, (
        "the own share is not rounded to float32"
    )

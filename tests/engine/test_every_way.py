"""One run in every way: simulated, in processes, by groups of several ranks, stopped and resumed, and restarted."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_sdiloco import (
    Carry,
    OuterOptimizer,
    RandomPairs,
    Ring,
    Selective,
    StreamingDiLoCo,
    TwoShot,
    WorkerGroups,
)
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import (
    COMPRESSIONS,
    FP4,
    ByLink,
    ErrorFeedback,
    Int2,
    Int4,
    RandomBlock,
    RandomK,
    Threshold,
    TopK,
)
from lightning_sdiloco.engine.checkpoint import restart_from
from tests.engine.groups import (
    Groups,
    Rank,
    Values,
    copied,
    held,
    through_a_file,
    told,
    unlike,
    with_statistics,
)
from tests.engine.test_policies import DelayCompensation, Loudest, Rarer
from tests.methods import ByMedian, DelayedNesterov, ZScore
from tests.ranks import run_ranks
from tests.training import LAYERS, mlp


def is_idle(group: int, step: int) -> bool:
    return step % 20 > 12 + 2 * group or (group == 1 and step in (6, 7, 8, 9, 10))


MENU = ("fp4", "int2", "sparse")
LINKS = [1e9, 11.0, 1.0]
"""Bytes per second: in 3 seconds enough for the first code, for the second of the first layer, and for none."""

BASE: dict[str, Any] = {"groups": 3, "sync_every": 8, "overlap_steps": 5}
BASE |= {"net": with_statistics, "fragments": [*LAYERS[:2], ["4.*", "7.*"], ["6.*"]]}
EVERYTHING: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "outer_lr": 0.4,
    "outer_momentum": 0.9,
    "mixing": 0.5,
    "idle": is_idle,
    "micro_batches": lambda group, step: 1 + (group + step) % 3,
    "outer_optimizer": OuterOptimizer(
        lr_schedule=partial(CosineAnnealingLR, T_max=7), clip_norm=0.2, outlier_guard=1.01
    ),
}
# "sparse" has the parts of "top_k", and "random_k" those of "random_block".
CASES: dict[str, dict[str, Any]] = {
    name: {"compression": name} for name in COMPRESSIONS if name not in ("top_k", "random_block")
}
CASES |= {
    "gather": {"exchange": "gather"},
    "uneven parts": {"exchange": TwoShot((0.7, 0.3, 0)), "compression": ErrorFeedback(FP4()), "mixing": 0.25},
    "mean over senders": {"compression": ErrorFeedback(TopK(1 / 16, Int2(), over="senders"), decay=0.95)},
    "thresholds that are kept": {"compression": ErrorFeedback(Threshold(1 / 16, Int2(), every=3))},
    "chance": {"compression": ErrorFeedback(RandomK(8, FP4()))},
    "a block by chance": {"compression": ErrorFeedback(RandomBlock(8, FP4()))},
    "by link": {"compression": ByLink(MENU), "links": LINKS, "overlap_steps": 3},
    "everything": EVERYTHING,
    "everything in two shots": {**EVERYTHING, "compression": ErrorFeedback(Int4()), "exchange": "two_shot"},
    "warm-up": {"warmup_steps": 11},
    "policies": {"schedule": Selective(0.4), "weighing": ZScore(warmup=2), "mixing": Carry()},
    "policies of a user": {"schedule": Rarer(), "weighing": Loudest(), "mixing": DelayCompensation(), "inner": "sgd"},
    "by median": {"schedule": Rarer(), "weighing": ByMedian(), "idle": is_idle},
    "delayed Nesterov": {"outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=3, spread=0.1)},
    "pairs": {"groups": 4, "route": RandomPairs(), "outer_lr": 0.7, "outer_momentum": 0.5, "compression": "fp32"},
    "ring": {"groups": 4, "route": Ring(), "compression": "fp32", "mixing": 0.25},
}
CASES = {name: {**BASE, **case} for name, case in CASES.items()}
STEPS, ENDS = 28, 21


def test_processes_that_stop_in_flight_have_the_bits_and_bytes_of_a_simulation_that_does_not() -> None:
    expected: dict[str, list[Any]] = {}
    for name, case in CASES.items():
        run, seen = Groups(**case), []
        for _ in range(ENDS):
            if run.step():
                seen.append([held(*both) for both in zip(run.engines, run.models, strict=True)])
        run.groups.finish()
        of_groups = zip(*seen, [copied(model.state_dict()) for model in run.models], strict=True)
        expected[name] = [(list(of), engine.report()) for of, engine in zip(of_groups, run.engines, strict=True)]

    def play(rank: int, world_size: int) -> dict[str, Any]:
        joined, wrong = WorkerGroups(world_size), dict[str, Any]()
        for name, case in CASES.items():
            chosen = dict(case)
            if chosen.pop("groups") != world_size:
                continue
            here, seen = Rank(rank, joined, **chosen), []
            for step in range(1, ENDS + 1):
                if here.step(step):
                    seen.append(held(here.engine, here.model))
                if step == 14:
                    saved = here.saved()
                    here.engine.close()
                    here = Rank(rank, joined, **chosen).load(saved)
            here.engine.finish()
            values, report = expected[name][rank]
            off = [unlike(*both) for both in zip([*seen, copied(here.model.state_dict())], values, strict=True)]
            counts = {key: here.engine.report()[key] for key in ("bytes_sent", "launches", "landings")}
            if any(off) or counts.items() - report.items():
                wrong[name] = off, counts, report
        return wrong

    assert run_ranks(play, 3) == [{}] * 3
    assert run_ranks(play, 4) == [{}] * 4
    assert len({report["bytes_sent"] for _, report in expected["by link"]}) == 3, "each has its own code"
    sent = [report["bytes_sent"] for _, report in expected["uneven parts"]]
    assert sent[2] < sent[1] < sent[0], "who averages nothing sends one payload, the others more"


# What a shard makes no difference to, and what is for another number of groups.
ALIKE = (
    "bf16",
    "int8",
    "int4",
    "mxfp4",
    "a block by chance",
    "by median",
    "delayed Nesterov",
    "uneven parts",
    "by link",
)


def test_all_ranks_of_groups_of_two_hold_the_same_bits_after_every_landing() -> None:
    def play(rank: int, world_size: int) -> dict[str, Any]:
        joined, found = WorkerGroups(2), dict[str, Any]()
        for name, case in CASES.items():
            if name in ALIKE or case["groups"] == 4:
                continue
            chosen = {key: value for key, value in case.items() if key != "groups"}
            # Without BatchNorm, of which a rank sees its own part of a batch; and with a norm that clips what is large.
            chosen |= {"net": mlp, "fragments": LAYERS}
            if name == "everything":
                outer = replace(EVERYTHING["outer_optimizer"], clip_norm=0.02, outlier_guard=1.05)
                chosen |= {"compression": "fp32", "outer_optimizer": outer}
            here, seen = Rank(rank, joined, **chosen), []
            for step in range(1, (STEPS if name == "everything" else 20) + 1):
                if landed := here.step(step):
                    seen.append((here.engine.outer_state_dict(), [(told(one), one.outer_grad_norm) for one in landed]))
            here.engine.finish()
            assert not unlike(here.engine.outer_state_dict(), dict(here.model.named_parameters()))
            found[name] = [*seen, (here.engine.outer_state_dict(), [])]
        return found

    first, *others = run_ranks(play, 4)
    for name, seen in first.items():
        assert len(seen) > 4, name
        for other in others:
            for (values, landings), (of_other, also) in zip(seen, other[name], strict=True):
                assert not unlike(values, of_other), name
                assert landings == also, name
    landed = [landing for _, landings in first["everything"] for landing in landings]
    assert any(outlying for (_, _, _, outlying, _), _ in landed), "the guard acted"
    assert max(norm for _, norm in landed) == pytest.approx(0.02, rel=1e-4), "of the whole fragment"


def seldom(models: Sequence[Any], step: int) -> None:
    for group, model in enumerate(models):
        model.seldom += (group + 1) * (step % 16 == 15)


def played(run: Groups, last: int, at: Sequence[int] = ()) -> dict[int, Values]:
    """Trains up to a step; returns what there was after some steps."""
    found = {}
    while run.steps < last:
        run.step(then=partial(seldom, step=run.steps + 1))
        if run.steps in at:
            found[run.steps] = run.seen()
    return found


STOPS = (7, 12, 23)


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_stopped_anywhere_goes_on_as_if_it_never_stopped(name: str) -> None:
    case = {**CASES[name], "groups": 2} if name in COMPRESSIONS else CASES[name]
    whole, first = Groups(**case), Groups(**case)
    at = [*STOPS, 9, 15, 17, STEPS]
    expected, in_flight = played(whole, STEPS, at), set()
    whole.groups.finish()
    for stop in STOPS:
        # Taking the state changes nothing in the run that goes on.
        assert unlike(played(first, stop, [stop])[stop], expected[stop]) == []
        second = first.resumed()
        in_flight.add(len(second.engines[0].in_flight))
        for step, values in played(second, STEPS, at).items():
            assert unlike(values, expected[step]) == [], (stop, step)
        second.groups.finish()
        assert unlike(second.seen(), whole.seen()) == []
    assert max(in_flight) > 0
    if name.startswith("everything"):
        assert any(landing.outlying for landing in whole.landings), "the guard acted"


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("pairs", "ring")])
def test_flights_land_at_a_restart_as_their_groups_would_have_landed_them(name: str) -> None:
    for poisons in (False, True) if name == "fp4" else (False,):
        run = Groups(**CASES[name])
        played(run, 20)
        if poisons:  # parameters, which leave a group out, and buffers, which leave themselves out
            run.models[1][4].weight.data[0, 0] = float("nan")
            run.models[2][7].running_var[1] = float("nan")
            run.until(28)
        saved = [[through_a_file(engine.state_dict())] for engine in run.engines]
        restart = restart_from(saved, Settings(**run.choices))
        run.until(run.steps + run.choices["overlap_steps"])
        state = run.engines[0].state_dict()
        # Without the flights of now, since a group is missing.
        landed = restart_from([[state], [None]], Settings())
        assert restart.counts["flights_dropped"] == 0
        assert restart.counts["landings"] == landed.counts["landings"]
        assert unlike(restart.buffers, landed.buffers) == []
        for parameter, own in landed.parameters.items():
            assert torch.equal(restart.parameters[parameter].values, own.values), parameter
            assert unlike(restart.parameters[parameter].state, own.state) == []


# What only some stops show

SHORT: dict[str, Any] = {**BASE, "groups": 2}


def test_a_warmup_of_another_number_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    def resumed(saved: Any, **choices: Any) -> Groups:
        return Groups(**{**SHORT, **choices}).load(saved)

    # After it nothing changes, which is said once.
    selective = {"schedule": Selective(0.3, 4)}
    for was, now, stop, choices in ((20, 0, 35, selective), (3, 4, 13, {}), (3, 30, 13, {}), (3, 0, 3, {})):
        caplog.clear()
        first = Groups(**{**SHORT, "warmup_steps": was, **choices})
        first.until(stop)
        second = resumed(first.saved(), warmup_steps=now, **choices)
        for run in (first, second):
            run.until(stop + 20)
        assert unlike(first.seen(), second.seen()) == []
        (said,) = (one.message for one in caplog.records if one.levelno == logging.WARNING and "warm-up" in one.message)
        assert f"warmup_steps={now} is ignored: the warm-up of this run ended after inner step {was}" in said
    # Within it the new one counts, and one that is past ends it with the next step.
    first = Groups(**SHORT, warmup_steps=8)
    first.until(5)
    for now, until in ((12, 12), (6, 6), (5, 6), (0, 6)):
        whole, second = Groups(**SHORT, warmup_steps=until), resumed(first.saved(), warmup_steps=now)
        for run in (whole, second):
            run.until(25)
        assert unlike(second.seen(), whole.seen()) == []
    # One that was never there is refused in the midst of rounds.
    first = Groups(**SHORT)
    for stop in (1, 12):
        first.until(stop)
        refused = rf"warmup_steps=20 .* no warm-up.* inner step {stop}\b.*Leave warmup_steps out"
        with pytest.raises(ValueError, match=refused):
            resumed(first.saved(), warmup_steps=20)
    resumed(Groups(**SHORT).saved(), warmup_steps=6)


def test_engines_that_went_on_go_back_and_what_was_requested_before_a_stop_reaches_all_groups() -> None:
    first = Groups(**SHORT)
    first.until(8)
    first.engines[1].request(0b101)
    # It waits for a launch, or is in flight.
    for stop in (9, 11):
        first.until(stop)
        saved, seen = first.saved(), first.seen()
        second = first.resumed()
        second.until(18)
        asked = [(landing.launched_at, landing.requests) for landing in second.landings]
        assert asked == [(8, 0), (10, 0b101), (12, 0)]
        second.load(saved)
        assert unlike(second.seen(), seen) == []


def test_the_state_of_other_fragments_or_another_outer_optimizer_is_refused() -> None:
    state = StreamingDiLoCo(mlp(), fragments=[["*"]]).state_dict()
    with pytest.raises(ValueError, match="other fragments"):
        StreamingDiLoCo(mlp(), fragments=LAYERS).load_state_dict(state)
    # Also where its name is the same.
    state = StreamingDiLoCo(mlp(), outer_optimizer=partial(torch.optim.SGD, lr=0.1)).state_dict()
    other = StreamingDiLoCo(mlp(), outer_optimizer=partial(torch.optim.SGD, lr=0.2))
    with pytest.raises(ValueError, match="another outer_optimizer: it was SGD.*'lr': 0.1.*now it is SGD.*'lr': 0.2"):
        other.load_state_dict(state)

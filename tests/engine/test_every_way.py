"""One run in every way: simulated, in processes, by groups of several ranks, stopped and resumed,
and restarted.

Rounds restart with other groups, shards or settings, and after parameters were frozen or unfrozen.
"""

import copy
import importlib
import shutil
from functools import cache, partial
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from lightning_sdiloco import (
    Carry,
    DenseBeginning,
    Landing,
    OuterOptimizer,
    RandomPairs,
    Ring,
    Selective,
    StreamingDiLoCo,
    WorkerGroups,
)
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.reduce import TwoShot
from lightning_sdiloco.compression import (
    COMPRESSIONS,
    FP4,
    ByLink,
    ErrorFeedback,
    Int2,
    RandomK,
    Threshold,
    TopK,
)
from lightning_sdiloco.engine.checkpoint import random_state
from lightning_sdiloco.engine.restart import restart_from
from lightning_sdiloco.errors import AgreementError
from tests import fits
from tests.engine.groups import (
    Groups,
    Values,
    copied,
    held,
    outer_state,
    regression,
    through_a_file,
    unlike,
    with_statistics,
)
from tests.engine.test_policies import DelayCompensation, Loudest, Rarer, assert_refused
from tests.fits import LIGHTNING, OTHER, Trained, refusal
from tests.lightning.test_checkpoint import CHOICES, run_fit, save_folder, saving, traced
from tests.methods import ByMedian, DelayedNesterov, ZScore
from tests.ranks import agreed, run_processes, run_ranks
from tests.training import LAYERS, mlp


def is_idle(group: int, step: int) -> bool:
    return step % 20 > 12 + 2 * group or (group == 1 and step in (6, 7, 8, 9, 10))


def growing(model: nn.Module, group: int, step: int, place: int, size: int) -> Tensor:
    """A loss that becomes five times as large in the second group, so that the guard leaves it
    out.
    """
    factor = 5.0 if group == 1 and step > 15 else 1.0
    return factor * regression(model, group, step, place, size)


MENU = ("fp4", "int2", "sparse")
LINKS = [1e9, 11.0, 1.0]
"""Bytes per second: in 3 seconds enough for the first code, for the second of the first layer, and
for none."""

BASE = {
    "groups": 3,
    "sync_every": 8,
    "overlap_steps": 5,
    "net": with_statistics,
    "fragments": [*LAYERS[:2], ["4.*", "7.*"], ["6.*"]],
}
COSINE = OuterOptimizer(
    lr_schedule=partial(CosineAnnealingLR, T_max=7), clip_norm=0.2, outlier_guard=1.01
)
EVERYTHING = {
    "sync_every": 3,
    "overlap_steps": 2,
    "outer_lr": 0.4,
    "outer_momentum": 0.9,
    "mixing": 0.5,
    "idle": is_idle,
    "micro_batches": lambda group, step: 1 + (group + step) % 3,
    "outer_optimizer": COSINE,
}
GROWING = {"inner": "sgd", "loss": growing}
OVER_SENDERS = ErrorFeedback(TopK(1 / 16, Int2(), over="senders"), decay=0.95)
LASTING_THRESHOLD = ErrorFeedback(Threshold(1 / 16, Int2(), every=3))
EQUALISED = OuterOptimizer(direction="equalised", matrices={"0.weight": 0})
DELAYED = partial(DelayedNesterov, lr=0.7, momentum=0.9, every=3, spread=0.1)
# "sparse" has the parts of "top_k", and "random_k" those of "random_block".
SAME_PARTS = ("top_k", "random_block")
CHANGED_SETTINGS = {
    **{name: {"compression": name} for name in COMPRESSIONS if name not in SAME_PARTS},
    "gather": {"exchange": "gather"},
    "matrices": {"outer_optimizer": EQUALISED},
    "uneven parts": {
        "exchange": TwoShot((0.7, 0.3, 0)),
        "compression": "fp4+memory",
        "mixing": 0.25,
    },
    "mean over senders": {"compression": OVER_SENDERS},
    "thresholds that are kept": {"compression": LASTING_THRESHOLD},
    "chance": {"compression": ErrorFeedback(RandomK(8, FP4()))},
    "a block by chance": {"compression": "random_block+memory"},
    "by link": {"compression": ByLink(MENU), "links": LINKS, "overlap_steps": 3},
    "everything": EVERYTHING,
    "everything in two shots": {
        **EVERYTHING,
        **GROWING,
        "compression": "int4+memory",
        "exchange": "two_shot",
    },
    # It lasts until the second stop; launches of two fragments coincide.
    "dense": {"dense_beginning": DenseBeginning(3, 3, 1)},
    "everything, dense": {**EVERYTHING, "sync_every": 4, "dense_beginning": DenseBeginning(7, 2)},
    "policies": {"schedule": Selective(0.4), "weighing": ZScore(warmup=2), "mixing": Carry()},
    "policies of a user": {
        "schedule": Rarer(),
        "weighing": Loudest(),
        "mixing": DelayCompensation(),
        "inner": "sgd",
    },
    "by median": {"schedule": Rarer(), "weighing": ByMedian(), "idle": is_idle},
    "delayed Nesterov": {"outer_optimizer": DELAYED},
    "pairs": {
        "groups": 4,
        "route": RandomPairs(),
        "outer_lr": 0.7,
        "outer_momentum": 0.5,
        "compression": "fp32",
    },
    "ring": {"groups": 4, "route": Ring(), "compression": "fp32", "mixing": 0.25},
}
CASES = {name: {**BASE, **changed} for name, changed in CHANGED_SETTINGS.items()}
ROUTES = ("pairs", "ring")
STEPS = 24
STOPS = (7, 12, 18)


class Uninterrupted(NamedTuple):
    """A simulation that never stops: all of it after some steps, and the values of every group
    after every landing.
    """

    run: Groups
    states: dict[int, Values]
    landed: list[list[Values]]


@cache
def uninterrupted(name: str) -> Uninterrupted:
    run = Groups(**CASES[name])
    states = {}
    landed = []
    for step in range(1, STEPS + 1):
        if run.step():
            landed.append(list(map(held, run.engines, run.models)))
        if step in (*STOPS, 9, 15, STEPS):
            states[step] = run.seen()
    run.groups.finish()
    return Uninterrupted(run, states, landed)


def assert_like_simulation(name: str, joined: WorkerGroups) -> None:
    """Plays a case in this rank, and goes on in new objects after 14 steps, in flight."""
    simulation = uninterrupted(name)
    group = joined.group_index
    expected_values = [values[group] for values in simulation.landed]
    expected_values.append(copied(simulation.run.models[group].state_dict()))
    run = Groups(**CASES[name], joined=joined)
    landed = []
    while run.steps < STEPS:
        if run.step():
            landed.append(held(run.engines[0], run.models[0]))
        if run.steps == 14:
            stopped_engine = run.engines[0]
            run = run.resumed()
            stopped_engine.close()
    run.engines[0].finish()
    landed.append(copied(run.models[0].state_dict()))
    for values, expected in zip(landed, expected_values, strict=True):
        assert unlike(values, expected) == [], name
    report = run.engines[0].report()
    expected_report = simulation.run.engines[group].report()
    for count in ("bytes_sent", "launches", "landings"):
        assert report[count] == expected_report[count], (name, count)


@pytest.mark.slow
def test_processes_stopped_in_flight_match_the_bits_and_bytes_of_a_whole_simulation() -> None:
    for name in CASES:
        uninterrupted(name)

    def play(rank: int, world_size: int) -> None:
        joined = WorkerGroups(world_size)
        for name, case in CASES.items():
            if case["groups"] == world_size:
                assert_like_simulation(name, joined)

    run_ranks(play, 3)
    run_ranks(play, 4)


def sent_bytes(name: str) -> list[int]:
    return [engine.report()["bytes_sent"] for engine in uninterrupted(name).run.engines]


def test_groups_with_their_own_codes_or_parts_send_unequal_bytes() -> None:
    assert len(set(sent_bytes("by link"))) == 3, "each has its own code"
    most, fewer, fewest = sent_bytes("uneven parts")
    assert most > fewer > fewest, "a group that averages nothing sends one payload"


# The shards of a group make no difference to these.
SKIPPED = (
    "bf16",
    "int8",
    "int4",
    "a block by chance",
    "by median",
    "delayed Nesterov",
    "uneven parts",
    "by link",
    *ROUTES,
)


def test_all_ranks_of_groups_of_two_hold_the_same_bits_after_every_landing() -> None:
    # Without BatchNorm, since a rank sees only its part of a batch.
    without_statistics = {"net": mlp, "fragments": LAYERS}

    def play(rank: int, world_size: int) -> None:
        joined = WorkerGroups(2)
        for name in CASES.keys() - SKIPPED:
            run = Groups(**{**CASES[name], **without_statistics}, joined=joined)
            (engine,) = run.engines
            landings = 0
            for _ in range(19):
                if run.step():
                    landings += 1
                    assert agreed(engine.outer_state_dict()), name
            assert landings >= 4
            engine.finish()
            final = engine.outer_state_dict()
            assert unlike(copied(run.models[0].named_parameters()), final) == [], name
            assert agreed(final), name

    run_ranks(play, 4)


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_stopped_anywhere_goes_on_as_if_it_never_stopped(name: str) -> None:
    simulation = uninterrupted(name)
    run = Groups(**CASES[name])
    in_flight = set()
    for stop in STOPS:
        # Taking the state changes nothing in the run that goes on.
        assert run.differs(simulation.states, stop) == {}
        resumed = run.resumed()
        in_flight.add(len(resumed.engines[0].rounds.in_flight))
        assert resumed.differs(simulation.states, STEPS) == {}
        resumed.groups.finish()
        assert unlike(resumed.seen(), simulation.run.seen()) == []
    assert max(in_flight) > 0
    if name.startswith("everything"):
        assert any(landing.outlying for landing in simulation.run.landings), "the guard acted"


WITHOUT_ROUTE = [name for name in CASES if name not in ROUTES]


@pytest.mark.parametrize(
    ("name", "poisons"), [*((name, False) for name in WITHOUT_ROUTE), ("fp4", True)]
)
def test_flights_land_at_a_restart_as_their_groups_would_have_landed_them(
    name: str, poisons: bool
) -> None:
    run = Groups(**CASES[name])
    run.until(7 if "dense" in name else 20)
    if poisons:
        run.models[1][4].weight.data[0, 0] = nan  # the mean leaves the group out
        run.models[2][7].running_var[1] = nan  # the mean leaves this buffer of it out
        run.until(28)
    saved = [[through_a_file(engine.state_dict())] for engine in run.engines]
    restart = restart_from(saved, Settings(**run.choices))
    engine = run.engines[0]
    assert "dense" not in name or engine.rounds.timetable.schedule.is_dense(run.steps)
    run.until(run.steps + engine.rounds.timetable.schedule.overlap_of(run.steps))
    # Since a group is missing, the flights that began meanwhile are left out.
    landed = restart_from([[engine.state_dict()], [None]], Settings())
    assert restart.counts["flights_dropped"] == 0
    assert restart.counts["landings"] == landed.counts["landings"]
    assert unlike(restart.untrained, landed.untrained) == []
    for parameter, expected in landed.parameters.items():
        actual = restart.parameters[parameter]
        assert torch.equal(actual.values, expected.values), parameter
        assert unlike(actual.state, expected.state) == []


SHORT = {**BASE, "groups": 2}


@pytest.mark.parametrize("stop", range(2, 22))
def test_a_dense_beginning_resumes_bit_for_bit_wherever_it_stops(stop: int) -> None:
    run = Groups(**SHORT, dense_beginning=DenseBeginning(3, 4, 2))
    run.until(stop)
    resumed = run.resumed()
    run.until(stop + 14)
    resumed.until(stop + 14)
    assert unlike(resumed.seen(), run.seen()) == []


def saved_by_an_older_version(warmup_steps: int) -> Any:
    run = Groups(**SHORT)
    run.until(3)
    saved = copy.deepcopy(run.saved())
    for state in saved[1]:
        state["warmup_steps"] = warmup_steps
    return saved


def test_a_run_of_an_older_version_resumes_after_its_warmup_and_is_refused_before() -> None:
    resumed = Groups(**SHORT).load(saved_by_an_older_version(warmup_steps=3))
    assert [engine.rounds.timetable.schedule.dense for engine in resumed.engines] == [None, None]
    landed_at = [step for step in range(4, 20) if resumed.step()]
    assert landed_at[0] == 3 + 8 + 5, "rounds are counted from the end of the warm-up"
    assert_refused(
        r"after 3 inner steps, during a warm-up of 4 steps\. .* restart from the outer",
        Groups(**SHORT).load,
        saved_by_an_older_version(warmup_steps=4),
    )


@pytest.mark.parametrize("stop", [9, 11], ids=["waiting for a launch", "in flight"])
def test_requests_survive_a_stop_and_a_run_can_go_back(stop: int) -> None:
    run = Groups(**SHORT)
    run.until(8)
    run.engines[1].rounds.requests.ask(0b101)
    run.until(stop)
    saved = run.saved()
    seen = run.seen()
    resumed = run.resumed()
    resumed.until(18)
    requests = [(landing.launched_at, landing.requests) for landing in resumed.landings]
    assert requests == [(8, 0), (10, 0b101), (12, 0)]
    resumed.load(saved)
    assert unlike(resumed.seen(), seen) == []


LAYERED = {**fits.SHORT, "fragments": LAYERS}


def test_the_state_of_a_run_that_ended_is_that_before_its_end() -> None:
    run = Groups(**LAYERED)
    run.until(7)
    before = [copy.deepcopy(engine.state_dict()) for engine in run.engines]
    assert before[0]["flights"]
    run.groups.finish()
    for ended in (run, run.resumed()):
        assert str([engine.state_dict() for engine in ended.engines]) == str(before)


# Files of a user's own loop; `tests/large` resumes from them


def trained(steps: int = 5, worker_groups: int | str = "auto", **choices: Any) -> StreamingDiLoCo:
    run = Groups(joined=WorkerGroups(worker_groups), **{**LAYERED, **choices})
    run.until(steps)
    return run.engines[0]


def test_a_file_holds_the_model_and_a_second_save_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    engine = trained()
    engine.save(path)
    engine.save(path)
    assert len(list((tmp_path / "a.ckpt.sdiloco").iterdir())) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.ckpt", "a.ckpt.sdiloco"]
    content = torch.load(path, weights_only=True)
    assert content["state_dict"].keys() == dict(mlp().named_parameters()).keys()


def test_files_and_states_that_do_not_suit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    engine = trained()
    engine.save(path)
    without_optimizer = StreamingDiLoCo(mlp(), **LAYERED)
    words = "contains the state of 1 inner optimizers, but this run has 0"
    assert_refused(words, without_optimizer.load, path)
    words = "different settings: sync_every was 4, now it is 5"
    assert_refused(words, trained(0, sync_every=5).load, path)
    words = "schedule was None, now it is Selective"
    assert_refused(words, trained(0, schedule=Selective()).load, path)
    assert_refused("There is no checkpoint", trained(0).load, tmp_path / "b.ckpt")
    assert_refused("simulated in one", Groups(**LAYERED).engines[1].save, path)
    for missing_key in ("rank", "settings"):
        state = dict(engine.state_dict())
        del state[missing_key]
        assert_refused("saved by an earlier version", trained(0).load_state_dict, state)
    content = torch.load(path, weights_only=True)
    content["streaming_diloco"] |= {"format": 1, "version": "7.0"}
    torch.save(content, path)
    words = "written in format 1 by lightning_sdiloco 7.0.* this version reads only format 3"
    assert_refused(words, trained(0).load, path)


def test_the_state_of_another_rank_and_a_file_of_other_groups_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def resume(rank: int, world_size: int) -> None:
        engine = trained()
        engine.save(path)
        states = [engine.state_dict()]
        torch.distributed.broadcast_object_list(states)  # as from a file that rank 0 wrote alone
        assert (
            "saved with {'worker_groups': 2, 'group_size': 1}, but this run has {'worker_groups': 1"
        ) in refusal(trained(0, worker_groups=1).load, path)
        if rank == 0:
            trained(0).load_state_dict(states[0])
            return
        message = refusal(trained(0).load_state_dict, states[0])
        assert (
            "rank 0 of worker group 0 (2 groups of 1), but this process is rank 0 of worker group"
            " 1 (2"
        ) in message
        assert "engine.save(path)" in message
        assert "register_for_check" in message

    run_ranks(resume, 2)


def test_ranks_that_load_unlike_files_are_refused(tmp_path: Path) -> None:
    words = (
        r"the start is inner step 5 \(save \w{8}\) on rank 0,"
        r" inner step 6 \(save \w{8}\) on rank 1\. Pass the"
    )

    def resume(rank: int, world_size: int) -> None:
        for steps in (5, 6):
            trained(steps).save(tmp_path / f"{steps}.ckpt")
        assert_refused(words, trained(0).load, tmp_path / f"{5 + rank}.ckpt")

    run_ranks(resume, 2)


def test_a_device_that_nobody_uses_is_not_asked_for_its_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that was forked by one that knows of the device could not answer."""

    def refuse() -> Tensor:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", refuse)
    assert "cuda" not in random_state()


# Rounds that restart


@cache
def states(**choices: Any) -> list[list[Any]]:
    """After 20 steps, when fragments 1, 2 and 3 are in flight, and all have momentum."""
    run = Groups(**SHORT, **choices)
    run.until(20)
    return [[through_a_file(engine.state_dict())] for engine in run.engines]


@settings(max_examples=8, deadline=None)
@given(
    fragments=st.sampled_from(["balanced", 4, "strided:1", [["*"]], LAYERS[::-1]]),
    groups=st.integers(1, 3),
    compression=st.sampled_from(sorted(COMPRESSIONS)),
)
def test_any_groups_and_fragments_go_on_from_the_same_outer_parameters_and_agree(
    fragments: Any, groups: int, compression: str
) -> None:
    restart = restart_from(states(compression="sparse"), Settings(compression="sparse"))
    choices = {"fragments": fragments, "compression": compression}
    run = Groups(groups, "sgd", sync_every=3, overlap_steps=1, **choices)
    for engine in run.engines:
        restart.begin(engine.rounds, engine.history)
        assert_restarted(engine)
    for name, values in run.groups.outer_state_dict().items():
        assert torch.equal(values.flatten(), restart.parameters[name].values)
        for model in run.models:
            assert torch.equal(model.get_parameter(name), values)
    for step in range(1, 8):
        landings = run.step()
        if len(run.engines[0].fragments) == 1:
            assert bool(landings) == (step in (4, 7))
    expected = outer_parameters(run.engines[0])
    for engine in run.engines:
        assert all(map(torch.equal, outer_parameters(engine), expected))


def assert_restarted(engine: StreamingDiLoCo) -> None:
    assert (engine.inner_steps, engine.rounds.timetable.began_at) == (20, 20)
    for fragment in outer_state(engine):
        assert fragment["memory"] is None, "values that waited are forgotten"


def outer_parameters(engine: StreamingDiLoCo) -> list[Tensor]:
    return [fragment["outer"] for fragment in outer_state(engine)]


def test_a_restart_without_the_files_of_all_ranks_of_any_group_is_refused() -> None:
    (state,), (state_of_group_1,) = states()
    words = "no worker group has the files of all of its ranks"
    assert_refused(words, restart_from, [[state, None], [None, state_of_group_1]], Settings())


@pytest.mark.parametrize(
    ("rounds", "expected"), [(10, [26, 28, 31, 33]), (12, [23, 24, 25, 26, 30, 32])]
)
def test_restarted_rounds_finish_the_dense_beginning_and_resume(
    rounds: int, expected: list[int]
) -> None:
    """The restart is after 20 steps, which are ten dense rounds."""
    restart = restart_from(states(), Settings())
    dense = DenseBeginning(rounds, 2, 1)
    choices = {"sync_every": 5, "overlap_steps": 1, "fragments": 2, "dense_beginning": dense}
    run = Groups(inner="sgd", **choices)
    for engine in run.engines:
        restart.begin(engine.rounds, engine.history)
    landed_at = [step for step in range(21, 34) for _ in run.step()]
    assert landed_at == expected
    resumed = run.resumed()
    run.until(44)
    resumed.until(44)
    assert unlike(resumed.seen(), run.seen()) == []


def test_all_buffers_travel_with_the_first_launch_of_restarted_rounds() -> None:
    run = Groups(net=with_statistics, sync_every=2, overlap_steps=0, mixing=0.0, fragments=[["*"]])
    restart = restart_from([[engine.state_dict()] for engine in run.engines], Settings())
    for group, (engine, model) in enumerate(zip(run.engines, run.models, strict=True)):
        restart.begin(engine.rounds, engine.history)
        model[7].running_mean.fill_(float(group))
    run.groups.step()
    run.groups.step()
    assert [model[7].running_mean.tolist() for model in run.models] == [[0.5] * 3] * 2


CHECKPOINT_AT = 19  # fragments have landed before, and two are in flight
END = CHECKPOINT_AT + 8


class Restart(NamedTuple):
    """A fit that starts from a checkpoint of two groups, and what it reports."""

    ranks: int
    choices: dict[str, Any]
    lost_flights: int = 0
    fresh_groups: str = "none"
    """Groups with a fresh inner optimizer."""
    change: str = ""


CODE = {"sync_every": 9, "compression": "fp32"}
CODE_CHANGE = "sync_every was 8, now it is 9; compression was 'fp4', now it is"
ADAMW = {"outer_optimizer": torch.optim.AdamW}
ADAMW_CHANGE = "outer_optimizer was None, now it is AdamW"
BALANCED_CHANGE = "fragments was 'strided:1', now it is 'balanced'"
ANEW = {"resume": "restart"}
RESTARTS = {
    "three groups": Restart(3, {"groups": 3}, fresh_groups="2"),
    "lost file": Restart(3, {"groups": 3}, lost_flights=2, fresh_groups="1, 2"),
    "two ranks in a group": Restart(4, {}),
    "code": Restart(2, {**ANEW, **CODE}, change=CODE_CHANGE),
    "fragments": Restart(2, {**ANEW, "fragments": "balanced"}, change=BALANCED_CHANGE),
    "outer optimizer": Restart(2, {**ANEW, **ADAMW}, lost_flights=2, change=ADAMW_CHANGE),
}


def resumed(rank: int, world_size: int, path: Path, **choices: Any) -> tuple[Trained, str]:
    """A fit resumed from a checkpoint, and the warnings of our loggers."""
    warnings = fits.said_by("lightning_sdiloco")
    fitted = run_fit(rank, world_size, LIGHTNING, END, [], str(path), **choices)
    return fitted, "".join(warnings)


def restarted(path: Path, incomplete: Path) -> dict[str, list[tuple[Trained, str]]]:
    """The fits of all restarts, by name and rank."""
    fitted = {}
    for ranks in (2, 3, 4):
        runs = {
            name: partial(
                resumed, path=incomplete if name == "lost file" else path, **restart.choices
            )
            for name, restart in RESTARTS.items()
            if restart.ranks == ranks
        }
        fitted |= fits.play(ranks, runs)
    return fitted


def assert_reported(expected: Restart, ranks: list[tuple[Trained, str]]) -> None:
    outer = ranks[0][0]["outer"]
    for fitted, _ in ranks:
        assert unlike(fitted["outer"], outer) == []
        assert fitted["report"]["flights_dropped"] == expected.lost_flights
        assert fitted["report"]["inner_steps"] == END
    counts = [warnings.count("cannot be resumed exactly") for _, warnings in ranks]
    assert counts == [1, *[0] * (expected.ranks - 1)], "said once"
    warning = ranks[0][1]
    assert f"Number of flights lost so far: {expected.lost_flights}" in warning
    assert f"fresh inner optimizer: {expected.fresh_groups}" in warning
    assert expected.change in warning


def inner_state(saved: Any) -> Values:
    """The inner state of a group's file, by the names of `held_by`."""
    parameters = saved["optimizer_states"][0]["state"].items()
    return {f"{i} {key}": values for i, state in parameters for key, values in state.items()}


def assert_started_from(
    restart: Any, inner: list[Values], ranks: list[tuple[Trained, str]]
) -> None:
    for (fitted, _), inner_of_rank in zip(ranks, inner, strict=True):
        first = fitted["trace"][CHECKPOINT_AT]
        for name, parameter in restart.parameters.items():
            assert torch.equal(first[f"outer {name}"].flatten(), parameter.values)
            assert torch.equal(first[name].flatten(), parameter.values), "so do local parameters"
        for name, values in restart.untrained.items():
            assert torch.equal(first[name], values)
        started = {key: values for key, values in first.items() if key.split()[0].isdigit()}
        assert unlike(started, inner_of_rank) == []


def saved_fit(folder: Path) -> Path:
    """The checkpoint of a fit of two groups."""
    callbacks = saving(LIGHTNING, folder, every_n_train_steps=CHECKPOINT_AT)
    run_processes(run_fit, 2, LIGHTNING, CHECKPOINT_AT + 2, callbacks)
    return folder / f"step={CHECKPOINT_AT}.ckpt"


def test_fits_with_other_groups_settings_or_files_start_from_the_outer_parameters(
    tmp_path: Path,
) -> None:
    """The flights of the checkpoint have landed in them."""
    path = saved_fit(tmp_path / "whole")
    incomplete = tmp_path / "incomplete" / path.name
    shutil.copytree(path.parent, incomplete.parent)
    (save_folder(incomplete) / "rank_00001.pt").unlink()
    fitted = restarted(path, incomplete)
    for name, expected in RESTARTS.items():
        assert_reported(expected, fitted[name])
    files = sorted(save_folder(path).glob("rank_*.pt"))
    saved = [torch.load(file, weights_only=True) for file in files]
    assert len(saved[0]["engine"]["flights"]) == 2
    restart = restart_from([[state["engine"]] for state in saved], Settings())
    first, second = map(inner_state, saved)
    fresh = {}
    for_two_ranks = [first, first, second, second]
    assert_started_from(restart, [first, second, fresh], fitted["three groups"])
    assert_started_from(restart, for_two_ranks, fitted["two ranks in a group"])


# Models that are cut again


def with_recuts(rank: int, world_size: int) -> Values:
    """Cuts a model again before training, and after 20 steps, in flight."""
    rates = OuterOptimizer(lr_schedule=partial(LinearLR, start_factor=0.1, total_iters=100))
    run = Groups(
        inner="sgd",
        joined=WorkerGroups(2),
        net=lambda seed: mlp(seed).append(nn.Identity()),
        fragments="strided:1",
        compression="sparse",
        sync_every=8,
        overlap_steps=5,
        outer_momentum=0.9,
        outer_optimizer=rates,
    )
    (model,) = run.models
    (engine,) = run.engines
    model[0].requires_grad_(False)
    engine.recut()
    run.until(20)
    model[0].requires_grad_(True)
    model[6].requires_grad_(False)
    model[7] = nn.BatchNorm1d(3)
    model[7].running_mean.fill_(float(rank))
    assert not engine.fragmented_model.cut_model.is_same()
    flights = len(engine.rounds.in_flight)
    assert flights
    landings = run.landings + engine.recut()
    assert engine.report()["landings"] == len(landings) == len(run.landings) + flights
    assert_state_after_recut(engine)
    run.landings = []
    run.until(27)
    steps_in_rounds = engine.inner_steps - engine.rounds.timetable.began_at
    assert (steps_in_rounds, engine.rounds.in_flight) == (7, ()), "a round begins anew"
    run.until(39)
    assert_rates_go_on(landings, run.landings, len(engine.fragments))
    engine.finish()
    return copied(model.state_dict())


def assert_state_after_recut(engine: StreamingDiLoCo) -> None:
    names = {name for fragment in engine.fragments for name in fragment.names}
    assert names == {f"{layer}.{kind}" for layer in (0, 2, 4, 7) for kind in ("weight", "bias")}
    for fragment in outer_state(engine):
        assert fragment["memory"] is None, "values that waited are forgotten"
    parameters = restart_from([[engine.state_dict()], [None]], Settings()).parameters
    assert parameters["2.weight"].state["momentum_buffer"].any()
    assert "momentum_buffer" not in parameters["0.weight"].state, "it starts without momentum"


def assert_rates_go_on(before: list[Landing], after: list[Landing], fragments: int) -> None:
    assert {landing.fragment for landing in after} == set(range(fragments))
    (rate,) = {landing.outer_lr for landing in after}
    earlier_rates = [landing.outer_lr for landing in before]
    assert rate > max(earlier_rates), "new fragments have the rate of the others"


def test_a_recut_lands_flights_and_keeps_momentum_rates_and_frozen_outer_values() -> None:
    assert unlike(*run_ranks(with_recuts, 2)) == []


def test_a_recut_on_one_rank_is_refused() -> None:
    def run(rank: int, world_size: int) -> None:
        model = mlp()
        engine = StreamingDiLoCo(model, fragments="balanced")
        model[0].requires_grad_(rank == 0)
        engine.recut()

    errors = run_ranks(run, 2, expect_failure=True)
    assert len(errors) == 2
    assert all("The model differs between ranks: 0.weight" in error for error in errors.values())


def unfreeze(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def append(model: nn.Sequential) -> None:
    model.append(nn.Sequential(nn.Linear(3, 3)))


@pytest.mark.parametrize(("change", "name"), [(unfreeze, "0.weight"), (append, "7.0.weight")])
def test_a_newly_trainable_layer_without_a_recut_is_refused_at_the_next_launch(
    change: Any, name: str
) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    engine = StreamingDiLoCo(model, sync_every=9, overlap_steps=0, fragments=LAYERS[1:])
    for _ in range(9):
        engine.step()
    assert engine.report()["launches"] == 1
    change(model)
    for _ in range(2):
        engine.step()
    words = (
        rf"2 parameters .* such as '{name}'.*freeze, unfreeze or replace parameters between epochs"
    )
    with pytest.raises(AgreementError, match=words):
        engine.step()


def finetuning(distribution: str) -> Any:
    """Unfreezes the first layer at epoch 1, and freezes the last at epoch 2."""

    class Finetuning(importlib.import_module(distribution).callbacks.BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net[0])

        def finetune_function(
            self, module: Any, epoch: int, optimizer: torch.optim.Optimizer
        ) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.01)
            if epoch == 2:
                self.freeze(module.net[6])

    return Finetuning()


def adamw_of_trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def traced_for_finetuning(distribution: str, seed: int) -> Any:
    model = traced(distribution, seed, net=partial(mlp, seed))
    model.configure_optimizers = partial(adamw_of_trainable, model)
    return model


def finetuned(
    rank: int, world_size: int, groups: int, callbacks: list[Any], path: Path | None = None
) -> Trained:
    """Fits three epochs of six steps with the other distribution."""
    return run_fit(
        rank,
        world_size,
        OTHER,
        -1,
        [finetuning(OTHER), *callbacks],
        path,
        groups=groups,
        make=traced_for_finetuning,
        sync_every=4,
        overlap_steps=2,
        trainer_choices={"max_epochs": 3, "limit_train_batches": 6},
    )


def trained_at(fitted: Trained, step: int, later: int) -> bool:
    """True if the first layer moved between two steps."""
    weights = [fitted["trace"][number]["net.0.weight"] for number in (step, later)]
    return not torch.equal(*weights)


def local_values(fitted: Trained, step: int) -> Values:
    held_values = fitted["trace"][step].items()
    return {name: values for name, values in held_values if name.startswith("net.")}


def assert_resumed_at(step: int, fitted: Trained, expected: Trained) -> None:
    assert sorted(fitted["trace"]) == list(range(step, 18))
    for later_step, values in fitted["trace"].items():
        assert unlike(values, expected["trace"][later_step]) == [], later_step
    assert unlike(fitted["model"], expected["model"]) == []


def test_a_finetuning_callback_recuts_between_epochs_and_the_fit_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    """From the end of epochs and from their middle; and with other groups, which train the layer
    too.
    """
    callbacks = saving(OTHER, tmp_path, every_n_train_steps=3)
    fits_of_ranks = run_processes(finetuned, 4, 2, callbacks)
    for fitted in fits_of_ranks:
        assert {name.split(".")[1] for name in fitted["outer"]} == {"0", "2", "4"}
        assert unlike(fitted["model"], fits_of_ranks[0]["model"]) == []
        assert not trained_at(fitted, 0, 5), "frozen in the first epoch"
        assert trained_at(fitted, 7, 11), "trained in the second"
    # DistributedDataParallel averages the gradients of the unfrozen layer too, so the ranks of a
    # group hold the same local values.
    for step in range(18):
        assert unlike(*(local_values(fitted, step) for fitted in fits_of_ranks[:2])) == []

    def resume(rank: int, world_size: int) -> None:
        for step in (6, 9):
            fitted = finetuned(rank, 4, 2, [], tmp_path / f"step={step}.ckpt")
            assert_resumed_at(step, fitted, fits_of_ranks[rank])

    run_processes(resume, 4)
    with_three_groups = run_processes(finetuned, 3, 3, [], tmp_path / "step=9.ckpt")
    for fitted in with_three_groups:
        assert trained_at(fitted, 10, 11)
        assert unlike(fitted["outer"], with_three_groups[0]["outer"]) == []


def test_a_group_that_begins_an_epoch_without_data_recuts_with_the_others() -> None:
    def fit(rank: int, world_size: int) -> tuple[Values, int]:
        strategy = fits.strategy(worker_groups=2, **{**CHOICES, "sync_every": 6})
        callbacks = [finetuning(LIGHTNING)]
        trainer = fits.trainer(strategy=strategy, devices=2, max_epochs=2, callbacks=callbacks)
        loader = fits.Stream((1, 0, 1), 10, 0) if rank else fits.Announced((0, 0, 1), 100)
        trainer.fit(fits.module(seed=rank), loader)
        return strategy.outer_state_dict(), strategy.report()["inner_steps"]

    (outer, steps), (outer_of_group_1, steps_of_group_1) = run_processes(fit, 2)
    assert unlike(outer_of_group_1, outer) == []
    assert steps == steps_of_group_1
    assert "net.0.weight" in outer

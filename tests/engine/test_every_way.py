"""One run in every way: simulated, in processes, by groups of several ranks, stopped and resumed,
and restarted.

Restarted are rounds with other groups, shards or settings, and after parameters were frozen or
unfrozen.
"""

import copy
import importlib
import re
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from lightning_sdiloco import (
    Carry,
    DenseBeginning,
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
from tests.engine.test_policies import DelayCompensation, Loudest, Rarer
from tests.fits import LIGHTNING, refusal
from tests.lightning.test_checkpoint import CHOICES, run_fit, save_folder, saving, traced
from tests.methods import ByMedian, DelayedNesterov, ZScore
from tests.ranks import agreed, run_processes, run_ranks
from tests.training import LAYERS, mlp


def is_idle(group: int, step: int) -> bool:
    return step % 20 > 12 + 2 * group or (group == 1 and step in (6, 7, 8, 9, 10))


def growing(model: nn.Module, group: int, step: int, place: int, size: int) -> Tensor:
    """A loss of which the second group's becomes five times as large, so that the guard leaves it
    out.
    """
    return regression(model, group, step, place, size) * (5.0 if group == 1 and step > 15 else 1.0)


MENU = ("fp4", "int2", "sparse")
LINKS = [1e9, 11.0, 1.0]
"""Bytes per second: in 3 seconds enough for the first code, for the second of the first layer, and
for none."""

BASE: dict[str, Any] = {"groups": 3, "sync_every": 8, "overlap_steps": 5}
BASE |= {"net": with_statistics, "fragments": [*LAYERS[:2], ["4.*", "7.*"], ["6.*"]]}
COSINE = OuterOptimizer(
    lr_schedule=partial(CosineAnnealingLR, T_max=7), clip_norm=0.2, outlier_guard=1.01
)
EVERYTHING: dict[str, Any] = {
    "sync_every": 3,
    "overlap_steps": 2,
    "outer_lr": 0.4,
    "outer_momentum": 0.9,
}
EVERYTHING |= {"mixing": 0.5, "idle": is_idle, "outer_optimizer": COSINE}
GROWING: dict[str, Any] = {"inner": "sgd", "loss": growing}
EVERYTHING["micro_batches"] = lambda group, step: 1 + (group + step) % 3
# "sparse" has the parts of "top_k", and "random_k" those of "random_block".
CASES: dict[str, dict[str, Any]] = {
    name: {"compression": name} for name in COMPRESSIONS if name not in ("top_k", "random_block")
}
CASES |= {
    "gather": {"exchange": "gather"},
    "matrices": {
        "outer_optimizer": OuterOptimizer(direction="equalised", matrices={"0.weight": 0})
    },
    "uneven parts": {
        "exchange": TwoShot((0.7, 0.3, 0)),
        "compression": "fp4+memory",
        "mixing": 0.25,
    },
    "mean over senders": {
        "compression": ErrorFeedback(TopK(1 / 16, Int2(), over="senders"), decay=0.95)
    },
    "thresholds that are kept": {"compression": ErrorFeedback(Threshold(1 / 16, Int2(), every=3))},
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
    "delayed Nesterov": {
        "outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=3, spread=0.1)
    },
    "pairs": {
        "groups": 4,
        "route": RandomPairs(),
        "outer_lr": 0.7,
        "outer_momentum": 0.5,
        "compression": "fp32",
    },
    "ring": {"groups": 4, "route": Ring(), "compression": "fp32", "mixing": 0.25},
}
CASES = {name: {**BASE, **case} for name, case in CASES.items()}
STEPS = 24
STOPS = (7, 12, 18)


@cache
def whole(name: str) -> tuple[Groups, dict[int, Values], list[list[Values]]]:
    """A simulation that does not stop: all of it after some steps, and what groups hold after
    every landing.
    """
    run = Groups(**CASES[name])
    seen = {}
    landed = []
    for step in range(1, STEPS + 1):
        if run.step():
            landed.append([held(*both) for both in zip(run.engines, run.models, strict=True)])
        if step in (*STOPS, 9, 15, STEPS):
            seen[step] = run.seen()
    run.groups.finish()
    return run, seen, landed


def test_processes_stopped_in_flight_match_the_bits_and_bytes_of_a_whole_simulation() -> None:
    for name in CASES:
        whole(name)

    def play(rank: int, world_size: int) -> dict[str, Any]:
        joined = WorkerGroups(world_size)
        wrong = dict[str, Any]()
        for name, case in CASES.items():
            if case["groups"] != world_size:
                continue
            here = Groups(**case, joined=joined)
            seen = []
            while here.steps < STEPS:
                if here.step():
                    seen.append(held(here.engines[0], here.models[0]))
                if here.steps == 14:
                    (before,), here = here.engines, here.resumed()
                    before.close()
            here.engines[0].finish()
            run, _, landed = whole(name)
            values = [*(own[rank] for own in landed), copied(run.models[rank].state_dict())]
            off = [
                unlike(*both)
                for both in zip([*seen, copied(here.models[0].state_dict())], values, strict=True)
            ]
            report, expected = (engine.report() for engine in (here.engines[0], run.engines[rank]))
            counts = [
                key
                for key in ("bytes_sent", "launches", "landings")
                if report[key] != expected[key]
            ]
            if any(off) or counts:
                wrong[name] = off, counts
        return wrong

    assert run_ranks(play, 3) == [{}] * 3
    assert run_ranks(play, 4) == [{}] * 4
    sent = {
        name: [engine.report()["bytes_sent"] for engine in whole(name)[0].engines] for name in CASES
    }
    assert len(set(sent["by link"])) == 3, "each has its own code"
    assert sent["uneven parts"] == sorted(set(sent["uneven parts"]))[::-1], (
        "who averages nothing sends one payload"
    )


# What a shard makes no difference to.
SKIP = {
    "bf16",
    "int8",
    "int4",
    "a block by chance",
    "by median",
    "delayed Nesterov",
    "uneven parts",
    "by link",
}


def test_all_ranks_of_groups_of_two_hold_the_same_bits_after_every_landing() -> None:
    # Without BatchNorm, of which a rank sees its own part of a batch.
    cases = {
        name: {**case, "net": mlp, "fragments": LAYERS}
        for name, case in CASES.items()
        if name not in SKIP
    }
    cases = {name: case for name, case in cases.items() if case["groups"] == 3}

    def play(rank: int, world_size: int) -> dict[str, Any]:
        joined = WorkerGroups(2)
        wrong = dict[str, Any]()
        for name, chosen in cases.items():
            here = Groups(**chosen, joined=joined)
            (engine,) = here.engines
            alike = [agreed(engine.outer_state_dict()) for _ in range(19) if here.step()]
            engine.finish()
            off = unlike(copied(here.models[0].named_parameters()), engine.outer_state_dict())
            if not all(alike) or len(alike) < 4 or off or not agreed(engine.outer_state_dict()):
                wrong[name] = alike, off
        return wrong

    assert run_ranks(play, 4) == [{}] * 4


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_stopped_anywhere_goes_on_as_if_it_never_stopped(name: str) -> None:
    (run, expected, _), first, in_flight = whole(name), Groups(**CASES[name]), set()
    for stop in STOPS:
        # Taking the state changes nothing in the run that goes on.
        assert first.differs(expected, stop) == {}
        second = first.resumed()
        in_flight.add(len(second.engines[0].in_flight))
        assert second.differs(expected, STEPS) == {}
        second.groups.finish()
        assert unlike(second.seen(), run.seen()) == []
    assert max(in_flight) > 0
    if name.startswith("everything"):
        assert any(landing.outlying for landing in run.landings), "the guard acted"


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("pairs", "ring")])
def test_flights_land_at_a_restart_as_their_groups_would_have_landed_them(name: str) -> None:
    for poisons in (False, True) if name == "fp4" else (False,):
        run = Groups(**CASES[name])
        run.until(7 if "dense" in name else 20)
        if poisons:  # parameters, which leave a group out, and buffers, which leave themselves out
            run.models[1][4].weight.data[0, 0] = float("nan")
            run.models[2][7].running_var[1] = float("nan")
            run.until(28)
        saved = [[through_a_file(engine.state_dict())] for engine in run.engines]
        restart = restart_from(saved, Settings(**run.choices))
        assert "dense" not in name or run.engines[0].schedule.is_dense(run.steps)
        run.until(run.steps + run.engines[0].schedule.overlap_of(run.steps))
        # Without the flights of now, since a group is missing.
        landed = restart_from([[run.engines[0].state_dict()], [None]], Settings())
        assert restart.counts["flights_dropped"] == 0
        assert restart.counts["landings"] == landed.counts["landings"]
        assert unlike(restart.untrained, landed.untrained) == []
        for parameter, own in landed.parameters.items():
            assert torch.equal(restart.parameters[parameter].values, own.values), parameter
            assert unlike(restart.parameters[parameter].state, own.state) == []


SHORT: dict[str, Any] = {**BASE, "groups": 2}


@pytest.mark.parametrize("stop", range(2, 22))
def test_a_dense_beginning_resumes_bit_for_bit_wherever_it_stops(stop: int) -> None:
    whole = Groups(**SHORT, dense_beginning=DenseBeginning(3, 4, 2))
    whole.until(stop)
    resumed = whole.resumed()
    for run in (whole, resumed):
        run.until(stop + 14)
    assert unlike(resumed.seen(), whole.seen()) == []


def test_a_run_of_an_older_version_resumes_after_its_warmup_and_is_refused_before() -> None:
    run = Groups(**SHORT)
    run.until(3)
    saved = copy.deepcopy(run.saved())
    for state in saved[1]:
        state["warmup_steps"] = 3
    after = Groups(**SHORT).load(saved)
    assert [engine.schedule.dense for engine in after.engines] == [None, None]
    assert [step for step in range(4, 20) if after.step()][0] == 3 + 8 + 5, (
        "rounds are counted from its end"
    )
    for state in saved[1]:
        state["warmup_steps"] = 4
    with pytest.raises(
        ValueError, match=r"after 3 inner steps, inside a warm-up of 4, .* restart from the outer"
    ):
        Groups(**SHORT).load(saved)


def test_engines_that_trained_on_or_ended_can_go_back_and_requests_survive_a_stop() -> None:
    first = Groups(**SHORT)
    first.until(8)
    first.engines[1].request(0b101)
    # It waits for a launch, or is in flight.
    for stop in (9, 11):
        first.until(stop)
        saved = first.saved()
        seen = first.seen()
        second = first.resumed()
        second.until(18)
        asked = [(landing.launched_at, landing.requests) for landing in second.landings]
        assert asked == [(8, 0), (10, 0b101), (12, 0)]
        second.load(saved)
        assert unlike(second.seen(), seen) == []
    # After the end the state is that before it.
    run = Groups(**OWN)
    run.until(7)
    before = [copy.deepcopy(engine.state_dict()) for engine in run.engines]
    assert before[0]["flights"]
    run.groups.finish()
    for engine, other, state in zip(run.engines, run.resumed().engines, before, strict=True):
        assert str(engine.state_dict()) == str(state) == str(other.state_dict())


# Files of one's own loop; `tests/large` resumes from them

OWN: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": LAYERS}


def trained(steps: int = 5, worker_groups: int | str = "auto", **choices: Any) -> StreamingDiLoCo:
    here = Groups(joined=WorkerGroups(worker_groups), **{**OWN, **choices})
    here.until(steps)
    return here.engines[0]


def test_a_file_holds_the_model_a_second_save_replaces_it_and_unfit_ones_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.ckpt"
    engine = trained()
    for _ in range(2):
        engine.save(path)
    assert len(list((tmp_path / "a.ckpt.sdiloco").iterdir())) == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.ckpt", "a.ckpt.sdiloco"]
    content = torch.load(path, weights_only=True)
    assert content["state_dict"].keys() == dict(mlp().named_parameters()).keys()
    state = engine.state_dict()
    parts = [
        {key: value for key, value in state.items() if key != left} for left in ("rank", "settings")
    ]
    found = [
        (
            "holds the state of 1 inner optimizers, but there are 0",
            refusal(StreamingDiLoCo(mlp(), **OWN).load, path),
        ),
        (
            "other settings: sync_every was 4, now it is 5",
            refusal(trained(0, sync_every=5).load, path),
        ),
        (
            "schedule was None, now it is Selective",
            refusal(trained(0, schedule=Selective()).load, path),
        ),
        ("There is no checkpoint", refusal(trained(0).load, tmp_path / "b.ckpt")),
        ("simulated in one", refusal(Groups(**OWN).engines[1].save, path)),
        *(
            ("of an earlier version, which this", refusal(trained(0).load_state_dict, part))
            for part in parts
        ),
    ]
    content["streaming_diloco"] |= {"format": 1, "version": "7.0"}
    torch.save(content, path)
    other = "written in format 1 by lightning_sdiloco 7.0.* this version reads only format 3"
    found.append((other, refusal(trained(0).load, path)))
    assert [(words, said) for words, said in found if not re.search(words, said)] == []


def test_the_state_of_another_rank_and_a_file_of_other_groups_are_refused(tmp_path: Path) -> None:
    def resume(rank: int, world_size: int) -> list[str]:
        engine = trained()
        engine.save(tmp_path / "a.ckpt")
        states = [engine.state_dict()]
        torch.distributed.broadcast_object_list(states)  # as from a file that rank 0 wrote alone
        refused = [refusal(trained(0, worker_groups=1).load, tmp_path / "a.ckpt")]
        if rank == 0:
            trained(0).load_state_dict(states[0])
            return refused
        return [*refused, refusal(trained(0).load_state_dict, states[0])]

    (layout,), (also, other) = run_ranks(resume, 2)
    assert layout == also
    assert (
        "saved with {'worker_groups': 2, 'group_size': 1}, now there are {'worker_groups': 1"
        in layout
    )
    told = (
        "rank 0 of worker group 0 (2 groups of 1), but this process is rank 0 of worker group 1 (2"
    )
    assert [
        words for words in (told, "engine.save(path)", "register_for_check") if words not in other
    ] == []


def test_ranks_that_load_unlike_files_are_refused(tmp_path: Path) -> None:
    def resume(rank: int, world_size: int) -> str:
        for steps in (5, 6):
            trained(steps).save(tmp_path / f"{steps}.ckpt")
        return refusal(trained(0).load, tmp_path / f"{5 + rank}.ckpt")

    told = r"the start is inner step 5 \(save \w{8}\) on rank 0, inner step 6 \(save \w{8}\) on rank 1\. Give all"
    assert [words for words in run_ranks(resume, 2) if not re.search(told, words)] == []


def test_a_device_that_nobody_uses_is_not_asked_for_its_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that was forked by one that knows of the device could not answer."""

    def asked() -> torch.Tensor:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", asked)
    assert "cuda" not in random_state()


# Rounds that start anew


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
    after = Groups(
        groups, "sgd", fragments=fragments, compression=compression, sync_every=3, overlap_steps=1
    )
    for engine in after.engines:
        engine.restart(restart)
        assert (engine.inner_steps, engine.steps_in_rounds) == (20, 0)
        assert all(own["memory"] is None for own in outer_state(engine)), "what waited is forgotten"
    for name, values in after.groups.outer_state_dict().items():
        assert torch.equal(values.flatten(), restart.parameters[name].values)
        assert all(
            torch.equal(dict(model.named_parameters())[name].detach(), values)
            for model in after.models
        )
    for step in range(1, 8):
        assert (
            bool(after.step()) == (step % 3 == 1 and step > 3)
            or len(after.engines[0].fragments) > 1
        )
    first, *others = ([own["outer"] for own in outer_state(engine)] for engine in after.engines)
    assert all(all(map(torch.equal, first, other)) for other in others)


def test_restarted_rounds_finish_the_dense_beginning_resume_and_send_all_buffers() -> None:
    (one,), (other,) = states()
    with pytest.raises(ValueError, match="No worker group has the files of all its ranks"):
        restart_from([[one, None], [None, other]], Settings())
    restart = restart_from(states(), Settings())
    for rounds, left in ((10, 0), (12, 2)):
        dense = DenseBeginning(rounds, 2, 1)
        whole = Groups(
            inner="sgd", sync_every=5, overlap_steps=1, fragments=2, dense_beginning=dense
        )
        for engine in whole.engines:
            engine.restart(restart)
        landed = [step for step in range(21, 34) for _ in whole.step()]
        expected = [own + 2 * number for number in range(left) for own in (23, 24)]
        last = 20 + 2 * left
        assert landed == [*expected, *(last + own for own in (6, 8, 11, 13) if last + own < 34)]
        resumed = whole.resumed()
        for run in (whole, resumed):
            run.until(44)
        assert unlike(resumed.seen(), whole.seen()) == []
    # All buffers travel with the first launch.
    run = Groups(net=with_statistics, sync_every=2, overlap_steps=0, mixing=0.0, fragments=[["*"]])
    restart = restart_from([[engine.state_dict()] for engine in run.engines], Settings())
    for group, (engine, model) in enumerate(zip(run.engines, run.models, strict=True)):
        engine.restart(restart)
        model[7].running_mean.fill_(float(group))
    run.groups.step()
    run.groups.step()
    assert [model[7].running_mean.tolist() for model in run.models] == [[0.5] * 3] * 2


CHECKPOINT_AT = 19  # fragments have landed before, and two are in flight
END = CHECKPOINT_AT + 8
CHANGES: list[tuple[dict[str, Any], str]] = [
    (
        {"sync_every": 9, "compression": "fp32"},
        "sync_every was 8, now it is 9; compression was 'fp4', now it is",
    ),
    ({"fragments": "balanced"}, "fragments was 'strided:1', now it is 'balanced'"),
    ({"outer_optimizer": torch.optim.AdamW}, "outer_optimizer was None, now it is AdamW"),
]


def resumed(rank: int, world_size: int, path: Path, **choices: Any) -> Any:
    """A fit resumed from a checkpoint, and what our loggers warned of."""
    said = fits.said_by("lightning_sdiloco")
    return run_fit(rank, world_size, LIGHTNING, END, [], str(path), **choices), "".join(said)


def test_fits_with_other_groups_settings_or_files_start_from_the_outer_parameters(
    tmp_path: Path,
) -> None:
    """The flights of the checkpoint have landed in them."""
    callbacks = saving(LIGHTNING, tmp_path / "whole", every_n_train_steps=CHECKPOINT_AT)
    run_processes(run_fit, 2, LIGHTNING, CHECKPOINT_AT + 2, callbacks)
    path, gone = (tmp_path / folder / f"step={CHECKPOINT_AT}.ckpt" for folder in ("whole", "gone"))
    shutil.copytree(path.parent, gone.parent)
    (save_folder(gone) / "rank_00001.pt").unlink()
    files = [
        torch.load(file, weights_only=True) for file in sorted(save_folder(path).glob("rank_*.pt"))
    ]
    assert len(files[0]["engine"]["flights"]) == 2
    restart = restart_from([[file["engine"]] for file in files], Settings())
    changed = {
        told: partial(resumed, path=path, resume="restart", **choices) for choices, told in CHANGES
    }
    three = {
        "three": partial(resumed, path=path, groups=3),
        "gone": partial(resumed, path=gone, groups=3),
    }
    found = (
        fits.play(3, three)
        | fits.play(4, {"two": partial(resumed, path=path)})
        | fits.play(2, changed)
    )
    for name, ranks in found.items():
        assert all(unlike(fitted["outer"], ranks[0][0]["outer"]) == [] for fitted, _ in ranks)
        dropped = 2 if name == "gone" or name == CHANGES[-1][1] else 0
        assert [fitted["report"]["flights_dropped"] for fitted, _ in ranks] == [dropped] * len(
            ranks
        )
        assert [fitted["report"]["inner_steps"] for fitted, _ in ranks] == [END] * len(ranks)
        assert [told.count("not resumed exactly") for _, told in ranks] == [
            1,
            *[0] * (len(ranks) - 1),
        ], "said once"
        fresh = {"three": "2", "gone": "1, 2"}.get(name, "none")
        said = [
            f"Flights lost so far: {dropped}",
            f"fresh inner optimizer: {fresh}",
            name if name in changed else "",
        ]
        assert [words for words in said if words not in ranks[0][1]] == []
    for name in ("three", "two"):
        for rank, (fitted, _) in enumerate(found[name]):
            first = fitted["trace"][CHECKPOINT_AT]
            group = rank if name == "three" else rank // 2
            for parameter, own in restart.parameters.items():
                assert torch.equal(first[f"outer {parameter}"].flatten(), own.values)
                assert torch.equal(first[parameter].flatten(), own.values), (
                    "the local model starts there too"
                )
            assert all(
                torch.equal(first[buffer], values) for buffer, values in restart.untrained.items()
            )
            inner = {key: values for key, values in first.items() if key.split()[0].isdigit()}
            state = (
                files[group]["optimizer_states"][0]["state"] if group < 2 else {}
            )  # or a fresh inner optimizer
            assert (
                unlike(inner, {f"{i} {key}": v for i, of in state.items() for key, v in of.items()})
                == []
            )


def test_a_recut_lands_flights_and_keeps_momentum_rates_and_frozen_outer_values() -> None:
    def run(rank: int, world_size: int) -> Values:
        rates = OuterOptimizer(lr_schedule=partial(LinearLR, start_factor=0.1, total_iters=100))
        choices = {
            "fragments": "strided:1",
            "compression": "sparse",
            "outer_momentum": 0.9,
            "outer_optimizer": rates,
        }
        choices |= {
            "sync_every": 8,
            "overlap_steps": 5,
            "net": lambda seed: mlp(seed).append(nn.Identity()),
        }
        here = Groups(inner="sgd", joined=WorkerGroups(2), **choices)
        (model,), (engine,), before = here.models, here.engines, here.landings
        model[0].requires_grad_(False)
        engine.recut()
        here.until(20)
        landed = len(before)
        in_flight = len(engine.in_flight)
        assert in_flight
        model[0].requires_grad_(True)
        model[6].requires_grad_(False)
        model[7] = nn.BatchNorm1d(3)
        model[7].running_mean.fill_(float(rank))
        assert engine.has_other_parameters()
        before.extend(engine.recut())
        assert engine.report()["landings"] == len(before) == landed + in_flight
        names = {name for fragment in engine.fragments for name in fragment.names}
        assert names == {f"{layer}.{kind}" for layer in (0, 2, 4, 7) for kind in ("weight", "bias")}
        assert all(own["memory"] is None for own in outer_state(engine)), "what waited is forgotten"
        held = restart_from([[engine.state_dict()], [None]], Settings()).parameters
        assert held["2.weight"].state["momentum_buffer"].any()
        assert "momentum_buffer" not in held["0.weight"].state, "it starts without momentum"
        here.landings = []
        here.until(27)
        assert (engine.steps_in_rounds, engine.in_flight) == (7, ()), "a round begins anew"
        here.until(39)
        assert {landing.fragment for landing in here.landings} == set(range(len(engine.fragments)))
        (rate,) = {landing.outer_lr for landing in here.landings}
        assert rate > max(landing.outer_lr for landing in before), (
            "new fragments have that of the others"
        )
        engine.finish()
        return copied(model.state_dict())

    assert unlike(*run_ranks(run, 2)) == []


def test_a_recut_on_one_rank_or_a_newly_trainable_layer_without_one_is_refused() -> None:
    def run(rank: int, world_size: int) -> None:
        model = mlp()
        engine = StreamingDiLoCo(model, fragments="balanced")
        model[0].requires_grad_(rank == 0)
        engine.recut()

    errors = run_ranks(run, 2, expect_failure=True)
    assert len(errors) == 2
    assert all("The model differs between ranks: 0.weight" in error for error in errors.values())
    # At the next launch of any fragment.
    for name in ("0.weight", "7.0.weight"):
        model = mlp()
        model[0].requires_grad_(False)
        engine = StreamingDiLoCo(model, sync_every=9, overlap_steps=0, fragments=LAYERS[1:])
        for _ in range(9):
            engine.step()
        assert engine.report()["launches"] == 1
        if name == "0.weight":
            model[0].requires_grad_(True)
        else:
            model.append(nn.Sequential(nn.Linear(3, 3)))
        for _ in range(2):
            engine.step()
        told = rf"2 parameters .* such as '{name}'.*change what is trainable between epochs"
        with pytest.raises(AgreementError, match=told):
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


def finetuned(
    rank: int,
    world_size: int,
    groups: int,
    distribution: str,
    callbacks: list[Any],
    path: Path | None = None,
) -> Any:
    def make(distribution: str, seed: int) -> Any:
        model = traced(distribution, seed, net=partial(mlp, seed))
        model.configure_optimizers = lambda: torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad]
        )
        return model

    chosen: dict[str, Any] = {"trainer_choices": {"max_epochs": 3, "limit_train_batches": 6}}
    chosen |= {"groups": groups, "make": make, "sync_every": 4, "overlap_steps": 2}
    return run_fit(
        rank, world_size, distribution, -1, [finetuning(distribution), *callbacks], path, **chosen
    )


def test_a_finetuning_callback_recuts_between_epochs_and_the_fit_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    """From the end of epochs and from their middle; and with other groups, which train the layer
    too.
    """
    other = "pytorch_lightning"
    steps = (6, 9)
    ranks = run_processes(finetuned, 4, 2, other, saving(other, tmp_path, every_n_train_steps=3))
    for fitted in ranks:
        assert {name.split(".")[1] for name in fitted["outer"]} == {"0", "2", "4"}
        assert unlike(fitted["model"], ranks[0]["model"]) == []
        starts = fitted["trace"]
        assert torch.equal(starts[0]["net.0.weight"], starts[5]["net.0.weight"]), (
            "frozen in the first epoch"
        )
        assert not torch.equal(starts[7]["net.0.weight"], starts[11]["net.0.weight"]), (
            "trained in the second"
        )
    # The unfrozen layer is in DistributedDataParallel too: the ranks of a group hold the same local
    # values.
    for step in range(18):
        one, two = (
            {n: v for n, v in of["trace"][step].items() if n.startswith("net.")} for of in ranks[:2]
        )
        assert unlike(one, two) == []

    def resume(rank: int, world_size: int) -> list[Any]:
        return [finetuned(rank, 4, 2, other, [], tmp_path / f"step={step}.ckpt") for step in steps]

    for resumed, whole in zip(run_processes(resume, 4), ranks, strict=True):
        for step, one in zip(steps, resumed, strict=True):
            assert sorted(one["trace"]) == list(range(step, 18))
            assert [
                at for at, values in one["trace"].items() if unlike(values, whole["trace"][at])
            ] == []
            assert unlike(one["model"], whole["model"]) == []
    ranks = run_processes(finetuned, 3, 3, other, [], tmp_path / "step=9.ckpt")
    for fitted in ranks:
        starts = fitted["trace"]
        assert not torch.equal(starts[10]["net.0.weight"], starts[11]["net.0.weight"])
        assert unlike(fitted["outer"], ranks[0]["outer"]) == []


def test_a_group_that_begins_an_epoch_without_data_recuts_with_the_others() -> None:
    def fit(rank: int, world_size: int) -> Any:
        strategy = fits.strategy(worker_groups=2, **{**CHOICES, "sync_every": 6})
        trainer = fits.trainer(
            strategy=strategy, devices=2, max_epochs=2, callbacks=[finetuning(LIGHTNING)]
        )
        loader = fits.Stream((1, 0, 1), 10, 0) if rank else fits.Announced((0, 0, 1), 100)
        trainer.fit(fits.module(seed=rank), loader)
        return strategy.outer_state_dict(), strategy.report()["inner_steps"]

    (outer, steps), (other, other_steps) = run_processes(fit, 2)
    assert unlike(other, outer) == []
    assert steps == other_steps
    assert "net.0.weight" in outer

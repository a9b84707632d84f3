"""Trainings for loss and in virtual time: each does what its name says, and is made once, in pieces that fit."""

from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib", reason="the pictures of the benchmarks need matplotlib")

from benchmarks import finetuning, quality, runs, training
from benchmarks.backup_workers import BACKUP, Case, Play, goodput_at_most, goodput_of_all, wait_for_all
from benchmarks.comparison import Comparison
from benchmarks.methods import named
from benchmarks.methods.trained import MOST_DROPPED
from benchmarks.models import TINY
from benchmarks.runs import Runs
from benchmarks.training import Loop, NamedTraining, Training, made
from lightning_sdiloco import SimulatedGroups

OURS, DDP = quality.pair("tiny", sync_every=10)


def test_a_training_in_pieces_has_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(OURS, inner="muon", budget=0.6 * OURS.budget)
    whole, path, pieces = made(one), tmp_path / "runs.json", 0
    # Every look at the clock takes a second, so that pieces end with fragments in flight.
    ticks = count()
    monkeypatch.setattr(training.time, "time", lambda: next(ticks))
    while Runs("test", path).get(one) is None:
        Runs("test", path).make([one], 1, minutes=10 / 60)
        pieces += 1
    assert pieces > 1
    assert Runs("test", path)[one]["loss"] == whole["loss"]
    assert list(tmp_path.iterdir()) == [path], "no state is left"


def test_no_training_begins_that_would_not_be_over_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Training] = []

    def noted(one: Training, *args: Any) -> dict[str, Any]:
        begun.append(one)
        return {**one.key(), "loss": 2.0, "tokens": one.tokens, "cpu_seconds": 40.0, "seconds": 40.0}

    monkeypatch.setattr(runs, "made", noted)
    monkeypatch.setattr(runs.time, "time", lambda: 40.0 * len(begun))
    trainings = [replace(DDP, seed=seed) for seed in range(4)]
    path = tmp_path / "runs.json"
    # Nothing is known of the first; a third one would end after 120 seconds.
    Runs("test", path).make(trainings, 1, minutes=1.9)
    assert begun == trainings[:2]
    # One that never fits is begun all the same, as it is made in pieces.
    Runs("test", path).make([replace(DDP, budget=1.0)], 1, minutes=2.5)
    assert len(begun) == 3
    # What the file has is not made again.
    Runs("test", path).make(trainings, 1)
    assert [one.seed for one in begun[3:]] == [2, 3]


def test_the_verdict_is_about_numbers_on_seeds_that_chose_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = quality.STAGES["verdict"]
    for pairs in quality.planned(verdict, verdict.sizes, None, "cpu").values():
        ((ours, ddp), *others) = pairs
        assert len(others) == 4
        assert replace(ours, choices=None, lr=ddp.lr) == ddp
        assert "auto" not in (ours.choices or {}).values(), "a run is that of its numbers"
        assert ours.seed not in quality.TUNING
        assert quality.has_enough_rounds(pairs)
    best, other = (
        Comparison(quality.at_rate("M=2", rate), [{"seed": 0, "loss": ours}], [{"seed": 0, "loss": ddp}])
        for rate, ours, ddp in ((1e-3, 2.0, 1.9), (3e-3, 1.8, 2.1))
    )
    (at_best,) = quality.each_at_its_best([best, other])
    assert at_best.nats == pytest.approx([-0.1])
    with pytest.raises(SystemExit):
        quality.main(["--quick", "--minutes=1"])
    assert "--minutes needs --json" in capsys.readouterr().err


def test_of_a_model_with_adapters_only_these_are_trained_and_exchanged() -> None:
    one = next(one for one in finetuning.quick_trainings() if one.choices and one.lora_rank)
    before, after = one.model().state_dict(), training.trained(one, one.text()).state_dict()
    changed = {name for name, values in before.items() if not torch.equal(values, after[name])}
    assert changed == {name for name in before if name.endswith((".down", ".up"))}
    groups = SimulatedGroups([one.model(), one.model()], **one.choices)
    assert {name for fragment in groups.engines[0].fragments for name in fragment.names} == changed


def tiny(method: str, **changes: Any) -> NamedTraining:
    one = named.training(method, named.METHODS[method].groups[-1], seed=0)
    return replace(one, size=TINY, validation_windows=32, **changes)


def trained(one: NamedTraining, steps: int) -> Loop:
    loop = Loop(one, one.text())
    loop.run(steps=steps)
    return loop


def test_methods_train_as_their_names_say() -> None:
    paced = tiny("Paced, one at half speed")
    assert [[paced.trained(group, step) for step in range(2)] for group in (0, 3)] == [
        [paced.batch] * 2,
        [0, paced.batch],
    ]
    slow = trained(paced, 40)._engines
    assert [engine.inner_steps for engine in slow] == [40] * 4
    weights = [engine.rounds.fragments[0].weight for engine in slow]
    assert weights[3] == pytest.approx(weights[0] / 2, abs=1)

    dropping = tiny("DropCompute")
    kept = mean(dropping.trained(group, step) / dropping.batch for group in range(4) for step in range(250))
    assert MOST_DROPPED / 2 < 1 - kept < 1.2 * MOST_DROPPED
    some, whole = dropping.group(), dropping.group()
    tokens, targets = next(dropping.text().batches(0, 8))
    some.backward(tokens, targets, 6)
    whole.backward(tokens[:6], targets[:6])
    for ours, theirs in zip(some.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad * 6 / 8 if theirs.grad is not None else None)

    sent = [engine.report()["bytes_sent"] for engine in trained(tiny("ByLink, one slow uplink"), 50)._engines]
    assert sent[0] == sent[1] == sent[2]
    assert sent[3] < 0.6 * sent[0]

    # Without momentum and with rounds of a step it is the mean of gradients.
    choices = {"sync_every": 1, "overlap_steps": 0}
    fedglomo = trained(tiny("FedGLOMO", choices=choices, beta=1.0), 6).finish()
    plain = {**choices, "outer_lr": 1.0, "outer_momentum": 0.0}
    theirs = trained(tiny(named.AVERAGED, lr=0.1, choices=plain, clip=inf), 6).finish()
    for one, other in zip(fedglomo.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_backup_workers_follow_closed_forms() -> None:
    stalls = Case(rounds=120, seed=3)
    found = Play(replace(stalls, quorum=BACKUP)).run().found()
    # What is trained last is not counted yet.
    assert 0.93 <= found["goodput"] <= goodput_at_most(stalls) + 0.01
    assert found["counted"] >= 0.96
    assert found["landing_seconds"] == pytest.approx(5.2, abs=0.3)
    case = Case(rounds=2500)
    assert goodput_of_all(case) == pytest.approx(0.7852, abs=1e-4)
    assert goodput_at_most(case) == pytest.approx(0.9615, abs=1e-4)
    assert wait_for_all(case)["goodput"] == pytest.approx(goodput_of_all(case), abs=0.015)
    assert wait_for_all(replace(case, share=0.0, rounds=50))["goodput"] == 1.0
    # A site that is always late delays the others only every eighth round, where all that it has trained counts.
    late = Case(sites=4, rounds=40, share=0.0, delays=(0.0, 0.0, 0.0, 15.0), grace=20.0)
    waiting, backup = Play(late).run(), Play(replace(late, quorum=BACKUP)).run()
    assert waiting.found()["landing_seconds"] > 15
    assert backup.found()["landing_seconds"] < 9
    counted = {one.round: own.weight for one in backup.records if (own := one.of("site-3"))}
    assert [number for number in counted if number > 8] == [16, 24, 32]
    assert counted[32] == 8 * 30

"""Trainings for loss: made once, in pieces that fit into the time, with the bits of one that was never stopped."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the pictures of the benchmarks need matplotlib")

from benchmarks import quality, runs, training
from benchmarks.comparison import Comparison
from benchmarks.runs import Runs
from benchmarks.training import Training, made

OURS, DDP = quality.pair("tiny", sync_every=10)


def test_a_training_in_pieces_has_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(OURS, inner="muon")
    whole, path, pieces = made(one), tmp_path / "runs.json", 0
    # Every look at the clock takes a second, so that two pieces end with fragments in flight.
    ticks = count()
    monkeypatch.setattr(training.time, "time", lambda: next(ticks))
    while Runs("test", path).get(one) is None:
        Runs("test", path).make([one], 1, minutes=10 / 60)
        pieces += 1
    assert pieces > 2
    assert whole is not None
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


def test_the_verdict_is_about_what_users_get_on_seeds_that_chose_nothing() -> None:
    stage = quality.STAGES["verdict"]
    settings = quality.planned(stage, stage.sizes, None, "cpu")
    cells = [quality.MODELS[size].every[groups] for size in stage.sizes for groups in quality.MODELS[size].rates]
    assert len(settings) == sum(map(len, cells))
    for (ours, ddp), *others in settings.values():
        assert len(others) == 4
        assert ours.choices is not None
        assert "auto" not in ours.choices.values(), "a run is that of its numbers"
        assert replace(ours, choices=None, lr=ddp.lr) == ddp
        assert ours.seed not in quality.TUNING
        assert quality.has_enough_rounds([(ours, ddp)])


def test_a_budget_is_that_of_all_trainings_and_too_few_rounds_show() -> None:
    settings = quality.planned(quality.STAGES["verdict"], ["0.1M"], 0.1, "cpu")
    assert {one.budget for pairs in settings.values() for pair in pairs for one in pair} == {0.1}
    assert all(name.endswith("0.1 tokens per parameter") for name in settings)
    assert not any(quality.has_enough_rounds(pairs) for pairs in settings.values())


def test_the_better_rate_of_each_method_is_that_of_the_mean_loss() -> None:
    def tried(rate: float, ours: float, ddp: float) -> Comparison:
        name = quality.at_rate("M=2", rate)
        return Comparison(name, [{"seed": 0, "loss": ours}], [{"seed": 0, "loss": ddp}])

    (best,) = quality.each_at_its_best([tried(1e-3, ours=2.0, ddp=1.9), tried(3e-3, ours=1.8, ddp=2.1)])
    assert best.nats == pytest.approx([-0.1])


def test_what_cannot_be_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "made", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments, says in (("--minutes=1", "--minutes needs --json"), ("--device=cuda", "needs a GPU")):
        with pytest.raises(SystemExit):
            quality.main(["--quick", arguments])
        assert says in capsys.readouterr().err

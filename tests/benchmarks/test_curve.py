"""The curve of larger models: its corpus, groups that train at once, and which runs count."""

import io
import lzma
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks import corpus, curve, quality
from benchmarks.runs import Runs
from benchmarks.training import Loop, Training, made
from lightning_sdiloco import DenseBeginning


def archive_of(files: dict[str, bytes], path: Path) -> Path:
    with tarfile.open(path, "w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("linked.c")
        link.type = tarfile.SYMTYPE
        link.linkname = "a.c"
        archive.addfile(link)
    return path


def test_a_corpus_holds_each_content_once_and_validates_on_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "VALIDATION_BYTES", 1000)
    files = {f"{number}.c": bytes([1 + number]) * 300 for number in range(12)}
    files |= {"copy.c": files["3.c"], "notes.txt": b"x" * 5000}
    archive = archive_of(files, tmp_path / "sources.tar.xz")
    monkeypatch.setattr(corpus, "MEGABYTE", 1000)
    corpus.main([str(archive), str(tmp_path / "corpus.xz"), "--megabytes", "2"])
    text = bytes(corpus.read(tmp_path / "corpus.xz").tolist())
    assert len(text) == 3000
    contents = {part[:1] for part in text.split(b"\0") if part}
    assert len(contents) == 10
    assert set(text[:2000]) & set(text[2000:]) <= {0}, "no file is in both parts"


def test_a_corpus_of_too_few_files_is_refused_in_words(tmp_path: Path) -> None:
    archive = archive_of({"a.c": b"int a;"}, tmp_path / "sources.tar.xz")
    with pytest.raises(ValueError, match="has 7 bytes of different C files, but 5,194,304"):
        corpus.joined(corpus.sources(archive), 1_000_000)


def test_a_training_reads_a_corpus(tmp_path: Path) -> None:
    path = tmp_path / "corpus.xz"
    words = b"one after the other "
    text = words * (corpus.VALIDATION_BYTES // len(words) + 1000)
    path.write_bytes(lzma.compress(text, preset=0))
    training = replace(quality.pair("tiny")[1], corpus=str(path), validation_windows=8)
    of_training = training.text()
    context = training.size.context
    split = len(text) - corpus.VALIDATION_BYTES
    assert len(of_training.training) == (split - 1) // context
    assert bytes(of_training.training.text[: len(words)].tolist()) == words


def of_groups(count: int) -> Training:
    """Makes a training of three groups, or DDP on their batches."""
    rates = quality.Rates(3e-3, 3e-3)
    outer = quality.EQUALISED
    ours, ddp = quality.pair("tiny", 3, rates=rates, outer_optimizer=outer, sync_every=10)
    if count == 1:
        return ddp
    return replace(ours, choices={**(ours.choices or {}), "dense_beginning": DenseBeginning(3)})


def learned(training: Training, is_stacked: bool) -> torch.Tensor:
    """Trains for some steps and returns all parameters as one vector."""
    with patch.object(Training, "is_stacked", is_stacked):
        loop = Loop(training, training.text())
        loop.run(steps=25)
    return flat(loop.model)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 0.2)])
@pytest.mark.parametrize("groups", [1, 3])
def test_groups_that_train_at_once_learn_what_they_learn_one_by_one(
    precision: Any, tolerance: float, groups: int
) -> None:
    training = of_groups(groups)
    together = learned(replace(training, precision=precision), is_stacked=True)
    by_turns = learned(training, is_stacked=False)
    way = by_turns - flat(training.model())
    assert (together - by_turns).norm() < tolerance * way.norm()


def test_groups_that_train_at_once_go_on_bit_for_bit() -> None:
    training = quality.pair("tiny", sync_every=10)[0]
    with patch.object(Training, "is_stacked", True):
        uninterrupted = Loop(training, training.text())
        uninterrupted.run(steps=27)
        first = Loop(training, training.text())
        first.run(steps=13)
        second = Loop(training, training.text())
        second.load_state_dict(first.state_dict())
        second.run(steps=27)
    for left, right in zip(
        uninterrupted.model.parameters(), second.model.parameters(), strict=True
    ):
        assert torch.equal(left, right)


class Losses:
    """Makes runs without training, which lose what their rate and groups say."""

    def __init__(self) -> None:
        self.trainings: list[Training] = []

    def __call__(self, training: Training, *args: Any) -> dict[str, Any]:
        self.trainings.append(training)
        loss = 2.0 + training.lr + 0.1 * training.groups
        return {**training.key(), "loss": loss, "seconds": 1.0}


def test_the_better_of_ddps_runs_counts_and_nothing_is_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = Losses()
    monkeypatch.setattr("benchmarks.runs.made", losses)
    point = replace(curve.POINTS["10M"], ddp_lrs=(4e-3, 1e-3))
    of_point = curve.Curve(point, "python", "cpu")
    finished = Runs("curve", tmp_path / "curve.json")
    curve.make(of_point, finished, 1, minutes=1.0)
    rows = curve.rows_of(of_point, finished)
    assert {name: len(pairs) for name, pairs in rows.items()} == {
        "M=1": 3,
        "M=8": 3,
        "M=4": 3,
        "M=8, every value by itself": 1,
        "M=1, with the outer step": 1,
        "M=4, every value by itself": 1,
    }
    assert all(ddp["lr"] == 1e-3 for pairs in rows.values() for _, ddp in pairs)
    count = len(losses.trainings)
    curve.make(of_point, finished, 1, minutes=1.0)
    assert len(losses.trainings) == count


def test_methods_of_the_curve_see_the_same_tokens_in_as_many_steps() -> None:
    of_point = curve.Curve(curve.POINTS["10M"], "python", "cpu")
    trainings = [of_point.ddp(10), *of_point.by_name(10).values()]
    assert {training.steps for training in trainings} == {6636}
    assert {training.tokens for training in trainings} == {217_448_448}


def test_a_training_of_one_group_sends_nothing() -> None:
    training = curve.Curve(curve.POINTS["tiny"], "python", "cpu").grouped(1, 10)
    run = made(replace(training, budget=0.2))
    assert run is not None
    assert run["bytes_sent"] == 0

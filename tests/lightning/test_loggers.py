"""Landings are in the rows that Lightning logs, for every logger; and a report becomes an artifact
of a run.
"""

import csv
import importlib
import json
import signal
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sdiloco import StreamingDiLoCoMonitor
from lightning_sdiloco.tools.run_files import read_run
from tests import fits
from tests.fits import LIGHTNING, SHORT, SomeBatches, at, fit, refusal, said_by
from tests.lightning.test_checkpoint import hooks_of
from tests.ranks import run_processes

Rows = list[tuple[int, dict[str, float]]]
"""The step and the values of each row, without those that say when it was."""
WHEN = ("step", "epoch", "trainer/global_step")


def row(step: Any, values: Any) -> tuple[int, dict[str, float]]:
    numbers = {}
    for name, value in values.items():
        if value != "" and name not in WHEN and not name.startswith("_"):
            numbers[name] = float(value)
    return int(step), numbers


def of_csv(folder: Path) -> Rows:
    with (folder / "metrics.csv").open() as file:
        return [row(values["step"], values) for values in csv.DictReader(file)]


def by_step(points: Iterable[tuple[int, str, float]]) -> Rows:
    """The rows of a logger that keeps points: as many for a step as a name has values there."""
    steps: dict[int, list[dict[str, float]]] = defaultdict(list)
    for step, name, value in points:
        rows = steps[step]
        row_without_name = next((values for values in rows if name not in values), None)
        if row_without_name is None:
            row_without_name = {}
            rows.append(row_without_name)
        row_without_name[name] = value
    return [row(step, values) for step in sorted(steps) for values in steps[step]]


def of_tensorboard(folder: Path) -> Rows:
    events = EventAccumulator(str(folder))
    events.Reload()
    points = []
    for tag in events.Tags()["scalars"]:
        points += [(event.step, tag, event.value) for event in events.Scalars(tag)]
    return by_step(points)


def of_mlflow(folder: Path) -> Rows:
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        return by_step(database.execute("select step, key, value from metrics"))


HEADER = 7  # bytes before a file, and before each part of a record
BLOCK = 1 << 15


def records_of_wandb(folder: Path) -> Iterator[Any]:
    """The records that W&B would send: in blocks as LevelDB's logs have them, after seven bytes."""
    kind_of_record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = path.read_bytes()
    position = HEADER
    record = b""
    while position + HEADER < len(content):
        length, kind = struct.unpack_from("<HB", content, position + 4)
        position += HEADER
        record += content[position : position + length]
        position += length
        room = -position % BLOCK
        if room < HEADER:
            position += room
        if kind in (1, 4):  # a whole record, or the last part of one
            yield kind_of_record.FromString(record)
            record = b""


def of_wandb(folder: Path) -> Rows:
    rows = []
    for record in records_of_wandb(folder):
        values = {
            entry.key or entry.nested_key[0]: json.loads(entry.value_json)
            for entry in record.history.item
        }
        if values:
            rows.append(row(values["trainer/global_step"], values))
    return rows


class LoggerCase(NamedTuple):
    arguments: Callable[[Path], dict[str, Any]]
    rows: Callable[[Path], Rows]
    package: str | None = None


def into_folder(folder: Path) -> dict[str, Any]:
    return {"save_dir": folder, "name": "", "version": ""}


LOGGERS = {
    "CSVLogger": LoggerCase(into_folder, of_csv),
    "TensorBoardLogger": LoggerCase(into_folder, of_tensorboard),
    "MLFlowLogger": LoggerCase(
        lambda folder: {"tracking_uri": f"sqlite:///{folder}/mlflow.db"}, of_mlflow, "mlflow"
    ),
    "WandbLogger": LoggerCase(
        lambda folder: {"save_dir": folder, "offline": True}, of_wandb, "wandb"
    ),
}


def logger_of(name: str, folder: Path) -> Any:
    kind = getattr(importlib.import_module(f"{LIGHTNING}.loggers"), name)
    return kind(**LOGGERS[name].arguments(folder))


class Logging:
    """Hooks of a module."""

    def training_step(self: Any, parts: Any, index: int) -> Any:
        loss = self.loss(parts)
        self.log("train", loss, on_epoch=True)
        return loss

    def validation_step(self: Any, *_: Any) -> None:
        self.log("val", 1.0)


def fitted(
    name: str, folder: Path, *callbacks: Any, logs: bool = True, **choices: Any
) -> tuple[int, int]:
    """A fit of two ranks with such a logger: the landings of rank 0, and the bytes that it sent
    for them.
    """
    package = LOGGERS[name].package
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if package == "mlflow":
        logger_of(name, folder)  # All ranks of a fit would make the tables at once.
    hooks = hooks_of(Logging) if logs else {}

    def run(rank: int, world_size: int) -> Any:
        trainer_choices = {
            "logger": logger_of(name, folder),
            "log_every_n_steps": 5,
            "callbacks": list(callbacks),
            **choices,
        }
        fitted_rank = fit(
            rank,
            world_size,
            2,
            -1,
            SHORT,
            trainer_choices=trainer_choices,
            make=partial(fits.module, **hooks),
            loader=SomeBatches(rank, 24),
            validation=SomeBatches(0, 1),
            inspect=lambda trainer, _: trainer,
        )
        trainer = fitted_rank["inspected"]
        if package == "wandb" and rank == 0:
            trainer.logger.experiment.finish()
        final_bytes = sum(
            landing.bytes_sent for landing in trainer.strategy.engine.history.final_landings
        )
        report = fitted_rank["report"]
        return report["landings"], report["bytes_sent"] - final_bytes

    return run_processes(run, 2)[0]


ALL = [
    pytest.param(name, marks=pytest.mark.foreign if case.package else ())
    for name, case in LOGGERS.items()
]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_landings_are_in_the_rows_that_lightning_logs_and_none_is_lost(
    name: str, accumulated: int, tmp_path: Path
) -> None:
    landings, sent_bytes = fitted(name, tmp_path, accumulate_grad_batches=accumulated, max_epochs=2)
    rows = LOGGERS[name].rows(tmp_path)
    # Every fifth inner step, and the end of each epoch where something landed after: beside what
    # Lightning logs there.
    steps = 24 // accumulated
    landed = [(step, values) for step, values in rows if "sdiloco/bytes_sent" in values]
    epoch_ends = {steps - 1, 2 * steps - 1}
    assert [step for step, _ in landed] == sorted({*range(9, 2 * steps, 5), *epoch_ends})
    assert all(values.keys() & {"train_step", "train_epoch"} for _, values in landed)
    if name in ("CSVLogger", "WandbLogger"):  # which have rows, where others have points
        assert not any("val" in values for _, values in landed)
    trained_steps = {step for step, values in rows if "train_step" in values}
    assert trained_steps == {*range(4, 2 * steps, 5)}
    # Nothing is lost.
    assert sum(values["sdiloco/landings"] for _, values in landed) == landings
    assert sum(values["sdiloco/bytes_sent"] for _, values in landed) == sent_bytes


@pytest.mark.parametrize("name", ALL[2:])
def test_the_report_is_an_artifact_of_the_run_and_its_records_are_in_the_runs_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    fitted(name, tmp_path, StreamingDiLoCoMonitor(), max_epochs=1, default_root_dir=tmp_path)
    (records,) = {path.parent for path in tmp_path.rglob("rank_0000?.jsonl")}
    assert records.name == "sdiloco"
    assert len(read_run(records).ranks) == 2
    page = (records / "report" / "report.html").read_text()
    run = records.parent.name
    if name == "WandbLogger":
        sent = [record for record in records_of_wandb(tmp_path) if record.HasField("artifact")]
        (artifact,) = (record.artifact for record in sent)
        assert artifact.type == "report"
        assert artifact.name == f"sdiloco-report-{run}"
        (attached,) = (Path(entry.local_path) for entry in artifact.manifest.contents)
    else:
        (attached,) = tmp_path.glob(f"mlruns/*/{run}/artifacts/sdiloco/report.html")
    assert attached.read_text() == page


def test_a_row_waits_for_a_logged_step_the_end_or_a_signal_if_nothing_else_is_logged(
    tmp_path: Path,
) -> None:
    landings, _ = fitted("CSVLogger", tmp_path, logs=False, max_epochs=2)
    rows = of_csv(tmp_path)
    assert [step for step, _ in rows] == [*range(9, 48, 5), 47]
    assert sum(values["sdiloco/landings"] for _, values in rows) == landings

    def run(rank: int, world_size: int) -> None:
        end = at({20: lambda trainer: signal.raise_signal(signal.SIGTERM)})
        logger = CSVLogger(tmp_path, "signal", "")
        choices = {"logger": logger, "log_every_n_steps": 1000, "callbacks": [end]}
        refusal(fit, rank, 2, 2, 100, SHORT, kind=SIGTERMException, trainer_choices=choices)

    run_processes(run, 2)
    ((step, values),) = of_csv(tmp_path / "signal")
    # From the sixth inner step on one lands after each.
    assert values["sdiloco/landings"] == step + 1 - 5 >= 15


def test_a_report_that_cannot_be_attached_leaves_the_run_as_it_is() -> None:
    def refuse(*args: Any, **choices: Any) -> None:
        raise ConnectionError("the server is away.")

    class WandbLogger:
        experiment = SimpleNamespace(log_artifact=refuse)
        version = "a"

    monitor = StreamingDiLoCoMonitor(folder="runs")
    messages = said_by("lightning_sdiloco")
    monitor._tool = lambda name: SimpleNamespace(report=lambda folder: "")  # type: ignore[method-assign]
    monitor._attach(WandbLogger())  # type: ignore[arg-type]
    assert messages == [
        "The report was not uploaded as an artifact to WandbLogger: the server is away. To create"
        " the report, run `sdiloco report runs`."
    ]

"""What lands is in the rows that Lightning logs, for every logger; and a report becomes an
artifact of a run.
"""

import csv
import importlib
import json
import signal
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sdiloco import StreamingDiLoCoMonitor
from lightning_sdiloco.tools.run_files import read_run
from tests import fits
from tests.fits import LIGHTNING, SHORT, SomeBatches, at, fit, refusal, said_by
from tests.ranks import run_processes

Rows = list[
    tuple[int, dict[str, float]]
]  # the step and the values of each, without those that say when it was
WHEN = ("step", "epoch", "trainer/global_step")


def row(step: Any, values: Any) -> tuple[int, dict[str, float]]:
    kept = {
        name: float(value) for name, value in values.items() if value != "" and name not in WHEN
    }
    return int(step), {name: value for name, value in kept.items() if name[0] != "_"}


def of_csv(folder: Path) -> Rows:
    with (folder / "metrics.csv").open() as file:
        return [row(told["step"], told) for told in csv.DictReader(file)]


def by_step(points: list[tuple[int, str, float]]) -> Rows:
    """The rows of a logger that keeps points: as many for a step as a name has values there."""
    steps: dict[int, list[dict[str, float]]] = defaultdict(list)
    for step, name, value in points:
        rows = steps[step]
        fitting = next((own for own in rows if name not in own), None)
        if fitting is None:
            rows.append(fitting := {})
        fitting[name] = value
    return [row(step, own) for step in sorted(steps) for own in steps[step]]


def of_tensorboard(folder: Path) -> Rows:
    events = EventAccumulator(str(folder))
    events.Reload()
    return by_step(
        [
            (one.step, tag, one.value)
            for tag in events.Tags()["scalars"]
            for one in events.Scalars(tag)
        ]
    )


def of_mlflow(folder: Path) -> Rows:
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        return by_step(list(database.execute("select step, key, value from metrics")))


def records_of_wandb(folder: Path) -> Iterator[Any]:
    """What W&B would send: records in blocks as LevelDB's logs have them, after seven bytes."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    position = 7
    record = b""
    while position + 7 < len(data):
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        position += room if (room := -position % (1 << 15)) < 7 else 0
        if kind in (1, 4):  # a whole record, or the last part of one
            yield importlib.import_module("wandb.proto.wandb_internal_pb2").Record.FromString(
                record
            )
            record = b""


def of_wandb(folder: Path) -> Rows:
    told = [record.history.item for record in records_of_wandb(folder) if record.history.item]
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
        for items in told
    ]
    return [row(values["trainer/global_step"], values) for values in rows]


LOGGERS: dict[str, tuple[str | None, Callable[[Path], dict[str, Any]], Callable[[Path], Rows]]] = {
    "CSVLogger": (None, lambda folder: {"save_dir": folder, "name": "", "version": ""}, of_csv),
    "TensorBoardLogger": (
        None,
        lambda folder: {"save_dir": folder, "name": "", "version": ""},
        of_tensorboard,
    ),
    "MLFlowLogger": (
        "mlflow",
        lambda folder: {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
        of_mlflow,
    ),
    "WandbLogger": ("wandb", lambda folder: {"save_dir": folder, "offline": True}, of_wandb),
}


def fitted(
    name: str, folder: Path, *callbacks: Any, logs: bool = True, **choices: Any
) -> tuple[int, int]:
    """A fit of two ranks with such a logger: the landings of rank 0, and the bytes that it sent
    for them.
    """
    package = LOGGERS[name][0]
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    make = partial(
        getattr(importlib.import_module(f"{LIGHTNING}.loggers"), name), **LOGGERS[name][1](folder)
    )
    if package == "mlflow":
        make()  # All ranks of a fit would make the tables at once.

    def training_step(self: Any, parts: Any, index: int) -> Any:
        self.log("train", loss := self.loss(parts), on_epoch=True)
        return loss

    def run(rank: int, world_size: int) -> Any:
        members = {
            "training_step": training_step,
            "validation_step": lambda self, *_: self.log("val", 1.0),
        }
        members = members if logs else {}
        more = {"logger": make(), "log_every_n_steps": 5, "callbacks": [*callbacks], **choices}
        own = {"trainer_choices": more, "make": partial(fits.module, **members)}
        data = {"loader": SomeBatches(rank, 24), "validation": SomeBatches(0, 1)}
        told = fit(
            rank, world_size, 2, -1, SHORT, inspect=lambda trainer, _: trainer, **own, **data
        )
        if package == "wandb" and rank == 0:
            told["inspected"].logger.experiment.finish()
        last = sum(
            landing.bytes_sent for landing in told["inspected"].strategy.engine.final_landings
        )
        return told["report"]["landings"], told["report"]["bytes_sent"] - last

    return run_processes(run, 2)[0]


ALL = [
    pytest.param(name, marks=pytest.mark.foreign if own[0] else ()) for name, own in LOGGERS.items()
]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_landings_are_in_the_rows_that_lightning_logs_and_none_is_lost(
    name: str, accumulated: int, tmp_path: Path
) -> None:
    landings, sent = fitted(name, tmp_path, accumulate_grad_batches=accumulated, max_epochs=2)
    rows = LOGGERS[name][2](tmp_path)
    # Every fifth inner step, and the end of each epoch where something landed after: beside what
    # Lightning logs there.
    steps = 24 // accumulated
    landed = [(step, values) for step, values in rows if "sdiloco/bytes_sent" in values]
    assert [step for step, _ in landed] == sorted(
        {*range(9, 2 * steps, 5), steps - 1, 2 * steps - 1}
    )
    assert all(values.keys() & {"train_step", "train_epoch"} for _, values in landed)
    if name in ("CSVLogger", "WandbLogger"):  # which have rows, where others have points
        assert not any("val" in values for _, values in landed)
    assert {step for step, values in rows if "train_step" in values} == {*range(4, 2 * steps, 5)}
    # Nothing is lost.
    assert sum(values["sdiloco/landings"] for _, values in landed) == landings
    assert sum(values["sdiloco/bytes_sent"] for _, values in landed) == sent


@pytest.mark.parametrize("name", ALL[2:])
def test_the_report_is_an_artifact_of_the_run_and_its_records_are_in_the_runs_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    fitted(name, tmp_path, StreamingDiLoCoMonitor(), max_epochs=1, default_root_dir=tmp_path)
    (records,) = {path.parent for path in tmp_path.rglob("rank_0000?.jsonl")}
    assert (records.name, len(read_run(records).ranks)) == ("sdiloco", 2)
    page = (records / "report" / "report.html").read_text()
    run = records.parent.name
    if name == "WandbLogger":
        (artifact,) = [
            record.artifact for record in records_of_wandb(tmp_path) if record.HasField("artifact")
        ]
        assert (artifact.type, artifact.name) == ("report", f"sdiloco-report-{run}")
        (kept,) = [Path(own.local_path) for own in artifact.manifest.contents]
    else:
        (kept,) = tmp_path.glob(f"mlruns/*/{run}/artifacts/sdiloco/report.html")
    assert kept.read_text() == page


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
        more = {"logger": logger, "log_every_n_steps": 1000, "callbacks": [end]}
        refusal(fit, rank, 2, 2, 100, SHORT, kind=SIGTERMException, trainer_choices=more)

    run_processes(run, 2)
    ((step, values),) = of_csv(tmp_path / "signal")
    # From the sixth inner step on one lands after each.
    assert values["sdiloco/landings"] == step + 1 - 5 >= 15


def test_a_report_that_cannot_be_attached_leaves_the_run_as_it_is() -> None:
    def refuse(*args: Any, **choices: Any) -> None:
        raise ConnectionError("the server is away.")

    logger: Any = type(
        "WandbLogger", (), {"experiment": SimpleNamespace(log_artifact=refuse), "version": "a"}
    )()
    monitor = StreamingDiLoCoMonitor(folder="runs")
    said = said_by("lightning_sdiloco")
    monitor._tool = lambda name: SimpleNamespace(report=lambda folder: "")  # type: ignore[method-assign]
    monitor._attach(logger)
    assert said == [
        "The report is not an artifact of the run of WandbLogger: the server is away. `sdiloco"
        " report runs` makes it."
    ]

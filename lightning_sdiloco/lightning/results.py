"""What users read of a strategy: schedule, fragments, outer parameters and report, during a fit and after it."""

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm import Fragment, Schedule
from lightning_sdiloco.engine import StreamingDiLoCo
from lightning_sdiloco.lightning.auto_settings import Measured
from lightning_sdiloco.lightning.options import CurrentOptions, Options


class Summary(NamedTuple):
    """What stays readable of a finished fit, also where it ran in other processes."""

    fragments: tuple[Fragment, ...]
    schedule: Schedule
    outer: dict[str, Tensor]
    counts: dict[str, float]

    @staticmethod
    def of(engine: StreamingDiLoCo) -> "Summary":
        """Returns the summary of an engine that has finished."""
        return Summary(engine.fragments, engine.schedule, engine.outer_state_dict(), engine.report())

    @staticmethod
    def load(path: Path) -> "Summary":
        """Returns the summary that `save` wrote to a file, bit for bit."""
        plain = torch.load(path, weights_only=True)
        return Summary(
            fragments=tuple(Fragment(tuple(f["names"]), tuple(f["sizes"])) for f in plain["fragments"]),
            schedule=Schedule(**plain["schedule"]),
            outer=plain["outer"],
            counts=plain["counts"],
        )

    def save(self, path: Path) -> None:
        """Writes the summary to a file, as plain containers and tensors, which load with ``weights_only=True``."""
        plain = {
            "fragments": [asdict(fragment) for fragment in self.fragments],
            "schedule": asdict(self.schedule),
            "outer": self.outer,
            "counts": self.counts,
        }
        torch.save(plain, path)

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Returns a copy of the outer parameters; see `StreamingDiLoCo.outer_state_dict`."""
        return {name: values.clone() for name, values in self.outer.items()}

    def report(self) -> dict[str, float]:
        """Returns a copy of the counts; see `StreamingDiLoCo.report`."""
        return dict(self.counts)


class Results:
    """The readable side of a strategy. It survives the fit, and brings back what ran in other processes."""

    def __init__(self, options: Options) -> None:
        self._options = CurrentOptions(options)
        self._fragments: tuple[Fragment, ...] = ()
        self._engine: StreamingDiLoCo | None = None
        self._summary: Summary | None = None

    def begin(self, options: CurrentOptions) -> None:
        """Forgets the previous fit, and shows the options of the one that begins."""
        self._options = options
        self.forget()

    def forget(self) -> None:
        """Forgets what was trained."""
        self._fragments = ()
        self._engine = self._summary = None

    def cut(self, fragments: tuple[Fragment, ...]) -> None:
        """Shows how the model was cut."""
        self._fragments = fragments

    def read(self, engine: StreamingDiLoCo) -> None:
        """Shows what an engine does from now on."""
        self._engine = engine

    @property
    def engine(self) -> StreamingDiLoCo | None:
        """The engine of the current or last fit; None before the first in this process."""
        return self._engine

    @property
    def schedule(self) -> Schedule:
        """When fragments launch and land."""
        if self._summary is not None:
            return self._summary.schedule
        settings = self._options.settings
        return Schedule(settings.sync_every, settings.overlap_steps, len(self.fragments))

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments."""
        return self._fragments or self._source.fragments

    @property
    def measured(self) -> Measured | None:
        """What the planner based its choice on."""
        return self._options.options.auto.measured

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Returns the outer parameters by name."""
        return self._source.outer_state_dict()

    def report(self) -> dict[str, float]:
        """Returns what happened in the fit."""
        return self._source.report()

    @property
    def _source(self) -> StreamingDiLoCo | Summary:
        source = self._engine or self._summary
        if source is None:
            raise RuntimeError(
                "There is nothing to read before training: the fragments and the schedule are known from on_fit_start"
                " on, the outer parameters and the report from on_train_batch_start on, and all after a fit in which"
                " anything was trained."
            )
        return source

    def summary(self) -> Summary | None:
        """Returns what the main process can still read after a fit in this one; None if none finished here."""
        return Summary.of(self._engine) if self._engine is not None and self._engine.is_finished else None

    def read_summary(self, summary: Summary | None) -> None:
        """Takes over the summary of a fit that ran in other processes."""
        self._summary = summary

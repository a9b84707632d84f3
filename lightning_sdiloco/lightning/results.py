"""Holds what users read of a finished fit, also where it ran in other processes: `Results` travels through a file."""

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.engine.engine import StreamingDiLoCo


class Results(NamedTuple):
    """The results of a finished fit.

    Attributes:
        fragments: The fragments, as in `StreamingDiLoCo.fragments`.
        schedule: When the fragments launched and landed.
        outer: The outer parameters: name -> whole float32 tensor on the host.
        counts: What `StreamingDiLoCo.report` returned.
    """

    fragments: tuple[Fragment, ...]
    schedule: Schedule
    outer: dict[str, Tensor]
    counts: dict[str, float]

    @staticmethod
    def of(engine: StreamingDiLoCo) -> "Results":
        """Returns the results of an engine that has finished."""
        return Results(engine.fragments, engine.schedule, engine.outer_state_dict(), engine.report())

    @staticmethod
    def load(path: Path) -> "Results":
        """Reads from a file what `save` wrote there, bit for bit."""
        plain = torch.load(path, weights_only=True)
        return Results(
            fragments=tuple(Fragment(tuple(f["names"]), tuple(f["sizes"])) for f in plain["fragments"]),
            schedule=Schedule(**plain["schedule"]),
            outer=plain["outer"],
            counts=plain["counts"],
        )

    def save(self, path: Path) -> None:
        """Writes the results to a file, as plain containers and tensors, which load with ``weights_only=True``."""
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

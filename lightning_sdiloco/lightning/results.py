"""What users read of a strategy: schedule, fragments, outer parameters and report, during a fit and after it."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_sdiloco.algorithm import Fragment, Schedule
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine import StreamingDiLoCo
from lightning_sdiloco.lightning.groups import ConnectedGroups
from lightning_sdiloco.lightning.options import Options


class Summary(NamedTuple):
    """What stays readable of a finished fit that ran in other processes."""

    fragments: tuple[Fragment, ...]
    schedule: Schedule
    outer: dict[str, Tensor]
    counts: dict[str, float]

    def outer_state_dict(self) -> dict[str, Tensor]:
        return {name: values.clone() for name, values in self.outer.items()}

    def report(self) -> dict[str, float]:
        return dict(self.counts)


@dataclass
class Results:
    options: Options
    engine: StreamingDiLoCo | None = None
    fragments: tuple[Fragment, ...] = ()
    other: Summary | None = None
    """Of a fit that ran in other processes."""

    def forget(self) -> None:
        self.engine, self.fragments, self.other = None, (), None

    @property
    def source(self) -> StreamingDiLoCo | Summary:
        source = self.engine or self.other
        if source is None:
            raise RuntimeError(
                "There is nothing to read before training: the fragments and the schedule are known from on_fit_start"
                " on, the outer parameters and the report from on_train_batch_start on, and all after a fit in which"
                " anything was trained."
            )
        return source


class ReadableStrategy:
    """What users read of a strategy of Trainer or Fabric."""

    results: Results
    _groups: ConnectedGroups

    @property
    def schedule(self) -> Schedule:
        """When fragments launch and land; prints as a table.

        Known from ``on_fit_start`` on, in Fabric from the first step of an optimizer on. Where settings are ``"auto"``,
        it is known once they are chosen, after the first inner steps.
        """
        if self.results.other is not None:
            return self.results.other.schedule
        settings = self.results.options.settings
        return Schedule(settings.sync_every, settings.overlap_steps, len(self.fragments))

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments: names and sizes in bytes of their parameters. Known as early as `schedule`."""
        return self.results.fragments or self.results.source.fragments

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Returns the outer parameters: name -> whole float32 tensor on the host, the same on every rank.

        The names are those of ``named_parameters()`` of the model. During training, all ranks of a worker group must
        call it together.
        """
        return self.results.source.outer_state_dict()

    def report(self) -> dict[str, float]:
        """Returns what happened in training: steps, bytes and seconds, as `StreamingDiLoCo.report` does."""
        return self.results.source.report()

    @property
    def engine(self) -> StreamingDiLoCo | None:
        """The engine of the current or last training; None before the first in this process."""
        return self.results.engine

    @property
    def topology(self) -> Topology:
        """Worker groups and the connections between them; known once processes are connected."""
        return self._groups.topology

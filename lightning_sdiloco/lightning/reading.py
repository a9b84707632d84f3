"""What users read of a strategy: schedule, fragments, outer parameters and report."""

from torch import Tensor

from lightning_sdiloco.algorithm.partition import Fragment
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.algorithm.settings import Settings
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.lightning.auto_settings import AutoSettings, Measured
from lightning_sdiloco.lightning.results import Summary


class ReadingMixin:
    """The readable side of a strategy. It holds nothing of its own."""

    _settings: Settings
    _choosing: AutoSettings
    _engine: StreamingDiLoCo | None
    _summary: Summary | None
    _fragments: tuple[Fragment, ...]

    @property
    def schedule(self) -> Schedule:
        """When fragments launch and land; prints as a table. Known from ``on_fit_start`` on.

        Where settings are ``"auto"``, it is known when they are chosen, after the first inner steps.
        """
        if self._summary is not None:
            return self._summary.schedule
        return Schedule(self._settings.sync_every, self._settings.overlap_steps, len(self.fragments))

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments: names and sizes in bytes of their parameters. Known from ``on_fit_start`` on."""
        return self._fragments or self._source.fragments

    def outer_state_dict(self) -> dict[str, Tensor]:
        """The outer parameters: name -> whole float32 tensor on the host, the same on every rank.

        The names are those of ``LightningModule.named_parameters()``. During a fit it is collective within a worker
        group.
        """
        return self._source.outer_state_dict()

    def report(self) -> dict[str, float]:
        """What happened in the fit.

        Returns:
            ``inner_steps``, ``launches``, ``landings``: counts; ``flights_dropped``: flights that were lost when a run
            went on with other groups or settings; ``bytes_sent``, ``bytes_received``: between groups, by this rank;
            ``exposed_wait_s``: seconds for which training waited for fragments; ``in_flight_s``: seconds that fragments
            were in flight, added up.
        """
        return self._source.report()

    @property
    def measured(self) -> Measured | None:
        """What the planner chose ``"auto"`` settings from; None if it did not, or took them from a checkpoint."""
        return self._choosing.measured

    @property
    def engine(self) -> StreamingDiLoCo | None:
        """The engine of the fit that runs, or of the last one; None before the first in this process."""
        return self._engine

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
        """What stays readable where a fit ran in other processes; None if none ran here."""
        return Summary.of(self._engine) if self._engine is not None and self._engine.is_finished else None

    def read_summary(self, summary: Summary | None) -> None:
        """Takes over what a fit in other processes left."""
        self._summary = summary

"""What a user chooses for a strategy, checked in the one place where all choices meet."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.comm import checked_worker_groups
from lightning_sdiloco.engine import Federation
from lightning_sdiloco.lightning.auto_settings import AutoSettings


@dataclass(frozen=True)
class Options:
    """The choices that all strategies have. `WorkerGroupStrategy` describes every argument."""

    settings: Settings
    auto: AutoSettings
    worker_groups: int | Literal["auto"]
    exchange_backend: str | None
    on_resume: str
    evaluate: str
    resumable_checkpoints: str = "all"
    federation: Federation | None = None

    @staticmethod
    def of(
        worker_groups: Any,
        exchange_backend: Any,
        on_resume: Any,
        evaluate: Any,
        resumable_checkpoints: Any = "all",
        federation: Any = None,
        **settings: Any,
    ) -> "Options":
        """Checks the arguments of a strategy."""
        auto, chosen = AutoSettings.of(**settings)
        return Options(
            chosen, auto, worker_groups, exchange_backend, on_resume, evaluate, resumable_checkpoints, federation
        )

    @staticmethod
    def among(arguments: Mapping[str, Any]) -> "Options":
        """Checks the arguments of a strategy, found by their names among others; see `of`."""
        own = [item.name for item in fields(Options) if item.name not in ("settings", "auto")]
        return Options.of(**{name: arguments[name] for name in (*own, *(item.name for item in fields(Settings)))})

    def __post_init__(self) -> None:
        object.__setattr__(self, "worker_groups", checked_worker_groups(self.worker_groups))
        if self.exchange_backend not in (None, "gloo", "nccl"):
            raise ValueError(
                f"exchange_backend={self.exchange_backend!r} is not available: worker groups exchange over 'gloo', on"
                " every device, or over 'nccl' between CUDA devices. Leave exchange_backend out for gloo."
            )
        if self.on_resume not in ("exact", "restart"):
            raise ValueError(
                f"on_resume={self.on_resume!r} is unknown: it must be 'exact', which refuses a checkpoint of other"
                " settings, or 'restart', which starts the rounds anew from its outer parameters. Choose one of them."
            )
        if self.evaluate not in ("outer", "mean", "local"):
            raise ValueError(
                f"evaluate={self.evaluate!r} is not known: validation inside a fit sees the 'outer' model, which is the"
                " default, the 'mean' of the worker groups, or the 'local' model of each. Choose one of them."
            )
        if self.resumable_checkpoints not in ("all", "newest"):
            raise ValueError(
                f"resumable_checkpoints={self.resumable_checkpoints!r} is unknown: it must be 'all', which keeps the"
                " folder of every checkpoint that stands, or 'newest', which keeps that of the newest. Choose one of"
                " them."
            )

        if self.federation is not None:
            self._check_federation(self.federation)
            # The ranks of a site are one group.
            object.__setattr__(self, "worker_groups", 1)

    def _check_federation(self, federation: Any) -> None:
        if not isinstance(federation, Federation):
            raise ValueError(
                f"federation={federation!r} is no Federation. Give one: lightning_sdiloco.Federation(hub=..., run=...,"
                " site=..., keys=...), or leave it out."
            )
        if self.worker_groups not in (1, "auto"):
            raise ValueError(
                f"worker_groups={self.worker_groups} does not go with a federation: the ranks of a site are one worker"
                " group. Leave it out, and start the others as sites of their own."
            )
        federation.check(self.settings)
        if self.auto.names:
            raise ValueError(
                f"{self.auto.names[0]}='auto' does not go with a federation: its sites are launched on their own, and"
                " all bring the same settings. Give a number or name (sdiloco plan --hub-bandwidth recommends some), or"
                " that of the site that founded the run (sdiloco doctor --hub shows it)."
            )
        for name, is_refused, instead in (
            ("exchange_backend", self.exchange_backend == "nccl", "a site reaches its hub over gRPC: leave it out"),
            ("on_resume", self.on_resume == "restart", "a site takes up its own checkpoint, or a state: leave it out"),
            (
                "evaluate",
                self.evaluate == "mean",
                "validation does not wait for other sites: choose 'outer' or 'local'",
            ),
        ):
            if is_refused:
                raise ValueError(f"{name}={getattr(self, name)!r} does not go with a federation: {instead}.")

    def after(self, fit: "Options") -> "Options":
        """Returns the options for another fit: what the planner chose in the last one stays."""
        return replace(fit, settings=fit.settings.with_outer_step_of(self.settings))

    def described(self) -> dict[str, str]:
        """Returns every choice as text, which is the same on all ranks if and only if the choice is."""
        return {
            **self.auto.described(self.settings.described()),
            "worker_groups": str(self.worker_groups),
            "evaluate": self.evaluate,
            "on_resume": self.on_resume,
            "resumable_checkpoints": self.resumable_checkpoints,
            "exchange_backend": self.exchange_backend or "gloo",
        }


class CurrentOptions:
    """The options of a fit as they are now: the planner, or a checkpoint, may replace settings that were ``"auto"``."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    def settings(self) -> Settings:
        """The settings of the engine."""
        return self.options.settings

    def choose(self, settings: Settings) -> None:
        """Replaces the settings of the engine."""
        self.options = replace(self.options, settings=settings)

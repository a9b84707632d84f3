"""Offers a Trainer's logged metrics, including those of Streaming DiLoCo, to a Prometheus server.

    trainer = Trainer(strategy="streaming_diloco", logger=[CSVLogger("."),
    PrometheusLogger("127.0.0.1:9401")])

A name such as ``sdiloco/link_gbit_s`` becomes ``sdiloco_link_gbit_s``. Anyone who can reach the
address can read the metrics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from typing_extensions import override

from lightning_sdiloco.lightning.monitor import SUMMED


class PrometheusLogger(Logger):
    """Shows the last value of each metric, or the total if rows contain sums. It listens from the
    first row on.

    Args:
        listen: The address and port.
    """

    name = "prometheus"
    version = None

    def __init__(self, listen: str = "127.0.0.1:9401") -> None:
        self.host, _, self.port = listen.rpartition(":")
        self.registry = CollectorRegistry()
        self.shown: dict[str, Any] = {}

    @rank_zero_only
    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.shown:
            start_http_server(int(self.port), self.host, self.registry)
        for name, value in {**metrics, "step": step or 0}.items():
            if name not in self.shown:
                kind = Counter if name in SUMMED else Gauge
                self.shown[name] = kind(
                    re.sub(r"\W", "_", name), f"{name} in the loggers", registry=self.registry
                )
            (self.shown[name].inc if name in SUMMED else self.shown[name].set)(float(value))

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing, because Prometheus has no hyperparameters."""

"""What a hub tells a Prometheus server that asks it: the status of the run as metrics, over plain HTTP."""

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning_sdiloco.tools.hub.table import STATES

_FRESH = 1.0  # seconds for which a status is told again, however often it is asked for

SITE_METRICS: Mapping[str, tuple[str, str, str]] = {
    "last_beat": ("gauge", "last_beat_seconds", "Seconds since the last sign of life of a site."),
    "rounds_behind": ("gauge", "rounds_behind", "Rounds that a site has not applied, where that is worst."),
    "share": ("gauge", "weight_share", "Share of a site in the weight of the last 8 rounds."),
    "late": ("counter", "late", "Contributions of a site that came when their round was closed."),
    "lives": ("counter", "starts", "How often a site has come as a new process."),
    "bytes": ("counter", "sent_bytes", "Bytes that a site has sent."),
    "bytes_per_second": ("gauge", "sent_bytes_per_second", "Rate of the last blob that a site has sent."),
}
"""The metrics of a site by the keys of its status: kind, name and help. A counter counts since the hub was started."""


class MetricsServer:
    """Answers whoever asks for metrics, in threads of its own, without TLS and without asking who it is."""

    def __init__(self, listen: str, status: Callable[[], dict[str, Any]]) -> None:
        client = _client("prometheus_client")
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"metrics={listen!r} is no address: give one with a port, such as 127.0.0.1:9400.")
        registry = client.CollectorRegistry()
        registry.register(_Collector(status))
        client.ProcessCollector(registry=registry)
        try:
            self._server, self._thread = client.start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise ValueError(
                f"metrics={listen!r} cannot be listened on ({error}). Give an address of this machine, and a free port."
            ) from error
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """Makes metrics of the status whenever they are asked for."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status, self._lock = status, threading.Lock()
        self._last: dict[str, Any] = {}
        self._until = 0.0

    def describe(self) -> list[Any]:
        """Names nothing in advance: the status need not be asked for at the registration."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yields the metrics."""
        status = self._fresh()
        core = _client("prometheus_client.core")
        yield from _of_run(status, core.GaugeMetricFamily)
        if status["founded"]:
            yield from _of_sites(status, core)
            yield from _of_fragments(status, core.GaugeMetricFamily)

    def _fresh(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._last = self._status()
                self._until = time.monotonic() + _FRESH
            return self._last


def _of_run(status: dict[str, Any], family: Any) -> Iterator[Any]:
    told = {
        "founded": ("Whether the run has been founded.", status["founded"]),
        "trouble": ("Whether something keeps rounds from being closed, such as a full disk.", bool(status["trouble"])),
        "missing_sites": ("Sites that are needed to found the run.", status.get("missing", 0)),
        "records": ("Records of the run.", status.get("records", 0)),
    }
    for name, (text, value) in told.items():
        yield _filled(family(f"sdiloco_{name}", text, labels=["run"]), [([status["run"]], value)])


def _of_sites(status: dict[str, Any], core: Any) -> Iterator[Any]:
    run, sites = status["run"], status["sites"]
    states = [([run, site, state], own["state"] == state) for site, own in sites.items() for state in STATES]
    text = "Whether a site is in a state, 1 in one of them."
    yield _filled(core.GaugeMetricFamily("sdiloco_site_state", text, labels=["run", "site", "state"]), states)
    for key, (kind, name, text) in SITE_METRICS.items():
        family = core.CounterMetricFamily if kind == "counter" else core.GaugeMetricFamily
        values = [([run, site], own[key]) for site, own in sites.items() if own[key] is not None]
        yield _filled(family(f"sdiloco_site_{name}", text, labels=["run", "site"]), values)


def _of_fragments(status: dict[str, Any], family: Any) -> Iterator[Any]:
    run, fragments = status["run"], list(enumerate(status["fragments"]))
    rounds = [([run, str(number)], own["round"]) for number, own in fragments]
    text = "The last round of a fragment that is closed."
    yield _filled(family("sdiloco_fragment_round", text, labels=["run", "fragment"]), rounds)
    missing = [([run, str(number), site], 1) for number, own in fragments for site in own["missing"]]
    text = "1 for every site that the open round of a fragment waits for."
    yield _filled(family("sdiloco_fragment_waits_for", text, labels=["run", "fragment", "site"]), missing)


def _filled(family: Any, values: Sequence[tuple[list[str], float]]) -> Any:
    for labels, value in values:
        family.add_metric(labels, float(value))
    return family


def _client(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            "Metrics need prometheus_client, which is not installed. Install it with all else that a federation needs"
            " (pip install 'lightning-sdiloco[federated]'), or leave out --metrics."
        ) from error

"""Runs ``sdiloco hub``, which serves a run to its sites, with metrics, and sends requests to
hubs.
"""

import importlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.coordinator import Status
from lightning_sdiloco.federation.keys import Role, load
from lightning_sdiloco.federation.server import HubService
from lightning_sdiloco.federation.wire import HubError

_MOMENT = 0.5  # seconds between checks that this hub is the latest of its run


def hub(
    run: str | None = None,
    keys: str | None = None,
    sites: int | None = None,
    listen: str = "127.0.0.1:29400",
    ledger: str = "hub.sqlite",
    store: str | None = None,
    insecure: bool = False,
    metrics: str | None = None,
    quorum: str | None = None,
    backups: str | None = None,
    backups_every: float = 3600.0,
    refound: bool = False,
) -> str:
    """Serve a run to its sites until a signal ends it. Restart it with the same ledger.

    Args:
        run: The name of the run.
        keys: The hub's bundle, or the folder made by `sdiloco keys init`.
        sites: Number of sites needed to start the run. Afterwards, sites may join and leave at any
            time.
        listen: Address and port. For sites on other machines, use 0.0.0.0 or the address of an
            interface.
        ledger: The file with the run's records. Without it the run is lost, so keep it on a durable
            disk.
        store: Folder or URL for payloads and states; by default a folder next to the ledger.
        insecure: Serve without TLS, for tests on one machine: anyone who can reach the port can do
            anything.
        metrics: Address and port for Prometheus metrics, and for a cluster's probes at /healthz;
            none by default. Anyone who can reach that port can read them.
        quorum: Your own quorum that sites may use to found the run: module.Class, in a module that
            Python finds here. If a site names any other quorum, it is not imported. This package's own
            quorums are always allowed.
        backups: A folder on a different disk for copies of the ledger and payloads, made while the
            run continues. If the first disk is lost, start a hub with `--ledger FOLDER/hub.sqlite`.
        backups_every: Seconds between copies.
        refound: If the old ledger is lost, found the run again on a new one, from the state of its
            remaining sites.

    Examples:
        $ sdiloco hub --run pretrain --keys keys --sites 2 --listen 0.0.0.0:29400
    """
    if run is None:
        raise ValueError(
            "A hub serves one run: give its name (--run NAME) and its keys (--keys FOLDER)."
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        service = HubService(
            run,
            ledger,
            sites,
            listen,
            store,
            keys,
            insecure,
            quorum=quorum,
            backups=backups,
            backups_every=backups_every,
            refound=refound,
        )
    except HubError as error:
        raise ValueError(str(error)) from error
    server = None
    if metrics is not None:
        try:
            server = MetricsServer(metrics, service.coordinator.status, service.is_serving)
        except ValueError:
            service.close()
            raise
    # The service ends first. Until it has ended, /healthz answers that it is not serving.
    with nullcontext() if server is None else closing(server), closing(service):
        _serve(run, service, server)
    return f"The hub has ended. Everything is in {ledger}: to continue, rerun the same command."


def _serve(run: str, service: HubService, server: "MetricsServer | None") -> None:
    """Serves until a signal arrives, and prints the address."""
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    service.start()
    status = service.coordinator.status()
    if status["founded"]:
        state = f"it continues after {status['records']} records"
    else:
        state = f"it is waiting for {status['missing']} sites to found the run"
    print(f"The hub for run {run} is listening on port {service.port}: {state}.", flush=True)
    if server is not None:
        print(
            f"Metrics for Prometheus are on port {server.port}, open to anyone who can reach it.",
            flush=True,
        )
    while not over.wait(_MOMENT):
        service.require_latest()


# Requests to a hub


@dataclass(frozen=True)
class HubOptions:
    """Options shared by all commands that contact a hub: which hub, and in which role.

    Args:
        hub: Address and port of the hub, or several, separated by commas.
        keys: Your bundle; commands that change the run need an operator's.
        run: The name of the run, if the bundle does not name it.
        insecure: Connect to a hub that uses no keys.
    """

    hub: str | None = None
    keys: str | None = None
    run: str | None = None
    insecure: bool = False

    def mailbox(self, role: Role, channels: int = 1) -> HubClient:
        """Connects to the hub. The bundle names the caller, and also the run unless ``run`` is
        given.
        """
        if self.hub is None:
            raise ValueError("Give the hub's address: --hub ADDRESS:PORT.")
        name = str(role)
        run = self.run
        if self.keys is not None and not self.insecure:
            holder = load(self.keys).identity
            name = holder.name
            run = run or holder.run
        if run is None:
            raise ValueError("Give the run's name: --run RUN. A bundle also names it: --keys FILE.")
        return HubClient(
            self.hub, run, name, self.keys, self.insecure, role=role, channels=channels
        )

    def ask(self, role: Role, request: str, **arguments: object) -> Status:
        with closing(self.mailbox(role)) as mailbox:
            return asked(mailbox, request, **arguments)[0]


def asked(mailbox: HubClient, request: str, **arguments: object) -> tuple[Status, bytes]:
    """Sends a request over a connection that stays open, and returns the answer."""
    try:
        return mailbox.call(request, arguments)
    except HubError as error:
        raise ValueError(str(error)) from error


def status_of(mailbox: HubClient) -> Status:
    status: Status = json.loads(asked(mailbox, "status")[1])
    return status


def evict(site: str, options: HubOptions) -> str:
    """Remove a site from a run. If it is restarted, it may rejoin with a state from the other
    sites.

    Args:
        site: The name of the site.
        options: Which hub to ask, and as whom.

    Examples:
        $ sdiloco hub evict site-b --hub a.example:29400 --keys operator.bundle
    """
    options.ask("operator", "evict", who=site)
    return f"{site} was evicted. To keep it out permanently, revoke its keys: sdiloco keys revoke FOLDER {site}."


def end(options: HubOptions) -> str:
    """End a run: the next round of every fragment is the last, and every site launches for it.

    Args:
        options: Which hub to ask, and as whom.
    """
    options.ask("operator", "end")
    return "The run ends with the next round of every fragment."


def backup(options: HubOptions) -> str:
    """Copy a run's ledger and payloads now, into the hub's backup folder.

    Args:
        options: Which hub to ask, and as whom.
    """
    copy = options.ask("operator", "backup")
    return f"{copy['records']} records are in {copy['folder']}, on the hub's machine."


def amend(
    options: HubOptions,
    rounds: int | None = None,
    grace: float | None = None,
    lease: float | None = None,
    quorum: int | None = None,
    guard: float | None = None,
) -> str:
    """Amend the terms of a run while it trains; terms that you leave out are unchanged.

    Args:
        options: Which hub to ask, and as whom.
        rounds: Number of rounds of every fragment after which the run ends; 0: it ends when its
            sites do.
        grace: Seconds that a round remains open after its first contribution.
        lease: Seconds that a round waits for a site whose heartbeats have stopped.
        quorum: Minimum number of sites in a round.
        guard: Longest accepted outer gradient, as a multiple of the typical length; 0: no limit.

    Examples:
        $ sdiloco hub amend --rounds 80 --grace 20 --hub a.example:29400 --keys operator.bundle
    """
    terms: Status = {
        "rounds": rounds,
        "grace": grace,
        "lease": lease,
        "quorum": quorum,
        "guard": guard,
    }
    changes = {name: term for name, term in terms.items() if term is not None}
    if not changes:
        raise ValueError(f"Give at least one change: {', '.join(f'--{name}' for name in terms)}.")
    for name in ("rounds", "guard"):
        if changes.get(name) == 0:
            changes[name] = None  # without an end, any length
    amended = options.ask("operator", "amend", terms=changes)["terms"]
    return f"The run continues with {', '.join(f'{name}={amended[name]}' for name in terms)}."


def rollback(round: int, options: HubOptions) -> str:
    """Roll a run back to a round. Later records are dropped permanently; restart sites that have
    applied them.

    Args:
        round: The last round of every fragment to keep.
        options: Which hub to ask, and as whom.

    Examples:
        $ sdiloco hub rollback 40 --hub a.example:29400 --keys operator.bundle
    """
    records = options.ask("operator", "rollback", round=round)["records"]
    return (
        f"{records} records remain. Sites that have applied more are refused: restart them from an"
        " earlier checkpoint, or without one."
    )


STATES = {
    "follows": "green",
    "joining": "yellow",
    "expected": "yellow",
    "silent": "red",
    "gone": "dim",
}
"""The possible states of a site, each with its color."""

# Metrics


_FRESH = 1.0  # seconds for which a status is reused, however often it is requested

SITE_METRICS: Mapping[str, tuple[str, str, str]] = {
    "last_heartbeat": (
        "gauge",
        "last_heartbeat_seconds",
        "Seconds since the last heartbeat of a site.",
    ),
    "rounds_behind": (
        "gauge",
        "rounds_behind",
        "Rounds that a site has not applied, for the fragment furthest behind.",
    ),
    "share": ("gauge", "weight_share", "A site's share of the weight in the last 8 rounds."),
    "late": (
        "counter",
        "late",
        "Contributions of a site that arrived after their round had closed.",
    ),
    "lost_steps": (
        "counter",
        "lost_steps",
        "Inner steps of a site's process that never counted because their launches were late.",
    ),
    "lost_share": (
        "gauge",
        "lost_share",
        "Share of such steps among the inner steps of the process.",
    ),
    "cosine": (
        "gauge",
        "cosine",
        "Cosine of a site's last contribution with the mean of the other sites.",
    ),
    "against": (
        "gauge",
        "against",
        "How many of a site's last 16 contributions pointed against the other sites'.",
    ),
    "not_finite": (
        "counter",
        "not_finite",
        "Contributions of a site that were left out because they were not finite.",
    ),
    "too_long": ("counter", "too_long", "Contributions of a site that the guard left out."),
    "wrong_buffers": (
        "counter",
        "wrong_buffers",
        "Contributions of a site whose buffers were too large or not finite.",
    ),
    "refused_states": (
        "counter",
        "refused_states",
        "States that a site has fetched and could not use.",
    ),
    "incarnations": ("counter", "starts", "How often a site has joined as a new process."),
    "bytes": ("counter", "sent_bytes", "Bytes that a site has sent."),
    "bytes_per_second": (
        "gauge",
        "sent_bytes_per_second",
        "Rate of the last blob that a site has sent.",
    ),
}
"""A site's metrics by the keys of its status: kind, name and help. Counters start at the hub's
start.
"""


class MetricsServer:
    """Answers all requests for metrics, in its own threads, without TLS or authentication.

    The status is requested at most once a second. /healthz answers 200 while the hub is serving,
    and 503 otherwise.
    """

    def __init__(
        self, listen: str, status: Callable[[], Status], is_serving: Callable[[], bool]
    ) -> None:
        client = _client("prometheus_client")
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(
                f"metrics={listen!r} is not an address: give one with a port, such as"
                " 127.0.0.1:9400."
            )
        self._status = status
        self._lock = threading.Lock()
        self._last = Status()
        self._until = 0.0
        registry = client.CollectorRegistry()
        registry.register(self)
        client.ProcessCollector(registry=registry)
        try:
            self._server, self._thread = client.start_http_server(
                int(port), host.strip("[]"), registry
            )
        except OSError as error:
            raise ValueError(
                f"metrics={listen!r} cannot be used ({error}). Give an address of this machine, and"
                " a free port."
            ) from error
        self.port = int(self._server.server_port)
        answer_metrics = self._server.get_app()

        def answer(request: Status, start: Callable[..., object]) -> Iterable[bytes]:
            if request.get("PATH_INFO") != "/healthz":
                return answer_metrics(request, start)
            headers = [("Content-Type", "text/plain")]
            if is_serving():
                start("200 OK", headers)
                return [b"SERVING\n"]
            start("503 Service Unavailable", headers)
            return [b"NOT_SERVING\n"]

        self._server.set_app(answer)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def describe(self) -> list[object]:
        """Announces no metrics in advance, so that registration does not need a status."""
        return []

    def collect(self) -> Iterator[object]:
        """Yields all metrics from a status that is at most a second old."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._last = self._status()
                self._until = time.monotonic() + _FRESH
            status = self._last
        family = partial(_family, _client("prometheus_client.core"), status["run"])
        trouble = "Whether something prevents rounds from closing, such as a full disk."
        missing = status.get("missing", 0)
        records = status.get("records", 0)
        yield family("founded", "Whether the run has been founded.", [([], status["founded"])])
        yield family("trouble", trouble, [([], bool(status["trouble"]))])
        yield family("missing_sites", "Sites still needed to found the run.", [([], missing)])
        yield family("records", "Records of the run.", [([], records)])
        if status["founded"]:
            yield from _site_families(family, status["sites"])
            yield from _fragment_families(family, status["fragments"])


Samples = list[tuple[list[str], float]]
"""The samples of a metric: labels and value of each."""


def _family(
    core: ModuleType,
    run: str,
    name: str,
    text: str,
    samples: Samples,
    *labels: str,
    kind: str = "gauge",
) -> object:
    """Makes a family of metrics whose samples are all labelled with the run's name."""
    cls = core.CounterMetricFamily if kind == "counter" else core.GaugeMetricFamily
    family = cls(f"sdiloco_{name}", text, labels=["run", *labels])
    for values, number in samples:
        family.add_metric([run, *values], float(number))
    return family


def _site_families(family: Callable[..., object], sites: Mapping[str, Status]) -> Iterator[object]:
    """Yields the sites' metrics; a metric that is None for a site has no sample."""
    states: Samples = []
    for name, site in sites.items():
        for state in STATES:
            states.append(([name, state], site["state"] == state))
    text = "Whether a site is in a state: 1 for its current state."
    yield family("site_state", text, states, "site", "state")
    for key, (kind, metric, text) in SITE_METRICS.items():
        samples = [([name], site[key]) for name, site in sites.items() if site[key] is not None]
        yield family(f"site_{metric}", text, samples, "site", kind=kind)


def _fragment_families(family: Callable[..., object], fragments: list[Status]) -> Iterator[object]:
    """Yields the closed rounds, and the sites that open rounds wait for."""
    rounds: Samples = []
    missing: Samples = []
    for number, fragment in enumerate(fragments):
        rounds.append(([str(number)], fragment["round"]))
        for site in fragment["missing"]:
            missing.append(([str(number), site], 1))
    yield family("fragment_round", "The last closed round of a fragment.", rounds, "fragment")
    text = "1 for every site that the open round of a fragment waits for."
    yield family("fragment_waits_for", text, missing, "fragment", "site")


def _client(module: str) -> ModuleType:
    """Imports a module of prometheus_client, which is an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            "Metrics need prometheus_client, which is not installed. Install everything a"
            " federation needs (pip install 'lightning-sdiloco[federated]'), or leave out"
            " --metrics."
        ) from error

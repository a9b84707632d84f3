"""Runs ``sdiloco hub``, which serves a run and its metrics or sends requests to a hub."""

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

_MOMENT = 0.5  # seconds between checks that this hub is still its run's latest hub


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
    """Serve a run to its sites until the hub is stopped with a signal. To continue the run, restart
    the hub with the same ledger.

    Args:
        run: Name of the run.
        keys: The hub's bundle, or the folder created by `sdiloco keys init`.
        sites: Number of sites required to start the run. After the start, sites may join and leave
            at any time.
        listen: Address and port. For sites on other machines, use 0.0.0.0 or the address of an
            interface.
        ledger: File for the run's records. Keep this file on a durable disk, because the run is
            lost without it.
        store: Folder or URL for payloads and states. By default, a folder next to the ledger is
            used.
        insecure: Serve without TLS, for tests on one machine. Anyone who can reach the port has
            full control.
        metrics: Address and port for Prometheus metrics and for health checks at /healthz. By
            default, metrics are not served. Anyone who can reach this port can read the metrics.
        quorum: Custom quorum that sites may use to found the run, given as module.Class. The hub
            must be able to import the module. Other custom quorums are refused. This package's
            quorums are always allowed.
        backups: Folder on a different disk for copies of the ledger and payloads, which are made
            while the run continues. If the first disk is lost, start a hub with `--ledger
            FOLDER/hub.sqlite`.
        backups_every: Seconds between copies.
        refound: If the old ledger is lost, found the run again with a new ledger, from the state of
            the remaining sites.

    Examples:
        $ sdiloco hub --run pretrain --keys keys --sites 2 --listen 0.0.0.0:29400
    """
    if run is None:
        raise ValueError(
            "The name of the run is missing. Specify the name (--run NAME) and the keys (--keys"
            " FOLDER)."
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
    # The service ends first. While it is ending, /healthz reports that it is not serving.
    with nullcontext() if server is None else closing(server), closing(service):
        _serve(run, service, server)
    return (
        f"The hub has ended. All records are in {ledger}. To continue, run the same command again."
    )


def _serve(run: str, service: HubService, server: "MetricsServer | None") -> None:
    """Prints the address and serves the run until a signal arrives."""
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    service.start()
    status = service.coordinator.status()
    if status["founded"]:
        state = f"The run continues after {status['records']} records"
    else:
        state = f"The hub is waiting for {status['missing']} sites to found the run"
    print(f"The hub for run {run} is listening on port {service.port}. {state}.", flush=True)
    if server is not None:
        print(
            f"Prometheus metrics are served on port {server.port}. Anyone who can reach this port"
            " can read the metrics.",
            flush=True,
        )
    while not over.wait(_MOMENT):
        service.require_latest()


# Requests to a hub


@dataclass(frozen=True)
class HubOptions:
    """Options shared by all commands that contact a hub.

    Args:
        hub: Address and port of the hub. Separate multiple addresses with commas.
        keys: Your bundle. Commands that change the run require an operator's bundle.
        run: Name of the run, if the bundle does not contain it.
        insecure: Connect to a hub that does not use keys.
    """

    hub: str | None = None
    keys: str | None = None
    run: str | None = None
    insecure: bool = False

    def mailbox(self, role: Role, channels: int = 1) -> HubClient:
        """Connects to the hub under the bundle's name and, by default, for the bundle's run."""
        if self.hub is None:
            raise ValueError("The hub's address is missing. Specify --hub ADDRESS:PORT.")
        name = str(role)
        run = self.run
        if self.keys is not None and not self.insecure:
            holder = load(self.keys).identity
            name = holder.name
            run = run or holder.run
        if run is None:
            raise ValueError(
                "The name of the run is missing. Specify --run RUN, or a bundle that contains the"
                " name (--keys FILE)."
            )
        return HubClient(
            self.hub, run, name, self.keys, self.insecure, role=role, channels=channels
        )

    def ask(self, role: Role, request: str, **arguments: object) -> Status:
        with closing(self.mailbox(role)) as mailbox:
            return asked(mailbox, request, **arguments)[0]


def asked(mailbox: HubClient, request: str, **arguments: object) -> tuple[Status, bytes]:
    """Sends a request over an open connection and returns the response."""
    try:
        return mailbox.call(request, arguments)
    except HubError as error:
        raise ValueError(str(error)) from error


def status_of(mailbox: HubClient) -> Status:
    status: Status = json.loads(asked(mailbox, "status")[1])
    return status


def evict(site: str, options: HubOptions) -> str:
    """Remove a site from a run. After a restart, the site may rejoin with a state from another
    site.

    Args:
        site: Name of the site to remove.
        options: Options for the connection to the hub.

    Examples:
        $ sdiloco hub evict site-b --hub a.example:29400 --keys operator.bundle
    """
    options.ask("operator", "evict", who=site)
    return (
        f"{site} was evicted. To exclude the site permanently, revoke its keys with sdiloco keys"
        f" revoke FOLDER {site}."
    )


def end(options: HubOptions) -> str:
    """End a run after the next round of every fragment, for which every site launches.

    Args:
        options: Options for the connection to the hub.
    """
    options.ask("operator", "end")
    return "The run ends with the next round of every fragment."


def backup(options: HubOptions) -> str:
    """Copy a run's ledger and payloads to the hub's backup folder immediately.

    Args:
        options: Options for the connection to the hub.
    """
    copy = options.ask("operator", "backup")
    return f"{copy['records']} records were copied to {copy['folder']} on the hub's machine."


def amend(
    options: HubOptions,
    rounds: int | None = None,
    grace: float | None = None,
    lease: float | None = None,
    quorum: int | None = None,
    guard: float | None = None,
) -> str:
    """Change a run's terms during training. Terms that you omit stay unchanged.

    Args:
        options: Options for the connection to the hub.
        rounds: Number of rounds of every fragment after which the run ends. If 0, the run ends when
            its sites do.
        grace: Seconds that a round remains open after its first contribution.
        lease: Seconds that a round waits for a site whose heartbeats have stopped.
        quorum: Minimum number of sites in a round.
        guard: Maximum accepted norm of an outer gradient, as a multiple of the typical norm. If 0,
            there is no limit.

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
        raise ValueError(
            f"Specify at least one change: {', '.join(f'--{name}' for name in terms)}."
        )
    for name in ("rounds", "guard"):
        if changes.get(name) == 0:
            changes[name] = None  # no end: the run may have any length
    amended = options.ask("operator", "amend", terms=changes)["terms"]
    return f"The run continues with {', '.join(f'{name}={amended[name]}' for name in terms)}."


def rollback(round: int, options: HubOptions) -> str:
    """Roll a run back to a round. Later records are deleted permanently, and sites that have
    applied them must be restarted.

    Args:
        round: Last round to keep for every fragment.
        options: Options for the connection to the hub.

    Examples:
        $ sdiloco hub rollback 40 --hub a.example:29400 --keys operator.bundle
    """
    records = options.ask("operator", "rollback", round=round)["records"]
    return (
        f"{records} records remain. Sites that have applied later records are refused. Restart"
        " these sites from an earlier checkpoint or without a checkpoint."
    )


STATES = {
    "follows": "green",
    "joining": "yellow",
    "expected": "yellow",
    "silent": "red",
    "gone": "dim",
}
"""The color for each possible state of a site."""

# Metrics


_FRESH = 1.0  # seconds for which a status is reused, however often it is requested

SITE_METRICS: Mapping[str, tuple[str, str, str]] = {
    "last_heartbeat": (
        "gauge",
        "last_heartbeat_seconds",
        "Seconds since a site's last heartbeat.",
    ),
    "rounds_behind": (
        "gauge",
        "rounds_behind",
        "Number of rounds that a site has not yet applied, for the fragment that is furthest"
        " behind.",
    ),
    "share": (
        "gauge",
        "weight_share",
        "A site's share of the total weight over the last 8 rounds.",
    ),
    "late": (
        "counter",
        "late",
        "A site's contributions that arrived after their round had closed.",
    ),
    "lost_steps": (
        "counter",
        "lost_steps",
        "Inner steps of a site's process that were lost because their launches arrived too late.",
    ),
    "lost_share": (
        "gauge",
        "lost_share",
        "Lost inner steps as a share of all inner steps of a site's process.",
    ),
    "cosine": (
        "gauge",
        "cosine",
        "Cosine between a site's last contribution and the mean of the other sites.",
    ),
    "against": (
        "gauge",
        "against",
        "Number of contributions, among a site's last 16, that pointed against the mean of the"
        " other sites.",
    ),
    "not_finite": (
        "counter",
        "not_finite",
        "A site's contributions that were excluded because they were not finite.",
    ),
    "too_long": ("counter", "too_long", "A site's contributions that were excluded by the guard."),
    "wrong_buffers": (
        "counter",
        "wrong_buffers",
        "A site's contributions whose buffers were too large or not finite.",
    ),
    "refused_states": (
        "counter",
        "refused_states",
        "States that a site fetched but could not use.",
    ),
    "incarnations": (
        "counter",
        "starts",
        "Number of times that a site has joined as a new process.",
    ),
    "bytes": ("counter", "sent_bytes", "Total number of bytes that a site has sent."),
    "bytes_per_second": (
        "gauge",
        "sent_bytes_per_second",
        "Transfer rate of the last blob that a site sent.",
    ),
}
"""The kind, name and help text of each site metric, by the metric's key in the site's status.

Counters restart when the hub is restarted.
"""


class MetricsServer:
    """A metrics server that runs in separate threads, without TLS or authentication.

    The status is requested at most once per second. The path /healthz returns 200 while the hub is
    serving and 503 otherwise.
    """

    def __init__(
        self, listen: str, status: Callable[[], Status], is_serving: Callable[[], bool]
    ) -> None:
        client = _client("prometheus_client")
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(
                f"metrics={listen!r} is not an address. Use an address with a port, such as"
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
                f"metrics={listen!r} cannot be used ({error}). Use an address of this machine and a"
                " free port."
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
        """Returns an empty list so that registration does not require a status."""
        return []

    def collect(self) -> Iterator[object]:
        """Yields all metrics, based on a status that is at most one second old."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._last = self._status()
                self._until = time.monotonic() + _FRESH
            status = self._last
        family = partial(_family, _client("prometheus_client.core"), status["run"])
        trouble = "Whether a problem, such as a full disk, prevents rounds from closing."
        missing = status.get("missing", 0)
        records = status.get("records", 0)
        yield family("founded", "Whether the run has been founded.", [([], status["founded"])])
        yield family("trouble", trouble, [([], bool(status["trouble"]))])
        yield family(
            "missing_sites",
            "Number of sites that are still needed to found the run.",
            [([], missing)],
        )
        yield family("records", "Records of the run.", [([], records)])
        if status["founded"]:
            yield from _site_families(family, status["sites"])
            yield from _fragment_families(family, status["fragments"])


Samples = list[tuple[list[str], float]]
"""A metric's samples, as pairs of labels and values."""


def _family(
    core: ModuleType,
    run: str,
    name: str,
    text: str,
    samples: Samples,
    *labels: str,
    kind: str = "gauge",
) -> object:
    """Creates a family of metrics in which all samples are labelled with the run's name."""
    cls = core.CounterMetricFamily if kind == "counter" else core.GaugeMetricFamily
    family = cls(f"sdiloco_{name}", text, labels=["run", *labels])
    for values, number in samples:
        family.add_metric([run, *values], float(number))
    return family


def _site_families(family: Callable[..., object], sites: Mapping[str, Status]) -> Iterator[object]:
    """Yields the sites' metrics, without samples for metrics that are None."""
    states: Samples = []
    for name, site in sites.items():
        for state in STATES:
            states.append(([name, state], site["state"] == state))
    text = "Whether a site is in this state. The value is 1 for its current state, otherwise 0."
    yield family("site_state", text, states, "site", "state")
    for key, (kind, metric, text) in SITE_METRICS.items():
        samples = [([name], site[key]) for name, site in sites.items() if site[key] is not None]
        yield family(f"site_{metric}", text, samples, "site", kind=kind)


def _fragment_families(family: Callable[..., object], fragments: list[Status]) -> Iterator[object]:
    """Yields the closed rounds and the sites that open rounds are waiting for."""
    rounds: Samples = []
    missing: Samples = []
    for number, fragment in enumerate(fragments):
        rounds.append(([str(number)], fragment["round"]))
        for site in fragment["missing"]:
            missing.append(([str(number), site], 1))
    yield family("fragment_round", "Last closed round of a fragment.", rounds, "fragment")
    text = "Whether the open round of a fragment is waiting for a site. If not, there is no value."
    yield family("fragment_waits_for", text, missing, "fragment", "site")


def _client(module: str) -> ModuleType:
    """Imports a module of prometheus_client, which is an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            "Metrics require prometheus_client, which is not installed. Install the packages for"
            " federations (pip install 'lightning-sdiloco[federated]'), or omit --metrics."
        ) from error

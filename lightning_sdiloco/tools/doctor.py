"""Runs ``sdiloco doctor``, which checks all ranks and reports problems on rank 0.

The command must be started on every rank. With ``--hub``, the command is started once, at a site,
and checks the connection to a hub.
"""

import datetime
import io
import json as codec
import os
import platform
import resource
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from lightning_sdiloco.comm.topology import GroupLayout, checked_worker_groups
from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.client import LIMIT_OF_DISTANCE, HubClient, hub_addresses
from lightning_sdiloco.federation.keys import load, wall_clock
from lightning_sdiloco.federation.run_config import ChosenQuorum
from lightning_sdiloco.federation.wire import HubError, HubUnreachable
from lightning_sdiloco.launch.reachability import (
    BrokenConnection,
    Endpoints,
    Listener,
    advice,
    exchange_address,
    find_broken_connections,
    group_address,
)
from lightning_sdiloco.launch.rendezvous import Rendezvous, reason, rendezvous_at, try_to_connect
from lightning_sdiloco.lightning.host import Internal
from lightning_sdiloco.planning.planner import HUB_CONNECTIONS
from lightning_sdiloco.planning.units import counted, readable, readable_rate
from lightning_sdiloco.tools.hub import HubOptions
from lightning_sdiloco.tools.output import Numbers, plain
from lightning_sdiloco.tools.status import missing_sites

SECONDS = 3.0
"""The number of seconds for which each direction is measured.

Only the second half counts, because connections start slowly.
"""

PACKAGES = ("lightning-sdiloco", "torch", "lightning", "pytorch-lightning")
# These variables change how ranks reach each other, or how fast they are.
VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "SDILOCO_EXCHANGE_INTERFACE",
    "OMP_NUM_THREADS",
    "TORCH_DISTRIBUTED_DEBUG",
)

_UNEQUAL = 2.0  # a direction this many times slower than the other has a cause worth finding
_LONG_ROUND_TRIP = 0.01  # beyond this, a slow start takes longer than a launch can wait
_FILES_PER_RANK = 8  # connections of several process groups
_FILES = 256  # files that any Python process may have open
_PINGS = 10
_BLOCK = 1 << 20
_RATE = struct.Struct(">d")
_progress = Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print
_STYLES = {"ok": "green", "slow": "yellow", "wrong": "bold red"}


class Finding(NamedTuple):
    """The result of a check: the state, the observation, and any fix."""

    state: Literal["ok", "slow", "wrong"]
    check: str
    found: str
    fix: str = ""


def doctor(
    options: HubOptions,
    worker_groups: Literal["auto"] | int = "auto",
    num_nodes: int | None = None,
    seconds: float = SECONDS,
    wait: float = 300.0,
    json: bool = False,
) -> str:
    """Check reachability, versions, settings, bandwidth and round trip for a training run.

    With --hub, run the command once, at a site. In this case, the command checks the keys, the
    connection to the hub, the round trip, the bandwidth and the run config.

    Args:
        options: Options for the connection to a hub.
        worker_groups: Number of worker groups, as in the strategy. The default is one per node.
        num_nodes: Number of nodes, if the command is started once on every node with NODE_RANK and
            MASTER_ADDR.
        seconds: Seconds for which each direction between worker groups, or to and from the hub, is
            measured.
        wait: Seconds to wait for all ranks to join.
        json: Print JSON instead of a table.

    Examples:
        $ srun --nodes=2 sdiloco doctor
        $ NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500 sdiloco doctor --num-nodes 2
        $ sdiloco doctor --hub a.example:29400 --keys site-b.bundle
    """
    details: Numbers
    if options.hub is not None:
        checks, details = examine_hub(options, seconds)
    else:
        examined = _examined(worker_groups, num_nodes, seconds, wait)
        if examined is None:
            return ""
        checks = findings(examined)
        details = {
            "ranks": _described_ranks(examined),
            "unreachable": examined.broken,
            "links": examined.links,
        }
    is_wrong = any(finding.state == "wrong" for finding in checks)
    if json:
        text = codec.dumps(plain({"ok": not is_wrong, "findings": checks, **details}), indent=2)
    else:
        text = _as_table(checks)
    if is_wrong:
        print(text)
        raise SystemExit(1)
    return text


def _described_ranks(examined: "Examined") -> list[Numbers]:
    """Describes every rank's position and machine as JSON values."""
    ranks = []
    for rank, endpoints in enumerate(examined.endpoints):
        place = {
            "rank": rank,
            "host": endpoints.host,
            "worker_group": endpoints.group,
            "exchange": endpoints.exchange[0],
        }
        ranks.append(place | examined.machines[rank])
    return ranks


def _as_table(checks: Sequence[Finding]) -> str:
    """Formats the findings as a table, with colors on a terminal."""
    table = Table(title="sdiloco doctor", title_justify="left")
    for name in ("", "what", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for state, check, observation, fix in checks:
        table.add_row(f"[{_STYLES[state]}]{state}[/]", check, observation, fix)
    is_terminal = sys.stdout.isatty()
    # Launcher logs have no width.
    width = None if is_terminal else 140
    text = io.StringIO()
    Console(file=text, force_terminal=is_terminal, width=width, highlight=False).print(table)
    return text.getvalue().rstrip("\n")


# The ranks of a training run


class MeasuredLink(NamedTuple):
    """One direction of a link between two worker groups.

    If the measurement failed, ``error`` is the reason.
    """

    source: int
    target: int
    round_trip: float = 0.0
    bits_per_second: float = 0.0
    error: str = ""


class Examined(NamedTuple):
    """Information about all ranks, their machines, and the links between groups."""

    groups: int
    endpoints: Sequence[Endpoints]
    machines: Sequence[Numbers]
    broken: Sequence[BrokenConnection]
    links: Sequence[MeasuredLink]


def _examined(
    worker_groups: object, num_nodes: int | None, seconds: float, wait: float
) -> Examined | None:
    """Checks all ranks, and returns the result on rank 0. All ranks must call this function."""
    launch = detect_launch(num_nodes)
    groups = checked_worker_groups(worker_groups)
    if groups == "auto":
        groups = launch.nodes if launch.nodes > 1 else launch.world_size
    layout = GroupLayout(launch.world_size, groups)
    group = layout.group_of(launch.rank)
    is_first = layout.group_rank_of(launch.rank) == 0
    progress = _progress if launch.rank == 0 else _no_progress
    progress(
        f"Waiting at {launch.host}:{launch.port} for {launch.world_size} processes, for at most"
        f" {wait:g} s"
    )
    rendezvous = rendezvous_at(
        launch.host,
        launch.port,
        launch.rank,
        launch.world_size,
        datetime.timedelta(seconds=wait),
    )
    machines = rendezvous.all_gather("machines", describe())
    progress("All processes have joined; connecting every pair")
    endpoints, broken = find_broken_connections(rendezvous, group, exchange_address, group_address)
    links = []
    if not broken:
        links = measure(rendezvous, groups, group, is_first, exchange_address(), seconds, progress)
    if launch.rank != 0:
        return None
    return Examined(groups, endpoints, machines, broken, links)


def _no_progress(text: str) -> None: ...


class Launch(NamedTuple):
    """The rank of this process and the address at which all ranks meet."""

    rank: int
    world_size: int
    nodes: int
    host: str
    port: int


def detect_launch(num_nodes: int | None = None) -> Launch:
    """Detects torchrun, srun or manually set variables in the same way as Lightning."""
    environment, numbers = _environment(num_nodes)
    for name in numbers:
        value = os.environ.get(name, "")
        if not value.isdigit():
            raise ValueError(
                f"{name}={value!r} is not a number. Set {name} on every node, as for training."
            )
    # Lightning would use the loopback address, where no other machine can find rank 0.
    if "MASTER_ADDR" not in os.environ and "SLURM_NODELIST" not in os.environ:
        raise ValueError(
            "MASTER_ADDR is not set. On every node, set MASTER_ADDR to an address of rank 0's"
            " machine."
        )
    meeting_place = str(environment.main_address), environment.main_port
    if num_nodes is not None:
        return Launch(environment.node_rank(), num_nodes, num_nodes, *meeting_place)
    rank = environment.global_rank()
    world_size = environment.world_size()
    if numbers:
        # GROUP_WORLD_SIZE is missing if ranks were started by hand, one by one.
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", max(world_size // per_node, 1)))
    else:
        nodes = int(os.environ["SLURM_NNODES"])
    return Launch(rank, world_size, nodes, *meeting_place)


def _environment(num_nodes: int | None) -> tuple[Internal, tuple[str, ...]]:
    """Returns Lightning's cluster environment and the numeric variables that it requires."""
    fabric = "lightning.fabric" if find_spec("lightning") is not None else "lightning_fabric"
    environments = import_module(f"{fabric}.plugins.environments")
    if num_nodes is not None:
        return environments.LightningEnvironment(), ("NODE_RANK", "MASTER_PORT")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return environments.TorchElasticEnvironment(), ("RANK", "WORLD_SIZE", "MASTER_PORT")
    if "SLURM_NTASKS" in os.environ and environments.SLURMEnvironment.detect():
        try:
            return environments.SLURMEnvironment(), ()
        except RuntimeError as error:
            raise ValueError(f"Lightning would refuse this job: {error}") from error
    raise ValueError(
        "The rank of this process is unknown. Start the command on every node in the same way as"
        " training: with srun, with torchrun, or by hand with --num-nodes N and with NODE_RANK,"
        " MASTER_ADDR and MASTER_PORT set."
    )


def describe() -> Numbers:
    """Describes this rank's machine as JSON values."""

    def tcp(name: str) -> str:
        try:
            return Path("/proc/sys/net/ipv4", name).read_text().strip()
        except OSError:
            return ""

    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _installed_version(name) or "not installed" for name in PACKAGES},
        },
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "cores": os.cpu_count() or 1,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "tcp": {
            "congestion_control": tcp("tcp_congestion_control"),
            # The largest buffer size in bytes; 0 if the system does not publish it.
            "send_buffer": int((tcp("tcp_wmem").split() or ["0"])[-1]),
            "receive_buffer": int((tcp("tcp_rmem").split() or ["0"])[-1]),
            "slow_start_after_idle": tcp("tcp_slow_start_after_idle") == "1",
        },
    }


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# Findings


def findings(examined: Examined) -> list[Finding]:
    return [*_check_ranks(examined), *_check_machines(examined), *_check_links(examined)]


def _check_ranks(examined: Examined) -> Iterator[Finding]:
    """Counts ranks and hosts and compares package versions between ranks."""
    ranks = len(examined.endpoints)
    hosts = list(dict.fromkeys(endpoints.host for endpoints in examined.endpoints))
    places = f"{ranks} on {counted(len(hosts), 'host')} ({_some(hosts)})"
    size = ranks // examined.groups
    yield Finding("ok", "ranks", f"{places}, in {examined.groups} worker groups of {size}")
    devices = _by_value([machine["device"] for machine in examined.machines])
    yield Finding("ok", "devices", devices)
    for name in examined.machines[0]["versions"]:
        versions = [machine["versions"][name] for machine in examined.machines]
        if len(set(versions)) == 1:
            yield Finding("ok", name, versions[0])
        else:
            fix = f"Install the same version of {name} on all ranks."
            yield Finding("wrong", name, _by_value(versions), fix)


def _by_value(values: Sequence[str]) -> str:
    """Formats the value that all ranks share, or else each value with its ranks."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    if len(ranks) == 1:
        return values[0]
    return ", ".join(f"{value} on rank {_some(holders)}" for value, holders in ranks.items())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _rank(rank: int, examined: Examined) -> str:
    return f"rank {rank} ({examined.endpoints[rank].host})"


def _check_machines(examined: Examined) -> Iterator[Finding]:
    """Reports low file limits, too many threads, and slow debug settings."""
    # For each kind of problem, only the worst or first case is shown, because the remedy is the
    # same for all.
    needed = _FILES_PER_RANK * len(examined.endpoints) + _FILES
    files = [machine["files"] for machine in examined.machines]
    few_files = [rank for rank, limit in enumerate(files) if 0 <= limit < needed]
    if few_files:
        rank = min(few_files, key=lambda rank: files[rank])
        limit = f"{_rank(rank, examined)} may open {files[rank]}; {needed} may be needed"
        fix = f"Run ulimit -n {needed} on every machine before training starts."
        yield Finding("wrong", "open files", limit, fix)
    yield from list(_crowded_hosts(examined))[:1]
    for rank, machine in enumerate(examined.machines):
        if machine["variables"].get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
            setting = (
                f"{_rank(rank, examined)} has TORCH_DISTRIBUTED_DEBUG=DETAIL, which compares ranks"
                " at every collective"
            )
            yield Finding("slow", "debugging", setting, "Leave it out.")
            break


def _crowded_hosts(examined: Examined) -> Iterator[Finding]:
    """Yields a finding for each rank on a host with more threads than cores."""
    hosts = [endpoints.host for endpoints in examined.endpoints]
    for host, machine in zip(hosts, examined.machines, strict=True):
        ranks = hosts.count(host)
        cores = machine["cores"]
        variable = machine["variables"].get("OMP_NUM_THREADS", "")
        threads = int(variable) if variable.isdigit() else cores
        if machine["device"] == "CPU" and ranks > 1 and threads * ranks > cores:
            load = f"{ranks} ranks on {host} with {threads} threads each share {cores} cores"
            yield Finding("slow", "threads", load, f"OMP_NUM_THREADS={max(cores // ranks, 1)}")


def _check_links(examined: Examined) -> Iterator[Finding]:
    """Reports unreachable ranks and the round trip, bandwidth and TCP settings of each link."""
    if not examined.broken:
        pairs = len(examined.endpoints) * (len(examined.endpoints) - 1)
        yield Finding("ok", "reachability", f"all {pairs} connections between ranks can be made")
    for broken in examined.broken:
        source = _rank(broken.source, examined)
        target = f"{_rank(broken.target, examined)} at {broken.address}"
        yield Finding(
            "wrong", "reachability", f"{source} -> {target}: {broken.why}", advice([broken])
        )
    rates = {
        (link.source, link.target): link.bits_per_second
        for link in examined.links
        if not link.error
    }
    first_of_each_group = slice(None, None, len(examined.endpoints) // examined.groups)
    tcp = [machine["tcp"] for machine in examined.machines[first_of_each_group]]
    for link in examined.links:
        way = f"{link.source} -> {link.target}"
        if link.error:
            fix = "Run sdiloco doctor again. If the error persists, check this machine."
            yield Finding("wrong", f"round trip {way}", link.error, fix)
            continue
        if link.source < link.target:
            yield Finding("ok", f"round trip {way}", f"{1000 * link.round_trip:.3g} ms")
        back = rates.get((link.target, link.source), link.bits_per_second)
        yield _check_direction(link, back)
        yield from _check_buffers(
            link, (tcp[link.source]["send_buffer"], tcp[link.target]["receive_buffer"])
        )
    if any(
        link.round_trip > _LONG_ROUND_TRIP and tcp[link.source]["slow_start_after_idle"]
        for link in examined.links
    ):
        yield Finding(
            "slow",
            "idle connections",
            "TCP restarts slowly after idling, as it does between two launches",
            "On all machines: sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )


def _check_direction(link: MeasuredLink, back: float) -> Finding:
    """Compares the bandwidths of a link's two directions."""
    check = f"bandwidth {link.source} -> {link.target}"
    rate = readable_rate(link.bits_per_second / 1e9)
    if link.bits_per_second * _UNEQUAL >= back:
        return Finding("ok", check, rate)
    return Finding(
        "slow",
        check,
        f"{rate}, and {readable_rate(back / 1e9)} in the other direction",
        f"Look for other traffic from worker group {link.source} to {link.target}, and check the"
        " congestion control on this path. The slower direction limits the speed of training.",
    )


def _check_buffers(link: MeasuredLink, buffers: tuple[int, int]) -> Iterator[Finding]:
    """Yields a finding if TCP buffers limit a link.

    A connection transfers at most one buffer per round trip, and Linux reserves half of each
    buffer.
    """
    limits = [buffer / 2 for buffer in buffers if buffer]
    if not limits or link.round_trip <= 0:
        return
    most = 8 * min(limits) / link.round_trip
    if link.bits_per_second > most / 2:
        needed = int(4 * link.bits_per_second / 8 * link.round_trip)
        yield Finding(
            "slow",
            f"buffers {link.source} -> {link.target}",
            f"TCP buffers may limit one connection to {readable_rate(most / 1e9)} at"
            f" {1000 * link.round_trip:.3g} ms",
            f'On both sides: sysctl -w net.ipv4.tcp_wmem="4096 16384 {needed}"'
            f' net.ipv4.tcp_rmem="4096 131072 {needed}"',
        )


# Measuring links


def measure(
    rendezvous: Rendezvous,
    groups: int,
    group: int,
    is_first: bool,
    address: str,
    seconds: float,
    progress: Callable[[str], None],
) -> list[MeasuredLink]:
    """Measures the links between the first ranks of all worker groups.

    Each group uses one link at a time. All ranks must call this function.
    """
    listener = Listener(address, partial(_serve, seconds=seconds))
    try:
        entry = [group, address, listener.port] if is_first else None
        endpoints = _endpoints(rendezvous, entry)
        round_trips = {}
        if is_first:
            for peer in endpoints:
                if peer != group:
                    round_trips[peer] = _round_trip(endpoints[peer])
        rendezvous.all_gather("round trips", None)
        links = []
        for step in range(1, groups):
            peer = (group + step) % groups
            progress(
                f"Measuring bandwidth, {step} of {groups - 1}: {seconds:g} s in each direction"
            )
            if is_first:
                links.append(_link(group, peer, endpoints[peer], round_trips[peer], seconds))
            rendezvous.all_gather(f"round {step}", None)
        links = list(chain.from_iterable(rendezvous.all_gather("measured", links)))
        return [MeasuredLink(*link) for link in links]
    finally:
        listener.close()


def _endpoints(rendezvous: Rendezvous, entry: list[object] | None) -> dict[int, tuple[str, int]]:
    """Gathers the addresses of the listeners on each group's first rank."""
    entries = [e for e in rendezvous.all_gather("links", entry) if e is not None]
    return {group: (str(host), int(port)) for group, host, port in entries}


def _round_trip(address: tuple[str, int]) -> float | str:
    """Returns the duration of a round trip in seconds, or an error message."""
    seconds: list[float] = []

    def ping(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            start = time.monotonic()
            connection.sendall(b"p")
            _receive(connection, 1)
            seconds.append(time.monotonic() - start)

    error = try_to_connect(*address, 10.0, ping)
    if error is not None:
        return reason(error)
    return statistics.median(seconds)


def _link(
    group: int, peer: int, address: tuple[str, int], round_trip: float | str, seconds: float
) -> MeasuredLink:
    """Sends data to another group and returns the rate at which the data was received."""
    if isinstance(round_trip, str):
        return MeasuredLink(group, peer, error=round_trip)
    rates: list[float] = []

    def send(connection: socket.socket) -> None:
        block = bytes(_BLOCK)
        deadline = time.monotonic() + seconds
        connection.sendall(b"s")
        while time.monotonic() < deadline:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        # The other side counted the bytes.
        rates.append(float(_RATE.unpack(_receive(connection, _RATE.size))[0]))

    error = try_to_connect(*address, 4 * seconds + 10, send)
    if error is not None:
        return MeasuredLink(group, peer, error=reason(error))
    return MeasuredLink(group, peer, round_trip, rates[0])


def _serve(connection: socket.socket, seconds: float) -> None:
    """Answers pings, or measures the rate of received data in bits per second."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while kind := connection.recv(1):
        if kind == b"p":
            connection.sendall(kind)
            continue
        block = memoryview(bytearray(_BLOCK))
        start = time.monotonic()
        middle = None
        received = 0
        last = start
        while count := connection.recv_into(block):
            last = time.monotonic()
            if middle is not None:
                received += count
            elif last - start > seconds / 2:
                middle = last
        rate = 0.0
        if middle is not None and last > middle:
            rate = 8 * received / (last - middle)
        connection.sendall(_RATE.pack(rate))
        return


def _receive(connection: socket.socket, count: int) -> bytes:
    """Reads an exact number of bytes from a connection."""
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return received


# The connection to a hub

_CLOCKS_APART = 60.0  # seconds


def examine_hub(options: HubOptions, seconds: float) -> tuple[list[Finding], Numbers]:
    """Checks the connection to a hub and stops at the first problem."""
    addresses = hub_addresses(str(options.hub))
    if (options.keys is None) != options.insecure:
        raise ValueError(
            "Pass the keys of a site or of another role in the run (--keys FILE), or use"
            " --insecure."
        )
    checks: list[Finding] = []
    numbers: Numbers = {"hub": options.hub}
    for finding in _check_path(options, addresses, seconds, numbers):
        checks.append(finding)
        if finding.state == "wrong":
            break
    return checks, numbers


def _check_path(
    options: HubOptions, addresses: list[tuple[str, int]], seconds: float, numbers: Numbers
) -> Iterator[Finding]:
    """Checks the keys, the addresses and the hub, in this order."""
    yield _check_keys(options)
    errors = [try_to_connect(host, port, 5.0) for host, port in addresses]
    for (host, port), error in zip(addresses, errors, strict=True):
        if error is not None:
            yield Finding(
                "wrong" if all(errors) else "slow",  # one reachable address is enough
                "reachability",
                f"{host}:{port}: {reason(error)}",
                "Start the hub on an address that is reachable from here (--listen"
                f" 0.0.0.0:{port}), and open this port on the hub's machine. Sites do not need an"
                " open port.",
            )
    for number, (host, port) in enumerate(addresses, start=1):
        checks = list(_check_hub(replace(options, hub=f"{host}:{port}"), seconds, numbers))
        if number == len(addresses) or checks[-1].state != "wrong":
            yield from checks
            return


def _check_keys(options: HubOptions) -> Finding:
    """Loads the bundle and reports its holder, run and validity."""
    if options.keys is None:
        insecure = "none: anyone in between can read and change everything (--insecure)"
        return Finding("ok", "keys", insecure)
    try:
        bundle = load(options.keys)
    except ValueError as refusal:
        return Finding("wrong", "keys", str(refusal))
    holder = bundle.identity
    run = f"run {holder.run}" if holder.run != "-" else "the run of its authority"
    days = (bundle.ends - datetime.datetime.now(datetime.timezone.utc)).days
    validity = f"valid until {bundle.ends:%Y-%m-%d}, for {days} days"
    return Finding("ok", "keys", f"{holder.role} {holder.name} in {run}, {validity}")


def _check_hub(options: HubOptions, seconds: float, numbers: Numbers) -> Iterator[Finding]:
    """Checks the connection to one of the hub's addresses, and then the run."""
    try:
        mailbox = options.mailbox("reader", HUB_CONNECTIONS)
    except ValueError as refusal:
        yield Finding("wrong", "keys", str(refusal))
        return
    try:
        with closing(mailbox):
            yield from _check_connection(mailbox, seconds, numbers)
    except (HubError, Refused) as refusal:
        yield Finding("wrong", "hub", str(refusal), _fix_of(refusal, options.insecure))
        return
    yield from _check_run(numbers["status"])


def _check_connection(mailbox: HubClient, seconds: float, numbers: Numbers) -> Iterator[Finding]:
    """Measures the connection and stores the results and the status in ``numbers``."""
    numbers["round_trip"] = mailbox.round_trip()
    identity = mailbox.identity
    yield Finding("ok", "hub", f"the hub responds and recognises {identity.role} {identity.name}")
    round_trip = f"{1000 * numbers['round_trip']:.3g} ms, measured only on this end"
    yield Finding("ok", "round trip", round_trip)
    hub_clock = mailbox.call("ping", {"clock": True})[0].get("clock", wall_clock())
    ahead = float(hub_clock) - wall_clock()
    direction = "ahead of" if ahead > 0 else "behind"
    clock = f"the hub's clock is {abs(ahead):.0f} s {direction} the one here"
    if abs(ahead) > _CLOCKS_APART:
        fix = "Correct the clock that is wrong. The validity of certificates depends on the time."
        yield Finding("slow", "clock", clock, fix)
    else:
        yield Finding("ok", "clock", clock)
    for is_upload, way in ((True, "to"), (False, "from")):
        _progress(f"Measuring bandwidth {way} the hub, for {seconds:g} s")
        rate = mailbox.bandwidth(is_upload, seconds)
        numbers[f"bits_per_second_{way}_hub"] = rate
        bandwidth = f"{readable_rate(rate / 1e9)}, over {HUB_CONNECTIONS} connections"
        yield Finding("ok", f"bandwidth {way} the hub", bandwidth)
    numbers["status"] = codec.loads(mailbox.call("status")[1])


def _fix_of(refusal: Exception, insecure: bool) -> str:
    """Returns advice for a hub that refuses a call or does not respond."""
    if LIMIT_OF_DISTANCE in str(refusal):
        return "Find a shorter route to the hub, or use a hub that is closer to all sites."
    if isinstance(refusal, HubUnreachable):
        if insecure:
            return (
                "A server is listening at this address but does not respond. A hub with keys"
                " refuses calls without keys. Pass --keys FILE."
            )
        return (
            "A server is listening at this address, but it does not match the keys. Either the keys"
            " are from a different authority or run, or the hub does not use TLS. Get keys from the"
            " folder that contains the hub's keys, with sdiloco keys add FOLDER NAME."
        )
    if insecure:
        return "Set --run to the name of the run that this hub serves."
    return (
        "Ask the owner of the run's keys for a bundle, which is created with sdiloco keys add"
        " FOLDER NAME."
    )


def _check_run(status: Numbers) -> Iterator[Finding]:
    """Reports the run's state, the hub's disk space, and whether versions are compatible."""
    if not status["founded"]:
        yield Finding("ok", "run", f"not founded yet: {missing_sites(status)}")
        return
    if status["trouble"]:
        # The missing site may be the one that is about to join.
        finding = Finding("wrong", "run", str(status["trouble"]), "Ask the hub's operator.")
        yield finding._replace(state="slow") if status.get("lost_quorum") else finding
    needs = status["disk"]["still_needs"]
    free = status["disk"]["free"]
    if free is not None:
        room = f"the hub has {readable(free)} free, but the run will need another {readable(needs)}"
        if free < needs:
            fix = (
                "Free up disk space, or set a different --store for the hub. No round can close"
                " while the disk is full."
            )
            yield Finding("slow", "disk", room, fix)
        else:
            yield Finding("ok", "disk", room)
    run_config = status["run_config"]
    key = run_config["key"][:8]
    state = f"{status['records']} records; {len(status['sites'])} sites are known"
    yield Finding("ok", "run", f"founded on run config {key}, {state}")
    yield Finding("ok", "run_config", _described(run_config))
    for name, required in run_config["versions"].items():
        yield _check_version(name, required)


def _described(run_config: Numbers) -> str:
    """Formats the model, terms and settings of a run config on one line."""
    terms = run_config["terms"]
    end = "without an end" if terms["rounds"] is None else f"{terms['rounds']} rounds"
    quorum = terms["quorum"]
    if isinstance(quorum, dict):
        quorum = ChosenQuorum(**quorum)
    settings = ", ".join(f"{name}={value}" for name, value in run_config["settings"].items())
    return (
        f"{run_config['parameters']} tensors in {run_config['fragments']} fragments,"
        f" sync_every={terms['sync_every']}, overlap_steps={terms['overlap_steps']},"
        f" grace={terms['grace']:g}, lease={terms['lease']:g}, quorum={quorum}, {end}; {settings}"
    )


def _check_version(name: str, required: str) -> Finding:
    """Compares an installed version with the run config's. Only the patch level may differ."""
    installed = (_installed_version(name) or "none").split("+")[0]
    if installed == required.split("+")[0]:
        return Finding("ok", name, installed)
    if installed.split(".")[:2] == required.split(".")[:2]:
        difference = (
            f"{installed} here, {required} in the run config: it may join if both versions compute"
            " the same results from known values"
        )
        return Finding("ok", name, difference)
    fix = (
        f"Install {name}=={required} here, because all sites must use the versions with which the"
        " run was founded."
    )
    return Finding("wrong", name, f"{installed} here, but {required} in the run config", fix)

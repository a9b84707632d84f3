"""Runs ``sdiloco doctor``: started for every rank, it reports on rank 0 what is wrong between the
machines.

With ``--hub`` it is started once, at a site, and looks at the way to a hub.
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
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from lightning_sdiloco.comm.topology import GroupLayout, checked_worker_groups
from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.client import hub_addresses
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
from lightning_sdiloco.planning.planner import HUB_CONNECTIONS
from lightning_sdiloco.planning.units import readable, readable_rate
from lightning_sdiloco.tools.hub import HubOptions
from lightning_sdiloco.tools.output import plain

SECONDS = 3.0
"""How long one direction is measured. The second half counts: a connection starts slowly."""

PACKAGES = ("lightning-sdiloco", "torch", "lightning", "pytorch-lightning")
# What changes how ranks talk to each other, or how fast they are.
VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "SDILOCO_EXCHANGE_INTERFACE",
    "OMP_NUM_THREADS",
    "TORCH_DISTRIBUTED_DEBUG",
)

_UNEQUAL = 2.0  # a direction that is this many times slower than the other one has a reason
_LONG_ROUND_TRIP = 0.01  # from here on a slow start costs more than a launch can wait for
_FILES_PER_RANK, _FILES = (
    8,
    256,
)  # connections of several process groups, and what a Python process has open anyway
_PINGS = 10
_BLOCK = 1 << 20
_RATE = struct.Struct(">d")
_progress = Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print
_STYLES = {"ok": "green", "slow": "yellow", "wrong": "bold red"}


class Finding(NamedTuple):
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
    """Check the machines of a training: reachability, versions, settings, bandwidth and round trip.

    With --hub, start it once, at a site: it checks the way to the hub, the keys, round trip,
    bandwidth and run config.

    Args:
        options: Which hub to check, and as whom.
        worker_groups: Number of worker groups, as for the strategy; auto is one per node.
        num_nodes: Number of nodes, if you start it once on every node, with NODE_RANK and
            MASTER_ADDR.
        seconds: Seconds for which each direction between worker groups, or to and from the hub, is
            measured.
        wait: Seconds to wait until all ranks have joined.
        json: Print JSON instead of a table.

    Examples:
        $ srun --nodes=2 sdiloco doctor
        $ NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500 sdiloco doctor --num-nodes 2
        $ sdiloco doctor --hub a.example:29400 --keys site-b.bundle
    """
    if options.hub is not None:
        found, seen = examine_hub(options, seconds)
    else:
        examined = _examined(worker_groups, num_nodes, seconds, wait)
        if examined is None:
            return ""
        ranks = [
            {
                "rank": rank,
                "host": one.host,
                "worker_group": one.group,
                "exchange": one.exchange[0],
                **machine,
            }
            for rank, (one, machine) in enumerate(
                zip(examined.endpoints, examined.machines, strict=True)
            )
        ]
        found = findings(examined)
        seen = {"ranks": ranks, "unreachable": examined.broken, "links": examined.links}
    wrong = any(finding.state == "wrong" for finding in found)
    text = (
        codec.dumps(plain({"ok": not wrong, "findings": found, **seen}), indent=2)
        if json
        else _as_table(found)
    )
    if wrong:
        print(text)
        raise SystemExit(1)
    return text


def _as_table(found: Sequence[Finding]) -> str:
    table = Table(title="sdiloco doctor", title_justify="left")
    for name in ("", "what", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in found:
        table.add_row(
            f"[{_STYLES[finding.state]}]{finding.state}[/]",
            finding.check,
            finding.found,
            finding.fix,
        )
    terminal = sys.stdout.isatty()
    printed = io.StringIO()
    # Logs of launchers have no width.
    Console(
        file=printed, force_terminal=terminal, width=None if terminal else 140, highlight=False
    ).print(table)
    return printed.getvalue().rstrip("\n")


# The ranks of a training


class MeasuredLink(NamedTuple):
    source: int
    target: int
    round_trip: float = 0.0
    bits_per_second: float = 0.0
    error: str = ""


class Examined(NamedTuple):
    groups: int
    endpoints: Sequence[Endpoints]
    machines: Sequence[dict[str, Any]]
    broken: Sequence[BrokenConnection]
    links: Sequence[MeasuredLink]


def _examined(
    worker_groups: Any, num_nodes: int | None, seconds: float, wait: float
) -> Examined | None:
    """Looks at all ranks, which must call it together; only rank 0 gets what was seen."""
    launch = detect_launch(num_nodes)
    groups = checked_worker_groups(worker_groups)
    if groups == "auto":
        groups = launch.nodes if launch.nodes > 1 else launch.world_size
    layout = GroupLayout(launch.world_size, groups)
    group = layout.group_of(launch.rank)
    speaks = layout.group_rank_of(launch.rank) == 0
    timeout = datetime.timedelta(seconds=wait)
    progress = _progress if launch.rank == 0 else lambda text: None
    progress(
        f"Waiting at {launch.host}:{launch.port} for {launch.world_size} processes, for at most"
        f" {wait:g} s"
    )
    rendezvous = rendezvous_at(launch.host, launch.port, launch.rank, launch.world_size, timeout)
    machines = rendezvous.all_gather("machines", describe())
    progress("All are here; connecting each with each")
    endpoints, broken = find_broken_connections(rendezvous, group, exchange_address, group_address)
    measured = (
        []
        if broken
        else measure(rendezvous, groups, group, speaks, exchange_address(), seconds, progress)
    )
    return Examined(groups, endpoints, machines, broken, measured) if launch.rank == 0 else None


class Launch(NamedTuple):
    rank: int
    world_size: int
    nodes: int
    host: str
    port: int


def detect_launch(num_nodes: int | None = None) -> Launch:
    """Detects torchrun, srun, or variables that were set by hand, as Lightning does for the
    training.
    """
    fabric = "lightning.fabric" if find_spec("lightning") is not None else "lightning_fabric"
    environments = import_module(f"{fabric}.plugins.environments")
    numbers: tuple[str, ...] = ()
    if num_nodes is not None:
        environment = environments.LightningEnvironment()
        numbers = ("NODE_RANK", "MASTER_PORT")
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        environment = environments.TorchElasticEnvironment()
        numbers = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    elif "SLURM_NTASKS" in os.environ and environments.SLURMEnvironment.detect():
        try:
            environment = environments.SLURMEnvironment()
        except RuntimeError as error:
            raise ValueError(f"Lightning would refuse this job: {error}") from error
    else:
        raise ValueError(
            "This process does not know its rank. Start it on every node like the training: with"
            " srun, with torchrun,"
            " or by hand with NODE_RANK, MASTER_ADDR and MASTER_PORT set and --num-nodes N."
        )
    for name in numbers:
        if not os.environ.get(name, "").isdigit():
            value = os.environ.get(name, "")
            raise ValueError(
                f"{name}={value!r} is not a number. Set it on every node, as for the training."
            )
    # Lightning would take the loopback address, where no other machine finds rank 0.
    if "MASTER_ADDR" not in os.environ and "SLURM_NODELIST" not in os.environ:
        raise ValueError(
            "MASTER_ADDR is not set. Set it to an address of rank 0's machine on every node."
        )
    where = str(environment.main_address), environment.main_port
    if num_nodes is not None:
        return Launch(environment.node_rank(), num_nodes, num_nodes, *where)
    rank = environment.global_rank()
    world_size = environment.world_size()
    if numbers:
        # GROUP_WORLD_SIZE is missing where ranks were started by hand one by one.
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", max(world_size // per_node, 1)))
    else:
        nodes = int(os.environ["SLURM_NNODES"])
    return Launch(rank, world_size, nodes, *where)


def describe() -> dict[str, Any]:
    """Describes the machine of this rank: values that JSON can express."""

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
            # The largest size of a buffer in bytes; 0 if the system does not say.
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


def findings(seen: Examined) -> list[Finding]:
    return [*_of_ranks(seen), *_of_machines(seen), *_of_links(seen)]


def _of_ranks(seen: Examined) -> Iterator[Finding]:
    hosts = list(dict.fromkeys(one.host for one in seen.endpoints))
    told = f"{len(seen.endpoints)} on {len(hosts)} host{'s' if len(hosts) > 1 else ''} ({_some(hosts)})"
    size = len(seen.endpoints) // seen.groups
    yield Finding("ok", "ranks", f"{told}, in {seen.groups} worker groups of {size}")
    yield Finding("ok", "devices", _by_value([machine["device"] for machine in seen.machines])[1])
    for name in seen.machines[0]["versions"]:
        equal, told = _by_value([machine["versions"][name] for machine in seen.machines])
        fix = "" if equal else f"Install the same version of {name} for all ranks."
        yield Finding("ok" if equal else "wrong", name, told, fix)


def _by_value(values: Sequence[str]) -> tuple[bool, str]:
    """Returns whether all ranks have the same value, and which ranks have which."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    if len(ranks) == 1:
        return True, values[0]
    return False, ", ".join(f"{value} on rank {_some(own)}" for value, own in ranks.items())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _rank(rank: int, seen: Examined) -> str:
    return f"rank {rank} ({seen.endpoints[rank].host})"


def _of_machines(seen: Examined) -> Iterator[Finding]:
    hosts = [one.host for one in seen.endpoints]
    needed = _FILES_PER_RANK * len(seen.endpoints) + _FILES
    # Of each kind only the worst or first is shown: the others have the same remedy.
    few = {
        rank: machine["files"]
        for rank, machine in enumerate(seen.machines)
        if 0 <= machine["files"] < needed
    }
    if few:
        rank = min(few, key=lambda rank: few[rank])
        told = f"{_rank(rank, seen)} may open {few[rank]}; {needed} may be needed"
        fix = f"ulimit -n {needed} before the training starts, on every machine."
        yield Finding("wrong", "open files", told, fix)
    for rank, machine in enumerate(seen.machines):
        on_host = hosts.count(hosts[rank])
        cores = machine["cores"]
        given = machine["variables"].get("OMP_NUM_THREADS", "")
        threads = int(given) if given.isdigit() else cores
        if machine["device"] == "CPU" and on_host > 1 and threads * on_host > cores:
            told = (
                f"{on_host} ranks on {hosts[rank]} with {threads} threads each share {cores} cores"
            )
            yield Finding("slow", "threads", told, f"OMP_NUM_THREADS={max(cores // on_host, 1)}")
            break
    for rank, machine in enumerate(seen.machines):
        if machine["variables"].get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
            told = f"{_rank(rank, seen)} has TORCH_DISTRIBUTED_DEBUG=DETAIL, which compares ranks at every collective"
            yield Finding("slow", "debugging", told, "Leave it out.")
            break


def _of_links(seen: Examined) -> Iterator[Finding]:
    if not seen.broken:
        pairs = len(seen.endpoints) * (len(seen.endpoints) - 1)
        yield Finding("ok", "reachability", f"all {pairs} connections between ranks can be made")
    for one in seen.broken:
        told = f"{_rank(one.source, seen)} -> {_rank(one.target, seen)} at {one.address}: {one.why}"
        yield Finding("wrong", "reachability", told, advice([one]))
    rates = {
        (link.source, link.target): link.bits_per_second for link in seen.links if not link.error
    }
    size = len(seen.endpoints) // seen.groups
    for link in seen.links:
        if link.error:
            fix = "Start the doctor again; if the error stays, look at that machine."
            yield Finding("wrong", f"round trip {link.source} -> {link.target}", link.error, fix)
            continue
        way = f"{link.source} -> {link.target}"
        rate = link.bits_per_second
        if link.source < link.target:
            yield Finding("ok", f"round trip {way}", f"{1000 * link.round_trip:.3g} ms")
        told = readable_rate(rate / 1e9)
        back = rates.get((link.target, link.source), rate)
        if rate * _UNEQUAL < back:
            told += f", and {readable_rate(back / 1e9)} in the other direction"
            fix = (
                f"Look for other traffic from worker group {link.source} to {link.target}, and"
                " at the congestion"
                " control there: training goes at the pace of the slower direction."
            )
            yield Finding("slow", f"bandwidth {way}", told, fix)
        else:
            yield Finding("ok", f"bandwidth {way}", told)
        # A connection carries at most one buffer in each round trip. Linux keeps part of a buffer
        # for itself.
        ours, theirs = (seen.machines[group * size]["tcp"] for group in (link.source, link.target))
        limits = [
            buffer / 2 for buffer in (ours["send_buffer"], theirs["receive_buffer"]) if buffer
        ]
        most = 8 * min(limits) / link.round_trip if limits and link.round_trip > 0 else float("inf")
        if rate > most / 2:
            needed = int(4 * rate / 8 * link.round_trip)
            yield Finding(
                "slow",
                f"buffers {way}",
                f"TCP buffers may hold one connection below {readable_rate(most / 1e9)}"
                f" at {1000 * link.round_trip:.3g} ms",
                f'On both sides: sysctl -w net.ipv4.tcp_wmem="4096 16384 {needed}"'
                f' net.ipv4.tcp_rmem="4096 131072 {needed}"',
            )
    slow = [
        seen.machines[link.source * size]["tcp"]
        for link in seen.links
        if link.round_trip > _LONG_ROUND_TRIP
    ]
    if any(tcp["slow_start_after_idle"] for tcp in slow):
        yield Finding(
            "slow",
            "idle connections",
            "TCP starts slowly again after idling, as it does between two launches",
            "On all machines: sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )


# Measuring links


def measure(
    rendezvous: Rendezvous,
    groups: int,
    group: int,
    speaks: bool,
    address: str,
    seconds: float,
    progress: Callable[[str], None],
) -> list[MeasuredLink]:
    """Measures between the first ranks of all worker groups, one link of each at a time. All ranks
    must call it.
    """
    listener = Listener(address, lambda connection: _serve(connection, seconds))
    try:
        told = rendezvous.all_gather("links", [group, address, listener.port] if speaks else None)
        endpoints = {one[0]: (str(one[1]), int(one[2])) for one in told if one is not None}
        round_trips = (
            {other: _round_trip(endpoints[other]) for other in endpoints if other != group}
            if speaks
            else {}
        )
        rendezvous.all_gather("round trips", None)
        links = []
        for step in range(1, groups):
            other = (group + step) % groups
            progress(
                f"Measuring bandwidth, {step} of {groups - 1}: {seconds:g} s in each direction"
            )
            if speaks:
                links.append(_link(group, other, endpoints[other], round_trips[other], seconds))
            rendezvous.all_gather(f"round {step}", None)
        return [
            MeasuredLink(*link)
            for rank in rendezvous.all_gather("measured", links)
            for link in rank
        ]
    finally:
        listener.close()


def _round_trip(address: tuple[str, int]) -> float | str:
    """Returns the seconds of a round trip, or why there is none."""
    seconds: list[float] = []

    def ping(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            start = time.monotonic()
            connection.sendall(b"p")
            _receive(connection, 1)
            seconds.append(time.monotonic() - start)

    error = try_to_connect(*address, 10.0, ping)
    return statistics.median(seconds) if error is None else reason(error)


def _link(
    group: int, other: int, address: tuple[str, int], round_trip: float | str, seconds: float
) -> MeasuredLink:
    if isinstance(round_trip, str):
        return MeasuredLink(group, other, error=round_trip)
    rates: list[float] = []

    def send(connection: socket.socket) -> None:
        block = bytes(_BLOCK)
        deadline = time.monotonic() + seconds
        connection.sendall(b"s")
        while time.monotonic() < deadline:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        # The other side has counted.
        rates.append(float(_RATE.unpack(_receive(connection, _RATE.size))[0]))

    error = try_to_connect(*address, 4 * seconds + 10, send)
    if error is not None:
        return MeasuredLink(group, other, error=reason(error))
    return MeasuredLink(group, other, round_trip, rates[0])


def _serve(connection: socket.socket, seconds: float) -> None:
    """Answers pings, and the bits per second that came in the second half of the time."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while kind := connection.recv(1):
        if kind == b"p":
            connection.sendall(kind)
            continue
        block = memoryview(bytearray(_BLOCK))
        start = time.monotonic()
        middle = None
        counted = 0
        last = start
        while count := connection.recv_into(block):
            last = time.monotonic()
            if middle is not None:
                counted += count
            elif last - start > seconds / 2:
                middle = last
        rate = 8 * counted / (last - middle) if middle is not None and last > middle else 0.0
        connection.sendall(_RATE.pack(rate))
        return


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return received


# The way to a hub

_CLOCKS_APART = 60.0  # seconds


def examine_hub(options: HubOptions, seconds: float) -> tuple[list[Finding], dict[str, Any]]:
    """Looks at the way to a hub, until something is in the way: what comes after it would only say
    the same.
    """
    places = hub_addresses(str(options.hub))
    if (options.keys is None) != options.insecure:
        raise ValueError(
            "Give the keys of a site, or of another role in the run: --keys FILE; or --insecure."
        )
    found = list[Finding]()
    numbers = dict[str, Any](hub=options.hub)
    for finding in _of_way(options, places, seconds, numbers):
        found.append(finding)
        if finding.state == "wrong":
            break
    return found, numbers


def _of_way(
    options: HubOptions, places: list[tuple[str, int]], seconds: float, numbers: dict[str, Any]
) -> Iterator[Finding]:
    told = "none: anyone on the way can read and change everything (--insecure)"
    if options.keys is not None:
        try:
            bundle = load(options.keys)
        except ValueError as refusal:
            yield Finding("wrong", "keys", str(refusal))
            return
        who = bundle.identity
        until = bundle.ends
        days = (until - datetime.datetime.now(datetime.timezone.utc)).days
        run = f"run {who.run}" if who.run != "-" else "the run of its authority"
        told = f"{who.role} {who.name} in {run}, valid until {until:%Y-%m-%d}, for {days} days"
    yield Finding("ok", "keys", told)
    errors = [try_to_connect(host, port, 5.0) for host, port in places]
    for (host, port), error in zip(places, errors, strict=True):
        if error is not None:
            yield Finding(
                "wrong" if all(errors) else "slow",  # one of several addresses is enough
                "reachability",
                f"{host}:{port}: {reason(error)}",
                "Start the hub, on an address that can be reached from here (--listen"
                f" 0.0.0.0:{port}), and open that"
                " port on its machine. Sites need no open port.",
            )
    for number, (host, port) in enumerate(places, start=1):
        findings = list(_of_hub(replace(options, hub=f"{host}:{port}"), seconds, numbers))
        if number == len(places) or findings[-1].state != "wrong":
            yield from findings
            return


def _of_hub(options: HubOptions, seconds: float, numbers: dict[str, Any]) -> Iterator[Finding]:
    try:
        mailbox = options.mailbox("reader", HUB_CONNECTIONS)
    except ValueError as refusal:
        yield Finding("wrong", "keys", str(refusal))
        return
    try:
        with closing(mailbox):
            numbers["round_trip"] = mailbox.round_trip()
            yield Finding(
                "ok",
                "hub",
                f"it answers, and knows {mailbox.identity.role} {mailbox.identity.name}",
            )
            told = f"{1000 * numbers['round_trip']:.3g} ms, by this end's clock alone"
            yield Finding("ok", "round trip", told)
            off = (
                float(mailbox.call("ping", {"clock": True})[0].get("clock", wall_clock()))
                - wall_clock()
            )
            told = f"the hub's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the one here"
            fix = "Set the wrong one: certificates are valid by its dates."
            yield Finding(
                "slow" if abs(off) > _CLOCKS_APART else "ok",
                "clock",
                told,
                fix * (abs(off) > _CLOCKS_APART),
            )
            for up, way in ((True, "to"), (False, "from")):
                _progress(f"Measuring bandwidth {way} the hub, for {seconds:g} s")
                numbers[f"bits_per_second_{way}_hub"] = rate = mailbox.bandwidth(up, seconds)
                told = f"{readable_rate(rate / 1e9)}, over {HUB_CONNECTIONS} connections"
                yield Finding("ok", f"bandwidth {way} the hub", told)
            numbers["status"] = status = codec.loads(mailbox.call("status")[1])
    except (HubError, Refused) as refusal:
        if options.insecure and isinstance(refusal, HubUnreachable):
            fix = (
                "Something listens there, but does not answer: a hub with keys refuses calls without."
                " Give --keys FILE."
            )
        elif isinstance(refusal, HubUnreachable):
            fix = (
                "Something listens there, but hub and keys do not match: another authority,"
                " another run, or a hub"
                " without TLS. Get keys from where the hub's are made: sdiloco keys add FOLDER"
                " NAME."
            )
        elif options.insecure:
            fix = "Give the name of the run that this hub serves: --run NAME."
        else:
            fix = "Get a bundle for this run from the owner of its folder of keys: sdiloco keys add FOLDER NAME."
        yield Finding("wrong", "hub", str(refusal), fix)
        return
    if not status["founded"]:
        here = ", ".join(status["here"]) or "none"
        yield Finding(
            "ok", "run", f"not founded yet: {status['missing']} more sites are needed; here: {here}"
        )
        return
    if status["trouble"]:
        yield Finding("wrong", "run", str(status["trouble"]), "Ask the hub's operator.")
    needs = status["disk"]["still_needs"]
    free = status["disk"]["free"]
    if free is not None:
        told = f"the hub has {readable(free)} free, but the run will need {readable(needs)} more"
        fix = ""
        if free < needs:
            fix = "Make room, or give the hub another --store: without room no rounds close."
        yield Finding("slow" if fix else "ok", "disk", told, fix)
    run_config = status["run_config"]
    records = status["records"]
    sites = len(status["sites"])
    terms = run_config["terms"]
    ends = "without an end" if terms["rounds"] is None else f"{terms['rounds']} rounds"
    quorum = (
        ChosenQuorum(**terms["quorum"]) if isinstance(terms["quorum"], dict) else terms["quorum"]
    )
    key = run_config["key"][:8]
    yield Finding(
        "ok", "run", f"founded on run config {key}, {records} records; {sites} sites are known"
    )
    yield Finding(
        "ok",
        "run_config",
        f"{run_config['parameters']} tensors in {run_config['fragments']} fragments,"
        f" sync_every={terms['sync_every']},"
        f" overlap_steps={terms['overlap_steps']}, grace={terms['grace']:g},"
        f" lease={terms['lease']:g},"
        f" quorum={quorum}, {ends};"
        f" {', '.join(f'{k}={v}' for k, v in run_config['settings'].items())}",
    )
    for name, there in run_config["versions"].items():
        here = (_installed_version(name) or "none").split("+")[0]
        if here == there.split("+")[0]:
            yield Finding("ok", name, here)
        elif here.split(".")[:2] == there.split(".")[:2]:
            told = f"{here} here, {there} in the run config: it may join if both compute the same from known values"
            yield Finding("ok", name, told)
        else:
            fix = f"Install {name}=={there} here: a run stays with the versions it was founded on."
            yield Finding("wrong", name, f"{here} here, but {there} in the run config", fix)

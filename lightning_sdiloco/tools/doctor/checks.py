"""Turns what ranks tell of themselves and of the links between them into findings, each with what to do."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from lightning_sdiloco.launch import BrokenConnection, Endpoints, advice
from lightning_sdiloco.planning import readable_rate
from lightning_sdiloco.tools.doctor.links import MeasuredLink

# A direction that is so much slower than the other one has a reason.
_UNEQUAL = 2.0

# From here on a slow start costs more than a launch can wait for.
_LONG_ROUND_TRIP = 0.01

# For each rank: connections of several process groups, and what a Python process has open anyway.
_FILES_PER_RANK, _FILES = 8, 256


class Finding(NamedTuple):
    """A line of the table."""

    state: Literal["ok", "slow", "wrong"]
    check: str
    found: str
    fix: str = ""


class Examined(NamedTuple):
    """What the doctor saw."""

    groups: int
    endpoints: Sequence[Endpoints]
    machines: Sequence[dict[str, Any]]
    broken: Sequence[BrokenConnection]
    links: Sequence[MeasuredLink]


def findings(seen: Examined) -> list[Finding]:
    """Returns all findings, in the order in which they are shown."""
    parts = (_ranks, _versions, _files, _threads, _debugging, _reachability, _round_trips, _bandwidths, _buffers, _idle)
    return [finding for part in parts for finding in part(seen)]


def _ranks(seen: Examined) -> Iterator[Finding]:
    hosts = list(dict.fromkeys(one.host for one in seen.endpoints))
    size = len(seen.endpoints) // seen.groups
    yield Finding(
        "ok",
        "ranks",
        f"{len(seen.endpoints)} on {len(hosts)} host{'s' if len(hosts) > 1 else ''} ({_some(hosts)}),"
        f" in {seen.groups} worker groups of {size}",
    )
    devices = _by(seen, lambda machine: machine["device"])
    yield Finding("ok", "devices", _told(devices))


def _versions(seen: Examined) -> Iterator[Finding]:
    for name in seen.machines[0]["versions"]:
        versions = _by(seen, lambda machine, name=name: machine["versions"][name])  # type: ignore[misc]
        if len(versions) == 1:
            yield Finding("ok", name, next(iter(versions)))
        else:
            yield Finding("wrong", name, _told(versions), f"Install the same version of {name} for all ranks.")


def _files(seen: Examined) -> Iterator[Finding]:
    needed = _FILES_PER_RANK * len(seen.endpoints) + _FILES
    few = {rank: machine["files"] for rank, machine in enumerate(seen.machines) if 0 <= machine["files"] < needed}
    if few:
        rank = min(few, key=lambda rank: few[rank])
        yield Finding(
            "wrong",
            "open files",
            f"{_rank(rank, seen)} may open {few[rank]}; {needed} may be needed",
            f"ulimit -n {needed} before the training starts, on every machine.",
        )


def _threads(seen: Examined) -> Iterator[Finding]:
    hosts = [one.host for one in seen.endpoints]
    for rank, machine in enumerate(seen.machines):
        on_host = hosts.count(hosts[rank])
        given = machine["variables"].get("OMP_NUM_THREADS")
        threads = int(given) if given is not None and given.isdigit() else machine["cores"]
        if machine["device"] == "CPU" and on_host > 1 and threads * on_host > machine["cores"]:
            yield Finding(
                "slow",
                "threads",
                f"{on_host} ranks on {hosts[rank]} with {threads} threads each share {machine['cores']} cores",
                f"OMP_NUM_THREADS={max(machine['cores'] // on_host, 1)}",
            )
            return


def _debugging(seen: Examined) -> Iterator[Finding]:
    for rank, machine in enumerate(seen.machines):
        if machine["variables"].get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
            yield Finding(
                "slow",
                "debugging",
                f"{_rank(rank, seen)} has TORCH_DISTRIBUTED_DEBUG=DETAIL, which compares ranks at every collective",
                "Leave it out.",
            )
            return


def _reachability(seen: Examined) -> Iterator[Finding]:
    pairs = len(seen.endpoints) * (len(seen.endpoints) - 1)
    if not seen.broken:
        yield Finding("ok", "reachability", f"all {pairs} connections between ranks can be made")
    for one in seen.broken:
        yield Finding(
            "wrong",
            "reachability",
            f"{_rank(one.source, seen)} -> {_rank(one.target, seen)} at {one.address}: {one.why}",
            advice([one]),
        )


def _round_trips(seen: Examined) -> Iterator[Finding]:
    for link in seen.links:
        name = f"round trip {link.source} -> {link.target}"
        if link.error:
            yield Finding("wrong", name, link.error, "Start the doctor again; if it stays, look at that machine.")
        elif link.source < link.target:
            yield Finding("ok", name, f"{1000 * link.round_trip:.3g} ms")


def _bandwidths(seen: Examined) -> Iterator[Finding]:
    rates = {(link.source, link.target): link.bits_per_second for link in seen.links if not link.error}
    for (source, target), rate in rates.items():
        back = rates.get((target, source), rate)
        name = f"bandwidth {source} -> {target}"
        if rate * _UNEQUAL < back:
            yield Finding(
                "slow",
                name,
                f"{readable_rate(rate / 1e9)}, and {readable_rate(back / 1e9)} in the other direction",
                f"Look for other traffic on the way from worker group {source} to {target}, and at its congestion"
                " control: training goes at the pace of the slower direction.",
            )
        else:
            yield Finding("ok", name, readable_rate(rate / 1e9))


def _buffers(seen: Examined) -> Iterator[Finding]:
    """Finds buffers that limit a connection: it carries at most one buffer in each round trip."""
    for link in seen.links:
        sender, receiver = (_tcp(seen, group) for group in (link.source, link.target))
        # Linux keeps part of a buffer for itself.
        limits = [size / 2 for size in (sender["send_buffer"], receiver["receive_buffer"]) if size]
        if link.error or not limits or link.round_trip <= 0:
            continue
        most = 8 * min(limits) / link.round_trip
        if link.bits_per_second > most / 2:
            needed = int(4 * link.bits_per_second / 8 * link.round_trip)
            yield Finding(
                "slow",
                f"buffers {link.source} -> {link.target}",
                f"buffers of TCP may hold one connection below {readable_rate(most / 1e9)} at"
                f" {1000 * link.round_trip:.3g} ms",
                f'On both sides: sysctl -w net.ipv4.tcp_wmem="4096 16384 {needed}"'
                f' net.ipv4.tcp_rmem="4096 131072 {needed}"',
            )


def _idle(seen: Examined) -> Iterator[Finding]:
    for link in seen.links:
        if not link.error and link.round_trip > _LONG_ROUND_TRIP and _tcp(seen, link.source)["slow_start_after_idle"]:
            yield Finding(
                "slow",
                "idle connections",
                "TCP starts slowly again after it was idle, as it is between two launches",
                "On all machines: sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
            )
            return


def _tcp(seen: Examined, group: int) -> dict[str, Any]:
    rank = group * (len(seen.endpoints) // seen.groups)
    return dict(seen.machines[rank]["tcp"])


def _by(seen: Examined, value: Callable[[dict[str, Any]], str]) -> dict[str, list[int]]:
    """Groups the ranks by a value."""
    ranks: dict[str, list[int]] = {}
    for rank, machine in enumerate(seen.machines):
        ranks.setdefault(value(machine), []).append(rank)
    return ranks


def _told(ranks_by: dict[str, list[int]]) -> str:
    if len(ranks_by) == 1:
        return next(iter(ranks_by))
    return ", ".join(f"{value} on rank {_some(list(map(str, ranks)))}" for value, ranks in ranks_by.items())


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _rank(rank: int, seen: Examined) -> str:
    return f"rank {rank} ({seen.endpoints[rank].host})"

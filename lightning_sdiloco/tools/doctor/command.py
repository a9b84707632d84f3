"""The command ``sdiloco doctor``: started for every rank, it tells on rank 0 what is wrong between the machines."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from lightning_sdiloco.comm import GroupLayout, checked_worker_groups
from lightning_sdiloco.launch import exchange_address, find_broken_connections, group_address, rendezvous_at
from lightning_sdiloco.tools.doctor import checks, hub, links, machine
from lightning_sdiloco.tools.doctor.launcher import detect_launch
from lightning_sdiloco.tools.doctor.text import as_json, as_table, described
from lightning_sdiloco.tools.hub.asking import HubOptions


def doctor(
    options: HubOptions,
    worker_groups: Literal["auto"] | int = "auto",
    num_nodes: int | None = None,
    seconds: float = links.SECONDS,
    wait: float = 300.0,
    json: bool = False,
) -> str:
    """Check between the machines of a training: reachability, versions, settings, bandwidth and round trip."""
    if options.hub is not None:
        return _told(*hub.examine(options, seconds), json)
    launch = detect_launch(num_nodes)
    groups = checked_worker_groups(worker_groups)
    if groups == "auto":
        groups = launch.nodes if launch.nodes > 1 else launch.world_size
    layout = GroupLayout(launch.world_size, groups)
    rendezvous = rendezvous_at(launch.host, launch.port, launch.rank, launch.world_size, timedelta(seconds=wait))
    group = layout.group_of(launch.rank)
    machines = rendezvous.all_gather("machines", machine.describe())
    endpoints, broken = find_broken_connections(rendezvous, group, exchange_address, group_address)
    measured = []
    if not broken:
        speaks = layout.group_rank_of(launch.rank) == 0
        measured = links.measure(rendezvous, groups, group, speaks, exchange_address(), seconds)
    if launch.rank != 0:
        return ""
    seen = checks.Examined(groups, endpoints, machines, broken, measured)
    return _told(checks.findings(seen), described(seen), json)


def _told(found: Sequence[checks.Finding], seen: Mapping[str, Any], json: bool) -> str:
    text = as_json(found, seen) if json else as_table(found)
    if any(finding.state == "wrong" for finding in found):
        print(text)
        raise SystemExit(1)
    return text

"""The command ``sdiloco doctor``: started for every rank, it tells on rank 0 what is wrong between the machines."""

from datetime import timedelta
from typing import Annotated, Literal

from lightning_sdiloco.comm.topology import GroupLayout, checked_worker_groups
from lightning_sdiloco.launch.environment import how_launched, meet_at
from lightning_sdiloco.launch.interfaces import exchange_address, group_address
from lightning_sdiloco.launch.reachability import find_failures
from lightning_sdiloco.tools.doctor import checks, links, machine
from lightning_sdiloco.tools.doctor.text import as_json, as_table


class Unwell(Exception):
    """Something was found with which training would not work; the text is what to print."""


def doctor(
    worker_groups: Annotated[
        Literal["auto"] | int, "Number of worker groups, as for the strategy; auto is one per node."
    ] = "auto",
    num_nodes: Annotated[
        int | None, "Number of nodes, where it is started once on every node, with NODE_RANK and MASTER_ADDR."
    ] = None,
    seconds: Annotated[float, "How long each direction between worker groups is measured."] = links.SECONDS,
    wait: Annotated[float, "How many seconds to wait until all ranks have come."] = 300.0,
    json: Annotated[bool, "Print JSON in place of a table."] = False,
) -> str:
    """Check between the machines of a training: reachability, versions, settings, bandwidth and round trip.

    Raises:
        ValueError: If this process does not know its rank, rank 0 cannot be reached, or ranks do not come.
        Unwell: On rank 0, if training would not work.
    """
    launch = how_launched(num_nodes)
    groups = checked_worker_groups(worker_groups)
    if groups == "auto":
        groups = launch.nodes if launch.nodes > 1 else launch.world_size
    layout = GroupLayout(launch.world_size, groups)
    meeting = meet_at(launch.host, launch.port, launch.rank, launch.world_size, timedelta(seconds=wait))
    group = layout.group_of(launch.rank)
    machines = meeting.all_gather("machines", machine.describe())
    places, failures = find_failures(meeting, group, exchange_address, group_address)
    measured = []
    if not failures:
        speaks = layout.group_rank_of(launch.rank) == 0
        measured = links.measure(meeting, groups, group, speaks, exchange_address(), seconds)
    if launch.rank != 0:
        return ""
    seen = checks.Examined(groups, places, machines, failures, measured)
    found = checks.findings(seen)
    text = as_json(found, seen) if json else as_table(found)
    if any(finding.state == "wrong" for finding in found):
        raise Unwell(text)
    return text

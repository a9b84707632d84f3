"""Turns the options of a quorum into what its rounds wait for."""

from collections.abc import Mapping
from dataclasses import replace

from lightning_sdiloco.federation import LONGEST_GRACE, All, Quorum
from lightning_sdiloco.planning import Plan, Waits, Way, hub_link, largest_payload, waits


def asked_waits(
    planned: Plan,
    hub_bandwidth: float | None,
    quorum: int | Quorum | None,
    grace: float | None,
    delays: str | None,
    links: Mapping[str, float],
) -> Waits | None:
    """Predicts whom the rounds of a federation wait for; None where nobody asked."""
    if quorum is None:
        for name, value in (("--grace", grace), ("--delays", delays)):
            if value is not None:
                raise ValueError(
                    f"{name} is about rounds that close by a quorum. Give --quorum too, such as --quorum 2."
                )
        return None
    if hub_bandwidth is None:
        raise ValueError(
            f"--quorum {quorum} is about the sites of a federation: worker groups that are launched together wait for"
            " all. Give the --hub-bandwidth of the federation too."
        )
    if isinstance(quorum, int) and quorum < 1:
        raise ValueError(f"quorum={quorum} is out of range: it must be at least 1. Give a number of sites.")
    model, settings, groups = planned.model, planned.settings, planned.groups
    of_sites = dict(links) or {f"site {number}": planned.link.gbit_s for number in range(groups.groups)}
    late = _seconds(delays, len(of_sites))
    ways = {
        site: Way(hub_link(replace(planned.link, gbit_s=gbit_s), groups.groups, hub_bandwidth), delay)
        for (site, gbit_s), delay in zip(of_sites.items(), late, strict=True)
    }
    return waits(
        All(quorum) if isinstance(quorum, int) else quorum,
        LONGEST_GRACE if grace is None else grace,
        ways,
        largest_payload(model, settings, groups),
        settings.sync_every,
        groups.step_time,
    )


def _seconds(delays: str | None, sites: int) -> list[float]:
    try:
        each = [float(number) for number in delays.split(",")] if delays else [0.0] * sites
    except ValueError:
        each = []
    if len(each) != sites or not all(number >= 0 for number in each):
        raise ValueError(
            f"--delays {delays} are no {sites} numbers of seconds, from 0. Give one for each site, as 0,0,12."
        )
    return each

"""What a hub says of itself, as plain numbers and texts: for a table, for JSON, for who watches over it."""

from collections.abc import Mapping
from typing import Any

from lightning_sdiloco.federation import RETENTION, Ledger
from lightning_sdiloco.hub.statistics import SiteStatistics, Statistics

Status = dict[str, Any]


def status_of(ledger: Ledger, statistics: Statistics, now: float) -> Status:
    """Returns what is to be seen of a run: its sites, its fragments, its anchors."""
    shares = statistics.shares()
    names = sorted({*ledger.members, *statistics.sites})
    return {
        "records": ledger.seq,
        "sites": {name: _site(name, ledger, statistics.sites, shares, now) for name in names},
        "fragments": [_fragment(fragment, ledger, now) for fragment in range(ledger.terms.fragments)],
        "anchors": [[at.round for at in header.applied] for header in ledger.anchors.headers],
    }


def _site(
    name: str, ledger: Ledger, counted: Mapping[str, SiteStatistics], shares: Mapping[str, float], now: float
) -> Status:
    member, own = ledger.members.get(name), counted.get(name)
    return {
        "state": _state(name, ledger, now),
        "life": member.life if member else None,
        "last_beat": round(now - own.heard_at, 3) if own else None,
        "rounds_behind": ledger.behind(name) if member else None,
        "share": round(shares.get(name, 0.0), 4),
        "late": own.late if own else 0,
        "lives": own.lives if own else 0,
        "bytes": own.bytes if own else 0,
        "bytes_per_second": round(own.rate) if own else 0,
    }


def _state(name: str, ledger: Ledger, now: float) -> str:
    member = ledger.members.get(name)
    if member is None:
        return "gone"
    if member.until <= now:
        return "silent"
    if not member.connected:
        return "expected"
    return "follows" if member.follows and ledger.behind(name) <= RETENTION else "joining"


def _fragment(fragment: int, ledger: Ledger, now: float) -> Status:
    opened = ledger.open.get(fragment)
    arrived = opened.arrived if opened else {}
    return {
        "round": ledger.closed[fragment].round,
        "open": opened is not None,
        "here": sorted(opened.here) if opened else [],
        "missing": [name for name in ledger.present(now) if name not in arrived] if opened else [],
        "ended": ledger.has_ended(fragment),
    }

"""Predicts whom the rounds of a federation wait for: its quorum is asked as the hub asks it, with
times of a plan.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from lightning_sdiloco.federation.messages import Contribution, Record, Timing
from lightning_sdiloco.federation.quorum import Quorum
from lightning_sdiloco.federation.run_config import RETENTION
from lightning_sdiloco.planning.link import Link, require

# Rounds after which a quorum that learns from the past has learned.
_ROUNDS = 3 * RETENTION


class Round(NamedTuple):
    counted: tuple[str, ...]
    closes: float
    seconds: float


class Waits(NamedTuple):
    arrives: dict[str, float]
    usual: Round
    longest: Round
    all: Round


class Way(NamedTuple):
    link: Link
    delay: float = 0.0

    def up(self, nbytes: int) -> float:
        return self.delay + self.down(nbytes)

    def down(self, nbytes: int) -> float:
        return nbytes * 8e-9 / self.link.gbit_s + self.link.round_trip


def waits(
    quorum: Quorum,
    grace: float,
    ways: Mapping[str, Way],
    payload: int,
    steps: int,
    step_time: float,
) -> Waits:
    """Plays rounds of ``steps`` inner steps, after which every site sends, until a quorum has
    learned.
    """
    require(0 <= grace < math.inf, "grace", grace, "at least 0 seconds")
    if quorum.fewest(len(ways)) > len(ways):
        raise ValueError(
            f"quorum={quorum!r} needs {quorum.fewest(len(ways))} sites for a round, but there"
            f" are {len(ways)}: no round"
            " would ever close. Give a smaller quorum."
        )
    arrives = {site: way.up(payload) for site, way in ways.items()}
    first = min(arrives.values())
    history = list[Record]()
    rounds = list[Round]()
    for number in range(1, _ROUNDS + 1):
        # The hub asks whenever a contribution comes, and when the grace is over.
        awaited = quorum.awaited(history[-RETENTION:], list(arrives))
        closes = max(arrives.values())
        for now in sorted({*arrives.values(), first + grace}):
            here = {site: at for site, at in arrives.items() if at <= now}
            is_over = now >= first + grace
            if len(here) >= quorum.fewest(len(arrives)) and (
                quorum.closes(here, awaited, now) or is_over
            ):
                closes = now
                break
        rounds.append(_round(closes, arrives, ways, payload))
        counted = rounds[-1].counted
        # It learns a round later which sites were late.
        came = {site: number if site in counted else number - 1 for site in arrives}
        timings = [
            Timing(site, round, arrives[site] - first, step_time)
            for site, round in came.items()
            if round
        ]
        owns = tuple(
            Contribution(0, number, site, "", "", 1, 0, (), steps=steps) for site in sorted(counted)
        )
        history.append(Record(number, 0, number, "", owns, timings=tuple(timings)))
    known = rounds[-RETENTION:]
    return Waits(
        arrives=arrives,
        usual=max(known, key=known.count),
        longest=max(known, key=lambda round: round.seconds),
        all=_round(max(arrives.values()), arrives, ways, payload),
    )


def _round(
    closes: float, arrives: Mapping[str, float], ways: Mapping[str, Way], payload: int
) -> Round:
    counted = tuple(site for site, at in arrives.items() if at <= closes)
    # A site has its own payload.
    takes = max(ways[site].down((len(counted) - 1) * payload) for site in counted)
    return Round(counted, closes, closes + takes)

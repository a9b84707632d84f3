"""Predicts which sites a federation's rounds wait for. The quorum is applied in the same way as at
the hub, but with the times from a plan.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from lightning_sdiloco.federation.codec import RoundNumber
from lightning_sdiloco.federation.messages import Contribution, Record, Timing
from lightning_sdiloco.federation.quorum import Quorum
from lightning_sdiloco.federation.run_config import RETENTION
from lightning_sdiloco.planning.link import Link, require

# The number of rounds after which a quorum that learns from history has settled.
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
    """Simulates rounds in which every site sends after ``steps`` inner steps, until the quorum has
    settled.
    """
    require(0 <= grace < math.inf, "grace", grace, "at least 0 seconds")
    if quorum.fewest(len(ways)) > len(ways):
        raise ValueError(
            f"quorum={quorum!r} needs {quorum.fewest(len(ways))} sites for a round, but there are"
            f" only {len(ways)}, so no round would ever close. Choose a smaller quorum."
        )
    arrives = {site: way.up(payload) for site, way in ways.items()}
    deadline = min(arrives.values()) + grace
    history = list[Record]()
    rounds = list[Round]()
    for number in range(1, _ROUNDS + 1):
        awaited = quorum.awaited(history[-RETENTION:], list(arrives))
        round = _round(_closes(quorum, arrives, awaited, deadline), arrives, ways, payload)
        rounds.append(round)
        history.append(_record(RoundNumber(number), round, arrives, steps, step_time))
    last_rounds = rounds[-RETENTION:]
    return Waits(
        arrives=arrives,
        usual=max(last_rounds, key=last_rounds.count),
        longest=max(last_rounds, key=lambda round: round.seconds),
        all=_round(max(arrives.values()), arrives, ways, payload),
    )


def _record(
    number: RoundNumber, round: Round, arrives: Mapping[str, float], steps: int, step_time: float
) -> Record:
    contributions = tuple(
        Contribution(0, number, site, "", "", 1, 0, (), steps=steps)
        for site in sorted(round.counted)
    )
    first = min(arrives.values())
    timings = []
    for site, arrival in arrives.items():
        # The next record contains the lateness of each site that did not count.
        round_of_site = number if site in round.counted else RoundNumber(number - 1)
        if round_of_site:
            timings.append(Timing(site, round_of_site, arrival - first, step_time))
    return Record(number, 0, number, "", contributions, timings=tuple(timings))


def _closes(
    quorum: Quorum, arrives: Mapping[str, float], awaited: Collection[str], deadline: float
) -> float:
    """Returns the time at which a round closes. The hub checks after each contribution and at the
    deadline.
    """
    for now in sorted({*arrives.values(), deadline}):
        arrived = {site: arrival for site, arrival in arrives.items() if arrival <= now}
        if len(arrived) < quorum.fewest(len(arrives)):
            continue
        if quorum.closes(arrived, awaited, now) or now >= deadline:
            return now
    return max(arrives.values())


def _round(
    closes: float, arrives: Mapping[str, float], ways: Mapping[str, Way], payload: int
) -> Round:
    counted = tuple(site for site, arrival in arrives.items() if arrival <= closes)
    # A site already has its own payload.
    takes = max(ways[site].down((len(counted) - 1) * payload) for site in counted)
    return Round(counted, closes, closes + takes)

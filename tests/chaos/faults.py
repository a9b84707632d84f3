"""Faults, and sequences of them by chance: what happens to whom, and for how long."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HUB, ALL = "hub", "all"


@dataclass(frozen=True)
class Form:
    """What a kind of fault is.

    Attributes:
        told: For people.
        seconds: The shortest and the longest time that it lasts.
        often: How often it is chosen, relative to others.
        hits_hub: Whether it happens to the hub as well.
        hits_sites: Whether it happens to sites.
        needs_links: Whether it needs network namespaces.
        kills: Whether who it happens to is started again.
    """

    told: str
    seconds: tuple[float, float]
    often: float
    hits_hub: bool = False
    hits_sites: bool = True
    needs_links: bool = False
    kills: bool = False


FORMS = {
    "kill": Form("kill -9, and started again", (0.5, 4.0), 3.0, hits_hub=True, kills=True),
    "lose": Form("kill -9, its checkpoints lost", (0.5, 4.0), 1.0, kills=True),
    "blackout": Form("kill -9 of all, the hub too", (0.5, 4.0), 0.3, kills=True),
    "stop": Form("SIGSTOP, then SIGCONT", (1.0, 20.0), 3.0, hits_hub=True),
    "cut": Form("link cut", (3.0, 30.0), 2.0, needs_links=True),
    "cut_out": Form("link cut, outwards only", (3.0, 20.0), 1.0, needs_links=True),
    "cut_in": Form("link cut, inwards only", (3.0, 20.0), 1.0, needs_links=True),
    "loss": Form("0.1 to 2 % of the packets lost", (5.0, 20.0), 1.0, needs_links=True),
    "slow": Form("a link of 1 Mbit/s", (5.0, 20.0), 1.0, needs_links=True),
    "nat": Form("its NAT forgets its connections", (0.0, 0.0), 1.0, needs_links=True),
    "cut_5": Form("link cut for 5 s", (5.0, 5.0), 0.7, needs_links=True),
    "cut_15": Form("link cut for 15 s", (15.0, 15.0), 0.5, needs_links=True),
    "cut_60": Form("link cut for 60 s", (60.0, 60.0), 0.3, needs_links=True),
    "move": Form(
        "kill -9, and started again at another address", (0.5, 4.0), 0.4, hits_hub=True, hits_sites=False, kills=True
    ),
}
STAGES = {
    "kill_before_send": "kill -9 before it sends",
    "kill_in_upload": "kill -9 while it uploads",
    "kill_before_record": "kill -9 between contribution and record",
    "kill_in_download": "kill -9 while it downloads",
    "kill_at_landing": "kill -9 at a landing",
}
"""Faults that kill a site as soon as it comes to a stage of a flight."""
FORMS |= {kind: Form(told, (0.5, 4.0), 0.4, kills=True) for kind, told in STAGES.items()}


@dataclass(frozen=True)
class Fault:
    """A fault: what happens to a site, the hub or all, for how long, and how strong it is between 0 and 1."""

    kind: str
    victim: str
    seconds: float
    strength: float = 0.0

    def hits(self, name: str) -> bool:
        """Returns whether it happens to a site or the hub."""
        return self.victim in (name, ALL)


def sequence(seed: int, sites: Sequence[str], links: bool, only: Sequence[str] = ()) -> Iterator[tuple[float, Fault]]:
    """Yields faults without end, each with the seconds to wait before it; of all kinds, or only some."""
    chance = random.Random(seed)
    kinds = [kind for kind, form in FORMS.items() if (links or not form.needs_links) and (not only or kind in only)]
    weights = [FORMS[kind].often for kind in kinds]
    while True:
        kind = chance.choices(kinds, weights)[0]
        form = FORMS[kind]
        hits_hub = form.hits_hub and (chance.random() < 0.25 or not form.hits_sites)
        victim = HUB if hits_hub else ALL if kind == "blackout" else chance.choice(sites)
        seconds = chance.uniform(*form.seconds)
        # Everybody stands still without a hub: the shorter half.
        seconds = seconds / 2 if hits_hub else seconds
        yield chance.uniform(0.3, 3.0), Fault(kind, victim, seconds, chance.random())

"""Faults, and sequences of them by chance: what happens to whom, and for how long."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HUB = "hub"
ALL = "all"


@dataclass(frozen=True)
class Form:
    """A kind of fault: how people call it, how long it lasts at least and at most, and how often
    it is chosen.
    """

    told: str
    seconds: tuple[float, float]
    often: float
    hits_hub: bool = False
    hits_sites: bool = True
    needs_links: bool = False
    kills: bool = False  # who it happens to is started again


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
    "wrong": Form("all its parameters become 30", (0.0, 0.0), 1.0),
    "nat": Form("its NAT forgets its connections", (0.0, 0.0), 1.0, needs_links=True),
    "cut_5": Form("link cut for 5 s", (5.0, 5.0), 0.7, needs_links=True),
    "cut_15": Form("link cut for 15 s", (15.0, 15.0), 0.5, needs_links=True),
    "cut_60": Form("link cut for 60 s", (60.0, 60.0), 0.3, needs_links=True),
    "move": Form(
        "kill -9, and started again at another address",
        (0.5, 4.0),
        0.4,
        hits_hub=True,
        hits_sites=False,
        kills=True,
    ),
}
# These kill a site as soon as it comes to a stage of a flight.
STAGES = {
    "kill_before_send": "kill -9 before it sends",
    "kill_in_upload": "kill -9 while it uploads",
    "kill_before_record": "kill -9 between contribution and record",
    "kill_in_download": "kill -9 while it downloads",
    "kill_at_landing": "kill -9 at a landing",
}
FORMS |= {kind: Form(told, (0.5, 4.0), 0.4, kills=True) for kind, told in STAGES.items()}


@dataclass(frozen=True)
class Fault:
    """What happens to a site, the hub or all, for how long, and how strong it is between 0 and
    1.
    """

    kind: str
    victim: str
    seconds: float
    strength: float = 0.0

    def hits(self, name: str) -> bool:
        return self.victim in (name, ALL)


def sequence(
    seed: int, sites: Sequence[str], links: bool, only: Sequence[str] = ()
) -> Iterator[tuple[float, Fault]]:
    """Yields faults without end, each with the seconds to wait before it; of all kinds, or only
    some.
    """
    chance = random.Random(seed)
    kinds = [
        kind
        for kind, form in FORMS.items()
        if (links or not form.needs_links) and (not only or kind in only)
    ]
    while True:
        kind = chance.choices(kinds, [FORMS[kind].often for kind in kinds])[0]
        form = FORMS[kind]
        hits_hub = form.hits_hub and (chance.random() < 0.25 or not form.hits_sites)
        victim = HUB if hits_hub else ALL if kind == "blackout" else chance.choice(sites)
        # Everybody stands still without a hub: the shorter half.
        seconds = chance.uniform(*form.seconds) / (2 if hits_hub else 1)
        yield chance.uniform(0.3, 3.0), Fault(kind, victim, seconds, chance.random())

"""Faults, and sequences of them by chance: what happens to whom, and for how long."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HUB = "hub"
ALL = "all"


@dataclass(frozen=True)
class Form:
    """A kind of fault: its name for people, its shortest and longest duration, and how often it is
    chosen.
    """

    label: str
    seconds: tuple[float, float]
    often: float
    hits_hub: bool = False
    hits_sites: bool = True
    needs_links: bool = False
    kills: bool = False  # the victim is started again


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
FORMS |= {kind: Form(label, (0.5, 4.0), 0.4, kills=True) for kind, label in STAGES.items()}


@dataclass(frozen=True)
class Fault:
    """A fault of a site, the hub or all; its strength is between 0 and 1."""

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
    forms = {kind: form for kind, form in FORMS.items() if links or not form.needs_links}
    if only:
        forms = {kind: form for kind, form in forms.items() if kind in only}
    kinds = list(forms)
    weights = [form.often for form in forms.values()]
    while True:
        (kind,) = chance.choices(kinds, weights)
        form = forms[kind]
        hits_hub = form.hits_hub and (chance.random() < 0.25 or not form.hits_sites)
        if hits_hub:
            victim = HUB
        elif kind == "blackout":
            victim = ALL
        else:
            victim = chance.choice(sites)
        seconds = chance.uniform(*form.seconds)
        if hits_hub:
            seconds /= 2  # all sites wait without a hub
        yield chance.uniform(0.3, 3.0), Fault(kind, victim, seconds, chance.random())

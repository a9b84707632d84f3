"""A site without a model: the real follower and any connection, with arithmetic on a few float32
values.
"""

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.messages import (
    Amended,
    Called,
    Contribution,
    Lost,
    Payload,
    Position,
    Record,
    Recorded,
    SiteEvent,
    StateArrived,
    StateHeader,
    StateWanted,
    Waiting,
    Welcome,
    Welcomed,
)
from lightning_sdiloco.federation.run_config import RunConfig, Terms

RUN = "run-1"
LENGTH = 4
NOISE = np.random.default_rng(0).standard_normal((64, LENGTH)).astype(np.float32) / 16


class Values(NamedTuple):
    """Outer values, their momentum, and the truth about where they come from: the key of the
    record that made them.
    """

    outer: np.ndarray
    momentum: np.ndarray
    lineage: str = ""

    @property
    def digest(self) -> int:
        return int(key_of(self.outer.tobytes())[:15], 16)


def first_values(p: int, lineage: str = "", seed: int = 0) -> Values:
    return Values(np.full(LENGTH, p + 1 + seed, np.float32), np.zeros(LENGTH, np.float32), lineage)


@dataclass
class Part:
    """A fragment at a site: its values, and the trained steps that are in the local ones and in
    flight.
    """

    values: Values
    held: list[int] = field(default_factory=list)
    flight: list[int] | None = None
    payload: bytes = b""
    finite: bool = True

    def __post_init__(self) -> None:
        self.local = self.values.outer.copy()

    @property
    def steps(self) -> list[int]:
        return self.held + (self.flight or [])

    def drop(self) -> None:
        self.local = self.values.outer.copy()
        self.held = []
        self.flight = None

    def place(self, new: Values, landing: MergeAction, has_landed: bool = True) -> None:
        """Does to the local values, and to the steps that are in them, what a landing says."""
        old = self.values
        self.values = new
        if landing in (MergeAction.MIX, MergeAction.DROP):
            self.local = np.float32(0.5) * (self.local + new.outer)
        elif landing is MergeAction.CARRY:
            self.local = self.local + (new.outer - old.outer)
        else:
            self.local = new.outer.copy()
            self.held = []
        if has_landed:
            if landing is MergeAction.CARRY:
                self.held = (self.flight or []) + self.held
            self.flight = None


def rounded(gradient: np.ndarray) -> np.ndarray:
    """Leaves sign, exponent and two bits: about what four bits with a scale leave."""
    return (gradient.view(np.int32) & np.int32(-1 << 21)).view(np.float32)


def run_config(terms: Terms, **settings: str) -> RunConfig:
    fragments = tuple(((f"weight{p}", f"({LENGTH},)"),) for p in range(terms.fragments))
    return RunConfig(
        RUN,
        terms,
        {"compression": "'none'", **settings},
        fragments,
        ((),) * terms.fragments,
        {},
        "5f",
    )


class ScriptedSite:
    samples = 4
    trained = 0

    def __init__(
        self,
        connection: Any,
        own: RunConfig,
        first: Sequence[Values],
        late: MergeAction = MergeAction.CARRY,
    ) -> None:
        self.connection = connection
        self.run_config = own
        self.follower = Follower(
            own.terms, own.key, connection.site, connection.incarnation, late=late
        )
        self.parts = [Part(values) for values in first]
        self.at = self.counted = self.welcomes = 0
        self.without: tuple[str, ...] = ()  # whose states were refused
        self.blobs: dict[str, Mapping[str, Any]] = {}
        self.told: list[str] = []
        self.states: list[str] = []

    def digests(self) -> list[int]:
        return [part.values.digest for part in self.parts]

    @property
    def rounds(self) -> list[int]:
        return [own.applied.round for own in self.follower.fragments]

    # What it hears

    def hear(self) -> None:
        for event in self.connection.events():
            self.hears(event)

    def hears(self, event: SiteEvent) -> None:
        follower = self.follower
        match event:
            case Welcomed():
                self.welcomes += 1
                for p in follower.welcome(event.welcome):
                    self.begins_again(p, event.welcome)
                    self.parts[p].drop()
                snapshot = event.snapshot
                is_first = (
                    follower.wants_state
                    and snapshot
                    and not any(at.round for at in snapshot.applied)
                )
                if is_first and tuple(self.digests()) == snapshot.digests:
                    self.adopts(snapshot, [part.values for part in self.parts])
            case Called():
                follower.hear(event.call)
            case Amended():
                follower.terms = event.terms
            case Recorded():
                follower.learn(event.record)
                if event.blobs is not None:
                    self.blobs[event.record.key] = event.blobs
            case StateWanted() if event.founding or self.can_give():
                applied = tuple(Position.start(self.run_config.key) for _ in self.parts)
                header = (
                    StateHeader(applied, tuple(self.digests()))
                    if event.founding
                    else follower.header()
                )
                self.connection.give(
                    event.request, header, [pickle.dumps(tuple(part.values)) for part in self.parts]
                )
            case StateArrived() if follower.wants_state:
                self.takes_over(
                    event.header,
                    [Values(*pickle.loads(part)) for part in event.parts],
                    event.source,
                )
            case Waiting():
                self.told.append(event.why)
            case Lost():
                follower.lose(time.monotonic())
                self.told.append(event.why)

    def can_give(self) -> bool:
        return self.follower.follows

    def takes_over(self, header: StateHeader, came: list[Values], source: str) -> None:
        self.adopts(header, came)
        self.states.append(source)
        self.connection.hello(self.follower)

    def adopts(self, header: StateHeader, came: list[Values]) -> None:
        for p, landing in self.follower.adopt(header, [values.digest for values in came]).items():
            self.place(p, came[p], landing)

    def begins_again(self, p: int, welcome: Welcome) -> None:
        """Hears, before it does, that a fragment begins again, because an earlier incarnation has
        launched it.
        """

    # What it does

    def step(self) -> None:
        """Hears, makes an inner step unless training waits, and does what is due."""
        self.hear()
        if (
            self.follower.follows
            and not self.follower.finished
            and not self.follower.waits(self.at, time.monotonic())
        ):
            self.train()
        self.turn()
        self.asks()

    def is_up_to_date(self) -> bool:
        """Whether it is, when it has heard all that there is, and made no step."""
        self.hear()
        self.turn()
        self.asks()
        return self.follower.reachable and self.follower.follows and self.follower.lag == 0

    def train(self) -> None:
        self.at = self.at + 1
        self.trained = self.trained + 1
        own = ord(self.follower.site[-1])
        for p, part in enumerate(self.parts):
            part.local += NOISE[(self.trained * 7 + p * 3 + own) % 64]
            part.held.append(self.trained)
        self.follower.trained(self.samples)

    def turn(self) -> None:
        """Says and does what is due, without an inner step."""
        for call in self.follower.skips():
            self.connection.skip(call)
        for p in self.follower.launches(self.at):
            self.launch(p)
        while due := [record for record in self.follower.due(self.at) if record.key in self.blobs]:
            for record in due:
                self.land(record)

    def asks(self) -> None:
        if self.follower.wants_state:
            self.connection.ask(self.without)
        self.connection.heartbeat(self.follower)

    def gradient(self, part: Part) -> np.ndarray:
        return part.values.outer - part.local

    def launch(self, p: int) -> None:
        part = self.parts[p]
        gradient = self.gradient(part)
        exact = self.follower.fragments[p].is_last(self.follower.terms)
        payload = self.encoded(gradient, exact)
        named = (Payload(key_of(payload), len(payload)),)
        finite = bool(np.isfinite(gradient).all())
        begun = self.follower.begin(p, self.at)
        sent = self.follower.complete(
            replace(begun, digest=part.values.digest, payloads=named, finite=finite)
        )
        if sent is None:
            part.held = []
            return
        self.launches(sent, part)
        part.finite = finite
        part.flight = part.held
        part.held = []
        part.payload = payload
        self.contribute(sent)

    def encoded(self, gradient: np.ndarray, exact: bool) -> bytes:
        return (gradient if exact else rounded(gradient)).tobytes()

    def contribute(self, own: Contribution) -> None:
        self.connection.contribute(own, {own.payloads[0].key: self.parts[own.fragment].payload})

    def launches(self, sent: Contribution, part: Part) -> None:
        """Hears of a launch before it is in flight."""

    def land(self, record: Record) -> None:
        p = record.fragment
        old = self.parts[p].values
        blobs = self.blobs.pop(record.key)
        new = self.stepped(record, old, [blobs[source[0].key] for source in record.sources])
        landing = self.follower.land(record, old.digest, new.digest)
        self.counted += record.of(self.follower.site) is not None
        self.lands(record, landing, new)
        if landing is MergeAction.REFUSE:
            self.parts[p].held = []
            self.parts[p].flight = None
        else:
            self.place(p, new, landing)

    def lands(self, record: Record, landing: MergeAction, new: Values) -> None:
        """Hears of a landing before the values are changed."""

    def place(self, p: int, new: Values, landing: MergeAction) -> None:
        self.parts[p].place(new, landing, self.follower.fragments[p].flight is None)

    def in_order(self, record: Record) -> list[int]:
        return list(range(len(record.counted)))

    def stepped(self, record: Record, old: Values, payloads: Sequence[Any]) -> Values:
        weights = [1 if record.final else own.weight for own in record.counted]
        mean = np.zeros(LENGTH, np.float32)
        for index in self.in_order(record):
            factor = np.float32(len(weights) * weights[index] / max(1, sum(weights)))
            mean += factor * np.frombuffer(payloads[index], np.float32)
        mean /= np.float32(len(weights))
        momentum = np.float32(0.9) * old.momentum + mean
        move = mean if record.final else np.float32(0.4) * (mean + np.float32(0.9) * momentum)
        return Values(old.outer - move, momentum, record.key)

"""A site without a model: the real follower and any connection, with arithmetic on a few float32
values.
"""

import math
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.messages import (
    NO_STATE,
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
# Of a float32: sign, exponent and two bits.
_LEFT = np.int32(-1 << 21)
_HALF = np.float32(0.5)
_MOMENTUM = np.float32(0.9)
_OUTER_RATE = np.float32(0.4)
INNER_STEPS = list(np.random.default_rng(0).standard_normal((64, LENGTH)).astype(np.float32) / 16)


# Worlds ask for the same keys and digests again and again.
known_key = lru_cache(1 << 12)(key_of)


@lru_cache(1 << 12)
def _digest_of(values: bytes) -> int:
    return int(key_of(values)[:15], 16)


class Values(NamedTuple):
    """Outer values, their momentum, and the truth about where they come from: the key of the
    record that made them.
    """

    outer: np.ndarray
    momentum: np.ndarray
    lineage: str = ""

    @property
    def digest(self) -> int:
        return _digest_of(self.outer.tobytes())

    def to_bytes(self) -> bytes:
        return pickle.dumps(tuple(self))

    @staticmethod
    def from_bytes(text: bytes) -> "Values":
        return Values(*pickle.loads(text))


def first_values(fragment: int, lineage: str = "", seed: int = 0) -> Values:
    outer = np.full(LENGTH, fragment + 1 + seed, np.float32)
    return Values(outer, np.zeros(LENGTH, np.float32), lineage)


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

    def copied(self) -> "Part":
        copy = replace(self, held=list(self.held))
        copy.local = self.local.copy()
        return copy

    def drop(self) -> None:
        self.local = self.values.outer.copy()
        self.forget_steps()

    def forget_steps(self) -> None:
        self.held = []
        self.flight = None

    def place(self, new: Values, landing: MergeAction, has_landed: bool = True) -> None:
        """Does to the local values, and to the steps that are in them, what a landing says."""
        old = self.values
        self.values = new
        if landing in (MergeAction.MIX, MergeAction.DROP):
            self.local = _HALF * (self.local + new.outer)
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
    return (gradient.view(np.int32) & _LEFT).view(np.float32)


def run_config(terms: Terms, **settings: str) -> RunConfig:
    fragments = tuple(((f"weight{p}", f"({LENGTH},)"),) for p in range(terms.fragments))
    shards = ((),) * terms.fragments
    return RunConfig(RUN, terms, {"compression": "'none'", **settings}, fragments, shards, {}, "5f")


class ScriptedSite:
    samples = 4
    trained = 0

    def __init__(
        self,
        connection: Any,
        run_config: RunConfig,
        first: Sequence[Values],
        late: MergeAction = MergeAction.CARRY,
    ) -> None:
        self.connection = connection
        self.run_config = run_config
        self.follower = Follower(
            run_config.terms, run_config.key, connection.site, connection.incarnation, late=late
        )
        self.parts = [Part(values) for values in first]
        self.inner_steps = 0
        self.counted = 0
        self.welcomes = 0
        self.refused_donors: tuple[str, ...] = ()
        self.blobs: dict[str, Mapping[str, Any]] = {}
        self.messages: list[str] = []
        self.donors: list[str] = []

    def digests(self) -> list[int]:
        return [part.values.digest for part in self.parts]

    @property
    def rounds(self) -> list[int]:
        return [progress.applied.round for progress in self.follower.fragments]

    # Events of the hub

    def hear(self) -> None:
        for event in self.connection.events():
            self.handle(event)

    def handle(self, event: SiteEvent) -> None:
        follower = self.follower
        match event:
            case Welcomed():
                self.be_welcomed(event)
            case Called():
                follower.hear(event.call)
            case Amended():
                follower.terms = event.terms
            case Recorded():
                follower.learn(event.record, event.blobs is not None)
                if event.blobs is not None:
                    self.blobs[event.record.key] = event.blobs
            case StateWanted() if event.founding or self.can_give():
                self.give_state(event)
            case StateArrived() if not event.parts:
                self.refuse_donors(*self.refused_donors, event.source)
            case StateArrived() if follower.wants_state:
                state = [Values.from_bytes(part) for part in event.parts]
                self.take_over(event.header, state, event.source)
            case Waiting():
                self.messages.append(event.why)
                if event.why.startswith(NO_STATE):
                    self.refuse_donors()
            case Lost():
                follower.lose(time.monotonic())
                self.messages.append(event.why)
        self.drop_payloads()

    def drop_payloads(self) -> None:
        """Drops the payloads of records that have landed, or end without a landing."""
        keys = self.follower.record_keys
        self.blobs = {key: blobs for key, blobs in self.blobs.items() if key in keys}

    def be_welcomed(self, event: Welcomed) -> None:
        self.welcomes += 1
        for fragment in self.follower.welcome(event.welcome):
            self.before_beginning_again(fragment, event.welcome)
            self.parts[fragment].drop()
        if event.welcome.rolled_back:
            for contribution in self.follower.outstanding():
                self.contribute(contribution)
        snapshot = event.snapshot
        if not self.follower.wants_state or snapshot is None:
            return
        is_first = not any(position.round for position in snapshot.applied)
        if is_first and tuple(self.digests()) == snapshot.digests:
            self.adopt(snapshot, [part.values for part in self.parts])

    def give_state(self, event: StateWanted) -> None:
        if event.founding:
            start = Position.start(self.run_config.key)
            header = StateHeader((start,) * len(self.parts), tuple(self.digests()))
        else:
            header = self.follower.header()
        state = [part.values.to_bytes() for part in self.parts]
        self.connection.give(event.request, header, state)

    def can_give(self) -> bool:
        return self.follower.follows

    def take_over(self, header: StateHeader, state: list[Values], donor: str) -> None:
        try:
            self.adopt(header, state)
        except Refused:
            self.refuse_donors(*self.refused_donors, donor)
            return
        self.refuse_donors()
        self.donors.append(donor)
        self.connection.hello(self.follower)

    def adopt(self, header: StateHeader, state: list[Values]) -> None:
        landings = self.follower.adopt(header, [values.digest for values in state])
        for fragment, landing in landings.items():
            self.place(fragment, state[fragment], landing)

    def before_beginning_again(self, fragment: int, welcome: Welcome) -> None:
        """Runs before a fragment begins again, because an earlier incarnation has launched it."""

    # Training

    def step(self) -> None:
        """Hears, makes an inner step unless training waits, and does what is due."""
        self.hear()
        follower = self.follower
        may_train = follower.follows and not follower.finished
        if may_train and not follower.waits(self.inner_steps, time.monotonic()):
            self.train()
        self.act()
        self.report()

    def is_up_to_date(self) -> bool:
        """Hears all that there is, makes no step, and returns whether it is up to date."""
        self.hear()
        self.act()
        self.report()
        return self.follower.reachable and self.follower.follows and self.follower.lag == 0

    def train(self) -> None:
        self.inner_steps += 1
        self.trained += 1
        site_number = ord(self.follower.site[-1])
        for index, part in enumerate(self.parts):
            part.local += INNER_STEPS[(self.trained * 7 + index * 3 + site_number) % 64]
            part.held.append(self.trained)
        self.follower.trained(self.samples)

    def act(self) -> None:
        """Skips, launches and lands what is due, without an inner step."""
        for call in self.follower.skips():
            self.connection.skip(call)
        for fragment in self.follower.launches(self.inner_steps):
            self.launch(fragment)
        due = self.due_records()
        while due:
            for record in due:
                self.land(record)
            due = self.due_records()

    def due_records(self) -> list[Record]:
        due = self.follower.due(self.inner_steps)
        return [record for record in due if record.key in self.blobs]

    def restore(self, parts: list[Part], inner_steps: int) -> None:
        self.parts = parts
        self.inner_steps = inner_steps

    def refuse_donors(self, *donors: str) -> None:
        self.refused_donors = donors

    def report(self) -> None:
        """Asks for a state if it needs one, and sends a heartbeat."""
        if self.follower.wants_state:
            self.connection.ask(self.refused_donors, self.follower.lacked_rounds)
            self.give_again()
        self.connection.heartbeat(self.follower)

    def give_again(self) -> None:
        """Sends again what the hub may have lost of rounds that are closed."""
        for contribution in self.follower.outstanding():
            if self.follower.fragments[contribution.fragment].lacks_payloads:
                self.contribute(contribution)

    def gradient(self, part: Part) -> np.ndarray:
        return part.values.outer - part.local

    def launch(self, fragment: int) -> None:
        part = self.parts[fragment]
        follower = self.follower
        gradient = self.gradient(part)
        is_exact = follower.fragments[fragment].is_last(follower.terms)
        payload = self.encoded(gradient, is_exact)
        begun = follower.begin(fragment, self.inner_steps)
        encoded = replace(
            begun,
            digest=part.values.digest,
            payloads=(Payload(known_key(payload), len(payload)),),
            finite=all(map(math.isfinite, gradient.tolist())),
            norm_squared=self.norm_squared(gradient),
        )
        contribution = follower.complete(encoded)
        if contribution is None:
            part.held = []
            return
        self.before_contributing(contribution, payload)
        self.before_launch(contribution, part)
        part.finite = encoded.finite
        part.flight = part.held
        part.held = []
        part.payload = payload
        self.contribute(contribution)

    def encoded(self, gradient: np.ndarray, exact: bool) -> bytes:
        return (gradient if exact else rounded(gradient)).tobytes()

    def contribute(self, contribution: Contribution) -> None:
        payload = self.parts[contribution.fragment].payload
        self.connection.contribute(contribution, {contribution.payloads[0].key: payload})

    def norm_squared(self, gradient: np.ndarray) -> float:
        """Returns nothing that a guard could judge."""
        return 0.0

    def before_contributing(self, contribution: Contribution, payload: bytes) -> None:
        """Runs before a contribution is in flight."""

    def before_launch(self, contribution: Contribution, part: Part) -> None:
        """Runs before a contribution is in flight."""

    def land(self, record: Record) -> None:
        fragment = record.fragment
        part = self.parts[fragment]
        blobs = self.blobs[record.key]
        payloads = [blobs[source[0].key] for source in record.sources]
        new = self.stepped(record, part.values, payloads)
        landing = self.follower.land(record, part.values.digest, new.digest)
        self.counted += record.of(self.follower.site) is not None
        self.before_landing(record, landing, new)
        if landing is MergeAction.REFUSE:
            part.forget_steps()
        else:
            self.place(fragment, new, landing)
        self.drop_payloads()

    def before_landing(self, record: Record, landing: MergeAction, new: Values) -> None:
        """Runs before a landing changes the values."""

    def place(self, fragment: int, new: Values, landing: MergeAction) -> None:
        has_landed = self.follower.fragments[fragment].flight is None
        self.parts[fragment].place(new, landing, has_landed)

    def summation_order(self, record: Record) -> list[int]:
        return list(range(len(record.counted)))

    def stepped(self, record: Record, old: Values, payloads: Sequence[Any]) -> Values:
        weights = [1 if record.final else counted.weight for counted in record.counted]
        mean = np.zeros(LENGTH, np.float32)
        for index in self.summation_order(record):
            factor = np.float32(len(weights) * weights[index] / max(1, sum(weights)))
            mean += factor * np.frombuffer(payloads[index], np.float32)
        mean /= np.float32(len(weights))
        momentum = _MOMENTUM * old.momentum + mean
        move = mean if record.final else _OUTER_RATE * (mean + _MOMENTUM * momentum)
        return Values(old.outer - move, momentum, record.key)

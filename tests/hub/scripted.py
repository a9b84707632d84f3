"""A scripted site: the real follower and a real connection, with arithmetic on a few float32 values and no model."""

import numpy as np

from lightning_sdiloco.federation import (
    Charter,
    Follower,
    MergeAction,
    Payload,
    Position,
    Record,
    StateHeader,
    Terms,
)
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.hub import (
    Called,
    Connection,
    Lost,
    Recorded,
    StateArrived,
    StateWanted,
    Waiting,
    Welcomed,
)

RUN = "run-1"
LENGTH = 1000
TERMS = Terms(fragments=2, sync_every=8, overlap_steps=2, grace=1.0, lease=2.0)


def charter(terms: Terms = TERMS, **other: str) -> Charter:
    fragments = tuple(((f"weight{p}", f"({LENGTH},)"),) for p in range(terms.fragments))
    return Charter(RUN, terms, {"compression": "'none'", **other}, fragments, ((),) * terms.fragments, {}, "5f")


class ScriptedSite:
    """Trains a few values. One `step` is one inner step, unless training waits."""

    def __init__(self, connection: Connection, own: Charter, seed: int = 0, speed: int = 1) -> None:
        self.connection, self.site = connection, connection.site
        self.charter = connection.agree(own)
        self.charter.require_same(own)
        terms = self.charter.terms
        self.follower = Follower(terms, self.charter.key, self.site, connection.life)
        first = np.random.default_rng(seed).standard_normal((terms.fragments, LENGTH)).astype(np.float32)
        self.outer = [row.copy() for row in first]
        self.local = [row.copy() for row in first]
        self.noise = np.random.default_rng([ord(letter) for letter in self.site])
        self.at = 0
        self.blobs: dict[str, dict[str, bytes]] = {}
        self.landed: list[tuple[int, int, MergeAction]] = []
        self.told: list[str] = []
        self.states: list[str] = []
        self.counted = 0
        self.welcomes = 0
        connection.hello(self.follower)

    def digest(self, p: int) -> int:
        return int(key_of(self.outer[p].tobytes())[:15], 16)

    def digests(self) -> list[int]:
        return [self.digest(p) for p in range(len(self.outer))]

    @property
    def rounds(self) -> list[int]:
        return [own.applied.round for own in self.follower.fragments]

    # Messages

    def hear(self) -> None:
        for event in self.connection.events():
            if isinstance(event, Welcomed):
                self.welcomes += 1
                for p in self.follower.welcome(event.welcome):
                    self.local[p] = self.outer[p].copy()
                anchor = event.anchor
                fresh = self.follower.wants_state and anchor and not any(at.round for at in anchor.applied)
                if fresh and tuple(self.digests()) == anchor.digests:
                    self.follower.adopt(anchor, self.digests())
            elif isinstance(event, Called):
                self.follower.hear(event.call)
            elif isinstance(event, Recorded):
                self.follower.learn(event.record)
                if event.blobs is not None:
                    self.blobs[event.record.key] = dict(event.blobs)
            elif isinstance(event, StateWanted):
                self.give(event)
            elif isinstance(event, StateArrived):
                self.adopt(event)
            elif isinstance(event, (Waiting, Lost)):
                self.told.append(event.why)

    def give(self, wanted: StateWanted) -> None:
        if wanted.founding:
            applied = tuple(Position(0, self.charter.key) for _ in self.outer)
            header = StateHeader(applied, tuple(self.digests()))
        elif self.follower.follows:
            header = self.follower.header()
        else:
            return
        self.connection.give(wanted.request, header, [row.tobytes() for row in self.outer])

    def adopt(self, state: StateArrived) -> None:
        if not self.follower.wants_state:
            return
        came = [np.frombuffer(part, np.float32).copy() for part in state.parts]
        digests = [int(key_of(row.tobytes())[:15], 16) for row in came]
        for p, landing in self.follower.adopt(state.header, digests).items():
            self.place(p, came[p], landing)
        self.states.append(state.source)
        self.connection.hello(self.follower)

    # Training

    def step(self) -> bool:
        """Makes an inner step, unless training waits; tells whether it did."""
        self.hear()
        waits = self.follower.waits(self.at, self.now()) > 0.0
        if not waits and self.follower.follows and not self.follower.finished:
            self.at += 1
            for row in self.local:
                row += self.noise.standard_normal(LENGTH).astype(np.float32) / 16
            self.follower.trained(4)
        self.turn()
        return not waits

    def turn(self) -> None:
        """Says and does what is due, without an inner step."""
        for call in self.follower.skips():
            self.connection.skip(call)
        for p in self.follower.launches(self.at):
            self.launch(p)
        while self.land_due():
            pass
        if self.follower.wants_state:
            self.connection.ask()
        self.connection.beat(self.follower)

    def now(self) -> float:
        import time

        return time.monotonic()

    def launch(self, p: int) -> None:
        gradient = self.outer[p] - self.local[p]
        payload = gradient.tobytes()
        sent = self.follower.launch(p, self.at, self.digest(p), (Payload(key_of(payload), len(payload)),))
        if sent:
            self.connection.contribute(sent, {sent.payloads[0].key: payload})

    def land_due(self) -> bool:
        landed = False
        for record in self.follower.due(self.at):
            if record.key in self.blobs:
                self.land(record)
                landed = True
        return landed

    def land(self, record: Record) -> None:
        p = record.fragment
        blobs = self.blobs.pop(record.key)
        total = sum(own.weight for own in record.counted)
        mean = np.zeros(LENGTH, np.float32)
        for own in record.counted:
            mean += np.float32(own.weight / total) * np.frombuffer(blobs[own.payloads[0].key], np.float32)
        new = self.outer[p] - np.float32(0.7) * mean
        landing = self.follower.land(record, self.digest(p), int(key_of(new.tobytes())[:15], 16))
        self.landed.append((p, record.round, landing))
        self.counted += record.of(self.site) is not None
        if landing is not MergeAction.REFUSE:
            self.place(p, new, landing)

    def place(self, p: int, new: np.ndarray, landing: MergeAction) -> None:
        if landing is MergeAction.MIX:
            self.local[p] = np.float32(0.5) * (self.local[p] + new)
        elif landing is MergeAction.CARRY:
            self.local[p] = self.local[p] + (new - self.outer[p])
        else:
            self.local[p] = new.copy()
        self.outer[p] = new

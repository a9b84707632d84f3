"""A simulated hub: the real ledger, a disk that survives it, and messages that come and go."""

from collections import Counter, defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.federation import (
    RETENTION,
    Answer,
    Beat,
    Call,
    Contribution,
    Hello,
    Ledger,
    Record,
    Refused,
    StateHeader,
)
from lightning_sdiloco.federation.codec import key_of

if TYPE_CHECKING:
    from tests.federation.world import World

TICK = 0.1
ANCHOR_EVERY = 60
read = lru_cache(maxsize=1 << 14)(Record.from_bytes)


class Disk:
    """What is durable: the four methods of a mailbox, open contributions, and the anchor."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.blobs: dict[str, bytes] = {}
        self.contributions: dict[tuple[int, str], Contribution] = {}
        self.anchors: list[tuple[StateHeader, list[tuple[np.ndarray, np.ndarray]], list[str]]] = []
        self.chains: dict[int, list[Record]] = defaultdict(list)
        self.dropped: dict[int, int] = defaultdict(int)
        self.named: Counter[str] = Counter()
        self.ending = False
        self.is_real = True
        # For the judge: the trained steps that records have counted, each with its round, by site and fragment.
        self.counted: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)

    def put(self, blob: bytes) -> str:
        key = key_of(blob)
        self.blobs[key] = blob
        return key

    def get(self, key: str) -> bytes:
        return self.blobs[key]

    def append(self, seq: int, record: bytes) -> bool:
        if seq < len(self.records):
            return self.records[seq] == record
        assert seq == len(self.records), "a record without the one before it"
        self.records.append(record)
        self.chains[read(record).fragment].append(read(record))
        self.named.update(payload.key for own in read(record).counted for payload in own.payloads)
        return True

    def all_records(self) -> list[Record]:
        return list(map(read, self.records))

    def tidy(self, record: Record) -> None:
        """Drops what nobody needs any more once a record is durable."""
        for key in [key for key in self.contributions if key[0] == record.fragment]:
            del self.contributions[key]

    def drop_payloads(self, kept: tuple[int, ...]) -> None:
        """Drops the payloads of rounds that are no longer kept, if nobody else has sent the same bytes since."""
        open_ones = {payload.key for own in self.contributions.values() for payload in own.payloads}
        for p, first in enumerate(kept):
            for record in self.chains[p][self.dropped[p] : first - 1]:
                for own in record.counted:
                    for payload in own.payloads:
                        self.named[payload.key] -= 1
                        if not self.named[payload.key] and payload.key not in open_ones:
                            self.blobs.pop(payload.key, None)
            self.dropped[p] = max(self.dropped[p], first - 1)

    def without_the_last(self, count: int, steps: dict[Contribution, list[int]]) -> "Disk":
        """What a backup of a while ago holds."""
        backup = Disk()
        backup.is_real = False
        for data in self.records[: len(self.records) - count]:
            backup.append(len(backup.records), data)
        backup.blobs = dict(self.blobs)
        backup.anchors = self.anchors[:1]
        for record in backup.all_records():
            for own in record.counted:
                backup.counted[own.site, own.fragment].update(dict.fromkeys(steps[own], own.round))
        return backup


class SimulatedHub:
    """One start of a hub. A dead one neither hears nor says anything; a stopped one hears later."""

    def __init__(self, world: "World", disk: Disk) -> None:
        self.world, self.disk = world, disk
        self.dead = self.stopped = False
        self.waiting: list[tuple[Any, ...]] = []
        self.started = world.now
        self.beats: dict[str, tuple[float, bool, tuple[int, ...]]] = {}
        self.lives: dict[str, str] = {}
        self.overdue: dict[int, int] = defaultdict(int)
        self.ledger = Ledger(
            world.terms,
            world.charter,
            world.now,
            disk.all_records(),
            disk.contributions.values(),
            [anchor[0] for anchor in disk.anchors],
        )
        for own in disk.contributions.values():
            world.judge.sent[own].acknowledged_by = self
        if disk.ending:
            self.ledger.end()
        world.after(TICK, self.tick)

    def arrive(self, site: str, life: str, what: str, arguments: tuple[Any, ...]) -> None:
        if self.stopped:
            self.waiting.append((site, life, what, arguments))
        elif not self.dead:
            getattr(self, f"on_{what}")(site, life, *arguments)

    def go_on(self) -> None:
        self.stopped = False
        waiting, self.waiting = self.waiting, []
        for message in waiting:
            self.arrive(*message)

    def tick(self) -> None:
        if self.dead:
            return
        if not self.stopped:
            self.close()
            if not self.dead:
                self.world.judge.closes(self)
        self.world.after(TICK, self.tick)

    # Rounds

    def close(self) -> None:
        try:
            records = self.ledger.due(self.world.now)
        except AgreementError as error:
            self.world.operator_hears(self, error)
            self.close()
            return
        for record in records:
            if not self.record(record):
                self.fenced()
                return

    def fenced(self) -> None:
        """Hears that somebody else has written: there is a second hub, and this one is not it."""
        self.dead = True
        self.world.judge.counts["fenced"] += 1
        self.world.after(1.0, self.world.hub_starts, self.disk, self)

    def record(self, record: Record) -> bool:
        new = record.seq == len(self.disk.records)
        if not self.disk.append(record.seq, record.to_bytes()):
            return False
        # Two hubs that heard the same write the same.
        if new:
            self.world.judge.recorded(self.disk, self, record)
        self.disk.tidy(record)
        self.ledger.append(record)
        self.announce(record)
        return True

    def announce(self, record: Record) -> None:
        self.world.recorded(record)
        self.tell("record", record, self.payloads(record))
        self.call(record.fragment)
        self.disk.anchors = [anchor for anchor in self.disk.anchors if anchor[0] in self.ledger.anchors.headers]
        self.disk.drop_payloads(self.ledger.kept)
        if record.seq % ANCHOR_EVERY == 0:
            donor = self.ledger.source("the hub", self.world.now)
            if isinstance(donor, str):
                self.world.tell(donor, None, "donate", None)

    def call(self, *fragments: int) -> None:
        for call in self.ledger.calls():
            if call.fragment in fragments:
                self.tell("call", call)

    def end(self) -> None:
        """Ends the run, as an operator says."""
        self.disk.ending = True
        self.ledger.end()
        self.call(*range(self.world.terms.fragments))

    def payloads(self, record: Record) -> list[bytes] | None:
        try:
            return [self.disk.get(payload.key) for own in record.counted for payload in own.payloads]
        except KeyError:
            return None

    def tell(self, what: str, *arguments: Any) -> None:
        for site, member in self.ledger.members.items():
            if member.connected:
                self.world.tell(site, member.life, what, *arguments)

    # For the judge

    def living(self) -> list[str]:
        """The sites that have beaten within a lease, follow, and are near enough."""
        now, closed = self.world.now, self.ledger.closed
        return [
            site
            for site, (time, follows, applied) in self.beats.items()
            if follows
            and site in self.ledger.members
            and time + self.world.terms.lease > now
            and all(last.round - own <= RETENTION for last, own in zip(closed, applied, strict=True))
        ]

    def is_last(self, fragment: int) -> bool:
        """Whether the open round of a fragment is the last: nothing that may count in it was rounded."""
        return self.disk.ending and all(own.exact or own.reason for own in self.ledger.open[fragment].here.values())

    # Messages

    def on_hello(self, site: str, life: str, hello: Hello) -> None:
        try:
            welcome = self.ledger.hello(hello, self.world.now)
        except Refused as error:
            self.world.tell(site, life, "refused", str(error))
            return
        follows = self.beats.get(site, (0, False, ()))[1] and self.lives.get(site) == life
        self.lives[site] = life
        self.beats[site] = (self.world.now, follows, tuple(own.round for own in hello.applied))
        # Who hears from a hub that does not know all may lose what it trains until it hears from another one.
        self.world.sites[site].misled |= self is not self.world.hub or not self.disk.is_real
        self.world.tell(site, life, "welcome", welcome)
        missing = [own for p, at in enumerate(hello.applied) for own in self.disk.chains[p][at.round :]]
        self.world.tell(site, life, "records", [(own, self.payloads(own)) for own in missing], reliably=True)
        for call in self.ledger.calls():
            self.world.tell(site, life, "call", call)

    def on_beat(self, site: str, life: str, beat: Beat) -> None:
        try:
            self.ledger.beat(beat, self.world.now)
        except Refused:
            self.world.tell(site, life, "unknown")
            return
        self.beats[site] = (self.world.now, beat.follows, beat.applied)
        self.world.tell(site, life, "heard")

    def on_contribution(self, site: str, life: str, own: Contribution, payload: bytes) -> None:
        if key_of(payload) != own.payloads[0].key:
            self.world.judge.counts["flips refused"] += 1
            return
        try:
            answer = self.ledger.examine(own, life)
            if answer is Answer.OPEN:
                self.disk.put(payload)
                self.disk.contributions[own.fragment, own.site] = own
                answer = self.ledger.contribute(own, life, self.world.now)
                self.world.judge.sent[own].acknowledged_by = self
                if own.life == life and site in self.beats:
                    # A launch of this life: it follows.
                    self.beats[site] = (self.beats[site][0], True, self.beats[site][2])
            elif answer is Answer.LATE:
                self.ledger.contribute(own, life, self.world.now)
        except Refused:
            self.world.tell(site, life, "unknown")
            return
        self.world.judge.counts[answer.value] += 1
        if answer is Answer.OPEN:
            self.call(own.fragment)
            self.close()

    def on_skip(self, site: str, life: str, call: Call) -> None:
        try:
            self.ledger.skip(site, life, call, self.world.now)
        except Refused:
            return
        self.close()

    def on_leave(self, site: str, life: str) -> None:
        self.ledger.leave(site, life)
        if site not in self.ledger.members:
            self.beats.pop(site, None)
        self.close()

    def on_state(self, site: str, life: str, without: tuple[str, ...]) -> None:
        source = self.ledger.source(site, self.world.now, without)
        if isinstance(source, StateHeader):
            anchor = next((anchor for anchor in self.disk.anchors if anchor[0] == source), None)
            if anchor is None:
                self.fenced()
            else:
                self.world.tell(site, life, "state", *anchor)
        elif source:
            self.world.tell(source, None, "donate", site)
            self.world.tell(site, life, "asked", source)
        else:
            self.world.judge.counts["nobody has a state"] += 1
            self.world.tell(site, life, "nobody", self.ledger.seq)

    def on_anchor(self, site: str, life: str, header: StateHeader, arrays: Any, lineages: list[str]) -> None:
        self.disk.anchors.append((header, arrays, lineages))
        self.ledger.anchors.add(header)

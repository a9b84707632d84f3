"""The trial: a hub and four sites in virtual time, a network that loses and delays, faults by a seed, and a judge.

Ledger and follower are the real ones; around them are arithmetic on a few float32 values, a disk that survives its hub,
and messages that come and go. The judge shares no code with the rules, and writes down what must not be: it knows of
every trained step whose it is, and of all outer values the key of the last record that made them (`lineage`), whatever
sites believe. Bit flips and wrong arithmetic change values, never the lineage.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, NamedTuple

import numpy as np

from lightning_sdiloco.errors import AgreementError, Malformed, Refused
from lightning_sdiloco.federation.charter import RETENTION, ChosenQuorum, Terms
from lightning_sdiloco.federation.codec import key_of
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.ledger import Answer, Ledger
from lightning_sdiloco.federation.messages import Beat, Call, Contribution, Hello, Payload, Record, StateHeader, Welcome

FAULTS = (
    *("kill",) * 3,
    *("stop", "cut", "cut_up", "cut_down", "slow_network") * 2,
    *("hub_kill", "hub_stop", "second_hub"),
    *("old_ledger", "old_checkpoint", "lost_disk", "leave"),
    *("flip_outer", "flip_payload", "flip_record", "flip_state", "flip_checkpoint"),
    *("wrong_arithmetic", "not_finite"),
)
QUIET, ENDING, LEAST = 40.0, 40.0, 0.5
TICK, BEAT, UNHEARD, ANCHOR_EVERY = 0.1, 0.5, 2.0, 60
LENGTH = 4
NOISE = np.random.default_rng(0).standard_normal((64, LENGTH)).astype(np.float32) / 16


# What a site trains


class Values(NamedTuple):
    """Outer values, their momentum, and the truth about where they come from."""

    outer: np.ndarray
    momentum: np.ndarray | None = None
    lineage: str = ""

    @property
    def digest(self) -> int:
        return int(key_of(self.outer.tobytes())[:15], 16)


@dataclass
class Part:
    """A fragment at a site: its values, and the trained steps that are in the local ones and in flight."""

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
        self.local, self.held, self.flight = self.values.outer.copy(), [], None

    def place(self, new: Values, landing: MergeAction, has_landed: bool = True) -> None:
        """Does to the local values, and to the steps that are in them, what a landing says."""
        old, self.values = self.values, new
        if landing in (MergeAction.MIX, MergeAction.DROP):
            self.local = np.float32(0.5) * (self.local + new.outer)
        elif landing is MergeAction.CARRY:
            self.local = self.local + (new.outer - old.outer)
        else:
            self.local, self.held = new.outer.copy(), []
        if has_landed:
            if landing is MergeAction.CARRY:
                self.held = (self.flight or []) + self.held
            self.flight = None


def rounded(gradient: np.ndarray) -> np.ndarray:
    """Leaves sign, exponent and two bits: about what four bits with a scale leave."""
    return (gradient.view(np.int32) & np.int32(-1 << 21)).view(np.float32)


def first_values(p: int, lineage: str) -> Values:
    return Values(np.full(LENGTH, p + 1, np.float32), np.zeros(LENGTH, np.float32), lineage)


class Site:
    """The real follower, with a disk for checkpoints, and faults."""

    def __init__(self, world: "World", name: str, speed: float, samples: int) -> None:
        self.world, self.name, self.speed, self.samples = world, name, speed, samples
        self.alive = self.stopped = self.cut_up = self.cut_down = self.gone_for_good = False
        self.founds = name == "s0"
        self.checkpoints: list[Any] = []
        self.lives = self.turn = self.trained = 0
        self.calm_since = 0.0

    # Lives

    def start(self) -> None:
        if self.alive or self.gone_for_good:
            return
        world, self.lives = self.world, self.lives + 1
        self.life = f"{int(self.name[1:]):04x}{self.lives:012x}"
        self.alive, self.stopped, self.was_wrong, self.does_wrong = True, False, False, False
        self.finishing = self.broken = self.waits = self.misled = self.forgot = False
        self.joined = not world.sites_join
        self.heard_at = self.waited_since = self.calm_since = world.now
        self.asked: tuple[str, ...] = ()
        self.unread: list[tuple[Any, ...]] = []
        self.payloads: dict[str, list[bytes]] = {}
        self.step = 0
        self.follower = Follower(world.terms, world.charter, self.name, self.life, late=world.late)
        fragments = range(world.terms.fragments)
        self.parts = [Part(first_values(p, f"nothing of {self.life}")) for p in fragments]
        while self.checkpoints and not self.load():
            self.checkpoints.pop()
        if self.founds:
            self.parts = [Part(first_values(p, world.charter)) for p in fragments]
            self.follower.found([part.values.digest for part in self.parts])
            self.founds = False
        self.say_hello()
        self.trains_in(self.speed)
        world.after(BEAT, self.beat, self.life)

    def die(self) -> None:
        if self.alive:
            self.alive = self.stopped = False
            if not self.cut_up and self.world.random.random() < 0.9:
                self.world.send(self, "leave")

    def go_on(self) -> None:
        if self.stopped and self.alive:
            self.stopped, self.calm_since, self.waited_since = False, self.world.now, self.world.now
            unread, self.unread = self.unread, []
            for message in unread:
                self.arrive(*message)
            self.trains_in(self.speed)

    @property
    def is_well(self) -> bool:
        return self.alive and not self.stopped and not self.cut_up and not self.cut_down

    def halt(self, error: Exception) -> None:
        """Ends with an error for people; somebody starts it again, without what led to it."""
        if "cannot be made again" in str(error):
            self.world.judge.counts["cannot be made again"] += 1
        self.checkpoints.clear()
        self.die()
        self.world.after(2.0, self.start)

    def save(self) -> None:
        if all(own.digest is not None for own in self.follower.fragments):
            saved = deepcopy((self.follower.state_dict(), self.parts, self.step, self.forgot))
            self.checkpoints = [*self.checkpoints[-4:], saved]

    def load(self) -> bool:
        state, parts, step, misled = deepcopy(self.checkpoints[-1])
        try:
            self.follower.load_state_dict(state, [part.values.digest for part in parts])
        except ValueError:
            return False
        self.parts, self.step, self.misled = parts, step, misled
        return True

    # Messages

    def say_hello(self) -> None:
        self.broken = False
        self.world.send(self, "hello", self.follower.hello("run"))

    def beat(self, life: str) -> None:
        if not self.alive or life != self.life:
            return
        if not self.stopped:
            if self.world.now - self.heard_at > UNHEARD:
                self.follower.lose(self.world.now)
                self.broken = True
            if self.broken:
                self.say_hello()
            self.world.send(self, "beat", self.follower.beat())
            for own in self.follower.outstanding():
                if self.world.random.random() < 0.3:
                    self.contribute(own)
            if self.follower.wants_state:
                self.world.send(self, "state", self.asked)
            self.world.judge.weighs(self)
        self.world.after(BEAT, self.beat, life)

    def contribute(self, own: Contribution) -> None:
        self.world.send(self, "contribution", own, self.parts[own.fragment].payload)

    def arrive(self, life: str | None, what: str, arguments: tuple[Any, ...]) -> None:
        if not self.alive or life not in (self.life, None):
            return
        if self.stopped:
            self.unread.append((life, what, arguments))
            return
        self.heard_at = self.world.now
        try:
            getattr(self, f"on_{what}")(*arguments)
        except AgreementError as error:
            if self.world.hub.disk.is_real:
                self.halt(error)
            else:
                # It refuses the hub and trains on its own: an operator will look after that hub.
                self.follower.reachable = False

    def on_heard(self) -> None:
        pass

    def on_unknown(self) -> None:
        self.broken = True

    def on_refused(self, why: str) -> None:
        self.broken = True
        if "evicted" in why:
            self.halt(Refused(why))

    def on_welcome(self, welcome: Welcome) -> None:
        launches = {standing.fragment: standing.life for standing in welcome.standing}
        for p in self.follower.welcome(welcome):
            self.world.judge.begins_again(self, p, launches[p])
            self.parts[p].drop()

    def on_call(self, call: Call) -> None:
        self.follower.hear(call)

    def on_record(self, record: Record | bytes, payloads: list[bytes] | None) -> None:
        if isinstance(record, bytes):
            self.broken = True
            try:
                Record.from_bytes(record)
            except Malformed:
                return
            self.world.judge.violations.append(f"{self.name} took a damaged record")
            return
        self.follower.learn(record)
        if payloads is not None:
            self.payloads[record.key] = payloads

    def on_records(self, records: list[tuple[Record, list[bytes] | None]]) -> None:
        for record, payloads in records:
            self.on_record(record, payloads)

    def on_asked(self, donor: str) -> None:
        # If it does not answer, another one is asked.
        self.asked = (*self.asked[-1:], donor) if self.world.random.random() < 0.3 else self.asked[:-1]

    def on_nobody(self, records: int) -> None:
        self.asked = ()

    def on_donate(self, to: str | None) -> None:
        held = [part.values for part in self.parts]
        known = [own.digest for own in self.follower.fragments]
        if self.follower.follows and [values.digest for values in held] == known:
            if to is None:
                self.world.send(self, "anchor", self.follower.header(), held)
            elif not self.cut_up:
                self.world.tell(to, None, "state", self.follower.header(), held)

    def on_state(self, header: StateHeader, came: list[Values]) -> None:
        if not self.follower.wants_state:
            return
        # Wrong values: until all has landed again, a checkpoint does not say what was launched before.
        self.forgot = self.joined
        try:
            landings = self.follower.adopt(header, [values.digest for values in came])
        except Refused:
            self.asked = ()
            return
        for p, landing in landings.items():
            self.world.judge.deny(came[p].digest != header.digests[p], f"{self.name} took over a damaged state")
            self.place(p, came[p], landing)
        self.world.judge.weighs(self)
        self.say_hello()

    # Training

    def trains_in(self, seconds: float) -> None:
        # Who was stopped for a moment has its next turn twice, and takes the later one.
        self.turn += 1
        self.world.after(seconds, self.train, self.turn)

    def train(self, turn: int) -> None:
        if not self.alive or self.stopped or turn != self.turn:
            return
        follower, world = self.follower, self.world
        self.forgot = self.forgot and follower.lag > 0
        joins = follower.reachable and follower.follows and all(own.has_joined for own in follower.fragments)
        self.joined = self.joined or joins
        if self.joined and not self.waits and not self.finishing:
            self.step, self.trained = self.step + 1, self.trained + 1
            for p, part in enumerate(self.parts):
                part.local += NOISE[(self.trained * 7 + p * 3) % 64]
                part.held.append(self.trained)
            follower.trained(self.samples)
        for call in follower.skips():
            world.send(self, "skip", call)
        for p in follower.launches(self.step):
            self.launch(p)
        while self.alive and (due := [own for own in follower.due(self.step) if own.key in self.payloads]):
            for record in due:
                if self.alive:
                    self.land(record)
        if not self.alive:
            return
        if not self.waits:
            self.waited_since = world.now
        self.waits = follower.waits(self.step, world.now) > 0.0
        if not self.waits:
            waited = world.now - self.waited_since
            world.judge.deny(waited > world.terms.longest_wait + 0.3, f"{self.name} did not train for {waited:.1f} s")
            if self.step % 20 == 0:
                self.save()
        if follower.finished:
            world.left(self)
        else:
            self.trains_in(0.1 if self.waits else self.speed)

    def launch(self, p: int) -> None:
        part = self.parts[p]
        gradient = part.values.outer - part.local
        if self.world.random.random() < self.world.share_not_finite:
            gradient[0] = np.nan
        exact = self.follower.fragments[p].is_last(self.world.terms)
        payload = (gradient if exact else rounded(gradient)).tobytes()
        finite = bool(np.isfinite(gradient).all())
        named = (Payload(key_of(payload), len(payload)),)
        sent = self.follower.launch(p, self.step, part.values.digest, named, finite)
        if sent is None:
            part.held = []
            return
        self.world.judge.launched(self, sent, part)
        part.finite, part.flight, part.held, part.payload = finite, part.held, [], payload
        self.contribute(sent)

    def in_order(self, record: Record) -> list[int]:
        return list(range(len(record.counted)))

    def land(self, record: Record) -> None:
        p, payloads = record.fragment, self.payloads.pop(record.key)
        old = self.parts[p].values
        weights = [1 if record.final else own.weight for own in record.counted]
        mean = np.zeros(LENGTH, np.float32)
        for index in self.in_order(record):
            factor = np.float32(len(weights) * weights[index] / max(1, sum(weights)))
            mean += factor * np.frombuffer(payloads[index], np.float32)
        mean /= np.float32(len(weights))
        momentum = np.float32(0.9) * old.momentum + mean
        move = mean if record.final else np.float32(0.4) * (mean + np.float32(0.9) * momentum)
        new = Values(old.outer - move, momentum, record.key)
        if self.does_wrong:
            new.outer[0] = np.nextafter(new.outer[0], np.float32(9))
            self.does_wrong, self.was_wrong = False, True
        try:
            landing = self.follower.land(record, old.digest, new.digest)
        except AgreementError as error:
            self.halt(error)
            return
        self.world.judge.lands(self, record, landing, new)
        if landing is MergeAction.REFUSE:
            self.parts[p].held, self.parts[p].flight = [], None
        else:
            self.place(p, new, landing)

    def place(self, p: int, new: Values, landing: MergeAction) -> None:
        self.parts[p].place(new, landing, self.follower.fragments[p].flight is None)


# A hub


class Disk:
    """What is durable: records, open contributions, payloads and anchors."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.payloads: dict[Contribution, bytes] = {}
        self.contributions: dict[tuple[int, str], Contribution] = {}
        self.anchors: list[tuple[StateHeader, list[Values]]] = []
        self.chains: dict[int, list[Record]] = defaultdict(list)
        self.ending, self.is_real = False, True
        # For the judge: the trained steps that records have counted, each with its round, by site and fragment.
        self.counted: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)

    def append(self, record: Record) -> bool:
        if record.seq < len(self.records):
            return self.records[record.seq].key == record.key
        assert record.seq == len(self.records), "a record without the one before it"
        self.records.append(record)
        self.chains[record.fragment].append(record)
        return True

    def without_the_last(self, number: int, steps: dict[Contribution, "Sent"]) -> "Disk":
        """What a backup of a while ago holds."""
        backup = Disk()
        backup.is_real, backup.payloads, backup.anchors = False, dict(self.payloads), self.anchors[:1]
        for record in self.records[: len(self.records) - number]:
            backup.append(record)
            for own in record.counted:
                backup.counted[own.site, own.fragment].update(dict.fromkeys(steps[own].ids, own.round))
        return backup


class Hub:
    """One start of a hub. A dead one neither hears nor says anything; a stopped one hears later."""

    def __init__(self, world: "World", disk: Disk) -> None:
        self.world, self.disk, self.started = world, disk, world.now
        self.dead = self.stopped = False
        self.unread: list[tuple[Any, ...]] = []
        # For the judge: when a site has beaten, which life, whether it follows, and what it has applied.
        self.beats: dict[str, tuple[float, str, bool, tuple[int, ...]]] = {}
        self.overdue: dict[int, int] = defaultdict(int)
        headers = [header for header, _ in disk.anchors]
        own = disk.contributions.values()
        self.ledger = Ledger(world.terms, world.charter, world.now, disk.records, own, headers)
        for each in own:
            world.judge.sent[each].acknowledged_by = self
        if disk.ending:
            self.ledger.end()
        world.after(TICK, self.tick)

    def arrive(self, site: str, life: str, what: str, arguments: tuple[Any, ...]) -> None:
        if self.stopped:
            self.unread.append((site, life, what, arguments))
        elif not self.dead:
            try:
                getattr(self, f"on_{what}")(site, life, *arguments)
            except Refused as error:
                if what != "skip":
                    self.world.tell(site, life, *(("refused", str(error)) if what == "hello" else ("unknown",)))

    def go_on(self) -> None:
        self.stopped = False
        unread, self.unread = self.unread, []
        for message in unread:
            self.arrive(*message)

    def tick(self) -> None:
        if self.dead:
            return
        if not self.stopped:
            self.close()
            if not self.dead:
                self.world.judge.closes(self)
        self.world.after(TICK, self.tick)

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
        self.world.after(1.0, self.world.hub_starts, self.disk, self)

    def record(self, record: Record) -> bool:
        is_new = record.seq == len(self.disk.records)
        if not self.disk.append(record):
            return False
        # Two hubs that heard the same write the same.
        if is_new:
            self.world.judge.recorded(self.disk, self, record)
        self.disk.contributions = {k: own for k, own in self.disk.contributions.items() if k[0] != record.fragment}
        self.ledger.append(record)
        if self.world.quiet_records is not None:
            self.world.quiet_records.append(record)
        self.tell("record", record, self.payloads(record))
        self.call(record.fragment)
        self.disk.anchors = [anchor for anchor in self.disk.anchors if anchor[0] in self.ledger.anchors.headers]
        for p, first in enumerate(self.ledger.kept):
            for old in reversed(self.disk.chains[p][: first - 1]):
                if not [self.disk.payloads.pop(own) for own in old.counted if own in self.disk.payloads]:
                    break
        if record.seq % ANCHOR_EVERY == 0:
            donor = self.ledger.source("the hub", self.world.now)
            if isinstance(donor, str):
                self.world.tell(donor, None, "donate", None)
        return True

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
        known = [self.disk.payloads.get(own) for own in record.counted]
        return None if None in known else known  # type: ignore[return-value]

    def tell(self, what: str, *arguments: Any) -> None:
        for site, member in self.ledger.members.items():
            if member.connected:
                self.world.tell(site, member.life, what, *arguments)

    def on_hello(self, site: str, life: str, hello: Hello) -> None:
        welcome = self.ledger.hello(hello, self.world.now)
        _, before, follows, _ = self.beats.get(site, (0, "", False, ()))
        applied = tuple(own.round for own in hello.applied)
        self.beats[site] = (self.world.now, life, follows and before == life, applied)
        # Who hears from a hub that does not know all may lose what it trains until it hears from another one.
        self.world.sites[site].misled |= self is not self.world.hub or not self.disk.is_real
        self.world.tell(site, life, "welcome", welcome)
        missing = [own for p, at in enumerate(hello.applied) for own in self.disk.chains[p][at.round :]]
        self.world.tell(site, life, "records", [(own, self.payloads(own)) for own in missing], reliably=True)
        for call in self.ledger.calls():
            self.world.tell(site, life, "call", call)

    def on_beat(self, site: str, life: str, beat: Beat) -> None:
        self.ledger.beat(beat, self.world.now)
        self.beats[site] = (self.world.now, life, beat.follows, beat.applied)
        self.world.tell(site, life, "heard")

    def on_contribution(self, site: str, life: str, own: Contribution, payload: bytes) -> None:
        if key_of(payload) != own.payloads[0].key:
            return
        answer = self.ledger.examine(own, life)
        if answer is Answer.OPEN:
            self.disk.payloads[own] = payload
            self.disk.contributions[own.fragment, own.site] = own
            answer = self.ledger.contribute(own, life, self.world.now)
            self.world.judge.sent[own].acknowledged_by = self
            if own.life == life and site in self.beats:
                # A launch of this life: it follows.
                at, before, _, applied = self.beats[site]
                self.beats[site] = (at, before, True, applied)
        elif answer is Answer.LATE:
            self.ledger.contribute(own, life, self.world.now)
        if answer is Answer.OPEN:
            self.call(own.fragment)
            self.close()

    def on_skip(self, site: str, life: str, call: Call) -> None:
        self.ledger.skip(site, life, call, self.world.now)
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

    def on_anchor(self, site: str, life: str, header: StateHeader, held: list[Values]) -> None:
        self.disk.anchors.append((header, held))
        self.ledger.anchors.add(header)


# The world


class World:
    def __init__(self, seed: int, faults: int = 50) -> None:
        self.random = random = Random(seed)
        self.now, self.numbers = 0.0, count()
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.judge = Judge()
        self.left_faults, self.slow_until, self.share_not_finite, self.trouble = faults, 0.0, 0.0, False
        self.flips: set[str] = set()
        grace = random.choice([0.3, 0.6, 1.5])
        quorum: int | ChosenQuorum = random.choice([1, 1, 2])
        if seed // 4 % 4 == 3:
            quorum = ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": LEAST})
        self.terms = Terms(3, 8, 2, grace, lease=3.0, quorum=quorum)
        # Sites with a loop of their own may begin to train before the hub has let them in.
        self.sites_join = seed // 2 % 4 != 0
        self.late = MergeAction.DROP if seed // 16 % 2 else MergeAction.CARRY
        self.charter = key_of(f"charter {seed}".encode())
        self.quiet_records: list[Record] | None = None
        self.disk = Disk()
        self.hub = Hub(self, self.disk)
        speeds = [0.15, 0.15, 0.3, random.choice([0.15, 0.6])]
        self.sites = {f"s{i}": Site(self, f"s{i}", speed, random.choice([1, 2, 4])) for i, speed in enumerate(speeds)}
        for site in self.sites.values():
            self.after(random.random(), site.start)
        self.after(5.0, self.fault)

    # Time and network

    def after(self, delay: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.numbers), what, arguments))

    def within(self, least: float, most: float, what: Callable[..., None], *arguments: Any) -> None:
        self.after(self.random.uniform(least, most), what, *arguments)

    def delays(self) -> list[float]:
        """When a message arrives: lost, twice, late, or as it should."""
        random = self.random.random
        if self.left_faults and random() < 0.01:
            return []
        one = 0.02 + 0.08 * random()
        if self.now < self.slow_until or (self.left_faults and random() < 0.02):
            one += 4 * random()
        return [one, one + random()] if random() < 0.02 else [one]

    def flipped(self, data: Any) -> Any:
        """Bytes or an array with another bit."""
        if not isinstance(data, bytes):
            return np.frombuffer(self.flipped(data.tobytes()), np.float32).copy()
        changed = bytearray(data)
        changed[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def flips_now(self, what: str) -> bool:
        flips = what in self.flips
        self.flips.discard(what)
        return flips

    def send(self, site: Site, what: str, *arguments: Any) -> None:
        """From a site to the hub."""
        if what == "contribution" and self.flips_now("flip_payload"):
            arguments = (arguments[0], self.flipped(arguments[1]))
        delays = [] if site.cut_up else self.delays()
        site.broken |= not delays
        for delay in delays:
            self.after(delay, self.hub.arrive, site.name, site.life, what, arguments)

    def tell(self, name: str, life: str | None, what: str, *arguments: Any, reliably: bool = False) -> None:
        """From the hub to a site, and from a donor through it."""
        site = self.sites[name]
        if site.cut_down:
            return
        if what == "record" and self.flips_now("flip_record"):
            arguments = (self.flipped(arguments[0].to_bytes()), arguments[1])
        if what == "state" and self.flips_now("flip_state"):
            came = list(arguments[1])
            index = self.random.randrange(len(came))
            came[index] = came[index]._replace(outer=self.flipped(came[index].outer))
            arguments = (arguments[0], came)
        delays = [0.05 + 0.05 * self.random.random()] if reliably else self.delays()
        if site.alive:
            site.broken |= not delays
        for delay in delays:
            self.after(delay, site.arrive, life, what, arguments)

    # Faults

    def fault(self) -> None:
        if not self.left_faults:
            return
        self.left_faults -= 1
        kind, site = self.random.choice(FAULTS), self.random.choice(list(self.sites.values()))
        others = [own for own in self.sites.values() if own is not site and own.is_well and own.follower.follows]
        if kind in ("old_checkpoint", "lost_disk", "flip_outer", "flip_checkpoint", "wrong_arithmetic") and not others:
            kind = "kill"
        self.judge.counts[f"fault {kind}"] += 1
        self.trouble |= kind in ("flip_outer", "wrong_arithmetic", "not_finite")
        self.happens(kind, site)
        self.after(self.random.expovariate(1 / 3), self.fault)

    def happens(self, kind: str, site: Site) -> None:
        hub = self.hub
        match kind:
            case "kill" | "old_checkpoint" | "lost_disk" | "flip_checkpoint":
                if kind == "old_checkpoint":
                    site.checkpoints = site.checkpoints[: self.random.randint(1, 3)]
                elif kind == "lost_disk":
                    site.checkpoints = []
                elif kind == "flip_checkpoint" and site.checkpoints:
                    part = site.checkpoints[-1][1][0]
                    part.values = part.values._replace(outer=self.flipped(part.values.outer))
                site.die()
                self.within(0.1, 20, site.start)
            case "stop":
                site.stopped = site.alive
                self.within(0.1, 20, site.go_on)
            case "cut" | "cut_up" | "cut_down":
                site.cut_up |= kind != "cut_down"
                site.cut_down |= kind != "cut_up"
                self.within(0.1, 20, self.heal, site)
            case "slow_network":
                self.slow_until = self.now + self.random.uniform(1, 5)
            case "hub_kill":
                hub.dead = True
                self.within(0.1, 8, self.hub_starts, self.disk, hub)
            case "hub_stop":
                hub.stopped = not hub.dead
                self.within(0.1, 8, hub.go_on)
            case "second_hub" if not (hub.dead or hub.stopped) and hub.disk.is_real:
                # The hub stops, another one takes over, and the first goes on, not knowing.
                hub.stopped = True
                self.hub = Hub(self, self.disk)
                self.within(0.1, 8, hub.go_on)
            case "old_ledger":
                # The hub is started with a backup; after a while somebody notices and starts it with the real ledger.
                hub.dead = True
                lost = min(self.random.randint(1, 12), len(self.disk.records))
                self.hub = Hub(self, self.disk.without_the_last(lost, self.judge.sent))
                self.within(1, 6, self.restore, self.hub)
            case "leave" if site.alive:
                site.finishing = True
                site.follower.finish()
            case "flip_outer" if site.alive:
                part = self.random.choice(site.parts)
                part.values = part.values._replace(outer=self.flipped(part.values.outer))
            case "wrong_arithmetic" if site.alive:
                site.does_wrong = True
            case "not_finite":
                self.share_not_finite = 0.3
                self.after(2.0, setattr, self, "share_not_finite", 0.0)
            case "flip_payload" | "flip_record" | "flip_state":
                self.flips.add(kind)

    def heal(self, site: Site) -> None:
        site.cut_up = site.cut_down = False
        site.broken, site.calm_since = True, self.now

    def hub_starts(self, disk: Disk, instead_of: Hub | None) -> None:
        if self.hub.dead and (instead_of is None or self.hub is instead_of):
            self.hub = Hub(self, disk)

    def restore(self, backup: Hub) -> None:
        backup.dead = True
        if not self.hub.disk.is_real:
            self.hub = Hub(self, self.disk)

    def left(self, site: Site) -> None:
        """A site has trained all it had to, and all of it is counted; some come back."""
        ended = [own.ended for own in site.follower.fragments]
        uncounted = [part.steps for part, own_ended in zip(site.parts, ended, strict=True) if not own_ended]
        self.judge.deny(any(uncounted), f"{site.name} left before its steps were counted")
        site.save()
        site.die()
        if self.disk.ending:
            site.gone_for_good = True
        else:
            self.within(1, 20, site.start)

    def operator_hears(self, hub: Hub, error: Exception) -> None:
        """The hub cannot decide. Somebody looks at the sites, and evicts those that are wrong."""
        self.judge.deny(not self.trouble, f"a halt without a reason: {error}")
        for round in list(hub.ledger.open.values()):
            able = [own for own in round.here.values() if not own.reason]
            if len({own.digest for own in able}) == 1:
                continue
            right = able[0].digest if able else None
            for wrong in [own.site for own in round.here.values() if own.digest != right]:
                hub.ledger.evict(wrong)
                hub.disk.contributions = {key: own for key, own in hub.disk.contributions.items() if key[1] != wrong}
                self.tell(wrong, None, "refused", "evicted")

    # The run

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done() and not self.judge.violations:
            self.now, _, what, arguments = heapq.heappop(self.queue)
            what(*arguments)

    def run(self) -> "Judge":
        """Runs all faults, then a quiet time in which everything has to be as it was, then the end of the run."""
        self.run_until(lambda: not self.left_faults)
        self.slow_until = self.share_not_finite = 0.0
        self.flips.clear()
        self.hub.go_on()
        if self.hub.dead or not self.hub.disk.is_real:
            self.hub.dead = True
            self.hub_starts(self.disk, None)
        self.quiet_records = []
        for site in self.sites.values():
            site.does_wrong = False
            site.go_on()
            self.heal(site)
            site.start()
        until = self.now + QUIET
        self.run_until(lambda: self.now > until)
        # Nobody may have a state from which the run can go on, and hub or sites have said so to people.
        said = self.judge.counts["nobody has a state"] or self.judge.counts["cannot be made again"]
        donor = isinstance(self.hub.ledger.source("nobody", self.now), str)
        if said and not donor and not any(site.alive and site.follower.follows for site in self.sites.values()):
            self.judge.counts["the run waits for an operator"] += 1
            return self.judge
        self.judge.quiet(self)
        self.hub.end()
        end = self.now + ENDING
        self.run_until(lambda: self.now > end or all(site.gone_for_good for site in self.sites.values()))
        self.judge.ended(self)
        return self.judge


# The judge


@dataclass
class Sent:
    """What was launched, as it really was."""

    ids: list[int]
    lineage: str
    digest: int
    local: np.ndarray
    acknowledged_by: Hub | None = None


class Judge:
    def __init__(self) -> None:
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.sent: dict[Contribution, Sent] = {}
        self.made: dict[str, int] = {}
        self.disks: dict[str, Disk] = {}

    def deny(self, happened: object, what: str) -> None:
        if happened:
            self.violations.append(what)

    def launched(self, site: Site, own: Contribution, part: Part) -> None:
        ids, values = part.held, part.values
        self.sent[own] = Sent(list(ids), values.lineage, values.digest, part.local.copy())
        self.deny(own.weight != len(ids) * site.samples, f"{site.name} weighs {own.weight} for {len(ids)} steps")
        call = site.follower.fragments[own.fragment].call
        is_last = call is not None and call.final
        early = len(ids) < site.world.terms.least_steps and not site.finishing and not is_last
        self.deny(early, f"{site.name} launched after {len(ids)} steps")

    def lands(self, site: Site, record: Record, landing: MergeAction, new: Values) -> None:
        """Looks at a landing before the site does to its values what it says."""
        p, part, deny = record.fragment, site.parts[record.fragment], self.deny
        old, flight = part.values, part.flight or []
        rounds = self.disks[record.key].counted[site.name, p]
        counted = {step for step in part.steps if rounds.get(step, 1 << 60) <= record.round}
        where = f"{site.name}, round {record.round} of {p}"
        is_other = old.lineage != record.previous
        if landing is MergeAction.REFUSE:
            deny(old.digest == record.digest, f"{where}: refused what was right")
            deny(is_other, f"{where}: nearly landed a record of another history")
            return
        deny(is_other or old.digest != record.digest, f"silent divergence: {where} has another history or values")
        if not site.was_wrong:
            made = self.made.setdefault(record.key, new.digest)
            deny(made != new.digest, f"silent divergence: {where} made other values of the same record")
        if landing is MergeAction.MIX:
            deny(not flight or not set(flight) <= counted, f"{where}: lost a flight that nobody counted")
        if landing is MergeAction.DROP:
            deny(not flight or counted & set(flight), f"{where}: drops what was counted, or nothing")
        if landing is MergeAction.CARRY:
            deny(counted, f"{where}: carries {len(counted)} steps that were counted")
        if record.final:
            mean = np.mean([self.sent[own].local for own in record.counted], axis=0)
            # An outer parameter that a flipped bit has made huge leaves little of a float32.
            lost = 2.0**-20 * np.abs(old.outer)
            deny(not (np.abs(new.outer - mean) <= 2.0**-8 * np.abs(mean) + lost).all(), f"{where}: no exact mean")
        elif landing is MergeAction.TAKE and part.finite:
            mine = record.of(site.name)
            if mine is None or self.sent[mine].ids == part.flight:
                deny(True, f"{where}: dropped what it holds")
            else:
                self.loses(site, p, mine, where)

    def begins_again(self, site: Site, p: int, life: str) -> None:
        """Looks at what is dropped because an earlier life has launched it, before it is."""
        launches = [own for own in self.sent if (own.fragment, own.site, own.life) == (p, site.name, life)]
        self.loses(site, p, max(launches, key=lambda own: own.round), f"{site.name}, a new life")

    def loses(self, site: Site, p: int, launch: Contribution, where: str) -> None:
        """What is dropped because a launch counts, and was trained after it, is not in it, and is lost."""
        after = [step for step in site.parts[p].steps if step > max(self.sent[launch].ids, default=0)]
        self.deny(after and site.world.sites_join and not site.misled, f"{where}: loses {len(after)} steps of {p}")

    def weighs(self, site: Site) -> None:
        """Compares what the rules say that a site holds with what it does hold."""
        for own, part in zip(site.follower.fragments, site.parts, strict=True):
            steps = own.steps + (own.flight.steps if own.flight else 0)
            self.deny(steps != len(part.steps), f"{site.name} holds {len(part.steps)} steps, and says {steps}")

    def recorded(self, disk: Disk, hub: Hub, record: Record) -> None:
        where = f"{'' if disk.is_real else 'backup: '}round {record.round} of {record.fragment}"
        self.disks[record.key] = disk
        for own in record.counted:
            sent, counted = self.sent.get(own), disk.counted[own.site, own.fragment]
            if sent is None:
                self.violations.append(f"{where} counts what {own.site} has not contributed")
                return
            other = sent.lineage != record.previous or sent.digest != record.digest
            self.deny(other, f"silent divergence: {where} counts another history or values")
            self.deny(counted.keys() & set(sent.ids), f"{where} counts steps of {own.site} twice")
            counted.update(dict.fromkeys(sent.ids, record.round))
        sites = {own.site for own in record.counted} | {entry.site for entry in record.left_out}
        self.deny(len(sites) < self.fewest(hub), f"{where} was closed with {len(sites)} sites")
        for (p, site), own in disk.contributions.items():
            lost = p == record.fragment and own.round == record.round and site not in sites
            acknowledged = self.sent[own].acknowledged_by is hub
            self.deny(lost and acknowledged, f"{where} forgot what {site} had contributed")
        for entry in record.left_out:
            left = disk.contributions.get((record.fragment, entry.site))
            wrong = left is None or not left.finite or not (left.weight or left.exact)
            wrong = wrong or self.sent[left].digest != record.digest  # type: ignore[index]
            self.deny(not wrong, f"{where} leaves {entry.site} out: {entry.reason}")

    @staticmethod
    def living(hub: Hub) -> list[str]:
        """The sites that have beaten within a lease, follow, and are near enough."""
        now, lease, closed = hub.world.now, hub.world.terms.lease, hub.ledger.closed
        return [
            site
            for site, (time, _, follows, applied) in hub.beats.items()
            if follows
            and site in hub.ledger.members
            and time + lease > now
            and all(last.round - own <= RETENTION for last, own in zip(closed, applied, strict=True))
        ]

    def fewest(self, hub: Hub) -> int:
        """How many make a round, at least: a number, or half of those who are there."""
        quorum = hub.world.terms.quorum
        return quorum if isinstance(quorum, int) else (len(self.living(hub)) + 1) // 2

    def closes(self, hub: Hub) -> None:
        """Looks, after the hub closed what was due, for rounds that are open for too long."""
        now, ledger, terms = hub.world.now, hub.ledger, hub.world.terms
        for p, round in ledger.open.items():
            able = [own for own in round.here.values() if not own.reason]
            if not able or len(round.here) < self.fewest(hub) or len({own.digest for own in able}) > 1:
                continue
            # For the time of a lease a hub that was started waits for those before, also to know how many there are.
            settled = now > hub.started + terms.lease
            is_last = hub.disk.ending and all(own.exact or own.reason for own in round.here.values())
            over = not is_last and now > min(round.arrived.values()) + terms.grace
            over = over and (settled or isinstance(terms.quorum, int))
            alone = settled and all(site in round.arrived for site in self.living(hub))
            # What has just changed is seen by the next tick.
            hub.overdue[p] = hub.overdue[p] + 1 if over or alone else 0
            why = "beyond the grace" if over else "for somebody who is not there"
            self.deny(hub.overdue[p] > 2, f"round {ledger.closed[p].round + 1} of {p} is open {why}")

    def quiet(self, world: World) -> None:
        records, fragments = world.quiet_records or [], world.terms.fragments
        self.deny(len(records) / fragments < QUIET / 6, f"only {len(records)} records while nothing was wrong")
        later = records[len(records) // 2 :]
        alive = [site for site in world.sites.values() if site.alive]
        for site in alive:
            pairs = zip(world.hub.ledger.closed, site.follower.fragments, strict=True)
            behind = max(closed.round - own.applied.round for closed, own in pairs)
            self.deny(behind > 2, f"{site.name} is {behind} rounds behind")
            self.deny(not site.follower.follows, f"{site.name} does not follow at the end")
            # Who can answer a call within the grace counts, also at half the speed of the others.
            prompt = site.calm_since < world.now - QUIET + 1 and site.speed <= 0.3 and world.terms.grace >= 0.65
            share = sum(own.of(site.name) is not None for own in later) / max(1, len(later))
            self.deny(prompt and not site.finishing and share < 0.75, f"{site.name} counts in {share:.0%}")
        held: dict[str, bytes] = {}
        for site in alive:
            for own, part in zip(site.follower.fragments, site.parts, strict=True):
                values = part.values.outer.tobytes()
                same = held.setdefault(f"{own.fragment} {own.applied.key}", values) == values
                self.deny(not same, f"silent divergence: {site.name} holds other values of {own.fragment}")

    def ended(self, world: World) -> None:
        if self.violations:
            return
        left = [site.name for site in world.sites.values() if not site.gone_for_good]
        self.deny(left, f"{left} have not come to the end of the run")
        for p in range(world.terms.fragments):
            ends = {site.parts[p].values.outer.tobytes() for site in world.sites.values()}
            self.deny(len(ends) > 1, f"silent divergence: the run ended with {len(ends)} values of fragment {p}")
            self.deny(not world.disk.chains[p][-1].final, f"the last record of fragment {p} is not final")

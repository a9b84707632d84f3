"""The trial: a hub and four sites in virtual time, a network that loses and delays, faults by a
seed, and a judge.

Coordinator, ledger, journal and follower are the real ones; around them are arithmetic on a few
float32 values, and messages that come and go. The judge shares no code with the rules, and writes
down what must not be: it knows of every trained step whose it is, and of all outer values the key
of the last record that made them (`lineage`), whatever sites believe. Bit flips and wrong
arithmetic change values, never the lineage.
"""

import heapq
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from lightning_sdiloco.algorithm.schedule import DenseBeginning
from lightning_sdiloco.errors import AgreementError, Malformed, Refused
from lightning_sdiloco.federation import ledger, state_requests
from lightning_sdiloco.federation.codec import encoded, key_of, plain
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.keys import Peer
from lightning_sdiloco.federation.ledger import Ledger
from lightning_sdiloco.federation.messages import (
    Call,
    Contribution,
    Event,
    Heartbeat,
    Hello,
    Payload,
    Position,
    Record,
    Recorded,
    SiteEvent,
    Snapshot,
    StateArrived,
    StateHeader,
    StateOffered,
    Waiting,
    Welcome,
    read_event,
)
from lightning_sdiloco.federation.run_config import RETENTION, ChosenQuorum, Terms
from lightning_sdiloco.federation.store import MEMORY, InMemoryStore, SQLiteLedger
from lightning_sdiloco.federation.wire import HubError, Missing
from tests.federation.scripted import RUN, Part, ScriptedSite, Values, first_values, run_config

FAULTS = (
    *("kill",) * 3,
    *("stop", "cut", "cut_up", "cut_down", "slow_network") * 2,
    *("hub_kill", "hub_stop"),
    *("old_ledger", "old_checkpoint", "lost_disk", "leave"),
    *("flip_outer", "flip_payload", "flip_record", "flip_state", "flip_checkpoint"),
    *("wrong_arithmetic", "not_finite"),
)
QUIET = 40.0
ENDING = 40.0
LEAST = 0.5
TICK = 0.1
BEAT = 0.5
UNHEARD = 2.0
# Times of a hub that are short beside those of the trial.
SHORT = {"_PATIENCE": 2.0, "_SENDING": 2.0}


@lru_cache(1 << 12)
def said(kind: str, body: bytes) -> Any:
    return read_event(Event(kind, {}, body))


class Process:
    """Hears what arrives: later if it is stopped, and never if it is dead."""

    alive = True
    stopped = False

    def __init__(self) -> None:
        self.unread: list[tuple[Any, ...]] = []

    def arrive(self, *message: Any) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.unread.append(message)
        else:
            self.takes(*message)

    def takes(self, *message: Any) -> None:
        raise NotImplementedError

    def go_on(self) -> None:
        self.stopped = False
        unread = self.unread
        self.unread = []
        for message in unread:
            self.arrive(*message)


class Connection:
    """What an incarnation of a site says goes over the network of its world."""

    def __init__(self, machine: "Site", incarnation: str) -> None:
        self._machine = machine
        self.site = machine.name
        self.incarnation = incarnation

    def hello(self, follower: Follower) -> None:
        self._machine.world.send(self._machine, "hello", follower.hello(RUN))

    def heartbeat(self, follower: Follower) -> None:
        self._machine.world.send(self._machine, "heartbeat", follower.heartbeat())

    def __getattr__(self, what: str) -> Callable[..., None]:
        return partial(self._machine.world.send, self._machine, what)


class Site(ScriptedSite, Process):
    """A site with a disk for checkpoints, and faults."""

    def __init__(self, world: "World", name: str, speed: float, samples: int) -> None:
        Process.__init__(self)
        self.world = world
        self.name = name
        self.speed = speed
        self.samples = samples
        self.alive = self.cut_up = self.cut_down = self.gone_for_good = False
        self.checkpoints: list[Any] = []
        self.incarnations = self.turns = 0
        self.calm_since = 0.0

    # Lives

    def start(self) -> None:
        if self.alive or self.gone_for_good:
            return
        world = self.world
        self.incarnations = self.incarnations + 1
        incarnation = f"{int(self.name[1:]):04x}{self.incarnations:012x}"
        first = [first_values(p, world.run_config.key) for p in range(world.terms.fragments)]
        ScriptedSite.__init__(
            self, Connection(self, incarnation), world.run_config, first, world.late
        )
        self.incarnation = incarnation
        self.alive = True
        self.stopped = False
        self.was_wrong = False
        self.does_wrong = False
        self.finishing = self.broken = self.waits = self.misled = self.forgot = False
        self.joined = not world.sites_join
        self.heard_at = self.waited_since = self.calm_since = world.now
        self.unread.clear()
        while self.checkpoints and not self.load():
            self.checkpoints.pop()
        self.connection.hello(self.follower)
        self.trains_in(self.speed)
        world.after(BEAT, self.heartbeat, incarnation)

    def die(self) -> None:
        if self.alive:
            self.alive = self.stopped = False
            if not self.cut_up and self.world.random.random() < 0.9:
                self.world.send(self, "leave")

    def go_on(self) -> None:
        if self.stopped and self.alive:
            self.calm_since = self.world.now
            self.waited_since = self.world.now
            super().go_on()
            self.trains_in(self.speed)

    @property
    def is_well(self) -> bool:
        return self.alive and not self.stopped and not self.cut_up and not self.cut_down

    def halt(self, error: Exception) -> None:
        """Ends with an error for people; somebody starts it again, without what led to it."""
        self.checkpoints.clear()
        self.die()
        if "cannot be restored" in str(error):
            self.world.operator_rolls_back()
        self.world.after(2.0, self.start)

    def save(self) -> None:
        if all(own.digest is not None for own in self.follower.fragments):
            saved = deepcopy((self.follower.state_dict(), self.parts, self.at, self.forgot))
            self.checkpoints = [*self.checkpoints[-4:], saved]

    def load(self) -> bool:
        state, parts, at, misled = deepcopy(self.checkpoints[-1])
        try:
            self.follower.load_state_dict(state, [part.values.digest for part in parts])
        except ValueError:
            return False
        self.parts = parts
        self.at = at
        self.misled = misled
        return True

    # What it hears

    def heartbeat(self, incarnation: str) -> None:
        if not self.alive or incarnation != self.incarnation:
            return
        if not self.stopped:
            if self.world.now - self.heard_at > UNHEARD:
                self.follower.lose(self.world.now)
                self.broken = True
            if self.broken:
                self.broken = False
                self.connection.hello(self.follower)
            for own in self.follower.outstanding():
                if self.world.random.random() < 0.3:
                    self.contribute(own)
            self.asks()
            self.world.judge.weighs(self)
        self.world.after(BEAT, self.heartbeat, incarnation)

    def takes(self, *message: Any) -> None:
        incarnation, *events = message
        if incarnation != self.incarnation:
            return
        self.heard_at = self.world.now
        try:
            for event in events:
                if self.alive:
                    self.takes_event(event)
        except AgreementError as error:
            if self.world.hub.disk.is_real:
                self.halt(error)
            else:
                # It refuses the hub and trains on its own: an operator will look after that hub.
                self.follower.reachable = False

    def takes_event(self, event: Event) -> None:
        if event.kind == "refused":
            self.broken = True
            if b"evicted" in event.body:
                self.halt(Refused(event.body.decode()))
        if event.kind in ("refused", "heard"):
            return
        heard = said(event.kind, event.body)
        get = self.world.disk.store.get
        try:
            if isinstance(heard, Recorded):
                keys = [payload.key for own in heard.record.counted for payload in own.payloads]
                heard = Recorded(heard.record, {key: get(key) for key in keys})
            elif isinstance(heard, StateOffered):
                came = [Values(*pickle.loads(get(part.key))) for part in heard.parts]
                if self.world.flips_now("flip_state"):
                    index = self.world.random.randrange(len(came))
                    came[index] = came[index]._replace(outer=self.world.flipped(came[index].outer))
                heard = StateArrived(
                    heard.header, tuple(pickle.dumps(tuple(own)) for own in came), heard.source
                )
        except Missing:
            if isinstance(heard, StateOffered):
                return
        self.hears(heard)  # type: ignore[arg-type]

    def hears(self, event: SiteEvent) -> None:
        super().hears(event)
        if isinstance(event, Waiting) and "no site has a state" in event.why:
            self.finds_nobody()

    def finds_nobody(self) -> None:
        self.without = ()

    def begins_again(self, p: int, welcome: Welcome) -> None:
        self.world.judge.begins_again(self, p, dict(welcome.standing)[p])

    def can_give(self) -> bool:
        return super().can_give() and self.digests() == [
            own.digest for own in self.follower.fragments
        ]

    def takes_over(self, header: StateHeader, came: list[Values], source: str) -> None:
        # Wrong values: until all has landed again, a checkpoint does not say what was launched
        # before.
        self.forgot = self.joined
        try:
            super().takes_over(header, came, source)
        except Refused:
            # If one does not answer, another one is asked.
            self.without = (source,)
            return
        for part, values, digest in zip(self.parts, came, header.digests, strict=True):
            damaged = part.values is values and values.digest != digest
            self.world.judge.deny(damaged, f"{self.name} took over a damaged state")
        self.world.judge.weighs(self)

    # Training

    def trains_in(self, seconds: float) -> None:
        # Who was stopped for a moment has its next turn twice, and takes the later one.
        self.turns += 1
        self.world.after(seconds, self.lives_on, self.turns)

    def lives_on(self, turn: int) -> None:
        if not self.alive or self.stopped or turn != self.turns:
            return
        follower = self.follower
        world = self.world
        self.forgot = self.forgot and follower.lag > 0
        joins = (
            follower.reachable
            and follower.follows
            and all(own.has_joined for own in follower.fragments)
        )
        self.joined = self.joined or joins
        if self.joined and not self.waits and not self.finishing:
            self.train()
        try:
            self.turn()
        except AgreementError as error:
            self.halt(error)
            return
        if not self.waits:
            self.waited_since = world.now
        self.waits = follower.waits(self.at, world.now) > 0.0
        if not self.waits:
            waited = world.now - self.waited_since
            world.judge.deny(
                waited > world.terms.longest_wait + 0.3,
                f"{self.name} did not train for {waited:.1f} s",
            )
            if self.at % 20 == 0:
                self.save()
        if follower.finished:
            world.left(self)
        else:
            self.trains_in(0.1 if self.waits else self.speed)

    def gradient(self, part: Part) -> np.ndarray:
        gradient = super().gradient(part)
        if self.world.random.random() < self.world.share_not_finite:
            gradient[0] = np.nan
        return gradient

    def launches(self, sent: Contribution, part: Part) -> None:
        self.world.judge.launched(self, sent, part)

    def stepped(self, record: Record, old: Values, payloads: Any) -> Values:
        new = super().stepped(record, old, payloads)
        if self.does_wrong:
            new.outer[0] = np.nextafter(new.outer[0], np.float32(9))
            self.does_wrong = False
            self.was_wrong = True
        return new

    def lands(self, record: Record, landing: MergeAction, new: Values) -> None:
        self.world.judge.lands(self, record, landing, new)


# A hub


class Disk:
    """What is durable: a journal and a store; for the judge also which trained steps its records
    have counted.
    """

    def __init__(self, store: InMemoryStore, is_real: bool = True) -> None:
        self.journal = Durable(MEMORY)
        self.store = store
        self.is_real = is_real
        # Each with its round, by site and fragment.
        self.counted: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)

    def without_the_last(self, number: int, steps: dict[Contribution, "Sent"]) -> "Disk":
        """What a backup of a while ago holds."""
        backup = Disk(self.store, is_real=False)
        notes = self.journal.notes()
        oldest = min(name for name in notes if name.startswith("snapshot/"))
        backup.journal.note({name: notes[name] for name in ("run_config", oldest)})
        for seq, text in self.journal.read():
            if seq <= self.journal.last - number:
                backup.journal.append(seq, text)
                for own in said("record", text).record.counted:
                    backup.counted[own.site, own.fragment].update(
                        dict.fromkeys(steps[own].ids, own.round)
                    )
        return backup


class Durable(SQLiteLedger):
    hub: Any = None  # that writes to it

    def append(self, seq: int, record: Any, notes: Any = None) -> None:
        super().append(seq, record, notes)
        hub = self.hub
        if hub:
            made = Record.from_bytes(record)
            hub.world.judge.recorded(hub, made)
            if hub.world.quiet_records is not None:
                hub.world.quiet_records.append(made)


class Hub(Process):
    """One start of a hub."""

    def __init__(self, world: "World", disk: Disk) -> None:
        super().__init__()
        self.world = world
        self.disk = disk
        self.started = world.now
        self.sessions: dict[str, str] = {}
        # For the judge: when a site has beaten, which incarnation, whether it follows, and what it
        # has applied.
        self.heartbeats: dict[str, tuple[float, str, bool, tuple[int, ...]]] = {}
        self.overdue: dict[int, int] = defaultdict(int)
        disk.journal.hub = self
        self.coordinator = Coordinator(RUN, disk.journal, disk.store, clock=lambda: world.now)
        self.coordinator.start(self.tell)
        self.acknowledged = {
            (p, own.site): own
            for p, at in self.ledger.open.items()
            for own in at.contributions.values()
        }
        world.after(TICK, self.ticks)

    @property
    def ledger(self) -> Ledger:
        return self.coordinator.ledger

    def tell(self, event: Event, to: Any = None) -> None:
        self.world.judge.counts["no site has a state"] += b"no site has a state" in event.body
        for site, incarnation in self.sessions.items():
            if to is None or site in to:
                self.world.tell(site, incarnation, event)

    def ticks(self) -> None:
        if not self.alive:
            return
        if not self.stopped:
            self.close()
            self.world.judge.closes(self)
            if self.disk.is_real and self.world.random.random() < 0.02:
                self.coordinator.store.retain(self.coordinator._needed(self.ledger.kept_from))
        self.world.after(TICK, self.ticks)

    def close(self) -> None:
        self.coordinator.tick()
        if self.alive and self.coordinator.trouble:
            self.world.operator_hears(self, self.coordinator.trouble)
            self.coordinator.tick()

    def takes(self, *message: Any) -> None:
        site, incarnation, what, arguments = message
        try:
            getattr(self, f"on_{what}")(site, incarnation, *arguments)
        except (Refused, HubError) as error:
            self.world.tell(site, incarnation, Event("refused", {}, str(error).encode()))
        self.close()

    def on_hello(self, site: str, incarnation: str, hello: Hello) -> None:
        told = list(
            self.coordinator.hello(Peer("site", site, incarnation), {"hello": plain(hello)})
        )
        self.sessions[site] = incarnation
        _, before, follows, _ = self.heartbeats.get(site, (0, "", False, ()))
        applied = tuple(own.round for own in hello.applied)
        self.heartbeats[site] = (
            self.world.now,
            incarnation,
            follows and before == incarnation,
            applied,
        )
        # Who hears from a hub that does not know all may lose what it trains until it hears from
        # another one.
        self.world.sites[site].misled |= self is not self.world.hub or not self.disk.is_real
        self.world.tell(site, incarnation, *(event for event in told if event.kind != "record"))
        self.world.tell(
            site, incarnation, *(event for event in told if event.kind == "record"), reliably=True
        )

    def on_heartbeat(self, site: str, incarnation: str, heartbeat: Heartbeat) -> None:
        self.coordinator.heartbeat(Peer("site", site, incarnation), {"heartbeat": plain(heartbeat)})
        self.heartbeats[site] = (self.world.now, incarnation, heartbeat.follows, heartbeat.applied)
        self.world.tell(site, incarnation, Event("heard", {}))

    def on_contribute(
        self, site: str, incarnation: str, own: Contribution, blobs: dict[str, bytes]
    ) -> None:
        for blob in blobs.values():
            about = {"kind": "payload"}
            self.coordinator.admit(Peer("site", site, incarnation), about, key_of(blob), len(blob))
            self.coordinator.stored(
                Peer("site", site, incarnation), about, self.disk.store.put(blob), len(blob)
            )
        if self.coordinator.contribute(own, incarnation) == "open":
            self.acknowledged[own.fragment, own.site] = own
            if own.incarnation == incarnation:
                # A launch of this incarnation: it follows.
                at, before, _, applied = self.heartbeats[site]
                self.heartbeats[site] = (at, before, True, applied)

    def on_skip(self, site: str, incarnation: str, call: Call) -> None:
        self.coordinator.call(Peer("site", site, incarnation), "skip", {}, call.to_bytes())

    def on_leave(self, site: str, incarnation: str) -> None:
        self.coordinator.gone(Peer("site", site, incarnation))
        if site not in self.ledger.members:
            self.heartbeats.pop(site, None)
            self.sessions.pop(site, None)

    def on_ask(self, site: str, incarnation: str, without: tuple[str, ...]) -> None:
        self.coordinator.call(
            Peer("site", site, incarnation), "state", {"without": list(without)}, b""
        )

    def on_give(
        self, site: str, incarnation: str, request: str, header: StateHeader, parts: list[bytes]
    ) -> None:
        named = [Payload(self.disk.store.put(part), len(part)) for part in parts]
        self.coordinator.give(site, request, header, named)


# The world


class World:
    def __init__(self, seed: int, faults: int = 50) -> None:
        self.random = random = Random(seed)
        self.now = 0.0
        self.numbers = count()
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.judge = Judge()
        self.left_faults = faults
        self.slow_until = 0.0
        self.share_not_finite = 0.0
        self.trouble = False
        self.ending = False
        self.flips: set[str] = set()
        grace = random.choice([0.3, 0.6, 1.5])
        quorum: int | ChosenQuorum = random.choice([1, 1, 2])
        if seed // 4 % 4 == 3:
            quorum = ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": LEAST})
        dense = DenseBeginning(5, 3) if seed % 10 == 3 else None
        self.terms = Terms(3, 8, 2, grace, lease=3.0, quorum=quorum, dense_beginning=dense)
        # Sites with a loop of their own may begin to train before the hub has let them in.
        self.sites_join = seed // 2 % 4 != 0
        self.late = MergeAction.DROP if seed // 16 % 2 else MergeAction.CARRY
        self.run_config = run_config(self.terms)
        self.quiet_records: list[Record] | None = None
        self.disk = Disk(InMemoryStore())
        first = [first_values(p, self.run_config.key) for p in range(self.terms.fragments)]
        parts = [
            (self.disk.store.put(blob), len(blob))
            for blob in (pickle.dumps(tuple(own)) for own in first)
        ]
        header = StateHeader(
            (Position(0, self.run_config.key),) * len(first), tuple(own.digest for own in first)
        )
        snapshot = encoded(plain(Snapshot(header, tuple(Payload(*part) for part in parts))))
        self.disk.journal.note(
            {"run_config": self.run_config.to_bytes(), "snapshot/000000": snapshot}
        )
        self.hub = Hub(self, self.disk)
        speeds = [0.15, 0.15, 0.3, random.choice([0.15, 0.6])]
        self.sites = {
            f"s{i}": Site(self, f"s{i}", speed, random.choice([1, 2, 4]))
            for i, speed in enumerate(speeds)
        }
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
        if what == "contribute" and self.flips_now("flip_payload"):
            arguments = (
                arguments[0],
                {key: self.flipped(blob) for key, blob in arguments[1].items()},
            )
        delays = [] if site.cut_up else self.delays()
        site.broken |= not delays
        for delay in delays:
            self.after(delay, self.hub.arrive, site.name, site.incarnation, what, arguments)

    def tell(self, name: str, incarnation: str, *events: Event, reliably: bool = False) -> None:
        """From the hub to an incarnation of a site."""
        site = self.sites[name]
        if site.cut_down:
            return
        if events and events[0].kind == "record" and self.flips_now("flip_record"):
            with suppress(Malformed):
                read_event(events[0]._replace(body=self.flipped(events[0].body)))
                self.judge.violations.append(f"{name} took a damaged record")
            site.broken = True
            return
        delays = [0.05 + 0.05 * self.random.random()] if reliably else self.delays()
        if site.alive:
            site.broken |= not delays
        for delay in delays:
            self.after(delay, site.arrive, incarnation, *events)

    # Faults

    def fault(self) -> None:
        if not self.left_faults:
            return
        self.left_faults -= 1
        kind = self.random.choice(FAULTS)
        site = self.random.choice(list(self.sites.values()))
        others = [
            own
            for own in self.sites.values()
            if own is not site and own.is_well and own.follower.follows
        ]
        if (
            kind
            in ("old_checkpoint", "lost_disk", "flip_outer", "flip_checkpoint", "wrong_arithmetic")
            and not others
        ):
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
                hub.alive = False
                self.within(0.1, 8, self.hub_starts, hub)
            case "hub_stop":
                hub.stopped = hub.alive
                self.within(0.1, 8, hub.go_on)
            case "old_ledger":
                # The hub is started with a backup; after a while somebody notices and starts it
                # with the real ledger.
                hub.alive = False
                lost = min(self.random.randint(1, 12), self.disk.journal.last + 1)
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
        site.broken = True
        site.calm_since = self.now

    def hub_starts(self, instead_of: Hub) -> None:
        if self.hub is instead_of and not instead_of.alive:
            self.hub = Hub(self, instead_of.disk)

    def restore(self, backup: Hub) -> None:
        backup.alive = False
        if not self.hub.disk.is_real:
            self.hub.alive = False
            self.hub = Hub(self, self.disk)

    def left(self, site: Site) -> None:
        """A site has trained all it had to, and all of it is counted; some come back."""
        ended = [own.ended for own in site.follower.fragments]
        uncounted = [
            part.steps for part, own_ended in zip(site.parts, ended, strict=True) if not own_ended
        ]
        self.judge.deny(any(uncounted), f"{site.name} left before its steps were counted")
        site.save()
        site.die()
        if self.ending:
            site.gone_for_good = True
        else:
            self.within(1, 20, site.start)

    def operator_hears(self, hub: Hub, trouble: str) -> None:
        """The hub cannot decide. Somebody looks at the sites, and evicts those that are wrong."""
        self.judge.deny(not self.trouble, f"a halt without a reason: {trouble}")
        for p, round in list(hub.ledger.open.items()):
            held = {own.digest for own in round.contributions.values() if not own.reason}
            if len(held) == 1:
                continue
            # Who looks finds out whose arithmetic is right, where one of them is.
            made = self.judge.made.get(hub.ledger.closed[p].key)
            right = made if made in held else next(iter(held), None)
            for wrong in [own.site for own in round.contributions.values() if own.digest != right]:
                hub.coordinator.call(Peer("operator", "boss", ""), "evict", {"who": wrong}, b"")
                hub.acknowledged = {
                    key: own for key, own in hub.acknowledged.items() if key[1] != wrong
                }

    def operator_rolls_back(self) -> None:
        """What the next round was measured against is gone with those who made it, and nobody can
        follow.
        """
        able = [
            site
            for site in self.sites.values()
            if site.alive and site.follower.follows and not site.follower.lag
        ]
        if able or not (self.hub.alive and self.hub.disk.is_real):
            return
        hub = self.hub
        disk = self.hub.disk
        firsts = [
            own.next_round
            for site in self.sites.values()
            for own in site.follower.fragments
            if own.refused
        ]
        with suppress(Refused):
            hub.coordinator.call(
                Peer("operator", "boss", ""), "rollback", {"round": min(firsts) - 1}, b""
            )
            self.judge.counts["rolled back"] += 1
            hub.acknowledged.clear()
            # A record that is gone may still land where it has arrived before: what it has counted,
            # it has.
            before = Disk(disk.store)
            before.counted = disk.counted
            disk.counted = defaultdict(dict)
            for (site, p), rounds in before.counted.items():
                last = hub.ledger.closed[p].round
                disk.counted[site, p] = {
                    step: round for step, round in rounds.items() if round <= last
                }
            self.judge.disks |= {
                key: before for key, own in self.judge.disks.items() if own is disk
            }

    # The run

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done() and not self.judge.violations:
            self.now, _, what, arguments = heapq.heappop(self.queue)
            what(*arguments)

    def run(self) -> "Judge":
        """Runs all faults, then a quiet time in which everything has to be as it was, then the end
        of the run.
        """
        patches = (
            mock.patch.multiple(state_requests, **SHORT),
            mock.patch.object(ledger, "SNAPSHOT_EVERY", 20),
        )
        with (
            patches[0],
            patches[1],
            mock.patch.object(Record, "from_bytes", lru_cache(1 << 12)(Record.from_bytes)),
        ):
            self.run_until(lambda: not self.left_faults)
            self.slow_until = self.share_not_finite = 0.0
            self.flips.clear()
            self.hub.go_on()
            if not (self.hub.alive and self.hub.disk.is_real):
                self.hub.alive = False
                self.hub = Hub(self, self.disk)
            self.quiet_records = []
            for site in self.sites.values():
                site.does_wrong = False
                site.go_on()
                self.heal(site)
                site.start()
            until = self.now + QUIET
            self.run_until(lambda: self.now > until)
            # Nobody may have a state from which the run can go on, and hub or sites have said so to
            # people.
            told = self.judge.counts["no site has a state"]
            donor = isinstance(self.hub.ledger.source("nobody", self.now), str)
            if (
                told
                and not donor
                and not any(site.alive and site.follower.follows for site in self.sites.values())
            ):
                self.judge.counts["the run waits for an operator"] += 1
                return self.judge
            self.judge.quiet(self)
            self.ending = True
            self.hub.coordinator.end()
            end = self.now + ENDING
            self.run_until(
                lambda: self.now > end or all(site.gone_for_good for site in self.sites.values())
            )
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
        ids = part.held
        values = part.values
        self.sent[own] = Sent(list(ids), values.lineage, values.digest, part.local.copy())
        self.deny(
            own.weight != len(ids) * site.samples,
            f"{site.name} weighs {own.weight} for {len(ids)} steps",
        )
        call = site.follower.fragments[own.fragment].call
        is_last = call is not None and call.final
        early = (
            len(ids) < site.world.terms.least_steps(own.round)
            and not site.finishing
            and not is_last
        )
        self.deny(early, f"{site.name} launched after {len(ids)} steps")

    def lands(self, site: Site, record: Record, landing: MergeAction, new: Values) -> None:
        """Looks at a landing before the site does to its values what it says."""
        p = record.fragment
        part = site.parts[record.fragment]
        deny = self.deny
        old = part.values
        flight = part.flight or []
        rounds = self.disks[record.key].counted[site.name, p]
        counted = {step for step in part.steps if rounds.get(step, 1 << 60) <= record.round}
        where = f"{site.name}, round {record.round} of {p}"
        is_other = old.lineage != record.previous
        if landing is MergeAction.REFUSE:
            deny(old.digest == record.digest, f"{where}: refused what was right")
            deny(is_other, f"{where}: nearly landed a record of another history")
            return
        deny(
            is_other or old.digest != record.digest,
            f"silent divergence: {where} has another history or values",
        )
        if not site.was_wrong:
            made = self.made.setdefault(record.key, new.digest)
            deny(
                made != new.digest,
                f"silent divergence: {where} made other values of the same record",
            )
        if landing is MergeAction.MIX:
            mine = record.of(site.name)
            # Who has trained nothing takes part in a round that was to be the last one.
            nothing = not flight and (mine is None or mine.weight)
            deny(
                nothing or not set(flight) <= counted, f"{where}: lost a flight that nobody counted"
            )
        if landing is MergeAction.DROP:
            deny(
                not flight or counted & set(flight), f"{where}: drops what was counted, or nothing"
            )
        if landing is MergeAction.CARRY:
            deny(counted, f"{where}: carries {len(counted)} steps that were counted")
        if record.final:
            mean = np.mean([self.sent[own].local for own in record.counted], axis=0)
            # An outer parameter that a flipped bit has made huge leaves little of a float32.
            lost = 2.0**-20 * np.abs(old.outer)
            deny(
                not (np.abs(new.outer - mean) <= 2.0**-8 * np.abs(mean) + lost).all(),
                f"{where}: no exact mean",
            )
        elif landing is MergeAction.TAKE and part.finite:
            mine = record.of(site.name)
            if mine is None or self.sent[mine].ids == part.flight:
                deny(True, f"{where}: dropped what it holds")
            else:
                self.loses(site, p, mine, where)

    def begins_again(self, site: Site, p: int, incarnation: str) -> None:
        """Looks at what is dropped because an earlier incarnation has launched it, before it is."""
        launches = [
            own
            for own in self.sent
            if (own.fragment, own.site, own.incarnation) == (p, site.name, incarnation)
        ]
        self.loses(
            site, p, max(launches, key=lambda own: own.round), f"{site.name}, a new incarnation"
        )

    def loses(self, site: Site, p: int, launch: Contribution, where: str) -> None:
        """What is dropped because a launch counts, and was trained after it, is not in it, and is
        lost.
        """
        after = [
            step for step in site.parts[p].steps if step > max(self.sent[launch].ids, default=0)
        ]
        self.deny(
            after and site.world.sites_join and not site.misled,
            f"{where}: loses {len(after)} steps of {p}",
        )

    def weighs(self, site: Site) -> None:
        """Compares what the rules say that a site holds with what it does hold."""
        for own, part in zip(site.follower.fragments, site.parts, strict=True):
            steps = own.steps + (own.flight.steps if own.flight else 0)
            self.deny(
                steps != len(part.steps),
                f"{site.name} holds {len(part.steps)} steps, and says {steps}",
            )

    def recorded(self, hub: Hub, record: Record) -> None:
        disk = hub.disk
        where = f"{'' if disk.is_real else 'backup: '}round {record.round} of {record.fragment}"
        self.disks[record.key] = disk
        for own in record.counted:
            sent = self.sent.get(own)
            counted = disk.counted[own.site, own.fragment]
            if sent is None:
                self.violations.append(f"{where} counts what {own.site} has not contributed")
                return
            other = sent.lineage != record.previous or sent.digest != record.digest
            self.deny(other, f"silent divergence: {where} counts another history or values")
            self.deny(counted.keys() & set(sent.ids), f"{where} counts steps of {own.site} twice")
            counted.update(dict.fromkeys(sent.ids, record.round))
        sites = {own.site for own in record.counted} | {entry.site for entry in record.left_out}
        self.deny(len(sites) < self.fewest(hub), f"{where} was closed with {len(sites)} sites")
        for (p, site), own in hub.acknowledged.items():
            lost = p == record.fragment and own.round == record.round and site not in sites
            self.deny(lost, f"{where} forgot what {site} had contributed")
        for entry in record.left_out:
            left = hub.acknowledged.get((record.fragment, entry.site))
            wrong = left is None or not left.finite or not (left.weight or left.exact)
            wrong = wrong or self.sent[left].digest != record.digest  # type: ignore[index]
            self.deny(not wrong, f"{where} leaves {entry.site} out: {entry.reason}")

    @staticmethod
    def living(hub: Hub) -> list[str]:
        """The sites that have beaten within a lease, follow, and are near enough."""
        now = hub.world.now
        lease = hub.world.terms.lease
        closed = hub.ledger.closed
        return [
            site
            for site, (time, _, follows, applied) in hub.heartbeats.items()
            if follows
            and site in hub.ledger.members
            and time + lease > now
            and all(
                last.round - own <= RETENTION for last, own in zip(closed, applied, strict=True)
            )
        ]

    def fewest(self, hub: Hub) -> int:
        """How many make a round, at least: a number, or half of those who are there."""
        quorum = hub.world.terms.quorum
        return quorum if isinstance(quorum, int) else (len(self.living(hub)) + 1) // 2

    def closes(self, hub: Hub) -> None:
        """Looks, after the hub closed what was due, for rounds that are open for too long."""
        now = hub.world.now
        ledger = hub.ledger
        terms = hub.world.terms
        for p, round in ledger.open.items():
            able = [own for own in round.contributions.values() if not own.reason]
            if (
                not able
                or len(round.contributions) < self.fewest(hub)
                or len({own.digest for own in able}) > 1
            ):
                continue
            # For the time of a lease a hub that was started waits for those before, also to know
            # how many there are.
            settled = now > hub.started + terms.lease
            is_last = hub.world.ending and all(
                own.exact or own.reason for own in round.contributions.values()
            )
            over = not is_last and now > min(round.arrived.values()) + terms.grace
            over = over and (settled or isinstance(terms.quorum, int))
            alone = settled and all(site in round.arrived for site in self.living(hub))
            # What has just changed is seen by the next tick.
            hub.overdue[p] = hub.overdue[p] + 1 if over or alone else 0
            why = "beyond the grace" if over else "for somebody who is not there"
            self.deny(
                hub.overdue[p] > 2, f"round {ledger.closed[p].round + 1} of {p} is open {why}"
            )

    def quiet(self, world: World) -> None:
        records = world.quiet_records or []
        fragments = world.terms.fragments
        self.deny(
            len(records) / fragments < QUIET / 6,
            f"only {len(records)} records while nothing was wrong",
        )
        later = records[len(records) // 2 :]
        alive = [site for site in world.sites.values() if site.alive]
        for site in alive:
            pairs = zip(world.hub.ledger.closed, site.follower.fragments, strict=True)
            behind = max(closed.round - own.applied.round for closed, own in pairs)
            self.deny(behind > 2, f"{site.name} is {behind} rounds behind")
            self.deny(not site.follower.follows, f"{site.name} does not follow at the end")
            # Who can answer a call within the grace counts, also at half the speed of the others.
            prompt = (
                site.calm_since < world.now - QUIET + 1
                and site.speed <= 0.3
                and world.terms.grace >= 0.65
            )
            share = sum(own.of(site.name) is not None for own in later) / max(1, len(later))
            self.deny(
                prompt and not site.finishing and share < 0.75, f"{site.name} counts in {share:.0%}"
            )
        held: dict[str, bytes] = {}
        for site in alive:
            for own, part in zip(site.follower.fragments, site.parts, strict=True):
                values = part.values.outer.tobytes()
                same = held.setdefault(f"{own.fragment} {own.applied.key}", values) == values
                self.deny(
                    not same, f"silent divergence: {site.name} holds other values of {own.fragment}"
                )

    def ended(self, world: World) -> None:
        if self.violations:
            return
        left = [site.name for site in world.sites.values() if not site.gone_for_good]
        self.deny(left, f"{left} have not come to the end of the run")
        for p in range(world.terms.fragments):
            ends = {site.parts[p].values.outer.tobytes() for site in world.sites.values()}
            self.deny(
                len(ends) > 1,
                f"silent divergence: the run ended with {len(ends)} values of fragment {p}",
            )
            self.deny(
                not world.hub.ledger.has_ended(p), f"the last record of fragment {p} is not final"
            )

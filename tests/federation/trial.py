"""The trial: a hub and its sites in virtual time, a network that loses, delays, reorders and cuts, a
disk that fills, fails and loses, faults by a seed, and a judge.

Coordinator, ledger, quorum, guard and follower are the real ones; around them are arithmetic on a
few float32 values, a disk in memory (`simulated_disk`), and messages that come and go. The judge
shares no code with the rules, and writes down what must not be: it knows of every trained step
whose it is, and of all outer values the key of the last record that made them (`lineage`), whatever
sites believe. Bit flips and wrong arithmetic change values, never the lineage. It looks after every
launch, landing, answer, record and start of a hub, and at the open rounds whenever the hub has done
what was due.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple

import numpy as np

from lightning_sdiloco.algorithm.schedule import DenseBeginning
from lightning_sdiloco.errors import AgreementError, Malformed, Refused
from lightning_sdiloco.federation import (
    coordinator,
    follower,
    ledger,
    lost_payloads,
    quorum,
    room,
    state_requests,
)
from lightning_sdiloco.federation.codec import decoded, encoded, plain, read
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.keys import Peer
from lightning_sdiloco.federation.ledger import Ledger, OpenRound
from lightning_sdiloco.federation.messages import (
    MOST_BYTES,
    Call,
    Called,
    Contribution,
    Event,
    Heartbeat,
    Hello,
    Payload,
    Position,
    Record,
    Recorded,
    RoundId,
    SiteEvent,
    Snapshot,
    StateArrived,
    StateHeader,
    StateOffered,
    Welcome,
    Welcomed,
    read_event,
)
from lightning_sdiloco.federation.remote import RecordQueue
from lightning_sdiloco.federation.run_config import ChosenQuorum, RunConfig, Terms
from lightning_sdiloco.federation.store import LedgerError
from lightning_sdiloco.federation.wire import Altered, HubError, Missing
from tests.federation.scripted import (
    RUN,
    Part,
    ScriptedSite,
    Values,
    first_values,
    known_key,
    run_config,
)
from tests.federation.simulated_disk import Crash, SimulatedDisk, SimulatedJournal, SimulatedStore

# Each as often as it happens beside the others.
FAULTS = (
    *("kill",) * 3,
    *("stop", "cut", "cut_up", "cut_down", "slow_network") * 2,
    *("lose", "lose", "twice", "late"),
    *("hub_kill", "hub_crash", "hub_crash", "hub_stop", "takeover"),
    *("full_disk", "failing_disk", "rot"),
    *("old_ledger", "old_checkpoint", "lost_disk", "leave"),
    *("flip_outer", "flip_payload", "flip_record", "flip_state", "flip_checkpoint"),
    *("wrong_arithmetic", "not_finite", "long_gradient"),
)
# They wait for the next message of their kind.
FLIPS_OF_MESSAGES = ("flip_payload", "flip_record", "flip_state")
# After these a site needs the state of another one.
NEED_A_DONOR = ("old_checkpoint", "lost_disk", "flip_outer", "flip_checkpoint", "wrong_arithmetic")
# After these the hub may have to ask an operator.
TROUBLE = ("flip_outer", "wrong_arithmetic", "not_finite", "long_gradient")
# Random walks in four dimensions sometimes end where they began, and then the guard calls the next
# outer gradient this many times as long as usual.
LONG_BY_CHANCE = 10.0
# Rounds for which payloads are kept: few, so that sites soon need a state.
RETENTION = 4
BEGIN = 1.0
FAULTY = 4.0
LONGEST_FAULT = 3.0
QUIET = 6.0
ENDING = 20.0
SETTLING = 2.5
LEAST = 0.5
BEAT = 0.4
UNHEARD = 1.0
LEASE = 1.5
# Seconds in which a hub tries again what had no room, and is asked again.
AGAIN = 2.5
# Seconds after which a hub has said that it has lost payloads, and after which an operator rolls
# the run back if nobody has them.
SAID = 3.0
HOPELESS = 4.0
# Troubles for which an operator evicts sites.
EVICTED_FOR = ("different outer parameters", "has finite values", "far too long")
OPERATOR = Peer("operator", "boss", "")
NOBODY = Peer("site", "nobody", "")
# A hub's answer to a heartbeat, as a connection hears it.
HEARD = Event("heard", {})


class Fault(NamedTuple):
    """A fault of a history.

    Attributes:
        time: When it happens, in seconds.
        kind: The name of a method of `Faults`, or of a flip.
        site: The name of the site that it happens to, if it happens to one.
        seconds: How long it lasts.
        amount: A number from 0 to 1 that decides what else there is to it.
    """

    time: float
    kind: str
    site: str
    seconds: float
    amount: float

    def __str__(self) -> str:
        return (
            f"{self.time:5.2f} s  {self.kind} {self.site}, for {self.seconds:.2f} s,"
            f" {self.amount:.2f}"
        )


def faults_of(seed: int, sites: int) -> list[Fault]:
    """Returns the faults of a seed, in the order of time."""
    random = Random(f"faults {seed}")
    faults = []
    for _ in range(random.randint(1, 8)):
        time = BEGIN + FAULTY * random.random()
        seconds = random.uniform(0.1, random.choice([1.0, LONGEST_FAULT]))
        site = f"s{random.randrange(sites)}"
        faults.append(Fault(time, random.choice(FAULTS), site, seconds, random.random()))
    return sorted(faults)


# Before a world gives records short texts.
real_text = Record.to_bytes


class Passed(NamedTuple):
    """An event that the hub passes on as an object: other tests read and write its text."""

    kind: str
    event: Any
    body: bytes = b""


def passed(event: Any) -> Any:
    return Passed(type(event).__name__, event)


def read_passed(hint: Any, value: Any, name: str) -> Any:
    return value if isinstance(value, Hello | Heartbeat) else read(hint, value, name)


class Process:
    """Receives what arrives: later if it is stopped, and never if it is dead."""

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
            self.receive(*message)

    def receive(self, *message: Any) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        self.stopped = False
        unread = self.unread
        self.unread = []
        for message in unread:
            self.arrive(*message)


class Connection:
    """Sends the calls of an incarnation of a site over the network of its world."""

    def __init__(self, machine: "Site", incarnation: str) -> None:
        self._machine = machine
        self.site = machine.name
        self.incarnation = incarnation

    def hello(self, follower: Follower) -> None:
        self._machine.life.hub = self._machine.world.hub
        self._machine.world.send(self._machine, "hello", follower.hello(RUN))

    def heartbeat(self, follower: Follower) -> None:
        self._machine.world.send(self._machine, "heartbeat", follower.heartbeat())

    def contribute(self, contribution: Contribution, blobs: dict[str, bytes]) -> None:
        self._machine.world.send(self._machine, "contribute", contribution, blobs)

    def skip(self, call: Call) -> None:
        self._machine.life.declined.add((call.fragment, call.round))
        self._machine.world.send(self._machine, "skip", call)

    def __getattr__(self, call: str) -> Callable[..., None]:
        return partial(self._machine.world.send, self._machine, call)


@dataclass
class Life:
    """The state of one incarnation of a site; a restart forgets it."""

    incarnation: str = ""
    peer: Peer = NOBODY
    # The hub that it is connected with: the one that it has greeted last.
    hub: "Hub | None" = None
    # The hub whose welcome has come: without one, the others' events are of no connection.
    welcomed_by: "Hub | None" = None
    heard_at: float = 0.0
    waited_since: float = 0.0
    has_joined: bool = False
    is_finishing: bool = False
    is_waiting: bool = False
    # The next heartbeat says hello first.
    link_is_broken: bool = False
    # It has heard a hub that does not know all, and so may lose what it trains.
    is_misled: bool = False
    # It took over a state: its checkpoints do not say what was launched before.
    forgot_launches: bool = False
    computes_wrongly: bool = False
    computed_wrongly: bool = False
    # Its next outer gradient is far too long.
    is_long: bool = False
    # Since when it lacks payloads that the hub should have.
    lacks_since: float | None = None
    # The records whose payloads are on their way.
    records: RecordQueue = field(default_factory=RecordQueue)
    # Since the last welcome, by fragment: the round that the hub has called; and the fragments and
    # rounds that the site has declined.
    called: dict[int, int] = field(default_factory=dict)
    declined: set[tuple[int, int]] = field(default_factory=set)


def copied(checkpoint: Any) -> Any:
    state, parts, inner_steps, forgot_launches = checkpoint
    return state, [part.copied() for part in parts], inner_steps, forgot_launches


class Site(ScriptedSite, Process):
    """A site with a disk for checkpoints, and faults."""

    def __init__(self, world: "World", name: str, speed: float, samples: int) -> None:
        Process.__init__(self)
        self.world = world
        self.name = name
        self.speed = speed
        self.samples = samples
        self.alive = False
        self.stopped = False
        self.cut_up = False
        self.cut_down = False
        self.gone_for_good = False
        self.checkpoints: list[Any] = []
        self.incarnations = 0
        self.turns = 0
        self.calm_since = 0.0
        self.life = Life()

    # Lives

    def start(self) -> None:
        if self.alive or self.gone_for_good:
            return
        world = self.world
        now = world.now
        self.incarnations += 1
        incarnation = f"{int(self.name[1:]):04x}{self.incarnations:012x}"
        connection = Connection(self, incarnation)
        ScriptedSite.__init__(self, connection, world.run_config, world.first_values(), world.late)
        has_joined = not world.sites_join
        peer = Peer("site", self.name, incarnation)
        self.life = Life(incarnation, peer, heard_at=now, waited_since=now, has_joined=has_joined)
        self.alive = True
        self.stopped = False
        self.calm_since = now
        self.unread.clear()
        while self.checkpoints and not self.load():
            self.checkpoints.pop()
        self.connection.hello(self.follower)
        self.schedule_turn(self.speed)
        world.after(BEAT, self.beat, incarnation)

    def die(self) -> None:
        if self.alive:
            self.alive = False
            self.stopped = False
            if not self.cut_up and self.world.random.random() < 0.9:
                self.world.send(self, "leave")

    def resume(self) -> None:
        if self.stopped and self.alive:
            self.calm_since = self.world.now
            self.life.waited_since = self.world.now
            super().resume()
            self.schedule_turn(self.speed)

    @property
    def is_well(self) -> bool:
        return self.alive and not self.stopped and not self.cut_up and not self.cut_down

    @property
    def follows(self) -> bool:
        return self.alive and self.follower.follows

    def halt(self, error: Exception) -> None:
        """Ends with an error for people; somebody starts it again, without what led to it."""
        self.checkpoints.clear()
        self.die()
        if "cannot be restored" in str(error):
            self.world.operator_rolls_back()
        self.world.note(f"{self.name} ends: {error}")
        self.world.judge.check_parting(self, error)
        self.world.after(1.0, self.start)

    def save(self) -> None:
        if any(progress.digest is None for progress in self.follower.fragments):
            return
        state = self.follower.state_dict()
        checkpoint = (state, self.parts, self.inner_steps, self.life.forgot_launches)
        self.checkpoints = [*self.checkpoints[-4:], copied(checkpoint)]

    def load(self) -> bool:
        state, parts, inner_steps, forgot_launches = copied(self.checkpoints[-1])
        try:
            self.follower.load_state_dict(state, [part.values.digest for part in parts])
        except ValueError:
            return False
        self.restore(parts, inner_steps)
        self.life.is_misled = forgot_launches
        return True

    # Heartbeats and events

    def beat(self, incarnation: str) -> None:
        if not self.alive or incarnation != self.life.incarnation:
            return
        if not self.stopped:
            if not self.follower.lacked_rounds:
                self.life.lacks_since = None
            elif self.life.lacks_since is None:
                self.life.lacks_since = self.world.now
            self.repair_link()
            is_quiet = self.world.quiet_records is not None
            for contribution in self.follower.outstanding():
                if self.world.random.random() < 0.3 or is_quiet:
                    self.contribute(contribution)
            self.report()
            self.world.judge.count_steps(self)
        self.world.after(BEAT, self.beat, incarnation)

    def repair_link(self) -> None:
        """Says hello again after a silence of the hub or a lost message."""
        life = self.life
        if self.world.now - life.heard_at > UNHEARD:
            self.follower.lose(self.world.now)
            life.link_is_broken = True
        if life.link_is_broken:
            life.link_is_broken = False
            self.connection.hello(self.follower)

    def receive(self, *message: Any) -> None:
        hub, incarnation, *events = message
        if incarnation != self.life.incarnation:
            return
        if hub is not self.life.hub:
            # A new hub does not know the connection; from an old one nothing arrives any more.
            self.life.link_is_broken |= events[0].kind == "refused"
            return
        self.life.heard_at = self.world.now
        if events[0].kind == "Welcomed":
            if self.life.welcomed_by is not hub:
                self.life.records.fetching.clear()
            self.life.welcomed_by = hub
        if self.life.welcomed_by is not hub and events[0].kind not in ("refused", "heard"):
            return
        try:
            for event in events:
                if self.alive:
                    self.receive_event(event)
        except AgreementError as error:
            self.part(error)

    def part(self, error: AgreementError) -> None:
        hub = self.life.welcomed_by
        if hub is None or hub.disk.is_real:
            self.halt(error)
        else:
            # It refuses the hub and trains on its own: an operator will look after that hub.
            self.follower.reachable = False

    def receive_event(self, event: Event) -> None:
        if event.kind == "refused":
            self.life.link_is_broken = True
            if b"evicted" in event.body:
                self.halt(Refused(event.body.decode()))
        if event.kind in ("refused", "heard"):
            return
        message: Any = event.event if isinstance(event, Passed) else read_event(event)
        if isinstance(message, Welcomed):
            self.life.records.welcome(message.welcome)
        if isinstance(message, Recorded):
            # Records are handled in the order in which their payloads come.
            self.life.records.fetching[message.record.key] = message.record
            world = self.world
            world.within(0.0, 0.05, self.receive_record, self.life.incarnation, message)
            return
        if isinstance(message, StateOffered):
            message = self.fetched(message)
        if message is not None:
            self.handle(message)

    def receive_record(self, incarnation: str, recorded: Recorded) -> None:
        if incarnation != self.life.incarnation or not self.alive:
            return
        if self.life.hub is not self.life.welcomed_by:
            return
        if self.stopped:
            self.world.within(0.0, 0.05, self.receive_record, incarnation, recorded)
            return
        if self.life.records.fetching.pop(recorded.record.key, None) is None:
            # It has come twice, or was rolled back.
            return
        try:
            self.handle(self.with_payloads(recorded))
        except AgreementError as error:
            self.part(error)

    def with_payloads(self, recorded: Recorded) -> Recorded:
        blobs = {}
        try:
            for contribution in recorded.record.counted:
                for payload in contribution.payloads:
                    blobs[payload.key] = self.fetch(payload.key, contribution)
        except (Missing, Altered):
            return Recorded(recorded.record, None)
        return Recorded(recorded.record, blobs)

    def fetch(self, key: str, contribution: Contribution | None = None) -> bytes:
        """Fetches a blob as a client does, which looks at its digest, and has its own in flight."""
        if contribution is not None and self.has_in_flight(contribution):
            return self.parts[contribution.fragment].payload
        blob = self.world.hub.store.read(key)
        if not self.is_sound(key, blob):
            raise Altered(f"blob {key} was altered.")
        return blob

    def holds(self, record: Record) -> bool:
        """Returns whether its contribution to a record is still in flight."""
        contribution = record.of(self.name)
        return contribution is not None and self.has_in_flight(contribution)

    def has_in_flight(self, contribution: Contribution) -> bool:
        flight = self.follower.fragments[contribution.fragment].flight
        if flight is None or flight.own.round != contribution.round:
            return False
        return flight.own is contribution or flight.own == contribution

    def is_sound(self, key: str, blob: bytes) -> bool:
        return known_key(blob) == key

    def fetched(self, offer: StateOffered) -> StateArrived:
        """The offered state, perhaps with a flipped bit; without its parts where one is gone."""
        world = self.world
        try:
            blobs = [self.fetch(part.key) for part in offer.parts]
        except (Missing, Altered):
            return StateArrived(offer.header, (), offer.source)
        if world.flips_now("flip_state"):
            index = world.random.randrange(len(blobs))
            flipped = world.with_flipped_bit(Values.from_bytes(blobs[index]))
            blobs[index] = flipped.to_bytes()
        return StateArrived(offer.header, tuple(blobs), offer.source)

    def handle(self, event: SiteEvent) -> None:
        if isinstance(event, Welcomed):
            self.life.called.clear()
            self.life.declined.clear()
        if isinstance(event, Called):
            self.life.called[event.call.fragment] = event.call.round
        super().handle(event)

    def before_beginning_again(self, fragment: int, welcome: Welcome) -> None:
        incarnation = dict(welcome.standing)[fragment]
        self.world.judge.check_beginning_again(self, fragment, incarnation)

    def can_give(self) -> bool:
        known_digests = [progress.digest for progress in self.follower.fragments]
        is_sound = self.digests() == known_digests
        if super().can_give() and not is_sound:
            self.world.judge.counts["a site says that its memory was changed"] += 1
        return super().can_give() and is_sound

    def take_over(self, header: StateHeader, state: list[Values], donor: str) -> None:
        # Wrong values: until all has landed again, a checkpoint does not say what was launched
        # before.
        self.life.forgot_launches = self.life.has_joined
        super().take_over(header, state, donor)
        judge = self.world.judge
        for part, values, digest in zip(self.parts, state, header.digests, strict=True):
            is_damaged = part.values is values and values.digest != digest
            judge.deny(is_damaged, f"{self.name} took over a damaged state")
        judge.count_steps(self)

    # Training

    def schedule_turn(self, seconds: float) -> None:
        # A site that was stopped for a moment has its next turn twice, and takes the later one.
        self.turns += 1
        self.world.after(seconds, self.take_turn, self.turns)

    def take_turn(self, turn: int) -> None:
        if not self.alive or self.stopped or turn != self.turns:
            return
        life = self.life
        life.forgot_launches = life.forgot_launches and self.follower.lag > 0
        life.has_joined = life.has_joined or self.joins()
        if life.has_joined and not life.is_waiting and not life.is_finishing:
            self.train()
        calls = self.calls_to_answer()
        try:
            self.act()
        except AgreementError as error:
            self.halt(error)
            return
        self.world.judge.check_answers(self, calls)
        self.world.judge.check_memory(self)
        self.wait_or_save()
        if self.follower.finished:
            self.world.let_leave(self)
        else:
            self.schedule_turn(0.1 if life.is_waiting else self.speed)

    def calls_to_answer(self) -> list[tuple[int, int]]:
        """Returns the fragments and rounds of calls that the site can launch for, or decline."""
        calls = list[tuple[int, int]]()
        for fragment, round in self.life.called.items():
            progress = self.follower.fragments[fragment]
            is_open = progress.lag <= 0 and round == progress.applied.round + 1
            if progress.can_launch and is_open:
                calls.append((fragment, round))
        return calls if self.follows and not self.life.is_finishing else []

    def joins(self) -> bool:
        follower = self.follower
        if not follower.reachable or not follower.follows:
            return False
        return all(progress.has_joined for progress in follower.fragments)

    def wait_or_save(self) -> None:
        world = self.world
        life = self.life
        if not life.is_waiting:
            life.waited_since = world.now
        life.is_waiting = self.follower.waits(self.inner_steps, world.now) > 0.0
        if life.is_waiting:
            return
        waited = world.now - life.waited_since
        if waited > world.terms.longest_wait + 0.5:
            world.judge.violations.append(f"{self.name} did not train for {waited:.1f} s")
        if self.inner_steps % 20 == 0:
            self.save()

    def gradient(self, part: Part) -> np.ndarray:
        gradient = super().gradient(part)
        if self.world.random.random() < self.world.share_not_finite:
            gradient[0] = np.nan
        if self.life.is_long:
            self.life.is_long = False
            gradient = gradient * np.float32(1e4)
            self.world.note(f"{self.name} launches an outer gradient that is too long")
        return gradient

    def norm_squared(self, gradient: np.ndarray) -> float:
        norm_squared = float(gradient @ gradient)
        return norm_squared if math.isfinite(norm_squared) else 0.0

    def before_launch(self, contribution: Contribution, part: Part) -> None:
        self.world.judge.check_launch(self, contribution, part)

    def before_contributing(self, contribution: Contribution, payload: bytes) -> None:
        self.world.judge.payloads[contribution.payloads[0].key] = payload
        if self.world.history is not None:
            round = f"round {contribution.round} of {contribution.fragment}"
            self.world.note(f"{self.name} launches {round}: {contribution.steps} steps")

    def stepped(self, record: Record, old: Values, payloads: Any) -> Values:
        new = super().stepped(record, old, payloads)
        if self.life.computes_wrongly:
            new.outer[0] = np.nextafter(new.outer[0], np.float32(9))
            self.life.computes_wrongly = False
            self.life.computed_wrongly = True
        return new

    def before_landing(self, record: Record, landing: MergeAction, new: Values) -> None:
        world = self.world
        if world.history is not None:
            round = f"round {record.round} of {record.fragment}"
            world.note(f"{self.name} lands {round}: {landing.value}")
        world.judge.check_landing(Landing(self, record, landing, new))

    def land(self, record: Record) -> None:
        self.world.judge.check_payloads(self, record)
        super().land(record)


# A hub


class Disk(SimulatedDisk):
    """The disk of a hub; for the judge also what the hub has promised, and which trained steps its
    records have counted.
    """

    def __init__(self, is_real: bool = True) -> None:
        super().__init__()
        self.is_real = is_real
        # Each with its round, by site and fragment.
        self.counted: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        # Contributions to which a hub has answered that it has them, by fragment and site.
        self.accepted: dict[tuple[int, str], Contribution] = {}
        # The records of this disk, by fragment and round.
        self.keys: dict[tuple[int, int], str] = {}

    def without_the_last(self, number: int, steps: dict[Contribution, "Sent"]) -> "Disk":
        """Returns a backup of a while ago."""
        backup = Disk(is_real=False)
        backup.blobs = self.blobs
        snapshots = [name for name in self.notes if name.startswith("snapshot/")]
        backup.notes = {name: self.notes[name] for name in ("run_config", *sorted(snapshots)[:1])}
        for seq in sorted(self.records)[: max(0, len(self.records) - number)]:
            backup.records[seq] = self.records[seq]
            record = Record.from_bytes(self.records[seq])
            backup.keys[record.fragment, record.round] = record.key
            for counted in record.counted:
                rounds = dict.fromkeys(steps[counted].ids, counted.round)
                backup.counted[counted.site, counted.fragment].update(rounds)
        return backup


class Beat(NamedTuple):
    """The last heartbeat of a site, for the judge."""

    time: float
    incarnation: str
    follows: bool
    applied: tuple[int, ...]


class Hub(Process):
    """One start of a hub."""

    def __init__(self, world: "World", disk: Disk) -> None:
        super().__init__()
        self.alive = True
        self.world = world
        self.disk = disk
        self.started = world.now
        # When it was started, or went on after it had been stopped.
        self.runs_since = world.now
        self.sessions: dict[str, Peer] = {}
        self.beats: dict[str, Beat] = {}
        # When its last message arrives at each site.
        self.arrivals: dict[str, float] = {}
        # Since when a round is open that should be closed, by fragment.
        self.overdue: dict[int, float] = {}
        # By fragment: the contributors and the sites that are there, as the judge saw them in the
        # status.
        self.shown: dict[int, tuple[list[str], list[str]]] = {}
        # Since when payloads are lost that nobody has.
        self.hopeless_since: float | None = None
        self.ticks = 0
        self.is_awake = False
        self.journal = SimulatedJournal(disk)
        self.journal.on_record = self.write_down
        # Sites fetch from any hub; one with a backup must not tidy what it does not know.
        age = LEASE if disk.is_real else None
        self.store = SimulatedStore(disk, lambda: world.now, age)
        journal: Any = self.journal
        store: Any = self.store
        self.coordinator = Coordinator(RUN, journal, store, clock=lambda: world.now)
        self.coordinator.start(self.tell, self.wake)
        self.acknowledged = dict(disk.accepted)
        for fragment, open_round in self.ledger.open.items():
            for contribution in open_round.contributions.values():
                self.acknowledged[fragment, contribution.site] = contribution
        world.note("a hub starts")
        world.judge.check_start(self)
        world.after(0.1, self.tick, 0)

    def write_down(self, text: bytes) -> None:
        record = Record.from_bytes(text)
        if self.world.history is not None:
            self.world.note(
                f"round {record.round} of {record.fragment} counts"
                f" {', '.join(counted.site for counted in record.counted)}"
                f"{''.join(f', not {out.site} ({out.reason})' for out in record.left_out)}"
            )
        self.world.judge.check_record(self, record)
        if self.world.quiet_records is not None:
            self.world.quiet_records.append(record)

    def wake(self) -> None:
        self.is_awake = True

    def crash(self) -> None:
        """Dies in the middle of a write, or between two; somebody starts it again."""
        self.world.note("the hub dies")
        self.alive = False
        if self.journal is self.disk.owner:
            self.disk.lose_unsynced()
        self.world.within(0.1, 2.0, self.world.restart_hub, self)

    def resume(self) -> None:
        if self.stopped:
            self.runs_since = self.world.now
        super().resume()

    @property
    def ledger(self) -> Ledger:
        return self.coordinator.ledger

    @property
    def serves_the_run(self) -> bool:
        return self.alive and self.disk.is_real

    def tell(self, event: Any, to: Any = None) -> None:
        judge = self.world.judge
        is_waiting = event.kind == "Waiting"
        judge.counts["no site has a state"] += is_waiting and "no site has" in event.event.why
        if event.kind == "record":
            judge.check_told(self, event.body)
        for site, peer in self.sessions.items():
            if to is None or site in to:
                self.world.tell(self, peer, event)

    def tick(self, number: int) -> None:
        """Does what is due, and comes again when the coordinator says, or when it is woken."""
        if not self.alive or number != self.ticks:
            return
        seconds = 0.3
        if not self.stopped:
            seconds = self.close_rounds()
        self.ticks += 1
        self.world.after(max(0.001, min(0.5, seconds)), self.tick, self.ticks)

    def close_rounds(self) -> float:
        seconds = 1.0
        try:
            seconds = self.coordinator.tick()
            self.ask_operator()
        except Crash:
            self.crash()
        except HubError as error:
            self.world.note(f"the hub could not do its work: {error}")
        if self.alive:
            self.world.judge.check_open_rounds(self)
            self.world.judge.check_status(self)
            self.world.judge.check_lost_payloads(self)
        return seconds

    def ask_operator(self) -> None:
        """Asks for a decision where the hub cannot decide: room, sites and ledgers come back without
        one.
        """
        trouble = self.coordinator.trouble
        self.ask_for_rollback(trouble or "")
        if trouble and any(reason in trouble for reason in EVICTED_FOR):
            self.world.operator_evicts(self, trouble)
            self.coordinator.tick()

    def ask_for_rollback(self, trouble: str) -> None:
        """Asks for a rollback where no site has applied a round whose payloads are lost, or has
        them.
        """
        world = self.world
        is_hopeless = "hub's store" in trouble and not world.can_restore(self)
        if not is_hopeless:
            self.hopeless_since = None
        elif self.hopeless_since is None:
            self.hopeless_since = world.now
        elif world.now > self.hopeless_since + HOPELESS:
            self.hopeless_since = None
            world.asked_at = world.now
            world.roll_back(self, int(trouble.rpartition(" ")[2]))

    def receive(self, *message: Any) -> None:
        peer, call, arguments = message
        try:
            getattr(self, f"on_{call}")(peer, *arguments)
        except Crash:
            self.crash()
            return
        except (Refused, HubError) as error:
            self.world.tell(self, peer, Event("refused", {}, str(error).encode()))
        if self.is_awake:
            self.is_awake = False
            self.ticks += 1
            self.tick(self.ticks)

    def on_hello(self, peer: Peer, hello: Hello) -> None:
        world = self.world
        events = list(self.coordinator.hello(peer, {"hello": hello}))
        self.sessions[peer.name] = peer
        last = self.beats.get(peer.name)
        follows = last is not None and last.follows and last.incarnation == peer.incarnation
        applied = tuple(position.round for position in hello.applied)
        self.beats[peer.name] = Beat(world.now, peer.incarnation, follows, applied)
        # A site that hears from a hub that does not know all may lose what it trains until it
        # hears from another one.
        if self is not world.hub or not self.disk.is_real:
            world.sites[peer.name].life.is_misled = True
        world.tell(self, peer, *events)

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        self.coordinator.heartbeat(peer, {"heartbeat": heartbeat})
        self.beats[peer.name] = Beat(
            self.world.now, peer.incarnation, heartbeat.follows, heartbeat.applied
        )
        self.world.tell(self, peer, HEARD)

    def on_contribute(
        self, peer: Peer, contribution: Contribution, blobs: dict[str, bytes]
    ) -> None:
        header = {"kind": "payload"}
        for key, blob in blobs.items():
            self.coordinator.admit(peer, header, key, len(blob))
            self.coordinator.stored(peer, header, self.store.put(blob, key), len(blob))
        if self.coordinator.contribute(contribution, peer.incarnation) == "open":
            place = (contribution.fragment, contribution.site)
            self.acknowledged[place] = contribution
            self.disk.accepted[place] = contribution
            if contribution.incarnation == peer.incarnation:
                # A launch of this incarnation: it follows.
                self.beats[peer.name] = self.beats[peer.name]._replace(follows=True)

    def on_skip(self, peer: Peer, call: Call) -> None:
        self.coordinator.call(peer, "skip", {}, call.to_bytes())

    def on_leave(self, peer: Peer) -> None:
        self.coordinator.gone(peer)
        if peer.name not in self.ledger.members:
            self.beats.pop(peer.name, None)
            self.sessions.pop(peer.name, None)

    def on_ask(self, peer: Peer, without: tuple[str, ...], lacked: list[RoundId]) -> None:
        about = {"without": list(without), "lacks": plain(lacked)}
        self.coordinator.call(peer, "state", about, b"")

    def on_give(self, peer: Peer, request: str, header: StateHeader, parts: list[bytes]) -> None:
        payloads = [Payload(self.store.put(part), len(part)) for part in parts]
        self.coordinator.give(peer.name, request, header, payloads)


# The world


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes of modules and classes, and puts back what was there."""
    before = [vars(owner).get(name) for owner, name, _ in changes]
    for change in changes:
        setattr(*change)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            if value is None:
                # The class has inherited it.
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def small_world() -> Iterator[None]:
    """Short times of the hub, short memories, frequent snapshots, and messages that are written
    and read at most once.
    """
    changes: list[tuple[Any, str, Any]] = [
        (state_requests, "_PATIENCE", 1.0),
        (state_requests, "_SENDING", 1.0),
        (coordinator, "read", read_passed),
        (room, "_TIDY_EVERY", 1.0),
        (room, "SNAPSHOT_EVERY", 4),
        (ledger, "SNAPSHOT_EVERY", 4),
        (Record, "key", key_by_content()),
    ]
    changes += [(module, "RETENTION", RETENTION) for module in (room, follower, ledger, quorum)]
    changes += [(module, "event_of", passed) for module in (coordinator, state_requests)]
    for module in (coordinator, lost_payloads, room, state_requests):
        changes.append((module.log, "disabled", True))
    numbers = count()
    for kind, name_of in (
        (RunConfig, attrgetter("run")),
        (Record, attrgetter("key")),
        (Contribution, lambda contribution: next(numbers)),
    ):
        texts = Texts(kind, name_of)
        changes += [(kind, "to_bytes", texts.write), (kind, "from_bytes", texts.read)]
    with replaced(*changes):
        yield


class Texts:
    """Gives a message a short text of its own, by which it is found again: other tests write and
    read the real one. What it has not written is read as it is: a real text that was altered.
    """

    def __init__(self, kind: Any, name_of: Callable[[Any], object]) -> None:
        self._kind = kind
        self._name_of = name_of
        self._write = kind.to_bytes
        self._read = kind.from_bytes
        self._messages: dict[bytes, Any] = {}
        self._texts: dict[int, tuple[Any, bytes]] = {}
        self.write = lambda message: self._text_of(message)

    def _text_of(self, message: Any) -> bytes:
        _, text = self._texts.get(id(message), (None, None))
        if text is None:
            text = f"{self._kind.__name__} {self._name_of(message)}".encode()
            self._texts[id(message)] = message, text
            self._messages[text] = message
        return text

    def read(self, text: bytes) -> Any:
        if text in self._messages:
            return self._messages[text]
        # A message is sealed by its real text.
        with replaced((self._kind, "to_bytes", self._write)):
            return self._read(text)


def key_by_content() -> "cached_property[str]":
    """Returns the property `Record.key` with short work: equal records have equal keys, others have
    others.
    """
    keys: dict[Record, str] = {}

    def key(record: Record) -> str:
        return keys.setdefault(record, f"{len(keys):064x}")

    key_property = cached_property(key)
    key_property.__set_name__(Record, "key")
    return key_property


class World:
    """A run of a seed, with its faults or with some of them."""

    def __init__(self, seed: int, faults: Sequence[Fault] | None = None) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.numbers = count()
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        # What has happened, if somebody reads it.
        self.history: list[str] | None = None
        self.judge = Judge()
        self.slow_until = 0.0
        self.share_not_finite = 0.0
        self.ending = False
        # When the disk of the hub was last without room, or failing.
        self.blocked_at = -10.0
        # When an operator was last asked.
        self.asked_at = -math.inf
        self.flips: set[str] = set()
        number_of_sites = self.random.choice([2, 3, 3, 4])
        if faults is None:
            faults = faults_of(seed, number_of_sites)
        self.faults = Faults(self, faults)
        self.terms = self.some_terms()
        # Sites with a loop of their own may begin to train before the hub has let them in.
        self.sites_join = self.random.random() < 0.75
        self.late = self.random.choice([MergeAction.DROP, MergeAction.CARRY])
        self.run_config = run_config(self.terms)
        self.quiet_records: list[Record] | None = None
        self.disk = Disk()
        self.sites: dict[str, Site] = {}
        for index in range(number_of_sites):
            speed = 0.4 if index == 3 else self.random.choice([0.12, 0.12, 0.2])
            samples = self.random.choice([1, 2, 4])
            self.sites[f"s{index}"] = Site(self, f"s{index}", speed, samples)
        self.hub: Hub

    def some_terms(self) -> Terms:
        random = self.random
        rule: int | ChosenQuorum = random.choice([1, 1, 2])
        if random.random() < 0.25:
            rule = ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": LEAST})
        dense = DenseBeginning(3, 3) if random.random() < 0.1 else None
        grace = random.choice([0.3, 0.6, 0.9])
        fragments = random.choice([1, 1, 2])
        return Terms(fragments, 6, 2, grace, lease=LEASE, quorum=rule, dense_beginning=dense)

    def begin(self) -> None:
        self.write_founding()
        self.hub = Hub(self, self.disk)
        for site in self.sites.values():
            self.within(0.0, 0.5, site.start)
        self.faults.schedule()

    def note(self, event: str) -> None:
        if self.history is not None:
            self.history.append(f"{self.now:6.2f} s  {event}")

    def first_values(self) -> list[Values]:
        return [first_values(p, self.run_config.key) for p in range(self.terms.fragments)]

    def write_founding(self) -> None:
        """Writes the run config and the first snapshot to the disk."""
        state = self.first_values()
        start = Position(0, self.run_config.key)
        header = StateHeader((start,) * len(state), tuple(values.digest for values in state))
        blobs = [values.to_bytes() for values in state]
        store = SimulatedStore(self.disk, lambda: self.now, LEASE)
        parts = tuple(Payload(store.put(blob), len(blob)) for blob in blobs)
        snapshot = encoded(plain(Snapshot(header, parts)))
        notes = {"run_config": self.run_config.to_bytes(), "snapshot/000000": snapshot}
        self.disk.notes.update(notes)

    # Time and network

    def schedule(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.queue, (time, next(self.numbers), act, arguments))

    def after(self, delay: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.numbers), act, arguments))

    def within(self, least: float, most: float, act: Callable[..., None], *arguments: Any) -> None:
        self.after(self.random.uniform(least, most), act, *arguments)

    def delays(self, site: str) -> list[float]:
        """When a message of a site arrives, or to it: never, twice, late, or as it should."""
        delay = 0.02 + 0.06 * self.random.random()
        if self.now < self.slow_until:
            delay += self.random.random()
        messages = self.faults.messages
        if messages:
            for kind in ("lose", "twice", "late"):
                if messages[kind, site]:
                    messages[kind, site] -= 1
                    return {"lose": [], "twice": [delay, delay + 0.5], "late": [delay + 1.0]}[kind]
        return [delay]

    def flipped(self, original: bytes) -> bytes:
        """The same bytes with another bit."""
        changed = bytearray(original)
        changed[self.random.randrange(len(original))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def with_flipped_bit(self, values: Values) -> Values:
        flipped = self.flipped(values.outer.tobytes())
        return values._replace(outer=np.frombuffer(flipped, np.float32).copy())

    def flips_now(self, kind: str) -> bool:
        flips = kind in self.flips
        self.flips.discard(kind)
        return flips

    def send(self, site: Site, call: str, *arguments: Any) -> None:
        """From a site to the hub."""
        if call == "contribute" and self.flips_now("flip_payload"):
            contribution, blobs = arguments
            flipped = {key: self.flipped(blob) for key, blob in blobs.items()}
            arguments = (contribution, flipped)
        delays = [] if site.cut_up else self.delays(site.name)
        site.life.link_is_broken |= not delays
        peer = site.life.peer
        for delay in delays:
            self.after(delay, self.hub.arrive, peer, call, arguments)

    def tell(self, hub: Hub, peer: Peer, *events: Event) -> None:
        """From a hub to an incarnation of a site, on the stream of its connection: in order."""
        site = self.sites[peer.name]
        if site.cut_down:
            return
        if events[0].kind == "record" and self.flips_now("flip_record"):
            text = real_text(Record.from_bytes(events[0].body))
            with suppress(Malformed):
                read_event(events[0]._replace(body=self.flipped(text)))
                self.judge.violations.append(f"{site.name} took a damaged record")
            site.life.link_is_broken = True
            return
        delays = self.delays(site.name)
        if site.alive:
            site.life.link_is_broken |= not delays
        for delay in delays:
            arrival = max(self.now + delay, hub.arrivals.get(site.name, 0.0))
            hub.arrivals[site.name] = arrival
            self.schedule(arrival, site.arrive, hub, peer.incarnation, *events)

    # Returns of hubs and sites

    def heal(self, site: Site) -> None:
        site.cut_up = False
        site.cut_down = False
        site.life.link_is_broken = True
        site.calm_since = self.now

    def restart_hub(self, instead_of: Hub) -> None:
        if self.hub is instead_of and not instead_of.alive:
            self.hub = Hub(self, instead_of.disk)

    def restore(self, backup: Hub) -> None:
        backup.alive = False
        if not self.hub.disk.is_real:
            self.start_hub_on_real_disk()

    def start_hub_on_real_disk(self) -> None:
        self.hub.alive = False
        self.disk.lose_unsynced()
        self.hub = Hub(self, self.disk)

    def take_over(self) -> None:
        """Somebody starts a second hub on the ledger of one that does not answer."""
        if self.hub.serves_the_run:
            with suppress(LedgerError):
                self.hub = Hub(self, self.disk)

    def let_leave(self, site: Site) -> None:
        """A site has trained all it had to, and all of it is counted; some come back."""
        for part, progress in zip(site.parts, site.follower.fragments, strict=True):
            if part.steps and not progress.ended:
                self.judge.violations.append(f"{site.name} left before its steps were counted")
        site.save()
        site.die()
        if self.ending:
            site.gone_for_good = True
        else:
            self.within(0.5, 3, site.start)

    # The operator

    def operator_evicts(self, hub: Hub, trouble: str) -> None:
        """The hub cannot decide. Somebody looks at the sites, and evicts those that are wrong."""
        self.judge.deny(not self.faults.expect_trouble, f"a halt without a reason: {trouble}")
        self.note(f"an operator is asked: {trouble}")
        self.asked_at = self.now
        for fragment, open_round in list(hub.ledger.open.items()):
            contributions = list(open_round.contributions.values())
            digests = {sent.digest for sent in contributions if not sent.reason}
            if len(digests) == 1:
                continue
            # A person who looks finds out whose arithmetic is right, where one of them is.
            right = self.judge.digests.get(hub.ledger.closed[fragment].key)
            if right not in digests:
                right = next(iter(digests), None)
            for contribution in contributions:
                if contribution.digest != right:
                    self.evict(hub, contribution.site)

    def evict(self, hub: Hub, site: str) -> None:
        for promised in (hub.acknowledged, hub.disk.accepted):
            for fragment, contributor in list(promised):
                if contributor == site:
                    del promised[fragment, contributor]
        hub.coordinator.call(OPERATOR, "evict", {"who": site}, b"")

    def operator_rolls_back(self) -> None:
        """Nobody can follow: the values that the next round was measured against are gone with those
        who made them.
        """
        for site in self.sites.values():
            if site.follows and not site.follower.lag:
                return
        hub = self.hub
        if not hub.serves_the_run:
            return
        refused_rounds = [
            progress.next_round
            for site in self.sites.values()
            for progress in site.follower.fragments
            if progress.refused
        ]
        self.roll_back(hub, min(refused_rounds) - 1)

    def roll_back(self, hub: Hub, round: int) -> None:
        with suppress(Refused):
            hub.coordinator.call(OPERATOR, "rollback", {"round": round}, b"")
            self.judge.counts["rolled back"] += 1
            hub.acknowledged.clear()
            hub.disk.accepted.clear()
            self.judge.roll_back(hub)

    def newest_payloads(self) -> list[str]:
        """Returns the keys of the payloads of the open rounds, or of the last one if none is
        open.
        """
        ledger = self.hub.ledger
        contributions = [
            contribution
            for opened in ledger.open.values()
            for contribution in opened.contributions.values()
        ]
        if not contributions:
            for history in ledger.history:
                if history:
                    contributions += history[-1].counted
        return [contribution.payloads[0].key for contribution in contributions]

    def states(self) -> list[str]:
        """Returns the keys of the parts of all states at the hub."""
        keys = set[str]()
        for name, text in self.disk.notes.items():
            if name.startswith("snapshot/"):
                snapshot = read(Snapshot, decoded(text, MOST_BYTES), "snapshot")
                keys.update(part.key for part in snapshot.parts)
        for handed in self.hub.coordinator._states._handed:
            keys.update(part.key for part in handed.parts)
        return sorted(keys)

    def can_restore(self, hub: Hub) -> bool:
        """Returns whether some site has applied the rounds that sites lack, or can send what is
        lost of them.
        """
        lacked = {
            round_id
            for site in self.sites.values()
            if site.alive
            for round_id in site.follower.lacked_rounds
        }
        return all(self.can_restore_round(hub, round_id) for round_id in lacked)

    def can_restore_round(self, hub: Hub, round_id: RoundId) -> bool:
        fragment, round = round_id
        alive = [site for site in self.sites.values() if site.alive]
        if any(site.follower.fragments[fragment].applied.round >= round for site in alive):
            return True
        number = hub.coordinator._index.next_number(fragment, round - 1)
        record = Record.from_bytes(hub.disk.records[number])
        holders = [site for site in alive if site.holds(record)]
        held = {record.of(site.name).payloads[0].key for site in holders}
        lost = {
            sent.payloads[0].key
            for sent in record.counted
            if sent.payloads[0].key not in hub.disk.blobs
        }
        return lost <= held

    # The run

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done() and not self.judge.violations:
            self.now, _, act, arguments = heapq.heappop(self.queue)
            try:
                act(*arguments)
            except Exception as error:
                self.judge.violations.append(f"{type(error).__name__}: {error}")

    def run(self) -> "Judge":
        """Runs all faults, then a quiet time in which everything has to be as it was, then the end
        of the run.
        """
        # Flipped bits make values that are infinite.
        with small_world(), np.errstate(all="ignore"):
            self.begin()
            self.run_until(lambda: self.now > self.faults.until)
            self.end_faults()
            quiet_until = self.now + QUIET
            self.run_until(lambda: self.now > quiet_until)
            if self.waits_for_operator():
                self.judge.counts["the run waits for an operator"] += 1
                return self.judge
            self.judge.check_quiet_time(self)
            if self.judge.violations:
                return self.judge
            self.ending = True
            self.hub.coordinator.end()
            deadline = self.now + ENDING
            self.run_until(lambda: self.now > deadline or self.is_over())
            self.judge.check_end(self)
        return self.judge

    def end_faults(self) -> None:
        self.note("the faults end")
        self.slow_until = 0.0
        self.share_not_finite = 0.0
        self.flips.clear()
        self.faults.messages.clear()
        self.disk.is_full = False
        self.disk.is_failing = False
        self.disk.crash_after = None
        self.hub.resume()
        if not self.hub.serves_the_run:
            self.start_hub_on_real_disk()
        self.quiet_records = []
        for site in self.sites.values():
            site.life.computes_wrongly = False
            site.life.is_long = False
            site.resume()
            self.heal(site)
            site.start()

    def waits_for_operator(self) -> bool:
        """Returns whether nobody has a state from which the run can continue, and hub or sites have
        said so to people.
        """
        if self.asked_at > self.now - QUIET:
            return True
        counts = self.judge.counts
        if counts["a site says that its memory was changed"]:
            return not any(site.alive and site.can_give() for site in self.sites.values())
        if not counts["no site has a state"]:
            return False
        has_donor = isinstance(self.hub.ledger.source("nobody", self.now), str)
        return not has_donor and not any(site.follows for site in self.sites.values())

    def is_over(self) -> bool:
        return all(site.gone_for_good for site in self.sites.values())


class Faults:
    """Makes things go wrong in a world: a method for each kind of fault, but for flipped messages."""

    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        self.world = world
        self.faults = faults
        self.expect_trouble = False
        # The present fault.
        self.fault = Fault(0.0, "", "", 0.0, 0.0)
        # How many messages of a site are lost, come twice or late.
        self.messages: Counter[tuple[str, str]] = Counter()
        self.until = BEGIN + max((fault.time for fault in faults), default=0.0)

    def schedule(self) -> None:
        for fault in self.faults:
            self.world.after(fault.time, self.happen, fault)

    def happen(self, fault: Fault) -> None:
        world = self.world
        site = world.sites[fault.site]
        kind = fault.kind
        if kind in NEED_A_DONOR and not self.has_donor_for(site):
            kind = "kill"
        world.note(f"FAULT {kind} {site.name}, for {fault.seconds:.2f} s")
        world.judge.counts[f"fault {kind}"] += 1
        self.expect_trouble |= kind in TROUBLE
        self.fault = fault
        if kind in FLIPS_OF_MESSAGES:
            world.flips.add(kind)
        else:
            getattr(self, kind)(site)

    def later(self, act: Callable[..., None], *arguments: Any) -> None:
        """Acts when the present fault is over."""
        self.world.after(self.fault.seconds, act, *arguments)

    def has_donor_for(self, site: Site) -> bool:
        donors = [donor for donor in self.world.sites.values() if donor is not site]
        return any(donor.is_well and donor.follower.follows for donor in donors)

    # Of sites

    def kill(self, site: Site) -> None:
        site.die()
        self.later(site.start)

    def old_checkpoint(self, site: Site) -> None:
        site.checkpoints = site.checkpoints[: 1 + int(3 * self.fault.amount)]
        self.kill(site)

    def lost_disk(self, site: Site) -> None:
        site.checkpoints = []
        self.kill(site)

    def flip_checkpoint(self, site: Site) -> None:
        if site.checkpoints:
            _, parts, *_ = site.checkpoints[-1]
            parts[0].values = self.world.with_flipped_bit(parts[0].values)
        self.kill(site)

    def stop(self, site: Site) -> None:
        site.stopped = site.alive
        self.later(site.resume)

    def leave(self, site: Site) -> None:
        if site.alive:
            site.life.is_finishing = True
            site.follower.finish()

    def flip_outer(self, site: Site) -> None:
        if site.alive:
            part = self.world.random.choice(site.parts)
            part.values = self.world.with_flipped_bit(part.values)

    def wrong_arithmetic(self, site: Site) -> None:
        if site.alive:
            site.life.computes_wrongly = True

    def not_finite(self, site: Site) -> None:
        self.world.share_not_finite = 0.3
        self.world.after(0.5, setattr, self.world, "share_not_finite", 0.0)

    def long_gradient(self, site: Site) -> None:
        site.life.is_long = True

    # Of the network

    def lose(self, site: Site) -> None:
        self.messages["lose", site.name] += 1 + int(3 * self.fault.amount)

    def twice(self, site: Site) -> None:
        self.messages["twice", site.name] += 1 + int(9 * self.fault.amount)

    def late(self, site: Site) -> None:
        self.messages["late", site.name] += 1 + int(4 * self.fault.amount)

    def cut(self, site: Site) -> None:
        site.cut_down = True
        self.cut_up(site)

    def cut_up(self, site: Site) -> None:
        site.cut_up = True
        self.heal_later(site)

    def cut_down(self, site: Site) -> None:
        site.cut_down = True
        self.heal_later(site)

    def heal_later(self, site: Site) -> None:
        self.later(self.world.heal, site)

    def slow_network(self, site: Site) -> None:
        self.world.slow_until = self.world.now + self.fault.seconds

    # Of the hub and its disk

    def hub_kill(self, site: Site) -> None:
        hub = self.world.hub
        if hub.alive:
            hub.crash()

    def hub_crash(self, site: Site) -> None:
        """The hub dies at one of the next points of its writes."""
        self.world.hub.disk.crash_after = int(12 * self.fault.amount)

    def hub_stop(self, site: Site) -> None:
        hub = self.world.hub
        hub.stopped = hub.alive
        self.later(hub.resume)

    def takeover(self, site: Site) -> None:
        self.hub_stop(site)
        self.world.after(self.fault.amount * self.fault.seconds, self.world.take_over)

    def full_disk(self, site: Site) -> None:
        self.world.disk.is_full = True
        self.later(setattr, self.world.disk, "is_full", False)

    def failing_disk(self, site: Site) -> None:
        self.world.disk.is_failing = True
        self.later(setattr, self.world.disk, "is_failing", False)

    def rot(self, site: Site) -> None:
        """Payloads that sites are about to fetch, or have, change on the disk or vanish: one or all
        of a round. Or states do.
        """
        world = self.world
        newest_keys = world.newest_payloads()
        if 0.3 < self.fault.amount < 0.5:
            newest_keys = world.states()
        keys = [key for key in dict.fromkeys(newest_keys) if key in world.disk.blobs]
        for key in keys if self.fault.amount < 0.5 else keys[:1]:
            if self.fault.seconds < 0.6:
                world.disk.blobs[key] = world.flipped(world.disk.blobs[key])
            else:
                del world.disk.blobs[key]

    def old_ledger(self, site: Site) -> None:
        """The hub is started with a backup; after a while somebody notices and starts it with the
        real ledger.
        """
        world = self.world
        world.hub.alive = False
        lost = 1 + int(6 * self.fault.amount)
        world.hub = Hub(world, world.disk.without_the_last(lost, world.judge.sent))
        self.later(world.restore, world.hub)


# The judge


@dataclass
class Sent:
    """A launch as it really was."""

    ids: list[int]
    lineage: str
    digest: int
    local: np.ndarray


class Landing(NamedTuple):
    """A landing before the site does to its values what it says."""

    site: Site
    record: Record
    action: MergeAction
    new: Values

    @property
    def part(self) -> Part:
        return self.site.parts[self.record.fragment]

    @property
    def flight(self) -> list[int]:
        return self.part.flight or []

    @property
    def where(self) -> str:
        return f"{self.site.name}, round {self.record.round} of {self.record.fragment}"


class Judge:
    def __init__(self) -> None:
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.sent: dict[Contribution, Sent] = {}
        # Of the values that the sites which compute rightly have made of each record.
        self.digests: dict[str, int] = {}
        self.disks: dict[str, Disk] = {}
        # What sites have sent, by key.
        self.payloads: dict[str, bytes] = {}

    def deny(self, happened: object, violation: str) -> None:
        if happened:
            self.violations.append(violation)

    # Promises of the hub

    def check_start(self, hub: Hub) -> None:
        """Looks whether a hub that starts still has what its disk has promised."""
        ledger = hub.ledger
        for (fragment, site), contribution in hub.disk.accepted.items():
            if contribution.round <= ledger.closed[fragment].round:
                continue
            opened = ledger.open.get(fragment)
            is_kept = opened is not None and opened.contributions.get(site) == contribution
            where = f"round {contribution.round} of {fragment}"
            self.deny(not is_kept, f"{where}: a hub that starts has lost what {site} contributed")
            is_stored = {payload.key for payload in contribution.payloads} <= hub.disk.blobs.keys()
            is_lost = not is_stored and not self.counts["fault rot"]
            self.deny(is_lost, f"{where}: a hub that starts has lost the payload of {site}")

    def check_told(self, hub: Hub, text: bytes) -> None:
        record = Record.from_bytes(text)
        if hub.disk.keys.get((record.fragment, record.round)) != record.key:
            where = f"round {record.round} of {record.fragment}"
            self.violations.append(f"{where} is told before it is durable")

    def check_status(self, hub: Hub) -> None:
        """Looks whether the status shows who is not there, while rounds wait for a quorum."""
        ledger = hub.ledger
        for fragment, opened in ledger.open.items():
            if len(opened.contributions) >= self.fewest(hub):
                continue
            present = self.present(hub)
            shown = (sorted(opened.contributions), present)
            if hub.shown.get(fragment) == shown:
                continue
            hub.shown[fragment] = shown
            status = hub.coordinator.status()
            fragment_status = status["fragments"][fragment]
            is_shown = fragment_status["open"] and fragment_status["here"] == shown[0]
            for site, state in status["sites"].items():
                is_shown &= state["state"] != "follows" or site in present
            self.deny(not is_shown, f"the status hides that {fragment} has no quorum")

    def check_lost_payloads(self, hub: Hub) -> None:
        """Looks whether the hub says that its store has lost what sites need."""
        now = hub.world.now
        if hub is not hub.world.hub or now < max(hub.runs_since, hub.world.slow_until) + SAID:
            return
        for site in hub.world.sites.values():
            since = site.life.lacks_since
            if since is None or not site.is_well or site.life.hub is not hub:
                continue
            closed = hub.ledger.closed
            lacked_rounds = site.follower.lacked_rounds
            if all(closed[fragment].round < round for fragment, round in lacked_rounds):
                # They were rolled back a moment ago.
                continue
            # After a rollback the round may have closed again.
            begun = max(since, site.calm_since, hub.world.asked_at)
            is_silent = now > begun + SAID and not hub.coordinator.trouble
            self.deny(is_silent, f"{site.name} lacks payloads, and the hub says nothing")

    # Launches and landings

    def check_parting(self, site: Site, error: Exception) -> None:
        """Looks whether a site that ends because of its history has landed another one."""
        if "histories have diverged" not in str(error):
            return
        keys = site.world.disk.keys
        for progress in site.follower.fragments:
            position = progress.applied
            place = progress.fragment, position.round
            if position.round and keys.get(place) != position.key:
                return
        self.violations.append(f"{site.name} ends, and has landed nothing else than the hub")

    def check_payloads(self, site: Site, record: Record) -> None:
        for payloads in record.sources:
            for payload in payloads:
                blob = site.blobs[record.key][payload.key]
                if self.payloads.get(payload.key) != blob:
                    where = f"{site.name}, round {record.round} of {record.fragment}"
                    self.violations.append(f"{where}: lands other bytes than were sent")

    def check_answers(self, site: Site, calls: Sequence[tuple[int, int]]) -> None:
        """Looks whether a site has launched for each of these calls, or declined it since its last
        welcome.
        """
        for fragment, round in calls:
            progress = site.follower.fragments[fragment]
            has_launched = progress.flight is not None or progress.applied.round >= round
            is_answered = has_launched or (fragment, round) in site.life.declined
            # A site that has refused a hub does not answer its calls.
            must_answer = site.follows and site.follower.reachable
            is_silent = must_answer and not is_answered
            self.deny(is_silent, f"{site.name} does not answer the call of round {round}")

    def check_memory(self, site: Site) -> None:
        """Looks whether a site keeps payloads of records only until they have landed, and forgets
        those that will not land.
        """
        unlanded = set()
        for progress in site.follower.fragments:
            unlanded |= {record.key for record in progress.records.values()}
        self.deny(site.blobs.keys() - unlanded, f"{site.name} keeps payloads that nobody needs")

    def check_launch(self, site: Site, contribution: Contribution, part: Part) -> None:
        ids = list(part.held)
        values = part.values
        self.sent[contribution] = Sent(ids, values.lineage, values.digest, part.local.copy())
        weight = contribution.weight
        is_wrong = weight != len(ids) * site.samples
        self.deny(is_wrong, f"{site.name} weighs {weight} for {len(ids)} steps")
        call = site.follower.fragments[contribution.fragment].call
        may_be_short = site.life.is_finishing or (call is not None and call.final)
        is_short = len(ids) < site.world.terms.least_steps(contribution.round)
        is_early = is_short and not may_be_short
        self.deny(is_early, f"{site.name} launched after {len(ids)} steps")

    def check_landing(self, landing: Landing) -> None:
        record = landing.record
        old = landing.part.values
        where = landing.where
        has_other_history = old.lineage != record.previous
        has_other_values = old.digest != record.digest
        if landing.action is MergeAction.REFUSE:
            self.deny(not has_other_values, f"{where}: refused what was right")
            self.deny(has_other_history, f"{where}: nearly landed a record of another history")
            return
        differs = has_other_history or has_other_values
        self.deny(differs, f"silent divergence: {where} has another history or values")
        if not landing.site.life.computed_wrongly:
            digest = self.digests.setdefault(record.key, landing.new.digest)
            differs = digest != landing.new.digest
            self.deny(differs, f"silent divergence: {where} made other values of the same record")
        self.check_steps_of(landing)
        if record.final:
            self.check_final_mean(landing)
        elif landing.action is MergeAction.TAKE and landing.part.finite:
            self.check_taken(landing)

    def check_steps_of(self, landing: Landing) -> None:
        """Compares what becomes of the trained steps with what the records have counted."""
        site = landing.site
        record = landing.record
        where = landing.where
        rounds = self.disks[record.key].counted[site.name, record.fragment]
        never = 1 << 60
        counted = {step for step in landing.part.steps if rounds.get(step, never) <= record.round}
        in_flight = set(landing.flight)
        if landing.action is MergeAction.MIX:
            contribution = record.of(site.name)
            # A site that has trained nothing takes part in a round that was to be the last one.
            has_nothing = not in_flight and (contribution is None or contribution.weight)
            is_lost = has_nothing or not in_flight <= counted
            self.deny(is_lost, f"{where}: lost a flight that nobody counted")
        if landing.action is MergeAction.DROP:
            is_wrong = not in_flight or counted & in_flight
            self.deny(is_wrong, f"{where}: drops what was counted, or nothing")
        if landing.action is MergeAction.CARRY:
            self.deny(counted, f"{where}: carries {len(counted)} steps that were counted")

    def check_final_mean(self, landing: Landing) -> None:
        locals_of_sites = [self.sent[counted].local for counted in landing.record.counted]
        mean = np.mean(locals_of_sites, axis=0)
        # An outer parameter that a flipped bit has made huge leaves little of a float32.
        lost = 2.0**-20 * np.abs(landing.part.values.outer)
        tolerance = 2.0**-8 * np.abs(mean) + lost
        is_exact = (np.abs(landing.new.outer - mean) <= tolerance).all()
        self.deny(not is_exact, f"{landing.where}: no exact mean")

    def check_taken(self, landing: Landing) -> None:
        site = landing.site
        left_out = landing.record.without(site.name)
        if left_out and left_out.reason.startswith("too long"):
            return
        contribution = landing.record.of(site.name)
        if contribution is None or self.sent[contribution].ids == landing.part.flight:
            self.violations.append(f"{landing.where}: dropped what it holds")
        else:
            self.check_lost_steps(site, contribution, landing.where)

    def check_beginning_again(self, site: Site, fragment: int, incarnation: str) -> None:
        """Looks at what is dropped because an earlier incarnation has launched it, before it is."""
        launch = (fragment, site.name, incarnation)
        launches = [
            sent for sent in self.sent if (sent.fragment, sent.site, sent.incarnation) == launch
        ]
        last = max(launches, key=lambda sent: sent.round)
        self.check_lost_steps(site, last, f"{site.name}, a new incarnation")

    def check_lost_steps(self, site: Site, launch: Contribution, where: str) -> None:
        """Looks for steps that were trained after a launch that counts, and are not in it: they
        are lost.
        """
        last_sent = max(self.sent[launch].ids, default=0)
        lost = [step for step in site.parts[launch.fragment].steps if step > last_sent]
        may_not_lose = site.world.sites_join and not site.life.is_misled
        violation = f"{where}: loses {len(lost)} steps of {launch.fragment}"
        self.deny(lost and may_not_lose, violation)

    def count_steps(self, site: Site) -> None:
        """Compares what the rules say that a site holds with what it does hold."""
        for progress, part in zip(site.follower.fragments, site.parts, strict=True):
            steps = progress.steps
            if progress.flight:
                steps += progress.flight.steps
            if steps != len(part.steps):
                violation = f"{site.name} holds {len(part.steps)} steps, and says {steps}"
                self.violations.append(violation)

    # Records

    def check_record(self, hub: Hub, record: Record) -> None:
        disk = hub.disk
        backup = "" if disk.is_real else "backup: "
        where = f"{backup}round {record.round} of {record.fragment}"
        self.disks[record.key] = disk
        key = disk.keys.setdefault((record.fragment, record.round), record.key)
        self.deny(key != record.key, f"{where} has two records")
        for contribution in record.counted:
            if contribution not in self.sent:
                violation = f"{where} counts what {contribution.site} has not contributed"
                self.violations.append(violation)
                return
            self.check_counted(disk, record, contribution, where)
        self.check_sites(hub, record, where)
        self.check_waiting(hub, record, where)
        for left_out in record.left_out:
            # One very long gradient that counts where little is known misleads the guard for a while.
            is_by_chance = left_out.times < LONG_BY_CHANCE
            if left_out.is_by_guard and (is_by_chance or self.counts["fault long_gradient"]):
                continue
            acknowledged = hub.acknowledged.get((record.fragment, left_out.site))
            is_right = self.may_be_left_out(acknowledged, record.digest)
            self.deny(not is_right, f"{where} leaves {left_out.site} out: {left_out.reason}")

    def check_waiting(self, hub: Hub, record: Record, where: str) -> None:
        """A round that waits for all closes early only if all have answered."""
        terms = hub.world.terms
        opened = hub.ledger.open[record.fragment]
        is_early = hub.world.now < min(opened.arrived.values()) + terms.grace
        if record.final or not isinstance(terms.quorum, int) or not is_early:
            return
        missing = [site for site in self.present(hub) if site not in opened.arrived]
        self.deny(missing, f"{where} did not wait for {missing}")

    def check_sites(self, hub: Hub, record: Record, where: str) -> None:
        sites = {entry.site for entry in (*record.counted, *record.left_out)}
        too_few = len(sites) < self.fewest(hub)
        self.deny(too_few, f"{where} was closed with {len(sites)} sites")
        for (fragment, site), contribution in hub.acknowledged.items():
            is_of_round = (fragment, contribution.round) == (record.fragment, record.round)
            if is_of_round and site not in sites:
                self.violations.append(f"{where} forgot what {site} had contributed")

    def check_counted(
        self, disk: Disk, record: Record, contribution: Contribution, where: str
    ) -> None:
        site = contribution.site
        sent = self.sent[contribution]
        counted = disk.counted[site, contribution.fragment]
        differs = sent.lineage != record.previous or sent.digest != record.digest
        self.deny(differs, f"silent divergence: {where} counts another history or values")
        counts_twice = counted.keys() & set(sent.ids)
        self.deny(counts_twice, f"{where} counts steps of {site} twice")
        counted.update(dict.fromkeys(sent.ids, record.round))

    def may_be_left_out(self, contribution: Contribution | None, digest: int) -> bool:
        if contribution is None or not contribution.finite:
            return True
        if not contribution.weight and not contribution.exact:
            return True
        return self.sent[contribution].digest != digest

    def roll_back(self, hub: Hub) -> None:
        """Forgets the counts of rounds that a rollback has removed from the disk of a hub."""
        disk = hub.disk
        last_rounds = [position.round for position in hub.ledger.closed]
        disk.keys = {
            (fragment, round): key
            for (fragment, round), key in disk.keys.items()
            if round <= last_rounds[fragment]
        }
        # A record that is gone may still land where it has arrived before: what it has counted, it
        # has.
        before = Disk()
        before.counted = disk.counted
        disk.counted = defaultdict(dict)
        for (site, fragment), rounds in before.counted.items():
            last = hub.ledger.closed[fragment].round
            remaining = {step: round for step, round in rounds.items() if round <= last}
            disk.counted[site, fragment] = remaining
        for key, disk_of_record in self.disks.items():
            if disk_of_record is disk:
                self.disks[key] = before

    # Rounds

    @staticmethod
    def present(hub: Hub) -> list[str]:
        """The sites that have beaten within a lease, follow, and are near enough."""
        now = hub.world.now
        lease = hub.world.terms.lease
        ledger = hub.ledger
        sites = []
        for site, beat in hub.beats.items():
            if not beat.follows or site not in ledger.members or beat.time + lease <= now:
                continue
            pairs = zip(ledger.closed, beat.applied, strict=True)
            if max([closed.round - applied for closed, applied in pairs]) <= RETENTION:
                sites.append(site)
        return sites

    def fewest(self, hub: Hub) -> int:
        """How many make a round, at least: a number, or half of those who are there."""
        quorum = hub.world.terms.quorum
        return quorum if isinstance(quorum, int) else (len(self.present(hub)) + 1) // 2

    def check_open_rounds(self, hub: Hub) -> None:
        """Looks, after the hub closed what was due, for rounds that are open for too long."""
        world = hub.world
        if hub.disk.is_full or hub.disk.is_failing:
            world.blocked_at = world.now
        trouble = hub.coordinator.trouble or ""
        # A round of nothing but values that are far too long waits for another site, and says so.
        is_blocked = world.now < world.blocked_at + AGAIN or "far too long" in trouble
        overdue = {}
        for fragment, open_round in hub.ledger.open.items():
            if is_blocked or not self.can_close(hub, open_round):
                continue
            why = self.reason_to_close(hub, open_round)
            if not why:
                continue
            # A change is seen by the next tick.
            overdue[fragment] = hub.overdue.get(fragment, world.now)
            if world.now > overdue[fragment] + 0.6:
                number = hub.ledger.closed[fragment].round + 1
                self.violations.append(f"round {number} of {fragment} is open {why}")
        hub.overdue = overdue

    def reason_to_close(self, hub: Hub, open_round: OpenRound) -> str:
        """Returns how a round is open that should be closed; empty if it may be open."""
        # For the time of a lease a hub that was started waits for those before, also to know how
        # many there are.
        terms = hub.world.terms
        is_settled = hub.world.now > hub.started + terms.lease
        has_grace = is_settled or isinstance(terms.quorum, int)
        if has_grace and self.is_beyond_grace(hub, open_round):
            return "beyond the grace"
        is_complete = all(site in open_round.arrived for site in self.present(hub))
        return "for somebody who is not there" if is_settled and is_complete else ""

    def can_close(self, hub: Hub, open_round: OpenRound) -> bool:
        contributions = open_round.contributions.values()
        digests = {sent.digest for sent in contributions if not sent.reason}
        is_enough = len(digests) == 1 and len(contributions) >= self.fewest(hub)
        return is_enough and not self.awaits_founders(hub, open_round)

    @staticmethod
    def awaits_founders(hub: Hub, open_round: OpenRound) -> bool:
        """Returns whether a first round waits for sites that do not follow yet, or for their grace."""
        if any(sent.round > 1 for sent in open_round.contributions.values()):
            return False
        world = hub.world
        for site, member in hub.ledger.members.items():
            if member.until <= world.now:
                continue
            is_new = world.now <= member.followed_at + world.terms.grace
            if is_new or not (member.follows or site in open_round.arrived):
                return True
        return False

    @staticmethod
    def is_beyond_grace(hub: Hub, open_round: OpenRound) -> bool:
        world = hub.world
        contributions = open_round.contributions.values()
        is_last = world.ending and all(sent.exact or sent.reason for sent in contributions)
        return not is_last and world.now > min(open_round.arrived.values()) + world.terms.grace

    # The quiet time and the end

    def check_quiet_time(self, world: World) -> None:
        records = world.quiet_records or []
        too_few = len(records) < world.terms.fragments
        self.deny(too_few, f"only {len(records)} records while nothing was wrong")
        # One that has just come back is still on its way.
        settled = world.now - SETTLING
        sites = world.sites.values()
        alive = [site for site in sites if site.alive and site.calm_since < settled]
        for site in alive:
            self.check_quiet_site(site, records[len(records) // 2 :])
        values_at: dict[str, bytes] = {}
        for site in alive:
            for progress, part in zip(site.follower.fragments, site.parts, strict=True):
                position = f"{progress.fragment} {progress.applied.key}"
                values = part.values.outer.tobytes()
                differs = values_at.setdefault(position, values) != values
                place = f"{site.name} holds other values of {progress.fragment}"
                self.deny(differs, f"silent divergence: {place}")

    def check_quiet_site(self, site: Site, records: list[Record]) -> None:
        world = site.world
        follower = site.follower
        pairs = zip(world.hub.ledger.closed, follower.fragments, strict=True)
        behind = max(closed.round - progress.applied.round for closed, progress in pairs)
        self.deny(behind > 2, f"{site.name} is {behind} rounds behind")
        self.deny(not follower.follows, f"{site.name} does not follow at the end")
        # A site that can answer a call within the grace counts, also at half the speed of the
        # others.
        is_calm = site.calm_since < world.now - QUIET + 1
        is_prompt = is_calm and site.speed <= 0.2 and world.terms.grace >= 0.65
        counted = sum(self.is_counted(site, record) for record in records)
        share = counted / max(1, len(records))
        counts_rarely = is_prompt and not site.life.is_finishing and share < 0.5
        self.deny(counts_rarely, f"{site.name} counts in {share:.0%}")

    def is_counted(self, site: Site, record: Record) -> bool:
        """Returns whether a site counts, or would if one very long gradient had not misled the
        guard.
        """
        left_out = record.without(site.name)
        is_misled = self.counts["fault long_gradient"] > 0
        return record.of(site.name) is not None or (
            is_misled and left_out is not None and left_out.is_by_guard
        )

    def check_end(self, world: World) -> None:
        if self.violations:
            return
        sites = world.sites.values()
        unfinished = [site.name for site in sites if not site.gone_for_good]
        self.deny(unfinished, f"{unfinished} have not come to the end of the run")
        for p in range(world.terms.fragments):
            ends = {site.parts[p].values.outer.tobytes() for site in sites}
            differs = f"the run ended with {len(ends)} values of fragment {p}"
            self.deny(len(ends) > 1, f"silent divergence: {differs}")
            has_ended = world.hub.ledger.has_ended(p)
            self.deny(not has_ended, f"the last record of fragment {p} is not final")

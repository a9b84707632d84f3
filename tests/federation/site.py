"""A simulated site: the real follower, with arithmetic on a few float32 values, a disk for checkpoints, and faults."""

from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sdiloco.errors import AgreementError
from lightning_sdiloco.federation import (
    Call,
    Contribution,
    Follower,
    Malformed,
    MergeAction,
    Payload,
    Record,
    Refused,
    StateHeader,
    Welcome,
)
from lightning_sdiloco.federation.codec import key_of

if TYPE_CHECKING:
    from tests.federation.world import World

LENGTH = 4
NOISE = np.random.default_rng(0).standard_normal((64, LENGTH)).astype(np.float32) / 16
BEAT, UNHEARD = 0.5, 2.0


def rounded(gradient: np.ndarray) -> np.ndarray:
    """Leaves sign, exponent and two bits: about what four bits with a scale leave."""
    return (gradient.view(np.int32) & np.int32(-1 << 21)).view(np.float32)


class Values:
    """The values of a fragment, and the truth about where the outer ones come from."""

    def __init__(self, outer: np.ndarray, momentum: np.ndarray, lineage: str) -> None:
        self.outer, self.momentum, self.lineage = outer, momentum, lineage
        self.local = outer.copy()

    def digest(self) -> int:
        return int(key_of(self.outer.tobytes())[:15], 16)


class SimulatedSite:
    def __init__(self, world: "World", name: str, speed: float, samples: int) -> None:
        self.world, self.name, self.speed, self.samples = world, name, speed, samples
        self.alive = self.stopped = self.cut_up = self.cut_down = False
        self.checkpoints: list[dict[str, Any]] = []
        self.lives = self.turn = 0
        self.trained = 0
        self.calm_since = 0.0
        self.begins_as_founder = False
        self.gone_for_good = False

    # Lives

    def start(self) -> None:
        if self.alive or self.gone_for_good:
            return
        world, self.lives = self.world, self.lives + 1
        self.life = f"{int(self.name[1:]):04x}{self.lives:012x}"
        self.alive, self.stopped, self.was_wrong, self.does_wrong = True, False, False, False
        self.finishing = self.broken = self.waits = self.misled = self.forgot = False
        self.joined = not world.sites_join
        self.heard_at = self.waited_since = world.now
        self.asked: tuple[str, ...] = ()
        self.held_back: list[tuple[Any, ...]] = []
        self.payloads: dict[str, list[bytes]] = {}
        self.sent_payloads: dict[int, bytes] = {}
        self.flying: dict[int, list[int]] = {}
        self.calm_since = world.now
        self.step = 0
        self.follower = Follower(world.terms, world.charter, self.name, self.life, late=world.late)
        fragments = range(world.terms.fragments)
        self.held: list[list[int]] = [[] for _ in fragments]
        self.is_not_finite = [False for _ in fragments]
        self.values = [Values(*world.first_values(p), f"nothing of {self.life}") for p in fragments]
        while self.checkpoints and not self.load(self.checkpoints[-1]):
            self.checkpoints.pop()
        if self.begins_as_founder:
            self.values = [Values(*world.first_values(p), world.charter) for p in fragments]
            self.follower.found([own.digest() for own in self.values])
            self.begins_as_founder = False
        self.say_hello()
        self.trains_in(self.speed)
        world.after(BEAT, self.beat, self.life)

    def die(self) -> None:
        if not self.alive:
            return
        self.alive = self.stopped = False
        if not self.cut_up and self.world.random.random() < 0.9:
            self.world.send(self, "leave")

    def go_on(self) -> None:
        if self.stopped and self.alive:
            self.stopped, self.calm_since, self.waited_since = False, self.world.now, self.world.now
            waiting, self.held_back = self.held_back, []
            for message in waiting:
                self.arrive(*message)
            self.trains_in(self.speed)

    @property
    def is_well(self) -> bool:
        return self.alive and not self.stopped and not self.cut_up and not self.cut_down

    def halt(self, error: Exception) -> None:
        """Ends with an error for people; somebody starts it again, without what led to it."""
        self.world.halted(self, error)
        self.checkpoints.clear()
        self.die()
        self.world.after(2.0, self.start)

    # Checkpoints

    def save(self) -> None:
        if any(own.digest is None for own in self.follower.fragments):
            return
        saved = {
            "follower": self.follower.state_dict(),
            "values": [(own.outer.copy(), own.momentum.copy(), own.local.copy(), own.lineage) for own in self.values],
            "held": [list(ids) for ids in self.held],
            "flying": dict(self.flying),
            "sent": dict(self.sent_payloads),
            "step": self.step,
            "not_finite": list(self.is_not_finite),
            "forgot": self.forgot,
        }
        self.checkpoints = [*self.checkpoints[-4:], saved]

    def load(self, saved: dict[str, Any]) -> bool:
        values = []
        for outer, momentum, local, lineage in saved["values"]:
            values.append(Values(outer.copy(), momentum.copy(), lineage))
            values[-1].local = local.copy()
        try:
            self.follower.load_state_dict(saved["follower"], [own.digest() for own in values])
        except ValueError as error:
            self.world.judge.halts[f"checkpoint: {type(error).__name__}"] += 1
            return False
        self.values, self.held, self.flying = values, [list(ids) for ids in saved["held"]], dict(saved["flying"])
        self.sent_payloads, self.step = dict(saved["sent"]), saved["step"]
        self.is_not_finite = list(saved["not_finite"])
        self.misled = saved["forgot"]
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
        self.world.send(self, "contribution", own, self.sent_payloads[own.fragment])

    def arrive(self, life: str | None, what: str, arguments: tuple[Any, ...]) -> None:
        if not self.alive or life not in (self.life, None):
            return
        if self.stopped:
            self.held_back.append((life, what, arguments))
            return
        self.heard_at = self.world.now
        try:
            getattr(self, f"on_{what}")(*arguments)
        except AgreementError as error:
            self.disagrees(error)

    def disagrees(self, error: AgreementError) -> None:
        if self.world.hub.disk.is_real:
            self.halt(error)
        else:
            # It refuses the hub and trains on its own: an operator will look after that hub.
            self.world.judge.halts["refused a hub"] += 1
            self.follower.reachable = False

    def on_heard(self) -> None:
        pass

    def on_unknown(self) -> None:
        self.broken = True

    def on_refused(self, why: str) -> None:
        self.world.judge.counts["refused"] += 1
        self.broken = True
        if "evicted" in why:
            self.halt(Refused(why))

    def on_evicted(self) -> None:
        self.halt(Refused("evicted"))

    def on_welcome(self, welcome: Welcome) -> None:
        launches = {standing.fragment: standing.life for standing in welcome.standing}
        for p in self.follower.welcome(welcome):
            self.world.judge.begins_again(self, p, launches[p])
            self.values[p].local = self.values[p].outer.copy()
            self.held[p] = []
            self.flying.pop(p, None)

    def on_call(self, call: Call) -> None:
        self.follower.hear(call)

    def on_record(self, record: Record | bytes, payloads: list[bytes] | None) -> None:
        if isinstance(record, bytes):
            try:
                record = Record.from_bytes(record)
            except Malformed:
                self.world.judge.counts["flips refused"] += 1
                self.broken = True
                return
            self.world.judge.violations.append(f"{self.name} took a damaged record")
        self.follower.learn(record)
        if payloads is None:
            return
        keys = [payload.key for own in record.counted for payload in own.payloads]
        if [key_of(payload) for payload in payloads] != keys:
            self.world.judge.counts["flips refused"] += 1
            self.broken = True
            return
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
        if not self.follower.follows or any(
            own.digest() != mine.digest for own, mine in zip(self.values, self.follower.fragments, strict=True)
        ):
            return
        arrays = [(own.outer.copy(), own.momentum.copy()) for own in self.values]
        state = (self.follower.header(), arrays, [own.lineage for own in self.values])
        if to is None:
            self.world.send(self, "anchor", *state)
        elif not self.cut_up:
            self.world.tell(to, None, "state", *state)

    def on_state(self, header: StateHeader, arrays: Any, lineages: list[str]) -> None:
        if not self.follower.wants_state:
            return
        came = [
            Values(outer.copy(), momentum.copy(), lineage)
            for (outer, momentum), lineage in zip(arrays, lineages, strict=True)
        ]
        # Wrong values: until all has landed again, a checkpoint does not say what was launched before.
        self.forgot = self.joined
        try:
            landings = self.follower.adopt(header, [own.digest() for own in came])
        except Refused:
            self.world.judge.counts["states refused"] += 1
            self.asked = ()
            return
        for p, landing in landings.items():
            self.world.judge.adopts(self, header.digests[p], came[p])
            self.place(p, came[p], landing)
        self.world.judge.weighs(self)
        self.world.judge.counts["states adopted"] += 1
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
        self.joined = self.joined or self.has_joined()
        if self.joined and not self.waits and not self.finishing:
            self.make_step()
        for call in follower.skips():
            world.send(self, "skip", call)
        for p in follower.launches(self.step):
            self.launch(p)
        while self.alive and self.land_due():
            pass
        if not self.alive:
            return
        if not self.waits:
            self.waited_since = world.now
        self.waits = follower.waits(self.step, world.now) > 0.0
        if not self.waits:
            world.judge.waited(self, world.now - self.waited_since)
        if self.step % 20 == 0 and not self.waits:
            self.save()
        if follower.finished:
            world.left(self)
            return
        self.trains_in(0.1 if self.waits else self.speed)

    def has_joined(self) -> bool:
        follower = self.follower
        return follower.reachable and follower.follows and all(own.has_joined for own in follower.fragments)

    def make_step(self) -> None:
        self.step += 1
        self.trained += 1
        for p, own in enumerate(self.values):
            own.local += NOISE[(self.trained * 7 + p * 3) % 64]
            self.held[p].append(self.trained)
        self.follower.trained(self.samples)

    def launch(self, p: int) -> None:
        own = self.values[p]
        gradient = own.outer - own.local
        if self.world.random.random() < self.world.share_not_finite:
            gradient[0] = np.nan
        exact = self.follower.fragments[p].is_last(self.world.terms)
        payload = (gradient if exact else rounded(gradient)).tobytes()
        finite = bool(np.isfinite(gradient).all())
        sent = self.follower.launch(p, self.step, own.digest(), (Payload(key_of(payload), len(payload)),), finite)
        if sent is None:
            self.world.judge.counts["wrong values found"] += 1
            self.held[p] = []
            return
        self.world.judge.launched(self, sent, self.held[p])
        self.is_not_finite[p] = not finite
        self.flying[p], self.held[p], self.sent_payloads[p] = self.held[p], [], payload
        self.contribute(sent)

    def hears_of_the_end(self, p: int) -> bool:
        call = self.follower.fragments[p].call
        return call is not None and call.final

    def land_due(self) -> bool:
        landed = False
        for record in self.follower.due(self.step):
            if self.alive and record.key in self.payloads:
                self.land(record)
                landed = True
        return landed

    def land(self, record: Record) -> None:
        p = record.fragment
        old = self.values[p]
        new = self.stepped(old, record, self.payloads.pop(record.key))
        if self.does_wrong:
            new.outer[0] = np.nextafter(new.outer[0], np.float32(9))
            self.does_wrong, self.was_wrong = False, True
        try:
            landing = self.follower.land(record, old.digest(), new.digest())
        except AgreementError as error:
            self.halt(error)
            return
        self.world.judge.lands(self, record, landing, old, new)
        if landing is MergeAction.REFUSE:
            self.held[p] = []
            self.flying.pop(p, None)
        else:
            self.place(p, new, landing)

    def in_order(self, record: Record) -> list[int]:
        return list(range(len(record.counted)))

    def stepped(self, old: Values, record: Record, payloads: list[bytes]) -> Values:
        weights = [1 if record.final else own.weight for own in record.counted]
        total, count = max(1, sum(weights)), len(weights)
        mean = np.zeros(LENGTH, np.float32)
        for index in self.in_order(record):
            factor = np.float32(count * weights[index] / total)
            mean += factor * np.frombuffer(payloads[index], np.float32)
        mean /= np.float32(count)
        momentum = np.float32(0.9) * old.momentum + mean
        move = mean if record.final else np.float32(0.4) * (mean + np.float32(0.9) * momentum)
        return Values(old.outer - move, momentum, record.key)

    def place(self, p: int, new: Values, landing: MergeAction) -> None:
        """Does to the local values, and to the steps that are in them, what a landing says."""
        old, own = self.values[p], self.follower.fragments[p]
        if landing in (MergeAction.MIX, MergeAction.DROP):
            new.local = np.float32(0.5) * (old.local + new.outer)
        elif landing is MergeAction.CARRY:
            new.local = old.local + (new.outer - old.outer)
        else:
            self.held[p] = []
        if own.flight is None:
            flown = self.flying.pop(p, [])
            if landing is MergeAction.CARRY:
                self.held[p] = flown + self.held[p]
        self.values[p] = new

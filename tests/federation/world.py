"""The world of the trial: sites and a hub in virtual time, a network that loses and delays, and faults by a seed."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import numpy as np

from lightning_sdiloco.federation import ChosenQuorum, MergeAction, Record, Terms
from lightning_sdiloco.federation.codec import key_of
from tests.federation.hub import Disk, SimulatedHub
from tests.federation.judge import Judge
from tests.federation.site import LENGTH, SimulatedSite

FAULTS = (
    *("kill",) * 3,
    *("stop", "cut", "cut_up", "cut_down", "slow_network") * 2,
    *("hub_kill", "hub_stop", "second_hub"),
    *("old_ledger", "old_checkpoint", "lost_disk", "leave"),
    *("flip_outer", "flip_payload", "flip_record", "flip_state", "flip_checkpoint"),
    *("wrong_arithmetic", "not_finite"),
)
QUIET, ENDING = 40.0, 40.0
LEAST = 0.5


@dataclass
class World:
    seed: int
    faults: int = 50

    def __post_init__(self) -> None:
        self.random = random = Random(self.seed)
        self.now, self.numbers = 0.0, count()
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.judge = Judge()
        self.history: list[str] = []
        self.left_faults, self.slow_until, self.share_not_finite = self.faults, 0.0, 0.0
        self.flips: set[str] = set()
        self.trouble = 0
        grace = random.choice([0.3, 0.6, 1.5])
        quorum: int | ChosenQuorum = random.choice([1, 1, 2])
        if self.seed // 4 % 4 == 3:
            quorum = ChosenQuorum("lightning_sdiloco.DynamicBackup", {"least": LEAST})
        self.terms = Terms(3, 8, 2, grace, lease=3.0, quorum=quorum)
        # Sites with a loop of their own may begin to train before the hub has let them in.
        self.sites_join = self.seed // 2 % 4 != 0
        self.late = MergeAction.DROP if self.seed // 16 % 2 else MergeAction.CARRY
        self.charter = key_of(f"charter {self.seed}".encode())
        self.disk = Disk()
        self.quiet_records: list[Record] | None = None
        self.hub = SimulatedHub(self, self.disk)
        speeds = [0.15, 0.15, 0.3, random.choice([0.15, 0.6])]
        self.sites = {
            f"s{i}": SimulatedSite(self, f"s{i}", speed, random.choice([1, 2, 4])) for i, speed in enumerate(speeds)
        }
        self.sites["s0"].begins_as_founder = True
        for site in self.sites.values():
            self.after(random.random(), site.start)
        self.after(5.0, self.fault)
        self.after(5.0, self.look_around)

    # Time and network

    def after(self, delay: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.numbers), what, arguments))

    def delays(self) -> list[float]:
        """When a message arrives: lost, twice, late, or as it should."""
        random = self.random.random
        if self.left_faults and random() < 0.01:
            return []
        one = 0.02 + 0.08 * random()
        if self.now < self.slow_until or (self.left_faults and random() < 0.02):
            one += 4 * random()
        return [one, one + random()] if random() < 0.02 else [one]

    def send(self, site: SimulatedSite, what: str, *arguments: Any) -> None:
        """From a site to the hub."""
        if what == "contribution" and "flip_payload" in self.flips:
            self.flips.discard("flip_payload")
            arguments = (arguments[0], self.flipped(arguments[1]))
        delays = [] if site.cut_up else self.delays()
        site.broken |= not delays
        for delay in delays:
            self.after(delay, self.arrives, self.hub, site.name, site.life, what, arguments)

    def arrives(self, hub: SimulatedHub, site: str, life: str, what: str, arguments: tuple[Any, ...]) -> None:
        hub.arrive(site, life, what, arguments)

    def tell(self, name: str, life: str | None, what: str, *arguments: Any, reliably: bool = False) -> None:
        """From the hub to a site, and from a donor through it."""
        site = self.sites[name]
        if site.cut_down:
            return
        if f"flip_{what}" in self.flips:
            self.flips.discard(f"flip_{what}")
            arguments = self.damaged(what, arguments)
        delays = [0.05 + 0.05 * self.random.random()] if reliably else self.delays()
        if site.alive:
            site.broken |= not delays
        for delay in delays:
            self.after(delay, site.arrive, life, what, arguments)

    def flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def damaged(self, what: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if what == "record":
            return (self.flipped(arguments[0].to_bytes()), arguments[1])
        header, arrays, lineages = arguments
        index = self.random.randrange(len(arrays))
        outer = np.frombuffer(self.flipped(arrays[index][0].tobytes()), np.float32).copy()
        return (header, [*arrays[:index], (outer, arrays[index][1]), *arrays[index + 1 :]], lineages)

    def first_values(self, p: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(LENGTH, p + 1, np.float32), np.zeros(LENGTH, np.float32)

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
        self.history.append(f"{self.now:.2f} {kind} {site.name}")
        getattr(self, f"do_{kind}")(site)
        self.after(self.random.expovariate(1 / 3), self.fault)

    def do_kill(self, site: SimulatedSite) -> None:
        site.die()
        self.after(self.random.uniform(0.1, 20), site.start)

    def do_old_checkpoint(self, site: SimulatedSite) -> None:
        site.checkpoints = site.checkpoints[: self.random.randint(1, 3)]
        self.do_kill(site)

    def do_lost_disk(self, site: SimulatedSite) -> None:
        site.checkpoints = []
        self.do_kill(site)

    def do_flip_checkpoint(self, site: SimulatedSite) -> None:
        if site.checkpoints:
            outer, *rest = site.checkpoints[-1]["values"][0]
            site.checkpoints[-1]["values"][0] = (np.frombuffer(self.flipped(outer.tobytes()), np.float32).copy(), *rest)
        self.do_kill(site)

    def do_stop(self, site: SimulatedSite) -> None:
        site.stopped = site.alive
        self.after(self.random.uniform(0.1, 20), site.go_on)

    def do_cut(self, site: SimulatedSite, up: bool = True, down: bool = True) -> None:
        site.cut_up, site.cut_down = site.cut_up or up, site.cut_down or down
        self.after(self.random.uniform(0.1, 20), self.heal, site)

    def do_cut_up(self, site: SimulatedSite) -> None:
        self.do_cut(site, down=False)

    def do_cut_down(self, site: SimulatedSite) -> None:
        self.do_cut(site, up=False)

    def heal(self, site: SimulatedSite) -> None:
        site.cut_up = site.cut_down = False
        site.broken, site.calm_since = True, self.now

    def do_slow_network(self, site: SimulatedSite) -> None:
        self.slow_until = self.now + self.random.uniform(1, 5)

    def do_hub_kill(self, site: SimulatedSite) -> None:
        self.hub.dead = True
        self.after(self.random.uniform(0.1, 8), self.hub_starts, self.disk, self.hub)

    def hub_starts(self, disk: Disk, instead_of: SimulatedHub | None) -> None:
        if self.hub.dead and (instead_of is None or self.hub is instead_of):
            self.hub = SimulatedHub(self, disk)

    def do_hub_stop(self, site: SimulatedSite) -> None:
        self.hub.stopped = not self.hub.dead
        self.after(self.random.uniform(0.1, 8), self.hub.go_on)

    def do_second_hub(self, site: SimulatedSite) -> None:
        """The hub stops, another one takes over, and the first goes on, not knowing."""
        first = self.hub
        if first.dead or first.stopped or not first.disk.is_real:
            return
        first.stopped = True
        self.hub = SimulatedHub(self, self.disk)
        self.after(self.random.uniform(0.1, 8), first.go_on)

    def do_old_ledger(self, site: SimulatedSite) -> None:
        """The hub is started with a backup; after a while somebody notices and starts it with the real ledger."""
        self.hub.dead = True
        backup = self.disk.without_the_last(
            min(self.random.randint(1, 12), len(self.disk.records)),
            {own: sent.ids for own, sent in self.judge.sent.items()},
        )
        self.hub = SimulatedHub(self, backup)
        self.after(self.random.uniform(1, 6), self.restore, self.hub)

    def restore(self, backup: SimulatedHub) -> None:
        backup.dead = True
        if not self.hub.disk.is_real:
            self.hub = SimulatedHub(self, self.disk)

    def do_leave(self, site: SimulatedSite) -> None:
        if site.alive:
            site.finishing = True
            site.follower.finish()

    def left(self, site: SimulatedSite) -> None:
        """A site has trained all it had to, and all of it is counted; some come back."""
        unsettled = [p for p, own in enumerate(site.follower.fragments) if not own.ended]
        uncounted = [p for p in unsettled if site.held[p] or p in site.flying]
        self.judge.deny(bool(uncounted), f"{site.name} left before its steps were counted")
        self.judge.counts["left"] += 1
        site.save()
        site.die()
        if self.disk.ending:
            site.gone_for_good = True
        else:
            self.after(self.random.uniform(1, 20), site.start)

    def do_flip_outer(self, site: SimulatedSite) -> None:
        self.trouble += 1
        if site.alive:
            own = self.random.choice(site.values)
            own.outer = np.frombuffer(self.flipped(own.outer.tobytes()), np.float32).copy()

    def do_wrong_arithmetic(self, site: SimulatedSite) -> None:
        self.trouble += 1
        if site.alive:
            site.does_wrong = True

    def do_not_finite(self, site: SimulatedSite) -> None:
        self.trouble += 1
        self.share_not_finite = 0.3
        self.after(2.0, setattr, self, "share_not_finite", 0.0)

    def do_flip_payload(self, site: SimulatedSite) -> None:
        self.flips.add("flip_payload")

    def do_flip_record(self, site: SimulatedSite) -> None:
        self.flips.add("flip_record")

    def do_flip_state(self, site: SimulatedSite) -> None:
        self.flips.add("flip_state")

    # People

    def operator_hears(self, hub: SimulatedHub, error: Exception) -> None:
        """The hub cannot decide. Somebody looks at the sites, and evicts those that are wrong."""
        self.judge.halts[f"hub: {type(error).__name__}"] += 1
        self.judge.deny(not self.trouble, f"a halt without a reason: {error}")
        for round in list(hub.ledger.open.values()):
            able = [own for own in round.here.values() if not own.reason]
            if len({own.digest for own in able}) == 1:
                continue
            right = able[0].digest if able else None
            for own in [own for own in round.here.values() if own.digest != right]:
                hub.ledger.evict(own.site)
                hub.disk.contributions = {
                    key: value for key, value in hub.disk.contributions.items() if key[1] != own.site
                }
                self.tell(own.site, None, "evicted")

    def halted(self, site: SimulatedSite, error: Exception) -> None:
        again = "cannot be made again" in str(error)
        self.judge.halts["site: cannot be made again" if again else f"site: {type(error).__name__}"] += 1

    # The run

    def recorded(self, record: Record) -> None:
        if self.quiet_records is not None:
            self.quiet_records.append(record)

    def look_around(self) -> None:
        if not self.hub.dead and not self.hub.stopped and self.hub.disk.is_real:
            self.judge.looks_around(list(self.sites.values()), self.hub)
        self.after(5.0, self.look_around)

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done() and not self.judge.violations:
            self.now, _, what, arguments = heapq.heappop(self.queue)
            what(*arguments)

    def run(self) -> Judge:
        """Runs all faults, then a quiet time in which everything has to be as it was, then the end of the run."""
        self.run_until(lambda: not self.left_faults)
        self.be_quiet()
        until = self.now + QUIET
        self.run_until(lambda: self.now > until)
        if self.is_orphaned:
            self.judge.halts["the run waits for an operator"] += 1
            return self.judge
        self.check_quiet()
        self.hub.end()
        until = self.now + ENDING
        self.run_until(lambda: self.now > until or all(site.gone_for_good for site in self.sites.values()))
        self.check_end()
        return self.judge

    def be_quiet(self) -> None:
        self.slow_until = 0.0
        self.share_not_finite = 0.0
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

    @property
    def is_orphaned(self) -> bool:
        """Whether nobody has a state from which the run can go on, and hub or sites have said so to people."""
        living = [site for site in self.sites.values() if site.alive]
        donor = isinstance(self.hub.ledger.source("nobody", self.now), str)
        said = self.judge.counts["nobody has a state"] or self.judge.halts["site: cannot be made again"]
        return bool(said) and not donor and not any(site.follower.follows for site in living)

    def check_quiet(self) -> None:
        ledger, deny = self.hub.ledger, self.judge.deny
        for site in self.sites.values():
            fragments = site.follower.fragments
            behind = [closed.round - own.applied.round for closed, own in zip(ledger.closed, fragments, strict=True)]
            deny(site.alive and max(behind) > 2, f"{site.name} is {behind} rounds behind at the end")
            deny(site.alive and not site.follower.follows, f"{site.name} does not follow at the end")
        self.check_same_values()
        rounds = len(self.quiet_records or ()) / self.terms.fragments
        deny(rounds < QUIET / 6, f"only {rounds} rounds while nothing was wrong")
        self.check_shares()

    def check_shares(self) -> None:
        """Sites that can answer a call within the grace count, also those at half the speed of the others."""
        records = [own for own in self.quiet_records or () if own.round]
        for site in self.sites.values():
            prompt = (
                site.alive and site.calm_since < self.now - QUIET + 1 and site.speed <= 0.3 and self.terms.grace >= 0.65
            )
            counted = sum(own.of(site.name) is not None for own in records[len(records) // 2 :])
            share = counted / max(1, len(records) - len(records) // 2)
            self.judge.deny(prompt and not site.finishing and share < 0.75, f"{site.name} counts in {share:.0%}")

    def check_same_values(self) -> None:
        for p in range(self.terms.fragments):
            held: dict[str, bytes] = {}
            for site in (site for site in self.sites.values() if site.alive):
                own = site.values[p].outer.tobytes()
                same = held.setdefault(site.follower.fragments[p].applied.key, own) == own
                self.judge.deny(not same, f"silent divergence: {site.name} holds other values of fragment {p}")

    def check_end(self) -> None:
        if self.judge.violations:
            return
        left = [site.name for site in self.sites.values() if not site.gone_for_good]
        self.judge.deny(bool(left), f"{left} have not come to the end of the run")
        for p in range(self.terms.fragments):
            ends = {site.values[p].outer.tobytes() for site in self.sites.values()}
            self.judge.deny(len(ends) > 1, f"silent divergence: the run ended with {len(ends)} values of fragment {p}")
            record = [own for own in self.disk.all_records() if own.fragment == p][-1]
            self.judge.deny(not record.final, f"the last record of fragment {p} is not final")

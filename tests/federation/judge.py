"""The judge of the trial: it sees all that happens, shares no code with the rules, and writes down what must not be.

It knows of every trained step whose it is (`ids`), and of all outer values the key of the last record that made them
(`lineage`), whatever the sites believe. Bit flips and wrong arithmetic change values, never the lineage.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lightning_sdiloco.federation import RETENTION, Contribution, MergeAction, Record

if TYPE_CHECKING:
    from tests.federation.hub import Disk, SimulatedHub
    from tests.federation.site import SimulatedSite, Values


@dataclass
class Sent:
    """What was launched, as it really was."""

    ids: list[int]
    lineage: str
    digest: int
    local: np.ndarray
    acknowledged_by: "SimulatedHub | None" = None


@dataclass
class Judge:
    violations: list[str] = field(default_factory=list)
    halts: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    sent: dict[Contribution, Sent] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    disks: dict[str, "Disk"] = field(default_factory=dict)

    def deny(self, happened: bool, what: str) -> None:
        if happened:
            self.violations.append(what)

    # What sites do

    def launched(self, site: "SimulatedSite", own: Contribution, ids: list[int]) -> None:
        values = site.values[own.fragment]
        self.sent[own] = Sent(list(ids), values.lineage, values.digest(), values.local.copy())
        self.deny(own.weight != len(ids) * site.samples, f"{site.name} weighs {own.weight} for {len(ids)} steps")
        early = len(ids) < site.world.terms.least_steps and not (site.finishing or site.hears_of_the_end(own.fragment))
        self.deny(early, f"{site.name} launched after {len(ids)} steps")
        self.counts["launches"] += 1

    def lands(self, site: "SimulatedSite", record: Record, landing: MergeAction, old: "Values", new: "Values") -> None:
        """Looks at a landing before the site does to its values what it says."""
        p = record.fragment
        rounds = self.disks[record.key].counted[site.name, p]
        counted = {
            step for step in (*site.held[p], *site.flying.get(p, ())) if rounds.get(step, 1 << 60) <= record.round
        }
        flight = site.flying.get(p)
        where = f"{site.name}, round {record.round} of {p}"
        if landing is MergeAction.REFUSE:
            self.deny(old.digest() == record.digest, f"{where}: refused what was right")
            self.deny(old.lineage != record.previous, f"{where}: nearly landed a record of another history")
            self.counts["wrong values refused"] += 1
            return
        self.deny(old.lineage != record.previous, f"silent divergence: {where} has another history")
        self.deny(old.digest() != record.digest, f"silent divergence: {where} has other values")
        if not site.was_wrong:
            made = self.made.setdefault(record.key, new.digest())
            self.deny(made != new.digest(), f"silent divergence: {where} made other values of the same record")
        self.counts[f"landings {landing.value}"] += 1
        if landing is MergeAction.MIX:
            self.deny(not flight or not set(flight) <= counted, f"{where}: lost a flight that nobody counted")
        if landing is MergeAction.DROP:
            self.deny(not flight or bool(counted & set(flight)), f"{where}: drops what was counted, or nothing")
        if landing is MergeAction.CARRY:
            self.deny(bool(counted), f"{where}: carries {len(counted)} steps that were counted")

        if record.final:
            mean = np.mean([self.sent[own].local for own in record.counted], axis=0)
            # An outer parameter that a flipped bit has made huge leaves little of a float32.
            lost = 2.0**-20 * np.abs(old.outer)
            self.deny(not (np.abs(new.outer - mean) <= 2.0**-8 * np.abs(mean) + lost).all(), f"{where}: no exact mean")
        elif landing is MergeAction.TAKE:
            mine = record.of(site.name)
            earlier = mine is not None and self.sent[mine].ids != flight
            self.deny(not (earlier or site.is_not_finite[p]), f"{where}: dropped what it holds")
            if mine is not None and earlier and not site.is_not_finite[p]:
                self.loses(site, p, mine, where)

    def begins_again(self, site: "SimulatedSite", p: int, life: str) -> None:
        """Looks at what is dropped because an earlier life has launched it, before it is."""
        round = site.follower.fragments[p].next_round
        launches = [own for own in self.sent if (own.fragment, own.site, own.life) == (p, site.name, life)]
        own = max(launches, key=lambda own: own.round)
        self.counts["begins again"] += 1
        self.loses(site, p, own, f"{site.name}, in round {round} of {p}")

    def loses(self, site: "SimulatedSite", p: int, launch: Contribution, where: str) -> None:
        """Looks whether what is dropped because a launch counts was trained after it: it is not in it, and is lost."""
        dropped = (*site.held[p], *site.flying.get(p, ()))
        after = [step for step in dropped if step > max(self.sent[launch].ids, default=0)]
        self.deny(
            bool(after) and site.world.sites_join and not site.misled,
            f"{where}: loses {len(after)} steps that were trained after the launch of an earlier life",
        )

    def adopts(self, site: "SimulatedSite", said: int, came: "Values") -> None:
        self.deny(came.digest() != said, f"{site.name} took over a damaged state")

    def weighs(self, site: "SimulatedSite") -> None:
        """Compares what the rules say that a site holds with what it does hold."""
        for p, own in enumerate(site.follower.fragments):
            steps = own.steps + (own.flight.steps if own.flight else 0)
            held = len(site.held[p]) + len(site.flying.get(p, ()))
            self.deny(steps != held, f"{site.name} holds {held} steps of fragment {p}, and says {steps}")

    def waited(self, site: "SimulatedSite", seconds: float) -> None:
        most = site.world.terms.longest_wait + 0.3
        self.deny(seconds > most, f"{site.name} did not train for {seconds:.1f} s")

    # What hubs do

    def recorded(self, disk: "Disk", hub: "SimulatedHub", record: Record) -> None:
        where = f"{'' if disk.is_real else 'backup: '}round {record.round} of {record.fragment}"
        self.counts["records"] += disk.is_real
        self.disks[record.key] = disk
        for own in record.counted:
            sent, counted = self.sent.get(own), disk.counted[own.site, own.fragment]
            if sent is None:
                self.violations.append(f"{where} counts what {own.site} has not contributed")
                return
            self.deny(sent.lineage != record.previous, f"silent divergence: {where} counts another history")
            self.deny(sent.digest != record.digest, f"silent divergence: {where} counts what was measured elsewhere")
            twice = counted.keys() & set(sent.ids)
            self.deny(bool(twice), f"{where} counts {len(twice)} steps of {own.site} twice")
            counted.update(dict.fromkeys(sent.ids, record.round))
        sites = {own.site for own in record.counted} | {entry.site for entry in record.left_out}
        self.deny(len(sites) < self.fewest(hub), f"{where} was closed with {len(sites)} sites")
        for (p, site), own in disk.contributions.items():
            lost = p == record.fragment and own.round == record.round and site not in sites
            acknowledged = self.sent[own].acknowledged_by is hub
            self.deny(lost and acknowledged, f"{where} forgot what {site} had contributed")
        for entry in record.left_out:
            own = disk.contributions.get((record.fragment, entry.site))
            wrong = own is None or not own.finite or not (own.weight or own.exact)
            wrong = wrong or self.sent[own].digest != record.digest
            self.deny(not wrong, f"{where} leaves {entry.site} out: {entry.reason}")
        self.counts["left out"] += len(record.left_out)

    def closes(self, hub: "SimulatedHub") -> None:
        """Looks, after the hub closed what was due, for rounds that are open for too long."""
        now, ledger, terms = hub.world.now, hub.ledger, hub.world.terms
        for p, round in ledger.open.items():
            able = [own for own in round.here.values() if not own.reason]
            living = hub.living()
            if not able or len(round.here) < self.fewest(hub) or len({own.digest for own in able}) > 1:
                continue
            here = f"round {ledger.closed[p].round + 1} of {p}"
            # For the time of a lease a hub that was started waits for those before, also to know how many there are.
            settled = now > hub.started + terms.lease
            over = not hub.is_last(p) and now > min(round.arrived.values()) + terms.grace
            over = over and (settled or isinstance(terms.quorum, int))
            alone = settled and all(site in round.arrived for site in living)
            # What has just changed is seen by the next tick.
            hub.overdue[p] = hub.overdue[p] + 1 if over or alone else 0
            self.deny(hub.overdue[p] > 2 and over, f"{here} is open beyond the grace")
            self.deny(hub.overdue[p] > 2 and alone, f"{here} waits for somebody who is not there")

    @staticmethod
    def fewest(hub: "SimulatedHub") -> int:
        """How many make a round, at least: a number, or half of those who are there."""
        quorum = hub.world.terms.quorum
        return quorum if isinstance(quorum, int) else (len(hub.living()) + 1) // 2

    # The run

    def looks_around(self, sites: list["SimulatedSite"], hub: "SimulatedHub") -> None:
        """Looks, when nothing has been wrong for a while, for sites that stay behind."""
        if not isinstance(hub.ledger.source("the judge", hub.world.now), str):
            # The hub says that nobody has a state: who has one is on the way, or an operator decides.
            return
        for site in sites:
            calm = site.world.now - max(site.calm_since, hub.started) > 15
            pairs = zip(hub.ledger.closed, site.follower.fragments, strict=True) if site.is_well else ()
            behind = max((closed.round - own.applied.round for closed, own in pairs), default=0)
            self.deny(calm and site.is_well and behind > RETENTION, f"{site.name} is {behind} rounds behind")

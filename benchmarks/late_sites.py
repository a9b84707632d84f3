"""What becomes of what a site has trained when its contribution comes too late: four rules, on a language model.

    python -m benchmarks.late_sites [--rhythm H] [--workers N] [--minutes M] [--quick] [--json FILE] [--picture FILE]

Four sites train one model through a hub, with the rules of a federation, in virtual time. In every round of every
fragment each site is late with some probability, and never all of them. Data, start and who is late depend on the seed
alone, so that the rules are compared pair by pair:

- ``carry``: the local parameters move by as much as the outer ones. What was trained is launched again with the next.
- ``mix``: the local parameters are mixed with the outer ones as always. What was late counts nowhere.
- ``discount``: they are mixed too, and what was late counts in the next round, with half of its weight.
- ``once``: as ``mix``, but if the next contribution of the site is late too, that is carried. It is the default.

In the last round nobody is late, and it is a plain mean: what is compared is the model that all have at the end.
With --json every run is kept at once, and runs that the file has are not made again.
"""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from benchmarks import report, runs
from benchmarks.comparison import interval
from benchmarks.models import TINY
from benchmarks.picture import BLUE, GREY, RED, figure, save
from benchmarks.quality import HELD_OUT, pair
from benchmarks.runs import Runs
from benchmarks.training import Simulated, Training
from lightning_sdiloco import Federation, StreamingDiLoCo
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine import InlineBackground
from lightning_sdiloco.engine.outer.optimizer import OuterState
from lightning_sdiloco.engine.site.arithmetic import Encoded, SiteArithmetic, Stepped
from lightning_sdiloco.engine.site.world import FederatedWorld
from lightning_sdiloco.federation import Contribution, MergeAction, Progress, Record
from lightning_sdiloco.hub import Connection, InProcessConnection, InProcessHub
from lightning_sdiloco.tools.simulate.seeds import half_width

CARRY, MIX, DISCOUNT, ONCE = RULES = ("carry", "mix", "discount", "once")

WEIGHT = 0.5
"""What is left of the weight of what counts a round later, with ``discount``."""

SHARES: Mapping[float, Sequence[str]] = {0.5: RULES, 0.25: RULES, 0.02: (CARRY, ONCE), 0.0: (ONCE,)}
"""How many contributions are late, and the rules that are compared there: where nobody is, all are the same."""

GRACE = 2.0
"""For how many inner steps a round waits for those who are late: fewer than a flight takes."""

Blobs = Mapping[str, bytes | bytearray | memoryview]


@dataclass(frozen=True)
class LateTraining(Training):
    """A training by sites of a federation.

    Attributes:
        late: The share of contributions that are late.
        rule: What becomes of them.
    """

    late: float = field(default=0.0, kw_only=True)
    rule: str = field(default=CARRY, kw_only=True)

    @property
    @override
    def can_go_on(self) -> bool:
        return False  # what the hub knows is not kept

    @override
    def simulated(self, models: Sequence[nn.Module], optimizers: Sequence[Sequence[Optimizer]]) -> Simulated:
        return Sites(self, models, optimizers)


class LateHub(InProcessHub):
    """A hub whose clock counts inner steps.

    Attributes:
        late: What came too late, by fragment and round.
    """

    def __init__(self, sites: int, share: float, seed: int) -> None:
        self._now, self._share, self._seed, self._names = 0.0, share, seed, [f"s{site}" for site in range(sites)]
        self.ends = False
        self.late: dict[tuple[int, int], list[tuple[Contribution, Blobs]]] = {}
        super().__init__("late", sites, clock=lambda: self._now, sleep=self.passes)

    def passes(self, steps: float) -> None:
        """Lets some inner steps pass."""
        self._now += steps

    def is_late(self, own: Contribution) -> bool:
        """Tells whether a contribution comes too late; not all to one round do."""
        chance = random.Random(f"{self._seed} {own.fragment} {own.round}")
        late = [site for site in self._names if chance.random() < self._share]
        if len(late) == len(self._names):
            late.remove(chance.choice(late))
        return own.site in late and not self.ends


class LateConnection(InProcessConnection):
    """A connection over which some contributions arrive when their round is closed."""

    def __init__(self, hub: LateHub, site: str) -> None:
        super().__init__(hub, site)
        self._late = hub

    @override
    def contribute(self, own: Contribution, blobs: Blobs) -> None:
        if self._late.is_late(own):
            self._late.late.setdefault((own.fragment, own.round), []).append((own, blobs))
        else:
            super().contribute(own, blobs)


class Dropping(Progress):
    """Drops what is late, every time."""

    @override
    def landing(self, record: Record, site: str) -> MergeAction:
        self.dropped = False
        return super().landing(record, site)


class LateArithmetic:
    """Counts what was late in the round after it."""

    def __init__(self, arithmetic: SiteArithmetic, hub: LateHub) -> None:
        self._arithmetic, self._hub = arithmetic, hub
        self.encode, self.bytes_fetched = arithmetic.encode, arithmetic.bytes_fetched

    def apply(self, record: Record, blobs: Blobs, before: OuterState, encoded: Encoded | None) -> Stepped:
        """See `SiteArithmetic.apply`."""
        # The last round is no outer step, but the mean of what the sites hold.
        came = [] if record.final else self._hub.late.get((record.fragment, record.round - 1), [])
        late = sorted(came, key=lambda came: came[0].site)
        more = [replace(own, weight=max(1, round(WEIGHT * own.weight))) for own, _ in late]
        every = {**blobs, **{key: blob for _, its in late for key, blob in its.items()}}
        return self._arithmetic.apply(replace(record, counted=(*record.counted, *more)), every, before, encoded)


class Sites:
    """Sites of a federation in this process, of one rank each; stands in for `SimulatedGroups`."""

    def __init__(
        self, training: LateTraining, models: Sequence[nn.Module], optimizers: Sequence[Sequence[Optimizer]]
    ) -> None:
        self._hub, self._samples = LateHub(len(models), training.late, training.seed), training.batch
        self.engines: list[StreamingDiLoCo] = []
        self._worlds: list[FederatedWorld] = []
        for number, (model, own) in enumerate(zip(models, optimizers, strict=True)):
            topology = replace(Topology(), background=InlineBackground.connect(1)[0])
            federation = _here(LateConnection(self._hub, f"s{number}"), "carry" if training.rule == CARRY else "drop")
            engine = StreamingDiLoCo(
                model,
                topology=topology,
                inner_optimizers=own,
                federation=federation,
                offload=False,
                **(training.choices or {}),
            )
            assert isinstance(engine.loop, FederatedWorld)
            self.engines.append(engine)
            self._worlds.append(engine.loop)
        for _ in range(2):
            for world in self._worlds:
                world.hear()
        for world in self._worlds if training.rule in (MIX, DISCOUNT) else ():
            world.follower.fragments = [Dropping(**vars(own)) for own in world.follower.fragments]
        for world in self._worlds if training.rule == DISCOUNT else ():
            world._arithmetic = LateArithmetic(world._arithmetic, self._hub)  # type: ignore[assignment]

    def average_gradients(self) -> None:
        """Does nothing: a federation has no warm-up."""

    def step(self, *, trained: Sequence[int] = (), idle: Collection[int] = ()) -> None:
        """Counts an inner step of every site: all train whole batches."""
        del trained, idle
        self._hub.passes(1.0)
        for engine in self.engines:
            engine.launch_due(samples=self._samples)
        for engine in self.engines:
            engine.land_due()

    def finish(self) -> None:
        """Ends the run: the next round of every fragment is the last, and nobody is late in it."""
        self._hub.ends = True
        self._hub.coordinator.end()
        for world in self._worlds:
            world.follower.finish()
        while not all(world.is_over for world in self._worlds):
            self._hub.passes(1.0)
            for world, engine in zip(self._worlds, self.engines, strict=True):
                world.launch_due(engine.inner_steps)
            for engine in self.engines:
                engine.land_due()
        for engine in self.engines:
            engine.close()


def _here(connection: InProcessConnection, late: Literal["carry", "drop"]) -> Federation:
    class Here(Federation):
        @override
        def connect(self, ranks: int = 1) -> Connection:
            return connection

    return Here("hub:1", "late", connection.site, insecure=True, lease=1e6, grace=GRACE, late=late)


class Rhythm(NamedTuple):
    """How often fragments travel.

    Attributes:
        sync_every: H.
        batch: Windows that a site sees in a step: with more there are fewer steps of the same tokens.
    """

    sync_every: int
    batch: int


RHYTHMS = {"H=20": Rhythm(20, batch=4), "H=50": Rhythm(50, batch=1)}
"""With H=20 a fragment has 44 rounds, with H=50 it has 71, as in the verdict of `benchmarks.quality`."""


def late(rule: str, share: float, seed: int, rhythm: Rhythm) -> LateTraining:
    """Makes a training with the model, the rates and the settings of the verdict of `benchmarks.quality`."""
    like, _ = pair("0.1M", 4, seed, sync_every=rhythm.sync_every)
    return LateTraining(**{**vars(like), "batch": rhythm.batch, "late": share, "rule": rule})


def wanted(rhythm: Rhythm) -> Iterator[LateTraining]:
    """Yields all trainings: seed by seed, so that what is made is paired."""
    for share, rules in SHARES.items():
        for seed in HELD_OUT:
            yield from (late(rule, share, seed, rhythm) for rule in rules)


def quick() -> Iterator[LateTraining]:
    """Yields trainings that show that the benchmark runs."""
    for rule in RULES:
        yield replace(late(rule, 0.5, 0, Rhythm(10, batch=1)), size=TINY, budget=0.05)


def differences(kept: Runs, trainings: Sequence[LateTraining]) -> dict[str, list[float]]:
    """Returns by how much each rule ends with a higher loss than ``carry``, in nats per byte, seed by seed."""
    found: dict[str, list[float]] = {}
    for one in trainings:
        own, carried = kept.get(one), kept.get(replace(one, rule=CARRY))
        if one.rule != CARRY and own is not None and carried is not None:
            found.setdefault(_name(one), []).append(own["loss"] - carried["loss"])
    return found


def costs(kept: Runs, trainings: Sequence[LateTraining]) -> dict[str, list[float]]:
    """Returns by how many percent each ends with a higher loss than where nobody is late, seed by seed."""
    found: dict[str, list[float]] = {}
    for one in trainings:
        own, in_time = kept.get(one), kept.get(replace(one, late=0.0, rule=ONCE))
        if one.late and own is not None and in_time is not None:
            found.setdefault(_name(one), []).append(100 * (own["loss"] / in_time["loss"] - 1))
    return found


def _name(training: LateTraining) -> str:
    sync_every = (training.choices or {})["sync_every"]
    return f"{training.rule}, {training.late:.0%} late, H={sync_every}"


def _losses(kept: Runs, trainings: Sequence[LateTraining]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in trainings:
        if (run := kept.get(one)) is not None:
            found.setdefault(_name(one), []).append(run["loss"])
    return found


def show(kept: Runs, trainings: Sequence[LateTraining]) -> dict[str, float]:
    """Prints a row for each rule and share; returns the mean differences."""
    losses, minus, cost = _losses(kept, trainings), differences(kept, trainings), costs(kept, trainings)
    rows = [
        [
            name,
            str(len(own)),
            f"{mean(own):.3f}",
            interval(minus[name]) if name in minus else "",
            _verdict(minus, name),
            interval(cost[name], digits=1) if name in cost else "",
        ]
        for name, own in losses.items()
    ]
    columns = ["what is late", "seeds", "loss", "minus carry", "", "minus nobody late, %"]
    caption = "Loss in nats per byte; the difference is the mean over the seeds, with its 95 % interval."
    report.show("late_sites: 110,832 parameters, 16 tokens per parameter, four sites", columns, rows, caption)
    found = {f"{name}, minus carry": mean(own) for name, own in minus.items()}
    return found | {f"{name}, minus nobody late, %": mean(own) for name, own in cost.items()}


def _verdict(minus: Mapping[str, Sequence[float]], name: str) -> str:
    half = half_width(minus[name]) if name in minus else None
    if half is None:
        return ""
    worse = mean(minus[name])
    return "no difference" if abs(worse) <= half else "worse" if worse > 0 else "better"


def draw(minus: Mapping[str, Sequence[float]], options: Any) -> None:
    """Draws the differences with their intervals."""
    if options.picture is None:
        return
    picture, (axes,) = figure(height=1.2 + 0.25 * len(minus))
    for position, own in enumerate(minus.values()):
        worse, half = mean(own), half_width(own)
        color = GREY if half is None or abs(worse) <= half else RED if worse > 0 else BLUE
        axes.errorbar(worse, -position, xerr=half, fmt="o", color=color, capsize=3)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks([-position for position in range(len(minus))], list(minus), fontsize=8)
    axes.set_xlabel("loss above that of carry, in nats per byte, with its 95 % interval")
    save(picture, options.picture)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = runs.parser(__doc__)
    parser.add_argument("--rhythm", choices=RHYTHMS, default="H=50", help="what to run (default: %(default)s)")
    options = runs.parsed(parser, arguments)
    trainings = list(quick() if options.quick else wanted(RHYTHMS[options.rhythm]))
    kept = Runs("late_sites" if options.quick else f"late_sites --rhythm {options.rhythm}", options.json)
    kept.make(trainings, options.workers, options.minutes)
    kept.write(show(kept, trainings), options.quick)
    draw(differences(kept, trainings), options)


if __name__ == "__main__":
    main()

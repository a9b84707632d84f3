"""Sites of a federation in one process: real engines and followers and a real hub, in virtual time.

A site of several ranks has a thread for each, whose collectives are barriers.
"""

import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdiloco import Federation, StreamingDiLoCo
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.background import InlineBackground
from lightning_sdiloco.engine.fragments import Landing
from lightning_sdiloco.engine.turns import Turns, alone
from lightning_sdiloco.federation.client import InProcessClient
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.memory import InProcessHub
from lightning_sdiloco.federation.messages import Event, Record
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.store import SQLiteLedger
from tests.training import inner_optimizer, mlp, train_step

STEP = 0.1
PATIENCE = 60.0


def lose(client: Any) -> None:
    """Breaks off; the next hello connects again. What was told before is there to be heard."""
    client.leave()
    client._connection.hear(Event("lost", {"why": "the link is cut"}))


class VirtualHub(InProcessHub):
    """A hub whose time passes with the steps of the sites."""

    def __init__(self, sites: int) -> None:
        self.now = 0.0
        super().__init__("run", sites, clock=lambda: self.now, sleep=self.passes)

    def restart(self) -> None:
        """Dies, and starts again from what is durable; all connections are lost meanwhile, and
        made again.
        """
        for client in list(self.clients.values()):
            lose(client)
        self.coordinator = Coordinator("run", self.journal, self.store, None, self.clock)
        self.coordinator.start(self.notify)

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def records(self, fragment: int | None = None) -> list[Record]:
        records = [Record.from_bytes(data) for _, data in self.journal.read()]
        return [record for record in records if fragment in (None, record.fragment)]

    def counted(self, fragment: int = 0) -> list[list[str]]:
        """The names of the sites that count in each round."""
        return [[own.site for own in record.counted] for record in self.records(fragment)]


class Site:
    """A rank of a site with an engine and the model that it trains. Its number chooses its data."""

    def __init__(
        self,
        hub: VirtualHub,
        index: int,
        model: Any = None,
        topology: Topology | None = None,
        **choices: Any,
    ) -> None:
        self.hub = hub
        self.index = index
        self.step = 0
        self.model: Any = mlp() if model is None else model
        self.optimizer = inner_optimizer("adamw", self.model)
        self.topology = topology or replace(Topology(), background=InlineBackground.connect(1)[0])
        made: list[Any] = []

        class Here(Federation):
            def connect(self, rank: int = 0, ranks: int = 1, incarnation: str = "") -> Any:
                made.append(
                    HubConnection(
                        InProcessClient(hub, f"s{index}", incarnation=incarnation), rank, ranks
                    )
                )
                return made[0]

        terms = {"late": "carry", "grace": 1.0, "lease": 2.0}
        terms |= {
            name: choices.pop(name)
            for name in ("late", "rounds", "grace", "mean")
            if name in choices
        }
        federation = Here("hub:1", "run", f"s{index}", insecure=True, **terms)
        choices = {"fragments": "strided:1", "inner_optimizers": [self.optimizer]} | choices
        self.engine = StreamingDiLoCo(
            self.model, topology=self.topology, federation=federation, **choices
        )
        self.connection: Any = made[0]
        self.inner_step: Turns[list[Landing]] | None = None
        self.world: Any = self.engine.loop

    @property
    def fragments(self) -> Sequence[Any]:
        """What the follower knows of each fragment."""
        return self.world.follower.fragments

    def train(self, samples: int | None = None) -> None:
        self.step += 1
        train_step(self.model, self.optimizer, self.index, self.step)
        self.begin_step(samples=samples)

    def begin_step(self, **trained: Any) -> None:
        """Counts an inner step and launches what is due; `land` does its second half."""
        self.inner_step = self.engine.stepping(**trained)
        next(self.inner_step)

    def land(self) -> None:
        """Lands what is due after the inner step that has begun; without one, what has come."""
        if self.inner_step is None:
            list(self.world.land_due(self.engine.inner_steps))
            return
        alone(self.inner_step)
        self.inner_step = None

    def outer(self) -> list[Tensor]:
        return [own.outer.values for own in self.engine.rounds.fragments]

    def local(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def held(self) -> list[Tensor]:
        return [*self.outer(), self.local()]

    def die(self) -> None:
        lose(self.connection._client)

    def mended(self) -> None:
        self.connection.hello(self.world.follower)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        state = {
            "engine": self.engine.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        return copy.deepcopy(state)

    def resume(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state["engine"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def train(sites: Sequence[Site], steps: int, heartbeat: Sequence[Site] = ()) -> None:
    """Sites make inner steps, side by side; others only give heartbeats."""
    for _ in range(steps):
        sites[0].hub.passes(STEP)
        for other in heartbeat:
            other.connection.heartbeat(other.world.follower)
        for site in sites:
            site.train()
        for site in sites:
            site.land()


def founded(count: int, steps: int = 0, **choices: Any) -> list[Site]:
    """Sites that have founded a run, know it, and have made some inner steps."""
    hub = VirtualHub(count)
    sites = [Site(hub, index, **choices) for index in range(count)]
    for site in (*sites, *sites):
        site.world.hear()
    train(sites, steps)
    return sites


def restarted(sites: Sequence[Site], ledger: SQLiteLedger | None = None) -> None:
    """The hub starts again, perhaps with another ledger, and the sites find it."""
    hub = sites[0].hub
    hub.journal = ledger or hub.journal
    hub.restart()
    for site in sites:
        site.mended()


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def agree(sites: Sequence[Site]) -> bool:
    """Whether all who have applied the same records hold the same outer parameters, bit for bit."""
    known: dict[str, Tensor] = {}
    for site in sites:
        for own, outer in zip(site.fragments, site.outer(), strict=True):
            if not torch.equal(known.setdefault(f"{own.fragment} {own.applied.key}", outer), outer):
                return False
    # Somebody has to agree with somebody.
    return len(known) < sum(len(site.outer()) for site in sites)


# Sites of several ranks


class Threads(Communicator):
    """Gathers among threads."""

    def __init__(self, slots: list[Any], barrier: threading.Barrier, rank: int) -> None:
        super().__init__()
        self.size = len(slots)
        self.rank = rank
        self.is_on_host = True
        self.gathered = 0
        self._slots = slots
        self._barrier = barrier

    def all_gather_object(self, value: Any) -> list[Any]:
        self.gathered += 1
        self._slots[self.rank] = pickle.dumps(value)
        self._barrier.wait()
        values = list(map(pickle.loads, self._slots))
        self._barrier.wait()
        return values

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        every: list[Tensor] = self.all_gather_object(tensor.clone())
        assert len({(one.shape, one.dtype) for one in every}) == 1
        return every

    def all_to_all_vectors(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        received: list[Tensor] = [
            sent[self.rank] for sent in self.all_gather_object([part.clone() for part in parts])
        ]
        assert [part.numel() for part in received] == list(sizes)
        return received

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self.all_gather(tensor)[0])


def topologies(ranks: int) -> list[Topology]:
    """The ranks of a site."""
    shared = [([None] * ranks, threading.Barrier(ranks, timeout=PATIENCE)) for _ in range(6)]
    made = []
    for rank in range(ranks):
        world, in_group, in_site, *stages = (
            Threads(slots, barrier, rank) for slots, barrier in shared
        )
        about: dict[str, Any] = {
            "world": world,
            "in_group": in_group,
            "in_site": in_site,
            "stages": tuple(stages),
        }
        about["background"] = InlineBackground.connect(1)[0]
        made.append(Topology(group_size=ranks, group_rank=rank, **about))
    return made


def at_once(act: Callable[[Any], Any], sites: Sequence[Any]) -> list[Any]:
    """Calls something for all ranks, each in its thread."""
    with ThreadPoolExecutor(len(sites)) as pool:
        return list(pool.map(act, sites))


def whole(site: Sequence[Site]) -> dict[str, Tensor]:
    """The outer parameters of the fragments of a site, by their records."""
    held = {}
    for index, own in enumerate(site[0].fragments):
        size = sum(
            parameter.numel()
            for parameter in site[0].engine.rounds.fragments[index].layout.parameters
        )
        held[f"{index} {own.applied}"] = torch.cat([rank.outer()[index] for rank in site])[:size]
    return held


def train_ranked(
    ranks: Sequence[int],
    steps: int,
    make: Callable[[], nn.Module],
    samples: Sequence[int | Sequence[int]],
    at: Callable[[Site, int], None] = lambda rank, step: None,
    step: Callable[[nn.Module, torch.optim.Optimizer, int, int], None] = train_step,
    **choices: Any,
) -> list[list[Site]]:
    """Founds a run and trains sites of so many ranks each, side by side.

    Samples are those of a rank of each site in a step, or of each of its ranks; `at` is called
    after each inner step, which `step` makes, given the number of the site and that of the step.
    """
    hub = VirtualHub(len(ranks))
    every = threading.Barrier(sum(ranks), timeout=PATIENCE)

    def live(place: tuple[int, Topology, nn.Module]) -> Site:
        index, topology, model = place
        own = Site(hub, index, model, topology, **choices)
        of_site = samples[index]
        every.wait()
        for _ in range(3):
            own.world.hear()
            every.wait()
        for number in range(1, steps + 1):
            if every.wait() == 0:
                hub.passes(STEP)
            every.wait()
            step(model, own.optimizer, index, number)
            own.begin_step(
                samples=of_site if isinstance(of_site, int) else of_site[topology.group_rank]
            )
            every.wait()
            own.land()
            at(own, number)
        return own

    def run(place: tuple[int, Topology, nn.Module]) -> Site:
        try:
            return live(place)
        except BaseException:
            every.abort()
            raise

    # The models one after the other: threads have one generator of random numbers.
    done = at_once(
        run,
        [
            (index, topology, make())
            for index, of in enumerate(ranks)
            for topology in topologies(of)
        ],
    )
    return [[own for own in done if own.index == index] for index in range(len(ranks))]

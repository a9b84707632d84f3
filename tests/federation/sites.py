"""Sites of a federation in one process: real engines and followers and a real hub, in virtual time.

A site of several ranks has a thread for each, whose collectives are barriers.
"""

import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdiloco import Federation, StreamingDiLoCo
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.background import InlineBackground
from lightning_sdiloco.engine.fragments import Landing
from lightning_sdiloco.engine.turns import Turns, in_turns, turns_of
from lightning_sdiloco.federation.client import InProcessClient
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.memory import InProcessHub
from lightning_sdiloco.federation.messages import Contribution, Event, Record
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.store import SQLiteLedger
from tests.training import inner_optimizer, mlp, train_step

STEP = 0.1
# Choices of a site that are terms of its federation.
TERMS = {"late", "rounds", "grace", "mean"}
PATIENCE = 60.0


def lose(client: Any) -> None:
    """Breaks off; the next hello connects again. Events sent before it can still be heard."""
    client.leave()
    client._connection.hear(Event("lost", {"why": "the link is cut"}))


class VirtualHub(InProcessHub):
    """A hub whose time passes with the steps of the sites."""

    coordinator: Coordinator  # of the last start

    def __init__(self, sites: int) -> None:
        self.now = 0.0
        super().__init__("run", sites, clock=lambda: self.now, sleep=self.passes)

    def restart(self) -> None:
        """Dies, and starts again from its ledger; all connections are lost meanwhile, and made
        again.
        """
        for client in list(self.clients.values()):
            lose(client)
        self.coordinator = Coordinator("run", self.journal, self.store, None, self.clock)
        self.coordinator.start(self.notify)

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def records(self, fragment: int | None = None) -> list[Record]:
        records = [Record.from_bytes(text) for _, text in self.journal.read()]
        return [record for record in records if fragment in (None, record.fragment)]

    def counted(self, fragment: int = 0) -> list[list[str]]:
        """The names of the sites that count in each round."""
        names = list[list[str]]()
        for record in self.records(fragment):
            names.append([contribution.site for contribution in record.counted])
        return names

    def contributions(self, site: str, fragment: int = 0) -> list[Contribution]:
        """The contributions of a site that count, by round."""
        contributions = [record.of(site) for record in self.records(fragment)]
        return [contribution for contribution in contributions if contribution is not None]


@dataclass(frozen=True)
class InProcessFederation(Federation):
    """Connects to a hub of this process, and keeps the connections that it has made."""

    virtual_hub: Any = None
    connections: list[HubConnection] = field(default_factory=list)

    def connect(self, rank: int = 0, ranks: int = 1, incarnation: str = "") -> HubConnection:
        client = InProcessClient(self.virtual_hub, self.site, incarnation=incarnation)
        connection = HubConnection(client, rank, ranks)
        self.connections.append(connection)
        return connection


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
        terms = {"late": "carry", "grace": 1.0, "lease": 2.0}
        for name in TERMS & choices.keys():
            terms[name] = choices.pop(name)
        federation = InProcessFederation(
            "run", "hub:1", f"s{index}", insecure=True, virtual_hub=hub, **terms
        )
        choices = {"fragments": "strided:1", "inner_optimizers": [self.optimizer]} | choices
        self.engine = StreamingDiLoCo(
            self.model, topology=self.topology, federation=federation, **choices
        )
        self.connection: Any = federation.connections[0]
        self.inner_step: Turns[list[Landing]] | None = None
        self.world: Any = self.engine.loop

    @property
    def follower(self) -> Follower:
        return self.world.follower

    @property
    def fragments(self) -> Sequence[Any]:
        """The follower's progress of each fragment."""
        return self.follower.fragments

    @property
    def is_first_rank(self) -> bool:
        return self.topology.group_rank == 0

    def train(self, samples: int | None = None) -> None:
        self.step += 1
        train_step(self.model, self.optimizer, self.index, self.step)
        self.begin_step(samples=samples)

    def begin_step(self, **trained: Any) -> None:
        """Counts an inner step and launches what is due; `land` does its second half."""
        self.inner_step = turns_of(self.engine.step, **trained)
        next(self.inner_step)

    def land(self) -> None:
        """Lands what is due after the inner step that has begun; without one, what has come."""
        if self.inner_step is None:
            list(self.world.land_due(self.engine.inner_steps))
            return
        in_turns([self.inner_step])
        self.inner_step = None

    def outer(self) -> list[Tensor]:
        return [fragment.outer.values for fragment in self.engine.fragmented_model.fragments]

    def local(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def held(self) -> list[Tensor]:
        return [*self.outer(), self.local()]

    def die(self) -> None:
        lose(self.connection._client)

    def reconnect(self) -> None:
        self.connection.hello(self.follower)

    def heartbeat(self) -> None:
        self.connection.heartbeat(self.follower)

    def state(self) -> dict[str, Any]:
        """Returns the content of a checkpoint."""
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
        for idle in heartbeat:
            idle.heartbeat()
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
        site.reconnect()


def equal(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Returns whether all tensors are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def agree(sites: Sequence[Site]) -> bool:
    """Returns whether all sites that have applied the same records hold the same outer parameters,
    bit for bit.
    """
    first: dict[str, Tensor] = {}
    held = 0
    for site in sites:
        for progress, outer in zip(site.fragments, site.outer(), strict=True):
            held += 1
            position = f"{progress.fragment} {progress.applied.key}"
            if not torch.equal(first.setdefault(position, outer), outer):
                return False
    # Somebody has to agree with somebody.
    return len(first) < held


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
        tensors: list[Tensor] = self.all_gather_object(tensor.clone())
        kinds = {(gathered.shape, gathered.dtype) for gathered in tensors}
        assert len(kinds) == 1
        return tensors

    def all_to_all_vectors(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        sent = self.all_gather_object([part.clone() for part in parts])
        received: list[Tensor] = [parts_of_rank[self.rank] for parts_of_rank in sent]
        assert [part.numel() for part in received] == list(sizes)
        return received

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self.all_gather(tensor)[0])


def topologies(ranks: int) -> list[Topology]:
    """The ranks of a site."""
    shared = [([None] * ranks, threading.Barrier(ranks, timeout=PATIENCE)) for _ in range(6)]
    topologies = []
    for rank in range(ranks):
        communicators: list[Any] = [Threads(slots, barrier, rank) for slots, barrier in shared]
        world, in_group, in_site, *stages = communicators
        topology = Topology(
            group_size=ranks,
            group_rank=rank,
            world=world,
            in_group=in_group,
            in_site=in_site,
            stages=tuple(stages),
            background=InlineBackground.connect(1)[0],
        )
        topologies.append(topology)
    return topologies


def at_once(act: Callable[[Any], Any], ranks: Sequence[Any]) -> list[Any]:
    """Calls something for all ranks, each in its thread."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, ranks))


def ranks_of(sites: Sequence[Sequence[Site]]) -> list[Site]:
    return [rank for site in sites for rank in site]


def outer_parameters(site: Sequence[Site]) -> dict[str, Tensor]:
    """The outer parameters of the fragments of a site, by their records."""
    first = site[0]
    by_record = {}
    for index, progress in enumerate(first.fragments):
        layout = first.engine.fragmented_model.fragments[index].layout
        size = sum(parameter.numel() for parameter in layout.parameters)
        shards = [rank.outer()[index] for rank in site]
        by_record[f"{index} {progress.applied}"] = torch.cat(shards)[:size]
    return by_record


def untrained_of(rank: Site) -> list[Tensor]:
    """The outer values of the first fragment that are not trained, such as running statistics."""
    return rank.engine.fragmented_model.fragments[0].untrained.outer


# Makes an inner step, given the number of the site and that of the step.
Step = Callable[[Any, torch.optim.Optimizer, int, int], None]


class RankedRun:
    """Ranks of sites that train side by side, each in its thread."""

    def __init__(
        self,
        ranks: Sequence[int],
        samples: Sequence[int | Sequence[int]],
        step: Step,
        after_step: Callable[[Site, int], None],
        choices: dict[str, Any],
    ) -> None:
        self.hub = VirtualHub(len(ranks))
        self.barrier = threading.Barrier(sum(ranks), timeout=PATIENCE)
        self.samples = samples
        self.step = step
        self.after_step = after_step
        self.choices = choices

    def train(self, index: int, topology: Topology, model: nn.Module, steps: int) -> Site:
        try:
            return self._train(index, topology, model, steps)
        except BaseException:
            self.barrier.abort()
            raise

    def _train(self, index: int, topology: Topology, model: nn.Module, steps: int) -> Site:
        own = Site(self.hub, index, model, topology, **self.choices)
        of_site = self.samples[index]
        self.barrier.wait()
        for _ in range(3):
            own.world.hear()
            self.barrier.wait()
        for number in range(1, steps + 1):
            if self.barrier.wait() == 0:
                self.hub.passes(STEP)
            self.barrier.wait()
            self.step(model, own.optimizer, index, number)
            own.begin_step(
                samples=of_site if isinstance(of_site, int) else of_site[topology.group_rank]
            )
            self.barrier.wait()
            own.land()
            self.after_step(own, number)
        return own


def do_nothing(rank: Site, step: int) -> None:
    """Follows an inner step."""


def train_ranked(
    ranks: Sequence[int],
    steps: int,
    make: Callable[[], nn.Module],
    samples: Sequence[int | Sequence[int]],
    after_step: Callable[[Site, int], None] = do_nothing,
    step: Step = train_step,
    **choices: Any,
) -> list[list[Site]]:
    """Founds a run and trains sites of so many ranks each, side by side.

    Samples are those of a rank of each site in a step, or of each of its ranks; `after_step` is
    called after each inner step, which `step` makes.
    """
    run = RankedRun(ranks, samples, step, after_step, choices)
    # The models one after the other: threads have one generator of random numbers.
    places = [
        (index, topology, make())
        for index, number in enumerate(ranks)
        for topology in topologies(number)
    ]
    trained = at_once(lambda place: run.train(*place, steps), places)
    return [list(site) for _, site in groupby(trained, key=attrgetter("index"))]

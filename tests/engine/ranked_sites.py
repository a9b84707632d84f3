"""Sites of several ranks in one process: every rank is a thread, collectives are barriers, and the hub is in memory."""

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdiloco import Federation, StreamingDiLoCo
from lightning_sdiloco.comm import Communicator, Topology
from lightning_sdiloco.engine import InlineBackground
from lightning_sdiloco.engine.site.world import FederatedWorld
from lightning_sdiloco.hub import Connection, Recorded, Shards, payloads_of
from tests.engine.sites import STEP, VirtualHub

PATIENCE = 60.0


class Threads(Communicator):
    """Gathers among threads."""

    def __init__(self, slots: list[Any], barrier: threading.Barrier, rank: int) -> None:
        super().__init__()
        self.size, self.rank, self.is_on_host = len(slots), rank, True
        self._slots, self._barrier = slots, barrier
        self.gathered = 0

    @staticmethod
    def of(size: int) -> "list[Threads]":
        slots, barrier = [None] * size, threading.Barrier(size, timeout=PATIENCE)
        return [Threads(slots, barrier, rank) for rank in range(size)]

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

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self.all_gather(tensor)[0])


def topologies(ranks: int) -> list[Topology]:
    """The ranks of a site."""
    world, in_group, in_site, *stages = (Threads.of(ranks) for _ in range(6))
    return [
        Topology(
            group_size=ranks,
            group_rank=rank,
            world=world[rank],
            in_group=in_group[rank],
            in_site=in_site[rank],
            stages=tuple(stage[rank] for stage in stages),
            background=InlineBackground.connect(1)[0],
        )
        for rank in range(ranks)
    ]


class Weighed:
    """A connection of a rank that weighs what it sends and fetches."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._own: set[str] = set()
        self.sent = self.fetched_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def contribute(self, own: Any, blobs: Any) -> None:
        self._own |= blobs.keys()
        self.sent += sum(map(len, blobs.values()))
        self._inner.contribute(own, blobs)

    def events(self) -> list[Any]:
        told = self._inner.events()
        self._weigh({one.record.key: one.blobs for one in told if isinstance(one, Recorded)})
        return list(told)

    def fetched(self) -> Any:
        fetched = self._inner.fetched()
        self._weigh(fetched)
        return fetched

    def _weigh(self, fetched: Any) -> None:
        blobs = [one for of_record in fetched.values() for one in of_record.items()]
        self.fetched_bytes += sum(len(blob) for key, blob in blobs if key not in self._own)


@dataclass
class Rank:
    """A rank of a site, when it has trained."""

    site: str
    engine: StreamingDiLoCo
    connection: Weighed
    hub: VirtualHub

    @property
    def world(self) -> FederatedWorld:
        assert isinstance(self.engine.loop, FederatedWorld)
        return self.engine.loop

    @property
    def outer(self) -> list[Tensor]:
        """The shards of the outer parameters, by fragment."""
        return [own.outer.values for own in self.engine.rounds.fragments]


def whole(site: Sequence[Rank]) -> dict[str, Tensor]:
    """The outer parameters of the fragments of a site, by their records."""
    held = {}
    for index, own in enumerate(site[0].world.follower.fragments):
        size = sum(parameter.numel() for parameter in site[0].engine.rounds.fragments[index].layout.parameters)
        held[f"{index} {own.applied}"] = torch.cat([rank.outer[index] for rank in site])[:size]
    return held


Step = Callable[[nn.Module, torch.optim.Optimizer, int, int], None]


def train(
    ranks: Sequence[int],
    steps: int,
    make: Callable[[], nn.Module],
    step: Step,
    samples: Sequence[int | Sequence[int]],
    at: Callable[[Rank, int], None] = lambda rank, step: None,
    **choices: Any,
) -> list[list[Rank]]:
    """Founds a run and trains sites of so many ranks each, side by side.

    Args:
        ranks: The ranks of each site.
        steps: The inner steps.
        make: Makes the model.
        step: Makes an inner step of a model, given the number of the site and that of the step.
        samples: On how many samples a rank of each site trains in a step, or each of its ranks.
        at: Called on every rank after each inner step.
        **choices: Of the engine.
    """
    hub = VirtualHub(len(ranks))
    every = threading.Barrier(sum(ranks), timeout=PATIENCE)
    places = [(site, rank, topology) for site, of in enumerate(ranks) for rank, topology in enumerate(topologies(of))]
    models = [make() for _ in places]

    def run(number: int) -> Rank:
        site, rank, topology = places[number]
        try:
            return live(models[number], site, rank, topology)
        except BaseException:
            every.abort()
            raise

    def live(model: nn.Module, site: int, rank: int, topology: Topology) -> Rank:
        own = joined(hub, f"s{site}", model, topology, **choices)
        every.wait()
        for _ in range(3):
            own.world.hear()
            every.wait()
        optimizer, of_site = torch.optim.AdamW(model.parameters(), lr=0.01), samples[site]
        own_samples = of_site if isinstance(of_site, int) else of_site[rank]
        for number in range(1, steps + 1):
            if every.wait() == 0:
                hub.passes(STEP)
            every.wait()
            step(model, optimizer, site, number)
            own.engine.launch_due(samples=own_samples)
            every.wait()
            own.engine.land_due()
            at(own, number)
        return own

    with ThreadPoolExecutor(len(places)) as pool:
        done = list(pool.map(run, range(len(places))))
    return [[own for own in done if own.site == f"s{site}"] for site in range(len(ranks))]


def joined(
    hub: VirtualHub, site: str, model: nn.Module, topology: Topology, grace: float = 1.0, **choices: Any
) -> Rank:
    """A rank of a site that has joined."""
    made: list[Weighed] = []

    class Here(Federation):
        def connect(self, ranks: int = 1) -> Connection:
            made.append(Weighed(hub.connect(site, payloads_of(0, ranks))))
            return made[-1]  # type: ignore[return-value]

        def connect_shards(self, rank: int, ranks: int, life: str) -> Shards:
            made.append(Weighed(hub.connect_shards(site, payloads_of(rank, ranks))))
            return made[-1]  # type: ignore[return-value]

    federation = Here("hub:1", "run", site, insecure=True, lease=2.0, grace=grace)
    engine = StreamingDiLoCo(model, topology=topology, layers_per_fragment=1, federation=federation, **choices)
    return Rank(site, engine, made[0], hub)

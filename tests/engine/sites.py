"""Sites of a federation in one process: real engines and followers and a real hub, in virtual time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from lightning_sdiloco import Federation, StreamingDiLoCo
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine import InlineBackground
from lightning_sdiloco.engine.site.world import FederatedWorld
from lightning_sdiloco.federation import Record
from lightning_sdiloco.hub import Connection, InProcessConnection, InProcessHub
from tests.training import inner_optimizer, mlp, train_step

STEP = 0.1


Held = dict[str, torch.Tensor]
"""The outer parameters of fragments, by the key of the last record that made them."""


class VirtualHub(InProcessHub):
    """A hub whose time passes with the steps of the sites."""

    def __init__(self, sites: int) -> None:
        self.now = 0.0
        super().__init__("run", sites, clock=lambda: self.now, sleep=self.passes)

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def records(self) -> list[Record]:
        return [Record.from_bytes(data) for _, data in self.journal.read()]

    def counted(self, fragment: int = 0) -> list[list[str]]:
        return [[own.site for own in record.counted] for record in self.records() if record.fragment == fragment]


def here(
    connection: InProcessConnection,
    late: Literal["drop", "carry"] = "carry",
    grace: float = 1.0,
    rounds: int | None = None,
) -> Federation:
    """The federation of a hub in this process."""

    class Here(Federation):
        def connect(self, ranks: int = 1) -> Connection:
            return connection

    return Here("hub:1", "run", connection.site, insecure=True, lease=2.0, grace=grace, late=late, rounds=rounds)


class Site:
    """An engine that is a site, with the model that it trains. Its number chooses its data."""

    def __init__(
        self,
        hub: VirtualHub,
        index: int,
        seed: int = 0,
        inner: str = "adamw",
        connection: Any = None,
        late: Literal["drop", "carry"] = "carry",
        grace: float = 1.0,
        rounds: int | None = None,
        **choices: Any,
    ) -> None:
        self.hub, self.index = hub, index
        self.model: nn.Sequential = mlp(seed)
        self.optimizer = inner_optimizer(inner, self.model)
        self.connection = connection or hub.connect(f"s{index}")
        self.step = 0
        self.engine = StreamingDiLoCo(
            self.model,
            topology=replace(Topology(), background=InlineBackground.connect(1)[0]),
            inner_optimizers=[self.optimizer],
            layers_per_fragment=1,
            federation=here(self.connection, late, grace, rounds),
            **choices,
        )

    @property
    def world(self) -> FederatedWorld:
        assert isinstance(self.engine.loop, FederatedWorld)
        return self.engine.loop

    def train(self) -> None:
        self.step += 1
        train_step(self.model, self.optimizer, self.index, self.step)
        self.engine.launch_due()

    def outer(self) -> list[torch.Tensor]:
        return [own.outer.values for own in self.engine.rounds.fragments]

    def held(self) -> list[torch.Tensor]:
        return [*self.outer(), *(parameter.detach().clone() for parameter in self.model.parameters())]

    @property
    def lag(self) -> int:
        return self.world.follower.lag

    def cut_off(self) -> None:
        self.connection.lose("the link is cut")

    def mended(self) -> None:
        self.connection.hello(self.world.follower)

    die = cut_off


def train(sites: Sequence[Site], steps: int) -> None:
    """All sites make inner steps, side by side."""
    for _ in range(steps):
        sites[0].hub.passes(STEP)
        for site in sites:
            site.train()
        for site in sites:
            site.engine.land_due()


def founded(count: int, **choices: Any) -> list[Site]:
    """Sites that have founded a run, and know it."""
    hub = VirtualHub(count)
    sites = [Site(hub, index, **choices) for index in range(count)]
    for site in sites:
        site.world.hear()
    for site in sites:
        site.world.hear()
    return sites


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def agree(sites: Sequence[Site]) -> bool:
    """Whether all who have applied the same records hold the same outer parameters, bit for bit."""
    known: dict[str, torch.Tensor] = {}
    for site in sites:
        for own, outer in zip(site.world.follower.fragments, site.outer(), strict=True):
            if not torch.equal(known.setdefault(f"{own.fragment} {own.applied.key}", outer), outer):
                return False
    # Somebody has to agree with somebody.
    return len(known) < sum(len(site.outer()) for site in sites)

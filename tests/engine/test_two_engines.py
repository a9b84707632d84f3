"""Several engines in one process: each exchanges its own values, however their flights overlap."""

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco import DenseBeginning, SimulatedGroups, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.comm.pacing import Connection
from lightning_sdiloco.engine.turns import in_turns
from lightning_sdiloco.errors import AgreementError
from tests.engine.groups import Values, copied, message, unlike
from tests.known_training import wait_for_flights
from tests.ranks import run_ranks
from tests.training import backward, batch, mlp

STEPS = 24
CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": 2,
    "outer_lr": 0.7,
    "mixing": 0.25,
}
DENSE = DenseBeginning(rounds=4, sync_every=2)


def critic(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 13), nn.Tanh(), nn.Linear(13, 1))


Train = Callable[[nn.Module], Tensor]


class Gan:
    """A generator and a critic, each with an optimizer. Both losses depend on both networks."""

    def __init__(self, rank: int) -> None:
        self.networks = [mlp(rank), critic(rank)]
        self.trained: list[nn.Module] = list(self.networks)
        self.optimizers = [
            torch.optim.SGD(network.parameters(), lr=0.1) for network in self.networks
        ]

    def backward(self, network: int, seed: int, step: int) -> None:
        """Leaves the gradients of one of the networks."""
        noise, real = batch(seed, step)
        generator, critic = self.trained
        judged = critic(generator(noise))
        loss = (
            softplus(judged).mean() + softplus(-critic(real)).mean()
            if network
            else softplus(-judged).mean()
        )
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()

    def values(self) -> Values:
        return {
            f"{number} {name}": values
            for number, network in enumerate(self.networks)
            for name, values in copied(network.state_dict()).items()
        }


def trained_together(rank: int, groups: int, overlaps: bool, **choices: Any) -> Values:
    """Trains a GAN with an engine for each network, and returns how it ends."""
    joined = WorkerGroups(groups)
    gan = Gan(rank)
    engines = [
        StreamingDiLoCo(own, worker_groups=joined, **CHOICES, **choices) for own in gan.networks
    ]
    if joined.group_size > 1:
        gan.trained = [
            DistributedDataParallel(
                own, process_group=joined.process_group, broadcast_buffers=False
            )
            for own in gan.networks
        ]
    for step in range(1, STEPS + 1):
        for number, engine in enumerate(engines):
            gan.backward(number, rank, step)
            gan.optimizers[number].step()
            engine.step()
            if not overlaps:
                wait_for_flights(engine)
    # The last means of both networks fly at once.
    in_turns([engine.finishing() for engine in engines])
    return gan.values()


def simulated_together(groups: int, **choices: Any) -> Values:
    gans = [Gan(rank) for rank in range(groups)]
    both = [
        SimulatedGroups([gan.networks[number] for gan in gans], **CHOICES, **choices)
        for number in range(2)
    ]
    for step in range(1, STEPS + 1):
        for number, simulated in enumerate(both):
            for rank, gan in enumerate(gans):
                gan.backward(number, rank, step)
            for gan in gans:
                gan.optimizers[number].step()
            simulated.step()
    for simulated in both:
        simulated.finish()
    return gans[0].values()


@pytest.mark.parametrize("dense_beginning", [None, DENSE])
@pytest.mark.parametrize("compression", ["fp4", "fp32"])
def test_a_gan_with_two_engines_gives_the_bits_of_simulated_groups(
    dense_beginning: DenseBeginning | None, compression: str
) -> None:
    choices: dict[str, Any] = {"dense_beginning": dense_beginning, "compression": compression}

    def run(rank: int, world_size: int) -> Values:
        return trained_together(rank, world_size, overlaps=True, **choices)

    expected = simulated_together(2, **choices)
    for values in run_ranks(run, 2, timeout=60):
        assert unlike(values, expected) == []


@pytest.mark.parametrize("dense_beginning", [None, DENSE])
def test_two_engines_at_once_in_groups_of_two_ranks_match_engines_in_turns(
    dense_beginning: DenseBeginning | None,
) -> None:
    def run(rank: int, world_size: int, overlaps: bool) -> Values:
        return trained_together(rank, 2, overlaps, dense_beginning=dense_beginning)

    (expected, *others), overlapping = (
        run_ranks(run, 4, overlaps, timeout=60) for overlaps in (False, True)
    )
    for values in (*others, *overlapping):
        assert unlike(values, expected) == []


class Remembers(nn.Module):
    """Keeps what it saw last, which differs between groups."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signs", torch.zeros(8, 3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.signs.copy_(x.detach().sign())
        return x


def test_engines_in_two_threads_train_as_each_does_alone() -> None:
    def run(rank: int, world_size: int, seeds: list[int]) -> list[Values]:
        # All ranks meet at the end, where the first group's memory is shown.
        models = [nn.Sequential(mlp(seed), Remembers()) for seed in seeds]
        own: dict[str, Any] = {"untrained": {"1.signs": "own"}}
        engines = [
            StreamingDiLoCo(model, dense_beginning=DENSE, **own, **CHOICES) for model in models
        ]

        def train(at: int) -> None:
            optimizer = torch.optim.SGD(models[at].parameters(), lr=0.1)
            for step in range(1, STEPS + 1):
                backward(models[at], optimizer, rank, step)
                optimizer.step()
                engines[at].step()
            engines[at].finish()

        with ThreadPoolExecutor() as threads:
            list(threads.map(train, range(len(seeds))))
        return [copied(model.state_dict()) for model in models]

    alone = [run_ranks(run, 2, [seed], timeout=60)[0][0] for seed in (1, 2)]
    for together in run_ranks(run, 2, [1, 2], timeout=60):
        assert [unlike(*both) for both in zip(together, alone, strict=True)] == [[], []]


def test_threads_that_meet_other_ranks_in_unlike_order_are_not_mixed_up() -> None:
    def run(rank: int, world_size: int) -> list[Values]:
        models = [nn.Sequential(mlp(), Remembers()) for _ in range(2)]
        engines = [
            StreamingDiLoCo(model, untrained={"1.signs": "own"}, **CHOICES) for model in models
        ]
        for number, model in enumerate(models):
            model[1].signs.fill_(10 * rank + number)
        with ThreadPoolExecutor() as threads:
            first = threads.submit(engines[rank].first_own)
            time.sleep(0.5)
            second = threads.submit(engines[1 - rank].first_own)
        return [first.result(), second.result()][:: -1 if rank else 1]

    ranks = run_ranks(run, 2, timeout=60)
    assert ranks[0] == [{}, {}]
    for number, received in enumerate(ranks[1]):
        assert {name: values.unique().tolist() for name, values in received.items()} == {
            "1.signs": [number]
        }


def test_engines_one_after_another_and_side_by_side_share_threads_and_connections() -> None:
    def run(rank: int, world_size: int) -> list[int]:
        joined = WorkerGroups(2)
        connections = list[int]()
        for engines in (1, 1, 3):
            models = [mlp() for _ in range(engines)]
            made = [StreamingDiLoCo(model, worker_groups=joined, **CHOICES) for model in models]
            for _ in range(STEPS):
                for engine in made:
                    engine.step()
            connections.append(len(Connection.of_process()))
            for engine in made:
                engine.finish()
        return connections

    for connections in run_ranks(run, 4, timeout=60):
        assert connections == connections[:1] * 3
        assert connections[0] > 0


def test_engines_that_ranks_make_in_unlike_order_are_refused() -> None:
    def run(rank: int, world_size: int) -> None:
        networks = Gan(rank).networks[:: -1 if rank else 1]
        for network in networks:
            StreamingDiLoCo(network, **CHOICES)

    for error in run_ranks(run, 2, expect_failure=True, timeout=60).values():
        assert re.search(
            r"0\.weight is \(11, 5\).* on rank 0, .* on rank 1.*engines in the same order",
            message(error),
        )


def test_models_of_one_shape_that_ranks_swap_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int, world_size: int, order: int) -> list[str]:
        with caplog.at_level(logging.WARNING):
            for seed in (1, 2)[:: order if rank else 1]:
                StreamingDiLoCo(mlp(seed), **CHOICES)
        return [
            record.getMessage()
            for record in caplog.records
            if "were exchanged" in record.getMessage()
        ]

    in_order, exchanged = (run_ranks(run, 2, order, timeout=60) for order in (1, -1))
    assert in_order == [[], []]
    assert exchanged[1] == []
    (told,) = exchanged[0]
    assert re.search(
        "rank 1 gave an earlier engine what rank 0 gives this one.*in the same order", told
    )


def test_digests_tell_engines_apart() -> None:
    groups = SimulatedGroups([mlp(), mlp()], **CHOICES)
    # Messages of another engine's number do not arrive, so the numbers are mixed up here.
    synchronizer: Any = groups.engines[1].rounds._synchronizer
    synchronizer.topology = replace(synchronizer.topology, engine=2)

    def train() -> None:
        for _ in range(STEPS):
            groups.step()

    with pytest.raises(
        AgreementError, match=r"not hold the same outer parameters at the .* 0 after inner step 4"
    ):
        train()

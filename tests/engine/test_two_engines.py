"""Several engines in one process: each exchanges its own values, however their flights overlap."""

import logging
import re
import time
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
from lightning_sdiloco.engine.turns import in_turns, turns_of
from lightning_sdiloco.errors import AgreementError
from tests.engine.groups import Values, copied, message, unlike
from tests.known_training import wait_for_flights
from tests.ranks import run_ranks
from tests.training import backward, batch, mlp

STEPS = 24
CHOICES = {
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


class Gan:
    """A generator and a critic, each with an optimizer. Both losses depend on both networks."""

    def __init__(self, rank: int) -> None:
        self.networks = [mlp(rank), critic(rank)]
        self.trained = list(self.networks)
        self.optimizers = [
            torch.optim.SGD(network.parameters(), lr=0.1) for network in self.networks
        ]

    def backward(self, network: int, seed: int, step: int) -> None:
        """Leaves the gradients of one of the networks."""
        noise, real = batch(seed, step)
        generator, critic = self.trained
        judged = critic(generator(noise))
        loss = softplus(-judged).mean()
        if network == 1:
            loss = softplus(judged).mean() + softplus(-critic(real)).mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()

    def values(self) -> Values:
        return copied(nn.ModuleList(self.networks).state_dict())


def trained_together(rank: int, groups: int, overlaps: bool, **choices: Any) -> Values:
    """Trains a GAN with an engine for each network, and returns its values at the end."""
    joined = WorkerGroups(groups)
    gan = Gan(rank)
    choices = {"worker_groups": joined, **CHOICES, **choices}
    engines = [StreamingDiLoCo(network, **choices) for network in gan.networks]
    if joined.group_size > 1:
        ddp = {"process_group": joined.process_group, "broadcast_buffers": False}
        gan.trained = [DistributedDataParallel(network, **ddp) for network in gan.networks]
    for step in range(1, STEPS + 1):
        for number, engine in enumerate(engines):
            gan.backward(number, rank, step)
            gan.optimizers[number].step()
            engine.step()
            if not overlaps:
                wait_for_flights(engine)
    # The last means of both networks fly at once.
    in_turns([turns_of(engine.finish) for engine in engines])
    return gan.values()


def simulated_together(groups: int, **choices: Any) -> Values:
    gans = [Gan(rank) for rank in range(groups)]
    generators, critics = zip(*(gan.networks for gan in gans), strict=True)
    of_networks = [
        SimulatedGroups(models, **CHOICES, **choices) for models in (generators, critics)
    ]
    for step in range(1, STEPS + 1):
        for number, simulated in enumerate(of_networks):
            for rank, gan in enumerate(gans):
                gan.backward(number, rank, step)
            for gan in gans:
                gan.optimizers[number].step()
            simulated.step()
    for simulated in of_networks:
        simulated.finish()
    return gans[0].values()


@pytest.mark.parametrize("dense_beginning", [None, DENSE])
@pytest.mark.parametrize("compression", ["fp4", "fp32"])
def test_a_gan_with_two_engines_gives_the_bits_of_simulated_groups(
    dense_beginning: DenseBeginning | None, compression: str
) -> None:
    choices = {"dense_beginning": dense_beginning, "compression": compression}

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

    in_turns = run_ranks(run, 4, False, timeout=60)
    at_once = run_ranks(run, 4, True, timeout=60)
    for values in (*in_turns, *at_once):
        assert unlike(values, in_turns[0]) == []


class Remembers(nn.Module):
    """Keeps the signs of its last input, which differ between groups."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signs", torch.zeros(8, 3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.signs.copy_(x.detach().sign())
        return x


GROUPS_KEEP_SIGNS = {**CHOICES, "untrained": {"1.signs": "own"}}


def trained_in_threads(rank: int, world_size: int, seeds: list[int]) -> list[Values]:
    """Trains a model in each thread. All ranks meet at the end, where the first group's signs are
    shown.
    """
    models = [nn.Sequential(mlp(seed), Remembers()) for seed in seeds]
    choices = {**GROUPS_KEEP_SIGNS, "dense_beginning": DENSE}
    engines = [StreamingDiLoCo(model, **choices) for model in models]

    def train(model: nn.Module, engine: StreamingDiLoCo) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, STEPS + 1):
            backward(model, optimizer, rank, step)
            optimizer.step()
            engine.step()
        engine.finish()

    with ThreadPoolExecutor() as threads:
        list(threads.map(train, models, engines))
    return [copied(model.state_dict()) for model in models]


def test_engines_in_two_threads_train_as_each_does_alone() -> None:
    alone = [run_ranks(trained_in_threads, 2, [seed], timeout=60)[0][0] for seed in (1, 2)]
    for together in run_ranks(trained_in_threads, 2, [1, 2], timeout=60):
        for values, expected in zip(together, alone, strict=True):
            assert unlike(values, expected) == []


def received_in_unlike_order(rank: int, world_size: int) -> list[Values]:
    """The first group's signs in each of two engines; rank 1 asks for those of the second first."""
    models = [nn.Sequential(mlp(), Remembers()) for _ in range(2)]
    engines = [StreamingDiLoCo(model, **GROUPS_KEEP_SIGNS) for model in models]
    for number, model in enumerate(models):
        model[1].signs.fill_(10 * rank + number)
    received = {}
    with ThreadPoolExecutor() as threads:
        received[rank] = threads.submit(engines[rank].fragmented_model.view.first_own)
        time.sleep(0.5)
        received[1 - rank] = threads.submit(engines[1 - rank].fragmented_model.view.first_own)
    return [received[number].result() for number in range(2)]


def test_threads_that_meet_other_ranks_in_unlike_order_are_not_mixed_up() -> None:
    received, received_by_group_1 = run_ranks(received_in_unlike_order, 2, timeout=60)
    assert received == [{}, {}]
    for number, values in enumerate(received_by_group_1):
        assert values.keys() == {"1.signs"}
        assert values["1.signs"].unique().tolist() == [number]


def connections_of_engines(rank: int, world_size: int) -> list[int]:
    """The connections of this process with one engine, another one after it, and three at once."""
    joined = WorkerGroups(2)
    connections = []
    for number in (1, 1, 3):
        models = [mlp() for _ in range(number)]
        engines = [StreamingDiLoCo(model, worker_groups=joined, **CHOICES) for model in models]
        for _ in range(STEPS):
            for engine in engines:
                engine.step()
        connections.append(len(Connection.of_process()))
        for engine in engines:
            engine.finish()
    return connections


def test_engines_one_after_another_and_side_by_side_share_threads_and_connections() -> None:
    for connections in run_ranks(connections_of_engines, 4, timeout=60):
        assert connections == connections[:1] * 3
        assert connections[0] > 0


def test_engines_that_ranks_make_in_unlike_order_are_refused() -> None:
    def run(rank: int, world_size: int) -> None:
        networks = Gan(rank).networks[:: -1 if rank else 1]
        for network in networks:
            StreamingDiLoCo(network, **CHOICES)

    words = r"0\.weight is \(11, 5\).* on rank 0, .* on rank 1.*engines in the same order"
    for error in run_ranks(run, 2, expect_failure=True, timeout=60).values():
        assert re.search(words, message(error))


def test_models_of_one_shape_that_ranks_swap_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int, world_size: int, order: int) -> list[str]:
        with caplog.at_level(logging.WARNING):
            for seed in (1, 2)[:: order if rank else 1]:
                StreamingDiLoCo(mlp(seed), **CHOICES)
        return [text for text in caplog.messages if "were swapped" in text]

    assert run_ranks(run, 2, 1, timeout=60) == [[], []]
    warnings, warnings_of_rank_1 = run_ranks(run, 2, -1, timeout=60)
    assert warnings_of_rank_1 == []
    (warning,) = warnings
    words = "passed to an earlier engine by rank 1, and vice versa.*in the same order"
    assert re.search(words, warning)


def test_digests_tell_engines_apart() -> None:
    groups = SimulatedGroups([mlp(), mlp()], **CHOICES)
    # Messages of another engine's number do not arrive, so the numbers are mixed up here.
    synchronizer = groups.engines[1].rounds._synchronizer
    synchronizer.topology = replace(synchronizer.topology, engine=2)

    def train() -> None:
        for _ in range(STEPS):
            groups.step()

    words = r"not hold the same outer parameters at the .* 0 after inner step 4"
    with pytest.raises(AgreementError, match=words):
        train()

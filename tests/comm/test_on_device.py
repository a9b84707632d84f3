"""Outer gradients that travel from device to device: the bits, bytes and errors of gloo, and no wait
for another rank.

The device and its backend are pretended, see `tests.pretend`. `tests.gpu` does the same with NCCL.
"""

import os
import re
import time
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lightning_sdiloco import RandomPairs, Ring, StreamingDiLoCoStrategy, TwoShot
from lightning_sdiloco.comm.exchange import (
    DeviceBackend,
    DeviceExchange,
    DirectExchange,
    Unanswered,
)
from lightning_sdiloco.comm.topology import GroupLayout, Topology
from lightning_sdiloco.engine.background import ThreadBackground
from lightning_sdiloco.lightning.options import measure_link
from lightning_sdiloco.planning.link import Link
from tests import fits, pretend
from tests.comm.test_gloo import unequal
from tests.known_training import CHOICES as KNOWN
from tests.known_training import STEPS, LateLane, Training, same, shown_run, wait_for_flights
from tests.pretend import IS_POSSIBLE, ccl
from tests.ranks import run_processes, run_ranks

pytestmark = pytest.mark.skipif(
    not IS_POSSIBLE, reason="this torch has no device types in pure Python"
)

PAIRS: dict[str, Any] = {
    "route": RandomPairs(),
    "outer_lr": 0.7,
    "outer_momentum": 0.5,
    "compression": "int8",
}
CHOICES = {**KNOWN, "pairs": PAIRS, "ring": {"route": Ring(), "compression": "fp32"}}


def joined(world_size: int, groups: int, device: str) -> Topology:
    """Over gloo from the CPU, or from device to device."""
    layout = GroupLayout(world_size, groups)
    timeout = timedelta(seconds=30)
    if device == "cpu":
        return Topology.of_world(layout, timeout)
    pretend.install()
    ccl.register()
    backend = DeviceBackend(ccl.NAME, torch.device(device))
    return Topology.of_world(layout, timeout, on_device=backend)


CASES: dict[tuple[int, int], list[tuple[str, type[ThreadBackground]]]] = {
    # By groups and ranks.
    (3, 3): [
        ("fp4", LateLane),
        ("random, two shots", ThreadBackground),
        ("error feedback", LateLane),
    ],
    (2, 4): [("fp4", ThreadBackground), ("fp32, two shots, offloaded", LateLane)],
    (4, 4): [("pairs", LateLane), ("ring", ThreadBackground)],
}


class Run(NamedTuple):
    trajectory: Any
    counts: dict[str, float]
    most_in_flight: int


def run_of(name: str, lane: type[ThreadBackground], topology: Topology, device: str) -> Run:
    training = Training(device, topology.group_index, lane=lane, topology=topology, **CHOICES[name])
    training.engine.rounds.diagnose()
    trajectory = shown_run(training)
    report = training.engine.report()
    counts = {key: count for key, count in report.items() if not key.endswith("_s")}
    return Run(trajectory, counts, training.most_in_flight)


def check_messages_of_any_size(exchange: Any, rank: int) -> None:
    """Views that are not contiguous are sent by their values; messages are of different sizes, or
    of none.
    """
    groups = exchange.num_groups
    table = torch.tensor([[rank, rank + 10]] * groups, dtype=torch.uint8, device="pretend")
    posted = exchange.post([table[:, 1]] * groups)
    received = exchange.collect(posted, time.monotonic() + 30)
    expected = [[sender + 10] * groups for sender in range(groups)]
    assert [message.tolist() for message in received] == expected
    unequal(exchange, rank, "pretend")


def compare_with_gloo(groups: int, rank: int, world_size: int) -> None:
    cases = CASES[groups, world_size]
    over_gloo = joined(world_size, groups, "cpu")
    expected_runs = [run_of(name, lane, over_gloo, "cpu") for name, lane in cases]
    topology = joined(world_size, groups, "pretend")
    runs = [run_of(name, lane, topology, "pretend") for name, lane in cases]
    assert type(topology.control) is DirectExchange
    assert type(topology.exchange) is DeviceExchange
    assert type(topology.second_hop) is DeviceExchange
    if groups == world_size:
        check_messages_of_any_size(topology.exchange, rank)
    for run, expected, (name, _) in zip(runs, expected_runs, cases, strict=True):
        assert same(run.trajectory, expected.trajectory), name
        assert run.counts == expected.counts, name
        assert run.most_in_flight > 1, "several are in flight"


@pytest.mark.parametrize(("groups", "ranks"), CASES)
def test_from_device_to_device_a_run_gives_the_bits_and_counts_the_bytes_of_gloo(
    groups: int, ranks: int
) -> None:
    run_ranks(partial(compare_with_gloo, groups), ranks)


def test_no_thread_waits_for_the_device_when_gloo_would_wait_for_a_copied_message() -> None:
    """The control vectors come to the host, the payloads do not."""

    def run(rank: int, world_size: int) -> None:
        pretend.install()
        over_gloo = Topology.of_world(GroupLayout(2, 2), timedelta(seconds=30))
        copies = []
        for topology in (joined(2, 2, "pretend"), over_gloo):
            training = Training("pretend", rank, topology=topology)
            with pretend.synchronisations() as log:
                for _ in range(STEPS):
                    training.inner_step()
                    wait_for_flights(training.engine)
                    training.engine.step()
            training.engine.close()
            assert all(entry.thread == "sdiloco-background" for entry in log)
            copies.append(sum(entry.kind == "stream.synchronize" for entry in log))
        between_devices, through_hosts = copies
        assert 0 < between_devices < through_hosts

    run_ranks(run, 2)


def test_a_strategy_joins_its_groups_over_its_devices_backend() -> None:
    class Joined(Exception):
        pass

    def of_world(*args: Any) -> Any:
        raise Joined(args[3])

    def run(rank: int, world_size: int) -> None:
        stub = DeviceBackend("stub", torch.device("cpu"))
        patch = pytest.MonkeyPatch()
        patch.setattr("lightning_sdiloco.lightning.groups.nccl_on", lambda device: stub)
        patch.setattr(Topology, "of_world", of_world)
        nccl = TwoShot("equal", backend="nccl")
        backends = {"auto:nccl": stub, nccl: stub, "gather:gloo": None, "auto": None}
        for exchange, backend in backends.items():
            strategy = StreamingDiLoCoStrategy(exchange=exchange)
            with pytest.raises(Joined, match=re.escape(str(backend))):
                fits.trainer(strategy=strategy).fit(BoringModel())

    run_processes(run, 1)


def test_all_groups_measure_the_same_link_between_devices() -> None:
    def measured(rank: int, world_size: int) -> tuple[Link, int]:
        topology = joined(2, 2, "pretend")
        link = measure_link(topology, timeout=30, largest=200_000)
        return link, topology.exchange.bytes_sent

    (link, sent_bytes), (link_of_peer, _) = run_ranks(measured, 2)
    assert link == link_of_peer
    assert link.gbit_s > 0
    assert 64_000 < sent_bytes < 500_000


def test_a_group_that_never_answers_is_given_up_at_the_deadline() -> None:
    def run(rank: int, world_size: int, message: str) -> None:
        exchange = joined(world_size, world_size, "pretend").exchange
        start = time.monotonic()
        if not rank:
            zeros = torch.zeros(10, dtype=torch.uint8, device="pretend")
            with pytest.raises(Unanswered, match=message):
                exchange.collect(exchange.post([zeros] * world_size), start + 0.5)
            assert 0.5 <= time.monotonic() - start < 3
            # Only the exchange keeps the messages now, and the next tensor does not get their
            # memory.
            torch.empty(10, dtype=torch.uint8, device="pretend")
            assert exchange._process_group.aborted.wait(5)
        dist.barrier()

    run_ranks(run, 2, r"^worker group 1 did not answer in time \(rank 1\)$")
    run_ranks(run, 3, r"^one of the other worker groups did not answer in time \(of ranks 1, 2\)$")


def stopping(rank: int, world_size: int, how: str) -> None:
    """A training in which the last rank, of the last group, stops after the launch of a
    fragment.
    """
    topology = joined(world_size, 2, "pretend")
    timeout = timedelta(seconds=1)
    training = Training("pretend", topology.group_index, topology=topology, timeout=timeout)
    topology = training.engine.topology
    if rank == world_size - 1:
        if how == "silent":
            # Its hosts continue to answer, and its device does not.
            topology.exchange.post = lambda *_: None
            training.engine.rounds._synchronizer.collect = lambda *_: time.sleep(2)
        else:
            topology.exchange.post = lambda *_: os._exit(3)
    for _ in range(STEPS):
        training.step()


def test_a_silent_or_dead_device_ends_the_run_in_time_and_its_group_is_named() -> None:
    errors = run_ranks(stopping, 4, "silent", expect_failure=True, timeout=60)
    for rank in range(2):
        assert re.search(
            r"ExchangeError: .*worker group 1 did not answer.*increase timeout", errors[rank], re.S
        )
    errors = run_ranks(stopping, 2, "dies", expect_failure=True, timeout=60)
    assert re.search(r"ExchangeError: worker group 1 (went away|did not answer)", errors[0])


def test_a_second_engine_between_devices_is_refused_until_the_first_has_ended() -> None:
    def run(rank: int, world_size: int) -> str:
        topology = joined(2, 2, "pretend")
        make = partial(Training, "pretend", rank, topology=topology)
        first = make()
        refusal = fits.refusal(make)
        if rank:
            first.engine.close()
        on_one_rank = refusal.replace("on 2 of", "on 1 of")
        assert fits.refusal(make) == on_one_rank, "all ranks decide alike"
        first.engine.close()
        shown_run(make())
        shown_run(make())
        return refusal

    message = "another engine .*also exchanges over NCCL .on 2 of 2 ranks.*finish.* or close.* remove ':nccl'"
    for refusal in run_ranks(run, 2, timeout=60):
        assert re.search(message, refusal)


def test_devices_that_cannot_reach_each_other_are_refused_before_training() -> None:
    def run(rank: int, world_size: int) -> None:
        class Mute(ccl.Communicator):
            def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
                raise RuntimeError("NCCL error: no route to host")

        pretend.install()
        dist.Backend.register_backend("mute", Mute, devices=["pretend"])
        backend = DeviceBackend("mute", torch.device("pretend"))
        Topology.of_world(GroupLayout(2, 2), timedelta(seconds=5), on_device=backend)

    errors = run_ranks(run, 2, expect_failure=True).values()
    start = "ValueError: Ranks [0, 1] of the worker groups cannot"
    messages = [error[error.rindex(start) :] for error in errors]
    assert len(messages) == 2
    for message in messages:
        assert "cannot exchange messages over mute" in message
        assert "NCCL_SOCKET_IFNAME" in message
    assert "no route to host" in messages[0], "the first to fail knows why"


class Hop(NamedTuple):
    """A batch of messages that began."""

    numel: int
    time: float


def hops_and_first_launch(rank: int, world_size: int) -> tuple[list[Hop], float]:
    training = Training(
        "pretend",
        rank,
        topology=joined(2, 2, "pretend"),
        compression="fp32",
        exchange="two_shot",
        fragments=[["0.*"], ["1.*", "2.*", "3.*"]],
        overlap_steps=5,
    )
    control = training.engine.topology.control
    travel = dist.batch_isend_irecv
    post = control.post
    hops = list[Hop]()
    launch_times = list[float]()

    def travel_noted(calls: list[Any]) -> Any:
        time.sleep(0.02)
        hops.append(Hop(calls[0].tensor.numel(), time.monotonic()))
        return travel(calls)

    def post_noted(*arguments: Any) -> Any:
        launch_times.append(time.monotonic())
        return post(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", travel_noted)
        patch.setattr(control, "post", post_noted)
        for step in range(STEPS):
            # One group launches later than the other.
            time.sleep(0.15 if rank and step % 3 == 2 else 0.0)
            training.step()
        training.engine.close()
    return hops, launch_times[0]


def test_messages_travel_once_all_groups_launched_in_the_same_order_on_all_ranks() -> None:
    """Otherwise devices may wait for each other, each with a hop that the other has not begun: this
    has happened.
    """
    (hops, early), (hops_of_peer, late) = run_ranks(hops_and_first_launch, 2)
    # A payload, statistics of norms, and the mean of a part. Counts of norms do not change here.
    flight = [920, 160, 920, 2760, 3 * 160, 2760]
    assert [hop.numel for hop in hops] == [*flight, *flight], "one flight after the other"
    assert [hop.numel for hop in hops_of_peer] == [*flight, *flight]
    assert early + 0.1 < late < hops[0].time


def test_process_groups_of_gloo_are_made_where_the_default_one_is_bound_to_a_device() -> None:
    """As Lightning binds it on GPUs: torch then splits others off, which gloo cannot do."""

    def run(rank: int, world_size: int) -> None:
        default: Any = dist.group.WORLD
        # A CPU cannot be split off either.
        default.bound_device_id = torch.device("cpu", 0)
        topology = Topology.of_world(GroupLayout(world_size, 2), timedelta(seconds=30))
        assert topology.world.all_gather_object(rank) == list(range(world_size))
        assert default.bound_device_id == torch.device("cpu", 0)

    run_ranks(run, 4)

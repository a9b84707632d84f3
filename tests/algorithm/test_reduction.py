"""How encoded outer gradients become their mean in every group: gather and two shots, with the same promises."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdiloco import OuterOptimizer, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.reduce import AllReduce, TwoShotAllReduce, all_reduce_for
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES, HOST_BYTES, Count
from lightning_sdiloco.comm.exchange import LENGTH_BYTES, DirectExchange
from lightning_sdiloco.comm.topology import GroupLayout, Topology
from lightning_sdiloco.compression import (
    COMPRESSIONS,
    FP4,
    BFloat16,
    ByLink,
    Compression,
    ErrorFeedback,
    Float32,
    RandomBlock,
    RandomK,
    TopK,
    resolve,
)
from lightning_sdiloco.engine.flight import ThreadBackground, Work
from lightning_sdiloco.errors import ExchangeError
from tests.engine.test_agreement import bits
from tests.ranks import run_ranks
from tests.training import LAYERS, batch, inner_optimizer, mlp, train_step

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 3, "fragments": LAYERS}
FAMILY: list[Compression] = [
    *(codec for name, codec in COMPRESSIONS.items() if name not in ("top_k", "random_block", "threshold")),
    ErrorFeedback(FP4()),
    RandomBlock(3, BFloat16()),
    TopK(0.1, Float32()),
]


def trained(engine: StreamingDiLoCo, model: nn.Module, group: int, steps: int) -> list[dict[str, list[int]]]:
    """The outer parameters after every landing, and at the end."""
    optimizer, seen = inner_optimizer("adamw", model), []
    for step in range(1, steps + 1):
        train_step(model, optimizer, group, step)
        if engine.step():
            seen.append(bits(engine.outer_state_dict()))
    engine.finish()
    return [*seen, bits(engine.outer_state_dict())]


def simulated(groups: int, steps: int, **choices: Any) -> tuple[SimulatedGroups, list[dict[str, list[int]]]]:
    models = [mlp() for _ in range(groups)]
    run, seen = SimulatedGroups(models, **{**CHOICES, **choices}), []
    optimizers = [inner_optimizer("adamw", model) for model in models]
    for step in range(1, steps + 1):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, group, step)
        if run.step()[0]:
            seen.append(bits(run.outer_state_dict()))
    run.finish()
    return run, [*seen, bits(run.outer_state_dict())]


def test_what_is_remembered_of_a_padded_part_is_what_was_not_sent_of_it() -> None:
    for exchange in ("two_shot", "gather"):
        all_reduce = all_reduce_for(exchange, 3, ErrorFeedback(FP4()), 0.0)
        gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        encoded = all_reduce.encode(gradient, None)
        assert encoded.memory is not None
        sent = all_reduce.decode_own(encoded.payloads, gradient)
        torch.testing.assert_close(sent + encoded.memory, gradient, rtol=0, atol=1e-6)


# Agreement


@pytest.mark.parametrize(("groups", "world_size"), [(2, 2), (3, 3), (2, 4)])
@pytest.mark.parametrize("compression", ["fp32", "fp4", "sparse"])
def test_after_two_shots_all_ranks_hold_the_same_bits(groups: int, world_size: int, compression: str) -> None:
    def run(rank: int, world_size: int) -> list[dict[str, list[int]]]:
        size = world_size // groups
        model = mlp(seed=rank)
        topology = Topology.of_world(GroupLayout(world_size, groups), timedelta(seconds=60))
        engine = StreamingDiLoCo(model, topology=topology, exchange="two_shot", compression=compression, **CHOICES)
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=topology.in_group.process_group)
        optimizer, seen = inner_optimizer("adamw", model), []
        for step in range(1, 61):
            x, y = batch(rank // size, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(x.chunk(size)[rank % size]), y.chunk(size)[rank % size]).backward()
            optimizer.step()
            if engine.step():
                seen.append(bits(engine.outer_state_dict()))
        engine.finish()
        return [*seen, bits(engine.outer_state_dict())]

    ranks = run_ranks(run, world_size)
    assert len(ranks[0]) > 20
    assert all(other == ranks[0] for other in ranks[1:])


@pytest.mark.parametrize("exchange", ["gather", "two_shot"])
def test_simulated_groups_get_the_bits_of_processes(exchange: str) -> None:
    def run(rank: int, world_size: int) -> list[dict[str, list[int]]]:
        model = mlp()
        return trained(StreamingDiLoCo(model, exchange=exchange, **CHOICES), model, rank, 60)

    in_processes = run_ranks(run, 3)
    assert simulated(3, 60, exchange=exchange)[1] == in_processes[0] == in_processes[2]


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_without_loss_two_shots_give_the_bits_of_a_gather(groups: int) -> None:
    means = [simulated(groups, 60, exchange=exchange, compression="fp32")[1] for exchange in ("gather", "two_shot")]
    assert means[0] == means[1]


def test_values_that_chance_picks_lose_nothing_in_the_second_shot() -> None:
    gradients = [torch.randn(1001, generator=torch.Generator().manual_seed(group)) for group in range(4)]
    shots = TwoShotAllReduce(4, RandomK(8, Float32()).at(100), 0.0)
    count = Count(dict.fromkeys(range(4), 1.0))
    mean = shots.reduce_locally(gradients, [None] * 4, [None] * 4, count)
    picked = mean != 0
    assert 100 < picked.sum() < 150
    assert torch.equal(mean[picked], (sum(gradients, torch.zeros(1001)) / 4)[picked])


# What is sent


@pytest.mark.parametrize("exchange", ["gather", "two_shot"])
@pytest.mark.parametrize("compression", [*COMPRESSIONS, ByLink()])
def test_a_fragment_without_values_sends_nothing_but_its_control_vector(compression: Any, exchange: str) -> None:
    codec = resolve(compression)
    if exchange == "two_shot" and (codec.varies() or codec.counts_senders()):
        exchange = "auto"
    models = [nn.ModuleDict({"some": mlp()}) for _ in range(3)]
    for model in models:
        model.register_parameter("none", nn.Parameter(torch.zeros(0, 4)))
    choices: dict[str, Any] = {"sync_every": 2, "overlap_steps": 1, "mixing": 0.5}
    fragments = [["none"], ["some.*"]]
    run = SimulatedGroups(models, fragments=fragments, compression=compression, exchange=exchange, **choices)
    for engine in run.engines:
        engine.diagnose()
    landings = [landing for _ in range(8) for landing in run.step()[0] if landing.fragment == 0]
    assert len(landings) == 3
    words = CONTROL_BYTES + (LENGTH_BYTES if codec.varies() else 0)
    assert {landing.bytes_sent for landing in landings} == {2 * words}
    run.finish()


def sent(groups: int, **choices: Any) -> tuple[float, list[int]]:
    """Bytes that a group sends in four launches of every fragment, and the numbers of values of the fragments."""
    models = [mlp() for _ in range(groups)]
    run = SimulatedGroups(models, sync_every=4, overlap_steps=0, **choices)
    for _ in range(19):
        run.step()
    reports = [engine.report() for engine in run.engines]
    run.finish()
    assert {report["launches"] for report in reports} == {4 * len(run.engines[0].fragments)}
    assert len({report[which] for report in reports for which in ("bytes_sent", "bytes_received")}) == 1
    return reports[0]["bytes_sent"], [sum(size // 4 for size in one.sizes) for one in run.engines[0].fragments]


@pytest.mark.parametrize("compression", FAMILY, ids=str)
@pytest.mark.parametrize("groups", [2, 4])
def test_the_bytes_of_two_shots_are_those_of_the_parts(groups: int, compression: Compression) -> None:
    total, sizes = sent(groups, fragments=LAYERS, exchange="two_shot", compression=compression)
    parts = [CONTROL_BYTES + 2 * compression.wire_bytes(-(-size // groups)) for size in sizes]
    assert total == (groups - 1) * 4 * sum(parts)


def test_with_six_groups_two_shots_send_a_third() -> None:
    two, all_ = (sent(6, fragments=[["*"]], exchange=one, compression="fp32")[0] for one in ("two_shot", "gather"))
    control = 5 * 4 * CONTROL_BYTES
    assert (two - control) / (all_ - control) == pytest.approx(1 / 3, rel=0.02)


def test_the_final_exchange_rounds_once() -> None:
    run, seen = simulated(4, 7, exchange="two_shot", compression="bf16")
    gathered, other = simulated(4, 7, exchange="gather", compression="bf16")
    assert run.engines[0].report()["launches"] == gathered.engines[0].report()["launches"] == 0
    assert seen == other


# The second rounding


@pytest.mark.parametrize("compression", FAMILY, ids=str)
def test_what_the_second_rounding_loses_comes_with_the_next_mean(compression: Compression) -> None:
    mean = torch.randn(600, generator=torch.Generator().manual_seed(0)).exp()
    residual, total, errors = None, torch.zeros(600), []
    for count in range(1, 25):
        shots = TwoShotAllReduce(2, compression.at(count), 0.0)
        hop = shots.second_hop(mean, residual)
        residual, decoded = hop.residual, torch.empty(600)
        shots.compression.decode(hop.payload, decoded)
        total += decoded
        errors.append(float((total / count - mean).norm() / mean.norm()))
    assert errors[-1] < 0.9 * errors[0] or errors[0] == 0


def test_mixing_keeps_a_share_of_what_was_lost() -> None:
    mean = torch.tensor([1.0, 0.9, 0.3, -0.2])
    whole, half = (TwoShotAllReduce(2, TopK(0.5, Float32()), mixing).second_hop(mean, None) for mixing in (0.0, 0.5))
    assert whole.residual.tolist() == pytest.approx([0.0, 0.0, 0.3, -0.2])
    assert half.residual.tolist() == pytest.approx([0.0, 0.0, 0.15, -0.1])


def test_a_residual_changes_at_landings_only_and_not_where_no_group_counts() -> None:
    models = [mlp(), mlp(), mlp()]
    run = SimulatedGroups(models, sync_every=4, overlap_steps=2, fragments=[["*"]], exchange="two_shot")
    optimizers = [inner_optimizer("adamw", model) for model in models]

    def residual() -> Tensor | None:
        return run.engines[0].rounds.fragments[0].residual

    for step in range(1, 6):
        for group, model in enumerate(models):
            train_step(model, optimizers[group], group, step)
        run.step()
        assert residual() is None
    run.step(idle=[0, 1, 2])
    first = residual()
    assert first is not None
    assert first.abs().sum() > 0
    for _ in range(4):  # the launch after step 8 counts steps 5 to 8; that after step 12 none
        run.step(idle=[0, 1, 2])
    second = residual()
    assert second is not None
    for _ in range(4):
        run.step(idle=[0, 1, 2])
    assert residual() is second
    assert not torch.equal(first, second)


def test_what_a_group_has_not_sent_comes_with_its_next_launch_in_two_shots_too() -> None:
    models = [nn.Linear(12, 1, bias=False) for _ in range(3)]
    nn.init.zeros_(models[0].weight)
    choices = {"outer_lr": 1.0, "outer_momentum": 0.0, "mixing": 0.0, "exchange": "two_shot"}
    codec = ErrorFeedback(TopK(0.5, Float32()))
    run = SimulatedGroups(models, sync_every=1, overlap_steps=0, compression=codec, **choices)
    for model in models:
        model.weight.data += torch.tensor([8.0, 7.0, 2.0, 1.0] * 3)
    for expected in ([8.0, 7.0, 0.0, 0.0], [8.0, 7.0, 2.0, 1.0]):
        run.step()
        assert run.outer_state_dict()["weight"].tolist() == [expected * 3]


def test_a_group_that_does_not_count_keeps_what_the_second_rounding_of_its_part_lost() -> None:
    models = [nn.Linear(12, 1, bias=False) for _ in range(3)]
    nn.init.zeros_(models[0].weight)
    choices = {"outer_lr": 1.0, "outer_momentum": 0.0, "mixing": 0.0, "compression": TopK(0.5, Float32())}
    run = SimulatedGroups(models, sync_every=1, overlap_steps=0, exchange="two_shot", **choices)
    # Two values of each part come from a group, which loses nothing. Their mean has four, of which two go on at once.
    for model, own in zip(models, ([8.0, 7.0, 0.0, 0.0], [0.0, 0.0, 2.0, 1.0]), strict=False):
        model.weight.data += torch.tensor(own * 3)
    run.step(idle=[2])
    assert run.outer_state_dict()["weight"].tolist() == [[4.0, 3.5, 0.0, 0.0] * 3]
    run.step(idle=[2])
    assert run.outer_state_dict()["weight"].tolist() == [[4.0, 3.5, 1.0, 0.5] * 3]


# Aggregation


def test_two_shots_leave_out_and_weigh_groups_as_a_gather_does() -> None:
    def run(exchange: str) -> dict[str, list[int]]:
        models = [mlp() for _ in range(4)]
        choices = {"outer_optimizer": OuterOptimizer(clip_norm=0.01), "compression": "fp32", "exchange": exchange}
        groups = SimulatedGroups(models, sync_every=4, overlap_steps=1, fragments=LAYERS, **choices)
        optimizers = [inner_optimizer("sgd", model) for model in models]
        landings = []
        for step in range(1, 30):
            for group, model in enumerate(models):
                if group != 3 or step % 2:
                    train_step(model, optimizers[group], group, step)
            if step == 9:
                nn.init.constant_(models[2][0].weight, float("nan"))
            landings += groups.step(idle=[3] if step % 2 == 0 else [])[0]
        assert any(landing.left_out == (2,) for landing in landings)
        groups.finish()
        return bits(groups.outer_state_dict())

    assert run("two_shot") == run("gather")


# Resuming


def test_a_run_with_two_shots_goes_on_bit_for_bit_in_flight() -> None:
    choices = {**CHOICES, "exchange": "two_shot", "compression": "int4", "overlap_steps": 5}

    def build() -> tuple[SimulatedGroups, list[nn.Module], list[torch.optim.Optimizer]]:
        models: list[nn.Module] = [mlp() for _ in range(3)]
        return SimulatedGroups(models, **choices), models, [inner_optimizer("sgd", model) for model in models]

    def steps(built: Any, first: int, last: int) -> None:
        run, models, optimizers = built
        for step in range(first, last + 1):
            for group in range(3):
                train_step(models[group], optimizers[group], group, step)
            run.step()

    whole, stopped, resumed = build(), build(), build()
    steps(whole, 1, 50)
    steps(stopped, 1, 34)
    assert stopped[0].engines[0].in_flight
    states = [engine.state_dict() for engine in stopped[0].engines]
    assert any(fragment["residual"].abs().sum() > 0 for fragment in states[0]["fragments"])
    for engine, state in zip(resumed[0].engines, states, strict=True):
        engine.load_state_dict(state)
    steps(resumed, 35, 50)
    for engine, other in zip(whole[0].engines, resumed[0].engines, strict=True):
        assert bits(engine.outer_state_dict()) == bits(other.outer_state_dict())


# Which one


@pytest.mark.parametrize("exchange", ["all_reduce", "two-shot", None, True, 2])
def test_an_unknown_exchange_is_refused_with_those_that_are_known(exchange: Any) -> None:
    with pytest.raises(ValueError, match=r"exchange=.* is not known. It is one of 'auto', 'gather', 'two_shot'"):
        Settings(exchange=exchange)


@pytest.mark.parametrize("compression", FAMILY, ids=str)
def test_by_itself_two_groups_gather_and_more_take_two_shots_but_where_values_are_left_out(
    compression: Compression,
) -> None:
    ways = [type(all_reduce_for("auto", groups, compression, 0.5)) for groups in (1, 2, 3, 8)]
    left_out = "TopK" in str(compression)
    assert ways == [AllReduce, AllReduce, *[AllReduce if left_out else TwoShotAllReduce] * 2]


# The way


def test_a_connection_carries_messages_of_different_sizes_to_different_groups() -> None:
    def run(rank: int, world_size: int) -> list[list[int]]:
        exchange = DirectExchange(dist.new_group(), dist.new_group())
        # What goes to a group is as long as its number and two more.
        posted = [
            exchange.post([torch.full((to + 2,), 10 * rank + to + 50 * turn, dtype=torch.uint8) for to in range(3)])
            for turn in range(2)
        ]
        collected = [exchange.collect(one, time.monotonic() + 30) for one in posted]
        assert exchange.bytes_sent == 2 * sum(to + 2 for to in range(3) if to != rank)
        assert exchange.bytes_received == 2 * 2 * (rank + 2)
        return [message.tolist() for messages in collected for message in messages]

    for rank, received in enumerate(run_ranks(run, 3)):
        assert received == [[10 * sender + rank + 50 * turn] * (rank + 2) for turn in range(2) for sender in range(3)]


def test_what_the_hosts_say_waits_for_no_payload() -> None:
    """The payload of a group is held back; what its host says arrives."""

    def run(rank: int, world_size: int) -> int:
        topology = Topology.of_world(GroupLayout(2, 2), timedelta(seconds=5))
        words = topology.control.post([torch.full((HOST_BYTES,), rank, dtype=torch.uint8)] * 2)
        posted = topology.exchange.post([torch.zeros(1 << 20, dtype=torch.uint8)] * 2) if rank == 0 else None
        said = topology.control.collect(words, time.monotonic() + 5)
        dist.barrier()
        if posted is None:
            posted = topology.exchange.post([torch.zeros(1 << 20, dtype=torch.uint8)] * 2)
        topology.exchange.collect(posted, time.monotonic() + 5)
        return int(said[1 - rank][0])

    assert run_ranks(run, 2) == [1, 0]


# The background


def in_stages(*stages: Callable[[], Any]) -> Work[Any]:
    """Work that does one thing after the other, and has what the last one returns."""
    for stage in stages[:-1]:
        stage()
        yield
    return stages[-1]()


def test_a_flight_is_sent_while_an_earlier_one_is_still_on_its_way() -> None:
    background = ThreadBackground(torch.device("cpu"))
    second_was_sent = threading.Event()

    def wait() -> None:
        assert second_was_sent.wait(10)

    first = background.start(in_stages(lambda: None, wait, lambda: 1))
    second = background.start(in_stages(second_was_sent.set, lambda: None, lambda: 2))
    assert (first.result(), second.result()) == (1, 2)
    background.close()


def test_stages_keep_the_order_of_the_launches() -> None:
    background, order = ThreadBackground(torch.device("cpu")), []

    def stage(name: str, number: int) -> Any:
        return lambda: order.append((name, number))

    flights = [background.start(in_stages(*(stage(name, number) for name in "abc"))) for number in range(50)]
    flights[-1].result()
    for name in "abc":
        assert [number for own, number in order if own == name] == list(range(50))
    background.close()


def test_a_failed_stage_ends_its_flight_and_the_background_goes_on() -> None:
    background = ThreadBackground(torch.device("cpu"))
    reached: list[int] = []

    def fail() -> None:
        raise ExchangeError("gone")

    failed = background.start(in_stages(lambda: None, fail, lambda: reached.append(1)))
    following = background.start(in_stages(lambda: None, lambda: None, lambda: 3))
    with pytest.raises(ExchangeError, match="gone"):
        failed.result()
    assert (following.result(), reached) == (3, [])
    background.close()


def test_the_threads_of_a_background_end_with_it() -> None:
    before = threading.active_count()
    background: ThreadBackground | None = ThreadBackground(torch.device("cpu"))
    assert threading.active_count() == before + 3
    assert background is not None
    background.start(in_stages(*[lambda: None] * 3)).result()
    del background
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before

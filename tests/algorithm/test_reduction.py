"""How encoded outer gradients become their mean in every group: gather and two shots, with the
same promises.
"""

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import OuterOptimizer, SimulatedGroups, TwoShot
from lightning_sdiloco.algorithm.as_data import as_data
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.reduce import AllReduce, TwoShotAllReduce, all_reduce_for
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES, Count
from lightning_sdiloco.compression import (
    COMPRESSIONS,
    FP4,
    BFloat16,
    ByLink,
    Compression,
    ErrorFeedback,
    resolve,
)
from lightning_sdiloco.compression.casts import Float32
from lightning_sdiloco.compression.sparse import RandomBlock, RandomK, TopK
from lightning_sdiloco.engine.background import ThreadBackground, Work
from lightning_sdiloco.errors import ExchangeError
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups as Hosts
from lightning_sdiloco.planning.workload import Model
from tests.engine.groups import MEAN, Groups, unlike
from tests.training import LAYERS, mlp

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 3, "fragments": LAYERS}
REPLACED = {"top_k", "random_block", "threshold"}
FAMILY = [COMPRESSIONS[name] for name in COMPRESSIONS if name not in REPLACED]
FAMILY += [ErrorFeedback(FP4()), RandomBlock(3, BFloat16()), TopK(0.1, Float32())]


NO_OVERLAP: dict[str, Any] = {"sync_every": 4, "overlap_steps": 0}


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_without_loss_all_ways_give_the_bits_of_a_gather(groups: int) -> None:
    """Also where groups are left out, clipped or idle; where links are alike, also in fewer
    bits.
    """
    clipped = OuterOptimizer(clip_norm=0.01)
    gathered = final_outer_parameters(
        groups, exchange="gather", compression="fp32", outer_optimizer=clipped
    )
    for exchange in ("two_shot", TwoShot([0.7, 0.3, *[0.0] * (groups - 2)])):
        outer_parameters = final_outer_parameters(
            groups, exchange=exchange, compression="fp32", outer_optimizer=clipped
        )
        assert unlike(outer_parameters, gathered) == []
    on_equal_links = final_outer_parameters(groups, exchange=TwoShot("by_bandwidth", [3] * groups))
    assert unlike(on_equal_links, final_outer_parameters(groups, exchange="two_shot")) == []


def final_outer_parameters(groups: int, **choices: Any) -> dict[str, Tensor]:
    """Those of a run in which group 1 often rests and group 0 is not finite once."""

    def is_idle(group: int, step: int) -> bool:
        return group == 1 and step % 2 == 0

    def spoil(models: list[Any]) -> None:
        nn.init.constant_(models[0][0].weight, float("nan"))

    run = Groups(groups, idle=is_idle, **CHOICES, **choices)
    run.until(8)
    run.step(then=spoil)
    run.until(26)
    assert any(landing.left_out == (0,) for landing in run.landings)
    run.groups.finish()
    return run.groups.outer_state_dict()


def bytes_of_a_round(groups: int, **choices: Any) -> tuple[float, list[int]]:
    """The bytes that a group sends in one launch of every fragment, and the numbers of values of
    the fragments.
    """
    run = Groups(groups, "sgd", **{**CHOICES, **NO_OVERLAP, **choices})
    run.until(7)
    fragments = run.engines[0].fragments
    reports = [engine.report() for engine in run.engines]
    sent_bytes = reports[0]["bytes_sent"]
    for report in reports:
        assert report["launches"] == len(fragments)
        assert report["bytes_sent"] == report["bytes_received"] == sent_bytes
    return sent_bytes, [sum(fragment.sizes) // 4 for fragment in fragments]


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("compression", FAMILY, ids=str)
def test_two_shots_send_the_bytes_of_their_parts_and_control_vectors(
    compression: Compression, groups: int
) -> None:
    sent_bytes, numels = bytes_of_a_round(groups, exchange="two_shot", compression=compression)
    expected = 0
    for numel in numels:
        part_bytes = compression.wire_bytes(math.ceil(numel / groups))
        expected += (groups - 1) * (CONTROL_BYTES + 2 * part_bytes)
    assert sent_bytes == expected


def test_six_groups_send_a_third_of_the_bytes_of_a_gather_in_two_shots() -> None:
    choices: dict[str, Any] = {"fragments": [["*"]], "compression": "fp32"}
    two_shot_bytes, _ = bytes_of_a_round(6, exchange="two_shot", **choices)
    gathered_bytes, _ = bytes_of_a_round(6, exchange="gather", **choices)
    control_bytes = 5 * CONTROL_BYTES
    share = (two_shot_bytes - control_bytes) / (gathered_bytes - control_bytes)
    assert share == pytest.approx(1 / 3, rel=0.02)


def with_empty_parameter(seed: int) -> nn.Module:
    model = nn.Sequential(*mlp())
    model.register_parameter("none", nn.Parameter(torch.zeros(0, 4)))
    return model


@pytest.mark.parametrize("compression", [*COMPRESSIONS, ByLink()], ids=str)
def test_without_values_only_the_control_vectors_travel(compression: Any) -> None:
    traits = resolve(compression).traits
    needs_gather = traits.varies or traits.counts_senders
    # The length of a payload that varies takes eight bytes.
    control_bytes = CONTROL_BYTES + (8 if traits.varies else 0)
    for exchange in ["auto"] if needs_gather else ["gather", "two_shot"]:
        run = Groups(
            3,
            "sgd",
            with_empty_parameter,
            sync_every=2,
            overlap_steps=1,
            mixing=0.5,
            compression=compression,
            exchange=exchange,
            fragments=[["none"], ["*.*"]],
        )
        for engine in run.engines:
            engine.rounds.diagnose()
        landings = [landing for landing in run.until(8) if landing.fragment == 0]
        assert [landing.bytes_sent for landing in landings] == [2 * control_bytes] * 3
        run.groups.finish()


def control_ahead(numel: int, **choices: Any) -> tuple[list[int], int]:
    """The steps at which control vectors went ahead of the payloads, and the bytes that a group
    sent.
    """
    models = [nn.Linear(numel, 1) for _ in range(3)]
    groups = SimulatedGroups(models, sync_every=2, overlap_steps=1, fragments=[["*"]], **choices)
    engine = groups.engines[0]
    launch_steps = []
    for step in range(1, 36):
        bytes_before = engine.topology.control.bytes_sent
        groups.step()
        if engine.topology.control.bytes_sent - bytes_before >= 2 * CONTROL_BYTES:
            launch_steps.append(step - 1)
    return launch_steps, int(engine.report()["bytes_sent"])


def test_a_short_message_takes_the_control_vector_along_but_in_one_flight_of_seven() -> None:
    rounds = list(range(2, 35, 2))
    for exchange in ("gather", "two_shot"):
        short_steps, short_bytes = control_ahead(65_534, exchange=exchange)
        long_steps, long_bytes = control_ahead(65_535, exchange=exchange)
        assert short_steps == rounds[::7]
        assert long_steps == rounds
        assert 0 <= long_bytes - short_bytes <= 2 * 8 * len(rounds)
    steps_by_link, _ = control_ahead(60, exchange="gather", compression=ByLink())
    assert steps_by_link == rounds


@pytest.mark.parametrize("compression", FAMILY, ids=str)
def test_the_second_roundings_error_joins_the_next_mean_and_random_picks_lose_none(
    compression: Compression,
) -> None:
    mean = torch.randn(600, generator=torch.Generator().manual_seed(0)).exp()
    residual = None
    total = torch.zeros(600)
    errors = []
    for count in range(1, 25):
        shots = TwoShotAllReduce(2, compression.at(count), 0.0)
        hop = shots.second_hop(mean, residual)
        residual = hop.residual
        decoded = torch.empty(600)
        shots.compression.decode(hop.payload, decoded)
        total += decoded
        errors.append(float((total / count - mean).norm() / mean.norm()))
    assert errors[-1] < 0.9 * errors[0] or errors[0] == 0


@pytest.mark.parametrize(
    ("mixing", "residual"), [(0.0, [0.0, 0.0, 0.3, -0.2]), (0.5, [0.0, 0.0, 0.15, -0.1])]
)
def test_the_second_hop_remembers_the_share_that_mixing_does_not_keep(
    mixing: float, residual: list[float]
) -> None:
    mean = torch.tensor([1.0, 0.9, 0.3, -0.2])
    hop = TwoShotAllReduce(2, TopK(0.5, Float32()), mixing).second_hop(mean, None)
    assert hop.residual.tolist() == pytest.approx(residual)


def test_parts_that_are_padded_and_values_that_chance_picks_lose_nothing() -> None:
    # Of a padded part, the memory holds the values that were not sent.
    for exchange in ("two_shot", "gather"):
        all_reduce = all_reduce_for(exchange, 3, ErrorFeedback(FP4()), 0.0)
        gradient = torch.randn(1000)
        encoded = all_reduce.encode(gradient, None)
        assert encoded.memory is not None
        sent = all_reduce.decode_own(encoded.payloads, gradient)
        torch.testing.assert_close(sent + encoded.memory, gradient, rtol=0, atol=1e-6)
    # Values that chance picks lose nothing.
    generators = [torch.Generator().manual_seed(group) for group in range(4)]
    gradients = [torch.randn(1001, generator=generator) for generator in generators]
    shots = TwoShotAllReduce(4, RandomK(8, Float32()).at(100), 0.0)
    count = Count(dict.fromkeys(range(4), 1.0))
    mean = shots.reduce_locally(gradients, [None] * 4, [None] * 4, count)
    expected = sum(gradients, torch.zeros(1001)) / 4
    picked = mean != 0
    assert 100 < picked.sum() < 150
    assert torch.equal(mean[picked], expected[picked])


class Movement(NamedTuple):
    """One step of three groups, and the outer parameters after each of the next rounds."""

    compression: Compression
    mixing: float
    lengths: list[list[float]]
    idle: list[int]
    outer: list[list[float]]


TOP = TopK(0.5, Float32())
ALIKE = [[8.0, 7.0, 2.0, 1.0]] * 3
CUT = [8.0, 7.0, 0.0, 0.0]
MOVEMENTS = [
    # Groups move once. The values that they have not sent arrive exactly, whatever share of them
    # the local parameters keep.
    Movement(ErrorFeedback(TOP), 0.0, ALIKE, [], [CUT, *ALIKE]),
    Movement(ErrorFeedback(TOP), 0.5, ALIKE, [], [CUT, *ALIKE]),
    Movement(TOP, 0.0, ALIKE, [], [CUT] * 4),
    # Two values of each part come from a group, which loses nothing. Their mean has four, of which
    # two go at once.
    Movement(TOP, 0.0, [CUT, [0, 0, 2, 1], [0] * 4], [2], [[4, 3.5, 0, 0], [4, 3.5, 1, 0.5]]),
]


@pytest.mark.parametrize("movement", MOVEMENTS)
def test_values_that_a_group_did_not_send_arrive_later_in_two_shots_as_well(
    movement: Movement,
) -> None:
    """From the memory of a group that trained on; and of one that does not count, the loss of the
    second rounding.
    """
    models = [nn.Linear(12, 1, bias=False) for _ in range(3)]
    nn.init.zeros_(models[0].weight)
    run = SimulatedGroups(
        models,
        sync_every=1,
        overlap_steps=0,
        exchange="two_shot",
        compression=movement.compression,
        **{**MEAN, "mixing": movement.mixing},
    )
    for model, length in zip(models, movement.lengths, strict=True):
        model.weight.data += torch.tensor(length * 3)
    for values in movement.outer:
        run.step(idle=movement.idle)
        assert run.outer_state_dict()["weight"].tolist() == [values * 3]


def bisected(links: list[float]) -> float:
    """The least time in which shares that add up to 1 are allowed, found without the closed
    form.
    """
    groups = len(links)
    low = 1 / min(links)
    high = 10 * groups / min(links)
    for _ in range(100):
        middle = (low + high) / 2
        shares = sum(max(0.0, (link * middle - 1) / (groups - 2)) for link in links)
        if shares >= 1:
            high = middle
        else:
            low = middle
    return high


UNEQUAL = [1, 1, 1, 0.5]


@pytest.mark.parametrize(
    "links",
    [UNEQUAL, [1, 2, 3], [5, 1, 1, 1, 1], [1, 1, 0.9, 1.1], [10, 1, 2, 7, 3, 3, 0.7, 1]],
    ids=str,
)
def test_shares_by_bandwidth_minimise_the_time_of_the_slowest_link(links: list[float]) -> None:
    shares = TwoShot(links=links).shares(len(links))
    assert shares is not None
    assert sum(shares) == pytest.approx(1)
    parts = len(links) - 2
    busy_times = [(1 + parts * share) / link for link, share in zip(links, shares, strict=True)]
    assert max(busy_times) == pytest.approx(bisected(links))


def planned_time(exchange: Any, rates: list[float], on_one_link: bool = False) -> float:
    """The seconds that the planner gives the second half of a run bound by its links."""
    settings = Settings(sync_every=10, overlap_steps=9, exchange=exchange)
    model = Model.of_size(24_000_000, layers=12)
    method = Streaming(model, settings, Hosts(step_time=1e-3, groups=4))
    links = [Link(rate / 100) for rate in rates]
    plays = play(method, links[0], 400, [1.0] * 4, links=() if on_one_link else links)
    step_ends = plays[0].steps
    return step_ends[-1] - step_ends[199]


def test_shares_by_bandwidth_minimise_the_time_of_rounds_bound_by_links() -> None:
    equal_shares = planned_time("two_shot", UNEQUAL)
    by_bandwidth = planned_time(TwoShot("by_bandwidth", UNEQUAL), UNEQUAL)
    assert equal_shares / by_bandwidth == pytest.approx(1.5, rel=1e-2)
    equal_links = planned_time("two_shot", [1.0] * 4)
    one_link = planned_time("two_shot", [1.0] * 4, on_one_link=True)
    assert equal_links == pytest.approx(one_link, rel=0.02)


UNEVEN = TwoShot((0.7, 0.3, 0))


def test_more_than_two_groups_default_to_two_shots_and_checkpoints_keep_theirs() -> None:
    # More than two groups also gather if a compression leaves values out.
    for compression in FAMILY:
        ways = [type(all_reduce_for("auto", groups, compression, 0.5)) for groups in (1, 2, 3, 8)]
        way_of_more = AllReduce if "TopK" in str(compression) else TwoShotAllReduce
        assert ways == [AllReduce, AllReduce, way_of_more, way_of_more], compression
    by_links = TwoShot().over([0.98, 1, 0.4999])
    assert by_links.links == (1, 1, 0.5)
    for exchange in (by_links, UNEVEN, TwoShot((0.5, 0.5), backend="nccl")):
        assert TwoShot.read(as_data(exchange), exchange.backend) == exchange
    assert TwoShot.read("gather", "nccl") == "gather:nccl"


def refused(message: str, make: Callable[..., object], *arguments: Any, **choices: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make(*arguments, **choices)


def test_unknown_exchanges_and_impossible_shares_are_refused() -> None:
    unknown = r"=.* is unknown. Choose 'auto' \(the default\), 'gather', 'two_shot'"
    for exchange in ("all_reduce", "two-shot", None, True, 2):
        refused(unknown, Settings, exchange=exchange)
    refused("is unknown", TwoShot, "fast")
    refused("not negative", TwoShot, [1, -1])
    refused("positive numbers", TwoShot, links=[1, 0])
    refused("does not use links", TwoShot, [0.5, 0.5], links=[1, 1])
    must_be_one = r"add up to 1.1, .* must add up to 1. .* pass \[0.455, 0.545\]"
    refused(must_be_one, TwoShot, [0.5, 0.6])
    refused(r"add up to 0.9, .* pass \[0.333, 0.333, 0.333\]", TwoShot, [0.3, 0.3, 0.3])
    refused(r"add up to 4, .* pass \[0.5, 0.25, 0.25\]", TwoShot, [2, 1, 1])
    assert TwoShot([0.33, 0.33, 0.33]).shares(3) is None, "they are rounded"
    refused("only a Trainer measures", Groups, 3, exchange=TwoShot(), **CHOICES)
    two_links = TwoShot(links=[1, 1])
    refused("2 numbers for 3 worker groups", Groups, 3, exchange=two_links, **CHOICES)
    senders = TopK(0.1, Float32(), over="senders")
    refused("over='senders'", Settings, exchange=UNEVEN, compression=senders)


def in_stages(*stages: Callable[[], Any]) -> Work[Any]:
    """Work that does one stage after the other, and has the result of the last one."""
    for stage in stages[:-1]:
        stage()
        yield
    return stages[-1]()


def nothing() -> None:
    """A stage that does nothing."""


def test_stages_of_overlapping_flights_keep_launch_order_and_a_failed_one_ends_alone() -> None:
    threads_before = threading.active_count()
    background = ThreadBackground(torch.device("cpu"))
    second_was_sent = threading.Event()
    order: dict[str, list[int]] = {name: [] for name in "abc"}

    def wait() -> None:
        assert second_was_sent.wait(10)

    def fail() -> None:
        raise ExchangeError("gone")

    def never() -> None:
        order["after a failure"] = []

    first = background.start(in_stages(nothing, wait, lambda: 1))
    second = background.start(in_stages(second_was_sent.set, nothing, lambda: 2))
    failed = background.start(in_stages(nothing, fail, never))
    flights = []
    for number in range(50):
        stages = [partial(order[name].append, number) for name in "abc"]
        flights.append(background.start(in_stages(*stages)))
    assert first.result() == 1
    assert second.result() == 2
    with pytest.raises(ExchangeError, match="gone"):
        failed.result()
    flights[-1].result()
    assert order == dict.fromkeys("abc", list(range(50)))
    # Its threads end with it.
    assert threading.active_count() == threads_before + 3
    del background, first, second, failed, flights
    deadline = time.monotonic() + 10
    while threading.active_count() > threads_before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads_before

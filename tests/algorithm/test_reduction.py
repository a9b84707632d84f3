"""How encoded outer gradients become their mean in every group: gather and two shots, with the
same promises.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import OuterOptimizer, SimulatedGroups, TwoShot
from lightning_sdiloco.algorithm.as_data import as_data
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.reduce import AllReduce, TwoShotAllReduce, all_reduce_for
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES, Count
from lightning_sdiloco.comm.exchange import LENGTH_BYTES
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
from tests.engine.groups import Groups, unlike
from tests.training import LAYERS, mlp

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 3, "fragments": LAYERS}
FAMILY = [
    codec
    for name, codec in COMPRESSIONS.items()
    if name not in ("top_k", "random_block", "threshold")
]
FAMILY += [ErrorFeedback(FP4()), RandomBlock(3, BFloat16()), TopK(0.1, Float32())]


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_without_loss_all_ways_give_the_bits_of_a_gather(groups: int) -> None:
    """Whoever is left out, clipped or idle; where links are alike, also in fewer bits."""

    def bits(**choices: Any) -> dict[str, Tensor]:
        run = Groups(
            groups, idle=lambda group, step: group == 1 and step % 2 == 0, **{**CHOICES, **choices}
        )
        run.until(8)
        run.step(then=lambda models: nn.init.constant_(models[0][0].weight, float("nan")))
        run.until(26)
        assert any(landing.left_out == (0,) for landing in run.landings)
        run.groups.finish()
        return run.groups.outer_state_dict()

    exact: dict[str, Any] = {
        "compression": "fp32",
        "outer_optimizer": OuterOptimizer(clip_norm=0.01),
    }
    uneven = TwoShot([0.7, 0.3, *[0.0] * (groups - 2)])
    for one in ("two_shot", uneven):
        assert unlike(bits(exchange=one, **exact), bits(exchange="gather", **exact)) == []
    alike = TwoShot("by_bandwidth", [3] * groups)
    assert unlike(bits(exchange=alike), bits(exchange="two_shot")) == []


def test_two_shots_send_the_bytes_of_their_parts_and_control_vectors() -> None:
    """Without values, only the control vectors travel."""

    def sent(groups: int, **choices: Any) -> tuple[float, list[int]]:
        """Bytes that a group sends in one launch of every fragment, and the numbers of values of
        the fragments.
        """
        run = Groups(groups, "sgd", **{**CHOICES, "sync_every": 4, "overlap_steps": 0, **choices})
        run.until(7)
        reports = [engine.report() for engine in run.engines]
        assert {report["launches"] for report in reports} == {len(run.engines[0].fragments)}
        assert (
            len({report[which] for report in reports for which in ("bytes_sent", "bytes_received")})
            == 1
        )
        return reports[0]["bytes_sent"], [
            sum(size // 4 for size in one.sizes) for one in run.engines[0].fragments
        ]

    for compression in FAMILY:
        for groups in (2, 4):
            total, sizes = sent(groups, exchange="two_shot", compression=compression)
            parts = [
                CONTROL_BYTES + 2 * compression.wire_bytes(-(-size // groups)) for size in sizes
            ]
            assert total == (groups - 1) * sum(parts), compression
    two, all_ = (
        sent(6, fragments=[["*"]], exchange=one, compression="fp32")[0]
        for one in ("two_shot", "gather")
    )
    assert (two - 5 * CONTROL_BYTES) / (all_ - 5 * CONTROL_BYTES) == pytest.approx(1 / 3, rel=0.02)

    def net(seed: int) -> nn.Module:
        model = nn.Sequential(*mlp())
        model.register_parameter("none", nn.Parameter(torch.zeros(0, 4)))
        return model

    for compression in (*COMPRESSIONS, ByLink()):
        codec: Any = resolve(compression)
        for exchange in (
            ("auto",)
            if codec.traits.varies or codec.traits.counts_senders
            else ("gather", "two_shot")
        ):
            choices: dict[str, Any] = {
                "sync_every": 2,
                "overlap_steps": 1,
                "mixing": 0.5,
                "compression": compression,
            }
            run = Groups(3, "sgd", net, fragments=[["none"], ["*.*"]], exchange=exchange, **choices)
            for engine in run.engines:
                engine.diagnose()
            landings = [landing for landing in run.until(8) if landing.fragment == 0]
            words = CONTROL_BYTES + (LENGTH_BYTES if codec.traits.varies else 0)
            assert [landing.bytes_sent for landing in landings] == [2 * words] * 3, compression
            run.groups.finish()


def test_a_short_message_takes_the_control_vector_along_but_in_one_flight_of_seven() -> None:
    def ahead(numel: int, **choices: Any) -> tuple[list[int], int]:
        """The steps at which control vectors went ahead of the payloads, and the bytes that a
        group sent.
        """
        settings: dict[str, Any] = {
            "sync_every": 2,
            "overlap_steps": 1,
            "fragments": [["*"]],
            **choices,
        }
        groups = SimulatedGroups([nn.Linear(numel, 1) for _ in range(3)], **settings)
        engine = groups.engines[0]
        sent = [0]
        for _ in range(35):
            groups.step()
            sent.append(engine.topology.control.bytes_sent)
        landed = [step for step in range(1, 36) if sent[step] - sent[step - 1] >= 2 * CONTROL_BYTES]
        return [step - 1 for step in landed], int(engine.report()["bytes_sent"])

    rounds = list(range(2, 35, 2))
    for exchange in ("gather", "two_shot"):
        short = ahead(65_534, exchange=exchange)
        long = ahead(65_535, exchange=exchange)
        assert (short[0], long[0]) == (rounds[::7], rounds)
        assert 0 <= long[1] - short[1] <= 2 * 8 * len(rounds)
    assert ahead(60, exchange="gather", compression=ByLink())[0] == rounds


def test_the_second_roundings_error_joins_the_next_mean_and_random_picks_lose_none() -> None:
    for compression in FAMILY:
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
        assert errors[-1] < 0.9 * errors[0] or errors[0] == 0, compression
    mean = torch.tensor([1.0, 0.9, 0.3, -0.2])
    whole, half = (
        TwoShotAllReduce(2, TopK(0.5, Float32()), mixing).second_hop(mean, None)
        for mixing in (0.0, 0.5)
    )
    assert whole.residual.tolist() == pytest.approx([0.0, 0.0, 0.3, -0.2])
    assert half.residual.tolist() == pytest.approx([0.0, 0.0, 0.15, -0.1])
    # Of a padded part, what is remembered is what was not sent of it.
    for exchange in ("two_shot", "gather"):
        all_reduce = all_reduce_for(exchange, 3, ErrorFeedback(FP4()), 0.0)
        gradient = torch.randn(1000)
        encoded = all_reduce.encode(gradient, None)
        assert encoded.memory is not None
        sent = all_reduce.decode_own(encoded.payloads, gradient)
        torch.testing.assert_close(sent + encoded.memory, gradient, rtol=0, atol=1e-6)
    # Values that chance picks lose nothing.
    gradients = [
        torch.randn(1001, generator=torch.Generator().manual_seed(group)) for group in range(4)
    ]
    shots = TwoShotAllReduce(4, RandomK(8, Float32()).at(100), 0.0)
    count = Count(dict.fromkeys(range(4), 1.0))
    mean = shots.reduce_locally(gradients, [None] * 4, [None] * 4, count)
    picked = mean != 0
    assert 100 < picked.sum() < 150
    assert torch.equal(mean[picked], (sum(gradients, torch.zeros(1001)) / 4)[picked])


def test_values_that_a_group_did_not_send_arrive_later_in_two_shots_as_well() -> None:
    """From the memory of a group that trained on; and of one that does not count, what the second
    rounding lost.
    """
    top = TopK(0.5, Float32())
    cases: list[tuple[Compression, float, list[list[float]], Any, list[list[float]]]] = [
        # Groups move once. What they have not sent goes exactly there, whatever the local
        # parameters keep of it.
        (ErrorFeedback(top), 0, [[8, 7, 2, 1]] * 3, (), [[8, 7, 0, 0]] + [[8, 7, 2, 1]] * 3),
        (ErrorFeedback(top), 0.5, [[8, 7, 2, 1]] * 3, (), [[8, 7, 0, 0]] + [[8, 7, 2, 1]] * 3),
        (top, 0, [[8, 7, 2, 1]] * 3, (), [[8, 7, 0, 0]] * 4),
        # Two values of each part come from a group, which loses nothing. Their mean has four, of
        # which two go at once.
        (
            top,
            0,
            [[8, 7, 0, 0], [0, 0, 2, 1], [0, 0, 0, 0]],
            [2],
            [[4, 3.5, 0, 0], [4, 3.5, 1, 0.5]],
        ),
    ]
    for compression, mixing, progress, idle, expected in cases:
        models = [nn.Linear(12, 1, bias=False) for _ in range(3)]
        nn.init.zeros_(models[0].weight)
        choices: dict[str, Any] = {
            "outer_lr": 1.0,
            "outer_momentum": 0.0,
            "mixing": mixing,
            "exchange": "two_shot",
        }
        run = SimulatedGroups(
            models, sync_every=1, overlap_steps=0, compression=compression, **choices
        )
        for model, own in zip(models, progress, strict=True):
            model.weight.data += torch.tensor(own * 3)
        for values in expected:
            run.step(idle=idle)
            assert run.outer_state_dict()["weight"].tolist() == [values * 3], compression


def bisected(links: list[float]) -> float:
    """The least time in which shares that add up to 1 are allowed, found without the closed
    form.
    """
    groups = len(links)
    low = 1 / min(links)
    high = 10 * len(links) / min(links)
    for _ in range(100):
        middle = (low + high) / 2
        shares = sum(max(0.0, (link * middle - 1) / (groups - 2)) for link in links)
        low, high = (low, middle) if shares >= 1 else (middle, high)
    return high


def test_shares_by_bandwidth_minimise_the_time_of_rounds_bound_by_links() -> None:
    unequal = [1, 1, 1, 0.5]
    for links in (
        unequal,
        [1, 2, 3],
        [5, 1, 1, 1, 1],
        [1, 1, 0.9, 1.1],
        [10, 1, 2, 7, 3, 3, 0.7, 1],
    ):
        shares = TwoShot(links=links).shares(len(links))
        assert shares is not None
        assert sum(shares) == pytest.approx(1)
        busy = max(
            (1 + (len(links) - 2) * share) / link for link, share in zip(links, shares, strict=True)
        )
        assert busy == pytest.approx(bisected(links))

    def ends(exchange: Any, rates: list[float], one_link: bool = False) -> float:
        settings = Settings(sync_every=10, overlap_steps=9, exchange=exchange)
        method = Streaming(
            Model.of_size(24_000_000, layers=12), settings, Hosts(step_time=1e-3, groups=4)
        )
        links = [Link(rate / 100) for rate in rates]
        steps = play(method, links[0], 400, [1.0] * 4, links=() if one_link else links)[0].steps
        return steps[-1] - steps[199]

    assert ends("two_shot", unequal) / ends(
        TwoShot("by_bandwidth", unequal), unequal
    ) == pytest.approx(1.5, rel=1e-2)
    assert ends("two_shot", [1.0] * 4) == pytest.approx(
        ends("two_shot", [1.0] * 4, one_link=True), rel=0.02
    )


def test_more_than_two_groups_default_to_two_shots_and_checkpoints_keep_theirs() -> None:
    """An unknown exchange is refused."""
    # Where values are left out, more groups gather too.
    for compression in FAMILY:
        ways = [type(all_reduce_for("auto", groups, compression, 0.5)) for groups in (1, 2, 3, 8)]
        more = AllReduce if "TopK" in str(compression) else TwoShotAllReduce
        assert ways == [AllReduce, AllReduce, more, more], compression
    uneven = TwoShot((0.7, 0.3, 0))
    senders = TopK(0.1, Float32(), over="senders")
    unknown = r"=.* is unknown. It is one of 'auto', 'gather', 'two_shot'"
    refused: list[tuple[Callable[[], Any], str]] = [
        *(
            (partial(Settings, exchange=one), unknown)
            for one in ("all_reduce", "two-shot", None, True, 2)
        ),
        (lambda: TwoShot("fast"), "is unknown"),
        (lambda: TwoShot([1, -1]), "not negative"),
        (lambda: TwoShot(links=[1, 0]), "positive numbers"),
        (lambda: TwoShot([0.5, 0.5], links=[1, 1]), "does not use it"),
        (
            lambda: TwoShot([0.5, 0.6]),
            r"add up to 1.1: .* must add up to 1. Give \[0.455, 0.545\] for parts",
        ),
        (lambda: TwoShot([0.3, 0.3, 0.3]), r"add up to 0.9: .* Give \[0.333, 0.333, 0.333\]"),
        (lambda: TwoShot([2, 1, 1]), r"add up to 4: .* Give \[0.5, 0.25, 0.25\]"),
        (lambda: Groups(3, exchange=TwoShot(), **CHOICES), "only a Trainer measures them"),
        (
            lambda: Groups(3, exchange=TwoShot(links=[1, 1]), **CHOICES),
            "2 numbers for 3 worker groups",
        ),
        (lambda: Settings(exchange=uneven, compression=senders), "over='senders'"),
    ]
    assert TwoShot([0.33, 0.33, 0.33]).shares(3) is None, "they are rounded"
    for make, says in refused:
        with pytest.raises(ValueError, match=says):
            make()
    for exchange in (
        TwoShot().over([0.98, 1, 0.4999]),
        uneven,
        TwoShot((0.5, 0.5), backend="nccl"),
    ):
        assert TwoShot.read(as_data(exchange), exchange.backend) == exchange
    assert TwoShot.read("gather", "nccl") == "gather:nccl"
    assert TwoShot().over([0.98, 1, 0.4999]).links == (1, 1, 0.5)


def in_stages(*stages: Callable[[], Any]) -> Work[Any]:
    """Work that does one thing after the other, and has what the last one returns."""
    for stage in stages[:-1]:
        stage()
        yield
    return stages[-1]()


def test_stages_of_overlapping_flights_keep_launch_order_and_a_failed_one_ends_alone() -> None:
    before = threading.active_count()
    background = ThreadBackground(torch.device("cpu"))
    second_was_sent = threading.Event()
    order = []

    def wait() -> None:
        assert second_was_sent.wait(10)

    def fail() -> None:
        raise ExchangeError("gone")

    def stage(name: str, number: int) -> Any:
        return lambda: order.append((name, number))

    first = background.start(in_stages(lambda: None, wait, lambda: 1))
    second = background.start(in_stages(second_was_sent.set, lambda: None, lambda: 2))
    failed = background.start(in_stages(lambda: None, fail, stage("never", 0)))
    flights = [
        background.start(in_stages(*(stage(name, number) for name in "abc")))
        for number in range(50)
    ]
    assert (first.result(), second.result()) == (1, 2)
    with pytest.raises(ExchangeError, match="gone"):
        failed.result()
    flights[-1].result()
    assert {name: [number for own, number in order if own == name] for name, _ in order} == {
        name: list(range(50)) for name in "abc"
    }
    # Its threads end with it.
    assert threading.active_count() == before + 3
    del background, first, second, failed, flights
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before

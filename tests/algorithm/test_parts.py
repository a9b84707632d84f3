"""Two shots in parts that suit the links: the closed form, the same bits, and what is refused."""

from typing import Any

import pytest

from lightning_sdiloco import StreamingDiLoCo, TwoShot
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import COMPRESSIONS, FP4, ErrorFeedback, Float32, TopK
from lightning_sdiloco.planning import Groups, Link, Model, Streaming, play
from tests.algorithm.test_reduction import CHOICES, simulated, trained
from tests.ranks import run_ranks
from tests.training import mlp

UNEVEN = TwoShot((0.7, 0.3, 0))


def bisected(links: list[float]) -> float:
    """The least time in which shares that add up to 1 are allowed, found without the closed form."""
    groups, low, high = len(links), 1 / min(links), 10 * len(links) / min(links)
    for _ in range(100):
        middle = (low + high) / 2
        shares = sum(max(0.0, (link * middle - 1) / (groups - 2)) for link in links)
        low, high = (low, middle) if shares >= 1 else (middle, high)
    return high


@pytest.mark.parametrize(
    "links", [[1, 1, 1, 0.5], [1, 2, 3], [5, 1, 1, 1, 1], [1, 1, 0.9, 1.1], [10, 1, 2, 7, 3, 3, 0.7, 1]], ids=str
)
def test_the_shares_take_the_least_time(links: list[float]) -> None:
    shares = TwoShot(links=links).shares(len(links))
    assert shares is not None
    assert sum(shares) == pytest.approx(1)
    busy = max((1 + (len(links) - 2) * share) / link for link, share in zip(links, shares, strict=True))
    assert busy == pytest.approx(bisected(links))


@pytest.mark.parametrize(("exchange", "compression"), [(TwoShot("by_bandwidth", [3, 3, 3]), "fp4"), (UNEVEN, "fp32")])
def test_equal_links_and_exact_values_give_the_bits_of_equal_parts(exchange: TwoShot, compression: str) -> None:
    bits = [simulated(3, 18, exchange=one, compression=compression)[1] for one in ("two_shot", exchange)]
    assert bits[0] == bits[1]


@pytest.mark.parametrize("compression", ["fp32", "ef_fp4"])
def test_processes_with_uneven_parts_get_the_bits_of_the_simulation(compression: str) -> None:
    chosen: dict[str, Any] = {"compression": ErrorFeedback(FP4()) if compression == "ef_fp4" else compression}

    def run(rank: int, world_size: int) -> Any:
        model = mlp()
        engine = StreamingDiLoCo(model, exchange=UNEVEN, **CHOICES, **chosen)
        bits = trained(engine, model, rank, 18)
        return bits, engine.report()["bytes_sent"]

    ranks = run_ranks(run, 3)
    assert [bits for bits, _ in ranks] == [simulated(3, 18, exchange=UNEVEN, **chosen)[1]] * 3
    # The group that averages nothing sends one payload, the others more.
    sent = [nbytes for _, nbytes in ranks]
    assert sent[2] < sent[1] < sent[0]


@pytest.mark.parametrize("name", [name for name, one in COMPRESSIONS.items() if not one.varies()])
def test_every_compression_bears_parts_of_any_size(name: str) -> None:
    run, _ = simulated(3, 12, exchange=UNEVEN, compression=name)
    assert run.engines[0].report()["landings"] > 0


def test_on_unequal_links_rounds_that_the_links_hold_up_are_shorter_by_the_closed_form() -> None:
    links = [Link(one / 100) for one in (1, 1, 1, 0.5)]
    exchanges = ("two_shot", TwoShot("by_bandwidth", [1, 1, 1, 0.5]))
    ends = []
    for exchange in exchanges:
        settings = Settings(sync_every=10, overlap_steps=9, exchange=exchange)
        method = Streaming(Model.of_size(24_000_000, layers=12), settings, Groups(step_time=1e-3, groups=4))
        steps = play(method, links[0], 400, [1.0] * 4, links=links)[0].steps
        ends.append(steps[-1] - steps[199])
    assert ends[0] / ends[1] == pytest.approx(1.5, rel=1e-2)


def test_like_links_take_as_long_as_one_link_for_all() -> None:
    settings = Settings(sync_every=10, overlap_steps=5, exchange="two_shot", compression="fp4")
    method = Streaming(Model.of_size(24_000_000, layers=12), settings, Groups(step_time=0.1, groups=4))
    link = Link(0.05, round_trip=0.01)
    one, each = (play(method, link, 100, [1.0] * 4, links=links)[0].steps[-1] for links in ((), [link] * 4))
    assert each == pytest.approx(one, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"parts": "fast"}, "is not known"),
        ({"parts": [1, -1]}, "not negative"),
        ({"links": [1, 0]}, "positive numbers"),
        ({"parts": [1, 1], "links": [1, 1]}, "does not ask for them"),
    ],
    ids=str,
)
def test_what_is_no_part_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TwoShot(**arguments)


def test_links_that_nobody_measures_and_another_number_of_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="only a Trainer measures them"):
        simulated(3, 1, exchange=TwoShot())
    with pytest.raises(ValueError, match="2 numbers for 3 worker groups"):
        simulated(3, 1, exchange=TwoShot(links=[1, 1]))
    with pytest.raises(ValueError, match="over='senders'"):
        Settings(exchange=UNEVEN, compression=TopK(0.1, Float32(), over="senders"))


def test_a_checkpoint_tells_which_parts_it_had() -> None:
    for exchange in (TwoShot().over([0.98, 1, 0.4999]), UNEVEN, TwoShot((1, 1), backend="nccl")):
        assert TwoShot.read(repr(exchange), exchange.backend) == exchange
    assert TwoShot.read("'gather'", "nccl") == "gather:nccl"
    assert TwoShot().over([0.98, 1, 0.4999]).links == (1, 1, 0.5)

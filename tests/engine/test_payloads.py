"""Payloads between groups: each sender's codes and lengths, weighed by our count and by the counter
of the interface.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.reduce import all_reduce_for
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES, Count
from lightning_sdiloco.comm.exchange import _carried, _packed, _unpacked
from lightning_sdiloco.compression import (
    COMPRESSIONS,
    ByLink,
    Compression,
    ErrorFeedback,
    Int2,
    Int8,
    State,
    resolve,
)
from lightning_sdiloco.compression.casts import Float32
from lightning_sdiloco.compression.sparse import RandomK, Threshold, TopK
from lightning_sdiloco.engine import flight
from lightning_sdiloco.engine.turns import turns_of
from tests import fits
from tests.engine.groups import Groups, outer_state, with_links, with_statistics
from tests.engine.test_every_way import LINKS, MENU
from tests.federation.sites import agree, equal, founded, train
from tests.namespaces import bytes_on_the_wire, enter, retransmitted, two_sites
from tests.ranks import run_processes, run_ranks
from tests.training import mlp


def payload_of(compression: Any, gradient: Tensor, groups: int = 3) -> Any:
    return all_reduce_for("gather", groups, compression, 0.0).encode(gradient, None).payloads[0]


def mean_of(gradients: list[Tensor], factors: dict[int, float], codes: list[Any]) -> Tensor:
    groups = len(gradients)
    pairs = zip(codes, gradients, strict=True)
    payloads = [payload_of(code, gradient, groups) for code, gradient in pairs]
    reduction = all_reduce_for("gather", groups, codes[0], 0.0)
    return reduction.mean(payloads, Count(factors), like=gradients[0])


def decoded(code: Compression, payload: Any, numel: int) -> Tensor:
    values = torch.empty(numel)
    code.decode(payload, values)
    return values


def test_the_first_code_that_arrives_in_time_is_chosen() -> None:
    by_overlap = resolve(ByLink(MENU))
    by_seconds = resolve(ByLink(MENU, within=2.0))
    for number, name in enumerate(MENU):
        size = 8 + resolve(name).wire_bytes(9000)
        assert by_overlap.choice(9000, bytes_per_s=size / 4, overlap_s=4.0) == number
        assert by_overlap.choice(9000, size / 4 * 0.99, 4.0) == min(number + 1, 2)
        assert by_seconds.choice(9000, size / 2, 0.0) == number
    assert by_overlap.choice(9000, 0.0, 4.0) == by_overlap.choice(9000, 1.0, float("nan")) == 0


def test_the_rate_that_receivers_report_is_that_of_the_senders_link() -> None:
    """All receivers share the sender's link, and one may have a slow one itself."""
    assert _unpacked(_packed(123_456_789_012, 5.0)) == (123_456_789_012, 1000.0)
    assert _unpacked(_packed(7, 0.0)) == (7, 0.0)
    assert _carried([0.0, 4e6, 4e6, 4e6]) == _carried([0.0, 6e6, 6e6, 1e3]) == 4e6
    assert _carried([0.0, 0.0]) == 0.0


def test_the_mean_over_several_codes_is_that_of_plain_loops() -> None:
    by_link = resolve(ByLink(MENU))
    numel = 9001
    gradients = []
    total = torch.zeros(numel)
    factors = {0: 0.5, 1: 1.25, 2: 1.25}
    for group, name in enumerate(MENU):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(group))
        code = resolve(name)
        total += decoded(code, code.encode(gradient), numel) * factors[group]
        payload = payload_of(by_link.at(0, group), gradient)
        assert len(payload) == 8 + code.wire_bytes(numel)
        gradients.append(gradient)
    codes = [by_link.at(0, group) for group in range(3)]
    assert torch.equal(mean_of(gradients, factors, codes), total / 3)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_unsent_values_wait_whichever_code_is_sent_next(mixing: float) -> None:
    codes = [
        Int8(),
        ErrorFeedback(Int2()),
        ErrorFeedback(TopK(1 / 16, Float32())),
    ]
    by_link = resolve(ByLink(codes))
    reductions = [all_reduce_for("gather", 1, by_link.at(0, choice), mixing) for choice in range(3)]
    outer = local = sent = moved = torch.zeros(5000)
    generator = torch.Generator().manual_seed(0)
    memory = None
    for choice in (2, 0, 1, 1, 0, 2, 0, 0):
        move = torch.randn(5000, generator=generator)
        local = local - move
        moved = moved + move
        encoded = reductions[choice].encode(outer - local, memory)
        memory = encoded.memory
        received = decoded(codes[choice], encoded.payloads[0][8:], 5000)
        sent = sent + received
        outer = outer - received
        local = mixing * local + (1 - mixing) * outer
        assert memory is not None
        torch.testing.assert_close(sent + (outer - local) + memory, moved, atol=2e-5, rtol=0)
    # A group that never sends in a code with a memory has none.
    assert reductions[0].encode(local, None).memory is None


def test_each_site_sends_in_its_own_code_through_the_hub() -> None:
    compression = ByLink(MENU, within=3.0)
    choices = {"sync_every": 8, "overlap_steps": 2, "compression": compression}
    sites = founded(3, **choices)
    with_links([site.engine for site in sites], LINKS)
    train(sites, 21)
    assert agree(sites)
    run = Groups(3, links=LINKS, fragments="strided:1", **choices)
    run.until(21)
    simulated_outer = [fragment["outer"] for fragment in outer_state(run.engines[0])]
    assert equal(sites[0].outer(), simulated_outer)
    numel = sum(parameter.numel() for parameter in mlp()[0].parameters())
    record = next(record for record in sites[0].hub.records() if record.fragment == 0)
    sizes = [contribution.payloads[0].size for contribution in record.counted]
    assert sizes == [8 + resolve(name).wire_bytes(numel) for name in MENU]


def signed_rows(groups: int, numel: int, generator: torch.Generator) -> list[Tensor]:
    """Small whole numbers, whose sums are exact, and no two of a group have one magnitude."""
    rows = [torch.randperm(numel, generator=generator) + 1.0 for _ in range(groups)]
    shape = (numel,)
    return [row * (torch.randint(0, 2, shape, generator=generator) * 2 - 1) for row in rows]


def mean_over_senders(rows: list[Tensor], factors: dict[int, float], sent: int) -> Tensor:
    """The mean of each place over the groups that send it: those among whose largest values it
    is.
    """
    numel = len(rows[0])
    means = []
    for place in range(numel):
        total = 0.0
        senders = 0
        for group, factor in factors.items():
            value = float(rows[group][place])
            if abs(value) > numel - sent:
                total += factor * value
                senders += 1
        means.append(total / max(senders, 1))
    return torch.tensor(means)


@pytest.mark.parametrize("seed", range(60))
def test_the_mean_over_senders_is_that_of_plain_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = 1 + seed % 5
    numel = 1 + 7 * seed % 60
    quarters = 1 + seed % 4
    rows = signed_rows(groups, numel, generator)
    numbers = [seed + group for group in range(groups)]
    factors = {group: 0.25 * 2**n % 5 for group, n in enumerate(numbers) if n % 4}
    sent = -(-quarters * numel // 4)
    sent_in_pairs = min(sent + sent % 2, numel)
    code = TopK(quarters / 4, Float32(), over="senders")
    expected = mean_over_senders(rows, factors, sent_in_pairs)
    assert torch.equal(mean_of(rows, factors, [code] * groups), expected)


@pytest.mark.parametrize("wrap", [lambda code: code, lambda code: RandomK(4, code)])
def test_both_means_have_the_same_bits_where_all_groups_send_all_values(wrap: Any) -> None:
    rows = list(torch.randn(3, 5001))
    factors = {0: 0.7, 1: 1.1, 2: 1.2}
    over_groups = wrap(TopK(1.0, Float32(), over="groups"))
    over_senders = wrap(TopK(1.0, Float32(), over="senders"))
    expected = mean_of(rows, factors, [over_groups] * 3)
    assert torch.equal(mean_of(rows, factors, [over_senders] * 3), expected)


def test_bytes_fall_while_groups_move_little_and_those_told_are_those_sent() -> None:
    threshold = Threshold(1 / 8, Float32(), every=4)
    models = [nn.Linear(100, 90, bias=False) for _ in range(2)]
    choices = {"fragments": [["*"]], "compression": threshold, "outer_lr": 0.0}
    groups = SimulatedGroups(models, sync_every=1, overlap_steps=0, **choices)
    moves = torch.randn(90, 100, generator=torch.Generator().manual_seed(0))
    reported = []
    state = State()
    for scale in (1.0, 1.0, 0.5, 0.1, 0.1):
        before = models[0].weight.detach().clone()
        for model in models:
            model.weight.data += scale * moves
        gradient = (before - models[0].weight.data).flatten()
        (landing,) = groups.step()[0]
        reported.append(landing.bytes_sent)
        for model in models:
            model.load_state_dict(groups.outer_state_dict())
        payload, state = threshold.encode_launch(gradient, state, mixing=0.0)
        # Eight bytes of each message tell how long it is.
        assert landing.bytes_sent == CONTROL_BYTES + 8 + len(payload)
    largest = CONTROL_BYTES + 8 + threshold.wire_bytes(9000)
    assert [reported[0], reported[1], reported[4]] == [largest] * 3
    assert reported[3] == CONTROL_BYTES + 8 + 2 * 3 < reported[2] < reported[1] / 4
    groups.finish()


WIDTH = 600
STEPS = 16
CHOICES = {"sync_every": 6, "overlap_steps": 2}
NUMELS = [WIDTH * WIDTH + WIDTH, 6 * WIDTH + 3 * WIDTH + 3]  # nearly all in one of two fragments


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))


def held_numels(engine: StreamingDiLoCo) -> list[int]:
    """The values that a rank holds of the outer parameters, and of each part of the outer state."""
    by_fragment = []
    for fragment in outer_state(engine):
        tensors = [fragment["outer"], *fragment["state"].values()]
        by_fragment.append([tensor.numel() for tensor in tensors])
    return [sum(numels) for numels in zip(*by_fragment, strict=True)]


def assert_shares(rank: int, world_size: int) -> None:
    shards = world_size // 2
    for name, codec in COMPRESSIONS.items():
        if codec.traits.varies:
            continue
        choices = {**CHOICES, "fragments": [["1.*"], ["0.*", "2.*"]], "compression": name}
        engine = StreamingDiLoCo(net(rank), worker_groups=2, **choices)
        for _ in range(STEPS):
            engine.step()
        numels = held_numels(engine)
        next(turns_of(engine.finish))  # lands what is in flight
        # Either fragment launches twice: after steps 6 and 12, and after 9 and 15.
        sizes = [CONTROL_BYTES + codec.wire_bytes(-(-numel // shards)) for numel in NUMELS]
        assert engine.report()["bytes_sent"] == 2 * sum(sizes), name
        for numel in numels:
            assert abs(numel - sum(NUMELS) / shards) <= 2, name
        engine.close()


def test_every_rank_sends_and_holds_its_share_of_fragments_and_outer_state() -> None:
    run_ranks(assert_shares, 2)
    run_ranks(assert_shares, 4)


class Counters(NamedTuple):
    """Bytes that the interface of a site has received and sent."""

    received: int
    sent: int


class Measured(NamedTuple):
    """A fit, and the counters of its interface after every step."""

    bytes_sent: int
    counters: list[Counters]
    is_retransmitted: bool


def measured(rank: int, world_size: int, sites: list[str], choices: dict[str, Any]) -> Measured:
    """Fits in the site of this rank's group."""
    enter(sites[2 * rank // world_size])
    counters = []

    def end_start(self: Any) -> None:
        self.trainer.strategy.barrier()  # no byte of the start is on its way then

    def count(self: Any, *arguments: Any) -> None:
        counters.append(Counters(*bytes_on_the_wire()))

    def counting(distribution: str, inner: str, seed: int) -> Any:
        hooks = {"on_train_start": end_start, "on_train_batch_end": count}
        return fits.module(distribution, inner, seed, net(seed), **hooks)

    trained = fits.fit(rank, world_size, 2, STEPS, choices, make=counting)
    return Measured(trained["report"]["bytes_sent"], counters, bool(retransmitted()))


def measured_without_retransmission(world_size: int, choices: dict[str, Any]) -> list[Measured]:
    """Measures again where TCP sent bytes twice: they are on the counter, and are none of ours."""
    for _ in range(5):
        with two_sites() as sites:
            ranks = run_processes(measured, world_size, sites, choices)
        if not any(rank.is_retransmitted for rank in ranks):
            return ranks
    pytest.skip(
        "TCP retransmitted in five measurements out of five: the machine is too busy to weigh bytes"
    )


def busy_steps(counters: list[Counters]) -> list[int]:
    """The steps in which more than 1,000 bytes were sent."""
    pairs = zip(counters, counters[1:], strict=False)
    sent_in_step = enumerate((after.sent - before.sent for before, after in pairs), start=2)
    return [step for step, count in sent_in_step if count > 1_000]


@pytest.mark.network
@pytest.mark.parametrize(("world_size", "compression"), [(2, "fp32"), (4, "fp4")])
def test_the_counter_of_the_interface_agrees_and_no_byte_crosses_between_launches(
    world_size: int, compression: str
) -> None:
    """With two ranks in a group not even those of DistributedDataParallel."""
    fragments = [["*.1.*"], ["*.0.*", "*.2.*"]]
    changed = {"compression": compression, "overlap_steps": 0, "fragments": fragments}
    ranks = measured_without_retransmission(world_size, {**CHOICES, **changed})
    ours = sum(rank.bytes_sent for rank in ranks[: world_size // 2])
    counters = ranks[0].counters
    # From the end of the first step, when nothing has been launched, to that of the last.
    received = counters[-1].received - counters[0].received
    sent = counters[-1].sent - counters[0].sent
    assert sent == pytest.approx(ours, rel=0.02)
    assert received == pytest.approx(ours, rel=0.02)
    # A header with options of TCP is no payload, and nor is the end of the groups' data, which
    # follows the last batch. With the last step comes the last mean.
    assert busy_steps(counters) == [6, 9, 12, 15, STEPS], counters


def two_seconds_on_link(
    posted: float, began: float, launched: float, ended: float, encoding: float
) -> float:
    """For payloads; buffers that follow them are posted by the flight that waits for them, and have
    mostly arrived when the wait begins.
    """
    return math.nan if posted == launched else 2.0


@pytest.mark.parametrize("model", [mlp, with_statistics])
def test_buffers_that_follow_the_payload_do_not_hide_how_fast_it_came(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "on_link", two_seconds_on_link)
    choices = {"fragments": 1, "compression": "fp32"}
    run = Groups(net=model, inner="sgd", sync_every=4, overlap_steps=1, **choices)
    (landing,) = run.until(5)
    numel = sum(parameter.numel() for parameter in run.models[0].parameters())
    carried_bytes = landing.link_gbit_s * 1e9 / 8 * 2.0
    assert carried_bytes - 4 * numel == pytest.approx(CONTROL_BYTES, abs=0.01)

"""Each sender chooses its code by its own link: what is sent, what waits, and that all groups hold the same bits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm import CONTROL_BYTES, Count, all_reduce_for
from lightning_sdiloco.comm import Topology
from lightning_sdiloco.comm.exchange import LENGTH_BYTES, _carried, _packed, _unpacked
from lightning_sdiloco.compression import (
    ByLink,
    Compression,
    ErrorFeedback,
    Float32,
    Int2,
    Int8,
    Threshold,
    TopK,
    resolve,
)
from lightning_sdiloco.engine import StepClock
from tests.engine.groups import Groups, after_landings, outer_state, unlike
from tests.engine.sites import agree, equal, founded, train
from tests.ranks import run_ranks
from tests.training import LAYERS, mlp

CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 3, "fragments": LAYERS}
MENU = ("fp4", "int2", "sparse")
RATES = [1e9, 11.0, 1.0]
"""Bytes per second: in 3 seconds enough for the first code, for the second of the first layer, and for none."""


def with_links(engines: Sequence[StreamingDiLoCo], rates: Sequence[float] = RATES) -> None:
    """Tells every group how fast its link is, and that an inner step takes a second."""
    for engine, rate in zip(engines, rates, strict=True):
        engine.link.fixed, engine.rounds.step_clock = rate, StepClock(1.0)


def numels() -> list[int]:
    return [sum(p.numel() for p in layer.parameters()) for layer in mlp() if isinstance(layer, nn.Linear)]


def linked(rates: Sequence[float], **choices: Any) -> Groups:
    run = Groups(len(rates), **{**CHOICES, "compression": ByLink(MENU), **choices})
    with_links(run.engines, rates)
    return run


def test_the_first_code_that_arrives_in_time_is_chosen() -> None:
    by_overlap, by_seconds = resolve(ByLink(MENU)), resolve(ByLink(MENU, within=2.0))
    sizes = [8 + resolve(name).wire_bytes(9000) for name in MENU]
    for number, size in enumerate(sizes):
        assert by_overlap.choice(9000, bytes_per_s=size / 4, overlap_s=4.0) == number
        assert by_overlap.choice(9000, size / 4 * 0.99, 4.0) == min(number + 1, 2)
        assert by_seconds.choice(9000, size / 2, 0.0) == number
    assert by_overlap.choice(9000, 0.0, 4.0) == by_overlap.choice(9000, 1.0, float("nan")) == 0


def test_the_mean_is_that_of_plain_loops_whatever_each_sends_in() -> None:
    rows = [torch.randn(9001, generator=torch.Generator().manual_seed(group)) for group in range(3)]
    by_link, factors = resolve(ByLink(MENU)), {0: 0.5, 1: 1.25, 2: 1.25}
    payloads = [
        all_reduce_for("gather", 3, by_link.chosen(g), 0.0).encode(row, None).payloads[0] for g, row in enumerate(rows)
    ]
    total = torch.zeros(9001)
    for group, (row, name) in enumerate(zip(rows, MENU, strict=True)):
        code, decoded = resolve(name), torch.empty(9001)
        code.decode(code.encode(row), decoded)
        total += decoded * factors[group]
        assert len(payloads[group]) == 8 + code.wire_bytes(9001)
    mean = all_reduce_for("gather", 3, by_link, 0.0).mean(payloads, Count(factors), like=rows[0])
    assert torch.equal(mean, total / 3)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_what_was_not_sent_waits_whatever_is_sent_in_next(mixing: float) -> None:
    codes: list[Compression] = [Int8(), ErrorFeedback(Int2()), ErrorFeedback(TopK(1 / 16, Float32()))]
    by_link, generator = resolve(ByLink(codes)), torch.Generator().manual_seed(0)
    outer, local, sent, moved = (torch.zeros(5000, dtype=torch.float32) for _ in range(4))
    memory: Tensor | None = None
    for choice in (2, 0, 1, 1, 0, 2, 0, 0):
        move = torch.randn(5000, generator=generator)
        local, moved = local - move, moved + move
        encoded = all_reduce_for("gather", 1, by_link.chosen(choice), mixing).encode(outer - local, memory)
        decoded, memory = torch.empty(5000), encoded.memory
        codes[choice].decode(encoded.payloads[0][8:], decoded)
        sent, outer = sent + decoded, outer - decoded
        local = mixing * local + (1 - mixing) * outer
        assert memory is not None
        torch.testing.assert_close(sent + (outer - local) + memory, moved, atol=2e-5, rtol=0)
    # Who never sends in a code with a memory has none.
    assert all_reduce_for("gather", 1, by_link.chosen(0), mixing).encode(local, None).memory is None


def test_a_slow_link_changes_the_bytes_of_its_own_group_alone_and_one_code_has_its_bits() -> None:
    fast, slow = linked([1e9] * 3), linked([1e9, 1e9, 1.0])
    for run in (fast, slow):
        run.after_landings(24)
    before, after = ([engine.report()["bytes_sent"] for engine in run.engines] for run in (fast, slow))
    assert before[:2] == after[:2]
    # Of 24 inner steps, the final exchange of all four layers is in float32, in two shots.
    launches = [numels()[p] for p in range(4) for step in range(8 + 2 * p, 25, 8)]
    parts = [4 * -(-numel // 3) for numel in numels()]
    exact = sum(2 * (CONTROL_BYTES + LENGTH_BYTES + part) + 2 * part for part in parts)
    short = sum(2 * (CONTROL_BYTES + LENGTH_BYTES + 8 + resolve("sparse").wire_bytes(numel)) for numel in launches)
    assert after[2] == short + exact < before[2]

    alone = Groups(2, **CHOICES, compression="sparse").after_landings(16)
    assert list(map(unlike, linked([5.0] * 2, compression=ByLink(["sparse"])).after_landings(16), alone)) == [[]] * 4


def test_processes_get_the_bits_of_the_simulator_and_tell_each_other_what_their_links_carry() -> None:
    def run(rank: int, world_size: int) -> tuple[Any, float, list[float]]:
        model = mlp()
        engine = StreamingDiLoCo(model, compression=ByLink(MENU), **CHOICES)
        with_links([engine], [RATES[rank]])
        return after_landings(engine, model, rank, 24, "adamw"), engine.report()["bytes_sent"], engine.link.last

    here = linked(RATES)
    expected = here.after_landings(24)
    for (seen, sent, told), engine in zip(run_ranks(run, 3), here.engines, strict=True):
        assert [unlike(*both) for both in zip(seen, expected, strict=True)] == [[]] * len(expected)
        assert sent == engine.report()["bytes_sent"]
        assert len(told) == 3
        assert min(told) > 0


def test_a_run_resumes_bit_for_bit_with_the_choice_of_what_is_in_flight() -> None:
    whole, again = linked([0.0, 0.0]), linked([0.0, 0.0])
    whole.engines[1].link.note(1.0)
    whole.until(18)
    assert whole.engines[0].in_flight
    saved = whole.saved()
    assert [flight["choice"] for flight in saved[1][1]["flights"]] == [2] * len(saved[1][1]["flights"])
    again.load(saved)
    for run in (whole, again):
        run.until(29)
    assert unlike(again.seen(), whole.seen()) == []


def test_each_site_sends_in_its_own_code_through_the_hub() -> None:
    choices: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2, "compression": ByLink(MENU, within=3.0)}
    sites = founded(3, **choices)
    with_links([site.engine for site in sites])
    train(sites, 21)
    assert agree(sites)
    run = linked(RATES, fragments="strided:1", **choices)
    run.until(21)
    assert equal(sites[0].outer(), [own["outer"] for own in outer_state(run.engines[0])])
    record = next(record for record in sites[0].hub.records() if record.fragment == 0)
    sizes = [8 + resolve(name).wire_bytes(numels()[0]) for name in MENU]
    assert [own.payloads[0].size for own in record.counted] == sizes


def test_what_receivers_tell_is_the_rate_of_the_senders_own_link() -> None:
    assert _unpacked(_packed(123_456_789_012, 5.0)) == (123_456_789_012, 1000.0)
    assert _unpacked(_packed(7, 0.0)) == (7, 0.0)
    # All receivers share the link of the sender, and one of them has a slow one itself.
    assert _carried([0.0, 4e6, 4e6, 4e6]) == 4e6
    assert _carried([0.0, 6e6, 6e6, 1e3]) == 4e6
    assert _carried([0.0, 0.0]) == 0.0


def test_what_cannot_be_is_refused_by_name() -> None:
    topology = Topology()
    topology.exchange.learns_sizes = False
    for words, refused in (
        (r"exchange='two_shot' was given with compression=ByLink.*differ in length", {"exchange": "two_shot"}),
        (r"compression='fp5' is not known", {"compression": ByLink(["fp5"])}),
        ("lengths that are not known beforehand", {"compression": ByLink(["fp4", "threshold"])}),
    ):
        with pytest.raises(ValueError, match=words):
            SimulatedGroups([mlp()] * 4, **{"compression": ByLink(), **refused})
    with pytest.raises(ValueError, match=r"exchange='\.\.\.:nccl'"):
        StreamingDiLoCo(mlp(), topology=replace(topology), compression=ByLink())
    for given in ({"menu": ()}, {"menu": "fp4"}, {"within": 0.0}, {"within": "launch"}):
        with pytest.raises(ValueError, match=rf"{next(iter(given))}="):
            ByLink(**given)
    with pytest.raises(ValueError, match="lengths that are not known beforehand"):
        ByLink([Threshold(1 / 16, Int2(), every=3)])

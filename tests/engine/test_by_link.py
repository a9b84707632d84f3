"""Each sender chooses its code by its own link: what is sent, what waits, and that all groups hold the same bits."""

import copy
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
from tests.algorithm.test_reduction import CHOICES, simulated, trained
from tests.engine.sites import agree, equal, founded, train
from tests.engine.test_agreement import bits
from tests.ranks import run_ranks
from tests.training import inner_optimizer, mlp, train_step

MENU = ("fp4", "int2", "sparse")
RATES = [1e9, 11.0, 1.0]
"""Bytes per second: in 3 seconds enough for the first code, for the second of the first layer, and for none."""


def with_links(engines: Sequence[StreamingDiLoCo], rates: Sequence[float] = RATES) -> None:
    """Tells every group how fast its link is, and that an inner step takes a second."""
    for engine, rate in zip(engines, rates, strict=True):
        engine.link.fixed, engine.step_clock = rate, StepClock(1.0)


def numels() -> list[int]:
    return [sum(p.numel() for p in layer.parameters()) for layer in mlp() if isinstance(layer, nn.Linear)]


def in_simulation(
    groups: int, steps: int, rates: Sequence[float], **choices: Any
) -> tuple[SimulatedGroups, list[dict[str, list[int]]]]:
    models = [mlp() for _ in range(groups)]
    run, seen = SimulatedGroups(models, **{**CHOICES, **choices}), []
    with_links(run.engines, rates)
    optimizers = [inner_optimizer("adamw", model) for model in models]
    for step in range(1, steps + 1):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, group, step)
        if run.step()[0]:
            seen.append(bits(run.outer_state_dict()))
    run.finish()
    return run, [*seen, bits(run.outer_state_dict())]


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
    assert torch.equal(
        all_reduce_for("gather", 3, by_link, 0.0).mean(payloads, Count(factors), like=rows[0]), total / 3
    )


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


def test_a_menu_of_one_code_gives_the_bits_of_that_code() -> None:
    alone = simulated(2, 16, compression="sparse")[1]
    assert in_simulation(2, 16, [5.0] * 2, compression=ByLink(["sparse"]))[1] == alone


def test_a_slow_link_changes_the_bytes_of_its_own_group_alone() -> None:
    fast, slow = (in_simulation(3, 24, [1e9, 1e9, rate], compression=ByLink(MENU))[0] for rate in (1e9, 1.0))
    before, after = ([engine.report()["bytes_sent"] for engine in run.engines] for run in (fast, slow))
    assert before[:2] == after[:2]
    # Of 24 inner steps, the final exchange of all four layers is in float32, in two shots.
    launches = [numels()[p] for p in range(4) for step in range(8 + 2 * p, 25, 8)]
    parts = [4 * -(-numel // 3) for numel in numels()]
    exact = sum(2 * (CONTROL_BYTES + LENGTH_BYTES + part) + 2 * part for part in parts)
    short = sum(2 * (CONTROL_BYTES + LENGTH_BYTES + 8 + resolve("sparse").wire_bytes(numel)) for numel in launches)
    assert after[2] == short + exact < before[2]


@pytest.mark.timeout(120)
def test_processes_get_the_bits_of_the_simulator_and_tell_each_other_what_their_links_carry() -> None:
    def run(rank: int, world_size: int) -> tuple[list[dict[str, list[int]]], float, list[float]]:
        model = mlp()
        engine = StreamingDiLoCo(model, compression=ByLink(MENU), **CHOICES)
        with_links([engine], [RATES[rank]])
        return trained(engine, model, rank, 24), engine.report()["bytes_sent"], engine.link.last

    here, seen = in_simulation(3, 24, RATES, compression=ByLink(MENU))
    ranks = run_ranks(run, 3)
    assert [one[:2] for one in ranks] == [(seen, engine.report()["bytes_sent"]) for engine in here.engines]
    assert all(len(told) == 3 and min(told) > 0 for *_, told in ranks)


def test_a_run_resumes_bit_for_bit_with_the_choice_of_what_is_in_flight() -> None:
    def begun() -> tuple[SimulatedGroups, list[nn.Sequential], list[torch.optim.Optimizer]]:
        models = [mlp() for _ in range(2)]
        run = SimulatedGroups(models, compression=ByLink(MENU), **CHOICES)
        with_links(run.engines, [0.0, 0.0])
        run.engines[1].link.note(1.0)
        return run, models, [inner_optimizer("sgd", model) for model in models]

    def go(run: SimulatedGroups, models: Any, optimizers: Any, steps: range) -> None:
        for step in steps:
            for group in range(2):
                train_step(models[group], optimizers[group], group, step)
            run.step()

    whole, models, optimizers = begun()
    go(whole, models, optimizers, range(1, 19))
    assert whole.engines[0].in_flight
    saved = copy.deepcopy([engine.state_dict() for engine in whole.engines])
    local = copy.deepcopy([model.state_dict() for model in models])
    assert [flight["choice"] for flight in saved[1]["flights"]] == [2] * len(saved[1]["flights"])
    go(whole, models, optimizers, range(19, 30))
    again, models, optimizers = begun()
    again.engines[1].link.last = []
    for engine, model, state, own in zip(again.engines, models, saved, local, strict=True):
        model.load_state_dict(own)
        engine.load_state_dict(state)
    go(again, models, optimizers, range(19, 30))
    assert bits(again.outer_state_dict()) == bits(whole.outer_state_dict())


def test_each_site_sends_in_its_own_code_through_the_hub() -> None:
    choices: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2, "compression": ByLink(MENU, within=3.0)}
    sites = founded(3, **choices)
    with_links([site.engine for site in sites])
    train(sites, 21)
    assert agree(sites)
    models = [mlp() for _ in range(3)]
    run = SimulatedGroups(models, fragments="strided:1", **choices)
    with_links(run.engines)
    optimizers = [inner_optimizer("adamw", model) for model in models]
    for step in range(1, 22):
        for group, model in enumerate(models):
            train_step(model, optimizers[group], group, step)
        run.step()
    assert equal(sites[0].outer(), [own.outer.values for own in run.engines[0].rounds.fragments])
    record = next(record for record in sites[0].hub.records() if record.fragment == 0)
    numel = numels()[0]
    assert [own.payloads[0].size for own in record.counted] == [8 + resolve(name).wire_bytes(numel) for name in MENU]


def test_what_receivers_tell_is_the_rate_of_the_senders_own_link() -> None:
    assert _unpacked(_packed(123_456_789_012, 5.0)) == (123_456_789_012, 1000.0)
    assert _unpacked(_packed(7, 0.0)) == (7, 0.0)
    # All receivers share the link of the sender, and one of them has a slow one itself.
    assert _carried([0.0, 4e6, 4e6, 4e6]) == 4e6
    assert _carried([0.0, 6e6, 6e6, 1e3]) == 4e6
    assert _carried([0.0, 0.0]) == 0.0


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"exchange='two_shot' was given with compression=ByLink.*differ in length"):
        SimulatedGroups([mlp()] * 4, compression=ByLink(), exchange="two_shot")
    topology = Topology()
    topology.exchange.learns_sizes = False
    with pytest.raises(ValueError, match=r"exchange='\.\.\.:nccl'"):
        StreamingDiLoCo(mlp(), topology=replace(topology), compression=ByLink())
    with pytest.raises(ValueError, match=r"compression='fp5' is not known"):
        SimulatedGroups([mlp()] * 2, compression=ByLink(["fp5"]))
    with pytest.raises(ValueError, match="lengths that are not known beforehand"):
        SimulatedGroups([mlp()] * 2, compression=ByLink(["fp4", "threshold"]))
    for given in ({"menu": ()}, {"menu": "fp4"}, {"within": 0.0}, {"within": "launch"}):
        with pytest.raises(ValueError, match=rf"{next(iter(given))}="):
            ByLink(**given)
    with pytest.raises(ValueError, match="lengths that are not known beforehand"):
        ByLink([Threshold(1 / 16, Int2(), every=3)])

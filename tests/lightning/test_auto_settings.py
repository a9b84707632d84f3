"""``"auto"``: what the planner chooses from measured numbers, the same in all ranks, saved and
taken up again.
"""

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_sdiloco import StreamingDiLoCoStrategy, TwoShot
from lightning_sdiloco.algorithm.config import Settings, recommended
from lightning_sdiloco.algorithm.reduce import kind_and_backend
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.lightning import options as auto_settings
from lightning_sdiloco.lightning.options import Measured, Options, choice, measure_link
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.planner import recommend
from lightning_sdiloco.planning.workload import Groups, Model
from tests.bits import same
from tests.fits import LIGHTNING, Announced, SomeBatches, at, fit, module, said_by, save, trainer
from tests.ranks import agreed, in_ranks
from tests.training import mlp

AUTO = {"sync_every": "auto", "overlap_steps": "auto", "fragments": "auto", "compression": "auto"}
# So slow that training cannot go on for every round: what is chosen is not the first candidate.
SLOW = Link(gbit_s=5e-6, round_trip=0.05)


def net() -> nn.Module:
    return nn.Sequential(*mlp(), nn.BatchNorm1d(3))


def told(trainer: Any, model: Any) -> dict[str, Any]:
    strategy = trainer.strategy
    settings = trainer.strategy.engine.settings
    return {
        "settings": {name: getattr(settings, name) for name in (*AUTO, "exchange")},
        "measured": strategy.measured,
        "sent": strategy.topology.exchange.bytes_sent if strategy.topology.num_groups > 1 else 0,
        "held": {name: values.clone() for name, values in model.state_dict().items()},
    }


def of_planner(measured: Measured, *candidates: Settings) -> dict[str, Any]:
    groups = Groups(measured.step_time, groups=2, memory_rate=1e10)
    own = recommend(
        Model.of_parameters(trainable(net())), groups, measured.link, *candidates
    ).settings
    return {name: getattr(own, name) for name in AUTO}


def chosen(link: Link, *names: str, **given: Any) -> dict[str, Any]:
    return choice(names, Settings(**given), net(), Topology.simulated(2)[0], Measured(0.05, link))


@in_ranks(2)
def test_all_ranks_take_the_planners_recommendation_for_the_measured_numbers(rank: int) -> None:
    trained = fit(
        rank,
        2,
        2,
        40,
        {**AUTO, "compression": "fp32"},
        inspect=told,
        make=partial(module, net=net()),
    )
    settings, measured, sent, _ = trained["inspected"].values()
    assert agreed([settings, measured])
    # All candidates with the compression that was given, which the first that suffices has too on a
    # fast link.
    assert {name: settings[name] for name in AUTO} == of_planner(measured)
    assert all(0 < seconds < 1 for seconds in (measured.step_time, measured.link.round_trip))
    assert measured.link.gbit_s > 0.01
    assert 2**16 <= sent <= 3 * 2**24, "messages tell enough, and take no longer than that needs"
    assert trained["report"]["landings"] > 0
    # One group has nothing to measure.
    alone = fit(rank, 2, 1, 40, AUTO, inspect=told)["inspected"]
    assert alone["measured"] is None
    assert alone["settings"]["sync_every"] == 30


def test_the_most_exact_compression_that_the_link_allows_is_chosen() -> None:
    """Given values are kept."""
    by_link = [chosen(Link(gbit_s), "compression")["compression"] for gbit_s in (10.0, 1e-5, 1e-6)]
    assert by_link == ["fp32", "bf16", "fp4"]
    given = {
        "sync_every": 60,
        "overlap_steps": 7,
        "fragments": "sequential:2",
        "compression": "bf16",
    }
    for name in AUTO:
        taken = chosen(SLOW, name, **given)
        assert set(taken) == {name}
        replace(Settings(**given), **taken)
        assert taken.get("overlap_steps", 0) < 60


@in_ranks(2)
def test_choices_for_a_slow_link_are_reported_resumed_and_equal_to_given_ones(
    rank: int, tmp_path: Path
) -> None:
    def run(choices: dict[str, Any], resume: Path | None = None, **more: Any) -> Any:
        torch.manual_seed(rank)
        given: dict[str, Any] = {
            "loader": Announced((rank, 0, 1), 200),
            "resume": resume,
            "trainer_choices": more,
        }
        return fit(
            rank,
            2,
            2,
            100,
            choices,
            LIGHTNING,
            "adamw",
            told,
            make=partial(module, net=net()),
            **given,
        )

    # Before the choice and after it.
    files = {step: tmp_path / f"{step}.ckpt" for step in (5, 40)}
    saving = [at({step: save(path) for step, path in files.items()})]
    auto_settings.measure_link = lambda topology, timeout: SLOW
    Options.step_time = lambda self: 0.05
    said = said_by("lightning_sdiloco")
    logger = CSVLogger(tmp_path, "", "")
    slow = chosen(SLOW, *AUTO)
    described = Model.of_parameters(trainable(net()))
    among = auto_settings.candidates_among(tuple(AUTO), Settings(), described)
    expected = of_planner(Measured(0.05, SLOW), among)
    assert slow == expected != chosen(Link(10.0), *AUTO)
    explicit, auto = (run(choices, callbacks=saving, logger=logger) for choices in (slow, AUTO))
    assert {name: auto["inspected"]["settings"][name] for name in AUTO} == slow
    assert auto["report"]["landings"] > 2
    assert explicit["inspected"]["measured"] is None
    assert same(auto["inspected"]["held"], explicit["inspected"]["held"])
    assert same(auto["outer"], explicit["outer"])
    untimed = {"exposed_wait_s": 0, "in_flight_s": 0}
    assert {**auto["report"], **untimed} == {**explicit["report"], **untimed}
    for step, path in files.items():
        # After the choice, another measurement would lead to another one.
        auto_settings.measure_link = lambda topology, timeout: SLOW if step == 5 else Link(100.0)  # noqa: B023
        resumed = run(AUTO, path)["inspected"]
        assert resumed["settings"] == auto["inspected"]["settings"]
        assert same(resumed["held"], auto["inspected"]["held"])
        assert (resumed["measured"] is None) == (step == 40)
    if rank == 0:
        told_of_it, _ = [text for text in said if "Chosen: " in text]
        chosen_so = "Chosen: sync_every={sync_every}, overlap_steps={overlap_steps}, fragments={fragments!r}"
        assert chosen_so.format(**slow) in told_of_it
        assert (
            "the measured inner step takes 0.05 s and the link carries 5 kbit/s with a round"
            " trip of 50 ms" in told_of_it
        )
        with (tmp_path / "metrics.csv").open() as file:
            row = next(row for row in csv.DictReader(file) if row["sdiloco/sync_every"])
        logged = [
            float(row[f"sdiloco/{name}"])
            for name in ("sync_every", "overlap_steps", "fragments", "measured_gbit_s")
        ]
        assert logged == [slow["sync_every"], slow["overlap_steps"], 2, 5e-6]


@in_ranks(2)
def test_fits_of_few_rounds_step_elementwise_and_fits_of_unknown_length_map_matrices(
    rank: int,
) -> None:
    def direction(**choices: Any) -> Any:
        strategy = StreamingDiLoCoStrategy(2, sync_every=4, overlap_steps=1)
        stop = LambdaCallback(
            on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", True)
        )
        runner = trainer(
            strategy=strategy, devices=2, callbacks=[stop], **{"max_steps": -1, **choices}
        )
        # The output of the last layer is as long as a vocabulary that the model embeds.
        net = mlp(0)
        net[0].register_module("tokens", nn.Embedding(len(net[-1].weight), 1))
        runner.fit(module(net=net), SomeBatches(rank, 2))
        return strategy.engine.settings.outer.direction

    assert direction(max_steps=19) == "elementwise"
    assert direction(max_steps=20) == "equalised"
    assert direction(max_epochs=-1) == "equalised"


@in_ranks(2)
def test_choices_in_a_checkpoint_are_adopted_and_forgotten_with_its_fit(
    rank: int, tmp_path: Path
) -> None:
    """By as many groups and by others; a fit after it chooses anew."""
    saved = {"outer_lr": 0.625, "outer_momentum": 0.5, "mixing": 0.375}
    of_two_rounds, of_four = (
        recommended(least=rounds, direction="elementwise")._asdict() for rounds in (2, 4)
    )
    path = tmp_path / "given.ckpt"

    def numbers(
        groups: int, *starts: Path | None, callbacks: Any = (), **choices: Any
    ) -> list[Any]:
        strategy = StreamingDiLoCoStrategy(groups, sync_every=4, overlap_steps=1, **choices)
        runner = trainer(strategy=strategy, devices=2, max_steps=0, callbacks=callbacks)
        model = module()
        seen = []
        for start in starts:
            runner.fit_loop.epoch_loop.max_steps += 8
            runner.fit(model, SomeBatches(rank, 20), ckpt_path=start)
            seen.append(strategy.engine.settings.numbers)
        return seen

    numbers(2, None, callbacks=[at({6: save(path)})], **saved)
    assert numbers(2, path, None) == numbers(1, path, None) == [saved, of_four]
    assert numbers(2, path, resume="restart") == [of_two_rounds]


@in_ranks(2)
def test_a_default_overlap_follows_the_interval_that_a_checkpoint_holds(
    rank: int, tmp_path: Path
) -> None:
    path = tmp_path / "short.ckpt"

    def schedule(sync_every: Any, start: Path | None = None, **choices: Any) -> Any:
        strategy = StreamingDiLoCoStrategy(2, sync_every=sync_every, **choices)
        runner = trainer(strategy=strategy, devices=2, max_steps=8, callbacks=[at({6: save(path)})])
        runner.fit(module(), SomeBatches(rank, 20), ckpt_path=start)
        return strategy.schedule

    assert schedule(4) == schedule("auto", path) == schedule(4, path, overlap_steps=3)


@in_ranks(3)
def test_links_are_measured_for_two_shots_whose_parts_suit_them(rank: int) -> None:
    def skewed(topology: Topology, timeout: float, to: int) -> Link:
        found = measure_link(topology, timeout, to)
        assert found.gbit_s > 0.001
        return replace(found, gbit_s=[2.0, 1.99, 1.0][to])

    auto_settings.measure_link = skewed
    choices = {"sync_every": 10, "overlap_steps": 2, "exchange": TwoShot(), "compression": "fp4"}
    trained = fit(rank, 3, 3, 14, choices, inspect=told)
    assert trained["inspected"]["settings"]["exchange"] == TwoShot(links=(2.0, 2.0, 1.0))
    assert agreed(trained["outer"])
    # Until they are measured, and from a checkpoint, they have the backend that was asked for.
    options = StreamingDiLoCoStrategy(
        3, **{**choices, "exchange": TwoShot(backend="nccl")}
    )._options
    assert kind_and_backend(options.settings.exchange) == ("two_shot", "nccl")
    options.restore({"exchange": repr(TwoShot(links=(2.0, 1.0))), "fragments": "'strided:3'"})
    assert options.settings.fragments == "strided:3", "what the default was when the run began"
    assert (options.settings.exchange, options.auto) == (
        TwoShot(links=(2.0, 1.0), backend="nccl"),
        (),
    )

"""``"auto"``: what the planner chooses from measured numbers, the same in all ranks, saved and
taken up again.
"""

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

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
from tests.fits import (
    LIGHTNING,
    Announced,
    SomeBatches,
    at,
    fit,
    module,
    on,
    said_by,
    save,
    trainer,
)
from tests.ranks import agreed, in_ranks
from tests.training import mlp

AUTO = {"sync_every": "auto", "overlap_steps": "auto", "fragments": "auto", "compression": "auto"}
# So slow that training cannot continue in every round: the first candidate is not chosen.
SLOW = Link(gbit_s=5e-6, round_trip=0.05)


def net() -> nn.Module:
    return nn.Sequential(*mlp(), nn.BatchNorm1d(3))


def with_net() -> Any:
    """Makes modules of a net, whose values depend on no rank."""
    return partial(module, net=net())


class Inspected(NamedTuple):
    """A strategy and its model after a fit."""

    settings: Settings
    measured: Measured | None
    sent_bytes: int
    state: dict[str, Tensor]

    @property
    def choices(self) -> dict[str, Any]:
        return {name: getattr(self.settings, name) for name in AUTO}


def inspect(trainer: Any, model: Any) -> Inspected:
    strategy = trainer.strategy
    topology = strategy.topology
    sent_bytes = 0
    if topology.num_groups > 1:
        sent_bytes = topology.exchange.bytes_sent
    state = {name: values.clone() for name, values in model.state_dict().items()}
    return Inspected(strategy.engine.rounds.settings, strategy.measured, sent_bytes, state)


def of_planner(measured: Measured, *candidates: Settings) -> dict[str, Any]:
    groups = Groups(measured.step_time, groups=2, memory_rate=1e10)
    model = Model.of_parameters(trainable(net()))
    settings = recommend(model, groups, measured.link, *candidates).settings
    return {name: getattr(settings, name) for name in AUTO}


def chosen(link: Link, *names: str, **choices: Any) -> dict[str, Any]:
    topology = Topology.simulated(2)[0]
    return choice(names, Settings(**choices), net(), topology, Measured(0.05, link))


@in_ranks(2)
def test_all_ranks_take_the_planners_recommendation_for_the_measured_numbers(rank: int) -> None:
    choices = {**AUTO, "compression": "fp32"}
    trained = fit(rank, 2, 2, 40, choices, inspect=inspect, make=with_net())
    inspected = trained["inspected"]
    measured = inspected.measured
    assert agreed([inspected.choices, inspected.settings.exchange, measured])
    # All candidates with the given compression, which the first that suffices on a fast link also
    # has.
    assert inspected.choices == of_planner(measured)
    assert 0 < measured.step_time < 1
    assert 0 < measured.link.round_trip < 1
    assert measured.link.gbit_s > 0.01
    # Messages are long enough to measure, and no longer than that needs.
    assert 2**16 <= inspected.sent_bytes <= 3 * 2**24
    assert trained["report"]["landings"] > 0
    # One group has nothing to measure.
    alone = fit(rank, 2, 1, 40, AUTO, inspect=inspect)["inspected"]
    assert alone.measured is None
    assert alone.settings.sync_every == 30


def test_the_most_exact_compression_that_the_link_allows_is_chosen() -> None:
    """Given values are kept."""
    by_link = [chosen(Link(gbit_s), "compression")["compression"] for gbit_s in (10.0, 1e-5, 1e-6)]
    assert by_link == ["fp32", "bf16", "fp4"]
    choices = {
        "sync_every": 60,
        "overlap_steps": 7,
        "fragments": "sequential:2",
        "compression": "bf16",
    }
    for name in AUTO:
        chosen_for_name = chosen(SLOW, name, **choices)
        assert set(chosen_for_name) == {name}
        replace(Settings(**choices), **chosen_for_name)
        assert chosen_for_name.get("overlap_steps", 0) < 60


def fit_100(rank: int, choices: dict[str, Any], resume: Path | None = None, **more: Any) -> Any:
    torch.manual_seed(rank)
    return fit(
        rank,
        2,
        2,
        100,
        choices,
        LIGHTNING,
        "adamw",
        inspect,
        trainer_choices=more,
        make=with_net(),
        loader=Announced((rank, 0, 1), 200),
        resume=resume,
    )


def assert_same_fit(auto: Any, explicit: Any) -> None:
    assert same(auto["inspected"].state, explicit["inspected"].state)
    assert same(auto["outer"], explicit["outer"])
    untimed = {"exposed_wait_s": 0, "in_flight_s": 0}
    assert {**auto["report"], **untimed} == {**explicit["report"], **untimed}


def measuring(link: Link) -> Any:
    """A measurement with this result."""
    return lambda *_: link


def assert_reported(messages: list[str], choices: dict[str, Any], path: Path) -> None:
    """The choices are in the log and in the file of the logger."""
    message, _ = [text for text in messages if "Chosen: " in text]
    words = (
        "Chosen: sync_every={sync_every}, overlap_steps={overlap_steps}, fragments={fragments!r}"
    )
    assert words.format(**choices) in message
    words = "the measured inner step takes 0.05 s and the link carries 5 kbit/s with a round trip"
    assert f"{words} of 50 ms" in message
    with path.open() as file:
        row = next(row for row in csv.DictReader(file) if row["sdiloco/sync_every"])
    for name in ("sync_every", "overlap_steps"):
        assert float(row[f"sdiloco/{name}"]) == choices[name]
    assert float(row["sdiloco/fragments"]) == 2
    assert float(row["sdiloco/measured_gbit_s"]) == 5e-6


@in_ranks(2)
def test_choices_for_a_slow_link_are_reported_resumed_and_equal_to_given_ones(
    rank: int, tmp_path: Path
) -> None:
    auto_settings.measure_link = measuring(SLOW)
    Options.step_time = lambda self: 0.05
    messages = said_by("lightning_sdiloco")
    expected = chosen(SLOW, *AUTO)
    model = Model.of_parameters(trainable(net()))
    candidates = auto_settings.candidates_among(tuple(AUTO), Settings(), model)
    assert expected == of_planner(Measured(0.05, SLOW), candidates)
    assert expected != chosen(Link(10.0), *AUTO)

    before = tmp_path / "5.ckpt"
    after = tmp_path / "40.ckpt"
    saving = [at({5: save(before), 40: save(after)})]
    logger = CSVLogger(tmp_path, "", "")
    explicit = fit_100(rank, expected, callbacks=saving, logger=logger)
    auto = fit_100(rank, AUTO, callbacks=saving, logger=logger)
    assert auto["inspected"].choices == expected
    assert auto["report"]["landings"] > 2
    assert explicit["inspected"].measured is None
    assert_same_fit(auto, explicit)

    # A run that is resumed after the choice does not measure, or it would choose otherwise.
    for path, link in ((before, SLOW), (after, Link(100.0))):
        auto_settings.measure_link = measuring(link)
        resumed = fit_100(rank, AUTO, path)["inspected"]
        assert resumed.choices == expected
        assert resumed.settings.exchange == auto["inspected"].settings.exchange
        assert same(resumed.state, auto["inspected"].state)
        assert (resumed.measured is None) == (path == after)
    if rank == 0:
        assert_reported(messages, expected, tmp_path / "metrics.csv")


@in_ranks(2)
def test_fits_of_few_rounds_step_elementwise_and_fits_of_unknown_length_map_matrices(
    rank: int,
) -> None:
    def stop(trainer: Any, *_: Any) -> None:
        trainer.should_stop = True

    def direction(**length: int) -> Any:
        strategy = StreamingDiLoCoStrategy(2, sync_every=4, overlap_steps=1)
        stopping = [on(on_train_batch_end=stop)]
        length = {"max_steps": -1, **length}
        runner = trainer(strategy=strategy, devices=2, callbacks=stopping, **length)
        # The output of the last layer is as long as a vocabulary that the model embeds.
        net = mlp(0)
        net[0].register_module("tokens", nn.Embedding(len(net[-1].weight), 1))
        runner.fit(module(net=net), SomeBatches(rank, 2))
        return strategy.engine.rounds.settings.outer.direction

    assert direction(max_steps=19) == "elementwise"
    assert direction(max_steps=20) == "equalised"
    assert direction(max_epochs=-1) == "equalised"


@in_ranks(2)
def test_choices_in_a_checkpoint_are_adopted_and_forgotten_with_its_fit(
    rank: int, tmp_path: Path
) -> None:
    """By as many groups and by others; a fit after it chooses anew."""
    path = tmp_path / "given.ckpt"

    def numbers(
        groups: int, *starts: Path | None, callbacks: Any = (), **choices: Any
    ) -> list[Any]:
        """The numbers that a strategy has in fits from these starts."""
        strategy = StreamingDiLoCoStrategy(groups, sync_every=4, overlap_steps=1, **choices)
        runner = trainer(strategy=strategy, devices=2, max_steps=0, callbacks=callbacks)
        model = module()
        numbers_of_fits = []
        for start in starts:
            runner.fit_loop.epoch_loop.max_steps += 8
            runner.fit(model, SomeBatches(rank, 20), ckpt_path=start)
            numbers_of_fits.append(strategy.engine.rounds.settings.numbers)
        return numbers_of_fits

    saved = {"outer_lr": 0.625, "outer_momentum": 0.5, "mixing": 0.375}
    numbers(2, None, callbacks=[at({6: save(path)})], **saved)
    of_two_rounds = recommended(least=2, direction="elementwise")._asdict()
    of_four_rounds = recommended(least=4, direction="elementwise")._asdict()
    assert numbers(2, path, None) == numbers(1, path, None) == [saved, of_four_rounds]
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
    def measure_skewed(topology: Topology, timeout: float, largest: int, to: int) -> Link:
        link = measure_link(topology, timeout, largest, to)
        assert link.gbit_s > 0.001
        return replace(link, gbit_s=[2.0, 1.99, 1.0][to])

    auto_settings.measure_link = measure_skewed
    choices = {"sync_every": 10, "overlap_steps": 2, "exchange": TwoShot(), "compression": "fp4"}
    trained = fit(rank, 3, 3, 14, choices, inspect=inspect)
    assert trained["inspected"].settings.exchange == TwoShot(links=(2.0, 2.0, 1.0))
    assert agreed(trained["outer"])
    # Until links are measured, and from a checkpoint, two shots have the backend that was asked for.
    choices["exchange"] = TwoShot(backend="nccl")
    options = StreamingDiLoCoStrategy(3, **choices)._options
    assert kind_and_backend(options.settings.exchange) == ("two_shot", "nccl")
    options.restore({"exchange": repr(TwoShot(links=(2.0, 1.0))), "fragments": "'strided:3'"})
    assert options.settings.fragments == "strided:3", "what the default was when the run began"
    assert options.settings.exchange == TwoShot(links=(2.0, 1.0), backend="nccl")
    assert options.auto == ()

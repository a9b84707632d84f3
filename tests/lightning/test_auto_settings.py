"""``"auto"``: what the planner chooses from measured numbers, the same in all ranks, saved and taken up again."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_sdiloco import StreamingDiLoCo, StreamingDiLoCoStrategy, TwoShot
from lightning_sdiloco.algorithm.config import Settings, recommended
from lightning_sdiloco.algorithm.reduce import kind_and_backend
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.lightning import options as auto_settings
from lightning_sdiloco.lightning.options import Measured, Options, choice, measure_link
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.planner import recommend
from lightning_sdiloco.planning.workload import Groups, Model
from tests.fits import LIGHTNING, SomeBatches, fit, module, trainer
from tests.lightning.uneven_fits import same
from tests.ranks import run_processes
from tests.training import inner_optimizer, mlp, train_step

AUTO = {"sync_every": "auto", "overlap_steps": "auto", "fragments": "auto", "compression": "auto"}
# So slow that training cannot go on for every round: what is chosen is not the first candidate.
SLOW = Link(gbit_s=5e-6, round_trip=0.05)


def told(trainer: Any, model: Any) -> dict[str, Any]:
    strategy, settings = trainer.strategy, trainer.strategy.engine.settings
    names = (*AUTO, "exchange")
    return {
        "settings": {name: getattr(settings, name) for name in names},
        "measured": strategy.measured,
        "sent": strategy.topology.exchange.bytes_sent if strategy.topology.num_groups > 1 else 0,
    }


def of_planner(measured: Measured, *candidates: Settings) -> dict[str, Any]:
    groups = Groups(measured.step_time, groups=2, memory_rate=1e10)
    own = recommend(Model.of_parameters(trainable(module())), groups, measured.link, *candidates).settings
    return {name: getattr(own, name) for name in AUTO}


def chosen(link: Link, *names: str, **given: Any) -> dict[str, Any]:
    return choice(names, Settings(**given), mlp(), Topology.simulated(2)[0], Measured(0.05, link))


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured numbers, which would be others in every run: forked ranks inherit them."""
    monkeypatch.setattr(auto_settings, "measure_link", lambda topology, timeout: SLOW)
    monkeypatch.setattr(Options, "step_time", lambda self: 0.05)


# What is chosen


def test_all_ranks_take_what_the_planner_recommends_for_the_measured_numbers() -> None:
    def run(rank: int, world_size: int) -> Any:
        return fit(rank, world_size, world_size, 40, {**AUTO, "compression": "fp32"}, LIGHTNING, "sgd", told)

    first, second = run_processes(run, 2)
    (settings, measured, sent), other = first["inspected"].values(), second["inspected"]
    assert (settings, measured) == (other["settings"], other["measured"])
    # All candidates with the compression that was given, which the first that suffices has too on a fast link.
    assert {name: settings[name] for name in AUTO} == of_planner(measured)
    assert all(0 < seconds < 1 for seconds in (measured.step_time, measured.link.round_trip))
    assert measured.link.gbit_s > 0.01
    assert 2**16 <= sent <= 3 * 2**24, "messages tell enough, and take no longer than that needs"
    assert first["report"]["landings"] > 0
    # One group has nothing to measure.
    (alone,) = run_processes(run, 1)
    assert alone["inspected"]["measured"] is None
    assert alone["inspected"]["settings"]["sync_every"] == 30


def test_the_compression_is_the_most_exact_one_for_which_the_link_suffices_and_what_is_given_is_kept() -> None:
    by_link = [chosen(Link(gbit_s), "compression")["compression"] for gbit_s in (10.0, 1e-5, 1e-6)]
    assert by_link == ["fp32", "bf16", "fp4"]
    given = {"sync_every": 60, "overlap_steps": 7, "fragments": "sequential:2", "compression": "bf16"}
    for name in AUTO:
        taken = chosen(SLOW, name, **given)
        assert set(taken) == {name}
        replace(Settings(**given), **taken)
        assert taken.get("overlap_steps", 0) < 60


@pytest.mark.usefixtures("slow_link")
def test_a_slow_link_gets_the_planners_other_choice_and_the_run_is_bit_for_bit_one_with_it() -> None:
    slow = chosen(SLOW, *AUTO)
    expected = of_planner(Measured(0.05, SLOW), auto_settings.candidates_among(tuple(AUTO), Settings()))
    assert slow == expected != chosen(Link(10.0), *AUTO)

    def run(rank: int, world_size: int) -> Any:
        return [fit(rank, 2, 2, 100, choices, LIGHTNING, "adamw", told) for choices in (AUTO, slow)]

    untimed = {"exposed_wait_s": 0, "in_flight_s": 0}
    for auto, explicit in run_processes(run, 2):
        assert {name: auto["inspected"]["settings"][name] for name in AUTO} == slow
        assert auto["report"]["landings"] > 2
        assert explicit["inspected"]["measured"] is None
        assert same(auto["model"], explicit["model"])
        assert same(auto["outer"], explicit["outer"])
        assert {**auto["report"], **untimed} == {**explicit["report"], **untimed}


def test_an_engine_chooses_as_if_from_the_start() -> None:
    def run(change_at: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        optimizer = inner_optimizer("sgd", model)
        wanted = Settings(sync_every=6, overlap_steps=2, fragments="sequential:1")
        start = wanted if change_at == 0 else replace(wanted, sync_every=100, overlap_steps=0, fragments="strided")
        engine = StreamingDiLoCo(model, **vars(start))
        for step in range(1, 20):
            train_step(model, optimizer, 0, step)
            engine.step()
            if step == change_at:
                engine.choose(wanted)
                assert {fragment["trained"] for fragment in engine.state_dict()["fragments"]} == {change_at}
        engine.finish()
        return {**engine.outer_state_dict(), "mean": model.get_buffer("1.running_mean")}

    assert same(run(4), run(0))
    with pytest.raises(RuntimeError, match="before the first launch only"):
        run(6)


# Checkpoints


def test_what_a_checkpoint_holds_is_taken_up_and_forgotten_with_its_fit(tmp_path: Path) -> None:
    """By as many groups and by others; a fit after it chooses anew."""
    saved, own = {"outer_lr": 0.625, "outer_momentum": 0.5, "mixing": 0.375}, recommended()._asdict()
    path = tmp_path / "given.ckpt"

    def play(rank: int, groups: int, fits: list[tuple[int, Path | None]], **choices: Any) -> list[Any]:
        seen, model = [], module(seed=rank)
        strategy = StreamingDiLoCoStrategy(groups, sync_every=4, overlap_steps=1, **choices)
        runner = trainer(strategy=strategy, devices=groups, max_steps=6)
        for steps, resume in fits:
            runner.fit_loop.epoch_loop.max_steps = steps
            runner.fit(model, SomeBatches(rank, 20), ckpt_path=resume)
            seen.append(strategy.engine.settings.numbers)
        if "mixing" in choices:
            runner.save_checkpoint(path)
        return seen

    def of_two(rank: int, world_size: int) -> Any:
        play(rank, 2, [(6, None)], **saved)
        return play(rank, 2, [(10, path), (14, None)]), play(rank, 2, [(10, path)], resume="restart")

    def of_one(rank: int, world_size: int) -> Any:
        return play(rank, 1, [(10, path), (14, None)])

    assert run_processes(of_two, 2) == [([saved, own], [own])] * 2
    assert run_processes(of_one, 1) == [[saved, own]]


@pytest.mark.parametrize("saved_at", [40, 5])
@pytest.mark.usefixtures("slow_link")
def test_a_resumed_fit_goes_on_exactly(saved_at: int, tmp_path: Path) -> None:
    """After the choice, which is then taken from the checkpoint, and before it."""

    def play(rank: int, ckpt_path: str | None) -> Any:
        torch.manual_seed(rank)
        saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=saved_at, save_top_k=-1)
        more = {"max_steps": 60, "max_epochs": -1, "callbacks": [saving], "enable_checkpointing": True}
        runner, model = trainer(strategy=StreamingDiLoCoStrategy(**AUTO), devices=2, **more), module(seed=rank)
        runner.fit(model, SomeBatches(rank, saved_at), ckpt_path=ckpt_path)
        return told(runner, model), {name: p.detach().clone() for name, p in model.net.named_parameters()}

    def run(rank: int, world_size: int) -> Any:
        whole = play(rank, None)
        if saved_at == 40:
            # Another measurement would lead to another choice.
            auto_settings.measure_link = lambda topology, timeout: Link(100.0)  # type: ignore[assignment, misc]
        return whole, play(rank, str(tmp_path / f"step={saved_at}.ckpt"))

    for (one, model), (other, resumed) in run_processes(run, 2):
        assert other["settings"] == one["settings"]
        assert (other["measured"] is None) == (saved_at == 40)
        assert same(model, resumed)


# What is said, and what is refused


def test_the_choice_is_announced_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    written: list[tuple[dict[str, float], int]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: written.append((metrics, step)))
    with caplog.at_level(logging.WARNING):
        auto_settings.tell(Settings(sync_every=50), 4, Measured(0.25, SLOW), [logger], 8)
    assert "Chosen: sync_every=50, overlap_steps=5, fragments='strided:3'" in caplog.text
    assert "an inner step takes 0.25 s, the link carries 5 kbit/s with a round trip of 50 ms" in caplog.text
    ((metrics, step),) = written
    told = [metrics[f"sdiloco/{name}"] for name in ("sync_every", "fragments", "link_gbit_s")]
    assert (step, told) == (8, [50, 4, 5e-6])


def test_auto_is_refused_where_it_means_nothing() -> None:
    for choices, words in (
        ({"sync_every": 8, "overlap_steps": "auto"}, "sync_every=8 leaves no time for overlap_steps='auto'"),
        ({"sync_every": "auto", "overlap_steps": 500}, "overlap_steps=500 leaves nothing for sync_every='auto'"),
        ({"outer_momentum": "given"}, "outer_momentum='given' is of type str"),
        ({"sync_every": "automatic"}, "sync_every='automatic' is of type str"),
        ({"sync_every": "auto", "mixing": 2.0}, "mixing=2.0 is out of range"),
        ({"sync_every": "auto", "warmup_steps": 9}, "warmup_steps=9 leaves no time for sync_every='auto'"),
    ):
        with pytest.raises(ValueError, match=words):
            StreamingDiLoCoStrategy(**choices)  # type: ignore[arg-type]

    def in_one_rank_alone(rank: int, world_size: int) -> None:
        words = "settings of the strategy differ.*sync_every is 50 on rank 0, 'auto' on rank 1"
        with pytest.raises(ValueError, match=f"(?s){words}"):
            fit(rank, world_size, 2, 5, {"sync_every": "auto" if rank else 50})

    run_processes(in_one_rank_alone, 2)


def test_links_are_measured_for_two_shots_whose_parts_suit_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def skewed(topology: Topology, timeout: float, to: int) -> Link:
        found = measure_link(topology, timeout, to)
        assert found.gbit_s > 0.001
        return replace(found, gbit_s=[2.0, 1.99, 1.0][to])

    monkeypatch.setattr(auto_settings, "measure_link", skewed)
    choices = {"sync_every": 10, "overlap_steps": 2, "exchange": TwoShot(), "compression": "fp4"}
    trained = run_processes(fit, 3, 3, 14, choices, LIGHTNING, "sgd", told)
    exchanges = [rank["inspected"]["settings"]["exchange"] for rank in trained]
    assert exchanges == [TwoShot(links=(2.0, 2.0, 1.0))] * 3
    assert same(trained[0]["outer"], trained[2]["outer"])
    # Until they are measured, and from a checkpoint, they have the backend that was asked for.
    options = StreamingDiLoCoStrategy(3, **{**choices, "exchange": TwoShot(backend="nccl")})._options
    assert kind_and_backend(options.settings.exchange) == ("two_shot", "nccl")
    options.restore({"exchange": repr(TwoShot(links=(2.0, 1.0)))})
    assert (options.settings.exchange, options.auto) == (TwoShot(links=(2.0, 1.0), backend="nccl"), ())

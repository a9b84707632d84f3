"""``"auto"``: what the planner chooses from measured numbers, the same in all ranks, saved and taken up again."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_sdiloco import StreamingDiLoCo, StreamingDiLoCoStrategy, TwoShot
from lightning_sdiloco.algorithm.config import Settings, recommended
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.shards import trainable
from lightning_sdiloco.lightning import options as auto_settings
from lightning_sdiloco.lightning.options import Measured, Options, choice, measure_link
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.planner import recommend
from lightning_sdiloco.planning.workload import Groups, Model
from tests.fits import SomeBatches, Trained, fit, module, trainer
from tests.ranks import run_processes
from tests.training import mlp

AUTO = {"sync_every": "auto", "overlap_steps": "auto", "fragments": "auto", "compression": "auto"}

# So slow that training cannot go on for every round: what is chosen is not the first candidate.
SLOW = Link(gbit_s=5e-6, round_trip=0.05)


def told(trainer: Any, model: Any) -> dict[str, Any]:
    strategy = trainer.strategy
    settings = strategy.engine.settings
    return {
        "settings": {name: getattr(settings, name) for name in AUTO},
        "measured": strategy.measured,
    }


def chosen_by_planner(trained: Trained) -> dict[str, Any]:
    measured = trained["inspected"]["measured"]
    groups = Groups(measured.step_time, groups=2, memory_rate=1e10)
    own = recommend(Model.of_parameters(trainable(module())), groups, measured.link).settings
    return {name: getattr(own, name) for name in trained["inspected"]["settings"]}


def on_a_slow_link(monkeypatch: pytest.MonkeyPatch, step_time: float = 0.05) -> None:
    """The measured numbers, which would be others in every run: the forked ranks inherit it."""
    monkeypatch.setattr(auto_settings, "measure_link", lambda topology, timeout: SLOW)
    monkeypatch.setattr(Options, "step_time", lambda self: step_time)


# What is chosen


def test_all_ranks_take_what_the_planner_recommends_for_the_measured_numbers() -> None:
    first, second = run_processes(fit, 2, 2, 40, {**AUTO, "compression": "fp32"}, "lightning.pytorch", "sgd", told)
    assert first["inspected"]["measured"] == second["inspected"]["measured"]
    assert first["inspected"]["settings"] == second["inspected"]["settings"]
    # All candidates with the compression that was given, which the first that suffices has too on a fast link.
    assert first["inspected"]["settings"] == chosen_by_planner(first)
    assert 0 < first["inspected"]["measured"].step_time < 1
    assert first["inspected"]["measured"].link.gbit_s > 0.01
    assert first["report"]["landings"] > 0


def test_what_is_given_is_kept() -> None:
    given = Settings(sync_every=60, overlap_steps=7, fragments="sequential:2", compression="bf16")
    for name in AUTO:
        taken = choice((name,), given, mlp(), Topology.simulated(2)[0], Measured(0.05, SLOW))
        assert set(taken) == {name}
        replace(given, **taken)
        assert taken["overlap_steps"] < 60 if name == "overlap_steps" else True


def test_the_compression_is_the_most_exact_one_for_which_the_link_suffices() -> None:
    def chosen(gbit_s: float) -> str:
        taken = choice(("compression",), Settings(), mlp(), Topology.simulated(2)[0], Measured(0.05, Link(gbit_s)))
        return str(taken["compression"])

    assert [chosen(gbit_s) for gbit_s in (10.0, 1e-5, 1e-6)] == ["fp32", "bf16", "fp4"]


def test_one_group_takes_the_first_candidate_without_a_measurement() -> None:
    (trained,) = run_processes(fit, 1, 1, 12, AUTO, "lightning.pytorch", "sgd", told)
    assert trained["inspected"]["measured"] is None
    assert trained["inspected"]["settings"]["sync_every"] == 30


# The run is one with these settings


def test_a_slow_link_gets_the_planners_other_choice_and_the_run_is_bit_for_bit_one_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_slow_link(monkeypatch)
    fast = choice(tuple(AUTO), Settings(), mlp(), Topology.simulated(2)[0], Measured(0.05, Link(10.0)))
    slow = choice(tuple(AUTO), Settings(), mlp(), Topology.simulated(2)[0], Measured(0.05, SLOW))
    own = auto_settings.candidates_among(tuple(AUTO), Settings())
    expected = recommend(Model.of_parameters(trainable(mlp())), Groups(0.05, memory_rate=1e10), SLOW, own).settings
    assert slow == {name: getattr(expected, name) for name in slow}
    assert slow != fast
    auto = run_processes(fit, 2, 2, 120, AUTO, "lightning.pytorch", "adamw", told)
    assert all(rank["inspected"]["settings"] == slow for rank in auto)
    explicit = run_processes(fit, 2, 2, 120, slow, "lightning.pytorch", "adamw", told)
    assert auto[0]["report"]["landings"] > 2
    untimed = {"exposed_wait_s": 0, "in_flight_s": 0}
    for one, other in zip(auto, explicit, strict=True):
        assert other["inspected"]["measured"] is None
        assert all(torch.equal(one["model"][name], values) for name, values in other["model"].items())
        assert all(torch.equal(one["outer"][name], values) for name, values in other["outer"].items())
        assert {**one["report"], **untimed} == {**other["report"], **untimed}


def test_an_engine_chooses_as_if_from_the_start() -> None:
    def run(change_at: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wanted = Settings(sync_every=6, overlap_steps=2, fragments="sequential:1")
        start = wanted if change_at == 0 else replace(wanted, sync_every=100, overlap_steps=0, fragments="strided")
        engine = StreamingDiLoCo(model, **vars(start))
        for step in range(1, 20):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            engine.step()
            if step == change_at:
                engine.choose(wanted)
                assert {fragment["trained"] for fragment in engine.state_dict()["fragments"]} == {change_at}
        engine.finish()
        return {**engine.outer_state_dict(), "mean": model.get_buffer("1.running_mean")}

    expected = run(0)
    assert all(torch.equal(values, expected[name]) for name, values in run(4).items())
    with pytest.raises(RuntimeError, match="before the first launch only"):
        run(6)


def numbers(trainer: Any, model: Any) -> dict[str, float]:
    own: dict[str, float] = trainer.strategy.engine.settings.numbers
    return own


# Checkpoints


def test_what_a_checkpoint_holds_is_taken_up_and_forgotten_with_its_fit(tmp_path: Path) -> None:
    """By as many groups and by others; a fit after it chooses anew."""
    saved = {"outer_lr": 0.625, "outer_momentum": 0.5, "mixing": 0.375}

    def run(
        rank: int, world_size: int, groups: int, path: str | None, choices: dict[str, Any]
    ) -> list[dict[str, float]]:
        seen, model = [], module(seed=rank)
        strategy = StreamingDiLoCoStrategy(groups, sync_every=4, overlap_steps=1, **choices)
        runner = trainer(strategy=strategy, devices=world_size, max_steps=10 if path else 6)
        runner.fit(model, SomeBatches(rank, 20), ckpt_path=path)
        seen.append(numbers(runner, model))
        if path is None:
            runner.save_checkpoint(tmp_path / "given.ckpt")
        else:
            runner.fit_loop.epoch_loop.max_steps = 14
            runner.fit(model, SomeBatches(rank, 20))
            seen.append(numbers(runner, model))
        return seen

    run_processes(run, 2, 2, None, saved)
    for ranks, groups in ((2, 2), (1, 1)):
        own = recommended()._asdict()
        for seen in run_processes(run, ranks, groups, str(tmp_path / "given.ckpt"), {}):
            assert seen == [saved, own]
    on_restart = run_processes(run, 2, 2, str(tmp_path / "given.ckpt"), {"resume": "restart"})
    assert [seen[0] for seen in on_restart] == [recommended()._asdict()] * 2


@pytest.mark.parametrize("saved_at", [40, 5])
def test_a_resumed_fit_goes_on_exactly(saved_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the choice, which is then taken from the checkpoint, and before it."""
    on_a_slow_link(monkeypatch)

    def run(rank: int, world_size: int, ckpt_path: str | None) -> Trained:
        torch.manual_seed(rank)
        checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=saved_at, save_top_k=-1)
        runner = trainer(
            strategy=StreamingDiLoCoStrategy(**AUTO),
            devices=world_size,
            max_epochs=80 // saved_at,
            callbacks=[checkpoint],
            enable_checkpointing=True,
        )
        model = module(seed=rank)
        runner.fit(model, SomeBatches(rank, saved_at), ckpt_path=ckpt_path)
        return {
            "inspected": told(runner, model),
            "model": {name: p.detach() for name, p in model.net.named_parameters()},
        }

    whole = run_processes(run, 2, None)
    if saved_at == 40:
        # Another measurement would lead to another choice.
        monkeypatch.setattr(auto_settings, "measure_link", lambda topology, timeout: Link(100.0))
    resumed = run_processes(run, 2, str(tmp_path / f"step={saved_at}.ckpt"))
    for one, other in zip(whole, resumed, strict=True):
        assert other["inspected"]["settings"] == one["inspected"]["settings"]
        assert (other["inspected"]["measured"] is None) == (saved_at == 40)
        assert all(torch.equal(one["model"][name], values) for name, values in other["model"].items())


# What is said


def test_the_choice_is_announced_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    written: list[tuple[dict[str, float], int]] = []

    class Logger:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            written.append((metrics, step))

    with caplog.at_level(logging.WARNING):
        auto_settings.tell(Settings(sync_every=50), 4, Measured(0.25, SLOW), [Logger()], 8)
    assert "Chosen: sync_every=50, overlap_steps=5, fragments='strided:3'" in caplog.text
    assert "an inner step takes 0.25 s, the link carries 5 kbit/s with a round trip of 50 ms" in caplog.text
    (metrics, step) = written[0]
    assert step == 8
    assert metrics["sdiloco/sync_every"] == 50
    assert metrics["sdiloco/fragments"] == 4
    assert metrics["sdiloco/link_gbit_s"] == 5e-6


# What is refused


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


def test_auto_in_one_rank_alone_is_refused() -> None:
    def run(rank: int, world_size: int) -> str:
        with pytest.raises(ValueError, match="settings of the strategy differ") as error:
            fit(rank, world_size, 2, 5, {"sync_every": "auto" if rank else 50})
        return str(error.value)

    for text in run_processes(run, 2):
        assert "sync_every is 50 on rank 0, 'auto' on rank 1" in text


# The link


def test_a_link_is_measured_with_messages_that_tell_enough() -> None:
    def run(rank: int, world_size: int) -> Any:
        import torch.distributed as dist

        from lightning_sdiloco.algorithm.config import DEFAULT_TIMEOUT
        from lightning_sdiloco.comm.topology import GroupLayout

        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        topology = Topology.of_world(GroupLayout(world_size, world_size), DEFAULT_TIMEOUT)
        link = measure_link(topology, timeout=20.0)
        return link, topology.exchange.bytes_sent

    (one, sent), (other, _) = run_processes(run, 2)
    assert one == other
    assert 0 < one.round_trip < 1
    assert one.gbit_s > 0
    assert 2**16 <= sent <= 2 * 2**24


def test_links_are_measured_for_two_shots_whose_parts_suit_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def skewed(topology: Topology, timeout: float, to: int) -> Link:
        found = measure_link(topology, timeout, to)
        assert found.gbit_s > 0.001
        return replace(found, gbit_s=[2.0, 1.99, 1.0][to])

    monkeypatch.setattr(auto_settings, "measure_link", skewed)
    choices = {"sync_every": 10, "overlap_steps": 2, "exchange": TwoShot(), "compression": "fp4"}
    trained = run_processes(fit, 3, 3, 24, choices, "lightning.pytorch", "sgd", lambda t, _: t.strategy.engine.settings)
    assert [rank["inspected"].exchange for rank in trained] == [TwoShot(links=(2.0, 2.0, 1.0))] * 3
    assert all(torch.equal(trained[0]["outer"][name], trained[2]["outer"][name]) for name in trained[0]["outer"])
    options = StreamingDiLoCoStrategy(3, **choices)._options
    options.restore({"exchange": repr(TwoShot(links=(2.0, 1.0)))})
    assert (options.settings.exchange, options.auto) == (TwoShot(links=(2.0, 1.0)), ())

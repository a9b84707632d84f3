"""A run that is stopped anywhere and resumed goes on, bit for bit, as if it had never stopped."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from lightning_sdiloco import OuterOptimizer, Selective, StreamingDiLoCo
from lightning_sdiloco.compression import COMPRESSIONS, ErrorFeedback, Int4
from tests.engine.groups import Groups, Values, copied, through_a_file, unlike
from tests.ranks import run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step

STEPS = 32
CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 5, "fragments": [*LAYERS[:2], ["4.*", "6.*", "7.*"]]}


def model_with_statistics(seed: int) -> nn.Sequential:
    model = nn.Sequential(*mlp(seed), nn.BatchNorm1d(3))
    model.register_buffer("seldom", torch.zeros(2))
    return model


class Runs(Groups):
    """Groups with buffers that go on from step to step, all of which is compared."""

    def __init__(self, groups: int = 2, inner: str = "adamw", net: Any = model_with_statistics, **choices: Any) -> None:
        self.is_uneven = bool(choices.pop("uneven", False))
        super().__init__(groups, inner, net, **choices)
        self.choices["uneven"] = self.is_uneven

    def see(self, last: int) -> list[Values]:
        """Trains up to a step, and returns what there was after each.

        Where it is uneven, a group runs dry again and again, and groups train unequal numbers of micro-batches.
        """
        seen = []
        for step in range(self.steps + 1, last + 1):

            def seldom(models: Sequence[Any], step: int = step) -> None:
                for group, model in enumerate(models):
                    model.seldom += (group + 1) * (step % 16 == 15)

            idle = [1] if self.is_uneven and step % 13 > 7 else []
            self.step(idle, [1 + (step + group) % 3 if self.is_uneven else 1 for group in range(2)], seldom)
            seen.append(self.seen())
        return seen

    def differs(self, expected: list[Values], last: int) -> list[list[str]]:
        """Goes on up to a step, and returns what is not as expected, which begins with the first step."""
        first = self.steps
        return [names for names in map(unlike, self.see(last), expected[first:last]) if names]


@pytest.mark.parametrize("compression", sorted(COMPRESSIONS.keys() - {"top_k", "random_block"}))
def test_stopping_before_during_and_after_flights(compression: str) -> None:
    choices = {**CHOICES, "compression": compression}
    never_stopped, first, in_flight = Runs(**choices), Runs(**choices), set()
    expected = never_stopped.see(STEPS)
    never_stopped.groups.finish()
    for step in (7, 8, 9, 13, 15, 20):
        # Also shows that taking the state changes nothing in the run that goes on.
        assert first.differs(expected, step) == []
        second = first.resumed()
        in_flight.add(len(second.engines[0].in_flight))
        assert second.engines[0].in_flight == first.engines[0].in_flight
        assert second.differs(expected, STEPS) == []
        second.groups.finish()
        assert unlike(second.seen(), never_stopped.seen()) == []
    assert in_flight == {0, 1, 2}


COUNTING: dict[str, Any] = {
    "uneven": True,
    # What the second rounding of a mean lost is remembered, too.
    "compression": ErrorFeedback(Int4()),
    "exchange": "two_shot",
    "outer_lr": 0.4,
    "outer_momentum": 0.9,
    "mixing": 0.5,
    "outer_optimizer": OuterOptimizer(
        lr_schedule=partial(LinearLR, start_factor=0.1, total_iters=7), clip_norm=0.5, outlier_guard=1.05
    ),
}


def test_stopping_with_a_warmup_a_schedule_a_guard_and_groups_that_run_dry() -> None:
    choices = {**CHOICES, **COUNTING, "sync_every": 6, "warmup_steps": 10}
    never_stopped, first = Runs(**choices), Runs(**choices)
    expected = never_stopped.see(70)
    for step in (4, 9, 12, 29, 35, 44, 59):
        assert first.differs(expected, step) == []
        second = first.resumed()
        assert second.differs(expected, 70) == []
        for one, other in zip(second.landings, never_stopped.landings[len(first.landings) :], strict=True):
            assert (one.fragment, one.outer_lr, one.outlying) == (other.fragment, other.outer_lr, other.outlying)
    assert any(landing.outlying for landing in never_stopped.landings), "the guard acted"


def test_a_warmup_of_another_number_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    def resumed(saved: Any, **choices: Any) -> Runs:
        return Runs(**CHOICES | choices).load(saved)  # type: ignore[return-value]

    # After it nothing changes, which is said once.
    selective = {"schedule": Selective(0.3, 4)}
    for was, now, stopped_at, choices in ((20, 0, 35, selective), (3, 4, 13, {}), (3, 30, 13, {}), (3, 0, 3, {})):
        caplog.clear()
        first = Runs(warmup_steps=was, **CHOICES | choices)
        seen = first.see(stopped_at)
        saved = first.saved()
        assert resumed(saved, warmup_steps=now, **choices).differs([*seen, *first.see(60)], 60) == []
        (told,) = (one.message for one in caplog.records if one.levelno == logging.WARNING and "warm-up" in one.message)
        assert f"warmup_steps={now} is ignored: the warm-up of this run ended after inner step {was}" in told
    # Within it the new one counts, and one that is past ends it with the next step.
    first = Runs(warmup_steps=8, **CHOICES)
    first.see(5)
    for now, until in ((12, 12), (6, 6), (5, 6), (0, 6)):
        expected = Runs(warmup_steps=until, **CHOICES).see(STEPS)
        assert resumed(first.saved(), warmup_steps=now).differs(expected, STEPS) == []
    # One that was never there is refused in the midst of rounds.
    first = Runs(**CHOICES)
    at_the_start = first.saved()
    for stopped_at in (1, 12):
        first.see(stopped_at)
        told = rf"warmup_steps=20 .* no warm-up.* inner step {stopped_at}\b.*Leave warmup_steps out"
        with pytest.raises(ValueError, match=told):
            resumed(first.saved(), warmup_steps=20)
    expected = Runs(warmup_steps=6, **CHOICES).see(12)
    assert resumed(at_the_start, warmup_steps=6).differs(expected, 12) == []


def test_engines_that_went_on_or_were_finished_go_back_to_what_they_were() -> None:
    groups = Runs(**CHOICES)
    before = groups.see(15)
    saved = groups.saved()
    # A fragment is in flight, and the next one is about to be launched.
    expected = [*before, *groups.see(23)]
    assert groups.engines[0].in_flight
    groups.load(saved)
    assert groups.differs(expected, 23) == []
    groups.groups.finish()
    assert groups.resumed().differs(Runs(**CHOICES).see(STEPS), STEPS) == []


def test_what_was_requested_before_a_stop_reaches_all_groups() -> None:
    """It waits for a launch, or is in flight."""
    for stopped_after in (9, 11):
        first = Runs(**CHOICES)
        first.see(8)
        first.engines[1].request(0b101)
        first.see(stopped_after)
        second = first.resumed()
        second.see(18)
        asked = [(landing.launched_at, landing.requests) for landing in second.landings]
        assert asked == [(8, 0), (10, 0b101), (13, 0)]


def test_the_state_of_other_fragments_or_another_outer_optimizer_is_refused() -> None:
    state = StreamingDiLoCo(mlp(), fragments=[["*"]]).state_dict()
    with pytest.raises(ValueError, match="other fragments"):
        StreamingDiLoCo(mlp(), fragments=LAYERS).load_state_dict(state)
    # Also where its name is the same.
    state = StreamingDiLoCo(mlp(), outer_optimizer=partial(torch.optim.SGD, lr=0.1)).state_dict()
    other = StreamingDiLoCo(mlp(), outer_optimizer=partial(torch.optim.SGD, lr=0.2))
    with pytest.raises(ValueError, match="another outer_optimizer: it was SGD.*'lr': 0.1.*now it is SGD.*'lr': 0.2"):
        other.load_state_dict(state)


def test_real_processes_resume_to_the_same_bits() -> None:
    def run(rank: int, world_size: int) -> dict[int, list[str]]:
        def seen(stopped_at: int | None) -> list[Values]:
            def start() -> tuple[nn.Module, torch.optim.Optimizer, StreamingDiLoCo]:
                model = model_with_statistics(rank)
                optimizer = inner_optimizer("adamw", model)
                return model, optimizer, StreamingDiLoCo(model, inner_optimizers=[optimizer], **CHOICES)

            (model, optimizer, engine), all_seen = start(), []
            for step in range(1, STEPS + 1):
                train_step(model, optimizer, rank, step)
                engine.step()
                if step == stopped_at:
                    saved = through_a_file([engine.state_dict(), optimizer.state_dict()])
                    model, optimizer, engine = start()
                    engine.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                all_seen.append({**copied(model.state_dict()), **engine.outer_state_dict()})
            engine.finish()
            return [*all_seen, engine.outer_state_dict()]

        expected = seen(None)
        return {at: sum(map(unlike, seen(at), expected), []) for at in (10, 12, 20)}

    assert run_ranks(run, 2) == [{10: [], 12: [], 20: []}] * 2

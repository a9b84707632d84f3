"""A run that is stopped anywhere and resumed goes on, bit for bit, as if it had never stopped."""

import io
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from lightning_sdiloco import Landing, Selective, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.compression import COMPRESSIONS
from tests.ranks import run_ranks
from tests.training import LAYERS, backward, inner_optimizer, mlp, train_step

STEPS = 32
CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 5, "fragments": [*LAYERS[:2], ["4.*", "6.*", "7.*"]]}


def model_with_statistics(seed: int) -> nn.Sequential:
    model = nn.Sequential(*mlp(seed), nn.BatchNorm1d(3))
    model.register_buffer("seldom", torch.zeros(2))
    return model


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Groups:
    """Two simulated groups that can be stopped and taken up again in new objects."""

    def __init__(
        self, idle: Callable[[int, int], bool] = lambda group, step: False, counts: bool = False, **choices: Any
    ) -> None:
        self.idle, self.counts = idle, counts
        self.models = [model_with_statistics(seed) for seed in range(2)]
        self.optimizers = [inner_optimizer("adamw", model) for model in self.models]
        self.landings: list[Landing] = []
        self.groups = SimulatedGroups(self.models, [[optimizer] for optimizer in self.optimizers], **choices)

    def run(self, first: int, last: int) -> list[dict[str, Tensor]]:
        seen = []
        for step in range(first, last + 1):
            idle = [group for group in range(len(self.models)) if self.idle(group, step)]
            for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                if group not in idle:
                    backward(model, optimizer, group, step)
                    model.seldom += (group + 1) * (step % 16 == 15)
            self.groups.average_gradients(idle=idle)
            for group, optimizer in enumerate(self.optimizers):
                if group not in idle:
                    optimizer.step()
            trained = [1 + (step + group) % 3 if self.counts else 1 for group in range(len(self.models))]
            self.landings += self.groups.step(trained=trained, idle=idle)[0]
            seen.append(self.seen())
        return seen

    def seen(self) -> dict[str, Tensor]:
        """Everything that must be the same: local and outer values, buffers too, inner state, counts."""
        values = {f"outer {name}": tensor for name, tensor in self.groups.outer_state_dict().items()}
        with self.groups.engines[0].evaluate():
            values |= {f"shown {name}": tensor.clone() for name, tensor in self.models[0].state_dict().items()}
        for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            values |= {f"{group} {name}": tensor.clone() for name, tensor in model.state_dict().items()}
            for index, state in enumerate(optimizer.state.values()):
                values |= {f"{group} {index} {key}": value.clone() for key, value in state.items()}
            counts = self.groups.engines[group].report()
            keys = ("inner_steps", "launches", "landings", "bytes_sent")
            values[f"{group} counts"] = torch.tensor([counts[key] for key in keys])
        return values

    def saved(self) -> Any:
        engines = [engine.state_dict() for engine in self.groups.engines]
        return through_a_file([engines, [optimizer.state_dict() for optimizer in self.optimizers]])

    def load(self, saved: Any) -> None:
        for engine, state in zip(self.groups.engines, saved[0], strict=True):
            engine.load_state_dict(state)
        for optimizer, state in zip(self.optimizers, saved[1], strict=True):
            optimizer.load_state_dict(state)


def assert_same(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        different = [name for name in one if not torch.equal(one[name], other[name])]
        assert different == []


@pytest.mark.parametrize("compression", sorted(COMPRESSIONS.keys() - {"top_k", "random_block"}))
def test_stopping_before_during_and_after_flights(compression: str) -> None:
    never_stopped = Groups(compression=compression, **CHOICES)
    expected = never_stopped.run(1, STEPS)
    never_stopped.groups.finish()

    first = Groups(compression=compression, **CHOICES)
    for step in range(1, STEPS + 1):
        # Also shows that taking the state changes nothing in the run that goes on.
        assert_same(first.run(step, step), [expected[step - 1]])
        if step not in (1, 7, 8, 9, 12, 13, 14, 15, 17, 23):
            continue
        second = Groups(compression=compression, **CHOICES)
        second.load(first.saved())
        assert second.groups.engines[0].in_flight == first.groups.engines[0].in_flight
        assert_same(second.run(step + 1, STEPS), expected[step:])
        second.groups.finish()
        assert_same([second.seen()], [never_stopped.seen()])


def runs_dry(group: int, step: int) -> bool:
    return group == 1 and step % 13 > 7


COUNTING: dict[str, Any] = {
    "idle": runs_dry,
    "counts": True,
    "outer_lr": 0.4,
    "outer_momentum": 0.9,
    "mixing": 0.5,
    "outer_lr_schedule": partial(LinearLR, start_factor=0.1, total_iters=7),
    "outer_clip_norm": 0.5,
    "outlier_guard": 1.05,
}


def test_stopping_with_a_warmup_a_schedule_a_guard_and_groups_that_run_dry() -> None:
    choices = {**CHOICES, **COUNTING, "sync_every": 6, "warmup_steps": 10}
    never_stopped, first = Groups(**choices), Groups(**choices)
    expected = never_stopped.run(1, 70)
    for step in range(1, 60):
        first.run(step, step)
        if step not in (4, 9, 12, 20, 29, 34, 35, 37, 44, 59):
            continue
        second = Groups(**choices)
        second.load(first.saved())
        assert_same(second.run(step + 1, 70), expected[step:])
        for one, other in zip(second.landings, never_stopped.landings[len(first.landings) :], strict=True):
            assert (one.fragment, one.outer_lr, one.outlying) == (other.fragment, other.outer_lr, other.outlying)
    assert any(landing.outlying for landing in never_stopped.landings), "the guard acted"


def resumed(saved: Any, last: int, **choices: Any) -> list[dict[str, Tensor]]:
    groups = Groups(**CHOICES | choices)
    groups.load(saved)
    return groups.run(groups.groups.engines[0].inner_steps + 1, last)


@pytest.mark.parametrize(
    ("was", "now", "stopped_at", "choices"),
    [(20, 0, 35, {"schedule": Selective(0.3, 4)}), (3, 4, 13, {}), (3, 30, 13, {}), (3, 0, 3, {})],
)
def test_after_a_warmup_another_number_changes_nothing_and_is_said_once(
    was: int, now: int, stopped_at: int, choices: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = Groups(warmup_steps=was, **CHOICES | choices)
    first.run(1, stopped_at)
    saved = first.saved()
    assert_same(resumed(saved, 60, warmup_steps=now, **choices), first.run(stopped_at + 1, 60))
    told = [record for record in caplog.records if record.levelno == logging.WARNING and "warm-up" in record.message]
    assert len(told) == 1
    assert f"warmup_steps={now} is ignored: the warm-up of this run ended after inner step {was}" in told[0].message


@pytest.mark.parametrize(("now", "until"), [(12, 12), (6, 6), (5, 6), (0, 6)])
def test_in_a_warmup_another_number_counts_and_one_that_is_past_ends_it_with_the_next_step(
    now: int, until: int
) -> None:
    first = Groups(warmup_steps=8, **CHOICES)
    first.run(1, 5)
    expected = Groups(warmup_steps=until, **CHOICES).run(1, STEPS)
    assert_same(resumed(first.saved(), STEPS, warmup_steps=now), expected[5:])


@pytest.mark.parametrize("stopped_at", [1, 12])
def test_a_warmup_that_was_never_there_is_refused_in_the_midst_of_rounds(stopped_at: int) -> None:
    first = Groups(**CHOICES)
    at_the_start = first.saved()
    first.run(1, stopped_at)
    told = rf"warmup_steps=20 .* no warm-up.* inner step {stopped_at}\b.*Leave warmup_steps out"
    with pytest.raises(ValueError, match=told):
        resumed(first.saved(), 20, warmup_steps=20)
    assert_same(resumed(at_the_start, 12, warmup_steps=6), Groups(warmup_steps=6, **CHOICES).run(1, 12))


def test_several_fragments_were_in_flight_at_some_of_these_stops() -> None:
    groups = Groups(**CHOICES)
    counts = [len(groups.groups.engines[0].in_flight) for step in range(1, STEPS + 1) if groups.run(step, step)]
    assert {0, 1, 2} <= set(counts)


def test_engines_that_went_on_go_back_to_what_they_were() -> None:
    groups = Groups(**CHOICES)
    groups.run(1, 15)
    saved = groups.saved()
    # A fragment is in flight, and the next one is about to be launched.
    expected = groups.run(16, 23)
    assert groups.groups.engines[0].in_flight
    groups.load(saved)
    assert_same(groups.run(16, 23), expected)


def test_a_run_that_was_finished_continues_as_if_it_had_not_been() -> None:
    expected = Groups(**CHOICES).run(1, STEPS)
    first = Groups(**CHOICES)
    first.run(1, 20)
    first.groups.finish()
    second = Groups(**CHOICES)
    second.load(first.saved())
    assert_same(second.run(21, STEPS), expected[20:])


@pytest.mark.parametrize("stopped_after", [9, 11])
def test_what_was_requested_before_a_stop_reaches_all_groups(stopped_after: int) -> None:
    """It waits for a launch, or is in flight."""
    first, second = Groups(**CHOICES), Groups(**CHOICES)
    first.run(1, 8)
    first.groups.engines[1].request(0b101)
    first.run(9, stopped_after)
    second.load(first.saved())
    second.run(stopped_after + 1, 18)
    asked = [(landing.launched_at, landing.requests) for landing in second.landings]
    assert asked == [(8, 0), (10, 0b101), (13, 0)]


def test_the_state_of_other_fragments_is_refused() -> None:
    state = StreamingDiLoCo(mlp(), fragments=[["*"]]).state_dict()
    with pytest.raises(ValueError, match="other fragments"):
        StreamingDiLoCo(mlp(), fragments=LAYERS).load_state_dict(state)


def test_the_state_of_another_outer_optimizer_is_refused_also_where_its_name_is_the_same() -> None:
    state = StreamingDiLoCo(mlp(), outer_optimizer=partial(torch.optim.SGD, lr=0.1)).state_dict()
    other = StreamingDiLoCo(mlp(), outer_optimizer=partial(torch.optim.SGD, lr=0.2))
    with pytest.raises(ValueError, match="another outer_optimizer: it was SGD.*'lr': 0.1.*now it is SGD.*'lr': 0.2"):
        other.load_state_dict(state)


def test_real_processes_resume_to_the_same_bits() -> None:
    def run(rank: int, world_size: int, stopped_at: int | None) -> list[dict[str, Tensor]]:
        def start() -> tuple[nn.Module, torch.optim.Optimizer, StreamingDiLoCo]:
            model = model_with_statistics(rank)
            optimizer = inner_optimizer("adamw", model)
            return model, optimizer, StreamingDiLoCo(model, inner_optimizers=[optimizer], **CHOICES)

        model, optimizer, engine = start()
        seen = []
        for step in range(1, STEPS + 1):
            train_step(model, optimizer, rank, step)
            engine.step()
            if step == stopped_at:
                saved = through_a_file([engine.state_dict(), optimizer.state_dict()])
                model, optimizer, engine = start()
                engine.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            seen.append({**{n: v.clone() for n, v in model.state_dict().items()}, **engine.outer_state_dict()})
        engine.finish()
        return [*seen, engine.outer_state_dict()]

    expected = run_ranks(run, 2, None)
    for stopped_at in (10, 12, 20):
        for rank, actual in enumerate(run_ranks(run, 2, stopped_at)):
            assert_same(actual, expected[rank])

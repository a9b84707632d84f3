"""The guard: groups that are left out of a mean for an unusual norm, the norms that it compares, and
its log.
"""

from functools import partial
from math import nan
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import Landing, OuterOptimizer, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import ErrorFeedback, Int2
from lightning_sdiloco.compression.sparse import Threshold
from lightning_sdiloco.engine.restart import restart_from
from tests import fits
from tests.engine.groups import MEAN, Groups, outer_state, through_a_file
from tests.ranks import run_processes, run_ranks
from tests.training import batch

EXACT = {
    "compression": "fp32",
    "sync_every": 1,
    "overlap_steps": 0,
    "fragments": [["*"]],
    **MEAN,
}


class Heads(nn.Module):
    """A trunk, and a head for each group; all groups hold copies of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 7)
        self.heads = nn.ModuleList(nn.Linear(7, 3) for _ in range(4))


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False))


@torch.no_grad()
def push(model: Any, length: float) -> None:
    """Moves the first layer, of four values, by a step of a length."""
    model[0].weight += length / 2


class Pushed:
    """Groups that a test moves."""

    def __init__(self, groups: int, **choices: Any) -> None:
        self.models = [two_layers() for _ in range(groups)]
        self.groups = SimulatedGroups(self.models, **{**EXACT, **choices})

    def step(self, *lengths: float) -> list[Landing]:
        """Moves every group by a step of its length; returns the landings in the first group."""
        for model, length in zip(self.models, lengths, strict=True):
            push(model, length)
        return self.groups.step()[0]


def loss_of_head(model: Heads, group: int, step: int) -> Tensor:
    """The loss of a group's head, in which the other heads have gradients of zero."""
    x, y = batch(group, step)
    outputs = torch.stack([head(model.trunk(x)) for head in model.heads])
    return nn.functional.mse_loss(outputs[group], y)


def test_four_groups_of_which_each_alone_trains_a_head_all_count_from_the_start() -> None:
    torch.manual_seed(0)
    models = [Heads() for _ in range(4)]
    fragments = [["trunk.*"], *([f"heads.{n}.*"] for n in range(4))]
    groups = SimulatedGroups(models, sync_every=5, overlap_steps=1, fragments=fragments)
    # Weight decay moves the heads that a group does not train.
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3) for model in models
    ]
    landings = []
    for step in range(60):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of_head(model, group, step).backward()
            optimizer.step()
        landings += groups.step()[0]
    first_norms = [landing.group_norms for landing in landings[:5] if landing.fragment > 0]
    ratios = [max(norms) / sorted(norms)[-2] for norms in first_norms]
    assert max(ratios) > 300
    assert {landing.counted for landing in landings} == {(0, 1, 2, 3)}


def outlying_after(*lengths: float) -> tuple[int, ...]:
    """The groups that the guard leaves out after four rounds of steps of length 1."""
    run = Pushed(2)
    for _ in range(4):
        run.step(1.0, 1.0)
    (landing,) = run.step(*lengths)
    return landing.outlying


def test_of_two_groups_near_the_threshold_none_is_left_out_if_both_have_grown() -> None:
    assert outlying_after(4.5, 5.5) == ()
    assert outlying_after(5.5, 4.5) == ()
    assert outlying_after(2.0, 9.5) == ()
    assert outlying_after(9.0, 100.0) == (1,)
    assert outlying_after(1.0, 5.5) == (1,)
    assert outlying_after(0.5, 5.5) == (1,)


def test_norms_survive_a_recut_and_a_choice_but_not_a_layer_that_was_never_trained() -> None:
    def run(rank: int, world_size: int) -> None:
        model = two_layers()
        engine = StreamingDiLoCo(model, **EXACT)

        def outlying(length: float) -> tuple[int, ...]:
            push(model, length if rank == 1 else 1.0)
            (landing,) = engine.step()
            return landing.outlying

        for _ in range(4):
            assert outlying(1.0) == ()
        model[1].requires_grad_(False)
        engine.recut()
        assert outlying(30.0) == (1,)
        assert outlying(30.0) == (1,)
        model[1].requires_grad_(True)
        engine.recut()
        assert outlying(300.0) == ()

    run_ranks(run, 2)


def state_with_a_norm_in_flight() -> list[Any]:
    run = Pushed(2, sync_every=2, overlap_steps=1)
    for _ in range(8):
        run.step(0.5, 0.5)
    engines = run.groups.engines
    assert engines[0].rounds.in_flight == (0,), "the fourth norm is on its way"
    return [[through_a_file(engine.state_dict())] for engine in engines]


def outlying_after_restart(groups: int, *fragments: list[str]) -> tuple[int, ...]:
    """The groups that the guard leaves out of the first landing of restarted rounds."""
    restart = restart_from(state_with_a_norm_in_flight(), Settings(**EXACT))
    run = Pushed(groups, fragments=list(fragments), sync_every=2)
    for engine in run.groups.engines:
        restart.begin(engine.rounds, engine.history)
    landings = run.step(1.0, 30.0, *[1.0] * (groups - 2))
    landings += run.step(*[0.0] * groups)
    (landing,) = landings
    assert landing.fragment == 0
    return landing.outlying


def test_norms_survive_a_restart_with_as_many_groups_and_the_flights_that_land_at_it() -> None:
    assert outlying_after_restart(2, ["*"]) == (1,)
    assert outlying_after_restart(2, ["0.*"], ["1.*"]) == (1,)
    assert outlying_after_restart(3, ["*"]) == ()


def test_the_log_says_once_for_each_event_which_group_is_left_out_and_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = OuterOptimizer(outlier_guard=5.0)
    run = Pushed(3, sync_every=2, fragments=[["0.*"], ["1.*"]], outer_optimizer=guard)

    def train(rounds: int, length: float) -> list[str]:
        """The log of some rounds in which the second group moves both layers that far."""
        caplog.clear()
        for _ in range(2 * rounds):
            for model, moved in zip(run.models, (1.0, length, 1.0), strict=True):
                for parameter in model.parameters():
                    parameter.data += moved / 4
            run.groups.step()
        return caplog.messages

    assert train(6, 1.0) == []
    (warning,) = train(3, 100.0)
    assert "worker group 1 is too long for outlier_guard (norms by group: " in warning
    assert train(7, 1.0) == []
    assert train(1, 1e4) == [], "that is the same event"
    assert train(10, 1.0) == []
    assert len(train(2, 1e5)) == 1
    assert train(12, 1.0) == []
    (warning,) = train(1, nan)
    assert "worker group 1 is not finite. The mean of fragment" in warning


def spoil_once(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    """Makes the weights of one group NaN, after one step."""
    if (batch_idx, self.global_rank) == (5, 1):
        self.net[0].weight.data.fill_(nan)


def spoiled(distribution: str, inner: str, seed: int) -> Any:
    return fits.module(distribution, on_train_batch_end=spoil_once)


def test_a_trainer_says_on_one_rank_which_group_is_left_out() -> None:
    def run(rank: int, world_size: int) -> list[str]:
        log = fits.said_by("lightning_sdiloco")
        choices = {"sync_every": 4, "overlap_steps": 2}
        fits.fit(rank, world_size, 2, 20, choices, make=spoiled)
        return [text for text in log if "excludes that group" in text]

    warnings, warnings_of_rank_1 = run_processes(run, 2)
    (warning,) = warnings
    assert "The outer gradient of worker group 1 is not finite" in warning
    assert warnings_of_rank_1 == []


class Feedback:
    """Four groups, and the parts of their error feedback after some rounds."""

    def __init__(self, part: str, choices: dict[str, Any]) -> None:
        defaults = {"sync_every": 2, "overlap_steps": 0, "mixing": 0.5, "fragments": [["*"]]}
        self.run = Groups(4, "sgd", **defaults, **choices)
        self.run.until(10)
        self.before = {name: self.values(name) for name in ("memory", part)}

    def values(self, part: str) -> list[Tensor]:
        return [outer_state(engine)[0][part].clone() for engine in self.run.engines]

    def changed(self, part: str) -> list[bool]:
        """True for the groups in which a part has changed."""
        pairs = zip(self.before[part], self.values(part), strict=True)
        return [not torch.equal(*pair) for pair in pairs]


def spoil(models: list[Any], moved: float) -> None:
    for parameter in models[1].parameters():
        parameter += moved


class Case(NamedTuple):
    """A part of the error feedback beside the memory.

    `changed` are the groups in which a round changes it if the second group does not count. The
    residual is the loss of the second shot, of the mean of the other groups.
    """

    part: str
    changed: list[bool]
    choices: dict[str, Any]


THRESHOLD = ErrorFeedback(Threshold(1 / 16, Int2(), every=1))
TWO_SHOTS = {"compression": "fp4+memory", "exchange": "two_shot"}
CASES = [
    Case("tuning", [True, False, True, True], {"compression": THRESHOLD}),
    Case("residual", [True, True, True, True], TWO_SHOTS),
]


@pytest.mark.parametrize("moved", [None, 1e4, nan], ids=["idle", "too long", "not finite"])
@pytest.mark.parametrize("case", CASES, ids=["tuning", "residual"])
def test_a_group_that_does_not_count_keeps_its_error_feedback(
    case: Case, moved: float | None
) -> None:
    feedback = Feedback(case.part, case.choices)
    idle = [1] if moved is None else []
    feedback.run.step(idle)
    (landing,) = feedback.run.step(idle, partial(spoil, moved=moved or 0.0))
    assert landing.counted == (0, 2, 3)
    assert feedback.changed("memory") == [True, False, True, True]
    assert feedback.changed(case.part) == case.changed


@pytest.mark.parametrize("case", CASES, ids=["tuning", "residual"])
def test_all_groups_keep_their_error_feedback_when_none_counts(case: Case) -> None:
    feedback = Feedback(case.part, case.choices)
    feedback.run.step(range(4))
    (landing,) = feedback.run.step(range(4))
    assert landing.counted == ()
    assert not any(feedback.changed("memory") + feedback.changed(case.part))

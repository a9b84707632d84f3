"""The guard: who is left out of a mean for a norm that is unusual, what that is measured by, and
what the log says.
"""

from functools import partial
from typing import Any

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

EXACT: dict[str, Any] = {
    "compression": "fp32",
    "sync_every": 1,
    "overlap_steps": 0,
    "fragments": [["*"]],
    **MEAN,
}


class Heads(nn.Module):
    """A trunk, and a head for each group, of which the others hold a copy."""

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


def pushed(groups: SimulatedGroups, models: list[nn.Sequential], *lengths: float) -> list[Landing]:
    """Moves every group by a step of its own length; returns what landed then in the first."""
    for model, length in zip(models, lengths, strict=True):
        push(model, length)
    return groups.step()[0]


def test_four_groups_of_which_each_alone_trains_a_head_all_count_from_the_start() -> None:
    torch.manual_seed(0)
    models = [Heads() for _ in range(4)]
    fragments = [["trunk.*"], *([f"heads.{n}.*"] for n in range(4))]
    groups = SimulatedGroups(models, sync_every=5, overlap_steps=1, fragments=fragments)
    # Weight decay moves the heads that a group does not train.
    inner = [torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3) for model in models]
    landings = list[Landing]()
    for step in range(60):
        for group, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            x, y = batch(group, step)
            optimizer.zero_grad()
            outputs = torch.stack([head(model.trunk(x)) for head in model.heads])
            nn.functional.mse_loss(outputs[group], y).backward()
            optimizer.step()
        landings += groups.step()[0]
    first = [landing.group_norms for landing in landings[:5] if landing.fragment > 0]
    assert max(max(norms) / sorted(norms)[-2] for norms in first) > 300
    assert {landing.counted for landing in landings} == {(0, 1, 2, 3)}


def test_of_two_groups_near_the_threshold_none_is_left_out_if_both_have_grown() -> None:
    for lengths, outlying in (
        ((9.5, 10.5), ()),
        ((10.5, 9.5), ()),
        ((2.0, 15.0), ()),
        ((9.0, 100.0), (1,)),
        ((1.0, 10.5), (1,)),
        ((0.5, 10.5), (1,)),
    ):
        models = [two_layers() for _ in range(2)]
        groups = SimulatedGroups(models, **EXACT)
        for _ in range(4):
            pushed(groups, models, 1.0, 1.0)
        (landing,) = pushed(groups, models, *lengths)
        assert landing.outlying == outlying, lengths


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


def restarted(
    states: list[Any], groups: int, **choices: Any
) -> tuple[SimulatedGroups, list[nn.Sequential]]:
    """New groups that go on from the outer parameters of others."""
    models = [two_layers() for _ in range(groups)]
    made = SimulatedGroups(models, **{**EXACT, **choices})
    restart = restart_from(states, Settings(**EXACT))
    for engine in made.engines:
        engine.restart(restart)
    return made, models


def test_norms_survive_a_restart_with_as_many_groups_and_the_flights_that_land_at_it() -> None:
    models = [two_layers() for _ in range(2)]
    groups = SimulatedGroups(models, **{**EXACT, "sync_every": 2, "overlap_steps": 1})
    for _ in range(4):
        pushed(groups, models, 0.5, 0.5)
        pushed(groups, models, 0.5, 0.5)
    assert groups.engines[0].in_flight == (0,), "the fourth norm is on its way"
    states = [[through_a_file(engine.state_dict())] for engine in groups.engines]
    for number, fragments, outlying in (
        (2, [["*"]], (1,)),
        (2, [["0.*"], ["1.*"]], (1,)),
        (3, [["*"]], ()),
    ):
        after, new_models = restarted(states, number, fragments=fragments, sync_every=2)
        lengths = [1.0, 30.0, *[1.0] * (number - 2)]
        (landing,) = pushed(after, new_models, *lengths) + pushed(
            after, new_models, *[0.0] * number
        )
        assert (landing.fragment, landing.outlying) == (0, outlying)


def test_the_log_says_once_for_each_event_which_group_is_left_out_and_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = [two_layers() for _ in range(3)]
    choices = {**EXACT, "sync_every": 2, "fragments": [["0.*"], ["1.*"]]}
    groups = SimulatedGroups(models, outer_optimizer=OuterOptimizer(outlier_guard=5.0), **choices)

    def train(rounds: int, length: float) -> list[str]:
        """What is said in some rounds in which the second group moves both layers that far."""
        caplog.clear()
        for _ in range(2 * rounds):
            for group, model in enumerate(models):
                for layer in model:
                    layer.weight.data += (length if group == 1 else 1.0) / 4
            groups.step()
        return caplog.messages

    assert train(6, 1.0) == []
    (said,) = train(3, 100.0)
    assert "worker group 1 is too long for outlier_guard (norms by group: " in said
    assert train(7, 1.0) + train(1, 1e4) == [], "that is the same event"
    assert train(10, 1.0) == []
    assert len(train(2, 1e5)) == 1
    assert train(12, 1.0) == []
    (said,) = train(1, float("nan"))
    assert "worker group 1 is not finite: the mean of fragment" in said


def spoiling(step: int, rank: int, distribution: str, **choices: Any) -> Any:
    """A module whose weights become NaN in one group, once."""

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx, self.global_rank) == (step, rank):
            self.net[0].weight.data.fill_(float("nan"))

    return fits.module(distribution, on_train_batch_end=on_train_batch_end, **choices)


def test_a_trainer_says_on_one_rank_which_group_is_left_out() -> None:
    def run(rank: int, world_size: int) -> list[str]:
        said = fits.said_by("lightning_sdiloco")
        make = partial(spoiling, 5, 1)
        fits.fit(
            rank,
            world_size,
            2,
            20,
            {"sync_every": 4, "overlap_steps": 2},
            make=lambda d, i, seed: make(d),
        )
        return [text for text in said if "leaves that group out" in text]

    said, *others = run_processes(run, 2)
    assert len(said) == 1
    assert "The outer gradient of worker group 1 is not finite" in said[0]
    assert others == [[]]


def kept(run: Groups, name: str) -> list[Tensor]:
    """What every group keeps of earlier launches, by group."""
    return [outer_state(engine)[0][name].clone() for engine in run.engines]


def changed(run: Groups, before: dict[str, list[Tensor]]) -> dict[str, list[bool]]:
    """In which groups what is kept has other bits than before, by name."""
    return {
        name: [not torch.equal(*pair) for pair in zip(values, kept(run, name), strict=True)]
        for name, values in before.items()
    }


def spoil(models: list[Any], moved: float) -> None:
    for parameter in models[1].parameters():
        parameter += moved


# The name of what is kept beside the memory, and in which groups a round changes it if the second
# does not count: the residual is what the second shot lost of the mean, which is that of the
# others.
KEPT: list[tuple[str, list[bool], dict[str, Any]]] = [
    (
        "tuning",
        [True, False, True, True],
        {"compression": ErrorFeedback(Threshold(1 / 16, Int2(), every=1))},
    ),
    ("residual", [True, True, True, True], {"compression": "fp4+memory", "exchange": "two_shot"}),
]


@pytest.mark.parametrize("moved", [None, 1e4, float("nan")], ids=["idle", "too long", "not finite"])
@pytest.mark.parametrize(("name", "expected", "choices"), KEPT, ids=["tuning", "residual"])
def test_a_group_that_does_not_count_keeps_its_error_feedback(
    name: str, expected: list[bool], choices: dict[str, Any], moved: float | None
) -> None:
    run = Groups(4, "sgd", sync_every=2, overlap_steps=0, mixing=0.5, fragments=[["*"]], **choices)
    run.until(10)
    before = {kind: kept(run, kind) for kind in ("memory", name)}
    idle = [1] if moved is None else []
    run.step(idle)
    (landing,) = run.step(idle, partial(spoil, moved=moved or 0.0))
    assert landing.counted == (0, 2, 3)
    assert changed(run, before) == {"memory": [True, False, True, True], name: expected}


@pytest.mark.parametrize(
    ("name", "choices"), [(name, choices) for name, _, choices in KEPT], ids=["tuning", "residual"]
)
def test_all_groups_keep_their_error_feedback_when_none_counts(
    name: str, choices: dict[str, Any]
) -> None:
    run = Groups(4, "sgd", sync_every=2, overlap_steps=0, mixing=0.5, fragments=[["*"]], **choices)
    run.until(10)
    before = {kind: kept(run, kind) for kind in ("memory", name)}
    run.step(range(4))
    (landing,) = run.step(range(4))
    assert landing.counted == ()
    assert changed(run, before) == {"memory": [False] * 4, name: [False] * 4}

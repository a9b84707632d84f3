"""Fits whose hooks replace submodules between epochs: the baseline of a policy, or layers of
another width.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests import fits
from tests.engine.groups import Values, copied, unlike
from tests.fits import LIGHTNING, SHORT, said_by, saving
from tests.ranks import run_processes
from tests.training import mlp

EPOCHS = 3
BATCHES = 6


class Policy(nn.Module):
    """A network that trains against a copy of itself, as policies do against their baseline."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = mlp(seed)
        self.baseline = deepcopy(self.net)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            expected = self.baseline(x)
        return self.net(x) + 0.1 * expected


def replace_baseline(module: Any) -> None:
    module.net.baseline = deepcopy(module.net.net)


def widen(module: Any) -> None:
    """Gives two layers another width, with a new optimizer."""
    torch.manual_seed(module.global_rank)
    width = 9 + module.current_epoch
    module.net.net[4] = nn.Linear(7, width)
    module.net.net[6] = nn.Linear(width, 3)
    module.trainer.strategy.setup_optimizers(module.trainer)


def policy(distribution: str, inner: str, seed: int = 0, **hooks: Callable[[Any], None]) -> Any:
    """A module whose hooks change it after the first epoch."""

    def configure_optimizers(self: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.net.parameters(), lr=0.01)

    members = {"configure_optimizers": configure_optimizers, **hooks}
    return fits.module(distribution, inner, seed, net=Policy(seed), **members)


class Fitted(NamedTuple):
    """A fit of this rank: the values of its model at the end, and what it has reported."""

    values: Values
    report: dict[str, float]
    messages: list[str]

    def messages_that_begin(self, start: str) -> list[str]:
        return [text for text in self.messages if text.startswith(start)]

    @property
    def cuts(self) -> list[str]:
        return self.messages_that_begin("The model is divided again")

    @property
    def missing_optimizers(self) -> list[str]:
        return self.messages_that_begin("No inner optimizer")


def fitted(
    rank: int,
    world_size: int,
    path: Path | None = None,
    callbacks: Any = (),
    validation: Any = None,
    **hooks: Callable[[Any], None],
) -> Fitted:
    messages = said_by("lightning_sdiloco.engine.recut", "lightning_sdiloco.lightning.fit")
    arguments = {
        "max_epochs": EPOCHS,
        "limit_train_batches": BATCHES,
        "callbacks": list(callbacks),
        "enable_checkpointing": True,
        "num_sanity_val_steps": 0,
    }
    trained = fits.fit(
        rank,
        world_size,
        2,
        -1,
        {**SHORT, "ddp_kwargs": {"find_unused_parameters": True}},
        inspect=lambda trainer, module: copied(module.state_dict()),
        trainer_choices=arguments,
        make=partial(policy, **hooks),
        validation=validation,
        resume=path,
    )
    return Fitted(trained["inspected"], trained["report"], [*messages])


def fit_ranks(ranks: int = 2, **choices: Any) -> list[Fitted]:
    return list(run_processes(partial(fitted, **choices), ranks))


def errors_of_ranks(**hooks: Any) -> list[str]:
    """The errors of two ranks that both fail."""
    errors = run_processes(partial(fitted, **hooks), 2, expect_failure=True)
    return list(errors.values())


def assert_alike(ranks: list[Fitted]) -> None:
    for rank in ranks:
        assert unlike(rank.values, ranks[0].values) == []
        assert rank.report["landings"] == ranks[0].report["landings"] > 0


def part_of(values: Values, prefix: str) -> Values:
    names = [name for name in values if name.startswith(prefix)]
    return {name.removeprefix(prefix): values[name] for name in names}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_baseline_that_is_replaced_after_epochs_trains_saves_and_resumes_exactly(
    ranks: int, tmp_path: Path
) -> None:
    saves = saving(LIGHTNING, tmp_path, filename="{epoch}", save_on_train_epoch_end=True)
    replacing = partial(fitted, on_train_epoch_end=replace_baseline)
    cases = {"unsaved": replacing, "saved": partial(replacing, callbacks=saves)}
    ends = [f"epoch={epoch}" for epoch in range(EPOCHS - 1)]
    for end in ends:
        cases[end] = partial(replacing, path=tmp_path / f"{end}.ckpt")
    played = fits.play(ranks, cases)
    uninterrupted = played["saved"]
    first = uninterrupted[0]
    assert_alike(uninterrupted)
    assert unlike(played["unsaved"][0].values, first.values) == [], "saving changes nothing"
    baseline = part_of(first.values, "net.baseline.")
    assert unlike(baseline, part_of(first.values, "net.net.")) == []
    assert len(first.cuts) == EPOCHS - 1
    for cut in first.cuts:
        assert "rounds continue. Since the last division, 8 parameters have been replaced" in cut
    assert first.missing_optimizers == [], "none stepped the baseline before"
    for end in ends:
        for rank, expected in zip(played[end], uninterrupted, strict=True):
            assert unlike(rank.values, expected.values) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_of_another_width_train_in_all_ranks_alike(ranks: int) -> None:
    def widen_later(module: Any) -> None:
        if module.current_epoch:
            widen(module)

    trained = fit_ranks(ranks, on_train_epoch_start=widen_later)
    first = trained[0]
    assert_alike(trained)
    assert first.values["net.net.4.weight"].shape == (9 + EPOCHS - 1, 7)
    assert len(first.cuts) == EPOCHS - 1
    for cut in first.cuts:
        assert "4 parameters have been replaced or reshaped, such as 'net.net.4.weight'" in cut
    assert first.missing_optimizers == []


def test_a_stale_optimizer_is_named() -> None:
    def replace_head(module: Any) -> None:
        if module.current_epoch == 1:
            module.net.net[6] = nn.Linear(9, 3)

    first, second = fit_ranks(on_train_epoch_start=replace_head)
    (warning,) = first.missing_optimizers
    assert "2 of the new parameters, such as 'net.net.6.bias'" in warning
    assert second.missing_optimizers == [], "once"


def test_a_baseline_that_an_optimizer_held_and_never_stepped_needs_none() -> None:
    def optimize_all(module: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=0.01)

    trained = fit_ranks(on_train_epoch_end=replace_baseline, configure_optimizers=optimize_all)
    assert_alike(trained)
    assert len(trained[0].cuts) == EPOCHS - 1
    assert trained[0].missing_optimizers == []


def test_a_fit_stopped_after_its_baseline_was_replaced_ends_with_one_model_for_all() -> None:
    def replace_and_stop(module: Any) -> None:
        replace_baseline(module)
        module.trainer.should_stop = module.current_epoch == 1

    assert_alike(fit_ranks(on_train_epoch_end=replace_and_stop))


def test_a_baseline_that_one_rank_alone_replaced_is_that_of_group_0_everywhere() -> None:
    def replace_in_rank_1(module: Any) -> None:
        if module.global_rank == 1 and module.current_epoch + 1 < EPOCHS:
            replace_baseline(module)

    assert_alike(fit_ranks(on_train_epoch_end=replace_in_rank_1))


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
def test_a_layer_that_one_rank_alone_widened_is_refused_on_all_with_its_name(hook: str) -> None:
    def widen_in_rank_1(module: Any) -> None:
        if module.global_rank == 1:
            module.net.net[6] = nn.Linear(9, 4)
        module.trainer.should_stop = True

    errors = errors_of_ranks(**{hook: widen_in_rank_1})
    assert len(errors) == 2
    for error in errors:
        assert "The model differs between ranks: net.net.6.weight is (3, 9)" in error


@pytest.mark.parametrize("rank_alone", [False, True])
def test_parameters_replaced_in_the_middle_of_an_epoch_are_refused(rank_alone: bool) -> None:
    def replace_in_batch_2(module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 2 and (module.global_rank == 1 or not rank_alone):
            replace_baseline(module)

    words = (
        "Since the model was divided into fragments, 8 parameters have been replaced or reshaped,"
        " such as"
    )
    errors = errors_of_ranks(on_train_batch_end=replace_in_batch_2)
    assert any(
        words in error and "in on_train_epoch_start at the latest" in error for error in errors
    )


def test_a_checkpoint_of_a_validation_that_replaced_the_baseline_warns(tmp_path: Path) -> None:
    trained = fit_ranks(
        callbacks=saving(LIGHTNING, tmp_path, filename="{epoch}", save_on_train_epoch_end=False),
        validation=fits.SomeBatches(0, 2),
        on_validation_epoch_end=replace_baseline,
        validation_step=lambda self, batch, index: None,
    )
    assert_alike(trained)
    words = "This checkpoint was saved after parameters were replaced"
    assert trained[0].messages_that_begin(words)

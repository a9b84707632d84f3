"""Fits whose hooks replace submodules between epochs: the baseline of a policy, or layers of
another width.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

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


def fitted(
    rank: int,
    world_size: int,
    path: Path | None = None,
    callbacks: Any = (),
    validation: Any = None,
    **hooks: Callable[[Any], None],
) -> Any:
    said = said_by("lightning_sdiloco.engine.recut", "lightning_sdiloco.lightning.fit")
    choices = {"max_epochs": EPOCHS, "limit_train_batches": BATCHES, "callbacks": list(callbacks)}
    choices |= {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    made = fits.fit(
        rank,
        world_size,
        2,
        -1,
        {**SHORT, "ddp_kwargs": {"find_unused_parameters": True}},
        inspect=lambda trainer, module: copied(module.state_dict()),
        trainer_choices=choices,
        make=partial(policy, **hooks),
        validation=validation,
        resume=path,
    )
    return made["inspected"], made["report"], said


def texts(said: list[str], start: str) -> list[str]:
    return [text for text in said if text.startswith(start)]


def require_alike(ranks: list[tuple[Values, dict[str, float], list[str]]]) -> None:
    for values, report, _ in ranks:
        assert unlike(values, ranks[0][0]) == []
        assert report["landings"] == ranks[0][1]["landings"] > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_baseline_that_is_replaced_after_epochs_trains_saves_and_resumes_exactly(
    ranks: int, tmp_path: Path
) -> None:
    saves = partial(saving, LIGHTNING, tmp_path, filename="{epoch}", save_on_train_epoch_end=True)
    whole = run_processes(
        partial(fitted, callbacks=saves(), on_train_epoch_end=replace_baseline), ranks
    )
    require_alike(whole)
    unsaved = run_processes(partial(fitted, on_train_epoch_end=replace_baseline), ranks)
    assert unlike(unsaved[0][0], whole[0][0]) == [], "saving changes nothing"
    values, _, said = whole[0]
    assert (
        unlike(
            {name: own for name, own in values.items() if name.startswith("net.baseline.")},
            {
                name.replace(".net.", ".baseline."): own
                for name, own in values.items()
                if name.startswith("net.net.")
            },
        )
        == []
    )
    cuts = texts(said, "The model is cut again")
    assert len(cuts) == EPOCHS - 1
    assert all(
        "rounds continue: since the last cut, 8 parameters have been replaced" in cut
        for cut in cuts
    )
    assert texts(said, "No inner optimizer") == [], "none stepped the baseline before"
    for epoch in range(EPOCHS - 1):
        path = tmp_path / f"epoch={epoch}.ckpt"
        resumed = run_processes(
            partial(fitted, path=path, on_train_epoch_end=replace_baseline), ranks
        )
        assert [
            unlike(again[0], before[0]) for again, before in zip(resumed, whole, strict=True)
        ] == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_of_another_width_train_in_all_ranks_alike(ranks: int) -> None:
    def start(module: Any) -> None:
        if module.current_epoch:
            widen(module)

    found = run_processes(partial(fitted, on_train_epoch_start=start), ranks)
    require_alike(found)
    values, _, said = found[0]
    assert values["net.net.4.weight"].shape == (9 + EPOCHS - 1, 7)
    cuts = texts(said, "The model is cut again")
    assert len(cuts) == EPOCHS - 1
    assert all(
        "4 parameters have been replaced or reshaped, such as 'net.net.4.weight'" in cut
        for cut in cuts
    )
    assert texts(said, "No inner optimizer") == []


def test_a_stale_optimizer_is_named() -> None:
    def head(module: Any) -> None:
        if module.current_epoch == 1:
            module.net.net[6] = nn.Linear(9, 3)

    found = run_processes(partial(fitted, on_train_epoch_start=head), 2)
    (told,) = texts(found[0][2], "No inner optimizer")
    assert "2 of the new parameters, such as 'net.net.6.bias'" in told
    assert texts(found[1][2], "No inner optimizer") == [], "once"


def test_a_baseline_that_an_optimizer_held_and_never_stepped_needs_none() -> None:
    def configure_optimizers(module: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=0.01)

    hooks = {"on_train_epoch_end": replace_baseline, "configure_optimizers": configure_optimizers}
    found = run_processes(partial(fitted, **hooks), 2)
    require_alike(found)
    assert len(texts(found[0][2], "The model is cut again")) == EPOCHS - 1
    assert texts(found[0][2], "No inner optimizer") == []


def test_a_fit_stopped_after_its_baseline_was_replaced_ends_with_one_model_for_all() -> None:
    def stop(module: Any) -> None:
        replace_baseline(module)
        module.trainer.should_stop = module.current_epoch == 1

    require_alike(run_processes(partial(fitted, on_train_epoch_end=stop), 2))


def test_a_baseline_that_one_rank_alone_replaced_is_that_of_group_0_everywhere() -> None:
    def epoch_end(module: Any) -> None:
        if module.global_rank == 1 and module.current_epoch + 1 < EPOCHS:
            replace_baseline(module)

    require_alike(run_processes(partial(fitted, on_train_epoch_end=epoch_end), 2))


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
def test_a_layer_that_one_rank_alone_widened_is_refused_on_all_with_its_name(hook: str) -> None:
    def change(module: Any) -> None:
        if module.global_rank == 1:
            module.net.net[6] = nn.Linear(9, 4)
        module.trainer.should_stop = True

    errors = run_processes(partial(fitted, **{hook: change}), 2, expect_failure=True)
    assert len(errors) == 2
    assert all(
        "The model differs between ranks: net.net.6.weight is (3, 9)" in error
        for error in errors.values()
    )


@pytest.mark.parametrize("rank_alone", [False, True])
def test_parameters_replaced_in_the_middle_of_an_epoch_are_refused(rank_alone: bool) -> None:
    def batch_end(module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 2 and (module.global_rank == 1 or not rank_alone):
            replace_baseline(module)

    errors = run_processes(partial(fitted, on_train_batch_end=batch_end), 2, expect_failure=True)
    told = "Since the model was cut into fragments, 8 parameters have been replaced or reshaped, such as"
    assert any(
        told in error and "in on_train_epoch_start at the latest" in error
        for error in errors.values()
    )


def test_a_checkpoint_of_a_validation_that_replaced_the_baseline_warns(tmp_path: Path) -> None:
    replaces: dict[str, Any] = {"on_validation_epoch_end": replace_baseline}
    replaces["validation_step"] = lambda self, batch, index: None
    callback = saving(LIGHTNING, tmp_path, filename="{epoch}", save_on_train_epoch_end=False)
    found = run_processes(
        partial(fitted, callbacks=callback, validation=fits.SomeBatches(0, 2), **replaces), 2
    )
    require_alike(found)
    assert texts(found[0][2], "A checkpoint is saved after parameters were replaced")

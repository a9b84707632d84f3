"""Lightning's own test models, as its users know them, with nothing but the strategy changed."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.test_checkpoint import assert_same, saving
from tests.ranks import run_processes


def boring(distribution: str) -> Any:
    return importlib.import_module(f"{distribution}.demos.boring_classes")


def trainer(distribution: str, world_size: int, groups: int, **choices: Any) -> Any:
    settings: dict[str, Any] = {"sync_every": 5, "overlap_steps": 2, "fragments": "strided:1"}
    strategy = fits.strategy(distribution, worker_groups=groups, **settings)
    return fits.trainer(distribution, strategy=strategy, devices=world_size, **choices)


@pytest.mark.parametrize(
    ("distribution", "data", "world_size", "groups"),
    [
        ("pytorch_lightning", "BoringDataModule", 2, 2),
        (LIGHTNING, "BoringDataModuleNoLen", 4, 2),
    ],
)
def test_a_boring_model_is_fitted_validated_tested_and_used(
    distribution: str, data: str, world_size: int, groups: int
) -> None:
    def run(rank: int, world_size: int) -> dict[str, Tensor]:
        model = boring(distribution).BoringModel()
        module = getattr(boring(distribution), data)()
        runner = trainer(distribution, world_size, groups, max_epochs=2, limit_train_batches=12, limit_val_batches=3)
        runner.fit(model, module)
        assert runner.strategy.report()["inner_steps"] == 24
        weights = {name: values.clone() for name, values in model.state_dict().items()}
        runner.validate(model, module)
        runner.test(model, module)
        assert len(runner.predict(model, module)) > 0
        assert_same(dict(model.state_dict()), weights)
        return weights

    ranks = run_processes(run, world_size)
    for weights in ranks:
        assert_same(weights, ranks[0])


def language_model(distribution: str, seed: int) -> Any:
    """Lightning's demo transformer, small, on numbers that follow a rule."""
    transformer = importlib.import_module(f"{distribution}.demos.transformer").Transformer
    base = importlib.import_module(distribution).LightningModule

    class LanguageModel(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.model = transformer(vocab_size=16, ninp=8, nhead=2, nhid=8, nlayers=2)
            self.losses: list[float] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self._loss(batch)
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.log("loss", self._loss(batch), sync_dist=True)

        def _loss(self, batch: Tensor) -> Tensor:
            inputs, targets = batch[:, :-1], batch[:, 1:]
            return nn.functional.nll_loss(self.model(inputs, targets), targets.reshape(-1))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    return LanguageModel()


class Sequences:
    """Batches of a rank; a loader that can be taken up again in the middle, and starts anew after its end."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length, self.step = rank, length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        self.step %= self.length
        while self.step < self.length:
            self.step += 1
            start = torch.arange(4).unsqueeze(1) * (self.rank + 1) + self.step
            yield (start + torch.arange(9)) % 16

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@pytest.mark.parametrize(("world_size", "groups", "distribution"), [(4, 2, "pytorch_lightning")])
def test_a_small_transformer_is_trained_and_goes_on_from_the_middle_of_an_epoch(
    distribution: str, world_size: int, groups: int, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int, callbacks: list[Any], resume: str | None) -> dict[str, Any]:
        model = language_model(distribution, seed=rank)
        saves = {"callbacks": callbacks, "enable_checkpointing": bool(callbacks)}
        runner = trainer(distribution, world_size, groups, max_epochs=3, **saves)
        runner.fit(model, Sequences(rank, 16), Sequences(100, 2), ckpt_path=resume)
        return {
            "weights": {name: values.clone() for name, values in model.state_dict().items()},
            "losses": model.losses,
            "validated": float(runner.callback_metrics["loss"]),
        }

    plain = run_processes(run, world_size, saving(distribution, tmp_path, every_n_train_steps=7), None)
    resumed = run_processes(run, world_size, [], str(tmp_path / "step=21.ckpt"))
    for one, other in zip(resumed, plain, strict=True):
        assert_same(one["weights"], other["weights"])
        assert one["losses"] == other["losses"][21:]
        assert one["validated"] == other["validated"] == plain[0]["validated"]
        assert_same(one["weights"], plain[0]["weights"])
        assert sum(other["losses"][-5:]) < sum(other["losses"][:5]), "it learns"

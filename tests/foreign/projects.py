"""Projects that nobody here wrote: how their users fit, validate and predict, in the projects' own words.

Each is imported by its own function: one that is not installed keeps none of the others from running.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytorch_lightning as old
import torch
from lightning import pytorch as new
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

HALF = "half.ckpt"


@dataclass
class Trial:
    """One fit of a project in a rank: what it is told, and what it finds."""

    strategy: str  # the name in the one line
    folder: Path  # for checkpoints and logs of this fit
    resume: Path | None = None  # a checkpoint to go on from
    found: dict[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Trial":
        return self  # some projects copy their callbacks, and what those find is wanted here

    def trainer(self, distribution: Any, monitor: str, half: int = 2) -> dict[str, Any]:
        """The arguments that every Trainer gets: a callback writes down the fit, and the losses of its validations by
        name; it saves a checkpoint at the end of one of these, counted from 1."""
        return {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": self.strategy,
            "callbacks": [type("Probe", (_Probe, distribution.Callback), {})(self, monitor, half)],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(self.folder),
        }

    def run(self, trainer: Any, model: Any, train: Any, held_out: Any) -> None:
        """Fits, validates and predicts with Lightning's own calls."""
        # Projects keep objects of their own in checkpoints.
        trainer.fit(model, train, held_out, ckpt_path=self.resume, weights_only=False)
        self.found["validated"] = sorted(trainer.validate(model, held_out)[0])
        batches = trainer.predict(model, held_out)
        self.found["predictions"] = sum(len(each) if isinstance(each, Tensor) else len(each[0]) for each in batches)


class _Probe:
    def __init__(self, trial: Trial, monitor: str, half: int) -> None:
        self.trial, self.monitor, self.half, self.validations = trial, monitor, half, 0
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.monitor in trainer.callback_metrics:
            self.losses.append(float(trainer.callback_metrics[self.monitor]))
        # Where ModelCheckpoint saves. Elsewhere Lightning itself may go on with another epoch's data, with DDP too.
        self.validations += not trainer.sanity_checking
        if self.validations == self.half and self.trial.resume is None:
            trainer.save_checkpoint(self.trial.folder / HALF)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        digest = hashlib.sha256()
        for name, values in module.state_dict().items():
            if isinstance(values, Tensor):
                digest.update(name.encode() + bytes(values.detach().cpu().contiguous().flatten().view(torch.uint8)))
        self.trial.found |= {
            "global_step": trainer.global_step,
            "keys": sorted(trainer.callback_metrics),
            "losses": self.losses,
            "parameters": sum(p.numel() for p in module.parameters()),
            "digest": digest.hexdigest(),
            "strategy": type(trainer.strategy).__name__,
        }


def sines(length: int, series: int, noise: float = 0.0) -> dict[str, Any]:
    """Columns of a table: sines of different phases."""
    time, which = np.tile(np.arange(length), series), np.repeat(np.arange(series), length)
    values = 5 + np.sin(time / 4 + which) + noise * np.random.default_rng(0).normal(size=len(time))
    return {"time": time, "series": which, "value": values.astype("float32")}


def pytorch_forecasting(trial: Trial) -> None:
    """A temporal fusion transformer, whose loss is a torchmetrics metric in the hyperparameters."""
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    new.seed_everything(0)
    data = pd.DataFrame(sines(60, 16, noise=0.1))
    data["series"] = data.series.astype(str)
    train = TimeSeriesDataSet(
        data[data.time < 54],
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=24,
        max_prediction_length=6,
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    held_out = TimeSeriesDataSet.from_dataset(train, data, predict=True, stop_randomization=True)
    loaders = [
        part.to_dataloader(train=i == 0, batch_size=8, num_workers=0) for i, part in enumerate((train, held_out))
    ]
    model = TemporalFusionTransformer.from_dataset(
        train, learning_rate=0.01, hidden_size=48, attention_head_size=2, dropout=0.1, loss=QuantileLoss()
    )
    choices = trial.trainer(new, "val_loss")
    trainer = new.Trainer(**choices, max_epochs=3, limit_train_batches=24, gradient_clip_val=0.1)
    trainer.fit(model, *loaders, ckpt_path=trial.resume, weights_only=False)
    trial.found["validated"] = sorted(trainer.validate(model, loaders[1])[0])
    del choices["callbacks"]
    trial.found["predictions"] = len(model.predict(loaders[1], trainer_kwargs=choices))


def chemprop(trial: Trial) -> None:
    """A message passing network over molecules, with BatchNorm and torchmetrics in the hyperparameters."""
    from chemprop import data, featurizers, models
    from chemprop import nn as layers

    def molecules(count: int, seed: int) -> Any:
        """Chains of known pieces; the target is their number of carbon atoms."""
        generator, atoms = np.random.default_rng(seed), ("C", "CC", "CCO", "c1ccccc1", "C(=O)O", "CN", "C1CCCCC1")
        smiles = ["".join(generator.choice(atoms, size=generator.integers(2, 5))) for _ in range(count)]
        points = [data.MoleculeDatapoint.from_smi(text, np.array([text.upper().count("C") / 10.0])) for text in smiles]
        part = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
        return data.build_dataloader(part, batch_size=8, num_workers=0, shuffle=seed == 0)

    new.seed_everything(0)
    metrics, regression = [layers.metrics.RMSE(), layers.metrics.MAE()], layers.RegressionFFN()
    model = models.MPNN(
        layers.BondMessagePassing(), layers.MeanAggregation(), regression, batch_norm=True, metrics=metrics
    )
    trainer = new.Trainer(**trial.trainer(new, "val_loss"), max_epochs=4)
    trial.run(trainer, model, molecules(320, 0), molecules(64, 1))


def darts(trial: Trial, with_metrics: bool = False) -> None:
    """N-BEATS, which deep-copies its modules and makes its own Trainer; metrics go into the hyperparameters."""
    from darts import TimeSeries
    from darts.models import NBEATSModel
    from torchmetrics import MeanAbsoluteError, MetricCollection

    series = [TimeSeries.from_values(values) for values in sines(160, 8)["value"].reshape(8, 160)]
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=6,
        num_stacks=2,
        num_blocks=2,
        layer_widths=96,
        n_epochs=4,
        batch_size=16,
        random_state=0,
        torch_metrics=MetricCollection([MeanAbsoluteError()]) if with_metrics else None,
        pl_trainer_kwargs=trial.trainer(old, "val_loss"),
        work_dir=str(trial.folder),
    )
    model.load_ckpt_path = trial.resume and str(trial.resume)
    model.fit([part[:-24] for part in series], val_series=[part[-60:] for part in series])
    trial.found["predictions"] = sum(len(part) for part in model.predict(6, series=series))


class Series(list[dict[str, Any]]):
    """Series of which each pass draws the same windows, others on each rank, and makes one batch of them.

    Lightning draws a batch that nobody trains on when it resumes at the end of an epoch, with DDP too, and a loader
    without a length cannot be told where to go on.
    """

    def __iter__(self) -> Iterator[dict[str, Any]]:
        np.random.seed(int(os.environ["RANK"]))
        return super().__iter__()


def gluonts(trial: Trial) -> None:
    """DeepAR, whose loaders have no length and draw windows at random."""
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import DeepAREstimator
    from gluonts.transform.sampler import NumInstanceSampler

    new.seed_everything(0)
    targets = sines(200, 16)["value"].reshape(16, 200)
    data = Series(ListDataset([{"start": "2024-01-01", "target": target} for target in targets], freq="h"))
    estimator = DeepAREstimator(
        freq="h",
        prediction_length=12,
        hidden_size=96,
        num_layers=2,
        batch_size=16,
        num_batches_per_epoch=20,
        train_sampler=NumInstanceSampler(N=1, min_future=12),
        trainer_kwargs={**trial.trainer(new, "val_loss"), "max_epochs": 4},
    )
    predictor = estimator.train(data, validation_data=data, ckpt_path=trial.resume)
    trial.found["predictions"] = len(list(predictor.predict(data)))


def scvi(trial: Trial) -> None:
    """A variational autoencoder of counts, which makes its own Trainer and looks for "ddp" in the name."""
    import anndata
    import scvi

    scvi.settings.seed = 0
    generator = np.random.default_rng(0)
    rates = generator.gamma(1.0, 2.0, size=(4, 200))  # cells of four kinds
    data = anndata.AnnData(generator.poisson(rates[np.arange(400) % 4]).astype("float32"))
    scvi.model.SCVI.setup_anndata(data)
    model = scvi.model.SCVI(data, n_hidden=128)
    trainer = trial.trainer(new, "validation_loss")
    trainer["strategy"] = trial.strategy.removesuffix("_of_short_rounds") + "_find_unused_parameters_true"
    del trainer["default_root_dir"]
    model.train(
        max_epochs=4, batch_size=16, train_size=0.8, check_val_every_n_epoch=1, ckpt_path=trial.resume, **trainer
    )
    trial.found["predictions"] = len(model.get_latent_representation())


def neuralforecast(trial: Trial) -> None:
    """NHITS, which makes its own Trainer for fit and for predict."""
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.losses.pytorch import MAE
    from neuralforecast.models import NHITS

    columns = {"time": "ds", "series": "unique_id", "value": "y"}
    model = NHITS(
        h=12,
        input_size=24,
        loss=MAE(),
        max_steps=48,
        val_check_steps=12,
        batch_size=4,
        mlp_units=[[128, 128]] * 3,
        random_seed=0,
        **trial.trainer(old, "valid_loss", half=1),
    )
    forecast = NeuralForecast(models=[model], freq=1)
    # Its own call takes no checkpoint to go on from.
    fit = partialmethod(old.Trainer.fit, ckpt_path=trial.resume, weights_only=False)
    with patch.object(old.Trainer, "fit", fit):
        forecast.fit(pd.DataFrame(sines(120, 32)).rename(columns=columns), val_size=12)
    trial.found["predictions"] = len(forecast.predict())


class Language(new.LightningModule):
    """Trains a causal language model of transformers' interface."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self.net(input_ids=batch[0], labels=batch[0]).loss, sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        best: Tensor = self.net(input_ids=batch[0]).logits.argmax(-1)
        return best

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3)


def language(trial: Trial, make: Callable[[], nn.Module], max_epochs: int = 4, **choices: Any) -> None:
    """Windows of counting bytes, which a model learns soon."""

    def batches(seed: int, windows: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(256, (windows, 1), generator=generator)
        steps = torch.randint(1, 4, (windows, 1), generator=generator)
        return DataLoader(TensorDataset((starts + steps * torch.arange(32)) % 256), batch_size=4, shuffle=seed == 0)

    new.seed_everything(0)
    trainer = new.Trainer(**trial.trainer(new, "val_loss"), max_epochs=max_epochs, **choices)
    trial.run(trainer, Language(make()), batches(0, 160), batches(1, 32))


def gpt2(width: int = 96) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=width, n_layer=3, n_head=4))


def llama() -> nn.Module:
    """Its embeddings are tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    places = {"vocab_size": 256, "max_position_embeddings": 64}
    net = LlamaForCausalLM(LlamaConfig(**sizes, **places, tie_word_embeddings=True, use_cache=False))
    net.gradient_checkpointing_enable()
    return net


def lora() -> nn.Module:
    """Few of the parameters are trained."""
    from peft import LoraConfig, get_peft_model

    choices = {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}
    return get_peft_model(gpt2(192), LoraConfig(r=32, lora_alpha=64, lora_dropout=0.1, **choices))


PROJECTS: dict[str, Callable[[Trial], None]] = {
    "chemprop": chemprop,
    "darts": darts,
    "darts: with metrics": partial(darts, with_metrics=True),
    "gluonts": gluonts,
    "neuralforecast": neuralforecast,
    "peft: lora": partial(language, make=lora),
    "pytorch_forecasting": pytorch_forecasting,
    "scvi": scvi,
    "transformers: gpt2": partial(language, make=gpt2, precision="bf16-mixed", accumulate_grad_batches=2),
    "transformers: llama": partial(language, make=llama, max_epochs=3),
}

"""Foreign projects: how their users fit, validate and predict, with the projects' own interfaces.

Each function imports its project, so that the others run without it.
"""

import copy
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

from tests.fits import said_by
from tests.ranks import agreed

HALF = "half.ckpt"


@dataclass
class Trial:
    """One fit of a project in a rank: its choices and its results."""

    strategy: str  # the name in the one line
    folder: Path  # for checkpoints and logs of this fit
    resume: Path | None = None  # a checkpoint to resume from
    results: dict[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Trial":
        return self  # some projects copy their callbacks, whose results belong here

    def trainer(
        self, distribution: Any, monitor: str, half: int = 2, sign: int = 1
    ) -> dict[str, Any]:
        """The arguments that every Trainer gets: a callback notes the fit, and the losses of its
        validations by name, a reward with the sign -1; it saves a checkpoint at the end of one of
        these, counted from 1."""
        probe_class = type("Probe", (_Probe, distribution.Callback), {})
        return {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": self.strategy,
            "callbacks": [probe_class(self, monitor, half, sign)],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(self.folder),
        }

    def run(self, trainer: Any, model: Any, train: Any, held_out: Any) -> None:
        """Fits, validates and predicts with Lightning's own calls."""
        # Projects keep objects of their own in checkpoints.
        trainer.fit(model, train, held_out, ckpt_path=self.resume, weights_only=False)
        self.results["validated"] = sorted(trainer.validate(model, held_out)[0])
        predictions = 0
        for batch in trainer.predict(model, held_out):
            predictions += len(batch) if isinstance(batch, Tensor) else len(batch[0])
        self.results["predictions"] = predictions


class _Probe:
    def __init__(self, trial: Trial, monitor: str, half: int, sign: int) -> None:
        self.trial = trial
        self.monitor = monitor
        self.half = half
        self.sign = sign
        self.validations = 0
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.monitor in trainer.callback_metrics:
            self.losses.append(self.sign * float(trainer.callback_metrics[self.monitor]))
        # ModelCheckpoint saves here, too. A Trainer that resumes from elsewhere may continue with
        # the data of another epoch, also with DDP.
        self.validations += not trainer.sanity_checking
        if self.validations == self.half and self.trial.resume is None:
            trainer.save_checkpoint(self.trial.folder / HALF)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        digest = hashlib.sha256()
        for name, values in module.state_dict().items():
            if isinstance(values, Tensor):
                values = values.detach().cpu().contiguous().flatten().view(torch.uint8)
                digest.update(name.encode() + values.numpy().tobytes())
        self.trial.results |= {
            "global_step": trainer.global_step,
            "keys": sorted(trainer.callback_metrics),
            "losses": self.losses,
            "parameters": sum(p.numel() for p in module.parameters()),
            "digest": digest.hexdigest(),
            "strategy": type(trainer.strategy).__name__,
        }


def sines(length: int, series: int, noise: float = 0.0) -> dict[str, Any]:
    """Columns of a table: sines of different phases."""
    time = np.tile(np.arange(length), series)
    number = np.repeat(np.arange(series), length)
    noises = noise * np.random.default_rng(0).normal(size=len(time))
    values = 5 + np.sin(time / 4 + number) + noises
    return {"time": time, "series": number, "value": values.astype("float32")}


def pictures(count: int, size: int, seed: int) -> Tensor:
    """Images of smooth colours."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    return nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1)


def pytorch_forecasting(trial: Trial) -> None:
    """A temporal fusion transformer, whose loss is a torchmetrics metric in the hyperparameters."""
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    new.seed_everything(0)
    table = pd.DataFrame(sines(60, 16, noise=0.1))
    table["series"] = table.series.astype(str)
    train = TimeSeriesDataSet(
        table[table.time < 54],
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=24,
        max_prediction_length=6,
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    held_out = TimeSeriesDataSet.from_dataset(train, table, predict=True, stop_randomization=True)
    train_loader = train.to_dataloader(train=True, batch_size=8, num_workers=0)
    held_out_loader = held_out.to_dataloader(train=False, batch_size=8, num_workers=0)
    model = TemporalFusionTransformer.from_dataset(
        train,
        learning_rate=0.01,
        hidden_size=48,
        attention_head_size=2,
        dropout=0.1,
        loss=QuantileLoss(),
    )
    choices = trial.trainer(new, "val_loss")
    trainer = new.Trainer(**choices, max_epochs=3, limit_train_batches=24, gradient_clip_val=0.1)
    trainer.fit(model, train_loader, held_out_loader, ckpt_path=trial.resume, weights_only=False)
    trial.results["validated"] = sorted(trainer.validate(model, held_out_loader)[0])
    del choices["callbacks"]
    trial.results["predictions"] = len(model.predict(held_out_loader, trainer_kwargs=choices))


def chemprop(trial: Trial) -> None:
    """A message passing network over molecules, with BatchNorm and torchmetrics in the
    hyperparameters.
    """
    from chemprop import data, featurizers, models
    from chemprop import nn as layers

    def molecules(count: int, seed: int) -> Any:
        """Chains of known pieces; the target is their number of carbon atoms."""
        generator = np.random.default_rng(seed)
        pieces = ("C", "CC", "CCO", "c1ccccc1", "C(=O)O", "CN", "C1CCCCC1")
        points = []
        for _ in range(count):
            smiles = "".join(generator.choice(pieces, size=generator.integers(2, 5)))
            target = np.array([smiles.upper().count("C") / 10.0])
            points.append(data.MoleculeDatapoint.from_smi(smiles, target))
        dataset = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
        return data.build_dataloader(dataset, batch_size=8, num_workers=0, shuffle=seed == 0)

    new.seed_everything(0)
    metrics = [layers.metrics.RMSE(), layers.metrics.MAE()]
    model = models.MPNN(
        layers.BondMessagePassing(),
        layers.MeanAggregation(),
        layers.RegressionFFN(),
        batch_norm=True,
        metrics=metrics,
    )
    trainer = new.Trainer(**trial.trainer(new, "val_loss"), max_epochs=4)
    trial.run(trainer, model, molecules(320, 0), molecules(64, 1))


def darts(trial: Trial, with_metrics: bool = False) -> None:
    """N-BEATS, which deep-copies its modules and makes its own Trainer; metrics go into the
    hyperparameters.
    """
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
    trial.results["predictions"] = sum(len(part) for part in model.predict(6, series=series))


class Series(list[dict[str, Any]]):
    """Series of which each pass draws the same windows, but different ones on each rank, and makes
    one batch of them.

    Lightning draws a batch that nobody trains on when it resumes at the end of an epoch, also with
    DDP, and a loader without a length cannot be told where to resume.
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
    entries = [{"start": "2024-01-01", "target": target} for target in targets]
    series = Series(ListDataset(entries, freq="h"))
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
    predictor = estimator.train(series, validation_data=series, ckpt_path=trial.resume)
    trial.results["predictions"] = len(list(predictor.predict(series)))


def rl4co(trial: Trial) -> None:
    """A policy of tours, whose baseline is replaced by a copy of the policy after an epoch in
    which that got better.
    """
    from rl4co.envs import TSPEnv
    from rl4co.models import AttentionModel
    from rl4co.utils import RL4COTrainer

    torch.set_num_threads(1)  # importing it sets another number

    class Remembering(AttentionModel):
        """Saves the state of its baseline besides parameters, which its checkpoints lack."""

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            rollout = self.baseline.baseline
            checkpoint["baseline"] = {
                "alpha": self.baseline.alpha,
                "values": rollout.bl_vals,
                "mean": rollout.mean,
                "tours": rollout.dataset.data,
            }

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            saved = checkpoint["baseline"]
            rollout = self.baseline.baseline
            self.baseline.alpha = saved["alpha"]
            rollout.bl_vals = saved["values"]
            rollout.mean = saved["mean"]
            rollout.dataset.data = saved["tours"]

    new.seed_everything(0)
    env = TSPEnv(generator_params={"num_loc": 10})
    model = Remembering(
        env,
        baseline="rollout",
        policy_kwargs={"embed_dim": 64, "feedforward_hidden": 128, "normalization": "instance"},
        batch_size=16,
        train_data_size=320,
        val_data_size=64,
        optimizer_kwargs={"lr": 1e-3},
    )
    choices = trial.trainer(new, "val/reward", sign=-1)
    if trial.strategy == "ddp":
        choices["strategy"] = "ddp_find_unused_parameters_true"
    trainer = RL4COTrainer(**choices, max_epochs=4, precision="32-true")
    messages = said_by("lightning_sdiloco")
    # Its own call cannot say that checkpoints hold objects.
    fit = partialmethod(new.Trainer.fit, weights_only=False)
    with patch.object(new.Trainer, "fit", fit):
        trainer.fit(model, ckpt_path=trial.resume)
    if trial.strategy != "ddp" and trainer.is_global_zero:
        recuts = [text for text in messages if text.startswith("The model is divided again")]
        assert recuts, "no baseline was replaced"
        assert not any(text.startswith("No inner optimizer") for text in messages)
    trial.results["validated"] = sorted(trainer.test(model)[0])
    with torch.no_grad():
        tours = model.policy(env.reset(batch_size=[32]), env, decode_type="greedy")
    trial.results["predictions"] = len(tours["reward"])


def scvi(trial: Trial) -> None:
    """A variational autoencoder of counts, which makes its own Trainer and looks for "ddp" in the
    name.
    """
    import anndata
    import scvi

    scvi.settings.seed = 0
    generator = np.random.default_rng(0)
    rates = generator.gamma(1.0, 2.0, size=(4, 200))  # cells of four kinds
    counts = generator.poisson(rates[np.arange(400) % 4]).astype("float32")
    annotated = anndata.AnnData(counts)
    scvi.model.SCVI.setup_anndata(annotated)
    model = scvi.model.SCVI(annotated, n_hidden=128)
    choices = trial.trainer(new, "validation_loss")
    strategy = trial.strategy.removesuffix("_of_short_rounds")
    choices["strategy"] = f"{strategy}_find_unused_parameters_true"
    del choices["default_root_dir"]
    model.train(
        max_epochs=4,
        batch_size=16,
        train_size=0.8,
        check_val_every_n_epoch=1,
        ckpt_path=trial.resume,
        **choices,
    )
    trial.results["predictions"] = len(model.get_latent_representation())


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
    # Its own call takes no checkpoint to resume from.
    fit = partialmethod(old.Trainer.fit, ckpt_path=trial.resume, weights_only=False)
    with patch.object(old.Trainer, "fit", fit):
        forecast.fit(pd.DataFrame(sines(120, 32)).rename(columns=columns), val_size=12)
    trial.results["predictions"] = len(forecast.predict())


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


def language(
    trial: Trial,
    make: Callable[[], nn.Module],
    max_epochs: int = 4,
    kind: type[Language] = Language,
    **choices: Any,
) -> None:
    """Windows of counting bytes, which a model learns soon."""

    def batches(seed: int, windows: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(256, (windows, 1), generator=generator)
        steps = torch.randint(1, 4, (windows, 1), generator=generator)
        samples = TensorDataset((starts + steps * torch.arange(32)) % 256)
        return DataLoader(samples, batch_size=4, shuffle=seed == 0)

    new.seed_everything(0)
    trainer = new.Trainer(**trial.trainer(new, "val_loss"), max_epochs=max_epochs, **choices)
    trial.run(trainer, kind(make()), batches(0, 160), batches(1, 32))


class ScheduleFree(Language):
    """Its optimizer shows one model for training, and another for everything else."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        from schedulefree import AdamWScheduleFree

        return AdamWScheduleFree(self.parameters(), lr=3e-3, warmup_steps=10)

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()

    def on_predict_epoch_start(self) -> None:
        self.optimizers().eval()


def gpt2(width: int = 96) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=width, n_layer=3, n_head=4)
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Its embeddings are tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=256,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    net = LlamaForCausalLM(config)
    net.gradient_checkpointing_enable()
    return net


def lora() -> nn.Module:
    """Few of the parameters are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=32,
        lora_alpha=64,
        lora_dropout=0.1,
        target_modules=["c_attn", "c_fc", "c_proj"],
        fan_in_fan_out=True,
    )
    return get_peft_model(gpt2(192), config)


def resnet() -> nn.Module:
    from lightly.models import ResNetGenerator

    layers = list(ResNetGenerator("resnet-9", width=0.25).children())
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1))


class TwoViews(new.LightningModule):
    """Learns of images without labels, from two views of each."""

    backbone: nn.Module

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.loss(*batch)
        self.log("train_loss_ssl", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss_ssl", self.loss(*batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.backbone(batch[0]).flatten(start_dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def lightly(trial: Trial, make: Callable[[], TwoViews]) -> TwoViews:
    from lightly.transforms import SimCLRTransform

    transform = SimCLRTransform(
        input_size=16, cj_prob=0.0, random_gray_scale=0.0, gaussian_blur=0.0
    )

    def two_views(images: list[Tensor]) -> list[Tensor]:
        return [torch.stack(view) for view in zip(*map(transform, images), strict=True)]

    def batches(images: Tensor, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(images, batch_size=16, collate_fn=two_views, shuffle=shuffle)

    new.seed_everything(0)
    trainer = new.Trainer(**trial.trainer(new, "val_loss_ssl"), max_epochs=4)
    model = make()
    train = batches(pictures(320, 24, seed=0), shuffle=True)
    trial.run(trainer, model, train, batches(pictures(64, 24, seed=1)))
    return model


def simclr(trial: Trial) -> None:
    """A loss that gathers its negatives over all ranks: all groups wait for each other in every
    batch.
    """
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class SimCLR(TwoViews):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet()
            self.projection_head = SimCLRProjectionHead(128, 128, 64)
            self.criterion = NTXentLoss(gather_distributed=True)

        def forward(self, images: Tensor) -> Tensor:
            projected: Tensor = self.projection_head(self.backbone(images).flatten(start_dim=1))
            return projected

        def loss(self, first: Tensor, second: Tensor) -> Tensor:
            loss: Tensor = self.criterion(self(first), self(second))
            return loss

    lightly(trial, SimCLR)


def byol(trial: Trial) -> None:
    """A teacher of frozen parameters, which follows the student by a moving average."""
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    class BYOL(TwoViews):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet()
            self.projection_head = BYOLProjectionHead(128, 128, 64)
            self.prediction_head = BYOLPredictionHead(64, 128, 64)
            self.backbone_momentum = copy.deepcopy(self.backbone)
            self.projection_head_momentum = copy.deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)
            self.criterion = NegativeCosineSimilarity()
            self.local_teacher: Tensor | None = None  # at the begin of the last epoch

        def forward(self, images: Tensor) -> Tensor:
            projected = self.projection_head(self.backbone(images).flatten(start_dim=1))
            predicted: Tensor = self.prediction_head(projected)
            return predicted

        def forward_momentum(self, images: Tensor) -> Tensor:
            projected: Tensor = self.projection_head_momentum(
                self.backbone_momentum(images).flatten(start_dim=1)
            )
            return projected.detach()

        def loss(self, first: Tensor, second: Tensor) -> Tensor:
            to_second = self.criterion(self(first), self.forward_momentum(second))
            to_first = self.criterion(self(second), self.forward_momentum(first))
            loss: Tensor = (to_second + to_first) / 2
            return loss

        def training_step(self, batch: Any, index: int) -> Tensor:
            update_momentum(self.backbone, self.backbone_momentum, m=0.9)
            update_momentum(self.projection_head, self.projection_head_momentum, m=0.9)
            return super().training_step(batch, index)

        def on_train_epoch_start(self) -> None:
            self.local_teacher = nn.utils.parameters_to_vector(self.backbone_momentum.parameters())

    model = lightly(trial, BYOL)
    # Each group's teacher follows its own student.
    assert agreed({"teacher": model.local_teacher}) == (trial.strategy == "ddp")
    new.seed_everything(0)
    initial = nn.utils.parameters_to_vector(BYOL().backbone.parameters())
    student = nn.utils.parameters_to_vector(model.backbone.parameters())
    teacher = nn.utils.parameters_to_vector(model.backbone_momentum.parameters())
    distance = (student - teacher).norm()
    assert distance < 0.5 * (student - initial).norm(), "the teacher does not follow"


def anomalib(trial: Trial) -> None:
    """GANomaly, which steps two optimizers by hand, with an engine around the Trainer."""
    from anomalib.data import Folder
    from anomalib.engine import Engine
    from anomalib.models import Ganomaly
    from torchvision.utils import save_image

    root = trial.folder / f"images-{os.environ['RANK']}"
    for kind, count, seed in (("good", 160, 0), ("bad", 32, 1)):
        (root / kind).mkdir(parents=True)
        for number, image in enumerate(pictures(count, 32, seed)):
            save_image(image, root / kind / f"{number:03}.png")
    new.seed_everything(0)
    folder = Folder(
        "blots",
        root=root,
        normal_dir="good",
        abnormal_dir="bad",
        train_batch_size=4,
        eval_batch_size=4,
        num_workers=0,
        seed=0,
    )
    model = Ganomaly(
        batch_size=4,
        n_features=16,
        latent_vec_size=32,
        lr=2e-3,
        pre_processor=Ganomaly.configure_pre_processor((32, 32)),
        visualizer=False,
    )
    choices = trial.trainer(new, "generator_loss")
    if trial.strategy == "ddp":
        # Worker groups find unused parameters by themselves.
        choices["strategy"] = "ddp_find_unused_parameters_true"
    engine = Engine(**choices, max_epochs=3, logger=False)
    engine.fit(model, datamodule=folder, ckpt_path=trial.resume)
    trial.results["validated"] = sorted(engine.test(model, datamodule=folder)[0])
    predicted = engine.predict(model, datamodule=folder)
    trial.results["predictions"] = sum(len(batch.image) for batch in predicted)


def nequip(trial: Trial) -> None:
    """An equivariant potential, whose loss holds derivatives and is a metric that is multiplied by
    the world size.
    """
    from nequip.data.datamodule import NequIPDataModule
    from nequip.train import NequIPLightningModule
    from nequip.utils.global_state import set_global_state

    def frames(count: int, seed: int) -> dict[str, Any]:
        """Shaken crystals of copper, with a potential that is computed here."""
        types = {
            "_target_": "nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper",
            "model_type_names": ["Cu"],
        }
        neighbours = {"_target_": "nequip.data.transforms.NeighborListTransform", "r_max": 3.5}
        return {
            "_target_": "nequip.data.dataset.EMTTestDataset",
            "transforms": [types, neighbours],
            "supercell": [2, 2, 1],
            "num_frames": count,
            "seed": seed,
        }

    set_global_state()
    new.seed_everything(0)
    crystals = NequIPDataModule(
        seed=0,
        train_dataset=frames(96, 0),
        val_dataset=frames(16, 1),
        predict_dataset=frames(16, 2),
        train_dataloader={"batch_size": 2, "shuffle": True},
        val_dataloader={"batch_size": 4},
        predict_dataloader={"batch_size": 4},
    )
    potential = {
        "_target_": "nequip.model.NequIPGNNModel",
        "seed": 0,
        "model_dtype": "float32",
        "type_names": ["Cu"],
        "r_max": 3.5,
        "avg_num_neighbors": 12.0,
        "num_layers": 2,
        "l_max": 1,
        "num_features": 48,
        "radial_mlp_width": 128,
        "per_type_energy_scales": 1.0,
        "per_type_energy_shifts": 0.0,
    }
    module = NequIPLightningModule(
        model=potential,
        num_datasets=crystals.num_datasets,
        optimizer={"_target_": "torch.optim.Adam", "lr": 0.005},
        loss={"_target_": "nequip.train.EnergyForceLoss"},
        train_metrics={"_target_": "nequip.train.EnergyForceMetrics"},
        val_metrics={"_target_": "nequip.train.EnergyForceMetrics"},
    )
    trainer = new.Trainer(
        **trial.trainer(new, "val0_epoch/weighted_sum"), max_epochs=4, inference_mode=False
    )
    module.world_size = trainer.world_size  # as its own command does
    messages = said_by("lightning_sdiloco")
    trainer.fit(module, datamodule=crystals, ckpt_path=trial.resume, weights_only=False)
    trial.results["validated"] = sorted(trainer.validate(module, datamodule=crystals)[0])
    predicted = trainer.predict(module, datamodule=crystals)
    trial.results["predictions"] = sum(len(batch["total_energy"]) for batch in predicted)
    warnings = [
        text for text in messages if text.startswith("The module stores world_size, which is 2")
    ]
    assert len(warnings) == (trial.strategy != "ddp" and trainer.is_global_zero)


def pina(trial: Trial) -> None:
    """A physics-informed network, whose loss holds second derivatives, with a Trainer of its own
    class.
    """
    from pina import Trainer
    from pina.model import FeedForward
    from pina.optim import TorchOptimizer
    from pina.problem.zoo import Poisson2DSquareProblem
    from pina.solver import PINN

    new.seed_everything(0)
    problem = Poisson2DSquareProblem()
    problem.discretise_domain(400, "random")
    net = FeedForward(2, 1, inner_size=256, n_layers=3)
    solver = PINN(problem, net, optimizer=TorchOptimizer(torch.optim.AdamW, lr=1e-3))
    choices = trial.trainer(new, "val_loss")
    trainer = Trainer(
        solver, batch_size=20, train_size=0.8, val_size=0.1, test_size=0.1, max_epochs=4, **choices
    )
    trainer.train(ckpt_path=trial.resume, weights_only=False)
    trial.results["validated"] = sorted(trainer.test()[0])


def pytorch_tabular(trial: Trial) -> None:
    """A network of categories and numbers, which makes its own Trainer out of a config."""
    import pandas as pd
    from pytorch_tabular import TabularModel, config, models

    generator = np.random.default_rng(0)
    table = pd.DataFrame(generator.normal(size=(480, 4)).astype("float32"), columns=list("abcd"))
    table["kind"] = generator.choice(["x", "y", "z"], size=480)
    table["target"] = table.a * table.b + (table.kind == "x")
    choices = trial.trainer(old, "valid_loss")
    callbacks = choices.pop("callbacks")
    tabular = TabularModel(
        data_config=config.DataConfig(
            target=["target"],
            continuous_cols=list("abcd"),
            categorical_cols=["kind"],
            num_workers=0,
        ),
        model_config=models.CategoryEmbeddingModelConfig(
            task="regression", layers="512-256-64", learning_rate=2e-3
        ),
        optimizer_config=config.OptimizerConfig(),
        trainer_config=config.TrainerConfig(
            batch_size=16,
            max_epochs=4,
            early_stopping=None,
            checkpoints=None,
            load_best=False,
            progress_bar="none",
            devices=choices.pop("devices"),
            accelerator=choices.pop("accelerator"),
            trainer_kwargs=choices,
        ),
        verbose=False,
    )
    # Its own call takes no checkpoint to resume from.
    fit = partialmethod(old.Trainer.fit, ckpt_path=trial.resume, weights_only=False)
    with patch.object(old.Trainer, "fit", fit):
        tabular.fit(train=table[:400], validation=table[400:], callbacks=callbacks)
    trial.results["predictions"] = len(tabular.predict(table[400:]))


def torch_geometric(trial: Trial) -> None:
    """A graph isomorphism network over graphs of many sizes, with its own data module."""
    from torch_geometric.data import Data
    from torch_geometric.data.lightning import LightningDataset
    from torch_geometric.nn import GIN, global_add_pool
    from torch_geometric.utils import erdos_renyi_graph

    class Graphs(new.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gnn = GIN(8, 128, num_layers=5, out_channels=1, norm="batch_norm")

        def forward(self, graphs: Any) -> Tensor:
            nodes = self.gnn(graphs.x, graphs.edge_index)
            pooled: Tensor = global_add_pool(nodes, graphs.batch, graphs.num_graphs)
            return pooled.squeeze(1)

        def training_step(self, graphs: Any, index: int) -> Tensor:
            return nn.functional.mse_loss(self(graphs), graphs.y)

        def validation_step(self, graphs: Any, index: int) -> None:
            loss = nn.functional.mse_loss(self(graphs), graphs.y)
            self.log("val_loss", loss, batch_size=graphs.num_graphs, sync_dist=True)

        def predict_step(self, graphs: Any, index: int) -> Tensor:
            predicted: Tensor = self(graphs)
            return predicted

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def graphs(count: int) -> list[Any]:
        """Random graphs; the target is their number of edges."""
        edges = [erdos_renyi_graph(6 + number % 12, 0.3) for number in range(count)]
        random_graphs = []
        for number, pairs in enumerate(edges):
            features = torch.randn(6 + number % 12, 8)
            target = torch.tensor([pairs.shape[1] / 20])
            random_graphs.append(Data(x=features, edge_index=pairs, y=target))
        return random_graphs

    new.seed_everything(0)
    module = LightningDataset(
        graphs(320), graphs(64), pred_dataset=graphs(64), batch_size=8, pin_memory=False
    )
    trainer = new.Trainer(**trial.trainer(new, "val_loss"), max_epochs=4)
    model = Graphs()
    trainer.fit(model, datamodule=module, ckpt_path=trial.resume, weights_only=False)
    trial.results["validated"] = sorted(trainer.validate(model, datamodule=module)[0])
    trial.results["predictions"] = sum(map(len, trainer.predict(model, datamodule=module)))


def torchgeo(trial: Trial) -> None:
    """Segmentation of images with a fully convolutional network, whose metrics are logged as
    modules.
    """
    from torchgeo.trainers import SemanticSegmentationTask

    def batches(count: int, seed: int) -> DataLoader[Any]:
        images = pictures(count, 24, seed)
        tiles = [{"image": image, "mask": image.argmax(0)} for image in images]
        return DataLoader(tiles, batch_size=4, shuffle=seed == 0)

    new.seed_everything(0)
    task = SemanticSegmentationTask(
        model="fcn", task="multiclass", num_classes=3, num_filters=64, lr=2e-3
    )
    trainer = new.Trainer(**trial.trainer(new, "val_loss"), max_epochs=3)
    trial.run(trainer, task, batches(160, 0), batches(32, 1))


PROJECTS: dict[str, Callable[[Trial], None]] = {
    "anomalib": anomalib,
    "chemprop": chemprop,
    "darts": darts,
    "darts: with metrics": partial(darts, with_metrics=True),
    "gluonts": gluonts,
    "lightly: byol": byol,
    "lightly: simclr": simclr,
    "nequip": nequip,
    "neuralforecast": neuralforecast,
    "peft: lora": partial(language, make=lora),
    "pina": pina,
    "pytorch_forecasting": pytorch_forecasting,
    "pytorch_tabular": pytorch_tabular,
    "rl4co": rl4co,
    "schedulefree": partial(language, make=gpt2, kind=ScheduleFree),
    "scvi": scvi,
    "torch_geometric": torch_geometric,
    "torchgeo": torchgeo,
    "transformers: gpt2": partial(
        language, make=gpt2, precision="bf16-mixed", accumulate_grad_batches=2
    ),
    "transformers: llama": partial(language, make=llama, max_epochs=3),
}

"""pytorch-forecasting: a temporal fusion transformer, whose loss is a torchmetrics metric in the hyperparameters."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

from tests.foreign.trial import Trial

LENGTH, SERIES, AHEAD = 60, 16, 6


def table() -> pd.DataFrame:
    """Sines of different phases with noise."""
    generator = np.random.default_rng(0)
    time = np.tile(np.arange(LENGTH), SERIES)
    series = np.repeat(np.arange(SERIES), LENGTH)
    value = 5 + np.sin(time / 5 + series) + 0.1 * generator.normal(size=len(time))
    return pd.DataFrame({"time": time, "series": series.astype(str), "value": value.astype("float32")})


def fit(trial: Trial) -> None:
    pl.seed_everything(0)
    data = table()
    train = TimeSeriesDataSet(
        data[data.time < LENGTH - AHEAD],
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=24,
        max_prediction_length=AHEAD,
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
    trainer = pl.Trainer(
        **trial.trainer(trial.probe(pl.Callback, "val_loss", half=2)),
        max_epochs=3,
        limit_train_batches=12,
        gradient_clip_val=0.1,
    )
    trainer.fit(model, *loaders, ckpt_path=trial.resume, weights_only=False)
    trial.found["validated"] = sorted(trainer.validate(model, loaders[1])[0])
    again = trial.trainer(trial.probe(pl.Callback, "val_loss", half=2))
    del again["callbacks"]
    trial.found["predictions"] = len(model.predict(loaders[1], trainer_kwargs=again))

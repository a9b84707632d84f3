"""neuralforecast: NHITS, which makes its own Trainer for fit and for predict."""

import numpy as np
import pandas as pd
import pytorch_lightning as pl
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import MAE
from neuralforecast.models import NHITS

from tests.foreign.trial import NAME, Trial, resuming

STRATEGY = NAME

AHEAD, LENGTH, SERIES = 12, 120, 32


def fit(trial: Trial) -> None:
    time = np.tile(np.arange(LENGTH), SERIES)
    series = np.repeat(np.arange(SERIES), LENGTH)
    data = pd.DataFrame({"unique_id": series, "ds": time, "y": 5 + np.sin(time / 4 + series)})
    trainer = trial.trainer(trial.probe(pl.Callback, "valid_loss", half=1))
    model = NHITS(
        h=AHEAD,
        input_size=2 * AHEAD,
        loss=MAE(),
        max_steps=48,
        val_check_steps=12,
        batch_size=4,
        mlp_units=[[128, 128]] * 3,
        random_seed=0,
        **trainer,
    )
    forecast = NeuralForecast(models=[model], freq=1)
    with resuming(pl.Trainer, trial.resume):
        forecast.fit(data, val_size=AHEAD)
    trial.found["predictions"] = len(forecast.predict())

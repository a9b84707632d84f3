"""gluonts: DeepAR, whose loaders have no length and draw windows at random."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator
from gluonts.transform.sampler import NumInstanceSampler

from tests.foreign.trial import Trial

AHEAD = 12


class Series(list[dict[str, Any]]):
    """Series of which each pass draws the same windows, because no pass is told where a resumed one would stand."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        np.random.seed(0)
        return super().__iter__()


def fit(trial: Trial) -> None:
    pl.seed_everything(0)
    time = np.arange(200)
    series = [{"start": "2024-01-01", "target": 5 + np.sin(time / 4 + phase)} for phase in range(16)]
    data = Series(ListDataset(series, freq="h"))
    trainer = trial.trainer(trial.probe(pl.Callback, "val_loss", half=2))
    estimator = DeepAREstimator(
        freq="h",
        prediction_length=AHEAD,
        hidden_size=96,
        num_layers=2,
        batch_size=8,
        num_batches_per_epoch=20,
        # 160 windows: a pass over the series is an epoch.
        train_sampler=NumInstanceSampler(N=10, min_future=AHEAD),
        trainer_kwargs={**trainer, "max_epochs": 4},
    )
    predictor = estimator.train(data, validation_data=data, ckpt_path=trial.resume)
    trial.found["predictions"] = len(list(predictor.predict(data)))

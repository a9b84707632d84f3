"""gluonts: DeepAR, whose loaders have no length and draw windows at random."""

import os
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
    """Series of which each pass draws the same windows, others on each rank, and makes one batch of them.

    Lightning draws a batch that nobody trains on when it resumes at the end of an epoch, with DDP too, and a loader
    without a length cannot be told where to go on.
    """

    def __iter__(self) -> Iterator[dict[str, Any]]:
        np.random.seed(int(os.environ["RANK"]))
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
        batch_size=16,
        num_batches_per_epoch=20,
        train_sampler=NumInstanceSampler(N=1, min_future=AHEAD),
        trainer_kwargs={**trainer, "max_epochs": 4},
    )
    predictor = estimator.train(data, validation_data=data, ckpt_path=trial.resume)
    trial.found["predictions"] = len(list(predictor.predict(data)))

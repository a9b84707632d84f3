"""darts: N-BEATS, which deep-copies its modules and makes its own Trainer."""

import numpy as np
import pytorch_lightning as pl
from darts import TimeSeries
from darts.models import NBEATSModel

from tests.foreign.trial import NAME, Trial

STRATEGY = NAME

METRICS = None
AHEAD = 6


def fit(trial: Trial) -> None:
    time = np.arange(160, dtype="float32")
    series = [TimeSeries.from_values(5 + np.sin(time / 4 + phase)) for phase in range(8)]
    trainer = trial.trainer(trial.probe(pl.Callback, "val_loss", half=2))
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=AHEAD,
        num_stacks=2,
        num_blocks=2,
        layer_widths=96,
        n_epochs=4,
        batch_size=16,
        random_state=0,
        torch_metrics=METRICS,
        pl_trainer_kwargs=trainer,
        work_dir=str(trial.folder),
    )
    model.load_ckpt_path = trial.resume and str(trial.resume)
    model.fit([part[:-24] for part in series], val_series=[part[-60:] for part in series])
    trial.found["predictions"] = sum(len(part) for part in model.predict(AHEAD, series=series))

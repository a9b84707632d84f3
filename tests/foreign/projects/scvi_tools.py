"""scvi-tools: a variational autoencoder of counts, which makes its own Trainer and looks for "ddp" in the name."""

import anndata
import lightning.pytorch as pl
import numpy as np
import scvi

from tests.foreign.trial import Trial

STRATEGY = "streaming_diloco_ddp_find_unused_parameters_true"
DDP = "ddp_find_unused_parameters_true"


def counts() -> anndata.AnnData:
    """Cells of four kinds."""
    generator = np.random.default_rng(0)
    rates = generator.gamma(1.0, 2.0, size=(4, 200))
    return anndata.AnnData(generator.poisson(rates[np.arange(400) % 4]).astype("float32"))


def fit(trial: Trial) -> None:
    scvi.settings.seed = 0
    data = counts()
    scvi.model.SCVI.setup_anndata(data)
    model = scvi.model.SCVI(data, n_hidden=128)
    trainer = trial.trainer(trial.probe(pl.Callback, "validation_loss", half=2))
    del trainer["default_root_dir"]
    model.train(
        max_epochs=4, batch_size=16, train_size=0.8, check_val_every_n_epoch=1, ckpt_path=trial.resume, **trainer
    )
    trial.found["predictions"] = len(model.get_latent_representation())

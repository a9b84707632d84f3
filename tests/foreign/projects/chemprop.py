"""chemprop: a message passing network over molecules, with BatchNorm and torchmetrics in the hyperparameters."""

import lightning.pytorch as pl
import numpy as np
from chemprop import data, featurizers, models, nn

from tests.foreign.trial import Trial

ATOMS = ("C", "CC", "CCO", "c1ccccc1", "C(=O)O", "CN", "C1CCCCC1")


def molecules(count: int, seed: int) -> data.MoleculeDataset:
    """Chains of known pieces; the target is their number of carbon atoms."""
    generator = np.random.default_rng(seed)
    smiles = ["".join(generator.choice(ATOMS, size=generator.integers(2, 5))) for _ in range(count)]
    points = [data.MoleculeDatapoint.from_smi(text, np.array([text.upper().count("C") / 10.0])) for text in smiles]
    return data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())


def fit(trial: Trial) -> None:
    pl.seed_everything(0)
    train, held_out = molecules(320, 0), molecules(64, 1)
    loaders = [
        data.build_dataloader(part, batch_size=8, num_workers=0, shuffle=i == 0)
        for i, part in enumerate((train, held_out))
    ]
    metrics = [nn.metrics.RMSE(), nn.metrics.MAE()]
    model = models.MPNN(
        nn.BondMessagePassing(), nn.MeanAggregation(), nn.RegressionFFN(), batch_norm=True, metrics=metrics
    )
    trainer = pl.Trainer(**trial.trainer(trial.probe(pl.Callback, "val_loss", half=2)), max_epochs=4)
    trial.run(trainer, model, *loaders)

"""transformers: GPT-2 in a LightningModule, bf16-mixed with gradient accumulation."""

import lightning.pytorch as pl
from transformers import GPT2Config, GPT2LMHeadModel

from tests.foreign.language import Language, batches
from tests.foreign.trial import Trial


def fit(trial: Trial) -> None:
    pl.seed_everything(0)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=96, n_layer=3, n_head=4))
    trainer = pl.Trainer(
        **trial.trainer(trial.probe(pl.Callback, "val_loss", half=2)),
        max_epochs=4,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
    )
    trial.run(trainer, Language(net), batches(0), batches(1))

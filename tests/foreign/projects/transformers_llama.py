"""transformers: a Llama whose embeddings are tied, with gradient checkpointing."""

import lightning.pytorch as pl
from transformers import LlamaConfig, LlamaForCausalLM

from tests.foreign.language import Language, batches
from tests.foreign.trial import Trial


def fit(trial: Trial) -> None:
    pl.seed_everything(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    net = LlamaForCausalLM(config)
    net.gradient_checkpointing_enable()
    trainer = pl.Trainer(**trial.trainer(trial.probe(pl.Callback, "val_loss", half=2)), max_epochs=3)
    trial.run(trainer, Language(net), batches(0), batches(1))

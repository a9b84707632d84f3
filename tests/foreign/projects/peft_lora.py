"""peft: LoRA on a frozen GPT-2; few of the parameters are trained."""

import lightning.pytorch as pl
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from tests.foreign.language import Language, batches
from tests.foreign.trial import Trial


def fit(trial: Trial) -> None:
    pl.seed_everything(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=192, n_layer=3, n_head=4))
    config = LoraConfig(
        r=32, lora_alpha=64, lora_dropout=0.1, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True
    )
    trainer = pl.Trainer(**trial.trainer(trial.probe(pl.Callback, "val_loss", half=2)), max_epochs=4)
    trial.run(trainer, Language(get_peft_model(base, config)), batches(0), batches(1))

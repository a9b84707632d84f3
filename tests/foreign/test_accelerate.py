"""Loops of accelerate, and the Trainer of transformers: the examples train, and go on where they
were stopped.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sdiloco import StreamingDiLoCo
from tests.fits import refusal, said_by
from tests.ranks import agreed, in_ranks
from tests.scripts import ROOT, TORCHRUN, run_python

EXAMPLES = ROOT / "examples" / "accelerate"

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="is not installed: make foreign"
    ),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_example_of_accelerate_goes_on_where_it_was_stopped(ranks: int, tmp_path: Path) -> None:
    def loss(*arguments: Any) -> str:
        torchrun = (*TORCHRUN, f"--nproc-per-node={ranks}", EXAMPLES / "pretrain.py")
        printed = run_python(*torchrun, *arguments, folder=tmp_path)
        # Without the bytes: what is saved before all fragments have landed takes an exchange.
        return next(line for line in printed.splitlines() if line.startswith("loss")).split(",")[0]

    whole = loss("--steps", 44, "--folder", "whole")
    assert float(whole.split()[1]) < 4.0
    loss("--steps", 22, "--folder", "half")  # a fragment is in flight then
    assert loss("--steps", 44, "--folder", "half", "--resume") == whole


@in_ranks(2, timeout=200.0)
def test_silent_substitutions_by_accelerate_are_refused(rank: int, tmp_path: Path) -> None:
    """What rank 0 alone keeps, and what it wraps over all ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped = refusal(StreamingDiLoCo, accelerator.prepare(torch.nn.Linear(3, 4)))
    assert "DistributedDataParallel over ranks 0 and 1" in wrapped
    torch.manual_seed(rank)
    engine = StreamingDiLoCo(
        accelerator.prepare_model(torch.nn.Linear(300, 400), evaluation_mode=True)
    )
    accelerator.register_for_checkpointing(engine)
    accelerator.save_state(tmp_path)
    accelerator.wait_for_everyone()
    if rank == 0:
        accelerator.load_state(tmp_path)
    else:
        told = refusal(accelerator.load_state, tmp_path)
        assert told.startswith("This is the state of rank 0 of worker group 0")


@in_ranks(2, timeout=200.0)
def test_the_trainer_of_transformers_trains_worker_groups_and_resumes(
    rank: int, tmp_path: Path
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sys.path.append(str(EXAMPLES))
    from transformers_trainer import StreamingDiLoCoCallback

    def train(name: str, resume: str | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=300, n_positions=32, n_embd=64, n_layer=3, n_head=4)
        )
        assert sum(p.numel() for p in model.parameters()) > 100_000
        tokens = torch.randint(
            0, 300, (256, 1), generator=torch.Generator().manual_seed(1)
        ) + torch.arange(32)
        data = [{"input_ids": row % 300, "labels": row % 300} for row in tokens]
        often: dict[str, Any] = {
            "eval_strategy": "steps",
            "eval_steps": 8,
            "save_steps": 8,
            "max_steps": 24,
        }
        quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
        arguments = TrainingArguments(
            output_dir=str(tmp_path / name),
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            **often,
            **quiet,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:32])
        callback = StreamingDiLoCoCallback(
            trainer, resume, sync_every=6, overlap_steps=3, fragments="strided:1"
        )
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume)
        assert (callback.engine.topology.num_groups, trainer.state.global_step) == (2, 24)
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert agreed(losses)
        assert losses[-1] < losses[0]
        return losses, {name: values.clone() for name, values in model.state_dict().items()}

    losses, model = train("whole")
    assert agreed(model)
    again, resumed = train("resumed", str(tmp_path / "whole" / "checkpoint-16"))
    assert again == losses
    assert [name for name, values in model.items() if not torch.equal(values, resumed[name])] == []


@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None,
    reason="is not installed: make foreign",
)
@in_ranks(2, timeout=200.0)
def test_the_trainer_of_sentence_transformers_trains_worker_groups_and_resumes(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same callback, of a trainer that makes losses of its own out of pairs of sentences."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss, SoftmaxLoss
    from sentence_transformers.models import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    sys.path.append(str(EXAMPLES))
    from transformers_trainer import StreamingDiLoCoCallback

    words = [f"w{i}" for i in range(300)]
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}

    def save_untrained(folder: Path) -> None:
        """A BERT as it would be downloaded, of so many words."""
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
        )
        fast.save_pretrained(folder)
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        torch.manual_seed(0)
        BertModel(
            BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **sizes)
        ).save_pretrained(folder)

    def pairs(count: int, seed: int) -> Dataset:
        """Sentences, and others with half of their words."""
        chosen = torch.randint(
            len(words), (count, 8), generator=torch.Generator().manual_seed(seed)
        )
        sentences = [[words[word] for word in row] for row in chosen.tolist()]
        columns = {
            "anchor": [" ".join(of) for of in sentences],
            "positive": [" ".join(of[::2]) for of in sentences],
        }
        return Dataset.from_dict(columns)

    def make(
        name: str, resume: str | None, make_loss: Any
    ) -> tuple[SentenceTransformerTrainer, Any]:
        torch.manual_seed(0)
        transformer = Transformer(str(tmp_path / f"bert-{rank}"), max_seq_length=16)
        model = SentenceTransformer(
            modules=[transformer, Pooling(transformer.get_word_embedding_dimension())], device="cpu"
        )
        assert sum(p.numel() for p in model.parameters()) > 100_000
        often: dict[str, Any] = {
            "eval_strategy": "steps",
            "eval_steps": 8,
            "save_steps": 8,
            "max_steps": 24,
        }
        quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / name),
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            **often,
            **quiet,
        )
        loss = make_loss(model)
        trainer = SentenceTransformerTrainer(model, arguments, pairs(384, 1), pairs(64, 2), loss)
        callback = StreamingDiLoCoCallback(
            trainer, resume, sync_every=6, overlap_steps=3, fragments="strided:1"
        )
        trainer.add_callback(callback)
        return trainer, callback

    def train(name: str, resume: str | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer, callback = make(name, resume, MultipleNegativesRankingLoss)
        trainer.train(resume_from_checkpoint=resume)
        model = trainer.model
        assert (callback.engine.topology.num_groups, trainer.state.global_step) == (2, 24)
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert agreed(losses)
        assert losses[-1] < losses[0]
        assert model.encode(["w1 w2 w3"]).shape == (1, 64)
        return losses, {name: values.clone() for name, values in model.state_dict().items()}

    save_untrained(tmp_path / f"bert-{rank}")
    losses, model = train("whole")
    assert agreed(model)
    again, resumed = train("resumed", str(tmp_path / "whole" / "checkpoint-16"))
    assert again == losses
    assert [name for name, values in model.items() if not torch.equal(values, resumed[name])] == []
    with_head, _ = make("head", None, lambda model: SoftmaxLoss(model, 64, 3))
    assert refusal(with_head.train).startswith(
        "The optimizer steps 2 parameters that are not the model's"
    )


@in_ranks(2, timeout=200.0)
def test_the_best_model_stays_and_a_loss_that_gathers_couples_no_groups(
    rank: int, tmp_path: Path
) -> None:
    """The best is that of the first evaluation here; the loss gathers as those of TRL do."""
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sys.path.append(str(EXAMPLES))
    from transformers_trainer import StreamingDiLoCoCallback

    gathered = list[int]()

    class Gathering(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training:
                tokens = self.accelerator.gather_for_metrics(inputs["labels"])
                gathered.append(len(tokens) + len(self.accelerator.gather(inputs["labels"])))
            return super().compute_loss(model, inputs, *args, **kwargs)

    said = said_by("lightning_sdiloco")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    )
    rows = torch.randint(0, 50, (64, 1), generator=torch.Generator().manual_seed(1)) + torch.arange(
        16
    )
    data = [{"input_ids": row % 50, "labels": row % 50} for row in rows]
    best: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    often: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 4,
        "max_steps": 12,
    }
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **best,
        **often,
    )
    trainer = Gathering(model=model, args=arguments, train_dataset=data, eval_dataset=data[:16])
    callback = StreamingDiLoCoCallback(
        trainer, sync_every=3, overlap_steps=1, fragments="strided:1"
    )
    trainer.add_callback(callback)
    trainer.train()
    assert gathered == [8] * 12, "of this rank alone"
    assert [text for text in said if "in a row" in text] == []
    assert callback.engine.is_finished
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-4")
    loaded = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert agreed({name: values.clone() for name, values in model.state_dict().items()})
    assert [
        name for name, values in loaded.items() if not torch.equal(values, model.state_dict()[name])
    ] == []

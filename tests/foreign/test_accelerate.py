"""Loops of accelerate, and the Trainer of transformers: the examples train, and resume where they
were stopped.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sdiloco import StreamingDiLoCo
from tests.bits import same
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
        line = next(line for line in printed.splitlines() if line.startswith("loss"))
        # Without the bytes: a checkpoint before all fragments have landed takes an exchange.
        return line.split(",")[0]

    uninterrupted = loss("--steps", 44, "--folder", "whole")
    assert float(uninterrupted.split()[1]) < 4.0
    loss("--steps", 22, "--folder", "half")  # a fragment is in flight then
    assert loss("--steps", 44, "--folder", "half", "--resume") == uninterrupted


@in_ranks(2, timeout=200.0)
def test_silent_substitutions_by_accelerate_are_refused(rank: int, tmp_path: Path) -> None:
    """The state that rank 0 alone keeps, and the model that it wraps over all ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    over_all_ranks = accelerator.prepare(torch.nn.Linear(3, 4))
    words = "DistributedDataParallel over ranks 0 and 1"
    assert words in refusal(StreamingDiLoCo, over_all_ranks)
    torch.manual_seed(rank)
    model = accelerator.prepare_model(torch.nn.Linear(300, 400), evaluation_mode=True)
    accelerator.register_for_checkpointing(StreamingDiLoCo(model))
    accelerator.save_state(tmp_path)
    accelerator.wait_for_everyone()
    if rank == 0:
        accelerator.load_state(tmp_path)
    else:
        error = refusal(accelerator.load_state, tmp_path)
        assert error.startswith("This is the state of rank 0 of worker group 0")


# The Trainer of transformers

QUIET: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
EVERY_8_STEPS = {"eval_strategy": "steps", "eval_steps": 8, "save_steps": 8, "max_steps": 24}
EVERY_4_STEPS = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "max_steps": 12}
ROUNDS = {"sync_every": 6, "overlap_steps": 3, "fragments": "strided:1"}


def with_callback(trainer: Any, resume: str | None = None, **choices: Any) -> Any:
    """Adds the callback of the example to a Trainer, and returns it."""
    sys.path.append(str(EXAMPLES))
    from transformers_trainer import StreamingDiLoCoCallback

    callback = StreamingDiLoCoCallback(trainer, resume, **choices)
    trainer.add_callback(callback)
    return callback


def gpt2(words: int, positions: int, width: int, layers: int, heads: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=words, n_positions=positions, n_embd=width, n_layer=layers, n_head=heads
    )
    return GPT2LMHeadModel(config)


def counting_rows(count: int, words: int, positions: int) -> list[dict[str, torch.Tensor]]:
    """Texts that count, each from a number of its own."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(0, words, (count, 1), generator=generator)
    rows = (first + torch.arange(positions)) % words
    return [{"input_ids": row, "labels": row} for row in rows]


def parameter_count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in model.state_dict().items()}


def trained(
    trainer: Any, callback: Any, resume: str | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run of 24 steps, and the model at its end."""
    trainer.train(resume_from_checkpoint=resume)
    assert callback.engine.topology.num_groups == 2
    assert trainer.state.global_step == 24
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert agreed(losses)
    assert losses[-1] < losses[0]
    return losses, state_of(trainer.model)


@in_ranks(2, timeout=200.0)
def test_the_trainer_of_transformers_trains_worker_groups_and_resumes(
    rank: int, tmp_path: Path
) -> None:
    from transformers import Trainer, TrainingArguments

    def train(name: str, resume: str | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = gpt2(words=300, positions=32, width=64, layers=3, heads=4)
        assert parameter_count(model) > 100_000
        rows = counting_rows(256, words=300, positions=32)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / name),
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            **EVERY_8_STEPS,
            **QUIET,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:32])
        return trained(trainer, with_callback(trainer, resume, **ROUNDS), resume)

    losses, model = train("whole")
    assert agreed(model)
    resumed_losses, resumed_model = train("resumed", str(tmp_path / "whole" / "checkpoint-16"))
    assert resumed_losses == losses
    assert same(resumed_model, model)


WORDS = [f"w{number}" for number in range(300)]


def save_untrained_bert(folder: Path) -> None:
    """A BERT as it would be downloaded, with a tokenizer of the words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )
    fast_tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        max_position_embeddings=32,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)


def pairs_of_sentences(count: int, seed: int) -> Any:
    """Sentences, and others with half of their words."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(len(WORDS), (count, 8), generator=generator)
    anchors = []
    positives = []
    for row in numbers.tolist():
        words = [WORDS[number] for number in row]
        anchors.append(" ".join(words))
        positives.append(" ".join(words[::2]))
    return Dataset.from_dict({"anchor": anchors, "positive": positives})


def sentence_trainer(bert: Path, folder: Path, make_loss: Any) -> Any:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.models import Pooling, Transformer

    torch.manual_seed(0)
    transformer = Transformer(str(bert), max_seq_length=16)
    pooling = Pooling(transformer.get_word_embedding_dimension())
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    assert parameter_count(model) > 100_000
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        **EVERY_8_STEPS,
        **QUIET,
    )
    loss = make_loss(model)
    train_pairs = pairs_of_sentences(384, seed=1)
    return SentenceTransformerTrainer(
        model, arguments, train_pairs, pairs_of_sentences(64, seed=2), loss
    )


@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None,
    reason="is not installed: make foreign",
)
@in_ranks(2, timeout=200.0)
def test_the_trainer_of_sentence_transformers_trains_worker_groups_and_resumes(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same callback, of a trainer that computes its losses from pairs of sentences."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from sentence_transformers.losses import MultipleNegativesRankingLoss, SoftmaxLoss

    bert = tmp_path / f"bert-{rank}"
    save_untrained_bert(bert)

    def train(name: str, resume: str | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer = sentence_trainer(bert, tmp_path / name, MultipleNegativesRankingLoss)
        callback = with_callback(trainer, resume, **ROUNDS)
        losses, state = trained(trainer, callback, resume)
        assert trainer.model.encode(["w1 w2 w3"]).shape == (1, 64)
        return losses, state

    losses, model = train("whole")
    assert agreed(model)
    resumed_losses, resumed_model = train("resumed", str(tmp_path / "whole" / "checkpoint-16"))
    assert resumed_losses == losses
    assert same(resumed_model, model)

    with_head = sentence_trainer(bert, tmp_path / "head", lambda model: SoftmaxLoss(model, 64, 3))
    with_callback(with_head, **ROUNDS)
    words = "The optimizer steps 2 parameters that are not the model's"
    assert refusal(with_head.train).startswith(words)


@in_ranks(2, timeout=200.0)
def test_the_best_model_stays_and_a_loss_that_gathers_couples_no_groups(
    rank: int, tmp_path: Path
) -> None:
    """The best is that of the first evaluation here; the loss gathers as those of TRL do."""
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments

    gathered = list[int]()

    class Gathering(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training:
                labels = inputs["labels"]
                for_metrics = self.accelerator.gather_for_metrics(labels)
                gathered.append(len(for_metrics) + len(self.accelerator.gather(labels)))
            return super().compute_loss(model, inputs, *args, **kwargs)

    messages = said_by("lightning_sdiloco")
    model = gpt2(words=50, positions=16, width=32, layers=2, heads=2)
    rows = counting_rows(64, words=50, positions=16)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
        **EVERY_4_STEPS,
        **QUIET,
    )
    trainer = Gathering(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:16])
    choices = {"sync_every": 3, "overlap_steps": 1, "fragments": "strided:1"}
    callback = with_callback(trainer, **choices)
    trainer.train()
    assert gathered == [8] * 12, "of this rank alone"
    assert [text for text in messages if "in a row" in text] == []
    assert callback.engine.is_finished
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-4")
    state = state_of(model)
    assert agreed(state)
    best = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert [name for name, values in best.items() if not torch.equal(values, state[name])] == []

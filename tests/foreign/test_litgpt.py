"""litgpt's own pretraining, which never calls ``finish()``: its files hold trained values."""

import contextlib
import importlib.util
import io
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, IterableDataset

import lightning_sdiloco  # noqa: F401
from tests.ranks import in_ranks

WINDOW = 64
MICRO_BATCH = 16
STEPS = 64


def windows() -> list[torch.Tensor]:
    """Windows of the sources of Python's standard library, as bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py"))[:60])
    characters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return list(characters.unfold(0, WINDOW + 1, WINDOW).int())


class HeldOut(IterableDataset[torch.Tensor]):
    """Held-out windows of the text, the same for all ranks."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(windows()[:640])


@pytest.mark.foreign
@pytest.mark.skipif(
    importlib.util.find_spec("litgpt") is None, reason="litgpt is not installed: make foreign"
)
@in_ranks(2, timeout=280.0)
def test_the_files_of_a_loop_that_never_finishes_are_as_good_as_it_says(
    rank: int, tmp_path: Path
) -> None:
    """64 steps, in which nothing launches: the last file held the initial model, whose loss is
    5.5.
    """
    sys.argv[1:] = ["small"]  # litgpt saves how it was called, with the name of a model
    os.environ["TORCHDYNAMO_DISABLE"] = (
        "1"  # litgpt would compile the model, which is not tested here
    )
    from litgpt import GPT, Config
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule
    from litgpt.pretrain import main
    from litgpt.utils import chunked_cross_entropy

    class Library(DataModule):
        def connect(self, *args: Any, **kwargs: Any) -> None:
            """litgpt tells of tokenizer and sizes."""

        def train_dataloader(self) -> DataLoader[torch.Tensor]:
            return DataLoader(windows()[640:8640], batch_size=MICRO_BATCH, shuffle=True)

        def val_dataloader(self) -> DataLoader[torch.Tensor]:
            return DataLoader(HeldOut(), batch_size=MICRO_BATCH)

    def loss_of(file: Path) -> float:
        """The loss of the model in a file, as litgpt's validation computes it."""
        model = GPT(config)
        # litgpt saves its DataLoader, too.
        model.load_state_dict(torch.load(file, weights_only=False)["model"])
        losses = []
        with torch.no_grad():
            for batch in DataLoader(HeldOut(), batch_size=MICRO_BATCH):
                logits = model(batch[:, :-1])
                losses.append(chunked_cross_entropy(logits, batch[:, 1:].long()))
        return torch.stack(losses).mean().item()

    config = Config(
        name="small", block_size=WINDOW, padded_vocab_size=256, n_layer=2, n_head=4, n_embd=128
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy="streaming_diloco")
    fabric.launch()
    train = TrainArgs(
        save_interval=40,
        log_interval=8,
        global_batch_size=MICRO_BATCH * 2,
        micro_batch_size=MICRO_BATCH,
        max_tokens=STEPS * 2 * MICRO_BATCH * WINDOW,
        lr_warmup_steps=8,
        max_norm=1.0,
        min_lr=1e-4,
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(
            fabric=fabric,
            devices=2,
            seed=0,
            config=config,
            data=Library(),
            out_dir=tmp_path,
            train=train,
            eval=EvalArgs(interval=40, max_iters=40, final_validation=True),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 3e-3}},
            initial_checkpoint_dir=None,
            resume=False,
            tokenizer_dir=None,
            tokenizer=None,
        )
    if rank == 0:
        printed_losses = re.findall(r"val loss:? (\d+\.\d+)", printed.getvalue())
        names = ("step-00000040", "final")
        losses = [loss_of(tmp_path / name / "lit_model.pth") for name in names]
        assert losses == pytest.approx(list(map(float, printed_losses)), rel=0.01)

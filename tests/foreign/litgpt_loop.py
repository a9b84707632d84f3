"""litgpt's own `pretrain` with the strategy of Fabric: ``python -m torch.distributed.run litgpt_loop.py FOLDER``.

It knows nothing of ``finish()``. It validates each rank's own model, and saves with ``fabric.save``.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from litgpt import GPT, Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.pretrain import main
from litgpt.utils import chunked_cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_sdiloco  # noqa: F401

WINDOW, MICRO_BATCH, STEPS, RANKS = 64, 16, 64, 2
CONFIG = Config(name="small", block_size=WINDOW, padded_vocab_size=256, n_layer=2, n_head=4, n_embd=128)


class Text(Dataset[torch.Tensor]):
    """Windows of the sources of Python's standard library, as bytes."""

    def __init__(self, first: int, windows: int) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py"))[:60])
        self.text, self.first, self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8), first, windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> torch.Tensor:
        begin = (self.first + index) * WINDOW
        return self.text[begin : begin + WINDOW + 1].int()


class HeldOut(IterableDataset[torch.Tensor]):
    """Windows of the text that nobody trains on, the same for all ranks."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (Text(0, 640)[index] for index in range(640))


class Library(DataModule):
    """The text in batches, some of it kept for validation."""

    def connect(self, *args: Any, **kwargs: Any) -> None:
        """litgpt tells of tokenizer and sizes."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Text(640, 8_000), batch_size=MICRO_BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(HeldOut(), batch_size=MICRO_BATCH)


def pretrain(folder: Path) -> None:
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="streaming_diloco")
    fabric.launch()
    train = TrainArgs(
        save_interval=40,
        log_interval=8,
        global_batch_size=MICRO_BATCH * RANKS,
        micro_batch_size=MICRO_BATCH,
        max_tokens=STEPS * RANKS * MICRO_BATCH * WINDOW,
        lr_warmup_steps=8,
        max_norm=1.0,
        min_lr=1e-4,
    )
    main(
        fabric=fabric,
        devices=RANKS,
        seed=0,
        initial_checkpoint_dir=None,
        resume=False,
        config=CONFIG,
        data=Library(),
        out_dir=folder,
        tokenizer_dir=None,
        tokenizer=None,
        train=train,
        eval=EvalArgs(interval=40, max_iters=40, final_validation=True),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 3e-3}},
    )


def loss_of(file: Path) -> float:
    """The loss of what a file holds, as litgpt's validation computes it."""
    model = GPT(CONFIG)
    # litgpt saves its DataLoader, too.
    model.load_state_dict(torch.load(file, weights_only=False)["model"])
    loader = DataLoader(HeldOut(), batch_size=MICRO_BATCH)
    with torch.no_grad():
        losses = [chunked_cross_entropy(model(batch[:, :-1]), batch[:, 1:].long()) for batch in loader]
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    pretrain(Path(sys.argv[1]))
    for saved in ("step-00000040", "final") if os.environ["RANK"] == "0" else ():
        print(f"{saved} holds {loss_of(Path(sys.argv[1], saved, 'lit_model.pth'))}")

"""Text that every machine has: the source code of Python's standard library, divided into windows
of bytes.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

VALIDATION_SHARE = 0.05
INSTALLED_PACKAGES = {"site-packages", "dist-packages"}


def standard_library_sources() -> list[Path]:
    """Lists every ``.py`` file of the running interpreter's standard library, in the same order on
    every machine.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = (
        path
        for path in root.rglob("*.py")
        if INSTALLED_PACKAGES.isdisjoint(path.relative_to(root).parts)
    )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def build_corpus(target: Path) -> None:
    """Writes all sources into one file, separated by zero bytes. The file appears only when it is
    complete.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        for path in standard_library_sources():
            file.write(path.read_bytes() + b"\0")
    unfinished.replace(target)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of a text, which is ``uint8`` of shape ``(length,)``: ``count``
    windows, or all that fit.

    Each window yields ``context`` bytes and the bytes that follow them.
    """

    def __init__(self, text: Tensor, context: int, count: int | None = None) -> None:
        fitting = (len(text) - 1) // context
        stride = 1 if count is None else fitting // count
        if stride < 1:
            raise ValueError(
                f"{count} windows of {context} bytes were asked for, but the text holds only"
                f" {fitting}."
            )
        self.text = text
        self.context = context
        self.stride = stride
        self.count = fitting if count is None else count

    def __len__(self) -> int:
        return self.count

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class StandardLibraryText(LightningDataModule):
    """The source of Python's standard library (about 30 MB), the last 5 % of it for validation.

    Training windows are shuffled once per epoch by Lightning's ``DistributedSampler``, which gives
    each rank its own share. Validation windows are the same in every run.

    Args:
        context: Bytes in one window, which is also the context of the model.
        batch_size: Windows per rank and step.
        validation_windows: Windows in the validation set, over all ranks.
        cache_dir: The folder in which the corpus is built on first use.
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 8,
        validation_windows: int = 512,
        cache_dir: str = "data",
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.validation_windows = validation_windows
        # The sources differ between versions of Python, so each version has its own corpus.
        self.corpus = Path(cache_dir) / f"python-{platform.python_version()}.bin"

    @override
    def prepare_data(self) -> None:
        if not self.corpus.exists():
            build_corpus(self.corpus)

    @override
    def setup(self, stage: str) -> None:
        size = self.corpus.stat().st_size
        text = torch.from_file(str(self.corpus), size=size, dtype=torch.uint8)
        split = int(size * (1 - VALIDATION_SHARE))
        self.training = Windows(text[:split], self.context)
        self.validation = Windows(text[split:], self.context, self.validation_windows)

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.validation, batch_size=32)

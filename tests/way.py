"""The way of one outer gradient, from launch to landing: how many files and functions it passes.

``python -m tests.way`` prints the files in their order. A reader who follows one gradient opens
these files, and turns from one to another that often.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import lightning_sdiloco
from lightning_sdiloco import SimulatedGroups

PACKAGE = Path(lightning_sdiloco.__file__).parent


class Way(NamedTuple):
    """The functions of the package that were called, in their order: file and name of each."""

    calls: list[tuple[str, str]]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def functions(self) -> int:
        return len(set(self.calls))

    @property
    def changes_of_file(self) -> int:
        files = [file for file, _ in self.calls]
        return sum(before != after for before, after in zip(files, files[1:], strict=False))


def way_of_one_gradient() -> Way:
    """Follows one fragment of two simulated groups: its launch, its flight and its landing."""
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=4, overlap_steps=1, fragments=1)
    for _ in range(3):
        groups.step()
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            calls.append((str(path.relative_to(PACKAGE)), frame.f_code.co_name))

    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.add_(0.01)
    sys.setprofile(note)
    try:
        launched = groups.step()
        landed = groups.step()
    finally:
        sys.setprofile(None)
    assert [len(landings) for landings in launched + landed] == [0, 0, 1, 1]
    return Way(calls)


if __name__ == "__main__":
    way = way_of_one_gradient()
    for file in way.files:
        count = sum(each == file for each, _ in way.calls)
        print(f"{count:5}  {file}")
    print(
        f"{len(way.files)} files, {way.functions} functions, {len(way.calls)} calls,"
        f" {way.changes_of_file} changes of file"
    )

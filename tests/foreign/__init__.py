"""Foreign projects with the one-line change: they work with worker groups as with DDP.

Projects that are built on torchvision have a folder for themselves. Its compiled part may need CUDA
libraries, which a torch for CPUs does not have, and torchmetrics, which imports torchvision
wherever it is, would fail with it.
"""

import importlib.util
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  torchmetrics comes with it, before the folder is there
import torch

sys.path.append(str(Path(sys.prefix, "vision")))
if importlib.util.find_spec("torchvision") is not None:
    try:
        import torchvision
    except RuntimeError:
        # Two operators of detection are missing, which none of the projects calls.
        _OPERATORS = torch.library.Library("torchvision", "DEF")
        for _name in ("nms", "qnms"):
            _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401

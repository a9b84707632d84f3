"""Fixes the layout of DDP's gradient buckets at the start: a resumed fit then adds gradients in the same order."""

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco.lightning.host.patching import replace


def fix_bucket_order(model: DistributedDataParallel) -> None:
    """Makes DistributedDataParallel rebuild its buckets now, before the first step."""
    module, parameters = model.module, [p for p in model.module.parameters() if p.requires_grad]
    sparse = {id(part.weight) for part in module.modules() if _has_sparse_gradient(part)}

    def read(parameter: Tensor) -> Tensor:
        if id(parameter) in sparse:
            parameter = embedding(torch.zeros(1, dtype=torch.long, device=parameter.device), parameter, sparse=True)
        return parameter.sum()

    def forward() -> Tensor:
        total = read(parameters[0])
        for parameter in parameters[1:]:
            total = total.to(parameter) + read(parameter)
        return total * 0

    with ExitStack() as undo, torch.enable_grad():
        replace(undo, module, "forward", forward)
        model().backward()
    for parameter in parameters:
        parameter.grad = None


def _has_sparse_gradient(part: nn.Module) -> bool:
    return isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse

"""Fixes the layout of DDP's gradient buckets at the start: a resumed fit then adds gradients in the same order."""

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco.lightning.host.patching import replace


def fix_bucket_order(model: DistributedDataParallel) -> None:
    """Makes DistributedDataParallel rebuild its buckets now, before the first step.

    It rebuilds them once, after the first backward pass, in the order in which gradients became ready. So the first
    step of a resumed fit would add the gradients of three or more ranks in another order than a run without
    interruption, and round differently. A backward pass of zeros gives all steps the same layout; in it gradients
    become ready from the last parameter to the first, as they mostly do. For two ranks the order of a sum does not
    matter.

    Args:
        model: A model that has not been used yet. All ranks of its process group must call this.
    """
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

"""One layout of gradient buckets for every fit, so that a resumed one adds gradients in the same order."""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel


def fix_bucket_order(model: DistributedDataParallel) -> None:
    """Lets DistributedDataParallel rebuild its buckets now, before the first step.

    It rebuilds them once, after the first backward, in the order in which gradients became ready. So the first step of
    a resumed fit would add the gradients of three and more ranks in another order than the run that never stopped, and
    round differently. A backward of zeros, in which gradients become ready from the last parameter to the first as they
    mostly do, makes the layout the same for all steps. With two ranks the order of a sum does not matter.

    Args:
        model: A model that has not been used yet. All ranks of its process group must call this.
    """
    module, parameters = model.module, [p for p in model.module.parameters() if p.requires_grad]
    sparse = {id(part.weight) for part in module.modules() if _has_sparse_gradient(part)}

    def read(parameter: Tensor) -> Tensor:
        if id(parameter) in sparse:
            parameter = embedding(torch.zeros(1, dtype=torch.long, device=parameter.device), parameter, sparse=True)
        return parameter.sum()

    def chain() -> Tensor:
        total = read(parameters[0])
        for parameter in parameters[1:]:
            total = total.to(parameter) + read(parameter)
        return total * 0

    # An attribute of the instance hides the method of its class. There may be one already, such as a compiled forward.
    own = vars(module).copy()
    module.forward = chain
    try:
        with torch.enable_grad():
            model().backward()
    finally:
        del module.forward
        if "forward" in own:
            module.forward = own["forward"]
    for parameter in parameters:
        parameter.grad = None


def _has_sparse_gradient(part: nn.Module) -> bool:
    return isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse

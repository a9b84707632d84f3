"""What DistributedDataParallel does otherwise inside a worker group: less memory, and an order that a resume keeps."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sdiloco.lightning.host.patching import replace

# One rank has no gradients to average, and no need of buckets: 5 bytes a parameter.

# Arguments with which DistributedDataParallel does more than to average gradients.
_MORE = frozenset({"mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"})


def has_nothing_to_average(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Tells whether `SingleRankDDP` does for a single rank what DistributedDataParallel does."""
    given = {name for name, value in arguments.items() if value is not None}
    return not given & _MORE and any(parameter.requires_grad for parameter in module.parameters())


class SingleRankDDP(DistributedDataParallel):
    """Is what Lightning and users expect of a wrapped model, and hands every call on to the module."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        trained = next(parameter for parameter in module.parameters() if parameter.requires_grad)
        # All that others may ask of a wrapper is there, with buckets for a single value.
        stub = nn.Module()
        stub.value = Parameter(trained.new_zeros(1))
        super().__init__(stub, **arguments)
        self._arguments = arguments
        self._module_parameters = list(module.parameters())
        self.module = module
        self.reducer: Any = _NoReducer()

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        is_single = isinstance(self.reducer, _NoReducer)
        return self.module(*inputs, **kwargs) if is_single else super().forward(*inputs, **kwargs)

    @override
    def register_comm_hook(self, state: Any, hook: Any) -> None:
        if isinstance(self.reducer, _NoReducer):
            module, is_training = self.module, self.training
            super().__init__(module, **self._arguments)
            self.training = is_training
        super().register_comm_hook(state, hook)


class _NoReducer:
    """Stands in the place of what averages gradients, for those who tell it about a backward pass of their own."""

    def prepare_for_forward(self) -> None: ...

    def prepare_for_backward(self, outputs: list[Any]) -> None: ...

    def _rebuild_buckets(self) -> bool:
        return False


# Three ranks and more add gradients in the order of their buckets, which torch lays out anew after the first step.


def fix_bucket_order(model: DistributedDataParallel) -> None:
    """Makes DistributedDataParallel rebuild its buckets now: a resumed fit then adds gradients in the same order."""
    module, parameters = model.module, [p for p in model.module.parameters() if p.requires_grad]
    embeddings = (part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    sparse = {id(part.weight) for part in embeddings if part.sparse}

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


# Gradients go before the forward pass, where Lightning lets them go after it: 1.1 bytes a parameter, of 100 million.

# What glibc keeps at the end of its heap at most. If less goes before the forward pass, glibc gives it back to the
# system in every batch, where later it would not: 1 to 4 % of the processor time of up to 11 million parameters.
_LEAST_BYTES = 1 << 26


def release_gradients(trainer: Any, optimizers: Iterable[Optimizer], batch_idx: int, nbytes: int) -> None:
    """Lets the gradients of the batch before go, if they are large and no hook of the user's may look at them."""
    module, begins = trainer.lightning_module, batch_idx % trainer.accumulate_grad_batches == 0
    if nbytes < _LEAST_BYTES or not begins or not module.automatic_optimization:
        return
    hooks = [getattr(module, name) for name in ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad")]
    hooks += [callback.on_before_zero_grad for callback in trainer.callbacks]
    # Lightning's own, by where it was written, in either distribution.
    if all(getattr(hook, "__module__", "").startswith(("lightning.", "pytorch_lightning.")) for hook in hooks):
        for optimizer in optimizers:
            optimizer.zero_grad()

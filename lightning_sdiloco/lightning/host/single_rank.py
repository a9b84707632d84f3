"""DistributedDataParallel for a worker group of one rank, which has no gradients to average: without buckets."""

from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

# Arguments with which DistributedDataParallel does more than to average gradients.
_MORE = frozenset({"mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"})


class SingleRankDDP(DistributedDataParallel):
    """Is what Lightning and users expect of a wrapped model, and hands every call on to the module."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        trained = next(parameter for parameter in module.parameters() if parameter.requires_grad)
        # All that others may ask of a wrapper is there, with buckets for a single value.
        super().__init__(_Stub(trained), **arguments)
        self._arguments = arguments
        self._module_parameters = list(module.parameters())
        self.module = module
        self.reducer: Any = _NoReducer()

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        is_single = isinstance(self.reducer, _NoReducer)
        return self.module(*inputs, **kwargs) if is_single else super().forward(*inputs, **kwargs)

    @override
    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Registers a hook that gets every bucket of gradients."""
        if isinstance(self.reducer, _NoReducer):
            module, is_training = self.module, self.training
            super().__init__(module, **self._arguments)
            self.training = is_training
        super().register_comm_hook(state, hook)


class _Stub(nn.Module):
    def __init__(self, like: Parameter) -> None:
        super().__init__()
        self.value = Parameter(like.new_zeros(1))


class _NoReducer:
    """Stands in the place of what averages gradients, for those who tell it about a backward pass of their own."""

    def prepare_for_forward(self) -> None:
        """Does nothing."""

    def prepare_for_backward(self, outputs: list[Any]) -> None:
        """Does nothing."""

    def _rebuild_buckets(self) -> bool:
        return False


def has_nothing_to_average(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Tells whether `SingleRankDDP` does for a single rank what DistributedDataParallel does."""
    given = {name for name, value in arguments.items() if value is not None}
    return not given & _MORE and any(parameter.requires_grad for parameter in module.parameters())

"""The inner optimizers of the training loop, and their recovery from non-finite state."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.engine.shards import local
from lightning_sdiloco.engine.weight_copies import WeightCopies


class InnerOptimizers:
    """The optimizers that step the fragments' parameters.

    Attributes:
        optimizers: The optimizers.
        copies: The copies of the weights that the optimizers keep.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.copies = WeightCopies(optimizers)

    @property
    def rate(self) -> float:
        """The largest learning rate stored on the host, or 0 if there is none."""
        rates = [0.0]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                is_on_host = not isinstance(rate, Tensor) or rate.device.type == "cpu"
                if rate is not None and is_on_host:
                    rates.append(float(rate))
        return max(rates)

    def recover(self, parameters: Sequence[Tensor], in_group: Communicator) -> None:
        """Resets the optimizer state of each parameter for which this state is not finite. In-group
        collective.
        """
        is_finite = on_all_ranks([self._has_finite_state(p) for p in parameters], in_group)
        all_copies = self.copies.of(parameters)
        for optimizer in self.optimizers:
            for parameter, copies, is_kept in zip(parameters, all_copies, is_finite, strict=True):
                if is_kept:
                    continue
                if copies:
                    # The optimizer would not recreate copies of the weights that it made at the
                    # start.
                    clear_not_finite(optimizer.state.get(parameter, {}))
                else:
                    optimizer.state.pop(parameter, None)

    def _has_finite_state(self, parameter: Tensor) -> bool:
        for optimizer in self.optimizers:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and not bool(local(value).isfinite().all()):
                    return False
        return True


def is_in_backward() -> bool:
    """Returns whether the current thread is running a backward pass.

    Autograd runs accelerator work in separate threads, where an optimizer that is part of the
    backward pass takes its steps.
    """
    return torch._C._current_graph_task_id() != -1


def on_all_ranks(facts: Sequence[bool], in_group: Communicator) -> list[bool]:
    """Returns which facts are true on all ranks of the group so that all ranks act alike. In-group
    collective.
    """
    of_ranks = in_group.all_gather_object(list(facts))
    return [all(of_fact) for of_fact in zip(*of_ranks, strict=True)]


def clear_not_finite(state: Mapping[str, object]) -> None:
    """Replaces non-finite values in an optimizer's state with zeros."""
    for value in state.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            local(value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

"""The arithmetic of a flight that the fixed world and a federation share: outer step, buffers, norms."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sdiloco.comm import Communicator
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.measurements import Span
from lightning_sdiloco.engine.outer.optimizer import OuterState


def outer_step(
    fragment: FragmentState, before: OuterState, values: Tensor, gradient: Tensor, *, counts: bool, final: bool
) -> OuterState:
    """Returns the outer state after a landing; its values are on the device of the gradient.

    Args:
        fragment: The fragment.
        before: Its outer state before, stored.
        values: The outer parameters of that state, on the device.
        gradient: Mean outer gradient of the shard. It may be overwritten.
        counts: Whether anybody has trained.
        final: Whether it is the end: then it moves without learning rate and momentum.
    """
    if not final and counts:
        return fragment.optimizer.step(fragment.index, before, values, gradient)
    return before._replace(values=torch.sub(values, gradient, out=gradient) if final else values, lr=0.0)


def mean_of_buffers(tails: Sequence[Tensor]) -> Tensor:
    """Returns the plain mean of flat float32 buffers that came as bytes, one tensor from each group that counts."""
    return torch.stack([tail.clone().view(torch.float32) for tail in tails]).mean(dim=0)


def norm_squared(gradient: Tensor) -> float:
    """Returns the squared norm of a shard of an outer gradient, as control vectors carry it."""
    return float(torch.linalg.vector_norm(gradient)) ** 2


def whole_norm(gradient: Tensor, group: Communicator) -> float:
    """Returns the norm of the mean outer gradient of the whole fragment. In-group collective."""
    norm = torch.linalg.vector_norm(gradient).reshape(1)
    if group.size > 1:
        norm = torch.cat(group.all_gather(norm))
    return float(torch.linalg.vector_norm(norm))


def span_from(began: float, device: torch.device) -> Span:
    """Ends a part of a flight: waits for the stream of the background, so that the part holds what it started.

    The training thread and its stream wait for nothing.
    """
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
    return began, time.perf_counter()

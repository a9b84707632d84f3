"""The arithmetic of a flight that the fixed world and a federation share: outer step, buffers, norms."""

import logging
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sdiloco.comm import Communicator
from lightning_sdiloco.engine.fragments import FragmentState
from lightning_sdiloco.engine.measurements import Span
from lightning_sdiloco.engine.outer.optimizer import OuterState

_log = logging.getLogger(__name__)


def outer_step(
    fragment: FragmentState, before: OuterState, values: Tensor, gradient: Tensor, *, counts: bool, final: bool
) -> OuterState:
    """Returns the outer state after a landing; its values are on the device of the gradient."""
    if not final and counts:
        return fragment.optimizer.step(fragment.index, before, values, gradient)
    return before._replace(values=torch.sub(values, gradient, out=gradient) if final else values, lr=0.0)


def mean_of_buffers(
    tails: Mapping[str, Tensor], outer: Mapping[str, Tensor], *, keeps: bool = True, says: bool = True
) -> Tensor:
    """Returns the plain mean of buffers, flat; see `finite_mean`."""
    rows = torch.stack([tail.clone().view(torch.float32) for tail in tails.values()])
    if bool(rows.isfinite().all()):
        return rows.mean(dim=0)
    means, left_out, sizes = list[Tensor](), dict[str, str](), [one.numel() for one in outer.values()]
    for own, (name, before) in zip(rows.split(sizes, dim=1), outer.items(), strict=True):
        finite = _are_finite(own)
        # What is infinite by design, as a mask may be, is so everywhere.
        if any(finite) or bool(before.isfinite().all()):
            left_out |= {who: name for who, is_finite in zip(tails, finite, strict=True) if not is_finite}
        means.append(finite_mean(own, before.flatten() if keeps else None))
    if left_out and says:
        _log.warning(
            "Buffers that are not finite are left out of the mean, and the outer ones take their place: %s.",
            ", ".join(f"{name!r} of {who}" for who, name in left_out.items()),
        )
    return torch.cat(means)


def finite_mean(rows: Tensor, outer: Tensor | None) -> Tensor:
    """Returns the plain mean of a buffer over the groups in which all of it is finite."""
    finite = _are_finite(rows)
    return rows[finite].mean(dim=0) if any(finite) else rows.mean(dim=0) if outer is None else outer


def _are_finite(rows: Tensor) -> list[bool]:
    return [bool(row.isfinite().all()) for row in rows]


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
    """Ends a part of a flight: waits for the stream of the background, so that the part holds what it started."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
    return began, time.perf_counter()

"""Outer steps of torch's SGD with Nesterov momentum in one pass over the values, where they could be compiled.

torch takes three passes, and copies on which it works. ``nesterov.c`` reads values, momentum and gradient once and
writes what comes of them where it stays, with the same bits; see [Note: compiled in the background].
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from lightning_sdiloco.memory import new_vector
from lightning_sdiloco.native import NativeLibrary

MOMENTUM = "momentum_buffer"
"""Under which key torch's SGD keeps the momentum."""

# What a parameter group of SGD says where it does nothing but Nesterov momentum.
_PLAIN = {"dampening": 0, "weight_decay": 0, "nesterov": True, "maximize": False, "differentiable": False}


def stepped(
    group: Mapping[str, Any], values: Tensor, gradient: Tensor, state: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Makes a step of SGD, if it can: a first step, which has no momentum yet, is left to torch."""
    before = state.get(MOMENTUM)
    native = NATIVE.get() if _is_plain(group) and all(map(_is_vector, (values, gradient, before))) else None
    if native is None or before is None:
        return None
    after = new_vector(values.numel(), values.device)
    _call(native, group, values, gradient, before, after)
    return {**state, MOMENTUM: after}


def _is_plain(group: Mapping[str, Any]) -> bool:
    is_plain = all(group.get(key) == value for key, value in _PLAIN.items()) and not group.get("fused")
    return is_plain and isinstance(group.get("lr"), float) and isinstance(group.get("momentum"), float)


def _is_vector(values: Any) -> bool:
    on_cpu = type(values) is Tensor and values.device.type == "cpu" and values.dtype == torch.float32
    return on_cpu and values.dim() == 1 and values.is_contiguous()


def _call(
    native: ctypes.CDLL, group: Mapping[str, Any], values: Tensor, gradient: Tensor, before: Tensor, after: Tensor
) -> None:
    addresses = (vector.data_ptr() for vector in (values, before, gradient, after))
    native.nesterov_step(*addresses, values.numel(), group["momentum"], -group["lr"])


def _is_proven(native: ctypes.CDLL) -> bool:
    """Tells whether a library gives the bits of torch, for values of all magnitudes and zeros of both signs."""
    values, gradient, before = _sample()
    parameter, after = Parameter(values.clone()), torch.empty_like(before)
    parameter.grad = gradient.clone()
    optimizer = SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    optimizer.state[parameter] = {MOMENTUM: before.clone()}
    with torch.enable_grad():
        optimizer.step()
    _call(native, optimizer.param_groups[0], values, gradient, before, after)
    expected = parameter.detach(), optimizer.state[parameter][MOMENTUM]
    pairs = zip((gradient, after), expected, strict=True)
    return all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs)


def _sample() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 3, 20_001, generator=generator, device="cpu", dtype=torch.float32)
    sample = one * other.mul(12).exp()
    sample[:, ::17], sample[:, 5::19] = 0.0, -0.0
    sample[:, 1024:2048] *= 1e-38
    return sample.clamp_(-1e37, 1e37)


NATIVE = NativeLibrary(
    Path(__file__).with_suffix(".c"),
    {"nesterov_step": (*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_float, ctypes.c_float)},
    _is_proven,
)
"""The same in C, for tensors on a CPU."""

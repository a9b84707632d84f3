"""Between a model and flat float32 vectors: the one place that touches parameters and buffers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sdiloco.partition import Fragment, Parameter


class FragmentLayout:
    """The parameters of a fragment as one flat float32 vector, in the order of their names.

    Args:
        names: Names of the parameters.
        parameters: The parameters, on one device, of any floating dtype.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self.names = tuple(names)
        self.keys = list(parameters)
        self.numel = sum(parameter.numel() for parameter in parameters)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of values of each parameter, by name."""
        return {name: parameter.numel() for name, parameter in zip(self.names, self.keys, strict=True)}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters without autograd. Not kept, because others may rebind ``.data``."""
        return [parameter.detach() for parameter in self.keys]

    def read(self, start: int, length: int) -> Tensor:
        """Copies a stretch of the vector out of the parameters.

        Args:
            start: Position of the first value.
            length: Number of values. Those beyond the end of the vector are zeros.

        Returns:
            A new float32 tensor of shape ``(length,)``.
        """
        flat = self.parameters[0].new_zeros(length, dtype=torch.float32)
        position = 0
        for parameter in self.parameters:
            first, last = max(position, start), min(position + parameter.numel(), start + length)
            if first < last:
                flat[first - start : last - start] = parameter.reshape(-1)[first - position : last - position]
            position += parameter.numel()
        return flat

    def split(self, flat: Tensor) -> list[Tensor]:
        """The vector as one view per parameter, in the parameter's shape."""
        parts = flat[: self.numel].split([parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]

    def write(self, flat: Tensor, mixing: float = 0.0) -> None:
        """Mixes a vector into the parameters: ``mixing * local + (1 - mixing) * flat``.

        With ``mixing=0`` the local values are not even read, so that they may be anything.

        Args:
            flat: float32 tensor with at least ``numel`` values.
            mixing: Share of the local parameters that is kept.
        """
        for parameter, values in zip(self.parameters, self.split(flat), strict=True):
            mix(parameter, values, mixing)

    def write_some(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites some parameters by name with flat vectors of their own."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if name in values:
                parameter.copy_(values[name].view(parameter.shape))

    def is_finite(self) -> bool:
        """Whether all local parameters are finite."""
        return all(bool(parameter.isfinite().all()) for parameter in self.parameters)


class BufferLayout:
    """The persistent floating-point buffers that belong to a fragment, such as the statistics of BatchNorm.

    Those that changed in some group by the last launch travel with the next one; at the first launch, when nothing is
    known yet, and in the last exchange, which none follows, all do. So all groups know the size of a message before
    they get it.

    Args:
        buffers: The buffers by name. They are read and written in place.
    """

    # One bit for each buffer says whether it changed; further ones share the last bit.
    _BITS = 64

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.names = tuple(buffers)
        self.buffers = list(buffers.values())
        self.outer = self.snapshot()
        self._travelling = -1

    def snapshot(self) -> list[Tensor]:
        """Copies of the local buffers, as float32."""
        return [buffer.detach().to(torch.float32, copy=True) for buffer in self.buffers]

    def changed(self, snapshot: list[Tensor]) -> int:
        """Which buffers of a snapshot differ from the outer ones, one bit each."""
        bits = 0
        for index, (local, outer) in enumerate(zip(snapshot, self.outer, strict=True)):
            if not torch.equal(local, outer):
                bits |= 1 << min(index, self._BITS - 1)
        return bits

    def all(self) -> list[int]:
        """Indices of all buffers."""
        return list(range(len(self.buffers)))

    def travelling(self) -> list[int]:
        """Indices of the buffers that travel with the next launch."""
        return [i for i in range(len(self.buffers)) if self._travelling >> min(i, self._BITS - 1) & 1]

    def commit(self, outer: dict[int, Tensor], changed: int) -> None:
        """Takes new outer values by index, and which buffers changed in some group."""
        for index, values in outer.items():
            self.outer[index] = values
        self._travelling = changed

    def saved(self) -> dict[str, Any]:
        """The outer buffers, and which travel with the next launch."""
        return {
            "buffer_names": list(self.names),
            "buffers": [buffer.to("cpu") for buffer in self.outer],
            "travelling": self._travelling,
        }

    def load(self, buffers: Sequence[Tensor], travelling: int) -> None:
        """Takes back what `saved` returned."""
        self.outer = [saved.to(own.device, copy=True) for saved, own in zip(buffers, self.outer, strict=True)]
        self._travelling = travelling

    def by_name(self) -> dict[str, Tensor]:
        """The outer buffers by name."""
        return dict(zip(self.names, self.outer, strict=True))

    def start_from(self, outer: Mapping[str, Tensor]) -> None:
        """Takes outer values by name; a buffer without one keeps what it has. All travel with the next launch."""
        self.load([outer.get(name, own) for name, own in self.by_name().items()], travelling=-1)

    def mix(self, mixing: float, indices: Iterable[int]) -> None:
        """Mixes some outer buffers into the local ones.

        A buffer that did not travel keeps its local value: it may have changed, and travel next time.
        """
        for index in indices:
            mix(self.buffers[index], self.outer[index], mixing)


def mix(local: Tensor, outer: Tensor, mixing: float) -> None:
    """Overwrites ``local`` with ``mixing * local + (1 - mixing) * outer``, computed in at least float32."""
    if mixing == 0:
        local.copy_(outer)
    elif mixing != 1 and local.dtype == outer.dtype:
        torch.lerp(outer, local, mixing, out=local)
    elif mixing != 1:
        dtype = torch.promote_types(local.dtype, torch.float32)
        local.copy_(torch.lerp(outer.to(dtype), local.to(dtype), mixing))


def on_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of tensors in the memory of the host."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that the user wrote, inside DistributedDataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean_name(name: str) -> str:
    """The name of a parameter without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name, tied ones once, in the order of ``named_parameters()``."""
    return {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def described(parameters: dict[str, Tensor]) -> list[Parameter]:
    """What the partition has to know of parameters."""
    return [Parameter(name, p.numel() * p.element_size(), p.ndim) for name, p in parameters.items()]


def aliases(model: nn.Module) -> dict[str, str]:
    """The further names of tied trainable parameters, each with the first name of the same parameter."""
    first: dict[int, str] = {}
    further = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), clean_name(name))
        if parameter.requires_grad and known != clean_name(name):
            further[clean_name(name)] = known
    return further


def buffers_of(model: nn.Module, fragments: Sequence[Fragment]) -> list[dict[str, Tensor]]:
    """The buffers that travel with each fragment: those of modules whose parameters it holds, or the nearest ones."""
    fragment_of = {name: index for index, fragment in enumerate(fragments) for name in fragment.names}
    chosen: list[dict[str, Tensor]] = [{} for _ in fragments]
    for name, buffer in _persistent_floating_buffers(model):
        nearest = max(fragment_of, key=lambda parameter: _common_depth(name, parameter))
        chosen[fragment_of[nearest]][name] = buffer
    return chosen


def _persistent_floating_buffers(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    seen = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            local_name = name[len(prefix) + 1 :] if prefix else name
            persistent = local_name not in module._non_persistent_buffers_set
            if persistent and buffer.is_floating_point() and id(buffer) not in seen:
                seen.add(id(buffer))
                yield clean_name(name), buffer


def _common_depth(one: str, other: str) -> int:
    depth = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        depth += 1
    return depth


def reset_non_finite_state(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> None:
    """Drops the inner optimizer state of the parameters for which it is not finite, so that it starts afresh."""
    for optimizer in optimizers:
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            if any(isinstance(value, Tensor) and not bool(value.isfinite().all()) for value in state.values()):
                del optimizer.state[parameter]

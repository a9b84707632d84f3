"""The buffers that travel with a fragment, such as the statistics of BatchNorm."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdiloco.algorithm import Fragment, mix
from lightning_sdiloco.engine.shards import clean_name, is_sharded

# One bit for each buffer says whether it changed; further ones share the last bit.
_BITS = 64


class FragmentBuffers:
    """Holds the persistent floating-point buffers of a fragment: the model's own, and their outer values."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.names = tuple(buffers)
        self._local = list(buffers.values())
        self.outer = self.snapshot()
        self._travelling = -1

    def snapshot(self) -> list[Tensor]:
        """Returns copies of the local buffers, as float32."""
        return [buffer.detach().to(torch.float32, copy=True) for buffer in self._local]

    def take_local(self) -> None:
        """Takes the local values for the outer ones."""
        self.outer = self.snapshot()

    def changed(self, snapshot: list[Tensor]) -> int:
        """Compares a snapshot with the outer buffers: one bit for each buffer that differs."""
        bits = 0
        for index, (values, outer) in enumerate(zip(snapshot, self.outer, strict=True)):
            if not torch.equal(values, outer):
                bits |= 1 << min(index, _BITS - 1)
        return bits

    def travelling(self, final: bool = False) -> list[int]:
        """Returns the indices of the buffers that travel with the next launch."""
        return [i for i in range(len(self._local)) if final or self._travelling >> min(i, _BITS - 1) & 1]

    def commit(self, outer: Mapping[int, Tensor], changed: int) -> None:
        """Takes new outer values by index, and which buffers changed in some group."""
        for index, values in outer.items():
            self.outer[index] = values
        self._travelling = changed

    def mix(self, mixing: float, indices: Iterable[int]) -> None:
        """Mixes some of the outer buffers into the local ones."""
        for index in indices:
            local, outer = self._local[index], self.outer[index]
            if mixing:
                # Decided on the device, without a wait of the host.
                local.copy_(torch.where(local.isfinite().all(), local, outer.to(local.dtype)))
            mix(local, outer, mixing)

    def write(self) -> None:
        """Overwrites all local buffers with the outer ones."""
        self.mix(0.0, range(len(self._local)))

    def write_values(self, values: Mapping[int, Tensor]) -> None:
        """Overwrites local buffers with other values, by index."""
        for index, buffer in values.items():
            self._local[index].copy_(buffer)

    def named(self) -> dict[str, Tensor]:
        """Returns the outer buffers by name."""
        return dict(zip(self.names, self.outer, strict=True))

    def start_from(self, outer: Mapping[str, Tensor]) -> None:
        """Takes outer values by name; a buffer without one keeps what it has. All travel with the next launch."""
        values = [outer.get(name, own) for name, own in self.named().items()]
        self.load_state_dict({"buffers": values, "travelling": -1})

    def state_dict(self) -> dict[str, Any]:
        """Returns the outer buffers on the host, and which of them travel with the next launch."""
        return {
            "buffer_names": list(self.names),
            "buffers": [buffer.to("cpu") for buffer in self.outer],
            "travelling": self._travelling,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; copies the tensors."""
        pairs = zip(state["buffers"], self.outer, strict=True)
        self.outer = [values.to(own.device, copy=True) for values, own in pairs]
        self._travelling = state["travelling"]


def buffers_of(model: nn.Module, fragments: Sequence[Fragment]) -> list[FragmentBuffers]:
    """Assigns every buffer to the fragment that holds parameters of its module, or of the nearest one."""
    fragment_of = {name: index for index, fragment in enumerate(fragments) for name in fragment.names}
    chosen: list[dict[str, Tensor]] = [{} for _ in fragments]
    for name, buffer in travelling_buffers(model):
        if is_sharded(buffer):
            raise ValueError(
                f"The buffer {name!r} is sharded. Buffers travel whole, from one rank of a group: keep it as a plain"
                " tensor, or register it with persistent=False."
            )
        nearest = max(fragment_of, key=lambda parameter: _common_depth(name, parameter))
        chosen[fragment_of[nearest]][name] = buffer
    return [FragmentBuffers(buffers) for buffers in chosen]


def travelling_buffers(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yields the persistent floating-point buffers by name, each once."""
    seen = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            local_name = name[len(prefix) + 1 :] if prefix else name
            persistent = local_name not in module._non_persistent_buffers_set
            if persistent and buffer.is_floating_point() and id(buffer) not in seen:
                seen.add(id(buffer))
                yield clean_name(name), buffer


def _common_depth(one: str, other: str) -> int:
    """Counts the modules in which two names lie both, from the outermost one."""
    depth = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        depth += 1
    return depth

"""The control vector: what a group says with every launch, apart from the outer gradient itself."""

import struct
from collections.abc import Sequence
from functools import reduce
from math import sqrt
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.algorithm.digest import combined

# What the host knows, and what comes from the device with the outer gradient. The device's part is padded so that
# whatever follows it in a message is aligned.
_HOST, _DEVICE = struct.Struct("<IIHeI"), struct.Struct("<qdQB7x")

# The largest number of a half-precision float.
_LONGEST_STEP = 65504.0


class Control(NamedTuple):
    """The control vector of a rank, or of a group once its ranks are merged.

    It travels in two parts. What the host knows at the launch goes by a route of its own, where it waits for no outer
    gradient. The rest goes in front of the payload.

    Attributes:
        fragment: The fragment that is launched.
        step: The inner step of the launch.
        requests: What the rank asks of all groups, one bit each, such as to stop.
        weight: Micro-batches that the group trained since its own last launch of the fragment, over its ranks.
        digest: Digest of the outer parameters and buffers of the fragment.
        norm_squared: Squared norm of the outer gradient.
        changed: Buffers of the fragment that changed since its last landing, one bit each.
        finite: Whether the outer gradient is finite.
        step_time: Seconds of an inner step, to three digits; 0 where that is not known.

    Examples:
        >>> control = Control(2, 100, requests=0, weight=50, digest=-5, norm_squared=0.25, changed=0, finite=True)
        >>> Control.unpacked(control.packed()) == control, control.packed().numel()
        (True, 48)
    """

    fragment: int
    step: int
    requests: int
    weight: int
    digest: int
    norm_squared: float
    changed: int
    finite: bool
    step_time: float = 0.0

    @property
    def norm(self) -> float:
        """Norm of the outer gradient, before any compression."""
        return sqrt(self.norm_squared)

    def packed(self) -> Tensor:
        """Returns the control vector as a uint8 tensor of shape ``(CONTROL_BYTES,)``, the host's part first."""
        known = _HOST.pack(*self[:3], min(self.step_time, _LONGEST_STEP), self.weight)
        return torch.frombuffer(bytearray(known + _DEVICE.pack(*self[4:-1])), dtype=torch.uint8)

    @staticmethod
    def unpacked(data: Tensor) -> "Control":
        """Reads a control vector back from its bytes."""
        packed = bytes(data.tolist())
        *known, step_time, weight = _HOST.unpack_from(packed)
        *computed, finite = _DEVICE.unpack_from(packed, HOST_BYTES)
        return Control._make([*known, weight, *computed, bool(finite), step_time])

    @staticmethod
    def merged(ranks: Sequence["Control"]) -> "Control":
        """Returns what a group says, given what its ranks say, so that all shards of a fragment decide alike.

        Rank 0 of the group speaks for the buffers. A group trained when all its ranks did.
        """
        return ranks[0]._replace(
            requests=reduce(or_, (rank.requests for rank in ranks)),
            finite=all(rank.finite for rank in ranks),
            weight=sum(rank.weight for rank in ranks) if all(rank.weight for rank in ranks) else 0,
            digest=combined([rank.digest for rank in ranks]),
            norm_squared=sum(rank.norm_squared for rank in ranks),
            step_time=max(rank.step_time for rank in ranks),
        )


HOST_BYTES = _HOST.size
CONTROL_BYTES = HOST_BYTES + _DEVICE.size

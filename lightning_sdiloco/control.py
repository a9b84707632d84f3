"""The control vector: what a group says with every launch, apart from the outer gradient itself."""

import struct
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sdiloco.digest import combined

# Padded to 40 bytes so that what follows it in a message is aligned.
_FORMAT = struct.Struct("<IIHBxIqdQ")


class Control(NamedTuple):
    """The control vector of a rank, or of a group once its ranks are merged.

    Attributes:
        fragment: The fragment that is launched.
        step: The inner step of the launch.
        requests: What the rank asks of all groups, one bit each, such as to stop.
        finite: Whether the outer gradient is finite.
        weight: Inner steps in which the group trained since its own last launch of the fragment.
        digest: Digest of the outer parameters of the fragment.
        norm_squared: Squared norm of the outer gradient.
        changed: Buffers of the fragment that changed since its last landing, one bit each.

    Examples:
        >>> control = Control(2, 100, requests=0, finite=True, weight=50, digest=-5, norm_squared=0.25, changed=0)
        >>> Control.unpacked(control.packed()) == control, control.packed().numel()
        (True, 40)
    """

    fragment: int
    step: int
    requests: int
    finite: bool
    weight: int
    digest: int
    norm_squared: float
    changed: int

    def packed(self) -> Tensor:
        """The control vector as a uint8 tensor of shape ``(CONTROL_BYTES,)``."""
        return torch.frombuffer(bytearray(_FORMAT.pack(*self)), dtype=torch.uint8)

    @staticmethod
    def unpacked(data: Tensor) -> "Control":
        """Reads a control vector back from its bytes."""
        fragment, step, requests, finite, *rest = _FORMAT.unpack(bytes(data.tolist()))
        return Control(fragment, step, requests, bool(finite), *rest)

    @staticmethod
    def merged(ranks: Sequence["Control"]) -> "Control":
        """What a group says, from what its ranks say: every shard of a fragment then takes the same decision.

        Rank 0 of the group speaks for the buffers.
        """
        return ranks[0]._replace(
            requests=reduce(or_, (rank.requests for rank in ranks)),
            finite=all(rank.finite for rank in ranks),
            weight=min(rank.weight for rank in ranks),
            digest=combined([rank.digest for rank in ranks]),
            norm_squared=sum(rank.norm_squared for rank in ranks),
        )


CONTROL_BYTES = _FORMAT.size

"""What groups say at a launch, and how much each counts in a mean: decided from that, and so alike in all of them.

They say the digest of what they hold alike: a number that stands for its bits, by which they see whether it is.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from math import sqrt
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from lightning_sdiloco.algorithm.guard import REMEMBERED, outlying
from lightning_sdiloco.errors import AgreementError

_CONTROL = struct.Struct("<IIHeIqdQB7x")

CONTROL_BYTES = _CONTROL.size

# The largest number of a half-precision float.
_LONGEST_STEP = 65504.0

# A group that is left out this many times in a row will not recover.
_MOST_LEFT_OUT = 3


# How many words are weighed at once: on a CPU they stay in its cache. An accelerator takes more, or it would spend its
# time with the launches of kernels.
_CHUNK = 1 << 17
_CHUNK_ON_DEVICE = 1 << 23


def digest(values: Tensor, start: int = 0) -> int:
    """Returns the digest of a tensor: the sum of its words, each weighed by its position, modulo 2**64, signed.

    A word at an even position and the next one are a number of 64 bits, which is multiplied by its position plus 1.
    Digests of consecutive shards, which begin at ``start`` in the whole, add up to that of the whole.

    Examples:
        >>> whole = torch.arange(10.0)
        >>> digest(whole) == combined([digest(whole[:3]), digest(whole[3:], start=3)])
        True
        >>> digest(whole) == digest(whole.flip(0))
        False
    """
    flat = values.detach().contiguous().view(-1)
    size = flat.element_size()
    words = flat.view(torch.int32) if size % 4 == 0 else flat.view(torch.int16 if size == 2 else torch.uint8)
    on_cpu = words.device.type == "cpu"
    length = _CHUNK if on_cpu else _CHUNK_ON_DEVICE
    weights = _odd_numbers() if on_cpu else torch.arange(1, min(length, words.numel() + 2), 2, device=words.device)
    # Added up on the device, modulo 2**64, so that the host waits for it once.
    parts = list[Tensor]()
    for first in range(-(start % 2), words.numel(), length):
        chunk, before = words[max(first, 0) : first + length].to(torch.int32), max(-first, 0)
        after = (before + chunk.numel()) % 2
        if before or after or chunk.storage_offset() % 2:
            chunk = pad(chunk, (before, after))
        pairs = chunk.view(torch.int64)
        own = weights[: len(pairs)]
        parts.append(torch.dot(pairs, own) if on_cpu else (pairs * own).sum())
        if start + first:
            parts.append(pairs.sum() * (start + first))
    return int(parts[0] if len(parts) == 1 else torch.stack(parts).sum()) if parts else 0


@cache
def _odd_numbers() -> Tensor:
    """Returns the weights of a chunk on a CPU: those of every chunk."""
    return torch.arange(1, _CHUNK, 2, device="cpu")


def combined(digests: list[int]) -> int:
    """Returns the digest of a whole, given the digests of its shards."""
    return (sum(digests) + 2**63) % 2**64 - 2**63


class Control(NamedTuple):
    """The control vector of a rank, or of a group once its ranks are merged.

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
        """Returns the control vector as a uint8 tensor of shape ``(CONTROL_BYTES,)``, on the host."""
        packed = _CONTROL.pack(*self[:3], min(self.step_time, _LONGEST_STEP), *self[3:-1])
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @staticmethod
    def unpacked(packed: Tensor) -> "Control":
        """Reads a control vector back from its bytes."""
        fragment, step, requests, step_time, *others, finite = _CONTROL.unpack(packed.numpy().tobytes())
        return Control._make([fragment, step, requests, *others, bool(finite), step_time])

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


class Count(NamedTuple):
    """Tells how much each group counts in one mean.

    Attributes:
        factors: The groups that count, in their order, each with the factor of its outer gradient. The mean is the sum
            of the products divided by the number of these groups, so that a factor of 1 changes no bit.
        outlying: The groups that the guard leaves out.
    """

    factors: dict[int, float]
    outlying: tuple[int, ...] = ()


def plain(controls: Sequence[Control]) -> Count:
    return Count({group: 1.0 for group, control in enumerate(controls) if control.finite})


def trained(controls: Sequence[Control]) -> Count:
    return Count({group: 1.0 for group, control in enumerate(controls) if control.weight})


def may_count(controls: Sequence[Control]) -> list[int]:
    return [group for group, control in enumerate(controls) if control.finite and control.weight > 0]


def by_training(controls: Sequence[Control], counted: Sequence[int]) -> dict[int, float]:
    """Returns the factors of groups that count by the inner steps that they trained."""
    total = sum(controls[group].weight for group in counted)
    # In this order, a whole number over a whole number: exactly 1 where the weights are equal.
    return {group: len(counted) * controls[group].weight / total for group in counted}


class Weighing(ABC):
    """Decides how much each group counts in the mean of a fragment.

    It decides from what the groups sent, never from what a group computes for itself: the same numbers give the same
    bits everywhere. Make it a frozen dataclass: its ``repr`` is compared between ranks, and with that of a checkpoint.
    Its state, of each fragment, is plain JSON, and changes only when a flight lands.
    """

    def start(self, groups: int) -> Any:
        """Returns the state of a fragment before its first launch; by default there is none.

        Args:
            groups: Number of worker groups.
        """
        return None

    @abstractmethod
    def count(self, controls: Sequence[Control], state: Any) -> Count:
        """Decides how much each group counts.

        Args:
            controls: What every group said at the launch. One that is not finite, or whose weight is 0, must not count.
            state: The state of the fragment.
        """

    def heard(self, controls: Sequence[Control], state: Any) -> Any:
        """Returns the state once the flight has landed; by default that of before; see `count`."""
        return state


@dataclass(frozen=True)
class Aggregation(Weighing):
    """Weighs the groups of a mean by what they trained, clips and guards them.

    The state of a fragment is the last norms of the outer gradients, by group: at most eight each, the oldest first.

    Args:
        clip_norm: Longer outer gradients are scaled down to this norm; with None, none is.
        guard: A group is left out when its norm is more than this many times what is usual, as `outlying` says; with
            None, none is.
    """

    clip_norm: float | None = None
    guard: float | None = None

    @override
    def start(self, groups: int) -> list[list[float]]:
        return [[] for _ in range(groups)]

    @override
    def count(self, controls: Sequence[Control], state: Sequence[Sequence[float]] = ()) -> Count:
        candidates = may_count(controls)
        norms = {group: controls[group].norm for group in candidates}
        out = () if self.guard is None else tuple(outlying(norms, dict(enumerate(state)), self.guard))
        factors = by_training(controls, [group for group in candidates if group not in out])
        for group in factors:
            norm = controls[group].norm
            if self.clip_norm is not None and norm > self.clip_norm:
                factors[group] *= self.clip_norm / norm
        return Count(factors, out)

    @override
    def heard(self, controls: Sequence[Control], state: Sequence[Sequence[float]]) -> list[list[float]]:
        return remembered(state, controls)


def remembered(norms: Sequence[Sequence[float]], controls: Sequence[Control]) -> list[list[float]]:
    """Returns the norms to remember once a flight has landed; see `Aggregation`."""
    new = {group: [controls[group].norm] for group in may_count(controls)}
    return [[*last, *new.get(group, [])][-REMEMBERED:] for group, last in enumerate(norms)]


class Absences:
    """Counts how often in a row every group was left out because its values were not finite; too often is an error."""

    def __init__(self, groups: int) -> None:
        self._in_a_row = [0] * groups
        self._recovered_at = [0] * groups

    def count(self, launched_at: int, landed_at: int, left_out: Sequence[int]) -> None:
        for group in range(len(self._in_a_row)):
            if group not in left_out:
                self._in_a_row[group] = 0
            elif launched_at > self._recovered_at[group]:
                # A fragment that was launched before the group recovered reports the same event again. Launches come
                # first in an inner step, so those of the step of the recovery do, too.
                self._in_a_row[group] += 1
                self._recovered_at[group] = landed_at
        lost = [group for group, count in enumerate(self._in_a_row) if count >= _MOST_LEFT_OUT]
        if lost:
            raise AgreementError(
                f"The outer gradient of worker group {', '.join(map(str, lost))} was not finite {_MOST_LEFT_OUT} times"
                " in a row, so that the other groups train without it. Look at that group's data and learning rate,"
                " and resume from a checkpoint, for example with gradient clipping."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"left_out_in_a_row": list(self._in_a_row), "recovered_at": list(self._recovered_at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_a_row = list(state["left_out_in_a_row"])
        self._recovered_at = list(state["recovered_at"])

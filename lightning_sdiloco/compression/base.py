"""The interface of a compression, which encodes outer gradients as bytes for the wire."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor

from lightning_sdiloco.memory import new_vector


class State(NamedTuple):
    """The state that a compression keeps for one shard between launches.

    A new state takes effect when the flight lands, provided that the payload counted in the mean.

    Attributes:
        memory: The error of earlier launches as a float32 tensor of the shard's shape, or None. The
            error is added to the next outer gradient.
        tuning: Numbers that later launches reuse, such as thresholds, as a float32 tensor of any
            length, or None.
    """

    memory: Tensor | None = None
    tuning: Tensor | None = None


class Traits(NamedTuple):
    """Properties of a compression that determine where it can be used.

    Attributes:
        share: The share of values that each group chooses independently, or 1 if all groups send
            the same values.
        suits_sums: True if the mean over the groups fits into a payload of the same size. False if
            every group chooses the values that it sends, because the mean then contains more
            values.
        counts_senders: True if the mean of a value is taken over the groups that sent it, as marked
            by `Compression.places`, instead of over all groups.
        varies: True if payloads can be shorter than `Compression.wire_bytes`, which is then an
            upper bound.
        remembers: True if the error is stored in `State.memory` and added to the next outer
            gradient.
        values: The encoding of the values that are sent, or None for the compression itself.
        hub_code: The name of the code with which a hub without torch reads and averages payloads,
            or None.
    """

    share: float = 1.0
    suits_sums: bool = True
    counts_senders: bool = False
    varies: bool = False
    remembers: bool = False
    values: "Compression | None" = None
    hub_code: Literal["fp4", "fp32"] | None = None


class Compression(ABC):
    """Converts a flat float32 outer gradient into bytes and back.

    Compressions are immutable, compare by value and contain no tensors. The engine keeps the state
    of a compression between launches. Encoding and decoding use only integer operations and
    correctly rounded floating-point operations, so all groups decode the same bytes to
    bit-identical values.

    Implement `wire_bytes`, `encode` and `decode`. A compression that keeps state between launches
    also implements `encode_launch`, which takes and returns a `State`.

    Examples:
        >>> from lightning_sdiloco.compression import FP4
        >>> values, decoded = torch.tensor([1.0, -0.5, 0.26, 0.0]), torch.empty(4)
        >>> FP4().decode(FP4().encode(values), decoded)
        >>> decoded
        tensor([ 1.0000, -0.5000,  0.2500,  0.0000])
    """

    def __repr__(self) -> str:
        """Returns the class and its arguments. Ranks compare this text to check that they all use
        the same compression.
        """
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Returns the exact payload size for ``numel`` values in bytes, including scales and
        padding.
        """

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encodes values for the wire.

        Args:
            values: A contiguous float32 tensor of shape ``(numel,)``. Non-finite values can be
                encoded in any way, because a group with such values is left out of the mean.

        Returns:
            The payload, a uint8 tensor of shape ``(wire_bytes(numel),)`` on the same device.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decodes a payload.

        Args:
            payload: A uint8 tensor of shape ``(wire_bytes(out.numel()),)``.
            out: A contiguous float32 tensor of shape ``(numel,)``, which is overwritten.
        """

    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Decodes the values in stretches so that long vectors need little memory.

        By default, the whole vector is a single stretch.

        Args:
            payload: The payload that `encode` returned.
            numel: The number of values.

        Yields:
            The slice and the values of each stretch. You may overwrite the values. The next stretch
            may reuse their memory.
        """
        values = new_vector(numel, payload.device)
        self.decode(payload, values)
        yield slice(0, numel), values

    def mean(self, sent: Sequence[tuple[Tensor, float]], out: Tensor) -> None:
        """Computes the mean of decoded payloads, multiplied by their factors and summed in order.

        By default, payloads are decoded in `stretches`, so decoding needs only the memory of a
        single stretch. With `Traits.counts_senders`, the mean of a value is taken over the groups
        that have sent it. If no group has sent the value, the mean is 0.

        Args:
            sent: The payloads and their factors. If there are no payloads, the mean is zero.
            out: A contiguous float32 tensor of shape ``(numel,)``, which is overwritten.
        """
        out.zero_()
        for payload, factor in sent:
            for stretch, values in self.stretches(payload, out.numel()):
                # The product and the sum are rounded separately, because some processors have no
                # fused multiply-add.
                if factor != 1:
                    values.mul_(factor)
                out[stretch] += values
        if not self.traits.counts_senders:
            divide(out, len(sent))
            return
        senders = torch.zeros_like(out)
        places = torch.empty_like(out)
        for payload, _ in sent:
            self.places(payload, places)
            senders += places
        out.div_(senders.clamp_(min=1))

    def places(self, payload: Tensor, out: Tensor) -> None:
        """Marks the values that a payload contains.

        Args:
            payload: The payload that `encode` returned.
            out: A contiguous float32 tensor of shape ``(numel,)``, which is set to 1 for values
                that were sent and to 0 for other values.
        """
        out.fill_(1.0)

    @property
    def traits(self) -> Traits:
        """The properties of the compression. By default, all values are sent."""
        return Traits()

    def encode_launch(self, gradient: Tensor, state: State, mixing: float) -> tuple[Tensor, State]:
        """Encodes the outer gradient of a launch. By default, there is no state.

        Args:
            gradient: The outer gradient, as for `encode`.
            state: The state returned by the last launch of this shard that counted. Do not modify
                its tensors.
            mixing: The share of the local parameters that is kept at a landing. The local
                parameters keep the same share of the values that were not sent, so the next outer
                gradient contains this share.

        Returns:
            The payload and the new state.
        """
        return self.encode(gradient), State()

    def at(self, step: int, choice: int | None = None) -> "Compression":
        """Returns the compression for a launch. The result is this object unless the encoding
        depends on random numbers or on the sender.

        Args:
            step: The inner step of the launch.
            choice: The code chosen by the sender, as returned by `choice`, or None if unknown.
        """
        return self

    def choice(self, numel: int, bytes_per_s: float, overlap_s: float) -> int:
        """Returns the index of the code that a sender uses for a launch. The index is 0 if there is
        only one code.

        Args:
            numel: The number of values.
            bytes_per_s: The bandwidth of the sender's link to each receiver, or 0 if unknown.
            overlap_s: The number of seconds from launch to landing, or NaN if unknown.
        """
        return 0


def weighted_mean(
    parts: Iterable[tuple[Tensor, float]], like: Tensor, senders: Tensor | None = None
) -> Tensor:
    """Returns the mean of decoded outer gradients, multiplied by their factors. May overwrite them.

    Args:
        parts: The outer gradients and their factors, in the order of summation.
        like: A tensor of the same shape and on the same device.
        senders: The number of groups that sent each value, if the mean is taken over the senders.
    """
    total = torch.zeros_like(like)
    count = 0
    for values, factor in parts:
        if factor != 1:
            values.mul_(factor)
        total += values
        count += 1
    if senders is not None:
        return total.div_(senders.clamp(min=1))
    return divide(total, count)


def divide(total: Tensor, groups: int) -> Tensor:
    """Divides a sum in place by the number of groups, unless this number is 0, and returns the
    result.
    """
    if groups == 0:
        return total
    return total.div_(total.new_full((), groups))


def chunk_length(device: torch.device) -> int:
    """Returns how many values to process at a time. On a CPU, that many values fit in the cache."""
    if device.type == "cpu":
        return 1 << 17
    return 1 << 23


def is_number(number: object) -> TypeGuard[float]:
    return isinstance(number, (int, float)) and not isinstance(number, bool)


def is_positive_int(number: object) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def forwarded(to: str, *names: str) -> Any:
    """Creates methods that forward calls to the object in an attribute."""
    return [_forwarding(to, name) for name in names]


def _forwarding(to: str, name: str) -> Any:
    @wraps(getattr(Compression, name), updated=())  # the original is marked as abstract
    def method(self: Any, *args: Any) -> Any:
        return getattr(getattr(self, to), name)(*args)

    return method

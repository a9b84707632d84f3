"""The interface of a compression: how an outer gradient is written as bytes for the wire."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lightning_sdiloco.memory import new_vector


class Compression(ABC):
    """Turns a flat float32 outer gradient into bytes and back.

    A compression is a choice and holds no memory: instances are immutable, compare by value and
    contain no tensors. The engine keeps what must be remembered from one launch to the next.
    Encoding and decoding use only integer operations and correctly rounded ones, so all groups that
    decode the same bytes get the same bits.

    Examples:
        >>> from lightning_sdiloco.compression import FP4
        >>> values, decoded = torch.tensor([1.0, -0.5, 0.26, 0.0]), torch.empty(4)
        >>> FP4().decode(FP4().encode(values), decoded)
        >>> decoded
        tensor([ 1.0000, -0.5000,  0.2500,  0.0000])
    """

    def __repr__(self) -> str:
        """Returns the class and its arguments. Ranks compare it to check that they use the same
        compression.
        """
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Returns the exact size in bytes of the payload of ``numel`` values, scales and padding
        included.
        """

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encodes values for the wire.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``. Non-finite values may be
                encoded as anything: a group that has one is left out of the mean.

        Returns:
            The payload, a uint8 tensor of shape ``(wire_bytes(numel),)`` on the same device.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decodes a payload.

        Args:
            payload: uint8 tensor of shape ``(wire_bytes(out.numel()),)``.
            out: Contiguous float32 tensor of shape ``(numel,)``, which is overwritten.
        """

    def stretches(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Decodes the values stretch by stretch, so that long vectors need little memory.

        By default the only stretch is the whole.

        Args:
            payload: The payload that `encode` returned.
            numel: Number of values.

        Yields:
            The slice of a stretch, and its values, which you may overwrite. The next stretch may
            reuse their memory.
        """
        values = new_vector(numel, payload.device)
        self.decode(payload, values)
        yield slice(0, numel), values

    def mean(self, sent: Sequence[tuple[Tensor, float]], out: Tensor) -> None:
        """Takes the mean of several decoded payloads, each times its factor, added up in their
        order.

        By default this happens in `stretches`, so decoding takes the memory of one. If
        `counts_senders`, the mean of a value is taken over the groups that have sent it, and is 0
        if none has.

        Args:
            sent: The payloads and their factors; the mean of none is zero.
            out: Contiguous float32 tensor of shape ``(numel,)``, which is overwritten.
        """
        out.zero_()
        for payload, factor in sent:
            for stretch, values in self.stretches(payload, out.numel()):
                # Two roundings, one after the other: only some processors have a fused
                # multiply-add.
                if factor != 1:
                    values.mul_(factor)
                out[stretch] += values
        if not self.counts_senders():
            divide(out, len(sent))
            return
        senders = torch.zeros_like(out)
        places = torch.empty_like(out)
        for payload, _ in sent:
            self.places(payload, places)
            senders += places
        out.div_(senders.clamp_(min=1))

    def at(self, step: int) -> "Compression":
        """Returns the compression for the launch after an inner step: itself, unless it picks
        values at random.
        """
        return self

    def with_names(self, resolve: Callable[["str | Compression"], "Compression"]) -> "Compression":
        """Returns the compression with names in it replaced by compressions.

        Args:
            resolve: Returns the compression of a name.
        """
        return self

    def choice(self, numel: int, bytes_per_s: float, overlap_s: float) -> int:
        """Returns which of its codes a sender uses for a launch, for `chosen`; 0 if there is only
        one.

        Args:
            numel: Number of values.
            bytes_per_s: What the link of the sender carries to each receiver; 0 if unknown.
            overlap_s: Seconds from the launch to the landing; NaN if unknown.
        """
        return 0

    def choice_bytes(self, numel: int, choice: int) -> int:
        """Returns the bytes of the payload of ``numel`` values in the code of a `choice`: the
        most, where they vary.
        """
        return self.wire_bytes(numel)

    def chosen(self, choice: int) -> "Compression":
        """Returns the compression that encodes as `choice` said, and decodes whatever a sender
        chose.
        """
        return self

    def dense(self) -> "Compression":
        """Returns how the values that it does send are encoded."""
        return self

    def suits_sums(self) -> bool:
        """Returns whether the mean of several groups can be sent in a payload of the same size.

        False if every group chooses the values it sends: the mean has more values than fit into a
        payload.
        """
        return True

    def chosen_share(self) -> float:
        """Returns the share of the values that each group chooses for itself; 1 if all groups send
        the same ones.
        """
        return 1.0

    def counts_senders(self) -> bool:
        """Returns whether the mean of a value is over the groups that sent it, as `places` says,
        not over all.
        """
        return False

    def places(self, payload: Tensor, out: Tensor) -> None:
        """Marks the values that a payload has.

        Args:
            payload: The payload that `encode` returned.
            out: Contiguous float32 tensor of shape ``(numel,)``. It becomes 1 for values that were
                sent, and 0 elsewhere.
        """
        out.fill_(1.0)

    def varies(self) -> bool:
        """Returns whether payloads may be shorter than `wire_bytes` says, which is then the
        most.
        """
        return False

    def tuning(self, values: Tensor, before: Tensor | None) -> Tensor | None:
        """Returns what a launch takes over from earlier ones of this shard besides `remembered`;
        None for nothing.

        It takes effect for the next launch when the flight lands, if the payload counted in the
        mean.

        Args:
            values: What is about to be encoded.
            before: What the last launch that counted returned.

        Returns:
            A new float32 tensor.
        """
        return None

    def tuned(self, tuning: Tensor | None) -> "Compression":
        """Returns the compression for a launch with what `tuning` returned: itself, if that is
        None.
        """
        return self

    def remembers(self) -> bool:
        """Returns whether what is not sent waits for the next launch, as `remembered` says."""
        return False

    def residual(
        self, values: Tensor, memory: Tensor | None, payload: Tensor, mixing: float
    ) -> Tensor:
        """Returns what encoding lost, to be added to the next values.

        The local parameters keep the share ``mixing`` of what was not sent. It is left out here,
        since the next outer gradient contains it.

        Args:
            values: What was to be sent, float32.
            memory: The residual of earlier launches that was added to the values before they were
                encoded, if any.
            payload: The encoded sum.
            mixing: Share of the local parameters that is kept on landing.

        Returns:
            A new float32 tensor of the shape of ``values``.
        """
        decoded = new_vector(values.numel(), values.device)
        self.decode(payload, decoded)
        lost = torch.sub(values, decoded, out=decoded).mul_(1 - mixing)
        return lost if memory is None else lost.add_(memory)

    def remembered(
        self, gradient: Tensor, memory: Tensor | None, payload: Tensor, mixing: float
    ) -> Tensor | None:
        """Returns what the engine adds to the next outer gradient of this shard, or None to
        remember nothing.

        It takes effect when the flight lands, if the payload counted in the mean.

        Args:
            gradient: The outer gradient, float32.
            memory: What was added to the gradient before it was encoded, if anything.
            payload: The encoded sum.
            mixing: Share of the local parameters that is kept on landing.

        Returns:
            A new float32 tensor of the shape of the gradient, or None.
        """
        return None


def weighted_mean(
    parts: Iterable[tuple[Tensor, float]], like: Tensor, senders: Tensor | None = None
) -> Tensor:
    """Returns the mean of decoded outer gradients, each with its factor; with it, they may be
    written to.

    Args:
        parts: The outer gradients, in the order in which they are added up.
        like: A tensor of their shape and on their device.
        senders: How many of them have each value, if its mean is over these.
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
    """Divides a sum by how many groups are in it, if there are any, and returns it."""
    if groups == 0:
        return total
    return total.div_(total.new_full((), groups))


def chunk_length(device: torch.device) -> int:
    """Returns how many values to handle at a time: on a CPU as many as stay in its cache."""
    if device.type == "cpu":
        return 1 << 17
    return 1 << 23


def is_number(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool)


def is_positive_int(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def forwarded(to: str, *names: str) -> Any:
    """Makes methods that call the methods of the same names of what an attribute holds."""

    def made(name: str) -> Any:
        return documented(name, lambda self, *args: getattr(getattr(self, to), name)(*args))

    return map(made, names)


def documented(name: str, method: Callable[..., Any]) -> Any:
    """Gives a method the name, signature and documentation of `Compression`'s; it is not
    abstract.
    """
    return wraps(getattr(Compression, name), updated=())(method)

"""What a compression is: a way to write an outer gradient as bytes for the wire."""

from abc import ABC, abstractmethod

from torch import Tensor


class Compression(ABC):
    """Turns a flat float32 outer gradient into bytes and back.

    A compression is a choice, not a memory: instances are immutable, compare by value and hold no tensors. What one
    wants remembered from launch to launch, the engine keeps.
    Encoding and decoding use integer and exactly rounded operations only, so that every group that decodes the same
    bytes gets the same bits.
    """

    def __repr__(self) -> str:
        """The class and its choices: ranks compare it to see whether they use the same compression."""
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """The exact size in bytes of the payload of ``numel`` values, scales and padding included."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encodes values for the wire.

        Args:
            values: Contiguous float32 tensor of shape ``(numel,)``. Values that are not finite may be encoded as
                anything: a group that has one is left out of the mean.

        Returns:
            The payload, a uint8 tensor of shape ``(wire_bytes(numel),)`` on the same device.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decodes a payload.

        Args:
            payload: uint8 tensor of shape ``(wire_bytes(out.numel()),)``.
            out: Contiguous float32 tensor of shape ``(numel,)`` that is overwritten.
        """

    def at(self, step: int) -> "Compression":
        """The compression for a launch after an inner step: itself, unless chance picks what is sent then."""
        return self

    def dense(self) -> "Compression":
        """The compression of the final exchange, which must not leave values out, since nothing follows it."""
        return self

    def suits_sums(self) -> bool:
        """Whether the mean of what several groups send can be sent as well as what one of them sends.

        Not where each sends values of its own choice: the mean has more of them than a payload.
        """
        return True

    def remembered(self, gradient: Tensor, memory: Tensor | None, payload: Tensor, mixing: float) -> Tensor | None:
        """What shall be added to the next outer gradient, one memory for each shard of a fragment.

        It is kept once the flight lands in whose mean the payload counted.

        Args:
            gradient: The outer gradient, float32.
            memory: What was added to it before it was encoded, if anything.
            payload: What `encode` made of the sum.
            mixing: Share of the local parameters that is kept on landing.

        Returns:
            A new float32 tensor of the shape of the gradient, or None if nothing is remembered.
        """
        return None

"""How encoded outer gradients become their mean in every group: who encodes what for whom, and who adds it up.

Pure arithmetic on the payloads. How they travel is none of its business.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.algorithm.aggregation import Count
from lightning_sdiloco.compression import Compression, ErrorFeedback
from lightning_sdiloco.compression.kernels import EAGER, Kernels


class Encoded(NamedTuple):
    """An outer gradient as it is sent.

    Attributes:
        payloads: What goes to each group, in their order.
        memory: What is to be remembered if it counts.
    """

    payloads: list[Tensor]
    memory: Tensor | None


class Relay(NamedTuple):
    """A part of the mean, encoded again by the group that made it.

    Attributes:
        payload: What goes to every group.
        residual: What the second rounding lost, which goes into the next mean.
    """

    payload: Tensor
    residual: Tensor


class AllReduce(ABC):
    """A way from the outer gradients of all groups to their mean.

    Args:
        groups: Number of worker groups.
        compression: How they are encoded.
        mixing: Share of the local parameters that is kept on landing.
        passes: What encodes and takes the means.
    """

    def __init__(self, groups: int, compression: Compression, mixing: float, passes: Kernels = EAGER) -> None:
        self.groups = groups
        self.compression = compression
        self._mixing = mixing
        self._passes = passes

    def at(self, step: int) -> "AllReduce":
        """Returns the all-reduce of a launch after an inner step: itself, unless chance picks what is sent then."""
        compression = self.compression.at(step)
        if compression is self.compression:
            return self
        return type(self)(self.groups, compression, self._mixing, self._passes)

    @abstractmethod
    def part(self, numel: int) -> int:
        """Number of values in what a group sends to another one."""

    @abstractmethod
    def encode(self, gradient: Tensor, memory: Tensor | None) -> Encoded:
        """Encodes the outer gradient of a shard for every group.

        Args:
            gradient: The outer gradient.
            memory: What was remembered before.
        """

    @abstractmethod
    def relay(self, mean: Tensor, residual: Tensor | None) -> Relay | None:
        """What becomes of the mean of what all groups sent to this one; None if that is the mean of the whole shard.

        Args:
            mean: The mean.
            residual: What the second rounding of this part lost before.
        """

    @abstractmethod
    def joined(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        """The mean of a whole shard from what all groups relayed."""

    def mean(self, payloads: Sequence[Tensor], count: Count, like: Tensor) -> Tensor:
        """The float32 mean of the groups that count, added up in their order so that all get the same bits.

        Args:
            payloads: What every group sent to this one.
            count: The groups that count, and how much.
            like: An outer gradient of the whole shard, for its size and device.
        """
        return self._passes.mean(
            payloads, count.factors, self.compression, like=like.new_empty(self.part(like.numel()))
        )

    @abstractmethod
    def own(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        """What the groups will read of what this one sends.

        Args:
            payloads: What goes to each group.
            like: The outer gradient, for its size and device.
        """

    def in_one_place(
        self,
        gradients: Sequence[Tensor],
        memories: Sequence[Tensor | None],
        residuals: Sequence[Tensor | None],
        count: Count,
    ) -> Tensor:
        """The mean that all groups would have, from what each of them holds.

        Args:
            gradients: The outer gradient of a shard in every group.
            memories: What each compression remembered before.
            residuals: What the second rounding of each group's part lost before.
            count: The groups that count, and how much.
        """
        sent = [self.encode(*own).payloads for own in zip(gradients, memories, strict=True)]
        relayed = []
        for group, residual in enumerate(residuals):
            mean = self.mean([payloads[group] for payloads in sent], count, like=gradients[0])
            relay = self.relay(mean, residual)
            if relay is None:
                return mean
            relayed.append(relay.payload)
        return self.joined(relayed, like=gradients[0])

    def payload_bytes(self, numel: int) -> int:
        """Bytes of the payload that goes to each group."""
        return self.compression.wire_bytes(self.part(numel))

    @abstractmethod
    def relay_bytes(self, numel: int) -> int:
        """Bytes of the payload that is relayed to each group."""

    def _encoded(self, gradient: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        payload = self._passes.encode(gradient if memory is None else gradient + memory, self.compression)
        return payload, self.compression.remembered(gradient, memory, payload, self._mixing)


class OneShot(AllReduce):
    """Every group sends all to every other one, and each adds up the whole."""

    @override
    def part(self, numel: int) -> int:
        return numel

    @override
    def encode(self, gradient: Tensor, memory: Tensor | None) -> Encoded:
        payload, memory = self._encoded(gradient, memory)
        return Encoded([payload] * self.groups, memory)

    @override
    def relay(self, mean: Tensor, residual: Tensor | None) -> None:
        return None

    @override
    def joined(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        raise NotImplementedError("nothing is relayed")

    @override
    def own(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        decoded = torch.empty_like(like)
        self.compression.decode(payloads[0], decoded)
        return decoded

    @override
    def relay_bytes(self, numel: int) -> int:
        return 0


class TwoShot(AllReduce):
    """Every group adds up a part of its own, and sends the mean of that to all others, encoded again.

    What the second rounding loses is treated as `ErrorFeedback` treats the first: the group that makes it remembers it
    and adds it to the next mean. All groups decode what was sent, also the one that sent it.
    """

    @override
    def part(self, numel: int) -> int:
        return -(-numel // self.groups)

    @override
    def encode(self, gradient: Tensor, memory: Tensor | None) -> Encoded:
        numel = gradient.numel()
        gradients = self._parts(gradient)
        memories = [None] * self.groups if memory is None else self._parts(memory)
        encoded = [self._encoded(*part) for part in zip(gradients, memories, strict=True)]
        remembered = [part for _, part in encoded if part is not None]
        return Encoded([payload for payload, _ in encoded], torch.cat(remembered)[:numel] if remembered else None)

    @override
    def relay(self, mean: Tensor, residual: Tensor | None) -> Relay:
        payload = self._passes.encode(mean if residual is None else mean + residual, self.compression)
        feedback = self.compression
        if not isinstance(feedback, ErrorFeedback):
            feedback = ErrorFeedback(feedback)
        return Relay(payload, feedback.remembered(mean, residual, payload, self._mixing))

    @override
    def joined(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        part = self.part(like.numel())
        whole = like.new_empty(part * self.groups)
        for payload, values in zip(payloads, whole.split(part), strict=True):
            self.compression.decode(payload, values)
        return whole[: like.numel()]

    @override
    def own(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        return self.joined(payloads, like)

    @override
    def relay_bytes(self, numel: int) -> int:
        return self.payload_bytes(numel)

    def _parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """Parts of equal length, one for each group; zeros fill up the last."""
        part = self.part(values.numel())
        return F.pad(values, (0, part * self.groups - values.numel())).split(part)


_BY_NAME: dict[str, type[AllReduce]] = {"gather": OneShot, "two_shot": TwoShot}


def check_exchange(exchange: Any) -> None:
    """Refuses what is no name of an exchange.

    Raises:
        ValueError: If it is none.
    """
    if exchange != "auto" and exchange not in _BY_NAME:
        raise ValueError(
            f"exchange={exchange!r} is not known. It is one of 'auto', {', '.join(map(repr, _BY_NAME))}. Choose one of"
            " them; 'auto' is the default."
        )


def chosen(exchange: str, groups: int, compression: Compression) -> type[AllReduce]:
    """The way that is meant by the name of an exchange.

    By itself the one that sends fewer bytes: for more than two groups that is two shots. For two they are the same, and
    a gather rounds once. Where the mean has more values than a payload, most of it would wait for later means.
    """
    if exchange == "auto":
        return TwoShot if groups > 2 and compression.suits_sums() else OneShot
    return _BY_NAME[exchange]


def all_reduce_for(
    exchange: str, groups: int, compression: Compression, mixing: float, kernels: Kernels = EAGER
) -> AllReduce:
    """Makes the all-reduce that an exchange stands for. `AllReduce.at` gives that of a single launch.

    Args:
        exchange: Name of the exchange.
        groups: Number of worker groups.
        compression: How outer gradients are encoded.
        mixing: Share of the local parameters that is kept on landing.
        kernels: What encodes and takes the means.
    """
    return chosen(exchange, groups, compression)(groups, compression, mixing, kernels)


def final_all_reduce_for(groups: int, compression: Compression, mixing: float, kernels: Kernels = EAGER) -> AllReduce:
    """Makes the all-reduce of the final exchange, after which nothing could make up for a second rounding.

    The arguments are those of `all_reduce_for`.
    """
    return OneShot(groups, compression.dense(), mixing, kernels)

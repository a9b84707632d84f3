"""How encoded outer gradients become their mean in every group: who encodes what for whom, and who sums it.

This is pure arithmetic on payloads; how they travel is the business of `comm.exchange`. In one hop, every group sends
its whole shard to every other one. In two hops, each group sums one part of the shard and then sends its mean to all.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_sdiloco.algorithm.aggregation import Count
from lightning_sdiloco.compression import EAGER, Compression, Kernels


class Encoded(NamedTuple):
    """An outer gradient as it is sent.

    Attributes:
        payloads: The payload for each group, in their order.
        memory: What the compression remembers if the payload counts.
        tuning: What it takes over to the next launch, if the payload counts; see `Compression.tuning`.
    """

    payloads: list[Tensor]
    memory: Tensor | None
    tuning: Tensor | None = None


class SecondHop(NamedTuple):
    """One part of the mean, encoded again by the group that computed it.

    Attributes:
        payload: The payload for every group.
        residual: What this second rounding lost; it is added to the next mean.
    """

    payload: Tensor
    residual: Tensor


class AllReduce(ABC):
    """Turns the outer gradients of all groups into their mean.

    Args:
        groups: Number of worker groups.
        compression: How outer gradients are encoded.
        mixing: Share of the local parameters that is kept on landing.
        kernels: What encodes and computes the means.
    """

    def __init__(self, groups: int, compression: Compression, mixing: float, kernels: Kernels = EAGER) -> None:
        self.groups = groups
        self.compression = compression
        self._mixing = mixing
        self._kernels = kernels

    def at(self, step: int) -> "AllReduce":
        """Returns the all-reduce for the launch after an inner step: itself, unless chance picks what is sent."""
        compression = self.compression.at(step)
        if compression is self.compression:
            return self
        return type(self)(self.groups, compression, self._mixing, self._kernels)

    @abstractmethod
    def part_numel(self, numel: int) -> int:
        """Returns how many values of a shard of ``numel`` a group sends to each other group."""

    @abstractmethod
    def encode(self, gradient: Tensor, memory: Tensor | None, tuning: Tensor | None = None) -> Encoded:
        """Encodes the outer gradient of a shard for every group.

        Args:
            gradient: The outer gradient, float32 of shape ``(numel,)``.
            memory: What the compression remembers from earlier launches, of the same shape.
            tuning: What else it takes over from them.
        """

    @abstractmethod
    def second_hop(self, mean: Tensor, residual: Tensor | None) -> SecondHop | None:
        """Encodes the mean of this group's part for all groups; returns None if the part is the whole shard.

        Args:
            mean: The mean of what all groups sent to this one.
            residual: What the second rounding of this part lost before.
        """

    @abstractmethod
    def assemble(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        """Assembles the mean of a whole shard from the second hops of all groups.

        Args:
            payloads: What each group sent in its second hop.
            like: The outer gradient, for its size and device.
        """

    def mean(self, payloads: Sequence[Tensor], count: Count, like: Tensor) -> Tensor:
        """Returns the float32 mean of the groups that count, summed in their order, so that all get the same bits.

        Args:
            payloads: What every group sent to this one.
            count: The groups that count, and their weights.
            like: An outer gradient of the whole shard, for its size and device.
        """
        part = like.new_empty(self.part_numel(like.numel()))
        return self._kernels.mean(payloads, count.factors, self.compression, like=part)

    @abstractmethod
    def decode_own(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        """Decodes what this group sends, just as the other groups will.

        Args:
            payloads: The payload for each group.
            like: The outer gradient, for its size and device.
        """

    def reduce_locally(
        self,
        gradients: Sequence[Tensor],
        memories: Sequence[Tensor | None],
        residuals: Sequence[Tensor | None],
        count: Count,
        tunings: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Computes, in one process that has everything, the mean that all groups would get.

        Args:
            gradients: The outer gradient of a shard in every group.
            memories: What the compression of each group remembers.
            residuals: What the second rounding of each group's part lost before.
            count: The groups that count, and their weights.
            tunings: What else the compression of each group takes over from earlier launches; None for nothing.
        """
        each = zip(gradients, memories, tunings or [None] * len(gradients), strict=True)
        sent = [self.encode(*own).payloads for own in each]
        payloads = []
        for group, residual in enumerate(residuals):
            mean = self.mean([to[group] for to in sent], count, like=gradients[0])
            hop = self.second_hop(mean, residual)
            if hop is None:
                return mean
            payloads.append(hop.payload)
        return self.assemble(payloads, like=gradients[0])

    def payload_bytes(self, numel: int) -> int:
        """Returns the bytes of the payload for each group: the most, where they vary."""
        return self.compression.wire_bytes(self.part_numel(numel))

    @abstractmethod
    def second_hop_bytes(self, numel: int) -> int:
        """Returns the bytes that the second hop sends to each group; 0 if there is none."""

    def _encode(self, gradient: Tensor, memory: Tensor | None, tuning: Tensor | None = None) -> Encoded:
        values = gradient if memory is None else gradient + memory
        tuning = self.compression.tuning(values, tuning)
        payload = self._kernels.encode(values, self.compression.tuned(tuning))
        return Encoded([payload], self.compression.remembered(gradient, memory, payload, self._mixing), tuning)


class OneShot(AllReduce):
    """Lets every group send its whole shard to every other one and sum all of it."""

    @override
    def part_numel(self, numel: int) -> int:
        return numel

    @override
    def encode(self, gradient: Tensor, memory: Tensor | None, tuning: Tensor | None = None) -> Encoded:
        encoded = self._encode(gradient, memory, tuning)
        return encoded._replace(payloads=encoded.payloads * self.groups)

    @override
    def second_hop(self, mean: Tensor, residual: Tensor | None) -> None:
        return None

    @override
    def assemble(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        raise NotImplementedError("there is no second hop")

    @override
    def decode_own(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        decoded = torch.empty_like(like)
        self.compression.decode(payloads[0], decoded)
        return decoded

    @override
    def second_hop_bytes(self, numel: int) -> int:
        return 0


class TwoShot(AllReduce):
    """Lets every group sum one part of the shard and send its mean, encoded again, to all others.

    What the second rounding loses is treated as error feedback treats the first: the group that computes the mean adds
    the loss to the next one. All groups, the sender included, decode the bytes that were sent.
    """

    @override
    def part_numel(self, numel: int) -> int:
        return -(-numel // self.groups)

    @override
    def encode(self, gradient: Tensor, memory: Tensor | None, tuning: Tensor | None = None) -> Encoded:
        assert not self.compression.varies(), "check_exchange has refused it"
        numel = gradient.numel()
        gradients = self._parts(gradient)
        memories = [None] * self.groups if memory is None else self._parts(memory)
        encoded = [self._encode(*part) for part in zip(gradients, memories, strict=True)]
        remembered = [part.memory for part in encoded if part.memory is not None]
        payloads = [payload for part in encoded for payload in part.payloads]
        return Encoded(payloads, torch.cat(remembered)[:numel] if remembered else None)

    @override
    def second_hop(self, mean: Tensor, residual: Tensor | None) -> SecondHop:
        payload = self._kernels.encode(mean if residual is None else mean + residual, self.compression)
        return SecondHop(payload, self.compression.residual(mean, residual, payload, self._mixing))

    @override
    def assemble(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        part = self.part_numel(like.numel())
        whole = like.new_empty(part * self.groups)
        for payload, values in zip(payloads, whole.split(part), strict=True):
            self.compression.decode(payload, values)
        return whole[: like.numel()]

    @override
    def decode_own(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        return self.assemble(payloads, like)

    @override
    def second_hop_bytes(self, numel: int) -> int:
        return self.payload_bytes(numel)

    def _parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """Splits a shard into parts of equal length, one for each group, the last padded with zeros."""
        part = self.part_numel(values.numel())
        return F.pad(values, (0, part * self.groups - values.numel())).split(part)


_BY_NAME: dict[str, type[AllReduce]] = {"gather": OneShot, "two_shot": TwoShot}


def check_exchange(exchange: Any, compression: Compression) -> None:
    """Raises an error for what is not the name of an exchange, or does not suit a compression.

    Args:
        exchange: The name.
        compression: The compression.

    Raises:
        ValueError: If it is not one.
    """
    if exchange == "two_shot" and (compression.varies() or compression.counts_senders()):
        why = "over='senders' asks who sent a value" if compression.counts_senders() else "every= makes payloads vary"
        raise ValueError(
            f"exchange='two_shot' was given with compression={compression!r}: {why}, and a mean that is sent on in the"
            " second shot tells neither, nor fits into such a payload. Leave exchange out, or choose 'gather'."
        )
    if exchange != "auto" and exchange not in _BY_NAME:
        raise ValueError(
            f"exchange={exchange!r} is not known. It is one of 'auto', {', '.join(map(repr, _BY_NAME))}. Choose one of"
            " them; 'auto' is the default."
        )


def kind_of_all_reduce(exchange: str, groups: int, compression: Compression) -> type[AllReduce]:
    """Returns the kind of all-reduce that an exchange of this name stands for.

    ``"auto"`` means the kind that sends fewer bytes: two shots for more than two groups. For two groups it means one
    shot: both kinds send the same, and one shot rounds only once. It means one shot, too, where the mean has more
    values than fit into a payload: with two shots most of the mean would have to wait for later ones.
    """
    if exchange == "auto":
        return TwoShot if groups > 2 and compression.suits_sums() else OneShot
    return _BY_NAME[exchange]


def all_reduce_for(
    exchange: str, groups: int, compression: Compression, mixing: float, kernels: Kernels = EAGER
) -> AllReduce:
    """Makes the all-reduce that an exchange stands for. `AllReduce.at` returns the one for a single launch.

    Args:
        exchange: Name of the exchange.
        groups: Number of worker groups.
        compression: How outer gradients are encoded.
        mixing: Share of the local parameters that is kept on landing.
        kernels: What encodes and computes the means.
    """
    return kind_of_all_reduce(exchange, groups, compression)(groups, compression, mixing, kernels)


def final_all_reduce_for(groups: int, compression: Compression, mixing: float, kernels: Kernels = EAGER) -> AllReduce:
    """Makes the all-reduce of the final exchange, after which nothing can make up for a second rounding.

    The arguments are those of `all_reduce_for`.
    """
    return OneShot(groups, compression.dense(), mixing, kernels)

"""How encoded outer gradients become their mean in every group: who encodes what for whom, and who sums it.

This is pure arithmetic on payloads; how they travel is the business of `comm.exchange`. In one hop, every group sends
its whole shard to every other one. In two hops, each group sums one part of the shard and then sends its mean to all.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import fsum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.algorithm.aggregation import Count
from lightning_sdiloco.algorithm.parts import TwoShot
from lightning_sdiloco.compression import EAGER, Compression, Kernels
from lightning_sdiloco.memory import new_vector


class Encoded(NamedTuple):
    """An outer gradient as it is sent."""

    payloads: list[Tensor]
    memory: Tensor | None
    tuning: Tensor | None = None


class SecondHop(NamedTuple):
    """One part of the mean, encoded again by the group that computed it."""

    payload: Tensor
    residual: Tensor


class AllReduce(ABC):
    """Turns the outer gradients of all groups into their mean."""

    def __init__(self, groups: int, compression: Compression, mixing: float, kernels: Kernels = EAGER) -> None:
        self.groups = groups
        self.compression = compression
        self._mixing = mixing
        self._kernels = kernels

    def at(self, step: int, choice: int = 0) -> "AllReduce":
        """Returns the all-reduce for the launch after an inner step: itself, unless chance or its sender decides."""
        compression = self.compression.at(step).chosen(choice)
        if compression is self.compression:
            return self
        return self._with(compression)

    def _with(self, compression: Compression) -> "AllReduce":
        return type(self)(self.groups, compression, self._mixing, self._kernels)

    @abstractmethod
    def part_numel(self, numel: int, group: int = 0) -> int:
        """Returns how many values of a shard of ``numel`` every other group sends to a group."""

    @abstractmethod
    def encode(self, gradient: Tensor, memory: Tensor | None, tuning: Tensor | None = None) -> Encoded:
        """Encodes the outer gradient of a shard for every group."""

    @abstractmethod
    def second_hop(self, mean: Tensor, residual: Tensor | None) -> SecondHop | None:
        """Encodes the mean of this group's part for all groups; returns None if the part is the whole shard."""

    @abstractmethod
    def assemble(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        """Assembles the mean of a whole shard from the second hops of all groups."""

    def mean(self, payloads: Sequence[Tensor], count: Count, like: Tensor, group: int = 0) -> Tensor:
        """Returns the float32 mean of the groups that count, summed in their order, so that all get the same bits."""
        numel = self.part_numel(like.numel(), group)
        # It gives its shape and its device alone.
        part = like[:numel] if numel <= like.numel() else like.new_empty(numel)
        if not numel:
            return like.new_empty(0)
        return self._kernels.mean(payloads, count.factors, self.compression, like=part)

    @abstractmethod
    def decode_own(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        """Decodes what this group sends, just as the other groups will."""

    def reduce_locally(
        self,
        gradients: Sequence[Tensor],
        memories: Sequence[Tensor | None],
        residuals: Sequence[Tensor | None],
        count: Count,
        tunings: Sequence[Tensor | None] | None = None,
        choices: Sequence[int] | None = None,
    ) -> Tensor:
        """Computes, in one process that has everything, the mean that all groups would get."""
        each = zip(gradients, memories, tunings or [None] * len(gradients), strict=True)
        codes = [self._with(self.compression.chosen(choice)) for choice in choices or [0] * len(gradients)]
        sent = [code.encode(*own).payloads for code, own in zip(codes, each, strict=True)]
        payloads = []
        for group, residual in enumerate(residuals):
            mean = self.mean([to[group] for to in sent], count, gradients[0], group)
            hop = self.second_hop(mean, residual)
            if hop is None:
                return mean
            payloads.append(hop.payload)
        return self.assemble(payloads, like=gradients[0])

    def payload_bytes(self, numel: int, group: int = 0) -> int:
        """Returns the bytes of the payload for a group: the most, where they vary."""
        return self._bytes(self.part_numel(numel, group))

    @abstractmethod
    def second_hop_bytes(self, numel: int, group: int = 0) -> int:
        """Returns the bytes that a group sends to each other one in its second hop; 0 if there is none."""

    def second_hops(self, numel: int) -> list[int] | None:
        """Returns the bytes of the second hop of each group, if they differ."""
        return None

    def bytes_to_others(self, numel: int, group: int) -> int:
        """Returns the bytes that a group sends to all others for a shard, control vectors left out."""
        first = sum(self.payload_bytes(numel, other) for other in range(self.groups) if other != group)
        return first + (self.groups - 1) * self.second_hop_bytes(numel, group)

    def _bytes(self, numel: int) -> int:
        return self.compression.wire_bytes(numel) if numel else 0

    def _encode(self, gradient: Tensor, memory: Tensor | None, tuning: Tensor | None = None) -> Encoded:
        if not gradient.numel():
            return Encoded([_nothing(gradient)], None)
        values = _sum(gradient, memory)
        tuning = self.compression.tuning(values, tuning)
        payload = self._kernels.encode(values, self.compression.tuned(tuning))
        # It goes before there is what is remembered, which is as long.
        del values
        return Encoded([payload], self.compression.remembered(gradient, memory, payload, self._mixing), tuning)


class OneShotAllReduce(AllReduce):
    """Lets every group send its whole shard to every other one and sum all of it."""

    @override
    def part_numel(self, numel: int, group: int = 0) -> int:
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
        if like.numel():
            self.compression.decode(payloads[0], decoded)
        return decoded

    @override
    def second_hop_bytes(self, numel: int, group: int = 0) -> int:
        return 0


class TwoShotAllReduce(AllReduce):
    """Lets every group sum one part of the shard and send its mean, encoded again, to all others."""

    def __init__(
        self,
        groups: int,
        compression: Compression,
        mixing: float,
        kernels: Kernels = EAGER,
        shares: Sequence[float] | None = None,
    ) -> None:
        super().__init__(groups, compression, mixing, kernels)
        self._shares = shares

    @override
    def _with(self, compression: Compression) -> "AllReduce":
        return type(self)(self.groups, compression, self._mixing, self._kernels, self._shares)

    @override
    def part_numel(self, numel: int, group: int = 0) -> int:
        return self._part_numels(numel)[group]

    def _part_numels(self, numel: int) -> list[int]:
        """Returns the length of each part. Equal ones hold up to a value for each group more, which are padding."""
        if self._shares is None:
            return [-(-numel // self.groups)] * self.groups
        borders = [round(numel * fsum(self._shares[:group])) for group in range(self.groups)] + [numel]
        return [after - before for before, after in zip(borders, borders[1:], strict=False)]

    @override
    def encode(self, gradient: Tensor, memory: Tensor | None, tuning: Tensor | None = None) -> Encoded:
        assert not self.compression.varies(), "check_exchange has refused it"
        payloads, start, remembered = list[Tensor](), 0, None
        for numel in self._part_numels(gradient.numel()):
            where = slice(start, min(start + numel, gradient.numel()))
            before = None if memory is None else _padded(memory[where], numel)
            encoded = self._encode(_padded(gradient[where], numel), before)
            payloads += encoded.payloads
            if encoded.memory is not None:
                # One for all parts: joined at the end, they would be there twice.
                remembered = new_vector(gradient.numel(), gradient.device) if remembered is None else remembered
                remembered[where] = encoded.memory[: where.stop - where.start]
            start = where.stop
        return Encoded(payloads, remembered)

    @override
    def second_hop(self, mean: Tensor, residual: Tensor | None) -> SecondHop:
        if not mean.numel():
            return SecondHop(_nothing(mean), mean)
        payload = self._kernels.encode(_sum(mean, residual), self.compression)
        return SecondHop(payload, self.compression.residual(mean, residual, payload, self._mixing))

    @override
    def assemble(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        parts = self._part_numels(like.numel())
        whole = new_vector(sum(parts), like.device)
        for payload, values in zip(payloads, whole.split(parts), strict=True):
            if values.numel():
                self.compression.decode(payload, values)
        return whole[: like.numel()]

    @override
    def decode_own(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        return self.assemble(payloads, like)

    @override
    def second_hop_bytes(self, numel: int, group: int = 0) -> int:
        return self.payload_bytes(numel, group)

    @override
    def second_hops(self, numel: int) -> list[int] | None:
        return None if self._shares is None else [self.payload_bytes(numel, group) for group in range(self.groups)]


def _sum(values: Tensor, memory: Tensor | None) -> Tensor:
    """Returns values with what is remembered of earlier ones, in memory that goes back to the system."""
    return values if memory is None else torch.add(values, memory, out=new_vector(values.numel(), values.device))


def _padded(values: Tensor, numel: int) -> Tensor:
    """Pads a part with zeros at the end, where it is too short."""
    if len(values) == numel:
        return values
    padded = new_vector(numel, values.device)
    padded[: len(values)] = values
    padded[len(values) :] = 0
    return padded


def _nothing(like: Tensor) -> Tensor:
    """Returns the payload where there are no values."""
    return like.new_empty(0, dtype=torch.uint8)


_BY_NAME: dict[str, type[AllReduce]] = {"gather": OneShotAllReduce, "two_shot": TwoShotAllReduce}


def check_exchange(exchange: Any, compression: Compression) -> None:
    """Raises an error for what is no exchange, or does not suit a compression."""
    is_two_shot = exchange == "two_shot" or isinstance(exchange, TwoShot)
    if is_two_shot and (compression.varies() or compression.counts_senders()):
        why = "its payloads differ in length" if compression.varies() else "over='senders' asks who sent a value"
        raise ValueError(
            f"exchange={exchange!r} was given with compression={compression!r}: {why}, and a mean that is sent on in"
            " the second shot tells neither, nor fits into such a payload. Leave exchange out, or choose 'gather'."
        )
    if not (is_two_shot or exchange == "auto" or exchange in _BY_NAME):
        raise ValueError(
            f"exchange={exchange!r} is not known. It is one of 'auto', {', '.join(map(repr, _BY_NAME))}, or a TwoShot."
            " Choose one of them; 'auto' is the default."
        )


def kind_of_all_reduce(exchange: str | TwoShot, groups: int, compression: Compression) -> type[AllReduce]:
    """Returns the kind of all-reduce that an exchange stands for."""
    if isinstance(exchange, TwoShot):
        return TwoShotAllReduce
    if exchange == "auto":
        return TwoShotAllReduce if groups > 2 and compression.suits_sums() else OneShotAllReduce
    return _BY_NAME[exchange]


def all_reduce_for(
    exchange: str | TwoShot, groups: int, compression: Compression, mixing: float, kernels: Kernels = EAGER
) -> AllReduce:
    """Makes the all-reduce that an exchange stands for. `AllReduce.at` returns the one for a single launch."""
    if isinstance(exchange, TwoShot):
        return TwoShotAllReduce(groups, compression, mixing, kernels, exchange.shares(groups))
    return kind_of_all_reduce(exchange, groups, compression)(groups, compression, mixing, kernels)

"""The all-reduce, which computes the mean of encoded outer gradients in every group.

This module contains only arithmetic on payloads, which `comm.exchange` sends. With one hop, every
group sends its whole shard to every other group. With two hops, each group averages one part of the
shard and then sends the mean to all other groups.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import fsum, isfinite
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.algorithm.as_data import SavedObject
from lightning_sdiloco.algorithm.weighting import Count
from lightning_sdiloco.compression import Compression, ErrorFeedback, State
from lightning_sdiloco.compression.base import is_number
from lightning_sdiloco.memory import new_vector


class Encoded(NamedTuple):
    payloads: list[Tensor]
    memory: Tensor | None
    tuning: Tensor | None = None


class SecondHop(NamedTuple):
    """A part of the mean, encoded again by the group that computed it."""

    payload: Tensor
    residual: Tensor


class AllReduce:
    """A one-shot all-reduce, in which every group sends its whole shard to all other groups."""

    hops = 1

    def __init__(self, groups: int, compression: Compression, mixing: float) -> None:
        self.groups = groups
        self.compression = compression
        self._mixing = mixing

    def at(self, step: int, choice: int | None = None) -> "AllReduce":
        """Returns the all-reduce for the launch after an inner step. The result is this object
        unless the compression depends on random numbers or on the sender.
        """
        compression = self.compression.at(step, choice)
        if compression is self.compression:
            return self
        all_reduce = copy(self)
        all_reduce.compression = compression
        return all_reduce

    def part_numel(self, numel: int, group: int = 0) -> int:
        """Returns how many of a shard's ``numel`` values a group receives from every other
        group.
        """
        return numel

    def encode(
        self, gradient: Tensor, memory: Tensor | None, tuning: Tensor | None = None
    ) -> Encoded:
        encoded = self._encode(gradient, memory, tuning)
        return encoded._replace(payloads=encoded.payloads * self.groups)

    def second_hop(self, mean: Tensor, residual: Tensor | None) -> SecondHop:
        """Encodes the mean of this group's part for all groups."""
        raise NotImplementedError("there is no second hop")

    def assemble(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        """Assembles the mean of a whole shard from the second-hop payloads of all groups."""
        raise NotImplementedError("there is no second hop")

    def mean(
        self, payloads: Sequence[Tensor], count: Count, like: Tensor, group: int = 0
    ) -> Tensor:
        """Returns the float32 mean over the groups that count. The sum has a fixed order, so the
        mean is bit-identical in all groups.
        """
        numel = self.part_numel(like.numel(), group)
        if not numel:
            return like.new_empty(0)
        sent = [(payloads[sender], factor) for sender, factor in count.factors.items()]
        mean = new_vector(numel, like.device)
        self.compression.mean(sent, mean)
        return mean

    def decode_own(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        """Decodes this group's payloads in the same way as the other groups do."""
        decoded = torch.empty_like(like)
        if like.numel():
            self.compression.decode(payloads[0], decoded)
        return decoded

    def reduce_locally(
        self,
        gradients: Sequence[Tensor],
        memories: Sequence[Tensor | None],
        residuals: Sequence[Tensor | None],
        count: Count,
        tunings: Sequence[Tensor | None] | None = None,
        senders: "Sequence[AllReduce] | None" = None,
    ) -> Tensor:
        """Computes the mean over all groups in a process that has all gradients. ``senders`` are
        the all-reduces with which the groups encode.
        """
        tunings = tunings or [None] * self.groups
        like = gradients[0]
        sent = []
        for group, sender in enumerate(senders or [self] * self.groups):
            encoded = sender.encode(gradients[group], memories[group], tunings[group])
            sent.append(encoded.payloads)
        second_payloads = []
        for group, residual in enumerate(residuals):
            mean = self.mean([payloads[group] for payloads in sent], count, like, group)
            if self.hops == 1:
                return mean
            second_payloads.append(self.second_hop(mean, residual).payload)
        return self.assemble(second_payloads, like)

    def payload_bytes(self, numel: int, group: int = 0) -> int:
        """Returns the number of payload bytes for a group, or the maximum if the number varies."""
        part = self.part_numel(numel, group)
        if not part:
            return 0
        return self.compression.wire_bytes(part)

    def second_hop_bytes(self, numel: int, group: int = 0) -> int:
        """Returns the number of bytes that a group sends to every other group in the second hop."""
        return 0

    def second_hops(self, numel: int) -> list[int] | None:
        """Returns the number of second-hop bytes for each group, or None if this number is the same
        for all groups.
        """
        return None

    def bytes_to_others(self, numel: int, group: int) -> int:
        """Returns the number of bytes that a group sends to all other groups for a shard, excluding
        control vectors.
        """
        receivers = [receiver for receiver in range(self.groups) if receiver != group]
        first_hop = sum(self.payload_bytes(numel, receiver) for receiver in receivers)
        return first_hop + len(receivers) * self.second_hop_bytes(numel, group)

    def _encode(
        self, gradient: Tensor, memory: Tensor | None, tuning: Tensor | None = None
    ) -> Encoded:
        if not gradient.numel():
            return Encoded([_nothing(gradient)], None)
        payload, state = self.compression.encode_launch(
            gradient, State(memory, tuning), self._mixing
        )
        return Encoded([payload], state.memory, state.tuning)


class TwoShotAllReduce(AllReduce):
    """An all-reduce in which every group averages one part of the shard and sends the re-encoded
    mean to all other groups.
    """

    hops = 2

    def __init__(
        self,
        groups: int,
        compression: Compression,
        mixing: float,
        shares: Sequence[float] | None = None,
    ) -> None:
        super().__init__(groups, compression, mixing)
        self._shares = shares

    @override
    def part_numel(self, numel: int, group: int = 0) -> int:
        return self._part_numels(numel)[group]

    def _part_numels(self, numel: int) -> list[int]:
        """Returns the length of each part. Equal parts are padded to the same length."""
        if self._shares is None:
            return [-(-numel // self.groups)] * self.groups
        starts = [round(numel * fsum(self._shares[:group])) for group in range(self.groups)]
        return [end - start for start, end in pairwise([*starts, numel])]

    @override
    def encode(
        self, gradient: Tensor, memory: Tensor | None, tuning: Tensor | None = None
    ) -> Encoded:
        assert not self.compression.traits.varies, "check_exchange has refused it"
        payloads = list[Tensor]()
        new_memory = None
        start = 0
        for numel in self._part_numels(gradient.numel()):
            part = slice(start, min(start + numel, gradient.numel()))
            part_memory = None
            if memory is not None:
                part_memory = _padded(memory[part], numel)
            encoded = self._encode(_padded(gradient[part], numel), part_memory)
            payloads += encoded.payloads
            if encoded.memory is not None:
                # A single vector for all parts avoids joining the parts, which would need twice the
                # memory.
                if new_memory is None:
                    new_memory = new_vector(gradient.numel(), gradient.device)
                new_memory[part] = encoded.memory[: part.stop - part.start]
            start = part.stop
        return Encoded(payloads, new_memory)

    @override
    def second_hop(self, mean: Tensor, residual: Tensor | None) -> SecondHop:
        if not mean.numel():
            return SecondHop(_nothing(mean), mean)
        # Whatever the compression is, the error of the second rounding is added to the next mean.
        feedback = self.compression
        if not feedback.traits.remembers:
            feedback = ErrorFeedback(feedback)
        payload, state = feedback.encode_launch(mean, State(residual), self._mixing)
        assert state.memory is not None, "error feedback remembers its loss"
        return SecondHop(payload, state.memory)

    @override
    def assemble(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        numels = self._part_numels(like.numel())
        mean = new_vector(sum(numels), like.device)
        for payload, part in zip(payloads, mean.split(numels), strict=True):
            if part.numel():
                self.compression.decode(payload, part)
        return mean[: like.numel()]

    @override
    def decode_own(self, payloads: Sequence[Tensor], like: Tensor) -> Tensor:
        return self.assemble(payloads, like)

    @override
    def second_hop_bytes(self, numel: int, group: int = 0) -> int:
        return self.payload_bytes(numel, group)

    @override
    def second_hops(self, numel: int) -> list[int] | None:
        if self._shares is None:
            return None
        return [self.payload_bytes(numel, group) for group in range(self.groups)]


def _padded(values: Tensor, numel: int) -> Tensor:
    if len(values) == numel:
        return values
    padded = new_vector(numel, values.device)
    padded[: len(values)] = values
    padded[len(values) :] = 0
    return padded


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8)


# Rounded shares, such as three times 0.33, add up to 1 within this tolerance.
_ROUNDED = 0.0101

# Links that differ by no more than the measurement error are treated as equal.
_ALIKE = 0.1


@dataclass(frozen=True)
class TwoShot:
    """A two-shot exchange in which groups average parts of different sizes, also called joint
    allocation (arXiv 2003.04544).

    Group g averages the share ``s_g`` of every shard. With a payload P, the group sends and
    receives ``P * (1 + (M - 2) * s_g)``, so a group behind a slow link sends the fewest bytes if
    its share is 0. The slowest link determines the duration of a round. ``"by_bandwidth"`` chooses
    the shares that minimise the transfer time on this link.

    Args:
        parts: A list with a share of at least 0 for each group. The shares must add up to 1.
            ``"by_bandwidth"`` derives the shares from the links. ``"equal"`` is the same as
            ``exchange="two_shot"``.
        links: The bandwidth of each group's link in Gbit/s, for ``"by_bandwidth"``. If None, a
            Trainer measures the links before the first launch.
        backend: The library that transfers outer gradients between worker groups: ``"gloo"``, or
            ``"nccl"`` between CUDA devices. The results are bit-identical.

    Raises:
        ValueError: If an argument is invalid, or if links are given together with shares.

    Examples:
        >>> TwoShot("by_bandwidth", links=[1, 1, 1, 0.5]).shares(4)
        (0.3333333333333333, 0.3333333333333333, 0.3333333333333333, 0.0)
        >>> TwoShot("by_bandwidth", links=[1, 1, 1, 1]).shares(4) is None
        True
    """

    parts: Literal["equal", "by_bandwidth"] | Sequence[float] = "by_bandwidth"
    links: Sequence[float] | None = None
    backend: Literal["gloo", "nccl"] = field(default="gloo", repr=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(
                f"backend={self.backend!r} is unknown. It must be 'gloo' (the default) or 'nccl'."
            )
        if not isinstance(self.parts, str):
            parts = _numbers("parts", self.parts, may_be_zero=True)
            _check_sum(self.parts)
            object.__setattr__(self, "parts", parts)
        elif self.parts not in ("equal", "by_bandwidth"):
            raise ValueError(
                f"parts={self.parts!r} is unknown. Choose 'by_bandwidth', 'equal' or a list of"
                " shares."
            )
        if self.links is not None:
            if self.parts != "by_bandwidth":
                raise ValueError(
                    f"links={self.links!r} was given with parts={self.parts!r}, which does not use"
                    " links. Leave out links, or choose parts='by_bandwidth'."
                )
            object.__setattr__(self, "links", _numbers("links", self.links, may_be_zero=False))

    @property
    def lacks_links(self) -> bool:
        """True if the links must be measured before the first launch."""
        return self.parts == "by_bandwidth" and self.links is None

    def over(self, links: Sequence[float]) -> "TwoShot":
        """Returns the exchange for measured link bandwidths in Gbit/s. Links that are at most a
        tenth slower than the fastest link are treated as equal.
        """
        fastest = max(links)
        alike = [link if link < (1 - _ALIKE) * fastest else fastest for link in links]
        return replace(self, links=[float(f"{link:.3g}") for link in alike])

    def shares(self, groups: int) -> tuple[float, ...] | None:
        """Returns the shares of all groups, which add up to 1, or None for equal parts.

        Args:
            groups: The number of worker groups.

        Raises:
            ValueError: If the number of values does not match the number of groups, or if the links
                are unknown.
        """
        if self.lacks_links:
            raise ValueError(
                f"exchange={self!r} needs the bandwidth of the links, which only a Trainer"
                " measures. Pass the Gbit/s of each group, for example TwoShot('by_bandwidth',"
                " links=[1, 1, 0.5]). To measure the links, run sdiloco doctor."
            )
        numbers = self.links
        if numbers is None and not isinstance(self.parts, str):
            numbers = self.parts
        if numbers is None:
            return None
        if len(numbers) != groups:
            raise ValueError(
                f"exchange={self!r} has {len(numbers)} numbers for {groups} worker groups. Pass one"
                " number for each group."
            )
        if self.links is not None:
            if groups <= 2:
                return None
            # Within the shortest time in which a payload of size 1 can pass through all links, each
            # group can average this share. If these shares add up to more than 1, they are scaled
            # down proportionally.
            least_time = max(1 / min(numbers), (2 * groups - 2) / fsum(numbers))
            numbers = [max(0.0, (link * least_time - 1) / (groups - 2)) for link in numbers]
        shares = tuple(number / fsum(numbers) for number in numbers)
        if len(set(shares)) == 1:
            return None
        return shares

    @staticmethod
    def read(data: SavedObject | str, backend: str) -> "TwoShot | str":
        """Returns the exchange that a checkpoint describes, as a name or a `TwoShot`."""
        if isinstance(data, str):
            return f"{data}:{backend}"
        return TwoShot(**dict(data["fields"], backend=backend))


def _numbers(name: str, numbers: Sequence[float], may_be_zero: bool) -> tuple[float, ...]:
    rule = "positive numbers"
    if may_be_zero:
        rule = "numbers that are not negative, and not all 0"
    if not isinstance(numbers, Sequence) or not all(map(_is_number, numbers)):
        is_right = False
    elif may_be_zero:
        is_right = any(numbers) and min(numbers) >= 0
    else:
        is_right = any(numbers) and min(numbers) > 0
    if not is_right:
        raise ValueError(
            f"{name}={numbers!r} is out of range: it must be a list of {rule}, with one number for"
            " each worker group."
        )
    return tuple(numbers)


def _check_sum(parts: Sequence[float]) -> None:
    total = fsum(parts)
    if abs(total - 1) > _ROUNDED:
        proportional = [float(f"{part / total:.3g}") for part in parts]
        raise ValueError(
            f"parts={parts!r} add up to {total:g}, but the shares of all groups must add up to 1."
            f" For parts in this proportion, pass {proportional}."
        )


def _is_number(number: object) -> bool:
    return is_number(number) and isfinite(number)


BACKENDS = ("gloo", "nccl")


def kind_and_backend(exchange: str | TwoShot) -> tuple[str | TwoShot, str]:
    """Splits an exchange such as ``"two_shot:nccl"`` into its kind and its backend."""
    if isinstance(exchange, str):
        kind, _, backend = exchange.partition(":")
        return kind, backend or BACKENDS[0]
    return exchange, getattr(exchange, "backend", BACKENDS[0])


def check_exchange(exchange: str | TwoShot, compression: Compression) -> None:
    """Refuses an exchange that is unknown or does not work with a compression."""
    kind, backend = kind_and_backend(exchange)
    is_two_shot = kind == "two_shot" or isinstance(kind, TwoShot)
    if not (is_two_shot or kind in ("auto", "gather")) or backend not in BACKENDS:
        raise ValueError(
            f"exchange={exchange!r} is unknown. Choose 'auto' (the default), 'gather', 'two_shot'"
            " or a TwoShot. Instead of 'gloo', each can use 'nccl' between CUDA devices, as in"
            " 'auto:nccl'."
        )
    if not is_two_shot:
        return
    why = ""
    if compression.traits.varies:
        why = "its payloads differ in length"
    elif compression.traits.counts_senders:
        why = "over='senders' depends on who sent a value"
    if why:
        raise ValueError(
            f"exchange={exchange!r} does not work with compression={compression!r}, because {why}."
            " The mean in the second shot does not contain this information and may not fit into"
            " such a payload. Leave out exchange, or choose 'gather'."
        )


def is_two_shot(exchange: str | TwoShot, groups: int, compression: Compression) -> bool:
    kind, _ = kind_and_backend(exchange)
    if kind == "auto":
        return groups > 2 and compression.traits.suits_sums
    return kind == "two_shot" or isinstance(kind, TwoShot)


def all_reduce_for(
    exchange: str | TwoShot, groups: int, compression: Compression, mixing: float
) -> AllReduce:
    """Creates the all-reduce for an exchange. `AllReduce.at` adapts the result to a single
    launch.
    """
    if not is_two_shot(exchange, groups, compression):
        return AllReduce(groups, compression, mixing)
    shares = None
    if isinstance(exchange, TwoShot):
        shares = exchange.shares(groups)
    return TwoShotAllReduce(groups, compression, mixing, shares)

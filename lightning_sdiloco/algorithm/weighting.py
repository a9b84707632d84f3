"""The control vector of a launch, and the weights of groups in a mean. The weights depend only on
control vectors and are therefore the same in all groups.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import sqrt
from operator import or_
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_sdiloco.algorithm.guard import (
    Length,
    Past,
    joined_pasts,
    outlying,
    remembered,
    remembered_sizes,
    with_large_buffers,
)

_CONTROL = struct.Struct("<IIHeIqdQBf3x")

CONTROL_BYTES = _CONTROL.size

# The largest half-precision number.
_LONGEST_STEP = 65504.0


def combined(digests: list[int]) -> int:
    """Combines the digests of shards into a single digest."""
    return (sum(digests) + 2**63) % 2**64 - 2**63


class Control(NamedTuple):
    """The control vector of a rank, or of a group after its ranks have been merged.

    Attributes:
        fragment: The launched fragment.
        step: The inner step of the launch.
        requests: The rank's requests to all groups, such as a request to stop, with one bit per
            request.
        weight: The number of micro-batches that the group has trained on since it last launched the
            fragment, summed over its ranks.
        digest: The digest of the fragment's outer parameters and buffers.
        norm_squared: The squared norm of the outer gradient.
        changed: The fragment's buffers that have changed since its last landing, with one bit per
            buffer.
        finite: True if the outer gradient is finite.
        step_time: The duration of an inner step in seconds, rounded to three digits, or 0 if
            unknown.
        buffers: The size of the changed buffers as a multiple of the outer buffers, or 0 if no
            buffer changed.

    Examples:
        >>> control = Control(2, 100, requests=0, weight=50, digest=-5, norm_squared=0.25, changed=0, finite=True)
        >>> Control.unpacked(control.packed()) == control, len(control.packed())
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
    buffers: float = 0.0

    @property
    def norm(self) -> float:
        """The norm of the outer gradient before compression."""
        return sqrt(self.norm_squared)

    def packed(self) -> bytearray:
        """Packs the control vector into ``CONTROL_BYTES`` bytes."""
        step_time = min(self.step_time, _LONGEST_STEP)
        return bytearray(_CONTROL.pack(*self[:3], step_time, *self[3:-2], self.buffers))

    @staticmethod
    def unpacked(packed: bytearray | memoryview) -> "Control":
        """Unpacks a control vector from its bytes."""
        *fields, buffers = _CONTROL.unpack(packed)
        step_time = fields.pop(3)
        control = Control._make([*fields, step_time, buffers])
        return control._replace(finite=bool(control.finite))

    @staticmethod
    def merged(ranks: Sequence["Control"]) -> "Control":
        """Merges the control vectors of a group's ranks so that the same decisions apply to all
        shards of a fragment.

        A buffer has changed in a group if it has changed on any rank. The first rank sends the
        buffer. A group has trained if all of its ranks have trained.
        """
        weight = 0
        if all(rank.weight for rank in ranks):
            weight = sum(rank.weight for rank in ranks)
        return ranks[0]._replace(
            changed=reduce(or_, (rank.changed for rank in ranks)),
            requests=reduce(or_, (rank.requests for rank in ranks)),
            finite=all(rank.finite for rank in ranks),
            weight=weight,
            digest=combined([rank.digest for rank in ranks]),
            norm_squared=sum(rank.norm_squared for rank in ranks),
            step_time=max(rank.step_time for rank in ranks),
        )


class Count(NamedTuple):
    """The weights of groups in a mean, and the groups that are left out.

    Attributes:
        factors: The groups that count, in order, with the factors for their outer gradients. The
            mean is the sum of the products divided by the number of these groups. A factor of 1
            leaves every bit unchanged.
        outlying: The groups that the guard leaves out.
        wrong_buffers: The groups that count without their buffers, because the buffers are too
            large.

    Examples:
        >>> gradients, count = (3.0, 100.0, 5.0), Count({0: 1.0, 2: 1.0}, outlying=(1,))
        >>> sum(factor * gradients[group] for group, factor in count.factors.items()) / len(count.factors)
        4.0
    """

    factors: dict[int, float]
    outlying: tuple[int, ...] = ()
    wrong_buffers: tuple[int, ...] = ()


def plain(controls: Sequence[Control]) -> Count:
    return Count({group: 1.0 for group, control in enumerate(controls) if control.finite})


def by_training(weights: Mapping[int, int]) -> dict[int, float]:
    """Returns the factors for groups, given the number of inner steps that each group trained."""
    total = sum(weights.values())
    # In this order, whole numbers are divided, so the result is exactly 1 if the weights are equal.
    return {group: len(weights) * weight / total for group, weight in weights.items()}


WeighingState = Any
"""The JSON state that a `Weighing` keeps for a fragment. Only the weighing itself interprets it."""


class Weighing(ABC):
    """Decides how much each group counts in the mean of a fragment.

    Decisions depend only on values that the groups sent, never on values that only one group has,
    so results are bit-identical everywhere. Make a weighing a frozen dataclass, because its
    ``repr`` is compared between ranks and with the checkpoint. The state for each fragment is plain
    JSON and changes only when a flight lands.

    Examples:
        >>> @dataclass(frozen=True)
        ... class Alike(Weighing):
        ...     def count(self, controls, state):
        ...         counted = [group for group, control in enumerate(controls) if control.weight and control.finite]
        ...         return Count(dict.fromkeys(counted, 1.0))
        >>> trained = Control(0, 100, requests=0, weight=50, digest=0, norm_squared=4.0, changed=0, finite=True)
        >>> Alike().count([trained, trained._replace(weight=0), trained], None).factors
        {0: 1.0, 2: 1.0}
    """

    def start(self, groups: int) -> WeighingState:
        """Returns the state of a fragment before its first launch. The default is None.

        Args:
            groups: The number of worker groups.
        """
        return None

    @abstractmethod
    def count(self, controls: Sequence[Control], state: WeighingState) -> Count:
        """Decides how much each group counts.

        Args:
            controls: The control vectors of all groups. A group must not count if its outer
                gradient is not finite or if its weight is 0.
            state: The state of the fragment.
        """

    def heard(
        self, controls: Sequence[Control], state: WeighingState, count: Count
    ) -> WeighingState:
        """Returns the state after the landing. By default, the state does not change.

        Args:
            controls: The same as for `count`.
            state: The same as for `count`.
            count: The result of `count`.
        """
        return state

    def joined(self, states: Sequence[WeighingState], groups: int) -> WeighingState:
        """Returns the state of a fragment whose parameters come from other fragments. The default
        is a new state.

        The model is divided into fragments again if parameters are frozen or become trainable, or
        if a run restarts.

        Args:
            states: The states of the fragments that previously contained the parameters.
            groups: The number of worker groups, which is unchanged.
        """
        return self.start(groups)


@dataclass(frozen=True)
class Aggregation(Weighing):
    """Weights groups by the amount of training, and clips and guards their outer gradients.

    For each group, the state of a fragment contains a `Past` of lengths and a `Past` of buffer
    sizes.

    Args:
        clip_norm: The norm to which longer outer gradients are scaled down. None disables clipping.
        guard: The factor by which a group's norm may exceed its usual norm before the group is left
            out; see `outlying`. None disables the guard.
    """

    clip_norm: float | None = None
    guard: float | None = None

    @override
    def start(self, groups: int) -> list[WeighingState]:
        return [Past().plain() for _ in range(groups)]

    @override
    def count(self, controls: Sequence[Control], state: Sequence[object] = ()) -> Count:
        lengths = self._lengths(controls)
        outliers = self._outliers(lengths, state)
        counted = [group for group in lengths if group not in outliers]
        factors = by_training({group: controls[group].weight for group in counted})
        if self.clip_norm is not None:
            for group in factors:
                norm = controls[group].norm
                if norm > self.clip_norm:
                    factors[group] *= self.clip_norm / norm
        sizes = {group: controls[group].buffers for group in factors}
        return Count(factors, outliers, self._wrong_buffers(sizes, state))

    def _lengths(self, controls: Sequence[Control]) -> dict[int, Length]:
        lengths = dict[int, Length]()
        for group, control in enumerate(controls):
            # Groups launch after the same inner steps, so their learning rates are equal.
            if control.finite and control.weight > 0:
                lengths[group] = Length(control.norm, control.weight)
        return lengths

    def _outliers(self, lengths: Mapping[int, Length], state: Sequence[object]) -> tuple[int, ...]:
        # A single group has no other groups to protect.
        if self.guard is None or len(state) == 1:
            return ()
        return tuple(outlying(lengths, _pasts(state), self.guard))

    def _wrong_buffers(
        self, sizes: Mapping[int, float], state: Sequence[object]
    ) -> tuple[int, ...]:
        if self.guard is None or len(state) == 1:
            return ()
        too_large = with_large_buffers(sizes, _pasts(state, "buffers"))
        # If the buffers of all groups are too large, training has changed.
        return tuple(too_large) if len(too_large) < len(sizes) else ()

    @override
    def heard(
        self, controls: Sequence[Control], state: Sequence[object], count: Count
    ) -> list[WeighingState]:
        lengths = self._lengths(controls)
        counted = {group: lengths[group] for group in count.factors}
        pasts = remembered(counted, count.outlying, _pasts(state))
        sizes = {group: controls[group].buffers for group in counted}
        pasts_of_sizes = remembered_sizes(sizes, count.wrong_buffers, _pasts(state, "buffers"))
        states = list[WeighingState]()
        for group in range(len(controls)):
            buffers = pasts_of_sizes.get(group, Past()).plain()
            states.append({**pasts.get(group, Past()).plain(), "buffers": buffers})
        return states

    @override
    def joined(self, states: Sequence[Sequence[object]], groups: int) -> list[WeighingState]:
        """Joins the lengths of fragments. The results are upper bounds for the lengths of any
        part.
        """
        joined = list[WeighingState]()
        for group in range(groups):
            joined.append(joined_pasts([Past.read(state[group]) for state in states]).plain())
        return joined


def _pasts(state: Sequence[object], part: str = "") -> dict[int, Past]:
    pasts = dict[int, Past]()
    for group, saved in enumerate(state):
        if part:
            # Earlier versions saved nothing about buffers.
            saved = saved.get(part) if isinstance(saved, dict) else None
        pasts[group] = Past.read(saved)
    return pasts


class Weighed(NamedTuple):
    """The states of a weighing, keyed by parameter names so that they survive a new partition.

    Attributes:
        weighing: The weighing as text.
        groups: The number of worker groups.
        states: The states of the fragments, keyed by the names of their parameters.
    """

    weighing: str
    groups: int
    states: dict[tuple[str, ...], WeighingState]

    def state_for(
        self, names: Sequence[str], weighing: Weighing, text: str, groups: int
    ) -> WeighingState:
        """Returns the state of a fragment with these parameters, or a new state if none matches."""
        sources = {
            names_before: state
            for names_before, state in self.states.items()
            if not set(names_before).isdisjoint(names)
        }
        all_were_weighed = set(names) <= set[str]().union(*sources)
        # If the number of groups differs, the groups are not the same. Parameters that were frozen
        # have no norms.
        if not all_were_weighed or text != self.weighing or groups != self.groups:
            return weighing.start(groups)
        if tuple(names) in sources:
            return sources[tuple(names)]
        return weighing.joined(list(sources.values()), groups)

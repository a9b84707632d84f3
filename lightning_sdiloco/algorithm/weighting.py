"""The control vector of a launch, and the weights of groups in a mean, which follow from it and are
therefore the same in all groups.
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

# The largest number of a half-precision float.
_LONGEST_STEP = 65504.0


def combined(digests: list[int]) -> int:
    """Returns the digest of a whole, given the digests of its shards."""
    return (sum(digests) + 2**63) % 2**64 - 2**63


class Control(NamedTuple):
    """The control vector of a rank, or of a group once its ranks are merged.

    Attributes:
        fragment: The fragment that is launched.
        step: The inner step of the launch.
        requests: The rank's requests to all groups, one bit each, such as a request to stop.
        weight: The number of micro-batches that the group trained since its last launch of the
            fragment, summed over its ranks.
        digest: The digest of the outer parameters and buffers of the fragment.
        norm_squared: The squared norm of the outer gradient.
        changed: The buffers of the fragment that changed since its last landing, one bit each.
        finite: True if the outer gradient is finite.
        step_time: The duration of an inner step in seconds, to three digits; 0 if unknown.
        buffers: The size of the buffers that changed, as a multiple of the outer ones; 0 if none
            changed.

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
        """The norm of the outer gradient, before any compression."""
        return sqrt(self.norm_squared)

    def packed(self) -> bytearray:
        """Returns the control vector as ``CONTROL_BYTES`` bytes."""
        step_time = min(self.step_time, _LONGEST_STEP)
        return bytearray(_CONTROL.pack(*self[:3], step_time, *self[3:-2], self.buffers))

    @staticmethod
    def unpacked(packed: bytearray | memoryview) -> "Control":
        """Reads a control vector back from its bytes."""
        *fields, buffers = _CONTROL.unpack(packed)
        step_time = fields.pop(3)
        control = Control._make([*fields, step_time, buffers])
        return control._replace(finite=bool(control.finite))

    @staticmethod
    def merged(ranks: Sequence["Control"]) -> "Control":
        """Returns the control vector of a group, given those of its ranks, so that all shards of a
        fragment make the same decisions.

        A buffer has changed in a group if it has changed on one of its ranks; the first rank sends
        it. A group has trained if all its ranks have.
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
    """How much each group counts in one mean.

    Attributes:
        factors: The groups that count, in order, each with the factor of its outer gradient. The
            mean is the sum of the products divided by the number of these groups. A factor of 1
            changes no bit.
        outlying: The groups that the guard leaves out.
        wrong_buffers: The groups that count without their buffers, which are too large.

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
    """Returns the factors of the groups that count, given the inner steps that each trained."""
    total = sum(weights.values())
    # In this order, a whole number is divided by a whole number: exactly 1 if the weights are
    # equal.
    return {group: len(weights) * weight / total for group, weight in weights.items()}


WeighingState = Any
"""The state of a `Weighing` for one fragment, as JSON. Only the weighing interprets it."""


class Weighing(ABC):
    """Decides how much each group counts in the mean of a fragment.

    It decides from values that the groups sent, never from values that only one group has, so its
    results are bit-identical everywhere. Make it a frozen dataclass: its ``repr`` is compared
    between ranks, and with the checkpoint's. Its state for each fragment is plain JSON, and changes
    only when a flight lands.

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
        """Returns the state of a fragment before its first launch; by default there is none.

        Args:
            groups: Number of worker groups.
        """
        return None

    @abstractmethod
    def count(self, controls: Sequence[Control], state: WeighingState) -> Count:
        """Decides how much each group counts.

        Args:
            controls: The control vector of every group. A group that is not finite, or whose weight
                is 0, must not count.
            state: The state of the fragment.
        """

    def heard(
        self, controls: Sequence[Control], state: WeighingState, count: Count
    ) -> WeighingState:
        """Returns the state after the landing; by default, the same state.

        Args:
            controls: As for `count`.
            state: As for `count`.
            count: What `count` returned.
        """
        return state

    def joined(self, states: Sequence[WeighingState], groups: int) -> WeighingState:
        """Returns the state of a fragment whose parameters come from other fragments; by default a
        fresh state.

        The model is divided again when parameters are frozen or become trainable, and when a run
        restarts.

        Args:
            states: The states of the fragments that contained its parameters.
            groups: Number of worker groups, as before.
        """
        return self.start(groups)


@dataclass(frozen=True)
class Aggregation(Weighing):
    """Weights groups by how much they trained; clips and guards their outer gradients.

    The state of a fragment has a `Past` for the lengths of each group, and one for the sizes of its
    buffers.

    Args:
        clip_norm: The norm to which longer outer gradients are scaled down; None disables clipping.
        guard: A group is left out if its norm is more than this many times the usual one according
            to `outlying`; None disables the guard.
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
            # Groups launch after the same inner steps, so their learning rates are the same.
            if control.finite and control.weight > 0:
                lengths[group] = Length(control.norm, control.weight)
        return lengths

    def _outliers(self, lengths: Mapping[int, Length], state: Sequence[object]) -> tuple[int, ...]:
        # A single group has no others to protect.
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
        """Returns the joined lengths of these fragments: those of a part are at most as long."""
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
    """The states of a weighing, by the parameters of each fragment, so that they survive a new
    partition.

    Attributes:
        weighing: The weighing, as text.
        groups: Number of worker groups.
        states: The state of each fragment, by the names of its parameters.
    """

    weighing: str
    groups: int
    states: dict[tuple[str, ...], WeighingState]

    def state_for(
        self, names: Sequence[str], weighing: Weighing, text: str, groups: int
    ) -> WeighingState:
        """Returns the state of a fragment with these parameters, for a weighing, its text and a
        number of groups.
        """
        sources = {
            names_before: state
            for names_before, state in self.states.items()
            if not set(names_before).isdisjoint(names)
        }
        all_were_weighed = set(names) <= set[str]().union(*sources)
        # If the number of groups differs, so do the groups, and parameters that were frozen have no
        # norms.
        if not all_were_weighed or text != self.weighing or groups != self.groups:
            return weighing.start(groups)
        if tuple(names) in sources:
            return sources[tuple(names)]
        return weighing.joined(list(sources.values()), groups)

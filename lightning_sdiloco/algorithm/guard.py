"""The guard, which decides which outer gradients are too long to count.

The guard works without tensors, because a federation's hub also uses it. Decisions depend only on
plain numbers that are the same everywhere, so all groups make the same decision.

[Note: the model of lengths] The more a group trains between two launches, the longer its outer
gradient becomes. However, the growth slows down, so the outer gradient may be no longer after 300
inner steps than after 10. The model is

    norm = level of the group * growth of the round * distance / (distance + half)

The distance is the sum of the learning rates of the inner steps, or the number of steps if any
learning rate is unknown. The level is the median of the lengths that counted in the last eight
rounds. Equal distances do not determine ``half``, so the guard tries 13 values and keeps each value
that explains these lengths almost as well as the best value does. The usual length is the longest
length that any kept value allows. Lengths are compared as logarithms. This module computes the
logarithms itself, because the C library's results differ in the last bit between machines, which
could change a decision.

[Note: directions] A flipped sign does not change the length of an outer gradient, but the outer
gradient then points against the outer gradients of the other sites, which agree with each other.
The same happens at a site whose data differs from the data of the other sites, once the sites have
learned what they have in common. At the optimum, all outer gradients add up to zero. No rule can
distinguish the two cases, so no site is left out because of its direction. A direction is reported
if it persists and there are at least three other sites to compare it with.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import frexp, inf, ldexp, sqrt
from operator import attrgetter
from statistics import fmean, median, median_high
from typing import Generic, NamedTuple, TypeVar

Member = TypeVar("Member")
"""A group, identified by its number, or a site, identified by its name."""

GUARD = 5.0
"""The default factor by which a length may exceed the usual length."""

REMEMBERED = 8
"""The number of previous rounds whose lengths are remembered for comparison."""

FIRST = 1e4
"""The factor by which a length may exceed the other members' lengths in the first rounds."""

BUFFERS = 100.0
"""The factor by which buffers may exceed their usual size."""

NOT_FINITE = 3.4028234663852886e38
"""The size recorded for non-finite buffers: the largest number that fits into a control vector."""

JUDGED = 16
"""The number of a site's contributions that are judged together."""

AGAINST = 12
"""The number of these contributions that must point against the other sites before the site is
reported."""

AGAINST_OTHERS = (
    f"at least {AGAINST} of its last {JUDGED} contributions had a negative cosine with the mean of the"
    " other contributions, which agree with each other. These contributions still count. If the"
    " site's data resembles the data of the other sites, look for a wrong sign in its loss, its"
    " labels or its optimizer."
)

_ENOUGH = 4
_PEERS = 2
# The number of rounds over which a scale is averaged, and its largest change in a single round.
_SCALED = 64
_LARGEST_CHANGE = 0.7
# The values of ``half`` to try, in units of the median distance.
_HALVES = [4.0**power for power in range(-6, 7)]
# Outer gradients agree above this cosine and oppose each other below its negative.
_OPPOSED = 0.1
_AGREEING = 3
# The largest amount by which the average error of a kept curve exceeds the smallest average error.
_TOLERANCE = 0.25
# The largest logarithm of a length, and the smallest sum of learning rates that is meaningful.
_LARGEST = 700.0
_SHORTEST_PATH = 1e-30


_LOG_2 = 0.6931471805599453
# The coefficients of the logarithm's series in reverse order: 1/35, 1/33, ..., 1.
_COEFFICIENTS = tuple(1.0 / power for power in range(35, 0, -2))


# Cached, because every round compares the lengths of the last eight rounds again.
@lru_cache(1 << 16)
def _log(number: float) -> float:
    """Computes the natural logarithm with operations whose results are bit-identical everywhere."""
    if number == inf:
        return inf
    mantissa, exponent = frexp(number)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = 0.0
    for coefficient in _COEFFICIENTS:
        series = series * square + coefficient
    return exponent * _LOG_2 + 2.0 * ratio * series


def _exp(logarithm: float) -> float:
    """Computes the exponential in the same way, after limiting the logarithm to `_LARGEST`."""
    logarithm = max(-_LARGEST, min(logarithm, _LARGEST))
    exponent = round(logarithm / _LOG_2)
    remainder = logarithm - exponent * _LOG_2
    series = 1.0
    for number in range(16, 0, -1):
        series = 1.0 + series * remainder / number
    return ldexp(series, exponent)


class Length(NamedTuple):
    """The length of an outer gradient and the amount of training since the last launch.

    Attributes:
        norm: The norm of the outer gradient.
        steps: The number of inner steps, or another measure that grows with this number.
        path: The sum of the learning rates of these inner steps, or 0 if unknown.
    """

    norm: float
    steps: float
    path: float = 0.0

    @property
    def log(self) -> float:
        return _log(self.norm)

    @property
    def is_comparable(self) -> bool:
        return 0.0 < self.norm < inf and self.steps > 0.0

    @property
    def has_path(self) -> bool:
        return _SHORTEST_PATH < self.path < 1.0 / _SHORTEST_PATH


class Past(NamedTuple):
    """The past lengths of a group, as stored by the guard.

    Attributes:
        lengths: The lengths of the last eight rounds, starting with the oldest. None marks a round
            in which the group did not take part.
        scale: The logarithm of the ratio between the group's norms and the norms of the other
            groups, averaged over many rounds.
        rounds: The number of rounds in this average, at most 64.
    """

    lengths: tuple[Length | None, ...] = ()
    scale: float = 0.0
    rounds: int = 0

    @property
    def measured(self) -> list[Length]:
        return [length for length in self.lengths if length is not None]

    def plain(self) -> dict[str, object]:
        """Converts the past to plain JSON."""
        lengths = [None if length is None else list(length) for length in self.lengths]
        return {"lengths": lengths, "scale": self.scale, "rounds": self.rounds}

    @staticmethod
    def read(saved: object) -> "Past":
        """Reads the result of `plain`. Data from earlier versions is discarded."""
        if not isinstance(saved, dict):
            return Past()
        lengths = (None if length is None else Length(*length) for length in saved["lengths"])
        return Past(tuple(lengths), saved["scale"], saved["rounds"])


class TooLong(NamedTuple):
    """The reason for leaving out an outer gradient, with the factor (``times``) by which the outer
    gradient exceeds its usual length or the lengths of the other outer gradients.
    """

    times: float
    is_beside_others: bool


@dataclass(frozen=True)
class _Curve(Generic[Member]):
    """A possible growth curve of lengths, with the level of each member that has enough lengths."""

    half: float
    levels: Mapping[Member, float]

    def usual(self, member: Member, distance: float) -> float:
        """Returns a member's usual length after a given distance."""
        return self.levels[member] + _saturation(distance, self.half)


def _saturation(distance: float, half: float) -> float:
    return _log(distance) - _log(distance + half)


def _curves(
    lengths: Mapping[Member, Sequence[Length]], distance: Callable[[Length], float]
) -> list[_Curve[Member]]:
    """Returns the curves that explain the past lengths, starting with the flattest curve. The list
    is empty if there are too few lengths.
    """
    enough = {member: last for member, last in lengths.items() if len(last) >= _ENOUGH}
    if not enough:
        return []
    distances = list[float]()
    for last in enough.values():
        distances += map(distance, last)
    unit = median(distances)
    curves = list[_Curve[Member]]()
    # For each member, the error of each curve.
    misses = {member: list[float]() for member in enough}
    for half in _HALVES:
        levels = dict[Member, float]()
        for member, last in enough.items():
            heights = [length.log - _saturation(distance(length), half * unit) for length in last]
            levels[member] = median(heights)
            misses[member].append(fmean([abs(height - levels[member]) for height in heights]))
        curves.append(_Curve(half * unit, levels))
    return _likely(curves, list(misses.values()))


def _likely(
    curves: Sequence[_Curve[Member]], misses: Sequence[Sequence[float]]
) -> list[_Curve[Member]]:
    """Returns the curves whose average error over the members is close to the smallest error."""
    best = list(map(min, misses))
    excess = list[float]()
    for number in range(len(curves)):
        excess.append(
            fmean([missed[number] - least for missed, least in zip(misses, best, strict=True)])
        )
    limit = min(excess) + _TOLERANCE
    return [curve for curve, missed in zip(curves, excess, strict=True) if missed <= limit]


@dataclass(frozen=True)
class _Round(Generic[Member]):
    """The comparable lengths of a round, the past of each member, and the curves that explain the
    past lengths. All results are logarithms.
    """

    lengths: Mapping[Member, Length]
    pasts: Mapping[Member, Past]
    distance: Callable[[Length], float]

    @staticmethod
    def between(lengths: Mapping[Member, Length], pasts: Mapping[Member, Past]) -> "_Round[Member]":
        comparable = {member: length for member, length in lengths.items() if length.is_comparable}
        everything = [*comparable.values()]
        for past in pasts.values():
            everything += past.measured
        by_path = all(length.has_path for length in everything)
        return _Round(comparable, pasts, attrgetter("path" if by_path else "steps"))

    @cached_property
    def curves(self) -> Sequence[_Curve[Member]]:
        lengths = {member: past.measured for member, past in self.pasts.items()}
        return _curves(lengths, self.distance)

    def growth(self, member: Member, curve: _Curve[Member]) -> float:
        """Returns by how much the lengths of the other members exceed a curve's prediction, or 0 if
        no other member can be compared.
        """
        growths = list[float]()
        for peer, length in self.lengths.items():
            if peer != member and peer in curve.levels:
                growths.append(length.log - curve.usual(peer, self.distance(length)))
        return median_high(growths or [0.0])

    def is_usual_by_any_curve(self, member: Member, length: Length, guard: float) -> bool:
        """Returns whether every curve accepts a length, given the member's own past. This quick
        check relies on the fact that curves never decrease as the distance grows and never grow
        faster than the distance.
        """
        if member not in self.lengths or not self._has_past(member):
            return False
        last = self.pasts[member].measured
        further = max(map(self.distance, last)) / self.distance(length)
        least = median(past.log for past in last) - _log(max(1.0, further))
        return length.log <= guard + least

    def usual_in_its_past(self, member: Member, length: Length) -> float | None:
        """Returns the longest usual length according to a member's own past, or None if the past is
        too short.
        """
        if not self._has_past(member):
            return None
        distance = self.distance(length)
        # A member's length need not decrease just because the lengths of the other members have
        # decreased.
        usual_lengths = [self.curves[0].usual(member, distance)]
        for curve in self.curves:
            usual_lengths.append(curve.usual(member, distance) + self.growth(member, curve))
        peers = self._peers(member, length)
        if len(peers) >= _PEERS:
            usual_lengths.append(median_high(peers.values()))
        return max(usual_lengths)

    def usual_beside_peers(self, member: Member, length: Length) -> float | None:
        """Returns the usual length according to the other members' scaled lengths in this round, or
        None if too little is known.
        """
        scaled = list[float]()
        for peer, length_of_peer in self._peers(member, length).items():
            if self._is_scaled(peer):
                scaled.append(length_of_peer - self.pasts[peer].scale)
        if not self._is_scaled(member) or len(scaled) < _PEERS:
            return None
        return self.pasts[member].scale + median_high(scaled)

    def usual_at_first(self, member: Member, length: Length) -> float | None:
        """Returns the median length of the other members in this round, or None if there is no
        other member.
        """
        peers = self._peers(member, length)
        return median_high(peers.values()) if peers else None

    def level_of_peers(self, member: Member) -> float | None:
        """Returns the median length of the other members in this round, divided by their scales, or
        None if too little is known.
        """
        of_peers = list[float]()
        for peer, length in self.lengths.items():
            if peer != member and self._is_scaled(peer):
                of_peers.append(length.log - self.pasts[peer].scale)
        return median(of_peers) if of_peers else None

    def scale(self, member: Member) -> float:
        """Returns a member's length in this round, relative to the other members."""
        level = self.level_of_peers(member)
        if level is None:
            level = median(length.log for length in self.lengths.values())
        return self.lengths[member].log - level

    def _has_past(self, member: Member) -> bool:
        return member in self.pasts and len(self.pasts[member].measured) >= _ENOUGH

    def _is_scaled(self, member: Member) -> bool:
        return member in self.pasts and self.pasts[member].rounds >= _ENOUGH

    def _peers(self, member: Member, length: Length) -> dict[Member, float]:
        """Returns upper bounds for the other members' lengths after the same distance."""
        peers = dict[Member, float]()
        for peer, length_of_peer in self.lengths.items():
            if peer != member:
                further = self.distance(length) / self.distance(length_of_peer)
                peers[peer] = length_of_peer.log + _log(max(1.0, further))
        return peers


def outlying(
    lengths: Mapping[Member, Length], pasts: Mapping[Member, Past], guard: float
) -> dict[Member, TooLong]:
    """Returns the members whose outer gradients are too long; see [Note: the model of lengths].

    Each member is compared with its own past, which must contain at least four lengths, and with
    the growth of the other members. If there are at least two other members, the member is also
    compared with their scaled lengths in this round. If neither comparison is possible, the member
    is compared with the unscaled lengths of the other members. The limit is then `FIRST`, because
    the members' data may differ. If the outer gradients of all members are too long, training has
    changed, and only members that exceed `FIRST` are left out.

    Args:
        lengths: The lengths of all members that may count in the round.
        pasts: The past of each member.
        guard: The factor by which a length may exceed the usual length.

    Examples:
        >>> always = Past(lengths=(Length(1.0, steps=10),) * 4)
        >>> pasts = {"a": always, "b": always}
        >>> list(outlying({"a": Length(1.0, 10), "b": Length(40.0, 10)}, pasts, guard=5.0))
        ['b']
        >>> outlying({"a": Length(1.0, 10), "b": Length(40.0, 10)}, {}, guard=5.0)
        {}
        >>> outlying({"a": Length(39.0, 10), "b": Length(40.0, 10)}, pasts, guard=5.0)
        {}
    """
    round = _Round.between(lengths, pasts)
    outliers = dict[Member, TooLong]()
    for member, length in lengths.items():
        too_long = None
        if length.norm > 0.0 and length.steps > 0.0:
            too_long = _judged(round, member, length, _log(guard))
        if too_long is not None:
            outliers[member] = too_long
    if len(outliers) == len(lengths):
        return {member: why for member, why in outliers.items() if why.times > FIRST}
    return outliers


def _judged(round: _Round[Member], member: Member, length: Length, guard: float) -> TooLong | None:
    is_unknown = False
    if not round.is_usual_by_any_curve(member, length, guard):
        in_its_past = round.usual_in_its_past(member, length)
        if in_its_past is not None and length.log > guard + in_its_past:
            return TooLong(_exp(length.log - in_its_past), is_beside_others=False)
        is_unknown = in_its_past is None
    beside_peers = round.usual_beside_peers(member, length)
    # Different data may drive a group away from the other groups, but not that far.
    if beside_peers is not None and length.log > 2.0 * guard + beside_peers:
        return TooLong(_exp(length.log - beside_peers), is_beside_others=True)
    at_first = round.usual_at_first(member, length)
    is_unknown = is_unknown and beside_peers is None
    if is_unknown and at_first is not None and length.log > _log(FIRST) + at_first:
        return TooLong(_exp(length.log - at_first), is_beside_others=True)
    return None


def remembered(
    counted: Mapping[Member, Length], left_out: Iterable[Member], pasts: Mapping[Member, Past]
) -> dict[Member, Past]:
    """Returns the past of each member after a round.

    If the guard has left out a member, the usual length is recorded instead of the member's own
    length. The member's past therefore still follows the growth of the other members.

    Args:
        counted: The lengths of the members that counted.
        left_out: The members that the guard has left out.
        pasts: The past of each member before the round.
    """
    left_out = set(left_out)
    round = _Round.between(counted, pasts)
    new_pasts = dict[Member, Past]()
    for member in dict.fromkeys([*pasts, *counted]):
        past = pasts.get(member, Past())
        newest: Length | None = None
        if member in round.lengths:
            newest = counted[member]
            # A single length cannot be compared with other lengths.
            if len(round.lengths) > 1:
                past = _rescaled(past, round.scale(member))
        elif member in left_out and past.measured:
            newest = _usual_length(past, round.level_of_peers(member))
        lengths = (*past.lengths, newest)[-REMEMBERED:]
        if any(lengths):
            new_pasts[member] = past._replace(lengths=lengths)
    return new_pasts


def _rescaled(past: Past, scale: float) -> Past:
    rounds = min(past.rounds + 1, _SCALED)
    change = scale - past.scale
    if past.rounds >= _ENOUGH:
        change = max(-_LARGEST_CHANGE, min(change, _LARGEST_CHANGE))
    return past._replace(scale=past.scale + change / rounds, rounds=rounds)


def _usual_length(past: Past, level_of_peers: float | None) -> Length:
    last = past.measured[-1]
    if level_of_peers is None or past.rounds < _ENOUGH:
        return last
    return last._replace(norm=_exp(past.scale + level_of_peers))


def with_large_buffers(
    sizes: Mapping[Member, float], pasts: Mapping[Member, Past]
) -> dict[Member, float]:
    """Returns the members whose buffers are too large to count, with the factor by which each
    exceeds its usual size.

    Sizes are compared in the same way as lengths, but with the limit `BUFFERS` and without a
    distance.

    Args:
        sizes: The size of each member's buffers as a multiple of the outer values. The size is 0 if
            the buffers have not changed, and `NOT_FINITE` if a value is not finite.
        pasts: The past sizes of each member.

    Examples:
        >>> sizes = {"a": 1.0, "b": 1.2, "c": 1e20}
        >>> list(with_large_buffers(sizes, {}))
        ['c']
    """
    outliers = outlying(_as_lengths(sizes), pasts, BUFFERS)
    return {member: too_long.times for member, too_long in outliers.items()}


def remembered_sizes(
    sizes: Mapping[Member, float], left_out: Collection[Member], pasts: Mapping[Member, Past]
) -> dict[Member, Past]:
    """Returns the past buffer sizes of each member after a round."""
    counted = {member: size for member, size in sizes.items() if member not in left_out}
    return remembered(_as_lengths(counted), left_out, pasts)


def _as_lengths(sizes: Mapping[Member, float]) -> dict[Member, Length]:
    lengths = dict[Member, Length]()
    for member, size in sizes.items():
        if 0.0 < size < NOT_FINITE:
            lengths[member] = Length(size, steps=1.0)
    return lengths


class Direction(NamedTuple):
    """The direction of an outer gradient relative to the outer gradients of the other groups.

    Attributes:
        cosine: The cosine with the mean of the other outer gradients.
        among_others: The mean cosine between pairs of the other outer gradients, or 0 if there are
            fewer than three.
    """

    cosine: float
    among_others: float

    @property
    def is_against(self) -> bool:
        """True if the other outer gradients agree with each other and this outer gradient points
        against them; see [Note: directions].
        """
        return self.cosine < -_OPPOSED and self.among_others > _OPPOSED


def direction_in_mean(
    part: float, product: float, mean: float, norm: float, norms_of_others: Sequence[float]
) -> Direction:
    """Returns the direction of a group's contribution to a mean.

    Args:
        part: The squared norm of the decoded contribution.
        product: The inner product of the contribution and the mean.
        mean: The squared norm of the mean.
        norm: The norm of the contribution before it was encoded.
        norms_of_others: The norms of the other contributions before they were encoded. A
            compression is assumed to change all norms by the same factor.

    Examples:
        >>> direction_in_mean(1.0, 1.0, 4.0, 1.0, [1.0, 1.0, 1.0])  # at right angles
        Direction(cosine=0.0, among_others=0.0)
        >>> direction_in_mean(1.0, -2.0, 4.0, 1.0, [1.0, 1.0, 1.0])  # flipped
        Direction(cosine=-1.0, among_others=1.0)
    """
    mean_of_others = mean - 2.0 * product + part
    if not 0.0 < part * mean_of_others < inf or not norm:
        return Direction(0.0, 0.0)
    cosine = (product - part) / sqrt(part * mean_of_others)
    among_others = 0.0
    if sum(map(bool, norms_of_others)) >= _AGREEING:
        loss = part / (norm * norm)
        squares = loss * sum(length * length for length in norms_of_others)
        products = loss * sum(norms_of_others) ** 2 - squares
        among_others = (mean_of_others - squares) / products if products else 0.0
    return Direction(cosine, among_others)


def joined_pasts(pasts: Sequence[Past]) -> Past:
    """Returns a group's past for a fragment that combines several fragments."""
    lengths = list[Length | None]()
    for of_round in zip(*(reversed(past.lengths) for past in pasts), strict=False):
        parts = [length for length in of_round if length is not None]
        joined: Length | None = None
        if len(parts) == len(of_round):
            joined = parts[0]._replace(norm=sqrt(sum(part.norm * part.norm for part in parts)))
        lengths.append(joined if joined and joined.is_comparable else None)
    lengths.reverse()
    return Past(tuple(lengths))

"""The guard decides which outer gradients are too long to count.

It needs no tensors, because the hub of a federation also uses it. It decides from plain numbers
that are the same everywhere, and so are its decisions.

[Note: the model of lengths] The more a group trains between two launches, the longer its outer
gradient becomes, but it grows ever more slowly: after 300 inner steps, it may be as long as after
10. So

    norm = level of the group * growth of the round * distance / (distance + half)

The distance is the sum of the learning rates of the inner steps, or the number of steps if a
learning rate is unknown. A level is the median of the lengths that counted in the last eight
rounds. Equal distances do not determine ``half``: the guard tries 13 values, and keeps all that
explain these lengths almost as well as the best one. The usual length is the longest that one of
them allows. Lengths are compared as logarithms, which are computed here: those of the C library
differ in their last bit between machines, which could change the decision.

[Note: directions] A flipped sign does not change the length, but the outer gradient then points
against those of the others, which agree with each other. So does that of a site whose data differs
from data that the others share, once the others have learned what all sites have in common: at the
optimum, all outer gradients add up to zero. No rule can tell the two cases apart, so no site is
left out because of its direction. A direction is reported if it lasts, and if there are three
others that can agree.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import frexp, inf, ldexp, sqrt
from operator import attrgetter
from statistics import fmean, median, median_high
from typing import Generic, NamedTuple, TypeVar

Member = TypeVar("Member")
"""A group by its number, or a site by its name."""

GUARD = 5.0
"""How many times the usual length is too long, by default."""

REMEMBERED = 8
"""The number of past rounds with which a length is compared."""

FIRST = 1e4
"""How many times the others' length is too long if nothing else is known."""

BUFFERS = 100.0
"""How many times the usual size is too large for buffers."""

NOT_FINITE = 3.4028234663852886e38
"""The size of buffers that are not finite: the largest number of a control vector."""

JUDGED = 16
"""The number of a site's contributions that are judged together, for leaving and for directions."""

AGAINST = 12
"""How many of them must point against the others before this is reported."""

AGAINST_OTHERS = (
    f"at least {AGAINST} of its last {JUDGED} contributions had a negative cosine with the mean of the"
    " others', which agree with each other. They still count. If its data is like the others',"
    " look for a wrong sign in its loss, its labels or its optimizer."
)

_ENOUGH = 4
_PEERS = 2
# The number of rounds over which a scale is averaged, and the most by which one round can change
# it.
_SCALED = 64
_LARGEST_CHANGE = 0.7
# In units of the median distance.
_HALVES = [4.0**power for power in range(-6, 7)]
# With cosines beyond this, outer gradients agree or oppose each other.
_OPPOSED = 0.1
_AGREEING = 3
# The most by which the average error of a curve may exceed that of the best one.
_TOLERANCE = 0.25
# The largest logarithm of a length, and the smallest sum of learning rates that is meaningful.
_LARGEST = 700.0
_SHORTEST_PATH = 1e-30


_LOG_2 = 0.6931471805599453
# The coefficients of the logarithm's series, the last one first: 1/35, 1/33, ..., 1.
_COEFFICIENTS = tuple(1.0 / power for power in range(35, 0, -2))


# Cached, because every round compares the lengths of the last eight rounds again.
@lru_cache(1 << 16)
def _log(number: float) -> float:
    """Returns the natural logarithm, by operations that are bit-identical everywhere."""
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
    """Returns the exponential of a logarithm, limited to `_LARGEST`, in the same way."""
    logarithm = max(-_LARGEST, min(logarithm, _LARGEST))
    exponent = round(logarithm / _LOG_2)
    remainder = logarithm - exponent * _LOG_2
    series = 1.0
    for number in range(16, 0, -1):
        series = 1.0 + series * remainder / number
    return ldexp(series, exponent)


class Length(NamedTuple):
    """The length of an outer gradient, and how much its group trained for it.

    Attributes:
        norm: The norm of the outer gradient.
        steps: The number of inner steps, or another measure of training that grows with them.
        path: The sum of the learning rates of these inner steps; 0 if unknown.
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
    """The lengths that the guard remembers of a group.

    Attributes:
        lengths: The lengths of the last eight rounds, the oldest first; None for a round in which
            it took no part.
        scale: The logarithm of the ratio of its norms to the others', averaged over many rounds.
        rounds: The number of rounds in this average, at most 64.
    """

    lengths: tuple[Length | None, ...] = ()
    scale: float = 0.0
    rounds: int = 0

    @property
    def measured(self) -> list[Length]:
        return [length for length in self.lengths if length is not None]

    def plain(self) -> dict[str, object]:
        """Returns the past as JSON."""
        lengths = [None if length is None else list(length) for length in self.lengths]
        return {"lengths": lengths, "scale": self.scale, "rounds": self.rounds}

    @staticmethod
    def read(saved: object) -> "Past":
        """Reads the result of `plain`; pasts that an earlier version saved are dropped."""
        if not isinstance(saved, dict):
            return Past()
        lengths = (None if length is None else Length(*length) for length in saved["lengths"])
        return Past(tuple(lengths), saved["scale"], saved["rounds"])


class TooLong(NamedTuple):
    """Why an outer gradient is left out: it is ``times`` as long as usual for its group, or
    compared with the others.
    """

    times: float
    is_beside_others: bool


@dataclass(frozen=True)
class _Curve(Generic[Member]):
    """A possible growth of lengths, with the level of each member that has enough lengths."""

    half: float
    levels: Mapping[Member, float]

    def usual(self, member: Member, distance: float) -> float:
        """Returns the usual length of a member after a distance."""
        return self.levels[member] + _saturation(distance, self.half)


def _saturation(distance: float, half: float) -> float:
    return _log(distance) - _log(distance + half)


def _curves(
    lengths: Mapping[Member, Sequence[Length]], distance: Callable[[Length], float]
) -> list[_Curve[Member]]:
    """Returns the curves that explain the last lengths, the flattest first; none if there are too
    few lengths.
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
    """Returns the curves whose error, averaged over the members, is little more than that of the
    best one.
    """
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
    """The lengths of a round that can be compared, the pasts of its members, and the curves that
    explain them. All results are logarithms.
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
        """Returns how much longer the others are than a curve predicts; 0 if unknown."""
        growths = list[float]()
        for peer, length in self.lengths.items():
            if peer != member and peer in curve.levels:
                growths.append(length.log - curve.usual(peer, self.distance(length)))
        return median_high(growths or [0.0])

    def is_usual_by_any_curve(self, member: Member, length: Length, guard: float) -> bool:
        """Returns whether a length is not too long for a member's own past with any curve: no curve
        falls while the distance grows, or falls faster than the distance.
        """
        if member not in self.lengths or not self._has_past(member):
            return False
        last = self.pasts[member].measured
        further = max(map(self.distance, last)) / self.distance(length)
        least = median(past.log for past in last) - _log(max(1.0, further))
        return length.log <= guard + least

    def usual_in_its_past(self, member: Member, length: Length) -> float | None:
        """Returns the longest usual length according to a member's own past; None if that is too
        short.
        """
        if not self._has_past(member):
            return None
        distance = self.distance(length)
        # If the others have become shorter, a member need not follow them.
        usual_lengths = [self.curves[0].usual(member, distance)]
        for curve in self.curves:
            usual_lengths.append(curve.usual(member, distance) + self.growth(member, curve))
        peers = self._peers(member, length)
        if len(peers) >= _PEERS:
            usual_lengths.append(median_high(peers.values()))
        return max(usual_lengths)

    def usual_beside_peers(self, member: Member, length: Length) -> float | None:
        """Returns the usual length according to the others' lengths in this round, each in the
        scale of its member; None if too little is known.
        """
        scaled = list[float]()
        for peer, length_of_peer in self._peers(member, length).items():
            if self._is_scaled(peer):
                scaled.append(length_of_peer - self.pasts[peer].scale)
        if not self._is_scaled(member) or len(scaled) < _PEERS:
            return None
        return self.pasts[member].scale + median_high(scaled)

    def usual_at_first(self, member: Member, length: Length) -> float | None:
        """Returns the others' length in this round; None if there is none."""
        peers = self._peers(member, length)
        return median_high(peers.values()) if peers else None

    def level_of_peers(self, member: Member) -> float | None:
        """Returns the length of the others in this round, without their scales; None if too little
        is known.
        """
        of_peers = list[float]()
        for peer, length in self.lengths.items():
            if peer != member and self._is_scaled(peer):
                of_peers.append(length.log - self.pasts[peer].scale)
        return median(of_peers) if of_peers else None

    def scale(self, member: Member) -> float:
        """Returns a member's length relative to the others' in this round."""
        level = self.level_of_peers(member)
        if level is None:
            level = median(length.log for length in self.lengths.values())
        return self.lengths[member].log - level

    def _has_past(self, member: Member) -> bool:
        return member in self.pasts and len(self.pasts[member].measured) >= _ENOUGH

    def _is_scaled(self, member: Member) -> bool:
        return member in self.pasts and self.pasts[member].rounds >= _ENOUGH

    def _peers(self, member: Member, length: Length) -> dict[Member, float]:
        """Returns upper bounds for the others' lengths after this distance."""
        peers = dict[Member, float]()
        for peer, length_of_peer in self.lengths.items():
            if peer != member:
                further = self.distance(length) / self.distance(length_of_peer)
                peers[peer] = length_of_peer.log + _log(max(1.0, further))
        return peers


def outlying(
    lengths: Mapping[Member, Length], pasts: Mapping[Member, Past], guard: float
) -> dict[Member, TooLong]:
    """Returns the members whose outer gradients are too long to count; see [Note: the model of
    lengths].

    Each member is compared with its own past, which must contain four lengths, and with the growth
    of the others. If there are two others, it is also compared with their present lengths, each in
    its own scale. If too little is known for both, the member's data may differ from the others',
    so it is compared with their plain lengths, and the limit is `FIRST`. If all are too long,
    training has changed, and only those that exceed `FIRST` are left out.

    Args:
        lengths: The lengths of all members that could count in a round.
        pasts: The past of each member.
        guard: How many times the usual length is too long.

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
    # Different data may drive a group away from the others, but not that far.
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
    """Returns what to remember after a round.

    A member that the guard has left out is remembered as if its length had been usual: the guard
    learns nothing from its length, and the member still follows the others' growth.

    Args:
        counted: The lengths that counted.
        left_out: The members that the guard has left out.
        pasts: The pasts before the round.
    """
    left_out = set(left_out)
    round = _Round.between(counted, pasts)
    new_pasts = dict[Member, Past]()
    for member in dict.fromkeys([*pasts, *counted]):
        past = pasts.get(member, Past())
        newest: Length | None = None
        if member in round.lengths:
            newest = counted[member]
            # A single length cannot be compared with others.
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
    """Returns the members whose buffers are too large to count, and how many times as large as
    usual they are.

    Sizes are compared as lengths are, with the limit `BUFFERS`, but they do not grow with a
    distance.

    Args:
        sizes: The size of each member's buffers as a multiple of the outer values; 0 if they have
            not changed, `NOT_FINITE` if one is not finite.
        pasts: The remembered sizes of each member.

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
    """Returns what to remember of the sizes of buffers after a round in which some were left
    out.
    """
    counted = {member: size for member, size in sizes.items() if member not in left_out}
    return remembered(_as_lengths(counted), left_out, pasts)


def _as_lengths(sizes: Mapping[Member, float]) -> dict[Member, Length]:
    lengths = dict[Member, Length]()
    for member, size in sizes.items():
        if 0.0 < size < NOT_FINITE:
            lengths[member] = Length(size, steps=1.0)
    return lengths


class Direction(NamedTuple):
    """The direction of an outer gradient relative to the others'.

    Attributes:
        cosine: The cosine with the mean of the others.
        among_others: The mean cosine between two of the others; 0 if there are fewer than three.
    """

    cosine: float
    among_others: float

    @property
    def is_against(self) -> bool:
        """True if it points against others that agree; see [Note: directions]."""
        return self.cosine < -_OPPOSED and self.among_others > _OPPOSED


def direction_in_mean(
    part: float, product: float, mean: float, norm: float, norms_of_others: Sequence[float]
) -> Direction:
    """Returns the direction of a group's part of a mean.

    Args:
        part: Squared norm of the part, as it was decoded.
        product: Inner product of the part and the mean.
        mean: Squared norm of the mean.
        norm: Norm of the part before it was encoded.
        norms_of_others: The same for each other part. A compression changes all norms equally.

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
    """Returns the past of a group for a fragment that joins the parameters of several."""
    lengths = list[Length | None]()
    for of_round in zip(*(reversed(past.lengths) for past in pasts), strict=False):
        parts = [length for length in of_round if length is not None]
        joined: Length | None = None
        if len(parts) == len(of_round):
            joined = parts[0]._replace(norm=sqrt(sum(part.norm * part.norm for part in parts)))
        lengths.append(joined if joined and joined.is_comparable else None)
    lengths.reverse()
    return Past(tuple(lengths))

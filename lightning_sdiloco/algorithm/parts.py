"""Two shots with parts of different sizes: which share of a shard each group averages, by the bandwidth of its link."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum, isfinite
from typing import Literal

# Links that differ by no more than a measurement does are alike.
_ALIKE = 0.1


@dataclass(frozen=True)
class TwoShot:
    """An exchange in two shots in which groups average parts of different sizes: joint allocation (arXiv 2003.04544).

    Group g averages the share ``s_g`` of every shard. Of a payload P it sends and receives ``P * (1 + (M - 2) * s_g)``,
    so a group behind a slow link sends least if it averages nothing. What a group sends, it sends at once, and the
    slowest link decides: the shares are those with which it is busy for the least time. See `shares_by_bandwidth`.

    Args:
        parts: The shares, a positive number or 0 for each group; ``"by_bandwidth"`` for what suits the links; or
            ``"equal"``, which is ``exchange="two_shot"``.
        links: Gbit/s of the link of each group, in their order, for ``"by_bandwidth"``. Where it is left out, a Trainer
            measures the links before the first launch.

    Raises:
        ValueError: If there are neither shares nor links that could be meant, or both.

    Examples:
        >>> TwoShot("by_bandwidth", links=[1, 1, 1, 0.5]).shares(4)
        (0.3333333333333333, 0.3333333333333333, 0.3333333333333333, 0.0)
        >>> TwoShot("by_bandwidth", links=[1, 1, 1, 1]).shares(4) is None
        True
    """

    parts: Literal["equal", "by_bandwidth"] | Sequence[float] = "by_bandwidth"
    links: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parts, str):
            if self.parts not in ("equal", "by_bandwidth"):
                raise ValueError(
                    f"parts={self.parts!r} is not known. It is 'by_bandwidth', 'equal', or a list of shares."
                )
        else:
            object.__setattr__(self, "parts", _numbers("parts", self.parts, may_be_zero=True))
        if self.links is not None:
            if self.parts != "by_bandwidth":
                raise ValueError(
                    f"links={self.links!r} was given with parts={self.parts!r}, which does not ask for them. Leave"
                    " links out, or choose parts='by_bandwidth'."
                )
            object.__setattr__(self, "links", _numbers("links", self.links, may_be_zero=False))

    @property
    def lacks_links(self) -> bool:
        """Whether the links must be measured first."""
        return self.parts == "by_bandwidth" and self.links is None

    def over(self, links: Sequence[float]) -> "TwoShot":
        """Returns the exchange for measured links, in Gbit/s; those within a tenth of the fastest are alike."""
        fastest = max(links)
        rounded = [fastest if link >= (1 - _ALIKE) * fastest else link for link in links]
        return replace(self, links=[float(f"{link:.3g}") for link in rounded])

    def shares(self, groups: int) -> tuple[float, ...] | None:
        """Returns the share of each group, which add up to 1; None for equal parts.

        Args:
            groups: Number of worker groups.

        Raises:
            ValueError: If there is not one number for each group, or the links are not known.
        """
        if self.lacks_links:
            raise ValueError(
                f"exchange={self!r} does not say what the links carry, and only a Trainer measures them. Give"
                " the Gbit/s of each group, such as TwoShot('by_bandwidth', links=[1, 1, 0.5]); the doctor measures."
            )
        given = self.links if self.links is not None else self.parts
        if given == "equal" or isinstance(given, str):
            return None
        if len(given) != groups:
            raise ValueError(
                f"exchange={self!r} has {len(given)} numbers for {groups} worker groups. Give one for each."
            )
        shares = shares_by_bandwidth(given) if self.links is not None else tuple(one / fsum(given) for one in given)
        return None if len(set(shares)) == 1 else shares

    @staticmethod
    def read(text: str) -> "TwoShot | str":
        """Returns the exchange with this ``repr``, as checkpoints hold it: a name, or one like this."""
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call):
            return str(ast.literal_eval(call))
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return TwoShot(given["parts"], given["links"])


def shares_by_bandwidth(links: Sequence[float]) -> tuple[float, ...]:
    """Returns the shares with which the busiest link carries two shots in the least time.

    Over a link of ``b_g`` go ``P * (1 + (M - 2) * s_g)`` in each direction. The least time in which all of them can be
    done, with shares that add up to 1, is ``T = P * max(1 / min(b), (2 * M - 2) / sum(b))``; it allows the share ``(b_g
    * T / P - 1) / (M - 2)``. Where that is more than enough in all, all groups take the same part of what they may.

    Args:
        links: The bandwidth of each group, in any unit.

    Examples:
        >>> shares_by_bandwidth([2, 2, 1])
        (0.5, 0.5, 0.0)
    """
    groups = len(links)
    if groups <= 2 or min(links) == max(links):
        return (1 / groups,) * groups
    allowed = [(link * least_seconds(links) - 1) / (groups - 2) for link in links]
    allowed = [max(0.0, one) for one in allowed]
    return tuple(one / fsum(allowed) for one in allowed)


def least_seconds(links: Sequence[float]) -> float:
    """Returns the time in which links carry two shots at best, where a payload takes 1 over a link of 1."""
    return max(1 / min(links), (2 * len(links) - 2) / fsum(links))


def _numbers(name: str, given: Sequence[float], may_be_zero: bool) -> tuple[float, ...]:
    """Returns plain numbers, or refuses what are none."""
    are_numbers = isinstance(given, Sequence) and all(
        isinstance(one, (int, float)) and not isinstance(one, bool) and isfinite(one) for one in given
    )
    if not are_numbers or not any(given) or min(given) < 0 or (min(given) == 0 and not may_be_zero):
        rule = "numbers that are not negative, and not all 0" if may_be_zero else "positive numbers"
        raise ValueError(f"{name}={given!r} is out of range: it must be a list of {rule}, one for each worker group.")
    return tuple(given)

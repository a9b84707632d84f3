"""Compares the runs of a sweep over several seeds: differences from the first, pair by pair, with their intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from lightning_sdiloco.tools.simulate.sweeping import Outcome, Planned

# Half the width of a 95 % interval of the mean, in standard errors, by the number of values (Student's t).
_HALF_WIDTH = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def half_width(values: Sequence[float]) -> float | None:
    """Returns half the width of the 95 % interval of the mean; None for a single value.

    Args:
        values: Two to ten of them.

    Examples:
        >>> round(half_width([1.0, 2.0, 3.0]), 3)
        2.484
    """
    return _HALF_WIDTH[len(values)] * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def parsed(seeds: str | None) -> list[int]:
    """Reads seeds from the command line."""
    texts = [] if seeds is None else seeds.split(",")
    if not all(text.strip().isdecimal() for text in texts) or len(set(texts)) < len(texts):
        raise ValueError(f"seeds={seeds!r} are not different whole numbers from 0 on. Give them as 0,1,2.")
    if seeds is not None and not 2 <= len(texts) <= max(_HALF_WIDTH):
        raise ValueError(
            f"seeds={seeds!r} are {len(texts)}: a comparison takes 2 to {max(_HALF_WIDTH)}. For one, give"
            " --set seed_everything=0."
        )
    return [int(text) for text in texts]


def each_with(planned: Sequence[Planned], seeds: Sequence[int]) -> list[Planned]:
    """Returns runs, each with each of some seeds."""
    if seeds and len(planned) < 2:
        raise ValueError("--seeds compares runs, and there is one. Say with --sweep or --methods what varies.")
    return [one._replace(seed=seed) for one in planned for seed in seeds] if seeds else list(planned)


@dataclass(frozen=True)
class Compared:
    """A run that was made with several seeds, and the first of the comparison with the same ones."""

    outcomes: Sequence[Outcome]
    first: Sequence[Outcome]

    @property
    def is_first(self) -> bool:
        """Whether it is what all others are compared with."""
        return self.outcomes is self.first

    @property
    def loss(self) -> float | None:
        """The loss of the outer model, the mean over the seeds; see `Outcome.loss`."""
        losses = [loss for one in self.outcomes if (loss := one.loss) is not None]
        return mean(losses) if losses else None

    @property
    def percent(self) -> list[float]:
        """By how much the loss is higher than that of the first, in percent, by seed."""
        pairs = [(one.loss, first.loss) for one, first in zip(self.outcomes, self.first, strict=True)]
        return [100 * (own / other - 1) for own, other in pairs if own is not None and other]

    @property
    def bytes_sent(self) -> float:
        """Bytes that a group sent, the mean over the seeds."""
        return mean(one.run.groups[0].bytes_sent for one in self.outcomes)

    @property
    def seconds(self) -> float | None:
        """The predicted time, the mean over the seeds, if there is a link."""
        known = [one.prediction.seconds for one in self.outcomes if one.prediction is not None]
        return mean(known) if known else None

    def difference(self) -> str:
        """Formats the mean difference from the first in percent, with half its 95 % interval."""
        if self.is_first or not self.percent:
            return "-"
        half = half_width(self.percent)
        return f"{mean(self.percent):+.1f}" + ("" if half is None else f" ± {half:.1f}")


def compared(outcomes: Sequence[Outcome], seeds: int) -> list[Compared]:
    """Joins the runs of a sweep that differ in the seed alone."""
    each = [outcomes[start : start + seeds] for start in range(0, len(outcomes), seeds)]
    return [Compared(own, each[0]) for own in each]

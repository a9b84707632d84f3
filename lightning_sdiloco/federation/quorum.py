"""Quorums decide when a round closes. A quorum is a small policy that the run config names and the
ledger applies.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import ceil, inf
from statistics import median

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation.codec import CLASS_PATH, LONGEST_TEXT, decoded, encoded
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.federation.run_config import RETENTION, ChosenQuorum


class Quorum(ABC):
    """Decides which sites a round waits for, and whether it closes before its grace is over.

    Only the hub applies it, with its own monotonic clock. Once the grace since the first
    contribution has passed, a round with at least the `fewest` contributions closes in any case, so
    no quorum makes sites wait longer.

    A quorum is a frozen dataclass whose arguments are JSON values. Its class and arguments are part
    of the run config, from which every hub of the run makes the same quorum. Its methods may depend
    only on their arguments and its own.

    Examples:
        >>> @dataclass(frozen=True)
        ... class Core(Quorum):
        ...     core: tuple[str, ...]
        ...
        ...     def fewest(self, sites):
        ...         return len(self.core)
        ...
        ...     def awaited(self, history, sites):
        ...         return [site for site in sites if site in self.core]
        >>> Core(("paris", "oslo")).awaited([], ["lima", "oslo", "paris"])
        ['oslo', 'paris']
    """

    @abstractmethod
    def fewest(self, sites: int) -> int:
        """Returns the minimum number of contributions with which a round closes.

        Args:
            sites: The number of sites that could contribute.
        """

    @abstractmethod
    def awaited(self, history: Sequence[Record], sites: Collection[str]) -> Collection[str]:
        """Returns the sites for which a round waits.

        Args:
            history: The last records of the fragment, at most 8, oldest first, with their
                `Record.timings`.
            sites: The sites that could contribute: those that have a lease and are close enough to
                the last record.
        """

    def closes(self, arrived: Mapping[str, float], awaited: Collection[str], now: float) -> bool:
        """Returns whether a round closes before its grace is over: by default, when all awaited
        sites have answered.

        Args:
            arrived: The sites that have contributed or declined, each with the time.
            awaited: The sites that `awaited` returned.
            now: The time, in seconds.
        """
        return all(site in arrived for site in awaited)


@dataclass(frozen=True)
class All(Quorum):
    """The default: waits for all sites, and for at least ``least`` of them."""

    least: int = 1

    def fewest(self, sites: int) -> int:
        """Always returns the same number."""
        return self.least

    def awaited(self, history: Sequence[Record], sites: Collection[str]) -> Collection[str]:
        """Returns all sites."""
        return sites


@dataclass(frozen=True)
class DynamicBackup(Quorum):
    """Waits for the number of sites that makes the best use of time; the others are backup workers,
    as in arXiv 2102.06280.

    With k sites, a round takes the time T of a site's inner steps plus the time l_k from the first
    arrival to the k-th. T and l_k are medians over the last 8 rounds. The quorum is the k with the
    largest k / (T + l_k): one slow site of M is left out if it arrives later than T / (M - 1). Its
    training is carried and counts in every 8th round, which waits for all sites.

    Args:
        least: The smallest share of the sites with which a round can close, above 0 and at most 1.

    Raises:
        ValueError: If ``least`` is out of range.

    Examples:
        >>> quorum = DynamicBackup(least=0.5)
        >>> quorum.fewest(8), quorum.fewest(3)
        (4, 2)
    """

    least: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.least <= 1:
            raise ValueError(
                f"least={self.least!r} is out of range: it is a share of the sites, so it must be"
                " above 0 and at most 1. Choose a different value for least; the default is 0.5. For a"
                " number of sites, give Federation(quorum=3)."
            )

    def fewest(self, sites: int) -> int:
        """Returns the share of the sites, rounded up."""
        return max(1, ceil(self.least * sites - 1e-9))

    def awaited(self, history: Sequence[Record], sites: Collection[str]) -> Collection[str]:
        """Returns the sites that are worth waiting for."""
        names = sorted(sites)
        length = _round_length(history)
        # Every 8th round waits for all sites. Otherwise, a site that is always a little late would
        # never count.
        if len(history) < RETENTION or length is None or (history[-1].round + 1) % RETENTION == 0:
            return names
        late = _lateness(history, names)
        order = sorted(names, key=lambda site: (late[site], site))
        counts = range(self.fewest(len(names)), len(names) + 1)
        count = max(
            counts, key=lambda count: (count / (length + late[order[count - 1]]), count), default=0
        )
        return sorted(order[:count])


def _round_length(history: Sequence[Record]) -> float | None:
    """Returns the median time that a site trains for a contribution, in seconds; None if
    unknown.
    """
    steps = dict[tuple[int, str], int]()
    for record in history:
        for contribution in record.counted:
            steps[record.round, contribution.site] = contribution.steps
    lengths = []
    for record in history:
        for timing in record.timings:
            if timing.step is not None and (timing.round, timing.site) in steps:
                lengths.append(timing.step * steps[timing.round, timing.site])
    return median(lengths) if lengths else None


def _lateness(history: Sequence[Record], sites: Collection[str]) -> dict[str, float]:
    """Returns each site's median lateness, which is infinite if it mostly does not contribute."""
    late_by_round: dict[str, dict[int, float]] = {site: {} for site in sites}
    for record in history:
        for timing in record.timings:
            if timing.site in late_by_round:
                late_by_round[timing.site][timing.round] = timing.late
    lateness = {}
    last = history[-1].round
    for site, late in late_by_round.items():
        # A site that has just joined is considered punctual; the grace limits the cost of this.
        first = max(min(late, default=last + 1), last + 1 - RETENTION)
        lateness[site] = median([late.get(round, inf) for round in range(first, last + 1)] or [0.0])
    return lateness


# In the run config

_BUILT_IN: Mapping[str, type[Quorum]] = {"lightning_sdiloco.DynamicBackup": DynamicBackup}


def chosen(quorum: Quorum) -> ChosenQuorum:
    kind = type(quorum)
    path = f"{kind.__module__}.{kind.__qualname__}"
    for public_path, built_in_kind in _BUILT_IN.items():
        if built_in_kind is kind:
            path = public_path
    if not isinstance(quorum, Quorum) or not is_dataclass(quorum):
        raise ValueError(
            f"quorum={quorum!r} is neither a number of sites nor a Quorum. Give one, such as 3 or"
            " DynamicBackup(), or your own frozen dataclass that extends Quorum."
        )
    if not CLASS_PATH.fullmatch(path) or path.startswith("__main__."):
        raise ValueError(
            f"quorum={quorum!r} is of a class that the hub cannot import: {path}. Define it at the"
            " top level of its own module."
        )
    names = [argument.name for argument in fields(quorum) if argument.init]
    arguments = {name: getattr(quorum, name) for name in names}
    try:
        return ChosenQuorum(path, decoded(encoded(arguments), LONGEST_TEXT))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"quorum={quorum!r} has arguments that do not fit into the run config: {error}. They"
            " must be numbers, texts, lists and mappings, finite and short."
        ) from None


def imported(path: str) -> type[Quorum]:
    """Imports a quorum. Call this only for class paths from this machine's own user."""
    module, _, name = path.rpartition(".")
    try:
        if not CLASS_PATH.fullmatch(path):
            raise ImportError("it is not a dotted class name")
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"quorum={path!r} cannot be imported: {error}. Give module.Class, of a module that is"
            " installed here or in a folder of PYTHONPATH."
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, Quorum)):
        raise ValueError(
            f"quorum={path!r} is not a Quorum: it must extend lightning_sdiloco.Quorum."
        )
    return kind


def built_in(path: str, named: str | None = None) -> type[Quorum]:
    """Returns the class of a quorum, which is one of this package or the one that the hub's
    operator has named.
    """
    if path == named:
        return imported(path)
    if path not in _BUILT_IN:
        raise Malformed(
            f"it is not one of this package: {', '.join(_BUILT_IN)}. The hub's operator must allow"
            f" it: sdiloco hub --quorum {path}"
        )
    return _BUILT_IN[path]


def quorum_of(
    terms_quorum: int | ChosenQuorum, find: Callable[[str], type[Quorum]] = built_in
) -> Quorum:
    if isinstance(terms_quorum, int):
        return All(terms_quorum)
    try:
        quorum = find(terms_quorum.class_path)(**terms_quorum.init_args)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the quorum of this run, {terms_quorum}, is not available here: {error}"
        ) from None
    if not isinstance(quorum, Quorum):
        raise ValueError(f"the quorum of this run, {terms_quorum}, is not a Quorum")
    return quorum

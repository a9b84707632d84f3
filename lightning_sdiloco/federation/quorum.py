"""Quorums, which are policies that decide when a round closes. The run config names a quorum, and
the ledger applies it.
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
    """A policy that decides which sites a round waits for and whether the round closes before its
    grace period ends.

    Only the hub applies a quorum, using its own monotonic clock. When the grace period after the
    first contribution ends, a round with at least `fewest` contributions always closes, so no
    quorum can make sites wait longer.

    A quorum is a frozen dataclass whose arguments are JSON values. The run config contains the
    class and these arguments, so every hub of the run creates the same quorum. Methods may depend
    only on their arguments and on the fields of the quorum.

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
        """Returns the minimum number of contributions needed for a round to close.

        Args:
            sites: The number of sites that can contribute.
        """

    @abstractmethod
    def awaited(self, history: Sequence[Record], sites: Collection[str]) -> Collection[str]:
        """Returns the sites for which a round waits.

        Args:
            history: Up to 8 of the fragment's most recent records, oldest first, with their
                `Record.timings`.
            sites: The sites that can contribute because they have a lease and are close enough to
                the last record.
        """

    def closes(self, arrived: Mapping[str, float], awaited: Collection[str], now: float) -> bool:
        """Returns whether a round closes before its grace period ends. By default, a round closes
        when all awaited sites have answered.

        Args:
            arrived: The time at which each site contributed or declined.
            awaited: The sites returned by `awaited`.
            now: The time, in seconds.
        """
        return all(site in arrived for site in awaited)


@dataclass(frozen=True)
class All(Quorum):
    """The default quorum, which waits for all sites and needs at least ``least`` contributions."""

    least: int = 1

    def fewest(self, sites: int) -> int:
        """Returns ``least``, regardless of the number of sites."""
        return self.least

    def awaited(self, history: Sequence[Record], sites: Collection[str]) -> Collection[str]:
        """Returns all sites."""
        return sites


@dataclass(frozen=True)
class DynamicBackup(Quorum):
    """A quorum that waits for the number of sites that maximizes throughput. The remaining sites
    are backup workers, as in arXiv 2102.06280.

    With k sites, a round takes the time T of a site's inner steps plus the time l_k from the first
    to the k-th arrival. T and l_k are medians over the last 8 rounds. The quorum is the k with the
    largest k / (T + l_k). A single slow site among M sites is left out if it arrives more than T /
    (M - 1) after the other sites. The training of such a site is carried until the next 8th round,
    which waits for all sites.

    Args:
        least: The minimum share of sites needed to close a round, above 0 and at most 1.

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
                f"least={self.least!r} is out of range: a share of the sites must be above 0 and at"
                " most 1. Choose a different value for least (the default is 0.5). For a fixed"
                " number of sites, pass that number, for example Federation(quorum=3)."
            )

    def fewest(self, sites: int) -> int:
        """Returns ``least`` times the number of sites, rounded up."""
        return max(1, ceil(self.least * sites - 1e-9))

    def awaited(self, history: Sequence[Record], sites: Collection[str]) -> Collection[str]:
        """Returns the sites to wait for in order to maximize throughput."""
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
    """Returns the median training time per contribution in seconds, or None if it is unknown."""
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
    """Returns the median lateness of each site. The lateness of a site that misses most rounds is
    infinite.
    """
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
            f"quorum={quorum!r} is neither a number of sites nor a Quorum. Set quorum to a number"
            " such as 3, to DynamicBackup(), or to a frozen dataclass that extends Quorum."
        )
    if not CLASS_PATH.fullmatch(path) or path.startswith("__main__."):
        raise ValueError(
            f"quorum={quorum!r} has a class that the hub cannot import: {path}. Define the class at"
            " the top level of an importable module."
        )
    names = [argument.name for argument in fields(quorum) if argument.init]
    arguments = {name: getattr(quorum, name) for name in names}
    try:
        return ChosenQuorum(path, decoded(encoded(arguments), LONGEST_TEXT))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"quorum={quorum!r} has arguments that the run config cannot store: {error}. Arguments"
            " must be short and consist of finite numbers, strings, lists and mappings."
        ) from None


def imported(path: str) -> type[Quorum]:
    """Imports a quorum class. Use this function only for class paths from the local user."""
    module, _, name = path.rpartition(".")
    try:
        if not CLASS_PATH.fullmatch(path):
            raise ImportError("it is not a dotted class name")
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"quorum={path!r} cannot be imported: {error}. Use the form module.Class, where the"
            " module is installed or in a folder on PYTHONPATH."
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, Quorum)):
        raise ValueError(
            f"quorum={path!r} is not a Quorum: its class must extend lightning_sdiloco.Quorum."
        )
    return kind


def built_in(path: str, named: str | None = None) -> type[Quorum]:
    """Returns a quorum class from this package, or the class that the hub's operator has
    allowed.
    """
    if path == named:
        return imported(path)
    if path not in _BUILT_IN:
        raise Malformed(
            f"it is not part of this package ({', '.join(_BUILT_IN)}). The hub's operator must"
            f" allow it: sdiloco hub --quorum {path}"
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

"""Reads the records that the ranks of a run left, and puts them on the clock of rank 0."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_sdiloco.engine import Span

_NAME = "rank_{:05d}.jsonl"


def record_path(folder: Path, rank: int) -> Path:
    """Returns the file of a rank."""
    return folder / _NAME.format(rank)


@dataclass(frozen=True)
class Step:
    """An inner step."""

    step: int
    span: Span
    done: float


@dataclass(frozen=True)
class LandingRecord:
    """A landing as it was written down; `lightning_sdiloco.Landing` describes most of the fields."""

    fragment: int
    launched_at: int
    landed_at: int
    final: bool
    bytes_sent: int
    bytes_received: int
    outer_grad_norm: float
    group_norms: list[float]
    counted: list[int]
    left_out: list[int]
    outlying: list[int]
    exchange: str
    link_gbit_s: float | None
    spans: dict[str, Span]
    diagnostics: dict[str, Any] | None
    sites: list[str] = field(default_factory=list)

    def seconds(self, name: str) -> float:
        """Returns the length of a span in seconds; 0 if there is none of that name."""
        began, ended = self.spans.get(name, (0.0, 0.0))
        return ended - began


@dataclass(frozen=True)
class Validation:
    """A validation inside the fit."""

    step: int
    span: Span
    metrics: dict[str, float]


@dataclass
class Rank:
    """What one rank did; times are on the clock of rank 0, in seconds since 1970."""

    rank: int
    about: dict[str, Any]
    fragments: list[list[str]] = field(default_factory=list)
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    landings: list[LandingRecord] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    starts: list[tuple[float, int]] = field(default_factory=list)
    uncertainty: float = 0.0

    @property
    def group(self) -> int:
        """Returns its worker group."""
        return int(self.about["group"])

    @property
    def name(self) -> str:
        """Returns the name of its worker group: in a federation that of the site."""
        site = self.about.get("site")
        return f"group {self.group}" if site is None else str(site)


@dataclass(frozen=True)
class Run:
    """The records of all ranks of a run, in the order of their ranks."""

    ranks: list[Rank]

    @property
    def heads(self) -> list[Rank]:
        """Returns the first rank of every group, as far as it left a record."""
        return [rank for rank in self.ranks if rank.about["shard"] == 0]

    @property
    def began(self) -> float:
        """Returns when the first inner step began."""
        return min(rank.steps[0].span[0] for rank in self.ranks if rank.steps)


def exchange_of(spans: Mapping[str, Any]) -> str:
    """Returns the exchange of a flight with these spans: only two shots have a second hop.

    >>> exchange_of({"transfer": (0.0, 1.0)}), exchange_of({"transfer": (0.0, 1.0), "relay": (1.1, 2.0)})
    ('gather', 'two_shot')
    """
    return "two_shot" if "relay" in spans else "gather"


def read_run(folder: str | Path) -> Run:
    """Reads the records in a folder, or in its subfolder ``sdiloco``."""
    for place in (Path(folder), Path(folder) / "sdiloco"):
        paths = sorted(place.glob("rank_*.jsonl"))
        if paths:
            ranks = [rank for rank in map(_read, paths) if rank is not None]
            if ranks:
                return Run(ranks)
            raise ValueError(f"The records in {place} hold no inner step: the run ended before its first.")
    raise ValueError(
        f"{folder} holds no records (rank_00000.jsonl and so on). Give the folder in which a StreamingDiLoCoMonitor"
        " wrote them: add one to the trainer's callbacks; by default it writes into sdiloco in the folder of the"
        " logger."
    )


def _read(path: Path) -> Rank | None:
    rank: Rank | None = None
    for part in _parts(path):
        rank = rank or Rank(part[0]["rank"], part[0])
        _take(rank, part, _Correction(part))
    return rank if rank is not None and rank.steps else None


def _parts(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields the lines of a record, one part for each time that the run was started or resumed."""
    part: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a process that was killed
        if told["kind"] == "start":
            if part:
                yield part
            part = []
        part.append(told)
    if part and part[0]["kind"] == "start":
        yield part


class _Correction:
    """Takes out the offset of a clock: a straight line between what was measured at the start and at the end."""

    def __init__(self, part: list[dict[str, Any]]) -> None:
        measured = [told for told in part if told["kind"] in ("start", "end")]
        self._began, self._ended = measured[0]["time"], measured[-1]["time"]
        self._first, self._last = (told["offset"]["seconds"] for told in (measured[0], measured[-1]))
        self.uncertainty = max(told["offset"]["uncertainty"] for told in measured)

    def __call__(self, moment: float) -> float:
        share = (moment - self._began) / (self._ended - self._began) if self._ended > self._began else 0.0
        return float(moment - self._first - share * (self._last - self._first))

    def span(self, span: list[float]) -> Span:
        return self(span[0]), self(span[1])


def _take(rank: Rank, part: list[dict[str, Any]], correction: _Correction) -> None:
    rank.uncertainty = max(rank.uncertainty, correction.uncertainty)
    for told in part:
        kind = told.pop("kind")
        if kind == "start":
            rank.starts.append((correction(told["time"]), told["step"]))
        elif kind == "step":
            rank.steps.append(Step(told["step"], correction.span(told["span"]), correction(told["done"])))
        elif kind == "landing":
            spans = {name: correction.span(span) for name, span in told["spans"].items()}
            # Records of older versions do not say which exchange ran, or which sites counted.
            told = {"exchange": exchange_of(spans), "link_gbit_s": 0.0, "sites": [], **told, "spans": spans}
            rank.landings.append(LandingRecord(**{name: told[name] for name in LandingRecord.__dataclass_fields__}))
        elif kind == "validation":
            rank.validations.append(Validation(told["step"], correction.span(told["span"]), told["metrics"]))
        elif kind == "loss":
            rank.losses.append((told["step"], told["loss"]))
        elif kind == "fragments":
            rank.fragments, rank.parameters = told["fragments"], told["parameters"]

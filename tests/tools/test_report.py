"""The report of a run: its numbers on records written by hand, its verdicts, and the page of a
real run.
"""

import base64
import json
import re
import shutil
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import lightning_sdiloco
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.partition import Parameter
from lightning_sdiloco.planning import planner
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools import report as series
from lightning_sdiloco.tools.output import drawn
from lightning_sdiloco.tools.report import THEMES, draw_sites, judge, pictures_of
from lightning_sdiloco.tools.run_files import Rank, Run, changes, read_run, records_in, trace
from tests.fits import fit
from tests.ranks import run_processes
from tests.tools.command import refused, told

EVERY = 10
OVERLAP = 2
STEP = 0.1
PARAMETERS = {"layers.0.weight": [1_000_000, 4_000_000], "layers.1.weight": [1_000_000, 4_000_000]}
MODEL = Model(
    tuple(Parameter(name, nbytes) for name, (_, nbytes) in PARAMETERS.items()),
    tuple(numel for numel, _ in PARAMETERS.values()),
)
NBYTES = 516_000  # of a message of a fragment in fp4, about
CUT: dict[str, Any] = {"fragments": "strided:1"}
Line = dict[str, Any]
Lines = list[Line]


class Flight(NamedTuple):
    launched_at: int  # inner steps
    launches: list[float]  # times, by group
    arrived: float
    ended: float


@dataclass(frozen=True)
class Recording:
    """The records of 30 inner steps, with launches of two fragments every five steps from the tenth
    on, in groups of one rank.
    """

    seconds: tuple[float, ...] = (STEP, STEP)  # of an inner step of each group
    link: float = 0.5  # seconds from the last launch to all messages
    hop: float | None = None  # seconds of a second hop, where there is one
    work: float = 0.001  # seconds of each part of the background
    nbytes: int = NBYTES
    compression: str = "fp4"
    rate: float | None = 1.0

    def lines(self) -> list[Lines]:
        """The lines of each rank."""
        ranks = [self._head(group) for group in range(len(self.seconds))]
        clocks = [0.0] * len(self.seconds)
        flights: dict[int, Flight] = {}
        for step in range(1, 31):
            flight = flights.pop(step - OVERLAP, None)
            for group, lines in enumerate(ranks):
                began = clocks[group]
                ended = began + self.seconds[group]
                done = ended if flight is None else max(ended, flight.ended)
                clocks[group] = done
                lines.append({"kind": "step", "step": step, "span": (began, ended), "done": done})
                if flight is not None:
                    spans = self._spans(flight, group)
                    spans |= {"wait": (ended, done), "land": (done, done)}
                    lines.append({**self._landing(flight, step), "spans": spans})
                lines.append({"kind": "loss", "step": step, "loss": 10 / step})
            if EVERY <= step <= 25 and step % 5 == 0:
                arrived = max(clocks) + self.work + self.link
                ended = arrived + 2 * self.work + (self.hop or 0.0)
                flights[step] = Flight(step, list(clocks), arrived, ended)
        return ranks

    def _head(self, group: int) -> Lines:
        groups = len(self.seconds)
        start = {
            "kind": "start",
            "format": 1,
            "host": "here",
            "time": 0.0,
            "step": 0,
            "rank": group,
            "group": group,
            "groups": groups,
            "shard": 0,
            "shards": 1,
            "world_size": groups,
            "settings": {
                "sync_every": EVERY,
                "overlap_steps": OVERLAP,
                "mixing": 0.5,
                "compression": self.compression,
                **CUT,
            },
        }
        fragments = [[name] for name in PARAMETERS]
        return [start, {"kind": "fragments", "fragments": fragments, "parameters": PARAMETERS}]

    def _landing(self, flight: Flight, step: int) -> Line:
        groups = len(self.seconds)
        return {
            "kind": "landing",
            "final": False,
            "fragment": flight.launched_at // 5 % 2,
            "launched_at": flight.launched_at,
            "landed_at": step,
            "exchange": "gather" if self.hop is None else "two_shot",
            "bytes_sent": self.nbytes,
            "bytes_received": self.nbytes,
            "link_gbit_s": self.rate,
            "counted": list(range(groups)),
            "left_out": [],
            "outlying": [],
            "outer_grad_norm": 3.0,
            "group_norms": [3.0, 5.0, *[4.0] * (groups - 2)],
            "diagnostics": {"cosines": [0.8, 0.6, *[0.7] * (groups - 2)]},
        }

    def _spans(self, flight: Flight, group: int) -> dict[str, tuple[float, float]]:
        launch = flight.launches[group]
        encoded = launch + self.work
        decoded = flight.arrived + self.work
        averaged = flight.ended - self.work
        spans = {
            "launch": (launch, launch),
            "flight": (launch, flight.ended),
            "encode": (launch, encoded),
            "transfer": (encoded, flight.arrived),
            "decode": (flight.arrived, decoded),
            "outer_step": (averaged, flight.ended),
        }
        if self.hop is not None:
            spans["relay"] = (decoded, averaged)
        return spans


def written(folder: Path, ranks: list[Lines]) -> Run:
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(ranks):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank_{rank:05d}.jsonl").write_text(text)
    return read_run(folder)


def recorded(folder: Path, **choices: Any) -> Run:
    return written(folder, Recording(**choices).lines())


def landings(lines: Lines) -> Lines:
    return [line for line in lines if line["kind"] == "landing"]


def test_the_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    # Each of four flights takes 0.503 s, two inner steps of which are hidden.
    wait = 0.303
    utilisation_with_wait = 1 / (1 + 2 * wait)
    for rank in run.ranks:
        assert series.utilisation(rank) == pytest.approx(3.0 / (3.0 + 4 * wait))
        curve = series.utilisation_over_time(rank, run.began)
        shares = [share for _, share in curve]
        assert shares == pytest.approx([1.0, utilisation_with_wait, utilisation_with_wait])
        last_time, _ = curve[-1]
        assert last_time == pytest.approx(3.0 + 4 * wait)
        assert series.step_seconds(rank) == pytest.approx(STEP)


def test_bytes_and_agreement_are_those_of_the_records(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    # The rates over time add up to all bytes. A ring of two sends all gradients once at every
    # step.
    curve = series.gbit_s_over_time(run.ranks[:1], run.began)
    width = curve[1][0] - curve[0][0]
    gbit = sum(rate for _, rate in curve) * width
    assert gbit * 1e9 / 8 == pytest.approx(4 * NBYTES)
    assert series.bytes_sent(run) == {0: 4 * NBYTES, 1: 4 * NBYTES}
    assert series.ddp_bytes_per_step(run) == 8_000_000
    # Agreement is shown by whole rounds.
    assert series.cosines_of(run) == {0: [(17, 0.8), (27, 0.8)], 1: [(17, 0.6), (27, 0.6)]}
    norms = series.norms_of(run)
    for group, square in ((1, 50), (None, 18)):
        norm = pytest.approx(square**0.5)
        assert norms[group] == [(17, norm), (27, norm)]


LINK = {"link": 0.3}
SLOW_GROUP = {"seconds": (STEP, 2 * STEP), "link": 0.05}
SECOND_HOP = {"seconds": (STEP,) * 3, "link": 0.99, "hop": 1.5}


@pytest.mark.parametrize(
    ("choices", "limit", "words", "conclusion"),
    [
        (
            {"link": 0.1},
            "nothing",
            "100.0% of the time computing. No setting would improve this much",
            "good",
        ),
        (
            LINK,
            "link",
            "The link limited this run.",
            "the link is too slow: set overlap_steps=4",
        ),
        (
            {**LINK, "rate": None},
            "link",
            "The link limited this run.",
            "the link is too slow, and the planner cannot recommend a change",
        ),
        (
            SLOW_GROUP,
            "groups",
            "An inner step took 200 ms in group 1 and 100 ms in group 0",
            "one group is too slow and needs smaller batches or faster devices",
        ),
        (
            {"link": 0.01, "work": 0.2},
            "background",
            "in the background, limited this run",
            "the background is too slow",
        ),
        (
            {"link": 0.01, "hop": 0.01, "work": 0.2},
            "background",
            "in the background, limited this run",
            "the background is too slow",
        ),
        (
            SECOND_HOP,
            "link",
            "Of the waiting time, 100% was for the link",
            "the link is too slow: set",
        ),
    ],
)
def test_a_run_is_told_its_limit_and_gets_a_verdict_in_a_few_words(
    choices: dict[str, Any], limit: str, words: str, conclusion: str, tmp_path: Path
) -> None:
    verdict = judge(recorded(tmp_path, **choices))
    assert verdict.limit == limit
    assert words in verdict.sentences[0]
    assert verdict.conclusion.startswith(conclusion)


def test_a_run_that_nothing_limits_gets_no_advice_and_shows_left_out_groups(
    tmp_path: Path,
) -> None:
    ranks = Recording(link=0.1).lines()
    landings(ranks[0])[0]["left_out"] = [1]
    verdict = judge(written(tmp_path, ranks))
    assert verdict.limit == "nothing"
    assert (
        "100.0% of the time computing. No setting would improve this much" in verdict.sentences[0]
    )
    assert verdict.advice is None
    assert verdict.utilisation == 1
    words = (
        "Of all outer gradients, 1 were excluded from a mean because they were not finite, and 0"
    )
    assert any(sentence.startswith(words) for sentence in verdict.sentences)


def test_no_advice_rests_on_a_link_of_unknown_speed(tmp_path: Path) -> None:
    verdict = judge(recorded(tmp_path, **LINK, rate=None))
    assert verdict.limit == "link"
    assert "The link limited this run." in verdict.sentences[0]
    assert verdict.link is None
    assert verdict.advice is None
    text = " ".join(verdict.sentences)
    assert "bit/s" not in text
    assert "The speed of the link is unknown" in text


def test_more_overlap_is_advised_where_the_link_limits_a_run(tmp_path: Path) -> None:
    verdict = judge(recorded(tmp_path, **LINK))
    assert verdict.link.gbit_s == pytest.approx(8 * NBYTES / 0.3 / 1e9)
    # One step more hides 0.3 s, but not the time at 80 % of the bandwidth; two steps more do.
    assert verdict.advice.changes == {"overlap_steps": 4}
    assert verdict.advice.now < 0.85 < planner.TARGET <= verdict.advice.then
    words = "Set overlap_steps=4. With this change, the planner expects a compute utilisation of"
    assert verdict.sentences[1].startswith(words)


def test_waits_for_a_slow_group_are_not_the_links(tmp_path: Path) -> None:
    verdict = judge(recorded(tmp_path, **SLOW_GROUP))
    causes = verdict.causes
    assert verdict.advice is None
    assert causes.groups > 10 * max(causes.link, causes.background)
    assert "up to 2.00 times as fast" in verdict.sentences[1]
    assert verdict.link.gbit_s == pytest.approx(8 * NBYTES / 0.05 / 1e9)


def test_the_second_hop_is_time_on_the_link(tmp_path: Path) -> None:
    run = recorded(tmp_path, **SECOND_HOP)
    verdict = judge(run)
    assert verdict.causes.link > 100 * verdict.causes.background
    assert verdict.link.gbit_s == pytest.approx(8 * NBYTES / (0.99 + 1.5) / 1e9)
    hops = [event for event in trace(run)["traceEvents"] if event["name"] == "second_hop"]
    assert [event["dur"] for event in hops] == pytest.approx([1.5e6] * 12, abs=1)
    transfer, second_hop = series.on_the_link(run.ranks[0].landings[0])
    assert second_hop[0] - transfer[1] == pytest.approx(0.001)
    assert second_hop[1] - second_hop[0] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("exchange", "compression", "gbit_s", "advised"),
    [
        ("two_shot", "sparse", 0.001, None),
        ("two_shot", "fp4", 0.02, None),
        ("gather", "fp4", 0.05, {"exchange": "auto"}),
    ],
)
def test_the_advice_counts_on_the_exchange_that_ran(
    exchange: str,
    compression: str,
    gbit_s: float,
    advised: dict[str, str] | None,
    tmp_path: Path,
) -> None:
    """Eight groups whose run takes as long on a link as the planner says."""
    settings = Settings(
        sync_every=EVERY,
        overlap_steps=OVERLAP,
        compression=compression,
        exchange=exchange,
        **CUT,
    )
    link = Link(gbit_s)
    method = Streaming(MODEL, settings, Groups(STEP, groups=8, memory_rate=1e15))
    cost = method.costs(0, link)
    run = recorded(
        tmp_path,
        seconds=(STEP,) * 8,
        nbytes=int(method.bytes_per_step * EVERY / 2),
        compression=compression,
        link=cost.warm,
        hop=cost.second_hop or None,
        work=1e-6,
    )
    verdict = judge(run)
    assert verdict.limit == "link"
    assert verdict.link.gbit_s == pytest.approx(gbit_s, rel=1e-3)
    expected = method.utilisation(planner.with_margin(link))
    assert verdict.advice.now == pytest.approx(expected, rel=0.01)
    if advised is not None:
        assert verdict.advice.changes == advised
        assert verdict.sentences[1].startswith(
            "Set exchange='auto'. With this change, the planner expects"
        )


def sentence_of_losses(rank: Rank, lost: int) -> str:
    steps = len(rank.steps)
    mean = lost / len(rank.fragments)
    share = mean / steps
    return f" Because launches were late, {mean:.1f} of this site's {steps} inner steps were lost ({share:.1%})."


def test_a_site_reports_the_counted_sites_and_its_start(tmp_path: Path) -> None:
    lines, _ = Recording(link=0.01).lines()
    start = lines[0]
    start |= {"site": "a", "groups": 1, "world_size": 1}
    counted_sites = (["a", "b"], ["a", "b"], ["a"], ["a"])
    for landing, sites in zip(landings(lines), counted_sites, strict=True):
        landing["sites"] = sites
    landings(lines)[1]["lost_steps"] = 5
    # It was killed after its last step, and started again.
    lines.append({**start, "time": 5.0, "step": 20})
    run = written(tmp_path, [lines])

    sentence = judge(run).sentences[0]
    site = "This is a, one site of a federation, which does not wait for other sites."
    assert f"{site} It was restarted once." in sentence
    assert sentence.endswith(
        "In the 4 rounds of fragments that landed here, the following sites counted: a in 4, b in 2."
        + sentence_of_losses(run.ranks[0], 5)
    )
    events = [text for _, text in changes(run.ranks[0])]
    assert events == [
        "a starts",
        "a starts after inner step 20",
        "a counts",
        "b counts",
        "b no longer counts",
    ]
    instants = {event["name"] for event in trace(run)["traceEvents"] if event["ph"] == "i"}
    assert instants == set(events)
    assert {"sites", "agreement"} & set(pictures_of(run)) == {"sites"}
    pytest.importorskip("matplotlib")
    theme = THEMES["dark"]
    assert b"<svg" in drawn(partial(draw_sites, run, theme), "svg", theme)


def fit_with_records(rank: int, world_size: int, folder: str) -> None:
    callbacks = [lightning_sdiloco.StreamingDiLoCoMonitor(folder=folder)]
    choices = {"sync_every": 4, "overlap_steps": 1, **CUT}
    trainer_choices = {"callbacks": callbacks, "log_every_n_steps": 1}
    fit(rank, world_size, 2, 25, choices, trainer_choices=trainer_choices)


PICTURES = {
    "losses.png",
    "losses-dark.png",
    "utilisation.png",
    "utilisation-dark.png",
    "bandwidth.png",
    "bandwidth-dark.png",
    "flights.png",
    "flights-dark.png",
    "agreement.png",
    "agreement-dark.png",
}


def test_the_report_of_a_real_run_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "contains no records" in refused("report", str(tmp_path))
    records = tmp_path / "sdiloco"
    run_processes(fit_with_records, 4, str(records))
    # The highest number is the newest: version_9 is older than version_10.
    logs = tmp_path / "root" / "lightning_logs"
    shutil.copytree(records, logs / "version_9" / "sdiloco")
    shutil.copytree(records, logs / "version_10" / "sdiloco")
    folder = logs / "version_10" / "report"
    assert records_in(logs) == logs / "version_10" / "sdiloco"

    text = told("report", str(tmp_path / "root"))
    page = (folder / "report.html").read_text()
    assert text.strip().endswith(str(folder / "report.html"))
    assert "Training spent" in text
    assert "Training spent" in page
    *_, verdict, _, _ = text.strip().splitlines()
    assert verdict.startswith("Verdict: ")
    assert f"<h2>{escape(verdict.removesuffix('.'))}</h2>" in page
    loaded_from_elsewhere = re.findall(r'(?:src|href|srcset)="(?!data:)', page)
    assert not loaded_from_elsewhere
    pictures = re.findall(r'data:image/svg\+xml;base64,([^"]+)', page)
    assert len(pictures) == 10, "five, for light and for dark"
    for picture in pictures:
        assert base64.b64decode(picture).startswith(b"<?xml")
    assert page.count("prefers-color-scheme: dark") == 6

    pngs = [path for path in folder.iterdir() if path.read_bytes().startswith(b"\x89PNG")]
    assert {path.name for path in pngs} == PICTURES
    assert {path.name for path in folder.iterdir()} == {"report.html", "timeline.json", *PICTURES}
    timeline = json.loads((folder / "timeline.json").read_text())
    assert {event["pid"] for event in timeline["traceEvents"]} == {0, 1, 2, 3}

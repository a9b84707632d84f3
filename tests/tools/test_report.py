"""The report of a run: its numbers on records written by hand, its verdicts, and the page of a
real run.
"""

import base64
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
from lightning_sdiloco.tools.run_files import Run, changes, read_run, records_in, trace
from tests.fits import fit
from tests.ranks import run_processes
from tests.tools.command import refused, told

EVERY = 10
OVERLAP = 2
STEP = 0.1
PARAMETERS = {f"layers.{layer}.weight": [1_000_000, 4_000_000] for layer in range(2)}
NBYTES = 516_000  # of a message of a fragment in fp4, about
THREE = (STEP, STEP, STEP)
CUT: dict[str, Any] = {"fragments": "strided:1"}
LANDING = {
    "kind": "landing",
    "final": False,
    "outer_grad_norm": 3.0,
    "left_out": [],
    "outlying": [],
}
Lines = list[dict[str, Any]]


def played(
    folder: Path,
    seconds: tuple[float, ...] = (STEP, STEP),
    link: float = 0.5,
    hop: float | None = None,
    work: float = 0.001,
    nbytes: int = NBYTES,
    compression: str = "fp4",
    rate: float | None = 1.0,
    change: Callable[[list[Lines]], None] = lambda ranks: None,
) -> Run:
    """Writes and reads records of 30 inner steps, with launches of two fragments every five steps
    from the tenth on.

    From the last launch to all messages it takes ``link`` seconds, then ``hop`` where there is a
    second one, and each part of the background ``work``. ``change`` may change the lines of all
    ranks before they are written.
    """
    groups = len(seconds)
    ranks = list[Lines]()
    settings = {
        "sync_every": EVERY,
        "overlap_steps": OVERLAP,
        "mixing": 0.5,
        "compression": compression,
        **CUT,
    }
    for group in range(groups):
        about = {
            "rank": group,
            "group": group,
            "groups": groups,
            "shard": 0,
            "shards": 1,
            "world_size": groups,
        }
        start = {
            "kind": "start",
            "format": 1,
            "host": "here",
            "settings": settings,
            "time": 0.0,
            "step": 0,
        }
        fragments = {
            "kind": "fragments",
            "fragments": [[name] for name in PARAMETERS],
            "parameters": PARAMETERS,
        }
        ranks.append([{**about, **start}, fragments])
    landed = {**LANDING, "bytes_sent": nbytes, "bytes_received": nbytes, "link_gbit_s": rate}
    landed |= {"counted": list(range(groups)), "group_norms": [3.0, 5.0, *[4.0] * (groups - 2)]}
    landed |= {"diagnostics": {"cosines": [0.8, 0.6, *[0.7] * (groups - 2)]}}
    landed |= {"exchange": "gather" if hop is None else "two_shot"}
    clocks = [0.0] * groups
    flights = dict[int, tuple[list[float], float, float]]()
    for step in range(1, 31):
        began = clocks
        clocks = [clock + own for clock, own in zip(clocks, seconds, strict=True)]
        ended = clocks
        since = step - OVERLAP
        launches, arrive, there = flights.pop(since, (clocks, 0.0, 0.0))
        clocks = [max(clock, there) for clock in clocks]
        for group, lines in enumerate(ranks):
            launch = launches[group]
            done = clocks[group]
            lines.append(
                {"kind": "step", "step": step, "span": (began[group], ended[group]), "done": done}
            )
            if there:
                spans = {
                    "launch": (launch, launch),
                    "flight": (launch, there),
                    "encode": (launch, launch + work),
                }
                spans |= {"transfer": (launch + work, arrive), "decode": (arrive, arrive + work)}
                spans |= {} if hop is None else {"relay": (arrive + work, there - work)}
                spans |= {
                    "outer_step": (there - work, there),
                    "wait": (ended[group], done),
                    "land": (done, done),
                }
                when = {"fragment": since // 5 % 2, "launched_at": since, "landed_at": step}
                lines.append({**landed, **when, "spans": spans})
            lines.append({"kind": "loss", "step": step, "loss": 10 / step})
        if EVERY <= step <= 25 and step % 5 == 0:
            arrive = max(clocks) + work + link
            flights[step] = clocks, arrive, arrive + 2 * work + (hop or 0.0)
    change(ranks)
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(ranks):
        (folder / f"rank_{rank:05d}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    return read_run(folder)


def test_the_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    run = played(tmp_path / "half")
    # Each of four flights takes 0.503 s, two inner steps of which are hidden.
    waited = 4 * 0.303
    for rank in run.ranks:
        assert series.utilisation(rank) == pytest.approx(3.0 / (3.0 + waited))
        curve = series.utilisation_over_time(rank, run.began)
        assert [share for _, share in curve] == pytest.approx(
            [1.0, 1 / (1 + 2 * 0.303), 1 / (1 + 2 * 0.303)]
        )
        assert curve[-1][0] == pytest.approx(3.0 + waited)
        assert series.step_seconds(rank) == pytest.approx(STEP)
    # What was sent over time adds up to all bytes. A ring of two sends all gradients once at every
    # step.
    curve = series.gbit_s_over_time(run.ranks[:1], run.began)
    width = curve[1][0] - curve[0][0]
    assert sum(rate for _, rate in curve) * width * 1e9 / 8 == pytest.approx(4 * NBYTES)
    assert series.bytes_sent(run) == {0: 4 * NBYTES, 1: 4 * NBYTES}
    assert series.ddp_bytes_per_step(run) == 8_000_000
    # Agreement is shown by whole rounds.
    assert series.cosines_of(run) == {0: [(17, 0.8), (27, 0.8)], 1: [(17, 0.6), (27, 0.6)]}
    norms = series.norms_of(run)
    for of, square in ((1, 50), (None, 18)):
        assert norms[of] == [(17, pytest.approx(square**0.5)), (27, pytest.approx(square**0.5))]


def test_the_limiting_factor_of_a_run_is_named(tmp_path: Path) -> None:
    def left_out(ranks: list[Lines]) -> None:
        next(line for line in ranks[0] if line["kind"] == "landing")["left_out"] = [1]

    known = Link(8 * NBYTES / 0.3 / 1e9)
    verdicts = {}
    for name, limit, choices, words in (
        (
            "nothing",
            "nothing",
            {"link": 0.1, "change": left_out},
            "for 100.0% of the time. No setting would change that much",
        ),
        ("untold", "link", {"link": 0.3, "rate": None}, "The link limited this run."),
        # One step more hides 0.3 s, not what 80 % of the bandwidth takes; two steps more do.
        ("link", "link", {"link": 0.3}, "The link limited this run."),
        (
            "slower",
            "groups",
            {"seconds": (STEP, 2 * STEP), "link": 0.05},
            "group 1 took 200 ms, of group 0 100 ms",
        ),
        ("work", "background", {"link": 0.01, "work": 0.2}, "in the background, limited this run"),
        (
            "both hops",
            "background",
            {"link": 0.01, "hop": 0.01, "work": 0.2},
            "in the background, limited this run",
        ),
        (
            "second hop",
            "link",
            {"seconds": THREE, "link": 0.99, "hop": 1.5},
            "waited, 100% was for the link",
        ),
    ):
        run = played(tmp_path / name, **choices)
        verdicts[name] = verdict = judge(run)
        assert verdict.limit == limit
        assert words in verdict.sentences[0]
    nothing, untold, link, slower = (
        verdicts[name] for name in ("nothing", "untold", "link", "slower")
    )
    assert (nothing.advice, nothing.utilisation) == (None, 1)
    words = "Of all outer gradients, 1 were left out of a mean because they were not finite, and 0"
    assert any(text.startswith(words) for text in nothing.sentences)
    assert (untold.link, untold.advice) == (None, None)
    assert "bit/s" not in " ".join(untold.sentences)
    assert "The link's speed is unknown" in " ".join(untold.sentences)
    assert link.link.gbit_s == pytest.approx(known.gbit_s)
    assert link.advice.changes == {"overlap_steps": 4}
    assert link.advice.now < 0.85 < planner.TARGET <= link.advice.then
    assert link.sentences[1].startswith(
        "Set overlap_steps=4. The planner expects a compute utilisation of"
    )
    assert slower.advice is None
    assert slower.causes.groups > 10 * max(slower.causes.link, slower.causes.background)
    assert "up to 2.00 times as fast" in slower.sentences[1]
    assert slower.link.gbit_s == pytest.approx(6 * known.gbit_s), (
        "the lateness of the group is not the link's"
    )
    # The second hop is time on the link.
    assert verdict.causes.link > 100 * verdict.causes.background
    assert verdict.link.gbit_s == pytest.approx(8 * NBYTES / (0.99 + 1.5) / 1e9)
    hops = [event for event in trace(run)["traceEvents"] if event["name"] == "second_hop"]
    assert [event["dur"] for event in hops] == pytest.approx([1.5e6] * 12, abs=1)
    transfer, second_hop = series.on_the_link(run.ranks[0].landings[0])
    assert (second_hop[0] - transfer[1], second_hop[1] - second_hop[0]) == pytest.approx(
        (0.001, 1.5)
    )


def test_the_advice_counts_on_the_exchange_that_ran(tmp_path: Path) -> None:
    # Eight groups whose run takes as long on a link as the planner says.
    parameters = tuple(Parameter(name, nbytes) for name, (_, nbytes) in PARAMETERS.items())
    model = Model(parameters, tuple(numel for numel, _ in PARAMETERS.values()))
    for exchange, compression, gbit_s, advised in (
        ("two_shot", "sparse", 0.001, None),
        ("two_shot", "fp4", 0.02, None),
        ("gather", "fp4", 0.05, {"exchange": "auto"}),
    ):
        own: dict[str, Any] = {**CUT, "compression": compression, "exchange": exchange}
        settings = Settings(sync_every=EVERY, overlap_steps=OVERLAP, **own)
        link = Link(gbit_s)
        method = Streaming(model, settings, Groups(STEP, groups=8, memory_rate=1e15))
        cost = method.costs(0, link)
        nbytes = int(method.bytes_per_step * EVERY / 2)
        times = {"link": cost.warm, "hop": cost.second_hop or None, "work": 1e-6}
        verdict = judge(
            played(tmp_path, (STEP,) * 8, nbytes=nbytes, compression=compression, **times)
        )
        assert verdict.limit == "link"
        assert verdict.link.gbit_s == pytest.approx(gbit_s, rel=1e-3)
        assert verdict.advice.now == pytest.approx(
            method.utilisation(planner.with_margin(link)), rel=0.01
        )
        assert advised in (None, verdict.advice.changes)
    assert verdict.sentences[1].startswith("Set exchange='auto'. The planner expects")


def test_a_site_reports_the_counted_sites_and_its_start(tmp_path: Path) -> None:
    def as_a_site(ranks: list[Lines]) -> None:
        del ranks[1:]
        ranks[0][0] |= {"site": "a", "groups": 1, "world_size": 1}
        landings = [line for line in ranks[0] if line["kind"] == "landing"]
        for landed, sites in zip(landings, (["a", "b"], ["a", "b"], ["a"], ["a"]), strict=True):
            landed["sites"] = sites
        # It was killed after its last step, and started again.
        ranks[0].append(ranks[0][0] | {"time": 5.0, "step": 20})

    run = played(tmp_path, link=0.01, change=as_a_site)
    told_of = judge(run).sentences[0]
    assert (
        "This is a, one site of a federation, which waits for no other. It was started again once."
        in told_of
    )
    assert told_of.endswith(
        "Of the 4 rounds of fragments that landed here, sites counted: a in 4, b in 2."
    )
    seen = [what for _, what in changes(run.ranks[0])]
    assert seen == [
        "a starts",
        "a starts after inner step 20",
        "a counts",
        "b counts",
        "b counts no longer",
    ]
    assert {event["name"] for event in trace(run)["traceEvents"] if event["ph"] == "i"} == set(seen)
    assert {"sites", "agreement"} & set(pictures_of(run)) == {"sites"}
    pytest.importorskip("matplotlib")
    assert b"<svg" in drawn(partial(draw_sites, run, THEMES["dark"]), "svg", THEMES["dark"])


def test_the_report_of_a_real_run_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "holds no records" in refused("report", str(tmp_path))

    def run(rank: int, world_size: int) -> None:
        callbacks = [lightning_sdiloco.StreamingDiLoCoMonitor(folder=str(tmp_path / "sdiloco"))]
        choices = {"sync_every": 4, "overlap_steps": 1, **CUT}
        fit(
            rank,
            world_size,
            2,
            25,
            choices,
            trainer_choices={"callbacks": callbacks, "log_every_n_steps": 1},
        )

    run_processes(run, 4)
    # What counts is the number: that before version_10 is older.
    for version in (9, 10):
        shutil.copytree(
            tmp_path / "sdiloco",
            tmp_path / "root" / "lightning_logs" / f"version_{version}" / "sdiloco",
        )
    folder = tmp_path / "root" / "lightning_logs" / "version_10" / "report"
    assert records_in(folder.parents[1]) == folder.with_name("sdiloco")
    text = told("report", str(tmp_path / "root"))
    page = (folder / "report.html").read_text()
    assert text.strip().endswith(str(folder / "report.html"))
    assert all("Training kept computing for" in text for text in (text, page))
    assert not re.findall(r'(?:src|href|srcset)="(?!data:)', page), (
        "nothing is loaded from elsewhere"
    )
    pictures = re.findall(r'data:image/svg\+xml;base64,([^"]+)', page)
    assert len(pictures) == 10, "five, for light and for dark"
    assert all(base64.b64decode(picture).startswith(b"<?xml") for picture in pictures)
    assert page.count("prefers-color-scheme: dark") == 6
    names = ("losses", "utilisation", "bandwidth", "flights", "agreement")
    files = {f"{name}{theme}.png" for name in names for theme in ("", "-dark")}
    assert {path.name for path in folder.iterdir()} == {"report.html", "timeline.json"} | files
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in files)
    assert {
        event["pid"] for event in json.loads((folder / "timeline.json").read_text())["traceEvents"]
    } == {0, 1, 2, 3}

"""The report of a run: its numbers on records written by hand, its verdicts, and the page of a real run."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

import lightning_sdiloco
from lightning_sdiloco.lightning.monitor.records import Run, read_run
from lightning_sdiloco.planning import planner
from lightning_sdiloco.tools.cli import main
from lightning_sdiloco.tools.report import series
from lightning_sdiloco.tools.report.verdict import judge
from tests.fits import fit
from tests.ranks import run_processes

EVERY, OVERLAP, STEP = 10, 2, 0.1
PARAMETERS = {f"layers.{layer}.weight": [1_000_000, 4_000_000] for layer in range(2)}
NBYTES = 516_000
"""Of a message of a fragment in fp4, about."""


def write(folder: Path, *ranks: list[dict[str, Any]]) -> Run:
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(ranks):
        (folder / f"rank_{rank:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(folder)


def landing(fragment: int, step: int, launch: float, arrive: float, due: float, lane: float = 0.001) -> dict[str, Any]:
    """A landing: launched, its message there, and when training asked for it."""
    there = arrive + 2 * lane
    spans = {
        "launch": (launch, launch),
        "flight": (launch, there),
        "encode": (launch, launch + lane),
        "transfer": (launch + lane, arrive),
        "decode": (arrive, arrive + lane),
        "outer_step": (arrive + lane, there),
        "wait": (due, max(due, there)),
        "land": (max(due, there), max(due, there)),
    }
    return {
        "kind": "landing",
        "fragment": fragment,
        "launched_at": step,
        "landed_at": step + OVERLAP,
        "final": False,
        "bytes_sent": NBYTES,
        "bytes_received": NBYTES,
        "outer_grad_norm": 3.0,
        "group_norms": [3.0, 5.0],
        "counted": [0, 1],
        "left_out": [],
        "outlying": [],
        "spans": spans,
        "diagnostics": {"cosines": [0.8, 0.6]},
    }


def rank_lines(
    group: int,
    steps: list[float],
    launches: list[float],
    arrivals: list[float],
    ahead: float = 0.0,
    lane: float = 0.001,
) -> list[dict[str, Any]]:
    """A record of 30 inner steps with launches of two fragments, every five steps from the tenth on.

    Args:
        group: The group.
        steps: When each inner step ends, if nothing is waited for after it.
        launches: When the launches happen.
        arrivals: When the messages of all groups are there.
        ahead: How far the clock of this rank is ahead.
        lane: Seconds of each part of the work in the lane.
    """
    about = {"rank": group, "group": group, "groups": 2, "shard": 0, "shards": 1, "world_size": 2, "host": "here"}
    settings = {
        "sync_every": EVERY,
        "overlap_steps": OVERLAP,
        "layers_per_fragment": 1,
        "mixing": 0.5,
        "fragments": "strided",
        "compression": "fp4",
    }
    offset = {"seconds": ahead, "uncertainty": 0.001}
    lines: list[dict[str, Any]] = [
        {"kind": "start", "format": 1, **about, "offset": offset, "time": 0.0, "step": 0, "settings": settings},
        {"kind": "fragments", "fragments": [[name] for name in PARAMETERS], "parameters": PARAMETERS},
    ]
    landings = {}
    for number, (launch, arrive) in enumerate(zip(launches, arrivals, strict=True)):
        step = EVERY + 5 * number
        landings[step + OVERLAP] = landing(number % 2, step, launch, arrive, steps[step + OVERLAP - 1], lane)
    began = 0.0
    for step, ended in enumerate(steps, start=1):
        landed = landings.get(step)
        done = landed["spans"]["land"][1] if landed else ended
        lines.append({"kind": "step", "step": step, "span": (began, ended), "done": done})
        lines += [landed] if landed else []
        lines += [{"kind": "loss", "step": step, "loss": 10 / step}]
        began = done
    for line in lines:
        for name in {"time", "done"} & set(line):
            line[name] += ahead
        for spans in [line] if "span" in line else [line.get("spans", {})]:
            for name in {"span", *spans} & set(spans):
                if name in ("span", *line.get("spans", {})):
                    spans[name] = [moment + ahead for moment in spans[name]]
    return lines


def simulate(
    seconds: list[float], link: float, lane: float = 0.001
) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """Plays groups with so many seconds for an inner step: ends of steps and launches of each, and arrivals for all."""
    ends: list[list[float]] = [[] for _ in seconds]
    launches: list[list[float]] = [[] for _ in seconds]
    arrivals: list[float] = []
    clocks = [0.0] * len(seconds)
    for step in range(1, 31):
        for group, each in enumerate(seconds):
            clocks[group] += each
            ends[group].append(clocks[group])
        if step >= EVERY and (step - EVERY) % 5 == 0 and step <= 25:
            for group, clock in enumerate(clocks):
                launches[group].append(clock)
            arrivals.append(max(clocks) + lane + link)
        if step - OVERLAP >= EVERY and (step - OVERLAP - EVERY) % 5 == 0 and step - OVERLAP <= 25:
            there = arrivals[(step - OVERLAP - EVERY) // 5] + 2 * lane
            clocks = [max(clock, there) for clock in clocks]
    return ends, launches, arrivals


def played(folder: Path, seconds: list[float], link: float, ahead: float = 0.0, lane: float = 0.001) -> Run:
    ends, launches, arrivals = simulate(seconds, link, lane)
    return write(
        folder,
        rank_lines(0, ends[0], launches[0], arrivals, lane=lane),
        rank_lines(1, ends[1], launches[1], arrivals, ahead=ahead, lane=lane),
    )


# Numbers


def test_utilisation_is_one_less_the_share_of_the_waits(tmp_path: Path) -> None:
    run = played(tmp_path, [STEP, STEP], link=0.5)
    # Each of four flights takes 0.503 s, two inner steps of which are hidden.
    waited = 4 * 0.303
    for rank in run.ranks:
        assert series.utilisation(rank) == pytest.approx(3.0 / (3.0 + waited))
        curve = series.utilisation_over_time(rank, run.began)
        shares = [1.0, 1 / (1 + 2 * 0.303), 1 / (1 + 2 * 0.303)]
        assert [share for _, share in curve] == pytest.approx(shares)
        assert curve[-1][0] == pytest.approx(3.0 + waited)
        assert series.step_seconds(rank) == pytest.approx(STEP)


def test_what_was_sent_over_time_adds_up_to_all_bytes(tmp_path: Path) -> None:
    run = played(tmp_path, [STEP, STEP], link=0.5)
    curve = series.gbit_s_over_time(run.ranks[:1], run.began)
    width = curve[1][0] - curve[0][0]
    assert sum(rate for _, rate in curve) * width * 1e9 / 8 == pytest.approx(4 * NBYTES)
    assert series.bytes_sent(run) == {0: 4 * NBYTES, 1: 4 * NBYTES}
    # A ring of two sends all gradients once at every step.
    assert series.ddp_gbit_s(run) == pytest.approx(8 * 8_000_000 / STEP / 1e9)


def test_agreement_is_shown_by_whole_rounds(tmp_path: Path) -> None:
    run = played(tmp_path, [STEP, STEP], link=0.01)
    assert series.cosines(run) == {0: [(17, 0.8), (27, 0.8)], 1: [(17, 0.6), (27, 0.6)]}
    norms = series.norms(run)
    assert norms[1] == [(17, pytest.approx(50**0.5)), (27, pytest.approx(50**0.5))]
    assert norms[None] == [(17, pytest.approx(18**0.5)), (27, pytest.approx(18**0.5))]


def test_the_clock_of_a_rank_is_put_on_that_of_rank_0(tmp_path: Path) -> None:
    apart, together = (played(tmp_path / name, [STEP, STEP], 0.5, shift) for name, shift in (("a", 300.0), ("t", 0.0)))
    assert judge(apart).causes == pytest.approx(judge(together).causes)
    for one, other in zip(apart.ranks, together.ranks, strict=True):
        assert [s.done for s in one.steps] == pytest.approx([s.done for s in other.steps])
        assert one.landings[2].spans["flight"] == pytest.approx(other.landings[2].spans["flight"])


# Verdicts


def test_a_run_that_hardly_waited_needs_no_change(tmp_path: Path) -> None:
    verdict = judge(played(tmp_path, [STEP, STEP], link=0.1))
    assert (verdict.limit, verdict.advice) == ("nothing", None)
    assert verdict.utilisation == 1
    assert verdict.sentences[0].startswith("Training kept computing for 100.0% of the time. Nothing held it back")


def test_a_slow_link_is_named_with_the_setting_that_helps(tmp_path: Path) -> None:
    verdict = judge(played(tmp_path, [STEP, STEP], link=0.3))
    assert verdict.limit == "link"
    assert verdict.link is not None
    assert verdict.link.gbit_s == pytest.approx(8 * NBYTES / 0.3 / 1e9)
    # One step more hides 0.3 s, not what 80 % of the bandwidth takes; two steps more do.
    assert verdict.advice is not None
    assert verdict.advice.changes == {"overlap_steps": 4}
    assert verdict.advice.now < 0.85 < planner.TARGET <= verdict.advice.then
    assert verdict.sentences[1].startswith("Set overlap_steps=4. The planner expects a compute utilisation of")


def test_a_slower_group_is_named_and_not_the_link(tmp_path: Path) -> None:
    verdict = judge(played(tmp_path, [STEP, 2 * STEP], link=0.05))
    assert (verdict.limit, verdict.advice) == ("groups", None)
    assert verdict.causes.groups > 10 * max(verdict.causes.link, verdict.causes.lane)
    assert "an inner step of group 1 took 200 ms, of group 0 100 ms" in verdict.sentences[0]
    assert "up to 2.00 times as fast" in verdict.sentences[1]
    assert verdict.link is not None
    assert verdict.link.gbit_s == pytest.approx(8 * NBYTES / 0.05 / 1e9), "the lateness of the group is not the link's"


def test_a_lane_that_is_too_slow_is_named(tmp_path: Path) -> None:
    verdict = judge(played(tmp_path, [STEP, STEP], link=0.01, lane=0.2))
    assert verdict.limit == "lane"
    assert verdict.sentences[0].count("in the background lane") == 1


def test_groups_that_were_left_out_are_counted(tmp_path: Path) -> None:
    ends, launches, arrivals = simulate([STEP, STEP], 0.1)
    lines = [rank_lines(group, ends[group], launches[group], arrivals) for group in range(2)]
    next(line for line in lines[0] if line["kind"] == "landing")["left_out"] = [1]
    sentences = judge(write(tmp_path, *lines)).sentences
    assert any(
        text.startswith("Of all outer gradients 1 were left out of a mean because they were not finite, and 0")
        for text in sentences
    )


# The page


def test_the_report_of_a_real_run_is_one_page_that_needs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    def run(rank: int, world_size: int) -> None:
        callbacks = [lightning_sdiloco.StreamingDiLoCoMonitor(folder=str(tmp_path / "sdiloco"))]
        choices = {"sync_every": 4, "overlap_steps": 1, "layers_per_fragment": 1}
        fit(rank, world_size, 2, 25, choices, trainer_choices={"callbacks": callbacks, "log_every_n_steps": 1})

    run_processes(run, 4)
    main(["report", str(tmp_path)])
    told = capsys.readouterr().out
    page = (tmp_path / "report" / "report.html").read_text()
    assert told.strip().endswith(str(tmp_path / "report" / "report.html"))
    assert "Training kept computing for" in told
    assert "Training kept computing for" in page
    assert not re.findall(r'(?:src|href|srcset)="(?!data:)', page), "nothing is loaded from elsewhere"
    pictures = re.findall(r'data:image/svg\+xml;base64,([^"]+)', page)
    assert len(pictures) == 10, "five, for light and for dark"
    assert all(base64.b64decode(picture).startswith(b"<?xml") for picture in pictures)
    assert page.count("prefers-color-scheme: dark") == 6
    names = {path.name for path in (tmp_path / "report").iterdir()}
    files = {
        f"{name}{theme}.png"
        for name in ("losses", "utilisation", "bandwidth", "flights", "agreement")
        for theme in ("", "-dark")
    }
    assert names == {"report.html", "timeline.json"} | files
    assert all((tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG") for name in files)
    assert {e["pid"] for e in json.loads((tmp_path / "report" / "timeline.json").read_text())["traceEvents"]} == {
        0,
        1,
        2,
        3,
    }


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 2
    assert "holds no records" in capsys.readouterr().err

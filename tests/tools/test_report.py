"""The report of a run: its numbers on records written by hand, its verdicts, and the page of a real run."""

import base64
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lightning_sdiloco
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.partition import Parameter
from lightning_sdiloco.lightning.records import Run, changes, read_run, trace
from lightning_sdiloco.planning import planner
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming
from lightning_sdiloco.planning.workload import Groups, Model
from lightning_sdiloco.tools import report as series
from lightning_sdiloco.tools.cli import main
from lightning_sdiloco.tools.report import THEMES, draw_sites, drawn, judge, pictures_of
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


@dataclass(frozen=True)
class Play:
    """How a run is played by hand.

    Attributes:
        seconds: Seconds of an inner step of each group.
        link: Seconds from the last launch until all messages are there.
        hop: Seconds of the second hop; None where the exchange has none.
        work: Seconds of each part of the work in the background.
        nbytes: Bytes that a rank sends for a flight.
        compression: The compression, by its name.
        ahead: How far the clock of group 1 is ahead.
        says_exchange: Whether landings say which exchange ran; older records do not.
        rate: The link rate that landings tell; None where they cannot tell it.
    """

    seconds: tuple[float, ...] = (STEP, STEP)
    link: float = 0.5
    hop: float | None = None
    work: float = 0.001
    nbytes: int = NBYTES
    compression: str = "fp4"
    ahead: float = 0.0
    says_exchange: bool = True
    rate: float | None = 1.0

    @property
    def after_arrival(self) -> float:
        """Seconds from the arrival of all messages to the result."""
        return 2 * self.work + (self.hop or 0.0)


def landing(play: Play, fragment: int, step: int, launch: float, arrive: float, due: float) -> dict[str, Any]:
    """A landing: launched, its message there, and when training asked for it."""
    there, work, groups = arrive + play.after_arrival, play.work, len(play.seconds)
    spans = {
        "launch": (launch, launch),
        "flight": (launch, there),
        "encode": (launch, launch + work),
        "transfer": (launch + work, arrive),
        "decode": (arrive, arrive + work),
        **({} if play.hop is None else {"relay": (arrive + work, there - work)}),
        "outer_step": (there - work, there),
        "wait": (due, max(due, there)),
        "land": (max(due, there), max(due, there)),
    }
    return {
        "kind": "landing",
        "fragment": fragment,
        "launched_at": step,
        "landed_at": step + OVERLAP,
        "final": False,
        "bytes_sent": play.nbytes,
        "bytes_received": play.nbytes,
        "outer_grad_norm": 3.0,
        "group_norms": [3.0, 5.0, *[4.0] * (groups - 2)],
        "counted": list(range(groups)),
        "left_out": [],
        "outlying": [],
        "spans": spans,
        "link_gbit_s": play.rate,
        "diagnostics": {"cosines": [0.8, 0.6, *[0.7] * (groups - 2)]},
        **({"exchange": "gather" if play.hop is None else "two_shot"} if play.says_exchange else {}),
    }


def rank_lines(
    play: Play, group: int, steps: list[float], launches: list[float], arrivals: list[float]
) -> list[dict[str, Any]]:
    """A record of 30 inner steps with launches of two fragments, every five steps from the tenth on.

    Args:
        play: How the run is played.
        group: The group.
        steps: When each inner step ends, if nothing is waited for after it.
        launches: When the launches happen.
        arrivals: When the messages of all groups are there.
    """
    groups = len(play.seconds)
    about = {"rank": group, "group": group, "groups": groups, "shard": 0, "shards": 1, "world_size": groups}
    settings = {
        "sync_every": EVERY,
        "overlap_steps": OVERLAP,
        "layers_per_fragment": 1,
        "mixing": 0.5,
        "fragments": "strided",
        "compression": play.compression,
    }
    ahead = play.ahead if group == 1 else 0.0
    start = {"host": "here", "settings": settings}
    lines: list[dict[str, Any]] = [
        {"kind": "start", "format": 1, **about, **start, "time": 0.0, "step": 0},
        {"kind": "fragments", "fragments": [[name] for name in PARAMETERS], "parameters": PARAMETERS},
    ]
    landings = {}
    for number, (launch, arrive) in enumerate(zip(launches, arrivals, strict=True)):
        step = EVERY + 5 * number
        landings[step + OVERLAP] = landing(play, number % 2, step, launch, arrive, steps[step + OVERLAP - 1])
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


def simulate(play: Play) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """Plays the groups: ends of steps and launches of each, and arrivals for all."""
    ends: list[list[float]] = [[] for _ in play.seconds]
    launches: list[list[float]] = [[] for _ in play.seconds]
    arrivals: list[float] = []
    clocks = [0.0] * len(play.seconds)
    for step in range(1, 31):
        for group, each in enumerate(play.seconds):
            clocks[group] += each
            ends[group].append(clocks[group])
        if step >= EVERY and (step - EVERY) % 5 == 0 and step <= 25:
            for group, clock in enumerate(clocks):
                launches[group].append(clock)
            arrivals.append(max(clocks) + play.work + play.link)
        if step - OVERLAP >= EVERY and (step - OVERLAP - EVERY) % 5 == 0 and step - OVERLAP <= 25:
            there = arrivals[(step - OVERLAP - EVERY) // 5] + play.after_arrival
            clocks = [max(clock, there) for clock in clocks]
    return ends, launches, arrivals


def played(folder: Path, **choices: Any) -> Run:
    play = Play(**choices)
    ends, launches, arrivals = simulate(play)
    ranks = range(len(play.seconds))
    return write(folder, *(rank_lines(play, group, ends[group], launches[group], arrivals) for group in ranks))


# Numbers


def test_utilisation_is_one_less_the_share_of_the_waits(tmp_path: Path) -> None:
    run = played(tmp_path, link=0.5)
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
    run = played(tmp_path, link=0.5)
    curve = series.gbit_s_over_time(run.ranks[:1], run.began)
    width = curve[1][0] - curve[0][0]
    assert sum(rate for _, rate in curve) * width * 1e9 / 8 == pytest.approx(4 * NBYTES)
    assert series.bytes_sent(run) == {0: 4 * NBYTES, 1: 4 * NBYTES}
    # A ring of two sends all gradients once at every step.
    assert series.ddp_gbit_s(run) == pytest.approx(8 * 8_000_000 / STEP / 1e9)


def test_agreement_is_shown_by_whole_rounds(tmp_path: Path) -> None:
    run = played(tmp_path, link=0.01)
    assert series.cosines_of(run) == {0: [(17, 0.8), (27, 0.8)], 1: [(17, 0.6), (27, 0.6)]}
    norms = series.norms_of(run)
    assert norms[1] == [(17, pytest.approx(50**0.5)), (27, pytest.approx(50**0.5))]
    assert norms[None] == [(17, pytest.approx(18**0.5)), (27, pytest.approx(18**0.5))]


def test_a_clock_that_cannot_be_right_is_aligned_at_launches(tmp_path: Path) -> None:
    apart, together = (played(tmp_path / name, ahead=shift) for name, shift in (("a", 300.0), ("t", 0.0)))
    assert judge(apart).limit == judge(together).limit
    flight = together.ranks[1].landings[2].seconds("flight")
    for one, other in zip(apart.ranks, together.ranks, strict=True):
        assert [s.done for s in one.steps] == pytest.approx([s.done for s in other.steps], abs=flight / 2)
        assert one.landings[2].seconds("flight") == pytest.approx(other.landings[2].seconds("flight"))


# Verdicts


def test_a_run_that_hardly_waited_needs_no_change(tmp_path: Path) -> None:
    verdict = judge(played(tmp_path, link=0.1))
    assert (verdict.limit, verdict.advice) == ("nothing", None)
    assert verdict.utilisation == 1
    assert verdict.sentences[0].startswith("Training kept computing for 100.0% of the time. Nothing held it back")


def test_a_link_of_which_no_landing_could_tell_the_rate_is_given_none(tmp_path: Path) -> None:
    verdict = judge(played(tmp_path, link=0.3, rate=None))
    assert (verdict.limit, verdict.link, verdict.advice) == ("link", None, None)
    told = " ".join(verdict.sentences)
    assert "bit/s" not in told
    assert "How fast the link is cannot be told" in told


def test_a_slow_link_is_named_with_the_setting_that_helps(tmp_path: Path) -> None:
    verdict = judge(played(tmp_path, link=0.3))
    assert verdict.limit == "link"
    assert verdict.link is not None
    assert verdict.link.gbit_s == pytest.approx(8 * NBYTES / 0.3 / 1e9)
    # One step more hides 0.3 s, not what 80 % of the bandwidth takes; two steps more do.
    assert verdict.advice is not None
    assert verdict.advice.changes == {"overlap_steps": 4}
    assert verdict.advice.now < 0.85 < planner.TARGET <= verdict.advice.then
    assert verdict.sentences[1].startswith("Set overlap_steps=4. The planner expects a compute utilisation of")


def test_a_slower_group_is_named_and_not_the_link(tmp_path: Path) -> None:
    verdict = judge(played(tmp_path, seconds=(STEP, 2 * STEP), link=0.05))
    assert (verdict.limit, verdict.advice) == ("groups", None)
    assert verdict.causes.groups > 10 * max(verdict.causes.link, verdict.causes.background)
    assert "an inner step of group 1 took 200 ms, of group 0 100 ms" in verdict.sentences[0]
    assert "up to 2.00 times as fast" in verdict.sentences[1]
    assert verdict.link is not None
    assert verdict.link.gbit_s == pytest.approx(8 * NBYTES / 0.05 / 1e9), "the lateness of the group is not the link's"


@pytest.mark.parametrize("hop", [None, 0.01])
def test_slow_work_in_the_background_is_named(hop: float | None, tmp_path: Path) -> None:
    verdict = judge(played(tmp_path, link=0.01, hop=hop, work=0.2))
    assert verdict.limit == "background"
    assert verdict.sentences[0].count("in the background, limited this run") == 1


# The second hop, from three groups on


THREE = (STEP, STEP, STEP)


def test_the_second_hop_is_time_on_the_link(tmp_path: Path) -> None:
    verdict = judge(played(tmp_path, seconds=THREE, link=0.99, hop=1.5))
    assert verdict.limit == "link"
    assert verdict.causes.link > 100 * verdict.causes.background
    assert "The link limited this run. Of the time that it waited, 100% was for the link" in verdict.sentences[0]
    assert verdict.link is not None
    assert verdict.link.gbit_s == pytest.approx(8 * NBYTES / (0.99 + 1.5) / 1e9)


def test_what_was_sent_counts_until_the_end_of_the_second_hop(tmp_path: Path) -> None:
    run = played(tmp_path, seconds=THREE, link=0.5, hop=1.5)
    landed = run.ranks[0].landings[0]
    transfer, second_hop = series.on_the_link(landed)
    assert second_hop[0] - transfer[1] == pytest.approx(0.001)
    assert second_hop[1] - second_hop[0] == pytest.approx(1.5)
    curve = series.gbit_s_over_time(run.ranks[:1], run.began)
    # All flights overlap with the next one but the last, which is on the link for two seconds after its launch.
    until = landed.spans["flight"][0] - run.began
    assert all(rate == 0 for at, rate in curve if at + curve[1][0] < until)
    assert min(rate for at, rate in curve if until < at < run.ranks[0].landings[-1].spans["relay"][0]) > 0


def test_the_timeline_shows_the_second_hop(tmp_path: Path) -> None:
    events = trace(played(tmp_path, seconds=THREE, link=0.5, hop=1.5))["traceEvents"]
    hops = [event for event in events if event["name"] == "second_hop"]
    assert len(hops) == 3 * 4
    assert all(event["dur"] == pytest.approx(1.5e6, abs=1) for event in hops)


def played_as_planned(folder: Path, settings: Settings, gbit_s: float, **choices: Any) -> tuple[Run, float]:
    """A run of eight groups that takes as long on a link as the planner says, and the utilisation that it expects."""
    numels = tuple(numel for numel, _ in PARAMETERS.values())
    model = Model(tuple(Parameter(name, nbytes) for name, (_, nbytes) in PARAMETERS.items()), numels)
    method, link = Streaming(model, settings, Groups(STEP, groups=8, memory_rate=1e15)), Link(gbit_s)
    cost = method.costs(0, link)
    run = played(
        folder,
        seconds=(STEP,) * 8,
        link=cost.warm,
        hop=cost.second_hop or None,
        work=1e-6,
        nbytes=int(method.bytes_per_step * EVERY / 2),
        compression=settings.compression,
        **choices,
    )
    return run, method.utilisation(planner.with_margin(link))


@pytest.mark.parametrize("says_exchange", [True, False])
@pytest.mark.parametrize(
    ("exchange", "compression", "gbit_s"),
    [("two_shot", "sparse", 0.001), ("gather", "fp4", 0.1), ("two_shot", "fp4", 0.02)],
)
def test_the_advice_counts_on_the_exchange_that_ran(
    exchange: Any, compression: str, gbit_s: float, says_exchange: bool, tmp_path: Path
) -> None:
    settings = Settings(
        sync_every=EVERY, overlap_steps=OVERLAP, layers_per_fragment=1, compression=compression, exchange=exchange
    )
    run, expected = played_as_planned(tmp_path, settings, gbit_s, says_exchange=says_exchange)
    verdict = judge(run)
    assert verdict.limit == "link"
    assert verdict.link is not None
    assert verdict.link.gbit_s == pytest.approx(gbit_s, rel=1e-3)
    assert verdict.advice is not None
    assert verdict.advice.now == pytest.approx(expected, rel=0.01)


def test_two_shots_are_advised_where_a_gather_ran(tmp_path: Path) -> None:
    gather = Settings(sync_every=EVERY, overlap_steps=OVERLAP, layers_per_fragment=1, exchange="gather")
    run, _ = played_as_planned(tmp_path, gather, 0.05)
    verdict = judge(run)
    assert verdict.advice is not None
    assert verdict.advice.changes == {"exchange": "auto"}
    assert verdict.sentences[1].startswith("Set exchange='auto'. The planner expects")


def test_groups_that_were_left_out_are_counted(tmp_path: Path) -> None:
    play = Play(link=0.1)
    ends, launches, arrivals = simulate(play)
    lines = [rank_lines(play, group, ends[group], launches[group], arrivals) for group in range(2)]
    next(line for line in lines[0] if line["kind"] == "landing")["left_out"] = [1]
    sentences = judge(write(tmp_path, *lines)).sentences
    assert any(
        text.startswith("Of all outer gradients 1 were left out of a mean because they were not finite, and 0")
        for text in sentences
    )


def test_a_site_tells_who_counted_and_when_it_was_started(tmp_path: Path) -> None:
    play = Play(link=0.01)
    ends, launches, arrivals = simulate(play)
    lines = rank_lines(play, 0, ends[0], launches[0], arrivals)
    lines[0] |= {"site": "a", "groups": 1, "world_size": 1}
    landings = [line for line in lines if line["kind"] == "landing"]
    for landed, sites in zip(landings, (["a", "b"], ["a", "b"], ["a"], ["a"]), strict=True):
        landed["sites"] = sites
    # It was killed after its last step, and started again.
    run = write(tmp_path, [*lines, lines[0] | {"time": 5.0, "step": 20}])
    told = judge(run).sentences[0]
    assert "This is a, one site of a federation, which waits for no other. It was started again once." in told
    assert told.endswith("Of the 4 rounds of fragments that landed here, there counted: a in 4, b in 2.")
    seen = [what for _, what in changes(run.ranks[0])]
    assert seen == ["a starts", "a starts after inner step 20", "a counts", "b counts", "b counts no longer"]
    assert {event["name"] for event in trace(run)["traceEvents"] if event["ph"] == "i"} == set(seen)
    assert {"sites", "agreement"} & pictures_of(run).keys() == {"sites"}
    pytest.importorskip("matplotlib")
    assert b"<svg" in drawn(draw_sites, run, THEMES["dark"], "svg")


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

"""Numbers about federations that pages quote: hubs, payloads, faults and the guard."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.verify.claims import About, AtMost, Claim, Expected, Sentence, Table
from benchmarks.verify.results import BENCHMARKS, FEDERATION, headline, results


def of_transport() -> Iterator[Claim]:
    """Payloads to a hub: hub_transport.json."""
    large = _of_link("100 Mbit/s, 100 MB")
    fast = _of_link("1000 Mbit/s, 100 MB")
    pattern = "A payload of 100 MB is transferred at # of 100 Mbit/s, and at # of 1000"
    yield Sentence(BENCHMARKS, pattern, [100 * large, 1000 * fast])
    many = "100 Mbit/s, 0.1% lost, 8 connections, 10 MB"
    lossy = 100 * _of_link(many)
    iperf3 = lossy / headline("hub_transport")[f"{many}: of iperf3"]
    alone = 100 * _of_link(many.replace("8 connections", "1 connections"))
    pattern = "the payload is transferred at # of 100 Mbit/s, compared with # for iperf3 and # for a single connection"
    yield Sentence(BENCHMARKS, pattern, [lossy, iperf3, alone])


def _of_link(case: str) -> float:
    return headline("hub_transport")[f"{case}: of the link"]


def of_hub_rounds() -> Iterator[Claim]:
    """What rounds cost a hub: hub_rounds.json, and the bits of fp4 of compression.json."""
    pattern = "With payloads of 16 KiB, a round of 64 sites takes # s"
    yield Sentence(FEDERATION, pattern, [_cost(16, "sites", 64)])
    numbers: list[Expected] = [_cost(1024, "sites", sites) for sites in (16, 32)]
    numbers += [_cost(1024, "hub", sites) for sites in (16, 32, 64)]
    pattern = (
        "a round of 16 sites takes # s, and a round of 32 sites takes # s. "
        'With mean="hub", these rounds take # s and # s, and a round of 64 sites takes # s'
    )
    yield Sentence(FEDERATION, pattern, numbers)
    bits = results("compression", "docs")["errors"]["fp4"]["bits"]
    sent = 16 * 100e6 * bits / 8 / 1e9
    fetched = 15 * sent
    pattern = (
        "upload # GB every H steps and download # GB, which takes # seconds at 1 Gbit/s. "
        'With mean="hub", the sites download # GB'
    )
    yield Sentence(FEDERATION, pattern, [sent, fetched, About(8 * fetched), sent])


def _cost(kib: int, mean: str, sites: int) -> float:
    case = f"{kib} KiB, mean at {mean}, {sites} sites"
    return headline("hub_rounds")[f"{case}: s of the hub's processor"]


def of_site_steps() -> Iterator[Claim]:
    """A step in a federation: site_steps.json."""
    ratio = headline("site_steps")["step time over that of the fixed world"]
    rounds = len(results("site_steps")["rounds"]["federation"])
    milliseconds = 1000 * results("site_steps")["case"]["sleep"]
    pattern = (
        "A step in a federation takes # times as long ... median of # rounds ... and # ms steps"
    )
    yield Sentence(BENCHMARKS, pattern, [ratio, rounds, milliseconds])


def of_chaos() -> Iterator[Claim]:
    """Faults: chaos.json."""
    records = sum(run["records"] for run in _runs())
    yield Sentence(BENCHMARKS, "Across # records, no two sites differed", [records])
    faults = sum(_faults(run) for run in _runs())
    behind = sum(_faults(run) for run in _runs() if run["namespaces"])
    pattern = "went through # random kills ... links. The sites were behind NATs ... during # of"
    yield Sentence(BENCHMARKS, pattern, [faults, behind])
    yield Sentence(FEDERATION, "# random faults on a hub and four sites", [faults])
    longest = max(pause for run in _runs() for pause in run["pauses"])
    yield Sentence(BENCHMARKS, "the longest time without a record was # s", [longest])


def _runs() -> list[Any]:
    return list(results("chaos")["runs"])


def _faults(run: Any) -> int:
    return sum(run["faults"].values())


def of_returns() -> Iterator[Claim]:
    """How soon sites are back: chaos.json."""
    returns = [back for run in _runs() for back in run["returns"]]
    late = sorted(back["seconds"] for back in returns if not back["state"])
    assert late[-3] <= 3 < late[-2], "the page says: all but two"
    pattern = (
        "Of # returns, all but two took at most # s or fetched a state. The other two took # s"
    )
    yield Sentence(BENCHMARKS, pattern, [len(returns), AtMost(late[-3]), late[-1]])
    kills = [back["seconds"] for back in returns if back["kind"] == _KILL]
    yield Sentence(
        BENCHMARKS, "After kill -9 of a site, the median recovery takes # s", [median(kills)]
    )
    sites = [site for run in _runs() for site in run["stalls"].values()]
    above = [stall["stalled"] - stall["delayed"] for site in sites for stall in site["above"]]
    usual = max(stall for site in sites if not site["above"] for stall in site["stalls"])
    pattern = "waited at most # s plus one step, except for two steps of # s and # s"
    yield Sentence(BENCHMARKS, pattern, [AtMost(usual), *above])


_KILL = "kill -9, and started again (site)"


def of_goodput() -> Iterator[Claim]:
    """Sites that fail: goodput.json."""
    rows = results("goodput")["rows"]
    table = {}
    for row in rows:
        if row["faults"]:
            back = [seconds for seconds in row.get("counts_after", []) if seconds is not None]
            label = f"{row['sites']} {row['stage']} | {row['faults']}"
            table[label] = [_efficiency(rows, row), 100 * row["share"]]
            if back:
                table[label].append(median(back) / results("goodput")["step_seconds"])
    header = ["sites", "faults", "steps that count", "sites in a round"]
    yield Table(BENCHMARKS, header, table, labels=2)
    away = [seconds for row in rows for seconds in row.get("trains_after", [])]
    yield Sentence(BENCHMARKS, "trained again after # s", [1 + median(away)])


def _efficiency(rows: Any, row: Any) -> float:
    """Returns the steps that count in percent of those without faults."""
    for faultless in rows:
        kind = (faultless["stage"], faultless["sites"], faultless["faults"])
        if kind == (row["stage"], row["sites"], 0):
            rate = float(faultless["steps"] / faultless["seconds"])
            return 100 * float(row["steps"] / row["seconds"]) / rate
    raise AssertionError("there is no row without faults")


def of_guard() -> Iterator[Claim]:
    """Honest contributions: guard.json."""
    numbers = headline("guard")
    assert numbers["left out"] == 0, "the page says: none was left out"
    pattern = "Of # honest contributions from 2, 3, 5 and 8 groups, none was left out"
    yield Sentence(FEDERATION, pattern, [numbers["honest"]])

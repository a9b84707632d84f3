"""Numbers about other methods that pages quote: their losses, bytes and promises."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from benchmarks.comparison import Comparison
from benchmarks.methods import __main__ as table
from benchmarks.methods import claims, named
from benchmarks.verify.claims import Claim, Expected, Sentence, Table
from benchmarks.verify.learning import gap, gaps
from benchmarks.verify.results import METHODS, results, runs

_ROWS = {
    "MuLoCo": "Muon",
    "Selective": "Selective(0.3, most=4)",
    '"top_k+memory"': "top_k+memory",
    "Threshold": "Threshold(every=10)",
    "ByLink": "ByLink, one slow uplink",
    "TwoShot": "TwoShot([0.4, 0.2, 0.2, 0.2])",
    "Paced": "Paced, one at half speed",
    "DropCompute": "DropCompute",
    "ByNorm": "ByNorm(1.0)",
    "ZScore": "ZScore(warmup=20)",
    "ByMedian": "ByMedian",
    "Carry": "Carry",
    "Delayed Nesterov": "DelayedNesterov(every=4)",
    "RandomPairs": "RandomPairs",
    "Fastest pairs": "FastestPairs",
    "Ring": "Ring",
    "GPA": "GPA inside, outer momentum",
    "FedGLOMO": "FedGLOMO",
}
"""The rows of the table, by the name of the runs."""


@cache
def compared() -> Mapping[str, Comparison]:
    return {
        setting.name: setting for setting in table.compared(runs("methods"), list(named.wanted()))
    }


def four(method: str) -> Comparison:
    return compared()[f"M=4, {method}"]


def of_methods() -> Iterator[Claim]:
    """Loss and bytes: methods.json."""
    rows: dict[str, Sequence[Expected]] = {"DynamicBackup": [100]}
    for label, method in _ROWS.items():
        rows[label] = [*gap(four(method)), 100 * table.bytes_sent(four(method))]
    eager = four("Eager, tau=19")
    rows["Eager updates"] = [*gap(eager), 100 * table.bytes_sent(eager)]
    rows["SNOO"] = gap(compared()["M=1, SNOO"])
    yield Table(METHODS, ["method", "use it when"], rows)
    two = compared()["M=2, Selective(0.3, most=4)"]
    pattern = "Two groups sent # % of the defaults' bytes, with no significant ... loss (# ± # %)"
    yield Sentence(METHODS, pattern, [100 * table.bytes_sent(two), *gap(two)])
    random = four("random_k+memory, outer_lr=1")
    pattern = (
        "The mean over senders raised the loss by # ± # % compared with the defaults. "
        "Sending random values raised the loss by # ± # %, with # % of"
    )
    losses = gaps(four("sparse, over senders"), random)
    yield Sentence(METHODS, pattern, [*losses, 100 * table.bytes_sent(random)])
    threshold = four("Threshold(every=10)")
    top_k = four("top_k+memory")
    beside = Comparison("top-k", threshold.ours, top_k.ours)
    share = 100 * table.bytes_sent(threshold) / table.bytes_sent(top_k)
    pattern = "DCT sent # % of top-k's bytes, and its loss was # ± # % higher"
    yield Sentence(METHODS, pattern, [share, *gap(beside)])
    in_flight = gaps(four("Carry, tau=19"), four("defaults, tau=19"))
    pattern = (
        "At tau=19 with H=20, the loss was # ± # % above the defaults' with Carry, and # ± # % with"
    )
    yield Sentence(METHODS, pattern, in_flight)
    gpa = gap(four("GPA inside, none outside"))
    yield Sentence(METHODS, "with or without the default outer momentum (# ± # %", gpa)
    yield Sentence(
        METHODS, "Lookahead's loss was # ± # % above AdamW's", gap(compared()["M=1, Lookahead"])
    )
    averaged = gap(four("FedAvg, SGD inside"))
    yield Sentence(METHODS, "The loss of federated averaging itself is # ± # % above", averaged)


def of_gossip() -> Iterator[Claim]:
    """Routes: claims.json."""
    pattern = "reduces the loss by # ± #, # ± #, # ± # and # ± # %"
    yield Sentence(METHODS, pattern, _differences("a2cid2", "Ring()"))
    numbers = _differences("saps_psgd", "FastestPairs")
    yield Sentence(
        METHODS,
        "half the bytes of an exchange among all groups (loss # ± # and # ± # %)",
        numbers,
    )
    numbers = _differences("saps_psgd", "FastestPairs, 1/100")
    yield Sentence(
        METHODS,
        "Sending only 1/100 of the values, as in the paper, changed the loss by # ± # and # ± # %",
        numbers,
    )


def _differences(claim: str, method: str) -> list[float]:
    """Returns the differences of a method's losses from its reference's, with their intervals."""
    numbers = []
    for row in _summary(claim):
        if row.get("method") == method:
            numbers += [abs(row["percent"]), row["half_width"]]
    return numbers


def of_rare_rows() -> Iterator[Claim]:
    """Clients and embedding tables: claims.json."""
    pattern = "# ± # % below averaging's at a rate of 0.1, and # ± # % below at a rate of 0.3"
    yield Sentence(METHODS, pattern, _differences("fedglomo", "FedGLOMO, beta=0.5"))
    rows = {row["method"]: row for row in _summary("tables")}
    touched = 100 * rows["sparse"]["rows_with_a_gradient"]
    share = rows["fp4"]["bytes"] / rows["sparse"]["bytes"]
    pattern = (
        "a round touches # % of the rows, the loss with sparse was # ± # % above fp4's, with 1/# of"
    )
    yield Sentence(METHODS, pattern, [touched, *_differences("tables", "sparse"), share])


def of_gains() -> Iterator[Claim]:
    """How much faster methods are: claims.json."""
    schedules = {row["method"]: row for row in _summary("selsync")}
    numbers = []
    for method in ("Selective(0.3, most=4)", "H=80"):
        row = schedules[method]
        saved = 100 * (1 - row["seconds"] / schedules["H=20"]["seconds"])
        numbers += [saved, row["percent"], row["half_width"]]
    pattern = (
        "took # % less time than with H=20 (loss # ± # %). "
        "With H=80, the run took # % less time (loss # ± # %)"
    )
    yield Sentence(METHODS, pattern, numbers)
    by_link = {row["ratio"]: row["speed_up"] for row in _summary("fusionllm")}
    assert by_link[10] == 1, "the page says: as fast"
    pattern = "if the uplink is 100 times slower, and # times faster if it is 1,000"
    yield Sentence(METHODS, "# times faster than with fp4 if the uplink", [by_link[100]])
    yield Sentence(METHODS, pattern, [by_link[1000]])
    rows = [row for row in results("claims")["rows"] if row["claim"] == "uneven_parts"]
    steps = {(row["repeat"], row["sites"], row["method"]): row["step"] for row in rows}
    faster = [steps[again, 4, "equal"] / steps[again, 4, "by_bandwidth"] for again in (0, 1)]
    yield Sentence(METHODS, "uneven parts made four sites # and # times faster", faster)
    (large,) = [
        row for row in _summary("drop_compute") if (row["ranks"], row["sigma"]) == (200, 0.2)
    ]
    gain = results("drop_compute")["found"]["gain"]
    pattern = (
        "Eight ranks processed # % more data per second ... For 200 ranks, the computed gain is # %"
    )
    yield Sentence(METHODS, pattern, [100 * gain, 100 * large["gain"]])


def _summary(name: str) -> list[dict[str, Any]]:
    return claims.summary(results("claims")["rows"], name)


def of_backup_workers() -> Iterator[Claim]:
    """Quorums: backup_workers.json."""
    rows = results("backup_workers")["rows"]
    waiting = 100 * rows["federation, waits for all"]["goodput"]
    quorums = [100 * row["goodput"] for name, row in rows.items() if name.endswith("grace=2")]
    late = [row["landing_seconds"] for name, row in rows.items() if name.startswith("one site")]
    pattern = "Goodput is # % if rounds wait for all sites, and # % with grace=2 and either quorum"
    for goodput in quorums:
        yield Sentence(METHODS, pattern, [waiting, goodput])
    yield Sentence(METHODS, "does not delay any landing (# s instead of # s", [late[1], late[0]])

"""Times, bytes, memory and faults that pages quote, with one function for each file of results."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from benchmarks import rivals, slow_links, wire_bytes
from benchmarks.models import Size
from benchmarks.training import parameters
from benchmarks.verify.claims import AtLeast, AtMost, Claim, Expected, Sentence, Table
from benchmarks.verify.results import (
    BENCHMARKS,
    CHOOSING,
    COMPRESSION,
    CRITICAL_PATH,
    INDEX,
    MATRICES,
    PLANNER,
    README,
    headline,
    results,
)

SITES = (2, 4)


def of_rivals() -> Iterator[Claim]:
    """The table of methods: rivals.json."""
    rows = results("rivals")["rows"]
    table: dict[str, list[float]] = {}
    for name, method in rivals.METHODS.items():
        table[method.label] = []
        for sites in method.sites:
            last = _end(name, sites)
            table[method.label] += [last["loss"], last["seconds"], last["bytes"] / 1e6]
    yield Table(BENCHMARKS, ["method", "loss, M=2"], table)
    alone = min(_losses_by_rate(rows, "bare_name"))
    yield Sentence(BENCHMARKS, "H=10 for four sites and matches DDP's loss (#)", [alone])


def of_headline() -> Iterator[Claim]:
    """The headline of the README and the index: rivals.json."""
    ours = _run("bare_name")
    case = ours["case"]
    numel = parameters(Size(**case["size"]))
    link = [ours["mbit_s"], 1000 * rivals.ROUND_TRIP]
    ends = [_seconds_to_target(), _end("ddp")["seconds"]]
    of_torchft = [_end("torchft")["loss"] - _end("ddp")["loss"], _end("torchft")["seconds"]]
    pattern = (
        "DDP's final loss in # s. DDP needs # s, and torchft comes within # of that loss in # s"
    )
    yield Sentence(README, pattern, [*ends, *of_torchft])
    settings = "# parameters, two sites, # Mbit/s, # ms round trip"
    yield Sentence(README, settings, [numel, *link])
    yield Sentence(INDEX, "DDP's final loss in # s instead of # s", ends)
    yield Sentence(INDEX, settings, [numel, *link])
    pattern = "two sites reach DDP's final loss in # s, while DDP needs # s"
    yield Sentence(BENCHMARKS, pattern, ends)
    above = 100 * (_end("bare_name", 4)["loss"] / _end("ddp", 4)["loss"] - 1)
    seconds = [_end(method, 4)["seconds"] for method in ("bare_name", "ddp")]
    pattern = "our final loss is # % above DDP's, but training takes # s instead of # s"
    yield Sentence(BENCHMARKS, pattern, [above, *seconds])
    pattern = "The link carries # Mbit/s with a round trip of # ms, and the model has # parameters"
    yield Sentence(BENCHMARKS, pattern, [*link, numel])
    pattern = "finishes in # s instead of # s, but its final loss is # % above DDP's"
    yield Sentence(README, pattern, [*seconds, above])
    probes = []
    for sites in SITES:
        sent = [_end(method, sites)["bytes"] for method in ("bare_name", "streaming_defaults")]
        probes.append((sent[0] - sent[1]) / 1e6)
    yield Sentence(BENCHMARKS, "at the start of the fit sent # and # MB per rank", probes)
    yield Sentence(
        README, "In the run at the top of this page, that measurement sent # MB", probes[:1]
    )
    assert {_run("bare_name", sites)["told"]["sync_every"] for sites in SITES} == {20}


def of_smaller_measurement() -> Iterator[Claim]:
    """The bare name with smaller messages to measure the link: rivals.json."""
    rows = results("rivals")["rows"]
    two, four = [row for row in rows if row["stage"] == "remeasured"]
    yield Sentence(
        BENCHMARKS, "two sites then sent # MB in total", [two["points"][-1]["bytes"] / 1e6]
    )
    last = four["points"][-1]
    numbers = [four["told"]["sync_every"], last["loss"], last["seconds"]]
    pattern = "Four sites chose H=# and ended at # after # s, of which they waited for # s"
    yield Sentence(BENCHMARKS, pattern, [*numbers, four["told"]["exposed_wait_s"]])


def _losses_by_rate(rows: Any, method: str) -> list[float]:
    """Returns the losses with four sites and no slow link."""
    losses = []
    for row in rows:
        if row["stage"] == "rates" and row["method"] == method and "points" in row:
            losses.append(rivals.final(row))
    return losses


def _run(method: str, sites: int = 2) -> Any:
    return rivals.whole_runs(results("rivals")["rows"], sites)[method]


def _end(method: str, sites: int = 2) -> Any:
    return _run(method, sites)["points"][-1]


def _seconds_to_target() -> float:
    """Returns when ours is as good as DDP at its end, with two sites."""
    seconds = rivals.seconds_to(_run("bare_name"), _end("ddp")["loss"])
    assert seconds is not None, "the page says that it gets there"
    return seconds


def of_slow_links() -> Iterator[Claim]:
    """Steps on slow links: slow_links.json."""
    rows = results("slow_links")["rows"]
    case = rows[0]["case"]
    millions = parameters(Size(**case["size"])) / 1e6
    settings = [millions, case["sync_every"]]
    round_trip = 1000 * slow_links.ROUND_TRIP
    more = headline("slow_links")["4 sites, 30 Mbit/s: best peer's step over ours"]
    pattern = "# Mbit/s, ... takes # times as long as this package (# million parameters, sync_every=#, # ms)"
    yield Sentence(README, pattern, [30, more, *settings, round_trip])
    alone = slow_links.row_of(rows, "alone", 2, None)["seconds"]
    yield Sentence(BENCHMARKS, "Without any exchange, a step takes # ms", [1000 * alone])
    steps = {f"{rate:g}": _steps(rows, rate) for rate in slow_links.RATES if rate}
    yield Table(BENCHMARKS, ["Mbit/s", "ours", "best peer"], steps)
    pattern = (
        "All runs use # million parameters in four fragments, H=#, tau=# and a # ms round trip"
    )
    yield Sentence(BENCHMARKS, pattern, [*settings, case["overlap_steps"], round_trip])
    virtual = [1000 * case["step_seconds"]]
    yield Sentence(BENCHMARKS, "A simulated accelerator takes # ms", virtual)


def of_predictions() -> Iterator[Claim]:
    """The speed that remains, and the planner's: slow_links.json."""
    rows = slow_links.predictions(results("slow_links")["rows"])
    least = min(row["utilisation"] for row in rows if row["fits"])
    yield Sentence(README, "Training keeps at least # % of its speed", [AtLeast(100 * least)])
    yield Sentence(BENCHMARKS, "Training keeps at least # of its speed", [AtLeast(least)])
    planned: dict[str, list[float]] = {}
    for name in ("utilisation", "predicted"):
        for row in rows:
            planned.setdefault(f"{row['mbit_s']:g}", []).append(row[name])
    del planned["1000"]
    yield Table(BENCHMARKS, ["Mbit/s", "measured", "planned"], planned)
    errors = [abs(row["predicted"] / row["utilisation"] - 1) for row in rows]
    errors += [abs(row["simulated"] / row["seconds"] - 1) for row in rows]
    most = [AtMost(100 * max(errors))]
    yield Sentence(
        BENCHMARKS, "Predictions by the planner and the simulator are within # % of", most
    )
    yield Sentence(PLANNER, "utilisations are within # % of measurements", most)
    yield Sentence("docs/simulate.md", "within # % of measurements", most)


def _steps(rows: Any, rate: float) -> list[float]:
    """Returns the milliseconds of a step: ours, the best peer's, and DDP's, each by sites."""
    columns: list[list[float]] = [[], [], []]
    for sites in SITES:
        by_method = {}
        for method in slow_links.METHODS:
            row = slow_links.row_of(rows, method, sites, rate)
            if "seconds" in row:
                by_method[method] = 1000 * row["seconds"]
        columns[0].append(by_method.pop("streaming"))
        columns[1].append(min(by_method.values()))
        columns[2].append(by_method["lightning_ddp"])
    return list(chain.from_iterable(columns))


def of_wire_bytes() -> Iterator[Claim]:
    """Bytes on a link: wire_bytes.json."""
    rows = results("wire_bytes")["rows"]
    ddp = rows["Lightning DDP"]["bytes_per_step"]
    shares = {name: ddp / row["bytes_per_step"] for name, row in rows.items()}
    fp4, fp32, sparse = (shares[name] for name in wire_bytes.OURS)
    yield Sentence(README, "The fp4 scales increase this share to 1/#", [fp4])
    yield Sentence(BENCHMARKS, "With fp4, the link carries 1/# of DDP's bytes", [fp4])
    pattern = 'PowerSGD with rank 2 sends 1/# of DDP\'s bytes, torchft and our fp32 send 1/#, and "sparse" sends 1/#'
    numbers = [shares["DDP, PowerSGD rank 2"], shares["torchft DiLoCo, fp32"], sparse]
    yield Sentence(BENCHMARKS, pattern, numbers)
    assert round(fp32) == 20, "the page says: like torchft"
    over = [100 * (wire_bytes.shares(rows[name])["interface"] - 1) for name in wire_bytes.OURS]
    pattern = "the network interface counts # % more bytes for fp4, # % more for fp32 and # % more for sparse's small"
    yield Sentence(BENCHMARKS, pattern, over)
    assert all(wire_bytes.shares(rows[name])["report"] == 1 for name in wire_bytes.OURS)


def of_overhead() -> Iterator[Claim]:
    """Overhead on a free link: overhead.json."""
    ratios = headline("overhead")
    sizes = results("overhead")["results"]
    numbers = []
    for name, row in sizes.items():
        numbers += [100 * (ratios[f"{name}: wall ratio"] - 1)]
        numbers += [parameters(Size(**row["case"]["size"])) / 1e6]
    numbers += [100 * (ratios[f"{name}: cpu ratio"] - 1) for name in sizes]
    pattern = "adds # % to the step time with # million parameters and # % with # million. It adds # % and # % to"
    yield Sentence(BENCHMARKS, pattern, numbers)
    steps = [1000 * row["plain_step_s"] for row in sizes.values()]
    yield Sentence(
        BENCHMARKS,
        "A plain step takes # ms with the smaller model and # ms with the larger",
        steps,
    )


def of_memory() -> Iterator[Claim]:
    """Memory of a rank: memory.json."""
    rows = results("memory")["memory"]
    numel = max(row["parameters"] for row in rows) / 1e6
    memories = [_memory(name, "100M") for name in ("streaming", "torchft", "lightning_ddp")]
    pattern = "At # million parameters, a rank needs # bytes per parameter, compared with # with torchft and # with DDP"
    yield Sentence(BENCHMARKS, pattern, [numel, *memories])
    for size in {row["size"] for row in rows}:
        is_less = _memory("streaming", size) < _memory("torchft", size)
        assert is_less, "the page says: less than torchft at every size"


def _memory(method: str, size: str) -> float:
    return headline("memory")[f"{method}, {size}: bytes per parameter"]


def of_costs_of_flights() -> Iterator[Claim]:
    """Processor time of a flight: memory.json."""
    extremes = []
    for part in ("launch", "landing", "background"):
        flights = [row for row in results("memory")["flights"] if row["parameters"] > 9e6]
        costs = [headline("memory")[f"{row['name']}: {part}, ns per value"] for row in flights]
        extremes += [min(costs), max(costs)]
    pattern = "spends # to # ns per value on a launch and # to # ns on a landing. The background threads spend # to #"
    yield Sentence(BENCHMARKS, pattern, extremes)


def of_flights() -> Iterator[Claim]:
    """Flights over slow links: flights.json and flights_links.json."""
    numbers = {**headline("flights"), **headline("flights_links")}

    def ratio(sites: str) -> float:
        return numbers[f"{sites}: without_round_trips"]

    def remaining(sites: str) -> float:
        return numbers[f"{sites}: kept"]

    paced = [f"{sites} sites, cubic, paced" for sites in (2, 4, 8)]
    pattern = "Excluding two round trips, a flight takes at most # times as long"
    yield Sentence(BENCHMARKS, pattern, [AtMost(max(map(ratio, paced)))])
    least = [AtLeast(min(map(remaining, paced)))]
    yield Sentence(BENCHMARKS, "training keeps at least # of its speed", least)
    free = "8 sites, cubic, not paced"
    pattern = "eight sites take # times as long as the transfer, and training keeps #"
    yield Sentence(BENCHMARKS, pattern, [ratio(free), remaining(free)])
    with_bbr = [remaining(f"{sites} sites, bbr, paced") for sites in (4, 8)]
    yield Sentence(
        BENCHMARKS,
        "With BBR, training keeps # of its speed with four sites and # with eight",
        with_bbr,
    )
    rows = {str(sites): f"{sites} sites, cubic" for sites in (2, 4, 8)}
    rows["4, round trip of 200 ms"] = "4 sites, round trip of 200 ms"
    rows["2, 1 Gbit/s, 40 MB"] = "2 sites, 1 Gbit/s"
    table = {label: [ratio(f"{name}, {way}") for way in _WAYS] for label, name in rows.items()}
    yield Table(COMPRESSION, ["sites, on 30 Mbit/s unless stated", "not paced", "paced"], table)


_WAYS = ("not paced", "paced")


def of_formats() -> Iterator[Claim]:
    """Bits, errors and speeds of compressions: compression.json and compression_speed.json."""
    errors = results("compression", "docs")["errors"]
    bits = {name: [errors[name]["bits"]] for name in _NAMED}
    yield Table(COMPRESSION, ["name", "bits per value"], bits, columns=1)
    speeds = results("compression_speed", "docs")["headline"]
    rows: dict[str, list[float]] = {}
    for name in _COMPRESSIONS:
        in_sum = results("compression", "docs")["sums"][name]
        rows[name] = [errors[name][_LAST_ROUND]["mean"], in_sum]
        ways = [f"{name}_{way}_of_copy" for way in ("encode", "decode")]
        rows[name] += [speeds[way] for way in ways if way in speeds]
    yield Table(COMPRESSION, ["compression", "error / in sum", "encode", "decode"], rows)
    new_memory = speeds["copy_into_new_memory_of_copy"]
    yield Sentence(COMPRESSION, "which slows even a copy down to #", [new_memory])
    int4 = _heavy_tails(errors["int4"])
    fp4 = _heavy_tails(errors["fp4"])
    pattern = "less accurate on heavy-tailed values (# against # to #)"
    yield Sentence(COMPRESSION, pattern, [min(int4), min(fp4), max(fp4)])


def of_two_shots() -> Iterator[Claim]:
    """The second rounding: exchange.json."""
    errors = results("exchange", "docs")["headline"]
    gathered = errors["fp4, 8 groups: gather"]
    assert abs(errors["fp4, 8 groups: two shots"] - gathered) < 0.0005, "the page says: as in one"
    forgetful = errors["fp4, 8 groups: two shots that forget"]
    pattern = "is off by #, as with one shot. Without this compensation, the sum is off by #"
    yield Sentence(COMPRESSION, pattern, [gathered, forgetful])


_NAMED = (
    *("fp32", "bf16", "int8", "fp8", "fp4", "mxfp4", "int4", "int2"),
    *("sparse", "top_k", "random_k", "random_block"),
)
_LAST_ROUND = "outer, round 24"
_COMPRESSIONS = (
    *("fp32", "bf16", "fp8", "int8", "int4", "fp4", "mxfp4", "int2", "sparse"),
    *("ErrorFeedback(FP4())", "ErrorFeedback(Int2())", "TopK(0.03, Int2())", "RandomK(32, FP4())"),
)


def _heavy_tails(errors: Any) -> list[float]:
    return [errors[name]["relative"] for name in errors if name not in ("bits", _LAST_ROUND)]


def of_directions() -> Iterator[Claim]:
    """The direction of matrices on a CPU: directions.json."""
    shares = headline("directions")
    rows: dict[str, list[Expected]] = {}
    for name, label in _MODELS.items():
        rows[label] = [None, None, 100 * shares[f"{name}, share of a round"]]
    yield Table(CHOOSING, ["parameters, windows a step", "all matrices of a round, ms"], rows)
    svd = [share for name, share in shares.items() if name.endswith("decomposition over ours")]
    muon = [1 / share for name, share in shares.items() if name.endswith("ours over Muon's")]
    pattern = (
        "torch's decomposition takes # to # times as long as ours ... take # to # times as long"
    )
    numbers = [min(svd), max(svd), min(muon), max(muon)]
    yield Sentence(MATRICES, pattern, numbers)


def of_directions_on_gpu() -> Iterator[Claim]:
    """The direction of matrices on a GPU: gpu_directions.json and gpu.json."""
    milliseconds = headline("gpu_directions")
    overheads = results("gpu")["numbers"]
    table = {}
    for name, label in (("125M", "125 million, 8,192"), ("1B", "1 billion, 4,096")):
        directing = milliseconds[f"{name}, direction of all blocks, ms"]
        step = overheads[f"overhead {name}"]["offload=False"]["plain_step_ms"]
        table[label] = [directing, step, directing / step]
    table["6.4 billion"] = [milliseconds["6.4B, direction of all blocks, ms"]]
    yield Table(CHOOSING, ["parameters, tokens a step"], table)
    share = table["1 billion, 4,096"][-1]
    yield Sentence(CHOOSING, "would reduce the share to # % (computed)", [share / 16])


_MODELS = {
    "0.1M": "0.1 million, 1",
    "0.5M": "0.5 million, 2",
    "2M": "2 million, 8",
    "10M": "10 million, 32",
}


def of_gpu() -> Iterator[Claim]:
    """Step time and memory on a GPU: gpu.json."""
    numbers = headline("gpu")
    rows: dict[str, list[float]] = {}
    for label, way in _WAYS_ON_GPU.items():
        rows[label] = []
        for size in ("125M", "1B"):
            rows[label].append(numbers[f"{size}, {way}: step time over plain"])
            rows[label].append(numbers[f"{size}, {way}: extra bytes a parameter"])
    yield Table(BENCHMARKS, ["one group", "125M", "1B"], rows)
    pattern = "With a billion parameters, a step takes # times as long"
    yield Sentence(README, pattern, rows["outer state on the host"][2:3])
    ratios = results("gpu")["numbers"]["overhead 125M"]["offload=True"]["ratios"]
    pattern = "individual measurements with the state on the host vary from # to #"
    yield Sentence(BENCHMARKS, pattern, [min(ratios), max(ratios)])
    shared = "125M, two groups on one device, "
    both = [numbers[f"{shared}{way}: step over plain"] for way in ("streaming", "DDP")]
    pattern = "a step takes # times as long as with two unconnected Trainers. With DDP, a step takes # times"
    yield Sentence(BENCHMARKS, pattern, both)


_WAYS_ON_GPU = {
    "outer state on the host": "offload=True",
    "outer state on the device": "offload=False",
    "DDP": "DDP",
}


def of_checks_on_gpu() -> Iterator[Claim]:
    """Checks and passes over memory on a GPU: gpu.json."""
    ended = results("gpu")["ended"]
    checks = [task for name, task in ended.items() if name.startswith("tests: ")]
    assert all(task["status"] == "done" for task in checks), "the page says: all"
    yield Sentence(BENCHMARKS, "All # checks passed on one NVIDIA H200", [len(checks)])
    numbers = headline("gpu")
    yield Table(CRITICAL_PATH, ["pass"], _rows_of_passes(numbers))
    yield Sentence(CRITICAL_PATH, "share of a copy's # TB/s", [numbers["copy, GB/s"] / 1000])


def _rows_of_passes(numbers: Any) -> dict[str, list[float]]:
    def share(name: str) -> float:
        return float(numbers[f"{name}, share of copy bandwidth"])

    return {
        "launch; landing": [share("launch: outer minus local"), share("landing: merge")],
        "encode fp4; by torch operations": [
            share("encode fp4"),
            share("encode fp4, operations of torch"),
        ],
        "mean of two fp4; by torch operations": [
            share("mean of two fp4"),
            share("mean of two fp4, operations of torch"),
        ],
        "norm; outer step; digest": [share("norm"), share("outer step"), share("digest")],
    }

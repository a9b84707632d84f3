"""Times, bytes, memory and faults that pages quote. One function for each file of results."""

from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import median
from typing import Any

from benchmarks import loss_over_time, slow_links, wire_bytes
from benchmarks.models import Size
from benchmarks.training import parameters
from benchmarks.verify.claims import About, AtLeast, AtMost, Claim, Expected, Sentence, Table
from benchmarks.verify.results import (
    BENCHMARKS,
    CHOOSING,
    COMPRESSION,
    FEDERATION,
    INDEX,
    PLANNER,
    README,
    headline,
    results,
)

SITES = (2, 4)


def of_loss_over_time() -> Iterator[Claim]:
    rows = results("loss_over_time")["rows"]
    best = loss_over_time.best(rows)
    ours = best["streaming_defaults"]
    ddp = best["ddp"]
    torchft = best["torchft"]
    target = loss_over_time.final(ddp)
    seconds = _seconds_to(ours, target)
    last = {method: row["points"][-1] for method, row in best.items()}
    ends = [seconds, last["ddp"]["seconds"]]
    case = ours["case"]
    numel = parameters(Size(**case["size"]))
    link = [numel, case["sync_every"], ours["mbit_s"], 1000 * slow_links.ROUND_TRIP]
    late = loss_over_time.final(torchft) - target
    pattern = "DDP's final loss in # s; DDP needs # s, and torchft comes within # of it in # s"
    yield Sentence(README, pattern, [*ends, late, last["torchft"]["seconds"]])
    pattern = "# parameters, sync_every=#, two sites, # Mbit/s, # ms round trip"
    yield Sentence(README, pattern, link)
    yield Sentence(INDEX, "DDP's final loss in # s in place of # s", ends)
    yield Sentence(INDEX, pattern, link)
    beside = [seconds / last["torchft"]["seconds"]]
    yield Sentence(BENCHMARKS, "a tenth of DDP's time, # of torchft's", beside)
    pattern = "# Mbit/s, # ms round trip, # parameters, # tokens per parameter, sync_every=#"
    tokens = case["steps"] * loss_over_time.SITES * case["batch"] * case["size"]["context"]
    numbers = [*link[2:], numel, tokens / numel, case["sync_every"]]
    yield Sentence(BENCHMARKS, pattern, numbers)
    labels = {
        "streaming_defaults": "Streaming DiLoCo",
        "torchft": "torchft DiLoCo, fp32",
        "ddp": "DDP",
        "ddp_powersgd": "PowerSGD, rank 2, stopped",
    }
    table = {}
    for method, label in labels.items():
        point = last[method]
        table[label] = [point["bytes"] / 1e6, point["seconds"], point["loss"]]
    yield Table(BENCHMARKS, ["method", "MB sent per rank", "seconds"], table)
    yield from _about_ours(rows, ours)
    stopped = best["ddp_powersgd"]
    steps = [stopped["points"][-1]["step"], stopped["steps"]]
    yield Sentence(BENCHMARKS, "PowerSGD was stopped at step # of #", steps)
    (single,) = [row for row in rows if row["method"] == "ddp" and not row["beside"]]
    slower = 100 * (1 - single["step_seconds"] / ddp["step_seconds"])
    yield Sentence(BENCHMARKS, "alone, its steps took # % less", [slower])


def _seconds_to(row: Any, loss: float) -> float:
    seconds = loss_over_time.seconds_to(row, loss)
    assert seconds is not None, "it reaches this loss"
    return seconds


def _about_ours(rows: Sequence[Any], ours: Any) -> Iterator[Claim]:
    told = ours["told"]
    launches = ours["case"]["fragments"] * (ours["steps"] // ours["case"]["sync_every"])
    step = loss_over_time.without_exchange(list(rows)) or 0.0
    flight = 1000 * told["in_flight_s"] / launches
    seconds = ours["points"][-1]["seconds"]
    pattern = "Our run waits # of its # s, because five steps of # ms cannot hide a flight of # ms"
    numbers = [told["exposed_wait_s"], seconds, 1000 * step, flight]
    yield Sentence(BENCHMARKS, pattern, numbers)
    yield Sentence(BENCHMARKS, "Without any exchange it takes # s", [step * ours["steps"]])


def of_slow_links() -> Iterator[Claim]:
    rows = results("slow_links")["rows"]
    predictions = slow_links.predictions(rows)
    kept = min(row["utilisation"] for row in predictions if row["fits"])
    yield Sentence(README, "Training keeps # % of its speed or more", [AtLeast(100 * kept)])
    yield Sentence(BENCHMARKS, "Training keeps # of its speed or more", [AtLeast(kept)])
    case = rows[0]["case"]
    millions = parameters(Size(**case["size"])) / 1e6
    about = [millions, case["sync_every"]]
    round_trip = 1000 * slow_links.ROUND_TRIP
    numbers = headline("slow_links")
    more = numbers["4 sites, 30 Mbit/s: best peer's step over ours"]
    pattern = "# Mbit/s the best peer takes # times as long (# million parameters, sync_every=#, # ms)"
    yield Sentence(README, pattern, [30, more, *about, round_trip])
    single = slow_links.row_of(rows, "alone", 2, None)["seconds"]
    yield Sentence(BENCHMARKS, "with 2 / 4 sites (# without any exchange)", [1000 * single])
    steps = {f"{rate:g}": _steps(rows, rate) for rate in slow_links.RATES if rate}
    yield Table(BENCHMARKS, ["Mbit/s", "ours", "best peer"], steps)
    planned: dict[str, list[float]] = {}
    for name in ("utilisation", "predicted"):
        for row in predictions:
            planned.setdefault(f"{row['mbit_s']:g}", []).append(row[name])
    del planned["1000"]
    yield Table(BENCHMARKS, ["Mbit/s", "measured", "planned"], planned)
    errors = [abs(row["predicted"] / row["utilisation"] - 1) for row in predictions]
    errors += [abs(row["simulated"] / row["seconds"] - 1) for row in predictions]
    most = [AtMost(100 * max(errors))]
    yield Sentence(BENCHMARKS, "Planner and simulator are within # % of", most)
    yield Sentence(PLANNER, "utilisations are within # % of measurements", most)
    yield Sentence("docs/simulate.md", "within # % of measurements", most)
    pattern = "Settings: # million parameters in four fragments, H=#, tau=#, # ms round trip"
    yield Sentence(BENCHMARKS, pattern, [*about, case["overlap_steps"], round_trip])
    virtual = [1000 * case["step_seconds"]]
    yield Sentence(BENCHMARKS, "A virtual accelerator takes # ms", virtual)


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
    rows = results("wire_bytes")["rows"]
    ddp = rows["Lightning DDP"]["bytes_per_step"]
    shares = {name: ddp / row["bytes_per_step"] for name, row in rows.items()}
    fp4, fp32, sparse = (shares[name] for name in wire_bytes.OURS)
    yield Sentence(README, "The scales of fp4 make it 1/#", [fp4])
    yield Sentence(BENCHMARKS, "With fp4, 1/# of DDP's bytes", [fp4])
    pattern = 'PowerSGD of rank 2 sends 1/#; torchft 1/#, like ours in fp32; "sparse" 1/#'
    numbers = [shares["DDP, PowerSGD rank 2"], shares["torchft DiLoCo, fp32"], sparse]
    yield Sentence(BENCHMARKS, pattern, numbers)
    assert round(fp32) == 20, "the page says: like torchft"
    over = [100 * (wire_bytes.shares(rows[name])["interface"] - 1) for name in wire_bytes.OURS]
    pattern = "The network interface counts # % more for fp4, # % for fp32 and # % for the small"
    yield Sentence(BENCHMARKS, pattern, over)
    assert all(wire_bytes.shares(rows[name])["report"] == 1 for name in wire_bytes.OURS)


def of_overhead() -> Iterator[Claim]:
    numbers = headline("overhead")
    sizes = results("overhead")["results"]
    found = []
    for name, row in sizes.items():
        found += [100 * (numbers[f"{name}: wall ratio"] - 1)]
        found += [parameters(Size(**row["case"]["size"])) / 1e6]
    found += [100 * (numbers[f"{name}: cpu ratio"] - 1) for name in sizes]
    pattern = "# % of a step with # million parameters, # % with # million, and # and # % of"
    yield Sentence(BENCHMARKS, pattern, found)
    steps = [1000 * row["plain_step_s"] for row in sizes.values()]
    yield Sentence(BENCHMARKS, "steps take # and # ms", steps)


def of_memory() -> Iterator[Claim]:
    numbers = headline("memory")
    rows = results("memory")["memory"]
    large = {row["method"]: row for row in rows if row["size"] == "100M"}
    names = ("streaming", "torchft", "lightning_ddp")
    memories = [numbers[f"{name}, 100M: bytes per parameter"] for name in names]
    numel = large["streaming"]["parameters"] / 1e6
    pattern = "# bytes per parameter at # million, against # with torchft and # with DDP"
    yield Sentence(BENCHMARKS, pattern, [memories[0], numel, *memories[1:]])
    for size in {row["size"] for row in rows}:
        ours, peer = (numbers[f"{name}, {size}: bytes per parameter"] for name in names[:2])
        assert ours < peer, "the page says: less than torchft at every size"
    extremes = []
    for part in ("launch", "landing", "background"):
        flights = [row for row in results("memory")["flights"] if row["parameters"] > 9e6]
        costs = [numbers[f"{row['name']}: {part}, ns per value"] for row in flights]
        extremes += [min(costs), max(costs)]
    pattern = "spends # to # ns per value at a launch and # to # at a landing, the background # to #"
    yield Sentence(BENCHMARKS, pattern, extremes)


def of_flights() -> Iterator[Claim]:
    """flights.json and flights_links.json."""
    numbers = {**headline("flights"), **headline("flights_links")}

    def ratio(sites: str) -> float:
        return numbers[f"{sites}: without_round_trips"]

    def kept(sites: str) -> float:
        return numbers[f"{sites}: kept"]

    paced = [f"{sites} sites, cubic, paced" for sites in (2, 4, 8)]
    pattern = "less two round trips, takes at most # times as long"
    yield Sentence(BENCHMARKS, pattern, [AtMost(max(map(ratio, paced)))])
    least = [AtLeast(min(map(kept, paced)))]
    yield Sentence(BENCHMARKS, "at least # of the speed remains", least)
    free = "8 sites, cubic, not paced"
    pattern = "eight sites take # times as long and keep #"
    yield Sentence(BENCHMARKS, pattern, [ratio(free), kept(free)])
    with_bbr = [kept(f"{sites} sites, bbr, paced") for sites in (4, 8)]
    yield Sentence(BENCHMARKS, "With BBR, four sites keep # and eight #", with_bbr)
    rows = {str(sites): f"{sites} sites, cubic" for sites in (2, 4, 8)}
    rows["4, round trip of 200 ms"] = "4 sites, round trip of 200 ms"
    rows["2, 1 Gbit/s, 40 MB"] = "2 sites, 1 Gbit/s"
    table = {label: [ratio(f"{name}, {way}") for way in _WAYS] for label, name in rows.items()}
    yield Table(COMPRESSION, ["sites, on 30 Mbit/s unless stated", "not paced", "paced"], table)


_WAYS = ("not paced", "paced")


def of_hub() -> Iterator[Claim]:
    """hub_transport.json, hub_rounds.json and site_steps.json."""
    rows = hub_transport_shares()
    whole = "100 Mbit/s, 100 MB"
    fast = "1000 Mbit/s, 100 MB"
    pattern = "at # of 100 Mbit/s for 100 MB, and # of 1000"
    numbers = [100 * rows[whole], 1000 * rows[fast]]
    yield Sentence(BENCHMARKS, pattern, numbers)
    lossy = "100 Mbit/s, 0.1% lost, 8 connections, 10 MB"
    single = lossy.replace("8 connections", "1 connections")
    iperf3 = 100 * rows[lossy] / headline("hub_transport")[f"{lossy}: of iperf3"]
    pattern = "it is # of 100, against # with iperf3 and # with one connection"
    yield Sentence(BENCHMARKS, pattern, [100 * rows[lossy], iperf3, 100 * rows[single]])
    costs = headline("hub_rounds")

    def cost(kib: int, mean: str, sites: int) -> float:
        return costs[f"{kib} KiB, mean at {mean}, {sites} sites: s of the hub's processor"]

    pattern = "a round of 64 sites costs # s with payloads of"
    yield Sentence(FEDERATION, pattern, [cost(16, "sites", 64)])
    large = [cost(1024, "sites", sites) for sites in (16, 32)]
    large += [cost(1024, "hub", sites) for sites in (16, 32, 64)]
    payload = 100e6 * headline_bits("fp4") / 8
    fetched = 16 * 15 * payload
    numbers = [16 * payload / 1e9, fetched / 1e9, About(fetched * 8 / 1e9), 16 * payload / 1e9]
    pattern = "send # GB every H steps and fetch # GB, # seconds at 1 Gbit/s; with mean=\"hub\" # GB"
    yield Sentence(FEDERATION, pattern, numbers)
    pattern = "16 sites cost # s and 32 cost # s; with mean=\"hub\" # and # s, and 64 sites # s"
    yield Sentence(FEDERATION, pattern, large)
    ratio = headline("site_steps")["step time over that of the fixed world"]
    pattern = "A step in a federation takes # times as long ... median of # rounds ... steps of # ms"
    case = results("site_steps")["case"]
    rounds = len(results("site_steps")["rounds"]["federation"])
    yield Sentence(BENCHMARKS, pattern, [ratio, rounds, 1000 * case["sleep"]])


def headline_bits(compression: str) -> float:
    """Returns the bits per value."""
    return float(results("compression", "docs")["errors"][compression]["bits"])


def hub_transport_shares() -> dict[str, float]:
    """Returns the shares of the link's rate, by link and size."""
    suffix = ": of the link"
    numbers = headline("hub_transport").items()
    return {name.removesuffix(suffix): share for name, share in numbers if name.endswith(suffix)}


def of_chaos() -> Iterator[Claim]:
    found = results("chaos")["runs"]
    faults = [(sum(run["faults"].values()), run["namespaces"]) for run in found]
    returns = [back for run in found for back in run["returns"]]
    records = sum(run["records"] for run in found)
    yield Sentence(BENCHMARKS, "In # records no two sites differed", [records])
    random = sum(count for count, _ in faults)
    behind = sum(count for count, is_behind in faults if is_behind)
    pattern = "met # random kills, stops, moves, and cut or slow links, # of them behind NATs"
    yield Sentence(BENCHMARKS, pattern, [random, behind])
    yield Sentence(FEDERATION, "# random faults on a hub and four sites", [random])
    late = sorted(back["seconds"] for back in returns if not back["state"])
    assert late[-3] <= 3 < late[-2], "the page says: all but two"
    pattern = "all but two of # took at most # s or fetched a state; the two took # s"
    yield Sentence(BENCHMARKS, pattern, [len(returns), AtMost(late[-3]), late[-1]])
    kills = [back["seconds"] for back in returns if back["kind"] == _KILL]
    pattern = "The median after kill -9 of a site is # s"
    yield Sentence(BENCHMARKS, pattern, [median(kills)])
    sites = [site for run in found for site in run["stalls"].values()]
    above = [stall["stalled"] - stall["delayed"] for site in sites for stall in site["above"]]
    usual = max(stall for site in sites if not site["above"] for stall in site["stalls"])
    pattern = "waited at most # s and a step, except for two steps of # and # s"
    yield Sentence(BENCHMARKS, pattern, [AtMost(usual), *above])
    longest = max(pause for run in found for pause in run["pauses"])
    yield Sentence(BENCHMARKS, "without a record, hub and a site up: # s", [longest])


_KILL = "kill -9, and started again (site)"


def of_guard() -> Iterator[Claim]:
    numbers = headline("guard")
    assert numbers["left out"] == 0, "the page says: none was left out"
    pattern = "Of # honest contributions of 2, 3, 5 and 8 groups none was left out"
    yield Sentence(FEDERATION, pattern, [numbers["honest"]])


def of_compression() -> Iterator[Claim]:
    """compression.json, compression_speed.json and exchange.json."""
    found = results("compression", "docs")
    bits: dict[str, list[float]] = {}
    for name in _NAMED:
        bits[name] = [found["errors"][name]["bits"]]
    yield Table(COMPRESSION, ["name", "bits per value"], bits, columns=1)
    speeds = results("compression_speed", "docs")["headline"]
    rows: dict[str, list[float]] = {}
    for name in _COMPRESSIONS:
        rows[name] = [found["errors"][name][_LAST_ROUND]["mean"], found["sums"][name]]
        speed = [speeds.get(f"{name}_{way}_of_copy") for way in ("encode", "decode")]
        rows[name] += [share for share in speed if share is not None]
    yield Table(COMPRESSION, ["compression", "error / in sum", "encode", "decode"], rows)
    yield Sentence(COMPRESSION, "which limits even a copy to #", [speeds["copy_into_new_memory_of_copy"]])
    tails = {name: _heavy_tails(found["errors"][name]) for name in ("int4", "fp4")}
    pattern = "lose on heavy tails (# against # to #)"
    yield Sentence(COMPRESSION, pattern, [min(tails["int4"]), min(tails["fp4"]), max(tails["fp4"])])
    two_shots = results("exchange", "docs")["headline"]
    gathered = two_shots["fp4, 8 groups: gather"]
    forgetful = two_shots["fp4, 8 groups: two shots that forget"]
    pattern = "are off by #, as in one shot; without that memory by #"
    yield Sentence(COMPRESSION, pattern, [gathered, forgetful])
    assert abs(two_shots["fp4, 8 groups: two shots"] - gathered) < 0.0005


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
    """The direction of matrices: directions.json, gpu_directions.json and gpu.json."""
    shares = headline("directions")
    rows: dict[str, list[Expected]] = {}
    for name, label in _MODELS.items():
        rows[label] = [None, None, 100 * shares[f"{name}, share of a round"]]
    yield Table(CHOOSING, ["parameters, windows a step", "all matrices of a round, ms"], rows)
    svd = [share for name, share in shares.items() if name.endswith("decomposition over ours")]
    muon = [1 / share for name, share in shares.items() if name.endswith("ours over Muon's")]
    pattern = "torch's decomposition takes # to # of our time ... take # to # (matrices"
    numbers = [min(svd), max(svd), min(muon), max(muon)]
    yield Sentence(CHOOSING, pattern, numbers)
    on_gpu = headline("gpu_directions")
    steps = results("gpu")["numbers"]
    table: dict[str, list[Expected]] = {}
    for name, label in (("125M", "125 million, 8,192"), ("1B", "1 billion, 4,096")):
        milliseconds = on_gpu[f"{name}, direction of all blocks, ms"]
        step = steps[f"overhead {name}"]["offload=False"]["plain_step_ms"]
        table[label] = [milliseconds, step, milliseconds / step]
    table["6.4 billion"] = [on_gpu["6.4B, direction of all blocks, ms"]]
    yield Table(CHOOSING, ["parameters, tokens a step"], table)
    (share,) = [numbers[-1] for label, numbers in table.items() if label.startswith("1 billion")]
    assert isinstance(share, float)
    yield Sentence(CHOOSING, "would leave # % (computed)", [share / 16])


_MODELS = {
    "0.1M": "0.1 million, 1",
    "0.5M": "0.5 million, 2",
    "2M": "2 million, 8",
    "10M": "10 million, 32",
}


def of_gpu() -> Iterator[Claim]:
    numbers = headline("gpu")
    ways = {
        "outer state on the host": "offload=True",
        "outer state on the device": "offload=False",
        "DDP": "DDP",
    }
    rows: dict[str, list[float]] = {}
    for label, way in ways.items():
        for size in ("125M", "1B"):
            times = numbers[f"{size}, {way}: step time over plain"]
            extra = numbers[f"{size}, {way}: extra bytes a parameter"]
            rows[label] = [*rows.get(label, []), times, extra]
    yield Table(BENCHMARKS, ["one group", "125M", "1B"], rows)
    pattern = "With a billion parameters a step takes # times as long"
    yield Sentence(README, pattern, rows["outer state on the host"][2:3])
    ratios = results("gpu")["numbers"]["overhead 125M"]["offload=True"]["ratios"]
    pattern = "turns with the state on the host vary from # to #"
    yield Sentence(BENCHMARKS, pattern, [min(ratios), max(ratios)])
    yield Table(BENCHMARKS, ["pass"], _rows_of_passes(numbers))
    ended = results("gpu")["ended"]
    passed = [name for name in ended if name.startswith("tests: ")]
    assert all(ended[name]["status"] == "done" for name in passed)
    yield Sentence(BENCHMARKS, "All # checks passed on one NVIDIA H200", [len(passed)])
    copied = numbers["copy, GB/s"] / 1000
    pattern = "share of a copy's # TB/s"
    yield Sentence(BENCHMARKS, pattern, [copied])
    two = "125M, two groups on one device, "
    both = [numbers[f"{two}{way}: step over plain"] for way in ("streaming", "DDP")]
    pattern = "take # times the step of two unconnected Trainers; DDP takes # times"
    yield Sentence(BENCHMARKS, pattern, both)


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

"""The benchmarks run, write down what they found, and count what they say they count; and so do their slow links."""

import importlib
import json
import math
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the pictures of the benchmarks need matplotlib")

from benchmarks import flights, loss_over_time, slow_links, training, wire_bytes
from benchmarks.links import Links, missing
from benchmarks.models import TINY
from benchmarks.picture import for_dark_pages
from benchmarks.sampler import peak
from benchmarks.sites import Job
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES

IMAGES = Path(__file__).parents[2] / "docs" / "images"

SLOW = pytest.mark.slow
NETWORK = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def quick(name: str, folder: Path) -> dict[str, Any]:
    """Runs a benchmark as little as shows that it runs, and returns the file of results."""
    (folder / name).mkdir()
    results, picture = folder / name / "results.json", folder / name / "picture.svg"
    importlib.import_module(f"benchmarks.{name}").main(["--quick", "--json", str(results), "--picture", str(picture)])
    assert ET.parse(picture).getroot().tag.endswith("svg")
    content: dict[str, Any] = json.loads(results.read_text())
    return content


@pytest.mark.parametrize("name", ["overhead", "memory", "quality", pytest.param("finetuning", marks=SLOW)])
def test_a_benchmark_runs_and_writes_numbers_with_where_and_when(name: str, tmp_path: Path) -> None:
    content = quick(name, tmp_path)
    assert content["headline"], "there are numbers"
    assert all(math.isfinite(number) for number in content["headline"].values())
    assert content["measured"]["command"] == f"python -m benchmarks.{name} --quick"
    assert {"date", "processor", "cores", "python", "torch", "lightning"} <= content["measured"].keys()


@pytest.mark.network
@NETWORK
def test_a_flight_takes_longer_than_its_bytes_and_parts_and_at_least_a_round_trip_for_each_hop(tmp_path: Path) -> None:
    (found,) = quick("flights", tmp_path)["found"].values()
    assert "<!-- paced -->" in (tmp_path / "flights" / "picture.svg").read_text()
    case = flights.Case(**found["case"])
    # Two shots among three groups: four thirds of a payload, and a control vector to each of the two others.
    padded = 3 * -(-case.values // 3)
    sent = 4 / 3 * 4 * padded + 2 * CONTROL_BYTES
    assert found["bytes_alone"] == pytest.approx(case.on_link(sent))
    # Emulated links delay a packet by no less than they should, and machines that are busy by more.
    assert min(found["flights"]) > found["bytes_alone"] + case.round_trip
    assert found["flight"] > found["parts"]["transfer"]
    assert found["ratio"] == pytest.approx(found["flight"] / (found["bytes_alone"] + 2 * case.round_trip))
    assert found["step"] > case.step_seconds
    assert found["kept"] == pytest.approx(found["unshaped_step"] / found["step"])


@pytest.mark.slow
@pytest.mark.network
@NETWORK
def test_over_slow_links_ours_keeps_its_speed_learns_the_same_and_sends_what_it_reports(tmp_path: Path) -> None:
    content = quick("slow_links", tmp_path)
    ours, ddp = (slow_links.row_of(content["rows"], method, 2, 10) for method in ("streaming", "lightning_ddp"))
    # 0.28 MB over 10 Mbit/s take 0.22 s, four steps of it: what ours sends is nothing beside that.
    assert ddp["seconds"] > 0.2
    assert ours["bytes"] < ddp["bytes"] / 50
    assert content["headline"]["2 sites, 10 Mbit/s: best peer's step over ours"] > 0

    rows = {row["method"]: row for row in quick("loss_over_time", tmp_path)["rows"]}
    text = training.Text(TINY, loss_over_time.VALIDATION_WINDOWS)
    for method, choices in (("ddp", None), ("streaming_defaults", {"sync_every": 10})):
        case, points = rows[method]["case"], rows[method]["points"]
        budget = case["steps"] * 2 * case["batch"] * TINY.context / training.parameters(TINY)
        in_one_process = training.Training(TINY, choices, budget=budget, lr=case["lr"])
        assert points[-1]["loss"] == pytest.approx(text.loss(training.trained(in_one_process, text)), abs=1e-4)
        assert [point["step"] for point in points] == [5, 10, 15, 20]
        assert 0 < points[0]["seconds"] < points[-1]["seconds"]
    assert rows["streaming_defaults"]["step_seconds"] < rows["ddp"]["step_seconds"]

    numbers = quick("wire_bytes", tmp_path)["headline"]
    for name in wire_bytes.OURS:
        assert numbers[f"{name}: report over arithmetic"] == 1
        assert numbers[f"{name}: interface over arithmetic"] >= 1


def test_the_arithmetic_of_slow_links() -> None:
    case = slow_links.CASE
    streaming = slow_links.plan(case, 2)
    modules = [sum(p.numel() for part in fragment for p in part.parameters()) for fragment in case.modules(case.net())]
    assert list(streaming.numels) == modules, "all methods cut the model into the same fragments"
    # A link suffices if a fragment fits in tau steps and all fit in a round.
    span = case.overlap_steps * case.step_seconds
    fragment = 8 * max(modules) * 4.125 / 8 / 1e6 / (span - slow_links.ROUND_TRIP)
    least = max(fragment, 8 * sum(modules) * 4.125 / 8 / 1e6 / (case.sync_every * case.step_seconds))
    assert slow_links.fits(streaming, case, 1.01 * least)
    assert not slow_links.fits(streaming, case, 0.99 * least)
    for job in slow_links.jobs(quick=False):
        assert Job.read(json.dumps(asdict(job))) == job
        in_rounds = job.method in ("streaming", "torchft", "post_local_sgd", "accelerate")
        assert not in_rounds or job.counted % job.case.sync_every == 0, "they are measured over whole rounds"
    # The peak is that of the busiest tenth of a second.
    steady = [(0.01 * tick, 1000 * tick) for tick in range(100)]
    burst = [(at, sent + (50_000 if at > 0.5 else 0)) for at, sent in steady]
    assert peak(steady) == pytest.approx(100_000, rel=0.11)
    assert peak(burst) == pytest.approx(600_000, rel=0.05)
    assert peak(burst, since=0.6) == pytest.approx(100_000, rel=0.11)


def test_every_picture_is_there_for_a_dark_page(tmp_path: Path) -> None:
    pictures = [path for path in IMAGES.glob("benchmark-*.svg") if not path.stem.endswith("-dark")]
    assert pictures
    for path in pictures:
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        assert for_dark_pages(copy).read_text() == path.with_stem(f"{path.stem}-dark").read_text()


GET = """
import socket, sys, time, urllib.request
start = time.monotonic()
socket.create_connection((sys.argv[1], 7000), timeout=1.0).close()
round_trip = time.monotonic() - start
nbytes = len(urllib.request.urlopen(f"http://{sys.argv[1]}:7000/file", timeout=30).read())
print(round_trip, time.monotonic() - start, nbytes, socket.gethostname())
"""


@pytest.mark.network
@NETWORK
def test_a_link_is_as_slow_as_asked_is_cut_and_healed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    with Links(sites=2, rate=40e6, one_way_delay=0.03) as links:
        words = [sys.executable, "-m", "http.server", "7000", "--directory", str(tmp_path)]
        servers = [links.start(site, words, stderr=subprocess.DEVNULL) for site in (0, 1)]

        def got(site: int, other: int) -> list[str]:
            """What a site tells of the file of another one: nothing where it does not reach that."""
            words = links.command(site, [sys.executable, "-c", GET, f"site{other}"])
            return subprocess.run(words, check=False, capture_output=True, text=True, timeout=60).stdout.split()

        deadline = time.monotonic() + 30
        while not (got(0, 1) and got(1, 0)):
            assert time.monotonic() < deadline
        round_trip, seconds, nbytes, host = got(1, 0)
        assert float(round_trip) >= 0.06
        assert float(seconds) >= 1_000_000 * 8 / 40e6
        assert (nbytes, host) == ("1000000", "site1")
        links.change(1, cut_in=True)
        assert not got(1, 0)
        links.change(1, cut_in=False, nat=True)
        assert (bool(got(1, 0)), bool(got(0, 1))) == (True, False), "a NAT lets only answers in"
        for server in servers:
            server.kill()
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(name in left for name in links.names)

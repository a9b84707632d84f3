"""The benchmarks run, write down what they found, and count what they say they count."""

import importlib
import json
import math
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib", reason="the pictures of the benchmarks need matplotlib")

from benchmarks import finetuning, flights, loss_over_time, slow_links, training, wire_bytes
from benchmarks.links import missing
from benchmarks.models import TINY
from benchmarks.picture import for_dark_pages
from benchmarks.sampler import peak
from benchmarks.sites import Job
from lightning_sdiloco import SimulatedGroups
from lightning_sdiloco.algorithm import CONTROL_BYTES

IMAGES = Path(__file__).parents[2] / "docs" / "images"

SLOW = pytest.mark.slow
NETWORK = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def quick(module: ModuleType, folder: Path) -> dict[str, Any]:
    """Runs a benchmark as little as shows that it runs, and returns the file of results."""
    results, picture = folder / "results.json", folder / "picture.svg"
    module.main(["--quick", "--json", str(results), "--picture", str(picture)])
    assert ET.parse(picture).getroot().tag.endswith("svg")
    content: dict[str, Any] = json.loads(results.read_text())
    return content


@pytest.mark.parametrize("name", ["overhead", "memory", "quality", pytest.param("finetuning", marks=SLOW)])
def test_a_benchmark_runs_and_writes_numbers_with_where_and_when(name: str, tmp_path: Path) -> None:
    content = quick(importlib.import_module(f"benchmarks.{name}"), tmp_path)
    assert content["headline"], "there are numbers"
    assert all(math.isfinite(number) for number in content["headline"].values())
    assert content["measured"]["command"] == f"python -m benchmarks.{name} --quick"
    assert {"date", "processor", "cores", "python", "torch", "lightning"} <= content["measured"].keys()


@pytest.mark.network
@NETWORK
def test_a_flight_takes_longer_than_its_bytes_and_parts_and_at_least_a_round_trip_for_each_hop(tmp_path: Path) -> None:
    path, picture = tmp_path / "results.json", tmp_path / "flights.svg"
    flights.main(["--quick", "--json", str(path), "--picture", str(picture)])
    assert "<!-- paced -->" in picture.read_text()
    (found,) = json.loads(path.read_text())["found"].values()
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
def test_ours_keeps_its_speed_on_a_slow_link_where_ddp_does_not(tmp_path: Path) -> None:
    content = quick(slow_links, tmp_path)
    rows = content["rows"]
    ours, ddp = (slow_links.row_of(rows, method, 2, 10) for method in ("streaming", "lightning_ddp"))
    # 0.28 MB over 10 Mbit/s take 0.22 s, four steps of it: what ours sends is nothing beside that.
    assert ddp["seconds"] > 0.2
    assert ours["bytes"] < ddp["bytes"] / 50
    assert content["headline"]["2 sites, 10 Mbit/s: best peer's step over ours"] > 0


@pytest.mark.slow
@pytest.mark.network
@NETWORK
def test_what_is_learned_over_a_link_is_what_is_learned_in_one_process(tmp_path: Path) -> None:
    content = quick(loss_over_time, tmp_path)
    rows = {row["method"]: row for row in content["rows"]}
    text = training.Text(TINY, loss_over_time.VALIDATION_WINDOWS)
    for method, choices in (("ddp", None), ("streaming_defaults", {"sync_every": 10})):
        case, points = rows[method]["case"], rows[method]["points"]
        budget = case["steps"] * 2 * case["batch"] * TINY.context / training.parameters(TINY)
        alike = training.Training(TINY, choices, budget=budget, lr=case["lr"])
        assert points[-1]["loss"] == pytest.approx(text.loss(training.trained(alike, text)), abs=1e-4)
        assert [point["step"] for point in points] == [5, 10, 15, 20]
        assert 0 < points[0]["seconds"] < points[-1]["seconds"]
    assert rows["streaming_defaults"]["step_seconds"] < rows["ddp"]["step_seconds"]


@pytest.mark.slow
@pytest.mark.network
@NETWORK
def test_what_is_reported_is_what_the_arithmetic_says_and_the_interface_sent_no_less(tmp_path: Path) -> None:
    content = quick(wire_bytes, tmp_path)
    numbers = content["headline"]
    for name in wire_bytes.OURS:
        assert numbers[f"{name}: report over arithmetic"] == 1
        assert numbers[f"{name}: interface over arithmetic"] >= 1


def test_of_a_model_with_adapters_only_these_are_trained_and_exchanged() -> None:
    one = next(one for one in finetuning.quick_trainings() if one.choices and one.lora_rank)
    before, after = one.model().state_dict(), training.trained(one, one.text()).state_dict()
    changed = {name for name, values in before.items() if not torch.equal(values, after[name])}
    assert changed == {name for name in before if name.endswith((".down", ".up"))}
    groups = SimulatedGroups([one.model(), one.model()], **one.choices)
    assert {name for fragment in groups.engines[0].fragments for name in fragment.names} == changed


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
        if job.method in ("streaming", "torchft", "post_local_sgd", "accelerate"):
            assert job.counted % job.case.sync_every == 0, (
                "methods that exchange in rounds are measured over whole ones"
            )
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

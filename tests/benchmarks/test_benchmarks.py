"""The benchmarks run, write down their numbers, and count correctly; and so do their slow links.

Trainings for loss and in virtual time: each does what its name says, and is made once, in pieces
that fit.
"""

import importlib
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import count, islice
from math import inf, isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib", reason="the pictures of the benchmarks need matplotlib")

from benchmarks import (
    experts,
    federated,
    finetuning,
    flights,
    memory,
    paper,
    pictures,
    quality,
    rivals,
    runs,
    scaling,
    shipped,
    slow_links,
    training,
    vision,
    wire_bytes,
)
from benchmarks.backup_workers import (
    BACKUP,
    Case,
    Play,
    goodput_at_most,
    goodput_of_all,
    wait_for_all,
)
from benchmarks.comparison import Comparison
from benchmarks.links import Links, missing
from benchmarks.methods import claims, computed, named, small
from benchmarks.methods.trained import MOST_DROPPED
from benchmarks.models import TINY
from benchmarks.picture import for_dark_pages
from benchmarks.runs import Runs
from benchmarks.sampler import peak
from benchmarks.sites import Job
from benchmarks.training import Loop, NamedTraining, Training, made
from lightning_sdiloco import SimulatedGroups
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES
from tests.scripts import ROOT

IMAGES = ROOT / "docs" / "images"

NETWORK = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SHIPPED = pytest.mark.skipif(
    not all(map(find_spec, ("rxnmapper", "chemicals", "peft", "transformers"))),
    reason="needs the packages of benchmarks.shipped",
)


def quick(name: str, folder: Path) -> dict[str, Any]:
    """Runs a benchmark with as little as shows that it runs, and returns the file of results."""
    (folder / name).mkdir()
    results = folder / name / "results.json"
    picture = folder / name / "picture.svg"
    benchmark = importlib.import_module(f"benchmarks.{name}")
    benchmark.main(["--quick", "--json", str(results), "--picture", str(picture)])
    assert ET.parse(picture).getroot().tag.endswith("svg")
    return dict(json.loads(results.read_text()))


@pytest.mark.parametrize(
    "name",
    [
        "overhead",
        "memory",
        "quality",
        "paper",
        pytest.param("experts", marks=pytest.mark.slow),
        pytest.param("finetuning", marks=pytest.mark.slow),
        pytest.param("shipped", marks=SHIPPED),
    ],
)
def test_a_benchmark_runs_and_writes_numbers_with_where_and_when(name: str, tmp_path: Path) -> None:
    content = quick(name, tmp_path)
    numbers = content["headline"].values()
    assert numbers
    assert all(isfinite(number) for number in numbers)
    measured = content["measured"]
    assert measured["command"] == f"python -m benchmarks.{name} --quick"
    assert {"date", "processor", "cores", "python", "torch", "lightning"} <= measured.keys()


@pytest.mark.slow
def test_sites_train_what_groups_train(tmp_path: Path) -> None:
    file = tmp_path / "federated.json"
    federated.main(["--quick", "--json", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert row["sites"] == 4
    groups, _ = quality.alone(federated.SIZE, 4, quality.HELD_OUT[0], sync_every=None)
    text = groups.text()
    loop = Loop(replace(groups, budget=federated.QUICK_BUDGET), text)
    loop.run()
    outer = groups.model()
    outer.load_state_dict(loop.engines[0].outer_state_dict())
    # Sites end with their last round, and groups with a mean of their models.
    assert text.loss(loop.finish()) < row["loss"] < text.loss(outer)


def test_a_slower_link_takes_the_dense_beginning_and_then_longer_rounds() -> None:
    choices = [quality.chosen_for_link("0.1M", 8, step_times) for step_times in quality.LINKS]
    assert [choice.sync_every for choice in choices] == [10, 10, 20]
    assert [choice.dense is not None for choice in choices] == [True, False, False]
    assert max(choice.waits for choice in choices) < 0.01
    four = [quality.chosen_for_link("0.1M", 4, step_times) for step_times in quality.LINKS]
    assert [choice.sync_every for choice in four] == [10, 10, 20]


def test_a_vision_model_with_batchnorm_is_judged_in_groups_and_with_ddp(tmp_path: Path) -> None:
    assert sum(p.numel() for p in vision.resnet8(0).parameters()) == 77_850
    file = tmp_path / "vision.json"
    vision.main(["--quick", "--json", str(file)])
    results = json.loads(file.read_text())["found"]
    assert results.keys() == {"DDP", "worker groups"}
    # With ten classes a model that has learned nothing has 90 % of them wrong, and one that
    # diverged has no finite loss.
    for loss, error in [*results["DDP"], *results["worker groups"]]:
        assert isfinite(loss)
        assert 0 < error <= 100
    assert results["DDP"] != results["worker groups"]


@pytest.mark.large
def test_a_group_adds_eight_bytes_a_parameter_and_a_flight_to_a_plain_fit() -> None:
    # Eight for outer parameters and momentum, three for the fragment in flight, and some that the
    # allocator keeps, which differ between runs by half a byte.
    added = []
    for _ in range(3):
        alone, streaming = memory.memory(
            {"10M": memory.SIZES["10M"]}, ["lightning_alone", "streaming"]
        )
        if not alone["memory"]:
            pytest.skip("This system does not say how much memory a process has.")
        added.append((streaming["memory"] - alone["memory"]) / alone["parameters"])
        if added[-1] < 14.5:
            return
    raise AssertionError(f"bytes a parameter in three runs: {added}")


@pytest.mark.network
@NETWORK
def test_a_flight_outlasts_its_bytes_its_parts_and_a_round_trip_for_each_hop(
    tmp_path: Path,
) -> None:
    (row,) = quick("flights", tmp_path)["found"].values()
    assert "<!-- paced -->" in (tmp_path / "flights" / "picture.svg").read_text()
    case = flights.Case(**row["case"])
    # Two shots among three groups: four thirds of a payload, and a control vector to each of the
    # two others.
    values_in_three_parts = 3 * -(-case.values // 3)
    sent = 4 / 3 * 4 * values_in_three_parts + 2 * CONTROL_BYTES
    assert row["bytes_alone"] == pytest.approx(case.on_link(sent))
    # Emulated links delay a packet by no less than they should, and busy machines by more.
    assert min(row["flights"]) > row["bytes_alone"] + case.round_trip
    assert row["flight"] > row["parts"]["transfer"]
    two_hops = row["bytes_alone"] + 2 * case.round_trip
    assert row["ratio"] == pytest.approx(row["flight"] / two_hops)
    assert row["step"] > case.step_seconds
    assert row["kept"] == pytest.approx(row["unshaped_step"] / row["step"])


@pytest.mark.slow
@pytest.mark.network
@NETWORK
def test_training_over_slow_links_keeps_its_speed_learns_alike_and_reports_its_bytes(
    tmp_path: Path,
) -> None:
    content = quick("slow_links", tmp_path)
    streaming = slow_links.row_of(content["rows"], "streaming", 2, 10)
    ddp = slow_links.row_of(content["rows"], "lightning_ddp", 2, 10)
    # 0.28 MB over 10 Mbit/s take 0.22 s, four steps; streaming sends almost nothing beside that.
    assert ddp["seconds"] > 0.2
    assert streaming["bytes"] < ddp["bytes"] / 50
    assert content["headline"]["2 sites, 10 Mbit/s: best peer's step over ours"] > 0

    rows = rivals.whole_runs(quick("rivals", tmp_path)["rows"], sites=2)
    require_loss_of_one_process(rows["ddp"], None)
    require_loss_of_one_process(rows["streaming_defaults"], {"sync_every": 10})
    ends = {method: row["points"][-1] for method, row in rows.items()}
    assert ends["streaming_defaults"]["seconds"] < ends["ddp"]["seconds"]

    numbers = quick("wire_bytes", tmp_path)["headline"]
    for name in wire_bytes.OURS:
        assert numbers[f"{name}: report over arithmetic"] == 1
        assert numbers[f"{name}: interface over arithmetic"] >= 1


def require_loss_of_one_process(row: dict[str, Any], choices: dict[str, Any] | None) -> None:
    """The last loss over slow links is that of a training of all groups in one process."""
    case = row["case"]
    points = row["points"]
    budget = case["steps"] * 2 * case["batch"] * TINY.context / training.parameters(TINY)
    if choices is not None:
        # A Trainer knows how few rounds there are, and groups in one process do not.
        settings = Settings(**choices, outer_optimizer=quality.ELEMENTWISE)
        chosen = settings.chosen_for(2, case["steps"] // settings.sync_every)
        choices = {**choices, **chosen.numbers}
    in_one_process = Training(TINY, choices, budget=budget, lr=case["lr"])
    text = training.Text(TINY, rivals.VALIDATION_WINDOWS)
    loss = text.loss(training.trained(in_one_process, text))
    assert points[-1]["loss"] == pytest.approx(loss, abs=1e-4)
    assert [point["step"] for point in points] == [5, 10, 15, 20]
    assert 0 < points[0]["seconds"] < points[-1]["seconds"]


def numel(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_a_link_suffices_if_a_fragment_fits_in_its_overlap_and_all_fit_in_a_round() -> None:
    case = slow_links.CASE
    streaming = slow_links.plan(case, 2)
    fragments = [sum(map(numel, modules)) for modules in case.modules(case.net())]
    assert list(streaming.numels) == fragments, "all methods cut the model into the same fragments"
    mbit_a_value = 8 * 4.125 / 8 / 1e6
    overlap = case.overlap_steps * case.step_seconds
    for_a_fragment = max(fragments) * mbit_a_value / (overlap - slow_links.ROUND_TRIP)
    for_a_round = sum(fragments) * mbit_a_value / (case.sync_every * case.step_seconds)
    least = max(for_a_fragment, for_a_round)
    assert slow_links.fits(streaming, case, 1.01 * least)
    assert not slow_links.fits(streaming, case, 0.99 * least)


def test_jobs_of_slow_links_are_read_as_written_and_count_whole_rounds() -> None:
    for job in slow_links.jobs(quick=False):
        assert Job.read(json.dumps(asdict(job))) == job
        if job.method in ("streaming", "torchft", "post_local_sgd", "accelerate"):
            assert job.counted % job.case.sync_every == 0


def test_the_peak_is_that_of_the_busiest_tenth_of_a_second() -> None:
    steady = [(0.01 * tick, 1000 * tick) for tick in range(100)]
    burst = [(time, sent + (50_000 if time > 0.5 else 0)) for time, sent in steady]
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


def written_in(picture: Path) -> set[str]:
    """The words in a picture: titles, labels and legends."""
    return {text for text in re.findall("<!-- (.*?) -->", picture.read_text()) if text[0].isalpha()}


def test_the_pictures_of_the_pages_show_the_numbers_that_the_docs_keep(tmp_path: Path) -> None:
    assert {f"benchmark-{name}" for name in pictures.PICTURES} == {
        path.stem for path in IMAGES.glob("benchmark-*.svg") if not path.stem.endswith("-dark")
    }
    for name in ("flights", "gpu", "memory", "rivals", "rivals-bytes", "overhead", "wire-bytes"):
        drawn = tmp_path / f"{name}.svg"
        pictures.PICTURES[name](drawn)
        assert written_in(drawn) == written_in(IMAGES / f"benchmark-{name}.svg"), name


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
def test_a_link_is_as_slow_as_asked_is_cut_and_healed_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    with Links(sites=2, rate=40e6, one_way_delay=0.03) as links:
        serve = [sys.executable, "-m", "http.server", "7000", "--directory", str(tmp_path)]
        servers = [links.start(site, serve, stderr=subprocess.DEVNULL) for site in (0, 1)]

        def fetched(site: int, server: int) -> list[str]:
            """The words that a site prints about the file of another; none if it does not reach
            it.
            """
            command = links.command(site, [sys.executable, "-c", GET, f"site{server}"])
            process = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=60
            )
            return process.stdout.split()

        deadline = time.monotonic() + 30
        while not (fetched(0, 1) and fetched(1, 0)):
            assert time.monotonic() < deadline
        round_trip, seconds, nbytes, host = fetched(1, 0)
        assert float(round_trip) >= 0.06
        assert float(seconds) >= 1_000_000 * 8 / 40e6
        assert nbytes == "1000000"
        assert host == "site1"
        links.change(1, cut_in=True)
        assert not fetched(1, 0)
        # A NAT lets only answers in.
        links.change(1, cut_in=False, nat=True)
        assert fetched(1, 0)
        assert not fetched(0, 1)
        for server in servers:
            server.kill()
    namespaces = subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True
    ).stdout
    assert not any(name in namespaces for name in links.names)


OURS, DDP = quality.pair("tiny", sync_every=10)


def test_a_training_in_pieces_is_bit_identical_to_one_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = replace(OURS, inner="muon", budget=0.6 * OURS.budget)
    uninterrupted_loss = made(interrupted)["loss"]
    path = tmp_path / "runs.json"
    pieces = 0
    # Every look at the clock takes a second, so that pieces end with fragments in flight.
    ticks = count()
    monkeypatch.setattr(training.time, "time", lambda: next(ticks))
    while Runs("test", path).get(interrupted) is None:
        Runs("test", path).make([interrupted], 1, minutes=10 / 60)
        pieces += 1
    assert pieces > 1
    assert Runs("test", path)[interrupted]["loss"] == uninterrupted_loss
    assert list(tmp_path.iterdir()) == [path], "no state is left"


def test_trainings_begin_until_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds_begun: list[int] = []

    def make(training: Training, *args: Any) -> dict[str, Any]:
        seeds_begun.append(training.seed)
        return {**training.key(), "loss": 2.0, "seconds": 40.0}

    monkeypatch.setattr(runs, "made", make)
    monkeypatch.setattr(runs.time, "time", lambda: 40.0 * len(seeds_begun))
    trainings = [replace(DDP, seed=seed) for seed in range(4)]
    path = tmp_path / "runs.json"
    # The third begins after 80 of 84 seconds: its state would be kept.
    Runs("test", path).make(trainings, 1, minutes=1.4)
    assert seeds_begun == [0, 1, 2]
    # Trainings of the file are not made again.
    Runs("test", path).make(trainings, 1, minutes=inf)
    assert seeds_begun == [0, 1, 2, 3]


def test_predictions_of_two_laws_are_drawn_beside_the_strategys_own_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The predictions are for small models."""
    losses = [round(scaling.by_losses(groups, 114_336), 1) for groups in scaling.LAWS]
    assert losses == [1.6, 4.2, 7.7]
    gaps = [round(scaling.by_gap(groups, 114_336)) for groups in scaling.LAWS]
    assert gaps == [7, 26, 23]
    scaling.main(["--picture", str(tmp_path / "scaling.svg")])
    assert (tmp_path / "scaling-dark.svg").exists()
    printed = capsys.readouterr().out
    for groups in (2, 4, 8):
        assert f"114,336 | {groups} |" in printed


def test_a_claim_of_the_paper_is_judged_by_the_whole_interval() -> None:
    # With one seed, and where the interval holds both signs, it is open.
    for percents in ([3.0], [-4.0, 5.0]):
        assert paper.verdict(percents, True) == "open"
        assert paper.verdict(percents, False) == "open"
    worse = [4.0, 4.1, 4.2]
    assert paper.verdict(worse, True) == "agrees"
    assert paper.verdict(worse, False) == "disagrees"
    better = [-4.0, -4.1, -4.2]
    assert paper.verdict(better, True) == "disagrees"
    assert paper.verdict(better, False) == "agrees"


def test_a_claim_of_the_paper_is_judged_on_runs_that_are_kept() -> None:
    five_seeds, two_seeds = paper.made_before()
    (claim,) = [claim for claim in paper.ABLATIONS["groups"].claims if claim.first == "4"]
    row = paper.judged("groups", claim, five_seeds)
    assert row is not None
    assert row[2:] == ["5", "+9.4 ± 3.6", "agrees"]
    assert paper.judged("groups", claim, two_seeds) is None, "no verdict without runs"
    comparisons_of_tau = paper.above_ddp(two_seeds)["tau"]
    assert [comparison.name for comparison in comparisons_of_tau] == ["5", "10"]


def test_every_factor_changes_one_thing_of_the_base_which_is_among_its_values() -> None:
    base = replace(paper.ONE, choices=paper.BASE)
    for factor, ablation in paper.ABLATIONS.items():
        trainings = [paper.small_pair(paper.ONE, factor, value, 0)[0] for value in ablation.values]
        assert base in trainings or factor == "cut"
        keys = {json.dumps(training.key(), sort_keys=True) for training in trainings}
        assert len(keys) == len(trainings)


def test_the_verdict_is_about_numbers_on_seeds_that_chose_nothing() -> None:
    verdict = quality.STAGES["verdict"]
    for pairs in quality.planned(verdict, verdict.sizes, None, "cpu").values():
        assert len(pairs) == 5
        ours, ddp = pairs[0]
        assert replace(ours, choices=None, lr=ddp.lr) == ddp
        assert "auto" not in (ours.choices or {}).values(), "a run is that of its numbers"
        assert ours.seed not in quality.TUNING
        assert quality.has_enough_rounds(pairs)


def test_each_of_a_pair_is_compared_at_its_best_learning_rate() -> None:
    comparisons = [
        Comparison(
            quality.at_rate("M=2", rate), [{"seed": 0, "loss": ours}], [{"seed": 0, "loss": ddp}]
        )
        for rate, ours, ddp in ((1e-3, 2.0, 1.9), (3e-3, 1.8, 2.1))
    ]
    assert quality.each_at_its_best(comparisons)[0].nats == pytest.approx([-0.1])


def test_of_a_model_with_adapters_only_these_are_trained_and_exchanged() -> None:
    tuning = next(
        training
        for training in finetuning.quick_trainings()
        if training.choices and training.lora_rank
    )
    initial = tuning.model().state_dict()
    tuned = training.trained(tuning, tuning.text()).state_dict()
    changed = {name for name in initial if not torch.equal(initial[name], tuned[name])}
    assert changed == {name for name in initial if name.endswith((".down", ".up"))}
    groups = SimulatedGroups([tuning.model(), tuning.model()], **tuning.choices)
    exchanged: set[str] = set()
    for fragment in groups.engines[0].fragments:
        exchanged.update(fragment.names)
    assert exchanged == changed


def test_molecules_are_chosen_by_their_tokens_and_padded_to_equal_lengths() -> None:
    numbers = {"C": 16, "Cl": 28, "[nH]": 40}
    strings = ["C" * 23 + "Cl", "C" * 23 + "Cl", "C" * 23, "C" * 41, "C" * 23 + "Br", "[nH]" * 40]
    rows = shipped.rows_of(strings, numbers)
    short = [shipped.BEGIN, *[16] * 23, 28, shipped.END, *[shipped.PAD] * 16]
    assert rows.tolist() == [short, [shipped.BEGIN, *[40] * 40, shipped.END]]


def test_masks_hide_five_tokens_of_each_molecule_which_are_the_only_targets() -> None:
    rows = shipped.rows_of(["C" * 24, "C" * 40, "CO" * 15], {"C": 16, "O": 19})
    tokens, targets = shipped.masked(rows, torch.Generator().manual_seed(0))
    hidden = tokens == shipped.MASK
    assert hidden.sum(1).tolist() == [shipped.MASKED] * 3
    assert torch.equal(targets != shipped.IGNORED, hidden)
    assert torch.equal(torch.where(hidden, targets, tokens), rows)


def test_groups_and_ddp_see_the_same_molecules_with_the_same_masks() -> None:
    rows = shipped.rows_of(["C" * length for length in range(24, 41)], {"C": 16})
    molecules = shipped.Molecules(rows, 1)
    (first, _), second, third = islice(molecules.batches(3, 2), 3)
    again = next(molecules.batches(3, 2, first=1))
    assert all(map(torch.equal, second, again))
    assert not torch.equal(first == shipped.MASK, third[0] == shipped.MASK)


def test_experts_with_tensors_of_their_own_compute_as_in_the_example() -> None:
    torch.manual_seed(0)
    block = experts.ApartBlock()
    example = experts.MoEBlock()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    values = block.state_dict()
    for name in ("inside", "outside"):
        stacked = [values.pop(f"experts.{number}.{name}") for number in range(experts.EXPERTS)]
        values[{"inside": "experts_in", "outside": "experts_out"}[name]] = torch.stack(stacked)
    example.load_state_dict(values)
    x = torch.randn(2, 5, experts.WIDTH)
    assert torch.equal(block(x), example(x))


def test_experts_are_in_the_fragments_that_their_setting_names() -> None:
    alone = []
    for fragments in experts.FRAGMENTS.values():
        model = experts.mixture_of_experts(experts.SIZE, 0)
        (engine,) = SimulatedGroups([model], fragments=fragments).engines
        of_experts = [
            fragment.names
            for fragment in engine.fragments
            if all(".experts." in name for name in fragment.names)
        ]
        assert len(engine.fragments) == 3 + len(of_experts)
        alone.append(len(of_experts))
    assert alone == [0, experts.LAYERS, experts.LAYERS * experts.EXPERTS]


def tiny(method: str, **changes: Any) -> NamedTraining:
    training_of_method = named.training(method, named.METHODS[method].groups[-1], seed=0)
    return replace(training_of_method, size=TINY, validation_windows=32, **changes)


def trained(training: NamedTraining, steps: int) -> Loop:
    loop = Loop(training, training.text())
    loop.run(steps=steps)
    return loop


def test_a_paced_group_at_half_speed_trains_and_weighs_half_as_much() -> None:
    paced = tiny("Paced, one at half speed")
    batch = paced.batch
    assert [paced.trained(0, step) for step in range(2)] == [batch, batch]
    assert [paced.trained(3, step) for step in range(2)] == [0, batch]
    engines = trained(paced, 40).engines
    assert [engine.inner_steps for engine in engines] == [40] * 4
    weights = [engine.fragmented_model.fragments[0].weight for engine in engines]
    assert weights[3] == pytest.approx(weights[0] / 2, abs=1)


def test_drop_compute_leaves_out_samples_and_their_share_of_the_gradient() -> None:
    dropping = tiny("DropCompute")
    trained_samples = [dropping.trained(group, step) for group in range(4) for step in range(250)]
    dropped = 1 - mean(trained_samples) / dropping.batch
    assert MOST_DROPPED / 2 < dropped < 1.2 * MOST_DROPPED
    six_of_eight = dropping.group()
    six = dropping.group()
    tokens, targets = next(dropping.text().batches(0, 8))
    six_of_eight.backward(tokens, targets, 6)
    six.backward(tokens[:6], targets[:6])
    gradients = [parameter.grad for parameter in six_of_eight.model.parameters()]
    expected = [
        None if parameter.grad is None else parameter.grad * 6 / 8
        for parameter in six.model.parameters()
    ]
    torch.testing.assert_close(gradients, expected)


def test_a_group_with_a_slow_uplink_sends_less() -> None:
    engines = trained(tiny("ByLink, one slow uplink"), 50).engines
    sent = [engine.report()["bytes_sent"] for engine in engines]
    assert sent[0] == sent[1] == sent[2]
    assert sent[3] < 0.6 * sent[0]


def test_fedglomo_without_momentum_in_rounds_of_a_step_is_the_mean_of_gradients() -> None:
    choices = {"sync_every": 1, "overlap_steps": 0}
    fedglomo = trained(tiny("FedGLOMO", choices=choices, beta=1.0), 6).finish()
    plain_choices = {**choices, "outer_lr": 1.0, "outer_momentum": 0.0}
    averaged = tiny(named.AVERAGED, lr=0.1, choices=plain_choices, clip=inf)
    expected = list(trained(averaged, 6).finish().parameters())
    torch.testing.assert_close(list(fedglomo.parameters()), expected, rtol=1e-4, atol=1e-5)


def test_backup_workers_follow_closed_forms() -> None:
    stalls = Case(rounds=120, seed=3)
    with_backups = Play(replace(stalls, quorum=BACKUP)).run().found()
    # The last steps are not counted yet.
    assert 0.93 <= with_backups["goodput"] <= goodput_at_most(stalls) + 0.01
    assert with_backups["counted"] >= 0.96
    assert with_backups["landing_seconds"] == pytest.approx(5.2, abs=0.3)
    long_run = Case(rounds=2500)
    assert goodput_of_all(long_run) == pytest.approx(0.7852, abs=1e-4)
    assert goodput_at_most(long_run) == pytest.approx(0.9615, abs=1e-4)
    goodput = wait_for_all(long_run)["goodput"]
    assert goodput == pytest.approx(goodput_of_all(long_run), abs=0.015)
    assert wait_for_all(replace(long_run, share=0.0, rounds=50))["goodput"] == 1.0


def test_a_site_that_is_always_late_delays_the_others_every_eighth_round() -> None:
    """There all that it has trained counts."""
    late = Case(sites=4, rounds=40, share=0.0, delays=(0.0, 0.0, 0.0, 15.0), grace=20.0)
    waiting = Play(late).run()
    assert waiting.found()["landing_seconds"] > 15
    with_backup = Play(replace(late, quorum=BACKUP)).run()
    assert with_backup.found()["landing_seconds"] < 9
    weights = {}
    for record in with_backup.records:
        contribution = record.of("site-3")
        if contribution is not None:
            weights[record.round] = contribution.weight
    assert [round for round in weights if round > 8] == [16, 24, 32]
    assert weights[32] == 8 * 30


def test_claims_that_rules_decide_have_known_answers() -> None:
    steady = computed.dropping(4, sigma=0.0, seed=0, steps=20)
    assert steady == pytest.approx({"gain": 0.0, "dropped": 0.0, "waits": 0.0})
    gain_of_two = computed.dropping(2, 0.6, seed=0, steps=100)["gain"]
    gain_of_many = computed.dropping(64, 0.6, seed=0, steps=100)["gain"]
    assert 0 <= gain_of_two < gain_of_many
    assert computed.slow_uplink(1, steps=200)["speed_up"] == 1
    assert computed.slow_uplink(100, steps=500)["speed_up"] > 2
    backups = computed.backups(2, quorum=False, seed=0, rounds=6)
    assert backups.keys() == {"goodput", "counted", "launched_together"}


def test_nets_that_are_trained_at_once_are_the_groups_models() -> None:
    stacked_parameters, models = small.nets(3, seed=0)
    inputs = torch.randn(3, 5, small.FEATURES)
    for values in stacked_parameters:
        values.add_(torch.randn(values.shape))
    outputs = small.forward(inputs, *stacked_parameters)
    for model, x, expected in zip(models, inputs, outputs, strict=True):
        torch.testing.assert_close(model(x), expected)
    assert small.gossip("all with all", 2, seed=0, sync_every=1, rounds=3)["loss"] > 0


def test_a_claim_goes_on_with_the_rows_that_a_file_lacks_and_pairs_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(method: str, seed: int) -> dict[str, float]:
        measured.append((method, seed))
        loss = 1.0 + seed
        return {"loss": loss if method == "plain" else 1.1 * loss}

    def make(seeds: list[int]) -> None:
        cases = {"seed": seeds, "method": ["plain", "other"]}
        claim = claims.Claim("a test", measure, cases, {}, beside="plain")
        monkeypatch.setattr(claims, "CLAIMS", {"test": claim})
        claims.main(["test", "--json", str(path)])

    path = tmp_path / "claims.json"
    make([0])
    make([0, 1])
    assert measured == [("plain", 0), ("other", 0), ("plain", 1), ("other", 1)]
    content = json.loads(path.read_text())
    assert content["headline"] == {"test, method=other, percent": pytest.approx(10.0)}
    with pytest.raises(SystemExit):
        claims.main(["unknown"])

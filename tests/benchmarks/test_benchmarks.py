"""The benchmarks run, write down what they found, and count what they say they count; and so do
their slow links.

Trainings for loss and in virtual time: each does what its name says, and is made once, in pieces
that fit.
"""

import importlib
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from itertools import count
from math import inf, isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib", reason="the pictures of the benchmarks need matplotlib")

from benchmarks import (
    finetuning,
    flights,
    loss_over_time,
    memory,
    paper,
    quality,
    runs,
    scaling,
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

IMAGES = Path(__file__).parents[2] / "docs" / "images"

NETWORK = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def quick(name: str, folder: Path) -> dict[str, Any]:
    """Runs a benchmark as little as shows that it runs, and returns the file of results."""
    (folder / name).mkdir()
    results = folder / name / "results.json"
    picture = folder / name / "picture.svg"
    importlib.import_module(f"benchmarks.{name}").main(
        ["--quick", "--json", str(results), "--picture", str(picture)]
    )
    assert ET.parse(picture).getroot().tag.endswith("svg")
    content: dict[str, Any] = json.loads(results.read_text())
    return content


@pytest.mark.parametrize(
    "name",
    ["overhead", "memory", "quality", "paper", pytest.param("finetuning", marks=pytest.mark.slow)],
)
def test_a_benchmark_runs_and_writes_numbers_with_where_and_when(name: str, tmp_path: Path) -> None:
    content = quick(name, tmp_path)
    assert content["headline"], "there are numbers"
    assert all(isfinite(number) for number in content["headline"].values())
    assert content["measured"]["command"] == f"python -m benchmarks.{name} --quick"
    assert {"date", "processor", "cores", "python", "torch", "lightning"} <= content[
        "measured"
    ].keys()


def test_a_vision_model_with_batchnorm_is_judged_in_groups_and_with_ddp(tmp_path: Path) -> None:
    assert sum(p.numel() for p in vision.resnet8(0).parameters()) == 77_850
    vision.main(["--quick", "--json", str(tmp_path / "vision.json")])
    found = json.loads((tmp_path / "vision.json").read_text())["found"]
    assert found.keys() == {"DDP", "worker groups"}
    # Ten classes: who has learned nothing has 90 % of them wrong, and a model that diverged no loss
    # at all.
    assert all(
        isfinite(loss) and 0 < error <= 100 for seeds in found.values() for loss, error in seeds
    )
    assert found["DDP"] != found["worker groups"]


@pytest.mark.large
def test_a_group_adds_eight_bytes_a_parameter_and_a_flight_to_a_plain_fit() -> None:
    # Eight for outer parameters and momentum, three for the fragment in flight, and what the
    # allocator keeps, which differs between runs by half a byte.
    added = []
    for _ in range(3):
        rows = memory.memory({"10M": memory.SIZES["10M"]}, ["lightning_alone", "streaming"])
        alone, streaming = (row["memory"] for row in rows)
        if not alone:
            pytest.skip("This system does not say how much memory a process has.")
        added.append((streaming - alone) / rows[0]["parameters"])
        if added[-1] < 14.5:
            return
    raise AssertionError(f"bytes a parameter in three runs: {added}")


@pytest.mark.network
@NETWORK
def test_a_flight_outlasts_its_bytes_its_parts_and_a_round_trip_for_each_hop(
    tmp_path: Path,
) -> None:
    (found,) = quick("flights", tmp_path)["found"].values()
    assert "<!-- paced -->" in (tmp_path / "flights" / "picture.svg").read_text()
    case = flights.Case(**found["case"])
    # Two shots among three groups: four thirds of a payload, and a control vector to each of the
    # two others.
    padded = 3 * -(-case.values // 3)
    sent = 4 / 3 * 4 * padded + 2 * CONTROL_BYTES
    assert found["bytes_alone"] == pytest.approx(case.on_link(sent))
    # Emulated links delay a packet by no less than they should, and machines that are busy by more.
    assert min(found["flights"]) > found["bytes_alone"] + case.round_trip
    assert found["flight"] > found["parts"]["transfer"]
    assert found["ratio"] == pytest.approx(
        found["flight"] / (found["bytes_alone"] + 2 * case.round_trip)
    )
    assert found["step"] > case.step_seconds
    assert found["kept"] == pytest.approx(found["unshaped_step"] / found["step"])


@pytest.mark.slow
@pytest.mark.network
@NETWORK
def test_training_over_slow_links_keeps_its_speed_learns_alike_and_reports_its_bytes(
    tmp_path: Path,
) -> None:
    content = quick("slow_links", tmp_path)
    ours, ddp = (
        slow_links.row_of(content["rows"], method, 2, 10)
        for method in ("streaming", "lightning_ddp")
    )
    # 0.28 MB over 10 Mbit/s take 0.22 s, four steps of it: what ours sends is nothing beside that.
    assert ddp["seconds"] > 0.2
    assert ours["bytes"] < ddp["bytes"] / 50
    assert content["headline"]["2 sites, 10 Mbit/s: best peer's step over ours"] > 0

    rows = {row["method"]: row for row in quick("loss_over_time", tmp_path)["rows"]}
    text = training.Text(TINY, loss_over_time.VALIDATION_WINDOWS)
    for method, choices in (("ddp", None), ("streaming_defaults", {"sync_every": 10})):
        case = rows[method]["case"]
        points = rows[method]["points"]
        budget = case["steps"] * 2 * case["batch"] * TINY.context / training.parameters(TINY)
        if choices is not None:
            # A Trainer knows how few rounds there are, and groups in one process do not.
            settings = Settings(**choices, outer_optimizer=quality.ELEMENTWISE)
            choices |= settings.chosen_for(2, case["steps"] // choices["sync_every"]).numbers
        in_one_process = training.Training(TINY, choices, budget=budget, lr=case["lr"])
        assert points[-1]["loss"] == pytest.approx(
            text.loss(training.trained(in_one_process, text)), abs=1e-4
        )
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
    modules = [
        sum(p.numel() for part in fragment for p in part.parameters())
        for fragment in case.modules(case.net())
    ]
    assert list(streaming.numels) == modules, "all methods cut the model into the same fragments"
    # A link suffices if a fragment fits in tau steps and all fit in a round.
    span = case.overlap_steps * case.step_seconds
    fragment = 8 * max(modules) * 4.125 / 8 / 1e6 / (span - slow_links.ROUND_TRIP)
    least = max(
        fragment, 8 * sum(modules) * 4.125 / 8 / 1e6 / (case.sync_every * case.step_seconds)
    )
    assert slow_links.fits(streaming, case, 1.01 * least)
    assert not slow_links.fits(streaming, case, 0.99 * least)
    for job in slow_links.jobs(quick=False):
        assert Job.read(json.dumps(asdict(job))) == job
        in_rounds = job.method in ("streaming", "torchft", "post_local_sgd", "accelerate")
        assert not in_rounds or job.counted % job.case.sync_every == 0, (
            "they are measured over whole rounds"
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
        words = [sys.executable, "-m", "http.server", "7000", "--directory", str(tmp_path)]
        servers = [links.start(site, words, stderr=subprocess.DEVNULL) for site in (0, 1)]

        def got(site: int, other: int) -> list[str]:
            """What a site tells of the file of another one: nothing where it does not reach
            that.
            """
            words = links.command(site, [sys.executable, "-c", GET, f"site{other}"])
            return subprocess.run(
                words, check=False, capture_output=True, text=True, timeout=60
            ).stdout.split()

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
    left = subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True
    ).stdout
    assert not any(name in left for name in links.names)


OURS, DDP = quality.pair("tiny", sync_every=10)


def test_a_training_in_pieces_is_bit_identical_to_one_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(OURS, inner="muon", budget=0.6 * OURS.budget)
    whole = made(one)
    path = tmp_path / "runs.json"
    pieces = 0
    # Every look at the clock takes a second, so that pieces end with fragments in flight.
    ticks = count()
    monkeypatch.setattr(training.time, "time", lambda: next(ticks))
    while Runs("test", path).get(one) is None:
        Runs("test", path).make([one], 1, minutes=10 / 60)
        pieces += 1
    assert pieces > 1
    assert Runs("test", path)[one]["loss"] == whole["loss"]
    assert list(tmp_path.iterdir()) == [path], "no state is left"


def test_trainings_begin_until_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Training] = []

    def noted(one: Training, *args: Any) -> dict[str, Any]:
        begun.append(one)
        return {**one.key(), "loss": 2.0, "seconds": 40.0}

    monkeypatch.setattr(runs, "made", noted)
    monkeypatch.setattr(runs.time, "time", lambda: 40.0 * len(begun))
    trainings = [replace(DDP, seed=seed) for seed in range(4)]
    # The third begins after 80 of 84 seconds: its state would be kept. What the file has is not
    # made again.
    for minutes, seeds in ((1.4, [0, 1, 2]), (inf, [0, 1, 2, 3])):
        Runs("test", tmp_path / "runs.json").make(trainings, 1, minutes=minutes)
        assert [one.seed for one in begun] == seeds


def test_predictions_of_two_laws_are_drawn_beside_the_strategys_own_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The predictions are for small models."""
    assert [round(scaling.by_losses(groups, 114_336), 1) for groups in scaling.LAWS] == [
        1.6,
        4.2,
        7.7,
    ]
    assert [round(scaling.by_gap(groups, 114_336)) for groups in scaling.LAWS] == [7, 26, 23]
    scaling.main(["--picture", str(tmp_path / "scaling.svg")])
    assert (tmp_path / "scaling-dark.svg").exists()
    told = capsys.readouterr().out
    assert [f"114,336 | {groups} |" in told for groups in (2, 4, 8)] == [True] * 3


def test_a_claim_of_the_paper_is_judged_by_the_whole_interval_on_runs_that_are_kept() -> None:
    # The mean alone says nothing: with one seed, and where the interval holds both, it is open.
    judged = [
        paper.verdict(percent, is_worse)
        for percent in ([3.0], [-4.0, 5.0])
        for is_worse in (True, False)
    ]
    assert judged == ["open"] * 4
    assert [paper.verdict([4.0, 4.1, 4.2], is_worse) for is_worse in (True, False)] == [
        "agrees",
        "disagrees",
    ]
    assert [paper.verdict([-4.0, -4.1, -4.2], is_worse) for is_worse in (True, False)] == [
        "disagrees",
        "agrees",
    ]

    five_seeds, two_seeds = paper.made_before()
    (claim,) = [one for one in paper.ABLATIONS["groups"].claims if one.first == "4"]
    row = paper.judged("groups", claim, five_seeds)
    assert row is not None
    assert row[2:] == ["5", "+9.4 ± 3.6", "agrees"]
    assert paper.judged("groups", claim, two_seeds) is None, "what was not made is not judged"
    made = {
        factor: [one.name for one in found] for factor, found in paper.above_ddp(two_seeds).items()
    }
    assert made["tau"] == ["5", "10"]
    # Every factor changes one thing of the base, which is among its values.
    for factor, ablation in paper.ABLATIONS.items():
        ours = [paper.small_pair(paper.ONE, factor, value, 0)[0] for value in ablation.values]
        assert replace(paper.ONE, choices=paper.BASE) in ours or factor == "cut"
        assert len({json.dumps(one.key(), sort_keys=True) for one in ours}) == len(ours)


def test_the_verdict_is_about_numbers_on_seeds_that_chose_nothing() -> None:
    verdict = quality.STAGES["verdict"]
    for pairs in quality.planned(verdict, verdict.sizes, None, "cpu").values():
        ((ours, ddp), *others) = pairs
        assert replace(ours, choices=None, lr=ddp.lr) == ddp
        assert "auto" not in (ours.choices or {}).values(), "a run is that of its numbers"
        assert (len(others), ours.seed in quality.TUNING, quality.has_enough_rounds(pairs)) == (
            4,
            False,
            True,
        )
    rates = ((1e-3, 2.0, 1.9), (3e-3, 1.8, 2.1))
    found = [
        Comparison(quality.at_rate("M=2", at), [{"seed": 0, "loss": a}], [{"seed": 0, "loss": b}])
        for at, a, b in rates
    ]
    assert quality.each_at_its_best(found)[0].nats == pytest.approx([-0.1])


def test_of_a_model_with_adapters_only_these_are_trained_and_exchanged() -> None:
    one = next(one for one in finetuning.quick_trainings() if one.choices and one.lora_rank)
    before = one.model().state_dict()
    after = training.trained(one, one.text()).state_dict()
    changed = {name for name, values in before.items() if not torch.equal(values, after[name])}
    assert changed == {name for name in before if name.endswith((".down", ".up"))}
    groups = SimulatedGroups([one.model(), one.model()], **one.choices)
    assert {name for fragment in groups.engines[0].fragments for name in fragment.names} == changed


def tiny(method: str, **changes: Any) -> NamedTraining:
    one = named.training(method, named.METHODS[method].groups[-1], seed=0)
    return replace(one, size=TINY, validation_windows=32, **changes)


def trained(one: NamedTraining, steps: int) -> Loop:
    loop = Loop(one, one.text())
    loop.run(steps=steps)
    return loop


def test_methods_train_as_their_names_say() -> None:
    paced = tiny("Paced, one at half speed")
    whole = paced.batch
    assert [[paced.trained(group, step) for step in range(2)] for group in (0, 3)] == [
        [whole, whole],
        [0, whole],
    ]
    slow = trained(paced, 40).engines
    assert [engine.inner_steps for engine in slow] == [40] * 4
    weights = [engine.rounds.fragments[0].weight for engine in slow]
    assert weights[3] == pytest.approx(weights[0] / 2, abs=1)

    dropping = tiny("DropCompute")
    kept = mean(
        dropping.trained(group, step) / dropping.batch for group in range(4) for step in range(250)
    )
    assert MOST_DROPPED / 2 < 1 - kept < 1.2 * MOST_DROPPED
    some = dropping.group()
    whole = dropping.group()
    tokens, targets = next(dropping.text().batches(0, 8))
    some.backward(tokens, targets, 6)
    whole.backward(tokens[:6], targets[:6])
    for ours, theirs in zip(some.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad * 6 / 8 if theirs.grad is not None else None
        )

    sent = [
        engine.report()["bytes_sent"]
        for engine in trained(tiny("ByLink, one slow uplink"), 50).engines
    ]
    assert sent[0] == sent[1] == sent[2]
    assert sent[3] < 0.6 * sent[0]

    # Without momentum and with rounds of a step it is the mean of gradients.
    choices = {"sync_every": 1, "overlap_steps": 0}
    fedglomo = trained(tiny("FedGLOMO", choices=choices, beta=1.0), 6).finish()
    plain = {**choices, "outer_lr": 1.0, "outer_momentum": 0.0}
    theirs = trained(tiny(named.AVERAGED, lr=0.1, choices=plain, clip=inf), 6).finish()
    for one, other in zip(fedglomo.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_backup_workers_follow_closed_forms() -> None:
    stalls = Case(rounds=120, seed=3)
    found = Play(replace(stalls, quorum=BACKUP)).run().found()
    # What is trained last is not counted yet.
    assert 0.93 <= found["goodput"] <= goodput_at_most(stalls) + 0.01
    assert found["counted"] >= 0.96
    assert found["landing_seconds"] == pytest.approx(5.2, abs=0.3)
    case = Case(rounds=2500)
    assert goodput_of_all(case) == pytest.approx(0.7852, abs=1e-4)
    assert goodput_at_most(case) == pytest.approx(0.9615, abs=1e-4)
    assert wait_for_all(case)["goodput"] == pytest.approx(goodput_of_all(case), abs=0.015)
    assert wait_for_all(replace(case, share=0.0, rounds=50))["goodput"] == 1.0
    # A site that is always late delays the others only every eighth round, where all that it has
    # trained counts.
    late = Case(sites=4, rounds=40, share=0.0, delays=(0.0, 0.0, 0.0, 15.0), grace=20.0)
    waiting = Play(late).run()
    backup = Play(replace(late, quorum=BACKUP)).run()
    assert waiting.found()["landing_seconds"] > 15
    assert backup.found()["landing_seconds"] < 9
    counted = {one.round: own.weight for one in backup.records if (own := one.of("site-3"))}
    assert [number for number in counted if number > 8] == [16, 24, 32]
    assert counted[32] == 8 * 30


def test_claims_that_rules_decide_have_known_answers() -> None:
    steady = computed.dropping(4, sigma=0.0, seed=0, steps=20)
    assert steady == pytest.approx({"gain": 0.0, "dropped": 0.0, "waits": 0.0})
    few, many = (computed.dropping(ranks, 0.6, seed=0, steps=100)["gain"] for ranks in (2, 64))
    assert 0 <= few < many
    assert computed.slow_uplink(1, steps=200)["speed_up"] == 1
    assert computed.slow_uplink(100, steps=500)["speed_up"] > 2
    alone = computed.backups(2, quorum=False, seed=0, rounds=6)
    assert {"goodput", "counted", "launched_together"} == alone.keys()


def test_nets_that_are_trained_at_once_are_the_groups_models() -> None:
    together, models = small.nets(3, seed=0)
    x = torch.randn(3, 5, small.FEATURES)
    for part in together:
        part.add_(torch.randn(part.shape))
    at_once = small.forward(x, *together)
    for one, own, expected in zip(models, x, at_once, strict=True):
        torch.testing.assert_close(one(own), expected)
    assert small.gossip("all with all", 2, seed=0, sync_every=1, rounds=3)["loss"] > 0


def test_a_claim_goes_on_with_the_rows_that_a_file_lacks_and_pairs_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def measure(method: str, seed: int) -> dict[str, float]:
        made.append((method, seed))
        return {"loss": 1.0 + seed if method == "plain" else 1.1 * (1.0 + seed)}

    cases = {"seed": [0, 1], "method": ["plain", "other"]}
    path = tmp_path / "claims.json"
    for seeds in ([0], [0, 1]):
        claim = claims.Claim("a test", measure, {**cases, "seed": seeds}, {}, beside="plain")
        monkeypatch.setattr(claims, "CLAIMS", {"test": claim})
        claims.main(["test", "--json", str(path)])
    assert made == [("plain", 0), ("other", 0), ("plain", 1), ("other", 1)]
    content = json.loads(path.read_text())
    assert content["headline"] == {"test, method=other, percent": pytest.approx(10.0)}
    with pytest.raises(SystemExit):
        claims.main(["unknown"])

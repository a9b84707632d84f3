"""The strategy under Ray Train: the example with two workers and four, one of them killed, and
tuned.
"""

import contextlib
import importlib.util
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.bits import same
from tests.scripts import ROOT, run_python

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="is not installed: make foreign"
    ),
]

MARK = "OF_THIS_TEST"


def example(folder: Path, *arguments: Any) -> str:
    """Runs the example to its end; its checkpoints are in the folder."""
    folder.mkdir()
    script = ROOT / "examples/ray/train.py"
    options = ("--cpus", 0.1, "--storage", folder)
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", MARK: str(folder)}
    return run_python(script, *arguments, *options, folder=folder, seconds=600, **quiet)


def workers(folder: Path) -> list[int]:
    """The processes in which Ray trains for a run of the example: children of its daemon, which
    has our environment.
    """
    mark = f"{MARK}={folder}\0".encode()
    daemons = set[int]()
    parents = dict[int, int]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended
            name = (process / "cmdline").read_bytes()
            if b"/raylet\0" in name and mark in (process / "environ").read_bytes():
                daemons.add(int(process.name))
            if name.startswith(b"ray::") and b"TrainWorker" in name:
                _, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
                parents[int(process.name)] = int(parent)
    return sorted(worker for worker, parent in parents.items() if parent in daemons)


def kills_one(folder: Path, ended: threading.Event) -> bool:
    """Kills a worker once Ray knows of a checkpoint."""
    snapshot = folder / "gpt" / "checkpoint_manager_snapshot.json"
    while not ended.wait(0.05):
        pids = workers(folder) if snapshot.exists() else []
        if pids:
            os.kill(pids[-1], signal.SIGKILL)
            return True
    return False


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max(folder.glob("gpt/checkpoint_[0-9]*"))
    return torch.load(newest / "checkpoint.ckpt", weights_only=False)["state_dict"]


def test_a_killed_worker_is_started_again_and_the_fit_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    short = ("--epochs", 3, "--steps", 30, "--sync-every", 10)
    unbroken = example(tmp_path / "unbroken", *short)
    ended = threading.Event()
    kills = list[bool]()
    hunter = threading.Thread(target=lambda: kills.append(kills_one(tmp_path / "killed", ended)))
    hunter.start()
    try:
        broken = example(tmp_path / "killed", *short)
    finally:
        ended.set()
        hunter.join()
    assert kills == [True]
    assert broken.count("Started training worker group of size 2") == 2
    (metrics,) = set(re.findall("finished: (.*)", unbroken))
    assert re.findall("finished: (.*)", broken) == [metrics]
    assert "'step': 90" in metrics
    assert same(weights(tmp_path / "unbroken"), weights(tmp_path / "killed"))


def test_ray_tune_chooses_the_number_of_inner_steps_with_two_groups_of_two_workers(
    tmp_path: Path,
) -> None:
    options = ("--workers", 4, "--groups", 2, "--epochs", 1, "--steps", 30, "--tune", 10, 15)
    printed = example(tmp_path / "tuned", *options)
    losses = dict(re.findall(r"sync_every (\d+): validation loss (\d\.\d+)", printed))
    assert losses.keys() == {"10", "15"}
    assert f"best: sync_every {min(losses, key=losses.__getitem__)}" in printed
    assert printed.count("2 worker groups of 2 ranks") >= 2


@pytest.mark.parametrize(
    ("workers_of_nodes", "nodes"),
    [((4,), 1), ((2, 2), 2), ((1, 1, 1), 3), ((3, 1), None), ((2, 4), None)],
)
def test_the_workers_of_a_node_are_a_group_unless_nodes_have_different_numbers(
    workers_of_nodes: tuple[int, ...], nodes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.train

    from lightning_sdiloco.ray import RayStreamingDiLoCoStrategy

    def set_context(node: int, local_rank: int) -> None:
        context = Mock()
        context.get_world_size.return_value = sum(workers_of_nodes)
        context.get_world_rank.return_value = sum(workers_of_nodes[:node]) + local_rank
        context.get_node_rank.return_value = node
        context.get_local_rank.return_value = local_rank
        context.get_local_world_size.return_value = workers_of_nodes[node]
        monkeypatch.setattr(ray.train, "get_context", lambda: context)

    counted_nodes = set[int]()
    refusals = 0
    for node, workers_of_node in enumerate(workers_of_nodes):
        for local_rank in range(workers_of_node):
            set_context(node, local_rank)
            try:
                counted_nodes.add(RayStreamingDiLoCoStrategy().num_nodes)
            except ValueError as error:
                refusals += "Set worker_groups to a number" in str(error)
            assert RayStreamingDiLoCoStrategy(worker_groups=2).num_nodes == 1
    if nodes is None:
        assert refusals  # one rank that refuses ends them all
    else:
        assert not refusals
        assert counted_nodes == {nodes}

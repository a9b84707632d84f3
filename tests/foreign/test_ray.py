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
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", MARK: str(folder)}
    more = ("--cpus", 0.1, "--storage", folder)
    return run_python(
        ROOT / "examples/ray/train.py", *arguments, *more, folder=folder, seconds=600, **quiet
    )


def workers(folder: Path) -> list[int]:
    """The processes in which Ray trains for a run of the example: children of its daemon, which
    has our environment.
    """
    daemons = set[int]()
    found = list[tuple[int, int]]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended
            name = (process / "cmdline").read_bytes()
            if (
                b"/raylet\0" in name
                and f"{MARK}={folder}\0".encode() in (process / "environ").read_bytes()
            ):
                daemons.add(int(process.name))
            if name.startswith(b"ray::") and b"TrainWorker" in name:
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                found.append((int(parent), int(process.name)))
    return sorted(worker for parent, worker in found if parent in daemons)


def kills_one(folder: Path, ended: threading.Event) -> bool:
    """Kills a worker once Ray knows of a checkpoint."""
    while not ended.wait(0.05):
        if (folder / "gpt" / "checkpoint_manager_snapshot.json").exists() and (
            pids := workers(folder)
        ):
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
    killed = list[bool]()
    hunter = threading.Thread(target=lambda: killed.append(kills_one(tmp_path / "killed", ended)))
    hunter.start()
    try:
        broken = example(tmp_path / "killed", *short)
    finally:
        ended.set()
        hunter.join()
    assert killed == [True]
    assert broken.count("Started training worker group of size 2") == 2
    (metrics,) = set(re.findall("finished: (.*)", unbroken))
    assert re.findall("finished: (.*)", broken) == [metrics]
    assert "'step': 90" in metrics
    assert same(weights(tmp_path / "unbroken"), weights(tmp_path / "killed"))


def test_ray_tune_chooses_the_number_of_inner_steps_with_two_groups_of_two_workers(
    tmp_path: Path,
) -> None:
    chosen = ("--workers", 4, "--groups", 2, "--epochs", 1, "--steps", 30, "--tune", 10, 15)
    printed = example(tmp_path / "tuned", *chosen)
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

    counted = set[int]()
    refused = 0
    rank = 0
    for node, here in enumerate(workers_of_nodes):
        for local in range(here):
            where = {
                "world_size": sum(workers_of_nodes),
                "world_rank": rank,
                "node_rank": node,
                "local_rank": local,
            }
            context = Mock(**{f"get_{name}.return_value": number for name, number in where.items()})
            context.get_local_world_size.return_value = here
            monkeypatch.setattr(ray.train, "get_context", lambda context=context: context)
            try:
                counted.add(RayStreamingDiLoCoStrategy().num_nodes)
            except ValueError as error:
                refused += "Set worker_groups to a number" in str(error)
            assert RayStreamingDiLoCoStrategy(worker_groups=2).num_nodes == 1
            rank += 1
    # One rank that refuses ends them all.
    assert refused if nodes is None else not refused and counted == {nodes}

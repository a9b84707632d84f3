"""Large models through every way to start processes: what comes back to the script is what rank 0 had.

The script is this file, which keeps what can be read of a fit, and where.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_sdiloco import StreamingDiLoCoStrategy
from tests import fits
from tests.large.models import Data, Large, held, same
from tests.scripts import ROOT, TORCHRUN, run_python
from tests.slurm import slurm

TENSORS = {"wide": 8, "big": 6, "deep": 1000}
SCRIPT = ("-m", "tests.large.test_large_launchers")

pytestmark = [pytest.mark.large, pytest.mark.timeout(140)]


def keep(trainer: Any, file: Path) -> None:
    """Writes down what users read of a fit, as plain containers and tensors."""
    strategy = trainer.strategy
    readable = {
        "outer": strategy.outer_state_dict(),
        "model": held(trainer.lightning_module),
        "metrics": dict(trainer.callback_metrics),
        "report": strategy.report(),
        "fragments": [[list(fragment.names), list(fragment.sizes)] for fragment in strategy.fragments],
        "launches": [list(strategy.schedule.launches(step)) for step in range(20)],
    }
    torch.save(readable, file)


class Keep(pl.Callback):
    """Keeps what each rank reads in its own process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        keep(trainer, self.folder / f"rank-{trainer.global_rank}.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--start-method", default="popen")
    parser.add_argument("--model", default="wide")
    for name, default in {"metrics": 0, "groups": 2, "devices": 2, "nodes": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(0)
    settings: Any = {"sync_every": 4, "overlap_steps": 2, "fragments": "balanced", "start_method": args.start_method}
    strategy = StreamingDiLoCoStrategy(args.groups, **settings)
    places = {"devices": args.devices, "num_nodes": args.nodes}
    trainer = fits.trainer(strategy=strategy, max_steps=9, callbacks=[Keep(args.folder)], **places)
    trainer.fit(Large(args.model, args.metrics), Data())
    keep(trainer, args.folder / f"main-{trainer.global_rank}.pt")


def require_alike(folder: Path, count: int, model: str, metrics: int = 0) -> None:
    """A model of real size was trained, ranks read the same, and a script's own processes what they had as ranks."""
    files = (sorted(folder.glob(f"{kind}-*.pt")) for kind in ("main", "rank"))
    mains, ranks = ([torch.load(path, weights_only=True) for path in paths] for paths in files)
    assert len(ranks) == count
    assert len(ranks[0]["outer"]) >= TENSORS[model]
    assert sum(values.numel() for values in ranks[0]["outer"].values()) >= 100_000
    assert ranks[0]["report"]["landings"] == ranks[0]["report"]["launches"] >= 2
    assert all(same(rank["outer"], ranks[0]["outer"]) and same(rank["model"], rank["outer"]) for rank in ranks)
    for main, rank in zip(mains, ranks, strict=len(mains) > 1):
        tensors = ("outer", "model", "metrics")
        assert [name for name in tensors if not same(main.pop(name), rank[name])] == []
        assert main == {name: rank[name] for name in ("report", "fragments", "launches")}
        assert len(rank["metrics"]) == 1 + metrics


@pytest.mark.parametrize(
    ("launcher", "start_method", "model", "metrics", "groups", "devices"),
    [
        ((), "spawn", "big", 0, 2, 2),
        ((), "fork", "big", 1200, 2, 2),
        ((), "fork", "deep", 0, 3, 3),
        ((), "forkserver", "big", 0, 2, 2),
        ((), "popen", "big", 0, 2, 4),
        ((*TORCHRUN, "--nproc-per-node=3"), "popen", "wide", 0, 3, 3),
    ],
)
def test_the_main_process_reads_what_its_rank_had(
    launcher: tuple[str, ...], start_method: str, model: str, metrics: int, groups: int, devices: int, tmp_path: Path
) -> None:
    told = {"start-method": start_method, "model": model, "metrics": metrics, "groups": groups, "devices": devices}
    arguments = [f"--{name}={value}" for name, value in {**told, "folder": tmp_path}.items()]
    # A short path: the forkserver's socket has a name there, of a hundred letters at most.
    temporary = Path(tempfile.mkdtemp())
    try:
        # A fit takes about ten seconds; on a busy machine each process needs many to import torch.
        run_python(*launcher, *SCRIPT, *arguments, folder=ROOT, seconds=100, TMPDIR=str(temporary))
    finally:
        left = list(temporary.glob("lightning_sdiloco-*"))
        shutil.rmtree(temporary)
    assert left == []
    require_alike(tmp_path, devices, model, metrics)


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_the_tasks_of_slurm_read_the_same(tmp_path: Path) -> None:
    # Not below pytest's folder, whose path is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(Path(folder), nodes=2, cores=2) as cluster:
        fit = [sys.executable, *SCRIPT, "--model=deep", "--nodes=2", "--devices=2", "--groups=2"]
        cluster.run("srun", "--nodes=2", "--ntasks-per-node=2", *fit, f"--folder={tmp_path}", cwd=ROOT)
    require_alike(tmp_path, 4, "deep")


if __name__ == "__main__":
    main()

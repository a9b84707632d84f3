"""Large models through every way to start processes: what comes back to the script is what rank 0 had."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.large.models import same
from tests.ranks import LAUNCHERS
from tests.slurm import slurm

TENSORS = {"wide": 8, "big": 6, "deep": 1000}
KINDS = ("main", "rank")
ROOT = Path(__file__).parents[2]
# A fit takes about ten; on a busy machine each process needs many to import torch.
SECONDS = 100.0

pytestmark = [pytest.mark.large, pytest.mark.timeout(140)]


def fitted(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> tuple[list[Any], list[Any]]:
    """What is read after a fit by the script's own process or processes, and by each rank; no fit hangs for ever."""
    # A short path: the forkserver's socket has a name there, of a hundred letters at most.
    temporary = Path(tempfile.mkdtemp())
    unknown = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    known = {name: v for name, v in os.environ.items() if not name.startswith(LAUNCHERS) and name not in unknown}
    known |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    known |= {"TMPDIR": str(temporary)}
    script = subprocess.Popen(
        [sys.executable, *launcher, "-m", "tests.large.fitting", f"--folder={folder}", *arguments],
        env=known,
        cwd=ROOT,
        stdout=(folder / "printed").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        script.wait(SECONDS)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"The fit hangs:\n{(folder / 'printed').read_text()}") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()
        left = list(temporary.glob("lightning_sdiloco-*"))
        shutil.rmtree(temporary)
    assert script.returncode == 0, (folder / "printed").read_text()
    assert left == []
    return kept(folder)


def kept(folder: Path) -> tuple[list[Any], list[Any]]:
    """What the script's own processes, and the ranks, have left in a folder."""
    read = {kind: [torch.load(p, weights_only=True) for p in sorted(folder.glob(f"{kind}-*.pt"))] for kind in KINDS}
    return read["main"], read["rank"]


def assert_trained(ranks: list[Any], count: int, tensors: int) -> None:
    """Asserts that a model of real size was trained, and that all ranks read the same."""
    assert len(ranks) == count
    assert len(ranks[0]["outer"]) >= tensors
    assert sum(values.numel() for values in ranks[0]["outer"].values()) >= 100_000
    assert ranks[0]["report"]["landings"] == ranks[0]["report"]["launches"] >= 2
    for rank in ranks:
        assert same(rank["outer"], ranks[0]["outer"])
        assert same(rank["model"], ranks[0]["outer"])


@pytest.mark.parametrize(
    ("start_method", "model", "metrics", "groups"),
    [("spawn", "big", 0, 2), ("fork", "big", 1200, 2), ("fork", "deep", 0, 3), ("forkserver", "big", 0, 2)],
)
def test_the_main_process_reads_what_rank_0_had(
    start_method: str, model: str, metrics: int, groups: int, tmp_path: Path
) -> None:
    arguments = [f"--start-method={start_method}", f"--model={model}", f"--metrics={metrics}"]
    (main,), ranks = fitted(tmp_path, *arguments, f"--groups={groups}", f"--devices={groups}")
    assert_trained(ranks, groups, tensors=TENSORS[model])
    for kind in ("outer", "model", "metrics"):
        assert same(main[kind], ranks[0][kind])
    for kind in ("report", "fragments", "launches"):
        assert main[kind] == ranks[0][kind]
    assert len(main["metrics"]) == 1 + metrics


@pytest.mark.parametrize(
    ("launcher", "model", "groups", "devices"),
    [
        ((), "big", 2, 4),
        (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"), "wide", 3, 3),
    ],
)
def test_ranks_that_are_scripts_of_their_own_read_the_same(
    launcher: tuple[str, ...], model: str, groups: int, devices: int, tmp_path: Path
) -> None:
    mains, ranks = fitted(tmp_path, f"--model={model}", f"--groups={groups}", f"--devices={devices}", launcher=launcher)
    assert_trained(ranks, devices, tensors=TENSORS[model])
    assert_read_alike(mains, ranks)


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_the_tasks_of_slurm_read_the_same(tmp_path: Path) -> None:
    # Not below pytest's folder, whose path is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(Path(folder), nodes=2, cores=2) as cluster:
        fit = [sys.executable, "-m", "tests.large.fitting", "--model=deep", "--nodes=2", "--devices=2", "--groups=2"]
        cluster.run("srun", "--nodes=2", "--ntasks-per-node=2", *fit, f"--folder={tmp_path}", cwd=ROOT)
    mains, ranks = kept(tmp_path)
    assert_trained(ranks, 4, tensors=1000)
    assert_read_alike(mains, ranks)


def assert_read_alike(mains: list[Any], ranks: list[Any]) -> None:
    """Asserts that each script's own process reads what it had as a rank."""
    for main, rank in zip(mains, ranks, strict=True):
        assert same(main["outer"], rank["outer"])
        assert main["report"] == rank["report"]

"""Large models through every way to start processes: what comes back to the script is what rank 0
had.

The script is this file. Its ranks keep what can be read of a fit, and where they are.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests import fits
from tests.bits import same
from tests.large.models import Data, Large, held
from tests.scripts import ROOT, TORCHRUN, run_python

pytestmark = pytest.mark.large


def readable(trainer: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """What users read of a fit: tensors, and plain containers."""
    strategy = trainer.strategy
    steps = range(20)
    tensors = [
        strategy.outer_state_dict(),
        held(trainer.lightning_module),
        dict(trainer.callback_metrics),
    ]
    fragments = [[list(fragment.names), list(fragment.sizes)] for fragment in strategy.fragments]
    return tensors, [
        strategy.report(),
        fragments,
        [list(strategy.schedule.launches(step)) for step in steps],
    ]


class Keep(pl.Callback):
    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        torch.save(readable(trainer), Path(sys.argv[1]) / f"{trainer.global_rank}.pt")


def main() -> None:
    folder, start_method, kind, metrics, groups, devices = sys.argv[1:]
    torch.set_num_threads(1)
    pl.seed_everything(0)
    rounds = {
        "sync_every": 4,
        "overlap_steps": 2,
        "fragments": "balanced",
        "start_method": start_method,
    }
    strategy = fits.strategy(worker_groups=int(groups), **rounds)
    trainer = fits.trainer(strategy=strategy, devices=int(devices), max_steps=9, callbacks=[Keep()])
    trainer.fit(Large(kind, int(metrics)), Data())
    tensors, plain = torch.load(Path(folder) / f"{trainer.global_rank}.pt", weights_only=True)
    mine, others = readable(trainer)
    assert all(map(same, mine, tensors))
    assert others == plain


@pytest.mark.parametrize(
    ("launcher", "start_method", "kind", "metrics", "groups", "devices"),
    [
        ((), "spawn", "big", 0, 2, 2),
        ((), "fork", "big", 1200, 2, 2),
        ((), "fork", "deep", 0, 3, 3),
        ((), "forkserver", "big", 0, 2, 2),
        ((), "popen", "big", 0, 2, 4),
        ((*TORCHRUN, "--nproc-per-node=3"), "popen", "big", 0, 3, 3),
    ],
)
def test_the_script_reads_the_state_of_its_rank(
    launcher: tuple[str, ...],
    start_method: str,
    kind: str,
    metrics: int,
    groups: int,
    devices: int,
    tmp_path: Path,
) -> None:
    script = (*launcher, "-m", "tests.large.test_large_launchers")
    told = (tmp_path, start_method, kind, metrics, groups, devices)
    # A short path: the forkserver's socket has a name there, of a hundred letters at most.
    with tempfile.TemporaryDirectory() as temporary:
        # A fit takes about ten seconds; on a busy machine each process needs many to import torch.
        run_python(*script, *told, folder=ROOT, seconds=100, TMPDIR=temporary)
        assert list(Path(temporary).glob("lightning_sdiloco-*")) == []
    ranks = [torch.load(path, weights_only=True) for path in tmp_path.glob("*.pt")]
    assert len(ranks) == devices
    (first, _, logged), (report, *_) = ranks[0]
    assert len(first) == {"big": 6, "deep": 1002}[kind]
    assert all(same(outer, first) and same(model, first) for (outer, model, _), _ in ranks)
    assert report["landings"] == report["launches"] >= 2
    assert len(logged) == 1 + metrics


if __name__ == "__main__":
    main()

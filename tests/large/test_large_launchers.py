"""Large models through every way to start processes that send their state to the script, which reads
that of rank 0. With popen or torchrun the script is a rank, and nothing is sent.

The script is this file. Its ranks keep all that users can read of a fit.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch

from tests import fits
from tests.bits import same
from tests.large.models import Data, Large, copied_parameters
from tests.scripts import ROOT, run_python

pytestmark = pytest.mark.large


def readable(trainer: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """All that users read of a fit: tensors, and plain containers."""
    strategy = trainer.strategy
    tensors = [
        strategy.outer_state_dict(),
        copied_parameters(trainer.lightning_module),
        dict(trainer.callback_metrics),
    ]
    fragments = [[list(fragment.names), list(fragment.sizes)] for fragment in strategy.fragments]
    launches = [list(strategy.schedule.launches(step)) for step in range(20)]
    return tensors, [strategy.report(), fragments, launches]


class Keep(pl.Callback):
    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        torch.save(readable(trainer), Path(sys.argv[1]) / f"{trainer.global_rank}.pt")


def main() -> None:
    folder, start_method, kind, metrics, groups, devices = sys.argv[1:]
    torch.set_num_threads(1)
    pl.seed_everything(0)
    strategy = fits.strategy(
        worker_groups=int(groups),
        sync_every=4,
        overlap_steps=2,
        fragments="balanced",
        start_method=start_method,
    )
    trainer = fits.trainer(strategy=strategy, devices=int(devices), max_steps=9, callbacks=[Keep()])
    trainer.fit(Large(kind, int(metrics)), Data())
    kept_tensors, kept_plain = torch.load(
        Path(folder) / f"{trainer.global_rank}.pt", weights_only=True
    )
    tensors, plain = readable(trainer)
    assert all(map(same, tensors, kept_tensors))
    assert plain == kept_plain


class Launch(NamedTuple):
    start_method: str
    kind: str
    metrics: int
    groups: int
    devices: int


LAUNCHES = [
    Launch("spawn", "big", metrics=0, groups=2, devices=2),
    Launch("fork", "big", metrics=1200, groups=2, devices=2),
    Launch("fork", "deep", metrics=0, groups=3, devices=3),
    Launch("forkserver", "big", metrics=0, groups=2, devices=2),
]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_script_reads_the_state_of_its_rank(launch: Launch, tmp_path: Path) -> None:
    script = ("-m", "tests.large.test_large_launchers")
    # A short path, because the name of the forkserver's socket has a hundred letters at most.
    with tempfile.TemporaryDirectory() as temporary:
        # A fit takes about ten seconds; on a busy machine each process needs many to import torch.
        run_python(*script, tmp_path, *launch, folder=ROOT, seconds=100, TMPDIR=temporary)
        assert list(Path(temporary).glob("lightning_sdiloco-*")) == []
    ranks = [torch.load(path, weights_only=True) for path in tmp_path.glob("*.pt")]
    assert len(ranks) == launch.devices
    tensors, (report, *_) = ranks[0]
    first_outer, _, logged = tensors
    assert len(first_outer) == {"big": 6, "deep": 1002}[launch.kind]
    for (outer, model, _), _ in ranks:
        assert same(outer, first_outer)
        assert same(model, first_outer)
    assert report["landings"] == report["launches"] >= 2
    assert len(logged) == 1 + launch.metrics


if __name__ == "__main__":
    main()

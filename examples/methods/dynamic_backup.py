"""Dynamic backup workers (arXiv 2102.06280): a federation closes its rounds without waiting for a
site that stalls.

    python examples/methods/dynamic_backup.py

Four sites train in virtual time, at one second per inner step, and one of them stalls for a minute.
Its heartbeats continue, so it keeps its lease. A hub that waits for all sites therefore waits for
it, and the others wait for the hub. The sites train Lightning's BoringModel, whose loss is
meaningless.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_sdiloco.tools.cli import main

BACKUP = {"class_path": "lightning_sdiloco.DynamicBackup", "init_args": {"least": 0.5}}


def configuration(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a site, as in its `train.yaml`."""
    site = {
        "hub": "a.example:29400",
        "run": "example",
        "site": "site-a",
        "insecure": True,
        "lease": 3600.0,
    }
    strategy = {
        "class_path": "lightning_sdiloco.StreamingDiLoCoStrategy",
        "init_args": {
            "sync_every": 30,
            "overlap_steps": 5,
            "federation": {
                "class_path": "lightning_sdiloco.Federation",
                "init_args": {**site, **terms},
            },
        },
    }
    off = {
        "logger": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "max_epochs": -1,
        "max_steps": 150,
    }
    return {
        "trainer": {"accelerator": "cpu", "strategy": strategy, **off},
        "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
    }


TERMS: dict[str, dict[str, Any]] = {
    "the hub waits for all": {"grace": 3600.0},
    "DynamicBackup(least=0.5)": {"grace": 2.0, "quorum": BACKUP},
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, terms in TERMS.items():
            file = Path(folder) / "train.yaml"
            file.write_text(yaml.safe_dump(configuration(terms)))
            print(f"\n{name}\n")
            main(
                ["simulate", f"--config={file}", "--sites=4", "--step-time=1", "--absence=3:40-100"]
            )

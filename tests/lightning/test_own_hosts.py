"""Trainers and Fabric whose hosts are sites: the world and the folders of each, before training."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco import Federation
from tests.ranks import in_ranks, replace_environment

DISTRIBUTIONS = {
    "lightning.pytorch": "lightning_sdiloco.lightning_pytorch",
    "pytorch_lightning": "lightning_sdiloco.pytorch_lightning",
}
BY_HAND = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "1"}
IN_SLURM = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_NODELIST": "n[0-1]",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n1",
}


def trainer_of(distribution: str, folder: Path, **choices: Any) -> Any:
    ours = importlib.import_module(DISTRIBUTIONS[distribution])
    theirs = importlib.import_module(distribution)
    loggers = importlib.import_module(f"{distribution}.loggers")
    checkpoints = importlib.import_module(f"{distribution}.callbacks").ModelCheckpoint
    return theirs.Trainer(
        strategy=ours.StreamingDiLoCoStrategy(federation=Federation("llm")),
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        default_root_dir=folder,
        callbacks=[checkpoints(folder / "saved"), checkpoints(every_n_train_steps=5)],
        logger=loggers.CSVLogger(folder / "logs"),
        **choices,
    )


@in_ranks(1)
def test_hosts_of_a_trainer_are_worlds_with_their_own_folders(rank: int, tmp_path: Path) -> None:
    for distribution in DISTRIBUTIONS:
        for variables, site in ((BY_HAND, os.uname().nodename.partition(".")[0]), (IN_SLURM, "n1")):
            replace_environment(variables)
            trainer = trainer_of(distribution, tmp_path)
            assert (trainer.num_nodes, trainer.world_size, trainer.global_rank) == (1, 1, 0)
            environment = trainer.strategy.cluster_environment
            assert environment.main_address == "127.0.0.1"
            assert environment.creates_processes_externally is (variables is IN_SLURM)
            for _ in range(2):
                trainer.strategy.launcher.launch(lambda: None, trainer=trainer)
            folders = [callback.dirpath for callback in trainer.checkpoint_callbacks]
            assert sorted(folders) == [f"{tmp_path}/checkpoints/{site}", f"{tmp_path}/saved/{site}"]
            assert trainer.logger.save_dir == f"{tmp_path}/logs/{site}"
            assert trainer.default_root_dir == f"{tmp_path}/{site}"
            federation = trainer.strategy._options.federation
            assert (federation.site, federation.sites) == (site, 2)
            assert federation.folder == f"{tmp_path}/saved/hub-llm"


@in_ranks(1)
def test_hosts_of_fabric_are_worlds(rank: int) -> None:
    import lightning as L

    from lightning_sdiloco import StreamingDiLoCoFabricStrategy

    replace_environment(BY_HAND)
    strategy = StreamingDiLoCoFabricStrategy(federation=Federation("llm"))
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=1, num_nodes=2)
    assert (fabric.world_size, fabric.global_rank) == (1, 0)
    federation = strategy._options.federation
    assert federation is not None
    assert federation.hub == "127.0.0.1:29500"


@in_ranks(1)
def test_hosts_of_an_unknown_launcher_or_of_another_number_of_tasks_are_refused(
    rank: int, tmp_path: Path
) -> None:
    from lightning.fabric.plugins.environments.kubeflow import KubeflowEnvironment

    replace_environment({**IN_SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    with pytest.raises(ValueError, match="SLURM started 2 processes on n1, but the Trainer has"):
        trainer_of("lightning.pytorch", tmp_path)
    replace_environment({**BY_HAND, "RANK": "1", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="KubeflowEnvironment does not work with a federation"):
        trainer_of("lightning.pytorch", tmp_path, plugins=[KubeflowEnvironment()])

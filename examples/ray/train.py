"""Trains a byte-level GPT in worker groups that Ray starts, and restarts if they fail; or tunes
`sync_every`.

    python examples/ray/train.py --workers 4 --groups 2
    python examples/ray/train.py --tune 10 50

If you start it again with the same `--name` and `--storage`, it continues from the last reported
epoch. On a cluster, `--storage` must be a folder or bucket that all nodes share, and `--address
auto` finds the cluster.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray import tune
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

EXAMPLES = Path(__file__).resolve().parents[1]


def train(settings: dict[str, Any]) -> None:
    """Runs in every worker: the code of any Lightning project, plus four names from Ray."""
    from lightning.pytorch import Trainer, seed_everything
    from pretrain_text import ByteGPT
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
    from text_data import StandardLibraryText

    from lightning_sdiloco.ray import RayStreamingDiLoCoStrategy

    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=RayStreamingDiLoCoStrategy(settings["groups"], sync_every=settings["sync_every"]),
        accelerator="auto",
        devices="auto",
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        max_epochs=settings["epochs"],
        limit_train_batches=settings["steps"],
        limit_val_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = ray.train.get_checkpoint()  # there is one if a worker has failed
    with checkpoint.as_directory() if checkpoint else nullcontext() as folder:
        path = folder and Path(folder) / RayTrainReportCallback.CHECKPOINT_NAME
        prepare_trainer(trainer).fit(
            ByteGPT(layers=3, width=64), StandardLibraryText(), ckpt_path=path
        )


def started(
    options: argparse.Namespace, name: str, settings: dict[str, Any], **more: Any
) -> ray.train.Result:
    resources = {"resources_per_worker": {"CPU": options.cpus}, "use_gpu": options.gpu}
    run = {
        "failure_config": FailureConfig(max_failures=2),
        "checkpoint_config": CheckpointConfig(num_to_keep=2),
    }
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=options.workers, **resources),
        run_config=RunConfig(
            name=name, storage_path=str(Path(options.storage).resolve()), **run, **more
        ),
    )
    return trainer.fit()


def tuned(options: argparse.Namespace, settings: dict[str, Any]) -> tune.ResultGrid:
    """Trains once for each value of `sync_every`, one after the other."""

    def trial(choice: dict[str, Any]) -> None:
        name = f"{options.name}-{choice['sync_every']}"
        started(options, name, {**settings, **choice}, callbacks=[TuneReportCallback()])

    search = tune.TuneConfig(metric="val_loss", mode="min", max_concurrent_trials=1)
    space = {"sync_every": tune.grid_search(options.tune)}
    # A trial only waits for its workers, which do the computation.
    run_config = tune.RunConfig(storage_path=str(Path(options.storage).resolve()))
    few = tune.with_resources(trial, {"CPU": 0.1})
    return tune.Tuner(few, param_space=space, tune_config=search, run_config=run_config).fit()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--address", help="'auto' on a node of a cluster; without it Ray starts on this machine"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes, a GPU each with --gpu")
    parser.add_argument("--cpus", type=float, default=1, help="cores of a worker")
    parser.add_argument("--gpu", action="store_true", help="each worker has a GPU")
    parser.add_argument(
        "--groups", default="auto", help="'auto' is one per node, or per worker of one node"
    )
    parser.add_argument(
        "--sync-every", type=int, default=20, help="inner steps between two launches of a fragment"
    )
    parser.add_argument(
        "--tune", type=int, nargs="+", help="try each of these in place of --sync-every"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="inner steps of an epoch")
    parser.add_argument("--storage", default="runs/ray", help="where checkpoints and results go")
    parser.add_argument("--name", default="gpt", help="of the run; the same name goes on with it")
    options = parser.parse_args()
    groups = options.groups if options.groups == "auto" else int(options.groups)
    settings = {name: getattr(options, name) for name in ("sync_every", "epochs", "steps")} | {
        "groups": groups
    }
    # Each worker gets a copy of these examples, from which it imports the model and the data.
    ray.init(address=options.address, runtime_env={"working_dir": str(EXAMPLES)})
    if options.tune:
        results = tuned(options, settings)
        for result in results:
            print(
                f"sync_every {result.config['sync_every']}: validation loss"
                f" {result.metrics['val_loss']:.4f}"
            )
        print(f"best: sync_every {results.get_best_result().config['sync_every']}")
    else:
        print(f"finished: {started(options, options.name, settings).metrics}")


if __name__ == "__main__":
    main()

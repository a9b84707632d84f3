"""The strategy from a YAML file and from the command line of a LightningCLI, in a script that does not import us."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.scripts import run_script

SCRIPT = """
import torch
from {distribution} import LightningModule
from {distribution}.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

class Model(LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)
    def on_fit_end(self):
        strategy = self.trainer.strategy
        if strategy.global_rank == 0:
            optimizer = strategy.engine.state_dict()["described"]["outer_optimizer"].split("(")[0]
            print("RESULT", strategy.report()["launches"], strategy.schedule.overlap_steps, optimizer)
            print("COMPRESSION", strategy.engine.settings.codec)
            print("SCHEDULE", strategy.engine.state_dict()["described"]["outer_optimizer.lr_schedule"])

if __name__ == "__main__":
    LightningCLI(Model, trainer_defaults=dict(accelerator="cpu", devices=2, max_epochs=1, logger=False,
                 enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False))
"""

YAML = """
trainer:
  strategy:
    class_path: {class_path}
    init_args: {{sync_every: 2, overlap_steps: 1, compression: fp4, fragments: "strided:1", start_method: fork}}
"""

OURS = {
    "lightning.pytorch": "lightning_sdiloco.StreamingDiLoCoStrategy",
    "pytorch_lightning": "lightning_sdiloco.pytorch_lightning.StreamingDiLoCoStrategy",
}


def script_of(folder: Path, distribution: str) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(distribution=distribution))
    return script


def run(folder: Path, distribution: str, *arguments: str) -> str:
    return run_script(script_of(folder, distribution), *arguments)


@pytest.mark.parametrize("distribution", OURS)
def test_a_yaml_file_is_enough(distribution: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(YAML.format(class_path=OURS[distribution]))
    script, arguments = script_of(tmp_path, distribution), ("fit", "--config", "settings.yaml")
    if distribution == "lightning.pytorch":
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        output = done.stdout
    else:
        output = run_script(script, *arguments)
    # Five batches a rank: fragment 0 launches at 2 and 4, fragment 1 at 3 and 5.
    assert "RESULT 4 1 SGD" in output


def test_arguments_override_the_yaml_file_and_an_outer_optimizer_comes_by_its_class_path(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(YAML.format(class_path=OURS["lightning.pytorch"]))
    output = run(
        tmp_path,
        "lightning.pytorch",
        "fit",
        "--config=settings.yaml",
        "--trainer.strategy.overlap_steps=0",
        "--trainer.strategy.outer_optimizer=torch.optim.AdamW",
        "--trainer.strategy.outer_optimizer.lr=0.01",
        "--trainer.strategy.compression.class_path=lightning_sdiloco.compression.BFloat16",
        '--trainer.strategy.fragments=[["net.0.*"],["net.1.*"]]',
    )
    assert "RESULT 4 0 AdamW" in output


def test_auto_is_an_argument_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(YAML.format(class_path=OURS["lightning.pytorch"]))
    arguments = ("sync_every=auto", "overlap_steps=auto", "fragments=auto")
    overriding = (f"--trainer.strategy.{argument}" for argument in arguments)
    output = run(tmp_path, "lightning.pytorch", "fit", "--config=settings.yaml", "--trainer.max_epochs=3", *overriding)
    # Without a choice there would be no overlap. Fifteen inner steps are too few for a launch.
    assert re.search("RESULT 0 [1-9][0-9]? SGD", output)


WRAPPED = """
trainer:
  strategy:
    class_path: {class_path}
    init_args:
      sync_every: 2
      overlap_steps: 1
      fragments: "strided:1"
      start_method: fork
      compression:
        class_path: lightning_sdiloco.compression.ErrorFeedback
        init_args:
          decay: 0.9
          compression:
            class_path: lightning_sdiloco.compression.TopK
            init_args:
              share: 0.02
              values: {{class_path: lightning_sdiloco.compression.Int2}}
"""


@pytest.mark.parametrize("distribution", OURS)
def test_compressions_wrap_each_other_in_a_yaml_file(distribution: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(WRAPPED.format(class_path=OURS[distribution]))
    output = run(tmp_path, distribution, "fit", "--config", "settings.yaml")
    assert "COMPRESSION ErrorFeedback(compression=TopK(share=0.02, values=Int2()), decay=0.9)" in output


def test_every_compression_has_a_name_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(YAML.format(class_path=OURS["lightning.pytorch"]))
    arguments = ("fit", "--config=settings.yaml", "--trainer.strategy.compression=sparse")
    output = run(tmp_path, "lightning.pytorch", *arguments)
    assert "COMPRESSION ErrorFeedback(compression=TopK(share=0.015625, values=Int2()), decay=0.95)" in output


SCHEDULED = """
trainer:
  strategy:
    class_path: {class_path}
    init_args:
      sync_every: 2
      overlap_steps: 1
      fragments: "strided:1"
      start_method: fork
      outer_optimizer:
        class_path: lightning_sdiloco.OuterOptimizer
        init_args:
          clip_norm: 1.0
          make: {{class_path: torch.optim.SGD, init_args: {{lr: 0.4, momentum: 0.9, nesterov: true}}}}
          lr_schedule:
            class_path: torch.optim.lr_scheduler.CosineAnnealingLR
            init_args: {{T_max: 4}}
"""


@pytest.mark.parametrize("distribution", OURS)
def test_a_schedule_of_the_outer_learning_rate_comes_by_its_class_path(distribution: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(SCHEDULED.format(class_path=OURS[distribution]))
    output = run(tmp_path, distribution, "fit", "--config", "settings.yaml")
    assert "RESULT 4 1 SGD" in output
    # 0.4 * (1 + cos(pi * round / 4)) / 2
    assert "SCHEDULE CosineAnnealingLR (0.4, 0.341" in output


def test_print_config_shows_every_argument_and_nothing_else(tmp_path: Path) -> None:
    chosen = f"--trainer.strategy.class_path={OURS['lightning.pytorch']}"
    printed = yaml.safe_load(run(tmp_path, "lightning.pytorch", "fit", chosen, "--print_config"))
    assert printed["trainer"]["strategy"]["init_args"] == {
        "worker_groups": "auto",
        "sync_every": 100,
        "overlap_steps": 5,
        "mixing": "auto",
        "fragments": "strided",
        "compression": "fp4",
        "outer_lr": "auto",
        "outer_momentum": "auto",
        "evaluate": "outer",
        "federation": None,
        "outer_optimizer": None,
        "exchange": "auto",
        "resume": "exact",
        "warmup_steps": 0,
        "schedule": None,
        "weighing": None,
        "route": None,
        "timeout": "0:30:00",
        "start_method": "popen",
        "ddp_kwargs": None,
        "process_group_backend": None,
        "accelerator": None,
        "parallel_devices": None,
        "cluster_environment": None,
        "checkpoint_io": None,
        "precision_plugin": None,
    }


def test_print_config_shows_the_arguments_of_the_strategy_for_sharded_models(tmp_path: Path) -> None:
    name = OURS["lightning.pytorch"].replace("StreamingDiLoCoStrategy", "StreamingDiLoCoModelParallelStrategy")
    chosen = f"--trainer.strategy.class_path={name}"
    printed = yaml.safe_load(run(tmp_path, "lightning.pytorch", "fit", chosen, "--print_config"))
    arguments = printed["trainer"]["strategy"]["init_args"]
    own = {"data_parallel_size": "auto", "tensor_parallel_size": "auto", "save_distributed_checkpoint": True}
    own["process_group_backend"] = None
    assert list(arguments)[:2] == ["worker_groups", "sync_every"]
    assert list(arguments)[-5:] == ["timeout", *own]
    assert {key: arguments[key] for key in own} == own


def test_help_shows_the_text_of_every_argument(tmp_path: Path) -> None:
    shown = run(tmp_path, "lightning.pytorch", "fit", f"--trainer.strategy.help={OURS['lightning.pytorch']}")
    text = " ".join(shown.split())
    for sentence in (
        "--trainer.strategy.sync_every SYNC_EVERY Inner steps between two launches of the same fragment (H in the",
        "Share of the local parameters that is kept on landing (alpha in the paper), from 0 to 1; or a",
        "How long a fragment may be in flight, and the timeout of Lightning's own process groups.",
        "Arguments for DistributedDataParallel inside a worker group.",
    ):
        assert sentence in text


def test_names_that_are_no_arguments_are_refused_with_what_to_write(tmp_path: Path) -> None:
    old = YAML.replace('fragments: "strided:1"', "layers_per_fragment: 1, tau: 3")
    (tmp_path / "settings.yaml").write_text(old.format(class_path=OURS["lightning.pytorch"]))
    command = [sys.executable, str(script_of(tmp_path, "lightning.pytorch")), "fit", "--config", "settings.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100, check=False)
    assert done.returncode != 0
    assert "layers_per_fragment=1 is part of fragments: give fragments='strided:1'" in done.stderr
    assert "tau=3 is called overlap_steps here." in done.stderr


def test_policies_are_chosen_by_class_path(tmp_path: Path) -> None:
    config = tmp_path / "policies.yaml"
    chosen = {
        "class_path": OURS["lightning.pytorch"],
        "init_args": {
            "schedule": {"class_path": "lightning_sdiloco.Selective", "init_args": {"threshold": 0.2, "most": 3}},
            "weighing": {"class_path": "tests.engine.test_policies.Loudest"},
            "compression": {
                "class_path": "lightning_sdiloco.compression.ByLink",
                "init_args": {"menu": ["fp4", "sparse"], "within": 2.0},
            },
            "mixing": {"class_path": "tests.engine.test_policies.DelayCompensation", "init_args": {"strength": 0.1}},
            "exchange": {"class_path": "lightning_sdiloco.TwoShot", "init_args": {"links": [1.0, 1.0, 0.5]}},
        },
    }
    config.write_text(yaml.safe_dump({"trainer": {"strategy": chosen}}))
    printed = yaml.safe_load(run(tmp_path, "lightning.pytorch", "fit", f"--config={config}", "--print_config"))
    arguments = printed["trainer"]["strategy"]["init_args"]
    for name in ("schedule", "compression"):
        assert arguments[name] == chosen["init_args"][name]  # type: ignore[index]
    assert arguments["weighing"]["class_path"] == "tests.engine.test_policies.Loudest"
    assert arguments["mixing"]["init_args"] == {"strength": 0.1, "kept": 0.0}
    # A dataclass that stands for itself is shown by its fields alone.
    assert arguments["exchange"] == {"parts": "by_bandwidth", "links": [1.0, 1.0, 0.5], "backend": "gloo"}


@pytest.mark.parametrize("name", ["lightning_sdiloco.Ring", "tests.engine.test_routes.Neighbours"])
def test_a_route_is_chosen_by_class_path(tmp_path: Path, name: str) -> None:
    chosen = {"route": {"class_path": name}, "compression": "int8"}
    strategy = {"class_path": OURS["lightning.pytorch"], "init_args": chosen}
    (tmp_path / "route.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    arguments = [f"--config={tmp_path / 'route.yaml'}", "--print_config"]
    printed = yaml.safe_load(run(tmp_path, "lightning.pytorch", "fit", *arguments))
    assert printed["trainer"]["strategy"]["init_args"]["route"]["class_path"] == name

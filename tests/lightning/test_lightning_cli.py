"""The strategy from a YAML file and from the command line of a LightningCLI, in a script that does
not import us.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_sdiloco import StreamingDiLoCoModelParallelStrategy, StreamingDiLoCoStrategy
from tests.fits import LIGHTNING, OTHER, refusal
from tests.scripts import run_python, run_script

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
            print("COMPRESSION", strategy.engine.rounds.settings.codec)
            print("SCHEDULE", strategy.engine.state_dict()["described"]["outer_optimizer.lr_schedule"])

if __name__ == "__main__":
    LightningCLI(Model, trainer_defaults=dict(accelerator="cpu", devices=2, max_epochs=1, logger=False,
                 enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False))
"""

SHORT = {
    "sync_every": 2,
    "overlap_steps": 1,
    "fragments": "strided:1",
    "start_method": "fork",
}


def instance(class_path: str, **arguments: Any) -> dict[str, Any]:
    """An object as YAML describes it."""
    return {"class_path": class_path, "init_args": arguments}


TOP_K = instance(
    "lightning_sdiloco.compression.TopK",
    share=0.02,
    values=instance("lightning_sdiloco.compression.Int2"),
)
WRAPPED = instance("lightning_sdiloco.compression.ErrorFeedback", decay=0.9, compression=TOP_K)
OUTER = instance(
    "lightning_sdiloco.OuterOptimizer",
    clip_norm=1.0,
    make=instance("torch.optim.SGD", lr=0.4, momentum=0.9, nesterov=True),
    lr_schedule=instance("torch.optim.lr_scheduler.CosineAnnealingLR", T_max=4),
)


def run(
    folder: Path,
    *arguments: str,
    distribution: str = LIGHTNING,
    name: str = "StreamingDiLoCoStrategy",
    fresh: bool = False,
    **choices: Any,
) -> str:
    """Runs the script with arguments of the strategy from a YAML file, and others from the command
    line; returns its output.
    """
    home = "lightning_sdiloco"
    if distribution != LIGHTNING:
        home = f"lightning_sdiloco.{distribution}"
    strategy = instance(f"{home}.{name}", **choices)
    script = folder / "train.py"
    script.write_text(SCRIPT.format(distribution=distribution))
    (folder / "config.yaml").unlink(missing_ok=True)  # saved by a fit before this one
    settings = {"trainer": {"strategy": strategy}}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    command = (script, "fit", "--config", "settings.yaml", *arguments)
    if fresh:
        return run_python(*command, folder=folder)
    return run_script(*command)


def overriding(**choices: Any) -> list[str]:
    return [f"--trainer.strategy.{name}={value}" for name, value in choices.items()]


def test_a_yaml_file_is_enough_with_class_paths_and_arguments_override_it(tmp_path: Path) -> None:
    choices = {**SHORT, "outer_optimizer": OUTER, "compression": WRAPPED}
    feedback = "COMPRESSION ErrorFeedback(compression=TopK(share={}, values=Int2()), decay={})"
    for distribution, fresh in ((LIGHTNING, True), (OTHER, False)):
        output = run(tmp_path, distribution=distribution, fresh=fresh, **choices)
        # Five batches a rank: fragment 0 launches at 2 and 4, fragment 1 at 3 and 5.
        assert "RESULT 4 1 SGD" in output
        assert feedback.format(0.02, 0.9) in output
        # 0.4 * (1 + cos(pi * round / 4)) / 2
        assert "SCHEDULE CosineAnnealingLR (0.4, 0.341" in output
    nested = {
        "overlap_steps": 0,
        "outer_optimizer": "torch.optim.AdamW",
        "outer_optimizer.lr": 0.01,
        "compression.class_path": "lightning_sdiloco.compression.BFloat16",
        "fragments": '[["net.0.*"],["net.1.*"]]',
    }
    assert "RESULT 4 0 AdamW" in run(tmp_path, *overriding(**nested), **SHORT)
    # Of 25 inner steps, the default makes rounds of ten.
    output = run(tmp_path, "--trainer.max_epochs=5", *overriding(sync_every="null"), **SHORT)
    assert "RESULT 4 1 SGD" in output
    # Without a choice there would be no overlap. Fifteen inner steps are too few for a launch.
    auto = overriding(
        sync_every="auto", overlap_steps="auto", fragments="auto", compression="sparse"
    )
    output = run(tmp_path, "--trainer.max_epochs=3", *auto, **SHORT)
    assert re.search("RESULT 0 [1-9][0-9]? SGD", output)
    assert feedback.format(0.015625, 0.95) in output
    wrong = {**SHORT, "layers_per_fragment": 1, "tau": 3}
    message = refusal(run, tmp_path, **wrong, kind=AssertionError)
    assert "layers_per_fragment=1 is part of fragments: pass fragments='strided:1'" in message
    assert "tau=3 is called overlap_s" in message


def printed(folder: Path, **choices: Any) -> dict[str, Any]:
    """The arguments of the strategy that `--print_config` shows."""
    config: dict[str, Any] = yaml.safe_load(run(folder, "--print_config", **choices))
    return dict(config["trainer"]["strategy"]["init_args"])


@pytest.mark.parametrize(
    "strategy", [StreamingDiLoCoStrategy, StreamingDiLoCoModelParallelStrategy]
)
def test_print_config_shows_every_argument_and_nothing_else(strategy: Any, tmp_path: Path) -> None:
    parameters = inspect.signature(strategy).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    defaults["timeout"] = "0:30:00"
    arguments = printed(tmp_path, name=strategy.__name__)
    assert list(arguments.items()) == list(defaults.items())


def test_print_config_shows_policies_and_routes_by_class_path(tmp_path: Path) -> None:
    selective = instance("lightning_sdiloco.Selective", threshold=0.2, most=3)
    by_link = instance("lightning_sdiloco.compression.ByLink", menu=["fp4", "sparse"], within=2.0)
    arguments = printed(
        tmp_path,
        schedule=selective,
        weighing=instance("tests.engine.test_policies.Loudest"),
        compression=by_link,
        mixing=instance("tests.engine.test_policies.DelayCompensation", strength=0.1),
        exchange=instance("lightning_sdiloco.TwoShot", links=[1.0, 1.0, 0.5]),
    )
    assert arguments["schedule"] == selective
    assert arguments["compression"] == by_link
    assert arguments["weighing"]["class_path"] == "tests.engine.test_policies.Loudest"
    assert arguments["mixing"]["init_args"] == {"strength": 0.1, "kept": 0.0}
    # Of a dataclass that describes itself only the fields are shown.
    assert arguments["exchange"] == {
        "parts": "by_bandwidth",
        "links": [1.0, 1.0, 0.5],
        "backend": "gloo",
    }
    for name in ("lightning_sdiloco.Ring", "tests.engine.test_policies.Neighbours"):
        arguments = printed(tmp_path, route={"class_path": name}, compression="int8")
        assert arguments["route"]["class_path"] == name

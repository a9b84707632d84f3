"""The strategy from a YAML file and from the command line of a LightningCLI, in a script that does
not import us.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import yaml

from lightning_sdiloco import StreamingDiLoCoModelParallelStrategy, StreamingDiLoCoStrategy
from tests.fits import refusal
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
            print("COMPRESSION", strategy.engine.settings.codec)
            print("SCHEDULE", strategy.engine.state_dict()["described"]["outer_optimizer.lr_schedule"])

if __name__ == "__main__":
    LightningCLI(Model, trainer_defaults=dict(accelerator="cpu", devices=2, max_epochs=1, logger=False,
                 enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False))
"""

SHORT: dict[str, Any] = {
    "sync_every": 2,
    "overlap_steps": 1,
    "fragments": "strided:1",
    "start_method": "fork",
}


def made(class_path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": arguments}


TOP_K = made(
    "lightning_sdiloco.compression.TopK",
    share=0.02,
    values=made("lightning_sdiloco.compression.Int2"),
)
WRAPPED = made("lightning_sdiloco.compression.ErrorFeedback", decay=0.9, compression=TOP_K)
OUTER = made(
    "lightning_sdiloco.OuterOptimizer",
    clip_norm=1.0,
    make=made("torch.optim.SGD", lr=0.4, momentum=0.9, nesterov=True),
    lr_schedule=made("torch.optim.lr_scheduler.CosineAnnealingLR", T_max=4),
)


def run(
    folder: Path,
    *arguments: str,
    distribution: str = "lightning.pytorch",
    fresh: bool = False,
    **given: Any,
) -> str:
    """What the script prints with arguments of the strategy from a YAML file and others from the
    command line.
    """
    script = folder / "train.py"
    config = folder / "settings.yaml"
    script.write_text(SCRIPT.format(distribution=distribution))
    (folder / "config.yaml").unlink(missing_ok=True)  # what a fit before this one has saved
    home = (
        "lightning_sdiloco"
        if distribution == "lightning.pytorch"
        else f"lightning_sdiloco.{distribution}"
    )
    name = f"{home}.StreamingDiLoCo{'ModelParallel' if given.pop('sharded', False) else ''}Strategy"
    config.write_text(
        yaml.safe_dump({"trainer": {"strategy": {"class_path": name, "init_args": given}}})
    )
    command = (script, "fit", "--config", "settings.yaml", *arguments)
    return run_python(*command, folder=folder) if fresh else run_script(*command)


def overriding(**given: Any) -> list[str]:
    return [f"--trainer.strategy.{name}={value}" for name, value in given.items()]


def test_a_yaml_file_is_enough_with_class_paths_and_arguments_override_it(tmp_path: Path) -> None:
    given = {**SHORT, "outer_optimizer": OUTER, "compression": WRAPPED}
    for distribution, fresh in (("lightning.pytorch", True), ("pytorch_lightning", False)):
        output = run(tmp_path, distribution=distribution, fresh=fresh, **given)
        # Five batches a rank: fragment 0 launches at 2 and 4, fragment 1 at 3 and 5.
        assert "RESULT 4 1 SGD" in output
        assert (
            "COMPRESSION ErrorFeedback(compression=TopK(share=0.02, values=Int2()), decay=0.9)"
            in output
        )
        # 0.4 * (1 + cos(pi * round / 4)) / 2
        assert "SCHEDULE CosineAnnealingLR (0.4, 0.341" in output
    nested = {
        "outer_optimizer": "torch.optim.AdamW",
        "outer_optimizer.lr": 0.01,
        "compression.class_path": "lightning_sdiloco.compression.BFloat16",
        "fragments": '[["net.0.*"],["net.1.*"]]',
    }
    assert "RESULT 4 0 AdamW" in run(tmp_path, *overriding(overlap_steps=0, **nested), **SHORT)
    # Without a choice there would be no overlap. Fifteen inner steps are too few for a launch.
    auto = overriding(
        sync_every="auto", overlap_steps="auto", fragments="auto", compression="sparse"
    )
    output = run(tmp_path, "--trainer.max_epochs=3", *auto, **SHORT)
    assert re.search("RESULT 0 [1-9][0-9]? SGD", output)
    assert (
        "COMPRESSION ErrorFeedback(compression=TopK(share=0.015625, values=Int2()), decay=0.95)"
        in output
    )
    told = refusal(
        run, tmp_path, **{**SHORT, "layers_per_fragment": 1, "tau": 3}, kind=AssertionError
    )
    assert "layers_per_fragment=1 is part of fragments: give fragments='strided:1'" in told
    assert "tau=3 is called overlap_s" in told


def test_print_config_shows_every_argument_and_nothing_else(tmp_path: Path) -> None:
    def printed(**given: Any) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load(run(tmp_path, "--print_config", **given))
        return dict(config["trainer"]["strategy"]["init_args"])

    for kind in (StreamingDiLoCoStrategy, StreamingDiLoCoModelParallelStrategy):
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(kind).parameters.items()
        }
        arguments = printed(sharded=kind is StreamingDiLoCoModelParallelStrategy)
        assert list(arguments.items()) == list({**defaults, "timeout": "0:30:00"}.items())
    # Policies and routes by class path.
    chosen: dict[str, Any] = {
        "schedule": made("lightning_sdiloco.Selective", threshold=0.2, most=3),
        "weighing": made("tests.engine.test_policies.Loudest"),
        "compression": made(
            "lightning_sdiloco.compression.ByLink", menu=["fp4", "sparse"], within=2.0
        ),
        "mixing": made("tests.engine.test_policies.DelayCompensation", strength=0.1),
        "exchange": made("lightning_sdiloco.TwoShot", links=[1.0, 1.0, 0.5]),
    }
    arguments = printed(**chosen)
    assert (arguments["schedule"], arguments["compression"]) == (
        chosen["schedule"],
        chosen["compression"],
    )
    assert arguments["weighing"]["class_path"] == "tests.engine.test_policies.Loudest"
    assert arguments["mixing"]["init_args"] == {"strength": 0.1, "kept": 0.0}
    # A dataclass that stands for itself is shown by its fields alone.
    assert arguments["exchange"] == {
        "parts": "by_bandwidth",
        "links": [1.0, 1.0, 0.5],
        "backend": "gloo",
    }
    for name in ("lightning_sdiloco.Ring", "tests.engine.test_policies.Neighbours"):
        assert (
            printed(route={"class_path": name}, compression="int8")["route"]["class_path"] == name
        )

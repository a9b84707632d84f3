"""What is imported when: each distribution finds the strategies, and commands that need no tensor import no torch."""

from pathlib import Path

import pytest

from tests.test_rules import WITHOUT_LIGHTNING, run_python

TRAINERS = """
from {trainer} import Trainer
from {fabric} import Fabric

def made():
    common = dict(accelerator="cpu", devices=2)
    trainer = Trainer(strategy="streaming_diloco_find_unused_parameters_true", logger=False, **common)
    sharded = Trainer(strategy="streaming_diloco_model_parallel", logger=False, **common)
    strategies = trainer.strategy, sharded.strategy, Fabric(strategy="streaming_diloco", **common).strategy
    return sorted({{type(one).__module__ for one in strategies}})
"""
PLACES = {
    "lightning": {"trainer": "lightning.pytorch", "fabric": "lightning.fabric"},
    "pytorch_lightning": {"trainer": "pytorch_lightning", "fabric": "lightning_fabric"},
}
OURS = {"lightning": "lightning_sdiloco.lightning_pytorch", "pytorch_lightning": "lightning_sdiloco.pytorch_lightning"}

BY_NAME = """
from {trainer} import cli
class Parsed(cli.LightningCLI):
    def instantiate_classes(self):
        print(self.config.trainer.strategy["class_path"])

from {trainer}.demos.boring_classes import BoringModel
args = ["--trainer.strategy.class_path=StreamingDiLoCoStrategy"]
Parsed(BoringModel, run=False, args=args, save_config_callback=None)
"""


@pytest.mark.parametrize(("distribution", "other"), [tuple(OURS), tuple(OURS)[::-1]])
def test_a_distribution_alone_finds_the_strategies(distribution: str, other: str) -> None:
    code = f"""
{WITHOUT_LIGHTNING.format(blocked=[other])}
import lightning_sdiloco
assert [name for name in ("torch", "lightning", "pytorch_lightning", "jsonargparse") if name in sys.modules] == []
{TRAINERS.format(**PLACES[distribution])}
assert made() == [{OURS[distribution]!r}]
assert {OURS[other]!r} not in sys.modules
assert ("StreamingDiLoCoStrategy" in lightning_sdiloco.__all__) == ({distribution!r} == "lightning")
"""
    run_python(code)


def test_both_distributions_and_their_command_lines_find_the_strategies_one_imported_before_and_one_after() -> None:
    before, after = (TRAINERS.format(**PLACES[distribution]) for distribution in OURS)
    code = f"{before}\nimport lightning_sdiloco\none = made()\n{after}\nprint([*one, *made()])\n"
    code += "".join(BY_NAME.format(**place) for place in PLACES.values())
    found, *by_name = (line for line in run_python(code).splitlines() if "lightning_sdiloco" in line)
    assert found == str(list(OURS.values()))
    assert [name.rpartition(".")[2] for name in by_name] == ["StreamingDiLoCoStrategy"] * 2


COMMANDS = """
import sys
from lightning_sdiloco.tools.cli import main
for args, code in {commands}:
    try:
        main(args)
    except SystemExit as over:
        assert over.code == code, args
    assert {{"torch", "lightning", "pytorch_lightning", "numpy"}} & sys.modules.keys() == set(), args
print("all", flush=True)
"""


def test_commands_that_need_no_tensor_import_no_torch(tmp_path: Path) -> None:
    commands = [
        (["--help"], 0),
        (["--version"], 0),
        (["keys", "init", str(tmp_path / "keys")], 0),
        (["hub"], 2),
        (["hub", "end", "--hub=127.0.0.1:1"], 2),
        (["status", "--hub=127.0.0.1:1"], 2),
    ]
    assert run_python(COMMANDS.format(commands=commands)).splitlines()[-1] == "all"


def test_a_name_that_does_not_exist_is_told_so() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from lightning_sdiloco import Nothing  # noqa: F401

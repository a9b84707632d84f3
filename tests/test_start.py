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
OTHER = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}
OURS = {"lightning": "lightning_sdiloco.lightning_pytorch", "pytorch_lightning": "lightning_sdiloco.pytorch_lightning"}
NONE_IMPORTED = """
assert [name for name in ("torch", "lightning", "pytorch_lightning", "jsonargparse") if name in sys.modules] == []
"""


@pytest.mark.parametrize(("first", "alone"), [(True, False), (False, True)])
@pytest.mark.parametrize("distribution", sorted(PLACES))
def test_a_distribution_finds_the_strategies_imported_first_or_last(
    distribution: str, first: bool, alone: bool
) -> None:
    trainers, ours = TRAINERS.format(**PLACES[distribution]), "import sys\nimport lightning_sdiloco\n"
    other = OTHER[distribution]
    hidden = WITHOUT_LIGHTNING.replace(WITHOUT_LIGHTNING.partition("BLOCKED = ")[2].partition("\n")[0], repr([other]))
    code = (hidden if alone else "") + (ours + NONE_IMPORTED + trainers if first else trainers + ours)
    code += f"print(made(), {OURS[other]!r} in sys.modules, 'StreamingDiLoCoStrategy' in lightning_sdiloco.__all__)"
    assert run_python(code).strip() == f"{[OURS[distribution]]} False {not alone or distribution == 'lightning'}"


def test_both_distributions_find_the_strategies_one_imported_before_and_one_after() -> None:
    before, after = (TRAINERS.format(**PLACES[distribution]) for distribution in sorted(PLACES))
    code = f"{before}\nimport lightning_sdiloco\none = made()\n{after}\nprint([*one, *made()])"
    assert run_python(code).strip() == str([OURS[distribution] for distribution in sorted(PLACES)])


BY_NAME = """
{first}
{second}
class Parsed(cli.LightningCLI):
    def instantiate_classes(self):
        print(self.config.trainer.strategy["class_path"])

from {package}.demos.boring_classes import BoringModel
args = ["--trainer.strategy.class_path=StreamingDiLoCoStrategy"]
Parsed(BoringModel, run=False, args=args, save_config_callback=None)
"""


@pytest.mark.parametrize("distribution", sorted(PLACES))
def test_a_command_line_of_lightning_finds_the_strategy_by_its_name_alone(distribution: str) -> None:
    package = PLACES[distribution]["trainer"]
    lines = [f"from {package} import cli", "import lightning_sdiloco"]
    first, second = lines if distribution == "lightning" else reversed(lines)
    told = run_python(BY_NAME.format(first=first, second=second, package=package)).splitlines()[-1]
    assert told.startswith("lightning_sdiloco.")
    assert told.endswith(".StreamingDiLoCoStrategy")


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

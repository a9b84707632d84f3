"""Imports of the package: its parts need only one distribution of Lightning, none, or not even
torch.
"""

import re
from pathlib import Path

import pytest

from tests import scripts
from tests.test_rules import HUB_FILES, LIGHTNING, ROOT

TRAINERS = """
from {trainer} import Trainer
from {fabric} import Fabric

def modules_of_strategies():
    common = dict(accelerator="cpu", devices=2)
    trainer = Trainer(strategy="streaming_diloco_find_unused_parameters_true", logger=False, **common)
    sharded = Trainer(strategy="streaming_diloco_model_parallel", logger=False, **common)
    strategies = trainer.strategy, sharded.strategy, Fabric(strategy="streaming_diloco", **common).strategy
    return sorted({{type(strategy).__module__ for strategy in strategies}})
"""
PLACES = {
    "lightning": {"trainer": "lightning.pytorch", "fabric": "lightning.fabric"},
    "pytorch_lightning": {"trainer": "pytorch_lightning", "fabric": "lightning_fabric"},
}
OURS = {
    "lightning": "lightning_sdiloco.lightning_pytorch",
    "pytorch_lightning": "lightning_sdiloco.pytorch_lightning",
}

BY_NAME = """
from {trainer} import cli
class Parsed(cli.LightningCLI):
    def instantiate_classes(self):
        print(self.config.trainer.strategy["class_path"])

from {trainer}.demos.boring_classes import BoringModel
args = ["--trainer.strategy.class_path=StreamingDiLoCoStrategy"]
Parsed(BoringModel, run=False, args=args, save_config_callback=None)
"""

TRAINING = """
import torch
import lightning_sdiloco

model = torch.nn.Linear(4, 1)
engine = lightning_sdiloco.StreamingDiLoCo(model, sync_every=3, overlap_steps=1, fragments=[["*"]])
before = engine.outer_state_dict()["weight"]
for _ in range(9):
    model.weight.data += 1.0
    engine.step()
engine.finish()
assert engine.report()["landings"] == 3, engine.report()
assert (engine.outer_state_dict()["weight"] > before).all()
assert not hasattr(lightning_sdiloco, "StreamingDiLoCoStrategy")
assert "StreamingDiLoCoStrategy" not in lightning_sdiloco.__all__
assert all(hasattr(lightning_sdiloco, name) for name in lightning_sdiloco.__all__)
"""


def run_python(code: str, without: set[str] = frozenset(), folder: Path = ROOT) -> str:
    """Runs a script in a folder and a process in which some packages seem not to be installed;
    returns the printed text.
    """
    hidden = f"import sys; sys.modules.update(dict.fromkeys({sorted(without)}))\n"
    return scripts.run_python("-c", hidden + code, folder=folder)


@pytest.mark.parametrize(("distribution", "absent"), [tuple(OURS), tuple(OURS)[::-1]])
def test_a_distribution_alone_finds_the_strategies(distribution: str, absent: str) -> None:
    code = f"""
import lightning_sdiloco
imported = [name for name in ("torch", "lightning", "pytorch_lightning", "jsonargparse") if sys.modules.get(name)]
assert imported == [], imported
{TRAINERS.format(**PLACES[distribution])}
assert modules_of_strategies() == [{OURS[distribution]!r}]
assert {OURS[absent]!r} not in sys.modules
assert ("StreamingDiLoCoStrategy" in lightning_sdiloco.__all__) == ({distribution!r} == "lightning")
"""
    run_python(code, without={absent})


@pytest.mark.parametrize(
    ("name", "most", "torch"),
    [
        ("AgreementError", 4, False),
        ("DenseBeginning", 5, False),
        ("Quorum", 13, False),
        ("FP4", 13, True),
        ("TwoShot", 20, True),
    ],
)
def test_a_public_name_imports_only_the_modules_that_it_needs(
    name: str, most: int, torch: bool
) -> None:
    code = f"""
import lightning_sdiloco
lightning_sdiloco.{name}
ours = sorted(module for module in sys.modules if module.startswith("lightning_sdiloco"))
assert len(ours) <= {most}, ours
assert ("torch" in sys.modules) == {torch}
"""
    run_python(code)


def test_the_files_of_the_two_distributions_differ_only_in_its_names() -> None:
    """Their classes are written out in both, for type checkers, pickle and the API page."""
    package = ROOT / "lightning_sdiloco"
    twin = (package / "pytorch_lightning.py").read_text()
    expected = (package / "lightning_pytorch.py").read_text()
    names = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
    for name, name_in_twin in names.items():
        expected = re.sub(rf"(?<![\w.]){re.escape(name)}", name_in_twin, expected)
    assert expected == twin


def test_both_distributions_and_their_command_lines_find_the_strategies() -> None:
    """One distribution is imported before the package, one after it."""
    before, after = (TRAINERS.format(**PLACES[distribution]) for distribution in OURS)
    code = f"{before}\nimport lightning_sdiloco\nfirst = modules_of_strategies()\n"
    code += f"{after}\nprint([*first, *modules_of_strategies()])\n"
    code += "".join(BY_NAME.format(**place) for place in PLACES.values())
    lines = [line for line in run_python(code).splitlines() if "lightning_sdiloco" in line]
    modules, *class_paths = lines
    assert modules == str(list(OURS.values()))
    names = [class_path.rpartition(".")[2] for class_path in class_paths]
    assert names == ["StreamingDiLoCoStrategy"] * 2


def test_the_engine_trains_without_lightning() -> None:
    run_python(TRAINING, without=LIGHTNING | {"jsonargparse", "rich"})


def hub_folder(folder: Path) -> Path:
    """Copies the files of the distribution for hubs, as its wheel has them."""
    for name in HUB_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((ROOT / name).read_text())
    return folder


def test_the_commands_of_a_hub_run_without_torch_and_start_without_numpy(tmp_path: Path) -> None:
    commands = {"--help": 0, "--version": 0, f"keys init {tmp_path}/keys": 0, "doctor": 2}
    commands |= {"hub": 2, "hub end --hub=127.0.0.1:1": 2, "status --hub=127.0.0.1:1": 2}
    modules = [name.removesuffix(".py").replace("/", ".") for name in HUB_FILES]
    code = f"""
import importlib
from lightning_sdiloco.tools.cli import main
for words, code in {commands}.items():
    try:
        main(words.split())
    except SystemExit as over:
        assert over.code == code, words
    assert sys.modules.get("numpy") is None, words
for name in {modules}:
    importlib.import_module(name)
import lightning_sdiloco
lightning_sdiloco.DynamicBackup
try:
    lightning_sdiloco.Federation
except ImportError as error:
    print(error)
"""
    output = run_python(code, LIGHTNING | {"torch", "triton"}, hub_folder(tmp_path / "hub"))
    assert "sdiloco doctor is not included in lightning-sdiloco-hub" in output
    assert "lightning_sdiloco.Federation is not part of lightning-sdiloco-hub" in output


def test_both_distributions_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path)
    (folder / "lightning_sdiloco_hub-0.1.0.dist-info").mkdir()
    code = """
import os
import lightning_sdiloco
os.mkdir("lightning_sdiloco-0.2.0.dist-info")
del sys.modules["lightning_sdiloco"]
try:
    import lightning_sdiloco
except ImportError as error:
    print(error)
"""
    output = run_python(code, folder=folder)
    assert "lightning-sdiloco and lightning-sdiloco-hub are both installed" in output

"""The register of Lightning's private names: it is complete, and a missing name is reported before
training.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import lightning_sdiloco
from lightning_sdiloco import lightning_pytorch as ours
from lightning_sdiloco.lightning import host as patching
from lightning_sdiloco.lightning.host import FABRIC, NEWEST, OLDEST, REGISTER, HostName
from lightning_sdiloco.tools.simulate.groups import simulated_classes
from tests import fits
from tests.fits import LIGHTNING, OTHER, refusal
from tests.ranks import in_ranks

VERSION = importlib.import_module(LIGHTNING).__version__


@cache
def prepared(distribution: str, of_shards: bool = False) -> Any:
    """A trainer that is about to fit, with all that the register may look at."""
    host = importlib.import_module(distribution)
    choices: dict[str, Any] = {"data_parallel_size": 1} if of_shards else {"start_method": "fork"}
    strategy = fits.strategy(distribution, worker_groups=1, **choices)
    callbacks = [
        host.callbacks.Timer(timedelta(days=1)),
        host.callbacks.ModelCheckpoint(),
        host.callbacks.StochasticWeightAveraging(0.1),
    ]
    if hasattr(host.callbacks, "WeightAveraging"):
        callbacks.append(host.callbacks.WeightAveraging())
    # It writes nothing before the first fit.
    logger = host.loggers.CSVLogger("logs")
    trainer = host.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, callbacks=callbacks, logger=logger
    )
    module = fits.module(distribution)
    module.trainer = trainer
    strategy.connect(module)
    module._device_mesh = object()
    if of_shards:
        strategy._device_mesh = object()
    return trainer


def look(place: str, distribution: str) -> None:
    """Looks for the names of a place, and others."""
    if place == "LightningCLI":
        cli = importlib.import_module(f"{distribution}.cli").LightningCLI
        patching.check_without_trainer(cli)
    elif place == FABRIC:
        fabric = "lightning.fabric" if distribution == LIGHTNING else "lightning_fabric"
        strategies = importlib.import_module(f"{fabric}.strategies.ddp")
        patching.check_without_trainer(strategies.DDPStrategy(), FABRIC)
    else:
        patching.check_names(prepared(distribution, of_shards=place == "ModelParallelStrategy"))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of the register; a Trainer logs others."""
    records = [record for record in caplog.records if record.name == patching.__name__]
    caplog.clear()
    return [record.getMessage() for record in records]


class Timer(importlib.import_module(LIGHTNING).Callback):
    """A user's callback that has the name of one of Lightning's."""


@pytest.mark.parametrize("distribution", [LIGHTNING, OTHER])
def test_a_missing_name_is_reported(
    distribution: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A name of our own classes is not one of Lightning's.
    monkeypatch.setattr(type(prepared(distribution).strategy), "_gone", None, raising=False)
    for place in {entry.place for entry in REGISTER if entry.is_expected_in(VERSION)}:
        look(place, distribution)
        assert warnings_of(caplog) == [], "nothing is missing here"
        gone = HostName(place, "_gone")
        with monkeypatch.context() as patch:
            patch.setattr(patching, "REGISTER", (*REGISTER, gone))
            message = refusal(look, place, distribution)
        assert f"worker groups need: {gone}. " in message
        assert f"tested with Lightning {OLDEST} to {NEWEST}. Install one of these" in message


@pytest.mark.parametrize("distribution", [LIGHTNING, OTHER])
def test_a_users_callback_of_the_same_name_lacks_nothing(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = prepared(distribution)
    monkeypatch.setattr(trainer, "callbacks", [*trainer.callbacks, Timer()])
    patching.check_names(trainer)


@pytest.mark.parametrize("distribution", [LIGHTNING, OTHER])
def test_a_private_name_that_is_set_has_to_be_seen_through_its_public_one(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in REGISTER:
        if entry.name not in patching._SET:
            continue
        trainer = prepared(distribution, entry.place == "ModelParallelStrategy")
        host = trainer.lightning_module if "module" in entry.place else trainer.strategy
        public_name = entry.name.removeprefix("_")
        with monkeypatch.context() as patch:
            patch.setattr(lightnings_class_with(public_name, host), public_name, None)
            assert f"worker groups need: {entry}" in refusal(look, entry.place, distribution)


def lightnings_class_with(name: str, host: Any) -> type:
    """The first class of Lightning's that gives a name to an object."""
    bases = type(host).__mro__
    lightnings = [base for base in bases if patching.is_of_lightning(base.__module__)]
    return next(base for base in lightnings if name in vars(base))


@in_ranks(1)
def test_every_fit_looks_for_the_names(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    needed = HostName("trainer.fit_loop.epoch_loop", "_gone")
    optional = HostName("trainer.fit_loop", "_left", without="the bar is empty")
    for distribution in (LIGHTNING, OTHER):
        patching.REGISTER = (*REGISTER, needed)
        trainer = trainer_of(distribution)
        assert f"{needed}. " in refusal(fit, trainer, distribution)
        assert trainer.global_step == 0
        assert warnings_of(caplog) == []

        patching.REGISTER = (*REGISTER, optional)
        trainer = trainer_of(distribution)
        fit(trainer, distribution)
        assert trainer.global_step == 2
        (warning,) = warnings_of(caplog)
        assert f"{optional}, without which {optional.without}" in warning


def trainer_of(distribution: str) -> Any:
    return fits.trainer(distribution, strategy=fits.strategy(distribution), max_steps=2)


def fit(trainer: Any, distribution: str) -> None:
    trainer.fit(fits.module(distribution), fits.SomeBatches(0, 2))


def test_only_existing_names_of_the_register_are_replaced() -> None:
    loop = prepared(LIGHTNING).fit_loop
    before = loop.setup_data
    with ExitStack() as undo:
        wrap = partial(patching.wrap, undo)
        message = refusal(wrap, loop, "_save_something", print, kind=AssertionError)
        assert "_save_something is not in the register" in message
        message = refusal(wrap, object(), "setup_data", print)
        assert "lacks names that worker groups need: trainer.fit_loop" in message
        wrap(loop, "setup_data", print)
        wrap(loop, "setup_data", repr)
        assert loop.setup_data.func is repr
    assert loop.setup_data == before
    assert "setup_data" not in vars(loop)


# The register and the source

PACKAGE = Path(lightning_sdiloco.__file__).parent
NAMES = {entry.name for entry in REGISTER}
# Methods of named tuples, and the end of the names of scalars.
NO_NAMES = {"_make", "_replace", "_asdict", "_ms"}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def is_ours(value: ast.expr) -> bool:
    """Tells whether an attribute of this value is one of our classes' own."""
    return ast.unparse(value) in ("self", "cls")


def defined_in(tree: ast.AST) -> set[str]:
    """The names that a file defines: not those of methods that override another's."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                if "override" not in map(ast.unparse, node.decorator_list):
                    names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                if is_ours(node.value):
                    names.add(node.attr)
    return names


def private_names(tree: ast.AST, of_file: set[str], of_package: set[str]) -> set[str]:
    """The private names of others that a file uses, as attributes or in quotes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute():
                is_our_own = is_ours(node.value) or ast.unparse(node.value) == "super()"
                names |= {node.attr} - (of_package if is_our_own else of_file)
            case ast.Constant(value=str(text)):
                names |= {text} - of_file
            case ast.FunctionDef():
                names |= {node.name} - of_package
            case ast.ImportFrom():
                names.update(alias.name for alias in node.names)
    return set(filter(is_private, names))


def calls_in(tree: ast.AST, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            yield node


def words_of(tree: ast.AST) -> set[str]:
    """All attributes, names of definitions, and strings."""
    words: set[str] = set()
    for node in ast.walk(tree):
        fields = [getattr(node, field, None) for field in ("attr", "name", "value")]
        words.update(field for field in fields if isinstance(field, str))
    return words


def strings_in(arguments: list[ast.expr]) -> set[str]:
    constants = [part.value for part in arguments if isinstance(part, ast.Constant)]
    return {constant for constant in constants if isinstance(constant, str)}


def knows_lightning(path: Path) -> bool:
    rooms = set(path.relative_to(PACKAGE).parts)
    return path.parent == PACKAGE or not rooms.isdisjoint(("lightning", "simulate"))


def test_every_private_name_and_every_patch_is_in_the_register_and_no_other() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    defined = {path: defined_in(tree) for path, tree in trees.items()}
    of_package = set().union(*defined.values())
    used: set[str] = set()
    for path in filter(knows_lightning, trees):
        tree = trees[path]
        names = private_names(tree, defined[path], of_package)
        assert names - NAMES - NO_NAMES == set(), path
        for call in calls_in(tree, "wrap"):
            if len(call.args) == 4:
                assert strings_in([call.args[-2]]) <= NAMES, path
        if path != Path(patching.__file__):
            used |= words_of(tree)
        else:
            for call in calls_in(tree, "getattr"):
                used |= strings_in(call.args)
    assert NAMES - used == set()
    assert len({(entry.place, entry.name) for entry in REGISTER}) == len(REGISTER)


def names_used_by(kind: type) -> set[str]:
    """The names that the methods of our classes define and use."""
    names: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("lightning_sdiloco"):
            continue
        for name, value in vars(base).items():
            function = getattr(value, "fget", None) or value
            if isinstance(function, FunctionType):
                names |= {name, *function.__code__.co_names}
    return names


def test_names_that_our_classes_share_with_lightnings_are_in_the_register() -> None:
    strategies = importlib.import_module(f"{LIGHTNING}.strategies")
    launchers = importlib.import_module(f"{LIGHTNING}.strategies.launchers")
    fabric_strategies = importlib.import_module("lightning.fabric.strategies.ddp")
    ddp = strategies.DDPStrategy()
    hosts = {
        ours.StreamingDiLoCoStrategy: ddp,
        simulated_classes(LIGHTNING.partition(".")[0]).strategy: ddp,
        ours.StreamingDiLoCoModelParallelStrategy: strategies.ModelParallelStrategy(),
        ours.StreamingDiLoCoFabricStrategy: fabric_strategies.DDPStrategy(),
        ours.StreamingDiLoCoStrategy.distribution.launcher: launchers._MultiProcessingLauncher(ddp),
    }
    for kind, host in hosts.items():
        shared = set(filter(is_private, dir(host))) & names_used_by(kind)
        assert shared, kind
        assert shared - NAMES == set(), kind


def test_the_register_names_the_versions_that_are_tested_and_allowed() -> None:
    newest = pinned_in("constraints.txt")
    oldest = pinned_in("Makefile")
    project = (PACKAGE.parent / "pyproject.toml").read_text()
    for name in ("lightning", "pytorch-lightning"):
        assert newest[name] == NEWEST
        assert oldest[name] == OLDEST
        (lowest,) = re.findall(rf'"{name}>=([\d.]+),<3"', project)
        assert f"{lowest}.0" == OLDEST


def pinned_in(file: str) -> dict[str, str]:
    text = (PACKAGE.parent / file).read_text()
    return dict(re.findall(r"(?:^| )([\w-]+)==([\w.]+)", text, flags=re.MULTILINE))


def test_a_name_is_expected_from_its_first_version_on() -> None:
    late = HostName("trainer", "_x", "2.5.2")
    assert not late.is_expected_in("2.5.0.post0")
    for version in ("2.5.2", "2.6.0.dev1", NEWEST, "2.10.0"):
        assert late.is_expected_in(version)

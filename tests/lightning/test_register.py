"""The register of Lightning's private names: it is complete, and a name that is missing is told
before training.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from itertools import product
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
    chosen: dict[str, Any] = {"data_parallel_size": 1} if of_shards else {"start_method": "fork"}
    strategy = fits.strategy(distribution, worker_groups=1, **chosen)
    callbacks = [host.callbacks.Timer(timedelta(days=1)), host.callbacks.ModelCheckpoint()]
    callbacks.append(host.callbacks.StochasticWeightAveraging(0.1))
    if hasattr(host.callbacks, "WeightAveraging"):
        callbacks.append(host.callbacks.WeightAveraging())
    trainer = host.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, callbacks=callbacks, logger=False
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
        patching.check_without_trainer(importlib.import_module(f"{distribution}.cli").LightningCLI)
    elif place == FABRIC:
        fabric = "lightning.fabric" if distribution == LIGHTNING else "lightning_fabric"
        patching.check_without_trainer(
            importlib.import_module(f"{fabric}.strategies.ddp").DDPStrategy(), FABRIC
        )
    else:
        patching.check_names(prepared(distribution, of_shards=place == "ModelParallelStrategy"))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the register says; a Trainer says this and that as well."""
    said = [record.getMessage() for record in caplog.records if record.name == patching.__name__]
    caplog.clear()
    return said


class Timer(importlib.import_module(LIGHTNING).Callback):
    """A callback of a user that has the name of one of Lightning's, and is none of its."""


@pytest.mark.parametrize("distribution", [LIGHTNING, OTHER])
def test_a_missing_name_is_reported(
    distribution: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            prepared(distribution), "callbacks", [*prepared(distribution).callbacks, Timer()]
        )
        patching.check_names(prepared(distribution))
    # Of our own classes a name does not count.
    monkeypatch.setattr(type(prepared(distribution).strategy), "_gone", None, raising=False)
    for place in {entry.place for entry in REGISTER if entry.is_expected_in(VERSION)}:
        look(place, distribution)
        assert warnings_of(caplog) == [], "nothing is missing here"
        with monkeypatch.context() as patch:
            gone = HostName(place, "_gone")
            patch.setattr(patching, "REGISTER", (*REGISTER, gone))
            told = refusal(look, place, distribution)
            assert f"worker groups need: {gone}. " in told
            assert f"tested with Lightning {OLDEST} to {NEWEST}. Install one of these" in told
    # What is set is there, and has to be seen.
    for entry in (entry for entry in REGISTER if entry.name in patching._SET):
        public = entry.name.removeprefix("_")
        trainer = prepared(distribution, entry.place == "ModelParallelStrategy")
        host = trainer.lightning_module if "module" in entry.place else trainer.strategy
        kinds = [
            kind
            for kind in type(host).__mro__
            if patching.is_of_lightning(kind.__module__) and public in vars(kind)
        ]
        with monkeypatch.context() as patch:
            patch.setattr(kinds[0], public, None)
            assert f"worker groups need: {entry}" in refusal(look, entry.place, distribution)


@in_ranks(1)
def test_every_fit_looks_for_the_names(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    needed = HostName("trainer.fit_loop.epoch_loop", "_gone")
    optional = HostName("trainer.fit_loop", "_left", without="the bar is empty")
    for distribution, (entry, steps) in product((LIGHTNING, OTHER), ((needed, 0), (optional, 2))):
        patching.REGISTER = (*REGISTER, entry)
        trainer = fits.trainer(distribution, strategy=fits.strategy(distribution), max_steps=2)
        play = partial(trainer.fit, fits.module(distribution), fits.SomeBatches(0, 2))
        if entry.without:
            play()
            (warning,) = warnings_of(caplog)
            assert f"{entry}, without which {entry.without}" in warning
        else:
            assert f"{entry}. " in refusal(play)
        assert (trainer.global_step, warnings_of(caplog)) == (steps, [])


def test_only_existing_names_of_the_register_are_replaced() -> None:
    loop = prepared(LIGHTNING).fit_loop
    before = loop.setup_data
    with ExitStack() as undo:
        told = refusal(patching.wrap, undo, loop, "_save_something", print, kind=AssertionError)
        assert "_save_something is not in the register" in told
        told = refusal(patching.wrap, undo, object(), "setup_data", print)
        assert "lacks what worker groups need: trainer.fit_loop" in told
        patching.wrap(undo, loop, "setup_data", print)
        patching.wrap(undo, loop, "setup_data", repr)
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


def defined_in(tree: ast.AST) -> set[str]:
    """The names that a file defines: not those of methods that override another's."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names |= (
                {node.name} if "override" not in map(ast.unparse, node.decorator_list) else set()
            )
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            names |= {node.id if isinstance(node, ast.Name) else node.attr} if own else set()
    return names


def foreign_names(tree: ast.AST, own: set[str], ours: set[str]) -> Iterator[str]:
    """The private names of others that a file speaks of, as attributes or in quotes."""
    for node in ast.walk(tree):
        found: set[str] = set()
        if isinstance(node, ast.Attribute):
            found = {node.attr} - (
                ours if ast.unparse(node.value) in ("self", "cls", "super()") else own
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = {node.value} - own
        elif isinstance(node, ast.FunctionDef):
            found = {node.name} - ours
        elif isinstance(node, ast.ImportFrom):
            found = {alias.name for alias in node.names}
        yield from filter(is_private, found)


def test_every_private_name_and_every_patch_is_in_the_register_and_no_other() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    defined = {path: defined_in(tree) for path, tree in trees.items()}
    spoken: set[str] = set()
    for path, tree in trees.items():
        if path.parent != PACKAGE and not {"lightning", "simulate"} & {
            *path.relative_to(PACKAGE).parts
        }:
            continue
        assert (
            set(foreign_names(tree, defined[path], set().union(*defined.values())))
            - NAMES
            - NO_NAMES
            == set()
        ), path
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "wrap"
                and len(node.args) == 4
            ):
                name = node.args[-2]
                assert not isinstance(name, ast.Constant) or name.value in NAMES, path
            if path != Path(patching.__file__):
                words = (getattr(node, field, None) for field in ("attr", "name", "value"))
                spoken |= {word for word in words if isinstance(word, str)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                spoken |= {
                    part.value
                    for part in node.args
                    if isinstance(part, ast.Constant) and part.value
                }
    assert NAMES - spoken == set()
    assert len({(entry.place, entry.name) for entry in REGISTER}) == len(REGISTER)


def test_names_that_our_classes_share_with_lightnings_are_in_the_register() -> None:
    strategies = importlib.import_module(f"{LIGHTNING}.strategies")
    launcher = importlib.import_module(f"{LIGHTNING}.strategies.launchers")._MultiProcessingLauncher
    hosts = {
        ours.StreamingDiLoCoStrategy: strategies.DDPStrategy(),
        simulated_classes(LIGHTNING.partition(".")[0]).strategy: strategies.DDPStrategy(),
        ours.StreamingDiLoCoModelParallelStrategy: strategies.ModelParallelStrategy(),
        ours.StreamingDiLoCoFabricStrategy: importlib.import_module(
            "lightning.fabric.strategies.ddp"
        ).DDPStrategy(),
        ours.StreamingDiLoCoStrategy.distribution.launcher: launcher(strategies.DDPStrategy()),
    }
    for kind, host in hosts.items():
        names = set()
        for base in (
            base for base in kind.__mro__ if base.__module__.startswith("lightning_sdiloco")
        ):
            for name, value in vars(base).items():
                function = getattr(value, "fget", None) or value
                if isinstance(function, FunctionType):
                    names |= {name, *function.__code__.co_names}
        shared = set(filter(is_private, dir(host))) & names
        assert shared, kind
        assert shared - NAMES == set(), kind


def test_the_register_names_the_versions_that_are_tested_and_allowed() -> None:
    def pinned(file: str) -> dict[str, str]:
        return dict(
            re.findall(
                r"(?:^| )([\w-]+)==([\w.]+)",
                (PACKAGE.parent / file).read_text(),
                flags=re.MULTILINE,
            )
        )

    newest = pinned("constraints.txt")
    oldest = pinned("Makefile")
    project = (PACKAGE.parent / "pyproject.toml").read_text()
    for name in ("lightning", "pytorch-lightning"):
        assert (oldest[name], newest[name]) == (OLDEST, NEWEST)
        (lowest,) = re.findall(rf'"{name}>=([\d.]+),<3"', project)
        assert f"{lowest}.0" == OLDEST
    late = HostName("trainer", "_x", "2.5.2")
    versions = ("2.5.0.post0", "2.5.2", "2.6.0.dev1", NEWEST, "2.10.0")
    assert [late.is_expected_in(version) for version in versions] == [False, True, True, True, True]

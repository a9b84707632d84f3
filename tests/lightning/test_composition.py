"""How strategies are put together: one class of overrides, arguments that stand once, parts that own their state."""

import importlib
import inspect
import pickle
import pydoc
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from torch.utils.data import DataLoader

from lightning_sdiloco.lightning.strategy import WorkerGroupStrategy
from tests import fits
from tests.ranks import run_processes

FACES = ("lightning_pytorch", "pytorch_lightning")
NAMES = ("StreamingDiLoCoStrategy", "StreamingDiLoCoModelParallelStrategy")
OWN = {NAMES[0]: {"start_method", "ddp_kwargs"}, NAMES[1]: {"data_parallel_size", "save_distributed_checkpoint"}}
PARTS = {"_options", "_groups", "_results", "_format", "_fit", "_patches"}


def strategy_of(face: str, name: str) -> Any:
    return getattr(importlib.import_module(f"lightning_sdiloco.{face}"), name)


def base_of(strategy: type) -> Any:
    """The first of its bases that is Lightning's."""
    return next(base for base in strategy.__mro__ if not base.__module__.startswith("lightning_sdiloco"))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_adds_base_and_name_and_overrides_nothing(face: str, name: str) -> None:
    strategy = strategy_of(face, name)
    assert strategy.__mro__[1] is WorkerGroupStrategy
    assert strategy.__bases__ == (WorkerGroupStrategy, base_of(strategy))
    own = [name for name, value in vars(strategy).items() if inspect.isfunction(value) or isinstance(value, property)]
    assert own == ["__init__"], "it hands over names that are no arguments"


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_has_no_state_but_its_parts(name: str) -> None:
    strategy = strategy_of("lightning_pytorch", name)
    of_base = vars(base_of(strategy)())
    assert vars(strategy(worker_groups=2)).keys() - of_base.keys() == PARTS


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", NAMES)
def test_help_shows_every_argument_with_its_description(face: str, name: str) -> None:
    strategy = strategy_of(face, name)
    text, arguments = pydoc.render_doc(strategy, renderer=pydoc.plaintext), inspect.signature(strategy).parameters
    assert OWN[name] | {"worker_groups", "outer_optimizer", "resume"} <= arguments.keys()
    for argument in arguments:
        assert f"{argument}: " in text.partition("Args:")[2].partition("Raises:")[0], argument
    assert text.count("mixing: Share") == 1
    assert "of_format" not in arguments


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_shows_every_argument(face: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = base_of(strategy_of(face, name)).__mro__[2]
    parser = ArgumentParser()
    parser.add_argument("--strategy", type=base)
    path = f"lightning_sdiloco.{face}.{name}"
    with pytest.raises(SystemExit):
        parser.parse_args([f"--strategy.help={path}"])
    shown = " ".join(capsys.readouterr().out.split())
    arguments = inspect.signature(strategy_of(face, name)).parameters
    assert all(f"--strategy.{argument} " in shown for argument in arguments)
    assert "Share of the local parameters that is kept on landing" in shown
    assert "static_graph" not in shown, "an argument of DistributedDataParallel"
    chosen = parser.parse_args([f"--strategy={path}", "--strategy.mixing=0.25"])
    assert vars(chosen.strategy.init_args).keys() == arguments.keys()
    assert "mixing: 0.25" in parser.dump(chosen)


@pytest.mark.parametrize("face", FACES)
def test_a_wrong_argument_is_refused_in_the_name_that_the_user_chose(face: str) -> None:
    for name in NAMES:
        with pytest.raises(TypeError, match=f"^{name} has no argument 'sync_evry'. Did you mean sync_every?"):
            strategy_of(face, name)(sync_evry=3)
    for argument in ("find_unused_parameters", "ddp_comm_hook", "gradient_as_bucket_view"):
        with pytest.raises(TypeError, match=f"StreamingDiLoCoStrategy has no argument '{argument}'.*give ddp_kwargs="):
            strategy_of(face, NAMES[0])(**{argument: True})


def test_a_strategy_is_pickled_before_it_starts() -> None:
    copied = pickle.loads(pickle.dumps(strategy_of("lightning_pytorch", NAMES[0])(mixing=0.25)))
    assert copied.strategy_name == "streaming_diloco"


def test_a_second_fit_makes_another_one_and_resets_nothing() -> None:
    def run(rank: int, world_size: int) -> Any:
        strategy = fits.strategy(worker_groups=2, sync_every=2, overlap_steps=1)
        trainer = fits.trainer(strategy=strategy, devices=world_size, max_steps=5)
        seen = []
        for last in (5, 8):
            trainer.fit_loop.epoch_loop.max_steps = last
            trainer.fit(fits.module(seed=rank), DataLoader(fits.Batches(rank, 0, 1), batch_size=None))
            seen.append((strategy.fit, strategy.engine, strategy.report()["inner_steps"]))
        (first, engine, steps), (second, other, more) = seen
        assert first is not second
        assert first.steps.engine is engine is not other
        assert first.requests is not second.requests
        return steps, more, strategy.topology is not None

    assert run_processes(run, 2) == [(5, 3, True)] * 2

"""How strategies are put together: one class of overrides, arguments that stand once, parts that own their state."""

import importlib
import inspect
import pickle
import pydoc
from collections.abc import Iterator
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
PARTS = {"_options", "_groups", "results", "_format", "_fit", "_patches"}


def strategies() -> Iterator[tuple[str, str, Any, Any]]:
    """Faces, names, our classes, and the first of their bases that is Lightning's."""
    for face in FACES:
        for name in NAMES:
            kind = getattr(importlib.import_module(f"lightning_sdiloco.{face}"), name)
            yield face, name, kind, next(b for b in kind.__mro__ if not b.__module__.startswith("lightning_sdiloco"))


def test_a_strategy_adds_base_and_name_and_has_no_state_but_its_parts() -> None:
    for _, name, kind, base in strategies():
        assert kind.__bases__ == (WorkerGroupStrategy, base)
        own = [name for name, value in vars(kind).items() if inspect.isfunction(value) or isinstance(value, property)]
        assert own == ["__init__"], "it hands over names that are no arguments"
        assert vars(kind(worker_groups=2)).keys() - vars(base()).keys() == PARTS, name
        assert pickle.loads(pickle.dumps(kind(mixing=0.25))).strategy_name.startswith("streaming_diloco")


def test_help_and_command_line_show_every_argument_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    for face, name, kind, base in strategies():
        arguments = inspect.signature(kind).parameters
        text = pydoc.render_doc(kind, renderer=pydoc.plaintext).partition("Args:")[2].partition("Raises:")[0]
        assert OWN[name] | {"worker_groups", "outer_optimizer", "resume"} <= arguments.keys()
        assert [argument for argument in arguments if f"{argument}: " not in text] == []
        assert text.count("mixing: Share") == 1
        parser = ArgumentParser()
        parser.add_argument("--strategy", type=base.__mro__[2])
        path = f"lightning_sdiloco.{face}.{name}"
        with pytest.raises(SystemExit):
            parser.parse_args([f"--strategy.help={path}"])
        shown = " ".join(capsys.readouterr().out.split())
        assert [argument for argument in arguments if f"--strategy.{argument} " not in shown] == []
        assert "Share of the local parameters that is kept on landing" in shown
        assert "static_graph" not in shown, "an argument of DistributedDataParallel"
        chosen = parser.parse_args([f"--strategy={path}", "--strategy.mixing=0.25"])
        assert vars(chosen.strategy.init_args).keys() == arguments.keys()
        assert "mixing: 0.25" in parser.dump(chosen)


def test_a_wrong_argument_is_refused_in_the_name_that_the_user_chose() -> None:
    for _, name, kind, _ in strategies():
        with pytest.raises(TypeError, match=f"^{name} has no argument 'sync_evry'. Did you mean sync_every?"):
            kind(sync_evry=3)
        for argument in ("find_unused_parameters", "ddp_comm_hook") if name == NAMES[0] else ():
            with pytest.raises(TypeError, match=f"{name} has no argument '{argument}'.*give ddp_kwargs="):
                kind(**{argument: True})


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
        assert first.engine is engine is not other
        assert first.requests is not second.requests
        return steps, more, strategy.topology is not None

    assert run_processes(run, 2) == [(5, 3, True)] * 2

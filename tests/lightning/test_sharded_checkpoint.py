"""Checkpoints of sharded groups: exact resume, plain torch, and other shards."""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdiloco.comm import Communicator, Topology
from lightning_sdiloco.engine import Saved, files, write_common_file
from lightning_sdiloco.lightning import model_format as sharded_model
from tests import fits, sharded
from tests.fits import LIGHTNING
from tests.ranks import run_processes, run_ranks

STEPS = 14
CHOICES: dict[str, Any] = {"sync_every": 5, "overlap_steps": 3, "fragments": "strided:1"}


def run(
    groups: int,
    sizes: tuple[int, int],
    callbacks: list[Any],
    steps: int = STEPS,
    resume: Path | None = None,
    inner: str = "adamw",
    **choices: Any,
) -> list[dict[str, Any]]:
    fit = partial(sharded.fit, **{**CHOICES, **choices})
    world_size, path = groups * sizes[0] * sizes[1], resume and str(resume)
    distribution = choices.pop("distribution", LIGHTNING)
    arguments = (groups, sizes, steps, distribution, inner, callbacks, path)
    return list(run_processes(fit, world_size, *arguments, timeout=180.0))


def saving(folder: Path, **choices: Any) -> list[Any]:
    return [sharded.callbacks_of().ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **choices)]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


# 6, 7: one and two fragments in flight; 11: launched again.
@pytest.mark.parametrize(
    ("sizes", "as_folder", "steps", "inner"),
    [((2, 1), True, (6, 11), "adamw"), ((2, 2), True, (7,), "muon"), ((1, 2), False, (7,), "adamw")],
)
def test_a_sharded_fit_resumed_from_any_step_gives_the_same_bits(
    sizes: tuple[int, int], as_folder: bool, steps: tuple[int, ...], inner: str, tmp_path: Path
) -> None:
    fit = partial(run, 2, sizes, inner=inner)
    plain = fit(saving(tmp_path, every_n_train_steps=1), save_distributed_checkpoint=as_folder)
    for step in steps:
        resumed = fit([], resume=tmp_path / f"step={step}.ckpt", save_distributed_checkpoint=as_folder)
        for one, other in zip(resumed, plain, strict=True):
            assert sorted(one["trace"]) == list(range(step, STEPS))
            for at, values in one["trace"].items():
                assert_same(values, other["trace"][at])
            assert_same(one["outer"], other["outer"])
            counted = ("inner_steps", "launches", "landings")
            assert all(one["report"][key] == other["report"][key] for key in counted)
            # Files of the first ten steps hold the mean of the groups, which they exchange.
            sent, through = one["report"]["bytes_sent"], other["report"]["bytes_sent"]
            assert sent == through if step >= 10 else sent < through


IN_PLAIN_TORCH = """
import sys

sys.modules["lightning_sdiloco"] = sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

folder, expected, target = sys.argv[1:]
dcp_to_torch_save(folder, target)
state = torch.load(target, weights_only=True)["state_dict"]
expected = torch.load(expected, weights_only=True)
assert state.keys() == expected.keys(), (state.keys(), expected.keys())
assert all(torch.equal(state[name], expected[name]) for name in expected)
print("same")
"""


def test_a_sharded_folder_is_the_outer_model_in_plain_torch(tmp_path: Path) -> None:
    # Saved in flight, where local parameters are others.
    ranks = run(2, (2, 2), saving(tmp_path, every_n_train_steps=12), steps=13)
    outer = {name.removeprefix("outer "): v for name, v in ranks[0]["trace"][12].items() if name.startswith("outer ")}
    torch.save(outer, tmp_path / "expected.pt")
    paths = map(str, (tmp_path / "step=12.ckpt", tmp_path / "expected.pt", tmp_path / "converted.pt"))
    done = subprocess.run([sys.executable, "-c", IN_PLAIN_TORCH, *paths], capture_output=True, text=True, timeout=60)
    assert done.stdout == "same\n", done.stderr
    assert "outer net.0.weight" in ranks[0]["trace"][12]


def test_a_single_file_is_the_outer_model_for_a_model_that_is_not_sharded(tmp_path: Path) -> None:
    ranks = run(2, (2, 1), saving(tmp_path, every_n_train_steps=12), steps=13, save_distributed_checkpoint=False)
    model = sharded.plain(seed=1)
    model.load_state_dict(torch.load(tmp_path / "step=12.ckpt", weights_only=True)["state_dict"])
    assert_same(
        {f"outer {name}": values for name, values in model.state_dict().items()},
        {name: values for name, values in ranks[0]["trace"][12].items() if name.startswith("outer ")},
    )


def outer_of(rank: dict[str, Any], step: int) -> dict[str, Tensor]:
    return {name: values for name, values in rank["trace"][step].items() if name.startswith("outer ")}


# From two groups of two ranks, to: three groups; larger groups; tensor parallelism; the first strategy, and back.
@pytest.mark.parametrize(
    ("groups", "sizes", "as_folder"),
    [(3, (2, 1), True), (1, (4, 1), False), (2, (1, 2), False)],
)
def test_other_shards_start_from_the_outer_parameters(
    groups: int, sizes: tuple[int, int], as_folder: bool, tmp_path: Path
) -> None:
    # After step 10 a fragment is in flight: it lands on loading.
    before = run(2, (2, 1), saving(tmp_path, every_n_train_steps=10), steps=11, save_distributed_checkpoint=as_folder)
    path = tmp_path / "step=10.ckpt"
    after = run(groups, sizes, [], steps=16, resume=path, save_distributed_checkpoint=as_folder)
    for rank in after:
        assert sorted(rank["trace"]) == list(range(10, 16))
        start = outer_of(rank, 10)
        assert start.keys() == outer_of(before[0], 10).keys()
        assert all(torch.equal(start[name], outer_of(after[0], 10)[name]) for name in start)
        assert rank["report"]["inner_steps"] == 16


def test_nothing_is_lost_where_nothing_is_in_flight(tmp_path: Path) -> None:
    choices: dict[str, Any] = {"overlap_steps": 0, "outer_optimizer": partial(torch.optim.AdamW, lr=0.1)}
    before = run(2, (2, 1), saving(tmp_path, every_n_train_steps=9), steps=10, **choices)
    for groups, sizes in ((2, (1, 2)), (1, (2, 2))):
        after = run(groups, sizes, [], steps=11, resume=tmp_path / "step=9.ckpt", **choices)
        assert_same(outer_of(after[0], 9), outer_of(before[0], 9))


def test_the_first_strategy_goes_on_from_a_sharded_file_and_the_other_way_round(tmp_path: Path) -> None:
    choices: dict[str, Any] = {"overlap_steps": 0, "save_distributed_checkpoint": False}
    before = run(2, (2, 1), saving(tmp_path, every_n_train_steps=9), steps=10, **choices)

    def fit(rank: int, world_size: int, steps: int, path: str) -> dict[str, Tensor]:
        trainer = fits.trainer(
            strategy=fits.strategy(worker_groups=2, **{**CHOICES, "overlap_steps": 0}),
            devices=world_size,
            max_steps=steps,
            enable_checkpointing=True,
            callbacks=saving(tmp_path / "back", every_n_train_steps=9),
        )
        model = sharded.plain(inner="adamw", seed=rank)
        outer: dict[str, Tensor] = {}
        model.on_train_batch_start = lambda *args: outer or outer.update(trainer.strategy.outer_state_dict())
        trainer.fit(model, sharded.StatefulBatches(rank, 0, 1, 100), ckpt_path=path)
        return outer

    ranks = run_processes(fit, 2, 10, str(tmp_path / "step=9.ckpt"))
    expected = {name.removeprefix("outer "): values for name, values in outer_of(before[0], 9).items()}
    assert_same(ranks[1], expected)
    run_processes(fit, 2, 19, str(tmp_path / "step=9.ckpt"))
    (path,) = [path for path in (tmp_path / "back").iterdir() if path.suffix == ".ckpt"]
    state = torch.load(path, weights_only=True)["state_dict"]
    after = run(2, (2, 1), [], steps=20, resume=path, **choices)
    assert_same(outer_of(after[0], 18), {f"outer {name}": values for name, values in state.items()})


def test_a_checkpoint_of_the_same_name_takes_the_place_of_the_older_and_none_is_left_behind(tmp_path: Path) -> None:
    keep = sharded.callbacks_of().ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=3, monitor="step", mode="max", save_last="link"
    )
    again = sharded.callbacks_of().ModelCheckpoint(
        tmp_path / "same", filename="same", every_n_train_steps=4, enable_version_counter=False
    )
    run(2, (2, 1), [keep, again], steps=12)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "last.ckpt",
        "same",
        "step=12.ckpt",
        "step=12.ckpt.sdiloco",
    ]
    assert sorted(path.name for path in (tmp_path / "same").iterdir()) == ["same.ckpt", "same.ckpt.sdiloco"]
    (save,) = (tmp_path / "same" / "same.ckpt.sdiloco").iterdir()
    assert sorted(path.name for path in save.iterdir()) == ["manifest.json", *(f"rank_{i:05d}.pt" for i in range(4))]
    resumed = run(2, (2, 1), [], steps=14, resume=tmp_path / "last.ckpt")
    assert sorted(resumed[0]["trace"]) == [12, 13]


def test_no_rank_writes_a_folder_before_the_first_one_has_removed_what_an_earlier_save_left(tmp_path: Path) -> None:
    part = tmp_path / "last.ckpt.part"

    def write(rank: int, _: int) -> bool:
        remove = sharded_model._remove

        def late(path: Path) -> None:
            if path == part and not part.with_name("last.ckpt").exists():
                time.sleep(0.5)
                assert not path.exists(), "another rank writes already"
            remove(path)

        sharded_model._remove = late
        group = Communicator(dist.group.WORLD)
        for _ in range(2):
            sharded_model.write_folder({"state_dict": {"x": torch.ones(3)}}, tmp_path / "last.ckpt", group)
            group.all_gather_object(rank)
        return sharded_model.is_folder(tmp_path / "last.ckpt")

    assert run_ranks(write, 2) == [True, True]
    assert not part.exists()


@pytest.mark.parametrize("what", ["an earlier part", "the manifest"])
def test_what_fails_at_the_first_rank_before_all_write_a_folder_raises_on_all_ranks(what: str, tmp_path: Path) -> None:
    def cannot(*_: Any) -> None:
        raise PermissionError(f"{what} is none of yours")

    def write(rank: int, _: int) -> str:
        module, name = (sharded_model, "_remove") if what == "an earlier part" else (files, "_write")
        setattr(module, name, cannot)
        group, path = Communicator(dist.group.WORLD), tmp_path / "last.ckpt"
        saved = Saved(str(path), {"save": "some"}, [], [])
        topology = Topology(group_size=2, group_rank=rank, world=group)
        try:
            write_common_file(saved, topology, lambda: sharded_model.write_folder({"state_dict": {}}, path, group))
        except OSError as error:
            return str(error)
        return "saved"

    for error in run_ranks(write, 2):
        assert f"rank 0: PermissionError: {what} is none of yours" in error

"""Worker groups that share one sharded model: the training of whole models, each value sent once, and checkpoints."""

import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import lightning_sdiloco
from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.engine.checkpoint import Saved, write_common_file
from lightning_sdiloco.lightning import model_format
from lightning_sdiloco.lightning import options as auto_settings
from lightning_sdiloco.lightning.model_format import ShardedModel
from lightning_sdiloco.planning.link import Link
from tests import fits, sharded
from tests.fits import play
from tests.lightning.test_checkpoint import assert_resumed, assert_same, outer_of, saving, unequal
from tests.ranks import run_processes, run_ranks
from tests.training import batch

# One layer each, so that a fragment may lie on a part of the ranks only. One is in flight after step 6, two after 7;
# after step 11, when all have landed once, the first are launched again.
CHOICES: dict[str, Any] = {"sync_every": 5, "overlap_steps": 3, "fragments": "strided:1", "compression": "fp32"}
STEPS = 14
Fit = dict[str, Any]

fit = partial(sharded.fit, steps=STEPS, **CHOICES)


def plain(rank: int, world_size: int, inner: str = "sgd", net: Any = sharded.even, **choices: Any) -> Fit:
    """A fit of two groups of whole models."""
    make = partial(sharded.plain, net=net)
    return fits.fit(rank, world_size, 2, STEPS, {**CHOICES, **choices}, inner=inner, make=make)


def strategy(groups: int, data: int, tensor: int, **choices: Any) -> Any:
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor}
    return fits.strategy(worker_groups=groups, **sizes, **{**CHOICES, **choices})


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


def loss(net: nn.Module, outer: dict[str, Tensor]) -> float:
    """Of the batch that is validated."""
    net.load_state_dict(outer)
    x, y = batch(9, 1)
    return float(nn.functional.mse_loss(net(x), y).detach())


# Training


def test_with_one_rank_per_group_the_outer_parameters_are_those_of_the_first_strategy_to_the_bit(
    distribution: str,
) -> None:
    sharing: dict[str, Any] = {"groups": 2, "sizes": (1, 1), "distribution": distribution}
    for chosen in ({"inner": "sgd", "compression": "fp32"}, {"inner": "adamw", "compression": "fp4"}):
        ranks = play(2, {"expected": partial(plain, **chosen), "actual": partial(fit, **sharing, **chosen)})
        for one, other in zip(ranks["actual"], ranks["expected"], strict=True):
            assert unequal(one["outer"], other["outer"]) == []
            assert one["report"]["bytes_sent"] == other["report"]["bytes_sent"]


class InDouble(nn.Linear):
    """A layer whose parameters are float64 among others that are float32."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values.double()).to(values.dtype)


def of_two_dtypes(seed: int) -> nn.Sequential:
    net = sharded.even(seed)
    net[2] = InDouble(12, 7).double()
    return net


def loop_of_your_own(rank: int, world_size: int) -> Fit:
    model, mesh = sharded.even(0), init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "data"))["data"]
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = StreamingDiLoCo(model, worker_groups=2, inner_optimizers=[optimizer], **CHOICES)
    for step in range(1, STEPS + 1):
        x, y = (part.chunk(2)[rank % 2] for part in batch(rank // 2, step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        engine.step()
    engine.finish()
    return {"outer": engine.outer_state_dict()}


def problems(ranks: list[Fit], expected: Fit, alone: Fit) -> list[str]:
    """Where groups of ranks do not train as one rank alone, or send another number of bytes than it does."""
    size, of_one = len(ranks) // 2, alone["report"]
    flights = len(sharded.even(0)) // 2 + 1 + of_one["launches"]
    # A rank without a value of a fragment sends a zero, and each has a control vector of its own.
    padding, bytes_sent = 4 * flights * (size - 1), of_one["bytes_sent"] + CONTROL_BYTES * flights * (size - 1)
    wrong = []
    for group in (ranks[:size], ranks[size:]):
        sent = sum(rank["report"]["bytes_sent"] for rank in group)
        wrong += [] if bytes_sent <= sent <= bytes_sent + padding else [f"{sent} bytes, not {bytes_sent}"]
    for rank in ranks:
        wrong += [] if distance(rank["outer"], expected["outer"]) < 1e-5 else ["another model"]
        # The model is left with the outer parameters, the same bits on all ranks of all groups.
        wrong += unequal(rank["model"], rank["outer"]) + unequal(rank["outer"], ranks[0]["outer"])
        counted = ("inner_steps", "launches", "landings")
        wrong += [key for key in counted if rank["report"][key] != of_one[key]]
    return wrong


def test_what_happens_inside_a_group_does_not_change_the_outer_parameters() -> None:
    alone = play(2, {"plain": plain, "float64": partial(plain, net=of_two_dtypes)})
    of_one = alone["plain"][0]
    assert distance(of_one["outer"], sharded.even(0).state_dict()) > 0.1
    four = play(
        4,
        {
            "tensor": partial(fit, groups=2, sizes=(1, 2)),
            "float64": partial(fit, groups=2, sizes=(2, 1), net=of_two_dtypes),
            "loop": loop_of_your_own,
        },
    )
    assert problems(four["tensor"], of_one, of_one) == []
    for rank in four["loop"]:
        assert distance(rank["outer"], of_one["outer"]) < 1e-5
    for rank in four["float64"]:
        assert {values.dtype for values in rank["model"].values()} == {torch.float32, torch.float64}
        assert distance(rank["outer"], alone["float64"][0]["outer"]) < 1e-5
        assert unequal({name: values.float() for name, values in rank["model"].items()}, rank["outer"]) == []
    # Three data-parallel ranks do not divide a batch of eight, and so weigh its examples unequally.
    six = play(6, {"expected": plain, "actual": partial(fit, groups=2, sizes=(3, 1))})
    assert problems(six["actual"], six["expected"][0], of_one) == []


def test_muon_of_shards_in_two_dimensions_steps_as_muon_of_the_matrix_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Muon rounds to bfloat16 on the way, each shard differently; without that what is left is float32's rounding.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.float)
    whole = play(2, {"plain": partial(plain, inner="muon")})["plain"][0]
    muon = partial(fit, groups=2, sizes=(2, 2), inner="muon")
    data = TensorDataset(*batch(0, 1), torch.arange(8))

    def divided(rank: int, world_size: int) -> list[int]:
        """The examples that a rank sees of those that Lightning's own sampler divides."""
        seen: list[int] = []
        model = sharded.sharded(seed=rank // 4)
        model.on_train_batch_start = lambda parts, index: seen.extend(parts[2].tolist())
        trainer = fits.trainer(strategy=strategy(2, 2, 2), devices=world_size, max_epochs=1)
        trainer.fit(model, DataLoader(data, batch_size=1))
        return seen

    saved, path = saving(fits.LIGHTNING, tmp_path, every_n_train_steps=7), str(tmp_path / "step=7.ckpt")
    cases = {"saved": partial(muon, callbacks=saved), "resumed": partial(muon, resume=path), "divided": divided}
    ranks = play(8, cases)
    for one, other in zip(ranks["resumed"], ranks["saved"], strict=True):
        assert_resumed(one, other, 7)
        for name, values in other["outer"].items():
            assert torch.allclose(values, whole["outer"][name], rtol=0, atol=1e-4), name
    seen = ranks["divided"]
    assert seen[::2] == seen[1::2], "tensor-parallel ranks share their data"
    assert sorted(example for examples in seen[::2] for example in examples) == list(range(8))


def with_a_part_that_is_not_finite(rank: int, world_size: int) -> Fit:
    """After its fifth step one rank of the second group has values that are not finite, the other has not."""
    model, taken = sharded.sharded(inner="adamw", seed=rank // 2), []

    def spoil(*args: Any) -> None:
        taken.append(1)
        if len(taken) == 5 and rank == 3:
            # The first lands at once. Of the second the other rank of the group has only finite values.
            for layer in (model.net[0], model.net[2]):
                layer.weight.detach().to_local().fill_(float("nan"))

    model.on_train_start = lambda: model.trainer.optimizers[0].register_step_post_hook(spoil)
    chosen = strategy(2, 1, 2, overlap_steps=0, timeout=timedelta(seconds=10))
    trainer = fits.trainer(strategy=chosen, devices=world_size, max_steps=STEPS)
    trainer.fit(model, DataLoader(fits.Batches(rank // 2, 0, 1), batch_size=None))
    return {"outer": chosen.outer_state_dict()}


def with_a_group_that_stalls(rank: int, world_size: int) -> list[float]:
    """When each batch started; the second group stalls before inner step 11, when nothing has been launched."""
    started: list[float] = []
    model = sharded.sharded(seed=rank // 2)

    def start(parts: Any, index: int) -> None:
        if index == 10 and rank // 2 == 1:
            time.sleep(2)
        started.append(time.monotonic())
        model.log("rank", float(rank), sync_dist=True)

    model.on_train_batch_start = start
    chosen = strategy(2, 2, 1, fragments=[["*"]], sync_every=17)
    trainer = fits.trainer(strategy=chosen, devices=world_size, max_steps=21, max_time="00:01:00:00")
    trainer.fit(model, DataLoader(fits.Batches(rank // 2, rank % 2, 2), batch_size=None))
    return started


def validated_around_fits(rank: int, world_size: int) -> Fit:
    model, place = sharded.sharded(seed=rank // 2), (rank // 2, rank % 2, 2)
    data = DataLoader(fits.Batches(9, 0, 1), batch_size=None)
    chosen = strategy(2, 2, 1)
    trainer = fits.trainer(strategy=chosen, devices=world_size, max_steps=7, limit_val_batches=1)

    def seen() -> float:
        return float(trainer.validate(model, data, verbose=False)[0]["seen"])

    losses = [seen()]
    for steps in (7, 12):
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(model, sharded.StatefulBatches(*place, 100))
        losses.append(seen())
    return {"seen": losses, "outer": chosen.outer_state_dict()}


def test_precision_validation_faults_and_stalls_are_handled_as_by_the_first_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto_settings, "measure_link", lambda topology, timeout: Link(gbit_s=5e-6, round_trip=0.05))
    monkeypatch.setattr(auto_settings.Options, "step_time", lambda self: 0.05)
    names = ("overlap_steps", "fragments")
    of_data: dict[str, Any] = {"groups": 2, "sizes": (2, 1)}

    def chosen_before(rank: int, world_size: int) -> list[Fit]:
        auto = fit(rank, world_size, **{**of_data, "steps": 20, "sync_every": 9, **dict.fromkeys(names, "auto")})
        chosen = {name: getattr(auto["settings"], name) for name in names}
        return [auto, fit(rank, world_size, **{**of_data, "steps": 20, "sync_every": 9, **chosen})]

    ranks = play(
        4,
        {
            "bf16-mixed": partial(fit, **of_data, trainer_choices={"precision": "bf16-mixed"}),
            "bf16-true": partial(fit, groups=2, sizes=(1, 2), trainer_choices={"precision": "bf16-true"}),
            "not finite": with_a_part_that_is_not_finite,
            "validated": validated_around_fits,
            "stalled": with_a_group_that_stalls,
            "auto": chosen_before,
        },
    )
    for precision, dtype in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
        for rank in ranks[precision]:
            assert {values.dtype for values in rank["outer"].values()} == {torch.float32}
            assert {values.dtype for values in rank["model"].values()} == {dtype}
    for case in ("bf16-mixed", "bf16-true", "not finite", "validated"):
        first = ranks[case][0]["outer"]
        assert all(bool(values.isfinite().all()) for values in first.values())
        assert [unequal(rank["outer"], first) for rank in ranks[case]] == [[]] * 4

    seen = ranks["validated"][0]["seen"]
    assert [rank["seen"] for rank in ranks["validated"]] == [seen] * 4
    assert abs(seen[0] - loss(sharded.even(0), sharded.even(0).state_dict())) < 1e-6
    outer = {name.removeprefix("net."): values for name, values in ranks["validated"][0]["outer"].items()}
    assert abs(seen[2] - loss(sharded.even(0), outer)) < 1e-6
    assert len(set(seen)) == 3

    one, *_, other = ranks["stalled"]
    assert one[16] < other[10]
    assert one[20] > other[10], "and a landing waits, or the test would show nothing"

    for auto, explicit in ranks["auto"]:
        assert auto["report"]["landings"] > 0
        assert unequal(auto["outer"], explicit["outer"]) + unequal(auto["model"], explicit["model"]) == []


# Checkpoints


class Saver(sharded.callbacks_of().Callback):  # type: ignore[misc]
    """Saves over one checkpoint, before the first step and in the midst of steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, parts: Any, index: int) -> None:
        if index % 4 == 0:
            trainer.save_checkpoint(self.path)


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


def test_a_sharded_fit_is_saved_validated_and_resumed_anywhere_without_a_change_of_bits(tmp_path: Path) -> None:
    accumulating = {"accumulate_grad_batches": 2}
    folder = partial(fit, groups=2, sizes=(2, 1), inner="adamw", compression="fp4", trainer_choices=accumulating)
    file = partial(fit, groups=2, sizes=(1, 2), inner="adamw", save_distributed_checkpoint=False)
    newest = sharded.callbacks_of().ModelCheckpoint(
        tmp_path / "newest", "{step}", every_n_train_steps=6, monitor="step", mode="max", save_last="link"
    )
    callbacks = [Saver(tmp_path / "same.ckpt"), newest, *saving(fits.LIGHTNING, tmp_path, every_n_train_steps=1)]
    cases: dict[str, Any] = {
        "plain": folder,
        # FSDP2 keeps the parameters of the outermost module whole after a validation, unless it is told not to.
        "disturbed": partial(folder, callbacks=callbacks, validation=4),
        "6": partial(folder, resume=str(tmp_path / "step=6.ckpt")),
        "11": partial(folder, resume=str(tmp_path / "step=11.ckpt")),
        "12": partial(folder, resume=str(tmp_path / "newest" / "last.ckpt")),
        "file": partial(file, callbacks=saving(fits.LIGHTNING, tmp_path / "file", every_n_train_steps=1)),
        "7": partial(file, resume=str(tmp_path / "file" / "step=7.ckpt")),
    }
    ranks = play(4, cases)
    for rank, expected in enumerate(ranks["plain"]):
        for case, step in (("disturbed", 0), ("6", 6), ("11", 11), ("12", 12)):
            assert_resumed(ranks[case][rank], expected, step)
        assert_resumed(ranks["7"][rank], ranks["file"][rank], 7)
        assert abs(ranks["disturbed"][rank]["logged"]["seen"] - loss(sharded.even(1), expected["outer"])) < 1e-6

    # One is overwritten, of the other the newest is kept.
    beside = ["last.ckpt", "step=12.ckpt", "step=12.ckpt.sdiloco"]
    assert sorted(path.name for path in (tmp_path / "newest").iterdir()) == beside
    (save,) = (tmp_path / "same.ckpt.sdiloco").iterdir()
    assert sorted(path.name for path in save.iterdir()) == ["manifest.json", *(f"rank_{i:05d}.pt" for i in range(4))]
    assert {path.name for path in tmp_path.glob("same*")} == {"same.ckpt", "same.ckpt.sdiloco"}

    # What was saved in flight, where local parameters are others, is the outer model in plain torch.
    outer = outer_of(ranks["disturbed"][0], 12)
    assert "net.0.weight" in outer
    torch.save(outer, tmp_path / "expected.pt")
    paths = map(str, (tmp_path / "step=12.ckpt", tmp_path / "expected.pt", tmp_path / "converted.pt"))
    done = subprocess.run([sys.executable, "-c", IN_PLAIN_TORCH, *paths], capture_output=True, text=True, timeout=60)
    assert done.stdout == "same\n", done.stderr
    model = sharded.plain(seed=1)
    model.load_state_dict(torch.load(tmp_path / "file" / "step=12.ckpt", weights_only=True)["state_dict"])
    assert_same(dict(model.state_dict()), outer_of(ranks["file"][0], 12))


def test_other_shards_and_the_first_strategy_start_from_the_outer_parameters_and_back(tmp_path: Path) -> None:
    whole: dict[str, Any] = {
        "overlap_steps": 0,
        "outer_optimizer": partial(torch.optim.AdamW, lr=0.1),
        "save_distributed_checkpoint": False,
    }
    adamw = partial(fit, inner="adamw")

    def first_strategy(rank: int, world_size: int) -> dict[str, Tensor]:
        chosen = {**CHOICES, **whole}
        del chosen["save_distributed_checkpoint"]
        trainer = fits.trainer(
            strategy=fits.strategy(worker_groups=2, **chosen),
            devices=world_size,
            max_steps=19,
            enable_checkpointing=True,
            callbacks=saving(fits.LIGHTNING, tmp_path / "back", every_n_train_steps=9),
        )
        model = sharded.plain(inner="adamw", seed=rank)
        outer: dict[str, Tensor] = {}
        model.on_train_batch_start = lambda *args: outer or outer.update(trainer.strategy.outer_state_dict())
        path = str(tmp_path / "file" / "step=9.ckpt")
        trainer.fit(model, sharded.StatefulBatches(rank, 0, 1, 100), ckpt_path=path)
        return outer

    # After step 10 a fragment is in flight: it lands on loading.
    flying, file = str(tmp_path / "step=10.ckpt"), str(tmp_path / "file" / "step=9.ckpt")
    of_data: dict[str, Any] = {"groups": 2, "sizes": (2, 1)}
    save, save_file = (
        saving(fits.LIGHTNING, tmp_path, every_n_train_steps=10),
        saving(fits.LIGHTNING, tmp_path / "file", every_n_train_steps=9),
    )
    four = play(
        4,
        {
            "flying": partial(adamw, **of_data, steps=11, callbacks=save),
            "tensor": partial(adamw, groups=2, sizes=(1, 2), steps=12, resume=flying),
            "one": partial(adamw, groups=1, sizes=(4, 1), steps=12, resume=flying),
            "file": partial(adamw, **of_data, steps=10, callbacks=save_file, **whole),
            "both": partial(adamw, groups=1, sizes=(2, 2), steps=11, resume=file, **whole),
        },
    )
    four |= play(6, {"three": partial(adamw, groups=3, sizes=(2, 1), steps=12, resume=flying)})
    for case, at in (("tensor", 10), ("one", 10), ("three", 10), ("both", 9)):
        for rank in four[case]:
            assert sorted(rank["trace"]) == [at, at + 1]
            assert unequal(outer_of(rank, at), outer_of(four["tensor" if at == 10 else "file"][0], at)) == []
            assert rank["report"]["inner_steps"] == at + 2
    assert outer_of(four["tensor"][0], 10).keys() == outer_of(four["flying"][0], 10).keys()

    for outer in play(2, {"first": first_strategy})["first"]:
        assert_same(outer, outer_of(four["file"][0], 9))
    path = tmp_path / "back" / "step=18.ckpt"
    back = play(4, {"back": partial(adamw, **of_data, steps=19, resume=str(path), **whole)})["back"]
    assert_same(outer_of(back[0], 18), torch.load(path, weights_only=True)["state_dict"])


def test_a_signal_ends_all_with_a_checkpoint_that_resumes_exactly_and_an_exception_waits_for_nobody(
    tmp_path: Path,
) -> None:
    adamw = partial(fit, groups=2, sizes=(2, 1), inner="adamw", timeout=timedelta(seconds=10))
    callbacks = sharded.callbacks_of()

    class Told(callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_rank == 2 and trainer.global_step == 8:
                os.kill(os.getpid(), signal.SIGTERM)

    class Failing(callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_rank == 1 and trainer.global_step == 6:
                raise ArithmeticError("this rank fails")

    def told(rank: int, world_size: int) -> bool:
        try:
            adamw(rank, world_size, callbacks=[Told(), callbacks.ModelCheckpoint(tmp_path, save_on_exception=False)])
        except SIGTERMException:
            return True
        return False

    def resumed(rank: int, world_size: int) -> Fit:
        (path,) = tmp_path.glob("terminated-*.ckpt")
        return adamw(rank, world_size, resume=str(path))

    ranks = play(4, {"plain": adamw, "told": told}) | play(4, {"resumed": resumed})
    assert ranks["told"] == [True] * 4
    for one, other in zip(ranks["resumed"], ranks["plain"], strict=True):
        assert_resumed(one, other, min(one["trace"]))

    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    saves = [Failing(), callbacks.ModelCheckpoint(tmp_path, save_on_exception=True)]
    errors = run_processes(partial(adamw, callbacks=saves), 4, expect_failure=True)
    assert sorted(errors) == [0, 1, 2, 3]
    assert "ArithmeticError: this rank fails" in errors[1]
    assert not list(tmp_path.glob("*.ckpt"))
    assert list(tmp_path.glob("*.sdiloco/exception/rank_00001.pt"))


def test_no_rank_writes_a_folder_before_the_first_can_and_all_raise_if_it_cannot(tmp_path: Path) -> None:
    path, part = tmp_path / "last.ckpt", tmp_path / "last.ckpt.part"
    remove = model_format._remove

    def late(removed: Path) -> None:
        if removed == part and not path.exists():
            time.sleep(0.3)
            assert not removed.exists(), "another rank writes already"
        remove(removed)

    def cannot(*_: Any) -> None:
        raise PermissionError("none of yours")

    def write(rank: int, _: int) -> list[str]:
        group = Communicator(dist.group.WORLD)
        model_format._remove = late
        for _ in range(2):
            model_format.write_folder({"state_dict": {"x": torch.ones(3)}}, path, group)
            group.all_gather_object(rank)
        assert model_format.is_folder(path)
        assert not part.exists()
        told = []
        for module, name in ((model_format, "_remove"), (files, "_write")):
            before = getattr(module, name)
            setattr(module, name, cannot)
            saved, topology = Saved(str(path), {"save": "some"}, [], []), Topology(2, rank, world=group)
            with pytest.raises(OSError, match="rank 0") as caught:
                write_common_file(saved, topology, lambda: model_format.write_folder({"state_dict": {}}, path, group))
            setattr(module, name, before)
            told.append(str(caught.value))
        return told

    for told in run_ranks(write, 2):
        assert ["rank 0: PermissionError: none of yours" in text for text in told] == [True, True]


# The mesh, and what is refused


def test_automatic_sizes_are_those_of_a_group() -> None:
    def shape(devices: int, nodes: int, worker_groups: Any = "auto", **sizes: Any) -> tuple[int, int, int]:
        chosen = ShardedModel(ShardedModel.base_arguments(**sizes))
        return (chosen.layout(worker_groups, nodes, devices).worker_groups, *chosen.mesh.values())

    assert shape(4, 2) == (2, 1, 4)
    assert shape(4, 4, worker_groups=2) == (2, 2, 4)
    assert shape(8, 1, worker_groups=2) == (2, 1, 4)
    assert shape(8, 1, worker_groups=2, data_parallel_size=4) == (2, 4, 1)
    assert shape(8, 1, worker_groups=2, tensor_parallel_size=2) == (2, 2, 2)
    assert shape(8, 1, data_parallel_size=2, tensor_parallel_size=2) == (2, 2, 2)
    assert shape(3, 1) == (3, 1, 1)
    with pytest.raises(ValueError, match="do not fill a worker group, which has 4 ranks"):
        shape(8, 1, worker_groups=2, data_parallel_size=3)
    with pytest.raises(ValueError, match="tensor_parallel_size=0 is out of range"):
        shape(8, 1, tensor_parallel_size=0)
    with pytest.raises(ValueError, match="do not fill a worker group"):
        fits.trainer(strategy=fits.strategy(worker_groups=2, data_parallel_size=3), devices=4)


def test_both_strategies_have_the_same_arguments_with_the_same_words() -> None:
    def described(kind: type, argument: str) -> str:
        found = re.search(rf"\n    {argument}: (.*?)(?=\n    \w+: |\n\n)", inspect.getdoc(kind) or "", re.DOTALL)
        assert found
        return found.group(1)

    for package in (lightning_sdiloco, lightning_sdiloco.pytorch_lightning):
        kinds = package.StreamingDiLoCoStrategy, package.StreamingDiLoCoModelParallelStrategy
        first, second = (dict(inspect.signature(kind).parameters) for kind in kinds)
        common = list(first)[: list(first).index("start_method")]
        own = ["data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint", "process_group_backend"]
        assert list(second) == [*common, *own]
        for name in common:
            assert str(first[name]) == str(second[name])
            assert described(kinds[0], name) == described(kinds[1], name)


def test_what_fsdp_or_a_sharded_model_cannot_do_is_refused() -> None:
    callbacks = sharded.callbacks_of()

    def with_more(model: Any) -> None:
        sharding = model.configure_model

        def configure_model() -> None:
            sharding()
            model.extra = nn.Linear(2, 2)

        model.configure_model = configure_model

    def freezing(model: Any) -> None:
        model.on_train_epoch_start = lambda: model.net[0].requires_grad_(model.current_epoch == 0)

    cases: list[tuple[str, Callable[[Any], None] | None, dict[str, Any]]] = [
        ("2 trainable parameters, such as 'extra.weight', are not sharded", with_more, {}),
        ("copies the whole model", None, {"callbacks": [callbacks.EMAWeightAveraging()]}),
        ("unfreezes layers between epochs", None, {"callbacks": [callbacks.BackboneFinetuning()]}),
        ("Parameters were frozen or became trainable", freezing, {"max_epochs": 2, "limit_train_batches": 2}),
    ]

    def run(rank: int, world_size: int) -> list[str]:
        told = []
        for _, change, choices in cases:
            model = sharded.sharded(seed=0)
            if change is not None:
                change(model)
            trainer = fits.trainer(strategy=strategy(1, 2, 1), devices=world_size, **{"max_steps": 20, **choices})
            with pytest.raises(ValueError, match="\\.$") as caught:
                trainer.fit(model, DataLoader(fits.Batches(0, rank, 2), batch_size=None))
            told.append(str(caught.value))
        return told

    for texts in run_processes(run, 2):
        assert [words for text, (words, _, _) in zip(texts, cases, strict=True) if words not in text] == []
    # Lightning itself looks at the precision only where the strategy is an object.
    trainer = fits.trainer(strategy="streaming_diloco_model_parallel", devices=1, precision="64-true")
    with pytest.raises(ValueError, match="precision='64-true' does not work with sharded models"):
        trainer.fit(sharded.sharded(), DataLoader(fits.Batches(0, 0, 1), batch_size=None))

"""Worker groups that share one sharded model, and Muon inside: the training of whole models, and
checkpoints.
"""

import copy
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import GPT, next_byte_loss
from lightning_sdiloco import DenseBeginning, OuterOptimizer, StreamingDiLoCo
from lightning_sdiloco.algorithm.weighting import CONTROL_BYTES
from lightning_sdiloco.comm.communicator import Communicator
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.engine.checkpoint import Saved, write_common_file
from lightning_sdiloco.lightning import model_format
from lightning_sdiloco.lightning.model_format import ShardedModel
from tests import fits, sharded
from tests.fits import LIGHTNING, batches, play, refusal
from tests.lightning.test_checkpoint import (
    assert_resumed,
    at,
    names_in,
    outer_of,
    run_fit,
    save,
    saving,
    unequal,
)
from tests.ranks import agreed, in_ranks, run_processes, run_ranks
from tests.training import batch

from muon import muon_and_adamw  # isort: skip  (on the path since benchmarks.models)
from pretrain_text import ByteGPT  # isort: skip

# One layer each, so that a fragment may lie on a part of the ranks only. One is in flight after
# step 6, two after 7; after step 11, when all have landed once, the first are launched again.
CHOICES: dict[str, Any] = {
    "sync_every": 5,
    "overlap_steps": 3,
    "fragments": "strided:1",
    "compression": "fp32",
}
# Whatever the length of a fit.
CHOICES |= {"outer_momentum": 0.9, "outer_optimizer": OuterOptimizer(direction="equalised")}
STEPS = 14
Fit = dict[str, Any]

fit = partial(sharded.fit, **{"steps": STEPS, **CHOICES})
OF_DATA: dict[str, Any] = {"groups": 2, "sizes": (2, 1)}
OF_TENSORS: dict[str, Any] = {"groups": 2, "sizes": (1, 2)}


def plain(
    rank: int, world_size: int, inner: str = "sgd", net: Any = sharded.even, **choices: Any
) -> Fit:
    """A fit of two groups of whole models."""
    make = partial(sharded.plain, inner=inner, net=net)
    return run_fit(rank, world_size, make=make, **{"steps": STEPS, **CHOICES, **choices})


def trainer_of(world_size: int, groups: int, data: int, tensor: int, **more: Any) -> Any:
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor}
    strategy = fits.strategy(worker_groups=groups, **sizes, **CHOICES)
    return fits.trainer(strategy=strategy, devices=world_size, **more)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


def loss(outer: dict[str, Tensor]) -> float:
    """Of the batch that is validated."""
    net = sharded.even(0)
    net.load_state_dict({name.removeprefix("net."): values for name, values in outer.items()})
    x, y = batch(9, 1)
    return float(nn.functional.mse_loss(net(x), y).detach())


# Training


@in_ranks(2)
def test_groups_of_one_rank_match_the_first_strategys_outer_parameters_bit_for_bit(
    rank: int, distribution: str
) -> None:
    for chosen in (
        {"inner": "sgd", "compression": "fp32"},
        {"inner": "adamw", "compression": "fp4"},
    ):
        expected = plain(rank, 2, **chosen)
        actual = fit(rank, 2, groups=2, sizes=(1, 1), distribution=distribution, **chosen)
        assert unequal(actual["outer"], expected["outer"]) == []
        assert actual["report"]["bytes_sent"] == expected["report"]["bytes_sent"]


class InDouble(nn.Linear):
    """A layer whose parameters are float64 among others that are float32."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values.double()).to(values.dtype)


def of_two_dtypes(seed: int) -> nn.Sequential:
    net = sharded.even(seed)
    net[2] = InDouble(12, 7).double()
    return net


def loop_of_your_own(rank: int, world_size: int) -> dict[str, Tensor]:
    model = sharded.even(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "data"))["data"]
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
    return {f"net.{name}": values for name, values in engine.outer_state_dict().items()}


def test_sharding_inside_a_group_does_not_change_the_outer_parameters() -> None:
    def assert_alike(ranks: list[Fit], expected: Fit) -> None:
        """Groups of ranks train as one rank alone, and send as many bytes."""
        size = len(ranks) // 2
        of_one = alone["plain"][0]["report"]
        flights = len(sharded.even(0)) // 2 + 1 + of_one["launches"]
        # A rank without a value of a fragment sends a zero, and each has a control vector of its
        # own.
        padding = 4 * flights * (size - 1)
        expected_bytes = of_one["bytes_sent"] + CONTROL_BYTES * flights * (size - 1)
        for group in (ranks[:size], ranks[size:]):
            sent = sum(rank["report"]["bytes_sent"] for rank in group)
            assert expected_bytes <= sent <= expected_bytes + padding
        for rank in ranks:
            assert distance(rank["outer"], expected["outer"]) < 1e-5
            # The model is left with the outer parameters, the same bits on all ranks of all groups.
            assert (
                unequal(rank["model"], rank["outer"]) + unequal(rank["outer"], ranks[0]["outer"])
                == []
            )
            counted = ("inner_steps", "launches", "landings")
            assert [key for key in counted if rank["report"][key] != of_one[key]] == []

    dense_beginning = DenseBeginning(2, 2)
    dense = partial(plain, dense_beginning=dense_beginning)
    alone = play(2, {"plain": plain, "float64": partial(plain, net=of_two_dtypes), "dense": dense})
    of_one, in_double, of_dense = (ranks[0] for ranks in alone.values())
    four = {
        "tensor": partial(fit, **OF_TENSORS),
        "float64": partial(fit, **OF_DATA, net=of_two_dtypes),
    }
    four |= {
        "dense": dense,
        "dense shards": partial(fit, **OF_DATA, dense_beginning=dense_beginning),
    }
    ranks = play(4, {**four, "loop": loop_of_your_own})
    assert_alike(ranks["tensor"], of_one)
    for rank in ranks["dense"] + ranks["dense shards"]:
        assert distance(rank["outer"], of_dense["outer"]) < 1e-5
    for outer in ranks["loop"]:
        assert distance(outer, of_one["outer"]) < 1e-5
    for rank in ranks["float64"]:
        assert {values.dtype for values in rank["model"].values()} == {torch.float32, torch.float64}
        assert distance(rank["outer"], in_double["outer"]) < 1e-5
        assert (
            unequal({name: values.float() for name, values in rank["model"].items()}, rank["outer"])
            == []
        )
    # Three data-parallel ranks do not divide a batch of eight, and so weigh its examples unequally.
    six = play(6, {"expected": plain, "actual": partial(fit, groups=2, sizes=(3, 1))})
    assert_alike(six["actual"], six["expected"][0])


def test_muon_on_two_dimensional_shards_steps_as_on_the_matrix_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Muon rounds to bfloat16 on the way, each shard differently; without that what is left is
    # float32's rounding.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.float)
    whole = play(2, {"plain": partial(plain, inner="muon")})["plain"][0]
    muon = partial(fit, groups=2, sizes=(2, 2), inner="muon")
    data = TensorDataset(*batch(0, 1), torch.arange(8))

    def divided(rank: int, world_size: int) -> list[int]:
        """The examples that a rank sees of those that Lightning's own sampler divides."""
        seen: list[int] = []
        model = sharded.sharded(seed=rank // 4)
        model.on_train_batch_start = lambda parts, index: seen.extend(parts[2].tolist())
        trainer_of(world_size, 2, 2, 2, max_epochs=1, limit_val_batches=0).fit(
            model, DataLoader(data, batch_size=1)
        )
        return seen

    saved = saving(LIGHTNING, tmp_path, every_n_train_steps=7)
    path = tmp_path / "step=7.ckpt"
    cases = {
        "saved": partial(muon, callbacks=saved),
        "resumed": partial(muon, path=path),
        "divided": divided,
    }
    ranks = play(8, cases)
    for one, other in zip(ranks["resumed"], ranks["saved"], strict=True):
        assert_resumed(one, other, 7)
        for name, values in other["outer"].items():
            assert torch.allclose(values, whole["outer"][name], rtol=0, atol=1e-4), name
    seen = ranks["divided"]
    assert seen[::2] == seen[1::2], "tensor-parallel ranks share their data"
    assert sorted(example for examples in seen[::2] for example in examples) == list(range(8))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9, which has Muon")
def test_the_examples_muon_steps_as_two_optimizers_with_one_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saved or copied, it still does."""

    def gpt(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return GPT(layers=2, width=20, heads=2, context=8)

    def trained(model: nn.Module, optimizers: list[Any], steps: range) -> list[Tensor]:
        for step in steps:
            text = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            next_byte_loss(model, text[:, :-1], text[:, 1:]).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    model = gpt()
    twin = gpt()
    other = gpt(seed=1)
    both = muon_and_adamw(model, lr=0.01, weight_decay=0.3)
    named = dict(twin.named_parameters())
    matrices = {name: p for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2}
    embeddings = [p for name, p in named.items() if name not in matrices and p.dim() == 2]
    vectors = [p for p in named.values() if p.dim() == 1]
    groups = [{"params": embeddings, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    muon = torch.optim.Muon(
        list(matrices.values()), lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"
    )
    apart = [muon, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (both, *apart)]
    assert all(map(torch.equal, trained(model, [both], range(3)), trained(twin, apart, range(3))))
    for scheduler in schedulers:
        scheduler.step()
    copied = copy.deepcopy((model, both))
    again = muon_and_adamw(other, lr=1.0)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(both.state_dict()))
    expected = trained(twin, apart, range(3, 6))
    for one, its in ((model, both), copied, (other, again)):
        assert all(map(torch.equal, trained(one, [its], range(3, 6)), expected))
        assert {group["lr"] for group in its.param_groups} == {0.005}

    told = refusal(muon_and_adamw, nn.Sequential(nn.Linear(2, 2)), lr=0.01)
    assert "Sequential has no trainable matrix in a list called 'blocks'" in told
    told = refusal(both.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]})
    assert "make the optimizer of all of them" in told
    monkeypatch.delattr(torch.optim, "Muon")
    assert "torch 2.9 or newer, or choose the optimizer 'adamw'" in refusal(
        ByteGPT, optimizer="muon"
    )


@in_ranks(4)
def test_precision_validation_and_faults_are_handled_as_by_the_first_strategy(rank: int) -> None:
    def arm(trainer: Any) -> None:
        def spoil(*args: Any) -> None:
            handle.remove()
            # The first lands at once. Of the second the other rank of the group has only finite
            # values.
            for layer in (0, 2) if rank == 3 else ():
                trainer.lightning_module.net[layer].weight.detach().to_local().fill_(float("nan"))

        handle = trainer.optimizers[0].register_step_post_hook(spoil)

    mixed = fit(rank, 4, **OF_DATA, trainer_choices={"precision": "bf16-mixed"})
    true = fit(rank, 4, **OF_TENSORS, trainer_choices={"precision": "bf16-true"})
    # After its fifth step one rank of the second group has values that are not finite, the other
    # has not.
    more = {"overlap_steps": 0, "timeout": timedelta(seconds=10), "inner": "adamw"}
    spoiled = fit(rank, 4, **OF_TENSORS, callbacks=[at({4: arm})], **more)
    for fitted, dtype in ((mixed, torch.float32), (true, torch.bfloat16), (spoiled, torch.float32)):
        assert {values.dtype for values in fitted["outer"].values()} == {torch.float32}
        assert {values.dtype for values in fitted["model"].values()} == {dtype}
        assert all(bool(values.isfinite().all()) for values in fitted["outer"].values())
        assert agreed(fitted["outer"])

    # Validated before, between and after fits.
    model = sharded.sharded(seed=rank // 2)
    trainer = trainer_of(4, 2, 2, 1, max_steps=7, limit_val_batches=1)
    seen = [trainer.validate(model, verbose=False)[0]["seen"]]
    for steps in (7, 12):
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(model, batches(rank // 2, rank % 2, 2))
        seen.append(trainer.validate(model, verbose=False)[0]["seen"])
    assert agreed(seen)
    assert abs(seen[0] - loss(sharded.even(0).state_dict())) < 1e-6
    assert abs(seen[2] - loss(trainer.strategy.outer_state_dict())) < 1e-6
    assert len(set(seen)) == 3


# Checkpoints


@in_ranks(4)
def test_a_sharded_fit_saved_validated_and_resumed_anywhere_keeps_its_bits(
    rank: int, tmp_path: Path
) -> None:
    accumulating = {"accumulate_grad_batches": 2}
    # FSDP2 keeps the parameters of the outermost module whole after a validation, unless it is told
    # not to.
    validating = {**accumulating, "val_check_interval": 4, "limit_val_batches": 1}
    folder = partial(
        fit, rank, 4, **OF_DATA, inner="adamw", compression="fp4", trainer_choices=accumulating
    )
    newest = pl.callbacks.ModelCheckpoint(
        tmp_path / "newest",
        "{step}",
        every_n_train_steps=6,
        monitor="step",
        mode="max",
        save_last="link",
    )
    # In the midst of steps, too.
    again = at(dict.fromkeys(range(STEPS), save(tmp_path / "same.ckpt")))
    callbacks = [again, newest, *saving(LIGHTNING, tmp_path, every_n_train_steps=1)]
    plain = folder()
    seen = {"inspect": lambda trainer: float(trainer.callback_metrics["seen"])}
    disturbed = folder(callbacks=callbacks, trainer_choices=validating, **seen)
    assert_resumed(disturbed, plain, 0)
    assert abs(disturbed["inspected"] - loss(plain["outer"])) < 1e-6
    for name, step in (("step=6.ckpt", 6), ("step=11.ckpt", 11), ("newest/last.ckpt", 12)):
        assert_resumed(folder(path=tmp_path / name), plain, step)

    kept = tmp_path / "file"
    file = partial(fit, rank, 4, **OF_TENSORS, inner="adamw", save_distributed_checkpoint=False)
    saved = file(callbacks=saving(LIGHTNING, kept, every_n_train_steps=1))
    assert_resumed(file(path=kept / "step=7.ckpt"), saved, 7)
    assert (
        unequal(
            torch.load(kept / "step=12.ckpt", weights_only=True)["state_dict"], outer_of(saved, 12)
        )
        == []
    )

    # One is overwritten, of the other the newest is kept.
    assert names_in(tmp_path / "newest") == ["last.ckpt", "step=12.ckpt", "step=12.ckpt.sdiloco"]
    (beside,) = (tmp_path / "same.ckpt.sdiloco").iterdir()
    assert names_in(beside) == ["manifest.json", *(f"rank_{i:05d}.pt" for i in range(4))]
    assert names_in(tmp_path, "same*") == ["same.ckpt", "same.ckpt.sdiloco"]

    # What was saved in flight, where local parameters are others, is the outer model in plain
    # torch.
    if rank == 0:
        for module in [*sys.modules]:
            if module.startswith(("lightning", "pytorch_lightning")):
                sys.modules[module] = None  # type: ignore[assignment]
        dcp_to_torch_save(tmp_path / "step=12.ckpt", tmp_path / "converted.pt")
        assert (
            unequal(torch.load(tmp_path / "converted.pt")["state_dict"], outer_of(disturbed, 12))
            == []
        )


def test_other_shards_and_the_first_strategy_start_from_each_others_outer_parameters(
    tmp_path: Path,
) -> None:
    adamw = partial(fit, inner="adamw")
    outer: dict[str, Any] = {
        "overlap_steps": 0,
        "outer_momentum": "auto",
        "outer_optimizer": partial(torch.optim.AdamW, lr=0.1),
    }
    whole: dict[str, Any] = {**outer, "save_distributed_checkpoint": False}
    # After step 10 a fragment is in flight: it lands on loading.
    flying, file, back = (
        tmp_path / name for name in ("step=10.ckpt", "file/step=9.ckpt", "back/step=18.ckpt")
    )
    keep = saving(LIGHTNING, tmp_path, every_n_train_steps=10)
    keep_file = saving(LIGHTNING, file.parent, every_n_train_steps=9)
    four = play(
        4,
        {
            "flying": partial(adamw, **OF_DATA, steps=11, callbacks=keep),
            "tensor": partial(adamw, **OF_TENSORS, steps=12, path=flying),
            "one": partial(adamw, groups=1, sizes=(4, 1), steps=12, path=flying),
            "file": partial(adamw, **OF_DATA, steps=10, callbacks=keep_file, **whole),
            "both": partial(adamw, groups=1, sizes=(2, 2), steps=11, path=file, **whole),
        },
    )
    four |= play(6, {"three": partial(adamw, groups=3, sizes=(2, 1), steps=12, path=flying)})
    for case, step in (("tensor", 10), ("one", 10), ("three", 10), ("both", 9)):
        for rank in four[case]:
            assert sorted(rank["trace"]) == [step, step + 1]
            assert (
                unequal(
                    outer_of(rank, step),
                    outer_of(four["tensor" if step == 10 else "file"][0], step),
                )
                == []
            )
            assert rank["report"]["inner_steps"] == step + 2
    assert outer_of(four["tensor"][0], 10).keys() == outer_of(four["flying"][0], 10).keys()

    keep_back = saving(LIGHTNING, back.parent, every_n_train_steps=9)
    first = partial(plain, inner="adamw", steps=19, callbacks=keep_back, path=file, **outer)
    for rank in play(2, {"first": first})["first"]:
        assert unequal(outer_of(rank, 9), outer_of(four["file"][0], 9)) == []
    (again, *_) = play(4, {"again": partial(adamw, **OF_DATA, steps=19, path=back, **whole)})[
        "again"
    ]
    assert unequal(outer_of(again, 18), torch.load(back, weights_only=True)["state_dict"]) == []


def test_a_signal_ends_all_with_an_exact_checkpoint_and_exceptions_wait_for_nobody(
    tmp_path: Path,
) -> None:
    adamw = partial(fit, **OF_DATA, inner="adamw", timeout=timedelta(seconds=10))
    terminated = tmp_path / "terminated"
    failed = tmp_path / "failed"

    def keep(folder: Path, acts: Any) -> list[Any]:
        return [at(acts), pl.callbacks.ModelCheckpoint(folder, save_on_exception=folder == failed)]

    def terminate(trainer: Any) -> None:
        if trainer.global_rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def fail(trainer: Any) -> None:
        if trainer.global_rank == 1:
            raise ArithmeticError("this rank fails")

    def told(rank: int, world_size: int) -> Fit:
        plain = adamw(rank, world_size)
        refusal(
            adamw,
            rank,
            world_size,
            kind=SIGTERMException,
            callbacks=keep(terminated, {8: terminate}),
        )
        return plain

    def resumed(rank: int, world_size: int) -> None:
        (path,) = terminated.glob("terminated-*.ckpt")
        one = adamw(rank, world_size, path=path)
        assert_resumed(one, ranks[rank], min(one["trace"]))

    ranks = run_processes(told, 4)
    run_processes(resumed, 4)
    errors = run_processes(
        partial(adamw, callbacks=keep(failed, {6: fail})), 4, expect_failure=True
    )
    assert sorted(errors) == [0, 1, 2, 3]
    assert errors[1].splitlines()[-1] == "ArithmeticError: this rank fails"
    assert not list(failed.glob("*.ckpt"))
    assert list(failed.glob("*.sdiloco/exception/rank_00001.pt"))


def test_no_rank_writes_a_folder_before_the_first_can_and_all_raise_if_it_cannot(
    tmp_path: Path,
) -> None:
    path = tmp_path / "last.ckpt"
    part = tmp_path / "last.ckpt.part"
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
            saved = Saved(str(path), {"save": "some"}, [], [])
            topology = Topology(2, rank, world=group)
            writing = partial(model_format.write_folder, {"state_dict": {}}, path, group)
            told.append(refusal(write_common_file, saved, topology, writing, kind=OSError))
            setattr(module, name, before)
        return told

    for told in run_ranks(write, 2):
        assert ["rank 0: PermissionError: none of yours" in text for text in told] == [True, True]


# The mesh, and what is refused


def test_automatic_sizes_are_those_of_a_group() -> None:
    def shape(
        devices: int, nodes: int, worker_groups: Any = "auto", **sizes: Any
    ) -> tuple[int, int, int]:
        chosen = ShardedModel(ShardedModel.base_arguments(**sizes))
        return (chosen.layout(worker_groups, nodes, devices).worker_groups, *chosen.mesh.values())

    assert shape(4, 2) == (2, 1, 4)
    assert shape(4, 4, worker_groups=2) == (2, 2, 4)
    assert shape(8, 1, worker_groups=2) == (2, 1, 4)
    assert shape(8, 1, worker_groups=2, data_parallel_size=4) == (2, 4, 1)
    assert shape(8, 1, worker_groups=2, tensor_parallel_size=2) == (2, 2, 2)
    assert shape(8, 1, data_parallel_size=2, tensor_parallel_size=2) == (2, 2, 2)
    assert shape(3, 1) == (3, 1, 1)
    assert "tensor_parallel_size=0 is out of range" in refusal(shape, 8, 1, tensor_parallel_size=0)
    told = refusal(
        fits.trainer, strategy=fits.strategy(worker_groups=2, data_parallel_size=3), devices=8
    )
    assert "do not fill a worker group of 4 ranks" in told


@in_ranks(2)
def test_unsupported_options_of_fsdp_and_sharded_models_are_refused(rank: int) -> None:
    def with_more(model: Any) -> None:
        model.extra = nn.Linear(2, 2)

    def freezing(model: Any) -> None:
        model.on_train_epoch_start = lambda: model.net[0].requires_grad_(model.current_epoch == 0)

    cases: list[tuple[str, Callable[[Any], None], dict[str, Any]]] = [
        ("2 trainable parameters, such as 'extra.weight', are not sharded", with_more, {}),
        (
            "copies the whole model",
            lambda model: None,
            {"callbacks": [pl.callbacks.EMAWeightAveraging()]},
        ),
        (
            "unfreezes layers between epochs",
            lambda model: None,
            {"callbacks": [pl.callbacks.BackboneFinetuning()]},
        ),
        (
            "were frozen, became trainable or were replaced",
            freezing,
            {"max_epochs": 2, "limit_train_batches": 2},
        ),
    ]
    for words, change, choices in cases:
        change(model := sharded.sharded(seed=0))
        trainer = trainer_of(2, 1, 2, 1, limit_val_batches=0, **{"max_steps": 20, **choices})
        told = refusal(trainer.fit, model, batches(0, rank, 2))
        assert words in told
        assert told.endswith(".")
    # Lightning itself looks at the precision only where the strategy is an object.
    trainer = fits.trainer(
        strategy="streaming_diloco_model_parallel", devices=2, precision="64-true", max_steps=1
    )
    told = refusal(trainer.fit, sharded.sharded(), batches(rank))
    assert "precision='64-true' does not work with sharded models" in told

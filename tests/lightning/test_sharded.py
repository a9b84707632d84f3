"""Worker groups that share one sharded model, and Muon inside: the training of whole models, and
checkpoints.
"""

import copy
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import chain
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
from lightning_sdiloco.engine import checkpoint as checkpoint_files
from lightning_sdiloco.engine.checkpoint import Saved, write_common_file
from lightning_sdiloco.lightning import model_format
from lightning_sdiloco.lightning.model_format import ShardedModel
from tests import fits, sharded
from tests.fits import LIGHTNING, assert_same, at, batches, play, refusal, save, saving
from tests.lightning.test_checkpoint import assert_resumed, names_in, outer_of, run_fit
from tests.ranks import agreed, in_ranks, run_processes, run_ranks
from tests.training import batch

from muon import muon_and_adamw  # isort: skip  (on the path since benchmarks.models)
from pretrain_text import ByteGPT  # isort: skip

# One layer each, so that a fragment may lie on a part of the ranks only. One is in flight after
# step 6, two after 7; after step 11, when all have landed once, the first are launched again.
CHOICES = {
    "sync_every": 5,
    "overlap_steps": 3,
    "fragments": "strided:1",
    "compression": "fp32",
}
# Whatever the length of a fit.
CHOICES |= {"outer_momentum": 0.9, "outer_optimizer": OuterOptimizer(direction="equalised")}
STEPS = 14
Fit = dict[str, Any]

Weights = dict[str, Tensor]

fit = partial(sharded.fit, **{"steps": STEPS, **CHOICES})
fit_adamw = partial(fit, inner="adamw")
OF_DATA = {"groups": 2, "sizes": (2, 1)}
OF_TENSORS = {"groups": 2, "sizes": (1, 2)}


def plain(
    rank: int, world_size: int, inner: str = "sgd", net: Any = sharded.even, **choices: Any
) -> Fit:
    """A fit of two groups of whole models."""
    make = partial(sharded.plain, inner=inner, net=net)
    return run_fit(rank, world_size, make=make, **{"steps": STEPS, **CHOICES, **choices})


def trainer_of(world_size: int, groups: int, sizes: tuple[int, int], **choices: Any) -> Any:
    data_size, tensor_size = sizes
    mesh = {"data_parallel_size": data_size, "tensor_parallel_size": tensor_size}
    strategy = fits.strategy(worker_groups=groups, **mesh, **CHOICES)
    return fits.trainer(strategy=strategy, devices=world_size, **choices)


def distance(actual: Weights, expected: Weights) -> float:
    """The largest relative distance of two tensors of a name."""
    assert actual.keys() == expected.keys()
    distances = []
    for name, values in expected.items():
        distances.append(float((actual[name] - values).norm() / values.norm()))
    return max(distances)


def validation_loss(outer: Weights) -> float:
    net = sharded.even(0)
    net.load_state_dict({name.removeprefix("net."): values for name, values in outer.items()})
    x, y = batch(9, 1)
    return float(nn.functional.mse_loss(net(x), y).detach())


# Training


@in_ranks(2)
def test_groups_of_one_rank_match_the_first_strategys_outer_parameters_bit_for_bit(
    rank: int, distribution: str
) -> None:
    for inner, compression in (("sgd", "fp32"), ("adamw", "fp4")):
        choices = {"inner": inner, "compression": compression}
        expected = plain(rank, 2, **choices)
        actual = fit(rank, 2, groups=2, sizes=(1, 1), distribution=distribution, **choices)
        assert_same(actual["outer"], expected["outer"])
        assert actual["report"]["bytes_sent"] == expected["report"]["bytes_sent"]


class InDouble(nn.Linear):
    """A layer whose parameters are float64, among layers in float32."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values.double()).to(values.dtype)


def of_two_dtypes(seed: int) -> nn.Sequential:
    net = sharded.even(seed)
    net[2] = InDouble(12, 7).double()
    return net


def loop_of_your_own(rank: int, world_size: int) -> Weights:
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


def assert_alike(ranks: list[Fit], expected: Fit, single_report: dict[str, Any]) -> None:
    """Two groups of ranks train as expected, and send as many bytes as groups of a single rank."""
    size = len(ranks) // 2
    flights = len(sharded.even(0)) // 2 + 1 + single_report["launches"]
    # A rank without a value of a fragment sends a zero, and every rank sends a control vector.
    padding = 4 * flights * (size - 1)
    expected_bytes = single_report["bytes_sent"] + CONTROL_BYTES * flights * (size - 1)
    for group in (ranks[:size], ranks[size:]):
        sent_bytes = sum(rank["report"]["bytes_sent"] for rank in group)
        assert expected_bytes <= sent_bytes <= expected_bytes + padding
    for rank in ranks:
        assert distance(rank["outer"], expected["outer"]) < 1e-5
        # The model is left with the outer parameters, the same bits on all ranks of all groups.
        assert_same(rank["model"], rank["outer"])
        assert_same(rank["outer"], ranks[0]["outer"])
        for key in ("inner_steps", "launches", "landings"):
            assert rank["report"][key] == single_report[key], key


def test_sharding_inside_a_group_does_not_change_the_outer_parameters() -> None:
    dense_beginning = DenseBeginning(2, 2)
    dense = partial(plain, dense_beginning=dense_beginning)
    whole_models = play(
        2, {"plain": plain, "float64": partial(plain, net=of_two_dtypes), "dense": dense}
    )
    expected = whole_models["plain"][0]
    ranks = play(
        4,
        {
            "tensor": partial(fit, **OF_TENSORS),
            "float64": partial(fit, **OF_DATA, net=of_two_dtypes),
            "dense": dense,
            "dense shards": partial(fit, **OF_DATA, dense_beginning=dense_beginning),
            "loop": loop_of_your_own,
        },
    )
    assert_alike(ranks["tensor"], expected, expected["report"])
    for rank in ranks["dense"] + ranks["dense shards"]:
        assert distance(rank["outer"], whole_models["dense"][0]["outer"]) < 1e-5
    for outer in ranks["loop"]:
        assert distance(outer, expected["outer"]) < 1e-5
    for rank in ranks["float64"]:
        weights = rank["model"]
        assert {values.dtype for values in weights.values()} == {torch.float32, torch.float64}
        assert distance(rank["outer"], whole_models["float64"][0]["outer"]) < 1e-5
        assert_same({name: values.float() for name, values in weights.items()}, rank["outer"])
    # Three data-parallel ranks do not divide a batch of eight, and so weigh its examples unequally.
    six = play(6, {"expected": plain, "actual": partial(fit, groups=2, sizes=(3, 1))})
    assert_alike(six["actual"], six["expected"][0], expected["report"])


def examples_of_rank(rank: int, world_size: int) -> list[int]:
    """The examples that a rank sees of those that Lightning's own sampler divides."""
    examples: list[int] = []
    model = sharded.sharded(seed=rank // 4)
    model.on_train_batch_start = lambda parts, index: examples.extend(parts[2].tolist())
    trainer = trainer_of(world_size, 2, (2, 2), max_epochs=1, limit_val_batches=0)
    trainer.fit(model, DataLoader(TensorDataset(*batch(0, 1), torch.arange(8)), batch_size=1))
    return examples


@pytest.mark.slow
def test_muon_on_two_dimensional_shards_steps_as_on_the_matrix_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Muon rounds intermediate values to bfloat16, in each shard differently. Without it, only the
    # rounding of float32 remains.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.float)
    (expected, _) = play(2, {"plain": partial(plain, inner="muon")})["plain"]
    muon = partial(fit, groups=2, sizes=(2, 2), inner="muon")
    saves = saving(LIGHTNING, tmp_path, every_n_train_steps=7)
    ranks = play(
        8,
        {
            "saved": partial(muon, callbacks=saves),
            "resumed": partial(muon, path=tmp_path / "step=7.ckpt"),
            "examples": examples_of_rank,
        },
    )
    for resumed, saved in zip(ranks["resumed"], ranks["saved"], strict=True):
        assert_resumed(resumed, saved, 7)
        for name, values in saved["outer"].items():
            assert torch.allclose(values, expected["outer"][name], rtol=0, atol=1e-4), name
    examples = ranks["examples"]
    assert examples[::2] == examples[1::2], "tensor-parallel ranks share their data"
    assert sorted(chain(*examples[::2])) == list(range(8))


def gpt(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return GPT(layers=2, width=20, heads=2, context=8)


def train_gpt(model: nn.Module, optimizers: list[Any], steps: range) -> list[Tensor]:
    for step in steps:
        text = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        next_byte_loss(model, text[:, :-1], text[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def muon_and_adamw_apart(model: nn.Module) -> list[Any]:
    """Muon for the matrices of the blocks, and AdamW for embeddings and vectors."""
    matrices = []
    embeddings = []
    vectors = []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            vectors.append(parameter)
        elif name.startswith("blocks."):
            matrices.append(parameter)
        else:
            embeddings.append(parameter)
    decayed = {"params": embeddings, "weight_decay": 0.3}
    undecayed = {"params": vectors, "weight_decay": 0.0}
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW([decayed, undecayed], lr=0.01, betas=(0.9, 0.95))]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9, which has Muon")
def test_the_examples_muon_steps_as_two_optimizers_with_one_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saved or copied, it still does."""
    model = gpt()
    twin = gpt()
    loaded_model = gpt(seed=1)
    both = muon_and_adamw(model, lr=0.01, weight_decay=0.3)
    apart = muon_and_adamw_apart(twin)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (both, *apart)
    ]
    expected = train_gpt(twin, apart, range(3))
    assert all(map(torch.equal, train_gpt(model, [both], range(3)), expected))
    for scheduler in schedulers:
        scheduler.step()
    copied = copy.deepcopy((model, both))
    loaded = muon_and_adamw(loaded_model, lr=1.0)
    loaded_model.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(both.state_dict()))
    expected = train_gpt(twin, apart, range(3, 6))
    for trained_model, optimizer in ((model, both), copied, (loaded_model, loaded)):
        trained = train_gpt(trained_model, [optimizer], range(3, 6))
        assert all(map(torch.equal, trained, expected))
        assert {group["lr"] for group in optimizer.param_groups} == {0.005}

    message = refusal(muon_and_adamw, nn.Sequential(nn.Linear(2, 2)), lr=0.01)
    assert "Sequential has no trainable matrix in a list called 'blocks'" in message
    message = refusal(both.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]})
    assert "make the optimizer of all of them" in message
    monkeypatch.delattr(torch.optim, "Muon")
    message = refusal(ByteGPT, optimizer="muon")
    assert "torch 2.9 or newer, or choose the optimizer 'adamw'" in message


def spoil_after_next_step(trainer: Any) -> None:
    """Makes values of rank 3 not finite once the optimizer has stepped."""

    def spoil(*args: Any) -> None:
        handle.remove()
        if trainer.global_rank == 3:
            # The first layer lands at once. Of the second, the other rank of the group has only
            # finite values.
            for layer in (0, 2):
                weight = trainer.lightning_module.net[layer].weight
                weight.detach().to_local().fill_(float("nan"))

    handle = trainer.optimizers[0].register_step_post_hook(spoil)


def dtypes_in(weights: Weights) -> set[torch.dtype]:
    return {values.dtype for values in weights.values()}


@in_ranks(4)
def test_precision_validation_and_faults_are_handled_as_by_the_first_strategy(rank: int) -> None:
    mixed = fit(rank, 4, **OF_DATA, trainer_choices={"precision": "bf16-mixed"})
    true = fit(rank, 4, **OF_TENSORS, trainer_choices={"precision": "bf16-true"})
    spoiled = fit(
        rank,
        4,
        **OF_TENSORS,
        callbacks=[at({4: spoil_after_next_step})],
        overlap_steps=0,
        timeout=timedelta(seconds=10),
        inner="adamw",
    )
    for fitted, dtype in ((mixed, torch.float32), (true, torch.bfloat16), (spoiled, torch.float32)):
        assert dtypes_in(fitted["outer"]) == {torch.float32}
        assert dtypes_in(fitted["model"]) == {dtype}
        assert all(bool(values.isfinite().all()) for values in fitted["outer"].values())
        assert agreed(fitted["outer"])

    # Validated before, between and after fits.
    model = sharded.sharded(seed=rank // 2)
    trainer = trainer_of(4, 2, (2, 1), max_steps=7, limit_val_batches=1)
    losses = [trainer.validate(model, verbose=False)[0]["seen"]]
    for steps in (7, 12):
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(model, batches(rank // 2, rank % 2, 2))
        losses.append(trainer.validate(model, verbose=False)[0]["seen"])
    assert agreed(losses)
    initial_loss = validation_loss(sharded.even(0).state_dict())
    final_loss = validation_loss(trainer.strategy.outer_state_dict())
    assert abs(losses[0] - initial_loss) < 1e-6
    assert abs(losses[2] - final_loss) < 1e-6
    assert len(set(losses)) == 3


# Checkpoints


@in_ranks(4)
def test_a_sharded_fit_saved_validated_and_resumed_anywhere_keeps_its_bits(
    rank: int, tmp_path: Path
) -> None:
    accumulating = {"accumulate_grad_batches": 2}
    # By default FSDP2 keeps the parameters of the outermost module whole after a validation.
    validating = {**accumulating, "val_check_interval": 4, "limit_val_batches": 1}
    fit_to_folders = partial(
        fit_adamw, rank, 4, **OF_DATA, compression="fp4", trainer_choices=accumulating
    )
    newest = pl.callbacks.ModelCheckpoint(
        tmp_path / "newest",
        "{step}",
        every_n_train_steps=6,
        monitor="step",
        mode="max",
        save_last="link",
    )
    # Also between the batches of a step, of which each has two.
    save_twice = at(dict.fromkeys((7, 8), save(tmp_path / "same.ckpt")))
    callbacks = [save_twice, newest]
    for steps in (6, 11):
        callbacks += saving(LIGHTNING, tmp_path, every_n_train_steps=steps)
    plain = fit_to_folders()
    disturbed = fit_to_folders(
        callbacks=callbacks,
        trainer_choices=validating,
        inspect=lambda trainer: float(trainer.callback_metrics["seen"]),
    )
    assert_resumed(disturbed, plain, 0)
    assert abs(disturbed["inspected"] - validation_loss(plain["outer"])) < 1e-6
    for name, step in (("step=6.ckpt", 6), ("step=11.ckpt", 11), ("newest/last.ckpt", 12)):
        assert_resumed(fit_to_folders(path=tmp_path / name), plain, step)

    # "same" is overwritten, and of "newest" the last one is kept.
    assert names_in(tmp_path / "newest") == ["last.ckpt", "step=12.ckpt", "step=12.ckpt.sdiloco"]
    (folder,) = (tmp_path / "same.ckpt.sdiloco").iterdir()
    assert names_in(folder) == ["manifest.json", *(f"rank_{i:05d}.pt" for i in range(4))]
    assert names_in(tmp_path, "same*") == ["same.ckpt", "same.ckpt.sdiloco"]

    # In flight, local parameters differ from the outer ones, of which plain torch reads the file.
    if rank == 0:
        converted = tmp_path / "converted.pt"
        hide_lightning()
        dcp_to_torch_save(tmp_path / "step=12.ckpt", converted)
        assert_same(torch.load(converted)["state_dict"], outer_of(disturbed, 12))


def state_in(path: Path) -> Weights:
    return dict(torch.load(path, weights_only=True)["state_dict"])


def hide_lightning() -> None:
    """Makes every import of Lightning or of this package an error."""
    for module in [*sys.modules]:
        if module.startswith(("lightning", "pytorch_lightning")):
            sys.modules[module] = None


@in_ranks(4)
def test_a_sharded_fit_saved_to_files_resumes_with_the_same_bits(rank: int, tmp_path: Path) -> None:
    fit_to_files = partial(fit_adamw, rank, 4, **OF_TENSORS, save_distributed_checkpoint=False)
    saved = fit_to_files(callbacks=saving(LIGHTNING, tmp_path, every_n_train_steps=1))
    assert_resumed(fit_to_files(path=tmp_path / "step=7.ckpt"), saved, 7)
    assert_same(state_in(tmp_path / "step=12.ckpt"), outer_of(saved, 12))


OUTER_ADAMW = {
    "overlap_steps": 0,
    "outer_momentum": "auto",
    "outer_optimizer": partial(torch.optim.AdamW, lr=0.1),
}
TO_FILE = {**OUTER_ADAMW, "save_distributed_checkpoint": False}


def test_other_shards_and_the_first_strategy_start_from_each_others_outer_parameters(
    tmp_path: Path,
) -> None:
    # After step 10 a fragment is in flight: it lands on loading.
    in_flight = tmp_path / "step=10.ckpt"
    file = tmp_path / "file" / "step=9.ckpt"
    back = tmp_path / "back" / "step=18.ckpt"
    saves = saving(LIGHTNING, tmp_path, every_n_train_steps=10)
    saves_to_file = saving(LIGHTNING, file.parent, every_n_train_steps=9)
    ranks = play(
        4,
        {
            "in flight": partial(fit_adamw, **OF_DATA, steps=11, callbacks=saves),
            "tensor": partial(fit_adamw, **OF_TENSORS, steps=12, path=in_flight),
            "one": partial(fit_adamw, groups=1, sizes=(4, 1), steps=12, path=in_flight),
            "file": partial(fit_adamw, **OF_DATA, steps=10, callbacks=saves_to_file, **TO_FILE),
            "both": partial(fit_adamw, groups=1, sizes=(2, 2), steps=11, path=file, **TO_FILE),
        },
    )
    three_groups = partial(fit_adamw, groups=3, sizes=(2, 1), steps=12, path=in_flight)
    ranks |= play(6, {"three": three_groups})

    def assert_started_from(outer: Weights, case: str, step: int) -> None:
        for rank in ranks[case]:
            assert sorted(rank["trace"]) == [step, step + 1]
            assert_same(outer_of(rank, step), outer)
            assert rank["report"]["inner_steps"] == step + 2

    landed = outer_of(ranks["tensor"][0], 10)
    saved = outer_of(ranks["file"][0], 9)
    for case in ("tensor", "one", "three"):
        assert_started_from(landed, case, 10)
    assert_started_from(saved, "both", 9)
    assert landed.keys() == outer_of(ranks["in flight"][0], 10).keys()

    saves_back = saving(LIGHTNING, back.parent, every_n_train_steps=9)
    choices = {"inner": "adamw", "steps": 19, **OUTER_ADAMW}
    first = partial(plain, callbacks=saves_back, path=file, **choices)
    for rank in play(2, {"first": first})["first"]:
        assert_same(outer_of(rank, 9), saved)
    again = partial(fit_adamw, **OF_DATA, steps=19, path=back, **TO_FILE)
    resumed = play(4, {"again": again})["again"][0]
    assert_same(outer_of(resumed, 18), state_in(back))


def terminate_rank_2(trainer: Any) -> None:
    if trainer.global_rank == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def fail_in_rank_1(trainer: Any) -> None:
    if trainer.global_rank == 1:
        raise ArithmeticError("this rank fails")


def test_a_signal_ends_all_with_an_exact_checkpoint_and_exceptions_wait_for_nobody(
    tmp_path: Path,
) -> None:
    fit_with_timeout = partial(fit_adamw, **OF_DATA, timeout=timedelta(seconds=10))
    terminated = tmp_path / "terminated"
    failed = tmp_path / "failed"

    def run_and_terminate(rank: int, world_size: int) -> Fit:
        plain = fit_with_timeout(rank, world_size)
        checkpoint = pl.callbacks.ModelCheckpoint(terminated, save_on_exception=False)
        callbacks = [at({8: terminate_rank_2}), checkpoint]
        refusal(fit_with_timeout, rank, world_size, kind=SIGTERMException, callbacks=callbacks)
        return plain

    def resume(rank: int, world_size: int) -> None:
        (path,) = terminated.glob("terminated-*.ckpt")
        resumed = fit_with_timeout(rank, world_size, path=path)
        assert_resumed(resumed, ranks[rank], min(resumed["trace"]))

    ranks = run_processes(run_and_terminate, 4)
    run_processes(resume, 4)
    checkpoint = pl.callbacks.ModelCheckpoint(failed, save_on_exception=True)
    failing = partial(fit_with_timeout, callbacks=[at({6: fail_in_rank_1}), checkpoint])
    errors = run_processes(failing, 4, expect_failure=True)
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

    def remove_late(removed: Path) -> None:
        if removed == part and not path.exists():
            time.sleep(0.3)
            assert not removed.exists(), "another rank writes already"
        remove(removed)

    def refuse(*_: Any) -> None:
        raise PermissionError("none of yours")

    def write(rank: int, _: int) -> list[str]:
        group = Communicator(dist.group.WORLD)
        model_format._remove = remove_late
        for _ in range(2):
            model_format.write_folder({"state_dict": {"x": torch.ones(3)}}, path, group)
            group.all_gather_object(rank)
        assert model_format.is_folder(path)
        assert not part.exists()
        saved = Saved(str(path), {"save": "some"}, [], [])
        topology = Topology(2, rank, world=group)
        writing = partial(model_format.write_folder, {"state_dict": {}}, path, group)
        messages = []
        for module, name in ((model_format, "_remove"), (checkpoint_files, "_write")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, name, refuse)
                messages.append(refusal(write_common_file, saved, topology, writing, kind=OSError))
        return messages

    for messages in run_ranks(write, 2):
        assert len(messages) == 2
        for message in messages:
            assert "rank 0: PermissionError: none of yours" in message


# The mesh, and what is refused


def test_automatic_sizes_are_those_of_a_group() -> None:
    def shape(
        devices: int, nodes: int, worker_groups: Any = "auto", **sizes: Any
    ) -> tuple[int, int, int]:
        """The number of groups, and the sizes of the mesh of a group."""
        model = ShardedModel(ShardedModel.base_arguments(**sizes))
        layout = model.layout(worker_groups, nodes, devices)
        return (layout.worker_groups, *model.mesh.values())

    assert shape(4, 2) == (2, 1, 4)
    assert shape(4, 4, worker_groups=2) == (2, 2, 4)
    assert shape(8, 1, worker_groups=2) == (2, 1, 4)
    assert shape(8, 1, worker_groups=2, data_parallel_size=4) == (2, 4, 1)
    assert shape(8, 1, worker_groups=2, tensor_parallel_size=2) == (2, 2, 2)
    assert shape(8, 1, data_parallel_size=2, tensor_parallel_size=2) == (2, 2, 2)
    assert shape(3, 1) == (3, 1, 1)
    assert "tensor_parallel_size=0 is out of range" in refusal(shape, 8, 1, tensor_parallel_size=0)
    strategy = fits.strategy(worker_groups=2, data_parallel_size=3)
    message = refusal(fits.trainer, strategy=strategy, devices=8)
    assert "do not match a worker group of 4 ranks" in message


@in_ranks(2)
def test_unsupported_options_of_fsdp_and_sharded_models_are_refused(rank: int) -> None:
    def refusal_of(model: Any, **choices: Any) -> str:
        trainer = trainer_of(2, 1, (2, 1), limit_val_batches=0, **{"max_steps": 20, **choices})
        message = refusal(trainer.fit, model, batches(0, rank, 2))
        assert message.endswith(".")
        return message

    extended = sharded.sharded()
    extended.extra = nn.Linear(2, 2)
    message = refusal_of(extended)
    assert "2 trainable parameters, such as 'extra.weight', are not sharded" in message
    message = refusal_of(sharded.sharded(), callbacks=[pl.callbacks.EMAWeightAveraging()])
    assert "copies the whole model" in message
    message = refusal_of(sharded.sharded(), callbacks=[pl.callbacks.BackboneFinetuning()])
    assert "unfreezes layers between epochs" in message
    freezing = sharded.sharded()
    freezing.on_train_epoch_start = lambda: freezing.net[0].requires_grad_(
        freezing.current_epoch == 0
    )
    message = refusal_of(freezing, max_epochs=2, limit_train_batches=2)
    assert "have been frozen, unfrozen or replaced" in message
    # Lightning itself looks at the precision only where the strategy is an object.
    trainer = fits.trainer(
        strategy="streaming_diloco_model_parallel", devices=2, precision="64-true", max_steps=1
    )
    message = refusal(trainer.fit, sharded.sharded(), batches(rank))
    assert "precision='64-true' does not work with sharded models" in message

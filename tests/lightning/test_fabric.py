"""Loops of Fabric: bit-identical to the engine in a plain loop, DDP inside the group only, outer
checkpoints.
"""

import gc
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdiloco import (
    DenseBeginning,
    Federation,
    StreamingDiLoCo,
    StreamingDiLoCoFabricStrategy,
    WorkerGroups,
)
from lightning_sdiloco import pytorch_lightning as other_distribution
from lightning_sdiloco.federation.memory import InProcessHub
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.lightning import fabric as fabric_room
from tests import fits
from tests.bits import same
from tests.engine.groups import regression
from tests.fits import play, refusal
from tests.ranks import agreed, in_ranks, run_ranks
from tests.scripts import run_script
from tests.training import LAYERS, batch, inner_optimizer, mlp

CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": LAYERS}
DENSE = DenseBeginning(rounds=2, sync_every=2)
STEPS = 11
STRATEGIES = {
    "lightning.fabric": StreamingDiLoCoFabricStrategy,
    "lightning_fabric": other_distribution.StreamingDiLoCoFabricStrategy,
}


def fabric_of(world_size: int, distribution: str = "lightning.fabric", **choices: Any) -> Any:
    """A Fabric that is launched, of two worker groups."""
    strategy = STRATEGIES[distribution](**{"worker_groups": 2, **CHOICES, **choices})
    fabric = importlib.import_module(distribution).Fabric(
        accelerator="cpu", devices=world_size, strategy=strategy
    )
    fabric.launch()
    return fabric


def train(fabric: Any, optimizer: Any, loss: Tensor) -> None:
    """One inner step of a loop of Fabric."""
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def set_up(fabric: Any, net: nn.Module, inner: str = "adamw") -> Any:
    """A model and its optimizer, set up by Fabric."""
    return fabric.setup(net, inner_optimizer(inner, net))


def copies_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in model.state_dict().items()}


ALL_STEPS = range(1, STEPS + 1)


def halves(rank: int, world_size: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """A rank's share of the batch of its group, in two micro-batches; none where its group is
    idle.
    """
    size = world_size // 2
    group, shard = divmod(rank, size)
    if group == 1 and step % 5 == 0:
        return []
    x, y = (part.chunk(size)[shard].chunk(2) for part in batch(group, step))
    return list(zip(x, y, strict=True))


def in_fabric(
    rank: int, world_size: int, distribution: str, path: Path, steps: range = ALL_STEPS
) -> dict[str, Tensor]:
    """A loop that begins with a checkpoint, or leaves one, unless it is played whole."""
    fabric = fabric_of(world_size, distribution, dense_beginning=DENSE)
    model, optimizer = set_up(fabric, mlp(rank))
    state = {"model": model, "optimizer": optimizer}
    if steps.start > 1:
        fabric.load(path, state)
    for step in steps:
        micro_batches = halves(rank, world_size, step)
        if not micro_batches:
            fabric.strategy.idle_step()
            continue
        for index, (x, y) in enumerate(micro_batches):
            with fabric.no_backward_sync(model, enabled=index == 0):
                fabric.backward(nn.functional.mse_loss(model(x), y) / 2)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        fabric.strategy.note_trained(1 + step % 3)
        optimizer.step()
        optimizer.zero_grad()
    if steps.stop <= STEPS:
        fabric.save(path, state)
    finish(fabric, model)
    assert fabric.strategy.report()["inner_steps"] == steps.stop - 1
    return copies_of(model)


def finish(fabric: Any, model: nn.Module) -> None:
    fabric.strategy.finish()
    assert fabric.strategy.finish() == []
    names = [name for fragment in fabric.strategy.fragments for name in fragment.names]
    assert names == list(model.state_dict())


def in_plain_loop(rank: int, world_size: int) -> dict[str, Tensor]:
    groups = WorkerGroups(2)
    net = mlp(rank)
    model = DistributedDataParallel(net, process_group=groups.process_group)
    optimizer = inner_optimizer("adamw", model)
    choices = {**CHOICES, "dense_beginning": DENSE}
    engine = StreamingDiLoCo(model, worker_groups=groups, inner_optimizers=[optimizer], **choices)
    for step in ALL_STEPS:
        micro_batches = halves(rank, world_size, step)
        if not micro_batches:
            engine.step(idle=True)
            continue
        (x, y), (last_x, last_y) = micro_batches
        with model.no_sync():
            (nn.functional.mse_loss(model(x), y) / 2).backward()
        (nn.functional.mse_loss(model(last_x), last_y) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        engine.step(trained=1 + step % 3)
    engine.finish()
    return copies_of(net)


@pytest.mark.parametrize(
    ("ranks", "distribution"), [(2, "lightning_fabric"), (4, "lightning.fabric")]
)
def test_a_loop_of_fabric_gives_the_bits_of_a_plain_one(
    ranks: int, distribution: str, tmp_path: Path
) -> None:
    """Also where it is resumed in a dense beginning."""
    loop = partial(in_fabric, distribution=distribution, path=tmp_path / "a.ckpt")
    cases = {
        "whole": loop,
        "saved": partial(loop, steps=range(1, 3)),
        "resumed": partial(loop, steps=range(3, STEPS + 1)),
    }
    played = play(ranks, cases)
    expected = run_ranks(in_plain_loop, ranks)[0]
    for model in played["whole"] + played["resumed"]:
        assert same(model, expected)


def with_a_critic(
    rank: int, world_size: int, path: Path, steps: range = ALL_STEPS
) -> tuple[int, dict[str, Tensor]]:
    """A loop whose first optimizer steps in every batch, and whose last one in every third;
    returns the inner steps and the model.
    """
    fabric = fabric_of(world_size, fragments=4)
    net = nn.ModuleDict({"critic": mlp(rank), "generator": mlp(rank + 2)})
    optimizers = [inner_optimizer("adamw", part) for part in net.values()]
    model, critic, generator = fabric.setup(net, *optimizers)
    state = {"model": model, "critic": critic, "generator": generator}
    if steps.start > 1:
        fabric.load(path, state)
    for step in steps:
        x, y = batch(rank, step)
        train(fabric, critic, nn.functional.mse_loss(net["critic"](x), y))
        if step % 3 == 0:
            train(fabric, generator, nn.functional.mse_loss(net["generator"](x), -y))
        if step == 4:
            fabric.save(path, state)
    fabric.strategy.finish()
    return fabric.strategy.report()["inner_steps"], copies_of(net)


def test_a_batch_counts_once_whichever_optimizers_step_in_it(tmp_path: Path) -> None:
    """Also where it is saved before its count."""
    loop = partial(with_a_critic, path=tmp_path / "4.ckpt")
    played = play(2, {"whole": loop, "resumed": partial(loop, steps=range(5, STEPS + 1))})
    _, expected = played["whole"][0]
    for inner_steps, model in played["whole"] + played["resumed"]:
        assert inner_steps == STEPS
        assert same(model, expected)


def federation_of(hub: InProcessHub) -> Federation:
    class SiteOfThisHub(Federation):
        def connect(self, *_: Any, **__: Any) -> Any:
            return hub.connect("a")

    return SiteOfThisHub(run="run", hub="hub:1", site="a", insecure=True)


@in_ranks(1)
def test_a_loop_of_fabric_as_a_site_counts_the_samples_that_go_through_its_model(rank: int) -> None:
    hub = InProcessHub("run", 1)
    # It announces what worker groups send, which a site does not know.
    fabric_room.Announcement = None  # type: ignore[assignment, misc]
    fabric = fabric_of(1, worker_groups="auto", federation=federation_of(hub))
    model, optimizer = set_up(fabric, mlp())
    for step in ALL_STEPS:
        # Eight samples, in two halves.
        x, y = (part.chunk(2) for part in batch(0, step))
        for half, target in zip(x, y, strict=True):
            fabric.backward(nn.functional.mse_loss(model(half), target) / 2)
        optimizer.step()
        optimizer.zero_grad()
        with fabric.strategy.evaluate(), torch.no_grad():
            model(x[1])
    fabric.strategy.finish()
    records = [Record.from_bytes(text) for _, text in hub.journal.read()]
    weights = [record.counted[0].weight for record in records if record.fragment == 0]
    assert weights == [4 * 8, 4 * 8, 3 * 8]


@in_ranks(4)
def test_gradients_stay_in_the_group_and_files_hold_the_outer_model(
    rank: int, tmp_path: Path
) -> None:
    """Other collectives of Fabric go over all ranks."""
    path = tmp_path / "a.ckpt"
    weights_path = tmp_path / "weights.ckpt"
    fabric = fabric_of(4)
    net = mlp(rank)
    model, optimizer = set_up(fabric, net)
    assert_each_rank_gets_a_part(fabric)
    for step in range(1, 11):
        train(fabric, optimizer, regression(model, rank // 2, step, rank % 2, 2))
    local = copies_of(net)
    with fabric.strategy.evaluate():
        assert agreed({"shown": model(torch.ones(1, 5)).detach()})
    assert same(local, net.state_dict())
    weights = fabric.all_gather(local["0.weight"])
    assert [torch.equal(weights[0], weight) for weight in weights] == [True, True, False, False]
    fabric.barrier()
    assert float(fabric.all_reduce(torch.tensor(float(rank)))) == 1.5
    assert fabric.all_gather(torch.tensor(rank)).tolist() == [0, 1, 2, 3]

    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 10})
    fabric.save(weights_path, {"model": model})
    outer = fabric.strategy.outer_state_dict()
    fabric.strategy.engine.close()
    assert agreed(outer)
    stored = torch.load(path, weights_only=True)
    assert stored["step"] == 10
    assert same(outer, stored["model"])
    stored_weights = torch.load(weights_path, weights_only=True)
    assert stored_weights.keys() == {"model"}
    assert same(outer, stored_weights["model"])
    assert not (tmp_path / "weights.ckpt.sdiloco").exists()
    assert_only_the_model_is_read_with_other_settings(path, outer)


def assert_each_rank_gets_a_part(fabric: Any) -> None:
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8)), batch_size=1))
    seen = fabric.all_gather(torch.tensor([int(value) for (value,) in loader]))
    assert sorted(seen.flatten().tolist()) == list(range(8))


def assert_only_the_model_is_read_with_other_settings(path: Path, outer: dict[str, Tensor]) -> None:
    fabric = fabric_of(4, sync_every=5)
    model = fabric.setup(mlp(5))
    assert fabric.load(path, {"model": model}).keys() == {"optimizer", "step"}
    optimizer = fabric.setup_optimizers(inner_optimizer("adamw", model))
    message = refusal(fabric.load, path, {"model": model, "optimizer": optimizer})
    assert "different settings: sync_every was 4, now it is 5" in message
    assert same(outer, dict(model.state_dict()))


@in_ranks(2)
def test_second_models_and_late_steps_of_one_strategy_are_refused(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    unused = fabric_of(2)
    unused.strategy.finish()
    assert "no optimizer from fabric.setup" in caplog.text
    two_models = [set_up(unused, mlp(seed), "sgd") for seed in (0, 1)]
    for model, optimizer in two_models:
        unused.backward(model(torch.ones(2, 5)).sum())
        message = refusal(optimizer.step)
        assert "A strategy trains a single model" in message
        assert "Combine the networks into one nn.Module" in message
    fabric, net, optimizer = after_one_step()
    fabric.strategy.finish()
    assert "after fabric.strategy.finish" in refusal(optimizer.step, kind=RuntimeError)
    # The same model is set up anew, and begins anew.
    _, optimizer = set_up(fabric, net, "sgd")
    optimizer.step()
    assert fabric.strategy.report()["inner_steps"] == 1
    fabric.strategy.finish()
    synchronised = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    assert "'1' is a SyncBatchNorm layer over all ranks" in refusal(fabric.setup, synchronised)
    caplog.clear()
    after_one_step()
    gc.collect()  # it was dropped, as at the end of a script
    warning = "ended after 1 inner steps without a call to fabric.strategy.finish()"
    assert (warning in caplog.text) == (rank == 0)


def after_one_step() -> tuple[Any, nn.Module, Any]:
    """A Fabric, its model and its optimizer."""
    fabric = fabric_of(2)
    net = mlp()
    _, optimizer = set_up(fabric, net, "sgd")
    optimizer.step()
    return fabric, net, optimizer


@in_ranks(2)
def test_base_class_arguments_arrive_and_groups_are_the_environments_processes(
    rank: int,
) -> None:
    for distribution, kind in STRATEGIES.items():
        plugins = importlib.import_module(f"{distribution}.plugins")
        accelerators = importlib.import_module(f"{distribution}.accelerators")
        environment = fits.environment_that_knows(distribution)
        arguments = {
            "accelerator": accelerators.CPUAccelerator(),
            "parallel_devices": [torch.device("cpu")],
            "cluster_environment": environment,
            "checkpoint_io": plugins.TorchCheckpointIO(),
            "precision": plugins.Precision(),
        }
        strategy = kind(process_group_backend="cpu:gloo", start_method="fork", **arguments)
        for name, argument in arguments.items():
            assert getattr(strategy, name) == argument
        assert strategy._get_process_group_backend() == "cpu:gloo"
        assert strategy._start_method == "fork"
        assert strategy._ddp_kwargs == {}
        make = importlib.import_module(distribution).Fabric
        fabric = make(accelerator="cpu", devices="auto", strategy=kind(), plugins=[environment])
        fabric.launch()
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8)), batch_size=1))
        assert fabric.world_size == 2
        assert fabric.global_rank == rank
        assert fabric.strategy.topology.num_groups == 2
        assert sorted(int(value) for (value,) in loader) == list(range(rank, 8, 2))
        fabric.barrier()  # the store, in rank 0, is there until both have made their process groups


SCRIPT = """
import sys
import torch
from lightning.fabric import Fabric
import lightning_sdiloco


def main(fabric):
    torch.manual_seed(fabric.global_rank)
    net = torch.nn.Linear(300, 400)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(3):
        fabric.backward(model(torch.randn(4, 300)).square().mean())
        optimizer.step()
    fabric.strategy.finish()
    one, other = fabric.all_gather(net.weight.detach().sum())
    # at once, since both ranks write
    sys.stdout.write(f"{one == other} {fabric.strategy.topology.num_groups}\\n")
    fabric.barrier()


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1])
    if sys.argv[1] == "streaming_diloco":
        fabric.launch()
        main(fabric)
    else:
        fabric.launch(main)
"""


@pytest.mark.parametrize(
    "name",
    [
        "streaming_diloco",
        "streaming_diloco_fork",
        pytest.param("streaming_diloco_spawn", marks=pytest.mark.large),
    ],
)
def test_processes_start_by_the_name_of_the_strategy(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    output = run_script(tmp_path / "train.py", name)
    assert output.count("True 2") == 2, (tmp_path / "stderr").read_text()


def with_another_head(rank: int, world_size: int) -> dict[str, Tensor]:
    fabric = fabric_of(world_size, fragments="strided:1")
    group = rank // (world_size // 2)
    net = mlp(rank)
    model, optimizer = set_up(fabric, net)
    for step in range(1, 20):
        if step == 10:
            assert fabric.strategy.engine.rounds.in_flight
            body = net[0].weight.detach().clone()
            net[6] = nn.Linear(9, 4)
            model, optimizer = set_up(fabric, net)
            assert not fabric.strategy.engine.rounds.in_flight
            assert agreed({"head": net[6].weight.detach()})
            assert not agreed({"body": body})
            # Groups keep the values that they have trained.
            assert not agreed({"body": net[0].weight.detach()})
        x, y = batch(group, step)
        train(fabric, optimizer, nn.functional.mse_loss(model(x)[:, :3], y))
    assert fabric.strategy.engine.rounds.in_flight
    fabric.strategy.finish()
    return copies_of(net)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_with_another_head_is_set_up_again_with_a_new_optimizer(ranks: int) -> None:
    models = run_ranks(with_another_head, ranks)
    assert models[0]["6.weight"].shape == (4, 9)
    assert all(same(model, models[0]) for model in models)


@in_ranks(2)
def test_a_model_in_training_is_not_set_up_again_without_its_optimizers(rank: int) -> None:
    fabric = fabric_of(2)
    net = mlp(rank)
    model, optimizer = set_up(fabric, net, "sgd")
    train(fabric, optimizer, model(torch.ones(1, 5)).mean())
    assert "Set up the model again together with its optimizers" in refusal(
        fabric.setup_module, net
    )


def trained_together(rank: int, world_size: int, seeds: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """Models of several Fabrics, trained in one loop."""
    fabrics = []
    models = []
    optimizers = []
    for seed in seeds:
        fabric = fabric_of(world_size, dense_beginning=DENSE)
        model, optimizer = set_up(fabric, mlp(seed))
        fabrics.append(fabric)
        models.append(model)
        optimizers.append(optimizer)
    for step in range(1, 30):
        x, y = batch(rank, step)
        for fabric, model, optimizer in zip(fabrics, models, optimizers, strict=True):
            train(fabric, optimizer, nn.functional.mse_loss(model(x), y))
    for fabric in fabrics:
        fabric.strategy.finish()
    return [copies_of(model) for model in models]


def test_two_models_of_two_fabrics_train_together_as_each_does_alone() -> None:
    cases = {str(seeds): partial(trained_together, seeds=seeds) for seeds in ((1,), (2,), (1, 2))}
    played = play(2, cases)
    for rank in range(2):
        (first,), (second,), together = (played[name][rank] for name in cases)
        assert same(together[0], first)
        assert same(together[1], second)

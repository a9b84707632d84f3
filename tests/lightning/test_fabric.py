"""Loops of Fabric: the bits of the engine in a plain loop, DDP inside the group only, outer checkpoints."""

import gc
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdiloco import Federation, StreamingDiLoCo, StreamingDiLoCoFabricStrategy, WorkerGroups
from lightning_sdiloco import pytorch_lightning as other_distribution
from lightning_sdiloco.federation.memory import InProcessHub
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.lightning import fabric as fabric_room
from tests import fits
from tests.lightning.uneven_fits import same
from tests.ranks import run_processes, run_ranks
from tests.scripts import run_script
from tests.training import LAYERS, batch, inner_optimizer, mlp

CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": LAYERS}
STEPS = 11
STRATEGIES = {
    "lightning.fabric": StreamingDiLoCoFabricStrategy,
    "lightning_fabric": other_distribution.StreamingDiLoCoFabricStrategy,
}


def fabric_of(world_size: int, distribution: str = "lightning.fabric", **choices: Any) -> Any:
    """A Fabric that is launched, of two worker groups."""
    strategy = STRATEGIES[distribution](worker_groups=2, **{**CHOICES, **choices})
    fabric = importlib.import_module(distribution).Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    return fabric


def part(rank: int, world_size: int, step: int) -> tuple[Tensor, Tensor]:
    """What a rank sees of the batch of its group."""
    size = world_size // 2
    x, y = batch(rank // size, step)
    return x.chunk(size)[rank % size], y.chunk(size)[rank % size]


def is_idle(rank: int, world_size: int, step: int) -> bool:
    """Whether the second group has nothing to train on."""
    return rank >= world_size // 2 and step % 5 == 0


def in_fabric(rank: int, world_size: int, distribution: str, warmup_steps: int) -> dict[str, Tensor]:
    fabric = fabric_of(world_size, distribution, warmup_steps=warmup_steps)
    model, optimizer = fabric.setup(net := mlp(rank), inner_optimizer("adamw", net))
    for step in range(1, STEPS + 1):
        if is_idle(rank, world_size, step):
            fabric.strategy.idle_step()
            continue
        x, y = part(rank, world_size, step)
        halves = zip(x.chunk(2), y.chunk(2), strict=True)
        for index, (half, other) in enumerate(halves):
            with fabric.no_backward_sync(model, enabled=index == 0):
                fabric.backward(nn.functional.mse_loss(model(half), other) / 2)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        fabric.strategy.note_trained(1 + step % 3)
        optimizer.step()
        optimizer.zero_grad()
    fabric.strategy.finish()
    assert fabric.strategy.finish() == []
    assert [name for fragment in fabric.strategy.fragments for name in fragment.names] == list(model.state_dict())
    assert fabric.strategy.report()["inner_steps"] == STEPS
    return {name: values.clone() for name, values in model.state_dict().items()}


def in_plain_loop(rank: int, world_size: int, warmup_steps: int) -> dict[str, Tensor]:
    groups = WorkerGroups(2)
    model = DistributedDataParallel(net := mlp(rank), process_group=groups.process_group)
    optimizer = inner_optimizer("adamw", model)
    choices = {**CHOICES, "warmup_steps": warmup_steps}
    engine = StreamingDiLoCo(model, worker_groups=groups, inner_optimizers=[optimizer], **choices)
    for step in range(1, STEPS + 1):
        if is_idle(rank, world_size, step):
            engine.step(idle=True)
            continue
        x, y = part(rank, world_size, step)
        first, second = zip(x.chunk(2), y.chunk(2), strict=True)
        with model.no_sync():
            (nn.functional.mse_loss(model(first[0]), first[1]) / 2).backward()
        (nn.functional.mse_loss(model(second[0]), second[1]) / 2).backward()
        engine.average_gradients()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        engine.step(trained=1 + step % 3)
    engine.finish()
    return {name: values.clone() for name, values in net.state_dict().items()}


@pytest.mark.parametrize(
    ("ranks", "distribution", "warmup_steps"), [(2, "lightning_fabric", 3), (4, "lightning.fabric", 0)]
)
def test_a_loop_of_fabric_gives_the_bits_of_a_plain_one(ranks: int, distribution: str, warmup_steps: int) -> None:
    expected = run_ranks(in_plain_loop, ranks, warmup_steps)
    for actual in run_processes(in_fabric, ranks, distribution, warmup_steps):
        assert same(actual, expected[0])


def test_a_loop_of_fabric_is_a_site_that_counts_by_what_goes_through_its_model() -> None:
    def loop(rank: int, world_size: int) -> list[int]:
        hub = InProcessHub("run", 1)
        # It says what worker groups send, of which a site knows nothing.
        fabric_room.Announcement = None  # type: ignore[assignment, misc]

        class Here(Federation):
            def connect(self, rank: int = 0, ranks: int = 1, life: str = "") -> HubConnection:
                return hub.connect("a")

        strategy = StreamingDiLoCoFabricStrategy(federation=Here("hub:1", "run", "a", insecure=True), **CHOICES)
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        model, optimizer = fabric.setup(net := mlp(rank), inner_optimizer("adamw", net))
        for step in range(1, STEPS + 1):
            # Eight samples, in two halves.
            for half, target in zip(*(one.chunk(2) for one in batch(0, step)), strict=True):
                fabric.backward(nn.functional.mse_loss(model(half), target) / 2)
            optimizer.step()
            optimizer.zero_grad()
            with fabric.strategy.evaluate(), torch.no_grad():
                model(half)
        fabric.strategy.finish()
        records = [Record.from_bytes(text) for _, text in hub.journal.read()]
        return [record.counted[0].weight for record in records if record.fragment == 0]

    (weights,) = run_processes(loop, 1)
    assert weights == [4 * 8, 4 * 8, 3 * 8]


def test_what_goes_over_all_ranks_and_what_stays_in_the_group_and_what_a_checkpoint_holds(tmp_path: Path) -> None:
    def loop(rank: int, world_size: int) -> dict[str, Any]:
        fabric = fabric_of(world_size)
        model, optimizer = fabric.setup(net := mlp(rank), inner_optimizer("adamw", net))
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8)), batch_size=1))
        found: dict[str, Any] = {"seen": [int(value) for (value,) in loader]}
        for step in range(1, 11):
            x, y = part(rank, world_size, step)
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        local = {name: values.clone() for name, values in net.state_dict().items()}
        with fabric.strategy.evaluate():
            found["shown"] = model(torch.ones(1, 5)).detach()
        assert same(local, net.state_dict())
        fabric.barrier()
        reduced = float(fabric.all_reduce(torch.tensor(float(rank))))
        found |= {"reduced": reduced, "gathered": fabric.all_gather(torch.tensor(rank)).tolist(), "local": local}
        fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer, "step": 10})
        fabric.save(tmp_path / "weights.ckpt", {"model": model})
        found["outer"] = fabric.strategy.outer_state_dict()
        fabric.strategy.engine.close()
        other = fabric_of(world_size, sync_every=5)  # whatever its settings
        fresh = other.setup(mlp(5))
        assert other.load(tmp_path / "a.ckpt", {"model": fresh}).keys() == {"optimizer", "step"}
        with_optimizer = {"model": fresh, "optimizer": other.setup_optimizers(inner_optimizer("adamw", fresh))}
        with pytest.raises(ValueError, match="other settings: sync_every was 4, now it is 5"):
            other.load(tmp_path / "a.ckpt", with_optimizer)
        return found | {"loaded": dict(fresh.state_dict())}

    ranks = run_processes(loop, 4)
    assert sorted(value for one in ranks for value in one["seen"]) == list(range(8))
    stored, alone = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("a", "weights"))
    assert (alone.keys(), stored["step"]) == ({"model"}, 10)
    for one in ranks:
        assert (one["reduced"], one["gathered"]) == (1.5, [0, 1, 2, 3])
        assert torch.equal(one["shown"], ranks[0]["shown"])
        assert all(same(one["outer"], held) for held in (stored["model"], alone["model"], one["loaded"]))
    assert same(ranks[0]["local"], ranks[1]["local"])
    assert not same(ranks[1]["local"], ranks[2]["local"])
    assert not (tmp_path / "weights.ckpt.sdiloco").exists()


def test_groups_are_made_of_the_processes_that_an_environment_knows() -> None:
    def loop(rank: int, world_size: int) -> Any:
        found = []
        for distribution, strategy in STRATEGIES.items():
            known = fits.environment_that_knows(distribution)
            make = importlib.import_module(distribution).Fabric
            fabric = make(accelerator="cpu", devices="auto", strategy=strategy(), plugins=[known])
            fabric.launch()
            loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8)), batch_size=1))
            groups = fabric.strategy.topology.num_groups
            fabric.barrier()  # the store, in rank 0, is there until both have made their process groups
            found.append((fabric.world_size, fabric.global_rank, groups, sorted(int(value) for (value,) in loader)))
        return found

    assert run_processes(loop, 2) == [[(2, 0, 2, [0, 2, 4, 6])] * 2, [(2, 1, 2, [1, 3, 5, 7])] * 2]


def test_what_one_strategy_cannot_train_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def trained(rank: int) -> Any:
        fabric = fabric_of(2)
        model, optimizer = fabric.setup(net := mlp(), inner_optimizer("sgd", net))
        optimizer.step()
        return fabric, net, optimizer

    def loop(rank: int, world_size: int) -> list[str]:
        fabric = fabric_of(world_size)
        fabric.strategy.finish()
        texts = [caplog.text]
        pairs = [fabric.setup(net, inner_optimizer("sgd", net)) for net in (mlp(0), mlp(1))]
        for model, optimizer in pairs:
            fabric.backward(model(torch.ones(2, 5)).sum())
            with pytest.raises(ValueError, match="One strategy trains one model") as caught:
                optimizer.step()
        fabric, net, optimizer = trained(rank)
        fabric.strategy.finish()
        with pytest.raises(RuntimeError, match="after fabric.strategy.finish"):
            optimizer.step()
        model, optimizer = fabric.setup(net, inner_optimizer("sgd", net))  # and that begins anew
        optimizer.step()
        assert fabric.strategy.report()["inner_steps"] == 1
        fabric.strategy.finish()
        with pytest.raises(ValueError, match="'1' is a SyncBatchNorm over all ranks"):
            fabric.setup(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
        caplog.clear()
        trained(rank)
        gc.collect()  # it was dropped, as at the end of a script
        return [*texts, str(caught.value), caplog.text]

    for rank, (nothing, several, unfinished) in enumerate(run_processes(loop, 2)):
        assert "no optimizer that was set up" in nothing
        assert "put the networks into one nn.Module" in several
        assert ("ended after 1 inner steps without fabric.strategy.finish()" in unfinished) == (rank == 0)


def test_arguments_are_refused_before_any_process_starts() -> None:
    for choices, message in (
        ({"sync_every": "auto"}, "sync_every='auto' is for the Trainer's strategy"),
        ({"overlap_steps": 100}, "overlap_steps=100 is out of range"),
        ({"ddp_kwargs": {"process_group": None}}, "ddp_kwargs contains 'process_group'"),
        ({"ddp_kwargs": {"foo": 1}}, "ddp_kwargs contains 'foo', which DistributedDataParallel does not have. It has"),
        ({"ddp_kwargs": {"ddp_comm_hook": print}}, "ddp_kwargs contains 'ddp_comm_hook', which Dist"),
        ({"evaluate": "local"}, "StreamingDiLoCoFabricStrategy has no argument 'evaluate'"),
        ({"find_unused_parameters": True}, "give ddp_kwargs="),
        ({"worker_groups": 3}, "worker_groups=3 cannot split 4 processes"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            Fabric(accelerator="cpu", devices=4, strategy=StreamingDiLoCoFabricStrategy(**choices))  # type: ignore[arg-type]


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
    if "finish" in sys.argv:
        fabric.strategy.finish()
    values = fabric.all_gather(net.weight.detach().sum())
    told = "equal" if values[0] == values[1] else "different"
    sys.stdout.write(f"{told} {fabric.strategy.topology.num_groups}\\n")  # at once, since both ranks write
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
    ["streaming_diloco", "streaming_diloco_fork", pytest.param("streaming_diloco_spawn", marks=pytest.mark.large)],
)
def test_processes_start_by_the_name_of_the_strategy(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    # Where processes run the script again, the groups are not joined in the end.
    finished = name != "streaming_diloco"
    told = run_script(tmp_path / "train.py", name, *["finish"] * finished)
    assert told.count("equal 2" if finished else "different 2") == 2, (tmp_path / "stderr").read_text()


@pytest.mark.parametrize("distribution", STRATEGIES)
def test_every_argument_of_the_base_class_arrives_under_its_own_name(distribution: str) -> None:
    plugins = importlib.import_module(f"{distribution}.plugins")
    given = {
        "accelerator": importlib.import_module(f"{distribution}.accelerators").CPUAccelerator(),
        "parallel_devices": [torch.device("cpu")],
        "cluster_environment": importlib.import_module(f"{distribution}.plugins.environments").LightningEnvironment(),
        "checkpoint_io": plugins.TorchCheckpointIO(),
        "precision": plugins.Precision(),
    }
    strategy = STRATEGIES[distribution](process_group_backend="cpu:gloo", start_method="fork", **given)
    assert {name: getattr(strategy, name) for name in given} == given
    assert strategy._get_process_group_backend() == "cpu:gloo"
    assert strategy._start_method == "fork"
    assert strategy._ddp_kwargs == {}

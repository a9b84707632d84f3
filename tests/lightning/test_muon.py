"""Muon inside, as the example chooses it: two optimizers that schedulers, checkpoints and shards take for one."""

import copy
import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.models import EXAMPLES, GPT, next_byte_loss
from tests import fits, sharded
from tests.ranks import run_processes

from muon import MuonAndAdamW, muon_and_adamw  # isort: skip  (on the path since benchmarks.models)
from pretrain_text import ByteGPT  # isort: skip

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9, which has Muon")
STEPS = 14
CHOICES: dict[str, Any] = {"worker_groups": 2, "sync_every": 5, "overlap_steps": 3, "fragments": "strided:1"}


def gpt(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return GPT(layers=2, width=20, heads=2, context=8)


def windows(group: int, step: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(1_000 * group + step))
    return text[:, :-1], text[:, 1:]


def trained(model: nn.Module, optimizers: list[Any], steps: range) -> list[Tensor]:
    for step in steps:
        model.zero_grad()
        next_byte_loss(model, *windows(0, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@needs_muon
def test_it_steps_as_two_optimizers_with_the_rates_of_one_scheduler() -> None:
    model, twin = gpt(), gpt()
    both = muon_and_adamw(model, lr=0.01, weight_decay=0.3)
    named = dict(twin.named_parameters())
    matrices = {name for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2}
    assert len(matrices) == 8
    embeddings = [p for name, p in named.items() if name not in matrices and p.dim() == 2]
    vectors = [p for p in named.values() if p.dim() == 1]
    groups = [{"params": embeddings, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    apart = [
        torch.optim.Muon(
            [p for name, p in named.items() if name in matrices],
            lr=0.01,
            weight_decay=0.3,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)),
    ]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (both, *apart)]
    for steps in (range(3), range(3, 6)):
        assert same(trained(model, [both], steps), trained(twin, apart, steps))
        for scheduler in schedulers:
            scheduler.step()
    assert {group["lr"] for group in both.param_groups} == {0.0025}


@needs_muon
@pytest.mark.parametrize("way", ["saved", "copied"])
def test_it_goes_on_where_it_was(way: str) -> None:
    model = gpt()
    optimizer = muon_and_adamw(model, lr=0.01)
    trained(model, [optimizer], range(3))
    if way == "copied":
        other, again = copy.deepcopy((model, optimizer))
    else:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        other = gpt(seed=1)
        other.load_state_dict(model.state_dict())
        again = muon_and_adamw(other, lr=1.0)
        again.load_state_dict(torch.load(file, weights_only=True))
    assert same(trained(model, [optimizer], range(3, 6)), trained(other, [again], range(3, 6)))


@needs_muon
def test_a_model_without_blocks_and_groups_that_come_later_are_refused() -> None:
    with pytest.raises(ValueError, match="Sequential has no trainable matrix in a list called 'blocks'"):
        muon_and_adamw(nn.Sequential(nn.Linear(2, 2)), lr=0.01)
    with pytest.raises(ValueError, match="make the optimizer of all of them"):
        muon_and_adamw(gpt(), lr=0.01).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_torch_without_muon_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match="torch 2.9 or newer, or choose the optimizer 'adamw'"):
        ByteGPT(optimizer="muon")
    ByteGPT(optimizer="adamw")


@needs_muon
def test_the_configuration_of_the_example_chooses_it() -> None:
    model = {}
    for name in ("base", "muon"):
        model |= yaml.safe_load((EXAMPLES / "configs" / f"{name}.yaml").read_text())["model"]
    module = ByteGPT(**model)
    module.trainer = SimpleNamespace(estimated_stepping_batches=100)  # type: ignore[assignment]
    optimizer = module.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, MuonAndAdamW)
    assert {group["initial_lr"] for group in optimizer.param_groups} == {model["lr"]}


# In worker groups


def module(seed: int) -> Any:
    """The GPT with Muon, which shards itself where the strategy has a mesh for it, and keeps what it holds."""

    class WithMuon(type(fits.module())):  # type: ignore[misc]
        def configure_model(self) -> None:
            if self.device_mesh is None or any(hasattr(p, "placements") for p in self.parameters()):
                return
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> MuonAndAdamW:
            return muon_and_adamw(self.net, lr=0.01)

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            return next_byte_loss(self.net, *parts)

        def on_train_batch_start(self, *args: Any) -> None:
            values = {name: sharded.held(p) for name, p in self.state_dict().items()}
            for index, state in enumerate(self.trainer.optimizers[0].state.values()):
                values |= {f"{index} {key}": sharded.held(value) for key, value in state.items()}
            self.trace[self.trainer.global_step] = values

    model = WithMuon()
    model.net, model.trace = gpt(seed), {}
    return model


class Windows(sharded.StatefulBatches):
    def __iter__(self) -> Any:
        group, shard, shards = self.place
        while self.step < self.length:
            self.step += 1
            yield tuple(part.chunk(shards)[shard] for part in windows(group, self.step))


def fit(
    rank: int,
    world_size: int,
    is_sharded: bool,
    folder: Path | None = None,
    resume: Path | None = None,
    compression: str = "fp4",
) -> dict[str, Any]:
    size, choices = world_size // 2, {**CHOICES, "compression": compression}
    if is_sharded:
        strategy = sharded.strategy(data_parallel_size=size, tensor_parallel_size=1, **choices)
    else:
        strategy = fits.strategy(**choices)
    saving = sharded.callbacks_of().ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = fits.trainer(
        strategy=strategy,
        devices=world_size,
        max_steps=STEPS,
        callbacks=[saving] if folder else [],
        enable_checkpointing=bool(folder),
    )
    model = module(seed=rank // size)
    trainer.fit(model, Windows(rank // size, rank % size, size, length=100), ckpt_path=resume and str(resume))
    return {"trace": model.trace, "outer": strategy.outer_state_dict(), "report": strategy.report()}


@needs_muon
def test_a_fit_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    plain = run_processes(fit, 2, False, tmp_path, None)
    assert plain[0]["report"]["landings"] > 4, "fragments were exchanged"
    assert same(list(plain[0]["outer"].values()), list(plain[1]["outer"].values()))
    for one, other in zip(run_processes(fit, 2, False, None, tmp_path / "step=4.ckpt"), plain, strict=True):
        assert sorted(one["trace"]) == list(range(4, STEPS))
        for at, values in one["trace"].items():
            assert values.keys() == other["trace"][at].keys()
            assert all(torch.equal(value, other["trace"][at][name]) for name, value in values.items())


@needs_muon
def test_muon_of_a_shard_steps_as_muon_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    # Muon rounds to bfloat16 on the way, each shard differently; without that what is left is float32's rounding.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.float)
    fit_exactly = partial(fit, compression="fp32")
    whole = run_processes(fit_exactly, 2, False, timeout=180.0)[0]["outer"]
    for rank in run_processes(fit_exactly, 4, True, timeout=180.0):
        for name, values in rank["outer"].items():
            assert torch.allclose(values, whole[name], rtol=0, atol=1e-4), name

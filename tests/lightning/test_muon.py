"""Muon inside, as the example chooses it: two optimizers that schedulers and checkpoints take for one."""

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from benchmarks.models import EXAMPLES, GPT, next_byte_loss

from muon import MuonAndAdamW, muon_and_adamw  # isort: skip  (on the path since benchmarks.models)
from pretrain_text import ByteGPT  # isort: skip

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9, which has Muon")


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


@needs_muon
def test_it_steps_as_two_optimizers_with_the_rates_of_one_scheduler() -> None:
    model, twin = gpt(), gpt()
    both = muon_and_adamw(model, lr=0.01, weight_decay=0.3)
    named = dict(twin.named_parameters())
    matrices = {name: p for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2}
    assert len(matrices) == 8
    embeddings = [p for name, p in named.items() if name not in matrices and p.dim() == 2]
    vectors = [p for p in named.values() if p.dim() == 1]
    groups = [{"params": embeddings, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    muon = torch.optim.Muon(list(matrices.values()), lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    apart = [muon, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (both, *apart)]
    for steps in (range(3), range(3, 6)):
        assert all(map(torch.equal, trained(model, [both], steps), trained(twin, apart, steps)))
        for scheduler in schedulers:
            scheduler.step()
    assert {group["lr"] for group in both.param_groups} == {0.0025}


@needs_muon
def test_it_goes_on_where_it_was_saved_or_copied() -> None:
    model = gpt()
    optimizer = muon_and_adamw(model, lr=0.01)
    trained(model, [optimizer], range(3))
    copied = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = gpt(seed=1)
    other.load_state_dict(model.state_dict())
    again = muon_and_adamw(other, lr=1.0)
    again.load_state_dict(torch.load(file, weights_only=True))
    expected = trained(model, [optimizer], range(3, 6))
    for one, its in (copied, (other, again)):
        assert all(map(torch.equal, trained(one, [its], range(3, 6)), expected))


@needs_muon
def test_the_configuration_of_the_example_chooses_it() -> None:
    chosen = {}
    for name in ("base", "muon"):
        chosen |= yaml.safe_load((EXAMPLES / "configs" / f"{name}.yaml").read_text())["model"]
    module = ByteGPT(**chosen)
    module.trainer = SimpleNamespace(estimated_stepping_batches=100)  # type: ignore[assignment]
    optimizer = module.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, MuonAndAdamW)
    assert {group["initial_lr"] for group in optimizer.param_groups} == {chosen["lr"]}


def test_what_has_no_matrices_comes_later_or_needs_a_newer_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(torch.optim, "Muon"):
        with pytest.raises(ValueError, match="Sequential has no trainable matrix in a list called 'blocks'"):
            muon_and_adamw(nn.Sequential(nn.Linear(2, 2)), lr=0.01)
        with pytest.raises(ValueError, match="make the optimizer of all of them"):
            muon_and_adamw(gpt(), lr=0.01).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match="torch 2.9 or newer, or choose the optimizer 'adamw'"):
        ByteGPT(optimizer="muon")
    ByteGPT(optimizer="adamw")

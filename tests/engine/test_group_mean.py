"""The mean of the groups, as evaluation shows it: what it is, and that training does not notice."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdiloco import OuterOptimizer, SimulatedGroups, StreamingDiLoCo
from lightning_sdiloco.compression import ErrorFeedback, Int4, RandomK
from tests.large.models import Large, batch, made
from tests.ranks import run_ranks

SETTINGS: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:20"}


class Trained:
    """Simulated groups that train a model of 166,000 parameters with BatchNorm."""

    def __init__(self, groups: int, **choices: Any) -> None:
        self.models = [made("normed") for _ in range(groups)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        self.groups = SimulatedGroups(self.models, **{**SETTINGS, **choices})
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            x, y = batch(group, self.steps)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        self.groups.step()

    def shown(self, group: int = 0) -> dict[str, torch.Tensor]:
        """What the model of a group holds where it shows the mean."""
        mean = self.groups.group_mean()
        with self.groups.engines[group].evaluate(mean):
            return {name: values.clone() for name, values in self.models[group].state_dict().items()}


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """All values of a nested state by the path to them."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    found = {key: value for part, inner in items for key, value in flat(inner, f"{name}/{part}").items()}
    return found or {name: state}


def same(one: Any, other: Any) -> bool:
    """Whether two nested states hold the same bits, except for bytes that were sent and seconds that it took."""
    ours, theirs = flat(one), flat(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]
        for key, value in ours.items()
        if "/bytes_" not in key and not key.endswith("_s")
    )


def test_in_fp32_it_is_the_plain_mean_of_parameters_and_buffers() -> None:
    trained = Trained(3, compression="fp32")
    trained.step()
    mean, states = trained.shown(1), [model.state_dict() for model in trained.models]
    for name, values in mean.items():
        expected = torch.stack([state[name].double() for state in states]).mean(dim=0)
        if values.is_floating_point():
            torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)


def test_it_is_that_of_local_values_whatever_is_shown() -> None:
    trained = Trained(2)
    trained.step()
    expected = trained.shown()
    for engine in trained.groups.engines:
        engine.show_outer()
    outer = {name: values.clone() for name, values in trained.models[0].state_dict().items()}
    mean = trained.groups.group_mean()
    assert all(torch.equal(values, outer[name]) for name, values in trained.models[0].state_dict().items())
    for engine in trained.groups.engines:
        engine.show_local()
    with trained.groups.engines[0].evaluate(mean):
        assert all(torch.equal(values, expected[name]) for name, values in trained.models[0].state_dict().items())


@pytest.mark.parametrize("compression", ["fp4", "sparse"])
def test_it_is_what_a_fit_that_ends_there_leaves(compression: str) -> None:
    trained = Trained(2, compression=compression)
    for _ in range(3):
        trained.step()
    mean = trained.shown()
    trained.groups.finish()
    left = trained.models[1].state_dict()
    assert all(torch.equal(values, left[name]) for name, values in mean.items() if values.is_floating_point())


@pytest.mark.parametrize(
    ("groups", "choices"),
    [
        (2, {"compression": "sparse"}),
        (2, {"compression": ErrorFeedback(RandomK(8, Int4()))}),
        (3, {"compression": Int4(), "exchange": "two_shot", "outer_optimizer": OuterOptimizer(outlier_guard=3.0)}),
    ],
)
def test_taking_it_after_every_step_changes_no_bit_of_training(groups: int, choices: dict[str, Any]) -> None:
    plain, looked = Trained(groups, **choices), Trained(groups, **choices)
    for step in range(1, 10):
        torch.manual_seed(plain.steps)
        plain.step()
        random = torch.get_rng_state()
        torch.manual_seed(looked.steps)
        looked.step()
        looked.shown()
        assert torch.equal(torch.get_rng_state(), random)
        # Before any launch, in flight, and after landings.
        for one, other in zip(plain.groups.engines, looked.groups.engines, strict=True) if step % 3 == 0 else ():
            assert same(one.state_dict(), other.state_dict())
    assert looked.groups.engines[0].report()["bytes_sent"] > plain.groups.engines[0].report()["bytes_sent"]
    plain.groups.finish()
    looked.groups.finish()
    assert same(plain.models[0].state_dict(), looked.models[0].state_dict())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [1, 2])
def test_real_ranks_take_it_with_fragments_in_flight(size: int) -> None:
    def train(rank: int, world_size: int, looks: bool) -> Any:
        module, group = Large("wide", seed=rank), rank // size
        model: nn.Module = module.net
        engine = StreamingDiLoCo(model, worker_groups=2, **{**SETTINGS, "fragments": "strided:1"})
        optimizer, in_flight, means = torch.optim.SGD(model.parameters(), lr=0.01), [], []
        for step in range(1, 12):
            x, y = batch(group, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            engine.step()
            if looks:
                in_flight.append(len(engine.in_flight))
                sent = engine.report()["bytes_sent"]
                with engine.evaluate(engine.group_mean()):
                    means.append([p.detach().clone() for p in model.parameters()])
                assert engine.report()["bytes_sent"] > sent
        before = engine.state_dict()
        engine.finish()
        with pytest.raises(RuntimeError, match=r"group_mean\(\) was called after finish"):
            engine.group_mean()
        return before, in_flight, means

    looked, plain = run_ranks(train, 2 * size, True), run_ranks(train, 2 * size, False)
    assert max(looked[0][1]) > 1
    for (state, _, means), (other, _, _) in zip(looked, plain, strict=True):
        assert same(state, other)
        assert all(
            torch.equal(a, b) for one, of in zip(means, looked[0][2], strict=True) for a, b in zip(one, of, strict=True)
        )

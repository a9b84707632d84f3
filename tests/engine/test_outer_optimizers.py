"""Outer optimizers and methods that rest on them, against plain loops."""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_sdiloco import DelayedNesterov, SimulatedGroups, StreamingDiLoCo
from tests.engine.test_engine_reference import assert_same, grouped
from tests.engine.test_policies import trained
from tests.training import batch, inner_optimizer, mlp, train_step

EXAMPLES = Path(__file__).parents[2] / "examples" / "methods"


@given(
    every=st.integers(1, 4),
    spread=st.floats(0, 1),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    gradients=st.lists(st.floats(-10, 10), min_size=1, max_size=12),
)
def test_delayed_nesterov_is_its_equations(every: int, spread: float, momentum: float, gradients: list[float]) -> None:
    spread /= every
    value = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = DelayedNesterov([value], lr=0.3, momentum=momentum, every=every, spread=spread)
    theta = m = summed = 0.0
    for number, gradient in enumerate(gradients, 1):
        value.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        summed += gradient
        if number % every:
            theta -= 0.3 * (spread * momentum * m + gradient / every)
        else:
            m, summed = momentum * m + summed / every, 0.0
            theta -= 0.3 * ((1 - spread * every + spread) * momentum * m + gradient / every)
        assert value.item() == pytest.approx(theta, rel=1e-9, abs=1e-9)


CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "mixing": 0.25,
    "fragments": grouped(2),
    "compression": "fp4",
}


def test_every_step_it_is_nesterov_sgd() -> None:
    delayed = partial(DelayedNesterov, lr=0.7, momentum=0.9, every=1)
    both = [
        trained(2, 30, outer_optimizer=delayed, **CHOICES),
        trained(2, 30, outer_lr=0.7, outer_momentum=0.9, **CHOICES),
    ]
    for values, expected in zip(both[0][0], both[1][0], strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def test_delayed_nesterov_resumes_bit_for_bit() -> None:
    choices = {**CHOICES, "outer_optimizer": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=3, spread=0.1)}
    for whole, resumed in zip(trained(2, 40, **choices), trained(2, 40, 14, **choices), strict=True):
        assert all(map(torch.equal, whole, resumed))


@pytest.mark.parametrize("wrong", [{"lr": -1}, {"momentum": 1}, {"every": 0}, {"every": 2, "spread": 0.9}])
def test_arguments_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(reversed(wrong))):
        DelayedNesterov([torch.zeros(1)], **wrong)


@pytest.mark.parametrize("momentum", [0.0, 0.37])
def test_snoo_and_lookahead_are_ten_lines_of_a_plain_loop(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from snoo import SNOO  # type: ignore[import-not-found]

    model = mlp()
    engine = StreamingDiLoCo(model, worker_groups=1, **{**SNOO, "sync_every": 7, "outer_momentum": momentum})
    optimizer = inner_optimizer("adamw", model)
    plain = mlp()
    slow = [parameter.detach().clone() for parameter in plain.parameters()]
    outer = torch.optim.SGD(slow, lr=0.68, momentum=momentum, nesterov=momentum > 0)
    inner = inner_optimizer("adamw", plain)
    for step in range(1, 57):
        train_step(model, optimizer, 0, step)
        engine.step()
        train_step(plain, inner, 0, step)
        if step % 7 == 0:
            for kept, fast in zip(slow, plain.parameters(), strict=True):
                kept.grad = kept - fast.detach()
            outer.step()
            for kept, fast in zip(slow, plain.parameters(), strict=True):
                fast.data.copy_(kept)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def moved(start: list[Tensor], steps: range, group: int, lr: float) -> list[Tensor]:
    """The client of FedGLOMO in a plain loop: start minus end of local steps with its local momentum."""
    now, before, v = [w.clone() for w in start], [w.clone() for w in start], None
    for step in steps:
        x, y = batch(group, step)
        gradients = []
        for weights in (now, before):
            model = mlp()
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), weights, strict=True):
                    parameter.copy_(value)
            gradients.append(torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters())))
        v = gradients[0] if v is None else [g + k - o for g, k, o in zip(gradients[0], v, gradients[1], strict=True)]
        before = now
        now = [w - lr * own for w, own in zip(now, v, strict=True)]
    return [a - b for a, b in zip(start, now, strict=True)]


@pytest.mark.parametrize("beta", [1.0, 0.4])
def test_fedglomo_is_its_equations(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from fedglomo import train  # type: ignore[import-not-found]

    models = [mlp() for _ in range(3)]
    train(models, batch, rounds=6, steps=4, lr=0.05, beta=beta)

    w = [parameter.detach() for parameter in mlp().parameters()]
    last: list[Tensor] = []
    u: list[Tensor] = []
    for number in range(6):
        steps = range(number * 4 + 1, number * 4 + 5)
        d_now = [moved(w, steps, group, 0.05) for group in range(3)]
        d_mean = [torch.stack(parts).mean(0) for parts in zip(*d_now, strict=True)]
        if number == 0:
            u = d_mean
        else:
            d_last = [
                torch.stack(p).mean(0) for p in zip(*[moved(last, steps, g, 0.05) for g in range(3)], strict=True)
            ]
            u = [beta * d + (1 - beta) * (k + d - o) for d, k, o in zip(d_mean, u, d_last, strict=True)]
        last, w = w, [a - b for a, b in zip(w, u, strict=True)]
    names = [name for name, _ in mlp().named_parameters()]
    for model in models:
        assert_same(dict(zip(names, model.parameters(), strict=True)), dict(zip(names, w, strict=True)), 50)


@given(mx=st.floats(0, 0.999), my=st.floats(0.3, 1), gradients=st.lists(st.floats(-3, 3), min_size=1, max_size=8))
def test_gpa_is_its_equations(mx: float, my: float, gradients: list[float]) -> None:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    from gpa import GPA  # type: ignore[import-not-found]

    value = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = GPA([value], lr=0.1, mx=mx, my=my, betas=(0.9, 0.95), weight_decay=0.2)
    x = y = z = 1.0
    first = second = 0.0
    for number, gradient in enumerate(gradients, 1):
        value.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        update = (first / (1 - 0.9**number)) / ((second / (1 - 0.95**number)) ** 0.5 + 1e-8)
        z = z * (1 - 0.1 * 0.2) - 0.1 * update
        x = mx * x + (1 - mx) * z
        y = my * x + (1 - my) * z
        assert value.item() == pytest.approx(y, rel=1e-9, abs=1e-9)
    optimizer.eval()
    assert value.item() == pytest.approx(x, rel=1e-8, abs=1e-8)
    optimizer.train()
    assert value.item() == pytest.approx(y, rel=1e-8, abs=1e-8)


class Averaging(torch.optim.SGD):
    """An optimizer with a mode, as schedule-free ones have."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize(("momentum", "warns"), [(0.9, True), (0.0, False)])
def test_who_averages_inside_is_warned_of_an_outer_momentum(
    momentum: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    with caplog.at_level(logging.WARNING):
        SimulatedGroups([model], [[Averaging(model.parameters(), lr=0.1)]], outer_lr=1.0, outer_momentum=momentum)
    assert ("Averaging averages the steps" in caplog.text) is warns

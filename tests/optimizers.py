"""Inner optimizers that keep their own copy of the weights, as their authors write them."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


class ScheduleFreeSGD(Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): parameters are y in training, and x between `eval` and
    `train`.
    """

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            weight = 1 / group["k"]
            beta = group["beta"]
            lr = group["lr"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                if "z" not in self.state[y]:
                    self.state[y]["z"] = y.clone()
                z = self.state[y]["z"]
                y.lerp_(z, weight).add_(y.grad, alpha=lr * (beta * (1 - weight) - 1))
                z.sub_(y.grad, alpha=lr)
        return loss

    def eval(self) -> None:
        self._switch(False, lambda beta: 1 - 1 / beta)

    def train(self) -> None:
        self._switch(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def _switch(self, mode: bool, weight: Any) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))
                group["train_mode"] = mode


class Lookahead(Optimizer):
    """Wraps an optimizer, and goes back to the middle of the way every ``k`` steps (arXiv
    1907.08610).
    """

    def __init__(self, optimizer: Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.k = k
        self.alpha = alpha
        self.steps = 0
        self.param_groups = optimizer.param_groups
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        self.steps += 1
        if self.steps % self.k == 0:
            for p, state in self.state.items():
                state["slow"].lerp_(p, self.alpha)
                p.copy_(state["slow"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        states = [{"steps": self.steps, **state} for state in self.state.values()]
        param_groups = self.optimizer.state_dict()["param_groups"]
        return {"state": dict(enumerate(states)), "param_groups": param_groups}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for state, saved_state in zip(self.state.values(), saved["state"].values(), strict=True):
            self.steps = saved_state["steps"]
            state["slow"].copy_(saved_state["slow"])


class MasterSGD(Optimizer):
    """SGD on float32 copies of the parameters, which it rounds to their type."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["master"] = p.detach().float().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["master"].sub_(p.grad.float(), alpha=group["lr"])
                    p.copy_(self.state[p]["master"])
        return loss


class HiddenMasterSGD(SGD):
    """SGD with float32 copies in a list, where nobody finds them."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.masters = [p.detach().clone() for p in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p, master in zip(self._parameters(), self.masters, strict=True):
            if p.grad is not None:
                p.copy_(master.sub_(p.grad, alpha=self.param_groups[0]["lr"]))


def keeper(kind: str, model: torch.nn.Module, lr: float = 0.05) -> Any:
    """An optimizer by the copy that it keeps, in training mode."""
    if kind == "slow":
        return Lookahead(SGD(model.parameters(), lr=lr))
    if kind == "master":
        return MasterSGD(model.parameters(), lr=lr)
    if kind == "none":
        return SGD(model.parameters(), lr=lr)
    optimizer = ScheduleFreeSGD(model.parameters(), lr=lr)
    optimizer.train()
    return optimizer

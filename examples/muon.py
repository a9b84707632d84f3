"""Muon for the matrices of the blocks and AdamW for everything else, as one optimizer.

    optimizer = muon_and_adamw(model, lr=3e-3)

Schedulers, checkpoints and gradient scalers see an ordinary optimizer with one list of groups and
one state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from typing_extensions import override


def require_muon() -> None:
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"The optimizer 'muon' needs torch.optim.Muon, which torch {torch.__version__} does not"
            " have. Install torch 2.9 or newer, or choose the optimizer 'adamw'."
        )


def is_matrix_of_a_block(name: str, parameter: Tensor) -> bool:
    """Returns whether Muon trains a parameter: only matrices in a list called ``blocks``, not
    embeddings, norms or heads.
    """
    return parameter.dim() == 2 and "blocks" in name.split(".")


def muon_and_adamw(
    model: nn.Module,
    lr: float,
    muon_lr: float | None = None,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
) -> MuonAndAdamW:
    """Makes the optimizer for a model whose layers are in a list called ``blocks``, as in
    `gpt.GPT`.

    Muon's steps are scaled to the size of AdamW's (``adjust_lr_fn="match_rms_adamw"``), so one
    learning rate suits both, unless ``muon_lr`` sets another. Matrices and embeddings have weight
    decay; vectors do not.
    """
    require_muon()
    matrices: list[Tensor] = []
    decaying: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if is_matrix_of_a_block(name, parameter):
            matrices.append(parameter)
        elif parameter.dim() > 1:
            decaying.append(parameter)
        else:
            vectors.append(parameter)
    if not matrices:
        raise ValueError(
            f"Muon trains the matrices of the blocks, and {type(model).__name__} has no trainable"
            " matrix in a list called 'blocks'. Call the list of layers so, or train with AdamW"
            " alone."
        )
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(
        matrices,
        lr=lr if muon_lr is None else muon_lr,
        weight_decay=weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = AdamW([group for group in groups if group["params"]], lr=lr, betas=betas)
    return MuonAndAdamW(muon, adamw)


class MuonAndAdamW(Optimizer):
    """Combines two optimizers of different parameters, with the groups and state of both, Muon's
    first.
    """

    def __init__(self, muon: Optimizer, adamw: Optimizer) -> None:
        self.parts: tuple[Optimizer, ...] = ()
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.parts = (muon, adamw)
        self._share()

    def _share(self) -> None:
        """Makes both parts use the groups and the state of this optimizer, which may be new
        objects.
        """
        muon, adamw = self.parts
        first = len(muon.param_groups)
        muon.param_groups = self.param_groups[:first]
        adamw.param_groups = self.param_groups[first:]
        for part in self.parts:
            part.state = self.state

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called on copies, and by load_state_dict with new groups and a new state.
        super().__setstate__(state)
        self._share()

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.parts:
            raise ValueError(
                "Muon and AdamW divide the parameters once: make the optimizer of all of them"
                " instead."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

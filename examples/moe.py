"""Trains a small mixture of experts in two worker groups, and shows the effect of each landing on
its routers.

Between landings, the routers of the groups drift apart. For every landing of a router, this prints,
just before and just after it, how far apart both routers are, what share of their choices on the
same tokens is the same, and how evenly experts are used.
"""

from __future__ import annotations

from typing import Any

import torch
from gpt import Block
from jsonargparse import auto_cli
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from pretrain_text import ByteGPT, prepare_process
from text_data import StandardLibraryText
from torch import Tensor, nn

from lightning_sdiloco import StreamingDiLoCoStrategy

LAYERS = 2
WIDTH = 64
HEADS = 4
EXPERTS = 8
TOP_K = 2
BALANCE = 0.01


class MoEBlock(Block):
    """A block in which every token goes through the two experts with the highest router weights."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        # One perceptron for each expert instead of a single one.
        del self.mlp_in, self.mlp_out
        self.experts_in = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, WIDTH))
        self.experts_out = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self.attention(self.attention_norm(x)))
        return x + self.mixture(self.mlp_norm(x).flatten(0, 1)).view_as(x)

    def mixture(self, tokens: Tensor) -> Tensor:
        """Returns the chosen experts' output for each token; choices and load remain readable."""
        probabilities = self.router(tokens).softmax(-1)
        weights, self.chosen = probabilities.topk(TOP_K)
        # This is lowest if experts are used evenly (Switch Transformer, arXiv 2101.03961).
        self.load_loss = EXPERTS * (use_of(self.chosen) * probabilities.mean(0)).sum()
        weights = weights / weights.sum(-1, keepdim=True)
        # Experts this small are faster all at once than one after the other, each on its own
        # tokens.
        gates = torch.zeros_like(probabilities).scatter(-1, self.chosen, weights).unsqueeze(-1)
        inside = nn.functional.gelu(torch.einsum("tw,ehw->teh", tokens, self.experts_in))
        return torch.einsum("teh,ewh->tw", gates * inside, self.experts_out)


class MoEGPT(ByteGPT):
    """The byte-level GPT of ``pretrain_text.py`` with a mixture of experts in each block."""

    def __init__(self) -> None:
        super().__init__(LAYERS, WIDTH, HEADS)
        self.net.blocks = nn.ModuleList(MoEBlock() for _ in range(LAYERS))
        self.net.initialize(LAYERS)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loads: list[Any] = [block.load_loss for block in self.net.blocks]
        return loss + BALANCE * torch.stack(loads).sum()


def distance(first: Tensor, second: Tensor) -> float:
    """Returns the distance between two routers, divided by the mean of their norms."""
    return float(2 * (first - second).norm() / (first.norm() + second.norm()))


def overlap(first: Tensor, second: Tensor) -> float:
    """Returns the share of common choices, given choices of shape ``(tokens, top_k)``; random
    choices would give 1/4.
    """
    is_shared = (first.unsqueeze(-1) == second.unsqueeze(-2)).any(-1)
    return float(is_shared.float().mean())


def use_of(chosen: Tensor) -> Tensor:
    return torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()


class RouterWatch(Callback):
    """Watches the routers at their landings, on the same tokens in both groups, which have one rank
    each.

    Groups exchange their observations only when training ends, so that they do not wait for each
    other before. Then `seen` contains, by inner step and layer, the distance, overlap and use just
    before the landing and just after it.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self.moments: list[tuple[int, int]] = []
        self.routers: list[Tensor] = []
        self.choices: list[Tensor] = []
        self.seen: dict[tuple[int, int], list[tuple[float, float, Tensor]]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        # The last moment before a landing: the inner step has been taken but is not counted yet.
        trainer.optimizers[0].register_step_post_hook(
            lambda *_: self.look(trainer, pl_module, trainer.global_step + 1)
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.look(trainer, pl_module, trainer.global_step)

    @torch.no_grad()
    def look(self, trainer: Any, module: Any, step: int) -> None:
        """Records the weights and choices of the routers that land after an inner step."""
        fragments = trainer.strategy.fragments
        landing = trainer.strategy.schedule.landings(step)
        names = {name for fragment in landing for name in fragments[fragment].names}
        for layer, block in enumerate(module.net.blocks):
            if f"net.blocks.{layer}.router.weight" in names:
                module.net(self.tokens)
                self.moments.append((step, layer))
                self.routers.append(block.router.weight.clone())
                self.choices.append(block.chosen)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not self.moments:
            return
        routers = pl_module.all_gather(torch.stack(self.routers)).unbind(1)
        choices = pl_module.all_gather(torch.stack(self.choices)).unbind(1)
        for moment, weights, chosen in zip(self.moments, routers, choices, strict=True):
            look = (distance(*weights), overlap(*chosen), use_of(chosen))
            self.seen.setdefault(moment, []).append(look)


def experts_in_use(use: Tensor) -> float:
    """Returns the perplexity of the use of experts."""
    return float(torch.special.entr(use).sum().exp())


@rank_zero_only
def tell(watch: RouterWatch) -> None:
    """Prints a line for each landing of a router. "Experts in use" is the perplexity of their
    use.
    """
    print("inner step, layer    distance          overlap           experts in use  use moved")
    for (step, layer), (before, after) in watch.seen.items():
        apart_before, alike_before, use_before = before
        apart_after, alike_after, use_after = after
        apart = f"{apart_before:.3f} -> {apart_after:.3f}"
        alike = f"{alike_before:.3f} -> {alike_after:.3f}"
        used = f"{experts_in_use(use_before):.2f} -> {experts_in_use(use_after):.2f}"
        moved = float((use_before - use_after).abs().sum() / 2)
        print(f"{step:>10} {layer:>6}    {apart:<17} {alike:<17} {used:<15} {moved:.1%}")


def train(steps: int, seed: int = 0, **settings: Any) -> RouterWatch:
    seed_everything(seed, verbose=False)
    data = StandardLibraryText(batch_size=4)
    data.prepare_data()
    data.setup("fit")
    watch = RouterWatch(torch.stack([data.validation[number][0] for number in range(0, 512, 64)]))
    strategy = StreamingDiLoCoStrategy(worker_groups=2, **{"sync_every": 20, **settings})
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "limit_val_batches": 0}
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, callbacks=[watch], **quiet
    )
    trainer.fit(MoEGPT(), data)
    return watch


def main(steps: int = 400, seed: int = 0) -> None:
    prepare_process()
    tell(train(steps, seed))


if __name__ == "__main__":
    auto_cli(main)

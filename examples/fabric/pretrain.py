"""Pretrains a byte-level GPT with Fabric on several worker groups; a run continued with
``--resume`` is bit-identical.

python examples/fabric/pretrain.py --devices 2
torchrun --nproc-per-node 4 examples/fabric/pretrain.py --devices 4 --groups 2
"""

import argparse
import sys
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1]))
from gpt import BYTE_VALUES, GPT
from text_data import StandardLibraryText

from lightning_sdiloco import StreamingDiLoCoFabricStrategy


def loss_of(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the loss in nats per byte."""
    return F.cross_entropy(model(tokens).view(-1, BYTE_VALUES), targets.flatten())


@torch.no_grad()
def validate(fabric: Any, model: Any, loader: Any) -> float:
    """Returns the loss of the outer model, which is the same in all groups."""
    with fabric.strategy.evaluate():
        losses = torch.stack([loss_of(model.eval(), *batch) for batch in loader])
    model.train()
    return float(fabric.all_reduce(losses.mean()))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {
        "devices": 2,
        "groups": 2,
        "steps": 200,
        "save_every": 50,
        "accumulate": 1,
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--checkpoint", default="runs/fabric.ckpt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    strategy = StreamingDiLoCoFabricStrategy(
        args.groups, sync_every=20, overlap_steps=4, fragments="strided:1"
    )
    fabric = L.Fabric(accelerator="cpu", devices=args.devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    data = StandardLibraryText(validation_windows=64)
    with fabric.rank_zero_first():
        data.prepare_data()
    data.setup("fit")
    loaders: Any = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader())

    model = fabric.setup(GPT(layers=4, width=128, heads=4, context=data.context))
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.resume:
        fabric.load(args.checkpoint, state)  # each rank also reads its own file

    batches = islice(chain.from_iterable(repeat(loaders[0])), state["step"] * args.accumulate, None)
    while state["step"] < args.steps:
        state["step"] += 1
        for part in range(args.accumulate):
            with fabric.no_backward_sync(model, enabled=part < args.accumulate - 1):
                fabric.backward(loss_of(model, *next(batches)) / args.accumulate)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()  # an inner step, which launches and lands fragments that are due
        optimizer.zero_grad()
        if state["step"] % args.save_every == 0:
            fabric.print(
                f"step {state['step']}: validation loss {validate(fabric, model, loaders[1]):.4f}"
            )
            fabric.save(args.checkpoint, state)
    strategy.finish()  # the model now contains the outer parameters
    loss = validate(fabric, model, loaders[1])
    sent = strategy.report()["bytes_sent"]
    fabric.print(f"finished: validation loss {loss:.4f}, {sent / 1e6:.2f} MB sent by each rank")


if __name__ == "__main__":
    main()

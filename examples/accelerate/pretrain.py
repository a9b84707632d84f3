"""Pretrains a byte-level GPT with accelerate on several worker groups of one or more ranks;
``--resume`` continues a run.

torchrun --nproc-per-node 4 examples/accelerate/pretrain.py --groups 2
"""

import argparse
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))
from gpt import BYTE_VALUES, GPT
from text_data import StandardLibraryText

from lightning_sdiloco import StreamingDiLoCo, WorkerGroups

parser = argparse.ArgumentParser()
for name, default in {"--groups": 2, "--steps": 100, "--folder": "runs/accelerate"}.items():
    parser.add_argument(name, type=type(default), default=default)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
by_seed = DataLoaderConfiguration(
    use_seedable_sampler=True
)  # a resumed run sees the same order of the data
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=by_seed)
groups = WorkerGroups(args.groups)  # before the model, which is wrapped with its process group
data = StandardLibraryText()
with accelerator.main_process_first():
    data.prepare_data()
data.setup("fit")
# It is prepared for evaluation, so that accelerate does not wrap it over the ranks of all groups.
model: Any = accelerator.prepare_model(
    GPT(layers=4, width=128, heads=4, context=data.context), evaluation_mode=True
)
if groups.group_size > 1:
    model = DistributedDataParallel(model, process_group=groups.process_group)
optimizer, loader = accelerator.prepare(
    torch.optim.AdamW(model.parameters(), lr=1e-3), data.train_dataloader()
)
engine = StreamingDiLoCo(
    model, sync_every=20, overlap_steps=4, worker_groups=groups, inner_optimizers=[optimizer]
)
file = f"{args.folder}/engine.ckpt"
# accelerate asks every rank for its state but writes only rank 0's, so each rank saves its own
# file.
accelerator.register_for_checkpointing(
    SimpleNamespace(
        state_dict=lambda: {"saved": engine.save(file)}, load_state_dict=lambda _: engine.load(file)
    )
)
if args.resume:
    accelerator.load_state(args.folder)
for tokens, targets in islice(loader, 2 * engine.inner_steps, 2 * args.steps):
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(tokens).view(-1, BYTE_VALUES), targets.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:  # the optimizer has stepped, which is an inner step
        engine.step()
accelerator.save_state(args.folder)
engine.finish()  # the model now contains the outer parameters
accelerator.print(
    f"loss {accelerator.reduce(loss.detach(), 'mean'):.6f}, {engine.report()['bytes_sent']} bytes"
    " sent"
)

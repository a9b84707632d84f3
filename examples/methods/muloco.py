"""MuLoCo (arXiv 2505.23725): Muon inside worker groups, for the matrices of the blocks.

    python examples/methods/muloco.py

With a Trainer, return `muon_and_adamw(self, lr)` from `configure_optimizers`; `examples/configs`
has a YAML file.
"""

from side_by_side import adamw, compare  # isort: skip  (puts the other examples on the path)
from muon import muon_and_adamw

if __name__ == "__main__":
    for name, optimizer in {"AdamW inside": adamw, "Muon inside": muon_and_adamw}.items():
        compare({name: {}}, optimizer=optimizer, sync_every=20, overlap_steps=2)

"""A code for each sender, chosen by its own link (FusionLLM, arXiv 2410.12707): a slow uplink does
not delay others.

    python examples/methods/fusionllm.py

With a Trainer, use `StreamingDiLoCoStrategy(compression=ByLink(menu=("fp4", "int2", "sparse")))`,
which measures the links. In YAML:

    compression:
      class_path: lightning_sdiloco.compression.ByLink
      init_args: {menu: [fp4, int2, sparse], within: overlap}

Here, the planner simulates groups in virtual time that train 300 million parameters at two seconds
per inner step. The link of one group carries 0.01 Gbit/s up and 0.1 Gbit/s down.
"""

from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import ByLink
from lightning_sdiloco.planning.link import Line, Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups, Model

STEPS = 10_000

if __name__ == "__main__":
    fast = Line(Link(1.0), Link(1.0))
    slow = Line(up=Link(0.01), down=Link(0.1))
    print(f"{'':<28} {'seconds a step':>15} {'MB a launch: fast':>18} {'slow':>6}")
    for name, compression, lines in (
        ("fp4, without the slow one", "fp4", [fast] * 3),
        ("fp4", "fp4", [fast] * 3 + [slow]),
        ("ByLink", ByLink(("fp4", "int2", "sparse")), [fast] * 3 + [slow]),
    ):
        groups = Groups(step_time=2.0, groups=len(lines))
        method = Streaming(
            Model.of_size(300_000_000, layers=12),
            Settings(compression=compression, exchange="gather"),
            groups,
        )
        times = play(method, Link(1.0), STEPS, [1.0] * len(lines), links=lines)
        sent = [
            method.message_bytes(0, line.up.gbit_s * 1e9 / 8 / groups.others) * groups.others / 1e6
            for line in (fast, slow)
        ]
        print(f"{name:<28} {times[0].steps[-1] / STEPS:>15.2f} {sent[0]:>18.1f} {sent[1]:>6.1f}")

"""Four groups, one of them on a link with half the bandwidth: the part that each averages, and how
long the links are busy.

    python examples/methods/uneven_parts.py

With a Trainer, use `StreamingDiLoCoStrategy(exchange=TwoShot())`, which measures the links.
"""

from side_by_side import compare

from lightning_sdiloco import TwoShot
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups, Model

LINKS = [1.0, 1.0, 1.0, 0.5]


def seconds(exchange: str | TwoShot) -> float:
    """Returns how long 1000 inner steps of 0.1 s take with 10 billion parameters, in virtual
    time.
    """
    settings = Settings(sync_every=50, overlap_steps=20, exchange=exchange)
    method = Streaming(Model.of_size(10**10, layers=24), settings, Groups(step_time=0.1, groups=4))
    links = [Link(gbit_s, round_trip=0.05) for gbit_s in LINKS]
    return play(method, links[0], 1000, [1.0] * 4, links=links)[0].end


if __name__ == "__main__":
    uneven = TwoShot("by_bandwidth", links=LINKS)
    print("share that each group averages:", uneven.shares(4))
    for exchange in ("two_shot", uneven):
        print(f"{seconds(exchange):7,.0f} s with exchange={exchange!r}")
    compare(
        {f"{one!r:.32}": {"exchange": one} for one in ("two_shot", uneven)},
        groups=4,
        steps=120,
        sync_every=20,
    )

"""How much longer than usual honest outer gradients are.

    python -m benchmarks.guard [--quick] [--json FILE]

Two and four groups train a small GPT from the first round on, each on files of its own, with two
lengths of a round and two learning rates. What the guard would say with any factor follows from how
much longer than usual each contribution is.
"""

from collections import defaultdict
from typing import Any

from benchmarks import report
from benchmarks.models import TINY
from benchmarks.training import Loop, Training
from lightning_sdiloco import Landing
from lightning_sdiloco.algorithm.weighting import GUARD, REMEMBERED, usual

CASES = [
    (groups, sync_every, lr)
    for groups in (2, 4)
    for sync_every, lr in ((10, 3e-3), (10, 1e-2), (30, 3e-3), (30, 1e-2))
]


def landings(groups: int, sync_every: int, lr: float, budget: float) -> list[Landing]:
    """Trains, and returns all landings of the first group."""
    choices = {
        "sync_every": sync_every,
        "overlap_steps": 2,
        "fragments": "strided:1",
        "compression": "fp4",
    }
    training = Training(TINY, choices, groups=groups, budget=budget, lr=lr, split="by_file")
    loop = Loop(training, training.text())
    streaming: Any = loop._streaming
    step = streaming.step
    landed: list[Landing] = []
    streaming.step = lambda **how: landed.extend(step(**how)[0])
    loop.run()
    return landed


def lengths(landed: list[Landing]) -> list[float]:
    """Returns how many times as long as usual each contribution was, where that is known."""
    past = defaultdict[int, dict[int, list[float]]](lambda: defaultdict(list))
    longer = []
    for landing in landed:
        past_norms = past[landing.fragment]
        norms = dict(enumerate(landing.group_norms))
        for group, norm in norms.items():
            usual_norm = usual(group, norms, past_norms)
            if usual_norm:
                longer.append(norm / usual_norm)
        for group, norm in norms.items():
            past_norms[group] = [*past_norms[group], norm][-REMEMBERED:]
    return longer


def main(arguments: list[str] | None = None) -> None:
    options = report.options(__doc__, arguments)
    budget = 0.5 if options.quick else 24.0
    rows = []
    longest = 0.0
    contributions = 0
    for groups, sync_every, lr in CASES[:1] if options.quick else CASES:
        landed = landings(groups, sync_every, lr, budget)
        count = groups * len(landed)
        most = max(lengths(landed))
        longest = max(longest, most)
        contributions += count
        row = [str(groups), str(sync_every), f"{lr:g}", str(count), f"{most:.2f}"]
        rows.append(row)
        report.said(" ".join(row))
    columns = ["groups", "sync_every", "learning rate", "contributions", "longest, times usual"]
    caption = f"The guard leaves out what is {GUARD:g} times as long as usual."
    report.show("Honest contributions", columns, rows, caption)
    headline = {"contributions": contributions, "longest, times usual": longest}
    report.write(options.json, headline, report.measured("guard", options.quick))


if __name__ == "__main__":
    main()

"""Claims that can be tested without training, with the rules of the package in virtual time."""

from dataclasses import replace

from benchmarks import backup_workers, drop_compute
from benchmarks.backup_workers import FOR_EVER, Play
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression import ByLink
from lightning_sdiloco.engine.drop_compute import best_drop
from lightning_sdiloco.planning.link import Line, Link
from lightning_sdiloco.planning.methods import Streaming, play
from lightning_sdiloco.planning.workload import Groups, Model

Numbers = dict[str, float]


def dropping(ranks: int, sigma: float, seed: int, steps: int = 500) -> Numbers:
    """Chooses a budget from 50 inner steps, as ranks do, and computes its gain in other steps."""
    case = drop_compute.Case(ranks, micro_batches=12, sigma=sigma)
    seen = drop_compute.times(case, 50, seed)
    budget = best_drop(seen.tolist(), overhead=0.0, most_dropped=0.1).budget
    table = drop_compute.times(case, steps, seed + 10_000).numpy()
    trained = table.cumsum(-1) - table <= budget
    trained[..., 0] = trained[..., -1] = True
    longest, shorter = (times.sum(-1).max(0).mean() for times in (table, table * trained))
    return {
        "gain": float(trained.mean() * longest / shorter - 1),
        "dropped": float(1 - trained.mean()),
        "waits": float(1 - table.sum(-1).mean() / longest),
    }


def backups(sites: int, quorum: bool, seed: int, rounds: int | None = None) -> Numbers:
    """Simulates sites that stall for 60 s in 2 % of their rounds of 30 s, with a quorum of half of
    them.
    """
    case = backup_workers.Case(
        sites=sites, rounds=rounds or min(400, 3200 // sites), seed=seed, grace=FOR_EVER
    )
    if quorum:
        case = replace(case, quorum=max(1, sites // 2), grace=2.0)
    outcome = Play(case).run().found()
    together = {} if quorum else {"launched_together": backup_workers.wait_for_all(case)["goodput"]}
    return {"goodput": outcome["goodput"], "counted": outcome["counted"], **together}


def slow_uplink(ratio: float, steps: int = 2000) -> Numbers:
    """Simulates four groups that train 300 million parameters, one of which sends at less than 1
    Gbit/s.
    """
    lines = [Line(Link(1.0), Link(1.0))] * 3 + [Line(up=Link(1.0 / ratio), down=Link(1.0))]
    model = Model.of_size(300_000_000, layers=12)
    groups = Groups(step_time=2.0, groups=4)

    def step(compression: str | ByLink) -> float:
        method = Streaming(model, Settings(compression=compression, exchange="gather"), groups)
        return play(method, Link(1.0), steps, [1.0] * 4, links=lines)[0].steps[-1] / steps

    fixed = step("fp4")
    chosen = step(ByLink(("fp4", "int2", "sparse")))
    return {"speed_up": fixed / chosen, "step_fp4": fixed, "step_by_link": chosen}

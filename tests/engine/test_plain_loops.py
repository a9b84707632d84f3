"""Loops that somebody else wrote around the engine: what they forget is said, and what they add
goes on working.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo, WorkerGroups
from tests.fits import refusal, said_by
from tests.ranks import agreed, run_processes, run_ranks
from tests.training import inner_optimizer, mlp, train_step

SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 1, "fragments": "strided:1"}


def test_processes_of_a_launcher_that_nobody_connected_are_refused() -> None:
    def run(rank: int, world_size: int) -> list[str]:
        told = [refusal(StreamingDiLoCo, mlp()), refusal(WorkerGroups, 2)]
        # Groups in one process need no other, and a single process may have a launcher.
        SimulatedGroups([mlp(), mlp()], **SHORT)
        os.environ["WORLD_SIZE"] = "1"
        StreamingDiLoCo(mlp(), **SHORT).close()
        return told

    for told in run_processes(run, 2):
        for text in told:
            assert text.startswith("WORLD_SIZE=2 says that a launcher started 2 processes")
            assert "Call torch.distributed.init_process_group()" in text


def test_collectives_over_all_ranks_in_every_step_are_said_once() -> None:
    def run(rank: int, world_size: int, every: int, group: bool, groups: int) -> list[str]:
        said = said_by("lightning_sdiloco")
        model = mlp()
        optimizer = inner_optimizer("sgd", model)
        places = WorkerGroups(groups)
        engine = StreamingDiLoCo(model, worker_groups=places, inner_optimizers=[optimizer], **SHORT)
        for step in range(12):
            train_step(model, optimizer, rank, step)
            if step % every == 0:
                dist.all_reduce(torch.ones(1), group=places.process_group if group else None)
            engine.step()
            if step % 4 == 0:
                with engine.evaluate(None if engine.has_landed else engine.group_mean()):
                    dist.all_reduce(torch.ones(1))
        engine.finish()
        return [text for text in said if "in a row" in text]

    # How often, whether in the group, how many groups, and how often it is said.
    for every, group, groups, times in (
        (1, False, 2, 1),
        (1, True, 2, 0),
        (3, False, 2, 0),
        (1, False, 1, 0),
    ):
        said, others = run_ranks(run, 2, every, group, groups)
        assert (len(said), others) == (times, []), (every, group, groups)
        assert all(
            "in 3 inner steps in a row" in text and "WorkerGroups(...).process_group" in text
            for text in said
        )


def test_an_average_over_time_outside_of_the_model_follows_the_outer_one() -> None:
    """As the docs advise it for an EMA that no module holds; one of local values differs between
    groups.
    """

    def run(rank: int, world_size: int) -> None:
        model = mlp()
        optimizer = inner_optimizer("sgd", model)
        engine = StreamingDiLoCo(model, inner_optimizers=[optimizer], **SHORT)
        of_local, of_outer = (
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for _ in range(2)
        )
        updates = 0
        for step in range(20):
            train_step(model, optimizer, rank, step)
            of_local.update_parameters(model)
            if engine.step():
                updates += 1
                with engine.evaluate():
                    of_outer.update_parameters(model)
        engine.finish()
        of_outer.update_parameters(model)
        assert updates > 2
        assert agreed(dict(of_outer.named_parameters()))
        assert not agreed(dict(of_local.named_parameters()))

    run_ranks(run, 2)

"""Loops that a user wrote around the engine: it reports what they forget, and works with what they
add.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo, WorkerGroups
from tests.fits import refusal, said_by
from tests.ranks import agreed, run_processes, run_ranks
from tests.training import inner_optimizer, mlp, train_step

SHORT = {"sync_every": 4, "overlap_steps": 1, "fragments": "strided:1"}


def refusals_without_a_process_group(rank: int, world_size: int) -> list[str]:
    messages = [refusal(StreamingDiLoCo, mlp()), refusal(WorkerGroups, 2)]
    # Groups in one process need no other, and a single process may have a launcher.
    SimulatedGroups([mlp(), mlp()], **SHORT)
    os.environ["WORLD_SIZE"] = "1"
    StreamingDiLoCo(mlp(), **SHORT).close()
    return messages


def test_processes_of_a_launcher_that_nobody_connected_are_refused() -> None:
    for messages in run_processes(refusals_without_a_process_group, 2):
        for message in messages:
            assert message.startswith("A launcher started 2 processes (WORLD_SIZE=2)")
            assert "Call torch.distributed.init_process_group()" in message


def warnings_of_collectives(
    rank: int, world_size: int, interval: int, in_group: bool, groups: int
) -> list[str]:
    """Trains with a collective in every so many steps, and with one in evaluations."""
    log = said_by("lightning_sdiloco")
    model = mlp()
    optimizer = inner_optimizer("sgd", model)
    joined = WorkerGroups(groups)
    engine = StreamingDiLoCo(model, worker_groups=joined, inner_optimizers=[optimizer], **SHORT)
    for step in range(12):
        train_step(model, optimizer, rank, step)
        if step % interval == 0:
            dist.all_reduce(torch.ones(1), group=joined.process_group if in_group else None)
        engine.step()
        if step % 4 == 0:
            with engine.evaluate(None if engine.has_landed else engine.group_mean()):
                dist.all_reduce(torch.ones(1))
    engine.finish()
    return [text for text in log if "in a row" in text]


def assert_warned(times: int, interval: int = 1, in_group: bool = False, groups: int = 2) -> None:
    """Two ranks report collectives so many times; only rank 0 does."""
    warnings, warnings_of_rank_1 = run_ranks(warnings_of_collectives, 2, interval, in_group, groups)
    assert len(warnings) == times
    assert warnings_of_rank_1 == []
    for warning in warnings:
        assert "in 3 inner steps in a row" in warning
        assert "WorkerGroups(...).process_group" in warning


def test_collectives_over_all_ranks_in_every_step_are_said_once() -> None:
    assert_warned(1)
    assert_warned(0, in_group=True)
    assert_warned(0, interval=3)
    assert_warned(0, groups=1)


def test_an_average_over_time_outside_of_the_model_follows_the_outer_one() -> None:
    """The docs advise this for an EMA that no module holds; an average of local values differs
    between groups.
    """

    def run(rank: int, world_size: int) -> None:
        model = mlp()
        optimizer = inner_optimizer("sgd", model)
        engine = StreamingDiLoCo(model, inner_optimizers=[optimizer], **SHORT)
        averaged = partial(AveragedModel, model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        of_local = averaged()
        of_outer = averaged()
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

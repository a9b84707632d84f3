"""Training loops of the peers: plain torch, and what each peer asks for. One function for each,
called in every rank.

All train the same network with the same inner optimizer on the same batches; the virtual
accelerator sleeps after backward, so DDP hides its gradients behind it, and what comes after is on
top.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.case import Case
from benchmarks.models import next_byte_loss
from benchmarks.stamps import Stamps

TIMEOUT = timedelta(minutes=10)


class Rank(NamedTuple):
    """The training of a rank: a network, its batches and steps, and the stamps of their times."""

    case: Case
    net: nn.Module
    batches: Iterator[tuple[Tensor, Tensor]]
    stamps: Stamps
    steps: int

    def inner(self) -> torch.optim.Optimizer:
        return self.case.inner(self.net.parameters())


Loop = Callable[[Rank], dict[str, Any]]


def alone(rank: Rank) -> dict[str, Any]:
    """Nothing between the ranks: what the others are to be compared with."""
    train(rank, rank.net, rank.inner())
    return {}


def train(
    rank: Rank,
    model: nn.Module,
    optimizer: Any,
    after: Callable[[], object] = lambda: None,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> None:
    """The loop itself; one more step begins than is counted, so that the last one has an end."""
    for _ in range(rank.steps + 1):
        rank.stamps.begin()
        optimizer.zero_grad()
        backward(next_byte_loss(model, *next(rank.batches)))
        rank.stamps.pad()
        optimizer.step()
        after()


def ddp(hook: str | None = None, rank: int = 2) -> Loop:
    """DistributedDataParallel, with a communication hook of torch; PowerSGD's matrices have this
    rank.
    """

    def loop(training: Rank) -> dict[str, Any]:
        _init_process_group()
        # With several buckets two ranks abort in PowerSGD: "3328 vs 3072 ... collective mismatch".
        bucket = 1000 if hook == "powersgd" else 25
        model = DistributedDataParallel(training.net, init_sync=False, bucket_cap_mb=bucket)
        if hook in ("fp16", "bf16"):
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            model.register_comm_hook(
                dist.group.WORLD, getattr(default_hooks, f"{hook}_compress_hook")
            )
        elif hook == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            # From a tenth of the steps on, as its documentation suggests; two is the least that it
            # takes.
            state = powerSGD_hook.PowerSGDState(
                dist.group.WORLD,
                matrix_approximation_rank=rank,
                start_powerSGD_iter=max(2, beginning(training)),
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(training, model, training.inner())
        return {}

    return loop


def beginning(rank: Rank) -> int:
    """The steps with plain DDP with which PowerSGD and post-local SGD begin: a tenth."""
    return rank.steps // 10


def ddp_accumulated(rank: Rank) -> dict[str, Any]:
    """DDP that exchanges as rarely as groups do: an update for every ``sync_every`` batches."""
    _init_process_group()
    model = DistributedDataParallel(rank.net, init_sync=False)
    batches = rank.case.sync_every
    # The schedule of the learning rate is one of updates.
    updates = rank.steps // batches
    optimizer = rank.case.inner(rank.net.parameters(), updates)
    for step in range(rank.steps + 1):
        rank.stamps.begin()
        is_last = step % batches == batches - 1
        with nullcontext() if is_last else model.no_sync():
            (next_byte_loss(model, *next(rank.batches)) / batches).backward()
        if is_last:
            rank.stamps.pad()
            optimizer.step()
            optimizer.zero_grad()
    return {}


def post_local_sgd(rank: Rank) -> dict[str, Any]:
    """torch's PostLocalSGDOptimizer with its hook: every rank is a node, no warm-up."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    period = rank.case.sync_every
    _init_process_group()
    averager = PeriodicModelAverager(period=period, warmup_steps=period)
    return _post_local(rank, averager, 0)


def post_local_sgd_after_ddp(rank: Rank) -> dict[str, Any]:
    """The same, after a beginning with DDP."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    _init_process_group()
    begin = beginning(rank)
    averager = PeriodicModelAverager(period=rank.case.sync_every, warmup_steps=begin)
    return _post_local(rank, averager, begin)


def hierarchical_averager(rank: Rank) -> dict[str, Any]:
    """The same with torch's HierarchicalModelAverager: pairs of ranks average twice as often."""
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
        HierarchicalModelAverager,
    )

    _init_process_group()
    begin = beginning(rank)
    period = rank.case.sync_every
    sizes = OrderedDict([(period // 2, 2), (period, dist.get_world_size())])
    averager = HierarchicalModelAverager(period_group_size_dict=sizes, warmup_steps=begin)
    return _post_local(rank, averager, begin)


def _init_process_group() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)


def _post_local(rank: Rank, averager: Any, begin: int) -> dict[str, Any]:
    """Averages gradients of all ranks for so many steps, and models from then on."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.optim import PostLocalSGDOptimizer

    alone_groups = [dist.new_group([number]) for number in range(dist.get_world_size())]
    state = PostLocalSGDState(None, alone_groups[dist.get_rank()], start_localSGD_iter=begin)
    model = DistributedDataParallel(rank.net, init_sync=False)
    model.register_comm_hook(state, post_localSGD_hook)
    train(rank, model, PostLocalSGDOptimizer(rank.inner(), averager))
    return {}


def accelerate_local_sgd(rank: Rank) -> dict[str, Any]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    _without_the_first_broadcast()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(rank.net, rank.inner())
    period = rank.case.sync_every
    with LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=period, enabled=True
    ) as local_sgd:
        train(rank, model, optimizer, after=local_sgd.step, backward=accelerator.backward)
    return {}


def _without_the_first_broadcast() -> None:
    """All ranks start alike; accelerate has no option to leave out the broadcast, which takes long
    on a slow link.
    """
    original = DistributedDataParallel.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "init_sync": False})

    DistributedDataParallel.__init__ = without  # type: ignore[method-assign]


def torchft_diloco(rank: Rank) -> dict[str, Any]:
    """Streaming DiLoCo of torchft with the same fragments, H, tau and mixing. Uncompressed: on a
    CPU it cannot.
    """
    from torchft._torchft import LighthouseServer
    from torchft.local_sgd import DiLoCo

    case = rank.case
    door = int(os.environ["MASTER_PORT"]) + 1
    lighthouse = None
    if os.environ["RANK"] == "0":
        world = int(os.environ["WORLD_SIZE"])
        lighthouse = LighthouseServer(
            bind=f"0.0.0.0:{door}", min_replicas=world, join_timeout_ms=10_000
        )
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    inner = rank.inner()
    fragments = [nn.ModuleList(modules) for modules in case.modules(rank.net)]
    outers = [
        torch.optim.SGD(part.parameters(), lr=case.outer_lr, momentum=0.9, nesterov=True)
        for part in fragments
    ]
    manager = _torchft_manager(door, store.port)
    choices = {
        "sync_every": case.sync_every,
        "fragment_sync_delay": case.overlap_steps,
        "fragment_update_alpha": case.mixing,
        "use_bucketization": True,
    }
    with DiLoCo(manager, fragments, inner, outers, **choices):
        train(rank, rank.net, inner)
    numbers = {"outer_steps": manager.current_step(), "participants": manager.num_participants()}
    time.sleep(1)  # the others may still be in their last step
    manager.shutdown(wait=False)
    if lighthouse is not None:
        time.sleep(2)
        lighthouse.shutdown()
    return numbers


def _torchft_manager(door: int, store_port: int) -> Any:
    """torchft's manager of a group of one rank, which meets the others at the door of rank 0."""
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    address = os.environ["OWN_ADDR"]
    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=int(os.environ["WORLD_SIZE"]),
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store_port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{door}",
        replica_id=f"group{os.environ['RANK']}_",
        hostname=address,
    )


LOOPS: dict[str, Loop] = {
    "alone": alone,
    "ddp": ddp(),
    "ddp_fp16": ddp("fp16"),
    "ddp_bf16": ddp("bf16"),
    "ddp_powersgd": ddp("powersgd"),
    "ddp_powersgd_rank_4": ddp("powersgd", rank=4),
    "ddp_accumulated": ddp_accumulated,
    "post_local_sgd": post_local_sgd,
    "post_local_sgd_after_ddp": post_local_sgd_after_ddp,
    "hierarchical_averager": hierarchical_averager,
    "accelerate": accelerate_local_sgd,
    "torchft": torchft_diloco,
}

"""How this process was launched: which rank it is, of how many, and where rank 0 is met."""

import logging
import os
import re
from datetime import timedelta
from typing import Any, NamedTuple

from lightning_sdiloco.comm.topology import is_connected, meeting_store
from lightning_sdiloco.launch.rendezvous import Rendezvous, wait_until_reachable

_log = logging.getLogger(__name__)


def warn_of_shared_store(rank: int) -> None:
    """Says on rank 0 what torchrun needs to restart processes.

    torchrun lends its own store to the processes that it starts. Those that it restarts find in it where the ones
    before them listened, and fail (https://github.com/pytorch/pytorch/issues/135712).

    Args:
        rank: This rank.
    """
    lent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and lent and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        _log.warning(
            "torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, on every node."
            " Without it processes that are restarted try to reach those before them, and fail."
        )


def meet(environment: Any, world_size: int, timeout: timedelta) -> Rendezvous | None:
    """Meets the other ranks, as the default process group will; None if there is one already.

    The meeting must be kept until the default process group has been made, which shares its store.

    Args:
        environment: A cluster environment of Lightning, which knows its ranks.
        world_size: How many ranks are expected.
        timeout: How long to wait for them.

    Raises:
        ValueError: If rank 0 cannot be reached.
    """
    if is_connected():
        return None
    host, port = environment.main_address, environment.main_port
    return meet_at(host, port, environment.global_rank(), world_size, timeout)


def meet_at(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Rendezvous:
    """Meets the other ranks at an address.

    Args:
        host: Name or address of the machine of rank 0.
        port: The port on which rank 0 keeps the store.
        rank: This rank.
        world_size: How many ranks are expected.
        timeout: How long to wait for them.

    Raises:
        ValueError: If rank 0 cannot be reached.
    """
    # torchrun keeps a store of its own, in place of rank 0.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        wait_until_reachable(host, port, rank, timeout)
    store = meeting_store(host, port, serves, timeout)
    return Rendezvous(store, rank, world_size, f"{host}:{port}", timeout)


class Launch(NamedTuple):
    """What a launcher told a process.

    Attributes:
        rank: The rank of this process.
        world_size: How many there are.
        nodes: On how many machines.
        host: Name or address of the machine of rank 0.
        port: The port on which rank 0 is met.
    """

    rank: int
    world_size: int
    nodes: int
    host: str
    port: int


def how_launched(num_nodes: int | None = None) -> Launch:
    """What torchrun, srun, or variables that were set by hand say.

    Args:
        num_nodes: Where one process was started by hand on every node: how many there are.

    Raises:
        ValueError: If nothing tells this process its rank.
    """
    if num_nodes is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", _nodes_of_ranks()))
        return Launch(_number("RANK"), _number("WORLD_SIZE"), nodes, _host(), _number("MASTER_PORT"))
    if num_nodes is None and "SLURM_PROCID" in os.environ and "SLURM_NTASKS" in os.environ:
        host = os.environ.get("MASTER_ADDR") or _first_node(os.environ["SLURM_NODELIST"])
        # As Lightning chooses it.
        port = os.environ.get("MASTER_PORT") or 15000 + int(os.environ["SLURM_JOB_ID"][-4:])
        return Launch(_number("SLURM_PROCID"), _number("SLURM_NTASKS"), _number("SLURM_NNODES"), host, int(port))
    if num_nodes is not None:
        return Launch(_number("NODE_RANK"), num_nodes, num_nodes, _host(), _number("MASTER_PORT"))
    raise ValueError(
        "This process does not know its rank. Start it on every node as the training: with srun, with torchrun, or by"
        " hand with NODE_RANK, MASTER_ADDR and MASTER_PORT set and --num-nodes N."
    )


def _host() -> str:
    if "MASTER_ADDR" not in os.environ:
        raise ValueError("MASTER_ADDR is not set. Set it to an address of rank 0's machine on every node.")
    return os.environ["MASTER_ADDR"]


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ValueError(f"{name}={value!r} is no number. Set it on every node, as for the training.")
    return int(value)


def _nodes_of_ranks() -> int:
    """Where ranks were started by hand, one by one."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return max(int(os.environ["WORLD_SIZE"]) // per_node, 1)


def _first_node(nodes: str) -> str:
    """The first name of a list such as ``a[3-5,7],b``."""
    name, bracket, numbers = nodes.partition(",")[0].partition("[")
    return name + re.split("[-,\\]]", numbers)[0] if bracket else name

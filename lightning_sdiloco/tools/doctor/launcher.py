"""Asks the launcher of this process, through the cluster environments of Lightning, for its rank and for rank 0."""

import os
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """What a launcher told a process."""

    rank: int
    world_size: int
    nodes: int
    host: str
    port: int


def detect_launch(num_nodes: int | None = None) -> Launch:
    """Detects torchrun, srun, or variables that were set by hand, as Lightning does for the training."""
    environments = _environments()
    if num_nodes is not None:
        by_hand = environments.LightningEnvironment()
        _require_numbers("NODE_RANK", "MASTER_PORT")
        return Launch(by_hand.node_rank(), num_nodes, num_nodes, _main_address(by_hand), by_hand.main_port)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _require_numbers("RANK", "WORLD_SIZE", "MASTER_PORT")
        return _launch(environments.TorchElasticEnvironment(), _nodes_of_torchrun())
    if "SLURM_NTASKS" in os.environ and environments.SLURMEnvironment.detect():
        try:
            return _launch(environments.SLURMEnvironment(), int(os.environ["SLURM_NNODES"]))
        except RuntimeError as error:
            raise ValueError(f"Lightning would refuse this job: {error}") from error
    raise ValueError(
        "This process does not know its rank. Start it on every node as the training: with srun, with torchrun, or by"
        " hand with NODE_RANK, MASTER_ADDR and MASTER_PORT set and --num-nodes N."
    )


def _environments() -> Any:
    # Of whichever distribution is installed.
    try:
        from lightning.fabric.plugins import environments
    except ModuleNotFoundError:
        from lightning_fabric.plugins import environments  # type: ignore[no-redef]
    return environments


def _launch(environment: Any, nodes: int) -> Launch:
    rank, world_size = environment.global_rank(), environment.world_size()
    return Launch(rank, world_size, nodes, _main_address(environment), environment.main_port)


def _main_address(environment: Any) -> str:
    # Lightning would take the loopback address, where no other machine finds rank 0.
    if "MASTER_ADDR" not in os.environ and "SLURM_NODELIST" not in os.environ:
        raise ValueError("MASTER_ADDR is not set. Set it to an address of rank 0's machine on every node.")
    return str(environment.main_address)


def _require_numbers(*names: str) -> None:
    for name in names:
        value = os.environ.get(name, "")
        if not value.isdigit():
            raise ValueError(f"{name}={value!r} is no number. Set it on every node, as for the training.")


def _nodes_of_torchrun() -> int:
    """Returns the number of nodes; GROUP_WORLD_SIZE is missing where ranks were started by hand one by one."""
    world_size = int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return int(os.environ.get("GROUP_WORLD_SIZE", max(world_size // per_node, 1)))

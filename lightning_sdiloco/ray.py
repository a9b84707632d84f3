"""The strategy for Ray Train, whose ``prepare_trainer`` accepts only subclasses of Ray's
strategies. This module requires ``ray[train]``.
"""

from typing import Any

import ray.train
from ray.train.lightning import RayDDPStrategy

from lightning_sdiloco.lightning_pytorch import StreamingDiLoCoStrategy


class RayStreamingDiLoCoStrategy(StreamingDiLoCoStrategy, RayDDPStrategy):
    """Trains one model on the workers of Ray Train, in worker groups.

    The arguments are those of ``StreamingDiLoCoStrategy``. With ``worker_groups="auto"``, which is
    the default, the workers on each node form a group. On a single node, each worker is a group.
    Pass ``devices="auto"`` and a ``RayLightningEnvironment`` to the Trainer, as in Ray's guide. Do
    not set ``num_nodes``, because Ray determines the nodes.

    Raises:
        ValueError: If ``worker_groups="auto"`` and nodes have different numbers of workers.

    Example:
        In the function that a ``ray.train.torch.TorchTrainer`` runs in each worker::

            trainer = Trainer(
                strategy=RayStreamingDiLoCoStrategy(worker_groups=2, sync_every=20),
                devices="auto",
                plugins=[RayLightningEnvironment()],
                callbacks=[RayTrainReportCallback()],
            )
            prepare_trainer(trainer).fit(model)
    """

    strategy_name = "streaming_diloco"
    root_device = RayDDPStrategy.root_device

    @property
    def num_nodes(self) -> int:
        if self._options.worker_groups != "auto":
            return 1  # groups consist of consecutive workers, wherever they run
        context = ray.train.get_context()
        workers = context.get_world_size()
        local_workers = context.get_local_world_size()
        first_rank = context.get_world_rank() - context.get_local_rank()
        is_equal = first_rank == context.get_node_rank() * local_workers
        if workers % local_workers or not is_equal:
            raise ValueError(
                "worker_groups='auto' makes each node a worker group, but Ray has placed"
                f" {local_workers} of {workers} workers on node {context.get_node_rank()}, and a"
                " different number on other nodes. Set worker_groups to a number, or place the same"
                " number of workers on every node with ScalingConfig(placement_strategy=...)."
            )
        return int(workers // local_workers)

    @num_nodes.setter
    def num_nodes(self, num_nodes: Any) -> None:
        """Ignores Lightning's value: Ray determines the nodes."""

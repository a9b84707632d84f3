"""Streaming DiLoCo as arithmetic: when fragments launch and land, what is in them, and how they are averaged.

In come settings, sizes and tensors; out come schedules, partitions, payloads and means. What ranks must agree on is
decided here. This room sends nothing, owns no state of a training, and knows neither models nor Lightning.
"""

from lightning_sdiloco.algorithm.aggregation import Absences, Aggregation, Count, plain, remembered, trained
from lightning_sdiloco.algorithm.control import CONTROL_BYTES, HOST_BYTES, Control
from lightning_sdiloco.algorithm.digest import combined, digest
from lightning_sdiloco.algorithm.dropping import Drop, best_drop
from lightning_sdiloco.algorithm.partition import Fragment, Parameter, Partition, partition
from lightning_sdiloco.algorithm.recommended import AUTO, SPARSE_GAINS, OuterStep, recommended
from lightning_sdiloco.algorithm.reduction import (
    AllReduce,
    SecondHop,
    all_reduce_for,
    final_all_reduce_for,
    kind_of_all_reduce,
)
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.algorithm.settings import DEFAULT_TIMEOUT, OuterLRSchedule, OuterOptimizer, Settings

__all__ = [
    "AUTO",
    "Absences",
    "Aggregation",
    "AllReduce",
    "CONTROL_BYTES",
    "Control",
    "Count",
    "DEFAULT_TIMEOUT",
    "Drop",
    "Fragment",
    "HOST_BYTES",
    "OuterLRSchedule",
    "OuterOptimizer",
    "OuterStep",
    "Parameter",
    "Partition",
    "SPARSE_GAINS",
    "Schedule",
    "SecondHop",
    "Settings",
    "all_reduce_for",
    "best_drop",
    "combined",
    "digest",
    "final_all_reduce_for",
    "kind_of_all_reduce",
    "partition",
    "plain",
    "recommended",
    "remembered",
    "trained",
]

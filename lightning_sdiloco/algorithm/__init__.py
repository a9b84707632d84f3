"""Streaming DiLoCo as arithmetic: when fragments launch and land, what is in them, and how they are averaged.

In come settings, sizes and tensors; out come schedules, partitions, payloads and means. What ranks must agree on is
decided here. This room sends nothing, owns no state of a training, and knows neither models nor Lightning.
"""

from lightning_sdiloco.algorithm.aggregation import Absences, Aggregation, Count, Weighing, plain, remembered, trained
from lightning_sdiloco.algorithm.control import CONTROL_BYTES, HOST_BYTES, Control
from lightning_sdiloco.algorithm.digest import combined, digest
from lightning_sdiloco.algorithm.dropping import Drop, best_drop
from lightning_sdiloco.algorithm.gossip import Brought, Taken, bring, take
from lightning_sdiloco.algorithm.partition import Fragment, Parameter, Partition, partition
from lightning_sdiloco.algorithm.parts import TwoShot, least_seconds
from lightning_sdiloco.algorithm.policies.landing import Carry, LandingRule, Mix, mix
from lightning_sdiloco.algorithm.policies.pace import Every, Heard, Pace, Selective
from lightning_sdiloco.algorithm.policies.route import Everyone, FastestPairs, Leg, RandomPairs, Ring, Route, check_legs
from lightning_sdiloco.algorithm.ranges import fault_of, is_real, is_whole
from lightning_sdiloco.algorithm.recommended import AUTO, OVERLAP_STEPS, SPARSE_GAINS, OuterStep, recommended
from lightning_sdiloco.algorithm.reduction import (
    AllReduce,
    SecondHop,
    all_reduce_for,
    kind_of_all_reduce,
)
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.algorithm.settings import DEFAULT_TIMEOUT, OuterLRSchedule, OuterOptimizer, Settings

__all__ = [
    "AUTO",
    "Absences",
    "Aggregation",
    "AllReduce",
    "Brought",
    "CONTROL_BYTES",
    "Carry",
    "Control",
    "Count",
    "DEFAULT_TIMEOUT",
    "Drop",
    "Every",
    "Everyone",
    "FastestPairs",
    "Fragment",
    "HOST_BYTES",
    "Heard",
    "LandingRule",
    "Leg",
    "Mix",
    "OVERLAP_STEPS",
    "OuterLRSchedule",
    "OuterOptimizer",
    "OuterStep",
    "Pace",
    "Parameter",
    "Partition",
    "RandomPairs",
    "Ring",
    "Route",
    "SPARSE_GAINS",
    "Schedule",
    "SecondHop",
    "TwoShot",
    "Selective",
    "Settings",
    "Taken",
    "Weighing",
    "all_reduce_for",
    "best_drop",
    "bring",
    "check_legs",
    "combined",
    "digest",
    "fault_of",
    "is_real",
    "is_whole",
    "kind_of_all_reduce",
    "least_seconds",
    "mix",
    "partition",
    "plain",
    "recommended",
    "remembered",
    "take",
    "trained",
]

"""Predicts what a link between worker groups allows, and recommends settings that suit it.

In come plain numbers: the parameters of a model, step time and size of the groups, bandwidth, round trip and loss of
the link, and `Settings`. Out go bytes, memory, compute utilisation, the time of a run in which groups are slow or
absent, and settings. Partition, schedule and wire bytes are those of `algorithm` and `compression`, so that a plan
cannot contradict a run; only time is a model. Nothing here makes a module, opens a connection or knows the engine.
"""

from lightning_sdiloco.planning import paper, planner
from lightning_sdiloco.planning.hub import (
    Enough,
    HubLoad,
    hub_link,
    largest_payload,
    through_hub,
)
from lightning_sdiloco.planning.link import Line, Link, require
from lightning_sdiloco.planning.links import SharedOut, shared_out
from lightning_sdiloco.planning.methods import Absence, DataParallel, Memory, Method, Streaming, Times, play, step_end
from lightning_sdiloco.planning.paper import TARGETS, Entry, PaperModel
from lightning_sdiloco.planning.planner import (
    LARGEST_SYNC_EVERY,
    MARGIN,
    TARGET,
    Plan,
    Prediction,
    candidates,
    recommend,
)
from lightning_sdiloco.planning.units import STUDENT_T, half_width, readable, readable_rate, short
from lightning_sdiloco.planning.workload import Groups, Model

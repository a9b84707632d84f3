"""The engine: launches and lands the fragments of a model in any PyTorch training loop.

In comes a model, which an inner optimizer trains, and one call after every inner step; out goes the outer model. Start
reading at `rounds`, which is Algorithm 2, then `flight`, `fragments` and `engine`. `shards` knows how a
model holds its parameters, ``outer/`` is the outer optimizer. Nothing here knows Lightning or the environment, and
other ranks are reached only through what a `Topology` holds.
"""

from lightning_sdiloco.engine import checkpoint as files
from lightning_sdiloco.engine.checkpoint import (
    Restart,
    Saved,
    own_state,
    random_state,
    read_own,
    restart_from,
    set_random_state,
    take_up_state,
    write_common_file,
    write_own,
    write_ranks,
)
from lightning_sdiloco.engine.drop_compute import DropCompute, DroppingLoader, best_drop
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.flight import (
    Background,
    Flight,
    InlineBackground,
    Pending,
    StepClock,
    Work,
    completed,
    mean_of_buffers,
    norm_squared,
    outer_step,
    reported,
    span_from,
    whole_norm,
)
from lightning_sdiloco.engine.fragments import Arrival, FragmentState, Landing, Launch, Purpose, Span
from lightning_sdiloco.engine.outer import OuterState, outer_optimizer_for
from lightning_sdiloco.engine.outer_view import GroupMean
from lightning_sdiloco.engine.rounds import Rounds
from lightning_sdiloco.engine.shards import (
    FragmentLayout,
    OuterParameter,
    ShardedLayout,
    clean_name,
    is_sharded,
    like,
    local,
    part_of,
    ranks_of,
    reshard,
    to_parameters,
    trainable,
    unwrapped,
)
from lightning_sdiloco.engine.simulation import SimulatedGroups
from lightning_sdiloco.engine.start import (
    WorkerGroups,
    align_model,
    cut,
    is_aligned,
    require_same_model,
    require_same_settings,
)

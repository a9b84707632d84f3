"""What torchrun leaves in the environment of the processes that it starts, and what it needs to restart them.

torchrun keeps the store at which ranks meet in its own agent, not in rank 0, and lends it to its processes. Restarted
processes find in it the addresses on which those before them listened, and fail
(https://github.com/pytorch/pytorch/issues/135712).
"""

import logging
import os

_log = logging.getLogger(__name__)


def agent_keeps_store() -> bool:
    """Returns whether torchrun's agent, not rank 0, keeps the store of the rendezvous."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def warn_of_shared_store(rank: int) -> None:
    """Warns, on rank 0, if torchrun is to restart processes and yet lends them its store."""
    if rank == 0 and agent_keeps_store() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        _log.warning(
            "torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, on every node."
            " Without it, restarted processes try to reach those before them, and fail."
        )

"""How this process was launched: which rank it is, of how many, and where rank 0 is met."""

import os
from datetime import timedelta
from typing import Any

from lightning_sdiloco.meeting import Meeting, wait_until_reachable
from lightning_sdiloco.topology import is_connected, meeting_store


def meet(environment: Any, world_size: int, timeout: timedelta) -> Meeting | None:
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


def meet_at(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Meeting:
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
    # After a restart by torchrun the same store may be there again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = meeting_store(host, port, serves, timeout)
    return Meeting(store, rank, world_size, f"{host}:{port}", timeout, prefix=f"sdiloco/{attempt}")

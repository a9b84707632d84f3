"""The door to the network: which ranks form worker groups, and how tensors travel within and between them.

In come a layout of ranks and, later, tensors; out come communicators among the ranks of a group and exchanges between
groups. Only this room makes process groups and issues collectives. It knows bytes: neither what a payload means, nor
fragments, nor the environment in which it was launched.
"""

from lightning_sdiloco.comm.communicator import Communicator, page_locked, to_device, to_host
from lightning_sdiloco.comm.exchange import DeviceBackend, Exchange, Unanswered, VaryingExchange, nccl_on
from lightning_sdiloco.comm.topology import (
    STAGES,
    GroupLayout,
    Topology,
    checked_worker_groups,
    is_connected,
    mesh_of,
    ranks_in,
    store,
    world,
)

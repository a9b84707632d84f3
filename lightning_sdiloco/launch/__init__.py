"""What happens before there are process groups, and when they fail: rendezvous, interfaces, reachability, failures.

In come the environment of the process and the address of rank 0; out come a rendezvous, the addresses on which ranks
listen, and errors that name the ranks and connections at fault. This room, beside the tools, is the only one that reads
the environment. It issues no collectives and knows neither the algorithm nor Lightning.
"""

from lightning_sdiloco.launch.failures import Failures
from lightning_sdiloco.launch.interfaces import exchange_address, for_exchange, group_address, has_exchange_interface
from lightning_sdiloco.launch.reachability import (
    BrokenConnection,
    Endpoints,
    Listener,
    advice,
    find_broken_connections,
    require_reachable,
)
from lightning_sdiloco.launch.rendezvous import (
    Rendezvous,
    reason,
    rendezvous_at,
    try_to_connect,
    warn_of_shared_store,
)

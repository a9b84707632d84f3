"""The hosts of a launch, each of which is a site and a separate world.

[Note: a world of each host] If a launcher starts processes on several hosts, it connects all of
them, and the run ends when one host fails. A site is a separate world. Before any process group is
created, `make_world` sets the environment variables so that process groups connect only the
processes of this host. This works for processes that SLURM or a script starts. With torchrun, start
one torchrun per host, because a torchrun that spans several hosts restarts all processes when one
process fails.
"""

import ipaddress
import json
import os
import re
import socket
from typing import NamedTuple

# The variable passes the launch on to the processes that a script starts. Their other variables
# describe their host's world.
_LAUNCH = "SDILOCO_LAUNCH"

_LOOPBACK = "127.0.0.1"

# Lightning derives the port of a SLURM job in the same way.
_FIRST_PORT_OF_JOBS = 15_000


class Launch(NamedTuple):
    """The launch of a host, as far as the launcher describes it.

    Attributes:
        host: The name of this host.
        launcher: ``"SLURM"``, ``"torchrun"`` or ``"script"``.
        number: The index of this host among all hosts, counted from 0.
        hosts: The number of hosts.
        address: The address of the first host.
        port: A free port on the first host.
        processes: The number of processes on this host.
    """

    host: str
    launcher: str
    number: int | None = None
    hosts: int | None = None
    address: str | None = None
    port: int | None = None
    processes: int | None = None


def launch_of_host() -> Launch:
    """Reads the launch of this host from the environment."""
    passed_on = os.environ.get(_LAUNCH)
    if passed_on is not None:
        return Launch(*json.loads(passed_on))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _refuse_common_torchrun()
        # The address and port from torchrun are for the rendezvous of this host's processes.
        processes = int(os.environ["LOCAL_WORLD_SIZE"])
        if "SLURM_JOB_NODELIST" in os.environ:
            return _launch_of_slurm()._replace(launcher="torchrun", processes=processes)
        return Launch(_host_name(), "torchrun", processes=processes)
    if "SLURM_PROCID" in os.environ and "SLURM_JOB_NODELIST" in os.environ:
        launch = _launch_of_slurm()
        address, port = _given_address()
        return launch._replace(address=address or launch.address, port=port or launch.port)
    address, port = _given_address()
    number = os.environ.get("NODE_RANK")
    return Launch(
        _host_name(),
        "script",
        number=None if number is None else int(number),
        address=address,
        port=port,
    )


def _refuse_common_torchrun() -> None:
    agents = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if agents > 1:
        raise ValueError(
            f"A single torchrun started processes on {agents} hosts. When a process fails, torchrun"
            " restarts the processes on all hosts, so no site could continue alone. Start one"
            " torchrun per host (--nnodes=1), and pass the hub's address and the number of hosts to"
            " each: Federation(run=..., hub='node0:29400', sites=2). Alternatively, use srun"
            " --no-kill --kill-on-bad-exit=0."
        )


def _host_name() -> str:
    return socket.gethostname().partition(".")[0]


def _given_address() -> tuple[str | None, int | None]:
    """Returns the address and port that the user has set for the first host, if any."""
    port = os.environ.get("MASTER_PORT")
    return os.environ.get("MASTER_ADDR"), None if port is None else int(port)


def _launch_of_slurm() -> Launch:
    """Returns the launch of a host in a SLURM job, including jobs with one step per host."""
    nodes = expanded(os.environ["SLURM_JOB_NODELIST"])
    step_nodes = expanded(os.environ.get("SLURM_STEP_NODELIST", ""))
    if len(step_nodes) > 1:
        nodes = step_nodes
    host = os.environ.get("SLURMD_NODENAME", _host_name())
    counts = _tasks_per_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Launch(
        host,
        "SLURM",
        number=nodes.index(host) if host in nodes else None,
        hosts=len(nodes),
        address=nodes[0],
        port=_FIRST_PORT_OF_JOBS + int(os.environ["SLURM_JOB_ID"][-4:]),
        processes=counts[int(os.environ.get("SLURM_NODEID", "0"))],
    )


def expanded(hostlist: str) -> list[str]:
    """Expands a host list in SLURM notation.

    Examples:
        >>> expanded("login,gpu[08-10,12]")
        ['login', 'gpu08', 'gpu09', 'gpu10', 'gpu12']
    """
    names = list[str]()
    for pattern in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", hostlist):
        names += _expanded_pattern(pattern)
    return names


def _expanded_pattern(pattern: str) -> list[str]:
    head, _, tail = pattern.partition("[")
    spans, bracket, ending = tail.partition("]")
    if not bracket:
        return [pattern]
    names = list[str]()
    for span in spans.split(","):
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            digits = str(number).zfill(len(first))
            names += [f"{head}{digits}{name}" for name in _expanded_pattern(ending)]
    return names


def _tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks on each node from SLURM notation such as ``"2(x3),1"``."""
    counts = list[int]()
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or "1")
    return counts


def make_world(launch: Launch, processes: int) -> None:
    """Makes this host's processes a separate world; see [Note: a world of each host].

    Args:
        launch: The launch of this host.
        processes: The number of processes that train on this host.
    """
    if launch.processes not in (None, processes):
        raise ValueError(
            f"{launch.launcher} started {launch.processes} processes on {launch.host}, but the"
            f" Trainer has devices={processes}. In a federation, each host is a site, and all of"
            f" its processes train. Set devices={launch.processes}."
        )
    is_made = launch.launcher == "torchrun" or _LAUNCH in os.environ
    os.environ[_LAUNCH] = json.dumps(launch)
    if is_made:
        return
    os.environ["MASTER_ADDR"] = _LOOPBACK
    os.environ["NODE_RANK"] = "0"
    if launch.port is not None:
        # Several hosts on one machine, as in a test, need different ports.
        os.environ["MASTER_PORT"] = str(launch.port + 1 + (launch.number or 0))
    if launch.launcher == "SLURM":
        os.environ["LOCAL_RANK"] = os.environ["RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["WORLD_SIZE"] = str(processes)


def is_private(host: str) -> bool:
    """Returns whether all addresses of a host belong to private networks."""
    addresses = [address[0] for *_, address in socket.getaddrinfo(host, 0)]
    return not any(ipaddress.ip_address(address).is_global for address in addresses)


def is_of_this_host(address: str) -> bool:
    """Returns whether an address belongs to this machine.

    Raises:
        ValueError: If this machine cannot resolve the address.
    """
    try:
        addresses = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"{address!r}, the hub's address, cannot be resolved on {_host_name()}:"
            f" {error.strerror or error}. For the first host, set an address that all hosts can"
            " resolve (MASTER_ADDR, or hub='ADDRESS:PORT')."
        ) from error
    for family, kind, _, _, socket_address in addresses:
        try:
            with socket.socket(family, kind) as listener:
                listener.bind(socket_address)
                return True
        except OSError:
            continue
    return False

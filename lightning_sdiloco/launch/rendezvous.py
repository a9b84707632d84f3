"""The rendezvous of ranks before process groups exist, with a store for exchanging small values.

[Note: torchrun's store] torchrun hosts the rendezvous store in its agent instead of in rank 0, and
shares the store with its processes. Restarted processes find the addresses of the previous
processes in this store, and fail (https://github.com/pytorch/pytorch/issues/135712).

[Note: two ranks 0] Rank 0 hosts the store on its machine, and all ranks connect to a given address.
If two nodes were started as node 0, there are two stores. A rank 0 whose store is not at the given
address would wait forever for ranks that have connected to the other store. Therefore, rank 0
writes a token to its store and reads the token back from the given address.
"""

import errno
import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.utils.store import DistStoreError, synchronize

_log = logging.getLogger(__name__)

SECONDS_UNREACHABLE = 30.0
"""The time limit in seconds for an address that does not respond. A machine that refuses
connections does exist, and its program may still start."""

_SECONDS_BETWEEN_WARNINGS = 60.0

_SECONDS_TO_FIRST_WARNING = 10.0

_SECONDS_PER_ATTEMPT = 5.0

# [Note: is it a store] torch's own client waits for an answer forever, regardless of its timeout.
# So this package first sends the client's greeting: a number that identifies the protocol, and a
# PING, whose four bytes a store sends back; see torch/csrc/distributed/c10d/TCPStoreBackend.hpp.
# These four bytes also end an HTTP request, so a web server answers at once.
_PING = b"\r\n\r\n"
_GREETING = struct.pack("=BIB", 0, 0x3C85F7CE, 13) + _PING

# A query for the key under which a store counts the ranks of torch's own process group, and the
# answer if the key exists. Ranks of this package are not counted there, and torch's clients cannot
# read the key.
_WORKERS = b"init/"
_HAS_WORKERS = struct.pack("=BQQ", 5, 1, len(_WORKERS)) + _WORKERS
_YES = b"\0"

_SHOWN_BYTES = 48

_SHOWN_RANKS = 8

_AGENT_KEEPS_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun sets it

_CHOOSE = "Choose a different MASTER_PORT, and set it on all ranks."

_OTHER_RANK = "If this is not the first node, set a different NODE_RANK."

# Keys in the store: the token of the process that hosts it, and a message from another rank 0.
_KEEPER = "sdiloco/keeper"
_SECOND = "sdiloco/second"

_OTHER_SCRIPT = (
    " A process at this address is waiting for torch's own process group, as with strategy='ddp'."
    " Run the same script with the same strategy on all ranks."
)


def say_node_rank(node_rank: int) -> str:
    """Returns advice on the settings that are needed to start every node manually."""
    return (
        f" This node was started as node {node_rank}. On every node, set NODE_RANK to the node's"
        " number, counting from 0, and set MASTER_ADDR and MASTER_PORT to the address and port of"
        " node 0."
    )


class Rendezvous:
    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        address: str,
        timeout: timedelta,
        advice: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.address = address
        self._store = store
        self._timeout = timeout
        # Text at the end of rank 0's messages while it waits for ranks that have never connected.
        self._advice = advice

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Returns the values of all ranks in rank order. All ranks must call this method."""
        prefix = f"sdiloco/{name}/"
        sent = json.dumps(value).encode()
        received = self._gathered(name, prefix, sent)
        self._advice = ""
        return [json.loads(value) for value in received]

    def _gathered(self, name: str, prefix: str, sent: bytes) -> list[bytes]:
        keys = [f"{prefix}{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + self._timeout.total_seconds()
        patience = _SECONDS_TO_FIRST_WARNING
        while True:
            left = deadline - time.monotonic()
            seconds = min(max(left, 0.0), patience)
            patience = _SECONDS_BETWEEN_WARNINGS
            with suppress(DistStoreError):
                return list(
                    synchronize(self._store, sent, self.rank, self.world_size, prefix, seconds)
                )
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if not absent:  # a rank connected and left without having read
                return list(self._store.multi_get(keys))
            missing = _named(absent)
            if left <= seconds:
                raise ValueError(
                    f"{missing} did not connect to {self.address} within"
                    f" {self._timeout.total_seconds():g} s ({name}). {self.world_size} ranks are"
                    " expected. Start that many ranks, all with the same address and port. If a"
                    " rank stopped, see its output for the"
                    f" reason.{self._strangers()}{self._advice}"
                )
            if self.rank == 0:
                _log.warning(
                    "Still waiting for %s at %s. A rank that cannot reach this address logs an"
                    " error.%s%s",
                    missing,
                    self.address,
                    self._strangers(),
                    self._advice,
                )

    def _strangers(self) -> str:
        """Returns a message about unexpected processes, such as a second rank 0 or a process that
        waits for torch's own process group.
        """
        message = ""
        if self._store.check([_SECOND]):
            message += self._store.get(_SECOND).decode()
        host, _, port = self.address.rpartition(":")
        answer = _greet(host, int(port), _SECONDS_PER_ATTEMPT, _HAS_WORKERS, len(_YES))
        if answer == _PING + _YES:
            message += _OTHER_SCRIPT
        return message


def _named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    if len(ranks) > _SHOWN_RANKS:
        names += ", ..."
    if len(ranks) > 1:
        return f"Ranks {names}"
    return f"Rank {names}"


def rendezvous_at(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta, advice: str = ""
) -> Rendezvous:
    """Connects to the other ranks at the address of the future default process group.

    Args:
        host: The machine on which rank 0 hosts the store.
        port: The port of the store.
        rank: The rank of this process.
        world_size: The number of ranks.
        timeout: The time limit for all ranks to connect.
        advice: Text at the end of each warning while a rank waits, which explains the ranks and
            addresses.
    """
    address = f"{host}:{port}"
    if rank != 0 or os.environ.get(_AGENT_KEEPS_STORE) == "True":
        wait_for_store(host, port, rank, timeout, advice=advice)
        # The store does not wait for workers. The default process group, which is made at the same
        # address, shares it.
        store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return Rendezvous(store, rank, world_size, address, timeout, advice)
    store = _keep_store(host, port, timeout)
    # Rank 0 also tries: if it cannot reach its own store soon, the other ranks cannot either.
    soon = min(timeout, timedelta(seconds=SECONDS_UNREACHABLE))
    wait_for_store(host, port, rank, soon, advice=advice)
    at_address = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    _require_same_store(store, at_address, address)
    return Rendezvous(store, rank, world_size, address, timeout, advice)


def _keep_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Starts the store in this process, which is rank 0."""
    # The given address may belong to another machine, and torch would wait for a response there.
    loopback = "127.0.0.1"
    try:
        return TCPStore(
            loopback,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        answer = _greet(loopback, port, _SECONDS_PER_ATTEMPT)
        if isinstance(answer, OSError):
            why = f"{error}. {_CHOOSE}"
        elif answer == _PING:
            why = (
                f"{host}:{port} is used by another training run, whose torch TCPStore responds"
                f" there. {_CHOOSE} {_OTHER_RANK}"
            )
        else:
            why = _no_store(host, port, answer)
        machine = socket.gethostname()
        raise ValueError(f"Rank 0 on {machine} cannot host the rendezvous store: {why}") from error


def _require_same_store(store: Store, at_address: Store, address: str) -> None:
    """Raises an error if the address belongs to another rank 0; see [Note: two ranks 0]."""
    token = secrets.token_hex(8)
    machine = socket.gethostname()
    store.set(_KEEPER, token)
    # A store does not acknowledge `set`, so the other connection might be faster.
    store.get(_KEEPER)
    if at_address.check([_KEEPER]) and at_address.get(_KEEPER).decode() == token:
        store.delete_key(_SECOND)
        return
    at_address.set(
        _SECOND,
        f" A process on {machine} also started as rank 0 and has stopped, because two nodes have"
        " the same NODE_RANK.",
    )
    raise ValueError(
        f"Two processes started as rank 0: this process on {machine}, and the process that hosts"
        f" the store at {address}. Only one node may have NODE_RANK=0, which is the default. Set"
        " NODE_RANK to this node's number, and MASTER_ADDR to an address of node 0. If the other"
        f" process belongs to another training run: {_CHOOSE}"
    )


def wait_for_store(
    host: str,
    port: int,
    rank: int,
    timeout: timedelta,
    patience: float = SECONDS_UNREACHABLE,
    advice: str = "",
) -> None:
    """Waits until the store of rank 0 responds at an address.

    Args:
        host: The machine on which rank 0 hosts the store.
        port: The port of the store.
        rank: The rank of this process.
        timeout: The time limit while connections to the address are refused.
        patience: The time limit in seconds while the address does not respond at all.
        advice: Text at the end of each warning.

    Raises:
        ValueError: If no store responds within these time limits, or if another program responds.
    """
    failure = f"Rank {rank} on {socket.gethostname()} cannot reach rank 0 at {host}:{port}"
    other_rank = ""
    if rank == 0:
        other_rank = f" {_OTHER_RANK}"
    started = time.monotonic()
    unanswered_since = started
    warns_at = started + _SECONDS_TO_FIRST_WARNING
    while True:
        answer = _greet(host, port, patience)
        if answer == _PING:
            return
        now = time.monotonic()
        if isinstance(answer, ConnectionRefusedError):
            unanswered_since = now
            if now - started > timeout.total_seconds():
                raise ValueError(
                    f"{failure}: no process started listening there within"
                    f" {timeout.total_seconds():g} s. Start rank 0 on {host}, and set MASTER_ADDR"
                    f" and MASTER_PORT to its address and port on all ranks.{other_rank}"
                ) from answer
        is_late = now - unanswered_since > patience
        if isinstance(answer, bytes) and (answer or is_late):
            raise ValueError(f"{failure}: {_no_store(host, port, answer)}")
        if isinstance(answer, OSError) and is_late:
            raise ValueError(
                f"{failure}: {reason(answer)}. The network path from this machine to {host} is"
                " blocked, or the address is wrong. Set MASTER_ADDR to an address of rank 0 that"
                f" all other machines can reach, and open the TCP port.{other_rank}"
            ) from answer
        if now > warns_at:
            warns_at = now + _SECONDS_BETWEEN_WARNINGS
            why = "no answer"
            if isinstance(answer, OSError):
                why = reason(answer)
            _log.warning("%s yet: %s. Still trying.%s", failure, why, advice)
        time.sleep(0.2)


def _greet(
    host: str, port: int, seconds: float, question: bytes = b"", nbytes: int = 0
) -> bytes | OSError:
    """Sends a greeting and an optional query to an address, and returns the response. The result is
    empty if there is no response, and an error if the connection fails.
    """
    answer = bytearray()

    def talk(connection: socket.socket) -> None:
        connection.settimeout(seconds)
        # The program may also close the connection.
        with suppress(OSError):
            connection.sendall(_GREETING + question)
            while len(answer) < len(_PING) + nbytes:
                part = connection.recv(_SHOWN_BYTES)
                if not part:
                    break
                answer.extend(part)

    return try_to_connect(host, port, min(seconds, _SECONDS_PER_ATTEMPT), talk) or bytes(answer)


def _no_store(host: str, port: int, answer: bytes) -> str:
    shown = "it sent no data"
    if answer:
        first_line = answer.splitlines()[0].decode(errors="replace")
        shown = f"it sent {first_line!r}"
    return (
        f"{host}:{port} responds, but is not a torch TCPStore ({shown}). Another program is"
        f" listening there. {_CHOOSE}"
    )


def try_to_connect(
    host: str,
    port: int,
    seconds: float = _SECONDS_PER_ATTEMPT,
    talk: Callable[[socket.socket], None] | None = None,
) -> OSError | None:
    """Connects to an address and returns the error, if any."""
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            if talk is not None:
                talk(connection)
    except OSError as error:
        return error
    return None


def reason(error: OSError) -> str:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer"
    if isinstance(error, socket.gaierror):
        return f"the name is unknown ({error.strerror})"
    return (error.strerror or str(error) or type(error).__name__).lower()


def warn_of_shared_store(rank: int) -> None:
    """Warns on rank 0 if torchrun may restart processes but shares its store with them."""
    if (
        rank == 0
        and os.environ.get(_AGENT_KEEPS_STORE) == "True"
        and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    ):
        _log.warning(
            "torchrun --max-restarts requires TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the"
            " environment on every node. Otherwise, restarted processes try to connect to the old"
            " processes and fail."
        )


def launched_processes() -> int:
    """Returns the number of launched processes from ``WORLD_SIZE``, or 1 if it is not set."""
    number = os.environ.get("WORLD_SIZE", "")
    if not number.isdecimal():
        return 1
    return int(number)

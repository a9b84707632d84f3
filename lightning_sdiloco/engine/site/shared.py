"""The connection of a site of several ranks: rank 0 speaks for all, and all hear the same at the same inner step.

[Note: one site, many followers] Every rank has a follower of its own. All hear the same events, of the same time, after
the same inner step, so all decide the same, and nothing has to be agreed on but what is heard.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from lightning_sdiloco.comm import Communicator
from lightning_sdiloco.engine.background import Pending
from lightning_sdiloco.federation import Call, Charter, Contribution, Follower, StateHeader
from lightning_sdiloco.hub import Connection, Told

Bytes = bytes | bytearray | memoryview
Value = TypeVar("Value")


class _Said(NamedTuple):
    value: Any
    error: Exception | None


class SharedConnection:
    """Gives all ranks of a site what its connection says, see [Note: one site, many followers]. In-group collectives.

    Args:
        connection: The connection, on rank 0; None on the others.
        in_group: The ranks of this site, for the training thread.

    Attributes:
        site: The name of the site.
        life: A random number of this start.
    """

    def __init__(self, connection: Connection | None, in_group: Communicator) -> None:
        self._connection = connection
        self._in_group = in_group
        self.site, self.life = self._of_rank_0(lambda own: (own.site, own.life))

    def _of_rank_0(self, ask: Callable[[Connection], Value]) -> Value:
        said = _Said(None, None)
        if self._connection is not None:
            try:
                said = _Said(ask(self._connection), None)
            except Exception as error:  # raised on all ranks, of which none may wait for the others
                said = _Said(None, error)
        value, refusal = self._in_group.all_gather_object(said)[0]
        if refusal is not None:
            raise refusal
        return value

    def agree(self, charter: Charter) -> Charter:
        """See `Connection.agree`."""
        return Charter.from_bytes(self._of_rank_0(lambda own: own.agree(charter).to_bytes()))

    def heard(self) -> tuple[list[Told], float]:
        """Returns what was heard since the last time, and the time."""
        return self._of_rank_0(lambda own: (own.events(), own.now()))

    def ready(self, pending: Mapping[int, Pending[Any]]) -> Collection[int]:
        """Returns what of some work in the background is ready, at rank 0: the others wait for theirs, a moment."""
        return self._of_rank_0(lambda own: {key for key, one in pending.items() if one.is_ready}) if pending else ()

    def wait(self, timeout: float) -> None:
        """Waits for something to hear, at rank 0. The others wait where they hear it."""
        if self._connection is not None:
            self._connection.wait(timeout)

    def hello(self, follower: Follower) -> None:
        """See `Connection.hello`; so are the following."""
        self._say(lambda own: own.hello(follower))

    def beat(self, follower: Follower) -> None:
        """Says what is new of the follower."""
        self._say(lambda own: own.beat(follower))

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        """Sends what the site launches."""
        self._say(lambda connection: connection.contribute(own, blobs))

    def skip(self, call: Call) -> None:
        """Says that a call will not be answered."""
        self._say(lambda own: own.skip(call))

    def ask(self, without: Collection[str] = ()) -> None:
        """Asks for a state."""
        self._say(lambda own: own.ask(without))

    def give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        """Gives a state."""
        self._say(lambda own: own.give(request, header, parts))

    def close(self) -> None:
        """Leaves, and ends the connection."""
        self._say(lambda own: own.leave())
        self._say(lambda own: own.close())

    def _say(self, say: Callable[[Connection], None]) -> None:
        if self._connection is not None:
            say(self._connection)

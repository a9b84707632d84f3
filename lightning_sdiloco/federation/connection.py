"""A site's connection to its hub: what training says and hears, without waiting for the network.

[Note: how a site uses its connection] One thread, that of training, owns the follower and makes all calls:

    charter = connection.agree(charter)              # before training: the charter of the run, or this one
    follower = Follower(charter.terms, charter.key, connection.site, connection.life)
    connection.hello(follower)                       # from here on nothing waits

    after every inner step:
        for event in connection.events():            # what was heard since
            Welcomed       follower.welcome(event.welcome), and take the outer values of the fragments that it returns;
                           at round 0 perhaps follower.adopt, see `Welcomed`
            Called         follower.hear(event.call)
            Recorded       follower.learn(event.record), and keep event.blobs until it has landed
            StateWanted    connection.give(event.request, follower.header(), parts), between landings
            StateArrived   follower.adopt(event.header, digests); then connection.hello(follower) again
            Waiting, Lost  tell the user; for Lost follower.lose(now), which raises when patience is over
        for call in follower.skips():   connection.skip(call)
        for fragment in follower.launches(step):   connection.contribute(follower.launch(...), blobs)
        for record in follower.due(step):   land it if its blobs are there, and follower.land(...)
        if follower.wants_state:   connection.ask()  # as often as one likes: one question is on its way at a time
        connection.beat(follower)                    # after whatever has changed the follower

    connection.leave(); connection.close()

The network has threads of its own. They see of the follower only what `Connection.hello` and `Connection.beat` have
copied, so it needs no lock. A connection that breaks is made again, hello is said again, and what is outstanding is
sent again: the caller does nothing for it. Everything may therefore be heard twice; the follower knows what to do then.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from lightning_sdiloco.federation.charter import Charter
from lightning_sdiloco.federation.follower import Follower
from lightning_sdiloco.federation.messages import Call, Contribution, Payload, Record, StateHeader, Welcome

Bytes = bytes | bytearray | memoryview

Wanted = Callable[[Contribution], Sequence[Payload]]
"""Which payloads of a contribution a rank fetches."""

Fetched = Mapping[str, Mapping[str, Bytes] | None]


@dataclass(frozen=True)
class Waiting:
    """Nothing is wrong here, but something is waited for, such as other sites at the founding, or room on a disk."""

    why: Annotated[str, 1 << 17]


@dataclass(frozen=True)
class Welcomed:
    """The hub has let this site in: after every hello, and as the first that is heard on every connection."""

    welcome: Welcome
    anchor: StateHeader | None = None


@dataclass(frozen=True)
class Called:
    """Somebody has launched for a round, or it is the last."""

    call: Call
    own: Contribution | None = None


@dataclass(frozen=True)
class Recorded:
    """A round is closed. Records come in any order, once or more often."""

    record: Record
    blobs: Mapping[str, Bytes] | None


@dataclass(frozen=True)
class StateWanted:
    """The hub wants the state of this site: for a site that joins, as an anchor, or to found the run."""

    request: str
    founding: bool = False


@dataclass(frozen=True)
class StateArrived:
    """The state that was asked for."""

    header: StateHeader
    parts: tuple[Bytes, ...]
    source: str


@dataclass(frozen=True)
class Lost:
    """The hub cannot be reached: at the beginning, and again whenever another try has failed."""

    why: Annotated[str, 1 << 17]
    is_busy: bool = False


Told = Waiting | Welcomed | Called | Recorded | StateWanted | StateArrived | Lost
"""What a site hears from its connection."""


class Connection(Protocol):
    """Connects one site with the hub of its run; see [Note: how a site uses its connection]."""

    site: str
    life: str
    sends_bytes_per_s: float

    def agree(self, charter: Charter) -> Charter:
        """Brings the charter of this site; waits for the hub."""

    def hello(self, follower: Follower) -> None:
        """Says hello, now and on every new connection: at the beginning, and after a state was adopted."""

    def beat(self, follower: Follower) -> None:
        """Takes what the follower says of itself and is outstanding; it is sent with the next signs of life."""

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        """Sends what a site launches."""

    def skip(self, call: Call) -> None:
        """Tells the hub that a call will not be answered."""

    def ask(self, without: Collection[str] = ()) -> None:
        """Asks for a state, unless that is on its way already. `StateArrived` brings it, from whoever has one."""

    def give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        """Gives the state that was wanted."""

    def now(self) -> float:
        """Returns the time in seconds, on a clock that never goes back: that by which training waits."""

    def events(self) -> list[Told]:
        """Returns what was heard since the last call."""

    def wait(self, timeout: float) -> bool:
        """Waits until there is something to hear; for training that must wait for a landing, and for the beginning."""

    def leave(self) -> None:
        """Says that this site has ended: nobody waits for it any more."""

    def close(self, timeout: float = 5.0) -> None:
        """Ends the connection, when what is still to be said has been, or the time is over."""


class Shards(Protocol):
    """Moves the payloads of a rank that is not the first of its site; see [Note: a site of several ranks]."""

    sends_bytes_per_s: float

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        """Sends the payloads of this rank, and sends them again until they are there or overtaken."""

    def keep(self, outstanding: Collection[Contribution]) -> None:
        """Stops sending what does not belong to one of these."""

    def prefetch(self, own: Contribution) -> None:
        """Begins to fetch what this rank needs of a contribution if it counts."""

    def fetch(self, record: Record) -> None:
        """Fetches what this rank needs of a record."""

    def fetched(self) -> Fetched:
        """Returns what was fetched since the last call: payloads by the key of their record, None if some are gone."""

    def close(self) -> None:
        """Ends it."""

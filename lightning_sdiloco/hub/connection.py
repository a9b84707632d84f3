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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_sdiloco.federation import (
    Call,
    Charter,
    Contribution,
    Follower,
    Known,
    Measurement,
    Record,
    StateHeader,
    Welcome,
)

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Waiting:
    """Nothing is wrong here, but something is waited for, such as other sites at the founding, or room on a disk.

    Attributes:
        why: For people.
    """

    why: str


@dataclass(frozen=True)
class Welcomed:
    """The hub has let this site in: after every hello, and as the first that is heard on every connection.

    A site that has nothing yet asks for a state. It need not where ``anchor`` stands at round 0 everywhere, and names
    the digests of the outer parameters that the site has begun with, as is so with equal seeds: then
    ``follower.adopt(anchor, digests)`` is all, with the outer optimizers as they were made.

    Attributes:
        welcome: What `Follower.welcome` takes.
        anchor: The state that the hub has for those who come with nothing, if there is one.
    """

    welcome: Welcome
    anchor: StateHeader | None = None


@dataclass(frozen=True)
class Called:
    """Somebody has launched for a round, or it is the last.

    Attributes:
        call: The call.
        own: The contribution with which it was called, whose payloads can be fetched already.
    """

    call: Call
    own: Contribution | None = None


@dataclass(frozen=True)
class Recorded:
    """A round is closed. Records come in any order, once or more often.

    Attributes:
        record: The record.
        blobs: The payloads of the contributions that count, under their keys, verified: those that this rank wants.
            None where the hub does not keep them any more: the record can be learned, and a state is needed.
    """

    record: Record
    blobs: Mapping[str, Bytes] | None


@dataclass(frozen=True)
class StateWanted:
    """The hub wants the state of this site: for a site that joins, as an anchor, or to found the run.

    Who does not follow (`Follower.follows`) does not answer, unless it is to found the run.

    Attributes:
        request: Goes with the answer.
        founding: Whether it is the state at round 0 of the run, and this site the founder. Its header says round 0 and
            the key of the charter for every fragment, with the digests of the outer parameters that the site begins
            with; the follower is not told before the run is founded, which `Welcomed` says, with that header.
    """

    request: str
    founding: bool = False


@dataclass(frozen=True)
class StateArrived:
    """The state that was asked for.

    Attributes:
        header: What it says of itself; `Follower.adopt` compares.
        parts: Its bytes as they were given, verified to be those: read them with ``weights_only=True``.
        source: Who gave it, to be named in ``ask(without=...)`` if it is refused.
    """

    header: StateHeader
    parts: tuple[Bytes, ...]
    source: str


@dataclass(frozen=True)
class Lost:
    """The hub cannot be reached: at the beginning, and again whenever another try has failed.

    Attributes:
        why: For people.
    """

    why: str


Told = Waiting | Welcomed | Called | Recorded | StateWanted | StateArrived | Lost
"""What a site hears from its connection."""


class Connection(Protocol):
    """Connects one site with the hub of its run; see [Note: how a site uses its connection].

    No method but those before training, `wait` and `close` waits for anything. What is said while the hub is gone is
    said when it is back, unless it has been overtaken.

    Attributes:
        site: The name of the site.
        life: A random number of this start of the site, for its follower.
        sends_bytes_per_s: What the link of this rank carried to the hub with its last payload; 0 if that is not known.
    """

    site: str
    life: str
    sends_bytes_per_s: float

    def settle(self, own: Measurement | None = None, chosen: Mapping[str, str] | None = None) -> Known:
        """Tells what a site has measured that has left settings open, or chosen; see [Note: settled once].

        Args:
            own: What it has measured; None: it only asks.
            chosen: What it has chosen, as text; taken if all is known and nobody was first.

        Returns:
            What is known now.

        Raises:
            ExchangeError: If the hub cannot be reached in time.
            Refused: If the hub does not take this site.
        """

    def round_trip(self) -> float:
        """Returns how many seconds a small call to the hub takes, before training."""

    def bandwidth(self, up: bool) -> float:
        """Returns the bits per second that get through to the hub, or from it, before training."""

    def agree(self, charter: Charter) -> Charter:
        """Brings the charter of this site; waits for the hub.

        Args:
            charter: What this site would found the run on, automatic choices made as it would make them.

        Returns:
            The charter of the run: that on which it was founded, that of the first who came if it is being founded, or
            this one. A site takes over from it what it had chosen automatically; ``charter.require_same`` with what
            comes of that refuses the rest. Hello says its key, and another one is refused by the hub.

        Raises:
            ExchangeError: If the hub cannot be reached in time.
            Refused: If the hub does not take this site.
        """

    def hello(self, follower: Follower) -> None:
        """Says hello, now and on every new connection: at the beginning, and after a state was adopted."""

    def beat(self, follower: Follower) -> None:
        """Takes what the follower says of itself and is outstanding; it is sent with the next signs of life.

        It only copies some numbers, so it may be called after every step. Signs of life go on without it.
        """

    def contribute(self, own: Contribution, blobs: Mapping[str, Bytes]) -> None:
        """Sends what a site launches.

        It is kept, and sent again after every hello, until a record of its round or of a later one comes, or the
        follower does not hold it any more.

        Args:
            own: The contribution.
            blobs: Its payloads under their keys: those that this rank has. They must not change any more. The round
                takes the contribution when those of the other ranks have arrived too.
        """

    def skip(self, call: Call) -> None:
        """Tells the hub that a call will not be answered."""

    def ask(self, without: Collection[str] = ()) -> None:
        """Asks for a state, unless that is on its way already. `StateArrived` brings it, from whoever has one.

        Args:
            without: Whose states were refused.
        """

    def give(self, request: str, header: StateHeader, parts: Sequence[Bytes]) -> None:
        """Gives the state that was wanted.

        Args:
            request: That of `StateWanted`.
            header: Where the state stands.
            parts: Its bytes, in one part or more. They must not change any more.
        """

    def now(self) -> float:
        """Returns the time in seconds, on a clock that never goes back: that by which training waits."""

    def events(self) -> list[Told]:
        """Returns what was heard since the last call.

        Raises:
            Refused: If the hub does not let this site in, or has sent it away: another charter, an eviction, a name
                that is in use, a certificate that does not speak for it. Nothing is heard after that.
        """

    def wait(self, timeout: float) -> bool:
        """Waits until there is something to hear; for training that must wait for a landing, and for the beginning.

        Args:
            timeout: Seconds, at most.

        Returns:
            Whether `events` has something to say, or to raise.
        """

    def leave(self) -> None:
        """Says that this site has ended: nobody waits for it any more."""

    def close(self, timeout: float = 5.0) -> None:
        """Ends the connection, when what is still to be said has been, or the time is over.

        Args:
            timeout: Seconds.
        """

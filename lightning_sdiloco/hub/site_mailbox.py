"""What carries the messages of a site to its hub and back: gRPC, or files in a folder."""

from collections.abc import Callable, Iterator
from typing import Protocol

from lightning_sdiloco.comm import Event, Header
from lightning_sdiloco.hub.history import Bytes


class SiteMailbox(Protocol):
    """What carries the messages of a site to its hub and back, such as `HubMailbox`, and `FolderHubMailbox`."""

    life: str

    def send(self, blob: Bytes, about: Header | None = None, *, key: str | None = None) -> Header:
        """Leaves a blob, and returns the hub's answer."""

    def leave(self, blob: Bytes, about: Header | None = None, *, key: str | None = None) -> None:
        """Leaves a blob ahead of a call that names it."""

    def get(self, key: str) -> Bytes:
        """Returns a blob, verified."""

    def call(self, name: str, about: Header | None = None, body: bytes = b"") -> tuple[Header, bytes]:
        """Asks the hub something."""

    def events(self, hello: Callable[[], Header], beat: Callable[[], Header]) -> Iterator[Event]:
        """Yields what the hub tells, for as long as the mailbox is not closed; see `HubMailbox.events`."""

    def round_trip(self) -> float:
        """Returns how many seconds a small call takes. `Refused` where nobody measures it."""

    def bandwidth(self, up: bool, seconds: float) -> float:
        """Returns the bits per second that get through to the hub, or from it. `Refused` where nobody measures it."""

    def close(self) -> None:
        """Ends it."""

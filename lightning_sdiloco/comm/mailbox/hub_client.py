"""A site's end of the connections to the hub: a mailbox behind gRPC that fails soon, and is there again by itself."""

import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from lightning_sdiloco.comm.mailbox.base import (
    MAX_BLOB,
    Altered,
    Bytes,
    HubUnreachable,
    MailboxError,
    checked_key,
    extra,
    key_of,
)
from lightning_sdiloco.comm.mailbox.channels import Event
from lightning_sdiloco.comm.mailbox.frames import PROTOCOL, Header, pack, unpack
from lightning_sdiloco.comm.mailbox.keys import Bundle, Identity, Role, load
from lightning_sdiloco.comm.mailbox.link import Link
from lightning_sdiloco.comm.mailbox.moving import download, upload
from lightning_sdiloco.comm.mailbox.probing import bandwidth, round_trip
from lightning_sdiloco.errors import Refused

_SILENT_BEATS = 4  # beats of the hub that may be missing before it counts as gone
Answer = TypeVar("Answer")
_LONGEST_PAUSE = 2.0  # seconds: a link that heals is noticed with the next try


class HubMailbox:
    """The mailbox of a hub."""

    def __init__(
        self,
        hub: str,
        run: str,
        name: str,
        keys: str | Path | None = None,
        insecure: bool = False,
        role: Role = "site",
        channels: int = 8,
        timeout: float = 10.0,
        beat: float = 1.0,
        max_blob: int = MAX_BLOB,
        life: str | None = None,
    ) -> None:
        if channels < 1:
            raise ValueError(f"channels={channels} is out of range: it must be at least 1.")
        extra("grpc")
        bundle = bundle_of(hub, name, keys, insecure)
        if bundle is not None:
            bundle = bundle.bound(run)
        else:
            warnings.warn(
                f"What goes to hub {hub} can be read and changed by others on the way (insecure=True).", stacklevel=2
            )
        self.identity = Identity(run, role, name) if bundle is None else bundle.identity._replace(run=run)
        self.life = life or secrets.token_hex(8)
        self.max_blob = max_blob
        self._beat = beat
        self._listening = False
        self._link = Link(hub, bundle, channels, timeout)

    @property
    def reachable(self) -> bool:
        """Whether the hub is not known to be gone, which `events` notices while it is at work."""
        return self._link.away is None

    def put(self, blob: Bytes) -> str:
        key = key_of(blob)
        self.send(blob, key=key)
        return key

    def send(
        self, blob: Bytes, about: Header | None = None, timeout: float | None = None, key: str | None = None
    ) -> Header:
        """Leaves a blob at the hub, and says what it is."""
        view = memoryview(blob).cast("B")
        header = self._header(about) | {"key": key or key_of(view), "size": len(view)}
        return self._from_any(lambda: upload(self._link, header, view, timeout))

    def get(self, key: str, timeout: float | None = None) -> bytearray:
        """Returns the blob under a key, verified."""
        checked_key(key)
        return self._from_any(lambda: download(self._link, self._header(), key, self.max_blob, timeout))

    def call(
        self, name: str, about: Header | None = None, body: bytes = b"", timeout: float | None = None
    ) -> tuple[Header, bytes]:
        """Asks the hub something, such as its status."""
        message = pack(self._header(about) | {"call": name}, body)
        return self._from_any(lambda: self._call(message, timeout))

    def _call(self, message: bytes, timeout: float | None) -> tuple[Header, bytes]:
        link = self._link
        with link.cancelled_at_the_end() as take:
            try:
                return unpack(
                    take(link.method("unary_unary", "call").future(message, timeout or link.timeout)).result()
                )
            except Exception as error:
                raise link.error(error) from error

    def _from_any(self, ask: Callable[[], Answer]) -> Answer:
        """Asks at each address until one answers; while `events` is at work, it knows where the hub is."""
        for _ in self._link.hubs[1:]:
            try:
                return ask()
            except HubUnreachable:
                if self._listening or self._link.closed.is_set():
                    raise
                self._link.look_elsewhere()
        return ask()

    def events(self, hello: Callable[[], Header], beat: Callable[[], Header] = dict) -> Iterator[Event]:
        """Yields what the hub tells, of its own accord and for as long as the mailbox is not closed."""
        broken, self._listening = 0, True
        try:
            while not self._link.closed.is_set():
                why, kind = f"hub {self._link.hub} ended the connection.", "HubUnreachable"
                try:
                    for event in self._connection(hello(), beat, self._beat * _SILENT_BEATS * 2**broken):
                        broken = 0
                        if event.kind != "beat":
                            yield event
                except (Refused, Altered):
                    raise
                except MailboxError as error:
                    why, kind = str(error), type(error).__name__
                if self._link.closed.is_set():
                    return
                self._link.lost(why)
                yield Event("lost", {"why": why, "kind": kind})
                self._link.closed.wait(min(self._beat * 2**broken / 5, _LONGEST_PAUSE))
                broken = min(broken + 1, 10)
        finally:
            self._listening = False
            # Nobody would notice that it is back.
            self._link.found()

    def round_trip(self) -> float:
        """Returns how many seconds a small call takes; see `probing.round_trip`."""
        return round_trip(self._link, self._header())

    def bandwidth(self, up: bool, seconds: float) -> float:
        """Returns the bits per second that get through to the hub, or from it; see `probing.bandwidth`."""
        return bandwidth(self._link, self._header(), up, seconds)

    def close(self) -> None:
        """Ends all connections, and every `events`."""
        self._link.close()

    def _header(self, about: Header | None = None) -> Header:
        who = self.identity._asdict() | {"life": self.life, "protocol": PROTOCOL}
        return {"from": who} if about is None else {"from": who, "about": about}

    def _connection(self, hello: Header, beat: Callable[[], Header], patience: float) -> Iterator[Event]:
        """Yields what comes on one connection, beats included."""
        ear = _Ear(min(self._link.timeout, patience))
        over = threading.Event()

        def said() -> Iterator[bytes]:
            yield pack(self._header(hello))
            # gRPC takes the next message when this one has left. How long a connection takes to be made, it knows.
            ear.begin()
            while not over.wait(self._beat):
                if ear.silent():
                    call.cancel()
                    return
                yield pack({"about": beat()})

        call = self._link.method("stream_stream", "watch")(said())
        try:
            while True:
                with ear:
                    message = next(call, None)
                if message is None:
                    return
                self._link.found()
                ear.patience = _SILENT_BEATS * self._beat
                header, body = unpack(message)
                yield Event(str(header.get("kind")), header.get("about", {}), body)
        except Exception as error:
            if ear.silent():
                raise ear.error(self._link.hub) from error
            raise self._link.error(error) from error
        finally:
            over.set()
            call.cancel()


class _Ear:
    """Knows for how long the hub has been listened to in vain: not while what it said is being worked on."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._lock = threading.Lock()
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        # What ended in an error may have been cancelled for the silence.
        if error[0] is None:
            with self._lock:
                self._since = None

    def begin(self) -> None:
        """Begins to count: the hub can have heard what was said."""
        with self._lock:
            self._since = self._since and time.monotonic()

    def silent(self) -> bool:
        """Whether the hub is silent."""
        since = self._since
        return since is not None and time.monotonic() - since > self.patience

    def error(self, hub: str) -> HubUnreachable:
        """Returns the error of a silent hub."""
        return HubUnreachable(f"hub {hub} has been silent for {self.patience:g} s.")


def bundle_of(hub: str, name: str, keys: str | Path | None, insecure: bool) -> Bundle | None:
    """Returns the keys of a site, if it shall have some."""
    if (keys is None) != insecure:
        raise ValueError(
            f"To reach hub {hub} site {name!r} needs either keys or insecure=True. Ask whoever has the folder of keys "
            f"for a bundle: sdiloco keys add FOLDER {name}."
        )
    if keys is None:
        return None
    bundle = load(keys, name)
    if bundle.identity.name != name:
        raise ValueError(
            f"The keys are those of {bundle.identity.role} {bundle.identity.name!r}, and not of {name!r}: a "
            "certificate speaks for one site. Give its bundle."
        )
    return bundle

"""The hub's end of the connections to all sites: it knows who calls, moves blobs and events, and leaves the rest."""

import functools
import logging
import secrets
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from lightning_sdiloco.comm.mailbox.access import LOOKING, Access, Peer, speaks_for_itself
from lightning_sdiloco.comm.mailbox.base import (
    Failure,
    MailboxError,
    Missing,
    NoSpace,
    checked_key,
    checked_size,
    extra,
)
from lightning_sdiloco.comm.mailbox.blobs import BlobStore
from lightning_sdiloco.comm.mailbox.channels import SERVER_OPTIONS, SERVICE, Event, status_of
from lightning_sdiloco.comm.mailbox.chunks import checked_runs, count
from lightning_sdiloco.comm.mailbox.frames import Header, pack, pack_chunk, unpack, unpack_chunk
from lightning_sdiloco.comm.mailbox.hub_transfers import Downloads, Uploads
from lightning_sdiloco.comm.mailbox.keys import load
from lightning_sdiloco.comm.mailbox.probing import answer_to
from lightning_sdiloco.comm.mailbox.sessions import Session, Sessions
from lightning_sdiloco.errors import Malformed, Refused

log = logging.getLogger(__name__)

MAX_CALLS = 512
"""Calls that are served at the same time; a site makes one for each of its connections, and one that stays."""

Push = Callable[..., None]


class Handler(Protocol):
    """What a hub does with what arrives. Calls come from several threads."""

    def start(self, push: Push) -> None:
        """Takes the function that tells all who watch, or one of them, of something: `Hub.push`."""

    def hello(self, peer: Peer, about: Header) -> Iterable[Event]:
        """Lets somebody in who begins to watch."""

    def beat(self, peer: Peer, about: Header) -> None:
        """Takes the sign of life that everybody who watches sends again and again, with what it says."""

    def gone(self, peer: Peer) -> None:
        """Notes that somebody does not watch any more: it ended, or its connection did. It may watch again."""

    def admit(self, peer: Peer, about: Header, key: str, size: int) -> None:
        """Says whether a blob may come, before it does; asked once for every connection over which it comes."""

    def stored(self, peer: Peer, about: Header, key: str, size: int) -> Header:
        """Takes notice of a blob that is in the store, durably, and returns the answer to its sender."""

    def call(self, peer: Peer, name: str, about: Header, body: bytes) -> tuple[Header, bytes]:
        """Answers a call whose name is in the table of who may call what."""


class Hub:
    """Serves sites over gRPC, with TLS and certificates at both ends unless it is told otherwise."""

    def __init__(
        self,
        handler: Handler,
        store: BlobStore,
        run: str,
        listen: str = "127.0.0.1:0",
        keys: str | Path | None = None,
        insecure: bool = False,
        beat: float = 1.0,
    ) -> None:
        self.store = store
        self._handler, self._beat = handler, beat
        self._grpc = extra("grpc")
        self._sessions, self._uploads, self._downloads = Sessions(), Uploads(store), Downloads()
        self._server = self._grpc.server(
            ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="hub"),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        if (keys is None) != insecure:
            raise ValueError(
                "A hub needs either keys or insecure=True. Make keys with: sdiloco keys init FOLDER --run RUN."
            )
        if keys is None:
            warnings.warn(
                "The hub serves without TLS: whoever reaches its port can read and change everything (insecure=True).",
                stacklevel=2,
            )
            self._access = Access(run, certified=False)
        else:
            bundle = load(keys).bound(run)
            if bundle.identity.role != "hub":
                whose = f"{bundle.identity.role} {bundle.identity.name!r}"
                raise ValueError(f"The keys are those of {whose}, and a hub needs its own: give hub.bundle.")
            self._access = Access(run, certified=True, revoked=bundle.revoked)
        self._add_calls()
        self.port = self._listen(listen, None if keys is None else bundle)

    def start(self) -> None:
        """Begins to serve."""
        self._handler.start(self.push)
        self._server.start()

    def close(self, grace: float = 0.5) -> None:
        """Ends all connections."""
        self._sessions.end_all()
        self._server.stop(grace).wait()

    def push(self, event: Event, to: Collection[str] | None = None) -> None:
        """Tells something to all who watch, or to some of them, without waiting for anybody."""
        self._sessions.push(event, to)

    def _listen(self, listen: str, bundle: Any) -> int:
        try:
            if bundle is None:
                port = self._server.add_insecure_port(listen)
            else:
                pair = [(bundle.key, bundle.certificate)]
                credentials = self._grpc.ssl_server_credentials(pair, bundle.authority, require_client_auth=True)
                port = self._server.add_secure_port(listen, credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise ValueError(
                f"listen={listen!r} cannot be listened on: give a free port and an address of this machine."
            )
        return int(port)

    def _add_calls(self) -> None:
        grpc = self._grpc
        calls = {
            "put": grpc.stream_unary_rpc_method_handler(_answering(self._put)),
            "get": grpc.unary_stream_rpc_method_handler(_telling(self._get)),
            "call": grpc.unary_unary_rpc_method_handler(_answering(self._call)),
            "watch": grpc.stream_stream_rpc_method_handler(_telling(self._watch)),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))

    def _asked(self, call: str, message: bytes | None, context: Any) -> tuple[Peer, Header, Header, bytes]:
        """Returns who asks, the whole header, what the call is about, and the bytes that belong to it."""
        if message is None:
            raise Malformed("a call begins with a header.")
        header, body = unpack(message)
        call = str(header.get("call"))[:80] if call == "call" else call
        peer = self._access.peer(call, header, context)
        if call not in LOOKING:
            self._sessions.check_life(peer)
        return peer, header, header.get("about", {}), body

    def _put(self, requests: Iterator[bytes], context: Any) -> bytes:
        peer, header, about, _ = self._asked("put", next(requests, None), context)
        key, size = checked_key(header.get("key")), checked_size(header.get("size"), self.store.max_blob, "blob")
        self._handler.admit(peer, about, key, size)
        if not self._holds(key):
            upload = self._uploads.of(peer, key, size)
            # Complete at once: an empty blob, or one whose sender asks what became of it.
            complete = upload.arrivals.complete
            for message in requests:
                complete = upload.take(*unpack_chunk(message)) or complete
            if not complete:
                return pack({"stored": False, "missing": upload.arrivals.missing()})
            self._uploads.commit(peer, upload)
        return pack({"stored": True, "answer": self._handler.stored(peer, about, key, size)})

    def _holds(self, key: str) -> bool:
        try:
            self.store.size(key)
        except Missing:
            return False
        return True

    def _get(self, message: bytes, context: Any) -> Iterator[bytes]:
        peer, header, _, _ = self._asked("get", message, context)
        key = checked_key(header.get("key"))
        size = self.store.size(key)
        runs = checked_runs(header["chunks"], size) if "chunks" in header else [[0, count(size)]] if size else []
        with self._downloads.joined(peer, str(header.get("transfer"))[:64], runs, bool(header.get("first"))) as numbers:
            yield pack({"size": size})
            for number in numbers:
                yield pack_chunk(number, self.store.read_chunk(key, number, size))

    def _call(self, message: bytes, context: Any) -> bytes:
        peer, header, about, body = self._asked("call", message, context)
        if header["call"] == "ping":
            return pack({}, answer_to(about, body))
        return pack(*self._handler.call(peer, header["call"], about, body))

    def _watch(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        peer, _, about, _ = self._asked("watch", next(requests, None), context)
        session = self._sessions.opened(peer)
        try:
            first = iter(self._handler.hello(peer, about))
            self._sessions.admitted(session)
            reader = threading.Thread(
                target=self._read_beats, args=(session, requests), name=f"beats-{secrets.token_hex(2)}", daemon=True
            )
            reader.start()
            for event in session.events(first, self._beat):
                yield pack({"kind": event.kind, "about": event.header}, event.body)
        finally:
            if self._sessions.closed(session):
                self._handler.gone(peer)

    def _read_beats(self, session: Session, requests: Iterator[bytes]) -> None:
        peer = session.peer
        try:
            for message in requests:
                about = unpack(message)[0].get("about", {})
                self._handler.beat(peer, speaks_for_itself(peer.role, peer.name, about))
        except (MailboxError, Refused) as error:
            session.end(error)
        except Exception as error:
            # gRPC ends a broken stream with an exception that is nothing but itself.
            log.debug("%s stopped: %r", peer.name, error)
        session.end()


def _answering(answer: Callable[[Any, Any], bytes]) -> Callable[[Any, Any], bytes]:
    """Returns a call that ends with the status of what goes wrong, and does not show a stranger our insides."""

    @functools.wraps(answer)
    def answered(request: Any, context: Any) -> bytes:
        try:
            return answer(request, context)
        except Exception as error:
            _abort(context, error)
            raise  # abort has raised

    return answered


def _telling(tell: Callable[[Any, Any], Iterator[bytes]]) -> Callable[[Any, Any], Iterator[bytes]]:
    """As `_answering`, for calls with several answers."""

    @functools.wraps(tell)
    def told(request: Any, context: Any) -> Iterator[bytes]:
        try:
            yield from tell(request, context)
        except Exception as error:
            _abort(context, error)

    return told


def _abort(context: Any, error: Exception) -> None:
    if not context.is_active():
        raise error
    if isinstance(error, Failure):
        # Somebody has to make room.
        log.log(logging.ERROR if isinstance(error, NoSpace) else logging.INFO, "%s: %s", context.peer(), error)
        context.abort(status_of(error), str(error)[:1000])
    log.exception("a call of %s failed", context.peer())
    context.abort(extra("grpc").StatusCode.INTERNAL, "the hub failed; its log says why.")

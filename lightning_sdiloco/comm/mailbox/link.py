"""The connections of a site to its hub: made when needed, made again by themselves, never waited for without end."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from lightning_sdiloco.comm.mailbox.base import Failure, HubUnreachable, extra
from lightning_sdiloco.comm.mailbox.channels import CLIENT_OPTIONS, SERVICE, error_of
from lightning_sdiloco.comm.mailbox.keys import Bundle, host_of

_THREADS = 128


def hub_addresses(hub: str) -> list[tuple[str, int]]:
    """Returns host and port of each place where the hub may be."""
    if "://" in hub or hub.startswith("/"):
        raise ValueError(
            f"hub={hub!r} is a folder or bucket, and sites meet at a hub: start one on a machine that all of them reach"
            " (sdiloco hub), and give its ADDRESS:PORT. It keeps payloads in a folder or bucket with --store."
        )
    places = []
    for one in map(str.strip, hub.split(",")):
        host, _, port = one.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"hub={one!r} is no address: give one with a port, such as a.example:29400.")
        if not 0 < int(port) < 1 << 16:
            raise ValueError(f"hub={one!r} has port {port}: a port is a number from 1 to 65535.")
        places.append((host.strip("[]"), int(port)))
    return places


class Link:
    """Channels to a hub: one for calls and events, and some for blobs."""

    def __init__(self, hub: str, bundle: Bundle | None, channels: int, timeout: float) -> None:
        hub_addresses(hub)
        self.hubs, self._turn, self.timeout = [one.strip() for one in hub.split(",")], 0, timeout
        self._grpc = extra("grpc")
        self._bundle = bundle
        self._channels = [self._channel() for _ in range(channels + 1)]
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hub-link")
        self._lock = threading.Lock()
        self._running: set[Any] = set()
        self._away: str | None = None
        self.closed = threading.Event()

    @property
    def away(self) -> str | None:
        """Why the hub counts as gone; None if it does not."""
        return self._away

    @property
    def hub(self) -> str:
        """Where the hub is looked for."""
        return self.hubs[self._turn]

    @property
    def data(self) -> list[Any]:
        """The channels for blobs."""
        return self._channels[1:]

    def lost(self, why: str) -> None:
        """Notes that the hub is gone: what waits for it ends at once, and all connections are made anew."""
        self._away = why
        self._cancel_all()
        self.look_elsewhere()

    def look_elsewhere(self) -> None:
        """Makes all connections anew, to the next address."""
        self._turn = (self._turn + 1) % len(self.hubs)
        before = self._channels
        if not self.closed.is_set():
            self._channels = [self._channel() for _ in before]
        for channel in before:
            channel.close()

    def found(self) -> None:
        """Notes that the hub is there."""
        self._away = None

    def method(self, kind: str, name: str, channel: Any = None) -> Any:
        """Returns a method of the hub, such as of the kind ``unary_unary``, on the channel for calls by default."""
        return getattr(channel or self._channels[0], kind)(f"/{SERVICE}/{name}")

    @contextmanager
    def cancelled_at_the_end(self) -> Iterator[Callable[[Any], Any]]:
        """Yields a function that takes calls: those that are still running at the end are cancelled."""
        calls: list[Any] = []

        def take(call: Any) -> Any:
            calls.append(call)
            with self._lock:
                self._running.add(call)
            if self._away is not None:
                call.cancel()
            return call

        self.require()
        try:
            yield take
        except ValueError as error:
            raise self.error(error) from error
        finally:
            for call in calls:
                call.cancel()
            with self._lock:
                self._running.difference_update(calls)

    def require(self) -> None:
        """Looks whether the hub may be asked."""
        if self.closed.is_set():
            raise HubUnreachable(f"the connection to hub {self.hub} has been closed.")
        if (why := self._away) is not None:
            raise HubUnreachable(why)

    def errors_of(self, tasks: list[Callable[[], None]], progress: Callable[[], int], patience: float) -> list[Failure]:
        """Runs tasks, each of which waits for calls, at the same time."""
        futures = [self._pool.submit(task) for task in tasks]
        waiting: set[Future[None]] = set(futures)
        before = progress()
        while waiting:
            done, waiting = wait(waiting, timeout=patience, return_when="FIRST_COMPLETED")
            now = progress()
            if not done and now == before:
                return [HubUnreachable(f"hub {self.hub}: no progress within {patience:g} s.")]
            before = now
        return [self.error(error) for error in (future.exception() for future in futures) if error is not None]

    def error(self, error: BaseException) -> Failure:
        """Returns what an error of gRPC stands for."""
        if isinstance(error, Failure):
            return error
        if isinstance(error, self._grpc.RpcError):
            return HubUnreachable(self._away) if self._away is not None else error_of(error, self.hub)
        if isinstance(error, self._grpc.FutureCancelledError):
            return HubUnreachable(self._away or f"the call to hub {self.hub} was cancelled.")
        if isinstance(error, ValueError) and str(error).startswith("Cannot invoke RPC"):
            return HubUnreachable(self._away or f"the connection to hub {self.hub} is made anew.")
        raise error

    def close(self) -> None:
        """Ends all connections, and what waits for them."""
        self.closed.set()
        self._cancel_all()
        for channel in self._channels:
            channel.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _cancel_all(self) -> None:
        with self._lock:
            running = list(self._running)
        for call in running:
            call.cancel()

    def _channel(self) -> Any:
        bundle = self._bundle
        if bundle is None:
            return self._grpc.insecure_channel(self.hub, CLIENT_OPTIONS)
        credentials = self._grpc.ssl_channel_credentials(bundle.authority, bundle.key, bundle.certificate)
        name = ("grpc.ssl_target_name_override", host_of(bundle.identity.run))
        return self._grpc.secure_channel(self.hub, credentials, [*CLIENT_OPTIONS, name])

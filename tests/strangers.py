"""Programs that listen where ranks of a training meet, and know nothing of it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from torch.distributed import TCPStore


@contextmanager
def listening(program: str) -> Iterator[int]:
    """The port of 127.0.0.1 on which a program listens: "http", "ssh", "silent", "closing", or the
    "store" of another training.
    """
    if program == "http":
        with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:
            threading.Thread(target=http.serve_forever, daemon=True).start()
            yield http.server_port
            http.shutdown()
    elif program == "store":
        store = TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False
        )
        yield store.port
        del store
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            if program != "silent":
                greeting = b"SSH-2.0-OpenSSH_9.6\r\n" if program == "ssh" else b""
                threading.Thread(target=_serve, args=(server, greeting), daemon=True).start()
            yield server.getsockname()[1]
            server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket, greeting: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.sendall(greeting)

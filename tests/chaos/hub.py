"""A hub as a process: serves a run from what is on its disk, and writes down who says hello and which rounds close."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning_sdiloco.federation import Hello, Record
from lightning_sdiloco.hub import HubService
from lightning_sdiloco.hub.coordinator import Coordinator
from lightning_sdiloco.hub.ledger import History
from tests.chaos.notes import Notebook
from tests.chaos.site import RUN, Place


def serve(sites: int, place: Place) -> None:
    """Serves until it is killed; SIGUSR1 ends the run.

    Args:
        sites: How many sites found the run.
        place: Where it is.
    """
    place.enter("hub")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    notebook = Notebook(place.folder / "hub.jsonl")
    _note(notebook)
    port = place.hub.rpartition(":")[2]
    ledger, keys = place.folder / "hub.sqlite", place.folder / "keys"
    service = HubService(RUN, ledger, sites=sites, listen=f"0.0.0.0:{port}", keys=keys)
    ends = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: ends.set())
    service.start()
    notebook.write("up", pid=os.getpid())
    ends.wait()
    service.coordinator.end()
    while True:
        signal.pause()


def _note(notebook: Notebook) -> None:
    """Makes the hub of this process write down what it hears and closes."""

    def before(of: Any, name: str, told: Callable[..., dict[str, Any]]) -> None:
        method = getattr(of, name)

        @wraps(method)
        def noted(self: Any, *arguments: Any) -> Any:
            notebook.write(name, **told(*arguments))
            return method(self, *arguments)

        setattr(of, name, noted)

    def said(hello: Hello, *_: Any) -> dict[str, Any]:
        return {"site": hello.site, "life": hello.life}

    def closed(record: Record) -> dict[str, Any]:
        counted = [[own.site, own.life, own.weight] for own in record.counted]
        left_out = [own.site for own in record.left_out]
        about = {"fragment": record.fragment, "round": record.round, "key": record.key, "final": record.final}
        return {**about, "counted": counted, "left_out": left_out}

    before(Coordinator, "hello", said)
    before(History, "append", closed)

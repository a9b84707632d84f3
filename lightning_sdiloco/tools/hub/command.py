"""Runs ``sdiloco hub``: serves a run to its sites, and tells a hub that serves what its operator wants."""

import logging
import signal
import threading

from lightning_sdiloco.comm import MailboxError
from lightning_sdiloco.hub import HubService
from lightning_sdiloco.tools.hub.asking import Asking, HubOptions
from lightning_sdiloco.tools.hub.metrics import MetricsServer


def hub(
    run: str | None = None,
    keys: str | None = None,
    sites: int | None = None,
    listen: str = "127.0.0.1:29400",
    ledger: str = "hub.sqlite",
    store: str | None = None,
    insecure: bool = False,
    metrics: str | None = None,
    quorum: str | None = None,
) -> str:
    """Serve a run to its sites, until it is ended by a signal; then start it again with the same ledger."""
    if run is None:
        raise ValueError("A hub serves one run: give its name (--run NAME), and keys for it (--keys FOLDER).")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        service = HubService(run, ledger, sites, listen, store, keys, insecure, quorum=quorum)
    except MailboxError as error:
        raise ValueError(str(error)) from error
    try:
        told = None if metrics is None else MetricsServer(metrics, service.status)
    except ValueError:
        service.close()
        raise
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    service.start()
    print(f"The hub of run {run} listens on port {service.port}: {_found(service)}.", flush=True)
    if told is not None:
        print(f"Metrics for Prometheus are on port {told.port}, for everybody who reaches it.", flush=True)
    over.wait()
    if told is not None:
        told.close()
    service.close()
    return f"The hub has ended. Everything is in {ledger}: start it again with the same command."


def _found(service: HubService) -> str:
    status = service.status()
    if status["founded"]:
        return f"it goes on after {status['records']} records"
    return f"it waits for {status['missing']} sites that found the run"


def evict(site: str, options: HubOptions) -> str:
    """Throw a site out of a run. A new start of it may join again, and fetches a state from the others."""
    with Asking(options, "operator") as asking:
        asking.ask("evict", who=site)
    return f"{site} was evicted. To keep it out for good, revoke its keys: sdiloco keys revoke FOLDER {site}."


def end(options: HubOptions) -> str:
    """End a run: the next round of every fragment is the last, for which every site launches what it has."""
    with Asking(options, "operator") as asking:
        asking.ask("end")
    return "The run ends with the next round of every fragment."


def rollback(round: int, options: HubOptions) -> str:
    """Roll a run back to a round: later records are dropped for good. Sites that have applied them must start again."""
    with Asking(options, "operator") as asking:
        answer, _ = asking.ask("rollback", round=round)
    return (
        f"{answer['records']} records are left. Sites that have applied more are refused: start them again from a"
        " checkpoint of before, or without one."
    )

"""The keeper: the hub of a run without a hub, in a thread of one of its sites, over the folder where they meet.

[Note: the keeper] Every site of a run in a folder is a candidate. One of them takes the place and does what a hub does:
its coordinator asks the rules, and makes durable what they say in the log of the folder. The others leave messages for
it. If it dies, is held up or ends, another site takes its place, which is for all of them what a hub is that dies and
is started again: nothing that was told is lost, and they train on meanwhile. See [Note: the fence in a folder].
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_sdiloco.comm import (
    FolderHub,
    FolderLedger,
    FolderSeat,
    MailboxError,
    NotActive,
    Pulses,
    SharedBlobs,
    SharedFiles,
    Sweeper,
    read_log,
)
from lightning_sdiloco.federation import Charter
from lightning_sdiloco.hub.coordinator import Coordinator
from lightning_sdiloco.hub.history import History
from lightning_sdiloco.hub.quorums import Quorums
from lightning_sdiloco.hub.service import CoordinatorHandler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rhythm:
    """How often sites that meet in a folder look at it."""

    ttl: float
    beat: float
    poll: float

    @property
    def silence(self) -> float:
        """Seconds without a sign of life of the keeper after which a site trains on without it."""
        return 4 * self.beat

    @staticmethod
    def of(lease: float, bucket: bool) -> "Rhythm":
        """Returns that of a federation."""
        return Rhythm(lease, min(2.0 if bucket else 1.0, lease / 5), min(1.0 if bucket else 0.05, lease / 10))


class Keeper:
    """Keeps a run when it is this site's turn; see [Note: the keeper]. It has a thread of its own."""

    def __init__(
        self,
        files: SharedFiles,
        run: str,
        site: str,
        sites: int,
        rhythm: Rhythm,
        quorums: Quorums,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _require_run(files, run)
        self._files, self._run, self._site, self._sites = files, run, site, sites
        self._rhythm, self._quorums, self._clock = rhythm, quorums, clock
        self._seat = FolderSeat(files, site, rhythm.ttl, clock)
        self._closed, self._awake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run_turns, name="keeper", daemon=True)
        self.coordinator: Coordinator | None = None

    def start(self) -> None:
        """Begins to look whether it is this site's turn."""
        self._thread.start()

    def close(self, timeout: float = 10.0) -> None:
        """Ends it; another site may keep the run at once."""
        self._closed.set()
        self._awake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run_turns(self) -> None:
        while not self._closed.is_set():
            try:
                seconds = self._turn()
            except NotActive as error:
                log.warning("%s keeps run %s no longer: %s", self._site, self._run, error)
                seconds = self._rhythm.poll
            except MailboxError as error:
                log.warning("%s", error)
                seconds = self._rhythm.beat
            except Exception:
                log.exception("%s cannot keep run %s, and leaves it to others for now", self._site, self._run)
                seconds = 2 * self._rhythm.ttl
            self._closed.wait(seconds)

    def _turn(self) -> float:
        """Keeps the run if it is this site's turn; returns in how many seconds to look again."""
        ledger = self._seat.take()
        if ledger is None:
            return self._rhythm.beat / 2
        try:
            Turn(self, ledger).keep()
        finally:
            self.coordinator = None
        return self._rhythm.poll


class Turn:
    """One turn of a keeper: a coordinator over the ledger that it has taken."""

    def __init__(self, keeper: Keeper, ledger: FolderLedger) -> None:
        self._keeper, self._ledger = keeper, ledger
        files, rhythm, clock = keeper._files, keeper._rhythm, keeper._clock
        self._clock, self._rhythm = clock, rhythm
        self._sweeper = Sweeper(files, lambda: ledger.held)
        pulses = Pulses(files, self._sweeper, ledger.turn, keeper._site, keeper._run)
        try:
            store = SharedBlobs(files, self._sweeper, clock)
            history = History(ledger, store, keeper._quorums)
            self._coordinator = Coordinator(keeper._run, history, keeper._sites, clock)
        except BaseException:
            pulses.beat([], over=True)
            self._end()
            raise
        self._hub = FolderHub(
            CoordinatorHandler(lambda: self._coordinator, store),
            store,
            files,
            self._sweeper,
            pulses,
            ledger.turn,
            keeper._run,
            rhythm.ttl,
            rhythm.beat,
            clock,
            ledger.renew,
            ledger.require,
        )

    def keep(self) -> None:
        """Keeps the run, until another site does, or this one ends."""
        keeper = self._keeper
        log.info("%s keeps run %s, after %d records", keeper._site, keeper._run, self._ledger.last + 1)
        try:
            self._hub.start()
            keeper.coordinator = self._coordinator
            self._coordinator.start(self._hub.push, keeper._awake.set)
            due = self._clock()
            while not keeper._closed.is_set():
                try:
                    due = self._serve(due)
                except NotActive:
                    raise
                except MailboxError as error:
                    log.warning("%s", error)
                    keeper._closed.wait(self._rhythm.beat)
                keeper._awake.wait(self._rhythm.poll)
            self._hub.serve()
        finally:
            self._hub.close()
            self._coordinator.start(lambda event, to=None: None, lambda: None)
            self._end()

    def _serve(self, due: float) -> float:
        keeper = self._keeper
        if not self._ledger.held:
            # It was held up for so long that another site may have taken its place.
            self._ledger.require()
        self._hub.serve()
        if keeper._awake.is_set() or self._clock() >= due:
            keeper._awake.clear()
            due = self._clock() + self._coordinator.tick()
            self._hub.flush()
        return due

    def _end(self) -> None:
        self._sweeper.close()
        self._ledger.close()


def _require_run(files: SharedFiles, run: str) -> None:
    try:
        text = read_log(files).notes.get("charter")
    except MailboxError as error:
        raise ValueError(f"run={run!r} cannot be read in {files.url}: {error}") from error
    if text is not None and (found := Charter.from_bytes(text).run) != run:
        raise ValueError(f"run={run!r} is not in {files.url}, but {found!r}. Give one that fits, or another folder.")

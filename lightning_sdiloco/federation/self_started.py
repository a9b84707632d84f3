"""The life cycle of a hub that starts automatically, including its host, files and keys.

[Note: a hub that starts itself] If no hub answers on the hub's host, the first rank of the site on
that host starts a hub as a separate process. The hub process outlives the site, so a site that is
killed and restarted finds the same hub. If the whole host fails, the hub continues from its ledger
once the host is back. The ledger is locked, even on a shared file system, so two processes cannot
serve the same run. The hub exits when all sites have left or when no site has been connected for a
while. Until the hub exits, the first rank's process keeps running, because some launchers kill
child processes when their parent exits.

Each host reads its keys from the hub's folder. Only the owner of the keys can read them. A host
that cannot access this folder requests its bundle from the hub's process on the port below the
hub's port, provided that both hosts are on a private network. Anyone who can reach this port can
obtain a site's keys, just as anyone who can reach the torch.distributed store can become a rank.
The hub therefore issues keys to no more sites than the number that found the run, and never issues
keys that a host has created in the folder.

[Note: a hub that dies] The first rank of the site on the hub's host restarts a hub that was killed.
The hub may be the child of an earlier incarnation of the site, so its exit code may be unknown. The
hub therefore holds a lock on a file, which the system releases when the process ends in any way. A
hub that ends deliberately first writes the reason to that file, which is blank until then. The file
is named after the hub's address, because hubs on several hosts may use the folder one after
another.
"""

import atexit
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from lightning_sdiloco.federation.client import hub_addresses
from lightning_sdiloco.federation.keys import add_keys, checked_name, init_keys
from lightning_sdiloco.federation.server import HubService
from lightning_sdiloco.federation.store import write_synced
from lightning_sdiloco.federation.wire import HubError
from lightning_sdiloco.launch.hosts import is_of_this_host, is_private, launch_of_host

_log = logging.getLogger(__name__)

_MOMENT = 0.2  # seconds between checks
_LONGEST_START = 60.0  # seconds within which a hub must listen
# Seconds after which keys must be visible on all hosts; a shared file system may lag behind.
_LATE_KEYS = 30.0
_ASKING = 5.0  # seconds within which a host asks for its keys, or the hub answers
_FIRST_WARNING = 10.0
# Seconds without a connected site after which a hub ends: the first if all sites have left, the
# second if some were lost and may come back.
_ALL_LEFT = 2.0
_NOBODY = 120.0
# Seconds before a dead hub is restarted, if it has not died recently, and at most.
_FIRST_DELAY = 1.0
_LONGEST_DELAY = 60.0
_LEFT = "its sites have left"
_LIFE_LENGTH = 400  # bytes: a fixed length, so that a reason also fits on a full disk
_SHOWN_LOG = 2000
_LOOPBACK = "127.0.0.1"


class Place(NamedTuple):
    """The hub address, the number of founding sites, and a site's host name."""

    hub: str
    sites: int
    host: str


def place_of_host(run: str, hub: str | None, sites: int | None) -> Place:
    """Returns the place of this host. The launcher supplies the address and the number of sites if
    the user does not.
    """
    launch = launch_of_host()
    # Otherwise, a host that sees no other hosts would found a run by itself.
    if sites is None and launch.hosts in (None, 1):
        raise ValueError(
            f"The hub of run {run!r} should start automatically, but {launch.launcher} does not"
            " report multiple hosts. Set the number of hosts, for example Federation(sites=2), or"
            " the address of a hub that you have started: Federation(hub='ADDRESS:PORT')."
        )
    sites = sites or launch.hosts or 1
    if hub is None:
        if launch.address is None or launch.port is None:
            raise ValueError(
                f"The hub of run {run!r} should start automatically, but {launch.launcher} does not"
                " report an address. On all hosts, set MASTER_ADDR and MASTER_PORT to an address of"
                " the first host and a free port on it. Under torchrun, use"
                " Federation(hub='ADDRESS:PORT', sites=...)."
            )
        hub = f"{launch.address}:{launch.port}"
    return Place(hub, sites, launch.host)


class _Life(NamedTuple):
    """The reason that a hub gave for its end, and whether its process is running. A hub that is
    running or was killed has given no reason.
    """

    reason: str = ""
    is_running: bool = False


class HubOfRun(NamedTuple):
    """The hub that the hosts of a run start automatically.

    Attributes:
        run: The name of the run.
        address: The address and port.
        sites: The number of founding sites.
        folder: The folder for the ledger, payloads, log and keys.
        is_here: True if the hub runs on this host.
        keys: The user's key folder, or None for the keys in the hub's folder.
        insecure: True if the hub runs without TLS.
    """

    run: str
    address: str
    sites: int
    folder: Path
    is_here: bool
    keys: Path | None = None
    insecure: bool = False

    @property
    def _port(self) -> int:
        return hub_addresses(self.address)[0][1]

    @property
    def log_file(self) -> Path:
        return self.folder / "hub.log"

    @property
    def life_file(self) -> Path:
        return self.folder / f"hub-{self.address}.life"

    @property
    def _made_keys(self) -> Path:
        return self.folder / "keys"

    def prepare(self, site: str, patience: float) -> None:
        """Starts the hub if it belongs on this host and is not running yet, and restarts it if it
        dies while this process is running. Also obtains this site's keys.
        """
        if self.is_here:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.keys is None and not self.insecure:
                self._make_keys()
            if not self._answers(_LOOPBACK):
                self._start()
            threading.Thread(target=self._watch, name="hub-watch", daemon=True).start()
        if self.keys is None and not self.insecure:
            self._await_keys(site, patience)
            if not (self._made_keys / f"{site}.bundle").exists():
                add_keys(self._made_keys, site)

    @property
    def keys_of_sites(self) -> Path | None:
        """The folder with the sites' key bundles, or None without TLS."""
        if self.insecure:
            return None
        return self.keys or self._made_keys

    def stay(self) -> None:
        """Keeps this process running until the hub on this host has ended."""
        if self.is_here:
            atexit.register(self._await_end)

    def _answers(self, host: str) -> bool:
        try:
            socket.create_connection((host, self._port), timeout=5.0).close()
        except OSError:
            return False
        return True

    def _make_keys(self) -> None:
        """Creates an authority for this run atomically, unless one exists."""
        if self._made_keys.exists():
            return
        new = self.folder / f"keys.{secrets.token_hex(4)}.new"
        init_keys(new, self.run)
        try:
            new.rename(self._made_keys)
        except OSError:
            # Another process on this host was faster.
            shutil.rmtree(new)

    def hand_out_keys(self) -> None:
        """Until the process ends, answers hosts that request their keys. Does nothing if handing
        out keys is unsafe.
        """
        address, port = hub_addresses(self.address)[0]
        if self.keys or self.insecure or not is_private(address):
            return
        # This host may resolve its own name to a loopback address.
        with socket.create_server(("", port - 1)) as listener:
            while True:
                asker, peer = listener.accept()
                with asker, suppress(OSError, ValueError):
                    asker.settimeout(_ASKING)
                    site = asker.makefile().readline(64).strip()
                    if is_private(peer[0]):
                        self._answer(asker, site)

    def _answer(self, asker: socket.socket, site: str) -> None:
        """Sends a site's keys, unless its host has created them or enough sites already have
        keys.
        """
        bundle = self._made_keys / f"{checked_name('site', site)}.bundle"
        handed_out = bundle.with_suffix(".handed-out")
        bundles = list(self._made_keys.glob("*.bundle"))
        # One of these is the hub's.
        if not handed_out.exists() and bundle not in bundles and len(bundles) <= self.sites:
            add_keys(self._made_keys, site)
            handed_out.touch()
        if handed_out.exists():
            asker.sendall(bundle.read_bytes())
            _log.info("a host has asked for the keys of %s", site)

    def _finds_keys(self, site: str) -> bool:
        """Returns whether this host has its site's keys, can create them, or obtains them from the
        hub's host.
        """
        bundle = self._made_keys / f"{site}.bundle"
        if bundle.exists() or (self._made_keys / "hub.bundle").exists():
            return True
        address, port = hub_addresses(self.address)[0]
        keys = b""
        with suppress(OSError):
            # The hub's name may not be resolved yet.
            if is_private(address):
                with socket.create_connection((address, port - 1), _ASKING) as hub:
                    hub.sendall(f"{site}\n".encode())
                    keys = hub.makefile("rb").read()
        if keys:
            self._made_keys.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                # If it exists, this host sees the hub's folder after all.
                write_synced(bundle, keys)
        return bool(keys)

    def _await_keys(self, site: str, patience: float) -> None:
        """Waits until this host can access the key folder or has received its keys from the hub."""
        deadline = time.monotonic() + patience
        warns_at = time.monotonic() + _FIRST_WARNING
        while not self._finds_keys(site):
            now = time.monotonic()
            if self._answers(hub_addresses(self.address)[0][0]):
                deadline = min(deadline, now + _LATE_KEYS)
            if now > deadline:
                raise ValueError(
                    f"The hub of run {self.run!r} at {self.address} created its keys in"
                    f" {self._made_keys} on its own host, but this host has no such folder. This"
                    " host could not request its keys over a private network either, on the port"
                    " below the hub's port. Use a folder that all hosts can access"
                    " (Federation(folder=...)), or create keys (sdiloco keys init) and copy them to"
                    " each host (Federation(keys=...)). If only these hosts can reach the port, you"
                    " can set insecure=True."
                )
            if now > warns_at:
                warns_at = now + 6 * _FIRST_WARNING
                _log.warning(
                    "This host is waiting for the keys of the hub at %s to appear in %s.",
                    self.address,
                    self._made_keys,
                )
            time.sleep(_MOMENT)

    def _start(self) -> None:
        """Starts the hub and waits until it is listening. Another process may have started the hub
        first.
        """
        arguments = json.dumps(self._asdict(), default=str)
        with self.log_file.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Signals to the site's processes must not reach the hub.
                start_new_session=True,
            )
        deadline = time.monotonic() + _LONGEST_START
        while not self._answers(_LOOPBACK):
            has_ended = process.poll() is not None
            # If another process started the hub first, that hub may be about to listen.
            if time.monotonic() > deadline or (has_ended and not self._life().is_running):
                end = f"ended with code {process.returncode}" if has_ended else "is not listening"
                text = self.log_file.read_text()[-_SHOWN_LOG:]
                raise ValueError(
                    f"The hub of run {self.run!r}, started automatically at {self.address}, {end}."
                    f" Last lines of {self.log_file}:\n{text}"
                )
            time.sleep(_MOMENT)
        _log.info(
            "The hub for run %s is listening on %s. Its log is %s", self.run, self.address, log.name
        )

    def _life(self) -> _Life:
        """Returns the life of the hub's process on this host."""
        try:
            with self.life_file.open(errors="replace") as file:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return _Life(file.read().strip())
        except FileNotFoundError:
            return _Life(f"{self.life_file} is missing")
        except OSError:
            # The hub holds the lock, or the file cannot be read at the moment.
            return _Life(is_running=True)

    def _watch(self) -> None:
        """Restarts the hub whenever its process was killed, until it ends for a different reason."""
        delay = _FIRST_DELAY
        started_at = time.monotonic()
        life = self._life()
        while not life.reason:
            if not life.is_running:
                if time.monotonic() > started_at + _LONGEST_DELAY:
                    delay = _FIRST_DELAY
                _log.warning(
                    "The hub of run %s has died. This site restarts it in %g s. Its log is %s",
                    self.run,
                    delay,
                    self.log_file,
                )
                time.sleep(delay)
                delay = min(2 * delay, _LONGEST_DELAY)
                try:
                    self._start()
                except (OSError, ValueError) as error:
                    _log.warning("%s", error)
                started_at = time.monotonic()
            time.sleep(_MOMENT)
            life = self._life()
        _log.log(
            logging.INFO if life.reason == _LEFT else logging.WARNING,
            "The hub of run %s has ended and is not restarted, because %s. Its log is %s",
            self.run,
            life.reason,
            self.log_file,
        )

    def _await_end(self) -> None:
        if self._answers(_LOOPBACK):
            _log.info(
                "This process is waiting until all other sites have left the hub on this host."
            )
        alive_at = time.monotonic()
        with suppress(KeyboardInterrupt):
            # A hub that cannot be restarted must not keep this process running.
            while not self._life().reason and time.monotonic() < alive_at + _NOBODY:
                if self._answers(_LOOPBACK):
                    alive_at = time.monotonic()
                time.sleep(_MOMENT)


def hub_of_hosts(
    run: str,
    hub: str,
    sites: int,
    folder: str | Path | None,
    keys: str | Path | None,
    insecure: bool,
) -> HubOfRun:
    """Returns the hub of a run as seen from this host."""
    launch = launch_of_host()
    ((address, _),) = hub_addresses(hub)
    is_here = is_of_this_host(address)
    if launch.number is not None and launch.address == address:
        # On every host, such names may refer to that host.
        is_here = launch.number == 0
    if is_here and keys is not None and not Path(keys).is_dir():
        raise ValueError(
            f"keys={str(keys)!r} contains a site's keys, but the hub starts on this host and needs"
            " its own keys. On this host, use the folder created by sdiloco keys init."
        )
    return HubOfRun(
        run,
        hub,
        sites,
        Path(folder or f"hub-{run}").absolute(),
        is_here,
        None if keys is None else Path(keys),
        insecure,
    )


def serve(hub: HubOfRun) -> str:
    """Serves a run until its sites have left or a signal arrives. Returns the reason for the end."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    service = HubService(
        hub.run,
        hub.folder / "hub.sqlite",
        hub.sites,
        f"0.0.0.0:{hub._port}",
        keys=hub.keys_of_sites,
        insecure=hub.insecure,
    )
    threading.Thread(target=hub.hand_out_keys, daemon=True).start()
    with closing(service):
        service.start()
        _log.info("process %d: the hub for run %s is listening on %s", os.getpid(), *hub[:2])
        used_at = time.monotonic()
        while not ended.wait(_MOMENT):
            service.require_latest()
            if service.is_in_use:
                used_at = time.monotonic()
            patience = _ALL_LEFT if service.have_all_left else _NOBODY
            if time.monotonic() > used_at + patience:
                return _LEFT
    return "it was stopped by a signal"


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    arguments = json.loads(sys.argv[1])
    arguments["folder"] = Path(arguments["folder"])
    hub = HubOfRun(**arguments)
    life = os.open(hub.life_file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(life, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        _log.error("another process serves run %s on this host (%s)", hub.run, error)
        os._exit(1)

    def note(reason: str) -> None:
        os.pwrite(life, reason.encode()[:_LIFE_LENGTH].ljust(_LIFE_LENGTH), 0)

    note("")
    try:
        end = serve(hub)
    except (HubError, ValueError) as error:
        _log.error("%s", error)
        note(f"of an error: {error}")
        os._exit(1)
    note(end)
    _log.info("the hub of run %s has ended, because %s", hub.run, end)


if __name__ == "__main__":
    main()

"""Starts a hub and three sites on this machine, kills one site with -9, restarts it, and shows what
happens.

    python examples/demo_federation.py

Each site is a separate job: ``pretrain_text.py`` with its own configuration file, which contains
the site's name and the hub's address. This script starts the jobs in the usual way, prints the
commands, and watches: it requests the hub's status and reads the records of the sites' monitors. It
writes logs, records and a picture of the events to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import came_and_went
import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from text_data import StandardLibraryText

from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.keys import add_keys, init_keys
from lightning_sdiloco.launch.rendezvous import try_to_connect
from lightning_sdiloco.tools.hub import STATES, HubOptions, asked, status_of
from lightning_sdiloco.tools.run_files import Rank, read_run

# Relative, so that the printed commands also work in the folder from which the demo was started.
EXAMPLES = Path(os.path.relpath(Path(__file__).parent))
RUN = "demo"
SITES = ("site-a", "site-b", "site-c")
KILLED = "site-c"
KILL_AT = 0.3
RETURN_AT = 0.5
"""The times at which the site is killed and restarted, as shares of the training time."""
PATIENCE = 120.0
"""The time limit, in seconds, for each expected event."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def made_of(class_path: str, **init_args: Any) -> dict[str, Any]:
    """Returns the YAML form of an object: its class path and arguments."""
    return {"class_path": class_path, "init_args": init_args}


@dataclass
class Site:
    """A site: its folder, its process, and its monitor's records so far."""

    name: str
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    seen: Rank | None = None

    @property
    def records(self) -> Path:
        return self.folder / "sdiloco"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "last.ckpt"

    def configure(self, hub: str, keys: Path) -> None:
        """Writes the site's configuration file, which adds its settings to
        ``configs/federated.yaml``.
        """
        self.folder.mkdir(parents=True)
        folder = str(self.folder)
        federation = made_of(
            "lightning_sdiloco.Federation",
            hub=hub,
            run=RUN,
            site=self.name,
            keys=str(keys),
            lease=3.0,
        )
        strategy = made_of(
            "lightning_sdiloco.StreamingDiLoCoStrategy",
            sync_every=20,
            fragments="strided:1",
            federation=federation,
        )
        monitor = made_of(
            "lightning_sdiloco.StreamingDiLoCoMonitor", folder=str(self.records), diagnostics=False
        )
        checkpoint = made_of(
            "lightning.pytorch.callbacks.ModelCheckpoint",
            dirpath=folder,
            save_last=True,
            every_n_train_steps=50,
            save_top_k=0,
        )
        logger = made_of("lightning.pytorch.loggers.CSVLogger", save_dir=folder, name="logs")
        settings = {
            # The run starts from the parameters of one site.
            "seed_everything": SITES.index(self.name),
            "trainer": {
                "strategy": strategy,
                "callbacks": [monitor, checkpoint],
                "logger": logger,
            },
        }
        text = yaml.safe_dump(settings, sort_keys=False)
        (self.folder / "site.yaml").write_text(text, encoding="utf-8")

    def command(self) -> list[str]:
        """Returns the command that starts the site, from its checkpoint if there is one."""
        command = [sys.executable, str(EXAMPLES / "pretrain_text.py"), "fit"]
        configs = EXAMPLES / "configs"
        for path in (configs / "base.yaml", configs / "federated.yaml", self.folder / "site.yaml"):
            command += ["--config", str(path)]
        command += ["--result", str(self.folder / "result.json")]
        if self.checkpoint.exists():
            command += ["--ckpt_path", str(self.checkpoint)]
        return command

    def start(self) -> None:
        with (self.folder / "log.txt").open("ab") as log:
            environment = {**os.environ, "MASTER_PORT": str(self.port), "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        """Kills the site without warning, as a power failure would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def look(self) -> None:
        with suppress(ValueError):  # if there is no inner step yet
            self.seen = read_run(self.records).heads[0]

    def progress(self) -> list[str]:
        """Returns the last inner step and its loss, as cells."""
        if not self.seen or not self.seen.losses:
            return ["-", "-"]
        return [f"{self.seen.steps[-1].step:,}", f"{self.seen.losses[-1][1]:.2f}"]


class Demo:
    def __init__(self, folder: Path, seconds: float, console: Console) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        self.seconds = seconds
        self.console = console
        self.hub = f"127.0.0.1:{free_port()}"
        self.keys = folder / "keys"
        self.sites = {name: Site(name, folder / name, free_port()) for name in SITES}
        self.process: subprocess.Popen[bytes] | None = None
        self.status: dict[str, Any] = {}
        self.began = time.time()

    def prepare(self) -> None:
        StandardLibraryText().prepare_data()
        self.show(["sdiloco", "keys", "init", str(self.keys), "--run", RUN])
        init_keys(self.keys, RUN)
        self.show(["sdiloco", "keys", "add", str(self.keys), *SITES])
        for site in self.sites.values():
            site.configure(self.hub, add_keys(self.keys, site.name))
        add_keys(self.keys, "operator", "operator")

    def start(self) -> None:
        command = ["hub", "--run", RUN, "--keys", str(self.keys), "--sites", str(len(SITES))]
        command += ["--listen", self.hub, "--ledger", str(self.folder / "hub.sqlite")]
        self.show(["sdiloco", *command])
        with (self.folder / "hub.log").open("wb") as log:
            command = [sys.executable, "-m", "lightning_sdiloco.tools.cli", *command]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        for site in self.sites.values():
            self.show(["python", *site.command()[1:]])
            site.start()
        self.note("a hub and three sites are started, each a process of its own")

    def show(self, command: Sequence[str]) -> None:
        self.console.print(
            f"$ {shlex.join(command)}", style="dim", soft_wrap=True, highlight=False, markup=False
        )

    def note(self, event: str) -> float:
        now = time.time()
        self.console.print(f"{now - self.began:5.0f} s  {event}", highlight=False, soft_wrap=True)
        return now

    # Watching

    def play(self) -> dict[str, float]:
        """Trains, kills a site, restarts it, and ends the run; returns the time of each event."""
        with Live(self.table(), console=self.console, auto_refresh=False, transient=True) as live:
            self.until("the hub answers", lambda: is_open(self.hub), live)
            operator = HubOptions(self.hub, str(self.keys / "operator.bundle"))
            with closing(operator.mailbox("operator")) as hub:
                return self.parts(hub, live)

    def parts(self, hub: HubClient, live: Live) -> dict[str, float]:
        killed = self.sites[KILLED]
        wait_until = partial(self.until, live=live, hub=hub)

        def time_passes(share: float) -> None:
            end = moments["founded"] + share * self.seconds
            wait_until("time has passed", lambda: time.time() > end)

        wait_until("the run is founded", lambda: self.status.get("founded"))
        moments = {"founded": self.note("all three are there: the run is founded, and trains")}
        time_passes(KILL_AT)
        wait_until("it can go on from a checkpoint", killed.checkpoint.exists)
        wait_until("rounds have landed", lambda: self.rounds() >= 2)
        killed.kill()
        moments["killed"] = self.note(f"{KILLED} is killed with -9")
        before = self.rounds()
        time_passes(RETURN_AT)
        wait_until("the others go on", lambda: self.rounds() >= before + 2)
        alone = self.rounds() - before
        moments["alone"] = float(alone)
        moments["started"] = self.note(
            f"{KILLED} is started again, from its checkpoint; {alone} rounds went by"
        )
        killed.start()
        wait_until("it counts again", lambda: self.counts_since(moments["started"]))
        moments["back"] = self.note(f"{KILLED} counts again")
        time_passes(1.0)
        asked(hub, "end")
        moments["ended"] = self.note("the operator ends the run: sdiloco hub end")
        wait_until("all have ended", lambda: not any(map(is_running, self.sites.values())))
        return moments

    def rounds(self) -> int:
        """Returns how many rounds are complete for every fragment."""
        return min((fragment["round"] for fragment in self.status.get("fragments", [])), default=0)

    def counts_since(self, moment: float) -> bool:
        """Returns whether the killed site has counted in a landing of the others since a time."""
        for site in self.sites.values():
            if site.name != KILLED and site.seen:
                for landing in site.seen.landings:
                    if landing.spans["land"][1] > moment and KILLED in landing.sites:
                        return True
        return False

    def until(
        self, claim: str, holds: Callable[[], Any], live: Live, hub: HubClient | None = None
    ) -> None:
        patience = PATIENCE + self.seconds
        deadline = time.time() + patience
        while not holds():
            self.look_at_processes()
            if time.time() > deadline:
                raise SystemExit(f"It did not come true within {patience:.0f} s that {claim}.")
            if hub is not None:
                # On a busy machine, the hub may take too long to answer.
                with suppress(ValueError):
                    self.status = status_of(hub)
            live.update(self.table(), refresh=True)
            time.sleep(0.5)

    def look_at_processes(self) -> None:
        """Reads the records of the sites, and ends the demo if a process has failed."""
        for site in self.sites.values():
            site.look()
            if site.process is not None and site.process.poll():
                raise SystemExit(f"{site.name} ended with an error; see {site.folder / 'log.txt'}.")
        if self.process is not None and self.process.poll() is not None:
            raise SystemExit(f"The hub has ended; see {self.folder / 'hub.log'}.")

    def table(self) -> Table:
        """Returns a table of the hub's status and the latest records of the sites' monitors."""
        rounds = [str(fragment["round"]) for fragment in self.status.get("fragments", [])]
        title = f"rounds of the fragments: {', '.join(rounds) or '-'}"
        table = Table(title=title, title_justify="left")
        for name in ("site", ""):
            table.add_column(name, justify="left")
        for name in ("inner steps", "loss", "last heartbeat", "behind", "share", "late", "starts"):
            table.add_column(name, justify="right")
        for name, site in self.sites.items():
            status = self.status.get("sites", {}).get(name)
            state = status["state"] if status else "starts"
            cells = [*site.progress(), *(cells_of(status) if status else ())]
            table.add_row(name, Text(state, style=STATES.get(state, "dim")), *cells)
        return table

    def close(self) -> None:
        for site in self.sites.values():
            site.kill()
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()


def cells_of(status: dict[str, Any]) -> list[str]:
    """Returns the table cells for a site that the hub reports."""
    heartbeat = status["last_heartbeat"]
    behind = status["rounds_behind"]
    return [
        "-" if heartbeat is None else f"{heartbeat:.1f} s",
        "-" if behind is None else str(behind),
        f"{status['share']:.0%}",
        str(status["late"]),
        str(status["incarnations"]),
    ]


def is_running(site: Site) -> bool:
    return site.process is not None and site.process.poll() is None


def is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return try_to_connect(host, int(port), 1.0) is None


def tell(demo: Demo, moments: dict[str, float], console: Console) -> None:
    runs = {}
    results = {}
    for name, site in demo.sites.items():
        runs[name] = read_run(site.records)
        results[name] = json.loads((site.folder / "result.json").read_text())
    for sentence in came_and_went.sentences(runs, results, moments, KILLED):
        console.print(sentence, highlight=False)
    if find_spec("matplotlib"):
        pictures = came_and_went.draw(demo.folder, runs, moments, KILLED)
        console.print("Saved:", *map(str, pictures), highlight=False, soft_wrap=True)
    else:
        console.print(
            "There is no picture: matplotlib is not installed. Install it with pip install"
            " matplotlib."
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="A hub and three sites on this machine; one is killed and returns."
    )
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="how long to train (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo_federation"),
        help="folder for all that it writes",
    )
    options = parser.parse_args(arguments)
    console = Console()
    demo = Demo(options.out, options.seconds, console)
    try:
        demo.prepare()
        demo.start()
        moments = demo.play()
    finally:
        demo.close()
    tell(demo, moments, console)


if __name__ == "__main__":
    main()

"""Starts a hub and three sites on this machine, kills one of them with -9, brings it back, and
shows what happens.

    python examples/demo_federation.py

Each site is a job of its own: ``pretrain_text.py`` with a file of its own, which says the site's
name and where the hub is. This script starts them as anybody would, prints the commands, and
watches: it asks the hub for its status and reads the records of the sites' monitors. Logs, records
and a picture of what happened are in ``--out``.
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
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
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

# Relative, so that the commands printed can be typed in the folder where the demo was started.
EXAMPLES = Path(os.path.relpath(Path(__file__).parent))
RUN = "demo"
SITES = ("site-a", "site-b", "site-c")
KILLED = "site-c"
KILL_AT = 0.3
RETURN_AT = 0.5
"""When the site is killed and started again, as shares of the time of training."""
PATIENCE = 120.0
"""Seconds for anything that has to come true."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@dataclass
class Site:
    """A site: its folder, its process, and what its monitor has written down so far."""

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
        """Writes the file of the site: what is its own, beside ``configs/federated.yaml``."""
        self.folder.mkdir(parents=True)
        federation = {"hub": hub, "run": RUN, "site": self.name, "keys": str(keys), "lease": 3.0}
        monitor = {"folder": str(self.records), "diagnostics": False}
        saved = {
            "dirpath": str(self.folder),
            "save_last": True,
            "every_n_train_steps": 50,
            "save_top_k": 0,
        }
        own = {
            # The run begins with the parameters of one of them.
            "seed_everything": SITES.index(self.name),
            "trainer": {
                "strategy": {
                    "class_path": "lightning_sdiloco.StreamingDiLoCoStrategy",
                    "init_args": {
                        "sync_every": 20,
                        "fragments": "strided:1",
                        "federation": {
                            "class_path": "lightning_sdiloco.Federation",
                            "init_args": federation,
                        },
                    },
                },
                "callbacks": [
                    {
                        "class_path": "lightning_sdiloco.StreamingDiLoCoMonitor",
                        "init_args": monitor,
                    },
                    {
                        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                        "init_args": saved,
                    },
                ],
                "logger": {
                    "class_path": "lightning.pytorch.loggers.CSVLogger",
                    "init_args": {"save_dir": str(self.folder), "name": "logs"},
                },
            },
        }
        (self.folder / "site.yaml").write_text(
            yaml.safe_dump(own, sort_keys=False), encoding="utf-8"
        )

    def command(self) -> list[str]:
        """Returns the command that starts it, from its checkpoint if it has one."""
        command = [sys.executable, str(EXAMPLES / "pretrain_text.py"), "fit"]
        for path in (EXAMPLES / "configs" / "base.yaml", EXAMPLES / "configs" / "federated.yaml"):
            command += ["--config", str(path)]
        command += [
            "--config",
            str(self.folder / "site.yaml"),
            "--result",
            str(self.folder / "result.json"),
        ]
        return (
            [*command, "--ckpt_path", str(self.checkpoint)] if self.checkpoint.exists() else command
        )

    def start(self) -> None:
        with (self.folder / "log.txt").open("ab") as log:
            environment = {**os.environ, "MASTER_PORT": str(self.port), "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        """Kills it as a power cut would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def look(self) -> None:
        with suppress(ValueError):  # there is no inner step yet
            self.seen = read_run(self.records).heads[0]


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
        command = [
            "hub",
            "--run",
            RUN,
            "--keys",
            str(self.keys),
            "--sites",
            str(len(SITES)),
            "--listen",
            self.hub,
        ]
        command += ["--ledger", str(self.folder / "hub.sqlite")]
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

    def note(self, what: str) -> float:
        now = time.time()
        self.console.print(f"{now - self.began:5.0f} s  {what}", highlight=False, soft_wrap=True)
        return now

    # Watching

    def play(self) -> dict[str, float]:
        """Trains, kills a site, brings it back, and ends the run; returns when what happened."""
        with Live(self.table(), console=self.console, auto_refresh=False, transient=True) as live:
            self.until("the hub answers", live, lambda: is_open(self.hub))
            with closing(
                HubOptions(self.hub, str(self.keys / "operator.bundle")).mailbox("operator")
            ) as hub:
                return self.parts(hub, live)

    def parts(self, hub: HubClient, live: Live) -> dict[str, float]:
        killed = self.sites[KILLED]
        others = [site for site in self.sites.values() if site.name != KILLED]

        def counted_since(moment: float) -> bool:
            landings = [landing for site in others if site.seen for landing in site.seen.landings]
            return any(
                landing.spans["land"][1] > moment and KILLED in landing.sites
                for landing in landings
            )

        def rounds() -> int:
            return min((own["round"] for own in self.status.get("fragments", [])), default=0)

        self.until("the run is founded", live, lambda: self.status.get("founded"), hub)
        at = {"founded": self.note("all three are there: the run is founded, and trains")}
        self.until(
            "time has passed",
            live,
            lambda: time.time() > at["founded"] + KILL_AT * self.seconds,
            hub,
        )
        self.until("it can go on from a checkpoint", live, killed.checkpoint.exists, hub)
        self.until("rounds have landed", live, lambda: rounds() >= 2, hub)
        killed.kill()
        at["killed"], before = self.note(f"{KILLED} is killed with -9"), rounds()
        self.until(
            "time has passed",
            live,
            lambda: time.time() > at["founded"] + RETURN_AT * self.seconds,
            hub,
        )
        self.until("the others go on", live, lambda: rounds() >= before + 2, hub)
        at["alone"] = float(rounds() - before)
        at["started"] = self.note(
            f"{KILLED} is started again, from its checkpoint; {rounds() - before} rounds went by"
        )
        killed.start()
        self.until("it counts again", live, lambda: counted_since(at["started"]), hub)
        at["back"] = self.note(f"{KILLED} counts again")
        self.until("time has passed", live, lambda: time.time() > at["founded"] + self.seconds, hub)
        asked(hub, "end")
        at["ended"] = self.note("the operator ends the run: sdiloco hub end")
        self.until(
            "all have ended", live, lambda: not any(map(self.is_running, self.sites.values())), hub
        )
        return at

    def is_running(self, site: Site) -> bool:
        return site.process is not None and site.process.poll() is None

    def until(self, what: str, live: Live, true: Any, hub: HubClient | None = None) -> None:
        end = time.time() + PATIENCE + self.seconds
        while not true():
            for site in self.sites.values():
                site.look()
                if site.process is not None and site.process.poll():
                    raise SystemExit(
                        f"{site.name} ended with an error; see {site.folder / 'log.txt'}."
                    )
            if self.process is not None and self.process.poll() is not None:
                raise SystemExit(f"The hub has ended; see {self.folder / 'hub.log'}.")
            if time.time() > end:
                raise SystemExit(
                    f"It did not come true within {PATIENCE + self.seconds:.0f} s that {what}."
                )
            if hub is not None:
                with suppress(
                    ValueError
                ):  # on a busy machine it may take the hub too long to answer
                    self.status = status_of(hub)
            live.update(self.table(), refresh=True)
            time.sleep(0.5)

    def table(self) -> Table:
        """Returns what is to be seen now: what the hub says, and what the sites' monitors wrote
        down.
        """
        rounds = [own["round"] for own in self.status.get("fragments", [])]
        table = Table(
            title=f"rounds of the fragments: {', '.join(map(str, rounds)) or '-'}",
            title_justify="left",
        )
        for name in (
            "site",
            "",
            "inner steps",
            "loss",
            "last heartbeat",
            "behind",
            "share",
            "late",
            "starts",
        ):
            table.add_column(name, justify="left" if name in ("site", "") else "right")
        for name, site in self.sites.items():
            own = self.status.get("sites", {}).get(name)
            state = own["state"] if own else "starts"
            told = ["-", "-"]
            if site.seen and site.seen.losses:
                told = [f"{site.seen.steps[-1].step:,}", f"{site.seen.losses[-1][1]:.2f}"]
            if own:
                behind = "-" if own["rounds_behind"] is None else str(own["rounds_behind"])
                heartbeat = (
                    "-" if own["last_heartbeat"] is None else f"{own['last_heartbeat']:.1f} s"
                )
                told += [
                    heartbeat,
                    behind,
                    f"{own['share']:.0%}",
                    str(own["late"]),
                    str(own["incarnations"]),
                ]
            table.add_row(name, Text(state, style=STATES.get(state, "dim")), *told)
        return table

    def close(self) -> None:
        for site in self.sites.values():
            site.kill()
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()


def is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return try_to_connect(host, int(port), 1.0) is None


def tell(demo: Demo, at: dict[str, float], console: Console) -> None:
    runs = {name: read_run(site.records) for name, site in demo.sites.items()}
    results = {
        name: json.loads((site.folder / "result.json").read_text())
        for name, site in demo.sites.items()
    }
    for sentence in came_and_went.sentences(runs, results, at, KILLED):
        console.print(sentence, highlight=False)
    pictures = came_and_went.draw(demo.folder, runs, at, KILLED) if find_spec("matplotlib") else []
    if pictures:
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
    given = parser.parse_args(arguments)
    console = Console()
    demo = Demo(given.out, given.seconds, console)
    try:
        demo.prepare()
        demo.start()
        at = demo.play()
    finally:
        demo.close()
    tell(demo, at, console)


if __name__ == "__main__":
    main()

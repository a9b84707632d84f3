"""Sites as real processes with the Trainer, over gRPC: one is killed, the others do not notice, and it comes back."""

import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_sdiloco
from lightning_sdiloco import StreamingDiLoCoStrategy
from lightning_sdiloco.comm import add_keys, init_keys
from lightning_sdiloco.hub import HubService
from lightning_sdiloco.lightning import read_run
from lightning_sdiloco.lightning.monitor.timeline import changes
from tests.comm.mailbox.hubs import require_extra
from tests.lightning.federated_site import train

SITES = ("a", "b", "c")
STEP = 0.02
STEPS = 300


class Federation:
    """A hub in this process, and sites in others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        init_keys(folder / "keys", "run")
        for site in SITES:
            add_keys(folder / "keys", site)
        self.hub = HubService("run", folder / "hub.sqlite", sites=len(SITES), keys=folder / "keys")
        self.hub.start()
        self.processes: dict[str, Any] = {}
        # For the ranks of a site: those that look for a port at the same time may find the same one.
        listening = [socket.create_server(("127.0.0.1", 0)) for _ in SITES]
        self.ports = {site: one.getsockname()[1] for site, one in zip(SITES, listening, strict=True)}
        for one in listening:
            one.close()
        # Sites begin with what they import, and with no thread of gRPC.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.lightning.federated_site"])

    def start(self, site: str, steps: int) -> None:
        port = self.ports[site]
        arguments = site, f"127.0.0.1:{self.hub.port}", self.folder / "keys", self.folder, steps, STEP, port
        self.processes[site] = self.context.Process(target=train, args=arguments)
        self.processes[site].start()

    def notes(self, site: str) -> list[dict[str, Any]]:
        path = self.folder / f"{site}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def round(self, site: str) -> int:
        stepped = [note for note in self.notes(site) if "rounds" in note]
        return min(stepped[-1]["rounds"]) if stepped else 0

    def until(self, what: str, holds: Callable[[], bool], timeout: float = 120.0) -> None:
        deadline = time.monotonic() + timeout
        while not holds():
            dead = [site for site, process in self.processes.items() if process.exitcode]
            told = {site: (self.folder / f"{site}.log").read_text()[-3000:] for site in dead}
            assert not dead, f"{what}: {told}"
            assert time.monotonic() < deadline, f"{what} did not happen: {self.hub.status()}"
            time.sleep(0.05)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self.hub.close()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    require_extra()
    made = Federation(tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(400)
def test_a_site_is_killed_the_others_go_on_at_their_pace_and_it_returns(federation: Federation) -> None:
    for site in SITES:
        federation.start(site, STEPS)
    federation.until("all have landed two rounds", lambda: min(map(federation.round, SITES)) >= 2)
    federation.processes.pop("c").kill()
    killed = time.monotonic()
    there = federation.round("a")
    federation.until("the others have landed three more", lambda: min(map(federation.round, "ab")) >= there + 3)
    federation.start("c", STEPS)
    federation.until("all have ended", lambda: all("ended" in federation.notes(site)[-1] for site in SITES))
    for site in "ab":
        stepped = [note for note in federation.notes(site) if "took" in note]
        after = [note["stalled"] for note in stepped if killed < note["at"] < killed + 10]
        one_step = statistics.median(note["took"] for note in stepped)
        assert max(after) < 0.1 + one_step, (sorted(after)[-5:], one_step)
    steps = [note["step"] for note in federation.notes("c") if "step" in note]
    # It went on from its own checkpoint.
    began = [after for before, after in zip(steps, steps[1:], strict=False) if after <= before]
    assert len(began) == 1
    assert began[0] > 1
    # What each site noted: another one's absence, and its own return.
    seen = [what for _, what in changes(read_run(federation.folder / "a.records").ranks[0])]
    assert "c counts no longer" in seen
    assert seen.count("c counts") >= 2
    (head,) = read_run(federation.folder / "c.records").ranks
    assert [step for _, step in head.starts] == [0, began[0] - 1]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"exchange": "two_shot"}, "exchange='two_shot' does not go with a federation"),
        ({"warmup_steps": 10}, "warmup_steps=10 does not go with a federation"),
        ({"outlier_guard": 3.0}, "outlier_guard=3.0 does not go with a federation"),
        ({"exchange_backend": "nccl"}, "exchange_backend='nccl' does not go with a federation"),
        ({"evaluate": "mean"}, "evaluate='mean' does not go with a federation"),
        ({"on_resume": "restart"}, "on_resume='restart' does not go with a federation"),
        ({"sync_every": "auto"}, "sync_every='auto' does not go with a federation"),
        ({"worker_groups": 2}, "worker_groups=2 does not go with a federation"),
    ],
)
def test_a_strategy_refuses_by_name_what_a_federation_cannot_do(choice: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        StreamingDiLoCoStrategy(federation=lightning_sdiloco.Federation("hub:1", "run", "a", keys="keys"), **choice)


def test_a_federation_is_given_in_yaml_by_its_class_path(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        """
trainer:
  accelerator: cpu
  strategy:
    class_path: lightning_sdiloco.StreamingDiLoCoStrategy
    init_args:
      federation:
        class_path: lightning_sdiloco.Federation
        init_args: {hub: "a.example:29400", run: llm-7b, site: site-b, keys: site-b.bundle, lease: 5}
"""
    )
    cli = LightningCLI(BoringModel, run=False, args=["--config", str(config)], save_config_callback=None)
    federation = cli.trainer.strategy._options.federation
    assert (federation.site, federation.lease, federation.grace) == ("site-b", 5, "auto")

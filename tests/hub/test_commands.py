"""The commands: a hub as a process that is killed and started again, and what is asked of it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.hub import HubConnection
from lightning_sdiloco.tools.cli import main
from lightning_sdiloco.tools.status import printed
from tests.hub.scripted import RUN, ScriptedSite, charter


class HubProcess:
    """``sdiloco hub`` in a process of its own."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.folder, self.keys, self.port = folder, keys, 0

    def start(self, *options: str) -> str:
        """Returns what it says first."""
        command = [sys.executable, "-m", "lightning_sdiloco.tools.cli", "hub", "--run", RUN, "--keys", str(self.keys)]
        command += ["--listen", f"127.0.0.1:{self.port}", "--ledger", str(self.folder / "hub.sqlite"), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        self.port = int(said.split("port ")[1].split(":")[0])
        return said

    def end(self, number: int) -> str:
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=100)
        return rest


@pytest.fixture
def hub(keys: Path, tmp_path: Path) -> Iterator[HubProcess]:
    hub = HubProcess(tmp_path, keys)
    yield hub
    if hub.process.poll() is None:
        hub.end(signal.SIGKILL)


def asked(capsys: pytest.CaptureFixture[str], hub: HubProcess, who: str, *command: str) -> str:
    main([*command, "--hub", f"127.0.0.1:{hub.port}", "--keys", str(hub.keys / f"{who}.bundle")])
    return capsys.readouterr().out


def train(sites: list[ScriptedSite], rounds: int, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while min(min(site.rounds) for site in sites) < rounds:
        assert time.monotonic() < end, "it did not come to that"
        for site in sites:
            site.step()
        time.sleep(0.005)


@pytest.mark.timeout(300)
def test_a_hub_that_is_killed_goes_on_and_its_operator_ends_the_run(
    hub: HubProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = find_spec("prometheus_client") is not None
    assert "it waits for 2 sites that found the run" in hub.start(
        "--sites", "2", *(["--metrics", "127.0.0.1:0"] if metrics else [])
    )
    if metrics:
        assert hub.process.stdout is not None
        port = int(hub.process.stdout.readline().split("port ")[1].split(",")[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert f'sdiloco_missing_sites{{run="{RUN}"}} 2.0' in answer.read().decode()
    connections = [HubConnection(f"127.0.0.1:{hub.port}", RUN, name, hub.keys, channels=2) for name in "ab"]
    sites = [ScriptedSite(connection, charter()) for connection in connections]
    train(sites, 3)
    hub.end(signal.SIGKILL)
    # Killed at any moment: what it had told is there, and what it had not is sent again.
    assert "it goes on after" in hub.start()
    train(sites, max(sites[0].rounds) + 3)
    # Whether a site follows, the hub that was started again learns from its next sign of life.
    end = time.monotonic() + 60
    while time.monotonic() < end:
        seen = json.loads(asked(capsys, hub, "viewer", "status", "--json"))
        if seen["sites"]["a"]["state"] == "follows":
            break
        train(sites, max(sites[0].rounds) + 1)
    assert seen["sites"]["a"]["state"] == "follows"
    assert seen["fragments"][0]["round"] >= 5
    assert "follows" in asked(capsys, hub, "viewer", "status")
    with pytest.raises(SystemExit):
        asked(capsys, hub, "viewer", "hub", "end")
    assert "a reader may not call end" in capsys.readouterr().err
    asked(capsys, hub, "boss", "hub", "end")
    end = time.monotonic() + 60
    while not all(site.follower.finished for site in sites) and time.monotonic() < end:
        for site in sites:
            site.step()
        time.sleep(0.005)
    assert sites[0].digests() == sites[1].digests()
    for connection in connections:
        connection.leave()
        connection.close()
    assert "start it again with the same command" in hub.end(signal.SIGTERM)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["hub"], "give its name"),
        (["hub", "--run", "r", "--insecure", "--ledger", "none.sqlite"], "There is no ledger"),
        (
            ["hub", "--run", "r", "--insecure", "--sites", "1", "--quorum", "no.Core"],
            "quorum='no.Core' cannot be imported",
        ),
        (["hub", "--run", "r", "--insecure", "--sites", "1", "--ledger", "etcd://a:2379/r"], "and a run has one hub"),
        (["status"], "Say where the hub is"),
        (["status", "--hub", "/mnt/run", "--run", "r", "--insecure"], "hub='/mnt/run' is a folder or bucket"),
        (["doctor", "--hub", "s3://bucket/run", "--insecure"], "hub='s3://bucket/run' is a folder or bucket"),
        (["hub", "end", "--hub", "127.0.0.1:1"], "Say which run it is"),
    ],
)
def test_what_is_missing_is_said(
    command: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(command)
    assert told in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_the_table_tells_who_is_missing_and_what_is_wrong() -> None:
    site: dict[str, Any] = {"state": "follows", "life": "0" * 16, "last_beat": 0.42, "rounds_behind": 1, "share": 0.5}
    site |= {"late": 3, "lives": 2, "bytes": 2_500_000, "bytes_per_second": 1_000_000}
    gone = site | {"state": "gone", "last_beat": None, "rounds_behind": None}
    fragment = {"round": 7, "open": True, "here": ["a"], "missing": ["b"], "ended": False}
    status: dict[str, Any] = {"run": "llm", "founded": True, "trouble": "there is no space left", "records": 14}
    text = printed(status | {"sites": {"a": site, "b": gone}, "fragments": [fragment], "anchors": []})
    for told in ("14 records", "no space left", "0.4 s", "50%", "2.5 MB", "1.0 MB/s", "gone"):
        assert told in text
    founding = {"run": "llm", "founded": False, "trouble": None, "missing": 2, "here": ["a"]}
    assert "2 more sites are needed; here: a" in printed(founding)

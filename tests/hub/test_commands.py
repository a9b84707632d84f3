"""The commands: a hub as a process that is killed and started again, what is asked of it, and its metrics."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.tools.cli import main
from lightning_sdiloco.tools.hub import SITE_METRICS, MetricsServer
from lightning_sdiloco.tools.status import printed
from tests.hub.hubs import RUN, World, require_agreement

SITE: dict[str, Any] = {"state": "follows", "life": "0" * 16, "last_beat": 0.42, "rounds_behind": 1, "share": 0.75}
SITE |= {"late": 3, "lives": 2, "bytes": 2_500_000, "bytes_per_second": 1_000_000}
GONE = SITE | {"state": "gone", "last_beat": None, "rounds_behind": None, "share": 0.25}
FRAGMENT = {"round": 7, "open": True, "here": ["a"], "missing": ["b"], "ended": False}
STATUS: dict[str, Any] = {
    **{"run": "llm", "founded": True, "trouble": "there is no space left", "records": 14, "anchors": []},
    **{"sites": {"a": SITE, "b": GONE}, "fragments": [FRAGMENT, FRAGMENT | {"missing": []}]},
}
FOUNDING = {"run": "llm", "founded": False, "trouble": None, "missing": 2, "here": ["a"]}


class HubProcess:
    """``sdiloco hub`` in a process of its own, at which the sites of a world meet."""

    def __init__(self, world: World) -> None:
        self.world = world

    def start(self, *options: str) -> str:
        """Returns what it says first."""
        world = self.world
        command = [sys.executable, "-m", "lightning_sdiloco.tools.cli", "hub", "--run", RUN, "--keys", str(world.keys)]
        command += ["--listen", f"127.0.0.1:{world.port}", "--ledger", str(world.folder / "hub.sqlite"), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        said = self.said()
        world.port = int(said.split("port ")[1].split(":")[0])
        return said

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, number: int) -> str:
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=100)
        return rest

    def status(self) -> dict[str, Any]:
        """What a reader is told."""
        return self.world.ask("viewer", "status")

    def close(self) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)


@pytest.mark.timeout(300)
def test_a_hub_that_is_killed_goes_on_and_its_operator_ends_the_run(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    hub: Any = HubProcess(world)
    world.service = hub

    def asked(who: str, *command: str) -> str:
        main([*command, "--hub", f"127.0.0.1:{world.port}", "--keys", str(world.keys / f"{who}.bundle")])
        return capsys.readouterr().out

    metrics = ["--metrics", "127.0.0.1:0"] if find_spec("prometheus_client") is not None else []
    assert "it waits for 2 sites that found the run" in hub.start("--sites", "2", *metrics)
    if metrics:
        port = int(hub.said().split("port ")[1].split(",")[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert f'sdiloco_missing_sites{{run="{RUN}"}} 2.0' in answer.read().decode()
    world.join("a", "b")
    world.rounds(3)
    hub.end(signal.SIGKILL)
    # Killed at any moment: what it had told is there, and what it had not is sent again.
    assert "it goes on after" in hub.start()
    world.more(2)
    # Whether a site follows, the hub that was started again learns from its next sign of life.
    world.run(lambda: hub.status()["sites"]["a"]["state"] == "follows")
    seen = json.loads(asked("viewer", "status", "--json"))
    assert seen["fragments"][0]["round"] >= 5
    assert "follows" in asked("viewer", "status")
    with pytest.raises(SystemExit):
        asked("viewer", "hub", "end")
    assert "a reader may not call end" in capsys.readouterr().err
    asked("boss", "hub", "end")
    world.run(lambda: all(site.follower.finished for site in world.sites.values()))
    require_agreement(world.sites.values())
    for site in world.sites.values():
        site.connection.leave()
    assert "start it again with the same command" in hub.end(signal.SIGTERM)


def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    new = ["hub", "--run", "r", "--insecure", "--sites", "1"]
    for command, told in (
        (["hub"], "give its name"),
        (["hub", "--run", "r", "--insecure", "--ledger", "none.sqlite"], "There is no ledger"),
        ([*new, "--quorum", "no.Core"], "quorum='no.Core' cannot be imported"),
        ([*new, "--ledger", "etcd://a:2379/r"], "and a run has one hub"),
        (["status"], "Say where the hub is"),
        (["status", "--hub", "/mnt/run", "--run", "r", "--insecure"], "hub='/mnt/run' is a folder or bucket"),
        (["doctor", "--hub", "s3://bucket/run", "--insecure"], "hub='s3://bucket/run' is a folder or bucket"),
        (["hub", "end", "--hub", "127.0.0.1:1"], "Say which run it is"),
    ):
        with pytest.raises(SystemExit):
            main(command)
        assert told in capsys.readouterr().err
        assert not os.listdir(tmp_path)


def test_the_table_tells_who_is_missing_and_what_is_wrong() -> None:
    text = printed(STATUS)
    for told in ("14 records", "no space left", "0.4 s", "75%", "2.5 MB", "1.0 MB/s", "gone"):
        assert told in text
    assert "2 more sites are needed; here: a" in printed(FOUNDING)


def test_a_prometheus_server_reads_what_the_status_says() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    asked = []

    def scraped(status: dict[str, Any]) -> list[str]:
        """What a Prometheus server reads, the second time that it asks."""
        server = MetricsServer("127.0.0.1:0", lambda: (asked.append(1), status)[1])
        try:
            for _ in range(2):
                with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
                    text = answer.read().decode()
        finally:
            server.close()
        return text.splitlines()

    told = scraped(STATUS)
    for line in (
        'sdiloco_records{run="llm"} 14.0',
        'sdiloco_trouble{run="llm"} 1.0',
        'sdiloco_site_state{run="llm",site="a",state="follows"} 1.0',
        'sdiloco_site_state{run="llm",site="b",state="gone"} 1.0',
        'sdiloco_site_state{run="llm",site="b",state="follows"} 0.0',
        'sdiloco_site_last_beat_seconds{run="llm",site="a"} 0.42',
        'sdiloco_site_weight_share{run="llm",site="b"} 0.25',
        'sdiloco_site_late_total{run="llm",site="a"} 3.0',
        'sdiloco_site_sent_bytes_total{run="llm",site="a"} 2.5e+06',
        'sdiloco_fragment_round{fragment="1",run="llm"} 7.0',
        'sdiloco_fragment_waits_for{fragment="0",run="llm",site="b"} 1.0',
    ):
        assert line in told, line
    assert not [line for line in told if line.startswith('sdiloco_site_last_beat_seconds{run="llm",site="b"}')]
    assert any(line.startswith("process_resident_memory_bytes") for line in told)
    # Whoever asks often does not keep the hub from its work.
    assert len(asked) == 1
    assert 'sdiloco_missing_sites{run="llm"} 2.0' in scraped(FOUNDING)
    with pytest.raises(ValueError, match="no address"):
        MetricsServer("9400", lambda: STATUS)
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    for kind, name, _ in SITE_METRICS.values():
        assert f"`sdiloco_site_{name}{'_total' if kind == 'counter' else ''}`" in page


def test_without_the_package_a_hub_with_metrics_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("grpc")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    command = ["hub", "--run", "r", "--insecure", "--sites", "1", "--listen", "127.0.0.1:0"]
    command += ["--ledger", str(tmp_path / "hub.sqlite"), "--metrics", "127.0.0.1:0"]
    with pytest.raises(SystemExit), pytest.warns(UserWarning, match="without TLS"):
        main(command)
    assert "Metrics need prometheus_client" in capsys.readouterr().err

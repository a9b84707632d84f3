"""``sdiloco doctor --hub``: what it says of the way to a hub, and of what is in the way."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.hub import HubConnection, HubService, init_keys
from lightning_sdiloco.tools.cli import main
from tests.hub.scripted import RUN, ScriptedSite, charter

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def hub(keys: Path, tmp_path: Path) -> Iterator[HubService]:
    service = HubService(RUN, tmp_path / "hub.sqlite", 1, keys=keys)
    service.start()
    yield service
    service.close()


def examined(capsys: pytest.CaptureFixture[str], port: int, *options: str, code: int = 0) -> dict[str, Any]:
    """What it says as JSON, by the names of what was looked at; with the exit code."""
    arguments = ["doctor", "--hub", f"127.0.0.1:{port}", "--seconds", "0.2", "--json", *options]
    if code:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
    else:
        main(arguments)
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is not bool(code)
    return told | {finding["check"]: finding for finding in told["findings"]}


def test_it_says_who_this_is_how_far_the_hub_is_and_what_the_run_is(
    hub: HubService, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = ["--keys", str(keys / "a.bundle")]
    told = examined(capsys, hub.port, *bundle)
    assert f"site a in run {RUN}, valid until 20" in told["keys"]["found"]
    assert told["keys"]["found"].endswith("for 364 days")
    assert 0 < told["round_trip"] < 1
    # Loopback; bounded bytes.
    assert min(told["bits_per_second_to_hub"], told["bits_per_second_from_hub"]) > 1e6
    assert told["run"]["found"] == "not founded yet: 1 more sites are needed; here: none"
    connection = HubConnection(f"127.0.0.1:{hub.port}", RUN, "a", keys, channels=2)
    try:
        site, deadline = ScriptedSite(connection, charter()), time.monotonic() + 60
        while not hub.status()["founded"]:
            assert time.monotonic() < deadline
            site.step()
            time.sleep(0.01)
        # With the keys of a site that trains, which goes on.
        told = examined(capsys, hub.port, *bundle)
        while min(site.rounds) < 1:
            assert time.monotonic() < deadline
            site.step()
            time.sleep(0.01)
    finally:
        connection.close()
    assert f"founded on charter {charter().key[:8]}" in told["run"]["found"]
    assert "2 tensors in 2 fragments, sync_every=8" in told["charter"]["found"]
    assert told["status"]["charter"]["settings"] == {"compression": "'none'"}


def test_of_two_addresses_it_says_which_one_cannot_be_reached(
    hub: HubService, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closed = listening.getsockname()[1]
    both = ["--hub", f"127.0.0.1:{closed}, 127.0.0.1:{hub.port}", "--keys", str(keys / "a.bundle")]
    told = examined(capsys, hub.port, *both)
    assert told["reachability"]["state"] == "slow"
    assert f"127.0.0.1:{closed}: connection refused" in told["reachability"]["found"]
    assert "run" in told
    hub.close()
    assert examined(capsys, hub.port, *both, code=1)["reachability"]["state"] == "wrong"


def test_another_authority_is_said_and_another_run(
    hub: HubService, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = init_keys(tmp_path / "others", RUN)
    told = examined(capsys, hub.port, "--keys", str(own), code=1)
    assert "handshake" in told["hub"]["found"].lower()
    assert "another authority" in told["hub"]["fix"]
    told = examined(capsys, hub.port, "--keys", str(keys / "a.bundle"), "--run", "run-2", code=1)
    assert "These keys are for run 'run-1', and not for run='run-2'" in told["findings"][-1]["found"]
    told = examined(capsys, hub.port, "--insecure", "--run", RUN, code=1)
    assert "a hub with keys takes nobody without" in told["hub"]["fix"]


def test_a_hub_without_keys_says_which_run_it_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("grpc")
    with pytest.warns(UserWarning, match="without TLS"):
        service = HubService(RUN, tmp_path / "hub.sqlite", 1, insecure=True)
    service.start()
    try:
        told = examined(capsys, service.port, "--insecure", "--run", "run-2", code=1)
    finally:
        service.close()
    assert "this hub serves run 'run-1', and not 'run-2'" in told["hub"]["found"]


def test_a_hub_that_is_away_is_said(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = examined(capsys, port, "--keys", str(keys / "a.bundle"), code=1)
    assert told["reachability"]["found"] == f"127.0.0.1:{port}: connection refused"
    assert f"--listen 0.0.0.0:{port}" in told["reachability"]["fix"]
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--hub", f"127.0.0.1:{port}"])
    assert ended.value.code == 2
    assert "Give the keys" in capsys.readouterr().err

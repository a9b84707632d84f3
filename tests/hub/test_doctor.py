"""``sdiloco doctor --hub``: what it says of the way to a hub, and of what is in the way."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.federation import HubService, init_keys
from lightning_sdiloco.tools.cli import main
from tests.hub.hubs import RUN, World, charter

pytestmark = pytest.mark.timeout(120)


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


def test_it_says_who_this_is_how_far_the_hub_is_what_the_run_is_and_which_address_cannot_be_reached(
    world: World, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub, bundle = world.start(sites=1), ["--keys", str(keys / "a.bundle")]
    told = examined(capsys, hub.port, *bundle)
    assert f"site a in run {RUN}, valid until 20" in told["keys"]["found"]
    assert told["keys"]["found"].endswith("for 364 days")
    assert 0 < told["round_trip"] < 1
    # Loopback; bounded bytes.
    assert min(told["bits_per_second_to_hub"], told["bits_per_second_from_hub"]) > 1e6
    assert told["run"]["found"] == "not founded yet: 1 more sites are needed; here: none"
    world.join("a")
    world.run(lambda: hub.status()["founded"])
    # With the keys of a site that trains, which goes on.
    told = examined(capsys, hub.port, *bundle)
    world.rounds(1)
    assert f"founded on charter {charter().key[:8]}" in told["run"]["found"]
    assert "2 tensors in 2 fragments, sync_every=8" in told["charter"]["found"]
    assert told["status"]["charter"]["settings"] == {"compression": "'none'"}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closed = listening.getsockname()[1]
    both = ["--hub", f"127.0.0.1:{closed}, 127.0.0.1:{hub.port}", *bundle]
    told = examined(capsys, hub.port, *both)
    assert told["reachability"]["state"] == "slow"
    assert f"127.0.0.1:{closed}: connection refused" in told["reachability"]["found"]
    assert "run" in told
    hub.close()
    told = examined(capsys, hub.port, *bundle, code=1)
    assert told["reachability"]["found"] == f"127.0.0.1:{hub.port}: connection refused"
    assert f"--listen 0.0.0.0:{hub.port}" in told["reachability"]["fix"]


def test_another_authority_is_said_and_another_run(
    world: World, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = world.start(sites=1).port
    own = init_keys(tmp_path / "others", RUN)
    told = examined(capsys, port, "--keys", str(own), code=1)
    assert "handshake" in told["hub"]["found"].lower()
    assert "another authority" in told["hub"]["fix"]
    told = examined(capsys, port, "--keys", str(keys / "a.bundle"), "--run", "run-2", code=1)
    assert "These keys are for run 'run-1', and not for run='run-2'" in told["findings"][-1]["found"]
    told = examined(capsys, port, "--insecure", "--run", RUN, code=1)
    assert "a hub with keys takes nobody without" in told["hub"]["fix"]
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--hub", f"127.0.0.1:{port}"])
    assert ended.value.code == 2
    assert "Give the keys" in capsys.readouterr().err


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

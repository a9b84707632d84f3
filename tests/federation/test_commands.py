"""The commands: a hub as a process that is killed and started again, what is asked of it, its
metrics, the doctor.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_sdiloco.federation import server
from lightning_sdiloco.federation.keys import host_of, init_keys, load, wall_clock
from lightning_sdiloco.federation.server import HubService
from lightning_sdiloco.federation.store import BlobStore
from lightning_sdiloco.planning.units import readable
from lightning_sdiloco.tools.hub import SITE_METRICS, MetricsServer
from lightning_sdiloco.tools.status import printed
from tests.federation.hubs import TERMS, World, require_agreement, require_extra
from tests.federation.scripted import RUN, run_config
from tests.ranks import PATIENCE
from tests.tools.command import not_refused_with, ran, refused, told

SITE: dict[str, Any] = {
    "state": "follows",
    "incarnation": "0" * 16,
    "last_heartbeat": 0.42,
    "rounds_behind": 1,
}
SITE |= {"share": 0.75, "late": 3, "not_finite": 1, "too_long": 4, "incarnations": 2}
SITE |= {"bytes": 2_500_000, "bytes_per_second": 1_000_000}
GONE = SITE | {"state": "gone", "last_heartbeat": None, "rounds_behind": None, "share": 0.25}
FRAGMENT = {"round": 7, "open": True, "here": ["a"], "missing": ["b"], "ended": False}
STATUS: dict[str, Any] = {
    "run": "llm",
    "founded": True,
    "trouble": "there is no space left",
    "records": 14,
}
STATUS |= {
    "snapshots": [],
    "sites": {"a": SITE, "b": GONE},
    "fragments": [FRAGMENT, FRAGMENT | {"missing": []}],
}
FOUNDING = {"run": "llm", "founded": False, "trouble": None, "missing": 2, "here": ["a"]}


class HubProcess(subprocess.Popen[str]):
    """``sdiloco hub`` in a process of its own, at which the sites of a world meet."""

    def __init__(self, world: World, *options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "lightning_sdiloco.tools.cli",
            "hub",
            "--run",
            RUN,
            "--keys",
            str(world.keys),
        ]
        command += [
            "--listen",
            f"127.0.0.1:{world.port}",
            "--ledger",
            str(world.folder / "hub.sqlite"),
            *options,
        ]
        super().__init__(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.greeting = self.said()
        world.port, world.service = int(self.greeting.split("port ")[1].split(":")[0]), self  # type: ignore[assignment]

    def said(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline()

    def end(self, number: int) -> str:
        self.send_signal(number)
        return self.communicate(timeout=PATIENCE)[0]

    def close(self) -> None:
        if self.poll() is None:
            self.end(signal.SIGKILL)


def test_a_killed_hub_resumes_with_amended_terms_and_its_operator_ends_the_run(
    world: World,
) -> None:
    metrics = ["--metrics", "127.0.0.1:0"] if find_spec("prometheus_client") is not None else []
    hub = HubProcess(world, "--sites", "2", *metrics)
    assert "it waits for 2 sites that found the run" in hub.greeting
    if metrics:
        port = int(hub.said().split("port ")[1].split(",")[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert f'sdiloco_missing_sites{{run="{RUN}"}} 2.0' in answer.read().decode()
    world.join("a", "b")
    for rounds in (1, 2, 3):
        world.rounds(rounds)
        if rounds == 2:
            said = told("hub", "amend", "--grace", "0.5", "--guard=0", *world.asked("boss"))
            assert "grace=0.5, lease=2.0, quorum=1, guard=None" in said
            world.run(
                lambda: all(site.follower.terms.grace == 0.5 for site in world.sites.values())
            )
        for _ in range(3 * rounds):
            world.sites["a"].step()
        hub.end(signal.SIGKILL)
        # Killed at any moment: what it had told is there, or a site would refuse it; what it had
        # not is sent again.
        hub = HubProcess(world)
        assert "it goes on after" in hub.greeting
    world.more(2)
    # Whether a site follows, the hub that was started again learns from its next heartbeat.
    world.run(lambda: world.status()["sites"]["a"]["state"] == "follows")
    assert (
        json.loads(told("status", "--json", *world.asked("viewer")))["fragments"][0]["round"] >= 5
    )
    assert "follows" in told("status", *world.asked("viewer"))
    terms = world.status()["run_config"]["terms"]
    assert (terms["grace"], terms["guard"], terms["rounds"]) == (0.5, None, None)
    assert world.join("c").follower.terms.sync_every == 8
    world.more(2)
    assert world.sites["c"].follower.terms.grace == 0.5
    cases = [
        (["amend", "--lease=-1", *world.asked("boss")], "lease is not a finite number"),
        (["amend", "--quorum=0", *world.asked("boss")], "quorum=0 is out of range"),
        (["amend", *world.asked("boss")], "Give at least one change"),
        (["amend", "--grace=1", *world.asked("viewer")], "may not call amend"),
        (["end", *world.asked("viewer")], "a reader may not call end"),
    ]
    assert not_refused_with("hub", cases) == {}
    told("hub", "end", *world.asked("boss"))
    world.run(lambda: all(site.follower.finished for site in world.sites.values()))
    require_agreement(world.sites.values())
    for site in world.sites.values():
        site.connection.leave()
    assert "start it again with the same command" in hub.end(signal.SIGTERM)


def test_missing_options_files_and_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new = ["hub", "--run", "r", "--insecure", "--sites", "1"]
    for command, words in (
        (["hub"], "give its name"),
        (["hub", "--run", "r", "--insecure", "--ledger", "none.sqlite"], "There is no ledger"),
        ([*new, "--quorum", "no.Core"], "quorum='no.Core' cannot be imported"),
        ([*new, "--ledger", "etcd://a:2379/r"], "but a run has one hub"),
        (["status"], "Say where the hub is"),
        (
            ["status", "--hub", "/mnt/run", "--run", "r", "--insecure"],
            "hub='/mnt/run' is a folder or bucket",
        ),
        (
            ["doctor", "--hub", "s3://bucket/run", "--insecure"],
            "hub='s3://bucket/run' is a folder or bucket",
        ),
        (["doctor", "--hub", "127.0.0.1:1"], "Give the keys"),
        (["hub", "end", "--hub", "127.0.0.1:1"], "Say which run it is"),
    ):
        assert words in refused(*command)
        assert not os.listdir(tmp_path)
    pytest.importorskip("grpc")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.warns(UserWarning, match="without TLS"):
        said = ran(
            *new, "--listen", "127.0.0.1:0", "--ledger", "hub.sqlite", "--metrics", "127.0.0.1:0"
        )
    assert "Metrics need prometheus_client" in said.err
    assert said.code


def test_the_table_and_prometheus_match_the_status_and_strangers_read_no_more() -> None:
    text = printed(STATUS)
    for words in ("14 records", "no space left", "0.4 s", "75%", "2.5 MB", "1 MB/s", "gone"):
        assert words in text
    assert "2 more sites are needed; here: a" in printed(FOUNDING)
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    for kind, name, _ in SITE_METRICS.values():
        assert f"`sdiloco_site_{name}{'_total' if kind == 'counter' else ''}`" in page
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    asked = []

    def scraped(status: dict[str, Any], *strangers: bytes) -> list[str]:
        """What a Prometheus server reads, the second time that it asks, after what strangers have
        sent.
        """
        server = MetricsServer("127.0.0.1:0", lambda: (asked.append(1), status)[1], lambda: True)
        try:
            for sent in strangers:
                stranger = socket.create_connection(("127.0.0.1", server.port), timeout=5)
                with stranger, suppress(ConnectionError):
                    stranger.sendall(sent)
                    stranger.shutdown(socket.SHUT_WR)
                    stranger.recv(1 << 16)
            for _ in range(2):
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{server.port}/metrics", timeout=10
                ) as answer:
                    text = answer.read().decode()
        finally:
            server.close()
        return text.splitlines()

    lines = scraped(STATUS)
    assert {
        'sdiloco_records{run="llm"} 14.0',
        'sdiloco_trouble{run="llm"} 1.0',
        'sdiloco_site_state{run="llm",site="a",state="follows"} 1.0',
        'sdiloco_site_state{run="llm",site="b",state="gone"} 1.0',
        'sdiloco_site_state{run="llm",site="b",state="follows"} 0.0',
        'sdiloco_site_last_heartbeat_seconds{run="llm",site="a"} 0.42',
        'sdiloco_site_weight_share{run="llm",site="b"} 0.25',
        'sdiloco_site_late_total{run="llm",site="a"} 3.0',
        'sdiloco_site_too_long_total{run="llm",site="a"} 4.0',
        'sdiloco_site_sent_bytes_total{run="llm",site="a"} 2.5e+06',
        'sdiloco_fragment_round{fragment="1",run="llm"} 7.0',
        'sdiloco_fragment_waits_for{fragment="0",run="llm",site="b"} 1.0',
    } <= set(lines)
    assert not [
        line
        for line in lines
        if line.startswith('sdiloco_site_last_heartbeat_seconds{run="llm",site="b"}')
    ]
    assert any(line.startswith("process_resident_memory_bytes") for line in lines)
    assert len(asked) == 1, "whoever asks often does not keep the hub from its work"
    post = b"POST /metrics HTTP/1.0\r\nContent-Length: 3\r\n\r\nend"
    strangers = (b"GET /evict?who=a HTTP/1.0\r\n\r\n", post, random.randbytes(4096))
    assert 'sdiloco_missing_sites{run="llm"} 2.0' in scraped(FOUNDING, *strangers)
    with pytest.raises(ValueError, match="not an address"):
        MetricsServer("9400", lambda: STATUS, lambda: True)


def test_a_hub_answers_probes_truthfully(tmp_path: Path) -> None:
    require_extra()
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    def probed() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{server.port}/healthz", timeout=10
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def health(service: str = "") -> str:
        with grpc.insecure_channel(f"127.0.0.1:{hub.port}") as channel:
            asked = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=10
            )
        return health_pb2.HealthCheckResponse.ServingStatus.Name(asked.status)

    with pytest.warns(UserWarning, match="without TLS"):
        hub = HubService(RUN, tmp_path / "hub.sqlite", 2, insecure=True)
    server = MetricsServer("127.0.0.1:0", hub.coordinator.status, hub.is_serving)
    try:
        assert probed() == (503, "NOT_SERVING\n")
        hub.start()
        assert probed() == (200, "SERVING\n")
        assert health() == health("sdiloco.Hub") == "SERVING"
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            health("another")
        seen = []
        tick, hub.coordinator.start = (
            hub.coordinator.start,
            lambda *_: seen.append(probed()),
        )  # the last act but one
        hub.close()
        tick(lambda event, to=None: None)
        assert seen == [(503, "NOT_SERVING\n")] == [probed()]
        with pytest.raises(grpc.RpcError):
            health()
    finally:
        server.close()


def test_the_health_of_a_hub_with_keys_is_told_to_holders_of_keys_only(
    world: World,
) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    bundle = load(world.keys / "viewer.bundle")
    port = world.start(sites=1).port
    request = health_pb2.HealthCheckRequest()
    options = [("grpc.ssl_target_name_override", host_of(RUN))]
    holder = grpc.ssl_channel_credentials(bundle.authority, bundle.key, bundle.certificate)
    for credentials in (holder, grpc.ssl_channel_credentials(bundle.authority), None):
        address = f"127.0.0.1:{port}"
        channel = (
            grpc.insecure_channel(address)
            if credentials is None
            else grpc.secure_channel(address, credentials, options)
        )
        with channel:
            stub = health_pb2_grpc.HealthStub(channel)
            if credentials is holder:
                assert (
                    stub.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
                )
                with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                    next(stub.Watch(request, timeout=10))
            else:
                with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                    stub.Check(request, timeout=10)


def test_the_doctor_reports_identity_run_distance_of_the_hub_and_obstacles(
    world: World,
) -> None:
    hub = world.start(sites=1)
    bundle = ["--keys", str(world.keys / "a.bundle")]

    def examined(*options: str, code: int = 0, port: int = hub.port) -> dict[str, Any]:
        """What it says as JSON, by the names of what was looked at."""
        said = ran("doctor", "--hub", f"127.0.0.1:{port}", "--seconds", "0.2", "--json", *options)
        told = json.loads(said.out)
        assert (said.code, told["ok"]) == (code, not code)
        return told | {finding["check"]: finding for finding in told["findings"]}

    with patch.object(server, "wall_clock", lambda: wall_clock() + 3600):
        told = examined(*bundle)
    assert told["clock"]["state"] == "slow"
    assert "the hub's clock is 3600 s ahead of the one here" in told["clock"]["found"]
    told = examined(*bundle)
    assert told["clock"]["state"] == "ok"
    assert f"site a in run {RUN}, valid until 20" in told["keys"]["found"]
    assert told["keys"]["found"].endswith("for 364 days")
    assert 0 < told["round_trip"] < 1
    # Loopback; bounded bytes.
    assert min(told["bits_per_second_to_hub"], told["bits_per_second_from_hub"]) > 1e6
    assert told["run"]["found"] == "not founded yet: 1 more sites are needed; here: none"
    own = init_keys(world.folder / "others", RUN)
    told = examined("--keys", str(own), code=1)
    assert "handshake" in told["hub"]["found"].lower()
    assert "another authority" in told["hub"]["fix"]
    told = examined("--keys", str(world.keys / "a.bundle"), "--run", "run-2", code=1)
    assert "These keys are for run 'run-1', not for run='run-2'" in told["findings"][-1]["found"]
    told = examined("--insecure", "--run", RUN, code=1)
    assert "a hub with keys refuses calls without" in told["hub"]["fix"]
    world.join("a")
    world.run(lambda: hub.coordinator.status()["founded"])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closed = listening.getsockname()[1]
    # With the keys of a site that trains, which goes on.
    told = examined("--hub", f"127.0.0.1:{closed}, 127.0.0.1:{hub.port}", *bundle)
    world.rounds(1)
    assert f"founded on run config {run_config(TERMS).key[:8]}" in told["run"]["found"]
    assert "2 tensors in 2 fragments, sync_every=8" in told["run_config"]["found"]
    assert told["status"]["run_config"]["settings"] == {"compression": "'none'"}
    assert told["reachability"]["state"] == "slow"
    assert f"127.0.0.1:{closed}: connection refused" in told["reachability"]["found"]
    assert told["disk"]["state"] == "ok"
    with patch.object(BlobStore, "free", 99):
        told = examined(*bundle)
    assert told["disk"]["state"] == "slow"
    # Two fragments with payloads of 16 bytes, of 50 rounds, and a state.
    state = sum(
        part.size for own in hub.coordinator._states.snapshots.values() for part in own.parts
    )
    needs = told["status"]["disk"]["still_needs"]
    rounds = [own["round"] for own in told["status"]["fragments"]]
    assert needs == 16 * sum(50 - round for round in rounds) + state
    assert (
        f"the hub has 99 bytes free, but the run will need {readable(needs)} more"
        in told["disk"]["found"]
    )
    hub.close()
    told = examined(*bundle, code=1)
    assert told["reachability"]["found"] == f"127.0.0.1:{hub.port}: connection refused"
    assert f"--listen 0.0.0.0:{hub.port}" in told["reachability"]["fix"]
    with pytest.warns(UserWarning, match="without TLS"):
        service = HubService(RUN, world.folder / "open.sqlite", 1, insecure=True)
    service.start()
    try:
        told = examined("--insecure", "--run", "run-2", code=1, port=service.port)
    finally:
        service.close()
    assert "this hub serves run 'run-1', not 'run-2'" in told["hub"]["found"]

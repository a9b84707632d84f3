"""The commands: a hub as a process that is killed and started again, its status, its metrics, the
doctor.
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
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from lightning_sdiloco.federation import server
from lightning_sdiloco.federation.keys import host_of, init_keys, load, wall_clock
from lightning_sdiloco.federation.server import HubService
from lightning_sdiloco.federation.store import BlobStore
from lightning_sdiloco.planning.units import readable
from lightning_sdiloco.tools.hub import SITE_METRICS, MetricsServer
from lightning_sdiloco.tools.status import printed
from tests.federation.hubs import TERMS, World, require_extra
from tests.federation.scripted import RUN, run_config
from tests.ranks import PATIENCE
from tests.tools.command import not_refused_with, ran, refused, told

SITE: dict[str, Any] = {
    "state": "follows",
    "incarnation": "0" * 16,
    "last_heartbeat": 0.42,
    "rounds_behind": 1,
    "share": 0.75,
    "late": 3,
    "lost_steps": 12.5,
    "lost_share": 0.031,
    "inner_lr": 0.0004,
    "inner_steps": 5210,
    "planned_steps": 10_000,
    "cosine": -0.31,
    "against": 13,
    "not_finite": 1,
    "too_long": 4,
    "wrong_buffers": 7,
    "refused_states": 5,
    "incarnations": 2,
    "bytes": 2_500_000,
    "bytes_per_second": 1_000_000,
}
GONE = SITE | {"state": "gone", "last_heartbeat": None, "rounds_behind": None, "share": 0.25}
FRAGMENT = {"round": 7, "open": True, "here": ["a"], "missing": ["b"], "ended": False}
STATUS: dict[str, Any] = {
    "run": "llm",
    "founded": True,
    "trouble": "there is no space left",
    "records": 14,
    "snapshots": [],
    "sites": {"a": SITE, "b": GONE},
    "fragments": [FRAGMENT, FRAGMENT | {"missing": []}],
}
FOUNDING = {"run": "llm", "founded": False, "trouble": None, "missing": 2, "here": ["a"]}
METRICS = {
    'sdiloco_records{run="llm"} 14.0',
    'sdiloco_trouble{run="llm"} 1.0',
    'sdiloco_site_state{run="llm",site="a",state="follows"} 1.0',
    'sdiloco_site_state{run="llm",site="b",state="gone"} 1.0',
    'sdiloco_site_state{run="llm",site="b",state="follows"} 0.0',
    'sdiloco_site_last_heartbeat_seconds{run="llm",site="a"} 0.42',
    'sdiloco_site_weight_share{run="llm",site="b"} 0.25',
    'sdiloco_site_late_total{run="llm",site="a"} 3.0',
    'sdiloco_site_lost_steps_total{run="llm",site="a"} 12.5',
    'sdiloco_site_too_long_total{run="llm",site="a"} 4.0',
    'sdiloco_site_wrong_buffers_total{run="llm",site="a"} 7.0',
    'sdiloco_site_refused_states_total{run="llm",site="a"} 5.0',
    'sdiloco_site_sent_bytes_total{run="llm",site="a"} 2.5e+06',
    'sdiloco_fragment_round{fragment="1",run="llm"} 7.0',
    'sdiloco_fragment_waits_for{fragment="0",run="llm",site="b"} 1.0',
}


class HubProcess(subprocess.Popen[str]):
    """``sdiloco hub`` in a process of its own, at which the sites of a world meet."""

    def __init__(self, world: World, *options: str) -> None:
        command = [sys.executable, "-m", "lightning_sdiloco.tools.cli", "hub", "--run", RUN]
        command += ["--keys", str(world.keys), "--listen", world.address]
        command += ["--ledger", str(world.folder / "hub.sqlite"), *options]
        super().__init__(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.greeting = self.read_line()
        world.port = int(self.greeting.split("port ")[1].split(".")[0])
        world.service = self  # type: ignore[assignment]

    def read_line(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline()

    def end(self, number: int) -> str:
        self.send_signal(number)
        return self.communicate(timeout=PATIENCE)[0]

    def close(self) -> None:
        if self.poll() is None:
            self.end(signal.SIGKILL)


def read_page(port: int, path: str, seconds: float = 10.0) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=seconds) as answer:
        return answer.read().decode()


def test_a_killed_hub_resumes_with_amended_terms_and_its_operator_ends_the_run(
    world: World,
) -> None:
    metrics = ["--metrics", "127.0.0.1:0"] if find_spec("prometheus_client") is not None else []
    hub = HubProcess(world, "--sites", "2", *metrics)
    assert "The hub is waiting for 2 sites to found the run" in hub.greeting
    if metrics:
        port = int(hub.read_line().split("port ")[1].split(".")[0])
        missing_sites = f'sdiloco_missing_sites{{run="{RUN}"}} 2.0'
        assert missing_sites in read_page(port, "metrics", 60)
    world.join("a", "b")
    for rounds in (1, 2, 3):
        world.rounds(rounds)
        if rounds == 2:
            output = told("hub", "amend", "--grace", "0.5", "--guard=0", *world.options_of("boss"))
            assert "grace=0.5, lease=2.0, quorum=1, guard=None" in output
            world.run(
                lambda: all(site.follower.terms.grace == 0.5 for site in world.sites.values())
            )
        for _ in range(3 * rounds):
            world.sites["a"].step()
        hub.end(signal.SIGKILL)
        # Killed at any moment: records that it had told are there, or a site would refuse it;
        # others are sent again.
        hub = HubProcess(world)
        assert "The run continues after" in hub.greeting
    world.more(2)
    # A hub that was started again learns from the next heartbeat of a site whether it follows.
    world.run(lambda: world.status()["sites"]["a"]["state"] == "follows")
    status = json.loads(told("status", "--json", *world.options_of("viewer")))
    assert status["fragments"][0]["round"] >= 5
    assert "follows" in told("status", *world.options_of("viewer"))
    terms = world.status()["run_config"]["terms"]
    assert (terms["grace"], terms["guard"], terms["rounds"]) == (0.5, None, None)
    assert world.join("c").follower.terms.sync_every == 8
    world.more(2)
    assert world.sites["c"].follower.terms.grace == 0.5
    cases = [
        (["amend", "--lease=-1", *world.options_of("boss")], "lease is not a finite number"),
        (["amend", "--quorum=0", *world.options_of("boss")], "quorum=0 is out of range"),
        (["amend", *world.options_of("boss")], "Specify at least one change"),
        (["amend", "--grace=1", *world.options_of("viewer")], "may not call amend"),
        (
            ["end", *world.options_of("viewer")],
            "may not call end: the role reader does not permit it",
        ),
    ]
    assert not_refused_with("hub", cases) == {}
    told("hub", "end", *world.options_of("boss"))
    world.run(lambda: all(site.follower.finished for site in world.sites.values()))
    world.require_agreement()
    for site in world.sites.values():
        site.connection.leave()
    assert "run the same command again" in hub.end(signal.SIGTERM)


def test_missing_options_files_and_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new = ["hub", "--run", "r", "--insecure", "--sites", "1"]
    for command, message in (
        (["hub"], "The name of the run is missing"),
        (["hub", "--run", "r", "--insecure", "--ledger", "none.sqlite"], "does not exist"),
        ([*new, "--quorum", "no.Core"], "quorum='no.Core' cannot be imported"),
        ([*new, "--ledger", "etcd://a:2379/r"], "but the ledger must be a file"),
        (["status"], "The hub's address is missing"),
        (
            ["status", "--hub", "/mnt/run", "--run", "r", "--insecure"],
            "hub='/mnt/run' is a folder or bucket",
        ),
        (
            ["doctor", "--hub", "s3://bucket/run", "--insecure"],
            "hub='s3://bucket/run' is a folder or bucket",
        ),
        (["doctor", "--hub", "127.0.0.1:1"], "Pass the keys of a site"),
        (["hub", "end", "--hub", "127.0.0.1:1"], "The name of the run is missing"),
    ):
        assert message in refused(*command)
        assert not os.listdir(tmp_path)
    pytest.importorskip("grpc")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    options = ["--listen", "127.0.0.1:0", "--ledger", "hub.sqlite", "--metrics", "127.0.0.1:0"]
    with pytest.warns(UserWarning, match="without TLS"):
        ended = ran(*new, *options)
    assert "Metrics require prometheus_client" in ended.err
    assert ended.code


def test_the_table_of_the_status_names_troubles_sites_and_their_numbers() -> None:
    earlier = SITE | {"inner_steps": None, "planned_steps": None}
    table = printed(STATUS | {"sites": {"a": SITE, "b": GONE, "c": earlier}})
    for entry in (
        "5,210",
        "10,000",
        "14 records",
        "no space left",
        "0.4 s",
        "75%",
        "2.5 MB",
        "1 MB/s",
        "gone",
    ):
        assert entry in table
    assert "sites still missing: 2; here: a" in printed(FOUNDING)


def test_every_metric_of_a_site_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    for kind, name, _ in SITE_METRICS.values():
        suffix = "_total" if kind == "counter" else ""
        assert f"`sdiloco_site_{name}{suffix}`" in page


def send_as_stranger(port: int, request: bytes) -> None:
    stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
    with stranger, suppress(ConnectionError):
        stranger.sendall(request)
        stranger.shutdown(socket.SHUT_WR)
        stranger.recv(1 << 16)


def scraped(read_status: Callable[[], dict[str, Any]], *strangers: bytes) -> list[str]:
    """The lines that a Prometheus server reads with its second request, after requests of
    strangers.
    """
    server = MetricsServer("127.0.0.1:0", read_status, lambda: True)
    try:
        for request in strangers:
            send_as_stranger(server.port, request)
        for _ in range(2):
            page = read_page(server.port, "metrics")
    finally:
        server.close()
    return page.splitlines()


def test_the_table_and_prometheus_match_the_status_and_strangers_read_no_more() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    read_status = Mock(return_value=STATUS)
    lines = scraped(read_status)
    assert set(lines) >= METRICS
    heartbeat_of_b = 'sdiloco_site_last_heartbeat_seconds{run="llm",site="b"}'
    assert not [line for line in lines if line.startswith(heartbeat_of_b)]
    assert any(line.startswith("process_resident_memory_bytes") for line in lines)
    assert read_status.call_count == 1, "frequent requests do not keep the hub from its work"
    post = b"POST /metrics HTTP/1.0\r\nContent-Length: 3\r\n\r\nend"
    strangers = (b"GET /evict?who=a HTTP/1.0\r\n\r\n", post, random.randbytes(4096))
    lines = scraped(lambda: FOUNDING, *strangers)
    assert 'sdiloco_missing_sites{run="llm"} 2.0' in lines
    with pytest.raises(ValueError, match="not an address"):
        MetricsServer("9400", lambda: STATUS, lambda: True)


def test_a_hub_answers_probes_truthfully(tmp_path: Path) -> None:
    require_extra()
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    def probed() -> tuple[int, str]:
        try:
            return 200, read_page(server.port, "healthz")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def health(service: str = "") -> str:
        request = health_pb2.HealthCheckRequest(service=service)
        with grpc.insecure_channel(f"127.0.0.1:{hub.port}") as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

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
        probes_at_close = []
        # The last act of a closing hub but one.
        last_act = Mock(side_effect=lambda *_: probes_at_close.append(probed()))
        with patch.object(hub.coordinator, "start", last_act):
            hub.close()
        hub.coordinator.start(lambda event, to=None: None)
        assert probes_at_close == [(503, "NOT_SERVING\n")]
        assert probed() == (503, "NOT_SERVING\n")
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
    world.start(sites=1)
    request = health_pb2.HealthCheckRequest()
    options = [("grpc.ssl_target_name_override", host_of(RUN))]
    holder = grpc.ssl_channel_credentials(bundle.authority, bundle.key, bundle.certificate)
    stranger = grpc.ssl_channel_credentials(bundle.authority)
    with grpc.secure_channel(world.address, holder, options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(request, timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            next(stub.Watch(request, timeout=10))
    for channel in (
        grpc.secure_channel(world.address, stranger, options),
        grpc.insecure_channel(world.address),
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        with channel, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            stub.Check(request, timeout=10)


def examined(*options: str, code: int = 0) -> dict[str, Any]:
    """The report of the doctor, with its findings by the names of their checks."""
    ended = ran("doctor", "--seconds", "0.2", "--json", *options)
    report = json.loads(ended.out)
    assert ended.code == code
    assert report["ok"] is (code == 0)
    return report | {finding["check"]: finding for finding in report["findings"]}


def test_the_doctor_reports_identity_run_distance_of_the_hub_and_obstacles(
    world: World,
) -> None:
    hub = world.start(sites=1)
    options = world.options_of("a")
    at_hub = ["--hub", world.address]
    with patch.object(server, "wall_clock", lambda: wall_clock() + 3600):
        report = examined(*options)
    assert report["clock"]["state"] == "slow"
    assert "the hub's clock is 3600 s ahead of the one here" in report["clock"]["found"]
    report = examined(*options)
    assert report["clock"]["state"] == "ok"
    assert f"site a in run {RUN}, valid until 20" in report["keys"]["found"]
    assert report["keys"]["found"].endswith("for 364 days")
    assert 0 < report["round_trip"] < 1
    # Loopback; bounded bytes.
    assert report["bits_per_second_to_hub"] > 1e6
    assert report["bits_per_second_from_hub"] > 1e6
    assert report["run"]["found"] == "not founded yet: sites still missing: 1; here: none"
    foreign = init_keys(world.folder / "others", RUN)
    report = examined(*at_hub, "--keys", str(foreign), code=1)
    assert "handshake" in report["hub"]["found"].lower()
    assert "a different authority" in report["hub"]["fix"]
    report = examined(*options, "--run", "run-2", code=1)
    assert "These keys are for run 'run-1', not for run='run-2'" in report["findings"][-1]["found"]
    report = examined(*at_hub, "--insecure", "--run", RUN, code=1)
    assert "A hub with keys refuses calls without" in report["hub"]["fix"]
    world.join("a")
    world.run(lambda: hub.coordinator.status()["founded"])
    check_report_of_a_running_hub(world, options)
    hub.close()
    report = examined(*options, code=1)
    assert report["reachability"]["found"] == f"{world.address}: connection refused"
    assert f"--listen 0.0.0.0:{hub.port}" in report["reachability"]["fix"]


def check_report_of_a_running_hub(world: World, options: list[str]) -> None:
    """Examines it with the keys of a site that trains, and continues."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed_port = listener.getsockname()[1]
    report = examined(*options, "--hub", f"127.0.0.1:{closed_port}, {world.address}")
    world.rounds(1)
    assert f"founded on run config {run_config(TERMS).key[:8]}" in report["run"]["found"]
    assert "2 tensors in 2 fragments, sync_every=8" in report["run_config"]["found"]
    assert report["status"]["run_config"]["settings"] == {"compression": "'none'"}
    assert report["reachability"]["state"] == "slow"
    assert f"127.0.0.1:{closed_port}: connection refused" in report["reachability"]["found"]
    assert report["disk"]["state"] == "ok"
    with patch.object(BlobStore, "free", 99):
        report = examined(*options)
    assert report["disk"]["state"] == "slow"
    # Two fragments with payloads of 16 bytes, of 52 rounds, and a state.
    snapshots = world.service.coordinator._states.snapshots.values()
    state = sum(part.size for snapshot in snapshots for part in snapshot.parts)
    payloads = sum(52 - fragment["round"] for fragment in report["status"]["fragments"])
    needs = report["status"]["disk"]["still_needs"]
    assert needs == 16 * payloads + state
    missing = f"the hub has 99 bytes free, but the run will need another {readable(needs)}"
    assert missing in report["disk"]["found"]


def test_the_doctor_names_the_run_of_a_hub_without_keys(tmp_path: Path) -> None:
    require_extra()
    with pytest.warns(UserWarning, match="without TLS"):
        service = HubService(RUN, tmp_path / "open.sqlite", 1, insecure=True)
    service.start()
    hub = f"127.0.0.1:{service.port}"
    try:
        report = examined("--hub", hub, "--insecure", "--run", "run-2", code=1)
    finally:
        service.close()
    assert "this hub serves run 'run-1', not 'run-2'" in report["hub"]["found"]

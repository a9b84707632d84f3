"""Metrics for Prometheus: what a hub tells whoever asks its port for them."""

import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_sdiloco.tools.cli import main
from lightning_sdiloco.tools.hub import SITE_METRICS, MetricsServer

SITE = {"state": "follows", "life": "0" * 16, "last_beat": 0.42, "rounds_behind": 1, "share": 0.75, "late": 3}
SITE |= {"lives": 2, "bytes": 2_500_000, "bytes_per_second": 1_000_000}
GONE = SITE | {"state": "gone", "last_beat": None, "rounds_behind": None, "share": 0.25}
FRAGMENT = {"round": 7, "open": True, "here": ["a"], "missing": ["b"], "ended": False}
STATUS: dict[str, Any] = {
    **{"run": "llm", "founded": True, "trouble": "no space", "records": 14, "anchors": []},
    **{"sites": {"a": SITE, "b": GONE}, "fragments": [FRAGMENT, FRAGMENT | {"missing": []}]},
}
FOUNDING = {"run": "llm", "founded": False, "trouble": None, "missing": 2, "here": ["a"]}


def scraped(status: Callable[[], dict[str, Any]]) -> list[str]:
    """What a Prometheus server reads, the second time that it asks."""
    server = MetricsServer("127.0.0.1:0", status)
    try:
        for _ in range(2):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
    finally:
        server.close()
    return text.splitlines()


def test_a_prometheus_server_reads_what_the_status_says() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    asked = []

    def status() -> dict[str, Any]:
        asked.append(1)
        return STATUS

    told = scraped(status)
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
    assert 'sdiloco_missing_sites{run="llm"} 2.0' in scraped(lambda: FOUNDING)
    with pytest.raises(ValueError, match="no address"):
        MetricsServer("9400", status)


def test_every_metric_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    for kind, name, _ in SITE_METRICS.values():
        assert f"`sdiloco_site_{name}{'_total' if kind == 'counter' else ''}`" in page


def test_without_the_package_a_hub_with_metrics_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("grpc")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    ledger = str(tmp_path / "hub.sqlite")
    with pytest.raises(SystemExit), pytest.warns(UserWarning, match="without TLS"):
        main(
            ["hub", "--run", "r", "--insecure", "--sites", "1", "--listen", "127.0.0.1:0", "--ledger", ledger]
            + ["--metrics", "127.0.0.1:0"]
        )
    assert "Metrics need prometheus_client" in capsys.readouterr().err

"""What watches a run: a real Prometheus scrapes a hub and a site, and answers what the dashboard
and the rules ask.
"""

import json
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from contextlib import closing, suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from lightning_sdiloco.tools.hub import MetricsServer
from tests.federation.hubs import World, until
from tests.federation.scripted import RUN
from tests.fits import SHORT, fit, module
from tests.ranks import run_processes

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
sys.path.append(str(FOLDER))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def require(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install prometheus")


def test_the_dashboard_has_panels_that_do_not_overlap_and_each_asks_for_something() -> None:
    panels, (source, *variables) = DASHBOARD["panels"], DASHBOARD["templating"]["list"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert (source["type"], [own["name"] for own in variables]) == ("datasource", ["run", "site"])
    assert (
        len({panel["id"] for panel in panels})
        == len({panel["title"] for panel in panels})
        == len(panels)
    )
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert (
            len({target["refId"] for target in panel["targets"] if target["expr"]})
            == len(panel["targets"])
            > 0
        )
    squares = [
        (own["x"], own["y"], own["x"] + own["w"], own["y"] + own["h"])
        for own in (p["gridPos"] for p in panels)
    ]
    assert max(right for _, _, right, _ in squares) == 24
    for one, other in combinations(squares, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def test_each_alert_comes_when_it_should_and_none_when_a_run_has_ended(tmp_path: Path) -> None:
    require("promtool")
    for check in (["config", FOLDER / "prometheus.yml"], ["rules", FOLDER / "rules.yaml"]):
        subprocess.run(["promtool", "check", *check], check=True, timeout=60)
    site = 'run="r",site="a"'
    # All is well for 20 minutes, then nothing is: values of each minute, in the notation of
    # promtool.
    troubles = {
        'up{job="hub"}': "1x20 0x60",
        'sdiloco_trouble{run="r"}': "0x20 1x60",
        'sdiloco_fragment_round{run="r",fragment="0"}': "0+1x20 20x60",
        'sdiloco_site_state{run="r",site="b",state="follows"}': "1x80",
        f'sdiloco_site_state{{{site},state="silent"}}': "0x20 1x60",
        f"sdiloco_site_rounds_behind{{{site}}}": "1x20 9x60",
        **{
            f"sdiloco_site_{why}_total{{{site}}}": "0x20 1+1x60"
            for why in ("late", "not_finite", "too_long")
        },
        f"sdiloco_exposed_wait_ms_total{{{site}}}": "0+1000x20 20000+30000x60",
    }
    ended = {**troubles, 'sdiloco_site_state{run="r",site="b",state="follows"}': "1x20 0x60"}
    of_runs = {"RoundStuck", "SiteGone"}

    def samples(alerts: set[str]) -> list[dict[str, Any]]:
        return [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in alerts]

    def case(series: dict[str, str], firing: dict[int, set[str]]) -> dict[str, Any]:
        expr = 'count by (alertname) (ALERTS{alertstate="firing"})'
        samples = {
            at: [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in own]
            for at, own in firing.items()
        }
        asked = [
            {"expr": expr, "eval_time": f"{at}m", "exp_samples": own} for at, own in samples.items()
        ]
        given = [{"series": name, "values": values} for name, values in series.items()]
        return {"interval": "1m", "input_series": given, "promql_expr_test": asked}

    names = {rule["alert"] for rule in RULES}
    cases = [case(troubles, {20: set(), 60: names}), case(ended, {20: set(), 60: names - of_runs})]
    tests = {
        "rule_files": [str(FOLDER / "rules.yaml")],
        "evaluation_interval": "1m",
        "tests": cases,
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    command = ["promtool", "test", "rules", tmp_path / "tests.yaml"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Prometheus(subprocess.Popen[bytes]):
    """The server with the configuration of the example, which looks at other ports, and every
    second.
    """

    def __init__(self, folder: Path, hub: int, site: int) -> None:
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / "rules.yaml")]
        for job, port in zip(config["scrape_configs"], (hub, site), strict=True):
            job["static_configs"] = [{**job["static_configs"][0], "targets": [f"127.0.0.1:{port}"]}]
        config["scrape_configs"][1]["static_configs"][0]["labels"]["run"] = RUN
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.port = free_port()
        command = [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
        ]
        command.append(f"--web.listen-address=127.0.0.1:{self.port}")
        super().__init__(command, stderr=subprocess.DEVNULL)

    def asked(self, what: str, **about: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(about)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, expr: str) -> list[float]:
        return [float(own["value"][1]) for own in self.asked("query", query=expr)["result"]]


def test_a_real_prometheus_answers_every_query_of_the_dashboard(keys: Path, tmp_path: Path) -> None:
    require("prometheus")
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = {text.replace("$run", RUN).replace("$site", ".*"): text for text in queries}
    # The ranks are forked, which gRPC bears only while none of its threads are at work.
    with closing(World(tmp_path, keys)) as world:
        world.found("a", "b", rounds=2)
        status = world.service.coordinator.status()
    hub = MetricsServer("127.0.0.1:0", lambda: status, lambda: True)
    port = free_port()
    server = Prometheus(tmp_path, hub.port, port)

    def run(rank: int, world_size: int) -> Any:
        from prometheus_logger import PrometheusLogger

        def unanswered() -> list[str]:
            return [expr for expr in asked if not server.values(expr)]

        logger = {"logger": [PrometheusLogger(f"127.0.0.1:{port}")], "log_every_n_steps": 5}
        # Messages that are so long that they are waited for, which tells how fast the link is.
        net = nn.Sequential(nn.Linear(5, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 3))
        report = fit(
            rank, world_size, 2, 60, SHORT, make=partial(module, net=net), trainer_choices=logger
        )["report"]
        if rank == 0:
            with suppress(AssertionError):  # it says which are left
                until(lambda: not unanswered(), 60.0)
            return unanswered(), report, server.values("sdiloco_landings_total")
        return None

    try:
        left, report, landings = run_processes(run, 2, timeout=200)[0]
        assert left == []
        assert landings == [report["landings"]]
        rounds = [own["round"] for own in status["fragments"]]
        assert sorted(server.values("sdiloco_fragment_round")) == sorted(rounds)
        told = [rule for group in server.asked("rules")["groups"] for rule in group["rules"]]
        assert [(rule["name"], rule["health"]) for rule in told] == [
            (rule["alert"], "ok") for rule in RULES
        ]
    finally:
        server.kill()
        server.wait()
        hub.close()

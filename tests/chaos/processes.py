"""The processes of a federation under faults: a Trainer that goes on from its newest checkpoint,
and a hub.

Both write down what happens to them. `python -m tests.chaos.processes FILE` is the one or the
other: its arguments are pickled in the file.
"""

import hashlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.links import enter
from lightning_sdiloco import Federation, StreamingDiLoCoStrategy
from lightning_sdiloco.federation.client import HubClient
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.follower import Follower, MergeAction
from lightning_sdiloco.federation.keys import Peer
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.federation.remote import HubConnection
from lightning_sdiloco.federation.server import HubService
from lightning_sdiloco.federation.store import SQLiteLedger
from tests.chaos.notes import Notebook
from tests.large.models import FEATURES, TARGETS, wide

RUN = "run"
BATCH = 8
SYNC_EVERY = 20
OVERLAP_STEPS = 2
SETTINGS: dict[str, Any] = {
    "sync_every": SYNC_EVERY,
    "overlap_steps": OVERLAP_STEPS,
    "fragments": "strided:2",
}


@dataclass(frozen=True)
class Place:
    """Where a process runs, and what it is told."""

    folder: Path  # of notes, logs, keys and checkpoints
    hub: str  # its address and port
    port: int  # for the ranks of the site among themselves
    seconds: float  # that an inner step takes at least
    steps: int = -1  # after which the site ends; -1: when the run does
    namespace: str | None = None
    choices: Mapping[str, Any] = field(
        default_factory=lambda: {"lease": 2.0}
    )  # more of the federation

    def enter(self, name: str) -> Notebook:
        """Moves this process there, and its output into a file; returns what it writes notes in."""
        log = os.open(self.folder / f"{name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if self.namespace is not None:
            enter(self.namespace)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        return Notebook(self.folder / f"{name}.jsonl")


def watch(
    owner: Any, name: str, before: Callable[..., Any] | None = None, after: Any = None
) -> None:
    """Calls something before a method, with its self and arguments, or after it, with its answer
    besides.
    """
    method = getattr(owner, name)

    @wraps(method)
    def watched(self: Any, *arguments: Any, **choices: Any) -> Any:
        if before is not None:
            before(self, *arguments)
        answer = method(self, *arguments, **choices)
        if after is not None:
            after(answer, self, *arguments)
        return answer

    setattr(owner, name, watched)


# A site


class Net(pl.LightningModule):
    """220,000 parameters in four layers, and inner steps that sleep for some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.becomes_wrong = False
        self.net = wide()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        time.sleep(self.seconds)
        if self.becomes_wrong:
            self.becomes_wrong = False
            for parameter in self.parameters():
                nn.init.constant_(parameter, 30.0)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Notes(Callback):
    """Writes down every inner step, and how long training stood still in it."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._began = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        # The engine is there before the first batch.
        if self._began:
            return
        engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
        follower = engine.loop.follower
        make_step = engine.step

        def step(**choices: Any) -> Any:
            lost = stolen()
            began = time.monotonic()
            delayed = waited_for_processor()
            landings = make_step(**choices)
            now = time.monotonic()
            self._notebook.write(
                "step",
                step=engine.inner_steps,
                took=now - self._began,
                stalled=now - began,
                delayed=waited_for_processor() - delayed,
                # A thread may also wait for one of this process that runs on the other processor.
                stolen=max(after - before for before, after in zip(lost, stolen(), strict=True)),
                rounds=[own.applied.round for own in follower.fragments],
                lag=follower.lag,
                reachable=follower.reachable,
            )
            self._began = now
            return landings

        self._notebook.write("training", step=engine.inner_steps)
        self._began = time.monotonic()
        engine.step = step


def waited_for_processor() -> float:
    """The seconds that the calling thread has been ready to run, and was not let to."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def stolen() -> list[float]:
    """The seconds that the host has given each processor of this virtual machine to others, as
    they wanted.
    """
    lines = [
        line.split()
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("cpu")
    ]
    return [int(fields[8]) / os.sysconf("SC_CLK_TCK") for fields in lines[1:]]


def note_follower(notebook: Notebook) -> None:
    """Makes the follower of this process write down what lands, and that it has lost the hub."""

    def land(
        landing: MergeAction, follower: Follower, record: Record, before: int, after: int
    ) -> None:
        about = {"fragment": record.fragment, "round": record.round, "key": record.key}
        out = record.without(follower.site)
        notebook.write("land", **about, digest=after, how=out.reason if out else landing.value)

    def adopt(landings: dict[int, Any], follower: Follower, *_: Any) -> None:
        taken = [follower.fragments[index] for index in landings]
        states = [[own.fragment, own.applied.round, own.applied.key, own.digest] for own in taken]
        notebook.write("adopt", states=states)

    watch(Follower, "land", after=land)
    watch(Follower, "adopt", after=adopt)
    watch(Follower, "lose", after=lambda *_: notebook.write("lose"))


def die_at_stages(name: str, folder: Path) -> None:
    """Makes this process kill itself at the stage of a flight for which somebody has left a
    file.
    """

    def die(stage: str) -> None:
        if (folder / f"{name}.kill_{stage}").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    messages = HubClient._messages

    def sent(self: HubClient, header: dict[str, Any], *about: Any) -> Iterator[bytes]:
        for number, message in enumerate(messages(self, header, *about)):
            if number and header["about"]["kind"] == "payload":
                die("in_upload")
            yield message

    HubClient._messages = sent  # type: ignore[method-assign]
    watch(HubConnection, "contribute", before=lambda *_: die("before_send"))
    watch(
        HubConnection,
        "_call",
        after=lambda _, self, call, *more: call == "contribute" and die("before_record"),
    )
    watch(HubClient, "get_small", before=lambda *_: die("in_download"))
    watch(HubClient, "_size_of", after=lambda *_: die("in_download"))
    watch(Follower, "land", after=lambda *_: die("at_landing"))


def federation_of(site: str, place: Place) -> Federation:
    return Federation(
        hub=place.hub, run=RUN, site=site, keys=place.folder / "keys", **place.choices
    )


def trainer_of(
    place: Place, folder: Path, strategy: Any, callbacks: Sequence[Callback], **choices: Any
) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    own = {
        "max_steps": place.steps,
        "max_epochs": -1,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(accelerator="cpu", strategy=strategy, **quiet, **own, **choices)


def samples_of(site: str, batch: int = BATCH) -> DataLoader[Any]:
    """Batches of a site, whose samples are its own."""
    generator = torch.Generator().manual_seed(sum(map(ord, site)))
    samples = TensorDataset(
        *(torch.randn(512, width, generator=generator) for width in (FEATURES, TARGETS))
    )
    warnings.filterwarnings("ignore", ".*num_workers.*")
    return DataLoader(samples, batch_size=batch)


def train(name: str, place: Place) -> None:
    """Trains a site, from its newest checkpoint on."""
    notebook = place.enter(name)
    os.environ["MASTER_PORT"] = str(place.port)
    notebook.write("up")
    note_follower(notebook)
    die_at_stages(name, place.folder)
    pl.seed_everything(0)
    last = place.folder / name / "last.ckpt"
    checkpoint = ModelCheckpoint(
        dirpath=last.parent, save_last=True, every_n_train_steps=25, save_top_k=0
    )
    strategy = StreamingDiLoCoStrategy(federation=federation_of(name, place), **SETTINGS)
    trainer = trainer_of(place, last.parent, strategy, [Notes(notebook), checkpoint], devices=1)
    module = Net(place.seconds)
    signal.signal(signal.SIGUSR2, lambda *_: setattr(module, "becomes_wrong", True))
    # What a job of SLURM has saved on a signal is found by itself.
    goes_on = last.exists() and not [*last.parent.glob("hpc_ckpt*")]
    trainer.fit(module, samples_of(name), ckpt_path=str(last) if goes_on else None)
    outer = hashlib.sha256()
    for parameter in module.parameters():
        outer.update(parameter.detach().numpy().tobytes())
    most = max(float(parameter.detach().abs().max()) for parameter in module.parameters())
    notebook.write("ended", outer=outer.hexdigest(), most=most)


# The hub


def serve(sites: int, place: Place, refound: bool = False) -> None:
    """Serves a run that so many sites found, from what is on its disk, until it is killed; SIGUSR1
    ends the run.
    """
    notebook = place.enter("hub")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    def hello(_: Coordinator, peer: Peer, *more: Any) -> None:
        if peer.role == "site":
            notebook.write("hello", site=peer.name, incarnation=peer.incarnation)

    def append(_: Any, self: SQLiteLedger, seq: int, text: bytes, *notes: Any) -> None:
        record = Record.from_bytes(text)
        # Once it is durable: who is killed before closes the round anew.
        counted = [[own.site, own.incarnation, own.weight] for own in record.counted]
        notebook.write(
            "append", fragment=record.fragment, round=record.round, key=record.key, counted=counted
        )

    watch(Coordinator, "hello", before=hello)
    watch(SQLiteLedger, "append", after=append)
    port = place.hub.rpartition(":")[2]
    ledger = place.folder / "hub.sqlite"
    keys = place.folder / "keys"
    service = HubService(
        RUN, ledger, sites=sites, listen=f"0.0.0.0:{port}", keys=keys, refound=refound
    )
    ends = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: ends.set())
    service.start()
    notebook.write("up")
    ends.wait()
    service.coordinator.end()
    while True:
        signal.pause()


if __name__ == "__main__":
    told = pickle.loads(Path(sys.argv[1]).read_bytes())
    (train if isinstance(told[0], str) else serve)(*told)

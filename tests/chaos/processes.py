"""The processes of a federation under faults: a Trainer that resumes from its newest checkpoint,
and a hub.

Both write notes of what happens to them. `python -m tests.chaos.processes FILE` runs one of them,
with the arguments that are pickled in the file.
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
from operator import sub
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
    "overlap_steps": OVERLAP_STEPS,
    "fragments": "strided:2",
}


@dataclass(frozen=True)
class Place:
    """The place of a process, and how it runs there."""

    folder: Path  # of notes, logs, keys and checkpoints
    hub: str  # its address and port
    port: int  # for the ranks of the site among themselves
    seconds: float  # that an inner step takes at least
    steps: int = -1  # after which the site ends; -1: when the run does
    namespace: str | None = None
    # more arguments of the federation
    choices: Mapping[str, Any] = field(default_factory=lambda: {"lease": 2.0})
    sync_every: int = SYNC_EVERY

    def enter(self, name: str) -> Notebook:
        """Moves this process there, and its output into a file; returns its notebook."""
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
    """Calls a function before a method, with its self and arguments, or after it, with its answer
    first.
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
        # The engine exists before the first batch.
        if self._began:
            return
        engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
        follower = engine.loop.follower
        make_step = engine.step

        def step(**choices: Any) -> Any:
            stolen_before = stolen()
            began = time.monotonic()
            delayed_before = waited_for_processor()
            landings = make_step(**choices)
            now = time.monotonic()
            stolen_seconds = map(sub, stolen(), stolen_before)
            self._notebook.write(
                "step",
                step=engine.inner_steps,
                took=now - self._began,
                stalled=now - began,
                delayed=waited_for_processor() - delayed_before,
                # A thread may also wait for one of this process that runs on the other processor.
                stolen=max(stolen_seconds),
                rounds=[fragment.applied.round for fragment in follower.fragments],
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
    ticks_a_second = os.sysconf("SC_CLK_TCK")
    _, *lines = Path("/proc/stat").read_text().splitlines()  # the first is of all processors
    processors = [line.split() for line in lines if line.startswith("cpu")]
    return [int(fields[8]) / ticks_a_second for fields in processors]


def note_follower(notebook: Notebook) -> None:
    """Makes the follower of this process write down what lands, and that it has lost the hub."""

    def land(
        landing: MergeAction, follower: Follower, record: Record, before: int, after: int
    ) -> None:
        exclusion = record.without(follower.site)
        notebook.write(
            "land",
            fragment=record.fragment,
            round=record.round,
            key=record.key,
            digest=after,
            how=exclusion.reason if exclusion else landing.value,
        )

    def adopt(landings: dict[int, Any], follower: Follower, *_: Any) -> None:
        states = []
        for index in landings:
            fragment = follower.fragments[index]
            applied = fragment.applied
            states.append([fragment.fragment, applied.round, applied.key, fragment.digest])
        notebook.write("adopt", states=states)

    watch(Follower, "land", after=land)
    watch(Follower, "adopt", after=adopt)
    watch(Follower, "lose", after=lambda *_: notebook.write("lose"))


def die_at_stages(name: str, folder: Path) -> None:
    """Makes this process kill itself at the stage of a flight for which there is a file."""

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

    def answered(answer: Any, connection: HubConnection, call: str, *_: Any) -> None:
        if call == "contribute":
            die("before_record")

    watch(HubConnection, "contribute", before=lambda *_: die("before_send"))
    watch(HubConnection, "_call", after=answered)
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
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=place.steps,
        max_epochs=-1,
        default_root_dir=folder,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **choices,
    )


def samples_of(site: str, batch: int = BATCH) -> DataLoader[Any]:
    """Batches of a site, whose samples are its own."""
    generator = torch.Generator().manual_seed(sum(map(ord, site)))
    inputs = torch.randn(512, FEATURES, generator=generator)
    targets = torch.randn(512, TARGETS, generator=generator)
    warnings.filterwarnings("ignore", ".*num_workers.*")
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch)


def train(name: str, place: Place) -> None:
    """Trains a site, from its newest checkpoint if there is one."""
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
    strategy = StreamingDiLoCoStrategy(
        federation=federation_of(name, place), **SETTINGS, sync_every=place.sync_every
    )
    trainer = trainer_of(place, last.parent, strategy, [Notes(notebook), checkpoint], devices=1)
    module = Net(place.seconds)
    signal.signal(signal.SIGUSR2, lambda *_: setattr(module, "becomes_wrong", True))
    # Lightning finds by itself the checkpoint that a job of SLURM saved on a signal.
    saved_on_signal = any(last.parent.glob("hpc_ckpt*"))
    resumes = last.exists() and not saved_on_signal
    trainer.fit(module, samples_of(name), ckpt_path=str(last) if resumes else None)
    outer = hashlib.sha256()
    largest = []
    for parameter in module.parameters():
        values = parameter.detach()
        outer.update(values.numpy().tobytes())
        largest.append(float(values.abs().max()))
    notebook.write("ended", outer=outer.hexdigest(), most=max(largest))


# The hub


def note_hub(notebook: Notebook) -> None:
    """Makes the hub of this process write down each site that says hello, and each record."""

    def hello(_: Coordinator, peer: Peer, *more: Any) -> None:
        if peer.role == "site":
            notebook.write("hello", site=peer.name, incarnation=peer.incarnation)

    def append(_: Any, ledger: SQLiteLedger, seq: int, text: bytes, *notes: Any) -> None:
        record = Record.from_bytes(text)
        # Noted once it is durable: a hub that is killed before closes the round again.
        notebook.write(
            "append",
            fragment=record.fragment,
            round=record.round,
            key=record.key,
            counted=[[entry.site, entry.incarnation, entry.weight] for entry in record.counted],
        )

    watch(Coordinator, "hello", before=hello)
    watch(SQLiteLedger, "append", after=append)


def serve(sites: int, place: Place, refound: bool = False) -> None:
    """Serves a run that so many sites found, with the state on its disk, until it is killed;
    SIGUSR1 ends the run.
    """
    notebook = place.enter("hub")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    note_hub(notebook)
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
    arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    is_site = isinstance(arguments[0], str)
    (train if is_site else serve)(*arguments)

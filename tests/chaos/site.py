"""A site as a process: a Trainer that goes on from its newest checkpoint, and writes down what happens to it."""

import hashlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from lightning_sdiloco.federation import Follower, Record, Welcome
from lightning_sdiloco.hub import HubClient, HubConnection
from tests.chaos.net import BATCH, OVERLAP_STEPS, SYNC_EVERY, network, samples
from tests.chaos.notes import Notebook, stolen, waited_for_processor

RUN = "run"


@dataclass(frozen=True)
class Place:
    """Where a process runs, and what it is told.

    Attributes:
        folder: Where notes, logs, keys and checkpoints are.
        hub: Address and port of the hub.
        port: For the ranks of the site among themselves.
        seconds: That an inner step takes at least.
        steps: After which the site ends; -1: when the run does.
        namespace: The network namespace, if it is in one.
        lease: That of the charter.
    """

    folder: Path
    hub: str
    port: int
    seconds: float
    steps: int = -1
    namespace: str | None = None
    lease: float = 2.0

    def enter(self, name: str) -> None:
        """Moves this process there, and its output into a file."""
        log = os.open(self.folder / f"{name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if self.namespace is not None:
            enter(self.namespace)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)


class Net(pl.LightningModule):
    """220,000 parameters, and inner steps that take some time.

    Args:
        seconds: How long a step sleeps.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.net = network()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Returns the loss of a batch, late."""
        time.sleep(self.seconds)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the inner optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Notes(Callback):
    """Writes down every inner step, and how long training stood still in it.

    Args:
        notebook: Where to.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._began = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        """Begins to look at the engine, which is there before the first batch."""
        if not self._began:
            self._look_at(trainer.strategy.engine)  # type: ignore[attr-defined]

    def _look_at(self, engine: Any) -> None:
        follower, make_step = engine.loop.follower, engine.step

        def step(**choices: Any) -> Any:
            lost, began, delayed = stolen(), time.monotonic(), waited_for_processor()
            landings = make_step(**choices)
            now = time.monotonic()
            delayed = waited_for_processor() - delayed
            # A thread may also wait for one of this process that runs on the other processor.
            lost_most = max(after - before for before, after in zip(lost, stolen(), strict=True))
            self._notebook.write(
                "step",
                step=engine.inner_steps,
                took=now - self._began,
                stalled=now - began,
                delayed=delayed,
                stolen=lost_most,
                rounds=[own.applied.round for own in follower.fragments],
                lag=follower.lag,
                reachable=follower.reachable,
                follows=follower.follows,
            )
            self._began = now
            return landings

        self._notebook.write("training", step=engine.inner_steps, lag=follower.lag)
        self._began = time.monotonic()
        engine.step = step


def _noted(notebook: Notebook) -> None:
    """Makes the follower of this process write down what it hears, and what lands."""

    def after(name: str, told: Callable[..., dict[str, Any] | None]) -> None:
        method = getattr(Follower, name)

        @wraps(method)
        def noted(self: Follower, *arguments: Any) -> Any:
            answer = method(self, *arguments)
            if (about := told(self, answer, *arguments)) is not None:
                notebook.write(name, **about)
            return answer

        setattr(Follower, name, noted)

    def landed(_: Follower, landing: Any, record: Record, before: int, after: int) -> dict[str, Any]:
        how = landing.value
        return {"fragment": record.fragment, "round": record.round, "key": record.key, "digest": after, "how": how}

    def adopted(follower: Follower, landings: dict[int, Any], *_: Any) -> dict[str, Any]:
        taken = [follower.fragments[index] for index in landings]
        return {"states": [[own.fragment, own.applied.round, own.applied.key, own.digest] for own in taken]}

    def welcomed(follower: Follower, _: None, welcome: Welcome) -> dict[str, Any]:
        return {"lag": follower.lag, "follows": follower.follows}

    after("land", landed)
    after("adopt", adopted)
    after("welcome", welcomed)
    after("lose", lambda *_: {})


def _dies_at_stages(name: str, folder: Path) -> None:
    """Makes this process kill itself at the stage of a flight for which somebody has left a file."""

    def perhaps_dies(stage: str) -> None:
        if (folder / f"{name}.kill_{stage}").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def before(of: Any, method: str, stage: str) -> None:
        original = getattr(of, method)

        @wraps(original)
        def last(self: Any, *arguments: Any, **choices: Any) -> Any:
            perhaps_dies(stage)
            return original(self, *arguments, **choices)

        setattr(of, method, last)

    def after(of: Any, method: str, stage: str, now: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(of, method)

        @wraps(original)
        def last(self: Any, *arguments: Any, **choices: Any) -> Any:
            answer = original(self, *arguments, **choices)
            if now(*arguments):
                perhaps_dies(stage)
            return answer

        setattr(of, method, last)

    _watch_uploads(lambda: perhaps_dies("in_upload"))
    before(HubConnection, "contribute", "before_send")
    after(HubConnection, "_call", "before_record", lambda call, *_: call == "contribute")
    after(HubClient, "_size_of", "in_download")
    after(Follower, "land", "at_landing")


def _watch_uploads(sees: Callable[[], None]) -> None:
    """Calls what is given before each part but the first of a payload that this process sends."""
    original = HubClient._messages

    def messages(self: HubClient, header: dict[str, Any], *about: Any) -> Iterator[bytes]:
        for number, message in enumerate(original(self, header, *about)):
            if number and header["about"]["kind"] == "payload":
                sees()
            yield message

    HubClient._messages = messages  # type: ignore[method-assign]


def train(name: str, place: Place) -> None:
    """Trains a site, from its newest checkpoint on."""
    place.enter(name)
    os.environ["MASTER_PORT"] = str(place.port)
    notebook = Notebook(place.folder / f"{name}.jsonl")
    notebook.write("up", pid=os.getpid())
    _noted(notebook)
    _dies_at_stages(name, place.folder)
    pl.seed_everything(0)
    last = place.folder / name / "last.ckpt"
    keys = place.folder / "keys"
    strategy = StreamingDiLoCoStrategy(
        sync_every=SYNC_EVERY,
        overlap_steps=OVERLAP_STEPS,
        layers_per_fragment=2,
        federation=Federation(hub=place.hub, run=RUN, site=name, keys=keys, lease=place.lease),
    )
    checkpoint = ModelCheckpoint(dirpath=last.parent, save_last=True, every_n_train_steps=25, save_top_k=0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=place.steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Notes(notebook), checkpoint],
    )
    loader = DataLoader(TensorDataset(*samples(name)), batch_size=BATCH)
    warnings.filterwarnings("ignore", ".*num_workers.*")
    module = Net(place.seconds)
    trainer.fit(module, loader, ckpt_path=str(last) if last.exists() else None)
    outer = hashlib.sha256()
    for parameter in module.parameters():
        outer.update(parameter.detach().numpy().tobytes())
    notebook.write("ended", outer=outer.hexdigest(), report=strategy.report())

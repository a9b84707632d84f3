"""Writes a file of each format into this folder: ``python -m tests.formats.make``.

Run it when a format changes, or a compression is added: it adds a folder for the new number, or the
payload of the new compression, and leaves earlier ones as they are. `tests.test_formats` opens all
of them.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.compression import Compression
from lightning_sdiloco.compression.names import COMPRESSIONS
from lightning_sdiloco.engine.checkpoint import FORMAT
from lightning_sdiloco.federation.store import SQLiteLedger
from lightning_sdiloco.federation.wire import PROTOCOL, pack
from tests.federation.sites import founded
from tests.training import inner_optimizer, mlp, train_step

FOLDER = Path(__file__).parent
SAVED_AFTER = 10
ENDS_AFTER = 20
# After step 10 a fragment is in flight: launched after step 9, it lands after step 11.
SETTINGS: dict[str, Any] = {
    "sync_every": 9,
    "overlap_steps": 2,
    "fragments": 2,
    "compression": "fp4",
}
LEDGER = "ledger.sqlite"
HEADER = {"run": "llm", "site": "lyon", "protocol": PROTOCOL}
BODY = b"body"
# Compressions that send other values in each launch choose them by its inner step.
LAUNCHED_AFTER = 7


class Run:
    """A worker group whose engine is saved after `SAVED_AFTER` inner steps."""

    def __init__(self) -> None:
        self.model = mlp()
        self.optimizer = inner_optimizer("adamw", self.model)
        self.engine = StreamingDiLoCo(self.model, inner_optimizers=[self.optimizer], **SETTINGS)

    def train_until(self, last: int) -> None:
        for step in range(self.engine.inner_steps + 1, last + 1):
            train_step(self.model, self.optimizer, 0, step)
            self.engine.step()

    def end(self) -> list[float]:
        """Trains to the end, and returns the first parameters of each tensor."""
        self.train_until(ENDS_AFTER)
        self.engine.finish()
        return [parameter.flatten()[0].item() for parameter in self.model.parameters()]


def values_to_encode() -> Tensor:
    """Returns values that float32 holds exactly, so that all processors encode the same."""
    return (torch.arange(-150, 150) % 37 - 18).to(torch.float32) / 8


def digest_of_decoded(compression: Compression, payload: Tensor) -> str:
    decoded = torch.empty(values_to_encode().numel())
    compression.decode(payload, decoded)
    return hashlib.sha256(decoded.numpy().tobytes()).hexdigest()


def make_checkpoint(folder: Path) -> None:
    run = Run()
    run.train_until(SAVED_AFTER)
    assert run.engine.rounds.in_flight
    run.engine.save(folder / "run.ckpt")
    (folder / "end.json").write_text(json.dumps(run.end(), indent=1) + "\n")


def make_ledger(folder: Path) -> None:
    hub = founded(2, steps=20, compression="fp32", sync_every=6, overlap_steps=2)[0].hub
    ledger = SQLiteLedger(folder / LEDGER)
    for number, text in hub.journal.read():
        ledger.append(number, text)
    ledger.note(hub.journal.notes())
    ledger.close()
    digests = [record.digest for record in hub.records()]
    config = hub.coordinator.run_config
    assert digests
    assert config is not None
    expected = {"digests": digests, "run_config": config.key}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def make_messages(folder: Path) -> None:
    file = folder / "messages.json"
    messages: dict[str, Any] = {"message": pack(HEADER, BODY).hex(), "payloads": {}}
    if file.exists():
        messages = json.loads(file.read_text())
    payloads = messages["payloads"]
    for name in COMPRESSIONS.keys() - payloads.keys():
        compression = COMPRESSIONS[name]
        at_launch = compression.at(LAUNCHED_AFTER)
        payload = at_launch.encode(values_to_encode())
        payloads[name] = {
            "payload": payload.numpy().tobytes().hex(),
            "decoded": digest_of_decoded(at_launch, payload),
        }
    messages["payloads"] = {name: payloads[name] for name in sorted(payloads)}
    file.write_text(json.dumps(messages, indent=1) + "\n")


def main() -> None:
    for name, number, make in (
        ("checkpoint", FORMAT, make_checkpoint),
        ("ledger", 1, make_ledger),
        ("wire", PROTOCOL, make_messages),
    ):
        folder = FOLDER / f"{name}-{number}"
        if folder.exists() and make is not make_messages:
            print(f"{folder.name} is there already, and stays.")
            continue
        folder.mkdir(exist_ok=True)
        make(folder)
        print(f"{folder.name} was written.")


if __name__ == "__main__":
    main()

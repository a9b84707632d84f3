"""Stored files of each format open, and hold what was put in."""

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lightning_sdiloco import StreamingDiLoCo
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.compression.names import COMPRESSIONS
from lightning_sdiloco.engine.checkpoint import FORMAT
from lightning_sdiloco.federation.coordinator import Coordinator
from lightning_sdiloco.federation.messages import Record
from lightning_sdiloco.federation.store import InMemoryStore, SQLiteLedger
from lightning_sdiloco.federation.wire import OLDEST, PROTOCOL, unpack
from tests.fits import refusal
from tests.formats.make import BODY, FOLDER, HEADER, LAUNCHED_AFTER, LEDGER, Run, digest_of_decoded
from tests.ranks import run_ranks
from tests.training import mlp

CHECKPOINT = FOLDER / f"checkpoint-{FORMAT}"
WIRE = FOLDER / f"wire-{PROTOCOL}"


def test_a_checkpoint_resumes_and_ends_as_it_did_when_it_was_written(tmp_path: Path) -> None:
    copy = shutil.copytree(CHECKPOINT, tmp_path / "copy")
    expected = json.loads((CHECKPOINT / "end.json").read_text())
    run = Run()
    run.engine.load(copy / "run.ckpt")
    assert run.engine.rounds.in_flight
    # Matrix products differ in their last bits between processors.
    assert run.end() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_weights_of_a_checkpoint_open_without_this_package() -> None:
    checkpoint = torch.load(CHECKPOINT / "run.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == dict(Run().model.named_parameters()).keys()


@pytest.mark.parametrize("folder", sorted(FOLDER.glob("ledger-*")), ids=lambda path: path.name)
def test_a_hub_goes_on_from_a_ledger(folder: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(folder / LEDGER, tmp_path))
    expected = json.loads((folder / "expected.json").read_text())
    ledger = SQLiteLedger(path, must_exist=True)
    records = [Record.from_bytes(text) for _, text in ledger.read()]
    assert [record.digest for record in records] == expected["digests"]
    coordinator = Coordinator("run", ledger, InMemoryStore())
    assert coordinator.run_config is not None
    assert coordinator.run_config.key == expected["run_config"]
    ledger.close()


@pytest.mark.parametrize("protocol", range(OLDEST, PROTOCOL + 1))
def test_a_message_is_read(protocol: int) -> None:
    messages = json.loads((FOLDER / f"wire-{protocol}" / "messages.json").read_text())
    header = {**HEADER, "protocol": protocol}
    assert unpack(bytes.fromhex(messages["message"])) == (header, BODY)


PAYLOADS = json.loads((WIRE / "messages.json").read_text())["payloads"]


def test_every_compression_has_a_stored_payload() -> None:
    missing = COMPRESSIONS.keys() - PAYLOADS.keys()
    assert not missing, "run python -m tests.formats.make"


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_decodes_to_what_was_sent(name: str) -> None:
    sent = PAYLOADS[name]
    payload = torch.frombuffer(bytearray.fromhex(sent["payload"]), dtype=torch.uint8)
    compression = COMPRESSIONS[name].at(LAUNCHED_AFTER)
    assert digest_of_decoded(compression, payload) == sent["decoded"]


def test_a_setting_that_this_version_does_not_have_is_named() -> None:
    settings = Settings(sync_every=9)
    newer = {**settings.saved(), "sharpness": 0.5, "blur": "'auto'", "warmup_steps": 0}
    assert settings.differences(newer) == [
        "blur was \"'auto'\", which this version does not have",
        "sharpness was 0.5, which this version does not have",
    ]


def test_ranks_with_unlike_versions_are_refused() -> None:
    def told(rank: int, world_size: int) -> str:
        with patch("lightning_sdiloco.engine.engine.VERSION", f"0.{rank}.0"):
            return refusal(StreamingDiLoCo, mlp())

    expected = "the version of lightning_sdiloco is 0.0.0 on rank 0, 0.1.0 on rank 1"
    assert all(expected in text for text in run_ranks(told, 2))

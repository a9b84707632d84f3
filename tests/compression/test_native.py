"""What is compiled in C gives the bits of the operations of torch, which do without it."""

import logging
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from lightning_sdiloco.compression import FP4, fp4
from lightning_sdiloco.compression.base import Compression
from lightning_sdiloco.compression.blockwise import Blockwise
from tests.bits import SPECIAL, same_bits, vector

ROOT = Path(__file__).parents[2]
BESIDE = "lightning_sdiloco/compression"
SOURCE = ROOT / BESIDE / "fp4.c"


def build(folder: Path, source: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Builds a library as the package does, in a checkout of its own."""
    shutil.copy(ROOT / "hatch_build.py", folder)
    (folder / BESIDE).mkdir(parents=True, exist_ok=True)
    (folder / BESIDE / "fp4.c").write_text(source)
    words, environment = [sys.executable, folder / "hatch_build.py"], path and {"PATH": str(path)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("checkout")
    assert build(folder, SOURCE.read_text()).returncode == 0
    return folder / BESIDE / "libfp4.so"


def use(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the library at another place than beside the source."""
    monkeypatch.setattr(fp4, "LIBRARY", library)
    monkeypatch.setattr(fp4, "native", cache(fp4.native.__wrapped__))


def check_payload(payload: torch.Tensor, numel: int) -> None:
    one, other = torch.empty(numel), torch.empty(numel)
    FP4().decode(payload, one)
    Blockwise.decode(FP4(), payload, other)
    assert same_bits(one, other)


def test_both_ways_give_the_same_bits(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(library, monkeypatch)
    assert fp4.native() is not None

    @given(
        values=st.lists(st.floats(width=32), min_size=1, max_size=40),
        numel=st.integers(1, 700),
        offset=st.integers(0, 3),
        factors=st.lists(st.sampled_from([1.0, 0.0, 1 / 3, 0.3, 2.0, 1e-38, 1e38]), max_size=5),
        data=st.binary(min_size=1, max_size=80),
    )
    @example(values=SPECIAL, numel=129, offset=1, factors=[1.0, 1.0], data=b"0")
    @example(values=SPECIAL[:6], numel=129, offset=1, factors=[1.0, 1.0], data=b"0")
    @example(values=[1.5, 0.75, -0.0117187500, 0.0117187490], numel=256, offset=0, factors=[], data=b"0")
    @example(values=[-0.0], numel=128, offset=0, factors=[0.3], data=b"0")
    @settings(max_examples=150, deadline=None)
    def check(values: list[float], numel: int, offset: int, factors: list[float], data: bytes) -> None:
        # At addresses that are no multiple of a vector's, as in messages.
        given = vector(values, numel + offset)[offset:]
        payload = FP4().encode(given)
        assert torch.equal(payload, Blockwise.encode(FP4(), given))
        check_payload(torch.cat((payload[:offset], payload))[offset:], numel)
        check_payload(torch.tensor(list((data * len(payload))[: len(payload)]), dtype=torch.uint8), numel)
        payloads = [Blockwise.encode(FP4(), vector(values, numel + shift)[shift:]) for shift in range(len(factors))]
        sent = [(torch.cat((own[:offset], own))[offset:], by) for own, by in zip(payloads, factors, strict=True)]
        one, other = torch.empty(numel + 1)[1:], torch.empty(numel)
        FP4().mean(sent, one)
        Compression.mean(FP4(), sent, other)
        assert torch.equal(one.isnan(), other.isnan())
        assert same_bits(one.nan_to_num(), other.nan_to_num())

    check()


def test_without_it_torch_does_the_same_and_says_why(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short = tmp_path / "own.so"
    short.write_bytes(library.read_bytes()[:100])
    build(tmp_path, SOURCE.read_text().replace("* 0.75f", "* 0.8f"))
    other = tmp_path / BESIDE / "libfp4.so"
    for own, told in ((short, "was not compiled"), (other, "gives other bits")):
        use(own, monkeypatch)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert fp4.native() is None
        assert "fp4.c is not used: " in caplog.text
        assert told in caplog.text
        assert torch.equal(FP4().encode(torch.ones(200)), Blockwise.encode(FP4(), torch.ones(200)))


def test_nothing_is_left_where_it_cannot_be_built(tmp_path: Path) -> None:
    (tmp_path / BESIDE).mkdir(parents=True)
    (tmp_path / BESIDE / "libfp4.so").write_bytes(b"of another source")
    for path in (None, tmp_path):  # a compiler that fails, and none
        done = build(tmp_path, "not C", path)
        assert done.returncode == 1
        assert "operations of torch take" in done.stdout
        assert [each.name for each in (tmp_path / BESIDE).iterdir()] == ["fp4.c"]

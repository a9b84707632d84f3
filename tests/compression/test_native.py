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
from tests.bits import BIG, INF, NAN, same_bits, vector

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "lightning_sdiloco/compression/fp4.c"
lists = st.lists(st.floats(width=32), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that is built as the package builds its own."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler")
    return built(tmp_path_factory.mktemp("checkout"), SOURCE.read_text())


def built(folder: Path, source: str) -> Path:
    shutil.copy(ROOT / "hatch_build.py", folder)
    own = folder / "lightning_sdiloco/compression"
    own.mkdir(parents=True)
    (own / "fp4.c").write_text(source)
    subprocess.run([sys.executable, folder / "hatch_build.py"], check=True)
    return own / "libfp4.so"


def use(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the library at another place than beside the source."""
    monkeypatch.setattr(fp4, "LIBRARY", library)
    monkeypatch.setattr(fp4, "native", cache(fp4.native.__wrapped__))


def check_vector(values: list[float], numel: int, offset: int) -> None:
    given = vector(values, numel + offset)[offset:]  # an address that is no multiple of a vector's
    payload, reference = FP4().encode(given), Blockwise.encode(FP4(), given)
    assert torch.equal(payload, reference)
    check_payload(torch.cat((payload[:offset], payload))[offset:], numel)


def check_payload(payload: torch.Tensor, numel: int) -> None:
    one, other = torch.empty(numel), torch.empty(numel)
    FP4().decode(payload, one)
    Blockwise.decode(FP4(), payload, other)
    assert same_bits(one, other)


def check_mean(values: list[float], numel: int, offset: int, factors: list[float]) -> None:
    payloads = [Blockwise.encode(FP4(), vector(values, numel + shift)[shift:]) for shift in range(len(factors))]
    payloads = [torch.cat((one[:offset], one))[offset:] for one in payloads]  # of messages, at any address
    sent = list(zip(payloads, factors, strict=True))
    one, other = torch.empty(numel + 1)[1:], torch.empty(numel)
    FP4().mean(sent, one)
    Compression.mean(FP4(), sent, other)
    assert torch.equal(one.isnan(), other.isnan())
    assert same_bits(one.nan_to_num(), other.nan_to_num())


def test_both_ways_give_the_same_bits(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(library, monkeypatch)
    assert fp4.native() is not None

    @given(values=lists, numel=st.integers(1, 700), offset=st.integers(0, 3))
    @example(values=[0.0, -0.0, 1e-45, -1e-39, BIG, -BIG, NAN, INF, -INF], numel=129, offset=1)
    @example(values=[1.5, 0.75, -0.0117187500, 0.0117187490], numel=256, offset=0)
    @settings(max_examples=150, deadline=None)
    def of_vectors(values: list[float], numel: int, offset: int) -> None:
        check_vector(values, numel, offset)

    @given(data=st.binary(min_size=1, max_size=80), numel=st.integers(1, 700))
    @settings(max_examples=100, deadline=None)
    def of_whatever_arrives(data: bytes, numel: int) -> None:
        size = FP4().wire_bytes(numel)
        check_payload(torch.tensor(list((data * size)[:size]), dtype=torch.uint8), numel)

    @given(
        values=lists,
        numel=st.integers(1, 700),
        offset=st.integers(0, 3),
        factors=st.lists(st.sampled_from([1.0, 0.0, 1 / 3, 0.3, 2.0, 1e-38, 1e38]), max_size=5),
    )
    @example(values=[0.0, -0.0, 1e-45, -1e-39, BIG, -BIG], numel=129, offset=1, factors=[1.0, 1.0])
    @example(values=[-0.0], numel=128, offset=0, factors=[0.3])
    @settings(max_examples=150, deadline=None)
    def of_means(values: list[float], numel: int, offset: int, factors: list[float]) -> None:
        check_mean(values, numel, offset, factors)

    of_vectors()
    of_whatever_arrives()
    of_means()


@pytest.mark.parametrize("how", ["cut short", "other bits"])
def test_without_it_torch_does_the_same_and_says_why(
    how: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "own.so"
    if how == "cut short":
        own.write_bytes(library.read_bytes()[:100])
    elif how == "other bits":
        own = built(tmp_path, SOURCE.read_text().replace("* 0.75f", "* 0.8f"))
    use(own, monkeypatch)
    with caplog.at_level(logging.INFO):
        assert fp4.native() is None
    assert "fp4.c is not used: " in caplog.text
    assert ("gives other bits" if how == "other bits" else "was not compiled") in caplog.text
    assert torch.equal(FP4().encode(torch.ones(200)), Blockwise.encode(FP4(), torch.ones(200)))


def test_it_is_built_where_it_can_be_and_nothing_is_left_where_not(tmp_path: Path) -> None:
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    folder = tmp_path / "lightning_sdiloco/compression"
    folder.mkdir(parents=True)
    (folder / "fp4.c").write_text("not C")
    (folder / "libfp4.so").write_bytes(b"of another source")
    for path in (None, str(tmp_path)):  # a compiler that fails, and none
        told = subprocess.run(
            [sys.executable, "hatch_build.py"],
            cwd=tmp_path,
            env=path and {"PATH": path},
            capture_output=True,
            text=True,
        )
        assert told.returncode == 1
        assert "operations of torch take" in told.stdout
        assert [each.name for each in folder.iterdir()] == ["fp4.c"]

"""What is compiled in C gives the bits of the operations of torch, and nobody waits for it."""

import logging
import os
import shutil
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from lightning_sdiloco import native
from lightning_sdiloco.compression import FP4, ErrorFeedback, TopK, fp4
from lightning_sdiloco.compression.base import Compression
from lightning_sdiloco.compression.blockwise import Blockwise
from lightning_sdiloco.native import NativeLibrary
from tests.compiled import BIG, INF, NAN, needs_compiler, same_bits, vector, wait_for
from tests.ranks import run_processes

lists = st.lists(st.floats(width=32), min_size=1, max_size=40)


def library_of(folder: Path, is_proven: bool = True) -> NativeLibrary:
    made = fp4.NATIVE
    return NativeLibrary(made._source, made._functions, lambda library: is_proven, folder)


@needs_compiler
@given(values=lists, numel=st.integers(1, 700), offset=st.integers(0, 3))
@example(values=[0.0, -0.0, 1e-45, -1e-39, BIG, -BIG, NAN, INF, -INF], numel=129, offset=1)
@example(values=[1.5, 0.75, -0.0117187500, 0.0117187490], numel=256, offset=0)
@settings(max_examples=150, deadline=None)
def test_both_ways_give_the_same_bits(values: list[float], numel: int, offset: int) -> None:
    wait_for(fp4.NATIVE)
    assert fp4.NATIVE.get() is not None
    given = vector(values, numel + offset)[offset:]  # an address that is no multiple of a vector's
    payload, reference = FP4().encode(given), Blockwise.encode(FP4(), given)
    assert torch.equal(payload, reference)
    payload = torch.cat((payload[:offset], payload))[offset:]
    one, other = torch.empty(numel), torch.empty(numel)
    FP4().decode(payload, one)
    Blockwise.decode(FP4(), payload, other)
    assert same_bits(one, other)


@needs_compiler
@given(data=st.binary(min_size=1, max_size=80), numel=st.integers(1, 700))
@settings(max_examples=100, deadline=None)
def test_whatever_arrives_is_decoded_to_the_same_bits(data: bytes, numel: int) -> None:
    wait_for(fp4.NATIVE)
    size = FP4().wire_bytes(numel)
    payload = torch.tensor(list((data * size)[:size]), dtype=torch.uint8)
    one, other = torch.empty(numel), torch.empty(numel)
    FP4().decode(payload, one)
    Blockwise.decode(FP4(), payload, other)
    assert same_bits(one, other)


@needs_compiler
@given(
    values=lists,
    numel=st.integers(1, 700),
    offset=st.integers(0, 3),
    factors=st.lists(st.sampled_from([1.0, 0.0, 1 / 3, 0.3, 2.0, 1e-38, 1e38]), max_size=5),
)
@example(values=[0.0, -0.0, 1e-45, -1e-39, BIG, -BIG], numel=129, offset=1, factors=[1.0, 1.0])
@example(values=[-0.0], numel=128, offset=0, factors=[0.3])
@settings(max_examples=150, deadline=None)
def test_the_mean_has_the_same_bits(values: list[float], numel: int, offset: int, factors: list[float]) -> None:
    wait_for(fp4.NATIVE)
    vectors = [vector(values, numel + shift)[shift:] for shift in range(len(factors))]
    payloads = [Blockwise.encode(FP4(), one) for one in vectors]
    payloads = [torch.cat((one[:offset], one))[offset:] for one in payloads]  # of messages, at any address
    sent = list(zip(payloads, factors, strict=True))
    one, other = torch.empty(numel + 1)[1:], torch.empty(numel)
    FP4().mean(sent, one)
    Compression.mean(FP4(), sent, other)
    assert torch.equal(one.isnan(), other.isnan())
    assert same_bits(one.nan_to_num(), other.nan_to_num())


@needs_compiler
@pytest.mark.parametrize("codec", [TopK(1 / 32, FP4()), ErrorFeedback(FP4())], ids=["TopK", "ErrorFeedback"])
def test_what_wraps_it_has_the_same_bits_too(codec: ErrorFeedback | TopK, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for(fp4.NATIVE)
    values = torch.randn(100_001) * torch.randn(100_001).exp()
    payload, residual = codec.encode(values), codec.residual(values, None, codec.encode(values), 0.0)
    mean, again = torch.empty_like(values), torch.empty_like(values)
    codec.mean([(payload, 1.0), (payload, 0.3)], mean)
    monkeypatch.setattr(NativeLibrary, "get", lambda self: None)
    assert torch.equal(codec.encode(values), payload)
    assert same_bits(codec.residual(values, None, payload, 0.0), residual)
    codec.mean([(payload, 1.0), (payload, 0.3)], again)
    assert same_bits(mean, again)


@needs_compiler
def test_nobody_waits_and_a_machine_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library_of(tmp_path)
    assert first.get() is None  # the compiler has just been started
    wait_for(first)
    assert first.get() is not None
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(native.subprocess, "Popen", None)
    assert library_of(tmp_path).get() is not None


def test_without_a_compiler_torch_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    library = library_of(tmp_path)
    with caplog.at_level(logging.INFO):
        assert library.get() is library.get() is None
    assert caplog.text.count("there is no C compiler (cc, gcc, clang)") == 1
    monkeypatch.setattr(fp4, "NATIVE", library)
    assert torch.equal(FP4().encode(torch.ones(200)), Blockwise.encode(FP4(), torch.ones(200)))


@needs_compiler
def test_one_that_does_not_compile_or_gives_other_bits_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wrong.c").write_text("not C")
    wrong = NativeLibrary(tmp_path / "wrong.c", {}, lambda library: True, tmp_path / "cache")
    with caplog.at_level(logging.INFO):
        wait_for(wrong)
        wait_for(library_of(tmp_path, is_proven=False))
    assert "the C compiler ended with" in caplog.text
    assert "it gives other bits" in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="a folder of another kind")
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.INFO):
        assert library_of(tmp_path / "file" / "cache").get() is None
    assert "is not used" in caplog.text


def built_in(folder: Path) -> Path:
    """Compiles a library there, and returns its file."""
    wait_for(library_of(folder))
    [path] = folder.glob("*.so")
    return path


@needs_compiler
def test_one_that_was_cut_short_is_built_again(tmp_path: Path) -> None:
    path = built_in(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])  # to load it would end this process
    library = library_of(tmp_path)
    assert library.get() is None
    wait_for(library)
    assert library.get() is not None
    assert path.read_bytes() == whole


@needs_compiler
@pytest.mark.parametrize("how", ["other bytes", "a link", "another name of a file", "writable by others", "of others"])
def test_what_somebody_else_may_have_planted_is_not_loaded(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "of others" and os.getuid() != 0:
        pytest.skip("only root gives a file to somebody else")
    path = built_in(tmp_path / "cache")
    planted = tmp_path / "planted.so"
    planted.write_bytes(path.read_bytes())
    if how == "other bytes":
        path.write_bytes(path.read_bytes() + b"planted")
    elif how == "a link":
        path.unlink()
        path.symlink_to(planted)
    elif how == "another name of a file":
        path.unlink()
        path.hardlink_to(planted)
    elif how == "writable by others":
        path.chmod(0o666)
    else:
        os.chown(path, 12345, 12345)
    loaded: list[str] = []
    monkeypatch.setattr(native.ctypes, "CDLL", loaded.append)
    assert library_of(tmp_path / "cache").get() is None
    assert not loaded
    assert planted.exists()


@needs_compiler
def test_a_folder_that_others_can_write_is_closed_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    built_in(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@needs_compiler
@pytest.mark.parametrize("whose", ["of others", "a link"])
def test_a_folder_that_is_not_this_users_own_is_left_alone(
    whose: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, cache = tmp_path / "folder", tmp_path / "cache"
    planted = built_in(folder)
    if whose == "a link":
        cache.symlink_to(folder)
    elif os.getuid() == 0:
        os.chown(folder, 12345, 12345)
        folder.rename(cache)
    else:
        pytest.skip("only root gives a folder to somebody else")
    for _ in range(2):
        library = library_of(cache)
        wait_for(library)
        assert library.get() is None
    [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert str(cache) in warning
    assert "must be yours" in warning
    assert [path.name for path in cache.iterdir()] == [planted.name]


@needs_compiler
def test_two_processes_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, folder = next(filter(None, map(shutil.which, ("cc", "gcc", "clang")))), tmp_path / "cache"
    together = tmp_path / "cc"
    together.write_text(
        f"""#!/bin/sh
        touch {tmp_path}/there.$$
        for i in $(seq 2000); do
            if [ $(ls {tmp_path}/there.* | wc -l) = 2 ]; then {compiler} "$@" && touch {tmp_path}/done.$$; exit; fi
            sleep 0.01
        done
        exit 1"""
    )
    together.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def build(rank: int, world_size: int) -> bool:
        library = library_of(folder)
        wait_for(library)
        until = time.monotonic() + 30
        while len(list(tmp_path.glob("done.*"))) < 2 or any(path.suffix != ".so" for path in folder.iterdir()):
            assert time.monotonic() < until  # the later one still compiles
            time.sleep(0.02)
        return library.get() is not None

    assert run_processes(build, 2) == [True, True]
    monkeypatch.setattr(native.subprocess, "Popen", None)
    assert library_of(folder).get() is not None

"""A real server of S3 on this machine, as a process of its own that speaks HTTP."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

# The two packages know nothing of each other: s3fs asks as it would ask Amazon's service, and moto answers.
PACKAGES = ("moto", "flask", "s3fs")


def require_s3() -> None:
    """Skips where it is not installed."""
    lacks = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacks:
        pytest.skip(f"{', '.join(lacks)} is not installed: pip install 'moto[server]' s3fs brings a server of S3")


class S3Process:
    """A server, and the buckets in it."""

    def __init__(self, folder: Path) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            port = int(listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "s3.log").open("wb")
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self.process = subprocess.Popen(words, stdout=self._log, stderr=subprocess.STDOUT)
        end = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < end, (folder / "s3.log").read_text()[-2000:]
            assert self.process.poll() is None, (folder / "s3.log").read_text()[-2000:]
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=5):
                return True
        except OSError:
            return False

    def bucket(self) -> str:
        """A URL in a new bucket."""
        name = f"b{uuid.uuid4().hex}"
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"), timeout=30):
            return f"s3://{name}/run"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


@contextmanager
def s3_at(folder: Path) -> Iterator[S3Process]:
    """A server for the time of a ``with`` block, which fsspec takes for the service that ``s3://`` means."""
    require_s3()
    known = dict(os.environ)
    process = S3Process(folder)
    os.environ |= {"AWS_ENDPOINT_URL": process.url, "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    try:
        yield process
    finally:
        process.close()
        os.environ.clear()
        os.environ |= known

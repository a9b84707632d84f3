"""A real server of S3 on this machine, as a process of its own that speaks HTTP."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# The packages know nothing of each other: s3fs asks as it would ask Amazon's service, and moto
# answers.
PACKAGES = ("moto", "flask", "s3fs")


@contextmanager
def s3_at(folder: Path) -> Iterator[str]:
    """The URL of a new bucket, in a ``with`` block in which fsspec takes this server for the
    service that ``s3://`` means.
    """
    for name in PACKAGES:
        pytest.importorskip(
            name, reason=f"{name} is not installed: pip install 'moto[server]' s3fs"
        )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = folder / "s3.log"
    environment_before = dict(os.environ)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            put_bucket(url, process, log)
            os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
            os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
            yield "s3://bucket/run"
        finally:
            process.kill()
            os.environ.clear()
            os.environ |= environment_before


def put_bucket(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Makes the bucket, once the server answers."""
    request = urllib.request.Request(f"{url}/bucket", method="PUT")
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            assert process.poll() is None, log.read_text()[-2000:]
            time.sleep(0.1)

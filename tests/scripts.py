"""Runs scripts that know nothing of a launcher, in a fork of this process or with a fresh
Python.
"""

import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from tests.ranks import LAUNCHERS, PATIENCE, replace_environment, restore_signals

ROOT = Path(__file__).parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def unlaunched() -> dict[str, str]:
    """The environment without the variables of a launcher, for quiet processes of this checkout on
    this machine.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)
    }
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    return {**inherited, **quiet, "PYTHONPATH": str(ROOT)}


def run_python(*arguments: Any, folder: Path, seconds: float = 280.0, **environment: str) -> str:
    """Runs a fresh Python to its end in a new session, of which no process is left; returns its
    output.
    """
    command = [sys.executable, *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            env={**unlaunched(), **environment},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = "nothing: it hangs"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    assert code == 0, f"{command} ended with {code}:\n{text[-6000:]}"
    return text


def start_script(
    script: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> ForkProcess:
    """Starts a script as the main process of a new session, which knows nothing of a launcher.

    Its output goes to the files ``stdout`` and ``stderr`` in the folder of the script.
    """

    def run() -> None:
        os.setsid()
        restore_signals()
        forkserver._forkserver.__init__()  # it may serve this process: that of the script is none
        os.chdir(script.parent)
        replace_environment(environment or {})
        for stream, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(script.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, stream)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        logging.getLogger().handlers.clear()  # those of the test runner
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def run_script(script: Path, *arguments: str) -> str:
    """Runs a script to its end, and returns its standard output."""
    process = start_script(script, *arguments)
    process.join(timeout=PATIENCE)
    process.kill()
    assert process.exitcode == 0, (script.parent / "stderr").read_text()
    return (script.parent / "stdout").read_text()

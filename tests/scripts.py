"""Runs a script in a fork of this process, which has imported what takes long to import."""

import logging
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkProcess
from pathlib import Path

from tests.ranks import LAUNCHERS, restore_signals

RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start_script(script: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> ForkProcess:
    """Starts a script as the main process of a session of its own, which knows nothing of a launcher.

    Beside the script are then files with what it prints: ``stdout`` and ``stderr``.
    """

    def run() -> None:
        os.setsid()
        restore_signals()
        forkserver._forkserver.__init__()  # type: ignore[misc]  # it may serve this process: that of the script is none
        os.chdir(script.parent)
        for name in [name for name in os.environ if name.startswith(LAUNCHERS) or name in RANKS]:
            del os.environ[name]
        os.environ |= environment or {}
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(script.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        logging.getLogger().handlers.clear()  # those of the test runner
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def run_script(script: Path, *arguments: str) -> str:
    """Runs a script to its end, and returns what it printed."""
    process = start_script(script, *arguments)
    process.join(timeout=100)
    process.kill()
    assert process.exitcode == 0, (script.parent / "stderr").read_text()
    return (script.parent / "stdout").read_text()

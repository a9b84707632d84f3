"""What all tests share."""

import gc
import os
from collections.abc import Iterator

import pytest

from tests.ranks import LAUNCHERS, replace_environment


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the process: no collection need look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def take_launch_back() -> Iterator[None]:
    """Takes the variables of a launcher back that a test leaves: the next test of this process would
    wait for ranks that nobody starts.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith(LAUNCHERS)}
    yield
    replace_environment(before)

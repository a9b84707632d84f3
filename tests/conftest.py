"""A fixture that all tests share."""

import os
from collections.abc import Iterator

import pytest

from tests.ranks import LAUNCHERS, replace_environment


@pytest.fixture(autouse=True)
def take_launch_back() -> Iterator[None]:
    """Takes the variables of a launcher back that a test leaves: the next test of this process would
    wait for ranks that nobody starts.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith(LAUNCHERS)}
    yield
    replace_environment(before)

"""What holds for every test: the processes that run several of them one after the other stay as
they were.
"""

import os
from collections.abc import Iterator

import pytest

from tests.ranks import LAUNCHERS


def launcher_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(LAUNCHERS)}


@pytest.fixture(autouse=True)
def leave_no_launch_behind() -> Iterator[None]:
    """Fails a test that leaves variables of a launcher: the next test would wait for its ranks."""
    before = launcher_variables()
    yield
    after = launcher_variables()
    for name in after:
        del os.environ[name]
    os.environ.update(before)
    assert after == before

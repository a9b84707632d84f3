"""A fixture that all tests of the strategies share."""

import zlib

import pytest

from tests.fits import LIGHTNING


@pytest.fixture
def distribution(request: pytest.FixtureRequest) -> str:
    """One of the two distributions of Lightning, which share all of our code: each test has one of
    them, in turn.
    """
    return (LIGHTNING, "pytorch_lightning")[zlib.crc32(request.node.name.encode()) % 2]

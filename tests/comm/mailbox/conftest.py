"""Keys and a hub, made once for all tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comm.mailbox.hubs import Served, make_keys, require_extra, serving


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_extra()
    return make_keys(tmp_path_factory.mktemp("federation") / "keys")


@pytest.fixture(scope="module")
def served(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("hub"), keys) as served:
        yield served

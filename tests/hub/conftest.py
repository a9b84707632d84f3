"""Keys of every role, and a hub without rules, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.hubs import Served, make_keys, require_extra, serving


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_extra()
    return make_keys(tmp_path_factory.mktemp("federation") / "keys")


@pytest.fixture(scope="module")
def served(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("hub"), keys) as served:
        yield served

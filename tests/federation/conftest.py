"""Keys of every role, and hubs: without rules, made once or for a test, and with rules."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.federation.hubs import Served, World, make_keys, require_extra


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_extra()
    return make_keys(tmp_path_factory.mktemp("federation") / "keys")


@pytest.fixture(scope="module")
def shared_hub(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("hub"), keys) as served:
        yield served


@pytest.fixture
def hub(keys: Path, tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, keys) as served:
        yield served


@pytest.fixture
def world(keys: Path, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, keys)
    yield world
    world.close()

"""Keys of every role, made once."""

from pathlib import Path

import pytest

from lightning_sdiloco.comm import add_keys, init_keys
from tests.comm.mailbox.hubs import require_extra
from tests.hub.scripted import RUN

HOLDERS = {"a": "site", "b": "site", "c": "site", "boss": "operator", "viewer": "reader"}


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_extra()
    folder = tmp_path_factory.mktemp("keys") / "keys"
    init_keys(folder, RUN)
    for name, role in HOLDERS.items():
        add_keys(folder, name, role)  # type: ignore[arg-type]
    return folder

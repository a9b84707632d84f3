"""Which quorums a hub makes: those of this package, and one that its operator has named."""

import importlib
from typing import Any

from lightning_sdiloco.errors import Refused
from lightning_sdiloco.federation import CLASS_PATH, Quorum, built_in


class Quorums:
    """Finds the class of a quorum by its class path; see `quorum_of`."""

    def __init__(self, named: str | None = None) -> None:
        self._named = {} if named is None else {named: imported(named)}

    def __call__(self, path: str) -> type[Any]:
        """Returns the class."""
        try:
            return self._named.get(path) or built_in(path)
        except Refused as error:
            raise Refused(f"{error}. The operator of the hub has to allow it: sdiloco hub --quorum {path}") from None


def imported(path: str) -> type[Quorum]:
    """Imports a quorum; only for class paths that this machine's own user has given."""
    module, _, name = path.rpartition(".")
    try:
        if not CLASS_PATH.fullmatch(path):
            raise ImportError("it is no dotted name of a class")
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"quorum={path!r} cannot be imported: {error}. Give module.Class, of a module that is installed here, or is"
            " in a folder of PYTHONPATH."
        ) from None
    if not (isinstance(found, type) and issubclass(found, Quorum)):
        raise ValueError(f"quorum={path!r} is no Quorum: it must extend lightning_sdiloco.Quorum.")
    return found

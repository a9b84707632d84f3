"""What a site has heard, as plain values: so the rank that speaks with the hub passes it on to the others."""

from typing import Any, get_args

from lightning_sdiloco.federation import Malformed, plain, read
from lightning_sdiloco.hub.connection import Told

_KINDS = {kind.__name__: kind for kind in get_args(Told)}


def to_plain(told: Told) -> tuple[str, Any]:
    """Returns it as lists, texts and bytes."""
    return type(told).__name__, plain(told)


def from_plain(value: tuple[str, Any]) -> Told:
    """Reads what `to_plain` returned."""
    name, said = value
    if name not in _KINDS:
        raise Malformed("what another rank passed on is nothing that a hub tells")
    told: Told = read(_KINDS[name], said, name.lower())
    return told

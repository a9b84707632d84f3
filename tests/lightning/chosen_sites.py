"""Starts sites of a federation as processes, as chaos does, with choices of their own."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_sdiloco import Federation
from tests.chaos import site
from tests.chaos.cast import Federated, Process
from tests.chaos.faults import HUB


def train(name: str, place: site.Place, choices: dict[str, Any]) -> None:
    """Trains a site, with more arguments of its federation."""
    site.Federation = partial(Federation, **choices)  # type: ignore[misc, assignment]
    site.train(name, place)


class Chosen(Federated):
    """Starts a hub and sites.

    Args:
        folder: Where they write.
        sites: The names of the sites.
        seconds: That an inner step takes at least.
        lease: That of the charter.
        choices: More arguments of the federation of all sites.
    """

    def __init__(self, folder: Path, sites: Sequence[str], seconds: float, lease: float, **choices: Any) -> None:
        super().__init__(folder, sites, seconds, lease=lease)
        self._choices = choices

    def start(self, name: str) -> Process:
        if name == HUB:
            return super().start(name)
        process = self._context.Process(target=train, args=(name, self._places[name], self._choices))
        process.start()
        return process

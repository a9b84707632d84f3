"""A site's part in settling what it has left open: it measures, tells the hub, and chooses if nobody was first."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_sdiloco.comm import Topology
from lightning_sdiloco.engine.site.federation import Federation
from lightning_sdiloco.engine.site.shared import all_say
from lightning_sdiloco.federation import Known, Measurement
from lightning_sdiloco.hub import Connection

_log = logging.getLogger(__name__)

# How often a site asks whether the others have told, in seconds.
_MOMENT = 0.2

Plan = Callable[[Mapping[str, Measurement]], Mapping[str, str]]
"""Chooses settings, as text, from what all founders have measured."""


class Settler:
    """Settles open settings with the other sites; see [Note: settled once]. In-group collectives."""

    def __init__(self, federation: Federation, topology: Topology) -> None:
        self._federation, self._ranks = federation, topology.in_site
        self._connection: Connection | None = None
        self._own: Measurement | None = None
        self._said = ""

    def __enter__(self) -> "Settler":
        def connect() -> None:
            self._connection = None if self._ranks.rank else self._federation.connect()

        all_say(self._ranks, connect)
        return self

    def __exit__(self, *error: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def known(self) -> Mapping[str, str] | None:
        """Returns the settings of the run if they are known, as text: then there is nothing to measure."""
        return self._told(lambda connection: connection.settle()).settings

    def settle(self, step_time: float, plan: Plan) -> Known:
        """Returns the settings of the run, when one of all founders has chosen, or a charter was brought."""
        while (known := self._told(lambda connection: self._turn(connection, step_time, plan))).settings is None:
            time.sleep(_MOMENT)
        return known

    def _turn(self, connection: Connection, step_time: float, plan: Plan) -> Known:
        """Does what can be done now; returns what is known then."""
        self._own = self._own or Measurement(step_time, connection.round_trip())
        known = connection.settle(self._own)
        if known.settings is None and not known.missing and not self._own.is_whole:
            # All begin when the last has come, so each has its share of the hub's link.
            up, down = connection.bandwidth(up=True), connection.bandwidth(up=False)
            self._own = replace(self._own, to_hub=up, from_hub=down)
            known = connection.settle(self._own)
        if known.settings is None and known.is_whole:
            known = connection.settle(self._own, plan(known.measured))
        self._say(known)
        return known

    def _say(self, known: Known) -> None:
        """Says what is waited for, once."""
        said = f"waits for {known.missing} more sites" if known.missing else "waits for what others measure"
        if known.settings is None and said != self._said:
            self._said = said
            _log.info("The settings of the run are not known yet: site %s %s.", self._federation.site, said)

    def _told(self, ask: Callable[[Connection], Known]) -> Known:
        """Returns on all ranks what the first one is told."""
        said = all_say(self._ranks, lambda: self._connection and ask(self._connection).to_bytes())
        return Known.from_bytes(said[0])

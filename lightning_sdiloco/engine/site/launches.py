"""What a site has launched: encoded in the background, sent when that is done, and kept until it has landed."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lightning_sdiloco.engine.background import Background, Pending, Stages
from lightning_sdiloco.engine.flight import Flight, LaunchSnapshot, Purpose
from lightning_sdiloco.engine.measurements import LinkRate, Span
from lightning_sdiloco.engine.rounds import Rounds
from lightning_sdiloco.engine.site.arithmetic import Encoded, SiteArithmetic
from lightning_sdiloco.engine.site.shared import SharedConnection
from lightning_sdiloco.federation import Contribution, Follower


@dataclass
class Launched:
    """Holds a launch that is being encoded, or has been sent."""

    flight: Flight
    begun: Contribution
    pending: Pending[Encoded]
    encoded: Encoded | None = None


class Launches:
    """Launches for a site, and remembers what is in flight."""

    def __init__(
        self,
        rounds: Rounds,
        background: Background,
        connection: SharedConnection,
        follower: Follower,
        arithmetic: SiteArithmetic,
        link: LinkRate,
    ) -> None:
        self._rounds, self._background, self._link = rounds, background, link
        self._connection, self._follower, self._arithmetic = connection, follower, arithmetic
        self._launched: dict[int, Launched] = {}

    def of(self, fragment: int) -> Launched | None:
        """Returns what is in flight of a fragment."""
        return self._launched.get(fragment)

    def launch(self, index: int, step: int, step_time: float) -> None:
        """Launches a fragment after an inner step of so many seconds; 0 where that is not known."""
        began = time.perf_counter()
        begun = self._follower.begin(index, step)
        fragment = self._rounds.fragments[index]
        snapshot = fragment.launch(step, float("inf"), Purpose.ROUND, 0)
        # Nobody tells a site in advance which buffers others have changed, so all of them travel.
        snapshot = snapshot._replace(travelling=fragment.buffers.travelling(True))
        self._link.note(self._connection.sends_bytes_per_s)
        snapshot = self._rounds.chosen(snapshot._replace(step_time=step_time))
        self._start(snapshot, begun, (began, time.perf_counter()))

    def _start(self, snapshot: LaunchSnapshot, begun: Contribution, launch: Span) -> None:
        pending = in_background(self._background, lambda: self._arithmetic.encode(snapshot, begun))
        flight = Flight(snapshot, pending, launch)
        self._launched[snapshot.fragment] = Launched(flight, begun, pending)
        self._rounds.flights.append(flight)

    def send(self, wait: bool = False) -> None:
        """Sends what has been encoded."""
        encoding = {index: one.pending for index, one in self._launched.items() if one.encoded is None}
        for index in encoding if wait else self._connection.ready(encoding):
            launched = self._launched[index]
            launched.encoded = encoded = launched.pending.result()
            sent = replace(
                launched.begun,
                digest=encoded.digest,
                payloads=encoded.payloads,
                finite=encoded.finite,
                norm_squared=encoded.norm_squared,
            )
            own = self._follower.fragments[index].flight
            if own is not None and own.own == sent:
                # It was launched before the checkpoint, which has it whole.
                self._connection.contribute(sent, encoded.blobs)
            elif (complete := self._follower.complete(sent)) is not None:
                self._connection.contribute(complete, encoded.blobs)
        self.drop_landed()

    def drop_landed(self) -> None:
        """Forgets what the follower no longer has in flight."""
        for index in [i for i in self._launched if self._follower.fragments[i].flight is None]:
            self._rounds.flights.remove(self._launched.pop(index).flight)

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns what is in flight, once that is encoded."""
        self.send(wait=True)
        return [flight.snapshot.state_dict() for flight in self._rounds.flights]

    def load_state_dict(self, flights: Iterable[dict[str, Any]]) -> None:
        """Launches again what another life of this site had in flight, as far as its follower says so."""
        self._rounds.flights.clear()
        self._launched.clear()
        for flight in flights:
            own = self._follower.fragments[flight["fragment"]].flight
            if own is not None:
                began = time.perf_counter()
                outer = self._rounds.fragments[flight["fragment"]].load_outer()
                self._start(LaunchSnapshot.of(flight, outer, float("inf")), own.own, (began, time.perf_counter()))
        self.send(wait=True)


def in_background(background: Background, work: Callable[[], Any]) -> Pending[Any]:
    """Starts work in the first stage of the background."""
    return background.start(Stages(work, _same, _same))


def _same(value: Any) -> Any:
    return value

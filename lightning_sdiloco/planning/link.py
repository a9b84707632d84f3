"""Computes transfer times between worker groups from bandwidth, round-trip time and packet loss."""

import math
from dataclasses import dataclass
from typing import NamedTuple

# TCP: bytes in a segment, and bytes that a connection sends before the first acknowledgment (RFC
# 6928).
_SEGMENT = 1448
_FIRST_WINDOW = 10 * _SEGMENT
# A connection that has been silent for longer than its retransmission timeout, at least 200 ms on
# Linux, starts slowly again.
_LEAST_TIMEOUT = 0.2


@dataclass(frozen=True)
class Link:
    """The link from a worker group to all other groups, with the same bandwidth in both directions.

    Packet loss slows TCP down by more than the share of lost packets. A connection's rate is at
    most ``1.22 * segment / (round_trip * sqrt(loss))`` (Mathis et al. 1997) or the rate of CUBIC,
    the Linux default (RFC 9438), whichever is higher.

    Args:
        gbit_s: The bandwidth in each direction in Gbit/s, shared by all transfers of a group.
        round_trip: The round-trip time to another group in seconds.
        loss: The share of packets that are lost: at least 0 and below 1.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> Link(gbit_s=0.1, round_trip=0.05).seconds(12_500_000, connections=1)
        1.05
        >>> round(Link(gbit_s=0.1, round_trip=0.05, loss=0.001).gbit_s_of(connections=1), 4)
        0.0089
    """

    gbit_s: float
    round_trip: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        require(0 < self.gbit_s < math.inf, "bandwidth", self.gbit_s, "a positive number of Gbit/s")
        require(
            0 <= self.round_trip < 10,
            "round_trip",
            self.round_trip,
            "from 0 to below 10 seconds: 50 ms is 0.05",
        )
        require(
            0 <= self.loss < 1,
            "loss",
            self.loss,
            "a share of the packets, from 0 to below 1: 0.1 % is 0.001",
        )

    def gbit_s_of(self, connections: int) -> float:
        """Returns the combined rate of several connections at full speed, in Gbit/s."""
        if self.loss == 0 or self.round_trip == 0:
            return self.gbit_s * (1 - self.loss)
        reno = 1.22 / math.sqrt(self.loss)
        cubic = 1.054 * (self.round_trip / self.loss) ** 0.75
        of_connection = max(reno, cubic) * _SEGMENT * 8 / self.round_trip / 1e9
        return min(self.gbit_s * (1 - self.loss), connections * of_connection)

    def seconds(self, nbytes: float, connections: int, warm: bool = True) -> float:
        """Returns the time in seconds until all groups have received messages sent at the same
        time.
        """
        rate = self.gbit_s_of(connections) * 1e9 / 8
        elapsed = self.round_trip
        window = rate * self.round_trip if warm else connections * _FIRST_WINDOW
        while window < min(nbytes, rate * self.round_trip):
            nbytes = nbytes - window
            elapsed = elapsed + self.round_trip
            window = 2 * window
        return elapsed + nbytes / rate

    def is_warm_after(self, silence: float) -> bool:
        """Returns whether connections are still at full speed after being idle for this many
        seconds.
        """
        return silence <= _LEAST_TIMEOUT + self.round_trip


class Line(NamedTuple):
    """A group's link, which may be slower in one direction."""

    up: Link
    down: Link

    @classmethod
    def of(cls, link: "Link | Line") -> "Line":
        """Converts a link to a line that is the same in both directions, and returns a line
        unchanged.
        """
        return link if isinstance(link, Line) else cls(link, link)

    @property
    def slower(self) -> Link:
        return min(self, key=lambda link: link.gbit_s)

    @property
    def round_trip(self) -> float:
        return max(self.up.round_trip, self.down.round_trip)


def require(holds: bool, name: str, value: float, rule: str) -> None:
    """Raises a ValueError that states the value and the rule if the value is out of range."""
    if not holds:
        raise ValueError(
            f"{name}={value!r} is out of range: it must be {rule}. Choose a different {name}."
        )

"""What a rank sends is paced by what its link carries, which it learns from message to message."""

import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.links import Links, missing
from lightning_sdiloco.comm.pacing import Connection, Counters, Pace, Pacing, Sent
from lightning_sdiloco.comm.topology import GroupLayout, Topology
from tests.comm.test_gloo import exchanged
from tests.ranks import run_processes, run_ranks

linux = pytest.mark.skipif(sys.platform != "linux", reason="connections are counted and paced on Linux only")


class SimulatedConnection:
    now, limited, is_gone = Counters(0, 0, 0, 0.0, 0.05, 0.05, 0.0, on_the_way=0), None, False

    def counters(self) -> Counters:
        if self.is_gone:
            raise OSError("gone")
        return self.now

    def limit(self, bytes_per_s: float | None) -> None:
        self.limited = bytes_per_s


class Link:
    """A link that connections share unequally unless each keeps to its share: packets queue, then get lost."""

    round_trip = 0.05

    def __init__(self, connections: int, bytes_per_s: float, queue_s: float = 0.1) -> None:
        self.bytes_per_s, self.queue_s = bytes_per_s, queue_s
        self.connections: Any = [SimulatedConnection() for _ in range(connections)]
        self.pacing = Pacing(self.connections)

    def carry(self, sizes: list[int]) -> float:
        """Sends a message on each connection, and returns how long the slowest one took."""
        share = self.bytes_per_s / len(sizes)
        limits = [one.limited or 2 * share for one in self.connections]
        above = max(0.0, sum(limits) / self.bytes_per_s - 1)
        # The more is sent than fits, the less the link is shared equally: by half at most.
        busy = sum(sizes) / min(self.bytes_per_s, sum(limits)) * (1 + min(0.5, above)) + self.round_trip
        lost = 0.1 * (above * busy > self.queue_s)
        for one, size, limit in zip(self.connections, sizes, limits, strict=True):
            one.now = Counters(
                nbytes=one.now.nbytes + size,
                packets=one.now.packets + size // 1448,
                sent_again=one.now.sent_again + round(lost * (size // 1448)),
                busy_s=one.now.busy_s + busy,
                round_trip=self.round_trip + min(above * busy, self.queue_s),
                shortest_round_trip=self.round_trip,
                bytes_per_s=min(share, limit),
                on_the_way=0,
            )
        return busy

    def send_many(self, messages: int, size: int = 1_000_000) -> list[float]:
        seconds = []
        for _ in range(messages):
            self.pacing.prepare([size] * len(self.connections))
            seconds.append(self.carry([size] * len(self.connections)))
        return seconds

    @property
    def limit(self) -> float:
        """What all connections may send together, as a share of what the link carries."""
        return sum(one.limited or 2 * self.bytes_per_s for one in self.connections) / self.bytes_per_s


@settings(max_examples=40)
@given(
    connections=st.integers(1, 16),
    bytes_per_s=st.floats(1e6, 5e7),
    queue_s=st.floats(0.005, 0.5),
    messages=st.integers(25, 60),
)
def test_messages_leave_as_fast_as_the_link_carries_them(
    connections: int, bytes_per_s: float, queue_s: float, messages: int
) -> None:
    link = Link(connections, bytes_per_s, queue_s)
    seconds = link.send_many(messages, int(bytes_per_s / connections))
    # A queue that is shorter than what a pace a twentieth too high puts into it loses packets again and again.
    above = 1.15 if queue_s > 0.06 else 1.27
    assert 0.9 <= link.limit <= above + 0.05
    assert sum(seconds[-20:]) / 20 <= above * (1 + link.round_trip)


def test_the_pace_follows_a_link_that_changes_a_connection_that_is_gone_and_the_largest_message() -> None:
    for factor in (0.3, 2.0, 5.0):
        link = Link(7, 4e6)
        link.send_many(20)
        link.bytes_per_s *= factor
        link.connections[1].is_gone = True
        link.send_many(2)
        link.connections[1].is_gone = False
        link.send_many(20)
        assert 0.9 <= link.limit <= 1.2
    Pacing().prepare([1, 2])
    link.pacing.prepare([0, 0])
    link = Link(3, 4e6)
    link.send_many(20)
    assert link.limit < 1.5
    equal = link.connections[0].limited
    link.carry([1_000_000] * 3)
    link.pacing.prepare([4_000_000, 1_000_000, 1_000_000])
    assert link.connections[0].limited == pytest.approx(2 * equal, rel=0.1)
    link.carry([4_000_000, 1_000_000, 1_000_000])
    link.pacing.prepare([10_000] * 3)
    assert all(one.limited is None for one in link.connections), "short ones are not paced"


def learned(
    carries: float, share: float, begins_s: float = 0.0, queued_s: float = 0.0, lost: float = 0.0, ours: bool = False
) -> float:
    """The least that a link is paced to once it is known, where messages need not be as fast as they are paced."""
    pace, least = Pace(), float("inf")
    for at in range(300):
        paced_at = pace.bytes_per_s or 2 * carries
        rate = min(carries, share * paced_at)
        seconds = 3e6 / rate + begins_s
        queued = queued_s + ours * min(0.1, max(0.0, paced_at / carries - 1) * seconds)
        pace.learn(Sent(3_000_000, seconds, queued, lost=lost, delivered=rate))
        least = min(least, pace.bytes_per_s or float("inf")) if at >= 20 else least
    return least / carries


def test_what_no_pace_prevents_does_not_slow_a_link_down() -> None:
    def paced(*messages: Sent) -> float | None:
        pace = Pace()
        for message in messages:
            pace.learn(message)
        return pace.bytes_per_s

    # What neither queues nor gets lost is never paced.
    assert paced(*(Sent(10**6, 1.0, queued_s=0.014, lost=0.004, delivered=rate) for rate in (1e6, 2e6, 5e5))) is None
    # A connection of a link with losses sends a share of what it might: paced below that, it would sink for good.
    assert all(learned(1e6, 0.97, lost=lost) > 1 for lost in (0.006, 0.02, 0.1))
    # A queue of others is there however fast messages leave.
    assert learned(4e6, 1.0, queued_s=0.2) > 1
    # Packets seem to queue all the time, and no message is as fast as it is paced.
    for begins_s, jitter_s, share in ((0.1, 0.03, 1.0), (0.2, 0.05, 0.97), (0.05, 0.02, 0.97)):
        assert learned(1e7, share, begins_s, jitter_s, ours=True) >= 0.9
    # A round trip is taken off where nothing was on the way.
    idle = Counters(0, 0, 0, 0.0, 0.2, 0.2, 0.0, on_the_way=0)
    after = Counters(10**6, 700, 0, 1.2, 0.2, 0.2, 1e6, on_the_way=0)
    assert Sent.over([after.since(idle)]).seconds == pytest.approx(1.0)
    assert Sent.over([after.since(idle._replace(on_the_way=10))]).seconds == pytest.approx(1.2)
    # The end of a message after a loss is a third as fast as all of it.
    assert paced(Sent(10**7, 1.0, queued_s=0.09, lost=0.05, delivered=3e6)) == 1.25e7
    # One that is through before it is at speed does not lower the pace for those of other fragments, which are longer.
    long, short = Sent(10**8, 1.0, 0.1, lost=0.0, delivered=1e8), Sent(10**7, 0.4, 0.0, lost=0.0, delivered=3e7)
    assert paced(long, *[short] * 5) == 1.25e8


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(socket.create_connection(server.getsockname())) as one,
        closing(server.accept()[0]) as other,
    ):
        yield one, other


@linux
def test_a_connection_is_counted_and_limited_as_the_kernel_does_and_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Connection.of_process()
    with connected() as (one, other):
        opened = {connection.descriptor: connection for connection in Connection.of_process() - before}
        assert opened.keys() == {one.fileno(), other.fileno()}
        own = opened[one.fileno()]
        then = own.counters()
        one.sendall(bytes(100_000))
        assert len(other.recv(100_000, socket.MSG_WAITALL)) == 100_000
        since = own.counters().since(then)
        assert since.nbytes <= 100_000 <= then.nbytes + 100_000
        assert since.packets >= 2
        assert 0 <= since.sent_again <= since.packets
        assert own.counters().on_the_way <= since.packets
        assert 0 < since.shortest_round_trip <= since.round_trip < 1
        for limited, told in ((12_345.6, 12_345), (None, 2**32 - 1)):
            own.limit(limited)
            assert one.getsockopt(socket.SOL_SOCKET, 47) & (2**32 - 1) == told
        old = opened[min(opened)]
        # With a default timeout Python would make sockets of others, which may block, ones that do not.
        monkeypatch.setattr(socket, "getdefaulttimeout", lambda: 1.0)
        assert Connection.of_process() == set()
        monkeypatch.undo()
    for closed in (own.counters, lambda: own.limit(None)):
        with pytest.raises(OSError, match="Bad file descriptor|no longer there"):
            closed()
    with connected():
        assert old.descriptor in {connection.descriptor for connection in Connection.of_process()}
        with pytest.raises(OSError, match="no longer there"):
            old.limit(1.0)


@linux
def test_payloads_of_both_hops_are_paced_and_words_are_not() -> None:
    def made(rank: int, world_size: int) -> None:
        topology: Any = Topology.of_world(GroupLayout(world_size, world_size), timedelta(seconds=20))
        pacing = topology.exchange._pacing
        assert len(pacing._connections) == 4, "one in each direction to every other group"
        assert pacing is topology.second_hop._pacing
        assert not topology.control._pacing._connections
        for connection in pacing._connections:
            connection.limit(1e6)
        for exchange in (topology.exchange, topology.second_hop):
            exchanged(exchange, topology.group_index, 300_001)

    run_ranks(made, 3)


MBIT_S, SITES = 40, 3


def over_links(links: Links, rank: int, world_size: int) -> float | None:
    links.enter(rank)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in links.environment(rank).items():
            patch.setenv(name, value)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        topology: Any = Topology.of_world(GroupLayout(world_size, world_size), timedelta(seconds=60))
    for _ in range(6):
        for exchange in (topology.exchange, topology.second_hop):
            exchanged(exchange, topology.group_index, 600_000)
    return topology.exchange._pacing._pace.bytes_per_s


@pytest.mark.network
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_pace_of_real_connections_is_what_their_link_carries() -> None:
    with Links(SITES, MBIT_S * 1e6, 0.01, congestion_control="cubic") as links:
        for learned in run_processes(lambda *rank: over_links(links, *rank), SITES, ranks_per_node=1, timeout=120.0):
            assert learned is not None
            assert 0.6 <= learned * 8e-6 / MBIT_S <= 1.4

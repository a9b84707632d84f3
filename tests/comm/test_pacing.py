"""What a rank sends is paced by what its link carries, which it learns from message to message."""

import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.links import Links, missing
from lightning_sdiloco.comm import GroupLayout, Topology
from lightning_sdiloco.comm.pacing import Connection, Counters, Pace, Pacing, Sent
from tests.comm.test_gloo import exchanged
from tests.ranks import run_processes, run_ranks

linux = pytest.mark.skipif(sys.platform != "linux", reason="connections are counted and paced on Linux only")


class Link:
    """A link that connections share unequally unless each keeps to its share: packets queue, then get lost.

    Attributes:
        bytes_per_s: What it carries.
        queue_s: Seconds of data that its queue holds.
    """

    round_trip = 0.05

    def __init__(self, connections: int, bytes_per_s: float, queue_s: float = 0.1) -> None:
        self.bytes_per_s, self.queue_s = bytes_per_s, queue_s
        self.connections = [SimulatedConnection() for _ in range(connections)]

    def carry(self, sizes: list[int]) -> float:
        """Carries a message on each connection, and returns how long the slowest one took."""
        share = self.bytes_per_s / len(sizes)
        limits = [one.limited or 2 * share for one in self.connections]
        above = max(0.0, sum(limits) / self.bytes_per_s - 1)
        # The more is sent than fits, the less the link is shared equally: by half at most.
        unequal = min(0.5, above)
        busy = sum(sizes) / min(self.bytes_per_s, sum(limits)) * (1 + unequal) + self.round_trip
        queued = min(above * busy, self.queue_s)
        lost = 0.1 * (above * busy > self.queue_s)
        for one, size, limit in zip(self.connections, sizes, limits, strict=True):
            packets = size // 1448
            one.now = Counters(
                nbytes=one.now.nbytes + size,
                packets=one.now.packets + packets,
                sent_again=one.now.sent_again + round(lost * packets),
                busy_s=one.now.busy_s + busy,
                round_trip=self.round_trip + queued,
                shortest_round_trip=self.round_trip,
                bytes_per_s=min(share, limit),
                on_the_way=0,
            )
        return busy


class SimulatedConnection:
    def __init__(self) -> None:
        self.now = Counters(0, 0, 0, 0.0, 0.05, 0.05, 0.0, on_the_way=0)
        self.limited: float | None = None
        self.is_gone = False

    def counters(self) -> Counters:
        if self.is_gone:
            raise OSError("gone")
        return self.now

    def limit(self, bytes_per_s: float | None) -> None:
        self.limited = bytes_per_s


def paced(link: Link, pacing: Pacing, messages: int, size: int = 1_000_000) -> list[float]:
    """Sends messages, and returns how long each took."""
    seconds = []
    for _ in range(messages):
        sizes = [size] * len(link.connections)
        pacing.prepare(sizes)
        seconds.append(link.carry(sizes))
    return seconds


def over(link: Link) -> Pacing:
    connections: Any = link.connections
    return Pacing(connections)


def limit(link: Link) -> float:
    """What all connections of a link may send together, as a share of what it carries."""
    return sum(one.limited or 2 * link.bytes_per_s for one in link.connections) / link.bytes_per_s


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
    size = int(bytes_per_s / connections)
    seconds = paced(link, over(link), messages, size)
    # A queue that is shorter than what a pace a twentieth too high puts into it loses packets again and again.
    above = 1.15 if queue_s > 0.06 else 1.27
    assert 0.9 <= limit(link) <= above + 0.05
    assert sum(seconds[-20:]) / 20 <= above * (1 + link.round_trip)


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0, 5.0])
def test_the_pace_follows_a_link_that_changes(factor: float) -> None:
    link = Link(7, 4e6)
    pacing = over(link)
    paced(link, pacing, 20)
    link.bytes_per_s *= factor
    paced(link, pacing, 20)
    assert 0.9 <= limit(link) <= 1.2


def test_what_neither_queues_nor_gets_lost_is_never_paced() -> None:
    pace = Pace()
    for delivered in (1e6, 2e6, 5e5):
        pace.learn(Sent(nbytes=10**6, seconds=1.0, queued_s=0.014, lost=0.004, delivered=delivered))
    assert pace.bytes_per_s is None


@pytest.mark.parametrize("lost", [0.006, 0.02, 0.1])
def test_loss_that_no_pace_prevents_does_not_slow_a_link_down(lost: float) -> None:
    """A connection of such a link sends a share of what it might; to be paced below that would lower it for good."""
    pace = Pace()
    for _ in range(200):
        carried = min(1e6, 0.97 * (pace.bytes_per_s or 1e7))
        pace.learn(Sent(nbytes=int(carried), seconds=1.0, queued_s=0.0, lost=lost, delivered=carried))
    assert pace.bytes_per_s is not None
    assert pace.bytes_per_s > 1e6


def test_a_queue_of_others_does_not_slow_a_link_down() -> None:
    """It is there however fast messages leave."""
    pace = Pace()
    for _ in range(100):
        carried = min(4e6, pace.bytes_per_s or 1e6)
        pace.learn(Sent(nbytes=int(carried), seconds=1.0, queued_s=0.2, lost=0.0, delivered=carried))
    assert pace.bytes_per_s is not None
    assert pace.bytes_per_s > 4e6


@pytest.mark.parametrize(("begins_s", "jitter_s"), [(0.1, 0.02), (0.1, 0.03), (0.2, 0.05), (0.05, 0.02)])
@pytest.mark.parametrize("share", [1.0, 0.97])
def test_round_trips_that_vary_and_a_slow_start_do_not_slow_a_link_down(
    begins_s: float, jitter_s: float, share: float
) -> None:
    """Packets seem to queue all the time, and no message is as fast as it is paced."""
    pace, carries, nbytes = Pace(), 1e7, 3_000_000
    for at in range(300):
        paced_at = pace.bytes_per_s or 2 * carries
        rate = min(carries, share * paced_at)
        seconds = nbytes / rate + begins_s
        queued = jitter_s + min(0.1, max(0.0, paced_at / carries - 1) * seconds)
        pace.learn(Sent(nbytes, seconds, queued, lost=0.0, delivered=rate))
        assert at < 20 or (pace.bytes_per_s or 0.0) >= 0.9 * carries


def test_a_message_that_ends_slowly_after_a_loss_does_not_begin_a_pace_that_is_too_low() -> None:
    """The speed of the end is a third of that of the whole message."""
    pace = Pace()
    pace.learn(Sent(nbytes=10**7, seconds=1.0, queued_s=0.09, lost=0.05, delivered=3e6))
    assert pace.bytes_per_s == 1.25e7


def test_a_message_that_is_through_before_it_is_at_speed_does_not_lower_a_pace() -> None:
    """Those of other fragments may be longer."""
    pace = Pace()
    pace.learn(Sent(nbytes=10**8, seconds=1.0, queued_s=0.1, lost=0.0, delivered=1e8))
    for _ in range(5):
        pace.learn(Sent(nbytes=10**7, seconds=0.4, queued_s=0.0, lost=0.0, delivered=3e7))
    assert pace.bytes_per_s == 1.25e8


def test_a_round_trip_is_taken_off_only_where_nothing_was_on_the_way() -> None:
    """Before the first acknowledgement of a message nothing can be counted; one that goes on has them all the time."""
    idle = Counters(0, 0, 0, 0.0, 0.2, 0.2, 0.0, on_the_way=0)
    after = Counters(10**6, 700, 0, 1.2, 0.2, 0.2, 1e6, on_the_way=0)
    assert Sent.over([after.since(idle)]).seconds == pytest.approx(1.0)
    assert Sent.over([after.since(idle._replace(on_the_way=10))]).seconds == pytest.approx(1.2)


def test_messages_without_a_pause_are_paced_by_what_the_link_carries() -> None:
    """What is counted begins and ends in the middle of them, soon after one another."""
    link, pace, now = 4e6, Pace(), Counters(0, 0, 0, 0.0, 0.2, 0.2, 0.0, on_the_way=50)
    for _ in range(100):
        rate = min(link, pace.bytes_per_s or 2 * link)
        queued = min(0.1, max(0.0, (pace.bytes_per_s or 2 * link) / link - 1))
        after = Counters(
            now.nbytes + int(0.3 * rate), now.packets + 100, 0, now.busy_s + 0.3, 0.2 + queued, 0.2, rate, on_the_way=50
        )
        pace.learn(Sent.over([after.since(now)]))
        now = after
    assert pace.bytes_per_s is not None
    assert 0.9 * link < pace.bytes_per_s < 1.15 * link


def test_short_messages_are_not_paced() -> None:
    link = Link(3, 4e6)
    pacing = over(link)
    paced(link, pacing, 20)
    assert limit(link) < 1.5
    pacing.prepare([10_000] * 3)
    assert all(one.limited is None for one in link.connections)


def test_the_largest_message_has_the_largest_share() -> None:
    link = Link(3, 4e6)
    pacing = over(link)
    paced(link, pacing, 20)
    equal = link.connections[0].limited
    assert equal is not None
    link.carry([1_000_000] * 3)
    pacing.prepare([4_000_000, 1_000_000, 1_000_000])
    assert link.connections[0].limited == pytest.approx(2 * equal, rel=0.1)


def test_a_connection_that_is_gone_is_no_error_and_one_that_answers_again_is_paced() -> None:
    link = Link(3, 4e6)
    pacing = over(link)
    paced(link, pacing, 5)
    link.connections[1].is_gone = True
    paced(link, pacing, 2)
    link.connections[1].is_gone = False
    paced(link, pacing, 20)
    assert 0.9 <= limit(link) <= 1.2
    Pacing().prepare([1, 2])
    over(link).prepare([0, 0])


@linux
def test_with_a_default_timeout_no_connection_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would make sockets of others, which may block, ones that do not."""
    with connected():
        assert Connection.of_process()
        monkeypatch.setattr(socket, "getdefaulttimeout", lambda: 1.0)
        assert Connection.of_process() == set()


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(socket.create_connection(server.getsockname())) as one,
        closing(server.accept()[0]) as other,
    ):
        yield one, other


@linux
def test_a_connection_is_counted_and_limited_as_the_kernel_does() -> None:
    before = Connection.of_process()
    with connected() as (one, other):
        opened = Connection.of_process() - before
        assert {connection.descriptor for connection in opened} == {one.fileno(), other.fileno()}
        own = next(connection for connection in opened if connection.descriptor == one.fileno())
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
    for closed in (own.counters, lambda: own.limit(None)):
        with pytest.raises(OSError, match="Bad file descriptor|no longer there"):
            closed()


@linux
def test_another_connection_with_the_same_descriptor_is_left_alone() -> None:
    before = Connection.of_process()
    with connected():
        old = min(Connection.of_process() - before)
    with connected():
        assert old.descriptor in {connection.descriptor for connection in Connection.of_process()}
        with pytest.raises(OSError, match="no longer there"):
            old.limit(1.0)


def made(rank: int, world_size: int) -> tuple[int, bool]:
    topology: Any = Topology.of_world(GroupLayout(world_size, world_size), timedelta(seconds=20))
    first, second = topology.exchange._pacing, topology.second_hop._pacing
    for connection in first._connections:
        connection.limit(1e6)
    for exchange in (topology.exchange, topology.second_hop):
        for group, message in enumerate(exchanged(exchange, topology.group_index, 300_001)):
            assert torch.equal(message, torch.full((300_001,), group + 1, dtype=torch.uint8))
    return len(first._connections), first is second and not topology.control._pacing._connections


@linux
@pytest.mark.parametrize("groups", [2, 4])
def test_payloads_of_both_hops_are_paced_and_words_are_not(groups: int) -> None:
    """A connection in each direction between a rank and every other group."""
    assert run_ranks(made, groups) == [(2 * (groups - 1), True)] * groups


MBIT_S, SITES = 40, 3


def over_links(links: Links, rank: int, world_size: int) -> float | None:
    links.enter(rank)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in links.environment(rank).items():
            patch.setenv(name, value)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        topology: Any = Topology.of_world(GroupLayout(world_size, world_size), timedelta(seconds=60))
    for _ in range(10):
        for exchange in (topology.exchange, topology.second_hop):
            exchanged(exchange, topology.group_index, 600_000)
    return topology.exchange._pacing._pace.bytes_per_s  # type: ignore[no-any-return]


@pytest.mark.network
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_pace_of_real_connections_is_what_their_link_carries() -> None:
    with Links(SITES, MBIT_S * 1e6, 0.01, congestion_control="cubic") as links:
        for learned in run_processes(lambda *rank: over_links(links, *rank), SITES, ranks_per_node=1, timeout=120.0):
            assert learned is not None
            assert 0.6 <= learned * 8e-6 / MBIT_S <= 1.4

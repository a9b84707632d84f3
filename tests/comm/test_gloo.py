"""Process groups between the same ranks share a thread of gloo, and carry their messages as they
would alone.

What travels arrives as it was: plain values, gradients, and what one of the ranks raises. What a
rank sends is paced by what its link carries, which it learns from message to message.
"""

import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from benchmarks.links import Links, missing
from lightning_sdiloco.comm.communicator import Communicator, decode, encode
from lightning_sdiloco.comm.pacing import Connection, Counters, Pace, Pacing, Sent
from lightning_sdiloco.comm.topology import GroupLayout, Topology
from tests.ranks import run_processes, run_ranks

TIMEOUT = timedelta(seconds=20)


def loops() -> int:
    """The threads of gloo that wait for connections, in this process."""
    tasks = Path("/proc/self/task").iterdir() if sys.platform == "linux" else ()
    return sum((task / "comm").read_text().strip() == "gloo_tcp_loop" for task in tasks)


def exchanged(exchange: Any, group: int, numel: int) -> None:
    """Sends a message to every group, and sees what each of them has sent."""
    message = torch.full((numel,), group + 1, dtype=torch.uint8)
    posted = exchange.post([message] * exchange.num_groups)
    for sender, received in enumerate(exchange.collect(posted, time.monotonic() + 20)):
        assert torch.equal(received, torch.full((numel,), sender + 1, dtype=torch.uint8))


def unequal(exchange: Any, rank: int, device: str = "cpu") -> None:
    """Messages of different sizes, of which several are on their way, reach their groups."""
    groups = range(exchange.num_groups)
    sent = exchange.bytes_sent
    received = exchange.bytes_received

    def message(sender: int, to: int, turn: int) -> Tensor:
        return torch.full((to,), 10 * sender + to + 50 * turn, dtype=torch.uint8, device=device)

    posted = [exchange.post([message(rank, to, turn) for to in groups]) for turn in range(2)]
    for turn, one in enumerate(posted):
        for sender, values in enumerate(exchange.collect(one, time.monotonic() + 30)):
            assert values.tolist() == message(sender, rank, turn).tolist()
    assert exchange.bytes_sent - sent == 2 * sum(to for to in groups if to != rank)
    assert exchange.bytes_received - received == 2 * (len(groups) - 1) * rank


def met(rank: int, world_size: int, groups: int) -> int:
    before = loops()
    topology = Topology.of_world(GroupLayout(world_size, groups), TIMEOUT)
    for numel in (3, 300_001):
        for exchange in (
            topology.control,
            topology.progress,
            topology.exchange,
            topology.second_hop,
        ):
            exchanged(exchange, topology.group_index, numel)
    for stage in (*topology.stages, topology.in_group):
        assert torch.cat(stage.all_gather(torch.tensor([rank]))).tolist() == list(topology.ranks)
        assert stage.all_gather_object({"rank": rank}) == [
            {"rank": other} for other in topology.ranks
        ]
    value = torch.tensor([float(rank)])
    topology.peers.broadcast(value)
    assert value.item() == topology.group_rank
    if groups == world_size:
        unequal(topology.exchange, rank)
        # The payload of the others is held back; what their hosts say arrives.
        payload = [torch.zeros(1 << 20, dtype=torch.uint8)] * groups
        posted = topology.exchange.post(payload) if rank == 0 else None
        exchanged(topology.control, rank, 3)
        dist.barrier()
        topology.exchange.collect(posted or topology.exchange.post(payload), time.monotonic() + 5)
        used(rank, topology.in_group.process_group)
    return loops() - before


def used(rank: int, group: Any) -> None:
    """The process group of a single rank does all that one of gloo does."""
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=group)
    dist.barrier(group=group)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert (value.item(), objects) == (rank, [{"rank": rank}])
    layer = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=group)
    layer(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert layer.module.weight.grad.tolist() == [[rank + 1.0] * 2]
    metric = torchmetrics.MeanMetric(process_group=group)
    metric.update(float(rank))
    assert metric.compute() == rank


def met_elsewhere(rank: int, world_size: int) -> int:
    @contextmanager
    def elsewhere() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("GLOO_SOCKET_IFNAME")
            yield

    before = loops()
    topology = Topology.of_world(GroupLayout(world_size, world_size), TIMEOUT, elsewhere)
    exchanged(topology.exchange, rank, 1000)
    return loops() - before


def test_process_groups_carry_their_messages_with_no_thread_besides_the_worlds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert max(run_ranks(met, 3, 3)) == 0
    # The ranks of a group of several use gloo as torch makes it.
    assert max(run_ranks(met, 4, 2)) <= 1
    if sys.platform == "linux":
        assert run_ranks(met_elsewhere, 2) == [1, 1], (
            "what listens on another interface has a thread of its own"
        )
    # Where torch does not tell its devices, each group has its own.
    monkeypatch.setattr("lightning_sdiloco.comm.topology.devices_of", lambda backend: [])
    run_ranks(met, 2, 2)


def derivatives(gather: Any, rank: int) -> list[Tensor]:
    """Values, gradients and gradients of gradients of a function of what all ranks hold."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 5, generator=generator, requires_grad=True)
    gathered = gather(x)
    loss = (gathered.sin() * (1 + rank + torch.arange(len(gathered)))[:, None, None]).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None
    return [gathered.detach(), gradient.detach(), x.grad]


def test_collectives_match_torch_in_values_and_gradients_and_share_one_ranks_error() -> None:
    """Also of a group of one, and of a process that has joined no other."""

    def grouped(rank: int, world_size: int, size: int) -> Any:
        def act() -> int:
            if rank == 1:
                raise FileNotFoundError(2, "No such file", "model")
            return 10 * rank

        every = Communicator(dist.group.WORLD).attempt(act)
        assert [type(one.raised) for one in every if one.raised] == [FileNotFoundError] * (
            rank == 1
        )
        groups = [
            dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)
        ]
        gather = Communicator(groups[rank // size]).all_gather_with_gradients
        return [one[:3] for one in every], derivatives(gather, rank)

    def alone(rank: int, world_size: int, first: int) -> list[Tensor]:
        return derivatives(lambda x: torch.stack(all_gather(x)), first + rank)

    failure = ("FileNotFoundError", "OSError", "Exception", "BaseException", "object")
    for size, groups in ((1, 2), (3, 1), (2, 2)):
        expected = [own for group in range(groups) for own in run_ranks(alone, size, size * group)]
        for (heard, one), other in zip(
            run_ranks(grouped, size * groups, size), expected, strict=True
        ):
            assert all(map(torch.equal, one, other))
            assert heard[0] == (0, (), "")
            assert heard[1] == (None, failure, "[Errno 2] No such file: 'model'")
            assert heard[2:] == [(10 * of, (), "") for of in range(2, size * groups)]
    gathered, gradient, _ = derivatives(Communicator().all_gather_with_gradients, 0)
    assert gathered.shape == (1, 3, 5)
    assert gradient.abs().sum() > 0


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("it was executed",)


def test_only_plain_values_and_tensors_are_sent_or_read_and_they_arrive_bit_for_bit() -> None:
    value = {
        "none": [None, True, False, 3, -(1 << 80), 0.1, float("inf"), "ü\ud800"],
        (1, "key"): ({2, 3}, b"bytes", b"", [], ()),
        4: {"nested": {"deeper": [[]]}},
    }
    assert decode(encode(value)) == value
    assert [type(one) for one in decode(encode([True, 1, 1.0]))] == [bool, int, float]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64):
        tensors = [
            torch.randn(3, 4).to(dtype).T,
            torch.zeros(0, 2, dtype=dtype),
            torch.ones((), dtype=dtype),
        ]
        for sent, arrived in zip(tensors, decode(encode(tensors)), strict=True):
            assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
            assert torch.equal(arrived, sent)
            arrived.zero_()  # it may be written to
    sent = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    assert decode(encode(sent)).view(torch.int32).item() == 0x7FC12345, "a NaN keeps its bits"
    for value in (object(), ValueError("text"), torch.float32, lambda: None, {1: [object()]}):
        with pytest.raises(TypeError, match="only plain values travel"):
            encode(value)
    framed = ["{}", '["call", "os.system"]', '["bytes", 99]', '["dict", 1]', "[" * 100000]
    framed += ['["tensor", 0, "float32", 1000000]', '["tensor", -1, "torch.float32"]']
    for data in (
        b"",
        pickle.dumps(Bomb()),
        *(len(text).to_bytes(8, "little") + text.encode() for text in framed),
    ):
        with pytest.raises(ValueError, match="not a plain value"):
            decode(data)


# Pacing

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="connections are counted and paced on Linux only"
)


class SimulatedConnection:
    now = Counters(0, 0, 0, 0.0, 0.05, 0.05, 0.0, on_the_way=0)
    limited = None
    is_gone = False

    def counters(self) -> Counters:
        if self.is_gone:
            raise OSError("gone")
        return self.now

    def limit(self, bytes_per_s: float | None) -> None:
        self.limited = bytes_per_s


class Link:
    """A link that connections share unequally unless each keeps to its share: packets queue, then
    get lost.
    """

    round_trip = 0.05

    def __init__(self, connections: int, bytes_per_s: float, queue_s: float = 0.1) -> None:
        self.bytes_per_s = bytes_per_s
        self.queue_s = queue_s
        self.connections: Any = [SimulatedConnection() for _ in range(connections)]
        self.pacing = Pacing(self.connections)

    def carry(self, sizes: list[int]) -> float:
        """Sends a message on each connection, and returns how long the slowest one took."""
        share = self.bytes_per_s / len(sizes)
        limits = [one.limited or 2 * share for one in self.connections]
        above = max(0.0, sum(limits) / self.bytes_per_s - 1)
        # The more is sent than fits, the less the link is shared equally: by half at most.
        busy = (
            sum(sizes) / min(self.bytes_per_s, sum(limits)) * (1 + min(0.5, above))
            + self.round_trip
        )
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
        return (
            sum(one.limited or 2 * self.bytes_per_s for one in self.connections) / self.bytes_per_s
        )


@settings(max_examples=40)
@given(st.integers(1, 16), st.floats(1e6, 5e7), st.floats(0.005, 0.5), st.integers(25, 60))
def test_messages_leave_as_fast_as_the_link_carries_them(
    connections: int, bytes_per_s: float, queue_s: float, messages: int
) -> None:
    link = Link(connections, bytes_per_s, queue_s)
    seconds = link.send_many(messages, int(bytes_per_s / connections))
    # A queue that is shorter than what a pace a twentieth too high puts into it loses packets again
    # and again.
    above = 1.15 if queue_s > 0.06 else 1.27
    assert 0.9 <= link.limit <= above + 0.05
    assert sum(seconds[-20:]) / 20 <= above * (1 + link.round_trip)


def test_the_pace_follows_changing_links_lost_connections_and_the_largest_message() -> None:
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
    carries: float,
    share: float,
    begins_s: float = 0.0,
    queued_s: float = 0.0,
    lost: float = 0.0,
    ours: bool = False,
) -> float:
    """The least that a link is paced to once it is known, where messages need not be as fast as
    they are paced.
    """
    pace = Pace()
    least = float("inf")
    for at in range(300):
        paced_at = pace.bytes_per_s or 2 * carries
        rate = min(carries, share * paced_at)
        seconds = 3e6 / rate + begins_s
        queued = queued_s + ours * min(0.1, max(0.0, paced_at / carries - 1) * seconds)
        pace.learn(Sent(3_000_000, seconds, queued, lost=lost, delivered=rate))
        least = min(least, pace.bytes_per_s or float("inf")) if at >= 20 else least
    return least / carries


def test_losses_and_delays_that_no_pace_prevents_do_not_slow_a_link_down() -> None:
    def paced(*messages: Sent) -> float | None:
        pace = Pace()
        for message in messages:
            pace.learn(message)
        return pace.bytes_per_s

    # What neither queues nor gets lost is never paced.
    assert (
        paced(
            *(
                Sent(10**6, 1.0, queued_s=0.014, lost=0.004, delivered=rate)
                for rate in (1e6, 2e6, 5e5)
            )
        )
        is None
    )
    # A connection of a link with losses sends a share of what it might: paced below that, it would
    # sink for good.
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
    # One that is through before it is at speed does not lower the pace for those of other
    # fragments, which are longer.
    long = Sent(10**8, 1.0, 0.1, lost=0.0, delivered=1e8)
    short = Sent(10**7, 0.4, 0.0, lost=0.0, delivered=3e7)
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
def test_a_connection_is_counted_and_limited_as_by_the_kernel_and_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Connection.of_process()
    with connected() as (one, other):
        opened = {
            connection.descriptor: connection for connection in Connection.of_process() - before
        }
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
        # With a default timeout Python would make sockets of others, which may block, ones that do
        # not.
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
        topology: Any = Topology.of_world(GroupLayout(world_size, world_size), TIMEOUT)
        pacing = topology.exchange._pacing
        assert len(pacing._connections) == 4, "one in each direction to every other group"
        assert pacing is topology.second_hop._pacing
        assert not topology.control._pacing._connections
        for connection in pacing._connections:
            connection.limit(1e6)
        for exchange in (topology.exchange, topology.second_hop):
            exchanged(exchange, topology.group_index, 300_001)

    run_ranks(made, 3)


MBIT_S = 40
SITES = 3


def over_links(links: Links, rank: int, world_size: int) -> float | None:
    links.enter(rank)
    os.environ |= links.environment(rank)
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
        for learned in run_processes(
            lambda *rank: over_links(links, *rank), SITES, ranks_per_node=1
        ):
            assert learned is not None
            assert 0.6 <= learned * 8e-6 / MBIT_S <= 1.4

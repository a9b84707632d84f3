"""Process groups between the same ranks share a thread of gloo, and carry their messages as they
would alone.

Plain values, gradients, and errors that one of the ranks raises arrive unchanged. A rank paces its
messages by the speed of its link, which it learns from message to message.
"""

import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
    """Sends a message to every group, and checks the messages that arrive."""

    def message(sender: int) -> Tensor:
        return torch.full((numel,), sender + 1, dtype=torch.uint8)

    posted = exchange.post([message(group)] * exchange.num_groups)
    for sender, received in enumerate(exchange.collect(posted, time.monotonic() + 20)):
        assert torch.equal(received, message(sender))


def unequal(exchange: Any, rank: int, device: str = "cpu") -> None:
    """Messages of different sizes, of which several are on their way, reach their groups."""
    groups = range(exchange.num_groups)
    sent = exchange.bytes_sent
    received = exchange.bytes_received

    def message(sender: int, to: int, turn: int) -> Tensor:
        return torch.full((to,), 10 * sender + to + 50 * turn, dtype=torch.uint8, device=device)

    posted = [exchange.post([message(rank, to, turn) for to in groups]) for turn in range(2)]
    for turn, post in enumerate(posted):
        for sender, values in enumerate(exchange.collect(post, time.monotonic() + 30)):
            assert values.tolist() == message(sender, rank, turn).tolist()
    assert exchange.bytes_sent - sent == 2 * sum(to for to in groups if to != rank)
    assert exchange.bytes_received - received == 2 * (len(groups) - 1) * rank


def met(rank: int, world_size: int, groups: int) -> int:
    """Uses all that the ranks of a world meet in; returns the new threads of gloo."""
    loops_before = loops()
    topology = Topology.of_world(GroupLayout(world_size, groups), TIMEOUT)
    exchanges = (topology.control, topology.progress, topology.exchange, topology.second_hop)
    for numel in (3, 300_001):
        for exchange in exchanges:
            exchanged(exchange, topology.group_index, numel)
    for stage in (*topology.stages, topology.in_group):
        assert torch.cat(stage.all_gather(torch.tensor([rank]))).tolist() == list(topology.ranks)
        gathered = stage.all_gather_object({"rank": rank})
        assert gathered == [{"rank": peer} for peer in topology.ranks]
    value = torch.tensor([float(rank)])
    topology.peers.broadcast(value)
    assert value.item() == topology.group_rank
    if groups == world_size:
        unequal(topology.exchange, rank)
        check_control_passes_a_payload(topology, rank)
        used(rank, topology.in_group.process_group)
    return loops() - loops_before


def check_control_passes_a_payload(topology: Any, rank: int) -> None:
    """The payload of the others is held back, and their control vectors arrive."""
    payload = [torch.zeros(1 << 20, dtype=torch.uint8)] * topology.exchange.num_groups
    posted = topology.exchange.post(payload) if rank == 0 else None
    exchanged(topology.control, rank, 3)
    dist.barrier()
    topology.exchange.collect(posted or topology.exchange.post(payload), time.monotonic() + 5)


def used(rank: int, group: Any) -> None:
    """The process group of a single rank does all that one of gloo does."""
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=group)
    dist.barrier(group=group)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert value.item() == rank
    assert objects == [{"rank": rank}]
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

    loops_before = loops()
    topology = Topology.of_world(GroupLayout(world_size, world_size), TIMEOUT, elsewhere)
    exchanged(topology.exchange, rank, 1000)
    return loops() - loops_before


def test_process_groups_carry_their_messages_with_no_thread_besides_the_worlds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert max(run_ranks(met, 3, 3)) == 0
    # The ranks of a group of several use gloo as torch makes it.
    assert max(run_ranks(met, 4, 2)) <= 1
    if sys.platform == "linux":
        assert run_ranks(met_elsewhere, 2) == [1, 1], (
            "a listener on another interface has a thread of its own"
        )
    # Each group has its own device if torch does not tell its devices.
    monkeypatch.setattr("lightning_sdiloco.comm.topology.devices_of", lambda backend: [])
    run_ranks(met, 2, 2)


def derivatives(gather: Any, rank: int) -> list[Tensor]:
    """Values, gradients and gradients of gradients of a function of the values of all ranks."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 5, generator=generator, requires_grad=True)
    gathered = gather(x)
    weights = 1 + rank + torch.arange(len(gathered))
    loss = (gathered.sin() * weights[:, None, None]).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None
    return [gathered.detach(), gradient.detach(), x.grad]


def attempted(rank: int, world_size: int, size: int) -> Any:
    """The outcomes of an attempt that rank 1 fails, and the derivatives over groups of a size."""

    def act() -> int:
        if rank == 1:
            raise FileNotFoundError(2, "No such file", "model")
        return 10 * rank

    outcomes = Communicator(dist.group.WORLD).attempt(act)
    raised = [type(outcome.raised) for outcome in outcomes if outcome.raised]
    assert raised == [FileNotFoundError] * (rank == 1)
    starts = range(0, world_size, size)
    groups = [dist.new_group(list(range(start, start + size))) for start in starts]
    gather = Communicator(groups[rank // size]).all_gather_with_gradients
    return [outcome[:3] for outcome in outcomes], derivatives(gather, rank)


def torch_derivatives(rank: int, world_size: int, first: int) -> list[Tensor]:
    return derivatives(lambda x: torch.stack(all_gather(x)), first + rank)


FAILURE = ("FileNotFoundError", "OSError", "Exception", "BaseException", "object")


@pytest.mark.parametrize(("size", "groups"), [(1, 2), (3, 1), (2, 2)])
def test_collectives_match_torch_in_values_and_gradients_and_share_one_ranks_error(
    size: int, groups: int
) -> None:
    expected = []
    for group in range(groups):
        expected += run_ranks(torch_derivatives, size, size * group)
    ranks = run_ranks(attempted, size * groups, size)
    for (outcomes, own_derivatives), of_torch in zip(ranks, expected, strict=True):
        assert all(map(torch.equal, own_derivatives, of_torch))
        assert outcomes[0] == (0, (), "")
        assert outcomes[1] == (None, FAILURE, "[Errno 2] No such file: 'model'")
        assert outcomes[2:] == [(10 * rank, (), "") for rank in range(2, size * groups)]


def test_a_process_that_joined_no_other_gathers_its_own_values() -> None:
    gathered, gradient, _ = derivatives(Communicator().all_gather_with_gradients, 0)
    assert gathered.shape == (1, 3, 5)
    assert gradient.abs().sum() > 0


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("it was executed",)


PLAIN = {
    "none": [None, True, False, 3, -(1 << 80), 0.1, float("inf"), "ü\ud800"],
    (1, "key"): ({2, 3}, b"bytes", b"", [], ()),
    4: {"nested": {"deeper": [[]]}},
}
MALFORMED = ["{}", '["call", "os.system"]', '["bytes", 99]', '["dict", 1]', "[" * 100000]
MALFORMED += ['["tensor", 0, "float32", 1000000]', '["tensor", -1, "torch.float32"]']


def test_only_plain_values_and_tensors_are_sent_or_read_and_they_arrive_bit_for_bit() -> None:
    assert decode(encode(PLAIN)) == PLAIN
    assert [type(number) for number in decode(encode([True, 1, 1.0]))] == [bool, int, float]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64):
        transposed = torch.randn(3, 4).to(dtype).T
        tensors = [transposed, torch.zeros(0, 2, dtype=dtype), torch.ones((), dtype=dtype)]
        for sent, arrived in zip(tensors, decode(encode(tensors)), strict=True):
            assert arrived.dtype == sent.dtype
            assert arrived.shape == sent.shape
            assert torch.equal(arrived, sent)
            arrived.zero_()  # it may be written to
    sent = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    assert decode(encode(sent)).view(torch.int32).item() == 0x7FC12345, "a NaN keeps its bits"
    for value in (object(), ValueError("text"), torch.float32, lambda: None, {1: [object()]}):
        with pytest.raises(TypeError, match="only plain values can be sent"):
            encode(value)
    framed = [len(text).to_bytes(8, "little") + text.encode() for text in MALFORMED]
    for message in (b"", pickle.dumps(Bomb()), *framed):
        with pytest.raises(ValueError, match="cannot be decoded as a plain value"):
            decode(message)


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
        limits = [connection.limited or 2 * share for connection in self.connections]
        rate = min(self.bytes_per_s, sum(limits))
        excess = max(0.0, sum(limits) / self.bytes_per_s - 1)
        # The more is sent than fits, the less the link is shared equally: by half at most.
        busy = sum(sizes) / rate * (1 + min(0.5, excess)) + self.round_trip
        queue = excess * busy
        lost = 0.1 * (queue > self.queue_s)
        for connection, size, limit in zip(self.connections, sizes, limits, strict=True):
            before = connection.now
            packets = size // 1448
            connection.now = Counters(
                nbytes=before.nbytes + size,
                packets=before.packets + packets,
                sent_again=before.sent_again + round(lost * packets),
                busy_s=before.busy_s + busy,
                round_trip=self.round_trip + min(queue, self.queue_s),
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
        """The rate that all connections may send together, as a share of the link's."""
        limits = [connection.limited or 2 * self.bytes_per_s for connection in self.connections]
        return sum(limits) / self.bytes_per_s


@settings(max_examples=40)
@given(st.integers(1, 16), st.floats(1e6, 5e7), st.floats(0.005, 0.5), st.integers(25, 60))
def test_messages_leave_as_fast_as_the_link_carries_them(
    connections: int, bytes_per_s: float, queue_s: float, messages: int
) -> None:
    link = Link(connections, bytes_per_s, queue_s)
    seconds = link.send_many(messages, int(bytes_per_s / connections))
    # A pace that is a twentieth too high overflows a short queue, which loses packets again and
    # again.
    most = 1.15 if queue_s > 0.06 else 1.27
    assert 0.9 <= link.limit <= most + 0.05
    assert sum(seconds[-20:]) / 20 <= most * (1 + link.round_trip)


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
    limits = [connection.limited for connection in link.connections]
    assert limits == [None] * 3, "short ones are not paced"


class Conditions(NamedTuple):
    """The conditions under which a link carries messages.

    Attributes:
        carries: The bytes that the link carries in a second.
        share: The rate of messages, as a share of the pace that they may have.
        start_s: The seconds until a message begins.
        queued_s: The seconds that packets of others queue.
        lost: The share of packets that get lost.
        queues: True if packets that leave faster than the link carries them queue.
    """

    carries: float
    share: float
    start_s: float = 0.0
    queued_s: float = 0.0
    lost: float = 0.0
    queues: bool = False


def lowest_pace(link: Conditions) -> float:
    """The lowest pace of a link once it is known, as a share of the rate that it carries."""
    pace = Pace()
    paces = []
    for _ in range(300):
        limit = pace.bytes_per_s or 2 * link.carries
        rate = min(link.carries, link.share * limit)
        seconds = 3e6 / rate + link.start_s
        queued_s = link.queued_s
        if link.queues:
            queued_s += min(0.1, max(0.0, limit / link.carries - 1) * seconds)
        pace.learn(Sent(3_000_000, seconds, queued_s, lost=link.lost, delivered=rate))
        paces.append(pace.bytes_per_s or float("inf"))
    return min(paces[20:]) / link.carries


def pace_after(*messages: Sent) -> float | None:
    pace = Pace()
    for message in messages:
        pace.learn(message)
    return pace.bytes_per_s


def test_losses_and_delays_that_no_pace_prevents_do_not_slow_a_link_down() -> None:
    # Messages that neither queue nor get lost are never paced.
    smooth = Sent(10**6, 1.0, queued_s=0.014, lost=0.004, delivered=1e6)
    assert (
        pace_after(smooth, smooth._replace(delivered=2e6), smooth._replace(delivered=5e5)) is None
    )
    # A connection of a link with losses sends a share of what it might: paced below that, it would
    # sink for good.
    for lost in (0.006, 0.02, 0.1):
        assert lowest_pace(Conditions(1e6, 0.97, lost=lost)) > 1
    # A queue of others is there however fast messages leave.
    assert lowest_pace(Conditions(4e6, 1.0, queued_s=0.2)) > 1
    # Packets seem to queue all the time, and no message is as fast as its pace.
    for start_s, jitter_s, share in ((0.1, 0.03, 1.0), (0.2, 0.05, 0.97), (0.05, 0.02, 0.97)):
        assert lowest_pace(Conditions(1e7, share, start_s, jitter_s, queues=True)) >= 0.9


def test_a_pace_takes_off_round_trips_and_heeds_the_ends_of_long_messages() -> None:
    # A round trip is taken off where nothing was on the way.
    idle = Counters(0, 0, 0, 0.0, 0.2, 0.2, 0.0, on_the_way=0)
    after = Counters(10**6, 700, 0, 1.2, 0.2, 0.2, 1e6, on_the_way=0)
    assert Sent.over([after.since(idle)]).seconds == pytest.approx(1.0)
    assert Sent.over([after.since(idle._replace(on_the_way=10))]).seconds == pytest.approx(1.2)
    # The end of a message after a loss is a third as fast as all of it.
    assert pace_after(Sent(10**7, 1.0, queued_s=0.09, lost=0.05, delivered=3e6)) == 1.25e7
    # A message that is through before it is at speed does not lower the pace for those of other
    # fragments, which are longer.
    long = Sent(10**8, 1.0, 0.1, lost=0.0, delivered=1e8)
    short = Sent(10**7, 0.4, 0.0, lost=0.0, delivered=3e7)
    assert pace_after(long, *[short] * 5) == 1.25e8


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(socket.create_connection(server.getsockname())) as client,
        closing(server.accept()[0]) as accepted,
    ):
        yield client, accepted


SO_MAX_PACING_RATE = 47  # <asm-generic/socket.h>


@linux
def test_a_connection_is_counted_and_limited_as_by_the_kernel_and_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Connection.of_process()
    with connected() as (client, accepted):
        opened = Connection.of_process() - before
        by_descriptor = {connection.descriptor: connection for connection in opened}
        assert by_descriptor.keys() == {client.fileno(), accepted.fileno()}
        connection = by_descriptor[client.fileno()]
        check_counters(connection, client, accepted)
        for limit, kernel_rate in ((12_345.6, 12_345), (None, 2**32 - 1)):
            connection.limit(limit)
            rate = client.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE)
            assert rate & (2**32 - 1) == kernel_rate
        # With a default timeout Python would make sockets of others, which may block, ones that do
        # not.
        monkeypatch.setattr(socket, "getdefaulttimeout", lambda: 1.0)
        assert Connection.of_process() == set()
        monkeypatch.undo()
    for use in (connection.counters, partial(connection.limit, None)):
        with pytest.raises(OSError, match="Bad file descriptor|no longer exists"):
            use()
    old = by_descriptor[min(by_descriptor)]
    with connected():
        assert old.descriptor in {connection.descriptor for connection in Connection.of_process()}
        with pytest.raises(OSError, match="no longer exists"):
            old.limit(1.0)


def check_counters(connection: Connection, client: socket.socket, accepted: socket.socket) -> None:
    before = connection.counters()
    client.sendall(bytes(100_000))
    assert len(accepted.recv(100_000, socket.MSG_WAITALL)) == 100_000
    since = connection.counters().since(before)
    assert since.nbytes <= 100_000 <= before.nbytes + 100_000
    assert since.packets >= 2
    assert 0 <= since.sent_again <= since.packets
    assert connection.counters().on_the_way <= since.packets
    assert 0 < since.shortest_round_trip <= since.round_trip < 1


@linux
def test_payloads_of_both_hops_are_paced_and_control_vectors_are_not() -> None:
    def run(rank: int, world_size: int) -> None:
        topology: Any = Topology.of_world(GroupLayout(world_size, world_size), TIMEOUT)
        pacing = topology.exchange._pacing
        assert len(pacing._connections) == 4, "one in each direction to every other group"
        assert pacing is topology.second_hop._pacing
        assert not topology.control._pacing._connections
        for connection in pacing._connections:
            connection.limit(1e6)
        for exchange in (topology.exchange, topology.second_hop):
            exchanged(exchange, topology.group_index, 300_001)

    run_ranks(run, 3)


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
        paces = run_processes(lambda *rank: over_links(links, *rank), SITES, ranks_per_node=1)
    for bytes_per_s in paces:
        assert bytes_per_s is not None
        assert 0.6 <= bytes_per_s * 8e-6 / MBIT_S <= 1.4

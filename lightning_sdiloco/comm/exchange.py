"""Exchanges of messages between worker groups. Each group sends one message to, and receives one
message from, every other group.
"""

import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_sdiloco.comm.communicator import page_locked, to_device, to_host
from lightning_sdiloco.comm.pacing import Pacing

Posted = TypeVar("Posted")


class Unanswered(Exception):
    def __init__(self, group: int | None, reason: str) -> None:
        name = "one of the other worker groups"
        if group is not None:
            name = f"worker group {group}"
        super().__init__(f"{name} {reason}")
        self.group = group
        self.reason = reason


class Exchange(ABC, Generic[Posted]):
    """An exchange of messages between worker groups.

    Attributes:
        device: The device that outgoing messages must be on.
        learns_sizes: True if messages may be posted before the receivers know their lengths.
        arrived: The arrival time of each group's latest message, if known. The entry for this group
            is 0.
        sends_bytes_per_s: The bandwidth of the link to each receiver, or 0 if it is unknown.
        open_channels: The channels in use, for an exchange that allows only one at a time. None if
            the number of channels is unlimited.
    """

    learns_sizes = True
    open_channels: "weakref.WeakSet[DeviceExchange] | None" = None

    def __init__(self, groups: int) -> None:
        self.num_groups = groups
        self.device = torch.device("cpu")
        self.bytes_sent = 0
        self.bytes_received = 0
        self.arrived: Sequence[float] = ()
        self.sends_bytes_per_s = 0.0

    @abstractmethod
    def post(self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None) -> Posted:
        """Starts sending messages and returns immediately.

        Args:
            messages: One message for each group, as flat bytes.
            sizes: The length of the incoming message from each group. None means that all incoming
                messages are as long as this group's message, and () means that `collect` receives
                the lengths.
        """

    @abstractmethod
    def collect(
        self, posted: Posted, deadline: float, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Waits for the messages of all groups and returns them.

        Args:
            posted: The result of `post`.
            deadline: The ``time.monotonic()`` value after which `Unanswered` is raised.
            sizes: The lengths of the incoming messages. Required only if `post` was called without
                lengths.
        """

    @abstractmethod
    def channel(self, engine: int) -> "Exchange[Posted]":
        """Returns an exchange between the same groups whose messages reach only the given engine.

        Messages of different engines never mix, regardless of the order in which they are posted.
        Engine number 0 is reserved for messages that belong to no engine.
        """

    def close(self) -> None:
        """Releases the resources that only one channel may use at a time. Messages in transit are
        lost.
        """

    def _count(self, this_group: int, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Counts the bytes sent to and received from other groups."""
        for group in range(self.num_groups):
            if group != this_group:
                self.bytes_sent += sent[group].numel()
                self.bytes_received += received[group].numel()


AnyExchange: TypeAlias = Exchange[Any]
"""An exchange, whatever the type of its posted messages."""


# Over gloo


@dataclass
class _Travelling:
    """Messages in transit over gloo, with the work handles for each peer group."""

    messages: Sequence[Tensor]
    received: list[Tensor]
    sending: dict[int, dist.Work]
    receiving: dict[int, dist.Work] = field(default_factory=dict)
    failure: Unanswered | None = None


# The number of exchanges of one engine that share process groups: each has its own tag.
_TAGS = 2


class DirectExchange(Exchange[_Travelling]):
    """An exchange in which each group sends directly to every other group, over one gloo process
    group per direction.

    Exchanges may share process groups if they differ in ``tag`` (0 or 1) or in ``engine``, because
    gloo delivers a message only to a receiver that is waiting for the same tag.
    """

    def __init__(
        self,
        up: dist.ProcessGroup,
        down: dist.ProcessGroup,
        tag: int = 0,
        pacing: Pacing | None = None,
        engine: int = 0,
    ) -> None:
        super().__init__(dist.get_world_size(up))
        self._up = up
        self._down = down
        self._number = tag
        self._tag = _TAGS * engine + tag
        self._pacing = pacing or Pacing()
        self._group = dist.get_rank(up)
        self._ranks = dist.get_process_group_ranks(up)
        # For every other group, the process groups for sending to it and for receiving from it.
        self._ways: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        for group in range(self._group):
            self._ways[group] = (down, up)
        for group in range(self._group + 1, self.num_groups):
            self._ways[group] = (up, down)
        # The group whose message arrived last in the previous round.
        self._latest = -1

    @override
    def channel(self, engine: int) -> "DirectExchange":
        return DirectExchange(self._up, self._down, self._number, self._pacing, engine)

    @override
    def post(self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None) -> _Travelling:
        """Starts sending. Messages on another device are first copied to the host. If all groups
        get the same message, it is copied only once.
        """
        sent = list(messages)
        if messages[self._group].device.type != "cpu":
            on_host = {id(message): to_host(message) for message in messages}
            sent = [on_host[id(message)] for message in messages]
        self._pacing.prepare([sent[group].numel() for group in self._ways])
        posted = _Travelling(messages, sent, {})
        if sizes is None:
            sizes = [sent[self._group].numel()] * self.num_groups
        sizes_are_known = sizes != ()
        if sizes_are_known:
            # Receiving starts first so that the other groups see early that this group is ready.
            self._receive(posted, [group for group in self._ways if sizes[group]], sizes)
        for group in self._ways:
            # Empty messages are not sent, but their receivers must know that they are empty.
            if sent[group].numel() or not sizes_are_known:
                self._send(posted, group, sent[group])
        return posted

    def _send(self, posted: _Travelling, group: int, message: Tensor) -> None:
        try:
            forward, _ = self._ways[group]
            posted.sending[group] = forward.send([message], group, self._tag)
        except RuntimeError as error:
            # `collect` raises the error so that all ranks of this group see it at the same point.
            posted.failure = posted.failure or self._gone(group, error)

    def _receive(self, posted: _Travelling, groups: Iterable[int], sizes: Sequence[int]) -> None:
        """Starts receiving from other groups. gloo buffers messages that arrive earlier."""
        message = posted.received[self._group]
        device = posted.messages[self._group].device
        posted.received = [
            message if group == self._group else page_locked((size,), message.dtype, device)
            for group, size in enumerate(sizes)
        ]
        for group in groups:
            try:
                _, back = self._ways[group]
                posted.receiving[group] = back.recv([posted.received[group]], group, self._tag)
            except RuntimeError as error:
                posted.failure = posted.failure or self._gone(group, error)

    @override
    def collect(
        self, posted: _Travelling, deadline: float, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        if sizes is not None:
            # An arrival is noticed only while this rank waits for that message. This rank therefore
            # waits last for the group whose message arrived last in the previous round, which
            # delays no other wait.
            groups = sorted(self._ways, key=lambda group: group == self._latest)
            self._receive(posted, groups, sizes)
        if posted.failure is not None:
            raise posted.failure
        self._wait_for_arrivals(posted, deadline)
        for group, sending in posted.sending.items():
            self._wait(sending, group, deadline)
        self._count(self._group, posted.messages, posted.received)
        message = posted.messages[self._group]
        if message.device.type == "cpu":
            return posted.received
        return [
            message if group == self._group else to_device(part, message.device)
            for group, part in enumerate(posted.received)
        ]

    def _wait_for_arrivals(self, posted: _Travelling, deadline: float) -> None:
        arrived = [0.0] * self.num_groups
        longest_wait = -1.0
        began = time.perf_counter()
        for group, receiving in posted.receiving.items():
            self._wait(receiving, group, deadline)
            now = time.perf_counter()
            arrived[group] = now
            if now - began > longest_wait:
                self._latest = group
                longest_wait = now - began
            began = now
        self.arrived = arrived

    def _wait(self, work: dist.Work, group: int, deadline: float) -> None:
        # gloo rounds to whole milliseconds and treats zero as no timeout. If it rounded down, the
        # wait would end before the deadline, and a late group would look like one that is gone.
        left = math.ceil(max(deadline - time.monotonic(), 0) * 1000) + 1
        try:
            work.wait(timedelta(milliseconds=left))
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise Unanswered(
                    group, f"did not answer in time (rank {self._ranks[group]})"
                ) from error
            raise self._gone(group, error) from error

    def _gone(self, group: int, error: RuntimeError) -> Unanswered:
        return Unanswered(
            group, f"went away (rank {self._ranks[group]}: {str(error).splitlines()[0]})"
        )


# Messages of any size

# A header of eight bytes contains the length of a message and the rate at which the receiver's last
# message arrived. These are the numbers of bits for the length and for the rate in kB/s.
_LENGTH_BITS = 40
_RATE_BITS = 23
_UNIT = 1000.0


class VaryingExchange(Exchange[tuple[object, object]]):
    """An exchange of messages whose sizes differ between groups. A second exchange carries the
    lengths of the messages.
    """

    def __init__(self, lengths: AnyExchange, messages: AnyExchange) -> None:
        super().__init__(messages.num_groups)
        if not messages.learns_sizes:
            raise ValueError(
                "Payloads of compression=Threshold(every=...) or ByLink(...) vary in length, but"
                " exchange='...:nccl' requires sizes that all ranks know in advance. Remove ':nccl'"
                " to use gloo, or choose a compression with payloads of fixed size, such as"
                " 'sparse'."
            )
        self.device = messages.device
        self.bytes_sent = messages.bytes_sent
        self.bytes_received = messages.bytes_received
        self._lengths = lengths
        self._messages = messages
        # The rate for each group in bytes per second, or 0 if unknown.
        self._received = [0.0] * messages.num_groups

    @override
    def channel(self, engine: int) -> "VaryingExchange":
        return VaryingExchange(self._lengths.channel(engine), self._messages.channel(engine))

    @override
    def post(
        self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None
    ) -> tuple[object, object]:
        heads = [
            _packed(message.numel(), rate)
            for message, rate in zip(messages, self._received, strict=True)
        ]
        return self._lengths.post(heads), self._messages.post(messages, ())

    @override
    def collect(
        self, posted: tuple[object, object], deadline: float, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        posted_lengths, posted_messages = posted
        heads = [_unpacked(head) for head in self._lengths.collect(posted_lengths, deadline)]
        numels = [numel for numel, _ in heads]
        began = time.perf_counter()
        received = self._messages.collect(posted_messages, deadline, numels)
        self.bytes_sent = self._messages.bytes_sent
        self.bytes_received = self._messages.bytes_received
        self.sends_bytes_per_s = _carried([rate for _, rate in heads])
        if self._messages.arrived:
            self._received = self._rates(numels, began)
        return received

    def _rates(self, numels: Sequence[int], began: float) -> list[float]:
        rates = [0.0] * self.num_groups
        for group, arrival in enumerate(self._messages.arrived):
            if arrival:
                rates[group] = numels[group] / max(arrival - began, 1e-6)
        return rates


def _carried(rates: Sequence[float]) -> float:
    """Estimates the bandwidth of the link to each receiver from the rates at which the same message
    arrived. Unknown rates and the rate of this group are 0.
    """
    fastest_first = sorted((rate for rate in rates if rate), reverse=True)
    # Each total assumes that `number` receivers got at least `rate` at the same time.
    totals = [number * rate for number, rate in enumerate(fastest_first, 1)]
    return max(totals, default=0.0) / max(1, len(rates) - 1)


def _packed(length: int, rate: float) -> Tensor:
    """Packs a length and a rate into bytes. A known rate is never rounded down to 0."""
    assert length < 1 << _LENGTH_BITS, "a message is shorter than a terabyte"
    in_units = min(math.ceil(rate / _UNIT), (1 << _RATE_BITS) - 1)
    return torch.tensor([in_units << _LENGTH_BITS | length], dtype=torch.int64).view(torch.uint8)


def _unpacked(head: Tensor) -> tuple[int, float]:
    word = int(head.view(torch.int64))
    return word & (1 << _LENGTH_BITS) - 1, (word >> _LENGTH_BITS) * _UNIT


# In one process


_Table = dict[int, dict[int, Sequence[Tensor]]]
"""The messages that groups send, keyed by round number and sending group."""


class InProcessExchange(Exchange[tuple[int, Sequence[Tensor]]]):
    """An exchange between worker groups in the same process. Each group has its own instance.

    A table per engine holds the messages until all groups have collected them. Collecting before
    all groups have posted is an error, because the groups share one thread and waiting would
    deadlock.
    """

    def __init__(
        self, group: int, groups: int, tables: dict[int, "_Table"], engine: int = 0
    ) -> None:
        super().__init__(groups)
        self._group = group
        self._tables = tables
        self._table = tables[engine]
        self._posted = 0

    @staticmethod
    def connect(groups: int) -> list["InProcessExchange"]:
        tables: dict[int, _Table] = defaultdict(lambda: defaultdict(dict))
        return [InProcessExchange(group, groups, tables) for group in range(groups)]

    @override
    def channel(self, engine: int) -> "InProcessExchange":
        return InProcessExchange(self._group, self.num_groups, self._tables, engine)

    @override
    def post(
        self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None
    ) -> tuple[int, Sequence[Tensor]]:
        number = self._posted
        self._posted += 1
        # The table has one entry for each group that has posted. `collect` adds one for each group
        # that has taken the messages.
        self._table[number][self._group] = messages
        return number, messages

    @override
    def collect(
        self,
        posted: tuple[int, Sequence[Tensor]],
        deadline: float,
        sizes: Sequence[int] | None = None,
    ) -> list[Tensor]:
        number, messages = posted
        sent = self._table[number]
        for group in range(self.num_groups):
            if group not in sent:
                raise Unanswered(
                    group, "has not launched yet, and all groups must launch before any group lands"
                )
        received = [sent[group][self._group] for group in range(self.num_groups)]
        sent[self.num_groups + self._group] = ()
        if len(sent) == 2 * self.num_groups:
            del self._table[number]
        self._count(self._group, messages, received)
        return received


# From device to device

# In seconds. Short compared with the transfer of a message and long compared with a poll.
_BETWEEN_LOOKS = 0.001


class DeviceBackend(NamedTuple):
    """A torch.distributed backend that sends tensors directly from a device."""

    name: str
    device: torch.device


def nccl_on(device: torch.device) -> DeviceBackend:
    """Returns NCCL as the backend for a device. Raises ValueError if the device or the torch build
    does not support NCCL.
    """
    if device.type != "cuda":
        raise ValueError(
            f"exchange='...:nccl' was given, but this rank trains on {device.type}, and NCCL"
            " supports only CUDA devices. Train on CUDA devices, or remove ':nccl' to use gloo,"
            " which works on every device."
        )
    if not dist.is_nccl_available():
        raise ValueError(
            f"exchange='...:nccl' was given, but torch {torch.__version__} was built without NCCL."
            " Install a build of torch with NCCL, or remove ':nccl' to use gloo."
        )
    return DeviceBackend("nccl", device)


class _OnDevice(NamedTuple):
    messages: Sequence[Tensor]
    received: list[Tensor]
    calls: list[dist.P2POp]


class DeviceExchange(Exchange[_OnDevice]):
    """An exchange that sends directly from device to device. The host only polls for completion.

    All messages of a flight are sent in a single group call to the backend. Such a call cannot
    deadlock, regardless of the order of sends and receives. The backend matches messages by the
    order in which ranks post them, so each exchange needs a separate process group. Both hops of a
    flight use the same exchange from a single thread.

    [Note: the stream never waits for another rank] With a device backend such as NCCL, ``wait()``
    blocks the stream instead of the host. The exchange therefore calls ``wait()`` only after every
    message has arrived. The same stream also encodes the next flight and decodes the previous one.
    If the stream were blocked earlier, both flights would have to wait for the slowest group
    without a time limit.

    [Note: devices send in one order] A device that starts sending is busy until its peer starts
    sending. Until then, an operation that synchronizes the whole device, such as loading a kernel
    for the first time, waits for the peer. Messages are therefore sent in `collect`, in the same
    order on all ranks. When `collect` is called, the control vectors of all groups have arrived, so
    all messages are ready. If ranks start the hops of two flights in different orders, the flights
    deadlock. Two engines have no common order, so only one of them may have a channel at a time.
    """

    learns_sizes = False

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(dist.get_world_size(process_group))
        self.device = device
        self._process_group = process_group
        self._backend = str(dist.get_backend(process_group))
        self._group = dist.get_rank(process_group)
        self._ranks = dist.get_process_group_ranks(process_group)
        self._peers = [group for group in range(self.num_groups) if group != self._group]
        self._given_up: list[_OnDevice] = []
        self.open_channels: weakref.WeakSet[DeviceExchange] = weakref.WeakSet()

    @override
    def channel(self, engine: int) -> "DeviceExchange":
        channel = DeviceExchange(self._process_group, self.device)
        # Abandoned tensors must live as long as the process group.
        channel._given_up = self._given_up
        channel.open_channels = self.open_channels
        self.open_channels.add(channel)
        return channel

    @override
    def close(self) -> None:
        self.open_channels.discard(self)

    def meet(self, deadline: float) -> None:
        """Sends the first messages, which makes the backend connect. All groups must call this
        method.
        """
        posted = self.post(
            [torch.zeros(1, dtype=torch.uint8, device=self.device)] * self.num_groups
        )
        try:
            self._wait(posted, deadline)
        except Unanswered as error:
            raise ValueError(
                f"Ranks {self._ranks} of the worker groups cannot exchange messages over"
                f" {self._backend}: {error}. Set NCCL_DEBUG=INFO to log the attempts and"
                " NCCL_SOCKET_IFNAME to select the interface on every machine, or remove ':nccl' to"
                " use gloo."
            ) from error

    @override
    def post(self, messages: Sequence[Tensor], sizes: Sequence[int] | None = None) -> _OnDevice:
        """Prepares messages that the current stream may still be computing; see [Note: devices send
        in one order].
        """
        sent = [message.contiguous() for message in messages]
        message = sent[self._group]
        if sizes is None:
            sizes = [message.numel()] * self.num_groups
        received = [
            message if group == self._group else message.new_empty(size)
            for group, size in enumerate(sizes)
        ]
        # Empty messages are not posted. All groups agree on this, because they know the sizes.
        calls = list[dist.P2POp]()
        for group in self._peers:
            for call, tensor in ((dist.irecv, received[group]), (dist.isend, sent[group])):
                if tensor.numel():
                    operation = dist.P2POp(
                        call, tensor, group=self._process_group, group_peer=group
                    )
                    calls.append(operation)
        return _OnDevice(sent, received, calls)

    @override
    def collect(
        self, posted: _OnDevice, deadline: float, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        self._wait(posted, deadline)
        self._count(self._group, posted.messages, posted.received)
        return posted.received

    def _wait(self, posted: _OnDevice, deadline: float) -> None:
        works = []
        try:
            if posted.calls:
                works = dist.batch_isend_irecv(posted.calls)
        except RuntimeError as error:
            raise self._gone(error) from error
        for work in works:
            while not work.is_completed():
                if time.monotonic() >= deadline:
                    self._give_up(posted)
                    raise self._unanswered("did not answer in time")
                time.sleep(_BETWEEN_LOOKS)
        for work in works:
            try:
                # See [Note: the stream never waits for another rank]. A failed transfer also counts
                # as complete and raises its error here.
                work.wait()
            except RuntimeError as error:
                raise self._gone(error) from error

    def _give_up(self, posted: _OnDevice) -> None:
        # The device may still read and write these tensors, so their memory must not be reused.
        self._given_up.append(posted)
        # Without the abort, the device would be busy with these tensors until torch ends the
        # process. Aborting may take a long time, so nothing waits for it.
        abort = getattr(self._process_group, "abort", None)
        if abort:
            threading.Thread(target=abort, name="sdiloco-abort", daemon=True).start()

    def _gone(self, error: RuntimeError) -> Unanswered:
        return self._unanswered(
            f"went away, or {self._backend} failed: {str(error).splitlines()[0]}"
        )

    def _unanswered(self, reason: str) -> Unanswered:
        ranks = [str(self._ranks[group]) for group in self._peers]
        if len(ranks) == 1:
            return Unanswered(self._peers[0], f"{reason} (rank {ranks[0]})")
        # One call carries the messages of all groups, and it is complete only when all of them are.
        return Unanswered(None, f"{reason} (of ranks {', '.join(ranks)})")

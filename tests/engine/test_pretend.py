"""The pretended accelerator finds races and waits, and what it copies is not there too early.

That it computes what the CPU does, and sees no race where there is none, the tests show that train on it.
"""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests import pretend
from tests.pretend import Event, Race, Stream, alone, current_stream, stream, synchronisations

pytestmark = pytest.mark.timeout(90)


def ones(length: int = 4) -> Tensor:
    return torch.ones(length, device="pretend")


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function, name="other")
    thread.start()
    thread.join()


@alone
def test_devices_do_not_mix() -> None:
    for mixed in (
        lambda: ones() + torch.ones(4),
        lambda: torch.cat([torch.ones(1), ones()]),
        lambda: torch.mul(ones(), 2, out=torch.ones(4)),
        lambda: torch.ones(4).add_(ones()),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()


# Races


def reads_what_another_stream_writes() -> None:
    values = ones()
    with stream(Stream()):
        values + 1


def copies_to_the_host() -> None:
    values = ones()
    with stream(Stream()):
        values.to("cpu", non_blocking=True)


def waits_for_an_event_of_before() -> None:
    event, side = Event(), Stream()
    event.record()
    later = ones().add_(1)
    side.wait_event(event)
    with stream(side):
        later + 1


def reads_bytes_of_which_some_are_written() -> None:
    values, side = ones(8), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        values[4:].zero_()
    values[:4].zero_()
    values[3:5].sum()


def takes_memory_that_is_still_read() -> None:
    side = Stream()
    with stream(side):
        values = ones()
    current_stream().wait_stream(side)
    values.sum()
    del values
    with stream(side):
        ones()


def host_writes_where_a_copy_goes() -> None:
    host = torch.empty(4, pin_memory=True)
    host.copy_(ones(), non_blocking=True)
    host.zero_()
    current_stream().synchronize()


def host_changes_what_is_copied() -> None:
    host = torch.ones(4).pin_memory()
    host.to("pretend", non_blocking=True)
    host.add_(1)
    current_stream().synchronize()


def reads_pinned_memory_on_another_stream() -> None:
    host = torch.empty(4, pin_memory=True)
    host.copy_(ones(), non_blocking=True)
    with stream(Stream()):
        host.to("pretend", non_blocking=True)


RACES: list[tuple[Callable[[], None], str]] = [
    (reads_what_another_stream_writes, "aten::add on stream .* reads what aten::fill_ on the default stream .* writes"),
    (copies_to_the_host, "copy to the host on stream"),
    (waits_for_an_event_of_before, "reads what aten::add_"),
    (reads_bytes_of_which_some_are_written, "reads what aten::zero_"),
    (takes_memory_that_is_still_read, "may get memory that aten::sum on the default stream .* still reads"),
    (host_writes_where_a_copy_goes, "the host wrote to pinned memory"),
    (host_changes_what_is_copied, "the host changed pinned memory"),
    (reads_pinned_memory_on_another_stream, "copy to the device on stream .* reads what copy to the host"),
]


@alone
def test_two_accesses_that_nothing_orders_are_a_race() -> None:
    for race, told in RACES:
        with pytest.raises(Race, match=told):
            race()
        pretend.synchronize()  # all that it left is over for what comes next


@alone
def test_a_copy_to_pinned_memory_is_there_once_the_host_waited() -> None:
    host, event = torch.empty(3, dtype=torch.uint8, pin_memory=True), Event()
    for wait in (current_stream().synchronize, event.synchronize, pretend.synchronize):
        host.copy_(torch.tensor([1, 2, 3], dtype=torch.uint8, device="pretend"), non_blocking=True)
        event.record()
        assert host.tolist() == [255, 255, 255]
        wait()
        assert host.tolist() == [1, 2, 3]
    # Something earlier does not bring it.
    event, host = current_stream().record_event(), torch.empty(4, pin_memory=True)
    host.copy_(ones(), non_blocking=True)
    event.synchronize()
    assert host.isnan().all()
    event = Event()
    assert event.query()
    event.record()
    assert [event.query(), event.query()] == [False, True], "a query is not at once true"


@alone
def test_who_waits_is_noted() -> None:
    waits: dict[str, Callable[[], object]] = {
        "stream.synchronize": lambda: current_stream().synchronize(),
        "event.synchronize": lambda: current_stream().record_event().synchronize(),
        "synchronize": pretend.synchronize,
        "aten::_local_scalar_dense": lambda: bool(values.sum() > 1),
        "aten::equal": lambda: torch.equal(values, values),
        "aten::nonzero": lambda: values.nonzero(),
        "aten::index": lambda: values[values > 0],
        "copy to the host": lambda: torch.empty(4).copy_(values, non_blocking=True),
        "copy to the device": lambda: torch.tensor([1.0], device="pretend"),
    }
    for kind, wait in waits.items():
        values = ones()
        with synchronisations() as log:
            in_thread(wait)
        assert log == [("other", kind, True)]
    with synchronisations() as log:
        pretend.synchronize()
        pretend.synchronize()
    assert not log[1].waited

"""The pretended accelerator: it computes what the CPU does, finds races, and sees none where there is none."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco.compression import COMPRESSIONS
from tests import pretend
from tests.pretend import Event, Race, Stream, alone, current_stream, stream, synchronisations

pytestmark = pytest.mark.timeout(90)


def ones(length: int = 4) -> Tensor:
    return torch.ones(length, device="pretend")


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function, name="other")
    thread.start()
    thread.join()


# What it computes


@alone
def test_it_is_a_device_like_others_in_every_thread() -> None:
    seen = []
    for run in (lambda function: function(), in_thread):
        run(lambda: seen.append(torch.full((3,), 2.0, device="pretend") + torch.ones(3).to("pretend")))
    assert [values.device for values in seen] == [torch.device("pretend", 0)] * 2
    assert [values.tolist() for values in seen] == [[3.0, 3.0, 3.0]] * 2
    assert torch.get_device_module("pretend") is pretend
    assert torch.tensor([1, 2], device="pretend").cpu().tolist() == [1, 2]
    assert seen[0].new_tensor([4.0]).tolist() == [4.0]
    assert torch.arange(2, 8, 3, device="pretend").tolist() == [2, 5]
    assert (seen[0] * torch.tensor(2.0)).tolist() == [6.0, 6.0, 6.0]


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


@alone
def test_views_and_results_in_place_share_memory() -> None:
    values = torch.zeros(6, device="pretend")
    row = values.view(2, 3)[1]
    assert row.add_(1) is row
    assert torch.sub(values, 2, out=values) is values
    values.view(torch.int32)[0] = 0
    assert values.tolist() == [0.0, -2.0, -2.0, -1.0, -1.0, -1.0]
    parameter = nn.Parameter(values)
    parameter.data = values[3:]
    values.zero_()
    assert parameter.tolist() == [0.0, 0.0, 0.0]


OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "bits": lambda x: (x.view(torch.int32) >> 3 & 0x7FF).bitwise_or_(5).to(torch.uint8),
    "shorter words": lambda x: x.view(torch.int32).to(torch.int16).view(torch.uint8),
    "cat": lambda x: torch.cat([x, x[3:9], x.flip(0)]),
    "pad": lambda x: nn.functional.pad(x, (2, 3)),
    "split": lambda x: list(x.split([10, 40, 14])),
    "lookup": lambda x: torch.index_select(x, 0, (x > 0).to(torch.int32)),
    "indexing": lambda x: x[(x > 0).to(torch.int64)],
    "by mask": lambda x: x[x > 0],
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3, out=x.clone()),
    "sub": lambda x: torch.sub(x, x.flip(0), out=x.clone()),
    "norm": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    "finite": lambda x: bool((x / 0).isfinite().all()),
    "equal": lambda x: torch.equal(x, x.clone()),
    "top": lambda x: x.view(4, 16).topk(3, dim=1).indices,
    "scatter": lambda x: x.clone().view(4, 16).scatter_(1, x.view(4, 16).topk(1, dim=1).indices, 1.0),
    "product": lambda x: x.view(8, 8) @ x.view(8, 8),
    "other type": lambda x: x.to(torch.bfloat16),
}


def on_host(result: object) -> list[object]:
    parts = result if isinstance(result, list) else [result]
    return [part.cpu() if isinstance(part, Tensor) else part for part in parts]


@alone
def test_operations_give_the_bits_of_the_cpu() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for name, operation in OPERATIONS.items():
        for actual, expected in zip(on_host(operation(values.to("pretend"))), on_host(operation(values)), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=name)


@alone
def test_compressions_give_the_bytes_of_the_cpu() -> None:
    values = torch.randn(5001, generator=torch.Generator().manual_seed(0))
    for name, compression in COMPRESSIONS.items():
        payload, decoded = compression.encode(values), torch.empty_like(values)
        compression.decode(payload, decoded)
        there = compression.encode(values.to("pretend"))
        decoded_there = torch.empty(5001, device="pretend")
        compression.decode(there, decoded_there)
        assert torch.equal(there.cpu(), payload), name
        assert torch.equal(decoded_there.cpu(), decoded), name


@alone
def test_an_optimizer_steps() -> None:
    """With gradients that are given: where autograd has run before the fork, it knows of no further device."""
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].to("pretend")
    for model, device in zip(models, ("cpu", "pretend"), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(torch.full((2, 3), float(step)).to(device)).square().mean()
            for parameter in model.parameters():
                parameter.grad = loss.detach() * parameter.detach()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other.cpu())


# Races


@alone
def test_reading_what_another_stream_writes_needs_a_wait() -> None:
    values, side = ones(), Stream()
    with (
        pytest.raises(Race, match="aten::add on stream 1 .* reads what aten::fill_ on the default stream .* writes"),
        stream(side),
    ):
        values + 1


@alone
def test_overwriting_what_another_stream_reads_needs_a_wait() -> None:
    values, side = ones(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        values.sum()
    with pytest.raises(Race, match="aten::zero_ on the default stream .* overwrites what aten::sum on stream 1"):
        values.zero_()


@alone
def test_every_reader_must_be_waited_for_not_the_last_one_alone() -> None:
    values, first, second = ones(), Stream(), Stream()
    for side in (first, second):
        side.wait_stream(current_stream())
        with stream(side):
            values.sum()
    current_stream().wait_stream(second)
    with pytest.raises(Race, match="overwrites what aten::sum on stream 1"):
        values.zero_()


@alone
def test_copies_to_and_from_the_host_need_a_wait_too() -> None:
    values, side = ones(), Stream()
    with stream(side):
        for copy in (values.cpu, lambda: values.to("cpu", non_blocking=True), lambda: values.copy_(torch.zeros(4))):
            with pytest.raises(Race, match="copy to the .* on stream 1"):
                copy()


@alone
def test_an_event_orders_what_comes_before_it_alone() -> None:
    values, later, side = ones(), ones(), Stream()
    event = Event()
    event.record()
    later.add_(1)
    side.wait_event(event)
    with stream(side):
        values + 1
        with pytest.raises(Race):
            later + 1


@alone
def test_waiting_for_an_event_passes_on_what_it_knows_of_third_streams() -> None:
    first, second = Stream(), Stream()
    with stream(first):
        values = ones()
    second.wait_stream(first)
    current_stream().wait_event(second.record_event())
    assert values.add(1).tolist() == [2.0] * 4


@alone
def test_what_the_host_waited_for_is_over_for_all_streams_and_threads() -> None:
    def wait_by_event() -> None:
        current_stream().record_event().synchronize()

    for wait in (current_stream().synchronize, wait_by_event, pretend.synchronize, lambda: ones().sum().item()):
        values, side = ones(), Stream()
        in_thread(wait)
        with stream(side):
            values.add_(1)
        side.synchronize()
        assert values.tolist() == [2.0] * 4


@alone
def test_other_threads_begin_on_the_default_stream() -> None:
    streams = []
    with stream(Stream()):
        in_thread(lambda: streams.append(current_stream()))
    assert streams == [pretend.default_stream()]


@alone
def test_readers_and_who_touches_other_bytes_need_not_wait_for_each_other() -> None:
    values, side = ones(8), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        values.sum()
    values.sum()
    side.wait_stream(current_stream())
    current_stream().wait_stream(side)
    with stream(side):
        values[4:].zero_()
    values[:4].zero_()
    with pytest.raises(Race):
        values[3:5].sum()


@alone
def test_a_query_is_not_at_once_true() -> None:
    event = Event()
    assert event.query()
    ones()
    event.record()
    assert [event.query(), event.query()] == [False, True]


@alone
def test_freed_memory_is_not_for_others_while_a_stream_still_reads_it() -> None:
    def read_and_freed(recorded: bool) -> None:
        with stream(side):
            values = ones()
        current_stream().wait_stream(side)
        values.sum()
        if recorded:
            values.record_stream(current_stream())  # type: ignore[arg-type]

    side = Stream()
    read_and_freed(recorded=True)
    with stream(side):
        ones()
    read_and_freed(recorded=False)
    with pytest.raises(Race, match="may get memory that aten::sum on the default stream .* still reads"), stream(side):
        ones()


# Copies


@alone
def test_a_copy_to_pinned_memory_is_there_once_the_host_waited() -> None:
    host = torch.empty(3, dtype=torch.uint8, pin_memory=True)
    assert host.is_pinned()
    event = Event()
    for wait in (current_stream().synchronize, event.synchronize, pretend.synchronize):
        host.copy_(torch.tensor([1, 2, 3], dtype=torch.uint8, device="pretend"), non_blocking=True)
        event.record()
        assert host.tolist() == [255, 255, 255]
        wait()
        assert host.tolist() == [1, 2, 3]


@alone
def test_waiting_for_something_earlier_does_not_bring_a_copy() -> None:
    event, host = current_stream().record_event(), torch.empty(4, pin_memory=True)
    host.copy_(ones(), non_blocking=True)
    event.synchronize()
    assert host.isnan().all()


@alone
def test_a_copy_that_the_host_writes_into_is_a_race() -> None:
    host = torch.empty(4, pin_memory=True)
    host.copy_(ones(), non_blocking=True)
    host.zero_()
    with pytest.raises(Race, match="the host wrote to pinned memory"):
        current_stream().synchronize()


@alone
def test_pinned_memory_must_stay_as_it_is_until_it_is_copied() -> None:
    host = torch.ones(4).pin_memory()
    there = host.to("pretend", non_blocking=True)
    current_stream().synchronize()
    host.zero_()  # the copy is over
    assert there.tolist() == [1.0] * 4
    there.copy_(host, non_blocking=True)
    host.add_(1)
    with pytest.raises(Race, match="the host changed pinned memory"):
        current_stream().synchronize()


@alone
def test_a_side_stream_may_carry_rounds_through_the_same_pinned_memory() -> None:
    side, out, back = Stream(), torch.empty(4, pin_memory=True), torch.ones(1).new_empty(4, pin_memory=True)
    sums: list[Tensor] = []
    for _ in range(3):
        values = ones().add_(len(sums))
        side.wait_stream(current_stream())
        with stream(side):
            out.copy_(values, non_blocking=True)
            side.record_event().synchronize()
            back.copy_(out)
            there = back.to("pretend", non_blocking=True)
        current_stream().wait_stream(side)
        there.record_stream(current_stream())  # type: ignore[arg-type]
        sums.append(there + 1)
    assert [values[0].item() for values in sums] == [2.0, 3.0, 4.0]


@alone
def test_the_device_may_reuse_pinned_memory_in_order() -> None:
    host, values = torch.empty(4, pin_memory=True), ones()
    host.copy_(values, non_blocking=True)
    back = host.to("pretend", non_blocking=True)
    host.copy_(values + 1, non_blocking=True)
    current_stream().synchronize()
    assert (back.tolist(), host.tolist()) == ([1.0] * 4, [2.0] * 4)
    host.copy_(values, non_blocking=True)
    with pytest.raises(Race, match="copy to the device on stream .* reads what copy to the host"), stream(Stream()):
        host.to("pretend", non_blocking=True)


# Waiting


@alone
def test_who_waits_is_noted() -> None:
    host = torch.empty(4, pin_memory=True)
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
    for blocking in (values.cpu, lambda: host.copy_(values), lambda: values.copy_(host)):
        with synchronisations() as log:
            blocking()
        assert len(log) == 1
    with synchronisations() as log:
        pretend.synchronize()
        pretend.synchronize()
    assert not log[1].waited


@alone
def test_nobody_waits_for_what_need_not_be_waited_for() -> None:
    host, values = torch.empty(4, pin_memory=True), ones()
    with synchronisations() as log:
        values.add_(1).mul_(torch.tensor(2.0)).view(2, 2)[0] = 3.0
        values.copy_(host.fill_(0), non_blocking=True)
        host = values.to("cpu", non_blocking=True)
        current_stream().record_event().query()
        torch.zeros_like(values).new_full((), 3.0)
    assert log == []
    assert host.is_pinned()

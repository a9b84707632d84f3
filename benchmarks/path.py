"""Traces one fragment from launch to landing: the code that it passes through, and the cost
compared with a plain loop.

    python -m benchmarks.path [--quick] [--calls] [--json FILE]

It uses two worker groups over the loopback interface, with fp4 and otherwise default settings. The
plain loop is Algorithm 2 for two groups of one rank, which exchange only what they launch and how
much they trained: no digest, no finite mask, no buffers, no shards, no checkpoint. Both exchange
the same fragment in turns in the same two processes, without training. The processor time is that
of all threads. --calls prints every call in the package, with one line for consecutive calls in the
same file.
"""

import argparse
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_sdiloco
from benchmarks import report
from lightning_sdiloco import FP4, StreamingDiLoCo
from tests.ranks import run_ranks

WIDTHS = {"0.03M": 128, "0.5M": 512, "2.1M": 1024}
TARGETS = {"ms beyond a plain loop": 0.3, "files": 15}
PACKAGE = Path(lightning_sdiloco.__file__).parent


def network(width: int) -> nn.Module:
    """Makes a model of ``2 * width ** 2`` parameters, which form one fragment."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))


class Call(NamedTuple):
    """A call to a function of the package."""

    thread: str
    file: str
    function: str


def traced(rank: int, world_size: int) -> list[Call]:
    """Returns the calls from the inner step that launches a fragment to the one that lands it, in
    all threads.
    """
    calls: list[Call] = []
    names = {threading.get_ident(): "training"}
    is_open = False

    def see(frame: FrameType, event: str, _: Any) -> None:
        if is_open and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            thread = names.setdefault(threading.get_ident(), f"background {len(names)}")
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            calls.append(Call(thread, file, frame.f_code.co_name))

    # Tracing begins at the start, so that it includes threads that the engine starts long before.
    threading.setprofile(see)
    sys.setprofile(see)
    engine = StreamingDiLoCo(network(16), fragments=[["*"]])
    launches = engine.rounds.timetable.schedule.sync_every
    for step in range(1, launches + engine.rounds.timetable.schedule.overlap_steps + 1):
        is_open = step >= launches
        landed = engine.step()
        is_open = False
    sys.setprofile(None)
    threading.setprofile(None)
    assert len(landed) == 1, "the fragment has landed"
    engine.close()
    return calls


class Plain:
    """Algorithm 2 for two groups: launch, exchange, mean, outer step and landing of one
    fragment.
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float, mixing: float) -> None:
        self.parameters = list(model.parameters())
        self.mixing = mixing
        self.codec = FP4()
        self.outer = nn.Parameter(self.read())
        self.optimizer = torch.optim.SGD([self.outer], lr, momentum, nesterov=True)
        self.group = dist.new_group()
        self.step = 0
        self.thread = ThreadPoolExecutor(1)
        self.flight = Future[None]()

    def read(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    @torch.no_grad()
    def launch(self) -> None:
        self.step += 1
        head = torch.tensor([0, self.step, 1, 0])  # fragment, step, inner steps trained, requests
        self.flight = self.thread.submit(self.fly, head, self.outer - self.read())

    @torch.no_grad()
    def fly(self, head: Tensor, gradient: Tensor) -> None:
        message = torch.cat([head.view(torch.uint8), self.codec.encode(gradient)])
        messages = [torch.empty_like(message), torch.empty_like(message)]
        messages[rank := dist.get_rank()] = message
        received = dist.irecv(messages[1 - rank], 1 - rank, self.group)
        sent = dist.isend(message, 1 - rank, self.group)
        for work in (received, sent):
            assert work is not None, "this rank is in the group"
            work.wait()
        heads = [sent_by_rank[:32].clone().view(torch.int64).tolist() for sent_by_rank in messages]
        assert heads[0][:2] == heads[1][:2], "both launch the same"
        decoded = torch.empty_like(gradient)
        mean = torch.zeros_like(gradient)
        trained = heads[0][2] + heads[1][2]
        for (_, _, weight, _), sent_by_rank in zip(heads, messages, strict=True):
            self.codec.decode(sent_by_rank[32:], decoded)
            mean += decoded if 2 * weight == trained else decoded * (2 * weight / trained)
        self.outer.grad = mean.div_(2)
        self.optimizer.step()

    @torch.no_grad()
    def land(self) -> None:
        self.flight.result()
        parts = self.outer.detach().split([parameter.numel() for parameter in self.parameters])
        for parameter, new in zip(self.parameters, parts, strict=True):
            parameter.copy_(torch.lerp(new.view_as(parameter), parameter, self.mixing))


def costs(
    width: int, flights: int, turns: int, rank: int, world_size: int
) -> dict[str, list[float]]:
    """Returns the milliseconds of processor time of a flight, measured in alternating turns."""
    engine = StreamingDiLoCo(network(width), fragments=[["*"]], sync_every=2, overlap_steps=1)
    numbers = engine.report()
    plain = Plain(network(width), numbers["outer_lr"], numbers["outer_momentum"], numbers["mixing"])
    engine.step()
    ways: dict[str, tuple[Callable[[], object], ...]] = {
        "ours": (engine.step, engine.step),
        "plain": (plain.launch, plain.land),
    }
    milliseconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(turns + 1):
        for name, (launch, land) in ways.items():
            dist.barrier()
            began = time.process_time()
            for _ in range(flights):
                launch()
                land()
            if turn:  # in the first turn, memory is newly allocated
                milliseconds[name].append(1000 * (time.process_time() - began) / flights)
    engine.close()
    plain.thread.shutdown()
    return dict(milliseconds)


def print_calls(calls: list[Call]) -> None:
    """Prints the calls, with one line for consecutive calls of a thread in the same file."""
    for thread in dict.fromkeys(call.thread for call in calls):
        print(thread)
        thread_calls = [call for call in calls if call.thread == thread]
        for file, stay in groupby(thread_calls, key=lambda call: call.file):
            print(f"  {file:34} {' '.join(call.function for call in stay)}")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--calls", action="store_true", help="print every call of the flight that is traced"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    calls = run_ranks(traced, 2)[0]
    if options.calls:
        print_calls(calls)
    counted = {
        "files": len({call.file for call in calls}),
        "functions": len({call[1:] for call in calls}),
        "calls": len(calls),
    }
    headline: dict[str, float] = {
        f"from launch to landing: {name}": number for name, number in counted.items()
    }
    rows = []
    flights, turns = (5, 1) if options.quick else (20, 15)
    for name, width in list(WIDTHS.items())[:1] if options.quick else WIDTHS.items():
        milliseconds = run_ranks(partial(costs, width, flights, turns), 2, timeout=300.0)[0]
        ours = median(milliseconds["ours"])
        plain = median(milliseconds["plain"])
        headline[f"{name}: ms beyond a plain loop"] = ours - plain
        rows.append([name, f"{plain:.2f}", f"{ours:.2f}", f"{ours - plain:.2f}"])
    report.show(
        "From launch to landing, in all threads", list(counted), [list(map(str, counted.values()))]
    )
    columns = ["parameters", "a plain loop, ms", "the engine, ms", "more, ms"]
    report.show("Processor time of a launch and its landing", columns, rows, f"Targets: {TARGETS}.")
    report.write(options.json, headline, report.measured("path", options.quick), targets=TARGETS)


if __name__ == "__main__":
    main()

"""All claims of the pages, the sources of numbers that no file of results has, and how many numbers
may have neither.

A new number gets a claim beside those of its file of results, in `learning`, `ablations`, `methods`
or `speed`; or a line below.
"""

from collections.abc import Callable, Iterator, Mapping

from benchmarks.verify import ablations, learning, methods, speed
from benchmarks.verify.claims import Claim, Source
from benchmarks.verify.pages import ROOT
from benchmarks.verify.results import (
    BENCHMARKS,
    CHOOSING,
    COMPRESSION,
    FEDERATION,
    HOW_IT_WORKS,
    METHODS,
    PAPER,
    PLANNER,
    README,
)

DERIVED: Mapping[str, Callable[[], Iterator[Claim]]] = {
    "quality.json": learning.of_verdict,
    "quality.json, Muon": learning.of_muon,
    "quality.json, paper.json": learning.of_rounds,
    "benchmarks/scaling.py": learning.of_others,
    "quality.json, step of matrices": learning.of_matrices,
    "quality.json, sparse": learning.of_sparse,
    "quality.json, unequal": learning.of_unequal,
    "curve.json": learning.of_curve,
    "paper.json": ablations.of_paper,
    "few_rounds.json": ablations.of_few_rounds,
    "finetuning.json": ablations.of_finetuning,
    "defaults.json": ablations.of_defaults,
    "vision.json": ablations.of_vision,
    "methods.json": methods.of_methods,
    "claims.json": methods.of_claims,
    "backup_workers.json": methods.of_backup_workers,
    "loss_over_time.json": speed.of_loss_over_time,
    "slow_links.json": speed.of_slow_links,
    "wire_bytes.json": speed.of_wire_bytes,
    "overhead.json": speed.of_overhead,
    "memory.json": speed.of_memory,
    "flights.json, flights_links.json": speed.of_flights,
    "hub_transport.json, hub_rounds.json, site_steps.json": speed.of_hub,
    "chaos.json": speed.of_chaos,
    "guard.json": speed.of_guard,
    "compression.json, compression_speed.json, exchange.json": speed.of_compression,
    "directions.json, gpu_directions.json, gpu.json": speed.of_directions,
    "gpu.json": speed.of_gpu,
}
"""The claims by the files that they are derived from."""

_PAPER = "arXiv 2501.18512"
_SECTIONS_OF_CONSTANTS = (
    *("What a hub does", "Starting a site", "Before the first run: sdiloco doctor"),
    "Looking at a run",
)
_SECTIONS_OF_METHOD = (
    *("The exchange", "The outer step", "The dense beginning", "Memory"),
    *("The size of a checkpoint", "Signals and ends"),
)
_PAGES_OF_CONSTANTS = (
    *("api", "architecture", "clusters", "compatibility", "from-ddp", "launching", "monitoring"),
    *("quickstart", "recipes", "security", "settings", "troubleshooting", "works-with"),
)
_CONSTANTS = "settings, formats, defaults and limits, which the code has: nothing measured"
_PRINTED = "printed by the command beside it, which keeps no file"

SOURCES = (
    Source(README, "Try it", "docs/images/demo.json, compared by tests/tools/test_demos.py"),
    Source(BENCHMARKS, "adds 3.5 bytes per parameter", "arithmetic: 32 bits for 4.125, in a ring"),
    Source(BENCHMARKS, "the targets of 1 and 1.5 %", "the targets of `benchmarks.overhead`"),
    Source(BENCHMARKS, "including model and gradients (8 bytes)", "two float32 vectors"),
    Source(BENCHMARKS, "(50 ms, CUBIC, 8 connections)", "the cases of `benchmarks.hub_transport`"),
    Source(BENCHMARKS, "With 0.1 % of packets lost", "the cases of `benchmarks.hub_transport`"),
    Source(BENCHMARKS, "at 100 Mbit/s and 50 ms", "tests/chaos/world.py"),
    Source(BENCHMARKS, "waits up to 10 s for a late site", _CONSTANTS),
    Source(BENCHMARKS, "outer AdamW: within 1.2e-7", None),
    Source(CHOOSING, "The defaults", _CONSTANTS),
    Source(CHOOSING, "Trade-offs", _CONSTANTS),
    Source(CHOOSING, "a round sends more than 64 KiB", _CONSTANTS),
    Source(CHOOSING, "with steps of 0.5 s ... (planned)", "`sdiloco plan`"),
    Source(CHOOSING, "| sync_every | 10 | 20 | 40 | 100 | 100 |", _CONSTANTS),
    Source(CHOOSING, "at most 1/55 of DDP's", None),
    Source(CHOOSING, "at 0.1 million parameters only", "the model of the verdict"),
    Source(CHOOSING, "(0.1 million parameters; --stage alone)", "the model of the verdict"),
    Source(CHOOSING, "| neuralforecast, ... | 0.58 |", f"tests.foreign.directions: {_PRINTED}"),
    Source(CHOOSING, "What it costs", f"benchmarks.directions: {_PRINTED}"),
    Source(CHOOSING, "A momentum of 0.9 overshoots ... the engine", _CONSTANTS),
    Source(CHOOSING, "| rounds, H | 0.9 |", _CONSTANTS),
    Source(CHOOSING, "| regression of 128 steps ... -5 ± 4 |", f"benchmarks.few_rounds: {_PRINTED}"),
    Source(CHOOSING, "sends the 1/64 of the values ... warning appears", _CONSTANTS),
    Source(CHOOSING, "the bare name with 0.1 million ... 0.2 and 0.5 million", "quality.json"),
    Source(CHOOSING, "others found smaller gaps: ... with eight", "arXiv 2505.23725"),
    Source(CHOOSING, "| setting | seed 0 | seed 1 |", _CONSTANTS),
    Source(COMPRESSION, "Which compression", _CONSTANTS),
    Source(COMPRESSION, "section 2.4", "a section of the paper"),
    Source(COMPRESSION, "Put together", _CONSTANTS),
    Source(COMPRESSION, "One shot or two", "arithmetic: M - 1, and 2 (M - 1) / M"),
    Source(COMPRESSION, "a byte-level GPT with 0.9 million parameters", "the model"),
    Source(COMPRESSION, "The fp4 payload", _CONSTANTS),
    Source(COMPRESSION, "From device to device", "arithmetic from the rates beside it"),
    Source(COMPRESSION, "Messages are paced. ... lose packets.", _CONSTANTS),
    Source(COMPRESSION, "less two round trips (50 ms)", "the cases of `benchmarks.flights`"),
    Source(COMPRESSION, "With round trips of 200 ms", "the cases of `benchmarks.flights`"),
    Source(COMPRESSION, "A loss of 0.5 %", "the cases of `benchmarks.flights`"),
    *(Source(FEDERATION, heading, _CONSTANTS) for heading in _SECTIONS_OF_CONSTANTS),
    Source(FEDERATION, "A site may be 3 s away ... 6 s", "tests/federation, and the doctor"),
    Source(FEDERATION, "Memory: 2 MiB and some chunks of 256 KiB", _CONSTANTS),
    Source(FEDERATION, "with payloads of 16 KiB", "the cases of `benchmarks.hub_rounds`"),
    Source(FEDERATION, "With 1 MiB", "the cases of `benchmarks.hub_rounds`"),
    Source(FEDERATION, "Wrong values", f"benchmarks.guard: {_PRINTED}"),
    Source(HOW_IT_WORKS, "13 of 34 such contributions ... higher", None),
    *(Source(HOW_IT_WORKS, heading, _CONSTANTS) for heading in _SECTIONS_OF_METHOD),
    Source(METHODS, "the uplink is 10 times slower", "the cases of `benchmarks.methods.claims`"),
    Source(METHODS, "with speeds 1, 1, 1, 0.5", "the case of examples/methods/dylu.py"),
    Source(METHODS, "lognormal times, $\\sigma$ 0.2", "the case of `benchmarks.drop_compute`"),
    Source(METHODS, "stalls of 60 s in 2 % of rounds of 30 s", "`benchmarks.backup_workers`"),
    Source(METHODS, "a site that is 8 s late", "the case of `benchmarks.backup_workers`"),
    Source(METHODS, "momentum 0.5 (0.9 went too far)", "the argument of EagerUpdates"),
    Source(METHODS, "the paper lost 1 %", "arXiv 2502.12996"),
    Source(METHODS, "loses more than 1 % or lets each group", _CONSTANTS),
    Source(METHODS, "where the model predicts 1.33", "`sdiloco plan --links`"),
    Source(PAPER, "we train 0.1 to 0.5 million on CPUs", "the models of `benchmarks.quality`"),
    Source(PAPER, "with 25 to 250 tokens ... above", _PAPER),
    Source(PAPER, "M=2 is -0.4 to +0.6 % above DDP ... with H=100", _PAPER),
    Source(PAPER, "M=4 is 0.8 to 2 % above M=2", _PAPER),
    Source(PAPER, "loss within 0.2 % up to tau = 10, with alpha 0 and 0.5", _PAPER),
    Source(PAPER, '"As good" means at most 0.5 % worse', "`benchmarks.paper.ALIKE`"),
    Source(PLANNER, "", "`sdiloco plan`, compared by tests/tools/test_cli.py; and constants"),
    Source("docs/untrained-state.md", "", f"benchmarks.untrained: {_PRINTED}"),
    Source("docs/launching.md", "Measured", None),
    Source("docs/monitoring.md", "Mixtures of experts", None),
    Source("docs/monitoring.md", "it kept computing for 93.8 %", None),
    *(Source(f"docs/{name}.md", "", _CONSTANTS) for name in _PAGES_OF_CONSTANTS),
)
"""Where numbers are from that no file of results has."""

OPEN: Mapping[str, int] = {
    BENCHMARKS: 8,
    CHOOSING: 27,
    FEDERATION: 4,
    HOW_IT_WORKS: 1,
    PAPER: 2,
    "docs/launching.md": 2,
    "docs/monitoring.md": 14,
}
"""How many numbers of a page may have neither, none where it says nothing; it may only fall."""


def claims() -> Iterator[tuple[str, Claim]]:
    """Yields all claims, each with the names of its files of results."""
    for files, of_files in DERIVED.items():
        for claim in of_files():
            yield files, claim


def pages() -> list[str]:
    """Returns the paths of all pages."""
    names = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
    return [README, *names]

"""Ten million parameters: a fit holds little more than outer parameters, momentum and what is in flight."""

import pytest

from benchmarks.case import Case
from benchmarks.memory import SIZES, parameters
from benchmarks.sites import Job, run

pytestmark = [pytest.mark.large, pytest.mark.timeout(180)]


def test_a_group_takes_eight_bytes_a_parameter_and_a_flight_over_a_fit_that_knows_no_other() -> None:
    case = Case(SIZES["10M"], 4, step_seconds=0.0, sync_every=8, overlap_steps=1)
    found = {method: run(Job(method, case, 2, None, 1, 22))["memory"] for method in ("lightning_alone", "streaming")}
    if not found["lightning_alone"]:
        pytest.skip("This system does not say how much memory a process has.")
    # Eight for outer parameters and momentum, three for the fragment in flight, and what the allocator keeps.
    assert (found["streaming"] - found["lightning_alone"]) / parameters(case.size) < 14

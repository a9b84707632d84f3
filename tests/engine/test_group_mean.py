"""The mean of the groups, as evaluation shows it: what it is, and that training does not notice."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import OuterOptimizer, WorkerGroups
from lightning_sdiloco.compression import ByLink, ErrorFeedback, Int4, RandomK
from tests.engine.groups import Groups, Rank, Values, copied, unlike, with_statistics
from tests.ranks import run_ranks

SETTINGS: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "fragments": "strided:2"}


def trained(groups: int, steps: int, **choices: Any) -> Groups:
    run = Groups(groups, net=with_statistics, **{**SETTINGS, **choices})
    run.until(steps)
    return run


def shown(run: Groups, group: int = 0) -> Values:
    """What the model of a group holds where it shows the mean."""
    with run.engines[group].evaluate(run.groups.group_mean()):
        return copied(run.models[group].state_dict())


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """All values of a nested state by the path to them."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    found = {key: value for part, inner in items for key, value in flat(inner, f"{name}/{part}").items()}
    return found or {name: state}


def same(one: Any, other: Any) -> bool:
    """Whether two nested states hold the same bits, except for bytes that were sent and seconds that it took."""
    ours, theirs = flat(one), flat(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[key]) if isinstance(value, Tensor) else value == theirs[key]
        for key, value in ours.items()
        if "/bytes_" not in key and not key.endswith("_s")
    )


def floating(values: Values) -> Values:
    return {name: own for name, own in values.items() if own.is_floating_point()}


def test_it_is_the_plain_mean_of_local_values_whatever_is_shown_and_what_a_fit_that_ends_there_leaves() -> None:
    """In four bits of the whole training's change, weights that all groups have at 0.999 came out as 0.74 to 1.28."""
    two_shots = {"compression": "int2", "exchange": "two_shot"}
    for choices in ({"compression": "fp32"}, {}, {"compression": "sparse"}, {"compression": ByLink()}, two_shots):
        run = trained(3, 1, **choices)
        for model in run.models:
            nn.init.constant_(model[0].bias, 0.999)
        mean, states = floating(shown(run, 1)), [model.state_dict() for model in run.models]
        for name, values in mean.items():
            expected = torch.stack([state[name].double() for state in states]).mean(dim=0)
            torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
        for engine in run.engines:
            engine.show_outer()
        outer = copied(run.models[0].state_dict())
        of_shown = run.groups.group_mean()
        assert unlike(copied(run.models[0].state_dict()), outer) == []
        for engine in run.engines:
            engine.show_local()
        with run.engines[0].evaluate(of_shown):
            assert unlike(floating(copied(run.models[0].state_dict())), mean) == []
        run.until(3)
        mean = floating(shown(run))
        run.groups.finish()
        assert unlike(floating(run.models[1].state_dict()), mean) == []


@pytest.mark.parametrize(
    ("groups", "choices"),
    [
        (2, {"compression": "sparse"}),
        (2, {"compression": ErrorFeedback(RandomK(8, Int4()))}),
        (3, {"compression": Int4(), "exchange": "two_shot", "outer_optimizer": OuterOptimizer(outlier_guard=3.0)}),
    ],
)
def test_taking_it_after_every_step_changes_no_bit_of_training(groups: int, choices: dict[str, Any]) -> None:
    plain, looked = trained(groups, 0, **choices), trained(groups, 0, **choices)
    for step in range(1, 10):
        torch.manual_seed(step)
        plain.step()
        random = torch.get_rng_state()
        torch.manual_seed(step)
        looked.step()
        shown(looked)
        assert torch.equal(torch.get_rng_state(), random)
        # Before any launch, in flight, and after landings.
        for one, other in zip(plain.engines, looked.engines, strict=True) if step % 3 == 0 else ():
            assert same(one.state_dict(), other.state_dict())
    assert looked.engines[0].report()["bytes_sent"] > plain.engines[0].report()["bytes_sent"]
    plain.groups.finish()
    looked.groups.finish()
    assert same(plain.models[0].state_dict(), looked.models[0].state_dict())


def test_real_ranks_take_it_with_fragments_in_flight() -> None:
    def train(rank: int, world_size: int, looks: bool) -> Any:
        here, flew, means = Rank(rank, WorkerGroups(2), "sgd", **{**SETTINGS, "fragments": "strided:1"}), 0, []
        for step in range(1, 12):
            here.step(step)
            if looks:
                flew, sent = max(flew, len(here.engine.in_flight)), here.engine.report()["bytes_sent"]
                with here.engine.evaluate(here.engine.group_mean()):
                    means.append(copied(here.model.named_parameters()))
                assert here.engine.report()["bytes_sent"] > sent
        before = here.engine.state_dict()
        here.engine.finish()
        with pytest.raises(RuntimeError, match=r"group_mean\(\) was called after finish"):
            here.engine.group_mean()
        return before, flew, means

    def both(rank: int, world_size: int) -> Any:
        state, flew, means = train(rank, world_size, True)
        return same(state, train(rank, world_size, False)[0]), flew > 1, means

    ranks = run_ranks(both, 4)
    for is_same, flew, means in ranks:
        assert is_same
        assert flew
        assert same(means, ranks[0][2])

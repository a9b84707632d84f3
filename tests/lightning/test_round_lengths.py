"""``sync_every`` that nobody gives: it follows the length of the fit and the link, the same on all
ranks, and a resumed fit takes it from its checkpoint.
"""

import json
import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn

from lightning_sdiloco import DenseBeginning, Federation, StreamingDiLoCoMonitor
from lightning_sdiloco import StreamingDiLoCoFabricStrategy as FabricStrategy
from lightning_sdiloco.algorithm.config import ENOUGH_ROUNDS, round_lengths
from lightning_sdiloco.algorithm.schedule import Schedule
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.lightning import options as options_module
from lightning_sdiloco.lightning.fit import Fit
from lightning_sdiloco.lightning.options import Options
from lightning_sdiloco.planning.link import Link
from lightning_sdiloco.tools.run_files import read_run
from tests import fits
from tests.fits import LIGHTNING, OTHER, Announced, SomeBatches, at, on, said_by, save
from tests.ranks import agreed, in_ranks
from tests.training import mlp


@pytest.mark.parametrize(
    ("steps", "lengths"),
    [
        (math.inf, [100]),
        (1_000_000, [100]),
        (35_000, [100]),
        (34_999, [99, 100]),
        (14_000, [40, 80, 100]),
        (7146, [20, 40, 80, 100]),
        (3573, [10, 20, 40, 80, 100]),
        (1786, [10, 20, 40, 80, 100]),
        (500, [10, 20, 40, 45]),
        (225, [10, 20]),
        (115, [10]),
        (3, [10]),
        (0, [10]),
    ],
)
def test_round_lengths_of_fits_are_known(steps: float, lengths: list[int]) -> None:
    assert round_lengths(steps) == lengths


def test_rounds_leave_time_for_flights_and_a_lower_bound_holds() -> None:
    """A flight takes a quarter of a round where the fit is long enough, and at most half of it."""
    assert round_lengths(10_000, overlap_steps=0) == [28, 56, 100]
    assert round_lengths(5000, overlap_steps=15) == [60, 100]
    assert round_lengths(500, overlap_steps=15) == [44]
    assert round_lengths(50, overlap_steps=15) == [30]
    assert round_lengths(50, overlap_steps=99) == [100]
    assert round_lengths(math.inf, overlap_steps=99) == [100]
    assert round_lengths(5000, least=64) == [64, 100]
    assert round_lengths(50, least=64) == [64]
    assert round_lengths(5000, 20) == [20, 40, 80, 100]
    assert round_lengths(224, 20) == [19]


def test_at_least_ten_rounds_of_every_suitable_length_fit() -> None:
    for steps, fragments in product((115, 150, 300, 1000, 20_000), (1, 3, 32)):
        for length in round_lengths(steps):
            schedule = Schedule(length, overlap_steps=5, fragments=fragments)
            assert schedule.rounds_in(steps) >= ENOUGH_ROUNDS


def stop(trainer: Any, *_: Any) -> None:
    trainer.should_stop = True


def length_and_line(rank: int, batches: int = 2, **choices: Any) -> tuple[int, str]:
    """The ``sync_every`` of a fit, of which a batch is trained, and the line at its start."""
    messages = said_by(LIGHTNING, OTHER)
    of_trainer = {
        name: choices.pop(name) for name in ("max_steps", "max_epochs") if name in choices
    }
    strategy = fits.strategy(**choices)
    trainer = fits.trainer(
        strategy=strategy, devices=2, callbacks=[on(on_train_batch_end=stop)], **of_trainer
    )
    trainer.fit(fits.module(), Announced((rank, 0, 1), batches))
    line = "".join(text for text in messages if "The first launch follows" in text)
    return strategy.engine.rounds.settings.sync_every, line


@in_ranks(2)
def test_the_start_line_says_which_rounds_suit_the_fit_and_why(rank: int) -> None:
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"max_steps": 300}, 10, "sync_every=10 (for the 300 inner steps of this fit), overlap"),
        ({"max_steps": 150}, 10, "sync_every=10 (for the 150 inner steps of this fit), overlap"),
        ({"max_steps": 14_000}, 40, "sync_every=40 (for the 14,000 inner steps of this fit), "),
        ({"max_steps": 90_000}, 100, "sync_every=100 (for the 90,000 inner steps of this fit), "),
        ({"max_epochs": -1}, 100, "sync_every=100 (the default), overlap_steps=5, "),
        ({"max_steps": 2000, "overlap_steps": 8}, 32, "sync_every=32 (for the 2,000 inner "),
        ({"max_steps": 2000, "worker_groups": 1}, 100, "sync_every=100 (the default), "),
        (
            {"max_steps": 2000, "dense_beginning": DenseBeginning(2, 16)},
            32,
            "sync_every=32 (for the 2,000 inner steps of this fit), ",
        ),
        # Given numbers are never changed.
        ({"max_steps": 300, "sync_every": 100}, 100, "sync_every=100, overlap_steps=5, "),
        ({"max_steps": 90_000, "sync_every": 3}, 3, "sync_every=3, overlap_steps=2, "),
    ]
    for choices, sync_every, words in cases:
        chosen, line = length_and_line(rank, **choices)
        assert chosen == sync_every, choices
        assert rank or words in line


@in_ranks(2)
def test_ranks_with_unequal_numbers_of_batches_choose_alike(rank: int) -> None:
    """The shortest fit counts: 14,000 steps, of which 350 rounds have 40."""
    Fit._known_steps = property(lambda fit: 14_000 + 7000 * rank)
    assert length_and_line(rank, max_epochs=1)[0] == 40


def test_fabric_the_engine_and_sites_keep_the_default_of_unknown_lengths() -> None:
    site = Federation(hub="localhost:1", run="run", site="site", insecure=True)
    assert FabricStrategy()._options.settings.sync_every == 100
    assert fits.strategy(federation=site)._options.settings.sync_every == 100
    assert StreamingDiLoCo(mlp()).rounds.settings.sync_every == 100


def lengths_of_fits(
    rank: int, path: Path | None, *steps: int, saves: Path | None = None, **choices: Any
) -> list[int]:
    """The ``sync_every`` of fits of one strategy, the first of which resumes."""
    strategy = fits.strategy(**choices)
    callbacks = [at({2: save(saves)} if saves else {}), at({3: stop, 4: stop})]
    trainer = fits.trainer(strategy=strategy, devices=2, max_steps=0, callbacks=callbacks)
    model = fits.module()
    lengths = []
    for max_steps in steps:
        trainer.fit_loop.epoch_loop.max_steps = max_steps
        trainer.should_stop = False
        trainer.fit(model, SomeBatches(rank, 20), ckpt_path=path)
        lengths.append(strategy.engine.rounds.settings.sync_every)
        path = None
    return lengths


@in_ranks(2)
def test_a_resumed_fit_takes_the_rounds_of_its_checkpoint_and_later_ones_their_own(
    rank: int, tmp_path: Path
) -> None:
    lengths = partial(lengths_of_fits, rank)
    by_length = tmp_path / "by_length.ckpt"
    by_number = tmp_path / "by_number.ckpt"
    assert lengths(None, 300, saves=by_length) == [10]
    assert lengths(None, 300, saves=by_number, sync_every=7) == [7]
    for path, sync_every in ((by_length, 10), (by_number, 7)):
        assert lengths(path, 40_000, 14_000) == [sync_every, 40]
        # Rounds that restart may be of any length.
        assert lengths(path, 40_000, resume="restart") == [100]
    message = fits.refusal(lengths, by_length, 300, sync_every=100)
    assert "sync_every was 10, now it is 100" in message


@in_ranks(2)
def test_a_search_for_a_learning_rate_leaves_the_rounds_to_the_fit(rank: int) -> None:
    class Rated(type(fits.module())):  # type: ignore[misc]
        lr = 0.01

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    strategy = fits.strategy()
    finder = LearningRateFinder(num_training_steps=20)
    trainer = fits.trainer(strategy=strategy, devices=2, max_steps=300, callbacks=[finder])
    trainer.fit(Rated(), SomeBatches(rank, 20))
    assert strategy.engine.rounds.settings.sync_every == 10


# The link


class Fitted:
    """The choice and the bits of a fit."""

    def __init__(self, strategy: Any, model: nn.Module) -> None:
        self.settings = strategy.engine.rounds.settings
        self.parameters = [fits.whole(parameter) for parameter in model.parameters()]

    def is_like(self, fitted: "Fitted") -> bool:
        """Returns whether settings and bits are the same."""
        same_settings = self.settings.described() == fitted.settings.described()
        return same_settings and all(map(torch.equal, self.parameters, fitted.parameters))


def large_net() -> nn.Module:
    """33,859 parameters: in float32 more than the smallest message that is measured."""
    torch.manual_seed(0)
    blocks = [nn.Linear(64, 64) for _ in range(8)]
    return nn.Sequential(nn.Linear(5, 64), nn.Tanh(), *blocks, nn.Linear(64, 3))


def fit_over(
    rank: int, link: Link | None, path: Path | None = None, steps: int = 300, **choices: Any
) -> Fitted:
    """Trains up to 70 steps of a fit over a link that rank 0 measures; no link: none may be
    measured.
    """

    def measured_link(*_: Any) -> Link:
        assert link is not None, "nothing has to be measured"
        # The measurement of rank 0 counts.
        return link if rank == 0 else Link(gbit_s=1e-9, round_trip=0.1)

    options_module.measure_link = measured_link
    Options.step_time = lambda options: 1.0
    callbacks = [*choices.pop("callbacks", []), at({70: stop})]
    strategy = fits.strategy(compression="fp32", fragments=8, **choices)
    trainer = fits.trainer(strategy=strategy, devices=2, max_steps=steps, callbacks=callbacks)
    model = fits.module(net=large_net())
    trainer.fit(model, Announced((rank, 0, 1), 100), ckpt_path=path)
    return Fitted(strategy, model)


FAST = Link(gbit_s=1.0, round_trip=0.001)
# A round of 20 seconds is too short for 135 kB at this rate, and one of 40 is long enough.
SLOW = Link(gbit_s=4.5e-5, round_trip=0.001)
SLOWEST = Link(gbit_s=1e-7, round_trip=0.001)
LONGER = (
    "Chosen: sync_every={}, although 10 suits the {} inner steps of this fit better. The reason is"
    " that {} because the measured inner step takes 1 s and the link carries {} with a round trip"
    " of 1 ms. To accept the longer wait, set sync_every=10."
)


@in_ranks(2)
def test_rounds_grow_until_the_link_hides_them_with_the_bits_of_a_given_number(
    rank: int, tmp_path: Path
) -> None:
    early = tmp_path / "7.ckpt"
    late = tmp_path / "9.ckpt"
    fast = fit_over(rank, FAST)
    slow = fit_over(rank, SLOW, steps=600, callbacks=[at({7: save(early), 9: save(late)})])
    lengths = [fast.settings.sync_every, slow.settings.sync_every]
    assert lengths == [10, 40]
    assert agreed(lengths)
    assert fast.is_like(fit_over(rank, None, sync_every=10, overlap_steps=2))
    assert slow.is_like(fit_over(rank, None, steps=600, sync_every=40))
    # Before the choice a checkpoint has none; afterwards nothing is measured again.
    assert slow.is_like(fit_over(rank, SLOW, early, steps=600))
    assert slow.is_like(fit_over(rank, None, late, steps=600))
    assert fit_over(rank, FAST, early, steps=14_000).settings.sync_every == 40
    assert fit_over(rank, None, early, steps=40_000).settings.sync_every == 100


@in_ranks(2)
def test_rounds_that_grow_for_a_slow_link_are_warned_of_and_ten_remain(rank: int) -> None:
    messages = said_by("lightning_sdiloco", LIGHTNING, OTHER)
    fit_over(rank, FAST)
    assert not [text for text in messages if "Chosen: sync_every" in text]
    fit_over(rank, SLOW, steps=600)
    assert fit_over(rank, SLOWEST).settings.sync_every == 26
    if rank == 0:
        waits = "training would wait for the link in shorter rounds,"
        assert LONGER.format(40, 600, waits, "45 kbit/s") in messages
        waits = (
            "training waits for the link in these rounds and would wait longer in shorter rounds,"
        )
        assert LONGER.format(26, 300, waits, "100 bit/s") in messages
        words = "sync_every=40 (for the 600 inner steps of this fit and its link), overlap_steps=5"
        assert [text for text in messages if words in text and "follows inner step 40" in text]


@in_ranks(2)
def test_small_models_long_fits_and_given_numbers_measure_no_link(rank: int) -> None:
    assert fit_over(rank, None, steps=10, sync_every=100).settings.sync_every == 100
    options_module.measure_link = lambda *_: pytest.fail("nothing has to be measured")
    assert length_and_line(rank, max_steps=300)[0] == 10
    assert fit_over(rank, None, steps=36_000).settings.sync_every == 100


@in_ranks(2)
def test_records_hold_the_rounds_that_were_chosen_for_the_link(rank: int, tmp_path: Path) -> None:
    monitor = StreamingDiLoCoMonitor(folder=str(tmp_path))
    chosen = fit_over(rank, SLOW, steps=600, callbacks=[monitor])
    assert chosen.settings.sync_every == 40
    if rank == 0:
        lines = (tmp_path / "rank_00000.jsonl").read_text().splitlines()
        assert json.loads(lines[0])["settings"]["sync_every"] == 10
        assert read_run(tmp_path).ranks[0].about["settings"]["sync_every"] == 40

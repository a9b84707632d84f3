"""After the last step nothing is lost: what hooks write then, ranks that differ, and exceptions."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import StreamingDiLoCo
from tests import fits, sharded
from tests.bits import same
from tests.fits import SHORT, on, said_by
from tests.ranks import agreed, in_ranks, run_ranks
from tests.training import batch, mlp

FIT = "lightning_sdiloco.lightning.fit"


class WithTeacher(nn.Module):
    """A model with a frozen copy that follows it, a buffer, and a buffer that belongs to a rank
    alone.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.student = mlp(seed)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("threshold", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    @torch.no_grad()
    def follow(self, rank: int) -> None:
        for own, of in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.lerp_(of, 0.5)
        self.seen += rank


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


@in_ranks(4)
def test_unequal_writes_in_on_train_end_become_rank_0s_with_a_warning(
    rank: int, distribution: str
) -> None:
    written = dict[str, Tensor]()
    said = said_by(FIT)

    def average(trainer: Any, module: Any) -> None:
        with torch.no_grad():
            for tensor in (
                module.net.student[0].weight,
                module.net.teacher[0].bias,
                module.net.threshold,
            ):
                tensor.add_(1.0 + rank)
            module.net.seen += rank
        written.update(tensors(module))

    net = WithTeacher(rank)
    choices = {"callbacks": [on(distribution, on_train_end=average)]}

    def make(*args: Any, **kwargs: Any) -> Any:
        return fits.module(
            distribution, net=net, on_train_batch_end=lambda self, *_: net.follow(rank)
        )

    def inspect(trainer: Any, module: Any) -> tuple[Any, Any]:
        return trainer.strategy.outer_state_dict(), tensors(module)

    trained = fits.fit(
        rank, 4, 2, 9, SHORT, distribution, inspect=inspect, trainer_choices=choices, make=make
    )
    outer, model = trained["inspected"]
    assert rank or same(model, written)
    assert int(model.pop("net.seen")) == int(written["net.seen"]), "it belongs to this rank alone"
    assert agreed(model)
    assert agreed(outer)
    assert torch.equal(model["net.student.0.weight"], outer["net.student.0.weight"] + 1.0)
    warnings = [text for text in said if "differ between ranks" in text]
    assert len(warnings) == (rank == 0)
    for text in warnings:
        assert "After training 3 tensors of the model" in text
        assert "'net.student.0.weight', 'net.teacher.0.bias', 'net.threshold'." in text
        assert "strategy.outer_state_dict()" in text


@in_ranks(2)
def test_equal_writes_of_all_ranks_in_on_train_end_stay_without_a_warning(rank: int) -> None:
    said = said_by(FIT)

    def average(trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.net[0].weight.fill_(0.25)
        trainer.save_checkpoint("/dev/null")

    callbacks = {"callbacks": [on(on_train_end=average)]}
    trained = fits.fit(rank, 2, 2, 9, SHORT, trainer_choices=callbacks)
    assert bool((trained["model"]["0.weight"] == 0.25).all())
    assert not bool((trained["outer"]["0.weight"] == 0.25).any()), (
        "the outer model can still be read"
    )
    assert not [text for text in said if "differ between ranks" in text]


@in_ranks(2)
def test_a_layer_that_only_one_rank_has_after_training_is_a_warning_too(rank: int) -> None:
    said = said_by(FIT)

    def replace(trainer: Any, module: Any) -> None:
        module.extra = nn.Linear(3 + rank, 2)
        if rank:
            module.other = nn.Linear(2, 2)

    fits.fit(rank, 2, 2, 9, SHORT, trainer_choices={"callbacks": [on(on_train_end=replace)]})
    assert rank or "'extra.weight', 'extra.bias', 'other.weight', 'other.bias'" in said[-1]


@in_ranks(4)
def test_sharded_parameters_that_groups_write_differently_are_those_of_group_0(rank: int) -> None:
    said = said_by(FIT)

    def average(trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.net[0].weight.to_local().add_(rank // 2)

    def make(distribution: str, inner: str, seed: int) -> Any:
        return sharded.sharded(distribution, seed, inner)

    choices = {**SHORT, "data_parallel_size": 2, "tensor_parallel_size": 1}
    callbacks = {"callbacks": [on(on_train_end=average)], "limit_val_batches": 0}
    trained = fits.fit(
        rank, 4, 2, 9, choices, trainer_choices=callbacks, make=make, loader=fits.batches(rank // 2)
    )
    assert agreed(trained["model"])
    assert same(trained["model"], trained["outer"]), "group 0 added nothing"
    assert (
        rank
        or "After training 1 tensors of the model differ between ranks: 'net.0.weight'." in said[-1]
    )


def test_the_caller_of_forked_ranks_gets_back_the_final_writes_of_rank_0() -> None:
    def average(trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.net[0].weight.fill_(1.0 + trainer.global_rank)

    model = fits.module(net=mlp(0))
    chosen = fits.strategy(start_method="fork", **SHORT)
    trainer = fits.trainer(
        strategy=chosen, devices=2, max_steps=9, callbacks=[on(on_train_end=average)]
    )
    before = tensors(model)
    loader = fits.batches(0)
    trainer.fit(model, loader)
    assert bool((model.net[0].weight == 1.0).all())
    outer = chosen.outer_state_dict()
    assert not torch.equal(model.net[2].weight, before["net.2.weight"])
    assert torch.equal(model.net[2].weight, outer["net.2.weight"])


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
def test_after_an_exception_in_a_hook_at_the_end_all_ranks_hold_the_outer_model(hook: str) -> None:
    @in_ranks(2)
    def run(rank: int) -> None:
        def fail(*args: Any) -> None:
            if rank:
                raise ArithmeticError("the disk is full")

        model = fits.module(net=mlp(rank))
        chosen = fits.strategy(**SHORT)
        choices = {"devices": 2, "max_steps": 9, "callbacks": [on(**{hook: fail})]}
        trainer = fits.trainer(strategy=chosen, **choices)
        if rank:
            with pytest.raises(ArithmeticError, match="the disk is full"):
                trainer.fit(model, fits.batches(rank))
        elif hook == "on_fit_end":
            trainer.fit(model, fits.batches(rank))
        else:
            with pytest.raises(RuntimeError):
                trainer.fit(model, fits.batches(rank))
        assert chosen.engine.is_finished
        assert same(tensors(model), chosen.outer_state_dict())

    run()


@in_ranks(2)
def test_parameters_that_become_trainable_after_the_last_epoch_cost_no_result(rank: int) -> None:
    net = WithTeacher(rank)

    def end_epoch(self: Any) -> None:
        net.follow(rank)
        net.teacher.requires_grad_(True)
        self.trainer.should_stop = True

    def make(*args: Any, **kwargs: Any) -> Any:
        return fits.module(net=net, on_train_epoch_end=end_epoch)

    epochs = {"max_epochs": 9, "limit_train_batches": 7}
    trained = fits.fit(rank, 2, 2, -1, SHORT, trainer_choices=epochs, make=make)
    assert agreed(trained["model"])
    assert agreed(dict(net.teacher.named_parameters()))


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_that_does_not_travel_is_group_0s_after_finish_in_a_plain_loop(ranks: int) -> None:
    def run(rank: int, world_size: int) -> tuple[Any, Any]:
        net = WithTeacher(rank)
        optimizer = torch.optim.SGD(net.student.parameters(), lr=0.1)
        if ranks == 2:
            engine = StreamingDiLoCo(net, **SHORT)
        else:
            from torch.nn.parallel import DistributedDataParallel

            from lightning_sdiloco import WorkerGroups

            groups = WorkerGroups(2)
            wrapped = DistributedDataParallel(
                net, process_group=groups.process_group, broadcast_buffers=False
            )
            engine = StreamingDiLoCo(wrapped, worker_groups=groups, **SHORT)
        for step in range(9):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            net.follow(rank)
            engine.step()
        engine.finish()
        return tensors(net), engine.outer_state_dict()

    (first, outer), *others = run_ranks(run, ranks)
    assert all(torch.equal(first[name], values) for name, values in outer.items())
    for rank, (model, _) in enumerate(others, 1):
        assert fits.unequal(model, first) == ["seen"]
        assert int(model["seen"]) == 9 * rank

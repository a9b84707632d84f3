"""After the last step nothing is lost: what hooks write then, ranks that differ, and exceptions."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sdiloco import StreamingDiLoCo, WorkerGroups
from tests import fits, sharded
from tests.bits import same
from tests.fits import SHORT, Trained, assert_same, on, said_by
from tests.ranks import agreed, in_ranks, run_ranks
from tests.training import mlp, train_step

FIT = "lightning_sdiloco.lightning.fit"
STEPS = 9


class WithTeacher(nn.Module):
    """A model with a frozen copy that follows it, a buffer, and a buffer of each rank."""

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
        parameters = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for teacher, student in parameters:
            teacher.lerp_(student, 0.5)
        self.seen.add_(rank)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def fit_then(
    rank: int,
    world_size: int,
    on_train_end: Callable[[Any, Any], None],
    choices: dict[str, Any] = SHORT,
    trainer_choices: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trained:
    """Fits two groups, and calls a hook after training."""
    distribution = arguments.get("distribution", fits.LIGHTNING)
    callbacks = [on(distribution, on_train_end=on_train_end)]
    return fits.fit(
        rank,
        world_size,
        2,
        STEPS,
        choices,
        trainer_choices={"callbacks": callbacks, **(trainer_choices or {})},
        **arguments,
    )


def module_with_teacher(distribution: str, inner: str, seed: int) -> Any:
    def follow(self: Any, *_: Any) -> None:
        self.net.follow(seed)

    return fits.module(distribution, net=WithTeacher(seed), on_train_batch_end=follow)


def outer_and_tensors(trainer: Any, module: Any) -> tuple[Any, Any]:
    return trainer.strategy.outer_state_dict(), tensors(module)


@in_ranks(4)
def test_unequal_writes_in_on_train_end_become_rank_0s_with_a_warning(
    rank: int, distribution: str
) -> None:
    written = dict[str, Tensor]()
    messages = said_by(FIT)

    def write(trainer: Any, module: Any) -> None:
        net = module.net
        with torch.no_grad():
            for tensor in (net.student[0].weight, net.teacher[0].bias, net.threshold):
                tensor.add_(1.0 + rank)
            net.seen += rank
        written.update(tensors(module))

    trained = fit_then(
        rank,
        4,
        write,
        distribution=distribution,
        inspect=outer_and_tensors,
        make=module_with_teacher,
    )
    outer, model = trained["inspected"]
    if rank == 0:
        assert_same(model, written)
    assert int(model.pop("net.seen")) == int(written["net.seen"]), "each rank keeps its buffer"
    assert agreed(model)
    assert agreed(outer)
    assert torch.equal(model["net.student.0.weight"], outer["net.student.0.weight"] + 1.0)
    warnings = [text for text in messages if "differ between ranks" in text]
    assert len(warnings) == (rank == 0)
    for text in warnings:
        assert "After training, 3 tensors of the model" in text
        assert "'net.student.0.weight', 'net.teacher.0.bias', 'net.threshold'." in text
        assert "strategy.outer_state_dict()" in text


@in_ranks(2)
def test_equal_writes_of_all_ranks_in_on_train_end_stay_without_a_warning(rank: int) -> None:
    messages = said_by(FIT)

    def fill_and_save(trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.net[0].weight.fill_(0.25)
        trainer.save_checkpoint("/dev/null")

    trained = fit_then(rank, 2, fill_and_save)
    assert bool((trained["model"]["0.weight"] == 0.25).all())
    outer = trained["outer"]["0.weight"]
    assert not bool((outer == 0.25).any()), "the outer model can still be read"
    assert not [text for text in messages if "differ between ranks" in text]


@in_ranks(2)
def test_a_layer_that_only_one_rank_has_after_training_is_a_warning_too(rank: int) -> None:
    messages = said_by(FIT)

    def extend(trainer: Any, module: Any) -> None:
        module.extra = nn.Linear(3 + rank, 2)
        if rank:
            module.further = nn.Linear(2, 2)

    fit_then(rank, 2, extend)
    if rank == 0:
        names = "'extra.weight', 'extra.bias', 'further.weight', 'further.bias'"
        assert names in messages[-1]


@in_ranks(4)
def test_sharded_parameters_that_groups_write_differently_are_those_of_group_0(rank: int) -> None:
    messages = said_by(FIT)

    def write(trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.net[0].weight.to_local().add_(rank // 2)

    def make(distribution: str, inner: str, seed: int) -> Any:
        return sharded.sharded(distribution, seed, inner)

    trained = fit_then(
        rank,
        4,
        write,
        {**SHORT, "data_parallel_size": 2, "tensor_parallel_size": 1},
        {"limit_val_batches": 0},
        make=make,
        loader=fits.batches(rank // 2),
    )
    assert agreed(trained["model"])
    assert same(trained["model"], trained["outer"]), "group 0 added nothing"
    if rank == 0:
        words = "After training, 1 tensors of the model differ between ranks: 'net.0.weight'."
        assert words in messages[-1]


def test_the_caller_of_forked_ranks_gets_back_the_final_writes_of_rank_0() -> None:
    def write(trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module.net[0].weight.fill_(1.0 + trainer.global_rank)

    module = fits.module()
    strategy = fits.strategy(start_method="fork", **SHORT)
    callbacks = [on(on_train_end=write)]
    trainer = fits.trainer(strategy=strategy, devices=2, max_steps=STEPS, callbacks=callbacks)
    initial = tensors(module)
    trainer.fit(module, fits.batches(0))
    assert bool((module.net[0].weight == 1.0).all())
    outer = strategy.outer_state_dict()
    assert not torch.equal(module.net[2].weight, initial["net.2.weight"])
    assert torch.equal(module.net[2].weight, outer["net.2.weight"])


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
def test_after_an_exception_in_a_hook_at_the_end_all_ranks_hold_the_outer_model(hook: str) -> None:
    @in_ranks(2)
    def run(rank: int) -> None:
        def fail(*args: Any) -> None:
            if rank:
                raise ArithmeticError("the disk is full")

        module = fits.module(seed=rank)
        strategy = fits.strategy(**SHORT)
        callbacks = [on(**{hook: fail})]
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=STEPS, callbacks=callbacks)
        if rank:
            with pytest.raises(ArithmeticError, match="the disk is full"):
                trainer.fit(module, fits.batches(rank))
        elif hook == "on_fit_end":
            trainer.fit(module, fits.batches(rank))
        else:
            with pytest.raises(RuntimeError):
                trainer.fit(module, fits.batches(rank))
        assert strategy.engine.is_finished
        assert same(tensors(module), strategy.outer_state_dict())

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


def engine_of(net: nn.Module, world_size: int) -> StreamingDiLoCo:
    """Two groups of a rank each, or of ranks that train with DDP."""
    if world_size == 2:
        return StreamingDiLoCo(net, **SHORT)
    groups = WorkerGroups(2)
    wrapped = DistributedDataParallel(
        net, process_group=groups.process_group, broadcast_buffers=False
    )
    return StreamingDiLoCo(wrapped, worker_groups=groups, **SHORT)


def train_in_plain_loop(rank: int, world_size: int) -> tuple[Any, Any]:
    """Returns the tensors of the model, and the outer parameters."""
    net = WithTeacher(rank)
    optimizer = torch.optim.SGD(net.student.parameters(), lr=0.1)
    engine = engine_of(net, world_size)
    for step in range(STEPS):
        train_step(net, optimizer, rank, step)
        net.follow(rank)
        engine.step()
    engine.finish()
    return tensors(net), engine.outer_state_dict()


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_that_does_not_travel_is_group_0s_after_finish_in_a_plain_loop(ranks: int) -> None:
    (first, outer), *further = run_ranks(train_in_plain_loop, ranks)
    assert_same({name: first[name] for name in outer}, outer)
    for rank, (model, _) in enumerate(further, 1):
        assert fits.unequal(model, first) == ["seen"]
        assert int(model["seen"]) == STEPS * rank

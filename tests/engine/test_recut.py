"""Models that change between epochs: submodules are replaced, layers get another shape, are added
or removed.
"""

import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.engine.restart import restart_from
from lightning_sdiloco.engine.turns import turns_of
from lightning_sdiloco.errors import AgreementError
from tests.engine.groups import Groups, Values, copied, outer_state, unlike
from tests.fits import SHORT, said_by
from tests.ranks import run_ranks
from tests.training import inner_optimizer, mlp

CHOICES = {**SHORT, "inner": "sgd"}
RECUT = "lightning_sdiloco.engine.recut"


class Net(nn.Module):
    """A body whose head may be replaced, statistics, and a copy of the body."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.body = mlp(seed)[:6]
        self.norm = nn.BatchNorm1d(9)
        self.head = nn.Linear(9, 3)
        self.copy = deepcopy(self.body)

    def forward(self, x: Tensor) -> Tensor:
        features = self.norm(self.body(x) + self.copy(x))
        return self.head(features)[:, :3]


def replace_copy(net: Net) -> None:
    net.copy = deepcopy(net.body)


def freeze_copy(net: Net) -> None:
    net.copy = deepcopy(net.body).requires_grad_(False)


def widen(net: Net) -> None:
    """Gives statistics, head and last layer another width, each in another way."""
    for body in (net.body, net.copy):
        body[4] = nn.Linear(7, 12)
    net.norm = nn.BatchNorm1d(12)
    net.head.weight.data = torch.randn(5, 12)
    net.head.bias.data = torch.randn(5)
    net.zero_grad()


def insert(net: Net) -> None:
    net.body.insert(2, nn.Linear(11, 11))


def remove(net: Net) -> None:
    net.norm = nn.Identity()


def convert(net: Net) -> None:
    net.head.double()
    net.head.register_forward_pre_hook(lambda head, inputs: inputs[0].double())
    net.head.register_forward_hook(lambda head, inputs, output: output.float())


CHANGES = {
    "copied": (
        replace_copy,
        "6 parameters have been replaced or reshaped, such as 'copy.0.weight'",
    ),
    "frozen": (freeze_copy, "6 parameters have been frozen, such as 'copy.0.weight'"),
    "widened": (widen, "8 parameters have been replaced or reshaped, such as 'body.4.weight'"),
    "inserted": (insert, "2 parameters have become trainable, such as 'body.2.weight'"),
    "removed": (remove, "2 parameters have been removed, such as 'norm.weight'"),
    "converted": (convert, "names or dtypes have changed"),
}


def change(run: Groups, how: Callable[[Net], None]) -> None:
    """Changes the models in all groups, and makes them train on with new inner optimizers."""
    for index, model in enumerate(run.models):
        torch.manual_seed(100 + index + run.place)
        how(model)
        run.optimizers[index] = inner_optimizer("sgd", model)
    assert not any(engine.fragmented_model.cut_model.is_same() for engine in run.engines)
    if hasattr(run, "groups"):
        run.landings += run.groups.recut([[optimizer] for optimizer in run.optimizers])[0]
    else:
        run.landings += run.engines[0].recut(run.optimizers)
    assert all(engine.fragmented_model.cut_model.is_same() for engine in run.engines)


def after(steps: int, **choices: Any) -> Groups:
    run = Groups(net=Net, **{**CHOICES, **choices})
    run.until(steps)
    return run


def starting_with(prefix: str | tuple[str, ...], values: Values) -> Values:
    return {name: tensor for name, tensor in values.items() if name.startswith(prefix)}


def momentum(engine: StreamingDiLoCo) -> Values:
    """The outer momentum by the name of the parameter, where there is any."""
    parameters = restart_from([[engine.state_dict()]], Settings()).parameters
    buffers = {
        name: parameter.state.get("momentum_buffer") for name, parameter in parameters.items()
    }
    return {name: values for name, values in buffers.items() if values is not None and values.any()}


def trainable(model: nn.Module) -> Values:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def shapes(values: Values) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in values.items()}


@pytest.mark.parametrize("kind", CHANGES)
def test_groups_train_on_alike_after_a_change_of_the_model_with_flights_in_flight(
    kind: str,
) -> None:
    how, words = CHANGES[kind]
    log = said_by(RECUT)
    run = after(10)
    flights = len(run.engines[0].rounds.in_flight)
    assert flights
    landed = len(run.landings)
    change(run, how)
    assert len(run.landings) == landed + flights
    assert words in "".join(log)
    run.until(23)
    for engine in run.engines:
        assert all(fragment.outer.rounds for fragment in engine.fragmented_model.fragments)
    outer, outer_of_group_1 = (engine.outer_state_dict() for engine in run.engines)
    assert unlike(outer, outer_of_group_1) == []
    assert shapes(outer) == shapes(trainable(run.models[0]))
    run.groups.finish()
    assert unlike(*[copied(model.state_dict()) for model in run.models]) == []


class Recut(NamedTuple):
    """The end of a run that changed its model, and the log of the rank."""

    parameters: Values
    log: list[str]


def recut_in_ranks(rank: int, world_size: int, kind: str) -> Recut:
    log = said_by(RECUT)
    run = after(10, joined=WorkerGroups(2))
    change(run, CHANGES[kind][0])
    if run.size > 1:
        ddp = {"process_group": WorkerGroups(2).process_group, "broadcast_buffers": False}
        run.trained = []
        gc.collect()
        run.trained = [nn.parallel.DistributedDataParallel(run.models[0], **ddp)]
    run.until(17)
    engine = run.engines[0]
    assert engine.rounds.in_flight
    engine.finish()
    return Recut(copied(run.models[0].named_parameters()), log)


@pytest.mark.parametrize("kind", ["copied", "widened", "inserted"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_real_groups_of_one_and_of_two_ranks_end_alike_after_changes(ranks: int, kind: str) -> None:
    first, *following = run_ranks(recut_in_ranks, ranks, kind)
    assert CHANGES[kind][1] in "".join(first.log), "rank 0 says it"
    for recut in following:
        assert unlike(recut.parameters, first.parameters) == []
        assert not any("divided again" in text for text in recut.log)


def test_a_copy_starts_from_group_0_without_momentum_and_the_rest_goes_on() -> None:
    run = after(10)
    engine = run.engines[0]
    began_at = engine.rounds.timetable.began_at
    change(run, replace_copy)
    expected = starting_with("copy.", copied(run.models[0].named_parameters()))
    for model, engine_of_group in zip(run.models, run.engines, strict=True):
        assert unlike(starting_with("copy.", engine_of_group.outer_state_dict()), expected) == []
        assert unlike(starting_with("copy.", copied(model.named_parameters())), expected) == []
    assert engine.rounds.timetable.began_at == began_at, (
        "the fragments are the same, so the rounds continue"
    )
    with_momentum = momentum(engine)
    assert not starting_with("copy.", with_momentum)
    assert starting_with("body.", with_momentum).keys() == {
        f"body.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")
    }
    assert "head.weight" in with_momentum


def test_a_layer_that_is_inserted_leaves_momentum_with_those_that_it_renames() -> None:
    run = after(12, overlap_steps=0)
    before = momentum(run.engines[0])
    local = copied(run.models[1].body[2].named_parameters())
    change(run, insert)
    now = momentum(run.engines[0])
    assert torch.equal(now["body.3.weight"], before["body.2.weight"])
    assert "body.2.weight" not in now
    renamed = copied(run.models[1].body[3].named_parameters())
    assert unlike(renamed, local) == [], "each group keeps its progress"
    assert run.engines[0].rounds.timetable.began_at == run.engines[0].inner_steps, (
        "rounds restart with other fragments"
    )


def test_error_feedback_of_fragments_without_a_new_parameter_remains() -> None:
    run = after(12, compression="sparse")
    engine = run.engines[0]
    before = [fragment["memory"] for fragment in outer_state(engine)]
    in_flight = engine.rounds.in_flight
    change(run, replace_copy)
    remaining = []
    for index, fragment in enumerate(outer_state(engine)):
        if any(name.startswith("copy.") for name in fragment["names"]):
            assert fragment["memory"] is None
        elif index not in in_flight:
            assert torch.equal(fragment["memory"], before[index])
            remaining.append(index)
    assert remaining


def rebind(models: list[Any]) -> None:
    for model in models:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def test_data_of_a_parameter_may_be_replaced_at_any_time() -> None:
    plain = after(0)
    rebound = after(0)
    for _ in range(13):
        plain.step()
        rebound.step(then=rebind)
        assert rebound.engines[0].fragmented_model.cut_model.is_same()
    assert unlike(rebound.seen(), plain.seen()) == []


def replace_head(net: Net) -> None:
    net.head = nn.Linear(9, 3)


def reshape_head(net: Net) -> None:
    net.head.weight.data = torch.randn(5, 9)
    net.head.weight.grad = None
    net.head.bias.data = torch.randn(5)
    net.head.bias.grad = None


def evaluate(engine: StreamingDiLoCo) -> None:
    with engine.evaluate():
        pass


USES = {
    "launch": StreamingDiLoCo.step,
    "land": lambda engine: next(turns_of(engine.finish)),
    "finish": StreamingDiLoCo.finish,
    "evaluate": evaluate,
}
REPLACED = "2 parameters have been replaced or reshaped, such as 'head.weight'"
RESHAPED = r"shape of the parameter 'head.weight' has changed from \(3, 9\) to \(5, 9\)"


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("how", "words"), [(replace_head, REPLACED), (reshape_head, RESHAPED)])
def test_a_change_in_the_midst_of_training_is_refused_in_words(
    how: Callable[[Net], None], words: str, use: str
) -> None:
    model = Net()
    engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=2, fragments=1)
    for _ in range(4 if use == "land" else 3):
        engine.step()
    how(model)
    if use == "evaluate" and how is replace_head:
        evaluate(engine)
        return
    error = rf"Since the model was divided.*{words}.*call recut\(\)"
    with pytest.raises(AgreementError, match=error):
        USES[use](engine)
    engine.recut()
    for _ in range(9):
        engine.step()
    engine.finish()


def engine_of(model: nn.Module, **choices: Any) -> StreamingDiLoCo:
    return StreamingDiLoCo(model, sync_every=4, overlap_steps=2, **choices)


def test_simulated_models_that_change_in_unlike_ways_are_refused_with_names() -> None:
    models = [Net() for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=4, overlap_steps=2)
    models[1].head = nn.Linear(9, 4)
    words = r"differs between ranks: head.weight is \(3, 9\).* on rank 0, \(4, 9\)"
    with pytest.raises(ValueError, match=words):
        groups.recut()


def test_models_of_ranks_that_change_in_unlike_ways_are_refused_with_names() -> None:
    def run(rank: int, world_size: int) -> None:
        model = Net()
        engine = engine_of(model)
        model.head = nn.Linear(9, 3 + rank)
        engine.recut()

    errors = run_ranks(run, 2, expect_failure=True)
    assert len(errors) == 2
    for error in errors.values():
        assert "The model differs between ranks: head.weight" in error


def test_a_layer_on_another_device_is_refused_with_both_devices() -> None:
    model = Net()
    engine = engine_of(model)
    model.head = nn.Linear(9, 3, device="meta")
    words = "'head.weight' is on 'meta', but the engine trains the model on 'cpu'"
    with pytest.raises(ValueError, match=words):
        engine.recut()


@pytest.mark.parametrize("steps_copy", [True, False])
def test_new_parameters_that_no_inner_optimizer_steps_are_named(steps_copy: bool) -> None:
    log = said_by(RECUT)
    model = Net()
    parameters = model.named_parameters()
    stepped = [p for name, p in parameters if steps_copy or not name.startswith("copy.")]
    engine = engine_of(model, inner_optimizers=[SGD(stepped, lr=0.1)])
    replace_copy(model)
    engine.recut()
    warnings = [text for text in log if text.startswith("No inner optimizer trains")]
    assert len(warnings) == steps_copy, "a copy that no optimizer stepped before needs none"
    assert all("6 of the new parameters, such as 'copy.0.bias'" in text for text in warnings)
    log.clear()
    replace_copy(model)
    engine.recut([SGD(model.parameters(), lr=0.1)])
    assert not any("No inner optimizer" in text for text in log)


def test_a_model_cannot_be_cut_again_while_the_outer_one_is_shown() -> None:
    model = Net()
    engine = engine_of(model)
    replace_head(model)
    with engine.evaluate(), pytest.raises(RuntimeError, match="Call recut.. outside evaluate"):
        engine.recut()
    engine.recut()


def assign(net: Net) -> None:
    net.load_state_dict(copied(net.state_dict()), assign=True)


def test_a_model_all_of_whose_parameters_are_replaced_keeps_the_rate_of_its_round() -> None:
    run = after(10)
    engine = run.engines[0]
    round_before = engine.fragmented_model.outer_steps
    assert round_before
    change(run, assign)
    assert engine.fragmented_model.outer_steps == round_before
    assert engine.has_landed


class ReplacedAlone(NamedTuple):
    """A rank of a run in which one rank alone replaces a copy."""

    started: Values
    ended: Values
    log: list[str]


def replaced_alone(rank: int, world_size: int) -> ReplacedAlone:
    log = said_by(RECUT)
    run = after(10, joined=WorkerGroups(2))
    (engine,) = run.engines
    (model,) = run.models
    model.head = nn.Linear(9, 4)
    if rank == 1:
        replace_copy(model)
    run.optimizers[0] = inner_optimizer("sgd", model)
    engine.recut(run.optimizers)
    started = starting_with(("copy", "head"), copied(model.named_parameters()))
    run.until(17)
    engine.finish()
    return ReplacedAlone(started, copied(model.named_parameters()), log)


def test_parameters_replaced_by_one_rank_alone_are_new_in_all_groups() -> None:
    first, second = run_ranks(replaced_alone, 2)
    assert unlike(second.started, first.started) == []
    assert unlike(second.ended, first.ended) == []
    words = "parameters have been replaced or reshaped, such as 'head.weight'"
    assert words in "".join(first.log)

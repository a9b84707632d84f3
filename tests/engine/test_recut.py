"""What a model may become between epochs: submodules that are replaced, layers of another shape,
added or removed.
"""

import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.engine.restart import restart_from
from lightning_sdiloco.errors import AgreementError
from tests.engine.groups import Groups, Values, copied, outer_state, unlike
from tests.fits import said_by
from tests.ranks import run_ranks
from tests.training import inner_optimizer, mlp

CHOICES: dict[str, Any] = {
    "sync_every": 4,
    "overlap_steps": 2,
    "fragments": "strided:1",
    "inner": "sgd",
}
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


CHANGES: dict[str, tuple[Callable[[Net], None], str]] = {
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


def change(here: Groups, how: Callable[[Net], None], optimizer: str = "sgd") -> None:
    """Changes the models in all groups, and makes them train on with new inner optimizers."""
    for index, model in enumerate(here.models):
        torch.manual_seed(100 + index + here.place)
        how(model)
        here.optimizers[index] = inner_optimizer(optimizer, model)
    assert all(engine.has_other_parameters() for engine in here.engines)
    if hasattr(here, "groups"):
        landed = here.groups.recut([[optimizer] for optimizer in here.optimizers])[0]
    else:
        landed = here.engines[0].recut(here.optimizers)
    here.landings += landed
    assert not any(engine.has_other_parameters() for engine in here.engines)


def momentum(engine: StreamingDiLoCo) -> Values:
    """The outer momentum by the name of the parameter, where there is any."""
    found: Values = {}
    for name, own in restart_from([[engine.state_dict()]], Settings()).parameters.items():
        values = own.state.get("momentum_buffer")
        if values is not None and values.any():
            found[name] = values
    return found


@pytest.mark.parametrize("kind", CHANGES)
def test_groups_train_on_alike_after_a_change_of_the_model_with_flights_in_flight(
    kind: str,
) -> None:
    how, told = CHANGES[kind]
    said = said_by(RECUT)
    here = Groups(net=Net, **CHOICES)
    here.until(10)
    in_flight = here.engines[0].in_flight
    assert in_flight
    landed = len(here.landings)
    change(here, how)
    assert len(here.landings) == landed + len(in_flight)
    assert told in "".join(said)
    here.until(23)
    for engine in here.engines:
        assert all(own.outer.rounds for own in engine.rounds.fragments)
    outer = [engine.outer_state_dict() for engine in here.engines]
    assert unlike(*outer) == []
    parameters = dict(here.models[0].named_parameters())
    assert {name: own.shape for name, own in outer[0].items()} == {
        name: own.shape for name, own in parameters.items() if own.requires_grad
    }
    here.groups.finish()
    assert unlike(*[copied(model.state_dict()) for model in here.models]) == []


def in_ranks(rank: int, world_size: int) -> dict[str, tuple[Values, list[str]]]:
    found = {}
    for kind in ("copied", "widened", "inserted"):
        said = said_by(RECUT)
        here = Groups(net=Net, joined=WorkerGroups(2), **CHOICES)
        here.until(10)
        change(here, CHANGES[kind][0])
        if here.size > 1:
            ddp = {"process_group": WorkerGroups(2).process_group, "broadcast_buffers": False}
            here.trained = []
            gc.collect()
            here.trained = [nn.parallel.DistributedDataParallel(here.models[0], **ddp)]
        here.until(17)
        engine = here.engines[0]
        assert engine.in_flight
        engine.finish()
        found[kind] = (copied(here.models[0].named_parameters()), said)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_groups_of_one_and_of_two_ranks_end_alike_after_changes(ranks: int) -> None:
    every = run_ranks(in_ranks, ranks)
    for kind, (parameters, said) in every[0].items():
        assert CHANGES[kind][1] in "".join(said), "rank 0 says it"
        for other in every[1:]:
            assert unlike(other[kind][0], parameters) == []
            assert not any("cut again" in text for text in other[kind][1])


def test_a_copy_starts_from_group_0_without_momentum_and_the_rest_goes_on() -> None:
    here = Groups(net=Net, **CHOICES)
    here.until(10)
    engine = here.engines[0]
    began = engine.steps_in_rounds
    change(here, replace_copy)
    expected = copied(here.models[0].copy.named_parameters())
    for model, other in zip(here.models, here.engines, strict=True):
        outer = {
            name[5:]: own
            for name, own in other.outer_state_dict().items()
            if name.startswith("copy.")
        }
        assert unlike(outer, expected) == []
        assert unlike(copied(model.copy.named_parameters()), expected) == []
    assert engine.steps_in_rounds == began, "the fragments are the same, so the rounds continue"
    names = set(momentum(engine))
    assert not any(name.startswith("copy.") for name in names)
    assert {name for name in names if name.startswith("body.")} == {
        f"body.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")
    }
    assert "head.weight" in names


def test_a_layer_that_is_inserted_leaves_momentum_with_those_that_it_renames() -> None:
    here = Groups(net=Net, **{**CHOICES, "overlap_steps": 0})
    here.until(12)
    before = momentum(here.engines[0])
    local = copied(here.models[1].body[2].named_parameters())
    change(here, insert)
    after = momentum(here.engines[0])
    assert torch.equal(after["body.3.weight"], before["body.2.weight"])
    assert "body.2.weight" not in after
    assert unlike(copied(here.models[1].body[3].named_parameters()), local) == [], (
        "each group keeps its progress"
    )
    assert here.engines[0].steps_in_rounds == 0, "rounds restart with other fragments"


def test_error_feedback_of_fragments_without_a_new_parameter_remains() -> None:
    here = Groups(net=Net, **CHOICES, compression="sparse")
    here.until(12)
    engine = here.engines[0]
    before = [own["memory"] for own in outer_state(engine)]
    in_flight = engine.in_flight
    change(here, replace_copy)
    remaining = []
    for index, own in enumerate(outer_state(engine)):
        if any(name.startswith("copy.") for name in own["names"]):
            assert own["memory"] is None
        elif index not in in_flight:
            assert torch.equal(own["memory"], before[index])
            remaining.append(index)
    assert remaining


def test_data_of_a_parameter_may_be_replaced_at_any_time() -> None:
    def rebound(models: list[Any]) -> None:
        for model in models:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()

    whole, other = (Groups(net=Net, **CHOICES) for _ in range(2))
    for _ in range(13):
        whole.step()
        other.step(then=rebound)
        assert not other.engines[0].has_other_parameters()
    assert unlike(other.seen(), whole.seen()) == []


def replace_head(net: Net) -> None:
    net.head = nn.Linear(9, 3)


def reshape_head(net: Net) -> None:
    net.head.weight.data = torch.randn(5, 9)
    net.head.weight.grad = None
    net.head.bias.data = torch.randn(5)
    net.head.bias.grad = None


@pytest.mark.parametrize("use", ["launch", "land", "finish", "evaluate"])
@pytest.mark.parametrize("how", [replace_head, reshape_head])
def test_a_change_in_the_midst_of_training_is_refused_in_words(
    how: Callable[[Net], None], use: str
) -> None:
    model = Net()
    engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=2, fragments=1)
    for _ in range(4 if use == "land" else 3):
        engine.step()
    how(model)
    changed = r"shape of the parameter 'head.weight' has changed from \(3, 9\) to \(5, 9\)"
    told = (
        changed
        if how is reshape_head
        else "2 parameters have been replaced or reshaped, such as 'head.weight'"
    )
    uses: dict[str, Callable[[], Any]] = {
        "launch": engine.step,
        "land": lambda: next(engine.finishing()),
        "finish": engine.finish,
    }

    def evaluate() -> None:
        with engine.evaluate():
            pass

    if use == "evaluate" and how is replace_head:
        evaluate()
        return
    with pytest.raises(AgreementError, match=rf"Since the model was cut.*{told}.*call recut\(\)"):
        uses.get(use, evaluate)()
    engine.recut()
    for _ in range(9):
        engine.step()
    engine.finish()


def test_models_that_change_in_unlike_ways_are_refused_with_names() -> None:
    models = [Net() for _ in range(2)]
    groups = SimulatedGroups(models, sync_every=4, overlap_steps=2)
    models[1].head = nn.Linear(9, 4)
    with pytest.raises(
        ValueError, match=r"differs between ranks: head.weight is \(3, 9\).* on rank 0, \(4, 9\)"
    ):
        groups.recut()

    def run(rank: int, world_size: int) -> None:
        model = Net()
        engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=2)
        model.head = nn.Linear(9, 3 + rank)
        engine.recut()

    errors = run_ranks(run, 2, expect_failure=True)
    assert len(errors) == 2
    assert all("The model differs between ranks: head.weight" in error for error in errors.values())


def test_a_layer_on_another_device_is_refused_with_both_devices() -> None:
    model = Net()
    engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=2)
    model.head = nn.Linear(9, 3, device="meta")
    with pytest.raises(
        ValueError, match="'head.weight' is on 'meta', but the engine trains the model on 'cpu'"
    ):
        engine.recut()


@pytest.mark.parametrize("steps_copy", [True, False])
def test_new_parameters_that_no_inner_optimizer_steps_are_named(steps_copy: bool) -> None:
    said = said_by(RECUT)
    model = Net()
    parts = [model.body, model.norm, model.head, *([model.copy] if steps_copy else [])]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    engine = StreamingDiLoCo(model, inner_optimizers=[optimizer], sync_every=4, overlap_steps=2)
    replace_copy(model)
    engine.recut()
    warned = [text for text in said if text.startswith("No inner optimizer steps")]
    assert len(warned) == steps_copy, "a copy that no optimizer stepped before needs none"
    assert all("6 of the new parameters, such as 'copy.0.bias'" in text for text in warned)
    said.clear()
    replace_copy(model)
    engine.recut([torch.optim.SGD(model.parameters(), lr=0.1)])
    assert not any("No inner optimizer" in text for text in said)


def test_a_model_cannot_be_cut_again_while_the_outer_one_is_shown() -> None:
    model = Net()
    engine = StreamingDiLoCo(model, sync_every=4, overlap_steps=2)
    replace_head(model)
    with engine.evaluate(), pytest.raises(RuntimeError, match="Call recut.. outside evaluate"):
        engine.recut()
    engine.recut()


def test_a_model_all_of_whose_parameters_are_replaced_keeps_the_rate_of_its_round() -> None:
    here = Groups(net=Net, **CHOICES)
    here.until(10)
    round_before = here.engines[0].round
    assert round_before

    def assign(net: Net) -> None:
        net.load_state_dict(copied(net.state_dict()), assign=True)

    change(here, assign)
    assert here.engines[0].round == round_before
    assert here.engines[0].has_landed


def replaced_alone(rank: int, world_size: int) -> tuple[Values, Values, list[str]]:
    said = said_by(RECUT)
    here = Groups(net=Net, joined=WorkerGroups(2), **CHOICES)
    here.until(10)
    (engine,), (model,) = here.engines, here.models
    model.head = nn.Linear(9, 4)
    if rank == 1:
        replace_copy(model)
    here.optimizers[0] = inner_optimizer("sgd", model)
    engine.recut(here.optimizers)
    started = {
        name: own
        for name, own in copied(model.named_parameters()).items()
        if name.startswith(("copy", "head"))
    }
    here.until(17)
    engine.finish()
    return started, copied(model.named_parameters()), said


def test_parameters_replaced_by_one_rank_alone_are_new_in_all_groups() -> None:
    (started, ended, said), (other_started, other_ended, _) = run_ranks(replaced_alone, 2)
    assert unlike(other_started, started) == []
    assert unlike(other_ended, ended) == []
    assert "parameters have been replaced or reshaped, such as 'head.weight'" in "".join(said)

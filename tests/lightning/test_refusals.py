"""Everything that is refused before the first step, each by its message: what was given, what
holds, what to do.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdiloco import (
    FP4,
    Compression,
    DenseBeginning,
    OuterOptimizer,
    RandomPairs,
    Selective,
    SimulatedGroups,
    StreamingDiLoCo,
)
from lightning_sdiloco import StreamingDiLoCoFabricStrategy as FabricStrategy
from lightning_sdiloco import StreamingDiLoCoModelParallelStrategy as ModelParallelStrategy
from lightning_sdiloco import StreamingDiLoCoStrategy as FirstStrategy
from lightning_sdiloco.algorithm.config import OVERLAP_STEPS, Settings
from lightning_sdiloco.comm.exchange import nccl_on
from lightning_sdiloco.pytorch_lightning import StreamingDiLoCoStrategy as OtherStrategy
from tests import fits
from tests.fits import refusal
from tests.ranks import in_ranks
from tests.training import mlp

Make = Callable[..., Any]
Table = Sequence[tuple[dict[str, Any], str]]
"""Arguments, and words of the message: see `assert_says`."""


def engine(**choices: Any) -> StreamingDiLoCo:
    return StreamingDiLoCo(mlp(), **choices)


def fabric(**choices: Any) -> Any:
    return L.Fabric(accelerator="cpu", devices=4, strategy=FabricStrategy(**choices))


STRATEGIES: list[Make] = [FirstStrategy, OtherStrategy]
EVERYWHERE: list[Make] = [*STRATEGIES, engine]


def assert_says(message: str, *words: str) -> None:
    """A message contains these words; " ... " stands for any text, and ^ for the beginning."""
    for part in " ... ".join(words).split(" ... "):
        if part.startswith("^"):
            assert message.startswith(part[1:])
        else:
            assert part in message


def assert_refused(makes: Iterable[Make], table: Table) -> None:
    """Each maker refuses each row of arguments."""
    for make in makes:
        for choices, words in table:
            assert_says(refusal(make, **choices), words)


# Arguments

NAN = float("nan")
INFINITE = float("inf")
OVERLAP = "it must be at least 0 and below sync_every, which is "
WHOLE = "it must be a whole number of at least 1"
MOMENTUM = "it must be at least 0 and below 1"
NORM = "it must be a number above 0, or None"
GUARD = "it must be a number above 1, 'auto' or None"
OFFLOAD = "it must be True, False or 'auto'"
OPTIMIZER = "a callable ... functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
OUT_OF_RANGE: Table = [
    ({"sync_every": 7, "overlap_steps": 7}, f"^overlap_steps=7 ... {OVERLAP}7"),
    ({"sync_every": 1, "overlap_steps": 5}, f"^overlap_steps=5 ... {OVERLAP}1"),
    ({"overlap_steps": -1}, f"^overlap_steps=-1 ... {OVERLAP}100"),
    *(
        ({"mixing": mixing}, f"^mixing={mixing} ... it must be between 0 and 1")
        for mixing in (1.01, -0.01)
    ),
    *(({"sync_every": steps}, f"^sync_every={steps} ... {WHOLE}") for steps in (0, -3)),
    *(
        ({"worker_groups": groups}, f"^worker_groups={groups!r} ... {WHOLE}")
        for groups in (0, 1.5, "all")
    ),
    ({"exchange": "gather:mpi"}, "^exchange='gather:mpi' ... 'nccl' between CUDA devices"),
    ({"outer_lr": -0.1}, "^outer_lr=-0.1 ... it must be at least 0"),
    *(
        ({"outer_momentum": value}, f"^outer_momentum={value} ... {MOMENTUM}")
        for value in (-0.1, 1.0)
    ),
    (
        {"timeout": timedelta(milliseconds=99)},
        "^timeout= ... it must be a timedelta of at least a tenth of a second",
    ),
    *(
        ({"compression": name}, f"^compression={name!r} ... 'fp32', 'bf16', 'fp8', ")
        for name in ("fp5", "FP4", None)
    ),
]
NO_NUMBERS: list[tuple[Any, str]] = [
    ("0.7", "of type str, not a number"),
    (True, "of type bool, not a number"),
    (None, "of type NoneType, not a number"),
    (INFINITE, "not finite"),
    (NAN, "not finite"),
]
NO_WHOLE_NUMBERS: list[tuple[Any, str]] = [
    *NO_NUMBERS,
    (2.5, "not a whole number"),
    (8.0, "of type float, not a whole number"),
]


def faults_of(name: str, values: Iterable[tuple[Any, str]]) -> Table:
    return [({name: value}, f"^{name}={value!r} is {fault}: it") for value, fault in values]


OF_ANOTHER_TYPE: Table = [
    *faults_of("mixing", NO_NUMBERS),
    *faults_of("outer_lr", NO_NUMBERS),
    *faults_of("outer_momentum", NO_NUMBERS),
    # None is the default of these two.
    *faults_of("sync_every", [case for case in NO_WHOLE_NUMBERS if case[0] is not None]),
    *faults_of("overlap_steps", [case for case in NO_WHOLE_NUMBERS if case[0] is not None]),
    ({"worker_groups": "4"}, f"^worker_groups='4' is of type str, not a number: {WHOLE[:27]}"),
    (
        {"worker_groups": 2.0},
        f"^worker_groups=2.0 is of type float, not a whole number: {WHOLE[:27]}",
    ),
    (
        {"timeout": 60},
        "^timeout=60 is of type int, not timedelta: it must be a timedelta of at least a tenth of a second",
    ),
    (
        {"timeout": 30},
        "Choose a different timeout; datetime.timedelta(seconds=30) is that many seconds.",
    ),
    (
        {"dense_beginning": 3},
        "^dense_beginning=3 is not a DenseBeginning. Pass an instance, such as",
    ),
    (
        {"dense_beginning": DenseBeginning(3), "sync_every": 7},
        "^dense_beginning=DenseBeginning(rounds=3, ... sync_every=7, because the sync_every of"
        " the dense beginning must be at most half as large",
    ),
    (
        {"dense_beginning": DenseBeginning(3), "schedule": Selective()},
        "does not work with schedule=Selective(",
    ),
    (
        {"dense_beginning": DenseBeginning(3), "route": RandomPairs()},
        "does not work with route=RandomPairs(",
    ),
    *(
        ({"exchange": name}, f"^exchange={name!r} is unknown ... 'gloo'")
        for name in ("glo", ":glo", "auto:glo")
    ),
    ({"compression": FP4}, "compression=<class ... not a class"),
    (
        {"outer_optimizer": torch.optim.SGD([torch.zeros(1)])},
        f"of type SGD is already an optimizer ... {OPTIMIZER}",
    ),
    (
        {"outer_optimizer": OuterOptimizer},
        "outer_optimizer is the class OuterOptimizer itself. Pass an instance, ",
    ),
    ({"outer_optimizer": "sgd"}, f"outer_optimizer of type str is not callable ... {OPTIMIZER}"),
    (
        {
            "outer_optimizer": partial(torch.optim.SGD, lr=0.1),
            "outer_lr": 0.5,
            "outer_momentum": 0.5,
        },
        "outer_optimizer was given together with outer_lr=0.5 and outer_momentum=0.5. ... replaces"
        " ... Leave out outer_lr and outer_momentum",
    ),
    ({"fragments": "striped"}, "fragments='striped' ... [['net.0.*'], ['net.1.*']]"),
]
KNOWN = "which torch does not know. Choose one of gloo, nccl,  ... Leave the option out"
OF_STRATEGIES: Table = [
    (
        {"ddp_kwargs": {"find_unused_parameter": 1}},
        "find_unused_parameter' ... Did you mean 'find_unused_parameters'",
    ),
    (
        {"ddp_kwargs": {"foo": 1}},
        "ddp_kwargs contains 'foo', which DistributedDataParallel does not accept. The accepted arguments are  ..."
        " static_graph",
    ),
    (
        {"ddp_kwargs": "foo"},
        "ddp_kwargs='foo' is of type str ... must be a dictionary ... pass ddp_kwargs=",
    ),
    (
        {"ddp_kwargs": {"process_group": object()}},
        "ddp_kwargs contains 'process_group' ... among the ranks of a worker group ... Remove this argument"
        " ... worker_groups",
    ),
    *(
        (
            {"process_group_backend": name},
            f"^process_group_backend='{name}' names the backend 'glo', {KNOWN}",
        )
        for name in ("glo", "cpu:glo,cuda:nccl")
    ),
    (
        {"start_method": "Fork"},
        "='Fork' is unknown. Choose 'popen' ... 'spawn', 'fork', or 'forkserver'",
    ),
]
OF_A_TRAINER: Table = [
    (
        {"resume": "anyhow"},
        "resume='anyhow' is unknown. Choose 'exact' ... 'restart'",
    ),
    (
        {"sync_every": 8, "overlap_steps": "auto"},
        "sync_every=8 is too small for overlap_steps='auto'",
    ),
    (
        {"sync_every": "auto", "overlap_steps": 500},
        "overlap_steps=500 is too large for sync_every='auto'",
    ),
    ({"sync_every": "auto", "mixing": 2.0}, "mixing=2.0 is out of range"),
    ({"sync_every": "automatic"}, "sync_every='automatic' is of type str"),
    ({"outer_momentum": "given"}, "outer_momentum='given' is of type str"),
]
OF_FABRIC: Table = [
    ({"sync_every": "auto"}, "sync_every='auto' works only with the Trainer's strategy"),
    ({"overlap_steps": 100}, "overlap_steps=100 is out of range"),
    ({"ddp_kwargs": {"ddp_comm_hook": print}}, "ddp_kwargs contains 'ddp_comm_hook', which Dist"),
    ({"worker_groups": 3}, "worker_groups=3 cannot split 4 processes"),
]
OF_THE_OUTER_OPTIMIZER: Table = [
    (
        {"clip_norm": 0},
        f"^clip_norm=0 is out of range: {NORM} ... . Choose a different clip_norm; ",
    ),
    ({"clip_norm": NAN}, f"^clip_norm=nan is not finite: {NORM}"),
    ({"clip_norm": "0.7"}, f"^clip_norm='0.7' is of type str, not a number: {NORM}"),
    ({"outlier_guard": 1}, f"^outlier_guard=1 is out of range: {GUARD}"),
    ({"outlier_guard": True}, f"^outlier_guard=True is of type bool, not a number: {GUARD}"),
    ({"offload": "no"}, f"^offload='no' is out of range: {OFFLOAD}"),
    ({"offload": 1}, f"^offload=1 is of type int, not bool or str: {OFFLOAD}"),
    (
        {"lr_schedule": "cosine"},
        "^lr_schedule='cosine' is of type str, not Callable: it must be a callable that creates",
    ),
]


def test_invalid_choices_are_refused_with_the_fault_and_its_remedy() -> None:
    assert_refused(EVERYWHERE, [*OUT_OF_RANGE, *OF_ANOTHER_TYPE])
    assert_refused([*STRATEGIES, fabric], OF_STRATEGIES)
    assert_refused([*STRATEGIES, ModelParallelStrategy], OF_A_TRAINER)
    assert_refused([fabric], OF_FABRIC)
    for choices, _ in OUT_OF_RANGE:
        assert re.search(r"\. (Choose|Set) ", refusal(engine, **choices))
    assert_refused([OuterOptimizer], OF_THE_OUTER_OPTIMIZER)
    for make in STRATEGIES:
        strategy = make(ddp_kwargs={"find_unused_parameters": True})
        assert strategy._ddp_kwargs["find_unused_parameters"] is True
    advice = f"the paper found almost no loss with up to {max(OVERLAP_STEPS)}."
    assert_refused([engine], [({"overlap_steps": 100}, advice)])


# Former arguments

FORMER: Table = [
    (
        {"layers_per_fragment": 2},
        "layers_per_fragment=2 is part of fragments: pass fragments='strided:2' or",
    ),
    (
        {"lr_schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=3)},
        "OuterOptimizer(lr_schedule=...)",
    ),
    (
        {"clip_norm": 1.0},
        "clip_norm=1.0 belongs to outer_optimizer: pass OuterOptimizer(clip_norm=1.0)",
    ),
    ({"outlier_guard": 5.0}, "pass OuterOptimizer(outlier_guard=5.0)"),
    ({"offload": False}, "pass OuterOptimizer(offload=False)"),
    (
        {"offload": None, "clip_norm": None},
        "clip_norm=None is not an argument, so leave it out.",
    ),
    ({"H": 50}, "H=50 is called sync_every here."),
    ({"tau": 5}, "tau=5 is called overlap_steps here."),
    ({"alpha": 0.5}, "alpha=0.5 is called mixing here."),
    ({"num_fragments": 4}, "num_fragments=4 is called fragments here."),
    ({"delay": 5}, "delay=5 is called overlap_steps here."),
    ({"quantize": True}, "quantize=True is called compression here: 'fp4' is the default"),
    ({"warmup_steps": 0.1}, "warmup_steps=0.1 is called dense_beginning here"),
    ({"outer_learning_rate": 0.7}, "outer_learning_rate=0.7 is called outer_lr here."),
    *(
        (
            {name: 3},
            f"{name}=3 does not work with worker groups that are launched together, because every"
            " exchange is a collective",
        )
        for name in ("quorum", "grace")
    ),
]
TYPOS = {
    "overlap_step": "Did you mean overlap_steps?",
    "nonsense": " lists its arguments.",
}


def test_former_arguments_are_refused_with_a_substitute_and_typos_with_the_right_one() -> None:
    users_names = [*STRATEGIES, ModelParallelStrategy]
    simulated = partial(SimulatedGroups, [mlp(), mlp()])
    for make in (*users_names, FabricStrategy, engine, simulated):
        assert_refused([make], FORMER)
        unknown = dict(TYPOS)
        if make in (*STRATEGIES, FabricStrategy):
            unknown["find_unused_parameters"] = "pass ddp_kwargs="
        for name, advice in unknown.items():
            message = refusal(make, kind=TypeError, **{name: 3})
            assert_says(message, f"has no argument '{name}'", advice)
            if make in users_names:
                assert message.startswith(make.__name__), "the name that the user chose"


def settings_of(maker: Any) -> Settings:
    """The settings of a strategy, an engine, or a Fabric."""
    if isinstance(maker, StreamingDiLoCo):
        return maker.rounds.settings
    strategy = maker.strategy if isinstance(maker, L.Fabric) else maker
    return strategy._options.settings  # type: ignore[no-any-return]


def test_the_rate_of_an_outer_optimizer_is_given_beside_it() -> None:
    for name, right in {
        "lr": "outer_lr",
        "outer_lr": "outer_lr",
        "momentum": "outer_momentum",
    }.items():
        message = refusal(OuterOptimizer, **{name: 0.5})
        advice = f"{name}=0.5 belongs to the strategy: pass {right}=0.5 next to outer_optimizer."
        assert message == advice
    message = refusal(OuterOptimizer, kind=TypeError, clip_nrm=1.0)
    assert message == "OuterOptimizer has no argument 'clip_nrm'. Did you mean clip_norm?"


def test_a_default_overlap_gives_way_to_a_shorter_round() -> None:
    def simulated(**choices: Any) -> StreamingDiLoCo:
        return SimulatedGroups([mlp(), mlp()], **choices).engines[1]

    overlaps = {1: 0, 2: 1, 4: 3, 5: 4, 6: 5, 100: 5}
    for make in (*EVERYWHERE, ModelParallelStrategy, fabric, simulated):
        for sync_every, overlap_steps in overlaps.items():
            by_default = settings_of(make(sync_every=sync_every))
            assert by_default.overlap_steps == overlap_steps
            # A checkpoint, another rank or site, and a log cannot tell the two apart.
            explicit = settings_of(make(sync_every=sync_every, overlap_steps=overlap_steps))
            assert by_default.described() == explicit.described()
        assert settings_of(make(sync_every=4, overlap_steps=None)).overlap_steps == 3


def test_numpy_scalars_are_accepted_as_numbers_and_ranges_include_their_ends() -> None:
    numpy = pytest.importorskip("numpy")
    fractions = {"mixing": 0.25, "outer_lr": 0.5, "outer_momentum": 0.75}
    integers = {"sync_every": 40, "overlap_steps": 3, "fragments": 2}
    scalars = {name: numpy.float32(value) for name, value in fractions.items()}
    scalars |= {name: numpy.int64(value) for name, value in integers.items()}
    scalars["worker_groups"] = numpy.int64(1)
    expected = Settings(**fractions, **integers)
    for make in EVERYWHERE:
        maker = make(**scalars)
        if make is engine:
            directed = expected.directed(may_direct=False)
            assert maker.rounds.settings.described() == directed.described()
        else:
            assert settings_of(maker).described() == expected.described()
            assert type(maker._options.worker_groups) is int
        make(sync_every=numpy.int64(3))
        make(sync_every=1, overlap_steps=0, mixing=0, worker_groups=1, fragments="strided:1")
        make(sync_every=100, overlap_steps=99, mixing=1, outer_lr=0, outer_momentum=0, fragments=1)
        make(outer_optimizer=OuterOptimizer(clip_norm=1e-9, outlier_guard=1.001))
        make(outer_optimizer=OuterOptimizer(clip_norm=INFINITE))
    outer = OuterOptimizer(clip_norm=numpy.float32(8.0), outlier_guard=numpy.int64(4))
    assert outer.described() == OuterOptimizer(clip_norm=8.0, outlier_guard=4).described()


# The outer optimizer


class Changed(torch.optim.SGD):
    """SGD with gradients that are changed first."""

    def __init__(self, change: Callable[[Tensor], Any], shards: Iterable[Tensor]) -> None:
        super().__init__(shards, lr=0.1)
        self.change = change

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.change(parameter)
        return super().step(closure)


def clip(norm: float) -> Callable[[Tensor], Any]:
    """By the norm of a shard, which depends on how many ranks share a fragment."""
    return lambda parameter: nn.utils.clip_grad_norm_([parameter], norm)


def mix(parameter: Tensor) -> None:
    parameter.grad = parameter.grad.cumsum(0)  # type: ignore[union-attr]


def sgd(tensors: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(tensors, lr=0.1)


def sgd_of_copies(shards: Iterable[Tensor]) -> Optimizer:
    return sgd([nn.Parameter(shard.detach().clone()) for shard in shards])


SUCH = f"such as {OPTIMIZER.removeprefix('a callable ... ')}."
HALVES = f"outer_optimizer does not work elementwise ... whole and in two halves ... {SUCH}"
FLAT = f"outer_optimizer could not take a step ... one per fragment ... Choose an optimizer {SUCH}"
HELD = " ... must include exactly the shards ... Pass the shards"
UNFIT: list[tuple[Make, str]] = [
    (partial(Changed, clip(1.0)), HALVES),
    (partial(Changed, clip(30.0)), HALVES),
    (partial(Changed, mix), HALVES),
    (partial(torch.optim.Adafactor, lr=0.1), HALVES),
    (partial(torch.optim.LBFGS, lr=0.1), FLAT),
    (partial(getattr(torch.optim, "Muon", torch.optim.LBFGS), lr=0.1), FLAT),
    (list, FLAT),
    (
        lambda shards: sgd(list(shards)[:-1]),
        "for 1 tensors that does not include the shards [1] of 2" + HELD,
    ),
    (sgd_of_copies, "the shards [0, 1] of 2" + HELD),
    (
        lambda shards: sgd([*shards, nn.Parameter(torch.zeros(3))]),
        "outer_optimizer ... must include exactly",
    ),
]


ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adadelta", "Rprop", "ASGD")


def sgd_by_shard(shards: Iterable[Tensor]) -> Optimizer:
    """SGD with a learning rate for each shard."""
    groups = [{"params": [shard], "lr": 0.1 * i} for i, shard in enumerate(shards, start=1)]
    return torch.optim.SGD(groups)


def test_an_outer_optimizer_works_elementwise_or_is_refused() -> None:
    layered = partial(engine, fragments=[["0.*", "2.*"], ["4.*", "6.*"]])
    assert_refused([layered], [({"outer_optimizer": make}, words) for make, words in UNFIT])
    fitting: list[Make] = [partial(getattr(torch.optim, kind), lr=0.1) for kind in ELEMENTWISE]
    for make in (sgd_by_shard, *fitting):
        stepping = layered(outer_optimizer=make, sync_every=1, overlap_steps=0)
        before = stepping.outer_state_dict()["0.weight"].clone()
        with torch.no_grad():
            for parameter in stepping.model.parameters():
                parameter += 1
        stepping.step()
        assert not torch.equal(stepping.outer_state_dict()["0.weight"], before), make


# Models and worlds


def fitted(net: nn.Module, devices: int, **choices: Any) -> str:
    """The refusal of a fit, before its first step."""
    trainer = fits.trainer(strategy=FirstStrategy(**choices), devices=devices, max_steps=2)
    message = refusal(trainer.fit, fits.module(net=net), fits.SomeBatches(0, 8))
    assert trainer.global_step == 0
    return message


NO_PARAMETERS = "The model has no trainable parameters ... requires_grad=True"
ROTATION = nn.ParameterDict({"filters": nn.Parameter(torch.ones(5, dtype=torch.complex64))})
UNFIT_MODELS: list[tuple[nn.Module, dict[str, Any], str]] = [
    (mlp().requires_grad_(False), {}, NO_PARAMETERS),
    (nn.Identity(), {}, NO_PARAMETERS),
    (
        ROTATION,
        {},
        "trainable parameter ... filters' ... torch.complex64 ... as two real parameters",
    ),
    (
        mlp(),
        {"fragments": [["*.weight"]]},
        "4 of 8 trainable parameters match no pattern ... Add patterns",
    ),
]


@in_ranks(1)
def test_untrainable_models_are_refused_by_engine_and_strategy_before_the_first_step(
    rank: int,
) -> None:
    for net, choices, words in UNFIT_MODELS:
        assert_says(fitted(net, 1, **choices), words)
        assert_says(refusal(StreamingDiLoCo, nn.ModuleDict({"net": net}), **choices), words)
    # Complex values that are not trained are allowed.
    model = mlp()
    complex_values = torch.ones(3, dtype=torch.complex64)
    model.register_buffer("rotation", complex_values)
    model.register_parameter("table", nn.Parameter(complex_values, requires_grad=False))
    StreamingDiLoCo(model)


def trainer_of(
    distribution: Any, kind: Make, devices: int, num_nodes: int = 1, **choices: Any
) -> Any:
    world = {"accelerator": "cpu", "devices": devices, "num_nodes": num_nodes}
    return distribution.Trainer(strategy=kind(**choices), **world)


SPLIT_ADVICE = "Change worker_groups or the number of devices or nodes"
NCCL: Table = [
    (
        {"devices": 2, "exchange": "auto:nccl"},
        "exchange='...:nccl' was given ... trains on cpu ... only CUDA devices ... remove ':nccl' to use gloo",
    ),
]
WORLDS: Table = [
    (
        {"devices": 3, "worker_groups": 2},
        f"worker_groups=2 cannot split 3 processes ... [1, 3] ... {SPLIT_ADVICE}",
    ),
    (
        {"devices": 3, "num_nodes": 2, "worker_groups": 4},
        f"worker_groups=4 cannot split 6 processes ... [1, 2, 3, 6] ... {SPLIT_ADVICE}",
    ),
]


def test_a_world_that_cannot_be_split_or_connected_is_refused_inside_the_trainer() -> None:
    trainers = [partial(trainer_of, L, FirstStrategy), partial(trainer_of, pl, OtherStrategy)]
    assert_refused(trainers, [*WORLDS, *NCCL])
    assert_refused([partial(trainer_of, L, ModelParallelStrategy)], NCCL)
    assert not dist.is_initialized()
    for trainer in trainers:
        trainer(devices=3, num_nodes=2, worker_groups=3)
    if not dist.is_nccl_available():
        message = refusal(nccl_on, device=torch.device("cuda"))
        assert_says(message, "exchange='...:nccl' was given", "without NCCL")
        assert_says(message, "Install a build of torch with NCCL")


@in_ranks(2)
def test_a_single_group_is_reported_once_by_one_rank_and_several_are_not(rank: int) -> None:
    messages = fits.said_by("lightning_sdiloco")
    for groups in (2, 1):
        strategy = FirstStrategy(worker_groups=groups, sync_every=1, overlap_steps=0)
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=2)
        trainer.fit(fits.module(), fits.SomeBatches(0, 8))
        reports = [message for message in messages if "one worker group" in message]
        assert len(reports) == (groups == 1 and rank == 0)
        assert all("plain training with an outer step" in report for report in reports)


# Ranks that differ


def layer(width: int = 3, **choices: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width, **choices))


def unlike(rank: int) -> dict[str, nn.Module]:
    """Models that differ between two ranks, by words of the refusal."""
    other_dtype = layer(dtype=torch.float64 if rank else torch.float32)
    partly_frozen = layer(5)
    partly_frozen[0].weight.requires_grad_(rank == 0)
    buffered = layer()
    buffered.register_buffer("statistics", torch.zeros(1 + rank))
    # As a set of names gives them, whose order differs between processes.
    other_order = nn.ModuleDict({name: nn.Linear(5, 5) for name in ("cba" if rank else "abc")})
    shape = "(3, 5) torch.float32"
    wide = "(5, 5) torch.float32"
    return {
        f"0.weight is {shape} on rank 0, (4, 5) torch.float32 on rank 1": layer(3 + rank),
        "layer1.weight is missing on rank 0": nn.ModuleDict({f"layer{rank}": nn.Linear(5, 3)}),
        f"0.weight is {shape} on rank 0, (3, 5) torch.float64 on rank 1": other_dtype,
        f"0.weight is {wide} on rank 0, {wide} (frozen) on rank 1": partly_frozen,
        "on rank 0, (2,) torch.float32": buffered,
        "a.weight": other_order,
    }


class Nameless(FP4):
    """A user's compression that defines no repr."""

    __repr__ = Compression.__repr__


def outer(kind: Any = torch.optim.SGD, lr: float = 0.1) -> Any:
    return partial(kind, lr=lr)


MODEL_ADVICE = (
    "^The model differs between ranks:  ... same names, shapes and dtypes ... depend on the rank"
)
SETTINGS_ADVICE = "^The settings of the strategy differ between ranks:  ... Start all ranks with the same ... on rank 1"
BY_RANK: list[tuple[dict[str, tuple[Any, Any]], str]] = [
    (
        {"sync_every": (10, 11), "mixing": (0.0, 0.5)},
        "sync_every is 10 on rank 0, 11 on rank 1; mixing is 0.0 on rank 0, 0.5 on rank 1",
    ),
    ({"compression": ("fp4", "bf16")}, "compression is 'fp4' on rank 0, 'bf16' on rank 1"),
    ({"worker_groups": (1, 2)}, "worker_groups is 1 on rank 0, 2 on rank 1"),
    (
        {"fragments": ("strided", "strided:1")},
        "fragments is 'strided' on rank 0, 'strided:1' on rank 1",
    ),
    ({"outer_lr": (0.1, 1.1)}, "outer_lr is 0.1 on rank 0, 1.1 on rank 1"),
    (
        {
            "outer_optimizer": (
                OuterOptimizer(outlier_guard=2),
                OuterOptimizer(outlier_guard=3, clip_norm=2.0),
            )
        },
        "outer_optimizer.clip_norm is None on rank 0, 2.0 on rank 1; outer_optimizer.outlier_guard"
        " is 2 on rank 0, 3",
    ),
    ({"outer_optimizer": (None, outer())}, "outer_optimizer is None on rank 0"),
    ({"outer_optimizer": (outer(), outer(lr=0.2))}, "outer_optimizer is SGD"),
    ({"outer_optimizer": (outer(), outer(torch.optim.AdamW))}, "outer_optimizer is SGD"),
]
"""Settings of rank 0 and of rank 1, and words of the refusal."""


@in_ranks(2)
def test_models_and_settings_that_differ_by_rank_are_refused_and_equal_objects_pass(
    rank: int,
) -> None:
    dist.init_process_group("gloo")
    for words, model in unlike(rank).items():
        assert_says(refusal(StreamingDiLoCo, model), MODEL_ADVICE, words)
    for choices, words in BY_RANK:
        of_rank = {name: values[rank] for name, values in choices.items()}
        assert_says(refusal(engine, **of_rank), SETTINGS_ADVICE, words)
    engine(compression=Nameless(), outer_optimizer=outer())
    # With one group, both ranks belong to one DistributedDataParallel, whose own error must not
    # come first.
    for groups in (1, 2):
        message = fitted(layer(3 + rank), 2, worker_groups=groups)
        assert_says(message, MODEL_ADVICE, "weight is ", "on rank 1")
    message = fitted(layer(), 2, sync_every="auto" if rank else 9)
    assert_says(message, SETTINGS_ADVICE, "sync_every is 9 on rank 0, 'auto' ")


@in_ranks(3)
def test_the_rank_that_differs_from_all_others_is_named_with_some_of_its_parameters(
    rank: int,
) -> None:
    dist.init_process_group("gloo")
    message = refusal(engine, worker_groups=2)
    assert_says(message, "worker_groups=2 cannot split 3 processes", "[1, 3]")
    odd = "0.weight is (3, 5) torch.float32 on ranks 0, 2, (4, 5) torch.float32 on rank 1"
    message = refusal(StreamingDiLoCo, layer(3 + (rank == 1)))
    assert_says(message, MODEL_ADVICE, odd)
    deep = nn.Sequential(*(nn.Linear(5 + rank, 5 + rank) for _ in range(10)))
    assert_says(refusal(StreamingDiLoCo, deep), MODEL_ADVICE, "; and 15 more")


@in_ranks(2)
def test_a_trainer_beside_another_threads_is_refused_if_there_are_other_processes(
    rank: int,
) -> None:
    messages = list[str]()
    fit = partial(fits.fit, rank, 2, 2, 4, {})

    def fit_in_another_thread(trainer: Any) -> None:
        with ThreadPoolExecutor() as threads:
            messages.append(threads.submit(refusal, fit).result())

    fit(trainer_choices={"callbacks": [fits.at({2: fit_in_another_thread})]})
    fit()
    (message,) = messages
    assert_says(message, "is already running in the thread 'MainThread' ... With 2 processes")
    assert_says(message, "one after the other")

"""Everything that is refused before the first step, each by its message: what was given, what holds, what to do."""

import re
from collections.abc import Callable, Iterable, Sequence
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

import lightning_sdiloco
from lightning_sdiloco import (
    FP4,
    Compression,
    OuterOptimizer,
    StreamingDiLoCo,
    StreamingDiLoCoModelParallelStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_sdiloco.algorithm.config import Settings
from lightning_sdiloco.comm.exchange import nccl_on
from lightning_sdiloco.planning.planner import candidates
from lightning_sdiloco.pytorch_lightning import StreamingDiLoCoStrategy as OtherStrategy
from tests import fits
from tests.ranks import run_processes, run_ranks
from tests.training import mlp

Make = Callable[..., Any]
Table = Sequence[tuple[dict[str, Any], Sequence[str]]]


def engine(**choices: Any) -> StreamingDiLoCo:
    return StreamingDiLoCo(mlp(), **choices)


STRATEGIES: list[Make] = [StreamingDiLoCoStrategy, OtherStrategy]
EVERYWHERE: list[Make] = [*STRATEGIES, engine]


def refusal(make: Make, **choices: Any) -> str:
    """The message with which a call is refused."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the callers read all of it
        make(**choices)
    return str(caught.value)


def missing(message: str, *parts: str) -> list[str]:
    """What a message does not say; a part that begins with ^ is to be its beginning."""
    return [
        f"{part!r} in {message!r}"
        for part in parts
        if not (message.startswith(part[1:]) if part.startswith("^") else part in message)
    ]


def assert_refused(makes: Iterable[Make], table: Table) -> None:
    """Each of the arguments by each that takes them, with all of the parts in what is told."""
    assert [m for choices, parts in table for make in makes for m in missing(refusal(make, **choices), *parts)] == []


# Arguments

NAN, INFINITE = float("nan"), float("inf")
OVERLAP = "it must be at least 0 and below sync_every, which is "
WHOLE, MOMENTUM = "it must be a whole number of at least 1", "it must be at least 0 and below 1"
BOTH = "both numbers are whole and at least 1"
OPTIMIZER = ("a callable", "functools.partial(torch.optim.SGD, lr=0.7)")
OUT_OF_RANGE: Table = [
    ({"sync_every": 7, "overlap_steps": 7}, ("^overlap_steps=7", OVERLAP + "7")),
    ({"sync_every": 1}, ("^overlap_steps=5", OVERLAP + "1")),
    ({"overlap_steps": -1}, ("^overlap_steps=-1", OVERLAP + "100")),
    *(({"mixing": mixing}, (f"^mixing={mixing}", "it must be between 0 and 1")) for mixing in (1.01, -0.01)),
    *(({"sync_every": steps}, (f"^sync_every={steps}", WHOLE)) for steps in (0, -3)),
    *(({"worker_groups": groups}, (f"^worker_groups={groups!r}", WHOLE)) for groups in (0, 1.5, "all")),
    *(({"fragments": cut}, (f"^fragments={cut!r}", BOTH)) for cut in (0, "strided:0", "balanced:3")),
    ({"exchange": "gather:mpi"}, ("^exchange='gather:mpi'", "'nccl' between CUDA devices")),
    ({"outer_lr": -0.1}, ("^outer_lr=-0.1", "it must be at least 0")),
    *(({"outer_momentum": value}, (f"^outer_momentum={value}", MOMENTUM)) for value in (-0.1, 1.0)),
    ({"timeout": timedelta(0)}, ("^timeout=", "it must be a positive ")),
    *(({"compression": name}, (f"^compression={name!r}", "'fp32', 'bf16', 'fp8', ")) for name in ("fp5", "FP4", None)),
]
OF_ANOTHER_TYPE: Table = [
    *(
        ({name: given}, [f"^{name}={given!r} is {what}: it"])
        for name in ("mixing", "outer_lr", "outer_momentum", "sync_every", "overlap_steps")
        for given, what in (
            ("0.7", "of type str, not a number"),
            (True, "of type bool, not a number"),
            (None, "of type NoneType, not a number"),
            (INFINITE, "not finite"),
            (NAN, "not finite"),
            *((2.5, "no whole number"), (8.0, "of type float, not a whole number")) * name.endswith(("every", "steps")),
        )
    ),
    ({"worker_groups": "4"}, [f"^worker_groups='4' is of type str, not a number: {WHOLE[:27]}"]),
    ({"worker_groups": 2.0}, [f"^worker_groups=2.0 is of type float, not a whole number: {WHOLE[:27]}"]),
    ({"timeout": 60}, ["^timeout=60 is of type int, not timedelta: it must be a positive timedelta"]),
    ({"warmup_steps": -1}, ["^warmup_steps=-1 is out of range: it must be a whole number of at least 0"]),
]
NO_SUCH_CHOICE: Table = [
    ({"timeout": 30}, ["Choose another timeout; datetime.timedelta(seconds=30) is so many seconds."]),
    ({"compression": FP4}, ("compression=<class", "not the class itself")),
    (
        {"outer_optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
        ("outer_optimizer of type SGD is already an optimizer", *OPTIMIZER),
    ),
    ({"outer_optimizer": "sgd"}, ("outer_optimizer of type str is nothing that can be called", *OPTIMIZER)),
    (
        {"outer_optimizer": partial(torch.optim.SGD, lr=0.1), "outer_lr": 0.5, "outer_momentum": 0.5},
        (
            "outer_optimizer was given together with outer_lr=0.5 and outer_momentum=0.5.",
            "replaces",
            "Leave out outer_lr and outer_momentum",
        ),
    ),
    ({"fragments": "striped"}, ("fragments='striped'", "[['net.0.*'], ['net.1.*']]", "Choose one")),
    *(
        ({"fragments": given}, (f"fragments={given!r}", "Give one list of shell-style patterns"))
        for given in ([], [[]], ["*"], [["*"], 3])
    ),
]
OF_STRATEGIES: Table = [
    (
        {"ddp_kwargs": {"find_unused_parameter": True}},
        ("ddp_kwargs contains 'find_unused_parameter'", "Did you mean 'find_unused_parameters'"),
    ),
    ({"ddp_kwargs": {"foo": 1}}, ("ddp_kwargs contains 'foo'", "It has ", "static_graph")),
    (
        {"ddp_kwargs": "find_unused_parameters"},
        ("ddp_kwargs='find_unused_parameters' is of type str", "must be a dictionary", "Write ddp_kwargs="),
    ),
    (
        {"ddp_kwargs": {"process_group": object()}},
        ("ddp_kwargs contains 'process_group'", "among the ranks of a worker group", "Take it out", "worker_groups"),
    ),
    (
        {"start_method": "Fork"},
        ("start_method='Fork' is unknown", "'popen'", "'spawn', 'fork' or 'forkserver'", "Choose one"),
    ),
    ({"resume": "anyhow"}, ("resume='anyhow' is unknown", "'exact'", "'restart'", "Choose one of them")),
]
NORM, GUARD = "it must be a number above 0, or None", "it must be a number above 1, or None"
OFFLOAD = "it must be True, False or 'auto'"
OF_THE_OUTER_OPTIMIZER: Table = [
    ({"clip_norm": 0}, [f"^clip_norm=0 is out of range: {NORM}", ". Choose another clip_norm; "]),
    ({"clip_norm": NAN}, [f"^clip_norm=nan is not finite: {NORM}"]),
    ({"clip_norm": "0.7"}, [f"^clip_norm='0.7' is of type str, not a number: {NORM}"]),
    ({"outlier_guard": 1}, [f"^outlier_guard=1 is out of range: {GUARD}"]),
    ({"outlier_guard": True}, [f"^outlier_guard=True is of type bool, not a number: {GUARD}"]),
    ({"offload": "no"}, [f"^offload='no' is out of range: {OFFLOAD}"]),
    ({"offload": 1}, [f"^offload=1 is of type int, not bool or str: {OFFLOAD}"]),
    ({"lr_schedule": "cosine"}, ["^lr_schedule='cosine' is of type str, not Callable: it must be a callable from an"]),
]


def test_what_is_no_such_choice_is_refused_by_what_is_wrong_with_what_to_do() -> None:
    assert_refused(EVERYWHERE, [*OUT_OF_RANGE, *OF_ANOTHER_TYPE, *NO_SUCH_CHOICE])
    assert_refused(STRATEGIES, OF_STRATEGIES)
    without_advice = (refusal(engine, **choices) for choices, _ in OUT_OF_RANGE)
    assert [told for told in without_advice if not re.search(r"\. (Choose|Set) ", told)] == []
    assert_refused([OuterOptimizer], OF_THE_OUTER_OPTIMIZER)
    for make in STRATEGIES:
        assert make(ddp_kwargs={"find_unused_parameters": True})._ddp_kwargs["find_unused_parameters"] is True
    most = max(settings.overlap_steps for settings in candidates())
    assert missing(refusal(engine, overlap_steps=100), f"the paper saw next to no loss from up to {most}.") == []


# Every argument that was, by what is told

WERE: list[tuple[dict[str, Any], str]] = [
    ({"layers_per_fragment": 2}, "layers_per_fragment=2 is part of fragments: give fragments='strided:2' or"),
    ({"outer_lr_schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=3)}, "OuterOptimizer(lr_schedule=...)"),
    ({"outer_clip_norm": 1.0}, "outer_clip_norm=1.0 belongs to outer_optimizer: give OuterOptimizer(clip_norm=1.0)"),
    ({"outlier_guard": 5.0}, "give OuterOptimizer(outlier_guard=5.0)"),
    ({"offload": False}, "give OuterOptimizer(offload=False)"),
    ({"final_sync": False}, "final_sync=False is no choice: training always ends with the plain mean"),
    ({"exchange_backend": "nccl"}, "give exchange='auto:nccl', 'gather:nccl' or 'two_shot:nccl'"),
    ({"exchange_backend": None, "outer_clip_norm": None}, "outer_clip_norm=None is no argument: leave it out."),
    ({"H": 50}, "H=50 is called sync_every here."),
    ({"tau": 5}, "tau=5 is called overlap_steps here."),
    ({"alpha": 0.5}, "alpha=0.5 is called mixing here."),
    ({"num_fragments": 4}, "num_fragments=4 is called fragments here."),
    ({"outer_learning_rate": 0.7}, "outer_learning_rate=0.7 is called outer_lr here."),
    *(
        ({name: 3}, f"{name}=3 does not go with worker groups that are launched together: every launch waits for all")
        for name in ("quorum", "grace")
    ),
]
OF_A_TRAINER: list[tuple[dict[str, Any], str]] = [
    ({"on_resume": "restart"}, "on_resume='restart' is called resume: give resume='restart'."),
    ({"resumable_checkpoints": "newest"}, "give resume='exact:newest' or 'restart:newest'"),
]


def test_an_argument_that_was_is_refused_with_what_to_write_and_a_misspelt_one_with_the_right_name() -> None:
    ours = [StreamingDiLoCoStrategy, OtherStrategy, StreamingDiLoCoModelParallelStrategy]
    simulated = partial(lightning_sdiloco.SimulatedGroups, [mlp(), mlp()])
    for make in (*ours, lightning_sdiloco.StreamingDiLoCoFabricStrategy, engine, simulated):
        were = WERE + (OF_A_TRAINER if make in ours else [])
        assert_refused([make], [(choices, [told]) for choices, told in were])
        with pytest.raises(TypeError, match=r"has no argument 'overlap_step'\. Did you mean overlap_steps\?"):
            make(overlap_step=3)
        with pytest.raises(TypeError, match=r"has no argument 'nonsense'\. help\(\w+\) lists those that it has\."):
            make(nonsense=3)


def test_scalars_of_numpy_are_the_numbers_that_they_are() -> None:
    numpy = pytest.importorskip("numpy")
    numbers = {"mixing": 0.25, "outer_lr": 0.5, "outer_momentum": 0.75}
    whole = {"sync_every": 40, "overlap_steps": 3, "fragments": 2, "worker_groups": 1}
    scalars = {name: numpy.float32(value) for name, value in numbers.items()}
    plain = Settings(**numbers, **{name: value for name, value in whole.items() if name != "worker_groups"})
    for make in EVERYWHERE:
        made = make(**scalars, **{name: numpy.int64(value) for name, value in whole.items()})
        settings = made.settings if make is engine else made._options.settings
        assert settings.described() == plain.described()
        if make is not engine:
            assert type(made._options.worker_groups) is int
    outer = OuterOptimizer(clip_norm=numpy.float32(8.0), outlier_guard=numpy.int64(4))
    assert outer.described() == OuterOptimizer(clip_norm=8.0, outlier_guard=4).described()


def test_the_ends_of_the_ranges_are_allowed() -> None:
    for make in EVERYWHERE:
        make(sync_every=1, overlap_steps=0, mixing=0, worker_groups=1, fragments="strided:1")
        make(sync_every=100, overlap_steps=99, mixing=1, outer_lr=0, outer_momentum=0, fragments=1)
        make(outer_optimizer=OuterOptimizer(clip_norm=1e-9, outlier_guard=1.001))
        make(outer_optimizer=OuterOptimizer(clip_norm=INFINITE))


# The outer optimizer


class Clipped(torch.optim.SGD):
    """Looks at the norm of a shard, which depends on how many ranks share a fragment."""

    max_norm = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], self.max_norm)
        return super().step(closure)


class ClippedLate(Clipped):
    max_norm = 30.0


class Neighbours(torch.optim.SGD):
    """Mixes neighbouring values."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad.cumsum(0)
        return super().step(closure)


def sgd(tensors: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(tensors, lr=0.1)


HALVES = ("outer_optimizer does not work elementwise", "whole and in two halves", "torch.optim.SGD")
FLAT = ("outer_optimizer could not step flat float32 shards", "one per fragment", "Choose one")
HELD = ("must hold every shard", "Pass the shards on")
UNFIT: list[tuple[Make, tuple[str, ...]]] = [
    *((partial(kind, lr=0.1), HALVES) for kind in (Clipped, ClippedLate, Neighbours, torch.optim.Adafactor)),
    (partial(torch.optim.LBFGS, lr=0.1), FLAT),
    (list, FLAT),
    *((partial(kind, lr=0.1), FLAT) for kind in [getattr(torch.optim, "Muon", None)] if kind),
    (lambda shards: sgd(list(shards)[:-1]), ("over 1 tensors that leaves out the shards [1] of 2", *HELD)),
    (lambda shards: sgd([nn.Parameter(own.detach().clone()) for own in shards]), ("the shards [0, 1] of 2", *HELD)),
    (lambda shards: sgd([*shards, nn.Parameter(torch.zeros(3))]), ("outer_optimizer", "and nothing else")),
]


def layered(**choices: Any) -> StreamingDiLoCo:
    return engine(fragments=[["0.*", "2.*"], ["4.*", "6.*"]], **choices)


def test_an_outer_optimizer_works_elementwise_or_is_refused() -> None:
    assert_refused([layered], [({"outer_optimizer": make}, parts) for make, parts in UNFIT])

    def grouped(shards: Sequence[Tensor]) -> Optimizer:
        return torch.optim.SGD([{"params": [shard], "lr": 0.1 * (i + 1)} for i, shard in enumerate(shards)])

    kinds = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adadelta", "Rprop", "ASGD")
    for make in (grouped, *(partial(getattr(torch.optim, kind), lr=0.1) for kind in kinds)):
        own = layered(outer_optimizer=make, sync_every=1, overlap_steps=0)
        before = own.outer_state_dict()
        with torch.no_grad():
            for parameter in own.model.parameters():
                parameter += 1
        own.step()
        assert not torch.equal(own.outer_state_dict()["0.weight"], before["0.weight"]), make


# Models


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.ones(5, dtype=torch.complex64))


def fitted(net: nn.Module, devices: int, **choices: Any) -> str:
    """The refusal of a fit, before its first step."""
    module = fits.module(net=net)
    trainer = fits.trainer(strategy=StreamingDiLoCoStrategy(**choices), devices=devices, max_steps=2)
    message = refusal(trainer.fit, model=module, train_dataloaders=fits.SomeBatches(0, 8))
    assert trainer.global_step == 0
    return message


NO_PARAMETERS = ("The model has no trainable parameters", "requires_grad=True")
UNFIT_MODELS: list[tuple[nn.Module, dict[str, Any], tuple[str, ...]]] = [
    (mlp().requires_grad_(False), {}, NO_PARAMETERS),
    (nn.Identity(), {}, NO_PARAMETERS),
    (Spectral(), {}, ("trainable parameter", "filters'", "torch.complex64", "as two real parameters")),
    (mlp(), {"fragments": [["*.5.*"], ["*"]]}, ("'*.5.*' matches no parameter", "Correct the pattern")),
    (mlp(), {"fragments": [["*"], ["*.0.*"]]}, ("0.weight' is claimed by two patterns", "Narrow one of them")),
    (mlp(), {"fragments": [["*.weight"]]}, ("4 of 8 trainable parameters match no pattern", "Add a pattern")),
]


def test_models_that_cannot_be_trained_are_refused_by_engine_and_strategy_before_the_first_step() -> None:
    def fit(rank: int, world_size: int) -> list[str]:
        return [fitted(net, 1, **choices) for net, choices, _ in UNFIT_MODELS]

    (messages,) = run_processes(fit, 1)
    for (net, choices, parts), message in zip(UNFIT_MODELS, messages, strict=True):
        assert missing(message, *parts) == []
        assert missing(refusal(StreamingDiLoCo, model=nn.ModuleDict({"net": net}), **choices), *parts) == []
    # Complex values that are not trained are allowed.
    model = mlp()
    model.register_buffer("rotation", torch.ones(3, dtype=torch.complex64))
    model.register_parameter("table", nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False))
    StreamingDiLoCo(model)


# Worlds


def test_a_world_that_cannot_be_split_or_connected_is_refused_inside_the_trainer() -> None:
    def trainer(distribution: Any, kind: Make, devices: int, num_nodes: int = 1, **choices: Any) -> Any:
        return distribution.Trainer(accelerator="cpu", strategy=kind(**choices), devices=devices, num_nodes=num_nodes)

    wrong = []
    for make in (partial(trainer, L, StreamingDiLoCoStrategy), partial(trainer, pl, OtherStrategy)):
        for groups, devices, num_nodes, fitting in ((2, 3, 1, "[1, 3]"), (4, 3, 2, "[1, 2, 3, 6]")):
            message = refusal(make, devices=devices, num_nodes=num_nodes, worker_groups=groups)
            split = f"worker_groups={groups} cannot split {devices * num_nodes} processes"
            wrong += missing(message, split, fitting, "Change worker_groups, or the number of devices or nodes")
            assert not dist.is_initialized()
        make(devices=3, num_nodes=2, worker_groups=3)
    kinds = (L, StreamingDiLoCoStrategy), (pl, OtherStrategy), (L, StreamingDiLoCoModelParallelStrategy)
    for distribution, kind in kinds:
        message = refusal(partial(trainer, distribution, kind), devices=2, exchange="auto:nccl")
        told = ("exchange='...:nccl' was given", "trains on cpu", "CUDA devices only", "leave", "for gloo")
        wrong += missing(message, *told)
    if not dist.is_nccl_available():
        message = refusal(nccl_on, device=torch.device("cuda"))
        wrong += missing(message, "exchange='...:nccl' was given", "without NCCL", "Install a torch that has it")
    assert wrong == []


def test_one_group_is_said_once_and_by_one_rank_and_several_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def said() -> int:
        told = [record.getMessage() for record in caplog.records if "one worker group" in record.getMessage()]
        assert all("plain training with an outer step" in text for text in told)
        caplog.clear()
        return len(told)

    def fit(rank: int, world_size: int) -> int:
        trainer = fits.trainer(strategy=StreamingDiLoCoStrategy(sync_every=1, overlap_steps=0), max_steps=2)
        trainer.fit(fits.module(), fits.SomeBatches(0, 8))
        return said()

    def engines(rank: int, world_size: int) -> list[int]:
        own = engine(worker_groups=1, sync_every=1, overlap_steps=0)
        own.step()
        own.finish()
        return [said(), engine(worker_groups=2) is None or said()]

    assert run_processes(fit, 1) == [1]
    assert run_ranks(engines, 2) == [[1, 0], [0, 0]]


# Ranks that differ

Build = Callable[[int], tuple[nn.Module, dict[str, Any]]]


def assert_ranks_refused(builds: Sequence[tuple[Build, Sequence[str]]], world_size: int = 2, fit: bool = False) -> None:
    """Whatever each rank builds in turn, all are told the same: by an engine, or by a fit before its first step."""

    def function(rank: int, world_size: int) -> list[str]:
        made = (build(rank) for build, _ in builds)
        return [
            fitted(model, world_size, **choices) if fit else refusal(StreamingDiLoCo, model=model, **choices)
            for model, choices in made
        ]

    for messages in (run_processes if fit else run_ranks)(function, world_size):
        assert [m for message, (_, parts) in zip(messages, builds, strict=True) for m in missing(message, *parts)] == []


def partly_frozen(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[0].weight.requires_grad_(rank == 0)
    return model


def buffered(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 3))
    model.register_buffer("statistics", torch.zeros(1 + rank))
    return model


def in_another_order(rank: int) -> nn.Module:
    """As a set of names gives it, whose order differs between processes."""
    names = ["a", "b", "c"]
    return nn.ModuleDict({name: nn.Linear(5, 5) for name in (reversed(names) if rank else names)})


def shaped(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3 + rank))


MODELS: list[tuple[Callable[[int], nn.Module], str]] = [
    (shaped, "0.weight is (3, 5) torch.float32 on rank 0, (4, 5) torch.float32 on rank 1"),
    (lambda rank: nn.ModuleDict({f"layer{rank}": nn.Linear(5, 3)}), "layer1.weight is missing on rank 0"),
    (
        lambda rank: nn.Sequential(nn.Linear(5, 3, dtype=torch.float64 if rank else torch.float32)),
        "0.weight is (3, 5) torch.float32 on rank 0, (3, 5) torch.float64 on rank 1",
    ),
    (partly_frozen, "0.weight is (5, 5) torch.float32 on rank 0, (5, 5) torch.float32 (frozen) on rank 1"),
    (buffered, "on rank 0, (2,) torch.float32"),
    (in_another_order, "a.weight"),
]
MODEL_ADVICE = ("The model differs between ranks: ", "same names, shapes and dtypes", "depend on the rank")


def test_models_that_differ_between_ranks_are_refused() -> None:
    def of(make: Callable[[int], nn.Module], **choices: Any) -> Build:
        return lambda rank: (make(rank), choices)

    assert_ranks_refused([(of(make), (*MODEL_ADVICE, told)) for make, told in MODELS])
    # With one group, both ranks belong to one DistributedDataParallel, whose own error must not come first.
    parts = (*MODEL_ADVICE, "weight is ", "on rank 0, ", "on rank 1")
    assert_ranks_refused([(of(shaped, worker_groups=groups), parts) for groups in (1, 2)], fit=True)
    odd = "0.weight is (3, 5) torch.float32 on ranks 0, 2, (4, 5) torch.float32 on rank 1"
    many = (*(f"{i}.weight is " for i in range(2)), "; and 15 more")
    assert_ranks_refused(
        [
            (lambda rank: (shaped(int(rank == 1)), {}), [odd]),
            (lambda rank: (nn.Sequential(*(nn.Linear(5 + rank, 5 + rank) for _ in range(10))), {}), many),
            (of(lambda rank: mlp(), worker_groups=2), ("worker_groups=2 cannot split 3 processes", "[1, 3]")),
        ],
        world_size=3,
    )


OWN: list[tuple[str, Any, Any, str]] = [
    ("sync_every", 10, 11, "sync_every is 10 on rank 0, 11 on rank 1"),
    ("compression", "fp4", "bf16", "compression is 'fp4' on rank 0, 'bf16' on rank 1"),
    ("worker_groups", 1, 2, "worker_groups is 1 on rank 0, 2 on rank 1"),
    ("fragments", "strided", "strided:1", "fragments is 'strided:3' on rank 0, 'strided:1' on rank 1"),
    ("outer_lr", 0.1, 1.1, "outer_lr is 0.1 on rank 0, 1.1 on rank 1"),
    *(
        ("outer_optimizer", OuterOptimizer(**own), OuterOptimizer(**other), told)
        for own, other, told in (
            ({}, {"clip_norm": 2.0}, "outer_optimizer.clip_norm is None on rank 0, 2.0 on rank 1"),
            ({"outlier_guard": 2}, {"outlier_guard": 3}, "outer_optimizer.outlier_guard is 2 on rank 0, 3 on"),
        )
    ),
    ("outer_optimizer", None, partial(torch.optim.SGD, lr=0.1), "outer_optimizer is None on rank 0"),
    ("outer_optimizer", partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SGD, lr=0.2), "outer_optimizer is SGD"),
    ("outer_optimizer", partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, lr=0.1), "outer_optimizer is SGD"),
]
SETTINGS_ADVICE = ("The settings of the strategy differ between ranks: ", "All ranks must use the same", "on rank 1")


class Halves(Compression):
    """A compression of a user, with no repr of its own."""

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        return values.half().view(torch.uint8)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(torch.float16))


def test_settings_that_differ_between_ranks_are_refused_and_equal_objects_at_different_addresses_are_none() -> None:
    def of(name: str, *given: Any) -> Build:
        return lambda rank: (mlp(), {name: given[rank]})

    builds = [(of(name, own, other), (*SETTINGS_ADVICE, told)) for name, own, other, told in OWN]
    both: Build = lambda rank: (mlp(), {"sync_every": 10 + rank, "mixing": 0.5 * rank})  # noqa: E731
    builds.append((both, ["sync_every is 10 on rank 0, 11 on rank 1; mixing is 0.0 on rank 0, 0.5 on rank 1"]))
    assert_ranks_refused(builds)
    assert_ranks_refused(builds[:1], fit=True)
    instances = [Halves(), Halves()]

    def function(rank: int, world_size: int) -> list[str]:
        return list(
            engine(compression=instances[rank], outer_optimizer=partial(torch.optim.SGD, lr=0.1)).outer_state_dict()
        )

    assert len(set(map(tuple, run_ranks(function, 2)))) == 1

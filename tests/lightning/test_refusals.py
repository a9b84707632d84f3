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
from lightning_sdiloco.algorithm import Settings
from lightning_sdiloco.comm import nccl_on
from lightning_sdiloco.planning import candidates
from lightning_sdiloco.pytorch_lightning import StreamingDiLoCoStrategy as OtherStrategy
from tests.ranks import run_processes, run_ranks
from tests.training import mlp

Make = Callable[..., Any]


def make_engine(**choices: Any) -> StreamingDiLoCo:
    return StreamingDiLoCo(mlp(), **choices)


STRATEGIES: list[Make] = [StreamingDiLoCoStrategy, OtherStrategy]
EVERYWHERE: list[Make] = [*STRATEGIES, make_engine]


def refusal(make: Make, **choices: Any) -> str:
    """The message with which a call is refused."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the callers read all of it
        make(**choices)
    return str(caught.value)


def assert_says(message: str, *parts: str) -> None:
    assert [part for part in parts if part not in message] == [], message


def assert_refused(makes: Iterable[Make], table: Iterable[tuple[dict[str, Any], tuple[str, ...]]]) -> None:
    """Each of the arguments by each that takes them, with all of the parts in what is told."""
    wrong = []
    for choices, parts in table:
        for make in makes:
            message = refusal(make, **choices)
            wrong += [(part, message) for part in parts if part not in message]
    assert wrong == []


# Arguments on their own

NAN, INFINITE = float("nan"), float("inf")
OVERLAP = "it must be at least 0 and below sync_every, which is "
MIXING = "it must be between 0 and 1"
WHOLE = "it must be a whole number of at least 1"
MOMENTUM = "it must be at least 0 and below 1"
COMPRESSIONS = "'fp32', 'bf16', 'fp8', 'int8', 'int4', 'fp4', "
OUT_OF_RANGE: list[tuple[dict[str, Any], str, str]] = [
    ({"sync_every": 100, "overlap_steps": 100}, "overlap_steps=100", OVERLAP + "100"),
    ({"sync_every": 7, "overlap_steps": 30}, "overlap_steps=30", OVERLAP + "7"),
    ({"sync_every": 1}, "overlap_steps=5", OVERLAP + "1"),
    ({"overlap_steps": -1}, "overlap_steps=-1", OVERLAP + "100"),
    ({"overlap_steps": 2.5}, "overlap_steps=2.5", OVERLAP + "100"),
    ({"mixing": 1.01}, "mixing=1.01", MIXING),
    ({"mixing": -0.01}, "mixing=-0.01", MIXING),
    ({"mixing": NAN}, "mixing=nan", MIXING),
    ({"sync_every": 0}, "sync_every=0", WHOLE),
    ({"sync_every": -3}, "sync_every=-3", WHOLE),
    ({"sync_every": 2.5}, "sync_every=2.5", WHOLE),
    ({"sync_every": True}, "sync_every=True", WHOLE),
    ({"worker_groups": 0}, "worker_groups=0", WHOLE),
    ({"worker_groups": -2}, "worker_groups=-2", WHOLE),
    ({"worker_groups": 1.5}, "worker_groups=1.5", WHOLE),
    ({"worker_groups": "all"}, "worker_groups='all'", WHOLE),
    ({"fragments": 0}, "fragments=0", "both numbers are whole and at least 1"),
    ({"fragments": "strided:0"}, "fragments='strided:0'", "both numbers are whole and at least 1"),
    ({"fragments": "balanced:3"}, "fragments='balanced:3'", "both numbers are whole and at least 1"),
    ({"exchange": "gather:mpi"}, "exchange='gather:mpi'", "'nccl' between CUDA devices"),
    ({"outer_lr": -0.1}, "outer_lr=-0.1", "it must be at least 0"),
    ({"outer_lr": NAN}, "outer_lr=nan", "it must be at least 0"),
    ({"outer_momentum": -0.1}, "outer_momentum=-0.1", MOMENTUM),
    ({"outer_momentum": 1.0}, "outer_momentum=1.0", MOMENTUM),
    ({"outer_momentum": 1.5}, "outer_momentum=1.5", MOMENTUM),
    ({"timeout": timedelta(0)}, "timeout=", "it must be a positive "),
    ({"compression": "fp5"}, "compression='fp5'", COMPRESSIONS),
    ({"compression": "FP4"}, "compression='FP4'", COMPRESSIONS),
    ({"compression": None}, "compression=None", COMPRESSIONS),
]


def test_an_argument_out_of_range_is_refused() -> None:
    for choices, given, holds in OUT_OF_RANGE:
        for make in EVERYWHERE:
            message = refusal(make, **choices)
            assert message.startswith(given)
            assert_says(message, holds)
            assert re.search(r"\. (Choose|Set) ", message), f"says what to do: {message}"


NO_OPTIMIZER = ("a callable", "functools.partial(torch.optim.SGD, lr=0.7)")
OF_ALL: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"timeout": 30}, ("Choose another timeout; datetime.timedelta(seconds=30) is so many seconds.",)),
    ({"compression": FP4}, ("compression=<class", "not the class itself")),
    (
        {"outer_optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
        ("outer_optimizer of type SGD is already an optimizer", *NO_OPTIMIZER),
    ),
    ({"outer_optimizer": "sgd"}, ("outer_optimizer of type str is nothing that can be called", *NO_OPTIMIZER)),
    *(
        (
            {"outer_optimizer": partial(torch.optim.SGD, lr=0.1), **dict.fromkeys(names, 0.5)},
            (
                f"outer_optimizer was given together with {' and '.join(f'{name}=0.5' for name in names)}.",
                "replaces",
                "Leave out " + " and ".join(names),
            ),
        )
        for names in (["outer_lr"], ["outer_momentum"], ["outer_lr", "outer_momentum"])
    ),
    *(
        ({"fragments": given}, (f"fragments={given!r}", "[['net.0.*'], ['net.1.*']]", advice))
        for advice, choices in {
            "Choose one": ("striped", 0),
            "Give one list of shell-style patterns": ([], [[]], ["*"], [["*"], 3]),
        }.items()
        for given in choices
    ),
]
OF_STRATEGIES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"ddp_kwargs": {"find_unused_parameter": True}},
        ("ddp_kwargs contains 'find_unused_parameter'", "Did you mean 'find_unused_parameters'"),
    ),
    ({"ddp_kwargs": {"foo": 1}}, ("ddp_kwargs contains 'foo'", "It has ", "static_graph")),
    (
        {"ddp_kwargs": "find_unused_parameters"},
        ("ddp_kwargs='find_unused_parameters' is of type str", "must be a dictionary", "Write ddp_kwargs="),
    ),
    *(
        (
            {"ddp_kwargs": {name: object(), "find_unused_parameters": True}},
            (f"ddp_kwargs contains '{name}'", "among the ranks of a worker group", "Take it out", "worker_groups"),
        )
        for name in ("process_group", "device_mesh")
    ),
    (
        {"start_method": "Fork"},
        ("start_method='Fork' is unknown", "'popen'", "'spawn', 'fork' or 'forkserver'", "Choose one"),
    ),
    ({"resume": "anyhow"}, ("resume='anyhow' is unknown", "'exact'", "'restart'", "Choose one of them")),
]


def test_what_is_no_such_choice_is_refused() -> None:
    assert_refused(EVERYWHERE, OF_ALL)
    assert_refused(STRATEGIES, OF_STRATEGIES)
    for make in STRATEGIES:
        assert make(ddp_kwargs={"find_unused_parameters": True})._ddp_kwargs["find_unused_parameters"] is True
        with pytest.raises(TypeError, match="find_unused_parameters"):
            make(find_unused_parameters=True)


NUMBERS = ("mixing", "outer_lr", "outer_momentum")
WHOLE_NUMBERS = ("sync_every", "overlap_steps")
OF_ANOTHER_TYPE: list[tuple[dict[str, Any], str]] = [
    *(({name: "0.7"}, f"{name}='0.7' is of type str, not a number: it") for name in (*NUMBERS, *WHOLE_NUMBERS)),
    *(({name: True}, f"{name}=True is of type bool, not a number: it") for name in (*NUMBERS, *WHOLE_NUMBERS)),
    *(({name: [1]}, f"{name}=[1] is of type list, not a number: it") for name in (*NUMBERS, *WHOLE_NUMBERS)),
    *(({name: INFINITE}, f"{name}=inf is not finite: it") for name in (*NUMBERS, *WHOLE_NUMBERS)),
    *(({name: NAN}, f"{name}=nan is not finite: it") for name in (*NUMBERS, *WHOLE_NUMBERS)),
    *(({name: 2.5}, f"{name}=2.5 is no whole number: it") for name in WHOLE_NUMBERS),
    *(({n: None}, f"{n}=None is of type NoneType, not a number: it") for n in (*NUMBERS, *WHOLE_NUMBERS)),
    ({"worker_groups": "4"}, "worker_groups='4' is of type str, not a number: it must be a whole number"),
    ({"worker_groups": True}, "worker_groups=True is of type bool, not a number: it must be a whole number"),
    ({"worker_groups": None}, "worker_groups=None is of type NoneType, not a number: it must be a whole number"),
    ({"worker_groups": 2.0}, "worker_groups=2.0 is of type float, not a whole number: it must be a whole number"),
    *(({name: 8.0}, f"{name}=8.0 is of type float, not a whole number: it") for name in WHOLE_NUMBERS),
    ({"timeout": 60}, "timeout=60 is of type int, not timedelta: it must be a positive timedelta"),
    ({"warmup_steps": -1}, "warmup_steps=-1 is out of range: it must be a whole number of at least 0"),
]


def test_an_argument_of_another_type_is_refused_by_what_is_wrong() -> None:
    for choices, given in OF_ANOTHER_TYPE:
        for make in EVERYWHERE:
            assert refusal(make, **choices).startswith(given)


NORM, GUARD = "it must be a number above 0, or None", "it must be a number above 1, or None"
OF_THE_OUTER_OPTIMIZER: list[tuple[dict[str, Any], str, str]] = [
    *(({"clip_norm": norm}, f"clip_norm={norm!r} is out of range", NORM) for norm in (0, -1.0)),
    ({"clip_norm": NAN}, "clip_norm=nan is not finite", NORM),
    ({"clip_norm": "0.7"}, "clip_norm='0.7' is of type str, not a number", NORM),
    *(({"outlier_guard": times}, f"outlier_guard={times!r} is out of range", GUARD) for times in (1, 0.5)),
    ({"outlier_guard": True}, "outlier_guard=True is of type bool, not a number", GUARD),
    ({"outlier_guard": INFINITE}, "outlier_guard=inf is not finite", GUARD),
    ({"offload": "no"}, "offload='no' is out of range", "it must be True, False or 'auto'"),
    ({"offload": 1}, "offload=1 is of type int, not bool or str", "it must be True, False or 'auto'"),
    ({"lr_schedule": "cosine"}, "lr_schedule='cosine' is of type str, not Callable", "it must be a callable from an"),
]


def test_what_is_out_of_range_of_the_outer_optimizer_is_refused() -> None:
    for choices, given, holds in OF_THE_OUTER_OPTIMIZER:
        message = refusal(OuterOptimizer, **choices)
        assert message.startswith(f"{given}: {holds}"), message
        assert_says(message, f". Choose another {next(iter(choices))}; ")


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
    for make in (*ours, lightning_sdiloco.StreamingDiLoCoFabricStrategy, make_engine, simulated):
        for choices, told in WERE + (OF_A_TRAINER if make in ours else []):
            assert_says(refusal(make, **choices), told)
        with pytest.raises(TypeError, match=r"has no argument 'overlap_step'\. Did you mean overlap_steps\?"):
            make(overlap_step=3)
        with pytest.raises(TypeError, match=r"has no argument 'nonsense'\. help\(\w+\) lists those that it has\."):
            make(nonsense=3)


def test_as_much_overlap_is_called_harmless_as_the_planner_tries() -> None:
    most = max(settings.overlap_steps for settings in candidates())
    assert_says(refusal(make_engine, overlap_steps=100), f"the paper saw next to no loss from up to {most}.")


def test_scalars_of_numpy_are_the_numbers_that_they_are() -> None:
    numpy = pytest.importorskip("numpy")
    numbers = {"mixing": 0.25, "outer_lr": 0.5, "outer_momentum": 0.75}
    whole = {"sync_every": 40, "overlap_steps": 3, "fragments": 2, "worker_groups": 1}
    scalars = {name: numpy.float32(value) for name, value in numbers.items()}
    plain = Settings(**numbers, **{name: value for name, value in whole.items() if name != "worker_groups"})
    for make in EVERYWHERE:
        made = make(**scalars, **{name: numpy.int64(value) for name, value in whole.items()})
        settings = made.settings if make is make_engine else made._options.settings
        assert settings.described() == plain.described()
        if make is not make_engine:
            assert type(made._options.worker_groups) is int
    outer = OuterOptimizer(clip_norm=numpy.float32(8.0), outlier_guard=numpy.int64(4))
    assert outer.described() == OuterOptimizer(clip_norm=8.0, outlier_guard=4).described()


IN_RANGE: list[dict[str, Any]] = [
    {"sync_every": 1, "overlap_steps": 0},
    {"sync_every": 100, "overlap_steps": 99},
    {"mixing": 0},
    {"mixing": 1},
    {"worker_groups": 1},
    {"fragments": "strided:1"},
    {"outer_lr": 0},
    {"outer_momentum": 0},
    {"fragments": 1},
    {"outer_optimizer": OuterOptimizer(clip_norm=1e-9, outlier_guard=1.001)},
    {"outer_optimizer": OuterOptimizer(clip_norm=INFINITE)},
]


def test_the_ends_of_the_ranges_are_allowed() -> None:
    for choices in IN_RANGE:
        for make in EVERYWHERE:
            make(**choices)


def test_nccl_between_devices_that_are_not_cuda_is_refused_before_any_process_starts() -> None:
    kinds = (L, StreamingDiLoCoStrategy), (pl, OtherStrategy), (L, StreamingDiLoCoModelParallelStrategy)
    for distribution, strategy in kinds:
        given = strategy(exchange="auto:nccl")
        message = refusal(distribution.Trainer, accelerator="cpu", devices=2, strategy=given)
        assert_says(message, "exchange='...:nccl' was given", "trains on cpu", "CUDA devices only", "leave", "for gloo")


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_that_torch_does_not_have_is_refused() -> None:
    message = refusal(nccl_on, device=torch.device("cuda"))
    assert_says(message, "exchange='...:nccl' was given", "built without NCCL", "Install a torch that has it")


# The outer optimizer


class Clipped(torch.optim.SGD):
    """Looks at the norm of a shard, which depends on how many ranks share a fragment."""

    max_norm = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], self.max_norm)
        return super().step(closure)


class ClippedLate(Clipped):
    """Takes part only when the norm is large."""

    max_norm = 30.0


class Neighbours(torch.optim.SGD):
    """Mixes neighbouring values."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad.cumsum(0)
        return super().step(closure)


def without_the_last(shards: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(list(shards)[:-1], lr=0.1)


def of_copies(shards: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD([nn.Parameter(shard.detach().clone()) for shard in shards], lr=0.1)


def with_another(shards: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD([*shards, nn.Parameter(torch.zeros(3))], lr=0.1)


def no_optimizer(shards: Iterable[Tensor]) -> Any:
    return list(shards)


HALVES = ("outer_optimizer does not work elementwise", "whole and in two halves", "torch.optim.SGD")
FLAT = ("outer_optimizer could not step flat float32 shards", "one per fragment", "Choose one")
HELD = ("must hold every shard", "Pass the shards on")
UNFIT: list[tuple[Make, tuple[str, ...]]] = [
    *((partial(kind, lr=0.1), HALVES) for kind in (Clipped, ClippedLate, Neighbours, torch.optim.Adafactor)),
    (partial(torch.optim.LBFGS, lr=0.1), FLAT),
    (no_optimizer, FLAT),
    *((partial(kind, lr=0.1), FLAT) for kind in [getattr(torch.optim, "Muon", None)] if kind),
    (without_the_last, ("over 1 tensors that leaves out the shards [1] of 2", *HELD)),
    (of_copies, ("the shards [0, 1] of 2", *HELD)),
    (with_another, ("outer_optimizer", "and nothing else")),
]


HALF_AND_HALF = [["0.*", "2.*"], ["4.*", "6.*"]]


def layered_engine(**choices: Any) -> StreamingDiLoCo:
    return StreamingDiLoCo(mlp(), fragments=HALF_AND_HALF, **choices)


def test_an_outer_optimizer_that_does_not_step_each_value_of_each_shard_by_itself_is_refused() -> None:
    assert_refused([layered_engine], [({"outer_optimizer": make}, parts) for make, parts in UNFIT])


def test_an_outer_optimizer_that_works_elementwise_is_accepted() -> None:
    def grouped(shards: Sequence[Tensor]) -> Optimizer:
        return torch.optim.SGD([{"params": [shard], "lr": 0.1 * (i + 1)} for i, shard in enumerate(shards)])

    kinds = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adadelta", "Rprop", "ASGD")
    for make in (grouped, *(partial(getattr(torch.optim, kind), lr=0.1) for kind in kinds)):
        model = mlp()
        engine = StreamingDiLoCo(model, fragments=HALF_AND_HALF, outer_optimizer=make, sync_every=1, overlap_steps=0)
        before = engine.outer_state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        engine.step()
        assert not torch.equal(engine.outer_state_dict()["0.weight"], before["0.weight"]), make


# Models


class Module(L.LightningModule):
    """Counts its steps, so that a test sees that none was made."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.steps = 0

    def training_step(self, batch: Tensor) -> Tensor:
        self.steps += 1
        return self.net(batch).abs().square().mean()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(8, 5))


def make_trainer(strategy: Any, distribution: Any = L, **arguments: Any) -> Any:
    return distribution.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.ones(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.filters


NO_PARAMETERS = ("The model has no trainable parameters", "requires_grad=True")
COMPLEX = ("trainable parameter", "filters'", "torch.complex64", "as two real parameters")
UNFIT_MODELS: list[tuple[nn.Module, dict[str, Any], tuple[str, ...]]] = [
    (mlp().requires_grad_(False), {}, NO_PARAMETERS),
    (nn.Identity(), {}, NO_PARAMETERS),
    (Spectral(), {}, COMPLEX),
    (mlp(), {"fragments": [["*.5.*"], ["*"]]}, ("'*.5.*' matches no parameter", "Correct the pattern")),
    (mlp(), {"fragments": [["*"], ["*.0.*"]]}, ("0.weight' is claimed by two patterns", "Narrow one of them")),
    (mlp(), {"fragments": [["*.weight"]]}, ("4 of 8 trainable parameters match no pattern", "Add a pattern")),
]


def test_models_that_cannot_be_trained_are_refused_by_engine_and_strategy_before_the_first_step() -> None:
    def fit(rank: int, world_size: int) -> list[str]:
        messages = []
        for net, choices, _ in UNFIT_MODELS:
            module = Module(net)
            trainer = make_trainer(StreamingDiLoCoStrategy(**choices), devices=1)
            messages.append(refusal(trainer.fit, model=module))
            assert module.steps == 0
        return messages

    (messages,) = run_processes(fit, 1)
    for (net, choices, parts), message in zip(UNFIT_MODELS, messages, strict=True):
        assert_says(message, *parts)
        assert_says(refusal(StreamingDiLoCo, model=nn.ModuleDict({"net": net}), **choices), *parts)


def test_complex_values_that_are_not_trained_are_allowed() -> None:
    model = mlp()
    model.register_buffer("rotation", torch.ones(3, dtype=torch.complex64))
    model.register_parameter("table", nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False))
    StreamingDiLoCo(model)


# Worlds


def test_a_world_that_cannot_be_split_is_refused_inside_the_trainer() -> None:
    worlds = [(2, 3, 1, "[1, 3]"), (4, 2, 1, "[1, 2]"), (4, 3, 2, "[1, 2, 3, 6]")]
    for worker_groups, devices, num_nodes, fitting in worlds:
        for distribution, strategy in ((L, StreamingDiLoCoStrategy), (pl, OtherStrategy)):
            make = partial(make_trainer, strategy(worker_groups=worker_groups), distribution)
            message = refusal(make, devices=devices, num_nodes=num_nodes)
            assert_says(message, f"worker_groups={worker_groups} cannot split {devices * num_nodes} processes", fitting)
            assert_says(message, "Change worker_groups, or the number of devices or nodes")
            assert not dist.is_initialized()
    for fits, devices, num_nodes in (("auto", 3, 1), ("auto", 3, 2), (3, 3, 2)):
        make_trainer(StreamingDiLoCoStrategy(worker_groups=fits), devices=devices, num_nodes=num_nodes)


def test_one_group_is_said_once_and_by_one_rank_and_several_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        told = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_sdiloco")]
        caplog.clear()
        return told

    engine = StreamingDiLoCo(mlp(), sync_every=2, overlap_steps=0, worker_groups=1)
    for _ in range(6):
        engine.step()
    engine.finish()
    (told,) = (text for text in said() if "one worker group" in text)
    assert_says(told, "plain training with an outer step")

    def fit(rank: int, world_size: int) -> tuple[int, int]:
        module = Module(mlp())
        make_trainer(StreamingDiLoCoStrategy(sync_every=1, overlap_steps=0), devices=1).fit(module)
        return module.steps, sum("one worker group" in text for text in said())

    def engines(rank: int, world_size: int) -> list[int]:
        StreamingDiLoCo(mlp(), worker_groups=1)
        of_one = sum("one worker group" in text for text in said())
        StreamingDiLoCo(mlp(), worker_groups=2)
        return [of_one, len(said())]

    assert run_processes(fit, 1) == [(2, 1)]
    assert run_ranks(engines, 2) == [[1, 0], [0, 0]]


# Ranks that differ


Build = Callable[[int], tuple[nn.Module, dict[str, Any]]]


def assert_engines_refuse(builds: Sequence[tuple[Build, tuple[str, ...]]], world_size: int = 2) -> None:
    """Whatever each rank builds in turn, all are told the same."""

    def function(rank: int, world_size: int) -> list[str]:
        made = (build(rank) for build, _ in builds)
        return [refusal(StreamingDiLoCo, model=model, **choices) for model, choices in made]

    for messages in run_ranks(function, world_size):
        for message, (_, parts) in zip(messages, builds, strict=True):
            assert_says(message, *parts)


def assert_fits_refuse(builds: Sequence[tuple[Build, tuple[str, ...]]]) -> None:
    """Fits on two ranks, before their first step."""

    def function(rank: int, world_size: int) -> list[str]:
        messages = []
        for build, _ in builds:
            net, choices = build(rank)
            module = Module(net)
            trainer = make_trainer(StreamingDiLoCoStrategy(**choices), devices=world_size)
            messages.append(refusal(trainer.fit, model=module))
            assert module.steps == 0
        return messages

    for messages in run_processes(function, 2):
        for message, (_, parts) in zip(messages, builds, strict=True):
            assert_says(message, *parts)


def named(rank: int) -> nn.Module:
    return nn.ModuleDict({f"layer{rank}": nn.Linear(5, 3)})


def shaped(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3 + rank))


def typed(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3, dtype=torch.float64 if rank else torch.float32))


def deeper(rank: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(1 + rank)))


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


MODELS: list[tuple[Callable[[int], nn.Module], tuple[str, ...]]] = [
    (
        named,
        ("layer0.weight is (3, 5) torch.float32 on rank 0, missing on rank 1", "layer1.weight is missing on rank 0"),
    ),
    (shaped, ("0.weight is (3, 5) torch.float32 on rank 0, (4, 5) torch.float32 on rank 1",)),
    (typed, ("0.weight is (3, 5) torch.float32 on rank 0, (3, 5) torch.float64 on rank 1",)),
    (deeper, ("1.weight is missing on rank 0, (5, 5) torch.float32 on rank 1",)),
    (partly_frozen, ("0.weight is (5, 5) torch.float32 on rank 0, (5, 5) torch.float32 (frozen) on rank 1",)),
    (buffered, ("statistics is (1,) torch.float32", "on rank 0, (2,) torch.float32")),
    (in_another_order, ("a.weight",)),
]
MODEL_ADVICE = ("The model differs between ranks: ", "same names, shapes and dtypes", "depend on the rank")


def of_model(make: Callable[[int], nn.Module], **choices: Any) -> Build:
    return lambda rank: (make(rank), choices)


def test_models_that_differ_between_ranks_are_refused() -> None:
    assert_engines_refuse([(of_model(make), (*MODEL_ADVICE, *parts)) for make, parts in MODELS])
    # With one group, both ranks belong to one DistributedDataParallel, whose own error must not come first.
    parts = (*MODEL_ADVICE, "weight is ", "on rank 0, ", "on rank 1")
    assert_fits_refuse(
        [(of_model(make, worker_groups=groups), parts) for make in (named, shaped, typed) for groups in (1, 2)]
    )


def test_differences_of_three_ranks_are_told_by_the_ranks_that_agree_and_cut_short() -> None:
    odd = "0.weight is (3, 5) torch.float32 on ranks 0, 2, (4, 5) torch.float32 on rank 1"
    split = ("worker_groups=2 cannot split 3 processes", "[1, 3]", "Change worker_groups")
    many = (*(f"{i}.weight is " for i in range(2)), "; and 15 more")
    assert_engines_refuse(
        [
            (lambda rank: (shaped(int(rank == 1)), {}), (odd,)),
            (lambda rank: (nn.Sequential(*(nn.Linear(5 + rank, 5 + rank) for _ in range(10))), {}), many),
            (lambda rank: (mlp(), {"worker_groups": 2}), split),
        ],
        world_size=3,
    )


def outer_sgd(lr: float) -> Make:
    return partial(torch.optim.SGD, lr=lr)


DIFFERENT_SETTINGS: list[tuple[Callable[[int], dict[str, Any]], str]] = [
    (lambda rank: {"sync_every": 10 + rank}, "sync_every is 10 on rank 0, 11 on rank 1"),
    (
        lambda rank: {"sync_every": 10 + rank, "mixing": 0.5 * rank},
        "sync_every is 10 on rank 0, 11 on rank 1; mixing is 0.0 on rank 0, 0.5 on rank 1",
    ),
    (lambda rank: {"overlap_steps": rank}, "overlap_steps is 0 on rank 0, 1 on rank 1"),
    (lambda rank: {"mixing": 0.5 * rank}, "mixing is 0.0 on rank 0, 0.5 on rank 1"),
    (lambda rank: {"compression": ["fp4", "bf16"][rank]}, "compression is 'fp4' on rank 0, 'bf16' on rank 1"),
    (lambda rank: {"worker_groups": 1 + rank}, "worker_groups is 1 on rank 0, 2 on rank 1"),
    (lambda rank: {"fragments": ["strided", "balanced"][rank]}, "fragments is 'strided:3' on rank 0, 'balanced' on"),
    (lambda rank: {"fragments": f"strided:{1 + rank}"}, "fragments is 'strided:1' on rank 0, 'strided:2' on rank 1"),
    (lambda rank: {"outer_lr": 0.1 + rank}, "outer_lr is 0.1 on rank 0, 1.1 on rank 1"),
    (lambda rank: {"outer_momentum": 0.5 * rank}, "outer_momentum is 0.0 on rank 0, 0.5 on rank 1"),
    (
        lambda rank: {"outer_optimizer": OuterOptimizer(clip_norm=[None, 2.0][rank])},
        "outer_optimizer.clip_norm is None on rank 0, 2.0 on rank 1",
    ),
    (
        lambda rank: {"outer_optimizer": OuterOptimizer(outlier_guard=2.0 + rank)},
        "outer_optimizer.outlier_guard is 2.0 on rank 0, 3.0 on rank 1",
    ),
    (lambda rank: {"outer_optimizer": [None, outer_sgd(0.1)][rank]}, "outer_optimizer is None on rank 0"),
    (lambda rank: {"outer_optimizer": outer_sgd(0.1 + rank)}, "outer_optimizer is SGD"),
    (
        lambda rank: {"outer_optimizer": partial([torch.optim.SGD, torch.optim.AdamW][rank], lr=0.1)},
        "outer_optimizer is SGD",
    ),
]
SETTINGS_ADVICE = ("The settings of the strategy differ between ranks: ", "All ranks must use the same", "on rank 1")


def of_settings(choices: Callable[[int], dict[str, Any]]) -> Build:
    return lambda rank: (mlp(), choices(rank))


def test_settings_that_differ_between_ranks_are_refused() -> None:
    builds = [(of_settings(choices), (*SETTINGS_ADVICE, told)) for choices, told in DIFFERENT_SETTINGS]
    assert_engines_refuse(builds)
    assert_fits_refuse([builds[0], builds[4]])


class Halves(Compression):
    """A compression of a user, with no repr of its own."""

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        return values.half().view(torch.uint8)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(torch.float16))


def test_equal_objects_at_different_addresses_are_no_difference() -> None:
    instances = [Halves(), Halves()]

    def function(rank: int, world_size: int) -> list[str]:
        engine = StreamingDiLoCo(mlp(), compression=instances[rank], outer_optimizer=outer_sgd(0.1))
        return list(engine.outer_state_dict())

    assert len(set(map(tuple, run_ranks(function, 2)))) == 1

"""Kinds of training loops: every group trains as a plain Trainer would, and all groups agree."""

import importlib
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.utils import parametrizations
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint_sequential

from lightning_sdiloco.lightning import model_format
from tests import fits
from tests.bits import same
from tests.fits import LIGHTNING, Announced, batches, on, refusal
from tests.ranks import agreed, in_ranks
from tests.training import batch, mlp

pl = importlib.import_module(LIGHTNING)
BATCHES = 10
SHORT = {
    "sync_every": 3,
    "overlap_steps": 2,
    "fragments": [["*"]],
    "compression": "fp32",
}

Batch = tuple[Tensor, Tensor]
MakeModule = Callable[[], Any]
Trace = list[dict[str, Tensor]]


# Optimizers


adamw = partial(torch.optim.AdamW, lr=0.01)
sgd = partial(torch.optim.SGD, lr=0.05)


def scheduled(interval: str, parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


def sparse_adam(parameters: Any) -> Any:
    return torch.optim.SparseAdam(list(parameters), lr=0.01)


def zero_redundancy(parameters: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)


# Networks


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def tied_frozen_and_parametrized() -> nn.Module:
    first = parametrizations.weight_norm(nn.Linear(5, 6))
    last = parametrizations.spectral_norm(nn.Linear(6, 3))
    net = nn.Sequential(
        nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), first, last
    )
    net[2].weight = net[0].weight
    net[4].requires_grad_(False)
    return net


def lazy(has_seen_a_batch: bool = False) -> nn.Module:
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    if has_seen_a_batch:
        net(batch(0, 0)[0])
    return net


compiled = partial(torch.compile, backend="aot_eager")


def compiled_inside() -> nn.Module:
    return nn.Sequential(mlp(), compiled(nn.Linear(3, 3)))


# Ways to apply them to an input


def directly(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)


def with_checkpoints(net: nn.Module, x: Tensor) -> Tensor:
    return checkpoint_sequential(net, 7, x, use_reentrant=False)


def without_the_last_layer(net: Any, x: Tensor) -> Tensor:
    return net[:-1](x)[:, :3]


def to_indices(net: nn.Module, x: Tensor) -> Tensor:
    indices = x[:, 0].clamp(-3, 3).add(4).long()
    return net(indices)


# Modules


def module_with(
    net: Callable[[], nn.Module] = mlp,
    optimize: Callable[[Any], Any] = adamw,
    apply: Callable[[nn.Module, Tensor], Tensor] = directly,
    **members: Any,
) -> MakeModule:
    """A maker of modules with this network, optimizer and extra members."""

    def loss(self: Any, parts: Batch) -> Tensor:
        x, y = parts
        return nn.functional.mse_loss(apply(self.net, x.to(self.dtype)), y.to(self.dtype))

    def configure_optimizers(self: Any) -> Any:
        return optimize(self.parameters())

    members = {"loss": loss, "configure_optimizers": configure_optimizers, **members}
    return lambda: fits.module(net=net(), **members)


def manual(
    interval: Callable[[Any, int], int] = lambda module, index: 1,
    wrapped: bool = True,
    returned: Any = None,
) -> MakeModule:
    """Manual optimization with a step in intervals of batches, by Lightning's wrapper of the
    optimizer or not.
    """

    def training_step(self: Any, parts: Batch, index: int) -> Any:
        self.manual_backward(self.loss(parts))
        if (index + 1) % interval(self, index) == 0:
            optimizer = self.optimizers(use_pl_optimizer=wrapped)
            optimizer.step()
            optimizer.zero_grad()
        return returned

    return module_with(optimize=sgd, automatic_optimization=False, training_step=training_step)


def every_third(module: Any, index: int) -> int:
    return 3


def in_group_1_not_in_batch_5(module: Any, index: int) -> int:
    return 20 if index == 5 and module.global_rank == 1 else 1


def step_a_hidden_optimizer(self: Any, parts: Batch, index: int) -> None:
    """Manual optimization with an optimizer that `configure_optimizers` has not returned, next to
    the training of a model outside the module.
    """
    if index % 4 == 0:  # A new optimizer replaces the first in the middle of the epoch.
        self.__dict__["hidden_optimizer"] = sgd(self.parameters())
        self.__dict__["outside_model"] = nn.Linear(2, 2)
    outside_optimizer = sgd(self.outside_model.parameters())
    self.outside_model(torch.ones(2)).sum().backward()
    outside_optimizer.step()
    if index % 3 != 2:
        self.hidden_optimizer.zero_grad()
        self.manual_backward(self.loss(parts))
        self.hidden_optimizer.step()


hidden_optimizer = module_with(
    automatic_optimization=False,
    training_step=step_a_hidden_optimizer,
    configure_optimizers=lambda self: None,
)


def step_of_gan(self: Any, parts: Batch, index: int) -> None:
    """Two optimizers, each with its own part of the batch; the second skips every third batch."""
    generator, discriminator = self.net
    optimizers = self.optimizers()
    if index % 3 == 2:
        optimizers = optimizers[:1]
    for number, optimizer in enumerate(optimizers):
        self.toggle_optimizer(optimizer)
        loss = discriminator(generator(parts[0])).mean()
        if number == 1:
            loss = discriminator(parts[1]).mean() - loss
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


def optimizers_of_gan(self: Any) -> list[Any]:
    generator, discriminator = self.net
    return [sgd(generator.parameters()), torch.optim.Adam(discriminator.parameters())]


gan = module_with(
    lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)),
    automatic_optimization=False,
    training_step=step_of_gan,
    configure_optimizers=optimizers_of_gan,
)


def make_net_late(self: Any) -> None:
    if isinstance(self.net, nn.Identity):
        self.net = mlp()


def clamp(self: Any, optimizer: Any) -> None:
    with torch.no_grad():
        self.net[0].weight.clamp_(-0.4, 0.4)


def step_with_closure(
    self: Any, epoch: int, index: int, optimizer: Any, closure: Any = None
) -> None:
    optimizer.step(closure=closure)


def step_in_every_second(
    self: Any, epoch: int, index: int, optimizer: Any, closure: Any = None
) -> None:
    if index % 2:
        optimizer.step(closure=closure)
    else:
        closure()


def zero_in_place(self: Any, epoch: int, index: int, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def clip_by_norm(self: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    self.clip_gradients(optimizer, 0.5, "norm")


HOOKS = {
    "optimizer_step": step_with_closure,
    "optimizer_zero_grad": zero_in_place,
    "on_before_zero_grad": clamp,
    "configure_gradient_clipping": clip_by_norm,
}


def overflow(self: Any, parts: Batch, index: int) -> Tensor:
    """Has gradients that are not finite in two batches of the second group."""
    overflows = any(torch.equal(parts[0], batch(1, step)[0]) for step in (5, 6))
    scale = float("inf") if overflows else 1
    return self.loss(parts) * scale


scaling = pl.plugins.MixedPrecision(
    "16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8)
)


# Loops


class Loop(NamedTuple):
    make: MakeModule  # The LightningModule, the same on every rank
    trainer: dict[str, Any] = {}
    inner_steps: int = BATCHES  # The number of batches that are inner steps
    ddp_kwargs: dict[str, Any] = {}
    callbacks: Callable[[], list[Any]] = list


def accumulation_scheduler() -> list[Any]:
    return [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]


EPOCHS = {"max_epochs": 3, "limit_train_batches": 4}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
UNUSED = {"find_unused_parameters": True}
automatic = module_with()
LOOPS = {
    "automatic": Loop(automatic),
    "manual": Loop(manual()),
    "manual, not in every batch": Loop(manual(every_third), inner_steps=BATCHES // 3),
    "manual without a loss returned": Loop(manual(returned={"index": 0})),
    "manual, unwrapped": Loop(manual(wrapped=False)),
    "manual, with an optimizer made late": Loop(
        hidden_optimizer, inner_steps=BATCHES - BATCHES // 3
    ),
    "gan": Loop(gan, ddp_kwargs=UNUSED),
    "accumulation": Loop(automatic, {"accumulate_grad_batches": 3}, inner_steps=4),
    "accumulation by scheduler": Loop(
        automatic, EPOCHS, 4 + 2 + 2, callbacks=accumulation_scheduler
    ),
    "clipping by norm": Loop(automatic, {"gradient_clip_val": 0.1}),
    "clipping by value": Loop(automatic, BY_VALUE),
    "16-mixed": Loop(module_with(training_step=overflow), {"plugins": [scaling]}),
    "bf16-mixed": Loop(automatic, {"precision": "bf16-mixed"}),
    "bf16-true": Loop(automatic, {"precision": "bf16-true"}),
    "16-true": Loop(module_with(optimize=sgd), {"precision": "16-true"}),
    "64-true": Loop(automatic, {"precision": "64-true"}),
    "configure_model": Loop(module_with(nn.Identity, configure_model=make_net_late)),
    "batch norm": Loop(module_with(normalised)),
    "tied, frozen, parametrized": Loop(module_with(tied_frozen_and_parametrized)),
    "gradient checkpointing": Loop(module_with(apply=with_checkpoints)),
    "hooks overridden": Loop(module_with(**HOOKS)),
    "hooks overridden, not in every batch": Loop(
        module_with(optimizer_step=step_in_every_second), inner_steps=BATCHES // 2
    ),
    "scheduler per step": Loop(module_with(optimize=partial(scheduled, "step")), EPOCHS, 12),
    "scheduler per epoch": Loop(module_with(optimize=partial(scheduled, "epoch")), EPOCHS, 12),
    "fused": Loop(module_with(optimize=partial(adamw, fused=True))),
    "foreach": Loop(module_with(optimize=partial(adamw, foreach=True))),
    "lbfgs": Loop(module_with(optimize=partial(torch.optim.LBFGS, lr=0.1, max_iter=3))),
    "sparse gradients": Loop(
        module_with(lambda: nn.Embedding(8, 3, sparse=True), sparse_adam, to_indices)
    ),
    "find_unused_parameters": Loop(module_with(apply=without_the_last_layer), ddp_kwargs=UNUSED),
    "static_graph": Loop(automatic, ddp_kwargs={"static_graph": True}),
    "compiled inside": Loop(module_with(compiled_inside)),
    "lazy and has seen a batch": Loop(module_with(partial(lazy, has_seen_a_batch=True))),
    "compiled": Loop(lambda: compiled(automatic())),
}


@pytest.fixture(autouse=True, scope="module")
def compilers() -> None:
    """Starts the compiler before ranks fork."""
    compiled(torch.sin)(torch.zeros(1, requires_grad=True))


class Run(NamedTuple):
    """A fit of this rank."""

    trainer: Any
    module: Any
    trace: Trace

    @property
    def inner_steps(self) -> int:
        return int(self.trainer.strategy.report()["inner_steps"])


def tracer(trace: Trace) -> Any:
    """A callback that appends the state and the learning rates after every batch."""

    def note(trainer: Any, module: Any, *args: Any) -> None:
        rates = []
        for optimizer in trainer.optimizers:
            rates += [group["lr"] for group in optimizer.param_groups]
        state = {name: values.detach().clone() for name, values in module.state_dict().items()}
        trace.append({**state, "rates": torch.tensor(rates)})

    return on(on_train_batch_end=note)


def run_loop(
    loop: Loop,
    strategy: Any,
    devices: int,
    loader: Any,
    callbacks: Any = (),
    resume: Any = None,
    **choices: Any,
) -> Run:
    torch.manual_seed(0)
    module = loop.make()
    trace: Trace = []
    length = {"max_epochs": 1, "limit_train_batches": BATCHES}
    if "max_epochs" in loop.trainer:
        length = {}
    watching = [*loop.callbacks(), tracer(trace), *callbacks]
    arguments = {"strategy": strategy, "devices": devices, "num_sanity_val_steps": 0}
    arguments |= {"callbacks": watching, **length, **loop.trainer, **choices}
    trainer = fits.trainer(**arguments)
    trainer.fit(module, loader, ckpt_path=resume)
    return Run(trainer, module, trace)


def streaming(loop: Loop, **choices: Any) -> Any:
    return fits.strategy(**{**SHORT, **choices, "ddp_kwargs": loop.ddp_kwargs})


def ddp(loop: Loop) -> Any:
    return pl.strategies.DDPStrategy(**loop.ddp_kwargs)


def differing(trace: Trace, expected: Trace) -> list[int]:
    """The batches after which two traces differ, but for the last, which ends with the final
    sync.
    """
    differences = []
    for index, (state, expected_state) in enumerate(zip(trace, expected, strict=True), start=1):
        if index < len(trace) and not same(state, expected_state):
            differences.append(index)
    return differences


def assert_trains_as_plain(rank: int, name: str, loop: Loop) -> None:
    plain = run_loop(loop, "auto", 1, batches(rank))
    run = run_loop(loop, streaming(loop, mixing=1.0), 2, batches(rank))
    trace = run.trace
    assert differing(trace, plain.trace) == [], name
    assert run.inner_steps == loop.inner_steps, name
    assert run.trainer.strategy.report()["launches"] == loop.inner_steps // 3, name
    if name == "16-mixed":
        # The scaler skips steps of the second group.
        skipped = [n for n in range(1, BATCHES - 1) if same(trace[n], trace[n - 1])]
        assert skipped == [4, 5] * rank


def assert_groups_agree(rank: int, name: str, loop: Loop) -> None:
    run = run_loop(loop, streaming(loop), 2, batches(rank))
    outer = run.trainer.strategy.outer_state_dict()
    trained = {}
    for parameter_name, parameter in run.module.named_parameters():
        if parameter.requires_grad:
            trained[parameter_name.replace("_orig_mod.", "")] = parameter
    assert trained.keys() == outer.keys(), name
    for parameter_name, parameter in trained.items():
        assert torch.equal(parameter, outer[parameter_name].to(parameter.dtype)), name
    assert {values.dtype for values in outer.values()} == {torch.float32}, name
    assert run.inner_steps == loop.inner_steps, name
    assert agreed(outer), name
    assert not agreed(run.trace[-2]), "before the end each group has local parameters"


@in_ranks(2, timeout=300.0)
def test_all_groups_agree(rank: int) -> None:
    """With `mixing=1` landings change nothing, and each group is bit-identical to a plain
    Trainer.
    """
    for name, loop in LOOPS.items():
        torch.compiler.reset()
        assert_trains_as_plain(rank, name, loop)
        assert_groups_agree(rank, name, loop)


# DistributedDataParallel does nothing special for these, and nothing happens between two steps.
ALIKE_IN_DDP = (
    "accumulation by scheduler",
    "automatic",
    "bf16-mixed",
    "16-true",
    "clipping by value",
    "compiled",
    "compiled inside",
    "configure_model",
    "foreach",
    "fused",
    "gradient checkpointing",
    "manual",
    "lazy and has seen a batch",
    "manual without a loss returned",
    "scheduler per epoch",
    "scheduler per step",
)


@in_ranks(2, timeout=300.0)
def test_a_group_of_two_ranks_trains_as_ddp_does(rank: int) -> None:
    for name, loop in LOOPS.items():
        if name in ALIKE_IN_DDP:
            continue
        torch.compiler.reset()
        expected = run_loop(loop, ddp(loop), 2, batches(rank))
        one_group = streaming(loop, mixing=1.0, worker_groups=1)
        run = run_loop(loop, one_group, 2, batches(rank))
        assert differing(run.trace, expected.trace) == [], name


@in_ranks(3)
def test_a_single_group_of_three_ranks_trains_as_ddp_does(rank: int) -> None:
    """Three ranks add gradients in the order of DDP's buckets, whose layout is fixed before the
    first step.
    """
    names = (
        "automatic",
        "gan",
        "accumulation",
        "bf16-true",
        "find_unused_parameters",
        "sparse gradients",
        "static_graph",
        "tied, frozen, parametrized",
    )
    loops = [Loop(module_with(normalised, sgd)), *(LOOPS[name] for name in names)]
    for loop in loops:
        one_group = streaming(loop, mixing=1.0, worker_groups=1)
        expected = run_loop(loop, ddp(loop), 3, batches(0, rank, 3)).trace
        trace = run_loop(loop, one_group, 3, batches(0, rank, 3)).trace
        tolerances = {"rtol": 1e-3, "atol": 1e-3}
        if loop is LOOPS["bf16-true"]:
            tolerances = {"rtol": 0.1, "atol": 0.05}
        torch.testing.assert_close(expected[:-1], trace[:-1], **tolerances)


# These keep something between two steps.
STATEFUL = (
    "accumulation",
    "batch norm",
    "compiled",
    "gan",
    "lbfgs",
    "manual, not in every batch",
    "16-true",
    "16-mixed",
    "configure_model",
    "tied, frozen, parametrized",
    "scheduler per step",
    "scheduler per epoch",
    "sparse gradients",
)


def trace_of_two_epochs(rank: int, loop: Loop, **choices: Any) -> Trace:
    length = {"max_epochs": 2, "limit_train_batches": 1.0}
    loader = Announced((rank, 0, 1), 5)
    return run_loop(loop, streaming(loop), 2, loader, **length, **choices).trace


@in_ranks(2)
def test_a_loop_goes_on_with_the_same_bits(rank: int, tmp_path: Path) -> None:
    """A run that is resumed from within the first of two epochs."""
    path = str(tmp_path / "3.ckpt")

    def save(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if (trainer.current_epoch, index) == (0, 2):
            trainer.save_checkpoint(path)

    for name in STATEFUL:
        torch.compiler.reset()
        saving = on(on_train_batch_end=save)
        uninterrupted = trace_of_two_epochs(rank, LOOPS[name], callbacks=[saving])
        resumed = trace_of_two_epochs(rank, LOOPS[name], resume=path)
        assert all(map(same, uninterrupted[3:], resumed)), name
        assert len(uninterrupted[3:]) == len(resumed), name


@in_ranks(2)
def test_loops_that_cannot_train_end_all_groups_with_an_error_that_says_why(rank: int) -> None:
    def skip_batch_3(self: Any, parts: Batch, index: int) -> Any:
        return None if index == 3 else self.loss(parts)

    refusals = {
        "'net.0.weight' has no shape yet.*before trainer.fit": module_with(lazy),
        "ZeroRedundancyOptimizer divides its state among all processes": module_with(
            optimize=zero_redundancy
        ),
        "Skipping the `training_step` by returning None in distributed": module_with(
            training_step=skip_batch_3
        ),
        "inner step": manual(in_group_1_not_in_batch_5),
    }
    for words, make in refusals.items():
        loop = Loop(make)
        message = refusal(run_loop, loop, streaming(loop), 2, batches(rank), kind=Exception)
        assert re.search(words, message, re.DOTALL), message
    message = refusal(fits.strategy, ddp_kwargs={"model_averaging_period": 4})
    assert "ddp_kwargs contains 'model_averaging_period'" in message


# Steps that count as inner steps


def step_by_hand_in_odd_epochs(self: Any, parts: Batch, index: int) -> None:
    self.zero_grad()
    self.manual_backward(self.loss(parts))
    if self.current_epoch % 2:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)
    else:
        self.optimizers().step()


def manual_loop(training_step: Any, **trainer: Any) -> Loop:
    members = {"automatic_optimization": False, "training_step": training_step}
    return Loop(module_with(optimize=sgd, **members), trainer)


@in_ranks(2)
def test_every_epoch_without_an_inner_step_is_reported(rank: int) -> None:
    messages = fits.said_by("lightning_sdiloco")
    loop = manual_loop(step_by_hand_in_odd_epochs, max_epochs=4)
    run = run_loop(loop, streaming(loop), 2, batches(rank), limit_train_batches=2)
    warnings = [text.partition(".")[0] for text in messages if "without an inner step" in text]
    assert warnings == [f"Epoch {epoch} ended without an inner step" for epoch in (1, 3)]
    assert run.inner_steps == 4
    assert agreed(run.trainer.strategy.outer_state_dict()), "joined at the end all the same"


def step_at_once(parameter: Tensor) -> None:
    sgd([parameter]).step()
    parameter.grad = None


def step_in_backward(self: Any, parts: Batch, index: int) -> None:
    if index == 0:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(step_at_once)
    self.manual_backward(self.loss(parts))


def step_in_a_thread(self: Any, parts: Batch, index: int) -> None:
    worker = threading.Thread(target=sgd(self.parameters()).step)
    worker.start()
    worker.join()
    if index % 2:
        self.optimizers().step()


@in_ranks(2)
def test_only_optimizers_of_the_fit_in_its_thread_or_backward_count(rank: int) -> None:
    """A step in the backward pass counts, one in a thread of the user does not, and no hook is
    left behind.
    """
    assert not _global_optimizer_post_hooks
    for training_step, inner_steps in ((step_in_backward, 6), (step_in_a_thread, 3)):
        loop = manual_loop(training_step, limit_train_batches=6)
        run = run_loop(loop, streaming(loop), 2, batches(rank))
        assert run.inner_steps == inner_steps
        assert not _global_optimizer_post_hooks


def scale_by_world(self: Any, parts: Batch, index: int) -> Tensor:
    return self.loss(parts) * self.trainer.world_size


def scale_by_group(self: Any, parts: Batch, index: int) -> Tensor:
    return self.loss(parts) * self.trainer.strategy.topology.group_size


def keep_world_size(self: Any, stage: str) -> None:
    self.world_size = self.trainer.world_size


@in_ranks(4)
def test_a_loss_scaled_by_the_number_of_all_ranks_is_reported_once(rank: int) -> None:
    harmless = {
        "training_step": scale_by_group,
        "on_train_start": lambda self: self.trainer.world_size,
    }
    cases = [
        (2, {"training_step": scale_by_world}, "A training batch reads"),
        (2, {"setup": keep_world_size}, "The module stores"),
        (2, harmless, ""),
        (1, {"training_step": scale_by_world}, ""),
    ]
    for groups, members, beginning in cases:
        messages = fits.said_by("lightning_sdiloco")
        loop = Loop(module_with(optimize=sgd, **members), {"limit_train_batches": 3})
        # Lightning itself reads the number in every batch, and so do its callbacks.
        stopping = pl.callbacks.EarlyStopping(
            "loss", verbose=True, check_on_train_epoch_end=True, strict=False
        )
        strategy = streaming(loop, worker_groups=groups)
        run_loop(loop, strategy, 4, batches(rank // 2, rank % 2, 2), callbacks=[stopping])
        warnings = [text for text in messages if "gradients are averaged" in text]
        is_expected = bool(beginning) and rank == 0
        assert len(warnings) == int(is_expected), (groups, members)
        for text in warnings:
            assert text.startswith(beginning)
            assert "the gradients are 2 times too large" in text
        assert strategy.world_size == 4


@in_ranks(4)
def test_a_communication_hook_of_ddp_stays_in_the_group(rank: int) -> None:
    """Lightning registers hooks on CUDA only, so the test looks at the state that it would pass."""
    for state in (None, PowerSGDState(process_group=None)):
        loop = Loop(
            automatic, ddp_kwargs={"ddp_comm_hook": allreduce_hook, "ddp_comm_state": state}
        )
        strategy = streaming(loop, worker_groups=2)
        run_loop(loop, strategy, 4, batches(rank // 2, rank % 2, 2), limit_train_batches=1)
        passed = strategy._ddp_comm_state
        process_group = getattr(passed, "process_group", passed)
        assert process_group is strategy.topology.in_group.process_group


# Gradients of large models


def note_gradients(self: Any, parts: Any, index: int) -> Any:
    has_gradients = any(parameter.grad is not None for parameter in self.parameters())
    self.had_gradients.append(has_gradients)
    loss = self.loss(parts)
    if not self.automatic_optimization:
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
    return loss


def small_net() -> nn.Module:
    return nn.Linear(5, 3)


def net_of_67_mb() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 3))


class Zeroing(NamedTuple):
    """A fit of six batches, and in which of them `training_step` finds gradients of the last."""

    least_bytes: int
    had_gradients: list[bool]
    members: dict[str, Any] = {}
    trainer: dict[str, Any] = {}


SMALL_BYTES = 4 * (5 * 3 + 3)
LATE = [False] + [True] * 5  # as in Lightning
EARLY = [False] * 6
ACCUMULATE = {"accumulate_grad_batches": 2}
ZERO = {"optimizer_zero_grad": lambda self, *args: args[-1].zero_grad()}
STEP = {"optimizer_step": step_with_closure}
LARGE = {"net": net_of_67_mb, "optimize": partial(torch.optim.SGD, lr=1e-6)}
ZEROINGS = {
    "large enough": Zeroing(SMALL_BYTES, EARLY),
    "too small": Zeroing(SMALL_BYTES + 1, LATE),
    "accumulated": Zeroing(1, [False, True] * 3, trainer=ACCUMULATE),
    "zeroing": Zeroing(1, LATE, ZERO),
    "zeroing, accumulated": Zeroing(1, LATE, ZERO, ACCUMULATE),
    "stepping": Zeroing(1, LATE, STEP),
    "manual": Zeroing(1, LATE, {"automatic_optimization": False}),
    "looking": Zeroing(1, LATE, trainer={"callbacks": [on(on_before_zero_grad=lambda *_: None)]}),
    "67 MB": Zeroing(model_format._LEAST_BYTES, EARLY, LARGE),
}


@in_ranks(1)
def test_gradients_of_large_models_go_early_where_nobody_sees_it(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: dict[str, list[Tensor]] = {}
    for name, case in ZEROINGS.items():
        monkeypatch.setattr(model_format, "_LEAST_BYTES", case.least_bytes)
        torch.manual_seed(0)
        members = {"net": small_net, "training_step": note_gradients, **case.members}
        module = module_with(**members, had_gradients=[])()
        strategy = fits.strategy(worker_groups=1, **SHORT)
        trainer = fits.trainer(strategy=strategy, devices=1, max_epochs=1, **case.trainer)
        trainer.fit(module, fits.SomeBatches(0, 6))
        assert module.had_gradients == case.had_gradients, name
        trained[name] = list(module.parameters())
    # The time at which gradients go does not change the training.
    assert all(map(torch.equal, trained["large enough"], trained["zeroing"]))
    assert all(map(torch.equal, trained["accumulated"], trained["zeroing, accumulated"]))

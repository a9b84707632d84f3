"""Kinds of training loops: every group trains as a plain Trainer would, and all groups agree."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests import fits
from tests.fits import LIGHTNING
from tests.lightning.uneven_fits import Announced, same
from tests.ranks import run_processes
from tests.training import batch, mlp

pl = importlib.import_module(LIGHTNING)
BATCHES = 10
SHORT: dict[str, Any] = {"sync_every": 3, "overlap_steps": 2, "fragments": [["*"]], "compression": "fp32"}
# Every inner step is an outer step that takes the mean of what the groups hold.
LOCKSTEP: dict[str, Any] = {"sync_every": 1, "overlap_steps": 0, "mixing": 0.0, "outer_lr": 1.0, "outer_momentum": 0.0}

Make = Callable[[], Any]
Trace = list[dict[str, Tensor]]


def adamw(parameters: Any, **choices: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, **choices)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def made(
    net: Callable[[], nn.Module] = mlp,
    optimize: Callable[[Any], Any] = adamw,
    automatic: bool = True,
    apply: Callable[[nn.Module, Tensor], Tensor] = lambda net, x: net(x),
    **members: Any,
) -> Make:
    """A maker of modules with a network, an optimizer of its parameters, and methods of their own."""

    class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = net(), automatic

        def loss(self, parts: tuple[Tensor, Tensor]) -> Tensor:
            dtype = self.dtype if isinstance(self.dtype, torch.dtype) else torch.float32
            return nn.functional.mse_loss(apply(self.net, parts[0].to(dtype)), parts[1].to(dtype))

        def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
            return self.loss(parts)

        def configure_optimizers(self) -> Any:
            return optimize(self.parameters())

    return type("Own", (Net,), members)


def manual(
    every: Callable[[Any, int], int] = lambda module, index: 1, wrapped: bool = True, returned: Any = None
) -> Make:
    """Manual optimization that steps after every so many batches, perhaps not with Lightning's wrapper."""

    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        self.manual_backward(self.loss(parts))
        if (index + 1) % every(self, index) == 0:
            optimizer = self.optimizers(use_pl_optimizer=wrapped)
            optimizer.step()
            optimizer.zero_grad()
        return returned

    return made(optimize=sgd, automatic=False, training_step=training_step)


def of_gan(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
    """Two optimizers, each with its own part of the batch; the second rests in every third batch."""
    for number, optimizer in enumerate(self.optimizers()[: 1 if index % 3 == 2 else 2]):
        self.toggle_optimizer(optimizer)
        fake = self.net(parts[0]).mean()
        loss = fake if number == 0 else self.net[1](parts[1]).mean() - fake
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


gan = made(
    lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)),
    automatic=False,
    training_step=of_gan,
    configure_optimizers=lambda self: [sgd(self.net[0].parameters()), torch.optim.Adam(self.net[1].parameters())],
)


def made_late(self: Any) -> None:
    if isinstance(self.net, nn.Identity):
        self.net = mlp()


def recomputed(net: Any, x: Tensor) -> Tensor:
    for layer in net:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def clamp(self: Any, optimizer: Any) -> None:
    with torch.no_grad():
        self.net[0].weight.clamp_(-0.4, 0.4)


HOOKS: dict[str, Any] = {
    "optimizer_step": lambda self, epoch, index, optimizer, closure=None: optimizer.step(closure=closure),
    "optimizer_zero_grad": lambda self, epoch, index, optimizer: optimizer.zero_grad(set_to_none=False),
    "on_before_zero_grad": clamp,
    "configure_gradient_clipping": lambda self, optimizer, *_, **__: self.clip_gradients(optimizer, 0.5, "norm"),
}


def in_every_other(self: Any, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
    optimizer.step(closure=closure) if index % 2 else closure()


def overflowing(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
    """Gradients that are not finite in two batches of the second group."""
    return self.loss(parts) * (float("inf") if any(torch.equal(parts[0], batch(1, step)[0]) for step in (5, 6)) else 1)


def scheduled(interval: str) -> Callable[[Any], Any]:
    def configure(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    return configure


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    net[2].weight = net[0].weight
    return net


def frozen() -> nn.Module:
    net = mlp()
    net[0].requires_grad_(False)
    return net


def parametrized() -> nn.Module:
    first, last = nn.Linear(5, 6), parametrizations.spectral_norm(nn.Linear(6, 3))
    return nn.Sequential(parametrizations.weight_norm(first), nn.Tanh(), last)


def partly_unused() -> nn.Module:
    net = mlp()
    net.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return net


def compiled_inside() -> nn.Module:
    net = mlp()
    net[2] = torch.compile(net[2], backend="aot_eager")
    return net


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(3))


def by_scaler() -> Any:
    return pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8))


class Loop(NamedTuple):
    """A kind of training loop."""

    make: Make  # The LightningModule, the same on every rank
    trainer: dict[str, Any] = {}
    inner_steps: int = BATCHES  # How many of the batches are inner steps
    ddp_kwargs: dict[str, Any] = {}
    callbacks: Callable[[], list[Any]] = list


EPOCHS: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 4}
EVERY_THIRD = manual(every=lambda module, index: 3)
LOOPS = {
    "automatic": Loop(made()),
    "manual": Loop(manual()),
    "manual, not in every batch": Loop(EVERY_THIRD, inner_steps=BATCHES // 3),
    "manual, no loss returned": Loop(manual(returned={"index": 0})),
    "manual, unwrapped": Loop(manual(wrapped=False)),
    "gan": Loop(gan, ddp_kwargs={"find_unused_parameters": True}),
    "accumulation": Loop(made(), {"accumulate_grad_batches": 3}, inner_steps=4),
    "accumulation by scheduler": Loop(
        made(), EPOCHS, 4 + 2 + 2, callbacks=lambda: [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]
    ),
    "clipping by norm": Loop(made(), {"gradient_clip_val": 0.1}),
    "clipping by value": Loop(made(), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "16-mixed": Loop(made(training_step=overflowing), {"plugins": [by_scaler()]}),
    "bf16-mixed": Loop(made(), {"precision": "bf16-mixed"}),
    "bf16-true": Loop(made(), {"precision": "bf16-true"}),
    "16-true": Loop(made(optimize=sgd), {"precision": "16-true"}),
    "64-true": Loop(made(), {"precision": "64-true"}),
    "configure_model": Loop(made(nn.Identity, configure_model=made_late)),
    "batch norm": Loop(made(normalised)),
    "tied": Loop(made(tied)),
    "frozen": Loop(made(frozen)),
    "parametrized": Loop(made(parametrized)),
    "gradient checkpointing": Loop(made(apply=recomputed)),
    "hooks overridden": Loop(made(**HOOKS)),
    "hooks overridden, not in every batch": Loop(made(optimizer_step=in_every_other), inner_steps=BATCHES // 2),
    "scheduler per step": Loop(made(optimize=scheduled("step")), EPOCHS, inner_steps=12),
    "scheduler per epoch": Loop(made(optimize=scheduled("epoch")), EPOCHS, inner_steps=12),
    "fused": Loop(made(optimize=lambda p: adamw(p, fused=True))),
    "foreach": Loop(made(optimize=lambda p: adamw(p, foreach=True))),
    "lbfgs": Loop(made(optimize=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))),
    "sparse gradients": Loop(
        made(
            lambda: nn.Embedding(8, 3, sparse=True),
            lambda p: torch.optim.SparseAdam(list(p), lr=0.01),
            apply=lambda net, x: net(x[:, 0].clamp(-3, 3).add(4).long()),
        )
    ),
    "find_unused_parameters": Loop(made(partly_unused), ddp_kwargs={"find_unused_parameters": True}),
    "static_graph": Loop(made(), ddp_kwargs={"static_graph": True}),
    "compiled inside": Loop(made(compiled_inside)),
    "compiled": Loop(lambda: torch.compile(made()(), backend="aot_eager")),
}


@pytest.fixture(autouse=True, scope="module")
def compilers() -> None:
    """Loads what compiling needs, once and not in every rank."""
    torch.compile(torch.sin, backend="aot_eager")(torch.zeros(1, requires_grad=True))


def run_loop(loop: Loop, strategy: Any, devices: int, loader: Any, **choices: Any) -> tuple[Any, Any, Trace]:
    """Fits in this rank. Returns the trainer, the module, and what it held after every batch, with learning rates."""
    torch.manual_seed(0)
    model, trace = loop.make(), []

    class Keep(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
            held = {name: values.detach().clone() for name, values in module.state_dict().items()}
            trace.append({**held, "rates": torch.tensor(rates)})

    length = {} if "max_epochs" in loop.trainer else {"max_epochs": 1, "limit_train_batches": BATCHES}
    resume, callbacks = choices.pop("resume", None), [*loop.callbacks(), Keep(), *choices.pop("callbacks", [])]
    chosen = {"strategy": strategy, "devices": devices, "num_sanity_val_steps": 0, "callbacks": callbacks}
    trainer = fits.trainer(**{**chosen, **length, **loop.trainer, **choices})
    trainer.fit(model, loader, ckpt_path=resume)
    return trainer, model, trace


def batches(group: int, shard: int = 0, shards: int = 1) -> Any:
    return DataLoader(fits.Batches(group, shard, shards), batch_size=None)


def of_ours(loop: Loop, **choices: Any) -> Any:
    return fits.strategy(**{**SHORT, **choices, "ddp_kwargs": loop.ddp_kwargs})


def of_ddp(loop: Loop) -> Any:
    return pl.strategies.DDPStrategy(**loop.ddp_kwargs)


def differing(trace: Trace, other: Trace) -> list[int]:
    """The batches after which they differ; the last ends with the final sync."""
    pairs = list(zip(trace, other, strict=True))
    return [index for index, (one, two) in enumerate(pairs[:-1], start=1) if not same(one, two)]


def wrong_in(play: Callable[[int, int, Loop], Any], loops: dict[str, Loop], world_size: int = 2) -> dict[str, Any]:
    """What is wrong with each loop, of which the ranks of one world play one after the other."""

    def run(rank: int, world_size: int) -> dict[str, Any]:
        wrong = {}
        for name, loop in loops.items():
            torch.compiler.reset()
            wrong[name] = play(rank, world_size, loop)
        return wrong

    ranks = run_processes(run, world_size, timeout=300.0)
    return {name: [wrong[name] for wrong in ranks] for name in loops if any(wrong[name] for wrong in ranks)}


def test_all_groups_agree() -> None:
    """And with mixing=1, where landings change nothing, each group has the bits of a plain Trainer of its own."""

    def play(rank: int, world_size: int, loop: Loop) -> Any:
        plain = run_loop(loop, "auto", 1, batches(rank))[2]
        trainer, _, trace = run_loop(loop, of_ours(loop, mixing=1.0), world_size, batches(rank))
        report = trainer.strategy.report()
        unlike = differing(trace, plain)
        counted = [report["inner_steps"], report["launches"]]

        trainer, model, trace = run_loop(loop, of_ours(loop), world_size, batches(rank))
        outer = trainer.strategy.outer_state_dict()
        held = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters() if p.requires_grad}
        is_outer = held.keys() == outer.keys() and all(torch.equal(p, outer[n].to(p.dtype)) for n, p in held.items())
        groups: list[Any] = [None, None]
        torch.distributed.all_gather_object(groups, (outer, trainer.strategy.report()["inner_steps"], trace[-2]))
        (one, steps, local), (other, other_steps, other_local) = groups
        agree = same(one, other) and steps == other_steps == loop.inner_steps
        is_float32 = {values.dtype for values in outer.values()} == {torch.float32}
        right = [counted == [loop.inner_steps, loop.inner_steps // 3], is_outer, agree, is_float32]
        right.append(not same(local, other_local))
        return None if all(right) and not unlike else (unlike, counted, right)

    assert wrong_in(play, LOOPS) == {}


def test_a_group_of_two_ranks_and_groups_in_a_warmup_train_as_ddp_does() -> None:
    def play(rank: int, world_size: int, loop: Loop) -> Any:
        expected = run_loop(loop, of_ddp(loop), world_size, batches(rank))[2]
        wrong = {}
        for choices in ({"mixing": 1.0, "worker_groups": 1}, {"warmup_steps": 1000}):
            # Gradients travel in float32, and buffers do not: DDP sends those of rank 0 before each forward pass.
            if "warmup_steps" not in choices or loop not in (LOOPS["64-true"], LOOPS["batch norm"]):
                ours = run_loop(loop, of_ours(loop, **choices), world_size, batches(rank))[2]
                wrong[str(choices)] = differing(ours, expected)
        return {choices: found for choices, found in wrong.items() if found}

    # Those in which DistributedDataParallel has no part of its own, and nothing happens between two steps.
    alike = {"clipping by value", "foreach", "fused", "manual", "manual, no loss returned", "scheduler per epoch"}
    alike |= {"scheduler per step", "bf16-mixed", "16-true", "configure_model", "compiled inside", "parametrized"}
    alike |= {"accumulation by scheduler", "automatic", "compiled", "gradient checkpointing"}
    assert wrong_in(play, {name: loop for name, loop in LOOPS.items() if name not in alike}) == {}


def test_a_single_group_of_three_ranks_trains_as_ddp_does() -> None:
    """Three ranks add gradients in the order of DDP's buckets, whose layout is fixed before the first step."""

    def play(rank: int, world_size: int, loop: Loop) -> Any:
        loader = batches(0, rank, world_size)
        expected = run_loop(loop, of_ddp(loop), world_size, loader)[2]
        ours = run_loop(loop, of_ours(loop, mixing=1.0, worker_groups=1), world_size, loader)[2]
        for one, other in zip(expected, ours, strict=True):
            for key, values in one.items():
                loose = {"rtol": 0.1, "atol": 0.05} if values.dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
                torch.testing.assert_close(other[key], values, **loose)

    names = ("automatic", "gan", "accumulation", "bf16-true", "find_unused_parameters", "sparse gradients")
    names += ("static_graph", "tied")
    assert wrong_in(play, {name: LOOPS[name] for name in names}, world_size=3) == {}


def test_averaging_after_every_inner_step_is_ddp_and_statistics_of_batch_norm_become_the_mean() -> None:
    """Where all is linear in the gradient, a mean of parameters is a mean of gradients."""
    linear = {
        "manual, not in every batch": Loop(EVERY_THIRD),
        "accumulation": Loop(fits.module, {"accumulate_grad_batches": 3}),
        "tied": Loop(made(tied, sgd)),
        "64-true": Loop(made(optimize=sgd), {"precision": "64-true"}),
    }
    # Without learning the statistics are a linear function of the batches.
    still = Loop(made(normalised, lambda p: torch.optim.SGD(p, lr=0.0)))

    def play(rank: int, world_size: int, loop: Loop) -> None:
        ours = run_loop(loop, of_ours(loop, **LOCKSTEP), world_size, batches(rank))[2]
        if loop is still:
            plain = [run_loop(loop, "auto", 1, batches(group))[2] for group in range(2)]
            mean = [{name: (one[name] + two[name]) / 2 for name in one} for one, two in zip(*plain, strict=True)]
            counter = "net.1.num_batches_tracked"
            assert [values.pop(counter) for values in ours] == [values.pop(counter) for values in mean]
        else:
            mean = run_loop(loop, "ddp", world_size, batches(rank))[2]
        for expected, actual in zip(mean, ours, strict=True):
            # Twice rounded where DDP rounds once.
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    assert wrong_in(play, {**linear, "batch norm": still}) == {}


def test_a_loop_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Those that keep something between two steps, from within the first of two epochs."""

    class Saving(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if (trainer.current_epoch, index) == (0, 2):
                trainer.save_checkpoint(tmp_path / "3.ckpt")

    def play(rank: int, world_size: int, loop: Loop) -> Any:
        def trace(**choices: Any) -> Trace:
            length = {"max_epochs": 2, "limit_train_batches": 1.0}
            return run_loop(loop, of_ours(loop), 2, Announced((rank, 0, 1), 5), **length, **choices)[2]

        whole, resumed = trace(callbacks=[Saving()]), trace(resume=str(tmp_path / "3.ckpt"))
        return [index for index, pair in enumerate(zip(whole[3:], resumed, strict=True), start=4) if not same(*pair)]

    names = ("accumulation", "batch norm", "compiled", "gan", "lbfgs", "manual, not in every batch", "16-true")
    names += ("16-mixed", "configure_model", "parametrized", "scheduler per step", "scheduler per epoch")
    assert wrong_in(play, {name: LOOPS[name] for name in (*names, "sparse gradients")}) == {}


def test_a_step_that_a_scaler_skips_in_one_group_keeps_the_groups_together() -> None:
    """That they agree all loops are tested for; here, that it is skipped."""

    def run(rank: int, world_size: int) -> list[int]:
        loop = LOOPS["16-mixed"]
        trace = run_loop(loop, of_ours(loop, mixing=1.0), world_size, batches(rank))[2]
        return [index for index in range(1, BATCHES - 1) if same(trace[index], trace[index - 1])]

    assert run_processes(run, 2) == [[], [4, 5]]


class Numbers(pl.LightningDataModule):  # type: ignore[misc, name-defined]
    """Batches from a LightningDataModule, which knows its trainer."""

    def setup(self, stage: str) -> None:
        self.group = self.trainer.strategy.topology.group_index

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(self.group)  # type: ignore[no-any-return]


def test_a_data_module_gives_the_batches_and_lazy_modules_train_once_they_have_seen_one() -> None:
    def run(rank: int, world_size: int) -> Any:
        loop = LOOPS["automatic"]
        outer = [
            run_loop(loop, of_ours(loop), 2, loader)[0].strategy.outer_state_dict()
            for loader in (batches(rank), Numbers())
        ]
        seen = made(lazy)()
        seen.net(batch(0, 0)[0])
        return same(*outer), len(run_loop(Loop(lambda: seen), of_ours(loop), world_size, batches(rank))[2])

    assert run_processes(run, 2) == [(True, BATCHES)] * 2


def of_zero(parameters: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)


def test_what_cannot_train_ends_all_groups_with_an_error_that_says_why() -> None:
    def skipping(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        return None if index == 3 else self.loss(parts)

    refused = [
        (made(lazy), "ValueError: 'net.0.weight' has no shape yet.*before trainer.fit"),
        (made(optimize=of_zero), "ValueError: ZeroRedundancyOptimizer divides its state over all processes"),
        (made(training_step=skipping), "Skipping the `training_step` by returning None in distributed"),
        # One group does not step in one batch.
        (manual(every=lambda module, index: 20 if index == 5 and module.global_rank == 1 else 1), "Agree.*inner step"),
    ]

    def run(rank: int, world_size: int) -> list[str]:
        told = []
        for make, _ in refused:
            loop = Loop(make)
            with pytest.raises(Exception) as error:  # noqa: PT011  the words are looked at below
                run_loop(loop, of_ours(loop), world_size, batches(rank))
            told.append(f"{type(error.value).__name__}: {error.value}")
        return told

    for (_, words), *told in zip(refused, *run_processes(run, 2), strict=True):
        assert [text for text in told if not re.search(words, text, re.DOTALL)] == []
    with pytest.raises(ValueError, match="ddp_kwargs contains 'model_averaging_period'"):
        fits.strategy(ddp_kwargs={"model_averaging_period": 4})


def test_training_without_an_optimizer_that_lightning_knows_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def configure(self: Any) -> None:
        self.private = sgd(self.parameters())

    def step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.private.zero_grad()
        self.manual_backward(self.loss(parts))
        self.private.step()

    loop = Loop(made(automatic=False, configure_optimizers=configure, training_step=step))

    def run(rank: int, world_size: int) -> Any:
        caplog.clear()
        trainer = run_loop(loop, of_ours(loop), world_size, batches(rank))[0]
        said = [record.getMessage() for record in caplog.records if "without an inner step" in record.getMessage()]
        return len(said), trainer.strategy.outer_state_dict()

    (one, outer), (two, other) = run_processes(run, 2)
    assert one == two == 1
    assert same(outer, other), "joined at the end all the same"


def test_a_communication_hook_of_ddp_stays_in_the_group() -> None:
    """Lightning registers hooks on CUDA only; here, what it would register them with."""

    def run(rank: int, world_size: int) -> list[bool]:
        stays = []
        for state in (None, PowerSGDState(process_group=None)):
            loop = Loop(made(), ddp_kwargs={"ddp_comm_hook": allreduce_hook, "ddp_comm_state": state})
            strategy = of_ours(loop, worker_groups=2)
            run_loop(loop, strategy, world_size, batches(rank // 2, rank % 2, 2), limit_train_batches=1)
            given = strategy._ddp_comm_state
            stays.append(getattr(given, "process_group", given) is strategy.topology.in_group.process_group)
        return stays

    assert run_processes(run, 4) == [[True, True]] * 4

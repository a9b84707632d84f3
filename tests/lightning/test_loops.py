"""Kinds of training loops: every group trains as a plain Trainer would, and all groups agree."""

import importlib
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
from tests.lightning.test_checkpoint import StatefulBatches
from tests.ranks import run_processes
from tests.training import batch, mlp

BATCHES = 13
SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": [["*"]], "compression": "fp32"}
# Every inner step is an outer step that takes the mean of what the groups hold.
LOCKSTEP: dict[str, Any] = {
    "sync_every": 1,
    "overlap_steps": 0,
    "mixing": 0.0,
    "fragments": [["*"]],
    "compression": "fp32",
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
}

pl = importlib.import_module(LIGHTNING)
Make = Callable[[], Any]


class Loop(NamedTuple):
    """A kind of training loop.

    Attributes:
        make: The LightningModule, the same on every rank.
        trainer: Arguments of the Trainer.
        inner_steps: How many of the batches are inner steps.
        ddp_kwargs: What DistributedDataParallel needs to know.
        callbacks: Makes callbacks.
    """

    make: Make
    trainer: dict[str, Any] = {}
    inner_steps: int = BATCHES
    ddp_kwargs: dict[str, Any] = {}
    callbacks: Callable[[], list[Any]] = list


class Trace(pl.Callback):  # type: ignore[misc, name-defined]
    """Keeps the local parameters and buffers after every batch."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.batches.append({name: values.detach().clone() for name, values in module.state_dict().items()})


def run_loop(loop: Loop, strategy: Any, devices: int, group: int, shard: int = 0, shards: int = 1) -> Any:
    """Fits in this rank, on the batches of a group. Returns the trainer, the module and the trace."""
    torch.manual_seed(0)
    model, trace = loop.make(), Trace()
    length = {} if "max_epochs" in loop.trainer else {"max_epochs": 1, "limit_train_batches": BATCHES}
    chosen = {**length, **loop.trainer, "callbacks": [*loop.callbacks(), trace]}
    trainer = fits.trainer(strategy=strategy, devices=devices, num_sanity_val_steps=0, **chosen)
    trainer.fit(model, DataLoader(fits.Batches(group, shard, shards), batch_size=None))
    return trainer, model, trace.batches


class Manual(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Manual optimization that steps after every ``every`` batches."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.every = mlp(), every

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.manual_backward(nn.functional.mse_loss(self.net(parts[0]), parts[1]))
        if (index + 1) % self.every == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Unwrapped(Manual):
    """Steps the optimizer itself, and not Lightning's wrapper around it."""

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(parts[0]), parts[1]))
        optimizer.step()


class Gan(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Two optimizers, each with its own part of the batch; the second rests in every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(5, 3), nn.Linear(3, 1)

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            if number == 1 and index % 3 == 2:
                continue
            self.toggle_optimizer(optimizer)
            fake = self.critic(self.generator(parts[0])).mean()
            loss = fake if number == 0 else self.critic(parts[1]).mean() - fake
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.generator.parameters(), lr=0.05), torch.optim.Adam(self.critic.parameters())]


class Regression(pl.LightningModule):  # type: ignore[misc, name-defined]
    """What the modules below have in common."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = mlp() if net is None else net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        dtype = self.dtype if isinstance(self.dtype, torch.dtype) else torch.float32
        return nn.functional.mse_loss(self(parts[0].to(dtype)), parts[1].to(dtype))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class MadeLate(Regression):
    """Layers that do not exist before ``configure_model``."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = mlp()


class Recomputing(Regression):
    """Gradient checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Overriding(Regression):
    """Overrides the hooks around an optimizer step."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)

    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.4, 0.4)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


class Looking(Regression):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(8, 3, sparse=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x[:, 0].clamp(-3, 3).add(4).long())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.01)


class Sparing(Regression):
    """Overrides ``optimizer_step``, and steps in every other batch."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        if index % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class ResultWithoutLoss(Manual):
    """Manual optimization whose ``training_step`` returns a dictionary."""

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Any:
        super().training_step(parts, index)
        return {"index": index}


class Optimized(Regression):
    """Another inner optimizer, perhaps with a scheduler."""

    def __init__(self, configure: Callable[[Any], Any], net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self.parameters())


def scheduled(interval: str) -> Callable[[Any], Any]:
    def configure(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    return configure


def optimized(configure: Callable[[Any], Any]) -> Make:
    return lambda: Optimized(configure)


def with_net(make_net: Callable[[], nn.Module]) -> Make:
    return lambda: Regression(make_net())


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


def compiled_whole() -> Any:
    return torch.compile(Regression(), backend="aot_eager")


def accumulating() -> list[Any]:
    return [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]


def by_scaler() -> Any:
    return pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8))


EPOCHS: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 5}

LOOPS = {
    "automatic": Loop(Regression),
    "manual": Loop(Manual),
    "manual, not in every batch": Loop(lambda: Manual(every=3), inner_steps=BATCHES // 3),
    "manual, no loss returned": Loop(ResultWithoutLoss),
    "manual, unwrapped": Loop(Unwrapped),
    "gan": Loop(Gan, ddp_kwargs={"find_unused_parameters": True}),
    "accumulation": Loop(Regression, {"accumulate_grad_batches": 3}, inner_steps=5),
    "accumulation by scheduler": Loop(Regression, EPOCHS, inner_steps=5 + 2 + 3, callbacks=accumulating),
    "clipping by norm": Loop(Regression, {"gradient_clip_val": 0.1}),
    "clipping by value": Loop(Regression, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "16-mixed": Loop(Regression, {"plugins": [by_scaler()]}),
    "bf16-mixed": Loop(Regression, {"precision": "bf16-mixed"}),
    "bf16-true": Loop(Regression, {"precision": "bf16-true"}),
    "16-true": Loop(optimized(lambda p: torch.optim.SGD(p, lr=0.05)), {"precision": "16-true"}),
    "64-true": Loop(Regression, {"precision": "64-true"}),
    "configure_model": Loop(MadeLate),
    "batch norm": Loop(with_net(normalised)),
    "tied": Loop(with_net(tied)),
    "frozen": Loop(with_net(frozen)),
    "parametrized": Loop(with_net(parametrized)),
    "gradient checkpointing": Loop(Recomputing),
    "hooks overridden": Loop(Overriding),
    "hooks overridden, not in every batch": Loop(Sparing, inner_steps=BATCHES // 2),
    "scheduler per step": Loop(optimized(scheduled("step")), EPOCHS, inner_steps=15),
    "scheduler per epoch": Loop(optimized(scheduled("epoch")), EPOCHS, inner_steps=15),
    "fused": Loop(optimized(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))),
    "foreach": Loop(optimized(lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True))),
    "lbfgs": Loop(optimized(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))),
    "sparse gradients": Loop(Looking),
    "find_unused_parameters": Loop(with_net(partly_unused), ddp_kwargs={"find_unused_parameters": True}),
    "static_graph": Loop(Regression, ddp_kwargs={"static_graph": True}),
    "compiled inside": Loop(with_net(compiled_inside)),
    "compiled": Loop(compiled_whole),
}


@pytest.fixture(autouse=True, scope="module")
def compilers() -> None:
    """Loads what compiling needs, once and not in every rank."""
    torch.compile(torch.sin, backend="aot_eager")(torch.zeros(1, requires_grad=True))


def of_ours(loop: Loop, **choices: Any) -> Any:
    return fits.strategy(**{**SHORT, **choices, "ddp_kwargs": loop.ddp_kwargs})


def of_ddp(loop: Loop) -> Any:
    return pl.strategies.DDPStrategy(**loop.ddp_kwargs)


def differing(trace: list[dict[str, Tensor]], other: list[dict[str, Tensor]], but_last: bool = True) -> list[int]:
    """The batches after which they differ; the last ends with the final sync."""
    return [
        batch
        for batch, (one, two) in enumerate(zip(trace, other, strict=True), start=1)
        if one.keys() != two.keys() or not all(torch.equal(one[name], two[name]) for name in one)
        if batch < len(trace) or not but_last
    ]


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
        plain = run_loop(loop, "auto", 1, group=rank)[2]
        trainer, _, trace = run_loop(loop, of_ours(loop, mixing=1.0), world_size, group=rank)
        report = trainer.strategy.report()
        unlike = differing(trace, plain)
        counted = [report["inner_steps"], report["launches"]]

        trainer, model, trace = run_loop(loop, of_ours(loop), world_size, group=rank)
        outer = trainer.strategy.outer_state_dict()
        held = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters() if p.requires_grad}
        same = held.keys() == outer.keys() and all(torch.equal(p, outer[n].to(p.dtype)) for n, p in held.items())
        groups: list[Any] = [None, None]
        torch.distributed.all_gather_object(groups, (outer, trainer.strategy.report()["inner_steps"], trace[-2]))
        (one, steps, local), (other, other_steps, other_local) = groups
        agree = steps == other_steps == loop.inner_steps and all(
            values.dtype == torch.float32 and torch.equal(values, other[name]) for name, values in one.items()
        )
        own_data = any(not torch.equal(values, other_local[name]) for name, values in local.items())
        right = counted == [loop.inner_steps, loop.inner_steps // 4] and same and agree and own_data
        return None if right and not unlike else (unlike, counted, same, agree, own_data)

    assert wrong_in(play, LOOPS) == {}


def test_a_group_of_two_ranks_and_groups_in_a_warmup_train_as_ddp_does() -> None:
    def play(rank: int, world_size: int, loop: Loop) -> Any:
        expected = run_loop(loop, of_ddp(loop), world_size, group=rank)[2]
        wrong = {}
        for choices in ({"mixing": 1.0, "worker_groups": 1}, {"warmup_steps": 1000}):
            # Gradients travel in float32, and buffers do not: DDP sends those of rank 0 before each forward pass.
            if "warmup_steps" not in choices or loop not in (LOOPS["64-true"], LOOPS["batch norm"]):
                ours = run_loop(loop, of_ours(loop, **choices), world_size, group=rank)[2]
                wrong[str(choices)] = differing(ours, expected)
        return {choices: batches for choices, batches in wrong.items() if batches}

    # Those in which DistributedDataParallel has no part of its own, and nothing happens between two steps.
    alike = ("clipping by value", "foreach", "fused", "manual, no loss returned", "scheduler per epoch", "bf16-mixed")
    assert wrong_in(play, {name: loop for name, loop in LOOPS.items() if name not in alike}) == {}


def test_a_single_group_of_three_ranks_trains_as_ddp_does() -> None:
    """Three ranks add gradients in the order of DDP's buckets, whose layout is fixed before the first step."""

    def play(rank: int, world_size: int, loop: Loop) -> Any:
        expected = run_loop(loop, of_ddp(loop), world_size, 0, rank, world_size)[2]
        ours = of_ours(loop, mixing=1.0, worker_groups=1)
        for one, other in zip(expected, run_loop(loop, ours, world_size, 0, rank, world_size)[2], strict=True):
            for key, values in one.items():
                loose = {"rtol": 0.1, "atol": 0.05} if values.dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
                torch.testing.assert_close(other[key], values, **loose)

    names = ("automatic", "gan", "accumulation", "bf16-true", "find_unused_parameters", "frozen", "manual")
    names += ("sparse gradients", "static_graph", "tied")
    assert wrong_in(play, {name: LOOPS[name] for name in names}, world_size=3) == {}


def test_averaging_after_every_inner_step_is_ddp_and_statistics_of_batch_norm_become_the_mean() -> None:
    """Where all is linear in the gradient, a mean of parameters is a mean of gradients."""
    linear = {
        "manual, not in every batch": Loop(lambda: Manual(every=3)),
        "accumulation": Loop(fits.module, {"accumulate_grad_batches": 3}),
        "tied": Loop(lambda: Optimized(lambda p: torch.optim.SGD(p, lr=0.05), tied())),
        "64-true": Loop(optimized(lambda p: torch.optim.SGD(p, lr=0.05)), {"precision": "64-true"}),
    }
    # Without learning the statistics are a linear function of the batches.
    still = Loop(lambda: Optimized(lambda p: torch.optim.SGD(p, lr=0.0), normalised()))

    def play(rank: int, world_size: int, loop: Loop) -> None:
        ours = run_loop(loop, of_ours(loop, **LOCKSTEP), world_size, group=rank)[2]
        if loop is still:
            plain = [run_loop(loop, "auto", 1, group=group)[2] for group in range(2)]
            mean = [{name: (one[name] + two[name]) / 2 for name in one} for one, two in zip(*plain, strict=True)]
            counter = "net.1.num_batches_tracked"
            assert [values.pop(counter) for values in ours] == [values.pop(counter) for values in mean]
        else:
            mean = run_loop(loop, "ddp", world_size, group=rank)[2]
        for expected, actual in zip(mean, ours, strict=True):
            # Twice rounded where DDP rounds once.
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    assert wrong_in(play, {**linear, "batch norm": still}) == {}


class Overflowing(Regression):
    """Gradients that are not finite in two batches of the second group."""

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = super().training_step(parts, index)
        return loss * float("inf") if self.global_rank == 1 and index in (4, 5) else loss


OVERFLOWING = Loop(Overflowing, {"plugins": [by_scaler()]})


def test_a_loop_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Those that keep something between two steps."""

    class Saving(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 8:
                trainer.save_checkpoint(tmp_path / "8.ckpt")

    def play(rank: int, world_size: int, loop: Loop) -> Any:
        traces = []
        for resume in (None, str(tmp_path / "8.ckpt")):
            torch.manual_seed(0)
            model, trace = loop.make(), Trace()
            callbacks = [*loop.callbacks(), trace, *([] if resume else [Saving()])]
            chosen = {**loop.trainer, "max_epochs": 1, "limit_train_batches": 1.0, "callbacks": callbacks}
            trainer = fits.trainer(strategy=of_ours(loop, overlap_steps=3), devices=2, **chosen)
            trainer.fit(model, StatefulBatches(rank, 0, 1, BATCHES), ckpt_path=resume)
            traces.append(trace.batches)
        return differing(traces[1], traces[0][9:], but_last=False)

    names = ("accumulation", "batch norm", "compiled", "gan", "lbfgs", "manual, not in every batch", "16-true")
    names += ("configure_model", "parametrized", "scheduler per step", "sparse gradients")
    loops = {name: LOOPS[name] for name in names} | {"16-mixed, overflowing": OVERFLOWING}
    assert wrong_in(play, loops) == {}


def test_a_step_that_a_scaler_skips_in_one_group_keeps_the_groups_together() -> None:
    def run(rank: int, world_size: int) -> Any:
        trace = run_loop(OVERFLOWING, of_ours(OVERFLOWING, mixing=1.0), world_size, group=rank)[2]
        skipped = [i for i in range(1, BATCHES - 1) if torch.equal(trace[i]["net.0.bias"], trace[i - 1]["net.0.bias"])]
        trainer, _, _ = run_loop(OVERFLOWING, of_ours(OVERFLOWING), world_size, group=rank)
        return skipped, trainer.strategy.report()["inner_steps"], trainer.strategy.outer_state_dict()

    (none, steps, outer), (two, other_steps, other) = run_processes(run, 2)
    assert (none, two) == ([], [4, 5])
    assert steps == other_steps == BATCHES
    assert all(torch.equal(values, other[name]) for name, values in outer.items())


def test_schedulers_are_equal_in_all_groups_and_go_on_after_a_resume(tmp_path: Path) -> None:
    def run(rank: int, world_size: int, interval: str, epochs: int, resume: Path | None = None) -> Any:
        rates: dict[int, float] = {}

        class Noting(Optimized):
            def on_train_batch_start(self, *args: Any) -> None:
                rates[self.trainer.global_step] = self.optimizers().param_groups[0]["lr"]

        torch.manual_seed(0)
        trainer = fits.trainer(strategy=fits.strategy(**SHORT), devices=2, max_epochs=epochs, limit_train_batches=5)
        loader = DataLoader(fits.Batches(rank, 0, 1), batch_size=None)
        trainer.fit(Noting(scheduled(interval)), loader, ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return rates, trainer.strategy.outer_state_dict()

    def of_all(rank: int, world_size: int) -> Any:
        return [
            [run(rank, world_size, interval, *of) for of in ((4,), (2,), (4, tmp_path / "2.ckpt"))]
            for interval in ("step", "epoch")
        ]

    one, other = run_processes(of_all, 2)
    for different, ((plain, outer), _, (rates, resumed)), ((of_other, _), *_) in zip((20, 4), one, other, strict=True):
        assert plain == of_other
        assert len(set(plain.values())) == different
        assert rates == {step: rate for step, rate in plain.items() if step >= 10}
        assert all(torch.equal(values, outer[name]) for name, values in resumed.items())


class Numbers(pl.LightningDataModule):  # type: ignore[misc, name-defined]
    """Batches from a LightningDataModule, which knows its trainer."""

    def setup(self, stage: str) -> None:
        self.group = self.trainer.strategy.topology.group_index

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(fits.Batches(self.group, 0, 1), batch_size=None)


def test_a_data_module_gives_the_batches_and_lazy_modules_train_once_they_have_seen_one() -> None:
    def run(rank: int, world_size: int) -> Any:
        expected = run_loop(LOOPS["automatic"], of_ours(LOOPS["automatic"]), world_size, group=rank)[0]
        torch.manual_seed(0)
        trainer = fits.trainer(strategy=fits.strategy(**SHORT), devices=2, max_steps=BATCHES)
        trainer.fit(Regression(), datamodule=Numbers())
        outer = expected.strategy.outer_state_dict()
        lazy = lazy_module()
        lazy(batch(0, 0)[0])
        trained = run_loop(Loop(lambda: lazy), of_ours(LOOPS["automatic"]), world_size, group=rank)[2]
        same = all(torch.equal(v, outer[name]) for name, v in trainer.strategy.outer_state_dict().items())
        return same, len(trained)

    assert run_processes(run, 2) == [(True, BATCHES)] * 2


def lazy_module() -> Any:
    return Regression(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(3)))


class Skipping(Regression):
    """Has no loss for one batch."""

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Any:
        return None if index == 3 else super().training_step(parts, index)


class Uneven(Manual):
    """Does not step in as many batches in both groups."""

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.every = 20 if index == 5 and self.global_rank == 1 else 1
        super().training_step(parts, index)


def of_zero() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    return Optimized(lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=0.01))


def test_what_cannot_train_ends_all_groups_with_an_error_that_says_why() -> None:
    refused = [
        (lazy_module, ("ValueError: 'net.0.weight' has no shape yet", "before trainer.fit")),
        (of_zero, ("ValueError: ZeroRedundancyOptimizer divides its state over all processes",)),
        (Skipping, ("Skipping the `training_step` by returning None in distributed",)),
        (Uneven, ("AgreementError", "inner step")),
    ]
    for make, told in refused:
        loop = Loop(make)

        def run(rank: int, world_size: int, loop: Loop = loop) -> None:
            run_loop(loop, of_ours(loop), world_size, group=rank)

        errors = run_processes(run, 2, expect_failure=True)
        assert sorted(errors) == [0, 1]
        assert [part for part in told for error in errors.values() if part not in error] == []
    with pytest.raises(ValueError, match="ddp_kwargs contains 'model_averaging_period'"):
        fits.strategy(ddp_kwargs={"model_averaging_period": 4})


class Private(Manual):
    """Steps an optimizer that Lightning does not know."""

    def configure_optimizers(self) -> None:
        self.private = super().configure_optimizers()

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.private.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(parts[0]), parts[1]))
        self.private.step()


def test_training_without_an_optimizer_that_lightning_knows_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int, world_size: int) -> Any:
        caplog.clear()
        trainer = run_loop(Loop(Private), of_ours(LOOPS["manual"]), world_size, group=rank)[0]
        said = [record.getMessage() for record in caplog.records if "without an inner step" in record.getMessage()]
        return len(said), trainer.strategy.outer_state_dict()

    (one, outer), (two, other) = run_processes(run, 2)
    assert one == two == 1
    assert all(torch.equal(values, other[name]) for name, values in outer.items()), "joined at the end all the same"


def test_a_communication_hook_of_ddp_stays_in_the_group() -> None:
    """Lightning registers hooks on CUDA only; here, what it would register them with."""

    def run(rank: int, world_size: int) -> list[bool]:
        stays = []
        for state in (None, PowerSGDState(process_group=None)):
            loop = Loop(Regression, ddp_kwargs={"ddp_comm_hook": allreduce_hook, "ddp_comm_state": state})
            strategy = of_ours(loop, worker_groups=2)
            run_loop(loop, strategy, world_size, rank // 2, rank % 2, 2)
            given = strategy._ddp_comm_state
            stays.append(getattr(given, "process_group", given) is strategy.topology.in_group.process_group)
        return stays

    assert run_processes(run, 4) == [[True, True]] * 4

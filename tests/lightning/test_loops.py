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
SHORT: dict[str, Any] = {
    "sync_every": 3,
    "overlap_steps": 2,
    "fragments": [["*"]],
    "compression": "fp32",
}

Make = Callable[[], Any]
Trace = list[dict[str, Tensor]]


adamw = partial(torch.optim.AdamW, lr=0.01)
sgd = partial(torch.optim.SGD, lr=0.05)


def made(
    net: Callable[[], nn.Module] = mlp,
    optimize: Callable[[Any], Any] = adamw,
    apply: Callable[[nn.Module, Tensor], Tensor] = lambda net, x: net(x),
    **members: Any,
) -> Make:
    """A maker of modules with a network, an optimizer of its parameters, and methods of their
    own.
    """

    def loss(self: Any, parts: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(
            apply(self.net, parts[0].to(self.dtype)), parts[1].to(self.dtype)
        )

    own = {"loss": loss, "configure_optimizers": lambda self: optimize(self.parameters())}
    return lambda: fits.module(net=net(), **{**own, **members})


def manual(
    every: Callable[[Any, int], int] = lambda module, index: 1,
    wrapped: bool = True,
    returned: Any = None,
) -> Make:
    """Manual optimization that steps after every so many batches, perhaps not with Lightning's
    wrapper.
    """

    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        self.manual_backward(self.loss(parts))
        if (index + 1) % every(self, index) == 0:
            optimizer = self.optimizers(use_pl_optimizer=wrapped)
            optimizer.step()
            optimizer.zero_grad()
        return returned

    return made(optimize=sgd, automatic_optimization=False, training_step=training_step)


def with_own_optimizer(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
    """Manual optimization with an optimizer that nobody returned, beside one of a model outside of
    the module.
    """
    if index % 4 == 0:  # Another one takes the place of the first, in the midst of the epoch.
        self.__dict__["own"], self.__dict__["outside"] = sgd(self.parameters()), nn.Linear(2, 2)
    others = sgd(self.outside.parameters())
    self.outside(torch.ones(2)).sum().backward()
    others.step()
    if index % 3 != 2:
        self.own.zero_grad()
        self.manual_backward(self.loss(parts))
        self.own.step()


def of_gan(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
    """Two optimizers, each with its own part of the batch; the second rests in every third
    batch.
    """
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
    automatic_optimization=False,
    training_step=of_gan,
    configure_optimizers=lambda self: [
        sgd(self.net[0].parameters()),
        torch.optim.Adam(self.net[1].parameters()),
    ],
)


def made_late(self: Any) -> None:
    self.net = mlp() if isinstance(self.net, nn.Identity) else self.net


def clamp(self: Any, optimizer: Any) -> None:
    with torch.no_grad():
        self.net[0].weight.clamp_(-0.4, 0.4)


HOOKS: dict[str, Any] = {
    "optimizer_step": lambda self, epoch, index, optimizer, closure=None: optimizer.step(
        closure=closure
    ),
    "optimizer_zero_grad": lambda self, epoch, index, optimizer: optimizer.zero_grad(
        set_to_none=False
    ),
    "on_before_zero_grad": clamp,
    "configure_gradient_clipping": lambda self, optimizer, *_, **__: self.clip_gradients(
        optimizer, 0.5, "norm"
    ),
}


def in_every_other(self: Any, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
    optimizer.step(closure=closure) if index % 2 else closure()


def overflowing(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
    """Gradients that are not finite in two batches of the second group."""
    return self.loss(parts) * (
        float("inf") if any(torch.equal(parts[0], batch(1, step)[0]) for step in (5, 6)) else 1
    )


def scheduled(interval: str, parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


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
scaling = pl.plugins.MixedPrecision(
    "16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8)
)


class Loop(NamedTuple):
    make: Make  # The LightningModule, the same on every rank
    trainer: dict[str, Any] = {}
    inner_steps: int = BATCHES  # How many of the batches are inner steps
    ddp_kwargs: dict[str, Any] = {}
    callbacks: Callable[[], list[Any]] = list


EPOCHS: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 4}
UNUSED = {"find_unused_parameters": True}
LOOPS = {
    "automatic": Loop(made()),
    "manual": Loop(manual()),
    "manual, not in every batch": Loop(
        manual(every=lambda module, index: 3), inner_steps=BATCHES // 3
    ),
    "manual without a loss returned": Loop(manual(returned={"index": 0})),
    "manual, unwrapped": Loop(manual(wrapped=False)),
    "manual, with an optimizer made late": Loop(
        made(
            automatic_optimization=False,
            training_step=with_own_optimizer,
            configure_optimizers=lambda self: None,
        ),
        inner_steps=BATCHES - BATCHES // 3,
    ),
    "gan": Loop(gan, ddp_kwargs=UNUSED),
    "accumulation": Loop(made(), {"accumulate_grad_batches": 3}, inner_steps=4),
    "accumulation by scheduler": Loop(
        made(),
        EPOCHS,
        4 + 2 + 2,
        callbacks=lambda: [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})],
    ),
    "clipping by norm": Loop(made(), {"gradient_clip_val": 0.1}),
    "clipping by value": Loop(
        made(), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "16-mixed": Loop(made(training_step=overflowing), {"plugins": [scaling]}),
    "bf16-mixed": Loop(made(), {"precision": "bf16-mixed"}),
    "bf16-true": Loop(made(), {"precision": "bf16-true"}),
    "16-true": Loop(made(optimize=sgd), {"precision": "16-true"}),
    "64-true": Loop(made(), {"precision": "64-true"}),
    "configure_model": Loop(made(nn.Identity, configure_model=made_late)),
    "batch norm": Loop(made(normalised)),
    "tied, frozen, parametrized": Loop(made(tied_frozen_and_parametrized)),
    "gradient checkpointing": Loop(
        made(apply=lambda net, x: checkpoint_sequential(net, 7, x, use_reentrant=False))
    ),
    "hooks overridden": Loop(made(**HOOKS)),
    "hooks overridden, not in every batch": Loop(
        made(optimizer_step=in_every_other), inner_steps=BATCHES // 2
    ),
    "scheduler per step": Loop(made(optimize=partial(scheduled, "step")), EPOCHS, inner_steps=12),
    "scheduler per epoch": Loop(made(optimize=partial(scheduled, "epoch")), EPOCHS, inner_steps=12),
    "fused": Loop(made(optimize=partial(adamw, fused=True))),
    "foreach": Loop(made(optimize=partial(adamw, foreach=True))),
    "lbfgs": Loop(made(optimize=partial(torch.optim.LBFGS, lr=0.1, max_iter=3))),
    "sparse gradients": Loop(
        made(
            lambda: nn.Embedding(8, 3, sparse=True),
            lambda p: torch.optim.SparseAdam(list(p), lr=0.01),
            apply=lambda net, x: net(x[:, 0].clamp(-3, 3).add(4).long()),
        )
    ),
    "find_unused_parameters": Loop(
        made(apply=lambda net, x: net[:-1](x)[:, :3]), ddp_kwargs=UNUSED
    ),
    "static_graph": Loop(made(), ddp_kwargs={"static_graph": True}),
    "compiled inside": Loop(made(lambda: nn.Sequential(mlp(), compiled(nn.Linear(3, 3))))),
    "lazy and has seen a batch": Loop(made(partial(lazy, has_seen_a_batch=True))),
    "compiled": Loop(lambda: compiled(made()())),
}


@pytest.fixture(autouse=True, scope="module")
def compilers() -> None:
    compiled(torch.sin)(torch.zeros(1, requires_grad=True))


def run_loop(
    loop: Loop, strategy: Any, devices: int, loader: Any, **choices: Any
) -> tuple[Any, Any, Trace]:
    """Fits in this rank. Returns the trainer, the module, and what it held after every batch, with
    learning rates.
    """
    torch.manual_seed(0)
    model = loop.make()
    trace = []

    def keep(trainer: Any, module: Any, *args: Any) -> None:
        rates = [
            group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups
        ]
        held = {name: values.detach().clone() for name, values in module.state_dict().items()}
        trace.append({**held, "rates": torch.tensor(rates)})

    length = (
        {} if "max_epochs" in loop.trainer else {"max_epochs": 1, "limit_train_batches": BATCHES}
    )
    watching = [*loop.callbacks(), on(on_train_batch_end=keep), *choices.pop("callbacks", [])]
    resume = choices.pop("resume", None)
    chosen = {
        "strategy": strategy,
        "devices": devices,
        "num_sanity_val_steps": 0,
        "callbacks": watching,
    }
    trainer = fits.trainer(**{**chosen, **length, **loop.trainer, **choices})
    trainer.fit(model, loader, ckpt_path=resume)
    return trainer, model, trace


def of_ours(loop: Loop, **choices: Any) -> Any:
    return fits.strategy(**{**SHORT, **choices, "ddp_kwargs": loop.ddp_kwargs})


def differing(trace: Trace, other: Trace) -> list[int]:
    """The batches after which they differ; the last ends with the final sync."""
    pairs = list(zip(trace, other, strict=True))
    return [index for index, (one, two) in enumerate(pairs[:-1], start=1) if not same(one, two)]


@in_ranks(2, timeout=300.0)
def test_all_groups_agree(rank: int) -> None:
    """And with mixing=1, where landings change nothing, each group has the bits of a plain Trainer
    of its own.
    """
    for name, loop in LOOPS.items():
        torch.compiler.reset()
        plain = run_loop(loop, "auto", 1, batches(rank))[2]
        trainer, _, trace = run_loop(loop, of_ours(loop, mixing=1.0), 2, batches(rank))
        report = trainer.strategy.report()
        assert differing(trace, plain) == [], name
        assert [report["inner_steps"], report["launches"]] == [
            loop.inner_steps,
            loop.inner_steps // 3,
        ], name
        if name == "16-mixed":
            # The scaler skips steps of the second group.
            skipped = [
                index for index in range(1, BATCHES - 1) if same(trace[index], trace[index - 1])
            ]
            assert skipped == [4, 5] * rank

        trainer, model, trace = run_loop(loop, of_ours(loop), 2, batches(rank))
        outer = trainer.strategy.outer_state_dict()
        held = {
            name.replace("_orig_mod.", ""): p
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        assert held.keys() == outer.keys(), name
        assert all(torch.equal(p, outer[n].to(p.dtype)) for n, p in held.items()), name
        assert {values.dtype for values in outer.values()} == {torch.float32}, name
        assert trainer.strategy.report()["inner_steps"] == loop.inner_steps, name
        assert agreed(outer), name
        assert not agreed(trace[-2]), "before the end each group has its own"


@in_ranks(2, timeout=300.0)
def test_a_group_of_two_ranks_trains_as_ddp_does(rank: int) -> None:
    # Those in which DistributedDataParallel has no part of its own, and nothing happens between two
    # steps.
    alike = (
        "accumulation by scheduler",
        "automatic",
        "bf16-mixed",
        "16-true",
        "clipping by value",
        "compiled",
    )
    alike += (
        "compiled inside",
        "configure_model",
        "foreach",
        "fused",
        "gradient checkpointing",
        "manual",
    )
    alike += ("lazy and has seen a batch", "manual without a loss returned")
    alike += ("scheduler per epoch", "scheduler per step")
    for name, loop in LOOPS.items():
        if name in alike:
            continue
        torch.compiler.reset()
        expected = run_loop(loop, pl.strategies.DDPStrategy(**loop.ddp_kwargs), 2, batches(rank))[2]
        ours = of_ours(loop, mixing=1.0, worker_groups=1)
        assert differing(run_loop(loop, ours, 2, batches(rank))[2], expected) == [], name


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
    )
    names += ("static_graph", "tied, frozen, parametrized")
    for loop in (Loop(made(normalised, sgd)), *(LOOPS[name] for name in names)):
        strategies = (
            pl.strategies.DDPStrategy(**loop.ddp_kwargs),
            of_ours(loop, mixing=1.0, worker_groups=1),
        )
        traces = [
            run_loop(loop, strategy, 3, batches(0, rank, 3))[2][:-1] for strategy in strategies
        ]
        loose = (
            {"rtol": 0.1, "atol": 0.05}
            if loop is LOOPS["bf16-true"]
            else {"rtol": 1e-3, "atol": 1e-3}
        )
        torch.testing.assert_close(*traces, **loose)


@in_ranks(2)
def test_a_loop_goes_on_with_the_same_bits(rank: int, tmp_path: Path) -> None:
    """Those that keep something between two steps, from within the first of two epochs."""

    def save(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if (trainer.current_epoch, index) == (0, 2):
            trainer.save_checkpoint(tmp_path / "3.ckpt")

    names = (
        "accumulation",
        "batch norm",
        "compiled",
        "gan",
        "lbfgs",
        "manual, not in every batch",
        "16-true",
    )
    names += (
        "16-mixed",
        "configure_model",
        "tied, frozen, parametrized",
        "scheduler per step",
        "scheduler per epoch",
    )
    for name in (*names, "sparse gradients"):
        torch.compiler.reset()
        saving = [on(on_train_batch_end=save)]
        traces = []
        for choices in ({"callbacks": saving}, {"resume": str(tmp_path / "3.ckpt")}):
            length = {"max_epochs": 2, "limit_train_batches": 1.0}
            loop = LOOPS[name]
            loader = Announced((rank, 0, 1), 5)
            traces.append(run_loop(loop, of_ours(loop), 2, loader, **length, **choices)[2])
        assert all(same(*both) for both in zip(traces[0][3:], traces[1], strict=True)), name


def of_zero(parameters: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)


@in_ranks(2)
def test_loops_that_cannot_train_end_all_groups_with_an_error_that_says_why(rank: int) -> None:
    def skipping(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Any:
        return None if index == 3 else self.loss(parts)

    for words, make in (
        ("'net.0.weight' has no shape yet.*before trainer.fit", made(lazy)),
        ("ZeroRedundancyOptimizer divides its state over all processes", made(optimize=of_zero)),
        (
            "Skipping the `training_step` by returning None in distributed",
            made(training_step=skipping),
        ),
        # One group does not step in one batch.
        (
            "inner step",
            manual(every=lambda module, index: 20 if index == 5 and module.global_rank == 1 else 1),
        ),
    ):
        loop = Loop(make)
        told = refusal(run_loop, loop, of_ours(loop), 2, batches(rank), kind=Exception)
        assert re.search(words, told, re.DOTALL), told
    told = refusal(fits.strategy, ddp_kwargs={"model_averaging_period": 4})
    assert "ddp_kwargs contains 'model_averaging_period'" in told


@in_ranks(2)
def test_every_epoch_without_an_inner_step_is_reported(rank: int) -> None:
    said = fits.said_by("lightning_sdiloco")

    def training_step(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(parts))
        if self.current_epoch % 2:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.sub_(parameter.grad, alpha=0.05)
        else:
            self.optimizers().step()

    loop = Loop(
        made(optimize=sgd, automatic_optimization=False, training_step=training_step),
        {"max_epochs": 4},
    )
    trainer = run_loop(loop, of_ours(loop), 2, batches(rank), limit_train_batches=2)[0]
    told = [re.sub(":.*", "", text) for text in said if "without an inner step" in text]
    assert told == [f"Epoch {epoch} ended without an inner step" for epoch in (1, 3)]
    assert trainer.strategy.report()["inner_steps"] == 4
    assert agreed(trainer.strategy.outer_state_dict()), "joined at the end all the same"


@in_ranks(2)
def test_only_optimizers_of_the_fit_in_its_thread_or_backward_count(rank: int) -> None:
    """One that steps in the backward pass does, one in a thread of the user does not, and no hook
    is left behind.
    """
    hooks = _global_optimizer_post_hooks
    assert not hooks

    def step_alone(parameter: Tensor) -> None:
        sgd([parameter]).step()
        parameter.grad = None

    def in_backward(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
        if index == 0:
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(step_alone)
        self.manual_backward(self.loss(parts))

    def in_a_thread(self: Any, parts: tuple[Tensor, Tensor], index: int) -> None:
        worker = threading.Thread(target=sgd(self.parameters()).step)
        worker.start()
        worker.join()
        if index % 2:
            self.optimizers().step()

    for inner_steps, training_step in ((6, in_backward), (3, in_a_thread)):
        own: dict[str, Any] = {"automatic_optimization": False, "training_step": training_step}
        loop = Loop(made(optimize=sgd, **own), {"limit_train_batches": 6})
        trainer = run_loop(loop, of_ours(loop), 2, batches(rank))[0]
        assert trainer.strategy.report()["inner_steps"] == inner_steps
        assert not hooks


@in_ranks(4)
def test_a_loss_scaled_by_the_number_of_all_ranks_is_reported_once(rank: int) -> None:
    def scaled(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.loss(parts) * self.trainer.world_size

    def scaled_by_group(self: Any, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.loss(parts) * self.trainer.strategy.topology.group_size

    def keep(self: Any, stage: str) -> None:
        self.world_size = self.trainer.world_size

    plain: dict[str, Any] = {
        "training_step": scaled_by_group,
        "on_train_start": lambda self: self.trainer.world_size,
    }
    cases = [
        (2, {"training_step": scaled}, "A training batch reads"),
        (2, {"setup": keep}, "The module keeps"),
    ]
    for groups, members, words in (*cases, (2, plain, ""), (1, {"training_step": scaled}, "")):
        said = fits.said_by("lightning_sdiloco")
        loop = Loop(made(optimize=sgd, **members), {"limit_train_batches": 3})
        # Lightning itself reads the number in every batch, and so do its callbacks.
        stopping = pl.callbacks.EarlyStopping(
            "loss", verbose=True, check_on_train_epoch_end=True, strict=False
        )
        strategy = of_ours(loop, worker_groups=groups)
        run_loop(loop, strategy, 4, batches(rank // 2, rank % 2, 2), callbacks=[stopping])
        told = [text for text in said if "gradients are averaged" in text]
        assert len(told) == (1 if words and rank == 0 else 0), (groups, members)
        assert all(
            text.startswith(words) and "has gradients 2 times too large" in text for text in told
        )
        assert strategy.world_size == 4


@in_ranks(4)
def test_a_communication_hook_of_ddp_stays_in_the_group(rank: int) -> None:
    """Lightning registers hooks on CUDA only; here, what it would register them with."""
    for state in (None, PowerSGDState(process_group=None)):
        loop = Loop(made(), ddp_kwargs={"ddp_comm_hook": allreduce_hook, "ddp_comm_state": state})
        strategy = of_ours(loop, worker_groups=2)
        run_loop(loop, strategy, 4, batches(rank // 2, rank % 2, 2), limit_train_batches=1)
        given = strategy._ddp_comm_state
        assert getattr(given, "process_group", given) is strategy.topology.in_group.process_group


@in_ranks(1)
def test_gradients_of_large_models_go_early_where_nobody_sees_it(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def training_step(self: Any, parts: Any, index: int) -> Any:
        self.kept.append(any(parameter.grad is not None for parameter in self.parameters()))
        loss = self.loss(parts)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    late, of_the_net, default = (
        [False] + [True] * 5,
        4 * (5 * 3 + 3),
        model_format._LEAST_BYTES,
    )  # late as in Lightning
    zeroing: dict[str, Any] = {"optimizer_zero_grad": lambda self, *args: args[-1].zero_grad()}
    large: dict[str, Any] = {"optimize": lambda parameters: torch.optim.SGD(parameters, lr=1e-6)}
    large["net"] = lambda: nn.Sequential(
        nn.Linear(5, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 3)
    )
    cases: dict[str, tuple[dict[str, Any], int, dict[str, Any], list[bool]]] = {
        "large enough": ({}, of_the_net, {}, [False] * 6),
        "too small": ({}, of_the_net + 1, {}, late),
        "accumulated": ({}, 1, {"accumulate_grad_batches": 2}, [False, True] * 3),
        "zeroing": (zeroing, 1, {}, late),
        "zeroing, accumulated": (zeroing, 1, {"accumulate_grad_batches": 2}, late),
        "stepping": ({"optimizer_step": HOOKS["optimizer_step"]}, 1, {}, late),
        "manual": ({"automatic_optimization": False}, 1, {}, late),
        "looking": ({}, 1, {"callbacks": [on(on_before_zero_grad=lambda *_: None)]}, late),
        "67 MB": (large, default, {}, [False] * 6),
    }
    trained = {}
    wrong = {}
    for case, (members, least, choices, kept) in cases.items():
        monkeypatch.setattr(model_format, "_LEAST_BYTES", least)
        torch.manual_seed(0)
        model = made(
            **{
                "net": lambda: nn.Linear(5, 3),
                "training_step": training_step,
                "kept": [],
                **members,
            }
        )()
        trainer = fits.trainer(
            strategy=fits.strategy(worker_groups=1, **SHORT), devices=1, max_epochs=1, **choices
        )
        trainer.fit(model, fits.SomeBatches(0, 6))
        wrong |= {case: model.kept} if model.kept != kept else {}
        trained[case] = list(model.parameters())
    assert wrong == {}
    # What is trained does not depend on it.
    for early, other in (("large enough", "zeroing"), ("accumulated", "zeroing, accumulated")):
        assert all(map(torch.equal, trained[early], trained[other]))

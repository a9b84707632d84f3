"""Checkpoints of real fits: resume to the same bits, what is written where, and what is refused."""

import importlib
import json
import resource
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from lightning_sdiloco import OuterOptimizer
from lightning_sdiloco.algorithm.config import recommended
from lightning_sdiloco.lightning.host.ddp import fix_bucket_order
from tests import fits
from tests.fits import LIGHTNING
from tests.ranks import RankError, run_processes, run_ranks
from tests.training import batch, mlp

STEPS = 26
CHOICES: dict[str, Any] = {"sync_every": 8, "overlap_steps": 5, "fragments": "strided:1"}
CHOSEN = recommended()


class StatefulBatches:
    """A loader of known length that can be taken up again in the middle."""

    def __init__(self, group: int, shard: int, shards: int, length: int) -> None:
        self.place, self.length, self.step = (group, shard, shards), length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        group, shard, shards = self.place
        while self.step < self.length:
            self.step += 1
            x, y = batch(group, self.step)
            yield x.chunk(shards)[shard], y.chunk(shards)[shard]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def traced(distribution: str, seed: int) -> Any:
    """A module with dropout and BatchNorm that keeps what it holds after every step."""
    torch.manual_seed(seed)
    net = nn.Sequential(*mlp(seed), nn.Dropout(0.2), nn.BatchNorm1d(3))
    base = type(fits.module(distribution, "adamw", seed, net))

    class Traced(base):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, *args: Any) -> None:
            # Before the next step, so after all that happens at the end of the one before.
            values = {name: value.clone() for name, value in self.state_dict().items()}
            state = self.trainer.optimizers[0].state
            values |= {f"{i} {key}": v.clone() for i, s in enumerate(state.values()) for key, v in s.items()}
            self.trace[self.trainer.global_step] = values | {
                f"outer {name}": value for name, value in self.trainer.strategy.outer_state_dict().items()
            }

    model = Traced()
    model.trace = {}
    return model


def run_fit(
    rank: int,
    world_size: int,
    distribution: str,
    steps: int,
    callbacks: list[Any],
    path: str | None = None,
    groups: int = 2,
    **choices: Any,
) -> dict[str, Any]:
    size = world_size // groups
    model = traced(distribution, seed=rank)
    loader = StatefulBatches(rank // size, rank % size, size, length=100)
    strategy = fits.strategy(distribution, **{"worker_groups": groups, **CHOICES, **choices})
    trainer = fits.trainer(
        distribution,
        strategy=strategy,
        devices=world_size,
        max_steps=steps,
        callbacks=callbacks,
        enable_checkpointing=any("Checkpoint" in type(callback).__name__ for callback in callbacks),
    )
    torch.manual_seed(100 + rank)
    trainer.fit(model, loader, ckpt_path=path)
    held = {name: values.clone() for name, values in model.state_dict().items()}
    return {"trace": model.trace, "outer": strategy.outer_state_dict(), "report": strategy.report(), "model": held}


def saving(distribution: str, folder: Path, **choices: Any) -> list[Any]:
    callbacks = importlib.import_module(distribution).callbacks
    return [callbacks.ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **choices)]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


# 5: before any flight; 11, 12: two and three fragments in flight; 13: just landed; 16: launched again.
# The last has one group of three ranks: DDP must add their gradients in the same order as before.
@pytest.mark.parametrize(
    ("distribution", "world_size", "groups", "steps"),
    [
        (LIGHTNING, 2, 2, (5, 11, 13, 16)),
        ("pytorch_lightning", 4, 2, (12,)),
        (LIGHTNING, 3, 1, (9,)),
    ],
)
def test_a_fit_resumed_from_any_step_gives_the_same_bits(
    distribution: str, world_size: int, groups: int, steps: tuple[int, ...], tmp_path: Path
) -> None:
    def fit(callbacks: list[Any], resume: str | None = None) -> list[dict[str, Any]]:
        ranks = run_processes(run_fit, world_size, distribution, STEPS, callbacks, resume, groups)
        return list(ranks)

    plain = fit([])
    saved = fit(saving(distribution, tmp_path, every_n_train_steps=1))
    for one, other in zip(saved, plain, strict=True):
        assert_same(one["outer"], other["outer"])
        assert one["report"]["landings"] == other["report"]["landings"]
    for step in steps:
        path = str(tmp_path / f"step={step}.ckpt")
        for one, other, with_means in zip(fit([], path), plain, saved, strict=True):
            assert sorted(one["trace"]) == list(range(step, STEPS))
            for at, values in one["trace"].items():
                assert_same(values, other["trace"][at])
            assert_same(one["outer"], other["outer"])
            counted = ("inner_steps", "launches", "landings")
            assert all(one["report"][key] == other["report"][key] for key in counted)
            # Until all have landed, after inner step 19, each file holds the mean of the groups, which they exchange.
            sent, for_means = other["report"]["bytes_sent"], with_means["report"]["bytes_sent"]
            assert one["report"]["bytes_sent"] == sent + (for_means - sent) / 18 * min(step, 18)
            assert (for_means > sent) == (groups > 1)


def test_a_checkpoint_of_one_distribution_is_resumed_by_the_other_to_the_same_bits(tmp_path: Path) -> None:
    callbacks = saving(LIGHTNING, tmp_path, every_n_train_steps=11)
    plain = run_processes(run_fit, 2, LIGHTNING, STEPS, callbacks)
    resumed = run_processes(run_fit, 2, "pytorch_lightning", STEPS, [], str(tmp_path / "step=11.ckpt"))
    for one, other in zip(resumed, plain, strict=True):
        assert sorted(one["trace"]) == list(range(11, STEPS))
        assert_same(one["trace"][STEPS - 1], other["trace"][STEPS - 1])
        assert_same(one["outer"], other["outer"])


def test_a_fit_resumed_with_a_schedule_a_guard_and_clipping_gives_the_same_bits(tmp_path: Path) -> None:
    choices: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2}

    def fit(callbacks: list[Any], resume: str | None = None, rounds: int = 5) -> list[dict[str, Any]]:
        schedule = partial(CosineAnnealingLR, T_max=rounds)
        outer = OuterOptimizer(lr_schedule=schedule, clip_norm=0.05, outlier_guard=1.02)
        made = partial(run_fit, outer_optimizer=outer, **choices)
        return list(run_processes(made, 4, LIGHTNING, STEPS, callbacks, resume))

    plain = fit(saving(LIGHTNING, tmp_path, every_n_train_steps=1))
    for step in (9, 21):
        for one, other in zip(fit([], str(tmp_path / f"step={step}.ckpt")), plain, strict=True):
            for at, values in one["trace"].items():
                assert_same(values, other["trace"][at])
            assert_same(one["outer"], other["outer"])
    with pytest.raises(RankError, match="another outer_optimizer.lr_schedule: it was CosineAnnealingLR"):
        fit([], str(tmp_path / "step=9.ckpt"), rounds=6)


def test_a_longer_fit_continues_a_finished_one_exactly(tmp_path: Path) -> None:
    plain = run_processes(run_fit, 2, LIGHTNING, STEPS, [])
    finished = run_processes(run_fit, 2, LIGHTNING, 14, saving(LIGHTNING, tmp_path, every_n_train_steps=14))
    checkpoint = torch.load(tmp_path / "step=14.ckpt", weights_only=True)
    for name, values in finished[0]["outer"].items():
        assert torch.equal(checkpoint["state_dict"][name], values), "the file holds the finished outer model"
    resumed = run_processes(run_fit, 2, LIGHTNING, STEPS, [], str(tmp_path / "step=14.ckpt"))
    for one, other in zip(resumed, plain, strict=True):
        assert_same(one["outer"], other["outer"])


def test_there_is_a_file_for_every_rank_and_removing_a_checkpoint_removes_its_folder(tmp_path: Path) -> None:
    callbacks = importlib.import_module(LIGHTNING).callbacks
    keep = callbacks.ModelCheckpoint(
        tmp_path, filename="{step}", save_top_k=1, every_n_train_steps=6, monitor="step", mode="max", save_last="link"
    )
    run_processes(run_fit, 4, LIGHTNING, STEPS, [keep])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=24.ckpt", "step=24.ckpt.sdiloco"]
    (save,) = (tmp_path / "step=24.ckpt.sdiloco").iterdir()
    assert sorted(path.name for path in save.iterdir()) == ["manifest.json", *(f"rank_{i:05d}.pt" for i in range(4))]
    manifest = json.loads((save / "manifest.json").read_text())
    assert manifest["layout"] == {"worker_groups": 2, "group_size": 2}
    assert manifest["settings"]["sync_every"] == "8"
    # Through the link, too.
    resumed = run_processes(run_fit, 4, LIGHTNING, STEPS, [], str(tmp_path / "last.ckpt"))
    assert sorted(resumed[0]["trace"]) == [24, 25]


def test_the_newest_checkpoint_alone_can_be_resumed_where_that_is_asked_for(tmp_path: Path) -> None:
    keep = saving(LIGHTNING, tmp_path, every_n_train_steps=6, save_last="link")
    newest = partial(run_fit, resume="exact:newest")
    plain = run_processes(newest, 2, LIGHTNING, STEPS, keep)
    assert [path.name for path in tmp_path.glob("*.sdiloco")] == ["step=24.ckpt.sdiloco"]
    for step in (6, 12, 18):
        assert torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"], "an ordinary file"
    for name in ("last.ckpt", "step=24.ckpt"):
        resumed = run_processes(newest, 2, LIGHTNING, STEPS, [], str(tmp_path / name))
        assert_same(resumed[0]["outer"], plain[0]["outer"])
    older = str(tmp_path / "step=18.ckpt")
    errors = run_processes(run_fit, 2, LIGHTNING, STEPS, [], older, expect_failure=True)
    assert all("resume='exact:newest'" in error for error in errors.values())


@pytest.mark.parametrize("limited", ["rank", "file"])
def test_a_disk_that_is_full_ends_all_ranks_with_one_error_and_leaves_nothing_of_the_checkpoint(
    limited: str, tmp_path: Path
) -> None:
    """One rank cannot write a file of more than some bytes: its own, or the checkpoint file, which is rank 0's."""

    def run(rank: int, world_size: int) -> None:
        pl = importlib.import_module(LIGHTNING)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

        class Full(pl.callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if trainer.global_step == 12 and limited == "rank" and rank == 1:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
                if trainer.global_step == 12 and limited == "file" and rank == 0:
                    io = trainer.strategy.checkpoint_io
                    save = io.save_checkpoint

                    def overflowing(*args: Any, **kwargs: Any) -> None:
                        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
                        save(*args, **kwargs)

                    io.save_checkpoint = overflowing

        try:
            run_fit(rank, world_size, LIGHTNING, STEPS, [Full(), *saving(LIGHTNING, tmp_path, every_n_train_steps=6)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    errors = run_processes(run, 2, expect_failure=True)
    assert sorted(errors) == [0, 1]
    for error in errors.values():
        assert (
            f"The checkpoint {tmp_path}/step=12.ckpt could not be saved: rank {int(limited == 'rank')}: OSError"
            in error
        )
        assert f"Nothing is left of it. Resume from {tmp_path}/step=6.ckpt" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=6.ckpt", "step=6.ckpt.sdiloco"]
    assert not list(tmp_path.rglob("*.part"))
    resumed = run_processes(run_fit, 2, LIGHTNING, STEPS, [], str(tmp_path / "step=6.ckpt"))
    assert sorted(resumed[0]["trace"]) == list(range(6, STEPS))


def test_saving_weights_only_writes_no_folder(tmp_path: Path) -> None:
    only = saving(LIGHTNING, tmp_path, every_n_train_steps=10, save_weights_only=True)
    run_processes(run_fit, 2, LIGHTNING, STEPS, only)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=10.ckpt", "step=20.ckpt"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint of two groups in flight."""
    folder = tmp_path_factory.mktemp("saved")
    run_processes(run_fit, 2, LIGHTNING, 12, saving(LIGHTNING, folder, every_n_train_steps=9))
    return folder


def save_folder(checkpoint: Path) -> Path:
    (save,) = Path(f"{checkpoint}.sdiloco").iterdir()
    return save


def alter(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def of_another_version(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["streaming_diloco"] |= {"format": 99, "version": "7.0"}
    torch.save(content, path)


def test_a_damaged_folder_is_refused(saved: Path, tmp_path: Path) -> None:
    """And one of a newer version."""
    damages = [
        (lambda path: (save_folder(path) / "rank_00001.pt").unlink(), "rank_00001.pt, which is not there"),
        (lambda path: (save_folder(path) / "manifest.json").unlink(), "manifest.json, which is not there"),
        (lambda path: shutil.rmtree(f"{path}.sdiloco"), "move or copy both"),
        (lambda path: alter(save_folder(path) / "rank_00001.pt"), "is not what was saved"),
        (of_another_version, "was written in format 99 by lightning_sdiloco 7.0"),
    ]
    for index, (damage, told) in enumerate(damages):
        path = Path(shutil.copytree(saved, tmp_path / str(index))) / "step=9.ckpt"
        damage(path)
        errors = run_processes(run_fit, 2, LIGHTNING, STEPS, [], str(path), expect_failure=True)
        assert told in errors[1]


def test_other_settings_are_refused_by_name(saved: Path) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"sync_every": 9}, "sync_every was 8, now it is 9"),
        (
            {"outer_lr": 0.375, "outer_momentum": 0.75},
            f"outer_lr was {CHOSEN.outer_lr}, now it is 0.375; outer_momentum was {CHOSEN.outer_momentum}, now it",
        ),
        (
            {"outer_optimizer": OuterOptimizer(outlier_guard=5.0, clip_norm=2.0)},
            "outer_optimizer.clip_norm was None, now it is 2.0; outer_optimizer.outlier_guard was",
        ),
    ]

    def run(rank: int, world_size: int) -> list[str]:
        told = []
        for changed, _ in changes:
            with pytest.raises(ValueError, match="now it is") as caught:
                run_fit(rank, world_size, LIGHTNING, STEPS, [], str(saved / "step=9.ckpt"), **changed)
            told.append(str(caught.value))
        return told

    for messages in run_processes(run, 2):
        for message, (_, told) in zip(messages, changes, strict=True):
            assert told in message


def test_a_checkpoint_of_plain_ddp_is_where_all_groups_start(tmp_path: Path) -> None:
    def with_ddp(rank: int, world_size: int) -> None:
        model = fits.module()
        trainer = fits.trainer(strategy="ddp", devices=2, max_steps=4)
        trainer.fit(model, StatefulBatches(rank, 0, 1, 100))
        trainer.save_checkpoint(tmp_path / "ddp.ckpt")

    def with_ours(rank: int, world_size: int) -> dict[str, Tensor]:
        strategy = fits.strategy(**CHOICES)
        trainer = fits.trainer(strategy=strategy, devices=2, max_steps=5)
        trainer.fit(fits.module(seed=rank), StatefulBatches(rank, 0, 1, 100), ckpt_path=str(tmp_path / "ddp.ckpt"))
        return strategy.outer_state_dict()

    run_processes(with_ddp, 2)
    one, other = run_processes(with_ours, 2)
    assert_same(one, other)


def test_fixing_the_order_of_buckets_leaves_the_module_as_it_was() -> None:
    def run(rank: int, world_size: int) -> list[bool]:
        untouched = []
        for instance_forward in (False, True):
            module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            if instance_forward:
                module.forward = torch.sin
            before = {name: values.clone() for name, values in module.state_dict().items()}
            fix_bucket_order(DistributedDataParallel(module))
            kept = module.forward is torch.sin if instance_forward else "forward" not in vars(module)
            same = all(torch.equal(values, before[name]) for name, values in module.state_dict().items())
            untouched.append(kept and same and all(p.grad is None for p in module.parameters()))
        return untouched

    assert run_ranks(run, 3) == [[True, True]] * 3


@pytest.mark.parametrize(("groups", "when"), [(2, "every_n_train_steps"), (1, "every_n_epochs")])
def test_a_loader_of_torch_begins_the_next_epoch_with_the_same_random_numbers(
    groups: int, when: str, tmp_path: Path
) -> None:
    """It takes one for every iterator, and the module has dropout."""

    def fit(rank: int, world_size: int, resume: str | None) -> Any:
        module = traced(LIGHTNING, seed=rank)
        loader = DataLoader([batch(0, step) for step in range(10)], batch_size=None, shuffle=True)
        trainer = fits.trainer(
            strategy=fits.strategy(worker_groups=groups, **CHOICES),
            devices=2,
            max_epochs=3,
            callbacks=[] if resume else saving(LIGHTNING, tmp_path, **{when: 5 if "steps" in when else 1}),
            enable_checkpointing=resume is None,
        )
        torch.manual_seed(100 + rank)
        trainer.fit(module, loader, ckpt_path=resume)
        return module.trace

    plain = run_processes(fit, 2, None)
    for one, other in zip(run_processes(fit, 2, str(tmp_path / "step=5.ckpt")), plain, strict=True):
        assert sorted(one) == list(range(5, 15))
        for step, values in one.items():
            assert_same(values, other[step])

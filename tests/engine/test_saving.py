"""Files of a loop of one's own: what they hold, and whose state is refused; `tests/large` resumes from them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sdiloco import SimulatedGroups, StreamingDiLoCo, WorkerGroups
from lightning_sdiloco.engine.checkpoint import random_state
from tests.engine.groups import Rank
from tests.ranks import run_ranks
from tests.training import LAYERS, inner_optimizer, mlp, train_step

CHOICES: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": LAYERS}


def trained(rank: int, steps: int = 5, **choices: Any) -> StreamingDiLoCo:
    here = Rank(rank, WorkerGroups(choices.pop("worker_groups", "auto")), **{**CHOICES, **choices})
    for step in range(1, steps + 1):
        here.step(step)
    return here.engine


def test_the_state_of_another_rank_is_refused_there() -> None:
    def resume(rank: int, world_size: int) -> str:
        states = [trained(rank).state_dict()]
        torch.distributed.broadcast_object_list(states)  # as from a file that rank 0 wrote alone
        engine = trained(rank, 0)
        try:
            engine.load_state_dict(states[0])
        except ValueError as error:
            return str(error)
        return ""

    own, other = run_ranks(resume, 2)
    assert own == ""
    assert "rank 0 of worker group 0 (2 groups of 1), and this process is rank 0 of worker group 1 (2" in other
    assert "engine.save(path)" in other
    assert "register_for_checkpointing" in other


def test_after_the_end_the_state_is_that_before_it_and_a_longer_run_goes_on_from_there() -> None:
    models = [mlp(), mlp()]
    groups, longer = SimulatedGroups(models, **CHOICES), SimulatedGroups([mlp(), mlp()], **CHOICES)
    for step in range(1, 8):
        for group, model in enumerate(models):
            train_step(model, inner_optimizer("sgd", model), group, step)
        groups.step()
    before = [copy.deepcopy(engine.state_dict()) for engine in groups.engines]
    assert before[0]["flights"]
    groups.finish()
    for engine, other, state in zip(groups.engines, longer.engines, before, strict=True):
        other.load_state_dict(engine.state_dict())
        assert str(engine.state_dict()) == str(state) == str(other.state_dict())


def test_a_file_holds_the_model_a_second_save_replaces_it_and_what_is_not_of_now_is_refused(tmp_path: Path) -> None:
    path, engine = tmp_path / "a.ckpt", trained(0)
    for _ in range(2):
        engine.save(path)
    assert len(list((tmp_path / "a.ckpt.sdiloco").iterdir())) == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.ckpt", "a.ckpt.sdiloco"]
    content = torch.load(path, weights_only=True)
    assert content["state_dict"].keys() == dict(mlp().named_parameters()).keys()
    with pytest.raises(ValueError, match="holds the state of 1 inner optimizers, and there are 0"):
        StreamingDiLoCo(mlp(), **CHOICES).load(path)
    content["streaming_diloco"]["format"] = 1
    torch.save(content, path)
    with pytest.raises(ValueError, match="written in format 1 .* this version reads format 2 alone"):
        trained(0, 0).load(path)
    state = engine.state_dict()
    for key in ("rank", "settings"):
        with pytest.raises(ValueError, match="of an earlier version, which this one does not read"):
            trained(0, 0).load_state_dict({name: value for name, value in state.items() if name != key})
    with pytest.raises(ValueError, match="simulated in one"):
        SimulatedGroups([mlp(), mlp()], **CHOICES).engines[1].save(path)


def test_what_cannot_go_on_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def resume(rank: int, world_size: int) -> list[str]:
        path = tmp_path / "a.ckpt"
        trained(rank).save(path)
        texts = []

        def refused(path: Path, **choices: Any) -> None:
            with pytest.raises(ValueError, match=r"\w") as caught:
                trained(rank, 0, **choices).load(path)
            texts.append(str(caught.value))

        refused(path, sync_every=5)
        refused(path, worker_groups=1)
        refused(tmp_path / "b.ckpt")
        torch.distributed.barrier()
        if rank == 0:
            next(tmp_path.rglob("rank_00001.pt")).write_bytes(b"cut off")
        torch.distributed.barrier()
        refused(path)
        return texts

    one, other = run_ranks(resume, 2)
    assert one == other
    settings, layout, missing, broken = one
    assert "other settings: sync_every was 4, now it is 5" in settings
    assert "saved with {'worker_groups': 2, 'group_size': 1}, now there are {'worker_groups': 1" in layout
    assert "There is no checkpoint" in missing
    assert "rank_00001.pt" in broken
    assert "is not what was saved" in broken


def test_a_device_that_nobody_uses_is_not_asked_for_its_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was forked by one that knows of the device could not answer."""

    def asked() -> torch.Tensor:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", asked)
    assert "cuda" not in random_state()

"""How processes are started, and what follows in the same processes: further fits, other models, other groups."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests import fits, sharded
from tests.fits import LIGHTNING
from tests.ranks import LAUNCHERS, run_processes, run_ranks
from tests.scripts import run_script, start_script
from tests.strangers import listening
from tests.training import mlp

SHORT: dict[str, Any] = {"sync_every": 4, "overlap_steps": 2, "fragments": "strided:1"}
BATCHES = 7

pl = importlib.import_module(LIGHTNING)

MODEL = """
import torch
from {distribution} import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdiloco.{file} import StreamingDiLoCoStrategy


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(80, 5, generator=generator), torch.randn(80, 3, generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=4)

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
"""

FIT = """
def fit(net, start_method):
    strategy = StreamingDiLoCoStrategy(sync_every=4, overlap_steps=2, fragments=[["*"]], start_method=start_method)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=9, **quiet)
    trainer.fit(net)
    outer = strategy.outer_state_dict()
    same = all(torch.equal(net.get_parameter(name), values) for name, values in outer.items())
    if trainer.is_global_zero:
        total = sum(float(values.double().sum()) for values in net.state_dict().values())
        report = strategy.report()
        logged = "loss" in trainer.callback_metrics
        print("fitted", same, report["inner_steps"], report["launches"], f"{{total:.17g}}", logged)
"""

SCRIPT = f"""{MODEL}
{FIT}

if __name__ == "__main__":
    fit(Net(), {{start_method!r}})
"""


FABRIC = """
from lightning.fabric import Fabric

from lightning_sdiloco import StreamingDiLoCoFabricStrategy

strategy = StreamingDiLoCoFabricStrategy(worker_groups=2, start_method="popen")
Fabric(accelerator="cpu", devices=2, strategy=strategy).launch()
"""


def fresh_environment() -> dict[str, str]:
    """An environment that knows nothing of a launcher."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        known.pop(name, None)
    # The current folder of a script is its own.
    return known | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), known.get("PYTHONPATH", "")])}


def run_python(arguments: list[str], **choices: Any) -> str:
    """What a fresh interpreter prints that knows nothing of a launcher."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **choices,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fitted_by_script(folder: Path, start_method: str, distribution: str = LIGHTNING) -> list[str]:
    """What the main process of a script reads after the fit."""
    script = folder / f"{start_method}.py"
    file = "lightning_pytorch" if distribution == LIGHTNING else distribution
    script.write_text(SCRIPT.format(distribution=distribution, file=file, start_method=start_method))
    output = run_script(script) if start_method == "fork" else run_python([str(script)])
    (fitted,) = (line for line in output.splitlines() if line.startswith("fitted"))
    return fitted.split()


def test_a_script_gets_back_the_same_bits_however_processes_are_started(tmp_path: Path) -> None:
    forked = fitted_by_script(tmp_path, "fork")
    assert forked[:4] == ["fitted", "True", "9", "2"]
    assert forked[5] == "True", "callback_metrics came back"
    for start_method, distribution in (("popen", LIGHTNING), ("spawn", "pytorch_lightning"), ("forkserver", LIGHTNING)):
        assert fitted_by_script(tmp_path, start_method, distribution) == forked, start_method


def test_a_notebook_trains_in_forked_processes(tmp_path: Path) -> None:
    """An interactive interpreter, one cell after the other, in which the classes are in ``__main__``."""
    cells = [
        MODEL.format(distribution=LIGHTNING, file="lightning_pytorch"),
        FIT.format(),
        "net = Net()\nnet(torch.randn(4, 5)).sum().backward()",
        "fit(net, 'fork')",
        "fit(net, 'fork')",
        "try:\n    Trainer(strategy='streaming_diloco', accelerator='cpu', devices=2)\n"
        "except Exception as error:\n    print('refused', error)",
        "strategy = Trainer(strategy='streaming_diloco_notebook', accelerator='cpu', devices=2).strategy\n"
        "print('taken', strategy.launcher.is_interactive_compatible)",
    ]
    for number, cell in enumerate(cells):
        (tmp_path / f"{number}.py").write_text(cell)
    lines = "".join(f"exec(open('{tmp_path}/{number}.py').read())\n" for number in range(len(cells)))
    output = run_python(["-i", "-q"], input=lines, cwd=tmp_path)
    first, second = (line.split() for line in output.splitlines() if "fitted" in line)
    assert "True" in first
    assert first != second, "the second fit starts with the weights of the first"
    (refused,) = (line for line in output.splitlines() if "refused" in line)
    assert "Write strategy='streaming_diloco_notebook', or give the strategy start_method='fork'." in refused
    assert "taken True" in output


# A port that is taken


@pytest.mark.parametrize(
    ("start_method", "program", "told"),
    [
        ("popen", "store", "is taken by another training"),
        ("fork", "silent", "answers, but is no torch TCPStore"),
        ("fabric", "store", "is taken by another training"),
    ],
)
def test_a_port_that_is_taken_is_named_and_ends_all_processes(
    start_method: str, program: str, told: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    file = {"distribution": LIGHTNING, "file": "lightning_pytorch", "start_method": start_method}
    script.write_text(FABRIC if start_method == "fabric" else SCRIPT.format(**file))
    known = fresh_environment()
    with listening(program) as port:
        # What popen starts again are fresh interpreters.
        main = start_script(script, environment={"MASTER_PORT": str(port), "PYTHONPATH": known["PYTHONPATH"]})
        main.join(timeout=100)
        assert main.pid is not None
        deadline = time.monotonic() + 10
        while (left := in_session(main.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(main.pid, signal.SIGKILL)
    output = (tmp_path / "stderr").read_text()
    assert (main.exitcode, left) == (1, []), output
    assert "ValueError: Rank 0 on" in output
    assert f"127.0.0.1:{port} {told}" in output
    assert "Choose another MASTER_PORT" in output


def in_session(session: int) -> list[str]:
    """The processes of a session that have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, own = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            found += [process.name] if int(own) == session and state != "Z" else []
    return found


def test_a_rank_started_by_hand_names_a_program_that_is_no_store_at_once() -> None:
    def run(rank: int, world_size: int, port: int) -> str:
        os.environ |= {"MASTER_PORT": str(port), "LOCAL_RANK": "1"}
        with pytest.raises(ValueError, match="Rank 1 on .* no torch TCPStore") as error:
            fits.fit(1, 2, 2, 3, SHORT, trainer_choices={"devices": 2})
        return str(error.value)

    with listening("http") as port:
        (text,) = run_processes(run, 1, port, timeout=30)
    assert f"127.0.0.1:{port} answers" in text


# Environments that say how many processes there are


@pytest.mark.parametrize(
    ("distribution", "groups", "ranks_per_node"),
    [("pytorch_lightning", "auto", 1), (LIGHTNING, 1, 2)],
)
def test_groups_are_made_of_the_processes_that_an_environment_knows(
    distribution: str, groups: Any, ranks_per_node: int
) -> None:
    def run(rank: int, world_size: int, **choices: Any) -> Any:
        def inspect(trainer: Any, module: Any) -> Any:
            assert trainer.strategy.launcher.procs == []
            sampling = trainer.strategy.distributed_sampler_kwargs
            return trainer.world_size, trainer.global_rank, sampling, trainer.strategy.topology.num_groups

        given = {"inspect": inspect, "trainer_choices": choices}
        trained = fits.fit(rank, world_size, 2, 9, {**SHORT, "worker_groups": groups}, distribution, **given)
        return trained["outer"], trained["inspected"]

    def knowing(rank: int, world_size: int) -> Any:
        return run(rank, world_size, devices="auto", plugins=[fits.environment_that_knows(distribution)])

    ranks, expected = run_processes(knowing, 2, ranks_per_node=ranks_per_node), run_processes(run, 2)
    for rank, (_, inspected) in enumerate(ranks):
        assert inspected == (2, rank, {"num_replicas": 2, "rank": rank}, 1 if groups == 1 else 2)
    assert_alike([outer for outer, _ in (*ranks, *expected)])


def test_groups_of_a_sharded_model_are_made_of_the_processes_that_an_environment_knows() -> None:
    def run(rank: int, world_size: int, **choices: Any) -> Any:
        return sharded.fit(rank, world_size, 2, (2, 1), 9, trainer_choices=choices, fragments="strided:1")["outer"]

    def knowing(rank: int, world_size: int) -> Any:
        return run(rank, world_size, devices="auto", plugins=[fits.environment_that_knows()])

    assert_alike([*run_processes(knowing, 4), *run_processes(run, 4)])


@pytest.mark.parametrize(
    ("groups", "num_nodes", "message"),
    [
        (2, 1, "worker_groups=2 cannot split 3 processes"),
        ("auto", 2, "Knows says that there are 3 processes, which do not fill num_nodes=2 nodes equally"),
    ],
)
def test_processes_of_an_environment_that_cannot_be_divided_are_refused(
    groups: Any, num_nodes: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=message):
        fits.trainer(
            strategy=fits.strategy(worker_groups=groups),
            plugins=[fits.environment_that_knows()],
            devices="auto",
            num_nodes=num_nodes,
        )


TORCHRUN = {"TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}
SLURM = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
SLURM |= {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "1", "SLURM_JOB_NAME": "tests"}


@pytest.mark.parametrize(
    ("known", "message"), [(TORCHRUN, r"does not match the world size \(4\)"), (SLURM, "Set `devices=4`")]
)
def test_numbers_that_an_environment_refuses_are_refused_as_ever(
    known: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="worker_groups=4 cannot split 2 processes"):
        fits.trainer(strategy=fits.strategy(worker_groups=4), devices=2)
    trainer = fits.trainer(strategy=fits.strategy(worker_groups=2), devices=2)
    with pytest.raises(ValueError, match=message):
        trainer.fit(Net(), DataLoader(fits.Batches(0, 0, 1), batch_size=None))


def test_processes_that_are_connected_and_of_which_the_trainer_knows_too_few_are_refused() -> None:
    def run(rank: int, world_size: int) -> None:
        trainer = fits.trainer(strategy=fits.strategy(), devices=1)
        with pytest.raises(ValueError, match="2 processes are connected, .* and the worker groups are made for 1"):
            trainer.fit(Net(), DataLoader(fits.Batches(rank, 0, 1), batch_size=None))

    run_ranks(run, 2)


# Further fits in the same processes


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """A small model."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = mlp() if net is None else net

    def training_step(self, parts: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(parts[0]), parts[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(rank: int, world_size: int, model: Any, groups: int = 2, **choices: Any) -> Any:
    """Fits a model with a new Trainer, and returns that."""
    size = world_size // groups
    strategy = fits.strategy(**SHORT, worker_groups=groups)
    length = {"max_epochs": 2, "limit_train_batches": BATCHES}
    trainer = fits.trainer(strategy=strategy, devices=world_size, **{**length, **choices})
    trainer.fit(model, DataLoader(fits.Batches(rank // size, rank % size, size), batch_size=None))
    return trainer


def assert_alike(ranks: list[dict[str, Tensor]]) -> None:
    for values in ranks[1:]:
        assert values.keys() == ranks[0].keys()
        assert all(torch.equal(values[name], ranks[0][name]) for name in values)


def test_the_same_trainer_fits_longer() -> None:
    def run(rank: int, world_size: int) -> Any:
        model = Net()
        trainer = fit(rank, world_size, model)
        before, first = trainer.strategy.outer_state_dict(), trainer.strategy.report()["inner_steps"]
        seen: list[bool] = []

        class Look(pl.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
                if not seen:
                    seen.extend(torch.equal(p, before[name]) for name, p in module.named_parameters())

        trainer.callbacks.append(Look())
        trainer.fit_loop.max_epochs = 5
        trainer.fit(model, DataLoader(fits.Batches(rank, 0, 1), batch_size=None))
        report = trainer.strategy.report()
        assert report["launches"] == report["landings"] > 0
        return first, report["inner_steps"], trainer.current_epoch, all(seen), trainer.strategy.outer_state_dict()

    ranks = run_processes(run, 2)
    assert [rank[:4] for rank in ranks] == [(2 * BATCHES, 3 * BATCHES, 5, True)] * 2
    assert_alike([rank[4] for rank in ranks])


def test_a_model_that_was_trained_is_trained_on_by_a_new_trainer_as_in_new_processes(tmp_path: Path) -> None:
    def together(rank: int, world_size: int) -> Any:
        model = Net()
        fit(rank, world_size, model)
        torch.save(model.state_dict(), tmp_path / f"{rank}.pt")
        return fit(rank, world_size, model).strategy.outer_state_dict()

    def apart(rank: int, world_size: int) -> Any:
        model = Net()
        model.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=True))
        return fit(rank, world_size, model).strategy.outer_state_dict()

    assert_alike([*run_processes(together, 2), *run_processes(apart, 2)])


def test_two_models_one_after_the_other_train_as_in_processes_of_their_own() -> None:
    def one(rank: int, world_size: int) -> Any:
        return fit(rank, world_size, Net()).strategy.outer_state_dict()

    def other(rank: int, world_size: int) -> Any:
        return fit(rank, world_size, Net(nn.Linear(5, 3).requires_grad_())).strategy.outer_state_dict()

    def both(rank: int, world_size: int) -> Any:
        return one(rank, world_size), other_of_seed(rank, world_size)

    def other_of_seed(rank: int, world_size: int) -> Any:
        torch.manual_seed(7)
        return other(rank, world_size)

    pairs = run_processes(both, 2)
    assert_alike([*(pair[0] for pair in pairs), *run_processes(one, 2)])
    assert_alike([*(pair[1] for pair in pairs), *run_processes(other_of_seed, 2)])


def test_trainers_with_different_numbers_of_groups_follow_each_other() -> None:
    numbers = (2, 4, 1, 2)

    def run(rank: int, world_size: int, groups: int | None = None) -> Any:
        trained = []
        for number in numbers if groups is None else (groups,):
            trainer = fit(rank, world_size, Net(), groups=number)
            assert trainer.strategy.topology.num_groups == number
            trained.append(trainer.strategy.outer_state_dict())
        return trained

    ranks = run_processes(run, 4)
    for index, number in enumerate(numbers):
        alone = run_processes(run, 4, number)
        assert_alike([*(rank[index] for rank in ranks), *(rank[0] for rank in alone)])

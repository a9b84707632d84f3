"""How a strategy saves and resumes: an ordinary checkpoint of the outer model, and a folder for what ranks hold."""

import logging
import uuid
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from torch import nn
from typing_extensions import override

from lightning_sdiloco.algorithm.settings import Settings
from lightning_sdiloco.comm.topology import Topology
from lightning_sdiloco.engine.engine import StreamingDiLoCo
from lightning_sdiloco.engine.parameters.naming import clean_name
from lightning_sdiloco.engine.restart import Restart, restart_from
from lightning_sdiloco.lightning.checkpoint import files
from lightning_sdiloco.lightning.checkpoint.placement import Placing
from lightning_sdiloco.lightning.choosing import Choosing
from lightning_sdiloco.lightning.host.logged_metrics import logged, take_up
from lightning_sdiloco.lightning.requests import Requests
from lightning_sdiloco.lightning.weight_averaging import Averaging

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object

_log = logging.getLogger(__name__)


class SavingMixin(_Base):
    """The checkpoints of a strategy. It reads what the strategy sets up and keeps only what was loaded."""

    _settings: Settings
    _choosing: Choosing
    _topology: Topology | None
    _engine: StreamingDiLoCo | None
    _requests: Requests | None
    _averaging: Averaging | None
    _failed: bool
    _on_resume: str
    _resumed: dict[str, Any] | None = None
    _restart: Restart | None = None
    _random_state: dict[str, Any] | None = None
    _standing: tuple[str, ...] = ()
    _placing: Placing | None = None

    @property
    def topology(self) -> Topology:
        """Worker groups and the ways between them; known when processes are connected."""
        assert self._topology is not None, "the process groups are made in setup_distributed"
        return self._topology

    @property
    def is_alone(self) -> bool:
        """Whether this rank ends with an exception and must not wait for others, which may be gone or elsewhere."""
        return self._failed and self._topology is not None and self._topology.world.size > 1

    @property
    def resumes_exactly(self) -> bool:
        """Whether the fit that is about to run goes on where its checkpoint was saved, with all that ranks held."""
        return self._resumed is not None

    def _resume(self) -> None:
        """Goes on where the loaded checkpoint was saved, if one was loaded."""
        assert self._engine is not None
        assert self._requests is not None
        if self._restart is not None:
            self._engine.restart(self._restart)
        if self._resumed is not None:
            self._engine.load_state_dict(self._resumed["engine"])
            self._requests.load_state_dict(self._resumed["requests"])
            self._random_state = self._resumed["random"]
            assert self.lightning_module is not None
            take_up(self.lightning_module.trainer, self._resumed["metrics"])
            if self._averaging is not None:
                self._averaging.load_state_dict(self._resumed["averaging"])
        if self._random_state is not None:
            files.set_random_state(self._random_state)
        self._forget_loaded()

    def _take_up_what_was_trainable(self, model: nn.Module) -> None:
        """Freezes and unfreezes as it was when the checkpoint was saved, which callbacks do not do on their own."""
        if self._resumed is not None:
            trainable = {name for fragment in self._resumed["engine"]["fragments"] for name in fragment["names"]}
        elif self._restart is not None and self._on_resume == "exact":
            trainable = set(self._restart.parameters)
        else:
            return
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(clean_name(name) in trainable)

    def _forget_loaded(self) -> None:
        self._resumed = self._restart = self._random_state = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._engine is None or "optimizer_states" not in checkpoint:
            self._write_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_alone:
            self._save_alone(checkpoint, str(filepath))
        else:
            self._save_with_all(checkpoint, filepath, storage_options)

    def _save_with_all(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        """See [Note: the order of a save]."""
        # Ranks may have made up different paths: requeued SLURM jobs count the files that they see.
        path, save = super().broadcast((str(filepath), uuid.uuid4().hex))
        older = files.saves(path) if self.is_global_zero else []
        entry = files.write_rank(path, save, self.global_rank, self._rank_state(checkpoint))
        # Gathering waits until all files are there.
        entries = self.topology.world.all_gather_object(entry)
        header = {
            "format": files.FORMAT,
            "save": save,
            "version": version("lightning-sdiloco"),
            **self._layout_and_settings(),
        }
        if self.is_global_zero:
            files.write_manifest(path, header, entries)
            self._placing = self._placing or Placing(self.checkpoint_io)
            self._placing.announce(save, [name for name in older if name != save])
        self._write_checkpoint({**checkpoint, files.KEY: header}, path, storage_options)
        self._note_standing(path)

    def _write_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        """Writes what all groups have in common. All ranks call it."""
        super().save_checkpoint(checkpoint, path, storage_options)

    def _save_alone(self, checkpoint: dict[str, Any], path: str) -> None:
        """After an exception no rank waits for another: what this one holds is kept, but is no checkpoint."""
        entry = files.write_rank(path, "exception", self.global_rank, self._rank_state(checkpoint))
        _log.warning(
            "After an exception this rank kept its own state in %s beside %s, which cannot be resumed: other ranks may"
            " be at another step. Resume from %s.",
            entry.name,
            path,
            self._standing[-1] if self._standing else "an earlier run's checkpoint: this run had saved none",
        )

    def _note_standing(self, path: str) -> None:
        self._standing = (*(other for other in self._standing if other != path), path)

    def _rank_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        assert self._engine is not None
        assert self._requests is not None
        assert self.lightning_module is not None
        return {
            "engine": self._engine.state_dict(),
            "requests": self._requests.state_dict(),
            "averaging": self._averaging.state_dict() if self._averaging is not None else None,
            "random": files.random_state(),
            "optimizer_states": self._own_optimizer_states(checkpoint),
            "metrics": logged(self.lightning_module.trainer),
            "precision": checkpoint.get(type(self.precision_plugin).__qualname__),
            "loader": checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader"),
        }

    def _own_optimizer_states(self, checkpoint: dict[str, Any]) -> list[Any]:
        """The state of the inner optimizers as this rank holds it."""
        states: list[Any] = checkpoint["optimizer_states"]
        return states

    def _layout_and_settings(self) -> dict[str, Any]:
        settings = self._choosing.described(self._settings.fixed_by_a_checkpoint())
        return {"layout": self._ranks_as_saved(), "settings": settings}

    def _ranks_as_saved(self) -> dict[str, int]:
        """What must be the same for ranks to take up their own files."""
        return {"worker_groups": self.topology.num_groups, "group_size": self.topology.group_size}

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = self._read_checkpoint(checkpoint_path, *args, **kwargs)
        header = checkpoint.get(files.KEY)
        assert self.lightning_module is not None
        if header is None or self.lightning_module.trainer.state.fn != "fit":
            return checkpoint
        if self._on_resume == "restart" or header["layout"] != self._ranks_as_saved():
            self._load_for_restart(checkpoint, str(checkpoint_path), header)
        else:
            self._require_the_settings_of(header)
            self._resumed = files.read_rank(str(checkpoint_path), header, self.global_rank)
            self._note_standing(str(checkpoint_path))
            self._take_up(checkpoint, self._resumed)
        return checkpoint

    def _read_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads what all groups have in common. All ranks call it."""
        return dict(super().load_checkpoint(path, *args, **kwargs))

    def _take_up(self, checkpoint: dict[str, Any], own: dict[str, Any]) -> None:
        """Puts what this rank saved in place of what rank 0 saved."""
        checkpoint["optimizer_states"] = own["optimizer_states"]
        precision = type(self.precision_plugin).__qualname__
        if own["loader"] is not None:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own["loader"]
        if own["precision"] is not None:
            checkpoint[precision] = own["precision"]

    def _start_optimizers_afresh(self, checkpoint: dict[str, Any]) -> None:
        # Without its state an optimizer keeps the learning rate at which the schedulers go on.
        checkpoint["optimizer_states"] = [{**state, "state": {}} for state in checkpoint["optimizer_states"]]

    def _require_the_settings_of(self, header: dict[str, Any]) -> None:
        self._settings = self._choosing.restored(self._settings, header["settings"])
        if other := self._other_settings(header):
            raise ValueError(
                f"The checkpoint cannot be resumed exactly with other settings: {'; '.join(other)}. Resume with those"
                " it was saved with, or start the rounds anew from its outer parameters with on_resume='restart'."
            )

    def _other_settings(self, header: dict[str, Any]) -> list[str]:
        return [
            f"{name} was {header['settings'].get(name)}, now it is {text}"
            for name, text in self._layout_and_settings()["settings"].items()
            if header["settings"].get(name) != text
        ]

    def _load_for_restart(self, checkpoint: dict[str, Any], path: str, header: dict[str, Any]) -> None:
        """Outer parameters and momentum for all groups; inner optimizer and random state for those that have a file."""
        if self._on_resume == "exact":
            self._require_the_settings_of(header)
        self._restart = self._as_rank_zero_reads(path, header)
        rank = self._rank_before(header)
        own = files.read_rank(path, header, rank) if rank is not None and files.has_rank(path, header, rank) else None
        if own is None:
            self._start_optimizers_afresh(checkpoint)
        else:
            same_data = header["layout"] == self._ranks_as_saved()
            self._take_up(checkpoint, own if same_data else {**own, "loader": None})
        if own is not None and self.topology.group_rank < header["layout"]["group_size"]:
            self._random_state = own["random"]
        self._say_what_restarts(header, own is not None)

    def _rank_before(self, header: dict[str, Any]) -> int | None:
        """The rank whose file this one takes up: that of its group and shard, or of the first of its group."""
        groups, size = header["layout"]["worker_groups"], header["layout"]["group_size"]
        if not self._holds_the_same_as(header["layout"]):
            return None
        shard = self.topology.group_rank if self.topology.group_rank < size else 0
        return self.topology.group_index * size + shard if self.topology.group_index < groups else None

    def _holds_the_same_as(self, layout: dict[str, int]) -> bool:
        """Whether the inner optimizer state of a rank that was saved is that of a rank here: whole, in all of them."""
        return layout.keys() == self._ranks_as_saved().keys()

    def _as_rank_zero_reads(self, path: str, header: dict[str, Any]) -> Restart:
        """Ranks may see different files, so one reads for all; what it cannot read is an error of all."""
        restart: Restart | ValueError | None = None
        if self.is_global_zero:
            same_optimizer = header["settings"].get("outer_optimizer") == self._settings.described()["outer_optimizer"]
            try:
                states = files.read_groups(path, header, ("counts", "fragments", "flights"))
                restart = restart_from(states, self._settings if same_optimizer else None)
            except Exception as error:
                # Whatever it is, the other ranks are waiting to hear of it.
                restart = error if isinstance(error, ValueError) else ValueError(f"{path} cannot be read: {error!r}")
        restart = super().broadcast(restart)
        if isinstance(restart, ValueError):
            raise restart
        assert restart is not None
        return restart

    def _say_what_restarts(self, header: dict[str, Any], has_file: bool) -> None:
        found = self.topology.world.all_gather_object(has_file)
        size = self.topology.group_size
        fresh = sorted({rank // size for rank, there in enumerate(found) if not there})
        if self.is_global_zero:
            assert self._restart is not None
            dropped = self._restart.counts["flights_dropped"]
            _log.warning(
                "The checkpoint is not resumed exactly: it was saved with %s, now there are %s%s. Every group starts"
                " from its outer parameters and outer momentum, and the rounds begin anew. Flights lost so far: %d."
                " Worker groups that begin with a fresh inner optimizer: %s.",
                header["layout"],
                self._ranks_as_saved(),
                "".join(f"; {other}" for other in self._other_settings(header)),
                dropped,
                ", ".join(map(str, fresh)) or "none",
            )

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._standing = tuple(other for other in self._standing if other != str(filepath))
        if not self.is_global_zero:
            return
        if self._placing is not None:
            self._placing.remove(str(filepath), super().remove_checkpoint)
        else:
            super().remove_checkpoint(filepath)
            files.remove_folder(str(filepath))

    @override
    def teardown(self) -> None:
        try:
            # Waits for a thread that still writes.
            super().teardown()
        finally:
            if self._placing is not None:
                self._placing.close()
                self._placing = None

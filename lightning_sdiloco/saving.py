"""How a strategy saves and resumes: an ordinary checkpoint of the outer model, and a folder for what ranks hold."""

import logging
import uuid
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_sdiloco import checkpoint as files
from lightning_sdiloco.engine import StreamingDiLoCo
from lightning_sdiloco.placing import Placing
from lightning_sdiloco.requests import Requests
from lightning_sdiloco.settings import Settings
from lightning_sdiloco.topology import Topology

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

_log = logging.getLogger(__name__)


class SavingMixin(_Base):
    """The checkpoints of a strategy. It reads what the strategy sets up and keeps only what was loaded."""

    _settings: Settings
    _topology: Topology | None
    _engine: StreamingDiLoCo | None
    _requests: Requests | None
    _failed: bool
    _resumed: dict[str, Any] | None = None
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

    def _resume(self) -> None:
        """Goes on where the loaded checkpoint was saved, if one was loaded."""
        if self._resumed is not None and self._engine is not None and self._requests is not None:
            self._engine.load_state_dict(self._resumed["engine"])
            self._requests.load_state_dict(self._resumed["requests"])
            files.set_random_state(self._resumed["random"])
            self._resumed = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._engine is None or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
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
        entries = self.topology.world.gather_objects(entry)
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
        super().save_checkpoint({**checkpoint, files.KEY: header}, path, storage_options)
        self._note_standing(path)

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
        return {
            "engine": self._engine.state_dict(),
            "requests": self._requests.state_dict(),
            "random": files.random_state(),
            "optimizer_states": checkpoint["optimizer_states"],
            "precision": checkpoint.get(type(self.precision_plugin).__qualname__),
            "loader": checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader"),
        }

    def _layout_and_settings(self) -> dict[str, Any]:
        topology = self.topology
        layout = {"worker_groups": topology.groups, "group_size": topology.shards}
        return {"layout": layout, "settings": self._settings.fixed_by_a_checkpoint()}

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        header = checkpoint.get(files.KEY)
        assert self.lightning_module is not None
        if header is not None and self.lightning_module.trainer.state.fn == "fit" and self._fits(header):
            own = files.read_rank(str(checkpoint_path), header, self.global_rank)
            self._note_standing(str(checkpoint_path))
            self._resumed = own
            checkpoint["optimizer_states"] = own["optimizer_states"]
            if own["loader"] is not None:
                checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own["loader"]
            if own["precision"] is not None:
                checkpoint[type(self.precision_plugin).__qualname__] = own["precision"]
        return dict(checkpoint)

    def _fits(self, header: dict[str, Any]) -> bool:
        """Whether a checkpoint can be resumed exactly here. Refuses other settings."""
        here = self._layout_and_settings()
        other = [
            f"{name} was {header['settings'].get(name)}, now it is {text}"
            for name, text in here["settings"].items()
            if header["settings"].get(name) != text
        ]
        if other:
            raise ValueError(
                f"The checkpoint cannot be resumed exactly with other settings: {'; '.join(other)}. Resume with those"
                " it was saved with, or start a new fit from its weights with LightningModule.load_from_checkpoint."
            )
        if header["layout"] != here["layout"] and self.is_global_zero:
            _log.warning(
                "The checkpoint was saved with %s, now there are %s. All groups start from its outer parameters; outer"
                " momentum and what was in flight are lost, and every rank takes rank 0's inner optimizer state.",
                header["layout"],
                here["layout"],
            )
        return bool(header["layout"] == here["layout"])

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

"""How a checkpoint file takes its place: in one step, and only then are the folders of earlier saves removed.

[Note: late writers] `AsyncCheckpointIO` hands a checkpoint to a thread and returns. Until the thread has written it,
the file in its place is an older one, which needs its own folder. So what follows the writing is done by the
CheckpointIO that really writes, in whatever thread that is.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any

from lightning_sdiloco.engine import files
from lightning_sdiloco.lightning.host.patching import replace


class Placing:
    """Replaces the saving of a strategy's innermost CheckpointIO until it is closed; see [Note: late writers]."""

    def __init__(self, io: Any) -> None:
        while getattr(io, "checkpoint_io", None) is not None:
            io = io.checkpoint_io
        self._io = io
        self._write: Callable[..., None] = io.save_checkpoint
        self._older: dict[str, tuple[Sequence[str], Sequence[str]]] = {}
        self._lock = Lock()
        self._afterwards: dict[str, list[Callable[[], None]]] = {}
        self._undo = ExitStack()
        replace(self._undo, io, "save_checkpoint", self._save)

    def close(self) -> None:
        """Restores the CheckpointIO as it was."""
        self._undo.close()

    def announce(self, save: str, older: Sequence[str], replaced: Sequence[str] = ()) -> None:
        """Announces a save that is about to be handed to the CheckpointIO."""
        self._older[save] = older, replaced

    def is_placed(self, save: str, path: str) -> None:
        """Removes what was announced with a save, whose checkpoint no CheckpointIO has written."""
        _remove_older(path, *self._older.pop(save, ((), ())))

    def remove(self, path: str, remove: Callable[[str], None]) -> None:
        """Removes a checkpoint file and its folder; if a thread is just writing them, as soon as they are written."""
        with self._lock:
            if path in self._afterwards:
                self._afterwards[path].append(partial(self.remove, path, remove))
            else:
                remove(path)
                files.remove_folder(path)

    def _save(self, checkpoint: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> None:
        save = checkpoint.get(files.KEY, {}).get("save")
        if save not in self._older:
            self._write(checkpoint, path, *args, **kwargs)
            return
        older = self._older.pop(save)
        with self._lock:
            if not files.is_whole(path, save):
                return  # It was removed before its turn came.
            self._afterwards[path] = []
        before = files.fingerprint(path)
        try:
            self._place(checkpoint, path, save, *args, **kwargs)
        finally:
            with self._lock:
                removals = self._afterwards.pop(path)
        if files.fingerprint(path) != before:
            _remove_older(path, *older)
        for removal in removals:
            removal()

    def _place(self, checkpoint: dict[str, Any], path: str, save: str, *args: Any, **kwargs: Any) -> None:
        # Lightning's own CheckpointIO moves the file from the system's temporary folder. If that is on another file
        # system, this copies over the old file, which is then neither the old nor the new one for a while.
        part = files.beside(path, save) if type(self._io).__name__ == "TorchCheckpointIO" else None
        self._write(checkpoint, part or path, *args, **kwargs)
        if part is not None:
            files.take_place(part, path)


def _remove_older(path: str, saves: Sequence[str], replaced: Sequence[str]) -> None:
    files.remove_saves(path, saves)
    for other in replaced:
        files.remove_folder(other)

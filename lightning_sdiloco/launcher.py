"""Brings what users read of a strategy back from the processes that a fit was launched in."""

import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from lightning_sdiloco.partition import Fragment
from lightning_sdiloco.summary import Summary

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as _Base
else:
    _Base = object

_KEY = "streaming_diloco"


class SummaryMixin(_Base):
    """A launcher that starts processes by spawn or fork, and returns the summary of rank 0 to the main process."""

    @override
    def _wrapping_function(
        self, process_idx: int, trainer: Any, function: Any, args: Any, kwargs: Any, *rest: Any
    ) -> None:
        if self._start_method == "forkserver":
            # Tensors that are sent to a process share their memory, and ranks on one host would train the same
            # parameters. Lightning itself does this for spawn only.
            for module in (part for part in (*args, *kwargs.values()) if isinstance(part, nn.Module)):
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.data = tensor.data.clone()
        super()._wrapping_function(process_idx, trainer, function, args, kwargs, *rest)

    @override
    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        extra = super().get_extra_results(trainer)
        summary = trainer.strategy.summary()
        return extra if summary is None else {**extra, _KEY: summary_to_bytes(summary)}

    @override
    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        if _KEY in extra:
            trainer.strategy.read_summary(summary_from_bytes(extra[_KEY]))


def summary_to_bytes(summary: Summary) -> bytes:
    """Writes a summary as bytes: tensors must not travel as handles to shared memory."""
    plain = {
        "fragments": [asdict(fragment) for fragment in summary.fragments],
        "outer": summary.outer,
        "counts": summary.counts,
    }
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def summary_from_bytes(data: bytes) -> Summary:
    """Reads a summary back."""
    plain = torch.load(io.BytesIO(data), weights_only=True)
    return Summary(
        fragments=tuple(Fragment(tuple(f["names"]), tuple(f["sizes"])) for f in plain["fragments"]),
        outer=plain["outer"],
        counts=plain["counts"],
    )

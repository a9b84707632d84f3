"""Replaces, for the time of a fit, what Lightning itself does over the whole world on every batch.

[Note: silence between launches] Lightning broadcasts over all ranks before every batch whether rank 0 was terminated,
and after every batch whether a time limit or a checkpoint's time interval has passed. Each would make every worker
group wait for the slowest at every step. Here these decisions travel in the control vector of the next launch instead,
and all ranks act on them after the same inner step, when that launch lands.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_sdiloco.requests import MOST_CHECKPOINTS, Request

if TYPE_CHECKING:
    from lightning_sdiloco.strategy import StreamingDiLoCoMixin


def silence(trainer: Any, strategy: "StreamingDiLoCoMixin") -> ExitStack:
    """Makes the replacements; see [Note: silence between launches].

    Args:
        trainer: The trainer that is about to fit.
        strategy: Its strategy.

    Returns:
        What undoes them, with ``close()``.

    Raises:
        ValueError: If there are more checkpoint callbacks with a time interval than a control vector has bits.
    """
    undo = ExitStack()
    if hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
        _replace(undo, trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
    _replace(undo, trainer._signal_connector, "_sigterm_notifier_fn", partial(_on_sigterm, trainer, strategy))
    for timer in _those_with(trainer, "_check_time_remaining"):
        original = timer._check_time_remaining
        _replace(undo, timer, "_check_time_remaining", partial(_check_time, timer, original, strategy))
    checkpoints = [c for c in _those_with(trainer, "_train_time_interval") if c._train_time_interval is not None]
    if len(checkpoints) > MOST_CHECKPOINTS:
        raise ValueError(
            f"{len(checkpoints)} ModelCheckpoint callbacks have a train_time_interval; worker groups can agree on at"
            f" most {MOST_CHECKPOINTS}. Use every_n_train_steps in some of them."
        )
    for index, checkpoint in enumerate(checkpoints):
        hook = partial(strategy.decide_checkpoint, index, checkpoint.on_train_batch_end)
        _replace(undo, checkpoint, "on_train_batch_end", hook)
    if trainer.progress_bar_callback is not None:
        bar = trainer.progress_bar_callback
        _replace(undo, bar, "get_metrics", partial(_progress, bar.get_metrics, strategy))
    return undo


def _those_with(trainer: Any, name: str) -> list[Any]:
    return [callback for callback in trainer.callbacks if hasattr(callback, name)]


def _replace(undo: ExitStack, target: Any, name: str, value: Callable[..., Any]) -> None:
    setattr(target, name, value)
    undo.callback(target.__dict__.pop, name, None)


def _on_sigterm(trainer: Any, strategy: "StreamingDiLoCoMixin", signum: int, frame: Any) -> None:
    if not strategy.is_training:
        trainer._signal_connector.received_sigterm = True
    elif strategy.launcher is not None and not strategy.asked(Request.TERMINATE):
        strategy.launcher.kill(signum)
    strategy.ask(Request.TERMINATE)


def _check_time(timer: Any, original: Callable[[Any], None], strategy: "StreamingDiLoCoMixin", trainer: Any) -> None:
    if not strategy.in_batch:
        original(trainer)
    elif timer.time_elapsed() >= timer._duration:
        strategy.ask(Request.TIME_LIMIT)


def _progress(original: Callable[..., dict[str, Any]], strategy: "StreamingDiLoCoMixin", *args: Any) -> dict[str, Any]:
    """The metrics of a progress bar, with the outer step and the fragments in flight."""
    return {**original(*args), **strategy.progress()}

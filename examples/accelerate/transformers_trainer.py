"""Streaming DiLoCo in the Trainer of transformers: a callback, and one line for which the Trainer
has no hook.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from lightning_sdiloco import StreamingDiLoCo


class StreamingDiLoCoCallback(TrainerCallback):
    """Makes every step of a Trainer an inner step, with one worker group per process.

    Args:
        trainer: The trainer, which must not have started training.
        resume_from: The checkpoint folder that is passed to
            ``trainer.train(resume_from_checkpoint=...)``.
        **settings: Arguments of `StreamingDiLoCo`.
    """

    def __init__(self, trainer: Trainer, resume_from: str | None = None, **settings: Any) -> None:
        self.resume_from = resume_from
        self.settings = settings
        # The context that shows the outer model, or the mean of the groups; None while neither is
        # shown.
        self.shown = ExitStack()
        # Before any hook runs, the Trainer wraps the model over all ranks, except for evaluation.
        prepare = trainer.accelerator.prepare_model
        trainer.accelerator.prepare_model = partial(prepare, evaluation_mode=True)
        # Otherwise, it would communicate with all ranks in every step, and worker groups would wait
        # for each other.
        trainer.args.average_tokens_across_devices = False
        # Some losses, such as those of TRL, also gather in every step. Within a group of one
        # process, they get only its own values.
        self.in_step = False
        for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes"):
            over_all = getattr(trainer.accelerator, name)
            setattr(trainer.accelerator, name, partial(self._in_group, over_all))

    def _in_group(
        self, over_all: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return tensor if self.in_step else over_all(tensor, *args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        optimizer = kwargs["optimizer"]
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        others = stepped - set(model.parameters())
        if others:
            raise ValueError(
                f"The optimizer steps {len(others)} parameters that are not the model's, such as"
                " those of a loss. Each group would train its own: put them into the model, or use"
                " a loss without parameters."
            )
        self.engine = StreamingDiLoCo(model, inner_optimizers=[optimizer], **self.settings)
        if self.resume_from is not None:
            self.engine.load(Path(self.resume_from) / "engine.ckpt")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.shown.close()
        self.in_step = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.in_step = False
        self.engine.step()
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_evaluate or control.should_save:
            # Evaluation and checkpoints use the model that all groups agree on, or the mean of the
            # groups until there is one.
            mean = None if self.engine.has_landed else self.engine.group_mean()
            self.shown.enter_context(self.engine.evaluate(mean))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.engine.save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / "engine.ckpt")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # If the best checkpoint was requested, it is already loaded, and the end of training must
        # not replace it.
        has_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        best = (
            {name: values.clone() for name, values in kwargs["model"].state_dict().items()}
            if has_best
            else None
        )
        self.shown.close()
        self.engine.finish()
        if best is not None:
            kwargs["model"].load_state_dict(best)

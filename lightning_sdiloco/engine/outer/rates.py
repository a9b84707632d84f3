"""The outer learning rate of every round: what a torch scheduler makes of the outer optimizer's hyperparameters."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

Make = Callable[[Optimizer], LRScheduler]
Groups = list[dict[str, Any]]

# Schedules are compared by what they do in so many rounds.
_COMPARED = 1000
_SHOWN = 4


class Rates:
    """Looks up the hyperparameters of the outer optimizer, round by round.

    They are looked up rather than stepped through, because the fragments of a round step one after the other.

    Args:
        optimizer: The outer optimizer. It is only read.
        make: From an optimizer to a torch scheduler, which is stepped once a round; None: nothing changes.

    Raises:
        ValueError: If ``make`` returns something that is no scheduler, or one that needs more than the count of rounds.

    Examples:
        >>> from torch.optim.lr_scheduler import LinearLR
        >>> sgd = torch.optim.SGD([torch.zeros(3)], lr=0.4)
        >>> warm_up = Rates(sgd, lambda optimizer: LinearLR(optimizer, start_factor=0.25, total_iters=3))
        >>> [warm_up.of(number)[0]["lr"] for number in (0, 1, 2, 3, 1)]
        [0.1, 0.2, 0.30000000000000004, 0.4, 0.2]
    """

    def __init__(self, optimizer: Optimizer, make: Make | None) -> None:
        self._carrier = _Carrier(optimizer)
        self._scheduler = None if make is None else _made(make, self._carrier)
        self._rounds = [self._carrier.hyperparameters()]
        if self._scheduler is not None:
            self._try_one_round(self._scheduler)
        # Once, at the start: from then on rounds are looked up in the background only.
        self._text = self._describe()

    def of(self, number: int) -> Groups:
        """Returns the hyperparameters of every parameter group in a round, counted from 0."""
        if self._scheduler is None:
            return self._rounds[0]
        while len(self._rounds) <= number:
            self._advance(self._scheduler)
        return self._rounds[number]

    def described(self) -> str:
        """Describes the schedule by a text that is the same on all ranks if and only if its first rounds are."""
        return self._text

    def _describe(self) -> str:
        if self._scheduler is None:
            return "None"
        values = [_values(groups) for groups in self._first_rounds()]
        seal = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
        shown = ", ".join(str(groups[0][0]) for groups in values[:_SHOWN])
        return f"{type(self._scheduler).__name__} ({shown}, ...; {len(values)} rounds: {seal})"

    def _first_rounds(self) -> list[Groups]:
        # Some end before, such as OneCycleLR: then the rounds that they have are compared.
        with suppress(ValueError):
            self.of(_COMPARED - 1)
        return self._rounds[:_COMPARED]

    def _try_one_round(self, scheduler: LRScheduler) -> None:
        try:
            scheduler.step()
        except Exception as error:
            raise _unusable(scheduler, f"cannot be stepped by the count of rounds alone: {error}") from error
        self._rounds.append(self._carrier.hyperparameters())

    def _advance(self, scheduler: LRScheduler) -> None:
        try:
            scheduler.step()
        except Exception as error:
            raise ValueError(
                f"outer_lr_schedule has no rate for round {len(self._rounds)}, counted from 0: {error}. Give the"
                f" {type(scheduler).__name__} as many rounds as the training has, or choose one that does not end."
            ) from error
        self._rounds.append(self._carrier.hyperparameters())


class _Carrier(Optimizer):
    """Carries hyperparameters, for a scheduler to change them."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [{**_copied(group), "params": [Parameter(torch.empty(0))]} for group in optimizer.param_groups]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: there is nothing to step."""

    def hyperparameters(self) -> Groups:
        return [_copied(group) for group in self.param_groups]


def _made(make: Make, carrier: _Carrier) -> LRScheduler:
    try:
        scheduler = make(carrier)
    except Exception as error:
        raise ValueError(
            f"outer_lr_schedule could not make a scheduler of the outer optimizer: {error}. It is called with the"
            " optimizer alone and must return a torch scheduler; bind its other arguments with functools.partial."
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise _unusable(scheduler, "is no torch.optim.lr_scheduler.LRScheduler")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise _unusable(scheduler, "needs a metric, which an outer step does not have")
    if scheduler.optimizer is not carrier:
        raise _unusable(scheduler, "schedules another optimizer than the one that it was given")
    # Schedulers warn if their optimizer has not stepped before them.
    carrier.step()
    return scheduler


def _unusable(scheduler: Any, reason: str) -> ValueError:
    return ValueError(
        f"outer_lr_schedule made a {type(scheduler).__name__}, which {reason}. Give a callable from an optimizer to a"
        " scheduler that counts rounds: functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=50) is one."
    )


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """Copies the hyperparameters of a parameter group. A scheduler changes tensors in place."""
    values = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}


def _values(groups: Groups) -> list[Sequence[Any]]:
    """Returns what torch's schedulers change in each group, as plain numbers."""
    return [[_number(group.get(key)) for key in ("lr", "momentum", "betas")] for group in groups]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value

"""What a user can choose: the arguments that the strategies and the engine share, checked in one place.

``outer_lr``, ``outer_momentum`` and ``mixing`` may be ``"auto"``; see `recommended`.
"""

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from numbers import Number
from typing import Any, Literal, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sdiloco.algorithm.gossip import Everyone, Route, check_compression
from lightning_sdiloco.algorithm.merge import LandingRule, Mix
from lightning_sdiloco.algorithm.partition import check_fragments
from lightning_sdiloco.algorithm.reduce import TwoShot, check_exchange
from lightning_sdiloco.algorithm.schedule import Every, Pace
from lightning_sdiloco.algorithm.weighting import Aggregation, Weighing
from lightning_sdiloco.compression import Compression, resolve

OuterOptimizer = Callable[[Iterable[Any]], Optimizer]
"""Takes the flat float32 shards, one per fragment, and returns a torch optimizer."""

OuterLRSchedule = Callable[[Optimizer], LRScheduler]
"""Takes the outer optimizer and returns a torch scheduler that is stepped once a round."""

DEFAULT_TIMEOUT = timedelta(minutes=30)

AUTO: Literal["auto"] = "auto"
"""Stands for what is chosen: here, or by the planner."""

OVERLAP_STEPS = (1, 2, 3, 4, 5, 10)
"""Those worth a try. The paper saw next to no loss from up to the last one, and little gain from more than five."""

SPARSE = 1 / 16
"""The largest share of the values that a group sends at a time if the compression counts as sparse."""

SPARSE_GAINS = (1.0, 3.2)
"""Between these a sparse compression needs ``outer_lr / (1 - outer_momentum)``: measured with 1/64 of the values."""

SENDERS_GAINS = (0.4, 2.0)
"""The same with a mean over the senders of a value: from the rates of SparseLoCo's code to twice the larger one."""


class OuterStep(NamedTuple):
    """What the outer step and the landing after it do."""

    outer_lr: float
    outer_momentum: float
    mixing: float


def recommended(is_sparse: bool = False, over_senders: bool = False) -> OuterStep:
    """Returns what suits the compression; see docs/choosing.md for what was measured.

    One choice serves all numbers of groups and all ``sync_every``: with two, four and eight groups nothing that was
    tried was clearly better.

    Where each group sends few values of its own choice and the others wait in its error feedback, that is a momentum
    already, so there is no other one. The mean divides by all groups what one of them has sent, and the progress that
    they have in common arrives once from each, a little at a time. Where the mean is that of the senders, a value
    arrives whole, and needs a smaller rate: that of SparseLoCo (arXiv 2508.15706), whose code takes this mean.

    Args:
        is_sparse: Whether each group sends few values of its own choice, and remembers the others.
        over_senders: Whether the mean of a value is that of the groups that sent it.

    Examples:
        >>> recommended().outer_momentum, recommended(is_sparse=True).outer_momentum
        (0.9, 0.0)
    """
    if is_sparse:
        return OuterStep(1.0 if over_senders else 2.0, 0.0, 0.2)
    return OuterStep(0.7, 0.9, 0.2)


# A run that is resumed with other values of these trains on exactly as before, up to its end.
_MAY_CHANGE = ("final_sync", "offload", "timeout", "warmup_steps")

# The settings of the Nesterov SGD that outer_optimizer replaces.
_OF_SGD = ("outer_lr", "outer_momentum")

# What says how much a group counts, if no weighing does.
_OF_AGGREGATION = ("outer_clip_norm", "outlier_guard")

# What does not go with a route on which each group holds outer parameters of its own, and why.
_NOT_WITH_GOSSIP = {
    "schedule": "a pace hears of all groups, and here partners alone know of each other",
    "weighing": "a leg takes the plain mean of where its groups are, not of what they trained",
    "outer_clip_norm": "where a group is cannot be clipped",
    "outlier_guard": "partners alone know of each other's norms",
    "final_sync": "without a last mean, every group would end with a model of its own",
}

_POLICIES = {"schedule": Pace, "weighing": Weighing, "route": Route, "mixing": LandingRule}


@dataclass(frozen=True)
class Settings:
    """The choices of a run. Every argument is described in `StreamingDiLoCo`.

    Raises:
        ValueError: If an argument is out of its range. The message names the argument.

    Examples:
        >>> Settings(sync_every=100, overlap_steps=100)
        Traceback (most recent call last):
        ...
        ValueError: overlap_steps=100 is out of range: it must be at least 0 and below sync_every, which is 100. ...
    """

    sync_every: int = 100
    overlap_steps: int = 5
    mixing: float | Literal["auto"] | LandingRule = AUTO
    fragments: str | Sequence[Sequence[str]] = "strided"
    layers_per_fragment: int = 3
    compression: str | Compression = "fp4"
    exchange: str | TwoShot = "auto"
    outer_lr: float | Literal["auto"] = AUTO
    outer_momentum: float | Literal["auto"] = AUTO
    outer_optimizer: OuterOptimizer | None = None
    outer_lr_schedule: OuterLRSchedule | None = None
    outer_clip_norm: float | None = None
    outlier_guard: float | None = None
    warmup_steps: int = 0
    final_sync: bool = True
    offload: bool | str = "auto"
    timeout: timedelta = DEFAULT_TIMEOUT
    schedule: Pace | None = None
    weighing: Weighing | None = None
    route: Route | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            # A scalar of numpy is compared between ranks, and saved, as the number that it is.
            object.__setattr__(self, name, _plain(getattr(self, name)))
        check_exchange(self.exchange, self.codec)
        check_fragments(self.fragments)
        self._check_ranges()
        self._check_outer_optimizer()
        self._check_policies()
        if not self.shares:
            self._check_gossip()

    def _check_ranges(self) -> None:
        def require(name: str, rule: Callable[[Any], bool], says: str, advice: str = "'auto' is the default") -> None:
            value = getattr(self, name)
            if not rule(value):
                raise ValueError(f"{name}={value!r} is {_fault(name, value)}: {says}. Choose another {name}; {advice}.")

        def whole(name: str, least: int, advice: str) -> None:
            says = f"it must be a whole number of at least {least}"
            require(name, lambda value: is_whole(value) and value >= least, says, advice)

        whole("sync_every", 1, "100 is the paper's choice")
        whole("warmup_steps", 0, "0 is the default")
        whole("layers_per_fragment", 1, "3 is the paper's choice")
        require(
            "overlap_steps",
            lambda steps: is_whole(steps) and 0 <= steps < self.sync_every,
            f"it must be at least 0 and below sync_every, which is {self.sync_every}",
            f"the paper saw next to no loss from up to {OVERLAP_STEPS[-1]}",
        )
        require("outer_lr", lambda lr: lr == AUTO or (is_number(lr) and lr >= 0), "it must be at least 0, or 'auto'")
        require(
            "outer_momentum",
            lambda momentum: momentum == AUTO or (is_number(momentum) and 0 <= momentum < 1),
            "it must be at least 0 and below 1, or 'auto'",
        )
        require(
            "mixing",
            lambda kept: kept == AUTO or isinstance(kept, LandingRule) or (is_number(kept) and 0 <= kept <= 1),
            "it must be between 0 and 1, 'auto', or a LandingRule",
        )
        require(
            "outer_lr_schedule",
            lambda make: make is None or callable(make),
            "it must be a callable from an optimizer to a torch scheduler, or None",
            "functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=50) is one",
        )
        require(
            "outer_clip_norm",
            # As for torch, inf measures norms and clips none.
            lambda norm: norm in (None, math.inf) or (is_number(norm) and norm > 0),
            "it must be a number above 0, or None",
            "the norms that are logged as sdiloco/outer_grad_norm tell what is usual",
        )
        require(
            "outlier_guard",
            lambda times: times is None or (is_number(times) and times > 1),
            "it must be a number above 1, or None",
            "5.0 leaves out what is five times as long as usual",
        )
        require("final_sync", lambda on: isinstance(on, bool), "it must be True or False", "True is the default")
        require("offload", lambda on: on == AUTO or isinstance(on, bool), "it must be True, False or 'auto'")
        require(
            "timeout",
            lambda timeout: isinstance(timeout, timedelta) and timeout > timedelta(0),
            "it must be a positive timedelta",
            f"datetime.timedelta(seconds={self.timeout}) is so many seconds"
            if is_number(self.timeout)
            else "datetime.timedelta(minutes=30) is the default",
        )

    def _check_outer_optimizer(self) -> None:
        if self.outer_optimizer is None:
            return
        if not callable(self.outer_optimizer):
            kind = type(self.outer_optimizer).__name__
            made = isinstance(self.outer_optimizer, Optimizer)
            raise ValueError(
                f"outer_optimizer of type {kind} is {'already an optimizer' if made else 'nothing that can be called'}:"
                " it must be a callable from the flat float32 shards, which are known only when a fit starts, to a"
                " torch optimizer. Choose one such as functools.partial(torch.optim.SGD, lr=0.7)."
            )
        if both := [name for name in _OF_SGD if getattr(self, name) != AUTO]:
            given = " and ".join(f"{name}={getattr(self, name)}" for name in both)
            raise ValueError(
                f"outer_optimizer was given together with {given}. They configure the built-in Nesterov SGD, which"
                f" outer_optimizer replaces. Leave out {' and '.join(both)}, and set the values in outer_optimizer."
            )

    def _check_policies(self) -> None:
        for name, kind in _POLICIES.items():
            policy = getattr(self, name)
            if name != "mixing" and not (policy is None or isinstance(policy, kind)):
                raise ValueError(f"{name}={policy!r} is no {kind.__name__}. Give one, or leave {name} out.")
            if isinstance(policy, kind) and not is_dataclass(policy):
                raise ValueError(
                    f"{name}={policy!r} is no dataclass, so ranks cannot tell whether all have the same one. Make"
                    f" {type(policy).__name__} a frozen dataclass."
                )
        both = [name for name in _OF_AGGREGATION if getattr(self, name) is not None]
        if self.weighing is not None and both:
            raise ValueError(
                f"weighing={self.weighing!r} was given together with {' and '.join(both)}, which say how much a group"
                f" counts too. Leave out {' and '.join(both)}, or weighing."
            )

    def _check_gossip(self) -> None:
        """Refuses what does not go with outer parameters of their own in every group."""
        for name, why in _NOT_WITH_GOSSIP.items():
            if (given := getattr(self, name)) is not None and given is not True and given != AUTO:
                raise ValueError(
                    f"{name}={given!r} does not go with route={self.route!r}, on which each group holds outer"
                    f" parameters of its own: {why}. Leave {name} out, or route."
                )
        if self.exchange == "two_shot" or isinstance(self.exchange, TwoShot):
            raise ValueError(
                f"exchange={self.exchange!r} does not go with route={self.route!r}: in a leg each group sends its"
                " partners whole fragments, once. Leave exchange out."
            )
        check_compression(self.compression)

    @property
    def routing(self) -> Route:
        """What decides who exchanges with whom."""
        return self.route or Everyone()

    @property
    def shares(self) -> bool:
        """Whether all groups hold the same outer parameters."""
        return self.routing.shared

    @property
    def exchange_in_rounds(self) -> str | TwoShot:
        """The exchange of outer gradients: in a leg each group sends its partners whole fragments."""
        return self.exchange if self.shares else "gather"

    @property
    def pace(self) -> Pace:
        """What decides when fragments launch."""
        return self.schedule or Every()

    @property
    def aggregation(self) -> Weighing:
        """What decides how much each group counts."""
        return self.weighing or Aggregation(self.outer_clip_norm, self.outlier_guard)

    @property
    def landing(self) -> LandingRule:
        """How a group takes the outer parameters in. Not where ``mixing`` is still ``"auto"``."""
        return self.mixing if isinstance(self.mixing, LandingRule) else Mix(float(self.mixing))

    @staticmethod
    def among(arguments: Mapping[str, Any]) -> "Settings":
        """Makes the settings from their arguments among others."""
        return Settings(**{choice.name: arguments[choice.name] for choice in fields(Settings)})

    @property
    def codec(self) -> Compression:
        """The compression itself, even if it was given by name."""
        return resolve(self.compression)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of outer step and landing, as far as they are chosen: by name, as in `OuterStep`."""
        values = {name: getattr(self, name) for name in OuterStep._fields}
        return {name: value for name, value in values.items() if value != AUTO and not isinstance(value, LandingRule)}

    @property
    def numbers_and_policies(self) -> dict[str, float | str]:
        """What `numbers` returns, and the policies that were given, as text."""
        given = {name: getattr(self, name) for name in ("mixing", "schedule", "weighing", "route")}
        return {**self.numbers, **{name: repr(one) for name, one in given.items() if isinstance(one, _POLICIES[name])}}

    def chosen_for(self, num_groups: int) -> "Settings":
        """Returns the settings with numbers in place of ``"auto"``: those that `recommended` returns.

        Args:
            num_groups: Number of worker groups.

        Examples:
            >>> Settings(outer_lr=0.9).chosen_for(num_groups=2).outer_lr
            0.9
        """
        if self.routing.momentum(num_groups) is not None:
            wanted = {"outer_lr": 1, "outer_momentum": 0, "outer_optimizer": None, "outer_lr_schedule": None}
            for name, own in wanted.items():
                if (value := getattr(self, name)) not in (AUTO, own):
                    raise ValueError(
                        f"{name}={value!r} does not go with route={self.route!r}, whose momentum takes the place of an"
                        f" outer step: outer_lr is 1 and outer_momentum 0. Leave {name} out."
                    )
            mixing = recommended().mixing if self.mixing == AUTO else self.mixing
            return replace(self, outer_lr=1.0, outer_momentum=0.0, mixing=mixing)
        is_sparse = self._is_sparse and self.outer_momentum in (AUTO, 0)
        suits = recommended(is_sparse, self.codec.counts_senders())
        return replace(self, **{name: getattr(suits, name) for name in self._left_open})

    def taken_from(self, saved: Mapping[str, str]) -> "Settings":
        """Returns the settings with the numbers of a checkpoint in place of ``"auto"``."""
        # A landing rule cannot be read from text: what is compared afterwards tells that it is another one.
        texts = {name: saved.get(name, repr(AUTO)) for name in self._left_open}
        return replace(self, **{name: ast.literal_eval(text) for name, text in texts.items() if text[-1] != ")"})

    def with_outer_step_of(self, given: "Settings") -> "Settings":
        """Returns the settings with rate, momentum and mixing of others: numbers or ``"auto"``."""
        return replace(self, **{name: getattr(given, name) for name in OuterStep._fields})

    @property
    def _left_open(self) -> list[str]:
        names = ("mixing",) if self.outer_optimizer is not None else OuterStep._fields
        return [name for name in names if getattr(self, name) == AUTO]

    @property
    def _is_sparse(self) -> bool:
        return self.codec.remembers() and self.codec.chosen_share() <= SPARSE

    def better_for_sparse(self, num_groups: int) -> dict[str, float]:
        """Returns what to choose in place of numbers that are known not to suit a sparse compression."""
        if not self._is_sparse or self.outer_optimizer is not None:
            return {}
        chosen, (least, most) = self.chosen_for(num_groups).numbers, self.gains_for_sparse
        if least <= chosen["outer_lr"] / (1 - chosen["outer_momentum"]) <= most:
            return {}
        suits = recommended(True, self.codec.counts_senders())
        return {name: getattr(suits, name) for name in _OF_SGD}

    @property
    def gains_for_sparse(self) -> tuple[float, float]:
        """Between what a sparse compression needs ``outer_lr / (1 - outer_momentum)``."""
        return SENDERS_GAINS if self.codec.counts_senders() else SPARSE_GAINS

    def fixed_by_a_checkpoint(self) -> dict[str, str]:
        """Returns, as text, the settings without which a checkpoint cannot be resumed exactly."""
        free = _MAY_CHANGE if self.outer_optimizer is None else (*_MAY_CHANGE, *_OF_SGD)
        return {name: text for name, text in self.described().items() if name not in free}

    @staticmethod
    def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
        """Tells in which settings a checkpoint differs from a run, in a sentence for each."""
        different = [name for name in now if saved.get(name) != now[name]]
        return [f"{name} was {saved.get(name)}, now it is {now[name]}" for name in different]

    def described(self) -> dict[str, str]:
        """Returns every setting as text that is the same on all ranks if and only if the setting is."""
        texts = {item.name: repr(getattr(self, item.name)) for item in fields(self)}
        for name in ("outer_optimizer", "outer_lr_schedule"):
            made_by = getattr(self, name)
            if made_by is not None:
                # The repr of a callable holds an address. What it makes is compared once the shards are known.
                texts[name] = getattr(made_by, "__qualname__", type(made_by).__name__)
        return texts


# Numbers, and what else has a type that a message names.

_WHOLE = ("sync_every", "overlap_steps", "layers_per_fragment", "warmup_steps")
_NUMBERS = (*_WHOLE, "mixing", "outer_lr", "outer_momentum", "outer_clip_norm", "outlier_guard")
_TYPES: dict[str, tuple[type, ...]] = {
    "timeout": (timedelta,),
    "final_sync": (bool,),
    "offload": (bool, str),
    "outer_lr_schedule": (Callable,),  # type: ignore[dict-item]
}


def _plain(value: Any) -> Any:
    """Returns a scalar of numpy as the number of Python that it is, and anything else as it is."""
    return value.item() if isinstance(value, Number) and hasattr(value, "item") else value


def is_real(value: Any) -> bool:
    """Tells whether a value is a number, finite or not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Tells whether a value is a finite number."""
    return is_real(value) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Tells whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def _fault(name: str, value: Any) -> str:
    if name in _TYPES and not isinstance(value, _TYPES[name]):
        return f"of type {type(value).__name__}, not {' or '.join(one.__name__ for one in _TYPES[name])}"
    return fault_of(value, name in _WHOLE) if name in _NUMBERS else "out of range"


def fault_of(value: Any, must_be_whole: bool) -> str:
    """Returns what is wrong with a value that is no number of the wanted kind, or out of its range."""
    if not is_real(value):
        return f"of type {type(value).__name__}, not a number"
    if not math.isfinite(value):
        return "not finite"
    if must_be_whole and not is_whole(value):
        return "no whole number" if value % 1 else "of type float, not a whole number"
    return "out of range"

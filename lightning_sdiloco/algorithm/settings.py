"""What a user can choose: the arguments that the strategies and the engine share, checked in one place."""

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sdiloco.algorithm.aggregation import Aggregation, Weighing
from lightning_sdiloco.algorithm.gossip import check_compression
from lightning_sdiloco.algorithm.partition import check_fragments
from lightning_sdiloco.algorithm.parts import TwoShot
from lightning_sdiloco.algorithm.policies.landing import LandingRule, Mix
from lightning_sdiloco.algorithm.policies.pace import Every, Pace
from lightning_sdiloco.algorithm.policies.route import Everyone, Route
from lightning_sdiloco.algorithm.ranges import NUMBERS, is_number, is_whole, plain, require, require_whole
from lightning_sdiloco.algorithm.recommended import (
    AUTO,
    EARLIER,
    OVERLAP_STEPS,
    SENDERS_GAINS,
    SPARSE,
    SPARSE_GAINS,
    OuterStep,
    recommended,
)
from lightning_sdiloco.algorithm.reduction import check_exchange
from lightning_sdiloco.compression import Compression, resolve

OuterOptimizer = Callable[[Iterable[Any]], Optimizer]
"""Takes the flat float32 shards, one per fragment, and returns a torch optimizer."""

OuterLRSchedule = Callable[[Optimizer], LRScheduler]
"""Takes the outer optimizer and returns a torch scheduler that is stepped once a round."""

DEFAULT_TIMEOUT = timedelta(minutes=30)

# A run that is resumed with other values of these trains on exactly as before, up to its end.
_MAY_CHANGE = ("final_sync", "offload", "timeout", "warmup_steps")


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
    timeout: timedelta = field(default=DEFAULT_TIMEOUT)
    schedule: Pace | None = None
    weighing: Weighing | None = None
    route: Route | None = None

    def __post_init__(self) -> None:
        for name in NUMBERS:
            # A scalar of numpy is compared between ranks, and saved, as the number that it is.
            object.__setattr__(self, name, plain(getattr(self, name)))
        check_exchange(self.exchange, resolve(self.compression))
        check_fragments(self.fragments)
        self._check_schedule()
        self._check_outer_optimizer()
        self._check_aggregation()
        self._check_policies()
        self._check_landing()
        require_whole("layers_per_fragment", self.layers_per_fragment, 1, "3 is the paper's choice")
        require(
            self.offload == "auto" or isinstance(self.offload, bool),
            "offload",
            self.offload,
            "it must be True, False or 'auto'",
            "'auto' is the default",
        )
        require(
            isinstance(self.timeout, timedelta) and self.timeout > timedelta(0),
            "timeout",
            self.timeout,
            "it must be a positive timedelta",
            f"datetime.timedelta(seconds={self.timeout}) is so many seconds"
            if is_number(self.timeout)
            else "datetime.timedelta(minutes=30) is the default",
        )

    def _check_schedule(self) -> None:
        require_whole("sync_every", self.sync_every, 1, "100 is the paper's choice")
        require_whole("warmup_steps", self.warmup_steps, 0, "0 is the default")
        require(
            is_whole(self.overlap_steps) and 0 <= self.overlap_steps < self.sync_every,
            "overlap_steps",
            self.overlap_steps,
            f"it must be at least 0 and below sync_every, which is {self.sync_every}",
            f"the paper saw next to no loss from up to {OVERLAP_STEPS[-1]}",
        )

    def _check_outer_optimizer(self) -> None:
        require(
            self.outer_lr == AUTO or (is_number(self.outer_lr) and self.outer_lr >= 0),
            "outer_lr",
            self.outer_lr,
            "it must be at least 0, or 'auto'",
            "'auto' is the default",
        )
        require(
            self.outer_momentum == AUTO or (is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1),
            "outer_momentum",
            self.outer_momentum,
            "it must be at least 0 and below 1, or 'auto'",
            "'auto' is the default",
        )
        require(
            self.outer_lr_schedule is None or callable(self.outer_lr_schedule),
            "outer_lr_schedule",
            self.outer_lr_schedule,
            "it must be a callable from an optimizer to a torch scheduler, or None",
            "functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=50) is one",
        )
        self._refuse_what_makes_no_optimizer()
        # Configurations that were written by earlier versions name the defaults of then.
        both = [name for name in _OF_SGD if repr(getattr(self, name)) not in (repr(AUTO), EARLIER[name])]
        if self.outer_optimizer is not None and both:
            given = " and ".join(f"{name}={getattr(self, name)}" for name in both)
            raise ValueError(
                f"outer_optimizer was given together with {given}. They configure the built-in Nesterov SGD, which"
                f" outer_optimizer replaces. Leave out {' and '.join(both)}, and set the values in outer_optimizer."
            )

    def _refuse_what_makes_no_optimizer(self) -> None:
        if self.outer_optimizer is None or callable(self.outer_optimizer):
            return
        kind = type(self.outer_optimizer).__name__
        what = "already an optimizer" if isinstance(self.outer_optimizer, Optimizer) else "nothing that can be called"
        raise ValueError(
            f"outer_optimizer of type {kind} is {what}: it must be a callable from the flat float32 shards, which are"
            " known only when a fit starts, to a torch optimizer. Choose one such as functools.partial(torch.optim.SGD,"
            " lr=0.7)."
        )

    def _check_landing(self) -> None:
        require(
            self.mixing == AUTO
            or isinstance(self.mixing, LandingRule)
            or (is_number(self.mixing) and 0 <= self.mixing <= 1),
            "mixing",
            self.mixing,
            "it must be between 0 and 1, 'auto', or a LandingRule",
            "'auto' is the default",
        )
        require(
            isinstance(self.final_sync, bool),
            "final_sync",
            self.final_sync,
            "it must be True or False",
            "True is the default",
        )

    def _check_aggregation(self) -> None:
        require(
            # As for torch, inf measures norms and clips none.
            self.outer_clip_norm in (None, math.inf) or (is_number(self.outer_clip_norm) and self.outer_clip_norm > 0),
            "outer_clip_norm",
            self.outer_clip_norm,
            "it must be a number above 0, or None",
            "the norms that are logged as sdiloco/outer_grad_norm tell what is usual",
        )
        require(
            self.outlier_guard is None or (is_number(self.outlier_guard) and self.outlier_guard > 1),
            "outlier_guard",
            self.outlier_guard,
            "it must be a number above 1, or None",
            "5.0 leaves out what is five times as long as usual",
        )

    def _check_policies(self) -> None:
        kinds = {"schedule": Pace, "weighing": Weighing, "route": Route, "mixing": LandingRule}
        for name, kind in kinds.items():
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

        if not self.shares:
            self._check_gossip()

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
        kinds = (LandingRule, Pace, Weighing, Route)
        return {**self.numbers, **{name: repr(one) for name, one in given.items() if isinstance(one, kinds)}}

    def chosen_for(self, num_groups: int) -> "Settings":
        """Returns the settings with numbers in place of ``"auto"``: those that `recommended` returns.

        Args:
            num_groups: Number of worker groups.

        Examples:
            >>> Settings(outer_lr=0.9).chosen_for(num_groups=2).outer_lr
            0.9
        """
        if self.routing.momentum(num_groups) is not None:
            return self._with_momentum_of_route(num_groups)
        is_sparse = self._is_sparse and self.outer_momentum in (AUTO, 0)
        suits = recommended(num_groups, self.sync_every, is_sparse, self.codec.counts_senders())
        return replace(self, **{name: getattr(suits, name) for name in self._left_open})

    def _with_momentum_of_route(self, num_groups: int) -> "Settings":
        given = {name: getattr(self, name) for name in (*_OF_SGD, "outer_optimizer", "outer_lr_schedule")}
        wanted = {**dict(zip(_OF_SGD, (1, 0), strict=True)), "outer_optimizer": None, "outer_lr_schedule": None}
        for name, value in given.items():
            if value not in (AUTO, wanted[name]):
                raise ValueError(
                    f"{name}={value!r} does not go with route={self.route!r}, whose momentum takes the place of an"
                    f" outer step: outer_lr is 1 and outer_momentum 0. Leave {name} out."
                )
        mixing = recommended(num_groups, self.sync_every, False, False).mixing if self.mixing == AUTO else self.mixing
        return replace(self, outer_lr=1.0, outer_momentum=0.0, mixing=mixing)

    def taken_from(self, saved: Mapping[str, str] | None) -> "Settings":
        """Returns the settings with the numbers of a checkpoint in place of ``"auto"``."""
        texts = {name: (EARLIER if saved is None else saved).get(name, repr(AUTO)) for name in self._left_open}
        # A landing rule cannot be read from text: what is compared afterwards tells that it is another one.
        numbers = {name: text for name, text in texts.items() if not text.endswith(")")}
        return replace(self, **{name: ast.literal_eval(text) for name, text in numbers.items()})

    def with_outer_step_of(self, given: "Settings") -> "Settings":
        """Returns the settings with rate, momentum and mixing of others: numbers or ``"auto"``."""
        return replace(self, **{name: getattr(given, name) for name in OuterStep._fields})

    @property
    def _left_open(self) -> tuple[str, ...]:
        names = ("mixing",) if self.outer_optimizer is not None else OuterStep._fields
        return tuple(name for name in names if getattr(self, name) == AUTO)

    @property
    def _is_sparse(self) -> bool:
        return self.codec.remembers() and self.codec.chosen_share() <= SPARSE

    def better_for_sparse(self, num_groups: int) -> dict[str, float]:
        """Returns what to choose in place of numbers that are known not to suit a sparse compression."""
        chosen = self.chosen_for(num_groups).numbers
        least, most = self.gains_for_sparse
        if not self._is_sparse or self.outer_optimizer is not None:
            return {}
        if least <= chosen["outer_lr"] / (1 - chosen["outer_momentum"]) <= most:
            return {}
        suits = recommended(num_groups, self.sync_every, True, self.codec.counts_senders())
        return {name: getattr(suits, name) for name in _OF_SGD}

    @property
    def gains_for_sparse(self) -> tuple[float, float]:
        """Between what a sparse compression needs ``outer_lr / (1 - outer_momentum)``."""
        return SENDERS_GAINS if self.codec.counts_senders() else SPARSE_GAINS

    def fixed_by_a_checkpoint(self) -> dict[str, str]:
        """Returns, as text, the settings without which a checkpoint cannot be resumed exactly."""
        unused = [*(_OF_SGD if self.outer_optimizer is not None else ())]
        unused += [name for name in _LEFT_OUT_IF_NONE if getattr(self, name) is None]
        return {name: text for name, text in self.described().items() if name not in (*_MAY_CHANGE, *unused)}

    @staticmethod
    def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
        """Tells in which settings a checkpoint differs from a run, in a sentence for each."""
        names = [*now, *(name for name in _LEFT_OUT_IF_NONE if name in saved and name not in now)]
        return [
            f"{name} was {saved.get(name)}, now it is {now.get(name)}"
            for name in names
            if saved.get(name) != now.get(name)
        ]

    def described(self) -> dict[str, str]:
        """Returns every setting as text that is the same on all ranks if and only if the setting is."""
        texts = {item.name: repr(getattr(self, item.name)) for item in fields(self)}
        for name in ("outer_optimizer", "outer_lr_schedule"):
            made_by = getattr(self, name)
            if made_by is not None:
                # The repr of a callable holds an address. What it makes is compared once the shards are known.
                texts[name] = getattr(made_by, "__qualname__", type(made_by).__name__)
        return texts


# What says how much a group counts, if no weighing does.
_OF_AGGREGATION = ("outer_clip_norm", "outlier_guard")

# Settings that checkpoints of earlier versions do not have, and that are left out where they are not given.
_LEFT_OUT_IF_NONE = ("schedule", "weighing", "route")

# What does not go with a route on which each group holds outer parameters of its own, and why.
_NOT_WITH_GOSSIP = {
    "schedule": "a pace hears of all groups, and here partners alone know of each other",
    "weighing": "a leg takes the plain mean of where its groups are, not of what they trained",
    "outer_clip_norm": "where a group is cannot be clipped",
    "outlier_guard": "partners alone know of each other's norms",
    "final_sync": "without a last mean, every group would end with a model of its own",
}

# The settings of the Nesterov SGD that outer_optimizer replaces.
_OF_SGD = ("outer_lr", "outer_momentum")

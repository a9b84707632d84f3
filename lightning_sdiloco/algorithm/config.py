"""The settings shared by strategies and the engine, and their validation.

``outer_lr``, ``outer_momentum`` and ``mixing`` can be ``"auto"``; see `recommended`.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Number
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar, cast, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sdiloco.algorithm.as_data import Data, Fields, as_data, as_text, describes, read_text
from lightning_sdiloco.algorithm.direction import ELEMENTWISE, EQUALISED, Direction, direction_for
from lightning_sdiloco.algorithm.gossip import Everyone, Route, check_compression
from lightning_sdiloco.algorithm.guard import GUARD
from lightning_sdiloco.algorithm.merge import LandingRule, Mix
from lightning_sdiloco.algorithm.partition import checked_fragments
from lightning_sdiloco.algorithm.reduce import TwoShot, check_exchange, kind_and_backend
from lightning_sdiloco.algorithm.schedule import DenseBeginning, LaunchSchedule, Schedule
from lightning_sdiloco.algorithm.weighting import Aggregation, Weighing
from lightning_sdiloco.compression import Compression, resolve

DEFAULT_TIMEOUT = timedelta(minutes=30)
_SHORTEST_TIMEOUT = timedelta(seconds=0.1)

UNTRAINED_KINDS = ("mean", "first", "own")
"""The ways to handle state that no optimizer trains; see docs/untrained-state.md."""

AN_OUTER_OPTIMIZER = "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
"""An example for messages. With 1e-3, torch's default rate for SGD, the outer step would hardly
change the parameters."""

AUTO: Literal["auto"] = "auto"
"""Marks a setting that this module or the planner chooses."""

DEFAULT_OVERLAP_STEPS = 5
"""The largest overlap that the paper recommends."""

DEFAULT_SYNC_EVERY = 100
"""The paper's choice, which suits long fits. This is the default for fits of unknown length."""

ENOUGH_ROUNDS = 10
"""The number of rounds below which a warning is logged."""

OVERLAP_STEPS = (1, 2, 3, 4, 5, 10)
"""Values of ``overlap_steps`` that are worth trying. The paper found almost no loss up to 10 and
little gain beyond 5."""

SPARSE = 1 / 16
"""The largest share of the values that a sparse compression sends per launch."""

SPARSE_GAINS = (1.0, 3.2)
"""The range of ``outer_lr / (1 - outer_momentum)`` that suits a sparse compression, as measured
when 1/64 of the values were sent."""

SENDERS_GAINS = (0.4, 2.0)
"""The corresponding range for a mean over the senders of each value, from the smaller rate in
SparseLoCo's code to twice the larger rate."""


def overlap_for(sync_every: int, overlap_steps: int | None) -> int:
    """Returns the number of inner steps that a flight takes. The default is smaller if rounds are
    short.

    Examples:
        >>> overlap_for(100, None), overlap_for(4, None), overlap_for(1, None), overlap_for(4, 2)
        (5, 3, 0, 2)
    """
    if overlap_steps is not None:
        return overlap_steps
    if not isinstance(sync_every, Integral):
        # `Settings` refuses this value and gives the reason.
        return DEFAULT_OVERLAP_STEPS
    return min(DEFAULT_OVERLAP_STEPS, sync_every - 1)


def overlap_in_round(sync_every: int) -> int:
    """Returns the length of a flight in inner steps if the strategy chooses the round length."""
    return min(DEFAULT_OVERLAP_STEPS, sync_every // 4)


def round_lengths(
    steps: float, short_round: int = 10, overlap_steps: int | None = None, least: int = 1
) -> list[int]:
    """Returns suitable values of ``sync_every`` for a fit of this length, best value first.

    Which of these values hide the exchange depends on the link. The best value gives 350 rounds,
    provided that a flight takes at most a quarter of a round. Each value gives at least ten rounds,
    unless a flight would then take more than half of a round. The number of groups does not matter,
    because with more groups, each group takes fewer steps for the same number of tokens. See
    docs/choosing.md for measurements.

    Args:
        steps: The number of inner steps in the fit, or infinity if unknown.
        short_round: The minimum number of inner steps in a round, if the fit is long enough.
        overlap_steps: The number of inner steps from launch to landing. If None, this number is
            derived from the round length.
        least: A lower bound on the results.

    Examples:
        >>> round_lengths(1786), round_lengths(7146), round_lengths(14_000), round_lengths(math.inf)
        ([10, 20, 40, 80, 100], [20, 40, 80, 100], [40, 80, 100], [100])
        >>> round_lengths(1786, short_round=20), round_lengths(150), round_lengths(50)
        ([20, 40, 80, 100], [10, 13], [10])
    """
    if steps == math.inf:
        return [DEFAULT_SYNC_EVERY]
    longest_flight = DEFAULT_OVERLAP_STEPS if overlap_steps is None else overlap_steps
    if overlap_steps is None:
        overlap_steps = overlap_in_round(short_round)
    shortest = max(least, min(DEFAULT_SYNC_EVERY, max(_SHORTEST_ROUND, 2 * overlap_steps)))
    # The last fragment launches up to one round later than the first fragment.
    with_enough = int(steps - longest_flight) // (ENOUGH_ROUNDS + 1)
    longest = max(shortest, min(DEFAULT_SYNC_EVERY, with_enough))
    wanted = max(short_round, 4 * overlap_steps, int(steps) // _ROUNDS)
    length = max(shortest, min(wanted, longest))
    lengths = list[int]()
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


class OuterStep(NamedTuple):
    outer_lr: float
    outer_momentum: float
    mixing: float


def recommended(
    is_sparse: bool = False,
    over_senders: bool = False,
    least: float = math.inf,
    direction: str | Direction = EQUALISED,
) -> OuterStep:
    """Returns suitable values for a compression and a direction; see docs/choosing.md.

    The same values suit any number of groups. With two, four and eight groups, no other value that
    we tried was clearly better. A momentum of 0.9 overshoots if there are too few rounds for the
    overshoot to average out, or if a round has so few inner steps that all of a group's movement is
    progress. `least` is the smaller of the number of rounds and the number of inner steps in a
    round.

    With a sparse compression, each group sends only a few values, and error feedback keeps the
    remaining values. The error feedback already acts as momentum, so the outer momentum is 0. The
    mean divides a value from a single sender by the total number of groups, so progress that the
    groups have in common arrives in small parts, one from each group. A mean over the senders does
    not divide such a value by the number of groups, so it needs a smaller rate. The rate is taken
    from SparseLoCo's code (arXiv 2508.15706), which uses this mean.

    Making the singular values equal reduces the norm of the outer gradient, so a large rate does
    not overshoot in any direction.

    Examples:
        >>> recommended()
        OuterStep(outer_lr=1.2, outer_momentum=0.8, mixing=0.2)
        >>> [recommended(least=rounds, direction="elementwise").outer_momentum for rounds in (1, 5, 10, 15, 1000)]
        [0.5, 0.7, 0.85, 0.9, 0.9]
    """
    if is_sparse and over_senders:
        return OuterStep(1.0, 0.0, 0.2)
    if is_sparse:
        return OuterStep(2.0, 0.0, 0.2)
    momentum = momentum_for(least)
    if direction != ELEMENTWISE:
        return OuterStep(1.2, min(0.8, momentum), 0.2)
    return OuterStep(0.7, min(0.9, momentum), 0.2)


def momentum_for(least: float) -> float:
    """Returns the largest suitable outer momentum, given the number of rounds or of inner steps per
    round.

    Examples:
        >>> [momentum_for(steps) for steps in (1, 4, 8, 100)]
        [0.5, 0.62, 0.81, 0.98]
    """
    # With a momentum of 0.5, the first outer step moves as far as the groups did, because 0.7 * (1
    # + 0.5) is about 1.
    return round(max(0.5, 1 - 1.5 / max(1.0, least)), 2)


def dense_for(
    num_groups: int, steps: float, settings: "Settings", sync_every: int = 4
) -> DenseBeginning | None:
    """Returns a suitable dense beginning with rounds of ``sync_every`` inner steps, or None.

    With eight or more groups, a dense beginning takes a fifth of the inner steps. Fewer groups do
    not benefit from a dense beginning. See docs/choosing.md.

    Examples:
        >>> dense_for(8, 4000, Settings()), dense_for(64, 4000, Settings(), 8).rounds
        (DenseBeginning(rounds=200, sync_every=4, overlap_steps=None), 100)
        >>> dense_for(4, 4000, Settings()), dense_for(8, 50, Settings()), dense_for(8, 4000, Settings(sync_every=7))
        (None, None, None)
    """
    decides_itself = (
        settings.schedule is not None or not settings.shares or settings.outer.make is not None
    )
    if decides_itself or num_groups < _FEWEST_FOR_DENSE or not 0 < steps < math.inf:
        return None
    if 2 * sync_every > settings.sync_every:
        return None
    rounds = round(_DENSE_SHARE * steps) // sync_every
    if rounds < _FEWEST_DENSE_ROUNDS:
        return None
    return DenseBeginning(rounds, sync_every)


# A run resumes exactly even if these settings change.
_MAY_CHANGE = ("exchange.backend", "outer_optimizer.offload", "timeout")

# The number of rounds beyond which additional rounds help little, and the shortest round.
_ROUNDS = 350
_SHORTEST_ROUND = 10

# The minimum number of groups for a dense beginning, its share of the inner steps, and its minimum
# number of rounds.
_FEWEST_FOR_DENSE = 8
_DENSE_SHARE = 0.2
_FEWEST_DENSE_ROUNDS = 3

# The values assumed for settings that older checkpoints lack, other than None.
_FORMERLY = {"outer_optimizer.direction": ELEMENTWISE}

# Settings that only development versions had. They do not affect resuming, because engine state
# that was saved during a warm-up is refused.
_REMOVED = frozenset({"warmup_steps"})

# The settings of the built-in Nesterov SGD, which the user's own optimizer replaces.
_OF_SGD = ("outer_lr", "outer_momentum")

# The number of values used to compare payload sizes.
_MANY = 1 << 12

# Settings that do not work if each group has its own outer parameters, with the reasons.
_NOT_WITH_GOSSIP = {
    "dense_beginning": "it needs rounds in which all groups exchange with all others",
    "schedule": "it needs reports from all groups, but here only partners exchange them",
    "weighing": "a leg takes the plain mean of parameters, not of outer gradients",
    "clip_norm": "groups send their parameters, which cannot be clipped",
    "outlier_guard": "only partners know each other's norms",
    "direction": "a leg takes the mean of parameters, which is not an outer gradient",
}

_POLICIES = {
    "schedule": LaunchSchedule,
    "weighing": Weighing,
    "route": Route,
    "mixing": LandingRule,
}


Init = TypeVar("Init", bound=Callable[..., None])


def names_checked(init: Init) -> Init:
    """Makes a constructor suggest corrections for unknown arguments."""
    names = [*inspect.signature(init).parameters][1:]

    @wraps(init)
    def checked(self: Any, *args: Any, **arguments: Any) -> None:
        refuse_unknown(type(self).__name__, names, arguments)
        init(self, *args, **arguments)

    return cast(Init, checked)


@dataclass(frozen=True)
class OuterOptimizer:
    """The outer step: the optimizer, the preparation of outer gradients, and the storage of state.

    Args:
        make: A callable that creates an elementwise torch optimizer from the flat float32 shards,
            one per fragment. None selects Nesterov SGD with ``outer_lr`` and ``outer_momentum``.
        lr_schedule: A callable that creates a torch scheduler from the optimizer. The scheduler
            counts the rounds (outer steps) of each fragment. None keeps the rate constant.
        clip_norm: The norm to which longer outer gradients are scaled down. None disables clipping.
        outlier_guard: The factor by which a group's outer gradient may exceed its usual length
            before the group is left out of the mean. The usual length is derived from the group's
            previous norms and from the norms of the other groups. ``"auto"`` means 5. None disables
            the guard.
        offload: True keeps outer parameters and outer momentum in page-locked host memory.
            ``"auto"`` means True on CUDA devices.
        direction: The map that is applied to the mean outer gradient before the optimizer step.
            ``"elementwise"`` leaves it unchanged. ``"equalised"`` replaces the singular values of
            every matrix with their mean; see `equalised`. You can also pass your own `Direction`.
            ``"auto"`` is described in docs/choosing.md.
        matrices: A map from name patterns to the number of matrices into which a parameter is split
            along its first dimension. Use 3 for fused projections of queries, keys and values, and
            0 to treat all values separately. None uses `stack_of`.

    Raises:
        ValueError: If an argument is out of range. The message names the argument.

    Examples:
        >>> from functools import partial
        >>> from torch.optim.lr_scheduler import CosineAnnealingLR
        >>> outer = OuterOptimizer(lr_schedule=partial(CosineAnnealingLR, T_max=200), clip_norm=1.0)
    """

    make: Callable[[Iterable[Tensor]], Optimizer] | None = None
    lr_schedule: Callable[[Optimizer], LRScheduler] | None = None
    clip_norm: float | None = None
    outlier_guard: float | Literal["auto"] | None = AUTO
    offload: bool | Literal["auto"] = AUTO
    direction: Literal["auto", "equalised", "elementwise"] | Direction = AUTO
    matrices: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        _make_plain(self)
        self._check_make()
        _require(
            self,
            "lr_schedule",
            self.lr_schedule is None or callable(self.lr_schedule),
            "it must be a callable that creates a torch scheduler from an optimizer, or None",
            "functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=50) is one",
            Callable,
        )
        norm = self.clip_norm
        _require(
            self,
            "clip_norm",
            # As in torch, inf measures norms without clipping.
            norm in (None, math.inf) or (is_number(norm) and norm > 0),
            "it must be a number above 0, or None",
            "sdiloco/outer_grad_norm in the logs shows the usual norms",
        )
        guard = self.outlier_guard
        _require(
            self,
            "outlier_guard",
            guard in (None, AUTO) or (is_number(guard) and guard > 1),
            "it must be a number above 1, 'auto' or None",
            "5.0 leaves out outer gradients that are five times as long as usual",
        )
        _require(
            self,
            "offload",
            self.offload == AUTO or isinstance(self.offload, bool),
            "it must be True, False or 'auto'",
            kind=bool | str,
        )
        _require(
            self,
            "direction",
            callable(self.direction) or self.direction in (AUTO, EQUALISED, ELEMENTWISE),
            "it must be 'equalised', 'elementwise', 'auto', or a callable that maps a name and"
            " matrices to matrices of the same shape",
            kind=str | Callable,
        )
        self._check_matrices()

    def _check_make(self) -> None:
        if isinstance(self.make, type) and issubclass(self.make, OuterOptimizer):
            raise ValueError(
                "outer_optimizer is the class OuterOptimizer itself. Pass an instance, such as"
                f" OuterOptimizer(clip_norm=1.0), or a callable such as {AN_OUTER_OPTIMIZER}."
            )
        if self.make is None or callable(self.make):
            return
        fault = "already an optimizer" if isinstance(self.make, Optimizer) else "not callable"
        raise ValueError(
            f"outer_optimizer of type {type(self.make).__name__} is {fault}. It must be an"
            " OuterOptimizer, or a callable that creates a torch optimizer from the flat float32"
            f" shards, which exist only when a fit starts. Choose a callable such as {AN_OUTER_OPTIMIZER}."
        )

    def _check_matrices(self) -> None:
        if self.matrices is None:
            return

        def is_count(parts: object) -> bool:
            return is_whole(parts) and parts >= 0

        rule = (
            "it must map name patterns to whole numbers of at least 0, such as {'*.qkv.weight': 3}"
        )
        _require_map(self, "matrices", is_count, rule)
        if self.direction == ELEMENTWISE:
            raise ValueError(
                "matrices was given together with direction='elementwise', which does not use"
                " matrices. Leave out one of them."
            )

    @property
    def map(self) -> Direction | None:
        """The map that is applied to matrices before the optimizer step. None if values are treated
        separately, or if the direction is still ``"auto"``.
        """
        return direction_for(self.direction)

    @property
    def guard(self) -> float | None:
        """The factor by which a length may exceed the usual length; see `outlying`. None disables
        the guard.
        """
        if isinstance(self.outlier_guard, str):
            return GUARD
        return self.outlier_guard

    def described(self) -> dict[str, object]:
        """Returns the choices by name. The results of callables are compared later."""
        return {
            "outer_optimizer": _name(self.make),
            "outer_optimizer.lr_schedule": _name(self.lr_schedule),
            "outer_optimizer.clip_norm": self.clip_norm,
            "outer_optimizer.outlier_guard": self.outlier_guard,
            "outer_optimizer.offload": self.offload,
            "outer_optimizer.direction": _name(self.direction),
            "outer_optimizer.matrices": self.matrices,
        }


OuterOptimizer.__init__ = names_checked(OuterOptimizer.__init__)  # type: ignore[method-assign]


def _name(choice: Callable[..., object] | str | None) -> str | None:
    """Returns a choice. A callable is replaced by its name, because its repr may contain an
    address.
    """
    if callable(choice):
        return str(getattr(choice, "__qualname__", type(choice).__name__))
    return choice


@dataclass(frozen=True)
class Settings:
    """The settings of a run, as described in `StreamingDiLoCo`. Out-of-range values are refused."""

    sync_every: int = DEFAULT_SYNC_EVERY
    overlap_steps: int = DEFAULT_OVERLAP_STEPS
    mixing: float | Literal["auto"] | LandingRule = AUTO
    fragments: int | str | Sequence[Sequence[str]] = "strided"
    compression: str | Compression = "fp4"
    outer_lr: float | Literal["auto"] = AUTO
    outer_momentum: float | Literal["auto"] = AUTO
    outer_optimizer: OuterOptimizer | Callable[[Iterable[Tensor]], Optimizer] | None = None
    exchange: str | TwoShot = "auto"
    dense_beginning: DenseBeginning | None = None
    schedule: LaunchSchedule | None = None
    weighing: Weighing | None = None
    route: Route | None = None
    untrained: Mapping[str, str] | None = None
    timeout: timedelta = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        _make_plain(self)
        object.__setattr__(self, "fragments", checked_fragments(self.fragments))
        check_exchange(self.exchange, self.codec)
        self._check_ranges()
        self._check_outer_optimizer()
        self._check_policies()
        self._check_dense_beginning()
        self._check_untrained()
        if not self.shares:
            self._check_gossip()

    def _check_ranges(self) -> None:
        every = self.sync_every
        _require(
            self,
            "sync_every",
            is_whole(every) and every >= 1,
            "it must be a whole number of at least 1",
            "100 is the paper's choice",
            int,
        )
        overlap = self.overlap_steps
        _require(
            self,
            "overlap_steps",
            is_whole(overlap) and 0 <= overlap < every,
            f"it must be at least 0 and below sync_every, which is {every}",
            f"the paper found almost no loss with up to {OVERLAP_STEPS[-1]}",
            int,
        )
        lr = self.outer_lr
        _require(
            self,
            "outer_lr",
            lr == AUTO or (is_number(lr) and lr >= 0),
            "it must be at least 0, or 'auto'",
        )
        momentum = self.outer_momentum
        _require(
            self,
            "outer_momentum",
            momentum == AUTO or (is_number(momentum) and 0 <= momentum < 1),
            "it must be at least 0 and below 1, or 'auto'",
        )
        mixing = self.mixing
        is_mixing = (
            mixing == AUTO
            or isinstance(mixing, LandingRule)
            or (is_number(mixing) and 0 <= mixing <= 1)
        )
        _require(
            self,
            "mixing",
            is_mixing,
            "it must be between 0 and 1, 'auto', or a LandingRule",
        )
        timeout = self.timeout
        advice = "datetime.timedelta(minutes=30) is the default"
        if is_number(timeout):
            advice = f"datetime.timedelta(seconds={timeout}) is that many seconds"
        _require(
            self,
            "timeout",
            isinstance(timeout, timedelta) and timeout >= _SHORTEST_TIMEOUT,
            "it must be a timedelta of at least a tenth of a second",
            advice,
            timedelta,
        )

    def _check_outer_optimizer(self) -> None:
        chosen = [name for name in _OF_SGD if getattr(self, name) != AUTO]
        if self.outer.make is not None and chosen:
            values = " and ".join(f"{name}={getattr(self, name)}" for name in chosen)
            raise ValueError(
                f"outer_optimizer was given together with {values}. These arguments configure the"
                " built-in Nesterov SGD, which outer_optimizer replaces. Leave out"
                f" {' and '.join(chosen)}, and set the values in outer_optimizer."
            )

    def _check_policies(self) -> None:
        for name, kind in _POLICIES.items():
            policy = getattr(self, name)
            if name != "mixing" and not (policy is None or isinstance(policy, kind)):
                raise ValueError(
                    f"{name}={policy!r} is not a {kind.__name__}. Pass a {kind.__name__}, or leave out"
                    f" {name}."
                )
            if isinstance(policy, kind) and not is_dataclass(policy):
                raise ValueError(
                    f"{name}={policy!r} is not a dataclass, so ranks cannot check that they all use"
                    f" the same object. Make {type(policy).__name__} a frozen dataclass."
                )
        self._check_weighing()

    def _check_weighing(self) -> None:
        if self.weighing is None:
            return
        both = [
            name
            for name in ("clip_norm", "outlier_guard")
            if getattr(self.outer, name) not in (None, AUTO)
        ]
        if both:
            raise ValueError(
                f"weighing={self.weighing!r} was given together with {' and '.join(both)} of"
                " outer_optimizer, which also determine how much a group counts. Leave out"
                f" {' and '.join(both)}, or leave out weighing."
            )

    def _check_dense_beginning(self) -> None:
        dense = self.dense_beginning
        if dense is None:
            return
        if not isinstance(dense, DenseBeginning):
            raise ValueError(
                f"dense_beginning={dense!r} is not a DenseBeginning. Pass an instance, such as"
                " lightning_sdiloco.DenseBeginning(rounds=50), or None to disable the dense"
                " beginning."
            )
        if 2 * dense.sync_every > self.sync_every:
            raise ValueError(
                f"dense_beginning={dense!r} does not work with sync_every={self.sync_every},"
                " because the sync_every of the dense beginning must be at most half as large."
                " Choose a smaller value, or leave out dense_beginning."
            )
        if self.schedule is not None:
            raise ValueError(
                f"dense_beginning={dense!r} does not work with schedule={self.schedule!r}, because"
                " both decide when fragments launch. Leave out one of them."
            )

    def _check_untrained(self) -> None:
        if self.untrained is None:
            return
        rule = "it must map name patterns to 'mean', 'first' or 'own', such as {'*.queue': 'own'}"
        _require_map(self, "untrained", UNTRAINED_KINDS.__contains__, rule)

    def _check_gossip(self) -> None:
        """Refuses settings that do not work if every group has its own outer parameters."""
        for name, why in _NOT_WITH_GOSSIP.items():
            value = self._value_of(name)
            if value not in (None, AUTO, ELEMENTWISE):
                raise ValueError(
                    f"{name}={value!r} does not work with route={self.route!r}, on which each group"
                    f" has its own outer parameters: {why}. Leave out {name} or route."
                )
        if kind_and_backend(self.exchange)[0] not in ("auto", "gather"):
            raise ValueError(
                f"exchange={self.exchange!r} does not work with route={self.route!r}, because each"
                " group sends whole fragments to the partners in its leg. Leave out exchange."
            )
        check_compression(self.compression)

    def _value_of(self, name: str) -> object:
        """Returns the value of a setting, which belongs to this class or to `OuterOptimizer`."""
        if hasattr(self, name):
            return getattr(self, name)
        return getattr(self.outer, name)

    @property
    def routing(self) -> Route:
        return self.route or Everyone()

    @property
    def shares(self) -> bool:
        return self.routing.shared

    @property
    def outer(self) -> OuterOptimizer:
        if isinstance(self.outer_optimizer, OuterOptimizer):
            return self.outer_optimizer
        return OuterOptimizer(self.outer_optimizer)

    @property
    def aggregation(self) -> Weighing:
        return self.weighing or Aggregation(self.outer.clip_norm, self.outer.guard)

    @property
    def landing(self) -> LandingRule:
        """The rule for applying outer parameters. Raises an error while ``mixing`` is
        ``"auto"``.
        """
        if isinstance(self.mixing, LandingRule):
            return self.mixing
        return Mix(float(self.mixing))

    @staticmethod
    def among(arguments: Mapping[str, object]) -> "Settings":
        """Creates settings from the arguments whose names match a setting."""
        names = [field.name for field in fields(Settings)]
        chosen: Fields = {name: arguments[name] for name in names if name in arguments}
        sync_every = chosen.get("sync_every", Settings.sync_every)
        chosen["overlap_steps"] = overlap_for(sync_every, chosen.get("overlap_steps"))
        return Settings(**chosen)

    @property
    def codec(self) -> Compression:
        return resolve(self.compression)

    @property
    def dense_momentum(self) -> float | None:
        """The maximum momentum of the built-in Nesterov SGD in dense rounds, or None if
        unlimited.
        """
        if self.dense_beginning is None or self.outer.make is not None:
            return None
        return momentum_for(self.dense_beginning.sync_every)

    def schedule_of(self, fragments: int) -> Schedule:
        """Returns the schedule for a given number of fragments, ignoring any custom schedule."""
        return Schedule(self.sync_every, self.overlap_steps, fragments, self.dense_beginning)

    @property
    def numbers(self) -> dict[str, float]:
        """The values of the outer step and the landing that have already been chosen, named as in
        `OuterStep`.
        """
        chosen = dict[str, float]()
        for name in OuterStep._fields:
            value = getattr(self, name)
            if value != AUTO and not isinstance(value, LandingRule):
                chosen[name] = value
        return chosen

    @property
    def numbers_and_policies(self) -> dict[str, float | str]:
        """The values of `numbers`, plus the policies as text."""
        chosen: dict[str, float | str] = {**self.numbers}
        for name in ("mixing", "schedule", "weighing", "route"):
            policy = getattr(self, name)
            if isinstance(policy, _POLICIES[name]):
                chosen[name] = repr(policy)
        return chosen

    def directed(self, may_direct: bool = True) -> "Settings":
        """Returns the settings with a suitable direction in place of ``"auto"``.

        Args:
            may_direct: False if the model's matrices must not be mapped before outer steps.
        """
        # A few values in different places do not define the directions of a matrix.
        sends_all = not self.codec.traits.varies and self.codec.wire_bytes(_MANY) >= _MANY // 8
        if may_direct and self.outer.make is None and sends_all and self.shares:
            return self._directed(EQUALISED)
        return self._directed(ELEMENTWISE)

    def chosen_for(self, num_groups: int, rounds: float = math.inf) -> "Settings":
        """Returns the settings with the values of `recommended` in place of ``"auto"``."""
        if self.routing.momentum(num_groups) is not None:
            return self._chosen_for_momentum()
        least = math.inf
        if self.schedule is None:
            least = min(self.sync_every, rounds)
        directed = self.directed()
        numbers = recommended(
            self._is_sparse and self.outer_momentum in (AUTO, 0),
            self.codec.traits.counts_senders,
            least,
            directed.outer.direction,
        )
        return replace(directed, **{name: getattr(numbers, name) for name in self._left_open})

    def _chosen_for_momentum(self) -> "Settings":
        """Returns the settings for a route whose momentum replaces the outer step."""
        only = {"outer_lr": 1, "outer_momentum": 0, "make": None, "lr_schedule": None}
        for name, only_value in only.items():
            value = self._value_of(name)
            if value not in (AUTO, only_value):
                raise ValueError(
                    f"{name}={value!r} does not work with route={self.route!r}, whose momentum"
                    " replaces the outer step, so outer_lr is 1 and outer_momentum is 0. Leave out"
                    f" {name}."
                )
        chosen = replace(self, outer_lr=1.0, outer_momentum=0.0)
        if self.mixing == AUTO:
            chosen = replace(chosen, mixing=recommended().mixing)
        return chosen._directed(ELEMENTWISE)

    def _directed(self, direction: Literal["equalised", "elementwise"] | Direction) -> "Settings":
        """Returns the settings with this direction in place of ``"auto"``."""
        if self.outer.direction != AUTO:
            return self
        return replace(self, outer_optimizer=replace(self.outer, direction=direction))

    def taken_from(self, saved: Mapping[str, object]) -> "Settings":
        """Returns the settings with the values of a checkpoint in place of ``"auto"``."""
        settings_before = read_settings(saved)
        numbers = Fields()
        for name in self._left_open:
            value = settings_before.get(name, AUTO)
            # A landing rule is not loaded, because a later comparison shows whether it differs.
            if is_real(value):
                numbers[name] = value
        settings = replace(self, **numbers)
        direction = _saved_as("outer_optimizer.direction", settings_before)
        if direction == AUTO:
            return settings
        return settings._directed(direction)

    @property
    def _left_open(self) -> list[str]:
        is_open = [name for name in OuterStep._fields if getattr(self, name) == AUTO]
        if self.outer.make is not None:
            # The user's optimizer replaces the Nesterov SGD that these settings configure.
            return [name for name in is_open if name not in _OF_SGD]
        return is_open

    @property
    def _is_sparse(self) -> bool:
        return self.codec.traits.remembers and self.codec.traits.share <= SPARSE

    def better_for_sparse(self, num_groups: int) -> dict[str, float]:
        """Returns better values if the chosen values do not suit a sparse compression, and an empty
        dict otherwise.
        """
        if not self._is_sparse or self.outer.make is not None:
            return {}
        chosen = self.chosen_for(num_groups).numbers
        least, most = self.gains_for_sparse
        if least <= chosen["outer_lr"] / (1 - chosen["outer_momentum"]) <= most:
            return {}
        numbers = recommended(True, self.codec.traits.counts_senders)
        return {name: getattr(numbers, name) for name in _OF_SGD}

    @property
    def gains_for_sparse(self) -> tuple[float, float]:
        """The range of ``outer_lr / (1 - outer_momentum)`` that suits a sparse compression."""
        if self.codec.traits.counts_senders:
            return SENDERS_GAINS
        return SPARSE_GAINS

    def saved(self, is_open: Collection[str] = ()) -> dict[str, object]:
        """Returns, as data, the settings that must not change if a checkpoint is to resume exactly.

        Args:
            is_open: The settings that have not been chosen yet.
        """
        return {name: as_data(value) for name, value in self._fixed(is_open).items()}

    def differences(self, saved: Mapping[str, object], is_open: Collection[str] = ()) -> list[str]:
        """Returns a sentence for each setting that differs from a checkpoint.

        Args:
            saved: The settings of the checkpoint, as returned by `saved`.
            is_open: The settings that have not been chosen yet.
        """
        saved = read_settings(saved)
        sentences = list[str]()
        for name, value in self._fixed(is_open).items():
            before = _saved_as(name, saved)
            if not describes(before, value):
                now = _shown(name, as_data(value))
                sentences.append(f"{name} was {_shown(name, before)}, now it is {now}")
        for name in sorted(saved.keys() - self._values().keys() - _REMOVED):
            shown = _shown(name, saved[name])
            sentences.append(f"{name} was {shown}, which this version does not have")
        return sentences

    def described(self) -> dict[str, str]:
        """Returns every setting as text. The texts are equal on all ranks if and only if the
        settings are equal.
        """
        texts = dict[str, str]()
        for name, value in self._values().items():
            texts[name] = str(value) if _is_plain(name) else repr(value)
        return texts

    def fixed_by_a_checkpoint(self) -> dict[str, str]:
        """Returns the same settings as `saved`, but as text."""
        fixed = self._fixed()
        return {name: text for name, text in self.described().items() if name in fixed}

    @property
    def weighing_text(self) -> str:
        """The weighing, as text that does not change when a field with a default is added."""
        return as_text(as_data(self.weighing))

    def _fixed(self, is_open: Collection[str] = ()) -> dict[str, object]:
        free = set(_MAY_CHANGE)
        if self.outer.make is not None:
            free.update(_OF_SGD)
        fixed = {name: value for name, value in self._values().items() if name not in free}
        return {**fixed, **dict.fromkeys(is_open, AUTO)}

    def _values(self) -> dict[str, object]:
        """Returns every setting, keyed by name, with separate entries for the outer optimizer and
        the backend.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        kind, backend = kind_and_backend(self.exchange)
        return {**values, **self.outer.described(), "exchange": kind, "exchange.backend": backend}


def read_settings(saved: Mapping[str, object]) -> Fields:
    """Returns the settings of a checkpoint as data. Older checkpoints store settings as text."""
    texts = {name: text for name, text in saved.items() if isinstance(text, str)}
    if len(texts) < len(saved):
        return dict(saved)
    return {name: read_text(text) for name, text in texts.items()}


def _saved_as(name: str, saved: Mapping[str, object]) -> Data:
    """Returns a setting from a checkpoint, which may be older than the setting."""
    return saved.get(name, _FORMERLY.get(name))


def _is_plain(name: str) -> bool:
    """Returns whether a setting is shown without quotes."""
    return name == "exchange.backend" or name.startswith("outer_optimizer")


def _shown(name: str, data: object) -> str:
    if _is_plain(name):
        return str(data)
    return as_text(data)


# The names of arguments

_TOGETHER = (
    "does not work with worker groups that are launched together, because every exchange is a"
    " collective that waits for all groups. Launch each group as a site of a federation, which"
    " closes rounds without late sites: federation=Federation({name}=..., ...)"
)
_INSTEAD = {
    "layers_per_fragment": (
        "fragments",
        "is part of fragments: pass fragments='strided:{value}' or 'sequential:{value}', or a"
        " number of balanced fragments",
    ),
    **dict.fromkeys(
        ("lr_schedule", "clip_norm", "outlier_guard", "offload"),
        (
            "outer_optimizer",
            "belongs to outer_optimizer: pass OuterOptimizer({name}={value})",
        ),
    ),
    **dict.fromkeys(("quorum", "grace"), ("federation", _TOGETHER)),
    **dict.fromkeys(
        ("quantize", "should_quantize"),
        (
            "compression",
            "is called compression here: 'fp4' is the default, and 'fp32' disables quantization",
        ),
    ),
    **dict.fromkeys(
        ("warmup_steps", "warmup"),
        (
            "dense_beginning",
            "is called dense_beginning here: with DenseBeginning(rounds), groups exchange more often"
            " in the first rounds. This is the default for eight or more groups",
        ),
    ),
}
"""For each misplaced argument, the correct argument and the advice in the message."""

_BESIDE = "belongs to the strategy: pass {right}={{value}} next to outer_optimizer"
_BESIDE_THE_OUTER_OPTIMIZER = {
    name: ("make", _BESIDE.format(right=right))
    for name, right in {
        "lr": "outer_lr",
        "outer_lr": "outer_lr",
        "momentum": "outer_momentum",
        "outer_momentum": "outer_momentum",
    }.items()
}
"""The same for each of the strategy's arguments that may be passed to `OuterOptimizer`."""

_SAME = {
    **dict.fromkeys(("H", "inner_steps"), "sync_every"),
    **dict.fromkeys(("tau", "delay", "fragment_sync_delay"), "overlap_steps"),
    **dict.fromkeys(("alpha", "fragment_update_alpha"), "mixing"),
    **dict.fromkeys(("M", "num_groups", "num_replicas", "num_workers"), "worker_groups"),
    **dict.fromkeys(("P", "num_fragments"), "fragments"),
    "outer_learning_rate": "outer_lr",
}
"""Argument names that the paper and other implementations use."""

OTHER_NAMES = (*_INSTEAD, *_SAME)


def refuse_unknown(owner: str, names: Collection[str], arguments: Mapping[str, object]) -> None:
    """Refuses unknown arguments of a class (``owner``) and suggests corrections.

    Raises:
        ValueError: If an argument has a different name here or belongs elsewhere.
        TypeError: If an argument does not exist.
    """
    unknown = {name: value for name, value in arguments.items() if name not in names}
    misplaced = {**_INSTEAD, **_BESIDE_THE_OUTER_OPTIMIZER}
    corrections = []
    for name, value in unknown.items():
        right_name, correction = misplaced.get(name, (_SAME.get(name), "is called {taken} here"))
        if right_name not in names:
            continue
        if value is None:
            correction = "is not an argument, so leave it out"
        shown = value if isinstance(value, str | int | float) else "..."
        correction = correction.format(name=name, value=shown, taken=right_name)
        corrections.append(f"{name}={value!r} {correction}.")
    if corrections:
        raise ValueError(" ".join(corrections))
    for name in unknown:
        close = get_close_matches(name, names, 1)
        advice = f"Did you mean {close[0]}?" if close else f"help({owner}) lists its arguments."
        raise TypeError(f"{owner} has no argument {name!r}. {advice}")


# Values


def _make_plain(settings: "OuterOptimizer | Settings") -> None:
    """Converts NumPy scalars to plain numbers, which can be saved and compared between ranks."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Number) and hasattr(value, "item"):
            object.__setattr__(settings, field.name, value.item())


def _require(
    settings: object,
    name: str,
    holds: bool,
    rule: str,
    advice: str = "'auto' is the default",
    kind: Any = float,
) -> None:
    """Refuses a setting that violates a rule.

    Args:
        settings: The object that has the setting.
        name: The name of the setting.
        holds: True if the setting satisfies the rule.
        rule: The rule, in words.
        advice: The end of the message.
        kind: The required type. With ``int`` or ``float``, any number has the right type.
    """
    if holds:
        return
    value = getattr(settings, name)
    if kind in (int, float):
        fault = fault_of(value, kind is int)
    elif isinstance(value, kind):
        fault = "out of range"
    else:
        names = " or ".join(alternative.__name__ for alternative in get_args(kind) or (kind,))
        fault = f"of type {type(value).__name__}, not {names}"
    raise ValueError(f"{name}={value!r} is {fault}: {rule}. Choose a different {name}; {advice}.")


def _require_map(
    settings: object, name: str, is_right: Callable[[object], bool], rule: str
) -> None:
    """Requires a setting to map patterns to valid values, and converts it to a plain dict."""
    patterns = getattr(settings, name)
    if not isinstance(patterns, Mapping):
        raise ValueError(
            f"{name}={patterns!r} is of type {type(patterns).__name__}: {rule}. Leave it out, or"
            " pass a map."
        )
    object.__setattr__(settings, name, dict(patterns))
    for pattern, value in patterns.items():
        if not isinstance(pattern, str) or not is_right(value):
            raise ValueError(
                f"{name}={{{pattern!r}: {value!r}}} is not valid: {rule}. Correct this entry."
            )


def is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    return is_real(value) and math.isfinite(value)


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def fault_of(value: object, must_be_whole: bool) -> str:
    """Explains why a value is not an acceptable number."""
    if not is_real(value):
        return f"of type {type(value).__name__}, not a number"
    if not math.isfinite(value):
        return "not finite"
    if must_be_whole and value % 1:
        return "not a whole number"
    if must_be_whole and not is_whole(value):
        return "of type float, not a whole number"
    return "out of range"

"""A loader for a worker group that may be slower than others: it makes fewer batches of an epoch, and nobody waits."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol

from lightning_sdiloco.engine.flight import Landing

# A group that is less than this behind the fastest is as fast: shares are measured.
_ALIKE = 0.05
_END = object()


class _Engine(Protocol):
    last_landing: Landing | None
    topology: Any
    site: str | None


class Paced:
    """Wraps the loader of a worker group that is slower than others, so that they never wait for it.

    All groups make the same inner steps. This loader yields a batch in as many of them as the group has time for, and
    None in the others, in which the group is idle: ``engine.step(idle=True)``. A Trainer knows what to do with None. In
    ``t`` inner steps ``floor(speed * t)`` are trained, after the dynamic local updates of arXiv 2401.09135, and by
    these the group weighs. An epoch has as many inner steps as the loader has batches, of which the rest is left out.

    Args:
        loader: What yields the batches.
        speed: How fast this group is, with 1 for the fastest. ``"auto"``: by the seconds of an inner step that all
            groups tell each other with their launches. It is 1 before the first landing.
        micro_batches: Batches of an inner step, of which all are trained or none.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> paced = Paced(range(6), speed=0.5)
        >>> list(paced)
        [None, 0, None, 1, None, 2]
    """

    def __init__(self, loader: Iterable[Any], speed: float | Literal["auto"] = "auto", micro_batches: int = 1) -> None:
        if speed != "auto" and not (isinstance(speed, (int, float)) and 0 < speed <= 1):
            raise ValueError(
                f"speed={speed!r} is out of range: it must be above 0 and at most 1, which is the speed of the fastest"
                " group. Give 0.5 for half as fast, or 'auto'."
            )
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ValueError(
                f"micro_batches={micro_batches!r} is no number of batches. Give as many as an inner step has, such as"
                " accumulate_grad_batches."
            )
        self.loader = loader
        self.speed = 1.0 if speed == "auto" else float(speed)
        self._measures, self._micro_batches = speed == "auto", micro_batches
        self._engine: _Engine | None = None
        self._heard: Landing | None = None
        # What was yielded of this epoch, whether the group trains in this inner step, and what it has time for.
        self._yielded, self._trains, self._credit, self._resumed = 0, False, 0.0, False

    def follow(self, engine: _Engine) -> "Paced":
        """Takes the speeds from what an engine hears, and returns itself. A Trainer calls it.

        Raises:
            ValueError: If the engine is that of a site.
        """
        if engine.site is not None:
            raise ValueError(
                "Paced does not go with a federation: a site makes inner steps of its own, as fast as it is, and nobody"
                " waits for them. Give it the loader itself."
            )
        self._engine = engine
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def sampler(self) -> Any:
        """The sampler of the loader, which has to know the epoch."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the loader."""
        return getattr(self.loader, "batch_sampler", None)

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self._yielded = 0
        self._resumed = False
        batches = iter(self.loader)
        length = len(self) if hasattr(self.loader, "__len__") else None
        while length is None or self._yielded < length:
            if self._yielded % self._micro_batches == 0:
                self._trains = self._has_time()
            batch = next(batches, _END) if self._trains else None
            if batch is _END:
                return
            self._yielded += 1
            yield batch

    def _has_time(self) -> bool:
        """Tells whether the group trains in the inner step that begins."""
        if self._measures:
            self._measure()
        self._credit += self.speed
        trains = self._credit > 1 - 1e-6
        self._credit -= trains
        return trains

    def _measure(self) -> None:
        if self._engine is None:
            # The first batch may be fetched ahead of the start.
            if self._yielded:
                raise ValueError(
                    "Paced(speed='auto') does not know the engine that tells it how fast the groups are. Call"
                    " paced.follow(engine) before training, or give a number."
                )
            return
        landing = self._engine.last_landing
        if landing is None or landing is self._heard:
            return
        self._heard = landing
        # From what travelled alone: the ranks of a group find the same.
        known = [seconds for seconds in landing.step_times if seconds > 0]
        own = landing.step_times[self._engine.topology.group_index]
        if own > 0:
            share = min(known) / own
            self.speed = share if share < 1 - _ALIKE else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Returns where it is, and the state of the loader if that has one."""
        return {
            "yielded": self._yielded,
            "trains": self._trains,
            "credit": self._credit,
            "speed": self.speed,
            "loader": self.loader.state_dict() if hasattr(self.loader, "state_dict") else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was called, with the speed of then until something lands."""
        self._yielded, self._trains, self._credit = state["yielded"], state["trains"], state["credit"]
        self._resumed = True
        if self._measures:
            self.speed = state["speed"]
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]

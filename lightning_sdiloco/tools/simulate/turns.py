"""Runs threads that take turns, each with the random numbers and the rank of a process of its own."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_sdiloco.engine import random_state, set_random_state

Result = TypeVar("Result")

# How long the main thread sleeps between checks whether Ctrl-C was pressed.
_SECONDS = 0.2


class Stopped(BaseException):
    """Ends a thread because another one has failed, or Ctrl-C was pressed."""


class Turns(Generic[Result]):
    """Runs functions in threads, of which only one runs at any time; see [Note: one thread at a time].

    Args:
        count: Number of threads.

    Examples:
        >>> turns, said = Turns(2), []
        >>> def speak(name: str, until: int) -> int:
        ...     said.append(name)
        ...     turns.until(lambda: len(said) >= until)
        ...     said.append(name)
        ...     return len(said)
        >>> turns.run([lambda: speak("first", 2), lambda: speak("second", 1)])
        [4, 3]
        >>> said
        ['first', 'second', 'second', 'first']
    """

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        # What each thread waits for; None if it has ended.
        self._waits: list[Callable[[], bool] | None] = [_nothing] * count
        self._turn: int | None = None
        self._seats = threading.local()
        self._away = [0.0] * count
        self._results: dict[int, Result] = {}
        self._failure: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """Runs one function in each thread, all from the caller's random numbers, which it restores."""
        state = _State.taken(0)
        threads = [
            threading.Thread(target=self._live, args=(seat, function, state), name=f"group {seat}", daemon=True)
            for seat, function in enumerate(functions)
        ]
        try:
            self._turn = 0
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_SECONDS)
        except BaseException as error:  # Ctrl-C
            self._fail(error)
            for thread in threads:
                thread.join()
            raise
        finally:
            state.restore()
        if self._failure is not None:
            raise self._failure
        return [self._results[seat] for seat in range(len(functions))]

    def until(self, ready: Callable[[], bool]) -> None:
        """Lets the other threads have their turns until a condition holds."""
        self._go_on()
        if ready():
            return
        seat, left = self._seats.own, time.perf_counter()
        state = _State.taken(seat)
        self._waits[seat] = ready
        self._pass_on(seat)
        self._wait_for(seat)
        state.restore()
        self._away[seat] += time.perf_counter() - left

    def seconds(self) -> float:
        """Reads a clock of this thread that stands still while others have their turns."""
        return time.perf_counter() - self._away[self._seats.own]

    def _live(self, seat: int, function: Callable[[], Result], state: "_State") -> None:
        self._seats.own = seat
        started = time.perf_counter()
        try:
            self._wait_for(seat)
            self._away[seat] = time.perf_counter() - started
            state.for_seat(seat).restore()
            self._results[seat] = function()
        except BaseException as error:
            self._fail(error)
        self._waits[seat] = None
        self._pass_on(seat)

    def _wait_for(self, seat: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == seat or self._failure is not None)
        self._go_on()

    def _pass_on(self, seat: int) -> None:
        """Gives the turn to the next thread that can go on, and fails if all of them wait."""
        order = [*range(seat + 1, len(self._waits)), *range(seat)]
        chosen = next(filter(self._can_go_on, order), None)
        waiting = [str(other) for other, ready in enumerate(self._waits) if ready is not None]
        if chosen is None and waiting:
            self._fail(
                RuntimeError(
                    f"Worker groups wait for others that wait for something else or have ended: {', '.join(waiting)}."
                    " The groups do not make the same steps. Real processes would wait until the timeout."
                )
            )
        with self._changed:
            self._turn = chosen
            self._changed.notify_all()

    def _can_go_on(self, seat: int) -> bool:
        ready = self._waits[seat]
        return ready is not None and ready()

    def _go_on(self) -> None:
        if self._failure is not None:
            raise Stopped

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


class _State:
    """What there is once in a process: random numbers, and the rank."""

    def __init__(self, random: dict[str, Any], rank: int | None) -> None:
        self._random = random
        self._rank = rank

    @staticmethod
    def taken(rank: int | None) -> "_State":
        return _State(random_state(), rank)

    def for_seat(self, seat: int) -> "_State":
        return _State(self._random, seat)

    def restore(self) -> None:
        set_random_state(self._random)
        rank_zero_only.rank = self._rank  # type: ignore[attr-defined]


def _nothing() -> bool:
    return True

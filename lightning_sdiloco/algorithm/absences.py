"""Groups that are left out of the mean again and again."""

from collections.abc import Sequence
from typing import Any

from lightning_sdiloco.errors import AgreementError

# A group that is left out so often in a row will not recover.
_MOST_LEFT_OUT = 3


class Absences:
    """Counts how often in a row every group was left out because its values were not finite.

    Args:
        groups: Number of worker groups.

    Examples:
        >>> absences = Absences(groups=2)
        >>> for step in (100, 150, 200):
        ...     absences.count(launched_at=step, landed_at=step + 5, left_out=(1,))
        Traceback (most recent call last):
        ...
        lightning_sdiloco.errors.AgreementError: The outer gradient of worker group 1 was not finite 3 times ...
    """

    def __init__(self, groups: int) -> None:
        self._in_a_row = [0] * groups
        self._recovered_at = [0] * groups

    def count(self, launched_at: int, landed_at: int, left_out: Sequence[int]) -> None:
        """Counts one landing.

        Args:
            launched_at: The inner step of its launch.
            landed_at: The inner step now, after which the groups that were left out hold outer values.
            left_out: The groups that were left out.

        Raises:
            AgreementError: If a group does not recover.
        """
        for group in range(len(self._in_a_row)):
            if group not in left_out:
                self._in_a_row[group] = 0
            elif launched_at >= self._recovered_at[group]:
                # Fragments that were launched before the group recovered from it tell of the same event.
                self._in_a_row[group] += 1
                self._recovered_at[group] = landed_at
        lost = [group for group, count in enumerate(self._in_a_row) if count >= _MOST_LEFT_OUT]
        if lost:
            raise AgreementError(
                f"The outer gradient of worker group {', '.join(map(str, lost))} was not finite {_MOST_LEFT_OUT} times"
                " in a row, so that the other groups train without it. Look at that group's data and learning rate,"
                " and resume from a checkpoint, for example with gradient clipping."
            )

    def saved(self) -> dict[str, Any]:
        """The counts."""
        return {"left_out_in_a_row": list(self._in_a_row), "recovered_at": list(self._recovered_at)}

    def load(self, saved: dict[str, Any]) -> None:
        """Takes back what `saved` returned."""
        self._in_a_row = list(saved["left_out_in_a_row"])
        self._recovered_at = list(saved["recovered_at"])

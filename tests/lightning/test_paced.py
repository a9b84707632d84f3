"""A group whose loader is paced makes its share of the inner steps, and resumes where it was."""

from typing import Any

import torch

from lightning_sdiloco import Paced
from tests.lightning.uneven_fits import Announced, Place, Stateful, fit


class Sized(Stateful):
    """Has a length, and can be taken up again in the middle."""

    def __len__(self) -> int:
        return 14


def half_for_the_second(place: Place) -> Any:
    return Paced(Sized(place, 14), speed=0.5) if place[0] else Announced(place, 14)


def test_a_paced_group_is_idle_in_its_share_of_the_steps_and_weighs_less() -> None:
    first, second = fit(2, half_for_the_second, max_epochs=1)
    assert first["common"] == {**second["common"], "metrics": first["common"]["metrics"]}
    assert first["common"]["inner_steps"] == first["common"]["global_step"] == 14
    assert (first["idle"], second["idle"]) == ([], [1, 3, 5, 7, 9, 11, 13])
    assert all(torch.equal(values, second["outer"][name]) for name, values in first["outer"].items())
    assert first["warned"] == second["warned"] == []

"""Open settings before the founding: who has told, who chooses, and what is forgotten."""

import json
from typing import Any

import pytest

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation import Known, Measurement, Settling
from lightning_sdiloco.federation.settling import HEARD_FOR

NEAR, FAR = Measurement(0.1, 0.001), Measurement(0.2, 0.1)
MEASURED = Measurement(0.1, 0.001, 1e9, 1e9)


def test_links_are_measured_when_all_are_there_and_the_first_choice_stays() -> None:
    settling = Settling(2)
    assert settling.hear("b", NEAR, 0.0).missing == 1
    known = settling.hear("a", FAR, 1.0)
    assert (known.missing, known.is_whole, list(known.measured)) == (0, False, ["a", "b"])
    settling.hear("a", MEASURED, 2.0)
    assert settling.hear("b", MEASURED, 3.0).is_whole
    settling.choose({"sync_every": "30"})
    settling.choose({"sync_every": "300"})
    assert settling.known(4.0).settings == {"sync_every": "30"}


def test_who_does_not_tell_again_is_not_waited_for_and_counts_no_more() -> None:
    settling = Settling(2)
    settling.hear("a", MEASURED, 0.0)
    settling.hear("b", NEAR, 0.0)
    later = settling.hear("a", MEASURED, HEARD_FOR + 1)
    assert (later.missing, list(later.measured)) == (1, ["a"])
    assert settling.hear("c", MEASURED, HEARD_FOR + 2).is_whole


def test_a_choice_of_which_nobody_is_left_is_forgotten() -> None:
    settling = Settling(1)
    settling.hear("a", MEASURED, 0.0)
    settling.choose({"sync_every": "30"})
    assert settling.known(HEARD_FOR).settings == {"sync_every": "30"}
    assert settling.known(HEARD_FOR + 1).settings is None


def test_what_is_known_travels_as_text() -> None:
    for known in (Known(None, {"a": NEAR, "b": MEASURED}, 3), Known({"compression": "'fp4'"})):
        assert Known.from_bytes(known.to_bytes()) == known


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"settings": {"sync_every": 3}}, "is no text"),
        ({"settings": []}, "is no object"),
        ({"settings": {"x": "y" * 5000}}, "is no text of at most"),
        ({"measured": {"../a": {}}}, "no text like"),
        ({"measured": {"a": {"step_time": 0.0, "round_trip": 0.0, "to_hub": 0.0, "from_hub": 0.0}}}, "step_time is 0"),
        ({"measured": {"a": {"step_time": -1.0, "round_trip": 0.0, "to_hub": 0.0, "from_hub": 0.0}}}, "no finite"),
        ({"missing": -1}, "no whole number"),
    ],
)
def test_what_is_none_is_refused(wrong: dict[str, Any], told: str) -> None:
    text = json.dumps({"settings": None, "measured": {}, "missing": 0, **wrong}).encode()
    with pytest.raises(Malformed, match=told):
        Known.from_bytes(text)

"""Records, contributions, messages and charters as text: what goes out comes back, and anything else is refused."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdiloco.federation import (
    Beat,
    Call,
    Charter,
    Contribution,
    Hello,
    Malformed,
    Payload,
    Position,
    Record,
    Standing,
    StateHeader,
    Terms,
    Timing,
    Welcome,
)
from lightning_sdiloco.federation.codec import decoded, plain
from lightning_sdiloco.federation.messages import LeftOut

KEYS = st.text("0123456789abcdef", min_size=64, max_size=64)
LIVES = st.text("0123456789abcdef", min_size=16, max_size=16)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
WHOLE = st.integers(0, 2**63 - 1)
DIGESTS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.builds(Position, WHOLE, KEYS)


@st.composite
def records(draw: Any) -> Record:
    fragment, round, digest = draw(st.integers(0, 99)), draw(st.integers(1, 2**40)), draw(DIGESTS)
    previous = draw(KEYS)
    sites = sorted(draw(st.sets(NAMES, min_size=1, max_size=4)))
    counted = tuple(
        Contribution(
            fragment,
            round,
            site,
            draw(LIVES),
            previous,
            draw(st.integers(1, 2**40)),
            digest,
            tuple(draw(st.lists(st.builds(Payload, KEYS, WHOLE), max_size=2))),
            norm_squared=draw(st.floats(0, 1e30)),
            exact=draw(st.booleans()),
        )
        for site in sites
    )
    left_out = (LeftOut("absent", "not finite"),) if draw(st.booleans()) else ()
    return Record(draw(WHOLE), fragment, round, previous, counted, left_out, draw(st.booleans()))


@settings(max_examples=60, deadline=None)
@given(records())
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    read = Record.from_bytes(record.to_bytes())
    assert read == record
    assert read.key == record.key
    assert [Contribution.from_bytes(own.to_bytes()) for own in record.counted] == list(record.counted)


@settings(max_examples=60, deadline=None)
@given(records(), st.integers(0), st.integers(0, 7))
def test_a_record_with_one_bit_changed_is_refused(record: Record, at: int, bit: int) -> None:
    data = bytearray(record.to_bytes())
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(Malformed):
        Record.from_bytes(bytes(data))


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    for kind in (Record, Contribution, Hello, Beat, Call, Welcome, StateHeader, Charter):
        with pytest.raises(Malformed):
            kind.from_bytes(data)


MESSAGES = st.one_of(
    st.builds(Hello, NAMES, NAMES, LIVES, KEYS, st.tuples(POSITIONS)),
    st.builds(Call, st.integers(0, 99), st.integers(1, 2**40), st.booleans()),
    st.builds(
        Welcome,
        st.tuples(POSITIONS, POSITIONS),
        st.tuples(st.integers(1, 9), st.integers(1, 9)),
        st.tuples(st.builds(Standing, st.integers(0, 99), LIVES)),
    ),
    st.builds(Beat, NAMES, LIVES, st.booleans(), st.tuples(WHOLE)),
    st.builds(StateHeader, st.tuples(POSITIONS), st.tuples(DIGESTS)),
)


@settings(max_examples=60, deadline=None)
@given(MESSAGES)
def test_a_message_comes_back_as_it_was(message: Any) -> None:
    assert type(message).from_bytes(message.to_bytes()) == message


OWN = Contribution(1, 5, "site-a", "ab" * 8, "ef" * 32, 100, -7, (Payload("cd" * 32, 40),))
RECORD = Record(9, 1, 5, "ef" * 32, (OWN, replace(OWN, site="site-b")))


def test_a_field_of_the_wrong_kind_is_refused_by_its_name() -> None:
    welcome, late = Welcome((), ()), replace(RECORD, timings=(Timing("a", 1, 0.0),))
    for whole, field, value in (
        (OWN, "fragment", True),
        (OWN, "fragment", -1),
        (OWN, "round", 1.0),
        (OWN, "round", 2**63),
        (OWN, "site", "../../etc"),
        (OWN, "site", "a\n"),
        (OWN, "site", "a" * 64),
        (OWN, "life", "AB" * 8),
        (OWN, "weight", "100"),
        (OWN, "digest", None),
        (OWN, "payloads", [["cd" * 32]]),
        (OWN, "payloads", [["cd" * 32, -1]]),
        (OWN, "payloads", {}),
        (OWN, "finite", 1),
        (OWN, "exact", 1),
        (OWN, "norm_squared", -1.0),
        (OWN, "unknown", 1),
        (welcome, "standing[0]", [0]),
        (welcome, "standing[0]", [0, "ab" * 8, 1]),
        (welcome, "standing[0]", [-1, "ab" * 8]),
        (welcome, "standing[0]", [0, "AB" * 8]),
        (welcome, "standing[0]", {}),
        (late, "timings[0]", ["a", 1, -1.0, None]),
        (late, "timings[0]", ["a", 0, 1.0, None]),
        (late, "timings[0]", ["a"]),
        (late, "left_out[0]", ["a", "no reason"]),
    ):
        name, _, is_in_a_list = field.partition("[")
        text = {**plain(whole), name: [value] if is_in_a_list else value}
        with pytest.raises(Malformed, match=re.escape(field)):
            type(whole).from_bytes(json.dumps(text).encode())


def test_json_with_surprises_is_refused() -> None:
    surprises = (b'{"a": 1, "a": 2}', b'{"a": NaN}', b"[" * 100_000, b'"' + b"a" * 200_000 + b'"', b"9" * 5000, b"\xff")
    for data in (*surprises, b""):
        with pytest.raises(Malformed):
            decoded(data, 150_000)


def test_a_record_whose_contributions_make_no_round_is_refused() -> None:
    for counted in (
        (),
        (OWN, OWN),
        (replace(OWN, site="z"), OWN),
        (OWN, replace(OWN, site="site-b", round=6)),
        (OWN, replace(OWN, site="site-b", digest=8)),
        (OWN, replace(OWN, site="site-b", previous="00" * 32)),
        (replace(OWN, finite=False),),
        (replace(OWN, weight=0),),
    ):
        with pytest.raises(Malformed, match=r"record\.counted"):
            Record.from_bytes(replace(RECORD, counted=counted).to_bytes())


def test_the_key_of_a_record_depends_on_all_that_it_says() -> None:
    changes = {"seq": 8}, {"previous": "00" * 32}, {"final": True}, {"left_out": (LeftOut("c", "no samples"),)}
    counted = (OWN,), (OWN, replace(OWN, site="site-b", exact=True))
    others = [replace(RECORD, **change) for change in (*changes, *({"counted": own} for own in counted))]
    assert len({RECORD.key, *(other.key for other in others)}) == 7


def test_what_a_text_need_not_say_is_left_out_and_read_as_nothing() -> None:
    assert {"steps", "exact", "timings"} & (plain(OWN).keys() | plain(RECORD).keys()) == set()
    assert Record.from_bytes(RECORD.to_bytes()) == RECORD
    assert Contribution.from_bytes(replace(OWN, weight=0, exact=True).to_bytes()).reason == ""


# The charter

TERMS = Terms(fragments=2, sync_every=100, overlap_steps=5, grace=2.0)
CHARTER = Charter(
    "llm", TERMS, {"mixing": "0.5"}, ((("w", "(2,)"), ("b", "(1,)")), ()), ((3,), ()), {"torch": "2.6"}, "5f"
)


def test_a_charter_comes_back_as_it_was_and_one_bit_is_not_lost() -> None:
    assert Charter.from_bytes(CHARTER.to_bytes()) == CHARTER
    with pytest.raises(Malformed):
        Charter.from_bytes(CHARTER.to_bytes().replace(b'"0.5"', b'"0.6"'))


def test_another_charter_is_refused_with_what_differs() -> None:
    changes: dict[str, dict[str, Any]] = {
        "terms.sync_every is 50 here and 100 there": {"terms": replace(TERMS, sync_every=50)},
        "settings.mixing is missing here and 0.5 there": {"settings": {}},
        "fragments[0][0][0] is b here and w there": {"fragments": ((("b", "(1,)"), ("w", "(2,)")), ())},
        "shards[0][0] is 1 here and 3 there": {"shards": ((1, 2), ())},
        "versions.torch is 2.7 here and 2.6 there": {"versions": {"torch": "2.7"}},
        "self_test is 60 here and 5f there": {"self_test": "60"},
        "run is other here and llm there": {"run": "other"},
    }
    for named, change in changes.items():
        other = replace(CHARTER, **change)
        assert other.key != CHARTER.key
        with pytest.raises(ValueError, match=re.escape(named)):
            other.require_same(CHARTER)
    with pytest.raises(ValueError, match=r"fragments\[1\] does not name its parameters once each"):
        replace(CHARTER, fragments=((), (("w", "(2,)"), ("w", "(2,)"))))


def test_impossible_terms_are_refused() -> None:
    for change in ({"overlap_steps": 100}, {"quorum": 0}, {"grace": -1.0}, {"rounds": 0}, {"grace": float("nan")}):
        with pytest.raises(ValueError, match="out of range"):
            replace(TERMS, **change)

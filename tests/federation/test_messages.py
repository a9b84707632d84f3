"""Records, messages and run configs as text: what goes out comes back, and anything else is
refused.
"""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation.codec import decoded, plain
from lightning_sdiloco.federation.messages import (
    Call,
    Contribution,
    Heartbeat,
    Hello,
    LeftOut,
    Payload,
    Position,
    Record,
    Standing,
    StateHeader,
    Timing,
    Welcome,
)
from lightning_sdiloco.federation.run_config import RunConfig, Terms

KEYS = st.text("0123456789abcdef", min_size=64, max_size=64)
LIVES = st.text("0123456789abcdef", min_size=16, max_size=16)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
WHOLE = st.integers(0, 2**63 - 1)
ROUNDS = st.integers(1, 2**40)
SMALL = st.integers(0, 99)
DIGESTS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.builds(Position, WHOLE, KEYS)
PAYLOADS = st.lists(st.builds(Payload, KEYS, WHOLE), max_size=2).map(tuple)
OWN = Contribution(1, 5, "site-a", "ab" * 8, "ef" * 32, 100, -7, (Payload("cd" * 32, 40),))
RECORD = Record(9, 1, 5, "ef" * 32, (OWN, replace(OWN, site="site-b")))
TERMS = Terms(fragments=2, sync_every=100, overlap_steps=5, grace=2.0)
FRAGMENTS = ((("w", "(2,)"), ("b", "(1,)")), ())
RUN_CONFIG = RunConfig(
    "llm", TERMS, {"mixing": "0.5"}, FRAGMENTS, ((3,), ()), {"torch": "2.6"}, "5f"
)


@st.composite
def records(draw: Any) -> Record:
    about = (draw(SMALL), draw(ROUNDS))
    previous = draw(KEYS)
    digest = draw(DIGESTS)
    counted = tuple(
        Contribution(
            *(*about, site, draw(LIVES), previous, draw(ROUNDS), digest, draw(PAYLOADS)),
            norm_squared=draw(st.floats(0, 1e30)),
            exact=draw(st.booleans()),
        )
        for site in sorted(draw(st.sets(NAMES, min_size=1, max_size=4)))
    )
    left_out = (LeftOut("absent", "not finite"),) if draw(st.booleans()) else ()
    return Record(draw(WHOLE), *about, previous, counted, left_out, draw(st.booleans()))


STANDING = st.tuples(st.builds(Standing, SMALL, LIVES))
MESSAGES = st.one_of(
    st.builds(Hello, NAMES, NAMES, LIVES, KEYS, st.tuples(POSITIONS)),
    st.builds(Call, SMALL, ROUNDS, st.booleans()),
    st.builds(Welcome, st.tuples(POSITIONS), st.tuples(st.integers(1, 9)), STANDING),
    st.builds(Heartbeat, NAMES, LIVES, st.booleans(), st.tuples(WHOLE)),
    st.builds(StateHeader, st.tuples(POSITIONS), st.tuples(DIGESTS)),
)


@settings(max_examples=60, deadline=None)
@given(records(), MESSAGES, st.integers(0), st.integers(0, 7), st.binary(max_size=300))
def test_texts_come_back_as_they_were_and_changed_bits_and_garbage_are_refused(
    record: Record, message: Any, at: int, bit: int, garbage: bytes
) -> None:
    for one in (record, message, *record.counted, RUN_CONFIG):
        assert type(one).from_bytes(one.to_bytes()) == one
    data = bytearray(record.to_bytes())
    data[at % len(data)] ^= 1 << bit
    for kind in (Record, Contribution, Hello, Heartbeat, Call, Welcome, StateHeader, RunConfig):
        for text in (bytes(data), garbage)[kind is not Record :]:
            with pytest.raises(Malformed):
                kind.from_bytes(text)


def test_invalid_fields_of_messages_are_refused_by_name() -> None:
    welcome = Welcome((), ())
    late = replace(RECORD, timings=(Timing("a", 1, 0.0),))
    for whole, field, values in (
        (OWN, "fragment", (True, -1)),
        (OWN, "round", (1.0, 2**63)),
        (OWN, "site", ("../../etc", "a\n", "a" * 64)),
        (OWN, "incarnation", ("AB" * 8,)),
        (OWN, "weight", ("100",)),
        (OWN, "digest", (None,)),
        (OWN, "payloads", ([["cd" * 32]], [["cd" * 32, -1]], {})),
        (OWN, "finite", (1,)),
        (OWN, "norm_squared", (-1.0,)),
        (OWN, "unknown", (1,)),
        (welcome, "standing[0]", ([0], [0, "ab" * 8, 1], [-1, "ab" * 8], [0, "AB" * 8], {})),
        (late, "timings[0]", (["a", 1, -1.0, None], ["a", 0, 1.0, None], ["a"])),
        (late, "left_out[0]", (["a", "no reason"],)),
    ):
        name, _, is_in_a_list = field.partition("[")
        for value in values:
            text = {**plain(whole), name: [value] if is_in_a_list else value}
            with pytest.raises(Malformed, match=re.escape(field)):
                type(whole).from_bytes(json.dumps(text).encode())
    other = replace(OWN, site="site-b")
    others = [
        replace(other, **change)
        for change in ({"round": 6}, {"digest": 8}, {"previous": "00" * 32})
    ]
    alone = (replace(OWN, finite=False),), (replace(OWN, weight=0),)
    for counted in ((), (OWN, OWN), (other, OWN), *((OWN, one) for one in others), *alone):
        with pytest.raises(Malformed, match=r"record\.counted"):
            Record.from_bytes(replace(RECORD, counted=counted).to_bytes())
    surprises = (
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b"[" * 100_000,
        b'"' + b"a" * 200_000 + b'"',
        b"9" * 5000,
        b"\xff",
    )
    for data in (*surprises, b""):
        with pytest.raises(Malformed):
            decoded(data, 150_000)
    for change in (
        {"overlap_steps": 100},
        {"quorum": 0},
        {"grace": -1.0},
        {"rounds": 0},
        {"grace": float("nan")},
    ):
        with pytest.raises(ValueError, match="out of range"):
            replace(TERMS, **change)


def test_the_key_of_a_record_covers_all_its_fields_and_defaults_are_not_written() -> None:
    changes = (
        {"seq": 8},
        {"previous": "00" * 32},
        {"final": True},
        {"left_out": (LeftOut("c", "no samples"),)},
    )
    counted = (OWN,), (OWN, replace(OWN, site="site-b", exact=True))
    others = [
        replace(RECORD, **change) for change in (*changes, *({"counted": own} for own in counted))
    ]
    assert len({RECORD.key, *(other.key for other in others)}) == 7
    assert {"steps", "exact", "timings"} & (plain(OWN).keys() | plain(RECORD).keys()) == set()
    assert Contribution.from_bytes(replace(OWN, weight=0, exact=True).to_bytes()).reason == ""


def test_another_run_config_is_refused_with_its_differences_except_patch_versions() -> None:
    with pytest.raises(Malformed):
        RunConfig.from_bytes(RUN_CONFIG.to_bytes().replace(b'"0.5"', b'"0.6"'))
    changes: dict[str, dict[str, Any]] = {
        "terms.sync_every is 50 here and 100 there": {"terms": replace(TERMS, sync_every=50)},
        "settings.mixing is missing here and 0.5 there": {"settings": {}},
        "fragments[0][0][0] is b here and w there": {
            "fragments": ((("b", "(1,)"), ("w", "(2,)")), ())
        },
        "shards[0][0] is 1 here and 3 there": {"shards": ((1, 2), ())},
        "versions.torch is 2.7 here and 2.6 there": {"versions": {"torch": "2.7"}},
        "self_test is 60 here and 5f there": {"self_test": "60"},
        "run is other here and llm there": {"run": "other"},
    }
    for named, change in changes.items():
        other = replace(RUN_CONFIG, **change)
        assert other.key != RUN_CONFIG.key
        with pytest.raises(ValueError, match=re.escape(named)):
            other.require_same(RUN_CONFIG)
    with pytest.raises(ValueError, match=r"fragments\[1\] must name its parameters once each"):
        replace(RUN_CONFIG, fragments=((), (("w", "(2,)"), ("w", "(2,)"))))
    # Another patch of a version joins where its arithmetic agrees.
    ours = {"lightning-sdiloco": "0.1.0"}
    founded = replace(RUN_CONFIG, versions={**ours, "torch": "2.13.0"})
    patched = replace(founded, versions={**ours, "torch": "2.13.1"})
    assert patched.require_same(founded) == ["versions.torch is 2.13.1 here and 2.13.0 there"]
    assert founded.require_same(founded) == []
    others = [{"versions": {**ours, "torch": "2.14.0"}}, {"versions": {"torch": "2.13.1"}}]
    for change in (*others, {"self_test": "60"}, {"terms": replace(TERMS, sync_every=50)}):
        with pytest.raises(ValueError, match="another run config"):
            replace(patched, **change).require_same(founded)  # type: ignore[arg-type]

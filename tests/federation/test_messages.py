"""Records, messages and run configs as text: they come back as they were, and anything else is
refused.
"""

import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation import codec
from lightning_sdiloco.federation.codec import decoded, plain
from lightning_sdiloco.federation.coordinator import Coordinator
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
    StepCounts,
    Timing,
    Welcome,
)
from lightning_sdiloco.federation.run_config import RunConfig, Terms
from tests.federation.simulated_disk import SimulatedDisk, SimulatedJournal, SimulatedStore

KEYS = st.text("0123456789abcdef", min_size=64, max_size=64)
LIVES = st.text("0123456789abcdef", min_size=16, max_size=16)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
WHOLE = st.integers(0, 2**63 - 1)
ROUNDS = st.integers(1, 2**40)
SMALL = st.integers(0, 99)
DIGESTS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.builds(Position, WHOLE, KEYS)
PAYLOADS = st.lists(st.builds(Payload, KEYS, WHOLE), max_size=2).map(tuple)
OF_A = Contribution(1, 5, "site-a", "ab" * 8, "ef" * 32, 100, -7, (Payload("cd" * 32, 40),))
OF_B = replace(OF_A, site="site-b")
RECORD = Record(9, 1, 5, "ef" * 32, (OF_A, OF_B))
TERMS = Terms(fragments=2, sync_every=100, overlap_steps=5, grace=2.0)
FRAGMENTS = ((("w", "(2,)"), ("b", "(1,)")), ())
RUN_CONFIG = RunConfig(
    "llm", TERMS, {"mixing": "0.5"}, FRAGMENTS, ((3,), ()), {"torch": "2.6"}, "5f"
)


@st.composite
def records(draw: Any) -> Record:
    empty = Record(
        draw(WHOLE), draw(SMALL), draw(ROUNDS), draw(KEYS), (), final=draw(st.booleans())
    )
    digest = draw(DIGESTS)
    counted = []
    for site in sorted(draw(st.sets(NAMES, min_size=1, max_size=4))):
        contribution = Contribution(
            empty.fragment,
            empty.round,
            site,
            draw(LIVES),
            empty.previous,
            draw(ROUNDS),
            digest,
            draw(PAYLOADS),
            norm_squared=draw(st.floats(0, 1e30)),
            exact=draw(st.booleans()),
        )
        counted.append(contribution)
    left_out = (LeftOut("absent", "not finite"),) if draw(st.booleans()) else ()
    return replace(empty, counted=tuple(counted), left_out=left_out)


STANDING = st.tuples(st.builds(Standing, SMALL, LIVES))
MESSAGES = st.one_of(
    st.builds(Hello, NAMES, NAMES, LIVES, KEYS, st.tuples(POSITIONS)),
    st.builds(Call, SMALL, ROUNDS, st.booleans()),
    st.builds(Welcome, st.tuples(POSITIONS), st.tuples(st.integers(1, 9)), STANDING),
    st.builds(Heartbeat, NAMES, LIVES, st.booleans(), st.tuples(WHOLE)),
    st.builds(StepCounts, WHOLE, st.none() | WHOLE),
    st.builds(StateHeader, st.tuples(POSITIONS), st.tuples(DIGESTS)),
)

MESSAGE_KINDS = (Record, Contribution, Hello, Heartbeat, Call, Welcome, StateHeader, RunConfig)


@settings(max_examples=60, deadline=None)
@given(records(), MESSAGES, st.integers(0), st.integers(0, 7), st.binary(max_size=300))
def test_texts_come_back_as_they_were_and_changed_bits_and_garbage_are_refused(
    record: Record, message: Any, position: int, bit: int, garbage: bytes
) -> None:
    for sent in (record, message, *record.counted, RUN_CONFIG):
        assert type(sent).from_bytes(sent.to_bytes()) == sent
    for kind in MESSAGE_KINDS:
        with pytest.raises(Malformed):
            kind.from_bytes(garbage)
    changed = bytearray(record.to_bytes())
    changed[position % len(changed)] ^= 1 << bit
    with pytest.raises(Malformed):
        Record.from_bytes(bytes(changed))


def require_refusal(kind: Any, text: dict[str, Any], field: str) -> None:
    """Asserts that a text is refused, with the name of the field."""
    with pytest.raises(Malformed, match=re.escape(field)):
        kind.from_bytes(json.dumps(text).encode())


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("fragment", (True, -1)),
        ("round", (1.0, 2**63)),
        ("site", ("../../etc", "a\n", "a" * 64)),
        ("incarnation", ("AB" * 8,)),
        ("weight", ("100",)),
        ("digest", (None,)),
        ("payloads", ([["cd" * 32]], [["cd" * 32, -1]], {})),
        ("finite", (1,)),
        ("norm_squared", (-1.0,)),
        ("unknown", (1,)),
    ],
)
def test_invalid_fields_of_a_contribution_are_refused_by_name(field: str, values: Any) -> None:
    for value in values:
        require_refusal(Contribution, {**plain(OF_A), field: value}, field)


def test_invalid_entries_of_welcomes_and_records_are_refused_by_name() -> None:
    welcome = plain(Welcome((), ()))
    for standing in ([0], [0, "ab" * 8, 1], [-1, "ab" * 8], [0, "AB" * 8], {}):
        require_refusal(Welcome, {**welcome, "standing": [standing]}, "standing[0]")
    late = plain(replace(RECORD, timings=(Timing("a", 1, 0.0),)))
    for timing in (["a", 1, -1.0, None], ["a", 0, 1.0, None], ["a"]):
        require_refusal(Record, {**late, "timings": [timing]}, "timings[0]")
    require_refusal(Record, {**late, "left_out": [["a", "no reason"]]}, "left_out[0]")


@pytest.mark.parametrize(
    "counted",
    [
        (),
        (OF_A, OF_A),
        (OF_B, OF_A),
        (OF_A, replace(OF_B, round=6)),
        (OF_A, replace(OF_B, digest=8)),
        (OF_A, replace(OF_B, previous="00" * 32)),
        (replace(OF_A, finite=False),),
        (replace(OF_A, weight=0),),
    ],
)
def test_contributions_that_do_not_fit_into_a_record_are_refused(counted: Any) -> None:
    with pytest.raises(Malformed, match=r"record\.counted"):
        Record.from_bytes(replace(RECORD, counted=counted).to_bytes())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b"[" * 100_000,
        b'"' + b"a" * 200_000 + b'"',
        b"9" * 5000,
        b"\xff",
    ],
    ids=["empty", "twice", "nan", "nested", "long", "digits", "no_utf8"],
)
def test_text_that_is_no_plain_json_is_malformed(text: bytes) -> None:
    with pytest.raises(Malformed):
        decoded(text, 150_000)


@pytest.mark.parametrize(
    "change",
    [
        {"overlap_steps": 100},
        {"quorum": 0},
        {"grace": -1.0},
        {"rounds": 0},
        {"grace": float("nan")},
    ],
)
def test_terms_that_are_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        replace(TERMS, **change)


def test_the_key_of_a_record_covers_all_its_fields_and_defaults_are_not_written() -> None:
    exact_b = replace(OF_B, exact=True)
    changes: tuple[dict[str, Any], ...] = (
        {"seq": 8},
        {"previous": "00" * 32},
        {"final": True},
        {"left_out": (LeftOut("c", "no samples"),)},
        {"counted": (OF_A,)},
        {"counted": (OF_A, exact_b)},
    )
    changed_keys = {replace(RECORD, **change).key for change in changes}
    assert len({RECORD.key, *changed_keys}) == 7
    written = plain(OF_A).keys() | plain(RECORD).keys()
    assert not written & {"steps", "exact", "timings"}
    idle = replace(OF_A, weight=0, exact=True)
    assert Contribution.from_bytes(idle.to_bytes()).reason == ""


def test_another_run_config_is_refused_with_its_differences_except_patch_versions() -> None:
    with pytest.raises(Malformed):
        RunConfig.from_bytes(RUN_CONFIG.to_bytes().replace(b'"0.5"', b'"0.6"'))
    swapped = ((("b", "(1,)"), ("w", "(2,)")), ())
    changes: dict[str, dict[str, Any]] = {
        "terms.sync_every is 50 here and 100 there": {"terms": replace(TERMS, sync_every=50)},
        "settings.mixing is missing here and 0.5 there": {"settings": {}},
        "fragments[0][0][0] is b here and w there": {"fragments": swapped},
        "shards[0][0] is 1 here and 3 there": {"shards": ((1, 2), ())},
        "versions.torch is 2.7 here and 2.6 there": {"versions": {"torch": "2.7"}},
        "self_test is 60 here and 5f there": {"self_test": "60"},
        "run is other here and llm there": {"run": "other"},
    }
    for difference, change in changes.items():
        changed = replace(RUN_CONFIG, **change)
        assert changed.key != RUN_CONFIG.key
        with pytest.raises(ValueError, match=re.escape(difference)):
            changed.require_same(RUN_CONFIG)
    with pytest.raises(ValueError, match=r"fragments\[1\] must name each parameter only once"):
        replace(RUN_CONFIG, fragments=((), (("w", "(2,)"), ("w", "(2,)"))))


def test_another_patch_of_a_version_joins_where_its_arithmetic_agrees() -> None:
    ours = {"lightning-sdiloco": "0.1.0"}
    founded = replace(RUN_CONFIG, versions={**ours, "torch": "2.13.0"})
    patched = replace(founded, versions={**ours, "torch": "2.13.1"})
    assert patched.require_same(founded) == ["versions.torch is 2.13.1 here and 2.13.0 there"]
    assert founded.require_same(founded) == []
    changes: tuple[dict[str, Any], ...] = (
        {"versions": {**ours, "torch": "2.14.0"}},
        {"versions": {"torch": "2.13.1"}},
        {"self_test": "60"},
        {"terms": replace(TERMS, sync_every=50)},
    )
    for change in changes:
        with pytest.raises(ValueError, match="different run config"):
            replace(patched, **change).require_same(founded)


def calls_of_a_start(records: int) -> int:
    """Returns how many functions a hub calls that starts on a ledger with so many records."""
    disk = SimulatedDisk()
    journal: Any = SimulatedJournal(disk)
    store: Any = SimulatedStore(disk, lambda: 0.0)
    journal.note({"run_config": RUN_CONFIG.to_bytes()})
    closed = Position.start(RUN_CONFIG.key)
    for seq in range(records):
        of_a = replace(OF_A, round=closed.next_round, previous=closed.key)
        counted = (of_a, replace(of_a, site="site-b"))
        record = Record(seq, 1, closed.next_round, closed.key, counted)
        journal.append(seq, record.to_bytes())
        closed = record.position
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        Coordinator("llm", journal, store)
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_of_a_hub_that_starts_grows_in_proportion_to_its_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls_of_a_start(20)
    calls = [calls_of_a_start(records) for records in (100, 200, 400)]
    assert calls[2] - calls[1] <= 2.02 * (calls[1] - calls[0])

    hashed = list[bytes]()
    key_of = codec.key_of

    def counting(blob: bytes) -> str:
        hashed.append(blob)
        return key_of(blob)

    monkeypatch.setattr(codec, "key_of", counting)
    calls_of_a_start(0)
    hashes_without_records = len(hashed)
    calls_of_a_start(100)
    # One to write a record, and one to read it.
    assert len(hashed) - hashes_without_records == hashes_without_records + 200

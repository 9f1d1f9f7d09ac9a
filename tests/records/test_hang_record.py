"""The record of a hang as JSON: whole there and back, and nothing foreign comes through."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hang_jobs import Job, worker
from hypothesis import given
from hypothesis import strategies as st

from stepscope.records.hang import HangRecord

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def record() -> HangRecord:
    job = Job(ranks=3, sequence=4).alone(1, workers=(worker(cpu_share=0.5),), cpu_share=0.01)
    return replace(job.hang(), over="recovered", over_wall_ns=7, action="asked", cycle=("a", "b"))


def test_there_and_back(record: HangRecord) -> None:
    assert HangRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_what_may_be_missing_and_what_may_be_more(record: HangRecord) -> None:
    raw = record.to_dict()
    needed = ("schema", "number", "host", "kind", "title", "declared_wall_ns", "stopped_wall_ns", "threshold_s")
    least = {key: raw[key] for key in needed}
    assert HangRecord.from_dict({**least, "later": [1]}).culprits == ()
    for key in needed:
        with pytest.raises(ValueError):
            HangRecord.from_dict({name: value for name, value in least.items() if name != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", 2),
        ("number", True),
        ("number", 1.0),
        ("number", 1 << 63),
        ("host", None),
        ("kind", "hang"),
        ("kind", ["hang_host"]),
        ("threshold_s", float("nan")),
        ("threshold_s", "10"),
        ("step_s", False),
        ("culprits", {}),
        ("culprits", [{"rank": 1}]),
        ("culprits", [{"rank": "1", "reason": ""}]),
        ("victims", [1, None]),
        ("victims", "12"),
        ("collective", []),
        ("cycle", [1]),
        ("ranks", [{"rank": 0, "pid": 1, "workers": [3]}]),
        ("stacks", [{"ranks": [0], "threads": [{"main": 1}]}]),
        ("flight", []),
        ("flight", {"a": float("inf")}),
        ("flight", {"a": {"b": [1 << 70]}}),
        ("over", "later"),
    ],
)
def test_anything_else_is_a_value_error(record: HangRecord, key: str, value: Any) -> None:
    with pytest.raises(ValueError):
        HangRecord.from_dict({**record.to_dict(), key: value})


@given(JSON)
def test_foreign_json(raw: Any) -> None:
    with pytest.raises(ValueError):
        HangRecord.from_dict(raw)


@given(st.data())
def test_a_record_with_one_value_changed(record: HangRecord, data: st.DataObject) -> None:
    """Either it is refused, or it is a record that can be written and read again."""
    raw = record.to_dict()
    place: Any = raw
    key = data.draw(st.sampled_from(sorted(place)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(JSON)
    try:
        found = HangRecord.from_dict(raw)
    except ValueError:
        return
    assert HangRecord.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


def test_what_steers_a_terminal_is_taken_out(record: HangRecord) -> None:
    found = HangRecord.from_dict(
        {**record.to_dict(), "title": "a\x1b[31mred\x9b\n\ud800b", "flight": {"\x07": ["\x1b"]}}
    )
    assert found.title == "a [31mred  ?b"
    assert found.flight == {" ": [" "]}


def test_a_number_too_long_to_write_is_refused(record: HangRecord) -> None:
    with pytest.raises(ValueError):
        HangRecord.from_dict({**record.to_dict(), "number": 10**5000})

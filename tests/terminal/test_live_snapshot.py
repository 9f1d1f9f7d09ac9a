"""What is known of a run: what messages make of it, that it stays small, and that nonsense is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import HubError
from stepscope.terminal.documents import (
    KEPT_EVENTS,
    KEPT_STEPS,
    Findings,
    Message,
    Run,
    Snapshot,
    Steps,
    Verdict,
    apply_message,
    with_run,
    with_steps,
)


def message_of(event: str, **data: Any) -> Message:
    return Message(event=event, data=json.dumps({"schema": 1, **data}).encode())


def steps(first: int, count: int, wall: float = 5.0) -> dict[str, Any]:
    numbers = list(range(first, first + count))
    return {"first": numbers, "last": numbers, "mean_ns": {"wall": [wall] * count, "work": [4.0] * count}}


def test_steps_are_joined_and_what_both_have_is_taken_anew() -> None:
    known = apply_message(Snapshot(), message_of("steps", **steps(0, 10)))
    known = apply_message(known, message_of("steps", **steps(8, 4, wall=7.0)))
    assert [row.last for row in known.steps] == list(range(12))
    assert [row.mean_ns["wall"] for row in known.steps] == [5.0] * 8 + [7.0] * 4
    assert (known.step, known.beat) == (11, 2)


def test_a_step_that_is_another_now_takes_its_own_place() -> None:
    known = apply_message(Snapshot(), message_of("steps", **steps(2, 4)))
    known = apply_message(known, message_of("again", **steps(1, 3, wall=7.0)))
    assert [row.last for row in known.steps] == [2, 3, 4, 5]
    assert [row.mean_ns["wall"] for row in known.steps] == [7.0, 7.0, 5.0, 5.0]
    assert (known.step, known.beat) == (5, 2)


def test_devices_are_timed_in_some_steps_or_in_none() -> None:
    known = apply_message(Snapshot(), message_of("steps", **steps(0, 2)))
    assert not known.device_timed
    known = apply_message(
        known, message_of("steps", **steps(2, 3), device_mean_ns={"forward": [None, 7, None], "h2d": [None, 0, None]})
    )
    assert [row.device_ns for row in known.steps] == [{}, {}, {}, {"forward": 7.0, "h2d": 0.0}, {}]
    assert known.device_timed


def test_nothing_grows_with_the_run() -> None:
    known = Snapshot()
    for at in range(20):
        known = apply_message(known, message_of("steps", **steps(at * 100, 100)))
        known = apply_message(
            known, message_of("events", events=[{"number": at * 50 + n, "event": "x"} for n in range(1, 51)])
        )
    assert len(known.steps) == KEPT_STEPS
    assert known.steps[-1].last == 1999
    assert [event.number for event in known.events] == list(range(1001 - KEPT_EVENTS, 1001))
    assert apply_message(known, message_of("events", events=[{"number": 900, "event": "x"}])).events == known.events


def test_a_job_that_begins_anew_forgets_its_steps() -> None:
    known = apply_message(Snapshot(), message_of("steps", **steps(0, 10)))
    assert apply_message(known, message_of("reset", why="first", last_step=9)) == known
    assert apply_message(known, message_of("reset", why="attempt", last_step=9)).steps == ()


def test_the_status_says_when_it_is_over_and_the_findings_when_that_is_the_last_word() -> None:
    known = with_run(Snapshot(link="live"), Run(status="running", step=3, verdict=Verdict(title="slow")))
    assert known.findings is not None
    assert (known.findings.verdict, known.over, known.step) == (Verdict(title="slow"), False, 3)
    known = apply_message(known, message_of("status", status="finished", over=True, step=9))
    assert (known.over, known.final, known.step) == (True, False, 9)
    assert apply_message(known, message_of("findings", live=False, findings=[], verdict=None)).final
    kept = with_run(
        apply_message(known, message_of("findings", live=True, findings=[])), Run(verdict=Verdict(title="other"))
    )
    assert kept.findings == Findings()


def test_what_nobody_knows_is_passed_over() -> None:
    known = Snapshot()
    assert (
        apply_message(known, message_of("heartbeat", wall_ns=1))
        == apply_message(known, message_of("tomorrow", new=[1]))
        == known
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"first": 1}',
        b'{"first": [1], "last": []}',
        b'{"first": [1], "last": [1], "mean_ns": {"wall": []}}',
        b'{"first": [1], "last": [1], "mean_ns": {"work": [1]}}',
        b'{"first": [1], "last": [1], "mean_ns": {"wall": [1e999]}}',
        b'{"first": [1], "last": [1], "mean_ns": {"wall": ["1"]}}',
        b"[" * 100_000,
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(HubError, match="does not understand"):
        apply_message(Snapshot(), Message(event="steps", data=data))


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
KEYS = st.sampled_from(["first", "last", "mean_ns", "events", "findings", "verdict", "status", "over", "why", "phases"])


@given(st.sampled_from(["steps", "events", "findings", "status", "reset"]), st.dictionaries(KEYS, JSON, max_size=5))
def test_any_document_is_taken_or_refused(event: str, document: dict[str, Any]) -> None:
    known = apply_message(Snapshot(), message_of("steps", **steps(0, 3)))
    try:
        found = apply_message(known, Message(event=event, data=json.dumps(document).encode()))
    except HubError:
        return
    assert len(found.steps) <= KEPT_STEPS


def test_steps_without_any_change_nothing() -> None:
    known = with_steps(
        Snapshot(), Steps(**{name: tuple(v) if isinstance(v, list) else v for name, v in steps(0, 2).items()})
    )
    assert with_steps(known, Steps()) is known

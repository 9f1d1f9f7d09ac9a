"""The ledger and the decoder together: what the hooks jot down, as it comes out at the other end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clock import FakeClock
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rings import START_NS, RingStream

from stepscope.recorder.ledger import NOT_NOW, Ledger
from stepscope.records.identity import RankIdentity
from stepscope.records.steps import BACKWARD, COMM, EVAL, FORWARD, INPUT, OPTIMIZER, OTHER, STEP, STEP_FIELDS
from stepscope.ring import RingReader, RingWriter
from stepscope.ring.layout import DDP_COMPUTE, DDP_EXPOSED, DDP_SAMPLED_COMPUTE, MIN_CAPACITY, data_word


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[RingStream]:
    stream = RingStream(tmp_path / "1.ring", RankIdentity(host="node", pid=os.getpid()), capacity=MIN_CAPACITY)
    yield stream
    stream.close()


def steps(stream: RingStream) -> Any:
    reader = RingReader(stream.ring.path)
    batch = reader.read(0)
    reader.close()
    assert batch.torn == 0
    return np.frombuffer(b"".join(s for s in batch.slots if s[4] == STEP), np.dtype(STEP_FIELDS))


def spent(row: Any) -> dict[int, int]:
    return {slot: int(ns) for slot, ns in enumerate(row["phase_ns"]) if ns}


def spend(stream: RingStream, phase: int, nanoseconds: int) -> None:
    outer = stream.ledger.enter(phase)
    stream.clock.advance(nanoseconds)
    stream.ledger.leave(outer)


def test_nested_phases_are_exclusive(stream: RingStream) -> None:
    ledger, clock = stream.ledger, stream.clock
    clock.advance(5)
    assert ledger.enter(BACKWARD) == OTHER
    clock.advance(30)
    assert ledger.enter(COMM) == BACKWARD
    clock.advance(100)
    ledger.leave(BACKWARD)
    clock.advance(7)
    ledger.leave(OTHER)
    clock.advance(2)
    ledger.end_step(OTHER, 0, 3)
    (row,) = steps(stream)
    assert spent(row) == {OTHER: 7, BACKWARD: 37, COMM: 100}
    assert (row["start_ns"], row["wall_ns"], row["flags"], row["micro_batches"]) == (START_NS, 144, 3, 1)


def test_a_phase_that_spans_the_end_of_a_step_goes_on_in_the_next(stream: RingStream) -> None:
    stream.ledger.enter(OPTIMIZER)
    stream.clock.advance(10)
    stream.ledger.end_step(OPTIMIZER, 0, 0)
    stream.clock.advance(4)
    stream.ledger.leave(OTHER)
    stream.ledger.end_step(OTHER, 1, 0)
    assert [spent(row) for row in steps(stream)] == [{OPTIMIZER: 10}, {OPTIMIZER: 4}]


def test_the_loss_between_model_and_backward_is_forward(stream: RingStream) -> None:
    spend(stream, FORWARD, 10)
    stream.clock.advance(3)
    spend(stream, BACKWARD, 20)
    stream.clock.advance(1)
    stream.ledger.end_step(OTHER, 0, 0)
    (row,) = steps(stream)
    assert spent(row) == {FORWARD: 13, BACKWARD: 20, OTHER: 1}


def test_something_else_between_model_and_backward_is_not(stream: RingStream) -> None:
    spend(stream, FORWARD, 10)
    stream.clock.advance(3)
    spend(stream, INPUT, 5)
    stream.clock.advance(2)
    spend(stream, BACKWARD, 20)
    stream.ledger.end_step(OTHER, 0, 0)
    assert spent(steps(stream)[0]) == {FORWARD: 10, INPUT: 5, BACKWARD: 20, OTHER: 5}


def test_forward_inside_backward_is_backward(stream: RingStream) -> None:
    outer = stream.ledger.enter(BACKWARD)
    stream.clock.advance(4)
    spend(stream, FORWARD, 6)
    stream.clock.advance(5)
    stream.ledger.leave(outer)
    stream.ledger.end_step(OTHER, 0, 0)
    (row,) = steps(stream)
    assert spent(row) == {BACKWARD: 15}
    assert row["forwards"] == 0


def test_input_of_an_evaluation_is_evaluation(stream: RingStream) -> None:
    for phase, nanoseconds in ((INPUT, 5), (EVAL, 7), (INPUT, 6), (EVAL, 8), (INPUT, 100), (FORWARD, 9)):
        spend(stream, phase, nanoseconds)
    stream.ledger.end_step(OTHER, 0, 0)
    (row,) = steps(stream)
    assert spent(row) == {EVAL: 26, INPUT: 100, FORWARD: 9}
    assert row["batches"] == 3


def test_what_ddp_says_stands_in_the_record(stream: RingStream) -> None:
    spend(stream, BACKWARD, 130)
    stream.ledger.end_step(OTHER, 0, 0, [data_word(DDP_COMPUTE, 40), data_word(DDP_EXPOSED, 60)])
    spend(stream, BACKWARD, 50)
    stream.ledger.end_step(OTHER, 1, 0, [data_word(DDP_SAMPLED_COMPUTE, 45)])
    first, sampled = steps(stream)
    assert (spent(first), first["ddp_compute_ns"], first["ddp_exposed_ns"]) == ({BACKWARD: 130}, 40, 60)
    assert (spent(sampled), sampled["ddp_compute_ns"], sampled["ddp_exposed_ns"]) == ({BACKWARD: 50}, 45, 0)


def test_the_header_says_where_the_process_is(stream: RingStream) -> None:
    reader = RingReader(stream.ring.path)

    def live() -> tuple[int, int, int]:
        header = reader.header()
        return header.live_phase, header.live_since_ns - START_NS, header.live_step

    assert live() == (OTHER, 0, 0)
    stream.clock.advance(20)
    stream.ledger.enter(INPUT)
    assert live() == (INPUT, 20, 0)  # not announced yet, and seen all the same
    stream.clock.advance(3)
    stream.ledger.leave(OTHER)
    assert live() == (OTHER, 23, 0)
    stream.ledger.enter(OPTIMIZER)
    stream.clock.advance(1)
    stream.ledger.end_step(OTHER, 0, 0)
    assert live() == (OTHER, 24, 1)
    reader.close()


def test_another_thread_books_nothing(stream: RingStream) -> None:
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(stream.ledger.enter(FORWARD)))
    thread.start()
    thread.join()
    assert answers == [NOT_NOW]
    assert stream.ledger.phase == OTHER


def test_nobody_is_let_in_before_recording_begins(tmp_path: Path) -> None:
    requests: list[int] = []
    clock = FakeClock()
    ledger = Ledger(clock, lambda phase: bool(requests.append(phase)))
    assert ledger.enter(FORWARD) == NOT_NOW
    assert ledger.timed(lambda x: x + 1, INPUT)(1) == 2
    assert requests == [FORWARD, INPUT]
    ring = RingWriter(tmp_path / "1.ring", RankIdentity(host="", pid=1), capacity=MIN_CAPACITY)
    ledger.open(ring)
    assert ledger.enter(FORWARD) == OTHER
    ledger.close()
    assert ledger.enter(INPUT) == NOT_NOW
    ring.close()


def test_timed_books_what_raises_too(stream: RingStream) -> None:
    def fail() -> None:
        stream.ledger.enter(COMM)
        stream.clock.advance(6)
        raise KeyError

    with pytest.raises(KeyError):
        stream.ledger.timed(fail, BACKWARD)()
    assert stream.ledger.phase == OTHER
    stream.ledger.end_step(OTHER, 0, 0)
    assert spent(steps(stream)[0]) == {COMM: 6}


Action = tuple[str, int, int]


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(st.tuples(st.sampled_from(["enter", "leave", "end"]), st.integers(1, 15), st.integers(0, 1000)))
)
def test_whatever_happens_every_nanosecond_is_booked_once(tmp_path: Path, actions: list[Action]) -> None:
    path = tmp_path / "fuzz.ring"
    path.unlink(missing_ok=True)
    stream = RingStream(path, RankIdentity(host="node", pid=os.getpid()), capacity=MIN_CAPACITY)
    outers: list[int] = []
    count = 0
    for action, phase, nanoseconds in actions:
        stream.clock.advance(nanoseconds)
        if action == "enter":
            outer = stream.ledger.enter(phase)
            if outer != NOT_NOW:
                outers.append(outer)
        elif action == "leave" and outers:
            stream.ledger.leave(outers.pop())
        elif action == "end":
            stream.ledger.end_step(stream.ledger.phase, count, 0)
            count += 1
    stream.ledger.end_step(stream.ledger.phase, count, 0)
    rows = steps(stream)
    stream.close()
    assert rows["step"].tolist() == list(range(count + 1))
    assert (rows["phase_ns"].sum(axis=1) == rows["wall_ns"]).all()
    assert rows["start_ns"][0] == START_NS
    assert (rows["start_ns"][1:] == rows["start_ns"][:-1] + rows["wall_ns"][:-1]).all()
    assert rows["start_ns"][-1] + rows["wall_ns"][-1] == stream.clock.now_ns

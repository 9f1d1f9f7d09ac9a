from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from stepscope.records.phases import BACKWARD, COMM, FORWARD, INPUT, OPTIMIZER, OTHER, PHASE_SLOTS
from stepscope.recorder.ledger import Ledger
from stepscope.testing.clock import FakeClock


def make(clock: FakeClock) -> tuple[Ledger, memoryview]:
    live = memoryview(bytearray(16 * 8)).cast("Q")
    return Ledger(clock, live, 9, 10), live


def test_nested_phases_are_exclusive() -> None:
    clock = FakeClock()
    ledger, _ = make(clock)
    clock.advance(5)
    assert ledger.enter(BACKWARD)
    clock.advance(30)
    assert ledger.enter(COMM)
    clock.advance(100)
    assert ledger.leave() == 100
    clock.advance(7)
    assert ledger.leave() == 7
    clock.advance(2)
    totals, now = ledger.close()
    assert {slot: total for slot, total in enumerate(totals) if total} == {OTHER: 7, BACKWARD: 37, COMM: 100}
    assert now == clock.now_ns


def test_a_phase_that_spans_the_end_of_a_step_goes_on_in_the_next() -> None:
    clock = FakeClock()
    ledger, _ = make(clock)
    ledger.enter(OPTIMIZER)
    clock.advance(10)
    first, _ = ledger.close()
    clock.advance(4)
    ledger.leave()
    second, _ = ledger.close()
    assert (first[OPTIMIZER], second[OPTIMIZER]) == (10, 4)


def test_the_live_word_says_where_we_are_and_since_when() -> None:
    clock = FakeClock(start_ns=500)
    ledger, live = make(clock)
    clock.advance(20)
    ledger.enter(INPUT)
    assert (live[9], live[10]) == (INPUT, 520)
    clock.advance(3)
    ledger.leave()
    assert (live[9], live[10]) == (OTHER, 523)


def test_another_thread_books_nothing() -> None:
    clock = FakeClock()
    ledger, _ = make(clock)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ledger.enter(FORWARD)))
    thread.start()
    thread.join()
    assert answers == [False]
    assert ledger.phase == OTHER


def test_move_never_takes_more_than_there_is() -> None:
    clock = FakeClock()
    ledger, _ = make(clock)
    ledger.enter(BACKWARD)
    clock.advance(10)
    ledger.leave()
    ledger.move(BACKWARD, COMM, 25)
    ledger.move(BACKWARD, COMM, -3)
    assert (ledger.totals[BACKWARD], ledger.totals[COMM]) == (0, 10)


def test_unwind_leaves_what_was_never_left() -> None:
    clock = FakeClock()
    ledger, _ = make(clock)
    depth = ledger.depth
    ledger.enter(OPTIMIZER)
    ledger.enter(FORWARD)
    clock.advance(9)
    ledger.unwind(depth)
    assert (ledger.phase, ledger.totals[FORWARD]) == (OTHER, 9)


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "move", "close"]), st.integers(0, 15), st.integers(0, 1000))))
def test_whatever_happens_every_nanosecond_is_booked_once(actions: list[tuple[str, int, int]]) -> None:
    clock = FakeClock()
    ledger, _ = make(clock)
    started, booked = clock.now_ns, 0
    for action, phase, nanoseconds in actions:
        clock.advance(nanoseconds)
        if action == "enter":
            ledger.enter(phase)
        elif action == "leave":
            ledger.leave()
        elif action == "move":
            ledger.move(phase, (phase + 1) % PHASE_SLOTS, nanoseconds)
        else:
            totals, _ = ledger.close()
            assert min(totals) >= 0
            booked += sum(totals)
    totals, now = ledger.close()
    assert booked + sum(totals) == now - started

"""What the last words of a ring tell while its process stands still: the phase and the collective it is in."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import RingStream, write_call, write_step, write_steps, write_wait

from stepscope.records.collectives import OPS
from stepscope.records.identity import RankIdentity
from stepscope.records.steps import BACKWARD, COMM, FORWARD, OTHER
from stepscope.ring import LastCollective, RingReader
from stepscope.ring import layout as w
from stepscope.ring.layout import MIN_CAPACITY, TURN_WORDS
from stepscope.ring.reader import (
    LATEST_STEPS,
    RECENT_WORDS,
    last_collective,
    latest_phase_ns,
    live_phase,
    recent_shares,
)

ALL_REDUCE, SEND, RECV = OPS.index("all_reduce"), OPS.index("send"), OPS.index("recv")


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[RingStream]:
    stream = RingStream(tmp_path / "1.ring", RankIdentity(host="node", pid=os.getpid()), capacity=MIN_CAPACITY)
    yield stream
    stream.close()


@pytest.fixture
def read(stream: RingStream) -> Iterator[RingReader]:
    reader = RingReader(stream.ring.path)
    yield reader
    reader.close()


def write(stream: RingStream, *words: int) -> None:
    """Without announcing them, as the hot path does."""
    ledger = stream.ledger
    for word in words:
        ledger.body[ledger.at] = word
        ledger.at += 1


def call(stream: RingStream, op: int = ALL_REDUCE, *, group: int = 0, size: int = 0, peer: int | None = None) -> int:
    stream.clock.advance(1000)
    return write_call(stream, op, group=group, size=size, peer=peer)


def wait(stream: RingStream, distance: int = 0) -> int:
    stream.clock.advance(1000)
    return write_wait(stream, distance)


def test_when_a_stretch_was_over(stream: RingStream, read: RingReader) -> None:
    write_steps(stream, 3)
    stretches = []
    for phase in (FORWARD, OTHER, BACKWARD):
        stream.clock.advance(1000)
        stream.ledger.enter(phase)
        stretches.append(read.live().since_ns)
    assert [read.stretch_end_ns(since_ns) for since_ns in stretches] == [*stretches[1:], None]
    assert read.stretch_end_ns(stretches[0] + 1) is None  # nothing began then
    write_steps(stream, 2 * MIN_CAPACITY)
    assert read.stretch_end_ns(stretches[1]) is None  # long past


def test_in_which_stretch_a_time_lies(stream: RingStream, read: RingReader) -> None:
    write_steps(stream, 3)
    seen = []
    for phase in (None, FORWARD, OTHER, BACKWARD):
        if phase is not None:
            stream.clock.advance(1000)
            stream.ledger.enter(phase)
        seen.append((read.live(), read.is_between_steps(read.live().since_ns)))
    begins = [live.since_ns for live, _ in seen]
    assert [read.stretch_at(begin, begin + 999) for begin in begins] == seen
    assert read.stretch_at(begins[-1], begins[-1] + 10**9) == seen[-1]  # it lasts
    assert read.stretch_at(begins[1], begins[2]) is None  # the phase changed
    write_steps(stream, 2 * MIN_CAPACITY)
    assert read.stretch_at(begins[1], begins[1] + 1) is None  # long past


def test_what_lies_between_two_steps(stream: RingStream, read: RingReader) -> None:
    """Up to the first phase; an exchange behind the optimizer, as ZeRO has it, does not begin an iteration."""
    write_steps(stream, 3)

    def between() -> bool:
        return read.is_between_steps(read.live().since_ns)

    assert between()
    stream.clock.advance(1000)
    outer = stream.ledger.enter(COMM)
    stream.clock.advance(1000)
    stream.ledger.leave(outer)
    assert (read.live().phase, between()) == (OTHER, True)
    stream.clock.advance(1000)
    outer = stream.ledger.enter(FORWARD)
    stream.clock.advance(1000)
    stream.ledger.leave(outer)
    assert (read.live().phase, between()) == (OTHER, False)
    assert not read.is_between_steps(stream.clock.now_ns + 1)


def test_a_rank_that_called_none(stream: RingStream, read: RingReader) -> None:
    assert read.last_collective() is None
    write_steps(stream, 3)
    assert read.last_collective() is None


def test_called_and_not_announced(stream: RingStream, read: RingReader) -> None:
    write_step(stream, 0)
    stream.clock.advance(1)
    stream.ledger.enter(BACKWARD)
    at = call(stream, group=5, size=4096)
    assert read.last_collective() == LastCollective(ALL_REDUCE, 5, 4096, at, False, None)
    assert read.live() == (BACKWARD, at, 1)


def test_in_a_wait_it_is_the_one_waited_for(stream: RingStream, read: RingReader) -> None:
    first = call(stream, SEND, group=1, size=8, peer=3)
    last = call(stream, RECV, group=2, size=16, peer=w.ANY_PEER)
    outer = wait(stream, 1)
    assert read.last_collective() == LastCollective(SEND, 1, 8, first, True, 3)
    assert read.live().phase == COMM
    stream.clock.advance(5)
    stream.ledger.leave(outer)
    assert read.last_collective() == LastCollective(RECV, 2, 16, last, False, None)
    wait(stream)
    assert read.last_collective() == LastCollective(RECV, 2, 16, last, True, None)


def test_a_call_that_blocks_is_a_wait_from_its_first_word(stream: RingStream, read: RingReader) -> None:
    stream.clock.advance(10)
    write(stream, w.COLLECTIVE_DATA | OPS.index("barrier") << w.OP_SHIFT, w.data_word(w.WAIT, 0))
    stream.ledger.enter(COMM)
    assert read.last_collective() == LastCollective(OPS.index("barrier"), 0, 0, stream.clock(), True, None)


def test_another_wait_is_not_one_for_it(stream: RingStream, read: RingReader) -> None:
    at = call(stream)
    stream.clock.advance(10)
    stream.ledger.enter(COMM)  # for something that nobody linked to a collective
    assert read.last_collective() == LastCollective(ALL_REDUCE, 0, 0, at, False, None)


def test_a_wait_for_one_too_long_ago(stream: RingStream, read: RingReader) -> None:
    at = call(stream)
    wait(stream, 7)
    assert read.last_collective() == LastCollective(ALL_REDUCE, 0, 0, at, False, None)


def test_a_word_whose_instant_is_not_there_yet_is_not_taken(stream: RingStream, read: RingReader) -> None:
    at = call(stream)
    write(stream, w.COLLECTIVE_DATA | SEND << w.OP_SHIFT)
    assert read.last_collective() == LastCollective(ALL_REDUCE, 0, 0, at, False, None)


def test_over_many_rounds_nothing_old_is_taken_for_new(stream: RingStream, read: RingReader) -> None:
    """The words beyond the head, and those left over at the end of a round, are of another time."""
    for step in range(700):  # more than two rounds
        write_step(stream, step)
        stream.clock.advance(1)
        outer = stream.ledger.enter(FORWARD)
        at = call(stream, group=step % 64, size=step)
        wait(stream)
        assert read.last_collective() == LastCollective(ALL_REDUCE, step % 64, step, at, True, None)
        assert read.live() == (COMM, stream.clock(), step + 1)
        stream.clock.advance(1)
        stream.ledger.leave(FORWARD)
        stream.clock.advance(1)
        stream.ledger.leave(outer)
        assert read.live().step == step + 1


def test_right_after_a_round_was_over(stream: RingStream, read: RingReader) -> None:
    write_steps(stream, 520)  # more than two rounds: the rest of the body is full of other times
    at = call(stream, size=7)
    rounds = stream.ledger.rounds
    while stream.ledger.rounds == rounds:
        stream.clock.advance(1)
        stream.ledger.put(stream.clock() << w.TIME_SHIFT | OTHER)
    assert read.last_collective() == LastCollective(ALL_REDUCE, 0, 7, at, False, None)
    assert read.live() == (OTHER, stream.clock(), 520)


any_word = st.integers(0, (1 << 64) - 1)


@settings(max_examples=examples(150))
@given(
    words=st.lists(
        st.integers(0, (1 << 64) - 1) | st.integers(0, 64).map(lambda n: w.data_word(w.WAIT, n)), max_size=99
    ),
    head=any_word | st.integers(0, 2 * TURN_WORDS),
)
def test_fuzz(words: list[int], head: int) -> None:
    body = memoryview(bytearray(8 * MIN_CAPACITY)).cast("Q")
    for at, word in enumerate(words):
        body[(head + at * 37) % MIN_CAPACITY] = word
    last_collective(body, head)
    assert 0 <= live_phase(body, head).phase < 16


def test_shares_of_phases_do_not_depend_on_which_word_the_last_ones_begin_with() -> None:
    """The oldest of them may be a step's own word, which has a phase but no time."""
    step = [w.STEP_DATA | OTHER << 16, FORWARD, OTHER, BACKWARD, OTHER]
    words: list[int] = []
    at_ns = 10**15
    for _ in range(RECENT_WORDS // len(step) + 2):
        words.append(step[0])
        for phase in step[1:]:
            words.append(at_ns << w.TIME_SHIFT | phase)
            at_ns += {FORWARD: 30, OTHER: 10, BACKWARD: 50}[phase]
    for left_out in range(len(step)):
        head = len(words) - left_out
        shares = recent_shares(memoryview(array("Q", words[:head] + [0] * MIN_CAPACITY)), head)
        assert [round(shares[phase], 1) for phase in (OTHER, FORWARD, BACKWARD)] == [0.2, 0.3, 0.5]


def test_how_long_phases_take_now_is_the_median_of_the_last_steps() -> None:
    words: list[int] = []
    at_ns = 10**15

    def write_steps(*forward_ns: int) -> tuple[float, ...]:
        nonlocal at_ns
        for took_ns in forward_ns:
            for phase, ns in ((FORWARD, took_ns), (OTHER, 10), (BACKWARD, 50), (OTHER, 5)):
                words.append(at_ns << w.TIME_SHIFT | phase)
                at_ns += ns
            words.append(w.STEP_DATA | OTHER << 16)
        return latest_phase_ns(memoryview(array("Q", words + [0] * MIN_CAPACITY)), len(words))

    assert write_steps(*[30] * LATEST_STEPS) == ()  # the first one may be cut
    found = write_steps(30, 900)
    assert [found[phase] for phase in (OTHER, FORWARD, BACKWARD)] == [15, 30, 50]
    found = write_steps(*[90] * LATEST_STEPS)
    assert [found[phase] for phase in (OTHER, FORWARD, BACKWARD)] == [15, 90, 50]

"""Collectives: from their words to the sums of a step and the calls by themselves, and no change to anything else."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import RingStream, step_phases, write_call, write_step, write_wait

from stepscope.records.collectives import FLAG_ASYNC, FLAG_WAITED, OPS
from stepscope.records.identity import RankIdentity
from stepscope.records.steps import (
    BACKWARD,
    COLLECTIVE,
    COLLECTIVE_ENTRY,
    COMM,
    COMM_ENTRY,
    COMM_RECORD,
    ENTRIES_HEAD,
    EVAL,
    FORWARD,
    INPUT,
    OTHER,
    SLOT_BYTES,
    SLOT_HEAD,
    STEP,
    STEP_SLOT,
)
from stepscope.ring import RingReader, split
from stepscope.ring import layout as w
from stepscope.ring.decoder import StreamDecoder
from stepscope.ring.layout import MIN_CAPACITY

ALL_REDUCE, ALL_GATHER, BARRIER, SEND = (OPS.index(op) for op in ("all_reduce", "all_gather", "barrier", "send"))
START = [w.data_word(w.START, 0), 100 << w.TIME_SHIFT]


class Sum(NamedTuple):
    op: int
    group: int
    flags: int
    count: int
    size: int
    exposed: int
    span: int


class Call(NamedTuple):
    op: int
    group: int
    flags: int
    nth: int
    size: int
    start: int
    exposed: int
    end: int


def call(
    at: int, op: int = ALL_REDUCE, *, group: int = 0, size: int = 0, phase: int = OTHER, later: bool = True
) -> list[int]:
    about = op << w.OP_SHIFT | group << w.GROUP_SHIFT | later * w.ASYNC_BIT | size
    return [w.COLLECTIVE_DATA | about, at << w.TIME_SHIFT | phase]


def wait(begin: int, end: int, distance: int = 0, *, phase: int = OTHER) -> list[int]:
    return [w.data_word(w.WAIT, distance), enter(begin, COMM), back(end, phase)]


def enter(at: int, phase: int) -> int:
    return at << w.TIME_SHIFT | phase + w.ENTER


def back(at: int, phase: int = OTHER) -> int:
    return at << w.TIME_SHIFT | phase


def end(at: int, step: int) -> list[int]:
    return [at << w.TIME_SHIFT | w.STEP_END, w.STEP_DATA | step << 20]


def decode(*words: int) -> list[bytes]:
    decoder = StreamDecoder()
    decoder.feed(words, 0)
    assert decoder.torn == 0
    assert all(len(record) == SLOT_BYTES for record in decoder.records)
    return decoder.records


def entries(slots: list[bytes], kind: int, step: int) -> Iterator[bytes]:
    size = (COMM_ENTRY if kind == COMM_RECORD else COLLECTIVE_ENTRY).size
    for slot in slots:
        found, _, _, of, count = ENTRIES_HEAD.unpack_from(slot)
        if (found, of) == (kind, step):
            for at in range(ENTRIES_HEAD.size, ENTRIES_HEAD.size + count * size, size):
                yield slot[at : at + size]
            assert not any(slot[ENTRIES_HEAD.size + count * size :])


def sums(slots: list[bytes], step: int = 0) -> list[Sum]:
    return [Sum(*COMM_ENTRY.unpack(entry)) for entry in entries(slots, COMM_RECORD, step)]


def calls(slots: list[bytes], step: int = 0) -> list[Call]:
    return [Call(*COLLECTIVE_ENTRY.unpack(entry)) for entry in entries(slots, COLLECTIVE, step)]


def phases(slots: list[bytes]) -> list[tuple[int, ...]]:
    """What the STEP records say, without where they end."""
    return [STEP_SLOT.unpack(slot)[:2] + STEP_SLOT.unpack(slot)[3:] for slot in slots if slot[4] == STEP]


def test_one_that_is_waited_for_at_once() -> None:
    slots = decode(*START, *call(110, size=64, later=False), *wait(115, 140), *end(150, 0))
    assert sums(slots) == [Sum(ALL_REDUCE, 0, FLAG_WAITED, 1, 64, 25, 30)]
    assert calls(slots) == [Call(ALL_REDUCE, 0, FLAG_WAITED, 0, 64, 110, 25, 140)]
    assert STEP_SLOT.unpack(slots[0])[6 + COMM] == 25
    assert [slot[4] for slot in slots] == [STEP, COMM_RECORD, COLLECTIVE]
    assert len({SLOT_HEAD.unpack_from(slot)[3] for slot in slots}) == 1


def test_a_step_without_any_has_no_record_of_them() -> None:
    assert [slot[4] for slot in decode(*START, *end(150, 0))] == [STEP]


def test_handles_are_waited_for_in_any_order() -> None:
    words = [*call(110, size=1), *call(120, ALL_GATHER, size=2), *call(130, size=4)]
    words += [*wait(140, 150, 2), *wait(160, 180, 0), *wait(190, 200, 1)]
    slots = decode(*START, *words, *end(210, 0))
    both = FLAG_ASYNC | FLAG_WAITED
    assert calls(slots) == [
        Call(ALL_REDUCE, 0, both, 0, 1, 110, 10, 150),
        Call(ALL_GATHER, 0, both, 1, 2, 120, 10, 200),
        Call(ALL_REDUCE, 0, both, 2, 4, 130, 20, 180),
    ]
    assert sums(slots) == [
        Sum(ALL_REDUCE, 0, both, 2, 5, 30, 90),
        Sum(ALL_GATHER, 0, both, 1, 2, 10, 80),
    ]


def test_a_handle_waited_for_at_once_is_not_asynchronous() -> None:
    """A send returns a handle whether or not ``dist.send`` waits for it."""
    slots = decode(*START, *call(110, SEND), *wait(111, 120), *call(130, SEND), *end(150, 0))
    assert [entry.flags for entry in calls(slots)] == [FLAG_WAITED, FLAG_ASYNC]
    assert [entry.flags for entry in sums(slots)] == [FLAG_ASYNC | FLAG_WAITED]


def test_numbers_are_by_group_and_sends_have_their_own() -> None:
    words = [*call(110), *call(111, group=1), *call(112, SEND), *call(113, BARRIER), *call(114, SEND, group=1)]
    found = calls(decode(*START, *words, *end(150, 0)))
    assert [(entry.group, entry.op, entry.nth) for entry in found] == [
        (0, ALL_REDUCE, 0),
        (1, ALL_REDUCE, 0),
        (0, SEND, 0),
        (0, BARRIER, 1),
        (1, SEND, 0),
    ]


def test_a_wait_in_a_later_step_is_that_steps_time() -> None:
    words = [*call(110, size=8), *end(150, 0), *call(160, ALL_GATHER), *wait(170, 190, 1), *end(200, 1)]
    slots = decode(*START, *words, *wait(210, 215, 0), *end(220, 2))
    assert sums(slots) == [Sum(ALL_REDUCE, 0, FLAG_ASYNC, 1, 8, 0, 0)]
    assert calls(slots) == [Call(ALL_REDUCE, 0, FLAG_ASYNC, 0, 8, 110, 0, 0)]
    assert sums(slots, 1) == [
        Sum(ALL_GATHER, 0, FLAG_ASYNC, 1, 0, 0, 0),
        Sum(ALL_REDUCE, 0, FLAG_WAITED, 0, 0, 20, 80),
    ]
    assert sums(slots, 2) == [Sum(ALL_GATHER, 0, FLAG_WAITED, 0, 0, 5, 55)]
    assert calls(slots, 2) == []


def test_two_waits_for_the_same_do_not_count_its_span_twice() -> None:
    slots = decode(*START, *call(110), *wait(120, 130), *wait(140, 145), *end(150, 0))
    assert sums(slots) == [Sum(ALL_REDUCE, 0, FLAG_WAITED, 1, 0, 15, 35)]


def test_a_call_that_blocks_begins_its_wait() -> None:
    """Its COLLECTIVE and WAIT stand before one word, with which the phase is entered."""
    blocking = [call(110, BARRIER, later=False)[0], *wait(110, 130)]
    slots = decode(*START, *blocking, *end(150, 0))
    assert calls(slots) == [Call(BARRIER, 0, FLAG_WAITED, 0, 0, 110, 20, 130)]


def test_waits_for_what_nobody_knows_are_only_time() -> None:
    slots = decode(
        *START, *call(110), *wait(120, 130, 1), *wait(131, 132, 99), enter(133, COMM), back(139), *end(150, 0)
    )
    assert calls(slots) == [Call(ALL_REDUCE, 0, FLAG_ASYNC, 0, 0, 110, 0, 0)]
    assert STEP_SLOT.unpack(slots[0])[6 + COMM] == 10 + 1 + 6


@pytest.mark.parametrize(
    ("step", "stored"), [(31, True), (32, True), (33, False), (47, False), (48, True), (4096, True)]
)
def test_by_themselves_only_in_some_steps(step: int, stored: bool) -> None:
    slots = decode(*START, *call(110), *end(150, step))
    assert len(sums(slots, step)) == 1
    assert len(calls(slots, step)) == stored


def test_many_take_several_records_and_too_many_are_only_summed() -> None:
    words = [word for n in range(600) for word in call(110 + n, 1 + n % 11, group=n % 64, size=1)]
    slots = decode(*START, *words, *end(1000, 0))
    assert len(calls(slots)) == 512
    assert [entry.start for entry in calls(slots)] == list(range(110, 622))
    assert sum(entry.count for entry in sums(slots)) == 600
    assert len(sums(slots)) == 600  # of the 704 pairs


def test_an_operation_of_a_later_version_is_unknown() -> None:
    assert [entry.op for entry in calls(decode(*START, *call(110, 31), *end(150, 0)))] == [0]


WITHOUT = [
    *(enter(105, INPUT), back(110), enter(120, FORWARD), back(140)),  # what follows is the loss
    *(enter(160, BACKWARD), enter(165, FORWARD), back(175, BACKWARD), back(190)),
    *(enter(192, INPUT), back(194), enter(197, EVAL), back(199), *end(200, 0)),
    *(enter(207, FORWARD), back(210), *end(250, 1)),
]


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(0, len(WITHOUT)), st.integers(0, 15)), max_size=12))
def test_a_call_changes_nothing_of_the_phases(places: list[tuple[int, int]]) -> None:
    """Wherever it comes, whatever phase its word names: the loss, what lies between steps, entries and all sums."""
    words = list(START)
    for at, word in enumerate([*WITHOUT, *end(300, 2)]):
        if not word & w.DATA or word >> w.TAG_SHIFT != w.STEP_DATA >> w.TAG_SHIFT:
            now = words[-1] if not words[-1] & w.DATA else words[-2]
            for place, phase in places:
                if place == at:
                    words += call(now >> w.TIME_SHIFT, phase=phase)
        words.append(word)
    slots = decode(*words)
    assert phases(slots) == phases(decode(*START, *WITHOUT, *end(300, 2)))
    counted = sum(entry.count for step in range(3) for entry in sums(slots, step))
    assert counted == sum(1 for word in words if word >> w.TAG_SHIFT == w.COLLECTIVE_DATA >> w.TAG_SHIFT)


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[RingStream]:
    stream = RingStream(tmp_path / "1.ring", RankIdentity(host="node", pid=os.getpid()), capacity=MIN_CAPACITY)
    yield stream
    stream.close()


def write_busy_step(stream: RingStream, step: int, count: int) -> None:
    """A step as ``write_step`` makes it, and ``count`` collectives with their waits in its first phase."""
    write_step(stream, step)
    for n in range(count):
        write_call(stream, ALL_REDUCE, group=n % 3, size=step)
        stream.clock.advance(2)
        outer = write_wait(stream)
        stream.clock.advance(3)
        stream.ledger.leave(outer)
    stream.ledger.end_step(OTHER, step + 1, 0)


def test_whoever_goes_on_behind_a_step_goes_on_behind_all_of_it(stream: RingStream) -> None:
    for step in range(0, 40, 2):
        write_busy_step(stream, step, step % 13)
    reader = RingReader(stream.ring.path)
    everything = reader.read(0)
    reader.close()
    for seq in sorted({SLOT_HEAD.unpack_from(slot)[3] for slot in everything.slots}):
        other = RingReader(stream.ring.path)
        rest = other.read(seq)
        other.close()
        assert rest.slots == [slot for slot in everything.slots if SLOT_HEAD.unpack_from(slot)[3] > seq]
        assert (rest.lost, rest.torn) == (0, 0)
    for size in (1, 2, 5, 1000):
        parts = list(split(everything, size))
        assert [slot for part in parts for slot in part.slots] == everything.slots
        for part in parts[:-1]:
            assert part.last_seq == SLOT_HEAD.unpack_from(part.slots[-1])[3]
        seqs = [{SLOT_HEAD.unpack_from(slot)[3] for slot in part.slots} for part in parts]
        assert not any(first & other for first, other in itertools.pairwise(seqs))


def test_rounds_are_seamless_and_what_was_overwritten_takes_its_calls_with_it(stream: RingStream) -> None:
    reader = RingReader(stream.ring.path)
    last = lost = 0
    for step in range(0, 1200, 2):
        write_busy_step(stream, step, 40)
        if step % 100 < 60:  # and then it falls behind
            batch = reader.read(last)
            last, lost = batch.last_seq, lost + batch.lost
            assert batch.torn == 0
            for slot in batch.slots:
                if slot[4] == STEP and (of := STEP_SLOT.unpack(slot)[3]) % 2:
                    found = sums(batch.slots, of)
                    assert [(entry.group, entry.count, entry.size) for entry in found] == [
                        (group, count, count * (of - 1)) for group, count in ((0, 14), (1, 13), (2, 13))
                    ]
                    assert [entry.exposed for entry in found] == [3 * entry.count for entry in found]
                    assert [entry.span for entry in found] == [5 * entry.count for entry in found]
                elif slot[4] == STEP:
                    assert tuple(STEP_SLOT.unpack(slot)[6:22]) == step_phases(of)
                    assert sums(batch.slots, of) == []
    reader.close()
    assert lost > 0


any_call = st.builds(
    call, st.integers(0, 300), st.integers(0, 31), group=st.integers(0, 63), size=st.integers(0, w.SIZE_MASK)
)
any_wait = st.builds(wait, st.integers(0, 300), st.integers(0, 300), st.integers(0, w.VALUE_MASK))
any_end = st.builds(end, st.integers(0, 300), st.integers(0, 40))
any_word = st.integers(0, (1 << 64) - 1).map(lambda word: [word])


@settings(max_examples=examples(300))
@given(st.lists(any_call | any_wait | any_end | any_word, max_size=40), st.booleans())
def test_fuzz(parts: list[list[int]], late: bool) -> None:
    decoder = StreamDecoder()
    if late:
        decoder.resync(knowing_step=False)
    words = [*START, *(word for part in parts for word in part)]
    for at in range(0, len(words), 7):
        decoder.feed(words[at : at + 7], at)
    for slot in decoder.records:
        assert len(slot) == SLOT_BYTES
        kind, _, _, step, count = ENTRIES_HEAD.unpack_from(slot)
        if kind in (COMM_RECORD, COLLECTIVE):
            assert 1 <= count <= 7
            assert all(entry.op < len(OPS) for entry in (*sums([slot], step), *calls([slot], step)))

"""``between_ns``: the part of ``other`` that passes between the end of a step and the first phase of the next."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.records.steps import (
    BACKWARD,
    CHECKPOINT,
    COMM,
    EVAL,
    FIRST_USER_SLOT,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OTHER,
    PHASE_SLOTS,
    SLOT_BYTES,
    STEP,
    STEP_SLOT,
)
from stepscope.ring import layout as w
from stepscope.ring.decoder import StreamDecoder


def enter(at: int, phase: int) -> int:
    return at << w.TIME_SHIFT | phase + w.ENTER


def back(at: int, phase: int = OTHER) -> int:
    return at << w.TIME_SHIFT | phase


def end(at: int, step: int, goes_on: int = OTHER) -> list[int]:
    return [at << w.TIME_SHIFT | w.STEP_END, w.STEP_DATA | step << 20 | goes_on << 16]


START = [w.data_word(w.START, 0), 100 << w.TIME_SHIFT]
STEP_0 = [*START, enter(130, OPTIMIZER), back(150), *end(160, 0)]


def figures(words: list[int]) -> list[tuple[int, int, int]]:
    """(step, other, between) of each step."""
    decoder = StreamDecoder()
    decoder.feed(words, 0)
    assert decoder.torn == 0
    unpacked = [STEP_SLOT.unpack(record) for record in decoder.records if record[4] == STEP]
    return [(record[3], record[6 + OTHER], record[-2]) for record in unpacked]


def test_the_first_step_has_none() -> None:
    assert figures(STEP_0) == [(0, 40, 0)]


@pytest.mark.parametrize("first", [INPUT, FORWARD, BACKWARD, OPTIMIZER, EVAL, CHECKPOINT, FIRST_USER_SLOT])
def test_up_to_the_first_phase_whatever_it_is(first: int) -> None:
    step_1 = [enter(167, first), back(170), enter(181, FORWARD), back(190), *end(200, 1)]
    assert figures([*STEP_0, *step_1]) == [(0, 40, 0), (1, 7 + 11 + 10, 7)]


def test_an_exchange_does_not_begin_an_iteration() -> None:
    """ZeRO gathers the parameters behind the optimizer's step; what the loop does then is still between two steps."""
    step_1 = [enter(167, COMM), back(170), enter(181, INPUT), back(183), enter(190, FORWARD), back(195), *end(200, 1)]
    assert figures([*STEP_0, *step_1])[1] == (1, 7 + 11 + 7 + 5, 7 + 11)


def test_the_rest_of_an_optimizer_that_wraps_another_does_not_begin_an_iteration() -> None:
    """GradScaler, DeepSpeed's engine: the step ends inside of theirs."""
    began = [*START, enter(130, OPTIMIZER), *end(160, 0, goes_on=OPTIMIZER)]
    step_1 = [enter(162, COMM), back(163, OPTIMIZER), back(170), enter(181, INPUT), back(183), *end(200, 1)]
    assert figures([*began, *step_1])[1] == (1, 11 + 17, 11)


def test_time_within_the_step_is_other_but_not_between() -> None:
    step_1 = [enter(160, INPUT), back(170), enter(240, OPTIMIZER), back(250), *end(251, 1)]
    assert figures([*STEP_0, *step_1])[1] == (1, 71, 0)


def test_the_loss_is_not_between() -> None:
    step_1 = [enter(165, FORWARD), back(170), enter(180, BACKWARD), back(190), *end(190, 1)]
    assert figures([*STEP_0, *step_1])[1] == (1, 5, 5)


def test_a_phase_that_goes_on_over_the_end_of_a_step_leaves_no_gap() -> None:
    began = [*START, enter(110, FIRST_USER_SLOT), *end(160, 0, goes_on=FIRST_USER_SLOT)]
    step_1 = [back(170), enter(185, INPUT), back(190), *end(200, 1)]
    assert figures([*began, *step_1])[1] == (1, 15 + 10, 0)


def test_a_step_without_any_phase_has_none() -> None:
    assert figures([*STEP_0, *end(200, 1)])[1] == (1, 40, 0)


def test_every_step_counts_its_own() -> None:
    step_1 = [enter(168, INPUT), back(170), *end(171, 1)]
    step_2 = [enter(174, INPUT), back(180), *end(180, 2)]
    assert figures([*STEP_0, *step_1, *step_2]) == [(0, 40, 0), (1, 9, 8), (2, 3, 3)]


def test_a_reader_that_comes_late_knows_it_from_its_first_step_on() -> None:
    decoder = StreamDecoder()
    decoder.resync(knowing_step=False)
    decoder.feed([*STEP_0[3:], enter(168, INPUT), back(170), *end(171, 1)], 4)
    (record,) = decoder.records
    assert (STEP_SLOT.unpack(record)[3], STEP_SLOT.unpack(record)[-2]) == (1, 8)


def test_the_word_stands_in_the_slot_where_nothing_stood() -> None:
    decoder = StreamDecoder()
    decoder.feed([*STEP_0, enter(168, INPUT), back(170), *end(171, 1)], 0)
    record = decoder.records[1]
    assert len(record) == SLOT_BYTES
    assert struct.unpack_from("<Q24s", record, SLOT_BYTES - 32) == (8, bytes(24))


time_words = st.tuples(st.integers(0, 50), st.integers(0, w.CODE_MASK))


@given(st.lists(time_words, max_size=60))
def test_it_is_never_more_than_other(moves: list[tuple[int, int]]) -> None:
    """Whatever changes of phase there are, those that no ledger would write among them."""
    now, step, words = 100, 0, list(START)
    for spent, code in moves:
        now += spent
        if code == w.STEP_END:
            words += end(now, step, goes_on=spent % PHASE_SLOTS)
            step += 1
        else:
            words.append(now << w.TIME_SHIFT | code)
    found = figures([*words, *end(now, step)])
    assert len(found) == step + 1
    assert found[0][2] == 0
    assert all(between <= other for _, other, between in found)

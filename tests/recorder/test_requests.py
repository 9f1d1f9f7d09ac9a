"""How soon a rank notices a request: the word of its ring is read after some steps only."""

from __future__ import annotations

from stepscope.recorder.requests import RequestWord
from stepscope.ring.layout import REQUESTS_WORD


def test_a_stage_of_long_steps_after_one_of_short_ones() -> None:
    now_s = 0.0
    header = memoryview(bytearray((REQUESTS_WORD + 1) * 8)).cast("Q")
    word = RequestWord(header, now_s=lambda: now_s)
    step = 0
    while now_s < 30:
        now_s, step = now_s + 0.0002, step + 1
        if step >= word.due_at:
            assert not word.changed(step)
    header[REQUESTS_WORD] += 1
    asked_s = now_s
    for _ in range(20):
        now_s, step = now_s + 0.5, step + 1
        word.hurry()  # as the recorder does after a step that took long
        if step >= word.due_at and word.changed(step):
            break
    assert now_s - asked_s <= 3.0

"""Whole pipeline schedules, played by a slow and simple clock and then replayed: both must agree to the second.

The clock (``Played``) knows sends, receives and computing as the training framework runs them; it knows nothing of
meetings, templates or arrays.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from stepscope.whatif.operations import JobShape, read_trace
from stepscope.whatif.replay import analyze

Key = tuple[str, int, int]
"""Kind, stage and number."""


class Played:
    """One data-parallel rank in one step: 1F1B with ``chunks`` model chunks on each of ``stages``."""

    def __init__(self, stages: int, chunks: int, batches: int, dice: random.Random) -> None:
        self.stages, self.chunks, self.batches, self.dice = stages, chunks, batches, dice
        self.start: dict[Key, float] = {}
        self.end: dict[Key, float] = {}
        self.of: dict[Key, tuple[int, int]] = {}
        """Chunk and micro-batch."""
        self.takes: dict[Key, float] = defaultdict(lambda: dice.choice((0.5, 1.0, 1.5)))
        self.order = {stage: self._order(stage) for stage in range(stages)}
        self.made = {(kind, stage, *self.of[kind, stage, number]): (kind, stage, number)
                     for kind, stage, number in self.of}  # fmt: skip
        while self._round():
            pass

    def _order(self, stage: int) -> list[Key]:
        total = self.batches * self.chunks
        ahead = (self.stages - stage - 1) * (1 if self.chunks == 1 else 2) + (self.chunks - 1) * self.stages
        warmup = min(ahead, total)
        for number in range(total):
            slot, batch = number // self.stages % self.chunks, number % self.stages
            batch += number // (self.stages * self.chunks) * self.stages
            if self.chunks == 1:
                slot, batch = 0, number
            self.of["forward-compute", stage, number] = (slot, batch)
            self.of["backward-compute", stage, number] = (self.chunks - 1 - slot, batch)
        forwards = [("forward-compute", stage, number) for number in range(total)]
        backwards = [("backward-compute", stage, number) for number in range(total)]
        steady = [key for pair in zip(forwards[warmup:], backwards, strict=False) for key in pair]
        return forwards[:warmup] + steady + backwards[total - warmup :]

    def _round(self) -> bool:
        """Everything once more, given what the last round found; whether anything moved."""
        before = dict(self.end)
        for stage in range(self.stages):
            self._set("params-all-gather", stage, 0, 0.0)
            for chunk in range(1, self.chunks):
                self._set("params-all-gather", stage, chunk, self.end["params-all-gather", stage, chunk - 1])
            clock = 0.0
            for place, key in enumerate(self.order[stage]):
                clock = self._compute(key, clock, place)
        return self.end != before

    def _compute(self, key: Key, clock: float, place: int) -> float:
        kind, stage, number = key
        way = kind.split("-")[0]
        chunk, batch = self.of[key]
        at = chunk * self.stages + stage - (1 if way == "forward" else -1)
        posted = [self.end.get((kind, stage, number - 1), 0.0), self.end.get((f"{way}-recv", stage, number - 1), 0.0)]
        if way == "backward" and number == 0 and place >= 2:
            posted.append(self.end.get(self.order[stage][place - 2], 0.0))
        ready = [clock, self.end["params-all-gather", stage, chunk] if way == "forward" else 0.0]
        receive = (f"{way}-recv", stage, number)
        if 0 <= at < self.stages * self.chunks:
            source = self.made[kind, at % self.stages, at // self.stages, batch]
            send = (f"{way}-send", *source[1:])
            sent = [self.end.get(source, 0.0), self.end.get((send[0], send[1], send[2] - 1), 0.0)]
            self.start[send], self.start[receive] = max(sent), max(posted)
            arrived = max(self.start[send], self.start[receive]) + self.takes[send]
            self.end[send] = self.end[receive] = arrived
            ready.append(arrived)
        elif self.chunks > 1:  # noted, though there is no neighbor at this end of the model
            self.start[receive] = self.end[receive] = max(posted)
            ready.append(self.end[receive])
        self._set(kind, stage, number, max(ready))
        after = chunk * self.stages + stage + (1 if way == "forward" else -1)
        if self.chunks > 1 and not 0 <= after < self.stages * self.chunks:
            nowhere = (f"{way}-send", stage, number)
            begin = max(self.end[key], self.end.get((nowhere[0], stage, number - 1), 0.0))
            self.start[nowhere] = self.end[nowhere] = begin
        return self.end[key]

    def _set(self, kind: str, stage: int, number: int, begin: float) -> None:
        self.start[kind, stage, number] = begin
        self.end[kind, stage, number] = begin + self.takes[kind, stage, number]

    def rows(self, step: int, *, overlapped: bool) -> list[dict[str, Any]]:
        last = "separate-grads-all-reduce" if overlapped else "grads-reduce-scatter"
        for stage in range(self.stages):
            done = self.end["params-all-gather", stage, self.chunks - 1]
            for number, chunk in enumerate(reversed(range(self.chunks)) if overlapped else ()):
                own = [key for key in self.order[stage] if key[0] == "backward-compute" and self.of[key][0] == chunk]
                self._set("grads-reduce-scatter", stage, number, max(done, *(self.end[key] for key in own)))
                self.of["grads-reduce-scatter", stage, number] = (chunk, 0)
                done = self.end["grads-reduce-scatter", stage, number]
            self._set(last, stage, 0, max(done, self.end[self.order[stage][-1]]))
        clipped = max(self.end[last, stage, 0] for stage in range(self.stages)) + 0.5
        for stage in range(self.stages):
            self.start["optimizer-clip-main-grad", stage, 0] = self.end[last, stage, 0]
            self.end["optimizer-clip-main-grad", stage, 0] = clipped
            self._set("optimizer", stage, 0, clipped)
        return [self._row(key, step) for key in self.start]

    def _row(self, key: Key, step: int) -> dict[str, Any]:
        kind, stage, number = key
        chunk = number if kind == "params-all-gather" else self.of.get(key, (0, 0))[0]
        return {
            "dp_rank": 0, "stage": stage, "rank": stage, "step": step, "optype": kind, "seq_id": number,
            "start_ts": self.start[key] + 7, "duration": self.end[key] - self.start[key], "mc": chunk, "mb_id": 0,
            "gmc": chunk * self.stages + stage if kind.endswith("compute") else -1,
        }  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(
    ("stages", "chunks", "batches"),
    [
        *[(1, 1, 3), (2, 1, 1), (2, 1, 5), (3, 1, 2), (2, 2, 4)],
        *(pytest.param(*large, marks=pytest.mark.soak) for large in [(4, 1, 8), (4, 2, 8), (3, 3, 6)]),
    ],
)
def test_replay_and_clock_agree(files: Any, stages: int, chunks: int, batches: int, overlapped: bool) -> None:
    dice = random.Random(f"{stages} {chunks} {batches}")
    rows: list[dict[str, Any]] = []
    lasted = []
    for step in range(3):
        played = Played(stages, chunks, batches, dice)
        # The first step tells the order: the others take different times in the same one.
        rows += played.rows(step, overlapped=overlapped)
        lasted.append(max(played.end.values()))
    shape = JobShape(trial_name="t", dp_size=1, pp_size=stages, tp_size=1, dsp_size=1, vpp_size=chunks)
    trace = read_trace(files.write(rows).trace, shape)
    assert trace.notes == ()
    assert analyze(trace).mw.original_s == pytest.approx(sum(lasted) / 3)

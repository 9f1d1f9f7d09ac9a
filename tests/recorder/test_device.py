"""The device timer, on a stand-in for CUDA with a clock of its own."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_stand_in import Device, Event
from rings import RingStream

from stepscope.recorder.device import DENSE_EVERY, DENSE_STEPS, MAX_EVERY, DeviceTimer, device_timer, timed_step
from stepscope.records.identity import RankIdentity
from stepscope.records.steps import (
    BACKWARD,
    BUILTIN_PHASES,
    COMM,
    DEVICE,
    DEVICE_FIELDS,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OTHER,
)
from stepscope.ring import RingReader

MS = 1_000_000


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[RingStream]:
    stream = RingStream(tmp_path / "1.ring", RankIdentity(host="node", pid=os.getpid()))
    yield stream
    stream.close()


class Loop:
    """Trains: each phase takes so much of the device's time, and as much of the host's."""

    def __init__(self, stream: RingStream, device: Device) -> None:
        self.ledger, self.clock, self.device = stream.ledger, stream.clock, device
        self.timer = DeviceTimer(device.torch(), 0, stream.clock)
        self.step, self.due = 0, 0
        self.path = stream.ring.path

    def spend(self, phase: int, ms: float) -> None:
        outer = self.ledger.enter(phase) if phase != OTHER else OTHER
        self.clock.advance(int(ms * MS))
        self.device.ms += ms
        if phase != OTHER:
            self.ledger.leave(outer)

    def run(self, steps: int, *, ms: float = 1.0) -> None:
        for _ in range(steps):
            self.spend(INPUT, 0.5 * ms)
            self.spend(FORWARD, 2 * ms)
            self.spend(OTHER, 0.25 * ms)  # the loss
            self.spend(BACKWARD, 3 * ms)
            self.ledger.enter(OPTIMIZER)
            self.clock.advance(int(ms * MS))
            self.device.ms += ms
            ended = self.ledger.phase
            self.ledger.end_step(OTHER, self.step, 0)
            if self.step >= self.due:
                self.due = self.timer.end_step(self.step, ended, self.ledger)
            self.step += 1

    def timed(self) -> Any:
        reader = RingReader(self.path)
        slots = reader.read(0).slots
        reader.close()
        return np.frombuffer(b"".join(slot for slot in slots if slot[4] == DEVICE), np.dtype(DEVICE_FIELDS))


def timed_steps(first: int, stop: int, every: int) -> list[int]:
    found = []
    while (first := timed_step(first, every)) < stop:
        found.append(first)
        first += 1
    return found


def test_each_timed_step_has_the_phases_that_the_device_spent(stream: RingStream) -> None:
    loop = Loop(stream, Device())
    loop.run(9)
    rows = loop.timed()
    assert list(rows["step"]) == timed_steps(1, 9, DENSE_EVERY)
    for row in rows:
        spent = {BUILTIN_PHASES[slot]: int(ns) for slot, ns in enumerate(row["phase_ns"]) if ns}
        assert spent == {"input": 500_000, "forward": 2_250_000, "backward": 3_000_000, "optimizer": 1_000_000}


def test_of_each_block_one_step_is_timed_and_of_all_that_happens_now_and_then_its_share() -> None:
    """Every fourth step would meet whatever is done each 10 or 100 steps two or four times too often."""
    before = set(range(6400))
    for every in (1, 2, 4, 8, 64):
        steps = timed_steps(0, 6400, every)
        assert [step // every for step in steps] == list(range(6400 // every))
        assert set(steps) <= before, "ranks that time fewer steps time some of those that the others do"
        before = set(steps)
    steps = timed_steps(0, 64_000, 4)
    for period in (2, 3, 4, 7, 10, 50, 100):
        for offset in (0, 1):
            met = sum(step % period == offset for step in steps) * period / 16_000
            assert 0.8 < met < 1.2, (period, offset)


def test_long_steps_are_all_timed_and_share_their_borders(stream: RingStream) -> None:
    loop = Loop(stream, Device())
    loop.run(40, ms=100)
    assert list(loop.timed()["step"])[-20:] == list(range(20, 40))
    assert (loop.timed()["phase_ns"].sum(axis=1) == int(6.75 * 100 * MS)).all()


def test_short_steps_are_timed_more_often_at_first(stream: RingStream) -> None:
    loop = Loop(stream, Device())
    loop.run(1024, ms=0.25)
    steps = [int(step) for step in loop.timed()["step"]]
    assert [step for step in steps if step < DENSE_STEPS] == timed_steps(1, DENSE_STEPS, DENSE_EVERY)
    assert steps[-5:] == timed_steps(0, 1023, MAX_EVERY)[-5:]


def test_steps_that_timing_would_distort_are_not_timed_until_they_are_longer(stream: RingStream) -> None:
    loop = Loop(stream, Device())
    loop.run(400, ms=0.1)
    assert max(loop.timed()["step"]) <= 20, "the pace is not known before"
    loop.run(40, ms=100)
    assert set(range(425, 439)) <= set(map(int, loop.timed()["step"]))


@pytest.mark.parametrize("ms", [0.25, 100])
def test_events_are_used_again(stream: RingStream, ms: float) -> None:
    loop = Loop(stream, Device())
    loop.run(200, ms=ms)
    made = Event.made
    loop.run(2000, ms=ms)
    assert Event.made == made


def test_a_device_that_is_behind_is_asked_later_and_nothing_is_lost(stream: RingStream) -> None:
    device = Device()
    loop = Loop(stream, device)
    device.done_ms = 0.0
    loop.run(40, ms=100)
    assert not len(loop.timed())
    device.done_ms = float("inf")
    loop.run(60, ms=100)
    steps = list(loop.timed()["step"])
    assert steps == sorted(steps)
    assert len(steps) >= 40
    assert (loop.timed()["phase_ns"].sum(axis=1) == int(6.75 * 100 * MS)).all()


def test_nothing_is_recorded_or_asked_while_a_graph_is_captured(stream: RingStream) -> None:
    """The stand-in fails the test if it is."""
    device = Device()
    loop = Loop(stream, device)
    loop.run(20, ms=100)
    made = Event.made
    device.capturing = True
    loop.timer.drop_step(loop.ledger)
    loop.run(3, ms=100)
    device.capturing = False
    loop.run(20, ms=100)
    steps = {int(step) for step in loop.timed()["step"]}
    assert steps.isdisjoint({20, 21, 22, 23})
    assert steps >= set(range(25, 42))
    assert Event.made <= made + 2, "events of the dropped step are used again"


def test_in_a_forked_child_no_event_is_destroyed(stream: RingStream) -> None:
    """Neither when the child loses sight of the timer nor when it collects its garbage; ``sys.exit``: test_fork.py."""
    identity = RankIdentity(host="node", pid=os.getpid(), device="cuda", device_timed=True)
    device = Device()
    loop = Loop(stream, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "torch", device.torch())
        loop.timer = device_timer(identity, loop.clock)
    loop.run(9)
    pid = os.fork()
    if not pid:
        loop.timer = None
        loop.ledger.device = None
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_the_stand_in_would_show_it() -> None:
    events = [Event(enable_timing=True)]
    pid = os.fork()
    if not pid:
        events.clear()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 6


def stalling_step(loop: Loop, *, ends: bool) -> None:
    """2 ms of backward, 5 of waiting for a collective, and 1 of backward unless the wait is at its end."""
    loop.ledger.enter(BACKWARD)
    loop.device.ms += 2
    if loop.ledger.device is not None:
        assert loop.timer.stall_begins(BACKWARD)
    loop.device.ms += 5
    if ends:
        loop.timer.stall_ends()
        loop.device.ms += 1
    loop.ledger.leave(OTHER)
    loop.clock.advance(8 * MS)
    loop.ledger.end_step(OTHER, loop.step, 0)
    loop.due = loop.timer.end_step(loop.step, OTHER, loop.ledger) if loop.step >= loop.due else loop.due
    loop.step += 1


@pytest.mark.parametrize(("ends", "backward_ms"), [(True, 3), (False, 2)])
def test_where_the_stream_waits_for_a_collective_is_no_work(stream: RingStream, ends: bool, backward_ms: int) -> None:
    loop = Loop(stream, Device())
    for _ in range(20):
        stalling_step(loop, ends=ends)
    rows = loop.timed()
    assert len(rows) >= 3
    assert rows["phase_ns"][:, COMM].tolist() == [5 * MS] * len(rows)
    assert rows["phase_ns"][:, BACKWARD].tolist() == [backward_ms * MS] * len(rows)


def test_a_wait_on_another_stream_or_in_a_step_that_is_not_timed_leaves_no_mark(stream: RingStream) -> None:
    device = Device()
    torch = device.torch()
    raw = 7
    torch._C._cuda_getCurrentRawStream = lambda index: raw
    loop = Loop(stream, device)
    loop.timer = DeviceTimer(torch, 0, stream.clock)
    assert not loop.timer.stall_begins(BACKWARD)  # no step is timed yet
    loop.run(3)
    while loop.ledger.device is None:
        loop.run(1)
    raw = 8
    assert not loop.timer.stall_begins(BACKWARD)
    raw = 7
    assert loop.timer.stall_begins(BACKWARD)


def test_steps_that_become_longer_are_timed_more_often_for_a_while(stream: RingStream) -> None:
    loop = Loop(stream, Device())
    loop.run(400, ms=0.5)
    before = len(loop.timed())
    loop.run(128, ms=0.5)
    sparse = len(loop.timed()) - before
    loop.run(80, ms=0.6)  # it is reckoned anew at a timed step
    before = len(loop.timed())
    loop.run(64, ms=0.6)
    dense = len(loop.timed()) - before
    assert sparse <= 128 // 16
    assert dense >= 64 // DENSE_EVERY - 1


def test_many_marks_make_a_timed_step_dearer_and_so_rarer(stream: RingStream) -> None:
    loop = Loop(stream, Device())
    loop.run(400, ms=4.0)
    few = len(loop.timed())
    loop.timer._most_marks = 200
    loop.run(400, ms=4.0)
    assert len(loop.timed()) - few < few / 4


def test_a_step_with_very_many_waits_is_not_timed_at_all(stream: RingStream) -> None:
    loop = Loop(stream, Device())
    loop.run(20)
    before = len(loop.timed())
    while loop.ledger.device is None:
        loop.run(1)
    for _ in range(1000):
        loop.timer.stall_begins(BACKWARD)
        loop.timer.stall_ends()
    given_up = loop.step
    loop.run(40)
    assert given_up not in loop.timed()["step"].tolist()
    assert len(loop.timed()) > before

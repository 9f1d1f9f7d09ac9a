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

from stepscope.recorder.device import DENSE_EVERY, DENSE_STEPS, MAX_EVERY, DeviceTimer, device_timer
from stepscope.records.identity import RankIdentity
from stepscope.records.phases import BACKWARD, BUILTIN_PHASES, FORWARD, INPUT, OPTIMIZER, OTHER
from stepscope.records.slot import DEVICE, DEVICE_FIELDS
from stepscope.ring import RingReader
from stepscope.testing.rings import RingStream

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


def test_each_timed_step_has_the_phases_that_the_device_spent(stream: RingStream) -> None:
    loop = Loop(stream, Device())
    loop.run(9)
    rows = loop.timed()
    assert list(rows["step"]) == [4, 8]
    for row in rows:
        spent = {BUILTIN_PHASES[slot]: int(ns) for slot, ns in enumerate(row["phase_ns"]) if ns}
        assert spent == {"input": 500_000, "forward": 2_250_000, "backward": 3_000_000, "optimizer": 1_000_000}


def test_long_steps_are_all_timed_and_share_their_borders(stream: RingStream) -> None:
    loop = Loop(stream, Device())
    loop.run(40, ms=100)
    assert list(loop.timed()["step"])[-20:] == list(range(20, 40))
    assert (loop.timed()["phase_ns"].sum(axis=1) == int(6.75 * 100 * MS)).all()


def test_short_steps_are_timed_more_often_at_first(stream: RingStream) -> None:
    loop = Loop(stream, Device())
    loop.run(1024, ms=0.25)
    steps = [int(step) for step in loop.timed()["step"]]
    assert [step for step in steps if step < DENSE_STEPS] == list(range(DENSE_EVERY, DENSE_STEPS, DENSE_EVERY))
    assert {later - earlier for earlier, later in zip(steps[-5:], steps[-4:], strict=False)} == {MAX_EVERY}


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

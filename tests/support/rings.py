"""Rings without a training script: steps whose every number follows from the step's own, so that a test can check all.

stream = RingStream(path, RankIdentity(host="node", pid=os.getpid()))
write_steps(stream, 100)
"""

from __future__ import annotations

from pathlib import Path

from clock import FakeClock

from stepscope.recorder.ledger import Ledger
from stepscope.records.identity import RankIdentity
from stepscope.records.steps import BACKWARD, COMM, FORWARD, H2D, INPUT, OPTIMIZER, OTHER, PHASE_SLOTS
from stepscope.ring import RingWriter
from stepscope.ring import layout as w
from stepscope.ring.layout import (
    ALLOCATED,
    DEFAULT_CAPACITY,
    DEVICE_PHASE,
    DEVICE_STEP,
    PEAK_ALLOCATED,
    RESERVED,
    START,
    data_word,
)

__all__ = [
    "START_NS",
    "STEP_NS",
    "RingStream",
    "device_phases",
    "step_phases",
    "write_call",
    "write_device_step",
    "write_step",
    "write_steps",
    "write_wait",
]

START_NS = 5_000_000_000
STEP_NS = 10_000_000
_INNER = (INPUT, H2D, FORWARD, BACKWARD, OPTIMIZER)


class RingStream:
    """A ring and the ledger that fills it, on a clock of its own."""

    def __init__(self, path: Path, identity: RankIdentity, *, capacity: int = DEFAULT_CAPACITY) -> None:
        self.ring = RingWriter(path, identity, capacity=capacity)
        self.clock = FakeClock(START_NS)
        self.ledger = Ledger(self.clock, lambda _phase: False)
        self.ledger.open(self.ring)

    def close(self) -> None:
        self.ring.close()


def step_phases(step: int) -> tuple[int, ...]:
    """Host times of the step's phases; a little noise, by arithmetic."""
    phases = [0] * PHASE_SLOTS
    for slot in (OTHER, *_INNER):
        phases[slot] = 1_000_000 + (step * 7919 + slot * 104_729) % 50_021
    return tuple(phases)


def device_phases(step: int) -> tuple[int, ...]:
    return tuple(ns // 2 for ns in step_phases(step))


def write_step(stream: RingStream, step: int, *, flags: int = 0) -> None:
    """A step that begins at ``START_NS + step * STEP_NS``, with one entry of each phase and a little memory."""
    ledger, clock, phases = stream.ledger, stream.clock, step_phases(step)
    clock.now_ns = START_NS + step * STEP_NS
    ledger.put(data_word(START, 0), clock.now_ns << 5)
    clock.advance(phases[OTHER])
    for slot in _INNER:
        outer = ledger.enter(slot)
        clock.advance(phases[slot])
        ledger.leave(outer)
    memory = (data_word(ALLOCATED, step + 1), data_word(RESERVED, step + 2), data_word(PEAK_ALLOCATED, step + 3))
    ledger.end_step(OTHER, step, flags, memory)


def write_device_step(stream: RingStream, step: int) -> None:
    spent = [data_word(DEVICE_PHASE + slot, ns) for slot, ns in enumerate(device_phases(step))]
    stream.ledger.put(data_word(DEVICE_STEP, step), *spent)


def write_steps(stream: RingStream, count: int, *, first: int = 0, device: bool = False) -> None:
    for step in range(first, first + count):
        write_step(stream, step)
        if device:
            write_device_step(stream, step)


def write_call(
    stream: RingStream, op: int, *, group: int = 0, size: int = 0, asynchronous: bool = True, peer: int | None = None
) -> int:
    """Call a collective now; returns when.  Nothing is announced, as on the hot path."""
    ledger = stream.ledger
    call = w.COLLECTIVE_DATA | op << w.OP_SHIFT | group << w.GROUP_SHIFT | asynchronous * w.ASYNC_BIT | size
    about = [] if peer is None else [data_word(w.PEER, peer)]
    for word in (call, *about, stream.clock() << w.TIME_SHIFT | ledger.phase):
        ledger.body[ledger.at] = word
        ledger.at += 1
    return stream.clock()


def write_wait(stream: RingStream, distance: int = 0) -> int:
    """Begin to wait for the collective that was called ``distance`` before the last one; returns the outer phase."""
    ledger = stream.ledger
    ledger.body[ledger.at] = data_word(w.WAIT, distance)
    ledger.at += 1
    return ledger.enter(COMM)

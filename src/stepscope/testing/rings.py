"""Rings without a training script: steps whose every number follows from the step's own, so that a test can check all.

writer = RingWriter(path, RankIdentity(host="node", pid=os.getpid()))
write_steps(writer, 100)
"""

from __future__ import annotations

from stepscope.records.phases import BACKWARD, FORWARD, H2D, INPUT, OPTIMIZER, OTHER, PHASE_SLOTS
from stepscope.records.slot import DEVICE, DEVICE_BODY, STEP, STEP_BODY
from stepscope.ring import RingWriter

__all__ = ["START_NS", "device_phases", "step_phases", "write_device_step", "write_step", "write_steps"]

START_NS = 5_000_000_000
STEP_NS = 10_000_000
_USED = (OTHER, INPUT, H2D, FORWARD, BACKWARD, OPTIMIZER)


def step_phases(step: int) -> tuple[int, ...]:
    """Host times of the step's phases; a little noise, by arithmetic."""
    phases = [0] * PHASE_SLOTS
    for slot in _USED:
        phases[slot] = 1_000_000 + (step * 7919 + slot * 104_729) % 50_021
    return tuple(phases)


def device_phases(step: int) -> tuple[int, ...]:
    return tuple(ns // 2 for ns in step_phases(step))


def write_step(writer: RingWriter, step: int, *, flags: int = 0) -> None:
    phases = step_phases(step)
    wall_ns = sum(phases)
    times = (step, START_NS + step * STEP_NS, wall_ns, wall_ns - step % 1000)
    memory = (step + 1, step + 2, step + 3)
    writer.append(STEP_BODY.pack(STEP, flags, writer.head + 1, *times, *phases, *memory, 1, 2, 0, 0, 1, 0))


def write_device_step(writer: RingWriter, step: int) -> None:
    phases = device_phases(step)
    writer.append(DEVICE_BODY.pack(DEVICE, 0, writer.head + 1, step, sum(phases), *phases))


def write_steps(writer: RingWriter, count: int, *, first: int = 0, device: bool = False) -> None:
    for step in range(first, first + count):
        write_step(writer, step)
        if device:
            write_device_step(writer, step)

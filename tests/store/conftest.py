"""Runs to read: made like a launcher makes them, their rings written without a training script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope.records.identity import RankIdentity
from stepscope.records.places import RING_SUFFIX
from stepscope.ring import RingReader, RingState
from stepscope.ring.reader import split
from stepscope.ring.words import note_words
from stepscope.store.create import RunPaths, create_run
from stepscope.store.paths import segment_path
from stepscope.store.segments import FRAME_SLOTS, SegmentWriter
from stepscope.store.sidecar import sidecar_of, write_sidecar
from stepscope.testing.rings import RingStream

CAPACITY = 1 << 14
"""Words of a ring: room for some hundred steps."""
GONE = 1 << 30
"""A pid that no process has; counting up from here gives more."""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path / "runs", "test", ["python", "train.py"], environ={}, sessions=tmp_path / "sessions")


class Stream(RingStream):
    """A ring as these tests want it: its header and its stream in one."""

    @property
    def path(self) -> Path:
        return self.ring.path

    def set_state(self, state: RingState) -> None:
        self.ring.set_state(state)

    def set_phase_name(self, slot: int, name: str) -> None:
        self.ring.set_phase_name(slot, name)

    def note(self, step: int, text: bytes) -> None:
        self.ledger.put(*note_words(step, text))


class Rings:
    """Makes rings in the session of a run; all are closed when the test is over."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.writers: list[Stream] = []

    def __call__(
        self, rank: int = 0, *, pid: int | None = None, capacity: int = CAPACITY, **identity: object
    ) -> Stream:
        pid = GONE + len(self.writers) if pid is None else pid
        import platform

        who = RankIdentity(host=platform.node(), pid=pid, rank=rank, **identity)  # type: ignore[arg-type]
        writer = Stream(self.paths.session / f"{pid}{RING_SUFFIX}", who, capacity=capacity)
        writer.set_state(RingState.RUNNING)
        self.writers.append(writer)
        return writer


@pytest.fixture
def rings(paths: RunPaths) -> Iterator[Rings]:
    rings = Rings(paths)
    yield rings
    for writer in rings.writers:
        writer.close()


@pytest.fixture
def drain(paths: RunPaths) -> Callable[..., SegmentWriter]:
    """What the agent does with a ring: segment and sidecar; with ``ended`` the ring is removed as well."""

    def drain(ring: Stream, *, ended: int | None = None, limit: int = FRAME_SLOTS) -> SegmentWriter:
        from dataclasses import replace

        reader = RingReader(ring.path)
        about = sidecar_of(reader.header(), heard_wall_ns=1)
        segment = SegmentWriter(segment_path(paths.run_dir, about.key))
        segment.append(next(split(reader.read(segment.last_seq), limit)))
        write_sidecar(paths.run_dir, replace(about, ended_wall_ns=ended))
        reader.close()
        if ended is not None:
            ring.path.unlink()
        return segment

    return drain


@pytest.fixture
def bystander() -> Iterator[int]:
    """The pid of a process that lives as long as the test."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()

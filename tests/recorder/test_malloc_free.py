"""What the C library keeps of freed memory: when it is read, when it is published, and glibc's own figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.recorder.layers.growth import GrowthWatch
from stepscope.recorder.layers.malloc_free import LONGEST_NS, MOST_PUBLISHED, MOST_READINGS, MallocFree, free_in_glibc

MB = 1 << 20


class Heap:
    """``free`` megabytes are free, and reading them takes ``takes_ns``."""

    def __init__(self, world_size: int = 1) -> None:
        self.free = 0
        self.takes_ns = 0
        self.readings = 0
        self._now_ns = 0
        self.watched = MallocFree(self._read, clock_ns=lambda: self._now_ns)
        self.watched.world_size = world_size

    def _read(self) -> int:
        self.readings += 1
        self._now_ns += self.takes_ns
        return self.free * MB

    def at(self, step: int, used: int, free: int) -> dict[str, Any]:
        self.free = free
        return self.watched.add(step, used * MB)


def test_it_is_read_once_and_when_memory_has_changed() -> None:
    heap = Heap()
    for step in range(100):
        assert heap.at(step, 1_000 + step % 15, 0) == {}
    assert heap.readings == 1
    assert heap.at(100, 1_040, 10) == {}
    assert heap.readings == 2
    assert heap.at(101, 1_080, 50) == {"malloc_free": {"step": [0, 100, 101], "bytes": [0, 160, 800]}}
    assert heap.at(102, 1_040, 0) == {"malloc_free": {"step": [0, 100, 101, 102], "bytes": [0, 160, 800, 0]}}


def test_it_is_not_read_again_once_that_took_long() -> None:
    heap = Heap()
    heap.takes_ns = LONGEST_NS + 1
    assert [heap.at(step, 100 * step, 100 * step) for step in range(4)] == [{}] * 4
    assert heap.readings == 1


@pytest.mark.parametrize(("world_size", "expected"), [(64, MOST_PUBLISHED), (65, 3), (1_025, 0)])
def test_large_jobs_publish_it_less_often(world_size: int, expected: int) -> None:
    heap = Heap(world_size)
    published = [facts for step in range(1_000) if (facts := heap.at(step, 40 * step, 40 * step))]
    assert len(published) == expected
    assert all(len(facts["malloc_free"]["step"]) <= MOST_READINGS for facts in published)


def test_of_many_readings_the_first_and_the_last_stay() -> None:
    heap = Heap()
    for step in range(MOST_READINGS):
        heap.at(step, 40 * step, 0)
    facts = heap.at(MOST_READINGS, 10_000, 90)
    assert facts["malloc_free"]["step"] == [*range(0, MOST_READINGS, 2), MOST_READINGS]


def test_the_watch_publishes_it_beside_what_grows() -> None:
    step, blocks = 0, [bytes(1)]
    watch = GrowthWatch(
        now_s=lambda: step / 10, used=lambda: (100 + step) * MB, malloc_free=lambda: step * MB, clock_ns=lambda: 0
    )
    found: dict[str, Any] = {}
    for step in range(200):
        blocks.append(bytes(MB))
        found |= watch.check(step) or {}
    steps = found["malloc_free"]["step"]
    assert found["malloc_free"]["bytes"] == [step * MB // (1 << 16) for step in steps]
    assert "growing" in found


def test_glibc_knows_what_it_keeps() -> None:
    read: Callable[[], int] | None = free_in_glibc()
    if read is None:
        pytest.skip("this C library has no mallinfo2")
    blocks = [bytearray(50_000) for _ in range(2_000)]
    before = read()
    del blocks[::2]  # those in between hold the heap
    assert read() > before + 40 * MB

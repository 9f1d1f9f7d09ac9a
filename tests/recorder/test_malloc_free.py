"""What is free in the memory of a process: when it is read, when it is published, and glibc's own figure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from stepscope.recorder.layers.growth import GrowthWatch
from stepscope.recorder.layers.malloc_free import LONGEST_NS, MOST_READINGS, MallocFree, free_in_glibc

MB = 1 << 20


class Heap:
    """``free`` megabytes are free, and reading them takes ``takes_ns``."""

    def __init__(self, world_size: int = 1) -> None:
        self.free = 0
        self.takes_ns = 0
        self.readings = 0
        self._spent_ns = 0
        self.watched = MallocFree(self._read, clock_ns=lambda: self._spent_ns)
        self.watched.world_size = world_size

    def _read(self) -> int:
        self.readings += 1
        self._spent_ns += self.takes_ns
        return self.free * MB

    def at(self, step: int, resident: int, free: int, now_s: float = 0.0) -> dict[str, Any]:
        self.free = free
        _, facts = self.watched.read(step, now_s, resident * MB)
        return facts


def test_it_is_published_when_what_is_free_or_used_has_changed() -> None:
    heap = Heap()
    for step in range(100):
        assert heap.at(step, 1_000 + step % 15, 0) == {}
    first, *_ = published = [heap.at(100, 1_030, 20), heap.at(101, 1_080, 70), heap.at(130, 1_050, 0)]
    assert [facts["malloc"]["step"][-1] if facts else None for facts in published] == [100, None, 130]
    assert (first["malloc"]["free"][-1], first["malloc"]["resident"][-1]) == (320, 1_030 * 16)


def test_growth_that_has_ended_is_seen_to_have_ended() -> None:
    """Of a cache that fills: it is published until long after, though nothing changes any more."""
    heap = Heap()
    published = [facts for step in range(5_000) if (facts := heap.at(step, 1_000 + min(step, 150) * 6, 0))]
    steps = published[-1]["malloc"]["step"]
    assert steps[-1] > 5_000 / 1.3 - 1
    assert len(published) < 30


def test_calls_take_a_thousandth_of_the_time() -> None:
    heap = Heap()
    heap.takes_ns = 1_000_000
    for step in range(2_000):
        heap.at(step, 1_000, step, step / 128)  # 15.6 s
    assert heap.readings == 16
    assert heap.watched.read(2_000, 0.0, 0)[0] == 1_920 * MB  # as far as known


def test_it_is_not_read_again_once_that_took_long() -> None:
    heap = Heap()
    heap.takes_ns = LONGEST_NS + 1
    for step in range(4):
        heap.at(step, 100 * step, 100 * step, 3_600.0 * step)
    assert heap.readings == 1


@pytest.mark.parametrize(("world_size", "expected"), [(64, 32), (65, 7), (513, 0)])
def test_large_jobs_publish_it_less_often(world_size: int, expected: int) -> None:
    heap = Heap(world_size)
    published = [facts for step in range(1_000) if (facts := heap.at(step, 40 * step, 20 * step))]
    assert len(published) == expected
    for facts in published:
        steps = facts["malloc"]["step"]
        assert len(steps) <= MOST_READINGS + 1
        assert steps == sorted(set(steps))
        assert facts["malloc"]["free"] == [20 * 16 * step for step in steps]


def test_of_many_readings_those_that_stay_are_spread_over_the_run() -> None:
    heap = Heap()
    facts: dict[str, Any] = {}
    for step in range(10_000):
        facts = heap.at(step, step, 0) or facts
    steps = facts["malloc"]["step"]
    apart = [after - before for before, after in pairwise(steps[:-1])]
    assert len(steps) > MOST_READINGS // 2
    assert max(apart) <= 2 * min(apart)


def test_the_watch_counts_what_the_process_uses() -> None:
    """Its size stays the same: the leak lives on what was free."""
    step, blocks = 0, [bytes(1)]
    watch = GrowthWatch(
        now_s=lambda: step / 10, used=lambda: 5_000 * MB, malloc_free=lambda: (4_000 - step) * MB, clock_ns=lambda: 0
    )
    found: dict[str, Any] = {}
    for step in range(200):
        blocks.append(bytes(MB))
        found |= watch.check(step) or {}
    assert found["growing"]["holder"].startswith("blocks, a list")
    steps = found["malloc"]["step"]
    assert found["malloc"]["free"] == [(4_000 - step) * 16 for step in steps]


def test_glibc_knows_what_it_keeps() -> None:
    read: Callable[[], int] | None = free_in_glibc()
    if read is None:
        pytest.skip("this C library has no mallinfo2")
    blocks = [bytearray(50_000) for _ in range(2_000)]
    before = read()
    del blocks[::2]  # those in between hold the heap
    assert read() > before + 40 * MB

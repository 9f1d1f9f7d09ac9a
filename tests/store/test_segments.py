"""Segments: every whole frame counts, whatever happened to the rest."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.records.steps import SLOT_BYTES
from stepscope.ring import RingBatch
from stepscope.store.live import ring_files
from stepscope.store.live.ring_files import FILE_HEAD, FRAME_SLOTS, SegmentWriter, last_slots, read_segment

FUZZ = settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def slots(first: int, count: int) -> list[bytes]:
    return [bytes(4) + bytes([seq % 256, seq // 256]) * 126 for seq in range(first, first + count)]


def batch(first: int, count: int, *, lost: int = 0, torn: int = 0) -> RingBatch:
    return RingBatch(slots=slots(first, count), last_seq=first + count - 1, lost=lost, torn=torn)


def rows(data: bytes) -> list[bytes]:
    return [data[at : at + SLOT_BYTES] for at in range(0, len(data), SLOT_BYTES)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.seg"


def test_what_was_written_is_read(path: Path) -> None:
    writer = SegmentWriter(path)
    writer.append(batch(1, 5))
    writer.append(batch(9, 300, lost=2, torn=1))
    found = read_segment(path)
    assert rows(found.slots) == slots(1, 5) + slots(9, 300)
    assert (found.last_seq, found.lost, found.torn, found.skipped_bytes) == (308, 2, 1, 0)


def test_a_frame_may_hold_nothing_but_losses(path: Path) -> None:
    writer = SegmentWriter(path)
    writer.append(RingBatch(slots=[], last_seq=7, lost=7, torn=0))
    found = read_segment(path)
    assert (found.slots, found.last_seq, found.lost) == (b"", 7, 7)


def test_a_frame_has_a_largest_size(path: Path) -> None:
    writer = SegmentWriter(path)
    writer.append(batch(1, FRAME_SLOTS))
    with pytest.raises(ValueError, match="at most 4096"):
        writer.append(batch(FRAME_SLOTS + 1, FRAME_SLOTS + 1))
    assert len(rows(read_segment(path).slots)) == FRAME_SLOTS


def test_a_second_writer_goes_on_where_the_first_was_killed(path: Path) -> None:
    SegmentWriter(path).append(batch(1, 4, lost=1))
    with path.open("ab") as file:
        file.write(b"FRAM half a frame")
    writer = SegmentWriter(path)
    assert (writer.last_seq, writer.lost) == (4, 1)
    writer.append(batch(5, 2))
    found = read_segment(path)
    assert rows(found.slots) == slots(1, 6)
    assert (found.lost, found.skipped_bytes) == (1, 0)


@pytest.mark.parametrize("size", range(FILE_HEAD.size + 1))
def test_a_file_cut_in_its_head_is_begun_again(path: Path, size: int) -> None:
    SegmentWriter(path).append(batch(1, 4))
    path.write_bytes(path.read_bytes()[:size])
    assert read_segment(path).slots == b""
    writer = SegmentWriter(path)
    writer.append(batch(1, 4))
    assert rows(read_segment(path).slots) == slots(1, 4)


def test_every_cut_keeps_the_frames_before_it(path: Path) -> None:
    writer = SegmentWriter(path)
    ends = []
    for first in (1, 4, 7):
        writer.append(batch(first, 3))
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    for size in range(FILE_HEAD.size, len(data) + 1):
        path.write_bytes(data[:size])
        found = read_segment(path)
        whole = sum(end <= size for end in ends)
        assert rows(found.slots) == slots(1, 3 * whole)
        assert found.skipped_bytes == size - [FILE_HEAD.size, *ends][whole]
        assert SegmentWriter(path).last_seq == 3 * whole


def test_damage_in_the_middle_costs_one_frame(path: Path) -> None:
    writer = SegmentWriter(path)
    ends = [FILE_HEAD.size]
    for first in (1, 4, 7):
        writer.append(batch(first, 3))
        ends.append(path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[ends[1] + 50] ^= 1
    path.write_bytes(data)
    found = read_segment(path)
    assert rows(found.slots) == slots(1, 3) + slots(7, 3)
    assert found.skipped_bytes == ends[2] - ends[1]
    assert SegmentWriter(path).last_seq == 9


@pytest.mark.parametrize(("most", "unpacked"), [(1, 1), (10, 1), (11, 2), (25, 3), (400, 40), (1000, 40)])
def test_the_last_slots_are_had_without_the_rest(
    path: Path, monkeypatch: pytest.MonkeyPatch, most: int, unpacked: int
) -> None:
    assert last_slots(path, most) == b""
    writer = SegmentWriter(path)
    for first in range(1, 401, 10):
        writer.append(batch(first, 10))
    counts: list[int] = []
    unpack = ring_files._unpack
    monkeypatch.setattr(ring_files, "_unpack", lambda data, count: (counts.append(count), unpack(data, count))[1])
    assert rows(last_slots(path, most)) == slots(1, 400)[-most:]
    assert len(counts) == unpacked
    with path.open("ab") as file:
        file.write(b"FRAM, and cut off")
    assert rows(last_slots(path, most)) == slots(1, 400)[-most:]


def test_the_last_slots_come_after_damage_too(path: Path) -> None:
    writer = SegmentWriter(path)
    writer.append(batch(1, 10))
    start = path.stat().st_size
    for first in (11, 21, 31):
        writer.append(batch(first, 10))
    data = bytearray(path.read_bytes())
    data[start : start + 4] = b"what"
    path.write_bytes(data + bytes(2 * ring_files._LARGEST_FRAME))
    assert rows(last_slots(path, 15)) == slots(26, 15)
    assert rows(last_slots(path, 1000)) == slots(1, 10) + slots(21, 20)
    path.write_bytes(b"something else entirely")
    assert last_slots(path, 15) == b""


def test_another_version_is_not_read(path: Path) -> None:
    SegmentWriter(path).append(batch(1, 3))
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    found = read_segment(path)
    assert (found.slots, found.skipped_bytes) == (b"", len(data))


@pytest.mark.faults
@pytest.mark.parametrize("written", [0, 1, 20, 60])
def test_a_full_disk_moves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    writer = SegmentWriter(path)
    writer.append(batch(1, 3))
    before = path.read_bytes()
    real, left = os.pwrite, [written]

    def full(fd: int, data: Any, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(fd, data[: left[0]], offset)
        left[0] = 0
        return done

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "pwrite", full)
        writer.append(batch(4, 3))
    assert path.read_bytes() == before
    assert writer.last_seq == 3
    writer.append(batch(4, 3))
    assert rows(read_segment(path).slots) == slots(1, 6)


@pytest.mark.faults
def test_short_writes_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    SegmentWriter(path).append(batch(1, 3))
    assert rows(read_segment(path).slots) == slots(1, 3)


@FUZZ
@given(data=st.binary(max_size=300))
def test_fuzz_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "fuzz.seg"
    for content in (
        data,
        FILE_HEAD.pack(b"STEPSEG\0", 1, 0) + data,
        FILE_HEAD.pack(b"STEPSEG\0", 1, 0) + b"FRAM" + data,
    ):
        path.write_bytes(content)
        found = read_segment(path)
        assert found.slots == b""
        assert SegmentWriter(path).last_seq == 0


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), min_size=1, max_size=5))
def test_fuzz_changes(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    """Whatever is changed, what is read was written: the checksums see to that."""
    path = tmp_path / "fuzz.seg"
    path.unlink(missing_ok=True)
    writer = SegmentWriter(path)
    for first in (1, 4, 7):
        writer.append(batch(first, 3))
    data = bytearray(path.read_bytes())
    for at, change in changes:
        data[at % len(data)] ^= change
    path.write_bytes(data)
    assert set(rows(read_segment(path).slots)) <= set(slots(1, 9))

"""The ring: what goes in comes out, and what cannot come out is counted."""

from __future__ import annotations

import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import RingError, RingForeign, RingNoSpace, RingVersion
from stepscope.records.identity import RankIdentity
from stepscope.records.slot import CRC, NOTE_BYTES, NOTE_HEAD, SLOT_BYTES, SLOT_HEAD, STEP_BODY
from stepscope.ring import RingReader, RingState, RingWriter
from stepscope.ring.layout import (
    HEAD_WORD,
    HEADER_BYTES,
    HOOK_FAILURES_WORD,
    IDENTITY_HEAD,
    IDENTITY_OFFSET,
    LIVE_SHIFT,
    LIVE_STEP_WORD,
    LIVE_WORD,
    MAGIC,
    STATE_WORD,
)
from stepscope.testing.rings import step_phases, write_step, write_steps

ME = RankIdentity(host="node", pid=os.getpid(), rank=3, world_size=8, script="train.py")


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RingWriter]:
    writer = RingWriter(tmp_path / "1.ring", ME, slots=8)
    yield writer
    writer.close()


@pytest.fixture
def read(ring: RingWriter) -> Iterator[RingReader]:
    reader = RingReader(ring.path)
    yield reader
    reader.close()


def seqs(slots: list[bytes]) -> list[int]:
    return [SLOT_HEAD.unpack_from(slot)[3] for slot in slots]


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def slot_at(seq: int, slots: int = 8) -> int:
    return HEADER_BYTES + (seq - 1) % slots * SLOT_BYTES


def test_every_number_survives(ring: RingWriter, read: RingReader) -> None:
    write_step(ring, 41, flags=5)
    (slot,) = read.read(0).slots
    kind, flags, seq, step, start, wall, cpu, *rest = STEP_BODY.unpack(slot[CRC.size :])
    assert (kind, flags, seq, step, start) == (1, 5, 1, 41, 5_410_000_000)
    assert tuple(rest[:16]) == step_phases(41)
    assert (wall, cpu) == (sum(step_phases(41)), sum(step_phases(41)) - 41)
    assert rest[16:] == [42, 43, 44, 1, 2, 0, 0, 1, 0]


def test_header_says_who_and_where(ring: RingWriter, read: RingReader) -> None:
    ring.set_state(RingState.RUNNING)
    ring.set_phase_name(9, "augment")
    ring.set_phase_name(15, "ä" * 40)
    ring.words[LIVE_WORD] = 77 << LIVE_SHIFT | 3
    ring.words[LIVE_STEP_WORD], ring.words[HOOK_FAILURES_WORD] = 12, 2
    header = read.header()
    assert header.identity == ME
    assert header.pid == os.getpid()
    assert header.start_ticks > 0
    assert header.state is RingState.RUNNING
    assert (header.live_phase, header.live_since_ns, header.live_step, header.hook_failures) == (3, 77, 12, 2)
    assert header.phase_names[8:11] == ("checkpoint", "augment", "")
    assert header.phase_names[15] == "ä" * 16
    assert header.anchor_wall_ns > 1_600_000_000_000_000_000


@pytest.mark.parametrize("slot", [0, 8, 16, -1])
def test_only_a_users_slot_takes_a_name(ring: RingWriter, slot: int) -> None:
    with pytest.raises(ValueError, match="not a user's"):
        ring.set_phase_name(slot, "x")


def test_an_unknown_state_counts_as_running(ring: RingWriter, read: RingReader) -> None:
    ring.words[STATE_WORD] = 99
    assert read.header().state is RingState.RUNNING


def test_reading_goes_on_where_it_stopped(ring: RingWriter, read: RingReader) -> None:
    write_steps(ring, 3)
    first = read.read(0, limit=2)
    assert (seqs(first.slots), first.last_seq) == ([1, 2], 2)
    write_steps(ring, 2, first=3)
    second = read.read(first.last_seq)
    assert (seqs(second.slots), second.last_seq, second.lost, second.torn) == ([3, 4, 5], 5, 0, 0)
    assert read.read(5).slots == []
    assert read.read(5).last_seq == 5


def test_what_was_overwritten_is_counted(ring: RingWriter, read: RingReader) -> None:
    write_steps(ring, 21)
    batch = read.read(2)
    assert (seqs(batch.slots), batch.lost, batch.last_seq) == ([*range(14, 22)], 11, 21)


def test_a_writer_that_laps_the_reader_is_seen(ring: RingWriter, read: RingReader) -> None:
    """The head is read first; slots that are newer than it says by then are lost ones, and exactly those."""
    write_steps(ring, 19)
    ring.words[HEAD_WORD] = 16
    batch = read.read(8)
    assert batch.lost == 3
    assert seqs(batch.slots) == [12, 13, 14, 15, 16, 17, 18, 19]


def test_a_slot_is_readable_before_the_head_moves(ring: RingWriter, read: RingReader) -> None:
    """A kill between writing the slot and moving the head loses nothing."""
    write_steps(ring, 5)
    ring.words[HEAD_WORD] = 4
    batch = read.read(0)
    assert (seqs(batch.slots), batch.last_seq) == ([1, 2, 3, 4, 5], 5)
    assert read.read(5).slots == []


def test_a_torn_slot_is_waited_for_then_passed(ring: RingWriter, read: RingReader) -> None:
    write_steps(ring, 4)
    overwrite(ring.path, slot_at(2) + 100, b"\xff")
    batch = read.read(0)
    assert (seqs(batch.slots), batch.last_seq, batch.torn) == ([1], 1, 0)
    assert read.read(1).last_seq == 1
    batch = read.read(1)
    assert (seqs(batch.slots), batch.last_seq, batch.torn) == ([3, 4], 4, 1)


def test_a_slot_that_was_being_written_is_not_lost(ring: RingWriter, read: RingReader) -> None:
    write_steps(ring, 2)
    whole = ring.path.read_bytes()[slot_at(2) : slot_at(2) + SLOT_BYTES]
    overwrite(ring.path, slot_at(2), bytes(40))
    assert seqs(read.read(0).slots) == [1]
    overwrite(ring.path, slot_at(2), whole)
    batch = read.read(1)
    assert (seqs(batch.slots), batch.torn) == ([2], 0)


def test_notes(ring: RingWriter, read: RingReader) -> None:
    ring.append_note(7, b'{"loss":1.5}')
    ring.append_note(8, b"x" * 1000)
    short, long = read.read(0).slots
    kind, _, seq, step, length = NOTE_HEAD.unpack_from(short, CRC.size)
    assert (kind, seq, step, length) == (3, 1, 7, 12)
    assert short[CRC.size + NOTE_HEAD.size :][:length] == b'{"loss":1.5}'
    assert NOTE_HEAD.unpack_from(long, CRC.size)[4] == NOTE_BYTES


def test_an_identity_can_change_and_a_half_written_one_is_not_used(ring: RingWriter, read: RingReader) -> None:
    assert read.header().identity.rank == 3
    overwrite(ring.path, IDENTITY_OFFSET + IDENTITY_HEAD.size + 10, b"#")
    assert read.header().identity == ME
    other = RankIdentity(host="node", pid=1, rank=5)
    ring.set_identity(other)
    assert read.header().identity == other


def test_an_identity_that_does_not_fit_keeps_its_rank(ring: RingWriter, read: RingReader) -> None:
    ring.set_identity(RankIdentity(host="node", pid=1, rank=6, script="/ü" * 2000 + "/train.py"))
    found = read.header().identity
    assert found.rank == 6
    assert found.script.endswith("/train.py")


@pytest.mark.parametrize(
    "text", [b"[]", b"7", b'{"host":1,"pid":2}', b'{"host":"a"}', b'{"host":"a","pid":true}', b"[" * 3000, b"\xff"]
)
def test_an_identity_of_another_hand_is_passed(ring: RingWriter, read: RingReader, text: bytes) -> None:
    read.header()
    overwrite(ring.path, IDENTITY_OFFSET, IDENTITY_HEAD.pack(len(text), zlib.crc32(text)) + text)
    assert read.header().identity == ME


@pytest.mark.parametrize(
    ("at", "data", "error"),
    [
        (0, b"NOTARING", RingForeign),
        (8, struct.pack("<I", 2), RingVersion),
        (12, struct.pack("<I", 512), RingForeign),
        (16, struct.pack("<I", 128), RingForeign),
        (20, struct.pack("<I", 0), RingForeign),
        (20, struct.pack("<I", 9), RingForeign),
        (20, struct.pack("<I", 1 << 31), RingForeign),
        (24, struct.pack("<Q", 1 << 40), RingForeign),
    ],
)
def test_a_header_that_is_not_ours(ring: RingWriter, at: int, data: bytes, error: type[RingError]) -> None:
    overwrite(ring.path, at, data)
    with pytest.raises(error):
        RingReader(ring.path)


@pytest.mark.parametrize("size", [0, 7, 63, 64, HEADER_BYTES, HEADER_BYTES + 8 * SLOT_BYTES - 1])
def test_a_ring_that_was_cut_off(ring: RingWriter, size: int) -> None:
    cut = ring.path.with_name("cut.ring")
    cut.write_bytes(ring.path.read_bytes()[:size])
    with pytest.raises(RingForeign):
        RingReader(cut)


def test_the_version_is_named(ring: RingWriter) -> None:
    overwrite(ring.path, 8, struct.pack("<I", 7))
    with pytest.raises(RingVersion, match="has ring layout 7; this Stepscope reads layout 1"):
        RingReader(ring.path)


def test_until_the_magic_stands_a_ring_is_left_alone(ring: RingWriter) -> None:
    overwrite(ring.path, 0, bytes(8))
    with pytest.raises(RingForeign, match="not yet one"):
        RingReader(ring.path)
    overwrite(ring.path, 0, MAGIC)
    RingReader(ring.path).close()


def test_a_full_file_system_is_an_error_at_creation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RingNoSpace, match=r"cannot reserve 6,144 bytes at .*1\.ring: No space left on device"):
        RingWriter(tmp_path / "1.ring", ME, slots=8)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_a_file_system_that_cannot_reserve_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    def cannot(fd: int, offset: int, size: int) -> None:
        raise AttributeError if number is None else OSError(number, "no")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    writer = RingWriter(tmp_path / "1.ring", ME, slots=400)
    assert writer.path.stat().st_blocks * 512 >= HEADER_BYTES + 400 * SLOT_BYTES
    writer.close()


def test_the_file_size_limit_is_an_error_at_creation(tmp_path: Path) -> None:
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, earlier[1]))
    try:
        with pytest.raises(RingNoSpace, match="File too large"):
            RingWriter(tmp_path / "1.ring", ME, slots=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_taken_or_missing_is_an_error(ring: RingWriter, tmp_path: Path) -> None:
    with pytest.raises(RingNoSpace, match="File exists"):
        RingWriter(ring.path, ME, slots=8)
    with pytest.raises(RingNoSpace, match="No such file"):
        RingWriter(tmp_path / "nowhere" / "1.ring", ME, slots=8)


def test_a_ring_is_for_its_owner_only(ring: RingWriter) -> None:
    assert ring.path.stat().st_mode & 0o777 == 0o600


WRITER = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from stepscope.records.identity import RankIdentity
    from stepscope.ring import RingWriter
    from stepscope.testing.rings import write_step
    writer = RingWriter(Path(sys.argv[1]), RankIdentity(host="node", pid=os.getpid()), slots=int(sys.argv[2]))
    print("ready", flush=True)
    for step in range(int(sys.argv[3])):
        write_step(writer, step)
    print("done", flush=True)
    sys.stdin.read()
    """
)


def start_writer(path: Path, *, slots: int, steps: int) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(path), str(slots), str(steps)]
    process = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]
    assert process.stdout.readline() == "ready\n"
    return process  # type: ignore[no-any-return]


def check_whole(slots: list[bytes]) -> None:
    for slot in slots:
        body = STEP_BODY.unpack(slot[CRC.size :])
        assert body[2] == body[3] + 1, "the slot's seq and step belong together"
        assert tuple(body[7:23]) == step_phases(body[3])


@pytest.mark.parametrize("slots", [16, 4096])
def test_a_reader_beside_a_running_writer_sees_only_whole_slots(tmp_path: Path, slots: int) -> None:
    """A tiny ring is lapped all the time; every record is then read whole or counted as lost, and none twice."""
    steps = 20_000
    process = start_writer(tmp_path / "1.ring", slots=slots, steps=steps)
    reader = RingReader(tmp_path / "1.ring")
    last = found = lost = torn = 0
    try:
        while last < steps:
            batch = reader.read(last)
            check_whole(batch.slots)
            assert seqs(batch.slots) == sorted(set(seqs(batch.slots)))
            assert all(last < seq <= batch.last_seq for seq in seqs(batch.slots))
            assert batch.last_seq - last == len(batch.slots) + batch.lost + batch.torn
            last, found, lost, torn = batch.last_seq, found + len(batch.slots), lost + batch.lost, torn + batch.torn
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
        reader.close()
    assert found + lost + torn == steps
    assert found > 0


def test_a_killed_writer_leaves_its_last_steps(tmp_path: Path) -> None:
    process = start_writer(tmp_path / "1.ring", slots=64, steps=40)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    process.kill()
    process.communicate()
    reader = RingReader(tmp_path / "1.ring")
    batch = reader.read(0)
    check_whole(batch.slots)
    assert (len(batch.slots), batch.lost, batch.torn) == (40, 0, 0)
    reader.close()


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survive(path: Path) -> None:
    """Everything a reader does; only RingError may come out of it."""
    try:
        reader = RingReader(path)
    except RingError:
        return
    try:
        header = reader.header()
        assert len(header.phase_names) == 16
        last = 0
        for _ in range(2 * RingReader.PATIENCE):
            batch = reader.read(last)
            assert batch.last_seq >= last
            last = batch.last_seq
    finally:
        reader.close()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    writer = RingWriter(tmp_path_factory.mktemp("ring") / "1.ring", ME, slots=8)
    write_steps(writer, 11)
    writer.close()
    return writer.path.read_bytes()


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 700), st.binary(min_size=1, max_size=16)), min_size=1, max_size=4))
def test_fuzz_header(pristine: bytes, tmp_path: Path, changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(pristine)
    for at, change in changes:
        data[at : at + len(change)] = change
    (tmp_path / "fuzz.ring").write_bytes(data)
    survive(tmp_path / "fuzz.ring")


@FUZZ
@given(tail=st.binary(max_size=400), keep=st.integers(0, HEADER_BYTES + 8 * SLOT_BYTES))
def test_fuzz_anything(pristine: bytes, tmp_path: Path, tail: bytes, keep: int) -> None:
    (tmp_path / "fuzz.ring").write_bytes(pristine[:keep] + tail)
    survive(tmp_path / "fuzz.ring")


@FUZZ
@given(text=st.binary(max_size=200) | st.from_regex(r"\{.*\}", fullmatch=True).map(str.encode))
def test_fuzz_identity(pristine: bytes, tmp_path: Path, text: bytes) -> None:
    data = bytearray(pristine)
    block = IDENTITY_HEAD.pack(len(text), zlib.crc32(text)) + text
    data[IDENTITY_OFFSET : IDENTITY_OFFSET + len(block)] = block
    (tmp_path / "fuzz.ring").write_bytes(data)
    survive(tmp_path / "fuzz.ring")


def test_identity_round_trip() -> None:
    assert RankIdentity.from_json(ME.to_json()) == ME
    newer = ME.to_json()[:-1] + b',"mesh":[2,4]}'
    assert RankIdentity.from_json(newer) == ME

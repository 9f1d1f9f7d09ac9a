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
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rings import (
    START_NS,
    STEP_NS,
    RingStream,
    device_phases,
    step_phases,
    write_call,
    write_device_step,
    write_step,
    write_steps,
    write_wait,
)

from stepscope.errors import RingError, RingForeign, RingNoSpace, RingVersion
from stepscope.records.identity import RankIdentity
from stepscope.records.steps import DEVICE, DEVICE_SLOT, NOTE, NOTE_SLOT, SLOT_HEAD, STEP, STEP_SLOT
from stepscope.ring import RingBatch, RingReader, RingState, RingWriter, split
from stepscope.ring.layout import (
    BLOCK_HEAD,
    FACTS_BYTES,
    FACTS_OFFSET,
    HEADER_BYTES,
    HOOK_FAILURES_WORD,
    IDENTITY_OFFSET,
    MAGIC,
    MIN_CAPACITY,
    STATE_WORD,
    WORD_BYTES,
    note_words,
)

ME = RankIdentity(host="node", pid=os.getpid(), rank=3, world_size=8, script="train.py")
STEP_WORDS = 2 + 10 + 2 + 3
"""What ``write_step`` writes: a beginning, five phases, the end and three figures of memory."""


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[RingStream]:
    stream = RingStream(tmp_path / "1.ring", ME, capacity=MIN_CAPACITY)
    yield stream
    stream.close()


@pytest.fixture
def ring(stream: RingStream) -> RingWriter:
    return stream.ring


@pytest.fixture
def read(ring: RingWriter) -> Iterator[RingReader]:
    reader = RingReader(ring.path)
    yield reader
    reader.close()


def numbers(batch: RingBatch) -> list[int]:
    return [STEP_SLOT.unpack(slot)[3] for slot in batch.slots if slot[4] == STEP]


def seqs(batch: RingBatch) -> list[int]:
    return [SLOT_HEAD.unpack_from(slot)[3] for slot in batch.slots]


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_every_number_survives(stream: RingStream, read: RingReader) -> None:
    write_step(stream, 41, flags=5)
    (slot,) = read.read(0).slots
    kind, flags, seq, step, start, wall, *rest = STEP_SLOT.unpack(slot)
    assert (kind, flags, seq, step) == (STEP, 5, 2 + STEP_WORDS, 41)
    assert (start, wall) == (START_NS + 41 * STEP_NS, sum(step_phases(41)))
    assert tuple(rest[:16]) == step_phases(41)
    assert rest[16:] == [42, 43, 44, 1, 1, 0, 0, 1, 0, 0, 0]


def test_device_times_and_notes(stream: RingStream, read: RingReader) -> None:
    write_step(stream, 0)
    write_device_step(stream, 0)
    stream.ledger.put(*note_words(7, b'{"loss":1.5}'))
    stream.ledger.put(*note_words(8, "ä".encode() * 115))
    write_step(stream, 1)
    step, device, short, long, _ = read.read(0).slots
    assert step[4] == STEP
    assert DEVICE_SLOT.unpack(device)[0] == DEVICE
    assert DEVICE_SLOT.unpack(device)[3:] == (0, sum(device_phases(0)), *device_phases(0))
    assert (NOTE_SLOT.unpack(short)[0], NOTE_SLOT.unpack(short)[3:5]) == (NOTE, (7, 12))
    assert NOTE_SLOT.unpack(short)[5].rstrip(b"\0") == b'{"loss":1.5}'
    assert NOTE_SLOT.unpack(long)[3:] == (8, 230, "ä".encode() * 115)


def test_header_says_who_and_where(ring: RingWriter, read: RingReader) -> None:
    ring.set_state(RingState.RUNNING)
    ring.set_phase_name(9, "augment")
    ring.set_phase_name(15, "ä" * 40)
    ring.header[HOOK_FAILURES_WORD] = 2
    header = read.header()
    assert header.identity == ME
    assert header.pid == os.getpid()
    assert header.start_ticks > 0
    assert header.state is RingState.RUNNING
    assert header.hook_failures == 2
    assert header.phase_names[8:11] == ("checkpoint", "augment", "")
    assert header.phase_names[15] == "ä" * 16
    assert header.anchor_wall_ns > 1_600_000_000_000_000_000


@pytest.mark.parametrize("slot", [0, 8, 16, -1])
def test_only_a_users_slot_takes_a_name(ring: RingWriter, slot: int) -> None:
    with pytest.raises(ValueError, match="not a user slot"):
        ring.set_phase_name(slot, "x")


def test_an_unknown_state_counts_as_running(ring: RingWriter, read: RingReader) -> None:
    ring.header[STATE_WORD] = 99
    assert read.header().state is RingState.RUNNING


def test_reading_goes_on_where_it_stopped(stream: RingStream, read: RingReader) -> None:
    write_steps(stream, 3)
    first = read.read(0)
    assert numbers(first) == [0, 1, 2]
    write_steps(stream, 2, first=3)
    second = read.read(first.last_seq)
    assert (numbers(second), second.lost, second.torn) == ([3, 4], 0, 0)
    third = read.read(second.last_seq)
    assert (third.slots, third.last_seq, third.lost) == ([], second.last_seq, 0)


def test_another_reader_goes_on_behind_any_record(stream: RingStream, read: RingReader) -> None:
    """As an agent does that was started again: the segment says how far the last one came."""
    write_steps(stream, 40, device=True)
    everything = read.read(0)
    for at, seq in enumerate(seqs(everything)):
        other = RingReader(stream.ring.path)
        batch = other.read(seq)
        assert batch.slots == everything.slots[at + 1 :]
        assert (batch.lost, batch.torn, batch.last_seq) == (0, 0, everything.last_seq)
        other.close()


def test_the_parts_of_a_batch_can_be_gone_on_from(stream: RingStream, read: RingReader) -> None:
    write_steps(stream, 10)
    batch = read.read(0)
    parts = list(split(batch, 4))
    assert [numbers(part) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [part.last_seq for part in parts] == [seqs(batch)[3], seqs(batch)[7], batch.last_seq]
    assert len(list(split(read.read(batch.last_seq), 4))) == 1


def test_rounds_of_the_ring_are_seamless(stream: RingStream, read: RingReader) -> None:
    last, found = 0, []
    for first in range(0, 3000, 50):
        write_steps(stream, 50, first=first)
        batch = read.read(last)
        assert (batch.lost, batch.torn) == (0, 0)
        found += numbers(batch)
        last = batch.last_seq
    assert found == list(range(3000))
    assert last > 10 * MIN_CAPACITY


def test_what_was_overwritten_is_counted(stream: RingStream, read: RingReader) -> None:
    write_steps(stream, 10)
    last = read.read(0).last_seq
    write_steps(stream, 1000, first=10)
    batch = read.read(last)
    found = numbers(batch)
    assert found == list(range(found[0], 1010))
    assert len(found) > 100
    assert (batch.lost, batch.torn) == (found[0] - 10, 0)


def test_a_long_step_is_read_as_it_goes_and_survives_its_rounds(stream: RingStream, read: RingReader) -> None:
    """An evaluation of many batches: far more words than the ring holds, all within one step."""
    last = 0
    for _ in range(20 * MIN_CAPACITY // 200):
        for _ in range(100):
            stream.clock.advance(1)
            outer = stream.ledger.enter(7)
            stream.clock.advance(2)
            stream.ledger.leave(outer)
        batch = read.read(last)
        assert (batch.slots, batch.lost, batch.torn) == ([], 0, 0)
        last = batch.last_seq
    stream.ledger.end_step(0, 0, 0)
    (slot,) = read.read(last).slots
    *_, wall = STEP_SLOT.unpack(slot)[:6]
    phases = STEP_SLOT.unpack(slot)[6:22]
    count = 20 * MIN_CAPACITY // 200 * 100
    assert (phases[0], phases[7], wall) == (count, 2 * count, 3 * count)


def test_words_that_cannot_be_are_counted_and_passed(stream: RingStream, read: RingReader) -> None:
    write_steps(stream, 5)
    at = HEADER_BYTES + (2 + 2 * STEP_WORDS + 6) * WORD_BYTES  # in the middle of step 2
    overwrite(stream.ring.path, at, struct.pack("<Q", 17 << 5 | 3))
    batch = read.read(0)
    assert numbers(batch) == [0, 1, 3, 4]
    assert batch.torn == 1


def test_an_identity_can_change_and_a_half_written_one_is_not_used(ring: RingWriter, read: RingReader) -> None:
    assert read.header().identity.rank == 3
    overwrite(ring.path, IDENTITY_OFFSET + BLOCK_HEAD.size + 10, b"#")
    assert read.header().identity == ME
    other = RankIdentity(host="node", pid=1, rank=5)
    ring.set_identity(other)
    assert read.header().identity == other


def test_an_identity_that_does_not_fit_keeps_its_rank(ring: RingWriter, read: RingReader) -> None:
    ring.set_facts({"threads": 3})
    ring.set_identity(RankIdentity(host="n" * 64, pid=1, rank=6, script="程" * 2000 + "/train.py"))
    found = read.header().identity
    assert found.rank == 6
    assert found.script.endswith("/train.py")
    assert read.header().facts == {"threads": 3}


def test_facts_can_change_and_half_written_ones_are_not_used(ring: RingWriter, read: RingReader) -> None:
    assert read.header().facts == {}
    ring.set_facts({"threads": 3, "autocast": None})
    assert read.header().facts == {"threads": 3, "autocast": None}
    overwrite(ring.path, FACTS_OFFSET + BLOCK_HEAD.size + 3, b"#")
    assert read.header().facts == {"threads": 3, "autocast": None}
    newcomer = RingReader(ring.path)
    assert newcomer.header().facts == {}
    newcomer.close()
    ring.set_facts({"threads": 4})
    assert read.header().facts == {"threads": 4}


def test_facts_that_do_not_fit_lose_the_least_important(ring: RingWriter, read: RingReader) -> None:
    long = "ü" * 120
    peers = [[n, 1 << 40, 1 << 40] for n in range(40)]
    model = {"class": long, "dtype": long}
    ring.set_facts({"threads": 2, "mesh": {"names": [long] * 6, "shape": [1]}, "model": model, "peers": peers})
    assert read.header().facts == {"peers": peers, "model": model}
    write_step(stream := RingStream(ring.path.with_name("2.ring"), ME, capacity=MIN_CAPACITY), 0)
    stream.ring.set_facts({"peers": [[1 << 60, 1 << 60, 1 << 60]] * 64})
    reader = RingReader(stream.ring.path)
    assert reader.header().facts == {}
    assert len(reader.read(0).slots) == 1
    reader.close()
    stream.close()


FACTS_OF_ANOTHER_HAND = [
    *(b"[]", b"7", b"", b"\xff", b"[" * 2000, b'{"threads":NaN}', b'{"threads":-1}', b'{"loader":[]}', b'{"threads":'),
    *(b'{"peers":[[0,0,1]]}', b'{"peers":[]}', b'{"ddp":{"bucket_mb":' + b"9" * 400 + b"}}", b'{"unheard":1}'),
]


@pytest.mark.parametrize("text", FACTS_OF_ANOTHER_HAND, ids=range(len(FACTS_OF_ANOTHER_HAND)))
def test_facts_of_another_hand_are_none(ring: RingWriter, read: RingReader, text: bytes) -> None:
    overwrite(ring.path, FACTS_OFFSET, BLOCK_HEAD.pack(len(text), zlib.crc32(text)) + text)
    assert read.header().facts == {}


@pytest.mark.parametrize(
    "text", [b"[]", b"7", b'{"host":1,"pid":2}', b'{"host":"a"}', b'{"host":"a","pid":true}', b"[" * 3000, b"\xff"]
)
def test_an_identity_of_another_hand_is_passed(ring: RingWriter, read: RingReader, text: bytes) -> None:
    read.header()
    overwrite(ring.path, IDENTITY_OFFSET, BLOCK_HEAD.pack(len(text), zlib.crc32(text)) + text)
    assert read.header().identity == ME


@pytest.mark.parametrize(
    ("at", "data", "error"),
    [
        (0, b"NOTARING", RingForeign),
        (8, struct.pack("<I", 1), RingVersion),
        (12, struct.pack("<I", 512), RingForeign),
        (16, struct.pack("<Q", 0), RingForeign),
        (16, struct.pack("<Q", MIN_CAPACITY - 1), RingForeign),
        (16, struct.pack("<Q", MIN_CAPACITY + 1), RingForeign),
        (16, struct.pack("<Q", 1 << 60), RingForeign),
        (24, struct.pack("<Q", 1 << 40), RingForeign),
    ],
)
def test_a_header_that_is_not_ours(ring: RingWriter, at: int, data: bytes, error: type[RingError]) -> None:
    overwrite(ring.path, at, data)
    with pytest.raises(error):
        RingReader(ring.path)


@pytest.mark.parametrize("size", [0, 7, 63, 64, HEADER_BYTES, HEADER_BYTES + MIN_CAPACITY * WORD_BYTES - 1])
def test_a_ring_that_was_cut_off(ring: RingWriter, size: int) -> None:
    cut = ring.path.with_name("cut.ring")
    cut.write_bytes(ring.path.read_bytes()[:size])
    with pytest.raises(RingForeign):
        RingReader(cut)


def test_the_version_is_named(ring: RingWriter) -> None:
    overwrite(ring.path, 8, struct.pack("<I", 7))
    with pytest.raises(RingVersion, match="has ring layout 7; this Stepscope reads layout 2"):
        RingReader(ring.path)


def test_until_the_magic_stands_a_ring_is_left_alone(ring: RingWriter) -> None:
    overwrite(ring.path, 0, bytes(8))
    with pytest.raises(RingForeign, match="not complete yet"):
        RingReader(ring.path)
    overwrite(ring.path, 0, MAGIC)
    RingReader(ring.path).close()


def test_a_full_file_system_is_an_error_at_creation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RingNoSpace, match=r"cannot reserve 40,960 bytes at .*1\.ring: No space left on device"):
        RingWriter(tmp_path / "1.ring", ME, capacity=MIN_CAPACITY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_a_file_system_that_cannot_reserve_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    def cannot(fd: int, offset: int, size: int) -> None:
        raise AttributeError if number is None else OSError(number, "no")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    writer = RingWriter(tmp_path / "1.ring", ME, capacity=12800)
    assert writer.path.stat().st_blocks * 512 >= HEADER_BYTES + 12800 * WORD_BYTES
    writer.close()


def test_the_file_size_limit_is_an_error_at_creation(tmp_path: Path) -> None:
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, earlier[1]))
    try:
        with pytest.raises(RingNoSpace, match="File too large"):
            RingWriter(tmp_path / "1.ring", ME, capacity=MIN_CAPACITY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_taken_or_missing_is_an_error(ring: RingWriter, tmp_path: Path) -> None:
    with pytest.raises(RingNoSpace, match="File exists"):
        RingWriter(ring.path, ME, capacity=MIN_CAPACITY)
    with pytest.raises(RingNoSpace, match="No such file"):
        RingWriter(tmp_path / "nowhere" / "1.ring", ME, capacity=MIN_CAPACITY)


def test_a_ring_is_for_its_owner_only(ring: RingWriter) -> None:
    assert ring.path.stat().st_mode & 0o777 == 0o600


WRITER = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from stepscope.records.identity import RankIdentity
    from rings import RingStream, write_step
    stream = RingStream(Path(sys.argv[1]), RankIdentity(host="node", pid=os.getpid()), capacity=int(sys.argv[2]))
    print("ready", flush=True)
    for step in range(int(sys.argv[3])):
        write_step(stream, step)
    print("done", flush=True)
    sys.stdin.read()
    """
)


def start_writer(path: Path, *, capacity: int, steps: int) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(path), str(capacity), str(steps)]
    process = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]
    assert process.stdout.readline() == "ready\n"
    return process  # type: ignore[no-any-return]


def check_whole(batch: RingBatch) -> None:
    for slot in batch.slots:
        body = STEP_SLOT.unpack(slot)
        assert body[4] == START_NS + body[3] * STEP_NS
        assert tuple(body[6:22]) == step_phases(body[3])


@pytest.mark.parametrize("capacity", [MIN_CAPACITY, 1 << 18])
def test_a_reader_beside_a_running_writer_sees_only_whole_steps(tmp_path: Path, capacity: int) -> None:
    """A tiny ring is lapped all the time; every step is then read whole or counted as lost, and none twice."""
    steps = 20_000
    process = start_writer(tmp_path / "1.ring", capacity=capacity, steps=steps)
    reader = RingReader(tmp_path / "1.ring")
    last = lost = 0
    found: list[int] = []
    try:
        while not found or found[-1] < steps - 1:
            batch = reader.read(last)
            check_whole(batch)
            assert batch.torn == 0
            found += numbers(batch)
            lost += batch.lost
            last = batch.last_seq
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
        reader.close()
    assert found == sorted(set(found))
    assert len(found) + lost == steps


def test_a_killed_writer_leaves_its_last_steps(tmp_path: Path) -> None:
    process = start_writer(tmp_path / "1.ring", capacity=MIN_CAPACITY, steps=40)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    process.kill()
    process.communicate()
    reader = RingReader(tmp_path / "1.ring")
    batch = reader.read(0)
    check_whole(batch)
    assert (numbers(batch), batch.lost, batch.torn) == (list(range(40)), 0, 0)
    reader.close()


FUZZ = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survive(path: Path) -> None:
    """Everything a reader does; only RingError may come out of it."""
    try:
        reader = RingReader(path)
    except RingError:
        return
    try:
        header = reader.header()
        assert len(header.phase_names) == 16
        reader.last_collective()
        last = 0
        for _ in range(3):
            batch = reader.read(last)
            assert batch.last_seq >= last
            last = batch.last_seq
    finally:
        reader.close()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    stream = RingStream(tmp_path_factory.mktemp("ring") / "1.ring", ME, capacity=MIN_CAPACITY)
    write_steps(stream, 150, device=True)
    for step in range(150, 300):
        write_call(stream, 1 + step % 11, group=step % 64, size=step, peer=step % 2 or None)
        stream.ledger.leave(write_wait(stream))
        write_step(stream, step)
    stream.ledger.put(*note_words(3, b"hello"))
    stream.close()
    return stream.ring.path.read_bytes()


Changes = list[tuple[int, bytes]]


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 4095), st.binary(min_size=8, max_size=16)), min_size=1, max_size=40))
def test_fuzz_words(pristine: bytes, tmp_path: Path, changes: Changes) -> None:
    data = bytearray(pristine)
    for word, change in changes:
        at = HEADER_BYTES + word * WORD_BYTES
        data[at : at + len(change)] = change
    (tmp_path / "fuzz.ring").write_bytes(data)
    survive(tmp_path / "fuzz.ring")


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 700), st.binary(min_size=1, max_size=16)), min_size=1, max_size=4))
def test_fuzz_header(pristine: bytes, tmp_path: Path, changes: Changes) -> None:
    data = bytearray(pristine)
    for at, change in changes:
        data[at : at + len(change)] = change
    (tmp_path / "fuzz.ring").write_bytes(data)
    survive(tmp_path / "fuzz.ring")


@FUZZ
@given(tail=st.binary(max_size=400), keep=st.integers(0, HEADER_BYTES + MIN_CAPACITY * WORD_BYTES))
def test_fuzz_anything(pristine: bytes, tmp_path: Path, tail: bytes, keep: int) -> None:
    (tmp_path / "fuzz.ring").write_bytes(pristine[:keep] + tail)
    survive(tmp_path / "fuzz.ring")


@FUZZ
@given(text=st.binary(max_size=200) | st.from_regex(r"\{.*\}", fullmatch=True).map(str.encode))
def test_fuzz_identity(pristine: bytes, tmp_path: Path, text: bytes) -> None:
    data = bytearray(pristine)
    block = BLOCK_HEAD.pack(len(text), zlib.crc32(text)) + text
    data[IDENTITY_OFFSET : IDENTITY_OFFSET + len(block)] = block
    (tmp_path / "fuzz.ring").write_bytes(data)
    survive(tmp_path / "fuzz.ring")


@FUZZ
@given(
    text=st.binary(max_size=FACTS_BYTES) | st.from_regex(r"\{.*\}", fullmatch=True).map(str.encode), lie=st.booleans()
)
def test_fuzz_facts(pristine: bytes, tmp_path: Path, text: bytes, lie: bool) -> None:
    data = bytearray(pristine)
    block = (BLOCK_HEAD.pack(len(text) + lie * 5000, zlib.crc32(text)) + text)[: HEADER_BYTES - FACTS_OFFSET]
    data[FACTS_OFFSET : FACTS_OFFSET + len(block)] = block
    (tmp_path / "fuzz.ring").write_bytes(data)
    survive(tmp_path / "fuzz.ring")


def test_identity_round_trip() -> None:
    assert RankIdentity.from_json(ME.to_json()) == ME
    newer = ME.to_json()[:-1] + b',"mesh":[2,4]}'
    assert RankIdentity.from_json(newer) == ME

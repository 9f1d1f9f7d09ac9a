r"""The files of one ring while the run is active: its records (``KEY.seg``) and its last known header (``KEY.json``).

A segment holds the slots of one ring:

    0    8s   magic  b"STEPSEG\0"
    8    u32  version
    12   u32  zero
    16   ...  frames, each:
         4s   magic  b"FRAM"
         u32  crc32 of the rest of the frame
         u32  count       number of slots, at most FRAME_SLOTS
         u32  bytes       size of the payload
         u64  first_seq   first and …
         u64  last_seq    … last slot that was examined; the next frame continues from there
         u32  lost        slots overwritten before they were read, since the previous frame
         u32  torn        slots given up as unreadable, since the previous frame
         ...  payload: zlib of the slots' bytes 4..256, transposed: byte 4 of every slot, byte 5 of every slot …

Transposing groups the bytes that hardly change from step to step, so they compress well: a noisy CPU run takes less
than 30 bytes per step instead of the slot's 256.  A frame counts as soon as it is complete; readers skip what a crash
cut off, and the next writer overwrites it.  One writer at a time (the node's agent); any number of readers.  Standard
library only: the agent writes these files.

Why our own format while the run is active: appending needs no engine, index or memory. Parquet cannot be appended to,
and its footer is written last: a killed writer would leave nothing.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from stepscope.records.collectives import ProcessGroup, groups_from_json, groups_to_json
from stepscope.records.files import file_mode, open_file
from stepscope.records.identity import RankIdentity, checked_facts
from stepscope.records.series import RankState
from stepscope.records.steps import BUILTIN_PHASES, PHASE_SLOTS, SLOT_BYTES
from stepscope.ring import RingBatch, RingHeader
from stepscope.store import file_io
from stepscope.store.file_io import after_hole, read_document, write_all
from stepscope.store.paths import SIDECAR_SUFFIX, STEPS, ring_key, sidecar_path

__all__ = [
    "FRAME_SLOTS",
    "RingSidecar",
    "SegmentPart",
    "SegmentWriter",
    "groups_as_kept",
    "guess_sidecar",
    "last_slots",
    "parts_from",
    "read_segment",
    "read_sidecars",
    "sidecar_of",
    "write_sidecar",
]


# -- segments ---------------------------------------------------------------------------------------------------------

FILE_HEAD = struct.Struct("<8sII")
FILE_MAGIC = b"STEPSEG\0"
VERSION = 1
FRAME_HEAD = struct.Struct("<4sIIIQQII")
FRAME_MAGIC = b"FRAM"
FRAME_SLOTS = 4096
"""Maximum slots per frame: bounds the memory needed to write or read one."""

_CRC = struct.Struct("<I")
_ZERO_BYTES = 4
"""At the head of every slot; not stored."""
_BODY_BYTES = SLOT_BYTES - _ZERO_BYTES
_CRC_END = 8
_U32_MAX = (1 << 32) - 1
_LARGEST_FRAME = FRAME_HEAD.size + FRAME_SLOTS * _BODY_BYTES + (1 << 12)
"""Incompressible data becomes slightly larger."""
MOST_UNPACKED = 256 << 20
MOST_TIMES = 200
"""A segment that expands to more than both is not ours: noisy steps shrink to a ninth, equal ones to a thirtieth."""


@dataclass(frozen=True, kw_only=True)
class SegmentSlots:
    """The contents of one segment."""

    slots: bytes
    """256 bytes per slot."""
    last_seq: int
    lost: int
    torn: int
    skipped_bytes: int
    """Bytes outside complete frames: the whole file if it is not a segment of this version."""


@dataclass(frozen=True, kw_only=True)
class SegmentPart:
    """The contents of one frame."""

    first_seq: int
    last_seq: int
    lost: int
    torn: int
    slots: bytes
    """256 bytes per slot."""


@dataclass(frozen=True, kw_only=True)
class _Frame:
    count: int
    first_seq: int
    last_seq: int
    lost: int
    torn: int
    start: int
    payload_start: int
    end: int


class SegmentWriter:
    """Appends batches of slots.  Opens the file for each append, so that many rings use no file descriptors.

    ``last_seq`` is where the next ``RingReader.read`` continues, also after a restart.
    """

    def __init__(self, path: Path) -> None:
        """Find the end of the last complete frame of an existing file; OSError if it cannot be read."""
        self.path = path
        self.last_seq = 0
        self.lost = 0
        self.torn = 0
        self._end = 0
        try:
            file = open_file(path, buffering=0)
        except FileNotFoundError:
            return
        with file:
            if _is_segment(os.pread(file.fileno(), FILE_HEAD.size, 0)):
                self._end = FILE_HEAD.size
            for frame, _ in _frames_of(file.fileno()):
                self.last_seq = frame.last_seq
                self.lost += frame.lost
                self.torn += frame.torn
                self._end = frame.end

    def append(self, batch: RingBatch) -> None:
        """Add one frame, or nothing if the disk refuses (OSError): the batch can then be read and appended again."""
        if len(batch.slots) > FRAME_SLOTS:
            raise ValueError(f"a frame holds at most {FRAME_SLOTS} slots")
        head = b"" if self._end else FILE_HEAD.pack(FILE_MAGIC, VERSION, 0)
        data = head + _pack_frame(batch, first_seq=self.last_seq + 1)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, file_mode(self.path.parent))
        try:
            if os.fstat(fd).st_size != self._end:
                os.ftruncate(fd, self._end)
            try:
                write_all(fd, data, self._end)
            except OSError:
                os.ftruncate(fd, self._end)
                raise
        finally:
            os.close(fd)
        self._end += len(data)
        self.last_seq = batch.last_seq
        self.lost += batch.lost
        self.torn += batch.torn


def read_segment(path: Path) -> SegmentSlots:
    """Read all complete frames of a segment.  OSError if it would take disproportionate memory."""
    slots = bytearray()
    last_seq = lost = torn = 0
    with open_file(path, buffering=0) as file:
        fd = file.fileno()
        skipped = size = os.fstat(fd).st_size
        if _is_segment(os.pread(fd, FILE_HEAD.size, 0)):
            skipped -= FILE_HEAD.size
        for frame, payload in _frames_of(fd):
            body = _unpack(payload, frame.count)
            if body is None or frame.first_seq <= last_seq:
                continue
            slots += _upright(body, frame.count)
            last_seq = frame.last_seq
            lost += frame.lost
            torn += frame.torn
            skipped -= frame.end - frame.start
            if len(slots) > MOST_UNPACKED and len(slots) > MOST_TIMES * size:
                raise OSError(errno.EFBIG, f"its {size:,} bytes expand to more than {len(slots):,}", str(path))
    return SegmentSlots(slots=bytes(slots), last_seq=last_seq, lost=lost, torn=torn, skipped_bytes=skipped)


def _frames_of(fd: int) -> Iterator[tuple[_Frame, bytes]]:
    """Yield every complete frame of an open segment and its payload; other bytes and holes are skipped."""
    if not _is_segment(os.pread(fd, FILE_HEAD.size, 0)):
        return
    at = FILE_HEAD.size
    while data := os.pread(fd, _LARGEST_FRAME, at):
        end = 0
        for frame in _frames(data, 0):
            end = frame.end
            whole = replace(frame, start=at + frame.start, payload_start=at + frame.payload_start, end=at + frame.end)
            yield whole, data[frame.payload_start : frame.end]
        if end:
            at += end
        elif (after := data.find(FRAME_MAGIC, 1)) > 0:
            at += after
        else:
            at = after_hole(fd, at + max(1, len(data) - len(FRAME_MAGIC) + 1))


def parts_from(path: Path, offset: int, *, after_seq: int = 0, most_slots: int) -> tuple[list[SegmentPart], int]:
    """Return the complete frames from ``offset`` (0: the beginning) that contain slots after ``after_seq``.

    Stops once ``most_slots`` are found; also returns the offset to continue from.  Only new data is read: of earlier
    frames, just the heads.  A frame that is still being written is left for later; a missing file counts as empty.
    """
    try:
        file = open_file(path, buffering=0)
    except FileNotFoundError:
        return [], offset
    with file:
        fd = file.fileno()
        if offset < FILE_HEAD.size:
            if not _is_segment(os.pread(fd, FILE_HEAD.size, 0)):
                return [], offset
            offset = FILE_HEAD.size
        return _read_on(fd, _pass_by(fd, offset, after_seq), after_seq, most_slots)


def last_slots(path: Path, most: int) -> bytes:
    """Return the last slots of a segment, at most ``most``; of earlier frames, only the heads are read.

    A missing file counts as empty.
    """
    try:
        file = open_file(path, buffering=0)
    except FileNotFoundError:
        return b""
    with file:
        fd = file.fileno()
        if not _is_segment(os.pread(fd, FILE_HEAD.size, 0)):
            return b""
        frames: deque[tuple[int, int]] = deque([(FILE_HEAD.size, 0)])
        total = 0
        for offset, _, count, _ in _heads(fd, FILE_HEAD.size):
            frames.append((offset, count))
            total += count
            while total - frames[0][1] >= most:
                total -= frames.popleft()[1]
        offset, after_seq, slots = frames[0][0], 0, b""
        while True:  # if the heads end at damage, frames after it are read as well
            found, offset = _read_on(fd, offset, after_seq, FRAME_SLOTS)
            if not found:
                return slots
            after_seq = found[-1].last_seq
            slots = b"".join([slots, *(part.slots for part in found)])[-most * SLOT_BYTES :]


def _heads(fd: int, offset: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield begin, end, count and last_seq of each frame from ``offset`` up to the first invalid or incomplete one."""
    size = os.fstat(fd).st_size
    while offset + FRAME_HEAD.size <= size:
        magic, _, count, length, first_seq, last_seq, _, _ = FRAME_HEAD.unpack(os.pread(fd, FRAME_HEAD.size, offset))
        end = offset + FRAME_HEAD.size + length
        if magic != FRAME_MAGIC or first_seq > last_seq + 1 or end > size:
            return
        yield offset, end, count, last_seq
        offset = end


def _pass_by(fd: int, offset: int, after_seq: int) -> int:
    """Return the offset of the first frame, or future frame, with slots after ``after_seq``."""
    for _, end, _, last_seq in _heads(fd, offset):
        if last_seq > after_seq:
            break
        offset = end
    return offset


def _read_on(fd: int, offset: int, after_seq: int, most_slots: int) -> tuple[list[SegmentPart], int]:
    found: list[SegmentPart] = []
    slots = 0
    while slots < most_slots:
        data = os.pread(fd, _LARGEST_FRAME, offset)
        end = 0
        for frame in _frames(data, 0):
            body = _unpack(data[frame.payload_start : frame.end], frame.count)
            end = frame.end
            if body is None or frame.last_seq <= after_seq:
                continue
            found.append(
                SegmentPart(
                    first_seq=frame.first_seq,
                    last_seq=frame.last_seq,
                    lost=frame.lost,
                    torn=frame.torn,
                    slots=bytes(_upright(body, frame.count)),
                )
            )
            after_seq = frame.last_seq
            slots += frame.count
            if slots >= most_slots:
                break
        if not end:
            if len(data) < _LARGEST_FRAME:
                break  # the end, or a frame that is not complete yet
            # A complete frame would have fit: this is damage.
            after = data.find(FRAME_MAGIC, 1)
            if after < 0:
                offset = after_hole(fd, offset + len(data) - len(FRAME_MAGIC) + 1)
                continue
            end = after
        offset += end
    return found, offset


def _upright(body: bytes, count: int) -> bytearray:
    """Restore slots from their transposed bodies."""
    slots = bytearray(count * SLOT_BYTES)
    if count < _BODY_BYTES:  # loop over the smaller dimension: an overnight run has 100,000 frames of a few slots
        for slot in range(count):
            slots[slot * SLOT_BYTES + _ZERO_BYTES : (slot + 1) * SLOT_BYTES] = body[slot::count]
        return slots
    for i in range(_BODY_BYTES):
        slots[_ZERO_BYTES + i :: SLOT_BYTES] = body[i * count : (i + 1) * count]
    return slots


def _transposed(slots: Sequence[bytes]) -> bytes:
    """Transpose the bodies of slots: the first byte of each, the second byte of each …"""
    count = len(slots)
    if count < _BODY_BYTES:
        bodies = bytearray(count * _BODY_BYTES)
        for slot, data in enumerate(slots):
            bodies[slot::count] = data[_ZERO_BYTES:]
        return bytes(bodies)
    joined = b"".join([data[_ZERO_BYTES:] for data in slots])
    return b"".join([joined[i::_BODY_BYTES] for i in range(_BODY_BYTES)])


def _pack_frame(batch: RingBatch, *, first_seq: int) -> bytes:
    payload = zlib.compress(_transposed(batch.slots), 1)
    lost, torn = min(batch.lost, _U32_MAX), min(batch.torn, _U32_MAX)
    fields = (len(batch.slots), len(payload), first_seq, batch.last_seq, lost, torn)
    rest = FRAME_HEAD.pack(FRAME_MAGIC, 0, *fields)[_CRC_END:] + payload
    return FRAME_MAGIC + _CRC.pack(zlib.crc32(rest)) + rest


def _unpack(payload: bytes, count: int) -> bytes | None:
    """Return the transposed bodies; None if the checksum is right but the payload is not valid."""
    expected = count * _BODY_BYTES
    try:
        body = zlib.decompressobj().decompress(payload, expected + 1)
    except zlib.error:
        return None
    return body if len(body) == expected else None


def _is_segment(data: bytes) -> bool:
    return len(data) >= FILE_HEAD.size and FILE_HEAD.unpack_from(data)[:2] == (FILE_MAGIC, VERSION)


def _frames(data: bytes, at: int | None = None) -> Iterator[_Frame]:
    """Yield every complete frame of a segment, or of a piece of one from ``at``; bytes between frames are skipped."""
    if at is None:
        at = FILE_HEAD.size if _is_segment(data) else len(data)
    view = memoryview(data)
    while 0 <= at <= len(data) - FRAME_HEAD.size:
        magic, crc, count, length, first_seq, last_seq, lost, torn = FRAME_HEAD.unpack_from(data, at)
        payload_start = at + FRAME_HEAD.size
        end = payload_start + length
        whole = magic == FRAME_MAGIC and end <= len(data) and count <= FRAME_SLOTS and first_seq <= last_seq + 1
        if whole and zlib.crc32(view[at + _CRC_END : end]) == crc:
            yield _Frame(
                count=count,
                first_seq=first_seq,
                last_seq=last_seq,
                lost=lost,
                torn=torn,
                start=at,
                payload_start=payload_start,
                end=end,
            )
            at = end
        else:
            at = data.find(FRAME_MAGIC, at + 1)


# -- sidecar ----------------------------------------------------------------------------------------------------------
# ``steps/KEY.json``: the last known header of one ring, for when the ring is gone, and its step time.  The agent
# replaces it as a whole.  Standard library only.

SCHEMA = 1
_STATES = get_args(RankState)
_HEXADECIMAL = re.compile("[0-9a-f]{1,16}")


@dataclass(frozen=True, kw_only=True)
class RingSidecar:
    """One ring without its slots."""

    identity: RankIdentity
    pid: int
    start_ticks: int
    anchor_mono_ns: int
    anchor_wall_ns: int
    phase_names: tuple[str, ...]
    state: RankState
    live_phase: int
    live_since_ns: int
    live_step: int
    hook_failures: int
    heard_wall_ns: int = 0
    """When this was written."""
    ended_wall_ns: int | None = None
    """When the process was found gone; nothing is added to the segment after that."""
    usual_step_ns: int = 0
    """Median of its last steps, for lists of runs; 0: unknown."""
    facts: dict[str, Any] = field(default_factory=dict)
    groups: tuple[ProcessGroup, ...] = ()

    @property
    def key(self) -> str:
        return ring_key(self.identity.host, self.pid, self.anchor_wall_ns)

    @classmethod
    def from_dict(cls, raw: object) -> RingSidecar:
        """Parse and check every value: the file may come from an untrusted source.  ValueError if one is invalid."""
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError("not a sidecar")
        names = raw.get("phase_names")
        if not isinstance(names, list) or len(names) != PHASE_SLOTS or not all(isinstance(n, str) for n in names):
            raise ValueError("phase_names")
        if raw.get("state") not in _STATES:
            raise ValueError("state")
        ended = raw.get("ended_wall_ns")
        return cls(
            identity=RankIdentity.from_dict(raw.get("identity")),
            phase_names=tuple(names),
            state=raw["state"],
            live_phase=_word(raw, "live_phase") % PHASE_SLOTS,
            ended_wall_ns=None if ended is None else _word(raw, "ended_wall_ns"),
            usual_step_ns=_word({"usual_step_ns": 0, **raw}, "usual_step_ns"),
            facts=checked_facts(raw.get("facts")),
            groups=_groups(raw.get("groups")),
            **{name: _word(raw, name) for name in _WORDS},
        )

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "groups": groups_as_kept(self.groups)}


_WORDS = (
    "pid",
    "start_ticks",
    "anchor_mono_ns",
    "anchor_wall_ns",
    "live_since_ns",
    "live_step",
    "hook_failures",
    "heard_wall_ns",
)


def sidecar_of(header: RingHeader, *, heard_wall_ns: int = 0) -> RingSidecar:
    """Copy a live ring's header; the state is the process's own claim."""
    return RingSidecar(
        identity=header.identity,
        pid=header.pid,
        start_ticks=header.start_ticks,
        anchor_mono_ns=header.anchor_mono_ns,
        anchor_wall_ns=header.anchor_wall_ns,
        phase_names=header.phase_names,
        state=header.state.name.lower(),  # type: ignore[arg-type]  # RingState's names are RankStates
        live_phase=header.live_phase,
        live_since_ns=header.live_since_ns,
        live_step=header.live_step,
        hook_failures=header.hook_failures,
        heard_wall_ns=heard_wall_ns,
        facts=header.facts,
        groups=header.groups,
    )


def guess_sidecar(key: str) -> RingSidecar:
    """Return what a file's name reveals, for a segment whose sidecar cannot be read."""
    host, pid, anchor = (*key.split("-"), "", "")[:3]
    number = int(pid) if pid.isdecimal() else 0
    return RingSidecar(
        identity=RankIdentity(host=host, pid=number),
        pid=number,
        start_ticks=0,
        anchor_mono_ns=0,
        anchor_wall_ns=int(anchor, 16) if _HEXADECIMAL.fullmatch(anchor) else 0,
        phase_names=(*BUILTIN_PHASES, *[""] * (PHASE_SLOTS - len(BUILTIN_PHASES))),
        state="vanished",
        live_phase=0,
        live_since_ns=0,
        live_step=0,
        hook_failures=0,
    )


def write_sidecar(run_dir: Path, sidecar: RingSidecar) -> None:
    file_io.write_json(sidecar_path(run_dir, sidecar.key), sidecar.to_dict())


def read_sidecars(run_dir: Path) -> tuple[dict[str, RingSidecar], list[str]]:
    """Return all sidecars by key, and the names of those that cannot be read."""
    found: dict[str, RingSidecar] = {}
    bad: list[str] = []
    for path in sorted((run_dir / STEPS).glob(f"*{SIDECAR_SUFFIX}")):
        try:
            found[path.stem] = RingSidecar.from_dict(json.loads(read_document(path)))
        except (OSError, ValueError, RecursionError):
            bad.append(path.name)
    return found, bad


def groups_as_kept(groups: Sequence[ProcessGroup]) -> list[Any]:
    """Return the form that ``groups_from_json`` reads, without a size limit."""
    rows: list[Any] = json.loads(groups_to_json(groups, sys.maxsize))
    return rows


def _groups(raw: object) -> tuple[ProcessGroup, ...]:
    """Parse groups; missing or invalid ones are ignored, as with facts, so that the rank is not lost."""
    try:
        return groups_from_json(raw)
    except ValueError:
        return ()


def _word(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(name)
    return value

"""What a hub received: journals of frames, and the position of each sender in them.

``inbox/NNNNNN.frames`` holds the accepted frames in the order of arrival:

    0    8s   magic  b"STEPINBX"
    8    u32  version
    12   u32  zero
    16   ...  records, each:
         4s   magic  b"RCVD"
         u32  bytes      size of the frame
         u64  wall_ns    time of arrival, by this host's clock
         u32  crc32 of the three fields before …
         u32  … and of the frame
         ...  the frame (``wire/frames.py``)

One writer, the run's hub; any number of readers.  A record counts as soon as it is complete: readers skip what a kill
cut off, and the next writer truncates it.  When a journal is large enough, the next number follows, so that the old one
can be rewritten (``store/inbox/parts.py``) while the hub keeps receiving.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np

from stepscope.errors import FrameError, NotARun, StepscopeError
from stepscope.records.files import file_mode, open_file
from stepscope.records.steps import SLOT_BYTES
from stepscope.store import file_io
from stepscope.store.file_io import after_hole, read_document, write_all
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.paths import INBOX, POSITIONS, ring_key
from stepscope.wire.frames import (
    BLOCK_HEAD_BYTES,
    BODY_BYTES,
    FRAME_BYTES,
    TABLE_FIELDS,
    Frame,
    FrameHead,
    Part,
    RingRows,
    inflate_part,
    pack_block,
    part_of,
    read_block_head,
    read_frame,
    ring_id,
)
from stepscope.wire.handshake import Positions

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "JOURNAL_BYTES",
    "LIVE_FIELDS",
    "TABLE_DTYPE",
    "BlockRows",
    "Compared",
    "Gap",
    "JournalFrame",
    "JournalWriter",
    "Live",
    "SealedPositions",
    "Spool",
    "advance_journaled",
    "advance_spool",
    "compare",
    "heard_of",
    "journal_path",
    "journals",
    "journals_after",
    "live_of",
    "raw_sidecars_of",
    "read_journal",
    "read_positions",
    "recover",
    "repack_block",
    "sidecars_of",
    "unpack_block",
    "unsealed_bytes",
    "write_positions",
]


# -- journal ----------------------------------------------------------------------------------------------------------

FILE_HEAD = struct.Struct("<8sII")
FILE_MAGIC = b"STEPINBX"
VERSION = 1
RECORD_HEAD = struct.Struct("<4sIQII")
RECORD_MAGIC = b"RCVD"
JOURNAL_BYTES = 64 << 20
"""At this size the next journal begins; this bounds the memory for rewriting one."""
_NAME = re.compile(r"(\d{6,9})\.frames")
_BUFFER = 1 << 20
_RECORD_HEAD = struct.Struct("<4sIQ")
_SUMS = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True)
class JournalFrame:
    """One frame in a journal."""

    wall_ns: int
    raw: bytes
    end: int
    """Where the next record begins in the file."""


class JournalWriter:
    """Appends frames to one journal.  Truncates what a kill left incomplete."""

    def __init__(self, path: Path, end: int) -> None:
        """``end``: the end of the last complete record, 0 for a new file.  OSError if the file cannot be written."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, file_mode(path.parent))
        self.end = end

    def append(self, raw: bytes, *, wall_ns: int, durable: bool = False) -> None:
        """Append the whole frame, or nothing if the disk refuses (OSError); ``durable`` also survives a power loss."""
        prefix = _RECORD_HEAD.pack(RECORD_MAGIC, len(raw), wall_ns)
        first = b"" if self.end else FILE_HEAD.pack(FILE_MAGIC, VERSION, 0)
        data = b"".join([first, prefix, _SUMS.pack(zlib.crc32(prefix), zlib.crc32(raw)), raw])
        try:
            if os.fstat(self._fd).st_size != self.end:
                os.ftruncate(self._fd, self.end)
            write_all(self._fd, data, self.end)
            if durable:
                self.sync()
        except OSError:
            os.ftruncate(self._fd, self.end)
            raise
        self.end += len(data)

    def sync(self) -> None:
        """Make everything appended survive a power loss; OSError if the disk refuses."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def journal_path(run_dir: Path, number: int) -> Path:
    return run_dir / INBOX / f"{number:06d}.frames"


def journals(run_dir: Path, *, after: int) -> list[int]:
    """Return the numbers of the existing journals in order, without those up to ``after``, which are sealed."""
    try:
        names = [path.name for path in (run_dir / INBOX).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = (int(found[1]) for name in names if (found := _NAME.fullmatch(name)))
    return sorted(number for number in numbers if number > after)


def read_journal(path: Path, start: int = 0) -> Iterator[JournalFrame]:
    """Yield every complete record; bytes between records are skipped.

    ``start``: the ``end`` of the last known record.
    """
    with open_file(path, buffering=_BUFFER) as file:
        head = file.read(FILE_HEAD.size)
        if len(head) < FILE_HEAD.size or FILE_HEAD.unpack(head)[:2] != (FILE_MAGIC, VERSION):
            return
        at = max(start, FILE_HEAD.size)
        size = os.fstat(file.fileno()).st_size
        while at <= size - RECORD_HEAD.size:
            file.seek(at)
            head = file.read(RECORD_HEAD.size)
            magic, length, wall_ns, head_crc, crc = RECORD_HEAD.unpack(head)
            raw = b""
            if magic == RECORD_MAGIC and length <= FRAME_BYTES and zlib.crc32(head[: _RECORD_HEAD.size]) == head_crc:
                raw = file.read(length)
            end = at + RECORD_HEAD.size + length
            if raw and len(raw) == length and zlib.crc32(raw) == crc:
                yield JournalFrame(wall_ns=wall_ns, raw=raw, end=end)
                at = end
                continue
            at = _next_record(file, at + 1)


def _next_record(file: BinaryIO, at: int) -> int:
    """Return the position of the next mark of a record from ``at``, or the end of the file."""
    while True:
        file.seek(at)
        piece = file.read(_BUFFER)
        found = piece.find(RECORD_MAGIC)
        if found >= 0:
            return at + found
        if len(piece) < _BUFFER:
            return at + len(piece)
        at = after_hole(file.fileno(), at + len(piece) - len(RECORD_MAGIC) + 1)


# -- blocks of steps --------------------------------------------------------------------------------------------------
# The hub's form of the blocks in ``wire/frames.py``: arrays, converted back only if a block must be cut.  numpy unpacks
# them because the hub of a large job does this several hundred times per second.

TABLE_DTYPE = np.dtype(TABLE_FIELDS)
_FIRST = SLOT_BYTES - BODY_BYTES
_SEQ_AT = 8


@dataclass(frozen=True, kw_only=True)
class BlockRows:
    """The records of one block, ring by ring in the table's order."""

    table: NDArray[Any]
    """dtype ``TABLE_FIELDS``, one entry per ring: its current position, and how many of the rows belong to it."""
    slots: NDArray[Any]
    """uint8, one row of 256 bytes per record."""

    @property
    def rings(self) -> NDArray[Any]:
        """V16: the ``ring_id`` of each ring."""
        ids: NDArray[Any] = self.table["ring"]
        return ids

    @property
    def rows(self) -> NDArray[Any]:
        """The number of slots of each ring."""
        counts: NDArray[Any] = self.table["rows"]
        return counts

    @property
    def seqs(self) -> NDArray[Any]:
        """The sequence number of each slot."""
        words = np.ascontiguousarray(self.slots[:, _SEQ_AT : _SEQ_AT + 8])
        return words.view("<u8").reshape(-1)


def unpack_block(data: bytes | memoryview) -> BlockRows:
    """Unpack a block; FrameError unless it is a complete block of this version within the limits."""
    rings, rows = read_block_head(data)
    table_bytes = rings * TABLE_DTYPE.itemsize
    body = _inflate(data, table_bytes + rows * BODY_BYTES, whole=True)
    table = _table(body, rings, rows)
    slots = np.zeros((rows, SLOT_BYTES), np.uint8)
    slots[:, _FIRST:] = np.frombuffer(body, np.uint8, rows * BODY_BYTES, table_bytes).reshape(BODY_BYTES, rows).T
    return BlockRows(table=table, slots=slots)


def read_table(data: bytes | memoryview) -> NDArray[Any]:
    """Unpack only the table at the front, which is a fraction of the work.  FrameError as above."""
    rings, rows = read_block_head(data)
    return _table(_inflate(data, rings * TABLE_DTYPE.itemsize, whole=False), rings, rows)


def cut_block(taken: BlockRows, after: NDArray[Any], keep: NDArray[np.bool_]) -> BlockRows:
    """Return the slots ``after`` these sequence numbers (one per ring) of the rings to ``keep``."""
    whose = np.repeat(np.arange(len(taken.table)), taken.rows)
    chosen = keep[whose] & (taken.seqs > after[whose])
    table = taken.table.copy()
    table["rows"] = np.bincount(whose[chosen], minlength=len(table))
    table["after_seq"] = np.maximum(table["after_seq"], after)
    return BlockRows(table=table[keep], slots=taken.slots[chosen])


def repack_block(taken: BlockRows) -> bytes:
    """Pack a block as its sender would have."""
    parts, at = [], 0
    for entry in taken.table:
        slots = [row.tobytes() for row in taken.slots[at : at + int(entry["rows"])]]
        at += len(slots)
        numbers: dict[str, Any] = {name: int(entry[name]) for name in _NUMBERS}
        parts.append(RingRows(ring=entry["ring"].tobytes(), slots=slots, **numbers))
    return pack_block(parts)


_NUMBERS = ("after_seq", "last_seq", "live_step", "live_since_ns", "lost", "torn", "live_phase", "state")


def _inflate(data: bytes | memoryview, expected: int, *, whole: bool) -> bytes:
    from zlib_ng import zlib_ng

    damaged: Any = zlib_ng.error
    unpacker: Any = zlib_ng.decompressobj()
    try:
        body: bytes = unpacker.decompress(memoryview(data)[BLOCK_HEAD_BYTES:], max(expected, 1) + whole)
    except damaged as error:
        raise FrameError("a block cannot be decompressed") from error
    if whole and (len(body) != expected or not unpacker.eof or unpacker.unused_data):
        raise FrameError("a block does not have its declared length")
    if len(body) < expected:
        raise FrameError("a block does not have its declared length")
    return body


def _table(body: bytes, rings: int, rows: int) -> NDArray[Any]:
    table = np.empty(rings, TABLE_DTYPE)
    at = 0
    for name in TABLE_DTYPE.names or ():
        kind = TABLE_DTYPE[name]
        table[name] = np.frombuffer(body, kind, rings, at)
        at += rings * kind.itemsize
    if int(table["rows"].sum(dtype=np.uint64)) != rows or (table["after_seq"] > table["last_seq"]).any():
        raise FrameError("a block's table does not match its rows")
    return table


# -- positions in memory ----------------------------------------------------------------------------------------------
# How far the rings and files of each sender have been received.  ``compare`` checks a frame against this without
# changing anything: which parts are old, which are new, and which lie beyond the next expected data.  Once the new
# parts are on disk, ``advance_spool`` updates the positions.  They are in memory; the journals make them persistent.

Live = tuple[int, int, int, int, int]
"""Progress of a ring: last sequence number, start of its phase, state, step, phase.  Only grows."""
Heard = tuple[bool, int]
"""For a sidecar: whether its process is gone, and when it was written.  The greatest counts."""
LIVE_FIELDS = ("last_seq", "live_since_ns", "state", "live_step", "live_phase")
_NOWHERE: Live = (0, 0, 0, 0, 0)


RINGS = 1 << 14
"""Limit per sender; no real node has more."""
FILES = 1 << 14


class Gap(StepscopeError):
    """A frame begins beyond what the hub has: the sender must continue from ``positions``."""

    def __init__(self, positions: Positions) -> None:
        super().__init__("a frame skips data that was not received yet")
        self.positions = positions


@dataclass(slots=True)
class RingPosition:
    key: str
    heard: Heard
    live: Live = _NOWHERE
    number: int = -1
    """The number that its steps have in parts; -1: not assigned yet."""
    shown: tuple[int, int] | None = None
    """Attempt and rank under which its steps were sealed."""


@dataclass(slots=True)
class Spool:
    """One sender."""

    name: str
    rings: dict[bytes, RingPosition] = field(default_factory=dict)
    """By ``ring_id``."""
    files: dict[str, int] = field(default_factory=dict)
    """By name, the received bytes of lines and logs."""
    whole: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name, when a whole file was sent, by the sender's clock, and its crc32."""

    def positions(self) -> Positions:
        rings = {ring.key: ring.live[0] for ring in self.rings.values()}
        return Positions(rings=rings, files={**self.files, **{name: crc for name, (_, crc) in self.whole.items()}})


@dataclass(slots=True)
class Compared:
    """The result of comparing a frame with what was received before."""

    parts: list[Part] = field(default_factory=list)
    """The new parts, to be kept."""
    cut: bool = False
    """Whether parts of the frame were cut or left out."""
    old_parts: int = 0
    """Parts that had been received before, at least partly."""
    rings: list[RingSidecar] = field(default_factory=list)
    blocks: list[BlockRows] = field(default_factory=list)
    lines: dict[str, list[bytes]] = field(default_factory=dict)
    logs: list[tuple[str, int, bytes]] = field(default_factory=list)
    """Name, offset and bytes."""
    whole: list[tuple[str, bytes]] = field(default_factory=list)
    heard: dict[bytes, tuple[str, Heard]] = field(default_factory=dict)
    live: dict[bytes, Live] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)


def compare(spool: Spool, frame: Frame) -> Compared:
    """Compare without changing the spool; Gap if data in between is missing, FrameError if a part is invalid."""
    found = Compared()
    for part in frame.parts:
        if part.kind == "rings":
            rest = _rings(spool, found, part)
        elif part.kind == "steps":
            rest = _steps(spool, found, part)
        elif part.kind == "file":
            rest = _whole(spool, found, part, frame.head)
        else:
            rest = _stretch(spool, found, part)
        if rest is not part:
            found.cut = True
            found.old_parts += 1
        if rest is not None:
            found.parts.append(rest)
    if len(spool.files) + len(spool.whole) + len(found.files) + len(found.stamps) > FILES:
        raise FrameError("a node has too many files")
    return found


def advance_spool(spool: Spool, found: Compared) -> None:
    """Update the positions: the compared frame is now on disk."""
    for ident, (key, heard) in found.heard.items():
        ring = spool.rings.get(ident)
        if ring is None:
            spool.rings[ident] = RingPosition(key, heard)
        else:
            ring.heard = heard
    for ident, live in found.live.items():
        spool.rings[ident].live = live
    spool.files.update(found.files)
    spool.whole.update(found.stamps)


def advance_journaled(spool: Spool, frame: Frame, tables: Mapping[int, NDArray[Any]] | None = None) -> None:
    """Update the positions from a journaled frame.  Journals hold nothing twice: only its end matters.

    ``tables``: the tables of its blocks, by ``id`` of their parts, if the caller has unpacked them.
    """
    for part in frame.parts:
        if part.kind == "rings":
            for key, heard, _ in raw_sidecars_of(part):
                ring = spool.rings.setdefault(ring_id(key), RingPosition(key, heard))
                ring.heard = max(ring.heard, heard)
        elif part.kind == "steps":
            for ident, live in live_of(read_table(part.data) if tables is None else tables[id(part)]):
                if ident in spool.rings:
                    spool.rings[ident].live = max(spool.rings[ident].live, live)
        elif part.kind == "file":
            stamp = (frame.head.sent_wall_ns, zlib.crc32(inflate_part(part)))
            spool.whole[part.name] = max(stamp, spool.whole.get(part.name, stamp))
        else:
            spool.files[part.name] = max(part.offset + part.size, spool.files.get(part.name, 0))


@lru_cache(maxsize=1)
def sidecars_of(part: Part) -> tuple[RingSidecar, ...]:
    """Parse and check the rings; FrameError if one is invalid.  Cached: a frame is checked before it is accepted."""
    try:
        sidecars = msgspec.json.decode(inflate_part(part))
        if not isinstance(sidecars, list):
            raise FrameError("rings are not a list")
        return tuple(RingSidecar.from_dict(raw) for raw in sidecars)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FrameError("a ring's identity cannot be read") from error


def raw_sidecars_of(part: Part) -> list[tuple[str, Heard, dict[str, Any]]]:
    """Parse rings that were checked when they arrived: key, time heard, and the raw sidecar."""
    try:
        return [
            (
                ring_key(raw["identity"]["host"], raw["pid"], raw["anchor_wall_ns"]),
                (raw["ended_wall_ns"] is not None, raw["heard_wall_ns"]),
                raw,
            )
            for raw in msgspec.json.decode(inflate_part(part))
        ]
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError) as error:
        raise FrameError("a ring's identity cannot be read") from error


def _rings(spool: Spool, found: Compared, part: Part) -> Part | None:
    new = False
    for about in sidecars_of(part):
        ident, heard = ring_id(about.key), heard_of(about)
        known = found.heard[ident][1] if ident in found.heard else None
        if known is None and ident in spool.rings:
            known = spool.rings[ident].heard
        if known is None or heard > known:
            found.heard[ident] = (about.key, heard)
            found.rings.append(about)
            new = True
    if len(spool.rings) + len(found.heard) > RINGS:
        raise FrameError("a node has too many rings")
    return part if new else None


def _steps(spool: Spool, found: Compared, part: Part) -> Part | None:
    taken = unpack_block(part.data)
    after: list[int] = []
    keep: list[bool] = []
    whole = True
    columns = (taken.table[name].tolist() for name in ("after_seq", "rows", "lost", "torn"))
    for (ident, live), begin, rows, lost, torn in zip(live_of(taken.table), *columns, strict=True):
        have = found.live.get(ident)
        if have is None:
            ring = spool.rings.get(ident)
            if ring is None and ident not in found.heard:
                raise Gap(spool.positions())
            have = ring.live if ring is not None else _NOWHERE
        if begin > have[0]:
            raise Gap(spool.positions())
        new = live > have if begin == have[0] or not rows else live[0] > have[0]
        if new and begin < have[0]:
            if lost or torn:
                raise Gap(spool.positions())  # only the sender knows how many of the lost records we already have
            whole = False
        if new:
            found.live[ident] = live
        after.append(have[0])
        keep.append(new)
    if not all(keep):
        whole = False
    if whole:
        found.blocks.append(taken)
        return part
    if not any(keep):
        return None
    taken = cut_block(taken, np.array(after, np.uint64), np.array(keep))
    found.blocks.append(taken)
    return part_of("steps", repack_block(taken))


def _stretch(spool: Spool, found: Compared, part: Part) -> Part | None:
    """Compare lines, or bytes of a log."""
    have = found.files.get(part.name, spool.files.get(part.name, 0))
    if part.offset > have:
        raise Gap(spool.positions())
    if part.offset + part.size <= have:
        return None
    raw = inflate_part(part)
    if part.kind == "lines" and not raw.endswith(b"\n"):
        raise FrameError("lines are cut off")
    rest = part
    if part.offset < have:
        raw = raw[have - part.offset :]
        rest = part_of(part.kind, raw, name=part.name, offset=have)
    found.files[part.name] = have + len(raw)
    if part.kind == "lines":
        found.lines.setdefault(part.name, []).extend(raw[:-1].split(b"\n"))
    else:
        found.logs.append((part.name, have, raw))
    return rest


def _whole(spool: Spool, found: Compared, part: Part, head: FrameHead) -> Part | None:
    """Compare a whole file; the one that was sent last counts, even if it arrives first."""
    raw = inflate_part(part)
    stamp = (head.sent_wall_ns, zlib.crc32(raw))
    have = found.stamps.get(part.name) or spool.whole.get(part.name)
    if have is not None and (stamp[0] < have[0] or stamp[1] == have[1]):
        return None
    found.stamps[part.name] = stamp
    found.whole.append((part.name, raw))
    return part


def heard_of(about: RingSidecar) -> Heard:
    """Return what decides which of two sidecars of a ring counts."""
    return about.ended_wall_ns is not None, about.heard_wall_ns


def live_of(table: NDArray[Any]) -> list[tuple[bytes, Live]]:
    """Return the progress of each ring of a block, by ``ring_id``."""
    ids = table["ring"].tobytes()
    size = table.dtype["ring"].itemsize
    numbers = zip(*(table[name].tolist() for name in LIVE_FIELDS), strict=True)
    return [(ids[i * size : (i + 1) * size], live) for i, live in enumerate(numbers)]


# -- positions.json ---------------------------------------------------------------------------------------------------
# How far each sender came in the sealed journals, so that those can be removed.  Journals up to number ``through`` are
# only in parts or in the sealed files of the run: replacing this file is what makes a part count
# (``store/inbox/parts.py``).  Data that a sender repeats after that is still recognized.

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class SealedPositions:
    through: int = 0
    """Number of the last journal that is sealed."""
    base: int = 0
    """Journals up to this one are in the sealed files of the run; later ones are in parts."""
    steps: int = 0
    """Steps of all rings in parts."""
    spools: dict[str, Spool] = field(default_factory=dict)

    @property
    def parts(self) -> range:
        """Numbers of the parts that count."""
        return range(self.base + 1, self.through + 1)


def read_positions(run_dir: Path) -> SealedPositions:
    """Read ``positions.json``; nothing is sealed without it.  NotARun if it is damaged: it decides what counts."""
    path = run_dir / POSITIONS
    try:
        raw = msgspec.json.decode(read_document(path))
        if raw["schema"] != SCHEMA:
            raise NotARun(f"{path} has schema {raw['schema']}; this Stepscope reads schema {SCHEMA}")
        spools = {name: _spool(name, fields) for name, fields in raw["spools"].items()}
        numbers = {name: int(raw[name]) for name in ("through", "base", "steps")}
        return SealedPositions(**numbers, spools=spools)
    except FileNotFoundError:
        return SealedPositions()
    except (OSError, msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotARun(f"{path} is damaged") from error


def write_positions(folder: Path, sealed: SealedPositions) -> None:
    """Write durably; OSError if the disk is full."""
    spools = {name: _spool_row(spool) for name, spool in sealed.spools.items()}
    numbers = {name: getattr(sealed, name) for name in ("through", "base", "steps")}
    value = {"schema": SCHEMA, **numbers, "spools": spools}
    file_io.write_bytes(folder / POSITIONS, (json.dumps(value, separators=(",", ":")) + "\n").encode(), durable=True)


def _spool_row(spool: Spool) -> dict[str, Any]:
    rings = {ring.key: [*ring.live, *ring.heard, ring.number, *(ring.shown or ())] for ring in spool.rings.values()}
    return {"rings": rings, "files": spool.files, "whole": spool.whole}


def _spool(name: str, fields: Mapping[str, Any]) -> Spool:
    spool = Spool(name)
    for key, (seq, since, state, step, phase, ended, heard, number, *shown) in fields["rings"].items():
        live = (int(seq), int(since), int(state), int(step), int(phase))
        position = RingPosition(key, (bool(ended), int(heard)), live, int(number))
        if shown:
            position.shown = (int(shown[0]), int(shown[1]))
        spool.rings[ring_id(key)] = position
    spool.files.update({str(file): int(at) for file, at in fields["files"].items()})
    spool.whole.update({str(file): (int(sent), int(crc)) for file, (sent, crc) in fields["whole"].items()})
    return spool


# -- recovery ---------------------------------------------------------------------------------------------------------
# The senders' positions, derived from what is on disk: the sealed positions, then the journals after them.

_TRIES = 20


@dataclass(frozen=True, kw_only=True)
class Recovered:
    sealed: SealedPositions
    spools: dict[str, Spool]
    last: int
    """Number of the journal to continue …"""
    end: int
    """… and the end of its last complete record."""


def recover(run_dir: Path, heard: Callable[[FrameHead, int], None] = lambda head, wall_ns: None) -> Recovered:
    """Recover the positions; ``heard`` is called with every journaled frame and its time of arrival."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # a helper of a killed hub sealed a journal in the meantime
            return _recover(run_dir, heard)
    return _recover(run_dir, heard)


def journals_after(run_dir: Path, sealed: SealedPositions) -> list[int]:
    """Return the journals after the sealed ones.  FileNotFoundError if another was sealed and removed meanwhile.

    Without that check, a journal that just became a part would be in neither.
    """
    numbers = journals(run_dir, after=sealed.through)
    if read_positions(run_dir).through != sealed.through:
        raise FileNotFoundError(f"a journal of {run_dir} was sealed meanwhile")
    return numbers


def _recover(run_dir: Path, heard: Callable[[FrameHead, int], None]) -> Recovered:
    sealed = read_positions(run_dir)
    spools = dict(sealed.spools)
    last, end = sealed.through + 1, 0
    for last in journals_after(run_dir, sealed):
        end = 0
        for received in read_journal(journal_path(run_dir, last)):
            end = received.end
            try:
                frame = read_frame(received.raw)
                advance_journaled(spools.setdefault(frame.head.spool, Spool(frame.head.spool)), frame)
            except FrameError:
                continue  # another version; it is kept for a reader that understands it
            heard(frame.head, received.wall_ns)
    return Recovered(sealed=sealed, spools=spools, last=last, end=end)


def unsealed_bytes(run_dir: Path) -> int:
    """Return the size of what other nodes sent and is not in a sealed file yet."""
    numbers = journals(run_dir, after=read_positions(run_dir).through)
    return sum(journal_path(run_dir, number).stat().st_size for number in numbers)

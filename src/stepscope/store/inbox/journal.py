"""What a hub received: journals of frames, and how far each sender came in them.

``inbox/NNNNNN.frames``: the frames that a hub accepted, one after the other, as they came.  Writer and reader.

    0    8s   magic  b"STEPINBX"
    8    u32  version
    12   u32  zero
    16   ...  records, each:
         4s   magic  b"RCVD"
         u32  bytes      of the frame
         u64  wall_ns    when it came, by this host's clock
         u32  crc32 of the three before it …
         u32  … and of the frame
         ...  the frame (``wire/frames.py``)

One writer, the run's hub; any number of readers.  A record counts as soon as it is whole: what a kill cut off is passed
by readers and cut away by the next writer.  A journal that is large enough is followed by the next number, so that the
old one can be rewritten (``store/inbox/parts.py``) while the hub goes on.
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
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.errors import FrameError, NotARun, StepscopeError
from stepscope.records.files import file_mode
from stepscope.records.steps import SLOT_BYTES
from stepscope.store import file_io
from stepscope.store.file_io import open_file, read_document, write_all
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.paths import INBOX, POSITIONS, ring_key
from stepscope.wire.frames import (
    BLOCK_HEAD_BYTES,
    BODY_BYTES,
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
    "advance_journalled",
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
"""From this size on the next journal is begun: what rewriting one takes in memory is bounded by it."""
_NAME = re.compile(r"(\d{6,9})\.frames")
_BUFFER = 1 << 20
_SAID = struct.Struct("<4sIQ")
_SUMS = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True)
class JournalFrame:
    """One frame in a journal."""

    wall_ns: int
    raw: bytes
    end: int
    """Where in the file the next one begins."""


class JournalWriter:
    """Append frames to one journal.  Cuts off what a kill left unfinished."""

    def __init__(self, path: Path, end: int) -> None:
        """``end``: of the last whole record, 0 for a new file.  OSError when it cannot be written."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, file_mode(path.parent))
        self.end = end

    def append(self, raw: bytes, *, wall_ns: int, durable: bool = False) -> None:
        """All of it or, when the disk refuses (OSError), nothing; ``durable`` also survives the loss of power."""
        said = _SAID.pack(RECORD_MAGIC, len(raw), wall_ns)
        first = b"" if self.end else FILE_HEAD.pack(FILE_MAGIC, VERSION, 0)
        data = b"".join([first, said, _SUMS.pack(zlib.crc32(said), zlib.crc32(raw)), raw])
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
        """All that was appended survives the loss of power; OSError when the disk refuses."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def journal_path(run_dir: Path, number: int) -> Path:
    return run_dir / INBOX / f"{number:06d}.frames"


def journals(run_dir: Path, *, after: int) -> list[int]:
    """The numbers of those that are there, in order, but for those up to ``after``, which are sealed."""
    try:
        names = [path.name for path in (run_dir / INBOX).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = (int(found[1]) for name in names if (found := _NAME.fullmatch(name)))
    return sorted(number for number in numbers if number > after)


def read_journal(path: Path, start: int = 0) -> Iterator[JournalFrame]:
    """Every whole record, one at a time; what lies between two of them is passed.

    ``start``: the ``end`` of the last one that is known.
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
            if magic == RECORD_MAGIC and zlib.crc32(head[: _SAID.size]) == head_crc:
                raw = file.read(length)
            end = at + RECORD_HEAD.size + length
            if raw and len(raw) == length and zlib.crc32(raw) == crc:
                yield JournalFrame(wall_ns=wall_ns, raw=raw, end=end)
                at = end
                continue
            file.seek(at + 1)
            after = file.read().find(RECORD_MAGIC)
            at = size if after < 0 else at + 1 + after


# -- positions --------------------------------------------------------------------------------------------------------
# How far each sender came: compared with each frame, kept in positions.json, recovered from the journals.
#
# What the hub has of each sender: how far its rings and files have come.  In memory; the journal is what remembers.
#
# A frame is first compared with this (``compare``), without changing anything: what of it is old, what is new, what is
# beyond the next thing to come.  Once the new parts are on disk, ``take`` moves the positions on.

# -- taken ------------------------------------------------------------------------------------------------------------
# Blocks of steps as arrays: what the hub makes of the bytes of ``wire/frames.py``, and back where one must be cut.
#
# The same layout as there, unpacked with numpy: a hub of a large job does this some hundred times a second.

TABLE_DTYPE = np.dtype(TABLE_FIELDS)
_FIRST = SLOT_BYTES - BODY_BYTES
_SEQ_AT = 8


@dataclass(frozen=True, kw_only=True)
class BlockRows:
    """The records of one block, ring by ring in the table's order."""

    table: NDArray[Any]
    """dtype ``TABLE_FIELDS``, an entry per ring: where it is now, and how many of the rows are its own."""
    slots: NDArray[Any]
    """uint8, one row of 256 bytes per record."""

    @property
    def rings(self) -> NDArray[Any]:
        """V16: the ``ring_id`` of each."""
        ids: NDArray[Any] = self.table["ring"]
        return ids

    @property
    def rows(self) -> NDArray[Any]:
        """How many of the slots belong to each ring."""
        counts: NDArray[Any] = self.table["rows"]
        return counts

    @property
    def seqs(self) -> NDArray[Any]:
        """Of each slot."""
        words = np.ascontiguousarray(self.slots[:, _SEQ_AT : _SEQ_AT + 8])
        return words.view("<u8").reshape(-1)


def unpack_block(data: bytes | memoryview) -> BlockRows:
    """FrameError for anything but a whole block of this version within the limits."""
    rings, rows = read_block_head(data)
    table_bytes = rings * TABLE_DTYPE.itemsize
    body = _inflate(data, table_bytes + rows * BODY_BYTES, whole=True)
    table = _table(body, rings, rows)
    slots = np.zeros((rows, SLOT_BYTES), np.uint8)
    slots[:, _FIRST:] = np.frombuffer(body, np.uint8, rows * BODY_BYTES, table_bytes).reshape(BODY_BYTES, rows).T
    return BlockRows(table=table, slots=slots)


def read_table(data: bytes | memoryview) -> NDArray[Any]:
    """Only who is in a block and how far, which stands first: a fraction of the work.  FrameError as above."""
    rings, rows = read_block_head(data)
    return _table(_inflate(data, rings * TABLE_DTYPE.itemsize, whole=False), rings, rows)


def cut_block(taken: BlockRows, after: NDArray[Any], keep: NDArray[np.bool_]) -> BlockRows:
    """Of the rings to ``keep`` what comes ``after`` these sequence numbers (one per ring)."""
    whose = np.repeat(np.arange(len(taken.table)), taken.rows)
    chosen = keep[whose] & (taken.seqs > after[whose])
    table = taken.table.copy()
    table["rows"] = np.bincount(whose[chosen], minlength=len(table))
    table["after_seq"] = np.maximum(table["after_seq"], after)
    return BlockRows(table=table[keep], slots=taken.slots[chosen])


def repack_block(taken: BlockRows) -> bytes:
    """As it would have come."""
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
        raise FrameError("a block cannot be unpacked") from error
    if whole and (len(body) != expected or not unpacker.eof or unpacker.unused_data):
        raise FrameError("a block is not as long as it says")
    if len(body) < expected:
        raise FrameError("a block is not as long as it says")
    return body


def _table(body: bytes, rings: int, rows: int) -> NDArray[Any]:
    table = np.empty(rings, TABLE_DTYPE)
    at = 0
    for name in TABLE_DTYPE.names or ():
        kind = TABLE_DTYPE[name]
        table[name] = np.frombuffer(body, kind, rings, at)
        at += rings * kind.itemsize
    if int(table["rows"].sum(dtype=np.uint64)) != rows or (table["after_seq"] > table["last_seq"]).any():
        raise FrameError("a block's table does not fit its rows")
    return table


# -- spools -----------------------------------------------------------------------------------------------------------

Live = tuple[int, int, int, int, int]
"""How far a ring is: its last sequence number, since when it is in its phase, its state, step, phase.  Only grows."""
Heard = tuple[bool, int]
"""Of a sidecar: whether its process is gone, and when it was written.  The greatest counts."""
LIVE_FIELDS = ("last_seq", "live_since_ns", "state", "live_step", "live_phase")
_NOWHERE: Live = (0, 0, 0, 0, 0)


RINGS = 1 << 14
"""Of one sender; more is no node."""
FILES = 1 << 14


class Gap(StepscopeError):
    """A frame begins beyond what the hub has: the sender goes on from ``positions``."""

    def __init__(self, positions: Positions) -> None:
        super().__init__("a frame begins beyond what was received so far")
        self.positions = positions


@dataclass(slots=True)
class RingPosition:
    key: str
    heard: Heard
    live: Live = _NOWHERE
    number: int = -1
    """What its steps are kept under in parts; -1: there are none yet."""
    shown: tuple[int, int] | None = None
    """Attempt and rank under which its steps were sealed."""


@dataclass(slots=True)
class Spool:
    """One sender."""

    name: str
    rings: dict[bytes, RingPosition] = field(default_factory=dict)
    """By ``ring_id``."""
    files: dict[str, int] = field(default_factory=dict)
    """By name, the bytes of lines and logs."""
    whole: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name, when a whole file was sent, by the sender's clock, and its crc32."""

    def positions(self) -> Positions:
        rings = {ring.key: ring.live[0] for ring in self.rings.values()}
        return Positions(rings=rings, files={**self.files, **{name: crc for name, (_, crc) in self.whole.items()}})


@dataclass(slots=True)
class Compared:
    """A frame against what was there before it."""

    parts: list[Part] = field(default_factory=list)
    """What of it is new, to be kept."""
    cut: bool = False
    """Whether these are not all of the frame's."""
    old_parts: int = 0
    """Parts that were there already, at least in part."""
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
    """Gap when something between is missing, FrameError when a part is none; the spool stays as it is."""
    found = Compared()
    for part in frame.parts:
        if part.kind == "rings":
            kept = _rings(spool, found, part)
        elif part.kind == "steps":
            kept = _steps(spool, found, part)
        elif part.kind == "file":
            kept = _whole(spool, found, part, frame.head)
        else:
            kept = _stretch(spool, found, part)
        if kept is not part:
            found.cut = True
            found.old_parts += 1
        if kept is not None:
            found.parts.append(kept)
    if len(spool.files) + len(spool.whole) + len(found.files) + len(found.stamps) > FILES:
        raise FrameError("a node with more files than a node can have")
    return found


def advance_spool(spool: Spool, found: Compared) -> None:
    """Now it is there."""
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


def advance_journalled(spool: Spool, frame: Frame, tables: Mapping[int, NDArray[Any]] | None = None) -> None:
    """A frame out of the journal, which holds nothing twice: only how far it reaches is looked at.

    ``tables``: of its blocks, by ``id`` of their parts, from those who unpacked them anyway.
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
    """FrameError when one of them is none.  The last answer is kept: those who check a frame ask before it is taken."""
    try:
        said = msgspec.json.decode(inflate_part(part))
        if not isinstance(said, list):
            raise FrameError("rings are no list")
        return tuple(RingSidecar.from_dict(raw) for raw in said)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FrameError("who a ring is cannot be read") from error


def raw_sidecars_of(part: Part) -> list[tuple[str, Heard, dict[str, Any]]]:
    """Rings that were checked when they came: the key, when it was heard of, and the rest as it stands there."""
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
        raise FrameError("who a ring is cannot be read") from error


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
        raise FrameError("a node with more rings than a node can have")
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
                raise Gap(spool.positions())  # how much of what was lost is in what we have, only the sender knows
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
    """Lines, or bytes of a log."""
    have = found.files.get(part.name, spool.files.get(part.name, 0))
    if part.offset > have:
        raise Gap(spool.positions())
    if part.offset + part.size <= have:
        return None
    raw = inflate_part(part)
    if part.kind == "lines" and not raw.endswith(b"\n"):
        raise FrameError("lines are cut off")
    kept = part
    if part.offset < have:
        raw = raw[have - part.offset :]
        kept = part_of(part.kind, raw, name=part.name, offset=have)
    found.files[part.name] = have + len(raw)
    if part.kind == "lines":
        found.lines.setdefault(part.name, []).extend(raw[:-1].split(b"\n"))
    else:
        found.logs.append((part.name, have, raw))
    return kept


def _whole(spool: Spool, found: Compared, part: Part, head: FrameHead) -> Part | None:
    """What was sent last counts, even if it comes first."""
    raw = inflate_part(part)
    stamp = (head.sent_wall_ns, zlib.crc32(raw))
    have = found.stamps.get(part.name) or spool.whole.get(part.name)
    if have is not None and (stamp[0] < have[0] or stamp[1] == have[1]):
        return None
    found.stamps[part.name] = stamp
    found.whole.append((part.name, raw))
    return part


def heard_of(about: RingSidecar) -> Heard:
    """To tell which of two sidecars of a ring counts."""
    return about.ended_wall_ns is not None, about.heard_wall_ns


def live_of(table: NDArray[Any]) -> list[tuple[bytes, Live]]:
    """How far each ring of a block is, by its ``ring_id``."""
    ids = table["ring"].tobytes()
    size = table.dtype["ring"].itemsize
    numbers = zip(*(table[name].tolist() for name in LIVE_FIELDS), strict=True)
    return [(ids[i * size : (i + 1) * size], live) for i, live in enumerate(numbers)]


# -- positions --------------------------------------------------------------------------------------------------------
# ``positions.json``: how far each sender came in the journals that are sealed, so that these can go.
#
# Journals up to number ``through`` are in parts or in the sealed files of the run, and nowhere else: replacing this
# file is what makes a part count (``store/inbox/parts.py``).  What a sender sends again after that is still
# recognised.

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class SealedPositions:
    through: int = 0
    """Number of the last journal that is sealed."""
    base: int = 0
    """Those up to this one are in the sealed files of the run; those after it in parts."""
    steps: int = 0
    """In parts: steps of all their rings."""
    spools: dict[str, Spool] = field(default_factory=dict)

    @property
    def parts(self) -> range:
        """Numbers of the parts that count."""
        return range(self.base + 1, self.through + 1)


def read_positions(run_dir: Path) -> SealedPositions:
    """Nothing sealed where there is no such file; NotARun when it is damaged: what it says decides what counts."""
    path = run_dir / POSITIONS
    try:
        raw = msgspec.json.decode(read_document(path))
        if raw["schema"] != SCHEMA:
            raise NotARun(f"{path} has schema {raw['schema']}; this Stepscope reads schema {SCHEMA}")
        spools = {name: _spool(name, said) for name, said in raw["spools"].items()}
        numbers = {name: int(raw[name]) for name in ("through", "base", "steps")}
        return SealedPositions(**numbers, spools=spools)
    except FileNotFoundError:
        return SealedPositions()
    except (OSError, msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotARun(f"{path} is damaged") from error


def write_positions(folder: Path, sealed: SealedPositions) -> None:
    """On disk when this returns; OSError when there is no room."""
    spools = {name: _told(spool) for name, spool in sealed.spools.items()}
    numbers = {name: getattr(sealed, name) for name in ("through", "base", "steps")}
    value = {"schema": SCHEMA, **numbers, "spools": spools}
    file_io.write_bytes(folder / POSITIONS, (json.dumps(value, separators=(",", ":")) + "\n").encode(), durable=True)


def _told(spool: Spool) -> dict[str, Any]:
    rings = {ring.key: [*ring.live, *ring.heard, ring.number, *(ring.shown or ())] for ring in spool.rings.values()}
    return {"rings": rings, "files": spool.files, "whole": spool.whole}


def _spool(name: str, said: Mapping[str, Any]) -> Spool:
    spool = Spool(name)
    for key, (seq, since, state, step, phase, ended, heard, number, *shown) in said["rings"].items():
        live = (int(seq), int(since), int(state), int(step), int(phase))
        position = RingPosition(key, (bool(ended), int(heard)), live, int(number))
        if shown:
            position.shown = (int(shown[0]), int(shown[1]))
        spool.rings[ring_id(key)] = position
    spool.files.update({str(file): int(at) for file, at in said["files"].items()})
    spool.whole.update({str(file): (int(sent), int(crc)) for file, (sent, crc) in said["whole"].items()})
    return spool


# -- recovery ---------------------------------------------------------------------------------------------------------
# How far the senders of a run came, worked out from what is on disk: what is sealed, then the journals after it.

_TRIES = 20


@dataclass(frozen=True, kw_only=True)
class Recovered:
    sealed: SealedPositions
    spools: dict[str, Spool]
    last: int
    """Number of the journal to go on with …"""
    end: int
    """… and where its last whole record ends."""


def recover(run_dir: Path, heard: Callable[[FrameHead, int], None] = lambda head, wall_ns: None) -> Recovered:
    """``heard`` is told of every frame in the journals, and when it came."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # a helper of a hub that was killed made a part of it meanwhile
            return _recover(run_dir, heard)
    return _recover(run_dir, heard)


def journals_after(run_dir: Path, sealed: SealedPositions) -> list[int]:
    """The journals behind what is sealed.  FileNotFoundError when one more was sealed, and removed, meanwhile.

    Without that look a journal that just became a part would be in neither.
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
                advance_journalled(spools.setdefault(frame.head.spool, Spool(frame.head.spool)), frame)
            except FrameError:
                continue  # of another version; it stays for whoever can read it
            heard(frame.head, received.wall_ns)
    return Recovered(sealed=sealed, spools=spools, last=last, end=end)


def unsealed_bytes(run_dir: Path) -> int:
    """What other nodes sent and is in no sealed file yet."""
    numbers = journals(run_dir, after=read_positions(run_dir).through)
    return sum(journal_path(run_dir, number).stat().st_size for number in numbers)

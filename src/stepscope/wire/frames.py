"""The frame that an agent sends: header, parts, blocks of steps, and the size limits.

A frame holds everything that a node sends at one time, in parts. It is one POST on the network and one record in the
hub's inbox.

    0    4s   magic  b"STFR"
    4    u16  version
    6    u16  zero
    8    u32  crc32 of everything after it
    12   u32  bytes of the header
    16   ...  header: JSON, see ``FrameHead``
         ...  the parts' payloads, one after the other

Parts, by kind:

    rings    zlib of a JSON list of sidecars (``steps/KEY.json``), which identify the rings; sent before the first block
             of a ring, and again after a change
    steps    a block (see "Blocks" below)
    lines    zlib of whole lines of a file such as ``events.jsonl`` (``LINE_FILES``), starting at ``offset``
    log      zlib of bytes of ``logs/NAME.log`` or of a capture's trace, starting at ``offset``
    file     zlib of a whole small file: ``errors/*.json``, ``hangs/*``, ``flight/*.json``

Every part carries its position (a sequence number, an offset, a name). A frame that arrives twice therefore changes
nothing, and the hub answers one that arrives too early with the position to start from.

Why zlib and not zstd: every Python has it, and decompression is a tenth of the cost of a frame. Pieces of files are
sent, not messages: the receiver says where to continue, so there is no queue, cursor or acknowledgment to lose.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from stepscope.errors import FrameError
from stepscope.records.steps import SLOT_BYTES

__all__ = [
    "BLOCK_HEAD_BYTES",
    "BLOCK_MAGIC",
    "BLOCK_RINGS",
    "BODY_BYTES",
    "FILE_BYTES",
    "FRAME_BYTES",
    "HEAD_BYTES",
    "HELLO_BYTES",
    "JOIN_BYTES",
    "LINES_BYTES",
    "LINE_FILES",
    "PARTS",
    "TABLE_FIELDS",
    "Frame",
    "FrameHead",
    "Part",
    "PartKind",
    "RingRows",
    "inflate_part",
    "may_be_named",
    "pack_block",
    "pack_frame",
    "part_of",
    "read_block",
    "read_block_head",
    "read_frame",
    "ring_id",
    "rows_of",
]


# -- Limits -----------------------------------------------------------------------------------------------------------
# Size limits for network data. Both sides respect them; the hub enforces them.

FRAME_BYTES = 8 << 20
"""Limit for one frame as sent."""
INFLATED_BYTES = 64 << 20
"""Limit for all contents of one frame, unpacked."""
HEAD_BYTES = 256 << 10
"""Limit for a frame's header."""
PARTS = 512
"""Maximum number of parts in one frame."""
BLOCK_ROWS = 65_536
BLOCK_RINGS = 4096
LINES_BYTES = 4 << 20
"""Limit for the lines in one part, unpacked. Longer lines are not sent."""
FILE_BYTES = 8 << 20
"""Limit for a file that is sent whole, unpacked."""
HELLO_BYTES = 1 << 10
"""Limit for a hello and for its answer."""
JOIN_BYTES = 64 << 10
"""Limit for a join request."""


# -- Frames -----------------------------------------------------------------------------------------------------------

FRAME_MAGIC = b"STFR"
FRAME_VERSION = 1
FRAME_PREFIX = struct.Struct("<4sHHII")
_CRC_END = 12

PartKind = Literal["rings", "steps", "lines", "log", "file"]
LINE_FILES = ("events.jsonl", "samples.jsonl", "stacks.jsonl", "layers.jsonl")
_NAMES = {
    "lines": re.compile("|".join(re.escape(name) for name in LINE_FILES)),
    "log": re.compile(
        r"logs/[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.log"
        r"|captures/[A-Za-z0-9][A-Za-z0-9-]{0,63}/rank-\d{1,6}\.pt\.trace\.json\.gz"
    ),
    "file": re.compile(r"(?:errors|hangs|flight)/[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.(?:json|txt)"),
}
_MOST = {"rings": LINES_BYTES, "lines": LINES_BYTES, "log": LINES_BYTES, "file": FILE_BYTES, "steps": INFLATED_BYTES}
_SPOOL = re.compile(r"[0-9a-f]{16,64}")
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Part:
    kind: PartKind
    data: bytes
    """The payload as sent."""
    size: int
    """Bytes when unpacked. Blocks count as sent."""
    name: str = ""
    """File name in the sender's run directory. Empty for rings and steps."""
    offset: int = 0
    """Position in that file, for lines and logs."""


@dataclass(frozen=True, kw_only=True)
class FrameHead:
    node: int
    """Node number that the launcher was given."""
    spool: str
    """Random name that the sender's run directory got when it was created. Offsets refer to this directory."""
    sent_wall_ns: int
    """Time on the sender's clock."""
    offset_ns: int | None = None
    """How far the sender's clock is ahead of the hub's, according to the round trips so far."""
    rtt_ns: int | None = None
    """The round trip that gave ``offset_ns``. Half of it is the error bound."""
    bye: Mapping[str, Any] | None = None
    """In a node's last frame, how its share of the job ended: ``{"exit_code": 0, "status": "finished"}``."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    head: FrameHead
    parts: tuple[Part, ...]


def part_of(kind: PartKind, raw: bytes, *, name: str = "", offset: int = 0) -> Part:
    """Build a part and compress it. Blocks are compressed already."""
    data = raw if kind == "steps" else zlib.compress(raw, 1)
    return Part(kind=kind, data=data, size=len(raw), name=name, offset=offset)


def may_be_named(kind: PartKind, name: str) -> bool:
    """Return whether a part of this kind may carry a file of this name. Rings and steps have no name."""
    pattern = _NAMES.get(kind)
    return pattern.fullmatch(name) is not None if pattern else name == ""


def inflate_part(part: Part) -> bytes:
    """Unpack a part; raise FrameError if it does not match its header. Blocks are returned unchanged."""
    if part.kind == "steps":
        return part.data
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(part.data, part.size + 1)
    except zlib.error as error:
        raise FrameError(f"a part ({part.kind}) cannot be decompressed") from error
    if len(raw) != part.size or not unpacker.eof or unpacker.unused_data:
        raise FrameError(f"a part ({part.kind}) does not have its declared length")
    return raw


def pack_frame(head: FrameHead, parts: Sequence[Part]) -> bytes:
    """Encode a frame; raise ValueError if it exceeds the limits."""
    fields = {
        "node": head.node,
        "spool": head.spool,
        "sent_wall_ns": head.sent_wall_ns,
        "offset_ns": head.offset_ns,
        "rtt_ns": head.rtt_ns,
        "bye": None if head.bye is None else dict(head.bye),
        "parts": [_part_entry(part) for part in parts],
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    rest = b"".join([struct.pack("<I", len(text)), text, *(part.data for part in parts)])
    if len(parts) > PARTS or len(text) > HEAD_BYTES or len(rest) + _CRC_END > FRAME_BYTES:
        raise ValueError("a frame is too large")
    return struct.pack("<4sHHI", FRAME_MAGIC, FRAME_VERSION, 0, zlib.crc32(rest)) + rest


def read_frame(data: bytes) -> Frame:
    """Decode a frame without unpacking its parts. Raise FrameError unless it is whole, valid and within limits."""
    if len(data) < FRAME_PREFIX.size or data[:4] != FRAME_MAGIC:
        raise FrameError("not a frame")
    _, version, _, crc, length = FRAME_PREFIX.unpack_from(data)
    if version != FRAME_VERSION:
        raise FrameError(f"a frame has version {version}; this Stepscope reads version {FRAME_VERSION}")
    if len(data) > FRAME_BYTES or length > HEAD_BYTES or FRAME_PREFIX.size + length > len(data):
        raise FrameError("a frame is too large or cut off")
    if zlib.crc32(memoryview(data)[_CRC_END:]) != crc:
        raise FrameError("a frame was damaged in transit")
    try:
        head = json.loads(data[FRAME_PREFIX.size : FRAME_PREFIX.size + length])
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame's header is not valid JSON") from error
    if not isinstance(head, dict) or not isinstance(head.get("parts"), list) or len(head["parts"]) > PARTS:
        raise FrameError("a frame's header is invalid")
    parts, at, inflated = [], FRAME_PREFIX.size + length, 0
    for entry in head["parts"]:
        part = _read_part(entry, data, at)
        at += len(part.data)
        inflated += part.size
        if inflated > INFLATED_BYTES:
            raise FrameError("a frame would be too large when decompressed")
        parts.append(part)
    if at != len(data):
        raise FrameError("a frame's parts do not match its length")
    return Frame(head=_read_head(head), parts=tuple(parts))


def _part_entry(part: Part) -> dict[str, Any]:
    named = {"name": part.name, "offset": part.offset} if part.name else {}
    return {"kind": part.kind, "bytes": len(part.data), "size": part.size, **named}


def _read_part(entry: object, data: bytes, at: int) -> Part:
    if not isinstance(entry, dict) or entry.get("kind") not in get_args(PartKind):
        raise FrameError("a part is of unknown kind")
    kind: PartKind = entry["kind"]
    length, size, offset = (_number(entry, key) for key in ("bytes", "size", "offset"))
    name = entry.get("name", "")
    if not isinstance(name, str) or not may_be_named(kind, name):
        raise FrameError(f"a part ({kind}) has an invalid name")
    if size > _MOST[kind] or at + length > len(data) or (kind == "steps" and size != length):
        raise FrameError(f"a part ({kind}) is too large or cut off")
    return Part(kind=kind, data=data[at : at + length], size=size, name=name, offset=offset)


def _read_head(head: dict[str, Any]) -> FrameHead:
    spool, bye = head.get("spool"), head.get("bye")
    if not isinstance(spool, str) or not _SPOOL.fullmatch(spool) or not (bye is None or isinstance(bye, dict)):
        raise FrameError("a frame's header is invalid")
    return FrameHead(
        node=_number(head, "node"),
        spool=spool,
        sent_wall_ns=_number(head, "sent_wall_ns"),
        offset_ns=_signed(head.get("offset_ns")),
        rtt_ns=_signed(head.get("rtt_ns")),
        bye=bye,
    )


def _number(head: Mapping[str, Any], key: str) -> int:
    value = head.get(key, 0)
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise FrameError(f"a frame has an invalid {key}")
    return value


def _signed(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or abs(value) > _LARGEST:
        raise FrameError("a frame has an invalid clock offset")
    return value


# -- Blocks -----------------------------------------------------------------------------------------------------------
# A block holds records of several rings, transposed and compressed together. Network and disk use the same bytes.
#
#     0    4s   magic  b"STBL"
#     4    u16  version
#     6    u16  zero
#     8    u32  rings      number of table entries
#     12   u32  rows       number of slots, all rings together
#     16   u32  bytes      size of the payload
#     20   ...  payload: zlib of
#               the table, ``rings`` entries of 64 bytes (``TABLE_FIELDS``), stored field by field
#               bytes 4..256 of the slots, transposed, ring by ring in table order
#
# Transposing puts values that hardly change between steps and ranks next to each other, so they compress well. A ring
# is named by the ``ring_id`` of its key; its sidecar, sent before its first block, identifies it. ``after_seq`` is
# where the previous block ended: a reader that is not there yet has missed data; one past it has seen all or part of
# this.

BLOCK_MAGIC = b"STBL"
BLOCK_VERSION = 1
BLOCK_HEAD = struct.Struct("<4sHHIII")
BLOCK_HEAD_BYTES = BLOCK_HEAD.size
_SKIPPED = 4
"""Zero bytes at the start of every slot. They are not sent."""
BODY_BYTES = SLOT_BYTES - _SKIPPED

TABLE_FIELDS: list[tuple[str, str]] = [
    ("ring", "V16"),
    ("after_seq", "<u8"),
    ("last_seq", "<u8"),
    ("live_step", "<u8"),
    ("live_since_ns", "<u8"),
    ("rows", "<u4"),
    ("lost", "<u4"),
    ("torn", "<u4"),
    ("live_phase", "u1"),
    ("state", "u1"),
    ("spare", "<u2"),
]
"""A numpy dtype, for callers that have numpy."""
_ENTRY = struct.Struct("<16sQQQQIIIBBH")
_WIDTHS = (16, 8, 8, 8, 8, 4, 4, 4, 1, 1, 2)


def ring_id(key: str) -> bytes:
    """Return sixteen bytes for a ring's name (``store.paths.ring_key``), however long its host name is."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True)
class RingRows:
    """The data of one ring in a block."""

    ring: bytes
    """``ring_id``."""
    after_seq: int
    last_seq: int
    slots: Sequence[bytes]
    """256 bytes each. May be empty if a rank only reports its position."""
    lost: int = 0
    torn: int = 0
    live_step: int = 0
    live_since_ns: int = 0
    live_phase: int = 0
    state: int = 0
    """Value of ``ring.layout.RingState``."""


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """A decompressed block that is not yet split into rows."""

    rings: int
    rows: int
    table: bytes
    """64 bytes per ring, entry by entry: ``numpy.frombuffer(table, TABLE_FIELDS)``."""
    bodies: bytes
    """Transposed: byte 4 of every slot, byte 5 of every slot …: ``[252, rows]``."""


def pack_block(parts: Sequence[RingRows]) -> bytes:
    """Encode a block; raise ValueError if it exceeds the limits."""
    rows = sum(len(part.slots) for part in parts)
    if len(parts) > BLOCK_RINGS or rows > BLOCK_ROWS:
        raise ValueError(f"a block holds at most {BLOCK_RINGS} rings and {BLOCK_ROWS} rows")
    entries = [
        _ENTRY.pack(
            part.ring,
            part.after_seq,
            part.last_seq,
            part.live_step,
            part.live_since_ns,
            len(part.slots),
            min(part.lost, 0xFFFFFFFF),
            min(part.torn, 0xFFFFFFFF),
            part.live_phase,
            part.state,
            0,
        )
        for part in parts
    ]
    bodies = b"".join([slot[_SKIPPED:] for part in parts for slot in part.slots])
    columns = [bodies[i::BODY_BYTES] for i in range(BODY_BYTES)]
    payload = zlib.compress(b"".join([*_by_field(b"".join(entries), len(parts)), *columns]), 1)
    return BLOCK_HEAD.pack(BLOCK_MAGIC, BLOCK_VERSION, 0, len(parts), rows, len(payload)) + payload


def read_block_head(data: bytes | memoryview) -> tuple[int, int]:
    """Return a block's declared number of rings and rows. Raise FrameError on a wrong version or size."""
    if len(data) < BLOCK_HEAD.size:
        raise FrameError("a block is cut off")
    magic, version, _, rings, rows, length = BLOCK_HEAD.unpack_from(data)
    if magic != BLOCK_MAGIC:
        raise FrameError("not a block")
    if version != BLOCK_VERSION:
        raise FrameError(f"a block has version {version}; this Stepscope reads version {BLOCK_VERSION}")
    if rings > BLOCK_RINGS or rows > BLOCK_ROWS or length != len(data) - BLOCK_HEAD.size:
        raise FrameError("a block is too large or cut off")
    return rings, rows


def read_block(data: bytes | memoryview) -> BlockBytes:
    """Decompress a block. Raise FrameError unless it is whole, of this version and within limits."""
    rings, rows = read_block_head(data)
    expected = rings * _ENTRY.size + rows * BODY_BYTES
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(data[BLOCK_HEAD.size :], expected + 1)
    except zlib.error as error:
        raise FrameError("a block cannot be decompressed") from error
    if len(body) != expected or not unpacker.eof or unpacker.unused_data:
        raise FrameError("a block does not have its declared length")
    at = rings * _ENTRY.size
    table = _by_entry(body[:at], rings)
    if sum(_ENTRY.unpack_from(table, i * _ENTRY.size)[5] for i in range(rings)) != rows:
        raise FrameError("a block's table does not match its rows")
    return BlockBytes(rings=rings, rows=rows, table=table, bodies=body[at:])


def rows_of(block: BlockBytes) -> list[RingRows]:
    """Split a block into rows without numpy, for tests and small blocks."""
    slots = bytearray(block.rows * SLOT_BYTES)
    for i in range(BODY_BYTES):
        slots[_SKIPPED + i :: SLOT_BYTES] = block.bodies[i * block.rows : (i + 1) * block.rows]
    found, at = [], 0
    for i in range(block.rings):
        ring, after, last, step, since, rows, lost, torn, phase, state, _ = _ENTRY.unpack_from(
            block.table, i * _ENTRY.size
        )
        own = [bytes(slots[(at + n) * SLOT_BYTES : (at + n + 1) * SLOT_BYTES]) for n in range(rows)]
        found.append(
            RingRows(
                ring=ring,
                after_seq=after,
                last_seq=last,
                slots=own,
                lost=lost,
                torn=torn,
                live_step=step,
                live_since_ns=since,
                live_phase=phase,
                state=state,
            )
        )
        at += rows
    return found


def _by_field(table: bytes, rings: int) -> list[bytes]:
    """Reorder a table from entry by entry to field by field."""
    columns, at = [], 0
    for width in _WIDTHS:
        columns.append(b"".join([table[i * _ENTRY.size + at : i * _ENTRY.size + at + width] for i in range(rings)]))
        at += width
    return columns


def _by_entry(columns: bytes, rings: int) -> bytes:
    table = bytearray(rings * _ENTRY.size)
    at = start = 0
    for width in _WIDTHS:
        for byte in range(width):
            table[at + byte :: _ENTRY.size] = columns[start + byte : start + width * rings : width]
        at += width
        start += width * rings
    return bytes(table)

"""The frame that an agent sends: its header, its parts, the blocks of steps in it, and how large each may be.

A frame: everything a node has to say at one time, in parts.  One POST on the network, one record in the hub's inbox.

    0    4s   magic  b"STFR"
    4    u16  version
    6    u16  zero
    8    u32  crc32 of everything after it
    12   u32  bytes of the header
    16   ...  header: JSON, see ``FrameHead``
         ...  the parts' payloads, one after the other

Parts, by kind:

    rings    zlib of a JSON list of sidecars (``steps/KEY.json``): who a ring is; ahead of its first block, and again
             when something of it changed
    steps    a block (``wire/frames.py``)
    lines    zlib of whole lines of ``events.jsonl``, ``samples.jsonl`` or ``stacks.jsonl``, from ``offset`` on
    log      zlib of bytes of ``logs/NAME.log``, from ``offset`` on
    file     zlib of the whole of a small file: ``errors/*.json``, ``hangs/*``, ``flight/*.json``

Every part says where it belongs (a sequence number, an offset, a name), so that a frame that comes twice changes
nothing, and one that comes too early is told where to begin.
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


# -- limits -----------------------------------------------------------------------------------------------------------
# How large what goes over the network may be; both sides keep to these, and the hub insists.

FRAME_BYTES = 8 << 20
"""Of one frame as it travels."""
INFLATED_BYTES = 64 << 20
"""Of everything in one frame, unpacked."""
HEAD_BYTES = 256 << 10
"""Of a frame's header."""
PARTS = 512
"""Of one frame."""
BLOCK_ROWS = 65_536
BLOCK_RINGS = 4096
LINES_BYTES = 4 << 20
"""Of the lines in one part, unpacked; a line that is longer is not sent."""
FILE_BYTES = 8 << 20
"""Of a file that is sent as a whole, unpacked."""
HELLO_BYTES = 1 << 10
"""Of a hello, and of its answer."""
JOIN_BYTES = 64 << 10
"""Of what an agent says when it joins."""


# -- frames -----------------------------------------------------------------------------------------------------------

FRAME_MAGIC = b"STFR"
FRAME_VERSION = 1
FRAME_PREFIX = struct.Struct("<4sHHII")
_CRC_END = 12

PartKind = Literal["rings", "steps", "lines", "log", "file"]
LINE_FILES = ("events.jsonl", "samples.jsonl", "stacks.jsonl")
_NAMES = {
    "lines": re.compile("|".join(re.escape(name) for name in LINE_FILES)),
    "log": re.compile(r"logs/[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.log"),
    "file": re.compile(r"(?:errors|hangs|flight)/[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.(?:json|txt)"),
}
_MOST = {"rings": LINES_BYTES, "lines": LINES_BYTES, "log": LINES_BYTES, "file": FILE_BYTES, "steps": INFLATED_BYTES}
_SPOOL = re.compile(r"[0-9a-f]{16,64}")
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Part:
    kind: PartKind
    data: bytes
    """As it travels."""
    size: int
    """Unpacked, in bytes; of a block, the same as it travels."""
    name: str = ""
    """Of the file, as it is called in the sender's run directory; empty for rings and steps."""
    offset: int = 0
    """In that file, of lines and logs."""


@dataclass(frozen=True, kw_only=True)
class FrameHead:
    node: int
    """Number of the node, as its launcher was told."""
    spool: str
    """The sender's run directory, by the random name it was given when it was made: offsets are within it."""
    sent_wall_ns: int
    """By the sender's clock."""
    offset_ns: int | None = None
    """What the sender's clock is ahead of the hub's, as far as round trips so far tell …"""
    rtt_ns: int | None = None
    """… and the round trip that told it: half of it is how far off the offset may be."""
    bye: Mapping[str, Any] | None = None
    """In a node's last frame, how its part of the job ended: ``{"exit_code": 0, "status": "finished"}``."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    head: FrameHead
    parts: tuple[Part, ...]


def part_of(kind: PartKind, raw: bytes, *, name: str = "", offset: int = 0) -> Part:
    """Packed; a block is packed already."""
    data = raw if kind == "steps" else zlib.compress(raw, 1)
    return Part(kind=kind, data=data, size=len(raw), name=name, offset=offset)


def may_be_named(kind: PartKind, name: str) -> bool:
    """Whether a part of this kind may bring a file of this name; one of rings or steps has none."""
    pattern = _NAMES.get(kind)
    return pattern.fullmatch(name) is not None if pattern else name == ""


def inflate_part(part: Part) -> bytes:
    """FrameError when it is not what it says; a block comes as it is."""
    if part.kind == "steps":
        return part.data
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(part.data, part.size + 1)
    except zlib.error as error:
        raise FrameError(f"a part ({part.kind}) cannot be unpacked") from error
    if len(raw) != part.size or not unpacker.eof or unpacker.unused_data:
        raise FrameError(f"a part ({part.kind}) is not as long as it says")
    return raw


def pack_frame(head: FrameHead, parts: Sequence[Part]) -> bytes:
    """ValueError when it is more than a frame may hold."""
    said = {
        "node": head.node,
        "spool": head.spool,
        "sent_wall_ns": head.sent_wall_ns,
        "offset_ns": head.offset_ns,
        "rtt_ns": head.rtt_ns,
        "bye": None if head.bye is None else dict(head.bye),
        "parts": [_part_entry(part) for part in parts],
    }
    text = json.dumps(said, separators=(",", ":")).encode()
    rest = b"".join([struct.pack("<I", len(text)), text, *(part.data for part in parts)])
    if len(parts) > PARTS or len(text) > HEAD_BYTES or len(rest) + _CRC_END > FRAME_BYTES:
        raise ValueError("a frame is larger than it may be")
    return struct.pack("<4sHHI", FRAME_MAGIC, FRAME_VERSION, 0, zlib.crc32(rest)) + rest


def read_frame(data: bytes) -> Frame:
    """FrameError for anything but a whole frame of this version within the limits; parts are still packed."""
    if len(data) < FRAME_PREFIX.size or data[:4] != FRAME_MAGIC:
        raise FrameError("not a frame")
    _, version, _, crc, length = FRAME_PREFIX.unpack_from(data)
    if version != FRAME_VERSION:
        raise FrameError(f"a frame of version {version}; this Stepscope reads version {FRAME_VERSION}")
    if len(data) > FRAME_BYTES or length > HEAD_BYTES or FRAME_PREFIX.size + length > len(data):
        raise FrameError("a frame is larger than it may be, or cut off")
    if zlib.crc32(memoryview(data)[_CRC_END:]) != crc:
        raise FrameError("a frame was damaged on its way")
    try:
        said = json.loads(data[FRAME_PREFIX.size : FRAME_PREFIX.size + length])
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame's header is no JSON") from error
    if not isinstance(said, dict) or not isinstance(said.get("parts"), list) or len(said["parts"]) > PARTS:
        raise FrameError("a frame's header is not of ours")
    parts, at, inflated = [], FRAME_PREFIX.size + length, 0
    for told in said["parts"]:
        part = _read_part(told, data, at)
        at += len(part.data)
        inflated += part.size
        if inflated > INFLATED_BYTES:
            raise FrameError("a frame would be larger unpacked than it may be")
        parts.append(part)
    if at != len(data):
        raise FrameError("a frame's parts do not fill it")
    return Frame(head=_read_head(said), parts=tuple(parts))


def _part_entry(part: Part) -> dict[str, Any]:
    named = {"name": part.name, "offset": part.offset} if part.name else {}
    return {"kind": part.kind, "bytes": len(part.data), "size": part.size, **named}


def _read_part(told: object, data: bytes, at: int) -> Part:
    if not isinstance(told, dict) or told.get("kind") not in get_args(PartKind):
        raise FrameError("a part of a kind that is not known")
    kind: PartKind = told["kind"]
    length, size, offset = (_number(told, key) for key in ("bytes", "size", "offset"))
    name = told.get("name", "")
    if not isinstance(name, str) or not may_be_named(kind, name):
        raise FrameError(f"a part ({kind}) of a name that it may not have")
    if size > _MOST[kind] or at + length > len(data) or (kind == "steps" and size != length):
        raise FrameError(f"a part ({kind}) is larger than it may be")
    return Part(kind=kind, data=data[at : at + length], size=size, name=name, offset=offset)


def _read_head(said: dict[str, Any]) -> FrameHead:
    spool, bye = said.get("spool"), said.get("bye")
    if not isinstance(spool, str) or not _SPOOL.fullmatch(spool) or not (bye is None or isinstance(bye, dict)):
        raise FrameError("a frame's header is not of ours")
    return FrameHead(
        node=_number(said, "node"),
        spool=spool,
        sent_wall_ns=_number(said, "sent_wall_ns"),
        offset_ns=_signed(said.get("offset_ns")),
        rtt_ns=_signed(said.get("rtt_ns")),
        bye=bye,
    )


def _number(said: Mapping[str, Any], key: str) -> int:
    value = said.get(key, 0)
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise FrameError(f"{key} of a frame is none")
    return value


def _signed(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or abs(value) > _LARGEST:
        raise FrameError("a clock's offset in a frame is none")
    return value


# -- blocks -----------------------------------------------------------------------------------------------------------
# A block: records of several rings, transposed and packed together.  The same bytes on the network and on disk.
#
#     0    4s   magic  b"STBL"
#     4    u16  version
#     6    u16  zero
#     8    u32  rings      entries of the table
#     12   u32  rows       slots, of all rings
#     16   u32  bytes      of the payload
#     20   ...  payload: zlib of
#               the table, ``rings`` entries of 64 bytes (``TABLE_FIELDS``), as its fields in turn (all of one, then …)
#               the slots' bytes 4..256, transposed, ring by ring in the table's order
#
# Transposed, what hardly changes from step to step and from rank to rank stands together and packs well.  A ring is
# named by ``ring_id`` of its key; who that is, its sidecar says, which goes ahead of its first block.  ``after_seq`` is
# where the block before ended: a reader that has not come that far misses something, one that is further has seen (part
# of) this.

BLOCK_MAGIC = b"STBL"
BLOCK_VERSION = 1
BLOCK_HEAD = struct.Struct("<4sHHIII")
BLOCK_HEAD_BYTES = BLOCK_HEAD.size
_SKIPPED = 4
"""Zero bytes at the head of every slot; not sent."""
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
"""As a numpy dtype, for those who have numpy."""
_ENTRY = struct.Struct("<16sQQQQIIIBBH")
_WIDTHS = (16, 8, 8, 8, 8, 4, 4, 4, 1, 1, 2)


def ring_id(key: str) -> bytes:
    """Sixteen bytes for the name of a ring (``store.paths.ring_key``), however long its host's name is."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True)
class RingRows:
    """What one ring has in a block."""

    ring: bytes
    """``ring_id``."""
    after_seq: int
    last_seq: int
    slots: Sequence[bytes]
    """256 bytes each; may be none, where a rank only says where it is."""
    lost: int = 0
    torn: int = 0
    live_step: int = 0
    live_since_ns: int = 0
    live_phase: int = 0
    state: int = 0
    """Number of ``ring.layout.RingState``."""


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """A block, unpacked but not yet taken apart."""

    rings: int
    rows: int
    table: bytes
    """64 bytes a ring, entry by entry: ``numpy.frombuffer(table, TABLE_FIELDS)``."""
    bodies: bytes
    """Transposed: byte 4 of every slot, byte 5 of every slot …: ``[252, rows]``."""


def pack_block(parts: Sequence[RingRows]) -> bytes:
    """ValueError when it is more than a block may hold."""
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
    """How many rings and rows a block says it has; FrameError when it is none of this version within the limits."""
    if len(data) < BLOCK_HEAD.size:
        raise FrameError("a block is cut off")
    magic, version, _, rings, rows, length = BLOCK_HEAD.unpack_from(data)
    if magic != BLOCK_MAGIC:
        raise FrameError("not a block")
    if version != BLOCK_VERSION:
        raise FrameError(f"a block of version {version}; this Stepscope reads version {BLOCK_VERSION}")
    if rings > BLOCK_RINGS or rows > BLOCK_ROWS or length != len(data) - BLOCK_HEAD.size:
        raise FrameError("a block is larger than it may be, or cut off")
    return rings, rows


def read_block(data: bytes | memoryview) -> BlockBytes:
    """FrameError for anything but a whole block of this version within the limits."""
    rings, rows = read_block_head(data)
    expected = rings * _ENTRY.size + rows * BODY_BYTES
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(data[BLOCK_HEAD.size :], expected + 1)
    except zlib.error as error:
        raise FrameError("a block cannot be unpacked") from error
    if len(body) != expected or not unpacker.eof or unpacker.unused_data:
        raise FrameError("a block is not as long as it says")
    at = rings * _ENTRY.size
    table = _by_entry(body[:at], rings)
    if sum(_ENTRY.unpack_from(table, i * _ENTRY.size)[5] for i in range(rings)) != rows:
        raise FrameError("a block's table does not fit its rows")
    return BlockBytes(rings=rings, rows=rows, table=table, bodies=body[at:])


def rows_of(block: BlockBytes) -> list[RingRows]:
    """Taken apart, without numpy: for tests and for whoever has only a few rows."""
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
    """From entry by entry to field by field."""
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

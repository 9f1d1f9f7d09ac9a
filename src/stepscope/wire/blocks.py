"""A block: records of several rings, transposed and packed together.  The same bytes on the network and on disk.

    0    4s   magic  b"STBL"
    4    u16  version
    6    u16  zero
    8    u32  rings      entries of the table
    12   u32  rows       slots, of all rings
    16   u32  bytes      of the payload
    20   ...  payload: zlib of
              the table, ``rings`` entries of 64 bytes (``TABLE_FIELDS``), as its fields in turn (all of one, then …)
              the slots' bytes 4..256, transposed, ring by ring in the table's order

Transposed, what hardly changes from step to step and from rank to rank stands together and packs well.  A ring is
named by ``ring_id`` of its key; who that is, its sidecar says, which goes ahead of its first block.  ``after_seq`` is
where the block before ended: a reader that has not come that far misses something, one that is further has seen (part
of) this.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.errors import FrameError
from stepscope.records.slot import SLOT_BYTES
from stepscope.wire.limits import BLOCK_RINGS, BLOCK_ROWS

__all__ = [
    "BLOCK_HEAD_BYTES",
    "BLOCK_MAGIC",
    "BODY_BYTES",
    "TABLE_FIELDS",
    "BlockBytes",
    "RingRows",
    "pack_block",
    "read_block",
    "read_block_head",
    "ring_id",
    "rows_of",
]

BLOCK_MAGIC = b"STBL"
VERSION = 1
HEAD = struct.Struct("<4sHHIII")
BLOCK_HEAD_BYTES = HEAD.size
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
    return HEAD.pack(BLOCK_MAGIC, VERSION, 0, len(parts), rows, len(payload)) + payload


def read_block_head(data: bytes | memoryview) -> tuple[int, int]:
    """How many rings and rows a block says it has; FrameError when it is none of this version within the limits."""
    if len(data) < HEAD.size:
        raise FrameError("a block is cut off")
    magic, version, _, rings, rows, length = HEAD.unpack_from(data)
    if magic != BLOCK_MAGIC:
        raise FrameError("not a block")
    if version != VERSION:
        raise FrameError(f"a block of version {version}; this Stepscope reads version {VERSION}")
    if rings > BLOCK_RINGS or rows > BLOCK_ROWS or length != len(data) - HEAD.size:
        raise FrameError("a block is larger than it may be, or cut off")
    return rings, rows


def read_block(data: bytes | memoryview) -> BlockBytes:
    """FrameError for anything but a whole block of this version within the limits."""
    rings, rows = read_block_head(data)
    expected = rings * _ENTRY.size + rows * BODY_BYTES
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(data[HEAD.size :], expected + 1)
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

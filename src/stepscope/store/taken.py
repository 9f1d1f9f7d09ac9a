"""Blocks of steps as arrays: what the hub makes of the bytes of ``wire/blocks.py``, and back where one must be cut.

The same layout as there, unpacked with numpy: a hub of a large job does this some hundred times a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import FrameError
from stepscope.records.slot import SLOT_BYTES
from stepscope.wire.blocks import BLOCK_HEAD_BYTES, BODY_BYTES, TABLE_FIELDS, RingRows, pack_block, read_block_head

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TABLE_DTYPE", "TakenRows", "cut_block", "read_table", "repack_block", "unpack_block"]

TABLE_DTYPE = np.dtype(TABLE_FIELDS)
_FIRST = SLOT_BYTES - BODY_BYTES
_SEQ_AT = 8


@dataclass(frozen=True, kw_only=True)
class TakenRows:
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


def unpack_block(data: bytes | memoryview) -> TakenRows:
    """FrameError for anything but a whole block of this version within the limits."""
    rings, rows = read_block_head(data)
    table_bytes = rings * TABLE_DTYPE.itemsize
    body = _inflate(data, table_bytes + rows * BODY_BYTES, whole=True)
    table = _table(body, rings, rows)
    slots = np.zeros((rows, SLOT_BYTES), np.uint8)
    slots[:, _FIRST:] = np.frombuffer(body, np.uint8, rows * BODY_BYTES, table_bytes).reshape(BODY_BYTES, rows).T
    return TakenRows(table=table, slots=slots)


def read_table(data: bytes | memoryview) -> NDArray[Any]:
    """Only who is in a block and how far, which stands first: a fraction of the work.  FrameError as above."""
    rings, rows = read_block_head(data)
    return _table(_inflate(data, rings * TABLE_DTYPE.itemsize, whole=False), rings, rows)


def cut_block(taken: TakenRows, after: NDArray[Any], keep: NDArray[np.bool_]) -> TakenRows:
    """Of the rings to ``keep`` what comes ``after`` these sequence numbers (one per ring)."""
    whose = np.repeat(np.arange(len(taken.table)), taken.rows)
    chosen = keep[whose] & (taken.seqs > after[whose])
    table = taken.table.copy()
    table["rows"] = np.bincount(whose[chosen], minlength=len(table))
    table["after_seq"] = np.maximum(table["after_seq"], after)
    return TakenRows(table=table[keep], slots=taken.slots[chosen])


def repack_block(taken: TakenRows) -> bytes:
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

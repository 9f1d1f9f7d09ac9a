"""Tables of plain columns as Parquet files, written and read back in a fraction of what a database takes for it.

DuckDB, which reads these files for ``stepscope sql``, could do both, but it costs 0.15 s and 90 MB of memory on the
way, more than a million events cost here.  So the form is written here, as simple as Parquet allows: every column
required, plain values, one page per column and row group, packed with Zstandard and its checksum.  Anybody's Parquet
reader reads it.  Where each page lies is returned on writing (``Places``) and given back on reading, so that nothing
of a foreign file is ever parsed: a page that is not where it should be, or not as long, or not whole is a ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

__all__ = ["Places", "read_column", "read_strings", "write_table"]

Places = dict[str, list[tuple[int, int, int]]]
"""By column, for each page: where it begins, how long it is packed and plain."""

MAGIC: Final = b"PAR1"
GROUP_ROWS: Final = 1 << 18
"""Rows of a row group: enough to pack well, few enough to read with several threads and write in little memory."""
LEVEL: Final = 1
INT32, INT64, FLOAT, DOUBLE, BYTE_ARRAY = 1, 2, 4, 5, 6
ZSTD_CODEC: Final = 6
RLE: Final = 3


class Form(NamedTuple):
    """How Parquet holds a type of numpy's."""

    physical: int
    stored: str
    converted: int | None = None
    """What the values are where the physical type does not say."""


FORMS: Final = {
    "uint8": Form(INT32, "<i4", 11),
    "int16": Form(INT32, "<i4", 16),
    "int32": Form(INT32, "<i4"),
    "int64": Form(INT64, "<i8"),
    "float32": Form(FLOAT, "<f4"),
    "float64": Form(DOUBLE, "<f8"),
}
TEXT: Final = Form(BYTE_ARRAY, "", 0)


def write_table(file: BinaryIO, columns: Mapping[str, NDArray[Any] | Sequence[str]]) -> Places:
    """Columns of equal length, into a new file: numbers of the types in ``FORMS``, or text."""
    rows = len(next(iter(columns.values())))
    places: Places = {name: [] for name in columns}
    groups = []
    packer = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    file.write(MAGIC)
    for start in range(0, rows, GROUP_ROWS):
        part = {name: values[start : start + GROUP_ROWS] for name, values in columns.items()}
        groups.append(_write_group(file, part, packer, places))
    footer = _footer(columns, rows, groups)
    file.write(footer + struct.pack("<I", len(footer)) + MAGIC)
    return places


def _write_group(file: BinaryIO, part: Mapping[str, Any], packer: Any, places: Places) -> bytes:
    chunks, total = [], 0
    rows = len(next(iter(part.values())))
    for name, values in part.items():
        form = _form(values)
        plain = _text_page(values) if form is TEXT else np.ascontiguousarray(values, form.stored).tobytes()
        packed = packer.compress(plain)
        header = _page_header(rows, len(plain), len(packed))
        began = file.tell()
        file.write(header)
        places[name].append((file.tell(), len(packed), len(plain)))
        file.write(packed)
        sizes = (len(header) + len(plain), len(header) + len(packed))
        chunks.append(_chunk(name, form, rows, began, sizes))
        total += sizes[0]
    return _struct((1, LIST, _list(STRUCT, chunks)), (2, I64, _int(total)), (3, I64, _int(rows)))


def read_column(data: memoryview, pages: Sequence[Sequence[int]], rows: int, dtype: Any) -> NDArray[Any]:
    """One column of numbers out of a file's bytes."""
    out = np.empty(rows, dtype)
    form = FORMS[out.dtype.name]
    stored = np.dtype(form.stored)
    at = 0
    for plain in _pages(data, pages, rows, stored.itemsize):
        values = np.frombuffer(plain, stored)
        out[at : at + len(values)] = values
        at += len(values)
    if at != rows:
        raise ValueError(f"{at} rows instead of {rows}")
    return out


def read_strings(data: memoryview, pages: Sequence[Sequence[int]], rows: int) -> list[str]:
    """One column of text."""
    out: list[str] = []
    for plain in _pages(data, pages, rows, None):
        at, end = 0, len(plain)
        while at < end:
            (length,) = struct.unpack_from("<I", plain, at)
            at += 4
            if at + length > end:
                raise ValueError("text beyond the end of its page")
            out.append(plain[at : at + length].decode())
            at += length
    if len(out) != rows:
        raise ValueError(f"{len(out)} rows instead of {rows}")
    return out


def _pages(data: memoryview, pages: Sequence[Sequence[int]], rows: int, itemsize: int | None) -> Iterable[bytes]:
    unpacker = zstandard.ZstdDecompressor()
    left = rows
    for start, packed, plain in pages:
        here = min(GROUP_ROWS, left)
        left -= here
        if not 0 <= start <= start + packed <= len(data) or (itemsize is not None and plain != here * itemsize):
            raise ValueError("a page that cannot be")
        piece = data[start : start + packed]
        if zstandard.get_frame_parameters(piece).content_size != plain:
            raise ValueError("a page of another length")
        yield unpacker.decompress(piece)


def _form(values: Any) -> Form:
    return FORMS[values.dtype.name] if isinstance(values, np.ndarray) else TEXT


def _text_page(values: Sequence[str]) -> bytes:
    pieces = []
    for text in values:
        encoded = text.encode()
        pieces += [struct.pack("<I", len(encoded)), encoded]
    return b"".join(pieces)


# ── Parquet's own records, in Thrift's compact protocol ─────────────────────────────────────────────────────────────

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12


def _page_header(rows: int, plain: int, packed: int) -> bytes:
    data_page = _struct((1, I32, _int(rows)), (2, I32, _int(0)), (3, I32, _int(RLE)), (4, I32, _int(RLE)))
    return _struct((1, I32, _int(0)), (2, I32, _int(plain)), (3, I32, _int(packed)), (5, STRUCT, data_page))


def _chunk(name: str, form: Form, rows: int, began: int, sizes: tuple[int, int]) -> bytes:
    about = _struct(
        (1, I32, _int(form.physical)),
        (2, LIST, _list(I32, [_int(0), _int(RLE)])),
        (3, LIST, _list(BINARY, [_text(name)])),
        (4, I32, _int(ZSTD_CODEC)),
        (5, I64, _int(rows)),
        (6, I64, _int(sizes[0])),
        (7, I64, _int(sizes[1])),
        (9, I64, _int(began)),
    )
    return _struct((2, I64, _int(began)), (3, STRUCT, about))


def _footer(columns: Mapping[str, Any], rows: int, groups: list[bytes]) -> bytes:
    schema = [_struct((4, BINARY, _text("schema")), (5, I32, _int(len(columns))))]
    for name, values in columns.items():
        form = _form(values)
        said = () if form.converted is None else ((6, I32, _int(form.converted)),)
        schema.append(_struct((1, I32, _int(form.physical)), (3, I32, _int(0)), (4, BINARY, _text(name)), *said))
    return _struct(
        (1, I32, _int(1)),
        (2, LIST, _list(STRUCT, schema)),
        (3, I64, _int(rows)),
        (4, LIST, _list(STRUCT, groups)),
        (6, BINARY, _text("stepscope")),
    )


def _struct(*fields: tuple[int, int, bytes]) -> bytes:
    out, last = bytearray(), 0
    for number, kind, value in fields:
        out.append((number - last) << 4 | kind)
        out += value
        last = number
    return bytes(out) + b"\0"


def _list(kind: int, items: list[bytes]) -> bytes:
    head = bytes([len(items) << 4 | kind]) if len(items) < 15 else bytes([0xF0 | kind]) + _unsigned(len(items))
    return head + b"".join(items)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _unsigned(len(encoded)) + encoded


def _int(value: int) -> bytes:
    return _unsigned(value << 1 if value >= 0 else (-value << 1) - 1)


def _unsigned(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

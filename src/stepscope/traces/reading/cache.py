"""The cache of traces that were read before: entries, Parquet files, and opening a file through it.

The columns of a trace and its results are stored, so that reading it again costs a fraction.

Location: ``$STEPSCOPE_CACHE/traces``, else ``$XDG_CACHE_HOME/stepscope/traces``, else ``~/.cache/stepscope/traces``, in
a folder that only the user can read. An entry belongs to one state of a file (path, size, modification time, inode) and
to this version of the code: any change in ``traces`` invalidates all entries automatically. It is written under a
temporary name and then renamed, so several processes may create the same one. Above ``limit_bytes``
(``$STEPSCOPE_CACHE_GB``, default 20; 0 disables the cache) the least recently used entries are deleted.

The cache never causes a failure: if it cannot be written or is damaged, the file is read as if there were no cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from stepscope.records.files import private_folder
from stepscope.traces.model.columns import (
    ROW_TABLES,
    STRING_COLUMNS,
    TABLES,
    Thread,
    Trace,
    TraceMeta,
    dtype_of,
    side_columns,
)
from stepscope.traces.reading.files import read_traces

__all__ = [
    "BROKEN",
    "Cache",
    "Entry",
    "Places",
    "create_private_file",
    "is_code",
    "load_meta",
    "open_traces",
    "read_column",
    "read_strings",
    "write_table",
]


# -- Parquet ----------------------------------------------------------------------------------------------------------
# Tables of plain columns as Parquet files. DuckDB, which reads these files for ``stepscope sql``, could also write
# them, but it costs 0.15 s and 90 MB of memory, more than a million events cost here. The format is kept as simple as
# Parquet allows: required columns, plain values, one page per column and row group, compressed with Zstandard and its
# checksum. Any Parquet reader can read it. Writing returns the position of each page (``Places``) and reading takes it,
# so nothing in an untrusted file is ever parsed: a page with a wrong position, length or content is a ValueError.

Places = dict[str, list[tuple[int, int, int]]]
"""By column, for each page: offset, compressed length and plain length."""

MAGIC: Final = b"PAR1"
GROUP_ROWS: Final = 1 << 18
"""Rows per row group: enough to compress well, few enough to read with several threads and to write in little memory.
"""
LEVEL: Final = 1
INT32, INT64, FLOAT, DOUBLE, BYTE_ARRAY = 1, 2, 4, 5, 6
ZSTD_CODEC: Final = 6
RLE: Final = 3


class Form(NamedTuple):
    """How Parquet stores a numpy type."""

    physical: int
    stored: str
    converted: int | None = None
    """The converted type, where the physical type is not enough."""


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
    """Write columns of equal length to a new file: numbers of the types in ``FORMS``, or text."""
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
    """Read one column of numbers from a file's bytes."""
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
    """Read one column of text."""
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


# ── Parquet's metadata in Thrift's compact protocol ─────────────────────────────────────────────────────────────────

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
        converted = () if form.converted is None else ((6, I32, _int(form.converted)),)
        schema.append(_struct((1, I32, _int(form.physical)), (3, I32, _int(0)), (4, BINARY, _text(name)), *converted))
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


# -- traces in files --------------------------------------------------------------------------------------------------
# A trace is stored as one Parquet file per table, including strings and threads, and an index in JSON:
#
#     0-slices.parquet  0-ops.parquet  …  0-strings.parquet  0-threads.parquet  1-slices.parquet  …  index
#
# The number is that of the trace (an Nsight Systems export may contain several processes). Loading returns exactly what
# was saved, types included. Nothing in the files is trusted: neither page positions nor that a code has a string. The
# index, like every file that is not Parquet, begins with a checksum of the rest.

INDEX: Final = "index"
BROKEN: Final = (OSError, ValueError, KeyError, msgspec.MsgspecError, zstandard.ZstdError, UnicodeError)
"""The errors that damaged, foreign or missing files cause."""
DIGEST_BYTES: Final = 32
CODES: Final = {
    *("name", "dims", "types", "concrete", "stack", "op", "group", "description", "ranks", "dtype"),
}
"""Columns of string codes in any table; ``STRING_COLUMNS`` has the others."""
THREADS: Final = {"thread", "from_thread", "to_thread"}


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    rows: int
    places: Places


class _StoredTrace(msgspec.Struct, forbid_unknown_fields=True):
    meta: TraceMeta
    threads: list[Thread]
    tables: dict[str, _Table]


def create_private_file(path: Path) -> BinaryIO:
    """Create a file that only the user can read."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def save_traces(folder: Path, traces: Sequence[Trace]) -> None:
    """Save traces into an empty folder; the index is written last."""
    stored = [_save(folder, number, trace) for number, trace in enumerate(traces)]
    write_sealed(folder / INDEX, msgspec.json.encode(stored))


def write_sealed(path: Path, data: bytes) -> None:
    """Write a new file that begins with a checksum."""
    with create_private_file(path) as file:
        file.write(hashlib.sha256(data).digest() + data)


def read_sealed(path: Path) -> bytes:
    """Read a file from ``write_sealed``; raise ValueError if it has changed."""
    whole = path.read_bytes()
    digest, data = whole[:DIGEST_BYTES], whole[DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"{path} is damaged")
    return data


def load_meta(folder: Path) -> list[TraceMeta]:
    """Load the metadata of all traces without their columns."""
    return [stored.meta for stored in _index(folder)]


def is_code(table: str, column: str) -> bool:
    """Test whether a column contains codes of strings."""
    return column in CODES or (table, column) in STRING_COLUMNS


def load_traces(folder: Path, path: str) -> list[Trace]:
    """Load what ``save_traces`` wrote, or raise one of ``BROKEN``; ``path`` is for messages."""
    stored = _index(folder)
    return [_load(folder, number, each, path) for number, each in enumerate(stored)]


def _index(folder: Path) -> list[_StoredTrace]:
    return msgspec.json.decode(read_sealed(folder / INDEX), type=list[_StoredTrace])


def _save(folder: Path, number: int, trace: Trace) -> _StoredTrace:
    columns: dict[str, Mapping[str, Any]] = {name: side_columns(getattr(trace, name)) for name in TABLES}
    columns["strings"] = {"code": np.arange(len(trace.strings), dtype=np.int32), "text": trace.strings}
    columns["threads"] = {
        "thread": np.arange(len(trace.threads), dtype=np.int32),
        "pid": [str(thread.pid) for thread in trace.threads],
        "tid": [str(thread.tid) for thread in trace.threads],
        "name": [thread.name for thread in trace.threads],
    }
    tables = {}
    for name, own in columns.items():
        with create_private_file(folder / f"{number}-{name}.parquet") as file:
            places = write_table(file, own)
        tables[name] = _Table(rows=len(next(iter(own.values()))), places=places)
    return _StoredTrace(meta=trace.meta, threads=trace.threads, tables=tables)


def _load(folder: Path, number: int, stored: _StoredTrace, path: str) -> Trace:
    loaded: dict[str, Any] = {}
    for name, kind in TABLES.items():
        table = stored.tables[name]
        data = memoryview((folder / f"{number}-{name}.parquet").read_bytes())
        loaded[name] = kind(
            **{
                column: read_column(data, table.places[column], table.rows, dtype_of(name, column))
                for column in kind.__dataclass_fields__
            }
        )
    strings = stored.tables["strings"]
    data = memoryview((folder / f"{number}-strings.parquet").read_bytes())
    texts = read_strings(data, strings.places["text"], strings.rows)
    trace = Trace(meta=replace(stored.meta, path=path), strings=texts, threads=stored.threads, **loaded)
    _check(trace)
    return trace


def _check(trace: Trace) -> None:
    """Check that every index is valid."""
    for table in TABLES:
        for column, values in side_columns(getattr(trace, table)).items():
            lowest = -1
            if is_code(table, column):
                end = len(trace.strings)
                lowest = 0 if table == "slices" else -1
            elif column in THREADS:
                end, lowest = len(trace.threads), 0
            elif column == "row" and table in ROW_TABLES:
                end, lowest = len(trace.slices), 0
            else:
                continue
            if len(values) and not (values.min() >= lowest and values.max() < end):
                raise ValueError(f"{table}.{column} points at nothing")


# -- entries ----------------------------------------------------------------------------------------------------------

Found = TypeVar("Found")

DEFAULT_LIMIT_BYTES: Final = 20 * 10**9
LAYOUT: Final = 1
ENTRY: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\Z")
UNFINISHED: Final = re.compile(r"new-[0-9a-z_]+\Z")
ABANDONED_S: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class Cache:
    folder: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    @classmethod
    def of_environment(cls, environment: dict[str, str] | None = None) -> Cache | None:
        """Locate the user's cache; None if it is disabled or the user has no home."""
        known = dict(os.environ) if environment is None else environment
        try:
            limit = float(known.get("STEPSCOPE_CACHE_GB") or DEFAULT_LIMIT_BYTES / 1e9)
        except ValueError:
            limit = DEFAULT_LIMIT_BYTES / 1e9
        if known.get("STEPSCOPE_CACHE"):
            base = Path(known["STEPSCOPE_CACHE"])
        elif known.get("XDG_CACHE_HOME"):
            base = Path(known["XDG_CACHE_HOME"]) / "stepscope"
        elif known.get("HOME"):
            base = Path(known["HOME"]) / ".cache" / "stepscope"
        else:
            return None
        return cls(folder=base / "traces", limit_bytes=int(limit * 1e9)) if limit > 0 else None

    def entry(self, path: Path) -> Entry | None:
        """Return the entry for a file in its current state; None if it is not a regular file."""
        identity = _identity(path)
        return None if identity is None else Entry(self, path, identity)

    def make_room(self) -> None:
        """Delete the least recently used entries until the rest fits, and folders left by interrupted writers."""
        entries, total = [], 0
        for folder in _folders(self.folder, ENTRY):
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in folder.iterdir())
                entries.append((folder.stat().st_mtime_ns, size, folder))
                total += size
        for _, size, folder in sorted(entries):
            if total <= self.limit_bytes:
                break
            shutil.rmtree(folder, ignore_errors=True)
            total -= size
        for folder in _folders(self.folder, UNFINISHED):
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(folder, ignore_errors=True)


class Entry:
    """Everything cached about one file."""

    def __init__(self, cache: Cache, path: Path, identity: tuple[str, ...]) -> None:
        self._cache, self._path, self._identity = cache, path, identity
        place = _digest(identity[0])
        self.folder = cache.folder / f"{place}-{_digest(*identity, str(LAYOUT), code_version())}"
        self._same_path = re.compile(rf"{place}-[0-9a-f]{{16}}\Z")

    def traces(self, read: Callable[[Path], list[Trace]]) -> list[Trace]:
        """Load the traces from the cache, or read them with ``read`` and save them."""
        stored = self.load()
        if stored is not None:
            return stored
        traces = read(self._path)
        self.save(traces)
        return traces

    def load(self) -> list[Trace] | None:
        if not _is_ours(self._cache.folder):
            return None
        try:
            traces = load_traces(self.folder, str(self._path))
            os.utime(self.folder)
        except BROKEN:
            return None
        return traces

    def save(self, traces: list[Trace]) -> bool:
        """Save the traces and return whether that worked; it fails if the file has changed in the meantime."""
        try:
            private_folder(self._cache.folder)
            if not _is_ours(self._cache.folder) or _identity(self._path) != self._identity:
                return False
            made = Path(tempfile.mkdtemp(prefix="new-", dir=self._cache.folder))
        except OSError:
            return False
        try:
            save_traces(made, traces)
            for old in _folders(self._cache.folder, self._same_path):
                shutil.rmtree(old, ignore_errors=True)
            made.rename(self.folder)
        except (*BROKEN, TypeError, OverflowError):
            # A full disk, values that cannot be stored, or another process was first: its entry is equally good.
            return (self.folder / INDEX).exists()
        finally:
            shutil.rmtree(made, ignore_errors=True)
        self._cache.make_room()
        return self.folder.exists()

    def results(self, name: str, decode: Callable[[bytes], Found]) -> Found | None:
        """Return what ``keep`` stored under this name."""
        if not _is_ours(self._cache.folder):
            return None
        try:
            found = decode(read_sealed(self.folder / name))
            os.utime(self.folder)
        except BROKEN:
            return None
        return found

    def keep(self, name: str, data: bytes) -> bool:
        """Store data for ``results`` and return whether that worked; it fails if the traces are not cached."""
        return self.add(name, lambda path: write_sealed(path, data))

    def add(self, name: str, write: Callable[[Path], None]) -> bool:
        """Add a file created by ``write`` to the entry; return whether that worked."""
        try:
            if not _is_ours(self._cache.folder):
                return False
            with tempfile.TemporaryDirectory(prefix="new-", dir=self._cache.folder) as made:
                new = Path(made) / name
                write(new)
                new.replace(self.folder / name)
        except OSError:
            return False
        return True


@cache
def code_version() -> str:
    """Hash all code that reads and analyzes traces."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(str(source).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _identity(path: Path) -> tuple[str, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    numbers = (found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)
    return (str(path.absolute()), *map(str, numbers))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _is_ours(folder: Path) -> bool:
    """Check that only this user can write to the folder."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _folders(inside: Path, named: re.Pattern[str]) -> Iterator[Path]:
    try:
        found = list(inside.iterdir())
    except OSError:
        return
    yield from (path for path in found if named.match(path.name) and path.is_dir())


# -- opening files ----------------------------------------------------------------------------------------------------


def open_traces(path: Path, cache: Cache | None) -> list[Trace]:
    """Return the traces of a file of any format, from the cache if possible.

    An Nsight Systems export has one trace per process that used a GPU; other files have one.
    """
    entry = cache.entry(path) if cache is not None else None
    return read_traces(path) if entry is None else entry.traces(read_traces)

"""Which files are traces, and reading one from torch.profiler: plain, gzip or Zstandard."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from stepscope.errors import TraceError
from stepscope.traces.model.columns import Trace
from stepscope.traces.reading.kineto import read_kineto

__all__ = [
    "CAPTURE_FILES",
    "ENDINGS",
    "GZIP",
    "TIMELINE",
    "blocks_of",
    "find_traces",
    "is_sqlite",
    "may_be_trace",
    "read_trace",
    "read_traces",
]


# -- decompression ----------------------------------------------------------------------------------------------------
# Files as blocks of plain bytes; the first bytes of a file decide on the compression, not its name. Whatever the
# compression ratio, only one block is in memory at a time. ``kineto_events.py`` limits how much text is accepted.

BLOCK = 512 << 10
"""Plain bytes per block. The events of larger blocks leave the CPU cache before they are used; with smaller ones the
overhead per block shows.
"""
PACKED = 64 << 10
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SQLITE: Final = b"SQLite format 3\0"
FOREIGN: Final = {
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\xfd7zXZ\x00": "compressed with xz: decompress it first (unxz)",
    b"BZh": "compressed with bzip2: decompress it first (bunzip2)",
    b"\x04\x22\x4d\x18": "compressed with lz4: decompress it first (unlz4)",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive: unpack it first",
    SQLITE: "an SQLite database",
    b"PAR1": "a Parquet file",
    b"\x7fELF": "a program",
    b"%PDF": "a PDF",
}
"""Formats by their first bytes."""


def foreign_format(start: bytes) -> str | None:
    """Name the format of a file that begins like this, if it is known but not supported."""
    return next((words for magic, words in FOREIGN.items() if start.startswith(magic)), None)


def blocks_of(path: Path, cut: list[str] | None = None) -> Iterator[bytes]:
    """Yield the file's blocks; if the compressed data end early or are damaged, the reason is added to ``cut``."""
    cut = [] if cut is None else cut
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
            raise TraceError(f"{path}: {what}, not a regular file")
        with path.open("rb") as file:
            start = file.read(16)
            file.seek(0)
            if start.startswith(GZIP):
                yield from _gunzipped(file, cut)
            elif start.startswith(ZSTD):
                yield from _unzstd(file, cut)
            elif words := foreign_format(start):
                raise TraceError(f"{path}: is {words}")
            else:
                while block := file.read(BLOCK):
                    yield block
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _gunzipped(file: BinaryIO, cut: list[str]) -> Iterator[bytes]:
    """Decompress all members in sequence; a member that ends early yields everything it contained."""
    from zlib_ng import zlib_ng

    damaged: Any = zlib_ng.error
    packed = file.read(PACKED)
    member: Any = zlib_ng.decompressobj(wbits=31)
    while True:
        try:
            block = member.decompress(packed, BLOCK)
        except damaged as error:
            cut.append(f"the compressed data is damaged ({error})")
            return
        if block:
            yield block
        if member.eof:
            packed = (member.unused_data or file.read(PACKED)).lstrip(b"\0")
            while not packed and (more := file.read(PACKED)):
                packed = more.lstrip(b"\0")
            if packed and len(packed) < len(GZIP):
                packed += file.read(PACKED)
            if not packed:
                return
            if not packed.startswith(GZIP):
                cut.append("other data follows the compressed data")
                return
            member = zlib_ng.decompressobj(wbits=31)
        else:
            packed = member.unconsumed_tail or file.read(PACKED)
            if not packed and not block:
                cut.append("the compressed data ends early")
                return


def _unzstd(file: BinaryIO, cut: list[str]) -> Iterator[bytes]:
    import zstandard

    with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False) as source:
        while True:
            try:
                block = source.read(BLOCK)
            except zstandard.ZstdError as error:
                cut.append(f"the compressed data is damaged ({error})")
                return
            if not block:
                return
            yield block


# -- finding and reading traces ---------------------------------------------------------------------------------------

ENDINGS: Final = (".json", ".json.gz", ".json.zst", ".sqlite", ".nsys-rep", ".qdrep")
"""File name endings searched for in folders; a file given by name may be called anything."""
REPORTS: Final = (".nsys-rep", ".qdrep")
LOOKED_AT: Final = 1 << 20
"""Bytes of a file in a folder within which a trace must have begun its events or at least look like a trace."""

CAPTURE_FILES: Final = ("capture.json", "analysis.json")
"""Beside the traces of a capture: its record, and what was found (``store/captures.py``)."""
TIMELINE: Final = b'{"stepscope":{"timeline":1}'
"""The beginning of Stepscope's own merged timelines (``exports.py``): they are not another rank."""


def find_traces(paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Return the given files and the traces below the given folders, each once, by name; also what was skipped.

    A file given by name must be a trace, which is checked when it is read; a folder may contain other files.
    """
    found: dict[Path, None] = {}
    notices: list[str] = []
    for path in paths:
        if not path.is_dir():
            found[path] = None
            continue
        below = sorted(file for file in _below(path) if file.is_file())
        traces = {file: None for file in below if may_be_trace(file)}
        if not traces:
            endings = ", ".join(ENDINGS[:-2])
            raise TraceError(f"{path}: no traces found in this folder (files ending in {endings})")
        foreign = [file for file in below if file not in traces and not _describes_capture(file)]
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            notices.append(f"skipped, not a trace (or a --perfetto timeline): {foreign[0]}{more}")
        found.update(traces)
    return list(found), notices


def _describes_capture(file: Path) -> bool:
    return file.name in CAPTURE_FILES and all((file.parent / name).exists() for name in CAPTURE_FILES)


def _below(folder: Path) -> list[Path]:
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise TraceError(f"{folder}: {error.strerror or error}") from None
    # Not rglob(), which raises if a folder goes away while it is read, as in a folder that is watched.
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names if name.endswith(ENDINGS)]


def may_be_trace(path: Path) -> bool:
    """Judge a file by its first bytes; an unreadable file counts as a trace, so that reading it reports the reason."""
    if not path.name.endswith(ENDINGS[:3]):
        return True
    start = bytearray()
    try:
        for block in blocks_of(path):
            start += block
            if len(start) >= LOOKED_AT:
                break
    except TraceError:
        return True
    if start.startswith(TIMELINE):
        return False
    text = bytes(start).removeprefix(b"\xef\xbb\xbf").lstrip()
    return not text or b'"traceEvents"' in text or (text.startswith(b"[") and b'"ph"' in text)


def _foreign(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Pass blocks through; reject Stepscope's own timelines."""
    for number, block in enumerate(blocks):
        if not number and block.startswith(TIMELINE):
            raise TraceError("is a timeline written by --perfetto; read the traces it was made from")
        yield block


def read_trace(path: Path) -> Trace:
    """Read a trace from torch.profiler, or another trace that Chrome can open."""
    if path.name.endswith(REPORTS):
        raise TraceError(f"{path}: is an Nsight Systems report; export it first: nsys export --type sqlite")
    cut: list[str] = []
    try:
        trace = read_kineto(_foreign(blocks_of(path, cut)), str(path))
    except TraceError as error:
        because = f" ({cut[0]})" if cut else ""
        raise TraceError(str(error) if str(error).startswith(f"{path}:") else f"{path}: {error}{because}") from None
    if not cut:
        return trace
    problems = (f"{cut[0]}; everything before is used", *trace.meta.problems)
    return replace(trace, meta=replace(trace.meta, problems=problems))


def is_sqlite(path: Path) -> bool:
    """Test whether the file is an SQLite database of any kind."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False


def read_traces(path: Path) -> list[Trace]:
    """Read a file, whatever its format, without the cache.

    An Nsight Systems export has one trace per process that used a GPU; other files have one.
    """
    # Imported late: most files are Kineto's.
    if not is_sqlite(path):
        return [read_trace(path)]
    from stepscope.traces.reading.nsight import read_nsight

    return read_nsight(path)

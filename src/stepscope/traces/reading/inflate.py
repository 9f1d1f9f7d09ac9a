"""Files as blocks of plain bytes, whatever they were packed with; the first bytes decide, not the name.

However much comes out of how little, no more than a block of it is held at a time: what a packed file may grow to is
for those to judge who look at the text (``text.py``).
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from stepscope.errors import TraceError

__all__ = ["blocks_of", "foreign_format"]

BLOCK = 512 << 10
"""Of plain bytes.  The events of larger ones leave the cache before they are used; of smaller ones the work per block,
not per event, is felt."""
PACKED = 64 << 10
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
FOREIGN: Final = {
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\xfd7zXZ\x00": "packed with xz: unpack it first (unxz)",
    b"BZh": "packed with bzip2: unpack it first (bunzip2)",
    b"\x04\x22\x4d\x18": "packed with lz4: unpack it first (unlz4)",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive: unpack it first",
    b"SQLite format 3\x00": "an SQLite database",
    b"PAR1": "a Parquet file",
    b"\x7fELF": "a program",
    b"%PDF": "a PDF",
}
"""Formats by their first bytes."""


def foreign_format(start: bytes) -> str | None:
    """What a file is that begins like this, if it is something that is known but not read here."""
    return next((words for magic, words in FOREIGN.items() if start.startswith(magic)), None)


def blocks_of(path: Path, cut: list[str] | None = None) -> Iterator[bytes]:
    """``cut`` gets a line where the packed data end early or go wrong; what came before was given."""
    cut = [] if cut is None else cut
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise TraceError(f"{path}: is {'a folder' if stat.S_ISDIR(mode) else 'a pipe or device'}, not a file")
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
    """All members, one after the other; a member that ends early has given all that was in it."""
    from zlib_ng import zlib_ng

    damaged: Any = zlib_ng.error
    packed = file.read(PACKED)
    member: Any = zlib_ng.decompressobj(wbits=31)
    while True:
        try:
            block = member.decompress(packed, BLOCK)
        except damaged as error:
            cut.append(f"the packed data are damaged ({error})")
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
                cut.append("something else follows the packed data")
                return
            member = zlib_ng.decompressobj(wbits=31)
        else:
            packed = member.unconsumed_tail or file.read(PACKED)
            if not packed and not block:
                cut.append("the packed data end early")
                return


def _unzstd(file: BinaryIO, cut: list[str]) -> Iterator[bytes]:
    import zstandard

    with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False) as source:
        while True:
            try:
                block = source.read(BLOCK)
            except zstandard.ZstdError as error:
                cut.append(f"the packed data are damaged ({error})")
                return
            if not block:
                return
            yield block

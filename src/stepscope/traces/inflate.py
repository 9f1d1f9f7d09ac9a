"""Files as blocks of plain bytes, whatever they were packed with; the first bytes decide, not the name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepscope.errors import TraceError

__all__ = ["blocks_of"]

BLOCK = 1 << 20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def blocks_of(path: Path, cut: list[str] | None = None) -> Iterator[bytes]:
    """``cut`` gets a line where the packed data end early; what came before was given."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            magic = file.read(4)
            file.seek(0)
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror}") from None
        source: Any = file
        broken: Any = (EOFError,)
        if magic.startswith(GZIP):
            from zlib_ng import gzip_ng, zlib_ng

            source = stack.enter_context(gzip_ng.open(file, "rb"))
            broken = (EOFError, gzip_ng.BadGzipFile, zlib_ng.error)
        elif magic.startswith(ZSTD):
            import zstandard

            source = stack.enter_context(zstandard.ZstdDecompressor().stream_reader(file))
            broken = (EOFError, zstandard.ZstdError)
        while True:
            try:
                block = source.read(BLOCK)
            except broken as error:
                if cut is not None:
                    cut.append(str(error))
                return
            if not block:
                return
            yield block

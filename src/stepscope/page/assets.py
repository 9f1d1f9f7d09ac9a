"""The built files of the page, as they lie in the package.

``make page`` (or the build of a wheel) puts them there; a checkout without Node.js has none, and everything else works.
Their names carry a checksum, so that a browser may keep them for ever; ``index.html`` alone is asked for again.
"""

from __future__ import annotations

import gzip
import mimetypes
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

__all__ = ["INDEX", "Asset", "find_asset", "is_built"]

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
_BEST = 9


@dataclass(frozen=True, kw_only=True)
class Asset:
    data: bytes
    media_type: str

    @cached_property
    def packed(self) -> bytes:
        """The same, by gzip."""
        return gzip.compress(self.data, _BEST, mtime=0)


def is_built() -> bool:
    return (STATIC / INDEX).is_file()


@lru_cache(maxsize=16)
def find_asset(name: str) -> Asset | None:
    """``index.html``, or ``assets/NAME``; None for anything else."""
    folder, _, file = name.rpartition("/")
    if folder not in ("", "assets") or file.startswith(".") or (not folder and file != INDEX):
        return None
    try:
        data = (STATIC / folder / file).read_bytes()
    except (OSError, ValueError):
        return None
    kind = mimetypes.guess_type(file)[0] or "application/octet-stream"
    return Asset(data=data, media_type=kind)

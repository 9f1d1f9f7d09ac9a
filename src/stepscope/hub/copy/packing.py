"""Numbers in little room, and the container that they and the documents travel in.

    0    4s   magic  b"STCP"
    4    u16  version
    6    u16  0
    8    u32  length of the JSON that follows
    12   ...  JSON: ``{"schema", "run", …, "answers": {resource: document}, "maps": {…}, "files": {…}}``
         ...  blobs, which the JSON names by their place behind it

All of it goes through gzip once.  Times are kept as a logarithm in steps of a quarter of a percent: whatever its size,
a time is off by an eighth of a percent at most, which no chart shows and no figure of three digits tells.  A code is a
u16, 0 where nothing is known and 1 for zero; all low bytes stand before all high ones, which gzip likes better.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Blobs", "rounded", "wrap"]

HEAD = struct.Struct("<4sHHI")
MAGIC = b"STCP"
VERSION = 1
STEP = 0.0025
"""Between two codes, of the natural logarithm."""
UNKNOWN, ZERO, FIRST = 0, 1, 2
MOST_CODE = 0xFFFF
_LEVEL = 9


class Blobs:
    """What stands behind the JSON, as it is put there."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.length = 0

    def put(self, data: bytes) -> list[int]:
        """Where it is, and how long."""
        place = [self.length, len(data)]
        self._parts.append(data)
        self.length += len(data)
        return place

    def times(self, values: ArrayLike) -> dict[str, Any]:
        """Any shape, flat; what is not above zero is zero.  ``least``: what the first code stands for."""
        flat = np.asarray(values, np.float64).reshape(-1)
        known = flat[np.isfinite(flat) & (flat > 0)]
        least = float(known.min()) if known.size else 1.0
        with np.errstate(invalid="ignore", divide="ignore"):
            codes = np.round(np.log(flat / least) / STEP) + FIRST
        codes[~(flat > 0)] = ZERO
        codes[~np.isfinite(flat)] = UNKNOWN
        kept = np.minimum(codes, MOST_CODE).astype("<u2")
        planes = kept.view(np.uint8).reshape(-1, 2).T
        return {"times": self.put(np.ascontiguousarray(planes).tobytes()), "least": least, "step": STEP}

    def join(self) -> bytes:
        return b"".join(self._parts)


def wrap(document: Mapping[str, Any], blobs: Blobs) -> bytes:
    text = msgspec.json.encode(document)
    return gzip.compress(HEAD.pack(MAGIC, VERSION, 0, len(text)) + text + blobs.join(), _LEVEL, mtime=0)


def rounded(values: Sequence[Any], digits: int = 4) -> list[Any]:
    """To so many digits, whole where they were whole; None stays."""
    numbers: NDArray[np.float64] = np.array([np.nan if value is None else value for value in values], np.float64)
    known = np.isfinite(numbers) & (numbers != 0)
    unit = np.ones(len(numbers))
    unit[known] = 10.0 ** (np.floor(np.log10(np.abs(numbers[known]))) - digits + 1)
    whole = np.array([type(value) is int for value in values], bool)
    unit[whole] = np.maximum(unit[whole], 1.0)
    short = np.round(numbers / unit) * unit
    made: list[Any] = []
    for value, number, integer in zip(values, short.tolist(), whole.tolist(), strict=True):
        made.append(None if value is None else int(number) if integer else float(f"{number:.{digits}g}"))
    return made

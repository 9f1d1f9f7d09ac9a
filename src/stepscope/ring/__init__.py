"""The ring: a training process publishes what it does without ever waiting for a reader.

Each process has one memory-mapped file with one writer (``RingWriter``, in the training process) and any number of
readers (``RingReader``, in the agent). Standard library only.

Why words and not records: packing a 256-byte record with its crc32 took 26 µs between kernels against 3 µs in a tight
loop, and ``time.thread_time_ns`` alone 15 µs. So the process writes words only; the reader does the arithmetic, there
is no checksum, and the agent samples CPU time. A thread in the training process would compete for the GIL exactly
when the loop is host-bound, and a socket can block; writing mapped memory can do neither and survives the process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.ring.layout import RingState
    from stepscope.ring.reader import LastCollective, LivePhase, RingBatch, RingHeader, RingReader, split
    from stepscope.ring.requests import announce_request
    from stepscope.ring.writer import RingWriter

__all__ = [
    "LastCollective",
    "LivePhase",
    "RingBatch",
    "RingHeader",
    "RingReader",
    "RingState",
    "RingWriter",
    "announce_request",
    "split",
]

_FOUND_IN = {"RingState": "layout", "RingWriter": "writer", "announce_request": "requests"}
"""All other names are defined in the reader, which a training process does not load."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FOUND_IN.get(name, 'reader')}"), name)

"""One file → the traces in it, whatever wrote it, from the cache where it was read before."""

from __future__ import annotations

from pathlib import Path

from stepscope.traces.cache.store import Cache
from stepscope.traces.model.columns import Trace
from stepscope.traces.reading.read import read_trace

__all__ = ["open_traces", "read_traces"]


def open_traces(path: Path, cache: Cache | None) -> list[Trace]:
    """One trace, or of an export of Nsight Systems one per process that used a GPU."""
    entry = cache.entry(path) if cache is not None else None
    return read_traces(path) if entry is None else entry.traces(read_traces)


def read_traces(path: Path) -> list[Trace]:
    """Afresh."""
    # One of the two readers is never needed, and what is kept needs none.
    from stepscope.traces.reading.nsight import is_nsight, read_nsight

    return read_nsight(path) if is_nsight(path) else [read_trace(path)]

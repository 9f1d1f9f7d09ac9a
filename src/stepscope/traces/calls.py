"""Which slice of a host thread lies inside which."""

from __future__ import annotations

import numpy as np

from stepscope.traces.columns import Rows, Trace

__all__ = ["parents_of"]


def parents_of(trace: Trace, rows: Rows) -> Rows:
    """[slices]; of ``rows`` (ascending) the innermost of them on the same thread that holds it, else −1.

    A slice that begins inside another but ends after it (clocks, asynchronous ranges) is no child of it.
    """
    out = np.full(len(trace), -1, np.int32)
    slices = trace.slices
    threads = slices.thread[rows]
    for thread in np.unique(threads):
        own = rows[threads == thread]
        out[own] = _nested(slices.start_ns[own].tolist(), slices.end_ns[own].tolist(), own.tolist())
    return out


def _nested(starts: list[int], ends: list[int], rows: list[int]) -> list[int]:
    out = []
    open_rows: list[int] = []
    open_ends: list[int] = []
    for start, end, row in zip(starts, ends, rows, strict=True):
        while open_ends and (open_ends[-1] <= start or open_ends[-1] < end):
            if open_ends[-1] > start:
                # Overlaps without holding it: look for a holder further out, but keep it open for what comes.
                break
            open_ends.pop()
            open_rows.pop()
        holder = next((at for at in range(len(open_ends) - 1, -1, -1) if open_ends[at] >= end), -1)
        out.append(open_rows[holder] if holder >= 0 else -1)
        open_ends.append(end)
        open_rows.append(row)
    return out

"""Copies and memsets: how much went where, how fast.

Bandwidth is bytes over the time the copies took (not the time between them), of those copies whose size and time are
known; 10⁹ bytes a second is one byte a nanosecond.  Memory of the host is *pageable* unless it is pinned; a copy from
or to it goes through a buffer of the driver's and keeps the host waiting.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.device.work import Work
from stepscope.traces.model.columns import Ints
from stepscope.traces.model.table import Table, table_of

__all__ = ["bandwidth_table", "bytes_of", "copies_table", "is_pageable"]

POINTS: Final = 500
"""Of the curve, over all directions."""
DIRECTIONS: Final = ("HtoD", "DtoH", "DtoD", "PtoP", "HtoH", "memset", "other")
WRITTEN: Final = (
    (re.compile(r"memset|fillbuffer|memoryfill", re.IGNORECASE), "memset"),
    (re.compile(r"PtoP|peer|P2P", re.IGNORECASE), "PtoP"),
    (re.compile(r"HtoD|HostToDevice|M2D|Host *-> *Device", re.IGNORECASE), "HtoD"),
    (re.compile(r"DtoH|DeviceToHost|D2M|Device *-> *Host", re.IGNORECASE), "DtoH"),
    (re.compile(r"DtoD|DeviceToDevice|D2D|AtoA|DtoA|AtoD", re.IGNORECASE), "DtoD"),
    (re.compile(r"HtoH|HostToHost|M2M", re.IGNORECASE), "HtoH"),
)
ENDS: Final = re.compile(r"\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*$")

COLUMNS: Final = (
    "direction", "memory", "count", "moved_bytes", "total_ns", "time_share", "bandwidth_gbps", "largest_bytes",
    "longest_ns",
)  # fmt: skip


@lru_cache(maxsize=4096)
def _direction(name: str) -> int:
    return DIRECTIONS.index(next((said for pattern, said in WRITTEN if pattern.search(name)), "other"))


def is_pageable(name: str) -> bool:
    return "pageable" in name.lower()


def _memory(name: str) -> str:
    """``Pinned -> Device``; empty: not said."""
    ends = ENDS.search(name)
    return ends.group(1) if ends else ""


def bytes_of(work: Work) -> Ints:
    """[work]; −1: not said, and of kernels."""
    copies = work.window.trace.copies
    out = np.full(len(work), -1, np.int64)
    rows = work.rows[~work.kernel]
    out[~work.kernel] = copies.bytes[np.searchsorted(copies.row, rows)]
    return out


def copies_table(work: Work, sizes: Ints) -> Table:
    """One row per name, that is direction and sort of memory; the one that took longest first."""
    rows = []
    copied = ~work.kernel
    all_ns = int(work.dur_ns[copied].sum())
    for code in np.unique(work.name[copied]).tolist():
        own = copied & (work.name == code)
        name = work.window.trace.strings[code]
        dur_ns, size = work.dur_ns[own], sizes[own]
        total_ns = int(dur_ns.sum())
        moved = int(size[size >= 0].sum())
        rows.append(
            (
                DIRECTIONS[_direction(name)],
                _memory(name),
                len(dur_ns),
                moved,
                total_ns,
                total_ns / all_ns if all_ns else None,
                _bandwidth(dur_ns, size),
                int(size.max()) if size.max() >= 0 else None,
                int(dur_ns.max()),
            )
        )
    return table_of(
        "copies",
        "Copies and memsets",
        COLUMNS,
        sorted(rows, key=lambda row: -row[4]),
        note="Bandwidth: bytes over the time in copies whose size is known.",
    )


def _bandwidth(dur_ns: Ints, size: Ints) -> float | None:
    known = (size >= 0) & (dur_ns > 0)
    time_ns = int(dur_ns[known].sum())
    return int(size[known].sum()) / time_ns if time_ns else None


def bandwidth_table(work: Work, sizes: Ints) -> Table:
    """Bytes in equal stretches of time by direction, as if each copy had gone on evenly."""
    moving = ~work.kernel & (sizes > 0)
    names, which = np.unique(work.name[moving], return_inverse=True)
    direction = np.array([_direction(work.window.trace.text(code)) for code in names.tolist()], np.int64)[which]
    start_ns, end_ns, size = work.start_ns[moving], work.end_ns[moving], sizes[moving]
    rows = []
    present = np.unique(direction).tolist()
    if present:
        first_ns, last_ns = int(work.start_ns.min()), max(int(work.end_ns.max()), int(work.start_ns.min()) + 1)
        edges = np.unique(np.linspace(first_ns, last_ns, POINTS // len(present) + 1).astype(np.int64))
        for each in present:
            own = direction == each
            until = np.rint(_moved_until(edges, start_ns[own], end_ns[own], size[own])).astype(np.int64)
            moved = np.diff(until)
            rows += [
                (DIRECTIONS[each], begin_ns, end - begin_ns, amount, amount / (end - begin_ns))
                for begin_ns, end, amount in zip(edges[:-1].tolist(), edges[1:].tolist(), moved.tolist(), strict=True)
            ]
    return table_of(
        "copy_bandwidth",
        "Bandwidth of copies over time",
        ("direction", "start_ns", "length_ns", "moved_bytes", "bandwidth_gbps"),
        rows,
        note="Over all the time of the device, so that pauses between copies count.",
    )


def _moved_until(times: Ints, start_ns: Ints, end_ns: Ints, size: Ints) -> NDArray[np.float64]:
    """[times]; bytes moved before each; a copy that took no time is there from its start on."""
    at_once = end_ns == start_ns
    last = times == times[-1]
    jumps = np.sort(start_ns[at_once])
    amount = np.concatenate([[0], np.cumsum(size[at_once][np.argsort(start_ns[at_once], kind="stable")])])
    before = np.where(last, len(jumps), np.searchsorted(jumps, times, side="left"))
    out: NDArray[np.float64] = amount[before].astype(np.float64)
    if at_once.all():
        return out
    start_ns, end_ns, size = start_ns[~at_once], end_ns[~at_once], size[~at_once]
    edges = np.concatenate([start_ns, end_ns])
    rate = np.concatenate([size / (end_ns - start_ns), -size / (end_ns - start_ns)])
    order = np.argsort(edges, kind="stable")
    edges, rate = edges[order], np.cumsum(rate[order])
    moved = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(edges))])
    out += np.interp(times, edges, moved)
    return out

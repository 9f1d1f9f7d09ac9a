"""Kernels that run one after the other again and again: what could be fused or put into a CUDA graph.

A sequence is three to six kernels that follow each other on one stream; communication, copies and memsets are left
aside.  Occurrences that overlap (A A A A holds A A A twice) count once, the first.  A sequence that only ever occurs
inside of one longer sequence is left out, as are more than three repetitions of the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.records.short_names import fitted, short_name
from stepscope.traces.device.work import Work
from stepscope.traces.model.columns import Codes, Ints
from stepscope.traces.model.table import Table, table_of

__all__ = ["sequences_table"]

SHORTEST: Final = 3
LONGEST: Final = 6
TWICE: Final = 2
ROWS: Final = 50
NAME_CHARS: Final = 80


@dataclass(frozen=True, kw_only=True)
class _Grams:
    """All windows of one length over the kernels, numbered by what they hold."""

    length: int
    id: NDArray[np.int64]
    """[windows]; −1: it crosses from one stream to the next."""
    count: Ints
    """[ids]; overlapping or not."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Sequences with their sums over all occurrences."""

    length: Ints
    count: Ints
    total_ns: Ints
    span_ns: Ints
    first: Ints
    """Where it occurs first."""


def sequences_table(work: Work) -> Table:
    """The sequences that took longest first."""
    computes = work.kernel & ~work.comm
    at = work.by_lane[computes[work.by_lane]]
    found = _found(work, at)
    order = np.lexsort((found.first, -found.length, -found.total_ns))[:ROWS].tolist()
    all_ns = int(work.dur_ns[at].sum())
    names = work.name[at]
    shown = {code for place in order for code in _codes(names, found, place)}
    short = {code: fitted(short_name(work.window.trace.strings[code]), NAME_CHARS) for code in shown}
    rows = []
    for place in order:
        total_ns = int(found.total_ns[place])
        rows.append(
            (
                " → ".join(short[code] for code in _codes(names, found, place)),
                found.length[place],
                found.count[place],
                total_ns,
                total_ns / all_ns if all_ns else None,
                found.span_ns[place],
                work.window.trace.text(int(work.owner[at[found.first[place]]])),
            )
        )
    table = table_of(
        "sequences",
        "Kernels that follow each other again and again",
        ("kernels", "length", "count", "total_ns", "time_share", "span_ns", "operator"),
        rows,
        note="time_share: of the time in kernels that compute; span_ns: from the start of the first kernel to the end "
        "of the last, gaps and all; operator: of the first kernel where the sequence first occurs.",
    )
    return replace(table, left_out=len(found.length) - len(rows))


def _codes(names: Codes, found: _Found, place: int) -> list[int]:
    """Of its kernels' names."""
    return names[found.first[place] : found.first[place] + found.length[place]].tolist()  # type: ignore[no-any-return]


def _found(work: Work, at: NDArray[np.int64]) -> _Found:
    ids = np.unique(work.name[at], return_inverse=True)[1].reshape(-1).astype(np.int64)
    grams = _grams(ids, work.lane[at])
    start_ns, end_ns = work.start_ns[at], work.end_ns[at]
    until_ns = np.concatenate([[0], np.cumsum(work.dur_ns[at])])
    pieces = []
    for each, longer in zip(grams, [*grams[1:], None], strict=True):
        place = _occurrences(each, longer)
        if each.length > SHORTEST:
            place = place[~_same(ids, each.length)[place]]
        of = each.id[place]
        first = np.flatnonzero(np.diff(of, prepend=-1))
        count = np.diff(np.append(first, len(of)))
        after = place + each.length
        sums = [until_ns[after] - until_ns[place], end_ns[after - 1] - start_ns[place]]
        totals = [np.add.reduceat(column, first) if len(first) else column for column in sums]
        again = count >= TWICE
        columns = (np.full(len(first), each.length), count, *totals, place[first])
        pieces.append([column[again] for column in columns])
    length, count, total_ns, span_ns, where = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
    return _Found(length=length, count=count, total_ns=total_ns, span_ns=span_ns, first=where)


def _grams(ids: NDArray[np.int64], lane: NDArray[np.int64]) -> list[_Grams]:
    """Each length's windows numbered by pairing the shorter one's number with the next kernel's: exact, no hashing."""
    grams = []
    current, width = ids, int(ids.max()) + 1 if len(ids) else 1
    for length in range(2, LONGEST + 1):
        last = ids[length - 1 :]
        inside = lane[length - 1 :] == lane[: len(last)]
        pairs = np.where(inside, current[: len(last)] * width + last, -1)
        values, current, count = np.unique(pairs, return_inverse=True, return_counts=True)
        current = current.reshape(-1)
        if len(values) and values[0] < 0:
            current, count = current - 1, count[1:]
        if length >= SHORTEST:
            grams.append(_Grams(length=length, id=current, count=count))
    return grams


def _same(ids: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """[windows]; is it one kernel over and over?"""
    changes = np.concatenate([[0], np.cumsum(ids[1:] != ids[:-1])])
    last = changes[length - 1 :]
    return np.asarray(last == changes[: len(last)])


def _occurrences(grams: _Grams, longer: _Grams | None) -> NDArray[np.int64]:
    """Places of sequences that occur at least twice, without overlaps: sequence by sequence, each ascending."""
    wanted = grams.count >= TWICE
    if longer is not None:
        wanted[_inside_longer(grams, longer)] = False
    place = np.flatnonzero(grams.id >= 0)
    place = place[wanted[grams.id[place]]]
    place = place[np.argsort(grams.id[place], kind="stable")]
    of = grams.id[place]
    close = (np.diff(of) == 0) & (np.diff(place) < grams.length)
    overlaps = np.zeros(len(grams.count), bool)
    overlaps[of[1:][close]] = True
    keep = np.ones(len(place), bool)
    doubtful = np.flatnonzero(overlaps[of])
    keep[doubtful] = _first_ones(of[doubtful].tolist(), place[doubtful].tolist(), grams.length)
    return place[keep]


def _inside_longer(grams: _Grams, longer: _Grams) -> NDArray[np.int64]:
    """Sequences of which every occurrence is the beginning, or the end, of one and the same longer sequence."""
    at = np.flatnonzero(longer.id >= 0)
    count = longer.count[longer.id[at]]
    return np.concatenate([own[grams.count[own] == count] for own in (grams.id[at], grams.id[at + 1])])


def _first_ones(of: list[int], place: list[int], length: int) -> list[bool]:
    """[places]; of each sequence the first, then each that does not overlap the last one kept."""
    keep = [False] * len(of)
    current, free = -1, 0
    for at, (each, where) in enumerate(zip(of, place, strict=True)):
        if where >= free or each != current:
            keep[at] = True
            current, free = each, where + length
    return keep

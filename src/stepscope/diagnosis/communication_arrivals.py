"""Who waited for whom: the n-th collective of a group in a step, compared over the ranks of the group.

Clocks of two machines say nothing to each other; but all ranks leave a collective at about the same time, so the rank
that spent least time in it came last.  Its time is the exchange itself, and what the others took beyond it was waiting.
On NCCL the time of its kernel on the device says the same, in collectives that are known by their number in the group.
That holds for operations in which every rank waits for every other; of a broadcast the root may be gone before the last
one comes, so it and its like are not compared, nor are sends and receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.records.collectives import (
    FLAG_ASYNC,
    FLAG_DEVICE,
    FLAG_WAITED,
    MAX_GROUPS,
    OPS,
    PHASE_SHIFT,
    kept_by_itself,
)
from stepscope.records.series import RankSeries

__all__ = ["MUTUAL", "Arrivals", "align"]

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

MUTUAL = np.isin(OPS, ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))
"""By operation: whether every rank waits for every other."""
LOOKED_AT = 500_000
"""Rows over all ranks; of more, every second or third … of the steps is left out."""
SEEN = np.dtype(
    [
        *((name, np.intp) for name in ("row", "group", "place", "nth", "op", "phase")),
        ("bytes", np.float64),
        ("took_ns", np.float64),
    ]
)
"""One rank in one collective."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """N collectives that all ranks of their group were seen in; M memberships, of a rank in a group."""

    group: Ints
    """[N]; its place in ``Communication.groups``."""
    op: Ints
    """[N]; as in ``OPS``."""
    place: Ints
    """[N]; its step, as a place in the window."""
    bytes: Floats
    """[N]; per rank."""
    transfer_ns: Floats
    """[N]; what the rank that came last took: the exchange itself."""
    skew_ns: Floats
    """[N]; by how much it came after the first."""
    member_group: Ints
    """[M]."""
    member_row: Ints
    """[M]; of the window."""
    waited_ns: Floats
    """[M]; for later ranks, in all."""
    last: Ints
    """[M]; how often it was the last, and somebody had to wait."""
    late_ns: Floats
    """[M]; what each of the others waited for it then, in all."""
    call_row: Ints
    """[K]; of the window: one rank in one collective on the device, whether all ranks were seen in it or not."""
    call_place: Ints
    """[K]; its step."""
    call_phase: Ints
    """[K]; the slot of the phase in which it was called."""
    call_wait_ns: Floats
    """[K]; how long it waited for later ranks; nan where not all were seen."""


def align(
    trained: Sequence[RankSeries],
    steps: NDArray[np.int64],
    steady: NDArray[np.bool_],
    by_slot: Sequence[Mapping[int, int]],
    aligned: NDArray[np.bool_],
    on_device: NDArray[np.bool_],
) -> Arrivals:
    """``by_slot``: of each rank, slot → group; ``aligned`` [groups]: those that may be compared.

    ``on_device`` [groups]: those of which the device's own times are known; what the host saw of them does not count.
    """
    looked_at = _looked_at(trained, steps, steady)
    seen = np.concatenate(
        [
            _of_rank(row, series, steps, looked_at, by_slot[row], aligned, on_device)
            for row, series in enumerate(trained)
        ]
    )
    numbers, nth = np.unique(seen["nth"], return_inverse=True)  # a group's own numbers may be large
    key = (seen["group"] * len(steps) + seen["place"]) * (len(numbers) + 1) + nth
    seen = seen[np.argsort(key, kind="stable")]
    starts, counts = _runs(seen["group"], seen["place"], seen["nth"])
    members = np.bincount([group for own in by_slot for group in set(own.values())], minlength=len(aligned))
    calls = seen
    whole = np.zeros(len(starts), np.bool_)
    if len(starts):
        whole = counts == members[seen["group"][starts]]
        whole &= np.minimum.reduceat(seen["op"], starts) == np.maximum.reduceat(seen["op"], starts)
        waits = np.where(np.repeat(whole, counts), calls["took_ns"], np.nan)
        waits -= np.repeat(np.minimum.reduceat(calls["took_ns"], starts), counts)
        own = on_device[calls["group"]]
        calls, waits = calls[own], waits[own]
        seen, counts = seen[np.repeat(whole, counts)], counts[whole]
    else:
        waits = np.zeros(0)
    return _compared(seen, counts, calls, waits)


def _compared(seen: NDArray[Any], counts: Ints, calls: NDArray[Any], call_wait_ns: Floats) -> Arrivals:
    """``counts`` [N]: so many rows of ``seen``, one for each rank, are of the n-th collective."""
    starts = np.cumsum(counts) - counts
    took = seen["took_ns"]
    # An index that stands at the end would ask for an empty stretch.
    least, most = (ufunc.reduceat(took, starts) if len(starts) else np.zeros(0) for ufunc in (np.minimum, np.maximum))
    waits = took - np.repeat(least, counts)
    number = np.repeat(np.arange(len(counts)), counts)
    late = np.bincount(number, waits, minlength=len(counts)) / np.maximum(counts - 1, 1)
    # The first of its rows that did not wait; two that did not came together.
    at_end = np.flatnonzero(waits == 0)
    last = at_end[np.unique(number[at_end], return_index=True)[1]]
    stride = int(seen["row"].max(initial=0)) + 1
    pairs, member = np.unique(seen["group"] * stride + seen["row"], return_inverse=True)
    mattered = most - least >= thresholds.EXCESS_FLOOR_NS
    last_member = member[last][mattered]
    return Arrivals(
        group=seen["group"][starts],
        op=seen["op"][starts],
        place=seen["place"][starts],
        bytes=np.bincount(number, seen["bytes"], minlength=len(counts)) / np.maximum(counts, 1),
        transfer_ns=least,
        skew_ns=most - least,
        member_group=pairs // stride,
        member_row=pairs % stride,
        waited_ns=_sums(member, waits, len(pairs)),
        last=np.bincount(last_member, minlength=len(pairs)),
        late_ns=_sums(last_member, late[mattered], len(pairs)),
        call_row=calls["row"],
        call_place=calls["place"],
        call_phase=calls["phase"],
        call_wait_ns=call_wait_ns,
    )


def _sums(at: Ints, values: Floats, count: int) -> Floats:
    return np.asarray(np.bincount(at, values, minlength=count), np.float64)


def _runs(*keys: Ints) -> tuple[Ints, Ints]:
    """Where in sorted rows a new key begins, and how many rows have it."""
    new = np.ones(len(keys[0]), np.bool_)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    starts = np.flatnonzero(new)
    return starts, np.diff(np.append(starts, len(new)))


def _looked_at(trained: Sequence[RankSeries], steps: NDArray[np.int64], steady: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[S]; steady steps whose collectives were kept; of a large job not all of them."""
    kept = np.array([kept_by_itself(int(step)) for step in steps], np.bool_) & steady
    rows = sum(len(series.collectives) for series in trained if series.collectives is not None)
    places = np.flatnonzero(kept)[:: -(-rows // LOOKED_AT) or 1]
    chosen = np.zeros(len(steps), np.bool_)
    chosen[places] = True
    return chosen


def _of_rank(
    row: int,
    series: RankSeries,
    steps: NDArray[np.int64],
    looked_at: NDArray[np.bool_],
    by_slot: Mapping[int, int],
    aligned: NDArray[np.bool_],
    on_device: NDArray[np.bool_],
) -> NDArray[Any]:
    rows = series.collectives
    if rows is None:
        return np.zeros(0, SEEN)
    number = np.full(MAX_GROUPS, -1, np.intp)
    for slot, group in by_slot.items():
        number[slot] = group if aligned[group] else -1
    groups = number[rows["group"]]
    place = np.minimum(np.searchsorted(steps, rows["step"]), len(steps) - 1)
    chosen = (groups >= 0) & looked_at[place] & (steps[place] == rows["step"]) & MUTUAL[rows["op"]]
    timed = np.append(on_device, False)[groups]
    chosen &= (rows["flags"] & np.where(timed, FLAG_DEVICE, FLAG_WAITED)) > 0
    rows, timed = rows[chosen], timed[chosen]
    seen = np.zeros(len(rows), SEEN)
    seen["row"], seen["group"], seen["place"] = row, groups[chosen], place[chosen]
    seen["op"], seen["bytes"] = rows["op"], rows["bytes"]
    seen["phase"] = rows["flags"] >> PHASE_SHIFT
    called_ns = (rows["end_ns"] - rows["start_ns"]).astype(np.int64)
    # Of one that runs beside the computation, what could not be hidden.
    hidden = (rows["flags"] & FLAG_ASYNC) > 0
    seen["took_ns"] = np.where(hidden & ~timed, rows["exposed_ns"].astype(np.int64), called_ns).clip(0)
    # Sends and receives stand between them on some ranks only, so the host's own numbers do not do.
    order = np.argsort(seen["place"] * len(aligned) + seen["group"], kind="stable")
    seen = seen[order]
    starts, counts = _runs(seen["group"], seen["place"])
    counted = np.arange(len(seen)) - np.repeat(starts, counts)
    seen["nth"] = np.where(timed[order], rows["nth"][order], counted)
    return seen

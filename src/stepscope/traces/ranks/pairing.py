"""Pairing of collectives: the n-th collective of a group is the same on all its ranks.

Collectives with a sequence number are paired by it. The others are counted within a profiler step, since profilers
start and stop at slightly different instants. They are counted by operation and, if all ranks report the bytes and
these must agree (all_reduce, broadcast, reduce), also by bytes: two threads may start two collectives in either order.

If the counts of ranks differ within a step (a file is truncated, or begins in the middle), each rank is aligned with
the one that has most, where the ends fit best: where their distances vary least or, with too few of them, where they
are nearest. Collectives that no other rank has are left out, as are sends and receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import Ints, Numbering
from stepscope.traces.rank_collectives import OPS, POINT_TO_POINT, ProcessGroup

if TYPE_CHECKING:
    from stepscope.traces.rank import RankAnalysis

__all__ = ["Pairs", "pair"]

SAME_BYTES = tuple(OPS.index(op) for op in ("all_reduce", "broadcast", "reduce"))
MAX_SHIFTS = 64
"""Number of alignments tried for a shorter list; beyond it, only both ends."""
ENOUGH = 3
"""Minimum number of distances to measure their variation."""
NO_STEP = -(1 << 40)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """A *part* is one rank's collective, a *whole* all parts that belong together; sorted by whole, then by rank."""

    ranks: tuple[int, ...]
    groups: tuple[ProcessGroup, ...]
    whole: NDArray[np.int64]
    """[parts]; index of the whole, ascending."""
    rank: NDArray[np.int32]
    """[parts]; index into ``ranks``."""
    entry: NDArray[np.int64]
    """[parts]; index into the rank's exchanges."""
    start_ns: Ints
    """[parts]; on the rank's own clock."""
    end_ns: Ints
    first: NDArray[np.int64]
    """[wholes]; index of its first part."""
    group: NDArray[np.int32]
    """[wholes]; index into ``groups``."""
    op: NDArray[np.int8]
    step: Ints
    """[wholes]; the profiler's step number; −1: outside of steps."""
    sequence: Ints
    bytes: Ints
    """[wholes]; the maximum that a rank reports; −1: unknown."""
    alone: tuple[int, ...]
    """By rank: collectives that no other rank has."""
    peer_to_peer: int
    unknown_group: int
    """Collectives of all ranks whose group is not in the trace."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """[wholes]; number of ranks."""
        return np.diff(np.append(self.first, len(self.whole)))


def pair(analyses: Sequence[RankAnalysis]) -> Pairs:
    """Pair the collectives; ``analyses`` are in rank order."""
    groups: Numbering[Any] = Numbering()
    details: dict[int, ProcessGroup] = {}
    parts = [_columns(place, analysis, groups, details) for place, analysis in enumerate(analyses)]
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else dict(NOTHING)
    peer_to_peer = np.isin(table["op"], POINT_TO_POINT)
    unknown = ~peer_to_peer & (table["group"] < 0)
    table = {name: values[~peer_to_peer & ~unknown] for name, values in table.items()}
    table = _numbered(table)
    size = np.bincount(table["whole"])
    together = size[table["whole"]] > 1
    alone = np.bincount(table["rank"][~together], minlength=len(analyses))
    table = {name: values[together] for name, values in table.items()}
    _, first, whole = np.unique(table["whole"], return_index=True, return_inverse=True)
    most = np.maximum.reduceat(table["bytes"], first) if len(first) else table["bytes"]
    return Pairs(
        ranks=tuple(analysis.rank for analysis in analyses),
        groups=tuple(details[code] for code in range(len(groups))),
        whole=whole.reshape(-1),
        rank=table["rank"].astype(np.int32),
        entry=table["entry"],
        start_ns=table["start_ns"],
        end_ns=table["end_ns"],
        first=first,
        group=table["group"][first].astype(np.int32),
        op=table["op"][first].astype(np.int8),
        step=np.where(table["step"][first] == NO_STEP, -1, table["step"][first]),
        sequence=table["sequence"][first],
        bytes=most,
        alone=tuple(alone.tolist()),
        peer_to_peer=int(peer_to_peer.sum()),
        unknown_group=int(unknown.sum()),
    )


NAMES = ("rank", "entry", "group", "op", "sequence", "bytes", "step", "start_ns", "end_ns")
NOTHING = {name: np.empty(0, np.int64) for name in NAMES}


def _columns(
    place: int, analysis: RankAnalysis, groups: Numbering[Any], details: dict[int, ProcessGroup]
) -> dict[str, NDArray[np.int64]]:
    exchanges = analysis.exchanges
    codes = [groups[group.identity] for group in exchanges.groups]
    for code, group in zip(codes, exchanges.groups, strict=True):
        details.setdefault(code, group)
    # Without profiler steps the whole trace is one step, whatever its start and end.
    numbers = np.array([*(step.number if step.name else NO_STEP for step in analysis.steps), NO_STEP], np.int64)
    return {
        "rank": np.full(len(exchanges), place, np.int64),
        "entry": np.arange(len(exchanges)),
        "group": np.array([*codes, -1], np.int64)[exchanges.group],
        "op": exchanges.op.astype(np.int64),
        "sequence": exchanges.sequence,
        "bytes": exchanges.bytes,
        "step": numbers[exchanges.step],
        "start_ns": exchanges.start_ns,
        "end_ns": exchanges.end_ns,
    }


def _numbered(table: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    """Add a column ``whole``, and sort by it and by rank."""
    told = table["sequence"] >= 0
    kind = table["group"] * len(OPS) + table["op"]
    size = np.where(np.isin(table["op"], SAME_BYTES) & ~told, table["bytes"], -1)
    if len(kind):
        silent = np.bincount(kind, weights=size < 0) > 0
        size = np.where(silent[kind], -1, size)
    place = np.where(told, table["sequence"], table["step"])
    keys = (kind, told.astype(np.int64), place, size, table["rank"])
    order = np.lexsort((table["start_ns"], *reversed(keys)))
    table = {name: values[order] for name, values in table.items()}
    by_class = _changes([key[order] for key in keys[:-1]])
    by_list = by_class | _changes([table["rank"]])
    lists = np.flatnonzero(by_list)
    count = np.diff(np.append(lists, len(order)))
    number = np.arange(len(order)) - np.repeat(lists, count)
    class_of_list = (np.cumsum(by_class) - 1)[lists]
    classes = np.flatnonzero(by_class[lists])
    longest = np.maximum.reduceat(count, classes) if len(classes) else count
    for uneven in np.flatnonzero(np.minimum.reduceat(count, classes) < longest) if len(classes) else ():
        upto = classes[uneven + 1] if uneven + 1 < len(classes) else len(lists)
        _lay(table["end_ns"], lists, count, number, range(int(classes[uneven]), int(upto)))
    base = np.concatenate([[0], np.cumsum(longest)])
    table["whole"] = np.repeat(base[class_of_list], count) + number
    order = np.lexsort((table["rank"], table["whole"]))
    return {name: values[order] for name, values in table.items()}


def _changes(keys: list[NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Return whether any key differs from the previous row, [n]."""
    out = np.zeros(len(keys[0]), bool)
    out[:1] = True
    for key in keys:
        out[1:] |= key[1:] != key[:-1]
    return out


def _lay(
    ends: Ints, lists: NDArray[np.int64], count: NDArray[np.int64], number: NDArray[np.int64], uneven: range
) -> None:
    """Shift the numbers of shorter lists, in place, to where they fit the longest."""
    most = max(uneven, key=lambda at: int(count[at]))
    reference = ends[lists[most] : lists[most] + count[most]]
    for at in uneven:
        own = slice(int(lists[at]), int(lists[at] + count[at]))
        spare = len(reference) - int(count[at])
        shifts = range(spare + 1) if spare <= MAX_SHIFTS else (0, spare)
        number[own] += min(shifts, key=lambda shift: _misfit(ends[own], reference[shift : shift + count[at]]))


def _misfit(own: Ints, reference: Ints) -> tuple[int, int]:
    distance = own - reference
    middle = int(np.sort(distance)[len(distance) // 2])
    scatter = int(np.abs(distance - middle).sum())
    return (scatter, abs(middle)) if len(distance) >= ENOUGH else (abs(middle), 0)

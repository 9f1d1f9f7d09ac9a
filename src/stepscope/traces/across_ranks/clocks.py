"""Pairing of collectives over ranks, and the clock offsets that follow: all ranks end a collective together.

No rank finishes a collective such as an all-reduce before all have arrived, and then all finish within its transfer.
The *offset* of a rank is the median, over the collectives it shares with another, of how much later its end is. It is
measured against the lowest rank of each group and added up from group to group, along the path of least uncertainty.
*uncertainty* is the standard error of those medians (from their median deviation; with fewer than three, the shortest
duration among the collectives, which limits the distance of the ends). *drift*, if there is enough data, is the slope
of those distances.

The shift that is *applied* is different. Ranks of one host share a clock: their ends really differ, and a shift would
only hide that. Hosts are shifted as a whole, by the median offset of their ranks. If files do not name the host, each
rank counts as a separate host. No shift is applied below 20 µs or three times its uncertainty, since ends differ by
that much even on one clock.

Pairing: the n-th collective of a group is the same on all its ranks.

Collectives with a sequence number are paired by it. The others are counted within a profiler step, since profilers
start and stop at slightly different instants. They are counted by operation and, if all ranks report the bytes and
these must agree (all_reduce, broadcast, reduce), also by bytes: two threads may start two collectives in either order.

If the counts of ranks differ within a step (a file is truncated, or begins in the middle), each rank is aligned with
the one that has most, where the ends fit best: where their distances vary least or, with too few of them, where they
are nearest. Collectives that no other rank has are left out, as are sends and receives.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.collective_calls import OPS, POINT_TO_POINT, SYNCHRONIZING, ProcessGroup
from stepscope.traces.model.columns import Ints, Numbering
from stepscope.traces.model.tables import Table, table_of

if TYPE_CHECKING:
    from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["Clock", "Clocks", "Pairs", "clocks_of", "pair"]

# -- pairing ----------------------------------------------------------------------------------------------------------

SAME_BYTES = tuple(OPS.index(op) for op in ("all_reduce", "broadcast", "reduce"))
MAX_SHIFTS = 64
"""Number of alignments tried for a shorter list; beyond it, only both ends."""
ENOUGH_TO_ALIGN = 3
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
    numbered = table["sequence"] >= 0
    kind = table["group"] * len(OPS) + table["op"]
    size = np.where(np.isin(table["op"], SAME_BYTES) & ~numbered, table["bytes"], -1)
    if len(kind):
        silent = np.bincount(kind, weights=size < 0) > 0
        size = np.where(silent[kind], -1, size)
    place = np.where(numbered, table["sequence"], table["step"])
    keys = (kind, numbered.astype(np.int64), place, size, table["rank"])
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
    return (scatter, abs(middle)) if len(distance) >= ENOUGH_TO_ALIGN else (abs(middle), 0)


# -- clock offsets ----------------------------------------------------------------------------------------------------

SAME_CLOCK_NS = 20_000
SURE = 3
"""Standard errors."""
MEDIAN_ERROR = 1.4826 * 1.2533
"""Median deviation → standard deviation → standard error of the median, to be divided by √n."""
ENOUGH = 3
DRIFT_COUNT = 16
DRIFT_SPAN_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Clock:
    rank: int
    host: str | None
    reference: int
    """The rank it is measured against: itself if it shares no collective with a lower one."""
    offset_ns: int
    """How much later its clock is than the reference's."""
    uncertainty_ns: int
    drift_ppm: float | None
    shared: int
    """Number of collectives it is measured by."""
    shift_ns: int
    """What to subtract from its times to match the others'."""
    doubt_ns: int = 0
    """Remaining uncertainty of its times after the shift."""


@dataclass(frozen=True, kw_only=True)
class Clocks:
    clocks: tuple[Clock, ...]
    """In rank order."""
    zero_ns: int
    """The earliest instant of all files, shifted."""

    @property
    def shifts(self) -> dict[int, int]:
        return {clock.rank: clock.shift_ns for clock in self.clocks}

    @property
    def unaligned(self) -> tuple[int, ...]:
        """Ranks whose clocks cannot be compared: they share neither a collective nor a host with the lowest rank."""
        near = [clock for clock in self.clocks if clock.reference == self.clocks[0].reference]
        hosts = {clock.host for clock in near if clock.host is not None}
        return tuple(clock.rank for clock in self.clocks if clock not in near and clock.host not in hosts)

    def table(self) -> Table:
        columns = ("rank", "host", "reference", "offset_ns", "uncertainty_ns", "drift_ppm", "collectives", "shift_ns")
        rows = [
            [
                *(each.rank, each.host, each.reference, each.offset_ns, each.uncertainty_ns, each.drift_ppm),
                *(each.shared, each.shift_ns),
            ]
            for each in self.clocks
        ]
        note = "offsets are from the ends of shared collectives; shifts are subtracted when ranks are compared"
        return table_of("clocks", "Clocks", columns, rows, note=note)


@dataclass(frozen=True, kw_only=True)
class _Edge:
    """How much later the clock of ``other`` is than that of ``one``; both are indices into the ranks."""

    one: int
    other: int
    offset_ns: int
    uncertainty_ns: int
    drift_ppm: float | None
    shared: int


def clocks_of(analyses: Sequence[RankAnalysis], pairs: Pairs | None = None) -> Clocks:
    """Measure the clocks; ``pairs`` of the same ranks, if already known."""
    pairs = pair(analyses) if pairs is None else pairs
    measured = _spread(len(analyses), _edges(pairs))
    clocks = [
        Clock(
            rank=analysis.rank,
            host=analysis.meta.host,
            reference=pairs.ranks[edge.one],
            offset_ns=edge.offset_ns,
            uncertainty_ns=edge.uncertainty_ns,
            drift_ppm=edge.drift_ppm,
            shared=edge.shared,
            shift_ns=0,
        )
        for analysis, edge in zip(analyses, measured, strict=True)
    ]
    clocks = _shifted(clocks)
    zero_ns = min((each.meta.origin_ns - own.shift_ns for each, own in zip(analyses, clocks, strict=True)), default=0)
    return Clocks(clocks=tuple(clocks), zero_ns=zero_ns)


def _shifted(clocks: list[Clock]) -> list[Clock]:
    by_host: dict[tuple[int, str], list[Clock]] = defaultdict(list)
    for clock in clocks:
        by_host[clock.reference, clock.host or f"rank {clock.rank}"].append(clock)
    homes = {clock.rank: clock.host for clock in clocks}
    out: dict[int, Clock] = {}
    for (reference, _), members in by_host.items():
        middle = sorted(members, key=lambda clock: clock.offset_ns)[(len(members) - 1) // 2]
        if homes[reference] is not None and members[0].host == homes[reference]:
            shift_ns, doubt_ns = 0, SAME_CLOCK_NS
        else:
            doubt_ns = max(SAME_CLOCK_NS, middle.uncertainty_ns * (SURE if middle.shared >= ENOUGH else 1))
            shift_ns = middle.offset_ns if abs(middle.offset_ns) > doubt_ns else 0
        out |= {clock.rank: replace(clock, shift_ns=shift_ns, doubt_ns=doubt_ns) for clock in members}
    return [out[clock.rank] for clock in clocks]


def _spread(count: int, edges: list[_Edge]) -> list[_Edge]:
    """Propagate offsets from the lowest rank of each connected set along the least uncertainty, [ranks]."""
    ways: dict[int, list[tuple[int, int, _Edge]]] = defaultdict(list)
    for edge in edges:
        ways[edge.one].append((edge.other, 1, edge))
        ways[edge.other].append((edge.one, -1, edge))
    out: list[_Edge | None] = [None] * count
    order = itertools.count()
    for root in range(count):
        if out[root] is not None:
            continue
        start = _Edge(one=root, other=root, offset_ns=0, uncertainty_ns=0, drift_ppm=None, shared=0)
        waiting = [(0, next(order), root, start)]
        while waiting:
            _, _, at, way = heapq.heappop(waiting)
            if out[at] is not None:
                continue
            out[at] = way
            for other, sign, edge in ways[at]:
                if out[other] is None:
                    further = _joined(way, sign, edge, other)
                    heapq.heappush(waiting, (further.uncertainty_ns, next(order), other, further))
    return [edge for edge in out if edge is not None]


def _joined(way: _Edge, sign: int, edge: _Edge, other: int) -> _Edge:
    drift = None
    if edge.drift_ppm is not None and (way.drift_ppm is not None or way.one == way.other):
        drift = (way.drift_ppm or 0.0) + sign * edge.drift_ppm
    return _Edge(
        one=way.one,
        other=other,
        offset_ns=way.offset_ns + sign * edge.offset_ns,
        uncertainty_ns=way.uncertainty_ns + edge.uncertainty_ns,
        drift_ppm=drift,
        shared=min(way.shared, edge.shared) if way.shared else edge.shared,
    )


def _edges(pairs: Pairs) -> list[_Edge]:
    """Measure every group from its lowest rank to each of the others."""
    wanted = np.isin(pairs.op, SYNCHRONIZING)[pairs.whole]
    whole, rank, end_ns = pairs.whole[wanted], pairs.rank[wanted].astype(np.int64), pairs.end_ns[wanted]
    dur_ns = end_ns - pairs.start_ns[wanted]
    if not len(whole):
        return []
    group = pairs.group[whole].astype(np.int64)
    lowest = np.full(len(pairs.groups), len(pairs.ranks), np.int64)
    np.minimum.at(lowest, group, rank)
    reference = rank == lowest[group]
    # Index of the reference's part of each whole; −1: it did not take part.
    where = np.full(len(pairs.first), -1, np.int64)
    where[whole[reference]] = np.flatnonzero(reference)
    at = where[whole]
    use = np.flatnonzero((at >= 0) & ~reference)
    use = use[np.argsort(group[use] * len(pairs.ranks) + rank[use], kind="stable")]
    if not len(use):
        return []
    later, times, dur_ns = end_ns[use] - end_ns[at[use]], end_ns[use], dur_ns[use]
    keys = np.stack([lowest[group[use]], rank[use], group[use]])
    bounds = [0, *(np.flatnonzero((np.diff(keys) != 0).any(axis=0)) + 1).tolist(), len(use)]
    out = []
    for start, end in itertools.pairwise(bounds):
        one, other = int(keys[0, start]), int(keys[1, start])
        out.append(_edge(one, other, later[start:end], times[start:end], dur_ns[start:end]))
    return out


def _edge(one: int, other: int, later: Ints, times: Ints, dur_ns: Ints) -> _Edge:
    middle = (len(later) - 1) // 2
    offset_ns = int(np.partition(later, middle)[middle])
    deviation = np.partition(np.abs(later - offset_ns), middle)[middle]
    uncertainty_ns = int(np.ceil(MEDIAN_ERROR * deviation / np.sqrt(len(later))))
    if len(later) < ENOUGH:
        uncertainty_ns = int(dur_ns.min())
    drift = None
    if len(later) >= DRIFT_COUNT and times.max() - times.min() >= DRIFT_SPAN_NS:
        since, distance = (times - times.min()).astype(np.float64), (later - offset_ns).astype(np.float64)
        since -= since.mean()
        drift = float((since * (distance - distance.mean())).sum() / (since**2).sum() * 1e6)
    return _Edge(
        one=one,
        other=other,
        offset_ns=offset_ns,
        uncertainty_ns=uncertainty_ns,
        drift_ppm=drift,
        shared=len(later),
    )

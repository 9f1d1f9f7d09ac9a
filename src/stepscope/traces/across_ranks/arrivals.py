"""Collectives compared over ranks: which rank arrives last, how long the others wait for it, and the transfer itself.

On aligned clocks (``clocks.py``), the *transfer* of a collective lasts from the arrival of its last rank until all are
done. The *wait* of a rank lasts from its own arrival to that of the last rank, but never longer than its participation.
The *last* rank is the one that arrived last; of several at the same instant, the lowest.

Without any clock, the transfer can be estimated as the least duration over the ranks (*least*), and the wait as the
rest of a rank's duration, as in the TensorBoard plugin. Both agree if all ranks end at the same instant; otherwise
*least* is shorter than the transfer by the distance between the ends.

The *cost* of a late rank is the longest wait for it. If several collectives wait for the same rank at a time, each
instant counts once. *alone* is how much later it was than the second to last, which is the gain if only this rank were
on time; it also counts each instant once.

In some collectives (all_reduce, all_gather …) no rank can finish before all have arrived. If the aligned clocks say
that one did, its parts do not belong together: the collective is left out, with a notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.judge.late_ranks import Intervals, savings_ns
from stepscope.records.text import count_text
from stepscope.traces.across_ranks.clocks import SAME_CLOCK_NS, Clocks, Pairs, clocks_of, pair
from stepscope.traces.collective_calls import OPS, SYNCHRONIZING, ProcessGroup, bus_factor
from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Ints
from stepscope.traces.model.tables import Table, table_of

if TYPE_CHECKING:
    from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["Arrivals", "CollectivesAnalysis", "arrivals_of", "match", "shown_of", "transfers_of"]


# -- tables -----------------------------------------------------------------------------------------------------------
# Matched collectives by group and operation, by rank, and one by one.

LISTED = 200
KINDS = (
    *("group", "description", "op", "ranks", "count", "bytes", "total_ns", "wait_ns", "transfer_ns", "least_ns"),
    *("cost_ns", "algorithm_gbps", "bus_gbps", "last_rank", "last_count"),
)
RANKS = ("rank", "last_count", "last_share", "cost_ns", "alone_ns", "wait_ns", "transfer_ns", "wait_share")
EACH = (
    *("group", "op", "step", "sequence", "bytes", "ranks", "last_rank", "cost_ns", "alone_ns", "wait_ns"),
    *("transfer_ns", "algorithm_gbps", "arrived_ns"),
)


def tables_of(
    pairs: Pairs, split: Split, costs: dict[int, int], alone: dict[int, int], zero_ns: int
) -> tuple[Table, ...]:
    """Build the tables; ``costs`` and ``alone`` are by rank."""
    return _by_kind(pairs, split), _by_rank(pairs, split, costs, alone), _each(pairs, split, zero_ns)


def _sums(keys: NDArray[Any], values: Ints, count: int) -> list[int]:
    out = np.zeros(count, np.int64)
    np.add.at(out, keys, values)
    return out.tolist()  # type: ignore[no-any-return]


def _by_kind(pairs: Pairs, split: Split) -> Table:
    wholes = np.flatnonzero(split.counts)
    key = pairs.group.astype(np.int64) * len(OPS) + pairs.op
    known, kind = np.unique(key[wholes], return_inverse=True)
    of_whole = np.full(len(pairs.first), -1, np.int64)
    of_whole[wholes] = kind
    parts = np.flatnonzero(of_whole[pairs.whole] >= 0)
    of_part = of_whole[pairs.whole[parts]]
    count = len(known)
    sized = pairs.bytes[wholes] >= 0
    columns = {
        "count": np.bincount(kind, minlength=count).tolist(),
        "bytes": _sums(kind[sized], pairs.bytes[wholes][sized], count),
        "sized": np.bincount(kind[sized], minlength=count).tolist(),
        "sized_ns": _sums(kind[sized], split.transfer_ns[wholes][sized], count),
        "total_ns": _sums(of_part, (pairs.end_ns - pairs.start_ns)[parts], count),
        "wait_ns": _sums(of_part, split.wait_ns[parts], count),
        "transfer_ns": _sums(kind, split.transfer_ns[wholes], count),
        "least_ns": _sums(kind, split.least_ns[wholes], count),
        "cost_ns": _sums(kind, split.cost_ns[wholes], count),
    }
    ranks = np.zeros(count, np.int64)
    np.maximum.at(ranks, kind, pairs.counts[wholes])
    last = dict(_most_often(kind, split.last[wholes]))
    rows: list[list[Any]] = []
    for at, code in enumerate(known.tolist()):
        group, op = pairs.groups[code // len(OPS)], code % len(OPS)
        own = {name: values[at] for name, values in columns.items()}
        rate = own["bytes"] / own["sized_ns"] if own["sized_ns"] and own["bytes"] else None
        bus = None if rate is None else rate * bus_factor(op, int(ranks[at]))
        place, times = last[at]
        rows.append(
            [
                *(group.name or None, group.description or None, OPS[op], int(ranks[at]), own["count"]),
                own["bytes"] if own["sized"] else None,
                *(own[name] for name in ("total_ns", "wait_ns", "transfer_ns", "least_ns", "cost_ns")),
                *(rate, bus, pairs.ranks[place], times),
            ]
        )
    rows.sort(key=lambda row: -row[KINDS.index("total_ns")])
    note = (
        "transfer: from the last rank's arrival until all were done; wait: of all ranks together, until the last one"
        " arrived; least: transfer by the shortest duration, which needs no clock; cost: the longest waits"
    )
    return table_of("collectives", "Collectives by group and operation", KINDS, rows, note=note)


def _most_often(kind: NDArray[Any], last: NDArray[np.int32]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield for every kind which rank was last most often, and how often."""
    pairs, times = np.unique(np.stack([kind, last]), axis=1, return_counts=True)
    order = np.lexsort((-pairs[1], times))
    for at in order.tolist():
        yield int(pairs[0, at]), (int(pairs[1, at]), int(times[at]))


def _by_rank(pairs: Pairs, split: Split, costs: dict[int, int], alone: dict[int, int]) -> Table:
    count = len(pairs.ranks)
    parts, last = split.counts[pairs.whole], split.last[split.counts]
    part_of = np.bincount(pairs.rank[parts], minlength=count).tolist()
    columns = [
        np.bincount(last, minlength=count).tolist(),
        [costs[rank] for rank in pairs.ranks],
        [alone[rank] for rank in pairs.ranks],
        _sums(pairs.rank[parts], split.wait_ns[parts], count),
        _sums(pairs.rank[parts], split.own_transfer_ns[parts], count),
    ]
    rows: list[list[Any]] = []
    for place, (times, cost_ns, alone_ns, wait_ns, own_ns) in enumerate(zip(*columns, strict=True)):
        total_ns = wait_ns + own_ns
        share = times / part_of[place] if part_of[place] else None
        row = [pairs.ranks[place], times, share, cost_ns, alone_ns, wait_ns, own_ns]
        rows.append([*row, wait_ns / total_ns if total_ns else None])
    rows.sort(key=lambda row: (-row[RANKS.index("cost_ns")], -row[RANKS.index("last_count")], row[0]))
    note = (
        "last: in how many of its collectives the rank arrived last; cost: how long the first to arrive waited for it,"
        " each instant counted once; alone: how much later it was than the second to last"
    )
    return table_of("stragglers", "Last to arrive", RANKS, rows if len(pairs.first) else (), note=note)


def _each(pairs: Pairs, split: Split, zero_ns: int) -> Table:
    wholes = np.flatnonzero(split.counts)
    order = wholes[np.argsort(-split.cost_ns[wholes], kind="stable")]
    waits = np.add.reduceat(split.wait_ns, pairs.first) if len(pairs.first) else split.wait_ns
    counts = pairs.counts
    rows: list[list[Any]] = []
    for at in order[:LISTED].tolist():
        size, transfer_ns = int(pairs.bytes[at]), int(split.transfer_ns[at])
        rate = size / transfer_ns if size > 0 and transfer_ns else None
        rows.append(
            [
                *(pairs.groups[pairs.group[at]].name or None, OPS[pairs.op[at]], _known(pairs.step[at])),
                *(_known(pairs.sequence[at]), _known(size), counts[at], pairs.ranks[split.last[at]]),
                *(split.cost_ns[at], split.alone_ns[at], waits[at], transfer_ns, rate, split.arrived_ns[at] - zero_ns),
            ]
        )
    table = table_of("collective_list", "Collectives, the longest waits first", EACH, rows)
    return Table(**{**vars(table), "left_out": len(order) - len(rows)})


def _known(value: Any) -> int | None:
    return int(value) if value >= 0 else None


# -- matching ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Split:
    """The time of each collective split into waiting and transfer."""

    wait_ns: Ints
    """[parts]"""
    own_transfer_ns: Ints
    """[parts]; the rest of the rank's own duration."""
    arrived_ns: Ints
    """[wholes]; arrival of the last rank, on shifted clocks."""
    transfer_ns: Ints
    """[wholes]"""
    least_ns: Ints
    """[wholes]; the least duration."""
    last: NDArray[np.int32]
    """[wholes]; index into the ranks."""
    cost_ns: Ints
    """[wholes]; the longest wait."""
    alone_ns: Ints
    """[wholes]"""
    counts: NDArray[np.bool_]
    """[wholes]; whether its parts belong together."""


@dataclass(frozen=True, kw_only=True)
class CollectivesAnalysis:
    pairs: Pairs
    split: Split
    clocks: Clocks
    last_counts: dict[int, int]
    """By rank, as all below; every rank is present."""
    wait_ns: dict[int, int]
    own_transfer_ns: dict[int, int]
    cost_by_rank_ns: dict[int, int]
    """For the collectives in which it was last; each instant counts once, also if two collectives wait."""
    alone_by_rank_ns: dict[int, int]
    count: int
    """Collectives that two or more ranks share."""
    transfer_ns: int
    least_ns: int
    cost_ns: int
    """Instants at which a rank waited for another."""
    tables: dict[str, Table]
    """``collectives``, ``stragglers``, ``collective_list``, ``clocks``."""
    notices: tuple[str, ...]

    def whole_of(self, rank: int, count: int) -> NDArray[np.int64]:
        """Return for each of the rank's exchanges the index of its whole; −1: none that counts."""
        out = np.full(count, -1, np.int64)
        own = (self.pairs.rank == self.pairs.ranks.index(rank)) & self.split.counts[self.pairs.whole]
        out[self.pairs.entry[own]] = self.pairs.whole[own]
        return out


def match(analyses: Sequence[RankAnalysis]) -> CollectivesAnalysis:
    """Match the collectives; ``analyses`` are in rank order."""
    pairs = pair(analyses)
    clocks = clocks_of(analyses, pairs)
    split = _split(pairs, clocks)
    good = split.counts[pairs.whole]

    def by_rank(ranks: NDArray[np.int32], values: Ints) -> dict[int, int]:
        sums = np.zeros(len(pairs.ranks), np.int64)
        np.add.at(sums, ranks, values)
        return dict(zip(pairs.ranks, sums.tolist(), strict=True))

    costs = _by_last(pairs, split, split.cost_ns)
    alone = _by_last(pairs, split, split.alone_ns)
    last, ones = split.last[split.counts], np.ones(int(split.counts.sum()), np.int64)
    return CollectivesAnalysis(
        pairs=pairs,
        split=split,
        clocks=clocks,
        last_counts=by_rank(last, ones),
        wait_ns=by_rank(pairs.rank[good], split.wait_ns[good]),
        own_transfer_ns=by_rank(pairs.rank[good], split.own_transfer_ns[good]),
        cost_by_rank_ns=costs,
        alone_by_rank_ns=alone,
        count=len(ones),
        transfer_ns=int(split.transfer_ns[split.counts].sum()),
        least_ns=int(split.least_ns[split.counts].sum()),
        cost_ns=_instants(split, split.cost_ns, np.flatnonzero(split.counts)),
        tables={
            table.name: table for table in (*tables_of(pairs, split, costs, alone, clocks.zero_ns), clocks.table())
        },
        notices=_notices(pairs, split, clocks),
    )


def _by_last(pairs: Pairs, split: Split, before_ns: Ints) -> dict[int, int]:
    """Sum by rank, each instant once, the times before its arrival in collectives in which it was last."""
    out = dict.fromkeys(pairs.ranks, 0)
    wholes = np.flatnonzero(split.counts)
    wholes = wholes[np.argsort(split.last[wholes], kind="stable")]
    for own in np.split(wholes, np.flatnonzero(np.diff(split.last[wholes])) + 1) if len(wholes) else ():
        out[pairs.ranks[split.last[own[0]]]] = _instants(split, before_ns, own)
    return out


def _instants(split: Split, before_ns: Ints, wholes: NDArray[np.int64]) -> int:
    arrived_ns = split.arrived_ns[wholes]
    return intervals.total(intervals.merge(arrived_ns - before_ns[wholes], arrived_ns))


def _split(pairs: Pairs, clocks: Clocks) -> Split:
    first, whole = pairs.first, pairs.whole
    if not len(first):
        none, no = np.empty(0, np.int64), np.empty(0, bool)
        ints = dict.fromkeys(
            ("wait_ns", "own_transfer_ns", "arrived_ns", "transfer_ns", "least_ns", "cost_ns", "alone_ns"), none
        )
        return Split(**ints, last=none.astype(np.int32), counts=no)
    shift = np.array([clock.shift_ns for clock in clocks.clocks], np.int64)[pairs.rank]
    start_ns, end_ns = pairs.start_ns - shift, pairs.end_ns - shift
    dur_ns = end_ns - start_ns
    arrived_ns = np.maximum.reduceat(start_ns, first)
    wait_ns = np.minimum(arrived_ns[whole] - start_ns, dur_ns)
    # By whole, then the latest first, then by rank, in which parts are already sorted.
    order = np.lexsort((-start_ns, whole))
    doubt_ns = np.array([clock.doubt_ns for clock in clocks.clocks], np.int64)[pairs.rank]
    apart = np.maximum.reduceat(arrived_ns[whole] - end_ns > doubt_ns, first)
    return Split(
        wait_ns=wait_ns,
        own_transfer_ns=dur_ns - wait_ns,
        arrived_ns=arrived_ns,
        transfer_ns=np.maximum.reduceat(end_ns, first) - arrived_ns,
        least_ns=np.minimum.reduceat(dur_ns, first),
        last=pairs.rank[order[first]],
        cost_ns=np.maximum.reduceat(wait_ns, first),
        alone_ns=arrived_ns - start_ns[order[first + 1]],
        counts=~(apart & np.isin(pairs.op, SYNCHRONIZING)),
    )


def _notices(pairs: Pairs, split: Split, clocks: Clocks) -> tuple[str, ...]:
    out = []
    lonely = {pairs.ranks[at]: count for at, count in enumerate(pairs.alone) if count}
    if lonely and len(pairs.ranks) > 1:
        worst = max(lonely, key=lambda rank: lonely[rank])
        out.append(
            f"without a counterpart on another rank, and not compared: {count_text(sum(lonely.values()), 'collective')}"
            f" (most of them, {lonely[worst]}, on rank {worst})"
        )
    sizes = np.array([group.size for group in pairs.groups], np.int64)
    short = int((pairs.counts < sizes[pairs.group]).sum()) if len(pairs.first) else 0
    if short:
        out.append(
            f"without some ranks of their group, whose traces are missing or do not contain them:"
            f" {count_text(short, 'collective')}; the last to arrive is known only among the others"
        )
    apart = int((~split.counts).sum())
    if apart:
        out.append(
            f"left out of the comparison: {count_text(apart, 'collective')} in which, by the clocks, one rank was done"
            " before another arrived, so the calls do not belong together"
        )
    if pairs.peer_to_peer and len(pairs.ranks) > 1:
        out.append(f"{pairs.peer_to_peer} sends and receives are not compared: traces do not say between which ranks")
    if pairs.unknown_group and len(pairs.ranks) > 1:
        out.append(
            f"{pairs.unknown_group} collectives are not compared: there are several process groups, and the traces do"
            " not say which they were in"
        )
    if len(pairs.first) and clocks.unaligned:
        ranks = ", ".join(map(str, clocks.unaligned[:8])) + (" …" if len(clocks.unaligned) > 8 else "")
        out.append(f"the clocks of ranks {ranks} cannot be aligned with the others': they share no collective")
    return tuple(out)


# -- arrivals ---------------------------------------------------------------------------------------------------------
# Which ranks arrive late at the collectives of a group, and how much of the waiting for them is exposed.
#
# Collectives are grouped by the set of ranks that share them: two process groups of the same ranks count as one.
#
# *exposed*: the part of a rank's time in a collective during which it computed nothing. Computation that hides a
# collective mostly runs at its beginning, since later work waits for the result. The exposed part is therefore counted
# from the end: first as transfer, the remainder as waiting.
#
# *inherited*: a rank may arrive last only because it was delayed earlier, in a collective with other ranks, while its
# own way from there was no longer than its peers'. Such a collective says nothing about the rank.
#
# *across stages*: the ranks of a pipeline wait for each other by schedule, so the last among them says nothing. Ranks
# of different stages are recognized by the groups in which they send and receive, or by the description of a group.

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
SENDS = tuple(OPS.index(op) for op in ("send", "recv"))


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The collectives of one set of ranks; [M, W]: by member and collective, NaN where it did not take part."""

    group: ProcessGroup
    """If several groups have these ranks, the one with most waiting."""
    members: tuple[int, ...]
    """Ranks."""
    lacking: bool
    """Whether the group has ranks without a trace."""
    across_stages: bool
    arrived_ns: Ints
    """[W]; arrival of the last rank on the common clock, ascending."""
    step: Ints
    """[W]; the profiler's number; −1: outside of steps."""
    intervals: Intervals
    """[M, W]; work: when a member arrives, 0 for the last; wait: the exposed part of its wait. Inherited lateness does
    not count.
    """
    wait_ns: int
    """Total of all members and collectives, as the next."""
    transfer_ns: int

    def __len__(self) -> int:
        return len(self.step)

    @property
    def mostly_waiting(self) -> bool:
        return self.wait_ns > self.transfer_ns

    def alone_ns(self, late: Sequence[int]) -> int:
        """Return by how much these were later than the last of the others in total; each instant counts once."""
        which = self.intervals.waits_for(late)
        saved_ns = savings_ns(self.intervals.work_ns[:, which], late, -np.inf)
        ahead = np.where(np.isfinite(saved_ns), saved_ns, 0).astype(np.int64)
        return intervals.total(intervals.merge(self.arrived_ns[which] - ahead, self.arrived_ns[which]))


def _intervals(early_ns: Floats, wait_ns: Floats, done_ns: Floats) -> Intervals:
    """Lay out arrivals for the engine; ``done_ns``: how long before the last arrival each was done with its previous
    collective, NaN if it has none.
    """
    everything = Intervals(work_ns=-early_ns, wait_ns=wait_ns, counts=np.ones(early_ns.shape[1], np.bool_))
    own = done_ns[everything.last, np.arange(early_ns.shape[1])]
    delayed_ns = everything.of_others(done_ns) - own
    inherited = (delayed_ns > SAME_CLOCK_NS) & (delayed_ns > everything.late_by_ns / 2)
    return replace(everything, counts=~inherited)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Exposed time in collectives, split, [ranks] each; sums over collectives, which may overlap."""

    transfer_ns: Ints
    """Includes collectives that cannot be split because no other rank's trace has them."""
    wait_ns: Ints
    send_ns: Ints
    """Sends and receives, which combine waiting and transfer."""
    stages_ns: Ints
    """Waiting between ranks of different pipeline stages; also included in ``wait_ns``."""


def arrivals_of(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis) -> tuple[Arrivals, ...]:
    """Build one entry per set of ranks that shares collectives; ``analyses`` as they were matched."""
    pairs, split = collectives.pairs, collectives.split
    wholes = np.flatnonzero(split.counts)
    if not len(wholes):
        return ()
    shift_ns = np.array([clock.shift_ns for clock in collectives.clocks.clocks], np.int64)
    exposed_ns = _exposed(analyses, collectives)
    exposed_wait_ns = exposed_ns - np.minimum(exposed_ns, split.own_transfer_ns)
    done_ns = _done_before(analyses, collectives, shift_ns)
    stages = _stages(analyses)
    good = np.flatnonzero(split.counts[pairs.whole])
    group = pairs.group[pairs.whole[good]].astype(np.int64)
    # Every rank that ever took part in a collective of the group.
    taken: dict[int, set[int]] = {}
    for key in np.unique(group * len(pairs.ranks) + pairs.rank[good]).tolist():
        taken.setdefault(key // len(pairs.ranks), set()).add(key % len(pairs.ranks))
    sets = sorted({tuple(sorted(members)) for members in taken.values()})
    set_of = np.full(len(pairs.groups), -1, np.intp)
    for code, took_part in taken.items():
        set_of[code] = sets.index(tuple(sorted(took_part)))
    waits = np.bincount(group, split.wait_ns[good], minlength=len(pairs.groups))
    by_set = good[np.argsort(set_of[group], kind="stable")]
    bounds = np.cumsum(np.bincount(set_of[group], minlength=len(sets)))
    row, column = np.full(len(pairs.first), -1, np.intp), np.full(len(pairs.ranks), -1, np.intp)
    out = []
    for members, parts in zip(sets, np.split(by_set, bounds[:-1]), strict=True):
        codes = np.unique(pairs.group[pairs.whole[parts]]).tolist()
        own = np.unique(pairs.whole[parts])
        own = own[np.argsort(split.arrived_ns[own], kind="stable")]
        column[list(members)], row[own] = np.arange(len(members)), np.arange(len(own))
        at = (column[pairs.rank[parts]], row[pairs.whole[parts]])
        start_ns = pairs.start_ns[parts] - shift_ns[pairs.rank[parts]]
        arrived_ns = split.arrived_ns[own]
        shape = (len(members), len(own))
        ranks = tuple(pairs.ranks[place] for place in members)
        out.append(
            Arrivals(
                group=pairs.groups[max(codes, key=waits.__getitem__)],
                members=ranks,
                lacking=max(pairs.groups[code].size for code in codes) > len(members),
                across_stages=any(len(stage.intersection(ranks)) > 1 for stage in stages),
                arrived_ns=arrived_ns,
                step=pairs.step[own],
                intervals=_intervals(
                    _laid_out(shape, at, arrived_ns[at[1]] - start_ns),
                    _laid_out(shape, at, exposed_wait_ns[parts]),
                    _laid_out(shape, at, arrived_ns[at[1]] - done_ns[parts]),
                ),
                wait_ns=int(split.wait_ns[parts].sum()),
                transfer_ns=int(split.own_transfer_ns[parts].sum()),
            )
        )
    return tuple(out)


def _laid_out(
    shape: tuple[int, int], at: tuple[NDArray[np.intp], NDArray[np.intp]], values: NDArray[np.generic]
) -> Floats:
    grid = np.full(shape, np.nan)
    grid[at] = values
    return grid


def shown_of(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis, arrivals: Sequence[Arrivals]) -> Shown:
    """Sum the exposed times by rank; ``analyses`` as they were matched, with their ``arrivals``."""
    pairs, split = collectives.pairs, collectives.split
    exposed_ns = _exposed(analyses, collectives)
    good = split.counts[pairs.whole]
    transfer_ns = np.minimum(exposed_ns, split.own_transfer_ns)
    count = len(analyses)

    def by_rank(values: Ints) -> Ints:
        return np.bincount(pairs.rank[good], values[good], minlength=count).astype(np.int64)

    split_ns, waited_ns = by_rank(transfer_ns), by_rank(exposed_ns - transfer_ns)
    whole_ns, send_ns = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for place, analysis in enumerate(analyses):
        own_ns = analysis.exchanges.end_ns - analysis.exchanges.start_ns - analysis.exchanges.overlap_ns
        sends = np.isin(analysis.exchanges.op, SENDS)
        whole_ns[place], send_ns[place] = own_ns[~sends].sum(), own_ns[sends].sum()
    stages_ns = np.zeros(count, np.int64)
    for each in arrivals:
        if each.across_stages:
            places = [pairs.ranks.index(rank) for rank in each.members]
            stages_ns[places] += np.nansum(each.intervals.wait_ns, axis=1).astype(np.int64)
    return Shown(
        transfer_ns=np.maximum(whole_ns - waited_ns, split_ns),
        wait_ns=waited_ns,
        send_ns=send_ns,
        stages_ns=stages_ns,
    )


def _exposed(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis) -> Ints:
    """Return the rank's time in each part during which it computed nothing, [parts]."""
    pairs = collectives.pairs
    overlap_ns = np.concatenate([analysis.exchanges.overlap_ns for analysis in analyses])
    hidden_ns = overlap_ns[_bases(analyses)[pairs.rank] + pairs.entry]
    return np.asarray(np.maximum(pairs.end_ns - pairs.start_ns - hidden_ns, 0), np.int64)


def _bases(analyses: Sequence[RankAnalysis]) -> NDArray[np.int64]:
    """Return where each rank's exchanges begin in one list of all ranks, [ranks]."""
    return np.cumsum([0, *(len(analysis.exchanges) for analysis in analyses)])[:-1]


def transfers_of(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis) -> list[Ints]:
    """Return by rank the exposed time of its exchanges without waiting, or all of it if the waiting is unknown."""
    pairs, split = collectives.pairs, collectives.split
    everything = [each.exchanges.end_ns - each.exchanges.start_ns - each.exchanges.overlap_ns for each in analyses]
    if not everything:
        return []
    out, bases = np.concatenate(everything), _bases(analyses)
    good = split.counts[pairs.whole]
    at = (bases[pairs.rank] + pairs.entry)[good]
    out[at] = np.minimum(out[at], split.own_transfer_ns[good])
    return np.split(out, bases[1:])


def _done_before(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis, shift_ns: Ints) -> Floats:
    """Return when the rank finished its previous exchange on the common clock, [parts]; NaN: it has none."""
    pairs = collectives.pairs
    out = np.full(len(pairs.whole), np.nan)
    for place, analysis in enumerate(analyses):
        own = np.flatnonzero(pairs.rank == place)
        ends_ns = np.sort(analysis.exchanges.end_ns)
        before = np.searchsorted(ends_ns, pairs.start_ns[own], side="right") - 1
        known = before >= 0
        out[own[known]] = ends_ns[before[known]] - shift_ns[place]
    return out


def _stages(analyses: Sequence[RankAnalysis]) -> set[frozenset[int]]:
    """Return sets of ranks that are, or may be, in different stages of one pipeline."""
    everybody = frozenset(analysis.rank for analysis in analyses)
    out = set()
    for analysis in analyses:
        exchanges = analysis.exchanges
        sending = set(exchanges.group[np.isin(exchanges.op, SENDS)].tolist())
        for code, group in enumerate(exchanges.groups):
            if code in sending or group.kind == "pipeline":
                out.add(frozenset(group.members) or everybody)
        if -1 in sending:
            out.add(everybody)
    return out

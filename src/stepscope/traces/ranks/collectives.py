"""Collectives compared over ranks: who came last, how long the others waited for it, and the transfer itself.

On clocks that fit each other (see ``clocks``), a collective's *transfer* is from when its last rank arrived until all
were done; a rank's *wait* is from its own arrival until that of the last, but never longer than it took part.  The
*last* rank is the one that arrived last, of several at the same instant the lowest.

Without any clock the transfer can be told as the least duration over the ranks (*least*), and a wait as what a rank
took longer than that: this is what the TensorBoard plugin shows.  Both are the same where all ranks end at one instant;
else *least* is short of the transfer by how far the ends lie apart.

What a late rank *costs* is the longest wait for it; of several collectives at a time, in which others wait for the
same rank, each instant counts once.  *alone* is how much later it was than the last but one, which is what would be
gained if only this rank were on time; instants, too.

A collective in which nobody can be done before all have come (all_reduce, all_gather …) but in which, by those clocks,
somebody was: its parts do not belong together.  It is left out, and said so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Ints
from stepscope.traces.model.table import Table
from stepscope.traces.ranks.clocks import Clocks, clocks_of
from stepscope.traces.ranks.collective_tables import tables_of
from stepscope.traces.ranks.exchange_names import SYNCHRONISING
from stepscope.traces.ranks.pairing import Pairs, pair

if TYPE_CHECKING:
    from stepscope.traces.rank import RankAnalysis

__all__ = ["CollectivesAnalysis", "Split", "match"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Each collective's time in two."""

    wait_ns: Ints
    """[parts]"""
    own_transfer_ns: Ints
    """[parts]; the rest of the rank's own duration."""
    arrived_ns: Ints
    """[wholes]; when the last did, on shifted clocks."""
    transfer_ns: Ints
    """[wholes]"""
    least_ns: Ints
    """[wholes]; the least duration."""
    last: NDArray[np.int32]
    """[wholes]; index of the ranks."""
    cost_ns: Ints
    """[wholes]; the longest wait."""
    alone_ns: Ints
    """[wholes]"""
    counts: NDArray[np.bool_]
    """[wholes]; its parts do belong together."""


@dataclass(frozen=True, kw_only=True)
class CollectivesAnalysis:
    pairs: Pairs
    split: Split
    clocks: Clocks
    last_counts: dict[int, int]
    """By rank, as all below; every rank is there."""
    wait_ns: dict[int, int]
    own_transfer_ns: dict[int, int]
    cost_by_rank_ns: dict[int, int]
    """Of the collectives in which it was last; instants, so that what is waited for twice at a time counts once."""
    alone_by_rank_ns: dict[int, int]
    count: int
    """Collectives that two or more ranks share."""
    transfer_ns: int
    least_ns: int
    cost_ns: int
    """Instants at which some rank waited for another."""
    tables: dict[str, Table]
    """``collectives``, ``stragglers``, ``collective_list``, ``clocks``."""
    notices: tuple[str, ...]

    def whole_of(self, rank: int, count: int) -> NDArray[np.int64]:
        """[count of the rank's exchanges]; index of the whole each is part of; −1: none that counts."""
        out = np.full(count, -1, np.int64)
        own = (self.pairs.rank == self.pairs.ranks.index(rank)) & self.split.counts[self.pairs.whole]
        out[self.pairs.entry[own]] = self.pairs.whole[own]
        return out


def match(analyses: Sequence[RankAnalysis]) -> CollectivesAnalysis:
    """``analyses``: by rank."""
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
    """By rank: the instants, up to so much before its arrival, of the collectives in which it was last."""
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
    # By whole, then the latest first, then by rank, which is how parts are sorted already.
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
        counts=~(apart & np.isin(pairs.op, SYNCHRONISING)),
    )


def _notices(pairs: Pairs, split: Split, clocks: Clocks) -> tuple[str, ...]:
    out = []
    lonely = {pairs.ranks[at]: count for at, count in enumerate(pairs.alone) if count}
    if lonely and len(pairs.ranks) > 1:
        worst = max(lonely, key=lambda rank: lonely[rank])
        out.append(
            f"{sum(lonely.values())} collectives have no counterpart on another rank and are not compared"
            f" (most of them, {lonely[worst]}, on rank {worst})"
        )
    sizes = np.array([group.size for group in pairs.groups], np.int64)
    short = int((pairs.counts < sizes[pairs.group]).sum()) if len(pairs.first) else 0
    if short:
        out.append(
            f"{short} collectives lack some of their group's ranks, whose traces are not here or do not have them: who"
            " came last is told of the others only"
        )
    apart = int((~split.counts).sum())
    if apart:
        out.append(
            f"{apart} collectives are left out of the comparison: by the clocks, some rank was done before another"
            " came, so they do not belong together"
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

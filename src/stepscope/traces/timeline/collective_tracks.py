"""Matched collectives on the timeline: of every rank a track that says when it waited, for whom, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stepscope.traces.ranks.exchange_names import OPS
from stepscope.traces.timeline.perfetto import Bar, Track

if TYPE_CHECKING:
    from stepscope.traces.ranks.collectives import CollectivesAnalysis

__all__ = ["collective_tracks"]


def collective_tracks(collectives: CollectivesAnalysis) -> list[Track]:
    """One per rank that has any; collectives at a time are on one track, as far as they do not overlap, and the rest
    on further ones."""
    pairs, split = collectives.pairs, collectives.split
    out = []
    order = np.lexsort((pairs.start_ns, pairs.rank))
    order = order[split.counts[pairs.whole[order]]]
    ranks = pairs.rank[order]
    for parts in np.split(order, np.flatnonzero(np.diff(ranks)) + 1) if len(order) else ():
        rank = pairs.ranks[pairs.rank[parts[0]]]
        for lane, own in enumerate(_apart(pairs.start_ns[parts].tolist(), pairs.end_ns[parts].tolist())):
            name = "collectives: waiting and transfer" + (f" ({lane + 1})" if lane else "")
            bars = [bar for at in own for bar in _bars(collectives, int(parts[at]))]
            out.append(Track(rank=rank, name=name, bars=bars))
    return out


def _apart(starts: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
    """Indices of intervals, sorted by start, in as few lists as it takes for none to overlap within one."""
    lists: list[list[int]] = []
    for at, start in enumerate(starts):
        free = next((own for own in lists if ends[own[-1]] <= start), None)
        if free is None:
            free = []
            lists.append(free)
        free.append(at)
    return lists


def _bars(collectives: CollectivesAnalysis, part: int) -> list[Bar]:
    pairs, split = collectives.pairs, collectives.split
    whole = int(pairs.whole[part])
    op, last = OPS[pairs.op[whole]], pairs.ranks[split.last[whole]]
    start_ns, end_ns, wait_ns = int(pairs.start_ns[part]), int(pairs.end_ns[part]), int(split.wait_ns[part])
    args = {"collective": whole, "group": pairs.groups[pairs.group[whole]].name, "last_rank": last}
    args |= {"bytes": int(pairs.bytes[whole])} if pairs.bytes[whole] >= 0 else {}
    bars = [Bar(name=f"{op}: transfer", start_ns=start_ns + wait_ns, end_ns=end_ns, args=args)]
    if wait_ns:
        bars.insert(
            0, Bar(name=f"{op}: waits for rank {last}", start_ns=start_ns, end_ns=start_ns + wait_ns, args=args)
        )
    return bars

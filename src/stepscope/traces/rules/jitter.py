"""Waiting that no rank in particular causes: ``collective_jitter`` and ``pipeline_bubble``.

Where nobody is late (``stragglers.py``) and ranks wait all the same, it is jitter, and nobody is named.  Ranks of
different pipeline stages wait for each other by the schedule: that is not held against any of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepscope.records.units import share_text
from stepscope.traces.ranks.arrivals import Arrivals
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.stragglers import counts_by_rank, of_group
from stepscope.traces.rules.view import Claim, View, claim_of, halved

__all__ = ["find_bubble", "find_jitter"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def find_jitter(view: View) -> list[Claim]:
    """Ranks wait for each other, and nobody is late: asked where no straggler is found."""
    rows = {rank: row for row, rank in enumerate(view.ranks)}
    best: tuple[float, Arrivals, Bools, Ints] | None = None
    for arrivals in view.arrivals:
        if arrivals.across_stages or not arrivals.mostly_waiting or not rows.keys() >= set(arrivals.members):
            continue
        own = [rows[rank] for rank in arrivals.members]
        waited_ns = np.zeros(len(rows), np.int64)
        waited_ns[own] = np.nansum(arrivals.exposed_wait_ns, axis=0).astype(np.int64)
        waited_ns = np.minimum(waited_ns, view.times.exposed_ns)
        where = np.isin(np.arange(len(rows)), own)
        # The median of them, as all of them wait: the first to come waits longest and gains nothing by itself.
        middle = int(own[int(np.argsort(waited_ns[own], kind="stable")[(len(own) - 1) // 2])])
        least = thresholds.EXPOSED_HOST_SHARE if view.host_comm[middle] else thresholds.EXPOSED_SHARE
        floor_ns = thresholds.EXPOSED_HOST_FLOOR_NS if view.host_comm[middle] else thresholds.FLOOR_NS
        share = float(view.share(waited_ns)[middle])
        if share <= least or view.per_step(waited_ns)[middle] < floor_ns or (best and share <= best[0]):
            continue
        best = (share, arrivals, where, np.where(where, waited_ns[middle], 0))
    return [] if best is None else [_jitter(view, *best)]


def _jitter(view: View, share: float, arrivals: Arrivals, where: Bools, waited_ns: Ints) -> Claim:
    """``waited_ns``: [R]; what the median member waits."""
    each_ns = view.typical(view.per_step(waited_ns), where)
    counts = np.bincount(arrivals.last, minlength=len(arrivals.members))
    most, of = int(counts.argmax()), len(arrivals)
    often = f"rank {arrivals.members[most]} most often, {int(counts[most]):,} of {of:,} times"
    even = of >= thresholds.COLLECTIVES_FEW and counts[most] <= thresholds.LAST_TIMES_CHANCE * of / len(counts)
    told = f"every rank comes last about equally often ({often}): this is jitter, and no rank is to blame"
    if not even:
        told = f"no rank comes last often enough to be blamed ({often})"
    return claim_of(
        view,
        "collective_jitter",
        f"The ranks wait for each other {view.each_step(each_ns)}, {share_text(share)} of the time, in collectives"
        f"{of_group(view, arrivals)}; {told}.",
        where=where,
        saved_ns=halved(waited_ns),
        most_ns=waited_ns,
        phase="comm",
        evidence={
            "group": arrivals.group.name or None,
            "group_kind": arrivals.group.kind,
            "group_ranks": list(arrivals.members),
            "collectives": of,
            "last_counts": counts_by_rank(arrivals),
            "waited_ms_per_step": round(each_ns / 1e6, 3),
            "waited_share": round(share, 4),
        },
        advice=(
            "Look for work that varies from rank to rank and step to step: sequence lengths, experts, Python.",
            "Ranks that launch each kernel just in time drift apart: CUDA graphs, torch.compile, pinned CPU cores.",
            "Fewer collectives a step leave fewer occasions to wait for each other.",
        ),
        at_most="warning",
        confidence=0.8,
    )


def find_bubble(view: View, stages_ns: Ints) -> list[Claim]:
    """``stages_ns``: [R]; sends, receives and collectives across pipeline stages, as far as they show."""
    everywhere = np.ones(len(view.ranks), np.bool_)
    share = view.typical(view.share(stages_ns), everywhere)
    each_ns = view.typical(view.per_step(stages_ns), everywhere)
    if share <= thresholds.EXPOSED_SHARE or each_ns < thresholds.FLOOR_NS:
        return []
    return [
        claim_of(
            view,
            "pipeline_bubble",
            f"Pipeline stages wait for each other {view.each_step(each_ns)}, {share_text(share)} of the time: that is "
            "the bubble of the schedule, and no rank is late by it.",
            where=everywhere,
            # How much of it another schedule would save is not in a trace.
            saved_ns=np.zeros(len(view.ranks), np.int64),
            phase="comm",
            evidence={
                "bubble_ms_per_step": round(each_ns / 1e6, 3),
                "bubble_share": round(share, 4),
            },
            advice=(
                "More microbatches a step make the bubble smaller, as do interleaved and zero-bubble schedules.",
                "Compare the computing time of the stages in the table of ranks: the longest sets the pace of all.",
            ),
            confidence=0.7,
        )
    ]

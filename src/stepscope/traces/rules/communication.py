"""What the ranks exchange and nothing hides.

A collective's kernel runs from when a rank has come to when the last one has, and then for the transfer.  What a rank
waited for one that is found to be late is that rank's doing (``stragglers.py``); the rest of what is exposed is the
network's, or nobody's in particular.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.units import ms_text, share_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import Claim, View, claim_of, halved

__all__ = ["find_communication", "find_slow_rank"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def find_communication(view: View, late: Sequence[Claim]) -> list[Claim]:
    """``low_overlap`` and, where there is little to hide it behind, ``exposed_communication``.

    ``late``: stragglers, for whom some of it is waiting, which is left out then.
    """
    waited_ns = view.each(lambda one: int(view.job.collectives.wait_ns.get(one.rank, 0)))
    exposed_ns = view.times.exposed_ns
    if late:
        exposed_ns, waited_ns = np.maximum(exposed_ns - waited_ns, 0), np.zeros_like(waited_ns)
    least_share = np.where(view.host_comm, thresholds.EXPOSED_HOST_SHARE, thresholds.EXPOSED_SHARE)
    floor_ns = np.where(view.host_comm, thresholds.EXPOSED_HOST_FLOOR_NS, thresholds.FLOOR_NS)
    where = (view.share(exposed_ns) > least_share) & (view.per_step(exposed_ns) >= floor_ns)
    if not where.any():
        return []
    hidden = view.times.overlap_ns / np.maximum(view.times.comm_ns, 1)
    free_ns = view.times.compute_ns - view.times.overlap_ns
    hideable_ns = np.minimum((exposed_ns * thresholds.HIDEABLE_SHARE).astype(np.int64), free_ns)
    poorly = where & (hidden < thresholds.OVERLAP_LOW) & (hideable_ns >= exposed_ns / 2)
    if poorly.any():
        return [_low_overlap(view, exposed_ns, waited_ns, hidden, hideable_ns, poorly)]
    return [_exposed(view, exposed_ns, waited_ns, hidden, where)]


def _low_overlap(
    view: View, exposed_ns: Ints, waited_ns: Ints, hidden: Floats, hideable_ns: Ints, where: Bools
) -> Claim:
    each_ns, share = view.typical(view.per_step(exposed_ns), where), view.typical(view.share(exposed_ns), where)
    return claim_of(
        view,
        "low_overlap",
        f"Only {share_text(1 - view.typical(1 - hidden, where))} of the communication is hidden behind the "
        f"computation{view.of_whom(where)}: {view.each_step(each_ns)}, {share_text(share)} of the time, nothing is "
        "computed.",
        where=where,
        saved_ns=hideable_ns,
        most_ns=exposed_ns,
        phase="comm",
        evidence=_evidence(view, exposed_ns, waited_ns, hidden, where),
        advice=(
            "DDP: smaller buckets (bucket_cap_mb) go out while backward still runs; no find_unused_parameters.",
            "FSDP: fully_shard() each block, and prefetch the next (set_modules_to_forward_prefetch).",
            "Accumulation under no_sync(), or bfloat16 gradients, sends less.",
        ),
        confidence=0.85 if len(view.ranks) > 1 else 0.7,
    )


def _exposed(view: View, exposed_ns: Ints, waited_ns: Ints, hidden: Floats, where: Bools) -> Claim:
    each_ns, share = view.typical(view.per_step(exposed_ns), where), view.typical(view.share(exposed_ns), where)
    waited = view.typical(view.per_step(np.minimum(waited_ns, exposed_ns)), where)
    mostly_waiting = len(view.ranks) > 1 and waited >= each_ns / 2
    told = f", {ms_text(waited / 1e6)} of it waiting for the last rank to arrive" if mostly_waiting else ""
    if mostly_waiting:
        advice: tuple[str, ...] = (
            "No rank is always the last: look for work that varies from rank to rank and step to step.",
            "Fewer collectives a step leave fewer occasions to wait for each other.",
        )
    else:
        advice = (
            "Send less: bfloat16 gradients (bf16_compress_hook), accumulation under no_sync(), larger batches.",
            "Compare the bus bandwidth in the table of collectives with what the links can do.",
        )
    if len(view.ranks) == 1:
        advice = (*advice, "Trace all ranks to tell waiting from transfer.")
    return claim_of(
        view,
        "exposed_communication",
        f"Communication that nothing hides takes {view.each_step(each_ns)}{view.of_whom(where)}, "
        f"{share_text(share)} of the time{told}.",
        where=where,
        saved_ns=halved(exposed_ns),
        most_ns=exposed_ns,
        phase="comm",
        evidence=_evidence(view, exposed_ns, waited_ns, hidden, where),
        advice=advice,
        # Threads that communicate may wait for a core as well as for the network.
        at_most="warning" if view.host_comm[where].any() else "critical",
        confidence=0.85 if len(view.ranks) > 1 else 0.7,
    )


def _evidence(view: View, exposed_ns: Ints, waited_ns: Ints, hidden: Floats, where: Bools) -> dict[str, Any]:
    def ms(values: Ints) -> float:
        return round(view.typical(view.per_step(values), where) / 1e6, 3)

    return {
        "exposed_ms_per_step": ms(exposed_ns),
        "communication_ms_per_step": ms(view.times.comm_ns),
        "compute_ms_per_step": ms(view.times.compute_ns),
        "waited_ms_per_step": ms(waited_ns) if len(view.ranks) > 1 else None,
        "hidden_share": round(1 - view.typical(1 - hidden, where), 4),
        "exposed_share": round(view.typical(view.share(exposed_ns), where), 4),
    }


def find_slow_rank(view: View) -> list[Claim]:
    """A rank whose computation, or whose steps, are longer than its peers'."""
    if len(view.ranks) < thresholds.PEERS_AT_LEAST or int(view.steps.min()) < thresholds.CRITICAL_STEPS:
        return []
    if not view.stepped:
        return []
    step = view.per_step(view.step_ns)
    for measure, values in (("compute", view.per_step(view.times.compute_ns)), ("step", step)):
        middle = float(np.sort(values)[(len(values) - 1) // 2])
        excess: Floats = np.maximum(values - middle, 0.0)
        floor_ns = np.where(view.on_device, thresholds.FLOOR_NS, thresholds.SLOW_HOST_FLOOR_NS)
        where = (excess > thresholds.SLOW_RANK_SHARE * middle) & (excess >= floor_ns)
        where &= excess >= thresholds.WARNING_SHARE * step
        if where.any():
            return [_slow(view, measure, values, middle, excess, where)]
    return []


def _slow(view: View, measure: str, values: Floats, middle: float, excess: Floats, where: Bools) -> Claim:
    worst = int(np.where(where, excess, -1.0).argmax())
    who = f"rank {view.ranks[worst]}"
    by_rank = zip(view.ranks, values.tolist(), strict=True)
    return claim_of(
        view,
        "slow_rank",
        f"{who.capitalize()} {'computes' if measure == 'compute' else 'takes'} {ms_text(values[worst] / 1e6)} in every "
        f"step, the median rank {ms_text(middle / 1e6)}.",
        where=where,
        saved_ns=(excess * view.steps).astype(np.int64),
        evidence={
            "measure": measure,
            "rank_ms": round(float(values[worst]) / 1e6, 3),
            "median_ms": round(middle / 1e6, 3),
            "by_rank_ms": {str(rank): round(value / 1e6, 3) for rank, value in by_rank},
        },
        advice=(
            f"Check that {who} has the same work: batch shape, sequence length, experts, pipeline stage.",
            "If it has, the device is slower: clocks, power limit, temperature (nvidia-smi -q -d PERFORMANCE).",
        ),
        confidence=0.85,
    )

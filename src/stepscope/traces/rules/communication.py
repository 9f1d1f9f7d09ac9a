"""What the ranks exchange: who is waited for, and what of it nothing hides.

A collective's kernel runs from when a rank has come to when the last one has, and then for the transfer.  What a rank
waited for one that is found to be late is that rank's doing; the rest of what is exposed is the network's, or nobody's
in particular.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.units import ms_text, share_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import Claim, View, claim_of

__all__ = ["find_communication", "find_slow_rank"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def find_communication(view: View, late: Sequence[Claim]) -> list[Claim]:
    """``low_overlap`` and, where there is nothing to hide it behind, ``exposed_communication``; ``late``: stragglers."""
    comm_ns, overlap_ns, compute_ns = view.times.comm_ns, view.times.overlap_ns, view.times.compute_ns
    waited_ns = view.each(lambda one: int(view.job.collectives.wait_ns.get(one.rank, 0)))
    exposed_ns = view.times.exposed_ns
    if late:
        exposed_ns = np.maximum(exposed_ns - waited_ns, 0)
    where = (view.share(exposed_ns) > thresholds.EXPOSED_SHARE) & (view.per_step(exposed_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    hidden = overlap_ns / np.maximum(comm_ns, 1)
    free_ns = compute_ns - overlap_ns
    hideable_ns = np.minimum((exposed_ns * thresholds.HIDEABLE_SHARE).astype(np.int64), free_ns)
    poorly = where & (hidden < thresholds.OVERLAP_LOW) & (hideable_ns >= exposed_ns / 2)
    evidence = {
        "exposed_ms_per_step": round(view.typical(view.per_step(exposed_ns), where) / 1e6, 3),
        "communication_ms_per_step": round(view.typical(view.per_step(comm_ns), where) / 1e6, 3),
        "hidden_share": round(view.typical(hidden, where), 4),
        "waited_ms_per_step": round(view.typical(view.per_step(waited_ns), where) / 1e6, 3)
        if len(view.ranks) > 1
        else None,
        "compute_ms_per_step": round(view.typical(view.per_step(compute_ns), where) / 1e6, 3),
    }
    if poorly.any():
        each_ns = view.typical(view.per_step(exposed_ns), poorly)
        return [
            claim_of(
                view,
                "low_overlap",
                f"Only {share_text(view.typical(hidden, poorly))} of the communication is hidden behind the "
                f"computation{view.of_whom(poorly)}: {view.each_step(each_ns)}, "
                f"{share_text(view.typical(view.share(exposed_ns), poorly))} of the time, the device does nothing else.",
                where=poorly,
                saved_ns=hideable_ns,
                phase="comm",
                evidence=evidence,
                advice=(
                    "DDP: smaller buckets (bucket_cap_mb) are sent while backward still runs; no find_unused_parameters.",
                    "FSDP: fully_shard() each block and prefetch the next (set_modules_to_forward_prefetch).",
                    "A handful of steps under no_sync(), or bfloat16 gradients, send less.",
                ),
                confidence=0.85 if len(view.ranks) > 1 else 0.7,
            )
        ]
    return [_exposed(view, exposed_ns, waited_ns, where, evidence)]


def _exposed(
    view: View, exposed_ns: Ints, waited_ns: Ints, where: NDArray[np.bool_], evidence: dict[str, Any]
) -> Claim:
    each_ns, share = view.typical(view.per_step(exposed_ns), where), view.typical(view.share(exposed_ns), where)
    waited = view.typical(view.per_step(np.minimum(waited_ns, exposed_ns)), where)
    mostly_waiting = len(view.ranks) > 1 and waited >= each_ns / 2
    told = f", {ms_text(waited / 1e6)} of it waiting for the last rank to arrive" if mostly_waiting else ""
    if mostly_waiting:
        advice = (
            "No rank is always the last: look for work that varies from rank to rank and step to step.",
            "Fewer collectives a step leave fewer occasions to wait for each other.",
        )
    else:
        advice = (
            "Send less: bfloat16 gradients (bf16_compress_hook), accumulation under no_sync(), larger batches.",
            "Compare the bus bandwidth in the table of collectives with what the links can do.",
        )
    return claim_of(
        view,
        "exposed_communication",
        f"Communication that nothing hides takes {view.each_step(each_ns)}{view.of_whom(where)}, "
        f"{share_text(share)} of the time{told}.",
        where=where,
        saved_ns=exposed_ns,
        phase="comm",
        evidence=evidence,
        advice=advice if len(view.ranks) > 1 else (*advice, "Trace all ranks to tell waiting from transfer."),
        confidence=0.85 if len(view.ranks) > 1 else 0.7,
    )


def find_slow_rank(view: View, late: Sequence[Claim]) -> list[Claim]:
    """A rank whose steps, or whose computation, are longer than its peers'."""
    known = {rank for claim in late for rank in claim.finding.ranks}
    if len(view.ranks) < 3 or int(view.steps.min()) < thresholds.CRITICAL_STEPS or not view.stepped:
        return []
    step = view.per_step(view.step_ns)
    for what, values in (
        ("computes", view.per_step(view.times.compute_ns)),
        ("steps take", step),
    ):
        middle = float(np.sort(values)[(len(values) - 1) // 2])
        excess: Floats = np.maximum(values - middle, 0.0)
        where = (excess > thresholds.SLOW_RANK_SHARE * middle) & (excess >= thresholds.FLOOR_NS)
        where &= excess >= thresholds.WARNING_SHARE * step
        if where.any() and where.sum() <= len(values) // 2:
            break
    else:
        return []
    ranks = view.culprits(where)
    worst = int(np.where(where, excess, -1.0).argmax())
    who = f"Rank {view.ranks[worst]}"
    verb = "computes" if what == "computes" else "takes"
    claim = claim_of(
        view,
        "slow_rank",
        f"{who} {verb} {ms_text(values[worst] / 1e6)} in every step, the median rank {ms_text(middle / 1e6)}.",
        where=where,
        saved_ns=(excess * view.steps).astype(np.int64),
        evidence={
            "measure": "compute" if what == "computes" else "step",
            "rank_ms": round(float(values[worst]) / 1e6, 3),
            "median_ms": round(middle / 1e6, 3),
            "by_rank_ms": {
                str(rank): round(float(value) / 1e6, 3) for rank, value in zip(view.ranks, values, strict=True)
            },
        },
        advice=(
            f"Check that {who.lower()} has the same work: batch shape, sequence length, experts, pipeline stage.",
            "If it has, the device is slower: clocks, power limit, temperature (nvidia-smi -q -d PERFORMANCE).",
        ),
        at_most="info" if set(ranks) <= known else "critical",
        confidence=0.85,
    )
    return [claim]

"""Rules about exposed communication and slow ranks.

A collective's kernel runs from the arrival of its rank to the arrival of the last rank, and then for the transfer.
Overlap does not affect the waiting: that is caused by late ranks, jitter or a pipeline bubble (``stragglers.py``).
Findings here are about exposed transfer. Time that cannot be split, because traces of other ranks are missing, counts
as transfer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.judge.chain import Claim
from stepscope.records.text import ms_text, share_text
from stepscope.traces.across_ranks.arrivals import transfers_of
from stepscope.traces.collective_calls import OPS, GroupKind
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import JobView, claim_of, halved, in_ms

__all__ = ["find_communication", "find_slow_rank"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def find_communication(view: JobView) -> list[Claim]:
    """Find ``low_overlap`` or, if there is little to hide the communication behind, ``exposed_communication``."""
    exposed_ns = view.exposed.transfer_ns
    least_share = np.where(view.host_comm, thresholds.EXPOSED_HOST_SHARE, thresholds.EXPOSED_SHARE)
    floor_ns = np.where(view.host_comm, thresholds.EXPOSED_HOST_FLOOR_NS, thresholds.FLOOR_NS)
    where = (view.share(exposed_ns) > least_share) & (view.per_step(exposed_ns) >= floor_ns)
    if not where.any():
        return []
    # Without waiting: a rank that arrives early and waits does not hide less because of it.
    moved_ns = exposed_ns + view.times.overlap_ns
    hidden = view.times.overlap_ns / np.maximum(moved_ns, 1)
    free_ns = view.times.compute_ns - view.times.overlap_ns
    hideable_ns = np.minimum((exposed_ns * thresholds.HIDEABLE_SHARE).astype(np.int64), free_ns)
    poorly = where & (hidden < thresholds.OVERLAP_LOW) & (hideable_ns >= exposed_ns / 2)
    if poorly.any():
        return [_low_overlap(view, hidden, hideable_ns, poorly)]
    return [_exposed(view, hidden, where)]


def _low_overlap(view: JobView, hidden: Floats, hideable_ns: Ints, where: Bools) -> Claim:
    exposed_ns = view.exposed.transfer_ns
    each_ns = view.each_ns(exposed_ns, where)
    kind = _kind(view)
    return claim_of(
        view,
        "low_overlap",
        f"Only {share_text(1 - view.typical(1 - hidden, where))} of the communication is hidden behind the "
        f"computation{view.of_whom(where)}: for {view.each_step(each_ns)} nothing is computed{_beside(view, where)}.",
        where=where,
        saved_ns=hideable_ns,
        most_ns=exposed_ns,
        phase="comm",
        evidence=_evidence(view, hidden, where) | {"group_kind": kind},
        advice=(*_overlap_advice(view, kind), *_all_ranks(view)),
        confidence=0.85 if len(view.ranks) > 1 else 0.7,
    )


def _exposed(view: JobView, hidden: Floats, where: Bools) -> Claim:
    exposed_ns = view.exposed.transfer_ns
    each_ns = view.each_ns(exposed_ns, where)
    kind = _kind(view)
    less = {
        "tensor": "Send less: fewer tensor-parallel ranks, sequence parallelism, larger batches per collective.",
        "expert": "Send less: fewer ranks per expert group, tokens in FP8, a smaller capacity factor.",
        "context": "Send less: fewer context-parallel ranks, or shorter sequences.",
    }.get(kind) or {
        True: "Send less: bfloat16 (MixedPrecisionPolicy), reshard_after_forward=False where memory allows, "
        "larger batches.",
        False: "Send less: bfloat16 gradients (bf16_compress_hook), accumulation under no_sync(), larger batches.",
        None: "Send less: bfloat16 gradients, accumulation, larger batches.",
    }[_shards(view, kind)]
    return claim_of(
        view,
        "exposed_communication",
        f"Communication that nothing hides takes {view.each_step(each_ns)}{view.of_whom(where)}{_beside(view, where)}.",
        where=where,
        saved_ns=halved(exposed_ns),
        most_ns=exposed_ns,
        phase="comm",
        evidence=_evidence(view, hidden, where) | {"group_kind": kind},
        advice=(
            less,
            "Compare the bus bandwidth in the table of collectives with what the links can do.",
            *_all_ranks(view),
        ),
        # Threads that communicate may be waiting for a core as well as for the network.
        at_most="warning" if view.host_comm[where].any() else "critical",
        confidence=0.85 if len(view.ranks) > 1 else 0.7,
    )


def _all_ranks(view: JobView) -> tuple[str, ...]:
    return () if len(view.ranks) > 1 else ("Trace all ranks to tell waiting from transfer.",)


def _beside(view: JobView, where: Bools) -> str:
    """Mention that the figure excludes waiting, if there is much of it."""
    waited_ns = view.each_ns(view.exposed.wait_ns, where)
    if waited_ns < thresholds.EXPOSED_SHARE * view.step_time_ns:
        return ""
    return f", besides {ms_text(waited_ns / 1e6)} of waiting for each other"


def _kind(view: JobView) -> GroupKind:
    """Return the kind of group with most of the exposed transfer."""
    times: dict[GroupKind, int] = {}
    transfer_ns = transfers_of(view.job.ranks, view.job.collectives)
    for analysis, own_ns in zip(view.job.ranks, transfer_ns, strict=True):
        for code, group in enumerate(analysis.exchanges.groups):
            times[group.kind] = times.get(group.kind, 0) + int(own_ns[analysis.exchanges.group == code].sum())
    return max(times, key=lambda kind: times[kind]) if times else "unknown"


def _shards(view: JobView, kind: GroupKind) -> bool | None:
    """Return whether groups of this kind exchange shards as FSDP does (also with HSDP).

    False: whole gradients, as DDP does. None: both, or neither.
    """
    spent_ns: dict[str, int] = {}
    for analysis in view.job.ranks:
        exchanges = analysis.exchanges
        kinds = np.array([group.kind == kind for group in exchanges.groups] + [kind == "unknown"])
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            where = (exchanges.op == OPS.index(name)) & kinds[exchanges.group]  # −1 (no known group) selects the last
            spent_ns[name] = spent_ns.get(name, 0) + int((exchanges.end_ns - exchanges.start_ns)[where].sum())
    if (
        spent_ns.get("reduce_scatter")
        and spent_ns["all_gather"]
        and spent_ns["reduce_scatter"] > spent_ns["all_reduce"]
    ):
        return True
    return False if spent_ns.get("all_reduce") and not spent_ns["reduce_scatter"] else None


def _overlap_advice(view: JobView, kind: GroupKind) -> tuple[str, ...]:
    if kind == "tensor":
        return (
            "Exchanges within layers hide only behind other work: async tensor parallelism, alternating microbatches.",
            "Keep tensor-parallel groups within one node (NVLink), and no larger than the model needs.",
        )
    if kind == "expert":
        return (
            "Hide the all-to-all of experts behind the shared expert, or behind another microbatch.",
            "Keep expert groups within one node, or send tokens in a smaller data type.",
        )
    if kind == "context":
        return (
            "Ring attention hides the exchange behind the attention of the previous chunk; all-gathers do not.",
            "Fewer context-parallel ranks exchange less.",
        )
    ddp = "DDP: smaller buckets (bucket_cap_mb) are sent while backward still runs; no find_unused_parameters."
    fsdp = "FSDP: fully_shard() each block, and prefetch the next (set_modules_to_forward_prefetch)."
    shards = _shards(view, kind)
    if shards and kind in ("data", "unknown"):
        return (
            fsdp,
            "bfloat16 (MixedPrecisionPolicy) sends less; so does reshard_after_forward=False, using more memory.",
        )
    if kind == "data" or _trains_data_parallel(view):
        less = "Accumulation under no_sync(), or bfloat16 gradients, sends less."
        return (ddp, less) if shards is False else (ddp, fsdp, less)
    return (
        "If gradients are exchanged: DDP with smaller buckets (bucket_cap_mb), or fully_shard() per block.",
        "If layers are split (tensor, expert, context parallel): groups within one node, fewer ranks per group.",
    )


def _trains_data_parallel(view: JobView) -> bool:
    """Return whether the traces show DDP or FSDP."""
    tables = (analysis.tables.get(name) for analysis in view.analyses for name in ("annotations", "operators"))
    starts = ("DistributedDataParallel", "FSDP", "FullyShardedDataParallel")
    return any(str(row[0]).startswith(starts) for table in tables if table for row in table.rows)


def _evidence(view: JobView, hidden: Floats, where: Bools) -> dict[str, Any]:
    def ms(values: Ints) -> float:
        return in_ms(view.each_ns(values, where))

    return {
        "exposed_ms_per_step": ms(view.exposed.transfer_ns),
        "communication_ms_per_step": ms(view.times.comm_ns),
        "compute_ms_per_step": ms(view.times.compute_ns),
        "waited_ms_per_step": ms(view.exposed.wait_ns) if len(view.ranks) > 1 else None,
        "hidden_share": round(1 - view.typical(1 - hidden, where), 4),
        "exposed_share": round(view.typical(view.share(view.exposed.transfer_ns), where), 4),
    }


def find_slow_rank(view: JobView) -> list[Claim]:
    """Find a rank whose computation or steps are longer than its peers'."""
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
        where &= excess >= thresholds.WARNING_SHARE * view.step_time_ns
        if where.any():
            return [_slow(view, measure, values, middle, excess, where)]
    return []


def _slow(view: JobView, measure: str, values: Floats, middle: float, excess: Floats, where: Bools) -> Claim:
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
            "rank_ms": in_ms(float(values[worst])),
            "median_ms": in_ms(middle),
            "by_rank_ms": {str(rank): in_ms(value) for rank, value in by_rank},
        },
        advice=(
            f"Check that {who} has the same work: batch shape, sequence length, experts, pipeline stage.",
            "If it has, the device is slower: clocks, power limit, temperature (nvidia-smi -q -d PERFORMANCE).",
        ),
        confidence=0.85,
    )

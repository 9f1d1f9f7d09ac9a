"""The rules on traces as one table: their order, what each needs, what time it may claim, and who wins.

Read ``RULES`` from top to bottom. The time that they share is what each rank's device waits for the host: a device that
idles while the host is in the DataLoader also waits for the host, and that is one cause, not two. Each rule sees what
those above it leave. Two claims are settled by the relations that the rules declare, and by nothing else.

What is here is wiring; a rule's own file says how it decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stepscope.judge.chain import Chain, Claim, Claims, Need, Relation, Rule, Scope
from stepscope.records.finding import Finding
from stepscope.traces.rules.communication import find_communication, find_slow_rank
from stepscope.traces.rules.device import (
    find_bandwidth,
    find_exposed_copies,
    find_float32,
    find_gaps,
    find_low_occupancy,
    find_memory,
    find_occupancy,
    find_pageable_copies,
    find_small_batch,
    find_tiny_kernels,
    find_underused,
)
from stepscope.traces.rules.host import (
    find_compiling,
    find_contention,
    find_garbage,
    find_host_copies,
    find_idle,
    find_idle_in_syncs,
    find_launches,
    find_loading,
    find_python,
    find_syncs,
    find_unfused,
)
from stepscope.traces.rules.practices import find_practices, find_truncated
from stepscope.traces.rules.stragglers import find_bubble, find_jitter, find_stragglers
from stepscope.traces.rules.view import JobView

__all__ = ["CHAIN", "RULES", "available"]

Ints = NDArray[np.int64]
Find = Callable[[JobView, Claims], Sequence[Claim]]


def available(view: JobView) -> frozenset[Need]:
    """What the rules find here."""
    there = {Need.STEPS: bool(view.analyses), Need.RANKS: len(view.ranks) > 1}
    return frozenset(need for need, present in there.items() if present)


# -- relations --------------------------------------------------------------------------------------------------------

ON_HOST = (
    *("loader_bound", "recompiles", "graph_breaks", "gc_pauses", "host_python", "host_sync", "gpu_idle_sync"),
    *("launch_bound", "gpu_idle_host", "gil_contention", "host_copies", "unfused_optimizer"),
)
ON_DEVICE = (
    *("gpu_idle_gaps", "tiny_kernels", "pageable_copies", "exposed_copies", "fp32_matmul"),
    *("low_occupancy_attention", "low_occupancy", "small_batch", "bandwidth_bound"),
)
OF_RANKS = ("low_overlap", "exposed_communication", "slow_rank", "pipeline_bubble")


def _causes(own: Sequence[Claim]) -> dict[int, str]:
    """Why each late rank is late."""
    found = (claim.finding.evidence["causes"].items() for claim in own)
    return {int(rank): cause["cause"] for causes in found for rank, cause in causes}


def _computes_longer(view: JobView, own: Sequence[Claim], other: Claim) -> bool:
    late = {rank for rank, cause in _causes(own).items() if cause in ("slower_kernels", "more_work")}
    return bool(other.finding.ranks) and late.issuperset(other.finding.ranks)


def _concerns_late_ranks(view: JobView, own: Sequence[Claim], other: Claim) -> bool:
    late = {rank for claim in own if claim.finding.severity != "info" for rank in claim.finding.ranks}
    return bool(other.finding.ranks) and late.issuperset(other.finding.ranks)


def _always(view: JobView, own: Sequence[Claim], other: Claim) -> bool:
    return True


def _replaces(kind: str, reason: str) -> Relation[JobView]:
    return Relation(effect="replaces", kinds=(kind,), when=_always, reason=reason)


OF_LATE_RANKS = (
    _replaces("collective_jitter", "the others wait for these ranks"),
    Relation[JobView](
        effect="replaces",
        kinds=("slow_rank",),
        when=_computes_longer,
        reason="longer computation is why they are late: it would be reported twice",
    ),
    Relation[JobView](
        effect="lowers",
        kinds=(*ON_HOST, *ON_DEVICE, *OF_RANKS),
        when=_concerns_late_ranks,
        reason="it concerns late ranks only, so it is why they are late",
    ),
)


# -- rules ------------------------------------------------------------------------------------------------------------


def _waiting(find: Callable[[JobView, Ints], Sequence[Claim]]) -> Find:
    """A rule about the time for which devices wait for the host, or the steps of ranks without a device."""
    return lambda view, claims: find(view, claims.left_ns.astype(np.int64))


def _idling(find: Callable[[JobView, Ints], Sequence[Claim]]) -> Find:
    """The same for devices only."""
    return lambda view, claims: find(view, np.where(view.on_device, claims.left_ns.astype(np.int64), 0))


def _plain(find: Callable[[JobView], Sequence[Claim]]) -> Find:
    """A rule that needs no other."""
    return lambda view, claims: find(view)


def _timeless(find: Callable[[JobView], Sequence[Finding]]) -> Find:
    """A rule that explains no time."""
    return lambda view, claims: [
        Claim(finding=finding, explained_ns=np.zeros(len(view.ranks), np.int64)) for finding in find(view)
    ]


STEPS = frozenset({Need.STEPS})
SEVERAL = frozenset({Need.STEPS, Need.RANKS})
ANY, LATE, NO_TIME = Scope(), Scope(ranks="late"), Scope(phases=())
INPUT, COPIES, COMM = Scope(phases=("input",)), Scope(phases=("h2d",)), Scope(phases=("comm",))


def _rule(
    name: str,
    kinds: str,
    find: Find,
    scope: Scope,
    thresholds: str = "",
    *,
    needs: frozenset[Need] = STEPS,
    relations: tuple[Relation[JobView], ...] = (),
) -> Rule[JobView]:
    """Build one row of the table; ``kinds`` and ``thresholds``: names, separated by spaces."""
    return Rule(
        name=name,
        kinds=tuple(kinds.split()),
        find=find,
        scope=scope,
        needs=needs,
        relations=relations,
        thresholds=tuple(thresholds.split()),
    )


RULES: tuple[Rule[JobView], ...] = (
    _rule(
        *("late ranks", "collective_straggler", _plain(find_stragglers), LATE),
        "STRAGGLER_SHARE FLOOR_NS LAST_SHARE BY_CHANCE",
        needs=SEVERAL,
        relations=OF_LATE_RANKS,
    ),
    _rule("loading", "loader_bound", _waiting(find_loading), INPUT, "LOADER_SHARE LOADER_FLOOR_NS"),
    _rule("compiling", "recompiles graph_breaks", _waiting(find_compiling), ANY, "COMPILE_SHARE BREAKS_AT_LEAST"),
    _rule("garbage collection", "gc_pauses", _waiting(find_garbage), ANY, "GC_SHARE"),
    _rule("Python", "host_python", _waiting(find_python), ANY, "PYTHON_SHARE PYTHON_FLOOR_NS"),
    _rule("Python threads", "gil_contention", _plain(find_contention), NO_TIME, "GIL_SHARE"),
    _rule("copies on the host", "host_copies", _plain(find_host_copies), NO_TIME, "HOST_COPIES_SHARE"),
    _rule("optimizer", "unfused_optimizer", _waiting(find_unfused), NO_TIME, "OPTIMIZER_SHARE OPTIMIZER_CALLS"),
    _rule("waits for the device", "host_sync", _idling(find_syncs), ANY, "SYNC_SHARE"),
    _rule("idle in waits", "gpu_idle_sync", _idling(find_idle_in_syncs), ANY, "SYNC_SHARE"),
    _rule(
        *("launches", "launch_bound", _idling(find_launches), ANY, "HOST_IDLE_SHARE KERNELS_MANY SMALL_KERNEL_NS"),
        relations=(_replaces("tiny_kernels", "short kernels are why launching cannot keep up"),),
    ),
    _rule("idle device", "gpu_idle_host", _idling(find_idle), ANY, "HOST_IDLE_SHARE"),
    _rule(
        *("tiny kernels", "tiny_kernels", _plain(find_tiny_kernels), NO_TIME),
        "TINY_COUNT_SHARE TINY_PER_STEP TINY_TIME_SHARE",
        relations=(_replaces("gpu_idle_gaps", "a gap after each of many kernels is their cost"),),
    ),
    _rule("gaps", "gpu_idle_gaps", _plain(find_gaps), NO_TIME, "GAPS_SHARE"),
    _rule("pageable copies", "pageable_copies", _plain(find_pageable_copies), COPIES, "PAGEABLE_SHARE PAGEABLE_BYTES"),
    _rule("exposed copies", "exposed_copies", _plain(find_exposed_copies), COPIES, "COPIES_SHARE COPIES_WARNING_SHARE"),
    _rule("float32", "fp32_matmul", _plain(find_float32), NO_TIME, "FP32_SHARE TENSOR_CORES_FROM"),
    _rule(
        *("attention", "low_occupancy_attention", _plain(find_low_occupancy), NO_TIME),
        "ATTENTION_OCCUPANCY ATTENTION_SHARE",
    ),
    _rule("occupancy", "low_occupancy", _plain(find_occupancy), NO_TIME, "OCCUPANCY_LOW OCCUPANCY_SHARE"),
    _rule("small batch", "small_batch", _plain(find_small_batch), NO_TIME, "BLOCKS_FEW BLOCKS_SHARE"),
    _rule("bandwidth", "bandwidth_bound", _plain(find_bandwidth), NO_TIME, "BANDWIDTH_SHARE"),
    _rule(
        *("communication", "low_overlap exposed_communication", _plain(find_communication), COMM),
        "EXPOSED_SHARE OVERLAP_LOW",
    ),
    _rule(
        *("jitter", "collective_jitter", _plain(find_jitter), COMM, "EXPOSED_SHARE"),
        needs=SEVERAL,
        relations=(
            Relation(
                effect="lowers",
                kinds=("slow_rank",),
                when=_always,
                reason="the others do not wait for this rank in particular: it was unlucky in the traced steps",
            ),
        ),
    ),
    _rule("slow rank", "slow_rank", _plain(find_slow_rank), LATE, "SLOW_RANK_SHARE PEERS_AT_LEAST", needs=SEVERAL),
    _rule("pipeline", "pipeline_bubble", _plain(find_bubble), COMM, "EXPOSED_SHARE"),
    _rule(
        *("little use", "gpu_underused", lambda view, claims: find_underused(view, claims.all), NO_TIME),
        "UNDERUSED_SHARE",
    ),
    _rule(
        *("memory", "memory_near_limit fragmentation", _timeless(find_memory), NO_TIME),
        "NEAR_LIMIT_SHARE FRAGMENTED_SHARE",
    ),
    _rule("practices", "data_parallel ddp_without_nccl", _timeless(find_practices), NO_TIME),
    _rule("incomplete traces", "truncated_trace", _timeless(find_truncated), NO_TIME, needs=frozenset()),
)

CHAIN = Chain(rules=RULES, time_ns=lambda view: view.idle.host_ns)

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
    find_exposed_copies,
    find_float32,
    find_gaps,
    find_low_occupancy,
    find_memory,
    find_pageable_copies,
    find_tiny_kernels,
    find_underused,
)
from stepscope.traces.rules.host import (
    find_compiling,
    find_garbage,
    find_idle,
    find_idle_in_syncs,
    find_launches,
    find_loading,
    find_python,
    find_syncs,
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

ON_HOST = ("loader_bound", "recompiles", "graph_breaks", "gc_pauses", "host_python", "host_sync", "gpu_idle_sync")
ON_HOST += ("launch_bound", "gpu_idle_host")
ON_DEVICE = ("gpu_idle_gaps", "tiny_kernels", "pageable_copies", "exposed_copies", "fp32_matmul")
ON_DEVICE += ("low_occupancy_attention",)
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


OF_LATE_RANKS = (
    Relation[JobView](
        effect="replaces", kinds=("collective_jitter",), when=_always, reason="the others wait for these ranks"
    ),
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

RULES: tuple[Rule[JobView], ...] = (
    Rule(
        name="late ranks",
        kinds=("collective_straggler",),
        find=_plain(find_stragglers),
        scope=LATE,
        needs=SEVERAL,
        relations=OF_LATE_RANKS,
        thresholds=("STRAGGLER_SHARE", "FLOOR_NS", "LAST_SHARE", "BY_CHANCE"),
    ),
    Rule(
        name="loading",
        kinds=("loader_bound",),
        find=_waiting(find_loading),
        scope=INPUT,
        needs=STEPS,
        thresholds=("LOADER_SHARE", "LOADER_FLOOR_NS"),
    ),
    Rule(
        name="compiling",
        kinds=("recompiles", "graph_breaks"),
        find=_waiting(find_compiling),
        scope=ANY,
        needs=STEPS,
        thresholds=("COMPILE_SHARE", "BREAKS_AT_LEAST"),
    ),
    Rule(
        name="garbage collection",
        kinds=("gc_pauses",),
        find=_waiting(find_garbage),
        scope=ANY,
        needs=STEPS,
        thresholds=("GC_SHARE",),
    ),
    Rule(
        name="Python",
        kinds=("host_python",),
        find=_waiting(find_python),
        scope=ANY,
        needs=STEPS,
        thresholds=("PYTHON_SHARE", "PYTHON_FLOOR_NS"),
    ),
    Rule(
        name="waits for the device",
        kinds=("host_sync",),
        find=_idling(find_syncs),
        scope=ANY,
        needs=STEPS,
        thresholds=("SYNC_SHARE",),
    ),
    Rule(
        name="idle in waits",
        kinds=("gpu_idle_sync",),
        find=_idling(find_idle_in_syncs),
        scope=ANY,
        needs=STEPS,
        thresholds=("SYNC_SHARE",),
    ),
    Rule(
        name="launches",
        kinds=("launch_bound",),
        find=_idling(find_launches),
        scope=ANY,
        needs=STEPS,
        relations=(
            Relation(
                effect="replaces",
                kinds=("tiny_kernels",),
                when=_always,
                reason="short kernels are why launching cannot keep up",
            ),
        ),
        thresholds=("HOST_IDLE_SHARE", "KERNELS_MANY", "SMALL_KERNEL_NS"),
    ),
    Rule(
        name="idle device",
        kinds=("gpu_idle_host",),
        find=_idling(find_idle),
        scope=ANY,
        needs=STEPS,
        thresholds=("HOST_IDLE_SHARE",),
    ),
    Rule(
        name="tiny kernels",
        kinds=("tiny_kernels",),
        find=_plain(find_tiny_kernels),
        scope=NO_TIME,
        needs=STEPS,
        relations=(
            Relation(
                effect="replaces",
                kinds=("gpu_idle_gaps",),
                when=_always,
                reason="a gap after each of many kernels is their cost",
            ),
        ),
        thresholds=("TINY_COUNT_SHARE", "TINY_PER_STEP", "TINY_TIME_SHARE"),
    ),
    Rule(
        name="gaps",
        kinds=("gpu_idle_gaps",),
        find=_plain(find_gaps),
        scope=NO_TIME,
        needs=STEPS,
        thresholds=("GAPS_SHARE",),
    ),
    Rule(
        name="pageable copies",
        kinds=("pageable_copies",),
        find=_plain(find_pageable_copies),
        scope=COPIES,
        needs=STEPS,
        thresholds=("PAGEABLE_SHARE", "PAGEABLE_BYTES"),
    ),
    Rule(
        name="exposed copies",
        kinds=("exposed_copies",),
        find=_plain(find_exposed_copies),
        scope=COPIES,
        needs=STEPS,
        thresholds=("COPIES_SHARE", "COPIES_WARNING_SHARE"),
    ),
    Rule(
        name="float32",
        kinds=("fp32_matmul",),
        find=_plain(find_float32),
        scope=NO_TIME,
        needs=STEPS,
        thresholds=("FP32_SHARE", "TENSOR_CORES_FROM"),
    ),
    Rule(
        name="attention",
        kinds=("low_occupancy_attention",),
        find=_plain(find_low_occupancy),
        scope=NO_TIME,
        needs=STEPS,
        thresholds=("ATTENTION_OCCUPANCY", "ATTENTION_SHARE"),
    ),
    Rule(
        name="communication",
        kinds=("low_overlap", "exposed_communication"),
        find=_plain(find_communication),
        scope=COMM,
        needs=STEPS,
        thresholds=("EXPOSED_SHARE", "OVERLAP_LOW"),
    ),
    Rule(
        name="jitter",
        kinds=("collective_jitter",),
        find=_plain(find_jitter),
        scope=COMM,
        needs=SEVERAL,
        relations=(
            Relation(
                effect="lowers",
                kinds=("slow_rank",),
                when=_always,
                reason="the others do not wait for this rank in particular: it was unlucky in the traced steps",
            ),
        ),
        thresholds=("EXPOSED_SHARE",),
    ),
    Rule(
        name="slow rank",
        kinds=("slow_rank",),
        find=_plain(find_slow_rank),
        scope=LATE,
        needs=SEVERAL,
        thresholds=("SLOW_RANK_SHARE", "PEERS_AT_LEAST"),
    ),
    Rule(
        name="pipeline",
        kinds=("pipeline_bubble",),
        find=_plain(find_bubble),
        scope=COMM,
        needs=STEPS,
        thresholds=("EXPOSED_SHARE",),
    ),
    Rule(
        name="little use",
        kinds=("gpu_underused",),
        find=lambda view, claims: find_underused(view, claims.all),
        scope=NO_TIME,
        needs=STEPS,
        thresholds=("UNDERUSED_SHARE",),
    ),
    Rule(
        name="memory",
        kinds=("memory_near_limit", "fragmentation"),
        find=_timeless(find_memory),
        scope=NO_TIME,
        needs=STEPS,
        thresholds=("NEAR_LIMIT_SHARE", "FRAGMENTED_SHARE"),
    ),
    Rule(
        name="practices",
        kinds=("data_parallel", "ddp_without_nccl"),
        find=_timeless(find_practices),
        scope=NO_TIME,
        needs=STEPS,
    ),
    Rule(name="incomplete traces", kinds=("truncated_trace",), find=_timeless(find_truncated), scope=NO_TIME),
)

CHAIN = Chain(rules=RULES, time_ns=lambda view: view.idle.host_ns)

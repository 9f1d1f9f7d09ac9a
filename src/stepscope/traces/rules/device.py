"""Rules about how well a busy device is used: gaps, tiny kernels, copies, Tensor Cores, occupancy, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.judge.chain import Claim
from stepscope.records.finding import Finding
from stepscope.records.text import bytes_text, count_text, ms_text, share_text
from stepscope.traces.model.kernel_names import fitted, is_matrix_class, short_name
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import JobView, claim_of, cost_of, halved, in_ms

if TYPE_CHECKING:
    from stepscope.traces.device.dominant import KernelUse
    from stepscope.traces.rank_analysis import RankAnalysis

__all__ = [
    "find_bandwidth",
    "find_exposed_copies",
    "find_float32",
    "find_gaps",
    "find_low_occupancy",
    "find_memory",
    "find_occupancy",
    "find_pageable_copies",
    "find_small_batch",
    "find_tiny_kernels",
    "find_underused",
]


# -- kernels and copies -----------------------------------------------------------------------------------------------

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
KERNELS_SHOWN = 5
NAME_CHARS = 60
MOVING_KERNEL_NS = 10_000
"""Mean length from which on a kernel's time is that of its memory traffic."""


def find_gaps(view: JobView) -> list[Claim]:
    gaps_ns = view.idle.kernel_ns + view.idle.other_ns
    where = view.on_device & (view.share(gaps_ns) >= thresholds.GAPS_SHARE)
    where &= view.per_step(gaps_ns) >= thresholds.FLOOR_NS
    if not where.any():
        return []
    short, long = (view.each_ns(each, where) for each in (view.idle.kernel_ns, view.idle.other_ns))
    each_ns = view.each_ns(gaps_ns, where)
    mostly = "long gaps, in which they wait for another stream or process" if long > short else "short gaps"
    return [
        claim_of(
            view,
            "gpu_idle_gaps",
            f"The device idles between kernels that are already queued{view.of_whom(where)}: "
            f"{view.each_step(each_ns)}, mostly in {mostly}.",
            where=where,
            saved_ns=halved(gaps_ns),
            most_ns=gaps_ns,
            evidence={
                "short_gaps_ms_per_step": in_ms(short),
                "long_gaps_ms_per_step": in_ms(long),
            },
            advice=(
                "Look for waits between streams (wait_stream, wait_event) and for other processes on the device.",
                "CUDA graphs close the gap after each kernel; fewer and larger kernels have fewer gaps.",
            )[:: 1 if long > short else -1],
            confidence=0.75,
        )
    ]


def find_tiny_kernels(view: JobView) -> list[Claim]:
    """Find kernels so short that the gap after each is just as long; they cost the gaps and could be fused."""
    count = view.each(lambda analysis: analysis.pace.device.kernel_count)
    short = view.each(lambda analysis: analysis.pace.device.short_kernel_count)
    taken_ns = view.each(lambda analysis: analysis.pace.device.short_kernel_ns) + view.idle.kernel_ns
    where = view.on_device & (short > thresholds.TINY_COUNT_SHARE * count)
    where &= (view.per_step(short) >= thresholds.TINY_PER_STEP) & (view.share(taken_ns) >= thresholds.TINY_TIME_SHARE)
    if not where.any():
        return []
    each = round(view.each_ns(short, where))
    of_all = view.typical(short / np.maximum(count, 1), where)
    return [
        claim_of(
            view,
            "tiny_kernels",
            f"{count_text(each, 'kernel')} {view.in_what}{view.of_whom(where)}, "
            f"{share_text(of_all)} of all kernels, are shorter than 10 µs; with the gaps between them they take "
            f"{view.each_step(view.each_ns(taken_ns, where))}.",
            where=where,
            saved_ns=view.idle.kernel_ns,
            evidence={
                "short_kernels_per_step": each,
                "short_kernel_share": round(of_all, 4),
                "short_kernel_ms_per_step": in_ms(view.each_ns(taken_ns - view.idle.kernel_ns, where)),
                "gaps_ms_per_step": in_ms(view.each_ns(view.idle.kernel_ns, where)),
            },
            advice=(
                "fused=True or foreach=True fuses the kernels of the optimizer."
                if view.compiled(where)
                else "torch.compile fuses chains of elementwise kernels; fused=True or foreach=True the optimizer's.",
                'CUDA graphs (torch.compile(mode="reduce-overhead")) close the gaps between those that remain.',
            ),
            confidence=0.8,
        )
    ]


def find_pageable_copies(view: JobView) -> list[Claim]:
    """Price what pinned memory would hide: at most the time in which the device did nothing but copy."""
    copy_ns = view.each(lambda analysis: analysis.pace.device.pageable_copy_ns)
    size = view.each(lambda analysis: analysis.pace.device.pageable_copy_bytes)
    saved_ns = np.minimum(copy_ns, view.each(lambda analysis: analysis.pace.work.exposed_memory_ns))
    where = (view.share(saved_ns) > thresholds.PAGEABLE_SHARE) & (view.per_step(saved_ns) >= thresholds.FLOOR_NS)
    where &= view.per_step(size) >= thresholds.PAGEABLE_BYTES
    if not where.any():
        return []
    each_ns, each_bytes = view.each_ns(copy_ns, where), view.each_ns(size, where)
    count = view.each_ns(view.each(lambda analysis: analysis.pace.device.pageable_copy_count), where)
    rate = each_bytes / each_ns * 1e9 if each_ns else 0.0
    return [
        claim_of(
            view,
            "pageable_copies",
            f"Copies from pageable memory take {ms_text(each_ns / 1e6)} {view.in_what}{view.of_whom(where)} "
            f"({bytes_text(each_bytes)} at {bytes_text(rate)}/s); the device does nothing else for "
            f"{view.each_step(view.each_ns(saved_ns, where))}.",
            where=where,
            saved_ns=saved_ns,
            phase="h2d",
            evidence={
                "copy_ms_per_step": in_ms(each_ns),
                "exposed_ms_per_step": in_ms(view.each_ns(saved_ns, where)),
                "bytes_per_step": round(each_bytes),
                "bytes_per_second": round(rate),
                "copies_per_step": round(count, 1),
            },
            advice=(
                "DataLoader(pin_memory=True) and .to(device, non_blocking=True) hide the copy behind the computation.",
                "Look for aten::copy_ among the operators: create tensors where they are used (device=…), or pin them.",
            ),
            confidence=0.85,
        )
    ]


def find_exposed_copies(view: JobView) -> list[Claim]:
    """Find copies between the device and pinned host memory during which the device does nothing else."""
    pageable_ns = view.each(lambda analysis: analysis.pace.device.pageable_copy_ns)
    exposed_ns = view.each(lambda analysis: analysis.pace.work.exposed_memory_ns) - pageable_ns
    exposed_ns = np.maximum(np.minimum(exposed_ns, view.each(_host_copies_ns) - pageable_ns), 0)
    where = (view.share(exposed_ns) > thresholds.COPIES_SHARE) & (view.per_step(exposed_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    each_ns, share = view.each_ns(exposed_ns, where), view.typical(view.share(exposed_ns), where)
    return [
        claim_of(
            view,
            "exposed_copies",
            f"Copies between host and device that nothing hides take {view.each_step(each_ns)}{view.of_whom(where)}.",
            where=where,
            saved_ns=exposed_ns,
            phase="h2d",
            evidence={"exposed_ms_per_step": in_ms(each_ns), "exposed_share": round(share, 4)},
            advice=(
                "Copy the next batch on a side stream (torch.cuda.stream) while this one is computed, and wait_stream.",
                "Pinned memory and non_blocking=True alone leave copies and kernels on one stream, one after another.",
            ),
            at_most="warning" if share >= thresholds.COPIES_WARNING_SHARE else "info",
            confidence=0.8,
        )
    ]


def _host_copies_ns(analysis: RankAnalysis) -> int:
    """Sum the copies between host and device; copies within a device or between devices do not count."""
    table = analysis.tables.get("copies")
    directions = ("HtoD", "DtoH")
    return sum(row["total_ns"] for row in table.to_rows() if row["direction"] in directions) if table else 0


def find_float32(view: JobView) -> list[Claim]:
    eligible_ns = view.each(lambda analysis: analysis.pace.device.eligible_fp32_ns)
    capability = view.each(_capability_of)
    where = (capability >= thresholds.TENSOR_CORES_FROM) & (view.share(eligible_ns) >= thresholds.FP32_SHARE)
    where &= view.per_step(eligible_ns) >= thresholds.FLOOR_NS
    if not where.any():
        return []
    each_ns, share = view.each_ns(eligible_ns, where), view.typical(view.share(eligible_ns), where)
    tf32 = bool((capability[where] >= thresholds.TF32_FROM).all())
    device = view.analyses[int(where.argmax())].pace.device
    autocast = f"torch.autocast(dtype=torch.{'bfloat16' if tf32 else 'float16'})"
    high = 'torch.set_float32_matmul_precision("high") (TF32; for convolutions torch.backends.cudnn.allow_tf32)'
    return [
        claim_of(
            view,
            "fp32_matmul",
            f"Matrix products and convolutions run in float32 without Tensor Cores{view.of_whom(where)}: "
            f"{view.each_step(each_ns)}.",
            where=where,
            saved_ns=halved(eligible_ns),
            most_ns=eligible_ns,
            evidence={
                "eligible_ms_per_step": in_ms(each_ns),
                "eligible_share": round(share, 4),
                "tensor_core_share": None if device.tensor_core_share is None else round(device.tensor_core_share, 4),
                "device": device.device_name,
                "compute_major": int(capability[where].min()),
            },
            advice=(
                f"{high} lets float32 products use them as they are." if tf32 else f"{autocast} with a GradScaler.",
                f"{autocast} uses them at twice that rate and halves the memory of activations."
                if tf32
                else "Sizes that are multiples of 8 let all products use them.",
            ),
            confidence=0.85,
        )
    ]


def _capability_of(analysis: RankAnalysis) -> int:
    """Return the lowest compute capability of the devices; 0 if unknown or not a CUDA device."""
    majors = [device.get("computeMajor") for device in analysis.meta.devices]
    return min((major for major in majors if isinstance(major, int)), default=0)


def find_low_occupancy(view: JobView) -> list[Claim]:
    low_ns = view.each(
        lambda analysis: sum(ns for _, share, ns in analysis.pace.device.low_occupancy if _is_low(share))
    )
    where = (view.share(low_ns) >= thresholds.ATTENTION_SHARE) & (view.per_step(low_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    row = int(np.where(where, view.share(low_ns), -1.0).argmax())
    kernels = [each for each in view.analyses[row].pace.device.low_occupancy if _is_low(each[1])]
    name, occupancy, _ = max(kernels, key=lambda each: each[2])
    each_ns = view.each_ns(low_ns, where)
    return [
        claim_of(
            view,
            "low_occupancy_attention",
            f"Attention keeps few of the device's threads busy{view.of_whom(where)}: "
            f"{fitted(short_name(name), NAME_CHARS)} runs at "
            f"{share_text(occupancy)} occupancy; such kernels take {view.each_step(each_ns)}.",
            where=where,
            saved_ns=halved(low_ns),
            most_ns=low_ns,
            evidence={
                "attention_ms_per_step": in_ms(each_ns),
                "kernels": [
                    {"name": name, "occupancy_share": round(share, 4), "total_ms": in_ms(ns)}
                    for name, share, ns in kernels[:KERNELS_SHOWN]
                ],
            },
            advice=(
                "Batch × heads is less than the device's multiprocessors: use larger batches or packed sequences.",
                "F.scaled_dot_product_attention with the flash or cuDNN backend splits long sequences over blocks.",
            ),
            at_most="warning",
            confidence=0.5,
        )
    ]


def _is_low(occupancy: float) -> bool:
    """Test for low occupancy; the profiler writes 0 if it does not know."""
    return 0 < occupancy < thresholds.ATTENTION_OCCUPANCY


# -- dominant kernels -------------------------------------------------------------------------------------------------

LIMITS = {
    "blocks": "there are too few blocks",
    "registers": "each thread uses {registers} registers",
    "shared memory": "each block uses {shared} of shared memory",
    "threads": "its blocks are large",
}
FOR_LIMIT = {
    "blocks": "Larger batches or longer sequences give it more blocks.",
    "registers": "Split the kernel, or limit its registers (launch_bounds; in Triton fewer elements per program).",
    "shared memory": "Smaller tiles or fewer pipeline stages (num_stages in Triton) need less of it.",
    "threads": "Blocks of 128 or 256 threads share a multiprocessor better.",
}
FUSIBLE = ("elementwise", "copy", "normalization", "softmax", "reduction", "random", "pooling")
"""Classes of kernels that wait for memory, not for arithmetic."""


def find_occupancy(view: JobView) -> list[Claim]:
    """Find ``low_occupancy``, of kernels that need many threads to hide the latency of memory."""

    def low(analysis: RankAnalysis) -> list[KernelUse]:
        dominant = analysis.pace.device.dominant
        return [use for use in dominant if not is_matrix_class(use.class_) and _below(use, thresholds.OCCUPANCY_LOW)]

    low_ns = view.each(lambda analysis: sum(use.total_ns for use in low(analysis)))
    where = (view.share(low_ns) >= thresholds.OCCUPANCY_SHARE) & (view.per_step(low_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    row = int(np.where(where, view.share(low_ns), -1.0).argmax())
    first, *others = low(view.analyses[row])
    each_ns = view.each_ns(low_ns, where)
    limit = LIMITS.get(first.limit, "").format(registers=first.registers, shared=bytes_text(first.shared_bytes))
    return [
        claim_of(
            view,
            "low_occupancy",
            f"{fitted(short_name(first.name), NAME_CHARS)} keeps {share_text(first.occupancy)} of the device's threads "
            f"busy{view.of_whom(where)}{f', because {limit}' if limit else ''}; such kernels take "
            f"{view.each_step(each_ns)}.",
            where=where,
            saved_ns=halved(low_ns),
            most_ns=low_ns,
            evidence={"kernel_ms_per_step": in_ms(each_ns), "kernels": _uses([first, *others])},
            advice=(
                FOR_LIMIT.get(first.limit, "Nsight Compute (ncu) shows what limits it."),
                "torch.compile fuses it with its neighbors, or chooses other block sizes (mode=max-autotune).",
            ),
            at_most="warning",
            confidence=0.6,
        )
    ]


def _below(use: KernelUse, most: float) -> bool:
    return use.occupancy is not None and use.occupancy < most


def _uses(uses: Sequence[KernelUse]) -> list[dict[str, Any]]:
    return [
        {
            "name": use.name,
            "total_ms": in_ms(use.total_ns),
            "count": use.count,
            "occupancy_share": None if use.occupancy is None else round(use.occupancy, 4),
            "blocks_per_sm": None if use.blocks_per_sm is None else round(use.blocks_per_sm, 3),
            "limit": use.limit or None,
        }
        for use in uses[:KERNELS_SHOWN]
    ]


def find_small_batch(view: JobView) -> list[Claim]:
    """Find products and convolutions that leave most of the device without a block."""

    def small(analysis: RankAnalysis) -> list[KernelUse]:
        uses = (use for use in analysis.pace.device.dominant if use.class_ in ("gemm", "conv"))
        return [use for use in uses if use.blocks_per_sm is not None and 0 < use.blocks_per_sm < thresholds.BLOCKS_FEW]

    small_ns = view.each(lambda analysis: sum(use.total_ns for use in small(analysis)))
    where = (view.share(small_ns) >= thresholds.BLOCKS_SHARE) & (view.per_step(small_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    row = int(np.where(where, view.share(small_ns), -1.0).argmax())
    uses = small(view.analyses[row])
    blocks = uses[0].blocks_per_sm or 0.0
    each_ns = view.each_ns(small_ns, where)
    return [
        claim_of(
            view,
            "small_batch",
            f"Matrix products are too small for the device{view.of_whom(where)}: "
            f"{fitted(short_name(uses[0].name), NAME_CHARS)} has blocks for {share_text(blocks)} of the "
            f"multiprocessors; such kernels take {view.each_step(each_ns)}.",
            where=where,
            saved_ns=halved(small_ns),
            most_ns=small_ns,
            evidence={"kernel_ms_per_step": in_ms(each_ns), "kernels": _uses(uses)},
            advice=(
                "A larger batch costs hardly more time per step here; if it cannot grow, use fewer devices.",
                "Join small products: one Linear for query, key and value; bmm or grouped products for experts.",
            ),
            at_most="warning",
            confidence=0.6,
        )
    ]


def find_bandwidth(view: JobView) -> list[Claim]:
    """Find a step that mostly moves data within the device's memory."""

    def moved(analysis: RankAnalysis) -> dict[str, int]:
        table = analysis.tables.get("kernel_classes")
        rows = table.to_rows() if table else []
        # Short kernels wait for launches or for each other, not for memory.
        return {
            row["class"]: row["total_ns"]
            for row in rows
            if row["class"] in FUSIBLE and row["total_ns"] >= MOVING_KERNEL_NS * row["count"]
        }

    moved_ns = view.each(lambda analysis: sum(moved(analysis).values()))
    where = view.on_device & (view.share(moved_ns) >= thresholds.BANDWIDTH_SHARE)
    where &= view.per_step(moved_ns) >= thresholds.FLOOR_NS
    if not where.any():
        return []
    row = int(np.where(where, view.share(moved_ns), -1.0).argmax())
    classes, mfu = moved(view.analyses[row]), view.analyses[row].host.mfu
    each_ns = view.each_ns(moved_ns, where)
    compiled = view.compiled(where)
    return [
        claim_of(
            view,
            "bandwidth_bound",
            f"The device mostly reads and writes memory{view.of_whom(where)}: kernels with few operations per byte "
            f"({_listed(classes)}) take {view.each_step(each_ns)}.",
            where=where,
            saved_ns=halved(moved_ns),
            most_ns=moved_ns,
            evidence={
                "kernel_ms_per_step": in_ms(each_ns),
                "classes_ms": {name: in_ms(time_ns) for name, time_ns in classes.items()},
                "mfu": None if mfu is None else round(mfu, 4),
            },
            advice=(
                "Look for copies and layout changes among the operators; channels_last for convolutions."
                if compiled
                else "torch.compile fuses elementwise operators, norms and reductions into one pass over memory.",
                "bfloat16 (autocast) halves the bytes; scaled_dot_product_attention never writes the scores.",
            ),
            at_most="warning",
            confidence=0.6,
        )
    ]


def _listed(classes: dict[str, int]) -> str:
    names = sorted(classes, key=lambda name: -classes[name])[:3]
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]


def find_underused(view: JobView, claims: Sequence[Claim]) -> list[Claim]:
    """Find ``gpu_underused`` if no other finding explains it."""
    if any(claim.finding.severity != "info" or claim.explained_ns.any() for claim in claims):
        return []
    used = np.array(
        [
            analysis.pace.device.utilization if analysis.pace.device.utilization is not None else 1.0
            for analysis in view.analyses
        ]
    )
    where = view.on_device & (used < thresholds.UNDERUSED_SHARE)
    if not where.any():
        return []
    idle_ns = (view.step_ns * (1 - used)).astype(np.int64)
    share = 1 - view.typical(1 - used, where)
    return [
        claim_of(
            view,
            "gpu_underused",
            f"The device has nothing to do{view.of_whom(where)} for {view.each_step(view.each_ns(idle_ns, where))}.",
            where=where,
            saved_ns=halved(idle_ns),
            most_ns=idle_ns,
            evidence={"utilization": round(share, 4)},
            advice=(
                "Larger batches, or several workers on one device (MPS), use the idle time.",
                "The table of idle times shows what it waits for.",
            ),
            at_most="warning",
            confidence=0.7,
        )
    ]


# -- memory -----------------------------------------------------------------------------------------------------------
# How full the device is at the peak, and how much of what the allocator holds is in use then.


def find_memory(view: JobView) -> list[Finding]:
    """Find ``memory_near_limit`` and ``fragmentation``; neither costs time."""
    return [*_near_limit(view), *_fragmentation(view)]


def _near_limit(view: JobView) -> list[Finding]:
    shares = np.array([_in_use(analysis) for analysis in view.analyses])
    where = shares > thresholds.NEAR_LIMIT_SHARE
    if not where.any():
        return []
    row = int(shares.argmax())
    host, most = view.analyses[row].host, float(shares[row])
    return [
        Finding(
            kind="memory_near_limit",
            severity="critical" if most >= thresholds.LIMIT_CRITICAL_SHARE else "warning",
            title=(
                f"Device memory is nearly full at the peak{view.of_whom(where)}: "
                f"{bytes_text(host.peak_allocated_bytes)} of {bytes_text(host.device_memory_bytes)} "
                f"({share_text(most)}) in use."
            ),
            ranks=view.culprits(where),
            steps=view.span,
            cost=cost_of(view, np.zeros(len(view.ranks), np.int64), where),
            evidence={
                "peak_allocated_bytes": host.peak_allocated_bytes,
                "peak_reserved_bytes": host.peak_reserved_bytes,
                "device_memory_bytes": host.device_memory_bytes,
                "used_share": round(most, 4),
                "rank": view.ranks[row],
            },
            advice=(
                "Activation checkpointing, bfloat16 activations (autocast), or a smaller batch with accumulation.",
                "The peak memory table shows what holds the memory: look at the largest operator and module first.",
            ),
            confidence=0.9,
        )
    ]


def _in_use(analysis: RankAnalysis) -> float:
    peak, total = analysis.host.peak_allocated_bytes, analysis.host.device_memory_bytes
    return peak / total if peak is not None and total else 0.0


def _fragmentation(view: JobView) -> list[Finding]:
    gaps = view.each(_unused_at_peak)
    reserved = view.each(lambda analysis: analysis.host.reserved_at_peak_bytes or 0)
    where = (gaps >= thresholds.FRAGMENTED_SHARE * reserved) & (gaps >= thresholds.FRAGMENTED_BYTES)
    if not where.any():
        return []
    row = int(np.where(where, gaps, -1).argmax())
    host = view.analyses[row].host
    gap, reserved_bytes, total = int(gaps[row]), int(reserved[row]), host.device_memory_bytes
    tight = bool(total) and (host.peak_reserved_bytes or reserved_bytes) >= thresholds.DEVICE_FULL_SHARE * (total or 0)
    return [
        Finding(
            kind="fragmentation",
            severity="warning" if tight else "info",
            title=(
                f"The allocator holds {bytes_text(reserved_bytes)} of device memory at the peak{view.of_whom(where)}, "
                f"{bytes_text(gap)} ({share_text(gap / reserved_bytes)}) of it not in use."
            ),
            ranks=view.culprits(where),
            steps=view.span,
            cost=cost_of(view, np.zeros(len(view.ranks), np.int64), where),
            evidence={
                "reserved_bytes": reserved_bytes,
                "peak_allocated_bytes": host.peak_allocated_bytes,
                "gap_bytes": gap,
                "gap_share": round(gap / reserved_bytes, 4),
                "device_memory_bytes": total,
                "rank": view.ranks[row],
            },
            advice=(
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets the allocator merge what it holds.",
                "Tensors of many sizes cut it into pieces: pad batches to a few sizes, warm up with the largest.",
            ),
            confidence=0.9,
        )
    ]


def _unused_at_peak(analysis: RankAnalysis) -> int:
    host = analysis.host
    if host.reserved_at_peak_bytes is None or host.peak_allocated_bytes is None:
        return 0
    return max(host.reserved_at_peak_bytes - host.peak_allocated_bytes, 0)

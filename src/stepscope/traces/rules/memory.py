"""How full the device is at the peak, and how much of what the allocator holds is of use then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.finding import Finding
from stepscope.records.units import bytes_text, share_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import View, cost_of

if TYPE_CHECKING:
    from stepscope.traces.rank import RankAnalysis

__all__ = ["find_memory"]


def find_memory(view: View) -> list[Finding]:
    """``memory_near_limit`` and ``fragmentation``: they cost no time."""
    return [*_near_limit(view), *_fragmentation(view)]


def _near_limit(view: View) -> list[Finding]:
    shares = np.array([_in_use(one) for one in view.analyses])
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
                "The table of the peak names what holds the memory: look at the largest operator and module first.",
            ),
            confidence=0.9,
        )
    ]


def _in_use(one: RankAnalysis) -> float:
    peak, total = one.host.peak_allocated_bytes, one.host.device_memory_bytes
    return peak / total if peak is not None and total else 0.0


def _fragmentation(view: View) -> list[Finding]:
    gaps = view.each(_unused_at_peak)
    reserved = view.each(lambda one: one.host.reserved_at_peak_bytes or 0)
    where = (gaps >= thresholds.FRAGMENTED_SHARE * reserved) & (gaps >= thresholds.FRAGMENTED_BYTES)
    if not where.any():
        return []
    row = int(np.where(where, gaps, -1).argmax())
    host = view.analyses[row].host
    gap, held, total = int(gaps[row]), int(reserved[row]), host.device_memory_bytes
    tight = bool(total) and (host.peak_reserved_bytes or held) >= thresholds.DEVICE_FULL_SHARE * (total or 0)
    return [
        Finding(
            kind="fragmentation",
            severity="warning" if tight else "info",
            title=(
                f"The allocator holds {bytes_text(held)} of device memory at the peak{view.of_whom(where)}, "
                f"{bytes_text(gap)} ({share_text(gap / held)}) of it not in use."
            ),
            ranks=view.culprits(where),
            steps=view.span,
            cost=cost_of(view, np.zeros(len(view.ranks), np.int64), where),
            evidence={
                "reserved_bytes": held,
                "peak_allocated_bytes": host.peak_allocated_bytes,
                "gap_bytes": gap,
                "gap_share": round(gap / held, 4),
                "device_memory_bytes": total,
                "rank": view.ranks[row],
            },
            advice=(
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets the allocator join what it holds.",
                "Tensors of many sizes cut it into pieces: pad batches to a few sizes, warm up with the largest.",
            ),
            confidence=0.9,
        )
    ]


def _unused_at_peak(one: RankAnalysis) -> int:
    host = one.host
    if host.reserved_at_peak_bytes is None or host.peak_allocated_bytes is None:
        return 0
    return max(host.reserved_at_peak_bytes - host.peak_allocated_bytes, 0)

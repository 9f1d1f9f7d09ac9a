"""``low_overlap``: an exchange that could run beside the computation, and hardly does.

DDP sends a bucket of gradients as soon as it is full, while backward goes on; FSDP2 fetches the next layer's parameters
while this one computes.  What is left over blocks.  The price is what could be hidden: not the last part, which nothing
comes after, and no more than there is computation to hide it behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.claims import Claim, severity_of
from stepscope.diagnosis.communication import DDP_OP, MIB, Communication, Flow, Reducer
from stepscope.diagnosis.ddp_advice import for_unused
from stepscope.diagnosis.fsdp_advice import for_fewer_bytes, for_offload, for_prefetch, for_units
from stepscope.diagnosis.samples import number
from stepscope.diagnosis.view import View, cost_of
from stepscope.records.collectives import FLAG_ASYNC
from stepscope.records.finding import Finding
from stepscope.records.units import bytes_text, ms_text, share_text

__all__ = ["SHARDED", "find_low_overlap"]

Floats = NDArray[np.float64]
SHARDED = ("all_gather", "reduce_scatter")
"""What FSDP exchanges."""
LARGEST_SHARE = 0.5
"""Of all gradients in one bucket: they go out together, and late."""
OVERFULL = 1.5
"""Times the size that a bucket may have: DDP closes one when it is full, so it is over by less than a small layer."""
FEW_GATHERS = 2.5
"""A step: forward and backward of one module that holds all parameters."""


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    what: str
    op: str
    exposed_ns: Floats
    """[S] of the view; on the rank that was blocked least."""
    span_ns: Floats
    behind_ns: Floats
    """[S]; computation that could hide it."""
    bytes: float
    last_share: float
    """Of it, at the least, that nothing comes after."""
    advice: tuple[str, ...]
    evidence: dict[str, Any]


def find_low_overlap(view: View, exchanges: Communication) -> list[Claim]:
    found = [_reduced(view, one) for one in exchanges.reducers]
    found += list(_sharded(view, exchanges))
    claims = [claim for one in found if one is not None for claim in _judged(view, one)]
    return sorted(claims, key=lambda claim: -float(claim.saved_ns.sum()))[:1]


def _judged(view: View, one: _Exchange) -> list[Claim]:
    exposed_ns, span_ns = float(one.exposed_ns.mean()), float(one.span_ns.mean())
    hidden = 1 - exposed_ns / span_ns if span_ns else 1.0
    if one.bytes < thresholds.OVERLAP_MB * MIB or hidden >= thresholds.OVERLAP_HIDDEN:
        return []
    if exposed_ns < max(thresholds.OVERLAP_SHARE * float(view.step_ns.mean()), thresholds.COMM_FLOOR_NS):
        return []
    left_ns = np.maximum(one.span_ns * one.last_share, one.span_ns - one.behind_ns)
    saved_ns = np.clip(one.exposed_ns - left_ns, 0.0, None)
    cost = cost_of(view, saved_ns)
    severity = severity_of(cost["share"], float(saved_ns.mean()))
    if severity == "info":
        return []
    finding = Finding(
        kind="low_overlap",
        severity=severity,
        title=(
            f"Only {share_text(max(hidden, 0.0))} of {one.what} is hidden behind the computation: "
            f"{ms_text(exposed_ns / 1e6)} of every step is spent waiting for it."
        ),
        phase="comm",
        steps=view.span,
        cost=cost,
        evidence={
            "op": one.op,
            "exposed_ms": round(exposed_ns / 1e6, 3),
            "exchange_ms": round(span_ns / 1e6, 3),
            "hidden_share": round(max(hidden, 0.0), 4),
            "compute_ms": round(float(one.behind_ns.mean()) / 1e6, 3),
            "bytes_per_step": round(one.bytes),
            **one.evidence,
            "steps_used": len(view.steps),
        },
        advice=one.advice,
        confidence=0.85,
    )
    return [Claim(finding=finding, saved_ns=saved_ns)]


# -- DDP ------------------------------------------------------------------------------------------------------------


def _reduced(view: View, one: Reducer) -> _Exchange | None:
    exposed, span, compute = (values[view.columns] for values in (one.exposed_ns, one.span_ns, one.compute_ns))
    if not one.bytes or float((~np.isnan(span)).mean()) < thresholds.COMM_STEPS_SHARE:
        return None
    said = view.facts.get("ddp")
    ddp: Mapping[str, Any] = said if isinstance(said, dict) else {}
    whole = _cannot_be_split(one, number(ddp, "bucket_mb"))
    return _Exchange(
        what="DDP's all-reduce",
        op=DDP_OP,
        exposed_ns=np.nan_to_num(exposed),
        span_ns=np.nan_to_num(span),
        behind_ns=compute,
        bytes=float(one.bytes),
        last_share=max(1 / thresholds.OVERLAP_PARTS, whole / one.bytes),
        advice=tuple(_for_ddp(one, ddp))[:3],
        evidence={
            "buckets": one.buckets or None,
            "largest_bucket_bytes": max(one.buckets_bytes, default=None),
            "bucket_cap_mb": number(ddp, "bucket_mb"),
            "find_unused_parameters": ddp.get("find_unused_parameters"),
            "backwards_per_step": one.backwards,
        },
    )


def _cannot_be_split(one: Reducer, bucket_mb: float | None) -> int:
    """Bytes of the largest bucket, if it is larger than buckets may be: then it is one layer."""
    largest = max(one.buckets_bytes, default=0)
    return largest if bucket_mb and largest > OVERFULL * bucket_mb * MIB else 0


def _for_ddp(one: Reducer, ddp: Mapping[str, Any]) -> Iterator[str]:
    largest = max(one.buckets_bytes, default=0)
    cap_mb = max(1, round(one.bytes / MIB / thresholds.OVERLAP_PARTS))
    bucket_mb = number(ddp, "bucket_mb")
    yield from for_unused(ddp)
    if one.buckets < 2 and bucket_mb and bucket_mb * MIB >= one.bytes / 2:
        yield (
            f"{bytes_text(one.bytes)} of gradients in buckets of up to {bytes_text(bucket_mb * MIB)} leave nothing to "
            f"send while backward still runs: DistributedDataParallel(bucket_cap_mb={cap_mb})."
        )
    elif one.buckets > 1 and largest >= LARGEST_SHARE * one.bytes:
        layer = " (a layer that large cannot be split)" if _cannot_be_split(one, bucket_mb) else ""
        yield (
            f"One of {one.buckets} buckets holds {bytes_text(largest)} of {bytes_text(one.bytes)}{layer}: "
            f"DistributedDataParallel(bucket_cap_mb={cap_mb}) spreads the rest."
        )
    if one.backwards > 1:
        yield (
            f"{one.backwards:.0f} backwards make a step: unless all but the last are under model.no_sync(), each "
            "exchanges all gradients."
        )
    yield "Send less: bf16_compress_hook halves the bytes; gradients that backward makes last cannot be hidden at all."


# -- FSDP2 ----------------------------------------------------------------------------------------------------------


def _sharded(view: View, exchanges: Communication) -> Iterator[_Exchange]:
    said = view.facts.get("fsdp")
    fsdp: Mapping[str, Any] = said if isinstance(said, dict) else {}
    by_group: dict[str, list[Flow]] = {}
    for flow in exchanges.flows:
        if flow.group.timed and flow.op in SHARDED and flow.flags & FLAG_ASYNC and len(flow.rows) > 1:
            by_group.setdefault(flow.group.name, []).append(flow)
    for flows in by_group.values():
        if len(flows) < len(SHARDED):
            continue
        # The rank that is blocked least, in each: the others wait for it, too.
        least = [int(flow.exposed_by_row.argmin()) for flow in flows]
        exposed_ns = sum(float(flow.exposed_by_row[row]) for flow, row in zip(flows, least, strict=True))
        span_ns = sum(float(flow.span_by_row[row]) for flow, row in zip(flows, least, strict=True))
        gathers = next(flow.count for flow in flows if flow.op == SHARDED[0])
        same = np.ones(len(view.steps))
        compute = np.asarray(np.nanmedian(view.phase("forward") + view.phase("backward"), axis=0), np.float64)
        yield _Exchange(
            what=f"the exchange of sharded parameters in group {flows[0].group.name}",
            op=" and ".join(SHARDED),
            exposed_ns=exposed_ns * same,
            span_ns=span_ns * same,
            behind_ns=compute,
            bytes=sum(flow.bytes for flow in flows),
            last_share=1 / thresholds.OVERLAP_PARTS,
            advice=_for_sharded(gathers, fsdp),
            evidence={"gathers_per_step": round(gathers, 1), "units": number(fsdp, "units")},
        )


def _for_sharded(gathers: float, fsdp: Mapping[str, Any]) -> tuple[str, ...]:
    wrapping = list(for_units(fsdp))
    if not fsdp and gathers <= FEW_GATHERS:
        pieces = f"All parameters are gathered in {gathers:.0f} pieces a step"
        wrapping = [f"{pieces}: fully_shard() each block, then the root."]
    less = list(for_fewer_bytes(fsdp))
    if not fsdp and not wrapping:
        less = ["Larger blocks, or reshard_after_forward=False where memory allows, need fewer exchanges."]
    advice = [*wrapping, *for_prefetch(fsdp), *for_offload(fsdp), *less]
    return tuple(advice[:3]) or ("Larger blocks need fewer exchanges: wrap several layers together.",)

"""``low_overlap``: an exchange that could overlap with the computation, and hardly does.

DDP sends a bucket of gradients as soon as it is full, while backward continues; FSDP2 fetches the next layer's
parameters while this one computes.  What is left over blocks.  The cost is what could be hidden: not the last part,
which nothing follows, and no more than there is computation to hide it behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.communication import DDP_OP, MIB, Communication, Flow, Reducer, gradients_of
from stepscope.diagnosis.engine.samples import number
from stepscope.diagnosis.engine.settings import (
    accumulation_setting,
    compression_setting,
    frameworks_of,
    fsdp_bytes_advice,
    fsdp_offload_advice,
    fsdp_prefetch_advice,
    fsdp_units_advice,
    unused_parameters_advice,
)
from stepscope.diagnosis.engine.view import View, cost_of
from stepscope.judge import thresholds
from stepscope.judge.chain import Claim
from stepscope.judge.finding_cost import severity_by_cost
from stepscope.judge.statistics import shortest
from stepscope.records.collectives import FLAG_ASYNC
from stepscope.records.finding import Finding
from stepscope.records.text import bytes_text, ms_text, share_text

__all__ = ["SHARDED", "find_low_overlap"]

Floats = NDArray[np.float64]
SHARDED = ("all_gather", "reduce_scatter")
"""What FSDP exchanges."""


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
    """Minimum share of it that nothing follows."""
    advice: tuple[str, ...]
    evidence: dict[str, Any]


def find_low_overlap(view: View, exchanges: Communication) -> list[Claim]:
    """By the host's blocked time; on the device by how long its stream waited for NCCL's."""
    found = [_reduced(view, reducer) for reducer in exchanges.reducers if view.clock == "host"]
    found += [*_sharded(view, exchanges), *_on_device(view, exchanges)]
    claims = [claim for exchange in found if exchange is not None for claim in _judged(view, exchange)]
    return sorted(claims, key=lambda claim: -float(claim.explained_ns.sum()))[:1]


def _judged(view: View, exchange: _Exchange) -> list[Claim]:
    exposed_ns, span_ns = float(exchange.exposed_ns.mean()), float(exchange.span_ns.mean())
    hidden = 1 - exposed_ns / span_ns if span_ns else 1.0
    if exchange.bytes < thresholds.OVERLAP_MB * MIB or hidden >= thresholds.OVERLAP_HIDDEN:
        return []
    if exposed_ns < max(thresholds.OVERLAP_SHARE * float(view.step_ns.mean()), thresholds.COMM_FLOOR_NS):
        return []
    left_ns = np.maximum(exchange.span_ns * exchange.last_share, exchange.span_ns - exchange.behind_ns)
    saved_ns = np.clip(exchange.exposed_ns - left_ns, 0.0, None)
    cost = cost_of(view, saved_ns)
    severity = severity_by_cost(cost["share"], float(saved_ns.mean()))
    if severity == "info":
        return []
    finding = Finding(
        kind="low_overlap",
        severity=severity,
        title=(
            f"Only {share_text(max(hidden, 0.0))} of {exchange.what} is hidden behind the computation: "
            f"{ms_text(exposed_ns / 1e6)} of every step is spent waiting for it."
        ),
        phase="comm",
        steps=view.span,
        cost=cost,
        evidence={
            "clock": view.clock,
            "op": exchange.op,
            "exposed_ms": round(exposed_ns / 1e6, 3),
            "exchange_ms": round(span_ns / 1e6, 3),
            "hidden_share": round(max(hidden, 0.0), 4),
            "compute_ms": round(float(exchange.behind_ns.mean()) / 1e6, 3),
            "bytes_per_step": round(exchange.bytes),
            **exchange.evidence,
            "steps_used": len(view.steps),
        },
        advice=exchange.advice,
        confidence=0.85,
    )
    return [Claim(finding=finding, explained_ns=saved_ns)]


# -- DDP --------------------------------------------------------------------------------------------------------------


def _reduced(view: View, reducer: Reducer) -> _Exchange | None:
    exposed, span, compute = (
        values[view.columns] for values in (reducer.exposed_ns, reducer.span_ns, reducer.compute_ns)
    )
    if not reducer.bytes or float((~np.isnan(span)).mean()) < thresholds.COMM_STEPS_SHARE:
        return None
    return _ddp_exchange(view, reducer, np.nan_to_num(exposed), np.nan_to_num(span), compute)


def _ddp_exchange(view: View, reducer: Reducer, exposed_ns: Floats, span_ns: Floats, behind_ns: Floats) -> _Exchange:
    facts = view.facts.get("ddp")
    ddp: Mapping[str, Any] = facts if isinstance(facts, dict) else {}
    whole = _cannot_be_split(reducer, number(ddp, "bucket_mb"))
    return _Exchange(
        what="DDP's all-reduce",
        op=DDP_OP,
        exposed_ns=exposed_ns,
        span_ns=span_ns,
        behind_ns=behind_ns,
        bytes=float(reducer.bytes),
        last_share=max(1 / thresholds.OVERLAP_PARTS, whole / reducer.bytes),
        advice=tuple(_for_ddp(reducer, ddp, frameworks_of(view.facts)))[:3],
        evidence={
            "buckets": reducer.buckets or None,
            "largest_bucket_bytes": max(reducer.buckets_bytes, default=None),
            "bucket_cap_mb": number(ddp, "bucket_mb"),
            "find_unused_parameters": ddp.get("find_unused_parameters"),
            "backwards_per_step": reducer.backwards,
        },
    )


def _cannot_be_split(reducer: Reducer, bucket_mb: float | None) -> int:
    """Bytes of the largest bucket, if it is larger than buckets may be: then it is one layer."""
    largest = max(reducer.buckets_bytes, default=0)
    return largest if bucket_mb and largest > thresholds.BUCKET_OVERFULL * bucket_mb * MIB else 0


def _for_ddp(reducer: Reducer, ddp: Mapping[str, Any], frameworks: Sequence[str]) -> Iterator[str]:
    largest = max(reducer.buckets_bytes, default=0)
    cap_mb = max(1, round(reducer.bytes / MIB / thresholds.OVERLAP_PARTS))
    bucket_mb = number(ddp, "bucket_mb")
    yield from unused_parameters_advice(ddp)
    if reducer.buckets < 2 and bucket_mb and bucket_mb * MIB >= reducer.bytes / 2:
        yield (
            f"{bytes_text(reducer.bytes)} of gradients in buckets of up to {bytes_text(bucket_mb * MIB)} leave nothing "
            f"to send while backward still runs: DistributedDataParallel(bucket_cap_mb={cap_mb})."
        )
    elif reducer.buckets > 1 and largest >= thresholds.BUCKET_LARGEST_SHARE * reducer.bytes:
        layer = " (a layer that large cannot be split)" if _cannot_be_split(reducer, bucket_mb) else ""
        yield (
            f"One of {reducer.buckets} buckets holds {bytes_text(largest)} of {bytes_text(reducer.bytes)}{layer}: "
            f"DistributedDataParallel(bucket_cap_mb={cap_mb}) spreads the rest."
        )
    # Trainers with their own accumulation setting exchange the gradients once.
    if reducer.backwards > 1 and accumulation_setting(frameworks) is None:
        yield (
            f"{reducer.backwards:.0f} backward passes make a step: unless all but the last are under model.no_sync(), "
            "each exchanges all gradients."
        )
    less = f"To send less, use {compression_setting(frameworks)}, which halves the bytes."
    yield f"{less} The exchange of backward's last gradients can never be overlapped."


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


def _sharded(view: View, exchanges: Communication) -> Iterator[_Exchange]:
    by_group: dict[str, list[Flow]] = {}
    for flow in exchanges.flows if view.clock == "host" else ():
        blocking = flow.group.blocking and not flow.device
        if blocking and flow.op in SHARDED and flow.flags & FLAG_ASYNC and len(flow.rows) > 1:
            by_group.setdefault(flow.group.name, []).append(flow)
    for flows in by_group.values():
        if len(flows) < len(SHARDED):
            continue
        # In each, the rank that is blocked least: the others wait for it, too.
        least = [int(flow.exposed_by_row.argmin()) for flow in flows]
        exposed_ns = sum(float(flow.exposed_by_row[row]) for flow, row in zip(flows, least, strict=True))
        span_ns = sum(float(flow.span_by_row[row]) for flow, row in zip(flows, least, strict=True))
        gathers = next(flow.count for flow in flows if flow.op == SHARDED[0])
        same = np.ones(len(view.steps))
        compute = np.asarray(np.nanmedian(view.phase("forward") + view.phase("backward"), axis=0), np.float64)
        yield _sharded_exchange(view, flows, gathers, exposed_ns * same, span_ns * same, compute)


def _sharded_exchange(
    view: View, flows: Sequence[Flow], gathers: float, exposed_ns: Floats, span_ns: Floats, behind_ns: Floats
) -> _Exchange:
    facts = view.facts.get("fsdp")
    fsdp: Mapping[str, Any] = facts if isinstance(facts, dict) else {}
    return _Exchange(
        what=f"the exchange of sharded parameters in group {flows[0].group.name}",
        op=" and ".join(SHARDED),
        exposed_ns=exposed_ns,
        span_ns=span_ns,
        behind_ns=behind_ns,
        bytes=sum(flow.bytes for flow in flows),
        last_share=1 / thresholds.OVERLAP_PARTS,
        advice=_for_sharded(gathers, fsdp),
        evidence={"gathers_per_step": round(gathers, 1), "units": number(fsdp, "units")},
    )


def _for_sharded(gathers: float, fsdp: Mapping[str, Any]) -> tuple[str, ...]:
    wrapping = list(fsdp_units_advice(fsdp))
    if not fsdp and gathers <= thresholds.FEW_GATHERS:
        pieces = f"All parameters are gathered in {gathers:.0f} pieces a step"
        wrapping = [f"{pieces}: fully_shard() each block, then the root."]
    less = list(fsdp_bytes_advice(fsdp))
    if not fsdp and not wrapping:
        less = ["Larger blocks, or reshard_after_forward=False where memory allows, need fewer exchanges."]
    advice = [*wrapping, *fsdp_prefetch_advice(fsdp), *fsdp_offload_advice(fsdp), *less]
    return tuple(advice[:3]) or ("Larger blocks need fewer exchanges: wrap several layers together.",)


# -- NCCL -------------------------------------------------------------------------------------------------------------


def _on_device(view: View, exchanges: Communication) -> Iterator[_Exchange]:
    """Judge by how long the computation's stream waits.

    That is known for all exchanges together, so what other exchanges may explain is subtracted.  The rank that waits
    least is used: the others' additional wait is for that rank.
    """
    if view.clock != "device" or not view.comm_measured or exchanges.measured is None:
        return
    flows = [flow for flow in exchanges.flows if flow.device and len(flow.rows) > 1 and view.rows[0] in flow.rows]
    took = {id(flow): _took_ns(view, flow) for flow in flows}
    total_ns = sum(took.values(), np.zeros(len(view.steps)))
    waited_ns = shortest(view.phase("comm"))
    compute_ns = np.asarray(np.nanmedian(view.phase("forward") + view.phase("backward"), axis=0), np.float64)

    def parts(own: Sequence[Flow]) -> tuple[Floats, Floats]:
        span_ns = sum((took[id(flow)] for flow in own), np.zeros(len(view.steps)))
        return np.clip(waited_ns - (total_ns - span_ns), 0.0, span_ns), span_ns

    for group in dict.fromkeys(flow.group.name for flow in flows):
        own = [flow for flow in flows if flow.group.name == group]
        sharded = [flow for flow in own if flow.op in SHARDED]
        reduced = [flow for flow in own if flow.op == "all_reduce"]
        if len(sharded) == len(SHARDED):
            gathers = next(flow.count for flow in sharded if flow.op == SHARDED[0])
            yield _sharded_exchange(view, sharded, gathers, *parts(sharded), compute_ns)
        elif reduced and isinstance(view.facts.get("ddp"), dict):
            yield _ddp_exchange(view, _reducer_of(view, reduced[0]), *parts(reduced), compute_ns)


def _took_ns(view: View, flow: Flow) -> Floats:
    """[S]; on the rank where it took least; the average in steps that were not read."""
    least_ns = flow.least_ns[view.columns].astype(np.float64)
    return np.where(np.isnan(least_ns), flow.transfer_ns, least_ns)


def _reducer_of(view: View, flow: Flow) -> Reducer:
    """DDP's exchange according to the facts and the device."""
    facts = gradients_of(view.facts.get("ddp"))
    none = np.zeros(0)
    return Reducer(
        rows=flow.rows,
        group=flow.group.name,
        backwards=1.0,
        **{**facts, "bytes": facts["bytes"] or round(flow.bytes)},
        exposed_ns=none,
        span_ns=none,
        compute_ns=none,
        exposed_by_row=none,
        span_by_row=none,
    )

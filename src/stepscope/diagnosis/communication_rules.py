"""Findings about what the ranks exchange, in the order in which they explain time: groups, changes, overlap."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepscope.diagnosis.claims import Claim
from stepscope.diagnosis.communication import Communication
from stepscope.diagnosis.communication_ddp import DDP_OP
from stepscope.diagnosis.communication_groups import find_uneven_groups
from stepscope.diagnosis.communication_overlap import find_low_overlap
from stepscope.diagnosis.communication_slow import find_slow_collective
from stepscope.diagnosis.view import View

__all__ = ["between_stages", "bubble_share", "exchanges_of", "find_communication"]

SHOWN = 8
SENT = ("send", "recv")


def find_communication(view: View) -> list[Claim]:
    """On the device's clock by the device's own times only: what the host is blocked for says nothing there."""
    exchanges = view.window.communication
    if exchanges is None or not view.enough or (view.clock != "host" and exchanges.measured is None):
        return []
    uneven = find_uneven_groups(view, exchanges)
    known = {row["group"] for claim in uneven for row in claim.finding.evidence["groups"]}
    return [*uneven, *find_slow_collective(view, exchanges, known), *find_low_overlap(view, exchanges)]


def exchanges_of(view: View) -> list[dict[str, Any]]:
    """By group and operation, what blocks the rank that is blocked least, most first: for ``comm_bound``.

    On the device how long it takes, which may be hidden in part.
    """
    exchanges = view.window.communication
    if exchanges is None:
        return []
    if view.clock != "host":
        rows = [
            _row(flow.group.name, flow.group.kind, flow.op, flow.transfer_ns, flow.bytes)
            for flow in exchanges.flows
            if flow.device
        ]
        return sorted((row for row in rows if row["ms_per_step"] > 0), key=lambda row: -row["ms_per_step"])[:SHOWN]
    rows = [*_of_flows(view, exchanges), *_of_reducers(view, exchanges)]
    return sorted((row for row in rows if row["ms_per_step"] > 0), key=lambda row: -row["ms_per_step"])[:SHOWN]


def _of_flows(view: View, exchanges: Communication) -> list[dict[str, Any]]:
    return [
        _row(flow.group.name, flow.group.kind, flow.op, _mean(flow.least_ns[view.columns]), flow.bytes)
        for flow in exchanges.flows
        if flow.group.blocking and not flow.device
    ]


def _of_reducers(view: View, exchanges: Communication) -> list[dict[str, Any]]:
    return [
        _row("", "data", DDP_OP, _mean(one.exposed_ns[view.columns]), float(one.bytes)) for one in exchanges.reducers
    ]


def _mean(values: Any) -> float:
    return float(np.nan_to_num(values).mean())


def _row(group: str, kind: str, op: str, exposed_ns: float, size: float) -> dict[str, Any]:
    return {
        "group": group,
        "kind": kind,
        "op": op,
        "ms_per_step": round(exposed_ns / 1e6, 3),
        "bytes_per_step": round(size),
        "bytes_per_second": round(size / exposed_ns * 1e9) if exposed_ns > 0 else None,
    }


def between_stages(view: View) -> bool:
    """Whether what the ranks wait for is mostly other stages of a pipeline."""
    exchanges = view.window.communication
    if exchanges is None or not view.window.stages:
        return False
    took = dict.fromkeys((True, False), 0.0)
    for flow in exchanges.flows:
        took[flow.op in SENT] += float(flow.span_by_row.mean() if flow.device else flow.exposed_ns)
    return took[True] > took[False]


def bubble_share(view: View) -> float | None:
    """Of a step, that each stage has nothing to do though all are even: while the pipeline fills and drains.

    (stages - 1) / (microbatches + stages - 1).  All stages together receive each microbatch, and its gradient, once
    less than there are stages; with several stages a rank they do so more often, and the pipeline idles less.
    """
    exchanges, stages = view.window.communication, len(np.unique(view.groups))
    if exchanges is None or stages < 2:
        return None
    received = sum(flow.count * len(flow.rows) for flow in exchanges.flows if flow.op == "recv")
    replicas = len(view.ranks) / stages
    microbatches = received / replicas / (2 * (stages - 1))
    return (stages - 1) / (microbatches + stages - 1) if microbatches > 0 else None

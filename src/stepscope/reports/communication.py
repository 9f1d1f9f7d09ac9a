"""What the ranks exchanged, by process group: a table of the summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepscope.diagnosis import Window
from stepscope.diagnosis.communication import DDP_OP, Communication, Flow, Reducer
from stepscope.diagnosis.communication_arrivals import Arrivals
from stepscope.reports.tables import finite

__all__ = ["communication_table"]

GROUPS_SHOWN = 64
"""Those that block longest; a job of a thousand ranks has hundreds."""
RANKS_SHOWN = 64
"""Of a group: those that the others waited for longest."""


def communication_table(window: Window) -> dict[str, Any] | None:
    """None for one rank, and where nothing was seen."""
    seen = window.communication
    if seen is None:
        return None
    flows: dict[int, list[Flow]] = {}
    places = {id(group): place for place, group in enumerate(seen.groups)}
    for flow in seen.flows:
        flows.setdefault(places[id(flow.group)], []).append(flow)
    rows = [_group_row(window, seen, place, flows[place]) for place in sorted(flows)]
    rows += [_reducer_row(window, reducer) for reducer in seen.reducers]
    rows.sort(key=lambda row: -sum(op["exposed_ms"] or 0.0 for op in row["ops"]))
    return {"groups": rows[:GROUPS_SHOWN], "groups_left_out": max(len(rows) - GROUPS_SHOWN, 0)}


def _group_row(window: Window, seen: Communication, place: int, flows: Sequence[Flow]) -> dict[str, Any]:
    group = seen.groups[place]
    return {
        "name": group.name,
        "kind": group.kind,
        "description": group.description,
        "backend": group.backend,
        "size": group.size,
        "ranks": list(group.ranks[:RANKS_SHOWN]),
        "timed": group.timed,
        "ops": [_op_row(flow) for flow in sorted(flows, key=lambda flow: -flow.exposed_ns)],
        "arrivals": _arrivals(window, seen.arrivals, place),
    }


def _op_row(flow: Flow) -> dict[str, Any]:
    timed = flow.group.timed
    rare = flow.count < 1  # a scalar now and then is less than a byte a step: both must be fine enough to divide
    return {
        "op": flow.op,
        "count": finite(flow.count, 4 if rare else 2),
        "bytes": finite(flow.bytes, 4) if rare else round(flow.bytes),
        "exposed_ms": finite(flow.exposed_ns / 1e6) if timed else None,
        "overlapped_ms": finite(flow.overlapped_ns / 1e6) if timed else None,
    }


def _arrivals(window: Window, arrivals: Arrivals, place: int) -> dict[str, Any] | None:
    own = arrivals.group == place
    if not own.any():
        return None
    members = np.flatnonzero(arrivals.member_group == place)
    steps = len(np.unique(arrivals.place[own]))
    order = members[np.argsort(-arrivals.late_ns[members], kind="stable")][:RANKS_SHOWN]
    return {
        "steps": steps,
        "collectives": int(own.sum()),
        "transfer_ms": finite(arrivals.transfer_ns[own].sum() / steps / 1e6),
        "skew_ms": finite(float(np.median(arrivals.skew_ns[own])) / 1e6),
        "ranks": [
            {
                "rank": window.ranks[int(arrivals.member_row[member])],
                "wait_ms": finite(arrivals.waited_ns[member] / steps / 1e6),
                "last": int(arrivals.last[member]),
                "late_ms": finite(arrivals.late_ns[member] / max(int(arrivals.last[member]), 1) / 1e6),
            }
            for member in order
        ],
    }


def _reducer_row(window: Window, reducer: Reducer) -> dict[str, Any]:
    """DDP's own exchange stands under the name of its group; several may have its ranks."""
    ranks = tuple(window.ranks[int(row)] for row in reducer.rows)
    exposed = reducer.exposed_by_row
    return {
        "name": "",
        "kind": "data",
        "description": reducer.group,
        "backend": window.identities[int(reducer.rows[0])].backend,
        "size": len(ranks),
        "ranks": list(ranks[:RANKS_SHOWN]),
        "timed": True,
        "ops": [
            {
                "op": DDP_OP,
                "count": float(reducer.buckets) or None,
                "bytes": reducer.bytes or None,
                "exposed_ms": finite(exposed.mean() / 1e6),
                "overlapped_ms": finite(np.maximum(reducer.span_by_row - exposed, 0.0).mean() / 1e6),
            }
        ],
        "arrivals": None,
    }

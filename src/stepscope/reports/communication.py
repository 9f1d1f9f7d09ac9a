"""What the ranks exchanged, by process group: a table of the summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepscope.diagnosis import Window, thresholds
from stepscope.diagnosis.communication import Communication
from stepscope.diagnosis.communication_arrivals import Arrivals
from stepscope.diagnosis.communication_ddp import DDP_OP, Reducer
from stepscope.diagnosis.communication_flows import Flow, bus_factor
from stepscope.records.collectives import OPS
from stepscope.reports.tables import finite

__all__ = ["communication_table"]

GROUPS_SHOWN = 64
"""Those that block longest; a job of a thousand ranks has hundreds."""
TRANSFERS = ("transfer_ms", "wait_ms", "skew_ms", "algorithm_bytes_per_s", "bus_bytes_per_s")
ALONE = 0.9
"""Of all that is exchanged: an operation with so much of it answers for what the computation waits."""
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
    rows.sort(key=lambda row: -sum(op["exposed_ms"] or op["transfer_ms"] or 0.0 for op in row["ops"]))
    return {
        "measured": _measured(window, seen),
        "groups": rows[:GROUPS_SHOWN],
        "groups_left_out": max(len(rows) - GROUPS_SHOWN, 0),
    }


def _measured(window: Window, seen: Communication) -> dict[str, Any] | None:
    """On the device: in how many steps, and how long the computation waited in all; None: the host's times are used."""
    if seen.measured is None:
        return None
    return {
        "clock": "device",
        "steps": int(seen.measured.places.sum()),
        "of": len(window.steps),
        "missed": seen.measured.missed,
        "last_unread": seen.measured.last_unread,
        "exposed_ms": finite(_exposed_ns(window) / 1e6),
    }


def _exposed_ns(window: Window) -> float:
    """A steady step, on the rank whose device waited least; nan: not known."""
    if window.device_ns is None or "comm" not in window.phases:
        return float("nan")
    waited = window.device_ns[window.phases.index("comm")][:, window.steady]
    known = waited[:, ~np.isnan(waited).any(axis=0)]
    if not known.size or float((known > 0).any(axis=0).mean()) < thresholds.COMM_STEPS_SHARE:
        return float("nan")
    return float(known.min(axis=0).mean())


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
        "ops": [
            _op_row(window, seen, place, flow)
            for flow in sorted(flows, key=lambda flow: (-flow.exposed_ns, -flow.transfer_ns))
        ],
        "arrivals": _arrivals(window, seen.arrivals, place),
    }


def _op_row(window: Window, seen: Communication, place: int, flow: Flow) -> dict[str, Any]:
    blocking = flow.group.blocking and not flow.device
    exposed_ns, hidden_ns = (flow.exposed_ns, flow.overlapped_ns) if blocking else _on_device(window, seen, flow)
    rare = flow.count < 1  # a scalar now and then is less than a byte a step: both must be fine enough to divide
    return {
        "op": flow.op,
        "count": finite(flow.count, 4 if rare else 2),
        "bytes": finite(flow.bytes, 4) if rare else round(flow.bytes),
        "exposed_ms": finite(exposed_ns / 1e6),
        "overlapped_ms": finite(hidden_ns / 1e6),
        "device": flow.device,
        **_transfers(seen, place, flow),
    }


def _on_device(window: Window, seen: Communication, flow: Flow) -> tuple[float, float]:
    """How long it held up the computation and how long it did not; known where hardly anything else is exchanged."""
    total_ns = sum(other.transfer_ns for other in seen.flows if {*other.rows.tolist()} & {*flow.rows.tolist()})
    exposed_ns = _exposed_ns(window)
    if not flow.device or flow.transfer_ns < ALONE * total_ns or np.isnan(exposed_ns):
        return float("nan"), float("nan")
    exposed_ns = min(exposed_ns, flow.transfer_ns)
    return exposed_ns, flow.transfer_ns - exposed_ns


def _transfers(seen: Communication, place: int, flow: Flow) -> dict[str, Any]:
    """What the exchange itself takes of a step, and how fast that is; from the collectives that were compared."""
    arrivals = seen.arrivals
    own = (arrivals.group == place) & (arrivals.op == OPS.index(flow.op))
    took_ns, steps = float(arrivals.transfer_ns[own].sum()), len(np.unique(arrivals.place[own]))
    per_s = float(arrivals.bytes[own].sum()) / took_ns * 1e9 if took_ns else float("nan")
    return {
        "transfer_ms": finite((flow.transfer_ns if flow.device else took_ns / steps if steps else float("nan")) / 1e6),
        "wait_ms": finite(flow.waited_by_row.mean() / 1e6) if flow.device else None,
        "skew_ms": finite(float(np.median(arrivals.skew_ns[own])) / 1e6) if steps else None,
        "algorithm_bytes_per_s": finite(per_s, 0) if per_s else None,
        "bus_bytes_per_s": finite(per_s * bus_factor(flow.op, flow.group.size), 0) or None,
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
                "device": False,
                **dict.fromkeys(TRANSFERS),
            }
        ],
        "arrivals": None,
    }

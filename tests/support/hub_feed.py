"""What a hub's model is fed with, made from a synthetic cluster: sidecars, and rows as an inbox hands them on.

series = Cluster(ranks=8, steps=20).series()
for one in series:
    live.ring(RingSidecar.from_dict(sidecar_of(one)), node="0")
live.rows(taken_of(series, range(10)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from fakes.records import Records, records_of
from numpy.typing import NDArray

from stepscope.records.series import RankSeries
from stepscope.records.steps import SLOT_BYTES
from stepscope.records.text import host_in_name
from stepscope.ring.layout import RingState
from stepscope.wire.frames import TABLE_FIELDS, ring_id

__all__ = ["FedRows", "key_of", "sidecar_of", "taken_of"]

_STATES = {"starting": RingState.STARTING, "exited": RingState.EXITED, "exception": RingState.EXCEPTION}


@dataclass(frozen=True, kw_only=True)
class FedRows:
    slots: NDArray[np.uint8]
    table: NDArray[Any]


def key_of(series: RankSeries) -> str:
    """As ``store.paths.ring_key``."""
    return f"{host_in_name(series.identity.host)}-{series.identity.pid}-{series.anchor_wall_ns:x}"


def sidecar_of(series: RankSeries, *, state: str | None = None) -> dict[str, Any]:
    """``state``: what the rank says of itself; None: what became of it."""
    state = series.state if state is None else state
    return {
        "schema": 1,
        "identity": asdict(series.identity),
        "pid": series.identity.pid,
        "start_ticks": 0,
        "anchor_mono_ns": series.anchor_mono_ns,
        "anchor_wall_ns": series.anchor_wall_ns,
        "phase_names": list(series.phase_names),
        "state": state,
        "live_phase": series.live_phase,
        "live_since_ns": series.live_since_ns,
        "live_step": 0,
        "hook_failures": series.hook_failures,
        "heard_wall_ns": 0,
        "ended_wall_ns": None if state in ("starting", "running") else series.ended_wall_ns,
        "facts": series.facts,
        "groups": [],
    }


def taken_of(
    series: Sequence[RankSeries], steps: range, *, state: str = "running", records: Sequence[Records] | None = None
) -> FedRows:
    """The rows of these steps, ring by ring: each step's, then its device times; or those of given ``records``."""
    table = np.zeros(len(series), TABLE_FIELDS)
    parts: list[NDArray[np.uint8]] = []
    for place, rank_series in enumerate(series):
        own, device = records_of(rank_series) if records is None else records[place]
        own = own[np.isin(own["step"], np.arange(steps.start, steps.stop))]
        device = device[np.isin(device["step"], own["step"])]
        slots = np.concatenate([_bytes(own), _bytes(device)])
        number = np.concatenate([own["step"], device["step"]])
        parts.append(slots[np.argsort(number, kind="stable")])
        entry = table[place]
        entry["ring"] = np.void(ring_id(key_of(rank_series)))
        entry["after_seq"], entry["last_seq"] = steps.start, steps.stop
        entry["rows"], entry["state"] = len(slots), _STATES.get(state, RingState.RUNNING)
        entry["live_step"] = steps.stop
    return FedRows(slots=np.concatenate(parts) if parts else np.zeros((0, SLOT_BYTES), np.uint8), table=table)


def _bytes(rows: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(-1, SLOT_BYTES)

"""A run from its files, put into the model that a live one is kept in: one code path answers for both.

Rows go in as they would have come: a stretch of steps of all ranks, then the next, so that each step is digested while
all its rows are there.  Where the whole run fits into the memory that one may take, every step of every rank is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.window import last_attempt
from stepscope.hub.model.digest_log import ROOM, DigestLog
from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.model.planes import Planes
from stepscope.records.series import RankSeries, RunData
from stepscope.records.slot import SLOT_BYTES
from stepscope.ring.layout import RingState
from stepscope.store.paths import EVENTS, SAMPLES, STACKS
from stepscope.store.sidecar import RingSidecar
from stepscope.store.taken import TABLE_DTYPE, TakenRows
from stepscope.wire.blocks import ring_id

__all__ = ["lines_by_node", "past_run"]

PLANE_BYTES = 96 << 20
"""Of the steps of one run that is over; what does not fit is kept in bins."""
KEPT_STEPS = 1 << 20
LEAST_STEPS = 256
"""Room for so many, where a run is shorter."""
LEAST_ROOM = 64
"""Bins, where a run is shorter: the log could not fold fewer."""
ROWS = 1 << 17
"""Put in at once."""
_STATES = {"starting": RingState.STARTING, "running": RingState.RUNNING, "exception": RingState.EXCEPTION}


def past_run(data: RunData, nodes: Mapping[str, str] | None = None) -> LiveRun:
    """``nodes``: by host, what its node was called while the run went on; else it is called as its host."""
    nodes = {} if nodes is None else nodes
    current = last_attempt(data.ranks)
    newest = max((int(series.steps["step"][-1]) for series in current if len(series.steps)), default=0)
    steps = max(LEAST_STEPS, min(newest + 1, KEPT_STEPS))
    planes = Planes(budget_bytes=PLANE_BYTES, most_steps=steps, room=max(1, len(current)))
    # Of a short run what there can be, and no more: its report is made beside the job's end.
    digests = DigestLog(min(ROOM, max(LEAST_ROOM, newest + 1)))
    live = LiveRun(name=data.name, meta=data.meta, planes=planes, digests=digests)
    live.said.most_of_node = sys.maxsize  # they are thinned already, evenly
    abouts = {id(series): _sidecar(series) for series in data.ranks}
    for series in sorted(data.ranks, key=lambda one: one.identity.attempt):
        live.ring(abouts[id(series)], node=nodes.get(series.identity.host, series.identity.host))
    trained = [series for series in current if len(series.steps)]
    for taken in _stretches(trained, np.array([ring_id(abouts[id(series)].key) for series in trained], "V16")):
        live.rows(taken)
        live.tick()
    for file, records in ((EVENTS, data.events), (SAMPLES, data.samples), (STACKS, data.stacks)):
        for node, lines in lines_by_node(live, records, nodes).items():
            live.lines(file, lines, node=node, offset_ns=0)
    live.tick()
    return live


def lines_by_node(live: LiveRun, records: Sequence[dict[str, Any]], nodes: Mapping[str, str]) -> dict[str, list[bytes]]:
    """As they would have been sent."""
    by_node: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        host = str(record.get("node") or record.get("host") or live.meta.get("host") or "")
        by_node.setdefault(nodes.get(host, host), []).append(record)
    encoder = msgspec.json.Encoder()
    return {node: encoder.encode_lines(own).splitlines() for node, own in by_node.items()}


def _stretches(trained: Sequence[RankSeries], idents: NDArray[np.void]) -> Iterator[TakenRows]:
    """The steps of all ranks, a stretch at a time."""
    if not trained:
        return
    first = min(int(series.steps["step"][0]) for series in trained)
    newest = max(int(series.steps["step"][-1]) for series in trained)
    edges = np.arange(first, newest + 1 + (wide := max(1, ROWS // len(trained))), wide, dtype=np.uint64)
    cuts = [
        (np.searchsorted(series.steps["step"], edges), np.searchsorted(series.device_steps["step"], edges))
        for series in trained
    ]
    table = np.zeros(len(trained), TABLE_DTYPE)
    table["ring"] = idents
    table["state"] = [_STATES.get(series.state, RingState.EXITED) for series in trained]
    table["live_phase"] = [series.live_phase for series in trained]
    table["live_step"] = [int(series.steps["step"][-1]) + 1 for series in trained]
    for at in range(len(edges) - 1):
        for name in ("lost", "torn"):
            table[name] = [0 if at else min(getattr(series, name), 0xFFFFFFFF) for series in trained]
        parts = []
        for series, (host, device) in zip(trained, cuts, strict=True):
            parts += [series.steps[host[at] : host[at + 1]], series.device_steps[device[at] : device[at + 1]]]
        table["rows"] = [len(parts[place]) + len(parts[place + 1]) for place in range(0, len(parts), 2)]
        yield TakenRows(table=table.copy(), slots=np.concatenate([_bytes_of(part) for part in parts]))


def _bytes_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    bare: NDArray[np.uint8] = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, SLOT_BYTES)
    return bare


def _sidecar(series: RankSeries) -> RingSidecar:
    identity = series.identity
    return RingSidecar(
        identity=identity,
        pid=identity.pid,
        start_ticks=0,
        anchor_mono_ns=series.anchor_mono_ns,
        anchor_wall_ns=series.anchor_wall_ns,
        phase_names=series.phase_names,
        state=series.state,
        live_phase=series.live_phase,
        live_since_ns=series.live_since_ns,
        live_step=int(series.steps["step"][-1]) + 1 if len(series.steps) else 0,
        hook_failures=series.hook_failures,
        ended_wall_ns=series.ended_wall_ns,
        facts=series.facts,
        groups=series.groups,
    )

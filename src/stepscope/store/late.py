"""What came after a run was sealed (``stepscope send``): more of rings that are sealed already, and rings of their own.

Functions of their arguments, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.records.series import RankSeries
from stepscope.store.assemble import Assembled
from stepscope.store.exchanges import joined_rows
from stepscope.store.nodes import NodeInfo
from stepscope.store.sidecar import RingSidecar
from stepscope.store.spools import Spool

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Shown", "merge_late", "sealed_sidecars"]

Shown = dict[tuple[str, bytes], tuple[int, int]]
"""By spool and ``ring_id``: attempt and rank of its series."""


def sealed_sidecars(
    ranks: Sequence[RankSeries], spools: Mapping[str, Spool], nodes: Sequence[NodeInfo]
) -> dict[tuple[str, bytes], RingSidecar]:
    """Who the rings are that were sealed, as their nodes would say it: late blocks do not repeat it."""
    series = {(one.identity.attempt, one.rank): one for one in ranks}
    offsets = {node.spool: node.offset_ns or 0 for node in nodes}
    found = {}
    for name, spool in spools.items():
        for ident, ring in spool.rings.items():
            if ring.shown in series:
                found[name, ident] = _sidecar(series[ring.shown], offsets.get(name, 0))
    return found


def merge_late(
    ranks: Sequence[RankSeries], late: Assembled, whose: Sequence[tuple[str, bytes]], spools: Mapping[str, Spool]
) -> tuple[list[RankSeries], Shown]:
    """All series, and which ring became which; ``whose``: of each ring that was assembled."""
    merged = {(one.identity.attempt, one.rank): one for one in ranks}
    added = {(one.identity.attempt, one.rank): one for one in late.series}
    shown: Shown = {
        (name, ident): ring.shown
        for name, spool in spools.items()
        for ident, ring in spool.rings.items()
        if ring.shown is not None
    }
    for (name, ident), pair in zip(whose, late.shown, strict=True):
        if pair is None:
            continue
        before = shown.get((name, ident))
        if before is not None and before in merged:
            merged[before] = _joined(merged[before], added[pair])
            continue
        attempt, rank = pair
        while (attempt, rank) in merged:
            rank += 1
        merged[attempt, rank] = replace(added[pair], rank=rank)
        shown[name, ident] = (attempt, rank)
    return [merged[pair] for pair in sorted(merged)], shown


def _sidecar(series: RankSeries, offset_ns: int) -> RingSidecar:
    unknown = series.state == "vanished" and series.ended_wall_ns is None
    return RingSidecar(
        identity=series.identity,
        pid=series.identity.pid,
        start_ticks=0,
        anchor_mono_ns=series.anchor_mono_ns,
        anchor_wall_ns=series.anchor_wall_ns + offset_ns,
        phase_names=series.phase_names,
        state="running" if unknown else series.state,
        live_phase=series.live_phase,
        live_since_ns=series.live_since_ns,
        live_step=0,
        hook_failures=series.hook_failures,
        ended_wall_ns=None if series.ended_wall_ns is None else series.ended_wall_ns + offset_ns,
        facts=series.facts,
        groups=series.groups,
    )


def _joined(old: RankSeries, new: RankSeries) -> RankSeries:
    """The anchors stay: the clock of a node is not measured better afterwards."""
    return replace(
        new,
        rank=old.rank,
        anchor_mono_ns=old.anchor_mono_ns,
        anchor_wall_ns=old.anchor_wall_ns,
        steps=_by_step(old.steps, new.steps),
        device_steps=_by_step(old.device_steps, new.device_steps),
        lost=old.lost + new.lost,
        torn=old.torn + new.torn,
        comm=joined_rows(old.comm, new.comm),
        collectives=joined_rows(old.collectives, new.collectives),
    )


def _by_step(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    rows = np.concatenate([old, new])
    return rows[np.unique(rows["step"], return_index=True)[1]]

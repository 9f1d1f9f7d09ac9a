"""Many steps of few ranks digested at once: what ``digest.py`` does step by step, as operations on whole blocks.

A small job makes a hundred steps a second, and one that is over has tens of thousands that somebody waits for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.digest import MEMORY, METRICS, QUANTILES, WORST, DigestLog
from stepscope.hub.model.planes import NONE, Planes

__all__ = ["digest_block"]

MOST_RANKS = 512
"""Beyond, a step by itself is work enough for numpy."""
CELLS = 1 << 17
"""Of one array."""


def digest_block(planes: Planes, steps: NDArray[np.int64]) -> DigestLog | None:
    """Digests of as many of these steps, from the first on, as one block holds; the rank's own clock for the hub's.

    None: some rank does not have one of them, or there are too many ranks.
    """
    n = planes.columns
    if not 0 < n <= MOST_RANKS:
        return None
    steps = steps[: max(1, CELLS // n)]
    rows = planes.row_of(steps)
    if (rows == NONE).any() or not planes.have[rows, :n].all():
        return None
    wall: NDArray[np.float32] = planes.held["wall_ns"][rows, :n]
    comm = planes.held.get("phase:comm")
    work = wall if comm is None else wall - comm[rows, :n]
    found = DigestLog(max(2, len(steps)))
    found.count = count = len(steps)
    found.first[:count] = found.last[:count] = steps
    found.steps[:count], found.ranks[:count] = 1, n
    k = min(n, WORST)
    worst = np.argsort(-work, axis=1, kind="stable")[:, :k]
    found.worst[:] = NONE
    found.worst[:count, :k] = worst
    found.worst_step[:count] = steps[:, None]
    places = np.array([round(share * (n - 1)) for share in QUANTILES], np.intp)
    for metric in range(METRICS):
        values = wall if metric == 0 else work if metric == 1 else _phase(planes, metric - 2, rows)
        if values is not None:
            found.values[:count, :k, metric] = np.take_along_axis(values, worst, 1)
            found.quantiles[:count, metric] = np.sort(values, axis=1)[:, places]
    found.memory[:count] = _memory(planes, rows)
    found.start_wall_ns[:count] = planes.held["start_ns"][rows, 0].astype(np.int64)
    return found


def _phase(planes: Planes, place: int, rows: NDArray[np.intp]) -> NDArray[np.float32] | None:
    plane = planes.held.get(f"phase:{planes.phases[place]}") if place < len(planes.phases) else None
    return None if plane is None else plane[rows, : planes.columns]


def _memory(planes: Planes, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    found = np.full((len(rows), len(MEMORY)), np.nan, np.float32)
    for at, name in enumerate(MEMORY[1:], 1):
        plane = planes.held.get(name)
        if plane is None:
            continue
        levels = plane[rows, : planes.columns]
        levels = np.where(levels > 0, levels, np.nan)
        sampled = np.flatnonzero(~np.isnan(levels).all(axis=1))
        found[sampled, at] = np.nanmax(levels[sampled], axis=1)
        if name == "allocated":
            found[sampled, 0] = np.nanmedian(levels[sampled], axis=1)
    return found

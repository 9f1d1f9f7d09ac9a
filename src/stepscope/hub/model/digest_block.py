"""Many steps of few ranks digested at once: what ``digest.py`` does step by step, as operations on whole blocks.

A small job makes a hundred steps a second, and one that is over has tens of thousands that somebody waits for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.digest import MEMORY, WORST, device_means, device_width, metrics_of, quantile_places
from stepscope.hub.model.digest_log import Bins
from stepscope.hub.model.planes import NONE, Planes

__all__ = ["digest_block"]

MOST_RANKS = 512
"""Beyond, a step by itself is work enough for numpy."""
CELLS = 1 << 17
"""Of one array."""


def digest_block(planes: Planes, steps: NDArray[np.int64]) -> Bins | None:
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
    k = min(n, WORST)
    found = Bins.zeros(len(steps), metrics=metrics_of(planes), worst=k, device=device_width(planes))
    found.first[:] = found.last[:] = steps
    found.steps[:], found.ranks[:] = 1, n
    worst = np.argsort(-work, axis=1, kind="stable")[:, :k]
    found.worst[:], found.worst_step[:] = worst, steps[:, None]
    below, above, between = quantile_places(n)
    for metric in range(found.metrics):
        values = wall if metric == 0 else work if metric == 1 else _phase(planes, metric - 2, rows)
        if values is not None:
            found.values[:, :, metric] = np.take_along_axis(values, worst, 1)
            ordered = np.sort(values, axis=1)
            found.quantiles[:, metric] = ordered[:, below] + (ordered[:, above] - ordered[:, below]) * between
            found.mean[:, metric] = values.mean(axis=1)
    found.memory[:] = _memory(planes, rows)
    if found.device.size:
        found.device[:] = device_means(planes, rows)
    found.start_wall_ns[:] = planes.held["start_ns"][rows, 0].astype(np.int64)
    return found


def _phase(planes: Planes, place: int, rows: NDArray[np.intp]) -> NDArray[np.float32] | None:
    plane = planes.held.get(f"phase:{planes.phases[place]}")
    return None if plane is None else plane[rows, : planes.columns]


def _memory(planes: Planes, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    found = np.full((len(rows), len(MEMORY)), np.nan, np.float32)
    for at, name in enumerate(MEMORY[1:], 1):
        plane = planes.held.get(name)
        if plane is None:
            continue
        levels = np.sort(plane[rows, : planes.columns], axis=1)
        least = (levels <= 0).sum(axis=1)  # 0: not sampled in this step
        sampled = np.flatnonzero(least < planes.columns)
        found[sampled, at] = levels[sampled, -1]
        if name == "allocated":
            twice = least[sampled] + planes.columns - 1
            found[sampled, 0] = (levels[sampled, twice // 2] + levels[sampled, (twice + 1) // 2]) / 2
    return found

"""Every step in a few numbers: mean and quantiles over the ranks, and the worst of them in full.

A step is digested once, when all live ranks have made it; again when a row of it comes late, as long as its rows are
there.  What becomes of its digest: ``digest_log.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.planes import MOST_PHASES, NONE, Planes
from stepscope.records.phases import BUILTIN_PHASES, COMM

__all__ = [
    "MEMORY",
    "QUANTILES",
    "WORST",
    "Digest",
    "device_means",
    "device_width",
    "digest_steps",
    "metrics_of",
    "quantile_places",
]

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
WORST = 16
METRICS = 2 + MOST_PHASES
"""Wall, work, and each phase in the order of ``Planes.phases``: so many at most."""
MEMORY = ("allocated_median", "allocated", "reserved", "peak_allocated")
"""Over the ranks that were sampled: of the first the median, of the others the most."""
_COMM = f"phase:{BUILTIN_PHASES[COMM]}"


@dataclass(frozen=True, kw_only=True)
class Digest:
    """One step over its ranks."""

    step: int
    ranks: int
    """How many have made it."""
    quantiles: NDArray[np.float32]
    """[metric, quantile], nanoseconds; between two ranks where it falls there: the median of two is their mean."""
    mean: NDArray[np.float32]
    """[metric]: over ranks; those of the phases add up to that of the wall."""
    worst: NDArray[np.intp]
    """Columns, by work, the longest first; at most ``WORST``."""
    values: NDArray[np.float32]
    """[worst, metric]."""
    memory: NDArray[np.float32] = field(default_factory=lambda: np.full(len(MEMORY), np.nan, np.float32))
    """By ``MEMORY``: of the device, bytes; nan where no rank was sampled."""
    device: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[1 + phase]: 1 where a device was timed in it, and each phase's mean over the ranks that were; else empty."""
    column: int = 0
    """One that made it …"""
    start_ns: int = 0
    """… and when it began there, by its own monotonic clock."""


def metrics_of(planes: Planes) -> int:
    """How many there are by now: phases come as ranks name them."""
    return 2 + len(planes.phases)


def device_width(planes: Planes) -> int:
    """How many figures of its devices a step has: none where no device was ever timed."""
    return 1 + len(planes.phases) if "device" in planes.held else 0


def digest_steps(planes: Planes, steps: Sequence[int]) -> list[Digest]:
    """Of steps that are in the window; one without any rank gives none."""
    rows = planes.row_of(np.array(steps, np.int64))
    found = []
    for step, row in zip(steps, rows, strict=True):
        if row != NONE:
            digest = _digest(planes, step, int(row))
            if digest is not None:
                found.append(digest)
    return found


def _digest(planes: Planes, step: int, row: int) -> Digest | None:
    n = planes.columns
    have = planes.have[row, :n]
    columns: Any = slice(None, n) if have.all() else np.flatnonzero(have)
    wall = planes.held["wall_ns"][row][columns]
    count = len(wall)
    if not count:
        return None
    comm = planes.held.get(_COMM)
    work = wall if comm is None else wall - comm[row][columns]
    worst = np.arange(count)
    if count > WORST:
        worst = np.argpartition(work, count - WORST)[count - WORST :]
    worst = worst[np.lexsort((worst, -work[worst]))]
    below, above, between = quantile_places(count)
    both = np.unique(np.concatenate([below, above]))
    metrics = metrics_of(planes)
    quantiles = np.zeros((metrics, len(QUANTILES)), np.float32)
    mean = np.zeros(metrics, np.float32)
    values = np.zeros((len(worst), metrics), np.float32)
    for metric, column in enumerate(_metrics(planes, row, columns, wall, work)):
        if column is not None:
            values[:, metric] = column[worst]
            partly = np.partition(column, both)
            quantiles[metric] = partly[below] + (partly[above] - partly[below]) * between
            mean[metric] = column.mean()
    numbers = worst if have.all() else columns[worst]
    some = 0 if have.all() else int(columns[0])
    return Digest(
        step=step,
        ranks=count,
        quantiles=quantiles,
        mean=mean,
        worst=numbers,
        values=values,
        memory=_memory(planes, row, columns),
        device=device_means(planes, np.array([row]))[0],
        column=some,
        start_ns=int(planes.held["start_ns"][row, some]),
    )


def quantile_places(count: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    """Of so many values in order: the places below and above each quantile, and how far it lies between them."""
    exact = np.array(QUANTILES) * (count - 1)
    below = np.floor(exact).astype(np.intp)
    return below, np.ceil(exact).astype(np.intp), (exact - below).astype(np.float32)


def device_means(planes: Planes, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    """[row, ``device_width``]: as ``Digest.device``.  Short steps are timed now and then only: most may have none."""
    found = np.zeros((len(rows), device_width(planes)), np.float32)
    if found.size:
        n = planes.columns
        timed = planes.held["device"][rows, :n].sum(axis=1)
        found[:, 0] = timed > 0
        for place, name in enumerate(planes.phases, 1):
            plane = planes.held.get(f"device:{name}")
            if plane is not None:
                found[:, place] = plane[rows, :n].sum(axis=1) / np.maximum(timed, 1)
    return found


def _memory(planes: Planes, row: int, columns: Any) -> NDArray[np.float32]:
    found = np.full(len(MEMORY), np.nan, np.float32)
    for at, name in enumerate(MEMORY[1:], 1):
        plane = planes.held.get(name)
        levels = plane[row][columns] if plane is not None else np.zeros(0)
        levels = levels[levels > 0]  # 0: not sampled in this step
        if len(levels):
            found[at] = levels.max()
            if name == "allocated":
                found[0] = np.median(levels)
    return found


def _metrics(
    planes: Planes, row: int, columns: Any, wall: NDArray[np.float32], work: NDArray[np.float32]
) -> list[NDArray[np.float32] | None]:
    found: list[NDArray[np.float32] | None] = [wall, work]
    for name in planes.phases:
        plane = planes.held.get(f"phase:{name}")
        found.append(None if plane is None else plane[row][columns])
    return found

"""What other programs on the same cores do to the phases of a synthetic cluster.

Taken from recordings on two cores beside real load (``bench/machine_load.py``).  A rank that shares its core is
preempted every few milliseconds and then waits for about as long, so a phase takes longer in proportion to its work,
and a short phase is rarely hit, but then by many times its length.  The load stays on a core for a while, and moves.

    waited_ms = waits_ms("bursts", work_ms, cores=2, random=np.random.default_rng(0))
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["host_figures", "waits_ms"]

Floats = NDArray[np.float64]

SLICE_MS = 4.0
"""How long a task runs before another one gets its core."""
STAYS_MS = (300.0, 3000.0)
"""How long a program stays on a core, or a burst of work lasts."""
SWITCH_SHARE = 0.05
"""What a rank waits on a core that is not wanted by others: interrupts, daemons."""
LEVEL_WANDER, LEVEL_MEMORY = 0.35, 0.9
"""The share of a core that the others take varies by this much (log), from step to step with this memory."""


def waits_ms(load: str, work_ms: Floats, *, cores: int, random: np.random.Generator) -> Floats:
    """[phase, rank, step]; how long each phase with so much work waits for a processor."""
    _, ranks, steps = work_ms.shape
    wanted = _programs_by_core(load, float(np.nan_to_num(work_ms).sum(axis=0).mean()), cores, steps, random)
    level = SWITCH_SHARE + wanted[np.arange(ranks) % cores]
    level = level * np.exp(LEVEL_WANDER * _wander((ranks, steps), random))
    preempted = random.poisson(np.nan_to_num(work_ms) / SLICE_MS)
    # A sum of so many exponential waits.
    return np.where(preempted > 0, random.gamma(np.maximum(preempted, 1)) * SLICE_MS * level, 0.0)


def _programs_by_core(load: str, step_ms: float, cores: int, steps: int, random: np.random.Generator) -> Floats:
    """[core, step]; how many other programs want each core."""
    wanted = np.zeros((cores, steps))
    if load == "all":
        wanted += 1.0
    elif load == "one":
        for first, last in _stretches(step_ms, steps, random):
            wanted[random.integers(cores), first:last] += 1.0
    elif load == "bursts":
        for _ in range(cores):
            for number, (first, last) in enumerate(_stretches(step_ms, steps, random)):
                if number % 2:
                    wanted[random.integers(cores), first:last] += 1.0
    return wanted


def _stretches(step_ms: float, steps: int, random: np.random.Generator) -> list[tuple[int, int]]:
    found, first = [], 0
    while first < steps:
        last = first + max(1, round(random.uniform(*STAYS_MS) / max(step_ms, 0.1)))
        found.append((first, min(last, steps)))
        first = last
    return found


def _wander(shape: tuple[int, int], random: np.random.Generator) -> Floats:
    """[rank, step]; half of it common to all ranks."""
    shocks = (random.normal(size=(1, shape[1])) + random.normal(size=shape)) / np.sqrt(2)
    level: Floats = shocks.copy()
    for step in range(1, shape[1]):
        level[:, step] = LEVEL_MEMORY * level[:, step - 1] + np.sqrt(1 - LEVEL_MEMORY**2) * shocks[:, step]
    return level


def host_figures(load: str, *, ranks: int, cores: int) -> dict[str, float | int]:
    """A host's samples beside this load."""
    others = {"none": 0.0, "one": 1.0, "all": float(cores), "bursts": cores / 2}[load]
    wanting = ranks + others
    used = min(wanting, float(cores))
    return {
        "cpu_percent": round(100.0 * used / cores, 1),
        "own_cpu_percent": round(100.0 * used / cores * ranks / wanting, 1),
        "cpu_count": cores,
        "procs_running": round(wanting) + 1,
        "load1": wanting,
        "cpu_pressure": round(min(max(wanting - cores, 0.0) / cores, 0.95), 2),
    }

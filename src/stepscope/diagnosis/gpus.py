"""GPUs that have nothing to do, and GPUs that are held back by heat, power or their clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.advice_machine import for_throttling, for_utilisation
from stepscope.diagnosis.claims import Claim
from stepscope.diagnosis.placed import Gpu, Readings, gpu_readings, row_medians
from stepscope.diagnosis.robust import peer_deviation
from stepscope.diagnosis.view import View, cost_of
from stepscope.records.finding import Finding
from stepscope.records.phases import COMPUTE_PHASES
from stepscope.records.units import share_text

__all__ = ["find_gpus"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
THERMAL = frozenset({"sw_thermal", "hw_thermal"})
WHY = {
    "hw_thermal": "by its temperature",
    "sw_thermal": "by its temperature",
    "hw_power_brake": "by the power supply's brake",
    "hw_slowdown": "by its hardware",
}
HELD_BACK = frozenset(WHY)
"""Reasons that no healthy GPU has; a software power cap is normal under load."""
NONE: frozenset[str] = frozenset()
LISTED = 16
"""GPUs named in the evidence at the most."""
WORDS = {
    "input": "waiting for input",
    "h2d": "copying to the device",
    "comm": "waiting for other ranks or the network",
    "eval": "evaluation",
    "checkpoint": "checkpointing",
    "other": "work outside model and optimizer",
}


def find_gpus(view: View) -> list[Claim]:
    gpus, readings = gpu_readings(view)
    if not gpus:
        return []
    return [*_idle(view, gpus, readings), *_throttled(view, gpus, readings)]


# -- idle ---------------------------------------------------------------------------------------------------------


def _idle(view: View, gpus: list[Gpu], readings: Readings) -> list[Claim]:
    used = readings.of("util_percent")
    enough = (~np.isnan(used)).sum(axis=1) >= thresholds.UTILISATION_SAMPLES
    if not enough.any():
        return []
    by_gpu = row_medians(used[enough])
    typical = float(np.median(by_gpu))
    if typical >= thresholds.UTILISATION_LOW_PERCENT:
        return []
    phase, share = _waited_for(view)
    seen = share >= thresholds.WAITED_FOR_SHARE
    waits = f", while {WORDS.get(phase, f'the phase {phase!r}')} takes {share_text(share)} of the step" if seen else ""
    who = "The GPU is" if len(gpus) == 1 else "The GPUs are"
    finding = Finding(
        kind="low_gpu_utilisation",
        severity="warning" if seen and typical < thresholds.UTILISATION_WARNING_PERCENT else "info",
        title=f"{who} busy in only {typical:.0f}% of the time{waits}.",
        phase=phase if seen else None,
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "util_percent": round(typical, 1),
            "lowest_percent": round(float(by_gpu.min()), 1),
            "highest_percent": round(float(by_gpu.max()), 1),
            "gpus": int(enough.sum()),
            "samples": int((~np.isnan(used)).sum(axis=1).max()),
            "largest_host_phase": phase,
            "largest_host_share": round(share, 4),
        },
        advice=for_utilisation(phase if seen else None),
        confidence=0.9,
    )
    return [Claim(finding=finding, saved_ns=np.zeros(len(view.steps)))]


def _waited_for(view: View) -> tuple[str, float]:
    """The phase beside the training that takes most of the host's time, and its share; host times on any clock."""
    wall = view.window.wall_ns[np.ix_(view.rows, view.columns)]
    total = float(np.nansum(wall)) or 1.0
    shares = {
        name: float(np.nansum(plane[np.ix_(view.rows, view.columns)])) / total
        for name, plane in zip(view.window.phases, view.window.phase_ns, strict=True)
        if name not in COMPUTE_PHASES
    }
    return max(shares.items(), key=lambda item: item[1], default=("", 0.0))


# -- held back ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Clocks:
    """By GPU [G]."""

    held: Floats
    """Share of the samples in which it was held back for a reason that no healthy GPU has."""
    capped: Floats
    """Share of the samples at its power limit."""
    clock: Floats
    """Typical SM clock while busy, MHz; here and below nan where not known."""
    best: Floats
    """Its own, of the run."""
    peers: Floats
    """Typical of the other GPUs of its kind."""
    samples: NDArray[np.intp]
    reasons: list[frozenset[str]]
    """All that were seen."""

    @property
    def hot(self) -> Bools:
        often = self.held * self.samples >= thresholds.THROTTLED_SAMPLES - 0.5
        return np.asarray((self.held >= thresholds.THROTTLED_SHARE) & often & self._told, np.bool_)

    @property
    def slow(self) -> Bools:
        return np.asarray((self.clock <= (1 - thresholds.SLOW_CLOCK_SHARE) * self.peers) & self._told, np.bool_)

    @property
    def limited(self) -> Bools:
        """At its power limit, and it shows in the clock."""
        below = self.clock <= (1 - thresholds.POWER_CAP_CLOCK_SHARE) * np.fmax(self.peers, self.best)
        return np.asarray((self.capped >= thresholds.POWER_CAP_SHARE) & below & self._told, np.bool_)

    @property
    def _told(self) -> Bools:
        return np.asarray(self.samples >= thresholds.MACHINE_SAMPLES, np.bool_)


def _throttled(view: View, gpus: list[Gpu], readings: Readings) -> list[Claim]:
    seen = _clocks(gpus, readings)
    grave = seen.hot | seen.slow
    told = np.flatnonzero(grave if grave.any() else seen.limited)
    if not len(told):
        return []
    # Held back most, then the slowest, then the first.
    hot_share = np.where(seen.hot, seen.held, 0.0)[told]
    order = np.lexsort((-told, -np.nan_to_num(seen.clock[told], nan=np.inf), hot_share))
    worst = int(told[order[-1]])
    reasons = seen.reasons[worst]
    hot = bool(seen.hot[worst])
    finding = Finding(
        kind="gpu_throttled",
        severity="warning" if grave.any() else "info",
        title=_title(view, gpus[worst], seen, worst),
        ranks=() if len(told) == len(gpus) else tuple(sorted(view.ranks[row] for at in told for row in gpus[at].rows)),
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "gpus": [_row(view, gpus[at], seen, at) for at in told[:LISTED]],
            "gpus_held_back": len(told),
            "gpus_compared": len(gpus),
        },
        advice=for_throttling(
            thermal=hot and bool(THERMAL & reasons),
            power_brake=hot and "hw_power_brake" in reasons,
            power_cap=bool(seen.limited[worst]),
        ),
        confidence=0.9,
    )
    return [Claim(finding=finding, saved_ns=np.zeros(len(view.steps)))]


def _clocks(gpus: list[Gpu], readings: Readings) -> _Clocks:
    by_line = [_reasons(names) for names in readings.lines("throttle_reasons")]
    samples = np.bincount(readings.owner, minlength=len(gpus))
    every: list[set[str]] = [set() for _ in gpus]
    for owner, names in zip(readings.owner, by_line, strict=True):
        every[owner] |= names
    clocks, used = readings.of("sm_clock_mhz"), readings.of("util_percent")
    clocks[~(clocks > 0) | (used < thresholds.CLOCK_BUSY_PERCENT)] = np.nan
    few = (~np.isnan(clocks)).sum(axis=1) < thresholds.MACHINE_SAMPLES
    clock = np.where(few, np.nan, row_medians(clocks))
    return _Clocks(
        held=_share(readings, samples, [bool(names & HELD_BACK) for names in by_line]),
        capped=_share(readings, samples, ["sw_power_cap" in names for names in by_line]),
        clock=clock,
        best=np.fmax.reduce(clocks, axis=1, initial=np.nan),
        peers=_of_peers(gpus, clock),
        samples=samples,
        reasons=[frozenset(names) for names in every],
    )


def _of_peers(gpus: list[Gpu], clock: Floats) -> Floats:
    """[G]; the median of the *other* GPUs of the same name; nan without any."""
    out = np.full(len(gpus), np.nan)
    kinds: dict[str, list[int]] = {}
    for at, gpu in enumerate(gpus):
        if not np.isnan(clock[at]):
            kinds.setdefault(gpu.name, []).append(at)
    for alike in kinds.values():
        if len(alike) > 1:
            out[alike] = clock[alike] - peer_deviation(clock[alike][:, None])[:, 0]
    return out


def _share(readings: Readings, samples: NDArray[np.intp], hits: list[bool]) -> Floats:
    """[G]; of each GPU's samples."""
    counts = np.bincount(readings.owner, weights=np.array(hits, np.float64), minlength=len(samples))
    return np.asarray(counts / np.maximum(samples, 1), np.float64)


def _reasons(names: object) -> frozenset[str]:
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) and names else NONE


def _title(view: View, gpu: Gpu, seen: _Clocks, at: int) -> str:
    where = f" of {gpu.node}" if len(set(view.hosts)) > 1 else ""
    number = "" if gpu.index is None else f" {gpu.index}"
    rank = f" (rank {view.ranks[gpu.rows[0]]})" if len(gpu.rows) == 1 and len(view.ranks) > 1 else ""
    who = f"GPU{number}{where}{rank}"
    if seen.hot[at]:
        why = next((words for name, words in WHY.items() if name in seen.reasons[at]), "")
        return f"{who} is held back {why} in {share_text(float(seen.held[at]))} of the samples."
    if seen.slow[at]:
        return f"{who} runs at {seen.clock[at]:.0f} MHz, GPUs of the same kind at {seen.peers[at]:.0f} MHz."
    against = float(np.fmax(seen.peers[at], seen.best[at]))
    return f"{who} is at its power limit: {seen.clock[at]:.0f} MHz instead of {against:.0f} MHz."


def _row(view: View, gpu: Gpu, seen: _Clocks, at: int) -> dict[str, Any]:
    return {
        "node": gpu.node,
        "gpu": gpu.index,
        "ranks": [view.ranks[row] for row in gpu.rows],
        "held_back_share": round(float(seen.held[at]), 4),
        "power_cap_share": round(float(seen.capped[at]), 4),
        "reasons": sorted(seen.reasons[at]),
        "sm_clock_mhz": _rounded(seen.clock[at]),
        "peers_sm_clock_mhz": _rounded(seen.peers[at]),
        "best_sm_clock_mhz": _rounded(seen.best[at]),
    }


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 1)

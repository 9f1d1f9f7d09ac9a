"""Memory that grows, is nearly full, uneven or fragmented.  None of it costs time by itself: it ends runs.

Device memory is what torch's allocator says at the ends of steps, host memory what the agent sees of the processes once
a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.advice_machine import CREEP
from stepscope.diagnosis.claims import Claim
from stepscope.diagnosis.creep import Rise, rise_of_samples, rise_of_steps
from stepscope.diagnosis.device_memory import Devices, devices_of, find_levels, fragmented
from stepscope.diagnosis.placed import at_steps, host_readings, last_of_rows, process_readings
from stepscope.diagnosis.view import View, cost_of
from stepscope.records.finding import Finding, Severity
from stepscope.records.units import bytes_text, duration_text, named_ranks, span_texts

__all__ = ["find_memory"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
WHAT = {
    "host_rss": "Host memory",
    "device_allocated": "Device memory in use",
    "device_reserved": "Device memory held by the allocator",
}


@dataclass(frozen=True, kw_only=True)
class _End:
    """When memory is used up at the pace seen."""

    step: int | None = None
    in_s: float | None = None
    in_steps: float = math.inf


def find_memory(view: View) -> list[Claim]:
    """``memory_creep``, ``memory_pressure``, ``memory_imbalance`` and ``fragmentation``; their saved time is zero."""
    if not view.enough:
        return []
    devices = devices_of(view)
    claims = []
    comparisons = len(WHAT) * len(view.rows)
    begin = _begin(view)
    window = view.window
    allocated = rise_of_steps(window.allocated[view.rows], window.steps, begin, comparisons)
    reserved = rise_of_steps(window.reserved[view.rows], window.steps, begin, comparisons)
    loose = fragmented(devices)
    # What is in use takes the reserve with it, and gaps do too: the cause is told, once.
    reserve_only = reserved.rises & ~allocated.rises & ~loose
    if allocated.rises.any():
        claims.append(
            _creep(view, "device_allocated", allocated, allocated.rises, _device_end(view, devices, allocated))
        )
    if reserve_only.any():
        claims.append(_creep(view, "device_reserved", reserved, reserve_only, _device_end(view, devices, reserved)))
    resident = _resident(view, comparisons)
    if resident.rises.any():
        claims.append(_creep(view, "host_rss", resident, resident.rises, _host_end(view, resident)))
    return [*claims, *find_levels(view, devices, reserved.rises & ~allocated.rises)]


def _begin(view: View) -> int:
    """How many columns of the window are warm-up at its start."""
    steady = view.window.steady
    return int(steady.argmax()) if steady.any() else len(steady)


def _resident(view: View, comparisons: int) -> Rise:
    """Of the processes' memory, less what is not the job's own.

    That is the pages of files that they have mapped, which are the kernel's to drop, and what torch's worker server
    keeps of its answers to the agent (``agent/flight_reader.py``), which comes to an end.
    """
    readings = process_readings(view)
    of_files, of_answers = readings.of("rss_file"), readings.of("rss_answers")
    own = readings.of("rss") - np.nan_to_num(of_files) - np.nan_to_num(of_answers)
    own[~(own > 0)] = np.nan  # a process that is just ending has none
    at = at_steps(view, readings.of("wall_ns"))
    return rise_of_samples(own, at, float(view.window.steps[_begin(view)]), comparisons)


def _device_end(view: View, devices: Devices, rise: Rise) -> _End:
    """The first device that is full: ranks that share one fill it together."""
    inside = np.maximum(devices.reserved - np.fmax(devices.peak, rise.last), 0.0)
    room = devices.total - devices.used + devices.by_gpu(inside)
    return _end(view, room, devices.by_gpu(np.where(rise.rises, rise.per_step, 0.0)))


def _host_end(view: View, rise: Rise) -> _End:
    hosts, readings = host_readings(view)
    places = {host: index for index, host in enumerate(hosts)}
    at = np.array([places[host] for host in view.hosts], np.intp)
    growth = np.bincount(at, weights=np.where(rise.rises, rise.per_step, 0.0), minlength=len(hosts))
    return _end(view, last_of_rows(readings.of("mem_available")), np.asarray(growth, np.float64))


def _end(view: View, room: Floats, per_step: Floats) -> _End:
    """The first of several places with so many bytes left that grow by so many a step."""
    known = (per_step > 0) & ~np.isnan(room)
    if not known.any():
        return _End()
    in_steps = float((np.maximum(room[known], 0.0) / per_step[known]).min())
    ends = view.window.end_wall_ns[view.rows]
    step_s = float(np.nanmax(ends) - np.nanmin(ends)) / 1e9 / max(len(view.window.steps) - 1, 1)
    step = int(view.window.steps[-1]) + math.ceil(in_steps)
    return _End(step=step, in_s=round(in_steps * step_s, 1), in_steps=in_steps)


def _creep(view: View, which: str, rise: Rise, rises: Bools, end: _End) -> Claim:
    rows = np.flatnonzero(rises)
    worst = int(rows[np.argmax(rise.per_step[rows])])
    alike = bool((rises == rise.judged).all())
    ranks = () if alike else tuple(view.ranks[row] for row in rows)
    per_step, first, last = (float(values[worst]) for values in (rise.per_step, rise.first, rise.last))
    first_step, last_step = round(float(rise.first_step[worst])), round(float(rise.last_step[worst]))
    first_text, last_text = span_texts(first, last)
    # True of a run that goes on and of one that is over.
    more = f"after another {duration_text(end.in_s)}"
    runs_out = f"; at this pace it runs out at step {end.step:,}, {more}" if end.step else ""
    finding = Finding(
        kind="memory_creep",
        severity=_severity(view, end),
        title=(
            f"{WHAT[which]}{_of_whom(view, ranks)} grows by {bytes_text(per_step)} a step, "
            f"from {first_text} at step {first_step:,} to {last_text} at step {last_step:,}{runs_out}."
        ),
        ranks=ranks,
        steps=(int(view.window.steps[0]), int(view.window.steps[-1])),
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "which": which,
            "bytes_per_step": round(per_step),
            "first_bytes": round(first),
            "last_bytes": round(last),
            "first_step": first_step,
            "last_step": last_step,
            "ranks_growing": [view.ranks[row] for row in rows],
            "runs_out_at_step": end.step,
            "runs_out_in_s": end.in_s,
            "samples": rise.samples,
        },
        advice=CREEP[which],
        confidence=0.95 if rise.sure else 0.75,
    )
    return Claim(finding=finding, saved_ns=np.zeros(len(view.steps)))


def _severity(view: View, end: _End) -> Severity:
    if end.in_s is None:
        return "warning"
    soon = end.in_s <= thresholds.CREEP_SOON_S or end.in_steps <= thresholds.CREEP_SOON_RUNS * len(view.window.steps)
    if soon:
        return "critical"
    return "info" if end.in_s > thresholds.CREEP_LATE_S else "warning"


def _of_whom(view: View, ranks: tuple[int, ...]) -> str:
    if ranks:
        return f" of {named_ranks(ranks).lower()}"
    return " of every rank" if len(view.ranks) > 1 else ""

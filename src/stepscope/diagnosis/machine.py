"""What the machines went through in the steady steps: GPUs idle or held back, CPUs and memory short.

These say why a rank may be slow; what it costs is told by the rules of time, so nothing is priced here.  The samples
used are about a second apart: a short run has a handful.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.advice_machine import for_cpu, for_ram
from stepscope.diagnosis.claims import Claim
from stepscope.diagnosis.gpus import find_gpus
from stepscope.diagnosis.placed import Readings, host_readings, row_medians
from stepscope.diagnosis.view import View, cost_of
from stepscope.records.finding import Finding, Severity
from stepscope.records.units import bytes_text, count_text, number_text, share_text

__all__ = ["find_machine"]

Floats = NDArray[np.float64]
ONE_CPU = "the CPU"


def find_machine(view: View) -> list[Claim]:
    """``low_gpu_utilisation``, ``gpu_throttled``, ``cpu_saturated`` and ``ram_pressure``; their saved time is zero."""
    if not view.enough:
        return []
    hosts, readings = host_readings(view)
    return [*find_gpus(view), *_cpu(view, hosts, readings), *_ram(view, hosts, readings)]


# -- processors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Cpu:
    """By host [H]; medians over the samples, nan where not told."""

    percent: Floats
    own: Floats
    cores: Floats
    running: Floats
    load: Floats
    pressure: Floats
    ranks: Floats

    @property
    def full(self) -> NDArray[np.bool_]:
        waiting = np.where(np.isnan(self.running), self.load, self.running)
        crowded = waiting >= thresholds.CPU_RUNNABLE_PER_CORE * self.cores
        busy = (self.percent >= thresholds.CPU_FULL_PERCENT) & crowded
        return np.asarray(busy | (self.pressure >= thresholds.CPU_PRESSURE), np.bool_)

    @property
    def others(self) -> NDArray[np.bool_]:
        """Other processes take a good part; only where there is a good part to take."""
        busy = self.percent >= thresholds.CPU_FULL_PERCENT
        return np.asarray(busy & (self.own < thresholds.CPU_OTHERS_SHARE * self.percent), np.bool_)

    @property
    def wanted(self) -> NDArray[np.bool_]:
        """Whether the job's ranks themselves want to run most of the time."""
        each = self.own / 100 * self.cores / np.maximum(self.ranks, 1.0)
        fair = np.minimum(self.cores / np.maximum(self.running, 1.0), 1.0)
        return np.asarray(~(each < thresholds.CPU_WANTED_SHARE * fair), np.bool_)

    @property
    def heavy(self) -> NDArray[np.bool_]:
        """The job itself crowds the cores."""
        crowded = self.running >= thresholds.CPU_HEAVY_PER_CORE * self.cores
        return np.asarray(crowded & ~self.others, np.bool_)


def _cpu(view: View, hosts: list[str], readings: Readings) -> list[Claim]:
    percent = readings.of("cpu_percent")
    enough = (~np.isnan(percent)).sum(axis=1) >= thresholds.MACHINE_SAMPLES
    seen = _Cpu(
        percent=row_medians(percent),
        own=row_medians(readings.of("own_cpu_percent")),
        cores=row_medians(readings.of("cpu_count")),
        running=row_medians(readings.of("procs_running")),
        load=row_medians(readings.of("load1")),
        pressure=row_medians(readings.of("cpu_pressure")),
        ranks=np.array([view.hosts.count(host) for host in hosts], np.float64),
    )
    full = seen.full & enough
    if not full.any():
        return []
    others, heavy = seen.others & full, seen.heavy & full
    grave = (others & seen.wanted) | heavy
    severity: Severity = "warning" if grave.any() else "info"
    told = np.flatnonzero(grave if grave.any() else full)
    worst = int(told[np.lexsort((seen.running[told] / seen.cores[told], heavy[told], others[told]))[-1]])
    return [
        _claim(
            view,
            hosts,
            told,
            kind="cpu_saturated",
            severity=severity,
            title=_cpu_title(view, hosts[worst], seen, worst, others=bool(others[worst]), heavy=bool(heavy[worst])),
            evidence={
                "node": hosts[worst],
                "cpu_percent": _rounded(seen.percent[worst]),
                "own_cpu_percent": _rounded(seen.own[worst]),
                "cpu_count": _rounded(seen.cores[worst]),
                "procs_running": _rounded(seen.running[worst]),
                "load1": _rounded(seen.load[worst]),
                "cpu_pressure": _rounded(seen.pressure[worst], 3),
                "ranks_on_node": view.hosts.count(hosts[worst]),
                "samples": int((~np.isnan(percent[worst])).sum()),
            },
            advice=for_cpu(
                others=bool(others[worst]),
                heavy=bool(heavy[worst]),
                ranks=view.hosts.count(hosts[worst]),
                cores=_whole(seen.cores[worst]),
                facts=_facts_of(view, hosts[worst]),
            ),
        )
    ]


def _cpu_title(view: View, host: str, seen: _Cpu, at: int, *, others: bool, heavy: bool) -> str:
    where = _where(view, host)
    cores = _whole(seen.cores[at])
    of_cores = f"all {cores} cores" if cores is not None and cores > 1 else ONE_CPU
    if others:
        taken = (seen.percent[at] - seen.own[at]) / 100 * seen.cores[at]
        of = "the cores" if cores is None else count_text(cores, "core")
        then = "the job has to share" if seen.wanted[at] else "the job needs little"
        return f"Other processes use {number_text(float(taken))} of {of}{where}; {then}."
    if heavy:
        running = number_text(float(seen.running[at]))
        return f"The job crowds {of_cores}{where}: typically {running} tasks want to run at once."
    if seen.percent[at] < thresholds.CPU_FULL_PERCENT:
        waited = share_text(float(seen.pressure[at]))
        title = f"Tasks wait for a processor in {waited} of the time{where}"
        room = seen.percent[at] < thresholds.CPU_ROOM_PERCENT
        return f"{title}, though the CPUs are not full." if room else f"{title}."
    by_job = seen.own[at] >= thresholds.CPU_OWN_SHARE * seen.percent[at]
    if by_job:
        return f"The job keeps {of_cores}{where} busy."
    return f"{of_cores[0].upper()}{of_cores[1:]}{where} {'is' if of_cores == ONE_CPU else 'are'} busy all the time."


# -- memory -------------------------------------------------------------------------------------------------------


def _ram(view: View, hosts: list[str], readings: Readings) -> list[Claim]:
    total, available = readings.of("mem_total"), readings.of("mem_available")
    share = available / np.where(total > 0, total, np.nan)
    low = (share < thresholds.RAM_LOW_SHARE).sum(axis=1) >= thresholds.MACHINE_SAMPLES
    critical = (share < thresholds.RAM_CRITICAL_SHARE).sum(axis=1) >= thresholds.MACHINE_SAMPLES
    least = np.fmin.reduce(share, axis=1, initial=np.nan)
    swap = readings.of("swap_used")
    swapped = _growth(swap)
    swapping = (swapped >= thresholds.RAM_SWAP_BYTES) & ~(least >= thresholds.RAM_SWAP_SHARE)
    pressure = readings.of("memory_pressure")
    waits = row_medians(pressure)
    waiting = (waits >= thresholds.RAM_PRESSURE) & (_counts(pressure) >= thresholds.MACHINE_SAMPLES)
    short = low | swapping | waiting
    if not short.any():
        return []
    worst = int(np.lexsort((-np.nan_to_num(least, nan=1.0), short, critical))[-1])
    smallest = float(np.fmin.reduce(available[worst], initial=np.nan))
    return [
        _claim(
            view,
            hosts,
            np.flatnonzero(short),
            kind="ram_pressure",
            severity="critical" if critical.any() else "warning",
            title=_ram_title(
                _where(view, hosts[worst]),
                low=bool(low[worst]),
                available=smallest,
                share=float(least[worst]),
                swapped=float(swapped[worst]) if swapping[worst] else None,
                waits=float(waits[worst]),
            ),
            evidence={
                "node": hosts[worst],
                "available_bytes": _whole(smallest),
                "total_bytes": _whole(float(np.fmax.reduce(total[worst], initial=np.nan))),
                "available_share": _rounded(least[worst], 4),
                "swapped_bytes": _whole(swapped[worst]),
                "memory_pressure": _rounded(waits[worst], 3),
                "samples": int(_counts(share)[worst]),
            },
            advice=for_ram(_facts_of(view, hosts[worst])),
        )
    ]


def _ram_title(where: str, *, low: bool, available: float, share: float, swapped: float | None, waits: float) -> str:
    if low:
        return f"Host memory{where} is nearly used up: {bytes_text(available)} available ({share_text(share)})."
    if swapped is not None:
        return f"The host{where} swapped out {bytes_text(swapped)} during the run."
    return f"Tasks{where} wait for memory in {share_text(waits)} of the time."


# -- both ---------------------------------------------------------------------------------------------------------


def _claim(
    view: View,
    hosts: list[str],
    told: NDArray[np.intp],
    *,
    kind: str,
    severity: Severity,
    title: str,
    evidence: dict[str, Any],
    advice: tuple[str, ...],
) -> Claim:
    """One finding for all hosts that have it; all hosts alike name no rank."""
    names = [hosts[index] for index in told]
    ranks = [rank for rank, host in zip(view.ranks, view.hosts, strict=True) if host in set(names)]
    finding = Finding(
        kind=kind,
        severity=severity,
        title=title,
        ranks=() if len(names) == len(hosts) else tuple(ranks),
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={**evidence, "nodes": names},
        advice=advice,
        confidence=0.9,
    )
    return Claim(finding=finding, saved_ns=np.zeros(len(view.steps)))


def _growth(values: Floats) -> Floats:
    """[N]; from the first of each row to its largest; nan with too few to tell."""
    first = np.full(len(values), np.nan)
    for column in values.T[::-1]:
        first = np.where(np.isnan(column), first, column)
    grown = np.fmax.reduce(values, axis=1, initial=np.nan) - first
    return np.where(_counts(values) >= thresholds.MACHINE_SAMPLES, grown, np.nan)


def _counts(values: Floats) -> NDArray[np.intp]:
    return np.asarray((~np.isnan(values)).sum(axis=1), np.intp)


def _facts_of(view: View, host: str) -> dict[str, Any]:
    """Of the first rank on the host that said anything."""
    own = (view.window.facts[index] for index, name in zip(view.rows, view.hosts, strict=True) if name == host)
    return next((facts for facts in own if facts), {})


def _where(view: View, host: str) -> str:
    return f" of {host}" if len(set(view.hosts)) > 1 else ""


def _rounded(value: float, digits: int = 1) -> float | None:
    return None if np.isnan(value) else round(float(value), digits)


def _whole(value: float) -> int | None:
    return None if np.isnan(value) else round(float(value))

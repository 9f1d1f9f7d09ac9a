"""After the chain: why ranks lost time without running: a quota, other tasks, the disk, swapped memory, steal.

The rules find that time is lost, on which rank, and what it costs; they do not see why a process does not run. The
agent samples that for every rank (``agent/sampling/off_cpu.py``). This step changes neither which findings there are
nor what they cost: a finding gets the cause in its title, evidence and advice where the samples show that it explains
at least half of the finding's time. A rank is compared with its peers, and a change of all ranks with the time outside
it, so a wait that all ranks share is not a cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.readings import Readings, host_readings, process_readings, row_medians
from stepscope.diagnosis.engine.view import View
from stepscope.diagnosis.rules.off_cpu_advice import OFF_CPU_ADVICE
from stepscope.judge import thresholds
from stepscope.judge.advice import advice_for
from stepscope.judge.chain import Claim
from stepscope.records.finding import Finding
from stepscope.records.text import count_text, cpus_text, ms_text, share_text

__all__ = ["join_off_cpu"]

Floats = NDArray[np.float64]

OF_RANKS = (
    *("input_straggler", "h2d_straggler", "compute_straggler", "straggler", "node_straggler", "between_steps"),
    *("stall", "jitter", "cpu_saturated"),
)
"""Kinds of findings that name ranks and may get a cause."""
OF_ALL = ("input_bound", "optimizer_bound", "wait_heavy", "between_steps", "stall", "change_point", "throughput_drop")
"""The same for findings about all ranks."""

FROM_DISK = ("disk", "swap", "mapped_file")
"""Causes that share the same wait."""


@dataclass(frozen=True, kw_only=True)
class _Cause:
    name: str
    text: str
    evidence: dict[str, Any]


def join_off_cpu(view: View, claims: Sequence[Claim]) -> list[Claim]:
    """The same claims, with the cause where the samples show one."""
    if not claims or not view.enough or not view.window.lines.get("process"):
        return list(claims)
    seen = _Seen(view=view)
    found: dict[int, Claim] = {}
    taken_ns = 0.0
    for at in sorted(range(len(claims)), key=lambda at: claims[at].finding.phase != "input"):  # it reads most files
        found[at] = _joined(seen, claims[at], taken_ns)
        if found[at].finding.evidence.get("cause") in FROM_DISK and _is_of_all_steps(view, claims[at].finding):
            taken_ns += float(claims[at].explained_ns.sum())
    return [found[at] for at in range(len(claims))]


def _is_of_all_steps(view: View, found: Finding) -> bool:
    """Whether it is about all ranks in all steps.  A sample does not tell the phases of a step apart, so what explains
    one such finding cannot explain another."""
    return not found.ranks and found.steps == view.span


def _joined(seen: _Seen, claim: Claim, taken_ns: float) -> Claim:
    found, view = claim.finding, seen.view
    lost_ns = float(claim.explained_ns.sum())
    if found.steps is None or lost_ns <= 0 or found.kind not in (OF_RANKS if found.ranks else OF_ALL):
        return claim
    at = slice(*np.searchsorted(view.steps, (found.steps[0], found.steps[1] + 1)).tolist())
    if at.stop <= at.start:
        return claim
    rows = np.flatnonzero(np.isin(view.ranks, found.ranks)) if found.ranks else np.arange(len(view.ranks))
    part = _Part(
        seen=seen,
        rows=rows,
        at=at,
        lost_ns=lost_ns,
        late=bool(found.ranks),
        phase=found.phase,
        taken_ns=taken_ns if _is_of_all_steps(view, found) else 0.0,
    )
    cause = part.of_processor() if found.kind == "cpu_saturated" else part.of_rest()
    return claim if cause is None else replace(claim, finding=_with(view, found, cause, rows))


def _with(view: View, found: Finding, cause: _Cause, rows: NDArray[np.intp]) -> Finding:
    """The cause comes before what the other ranks do: ``…, every step: CAUSE; all other ranks wait for it.``"""
    what, also, then = found.title.removesuffix(".").rpartition("; ")
    because = "; " if ": " in f"{what}{then}" else ": "
    title = f"{what}{because}{cause.text}; {then}." if also else f"{then}{because}{cause.text}."
    advice = advice_for(OFF_CPU_ADVICE, cause=cause.name, host=view.hosts[rows[0]] or "the host")
    before = () if cause.name == "quota" else found.advice  # other tasks are not what it waits for
    evidence = {**found.evidence, "cause": cause.name, **cause.evidence}
    return replace(found, title=title, evidence=evidence, advice=(*advice, *before))


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The samples of a view."""

    view: View

    @cached_property
    def ranks(self) -> Readings:
        return process_readings(self.view)

    @cached_property
    def hosts(self) -> tuple[list[str], Readings]:
        return host_readings(self.view)

    @cached_property
    def _weights(self) -> tuple[Floats, Floats]:
        """[R, T]; begin and end of the time that each sample describes."""
        ends = self.ranks.of("wall_ns")
        return ends - thresholds.OFF_CPU_SAMPLE_NS, ends

    def _by_key(self, key: str) -> Floats:
        """[R, T]; made once, since ``mean`` is called for every rank."""
        if key not in self._made:
            self._made[key] = self.ranks.of(key)
        return self._made[key]

    @cached_property
    def _made(self) -> dict[str, Floats]:
        return {}

    def means(self, key: str, rows: NDArray[np.intp], periods: Sequence[tuple[Floats, Floats]]) -> Floats:
        """By row, over some time (begins and ends by row), by how much of it each sample describes; nan if that is too
        little."""
        values = self._by_key(key)[rows]
        begins, ends = (bounds[rows] for bounds in self._weights)
        inside = np.zeros(values.shape)
        for start, stop in periods:
            inside += np.clip(np.minimum(ends, stop[:, None]) - np.maximum(begins, start[:, None]), 0.0, None)
        inside = np.where(np.isnan(values) | np.isnan(inside), 0.0, inside)
        total = inside.sum(axis=1)
        enough = total >= thresholds.OFF_CPU_SECONDS * 1e9
        sums = (np.nan_to_num(values) * inside).sum(axis=1)
        return np.where(enough, sums / np.where(enough, total, 1.0), np.nan)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Some ranks (rows) in some steps, which together lose ``lost_ns``."""

    seen: _Seen
    rows: NDArray[np.intp]
    at: slice
    lost_ns: float
    late: bool
    """Whether these ranks are late, and the others are not."""
    phase: str | None
    taken_ns: float
    """Waits in these steps that explain another finding."""

    # -- causes ---------------------------------------------------------------------------------------------------

    def of_processor(self) -> _Cause | None:
        """Why a rank that is known to wait for a processor has none."""
        waited_ns, throttled_ns = self._more("cpu_wait"), self._more("throttled", unknown=0.0)
        if np.isnan(waited_ns):
            return None
        evidence = {"cpu_wait_ms": self._each_ms(waited_ns)}
        quota = self._own("cpu_quota")
        if throttled_ns >= thresholds.EXPLAINS_SHARE * waited_ns and not np.isnan(quota):
            each = ms_text(throttled_ns / self._steps / 1e6)
            text = f"its cgroup is throttled {each} a step by its quota of {cpus_text(quota)}"
            evidence |= {"cpu_quota": round(quota, 3), "throttled_ms": self._each_ms(throttled_ns)}
            return _Cause(name="quota", text=text, evidence=evidence)
        hosts, readings = self.seen.hosts
        host = hosts.index(self.seen.view.hosts[self._worst])
        tasks, cores = (row_medians(readings.of(key))[host] for key in ("procs_running", "cpu_count"))
        allowed = self._own("processors")
        words = []
        if tasks > cores:
            words.append(f"{count_text(round(tasks), 'task')} on {count_text(round(cores), 'core')}")
        if allowed < cores:
            words.append(f"it may use {round(allowed)} of {count_text(round(cores), 'core')}")
        if not words:
            return None
        known = {"tasks": tasks, "cores": cores, "processors": allowed}
        evidence |= {name: round(value) for name, value in known.items() if not np.isnan(value)}
        return _Cause(name="cores", text=", ".join(words), evidence=evidence)

    def of_rest(self) -> _Cause | None:
        return self._of_faults() or self._of_disk() or self._of_workers() or self._of_steal()

    def _of_faults(self) -> _Cause | None:
        faults = self._more("major_faults_ps", rate=True)
        each = faults / self._steps
        swapped = self._own("swapped")
        from_swap = swapped >= thresholds.SWAPPED_BYTES
        waited = self._explains(self._more("disk_wait") - self.taken_ns)
        if not each >= thresholds.FAULTS_A_STEP:
            return None
        if not (waited or (from_swap and self._explains(faults * thresholds.FAULT_LEAST_NS - self.taken_ns))):
            return None
        what = f"{count_text(round(each), 'major fault')} a step"
        reads = "it reads" if self._is_single else "they read"
        if from_swap:
            text, name = f"{reads} swapped memory, {what}", "swap"
        else:
            text, name = f"{reads} mapped files from the disk page by page, {what}", "mapped_file"
        evidence: dict[str, Any] = {"major_faults_per_step": round(each, 1)}
        if from_swap:
            evidence["swapped_bytes"] = round(swapped)
        return _Cause(name=name, text=text, evidence=evidence)

    def _of_disk(self) -> _Cause | None:
        waited_ns = self._more("disk_wait") - self.taken_ns
        if not self._explains(waited_ns):
            return None
        each = ms_text(waited_ns / self._steps / 1e6)
        waits = "it waits" if self._is_single else "they wait"
        step = "in it" if self._steps == 1 else "a step"
        return _Cause(
            name="disk", text=f"{waits} {each} {step} for the disk", evidence={"disk_wait_ms": self._each_ms(waited_ns)}
        )

    def _of_workers(self) -> _Cause | None:
        """Workers wait side by side, so what counts is the share of their time."""
        if self.phase != "input":
            return None
        own, usual = self._own("children_disk_wait"), self._usual("children_disk_wait")
        if not (own >= thresholds.WORKERS_DISK_SHARE and own - usual >= thresholds.WORKERS_DISK_SHARE / 2):
            return None
        whose = "its" if self._is_single else "their"
        return _Cause(
            name="workers_disk",
            text=f"{whose} DataLoader workers wait for the disk {share_text(own)} of the time",
            evidence={"workers_disk_share": round(own, 4)},
        )

    def _of_steal(self) -> _Cause | None:
        """Steal is known of hosts only, so it tells hosts apart."""
        view = self.seen.view
        hosts, readings = self.seen.hosts
        stolen = row_medians(readings.of("cpu_steal"))
        own = hosts.index(view.hosts[self._worst])
        others = np.delete(stolen, own)
        if not self.late or np.isnan(others).all():
            return None
        more = float(stolen[own] - np.nanmedian(others))
        if not (more >= thresholds.STEAL_SHARE and self._explains(more * self._period_ns)):
            return None
        return _Cause(
            name="steal",
            text=f"the hypervisor takes {share_text(float(stolen[own]))} of the processors' time of {hosts[own]}",
            evidence={"cpu_steal": round(float(stolen[own]), 4)},
        )

    # -- figures --------------------------------------------------------------------------------------------------

    def _explains(self, ns: float) -> bool:
        least_ns = max(thresholds.EXPLAINS_SHARE * self.lost_ns, thresholds.OFF_CPU_SHARE * self._period_ns)
        return bool(ns >= least_ns)

    @property
    def _is_single(self) -> bool:
        return len(self.rows) == 1

    @cached_property
    def _steps(self) -> int:
        return int(self.at.stop - self.at.start)

    def _each_ms(self, ns: float) -> float:
        return round(ns / self._steps / 1e6, 3)

    @cached_property
    def _worst(self) -> int:
        """The row that counts: of several late ranks the one that works longest."""
        view = self.seen.view
        work_ns = np.nan_to_num(view.work_ns[self.rows, self.at]).sum(axis=1)
        return int(self.rows[int(work_ns.argmax())])

    def _periods(self, rows: NDArray[np.intp], at: slice) -> tuple[Floats, Floats]:
        """When some steps of ranks began and ended."""
        view = self.seen.view
        ends = view.window.end_wall_ns[np.asarray(view.rows)[rows]][:, view.columns][:, at]
        begins = ends - view.wall_ns[rows, at]
        return (
            np.fmin.reduce(begins, axis=1, initial=np.nan),
            np.fmax.reduce(ends, axis=1, initial=np.nan),
        )

    @cached_property
    def _period_ns(self) -> float:
        (start,), (stop,) = self._periods(np.array([self._worst]), self.at)
        return float(stop - start)

    def _own(self, key: str) -> float:
        """Of the worst late rank; of the median rank if all are alike."""
        rows = np.array([self._worst]) if self.late else self.rows
        return _median(self.seen.means(key, rows, [self._periods(rows, self.at)]))

    def _usual(self, key: str) -> float:
        """Of the peers of late ranks in the same steps; of all ranks outside of these steps, if there is enough."""
        view = self.seen.view
        if self.late:
            peers = np.setdiff1d(np.flatnonzero(view.groups == view.groups[self._worst]), self.rows)
            return _median(self.seen.means(key, peers, [self._periods(peers, self.at)]))
        outside = (slice(0, self.at.start), slice(self.at.stop, len(view.steps)))
        periods = [self._periods(self.rows, at) for at in outside if at.stop > at.start]
        usual = _median(self.seen.means(key, self.rows, periods))
        return 0.0 if np.isnan(usual) else usual

    def _more(self, key: str, *, rate: bool = False, unknown: float = float("nan")) -> float:
        """Nanoseconds in these steps (``rate``: how many) beyond what is usual; nan if unknown.

        ``unknown``: what counts as usual if the samples of the others do not have it.
        """
        usual = self._usual(key)
        more = self._own(key) - (unknown if np.isnan(usual) else usual)
        return more * self._period_ns / (1e9 if rate else 1.0)


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")

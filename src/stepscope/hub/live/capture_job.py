"""What orders of captures need to know of an active run: its ranks, its pace, and what became of their traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.registry import ENDED
from stepscope.records import run_clock
from stepscope.records.capture import CaptureReport
from stepscope.records.dataclass_json import decoded
from stepscope.records.steps import BUILTIN_PHASES, COMM, FLAG_COMPILED, FLAG_SAMPLED, OPTIMIZER

__all__ = ["JobRank", "LiveJob", "Pace", "TraceReport"]

STEPS = 32
"""The last steps that show the pace of the job and the work of each rank."""
PACE_RANKS = 64
COMPILED_STEPS = 3
"""Without a compilation in so many steps, the job is not compiling."""
MOST_EVENTS = 10_000


@dataclass(frozen=True, kw_only=True)
class JobRank:
    rank: int
    alive: bool
    work_ns: float
    """Of its own in a step: without waiting for other ranks."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    newest: int
    """The newest step that any rank has completed."""
    step_s: float
    age_s: float
    """How long ago the newest step ended."""
    compiling: bool
    nodes: int
    optimizer_s: float | None = None
    """Of such a step on a median rank; None if it is not known."""


@dataclass(frozen=True, kw_only=True)
class TraceReport:
    """What the agent wrote about a rank: its last report, and the size of its compressed trace."""

    report: CaptureReport
    file_bytes: int


class LiveJob:
    """The live model of a run, as the desk of captures sees it.  Only the hub's event loop calls it."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._seen = 0

    def move_to(self, live: LiveRun) -> None:
        """Continue on another model of the same run; its events are read from the first."""
        self._live, self._seen = live, 0

    @property
    def on_gpu(self) -> bool:
        """Whether the first rank trains on a GPU; false before there is one."""
        live = self._live
        rings = live.ring_of[:1].tolist()
        return bool(rings) and live.registry.identity(rings[0]).device == "cuda"

    def newest(self) -> int:
        """The newest step that any rank has completed; -1: none."""
        return int(self._live.planes.newest)

    def pace(self) -> Pace | None:
        """None before there are two steps."""
        live, planes = self._live, self._live.planes
        live.settle()
        steps = planes.complete()[-STEPS:]
        if len(steps) < 2 or not planes.columns:
            return None
        rows = planes.row_of(steps)
        columns = np.unique(np.linspace(0, planes.columns - 1, min(PACE_RANKS, planes.columns)).astype(np.intp))
        block = np.ix_(rows, columns)
        wall = np.where(planes.have[block], planes.arrays["wall_ns"][block], 0.0).max(axis=1)
        flags = planes.arrays["flags"][block] if "flags" in planes.arrays else np.zeros((len(steps), 1), np.int64)
        usual = (wall > 0) & ~(flags & FLAG_SAMPLED).any(axis=1)
        chosen = wall[usual] if usual.any() else wall[wall > 0]
        if not len(chosen):
            return None
        ended_ns = live.newest_step_end_ns()
        optimizer = planes.arrays.get(f"phase:{BUILTIN_PHASES[OPTIMIZER]}")
        whole_ns = float(planes.arrays["wall_ns"][block][usual].sum())
        # Of the sums: with gradient accumulation, most steps have no optimizer.
        share = float(optimizer[block][usual].sum()) / whole_ns if optimizer is not None and whole_ns > 0 else 0.0
        step_s = float(np.median(chosen)) / 1e9
        return Pace(
            newest=int(steps[-1]),
            step_s=step_s,
            age_s=0.0 if ended_ns is None else max(0.0, (run_clock.wall_ns() - ended_ns) / 1e9),
            compiling=bool((flags[-COMPILED_STEPS:] & FLAG_COMPILED).any()),
            nodes=len(live.registry.nodes),
            optimizer_s=share * step_s if share else None,
        )

    def ranks(self) -> tuple[JobRank, ...]:
        """The ranks of the last attempt, in order."""
        live, planes = self._live, self._live.planes
        live.settle()
        steps = planes.complete()[-STEPS:]
        if not len(steps) or not planes.columns:
            return ()
        of, rings = live.registry.of, live.ring_of
        alive = (of["state"][rings] < ENDED) & (of["ended_wall_ns"][rings] == 0)
        shown = of["shown"][rings].tolist()
        rows = planes.row_of(steps)
        work = planes.arrays["wall_ns"][rows, : planes.columns].astype(np.float64)
        if (comm := planes.arrays.get(f"phase:{BUILTIN_PHASES[COMM]}")) is not None:
            work = work - comm[rows, : planes.columns]
        work[~planes.have[rows, : planes.columns]] = np.nan
        usual = _medians(work)
        found = [
            JobRank(rank=rank, alive=lives, work_ns=own)
            for rank, lives, own in zip(shown, alive.tolist(), usual.tolist(), strict=True)
        ]
        return tuple(sorted(found, key=lambda each: each.rank))

    def step_ms(self, ranks: Sequence[int], first: int, last: int) -> float | None:
        """The median length of these steps on these ranks; None if they are not known."""
        live, planes = self._live, self._live.planes
        steps = planes.complete()
        steps = steps[(steps >= first) & (steps <= last)]
        columns = np.flatnonzero(np.isin(live.registry.of["shown"][live.ring_of], list(ranks)))
        if not len(steps) or not len(columns):
            return None
        block = np.ix_(planes.row_of(steps), columns)
        wall = planes.arrays["wall_ns"][block][planes.have[block]]
        return round(float(np.median(wall)) / 1e6, 3) if len(wall) else None

    def findings(self) -> Sequence[Mapping[str, Any]]:
        """What the rules show now, the leading finding first."""
        return [finding.to_dict() for finding in self._live.judged.findings]

    @property
    def evaluations(self) -> int:
        return self._live.judged.evaluations

    def reports(self) -> list[TraceReport]:
        """What agents have written about traces since the last call."""
        found = []
        for event in self._live.events(self._seen, limit=MOST_EVENTS):
            self._seen = int(event["number"])
            if event.get("event") == "capture_rank" and (report := _report_of(event)) is not None:
                found.append(report)
        return found


def _report_of(event: Mapping[str, Any]) -> TraceReport | None:
    file_bytes = event.get("file_bytes")
    with suppress(ValueError):
        report = decoded(CaptureReport, {**event, "id": event.get("capture")})
        return TraceReport(report=report, file_bytes=file_bytes if type(file_bytes) is int else 0)
    return None


def _medians(work: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of each column; 0 for one without a value."""
    known = ~np.isnan(work).all(axis=0)
    found = np.zeros(work.shape[1])
    if known.any():
        found[known] = np.nanmedian(work[:, known], axis=0)
    return found

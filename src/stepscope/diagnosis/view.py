"""The steady steps of a window as the rules see them: on which clock, and what of it is work.

On a GPU the host runs ahead and blocks wherever it first needs a result, so its phases do not say where the time goes:
where device times exist on all ranks they are used (marks on the stream partition the device's time by phase, and input
that is hidden behind device work takes none of it).  Everywhere else host time is the truth.

In a synchronous job every rank's step is equally long.  ``work = wall - comm`` tells who makes it long — when waiting
was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.robust import longest, mean_rank
from stepscope.diagnosis.window import Window

__all__ = ["View", "cost_of", "replay_without", "view_of"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class View:
    """As ``Window``, but steady steps only and one clock."""

    clock: Literal["host", "device"]
    window: Window
    """All of it, with facts, samples and memory; ``rows`` and ``columns`` say which part of it this is."""
    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    groups: NDArray[np.intp]
    """[R]; see ``Window.groups``."""
    steps: NDArray[np.int64]
    phases: tuple[str, ...]
    wall_ns: Floats
    phase_ns: Floats
    between_ns: Floats
    """[R, S]; of ``other``, what lies between two steps (host time)."""
    flags: NDArray[np.uint16]
    backwards: NDArray[np.int64]
    """[S]; see ``Window.backwards``."""
    comm_measured: bool

    @cached_property
    def step_ns(self) -> Floats:
        """[S]; length of each step: in lockstep the mean over the ranks, else the longest.

        In lockstep they are equal, but for a stall between two collectives, which one rank has in this step and its
        peers, waiting, in the next: the mean is what adds up to the time that passed.
        """
        return mean_rank(self.wall_ns) if self.lockstep else longest(self.wall_ns)

    @cached_property
    def lockstep(self) -> bool:
        """Whether the ranks keep pace: after all these steps none is more than a step or two ahead."""
        together = self.wall_ns[:, ~np.isnan(self.wall_ns).any(axis=0)]
        if not together.size:
            return True
        totals = together.sum(axis=1)
        return bool(totals.max() - totals.min() <= thresholds.PACE_STEPS * together.max())

    @cached_property
    def work_ns(self) -> Floats:
        """[R, S]; what a rank did itself; all of its step when waiting was not measured."""
        return self.wall_ns - self.phase("comm") if self.comm_measured else self.wall_ns

    @property
    def enough(self) -> bool:
        """Whether there are steps enough to judge by."""
        return len(self.steps) >= thresholds.MIN_STEPS

    @property
    def span(self) -> tuple[int, int]:
        """First and last step; only of a view with any."""
        return int(self.steps[0]), int(self.steps[-1])

    @property
    def facts(self) -> dict[str, Any]:
        """Of the first rank that said anything: what all ranks have in common."""
        return next((facts for index in self.rows if (facts := self.window.facts[index])), {})

    @property
    def accumulates(self) -> bool:
        """Whether several batches make a step."""
        batches = self.window.batches[self.rows]
        return bool(len(batches)) and float(np.median(batches)) > 1

    @property
    def hides_device(self) -> bool:
        """Whether the run is on a device whose times are not known.

        Very short or very few steps.  Where the host needs a result, or copies from ordinary memory, it waits until the
        device has done all that came before: what it spends there is the device's work, whatever it is.
        """
        on_device = any(self.window.identities[row].device not in ("", "cpu") for row in self.rows)
        return self.clock == "host" and on_device

    @property
    def nccl(self) -> bool:
        """Whether any rank exchanges with it."""
        return _on_nccl(self.window, self.rows)

    @cached_property
    def waited_ns(self) -> Floats | None:
        """[R, S]; how long each rank waited for later ones, by NCCL's Flight Recorder; None: nothing is known.

        Also what was hidden behind its own work.  nan in steps whose collectives were not kept one by one, or not of
        all ranks.
        """
        exchanges = self.window.communication
        if exchanges is None or not len(exchanges.arrivals.call_row):
            return None
        seen = exchanges.arrivals
        row, column = np.full(len(self.window.ranks), -1, np.intp), np.full(len(self.window.steps), -1, np.intp)
        row[self.rows] = np.arange(len(self.rows))
        column[self.columns] = np.arange(len(self.columns))
        rows, columns = row[seen.call_row], column[seen.call_place]
        inside = (rows >= 0) & (columns >= 0)
        shape = len(self.rows), len(self.columns)
        at = rows[inside] * shape[1] + columns[inside]
        waited = np.bincount(at, seen.call_wait_ns[inside], minlength=shape[0] * shape[1])
        counts = np.bincount(at, minlength=shape[0] * shape[1])
        found = np.where(counts > 0, waited, np.nan).reshape(shape)
        return found if np.isfinite(found).any() else None

    @cached_property
    def median_step_ns(self) -> float:
        return float(np.median(self.step_ns)) if len(self.steps) else 0.0

    def phase(self, name: str) -> Floats:
        """[R, S]; zeros when the run has no such phase."""
        if name in self.phases:
            return np.asarray(self.phase_ns[self.phases.index(name)], np.float64)
        return np.zeros_like(self.wall_ns)


def view_of(window: Window) -> View:
    steady = window.steady
    clock: Literal["host", "device"] = "host"
    phase_ns, wall_ns = window.phase_ns, window.wall_ns
    if window.device_ns is not None:
        timed = steady & (np.isnan(window.wall_ns) | ~np.isnan(window.device_ns).any(axis=0)).all(axis=0)
        if timed.sum() >= thresholds.MIN_STEPS:
            clock, steady, phase_ns = "device", timed, window.device_ns
            wall_ns = phase_ns.sum(axis=0)
    kept = _as_index(steady)
    # A rank that died during warm-up has no steady step.
    there = _as_index(np.asarray(~np.isnan(wall_ns[:, kept]).all(axis=1))) if steady.any() else slice(None)
    phase_ns = phase_ns[:, there, kept] if isinstance(there, slice) else phase_ns[:, there][:, :, kept]
    present = np.arange(len(window.ranks))[there]
    return View(
        clock=clock,
        window=window,
        rows=present,
        columns=np.arange(len(window.steps))[kept],
        ranks=tuple(window.ranks[index] for index in present),
        hosts=tuple(window.hosts[index] for index in present),
        groups=window.groups[there],
        steps=window.steps[kept],
        phases=window.phases,
        wall_ns=wall_ns[there][:, kept],
        phase_ns=phase_ns,
        between_ns=window.between_ns[there][:, kept],
        flags=window.flags[there][:, kept],
        backwards=window.backwards[kept],
        comm_measured=_comm_measured(window.phases, phase_ns, every_rank=clock == "device")
        and not (clock == "host" and _on_nccl(window, present)),
    )


def replay_without(durations_ns: Floats, culprits: NDArray[np.intp], typical_ns: Floats) -> Floats:
    """[S]; by how much each step would have been shorter had the culprits taken at most what their peers usually take.

    A step lasts as long as its slowest rank works, plus what is common to all; the common part does not change.
    """
    replaced = durations_ns.copy()
    # Who is gone takes no time: in its place nothing comes, not even what is typical.
    replaced[culprits] = np.where(np.isnan(replaced[culprits]), np.nan, np.fmin(replaced[culprits], typical_ns))
    return longest(durations_ns) - longest(replaced)


def cost_of(view: View, saved_ns: Floats) -> dict[str, Any]:
    """The price of a finding from what each step would have saved."""
    # No step can save more than it lasted; a replay by phase alone does not know that.
    saved_ns = np.clip(saved_ns, 0.0, view.step_ns)
    total_ns = float(view.step_ns.sum())
    saved_total_ns = float(saved_ns.sum())
    left_ns = total_ns - saved_total_ns
    seconds = saved_total_ns / 1e9
    return {
        "share": round(saved_total_ns / total_ns, 4) if total_ns else 0.0,
        "seconds": round(seconds, 3),
        "rank_hours": round(seconds * len(view.ranks) / 3600, 4),
        "if_fixed": {
            # The mean: times the speed-up it is the mean step there was, which a median would not be.
            "step_ms": round(left_ns / len(view.steps) / 1e6, 3) if len(view.steps) else None,
            "speedup": round(total_ns / left_ns, 3) if left_ns > 0 else None,
        },
    }


def _as_index(mask: NDArray[np.bool_]) -> Any:
    """A slice where what is kept is in one piece, as they mostly are: nothing is copied then."""
    at = np.flatnonzero(mask)
    if len(at) and at[-1] - at[0] + 1 == len(at):
        return slice(int(at[0]), int(at[-1]) + 1)
    return mask


def _on_nccl(window: Window, rows: NDArray[np.intp]) -> bool:
    """There a wait of the host only tells its stream to wait, and says nothing."""
    return any("nccl" in window.identities[row].backend for row in rows)


def _comm_measured(phases: tuple[str, ...], phase_ns: Floats, *, every_rank: bool) -> bool:
    """Whether waiting was booked in most steps; a source that samples now and then tells nobody apart.

    ``every_rank``: on each of them.  On a device it is marked by hooks, and a rank without them would seem to work
    while it waits; the rank that comes last has its marks, too, with next to nothing between them.
    """
    if "comm" not in phases or not phase_ns.shape[2]:
        return False
    comm_ns = phase_ns[phases.index("comm")]
    some = comm_ns > 0
    if every_rank:
        there = np.maximum((~np.isnan(comm_ns)).sum(axis=1), 1)
        return bool((some.sum(axis=1) >= thresholds.COMM_STEPS_SHARE * there).all())
    return bool(some.any(axis=0).mean() >= thresholds.COMM_STEPS_SHARE)

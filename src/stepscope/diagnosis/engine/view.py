"""The view: a window's steady steps on one clock, split into work and wait, and shares of their time.

On a GPU the host runs ahead and blocks wherever it first needs a result, so its phases do not show where the time goes.
Where all ranks have device times, those are used: marks on the stream partition the device's time by phase, and input
that is hidden behind device work takes none of it.  Everywhere else host time is the truth.

In a synchronous job every rank's step is equally long.  ``work = wall - comm`` shows which rank makes it long, if
waiting was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.window import Window
from stepscope.judge import thresholds
from stepscope.judge.finding_cost import cost_document
from stepscope.judge.statistics import longest, lower_median, lower_median_rank, mean_rank, medians
from stepscope.records.steps import FLAG_EPOCH_START

__all__ = [
    "LAUNCHING_PHASES",
    "TimeShare",
    "View",
    "clock_of",
    "computed_once",
    "cost_of",
    "epoch_starts",
    "host_excess_ns",
    "host_ns",
    "in_lockstep",
    "is_even",
    "lower_median_rank",
    "ordinary_steps",
    "slow_host_phase",
    "step_lengths",
    "steps_having",
    "stretches_with",
    "time_share_of",
    "timed_steps",
    "view_of",
    "waits_for_host",
    "where_stopped",
]


T = TypeVar("T")
Owner = TypeVar("Owner", "View", Window)


def computed_once(owner: Owner, name: str, compute: Callable[[Owner], T]) -> T:
    """Keep a result with a view or a window, like its cached properties: several rules need it."""
    if name not in vars(owner):
        vars(owner)[name] = compute(owner)
    return cast("T", vars(owner)[name])


# -- view -------------------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Clock = Literal["host", "device"]


@dataclass(frozen=True, kw_only=True)
class View:
    """Like ``Window``, but steady steps only and one clock."""

    clock: Clock
    window: Window
    """The whole window, with facts, samples and memory; ``rows`` and ``columns`` say which part of it this is."""
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
    """[R, S]; the part of ``other`` that lies between two steps (host time)."""
    flags: NDArray[np.uint16]
    backwards: NDArray[np.int64]
    """[S]; see ``Window.backwards``."""
    forwards: NDArray[np.int64]
    """[S]; see ``Window.forwards``."""
    comm_measured: bool

    @cached_property
    def step_ns(self) -> Floats:
        """[S]; length of each step: in lockstep the mean over the ranks, else the longest.

        In lockstep the ranks agree, except for a stall between two collectives: one rank has it in this step, its
        waiting peers in the next.  The mean adds up to the time that passed.
        """
        return step_lengths(self.wall_ns)

    @cached_property
    def training_ns(self) -> float:
        """The training time: all steady steps, also where only some were timed on the device."""
        if self.clock == "host":
            return float(self.step_ns.sum())
        return float(step_lengths(self.window.wall_ns[self.rows][:, self.window.steady]).sum())

    @cached_property
    def lockstep(self) -> bool:
        """Whether the ranks keep pace because they wait for each other; processes without a group never wait."""
        return self.in_group and in_lockstep(self.wall_ns)

    @property
    def in_group(self) -> bool:
        """Whether the processes were started as ranks of one job or share a process group (unlike Hogwild's)."""
        return len(self.ranks) < 2 or any(self.window.identities[row].world_size > 1 for row in self.rows)

    @cached_property
    def work_ns(self) -> Floats:
        """[R, S]; the rank's own work; its whole step if waiting was not measured."""
        return self.wall_ns - self.phase("comm") if self.comm_measured else self.wall_ns

    @property
    def enough(self) -> bool:
        """Whether there are enough steps to judge."""
        return len(self.steps) >= thresholds.MIN_STEPS

    @property
    def span(self) -> tuple[int, int]:
        """First and last step; requires at least one step."""
        return int(self.steps[0]), int(self.steps[-1])

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the first rank that has any: those that all ranks have in common."""
        return next((facts for index in self.rows if (facts := self.window.facts[index])), {})

    @property
    def accumulates(self) -> bool:
        """Whether a step consists of several batches."""
        batches = self.window.batches[self.rows]
        return bool(len(batches)) and float(np.median(batches)) > 1

    @property
    def compiled(self) -> bool:
        """Whether torch.compile is used: for the model, or for a function that some step compiled."""
        model = self.facts.get("model")
        known = isinstance(model, dict) and model.get("compiled") is True
        return known or any(step.reason == "compile" for step in self.window.warmup)

    @property
    def hides_device(self) -> bool:
        """Whether the run uses a device whose times are unknown, because steps are very short or very few.

        Where the host needs a result, or copies from pageable memory, it waits until the device has finished everything
        before: the time it spends there is the device's work, of whatever kind.
        """
        on_device = any(self.window.identities[row].device not in ("", "cpu") for row in self.rows)
        return self.clock == "host" and on_device

    @property
    def nccl(self) -> bool:
        """Whether any rank uses NCCL."""
        return _on_nccl(self.window, self.rows)

    @cached_property
    def waited_ns(self) -> Floats | None:
        """[R, S]; how long each rank waited for later ones, by NCCL's Flight Recorder; None: unknown.

        Includes waits hidden behind its own work.  nan in steps whose collectives were not recorded individually, or
        not by all ranks.
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


def timed_steps(there: Bools, timed: Bools) -> Bools:
    """[S]; the steps that every rank timed on its device that was there; ``there`` and ``timed`` are [R, S]."""
    return np.asarray(there.any(axis=0) & (timed | ~there).all(axis=0), np.bool_)


def clock_of(timed: Bools) -> Clock:
    """On which clock ranks are compared: the devices', if enough steady steps were timed there (``timed_steps``)."""
    return "device" if int(timed.sum()) >= thresholds.MIN_STEPS else "host"


def view_of(window: Window) -> View:
    steady = window.steady
    clock: Clock = "host"
    phase_ns, wall_ns = window.phase_ns, window.wall_ns
    if window.device_ns is not None:
        timed = timed_steps(~np.isnan(window.wall_ns), np.asarray(~np.isnan(window.device_ns).any(axis=0))) & steady
        clock = clock_of(timed)
        if clock == "device":
            steady, phase_ns = timed, window.device_ns
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
        forwards=window.forwards[kept],
        comm_measured=_comm_measured(window.phases, phase_ns, every_rank=clock == "device")
        and not (clock == "host" and _on_nccl(window, present)),
    )


def in_lockstep(wall_ns: Floats) -> bool:
    """Whether the ranks of ``wall_ns`` [R, S] keep pace: after all steps none is more than a step or two ahead."""
    together = wall_ns[:, ~np.isnan(wall_ns).any(axis=0)]
    if not together.size:
        return True
    totals = together.sum(axis=1)
    return bool(totals.max() - totals.min() <= thresholds.PACE_STEPS * together.max())


def step_lengths(wall_ns: Floats) -> Floats:
    """[S]; length of each step of ``wall_ns`` [R, S]: in lockstep the mean over the ranks, else the longest."""
    there = wall_ns[~np.isnan(wall_ns).all(axis=1)]
    return mean_rank(there) if in_lockstep(there) else longest(there)


def cost_of(view: View, saved_ns: Floats) -> dict[str, Any]:
    """The cost of a finding, from what each step would have saved: its share of the training time."""
    # No step can save more than it lasted; a replay by phase alone ignores that.
    saved_ns = np.clip(saved_ns, 0.0, view.step_ns)
    total_ns, saved_total_ns = float(view.step_ns.sum()), float(saved_ns.sum())
    share = saved_total_ns / total_ns if total_ns else 0.0
    return cost_document(
        share=share,
        seconds=share * view.training_ns / 1e9,
        ranks=len(view.ranks),
        # The mean: multiplied by the speed-up it gives the actual mean step, which a median would not.
        step_ns=total_ns / len(view.steps) if len(view.steps) else None,
    )


def _as_index(mask: NDArray[np.bool_]) -> Any:
    """A slice if the selection is contiguous, which is common and copies nothing; else the mask."""
    at = np.flatnonzero(mask)
    if len(at) and at[-1] - at[0] + 1 == len(at):
        return slice(int(at[0]), int(at[-1]) + 1)
    return mask


def _on_nccl(window: Window, rows: NDArray[np.intp]) -> bool:
    """Whether any rank uses NCCL, where a host's wait only makes its stream wait and is not informative."""
    return any("nccl" in window.identities[row].backend for row in rows)


def _comm_measured(phases: tuple[str, ...], phase_ns: Floats, *, every_rank: bool) -> bool:
    """Whether most steps have a recorded wait; occasional samples cannot tell ranks apart.

    ``every_rank``: each rank must have one.  On a device hooks mark the waits, and a rank without them would seem to
    work while it waits; the last rank to arrive has its marks, too, with next to nothing between them.
    """
    if "comm" not in phases or not phase_ns.shape[2]:
        return False
    comm_ns = phase_ns[phases.index("comm")]
    some = comm_ns > 0
    if every_rank:
        there = np.maximum((~np.isnan(comm_ns)).sum(axis=1), 1)
        return bool((some.sum(axis=1) >= thresholds.COMM_STEPS_SHARE * there).all())
    return bool(some.any(axis=0).mean() >= thresholds.COMM_STEPS_SHARE)


# -- shares of time ---------------------------------------------------------------------------------------------------
# How much of the time something takes on all ranks alike: the basis of the rules about bottlenecks.
#
# Shares are of the sum over steps, not of a median step: workers that fall behind make every fourth step wait four
# times as long, which the median step would not show.


@dataclass(frozen=True, kw_only=True)
class TimeShare:
    """Durations as a share of the step."""

    share: float
    """Share of the median rank's time."""
    mean_ns: float
    """Per step, on the same rank."""
    by_rank: Floats


def epoch_starts(view: View) -> Bools:
    return np.asarray(((view.flags & FLAG_EPOCH_START) > 0).any(axis=0), np.bool_)


def ordinary_steps(view: View) -> tuple[Bools, bool]:
    """[S]; all but rare epoch starts and the longest steps; and whether epoch starts are included (the rhythm)."""
    starts = epoch_starts(view)
    if bool(starts.mean() > thresholds.EPOCH_STARTS_SHARE):
        return np.ones(len(view.steps), np.bool_), True
    used: Bools = ~starts
    used[np.argsort(view.step_ns)[::-1][: int(np.ceil(thresholds.STALLS_SHARE * len(view.steps)))]] = False
    return used, False


def time_share_of(view: View, durations_ns: Floats, used: Bools) -> TimeShare:
    totals, counts = _sums(view.wall_ns, used)
    there = totals > 0
    sums, _ = _sums(durations_ns, used)
    by_rank = np.where(there, sums / np.where(there, totals, 1.0), np.nan)
    means = sums / np.maximum(counts, 1)
    return TimeShare(
        share=lower_median(by_rank[there]) if there.any() else 0.0,
        mean_ns=lower_median(means[there]) if there.any() else 0.0,
        by_rank=by_rank,
    )


def _sums(values: Floats, used: Bools) -> tuple[Floats, Floats]:
    """[R]; sum and count over the used steps.  A matrix product needs no copy, and is nan where a rank ended."""
    chosen = used.astype(np.float64)
    sums, counts = values @ chosen, np.full(len(values), chosen.sum())
    for rank in np.flatnonzero(np.isnan(sums)):
        own = values[rank][used]
        sums[rank], counts[rank] = np.nansum(own), (~np.isnan(own)).sum()
    return np.asarray(sums, np.float64), counts


def is_even(durations_ns: Floats) -> bool:
    """Whether every step has about as much of it, rather than some having much and most hardly any."""
    return bool(np.median(durations_ns) >= durations_ns.mean() / 2)


def steps_having(durations_ns: Floats) -> Bools:
    """[S]; the steps with a good part of it, where most have hardly any."""
    return np.asarray(durations_ns > durations_ns.mean() / 2, np.bool_)


def stretches_with(shared_ns: Floats, step_ns: Floats, least_share: float) -> float:
    """The share of stretches of the run that show at least ``least_share`` on their own."""
    stretches = np.array_split(np.arange(len(step_ns)), min(thresholds.WANDER_BLOCKS, len(step_ns)))
    return float(np.mean([shared_ns[at].sum() >= least_share * step_ns[at].sum() for at in stretches]))


def where_stopped(view: View, stopped_ns: Floats) -> Floats:
    """[S]; how much longer each step is because some rank pauses training.

    What one rank does after the last collective of a step makes its peers wait in the next one: whatever does not fit
    into this step goes there.
    """
    took = np.asarray(np.fmax.reduce(stopped_ns, axis=0), np.float64)
    usual = float(np.median(np.maximum(view.step_ns - took, 0.0)))
    room = np.maximum(view.step_ns - usual, 0.0)
    here = np.minimum(took, room)
    if view.lockstep:
        here[1:] += np.minimum(took[:-1] - here[:-1], room[1:] - here[1:])
    return here


# -- host-bound ranks -------------------------------------------------------------------------------------------------
# A rank whose device waits for its host, on the device's clock.
#
# A host launches ahead of its device.  If it does not get ahead, the device is idle while the host fetches input or
# logs: the device's time in those phases, usually hidden behind work, equals the host's.

LAUNCHING_PHASES = ("input", "h2d", "forward", "backward", "optimizer")
"""Phases that a host has to finish before its device can."""
PHASES_WITHOUT_DEVICE = ("input", "other")


class _LateRank(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def at(self) -> slice: ...
    @property
    def phase(self) -> str | None: ...


def host_ns(view: View, phase: str, at: slice = slice(None)) -> Floats:
    """[R, S]; host time of a view's ranks and steps."""
    window = view.window
    if phase not in window.phases:
        return np.zeros((len(view.rows), len(view.columns[at])))
    return np.asarray(window.phase_ns[window.phases.index(phase)][view.rows][:, view.columns[at]], np.float64)


def waits_for_host(view: View, late: _LateRank) -> bool:
    """Whether its device is idle while its host does something else, and those of its peers are not."""
    if view.clock != "device":
        return False
    host = idle = 0.0
    for name in PHASES_WITHOUT_DEVICE:
        if name == late.phase:
            continue  # in the phase where it is late, its device may have work
        own_ns = float(medians(host_ns(view, name, late.at)[[late.rank]])[0])
        device_ns = medians(view.phase(name)[:, late.at])
        usual_ns = float(np.nanmedian(np.delete(device_ns, late.rank)))  # clipping, say: work without a phase
        host += own_ns
        idle += max(min(own_ns, float(device_ns[late.rank])) - usual_ns, 0.0)
    return host >= thresholds.HOST_LEAST_NS and idle >= thresholds.IDLE_SHARE * host


def host_excess_ns(view: View, late: _LateRank) -> float:
    """Host time per step beyond the hosts of its peers, measured where those are not blocked themselves."""
    by_phase = _host_excess_by_phase(view, late)
    return sum(by_phase.values()) if by_phase else float("inf")


def slow_host_phase(view: View, late: _LateRank) -> str | None:
    """The phase with most of the host's excess over the hosts of its peers."""
    by_phase = _host_excess_by_phase(view, late)
    name = max(by_phase, key=lambda phase: by_phase[phase], default=None)
    return name if name and by_phase[name] > thresholds.EXPLAINS_SHARE * sum(by_phase.values()) else None


def _host_excess_by_phase(view: View, late: _LateRank) -> dict[str, float]:
    """Empty for a rank without peers."""
    peers = np.flatnonzero((view.groups == view.groups[late.rank]) & (np.arange(len(view.ranks)) != late.rank))
    if not len(peers):
        return {}
    excess = {}
    for name in (*LAUNCHING_PHASES, "other"):
        spent = host_ns(view, name, late.at)
        own = float(medians(spent[[late.rank]])[0])
        usual = float(np.nanmedian(np.nanquantile(spent[peers], thresholds.HOST_QUIET, axis=1)))
        excess[name] = max(own - usual, 0.0)
    return excess

"""What if something were faster: one rank's steps replayed along their dependencies with other durations.

A change is written as:

    kernel:NAME=2x       kernels (copies, memsets) with a matching name take half the time; * and ? are wildcards
    op:NAME=2x           operators and annotations with a matching name, and everything inside and launched by them
    comm=hidden          collectives take no time: nothing waits for them; comm=0 is the same
    copy=0               copies and memsets take no time
    launch=0             launch calls, launch delays and gaps between kernels take no time: at best, CUDA graphs
    host=0               the host takes no time except for loading data: what the device alone needs
    loader=0             the DataLoader always has its data ready
    rank:3=peers         rank 3 arrives at each collective like its peers; ``across_ranks/replay.py``

``NAME=0`` instead of a factor: it takes no time. A change only affects durations. The dependencies stay, so another
path may become critical: the gain is what the replay saves, not the part of the path that disappears.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepscope.errors import TraceError
from stepscope.traces.device.figures import device_time, launched_in_steps, shared_out
from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Ints, Kind
from stepscope.traces.model.tables import Table, table_of
from stepscope.traces.path.graph import Cause, Graph, HostLine, Via

__all__ = ["Change", "Plan", "WhatIf", "as_it_was", "parse_change", "replay", "what_if", "what_if_table", "what_ifs"]


# -- replay -----------------------------------------------------------------------------------------------------------
# The trace's dependencies executed again with other durations: how long would the steps have taken? Why this is not the
# replay of ``judge/replay.py`` is said there.
#
# Work starts when everything it depends on is done (its launch, the previous work on its stream, what it waited for on
# another stream), each with a lag. The dependency that delayed it keeps the lag it had; the others get the usual lag,
# or their own if that is shorter. A thread does the same things in their new durations. Where it waited, or would have
# waited, it continues once it has arrived there and what it waits for is done. A replay without any change reproduces
# every instant exactly.
#
# Anything outside the trace's dependencies, such as the order of launches, does not change. A host that runs ahead of
# the device would eventually fill the queue, so no step becomes shorter than the work of its busiest stream (at most
# its original length). Where the device clearly sets the pace (``Pace``), the steps are treated as one, whose length is
# the time of the device or of the host, whichever is longer.

NEVER: Final = -(1 << 62)
STREAM, EVENT, LAUNCH = int(Via.STREAM), int(Via.EVENT), int(Via.LAUNCH)


@dataclass(frozen=True, kw_only=True)
class Durations:
    """The changed durations of everything."""

    work_ns: Ints
    """[work]"""
    pieces_ns: dict[int, Ints]
    """By thread: the duration of each piece of its line; threads not listed are unchanged."""
    no_delays: bool = False
    """Launches and gaps between work items take no time."""
    fits: bool = True
    """Whether anything is different."""


def as_it_was(graph: Graph) -> Durations:
    return Durations(work_ns=graph.work_ns, pieces_ns={})


class ThreadTime:
    """How much of a thread's new time has passed at an instant of the old time, starting at ``start_ns``."""

    def __init__(self, line: HostLine, start_ns: int, end_ns: int, pieces_ns: Ints | None) -> None:
        first, last = int(line.at(np.array([start_ns]))[0]), int(line.at(np.array([end_ns]))[0])
        self.starts = np.maximum(line.start_ns[first : last + 1], start_ns)
        ends = np.minimum(line.ends_ns[first : last + 1], end_ns)
        old = ends - self.starts
        self.old = np.maximum(old, 1)
        whole = line.ends_ns[first : last + 1] - line.start_ns[first : last + 1]
        # A piece that is cut by the start or end of the stretch counts in proportion.
        self.new = old if pieces_ns is None else _scaled(pieces_ns[first : last + 1], old, whole)
        self.passed = np.append(0, np.cumsum(self.new))
        self.end_ns = end_ns

    def at(self, times: Ints) -> Ints:
        times = np.minimum(np.maximum(times, self.starts[0]), self.end_ns)  # np.clip looks up the limits of its type
        piece = np.searchsorted(self.starts, times, side="right") - 1
        return self.passed[piece] + _scaled(self.new[piece], times - self.starts[piece], self.old[piece])


def _scaled(value: Ints, part: Ints, whole: Ints) -> Ints:
    """Return ``value`` × ``part`` / ``whole``, exactly ``part`` where value equals whole; never beyond 2⁶³."""
    rough = np.rint(value.astype(np.float64) * (part / np.maximum(whole, 1))).astype(np.int64)
    return np.where(value == whole, part, rough)


@dataclass(frozen=True, kw_only=True)
class Replay:
    steps_ns: tuple[int, ...]
    """How long each step would have taken."""
    limits_ns: dict[str, int]
    """What the last step would then depend on, longest first: host, delay, or the name of a work item; or only the
    device.
    """


class Plan:
    """Everything that a replay of some steps visits, in order; the same for all changes."""

    def __init__(self, graph: Graph, first: int, last: int) -> None:
        self.pace_ns = device_time(graph.window, first, last)
        """Start and end of the device's work, if it sets the pace: these steps are then treated as one."""
        self.graph, self.first, self.last = graph, first, last
        self.steps = graph.window.steps[first : last + 1]
        self.start_ns, self.end_ns = self.steps[0].start_ns, max(step.end_ns for step in self.steps)
        columns = graph.columns
        self.starts, self.ends, self.launched = columns.start_ns, columns.end_ns, columns.launched_ns
        via, before, awaited = columns.via, columns.before, columns.awaited
        self.thread = np.where(via == Via.NOTHING, graph.main[first], columns.launch_thread)
        ends = np.append(self.ends, 0)
        self.lags = np.stack(
            [
                self._lags(self.launched, self.thread >= 0, np.isin(via, (Via.LAUNCH, Via.NOTHING))),
                self._lags(ends[before], before >= 0, via == Via.STREAM),
                self._lags(ends[awaited], awaited >= 0, via == Via.EVENT),
            ]
        )
        self.checks = [
            Check(at, since, kind, target, thread)
            for thread, exits in graph.checks.items()
            for at, since, kind, target in zip(exits.at_ns, exits.since_ns, exits.via, exits.target, strict=True)
            if self.start_ns < at <= self.end_ns
        ]
        self.bounds = [instant for step in self.steps for instant in (step.start_ns, step.end_ns)]
        inside = (self.starts >= self.start_ns) & (self.starts < self.end_ns)
        self.own = launched_in_steps(graph.window, first, last)[graph.row] if self.pace_ns else inside
        inside = inside | self.own
        self.works = np.flatnonzero(inside)
        self.launched_works = np.flatnonzero(inside & (self.launched >= self.start_ns) & (self.thread >= 0))
        """Work that is launched within the steps."""
        self.order = self._order()
        self.threads: list[int] = self.thread.tolist()

    @cached_property
    def own_lags(self) -> list[list[int]]:
        return self.lags.tolist()  # type: ignore[no-any-return]

    @cached_property
    def no_lags(self) -> list[list[int]]:
        return np.minimum(self.lags, 0).tolist()  # type: ignore[no-any-return]

    def _lags(self, since: Ints, there: NDArray[np.bool_], decisive: NDArray[np.bool_]) -> Ints:
        had = self.starts - since
        usual = int(np.median(had[decisive & there])) if (decisive & there).any() else 0
        return np.where(decisive, had, np.minimum(had, usual))

    def _order(self) -> list[int]:
        """Number launches, work, checks and step bounds consecutively, in order of time."""
        count = len(self.starts)
        works, launched_works = self.works, self.launched_works
        at = np.array([check.at_ns for check in self.checks], np.int64)
        parts = [launched_works, works + count, np.arange(len(at)) + 2 * count]
        parts.append(np.arange(len(self.bounds)) + 2 * count + len(at))
        times = [self.launched[launched_works], self.starts[works], at, np.array(self.bounds, np.int64)]
        kind = np.repeat(np.arange(4), [len(part) for part in parts])
        which = np.concatenate(parts)
        return which[np.lexsort((which, kind, np.concatenate(times)))].tolist()  # type: ignore[no-any-return]

    def busiest_ns(self, work_ns: Ints) -> tuple[int, ...]:
        """Return the busiest stream's work on what the step launched, at most the step itself; [steps]."""
        line = self.graph.chains.line[self.graph.chains.place]
        out = []
        for step in self.steps:
            own = (self.launched >= step.start_ns) & (self.launched < step.end_ns)
            sums = np.bincount(line[own], work_ns[own])
            out.append(min(int(sums.max(initial=0)), step.end_ns - step.start_ns))
        return tuple(out)


class Check(NamedTuple):
    """A point where a thread waited, or might have waited."""

    at_ns: int
    since_ns: int
    via: int
    target: int
    thread: int


def replay(plan: Plan, durations: Durations) -> Replay:
    run = _Run(plan, durations)
    run.go()
    if plan.pace_ns is not None:
        total_ns = max(run.device_ns(), run.host_ns())
        steps_ns = shared_out(total_ns, len(plan.steps))
        return Replay(steps_ns=steps_ns, limits_ns=run.limits(total_ns))
    times = run.step_times()
    least = plan.busiest_ns(durations.work_ns)
    limits = run.limits(times[-1]) if times[-1] >= least[-1] else {"device": least[-1]}
    return Replay(steps_ns=tuple(max(pair) for pair in zip(times, least, strict=True)), limits_ns=limits)


class _Run:
    def __init__(self, plan: Plan, durations: Durations) -> None:
        self.plan, self.graph = plan, plan.graph
        self.lengths: list[int] = durations.work_ns.tolist()
        self.launch_lag, self.before_lag, self.awaited_lag = plan.no_lags if durations.no_delays else plan.own_lags
        self.times = {
            thread: ThreadTime(line, plan.start_ns, plan.end_ns, durations.pieces_ns.get(thread))
            for thread, line in plan.graph.lines.items()
        }
        self.start_ns = plan.graph.start_ns.copy()
        self.end_ns = plan.graph.end_ns.copy()
        self.launched_ns = plan.graph.launched_ns.copy()
        self.due: dict[int, int] = {}
        """By work item: what its start depends on now (``Via``)."""
        self.base_ns = dict.fromkeys(self.times, plan.start_ns)
        """By thread: the new instant from which it continues undisturbed."""
        self.passed = dict.fromkeys(self.times, 0)
        """By thread: how much of the thread's time had passed by then."""
        self.left: dict[int, list[Check]] = {thread: [] for thread in self.times}
        """By thread: where it has to wait now."""
        self.bounds_ns = list(plan.bounds)

    def go(self) -> None:
        plan, count = self.plan, len(self.start_ns)
        launch_passed = dict(
            zip(
                plan.launched_works.tolist(),
                self._passed(plan.thread[plan.launched_works], plan.launched[plan.launched_works]),
                strict=True,
            )
        )
        threads = np.array([check.thread for check in plan.checks], np.int64)
        since = np.array([check.since_ns for check in plan.checks], np.int64)
        at = np.array([check.at_ns for check in plan.checks], np.int64)
        others = np.array([check.target if check.via == Via.THREAD else -1 for check in plan.checks], np.int64)
        since_passed, at_passed = self._passed(threads, since), self._passed(threads, at)
        other_passed = self._passed(others, at)
        launch_threads = plan.threads
        bounds_from = 2 * count + len(plan.checks)
        # Local names, and no function call per work item: a replay spends all its time here.
        base_ns, passed, launched_ns = self.base_ns, self.passed, self.launched_ns
        start_ns, end_ns, lengths, due = self.start_ns, self.end_ns, self.lengths, self.due
        before, awaited = self.graph.before, self.graph.awaited
        launch_lag, before_lag, awaited_lag = self.launch_lag, self.before_lag, self.awaited_lag
        for each in plan.order:
            if each < count:
                thread = launch_threads[each]
                launched_ns[each] = base_ns[thread] + launch_passed[each] - passed[thread]
            elif each < 2 * count:
                work = each - count
                at_ns, via = (launched_ns[work] + launch_lag[work], LAUNCH) if launch_threads[work] >= 0 else (NEVER, 0)
                other = before[work]
                if other >= 0 and end_ns[other] + before_lag[work] >= at_ns:
                    at_ns, via = end_ns[other] + before_lag[work], STREAM
                other = awaited[work]
                if other >= 0 and end_ns[other] + awaited_lag[work] > at_ns:
                    at_ns, via = end_ns[other] + awaited_lag[work], EVENT
                if via:
                    start_ns[work], due[work] = at_ns, via
                end_ns[work] = start_ns[work] + lengths[work]
            elif each < bounds_from:
                index = each - 2 * count
                self._check(plan.checks[index], since_passed[index], at_passed[index], other_passed[index])
            else:
                self._bound(each - bounds_from)

    def _passed(self, threads: Ints, instants: Ints) -> list[int]:
        """Return how much of each thread's new time has passed at an old instant, [n]."""
        out = np.zeros(len(threads), np.int64)
        for thread in np.unique(threads[threads >= 0]).tolist():
            own = np.flatnonzero(threads == thread)
            out[own] = self.times[thread].at(instants[own])
        return out.tolist()  # type: ignore[no-any-return]

    def _check(self, check: Check, since_passed: int, at_passed: int, other_passed: int) -> None:
        thread, target = check.thread, check.target
        arrived_ns = self.base_ns[thread] + max(since_passed - self.passed[thread], 0)
        if check.via == Via.THREAD:
            there_ns = self.base_ns[target] + other_passed - self.passed[target]
        elif check.via == Via.START:
            there_ns = self.start_ns[target] + min(check.at_ns - self.graph.start_ns[target], 0)
        else:
            there_ns = self.end_ns[target] + min(check.at_ns - self.graph.end_ns[target], 0)
        if there_ns > arrived_ns:
            self.left[thread].append(check)
        self.base_ns[thread], self.passed[thread] = max(arrived_ns, there_ns), at_passed

    def _bound(self, index: int) -> None:
        """Place the start or end of a step, on its own thread."""
        step, thread = index // 2, self.graph.main[self.plan.first + index // 2]
        at_ns = self.plan.bounds[index]
        if index % 2 and self._ends_with_work(step):
            at_ns = max(self.end_ns)
        elif thread >= 0:
            at_ns = self.base_ns[thread] + self._passed_at(thread, at_ns) - self.passed[thread]
        self.bounds_ns[index] = at_ns

    def _passed_at(self, thread: int, at_ns: int) -> int:
        return int(self.times[thread].at(np.array([at_ns]))[0])

    def _ends_with_work(self, step: int) -> bool:
        """Test whether the whole trace is one step and the device finishes last."""
        return (
            not self.plan.steps[step].name and max(self.graph.end_ns, default=NEVER) >= self.plan.bounds[2 * step + 1]
        )

    def step_times(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in zip(self.bounds_ns[::2], self.bounds_ns[1::2], strict=True))

    def device_ns(self) -> int:
        """Return the time from the first start to the last end of what the steps launched."""
        own = np.flatnonzero(self.plan.own).tolist()
        return max(map(self.end_ns.__getitem__, own)) - min(map(self.start_ns.__getitem__, own))

    def host_ns(self) -> int:
        return self.bounds_ns[-1] - self.bounds_ns[0]

    def limits(self, left_ns: int) -> dict[str, int]:
        """Walk back from the end along what caused delays in this replay; sum by name, longest first."""
        step = len(self.plan.steps) - 1
        thread, work, at_ns = self.graph.main[self.plan.last], -1, self.plan.steps[-1].end_ns
        if self._ends_with_work(step):
            work = max(range(len(self.end_ns)), key=self.end_ns.__getitem__)
        if self.plan.pace_ns is not None and left_ns > self.host_ns():
            work = max(np.flatnonzero(self.plan.own).tolist(), key=self.end_ns.__getitem__)
        sums: dict[str, int] = {}
        gone = {key: len(checks) for key, checks in self.left.items()}
        while left_ns > 0 and (work >= 0 or thread >= 0):
            if work >= 0:
                name, took_ns = self.graph.window.trace.name(int(self.graph.row[work])), self.lengths[work]
                left_ns = _put(sums, name, took_ns, left_ns)
                thread, work, at_ns, delay_ns = self._before(work)
                left_ns = _put(sums, "delay", delay_ns, left_ns)
                continue
            checks = self.left[thread]
            gone[thread] = min(gone[thread], bisect_right(checks, at_ns, key=lambda check: check.at_ns))
            passed = self._passed_at(thread, at_ns)
            if not gone[thread]:
                _put(sums, "host", passed, left_ns)
                break
            gone[thread] -= 1
            check = checks[gone[thread]]
            left_ns = _put(sums, "host", passed - self._passed_at(thread, check.at_ns), left_ns)
            at_ns = check.at_ns
            if check.via == Via.THREAD:
                thread = check.target
            elif check.via == Via.END:
                work = check.target
            else:
                thread, work, at_ns, delay_ns = self._before(check.target)
                left_ns = _put(sums, "delay", delay_ns, left_ns)
        return dict(sorted(((name, ns) for name, ns in sums.items() if ns), key=lambda each: -each[1]))

    def _before(self, work: int) -> tuple[int, int, int, int]:
        """Return what the start depends on: a thread, a work item, the old instant, and the delay since."""
        due = self.due.get(work, Via.NOTHING)
        if due == Via.LAUNCH:
            delay_ns = self.start_ns[work] - self.launched_ns[work]
            return int(self.plan.thread[work]), -1, self.graph.launched_ns[work], delay_ns
        if due == Via.NOTHING:
            return -1, -1, 0, 0
        before = self.graph.before if due == Via.STREAM else self.graph.awaited
        return -1, before[work], 0, max(self.start_ns[work] - self.end_ns[before[work]], 0)


def _put(sums: dict[str, int], name: str, took_ns: int, left_ns: int) -> int:
    """Add the time, limited to what is still unaccounted for; return the remainder."""
    sums[name] = sums.get(name, 0) + min(took_ns, left_ns)
    return max(left_ns - took_ns, 0)


# -- changes ----------------------------------------------------------------------------------------------------------

NAMED: Final = ("kernel", "op")
WHOLE: Final = {"comm": ("hidden", "0"), "copy": ("0",), "launch": ("0",), "host": ("0",), "loader": ("0",)}
FORMS: Final = "kernel:NAME=2x, op:NAME=2x, comm=hidden, copy=0, launch=0, host=0, loader=0, rank:3=peers"
HOST: Final = (Cause.HOST_OPERATOR, Cause.HOST_RUNTIME, Cause.HOST_PYTHON, Cause.SYNCHRONIZATION)
Shares = Sequence[tuple[str, int]]
"""Names and their time on the path, longest first."""
STANDARD: Final = {
    "comm=hidden": (Cause.COMMUNICATION,),
    "copy=0": (Cause.COPY,),
    "launch=0": (Cause.LAUNCH_DELAY, Cause.KERNEL_GAP, Cause.HOST_RUNTIME),
    "host=0": HOST,
    "loader=0": (Cause.DATA_LOADING,),
}
"""Each with the causes that it addresses."""
ON_DEVICE: Final = ("copy=0", "launch=0", "host=0")
"""Not meaningful on the host alone."""
MOST_NAMES: Final = 4
MOST_TRIED: Final = 8
LEAST_SHARE: Final = 0.01
LONGEST_NS: Final = 1 << 52
"""Several weeks: an upper limit for scaled durations."""
LEAST_VISITS: Final = 3_000
EVENTS_PER_VISIT: Final = 40
"""One visit costs a few microseconds, as does reading one event of the file."""


@dataclass(frozen=True, kw_only=True)
class Change:
    text: str
    kind: str
    """``kernel``, ``op``, ``comm``, ``copy``, ``launch``, ``host``, ``loader``, ``rank``."""
    pattern: str = ""
    rank: int = -1
    speedup: float = 0.0
    """Factor by which it is faster; 0: it takes no time."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    change: Change
    steps: tuple[int, ...]
    """Step numbers."""
    before_ns: tuple[int, ...]
    after_ns: tuple[int, ...]
    limits_ns: dict[str, int]
    """What the last step would then depend on, longest first: ``host``, ``delay``, names of kernels."""
    fits: bool = True
    """Whether the change matches anything in the trace."""

    @property
    def gain_ns(self) -> int:
        return sum(self.before_ns) - sum(self.after_ns)

    @property
    def gain_share(self) -> float:
        return self.gain_ns / sum(self.before_ns) if sum(self.before_ns) else 0.0


def parse_change(text: str) -> Change:
    what, separator, value = text.strip().rpartition("=")
    kind, _, name = what.partition(":")
    kind = kind.strip().lower()
    value = value.strip().lower()
    if not separator:
        raise TraceError(f"what-if {text!r} is not a change; use one of: {FORMS}")
    if kind == "rank":
        if not re.fullmatch(r"\d+", name.strip()) or value != "peers":
            raise TraceError(f"what-if {text!r}: a rank can only be set to peers: rank:3=peers")
        return Change(text=text.strip(), kind=kind, rank=int(name))
    if kind in WHOLE:
        if name or value not in WHOLE[kind]:
            raise TraceError(f"what-if {text!r}: the only valid form is {kind}={WHOLE[kind][0]}")
        return Change(text=text.strip(), kind=kind)
    if kind not in NAMED:
        raise TraceError(f"what-if {text!r}: {kind or 'nothing'} cannot be changed; use one of: {FORMS}")
    if not name.strip():
        raise TraceError(f"what-if {text!r} names no {'kernel' if kind == 'kernel' else 'operator'}: {kind}:NAME=2x")
    speedup = re.fullmatch(r"(\d+(?:\.\d+)?)\s*[x×]?", value)
    if not speedup or (value != "0" and float(speedup.group(1)) == 0):
        raise TraceError(f"what-if {text!r}: {value!r} is neither 0 nor a factor such as 2x or 1.5x")
    return Change(text=text.strip(), kind=kind, pattern=name.strip(), speedup=float(speedup.group(1)))


def what_if(graph: Graph, change: Change, first: int = 0, last: int | None = None) -> WhatIf:
    """Replay the steps from ``first`` to ``last`` with a change."""
    last = len(graph.window.steps) - 1 if last is None else last
    return _tried(Plan(graph, first, last), change, warm_up=0)


def what_ifs(graph: Graph, causes_ns: dict[str, int], kernels: Shares, operators: Shares) -> tuple[WhatIf, ...]:
    """Try changes that may be worthwhile on a step of median length; return those that gain, best first.

    The arguments describe the steps' critical path: its time by cause, by kernel and by operator. The number of changes
    tried, most promising first, is limited so that they cost little compared with reading the trace.
    """
    steps = graph.window.steps
    candidates = _candidates(graph, causes_ns, kernels, operators)
    if not steps or not candidates:
        return ()
    by_length = sorted(range(len(steps)), key=lambda index: steps[index].end_ns - steps[index].start_ns)
    step = by_length[len(steps) // 2]
    starts = graph.columns.start_ns
    budget = max(LEAST_VISITS, graph.window.trace.meta.read_events // EVENTS_PER_VISIT)
    for first in (max(step - 1, 0), step):
        # Start with the previous step: what it left running is changed, too.
        inside = (starts >= steps[first].start_ns) & (starts < steps[step].end_ns)
        visits = int((inside | launched_in_steps(graph.window, first, step)[graph.row]).sum()) + 1
        if visits * len(candidates) <= budget:
            break
    plan = Plan(graph, first, step)
    tried = [_tried(plan, change, warm_up=step - first) for change in candidates[: min(budget // visits, MOST_TRIED)]]
    return tuple(sorted((each for each in tried if each.gain_ns > 0), key=lambda each: -each.gain_ns))


def _candidates(graph: Graph, causes_ns: dict[str, int], kernels: Shares, operators: Shares) -> list[Change]:
    """List changes that address a noticeable part of the path, the largest first."""
    on_device = bool((graph.window.trace.slices.device[graph.row] >= 0).any())
    found = [
        (sum(causes_ns.get(cause.name.lower(), 0) for cause in causes), parse_change(text))
        for text, causes in STANDARD.items()
        if on_device or text not in ON_DEVICE
    ]
    found += [(ns, _twice("kernel", name)) for name, ns in kernels[:MOST_NAMES] if name]
    found += [(ns, _twice("op", name)) for name, ns in operators[:MOST_NAMES] if name]
    least = sum(causes_ns.values()) * LEAST_SHARE
    return [change for ns, change in sorted(found, key=lambda each: -each[0]) if ns > least]


def what_if_table(tried: Iterable[WhatIf], more: str = "", *, title: str) -> Table:
    """Build the table; ``more`` is appended to the note."""
    tried = list(tried)
    remarks = not all(each.fits for each in tried)
    rows = [
        (
            each.change.text,
            sum(each.before_ns) // len(each.before_ns),
            sum(each.after_ns) // len(each.after_ns),
            each.gain_share,
            next(iter(each.limits_ns), ""),
            *(["" if each.fits else "matches nothing"] * remarks),
        )
        for each in tried
    ]
    note = "Step times from a replay of the trace's dependencies; then_mostly: the main cause after the change."
    note = f"{note}  {more}" if more else note
    columns = ("change", "before_ns", "after_ns", "gain_share", "then_mostly", *(["remark"] * remarks))
    return table_of("what_if", title, columns, rows, limit=100, note=note)


def _twice(kind: str, name: str) -> Change:
    return Change(text=f"{kind}:{name}=2x", kind=kind, pattern=name, speedup=2.0)


def _tried(plan: Plan, change: Change, warm_up: int) -> WhatIf:
    """Replay one change; the first ``warm_up`` steps do not count."""
    durations = _durations(plan, change)
    replayed = replay(plan, durations)
    steps = plan.steps[warm_up:]
    lengths = tuple(step.end_ns - step.start_ns for step in plan.steps)
    if plan.pace_ns is not None:
        lengths = shared_out(plan.pace_ns[1] - plan.pace_ns[0], len(lengths))
    return WhatIf(
        change=change,
        steps=tuple(step.number for step in steps),
        before_ns=lengths[warm_up:],
        after_ns=replayed.steps_ns[warm_up:],
        limits_ns=dict(list(replayed.limits_ns.items())[:8]),
        fits=durations.fits,
    )


def _durations(plan: Plan, change: Change) -> Durations:
    graph, slices = plan.graph, plan.graph.window.trace.slices
    kind = slices.kind[graph.row]
    none = np.zeros(len(graph.row), bool)
    if change.kind == "rank":
        raise TraceError(f"what-if {change.text!r} needs the traces of several ranks")
    if change.kind == "kernel":
        fits = _fitting(graph, change.pattern)[slices.name[graph.row]] & (slices.device[graph.row] >= 0)
        return _changed(graph, change, fits, {})
    if change.kind == "op":
        return _operator(plan, change)
    if change.kind == "comm":
        return _changed(graph, change, graph.columns.collective, {})
    if change.kind == "copy":
        return _changed(graph, change, np.isin(kind, (Kind.MEMCPY, Kind.MEMSET)), {})
    causes = graph.causes
    if change.kind == "loader":
        return _changed(graph, change, none, {t: cause == Cause.DATA_LOADING for t, cause in causes.items()})
    if change.kind == "host":
        return _changed(graph, change, none, {t: np.isin(cause, HOST) for t, cause in causes.items()}, no_delays=True)
    launching = np.zeros(len(slices) + 1, bool)
    launching[graph.call] = True
    launching[-1] = False
    calls = {thread: launching[line.row] for thread, line in graph.lines.items()}
    return _changed(graph, change, none, calls, no_delays=True)


def _operator(plan: Plan, change: Change) -> Durations:
    graph, slices = plan.graph, plan.graph.window.trace.slices
    rows = graph.window.rows_of((Kind.OP, Kind.ANNOTATION))
    rows = rows[_fitting(graph, change.pattern)[slices.name[rows]]]
    works = np.zeros(len(graph.row), bool)
    pieces = {}
    for thread, line in graph.lines.items():
        own = rows[slices.thread[rows] == thread]
        spans = intervals.merge(slices.start_ns[own], slices.end_ns[own])
        # The replay uses these pieces only; most of a long trace is not in it.
        first, last = line.at(np.array([plan.start_ns, plan.end_ns])).tolist()
        pieces[thread] = np.zeros(len(line.row), bool)
        pieces[thread][first : last + 1] = intervals.holds(spans, line.start_ns[first : last + 1])
        launched_works = np.flatnonzero((graph.call >= 0) & (slices.thread[graph.call] == thread))
        works[launched_works] = intervals.holds(spans, slices.start_ns[graph.call[launched_works]])
    return _changed(graph, change, works, pieces)


def _changed(
    graph: Graph,
    change: Change,
    works: NDArray[np.bool_],
    pieces: dict[int, NDArray[np.bool_]],
    *,
    no_delays: bool = False,
) -> Durations:
    factor = 1 / change.speedup if change.speedup else 0.0

    def scaled(was: Ints, which: NDArray[np.bool_]) -> Ints:
        # The pieces before the first slice and after the last are endless and cannot be scaled.
        out: Ints = was.copy()
        out[which] = np.rint(np.minimum(was[which] * factor, LONGEST_NS)).astype(np.int64)
        return out

    pieces_ns = {
        thread: scaled(graph.lines[thread].ends_ns - graph.lines[thread].start_ns, which)
        for thread, which in pieces.items()
    }
    fits = no_delays or bool(works.any()) or any(bool(which.any()) for which in pieces.values())
    return Durations(work_ns=scaled(graph.work_ns, works), pieces_ns=pieces_ns, no_delays=no_delays, fits=fits)


def _fitting(graph: Graph, pattern: str) -> NDArray[np.bool_]:
    """Match names with * and ? only, as kernel names contain brackets; [strings]."""
    regex = re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)
    return graph.window.trace.names_where(regex.fullmatch)

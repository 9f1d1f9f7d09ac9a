"""What if? One rank's steps with something faster, hidden or gone, run again (``replay``).

A change, as people write it:

    kernel:NAME=2x       kernels (copies, memsets) whose name fits take half the time; * and ? stand for anything
    op:NAME=2x           operators and annotations whose name fits, with all that is inside of them and launched by them
    comm=hidden          collectives take no time: nothing waits for them; comm=0 is the same
    copy=0               copies and memsets take no time
    launch=0             launch calls, launch delays and gaps between kernels take no time: CUDA graphs, at best
    host=0               the host takes no time but for loading data: what the device alone needs
    loader=0             the DataLoader has its data ready
    rank:3=peers         rank 3 comes to each collective as its peers do; needs several ranks (``job_path``)

``NAME=0`` instead of a factor: it takes no time.  Every change is to durations; what must wait for what stays, so that
another path may become critical: the gain is what the model has left of it, not the part of the path that is gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.errors import TraceError
from stepscope.traces.device.pace import launched_in_steps, shared_out
from stepscope.traces.model import intervals
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Ints
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.path.causes import Cause
from stepscope.traces.path.graph import Graph
from stepscope.traces.path.replay import Durations, Plan, replay

__all__ = ["Change", "WhatIf", "parse_change", "what_if", "what_if_table", "what_ifs"]

NAMED: Final = ("kernel", "op")
WHOLE: Final = {"comm": ("hidden", "0"), "copy": ("0",), "launch": ("0",), "host": ("0",), "loader": ("0",)}
FORMS: Final = "kernel:NAME=2x, op:NAME=2x, comm=hidden, copy=0, launch=0, host=0, loader=0, rank:3=peers"
HOST: Final = (Cause.HOST_OPERATOR, Cause.HOST_RUNTIME, Cause.HOST_PYTHON, Cause.SYNCHRONISATION)
Shares = Sequence[tuple[str, int]]
"""Names and their time on the path, most first."""
STANDARD: Final = {
    "comm=hidden": (Cause.COMMUNICATION,),
    "copy=0": (Cause.COPY,),
    "launch=0": (Cause.LAUNCH_DELAY, Cause.KERNEL_GAP, Cause.HOST_RUNTIME),
    "host=0": HOST,
    "loader=0": (Cause.DATA_LOADING,),
}
"""With the causes that they are about."""
ON_DEVICE: Final = ("copy=0", "launch=0", "host=0")
"""On the host alone these mean nothing."""
MOST_NAMES: Final = 4
MOST_TRIED: Final = 8
LEAST_SHARE: Final = 0.01
LONGEST_NS: Final = 1 << 52
"""Some weeks: what no factor makes longer."""
LEAST_VISITS: Final = 3_000
EVENTS_PER_VISIT: Final = 40
"""One visit costs some microseconds, one event of the file some to be read."""


@dataclass(frozen=True, kw_only=True)
class Change:
    text: str
    kind: str
    """``kernel``, ``op``, ``comm``, ``copy``, ``launch``, ``host``, ``loader``, ``rank``."""
    pattern: str = ""
    rank: int = -1
    speedup: float = 0.0
    """How many times faster; 0: it takes no time."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    change: Change
    steps: tuple[int, ...]
    """Their numbers."""
    before_ns: tuple[int, ...]
    after_ns: tuple[int, ...]
    limits_ns: dict[str, int]
    """What the last step would then be due to, most first: ``host``, ``delay``, names of kernels."""
    fits: bool = True
    """There is something in the trace that it changes."""

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
        raise TraceError(f"what-if {text!r} says no change; it is one of: {FORMS}")
    if kind == "rank":
        if not re.fullmatch(r"\d+", name.strip()) or value != "peers":
            raise TraceError(f"what-if {text!r}: a rank can only be like its peers: rank:3=peers")
        return Change(text=text.strip(), kind=kind, rank=int(name))
    if kind in WHOLE:
        if name or value not in WHOLE[kind]:
            raise TraceError(f"what-if {text!r}: {kind} can only be {kind}={WHOLE[kind][0]}")
        return Change(text=text.strip(), kind=kind)
    if kind not in NAMED:
        raise TraceError(f"what-if {text!r}: {kind or 'nothing'} cannot be changed; it is one of: {FORMS}")
    if not name.strip():
        raise TraceError(f"what-if {text!r} names no {'kernel' if kind == 'kernel' else 'operator'}: {kind}:NAME=2x")
    speedup = re.fullmatch(r"(\d+(?:\.\d+)?)\s*[x×]?", value)
    if not speedup or (value != "0" and float(speedup.group(1)) == 0):
        raise TraceError(f"what-if {text!r}: {value!r} is no factor such as 2x or 1.5x, nor 0")
    return Change(text=text.strip(), kind=kind, pattern=name.strip(), speedup=float(speedup.group(1)))


def what_if(graph: Graph, change: Change, first: int = 0, last: int | None = None) -> WhatIf:
    """Over the steps from ``first`` to ``last``."""
    last = len(graph.window.steps) - 1 if last is None else last
    return _tried(Plan(graph, first, last), change, warm_up=0)


def what_ifs(graph: Graph, causes_ns: dict[str, int], kernels: Shares, operators: Shares) -> tuple[WhatIf, ...]:
    """Changes that may be worth a thought, on a step of median length; those that gain, most first.

    All is of the steps' critical path: its time by cause, by kernel and by operator.  As many changes are tried, the
    most promising first, as cost little next to reading the trace.
    """
    steps = graph.window.steps
    candidates = _candidates(graph, causes_ns, kernels, operators)
    if not steps or not candidates:
        return ()
    by_length = sorted(range(len(steps)), key=lambda index: steps[index].end_ns - steps[index].start_ns)
    step = by_length[len(steps) // 2]
    starts = graph.work_ends_ns - graph.work_ns
    budget = max(LEAST_VISITS, graph.window.trace.meta.read_events // EVENTS_PER_VISIT)
    for first in (max(step - 1, 0), step):
        # The step before leads in: what it left running is changed, too.
        inside = (starts >= steps[first].start_ns) & (starts < steps[step].end_ns)
        visits = int((inside | launched_in_steps(graph.window, first, step)[graph.row]).sum()) + 1
        if visits * len(candidates) <= budget:
            break
    plan = Plan(graph, first, step)
    tried = [_tried(plan, change, warm_up=step - first) for change in candidates[: min(budget // visits, MOST_TRIED)]]
    return tuple(sorted((each for each in tried if each.gain_ns > 0), key=lambda each: -each.gain_ns))


def _candidates(graph: Graph, causes_ns: dict[str, int], kernels: Shares, operators: Shares) -> list[Change]:
    """What has a noticeable part of the path, most first."""
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


def what_if_table(tried: Iterable[WhatIf], more: str = "") -> Table:
    """``more``: to be added to the note."""
    tried = list(tried)
    remarks = not all(each.fits for each in tried)
    rows = [
        (
            each.change.text,
            sum(each.before_ns) // len(each.before_ns),
            sum(each.after_ns) // len(each.after_ns),
            each.gain_share,
            next(iter(each.limits_ns), ""),
            *(["" if each.fits else "fits nothing here"] * remarks),
        )
        for each in tried
    ]
    note = "Step times of a replay of the trace's dependencies; then_mostly: what the step would be due to."
    note = f"{note}  {more}" if more else note
    columns = ("change", "before_ns", "after_ns", "gain_share", "then_mostly", *(["remark"] * remarks))
    return table_of("what_if", "What if", columns, rows, limit=100, note=note)


def _twice(kind: str, name: str) -> Change:
    return Change(text=f"{kind}:{name}=2x", kind=kind, pattern=name, speedup=2.0)


def _tried(plan: Plan, change: Change, warm_up: int) -> WhatIf:
    """``warm_up``: steps that only lead in and do not count."""
    durations = _durations(plan, change)
    again = replay(plan, durations)
    steps = plan.steps[warm_up:]
    lengths = tuple(step.end_ns - step.start_ns for step in plan.steps)
    if plan.pace_ns is not None:
        lengths = shared_out(plan.pace_ns[1] - plan.pace_ns[0], len(lengths))
    return WhatIf(
        change=change,
        steps=tuple(step.number for step in steps),
        before_ns=lengths[warm_up:],
        after_ns=again.steps_ns[warm_up:],
        limits_ns=dict(list(again.limits_ns.items())[:8]),
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
        return _changed(graph, change, np.array(graph.collective, bool), {})
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
        # The replay asks for these pieces only: most of a long trace is not in it.
        first, last = line.at(np.array([plan.start_ns, plan.end_ns])).tolist()
        pieces[thread] = np.zeros(len(line.row), bool)
        pieces[thread][first : last + 1] = intervals.holds(spans, line.start_ns[first : last + 1])
        asked = np.flatnonzero((graph.call >= 0) & (slices.thread[graph.call] == thread))
        works[asked] = intervals.holds(spans, slices.start_ns[graph.call[asked]])
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
        # The pieces before the first slice and after the last are without end: no factor may be put to them.
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
    """[strings]; with * and ? only: kernels have brackets in their names."""
    regex = re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)
    return graph.window.trace.names_where(regex.fullmatch)

"""One step of a few ranks as lanes of events: the timeline on the page.

*Which step*: of the steps that the first finding covers, one of median length. *Which ranks*: the first that each
finding names, then the one whose step ends last, then the others; at most ``MOST_RANKS``. The interval is the step of
the first of these ranks on the host or, if its device sets the pace, the time of the work that the step launched.
Everything that the ranks did in this interval is shown, on aligned clocks; ranks whose clocks cannot be aligned are
left out.

*Lanes* of a rank: the critical path (first rank only), matched collectives (when it waited for which rank), host
threads, with nested calls on *levels*, and streams of the device. There are at most ``MOST_EVENTS`` events. If there
are more, neighbors shorter than the resolution are merged into one that counts them; the resolution is the finest at
which all fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepscope.records.text import count_text, ns_text, printable
from stepscope.traces.device.figures import launched_in_steps
from stepscope.traces.exports import collective_bars
from stepscope.traces.job import JobAnalysis
from stepscope.traces.model.columns import DEVICE_WORK, Ints, Kind, Rows, Trace
from stepscope.traces.model.kernel_names import fitted, is_communication, short_name
from stepscope.traces.model.window import LABEL, Step, Window, is_user_frame, window_of
from stepscope.traces.path.graph import CAUSES, graph_of
from stepscope.traces.path.rank_path import whole_segments
from stepscope.traces.path.walk import Segments, routes_of, walk_step
from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["CAUSE_COLORS", "Lane", "Timeline", "chosen_ranks", "timeline_of"]

MOST_RANKS: Final = 3
MOST_EVENTS: Final = 20_000
MOST_THREADS: Final = 4
MOST_STREAMS: Final = 6
MOST_LEVELS: Final = 8
"""Deeper calls are left out."""
MOST_CALLS: Final = 60_000
"""Calls of a thread whose nesting is worked out; if there are more, only the longest."""
LONGEST_NAME: Final = 160
FINEST: Final = 1 << 16
"""The first resolution tried, as a part of the interval."""
BLOCK: Final = 4
"""Longest merged event, in units of the resolution."""

LOOKS: Final = {
    "op": "operator",
    "annotation": "annotation",
    "python": "Python",
    "runtime": "runtime call",
    "compute": "kernel",
    "comm": "communication",
    "copy": "copy or memset",
    "wait": "waiting for another rank",
    "launch": "launch delay or gap",
    "input": "waiting for data",
    "host": "other work of the host",
}
OF_KIND: Final = {
    Kind.OP: "op",
    Kind.ANNOTATION: "annotation",
    Kind.PYTHON: "python",
    Kind.RUNTIME: "runtime",
    Kind.KERNEL: "compute",
    Kind.MEMCPY: "copy",
    Kind.MEMSET: "copy",
}
CAUSE_COLORS: Final = {
    "compute": "compute",
    "communication": "comm",
    "copy": "copy",
    "launch_delay": "launch",
    "kernel_gap": "launch",
    "synchronization": "runtime",
    "host_runtime": "runtime",
    "host_operator": "op",
    "data_loading": "input",
}
"""Of a cause on the critical path; all others are on the host."""
CODES: Final = {look: code for code, look in enumerate(LOOKS)}
LOOK_OF_KIND: Final = np.zeros(256, np.int8)
LOOK_OF_KIND[list(OF_KIND)] = [CODES[look] for look in OF_KIND.values()]
LOOK_OF_CAUSE: Final = np.array([CODES[CAUSE_COLORS.get(cause, "host")] for cause in CAUSES], np.int8)
HOST: Final = (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME)
NO_ROWS: Rows = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Events by level and start; those of one level do not overlap, except on a stream that runs kernels at once."""

    rank: int
    name: str
    kind: str
    """``path``, ``collectives``, ``host``, ``compute``, ``comm`` or ``copy``."""
    start_ns: Ints
    """From the start of the interval; may be negative."""
    dur_ns: Ints
    label: NDArray[np.int64]
    """Index into the names; −1: several events."""
    look: NDArray[np.int8]
    """Index into ``LOOKS``."""
    level: NDArray[np.int64]
    count: NDArray[np.int64]
    """How many events it represents."""

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    about: str
    note: str
    length_ns: int
    names: tuple[str, ...]
    marks: tuple[tuple[int, str], ...]
    """Starts of steps of the first rank, from the start of the interval."""
    lanes: tuple[Lane, ...]

    def to_dict(self) -> dict[str, Any]:
        """The form on the page: ``start`` has differences between neighbors, which compress well."""
        return {
            "title": "Timeline",
            "about": self.about,
            "note": self.note,
            "length_ns": self.length_ns,
            "looks": [[look, name] for look, name in LOOKS.items()],
            "names": list(self.names),
            "marks": [list(mark) for mark in self.marks],
            "lanes": [
                {
                    "rank": lane.rank,
                    "name": lane.name,
                    "kind": lane.kind,
                    "start": np.diff(lane.start_ns, prepend=0).tolist(),
                    "dur": lane.dur_ns.tolist(),
                    "label": lane.label.tolist(),
                    "look": lane.look.tolist(),
                    "level": lane.level.tolist(),
                    "count": lane.count.tolist(),
                }
                for lane in self.lanes
            ],
        }


def chosen_ranks(job: JobAnalysis) -> list[int]:
    """The ranks to show, the most interesting first."""
    known = [analysis.rank for analysis in job.ranks]
    named = [rank for finding in job.findings for rank in finding.ranks[:1]]
    latest = [step.rank for step in job.path.steps if step.number == _typical_step(job, None)]
    order = list(dict.fromkeys(rank for rank in [*named, *latest, *known] if rank in known))
    apart = set(job.clocks.unaligned)
    if order and order[0] in apart:
        return order[:1]
    return [rank for rank in order if rank not in apart][:MOST_RANKS]


def timeline_of(job: JobAnalysis, traces: Iterable[tuple[int, Trace]], *, keep_last: bool) -> Timeline | None:
    """Build the timeline of ``chosen_ranks``, whose traces may be read lazily; None if the first has no events."""
    analyses = {analysis.rank: analysis for analysis in job.ranks}
    names = _Names()
    lanes: list[Lane] = []
    hidden = 0
    begin_ns = end_ns = 0
    about, marks = "", []
    for rank, trace in traces:
        ahead_ns = trace.meta.origin_ns - job.clocks.shifts.get(rank, 0) - job.clocks.zero_ns
        if not about:
            window = window_of(trace, keep_last=keep_last, only=job.step_numbers(rank))
            number = _typical_step(job, analyses[rank])
            index = next((at for at, step in enumerate(window.steps) if step.number == number), None)
            if index is None:
                return None
            by_device = analyses[rank].pace.by_device
            begin_ns, end_ns = (ns + ahead_ns for ns in _interval(window, index, by_device=by_device))
            about = _about(rank, window.steps[index], by_device=by_device, several=len(window.steps) > 1)
            marks = [(step.start_ns + ahead_ns - begin_ns, f"step {step.number}") for step in window.steps if step.name]
            lanes.append(_path_lane(rank, window, index, by_device=by_device, names=names))
            lanes[-1] = _inside(lanes[-1], begin_ns - ahead_ns, end_ns - ahead_ns)
        lanes.append(_collectives_lane(job, rank, trace.meta.origin_ns, begin_ns - ahead_ns, end_ns - ahead_ns, names))
        found, left_out = _lanes(trace, rank, begin_ns - ahead_ns, end_ns - ahead_ns, names)
        lanes += found
        hidden += left_out
    lanes = [lane for lane in lanes if len(lane)]
    if not lanes:
        return None
    lanes, finest_ns = _reduced(lanes, end_ns - begin_ns)
    notes = [f"Neighbors shorter than {ns_text(finest_ns)} are drawn as one."] if finest_ns else []
    notes += [f"{count_text(hidden, 'less busy lane')} left out."] if hidden else []
    return Timeline(
        about=about,
        note=" ".join(notes),
        length_ns=end_ns - begin_ns,
        names=tuple(names.texts),
        marks=tuple((at_ns, name) for at_ns, name in marks if 0 <= at_ns < end_ns - begin_ns),
        lanes=tuple(lanes),
    )


def _typical_step(job: JobAnalysis, analysis: RankAnalysis | None) -> int | None:
    """The number of a step of median length, of one rank or of all; None without steps."""
    if analysis is None:
        lengths = {step.number: step.length_ns for step in job.path.steps}
    else:
        lengths = {step.number: step.end_ns - step.start_ns for step in analysis.steps}
    span = job.findings[0].steps if job.findings else None
    covered = {number: ns for number, ns in lengths.items() if span is None or span[0] <= number <= span[1]} or lengths
    if not covered:
        return None
    typical_ns = median_low(covered.values())
    return next(number for number, ns in covered.items() if ns == typical_ns)


def _interval(window: Window, index: int, *, by_device: bool) -> tuple[int, int]:
    step = window.steps[index]
    if by_device:
        rows = np.flatnonzero(launched_in_steps(window, index, index))
        if len(rows):
            slices = window.trace.slices
            return int(slices.start_ns[rows].min()), int(slices.end_ns[rows].max())
    return step.start_ns, max(step.end_ns, step.start_ns + 1)


def _about(rank: int, step: Step, *, by_device: bool, several: bool) -> str:
    if not step.name:
        return f"everything that rank {rank} recorded"
    typical = ", one of median length" if several else ""
    return f"step {step.number} of rank {rank}{typical}{', while its device works on it' if by_device else ''}"


# -- lanes ------------------------------------------------------------------------------------------------------------


class _Names:
    """Distinct short names of all lanes."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._known: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = len(self.texts)
            self.texts.append(text)
        return self._known[text]

    def of(self, trace: Trace, codes: NDArray[Any]) -> NDArray[np.int64]:
        """The numbers of strings of a trace, [codes]."""
        used, inverse = np.unique(codes, return_inverse=True)
        return np.array([self.number(_short(trace, int(code))) for code in used], np.int64)[inverse]

    def of_path(self, trace: Trace, segments: Segments) -> NDArray[np.int64]:
        """The numbers of the segments' causes with what each was in, [segments]."""
        key = segments.name.astype(np.int64) * len(CAUSES) + segments.cause
        used, inverse = np.unique(key, return_inverse=True)
        numbers = []
        for code, cause in (divmod(int(each), len(CAUSES)) for each in used):
            words = CAUSES[cause].replace("_", " ")
            numbers.append(self.number(f"{words}: {_short(trace, code)}" if code >= 0 else words))
        return np.array(numbers, np.int64)[inverse]


def _short(trace: Trace, code: int) -> str:
    return fitted(printable(short_name(trace.text(code))), LONGEST_NAME)


def _lane(trace: Trace, rank: int, name: str, kind: str, rows: Rows, names: _Names) -> Lane:
    """Rows of a trace, sorted by start, on one level and on the trace's own clock."""
    slices = trace.slices
    look = LOOK_OF_KIND[slices.kind[rows]]
    if kind == "host":
        # Old profilers wrote these annotations as operators.
        labels = trace.names_where(LABEL.match)[slices.name[rows]]
        look = np.where(labels, np.int8(CODES["annotation"]), look)
    else:
        comm = trace.names_where(is_communication)[slices.name[rows]] & (slices.kind[rows] == Kind.KERNEL)
        look = np.where(comm, np.int8(CODES["comm"]), look)
    return Lane(
        rank=rank,
        name=printable(name),
        kind=kind,
        start_ns=slices.start_ns[rows],
        dur_ns=slices.dur_ns[rows],
        label=names.of(trace, slices.name[rows]),
        look=look,
        level=np.zeros(len(rows), np.int64),
        count=np.ones(len(rows), np.int64),
    )


def _lanes(trace: Trace, rank: int, begin_ns: int, end_ns: int, names: _Names) -> tuple[list[Lane], int]:
    """The lanes of one rank from the start of the interval, and how many were left out."""
    slices = trace.slices
    inside = np.flatnonzero((slices.start_ns < end_ns) & (slices.end_ns > begin_ns)).astype(np.int32)
    kind = slices.kind[inside]
    python = (kind == Kind.PYTHON) & trace.names_where(is_user_frame)[slices.name[inside]]
    # Functions around the whole interval, such as main(), would only take room.
    python &= (slices.start_ns[inside] >= begin_ns) | (slices.end_ns[inside] <= end_ns)
    threads = _threads(trace, rank, inside[np.isin(kind, HOST) | python], names)
    streams = _streams(trace, rank, inside[np.isin(kind, DEVICE_WORK)], names)
    shown = [*threads[:MOST_THREADS], *streams[:MOST_STREAMS]]
    left_out = len(threads) + len(streams) - len(shown)
    return [replace(lane, start_ns=lane.start_ns - begin_ns) for lane in shown], left_out


def _threads(trace: Trace, rank: int, rows: Rows, names: _Names) -> list[Lane]:
    """Host threads: the one with the profiler's steps first, then the busiest."""
    slices = trace.slices
    steps = trace.names_where(_is_step)
    found = []
    for every in _split(rows, slices.thread[rows]):
        own = _longest(every, slices.dur_ns[every])
        thread = trace.threads[int(slices.thread[own[0]])]
        lane = _lane(trace, rank, thread.name or f"thread {thread.tid}", "host", own, names)
        level = np.array(_levels(slices.start_ns[own].tolist(), slices.end_ns[own].tolist()), np.int64)
        busy_ns = int(lane.dur_ns[level == 0].sum())
        order = np.lexsort((lane.start_ns, level))
        lane = _take(replace(lane, level=level), order[level[order] < MOST_LEVELS])
        found.append((not steps[slices.name[own]].any(), -busy_ns, lane))
    found.sort(key=lambda each: each[:2])
    return [lane for _, _, lane in found]


def _is_step(name: str) -> bool:
    return name.startswith("ProfilerStep")


def _streams(trace: Trace, rank: int, rows: Rows, names: _Names) -> list[Lane]:
    """Streams: those that compute, communicate and copy, in this order; the busiest first."""
    slices = trace.slices
    several = len(np.unique(slices.device[rows])) > 1
    found = []
    for own in _split(rows, (slices.device[rows].astype(np.int64) << 32) + slices.stream[rows]):
        device, stream = int(slices.device[own[0]]), int(slices.stream[own[0]])
        name = f"device {device}, stream {stream}" if several else f"stream {stream}"
        lane = _lane(trace, rank, name, "compute", own, names)
        busy_ns = {kind: int(lane.dur_ns[lane.look == CODES[kind]].sum()) for kind in ("compute", "comm", "copy")}
        kind = max(busy_ns, key=lambda each: busy_ns[each])
        found.append((list(busy_ns).index(kind), -busy_ns[kind], replace(lane, kind=kind)))
    found.sort(key=lambda each: each[:2])
    return [lane for _, _, lane in found]


def _path_lane(rank: int, window: Window, index: int, *, by_device: bool, names: _Names) -> Lane:
    """The critical path of a step, or the part of the path over all steps if the device sets the pace."""
    graph = graph_of(window)
    own: Segments | None = whole_segments(graph) if by_device else None
    if own is None:
        routes, segments = routes_of(graph, [walk_step(graph, index, [])], NO_ROWS)
        own = segments.take(routes.on_path[segments.node])
    own = own.take(np.argsort(own.start_ns, kind="stable"))
    # Equal segments without a gap between them become one.
    same = (own.cause[1:] == own.cause[:-1]) & (own.name[1:] == own.name[:-1]) & (own.start_ns[1:] == own.end_ns[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~same])) if len(own) else np.empty(0, np.int64)
    last = np.append(first[1:], len(own))[: len(first)] - 1
    start_ns, end_ns, own = own.start_ns[first], own.end_ns[last], own.take(first)
    return Lane(
        rank=rank,
        name="critical path",
        kind="path",
        start_ns=start_ns,
        dur_ns=end_ns - start_ns,
        label=names.of_path(window.trace, own),
        look=LOOK_OF_CAUSE[own.cause],
        level=np.zeros(len(own), np.int64),
        count=np.ones(len(own), np.int64),
    )


def _collectives_lane(job: JobAnalysis, rank: int, origin_ns: int, begin_ns: int, end_ns: int, names: _Names) -> Lane:
    """The collectives in the interval that other ranks also have; concurrent ones are on separate levels."""
    pairs, split = job.collectives.pairs, job.collectives.split
    own = (np.array(pairs.ranks, np.int64)[pairs.rank] == rank) & split.counts[pairs.whole]
    parts = np.flatnonzero(own & (pairs.start_ns < end_ns + origin_ns) & (pairs.end_ns > begin_ns + origin_ns))
    parts = parts[np.argsort(pairs.start_ns[parts], kind="stable")]
    levels = _levels(pairs.start_ns[parts].tolist(), pairs.end_ns[parts].tolist())
    found = []
    for part, level in zip(parts.tolist(), levels, strict=True):
        *waits, transfer = collective_bars(job.collectives, part)
        found += [(level, bar, CODES["wait"]) for bar in waits] + [(level, transfer, CODES["comm"])]
    found.sort(key=lambda each: (each[0], each[1].start_ns))
    return Lane(
        rank=rank,
        name="collectives",
        kind="collectives",
        start_ns=np.array([bar.start_ns - origin_ns - begin_ns for _, bar, _ in found], np.int64),
        dur_ns=np.array([bar.end_ns - bar.start_ns for _, bar, _ in found], np.int64),
        label=np.array([names.number(bar.name) for _, bar, _ in found], np.int64),
        look=np.array([look for _, _, look in found], np.int8),
        level=np.array([level for level, _, _ in found], np.int64),
        count=np.ones(len(found), np.int64),
    )


def _inside(lane: Lane, begin_ns: int, end_ns: int) -> Lane:
    """The events in the interval, from its start."""
    chosen = np.flatnonzero((lane.start_ns < end_ns) & (lane.start_ns + lane.dur_ns > begin_ns))
    return replace(_take(lane, chosen), start_ns=lane.start_ns[chosen] - begin_ns)


def _split(rows: Rows, key: NDArray[Any]) -> list[Rows]:
    """Rows of each key, in their order."""
    if not len(rows):
        return []
    order = np.argsort(key, kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(key[order])) + 1)


def _longest(rows: Rows, dur_ns: Ints) -> Rows:
    if len(rows) <= MOST_CALLS:
        return rows
    chosen = np.argpartition(-dur_ns, MOST_CALLS)[:MOST_CALLS]
    return np.sort(rows[chosen])


def _levels(starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """How many slices, sorted by start with the longer first, are open when each begins."""
    out: list[int] = []
    open_ends: list[int] = []
    for start, end in zip(starts, ends, strict=True):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        out.append(len(open_ends))
        open_ends.append(end)
    return out


def _take(lane: Lane, which: NDArray[Any]) -> Lane:
    columns = ("start_ns", "dur_ns", "label", "look", "level", "count")
    return replace(lane, **{name: getattr(lane, name)[which] for name in columns})


# -- reduction --------------------------------------------------------------------------------------------------------


def _reduced(lanes: list[Lane], length_ns: int) -> tuple[list[Lane], int]:
    """The lanes with at most ``MOST_EVENTS`` events, and the resolution; 0: nothing was merged."""
    resolution_ns, found = 0, lanes
    while sum(map(len, found)) > MOST_EVENTS:
        resolution_ns = max(2 * resolution_ns, length_ns // FINEST, 1)
        found = [_merged(lane, resolution_ns) for lane in lanes]
    return found, resolution_ns


def _merged(lane: Lane, resolution_ns: int) -> Lane:
    """Merge neighbors that are short and close, up to a few times the resolution."""
    end_ns = lane.start_ns + lane.dur_ns
    short = lane.dur_ns < resolution_ns
    block = lane.start_ns // (BLOCK * resolution_ns)
    joined = short[1:] & short[:-1] & (lane.level[1:] == lane.level[:-1]) & (block[1:] == block[:-1])
    joined &= lane.start_ns[1:] - end_ns[:-1] < resolution_ns
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    count = np.add.reduceat(lane.count, first)
    chosen = _take(lane, first)
    return replace(
        chosen,
        dur_ns=np.maximum.reduceat(end_ns, first) - chosen.start_ns,
        label=np.where(count > 1, -1, chosen.label),
        count=count,
    )

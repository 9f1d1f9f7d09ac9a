"""The critical path of each step of one rank: what determined its length.

The step is the profiler's, from its start to its end on the host. The path is walked back from the end (``walk.py``).
Its segments are disjoint, cover every instant, and add up to exactly the length of the step. Each has one *cause*:

    compute, communication, copy      a kernel, a collective, a copy or memset
    launch_delay                      from a launch to the start of the launched work, if nothing else delayed it
    kernel_gap                        between the end of one work item and the start of the next that waited for it
    synchronization                   inside a synchronizing call, after what it waited for had ended
    host_operator, host_runtime       an operator's own time; calls of the device's runtime
    data_loading                      inside the DataLoader's ``__next__``
    host_python                       everything else on the host: Python, and gaps between slices
    other                             no thread is known

If the device sets the pace (``Pace``), the steps of a host that is far ahead say little. In that case there is one path
over all steps, the *whole*: from the end of the last work that the steps launched back to the start of the first. Its
length matches the pace. Tables and what-ifs then describe this path.

``routes`` is the input for a path over several ranks: how this rank reached each of its collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from stepscope.traces.collective_calls import Exchanges
from stepscope.traces.device.figures import device_time, launched_in_steps
from stepscope.traces.model.tables import Table, table_of
from stepscope.traces.model.window import Window
from stepscope.traces.path.graph import CAUSES, Cause, Graph, graph_of
from stepscope.traces.path.walk import Routes, Segments, StepWalk, routes_of, summed, walk_back, walk_step
from stepscope.traces.path.whatif import WhatIf, what_if_table, what_ifs

__all__ = ["NamedTime", "RankPath", "StepPath", "WholePath", "path_segments", "rank_path", "whole_segments"]

NO_ROWS = np.empty(0, np.int32)
NAMES = 200
"""Limit of operators and kernels kept."""
CAUSE_COLUMNS = ("cause", "time_ns", "time_share", "mean_step_ns", "max_step_ns", "segments")
OF_ALL = ", of the device's pace"
WHOLE_NOTE = (
    "The device runs behind the host, so host steps do not show the pace: all steps together, from the start of the "
    "first work they launched to the end of the last."
)
DEVICE = (Cause.COMPUTE, Cause.COMMUNICATION, Cause.COPY, Cause.LAUNCH_DELAY, Cause.KERNEL_GAP)


@dataclass(frozen=True, kw_only=True)
class StepPath:
    number: int
    """The profiler's number."""
    length_ns: int
    """Length of the step, and the sum of ``causes``."""
    causes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class NamedTime:
    name: str
    cause: str
    time_ns: int
    count: int
    """Number of segments."""


@dataclass(frozen=True, kw_only=True)
class WholePath:
    """The path over all steps together, if the device sets the pace; times are the file's."""

    start_ns: int
    end_ns: int
    causes: dict[str, int]
    """Longest first; they add up to the length."""
    operators: tuple[NamedTime, ...]
    kernels: tuple[NamedTime, ...]

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, kw_only=True)
class RankPath:
    steps: tuple[StepPath, ...]
    operators: tuple[NamedTime, ...]
    """Longest first, including everything they launched; ``""``: outside of any operator."""
    kernels: tuple[NamedTime, ...]
    """Kernels, copies and memsets, longest first."""
    routes: Routes
    whole: WholePath | None = None
    """Only if the device sets the pace."""
    what_ifs: tuple[WhatIf, ...] = ()
    """Changes that gain something, on one step, best first."""
    tables: dict[str, Table] = field(default_factory=dict)

    @property
    def length_ns(self) -> int:
        return sum(step.length_ns for step in self.steps)

    @property
    def causes(self) -> dict[str, int]:
        """Total of all steps, longest first, without zeros."""
        return _total(self.steps)


def rank_path(window: Window, exchanges: Exchanges) -> RankPath:
    graph = graph_of(window)
    walks = walks_of(graph)
    routes, segments = routes_of(graph, walks, exchanges.row)
    own = segments.take(routes.on_path[segments.node])
    del segments
    steps = _steps(window, own, routes.step)
    operators, kernels = _all_named(graph, own)
    behind = whole_segments(graph)
    whole = _whole(graph, behind) if behind is not None else None
    shown = (operators, kernels) if whole is None else (whole.operators, whole.kernels)
    causes = _total(steps) if whole is None else whole.causes
    length_ns = sum(causes.values())
    by_cause = _cause_table(steps, own, length_ns) if behind is None else _whole_table(causes, behind, len(steps))
    # The largest data of a rank: freed before the replays.
    del own, behind
    tried = what_ifs(graph, causes, *([(e.name, e.time_ns) for e in of] for of in shown[::-1]))
    tables = (
        by_cause,
        *_name_tables(*shown, length_ns, whole is not None),
        what_if_table(tried, WHOLE_NOTE if whole else "", title="What if, in the median step"),
    )
    return RankPath(
        steps=steps,
        operators=operators[:NAMES],
        kernels=kernels[:NAMES],
        routes=routes,
        whole=whole,
        what_ifs=tried,
        tables={table.name: table for table in tables},
    )


def whole_segments(graph: Graph) -> Segments | None:
    """Return the segments of the path over all steps, unordered; None if the host sets the pace."""
    between = device_time(graph.window)
    if between is None:
        return None
    start_ns, end_ns = between
    mine = np.flatnonzero((graph.columns.end_ns == end_ns) & launched_in_steps(graph.window)[graph.row])
    _, segments = routes_of(graph, [walk_back(graph, int(mine[0]), start_ns)], NO_ROWS)
    return segments


def _whole(graph: Graph, own: Segments) -> WholePath:
    operators, kernels = _all_named(graph, own)
    sums = np.bincount(own.cause, own.end_ns - own.start_ns, len(CAUSES)).astype(np.int64)
    causes = {cause: ns for cause, ns in zip(CAUSES, sums.tolist(), strict=True) if ns}
    return WholePath(
        start_ns=int(own.start_ns.min()),
        end_ns=int(own.end_ns.max()),
        causes=dict(sorted(causes.items(), key=lambda each: -each[1])),
        operators=operators[:NAMES],
        kernels=kernels[:NAMES],
    )


def _all_named(graph: Graph, own: Segments) -> tuple[tuple[NamedTime, ...], tuple[NamedTime, ...]]:
    """Sum by operator and by kernel."""
    on_device = own.take(np.isin(own.cause, [int(cause) for cause in DEVICE[:3]]))
    return (
        _named(graph, own, own.operator, by_cause=False),
        _named(graph, on_device, on_device.name, by_cause=True),
    )


def _total(steps: tuple[StepPath, ...]) -> dict[str, int]:
    total = {cause: sum(step.causes.get(cause, 0) for step in steps) for cause in CAUSES}
    return dict(sorted(((cause, ns) for cause, ns in total.items() if ns), key=lambda each: -each[1]))


def walks_of(graph: Graph) -> list[StepWalk]:
    """Walk each step, with the legs of all collectives that began in it."""
    steps = graph.window.steps
    begins = np.flatnonzero(graph.columns.collective)
    begins = begins[np.argsort(graph.columns.start_ns[begins], kind="stable")]
    starts = graph.columns.start_ns[begins]
    bounds = [np.searchsorted(starts, [step.start_ns, step.end_ns]) for step in steps]
    return [walk_step(graph, number, begins[first:last].tolist()) for number, (first, last) in enumerate(bounds)]


def path_segments(window: Window) -> Segments:
    """Return the segments of all steps' paths for drawing, by step (``node`` is its index) and time."""
    graph = graph_of(window)
    routes, segments = routes_of(graph, [walk_step(graph, step, []) for step in range(len(window.steps))], NO_ROWS)
    own = segments.take(routes.on_path[segments.node])
    own = replace(own, node=routes.step[own.node].astype(np.int32))
    return own.take(np.lexsort((own.start_ns, own.node)))


def _steps(window: Window, own: Segments, step_of_node: np.ndarray) -> tuple[StepPath, ...]:
    key = step_of_node[own.node] * len(CAUSES) + own.cause
    by_step = np.bincount(key, own.end_ns - own.start_ns, len(window.steps) * len(CAUSES)).astype(np.int64)
    out = []
    for step, sums in zip(window.steps, by_step.reshape(-1, len(CAUSES)).tolist(), strict=True):
        causes = {cause: ns for cause, ns in zip(CAUSES, sums, strict=True) if ns}
        out.append(StepPath(number=step.number, length_ns=step.end_ns - step.start_ns, causes=causes))
    return tuple(out)


def _named(graph: Graph, own: Segments, codes: np.ndarray, *, by_cause: bool) -> tuple[NamedTime, ...]:
    """Sum the time by name, longest first, with the main cause of each."""
    key = (codes.astype(np.int64) + 1) * len(CAUSES) + own.cause
    size = (len(graph.window.trace.strings) + 1) * len(CAUSES)
    groups, time, number = summed(key, own.end_ns - own.start_ns, size)
    found: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    for group, ns, many in zip(groups.tolist(), time.tolist(), number.tolist(), strict=True):
        code, cause = divmod(group, len(CAUSES))
        so_far = found.get((code, cause if by_cause else 0), (0, 0, -1, 0))
        most = max((so_far[3], so_far[2]), (ns, cause))
        found[code, cause if by_cause else 0] = (so_far[0] + ns, so_far[1] + many, most[1], most[0])
    named = [
        NamedTime(name=graph.window.trace.text(code - 1), cause=CAUSES[cause], time_ns=ns, count=many)
        for (code, _), (ns, many, cause, _) in found.items()
    ]
    return tuple(sorted(named, key=lambda each: (-each.time_ns, each.name)))


def _cause_table(steps: tuple[StepPath, ...], own: Segments, length_ns: int) -> Table:
    counts = np.bincount(own.cause, minlength=len(CAUSES)).tolist()
    rows = []
    for index, cause in enumerate(CAUSES):
        each = [step.causes.get(cause, 0) for step in steps]
        if sum(each):
            rows.append(
                (cause, sum(each), _share(sum(each), length_ns), sum(each) // len(each), max(each), counts[index])
            )
    rows.sort(key=lambda row: -row[1])
    columns = CAUSE_COLUMNS
    note = "The path is as long as the steps: every instant of a step has one cause."
    return table_of("path_causes", "Critical path by cause", columns, rows, note=note)


def _whole_table(causes: dict[str, int], own: Segments, steps: int) -> Table:
    counts = dict(zip(CAUSES, np.bincount(own.cause, minlength=len(CAUSES)).tolist(), strict=True))
    whole_ns = sum(causes.values())
    rows = [(cause, ns, _share(ns, whole_ns), ns // steps, None, counts[cause]) for cause, ns in causes.items()]
    return table_of("path_causes", f"Critical path by cause{OF_ALL}", CAUSE_COLUMNS, rows, note=WHOLE_NOTE)


def _name_tables(
    operators: tuple[NamedTime, ...], kernels: tuple[NamedTime, ...], length_ns: int, whole: bool
) -> tuple[Table, Table]:
    columns = ("name", "cause", "time_ns", "time_share", "segments")

    def rows(of: tuple[NamedTime, ...], none: str) -> list[tuple[object, ...]]:
        return [(e.name or none, e.cause, e.time_ns, _share(e.time_ns, length_ns), e.count) for e in of]

    of, more = (OF_ALL, f"  {WHOLE_NOTE}") if whole else ("", "")
    return (
        table_of(
            "path_operators",
            f"Critical path by operator{of}",
            columns,
            rows(operators, "(outside of operators)"),
            limit=NAMES,
            note=f"An operator's own time on the path plus that of the work it launched; its main cause.{more}",
        ),
        table_of(
            "path_kernels",
            f"Critical path by kernel{of}",
            columns,
            rows(kernels, "(no name)"),
            limit=NAMES,
            note=more.strip(),
        ),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

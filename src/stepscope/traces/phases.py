"""How each step divides into phases: input, forward, backward, optimizer, communication, other; on host and device.

On the host, each instant of a step belongs to the first of these that claims it, so that the phases add up to the step:

1. Stepscope's own ranges on the main thread (``stepscope.forward`` …). They win, since the recorder knows the phase.
2. Ranges by torch, libraries or the user whose name is that of one phase: ``enumerate(DataLoader)#…``,
   ``Optimizer.step#…``, ``## forward ##``, NVTX ranges. The innermost counts; a name with words of two phases does not.
3. Backward: from the first to the last operator that autograd's engine runs without anything else on the main thread
   in between, on its own thread or on the main thread.
4. Forward: from the first to the last operator on the main thread to which autograd returned, or the call of a module,
   without another phase in between.
5. Input: operators on the main thread that copy to a device (``batch.to("cuda")``).

Where a collective runs on a host thread (gloo, MPI) and neither the main thread nor autograd's computes, forward,
backward, optimizer and unclaimed time is communication, except in Stepscope's ranges, which distinguish it themselves.

On the device, work belongs to the phase in which it was launched, and kernels that communicate to communication. An
instant at which work of several phases runs counts for the first of ``DEVICE_ORDER``: communication is only what
nothing hides. With the idle time the phases add up to the span of the work that the step launched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.records.capture import LAYER_LABEL, PHASE_LABEL, STEP_LABEL
from stepscope.records.steps import BUILTIN_PHASES, COMM_HOOK_PHASE
from stepscope.traces.collective_calls import BY_HOST, CALLS
from stepscope.traces.host.stalls import LOADER, loader_rows
from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Ints, Kind, Rows, named
from stepscope.traces.model.intervals import EMPTY, Spans
from stepscope.traces.model.kernel_names import is_communication
from stepscope.traces.model.tables import Table, table_of
from stepscope.traces.model.window import STEP, Window

__all__ = ["PHASES", "PHASE_COLUMNS", "PhaseRow", "Phases", "mean_row", "phase_of_label", "phases_of", "phases_table"]

PHASES: Final = ("input", "forward", "backward", "optimizer", "communication", "other")
INPUT, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, OTHER = range(len(PHASES))
DEVICE_ORDER: Final = (FORWARD, BACKWARD, OPTIMIZER, INPUT, OTHER, COMMUNICATION)

# -- labels -----------------------------------------------------------------------------------------------------------

OWN_PHASES: Final[Mapping[str, int]] = {
    **dict.fromkeys(BUILTIN_PHASES, OTHER),
    "input": INPUT,
    "h2d": INPUT,
    "forward": FORWARD,
    "backward": BACKWARD,
    "comm": COMMUNICATION,
    COMM_HOOK_PHASE: COMMUNICATION,
    "optimizer": OPTIMIZER,
}
"""The phases of the recorder. Those of users, evaluation and checkpoints are other."""
WORDS: Final = {
    COMMUNICATION: (
        r"(nccl|rccl|xccl|hccl|gloo|mpi|ucc|c10d):|all[-_ ]?(to|2)[-_ ]?all|all[-_ ]?reduce|all[-_ ]?gather"
        r"|reduce[-_ ]?scatter|sparse_data_dist|KJTAllToAll"
    ),
    OPTIMIZER: r"^Optimizer\.\w+#|(?<![a-z])(optimi[sz]er|optim|opt|zero_grad)(?![a-z])",
    BACKWARD: r"(?<![a-z])(backward|bwd)(?![a-z])",
    FORWARD: r"(?<![a-z])(forward|fwd)(?![a-z])",
    INPUT: (
        r"(?<![a-z])((load|fetch|get|next|wait_for|prefetch|copy)_?(next_)?(train_)?(batch|data)"
        r"|data_?loader|data_?loading|h2d|loader)(?![a-z])"
    ),
}
"""What the name of a range says, without its case."""
PATTERNS: Final = tuple((phase, re.compile(pattern, re.IGNORECASE)) for phase, pattern in WORDS.items())
ENGINE: Final = re.compile(r"^autograd::engine::|^torch::autograd::|Backward\d*$")
"""Operators of autograd's engine, also on the thread that called ``backward``."""
MODULE: Final = re.compile(r"^nn\.Module: ")


@lru_cache(maxsize=1 << 14)
def phase_of_label(name: str) -> int | None:
    """Return the phase that the name of a range names; None: none, or more than one."""
    if name.startswith(PHASE_LABEL) or STEP.match(name):
        return None
    if LOADER.search(name):
        return INPUT
    found = [phase for phase, pattern in PATTERNS if pattern.search(name)]
    # What a phase exchanges is named after both: ``ddp_backward_allreduce`` is communication.
    return found[0] if found and (len(found) == 1 or found[0] == COMMUNICATION) else None


def _phase_of_own(name: str) -> int | None:
    """Return the phase of one of Stepscope's ranges; a step's, a layer's, or another program's, has none."""
    if not name.startswith(PHASE_LABEL) or name.startswith((STEP_LABEL, LAYER_LABEL)):
        return None
    return OWN_PHASES.get(name.removeprefix(PHASE_LABEL), OTHER)


# -- phases of a rank -------------------------------------------------------------------------------------------------

PHASE_COLUMNS: Final = (
    *("step", "wall_ns", *(f"{phase}_ns" for phase in PHASES)),
    *("device_span_ns", *(f"device_{phase}_ns" for phase in PHASES), "device_idle_ns"),
)


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """A step, or the mean of several."""

    step: int
    """Its number; of a mean, how many steps."""
    wall_ns: int
    host_ns: tuple[int, ...]
    """By phase, as in ``PHASES``; adds up to ``wall_ns``."""
    device_span_ns: int
    """Of the work that the step launched."""
    device_ns: tuple[int, ...]
    """By phase."""
    device_idle_ns: int
    """With ``device_ns`` it adds up to ``device_span_ns``."""

    @property
    def values(self) -> tuple[int, ...]:
        """In the order of ``PHASE_COLUMNS``."""
        return (self.step, self.wall_ns, *self.host_ns, self.device_span_ns, *self.device_ns, self.device_idle_ns)


@dataclass(frozen=True, kw_only=True)
class Phases:
    sources: tuple[str, ...]
    """What the phases are taken from: ``stepscope``, ``ranges``, ``operators``; empty: no phase is known."""
    rows: tuple[PhaseRow, ...]
    """The steps that count, by time."""


def phases_of(window: Window) -> Phases:
    """Divide each step that counts; without anything that names a phase, all of it is other."""
    host, sources = _host_spans(window)
    starts = np.array([step.start_ns for step in window.steps], np.int64)
    ends = np.array([step.end_ns for step in window.steps], np.int64)
    parts = [intervals.covered(starts, ends, spans) for spans in host]
    parts[OTHER] = ends - starts - sum(parts[:OTHER], np.zeros(len(starts), np.int64))
    on_device = _device_parts(window, host)
    rows = tuple(
        PhaseRow(
            step=step.number,
            wall_ns=step.end_ns - step.start_ns,
            host_ns=tuple(int(part[at]) for part in parts),
            device_span_ns=span_ns,
            device_ns=by_phase,
            device_idle_ns=span_ns - sum(by_phase),
        )
        for at, (step, (span_ns, by_phase)) in enumerate(zip(window.steps, on_device, strict=True))
    )
    return Phases(sources=sources, rows=rows)


def mean_row(rows: tuple[PhaseRow, ...]) -> PhaseRow | None:
    """Return the mean, whose parts add up too: what rounding leaves is other, on the device idle; None: no step."""
    count = len(rows)
    if not count:
        return None

    def mean(values: list[int]) -> int:
        return sum(values) // count

    wall_ns, span_ns = mean([row.wall_ns for row in rows]), mean([row.device_span_ns for row in rows])
    host = [mean([row.host_ns[phase] for row in rows]) for phase in range(OTHER)]
    device = tuple(mean([row.device_ns[phase] for row in rows]) for phase in range(len(PHASES)))
    return PhaseRow(
        step=count,
        wall_ns=wall_ns,
        host_ns=(*host, wall_ns - sum(host)),
        device_span_ns=span_ns,
        device_ns=device,
        device_idle_ns=span_ns - sum(device),
    )


def phases_table(phases: Phases) -> Table | None:
    """Build the table, one row per step; None if no phase is known."""
    if not phases.sources:
        return None
    note = (
        "the first phases: of the host, they add up to wall_ns; device_…: work that the step launched in that phase,"
        " whenever it ran; communication on the device: while nothing else ran"
    )
    return table_of("phases", "Phases by step", PHASE_COLUMNS, (row.values for row in phases.rows), note=note)


# -- host -------------------------------------------------------------------------------------------------------------


def _host_spans(window: Window) -> tuple[list[Spans], tuple[str, ...]]:
    """Return when the main thread was in which phase, without what is other, and what says so; [phases]."""
    main = window.host.main_thread
    out = [EMPTY] * len(PHASES)
    if main < 0:
        return out, ()
    sources = []
    ranges = _ranges(window)
    own = _innermost(window, ranges, _phase_of_own)
    if own is not None:
        out, sources = own, ["stepscope"]
    exact = intervals.union(*out)
    labels = _innermost(window, ranges, phase_of_label)
    if labels is not None:
        out = [intervals.union(mine, intervals.difference(more, exact)) for mine, more in zip(out, labels, strict=True)]
        sources.append("ranges")
    before = sum(map(intervals.total, out))
    out = _claimed(out, INPUT, _merged(window, _of_main(window, loader_rows(window))))
    created = _forward_rows(window)
    out = _claimed(out, BACKWARD, _backward(window, out, created))
    out = _claimed(out, FORWARD, _forward(window, out, created))
    out = _claimed(out, INPUT, _uploads(window))
    if sum(map(intervals.total, out)) > before:
        sources.append("operators")
    waits = intervals.difference(_exposed(window), intervals.union(exact, out[INPUT]))
    if intervals.total(waits):
        out = [intervals.difference(spans, waits) for spans in out]
        out[COMMUNICATION] = intervals.union(out[COMMUNICATION], waits)
        sources.append("operators")
    return out, tuple(dict.fromkeys(sources))


def _claimed(claimed: list[Spans], phase: int, spans: Spans) -> list[Spans]:
    """Add what nothing has claimed yet."""
    out = list(claimed)
    out[phase] = intervals.union(out[phase], intervals.difference(spans, intervals.union(*claimed)))
    return out


def _of_main(window: Window, rows: Rows) -> Rows:
    own: Rows = rows[window.trace.slices.thread[rows] == window.host.main_thread]
    return own


def _merged(window: Window, rows: Rows) -> Spans:
    slices = window.trace.slices
    return intervals.merge(slices.start_ns[rows], slices.end_ns[rows])


def _ranges(window: Window) -> Rows:
    """Return the ranges on the main thread and its calls of collectives, by start."""
    host = window.host
    calls = host.ops[named(window.trace, host.ops, _is_call)]
    return _of_main(window, np.sort(np.concatenate([host.annotations, calls])))


def _is_call(name: str) -> bool:
    return name.startswith(CALLS)


def _innermost(window: Window, ranges: Rows, phase_of: Callable[[str], int | None]) -> list[Spans] | None:
    """Return when which phase's range was the innermost, [phases]; None if no range names a phase."""
    trace, slices = window.trace, window.trace.slices
    rows = ranges[named(trace, ranges, lambda name: phase_of(name) is not None)]
    if not len(rows):
        return None
    columns = (slices.start_ns[rows], slices.end_ns[rows], slices.name[rows])
    pieces: list[tuple[int, int, int]] = []
    open_ranges: list[tuple[int, int]] = []
    at_ns = 0

    def until(time_ns: int) -> None:
        """Divide the time up to an instant among the open ranges; of two that cross, the later one counts."""
        nonlocal at_ns
        while open_ranges and at_ns < time_ns:
            end_ns, phase = open_ranges[-1]
            if end_ns > at_ns:
                pieces.append((at_ns, min(end_ns, time_ns), phase))
                at_ns = min(end_ns, time_ns)
            if end_ns <= time_ns:
                open_ranges.pop()
        at_ns = time_ns

    for start_ns, end_ns, code in zip(*(column.tolist() for column in columns), strict=True):
        until(start_ns)
        phase = phase_of(trace.text(code))
        if phase is not None and end_ns > start_ns:
            open_ranges.append((end_ns, phase))
    until(int(slices.end_ns[rows].max()))
    starts, ends, phases = np.array(pieces, np.int64).reshape(-1, 3).T
    return [intervals.merge(starts[phases == phase], ends[phases == phase]) for phase in range(len(PHASES))]


def _forward_rows(window: Window) -> Rows:
    """Return the operators of the main thread to which autograd returned, by start."""
    created = window.host.forward_of
    return _of_main(window, np.unique(created[created >= 0]).astype(np.int32))


def _backward(window: Window, claimed: Sequence[Spans], created: Rows) -> Spans:
    """Return when autograd's engine ran."""
    slices, host, ops = window.trace.slices, window.host, window.trace.ops
    engine = named(window.trace, host.ops, ENGINE.search)
    linked = np.zeros(len(window.trace), bool)
    linked[ops.row[ops.forward_thread > 0]] = True
    apart = np.isin(slices.thread[host.ops], host.autograd_threads)
    marks = _merged(window, host.ops[engine | linked[host.ops] | apart])
    others = [claimed[phase].start_ns for phase in (INPUT, FORWARD, OPTIMIZER)]
    return _joined(marks, np.concatenate([*others, slices.start_ns[created]]))


def _forward(window: Window, claimed: Sequence[Spans], created: Rows) -> Spans:
    """Return when the main thread ran what autograd returned to, or modules."""
    pythons = window.rows_of((Kind.PYTHON,))
    modules = _of_main(window, pythons[named(window.trace, pythons, MODULE.match)])
    marks = _merged(window, np.sort(np.concatenate([created, modules])))
    others = [claimed[phase].start_ns for phase in (INPUT, BACKWARD, OPTIMIZER)]
    return _joined(marks, np.concatenate([*others, np.array([step.start_ns for step in window.steps], np.int64)]))


def _uploads(window: Window) -> Spans:
    """Return when operators of the main thread copied from the host to a device."""
    copies = window.rows_of((Kind.MEMCPY,))
    launch = window.launch[copies[named(window.trace, copies, _is_upload)]]
    at = window.host.op_holder[_of_main(window, np.unique(launch[launch >= 0]).astype(np.int32))]
    at = np.unique(at[at >= 0])
    while (inner := window.host.op_holder[at] >= 0).any():
        at = np.unique(np.where(inner, window.host.op_holder[at], at))
    return _merged(window, at.astype(np.int32))


def _is_upload(name: str) -> bool:
    return name.startswith("Memcpy HtoD")


def _joined(spans: Spans, borders: Ints) -> Spans:
    """Fill the gaps between spans in which no border lies."""
    if len(spans.start_ns) < 2:
        return spans
    borders = np.sort(borders)
    before = np.searchsorted(borders, spans.end_ns[:-1])
    until = np.searchsorted(borders, spans.start_ns[1:], side="right")
    cut = np.flatnonzero(until > before)
    return intervals.merge(spans.start_ns[np.append(0, cut + 1)], spans.end_ns[np.append(cut, len(spans.end_ns) - 1)])


def _exposed(window: Window) -> Spans:
    """Return when a collective ran on a host thread and neither the main thread nor autograd's computed."""
    slices, host = window.trace.slices, window.host
    rows = window.rows_of((Kind.ANNOTATION,))
    exchanged = _merged(window, rows[named(window.trace, rows, _is_by_host)])
    if not len(exchanged.start_ns):
        return EMPTY
    busy = [EMPTY]
    for thread in (host.main_thread, *host.autograd_threads.tolist()):
        own = host.ops[slices.thread[host.ops] == thread]
        calls = named(window.trace, own, _is_call)
        busy.append(intervals.difference(_merged(window, own[~calls]), _merged(window, own[calls])))
    return intervals.difference(exchanged, intervals.union(*busy))


def _is_by_host(name: str) -> bool:
    return name.startswith(BY_HOST)


# -- device -----------------------------------------------------------------------------------------------------------


def _device_parts(window: Window, host: Sequence[Spans]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the span of each step's device work and how much of it belongs to each phase, [steps]."""
    slices, rows = window.trace.slices, window.device_rows
    step = window.step_of[rows]
    rows, step = rows[step >= 0], step[step >= 0]
    launch = window.launch[rows]
    phase = np.full(len(rows), OTHER, np.int8)
    for each in range(OTHER):
        inside = intervals.holds(host[each], slices.start_ns[launch])
        phase[inside & (launch >= 0)] = each
    exchanging = named(window.trace, rows, is_communication) & (slices.kind[rows] == Kind.KERNEL)
    phase = np.where(exchanging, COMMUNICATION, np.where(phase == COMMUNICATION, OTHER, phase))
    order = np.argsort(step, kind="stable")
    bounds = np.searchsorted(step[order], np.arange(len(window.steps) + 1)).tolist()
    return [_parts(window, rows[order[a:b]], phase[order[a:b]]) for a, b in pairwise(bounds)]


def _parts(window: Window, rows: Rows, phase: NDArray[np.int8]) -> tuple[int, tuple[int, ...]]:
    slices = window.trace.slices
    if not len(rows):
        return 0, (0,) * len(PHASES)
    out = [0] * len(PHASES)
    claimed = EMPTY
    for each in DEVICE_ORDER:
        spans = intervals.difference(_merged(window, rows[phase == each]), claimed)
        out[each] = intervals.total(spans)
        claimed = intervals.union(claimed, spans)
    return int(slices.end_ns[rows].max() - slices.start_ns[rows].min()), tuple(out)

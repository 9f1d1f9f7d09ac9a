"""``torch.compile``: time spent compiling, recompilations, graph breaks.

*Compiling*: on any thread, the union of what dynamo and inductor mark as their phases.  *Recompiled*: a compilation of
the same frame again, with a number above 0 in ``frame/number``.  A *graph break* leaves a compiled region and goes on
in another that is entered inside of it: the resumed function is called from the code of the first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from stepscope.traces.model import intervals
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Rows
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.model.window import Window

__all__ = ["Compiling", "compile_rows", "compiling", "compiling_of"]

PHASE = re.compile(r"\(dynamo_timed\)$|^(entire_frame_compile|entire_backward_compile|dynamo|backend_compile)$")
PYTHON_PHASE = re.compile(r"(^|/)torch/(_dynamo/convert_frame|_inductor/compile_fx)\.py\(\d+\): (_compile|compile_fx)$")
REGION = re.compile(r"^Torch-Compiled Region(?:: .*?(?P<frame>\d+)/(?P<count>\d+))?")
COMPILED = re.compile(r"\bcompile_id=.*?(?P<frame>\d+)/(?P<count>\d+)")


@dataclass(frozen=True, kw_only=True)
class Compiling:
    compile_ns: int
    recompiles: int
    graph_breaks: int
    """Regions entered inside of another in one step, in the step with the most."""
    regions: tuple[tuple[str, int, int, int], ...]
    """Name, times entered, nanoseconds with what is inside, times entered inside of another; the longest first."""
    compiled: tuple[tuple[str, int], ...]
    """``frame/number`` and nanoseconds, by time, where the trace tells them apart."""


def compiling_of(window: Window) -> Compiling:
    trace, slices = window.trace, window.trace.slices
    marked = np.sort(np.concatenate([window.host.ops, window.host.annotations]))
    phases = compile_rows(window)
    compile_ns = intervals.total(intervals.merge(slices.start_ns[phases], slices.end_ns[phases]))
    regions = _named(window, marked, REGION)
    holder = window.calls.holder(window.host.mask(regions))[regions] if len(regions) else regions
    inside = regions[holder >= 0]
    steps = window.step_of[inside]
    breaks = int(np.bincount(steps[steps >= 0]).max()) if (steps >= 0).any() else 0
    compiled = _compiled(window, marked, phases)
    again = {name for name, _ in compiled if not name.endswith("/0")} | _first_seen_later(window, regions)
    by_name: dict[str, tuple[int, int, int]] = {}
    for row, outer in zip(regions.tolist(), holder.tolist(), strict=True):
        entered, host_ns, within = by_name.get(trace.name(row), (0, 0, 0))
        by_name[trace.name(row)] = (entered + 1, host_ns + int(slices.dur_ns[row]), within + (outer >= 0))
    return Compiling(
        compile_ns=compile_ns,
        recompiles=len(again),
        graph_breaks=breaks,
        regions=tuple(sorted(((name, *values) for name, values in by_name.items()), key=lambda each: -each[2])),
        compiled=compiled,
    )


def compile_rows(window: Window) -> Rows:
    """Phases of compiling, on any thread."""
    phases = _named(window, np.sort(np.concatenate([window.host.ops, window.host.annotations])), PHASE)
    return phases if len(phases) else _named(window, window.rows_of((Kind.PYTHON,)), PYTHON_PHASE)


def _named(window: Window, rows: Rows, pattern: re.Pattern[str]) -> Rows:
    return rows[window.trace.names_where(pattern.search)[window.trace.slices.name[rows]]] if len(rows) else rows


def _compiled(window: Window, marked: Rows, phases: Rows) -> tuple[tuple[str, int], ...]:
    """Notes with an id stand inside the phase they are about; the outermost phase is the compilation."""
    notes = _named(window, marked, COMPILED)
    if not len(notes):
        return ()
    trace, slices = window.trace, window.trace.slices
    is_phase = window.host.mask(phases)
    outer = window.calls.holder(is_phase)
    found: dict[str, int] = {}
    counted: set[int] = set()
    for row in notes.tolist():
        match = COMPILED.search(trace.name(row))
        phase = int(outer[row])
        while phase >= 0 and outer[phase] >= 0:
            phase = int(outer[phase])
        if match is not None:
            name = f"{match['frame']}/{match['count']}"
            found.setdefault(name, 0)
            if phase >= 0 and phase not in counted:
                counted.add(phase)
                found[name] += int(slices.dur_ns[phase])
    return tuple(found.items())


def _first_seen_later(window: Window, regions: Rows) -> set[str]:
    """Ids of regions that appear only after another of their frame did: compiled in between, whether marked or not."""
    seen: dict[str, set[str]] = {}
    out = set()
    for row in regions.tolist():
        match = REGION.match(window.trace.name(row))
        if match is None or match["frame"] is None:
            continue
        frame, number = match["frame"], match["count"]
        known = seen.setdefault(frame, set())
        if known and number not in known and int(number) > max(map(int, known)):
            out.add(f"{frame}/{number}")
        known.add(number)
    return out


def compiling(found: Compiling) -> Table | None:
    """None: nothing was compiled, nor did anything compiled run."""
    if not found.regions and not found.compile_ns:
        return None
    note = f"{found.recompiles} recompiled; {found.graph_breaks} graph breaks in a step."
    columns = ("region", "entered", "host_ns", "entered_inside_another")
    return table_of("compiling", "Compiled regions", columns, found.regions, note=note)

"""What keeps the host from launching: loading, compiling, garbage collection, Python, waits for the device.

A *pause* is a run of Python's garbage collector as recorded by the profiler, explicit or not. A *hole* is a stretch of
more than 5 ms of a step in which neither the main thread nor autograd's threads (for which it waits in backward) ran an
operator or a runtime call: the user's Python code, or a wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.records.capture import LAYER_LABEL, PHASE_LABEL
from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Ints, Kind, Rows, named
from stepscope.traces.model.kernel_names import is_asked_to_wait
from stepscope.traces.model.tables import Table, distinct, table_of
from stepscope.traces.model.window import PROFILER, STEP, Window, innermost_at, nest_of, padded, sums

__all__ = [
    "Compiling",
    "Loading",
    "Pause",
    "PythonStop",
    "SyncPlace",
    "compiling_of",
    "compiling_table",
    "holes_table",
    "is_region",
    "loader_rows",
    "loading_of",
    "loading_table",
    "pauses_of",
    "regions_of",
    "stops_of",
    "syncs_of",
    "syncs_table",
]


# -- pauses and holes -------------------------------------------------------------------------------------------------

COLLECTOR = re.compile(r"^Python GC$|^<built-in function collect>$|^gc\.collect$|^gc\.py\(\d+\): collect$")
PYTHON_FILE = re.compile(r"\.py\(\d+\): ")
RECORDER = re.compile(r"(^|/)stepscope/(recorder|ring|records)/[^()]*\.py\(\d+\): ")
WRAPPER = re.compile(r"(^|/)stepscope/recorder/(hooks/[^()]*|ledger)\.py\(\d+\): ")
"""Functions of the recorder that call what the user's code calls: a collective, a module, an optimizer."""
MIN_HOLE_NS = 5_000_000
MAX_PAUSES = 1000


@dataclass(frozen=True, kw_only=True)
class Pause:
    kind: str
    """``gc``."""
    start_ns: int
    dur_ns: int


def pauses_of(window: Window) -> tuple[Pause, ...]:
    """Return the collections by time; of very many, the longest."""
    trace, slices = window.trace, window.trace.slices
    rows = np.sort(np.concatenate([window.rows_of((Kind.PYTHON,)), window.host.annotations]))
    rows = rows[trace.names_where(COLLECTOR.match)[slices.name[rows]]] if len(rows) else rows
    # An explicit collection is recorded twice, one inside the other.
    spans = intervals.merge(slices.start_ns[rows], slices.end_ns[rows])
    dur_ns = spans.end_ns - spans.start_ns
    longest = np.sort(np.argsort(-dur_ns, kind="stable")[:MAX_PAUSES])
    return tuple(Pause(kind="gc", start_ns=int(spans.start_ns[at]), dur_ns=int(dur_ns[at])) for at in longest)


def holes_table(window: Window) -> Table | None:
    """List the holes; None if the main thread had none."""
    starts, ends = untold(window, intervals.EMPTY, MIN_HOLE_NS)
    if not len(starts):
        return None
    recorded = _recorded(window)
    return _table(window, recorded[window.trace.slices.thread[recorded] == window.host.main_thread], starts, ends)


def untold(window: Window, known: intervals.Spans, least_ns: int) -> tuple[Ints, Ints]:
    """Return stretches longer than ``least_ns``, each within one step, without recorded or ``known`` activity.

    Empty if the main thread has no records at all.
    """
    slices, main = window.trace.slices, window.host.main_thread
    recorded = _recorded(window)
    if not (slices.thread[recorded] == main).any():
        return intervals.EMPTY
    busy = recorded[np.isin(slices.thread[recorded], [main, *window.host.autograd_threads.tolist()])]
    step_starts = np.array([step.start_ns for step in window.steps], np.int64)
    steps = intervals.merge(step_starts, np.array([step.end_ns for step in window.steps], np.int64))
    running = intervals.union(known, intervals.merge(slices.start_ns[busy], slices.end_ns[busy]))
    # Adjacent steps are one span here: a hole from one into the next is cut at their border.
    starts, ends = _cut(intervals.difference(steps, running), step_starts)
    long = ends - starts > least_ns
    return starts[long], ends[long]


def _recorded(window: Window) -> Rows:
    """Return operators and runtime calls."""
    return np.sort(np.concatenate([window.host.ops, window.rows_of((Kind.RUNTIME,))]))


def _cut(spans: intervals.Spans, borders: Ints) -> tuple[Ints, Ints]:
    if not len(spans.start_ns):
        return spans
    index = np.searchsorted(spans.start_ns, borders, side="right") - 1
    within = borders[(index >= 0) & (borders > spans.start_ns[index]) & (borders < spans.end_ns[index])]
    return np.sort(np.append(spans.start_ns, within)), np.sort(np.append(spans.end_ns, within))


def _table(window: Window, recorded: Rows, starts: Ints, ends: Ints) -> Table:
    trace, slices = window.trace, window.trace.slices
    middle = (starts + ends) // 2
    main = np.full(len(starts), window.host.main_thread, np.int32)
    inside = innermost_at(trace, window.calls, window.host_rows, main, middle)
    after = np.searchsorted(slices.start_ns[recorded], ends)
    finish = np.argsort(slices.end_ns[recorded], kind="stable")
    before = np.searchsorted(slices.end_ns[recorded][finish], starts, side="right") - 1
    step_starts = np.array([step.start_ns for step in window.steps], np.int64)
    step = np.searchsorted(step_starts, starts, side="right") - 1

    def name(row: int) -> str | None:
        return trace.name(row) if row >= 0 else None

    rows = []
    for at in np.argsort(starts - ends, kind="stable").tolist():
        previous = int(recorded[finish][before[at]]) if before[at] >= 0 else -1
        following = int(recorded[after[at]]) if after[at] < len(recorded) else -1
        around = int(inside[at])
        sources = window.host.sources
        source = sources.text(around) or sources.text(previous) or sources.text(following)
        if _in_recorder(window, around):
            source = None
        number = window.steps[int(step[at])].number
        rows.append(
            (
                number,
                starts[at],
                ends[at] - starts[at],
                _name_around(window, around),
                source,
                name(previous),
                name(following),
            )
        )
    columns = ("step", "start_ns", "dur_ns", "inside", "source", "after", "before")
    note = "No operator ran on the main thread for more than 5 ms: Python code, or a wait."
    return table_of("holes", "Gaps on the main thread", columns, rows, limit=100, note=note)


def _name_around(window: Window, row: int) -> str | None:
    """Return the name of what ran around a hole; None if that is a whole step.

    A phase that the recorder labeled is no name: nothing in the script is called ``stepscope.forward``.
    """
    while row >= 0:
        name = window.trace.name(row)
        if STEP.match(name) or name.startswith(PROFILER):
            return None
        if name.startswith(LAYER_LABEL) or not name.startswith(PHASE_LABEL):
            return name.removeprefix(LAYER_LABEL)
        row = int(window.calls.parents[row])
    return None


# -- loading ----------------------------------------------------------------------------------------------------------
# How long the main thread waits for data: inside a loader's ``__next__``.

LOADER = re.compile(
    r"^enumerate\(\w*(DataLoader|DataPipe|Loader)\w*\)#"
    r"|^\[pl\].*(dataloader_next|_FetcherIter|__next__)|^(get_train_batch|train_dataloader_next)$"
    r"|^DALI\w*(Iterator|_next|\.__next__)|(DataLoader|DataPipe|NodeIterator|DALI\w*Iterator)\w*(\.|::)__next__"
)
"""Annotations of torch, Lightning, torchdata, DALI."""
PYTHON_LOADER = re.compile(r"(^|/)torch/utils/data/dataloader\.py\(\d+\): __next__$")


@dataclass(frozen=True, kw_only=True)
class Loading:
    total_ns: int
    """Within steps."""
    by_step: tuple[int, ...]
    """Nanoseconds, in the order of ``Window.steps``."""
    workers: bool | None
    """Whether worker processes load data, according to the loader's name; None if it does not say."""


def loader_rows(window: Window) -> Rows:
    """Return what loads data, on any thread: annotations, or without any, Python functions."""
    annotations = window.host.annotations
    rows = annotations[named(window.trace, annotations, LOADER.search)]
    if not len(rows):
        pythons = window.rows_of((Kind.PYTHON,))
        rows = pythons[named(window.trace, pythons, PYTHON_LOADER.search)]
    return rows


def loading_of(window: Window) -> Loading:
    slices = window.trace.slices
    rows = loader_rows(window)
    rows = rows[slices.thread[rows] == window.host.main_thread]
    spans = intervals.merge(slices.start_ns[rows], slices.end_ns[rows])
    starts = np.array([step.start_ns for step in window.steps], np.int64)
    ends = np.array([step.end_ns for step in window.steps], np.int64)
    by_step = intervals.covered(starts, ends, spans).tolist()
    names = {window.trace.name(row) for row in rows[:1].tolist()}
    single = any("_SingleProcess" in name for name in names)
    workers = True if any("_MultiProcessing" in name for name in names) else False if single else None
    return Loading(total_ns=sum(by_step), by_step=tuple(by_step), workers=workers)


def loading_table(window: Window, found: Loading) -> Table | None:
    """Build the table; None if nothing is known to load data."""
    if not found.total_ns:
        return None
    rows = [
        (step.number, spent_ns, step.end_ns - step.start_ns, spent_ns / max(step.end_ns - step.start_ns, 1))
        for step, spent_ns in zip(window.steps, found.by_step, strict=True)
    ]
    columns = ("step", "loading_ns", "step_ns", "loading_share")
    return table_of("loading", "Waiting for data", columns, rows)


# -- compiling --------------------------------------------------------------------------------------------------------
# ``torch.compile``: time spent compiling, recompilations, graph breaks.
#
# *Compiling*: on any thread, the union of what dynamo and inductor mark as their phases. *Recompiled*: another
# compilation of the same frame, with a number above 0 in ``frame/number``. A *graph break* leaves a compiled region and
# continues in another that is entered inside it: the resumed function is called from the code of the first.

PHASE = re.compile(r"\(dynamo_timed\)$|^(entire_frame_compile|entire_backward_compile|dynamo|backend_compile)$")
PYTHON_PHASE = re.compile(r"(^|/)torch/(_dynamo/convert_frame|_inductor/compile_fx)\.py\(\d+\): (_compile|compile_fx)$")
REGION = re.compile(r"^Torch-Compiled Region(?:: .*?(?P<frame>\d+)/(?P<count>\d+))?")
COMPILED = re.compile(r"\bcompile_id=.*?(?P<frame>\d+)/(?P<count>\d+)")


@dataclass(frozen=True, kw_only=True)
class Compiling:
    compile_ns: int
    recompiles: int
    graph_breaks: int
    """Regions entered inside another in one step; the maximum over steps."""
    regions: tuple[tuple[str, int, int, int], ...]
    """Name, times entered, nanoseconds including nested, times entered inside another; the longest first."""
    compiled: tuple[tuple[str, int], ...]
    """``frame/number`` and nanoseconds, by time, if the trace distinguishes them."""


def compiling_of(window: Window) -> Compiling:
    trace, slices = window.trace, window.trace.slices
    marked = np.sort(np.concatenate([window.host.ops, window.host.annotations]))
    phases = compile_rows(window)
    compile_ns = intervals.total(intervals.merge(slices.start_ns[phases], slices.end_ns[phases]))
    regions = regions_of(window)
    holder = window.calls.holder(window.host.mask(regions))[regions] if len(regions) else regions
    inside = regions[holder >= 0]
    steps = window.step_of[inside]
    breaks = int(np.bincount(steps[steps >= 0]).max()) if (steps >= 0).any() else 0
    compiled = _compiled(window, marked, phases)
    recompiled = {name for name, _ in compiled if not name.endswith("/0")} | _first_seen_later(window, regions)
    by_name: dict[str, tuple[int, int, int]] = {}
    for row, outer in zip(regions.tolist(), holder.tolist(), strict=True):
        entered, host_ns, within = by_name.get(trace.name(row), (0, 0, 0))
        by_name[trace.name(row)] = (entered + 1, host_ns + int(slices.dur_ns[row]), within + (outer >= 0))
    return Compiling(
        compile_ns=compile_ns,
        recompiles=len(recompiled),
        graph_breaks=breaks,
        regions=tuple(sorted(((name, *values) for name, values in by_name.items()), key=lambda each: -each[2])),
        compiled=compiled,
    )


def regions_of(window: Window) -> Rows:
    """Return the calls of compiled regions."""
    return _named(window, np.sort(np.concatenate([window.host.ops, window.host.annotations])), REGION)


def is_region(name: str) -> bool:
    """Whether it is the name of a compiled region."""
    return REGION.match(name) is not None


def compile_rows(window: Window) -> Rows:
    """Return the phases of compiling, on any thread."""
    phases = _named(window, np.sort(np.concatenate([window.host.ops, window.host.annotations])), PHASE)
    return phases if len(phases) else _named(window, window.rows_of((Kind.PYTHON,)), PYTHON_PHASE)


def _named(window: Window, rows: Rows, pattern: re.Pattern[str]) -> Rows:
    return rows[window.trace.names_where(pattern.search)[window.trace.slices.name[rows]]] if len(rows) else rows


def _compiled(window: Window, marked: Rows, phases: Rows) -> tuple[tuple[str, int], ...]:
    """Sum by id: notes with an id are inside their phase; the outermost phase is the compilation."""
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
    """Return ids of regions that appear only after another of their frame: compiled in between, marked or not."""
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


def compiling_table(found: Compiling) -> Table | None:
    """Build the table; None if nothing was compiled and nothing compiled ran."""
    if not found.regions and not found.compile_ns:
        return None
    note = f"{found.recompiles} recompiled; {found.graph_breaks} graph breaks in a step."
    columns = ("region", "entered", "host_ns", "entered_inside_another")
    return table_of("compiling", "Compiled regions", columns, found.regions, note=note)


# -- stops ------------------------------------------------------------------------------------------------------------
# *Stops*, by place: where the main thread ran Python, or slept, for long. A stop is a stretch of a step of at least a
# millisecond in which neither the main thread nor autograd's threads were inside an operator or a runtime call, and
# that nothing else explains: no loading, garbage collection, compiling or active collective. Shorter ones are the
# interpreter's way from one operator to the next.

MIN_STOP_NS = 1_000_000
MAX_PLACES = 100
BUILT_IN = "<built-in "
BUILT_IN_NAME = re.compile(BUILT_IN + r"(?:function|method) (?P<name>[^\s>]+)")
"""``<built-in function sleep>``, ``<built-in method run_backward of torch._C._EngineBase object at 0x7f…>``."""


@dataclass(frozen=True, kw_only=True)
class PythonStop:
    place: str | None
    """``train.py(31): augment``; None: neither line nor name is known."""
    call: str | None
    """The built-in Python function that ran, ``sleep``; None: another, or unknown."""
    count: int
    total_ns: int

    @property
    def named(self) -> str | None:
        """``sleep at train.py(31): step``."""
        return f"{self.call} at {self.place}" if self.call and self.place else self.call or self.place


def stops_of(window: Window, pauses: tuple[Pause, ...], exchanged: Rows) -> tuple[PythonStop, ...]:
    """Return the stops, the longest first; ``exchanged``: slices of collectives."""
    trace, slices = window.trace, window.trace.slices
    loaders = loader_rows(window)
    loaders = loaders[slices.thread[loaders] == window.host.main_thread]
    known = np.concatenate([loaders, compile_rows(window), exchanged])
    start_ns = np.append(slices.start_ns[known], [pause.start_ns for pause in pauses]).astype(np.int64)
    end_ns = np.append(slices.end_ns[known], [pause.start_ns + pause.dur_ns for pause in pauses]).astype(np.int64)
    starts, ends = untold(window, intervals.merge(start_ns, end_ns), MIN_STOP_NS)
    if not len(starts):
        return ()
    main = np.full(len(starts), window.host.main_thread, np.int32)
    inside = innermost_at(trace, window.calls, window.host_rows, main, (starts + ends) // 2)
    found: dict[tuple[str | None, str | None], tuple[int, int]] = {}
    for row, dur_ns in zip(inside.tolist(), (ends - starts).tolist(), strict=True):
        if _in_recorder(window, row):
            continue  # not the user's code
        place = _place(window, row)
        count, total_ns = found.get(place, (0, 0))
        found[place] = (count + 1, total_ns + dur_ns)
    stops = (
        PythonStop(place=place, call=call, count=count, total_ns=total_ns)
        for (place, call), (count, total_ns) in found.items()
    )
    return tuple(sorted(stops, key=lambda stop: -stop.total_ns)[:MAX_PLACES])


def _in_recorder(window: Window, row: int) -> bool:
    """Whether the row is a Python function of the recorder, or a built-in that one calls for itself."""
    slices, parents = window.trace.slices, window.calls.parents
    own = True
    while row >= 0:
        name = window.trace.name(row)
        if slices.kind[row] == Kind.PYTHON and not name.startswith(BUILT_IN):
            # What a wrapper calls, the user's code waits for.
            return RECORDER.search(name) is not None and (own or WRAPPER.search(name) is None)
        if own and slices.kind[row] != Kind.PYTHON:
            return False  # a label
        own = False
        row = int(parents[row])
    return False


def _place(window: Window, row: int) -> tuple[str | None, str | None]:
    """Return the line and the built-in function, as far as known."""
    if row < 0:
        return None, None
    source = window.host.sources.text(row)
    if built_in := BUILT_IN_NAME.match(window.trace.name(row)):
        return source, built_in["name"]
    return source or _name_around(window, row), None


# -- synchronization --------------------------------------------------------------------------------------------------
# Where the host waits for the device: ``.item()``, ``.cpu()``, ``nonzero``, ``torch.cuda.synchronize()`` …
#
# The wait is the duration of the synchronizing runtime call: a synchronization by name, a copy that is not
# asynchronous, or one to pageable memory, which blocks whatever its name. It is named after the outermost operator
# around it that is known to synchronize, else the innermost operator, else the call itself.

ASYNC_COPY = re.compile(r"^(cuda|hip)Memcpy\w*Async|^cuMemcpy\w*Async")
TO_PAGEABLE = re.compile(r"Device -> Pageable|DtoH.*Pageable", re.IGNORECASE)
KNOWN = frozenset(
    (
        "aten::item",
        "aten::_local_scalar_dense",
        "aten::is_nonzero",
        "aten::nonzero",
        "aten::nonzero_numpy",
        "aten::argwhere",
        "aten::masked_select",
        "aten::equal",
        "aten::allclose",
        "aten::cpu",
        "aten::to",
        "aten::_to_copy",
        "aten::copy_",
        "aten::tolist",
        "aten::_unique2",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::bincount",
        "aten::repeat_interleave",
        "aten::index",
        "aten::index_put_",
        "aten::multinomial",
    )
)


@dataclass(frozen=True, kw_only=True)
class SyncPlace:
    call: str
    """``aten::item`` or, outside operators, ``cudaDeviceSynchronize``."""
    source: str | None
    """``train.py(31): step``."""
    count: int
    wait_ns: int


def sync_rows(window: Window) -> Rows:
    """Return runtime calls within steps in which the host waited for the device; of nested ones the outer."""
    trace, slices = window.trace, window.trace.slices
    calls = window.rows_of((Kind.RUNTIME,))
    names = slices.name[calls]
    waits = trace.names_where(is_asked_to_wait)[names]
    copies = window.rows_of((Kind.MEMCPY,))
    pageable = trace.names_where(TO_PAGEABLE.search)
    blocking = window.launch[copies[pageable[slices.name[copies]]]]
    to_pageable = np.zeros(len(slices), bool)
    to_pageable[blocking[blocking >= 0]] = True
    waits |= to_pageable[calls] & trace.names_where(ASYNC_COPY.match)[names]
    rows = calls[waits & (window.step_of[calls] >= 0)]
    rows = rows[~window.host.mask(rows)[window.calls.parents[rows]] | (window.calls.parents[rows] < 0)]
    # The profiler itself waits for the device when it stops: that is the last call of the host in a trace.
    if len(rows) and rows[-1] == window.host_rows[-1] and window.owner[rows[-1]] < 0:
        rows = rows[:-1]
    return rows


def syncs_of(window: Window) -> tuple[SyncPlace, ...]:
    """Return the places, the most costly first."""
    rows = sync_rows(window)
    if not len(rows):
        return ()
    trace, slices, sources = window.trace, window.trace.slices, window.host.sources
    teller = _teller(window, rows)
    name, code = slices.name[teller], sources.code[rows]
    span = len(sources.texts) + 1
    keys, group = distinct(name.astype(np.int64) * span + code + 1)
    wait_ns, count = sums(group, slices.dur_ns[rows], len(keys)), np.bincount(group, minlength=len(keys))
    return tuple(
        SyncPlace(
            call=trace.strings[int(keys[at]) // span],
            source=sources.texts[int(keys[at]) % span - 1] if int(keys[at]) % span else None,
            count=int(count[at]),
            wait_ns=int(wait_ns[at]),
        )
        for at in np.lexsort((-count, -wait_ns)).tolist()
    )


def _teller(window: Window, rows: Rows) -> NDArray[np.int32]:
    """Return the slice whose name describes each wait, [rows]."""
    ops = window.host.ops
    known = ops[window.trace.names_where(KNOWN.__contains__)[window.trace.slices.name[ops]]]
    nest = nest_of(window.calls, known)
    at = nest.around[rows]
    while True:
        up = padded(nest.above)[at]
        if (up < 0).all():
            break
        at = np.where(up >= 0, up, at)
    owner = window.owner[rows]
    return np.where(at >= 0, padded(known)[at], np.where(owner >= 0, owner, rows)).astype(np.int32)


def syncs_table(window: Window, places: tuple[SyncPlace, ...]) -> Table | None:
    """Build the table; None if the host never waited."""
    if not places:
        return None
    steps_ns = sum(step.end_ns - step.start_ns for step in window.steps)
    rows = [
        (place.call, place.source, place.count, place.wait_ns, place.wait_ns / steps_ns if steps_ns else None)
        for place in places
    ]
    columns = ("call", "source", "count", "wait_ns", "step_share")
    return table_of("syncs", "Waiting for the device", columns, rows)

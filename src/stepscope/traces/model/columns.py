"""A trace as columns of integers: kinds of events, the tables, and the builder that readers fill.

There is one row per slice (an event with a duration), sorted by start, the longer first for equal starts, so that a
parent precedes its children. Times are integer nanoseconds, exactly as in the file: ``start_ns`` counts from
``TraceMeta.origin_ns``, the file's earliest instant since the epoch or since boot, depending on its clock.

Columns that only some rows have are in side tables (``Ops``, ``Kernels`` …). Each has ``row``, ascending indices into
the slices, and further columns of the same length. Strings are dictionary-coded: codes into ``Trace.strings``; −1:
none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DEVICE_KINDS",
    "DEVICE_WORK",
    "HOST_KINDS",
    "LAUNCHING",
    "Ints",
    "Kind",
    "Numbering",
    "Rows",
    "Slices",
    "Thread",
    "Trace",
    "TraceBuilder",
    "TraceMeta",
    "kind_of",
    "named",
]


# -- kinds of events --------------------------------------------------------------------------------------------------
# The kind of an event, independent of the version or vendor that wrote it. Categories were renamed over the years
# (``Kernel`` → ``kernel``, ``Operator`` → ``cpu_op``, ``Runtime`` → ``cuda_runtime``), and vendors have their own. Only
# the category decides: a stream does not make an event device work (Triton's host calls carry ``stream: 0``), nor a
# synchronization a kernel.


class Kind(IntEnum):
    """The values are stored in cached files: add at the end, never renumber."""

    OTHER = 0
    OP = 1
    """An operator on the host (``aten::mm``), including autograd's."""
    ANNOTATION = 2
    """``record_function``, NVTX ranges and profiler steps, on the host."""
    PYTHON = 3
    """A Python function or an ``nn.Module`` call (``with_stack``)."""
    RUNTIME = 4
    """A call of the device's runtime or driver, on the host: launches, copies, synchronizations."""
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7
    SYNC = 8
    """A wait as recorded on the device (``cuda_sync``); not work."""
    DEVICE_ANNOTATION = 9
    """The projection of an annotation onto the device; not work either."""
    OVERHEAD = 10
    """Overhead of the profiler."""


CATEGORIES: Final = {
    "cpu_op": Kind.OP,
    "operator": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "nvtx": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
    "python": Kind.PYTHON,
    "runtime": Kind.RUNTIME,
    "driver": Kind.RUNTIME,
    "hpu_op": Kind.RUNTIME,
    "kernel": Kind.KERNEL,
    "concurrent_kernel": Kind.KERNEL,
    "mtia_ccp_events": Kind.KERNEL,
    "memcpy": Kind.MEMCPY,
    "memset": Kind.MEMSET,
    "gpu_user_annotation": Kind.DEVICE_ANNOTATION,
    "overhead": Kind.OVERHEAD,
}
"""In lower case. Kineto also writes categories that are deliberately not listed: ``Trace`` (the span of the whole
trace), ``cuda_profiler_range`` and ``xpu_scope_profiler`` (kernels again, with counters), ``cuda_event`` (a record, not
a wait), ``collective_comm`` (collectives again), ``mtia_insight``, ``mtia_counters``, ``external_correlation``.
"""
ENDINGS: Final = {
    "_runtime": Kind.RUNTIME,
    "_driver": Kind.RUNTIME,
    "_memcpy": Kind.MEMCPY,
    "_memset": Kind.MEMSET,
    "_kernel": Kind.KERNEL,
    "_sync": Kind.SYNC,
}
"""Every vendor has a prefix: ``cuda_``, ``gpu_``, ``hip_``, ``xpu_``, ``mtia_``, ``glow_``, ``privateuse1_`` …"""

HOST_KINDS: Final = (Kind.OP, Kind.ANNOTATION, Kind.PYTHON, Kind.RUNTIME)
DEVICE_WORK: Final = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
"""What keeps a device busy."""
DEVICE_KINDS: Final = (*DEVICE_WORK, Kind.SYNC, Kind.DEVICE_ANNOTATION)
LAUNCHING: Final = (Kind.RUNTIME,)
"""What may launch device work, by its correlation."""


def kind_of(category: str | None) -> Kind:
    name = (category or "").lower()
    known = CATEGORIES.get(name)
    if known is not None:
        return known
    return next((kind for ending, kind in ENDINGS.items() if name.endswith(ending)), Kind.OTHER)


# -- tables -----------------------------------------------------------------------------------------------------------

Ints = NDArray[np.int64]
Rows = NDArray[np.int32]
"""Indices into the slices; −1: none."""
Codes = NDArray[np.int32]
"""Indices into ``Trace.strings``; −1: none."""
Reals = NDArray[np.float32]
"""NaN: unknown."""


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A line of the timeline: a host thread, or the entry that represents a stream."""

    pid: int | str
    tid: int | str
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class TraceMeta:
    path: str
    """For messages."""
    format: str = "kineto"
    """``kineto`` or ``nsight``."""
    rank: int | None = None
    """From the file's content; ``job.py`` also knows names like ``rank_3.json``."""
    world_size: int | None = None
    backend: str | None = None
    host: str | None = None
    pid: int | None = None
    """The traced process."""
    origin_ns: int = 0
    length_ns: int = 0
    """From the origin to the end of the last slice."""
    devices: tuple[dict[str, Any], ...] = ()
    """``deviceProperties``: name, totalGlobalMem, numSms, computeMajor …"""
    groups: tuple[dict[str, Any], ...] = ()
    """``distributedInfo.pg_config``: pg_name, pg_desc, ranks …"""
    with_stack: bool = False
    record_shapes: bool = False
    profile_memory: bool = False
    read_events: int = 0
    """Number of events in the file, of all kinds."""
    truncated: str | None = None
    """Why the file ends early; None if it is complete."""
    problems: tuple[str, ...] = ()
    """One line each: what was left out or repaired."""


@dataclass(frozen=True, kw_only=True)
class Slices:
    start_ns: Ints
    dur_ns: Ints
    """Never negative."""
    kind: NDArray[np.uint8]
    """``Kind``."""
    name: Codes
    thread: NDArray[np.int32]
    """Index into ``Trace.threads``."""
    device: NDArray[np.int16]
    """−1: on the host."""
    stream: NDArray[np.int32]
    """−1: on the host; for a synchronization: all streams."""
    correlation: Ints
    """Links device work to the call that launched it; −1: none."""
    external: Ints
    """``External id``: links device work and runtime calls to operators; −1: none."""

    def __len__(self) -> int:
        return len(self.start_ns)

    @cached_property
    def end_ns(self) -> Ints:
        return self.start_ns + self.dur_ns


@dataclass(frozen=True, kw_only=True)
class Ops:
    """Operators (and annotations) with details besides the name."""

    row: Rows
    dims: Codes
    """``Input Dims`` as JSON text."""
    types: Codes
    """``Input type`` as JSON text."""
    concrete: Codes
    """``Concrete Inputs`` as JSON text; only for convolutions and attention, whose FLOPs depend on them."""
    stack: Codes
    """``Call stack``: frames separated by ``;``, the innermost first."""
    module: Codes
    """``Module Hierarchy``."""
    sequence: Ints
    """``Sequence number``: links forward operators to autograd's; −1: none."""
    forward_thread: Ints
    """``Fwd thread id``: 0 or missing (−1) in forward; otherwise the operator is autograd's."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    row: Rows
    occupancy: Reals
    """``est. achieved occupancy %``, 0 to 100."""
    blocks_per_sm: Reals
    warps_per_sm: Reals
    registers: Ints
    """Per thread; −1: unknown, as below."""
    shared_bytes: Ints
    """Shared memory of a block."""
    graph: Ints
    """``graph id`` of a kernel in a CUDA graph; −1: none."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies and memsets."""

    row: Rows
    bytes: Ints


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Slices on the host or the device that describe their collective."""

    row: Rows
    op: Codes
    group: Codes
    """``Process Group Name``."""
    description: Codes
    """``Process Group Description``: the name given by the user (``fsdp_dp`` …)."""
    ranks: Codes
    """``Process Group Ranks`` as JSON text."""
    size: Ints
    """``Group size``; −1: unknown, as in all below."""
    sequence: Ints
    """``Seq``."""
    in_elements: Ints
    out_elements: Ints
    dtype: Codes


@dataclass(frozen=True, kw_only=True)
class Syncs:
    """What device-side waits (``Kind.SYNC``) wait for."""

    row: Rows
    on_stream: Ints
    """The awaited stream; −1: none or all."""
    record_correlation: Ints
    """Correlation of the awaited ``cudaEventRecord``; −1: unknown."""


@dataclass(frozen=True, kw_only=True)
class Pythons:
    """Python functions; a module call is named ``nn.Module: Linear_0``."""

    row: Rows
    id: Ints
    parent: Ints
    module: Ints
    """``Python module id``; −1: not a module."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The allocator's events, by time: not slices, so without ``row``."""

    time_ns: Ints
    thread: NDArray[np.int32]
    device_type: NDArray[np.int16]
    """0: host, 1: CUDA."""
    device: NDArray[np.int16]
    bytes: Ints
    """Negative: freed."""
    allocated: Ints
    """Total after the event; −1: unknown."""
    reserved: Ints
    address: Ints
    """Address of the block: links deallocations to allocations; −1: unknown."""


@dataclass(frozen=True, kw_only=True)
class Flows:
    """Arrows from forward to backward operators: thread and time of both ends."""

    from_thread: NDArray[np.int32]
    from_ns: Ints
    to_thread: NDArray[np.int32]
    to_ns: Ints


@dataclass(frozen=True, kw_only=True)
class Trace:
    meta: TraceMeta
    strings: list[str]
    threads: list[Thread]
    slices: Slices
    ops: Ops
    kernels: Kernels
    copies: Copies
    collectives: Collectives
    syncs: Syncs
    pythons: Pythons
    memory: Memory
    flows: Flows

    def __len__(self) -> int:
        return len(self.slices)

    def text(self, code: int) -> str:
        return self.strings[code] if code >= 0 else ""

    def name(self, row: int) -> str:
        return self.strings[int(self.slices.name[row])]

    def rows_of(self, kinds: Iterable[Kind]) -> Rows:
        """Return the rows of some kinds, ascending and therefore sorted by start."""
        return np.flatnonzero(self.is_of(kinds)).astype(np.int32)

    def is_of(self, kinds: Iterable[Kind]) -> NDArray[np.bool_]:
        """Return which slices are of some kinds, [slices]; comparisons of bytes, many times faster than a lookup."""
        found = np.zeros(len(self), bool)
        for kind in kinds:
            found |= self.slices.kind == int(kind)
        return found

    @cached_property
    def host_rows(self) -> Rows:
        return self.rows_of(HOST_KINDS)

    @cached_property
    def device_rows(self) -> Rows:
        """Kernels, copies and memsets: what keeps a device busy."""
        return self.rows_of(DEVICE_WORK)

    def names_where(self, matches: Callable[[str], object]) -> NDArray[np.bool_]:
        """Return which slice names satisfy ``matches(name)``, to be indexed with their codes; [strings].

        Strings that are not names (shapes, stacks) are skipped. Results for functions and patterns are cached.
        """
        known = self._answers.get(matches)
        if known is None:
            known = np.zeros(len(self.strings), bool)
            names = map(self.strings.__getitem__, self._names)
            if getattr(matches, "__name__", "") == "<lambda>":
                known[self._names] = [bool(matches(name)) for name in names]
            else:
                known[self._names] = [_matches(matches, name) for name in names]
                self._answers[matches] = known
        return known

    @cached_property
    def _names(self) -> list[int]:
        """Codes of strings that are names of slices."""
        used: list[int] = np.flatnonzero(np.bincount(self.slices.name, minlength=len(self.strings))).tolist()
        return used

    @cached_property
    def _answers(self) -> dict[Any, NDArray[np.bool_]]:
        return {}


@functools.lru_cache(maxsize=1 << 16)
def _matches(matches: Callable[[str], object], name: str) -> bool:
    """Test a name; the traces of a job's ranks have the same ones."""
    return bool(matches(name))


def side_columns(table: Any) -> dict[str, NDArray[Any]]:
    """Return the columns of slices or of a side table by name."""
    return {each.name: getattr(table, each.name) for each in fields(table)}


# -- builder ----------------------------------------------------------------------------------------------------------
# Columns that grow piece by piece and become a trace at the end; every reader writes into it.

Key = TypeVar("Key", bound=Hashable)

DTYPES: dict[str, Any] = {
    # column: type; all others are int64
    "kind": np.uint8,
    "name": np.int32,
    "thread": np.int32,
    "device": np.int16,
    "stream": np.int32,
    "row": np.int32,
    "dims": np.int32,
    "types": np.int32,
    "concrete": np.int32,
    "stack": np.int32,
    "occupancy": np.float32,
    "blocks_per_sm": np.float32,
    "warps_per_sm": np.float32,
    "op": np.int32,
    "group": np.int32,
    "description": np.int32,
    "ranks": np.int32,
    "dtype": np.int32,
    "device_type": np.int16,
    "from_thread": np.int32,
    "to_thread": np.int32,
}
TABLES: dict[str, Any] = {
    "slices": Slices,
    "ops": Ops,
    "kernels": Kernels,
    "copies": Copies,
    "collectives": Collectives,
    "syncs": Syncs,
    "pythons": Pythons,
    "memory": Memory,
    "flows": Flows,
}
ROW_TABLES = ("ops", "kernels", "copies", "collectives", "syncs", "pythons")
STRING_COLUMNS = {("ops", "module")}
"""Columns of codes whose name is a number in other tables."""


class Numbering(dict[Key, int]):
    """Numbers its keys in the order of first access."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_in_order: list[Key] = []

    def __missing__(self, key: Key) -> int:
        number = self[key] = len(self)
        self.keys_in_order.append(key)
        return number


def dtype_of(table: str, column: str) -> Any:
    return np.int32 if (table, column) in STRING_COLUMNS else DTYPES.get(column, np.int64)


class TraceBuilder:
    """``add`` pieces of each table, then ``build``; ``row`` of a side table counts slices in the order added."""

    def __init__(self) -> None:
        self.strings: Numbering[str] = Numbering()
        self.threads: Numbering[tuple[int | str, int | str]] = Numbering()
        self.thread_names: dict[tuple[int | str, int | str], str] = {}
        self.count = 0
        """Number of slices so far."""
        self._pieces: dict[str, list[dict[str, NDArray[Any]]]] = {name: [] for name in TABLES}

    def add(self, table: str, **columns: Sequence[Any] | NDArray[Any]) -> None:
        """Append columns of equal length; all columns of the table are required."""
        piece = {name: np.asarray(values, dtype_of(table, name)) for name, values in columns.items()}
        self._pieces[table].append(piece)
        if table == "slices":
            self.count += len(piece["start_ns"])

    def build(self, meta: TraceMeta) -> Trace:
        """Sort everything and make times relative to the earliest; ``meta.origin_ns`` is what they counted from."""
        columns = {name: self._joined(name) for name in TABLES}
        slices = columns["slices"]
        first_ns = min((int(columns[t][c].min()) for t, c in TIMES if len(columns[t][c])), default=0)
        for table, column in TIMES:
            columns[table][column] -= first_ns
        self._one_number_per_thread(columns)
        order = _by_start(slices["start_ns"], slices["dur_ns"])
        columns["slices"] = {name: values[order] for name, values in slices.items()}
        now_at = np.empty(len(order), np.int32)
        now_at[order] = np.arange(len(order), dtype=np.int32)
        for name in ROW_TABLES:
            side = columns[name]
            row = now_at[side["row"]]
            by_row = np.argsort(row, kind="stable")
            columns[name] = {column: values[by_row] for column, values in side.items()} | {"row": row[by_row]}
        memory = columns["memory"]
        by_time = np.argsort(memory["time_ns"], kind="stable")
        columns["memory"] = {column: values[by_time] for column, values in memory.items()}
        return Trace(
            meta=replace(meta, origin_ns=meta.origin_ns + first_ns),
            strings=self.strings.keys_in_order,
            threads=[
                Thread(pid=pid, tid=tid, name=self.thread_names.get((pid, tid), ""))
                for pid, tid in self.threads.keys_in_order
            ],
            **{name: TABLES[name](**columns[name]) for name in TABLES},
        )

    def _one_number_per_thread(self, columns: dict[str, dict[str, NDArray[Any]]]) -> None:
        """Merge threads whose id is text in slices and a number in the allocator's events, as some writers do."""
        first: dict[tuple[str, str], int] = {}
        same = [first.setdefault((str(pid), str(tid)), at) for at, (pid, tid) in enumerate(self.threads)]
        if len(first) < len(same):
            for table, column in THREADS:
                columns[table][column] = np.array(same, np.int32)[columns[table][column]]

    def _joined(self, table: str) -> dict[str, NDArray[Any]]:
        """Concatenate all pieces of a table; pieces are freed column by column to limit memory."""
        pieces = self._pieces[table]
        out = {}
        for each in fields(TABLES[table]):
            parts = [piece.pop(each.name) for piece in pieces]
            out[each.name] = np.concatenate(parts) if parts else np.empty(0, dtype_of(table, each.name))
        return out


def _by_start(start_ns: Ints, dur_ns: Ints) -> NDArray[np.int64]:
    """Return the order by start, the longer first for equal starts, else as before.

    Files are nearly sorted by start, which makes that fast; durations, which are not, are compared only where needed.
    """
    order = np.argsort(start_ns, kind="stable")
    ordered = start_ns[order]
    equal = np.flatnonzero(ordered[1:] == ordered[:-1])
    tied = np.zeros(len(order), bool)
    tied[equal] = tied[equal + 1] = True
    at = np.flatnonzero(tied)
    rows = order[at]
    order[at] = rows[np.lexsort((-dur_ns[rows], start_ns[rows]))]
    return order


TIMES = (("slices", "start_ns"), ("memory", "time_ns"), ("flows", "from_ns"), ("flows", "to_ns"))
THREADS = (("slices", "thread"), ("memory", "thread"), ("flows", "from_thread"), ("flows", "to_thread"))


# -- names ------------------------------------------------------------------------------------------------------------


def named(trace: Trace, rows: Rows, matches: Callable[[str], Any]) -> NDArray[np.bool_]:
    """Return which rows have a name that satisfies ``matches``, [rows]; False for row −1."""
    if not len(rows):
        return np.zeros(0, bool)
    found = trace.names_where(matches)[trace.slices.name[rows].astype(np.intp)]
    found[rows < 0] = False
    return found

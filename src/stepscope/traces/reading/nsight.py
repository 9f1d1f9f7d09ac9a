"""Nsight Systems exports (``nsys export --type sqlite``) to columns, one trace per process that used a GPU.

NVTX ranges become operators, steps and collectives. Tables and columns vary with Nsight's versions: a missing one
counts as no data. Times are nanoseconds since the start of the recording. A process and a thread are packed into one
number: ``… pid·2²⁴ + tid``.

    CUPTI_ACTIVITY_KIND_KERNEL            kernels, by their full name
    CUPTI_ACTIVITY_KIND_GRAPH_TRACE       a whole CUDA graph (``--cuda-graph-trace=graph``), as one kernel
    CUPTI_ACTIVITY_KIND_MEMCPY, _MEMSET   copies, named as in Kineto's traces
    CUPTI_ACTIVITY_KIND_SYNCHRONIZATION   waits; the event they wait for is found in _CUDA_EVENT
    CUPTI_ACTIVITY_KIND_RUNTIME, _DRIVER  calls, without the version suffix of their names
    NVTX_EVENTS                           ranges: operators, steps, collectives and annotations (below)

The SQLite file is untrusted (``Database``).

The file is opened read-only and immutable, so its locks, journals and triggers are never used. Only tables with known
names are read, no views and no virtual tables, and only their stored columns, never generated ones. Every value is
cast, so text in a numeric column becomes a number. Damage detected by SQLite is a TraceError.
"""

from __future__ import annotations

import json
import re
import sqlite3
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from stepscope.errors import TraceError
from stepscope.records.text import count_text
from stepscope.traces.model.columns import Ints, Kind, Trace, TraceBuilder, TraceMeta
from stepscope.traces.model.kernel_names import is_communication

__all__ = ["Database", "read_nsight"]

# -- the SQLite file --------------------------------------------------------------------------------------------------

CHUNK: Final = 1 << 16
LONGEST_VALUE: Final = 64 << 20


class Database:
    """A read-only database.

    ``with Database(path) as database: database.numbers("TABLE", {"start": 0})``
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: dict[str, frozenset[str]] = {}
        try:
            self._connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
        except sqlite3.Error as error:
            raise self._damaged(error) from None

    def __enter__(self) -> Database:
        try:
            if sys.version_info >= (3, 11):
                self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
            self._connection.text_factory = lambda data: data.decode(errors="replace")
            for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
                self._connection.execute(f"PRAGMA {pragma}")
            found = self._connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
            self.tables = frozenset(
                name
                for name, sql in found
                if isinstance(sql, str) and not sql[:30].upper().startswith("CREATE VIRTUAL")
            )
        except (sqlite3.Error, ValueError, OverflowError) as error:
            self._connection.close()
            raise self._damaged(error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        if isinstance(error, (sqlite3.Error, ValueError, OverflowError)):
            raise self._damaged(error) from None

    def columns(self, table: str) -> frozenset[str]:
        """Return the stored columns; empty if there is no such table."""
        if table not in self._columns:
            found = self._connection.execute(f"PRAGMA table_info({table})") if table in self.tables else ()
            self._columns[table] = frozenset(str(row[1]) for row in found)
        return self._columns[table]

    def numbers(self, table: str, wanted: Mapping[str, int]) -> dict[str, Ints]:
        """Read integer columns; ``wanted`` maps names to the default for a missing value or column."""
        chunks = [numbers for numbers, _ in self.chunks(table, wanted, ())]
        joined = np.concatenate(chunks) if chunks else np.empty((0, len(wanted)), np.int64)
        return {name: np.ascontiguousarray(joined[:, at]) for at, name in enumerate(wanted)}

    def chunks(
        self, table: str, wanted: Mapping[str, int], texts: Sequence[str]
    ) -> Iterator[tuple[Ints, list[tuple[Any, ...]]]]:
        """Yield numbers [rows, wanted], and the texts (or bytes, or None) of each row."""
        there = self.columns(table)
        if not there:
            return
        numbers = [
            f'COALESCE(CAST("{name}" AS INTEGER), {missing})' if name in there else str(missing)
            for name, missing in wanted.items()
        ]
        others = [f'"{name}"' if name in there else "NULL" for name in texts]
        count = len(numbers)
        cursor = self._connection.execute(f"SELECT {', '.join([*numbers, *others])} FROM {table}")
        while others and (rows := cursor.fetchmany(CHUNK)):
            yield np.array([row[:count] for row in rows], np.int64), [row[count:] for row in rows]
        while not others:
            values = np.fromiter(chain.from_iterable(islice(cursor, CHUNK)), np.int64)
            if not len(values):
                return
            yield values.reshape(-1, count), []

    def pairs(self, table: str, key: str, value: str) -> dict[int, str]:
        """Read a table of names."""
        found: dict[int, str] = {}
        if {key, value} <= self.columns(table):
            for numbers, texts in self.chunks(table, {key: -1}, [value]):
                found.update(zip(numbers[:, 0].tolist(), (str(text[0] or "") for text in texts), strict=True))
        return found

    def records(self, table: str, limit: int = 4096) -> list[dict[str, Any]]:
        """Read the first rows of a small table."""
        names = sorted(self.columns(table))
        if not names:
            return []
        columns = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}"' for name in names)
        rows = self._connection.execute(f"SELECT {columns} FROM {table} LIMIT {limit}").fetchall()
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _damaged(self, error: BaseException) -> TraceError:
        return TraceError(f"{self._path} is not a readable SQLite database: {' '.join(str(error).split())}")


# -- NVTX ranges ------------------------------------------------------------------------------------------------------
# NVTX ranges are annotations, except for operators, steps and collectives:
#
# - *Operators*: what ``torch.autograd.profiler.emit_nvtx`` writes, ``aten::mm, seq = 3, op_id = 7, sizes = [[2, 2]]``.
# - *Steps*: ranges named ``ProfilerStep#N``. Without them, ranges named by one of ``STEP_WORDS`` and a number
#   (``iteration 12``, ``step_3``): those of the most frequent word with at least two ranges and no overlap. They are
#   renamed to ``ProfilerStep#N`` with their own numbers, or counted if a number occurs twice.
# - *Collectives*: NCCL calls, which carry their communicator and size as a payload, in JSON or in bytes whose layout is
#   in NVTX_PAYLOAD_SCHEMA_ENTRIES. An NCCL kernel belongs to those calls of its thread that began after the previous
#   launch and up to its own; the bytes of several calls (a group) are added up.
#
# Marks and ranges that were never closed are left out; the latter are counted.

PUSH_POP, START_END = 59, 60
RANGE_COLUMNS: Final = {"start": 0, "end": -1, "eventType": PUSH_POP, "globalTid": -1, "textId": -1, "jsonTextId": -1}
TEXTS: Final = ("text", "jsonText", "binaryData")
OPERATOR: Final = re.compile(
    r"^(?P<name>[^,]+)(?:, seq = (?P<seq>\d{1,18})\b)?(?:, op_id = \d+)?(?:, sizes = (?P<sizes>\[.*?\])(?=, [a-z]|$))?"
)
OPERATOR_MARKS: Final = (", seq = ", ", op_id = ")
STEP_WORDS: Final = ("iteration", "iter", "step", "train_step", "training_step", "global_step", r"stepscope\.step")
STEP: Final = re.compile(rf"^({'|'.join(STEP_WORDS)})\s*[ _#:=-]?\s*(\d{{1,15}})$", re.IGNORECASE)
PROFILER_STEP: Final = re.compile(r"^ProfilerStep\s*#?\s*\d+")
COMMUNICATOR, SIZE, RANKS, RANK = "NCCL communicator ID", "Message size [bytes]", "No. of ranks", "Rank"
HEADER: Final = struct.Struct("<IIIIQQ")
"""Before a payload's bytes: domain, –, schema, –, payload length, total length."""
ENTRY_FORMATS: Final = {
    5: "<I", 6: "<I", 7: "<Q", 8: "<Q", 9: "<Q", 10: "<Q", 15: "<I", 16: "<I", 17: "<Q", 18: "<Q", 22: "<Q"
}  # fmt: skip
"""NVTX's integer types; none of the values read is ever negative."""
MOST: Final = 1 << 62
GATHERED: Final = ("allgather", "gather")
SCATTERED: Final = ("reducescatter", "scatter")
EXCHANGED: Final = "alltoall"
"""NCCL reports the part for one peer."""


@dataclass(kw_only=True)
class Ranges:
    start_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    end_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    thread: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Packed, as in the file."""
    names: list[str] = field(default_factory=list)
    payloads: list[dict[str, int] | None] = field(default_factory=list)
    open: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """1: never closed."""

    def of(self, rows: Ints) -> Ranges:
        """Select rows; ``rows`` is ascending."""
        if len(rows) == len(self.names):
            return self
        chosen = rows.tolist()
        return Ranges(
            start_ns=self.start_ns[rows],
            end_ns=self.end_ns[rows],
            thread=self.thread[rows],
            names=[self.names[row] for row in chosen],
            payloads=[self.payloads[row] for row in chosen],
            open=self.open[rows],
        )


@dataclass(frozen=True, kw_only=True)
class AboutRanges:
    rank: int | None = None
    """In the largest communicator that was created during the recording."""
    world_size: int | None = None
    skipped: int = 0
    problems: tuple[str, ...] = ()


def read_ranges(database: Database, strings: Mapping[int, str]) -> Ranges:
    """Read the ranges of all processes."""
    layouts = _layouts(database)
    numbers: list[Ints] = []
    names: list[str] = []
    payloads: list[dict[str, int] | None] = []
    for chunk, texts in database.chunks("NVTX_EVENTS", RANGE_COLUMNS, TEXTS):
        chosen = np.flatnonzero(np.isin(chunk[:, 2], (PUSH_POP, START_END)))
        numbers.append(chunk[chosen])
        for at in chosen.tolist():
            text, json_text, data = texts[at]
            named = text if isinstance(text, str) else strings.get(int(chunk[at, 4]), "")
            names.append(named)
            payload = json_text if isinstance(json_text, str) else strings.get(int(chunk[at, 5]))
            payloads.append(_payload(payload, data, layouts) if payload or data else None)
    all_numbers = np.concatenate(numbers) if numbers else np.empty((0, len(RANGE_COLUMNS)), np.int64)
    start_ns, end_ns = all_numbers[:, 0], all_numbers[:, 1]
    return Ranges(
        start_ns=start_ns,
        end_ns=end_ns,
        thread=all_numbers[:, 3],
        names=names,
        payloads=payloads,
        open=((end_ns < start_ns) & (end_ns <= 0)).astype(np.int64),
    )


def add_ranges(builder: TraceBuilder, ranges: Ranges, launched: Mapping[str, Ints]) -> AboutRanges:
    """Add the ranges to the trace of one process.

    ``launched``: its calls (``call``, ``call_thread``, ``call_start_ns``) and kernels (``kernel``: correlation,
    ``kernel_row``, ``kernel_name``: code).
    """
    closed = np.flatnonzero(ranges.open == 0)
    skipped = len(ranges.names) - len(closed)
    ranges = ranges.of(closed)
    problems = [f"left out {count_text(skipped, 'NVTX range')} that never ended"] if skipped else []
    steps = _steps(ranges)
    if steps:
        problems.append(f"{len(steps)} NVTX ranges like {ranges.names[min(steps)]!r} are taken as steps")
    rank, world_size, sizes = _communicators(ranges)
    if len(closed):
        first = _slices(builder, ranges, steps)
        _collectives(builder, ranges, sizes, launched, first)
    return AboutRanges(rank=rank, world_size=world_size, skipped=skipped, problems=tuple(problems))


def _slices(builder: TraceBuilder, ranges: Ranges, steps: Mapping[int, str]) -> int:
    count, first = len(ranges.names), builder.count
    kinds = np.full(count, int(Kind.ANNOTATION))
    codes, ops = [], []
    for row, name in enumerate(ranges.names):
        shown = steps.get(row, name)
        found = OPERATOR.match(name) if any(mark in name for mark in OPERATOR_MARKS) else None
        if found:
            shown = found["name"]
            kinds[row] = int(Kind.OP)
            sizes = builder.strings[found["sizes"]] if found["sizes"] else -1
            ops.append((first + row, sizes, int(found["seq"] or -1)))
        codes.append(builder.strings[shown])
    pids, tids = (ranges.thread >> 24 & 0xFFFFFF).tolist(), (ranges.thread & 0xFFFFFF).tolist()
    nothing = np.full(count, -1)
    builder.add(
        "slices",
        start_ns=ranges.start_ns,
        dur_ns=np.maximum(ranges.end_ns - ranges.start_ns, 0),
        kind=kinds,
        name=codes,
        thread=[builder.threads[pid, tid] for pid, tid in zip(pids, tids, strict=True)],
        device=nothing,
        stream=nothing,
        correlation=nothing,
        external=nothing,
    )
    if ops:
        missing = np.full(len(ops), -1)
        builder.add(
            "ops",
            row=[row for row, _, _ in ops],
            dims=[sizes for _, sizes, _ in ops],
            types=missing,
            concrete=missing,
            stack=missing,
            module=missing,
            sequence=[sequence for _, _, sequence in ops],
            forward_thread=missing,
        )
    return first


def _steps(ranges: Ranges) -> dict[int, str]:
    """Map rows to their names as profiler steps."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row, name in enumerate(ranges.names):
        if PROFILER_STEP.match(name):
            return {}
        step = STEP.match(name)
        if step:
            found.setdefault(step[1].lower(), []).append((row, int(step[2])))
    for rows in sorted(found.values(), key=len, reverse=True):
        by_time = sorted(rows, key=lambda each: int(ranges.start_ns[each[0]]))
        order = np.array([row for row, _ in by_time])
        if len(order) < 2 or (ranges.start_ns[order][1:] < ranges.end_ns[order][:-1]).any():
            continue
        once = len({number for _, number in by_time}) == len(by_time)
        return {row: f"ProfilerStep#{number if once else place}" for place, (row, number) in enumerate(by_time)}
    return {}


def _communicators(ranges: Ranges) -> tuple[int | None, int | None, dict[int, int]]:
    """Return rank and size of the largest communicator, and the size of each."""
    rank = world_size = None
    sizes: dict[int, int] = {}
    for payload in ranges.payloads:
        if not payload or COMMUNICATOR not in payload or payload.get(RANKS, 0) <= 0:
            continue
        sizes[payload[COMMUNICATOR]] = payload[RANKS]
        if world_size is None or payload[RANKS] > world_size:
            world_size, rank = payload[RANKS], payload.get(RANK)
    return rank, world_size, sizes


def _collectives(
    builder: TraceBuilder, ranges: Ranges, sizes: Mapping[int, int], launched: Mapping[str, Ints], first: int
) -> None:
    described = [
        row for row, payload in enumerate(ranges.payloads) if payload and COMMUNICATOR in payload and SIZE in payload
    ]
    rows = [(first + row, *_description(ranges.names[row], [ranges.payloads[row] or {}], sizes)) for row in described]
    for kernel_row, calls in _kernels_of(builder, ranges, described, launched).items():
        names = {ranges.names[row] for row in calls}
        payloads = [ranges.payloads[row] or {} for row in calls]
        rows.append((kernel_row, *_description(names.pop() if len(names) == 1 else "coalesced", payloads, sizes)))
    if rows:
        none = np.full(len(rows), -1)
        builder.add(
            "collectives",
            row=[row[0] for row in rows],
            op=[builder.strings[row[1]] for row in rows],
            group=[builder.strings[row[2]] for row in rows],
            description=none,
            ranks=none,
            size=[row[3] for row in rows],
            sequence=none,
            in_elements=[row[4] for row in rows],
            out_elements=[row[5] for row in rows],
            dtype=np.full(len(rows), builder.strings["Byte"]),
        )


def _description(
    name: str, payloads: Sequence[Mapping[str, int]], sizes: Mapping[int, int]
) -> tuple[str, str, int, int, int]:
    """Return operation, group, group size, bytes in and bytes out."""
    operation = re.sub(r"^p?nccl", "", name).lower()
    group = payloads[0][COMMUNICATOR]
    size = min(sizes.get(group, -1), MOST)
    sent = min(sum(payload[SIZE] for payload in payloads), MOST)
    whole = min(sent * size, MOST) if size > 0 else -1
    if operation in GATHERED:
        return operation, str(group), size, sent, whole
    if operation in SCATTERED:
        return operation, str(group), size, whole, sent
    if operation == EXCHANGED:
        return operation, str(group), size, whole, whole
    return operation, str(group), size, sent, sent


def _kernels_of(
    builder: TraceBuilder, ranges: Ranges, described: Sequence[int], launched: Mapping[str, Ints]
) -> dict[int, list[int]]:
    """Map the rows of kernels to the NCCL calls that they execute."""
    if not described or "kernel" not in launched or "call" not in launched:
        return {}
    communicates = np.array([is_communication(name) for name in builder.strings], bool)
    chosen = communicates[launched["kernel_name"]]
    row_of = dict(zip(launched["kernel"][chosen].tolist(), launched["kernel_row"][chosen].tolist(), strict=True))
    is_launch = np.isin(launched["call"], np.fromiter(row_of, np.int64, len(row_of)))
    found: dict[int, list[int]] = {}
    threads = ranges.thread & 0xFFFFFF
    by_thread: dict[int, list[int]] = {}
    for row in described:
        by_thread.setdefault(int(threads[row]), []).append(row)
    launches = np.flatnonzero(is_launch)
    launches = launches[np.lexsort((launched["call_start_ns"][launches], launched["call_thread"][launches]))]
    callers = launched["call_thread"][launches]
    for thread, rows in by_thread.items():
        own = launches[np.searchsorted(callers, thread) : np.searchsorted(callers, thread, side="right")]
        after = np.searchsorted(launched["call_start_ns"][own], ranges.start_ns[rows])
        for row, at in zip(rows, after.tolist(), strict=True):
            if at < len(own):
                found.setdefault(row_of[int(launched["call"][own[at]])], []).append(row)
    return found


def _layouts(database: Database) -> dict[int, list[tuple[str, int, str]]]:
    """Map schema numbers to name, offset and format of their integers."""
    layouts: dict[int, list[tuple[str, int, str]]] = {}
    for entry in database.records("NVTX_PAYLOAD_SCHEMA_ENTRIES"):
        schema, name, offset = entry.get("schemaId"), entry.get("name"), entry.get("offset") or 0
        form = ENTRY_FORMATS.get(entry["type"]) if isinstance(entry.get("type"), int) else None
        if isinstance(schema, int) and isinstance(name, str) and isinstance(offset, int) and form and offset >= 0:
            layouts.setdefault(schema, []).append((name, offset, form))
    return layouts


def _payload(
    text: str | None, data: Any, layouts: Mapping[int, Sequence[tuple[str, int, str]]]
) -> dict[str, int] | None:
    if text:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        return {name: value for name, value in found.items() if type(value) is int and 0 <= value < 1 << 64}
    if isinstance(data, str):
        try:
            data = bytes.fromhex(data)
        except ValueError:
            return None
    if not isinstance(data, bytes) or len(data) < HEADER.size:
        return None
    schema = HEADER.unpack_from(data)[2]
    out = {}
    for name, offset, form in layouts.get(schema, ()):
        if HEADER.size + offset + struct.calcsize(form) <= len(data):
            out[name] = struct.unpack_from(form, data, HEADER.size + offset)[0]
    return out


# -- activities and processes -----------------------------------------------------------------------------------------

Columns = Mapping[str, Ints]

PREFIX: Final = "CUPTI_ACTIVITY_KIND_"
ON_DEVICE: Final = {"start": 0, "end": 0, "deviceId": 0, "streamId": -1, "correlationId": -1, "globalPid": -1}
GRID: Final = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
ACTIVITY_COLUMNS: Final[dict[str, dict[str, int]]] = {
    "KERNEL": {
        **ON_DEVICE, "demangledName": -1, "shortName": -1, "graphId": -1, "graphNodeId": -1, **dict.fromkeys(GRID, -1)
    },
    "GRAPH_TRACE": {**ON_DEVICE, "graphId": -1},
    "MEMCPY": {**ON_DEVICE, "bytes": -1, "copyKind": 0, "srcKind": 7, "dstKind": 7},
    "MEMSET": {**ON_DEVICE, "bytes": -1, "memKind": 7},
    "SYNCHRONIZATION": {**ON_DEVICE, "syncType": 0, "eventId": -1, "eventSyncId": -1, "contextId": -1},
    "RUNTIME": {"start": 0, "end": 0, "globalTid": -1, "correlationId": -1, "nameId": -1},
    "DRIVER": {"start": 0, "end": 0, "globalTid": -1, "correlationId": -1, "nameId": -1},
    "CUDA_EVENT": {
        "streamId": -1, "correlationId": -1, "globalPid": -1, "eventId": -1, "eventSyncId": -1, "contextId": -1
    },
}  # fmt: skip
WORK: Final = ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET")
COPY_KINDS: Final = dict(enumerate(
    ("?", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "HtoD", "DtoH", "DtoD")
))  # fmt: skip
"""The last three: unified memory."""
MEMORY_KINDS: Final = dict(
    enumerate(("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown"))
)
SYNC_KINDS: Final = dict(enumerate(("Unknown", "Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")))
STREAM_WAIT: Final = 2
DEVICE_FACTS: Final = {
    "totalMemory": "totalGlobalMem", "smCount": "numSms", "threadsPerWarp": "warpSize", "computeMajor": "computeMajor",
    "computeMinor": "computeMinor", "maxRegistersPerSm": "regsPerMultiprocessor", "clockRate": "clockRate",
    "maxShmemPerSm": "sharedMemPerMultiprocessor", "memoryBandwidth": "memoryBandwidth",
}  # fmt: skip
"""Column of TARGET_INFO_GPU → Kineto's name."""
VERSION: Final = re.compile(r"_v\d+(_pt[sd][zs])?$")
PID_SHIFT: Final = 24
PID_MASK: Final = (1 << 24) - 1
MOST_PROCESSES: Final = 1024


def read_nsight(path: Path) -> list[Trace]:
    """Read one trace per process; processes without GPU work are left out and mentioned in the problems."""
    with Database(path) as database:
        if not any(PREFIX + name in database.tables for name in WORK):
            raise TraceError(f"{path} contains no GPU work: was it recorded with --trace=cuda?")
        report = _Report(database)
        if not report.pids:
            raise TraceError(f"{path} contains no GPU work")
        if len(report.pids) > MOST_PROCESSES:
            raise TraceError(f"{path} has {len(report.pids):,} processes; at most {MOST_PROCESSES:,} can be read")
        return [_trace(report, pid, str(path)) for pid in report.pids]


class _Report:
    """Everything read from the database, by process."""

    def __init__(self, database: Database) -> None:
        self.strings = database.pairs("StringIds", "id", "value")
        tables = {name: database.numbers(PREFIX + name, wanted) for name, wanted in ACTIVITY_COLUMNS.items()}
        only = _only_process(tables)
        self.tables = {name: _by_process(columns, only) for name, columns in tables.items()}
        ranges = read_ranges(database, self.strings)
        self.ranges = {pid: ranges.of(rows) for pid, rows in _rows_of(_pids(ranges.thread)).items()}
        self.pids = sorted({pid for name in WORK for pid in self.tables[name]})
        self.without_work = sorted({*self.tables["RUNTIME"], *self.ranges} - set(self.pids))
        names = database.numbers("ThreadNames", {"globalTid": -1, "nameId": -1})
        self.thread_names = dict(zip(names["globalTid"].tolist(), names["nameId"].tolist(), strict=True))
        self.gpus = database.records("TARGET_INFO_GPU")
        self.cuda_devices = database.records("TARGET_INFO_CUDA_DEVICE")
        started = database.numbers("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": 0})["utcEpochNs"]
        self.origin_ns = int(started[0]) if len(started) else 0
        ranks = database.numbers("MPI_RANKS", {"globalTid": -1, "rank": -1})
        self.ranks = dict(zip(_pids(ranks["globalTid"]).tolist(), ranks["rank"].tolist(), strict=True))
        facts = database.records("TARGET_INFO_SYSTEM_ENV")
        self.host = next((str(fact.get("value")) for fact in facts if fact.get("name") == "Hostname"), None)

    def devices(self, pid: int) -> tuple[dict[str, Any], ...]:
        """Return the devices, numbered as the process sees them."""
        by_gpu = {gpu.get("id"): gpu for gpu in self.gpus}
        numbered = [(each.get("cudaId"), each.get("gpuId")) for each in self.cuda_devices if each.get("pid") == pid]
        numbered = numbered or [(gpu.get("cuDevice", gpu.get("id")), gpu.get("id")) for gpu in self.gpus]
        found = []
        for number, gpu in numbered:
            about = by_gpu.get(gpu, {})
            facts = {ours: about[theirs] for theirs, ours in DEVICE_FACTS.items() if isinstance(about.get(theirs), int)}
            found.append({"id": number, "name": about.get("name"), **facts})
        return tuple(each for each in found if isinstance(each["id"], int) and isinstance(each["name"], str))


def _trace(report: _Report, pid: int, path: str) -> Trace:
    process = _Process(report, pid)
    process.calls()
    process.kernels()
    process.copies()
    process.waits()
    ranges = report.ranges.pop(pid, Ranges())
    about = add_ranges(process.builder, ranges, process.launched)
    events = process.builder.count + about.skipped
    problems = list(about.problems)
    if process.negative:
        problems.append(f"{process.negative} events end before they start, counted as taking no time")
    if report.without_work and pid == report.pids[0]:
        left = ", ".join(map(str, report.without_work[:5])) + (" …" if len(report.without_work) > 5 else "")
        problems.append(f"processes without GPU work are left out: {left}")
    meta = TraceMeta(
        path=path,
        format="nsight",
        rank=report.ranks.get(pid, about.rank),
        world_size=about.world_size,
        backend="nccl" if about.world_size else None,
        host=report.host,
        pid=pid if pid >= 0 else None,
        origin_ns=report.origin_ns,
        devices=process.devices,
        read_events=events,
        problems=tuple(problems),
    )
    return process.builder.build(meta)


@dataclass
class _Process:
    report: _Report
    pid: int
    builder: TraceBuilder = field(default_factory=TraceBuilder)
    negative: int = 0
    launched: dict[str, Ints] = field(default_factory=dict)
    """Calls and kernels for the collectives, see ``add_ranges``."""

    def __post_init__(self) -> None:
        self.devices = self.report.devices(self.pid)
        for thread, name in self.report.thread_names.items():
            if thread >> PID_SHIFT & PID_MASK == self.pid and name in self.report.strings:
                key = (self.pid, thread & PID_MASK)
                self.builder.thread_names[key] = self.report.strings[name]

    def _take(self, table: str) -> Columns | None:
        """Remove the columns from the report, so that their memory can be freed after use."""
        return self.report.tables[table].pop(self.pid, None)

    def calls(self) -> None:
        for table in ("RUNTIME", "DRIVER"):
            columns = self._take(table)
            if columns is None:
                continue
            tids = columns["globalTid"] & PID_MASK
            threads = _coded(tids, lambda tid: self.builder.threads[self.pid, tid])
            names = self._names(columns["nameId"], without_version=True)
            self._slices(columns, Kind.RUNTIME, names, threads, on_device=False)
            if table == "RUNTIME":
                self.launched |= {
                    "call_thread": tids, "call_start_ns": columns["start"], "call": columns["correlationId"]
                }  # fmt: skip

    def kernels(self) -> None:
        columns = self._take("KERNEL")
        if columns is not None:
            ids = np.where(columns["demangledName"] >= 0, columns["demangledName"], columns["shortName"])
            names = self._names(ids)
            base = self._slices(columns, Kind.KERNEL, names)
            node = np.where(columns["graphNodeId"] > 0, columns["graphNodeId"] >> 32, -1)
            graph = np.where(columns["graphId"] > 0, columns["graphId"], node)
            self._kernel_facts(base, columns, graph)
            self.launched |= {"kernel": columns["correlationId"], "kernel_row": base, "kernel_name": names}
        graphs = self._take("GRAPH_TRACE")
        if graphs is not None:
            names = _coded(graphs["graphId"], lambda graph: self.builder.strings[f"CUDA graph {graph}"])
            base = self._slices(graphs, Kind.KERNEL, names)
            nothing = np.full(len(base), np.nan)
            self.builder.add(
                "kernels",
                row=base,
                occupancy=nothing,
                blocks_per_sm=nothing,
                warps_per_sm=nothing,
                registers=np.full(len(base), -1),
                shared_bytes=np.full(len(base), -1),
                graph=graphs["graphId"],
            )

    def _kernel_facts(self, base: Ints, columns: Columns, graph: Ints) -> None:
        sms = {each["id"]: each.get("numSms", 0) for each in self.devices}
        warp = {each["id"]: each.get("warpSize", 32) for each in self.devices}
        per = _coded(columns["deviceId"], lambda device: sms.get(device, 0)).astype(np.float64)
        size = _coded(columns["deviceId"], lambda device: warp.get(device, 32)).astype(np.float64)
        grid = columns["gridX"].astype(np.float64) * columns["gridY"] * columns["gridZ"]
        block = columns["blockX"].astype(np.float64) * columns["blockY"] * columns["blockZ"]
        known = (grid > 0) & (block > 0) & (per > 0) & (size > 0)
        blocks = np.divide(grid, per, out=np.full(len(grid), np.nan), where=known)
        warps = np.divide(blocks * block, size, out=np.full(len(grid), np.nan), where=known)
        nothing = np.full(len(base), np.nan)
        unknown = np.full(len(base), -1)
        self.builder.add(
            "kernels",
            row=base,
            occupancy=nothing,
            blocks_per_sm=blocks,
            warps_per_sm=warps,
            registers=unknown,
            shared_bytes=unknown,
            graph=graph,
        )

    def copies(self) -> None:
        columns = self._take("MEMCPY")
        if columns is not None:
            key = (columns["copyKind"] & 0xFF) << 16 | (columns["srcKind"] & 0xFF) << 8 | columns["dstKind"] & 0xFF
            names = _coded(key, lambda kinds: self.builder.strings[_copy_name(kinds)])
            base = self._slices(columns, Kind.MEMCPY, names)
            self.builder.add("copies", row=base, bytes=np.maximum(columns["bytes"], -1))
        columns = self._take("MEMSET")
        if columns is not None:
            names = _coded(
                columns["memKind"], lambda kind: self.builder.strings[f"Memset ({MEMORY_KINDS.get(kind, 'Unknown')})"]
            )
            base = self._slices(columns, Kind.MEMSET, names)
            self.builder.add("copies", row=base, bytes=np.maximum(columns["bytes"], -1))

    def waits(self) -> None:
        columns = self._take("SYNCHRONIZATION")
        if columns is None:
            return
        names = _coded(columns["syncType"], lambda kind: self.builder.strings[SYNC_KINDS.get(kind, "Unknown")])
        base = self._slices(columns, Kind.SYNC, names)
        records = self._take("CUDA_EVENT")
        record = np.full(len(base), -1, np.int64)
        on_stream = np.where(columns["syncType"] == STREAM_WAIT, -1, _streams(columns["streamId"]))
        if records is not None:
            at = _record_of(columns, records)
            record = np.where(at >= 0, records["correlationId"][at], -1)
            on_stream = np.where(at >= 0, _streams(records["streamId"])[at], on_stream)
        self.builder.add("syncs", row=base, on_stream=on_stream, record_correlation=record)

    def _slices(
        self, columns: Columns, kind: Kind, names: Ints, threads: Ints | None = None, *, on_device: bool = True
    ) -> Ints:
        """Add slices and return their rows."""
        count = len(columns["start"])
        base = self.builder.count
        dur_ns = columns["end"] - columns["start"]
        self.negative += int((dur_ns < 0).sum())
        device = np.clip(columns["deviceId"], 0, 1023) if on_device else np.full(count, -1)
        stream = _streams(columns["streamId"]) if on_device else np.full(count, -1)
        if threads is None:
            key = device << 32 | (stream & 0xFFFFFFFF)
            threads = _coded(key, lambda both: self.builder.threads[both >> 32, _signed(both & 0xFFFFFFFF)])
        self.builder.add(
            "slices",
            start_ns=columns["start"],
            dur_ns=np.maximum(dur_ns, 0),
            kind=np.full(count, int(kind)),
            name=names,
            thread=threads,
            device=device,
            stream=stream,
            correlation=np.maximum(columns["correlationId"], -1),
            external=np.full(count, -1),
        )
        return np.arange(base, base + count)

    def _names(self, ids: Ints, *, without_version: bool = False) -> Ints:
        def code(number: int) -> int:
            text = self.report.strings.get(number, f"({number})")
            return self.builder.strings[VERSION.sub("", text) if without_version else text]

        return _coded(ids, code)


def _coded(values: Ints, code: Any) -> Ints:
    """Apply ``code`` once to each distinct value, [n]."""
    different, at = np.unique(values, return_inverse=True)
    return np.array([code(value) for value in different.tolist()], np.int64)[at]


def _streams(values: Ints) -> Ints:
    """Replace CUPTI's 2³² − 1 (none, or all) by −1."""
    return np.where((values >= 0) & (values < 2**31 - 1), values, -1)


def _signed(stream: int) -> int:
    return stream - (1 << 32) if stream >= 1 << 31 else stream


def _copy_name(kinds: int) -> str:
    """Name a copy as Kineto does: ``Memcpy HtoD (Pageable -> Device)``."""
    copy = COPY_KINDS.get(kinds >> 16, "?")
    source, to = MEMORY_KINDS.get(kinds >> 8 & 0xFF, "Unknown"), MEMORY_KINDS.get(kinds & 0xFF, "Unknown")
    return f"Memcpy {copy} ({source} -> {to})"


def _record_of(waits: Columns, records: Columns) -> Ints:
    """Find the event record that each call waits for, [waits]: by number if it has one, else the last one before it."""
    at = np.full(len(waits["start"]), -1, np.int64)
    by_number = np.argsort(records["eventSyncId"], kind="stable")
    known = records["eventSyncId"][by_number]
    if len(known):
        place = np.minimum(np.searchsorted(known, waits["eventSyncId"]), len(known) - 1)
        found = (waits["eventSyncId"] >= 0) & (known[place] == waits["eventSyncId"])
        at[found] = by_number[place[found]]
        # (context, event) as one number, then the highest correlation below the wait's own.
        both = (
            np.concatenate([records["contextId"], waits["contextId"]]),
            np.concatenate([records["eventId"], waits["eventId"]]),
        )
        _, event = np.unique(np.stack(both), axis=1, return_inverse=True)
        event = event.reshape(-1)
        recorded, waited = event[: len(known)], event[len(known) :]
        order = np.lexsort((records["correlationId"], recorded))
        _, rank = np.unique(np.concatenate([records["correlationId"], waits["correlationId"]]), return_inverse=True)
        rank = rank.reshape(-1)
        width = int(rank.max()) + 1
        keys = recorded[order] * width + rank[: len(known)][order]
        place = np.searchsorted(keys, waited * width + rank[len(known) :]) - 1
        last = np.maximum(place, 0)
        found = (at < 0) & (waits["eventId"] > 0) & (place >= 0) & (recorded[order][last] == waited)
        at[found] = order[last[found]]
    return at


def _pids(packed: Ints) -> Ints:
    return np.where(packed >= 0, packed >> PID_SHIFT & PID_MASK, -1)


def _only_process(tables: Mapping[str, Columns]) -> int:
    """Return the process for work without one: the only process that made calls, else −1."""
    called = np.unique(_pids(tables["RUNTIME"]["globalTid"]))
    return int(called[0]) if len(called) == 1 else -1


def _by_process(columns: Columns, unknown: int) -> dict[int, dict[str, Ints]]:
    packed = columns["globalTid"] if "globalTid" in columns else columns["globalPid"]
    pids = _pids(packed)
    pids = np.where(pids < 0, unknown, pids)
    if len(pids) and (pids == pids[0]).all():
        return {int(pids[0]): dict(columns)}
    return {pid: {name: values[rows] for name, values in columns.items()} for pid, rows in _rows_of(pids).items()}


def _rows_of(pids: Ints) -> dict[int, Ints]:
    order = np.argsort(pids, kind="stable")
    different, starts = np.unique(pids[order], return_index=True)
    return dict(zip(different.tolist(), np.split(order, starts[1:]), strict=True)) if len(different) else {}

"""NVTX ranges of an export of Nsight Systems: phases, and among them operators, steps and collectives.

- *Operators*: what ``torch.autograd.profiler.emit_nvtx`` writes, ``aten::mm, seq = 3, op_id = 7, sizes = [[2, 2]]``.
- *Steps*: ranges named ``ProfilerStep#N``; where there are none, ranges named by one of ``STEP_WORDS`` and a number
  (``iteration 12``, ``step_3``), of the word that has most of them, at least two, none overlapping another.  They are
  then called ``ProfilerStep#N`` here, with their own numbers, or counted through where a number comes twice.
- *Collectives*: calls of NCCL, which carry their communicator and size as a payload, as JSON or as bytes whose layout
  stands in NVTX_PAYLOAD_SCHEMA_ENTRIES.  A kernel of NCCL belongs to those calls of its thread that began after the
  launch before it and up to its own; if it is several (a group), their bytes are added up.
- All others are annotations.  Marks and ranges that were never closed are left out, the latter counted.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Ints
from stepscope.traces.model.kernel_names import is_communication
from stepscope.traces.reading.builder import TraceBuilder
from stepscope.traces.reading.sqlite import Database

__all__ = ["AboutRanges", "Ranges", "add_ranges", "read_ranges"]

PUSH_POP, START_END = 59, 60
WANTED: Final = {"start": 0, "end": -1, "eventType": PUSH_POP, "globalTid": -1, "textId": -1, "jsonTextId": -1}
TEXTS: Final = ("text", "jsonText", "binaryData")
OPERATOR: Final = re.compile(
    r"^(?P<name>[^,]+)(?:, seq = (?P<seq>\d{1,18})\b)?(?:, op_id = \d+)?(?:, sizes = (?P<sizes>\[.*?\])(?=, [a-z]|$))?"
)
OPERATOR_MARKS: Final = (", seq = ", ", op_id = ")
STEP_WORDS: Final = ("iteration", "iter", "step", "train_step", "training_step", "global_step")
STEP: Final = re.compile(rf"^({'|'.join(STEP_WORDS)})\s*[ _#:=-]?\s*(\d{{1,15}})$", re.IGNORECASE)
PROFILER_STEP: Final = re.compile(r"^ProfilerStep\s*#?\s*\d+")
COMMUNICATOR, SIZE, RANKS, RANK = "NCCL communicator ID", "Message size [bytes]", "No. of ranks", "Rank"
HEADER: Final = struct.Struct("<IIIIQQ")
"""Before a payload's bytes: domain, –, schema, –, length of the payload, length in all."""
ENTRY_FORMATS: Final = {
    5: "<I", 6: "<I", 7: "<Q", 8: "<Q", 9: "<Q", 10: "<Q", 15: "<I", 16: "<I", 17: "<Q", 18: "<Q", 22: "<Q"
}  # fmt: skip
"""NVTX's types of whole numbers; none that is asked for is ever negative."""
MOST: Final = 1 << 62
GATHERED: Final = ("allgather", "gather")
SCATTERED: Final = ("reducescatter", "scatter")
EXCHANGED: Final = "alltoall"
"""What NCCL says of it is the part for one peer."""


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
        """Some of them; ``rows`` ascends."""
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
    """In the largest communicator that was set up during the recording."""
    world_size: int | None = None
    skipped: int = 0
    problems: tuple[str, ...] = ()


def read_ranges(database: Database, strings: Mapping[int, str]) -> Ranges:
    """Of all processes."""
    layouts = _layouts(database)
    numbers: list[Ints] = []
    names: list[str] = []
    payloads: list[dict[str, int] | None] = []
    for chunk, texts in database.chunks("NVTX_EVENTS", WANTED, TEXTS):
        kept = np.flatnonzero(np.isin(chunk[:, 2], (PUSH_POP, START_END)))
        numbers.append(chunk[kept])
        for at in kept.tolist():
            text, json_text, data = texts[at]
            named = text if isinstance(text, str) else strings.get(int(chunk[at, 4]), "")
            names.append(named)
            said = json_text if isinstance(json_text, str) else strings.get(int(chunk[at, 5]))
            payloads.append(_payload(said, data, layouts) if said or data else None)
    all_numbers = np.concatenate(numbers) if numbers else np.empty((0, len(WANTED)), np.int64)
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
    """Into one process's trace; ``launched``: its calls (``call``, ``call_thread``, ``call_start_ns``) and kernels
    (``kernel``: correlation, ``kernel_row``, ``kernel_name``: code)."""
    closed = np.flatnonzero(ranges.open == 0)
    skipped = len(ranges.names) - len(closed)
    ranges = ranges.of(closed)
    problems = [f"{skipped} NVTX ranges were never closed and are left out"] if skipped else []
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
    """By row: the name as a profiler's step."""
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
    """Rank and size of the largest, and the size of each."""
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
    said = [
        row for row, payload in enumerate(ranges.payloads) if payload and COMMUNICATOR in payload and SIZE in payload
    ]
    rows = [(first + row, *_said(ranges.names[row], [ranges.payloads[row] or {}], sizes)) for row in said]
    for kernel_row, calls in _kernels_of(builder, ranges, said, launched).items():
        names = {ranges.names[row] for row in calls}
        payloads = [ranges.payloads[row] or {} for row in calls]
        rows.append((kernel_row, *_said(names.pop() if len(names) == 1 else "coalesced", payloads, sizes)))
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


def _said(name: str, payloads: Sequence[Mapping[str, int]], sizes: Mapping[int, int]) -> tuple[str, str, int, int, int]:
    """Operation, group, its size, bytes in and out."""
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
    builder: TraceBuilder, ranges: Ranges, said: Sequence[int], launched: Mapping[str, Ints]
) -> dict[int, list[int]]:
    """By a kernel's row: the calls of NCCL that it does the work of."""
    if not said or "kernel" not in launched or "call" not in launched:
        return {}
    communicates = np.array([is_communication(name) for name in builder.strings], bool)
    chosen = communicates[launched["kernel_name"]]
    row_of = dict(zip(launched["kernel"][chosen].tolist(), launched["kernel_row"][chosen].tolist(), strict=True))
    is_launch = np.isin(launched["call"], np.fromiter(row_of, np.int64, len(row_of)))
    found: dict[int, list[int]] = {}
    threads = ranges.thread & 0xFFFFFF
    by_thread: dict[int, list[int]] = {}
    for row in said:
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
    """By a schema's number: name, offset and format of its whole numbers."""
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

"""From a dump of any version of torch to a ``Dump``: decoded plain data, or pickled entries scanned as bytes. Pure.

What changed between versions 1.x and 2.10: ``seq_id`` became ``collective_seq_id``, next to ``p2p_seq_id``; the group
was only a number (``pg_id``), then a name, then a name and a description; ``pg_config`` and ``pg_status`` were added;
sizes described one tensor, then all; ``nccl_version`` became ``comm_lib_version``; the JSON form has no frames and
writes counters as strings. The code does not depend on the version number: it uses what is present.

Pickles are untrusted: no code is run, memory and stack are bounded.

A pickle can do harm even without calling anything, so there are three protections. No name may be looked up
(``find_class`` refuses everything), so nothing can be imported or called. The kernel limits memory in proportion to the
size of the file (a few bytes can claim a memo of gigabytes). The stack is deep enough for tuples nested as deep as the
file has bytes, which Python hashes without checking the depth.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import pickletools
import re
import resource
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from stepscope.errors import DumpError
from stepscope.flight.dump import (
    DONE,
    P2P,
    RECORDERS,
    SCHEDULED,
    STARTED,
    Dump,
    GroupKey,
    Operation,
    Status,
    Trace,
    merged,
    operation_name,
    parse_ranks,
    peers_of,
    rank_or,
)
from stepscope.records.hang import Frame

__all__ = ["MAX_BYTES", "WORTH_A_SCAN", "PlainUnpickler", "decode_dump", "load_plain", "memory_bounded", "quick_dump"]

# -- untrusted pickles ------------------------------------------------------------------------------------------------

MAX_BYTES = 1 << 29
"""A ring of 2,000 entries with deep stacks takes about 10 MB."""
MEMORY_PER_BYTE = 48
"""An empty dictionary is one byte in a pickle and 64 in memory; dumps of torch take 4 to 8."""
MEMORY_AT_LEAST = 1 << 28
STACK_PER_BYTE = 224
STACK_AT_LEAST = 1 << 23
STACK_AT_MOST = 1 << 36
PAGE = 4096


class PlainUnpickler(pickle.Unpickler):
    """Refuses every name that a pickle requests."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"refers to {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("refers to an external object")


def load_plain(data: bytes) -> Any:
    """The dictionaries, lists, tuples, strings and numbers in a pickle; DumpError for anything else."""
    if len(data) > MAX_BYTES:
        raise DumpError(f"too large for a dump: {len(data)} bytes")
    answer: list[Any] = []
    failure: list[BaseException] = []

    def load() -> None:
        try:
            answer.append(PlainUnpickler(io.BytesIO(data)).load())
        # Damaged opcodes make the unpickler raise almost any exception.
        except (pickle.UnpicklingError, EOFError, MemoryError, RecursionError, OverflowError) as error:
            failure.append(error)
        except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
            failure.append(error)

    stack = min(max(len(data) * STACK_PER_BYTE, STACK_AT_LEAST), STACK_AT_MOST) // PAGE * PAGE
    with memory_bounded(len(data), stack):
        if len(data) * STACK_PER_BYTE <= STACK_AT_LEAST:
            load()
        else:
            _in_deep_thread(load, stack)
    if not answer:
        raise DumpError(f"not a pickle of plain data: {_failure_text(failure)}")
    return answer[0]


def _in_deep_thread(load: Any, stack: int) -> None:
    before = threading.stack_size(stack)
    try:
        thread = threading.Thread(target=load, name="stepscope-unpickle")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()


@contextlib.contextmanager
def memory_bounded(size: int, stack: int = 0) -> Iterator[None]:
    """Limit the growth of the process to what a dump of that size needs.

    There is no limit if the kernel does not report the size of the process.
    """
    extra = size * MEMORY_PER_BYTE + MEMORY_AT_LEAST + stack
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + extra
        wanted = limit if soft == resource.RLIM_INFINITY else min(limit, soft)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    except (OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _failure_text(failure: list[BaseException]) -> str:
    if not failure:
        return "no answer"
    text = str(failure[0]).split("\n")[0][:120]
    return text if isinstance(failure[0], pickle.UnpicklingError) and text else type(failure[0]).__name__


# -- builder ----------------------------------------------------------------------------------------------------------
# Builds a ``Dump``: takes entries one by one, makes columns and tables. The meaning of an entry (its group, its
# operation) is computed once for all entries that agree on it, as a ``Shape``; the rest of an entry is a few numbers.

MAX_TEXT = 4096
LARGEST = 1 << 62
MAX_FRAMES = 512

RawFrames = tuple[tuple[str, int, str], ...]

_OF_FRAME = itemgetter("filename", "line", "name")
COALESCED = "coalesced"
"""The entry for a batch of calls as a whole; only this entry has the state of the batch."""
_ENDS_WHEN_RETIRED = ("gloo:", "mpi:", "ucc:")


@dataclass(kw_only=True)
class Columns:
    """A ``Trace`` under construction."""

    sequences: array[int] = field(default_factory=lambda: array("q"))
    operations: array[int] = field(default_factory=lambda: array("l"))
    sites: array[int] = field(default_factory=lambda: array("l"))
    states: array[int] = field(default_factory=lambda: array("b"))
    created_ns: array[int] = field(default_factory=lambda: array("q"))
    p2p: list[P2P] = field(default_factory=list)
    mixed: bool = False

    def trace(self, status: Status | None) -> Trace:
        picked = [self.sequences, self.operations, self.sites, self.states, self.created_ns]
        if any(before > after for before, after in pairwise(self.sequences)):
            order = sorted(range(len(self.sequences)), key=self.sequences.__getitem__)
            picked = [array(column.typecode, (column[place] for place in order)) for column in picked]
        return Trace(
            sequences=picked[0],
            operations=picked[1],
            sites=picked[2],
            states=picked[3],
            created_ns=picked[4],
            p2p=tuple(self.p2p),
            mixed=self.mixed,
            status=status,
        )


class Shape(NamedTuple):
    """What entries with the same group and operation have in common."""

    columns: Columns
    operation: int
    peers: tuple[int, int, bool] | None
    p2p: bool
    retiring: bool
    """Whether the backend never reports more than ``scheduled``, and retires what ended (gloo)."""


class Common(NamedTuple):
    """What entries that differ only in their numbers have in common."""

    shape: Shape
    site: int
    state: int


class Builder:
    def __init__(self, described: Mapping[str, str]) -> None:
        self._described = described
        self._numbers: dict[Operation, int] = {}
        self._shapes: dict[object, Shape] = {}
        self._sites: dict[RawFrames, int] = {}
        self.operations: list[Operation] = []
        self.columns: dict[GroupKey, Columns] = {}
        self.local_ids: dict[int, GroupKey] = {}
        self.newest_ns = 0
        self.ids: list[int] = []

    @property
    def sites(self) -> tuple[RawFrames, ...]:
        return tuple(self._sites)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add an entry given as plain data."""
        shape = self.known_shape(row)
        sequence = row.get("collective_seq_id", row.get("seq_id"))
        record, p2p, op_id = row.get("record_id"), row.get("p2p_seq_id"), row.get("op_id")
        created = row.get("time_created_ns")
        plain = type(record) is type(sequence) is type(p2p) is type(op_id) is type(created) is int
        numbers: Any = (record, sequence, p2p, op_id, created)
        if not plain or max(numbers) >= LARGEST or min(numbers) <= -LARGEST:
            sequence = as_int(sequence, -1)
            record, p2p, created = as_int(record, -1), as_int(p2p, 0), as_int(created, 0)
            numbers = (record, sequence, p2p, as_int(op_id, sequence), created)
        ended, started = row.get("time_discovered_completed_ns"), row.get("time_discovered_started_ns")
        self.add(
            shape,
            self.site(row.get("frames")),
            numbers,
            row.get("state"),
            row.get("retired") is True,
            as_int(started, 0) if started is not None else 0,
            as_int(ended, 0) if ended is not None else 0,
        )

    def add(
        self,
        shape: Shape,
        site: int,
        numbers: tuple[int, int, int, int, int],
        state: object,
        retired: bool,
        started_ns: int,
        ended_ns: int,
    ) -> None:
        """Add an entry. ``numbers``: record ID, sequence number, that of sends and recvs, op ID, creation time."""
        record, sequence, p2p_sequence, op_id, created = numbers
        self.ids.append(record)
        if created > self.newest_ns or ended_ns > self.newest_ns:
            self.newest_ns = max(created, ended_ns)
        now = state_of(shape, state, retired=retired, started=started_ns > 0, ended=ended_ns > 0)
        into = shape.columns
        if shape.p2p or p2p_sequence > 0 or op_id != sequence:
            into.mixed = True
        if shape.p2p:
            if now != DONE and shape.peers is not None:
                self._add_p2p(shape, p2p_sequence, created)
            elif now == DONE and shape.peers is None:
                # Sends and recvs of a batch have no separate state: the batch ends, and it is recorded after them.
                into.p2p[:] = [call for call in into.p2p if call.sequence != p2p_sequence]
        elif sequence >= 0:
            if into.sequences and into.sequences[-1] == sequence:
                self._coalesce(into, shape.operation, now)
                return
            into.sequences.append(sequence)
            into.operations.append(shape.operation)
            into.sites.append(site)
            into.states.append(now)
            into.created_ns.append(created)

    def add_many(self, into: Columns, rows: Sequence[tuple[Common, tuple[int, ...]]]) -> bool:
        """Add entries of one group at once; False, without any change, if each entry needs a check."""
        numbers = [row for _, row in rows]
        sequences = [row[1] for row in numbers]
        latest = max(max(row[4], row[-1]) for row in numbers)
        odd = min(map(min, numbers)) < 0 or max(map(max, numbers)) >= LARGEST or any(0 in row[5:] for row in numbers)
        if odd or len(set(sequences)) < len(sequences) or into.sequences or any(entry.shape.p2p for entry, _ in rows):
            return False
        self.ids += [row[0] for row in numbers]
        self.newest_ns = max(self.newest_ns, latest)
        into.mixed = into.mixed or any(row[2] > 0 for row in numbers) or [row[3] for row in numbers] != sequences
        into.sequences.extend(sequences)
        into.operations.extend([common.shape.operation for common, _ in rows])
        into.sites.extend([common.site for common, _ in rows])
        into.states.extend([common.state for common, _ in rows])
        into.created_ns.extend([row[4] for row in numbers])
        return True

    def site(self, frames: Any) -> int:
        """The number of a call site; -1 if it is missing, or not in torch's format."""
        if not isinstance(frames, list | tuple) or not frames:
            return -1
        try:
            stack: RawFrames = tuple(map(_OF_FRAME, frames[:MAX_FRAMES]))
            known = self._sites.get(stack)
        except (KeyError, TypeError, IndexError):
            return -1
        if known is not None:
            return known
        if not all(type(file) is str and type(line) is int and type(name) is str for file, line, name in stack):
            return -1
        return self._sites.setdefault(stack, len(self._sites))

    def known_shape(self, row: Mapping[str, Any]) -> Shape:
        try:
            key = (
                tuple(row["process_group"]),
                row["pg_id"],
                row["profiling_name"],
                tuple(map(tuple, row["input_sizes"])),
                tuple(map(tuple, row["output_sizes"])),
                tuple(row["input_dtypes"]),
                tuple(row["output_dtypes"]),
                row["is_p2p"],
            )
            shape = self._shapes.get(key)
        except (KeyError, TypeError):
            return self.shape(row)
        if shape is None:
            shape = self._shapes[key] = self.shape(row)
        return shape

    def shape(self, row: Mapping[str, Any]) -> Shape:
        wording = as_text(row.get("profiling_name"))
        peers = peers_of(wording)
        return Shape(
            columns=self.columns.setdefault(self._group_of(row), Columns()),
            operation=self._operation(row, wording),
            peers=peers,
            p2p=peers is not None or row.get("is_p2p") is True,
            retiring=wording.startswith(_ENDS_WHEN_RETIRED),
        )

    def _add_p2p(self, shape: Shape, sequence: int, created: int) -> None:
        assert shape.peers is not None
        source, target, sending = shape.peers
        shape.columns.p2p.append(
            P2P(
                source=source,
                target=target,
                sending=sending,
                sequence=sequence,
                created_ns=created,
                operation=self.operations[shape.operation],
            )
        )

    def _coalesce(self, into: Columns, operation: int, state: int) -> None:
        """Merge operations of one coalesced call, which share the sequence number of its only launch."""
        merged = _coalesced(self.operations[into.operations[-1]], self.operations[operation])
        into.operations[-1] = self._number(merged)
        whole_call = self.operations[operation].name == COALESCED
        into.states[-1] = state if whole_call else min(into.states[-1], state)

    def _group_of(self, row: Mapping[str, Any]) -> GroupKey:
        group = row.get("process_group")
        local = as_int(row.get("pg_id"), -1)
        if isinstance(group, list | tuple) and group:
            name = as_text(group[0])
            key = (name, as_text(group[1]) if len(group) > 1 else self._described.get(name, ""))
        elif isinstance(group, str):
            key = (group[:MAX_TEXT], self._described.get(group, ""))
        else:
            key = (str(local), self._described.get(str(local), "")) if local >= 0 else ("", "")
        if local >= 0:
            self.local_ids.setdefault(local, key)
        return key

    def _operation(self, row: Mapping[str, Any], wording: str) -> int:
        backend, name = operation_name(wording)
        operation = Operation(
            name=name,
            backend=backend,
            input_sizes=_sizes(row.get("input_sizes")),
            output_sizes=_sizes(row.get("output_sizes")),
            dtypes=tuple(dict.fromkeys(_dtypes(row.get("input_dtypes")) or _dtypes(row.get("output_dtypes")))),
        )
        return self._number(operation)

    def _number(self, operation: Operation) -> int:
        number = self._numbers.setdefault(operation, len(self.operations))
        if number == len(self.operations):
            self.operations.append(operation)
        return number


def state_of(shape: Shape, state: object, *, retired: bool, started: bool, ended: bool) -> int:
    if state == "completed" or ended or (retired and shape.retiring):
        return DONE  # retired without an end, other than on gloo, means timed out
    return STARTED if state == "started" or started else SCHEDULED


def as_text(value: Any) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def as_int(value: Any, default: int) -> int:
    """A number that fits a machine word; JSON dumps contain some of them as text."""
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdecimal():
        value = int(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    return value if type(value) is int and -LARGEST < value < LARGEST else default


def _coalesced(first: Operation, second: Operation) -> Operation:
    names = first.name.split("+")
    return Operation(
        name=first.name if second.name in (names[-1], COALESCED) else f"{first.name}+{second.name}",
        backend=first.backend,
        input_sizes=first.input_sizes + second.input_sizes,
        output_sizes=first.output_sizes + second.output_sizes,
        dtypes=first.dtypes if not second.dtypes or second.dtypes[0] in first.dtypes else first.dtypes + second.dtypes,
    )


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        return ()
    if value and all(type(size) is int for size in value):
        value = [value]  # version 1 described one tensor only
    return tuple(
        tuple(as_int(size, 0) for size in item[:64]) for item in value[:MAX_TEXT] if isinstance(item, list | tuple)
    )


def _dtypes(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value[:64],)
    return tuple(as_text(dtype)[:64] for dtype in value[:MAX_TEXT]) if isinstance(value, list | tuple) else ()


# -- plain data -------------------------------------------------------------------------------------------------------

MOST_RECORDERS = 8
"""Maximum recorders of one rank: one per backend."""


def decode_dump(raw: Any, *, source: str, rank: int | None) -> Dump:
    """Decode a dump; raises DumpError if it is not one. Invalid entries are skipped."""
    if isinstance(raw, list):
        raw = {"entries": raw}  # the first versions had only the list of entries
    if isinstance(raw, dict) and isinstance(parts := raw.get(RECORDERS), list):
        found = [_recorder_dump(part, source=source, rank=rank) for part in parts[:MOST_RECORDERS]]
        if not found:
            raise DumpError("not a Flight Recorder dump: it combines none")
        return merged(found)
    return _recorder_dump(raw, source=source, rank=rank)


def _recorder_dump(raw: Any, *, source: str, rank: int | None) -> Dump:
    """The dump of one recorder."""
    builder = builder_for(raw)
    rows = raw.get("entries") or []
    if not isinstance(rows, list):
        raise DumpError("not a Flight Recorder dump: its entries are not a list")
    for row in rows:
        if isinstance(row, dict):
            builder.add_row(row)
    return finish_dump(raw, builder, source=source, rank=rank)


def builder_for(raw: Any) -> Builder:
    """A builder for the entries of a dump, based on the data around them."""
    if not isinstance(raw, dict) or not ("entries" in raw or "pg_status" in raw or "pg_config" in raw):
        raise DumpError("not a Flight Recorder dump: it has neither entries nor groups")
    return Builder(_config(raw.get("pg_config"))[1])


def finish_dump(raw: Mapping[str, Any], builder: Builder, *, source: str, rank: int | None) -> Dump:
    members, _, hint = _config(raw.get("pg_config"))
    statuses = _statuses(raw.get("pg_status"), builder.local_ids, members)
    complete, active_only = _extent(builder.ids, builder.columns, statuses)
    groups = {
        key: builder.columns[key].trace(statuses.get(key)) if key in builder.columns else Trace(status=statuses[key])
        for key in {**builder.columns, **statuses}
    }
    return Dump(
        rank=rank_or(as_int(raw.get("rank"), -1), -1) if rank is None else rank,
        source=source,
        version=as_text(raw.get("version"))[:16],
        groups=groups,
        members=members,
        world_hint=hint,
        operations=tuple(builder.operations),
        sites=tuple(tuple(Frame(file=f, line=n, function=name) for f, n, name in site) for site in builder.sites),
        complete=complete,
        active_only=active_only,
        newest_ns=builder.newest_ns,
    )


def _config(raw: Any) -> tuple[dict[GroupKey, tuple[int, ...]], dict[str, str], tuple[int, ...]]:
    """Members by group, descriptions by name, and the ranks of an unnamed group."""
    members: dict[GroupKey, tuple[int, ...]] = {}
    described: dict[str, str] = {}
    hint: tuple[int, ...] = ()
    for outer, value in raw.items() if isinstance(raw, dict) else ():
        about = value if isinstance(value, dict) else {"ranks": value}
        name, description = as_text(about.get("name", outer)), as_text(about.get("desc"))
        ranks = parse_ranks(about.get("ranks"))
        if name:
            described[name] = description
            members[name, description] = ranks
        elif ranks:
            hint = ranks
    return {key: ranks for key, ranks in members.items() if ranks}, described, hint


def _statuses(
    raw: Any, local_ids: Mapping[int, GroupKey], members: Mapping[GroupKey, tuple[int, ...]]
) -> dict[GroupKey, Status]:
    """Status by group. The dump has it by the group's number on this rank; the entries show which group that is.

    Groups without entries occur in a dump of active entries only. Groups are numbered in the order of their creation,
    and so are their names. If both lists have the same length and nothing contradicts it, the order maps one to the
    other.
    """
    counters: dict[int, Status] = {}
    for number, value in raw.items() if isinstance(raw, dict) else ():
        local = as_int(number, -1)
        if local >= 0 and isinstance(value, dict):
            words = ("enqueued", "started", "completed")
            enqueued, started, completed = (as_int(value.get(f"last_{word}_collective"), -1) for word in words)
            counters[local] = Status(enqueued=enqueued, started=started, completed=completed)
    known = dict(local_ids)
    if len(counters) == len(members) and all(name.isdecimal() and len(name) < 19 for name, _ in members):
        in_order = dict(zip(sorted(counters), sorted(members, key=lambda key: int(key[0])), strict=True))
        if all(in_order.get(local) == key for local, key in local_ids.items()):
            known = in_order
    return {known[local]: status for local, status in counters.items() if local in known}


def _extent(
    ids: list[int], columns: Mapping[GroupKey, Columns], statuses: Mapping[GroupKey, Status]
) -> tuple[bool, bool]:
    """Whether nothing is missing at the start or in between, and whether the dump has only active entries."""
    ended = any(DONE in group.states for group in columns.values())
    if not ids:
        called = any(status.enqueued > 0 for status in statuses.values())
        return not called, called
    if min(ids) < 0:
        return False, False
    gaps = max(ids) - min(ids) + 1 != len(ids)
    if gaps or (min(ids) > 0 and not ended):
        return False, not ended
    return min(ids) == 0, False


# -- quick scan of pickles --------------------------------------------------------------------------------------------
# Reads the entries of a pickled dump from its bytes, without creating an object for each frame of each entry.
#
# Unpickling takes most of the time of reading a dump, mostly for frames: ten to twenty-five dictionaries per entry, for
# a few different stacks in total. torch writes every entry in the same way, so that similar entries differ in a few
# bytes at fixed positions: their numbers, and the numbers that the pickle assigns to new objects (its memo). The first
# of them is unpickled and becomes a ``_Mould``; for entries that match it only the numbers are read. If anything
# deviates from torch's format, ``quick_dump`` returns None and the whole file is unpickled.
#
# Memo numbers count up by one per object. They all follow from the first one of an entry, and subtracting it from each
# leaves the same bytes for all matching entries. So a damaged number, which would change the meaning of later entries,
# is detected.
#
# A repeated string is a memo number in the bytes. Therefore a single unpickler, which keeps its memo between parts,
# reads all unpickled parts in the order of the file.

WORTH_A_SCAN = 1 << 16
"""Smaller dumps gain nothing."""
LARGEST_ENTRY = 1 << 15
"""Entries of torch are smaller, and nothing of this size can nest deep enough to do harm."""

_ENTRIES = b"X\x07\x00\x00\x00entries"
_PUT = rb"(?:q.|r....)"
_PUT_OPS = ("BINPUT", "LONG_BINPUT")
_INT = rb"(K.|M..|J....|\x8a\x08.{8})"
_TIME = rb"(N|K.|M..|J....|\x8a\x08.{8})"
_FLAG = rb"([\x88\x89])"
_LIST = re.compile(rb"\]" + _PUT + rb"\(\}" + _PUT, re.DOTALL)
_BETWEEN = re.compile(rb"(?:e\()?\}" + _PUT, re.DOTALL)
"""Bytes between two entries; a long list is written in parts."""
_WIDTHS = {b"K": "B", b"M": "H", b"J": "i", b"\x8a": "q"}
_NUMBERS = (1, 3, 4, 5, 7, 11, 12)
"""Groups of the entry pattern: record ID, sequence numbers, op ID, and the times."""


class _Mould(NamedTuple):
    mask: int
    """Mask of the bits that must be equal, as a number …"""
    bits: int
    """… and their values after subtracting the next memo number at …"""
    puts: int
    """… each position that holds a memo number (a one at each)."""
    objects: int
    """How many memo numbers the entry uses."""
    numbers: Callable[[bytes], tuple[int, ...]]
    """Reads the numbers of an entry: the five that every entry has, then start and end times if present."""
    common: Common


def quick_dump(data: bytes, *, source: str, rank: int | None) -> Dump | None:
    """The same result as unpickling and decoding, or None."""
    if data[:3] != b"\x80\x02}":
        return None
    try:
        with memory_bounded(len(data)):
            return _Scan(data).dump(source, rank)
    except (_Unlike, DumpError, pickle.UnpicklingError, EOFError, MemoryError, OverflowError):
        return None
    except (AttributeError, ImportError, LookupError, TypeError, ValueError):
        return None


class _Unlike(Exception):
    """The bytes are not in torch's format."""


class _Scan:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._part = io.BytesIO()
        self._unpickler = PlainUnpickler(self._part)
        key = data.find(_ENTRIES)
        opening = _after_put(data, key + len(_ENTRIES)) if key >= 0 else -1
        begun = _LIST.match(data, opening) if opening >= 0 else None
        if begun is None:
            raise _Unlike
        self._first = begun.end()
        self._next = 0
        """The next memo number."""
        self._around: dict[str, Any] = self._unpickled(data[:opening] + b"]u.")
        self._counted(data[: self._first] + b".")
        self._builder: Builder = builder_for(self._around)
        self._with_frames = data[self._first + 1 :].startswith(_literal("frames"))
        self._entry = re.compile(self._pattern(), re.DOTALL)
        self._moulds: dict[int, list[_Mould]] = {}
        """By the length of the entry."""

    def dump(self, source: str, rank: int | None) -> Dump:
        data, moulds = self._data, self._moulds
        taken: dict[int, list[tuple[Common, tuple[int, ...]]]] = {}
        next_one = b"(" + (self._get("frames") + b"]" if self._with_frames else self._get("record_id"))
        at = self._first
        while (following := data.find(next_one, at + 1)) >= 0:
            entry = data[at:following]
            bits = int.from_bytes(entry, "little")
            for mould in moulds.get(len(entry), ()):
                if (bits - self._next * mould.puts) & mould.mask == mould.bits:
                    self._next += mould.objects
                    break
            else:
                mould = self._learned(entry, bits)
            taken.setdefault(id(mould.common.shape.columns), []).append((mould.common, mould.numbers(entry)))
            at = following
        for rows in taken.values():
            if not self._builder.add_many(rows[0][0].shape.columns, rows):
                raise _Unlike
        last = self._matched(data[at : at + LARGEST_ENTRY], whole=False)
        self._builder.add_row(self._unpickled(b"}" + last.group() + b"."))
        self._counted(data[at:])
        rest = data[at + last.end() :]
        if rest[:1] != b"e":
            raise _Unlike
        if rest != b"eu.":
            self._around.update(self._unpickled(b"}(" + rest[1:]))
        return finish_dump(self._around, self._builder, source=source, rank=rank)

    def _learned(self, entry: bytes, bits: int) -> _Mould:
        """Learn a new kind of entry: its meaning, and which of its bytes are numbers."""
        found = self._matched(entry, whole=True)
        row = self._unpickled(b"}" + found.group() + b".")
        mask = bytearray(b"\xff" * len(entry))
        layout, at = "<", 0
        for group in _NUMBERS:
            start, end = found.span(group)
            if (kind := entry[start : start + 1]) != b"N":
                start += 2 if kind == b"\x8a" else 1
                layout += f"{start - at}x{_WIDTHS[kind]}"
                mask[start:end] = bytes(end - start)
                at = end
        lasted, until = found.span(8)
        mask[lasted:until] = bytes(until - lasted)
        same = int.from_bytes(mask, "little")
        begun = self._next
        places = self._counted(entry + b".")
        puts = sum(1 << 8 * place for place in places)
        shape = self._builder.known_shape(row)
        times = {"retired": found[13] == b"\x88", "started": found[11] != b"N", "ended": found[12] != b"N"}
        state = state_of(shape, row["state"], **times)
        common = Common(shape=shape, site=self._builder.site(row.get("frames")), state=state)
        mould = _Mould(
            mask=same,
            bits=bits - begun * puts & same,
            puts=puts,
            objects=len(places),
            numbers=struct.Struct(layout).unpack_from,
            common=common,
        )
        self._moulds.setdefault(len(entry), []).append(mould)
        return mould

    def _counted(self, part: bytes) -> list[int]:
        """Positions of memo numbers in the part; raises if they are not consecutive."""
        found = [
            (number, at + 1) for op, number, at in pickletools.genops(part) if op.name in _PUT_OPS and at is not None
        ]
        if [number for number, _ in found] != list(range(self._next, self._next + len(found))):
            raise _Unlike
        self._next += len(found)
        return [at for _, at in found]

    def _matched(self, entry: bytes, *, whole: bool) -> re.Match[bytes]:
        """Match an entry. ``whole``: it must extend to the start of the next one."""
        found = self._entry.match(entry) if len(entry) <= LARGEST_ENTRY else None
        if found is None or (whole and _BETWEEN.fullmatch(entry, found.end()) is None):
            raise _Unlike
        return found

    def _unpickled(self, part: bytes) -> Any:
        self._part.seek(0)
        self._part.truncate()
        self._part.write(part)
        self._part.seek(0)
        return self._unpickler.load()

    def _pattern(self) -> bytes:
        """Pattern of an entry, from its opening mark to its end."""
        key = self._key
        lasted = b"(?:" + key("duration_ms") + b"G(.{8}))?" if _literal("duration_ms") in self._data else b"()"
        frames = key("frames") + rb"\](?:" + _PUT + rb")?\(.{0,30000}?ue" if self._with_frames else b""
        return b"".join(
            (
                rb"\(", frames, key("record_id"), _INT, b"(", key("pg_id"), b".{1,512}?)", key("collective_seq_id"),
                _INT, key("p2p_seq_id"), _INT, key("op_id"), _INT, b"(", key("profiling_name"), b".{1,512}?)",
                key("time_created_ns"), _INT, lasted, b"(.{1,8192}?)", key("state"), b"(.{1,32}?)",
                key("time_discovered_started_ns"), _TIME, key("time_discovered_completed_ns"), _TIME,
                key("retired"), _FLAG, b".{0,64}?u(?=[}e])",
            )
        )  # fmt: skip

    def _key(self, name: str) -> bytes:
        """Pattern of a key: its memo number, or the literal at its first occurrence."""
        return b"(?:" + re.escape(self._get(name)) + b"|" + re.escape(_literal(name)) + _PUT + b")"

    def _get(self, name: str) -> bytes:
        at = self._data.find(_literal(name))
        put = self._data[at + 5 + len(name) :][:5] if at >= 0 else b""
        if put[:1] == b"q":
            return b"h" + put[1:2]
        if put[:1] != b"r":
            raise _Unlike
        return b"j" + put[1:5] if put[2:5] != b"\x00\x00\x00" else b"h" + put[1:2]


def _literal(name: str) -> bytes:
    return b"X" + len(name).to_bytes(4, "little") + name.encode()


def _after_put(data: bytes, at: int) -> int:
    return at + {b"q": 2, b"r": 5}.get(data[at : at + 1], 0)

"""A ``Dump`` in the making: entries in, one by one, columns and tables out.  Pure.

What an entry means (its group, its operation) is worked out once for all entries that say the same, its ``Shape``; what
is left per entry is a handful of numbers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from stepscope.flight.entries import DONE, P2P, SCHEDULED, STARTED, GroupKey, Operation, Status, Trace
from stepscope.flight.spelling import operation_name, peers_of

__all__ = ["LARGEST", "MAX_TEXT", "Builder", "Columns", "Common", "Shape", "state_of", "text", "whole"]

MAX_TEXT = 4096
LARGEST = 1 << 62
MAX_FRAMES = 512

RawFrames = tuple[tuple[str, int, str], ...]

_OF_FRAME = itemgetter("filename", "line", "name")
COALESCED = "coalesced"
"""The entry for a batch of calls as a whole, which alone has its state."""
_ENDS_WHEN_RETIRED = ("gloo:", "mpi:", "ucc:")


@dataclass(kw_only=True)
class Columns:
    """A ``Trace`` in the making."""

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
    """What all entries have in common that say the same of group and operation."""

    columns: Columns
    operation: int
    peers: tuple[int, int, bool] | None
    p2p: bool
    retiring: bool
    """Whether the backend never says more than ``scheduled``, and retires what ended (gloo)."""


class Common(NamedTuple):
    """What entries have in common that differ in their numbers only."""

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
        """An entry as plain data."""
        shape = self.known_shape(row)
        sequence = row.get("collective_seq_id", row.get("seq_id"))
        record, p2p, op_id = row.get("record_id"), row.get("p2p_seq_id"), row.get("op_id")
        created = row.get("time_created_ns")
        plain = type(record) is type(sequence) is type(p2p) is type(op_id) is type(created) is int
        numbers: Any = (record, sequence, p2p, op_id, created)
        if not plain or max(numbers) >= LARGEST or min(numbers) <= -LARGEST:
            sequence = whole(sequence, -1)
            record, p2p, created = whole(record, -1), whole(p2p, 0), whole(created, 0)
            numbers = (record, sequence, p2p, whole(op_id, sequence), created)
        ended, started = row.get("time_discovered_completed_ns"), row.get("time_discovered_started_ns")
        self.add(
            shape,
            self.site(row.get("frames")),
            numbers,
            row.get("state"),
            row.get("retired") is True,
            whole(started, 0) if started is not None else 0,
            whole(ended, 0) if ended is not None else 0,
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
        """``numbers``: record id, sequence number, that of sends and recvs, op id, and when it was created."""
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
                # Sends and recvs of one batch have no state of their own: what ends is the batch, recorded after them.
                into.p2p[:] = [one for one in into.p2p if one.sequence != p2p_sequence]
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
        """Entries of one group at once; False, and nothing is done, where each needs a look."""
        numbers = [row for _, row in rows]
        sequences = [row[1] for row in numbers]
        latest = max(max(row[4], row[-1]) for row in numbers)
        odd = min(map(min, numbers)) < 0 or max(map(max, numbers)) >= LARGEST or any(0 in row[5:] for row in numbers)
        if odd or len(set(sequences)) < len(sequences) or into.sequences or any(one.shape.p2p for one, _ in rows):
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
        """The number of a call site; -1 when there is none, or none that torch would write."""
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
        wording = text(row.get("profiling_name"))
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
        """Several operations of one coalesced call share the number of its only launch."""
        merged = _merged(self.operations[into.operations[-1]], self.operations[operation])
        into.operations[-1] = self._number(merged)
        whole_call = self.operations[operation].name == COALESCED
        into.states[-1] = state if whole_call else min(into.states[-1], state)

    def _group_of(self, row: Mapping[str, Any]) -> GroupKey:
        group = row.get("process_group")
        local = whole(row.get("pg_id"), -1)
        if isinstance(group, list | tuple) and group:
            name = text(group[0])
            key = (name, text(group[1]) if len(group) > 1 else self._described.get(name, ""))
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
        return DONE  # retired without an end, elsewhere than on gloo, has timed out
    return STARTED if state == "started" or started else SCHEDULED


def text(value: Any) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def whole(value: Any, default: int) -> int:
    """A number that fits a machine word; JSON has some of them as text."""
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdecimal():
        value = int(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    return value if type(value) is int and -LARGEST < value < LARGEST else default


def _merged(first: Operation, second: Operation) -> Operation:
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
    if value and all(type(one) is int for one in value):
        value = [value]  # version 1 told of one tensor only
    return tuple(
        tuple(whole(one, 0) for one in item[:64]) for item in value[:MAX_TEXT] if isinstance(item, list | tuple)
    )


def _dtypes(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value[:64],)
    return tuple(text(one)[:64] for one in value[:MAX_TEXT]) if isinstance(value, list | tuple) else ()

"""From the plain data in a dump, of whatever version of torch, to a ``Dump``.  Pure.

What changed between versions 1.x and 2.10: ``seq_id`` became ``collective_seq_id`` beside ``p2p_seq_id``; the group was
only a number (``pg_id``), then a name, then a name and a description; ``pg_config`` and ``pg_status`` came; sizes were
told of one tensor, then of all; ``nccl_version`` became ``comm_lib_version``; the JSON form has no frames and writes
counters as strings.  Nothing here relies on the number of the version: what is there is used.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from stepscope.errors import DumpError
from stepscope.flight.entries import DONE, P2P, SCHEDULED, STARTED, Dump, GroupKey, Operation, Status, Trace
from stepscope.flight.spelling import operation_name, peers_of, ranks_of
from stepscope.records.hang import Frame

__all__ = ["decode_dump"]

MAX_TEXT = 4096
LARGEST = 1 << 62
MAX_FRAMES = 512


@dataclass(kw_only=True)
class _Columns:
    """A ``Trace`` in the making."""

    sequences: array[int] = field(default_factory=lambda: array("q"))
    operations: array[int] = field(default_factory=lambda: array("l"))
    sites: array[int] = field(default_factory=lambda: array("l"))
    states: array[int] = field(default_factory=lambda: array("b"))
    created_ns: array[int] = field(default_factory=lambda: array("q"))
    p2p: list[P2P] = field(default_factory=list)
    mixed: bool = False


@dataclass(kw_only=True)
class _Tables:
    """What repeats in a dump, each once."""

    operations: list[Operation] = field(default_factory=list)
    numbers: dict[Operation, int] = field(default_factory=dict)
    by_wording: dict[object, int] = field(default_factory=dict)
    """The same by what the entry literally says, which is quicker to look up."""
    sites: dict[tuple[tuple[str, int, str], ...], int] = field(default_factory=dict)

    def number(self, operation: Operation) -> int:
        number = self.numbers.setdefault(operation, len(self.operations))
        if number == len(self.operations):
            self.operations.append(operation)
        return number


def decode_dump(raw: Any, *, source: str, rank: int | None) -> Dump:
    """DumpError when this is no dump; single entries that make no sense are passed over."""
    if isinstance(raw, list):
        raw = {"entries": raw}  # the first versions had nothing around the entries
    if not isinstance(raw, dict) or not ("entries" in raw or "pg_status" in raw or "pg_config" in raw):
        raise DumpError("no dump of a Flight Recorder: it has neither entries nor groups")
    rows = raw.get("entries") or []
    if not isinstance(rows, list):
        raise DumpError("no dump of a Flight Recorder: its entries are no list")
    members, described, hint = _config(raw.get("pg_config"))
    tables = _Tables()
    columns: dict[GroupKey, _Columns] = {}
    local_ids: dict[int, GroupKey] = {}
    newest = 0
    ids: list[int] = []
    for row in rows:
        if isinstance(row, dict):
            key = _group_of(row, described, local_ids)
            newest = max(newest, _take(row, columns.setdefault(key, _Columns()), tables))
            ids.append(_whole(row.get("record_id"), -1))
    statuses = _statuses(raw.get("pg_status"), local_ids, members)
    complete, active_only = _extent(ids, columns, statuses)
    return Dump(
        rank=_rank(raw, rank),
        source=source,
        version=_text(raw.get("version"))[:16],
        groups={key: _trace(columns.get(key), statuses.get(key)) for key in {**columns, **statuses}},
        members=members,
        world_hint=hint,
        operations=tuple(tables.operations),
        sites=tuple(tuple(Frame(file=f, line=n, function=name) for f, n, name in site) for site in tables.sites),
        complete=complete,
        active_only=active_only,
        newest_ns=newest,
    )


def _take(row: Mapping[str, Any], into: _Columns, tables: _Tables) -> int:
    """One entry into the columns of its group; the latest instant it tells of."""
    wording = _text(row.get("profiling_name"))
    sequence = _whole(row.get("collective_seq_id", row.get("seq_id")), -1)
    p2p_sequence = _whole(row.get("p2p_seq_id"), 0)
    state = _state(row, wording)
    created = _whole(row.get("time_created_ns"), 0)
    operation = _operation(row, wording, tables)
    if p2p_sequence > 0 or _whole(row.get("op_id"), sequence) != sequence:
        into.mixed = True
    peers = peers_of(wording)
    if peers is not None or row.get("is_p2p") is True:
        into.mixed = True
        if state != DONE and peers is not None:
            sender, target, sending = peers
            into.p2p.append(
                P2P(
                    source=sender,
                    target=target,
                    sending=sending,
                    sequence=p2p_sequence,
                    created_ns=created,
                    operation=tables.operations[operation],
                )
            )
    elif sequence >= 0:
        _append(into, tables, sequence, operation, _site(row.get("frames"), tables), state, created)
    return max(created, _whole(row.get("time_discovered_completed_ns"), 0))


def _append(
    into: _Columns, tables: _Tables, sequence: int, operation: int, site: int, state: int, created: int
) -> None:
    if into.sequences and into.sequences[-1] == sequence:
        # Several operations of one coalesced call share the number of its only launch.
        merged = _merged(tables.operations[into.operations[-1]], tables.operations[operation])
        into.operations[-1] = tables.number(merged)
        into.states[-1] = min(into.states[-1], state)
        return
    into.sequences.append(sequence)
    into.operations.append(operation)
    into.sites.append(site)
    into.states.append(state)
    into.created_ns.append(created)


def _merged(first: Operation, second: Operation) -> Operation:
    names = first.name.split("+")
    return Operation(
        name=first.name if second.name in (names[-1], "coalesced") else f"{first.name}+{second.name}",
        backend=first.backend,
        input_sizes=first.input_sizes + second.input_sizes,
        output_sizes=first.output_sizes + second.output_sizes,
        dtypes=first.dtypes if not second.dtypes or second.dtypes[0] in first.dtypes else first.dtypes + second.dtypes,
    )


def _trace(columns: _Columns | None, status: Status | None) -> Trace:
    if columns is None:
        return Trace(status=status)
    picked = [columns.sequences, columns.operations, columns.sites, columns.states, columns.created_ns]
    if any(before > after for before, after in pairwise(columns.sequences)):
        order = sorted(range(len(columns.sequences)), key=columns.sequences.__getitem__)
        picked = [array(column.typecode, (column[place] for place in order)) for column in picked]
    return Trace(
        sequences=picked[0],
        operations=picked[1],
        sites=picked[2],
        states=picked[3],
        created_ns=picked[4],
        p2p=tuple(columns.p2p),
        mixed=columns.mixed,
        status=status,
    )


def _state(row: Mapping[str, Any], wording: str) -> int:
    """gloo never says more than ``scheduled``, and retires what ended; elsewhere retired without an end timed out."""
    state = row.get("state")
    if state == "completed" or _whole(row.get("time_discovered_completed_ns"), 0) > 0:
        return DONE
    if row.get("retired") is True and wording.startswith(("gloo:", "mpi:", "ucc:")):
        return DONE
    return STARTED if state == "started" or _whole(row.get("time_discovered_started_ns"), 0) > 0 else SCHEDULED


def _operation(row: Mapping[str, Any], wording: str, tables: _Tables) -> int:
    sizes_in, sizes_out = row.get("input_sizes"), row.get("output_sizes")
    dtypes_in, dtypes_out = row.get("input_dtypes"), row.get("output_dtypes")
    key = (wording, _wording(sizes_in), _wording(sizes_out), _wording(dtypes_in), _wording(dtypes_out))
    number = tables.by_wording.get(key)
    if number is None:
        backend, name = operation_name(wording)
        operation = Operation(
            name=name,
            backend=backend,
            input_sizes=_sizes(sizes_in),
            output_sizes=_sizes(sizes_out),
            dtypes=tuple(dict.fromkeys(_dtypes(dtypes_in) or _dtypes(dtypes_out))),
        )
        number = tables.number(operation)
        tables.by_wording[key] = number
    return number


def _wording(value: Any) -> object:
    """A key for a list of lists of numbers, or of strings, two deep at most; what is deeper is none of torch's."""
    if not isinstance(value, list | tuple):
        return None
    return tuple(
        tuple(one if type(one) in (int, str) else None for one in item)
        if isinstance(item, list | tuple)
        else item
        if type(item) in (int, str)
        else None
        for item in value
    )


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        return ()
    if value and all(type(one) is int for one in value):
        value = [value]  # version 1 told of one tensor only
    return tuple(
        tuple(_whole(one, 0) for one in item[:64]) for item in value[:MAX_TEXT] if isinstance(item, list | tuple)
    )


def _dtypes(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value[:64],)
    return tuple(_text(one)[:64] for one in value[:MAX_TEXT]) if isinstance(value, list | tuple) else ()


def _site(frames: Any, tables: _Tables) -> int:
    if not isinstance(frames, list | tuple) or not frames:
        return -1
    try:
        stack = tuple([(frame["filename"], frame["line"], frame["name"]) for frame in frames[:MAX_FRAMES]])
        known = tables.sites.get(stack)
    except (KeyError, TypeError):
        return -1
    if known is not None:
        return known
    if not all(type(file) is str and type(line) is int and type(name) is str for file, line, name in stack):
        return -1
    return tables.sites.setdefault(stack, len(tables.sites))


def _group_of(row: Mapping[str, Any], described: Mapping[str, str], local_ids: dict[int, GroupKey]) -> GroupKey:
    group = row.get("process_group")
    local = _whole(row.get("pg_id"), -1)
    if isinstance(group, list | tuple) and group:
        key = (_text(group[0]), _text(group[1]) if len(group) > 1 else described.get(_text(group[0]), ""))
    elif isinstance(group, str):
        key = (group[:MAX_TEXT], described.get(group, ""))
    else:
        key = (str(local), described.get(str(local), "")) if local >= 0 else ("", "")
    if local >= 0:
        local_ids.setdefault(local, key)
    return key


def _config(raw: Any) -> tuple[dict[GroupKey, tuple[int, ...]], dict[str, str], tuple[int, ...]]:
    """Members by group, descriptions by name, and the ranks of a group that is not named."""
    members: dict[GroupKey, tuple[int, ...]] = {}
    described: dict[str, str] = {}
    hint: tuple[int, ...] = ()
    for outer, value in raw.items() if isinstance(raw, dict) else ():
        about = value if isinstance(value, dict) else {"ranks": value}
        name, description = _text(about.get("name", outer)), _text(about.get("desc"))
        ranks = ranks_of(about.get("ranks"))
        if name:
            described[name] = description
            members[name, description] = ranks
        elif ranks:
            hint = ranks
    return {key: ranks for key, ranks in members.items() if ranks}, described, hint


def _statuses(
    raw: Any, local_ids: Mapping[int, GroupKey], members: Mapping[GroupKey, tuple[int, ...]]
) -> dict[GroupKey, Status]:
    """By group.  The dump has them by the number of the group on this rank; entries tell which group that is.

    For groups without entries (a dump of active ones only): groups are numbered in the order they are made, and so are
    their names; if there are as many of one as of the other, and all that is known fits, the order says which is which.
    """
    told: dict[int, Status] = {}
    for number, value in raw.items() if isinstance(raw, dict) else ():
        local = _whole(number, -1)
        if local >= 0 and isinstance(value, dict):
            counters = (
                _whole(value.get(f"last_{word}_collective"), -1) for word in ("enqueued", "started", "completed")
            )
            enqueued, started, completed = counters
            told[local] = Status(enqueued=enqueued, started=started, completed=completed)
    known = dict(local_ids)
    if len(told) == len(members) and all(name.isdecimal() and len(name) < 19 for name, _ in members):
        in_order = dict(zip(sorted(told), sorted(members, key=lambda key: int(key[0])), strict=True))
        if all(in_order.get(local) == key for local, key in local_ids.items()):
            known = in_order
    return {known[local]: status for local, status in told.items() if local in known}


def _extent(
    ids: list[int], columns: Mapping[GroupKey, _Columns], statuses: Mapping[GroupKey, Status]
) -> tuple[bool, bool]:
    """Whether nothing is missing in front or between, and whether only what had not ended was dumped."""
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


def _rank(raw: Mapping[str, Any], rank: int | None) -> int:
    own = _whole(raw.get("rank"), -1)
    return own if rank is None else rank


def _text(value: Any) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def _whole(value: Any, default: int) -> int:
    """A number that fits a machine word; JSON has some of them as text."""
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdecimal():
        value = int(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    return value if type(value) is int and -LARGEST < value < LARGEST else default

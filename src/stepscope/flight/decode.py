"""From the plain data in a dump, of whatever version of torch, to a ``Dump``.  Pure.

What changed between versions 1.x and 2.10: ``seq_id`` became ``collective_seq_id`` beside ``p2p_seq_id``; the group was
only a number (``pg_id``), then a name, then a name and a description; ``pg_config`` and ``pg_status`` came; sizes were
told of one tensor, then of all; ``nccl_version`` became ``comm_lib_version``; the JSON form has no frames and writes
counters as strings.  Nothing here relies on the number of the version: what is there is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.errors import DumpError
from stepscope.flight.build import Builder, Columns, text, whole
from stepscope.flight.combine import RECORDERS, merged
from stepscope.flight.entries import DONE, Dump, GroupKey, Status, Trace
from stepscope.flight.spelling import rank_or, ranks_of
from stepscope.records.hang import Frame

__all__ = ["builder_for", "decode_dump", "finish_dump"]

MOST_RECORDERS = 8
"""Of one rank: one for each backend."""


def decode_dump(raw: Any, *, source: str, rank: int | None) -> Dump:
    """DumpError when this is no dump; single entries that make no sense are passed over."""
    if isinstance(raw, list):
        raw = {"entries": raw}  # the first versions had nothing around the entries
    if isinstance(raw, dict) and isinstance(parts := raw.get(RECORDERS), list):
        found = [_part(one, source=source, rank=rank) for one in parts[:MOST_RECORDERS]]
        if not found:
            raise DumpError("no dump of a Flight Recorder: it combines none")
        return merged(found)
    return _part(raw, source=source, rank=rank)


def _part(raw: Any, *, source: str, rank: int | None) -> Dump:
    """The dump of one recorder."""
    builder = builder_for(raw)
    rows = raw.get("entries") or []
    if not isinstance(rows, list):
        raise DumpError("no dump of a Flight Recorder: its entries are no list")
    for row in rows:
        if isinstance(row, dict):
            builder.add_row(row)
    return finish_dump(raw, builder, source=source, rank=rank)


def builder_for(raw: Any) -> Builder:
    """For the entries of a dump, by what stands around them."""
    if not isinstance(raw, dict) or not ("entries" in raw or "pg_status" in raw or "pg_config" in raw):
        raise DumpError("no dump of a Flight Recorder: it has neither entries nor groups")
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
        rank=rank_or(whole(raw.get("rank"), -1), -1) if rank is None else rank,
        source=source,
        version=text(raw.get("version"))[:16],
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
    """Members by group, descriptions by name, and the ranks of a group that is not named."""
    members: dict[GroupKey, tuple[int, ...]] = {}
    described: dict[str, str] = {}
    hint: tuple[int, ...] = ()
    for outer, value in raw.items() if isinstance(raw, dict) else ():
        about = value if isinstance(value, dict) else {"ranks": value}
        name, description = text(about.get("name", outer)), text(about.get("desc"))
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
        local = whole(number, -1)
        if local >= 0 and isinstance(value, dict):
            words = ("enqueued", "started", "completed")
            enqueued, started, completed = (whole(value.get(f"last_{word}_collective"), -1) for word in words)
            told[local] = Status(enqueued=enqueued, started=started, completed=completed)
    known = dict(local_ids)
    if len(told) == len(members) and all(name.isdecimal() and len(name) < 19 for name, _ in members):
        in_order = dict(zip(sorted(told), sorted(members, key=lambda key: int(key[0])), strict=True))
        if all(in_order.get(local) == key for local, key in local_ids.items()):
            known = in_order
    return {known[local]: status for local, status in told.items() if local in known}


def _extent(
    ids: list[int], columns: Mapping[GroupKey, Columns], statuses: Mapping[GroupKey, Status]
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

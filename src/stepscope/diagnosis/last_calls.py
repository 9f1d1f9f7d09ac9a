"""What ranks called last before they died: whether one of them called something else than the others.

gloo does not wait for ever when ranks give a collective different sizes: it aborts the process that gets more than it
asked for, which is as often as not a healthy one, and the rest lose their connection.  Their rings outlive them, so the
agent writes the last collective of each into its ``rank_end``.  Who is the odd one among them is told by the majority
or, of two, by what each called in the steps before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepscope.diagnosis.attempts import Attempt
from stepscope.flight.wording import ranks_text
from stepscope.records.collectives import OPS, group_name
from stepscope.records.series import RankSeries, RunData
from stepscope.records.units import bytes_text

__all__ = ["Call", "Unlike", "last_calls", "told_group", "unlike_calls"]

ANY_SIZE = ("broadcast", "scatter", "gather", "all_to_all", "send", "recv", "unknown")
"""Ranks may give these different sizes."""


@dataclass(frozen=True, kw_only=True)
class Call:
    op: str
    group: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Unlike:
    """Last calls of the ranks of an attempt that do not go together."""

    sides: dict[Call, tuple[int, ...]]
    odd: tuple[int, ...]
    """Empty where it cannot be told which of them."""

    @property
    def text(self) -> str:
        """``Rank 1 called all_reduce with 4.0 KiB where rank 0 called it with 2.0 KiB``, the odd ones first."""
        first, *rest = sorted(self.sides.items(), key=lambda side: (side[1][0] not in self.odd, side[1]))
        same_op = len({call.op for call in self.sides}) == 1
        told = f"{ranks_text(first[1], start=True)} called {first[0].op} with {bytes_text(first[0].bytes)}"
        others = [
            f"{ranks_text(ranks)} called {'it' if same_op else call.op} with {bytes_text(call.bytes)}"
            for call, ranks in rest
        ]
        return f"{told} {'where' if self.odd else 'and'} {' and '.join(others)}"


def unlike_calls(run: RunData, attempt: Attempt) -> Unlike | None:
    """None when the last calls agree, or are not known of all."""
    calls = last_calls(run, attempt)
    if len(calls) < 2 or len(calls) < len(attempt.series) or len({call.group for call in calls.values()}) != 1:
        return None
    if {call.op for call in calls.values()} & set(ANY_SIZE) or len(set(calls.values())) == 1:
        return None
    sides: dict[Call, tuple[int, ...]] = {}
    for rank in sorted(calls):
        sides[calls[rank]] = (*sides.get(calls[rank], ()), rank)
    most = max(sides.values(), key=len)
    tied = sum(len(ranks) == len(most) for ranks in sides.values()) > 1
    odd = _unlike_before(calls, attempt.series) if tied else [rank for rank in sorted(calls) if rank not in most]
    return Unlike(sides=sides, odd=tuple(odd) if len(odd) < len(calls) else ())


def _ends(run: RunData, attempt: Attempt) -> dict[int, Mapping[str, object]]:
    by_pid = {series.identity.pid: series.rank for series in attempt.series}
    return {
        by_pid[event["pid"]]: event
        for event in run.events
        if event.get("event") == "rank_end" and event.get("pid") in by_pid
    }


def last_calls(run: RunData, attempt: Attempt) -> dict[int, Call]:
    """By rank, of those whose ring told."""
    found = {}
    for rank, end in _ends(run, attempt).items():
        told = end.get("collective")
        if not isinstance(told, dict):
            continue
        op, group, size = (told.get(key) for key in ("op", "group", "bytes"))
        if isinstance(op, str) and isinstance(group, str) and isinstance(size, int):
            found[rank] = Call(op=op, group=group, bytes=size)
    return found


def told_group(call: Call, series: Sequence[RankSeries]) -> str:
    """What people call its group."""
    known = (group.description for one in series for group in one.groups if group.name == call.group)
    return group_name(call.group, next(known, ""))


def _unlike_before(calls: Mapping[int, Call], series: Sequence[RankSeries]) -> list[int]:
    """Those that never made such a call in a step that is kept; all others have."""
    return [one.rank for one in series if calls[one.rank].bytes not in _sizes_before(one, calls[one.rank])]


def _sizes_before(one: RankSeries, call: Call) -> set[int]:
    slots = [group.slot for group in one.groups if group.name == call.group]
    if one.collectives is None or not slots or call.op not in OPS:
        return set()
    rows = one.collectives
    same = np.isin(rows["group"], slots) & (rows["op"] == OPS.index(call.op))
    return {int(size) for size in rows["bytes"][same]}

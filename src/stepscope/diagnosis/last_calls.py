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
from stepscope.diagnosis.units import bytes_text
from stepscope.flight.wording import ranks_text
from stepscope.records.collectives import OPS
from stepscope.records.series import RankSeries, RunData

__all__ = ["Disagreement", "disagreement_in", "killed_for_memory"]

ANY_SIZE = ("broadcast", "scatter", "gather", "all_to_all", "send", "recv", "unknown")
"""Ranks may give these different sizes."""


@dataclass(frozen=True, kw_only=True)
class Call:
    op: str
    group: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    odd: tuple[int, ...]
    """All of them where it cannot be told."""
    text: str
    """``Rank 1 called all_reduce with 4.0 KiB where rank 0 called it with 2.0 KiB``."""
    decided: bool


def disagreement_in(run: RunData, attempt: Attempt) -> Disagreement | None:
    """Of the last calls of all ranks of the attempt; None when they agree or are not known."""
    calls = _last_calls(run, attempt)
    if len(calls) < 2 or len(calls) < len(attempt.series) or len({call.group for call in calls.values()}) != 1:
        return None
    ops = {call.op for call in calls.values()}
    if ops & set(ANY_SIZE) or len(set(calls.values())) == 1:
        return None
    sides: dict[Call, list[int]] = {}
    for rank in sorted(calls):
        sides.setdefault(calls[rank], []).append(rank)
    most = max(sides.values(), key=len)
    tied = sum(len(ranks) == len(most) for ranks in sides.values()) > 1
    odd = _unlike_before(calls, attempt.series) if tied else [rank for rank in sorted(calls) if rank not in most]
    decided = 0 < len(odd) < len(calls)
    return Disagreement(
        odd=tuple(odd) if decided else tuple(sorted(calls)),
        text=_told(sides, odd, one_op=len(ops) == 1) if decided else _told(sides, (), one_op=len(ops) == 1),
        decided=decided,
    )


def killed_for_memory(run: RunData, attempt: Attempt) -> frozenset[int]:
    """Ranks that the kernel killed because there was none left."""
    ends = _ends(run, attempt)
    return frozenset(rank for rank, end in ends.items() if end.get("oom_kill") is True)


def _ends(run: RunData, attempt: Attempt) -> dict[int, Mapping[str, object]]:
    by_pid = {series.identity.pid: series.rank for series in attempt.series}
    return {
        by_pid[event["pid"]]: event
        for event in run.events
        if event.get("event") == "rank_end" and event.get("pid") in by_pid
    }


def _last_calls(run: RunData, attempt: Attempt) -> dict[int, Call]:
    found = {}
    for rank, end in _ends(run, attempt).items():
        told = end.get("collective")
        if not isinstance(told, dict):
            continue
        op, group, size = (told.get(key) for key in ("op", "group", "bytes"))
        if isinstance(op, str) and isinstance(group, str) and isinstance(size, int):
            found[rank] = Call(op=op, group=group, bytes=size)
    return found


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


def _told(sides: Mapping[Call, Sequence[int]], odd: Sequence[int], *, one_op: bool) -> str:
    """The odd ones first, if they are known."""
    ordered = sorted(sides.items(), key=lambda side: (side[1][0] not in odd, side[1]))
    first, *rest = ordered
    word = "where" if odd else "and"
    parts = [f"{ranks_text(first[1], start=True)} called {first[0].op} with {bytes_text(first[0].bytes)}"]
    for call, ranks in rest:
        what = "it" if one_op else call.op
        parts.append(f"{ranks_text(ranks)} called {what} with {bytes_text(call.bytes)}")
    return f" {word} ".join((parts[0], " and ".join(parts[1:])))

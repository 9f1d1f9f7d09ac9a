"""The lines of a log around a step or a time, or those that contain a word.

Printed lines have no times.  The agent notes every second how long each rank's log was (``log_bytes``), and a step's
start is known; both come from the hub's API, and the page finds a step in a log in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.assistant.hub_api import HubApi, RequestError
from stepscope.records.text import without_colors

__all__ = ["LogWindow", "read_window", "step_wall_ns"]

AROUND_NS = 30 * 10**9
"""How far from the requested time the length of the log is looked up."""
PIECE_BYTES = 1 << 20
SEARCHED_BYTES = 32 << 20
"""The part of a log that is searched for a word, from its end or from the place of a step."""
LINE_CHARS = 1000


@dataclass(frozen=True, kw_only=True)
class LogWindow:
    file: str
    lines: tuple[str, ...]
    first_byte: int
    """Where the first of the lines begins."""
    next_byte: int
    """Where the line after the last one begins."""
    size: int
    around_byte: int | None = None
    """Where the requested step or time is; up to a second early."""
    searched_bytes: int | None = None
    """The size of the part that was searched for a word."""


async def read_window(
    api: HubApi,
    run: str,
    *,
    rank: int | None,
    file: str | None,
    wall_ns: int | None,
    from_byte: int | None,
    words: Sequence[str],
    most_lines: int,
) -> LogWindow:
    """Read lines: from a byte on, around a time, or the last ones.  ``words``: only lines with one of them."""
    document = await api.get(f"/api/v1/runs/{run}/ranks/{rank}", bins=1) if rank is not None else None
    path = file or (document["log"] if document is not None else "logs/main.log")
    if path is None:
        raise RequestError(f"rank {rank} has no log; list the files with read_log and file", status=404)
    place = from_byte
    if wall_ns is not None:
        if document is None:
            raise RequestError("a step or time needs a rank: logs of other processes have no times")
        place = await _place_at(api, run, document, wall_ns)
        if place is None:
            raise RequestError("the length of this log at that time is not known; use words, or read its end")
    if words:
        return await _search(api, run, path, words, place, most_lines, around=wall_ns is not None)
    if place is None:
        return await _tail(api, run, path, most_lines)
    if wall_ns is None:
        return await _from(api, run, path, place, most_lines)
    return await _around(api, run, path, place, most_lines)


async def step_wall_ns(api: HubApi, run: str, rank: int, step: int) -> int:
    """Return when a step of a rank began."""
    own = await api.get(f"/api/v1/runs/{run}/ranks/{rank}", first=step, last=step, bins=1)
    steps: Mapping[str, Any] = own["steps"]
    if not steps["start_wall_ns"]:  # of a long run, only the last steps of a rank are known individually
        steps = await api.get(f"/api/v1/runs/{run}/steps", first=step, last=step, bins=1, worst=0)
    found = [start for start in steps["start_wall_ns"] if isinstance(start, int)]
    if not found:
        raise RequestError(f"step {step} is not known; get_steps shows which steps there are", status=404)
    return found[0]


async def _place_at(api: HubApi, run: str, rank: Mapping[str, Any], wall_ns: int) -> int | None:
    """Return the size of the log that is certain at that time; None if it was not recorded."""
    samples = await api.get(
        f"/api/v1/runs/{run}/samples",
        kind="process",
        fields="log_bytes",
        nodes=rank["now"]["node"],
        first_ns=max(wall_ns - AROUND_NS, 0),
        last_ns=wall_ns + AROUND_NS,
        bins=2048,
        stat="last",
        limit=1024,
    )
    own = [
        row for row in samples["series"] if (row.get("rank"), row.get("pid")) == (rank["rank"], rank["identity"]["pid"])
    ]
    values = own[0]["values"].get("log_bytes", []) if own else []
    # A bin holds the last value recorded in it.
    marks = [
        (start + samples["bin_ns"], int(size))
        for start, size in zip(samples["wall_ns"], values, strict=False)
        if size is not None
    ]
    if not marks:
        return None
    return next((size for end_ns, size in reversed(marks) if end_ns <= wall_ns), 0)


async def _tail(api: HubApi, run: str, path: str, most: int) -> LogWindow:
    part = await api.file(run, path, tail=min(PIECE_BYTES, most * 2 * LINE_CHARS))
    return _window(path, part.data, part.offset, part.size, last=most)


async def _from(api: HubApi, run: str, path: str, place: int, most: int) -> LogWindow:
    part = await api.file(run, path, offset=place, most=PIECE_BYTES)
    return _window(path, part.data, part.offset, part.size, first=most)


async def _around(api: HubApi, run: str, path: str, place: int, most: int) -> LogWindow:
    """Half of the lines before the place, and half of them after it."""
    begin = max(place - PIECE_BYTES // 2, 0)
    part = await api.file(run, path, offset=begin, most=PIECE_BYTES)
    at = max(place - part.offset, 0)
    cut = 0 if part.offset == 0 else part.data.find(b"\n", 0, at) + 1
    before = part.data[cut:at].splitlines(keepends=True)[-(most // 2) :]
    first = at - sum(map(len, before))
    found = _window(path, part.data[first:], part.offset + first, part.size, first=most)
    return LogWindow(
        file=path,
        lines=found.lines,
        first_byte=found.first_byte,
        next_byte=found.next_byte,
        size=part.size,
        around_byte=place,
    )


async def _search(
    api: HubApi, run: str, path: str, words: Sequence[str], place: int | None, most: int, *, around: bool
) -> LogWindow:
    """Search from a place on; without one, the end of the log.  Around a time, a part before it, too."""
    wanted = [word.casefold() for word in words]
    end = (await api.file(run, path, tail=0)).size
    begin = max(end - SEARCHED_BYTES, 0) if place is None else max(place - (SEARCHED_BYTES // 2 if around else 0), 0)
    stop = min(end, begin + SEARCHED_BYTES)
    at, rest, rest_at = begin, b"", begin
    found: list[tuple[int, bytes]] = []
    while at < stop:
        part = await api.file(run, path, offset=at, most=min(PIECE_BYTES, stop - at))
        if not part.data:
            break
        if part.offset != at:  # a gap that a long log dropped
            rest, rest_at = b"", part.offset
        at = part.offset + len(part.data)
        *whole, rest_next = (rest + part.data).split(b"\n")
        for line in whole:
            if any(word in line.decode(errors="replace").casefold() for word in wanted):
                found.append((rest_at, line))
            rest_at += len(line) + 1
        rest = rest_next
    if rest and any(word in rest.decode(errors="replace").casefold() for word in wanted):
        found.append((rest_at, rest))
    if around and place is not None:
        found = sorted(sorted(found, key=lambda row: abs(row[0] - place))[:most])
    elif place is None:
        found = found[-most:]
    else:
        found = found[:most]
    return LogWindow(
        file=path,
        lines=tuple(_shown(line) for _, line in found),
        first_byte=found[0][0] if found else begin,
        next_byte=found[-1][0] + len(found[-1][1]) + 1 if found else stop,
        size=end,
        around_byte=place if around else None,
        searched_bytes=stop - begin,
    )


def _window(
    path: str, data: bytes, offset: int, size: int, *, first: int | None = None, last: int | None = None
) -> LogWindow:
    lines = data.splitlines(keepends=True)
    skipped = lines[:-last] if last is not None else []
    lines = lines[-last:] if last is not None else lines[:first]
    begin = offset + sum(map(len, skipped))
    return LogWindow(
        file=path,
        lines=tuple(map(_shown, lines)),
        first_byte=begin,
        next_byte=begin + sum(map(len, lines)),
        size=size,
    )


def _shown(line: bytes) -> str:
    text = without_colors(line.decode(errors="replace").rstrip("\r\n"))
    text = text.rpartition("\r")[2]  # a progress bar that overwrites itself
    return text if len(text) <= LINE_CHARS else f"{text[:LINE_CHARS]}…"

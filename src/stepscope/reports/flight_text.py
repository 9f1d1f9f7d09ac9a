"""The verdict on a job's Flight Recorder dumps as text for the terminal.

The input is the document of ``stepscope flight --json`` and nothing else. Names in it come from a dump that anyone may
have written, so unprintable characters are shown as escapes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.flight.stacks import is_user_file
from stepscope.flight.wording import spans_text
from stepscope.records.collectives import NO_DESCRIPTION, group_name
from stepscope.records.text import printable
from stepscope.reports.layout import WIDE_LABEL, cut, labeled_lines

__all__ = ["doing_text", "group_text", "place_text", "ranks_of", "render_flight", "troubled"]

Document = Mapping[str, Any]

MARKS = {"c": "█", "s": "▓", "w": "▒", "x": "≠", "d": "≠", "m": "·", "-": " ", "?": "?"}
"""One for each mark of the grid."""
LEGEND = "█ ended  ▓ started  ▒ waiting  ≠ another one  · not called  ? no dump"
NARROWEST = 60
GROUPS_SHOWN = 12
WAITS_SHOWN = 12
STACKS_SHOWN = 6
FRAMES_SHOWN = 12
PROBLEMS_SHOWN = 12
ROWS_SHOWN = 40
CULPRITS_SHOWN = 16


def render_flight(document: Document, *, width: int = 80) -> str:
    """The verdict, the culprits, the divergence, the grid, the wait-for table, the groups, the stacks."""
    width = max(width, NARROWEST)
    mark = "✔" if document["healthy"] else "▲" if document["undecidable"] else "✖"
    lines = textwrap.wrap(printable(document["title"]), width, initial_indent=f"{mark} ", subsequent_indent="  ")
    parts = (_verdict, _parted, _grid, _waits, _groups, _stacks, _notes)
    for part in parts:
        drawn = list(part(document, width))
        if drawn:
            lines += ["", *drawn] if part is not _verdict else drawn
    return "\n".join(line.rstrip() for line in lines) + "\n"


def ranks_of(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans_text(sorted(ranks))}"


def group_text(row: Mapping[str, Any]) -> str:
    """The description of a group, and its name if that adds information."""
    name, description = printable(row.get("name", row.get("group")) or ""), printable(row.get("description") or "")
    if description in NO_DESCRIPTION:
        return group_name(name, description) or "the group"
    return description if description == "default_pg" else f"{description} ({name})"


def place_text(at: Mapping[str, Any] | None) -> str:
    return printable(f"{at['file']}:{at['line']} in {at['function']}") if at else ""


def _call_text(side: Mapping[str, Any]) -> str:
    if side["op"] is None:
        return "called nothing"
    return printable(" ".join(part for part in (side["op"], side["sizes"], side["dtypes"]) if part))


def _counter_text(row: Mapping[str, Any], word: str) -> str:
    """How far the members came: ``7``, ``6–7`` or ``?``."""
    values = sorted({rank[word] for rank in row["ranks"].values() if rank[word] is not None})
    if not values:
        return "?"
    return str(values[0]) if len(values) == 1 else f"{values[0]}–{values[-1]}"


def troubled(row: Mapping[str, Any]) -> bool:
    """Whether a rank waits in that group, or is behind."""
    called = {rank["enqueued"] for rank in row["ranks"].values()}
    return len(called) > 1 or any(rank["completed"] != rank["enqueued"] for rank in row["ranks"].values())


def _verdict(document: Document, width: int) -> Iterator[str]:
    if document["kind"]:
        sure = "; the culprit cannot be determined" if document["undecidable"] else ""
        yield from labeled_lines("kind", document["kind"] + sure, width)
    for reason in document["reasons"][:CULPRITS_SHOWN]:
        yield from labeled_lines("culprit", f"rank {reason['rank']} {printable(reason['reason'])}", width)
        if reason["at"]:
            yield from labeled_lines("", f"at {place_text(reason['at'])}", width)
    if len(document["reasons"]) > CULPRITS_SHOWN:
        yield from labeled_lines("", f"… and {len(document['reasons']) - CULPRITS_SHOWN} more", width)
    if document["suspects"]:
        yield from labeled_lines("suspects", ranks_of(document["suspects"]), width)
    if document["victims"]:
        yield from labeled_lines("victims", ranks_of(document["victims"]), width)
    waiting = document["waiting_in"]
    if waiting:
        what = " ".join(part for part in (waiting["op"], str(waiting["sequence"]), waiting["sizes"]) if part)
        yield from labeled_lines("wait in", f"{printable(what)} of {group_text(waiting)}", width)
    for sentence in document["evidence"]:
        yield from labeled_lines("note", printable(sentence), width)


def _parted(document: Document, width: int) -> Iterator[str]:
    split = document["first_divergence"]
    if not split:
        return
    how = "not all ranks called it" if split["differs"] == "missing" else f"another {split['differs']}"
    yield from labeled_lines("diverged", f"at collective {split['sequence']} of {group_text(split)}: {how}", width)
    for side in split["call_sites"]:
        yield from labeled_lines("", f"{ranks_of(side['ranks'])}: {_call_text(side)}", width)
        if side["at"]:
            yield from labeled_lines("", f"  at {place_text(side['at'])}", width)
    for row in document["missing"][:CULPRITS_SHOWN]:
        text = doing_text(row)
        if text:
            yield from labeled_lines("", f"rank {row['rank']} {text}", width)


def doing_text(row: Mapping[str, Any]) -> str:
    """What a missing rank was doing; empty if it is not known."""
    parts = []
    if row["innermost"]:
        parts.append(f"is in {printable(row['call'] or row['innermost'])}")
    if row["step"] is not None:
        inside = f", inside {printable(row['inside'][-1])}" if row["inside"] else ""
        parts.append(f"wrote its last log line in step {row['step']}{inside} ({printable(row['caller'])})")
    if row["error"]:
        parts.append(f"said: {printable(row['error'])}")
    return "; ".join(parts)


def _grid(document: Document, width: int) -> Iterator[str]:
    grid = document["grid"]
    if not grid or not grid["sequences"]:
        return
    first, last = grid["sequences"][0], grid["sequences"][-1]
    names = [spans_text(ranks) for ranks, _ in grid["rows"]]
    column = min(max((len(name) for name in names), default=4) + 2, width // 2)
    head = f"collectives {first} to {last} of {group_text(grid)}"
    yield f"  {'grid':<{WIDE_LABEL}}{head}"
    for name, (_, marks) in list(zip(names, grid["rows"], strict=True))[:ROWS_SHOWN]:
        yield " " * (2 + WIDE_LABEL) + f"{cut(name, column - 1):<{column}}" + "".join(MARKS[mark] * 2 for mark in marks)
    if len(names) > ROWS_SHOWN:
        yield " " * (2 + WIDE_LABEL) + f"… and {len(names) - ROWS_SHOWN} more rows"
    yield " " * (2 + WIDE_LABEL) + LEGEND


def _waits(document: Document, width: int) -> Iterator[str]:
    rows = sorted(document["wait_for"], key=lambda row: -len(row["waiters"]))
    for place, row in enumerate(rows[:WAITS_SHOWN]):
        text = (
            f"{ranks_of(row['waiters'])} → {ranks_of(row['waited'])}  in {printable(row['op'])} {row['sequence']} of "
        )
        yield from labeled_lines("waits" if place == 0 else "", text + group_text(row), width)
    if len(rows) > WAITS_SHOWN:
        yield from labeled_lines("", f"… and {len(rows) - WAITS_SHOWN} more", width)
    for place, sentence in enumerate(document["cycle"]):
        yield from labeled_lines("cycle" if place == 0 else "", printable(sentence), width)


def _groups(document: Document, width: int) -> Iterator[str]:
    rows = sorted(document["groups"], key=lambda row: not troubled(row))
    shown = rows[:GROUPS_SHOWN]
    if document["healthy"] and len(shown) > 1:
        shown = shown[:4]
    for place, row in enumerate(shown):
        counters = ", ".join(
            f"{word} {_counter_text(row, key)}"
            for word, key in (("called", "enqueued"), ("started", "started"), ("ended", "completed"))
        )
        text = f"{group_text(row)}: {ranks_of(row['members'])}; {counters}"
        yield from labeled_lines("groups" if place == 0 else "", text, width)
    if len(rows) > len(shown):
        yield from labeled_lines("", f"… and {len(rows) - len(shown)} more", width)


def _stacks(document: Document, width: int) -> Iterator[str]:
    for group in document["stacks"][:STACKS_SHOWN]:
        yield from labeled_lines("stack", ranks_of(group["ranks"]), width)
        for thread in group["threads"]:
            if thread["main"]:
                yield from _frames(thread["frames"])
    if len(document["stacks"]) > STACKS_SHOWN:
        yield from labeled_lines("", f"… and {len(document['stacks']) - STACKS_SHOWN} more kinds", width)


def _frames(frames: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The innermost frame and the user's frames; library frames in between are counted."""
    shown = [frame for place, frame in enumerate(frames) if place == 0 or is_user_file(frame["file"])][:FRAMES_SHOWN]
    for frame in shown:
        yield " " * (2 + WIDE_LABEL) + place_text(frame)
    if len(frames) > len(shown):
        yield " " * (2 + WIDE_LABEL) + f"and {len(frames) - len(shown)} more, of libraries"


def _notes(document: Document, width: int) -> Iterator[str]:
    for sentence in document["problems"][:PROBLEMS_SHOWN]:
        yield from labeled_lines("note", printable(sentence), width)
    if len(document["problems"]) > PROBLEMS_SHOWN:
        yield from labeled_lines("", f"… and {len(document['problems']) - PROBLEMS_SHOWN} more", width)
    have, world = len(document["ranks"]), document["world"]
    whole = f"of {have} ranks" if have == world else f"of {have} of {world} ranks"
    yield from labeled_lines("dumps", whole, width)

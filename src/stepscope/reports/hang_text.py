"""A hang as the page shows it: since when, who blocks the job, where each rank is, stacks, Flight Recorders.

Everything is grouped, ordered, limited and put into words here; the page only draws it.  Reports on Flight Recorder
dumps (``reports/page/documents.py``) use the same views of recorders and stacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from stepscope.flight.stacks import is_hook_file, is_user_file
from stepscope.flight.wording import ranks_text, spans_text
from stepscope.hangs.report import past_if_over, since_text, steps_of
from stepscope.records.collectives import group_name
from stepscope.records.hang import HangRecord
from stepscope.reports.evidence_text import percent_text
from stepscope.reports.finding_text import kind_meaning
from stepscope.reports.flight_text import troubled

__all__ = ["flight_view", "hang_document", "ring_of", "stacks_view"]

Document = Mapping[str, Any]
View = dict[str, Any]

CULPRITS_SHOWN = 5
PLACES_SHOWN = 30


def hang_document(record: HangRecord, *, over: bool) -> View:
    """The record with ``steps`` and ``text`` (docs/api.md), in the past tense once the hang or the run is over."""
    ongoing = record.over is None and not over
    document = past_if_over(record, over=over).to_dict()
    culprits = [culprit["rank"] for culprit in document["culprits"]]
    steps = steps_of(record)
    text = {
        "heading": _heading(record, ongoing=ongoing),
        "look": "warning" if record.over == "recovered" else "critical",
        "meaning": kind_meaning(record.kind, over=not ongoing),
        "since": _capital(since_text(record, ongoing=ongoing, steps=steps)),
        "culprits": _culprits(document["culprits"]),
        "waiting": ranks_text(record.victims, start=True) if record.victims else "",
        "call": _call_text(document["collective"]) if document["collective"] else "",
        "ring": ring_of(document["cycle"]),
        "places": _places(document, culprits, ongoing=ongoing),
        "stacks": stacks_view(document["stacks"], culprits),
        "flight": flight_view(document["flight"], culprits, ongoing=ongoing) if document["flight"] else None,
    }
    return {**document, "steps": None if steps is None else [*steps], "text": text}


_WAIT = re.compile(r"rank (\d+) wait(?:s|ed) for rank (\d+)(?: in .*)?")
RING_RANKS = 10


def ring_of(cycle: Sequence[str]) -> list[int]:
    """The ranks of a wait cycle in order, to draw it as a ring; empty if its sentences form none, or are too many."""
    waits = [_WAIT.fullmatch(sentence) for sentence in cycle]
    pairs = [(int(wait[1]), int(wait[2])) for wait in waits if wait]
    closed = all(waited == pairs[(at + 1) % len(pairs)][0] for at, (_, waited) in enumerate(pairs))
    return [rank for rank, _ in pairs] if closed and len(pairs) == len(cycle) and 1 < len(pairs) <= RING_RANKS else []


def _heading(record: HangRecord, *, ongoing: bool) -> str:
    if ongoing:
        return "The job is hung"
    return "The job hung and recovered" if record.over == "recovered" else "The job hung"


def _culprits(culprits: Sequence[Document]) -> View:
    """Grouped by reason and place."""
    alike: dict[str, View] = {}
    for culprit in culprits:
        key = json.dumps([culprit["reason"], culprit["at"]])
        row = {"ranks": [], "reason": culprit["reason"], "where": _place(culprit["at"])}
        alike.setdefault(key, row)["ranks"].append(culprit["rank"])
    rows = list(alike.values())
    return {"rows": rows[:CULPRITS_SHOWN], "left": max(len(rows) - CULPRITS_SHOWN, 0)}


def _call_text(call: Document) -> str:
    """``all_reduce number 25 of default_pg, [512] Float``."""
    number = "" if call["sequence"] is None else f" number {call['sequence']}"
    peer = "" if call["peer"] is None else f" with rank {call['peer']}"
    shape = " ".join(part for part in (call["sizes"], call["dtypes"]) if part)
    return f"{call['op'] or 'a collective'}{number} of {_group(call)}{peer}{f', {shape}' if shape else ''}"


def _group(row: Document) -> str:
    return group_name(row.get("group", row.get("name")) or "", row.get("description") or "") or "a group"


def _place(frame: Document | None) -> View | None:
    """``text``: ``train.py:41 in step``; ``file``: its whole path."""
    if frame is None:
        return None
    where = f"{_short_file(frame['file'])}:{frame['line']}" if frame["line"] else _short_file(frame["file"])
    function = frame["function"]
    text = f"{where} in {function}" if function and function != "<module>" else where
    return {"text": text, "file": frame["file"]}


def _short_file(file: str) -> str:
    """A library file from its package on; a user file with its last folder."""
    _, found, inside = file.rpartition("-packages/")
    return inside if found else "/".join(file.split("/")[-2:])


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# -- where each rank is -----------------------------------------------------------------------------------------------

STATES = {
    "R": ("runs", "ran"),
    "S": ("sleeps", "slept"),
    "D": ("waits for a disk", "waited for a disk"),
    "T": ("is stopped", "was stopped"),
    "t": ("is stopped by a debugger", "was stopped by a debugger"),
    "Z": ("is dead", "was dead"),
    "X": ("is dead", "was dead"),
    "I": ("is idle", "was idle"),
}
"""Process states by the kernel's letter, during a hang and after it."""
WORKERS_SHOWN = 4


def _places(document: Document, culprits: Collection[int], *, ongoing: bool) -> View:
    """Ranks in the same call, at the same line and in the same state share a row; culprits come first."""
    alike: dict[str, list[Document]] = {}
    for rank in document["ranks"]:
        same = ("alive", "waiting_in", "at", "process_state", "gil_held")
        key = json.dumps([*(rank[name] for name in same), rank["rank"] in culprits])
        alike.setdefault(key, []).append(rank)
    rows = [_place_row(ranks, culprits, ongoing=ongoing) for ranks in alike.values()]
    rows.sort(key=lambda row: (not row["culprit"], len(row["ranks"])))
    return {"rows": rows[:PLACES_SHOWN], "left": max(len(rows) - PLACES_SHOWN, 0)}


def _place_row(ranks: Sequence[Document], culprits: Collection[int], *, ongoing: bool) -> View:
    first = ranks[0]
    shares = [rank["cpu_share"] for rank in ranks if rank["cpu_share"] is not None]
    range_ = dict.fromkeys(percent_text(share) for share in (min(shares), max(shares))) if shares else {}
    steps = sorted({rank["step"] for rank in ranks if rank["step"] is not None})
    call = first["waiting_in"]
    return {
        "ranks": [rank["rank"] for rank in ranks],
        "who": spans_text([rank["rank"] for rank in ranks]),
        "hosts": ", ".join([*dict.fromkeys(rank["host"] for rank in ranks if rank["host"])][:3]),
        "call": _call_text(call) if call else "not in a collective" if first["alive"] else "",
        "where": _place(first["at"]),
        "steps": spans_text(steps) if steps else "",
        "phases": ", ".join(dict.fromkeys(rank["phase"] for rank in ranks if rank["phase"])),
        "state": _state_text(first, ongoing=ongoing),
        "cpu": "–".join(range_),
        "silent_s": max(rank["since_s"] for rank in ranks),
        "culprit": any(rank["rank"] in culprits for rank in ranks),
        "workers": [
            _worker_text(worker, ongoing=ongoing)
            for rank in ranks
            for worker in rank["workers"]
            if isinstance(worker.get("at"), str) or worker.get("state", "") not in ("S", "R", "")
        ][:WORKERS_SHOWN],
    }


def _state_text(rank: Document, *, ongoing: bool) -> str:
    if not rank["alive"]:
        return "is gone" if ongoing else "was gone"
    state = _state(rank["process_state"], ongoing=ongoing) or rank["process_state"] or "unknown"
    holds = "holds" if ongoing else "held"
    return f"{state}, {holds} the GIL" if rank["gil_held"] is True else state


def _state(letter: Any, *, ongoing: bool) -> str:
    return STATES[letter][not ongoing] if isinstance(letter, str) and letter in STATES else ""


def _worker_text(worker: Document, *, ongoing: bool) -> str:
    """``DataLoader worker 4711 sleeps at data.py:12``."""
    what = "DataLoader worker" if worker.get("kind") == "dataloader" else "process"
    at = f" at {worker['at']}" if isinstance(worker.get("at"), str) else ""
    return f"{what} {worker.get('pid', '')} {_state(worker.get('state'), ongoing=ongoing)}{at}".strip()


# -- stacks -----------------------------------------------------------------------------------------------------------

STACKS_SHOWN = 40
THREADS_SHOWN = 33


def stacks_view(groups: Sequence[Document], culprits: Collection[int]) -> View:
    """Groups whose main threads are equal to the line; those with a culprit first, then the small ones.

    A thread's frames come in pieces, innermost first: consecutive lines of user code (``own``), or of a library.
    """
    alike: dict[str, View] = {}
    for group in groups:
        main = _main_thread(group["threads"])
        workers = group.get("workers_of", False)
        key = json.dumps([workers, main["frames"] if main else group["threads"]])
        row = alike.setdefault(key, {"ranks": set(), "workers": workers, "threads": []})
        row["ranks"].update(group["ranks"])
        if len(group["threads"]) > len(row["threads"]):
            row["threads"] = group["threads"]
    rows = sorted(
        alike.values(),
        key=lambda row: (
            row["ranks"].isdisjoint(culprits),
            not row["workers"],
            len(row["ranks"]),
            min(row["ranks"], default=0),
        ),
    )
    return {
        "groups": [_stack_group(row, culprits) for row in rows[:STACKS_SHOWN]],
        "left": max(len(rows) - STACKS_SHOWN, 0),
    }


def _stack_group(row: View, culprits: Collection[int]) -> View:
    main = _main_thread(row["threads"]) or (row["threads"][0] if row["threads"] else None)
    others = [thread for thread in row["threads"] if thread is not main]
    frames = main["frames"] if main else []
    place = next((frame for frame in frames if is_user_file(frame["file"])), frames[0] if frames else None)
    shown = _place(place)
    who = ranks_text(row["ranks"], start=not row["workers"])
    return {
        "who": f"DataLoader workers of {who}" if row["workers"] else who,
        "culprit": not row["ranks"].isdisjoint(culprits),
        "where": shown["text"] if shown else "",
        "main": None if main is None else _pieces(main["frames"]),
        "others": [
            {"name": thread["name"] or str(at), "pieces": _pieces(thread["frames"])}
            for at, thread in enumerate(others[: THREADS_SHOWN - 1], 1)
        ],
        "threads": len(row["threads"]),
    }


def _main_thread(threads: Iterable[Document]) -> Document | None:
    return next((thread for thread in threads if thread["main"]), None)


def _pieces(frames: Iterable[Document]) -> list[View]:
    pieces: list[View] = []
    for frame in frames:
        if is_hook_file(frame["file"]):
            continue
        own = is_user_file(frame["file"])
        if not pieces or pieces[-1]["own"] is not own:
            pieces.append({"own": own, "package": _package(frame["file"]), "frames": []})
        where = f"{_short_file(frame['file'])}:{frame['line']}" if frame["line"] else _short_file(frame["file"])
        pieces[-1]["frames"].append({"where": where, "function": frame["function"], "file": frame["file"]})
    return pieces


def _package(file: str) -> str:
    short = _short_file(file)
    return "Python" if short.startswith(("<", "python")) or "/" not in short else short.partition("/")[0]


# -- Flight Recorders -------------------------------------------------------------------------------------------------

GRID_MEANINGS = {
    "c": "ended",
    "s": "started",
    "w": "called and waits",
    "x": "waits in another call",
    "d": "ended another call",
    "m": "not called",
    "-": "no longer known",
    "?": "no recorder response",
}
"""The marks of ``stepscope flight --json``."""
PROBLEMS_SHOWN = 4


def flight_view(
    flight: Document,
    culprits: Collection[int],
    *,
    ongoing: bool,
    rows: int = 64,
    groups: int = 40,
    waits: int = 16,
    with_stacks: bool = False,
) -> View | None:
    """The recorders' own data: where ranks diverged, a grid of ranks and collectives, the waits, the groups.

    ``rows``, ``groups``, ``waits``: how many at most; None if no recorder answered.
    """
    grid, parted, all_groups = flight.get("grid"), flight.get("first_divergence"), flight.get("groups") or []
    if not grid and not parted and not all_groups:
        return None
    odd = set(culprits or flight.get("culprits") or ())
    shown = sorted(map(_group_row, all_groups), key=lambda row: not row["behind"])
    waiting = sorted(flight.get("wait_for") or [], key=lambda row: -len(row["waiters"]))
    return {
        "about": _about(flight),
        "divergence": _divergence(parted, with_stacks=with_stacks) if parted else None,
        "grid": _grid(grid, odd, rows, ongoing=ongoing) if grid and grid["sequences"] else None,
        "waits": [_wait_text(row, ongoing=ongoing) for row in waiting[:waits]],
        "waits_left": max(len(waiting) - waits, 0),
        "groups": shown[:groups],
        "groups_left": max(len(shown) - groups, 0),
        "problems": [str(problem) for problem in (flight.get("problems") or [])[:PROBLEMS_SHOWN]],
    }


def _about(flight: Document) -> str:
    ranks, world = len(flight.get("ranks") or ()), flight.get("world", 0)
    return f"From {f'all {world}' if ranks == world else f'{ranks} of {world}'} ranks."


def _divergence(parted: Document, *, with_stacks: bool) -> View:
    where = f"number {parted['sequence']} of {_group(parted)}"
    if parted["differs"] == "missing":
        text = f"{ranks_text(parted['ranks'], start=True)} did not call {where}."
    else:
        text = f"The ranks diverged at {where}: another {parted['differs']}."
    sides = [
        {
            "who": ranks_text(side["ranks"], start=True),
            "call": _side_text(side),
            "where": _place(side["at"]),
            "odd": not set(side["ranks"]).isdisjoint(parted["ranks"]),
            "pieces": _pieces(side.get("frames") or ()) if with_stacks else [],
        }
        for side in parted["call_sites"]
    ]
    return {"text": text, "sides": sides}


def _side_text(side: Document) -> str:
    if side["op"] is None:
        return "did not call it"
    return " ".join(part for part in (side["op"], side["sizes"], side["dtypes"]) if part)


def _grid(grid: Document, odd: Collection[int], most: int, *, ongoing: bool) -> View:
    used = [mark for mark in GRID_MEANINGS if any(mark in marks for _, marks in grid["rows"])]
    return {
        "about": f"The last collectives of {_group(grid)}, by number; one row for ranks with equal progress.",
        "sequences": grid["sequences"],
        "rows": [
            {"who": ranks_text(ranks), "odd": not set(ranks).isdisjoint(odd), "marks": marks}
            for ranks, marks in grid["rows"][:most]
        ],
        "left": max(len(grid["rows"]) - most, 0),
        "legend": [
            [mark, GRID_MEANINGS[mark] if ongoing else GRID_MEANINGS[mark].replace("waits", "waited")] for mark in used
        ],
    }


def _wait_text(row: Document, *, ongoing: bool) -> str:
    """``Rank 0 waits for rank 1 in all_reduce number 41 of group 1.``"""
    waits = "waited" if not ongoing else "waits" if len(row["waiters"]) == 1 else "wait"
    call = f"{row['op']} number {row['sequence']} of {_group(row)}"
    return f"{ranks_text(row['waiters'], start=True)} {waits} for {ranks_text(row['waited'])} in {call}."


def _group_row(group: Document) -> View:
    ranks = group["ranks"]
    return {
        "name": _group(group),
        "members": ranks_text(group["members"]),
        "called": _counter_text(ranks, "enqueued"),
        "started": _counter_text(ranks, "started"),
        "ended": _counter_text(ranks, "completed"),
        "behind": troubled(group),
    }


def _counter_text(ranks: Mapping[str, Document], key: str) -> str:
    """``24``, or ``6 (rank 0), 7 (rank 1)`` where they differ."""
    by_value: dict[int | None, list[int]] = {}
    for rank, row in ranks.items():
        by_value.setdefault(row[key], []).append(int(rank))
    values = sorted(by_value, key=lambda value: -1 if value is None else value)
    if len(values) == 1:
        return _count(values[0])
    return ", ".join(f"{_count(value)} ({ranks_text(by_value[value])})" for value in values[:4])


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)

"""What the page shows of a trace, of Flight Recorder dumps, of a comparison or of a sweep, in one document.

The input is the document of ``stepscope trace --json`` or ``stepscope flight --json`` and nothing else. The page
(``web/src/screens/report-screen.tsx``) draws the result and adds no words of its own, so that text and page agree. The
size is bounded, whatever the input: rows of tables, bars, points of curves and events of the timeline have limits.

A document has a name, facts for the bar at the top, the verdict, other findings, and *parts* in reading order. Each
part has a ``form``: ``finding`` (a second verdict), ``tables``, ``bars``, ``columns``, ``curves``, ``timeline``,
``flight``, ``front``, ``stacks`` or ``list``. ``web/src/api/report-document.ts`` has all fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepscope.records.text import bytes_text, ns_text, printable, share_text
from stepscope.reports.evidence_text import evidence_rows
from stepscope.reports.finding_text import finding_mark, kind_name
from stepscope.reports.flight_text import doing_text, group_text, place_text, ranks_of
from stepscope.reports.hang_text import flight_view, ring_of, stacks_view
from stepscope.reports.layout import cell_text, headings, is_number
from stepscope.reports.trace import (
    COLUMNS,
    NO_FINDING,
    certainty_of,
    facts_of,
    mark_of_diff,
    other_findings,
    problems_of,
    rank_shown,
    trace_price,
    worst_ranks,
)
from stepscope.traces.model.kernel_names import fitted, short_name

__all__ = [
    "bar",
    "bar_chart",
    "finding_part",
    "flight_page",
    "listed",
    "page_document",
    "page_table",
    "tables_part",
    "titled_lists",
    "trace_page",
]

Document = Mapping[str, Any]
Part = dict[str, Any]

SCHEMA = 1
SENTENCES_SHOWN = 100


def page_document(kind: str, name: str, facts: Sequence[str], parts: Iterable[Part], **more: Any) -> Part:
    """``more``: the verdict, other findings, notices."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "name": printable(name),
        "facts": [printable(fact) for fact in facts],
        "notices": [],
        "others": [],
        "more": "",
        "parts": list(parts),
        **more,
    }


def finding_part(mark: str, title: str, **more: Any) -> Part:
    """A verdict or finding; ``kind``: its name, empty if it has none; ``sides``: titled lists next to each other."""
    return {
        "kind": "",
        "look": mark,
        "title": printable(title),
        "facts": [],
        "price": None,
        "left": None,
        "advice": [],
        "certainty": None,
        "evidence": [],
        "sides": [],
        **more,
    }


def listed(title: str, sentences: Sequence[str], limit: int = SENTENCES_SHOWN) -> Iterator[Part]:
    if sentences:
        items = [printable(sentence) for sentence in sentences[:limit]]
        yield {"form": "list", "title": title, "items": items, "more": _more(len(sentences) - len(items))}


def _more(count: int) -> str:
    return f"… and {count:,} more." if count > 0 else ""


# -- tables -----------------------------------------------------------------------------------------------------------

LONGEST_CELL = 72
WIDE = 150
"""Characters in a row that fit a window of 1,280 pixels; further columns are shown on request."""
NARROWED = 36
"""Longer text wraps, so that it needs no more room."""
TEXT_COLUMN = 14
"""Least width of a column of text."""


def page_table(table: Mapping[str, Any], top: int, first: Sequence[str] = ()) -> Part | None:
    """A table with the columns ``first`` before the others; None without rows.

    A cell is its text or, if the page must know more, a pair: with the number to sort by, or with the text in full.
    """
    rows = table["rows"][:top]
    ordered = [*(column for column in first if column in table["columns"]), *table["columns"]]
    columns = [
        column
        for column in dict.fromkeys(ordered)
        if any(row[column] is not None and row[column] != "" for row in rows)
    ]
    if not columns:
        return None
    numeric = [all(row[column] is None or is_number(row[column]) for row in rows) for column in columns]
    cells = [
        [_number(column, row[column]) if as_number else _text(column, row[column]) for row in rows]
        for column, as_number in zip(columns, numeric, strict=True)
    ]
    heads = [headings(columns)[column] for column in columns]
    return {
        "title": printable(table["title"]),
        "note": table["note"],
        "heads": heads,
        "numeric": numeric,
        "rows": [list(row) for row in zip(*cells, strict=True)],
        "main": _fitting(heads, numeric, cells),
        "more": _more(len(table["rows"]) - len(rows) + table["left_out"]),
        "open": False,
    }


def _number(column: str, value: Any) -> Any:
    return ["", None] if value is None else [cell_text(column, value), value]


def _text(column: str, value: Any) -> Any:
    text = printable(cell_text(column, value))
    short = text if column == "path" else fitted(short_name(text), LONGEST_CELL)
    return short if short == text else [short, text]


def _fitting(heads: Sequence[str], numeric: Sequence[bool], cells: Sequence[Sequence[Any]]) -> int:
    """How many columns fit; at least two."""
    room = WIDE
    for count, (head, as_number, column) in enumerate(zip(heads, numeric, cells, strict=True)):
        longest = max(len(cell if isinstance(cell, str) else cell[0]) for cell in column)
        least = 0 if as_number else TEXT_COLUMN
        room -= 3 + max(min(longest, NARROWED), least, *map(len, head.split()))
        if room < 0 and count >= 2:
            return count
    return len(heads)


def tables_part(title: str, tables: Iterable[Part | None], about: str = "") -> Iterator[Part]:
    found = [table for table in tables if table is not None]
    if len(found) == 1:
        found[0]["open"] = True
    if found:
        yield {"form": "tables", "title": title, "about": about, "tables": found}


# -- charts -----------------------------------------------------------------------------------------------------------

BARS_SHOWN = 32
"""More ranks or steps are drawn as thin columns."""
MOST_COLUMNS = 1024
MOST_POINTS = 2000

PARTS = {
    "compute": "computing",
    "overlap": "computing and communicating",
    "comm": "only communicating",
    "copy": "only copying",
    "idle": "idle",
}
"""Parts of a device's span, which add up to it, by look."""


def bar(label: str, number: int, parts: Mapping[str, tuple[float, str]], figure: str) -> Part:
    """``parts``: value and tooltip by look."""
    shown = [[color, value, printable(title)] for color, (value, title) in parts.items() if value > 0]
    return {"label": printable(label), "number": number, "parts": shown, "figure": figure}


def bar_chart(
    title: str, axis: str, bars: Sequence[Part], legend: Mapping[str, str], about: str = ""
) -> Iterator[Part]:
    """Few bars one below the other, many as columns over ``axis`` (what they are numbered by)."""
    if not bars:
        return
    used = {color for bar in bars for color, _, _ in bar["parts"]}
    shown = {color: name for color, name in legend.items() if color in used}
    common = {"title": title, "about": about, "legend": [[color, name] for color, name in shown.items()]}
    if len(bars) <= BARS_SHOWN:
        yield {"form": "bars", **common, "rows": list(bars)}
        return
    size = -(-len(bars) // MOST_COLUMNS)
    groups = [bars[at : at + size] for at in range(0, len(bars), size)]
    values = {
        color: [
            sum(value for bar in group for own, value, _ in bar["parts"] if own == color) / len(group)
            for group in groups
        ]
        for color in shown
    }
    numbers = [[group[0]["number"], group[-1]["number"]] for group in groups]
    yield {"form": "columns", **common, "axis": axis, "numbers": numbers, "values": values}


def _curves(title: str, about: str, unit: str, times: Sequence[int], lines: Mapping[str, Sequence[Any]]) -> Part:
    """Curves over time, which start at zero; each value holds until the next. Of many points the highest are kept."""
    size = -(-len(times) // MOST_POINTS) or 1
    starts = range(0, len(times), size)
    values = {
        name: [max((value for value in column[at : at + size] if value is not None), default=None) for at in starts]
        for name, column in lines.items()
    }
    since = times[0] if times else 0
    return {
        "form": "curves",
        "title": printable(title),
        "about": about,
        "unit": unit,
        "times_ns": [times[at] - since for at in starts],
        "lines": [[name, column] for name, column in values.items()],
    }


# -- traces -----------------------------------------------------------------------------------------------------------

ROWS = 100
FINDINGS_SHOWN = 40
FILES_SHOWN = 200
CAUSES = {
    "compute": "compute",
    "communication": "comm",
    "copy": "copy",
    "launch_delay": "launch",
    "kernel_gap": "launch",
}
"""Looks of the causes on a critical path; all others are on the host."""
DRAWN = ("memory", "queue_curve", "copy_bandwidth")
"""Tables that are curves: drawn, not listed."""
FILE_COLUMNS = ("path", "rank", "host", "format", "events", "backend")


def trace_page(document: Document, *, name: str, top: int = ROWS, timeline: Part | None = None) -> Part:
    """The page of traces. ``top``: rows of each table; ``timeline``: ``Timeline.to_dict``."""
    diff, now = document["diff"], _trace_verdict(document)
    sections = (
        _what_changed(diff, top) if diff is not None else (),
        [{"form": "finding", "title": "Now", **now}] if diff is not None else (),
        _what_if(document),
        [{"form": "timeline", **timeline}] if timeline else (),
        _ranks(document),
        _collectives(document),
        _steps(document),
        _path(document),
        _memory(document),
        _queue(document),
        _trace_tables(document, top),
        listed("Worth knowing", problems_of(document)),
        _files(document),
    )
    return page_document(
        "trace",
        name,
        facts_of(document),
        (part for section in sections for part in section),
        notices=[printable(document["mixed"])] if document["mixed"] else [],
        **(now if diff is None else _diff_verdict(diff)),
    )


def _diff_verdict(diff: Mapping[str, Any]) -> Part:
    notes = titled_lists([("Note", [(sentence, "") for sentence in diff["notices"]])])
    return {"verdict": finding_part(mark_of_diff(diff), diff["verdict"], sides=notes)}


def _trace_verdict(document: Document) -> Part:
    verdict, others = document["verdict"], other_findings(document)
    lead = {"cost": {}, "evidence": {}, "steps": None} if verdict["kind"] in NO_FINDING else document["findings"][0]
    return {
        "verdict": _finding({**lead, **verdict}),
        "others": [_finding(finding) for finding in others[:FINDINGS_SHOWN]],
        "more": _more(len(others) - FINDINGS_SHOWN),
    }


def _finding(finding: Mapping[str, Any]) -> Part:
    speedup = (finding["cost"].get("if_fixed") or {}).get("speedup")
    price, certainty = trace_price(finding), certainty_of(finding)
    return finding_part(
        finding_mark(finding),
        finding["title"],
        kind="" if finding["kind"] in NO_FINDING else kind_name(finding["kind"]),
        facts=[ranks_of(finding["ranks"])] if finding["ranks"] else [],
        price=price[:1].upper() + price[1:] if price else None,
        left=round(1 / speedup, 4) if price and speedup else None,
        advice=[printable(sentence) for sentence in finding["advice"]],
        certainty=f"Certainty: {certainty}" if certainty else None,
        evidence=evidence_rows(finding["evidence"]),
    )


def _what_changed(diff: Mapping[str, Any], top: int) -> Iterator[Part]:
    tables = [page_table(table, top, COLUMNS.get(name, ())) for name, table in diff["tables"].items()]
    for table in tables[:1]:
        if table is not None:
            table["open"] = True
    yield from tables_part("What changed", tables)


def _what_if(document: Document) -> Iterator[Part]:
    if document["what_if"]:
        yield from tables_part("What if", [page_table(document["what_if"], ROWS)])


def _ranks(document: Document) -> Iterator[Part]:
    rows = [row for row in document["distributed"]["rows"] if row["span_ns"]]
    on_host = all(row["measured"] == "host" for row in document["distributed"]["rows"])
    bars = [_time_bar("rank", row["rank"], row) for row in rows]
    yield from bar_chart(f"{'Host' if on_host else 'Device'} time by rank", "rank", bars, PARTS, "where it goes")


def _time_bar(axis: str, number: int, row: Mapping[str, Any]) -> Part:
    """A bar for a table row with a span and its parts."""
    span_ns, comm_ns = row["span_ns"], row["exposed_comm_ns"]
    times_ns = (
        row["compute_ns"] - row["overlap_ns"],
        row["overlap_ns"],
        comm_ns,
        max(span_ns - row["compute_ns"] - comm_ns - row["idle_ns"], 0),
        row["idle_ns"],
    )
    parts = {
        color: (time_ns, f"{name}: {ns_text(time_ns)}, {share_text(time_ns / span_ns)}")
        for (color, name), time_ns in zip(PARTS.items(), times_ns, strict=True)
    }
    return bar(f"{axis} {number}", number, parts, ns_text(span_ns))


def _steps(document: Document) -> Iterator[Part]:
    """The work that each step launched or, without a device, its length."""
    rank, table = _of_shown(document, "temporal_steps")
    if not table:
        return
    on_device = any(row["span_ns"] for row in table["rows"])
    bars = [
        _time_bar("step", row["step"], row)
        if on_device and row["span_ns"]
        else bar(
            f"step {row['step']}",
            row["step"],
            {"compute": (row["wall_ns"], ns_text(row["wall_ns"]))},
            ns_text(row["wall_ns"]),
        )
        for row in table["rows"]
    ]
    legend = PARTS if on_device else {"compute": "length"}
    yield from bar_chart("Steps", "step", bars, legend, f"of rank {rank}{', on the device' if on_device else ''}")


def _path(document: Document) -> Iterator[Part]:
    """By rank and by cause over all ranks; by cause for a single rank."""
    path = document["path"]
    length_ns = path["length_ns"]
    if not length_ns:
        return
    about = f"what {ns_text(length_ns)} of steps were due to"
    if len(document["ranks"]) > 1:
        ranks = list(path["by_rank"].items())[:BARS_SHOWN]
        bars = [_path_bar(f"rank {rank}", int(rank), "compute", ns, length_ns) for rank, ns in ranks]
        yield from bar_chart("Critical path by rank", "rank", bars, {}, about)
    causes = [
        _path_bar(name.replace("_", " "), at, CAUSES.get(name, "host"), ns, length_ns)
        for at, (name, ns) in enumerate(path["by_cause"].items())
    ]
    yield from bar_chart("Critical path by cause", "cause", causes, {}, about)


def _path_bar(label: str, number: int, color: str, time_ns: int, length_ns: int) -> Part:
    text = f"{share_text(time_ns / length_ns)}, {ns_text(time_ns)}"
    return bar(label, number, {color: (time_ns, text)}, text)


def _collectives(document: Document) -> Iterator[Part]:
    collectives = document["collectives"]
    if not collectives["count"]:
        return
    bars = []
    for rank, wait_ns in collectives["wait_ns"].items():
        last, transfer_ns = collectives["last_counts"][rank], collectives["own_transfer_ns"][rank]
        parts = {
            "comm": (wait_ns, f"waiting for the last to arrive: {ns_text(wait_ns)}"),
            "compute": (transfer_ns, f"transfer: {ns_text(transfer_ns)}"),
        }
        bars.append(bar(f"rank {rank}", int(rank), parts, f"{ns_text(wait_ns)}, last {last}×"))
    legend = {"comm": "waiting for the last rank", "compute": "transfer"}
    yield from bar_chart("Collectives", "rank", bars, legend, "waiting and transfer")


def _memory(document: Document) -> Iterator[Part]:
    rank, table = _of_shown(document, "memory")
    if not table:
        return
    rows = table["rows"]
    lines = {name: [row[f"{name}_bytes"] for row in rows] for name in ("allocated", "reserved")}
    known = {name: column for name, column in lines.items() if any(value is not None for value in column)}
    if known:
        most = max((value for value in lines["allocated"] if value is not None), default=None)
        peak = "" if most is None else f"; peak: {bytes_text(most)} allocated"
        yield _curves("Memory", f"of rank {rank}{peak}", "bytes", [row["time_ns"] for row in rows], known)


def _queue(document: Document) -> Iterator[Part]:
    """Queue length of the stream with most launches."""
    rank, table = _of_shown(document, "queue_curve")
    if not table:
        return
    stream = table["rows"][0]["stream"]
    rows = [row for row in table["rows"] if row["stream"] == stream]
    about = f"work launched but not started, on stream {stream} of rank {rank}"
    times = [row["start_ns"] for row in rows]
    yield _curves("Queue", printable(about), "count", times, {"queue length": [row["max_length"] for row in rows]})


def _of_shown(document: Document, name: str) -> tuple[str, Mapping[str, Any] | None]:
    rank = rank_shown(document)
    table = document["ranks"][rank]["tables"].get(name) if rank is not None else None
    return rank or "", table if table and len(table["rows"]) > 1 else None


def _trace_tables(document: Document, top: int) -> Iterator[Part]:
    if len(document["ranks"]) > 1:
        ranks = {**document["distributed"], "rows": worst_ranks(document, count=top)}
        ranks["left_out"] = len(document["distributed"]["rows"]) - len(ranks["rows"])
        tables = {"distributed": ranks, **document["collectives"]["tables"], "job_path": document["path"]["table"]}
        found = [page_table(table, top, COLUMNS.get(name, ())) for name, table in tables.items()]
        if found[0] is not None:
            found[0]["open"] = True
        yield from tables_part("Tables of all ranks", found)
    rank = rank_shown(document)
    if rank is None:
        return
    own = document["ranks"][rank]["tables"]
    shown = [page_table(table, top, COLUMNS.get(name, ())) for name, table in own.items() if name not in DRAWN]
    yield from tables_part(f"Tables of rank {rank}", shown)


def _files(document: Document) -> Iterator[Part]:
    table = {"title": "Files", "columns": FILE_COLUMNS, "rows": document["files"], "left_out": 0, "note": ""}
    yield from tables_part("Files", [page_table(table, FILES_SHOWN)])


# -- Flight Recorder dumps --------------------------------------------------------------------------------------------

GROUPS_SHOWN = 200
GRID_ROWS = 1024
WAITS_SHOWN = 200
CULPRITS_SHOWN = 32


def flight_page(document: Document, *, name: str) -> Part:
    """The page of Flight Recorder dumps."""
    have, world = len(document["ranks"]), document["world"]
    dumps = f"dumps of {have} ranks" if have == world else f"dumps of {have} of {world} ranks"
    parts = (_flight(document), _stacks(document), listed("Worth knowing", document["problems"]))
    shown = [part for own in parts for part in own]
    return page_document("flight", name, [dumps], shown, verdict=_flight_verdict(document))


def _flight_verdict(document: Document) -> Part:
    mark = "healthy" if document["healthy"] else "warning" if document["undecidable"] else "critical"
    facts = ["the culprit cannot be determined"] if document["undecidable"] else []
    reasons = document["reasons"]
    culprits = [(f"Rank {reason['rank']} {reason['reason']}", place_text(reason["at"])) for reason in reasons]
    doing = [(f"Rank {row['rank']} {text}", "") for row in document["missing"] if (text := doing_text(row))]
    ranks = [(title, [(ranks_of(document[key]).capitalize(), "")]) for title, key in RANKS.items() if document[key]]
    waiting = document["waiting_in"]
    if waiting:
        what = " ".join(part for part in (waiting["op"], str(waiting["sequence"]), waiting["sizes"]) if part)
        ranks.append(("They wait in", [(f"{what} of {group_text(waiting)}", "")]))
    sides = [
        ("Culprit" if len(reasons) == 1 else "Culprits", culprits),
        *ranks,
        ("Ranks that others wait for", doing),
        (CYCLE, [(sentence, "") for sentence in document["cycle"]]),
        ("Evidence", [(sentence, "") for sentence in document["evidence"]]),
    ]
    return finding_part(
        mark, document["title"], kind=kind_name(document["kind"] or ""), facts=facts, sides=titled_lists(sides)
    )


RANKS = {"Suspects": "suspects", "Waiting": "victims"}
CYCLE = "Wait cycle"
"""Also drawn as a ring of ranks."""


def titled_lists(sides: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> list[Part]:
    """Lists of sentences, each with a line of code or an empty string."""
    return [
        {
            "title": title,
            "ring": ring_of([text for text, _ in items]) if title == CYCLE else [],
            "items": [[printable(text), code] for text, code in items[:CULPRITS_SHOWN]],
            "more": _more(len(items) - CULPRITS_SHOWN),
        }
        for title, items in sides
        if items
    ]


def _flight(document: Document) -> Iterator[Part]:
    """The recorders' own data, which the page draws as in a hang of a run."""
    view = flight_view(
        document,
        document["culprits"],
        ongoing=True,
        rows=GRID_ROWS,
        groups=GROUPS_SHOWN,
        waits=WAITS_SHOWN,
        with_stacks=True,
    )
    if view is not None:
        yield {"form": "flight", "title": "Collectives of each rank", "flight": view}


def _stacks(document: Document) -> Iterator[Part]:
    if document["stacks"]:
        yield {"form": "stacks", "title": "Stacks", "stacks": stacks_view(document["stacks"], document["culprits"])}

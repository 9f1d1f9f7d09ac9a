"""What the page shows of files, in one document: its parts, and that of Flight Recorder dumps.

Traces have several views of such parts (``trace_views.py``); comparisons and sweeps are made in ``comparison/``. The
input of each is the JSON document of its command and nothing else. The page
(``web/src/screens/report-screen.tsx``) draws the result and adds no words, so that text and page agree. The
size is bounded, whatever the input: rows of tables, bars, points of curves and events of the timeline have limits.

A document has a name, facts for the bar at the top, the verdict, other findings, and *parts* in reading order. Each
part has a ``form``: ``finding`` (a second verdict), ``tables``, ``bars``, ``columns``, ``curves``, ``timeline``,
``flight``, ``front``, ``stacks`` or ``list``. ``web/src/api/report-document.ts`` has all fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepscope.records.text import printable
from stepscope.reports.finding_text import kind_name
from stepscope.reports.flight_text import doing_text, group_text, place_text, ranks_of
from stepscope.reports.hang_text import flight_view, ring_of, stacks_view
from stepscope.reports.layout import cell_text, headings, is_number
from stepscope.traces.model.kernel_names import fitted, short_name

__all__ = [
    "bar",
    "bar_chart",
    "curve_chart",
    "finding_part",
    "flight_page",
    "listed",
    "more_text",
    "page_document",
    "page_table",
    "tables_part",
    "titled_lists",
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
        yield {"form": "list", "title": title, "items": items, "more": more_text(len(sentences) - len(items))}


def more_text(count: int) -> str:
    return f"… and {count:,} more." if count > 0 else ""


# -- tables -----------------------------------------------------------------------------------------------------------

LONGEST_CELL = 72
WIDE = 150
COLUMN_NAME = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
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
    names = headings(columns)
    heads = [names[column] for column in columns]
    return {
        "title": printable(table["title"]),
        # Notes name columns as in CSV and JSON.
        "note": COLUMN_NAME.sub(lambda found: names.get(found[0], found[0]), table["note"]),
        "heads": heads,
        "numeric": numeric,
        "rows": [list(row) for row in zip(*cells, strict=True)],
        "main": _fitting(heads, numeric, cells),
        "more": more_text(len(table["rows"]) - len(rows) + table["left_out"]),
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


def curve_chart(title: str, about: str, unit: str, times: Sequence[int], lines: Mapping[str, Sequence[Any]]) -> Part:
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
            "more": more_text(len(items) - CULPRITS_SHOWN),
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

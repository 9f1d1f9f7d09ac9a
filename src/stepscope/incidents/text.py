"""The documents of incidents as Markdown, for GitHub, Slack and mail, and as text for a terminal.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepscope.alerts.message_text import clock_text
from stepscope.records.text import count_text
from stepscope.reports.layout import MARKS, Page

__all__ = ["incident_markdown", "incident_text", "incidents_markdown", "incidents_text"]

Document = Mapping[str, Any]

_SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#])")


# -- Markdown ---------------------------------------------------------------------------------------------------------
# Headings, lists, tables and code blocks only: GitHub shows all of it, and Slack and mail stay readable.  Sources are
# in italics at the end of what they belong to.


def incident_markdown(document: Document) -> str:
    incident, run = document["incident"], document["run"]
    about = (
        f"Incident {incident['number']} of {document['count']} in run **{_md(run['name'])}**",
        _md(incident["kind_text"]),
        incident["severity"],
        _md(incident["state_text"]),
        f"the run: {_md(run['status_text'])}",
    )
    title = f"# {MARKS[incident['severity']]} {_md(incident['title'])}"
    lines = [title, "", f"{' · '.join(about)}{_source(incident)}"]
    if document.get("notice"):
        lines += ["", f"> {_md(document['notice'])}"]
    for title, body in (
        ("What to do", _bullets(_rows(document, "finding", "advice"))),
        ("Onset", _bullets(_rows(document, "onset", "statements"))),
        ("Impact", _bullets(_rows(document, "impact", "statements"))),
        ("Evidence", _evidence(document)),
        ("Errors", _errors(document)),
        ("Logs", _logs(document)),
        ("Samples", _samples(document)),
        ("Stacks", _stacks(document)),
        ("Captures", _bullets(_rows(document, "captures", "statements"))),
        ("Since the last good run", _changes(document)),
        ("Earlier incidents", _earlier(document)),
        ("Timeline", _timeline(document)),
    ):
        if body:
            lines += ["", f"## {title}", "", *body]
    if document.get("shortened"):
        lines += ["", "Some parts were shortened to limit the size of this document."]
    return "\n".join(lines) + "\n"


def incidents_markdown(document: Document) -> str:
    lines = [f"# Incidents of {_md(document['run'])}", ""]
    if document["notice"]:
        lines += [f"> {_md(document['notice'])}", ""]
    if not document["incidents"]:
        return "\n".join([*lines, "None."]) + "\n"
    lines += ["| | incident | since step | state | cost |", "|---|---|---|---|---|"]
    for row in document["incidents"]:
        step = "" if row["since_step"] is None else f"{row['since_step']:,}"
        cells = (
            str(row["number"]),
            f"{MARKS[row['severity']]} {row['title']}",
            step,
            row["state_text"],
            row["cost_text"],
        )
        lines.append(f"| {' | '.join(map(_md, cells))} |")
    return "\n".join(lines) + "\n"


def _md(text: Any) -> str:
    """Text in which Markdown finds nothing to format, on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))


def _source(row: Document) -> str:
    """`` *(incidents.jsonl:3)*``."""
    source = row.get("source")
    return f" *({_md(source['text'])})*" if isinstance(source, Mapping) and source.get("text") else ""


def _when(row: Document) -> str:
    return clock_text(row["wall_ns"]) if isinstance(row.get("wall_ns"), int) else ""


def _rows(document: Document, section: str, name: str) -> Sequence[Document]:
    found = document.get(section)
    rows = found.get(name) if isinstance(found, Mapping) else None
    return rows if isinstance(rows, list) else []


def _bullets(rows: Iterable[Document]) -> list[str]:
    found = []
    for row in rows:
        when = _when(row)
        found.append(f"- {_md(row['text'])}{f' {when}.' if when else ''}{_source(row)}")
    return found


def _fence(lines: Iterable[str]) -> list[str]:
    """A code block that no line of it can end."""
    body = list(lines)
    ticks = "`" * max([3, *(len(run) + 1 for line in body for run in re.findall(r"`+", line))])
    return [ticks, *body, ticks]


def _evidence(document: Document) -> list[str]:
    section = document.get("finding") or {}
    lines = _bullets(section.get("statements", ())[1:])
    for row in section.get("evidence", ()):
        lines += _pairs(row, 0)
    if section.get("confidence"):
        lines.append(f"- Confidence: {_md(section['confidence'])}")
    return [*lines, *([f"- All of it:{_source(section)}"] if lines and section.get("source") else [])]


def _pairs(row: Document, depth: int) -> Iterator[str]:
    indent, value = "  " * depth, row.get("value") or {}
    form, name = value.get("form"), _md(row.get("name", ""))
    if form == "text":
        yield f"{indent}- {name}: {_md(value.get('text', ''))}"
    elif form == "time":
        yield f"{indent}- {name}: {clock_text(value.get('wall_ns') or 0)}"
    elif form == "pairs":
        flat = [_flat(inner) for inner in value.get("rows", ())]
        yield f"{indent}- {name}: {'; '.join(flat)}{_more(value)}"
    elif form == "list":
        yield f"{indent}- {name}: {'; '.join(_flat({'value': item}) for item in value.get('items', ()))}{_more(value)}"
    elif form == "table":
        columns = value.get("columns", ())
        yield f"{indent}- {name}:"
        for cells in value.get("rows", ()):
            texts = [f"{column} {cell}" for column, cell in zip(columns, cells, strict=False)]
            yield f"{indent}  - {_md(', '.join(texts))}"
        if _more(value):
            yield f"{indent}  - {_more(value)}"


def _flat(row: Document) -> str:
    value = row.get("value") or {}
    name = f"{_md(row['name'])} " if row.get("name") else ""
    if value.get("form") == "text":
        return f"{name}{_md(value.get('text', ''))}"
    if value.get("form") == "pairs":
        return f"{name}({', '.join(_flat(inner) for inner in value.get('rows', ()))})"
    if value.get("form") == "list":
        return f"{name}({', '.join(_flat({'value': item}) for item in value.get('items', ()))})"
    return f"{name}…"


def _more(value: Document) -> str:
    return f" … and {value['left']} more" if value.get("left") else ""


def _errors(document: Document) -> list[str]:
    lines: list[str] = []
    for row in _rows(document, "errors", "errors"):
        whose = "the launcher" if row["rank"] is None else f"rank {row['rank']}"
        lines += [f"- {whose}: {_md(row['text'])}{_source(row)}", "", *_fence(row["traceback"]), ""]
    left = (document.get("errors") or {}).get("left_out")
    return [*lines, f"{count_text(left, 'further error')} left out."] if left else lines


def _logs(document: Document) -> list[str]:
    lines = _bullets(_rows(document, "logs", "statements"))
    for piece in _rows(document, "logs", "pieces"):
        lines += [f"{_md(piece['file'])}: {_md(piece['text'])}{_source(piece)}", "", *_fence(_marked_lines(piece)), ""]
    return lines


def _marked_lines(piece: Document) -> list[str]:
    before = piece["before"]
    lines: Sequence[str] = piece["lines"]
    return [*lines[:before], "──── onset ────", *lines[before:]]


def _samples(document: Document) -> list[str]:
    lines = _bullets(_rows(document, "samples", "statements"))
    changes = _rows(document, "samples", "changes")
    if changes:
        lines += [
            "",
            "| source | what | before | after | spreads | source of the figures |",
            "|---|---|---|---|---|---|",
        ]
    for row in changes:
        cells = (row["who"], row["label"], row["before_text"], row["after_text"], row["score"], row["source"]["text"])
        lines.append(f"| {' | '.join(map(_md, cells))} |")
    charts = _rows(document, "samples", "charts")
    if charts:
        lines += ["", *_fence(line for chart in charts for line in _chart_lines(chart))]
        lines += ["", *(f"- {_md(chart['title'])}:{_source(chart)}" for chart in charts)]
    return lines


def _chart_lines(chart: Document) -> Iterator[str]:
    yield f"{chart['title']}, by {chart['x']}: {chart['low_text']} to {chart['high_text']}"
    at = chart["at"]
    onset = chart.get("onset", 0)
    place = next((index for index, x in enumerate(at) if x >= onset), len(at))
    for series in chart["series"]:
        cut = round(place * min(SPARK_WIDTH, len(at)) / max(len(at), 1))
        line = _spark(series["values"], chart["low"], chart["high"])
        yield f"  {line[:cut]}│{line[cut:]}  {series['name']}"


def _spark(values: Sequence[float], low: float, high: float) -> str:
    width = min(SPARK_WIDTH, len(values))
    shown = [values[at * len(values) // width] for at in range(width)]
    reach = (high - low) or 1.0
    return "".join(_SPARKS[min(int((value - low) / reach * len(_SPARKS)), len(_SPARKS) - 1)] for value in shown)


def _stacks(document: Document) -> list[str]:
    lines: list[str] = []
    for hang in _rows(document, "stacks", "hangs"):
        lines += _bullets(hang["statements"])
        for group in hang["groups"]:
            lines += ["", f"{_md(group['who'])}:{_source(group)}", "", *_fence(group["frames"])]
    for place in _rows(document, "stacks", "places"):
        lines += ["", f"{_md(place['text'])}{_source(place)}", "", *_fence(place["frames"])]
    return lines


def _changes(document: Document) -> list[str]:
    section = document.get("changes") or {}
    lines = _bullets(section.get("statements", ()))
    git = section.get("git") or {}
    # Commits and files are below the sentence about them, which names their source.
    about_commits, about_files = (_bullets(git.get("statements", ())[at : at + 1]) for at in (0, 1))
    lines += about_commits
    lines += [f"  - {_md(row['text'])} ({_md(row['author'])}, {_when(row)})" for row in git.get("commits", ())]
    if git.get("commits_left_out"):
        lines.append(f"  - … and {git['commits_left_out']:,} more")
    lines += about_files
    lines += [f"  - {_md(row['text'])}" for row in git.get("files", ())]
    if git.get("files_left_out"):
        lines.append(f"  - … and {git['files_left_out']:,} more files")
    rows = section.get("rows", ())
    if rows:
        lines += ["", "| kind | setting | then | now | source |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (row["kind"], row["label"], row["before"], row["after"], row["source"]["text"])
        lines.append(f"| {' | '.join(map(_md, cells))} |")
    return lines


def _earlier(document: Document) -> list[str]:
    lines = _bullets(_rows(document, "earlier", "statements"))
    rows = _rows(document, "earlier", "incidents")
    if rows:
        lines += ["", "| run | when | incident | same | source |", "|---|---|---|---|---|"]
    for row in rows:
        name = f"{row['run']} #{row['number']}"
        cells = (
            name,
            _when(row),
            f"{MARKS[row['severity']]} {row['title']}",
            ", ".join(row["same"]),
            row["source"]["text"],
        )
        lines.append(f"| {' | '.join(map(_md, cells))} |")
    return lines


def _timeline(document: Document) -> list[str]:
    rows = document.get("timeline") or ()
    lines = ["| when | step | what | | source |", "|---|---|---|---|---|"] if rows else []
    for row in rows:
        step = "" if row.get("step") is None else f"{row['step']:,}"
        mark = MARKS[row["severity"]] if row["severity"] != "info" else ""
        cells = (_when(row), step, row["what"], f"{mark} {row['text']}".strip(), row["source"]["text"])
        lines.append(f"| {' | '.join(map(_md, cells))} |")
    return lines


# -- terminal ---------------------------------------------------------------------------------------------------------

LOG_LINES = 12
"""Lines of a log before and after the onset on a terminal."""


def incident_text(document: Document, *, width: int = 80, color: bool = False) -> str:
    incident, run = document["incident"], document["run"]
    page = Page(width, color)
    page.marked(incident["severity"], incident["title"], bold=True)
    page.items(
        "",
        [
            f"incident {incident['number']} of {document['count']} in {run['name']}",
            incident["kind_text"],
            incident["severity"],
            incident["state_text"],
        ],
    )
    if document.get("notice"):
        page.labeled("note", [document["notice"]])
    _section(page, "do", _rows(document, "finding", "advice"))
    _section(page, "onset", _rows(document, "onset", "statements"))
    _section(page, "impact", _rows(document, "impact", "statements"))
    _section(page, "evidence", _rows(document, "finding", "statements")[1:])
    for row in _rows(document, "errors", "errors"):
        whose = "launcher" if row["rank"] is None else f"rank {row['rank']}"
        _section(page, "error", [{**row, "text": f"{whose}: {row['text']}"}])
        _verbatim(page, row["traceback"][-LOG_LINES:])
    for piece in _rows(document, "logs", "pieces"):
        _section(page, "log", [piece])
        before = piece["before"]
        lines = piece["lines"]
        _verbatim(
            page, [*lines[max(0, before - LOG_LINES) : before], "── onset ──", *lines[before : before + LOG_LINES]]
        )
    _section(page, "samples", [*_rows(document, "samples", "statements"), *_rows(document, "samples", "changes")])
    for chart in _rows(document, "samples", "charts"):
        page.labeled("chart", _chart_lines(chart), verbatim=True)
    for hang in _rows(document, "stacks", "hangs"):
        _section(page, "hang", hang["statements"])
        for group in hang["groups"]:
            _section(page, "stack", [{**group, "text": group["who"]}])
            _frames(page, group["frames"])
    for place in _rows(document, "stacks", "places"):
        _section(page, "stack", [place])
        _frames(page, place["frames"][:LOG_LINES])
    _section(page, "captures", _rows(document, "captures", "statements"))
    changes = document.get("changes") or {}
    git = changes.get("git") or {}
    _section(page, "since", [*changes.get("statements", ()), *git.get("statements", ())])
    _section(page, "commits", git.get("commits", ()))
    _section(page, "files", git.get("files", ()))
    settings = [{**row, "text": f"{row['label']}: {row['before']} → {row['after']}"} for row in changes.get("rows", ())]
    _section(page, "settings", settings)
    earlier = [
        {**row, "text": f"{row['run']} #{row['number']}: {row['title']}"}
        for row in _rows(document, "earlier", "incidents")
    ]
    _section(page, "earlier", [*_rows(document, "earlier", "statements"), *earlier])
    _section(page, "timeline", document.get("timeline") or ())
    return "\n".join(page.lines) + "\n"


def incidents_text(document: Document, *, width: int = 80, color: bool = False) -> str:
    page = Page(width, color)
    if document["notice"]:
        page.labeled("note", [document["notice"]])
        page.blank()
    if not document["incidents"]:
        page.lines.append(f"No incidents in {document['run']}.")
    for row in document["incidents"]:
        page.marked(row["severity"], f"{row['number']}  {row['title']}", bold=True)
        step = "" if row["since_step"] is None else f"since step {row['since_step']:,}"
        when = clock_text(row["since_wall_ns"] or 0)
        page.items("", [part for part in (row["kind_text"], row["state_text"], step, when, row["cost_text"]) if part])
    return "\n".join(page.lines) + "\n"


def _section(page: Page, label: str, rows: Iterable[Document]) -> None:
    """Sentences next to a label, each with its time and its source."""
    texts = []
    for row in rows:
        when = _when(row)
        source = row.get("source")
        shown_source = f" [{source['text']}]" if isinstance(source, Mapping) else ""
        texts.append(f"{f'{when}  ' if when else ''}{row['text']}{shown_source}")
    if texts:
        page.blank()
        page.labeled(label, texts)


def _verbatim(page: Page, lines: Iterable[str]) -> None:
    page.labeled("", [line[: max(page.width - 14, 20)] for line in lines], verbatim=True)


def _frames(page: Page, frames: Iterable[str]) -> None:
    """Frames whose paths are too long lose the start, which says less than file, line and function."""
    room = max(page.width - 14, 20)
    _verbatim(page, (frame if len(frame) <= room else f"…{frame[1 - room :]}" for frame in frames))

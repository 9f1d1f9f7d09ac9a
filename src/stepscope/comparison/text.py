"""A comparison for people: as text for the terminal, as Markdown for a pull request, as a page.

The input is the document of ``compare_inputs`` (and of ``gate_inputs``) and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from stepscope.comparison.comparison import MEMORY_WORDS, interval_text, needed_text, percent_text
from stepscope.records.text import (
    bytes_text,
    count_text,
    ms_text,
    number_text,
    printable,
    printable_document,
    share_text,
)
from stepscope.reports.layout import MARKS, NARROWEST, Page, cut
from stepscope.reports.page.documents import (
    bar,
    bar_chart,
    finding_part,
    listed,
    page_document,
    page_table,
    tables_part,
    titled_lists,
)

__all__ = [
    "change_text",
    "comparison_page",
    "interval_words",
    "price_text",
    "render_comparison",
    "render_markdown",
    "sentences_of",
]

Document = Mapping[str, Any]

SEVERITIES = {"slower": "warning", "faster": "healthy", "same": "healthy", "cannot_tell": "info"}
GATE_SEVERITIES = {"regression": "critical", "pass": "healthy", "cannot_tell": "warning"}
FIRST_KINDS = ("workload", "hardware", "software")
"""Changes that are said before any number."""
VALUE_COLUMNS = 32
LINES_SHOWN = 12
NAME_COLUMNS, TIME_COLUMNS = 14, 11
WORTH_SHOWING = 0.002
"""Share of the step from which a phase is listed."""
NO_SPREAD = 0.00005
"""A smaller spread would be printed as 0.00%."""


# -- sentences that all forms share -----------------------------------------------------------------------------------


def _severity(document: Document) -> str:
    gate = document.get("gate")
    return GATE_SEVERITIES[gate["result"]] if gate else SEVERITIES[document["verdict"]]


def _headline(document: Document) -> str:
    gate = document.get("gate")
    return str(gate["text"]) if gate else str(document["title"])


def _checks(document: Document) -> Sequence[Mapping[str, Any]]:
    """The checks of a gate, if there is more than the one that the headline shows."""
    gate = document.get("gate")
    return gate["checks"] if gate and (len(gate["checks"]) > 1 or gate["result"] == "pass") else ()


def _to_decide(document: Document) -> str:
    """What would settle it, unless the headline says so."""
    needed = needed_text(document)
    return "" if needed in _headline(document) else needed


def _first_changes(document: Document) -> list[str]:
    """What differs in the job itself, before any number."""
    rows = [row for row in document["context"] if row["kind"] in FIRST_KINDS]
    return [_change_words(row) for row in rows]


def _change_words(row: Mapping[str, Any]) -> str:
    if row["name"] == "command":
        before, after = _differing_words(str(row["before"]), str(row["after"]))
        return f"command {before} → {after}"
    return f"{row['label']} {_value(row['before'])} → {_value(row['after'])}"


def _differing_words(before: str, after: str) -> tuple[str, str]:
    """Of two commands, what only one of them has, with the word before it for context."""
    first, last = before.split(), after.split()
    removed: list[str] = []
    added: list[str] = []
    for what, start, end, begin, stop in SequenceMatcher(a=first, b=last, autojunk=False).get_opcodes():
        if what != "equal":
            # The value of an option says little without its name.
            shared = [first[start - 1]] if start and first[start - 1].startswith("-") else []
            removed += [*shared, *first[start:end]] if end > start else []
            added += [*shared, *last[begin:stop]] if stop > begin else []
    return _value(" ".join(removed) or None), _value(" ".join(added) or None)


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return cut(" ".join(str(value).split()), VALUE_COLUMNS)


def _step(document: Document) -> list[str]:
    """The step time before and after, and the interval."""
    if document["unit"] == "throughput":
        rates = document["throughput"]
        times = f"{number_text(rates['before'])} → {number_text(rates['after'])} per second"
    else:
        times = f"{ms_text(document['step_ms']['before'])} → {ms_text(document['step_ms']['after'])}"
    return [f"{times} ({percent_text(document['change'])})", interval_words(document).partition("; ")[2]]


def _percentiles(document: Document) -> list[str]:
    """``p90 41.2 ms → 43.0 ms``: figures without a verdict."""
    return [
        f"{name} {ms_text(row['before'])} → {ms_text(row['after'])}" for name, row in document["percentiles_ms"].items()
    ]


def _basis(document: Document) -> str:
    """What the interval rests on."""
    steps, noise = document["compared"], document["noise"]
    how = "compared by number" if steps["by_number"] else "compared by their means"
    spread = percent_text(noise["between"], signed=False)
    count = len(document["baselines"])
    if noise["between_from"] == "baselines" and noise["between"] < NO_SPREAD:
        runs = f"{count} baselines differ by no more than the unevenness of their steps explains"
    elif noise["between_from"] == "baselines":
        runs = f"runs of this job differ by about {spread}, as {count} baselines show"
    else:
        runs = f"runs of this job are assumed to differ by about {spread}, as there is one baseline"
    return f"{count_text(steps['steps'], 'step')}, {how}; {runs}."


def _memory(document: Document) -> Iterator[str]:
    for name, row in document["memory"].items():
        if name != "rss_peak" or "own_peak" not in document["memory"]:
            first, last = bytes_text(row["before"]), bytes_text(row["after"])
            sizes = first if first == last else f"{first} → {last}"
            change = "" if row["before"] == row["after"] else f" ({percent_text(row['change'])})"
            yield f"{MEMORY_WORDS[name]} {sizes}{change}"


def _exchanges(document: Document) -> Iterator[str]:
    """Exchanges whose amount changed, which is no matter of chance."""
    for row in document["communication"]:
        for name, words in (("bytes", bytes_text), ("count", lambda count: f"{count:.3g} calls")):
            pair = row.get(name)
            if pair and pair["before"] != pair["after"]:
                first, last = (("none" if pair[at] is None else words(pair[at])) for at in ("before", "after"))
                if first != last:
                    yield f"{row['op']} ({row['group']}) {first} → {last} per step"
                    break


def _skew(document: Document) -> str:
    skew = document["ranks"]["skew_ms"]
    return f"between the fastest and the slowest {ms_text(skew['before'])} → {ms_text(skew['after'])}" if skew else ""


def _shown_phases(document: Document) -> list[Mapping[str, Any]]:
    step = document["step_ms"]["before"] or 1.0
    return [row for row in document["phases"] if max(row["before_ms"], row["after_ms"]) >= WORTH_SHOWING * step]


def _other_changes(document: Document) -> dict[str, list[str]]:
    """Differences of code, settings and environment, by kind."""
    found: dict[str, list[str]] = {}
    for row in document["context"]:
        if row["kind"] not in FIRST_KINDS:
            found.setdefault(row["kind"], []).append(_change_words(row))
    return found


def _signed_ms(ms: float) -> str:
    return f"{'+' if ms > 0 else ''}{ms_text(ms)}"


def price_text(row: Mapping[str, Any]) -> str:
    """What a finding costs, before and after: ``61% → 58% of the time``; empty if it has no price."""
    known = [share_text(share) for share in row["share"].values() if share is not None]
    priced = any(row["share"].values())  # a share of 0: what it costs is not known
    return f"{' → '.join(dict.fromkeys(known))} of the training time" if priced else ""


def sentences_of(document: Document) -> dict[str, Any]:
    """Everything about a comparison that is said in words, for other screens."""
    document = printable_document(document)
    cause = document["cause"]
    return {
        "title": _headline(document),
        "look": _severity(document),
        "changed": _first_changes(document),
        "cause": cause["text"] if cause else "",
        "step": _step(document),
        "basis": _basis(document),
        "needed": _to_decide(document),
        "skew": _skew(document),
        "exchanges": list(_exchanges(document))[:LINES_SHOWN],
        "notices": list(document["notices"]),
    }


def interval_words(document: Document) -> str:
    """By how much the step changed, and how certain that is: ``+5.1%; 3.9% to 6.2% slower (95% certain)``."""
    certain = f"{interval_text(document['interval'])} ({document['confidence']:.0%} certain)"
    return f"{percent_text(document['change'])}; {certain}"


def change_text(row: Mapping[str, Any]) -> str:
    """By how much a phase changed: ``+1.2 ms (+4.0%)``."""
    if not row["change_ms"]:
        return "the same"
    share = "" if row["change"] is None else f" ({percent_text(row['change'])})"
    return f"{_signed_ms(row['change_ms'])}{share}"


# -- text -------------------------------------------------------------------------------------------------------------


def render_comparison(document: Document, *, width: int = 80, color: bool = False) -> str:
    """Render a comparison for the terminal."""
    document = printable_document(document)
    out = Page(max(width, NARROWEST), color)
    first = _first_changes(document)
    if first:
        out.marked("warning", f"Changed: {'; '.join(first)}.", bold=False)
        out.blank()
    out.marked(_severity(document), _headline(document), bold=True)
    for check in _checks(document):
        out.labeled(check["name"], [check["text"]])
    if document["cause"]:
        out.labeled("where", [document["cause"]["text"]])
    elif document["verdict"] in ("slower", "faster") and document["phases"]:
        out.labeled("where", ["no single phase or rank accounts for it"])
    out.items("step", _step(document))
    out.items("", _percentiles(document))
    out.labeled("based on", [_basis(document)])
    if _to_decide(document):
        out.labeled("to decide", [_to_decide(document)])
    out.blank()
    _phase_lines(out, document)
    out.items("ranks", [_skew(document)] if _skew(document) else [])
    out.items("memory", list(_memory(document)))
    out.items("exchanges", list(_exchanges(document))[:LINES_SHOWN])
    out.blank()
    _finding_lines(out, document)
    _change_lines(out, document)
    for notice in document["notices"]:
        out.labeled("note", [notice])
    return "\n".join(out.lines).rstrip() + "\n"


def _phase_lines(out: Page, document: Document) -> None:
    rows = _shown_phases(document)
    if not rows:
        return
    on = "on device" if document["clock"] == "device" else "phase"
    heads = "".join(name.rjust(TIME_COLUMNS) for name in ("before", "after", "change"))
    out.lines.append(out.paint(f"  {on.ljust(NAME_COLUMNS)}{heads}", "dim"))
    for row in rows:
        cells = (ms_text(row["before_ms"]), ms_text(row["after_ms"]), _signed_ms(row["change_ms"]))
        line = f"  {cut(row['phase'], NAME_COLUMNS - 1).ljust(NAME_COLUMNS)}"
        line += "".join(cell.rjust(TIME_COLUMNS) for cell in cells)
        change = "" if row["change"] is None else f"  {percent_text(row['change'])}"
        out.lines.append(f"{line}{out.paint(change, 'bold')}" if row["real"] else line)
    out.blank()


def _finding_lines(out: Page, document: Document) -> None:
    found = document["findings"]
    if not found:
        return
    for name, title, style in (("new", "New findings", None), ("gone", "No longer found", "healthy")):
        if found[name]:
            out.lines.append(out.paint(title, "bold"))
            for row in found[name][:LINES_SHOWN]:
                out.marked(style or row["severity"], row["title"], bold=False)
            out.blank()


def _change_lines(out: Page, document: Document) -> None:
    others = _other_changes(document)
    if not others:
        return
    out.lines.append(out.paint("Also changed", "bold"))
    for kind, rows in others.items():
        more = [f"… and {len(rows) - LINES_SHOWN} more (--json has them)"] if len(rows) > LINES_SHOWN else []
        out.items("variables" if kind == "environment" else kind, [*rows[:LINES_SHOWN], *more])
    out.blank()


# -- Markdown ---------------------------------------------------------------------------------------------------------


def render_markdown(document: Document) -> str:
    """Render a comparison as Markdown; text of the inputs is escaped."""
    document = printable_document(document)
    lines = [f"### {MARKS[_severity(document)]} {_markdown(_headline(document))}", ""]
    first = _first_changes(document)
    if first:
        lines = [f"**Changed: {_markdown('; '.join(first))}.**", "", *lines]
    lines += [f"- {check['name']}: {_markdown(check['text'])}" for check in _checks(document)]
    if document["cause"]:
        lines.append(f"- **{_markdown(document['cause']['text'])}**")
    lines.append(f"- step: {_markdown(', '.join(_step(document)))}")
    if _percentiles(document):
        lines.append(f"- percentiles: {_markdown(', '.join(_percentiles(document)))}")
    lines.append(f"- based on {_markdown(_basis(document))}")
    if _to_decide(document):
        lines.append(f"- {_markdown(_to_decide(document))}")
    lines += [f"- {_markdown(text)}" for text in (*_memory(document), *_exchanges(document))]
    rows = _shown_phases(document)
    if rows:
        lines += ["", "| phase | before | after | change | |", "|---|--:|--:|--:|--:|"]
        for row in rows:
            change = percent_text(row["change"]) if row["real"] and row["change"] is not None else ""
            lines.append(
                f"| {_markdown(row['phase'])} | {ms_text(row['before_ms'])} | {ms_text(row['after_ms'])} "
                f"| {_signed_ms(row['change_ms'])} | {change} |"
            )
    found = document["findings"] or {"new": [], "gone": []}
    for name, title in (("new", "New findings"), ("gone", "No longer found")):
        if found[name]:
            lines += ["", f"**{title}**", "", *(f"- {_markdown(row['title'])}" for row in found[name][:LINES_SHOWN])]
    others = [text for rows in _other_changes(document).values() for text in rows]
    if others:
        lines += ["", "<details><summary>Also changed</summary>", ""]
        lines += [f"- {_markdown(text)}" for text in others[: 4 * LINES_SHOWN]]
        lines += ["", "</details>"]
    lines += ["", *(f"_{_markdown(notice)}_" for notice in document["notices"])]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(text: str) -> str:
    """Text that Markdown shows as it is: names come from files of others."""
    plain = " ".join(printable(text).split())
    for letter in "\\`*_[]<>|#":
        plain = plain.replace(letter, f"\\{letter}" if letter not in "<>" else {"<": "&lt;", ">": "&gt;"}[letter])
    return plain


# -- page -------------------------------------------------------------------------------------------------------------


def comparison_page(document: Document) -> dict[str, Any]:
    """What the page shows of a comparison, in the form of ``reports/page/documents.py``."""
    document = printable_document(document)
    names = [row["name"] for row in (*document["baselines"], document["candidate"])]
    facts = {
        **{check["name"]: check["text"] for check in _checks(document)},
        "where": document["cause"]["text"] if document["cause"] else "",
        "step": " · ".join(_step(document)),
        "percentiles": " · ".join(_percentiles(document)),
        "based on": _basis(document),
        "to decide": _to_decide(document),
        "ranks": _skew(document),
        "memory": " · ".join(_memory(document)),
        "exchanges": " · ".join(_exchanges(document)),
    }
    first = _first_changes(document)
    notices = [*([f"Changed: {'; '.join(first)}."] if first else []), *document["notices"]]
    sides = ((label, [(text, "")]) for label, text in facts.items() if text)
    found = document["findings"] or {"new": [], "gone": []}
    lists = {
        "New findings": [row["title"] for row in found["new"]],
        "No longer found": [row["title"] for row in found["gone"]],
        **{f"Changed: {kind}": list(rows) for kind, rows in _other_changes(document).items()},
    }
    return page_document(
        "compare",
        f"{names[-1]} and {names[0]}" if len(names) == 2 else f"{names[-1]} and {len(names) - 1} baselines",
        [],
        [*_page_phases(document), *(part for title, texts in lists.items() for part in listed(title, texts))],
        notices=notices,
        verdict=finding_part(_severity(document), _headline(document), sides=titled_lists(sides)),
    )


def _page_phases(document: Document) -> Iterator[dict[str, Any]]:
    rows = _shown_phases(document)
    if not rows:
        return
    bars = [
        bar(
            at,
            number,
            {row["phase"]: (row[f"{at}_ms"], f"{row['phase']}: {ms_text(row[f'{at}_ms'])}") for row in rows},
            ms_text(sum(row[f"{at}_ms"] for row in rows)),
        )
        for number, at in enumerate(("before", "after"))
    ]
    yield from bar_chart("Where the time of a step goes", "run", bars, {row["phase"]: row["phase"] for row in rows})
    table = {
        "title": "Phases",
        "note": "",
        "left_out": 0,
        "columns": ["phase", "before", "after", "difference", "change"],
        "rows": [
            {
                "phase": row["phase"],
                "before": ms_text(row["before_ms"]),
                "after": ms_text(row["after_ms"]),
                "difference": _signed_ms(row["change_ms"]),
                "change": percent_text(row["change"]) if row["real"] and row["change"] is not None else "within chance",
            }
            for row in rows
        ],
    }
    yield from tables_part("Phases", [page_table(table, len(rows))])

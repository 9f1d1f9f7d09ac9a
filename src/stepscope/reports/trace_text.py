"""The analysis of a job's traces as text for the terminal: the verdict, other findings, then the tables.

The input is the document of ``stepscope trace --json`` and nothing else.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.records.text import count_text, ns_text, printable, share_text
from stepscope.reports.layout import NARROWEST, Page, bar, cut, price_text, table_lines
from stepscope.reports.trace_document import (
    RANK_COLUMNS,
    certainty_of,
    facts_of,
    look_of,
    look_of_diff,
    other_findings,
    problems_of,
    rank_shown,
    ranks_per_step,
)

__all__ = ["COLUMNS", "render_trace"]

Document = Mapping[str, Any]

OTHERS_SHOWN = 8
STREAMS_SHOWN = 4
PROBLEMS_SHOWN = 8
ROWS = 6
"""Default number of rows of a table."""
NAME_COLUMNS = 16
TIME_COLUMNS = 12
FACT = 48
"""Maximum width of a fact."""
COLLECTIVE_COLUMNS = (
    *("op", "group", "count", "wait_ns", "transfer_ns", "bus_gbps", "last_rank", "last_count", "bytes", "ranks"),
)
JOB_PATH_COLUMNS = ("rank", "before", "cause", "time_ns", "time_share", "mostly", "steps")
SHOWN: Mapping[str, Sequence[str]] = {
    "path_causes": ("cause", "time_ns", "time_share", "mean_step_ns", "max_step_ns"),
    "what_if": (),
    "path_operators": ("name", "cause", "time_ns", "time_share", "segments"),
    "temporal_steps": (
        "step",
        "wall_ns",
        "span_ns",
        "utilisation_share",
        "compute_ns",
        "comm_ns",
        "overlap_ns",
        "idle_ns",
    ),
    "idle_by_operator": ("operator", "stream", "gaps", "host_wait_ns", "sync_ns", "longest_ns"),
    "syncs": (),
    "kernel_classes": ("class", "count", "total_ns", "time_share", "tensor_core_ns", "fp32_matmul_ns"),
    "kernels": ("name", "count", "total_ns", "time_share", "mean_ns", "max_ns", "overlapped_ns", "occupancy_share"),
    "operators": ("operator", "calls", "device_self_ns", "device_total_ns", "host_self_ns", "host_total_ns"),
    "operators_by_source": (),
    "copies": ("direction", "memory", "count", "moved_bytes", "total_ns", "time_share", "bandwidth_gbps"),
    "memory_peak": ("operator", "alive_bytes", "blocks", "peak_share", "source", "module"),
}
"""Tables that are useful with few rows, with the most important columns first (none: all that fit)."""
ON_REQUEST: Mapping[str, Sequence[str]] = {
    "kernel_types": (),
    "short_kernels": ("short_name", "count", "of_count", "total_ns", "call_ns"),
    "launches": (),
    "queue": (),
    "sequences": (),
    "operators_by_shape": (),
    "modules": (),
    "annotations": (),
    "loading": (),
    "holes": (),
    "compiling": (),
    "flops": (),
    "path_kernels": ("name", "cause", "time_ns", "time_share", "segments"),
}
"""Tables that are shown only with ``--top``."""
OF_DEVICE = ("temporal_steps",)
"""Tables that are useless without a device."""
DIFFERENCES: Mapping[str, Sequence[str]] = {
    "diff_summary": ("figure", "before_ns", "after_ns", "change_ns", "change_share"),
    "diff_memory": (),
    "diff_kernels": (
        "name",
        "status",
        "change_ns",
        "step_share",
        "before_count",
        "after_count",
        "before_ns",
        "after_ns",
    ),
    "diff_copies": ("direction", "memory", "status", "change_ns", "step_share", "before_count", "after_count"),
    "diff_operators": ("operator", "status", "device_change_ns", "host_change_ns", "before_calls", "after_calls"),
}
WHOLE = "diff_summary"
"""Its rows belong together."""
COLUMNS: Mapping[str, Sequence[str]] = {
    **SHOWN,
    **ON_REQUEST,
    **DIFFERENCES,
    "distributed": RANK_COLUMNS,
    "collectives": COLLECTIVE_COLUMNS,
    "job_path": JOB_PATH_COLUMNS,
}
"""The most important columns of each table, first to last."""


def render_trace(document: Document, *, width: int = 80, color: bool = False, top: int | None = None) -> str:
    """Render a document. ``top``: rows of each table; without it a few rows of the most useful tables."""
    page = Page(max(width, NARROWEST), color)
    _mixed(page, document)
    _diff(page, document, top or ROWS)
    _verdict(page, document)
    _what_if(page, document)
    _others(page, document)
    page.items("trace", [cut(printable(fact), FACT) for fact in facts_of(document)])
    page.blank()
    if len(document["ranks"]) > 1:
        _ranks(page, document)
        _collectives(page, document)
        _table(page, document["path"]["table"], top or ROWS, JOB_PATH_COLUMNS)
    else:
        for rank in document["ranks"].values():
            _temporal(page, rank["temporal"])
            _idle(page, rank["idle"])
    if document["diff"] is None or top:
        _tables(page, document, SHOWN if top is None else {**SHOWN, **ON_REQUEST}, top or ROWS)
    _notices(page, document)
    return "\n".join(page.lines).rstrip() + "\n"


def _mixed(page: Page, document: Document) -> None:
    """A warning before everything else: the rest covers only some of the files."""
    if document["mixed"]:
        page.marked("warning", printable(document["mixed"]), bold=False)
        page.blank()


def _diff(page: Page, document: Document, top: int) -> None:
    """What changed, if there is something to compare with."""
    diff = document["diff"]
    if diff is None:
        return
    page.marked(look_of_diff(diff), printable(diff["verdict"]), bold=True)
    for notice in diff["notices"]:
        page.labelled("note", [printable(notice)])
    page.blank()
    for name, columns in DIFFERENCES.items():
        table = diff["tables"].get(name)
        rows = [row for row in table["rows"] if row.get("status") != "same" and _is_there(row)] if table else []
        _table(page, {**table, "rows": rows} if table else None, max(top, len(rows)) if name == WHOLE else top, columns)


def _is_there(row: Mapping[str, Any]) -> bool:
    """Whether the row exists on one of the two sides."""
    return any(row.get(column, 1) for column in ("before_ns", "after_ns"))


def _verdict(page: Page, document: Document) -> None:
    verdict = document["verdict"]
    page.marked(look_of(verdict), printable(verdict["title"]), bold=True)
    if verdict["price"]:
        page.labelled("cost", [verdict["price"]])
    page.labelled("to do", map(printable, verdict["advice"]))
    certainty = certainty_of(verdict)
    if certainty:
        page.labelled("certainty", [certainty])
    page.blank()


def _what_if(page: Page, document: Document) -> None:
    """All requested what-if results."""
    table = document["what_if"]
    _table(page, table, len(table["rows"]) if table else 0)


def _others(page: Page, document: Document) -> None:
    others = other_findings(document)
    if not others:
        return
    page.lines.append(page.paint("Also found", "bold"))
    for finding in others[:OTHERS_SHOWN]:
        page.marked(
            "healthy" if finding["kind"] == "healthy" else finding["severity"], printable(finding["title"]), bold=False
        )
        price = price_text(finding["cost"])
        if price:
            page.labelled("cost", [price])
        page.labelled("to do", map(printable, finding["advice"][:1]))
    if len(others) > OTHERS_SHOWN:
        page.lines.append(f"  … and {len(others) - OTHERS_SHOWN} more (--json has them)")
    page.blank()


def _temporal(page: Page, temporal: Mapping[str, int]) -> None:
    """Parts that add up to the span, and how much communication was hidden."""
    span_ns = temporal["span_ns"]
    if not span_ns:
        page.labelled("device", ["no work on a device in this trace"])
        page.blank()
        return
    columns = max(page.width - 2 - NAME_COLUMNS - 6 - TIME_COLUMNS, 6)
    of = f"of the device's {ns_text(span_ns)}"[:columns].ljust(columns)
    heading = f"  {'on device'.ljust(NAME_COLUMNS)}share {of}{'time'.rjust(TIME_COLUMNS)}"
    page.lines.append(page.paint(heading, "dim"))
    for name, key in (
        ("compute", "compute_ns"),
        ("only comm", "exposed_comm_ns"),
        ("only copies", "exposed_memory_ns"),
        ("idle", "idle_ns"),
    ):
        share = temporal[key] / span_ns
        if temporal[key] or name in ("compute", "idle"):
            blocks = page.paint(bar(share, columns - 1).ljust(columns), "info")
            time = ns_text(temporal[key]).rjust(TIME_COLUMNS)
            page.lines.append(f"  {name.ljust(NAME_COLUMNS)}{share_text(share):>5} {blocks}{time}".rstrip())
    parts = [f"{ns_text(span_ns)} from first to last"]
    if temporal["comm_ns"]:
        hidden = share_text(temporal["overlap_ns"] / temporal["comm_ns"])
        parts.append(f"comm {ns_text(temporal['comm_ns'])}, {hidden} of it hidden")
    if temporal["memory_ns"]:
        parts.append(f"copies {ns_text(temporal['memory_ns'])}")
    page.items("", parts)
    page.blank()


def _idle(page: Page, streams: Mapping[str, Mapping[str, int]]) -> None:
    """Why each stream was idle, the stream with the longest gaps first."""
    rows: list[dict[str, Any]] = [
        {"stream": name, "total_ns": idle["host_wait_ns"] + idle["kernel_wait_ns"] + idle["other_ns"], **idle}
        for name, idle in streams.items()
    ]
    rows.sort(key=lambda row: -row["total_ns"])
    if rows:
        columns = ("stream", "total_ns", "host_wait_ns", "sync_ns", "kernel_wait_ns", "other_ns")
        _section(page, "Gaps by stream", table_lines(columns, rows[:STREAMS_SHOWN], page.width - 2, of=len(rows)))


def _ranks(page: Page, document: Document) -> None:
    rows, total = ranks_per_step(document), len(document["ranks"])
    title = "Ranks" if len(rows) == total else f"The {len(rows)} ranks of {total} that the others wait for most"
    title = f"{title}, per step" if document["steps"]["marked"] else title
    _section(page, title, table_lines(RANK_COLUMNS, rows, page.width - 2))
    if any((row["wait_ns"] or 0) > (row["comm_ns"] or 0) for row in rows):
        page.labelled("wait", ["sums collectives: two at once both count here, but once in comm"])
        page.blank()


def _collectives(page: Page, document: Document) -> None:
    collectives = document["collectives"]
    if not collectives["count"]:
        return
    waits_ns = sum(collectives["wait_ns"].values())
    parts = [
        f"{count_text(collectives['count'], 'collective')} on several ranks",
        f"waits for the last rank: {ns_text(waits_ns)} in total",
        f"transfer {ns_text(collectives['transfer_ns'])}",
    ]
    page.items("comm", parts)
    shifted = [(rank, clock["shift_ns"]) for rank, clock in document["clocks"].items() if clock["shift_ns"]]
    if shifted:
        rank, shift_ns = max(shifted, key=lambda pair: abs(pair[1]))
        most = f"rank {rank}'s by {ns_text(shift_ns)}"
        page.labelled("clocks", [f"of {count_text(len(shifted), 'rank')} shifted to fit the others, {most}"])
    page.blank()
    _table(page, collectives["tables"]["collectives"], ROWS, COLLECTIVE_COLUMNS)


def _tables(page: Page, document: Document, shown: Mapping[str, Sequence[str]], top: int) -> None:
    """Tables of one rank: the culprit if one is named."""
    rank = rank_shown(document)
    if rank is None:
        return
    whose = f" (rank {rank})" if len(document["ranks"]) > 1 else ""
    tables = document["ranks"][rank]["tables"]
    on_device = document["ranks"][rank]["temporal"]["span_ns"] > 0
    for name, columns in shown.items():
        if on_device or name not in OF_DEVICE:
            _table(page, tables.get(name), top, columns, whose)


def _table(page: Page, table: Mapping[str, Any] | None, top: int, columns: Sequence[str] = (), whose: str = "") -> None:
    if not table or not table["rows"]:
        return
    rows = table["rows"]
    shown = [column for column in columns or table["columns"] if column in table["columns"]]
    # Without a device its columns are all zeros.
    shown = [each for each in shown if not each.startswith("device_") or any(row[each] for row in rows)]
    lines = table_lines(shown, rows[:top], page.width - 2, of=len(rows) + table["left_out"])
    _section(page, f"{table['title']}{whose}", lines)


def _section(page: Page, title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    page.lines.append(page.paint(printable(title), "bold"))
    page.lines.append(page.paint(f"  {lines[0]}".rstrip(), "dim"))
    page.lines += [f"  {line}" for line in lines[1:]]
    page.blank()


def _notices(page: Page, document: Document) -> None:
    told = problems_of(document)
    if not told:
        return
    page.lines.append(page.paint("Worth knowing", "bold"))
    for notice in told[:PROBLEMS_SHOWN]:
        page.lines += textwrap.wrap(
            printable(notice), page.width, initial_indent="  · ", subsequent_indent="    ", break_on_hyphens=False
        )
    if len(told) > PROBLEMS_SHOWN:
        page.lines.append(f"  … and {len(told) - PROBLEMS_SHOWN} more")

"""What the page shows of traces: the same views in the page of a hub and in the file of ``stepscope trace --html``.

The input is the document of ``stepscope trace --json`` and nothing else. A *view* is a tab of the page with parts as in
``documents.py``; parts are either of all ranks or of one. The page has a switch for the rank:

``trace_page``
    Everything that a file needs: the parts of all ranks, and those of up to ``MOST_EMBEDDED`` single ranks.
``rank_parts``
    The parts of one rank; a hub sends them when the reader switches to it.
``difference_parts``
    Two ranks next to each other: what one does longer than the other in a step; ``compared_parts`` the same for a rank
    in two captures.

    {"views": [[key, title, what to show without parts], …], "parts": [{"view": key, "form": …, …}, …],
     "ranks": [0, 1, …], "rank": 1, "of_ranks": {"1": [part, …]}, "pair": [1, 0], "pairs": {"1-0": [part, …]}}
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import median_low
from typing import Any

from stepscope.records.text import bytes_text, ns_text, printable, share_text
from stepscope.reports.evidence_text import evidence_rows
from stepscope.reports.finding_text import finding_mark, kind_name
from stepscope.reports.flight_text import ranks_of
from stepscope.reports.page.documents import (
    BARS_SHOWN,
    bar,
    bar_chart,
    curve_chart,
    finding_part,
    listed,
    more_text,
    page_document,
    page_table,
    tables_part,
    titled_lists,
)
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
from stepscope.traces.rules.view import UNNAMED
from stepscope.traces.timeline import CAUSE_COLORS

__all__ = [
    "MOST_EMBEDDED",
    "VIEWS",
    "compared_parts",
    "compared_ranks",
    "difference_parts",
    "rank_parts",
    "timeline_part",
    "trace_page",
]

Document = Mapping[str, Any]
Part = dict[str, Any]

VIEWS = {
    "overview": ("Overview", ""),
    "timeline": ("Timeline", "There is nothing to draw: the trace has no events in its steps."),
    "operators": ("Operators", "No operators of the host were recorded (ProfilerActivity.CPU)."),
    "kernels": ("Kernels", "No work of a device was recorded (ProfilerActivity.CUDA)."),
    "memory": ("Memory", "Memory was not recorded. torch.profiler records it with profile_memory=True."),
    "modules": ("Modules", "Modules were not recorded. torch.profiler records them with with_stack=True."),
    "distributed": ("Distributed", "There is one rank."),
    "difference": ("Two ranks", "There is one rank."),
    "files": ("Files", ""),
}
"""Title of each view, and what it says without parts."""
OF_SEVERAL = ("distributed", "difference")
MOST_EMBEDDED = 16
"""Ranks with parts of their own in one file, the worst first."""
ROWS = 100
FINDINGS_SHOWN = 40
FILES_SHOWN = 200
DRAWN = ("memory", "queue_curve", "copy_bandwidth")
"""Tables that are curves: drawn, not listed."""
TABLE_VIEWS = {
    **dict.fromkeys(("phases", "temporal_steps", "path_causes", "what_if", "loading", "holes"), "overview"),
    **dict.fromkeys(("kernel_types", "kernel_classes", "kernels", "short_kernels", "sequences", "launches"), "kernels"),
    **dict.fromkeys(("queue", "copies", "idle", "idle_by_operator", "path_kernels"), "kernels"),
    "memory_peak": "memory",
    "modules": "modules",
}
"""The view of each table of a rank; all others are about operators."""
FIRST = ("operators", "kernels", "memory_peak", "modules")
"""Tables that are the first of their view, and open."""
FILE_COLUMNS = ("path", "rank", "host", "format", "events", "backend")
PARTS = {
    "compute": "computing",
    "overlap": "computing and communicating",
    "comm": "only communicating",
    "copy": "only copying",
    "idle": "idle",
}
"""Parts of a device's span, which add up to it, by look."""

PHASE_COLORS = {"communication": "comm", "other": "op"}
"""Looks of phases that differ from their names: gray is what is idle."""


# -- pages ------------------------------------------------------------------------------------------------------------


def trace_page(
    document: Document,
    *,
    name: str,
    top: int = ROWS,
    timeline: Part | None = None,
    embedded: int = MOST_EMBEDDED,
    **more: Any,
) -> Part:
    """The page of traces. ``top``: rows of each table; ``timeline``: ``Timeline.to_dict``; ``more``: further keys."""
    diff, now = document["diff"], _trace_verdict(document)
    pair = compared_ranks(document)
    shown = str(pair[0]) if pair else rank_shown(document)
    inside, several = _embedded_ranks(document, shown, pair, embedded), len(document["ranks"]) > 1
    parts = {
        "overview": (
            _what_changed(diff, top) if diff is not None else (),
            [{"form": "finding", "title": "Now", **now}] if diff is not None else (),
            _what_if(document),
            _phases_by_rank(document),
            () if several and _means(document) else _ranks(document),
            _path(document),
        ),
        "timeline": ([timeline_part(timeline)] if timeline else (),),
        "distributed": _distributed(document, top),
        "files": (listed("Worth knowing", problems_of(document)), _files(document)),
    }
    return page_document(
        "trace",
        name,
        facts_of(document),
        [part for view, sections in parts.items() for part in _in_view(view, chain.from_iterable(sections))],
        notices=[printable(document["mixed"])] if document["mixed"] else [],
        views=[[key, *words] for key, words in VIEWS.items() if several or key not in OF_SEVERAL],
        ranks=[int(rank) for rank in document["ranks"]],
        rank=None if shown is None else int(shown),
        of_ranks={rank: rank_parts(document, rank, top=top) for rank in inside},
        pair=pair,
        pairs={f"{pair[0]}-{pair[1]}": difference_parts(document, *pair)} if pair else {},
        **(now if diff is None else _diff_verdict(diff)),
        **more,
    )


def timeline_part(timeline: Part) -> Part:
    return {"form": "timeline", "view": "timeline", **timeline}


def rank_parts(document: Document, rank: str, *, top: int = ROWS) -> list[Part]:
    """The parts of one rank, in the order of the views."""
    tables = document["ranks"][rank]["tables"]
    sections = {
        "overview": (_phases_by_step(document, rank), _steps(rank, tables)),
        "kernels": (_classes(rank, tables), _queue(rank, tables)),
        "memory": (_memory(rank, tables),),
    }
    return [
        part
        for view in VIEWS
        for part in _in_view(
            view, chain(*sections.get(view, ()), tables_part(_tables_title(rank), _tables_of(view, tables, top)))
        )
    ]


def _tables_title(rank: str) -> str:
    return f"Tables of rank {rank}"


def _tables_of(view: str, tables: Mapping[str, Any], top: int) -> list[Part | None]:
    names = [name for name in tables if name not in DRAWN and TABLE_VIEWS.get(name, "operators") == view]
    found = []
    for name in sorted(names, key=lambda name: name not in FIRST):
        table = page_table(tables[name], top, COLUMNS.get(name, ()))
        if table is not None and name in FIRST:
            table["open"] = True
        found.append(table)
    return found


def _in_view(view: str, parts: Iterable[Part]) -> Iterator[Part]:
    for part in parts:
        yield {**part, "view": view}


def _embedded_ranks(document: Document, shown: str | None, pair: list[int] | None, most: int) -> list[str]:
    """The ranks with parts inside the page: the one that is shown first, the compared ones, then the worst."""
    worst = [str(row["rank"]) for row in worst_ranks(document, count=most)]
    first = [*([shown] if shown is not None else []), *map(str, pair or ())]
    chosen = list(dict.fromkeys(rank for rank in (*first, *worst) if rank in document["ranks"]))[: max(most, 1)]
    return sorted(chosen, key=int)


# -- parts of all ranks ----------------------------------------------------------------------------------------------


def _diff_verdict(diff: Mapping[str, Any]) -> Part:
    notes = titled_lists([("Note", [(sentence, "") for sentence in diff["notices"]])])
    return {"verdict": finding_part(mark_of_diff(diff), diff["verdict"], sides=notes)}


def _trace_verdict(document: Document) -> Part:
    verdict, others = document["verdict"], other_findings(document)
    lead = {"cost": {}, "evidence": {}, "steps": None} if verdict["kind"] in NO_FINDING else document["findings"][0]
    return {
        "verdict": _finding({**lead, **verdict}),
        "others": [_finding(finding) for finding in others[:FINDINGS_SHOWN]],
        "more": more_text(len(others) - FINDINGS_SHOWN),
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
    count = document["steps"]["count"]
    about = f"where it goes in {count} steps" if count > 1 else "where it goes"
    yield from bar_chart(f"{'Host' if on_host else 'Device'} time by rank", "rank", bars, PARTS, about)


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


def _means(document: Document) -> Sequence[Mapping[str, Any]]:
    """The mean step of each rank by phase; none if the traces do not tell the phases apart."""
    means: Sequence[Mapping[str, Any]] = document.get("phases", {}).get("means", ())
    return means


def _phases_by_rank(document: Document) -> Iterator[Part]:
    means = _means(document)
    about = "mean step" if any(mean["steps"] > 1 for mean in means) else "the step"
    for where, prefix, whole in (("host", "", "wall_ns"), ("device", "device_", "device_span_ns")):
        bars = [_phase_bar(document, "rank", mean["rank"], mean, prefix, mean[whole]) for mean in means if mean[whole]]
        yield from bar_chart(f"Phases on the {where}", "rank", bars, _phase_legend(document), about)


def _phases_by_step(document: Document, rank: str) -> Iterator[Part]:
    rows = [row for row in document.get("phases", {}).get("rows", ()) if str(row["rank"]) == rank and row["wall_ns"]]
    bars = [_phase_bar(document, "step", row["step"], row, "", row["wall_ns"]) for row in rows]
    if len(bars) > 1:
        yield from bar_chart("Steps by phase", "step", bars, _phase_legend(document), f"of rank {rank}, on the host")


def _phase_bar(document: Document, axis: str, number: int, row: Mapping[str, Any], prefix: str, whole_ns: int) -> Part:
    names = [*document["phases"]["names"], *(["idle"] if prefix else [])]
    times = {name: row[f"{prefix}{name}_ns"] for name in names}
    parts = {
        PHASE_COLORS.get(name, name): (ns, f"{name}: {ns_text(ns)}, {share_text(ns / whole_ns)}")
        for name, ns in times.items()
    }
    return bar(f"{axis} {number}", number, parts, ns_text(whole_ns))


def _phase_legend(document: Document) -> dict[str, str]:
    return {PHASE_COLORS.get(name, name): name for name in (*document.get("phases", {}).get("names", ()), "idle")}


def _step_times(document: Document) -> Iterator[Part]:
    """The length of a step on each rank, as the profiler marked it."""
    bars = [
        bar(f"rank {row['rank']}", row["rank"], {"compute": (row["step_mean_ns"], _range_text(row))}, _mean_text(row))
        for row in document["distributed"]["rows"]
        if row.get("step_mean_ns")
    ]
    yield from bar_chart("Step time by rank", "rank", bars, {"compute": "mean step"}, "on the host")


def _mean_text(row: Mapping[str, Any]) -> str:
    return ns_text(row["step_mean_ns"])


def _range_text(row: Mapping[str, Any]) -> str:
    return f"mean {_mean_text(row)}, from {ns_text(row['step_min_ns'])} to {ns_text(row['step_max_ns'])}"


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
        _path_bar(name.replace("_", " "), at, CAUSE_COLORS.get(name, "host"), ns, length_ns)
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


def _distributed(document: Document, top: int) -> tuple[Iterable[Part], ...]:
    if len(document["ranks"]) < 2:
        return ()
    ranks = {**document["distributed"], "rows": worst_ranks(document, count=top)}
    ranks["left_out"] = len(document["distributed"]["rows"]) - len(ranks["rows"])
    tables = {"distributed": ranks, **document["collectives"]["tables"], "job_path": document["path"]["table"]}
    found = [page_table(table, top, COLUMNS.get(name, ())) for name, table in tables.items()]
    if found[0] is not None:
        found[0]["open"] = True
    of_ranks = tables_part("Tables of all ranks", found)
    return _ranks(document), _step_times(document), _collectives(document), of_ranks


def _files(document: Document) -> Iterator[Part]:
    folder, rows = _in_folder(document["files"])
    note = f"In {printable(folder)}." if folder else ""
    table = {"title": "Files", "columns": FILE_COLUMNS, "rows": rows, "left_out": 0, "note": note}
    yield from tables_part("Files", [page_table(table, FILES_SHOWN)])


def _in_folder(files: Sequence[Mapping[str, Any]]) -> tuple[str, list[Mapping[str, Any]]]:
    """The folder of all files, and the files with their paths in it; no folder if they have none in common."""
    folders = [posixpath.dirname(row["path"]) for row in files]
    try:
        folder = posixpath.commonpath(folders) if folders else ""
    except ValueError:  # absolute and relative paths
        folder = ""
    if folder in ("", "/"):
        return "", list(files)
    return folder, [{**row, "path": posixpath.relpath(row["path"], folder)} for row in files]


# -- parts of one rank ------------------------------------------------------------------------------------------------


def _steps(rank: str, tables: Mapping[str, Any]) -> Iterator[Part]:
    """The work that each step launched or, without a device, its length."""
    rows = _listed_rows(tables, "temporal_steps")
    on_device = any(row["span_ns"] for row in rows)
    bars = [
        _time_bar("step", row["step"], row)
        if on_device and row["span_ns"]
        else bar(
            f"step {row['step']}",
            row["step"],
            {"compute": (row["wall_ns"], ns_text(row["wall_ns"]))},
            ns_text(row["wall_ns"]),
        )
        for row in rows
    ]
    legend = PARTS if on_device else {"compute": "length"}
    yield from bar_chart("Steps", "step", bars, legend, f"of rank {rank}{', on the device' if on_device else ''}")


def _classes(rank: str, tables: Mapping[str, Any]) -> Iterator[Part]:
    rows = _listed_rows(tables, "kernel_classes")
    colors = {"communication": "comm"}
    bars = [
        bar(row["class"], at, {colors.get(row["class"], "compute"): (row["total_ns"], "")}, _class_text(row))
        for at, row in enumerate(rows[:BARS_SHOWN])
    ]
    yield from bar_chart("Kernel time by class", "class", bars, {}, f"of rank {rank}")


def _class_text(row: Mapping[str, Any]) -> str:
    return f"{ns_text(row['total_ns'])}, {share_text(row['time_share'])}"


def _memory(rank: str, tables: Mapping[str, Any]) -> Iterator[Part]:
    rows = _listed_rows(tables, "memory")
    lines = {name: [row[f"{name}_bytes"] for row in rows] for name in ("allocated", "reserved")}
    # A host has no allocator that reserves: the profiler records 0.
    known = {name: column for name, column in lines.items() if any(column) or (name == "allocated" and rows)}
    if known:
        most = max((value for value in lines["allocated"] if value is not None), default=None)
        peak = "" if most is None else f"; peak: {bytes_text(most)} allocated"
        about = f"of rank {rank}{peak}"
        yield curve_chart("Memory", about, "bytes", [row["time_ns"] for row in rows], known)


def _queue(rank: str, tables: Mapping[str, Any]) -> Iterator[Part]:
    """Queue length of the stream with most launches."""
    rows = _listed_rows(tables, "queue_curve")
    if not rows:
        return
    stream = rows[0]["stream"]
    rows = [row for row in rows if row["stream"] == stream]
    about = f"work launched but not started, on stream {stream} of rank {rank}"
    times = [row["start_ns"] for row in rows]
    yield curve_chart("Queue", printable(about), "count", times, {"queue length": [row["max_length"] for row in rows]})


def _listed_rows(tables: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The rows of a table, if there are several."""
    rows: list[Mapping[str, Any]] = tables[name]["rows"] if name in tables else []
    return rows if len(rows) > 1 else []


# -- two ranks --------------------------------------------------------------------------------------------------------

DIFFERENT_ROWS = 20
LONGEST_NAME = 72
SMALLEST_NAMED = 0.01
"""Smaller differences, as a share of the step, are not worth a sentence."""


def compared_ranks(document: Document) -> list[int] | None:
    """The rank with most work of its own and one of median pace; None if there is one rank.

    The leading finding names the rank with more work, unless it is about communication: then it names who waits for
    that rank. What is only worth knowing (``info``) names ranks for other reasons.
    """
    paces = {int(rank): found["pace"]["step_ns"] for rank, found in document["ranks"].items()}
    if len(paces) < 2:
        return None
    leading = document["findings"][:1]
    named = (
        rank
        for finding in leading
        if finding["severity"] != "info" and finding["phase"] != "comm"
        for rank in finding["ranks"]
    )
    slowest = max(paces, key=lambda rank: (_own_ns(document, rank), -rank))
    first = next((rank for rank in named if rank in paces), slowest)
    others = {rank: ns for rank, ns in paces.items() if rank != first}
    typical_ns = median_low(others.values())
    return [first, next(rank for rank, ns in others.items() if ns == typical_ns)]


def _own_ns(document: Document, rank: int) -> int:
    """Return the length of a step without what the rank spends in communication alone: mostly waits for others."""
    found = document["ranks"][str(rank)]
    (row,) = (row for row in document["distributed"]["rows"] if row["rank"] == rank)
    of_work = found["pace"]["work"] if found["pace"]["work"]["span_ns"] else row
    own_ns: int = found["pace"]["step_ns"] - (of_work["exposed_comm_ns"] or 0) // _step_count(found)
    return own_ns


def difference_parts(document: Document, rank: int, peer: int, *, top: int = DIFFERENT_ROWS) -> list[Part]:
    """What ``rank`` does longer than ``peer`` in a step; times are of one step."""
    ranks = document["ranks"]
    return compared_parts((f"rank {rank}", ranks[str(rank)]), (f"rank {peer}", ranks[str(peer)]), top=top)


def compared_parts(
    first: tuple[str, Document], other: tuple[str, Document], *, top: int = DIFFERENT_ROWS
) -> list[Part]:
    """What a rank does longer than another, or than before; each with its name: ``rank 3``, ``the baseline``."""
    (name, own), (peer, _) = first, other
    sides = [(each.removeprefix("the ").replace(" ", "_"), found) for each, found in (first, other)]
    operators = _differences(sides, "operators", "operator", "host_self_ns", "calls")
    kernels = _differences(sides, "kernels", "name", "total_ns", "count")
    times = _device_differences(sides)
    pythons = _python_differences(sides)
    note = f"In a step. extra: how much longer {name} takes than {peer}"
    tables = [
        _difference_table("Device and step", times, note, top),
        _difference_table("Python on the main thread, outside of operators", pythons, note, top),
        _difference_table("Operators, on the host without the operators inside", operators, note, top),
        _difference_table("Kernels", kernels, f"{note}; a collective includes the wait for other ranks", top),
    ]
    for table in tables:
        if table is not None:
            table["open"] = True
    step_ns = max(own["pace"]["step_ns"], other[1]["pace"]["step_ns"])
    largest = [
        (row["extra_ns"], f"in {_short(row['name'])}{where}.")
        for rows, where in (
            (pythons, " between operators" if pythons and pythons[0]["name"] != UNNAMED else ""),
            (operators, " on the host"),
            (kernels, " on the device"),
        )
        for row in rows[:1]
        if abs(row["extra_ns"]) > SMALLEST_NAMED * step_ns
    ]
    sentences = [  # what takes longer first: it may be why something else takes less
        f"{ns_text(abs(extra_ns))} {'more' if extra_ns > 0 else 'less'} {where}"
        for extra_ns, where in sorted(largest, key=lambda each: -each[0])
    ]
    title = f"{name[:1].upper()}{name[1:]}"
    parts = (
        listed(f"{title} compared with {peer}, in each step", sentences),
        tables_part(f"{title} and {peer}", tables),
    )
    return list(_in_view("difference", chain.from_iterable(parts)))


def _short(name: str) -> str:
    return fitted(short_name(printable(name)), LONGEST_NAME)


def _difference_table(title: str, rows: Sequence[Mapping[str, Any]], note: str, top: int) -> Part | None:
    columns = list(rows[0]) if rows else []
    table = {"title": title, "columns": columns, "rows": rows, "left_out": 0, "note": f"{note}."}
    return page_table(table, top)


Sides = Sequence[tuple[str, Document]]
"""The columns and documents of the two ranks."""
DEVICE_TIMES = {
    "computing": "compute_ns",
    "communicating": "comm_ns",
    "only communicating": "exposed_comm_ns",
    "idle": "idle_ns",
}


def _device_differences(sides: Sides) -> list[dict[str, Any]]:
    names = {"a step": [found["pace"]["step_ns"] for _, found in sides]}
    for name, key in DEVICE_TIMES.items():
        names[name] = [found["pace"]["work"][key] // _step_count(found) for _, found in sides]
    return [_difference(name, times, sides) for name, times in names.items() if any(times)]


def _difference(name: str, times: Sequence[int], sides: Sides) -> dict[str, Any]:
    own = {f"{column}_ns": time_ns for (column, _), time_ns in zip(sides, times, strict=True)}
    return {"name": name, "extra_ns": times[0] - times[1], **own}


def _differences(sides: Sides, table: str, name: str, time: str, calls: str) -> list[dict[str, Any]]:
    """Rows by the name of an operator or kernel, the largest difference first."""
    found = [
        {
            row[name]: (row[time] // _step_count(rank), row[calls] / _step_count(rank))
            for row in rank["tables"].get(table, {}).get("rows", ())
            if row.get(time) is not None
        }
        for _, rank in sides
    ]
    rows = []
    for text in dict.fromkeys(chain(*found)):
        values = [times.get(text, (0, 0.0)) for times in found]
        counts = {f"{column}_count": round(count, 2) for (column, _), (_, count) in zip(sides, values, strict=True)}
        rows.append({**_difference(text, [time_ns for time_ns, _ in values], sides), **counts})
    return sorted(rows, key=lambda row: -abs(row["extra_ns"]))


def _python_differences(sides: Sides) -> list[dict[str, Any]]:
    """Rows by what ran while the main thread ran no operator and waited for no rank, the largest difference first."""
    found: list[Counter[str]] = []
    for _, rank in sides:
        times: Counter[str] = Counter()
        for stop in rank.get("host", {}).get("stops", ()):
            named = " at ".join(filter(None, (stop["call"], short_name(stop["place"] or ""))))
            times[named or UNNAMED] += stop["total_ns"] // _step_count(rank)
        found.append(times)
    rows = [_difference(name, [times[name] for times in found], sides) for name in dict.fromkeys(chain(*found))]
    return sorted(rows, key=lambda row: -abs(row["extra_ns"]))


def _step_count(rank: Document) -> int:
    return max(len(rank["steps"]), 1)

"""The analysis of a job's traces as a document (``stepscope trace --json``) and as text for the terminal.

The document has plain values only, and says what to show first. Its format is part of the interface and described in
docs/traces.md; a test keeps the two in sync. Text and page are drawn from this document and nothing else, so that a
number on two screens has one source. Ranks are strings, since they are JSON keys. Unknown values are None, and so are
NaN and infinity.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from stepscope.records.finding import Finding
from stepscope.records.text import count_text, ns_text, printable, share_text
from stepscope.reports.finding_text import WHOLE_TRACE, finding_mark, price_text
from stepscope.reports.layout import NARROWEST, Page, bar, cut, table_lines
from stepscope.traces.findings import is_judged
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import Step
from stepscope.traces.phases import PHASE_COLUMNS, PHASES, PhaseRow, mean_row
from stepscope.traces.rank_analysis import RankAnalysis

if TYPE_CHECKING:
    from stepscope.traces.across_ranks.arrivals import CollectivesAnalysis
    from stepscope.traces.across_ranks.job_path import JobPath
    from stepscope.traces.device.figures import Pace
    from stepscope.traces.job import JobAnalysis
    from stepscope.traces.path.rank_path import RankPath

__all__ = [
    "COLUMNS",
    "NO_FINDING",
    "RANK_COLUMNS",
    "certainty_of",
    "document_of",
    "facts_of",
    "mark_of_diff",
    "other_findings",
    "plain",
    "problems_of",
    "rank_shown",
    "ranks_per_step",
    "render_trace",
    "table_document",
    "trace_price",
    "worst_ranks",
]

# -- document ---------------------------------------------------------------------------------------------------------

Document = Mapping[str, Any]
SCHEMA = 1
MOST_STEPS = 1000
"""Steps of a rank in ``phases``; most traces have a few."""


def document_of(job: JobAnalysis, *, before: JobAnalysis | None = None, lazy: bool = False) -> dict[str, Any]:
    """The document for a job. ``before``: another job, or the same one earlier, to compare with.

    ``lazy``: the tables of a rank are converted when they are read, for a page that shows one rank first.
    """
    return {
        "schema": SCHEMA,
        "verdict": _verdict(job),
        "findings": [plain(finding.to_dict()) for finding in job.findings],
        "files": [_file(analysis) for analysis in job.ranks],
        "steps": _steps(job.ranks),
        "ranks": {str(analysis.rank): _rank(analysis, lazy=lazy) for analysis in job.ranks},
        "collectives": _collectives(job.collectives),
        "clocks": {str(clock.rank): plain(clock) for clock in job.clocks.clocks},
        "phases": _phases(job.ranks),
        "distributed": table_document(job.distributed),
        "path": _job_path(job.path),
        "what_if": None,
        "diff": None if before is None else _diff(before, job),
        "notices": list(job.notices),
        "mixed": _mixed(job, before),
    }


def plain(value: Any) -> Any:
    """Convert a value to JSON types: records and mappings to objects, sequences and arrays to lists."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Table):
        return table_document(value)
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return [plain(inner) for inner in value]


def table_document(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "columns": list(table.columns),
        "rows": [plain(row) for row in table.to_rows()],
        "left_out": table.left_out,
        "note": table.note,
    }


def _verdict(job: JobAnalysis) -> dict[str, Any]:
    """The first finding in short, unless there is nothing above ``info``."""
    first = next(iter(job.findings), None)
    if first is None or (first.severity == "info" and first.kind != "start_up"):
        first = Finding(kind="healthy" if is_judged(job) else "too_little", severity="info", title=job.verdict)
    return {
        "kind": first.kind,
        "severity": first.severity,
        "title": job.verdict,
        "price": trace_price(first.to_dict()),
        "ranks": list(first.ranks),
        "advice": list(first.advice),
        "confidence": round(first.confidence, 3),
    }


def trace_price(finding: Mapping[str, Any]) -> str | None:
    """What a finding costs, as a share of what all findings of a trace are shares of."""
    return price_text(finding["cost"], of="the steps" if finding["steps"] else WHOLE_TRACE)


def _mixed(job: JobAnalysis, before: JobAnalysis | None) -> str | None:
    """The notice on mixed files, for both sides of a comparison."""
    mixed = [each.mixed for each in (job, before) if each is not None and each.mixed]
    return " ".join(mixed) or None


def _file(analysis: RankAnalysis) -> dict[str, Any]:
    meta = analysis.meta
    return {
        "path": meta.path,
        "format": meta.format,
        "rank": analysis.rank,
        "rank_in_file": meta.rank,
        "world_size": meta.world_size,
        "backend": meta.backend,
        "host": meta.host,
        "pid": meta.pid,
        "devices": [_device_name(device) for device in meta.devices],
        "events": meta.read_events,
        "origin_ns": meta.origin_ns,
        "with_stack": meta.with_stack,
        "record_shapes": meta.record_shapes,
        "profile_memory": meta.profile_memory,
        "truncated": meta.truncated,
        "problems": list(meta.problems),
    }


def _device_name(device: Mapping[str, Any]) -> str:
    return str(device.get("name") or "unnamed")


def _steps(analyses: Sequence[RankAnalysis]) -> dict[str, Any]:
    """Steps of all ranks together; the length of a step is that of its longest rank."""
    lengths: dict[int, int] = {}
    for analysis in analyses:
        for step in analysis.steps:
            lengths[step.number] = max(lengths.get(step.number, 0), step.end_ns - step.start_ns)
    left_out = sorted({analysis.left_out.number for analysis in analyses if analysis.left_out})
    ordered = sorted(lengths.values())
    slowest = max((analysis.pace for analysis in analyses), key=lambda pace: pace.step_ns, default=None)
    return {
        "count": len(lengths),
        "first": min(lengths, default=None),
        "last": max(lengths, default=None),
        "marked": any(step.name for analysis in analyses for step in analysis.steps),
        "left_out": left_out,
        "median_ns": ordered[(len(ordered) - 1) // 2] if ordered else None,
        "max_ns": ordered[-1] if ordered else None,
        "total_ns": sum(ordered),
        "pace_ns": slowest.step_ns if slowest else None,
        "by_device": bool(slowest and slowest.by_device),
    }


def _phases(analyses: Sequence[RankAnalysis]) -> dict[str, Any]:
    """How the steps of each rank divide into phases, and their means; ranks without a known phase are left out."""
    known = [analysis for analysis in analyses if analysis.phases.sources]
    means = [(analysis.rank, mean_row(analysis.phases.rows)) for analysis in known]
    return {
        "names": list(PHASES),
        "sources": {str(analysis.rank): list(analysis.phases.sources) for analysis in known},
        "rows": [_phase_row(analysis.rank, row) for analysis in known for row in analysis.phases.rows[:MOST_STEPS]],
        "means": [_phase_row(rank, row, "steps") for rank, row in means if row is not None],
    }


def _phase_row(rank: int, row: PhaseRow, number: str = "step") -> dict[str, Any]:
    return {"rank": rank, **dict(zip((number, *PHASE_COLUMNS[1:]), row.values, strict=True))}


class _LazyTables(Mapping[str, dict[str, Any]]):
    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = tables
        self._converted: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._converted:
            self._converted[name] = table_document(self._tables[name])
        return self._converted[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def _rank(analysis: RankAnalysis, *, lazy: bool = False) -> dict[str, Any]:
    tables = _LazyTables(analysis.tables)
    return {
        "steps": [_step(step) for step in analysis.steps],
        "left_out": _step(analysis.left_out) if analysis.left_out else None,
        "pace": _pace(analysis.pace),
        "temporal": plain(analysis.temporal),
        "idle": plain(analysis.idle),
        "device": plain(analysis.device),
        "host": plain(analysis.host),
        "path": _path(analysis.path),
        "tables": tables if lazy else dict(tables),
    }


def _pace(pace: Pace) -> dict[str, Any]:
    return {
        "step_ns": pace.step_ns,
        "total_ns": pace.total_ns,
        "host_ns": pace.host_ns,
        "device_ns": pace.device_ns,
        "by_device": pace.by_device,
        "work": plain(pace.work),
    }


def _path(path: RankPath) -> dict[str, Any]:
    whole = path.whole
    return {
        "length_ns": path.length_ns,
        "causes": plain(path.causes),
        "steps": plain(path.steps),
        "whole": None if whole is None else {"length_ns": whole.length_ns, "causes": plain(whole.causes)},
    }


def _job_path(path: JobPath) -> dict[str, Any]:
    """The critical path of the job; segments of single steps are in the table, up to its limit."""
    steps = [
        {
            "number": step.number,
            "rank": step.rank,
            "length_ns": step.length_ns,
            "by_rank": plain(step.by_rank),
            "by_cause": plain(step.by_cause),
        }
        for step in path.steps
    ]
    return {
        "length_ns": path.length_ns,
        "by_rank": plain(path.by_rank),
        "by_cause": plain(path.by_cause),
        "steps": steps,
        "table": table_document(path.table),
    }


def _collectives(found: CollectivesAnalysis) -> dict[str, Any]:
    """Sums and tables; single collectives are in ``tables.collective_list``, up to its limit."""
    figures = (
        *("count", "last_counts", "wait_ns", "own_transfer_ns", "cost_by_rank_ns", "alone_by_rank_ns"),
        *("transfer_ns", "least_ns", "cost_ns", "tables"),
    )
    return {name: plain(getattr(found, name)) for name in figures}


def _diff(before: JobAnalysis, job: JobAnalysis) -> dict[str, Any]:
    from stepscope.traces.job_diff import diff

    found = diff(before, job)
    return {**plain(found), "step_change_ns": found.step_change_ns}


def _step(step: Step) -> dict[str, Any]:
    return {
        "number": step.number,
        "name": step.name,
        "start_ns": step.start_ns,
        "end_ns": step.end_ns,
        "dur_ns": step.end_ns - step.start_ns,
    }


# -- selection --------------------------------------------------------------------------------------------------------
# What to show of a document if there is not room for everything: ranks, findings, notices.


NO_FINDING = ("healthy", "too_little")
"""Verdicts that do not come from a finding."""
LOW_CONFIDENCE = 0.75
RANKS_SHOWN = 16
RANK_COLUMNS = (
    *("rank", "pace_ns", "compute_ns", "comm_ns", "overlap_share", "idle_ns", "last_count", "wait_ns"),
    "transfer_ns",
)
"""Columns of the rank table, the most important first."""


def facts_of(document: Document) -> list[str]:
    """What was traced, as short facts."""
    files, steps = document["files"], document["steps"]
    worlds = {file["world_size"] for file in files if file["world_size"]}
    whole = max(worlds) if len(worlds) == 1 else len(files)
    ranks = count_text(len(files), "rank")
    facts = [ranks if whole <= len(files) else f"{len(files)} of {count_text(whole, 'rank')}"]
    facts.append(count_text(sum(file["events"] for file in files), "event"))
    if steps["marked"]:
        which = [f"{steps['first']}–{steps['last']}"] if steps["count"] > 1 else []
        which += [f"{steps['left_out'][0]} is left out"] if steps["left_out"] else []
        facts.append(count_text(steps["count"], "step") + (f" ({'; '.join(which)})" if which else ""))
        on_host = f", {ns_text(steps['median_ns'])} on the host" if steps["by_device"] else ""
        facts.append(f"{ns_text(steps['pace_ns'])} a step{on_host}")
    elif steps["median_ns"] is not None:
        facts.append(f"{ns_text(steps['median_ns'])} without profiler steps")
    facts += sorted({device for file in files for device in file["devices"][:1]})[:2]
    hosts = sorted({file["host"] for file in files if file["host"]})
    if hosts:
        facts.append(f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts")
    return facts


def worst_ranks(document: Document, count: int = RANKS_SHOWN) -> list[Mapping[str, Any]]:
    """Rows of the rank table: all if there are few, else those that were last most often or took longest."""
    rows: list[Mapping[str, Any]] = document["distributed"]["rows"]
    if len(rows) <= count:
        return rows
    return sorted(rows, key=_badness)[:count]


def ranks_per_step(document: Document) -> list[Mapping[str, Any]]:
    """Rows of the worst ranks with times per step, for the work that their steps launched, like their pace."""
    return [_per_step(row, document["ranks"][str(row["rank"])]) for row in worst_ranks(document)]


def _per_step(row: Mapping[str, Any], rank: Mapping[str, Any]) -> Mapping[str, Any]:
    of_work = rank["pace"]["work"] if rank["pace"]["work"]["span_ns"] else row
    times = {name: of_work[name] for name in ("compute_ns", "comm_ns", "idle_ns")}
    times |= {name: row[name] for name in ("wait_ns", "transfer_ns")}
    steps = max(len(rank["steps"]), 1)
    return {**row, **{name: None if time is None else time // steps for name, time in times.items()}}


def _badness(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return -(row["last_count"] or 0), -(row["span_ns"] or 0), row["rank"]


def rank_shown(document: Document) -> str | None:
    """The rank whose tables to show if there is room for one: the first culprit, else the lowest rank."""
    named = [str(rank) for finding in document["findings"] for rank in finding["ranks"]]
    return next((rank for rank in [*named, *document["ranks"]] if rank in document["ranks"]), None)


def certainty_of(verdict: Mapping[str, Any]) -> str | None:
    """A sentence about the confidence, if it is low."""
    if verdict["confidence"] >= LOW_CONFIDENCE:
        return None
    return f"{verdict['confidence']:.0%}: few steps, or none that the profiler marked."


def mark_of_diff(diff: Mapping[str, Any]) -> str:
    """Slower is a warning; anything else is not."""
    if not diff["clear"]:
        return "info"
    return "warning" if diff["step_change_ns"] > 0 else "healthy"


def other_findings(document: Document) -> Sequence[Mapping[str, Any]]:
    """The findings that are not the verdict."""
    return document["findings"][0 if document["verdict"]["kind"] in NO_FINDING else 1 :]  # type: ignore[no-any-return]


def problems_of(document: Document) -> Sequence[str]:
    """Notices for the reader: about the job, then about each file."""
    of_files = (f"{file['path']}: {problem}" for file in document["files"] for problem in file["problems"])
    return [*document["notices"], *of_files]


# -- text -------------------------------------------------------------------------------------------------------------

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
        "utilization_share",
        "compute_ns",
        "comm_ns",
        "overlap_ns",
        "idle_ns",
    ),
    "idle_by_operator": ("operator", "stream", "gaps", "host_wait_ns", "sync_ns", "longest_ns"),
    "syncs": (),
    "kernel_classes": ("class", "count", "total_ns", "time_share", "tensor_core_ns", "fp32_matmul_ns"),
    "kernels": ("name", "count", "total_ns", "time_share", "mean_ns", "max_ns", "overlapped_ns", "occupancy_share"),
    "ncu": ("name", "duration_ns", "occupancy_share", "dram_share", "sm_share", "limited_by", "launches", "count"),
    "operators": ("operator", "calls", "device_self_ns", "device_total_ns", "host_self_ns", "host_total_ns"),
    "operators_by_source": (),
    "copies": ("direction", "memory", "count", "moved_bytes", "total_ns", "time_share", "bandwidth_gbps"),
    "memory_peak": ("operator", "alive_bytes", "blocks", "peak_share", "source", "module"),
}
"""Tables that are useful with few rows, with the most important columns first (none: all that fit)."""
ON_REQUEST: Mapping[str, Sequence[str]] = {
    "phases": (),
    "kernel_types": (),
    "short_kernels": ("short_name", "count", "of_count", "total_ns", "call_ns"),
    "launches": (),
    "queue": (),
    "sequences": (),
    "operators_by_shape": (),
    "modules": ("module", "host_ns", "backward_host_ns", "device_ns", "backward_device_ns", "calls"),
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
    _mixed_lines(page, document)
    _diff_lines(page, document, top or ROWS)
    _verdict_lines(page, document)
    _what_if(page, document)
    _others(page, document)
    page.items("trace", [cut(printable(fact), FACT) for fact in facts_of(document)])
    page.blank()
    if len(document["ranks"]) > 1:
        _ranks(page, document)
        _phases_of_ranks(page, document)
        _collective_lines(page, document)
        _table(page, document["path"]["table"], top or ROWS, JOB_PATH_COLUMNS)
    else:
        for rank in document["ranks"].values():
            _temporal(page, rank["temporal"])
            _idle(page, rank["idle"])
        _phases_of_one(page, document)
    if document["diff"] is None or top:
        _tables(page, document, SHOWN if top is None else {**SHOWN, **ON_REQUEST}, top or ROWS)
    _notices(page, document)
    return "\n".join(page.lines).rstrip() + "\n"


def _mixed_lines(page: Page, document: Document) -> None:
    """A warning before everything else: the rest covers only some of the files."""
    if document["mixed"]:
        page.marked("warning", printable(document["mixed"]), bold=False)
        page.blank()


def _diff_lines(page: Page, document: Document, top: int) -> None:
    """What changed, if there is something to compare with."""
    diff = document["diff"]
    if diff is None:
        return
    page.marked(mark_of_diff(diff), printable(diff["verdict"]), bold=True)
    for notice in diff["notices"]:
        page.labeled("note", [printable(notice)])
    page.blank()
    for name, columns in DIFFERENCES.items():
        table = diff["tables"].get(name)
        rows = [row for row in table["rows"] if row.get("status") != "same" and _is_there(row)] if table else []
        _table(page, {**table, "rows": rows} if table else None, max(top, len(rows)) if name == WHOLE else top, columns)


def _is_there(row: Mapping[str, Any]) -> bool:
    """Whether the row exists on one of the two sides."""
    return any(row.get(column, 1) for column in ("before_ns", "after_ns"))


def _verdict_lines(page: Page, document: Document) -> None:
    verdict = document["verdict"]
    page.marked(finding_mark(verdict), printable(verdict["title"]), bold=True)
    if verdict["price"]:
        page.labeled("cost", [verdict["price"]])
    page.labeled("to do", map(printable, verdict["advice"]))
    certainty = certainty_of(verdict)
    if certainty:
        page.labeled("certainty", [certainty])
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
        price = trace_price(finding)
        if price:
            page.labeled("cost", [price])
        page.labeled("to do", map(printable, finding["advice"][:1]))
    if len(others) > OTHERS_SHOWN:
        page.lines.append(f"  … and {len(others) - OTHERS_SHOWN} more (--json has them)")
    page.blank()


def _temporal(page: Page, temporal: Mapping[str, int]) -> None:
    """Parts that add up to the span, and how much communication was hidden."""
    span_ns = temporal["span_ns"]
    if not span_ns:
        page.labeled("device", ["no work on a device in this trace"])
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
        page.labeled("wait", ["sums collectives: two at once both count here, but once in comm"])
        page.blank()


def _phases_of_one(page: Page, document: Document) -> None:
    """The mean step of the only rank by phase."""
    phases = document["phases"]
    for mean in phases["means"]:
        rows = [
            {"phase": phase, "host_ns": mean[f"{phase}_ns"], "host_share": _part(mean[f"{phase}_ns"], mean["wall_ns"])}
            | _on_device(mean, mean[f"device_{phase}_ns"])
            for phase in phases["names"]
        ]
        rows = [row for row in rows if row["host_ns"] or row["device_ns"]]
        if mean["device_span_ns"]:
            rows.append(
                {"phase": "idle", "host_ns": None, "host_share": None, **_on_device(mean, mean["device_idle_ns"])}
            )
        _section(page, _phases_title(document, mean), table_lines(PHASE_TEXT, rows, page.width - 2))


PHASE_TEXT = ("phase", "host_ns", "host_share", "device_ns", "device_share")


def _on_device(mean: Mapping[str, Any], time_ns: int) -> dict[str, Any]:
    span_ns = mean["device_span_ns"]
    return {"device_ns": time_ns if span_ns else None, "device_share": _part(time_ns, span_ns)}


def _part(time_ns: int, of_ns: int) -> float | None:
    return time_ns / of_ns if of_ns else None


def _phases_title(document: Document, mean: Mapping[str, Any]) -> str:
    if not document["steps"]["marked"]:
        return "Phases"
    return f"Phases, mean of {mean['steps']} steps" if mean["steps"] > 1 else "Phases of the step"


def _phases_of_ranks(page: Page, document: Document) -> None:
    """The mean step of each rank by phase: on the host, then on the device."""
    phases, worst = document["phases"], {row["rank"] for row in worst_ranks(document)}
    means = [mean for mean in phases["means"] if mean["rank"] in worst]
    if not means:
        return
    for where, columns in (("host", ""), ("device", "device_")):
        names = [name for name in phases["names"] if any(mean[f"{columns}{name}_ns"] for mean in means)]
        wholes = ["wall_ns"] if where == "host" else ["device_span_ns", "device_idle_ns"]
        rows = [
            {"rank": mean["rank"]}
            | {whole.removeprefix("device_"): mean[whole] for whole in wholes}
            | {f"{name}_ns": mean[f"{columns}{name}_ns"] for name in names}
            for mean in means
        ]
        if where == "host" or any(mean["device_span_ns"] for mean in means):
            title = f"Phases on the {where}" + (", per step" if document["steps"]["marked"] else "")
            _section(page, title, table_lines(list(rows[0]), rows, page.width - 2, of=len(phases["means"])))


def _collective_lines(page: Page, document: Document) -> None:
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
        page.labeled("clocks", [f"of {count_text(len(shifted), 'rank')} shifted to fit the others, {most}"])
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
    problems = problems_of(document)
    if not problems:
        return
    page.lines.append(page.paint("Worth knowing", "bold"))
    for notice in problems[:PROBLEMS_SHOWN]:
        page.lines += textwrap.wrap(
            printable(notice), page.width, initial_indent="  · ", subsequent_indent="    ", break_on_hyphens=False
        )
    if len(problems) > PROBLEMS_SHOWN:
        page.lines.append(f"  … and {len(problems) - PROBLEMS_SHOWN} more")

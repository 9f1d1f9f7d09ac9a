"""The document of ``stepscope trace --json``: the analysis of a job's traces as plain values, and what to show first.

The format is part of the interface and described in docs/traces.md; a test keeps the two in sync. Text and page are
drawn from this document and nothing else, so that a number on two screens has one source. Ranks are strings, since they
are JSON keys. Unknown values are None, and so are NaN and infinity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from stepscope.records.finding import Finding
from stepscope.records.text import count_text, ns_text
from stepscope.reports.layout import price_text
from stepscope.traces.findings import is_judged
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import Step
from stepscope.traces.rank import RankAnalysis

if TYPE_CHECKING:
    from stepscope.traces.device.figures import Pace
    from stepscope.traces.job import JobAnalysis, JobPath
    from stepscope.traces.path.rank_path import RankPath
    from stepscope.traces.ranks.collectives import CollectivesAnalysis

__all__ = [
    "NO_FINDING",
    "RANK_COLUMNS",
    "certainty_of",
    "document_of",
    "facts_of",
    "look_of",
    "look_of_diff",
    "other_findings",
    "plain",
    "problems_of",
    "rank_shown",
    "ranks_per_step",
    "table_document",
    "worst_ranks",
]


# -- document ---------------------------------------------------------------------------------------------------------

SCHEMA = 1


def document_of(job: JobAnalysis, *, before: JobAnalysis | None = None) -> dict[str, Any]:
    """The document for a job. ``before``: another job, or the same one earlier, to compare with."""
    return {
        "schema": SCHEMA,
        "verdict": _verdict(job),
        "findings": [plain(finding.to_dict()) for finding in job.findings],
        "files": [_file(analysis) for analysis in job.ranks],
        "steps": _steps(job.ranks),
        "ranks": {str(analysis.rank): _rank(analysis) for analysis in job.ranks},
        "collectives": _collectives(job.collectives),
        "clocks": {str(clock.rank): plain(clock) for clock in job.clocks.clocks},
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
        "price": price_text(first.cost),
        "ranks": list(first.ranks),
        "advice": list(first.advice),
        "confidence": round(first.confidence, 3),
    }


def _mixed(job: JobAnalysis, before: JobAnalysis | None) -> str | None:
    """The notice on mixed files, for both sides of a comparison."""
    told = [each.mixed for each in (job, before) if each is not None and each.mixed]
    return " ".join(told) or None


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


def _rank(analysis: RankAnalysis) -> dict[str, Any]:
    return {
        "steps": [_step(step) for step in analysis.steps],
        "left_out": _step(analysis.left_out) if analysis.left_out else None,
        "pace": _pace(analysis.pace),
        "temporal": plain(analysis.temporal),
        "idle": plain(analysis.idle),
        "device": plain(analysis.device),
        "host": plain(analysis.host),
        "path": _path(analysis.path),
        "tables": {name: table_document(table) for name, table in analysis.tables.items()},
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

Document = Mapping[str, Any]

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


def look_of(finding: Mapping[str, Any]) -> str:
    """Look of a finding or the verdict: its severity, or ``healthy``."""
    return "healthy" if finding["kind"] == "healthy" else str(finding["severity"])


def look_of_diff(diff: Mapping[str, Any]) -> str:
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

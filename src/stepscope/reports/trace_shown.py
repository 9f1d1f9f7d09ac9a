"""What of a trace's document to show first, where there is room for some only: ranks, findings, remarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.records.units import count_text, ns_text

__all__ = [
    "RANKS_SHOWN",
    "RANK_COLUMNS",
    "certainty_of",
    "facts_of",
    "look_of",
    "look_of_diff",
    "other_findings",
    "problems_of",
    "rank_shown",
    "ranks_per_step",
    "worst_ranks",
]

Document = Mapping[str, Any]

NO_FINDING = ("healthy", "too_little")
"""Verdicts that are none of the findings."""
LOW_CONFIDENCE = 0.75
RANKS_SHOWN = 16
RANK_COLUMNS = (
    *("rank", "pace_ns", "compute_ns", "comm_ns", "overlap_share", "idle_ns", "last_count", "wait_ns"),
    "transfer_ns",
)
"""Of the table of ranks, those that matter first."""


def facts_of(document: Document) -> list[str]:
    """What was traced, in a few words each."""
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
    """Rows of the table of ranks: all where they are few, else those that were last most often or took longest."""
    rows: list[Mapping[str, Any]] = document["distributed"]["rows"]
    if len(rows) <= count:
        return rows
    return sorted(rows, key=_badness)[:count]


def ranks_per_step(document: Document) -> list[Mapping[str, Any]]:
    """The worst ranks' rows with times per step, of the work that their steps launched, as their pace is."""
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
    """Whose tables to show where there is room for one rank's: the first culprit's, else the lowest."""
    named = [str(rank) for finding in document["findings"] for rank in finding["ranks"]]
    return next((rank for rank in [*named, *document["ranks"]] if rank in document["ranks"]), None)


def certainty_of(verdict: Mapping[str, Any]) -> str | None:
    """A sentence, where there is doubt."""
    if verdict["confidence"] >= LOW_CONFIDENCE:
        return None
    return f"{verdict['confidence']:.0%}: few steps, or none that the profiler marked."


def look_of(finding: Mapping[str, Any]) -> str:
    """Of a finding or the verdict: its severity, or that all is well."""
    return "healthy" if finding["kind"] == "healthy" else str(finding["severity"])


def look_of_diff(diff: Mapping[str, Any]) -> str:
    """Slower is a warning, anything else is none."""
    if not diff["clear"]:
        return "info"
    return "warning" if diff["step_change_ns"] > 0 else "healthy"


def other_findings(document: Document) -> Sequence[Mapping[str, Any]]:
    """Those that are not the verdict."""
    return document["findings"][0 if document["verdict"]["kind"] in NO_FINDING else 1 :]  # type: ignore[no-any-return]


def problems_of(document: Document) -> Sequence[str]:
    """What a reader should know: of the job, then of each file."""
    of_files = (f"{file['path']}: {problem}" for file in document["files"] for problem in file["problems"])
    return [*document["notices"], *of_files]

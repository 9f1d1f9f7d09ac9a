"""What captures add to the findings of a run: the operator, kernel or line, and what only traces show.

The rules name the rank and the phase; the capture of a few of its steps (``records/capture.py``) says what it does
longer there than a median rank.  This step changes neither which findings there are nor how severe they are: a finding
gets the difference in its evidence, its title and its advice.  Only what no rule on runs can see is added, as
information.  The newest capture that fits a finding counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepscope.diagnosis.engine.view import View
from stepscope.judge import thresholds
from stepscope.records.capture import CaptureRecord, Difference
from stepscope.records.finding import Finding
from stepscope.records.series import RunData
from stepscope.records.steps import BUILTIN_PHASES, OTHER
from stepscope.records.text import phase_place

__all__ = ["OF_ALL_RANKS", "ONLY_IN_TRACES", "join_captures"]

SOURCE = "capture"
"""``evidence.source`` of findings that come from a capture alone."""

OF_ALL_RANKS: Mapping[str, tuple[str, ...]] = {
    "input_bound": ("loader_bound",),
    "h2d_bound": ("pageable_copies", "exposed_copies", "host_copies"),
    "comm_bound": ("low_overlap", "exposed_communication"),
    "low_overlap": ("low_overlap", "exposed_communication"),
    "pipeline_bubble": ("pipeline_bubble",),
    "optimizer_bound": ("unfused_optimizer",),
    "wait_heavy": ("host_sync", "host_python", "gpu_idle_sync", "gc_pauses"),
    "between_steps": ("host_python", "gc_pauses"),
    "jitter": ("gc_pauses", "recompiles", "host_python"),
    "low_gpu_utilization": (
        *("launch_bound", "host_sync", "host_python", "gil_contention", "gpu_idle_host", "gpu_idle_sync"),
        *("graph_breaks", "tiny_kernels"),
    ),
}
"""Findings about all ranks, and the findings of traces that explain them, the most telling first."""
OF_CHANGE = frozenset(("change_point", "drift", "throughput_drop"))
"""Findings that the comparison with the run's baseline explains."""
OF_HOST = frozenset(
    (
        *("host_python", "launch_bound", "gpu_idle_host", "gpu_idle_gaps", "gpu_underused", "gil_contention"),
        *("graph_breaks", "unfused_optimizer", "tiny_kernels", "small_batch"),
    )
)
"""What a profiler itself can cause: it makes each call of the host longer."""
ONLY_IN_TRACES = frozenset(
    (
        *OF_HOST,
        *("host_sync", "gpu_idle_sync", "gc_pauses", "host_copies", "pageable_copies", "exposed_copies"),
        *("fp32_matmul", "low_occupancy", "low_occupancy_attention", "bandwidth_bound"),
        *("data_parallel", "ddp_without_nccl"),
    )
)
"""Kinds of findings of traces that no rule on runs has."""


def join_captures(findings: Sequence[Finding], run: RunData, view: View) -> list[Finding]:
    """The findings with what the run's captures say about them, and what only captures show."""
    captures = _of_attempt(run)
    if not captures or not len(view.steps):
        return list(findings)
    joined = [_joined(finding, captures) for finding in findings]
    known = {finding.kind for finding in joined}
    used = {str(finding.evidence[SOURCE].get("kind")) for finding in joined if SOURCE in finding.evidence}
    return [*joined, *_only_captured(captures[0], known | used)]


def _of_attempt(run: RunData) -> list[CaptureRecord]:
    """The finished captures of the last attempt, the newest first: steps are numbered again after a restart."""
    attempt = max((series.identity.attempt for series in run.ranks), default=0)
    began = [series.anchor_wall_ns for series in run.ranks if series.identity.attempt == attempt]
    since_ns = min(began, default=0)
    done = [record for record in run.captures if record.state == "done" and record.requested_wall_ns >= since_ns]
    return sorted(done, key=lambda record: (record.requested_wall_ns, record.order.id), reverse=True)


# -- a finding of the run ---------------------------------------------------------------------------------------------


def _joined(finding: Finding, captures: Iterable[CaptureRecord]) -> Finding:
    for record in captures:
        difference = _difference(finding, record) or _change(finding, record)
        if difference is not None:
            return _with_difference(finding, record, difference)
        row = _explaining(finding, record)
        if row is not None:
            evidence = {**_about(record), "kind": str(row.get("kind", "")), "text": str(row.get("title", ""))}
            return _with(finding, record, evidence, finding.title, _advice(row))
    return finding


def _difference(finding: Finding, record: CaptureRecord) -> Difference | None:
    """What a rank that the finding names does longer, in the finding's phase."""
    first = next(iter(record.differences), None)
    if first is None or first.what == "wait" or first.rank not in finding.ranks or not finding.cost:
        return None
    other = BUILTIN_PHASES[OTHER]
    fits = finding.phase is None or finding.phase == (first.phase or other) or not _has_phases(record)
    return first if fits else None


def _change(finding: Finding, record: CaptureRecord) -> Difference | None:
    """What a rank does longer than in the baseline, if the finding is that the run became slower."""
    first = next(iter(record.changes), None)
    if first is None or finding.kind not in OF_CHANGE or not finding.cost:
        return None
    fits = finding.phase is None or finding.phase == (first.phase or BUILTIN_PHASES[OTHER])
    return first if fits and (not finding.ranks or first.rank in finding.ranks) else None


def _has_phases(record: CaptureRecord) -> bool:
    return any(each.phase for each in record.differences)


def _explaining(finding: Finding, record: CaptureRecord) -> Mapping[str, Any] | None:
    """The finding of the traces that says why all ranks are slow like that."""
    if finding.ranks or not finding.cost:
        return None
    rows = {str(row.get("kind")): row for row in reversed(record.findings) if row.get("severity") != "info"}
    kinds = OF_ALL_RANKS.get(finding.kind, ())
    return next((rows[kind] for kind in kinds if kind in rows and not _disturbed(kind, record)), None)


def _with_difference(finding: Finding, record: CaptureRecord, difference: Difference) -> Finding:
    evidence = {
        **_about(record),
        "what": difference.what,
        "name": difference.name,
        "rank": difference.rank,
        "peer": difference.peer,
        "extra_ms": round(difference.extra_ns / 1e6, 3),
        "line": difference.line,
        "layer": difference.layer,
        "text": difference.text,
    }
    title = finding.title
    if difference.what != "phase" and finding.phase and difference.phase in ("", finding.phase):
        title = _titled(title, finding.phase, difference)
    return _with(finding, record, {key: value for key, value in evidence.items() if value != ""}, title)


def _titled(title: str, phase: str, difference: Difference) -> str:
    """``… in backward (aten::mm, train.py:24) …``; a line that stacks already showed stays."""
    where = phase_place(phase)
    found = re.search(rf" {re.escape(where)}(?P<seen> \((?:[^()]|\([^()]*\))*\))?", title)
    if found is None:
        return title
    seen = (found["seen"] or "").strip(" ")[1:-1]
    if difference.what == "line" and seen:
        return title
    place = seen or difference.line
    shown = difference.shown or difference.name
    shown = f"{shown} of {difference.layer}" if difference.layer else shown
    name = "" if difference.what == "line" and place and shown in place else shown
    text = ", ".join(part for part in (name, place) if part)
    return f"{title[: found.start()]} {where} ({text}){title[found.end() :]}"


def _about(record: CaptureRecord) -> dict[str, Any]:
    about: dict[str, Any] = {"id": record.order.id}
    steps = _steps(record)
    return {**about, "steps": list(steps)} if steps else about


def _with(
    finding: Finding, record: CaptureRecord, evidence: dict[str, Any], title: str, advice: Sequence[str] = ()
) -> Finding:
    text = str(evidence["text"])
    lead = f"{_named(record)}: {text}"
    more = [line for line in advice if line not in finding.advice]
    return replace(
        finding, title=title, evidence={**finding.evidence, SOURCE: evidence}, advice=(lead, *more, *finding.advice)
    )


def _advice(row: Mapping[str, Any]) -> list[str]:
    advice = row.get("advice")
    return [str(line) for line in advice[:2]] if isinstance(advice, list) else []


def _steps(record: CaptureRecord) -> tuple[int, int] | None:
    found = record.figures.get("steps")
    if isinstance(found, list) and len(found) == 2 and all(type(number) is int for number in found):
        return found[0], found[1]
    return None


def _named(record: CaptureRecord) -> str:
    """``In the capture of steps 340 to 345``."""
    steps = _steps(record)
    if steps is None:
        return f"In the capture {record.order.id}"
    first, last = steps
    return f"In the capture of step {first}" if first == last else f"In the capture of steps {first} to {last}"


# -- findings of captures alone ---------------------------------------------------------------------------------------


def _only_captured(record: CaptureRecord, known: set[str]) -> list[Finding]:
    found: dict[str, Finding] = {}
    for row in record.findings:
        kind, title, ranks = str(row.get("kind", "")), str(row.get("title", "")), row.get("ranks")
        if kind not in ONLY_IN_TRACES or kind in known or kind in found or not title or row.get("severity") == "info":
            continue
        if _disturbed(kind, record):
            continue
        found[kind] = Finding(
            kind=kind,
            severity="info",
            title=f"{_named(record)}: {title}",
            ranks=tuple(rank for rank in ranks if type(rank) is int) if isinstance(ranks, list) else (),
            steps=_steps(record),
            evidence={"source": SOURCE, SOURCE: _about(record)},
            advice=tuple(_advice(row)),
        )
    return list(found.values())[: thresholds.CAPTURE_JOINED]


def _disturbed(kind: str, record: CaptureRecord) -> bool:
    """Whether the profiler itself may be the cause: the captured steps took much longer than the others."""
    if kind not in OF_HOST:
        return False
    profiled, usual = record.figures.get("step_ms"), record.figures.get("usual_step_ms")
    if not isinstance(profiled, int | float) or not isinstance(usual, int | float):
        return True
    return profiled > thresholds.CAPTURE_DISTURBED * usual

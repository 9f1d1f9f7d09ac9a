"""Limits on a job's traces, for CI: which hold, as a document and its text or Markdown (``stepscope gate --trace``).

Each limit is checked on the rank that is worst for it. What a trace does not contain cannot be decided: memory without
a device or without ``profile_memory=True``, a step without ``prof.step()``, a kernel that did not run. Nor does a limit
hold for sure if files of other ranks could not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from stepscope.records.text import bytes_text, count_text, ns_text, printable, share_text
from stepscope.reports.layout import MARKS, NARROWEST, Page
from stepscope.traces.job import JobAnalysis
from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["GATE_EXIT_CODES", "TraceLimits", "gate_trace", "render_gate", "render_gate_markdown"]

Result = Literal["pass", "fail", "cannot_tell"]
GATE_EXIT_CODES: Final[Mapping[Result, int]] = {"pass": 0, "fail": 1, "cannot_tell": 2}
WORDS: Final[Mapping[Result, str]] = {"pass": "Pass", "fail": "Fail", "cannot_tell": "Cannot tell"}
SEVERITY: Final[Mapping[Result, str]] = {"pass": "healthy", "fail": "critical", "cannot_tell": "warning"}
SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class TraceLimits:
    """What passes at most; None: no limit."""

    step_ns: int | None = None
    """Length of a step: the pace."""
    idle: float | None = None
    """Share of the steps in which the device does nothing for them; 0 to 1."""
    comm: float | None = None
    """Share of the steps in which the rank communicates."""
    exposed: float | None = None
    """The same, while it does not compute."""
    memory_bytes: int | None = None
    """Peak of what the allocator handed out on a device."""
    kernels: tuple[tuple[str, int], ...] = ()
    """Name with wildcards, and nanoseconds of a step in kernels of such names."""


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """Of a rank; ``value`` is None if unknown, for the reason in ``why``."""

    value: float | None
    why: str = ""


def gate_trace(job: JobAnalysis, limits: TraceLimits, *, unread: int = 0) -> dict[str, Any]:
    """Check the limits; ``unread``: how many files could not be read."""
    checks = list(_checks(job, limits))
    incomplete = _incomplete(job, unread)
    results = {check["result"] for check in checks}
    result: Result = (
        "fail" if "fail" in results else "cannot_tell" if "cannot_tell" in results or incomplete else "pass"
    )
    exceeded = [check for check in checks if check["result"] == result] or checks
    text = exceeded[0]["text"] if result != "cannot_tell" or not incomplete else incomplete
    return {
        "schema": SCHEMA,
        "kind": "trace_gate",
        "result": result,
        "exit_code": GATE_EXIT_CODES[result],
        "text": text,
        "checks": checks,
        "verdict": job.verdict,
        "ranks": [analysis.rank for analysis in job.ranks],
        "steps": max((len(analysis.steps) for analysis in job.ranks), default=0),
        "notices": [*([job.mixed] if job.mixed else []), *job.notices],
    }


def _incomplete(job: JobAnalysis, unread: int) -> str:
    if job.mixed:
        return job.mixed
    if unread:
        return f"{count_text(unread, 'file')} could not be read; all limits hold for the other ranks."
    return ""


def _checks(job: JobAnalysis, limits: TraceLimits) -> Iterable[dict[str, Any]]:
    plain: list[tuple[str, float | None, Callable[[RankAnalysis], _Figure], Callable[[float], str], str]] = [
        ("step", limits.step_ns, _step, ns_text, "a step takes {value}"),
        ("idle", limits.idle, _idle, share_text, "the device is idle for {value} of the steps"),
        ("comm", limits.comm, _comm, share_text, "communication takes {value} of the steps"),
        (
            "exposed",
            limits.exposed,
            _exposed,
            share_text,
            "communication that nothing hides takes {value} of the steps",
        ),
        ("memory", limits.memory_bytes, _memory, bytes_text, "the peak of device memory is {value}"),
    ]
    for name, limit, figure, shown, sentence in plain:
        if limit is not None:
            yield _check(job, name, None, limit, figure, shown, sentence)
    for kernel, limit_ns in limits.kernels:
        sentence = f"kernels {kernel} take {{value}} of a step"
        yield _check(job, "kernel", kernel, limit_ns, _kernels_named(kernel), ns_text, sentence)


def _check(
    job: JobAnalysis,
    name: str,
    kernel: str | None,
    limit: float,
    figure: Callable[[RankAnalysis], _Figure],
    shown: Callable[[float], str],
    sentence: str,
) -> dict[str, Any]:
    found = [(analysis.rank, figure(analysis)) for analysis in job.ranks]
    known = [(each.value, -rank) for rank, each in found if each.value is not None]
    unknown = [(rank, each) for rank, each in found if each.value is None]
    value, rank = max(known, default=(None, 0))
    result: Result = "cannot_tell"
    if value is not None and value > limit:
        result = "fail"
    elif not unknown and known:
        result = "pass"
    if value is None or (unknown and result != "fail"):
        why = unknown[0][1].why if unknown else "the traces have no ranks"
        whose = f" (rank {unknown[0][0]})" if len(found) > 1 and unknown else ""
        text = f"{why}{whose}."
    else:
        where = f"on rank {-rank} " if len(found) > 1 else ""
        compared = "above" if result == "fail" else "within"
        text = f"{where}{sentence.format(value=shown(value))}, {compared} the limit of {shown(limit)}."
    return {
        "name": name,
        "kernel": kernel,
        "result": result,
        "limit": limit,
        "value": value,
        "rank": -rank if value is not None else None,
        "text": text[:1].upper() + text[1:],
    }


# -- figures ----------------------------------------------------------------------------------------------------------

NO_STEPS: Final = "the trace has no profiler steps: call prof.step() after each"
NO_DEVICE: Final = "the trace has no work on a device"


def _marked(analysis: RankAnalysis) -> bool:
    return any(step.name for step in analysis.steps)


def _step(analysis: RankAnalysis) -> _Figure:
    return _Figure(value=analysis.pace.step_ns) if _marked(analysis) else _Figure(value=None, why=NO_STEPS)


def _idle(analysis: RankAnalysis) -> _Figure:
    work, total_ns = analysis.pace.work, analysis.pace.total_ns
    if not work.span_ns or not total_ns:
        return _Figure(value=None, why=NO_DEVICE)
    return _Figure(value=max(0.0, 1 - (work.span_ns - work.idle_ns) / total_ns))


def _comm(analysis: RankAnalysis) -> _Figure:
    return _communication(analysis, exposed=False)


def _exposed(analysis: RankAnalysis) -> _Figure:
    return _communication(analysis, exposed=True)


def _communication(analysis: RankAnalysis, *, exposed: bool) -> _Figure:
    host = analysis.exchanges.host
    if host is None:
        work, whole_ns = analysis.pace.work, analysis.pace.total_ns
        time_ns = work.exposed_comm_ns if exposed else work.comm_ns
    else:
        whole_ns = host.span_ns
        time_ns = host.comm_ns - host.overlap_ns if exposed else host.comm_ns
    return _Figure(value=time_ns / whole_ns) if whole_ns else _Figure(value=None, why="the trace has no steps")


def _memory(analysis: RankAnalysis) -> _Figure:
    peak = analysis.host.peak_allocated_bytes
    unrecorded = "the trace has no peak of device memory: record it with profile_memory=True"
    return _Figure(value=peak, why=unrecorded if analysis.pace.work.span_ns else NO_DEVICE)


def _kernels_named(pattern: str) -> Callable[[RankAnalysis], _Figure]:
    def figure(analysis: RankAnalysis) -> _Figure:
        if not _marked(analysis):
            return _Figure(value=None, why=NO_STEPS)
        table = analysis.tables.get("kernels")
        rows = [row for row in table.to_rows() if fnmatchcase(row["name"], pattern)] if table else []
        if not rows:
            left_out = " among the longest" if table is not None and table.left_out else ""
            return _Figure(value=None, why=f"no kernel{left_out} is named {pattern}")
        return _Figure(value=sum(row["total_ns"] for row in rows) // max(len(analysis.steps), 1))

    return figure


# -- text -------------------------------------------------------------------------------------------------------------


def render_gate(document: Mapping[str, Any], *, width: int = 80, color: bool = False) -> str:
    page = Page(max(width, NARROWEST), color)
    page.marked(SEVERITY[document["result"]], f"{WORDS[document['result']]}: {printable(document['text'])}", bold=True)
    for check in document["checks"]:
        page.labeled(check["name"], [f"{WORDS[check['result']].lower()}: {printable(check['text'])}"])
    page.labeled("based on", [_basis(document)])
    page.labeled("verdict", [printable(document["verdict"])])
    for notice in document["notices"]:
        page.labeled("note", [printable(notice)])
    return "\n".join(page.lines).rstrip() + "\n"


def _basis(document: Mapping[str, Any]) -> str:
    return f"{count_text(len(document['ranks']), 'rank')}, {count_text(document['steps'], 'step')}"


def render_gate_markdown(document: Mapping[str, Any]) -> str:
    """Render Markdown for a pull request; text of the traces is escaped."""
    result = document["result"]
    lines = [f"### {MARKS[SEVERITY[result]]} {WORDS[result]}: {_escaped(document['text'])}", ""]
    lines += ["| limit | result | |", "|---|---|---|"]
    lines += [
        f"| {check['name']} | {WORDS[check['result']].lower()} | {_escaped(check['text'])} |"
        for check in document["checks"]
    ]
    lines += ["", f"Based on {_basis(document)}. {_escaped(document['verdict'])}", ""]
    lines += [f"- {_escaped(notice)}" for notice in document["notices"]]
    return "\n".join(lines).rstrip() + "\n"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: names come from files of others."""
    plain = " ".join(printable(text).split())
    for letter in "\\`*_[]|#":
        plain = plain.replace(letter, f"\\{letter}")
    return plain.replace("<", "&lt;").replace(">", "&gt;")

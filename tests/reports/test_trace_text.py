"""Trace analyses as text: whole pages against golden files, and what holds for any of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.traces import MadeTrace

from stepscope.records.finding import Finding
from stepscope.records.text import ns_text
from stepscope.reports.trace import document_of, render_trace
from stepscope.traces.findings import analyze_job
from stepscope.traces.rank_analysis import analyze_rank

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(("ranks", "width"), [(1, 80), (8, 80), (8, 120), (40, 80)])
def test_pages(ranks: int, width: int, trace_job: Callable[..., Any], golden: Callable[[Path, str], None]) -> None:
    text = render_trace(document_of(trace_job(ranks=ranks)), width=width)
    golden(GOLDEN / f"trace_{ranks}_ranks_{width}.txt", text)


@pytest.mark.few(5)
@pytest.mark.parametrize("width", [20, 60, 80, 100, 120])
@pytest.mark.parametrize("ranks", [1, 3, 200])
def test_fits(ranks: int, width: int, trace_job: Callable[..., Any]) -> None:
    text = render_trace(document_of(trace_job(ranks=ranks)), width=width)
    assert max(map(len, text.splitlines())) <= max(width, 60)
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text.count("\n") < 120, "whatever the number of ranks"


def test_nothing_of_a_trace_reaches_the_terminal(trace_job: Callable[..., Any]) -> None:
    text = render_trace(document_of(trace_job(ranks=2)), top=100)
    assert all(c.isprintable() or c == "\n" for c in text)
    colored = render_trace(document_of(trace_job(ranks=2)), color=True)
    assert colored.count("\x1b[31m") == 1, "the mark's, not the evil name's"


def test_more_rows(trace_job: Callable[..., Any]) -> None:
    short, long = (render_trace(document_of(trace_job()), top=top) for top in (1, 3))
    assert "… and 3 more" in short
    assert "ncclDevKernel_AllReduce" not in short
    assert "… and 1 more" in long
    assert "ncclDevKernel_AllReduce" in long


def test_healthy(trace_job: Callable[..., Any]) -> None:
    job = trace_job()
    job.findings, job.verdict = (), "Nothing stands out: 6 steps of 19.0 ms."
    assert render_trace(document_of(job)).splitlines()[0] == "✔ Nothing stands out: 6 steps of 19.0 ms."
    job.findings = (Finding(kind="truncated", severity="info", title="One file ends early."),)
    assert render_trace(document_of(job)).splitlines()[:4] == [
        "✔ Nothing stands out: 6 steps of 19.0 ms.",
        "",
        "Also found",
        "● One file ends early.",
    ]


def test_a_green_mark_needs_something_to_judge_by() -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 100)
    text = render_trace(document_of(analyze_job([analyze_rank(made.trace(), 0)])))
    assert text.splitlines()[0] == "● Too little data: 100 µs without profiler steps, all of it on the host."
    assert "1 rank · 1 event · " in text
    text = render_trace(document_of(analyze_job([analyze_rank(MadeTrace().trace(), 0)])))
    assert text.splitlines()[0] == "● The trace contains nothing to analyze."


def test_without_a_device_nothing_is_said_of_one() -> None:
    made = MadeTrace()
    for step in range(4):
        made.step(step, step * 20_000, 20_000)
        made.op("aten::mm", step * 20_000, 19_500)
    text = render_trace(document_of(analyze_job([analyze_rank(made.trace(), 0)])))
    assert "Device time by step" not in text
    assert [line for line in text.splitlines() if line.startswith("  operator ")] == [
        "  operator  calls  host self  host total"
    ]
    assert "3 steps (0–2; 3 is left out)" in text


def test_times_of_ranks_are_per_step(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job(ranks=2))
    work, steps = document["ranks"]["0"]["pace"]["work"], len(document["ranks"]["0"]["steps"])
    text = render_trace(document)
    assert "Ranks, per step" in text
    heads, first = text.splitlines()[text.splitlines().index("Ranks, per step") + 1 :][:2]
    assert heads.split()[:4] == ["rank", "pace", "compute", "comm"]
    assert f" {ns_text(work['compute_ns'] // steps)}  " in first
    assert f" {ns_text(work['comm_ns'] // steps)}  " in first

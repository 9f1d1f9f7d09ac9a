"""Captures joined to findings: the operator in the finding that it explains, and nothing in any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import Cluster, slow_at

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.captures import OF_ALL_RANKS, ONLY_IN_TRACES
from stepscope.diagnosis.hysteresis import evaluate
from stepscope.records.capture import CaptureOrder, CaptureRecord, Difference
from stepscope.records.finding import Finding
from stepscope.records.series import RunData
from stepscope.reports.finding_text import IN_CAPTURES
from stepscope.traces.rulebook import RULES

SLOW = Cluster(ranks=4, steps=100, faults=(slow_at(2, "backward", 30.0),)).run()
MM = Difference(
    what="operator",
    name="aten::mm",
    rank=2,
    peer=0,
    extra_ns=30_100_000,
    phase="backward",
    line="train.py:64",
    text="Rank 2 spends 30.1 ms more per step than rank 0 in aten::mm in backward, from train.py:64 (backward).",
)


def captured(run: RunData, *differences: Difference, at: int = 40, after_ns: int = 1, **about: Any) -> CaptureRecord:
    """A finished capture of six steps, requested so long after the run began."""
    values: dict[str, Any] = {"state": "done", "reason": "finding", "figures": {"steps": [at, at + 5]}, **about}
    order = CaptureOrder(id=f"step-{at}", ranks=(0, 2), at_step=at)
    began_ns = min(series.anchor_wall_ns for series in run.ranks)
    return CaptureRecord(order=order, requested_wall_ns=began_ns + after_ns, differences=differences, **values)


def found(run: RunData, *captures: CaptureRecord) -> list[Finding]:
    return diagnose(replace(run, captures=captures))


def test_the_finding_names_the_operator() -> None:
    (without, *_), (finding, *others) = found(SLOW), found(SLOW, captured(SLOW, MM))
    assert (
        without.title == "Rank 2 is 29.7 ms slower than its peers in backward every step; all other ranks wait for it."
    )
    assert finding.title == (
        "Rank 2 is 29.7 ms slower than its peers in backward (aten::mm, train.py:64) every step; "
        "all other ranks wait for it."
    )
    assert finding.advice == (f"In the capture of steps 40 to 45: {MM.text}", *without.advice)
    assert finding.evidence["capture"] == {
        "id": "step-40",
        "steps": [40, 45],
        "what": "operator",
        "name": "aten::mm",
        "rank": 2,
        "peer": 0,
        "extra_ms": 30.1,
        "line": "train.py:64",
        "text": MM.text,
    }
    same = ("kind", "severity", "ranks", "phase", "steps", "cost", "confidence")
    assert all(getattr(finding, name) == getattr(without, name) for name in same)
    assert others == []


def test_the_finding_names_the_layer() -> None:
    finding = found(SLOW, captured(SLOW, replace(MM, layer="Linear_5")))[0]
    assert " in backward (aten::mm of Linear_5, train.py:64) every step" in finding.title
    assert finding.evidence["capture"]["layer"] == "Linear_5"


def test_the_newest_capture_that_fits_counts() -> None:
    other = replace(MM, rank=3, text="another rank")
    newer = replace(MM, name="aten::addmm", line="model.py:7")
    captures = (
        captured(SLOW, MM, at=10, after_ns=1),
        captured(SLOW, newer, at=20, after_ns=2),
        captured(SLOW, other, at=30, after_ns=3),
        captured(SLOW, MM, at=50, after_ns=4, state="failed"),
        captured(SLOW, MM, at=60, after_ns=-1),
    )
    assert "(aten::addmm, model.py:7)" in found(SLOW, *captures)[0].title


@pytest.mark.parametrize(
    "difference",
    [
        replace(MM, rank=1),
        replace(MM, phase="forward"),
        replace(MM, what="wait"),
    ],
)
def test_a_capture_that_shows_something_else_changes_nothing(difference: Difference) -> None:
    assert found(SLOW, captured(SLOW, difference)) == found(SLOW)


def test_without_labels_the_phase_is_the_rules() -> None:
    finding = found(SLOW, captured(SLOW, replace(MM, phase="", line="")))[0]
    assert " in backward (aten::mm) every step" in finding.title


def test_no_single_operator_leaves_the_title_alone() -> None:
    spread = replace(MM, what="phase", name="backward", line="", text="Rank 2 spends 30 ms more, everywhere.")
    (without, *_), (finding, *_) = found(SLOW), found(SLOW, captured(SLOW, spread))
    assert finding.title == without.title
    assert finding.advice[0] == "In the capture of steps 40 to 45: Rank 2 spends 30 ms more, everywhere."


# -- findings of the traces -------------------------------------------------------------------------------------------

FLOAT32 = {
    "kind": "fp32_matmul",
    "severity": "warning",
    "title": "Matrix products run in float32.",
    "ranks": [],
    "share": 0.4,
    "advice": ["Allow TF32."],
}


def test_what_no_rule_on_runs_has_joins_as_information() -> None:
    rows = (
        FLOAT32,
        {**FLOAT32, "kind": "collective_straggler"},
        {**FLOAT32, "kind": "x"},
        {**FLOAT32, "severity": "info"},
    )
    first, joined = found(SLOW, captured(SLOW, MM, findings=rows))
    assert first.kind == "compute_straggler"
    assert joined == Finding(
        kind="fp32_matmul",
        severity="info",
        title="In the capture of steps 40 to 45: Matrix products run in float32.",
        steps=(40, 45),
        evidence={"source": "capture", "capture": {"id": "step-40", "steps": [40, 45]}},
        advice=("Allow TF32.",),
    )


def test_a_bound_is_explained_by_the_traces_finding() -> None:
    run = Cluster(ranks=4, steps=100, faults=tuple(slow_at(rank, "input", 60.0) for rank in range(4))).run()
    row = {**FLOAT32, "kind": "loader_bound", "title": "The DataLoader takes 60.0 ms of each step."}
    finding = next(each for each in found(run, captured(run, findings=(row,))) if each.kind == "input_bound")
    assert finding.evidence["capture"] == {
        "id": "step-40",
        "steps": [40, 45],
        "kind": "loader_bound",
        "text": "The DataLoader takes 60.0 ms of each step.",
    }
    assert finding.advice[:2] == (
        "In the capture of steps 40 to 45: The DataLoader takes 60.0 ms of each step.",
        "Allow TF32.",
    )


def test_a_change_is_explained_by_the_comparison_with_the_baseline() -> None:
    faults = tuple(slow_at(rank, "backward", 40.0, range(60, 200)) for rank in range(4))
    run = Cluster(ranks=4, steps=200, faults=faults).run()
    since = replace(MM, peer=2, text="Rank 2 spends 30.1 ms more per step in aten::mm than in the baseline.")
    (before,) = (each for each in found(run) if each.kind == "change_point")
    (change,) = (each for each in found(run, captured(run, changes=(since,))) if each.kind == "change_point")
    assert change.evidence["capture"]["text"] == since.text
    assert change.advice == (f"In the capture of steps 40 to 45: {since.text}", *before.advice)
    assert change.title == before.title.replace("in backward", "in backward (aten::mm, train.py:64)")
    # It does not say which rank is slow.
    (straggler, *_) = found(SLOW, captured(SLOW, changes=(since,)))
    assert "capture" not in straggler.evidence


@pytest.mark.parametrize(
    ("step_ms", "usual_ms", "joins"),
    [(40.0, 39.0, True), (60.0, 39.0, False), (None, 39.0, False), (40.0, None, False)],
)
def test_a_slow_host_is_believed_only_if_the_profiler_hardly_slowed_it(
    step_ms: float | None, usual_ms: float | None, joins: bool
) -> None:
    row = {**FLOAT32, "kind": "launch_bound"}
    figures = {"steps": [40, 45], "step_ms": step_ms, "usual_step_ms": usual_ms}
    kinds = [finding.kind for finding in found(SLOW, captured(SLOW, findings=(row,), figures=figures))]
    assert ("launch_bound" in kinds) == joins


def test_hostile_records_are_only_data() -> None:
    rows = ({}, {"kind": 3, "title": None, "ranks": "x"}, {**FLOAT32, "ranks": ["a", 1], "advice": 7})
    record = captured(SLOW, replace(MM, name="(" * 200, line=")"), findings=rows, figures={"steps": ["x", 1e999]})
    first, joined = found(SLOW, record)
    assert first.kind == "compute_straggler"
    assert (joined.ranks, joined.advice, joined.steps) == ((1,), (), None)


def test_each_joined_kind_exists_and_has_a_name() -> None:
    kinds = {kind for rule in RULES for kind in rule.kinds}
    assert set(IN_CAPTURES) == ONLY_IN_TRACES <= kinds
    assert {kind for explaining in OF_ALL_RANKS.values() for kind in explaining} <= kinds


# -- while the job runs -----------------------------------------------------------------------------------------------


def test_a_capture_neither_shows_nor_withdraws_a_finding() -> None:
    watched, _ = evaluate(SLOW)
    longer = Cluster(ranks=4, steps=140, faults=(slow_at(2, "backward", 30.0),)).run()
    watched, changes = evaluate(longer, watched)
    assert [change.what for change in changes] == ["shown"]
    later = Cluster(ranks=4, steps=180, faults=(slow_at(2, "backward", 30.0),)).run()
    watched, changes = evaluate(replace(later, captures=(captured(later, MM),)), watched)
    assert changes == ()
    (entry,) = watched
    assert (entry.shown, "aten::mm" in entry.finding.title) == (True, True)

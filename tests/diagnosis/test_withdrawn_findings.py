"""What was shown as critical in most of a run is in its summary, or the summary says why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import Cluster, Fault, slow_at
from fakes.samples import with_samples

from stepscope.records.series import RunData
from stepscope.reports import render_text, summarize

SLOW = slow_at(1, "forward", 30.0)


def event(what: str, step: int, *, ranks: tuple[int, ...] = (1,), kind: str = "compute_straggler") -> dict[str, Any]:
    return {
        "event": what,
        "step": step,
        "attempt": 0,
        "kind": kind,
        "ranks": list(ranks),
        "phase": "forward",
        "severity": "critical",
        "title": "Rank 1 is 30.0 ms slower than its peers in forward every step; the other rank waits for it.",
    }


def recorded(*events: dict[str, Any], faults: tuple[Fault, ...] = (), run: RunData | None = None) -> dict[str, Any]:
    run = Cluster(ranks=2, steps=100, faults=faults).run() if run is None else run
    return summarize(replace(run, events=(*run.events, *events)))


def reasons(summary: dict[str, Any]) -> list[str]:
    return [each["reason"] for each in summary["withdrawn"]]


def test_what_is_found_in_the_end_is_not_withdrawn() -> None:
    summary = recorded(event("finding_opened", 12), faults=(SLOW,))
    assert summary["findings"][0]["kind"] == "compute_straggler"
    assert summary["withdrawn"] == []


def test_what_was_critical_to_the_end_and_is_not_found_is_explained() -> None:
    summary = recorded(event("finding_opened", 12))
    (withdrawn,) = summary["withdrawn"]
    text = (
        "Withdrawn: Rank 1 is 30.0 ms slower than its peers in forward every step; the other rank waits for it (shown "
        "as critical in steps 12 to 99 while the run was active), because over the whole run it cannot be "
        "distinguished from chance."
    )
    assert withdrawn == {
        "kind": "compute_straggler",
        "ranks": [1],
        "phase": "forward",
        "title": event("", 0)["title"],
        "steps": [12, 99],
        "shown_steps": 88,
        "reason": "over the whole run it cannot be distinguished from chance",
        "text": text,
    }
    assert summary["notices"][0] == text
    assert "Withdrawn: Rank 1 is 30.0 ms slower" in " ".join(render_text(summary, width=80).split())


def test_what_was_shown_for_less_than_half_of_the_run_is_not_missed() -> None:
    assert reasons(recorded(event("finding_opened", 12), event("finding_resolved", 50))) == []


def test_stretches_add_up() -> None:
    events = [event("finding_opened", 10), event("finding_changed", 40), event("finding_opened", 50)]
    summary = recorded(*events, event("finding_resolved", 75))
    assert (summary["withdrawn"][0]["steps"], summary["withdrawn"][0]["shown_steps"]) == ([10, 75], 55)
    assert reasons(summary) == ["it was over after step 75 and does not show in the run as a whole"]


def test_the_reason_is_another_cause_of_the_same_rank() -> None:
    summary = recorded(event("finding_opened", 12, kind="input_straggler"), faults=(SLOW,))
    title = summary["findings"][0]["title"].rstrip(".")
    assert reasons(summary) == [f"the whole run shows another cause: {title}"]


def test_the_reason_is_that_it_costs_too_little() -> None:
    faults = (slow_at(1, "forward", 1.5),)
    assert reasons(recorded(event("finding_opened", 12), faults=faults)) == [
        "over the whole run it costs 4% of the training time, too little to warn of"
    ]


def test_the_reason_is_a_busy_machine() -> None:
    cluster = Cluster(ranks=2, steps=200, phases_ms={"forward": 100.0})
    busy = {"cpu_percent": 100.0, "own_cpu_percent": 50.0, "cpu_count": 2, "procs_running": 5}
    summary = recorded(event("finding_opened", 12), run=with_samples(cluster, host=busy))
    assert reasons(summary) == [
        "over the whole run it is not certain, and other processes use 1.00 of 2 cores; the job competes for them"
    ]


@pytest.mark.parametrize("broken", [{"step": None}, {"ranks": "1"}, {"ranks": [None]}, {"attempt": 3}])
def test_events_that_cannot_be_read_or_are_of_another_attempt_are_passed_over(broken: dict[str, Any]) -> None:
    assert recorded(event("finding_opened", 12) | broken)["withdrawn"] == []


def test_a_run_that_is_still_active_withdraws_nothing() -> None:
    run = Cluster(ranks=2, steps=100).run()
    run = replace(run, events=(*run.events, event("finding_opened", 12)))
    assert summarize(run, alive=True, status="running")["withdrawn"] == []

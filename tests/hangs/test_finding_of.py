"""A hang as a finding, and what is advised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hang_jobs import LOOP, SCRIPT, Job, stack, worker

from stepscope.hangs.report import finding_of, past_if_over, stalled_s
from stepscope.records.collectives import ProcessGroup
from stepscope.records.hang import HangKind, HangRecord

SECOND_NS = 10**9


def test_all_of_it() -> None:
    finding = finding_of(Job(ranks=4, sequence=7).alone(1, phase="other").hang())
    assert finding.to_dict() == {
        "kind": "hang_missing_collective",
        "severity": "critical",
        "title": (
            "Rank 1 never called all_reduce number 7 of default_pg: it sleeps at train.py:41 (time.sleep(999)); "
            "ranks 0, 2 and 3 wait for it."
        ),
        "ranks": [1],
        "phase": "other",
        "steps": [7, 7],
        "cost": {"share": 0.0, "seconds": 12.0, "rank_hours": 0.0133, "if_fixed": None},
        "evidence": {
            "number": 1,
            "host": "node0",
            "hosts": [],
            "culprits": [
                {
                    "rank": 1,
                    "reason": (
                        "has not called all_reduce number 7 of default_pg; it sleeps at train.py:41 (time.sleep(999))"
                    ),
                    "file": SCRIPT,
                    "line": 41,
                    "function": "next_batch",
                }
            ],
            "victims": [0, 2, 3],
            "undecidable": False,
            "group": "default_pg",
            "sequence": 7,
            "op": "all_reduce",
            "sizes": "[512]",
            "cycle": [],
            "stopped_wall_ns": 100 * SECOND_NS,
            "stood_s": 12.0,
            "threshold_s": 10.0,
            "over": None,
            "action": None,
            "told_by": ["Rank 1 has been silent for 11 s and uses 0% of a core."],
        },
        "advice": [
            "Begin at train.py:41 in next_batch.",
            "Rank 1 does not get to the call: find out what that line waits for.",
            "What failed before is often in its log, and who should wake it in the stacks of its other threads.",
        ],
        "confidence": 0.95,
    }


def test_one_that_came_back_is_a_stall() -> None:
    record = replace(Job().alone(1).hang(), over="recovered", over_wall_ns=114 * SECOND_NS)
    finding = finding_of(record)
    assert (finding.kind, finding.severity) == ("stall", "warning")
    assert finding.title == (
        "The job hung for 14 s and recovered. Rank 1 had not called all_reduce of default_pg: it slept at "
        "train.py:41 (time.sleep(999)); ranks 0, 2 and 3 waited for it."
    )
    assert finding.advice[0] == "Begin at train.py:41 in next_batch."
    assert stalled_s(record) == 14.0


@pytest.mark.parametrize(
    ("fields", "does", "last"),
    [
        ({}, "sleeps", "; no progress for more than 12 s."),
        ({"over": "ended", "over_wall_ns": 403 * SECOND_NS}, "slept", "; no progress for 5 min 3 s."),
        ({"over": "aborted", "over_wall_ns": 130 * SECOND_NS}, "slept", "; no progress for 30 s."),
    ],
)
def test_where_nobody_waits_the_time_is_told_as_it_was_measured(fields: dict[str, Any], does: str, last: str) -> None:
    record = Job(ranks=1).alone(0).hang()
    assert finding_of(replace(record, **fields)).title == f"The process {does} at train.py:41 (time.sleep(999)){last}"
    waited_for = replace(Job().alone(1).hang(), **fields)
    assert finding_of(waited_for).title == past_if_over(waited_for).title  # whose wait says enough


def test_of_one_that_goes_on_no_more_is_said_than_was_seen() -> None:
    record = replace(Job(ranks=1).alone(0).hang(), declared_wall_ns=111_900_000_000)
    assert finding_of(record).title.endswith("; no progress for more than 11 s.")


@pytest.mark.parametrize("over", ("ended", "aborted"))
def test_one_that_was_ended_stays_a_hang(over: str) -> None:
    record = HangRecord.from_dict({**Job().alone(1).hang().to_dict(), "over": over, "over_wall_ns": 200 * SECOND_NS})
    finding = finding_of(record)
    assert (finding.kind, finding.severity, finding.evidence["stood_s"]) == (
        "hang_missing_collective",
        "critical",
        100.0,
    )


def test_who_cannot_be_told_is_not_named() -> None:
    finding = finding_of(Job().hang())
    assert (finding.ranks, finding.phase, finding.confidence) == ((), None, 0.6)


@pytest.mark.parametrize("kind", get_args(HangKind))
def test_every_kind_has_advice(kind: HangKind) -> None:
    record = replace(Job(lines={}).alone(1, process_state="T").hang(), kind=kind)
    assert finding_of(record).advice[-1].endswith(".")
    assert len(finding_of(record).advice) >= 2


IN_LOADER = stack(("torch/utils/data/dataloader.py", 1275, "_try_get_data"), ("train.py", 30, "epoch"), LOOP)

FETCHING = ("torch/utils/data/_utils/fetch.py", 52, "fetch")
ITS_OWN_LOADER = stack(
    ("shards.py", 8, "__getitem__"), FETCHING, ("torch/utils/data/dataloader.py", 788, "_next_data"), LOOP
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"process_state": "T"}, "kill -CONT 1001 resumes it"),
        ({"gil_held": True}, "never releases the GIL"),
        ({"process_state": "D"}, "The disk or network file system does not answer"),
        ({"threads": IN_LOADER, "workers": (worker(process_state="T"),)}, "The worker process was stopped"),
        ({"threads": IN_LOADER, "workers": ()}, "A worker that died silently"),
        ({"threads": IN_LOADER, "workers": (worker(),)}, "DataLoader(timeout=…)"),
        ({"threads": ITS_OWN_LOADER, "workers": ()}, "DataLoader(num_workers=1, timeout=…)"),
    ],
)
def test_advice_is_about_what_was_found(fields: dict[str, object], words: str) -> None:
    hang = Job(ranks=2).alone(1).at(1, **fields).at(1, threads_later=()).hang()
    assert any(words in advice for advice in finding_of(hang).advice)


@pytest.mark.parametrize(
    ("steps", "begins"),
    [
        (
            (60, 61),
            (
                "Rank 1 continued to step 61 without all_reduce number 7 of group 1, in which rank 0 waits in step 60, "
                "at train.py:59: look for a branch that only some ranks take."
            ),
        ),
        ((60, 60), "Begin at train.py:59 in step."),
        ((60, None), "Begin at train.py:59 in step."),
    ],
)
def test_a_call_that_a_rank_went_past_is_told_from_groups_in_another_order(
    steps: tuple[int | None, ...], begins: str
) -> None:
    job = Job(ranks=2)
    own = ProcessGroup(slot=1, name="1", description="undefined", size=2, ranks=(0, 1))
    for rank, group in enumerate((own, None)):
        job.at(rank, step=steps[rank], collective=job.waits(group=group))
    of_world = {"waiters": [1], "waited": [0], "group": "0", "description": "default_pg", "sequence": 67}
    of_own = {"waiters": [0], "waited": [1], "group": "1", "description": "undefined", "sequence": 7}
    hang = replace(job.hang(), flight={"wait_for": [{**row, "op": "all_reduce"} for row in (of_world, of_own)]})
    assert (hang.kind, finding_of(hang).advice[0]) == ("hang_deadlock", begins)

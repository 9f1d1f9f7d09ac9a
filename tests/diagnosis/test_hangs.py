"""Hangs among the other findings: what leads, what follows, what is told once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death, slow_at
from hang_jobs import Job

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.hysteresis import evaluate
from stepscope.records.finding import Finding
from stepscope.records.hang import HangRecord
from stepscope.records.series import RankError, RunData

SECOND_NS = 10**9
TIMEOUT = "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"


def at(seconds: float) -> int:
    return ANCHOR_WALL_NS + round(seconds * SECOND_NS)


def hang(step: int = 60, *, job: Job | None = None, over: str | None = None, **fields: Any) -> HangRecord:
    """Rank 1 sleeps in a job of four; it stopped at second 20 and was declared 12 s later."""
    job = job or Job(ranks=4, sequence=7).alone(1)
    for rank in range(4):
        job.at(rank, step=step)
    fields = {"declared_wall_ns": at(32), "stopped_wall_ns": at(20), **fields}
    if over is not None:
        fields |= {"over": over, "over_wall_ns": at(40)}
    return replace(job.hang(), **fields)


def findings_with(run: RunData, *hangs: HangRecord) -> list[Finding]:
    return diagnose(replace(run, hangs=hangs))


def died(rank: int, type_name: str, message: str, seconds: float) -> RankError:
    return RankError(rank=rank, pid=1000 + rank, type=type_name, message=message, wall_ns=at(seconds))


def test_a_hang_that_goes_on_leads_all_else() -> None:
    run = Cluster(ranks=4, steps=60, faults=(slow_at(2, "forward", 30.0),)).run()
    findings = findings_with(run, hang())
    assert [finding.kind for finding in findings] == ["hang_missing_collective", "compute_straggler"]
    assert findings[0].severity == "critical"
    assert findings[0].ranks == (1,)


def test_no_steps_at_all_is_no_reason_to_ask_for_more() -> None:
    assert [finding.kind for finding in findings_with(Cluster(ranks=4, steps=0).run(), hang(0))] == [
        "hang_missing_collective"
    ]


def test_how_an_aborted_job_died_is_no_finding() -> None:
    run = Cluster(ranks=4, steps=60, deaths=tuple(Death(rank=rank, step=60) for rank in range(4))).run()
    assert "rank_crashed" in [finding.kind for finding in findings_with(run, hang(over="ended", stopped_wall_ns=at(0)))]
    assert [finding.kind for finding in findings_with(run, hang(over="aborted", stopped_wall_ns=at(0)))] == [
        "hang_missing_collective"
    ]


def test_a_hang_is_shown_at_once() -> None:
    run = replace(Cluster(ranks=4, steps=60).run(), hangs=(hang(),))
    assert [(change.what, change.finding.kind) for change in evaluate(run)[1]] == [("shown", "hang_missing_collective")]


@pytest.mark.parametrize("code", (-15, -9, -6))
def test_a_job_that_was_then_killed_is_told_as_a_hang(code: int) -> None:
    cluster = Cluster(
        ranks=4,
        steps=60,
        deaths=tuple(Death(rank=rank, step=60) for rank in range(4)),
        errors=(
            RankError(
                rank=None,
                pid=99,
                type="SignalException",
                message="",
                wall_ns=at(50),
                exit_codes=dict.fromkeys(range(4), code),
            ),
        ),
    )
    run = cluster.run()
    run = replace(run, ranks=tuple(replace(series, ended_wall_ns=at(50)) for series in run.ranks))
    findings = findings_with(run, hang(over="ended"))
    assert findings[0].kind == "hang_missing_collective"
    assert all(finding.severity == "info" for finding in findings if finding.kind == "rank_crashed")


def test_a_timeout_that_ended_the_victims_follows() -> None:
    cluster = Cluster(
        ranks=4,
        steps=60,
        deaths=tuple(Death(rank=rank, step=60, state="exception") for rank in (0, 2, 3)),
        errors=tuple(died(rank, "RuntimeError", TIMEOUT, 1820.0) for rank in (0, 2, 3)),
    )
    findings = findings_with(cluster.run(), hang(over="ended"))
    assert [(finding.kind, finding.severity) for finding in findings[:2]] == [
        ("hang_missing_collective", "critical"),
        ("rank_crashed", "info"),
    ]


def test_a_crash_that_came_before_leads() -> None:
    cluster = Cluster(
        ranks=4,
        steps=60,
        deaths=(Death(rank=2, step=55, state="exception"),),
        errors=(died(2, "ValueError", "bad label", 15.0),),
    )
    findings = findings_with(cluster.run(), hang())
    assert [finding.kind for finding in findings[:2]] == ["rank_crashed", "hang_missing_collective"]


def test_a_rank_that_is_gone_is_told_once_by_who_knows_more() -> None:
    gone = hang(job=Job(ranks=4).alone(1, (), alive=False, ended="raised ValueError: bad label"))
    cluster = Cluster(
        ranks=4,
        steps=60,
        deaths=(Death(rank=1, step=60, state="exception"),),
        errors=(died(1, "ValueError", "bad label", 19.0),),
    )
    findings = findings_with(cluster.run(), gone)
    assert [finding.kind for finding in findings].count("rank_crashed") == 1
    assert findings[0].evidence["exception"] == "ValueError"


def test_a_rank_that_is_gone_without_another_witness_leads() -> None:
    gone = hang(job=Job(ranks=4).alone(1, (), alive=False))
    findings = findings_with(Cluster(ranks=4, steps=60).run(), gone)
    assert (findings[0].kind, findings[0].ranks) == ("rank_crashed", (1,))


def stalled() -> RunData:
    """Step 60 takes 14 s longer on rank 1."""
    return Cluster(ranks=4, steps=120, faults=(slow_at(1, "other", 14_000.0, range(60, 61)),)).run()


def test_a_stall_is_told_once_with_its_line_and_its_price() -> None:
    alone = [finding for finding in diagnose(stalled()) if finding.kind == "stall"]
    findings = [finding for finding in findings_with(stalled(), hang(over="recovered")) if finding.kind == "stall"]
    assert len(alone) == len(findings) == 1
    stall = findings[0]
    assert stall.title == (
        "The job hung for 20 s and recovered. Rank 1 had not called all_reduce number 7 of default_pg: it "
        "slept at train.py:41 (time.sleep(999)); ranks 0, 2 and 3 waited for it."
    )
    assert (stall.severity, stall.ranks, stall.steps, stall.cost) == ("warning", (1,), alone[0].steps, alone[0].cost)
    assert stall.evidence["extra_ms"] == alone[0].evidence["extra_ms"]
    assert stall.evidence["hang"]["culprits"][0]["line"] == 41


def test_a_stall_of_other_steps_stays_another() -> None:
    findings = [
        finding for finding in findings_with(stalled(), hang(step=30, over="recovered")) if finding.kind == "stall"
    ]
    assert sorted(finding.steps or () for finding in findings) == [(30, 30), (60, 60)]


def test_a_job_that_ended_well_after_all_did_not_hang() -> None:
    meta = {"end": {"exit_code": 0, "status": "finished", "wall_ns": at(60)}}
    findings = findings_with(Cluster(ranks=4, steps=60, meta=meta).run(), hang(over="ended"))
    assert [(finding.kind, finding.severity) for finding in findings] == [("stall", "warning")]


@pytest.mark.parametrize("over", [None, "ended"])
def test_a_hang_after_which_all_ranks_made_steps_is_a_stall(over: str | None) -> None:
    """The agent that would have noted its end was gone."""
    findings = findings_with(stalled(), hang(over=over))
    assert [found.severity for found in findings if "hang" in found.evidence] == ["warning"]
    assert not any(found.kind.startswith("hang") for found in findings)


def test_a_hang_after_which_one_rank_made_no_step_goes_on() -> None:
    run = stalled()
    ranks = tuple(
        replace(series, steps=series.steps.part(slice(60))) if series.rank == 2 else series for series in run.ranks
    )
    assert findings_with(replace(run, ranks=ranks), hang())[0].kind == "hang_missing_collective"
    assert findings_with(stalled(), hang(over="aborted"))[0].kind == "hang_missing_collective"


def test_what_another_host_saw_from_outside_is_not_told_as_well() -> None:
    outside = replace(hang(job=Job(ranks=4, world_size=8)), host="node1")
    run = Cluster(ranks=4, steps=60).run()
    assert [finding.kind for finding in findings_with(run, outside, hang())] == ["hang_missing_collective"]
    assert [finding.kind for finding in findings_with(run, outside)] == ["rank_lost"]
    later = replace(hang(over="recovered"), host="node0")
    lost = replace(outside, stopped_wall_ns=at(50), declared_wall_ns=at(62))
    assert [finding.kind for finding in findings_with(run, later, lost)] == ["rank_lost", "stall"]


def test_a_hang_of_an_earlier_attempt_is_told_as_one() -> None:
    run = Cluster(ranks=4, steps=60).run()
    ranks = tuple(
        replace(series, anchor_wall_ns=at(100), identity=replace(series.identity, attempt=1)) for series in run.ranks
    )
    findings = findings_with(replace(run, ranks=ranks), hang(over="ended"))
    assert [(finding.kind, finding.severity) for finding in findings] == [("hang_missing_collective", "warning")]
    assert findings[0].title.startswith("In an earlier attempt: Rank 1 never called")

"""While a job runs: shown when it holds, kept while it comes and goes, withdrawn when it is over."""

from __future__ import annotations

from collections.abc import Sequence

from fakes.cluster import Cluster, Death, slow_at
from fakes.cut import cut

from stepscope.diagnosis.hysteresis import Watched, evaluate, follow
from stepscope.records.finding import Finding, Severity


def finding(kind: str = "jitter", severity: Severity = "warning", ranks: tuple[int, ...] = ()) -> Finding:
    return Finding(kind=kind, severity=severity, title=f"{kind}.", ranks=ranks)


def played(*evaluations: tuple[int, Sequence[Finding]]) -> list[tuple[str, int, str]]:
    watched: tuple[Watched, ...] = ()
    shown_changes = []
    for step, findings in evaluations:
        watched, changes = follow(watched, findings, step)
        shown_changes += [(change.what, change.step, change.finding.severity) for change in changes]
    return shown_changes


def test_one_look_shows_nothing_two_do() -> None:
    assert played((10, [finding()])) == []
    assert played((10, [finding()]), (11, [finding()])) == []
    assert played((10, [finding()]), (12, [finding()])) == [("shown", 12, "warning")]
    assert played((10, [finding()]), (12, []), (13, [finding()]), (14, [finding()])) == []


def test_what_comes_and_goes_is_shown_once_and_withdrawn_when_it_stays_away() -> None:
    found = [finding()]
    evaluations = [(10, found), (13, found), (20, []), (30, found), (40, []), (49, []), (50, []), (60, found)]
    assert played(*evaluations) == [("shown", 13, "warning"), ("withdrawn", 50, "warning")]


def test_severity_rises_at_once_and_falls_slowly() -> None:
    mild, bad = [finding(severity="warning")], [finding(severity="critical")]
    evaluations = [(0, mild), (5, mild), (6, bad), (10, mild), (25, mild), (26, mild), (27, bad)]
    assert played(*evaluations) == [("shown", 5, "warning"), ("worse", 6, "critical"), ("worse", 27, "critical")]


def test_a_death_is_shown_at_once_and_health_never() -> None:
    assert played((3, [finding("rank_crashed", "critical")])) == [("shown", 3, "critical")]
    calm = [finding("healthy", "info"), finding("compute_bound", "info"), finding("insufficient_data", "info")]
    assert played((3, calm), (10, calm), (20, calm)) == []


def test_another_rank_is_another_matter() -> None:
    evaluations = [(0, [finding(ranks=(1,))]), (5, [finding(ranks=(1,))]), (6, [finding(ranks=(2,))])]
    assert played(*evaluations) == [("shown", 5, "warning")]


def test_a_rank_that_turns_slow_is_shown_within_ten_steps_and_withdrawn_when_it_recovers() -> None:
    run = Cluster(ranks=4, steps=400, faults=(slow_at(2, "forward", 4.0, range(60, 100)),)).run()
    evaluations = [*range(56, 76), *range(76, 400, 9)]  # it is withdrawn some time later
    watched: tuple[Watched, ...] = ()
    shown_changes = []
    for step in evaluations:
        watched, changes = evaluate(cut(run, step), watched)
        shown_changes += [(change.what, change.finding.kind, change.finding.ranks, change.step) for change in changes]
    (shown, withdrawn) = (change for change in shown_changes if change[1] == "compute_straggler")
    assert shown[:3] == ("shown", "compute_straggler", (2,))
    assert 60 < shown[3] <= 71  # ten steps, and two looks that agree
    assert withdrawn[:3] == ("withdrawn", "compute_straggler", (2,))


def test_a_look_at_next_to_nothing() -> None:
    for cluster in (Cluster(ranks=0, steps=0), Cluster(ranks=2, steps=1), Cluster(ranks=2, steps=0)):
        assert evaluate(cluster.run()) == ((), ())
    watched, changes = evaluate(Cluster(ranks=2, steps=40, deaths=(Death(rank=1, step=20),)).run())
    assert [change.finding.kind for change in changes] == ["rank_crashed"]
    assert watched

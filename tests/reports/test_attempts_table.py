"""The attempts of an elastic job in the summary: who was there, how far it came, how it ended, what followed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from fakes.cluster import Cluster, Death

from stepscope.records.series import RankError, RankSeries, RunData
from stepscope.reports.sections import attempt_items, attempts_table
from stepscope.reports.summary import summarize

S = 10**9


def attempt(number: int, hosts: str, *, at_s: float, **more: Any) -> list[RankSeries]:
    """One rank a host, begun at that second; its processes end when their last step does."""
    found = []
    for series in Cluster(ranks=len(hosts), attempt=number, steps=30, **more).series():
        identity = replace(series.identity, host=hosts[series.rank])
        last_ns = int(series.steps["start_ns"][-1]) + int(series.steps["wall_ns"][-1])
        began_ns = round(at_s * S)
        ended_ns = last_ns - series.anchor_mono_ns + began_ns
        found.append(replace(series, identity=identity, anchor_wall_ns=began_ns, ended_wall_ns=ended_ns))
    return found


def stopped(ranks: list[RankSeries], state: Any = "vanished") -> list[RankSeries]:
    return [replace(series, state=state) for series in ranks]


def run_of(*attempts: list[RankSeries], **more: Any) -> RunData:
    return RunData(name="x", path="runs/x", meta={}, ranks=tuple(rank for ranks in attempts for rank in ranks), **more)


def ends(*attempts: list[RankSeries]) -> list[str | None]:
    return [row["end"] for row in attempts_table(run_of(*attempts))]


def test_one_attempt_is_not_told() -> None:
    assert attempts_table(run_of(attempt(0, "ab", at_s=1))) == []
    assert summarize(run_of(attempt(0, "ab", at_s=1)))["attempts"] == []


def test_all_that_is_known_of_an_attempt() -> None:
    death = Death(rank=1, step=20, state="exception")
    first, second = attempts_table(run_of(attempt(0, "ab", at_s=100, deaths=(death,)), attempt(1, "ab", at_s=120)))
    assert {key: first[key] for key in ("attempt", "world_size", "ranks", "hosts", "host_count")} == {
        "attempt": 0,
        "world_size": 2,
        "ranks": 2,
        "hosts": ["a", "b"],
        "host_count": 2,
    }
    assert (first["first_step"], first["last_step"], first["began_wall_ns"]) == (0, 29, 100 * S)
    assert first["seconds"] == round((first["ended_wall_ns"] - 100 * S) / S, 3)
    assert first["end"] == "rank 1 raised Exception (in step 20, in backward) on b"
    assert 17 < first["pause_s"] < 20
    assert (second["end"], second["pause_s"]) == ("ended normally", None)


def test_a_node_that_joined_left_or_was_replaced() -> None:
    ended = stopped(attempt(0, "ab", at_s=1))
    assert ends(ended, attempt(1, "abc", at_s=50)) == ["host c joined", "ended normally"]
    assert ends(ended, attempt(1, "a", at_s=50)) == ["host b left", "ended normally"]
    assert ends(ended, attempt(1, "ac", at_s=50)) == ["host b was replaced by host c", "ended normally"]
    assert ends(stopped(attempt(0, "abcdef", at_s=1)), attempt(1, "a", at_s=50))[0] == "hosts b, c, d and 2 more left"
    assert ends(stopped(attempt(0, "aa", at_s=1)), attempt(1, "aaa", at_s=50))[0] == "started again with 3 ranks"


def test_a_node_that_was_lost() -> None:
    first, second = attempt(0, "ab", at_s=1)
    lost = [replace(first, state="vanished"), replace(second, state="running", ended_wall_ns=None)]
    assert ends(lost, attempt(1, "ac", at_s=50))[0] == "host b was no longer heard from"


def test_the_last_attempt_may_still_run() -> None:
    running = [replace(rank, state="running", ended_wall_ns=None) for rank in attempt(1, "ab", at_s=50)]
    table = attempts_table(run_of(stopped(attempt(0, "ab", at_s=1)), running))
    assert table[0]["end"] == "all 2 ranks vanished (in step 30)"
    assert (table[1]["end"], table[1]["ended_wall_ns"], table[1]["seconds"]) == (None, None, None)


def test_an_attempt_without_a_step() -> None:
    second = [replace(rank, steps=rank.steps.part(slice(0))) for rank in attempt(1, "ab", at_s=50)]
    table = attempts_table(run_of(stopped(attempt(0, "ab", at_s=1)), second))
    assert (table[0]["pause_s"], table[1]["first_step"]) == (None, None)
    assert [text.split(";")[0] for _, text in attempt_items(table)] == [
        "2 ranks on 2 hosts, steps 0–29 in 1.38 s",
        "2 ranks on 2 hosts, no step in 1.38 s",
    ]


def test_of_many_the_last_are_shown() -> None:
    rounds = [stopped(attempt(number, "a", at_s=10.0 * number)) for number in range(12)]
    items = attempt_items(attempts_table(run_of(*rounds)))
    assert items[0] == ("", "… 4 earlier attempts in summary.json")
    assert [label for label, _ in items[1:]] == [str(number) for number in range(4, 12)]


def _work_for(restarts: int) -> int:
    """How many functions are called for the summary of a job that failed so often: a measure that no load changes."""
    (series,) = attempt(0, "a", at_s=0)
    ranks, errors = [], []
    for number in range(restarts):
        identity = replace(series.identity, attempt=number, pid=1000 + number)
        began_ns, ended_ns = number * S, number * S + S // 2
        times = {"anchor_wall_ns": began_ns, "ended_wall_ns": ended_ns}
        ranks.append(replace(series, identity=identity, state="exception", **times))
        document = {"rank": 0, "type": "ValueError", "message": "again", "traceback": ""}
        errors.append(RankError(pid=1000 + number, wall_ns=ended_ns, **document))
    run = run_of(ranks, errors=tuple(errors))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        summarize(run)
    finally:
        sys.setprofile(before)
    return calls


def test_restarts_cost_no_more_than_in_proportion() -> None:
    once = _work_for(1)
    assert (_work_for(201) - once) / (_work_for(51) - once) < 5

"""The history of findings: each episode once, with its steps and times, also if the hub is killed in between."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.cluster import Cluster, slow_at
from hub_feed import sidecar_of, taken_of

from stepscope.hub.live.finding_history import FindingHistory
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.rules import RuleLoop
from stepscope.records.finding import Finding
from stepscope.store.create import create_run
from stepscope.store.documents import read_finding_history, read_meta, write_meta
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.load import open_run
from stepscope.store.paths import FINDING_HISTORY
from stepscope.store.sealed.seal import seal

SLOW = Finding(kind="compute_straggler", severity="critical", title="Rank 1 is slow.", ranks=(1,), cost={"share": 0.3})


def history(run_dir: Path, *times: int) -> FindingHistory:
    clock = iter(times)
    return FindingHistory(run_dir, wall_ns=lambda: next(clock, 0))


def changes(run_dir: Path) -> list[tuple[int, str, str, int, int]]:
    return [
        (own.number, own.change, own.finding["severity"], own.step, own.wall_ns)
        for own in read_finding_history(run_dir)
    ]


def test_an_episode_begins_with_a_warning_and_ends_when_it_is_no_longer_shown(tmp_path: Path) -> None:
    noted = history(tmp_path, 10, 20, 30, 40)
    remark = replace(SLOW, severity="info")
    noted.note([remark], step=20, attempt=0)
    noted.note([SLOW], step=40, attempt=0)
    noted.note([remark], step=60, attempt=0)
    noted.note([], step=80, attempt=0)
    assert changes(tmp_path) == [
        (1, "opened", "critical", 40, 20),
        (1, "changed", "info", 60, 30),
        (1, "resolved", "info", 80, 40),
    ]
    (last,) = {own.number: own for own in read_finding_history(tmp_path)}.values()
    assert (last.first_step, last.first_wall_ns, last.open) == (40, 20, False)


@pytest.mark.parametrize(("share", "written"), [(0.31, 1), (0.4, 1), (0.46, 2), (0.19, 2), (0.0, 2)])
def test_only_a_large_change_of_the_cost_is_written(tmp_path: Path, share: float, written: int) -> None:
    noted = history(tmp_path)
    noted.note([SLOW], step=40, attempt=0)
    noted.note([replace(SLOW, cost={"share": share})], step=60, attempt=0)
    assert len(read_finding_history(tmp_path)) == written
    assert noted.open[0].finding["cost"] == {"share": share}, "who asks gets the cost of now"


def test_a_hub_that_was_killed_continues_with_the_same_numbers(tmp_path: Path) -> None:
    history(tmp_path, 10).note([SLOW, replace(SLOW, ranks=(2,))], step=40, attempt=0)
    with (tmp_path / FINDING_HISTORY).open("a") as file:
        file.write('{"schema":1,"number":3,"chan')  # it was killed while it wrote
    noted = history(tmp_path, 20, 30)
    assert [own.number for own in noted.open] == [1, 2]
    assert [own.finding for own in noted.watched(step=50, attempt=0)] == [SLOW, replace(SLOW, ranks=(2,))]
    noted.note([SLOW], step=60, attempt=0)
    noted.note([SLOW, replace(SLOW, phase="input")], step=80, attempt=0)
    assert [own[:2] for own in changes(tmp_path)] == [(1, "opened"), (2, "opened"), (2, "resolved"), (3, "opened")]


def test_a_restart_of_the_job_ends_the_episodes_of_the_attempt_before(tmp_path: Path) -> None:
    history(tmp_path, 10).note([SLOW], step=40, attempt=1)
    noted = history(tmp_path, 20, 30)
    noted.note([], step=0, attempt=0)  # the model has not caught up: nothing is known yet
    assert [own.number for own in noted.open] == [1]
    noted.note([SLOW], step=5, attempt=2)
    first, ended, repeated = read_finding_history(tmp_path)
    assert (ended.number, ended.change, ended.step, ended.why) == (1, "resolved", 40, "the job was restarted")
    assert (repeated.number, repeated.change, repeated.attempt, first.attempt) == (2, "opened", 2, 1)


def test_the_end_of_the_run_ends_all_and_the_seal_keeps_them(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path, "night", ["train.py"], sessions=tmp_path / "sessions").run_dir
    noted = history(run_dir, 10, 20)
    noted.note([SLOW], step=40, attempt=0)
    noted.conclude(step=90, why="the run ended")
    assert noted.open == ()
    write_meta(run_dir, {**read_meta(run_dir), "end": {"exit_code": 0}})
    seal(run_dir)
    ended = open_run(run_dir).history[-1]
    assert (ended.change, ended.step, ended.wall_ns, ended.why) == ("resolved", 90, 20, "the run ended")


def test_lines_that_are_not_ours_are_skipped(tmp_path: Path) -> None:
    history(tmp_path, 10).note([SLOW], step=40, attempt=0)
    line = json.loads((tmp_path / FINDING_HISTORY).read_text())
    broken = [{**line, "number": "1"}, {**line, "change": "gone"}, {**line, "finding": []}, [], 7]
    foreign = {**line, "number": 9, "finding": {"kind": 3}}
    with (tmp_path / FINDING_HISTORY).open("a") as file:
        file.writelines(json.dumps(own) + "\n" for own in (*broken, foreign))
    noted = history(tmp_path)
    assert [own.number for own in noted.open] == [1]
    noted.note([replace(SLOW, ranks=(5,))], step=60, attempt=0)
    assert noted.open[-1].number == 10


def test_a_hub_killed_in_an_incident_neither_reopens_nor_resolves_it(tmp_path: Path) -> None:
    """Rank 1 is slow up to step 200.  Every 40 steps another hub takes over, which reads the last 100 steps."""
    cluster = Cluster(ranks=4, steps=600, faults=(slow_at(1, "forward", 30.0, range(200)),))
    series = cluster.series()

    async def judged(first: int, upto: int) -> None:
        live = LiveRun(run_dir=tmp_path)
        for own in series:
            live.ring(RingSidecar.from_dict(sidecar_of(own, state="running")), node="0")
        live.rows(taken_of(series, range(max(0, first - 100), first)))
        live.tick()
        loop = RuleLoop(live, history=FindingHistory(tmp_path), threaded=False)
        for step in range(first, upto, 10):
            live.rows(taken_of(series, range(step, step + 10)))
            await loop.evaluate()

    for first in range(0, 600, 40):
        asyncio.run(judged(first, first + 40))
    slow = [own for own in read_finding_history(tmp_path) if own.finding["kind"] == "compute_straggler"]
    assert [own.change for own in slow if own.change != "changed"] == ["opened", "resolved"]
    assert {own.number for own in slow} == {1}
    assert slow[0].first_step < 40
    assert 200 < slow[-1].step < 460

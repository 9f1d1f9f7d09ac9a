"""Which runs a hub has open: past ones from their files, one that goes on as it grows, never too many at once."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.hub import runs as runs_module
from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.past import past_run
from stepscope.hub.runs import Runs
from stepscope.records.series import RunData
from stepscope.ring.writer import process_start_ticks
from stepscope.store.load import open_run
from stepscope.store.meta import end_run, read_meta, write_meta
from stepscope.store.nodes import NodeInfo, write_nodes
from stepscope.testing.cluster import Cluster, Death
from stepscope.testing.samples import with_samples


def in_loop(runs: Runs, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        try:
            return await work()
        finally:
            await runs.close()

    return asyncio.run(run())


def test_a_past_run_is_opened_once_however_many_ask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Path] = []
    load = runs_module._load
    monkeypatch.setattr(runs_module, "_load", lambda path: (loads.append(path), load(path))[1])
    runs = Runs.of_folder(folder)

    async def work() -> Any:
        opened = await asyncio.gather(*(runs.open("plain") for _ in range(5)))
        return {id(run) for run in opened}, await runs.open("plain") is opened[0]

    same, again = in_loop(runs, work)
    assert (len(same), again, loads) == (1, True, [folder / "plain"])


def test_a_few_stay_open_and_the_longest_unasked_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "MOST_OPEN", 2)
    runs = Runs.of_folder(folder)
    names = sorted(path.name for path in folder.iterdir())

    async def work() -> list[str]:
        for name in (names[0], names[1], names[0], names[2]):
            assert await runs.open(name)
        return [run.name for run in runs.live()]

    assert in_loop(runs, work) == [names[0], names[2]]


def test_a_run_that_changed_is_opened_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "CHECK_S", 0.0)
    monkeypatch.setattr(runs_module, "READING_SHARE", 1e9)
    shutil.copytree(folder / "plain", tmp_path / "runs" / "plain")
    runs = Runs.of_folder(tmp_path / "runs")

    async def work() -> Any:
        first = await runs.open("plain")
        unchanged = await runs.open("plain")
        meta = read_meta(tmp_path / "runs" / "plain")
        write_meta(tmp_path / "runs" / "plain", {**meta, "end": {**meta["end"], "status": "failed"}})
        second = await runs.open("plain")
        shutil.rmtree(tmp_path / "runs" / "plain")
        return first, unchanged, second, await runs.open("plain")

    first, unchanged, second, gone = in_loop(runs, work)
    assert unchanged is first
    assert second is not first
    assert (first.status(), second.status(), gone) == ("finished", "failed", None)


def test_one_run_can_be_served_by_itself(folder: Path) -> None:
    runs = Runs.of_folder(folder / "plain")

    async def work() -> Any:
        return await runs.open("plain"), await runs.open("demo"), await runs.entries()

    plain, demo, entries = in_loop(runs, work)
    assert (plain.name, demo, [entry.name for entry in entries]) == ("plain", None, ["plain"])


def test_a_live_run_has_the_name_it_was_to_have_too(folder: Path) -> None:
    live = LiveRun(name="plain")
    runs = Runs.of_one(folder / "plain", live, wanted="wanted")

    async def work() -> Any:
        return [await runs.open(name) for name in ("plain", "wanted", "demo")]

    plain, wanted, demo = in_loop(runs, work)
    assert plain is wanted
    assert plain.live is live
    assert demo is None


def test_a_run_that_goes_on_is_followed_while_somebody_looks(begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(ranks=2, steps=60, unfinished={0: 60, 1: 60}, hosts=1)
    run_dir, append = begun(cluster)
    # A launcher that lives: this very process.  (processes_alive leaves its caller out.)
    parent = {"pid": os.getppid(), "start_ticks": process_start_ticks(os.getppid())}
    write_meta(run_dir, {**read_meta(run_dir), "launcher": parent, "host": platform.node()})
    series = cluster.series()
    for one in series:
        append(run_dir, one, 0, 20)
    runs = Runs.of_folder(run_dir.parent)

    async def until(done: Callable[[], bool]) -> None:
        for _ in range(3000):
            if done():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came")

    async def work() -> Any:
        run = await runs.open(run_dir.name)
        assert run is not None
        assert (run.status(), run.over) == ("running", False)
        await until(lambda: run.live.frontier == 19)
        for one in series:
            append(run_dir, one, 20, 60)
        await until(lambda: run.live.frontier == 59)
        summary = await run.summary()
        end_run(run_dir, exit_code=0, status="finished")
        await until(lambda: not runs.live())
        again = await runs.open(run_dir.name)
        return summary, again

    monkeypatch.setattr(runs_module, "CHECK_S", 0.02)
    summary, again = in_loop(runs, work)
    assert (summary["status"], summary["steps"]["last"]) == ("running", 59)
    assert (again.status(), again.over, again.live.frontier) == ("finished", True, 59)


# ── from files to the model ─────────────────────────────────────────────────────────────────────────────────────────


def test_every_step_of_every_rank_is_in_the_model_of_a_past_run(folder: Path) -> None:
    data = open_run(folder / "demo")
    live = past_run(data)
    planes = live.planes
    assert (planes.width, planes.stride, planes.columns) == (600, 1, 8)
    rows = planes.row_of(np.arange(600))
    for column, series in enumerate(data.ranks):
        np.testing.assert_allclose(planes.held["wall_ns"][rows, column], series.steps["wall_ns"], rtol=1e-6)
        np.testing.assert_allclose(planes.held["phase:comm"][rows, column], series.steps["phase_ns"][:, 5], rtol=1e-6)
    assert (live.rows_taken, live.rows_repeated, live.rows_unknown) == (4800, 0, 0)
    assert live.digests.count == 600
    assert live.said.events_seen == 5


def test_a_rank_that_died_and_one_that_lost_records_are_no_trouble() -> None:
    run = Cluster(ranks=3, steps=300, deaths=(Death(rank=1, step=40),), missing={2: range(10, 20)}).run()
    live = past_run(run)
    said = live.steps(0, 299, bins=4096)
    assert [said["ranks"][said["first"].index(step)] for step in (5, 15, 50)] == [3, 2, 2]
    assert live.ranks()["state"] == ["exited", "vanished", "exited"]
    assert live.ranks()["lost"] == [0, 0, 10]


def test_of_several_attempts_the_last_is_shown() -> None:
    first = Cluster(ranks=2, steps=30).run()
    second = Cluster(ranks=3, steps=10, attempt=1).run()
    live = past_run(replace(second, ranks=(*first.ranks, *second.ranks)))
    assert (live.registry.attempt, live.frontier, live.ranks()["rank"]) == (1, 9, [0, 1, 2])


def test_a_run_without_ranks_or_steps_is_a_run() -> None:
    empty = RunData(name="x", path="x", meta={"schema": 1, "name": "x"}, ranks=())
    assert past_run(empty).info()["ranks"] == 0
    assert past_run(Cluster(ranks=2, steps=0).run()).info()["ranks"] == 0


def test_nodes_keep_the_names_they_had(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "demo", tmp_path / "demo")
    write_nodes(tmp_path / "demo", [NodeInfo(node=1, host="node1", spool="ab" * 8, offset_ns=5, frames=3)])
    runs = Runs.of_folder(tmp_path)

    async def work() -> Any:
        run = await runs.open("demo")
        assert run is not None
        return run.live.registry.nodes, run.nodes()

    names, nodes = in_loop(runs, work)
    assert names == ["node0", "1"]
    assert (nodes[0].offset_ns, nodes[0].frames) == (5, 3)


def test_very_many_samples_are_thinned_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.hub import past

    run = with_samples(Cluster(ranks=3, steps=200), every_s=0.1)
    monkeypatch.setattr(past, "MOST_SAMPLES", len(run.samples) // 3)
    kept = past_run(run).samples(limit=10_000)
    by_rank = [sum(1 for line in kept if line.get("rank") == rank) for rank in range(3)]
    whole = sum(1 for line in run.samples if line.get("rank") == 0)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert whole // 4 - 1 <= by_rank[0] <= whole // 3 + 1

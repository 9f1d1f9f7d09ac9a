"""Which runs a hub has open: past ones from their files, one that goes on as it grows, never too many at once."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster, Death
from fakes.samples import with_samples
from made_runs import record

from stepscope.cli.finalize import finalize_run
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.past_run import past_run
from stepscope.hub.runs import OpenPolicy, Runs, load_open, open_ahead
from stepscope.records.run_clock import process_start_ticks
from stepscope.records.series import RunData
from stepscope.store.documents import NodeInfo, end_run, read_meta, write_meta, write_nodes
from stepscope.store.load import open_run
from stepscope.store.sealed import samples


def in_loop(runs: Runs, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        try:
            return await work()
        finally:
            await runs.close()

    return asyncio.run(run())


def counting(loads: list[str]) -> OpenPolicy:
    return OpenPolicy(load=lambda path: (loads.append(path.name), load_open(path))[1])


def test_a_past_run_is_opened_once_however_many_ask(folder: Path) -> None:
    loads: list[str] = []
    runs = Runs.of_folder(folder, counting(loads))

    async def work() -> Any:
        opened = await asyncio.gather(*(runs.open("plain") for _ in range(5)))
        return {id(run) for run in opened}, await runs.open("plain") is opened[0]

    same, repeated = in_loop(runs, work)
    assert (len(same), repeated, loads) == (1, True, ["plain"])


def test_the_newest_is_open_before_anybody_asks(folder: Path) -> None:
    loads: list[str] = []
    newest = max(folder.iterdir(), key=lambda path: (read_meta(path)["created_wall_ns"], path.name)).name
    for given, name in ((folder, newest), (folder / "plain", "plain")):
        runs = Runs.of_folder(given, counting(loads))

        async def work(runs: Runs = runs, given: Path = given, name: str = name) -> Any:
            opening = asyncio.create_task(open_ahead(runs, given))
            file = await runs.open(name)
            await opening
            return file is not None, [run.name for run in runs.live()]

        assert in_loop(runs, work) == (True, [name])
    assert loads == [newest, "plain"]


def test_nothing_is_opened_ahead_that_goes_on_or_is_no_run(begun: Any, tmp_path: Path) -> None:
    run_dir, _append = begun(Cluster(ranks=1, steps=1, unfinished={0: 1}))
    parent = {"pid": os.getppid(), "start_ticks": process_start_ticks(os.getppid())}
    write_meta(run_dir, {**read_meta(run_dir), "launcher": parent, "host": platform.node()})
    broken = tmp_path / "others" / "broken"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("{")
    for given in (run_dir.parent, broken.parent, broken, tmp_path / "none"):
        runs = Runs.of_folder(given)

        async def work(runs: Runs = runs, given: Path = given) -> Any:
            await open_ahead(runs, given)
            return runs.live()

        assert in_loop(runs, work) == []


def test_a_few_stay_open_and_the_longest_unasked_goes(folder: Path) -> None:
    runs = Runs.of_folder(folder, OpenPolicy(most_open=2))
    names = sorted(path.name for path in folder.iterdir())

    async def work() -> list[str]:
        for name in (names[0], names[1], names[0], names[2]):
            assert await runs.open(name)
        return [run.name for run in runs.live()]

    assert in_loop(runs, work) == [names[0], names[2]]


def test_a_run_that_changed_is_opened_again(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "plain", tmp_path / "runs" / "plain")
    runs = Runs.of_folder(tmp_path / "runs", OpenPolicy(check_s=0.0, reading_share=1e9))

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
    runs = Runs.of_live(folder / "plain", live, wanted="wanted")

    async def work() -> Any:
        return [await runs.open(name) for name in ("plain", "wanted", "demo")]

    plain, wanted, demo = in_loop(runs, work)
    assert plain is wanted
    assert plain.live is live
    assert demo is None


def test_a_run_that_goes_on_is_followed_while_somebody_looks(begun: Any) -> None:
    cluster = Cluster(ranks=2, steps=60, unfinished={0: 60, 1: 60}, hosts=1)
    run_dir, append = begun(cluster)
    # A launcher that lives: this very process.  (processes_alive leaves its caller out.)
    parent = {"pid": os.getppid(), "start_ticks": process_start_ticks(os.getppid())}
    write_meta(run_dir, {**read_meta(run_dir), "launcher": parent, "host": platform.node()})
    series = cluster.series()
    for rank_series in series:
        append(run_dir, rank_series, 0, 20)
    runs = Runs.of_folder(run_dir.parent, OpenPolicy(check_s=0.02))

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
        for rank_series in series:
            append(run_dir, rank_series, 20, 60)
        await until(lambda: run.live.frontier == 59)
        summary = await run.summary()
        end_run(run_dir, exit_code=0, status="finished")
        await until(lambda: not runs.live())
        file = await runs.open(run_dir.name)
        return summary, file

    summary, repeated = in_loop(runs, work)
    assert (summary["status"], summary["steps"]["last"]) == ("running", 59)
    assert (repeated.status(), repeated.over, repeated.live.frontier) == ("finished", True, 59)


# ── from files to the model ─────────────────────────────────────────────────────────────────────────────────────────


def test_every_step_of_every_rank_is_in_the_model_of_a_past_run(folder: Path) -> None:
    data = open_run(folder / "demo")
    live = past_run(data)
    planes = live.planes
    assert (planes.width, planes.stride, planes.columns) == (600, 1, 8)
    rows = planes.row_of(np.arange(600))
    for column, series in enumerate(data.ranks):
        np.testing.assert_allclose(planes.arrays["wall_ns"][rows, column], series.steps["wall_ns"], rtol=1e-6)
        np.testing.assert_allclose(planes.arrays["phase:comm"][rows, column], series.steps.phase("comm"), rtol=1e-6)
    assert (live.rows_taken, live.rows_repeated, live.rows_unknown) == (4800, 0, 0)
    assert live.digests.count == 600
    assert live.received.events_seen == 5


def test_a_rank_that_died_and_one_that_lost_records_are_no_trouble() -> None:
    run = Cluster(ranks=3, steps=300, deaths=(Death(rank=1, step=40),), missing={2: range(10, 20)}).run()
    live = past_run(run)
    steps = live.steps(0, 299, bins=4096)
    assert [steps["ranks"][steps["first"].index(step)] for step in (5, 15, 50)] == [3, 2, 2]
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


def test_samples_come_after_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is open before they are read; whoever asks for them waits."""
    record(tmp_path, "night", with_samples(Cluster(ranks=2, steps=200), every_s=0.1))
    finalize_run(tmp_path / "night")
    runs, may_read, said = Runs.of_folder(tmp_path), threading.Event(), []
    real = samples.sealed_samples

    def waits(path: Path) -> Any:
        assert may_read.wait(30)
        return real(path)

    monkeypatch.setattr(samples, "sealed_samples", waits)

    async def work() -> Any:
        run = await runs.open("night")
        assert run is not None
        said.append((run.live.planes.newest, run.live.samples()))
        may_read.set()
        await run.sampled()
        return run.live.samples(limit=10_000)

    there = in_loop(runs, work)
    assert said == [(199, [])]
    whole = real(tmp_path / "night")
    assert there == whole
    assert len(whole) == len({line["wall_ns"] for line in whole}) * 3, "a host and two processes each time"

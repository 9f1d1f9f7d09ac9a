"""The view on a real hub: every cell of its screen at 80 × 24, its keys, and what it says when something is wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster, slow_at
from rich.cells import cell_len

from stepscope.terminal.app import WatchApp
from stepscope.terminal.feed import Feed
from tests.hub.run_parts import WALL_NS, ServedFolder
from tests.hub.run_parts import Feed as Job
from tests.terminal.conftest import NAME
from tests.terminal.screen_driver import Screen, drive_app, shown, without_port

Start = Callable[..., Feed]
CLOCK = time.strftime("%H:%M:%S", time.localtime(WALL_NS / 1e9))
SCREEN = f"""\
demo · finished · step 99 · 8 ranks · http://127.0.0.1:PORT5              ✔ over
✖ Rank 3 is 30.0 ms slower than its peers in forward every step; all other ranks
  wait for it.
  cost    43% of the training time (2.97 s); without it a step takes 39.0 ms in…
step     69.0 ms  median of 100, mean of ranks  ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁
phase           mean       100 steps, 8 ranks     rank 3    works longest
input        2.00 ms   3%  █                     2.00 ms    █
forward      15.8 ms  22%  ███████▉              40.0 ms ◀  ████████████████████
backward     20.0 ms  28%  ██████████            20.0 ms    ██████████
comm         27.3 ms  38%  █████████████▋        1.00 ms    ▌
optimizer    5.00 ms   7%  ██▌                   5.00 ms    ██▌
other        1.00 ms   1%  ▌                     1.00 ms    ▌
machine rank 0 held 400 MiB · 2 hosts CPU 40% · host memory 38%
  rank   host              state   now  100 steps:    ▼ work      wait      step
▶✖3      node0             exited                    68.0 ms   1.00 ms   69.0 ms
  0      node0             exited                    38.0 ms   31.0 ms   69.0 ms
  1      node0             exited                    38.0 ms   31.0 ms   69.0 ms
  2      node0             exited                    38.0 ms   31.0 ms   69.0 ms
  4      node1             exited                    38.0 ms   31.0 ms   69.0 ms
  5      node1             exited                    38.0 ms   31.0 ms   69.0 ms
  6      node1             exited                    38.0 ms   31.0 ms   69.0 ms
  7      node1             exited                    38.0 ms   31.0 ms   69.0 ms
event   {CLOCK}  Rank 3 started on node0.
↑↓ Enter rank  s sort  v verdict  l output  e events  f freeze  ? help  q quit"""


def test_every_cell_at_80_by_24(served: ServedFolder, feed_of: Start) -> None:
    async def use(at: Screen) -> None:
        await at.shows(SCREEN)

    drive_app(feed_of(served, "demo"), use)


@pytest.mark.parametrize("size", [(60, 20), (200, 60), (40, 10), (20, 5)])
def test_it_fits_and_says_the_verdict_first(served: ServedFolder, feed_of: Start, size: tuple[int, int]) -> None:
    async def use(at: Screen) -> None:
        await at.until("Rank 3 is")
        lines = await at.until(lambda: at.feed.now.ranks is not None and (size[0] < 60 or "▶✖3 " in shown(at.lines)))
        assert len(lines) == size[1]
        assert all(cell_len(line) == size[0] for line in lines)
        assert "q quit" in lines[-1] or size[0] < 40
        if size[0] >= 60:
            assert "▼ work      wait      step" in shown(lines)
            assert "68.0 ms   1.00 ms   69.0 ms" in shown(lines)
        if size[0] == 200:
            await at.until("logs/rank-0.log · 790 B")
            assert any(line.rstrip().endswith("│ line 99") for line in at.lines)

    drive_app(feed_of(served, "demo"), use, size)


def test_it_follows_the_size_of_the_terminal(served: ServedFolder, feed_of: Start) -> None:
    async def use(at: Screen) -> None:
        await at.shows(SCREEN)
        await at.resize(60, 20)
        lines = at.lines
        assert (len(lines), "q quit" in lines[-1]) == (20, True)
        await at.resize(80, 24)
        await at.shows(SCREEN)

    drive_app(feed_of(served, "demo"), use)


def test_keys(served: ServedFolder, feed_of: Start) -> None:
    async def use(at: Screen) -> None:
        await at.shows(SCREEN)
        lines = await at.press("down", "down")
        assert [line[:3] for line in lines[14:17]] == [" ✖3", "  0", "▶ 1"]
        assert (await at.press("end"))[21].startswith("▶ 7")
        assert (await at.press("home"))[14].startswith("▶✖3")  # without a wait: it was held

        await at.press("enter")
        lines = await at.until("logs/rank-3.log")
        assert lines[5].startswith("Rank 3  node0 · pid 1003 · ")
        assert lines[6].startswith("✖ Rank 3 is 30.0 ms slower")
        assert "forward       40.0 ms   15.8 ms  ████" in shown(lines)
        log = ["logs/rank-3.log · 343 B", "epoch 1", "step 2", "red [bold]", "x" * 79 + "…"]
        at_log = next(number for number, line in enumerate(lines) if line.startswith("logs/"))
        assert [line.rstrip() for line in lines[at_log : at_log + 5]] == log
        await at.press("down")
        await at.until("Rank 0  node0")
        assert shown(await at.press("escape")).count("▶ 0      node0") == 1

        await at.press("home", "s")
        assert "▼ wait" in shown(await at.until(lambda: "▶ 0" in shown(at.lines)))
        await at.press("s", "s")
        assert " ▼rank" in shown(await at.until("▶ 0      node0"))
        await at.press("s")
        await at.shows(SCREEN)

        lines = await at.press("v")
        assert lines[7].startswith("  A rank computes more slowly · rank 3 · forward · steps 1–99")
        assert "    – Check that rank 3" in shown(lines)
        assert (await at.press("e"))[5].startswith("events · 1 newest")
        assert without_port(await at.press("l")) != SCREEN
        await at.until("line 99")
        assert "freeze the view" in shown(await at.press("question_mark"))
        assert "q  Ctrl-C  leave; the run continues" in shown(at.lines)
        assert without_port(await at.press("p")) == SCREEN

    drive_app(feed_of(served, "demo"), use)


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
def test_the_ways_out(served: ServedFolder, feed_of: Start, key: str) -> None:
    async def use(at: Screen) -> None:
        await at.pilot.press(key)
        assert at.app._exit

    drive_app(feed_of(served, "one"), use)


def test_only_the_rows_in_sight_are_held(served: ServedFolder, feed_of: Start) -> None:
    async def use(at: Screen) -> None:
        await at.until(lambda: at.feed.now.ranks is not None)
        await at.press("s", "s", "s", "end")
        await at.until("▶ 59")
        ranks = at.feed.now.ranks
        assert ranks is not None
        assert (ranks.total, len(ranks.rank) <= 18) == (60, True)
        await at.press("pageup")
        await at.until(lambda: at.lines[-3].startswith("  5"))

    drive_app(feed_of(served, "many"), use)


@pytest.mark.parametrize(
    ("run", "says"), [("one", "step 19 · 1 rank"), ("empty", "● No training step was recorded")], ids=["one", "empty"]
)
def test_small_runs(served: ServedFolder, feed_of: Start, run: str, says: str) -> None:
    async def use(at: Screen) -> None:
        lines = await at.until(says)
        assert "works longest" not in shown(lines)
        assert " yet" not in shown(lines)

    drive_app(feed_of(served, run), use)


def test_hostile_words_are_text(served: ServedFolder, feed_of: Start) -> None:
    async def use(at: Screen) -> None:
        await at.until("[bold]night[-red] 漢字 · finished")
        lines = await at.until("[red]x[/red] ?[31m?]0;t? <b> 漢字 ?")
        assert all(cell_len(line) == 80 for line in lines)
        await at.press("l")
        await at.until(lambda: "[red]x[/red]  <b> 漢字 ?" in shown(at.lines).splitlines())

    drive_app(feed_of(served, NAME), use)


def test_without_color(served: ServedFolder, feed_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def use(at: Screen) -> None:
        await at.shows(SCREEN)
        assert at.app.no_color

    drive_app(feed_of(served, "demo"), use)


# ── a run that goes on ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def job(tmp_path: Path) -> Job:
    slow = Cluster(ranks=4, steps=400, faults=(slow_at(2, "forward", 40.0),), noise=0.0)
    return Job(tmp_path / "runs", "going", slow)


@pytest.fixture
def hub(job: Job) -> Any:
    served = ServedFolder(job.run_dir.parent)
    yield served
    served.stop()


def test_it_is_followed_frozen_lost_found_and_over(job: Job, hub: ServedFolder, feed_of: Start) -> None:
    async def use(at: Screen) -> None:
        job.make(40)
        # (That none of them lives is shown only after this job was silent for some seconds.)
        # The figures come first, then the stream, then the table and the machine: each in its own time.
        await at.until(lambda: re.match(r"going · running · step 39 · (0 of )?4 ranks ", at.lines[0]))
        lines = await at.until(lambda: at.feed.now.link == "live" and at.feed.now.hosts is not None)
        assert lines[0].endswith("● live")
        await at.press("f")
        frozen = at.lines
        assert frozen[0].endswith("■ frozen")
        job.make(40)
        await at.until(lambda: at.feed.now.step == 79)
        assert at.lines == frozen
        await at.press("f")
        await at.until("running · step 79")

        hub.stop()
        lines = await at.until("○ no hub")
        assert "step 79" in lines[0]
        assert "the hub" in lines[-2]
        hub.start()
        job.make(20)
        await at.until(lambda: re.match(r"going · running · step 99 · (0 of )?4 ranks ", at.lines[0]))
        await at.until("● live")

        job.end()
        await at.until("going · finished · step 99")
        await at.until("✖ Rank 2 is")
        hub.stop()
        await at.until(lambda: at.feed.now.link == "over")
        assert at.lines[0].endswith("✔ over")
        assert at.lines[1].startswith("✖ Rank 2 is")

    drive_app(feed_of(hub, "going"), use)


def test_an_expired_token_is_told_and_what_is_known_stays(job: Job, hub: ServedFolder, feed_of: Start) -> None:
    async def use(at: Screen) -> None:
        job.make(10)
        await at.until("step 9 ")
        hub.stop()
        hub.token = "another-token-than-before"
        hub.start()
        lines = await at.until("✖ refused")
        assert "step 9 " in lines[0]
        assert f"the hub at 127.0.0.1:{hub.port} rejected this token" in lines[-2]

    drive_app(feed_of(hub, "going"), use)


def test_a_wrong_token_and_a_run_that_is_not_there(served: ServedFolder, feed_of: Start) -> None:
    async def refused(at: Screen) -> None:
        assert "rejected this token" in (await at.until("✖ refused"))[1]

    async def missing(at: Screen) -> None:
        assert "no such run" in (await at.until("○ no such run"))[1]

    drive_app(feed_of(served, "demo", token="wrong"), refused)
    drive_app(feed_of(served, "nowhere"), missing)


def test_a_rank_that_stands_is_shown_with_the_time(served: ServedFolder, feed_of: Start) -> None:
    async def use(at: Screen) -> None:
        await at.shows(SCREEN)
        now = at.feed.now
        assert now.ranks is not None
        assert now.status is not None
        going = replace(
            now,
            status=type(now.status)(status="running", ranks=8, live_ranks=8, step=99),
            ranks=type(now.ranks)(
                total=2,
                order="work",
                rank=(3, 4),
                host=("a", "b"),
                state=("running", "vanished"),
                live_phase=("comm", "comm"),
                live_since_wall_ns=(time.time_ns() - 47_000_000_000, 0),
                mean_ns={"wall": [71e6, 71e6], "work": [70e6, 40e6]},
            ),
        )
        at.app.feed = _Still(going)
        lines = await at.until("running comm 47s")
        assert "  4      b                 vanished                  40.0 ms" in shown(lines)

    drive_app(feed_of(served, "demo"), use)


class _Still:
    """A feed from which nothing comes."""

    def __init__(self, now: Any) -> None:
        self.now = now

    def want(self, wanted: Any) -> None:
        pass

    def wall_ns(self) -> int:
        return time.time_ns()


def test_beside_a_job_ctrl_c_is_for_the_job(
    served: ServedFolder, feed_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio
    import os
    import signal

    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append((group, number)))

    async def run() -> None:
        app = WatchApp(feed_of(served, "one"), beside_job=True)
        async with app.run_test(size=(80, 24)) as pilot:
            at = Screen(app, pilot, app.feed)
            assert "q leave" in (await at.until("q leave"))[-1]
            lines = await at.press("ctrl+c")
            assert lines[-1].startswith("The job was asked to end; Ctrl-C twice more kills it")
            assert (await at.press("ctrl+c"))[-1].startswith("The job was asked to end; Ctrl-C once more kills it")
            assert not app._exit

    asyncio.run(run())
    assert sent == [(os.getpgrp(), signal.SIGINT)] * 2

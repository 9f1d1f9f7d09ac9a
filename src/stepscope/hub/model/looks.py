"""The rules while a job runs: every few seconds a look, in a thread, that takes at most a tenth of the time.

    looks = Looks(live)
    await looks.run()               # until it is cancelled

A look copies the last steps of the ranks that are judged (``selection.py``), which is quick, and asks the rules about
the copy in a thread, so that rows are taken in all the while.  The longer a look took, the longer until the next.
``diagnosis.live`` decides what is shown: what holds at two looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.diagnosis.live import AT_ONCE, Change, Watched, live_window, look
from stepscope.hangs.standing import standing_of
from stepscope.hub.model.live_run import Judged, LiveRun
from stepscope.hub.model.run_data import Snapshot, run_data_of, snapshot
from stepscope.hub.model.selection import MOST_JUDGED, select
from stepscope.records.finding import SEVERITIES, Finding
from stepscope.records.places import error_path, hangs_folder
from stepscope.reports.communication import communication_table

__all__ = ["Looks", "keep_up"]

LEAST_S = 1.0
"""From one look to the next."""
SHARE = 0.1
"""Of the time that may go into looks."""
TICK_S = 0.25
"""Between two rounds of taking in …"""
WATCHED_TICK_S = 0.1
"""… while somebody looks."""
BACKLOG_S = 0.09
"""A poll that takes so long has hours of a run to catch up with: it goes on almost at once."""
BACKLOG_TICK_S = 0.02
AGAIN_S = 60.0
"""After a look that failed."""


class Looks:
    def __init__(
        self,
        live: LiveRun,
        *,
        most_judged: int = MOST_JUDGED,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._live = live
        self._most = most_judged
        self._cpu_clock = cpu_clock
        self._watched: tuple[Watched, ...] = ()
        self._attempt = live.registry.attempt
        self._seen: tuple[int, ...] = ()

    async def run(self, *, first_s: float = 0.0) -> None:
        """Look again and again, from so long on; the first time as soon as there is a step."""
        await asyncio.sleep(first_s)
        while True:
            while not self._due():
                await asyncio.sleep(TICK_S)
            await self.look()
            await asyncio.sleep(max(LEAST_S, self._live.judged.period_s))

    async def look(self) -> tuple[Change, ...]:
        """Look once; what changed.  Nothing when no step, no hang and no death has come since the last time."""
        live = self._live
        live.tick()
        if live.registry.attempt != self._attempt:
            self._attempt, self._watched, self._seen = live.registry.attempt, (), ()
        if not self._due():
            return ()
        self._seen = self._now()
        began = self._cpu_clock()
        copy = snapshot(live, select(live, self._most))
        copied_s = self._cpu_clock() - began
        watched, changes, standing, communication, judged_s = await asyncio.to_thread(self._judge, copy)
        self._watched = watched
        took_s = copied_s + judged_s
        live.judge(
            Judged(
                findings=_shown(watched, copy),
                standing=standing,
                communication=communication,
                step=copy.step,
                ranks=len(copy.ranks),
                of_ranks=copy.of_ranks,
                looks=live.judged.looks + 1,
                took_s=took_s,
                period_s=max(LEAST_S, took_s / SHARE),
                failed=live.judged.failed,
            )
        )
        return changes

    def _due(self) -> bool:
        """Whether there is anything that the last look did not see."""
        live = self._live
        return self._now() != self._seen or live.registry.attempt != self._attempt or live.ended()

    def _now(self) -> tuple[int, ...]:
        return self._live.frontier, *_told_of(self._live.run_dir)

    def _judge(
        self, copy: Snapshot
    ) -> tuple[tuple[Watched, ...], tuple[Change, ...], dict[int, str], dict[str, Any] | None, float]:
        began = self._cpu_clock()
        data = run_data_of(copy)
        window = live_window(data)
        watched, changes = look(data, self._watched, window)
        table = communication_table(window)
        return watched, changes, standing_of(data.hangs), table, self._cpu_clock() - began


async def keep_up(live: LiveRun, *, poll: Callable[[], object] | None = None, looks: Looks | None = None) -> None:
    """Take in rows and digest steps a few times a second, and look now and then, until cancelled.

    ``poll``: what brings rows besides, a tail's.  A rule that fails is a fault of ours, but no reason to take nothing
    in any more: it is told, and after a while looked again.  ``looks``: for who wants to look once more afterwards.
    """
    looks = Looks(live) if looks is None else looks
    looking = asyncio.create_task(looks.run())
    try:
        while True:
            began_s = time.monotonic()
            if poll is not None:
                poll()
            backlog = time.monotonic() - began_s > BACKLOG_S
            live.tick()
            if looking.done():
                live.judge(replace(live.judged, failed=repr(looking.exception())))
                looking = asyncio.create_task(looks.run(first_s=AGAIN_S))
            await asyncio.sleep(BACKLOG_TICK_S if backlog else WATCHED_TICK_S if live.watched else TICK_S)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def _told_of(run_dir: Path | None) -> tuple[int, ...]:
    """Another when a file of a hang or of a death came: a job that stands still makes no steps to look at."""
    if run_dir is None:
        return ()
    return tuple(_changed_ns(folder) for folder in (hangs_folder(run_dir), error_path(run_dir, 0).parent))


def _changed_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _shown(watched: Sequence[Watched], copy: Snapshot) -> tuple[Finding, ...]:
    """The most severe and most costly first; what a finding costs all ranks, not only those that were judged."""
    share = copy.of_ranks / max(1, len(copy.ranks))
    shown = [_for_all(one.finding, share) for one in watched if one.shown]
    return tuple(sorted(shown, key=_weight, reverse=True))


def _for_all(finding: Finding, share: float) -> Finding:
    hours = finding.cost.get("rank_hours")
    if share == 1.0 or not isinstance(hours, int | float):
        return finding
    return replace(finding, cost={**finding.cost, "rank_hours": round(hours * share, 4)})


def _weight(finding: Finding) -> tuple[bool, int, float]:
    """A job that stands still, or a dead rank, before all that is only slow; as in the summary."""
    stopped = finding.kind in AT_ONCE and finding.severity == "critical"
    return stopped, SEVERITIES.index(finding.severity), float(finding.cost.get("share", 0.0))

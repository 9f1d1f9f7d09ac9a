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

from stepscope.diagnosis.live import Change, Watched, look
from stepscope.hub.model.live_run import Judged, LiveRun
from stepscope.hub.model.run_data import Snapshot, run_data_of, snapshot
from stepscope.hub.model.selection import MOST_JUDGED, select
from stepscope.records.finding import SEVERITIES, Finding

__all__ = ["Looks", "keep_up"]

LEAST_S = 2.0
"""From one look to the next."""
SHARE = 0.1
"""Of the time that may go into looks."""
TICK_S = 0.25
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
        self._step = -1

    async def run(self, *, first_s: float = LEAST_S) -> None:
        """Look again and again, from so long on."""
        await asyncio.sleep(first_s)
        while True:
            await self.look()
            await asyncio.sleep(max(LEAST_S, self._live.judged.period_s))

    async def look(self) -> tuple[Change, ...]:
        """Look once; what changed.  Nothing when no step has been completed since the last time."""
        live = self._live
        live.tick()
        if live.registry.attempt != self._attempt:
            self._attempt, self._watched, self._step = live.registry.attempt, (), -1
        if live.frontier == self._step and not live.ended():
            return ()
        self._step = live.frontier
        began = self._cpu_clock()
        copy = snapshot(live, select(live, self._most))
        copied_s = self._cpu_clock() - began
        watched, changes, judged_s = await asyncio.to_thread(self._judge, copy)
        self._watched = watched
        took_s = copied_s + judged_s
        live.judge(
            Judged(
                findings=_shown(watched, copy),
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

    def _judge(self, copy: Snapshot) -> tuple[tuple[Watched, ...], tuple[Change, ...], float]:
        began = self._cpu_clock()
        watched, changes = look(run_data_of(copy), self._watched)
        return watched, changes, self._cpu_clock() - began


async def keep_up(live: LiveRun, *, poll: Callable[[], object] | None = None) -> None:
    """Take in rows and digest steps a few times a second, and look now and then, until cancelled.

    ``poll``: what brings rows besides, a tail's.  A rule that fails is a fault of ours, but no reason to take nothing
    in any more: it is told, and after a while looked again.
    """
    looks = asyncio.create_task(Looks(live).run())
    try:
        while True:
            if poll is not None:
                poll()
            live.tick()
            if looks.done():
                live.judge(replace(live.judged, failed=repr(looks.exception())))
                looks = asyncio.create_task(Looks(live).run(first_s=AGAIN_S))
            await asyncio.sleep(TICK_S)
    finally:
        looks.cancel()
        await asyncio.gather(looks, return_exceptions=True)


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


def _weight(finding: Finding) -> tuple[int, float]:
    return SEVERITIES.index(finding.severity), float(finding.cost.get("share", 0.0))

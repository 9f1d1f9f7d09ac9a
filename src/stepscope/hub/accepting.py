"""``stepscope serve --accept``: nodes hand in, later, what they could not send while their run's own hub was there.

A run of the folder that was made for several nodes gets an inbox when somebody joins it, and is shut again when nothing
came for a while; what came is then put with the rest (``done``).  While its launcher lives, its own hub is the one to
send to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from stepscope.errors import NotARun, StepscopeError
from stepscope.hub.api.answers import failure
from stepscope.hub.gate.ingest import IngestFigures
from stepscope.hub.gate.refusals import Refusals
from stepscope.hub.gathering import Gathering
from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.runs import Runs
from stepscope.store.meta import read_meta
from stepscope.store.processes import launcher_alive

__all__ = ["Accepting"]

IDLE_S = 20.0
"""Without a frame, after which a run is shut."""
TICK_S = 1.0
MOST_OPEN = 16
_BEFORE = "/api/v1/runs/"
_AFTER = ("/join", "/frames")


@dataclass(kw_only=True)
class _Open:
    gathering: Gathering
    heard_s: float


class Accepting:
    """As ``IngestApp``, for the runs of a folder; used from one event loop."""

    def __init__(
        self, runs: Runs, refusals: Refusals, *, fingerprint: bytes, done: Callable[[Path], Any], idle_s: float = IDLE_S
    ) -> None:
        """``done``: called in a thread with a run that was shut."""
        self.refusals = refusals
        self._runs = runs
        self._fingerprint = fingerprint
        self._done = done
        self._idle_s = idle_s
        self._open: dict[Path, _Open] = {}
        self._before = IngestFigures()
        """What came for runs that are shut again."""
        self._watching: asyncio.Task[None] | None = None
        self._finishing: dict[Path, asyncio.Task[Any]] = {}

    @property
    def figures(self) -> IngestFigures:
        return _sum([self._before, *(one.gathering.ingest.figures for one in self._open.values())])

    def wants(self, path: str) -> bool:
        return path.startswith(_BEFORE) and path.endswith(_AFTER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix(_BEFORE).rpartition("/")[0]
        run_dir = self._runs.path_of(name)
        taking, why = (None, "no such run here") if run_dir is None else await self._taking(run_dir)
        if taking is None:
            self.refusals.count("join", "")
            await failure(404, why)(scope, receive, send)
            return
        taking.heard_s = time.monotonic()
        await taking.gathering.ingest(scope, receive, send)

    async def close(self) -> None:
        """Shut everything and put it with the rest."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for run_dir in list(self._open):
            self._shut(run_dir)
        await asyncio.gather(*self._finishing.values(), return_exceptions=True)

    async def _taking(self, run_dir: Path) -> tuple[_Open | None, str]:
        found = self._open.get(run_dir)
        if found is not None:
            return found, ""
        if run_dir in self._finishing:
            await asyncio.wait([self._finishing[run_dir]])
        if len(self._open) >= MOST_OPEN:
            return None, "too many runs are being sent at once"
        try:
            meta = read_meta(run_dir)
        except NotARun:
            return None, "no such run here"
        nnodes = _nnodes(meta)
        if nnodes is None:
            return None, "that run is not of several nodes"
        if meta.get("end") is None and launcher_alive(dict(meta)):
            return None, "that run still goes on, and has a hub of its own"
        try:
            gathering = self._gathering(run_dir, meta, nnodes)
        except (StepscopeError, OSError):
            return None, "nothing can be written for that run"
        found = self._open[run_dir] = _Open(gathering=gathering, heard_s=time.monotonic())
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        return found, ""

    def _gathering(self, run_dir: Path, meta: Mapping[str, Any], nnodes: int) -> Gathering:
        return Gathering(
            run_dir,
            LiveRun(name=run_dir.name),
            self.refusals,
            names=(run_dir.name,),
            nnodes=nnodes,
            fingerprint=self._fingerprint,
            own_spool=str(meta.get("spool", "")),
        )

    async def _watch(self) -> None:
        while self._open:
            await asyncio.sleep(min(TICK_S, self._idle_s))
            for run_dir, one in list(self._open.items()):
                one.gathering.tick()
                if time.monotonic() - one.heard_s > self._idle_s:
                    self._shut(run_dir)

    def _shut(self, run_dir: Path) -> None:
        one = self._open.pop(run_dir)
        self._before = _sum([self._before, one.gathering.ingest.figures])
        one.gathering.close()
        task = asyncio.create_task(asyncio.to_thread(self._done, run_dir))
        self._finishing[run_dir] = task
        task.add_done_callback(lambda _: self._finishing.pop(run_dir, None))


def _nnodes(meta: Mapping[str, Any]) -> int | None:
    said = meta.get("nnodes")
    return said if type(said) is int and said > 1 else None


def _sum(figures: list[IngestFigures]) -> IngestFigures:
    names = ("frames", "bytes", "rows", "duplicates", "gaps", "joins")
    return IngestFigures(**{name: sum(getattr(one, name) for one in figures) for name in names})

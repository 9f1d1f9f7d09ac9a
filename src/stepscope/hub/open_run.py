"""One run, open: the model of it, what its files say, and what is said of all of it.

Made and kept by ``runs.py``; used from one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun
from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.model.run_data import Snapshot, run_data_of, snapshot
from stepscope.hub.model.selection import MOST_JUDGED, select
from stepscope.records import run_clock
from stepscope.records.hang import HangRecord
from stepscope.reports import summarise
from stepscope.store.meta import read_meta
from stepscope.store.nodes import NodeInfo, read_nodes, read_refused
from stepscope.store.paths import META, NODES
from stepscope.store.watched import note_watched

__all__ = ["CHECK_S", "READING_SHARE", "Final", "OpenRun", "Poll", "stamp_of"]

Poll = Callable[[], object]
Final = tuple[Mapping[str, Any], tuple[HangRecord, ...]]
"""The document of ``summary.json``, and its hangs whole."""
CHECK_S = 1.0
"""Between two looks at whether a run that is over changed on disk."""
READING_SHARE = 0.2
"""Of the time at most goes into opening a run again that keeps changing."""
CONTEXT = (
    "name",
    "command",
    "cwd",
    "created_wall_ns",
    "host",
    "user",
    "python",
    "executable",
    "platform",
    "stepscope",
    "environment",
    "git",
    "end",
    "sealed",
)
"""What of ``run.json`` readers get; its ``environment`` was chosen without secrets when the run began."""


class OpenRun:
    """One run, open."""

    def __init__(
        self,
        path: Path,
        live: LiveRun,
        *,
        poll: Poll | None = None,
        fed: bool = False,
        document: Mapping[str, Any] | None = None,
        hangs: Sequence[HangRecord] = (),
        ended: str = "",
    ) -> None:
        self.path = path
        self.name = path.name
        self.live = live
        self.fed = fed
        """Whether somebody else puts in what comes."""
        self.poll = poll
        """Brings what is new, of a run that goes on and is not fed."""
        self.document = document
        """Of a run that is over: what ``summary.json`` says or would say."""
        self._hangs = tuple(hangs)
        self.leaving = False
        """Whether its hub ends with it, in a moment."""
        self._ended = ended
        self._ended_wall_ns: int | None = None
        self.stamp: tuple[Any, ...] = ()
        self.checked_s = self.took_s = self._noted_s = 0.0
        self._kept: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self._summary: Mapping[str, Any] | None = None
        self._summary_due_s = 0.0
        self._summing: asyncio.Task[Mapping[str, Any]] | None = None
        self.unsampled = False
        """Whether its samples are still to be read."""
        self.sampling: asyncio.Task[None] | None = None

    async def sampled(self) -> None:
        """Wait until the samples are there."""
        if self.sampling is not None:
            await asyncio.shield(self.sampling)

    def meta(self) -> Mapping[str, Any]:
        """``run.json`` as it is now; what it was when it cannot be read."""
        try:
            found: Mapping[str, Any] = self._cached(META, read_meta)
        except NotARun:
            return self.live.meta
        return found

    def context(self) -> dict[str, Any]:
        meta = self.meta()
        return {name: meta.get(name) for name in CONTEXT}

    def status(self) -> str:
        """As ``stepscope list`` has it."""
        end = self.meta().get("end")
        said = end.get("status") if isinstance(end, Mapping) else None
        return self._ended or (said if isinstance(said, str) else "running")

    def ended_wall_ns(self) -> int | None:
        """When it was over; null while that is not known."""
        end = self.meta().get("end")
        said = end.get("wall_ns") if isinstance(end, Mapping) else None
        return said if isinstance(said, int) else self._ended_wall_ns

    def nodes(self) -> list[NodeInfo]:
        found: list[NodeInfo] = self._cached(NODES, read_nodes)
        return found

    def refused(self) -> Mapping[str, int]:
        """By reason, what strangers were turned away for."""
        return read_refused(self.path)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return not self.fed and self.poll is None

    def asked(self) -> None:
        """Somebody looks: its agent is to write down at once what the ranks do."""
        self.live.asked()
        if not self.over and self.live.asked_s - self._noted_s >= CHECK_S:
            self._noted_s = self.live.asked_s
            note_watched(Path(str(self.live.meta.get("session", ""))))

    def conclude(self, status: str, final: Final | None = None) -> None:
        """It was fed and is over: those who follow are told so before the hub goes, with what is said of all of it."""
        self._ended, self.fed, self.leaving = status, False, True
        self._ended_wall_ns = run_clock.wall_ns()
        if final is not None:
            self.document, self._hangs = final
        self.live.touch()

    async def summary(self) -> Mapping[str, Any]:
        """The document of ``summary.json``; of a run that goes on, one of its last steps and the ranks that are judged.

        However many ask, it is made once, and takes a fifth of the time at most.
        """
        if self.document is not None:
            return self.document
        if self._summary is not None and time.monotonic() < self._summary_due_s:
            return self._summary
        if self._summing is None:
            self._summing = asyncio.create_task(self._summarise())
        return await asyncio.shield(self._summing)

    async def hangs(self) -> tuple[HangRecord, ...]:
        """Those of the summary, whole: with the ranks, and what the Flight Recorders knew."""
        await self.summary()
        return self._hangs

    async def _summarise(self) -> Mapping[str, Any]:
        started_s = time.monotonic()
        try:
            copy = snapshot(self.live, select(self.live, MOST_JUDGED))
            summary, self._hangs = await asyncio.to_thread(_summary_of, copy)
            self._summary = summary
        finally:
            took_s = time.monotonic() - started_s
            self._summary_due_s = started_s + took_s + max(CHECK_S, took_s / READING_SHARE)
            self._summing = None
        return summary

    def _cached(self, name: str, read: Callable[[Path], Any]) -> Any:
        stamp = stamp_of(self.path / name)
        held = self._kept.get(name)
        if held is None or held[0] != stamp:
            held = self._kept[name] = stamp, read(self.path)
        return held[1]


def _summary_of(copy: Snapshot) -> tuple[Mapping[str, Any], tuple[HangRecord, ...]]:
    data = run_data_of(copy)
    return summarise(data, alive=True), data.hangs


def stamp_of(path: Path) -> tuple[Any, ...]:
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_mtime_ns, about.st_size, about.st_ino

"""Ingest for a folder of runs: ``stepscope serve --accept``.

Nodes deliver later what they could not send while their run's own hub was there.  A run in the folder that was made
for several nodes gets an inbox when an agent joins it.  The inbox is closed when nothing came for a while, and what
came is merged with the rest (``done``).  While the run's launcher is alive, agents must send to the run's own hub.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from stepscope.errors import NotARun, StepscopeError
from stepscope.hub.audit import AuditLog
from stepscope.hub.ingest.auth import ADDRESSES, Challenges, SenderLimits
from stepscope.hub.ingest.endpoints import (
    IngestFigures,
    answer_hello,
    answer_refused,
    for_agents,
    no_challenge,
    note_refused,
)
from stepscope.hub.ingest.run_ingest import RunIngest
from stepscope.hub.limits import Buckets, Refusals, Refused, address_of, source_of
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.server import known
from stepscope.store.documents import read_meta
from stepscope.store.liveness import launcher_alive
from stepscope.wire.frames import HELLO_BYTES
from stepscope.wire.handshake import HELLO_PATH
from stepscope.wire.keys import KeyRing

__all__ = ["FolderIngest"]

IDLE_S = 20.0
"""A run is closed after this long without a frame."""
TICK_S = 1.0
MOST_OPEN = 16
_BEFORE = "/api/v1/runs/"


@dataclass(kw_only=True)
class _Open:
    gathering: RunIngest
    heard_s: float


class FolderIngest:
    """Like ``IngestApp``, for the runs in a folder; used from one event loop."""

    def __init__(
        self,
        run_dir_of: Callable[[str], Path | None],
        refusals: Refusals,
        *,
        fingerprint: bytes,
        done: Callable[[Path], Any],
        idle_s: float = IDLE_S,
        audit: AuditLog | None = None,
    ) -> None:
        """``run_dir_of``: the folder of a run, by name.  ``done``: called in a thread with each closed run.

        UsageError if there is no key.
        """
        self.refusals = refusals
        self._run_dir_of = run_dir_of
        self._fingerprint = fingerprint
        self._keys = KeyRing(os.environ)
        self._keys()
        self._keys.start()
        self._challenges = Challenges(self._keys, fingerprint)
        self._doors: Buckets[str] = Buckets(rate=SenderLimits.joins_per_s, burst=SenderLimits.joins, most=ADDRESSES)
        self._done = done
        self._idle_s = idle_s
        self._audit = audit
        self._open: dict[Path, _Open] = {}
        self._before = IngestFigures()
        """Figures of runs that are closed again."""
        self._watching: asyncio.Task[None] | None = None
        self._finishing: dict[Path, asyncio.Task[Any]] = {}

    @property
    def figures(self) -> IngestFigures:
        return _sum([self._before, *(one.gathering.ingest.figures for one in self._open.values())])

    def wants(self, path: str) -> bool:
        return for_agents(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request.  Before the key is proved, nothing is opened, written or revealed about any run."""
        try:
            if scope["method"] != "POST":
                raise Refused(405, "http", "agents must use POST")
            if scope["path"] == HELLO_PATH:
                await self._hello(scope, receive, send)
                return
            taking = await self._admitted(scope)
        except Refused as refused:
            self.refusals.count(refused.reason, address_of(scope))
            note_refused(self._audit, scope, refused, address_of(scope))
            await answer_refused(send, refused, close=True)
            return
        taking.heard_s = time.monotonic()
        await taking.gathering.ingest(scope, receive, send)

    async def _hello(self, scope: Scope, receive: Receive, send: Send) -> None:
        wait_s = self._doors.take(source_of(address_of(scope)), time.monotonic())
        if wait_s > 0:
            raise Refused(429, "join_rate", "too many joins from this address", retry_s=wait_s)
        body = b""
        async for piece in Request(scope, receive).stream():
            body += piece
            if len(body) > HELLO_BYTES:
                raise Refused(413, "body_large", f"more than {HELLO_BYTES} bytes")
        await answer_hello(self._challenges, scope, body, send)

    async def _admitted(self, scope: Scope) -> _Open:
        """Return the run for a client with the key (join) or a token (frames); Refused reveals no runs."""
        name, _, what = scope["path"].removeprefix(_BEFORE).rpartition("/")
        token = dict(scope["headers"]).get(b"authorization", b"")
        run_dir = self._run_dir_of(name)
        if what == "frames":
            found = None if run_dir is None else self._open.get(run_dir)
            if found is None or found.gathering.ingest.admission.sender_of(token) is None:
                raise Refused(401, "token", "the token is not valid for this hub; join again")
            return found
        if not self._challenges.bears(token):
            raise no_challenge()
        known(scope)
        taking, why = (None, "no such run on this hub") if run_dir is None else await self._taking(run_dir)
        if taking is None:
            raise Refused(404, "join", why)
        return taking

    async def close(self) -> None:
        """Close all runs and merge what came."""
        self._keys.stop()
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
            return None, "too many runs are being received at once"
        try:
            meta = read_meta(run_dir)
        except NotARun:
            return None, "no such run on this hub"
        nnodes = _nnodes(meta)
        if nnodes is None:
            return None, "that run does not have several nodes"
        if meta.get("end") is None and launcher_alive(dict(meta)):
            return None, "that run is still active and has its own hub"
        try:
            gathering = self._gathering(run_dir, meta, nnodes)
        except (StepscopeError, OSError):
            return None, "cannot write to that run"
        found = self._open[run_dir] = _Open(gathering=gathering, heard_s=time.monotonic())
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        return found, ""

    def _gathering(self, run_dir: Path, meta: Mapping[str, Any], nnodes: int) -> RunIngest:
        return RunIngest(
            run_dir,
            LiveRun(name=run_dir.name),
            self.refusals,
            names=(run_dir.name,),
            nnodes=nnodes,
            fingerprint=self._fingerprint,
            own_spool=str(meta.get("spool", "")),
            keys=self._keys,
            challenges=self._challenges,
            audit=self._audit,
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
        if not one.gathering.ingest.figures.frames:
            return  # nothing came: the run and its summary stay as they are
        task = asyncio.create_task(asyncio.to_thread(self._done, run_dir))
        self._finishing[run_dir] = task
        task.add_done_callback(lambda _: self._finishing.pop(run_dir, None))


def _nnodes(meta: Mapping[str, Any]) -> int | None:
    said = meta.get("nnodes")
    return said if type(said) is int and said > 1 else None


def _sum(figures: list[IngestFigures]) -> IngestFigures:
    names = ("frames", "bytes", "rows", "duplicates", "gaps", "joins")
    return IngestFigures(**{name: sum(getattr(one, name) for one in figures) for name in names})

"""Serving a run while it is recorded: the server, ingest of other nodes, and what clients get when the run ends.

    serve(settings, about, listening, launcher, judge, caller)

One event loop does everything except the rules, which run in a thread, and the sealing of journals, which runs in a
separate process.  To the launcher it reports the nodes it is waiting for.  A hub of one node exits when it is idle: the
launcher starts one without a server instead.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import uvloop

from stepscope.errors import RunError
from stepscope.hub.active_run import recent_run, whole_run
from stepscope.hub.api.auth import Readers, ReaderTokens, tokens_path
from stepscope.hub.app import make_app
from stepscope.hub.audit import AUDIT, AuditLog
from stepscope.hub.ingest.run_ingest import RunIngest
from stepscope.hub.ingest.tail import Tail
from stepscope.hub.judge import RunJudge
from stepscope.hub.launcher import UNSAID, HubSettings, Launcher
from stepscope.hub.limits import Refusals, ServerLimits
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.rules import catch_up, keep_up
from stepscope.hub.open_run import FinalSummary
from stepscope.hub.runs import Runs, final_of
from stepscope.hub.server import Server
from stepscope.store.documents import HubFile, end_run, read_meta
from stepscope.store.inbox.journal import read_positions
from stepscope.store.liveness import processes_alive

__all__ = ["serve"]

TICK_S = 1.0
END_S = 60.0
"""How long other nodes may take to send their last data after the job is over here."""
IDLE_S = 600.0
"""A hub of one node exits after this long without a connection."""
LAST_LOOKS_S = 5.0
"""The longest that clients get to receive the end and to fetch what they still need."""
QUIET_S = 1.0
"""After this long without a request, all clients have everything."""
FINAL_S = 6.0
"""The longest that the final summary may take."""
FINAL_ROWS = 1 << 19
"""The limit for rows in the final summary of several nodes: as many as a slow machine can read in that time."""


def serve(
    settings: HubSettings,
    about: HubFile,
    listening: socket.socket,
    launcher: Launcher,
    judge: RunJudge | None = None,
    caller: socket.socket | None = None,
) -> None:
    """Serve until the run is over, or nobody has connected for a while.

    ``judge``: continues with the run.  ``caller``: a connection that was accepted already.
    """
    uvloop.run(_RunServer(settings, about, listening, launcher, judge, caller).run())


class _RunServer:
    def __init__(
        self,
        settings: HubSettings,
        about: HubFile,
        listening: socket.socket,
        launcher: Launcher,
        judge: RunJudge | None,
        caller: socket.socket | None,
    ) -> None:
        meta = read_meta(settings.run_dir)
        self._settings = settings
        self._listening = listening
        self._about = about
        self._launcher = launcher
        self._caller = caller
        # A hub of one node begins to serve when a reader comes, perhaps after hours; with several, from the start.
        recent = recent_run(settings.run_dir, meta) if not settings.several else None
        live = LiveRun(name=settings.run_dir.name, run_dir=settings.run_dir, meta=meta) if recent is None else recent[0]
        self._poll: Callable[[], object] = Tail(settings.run_dir, live).poll if recent is None else recent[1]
        self._runs = Runs.of_live(settings.run_dir, live, wanted=settings.name)
        self._refusals = Refusals()
        self._audit = AuditLog(path=settings.run_dir / AUDIT)
        self._gathering: RunIngest | None = None
        if settings.several:
            self._gathering = RunIngest(
                settings.run_dir,
                live,
                self._refusals,
                names=tuple(dict.fromkeys((settings.run_dir.name, settings.name or settings.run_dir.name))),
                nnodes=settings.nnodes,
                fingerprint=bytes.fromhex(about.fingerprint),
                own_spool=str(meta.get("spool", "")),
                audit=self._audit,
            )
        catch_up(live, self._poll)
        self._judge = RunJudge(settings.run_dir, live, url=about.url) if judge is None else judge
        self._judge.serve(live)
        if self._gathering is not None:
            self._gathering.ingest.capture = self._judge.captures.ordered

    async def run(self) -> None:
        self._launcher.listen()
        server = self._server()
        serving = asyncio.create_task(server.run())
        whole = self._whole if self._live.partial else None
        judge = self._judge
        feeding = asyncio.create_task(
            keep_up(self._live, poll=self._poll, loop=judge.loop, whole=whole, each_tick=judge.tick)
        )
        alerting = asyncio.create_task(judge.keep_alerting())
        auditing = asyncio.create_task(self._audit.keep())
        try:
            if await self._until_over(server, [serving, feeding]):
                feeding.cancel()
                alerting.cancel()
                await asyncio.gather(feeding, alerting, return_exceptions=True)
                try:
                    await judge.conclude(self._launcher.end or {}, poll=self._poll)
                finally:
                    if server.connections:
                        await self._say_the_end(server)
        finally:
            feeding.cancel()
            server.stop()
            done = await asyncio.gather(serving, feeding, return_exceptions=True)
            alerting.cancel()
            auditing.cancel()
            await asyncio.gather(alerting, auditing, return_exceptions=True)
            if self._gathering is not None:
                self._gathering.close()
            self._audit.close()
        for outcome in done:
            if isinstance(outcome, Exception):
                raise outcome

    @property
    def _live(self) -> LiveRun:
        return self._runs.live()[0].live

    async def _whole(self) -> tuple[LiveRun, Callable[[], object]]:
        live, self._poll = await whole_run(self._runs.live()[0])
        self._judge.follow(live)
        return live, self._poll

    def _server(self) -> Server:
        settings, tls = self._settings, self._settings.tls(self._about)
        readers = Readers(
            self._about.token,
            secure=tls is not None,
            port=self._listening.getsockname()[1],
            named=ReaderTokens(tokens_path(os.environ)),
            audit=self._audit,
        )
        ingest = self._gathering.ingest if self._gathering is not None else None
        app = make_app(self._runs, readers, ingest, refusals=self._refusals, requests=True)
        limits = ServerLimits.for_nodes(settings.nnodes)
        return Server(app, self._listening, tls=tls, limits=limits, refusals=self._refusals, caller=self._caller)

    # -- until the end -----------------------------------------------------------------------------------------------

    async def _until_over(self, server: Server, tasks: list[asyncio.Task[Any]]) -> bool:
        """Wait for the end of the job; return whether it is over.

        A failure in the hub ends the wait too, and so does a long time without a client: the launcher starts another.
        """
        launcher, idle_since_s = self._launcher, time.monotonic()
        while not launcher.stopped and not any(task.done() for task in tasks):
            if launcher.end is not None:
                await self._last_of_others()
                return True
            if launcher.gone and await self._all_gone():
                return True
            await launcher.news(TICK_S)
            now_s = time.monotonic()
            if self._gathering is not None:
                self._gathering.tick()
            if server.connections:
                idle_since_s = now_s
            elif self._gathering is None and not launcher.gone and now_s - idle_since_s >= IDLE_S:
                return False
        return False

    async def _say_the_end(self, server: Server) -> None:
        """Give clients the last findings and the final status, and a moment to fetch more, before exiting."""
        end = self._launcher.end
        final = await self._final(end) if end is not None else None
        status = final[0].get("status") if final is not None else end.get("status") if end is not None else None
        for run in self._runs.live():
            run.conclude(status if isinstance(status, str) else UNSAID, final)
        until_s = time.monotonic() + LAST_LOOKS_S
        answered, answered_s = server.answered, time.monotonic()
        while server.connections and time.monotonic() < min(until_s, answered_s + QUIET_S):
            await asyncio.sleep(TICK_S / 10)
            if server.answered != answered:
                answered, answered_s = server.answered, time.monotonic()

    async def _final(self, end: Mapping[str, Any]) -> FinalSummary | None:
        """Return the final summary of the whole run; None if it takes too long, or others still send."""
        if self._gathering is not None and not self._gathered(self._gathering, end):
            return None
        making = asyncio.create_task(asyncio.to_thread(final_of, self._settings.run_dir))
        await asyncio.wait((making,), timeout=FINAL_S)
        if not making.done():
            making.cancel()
            return None
        # Any error here will also occur in the launcher shortly, which reports it.
        return making.result() if making.exception() is None else None

    def _gathered(self, gathering: RunIngest, end: Mapping[str, Any]) -> bool:
        """Whether a run on several nodes has arrived completely and can be read in time; if so, mark it as ended.

        On one node the launcher has done this; with several, it must wait for the last of the other nodes.
        """
        large = max(read_positions(self._settings.run_dir).steps, self._live.rows_taken) > FINAL_ROWS
        if large or not self._live.watched or gathering.missing():
            return False
        try:
            end_run(self._settings.run_dir, exit_code=end.get("exit_code"), status=end["status"])
        except RunError:
            return False  # the launcher will report that the run cannot be written
        return True

    async def _last_of_others(self) -> None:
        if self._gathering is None:
            return
        until_s = time.monotonic() + END_S
        reported: list[int] = []
        while (missing := self._gathering.missing()) and time.monotonic() < until_s and not self._launcher.stopped:
            if missing != reported:
                reported = missing
                self._launcher.report({"waiting": missing})
            await asyncio.sleep(TICK_S / 4)
            self._gathering.tick()

    async def _all_gone(self) -> bool:
        """Without a launcher: whether no process of the run is left, here or on another node."""
        await asyncio.sleep(TICK_S)
        others = self._gathering is not None and bool(self._gathering.missing())
        return not others and not await asyncio.to_thread(processes_alive, self._settings.run_dir)

"""The hub process: sets up the parts, serves until the job is over, waits for the last data of other nodes, exits.

    launcher ── socket, stdin ──► Server ── IngestApp ── Inbox (on disk) ──► LiveRun ◄── Tail (this node's own files)
                                    └────── the API ◄───────────────────────────┘

One event loop does everything except the rules, which run in a thread, and the sealing of journals, which runs in a
separate process.  On standard input the launcher reports how the job ended; end of file means that the launcher died.
On standard output the hub reports the nodes it is waiting for.  A hub of one node exits when it is idle: the launcher
still listens and starts another.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from stepscope.agent.job_context import Control
from stepscope.errors import HubError, RunError
from stepscope.hub.active_run import recent_run, whole_run
from stepscope.hub.api.auth import Readers, ReaderTokens, tokens_path
from stepscope.hub.app import make_app
from stepscope.hub.audit import AUDIT, AuditLog
from stepscope.hub.ingest.endpoints import HubJournal
from stepscope.hub.ingest.run_ingest import RunIngest
from stepscope.hub.ingest.tail import Tail
from stepscope.hub.limits import Refusals, ServerLimits
from stepscope.hub.live.finding_history import FindingHistory
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.rules import RuleLoop, keep_up
from stepscope.hub.open_run import FinalSummary
from stepscope.hub.runs import Runs, final_of
from stepscope.hub.server import Server
from stepscope.hub.transport import TlsFiles
from stepscope.records import run_clock
from stepscope.records.paths import helper_command
from stepscope.store.documents import HubFile, end_run, read_hub_file, read_meta, remove_hub_file
from stepscope.store.inbox.journal import read_positions
from stepscope.store.liveness import processes_alive

__all__ = ["HubSettings", "serve_run"]

NICE = 5
TICK_S = 1.0
END_S = 60.0
"""How long other nodes may take to send their last data after the job is over here."""
IDLE_S = 600.0
"""A hub of one node exits after this long without a connection."""
ORPHAN_LOOK_S = 1.0
LAST_LOOKS_S = 5.0
"""The longest that clients get to receive the end and to fetch what they still need."""
QUIET_S = 1.0
"""After this long without a request, all clients have everything."""
FINAL_S = 6.0
"""The longest that the final summary may take."""
FINAL_ROWS = 1 << 19
"""The limit for rows in the final summary of several nodes: as many as a slow machine can read in that time."""
LAST_LOOK_S = 2.0
"""The longest that the last evaluation of the rules may take."""
UNSAID = "unfinished"
"""The status of a run whose launcher died."""


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    run_dir: Path
    fd: int
    caller_fd: int | None = None
    """An already accepted connection: the one that caused the launcher to start the hub."""
    nnodes: int = 1
    name: str = ""
    """The requested name of the run; the actual one may differ."""
    certificate: Path | None = None
    key: Path | None = None


def serve_run(settings: HubSettings) -> int:
    """Serve until the run is over; return the exit code.  NotARun or HubError if there is nothing to serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the launcher reports the end
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.nice(NICE)
    about = read_hub_file(settings.run_dir)
    if about is None:
        raise HubError(f"{settings.run_dir} contains no valid hub.json, so the hub's address is unknown")
    with socket.socket(fileno=settings.fd) as listening:
        listening.set_inheritable(False)
        orphaned = uvloop.run(_Hub(settings, about, listening).run())
    if orphaned:
        _finish_alone(settings, _tls(settings, about))
    return 0


class _Hub:
    def __init__(self, settings: HubSettings, about: HubFile, listening: socket.socket) -> None:
        meta = read_meta(settings.run_dir)
        run_clock.follow_run(meta)
        self._settings = settings
        self._listening = listening
        self._about = about
        self._control = Control(0)
        self._told_to_stop = False
        # A hub of one node starts when a reader comes, perhaps after hours; with several it has run from the start.
        recent = recent_run(settings.run_dir, meta) if settings.nnodes == 1 else None
        live = LiveRun(name=settings.run_dir.name, run_dir=settings.run_dir, meta=meta) if recent is None else recent[0]
        self._poll: Callable[[], object] = Tail(settings.run_dir, live).poll if recent is None else recent[1]
        self._rule_loop = RuleLoop(live, history=FindingHistory(HubJournal(settings.run_dir, live)))
        self._runs = Runs.of_live(settings.run_dir, live, wanted=settings.name)
        self._refusals = Refusals()
        self._audit = AuditLog(path=settings.run_dir / AUDIT)
        self._gathering: RunIngest | None = None
        if settings.nnodes > 1:
            self._gathering = RunIngest(
                settings.run_dir,
                self._live,
                self._refusals,
                names=tuple(dict.fromkeys((settings.run_dir.name, settings.name or settings.run_dir.name))),
                nnodes=settings.nnodes,
                fingerprint=bytes.fromhex(about.fingerprint),
                own_spool=str(meta.get("spool", "")),
                audit=self._audit,
            )

    async def run(self) -> bool:
        """Serve; return whether the launcher died meanwhile, so that the hub has to finish the run."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        os.set_blocking(self._control.fd, False)
        loop.add_reader(self._control.fd, self._hear)
        server = self._server()
        serving = asyncio.create_task(server.run())
        whole = self._whole if self._live.partial else None
        feeding = asyncio.create_task(keep_up(self._live, poll=self._poll, loop=self._rule_loop, whole=whole))
        auditing = asyncio.create_task(self._audit.keep())
        try:
            await self._until_over(server, [serving, feeding])
            self._poll()
            self._live.tick()
            if server.connections and not self._told_to_stop:
                await self._say_the_end(server, feeding)
        finally:
            feeding.cancel()
            server.stop()
            done = await asyncio.gather(serving, feeding, return_exceptions=True)
            auditing.cancel()
            await asyncio.gather(auditing, return_exceptions=True)
            if self._gathering is not None:
                self._gathering.close()
            self._audit.close()
        for outcome in done:
            if isinstance(outcome, Exception):
                raise outcome
        return self._control.closed and self._control.end is None and not self._told_to_stop

    @property
    def _live(self) -> LiveRun:
        return self._runs.live()[0].live

    async def _whole(self) -> tuple[LiveRun, Callable[[], object]]:
        live, self._poll = await whole_run(self._runs.live()[0])
        return live, self._poll

    def _server(self) -> Server:
        settings, about = self._settings, self._about
        tls = _tls(settings, about)
        readers = Readers(
            about.token,
            secure=tls is not None,
            port=self._listening.getsockname()[1],
            named=ReaderTokens(tokens_path(os.environ)),
            audit=self._audit,
        )
        ingest = self._gathering.ingest if self._gathering is not None else None
        app = make_app(self._runs, readers, ingest, refusals=self._refusals)
        limits = ServerLimits.for_nodes(settings.nnodes)
        caller = None if settings.caller_fd is None else socket.socket(fileno=settings.caller_fd)
        if caller is not None:
            caller.set_inheritable(False)
        return Server(app, self._listening, tls=tls, limits=limits, refusals=self._refusals, caller=caller)

    # -- until the end -----------------------------------------------------------------------------------------------

    async def _until_over(self, server: Server, tasks: list[asyncio.Task[Any]]) -> None:
        """Wait for the end of the job.  A failure in the hub ends the wait too: the launcher starts another hub."""
        idle_since_s = time.monotonic()
        while not self._told_to_stop and not any(task.done() for task in tasks):
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            if self._gathering is not None:
                self._gathering.tick()
            if server.connections:
                idle_since_s = now_s
            if self._control.end is not None:
                await self._last_of_others()
                return
            if self._control.closed:
                if await self._all_gone():
                    return
            elif self._gathering is None and now_s - idle_since_s >= IDLE_S:
                return

    async def _say_the_end(self, server: Server, feeding: asyncio.Task[None]) -> None:
        """Give clients the last findings and the final status, and a moment to fetch more, before exiting."""
        end = self._control.end
        if end is None and not self._control.closed:
            return  # idle for long, or something failed: the run continues
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        final = await self._final(end) if end is not None else None
        if final is None:
            judging = asyncio.create_task(self._rule_loop.evaluate())
            await asyncio.wait((judging,), timeout=LAST_LOOK_S)
            judging.cancel()
        status = final[0].get("status") if final is not None else end.get("status") if end is not None else None
        for run in self._runs.live():
            run.conclude(status if isinstance(status, str) else UNSAID, final)
        until_s = time.monotonic() + LAST_LOOKS_S
        answered, asked_s = server.answered, time.monotonic()
        while server.connections and time.monotonic() < min(until_s, asked_s + QUIET_S):
            await asyncio.sleep(TICK_S / 10)
            if server.answered != answered:
                answered, asked_s = server.answered, time.monotonic()

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
        told: list[int] = []
        while (missing := self._gathering.missing()) and time.monotonic() < until_s and not self._told_to_stop:
            if missing != told:
                told = missing
                _say({"waiting": missing})
            await asyncio.sleep(TICK_S / 4)
            self._gathering.tick()

    async def _all_gone(self) -> bool:
        """Without a launcher: whether no process of the run is left, here or on another node."""
        await asyncio.sleep(ORPHAN_LOOK_S)
        others = self._gathering is not None and bool(self._gathering.missing())
        return not others and not await asyncio.to_thread(processes_alive, self._settings.run_dir)

    def _hear(self) -> None:
        self._control.feed()
        if self._control.closed:
            asyncio.get_running_loop().remove_reader(self._control.fd)

    def _stop(self) -> None:
        self._told_to_stop = True


def _tls(settings: HubSettings, about: HubFile) -> TlsFiles | None:
    if settings.certificate is None or settings.key is None:
        return None
    fingerprint = bytes.fromhex(about.fingerprint)
    return TlsFiles(certificate=settings.certificate, key=settings.key, fingerprint=fingerprint)


def _finish_alone(settings: HubSettings, tls: TlsFiles | None) -> None:
    """Finish in place of the dead launcher: remove its files and write the summary."""
    remove_hub_file(settings.run_dir)
    if tls is not None:
        tls.remove()
    if settings.nnodes > 1:
        command = helper_command("stepscope", "report", "--quiet", str(settings.run_dir))
        os.execv(command[0], command)


def _say(word: dict[str, Any]) -> None:
    """Report to the launcher, if it is there."""
    try:
        os.write(1, json.dumps(word).encode() + b"\n")
    except OSError:
        pass

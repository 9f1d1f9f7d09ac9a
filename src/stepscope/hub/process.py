"""The hub process of a run: judges it from soon after its start to its end, and serves it when someone connects.

    launcher ── socket, stdin ──► _Unattended: Tail (this node's own files) ── LiveRun ── RunJudge
                                       │ first connection
                                       ▼
                                  RunServer (``serving.py``): the same judge, ingest, and the API

A hub of one node begins small: without a server, on plain asyncio, with a model that has what the rules need.  The
first connection of this user, root or another machine makes it load the server and a model of the whole run.  When no
client has come for long it exits, and the launcher, which still listens, starts a small one.  With several nodes it
serves from the start.  If the launcher died, the hub judges until no process of the run is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from ipaddress import ip_address

from stepscope.errors import HubError, RunUnwritable
from stepscope.hub.judge import RunJudge, small_model
from stepscope.hub.launcher import HubSettings, Launcher
from stepscope.hub.live.rules import keep_up
from stepscope.hub.transport import may_connect, peer_uid
from stepscope.records import run_clock
from stepscope.records.paths import helper_command
from stepscope.records.text import say
from stepscope.store.documents import HubFile, read_hub_file, read_meta, remove_hub_file
from stepscope.store.liveness import processes_alive

__all__ = ["serve_run"]

NICE = 5
TICK_S = 1.0
_AT_ONCE = 256
"""Connections of other users that are closed at once."""


def serve_run(settings: HubSettings) -> int:
    """Judge and serve a run until it is over; return the exit code.  NotARun or HubError if its files are invalid."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the launcher reports the end
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.nice(NICE)
    about = read_hub_file(settings.run_dir)
    if about is None:
        raise HubError(f"{settings.run_dir} contains no valid hub.json, so the hub's address is unknown")
    run_clock.follow_run(read_meta(settings.run_dir))
    launcher = Launcher()
    try:
        _serve_until_over(settings, about, launcher)
    except RunUnwritable as error:
        if not launcher.gone:
            raise  # the launcher starts another hub, which tries again
        say(f"hub: {error}")
    if launcher.gone and not launcher.stopped:
        _finish_alone(settings, about)
    return 0


def _serve_until_over(settings: HubSettings, about: HubFile, launcher: Launcher) -> None:
    with socket.socket(fileno=settings.fd) as listening:
        listening.set_inheritable(False)
        judge, caller = None, None
        if not settings.several:
            unattended = _Unattended(settings, about, listening, launcher)
            asyncio.run(unattended.run())
            judge, caller = unattended.judge, unattended.caller
        if settings.several or caller is not None:
            from stepscope.hub.serving import serve  # loads the server

            serve(settings, about, listening, launcher, judge, caller)


class _Unattended:
    """Judges a run of one node until it is over, or until a client connects."""

    def __init__(self, settings: HubSettings, about: HubFile, listening: socket.socket, launcher: Launcher) -> None:
        self._run_dir = settings.run_dir
        self._listening = listening
        self._launcher = launcher
        live, self._poll = small_model(settings.run_dir)
        self.judge = RunJudge(settings.run_dir, live, url=about.url)
        self.caller: socket.socket | None = None
        """The first connection that may be served."""

    async def run(self) -> None:
        launcher, live = self._launcher, self.judge.live
        launcher.listen()
        self._listening.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listening, self._accept)
        judging = keep_up(live, poll=self._poll, loop=self.judge.loop, each_tick=self.judge.tick)
        feeding = asyncio.create_task(judging)
        alerting = asyncio.create_task(self.judge.keep_alerting())
        try:
            while not (feeding.done() or launcher.stopped or launcher.end or self.caller):
                await launcher.news(TICK_S)
                if launcher.gone and not await asyncio.to_thread(processes_alive, self._run_dir):
                    break
        finally:
            asyncio.get_running_loop().remove_reader(self._listening)
            feeding.cancel()
            alerting.cancel()
            outcome, _ = await asyncio.gather(feeding, alerting, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome
        if self.caller is None and not launcher.stopped:
            await self.judge.conclude(launcher.end or {}, poll=self._poll)

    def _accept(self) -> None:
        host, port = self._listening.getsockname()[:2]
        for _ in range(_AT_ONCE):
            try:
                caller, peer = self._listening.accept()
            except OSError:
                return
            if may_connect(peer_uid(peer[0], peer[1], port), loopback=ip_address(host).is_loopback):
                caller.set_inheritable(False)
                self.caller = caller
                asyncio.get_running_loop().remove_reader(self._listening)
                self._launcher.wake()
                return
            caller.close()


def _finish_alone(settings: HubSettings, about: HubFile) -> None:
    """Finish in place of the dead launcher: remove its files and write the summary of several nodes."""
    remove_hub_file(settings.run_dir)
    if (tls := settings.tls(about)) is not None:
        tls.remove()
    if settings.several:
        command = helper_command("stepscope", "report", "--quiet", str(settings.run_dir))
        os.execv(command[0], command)

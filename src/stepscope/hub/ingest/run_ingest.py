"""Ingest for one run on several nodes, and for a folder of runs: inboxes, silent nodes, journals to seal.

    gathering = RunIngest(run_dir, live, refusals, …)     # after a restart, ``live`` gets what was already received
    gathering.ingest                                      # for the application
    gathering.tick()                                      # once a second
    gathering.missing()                                   # at the end: nodes that have not said bye

A separate process rewrites each full journal in columns (``store/inbox/parts.py``), one at a time, so that sealing
takes neither memory nor time from the hub.

A folder of runs: ``stepscope serve --accept``.

Nodes deliver later what they could not send while their run's own hub was there.  A run in the folder that was made
for several nodes gets an inbox when an agent joins it.  The inbox is closed when nothing came for a while, and what
came is merged with the rest (``done``).  While the run's launcher is alive, agents must send to the run's own hub.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from stepscope.errors import NotARun, StepscopeError
from stepscope.hub.audit import AuditLog
from stepscope.hub.ingest.auth import ADDRESSES, SILENT_S, Admission, Challenges, SenderLimits
from stepscope.hub.ingest.endpoints import (
    HubJournal,
    IngestApp,
    IngestFigures,
    answer_hello,
    answer_refused,
    for_agents,
    no_challenge,
    note_end,
    note_refused,
)
from stepscope.hub.ingest.tail import InboxTail
from stepscope.hub.limits import Buckets, Refusals, Refused, address_of, source_of
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.server import known
from stepscope.records import run_clock
from stepscope.records.paths import helper_command, helper_environment
from stepscope.store.documents import read_meta
from stepscope.store.inbox.journal import journals
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.live.ring_files import read_sidecars
from stepscope.store.liveness import launcher_alive
from stepscope.wire.frames import HELLO_BYTES
from stepscope.wire.handshake import HELLO_PATH, KeyRing

__all__ = ["FolderIngest", "NodeWatch", "RunIngest"]

# -- node watch -------------------------------------------------------------------------------------------------------
# Checks once a second which nodes fell silent, what was refused and which ranks are on this node, and saves
# ``nodes.json``.

ABSENT_S: Final = 30.0
"""When to report the nodes that never connected."""
_SAVE_S: Final = 3.0
_COST: Final = 50
"""Writing ``nodes.json`` may take one in this many seconds: with many nodes it is written less often."""


class NodeWatch:
    """Call ``tick`` about once a second and ``close`` at the end, in the hub's event loop."""

    def __init__(
        self,
        *,
        admission: Admission,
        inbox: Inbox,
        journal: HubJournal,
        refusals: Refusals,
        audit: AuditLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admission, self._inbox, self._journal, self._refusals = admission, inbox, journal, refusals
        self._audit = audit
        self._clock = clock
        self._save_at_s = 0.0
        self._absent_at_s = clock() + ABSENT_S
        self._told: set[str] = set()

    def tick(self) -> None:
        for sender in self._admission.look():
            silent_s = round(sender.silent_s(self._clock()), 1)
            self._journal.event("node_lost", node=sender.node, host=sender.host, silent_s=silent_s)
            if self._audit is not None:
                note_end(self._audit, self._admission.names[0], sender, "silent")
        if self._clock() >= self._absent_at_s:
            self._absent_at_s = float("inf")
            came = {node.node for node in self._inbox.nodes()}
            came |= {sender.node for sender in self._admission.senders.values()}
            if absent := sorted(set(range(1, self._admission.nnodes)) - came):
                self._journal.event("node_absent", nodes=absent)
        for reason, count in self._counts().items():
            if reason not in self._told:
                self._told.add(reason)
                self._journal.event("refusals", reason=reason, count=count)
        if self._clock() >= self._save_at_s:
            self._claim_own_ranks()
            self._save()
        self._journal.flush()

    def close(self) -> None:
        """Write everything known, one last time."""
        if self._audit is not None:
            for sender in self._admission.senders.values():
                if not (sender.bye or sender.lost):
                    note_end(self._audit, self._admission.names[0], sender, "the hub ends")
        if self._refusals.total:
            self._journal.event("refused_in_all", counts=self._counts())
        self._save()
        self._journal.flush()

    def _claim_own_ranks(self) -> None:
        """Claim the ranks of the hub's own node, which sends no frames."""
        spool = self._admission.local_spool
        if spool:
            rings, _ = read_sidecars(self._journal.run_dir)
            self._admission.claims.take(spool, rings.values())

    def _save(self) -> None:
        began_s = self._clock()
        try:
            self._inbox.save_nodes(refused=self._counts())
        except OSError as error:
            self._journal.refused(error)
        took_s = self._clock() - began_s
        self._save_at_s = began_s + max(_SAVE_S, took_s * _COST)

    def _counts(self) -> dict[str, int]:
        return {reason: count for reason, count in self._refusals.by_reason().items() if count}


# -- run ingest -------------------------------------------------------------------------------------------------------

UNHEARD_S = 5.0
"""At the end, how long to wait for a node that never connected, in case the job was very short."""
SEAL_AGAIN_S = 60.0
"""The delay after a failed attempt to seal a journal."""
SEAL_END_S = 20.0
"""At the end, how long to wait for a journal being sealed; otherwise it is sealed with the run."""


class RunIngest:
    def __init__(
        self,
        run_dir: Path,
        live: LiveRun,
        refusals: Refusals,
        *,
        names: Sequence[str],
        nnodes: int,
        fingerprint: bytes,
        own_spool: str,
        keys: KeyRing | None = None,
        challenges: Challenges | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """UsageError if there is no key, OSError if the inbox cannot be read or written.

        ``keys``, ``challenges``: from a server that admits agents to several runs.
        """
        self._run_dir = run_dir
        self._live = live
        self._own_spool = own_spool
        self._nnodes = nnodes
        self._inbox = Inbox(run_dir)
        self.keys = keys if keys is not None else KeyRing(os.environ)
        self._admission = Admission(
            keys=self.keys,
            certificate=fingerprint,
            names=names,
            nnodes=nnodes,
            local_spool=own_spool,
            challenges=challenges,
        )
        self._admission.recall([node.spool for node in self._inbox.nodes()])
        InboxTail(run_dir, live, self._admission.claims).catch_up()
        journal = HubJournal(run_dir, live)
        journal.event("hub_start", pid=os.getpid())
        self._watch = NodeWatch(
            admission=self._admission, inbox=self._inbox, journal=journal, refusals=refusals, audit=audit
        )
        self.ingest = IngestApp(
            admission=self._admission, inbox=self._inbox, live=live, journal=journal, refusals=refusals, audit=audit
        )
        self._own_keys = keys is None
        if self._own_keys:
            self.keys.start()
        self._sealing: subprocess.Popen[bytes] | None = None
        self._seal_at_s = 0.0
        self._ending_s: float | None = None

    def tick(self) -> None:
        self._admission.watched = self._live.watched
        self._watch.tick()
        self._seal()

    def missing(self) -> list[int]:
        """List the nodes that may still send something; first called when the job is over here."""
        if self._ending_s is None:
            self._ending_s = time.monotonic()
        awaited = {sender.node for sender in self._admission.awaited()}
        # Include nodes that joined before the hub was restarted and are about to rejoin.
        heard_ns = run_clock.wall_ns() - int(SILENT_S * 1e9)
        known = [node for node in self._inbox.nodes() if node.spool != self._own_spool and not node.replaced_by]
        joined = self._admission.senders
        awaited |= {n.node for n in known if n.spool not in joined and n.bye is None and n.heard_wall_ns > heard_ns}
        if time.monotonic() - self._ending_s < UNHEARD_S:
            awaited |= set(range(1, self._nnodes)) - {node.node for node in known}
        return sorted(awaited)

    def close(self) -> None:
        if self._own_keys:
            self.keys.stop()
        self._watch.close()
        self._inbox.close()
        if self._sealing is not None:
            try:
                self._sealing.wait(SEAL_END_S)
            except subprocess.TimeoutExpired:
                self._sealing.kill()
                self._sealing.wait()

    def _seal(self) -> None:
        if self._sealing is not None:
            if self._sealing.poll() is None:
                return
            self._seal_at_s = time.monotonic() + (SEAL_AGAIN_S if self._sealing.returncode else 0.0)
            self._sealing = None
        full = [number for number in journals(self._run_dir, after=0) if number < self._inbox.journal]
        if full and time.monotonic() >= self._seal_at_s:
            words = helper_command("stepscope.store.inbox.parts", str(self._run_dir), str(min(full)))
            self._sealing = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=helper_environment(os.environ)
            )


# -- a folder of runs -------------------------------------------------------------------------------------------------

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

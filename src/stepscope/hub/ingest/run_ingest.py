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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from stepscope.errors import NotARun, RunError, StepscopeError, UsageError
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
from stepscope.hub.live.digests import DigestLog
from stepscope.hub.live.lines import LayerLines, Lines
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.step_arrays import Planes
from stepscope.hub.server import known
from stepscope.records import run_clock
from stepscope.records.paths import helper_command, helper_environment
from stepscope.records.text import checked_name
from stepscope.store.create import create_run_at
from stepscope.store.documents import JOINED, RunStatus, end_run, read_meta, read_nodes
from stepscope.store.inbox.journal import journals
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.live.ring_files import read_sidecars
from stepscope.store.liveness import launcher_alive
from stepscope.wire.frames import HELLO_BYTES, JOIN_BYTES
from stepscope.wire.handshake import HELLO_PATH, PROOF_HEADER, Join, KeyRing

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

    @property
    def all_ended(self) -> bool:
        """Whether nodes joined, and all of them said bye."""
        senders = self._admission.senders.values()
        return bool(senders) and all(sender.bye for sender in senders)

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
TEAM_IDLE_S = 300.0
"""The same for a run that is still recorded: its node, or the network, may be back soon."""
TICK_S = 1.0
MOST_OPEN = 16
MOST_JOINED = 2000
"""Of runs that joined by themselves."""
UNREAD_BYTES = 256 << 10
"""For the parts of a model that nobody reads: clients read these runs from their files."""
_BEFORE = "/api/v1/runs/"


@dataclass(kw_only=True)
class _Open:
    gathering: RunIngest
    heard_s: float
    joined: bool = False
    """Whether it joined by itself."""


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
        team_folder: Path | None = None,
    ) -> None:
        """``run_dir_of``: the folder of a run, by name.  ``done``: called in a thread with each closed run.

        ``team_folder``: where to put runs that join by themselves (``cli/launch/team_hub.py``); None: they may not.

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
        self._team_folder = team_folder
        self._joining = asyncio.Lock()
        self._one_at_a_time = asyncio.Lock()
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
            taking, receive = await self._admitted(scope, receive)
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

    async def _admitted(self, scope: Scope, receive: Receive) -> tuple[_Open, Receive]:
        """Return the run for a client with the key (join) or a token (frames), and the request's body.

        Refused reveals no runs.
        """
        name, _, what = scope["path"].removeprefix(_BEFORE).rpartition("/")
        token = dict(scope["headers"]).get(b"authorization", b"")
        run_dir = self._run_dir_of(name)
        if what == "frames":
            found = None if run_dir is None else self._open.get(run_dir)
            if found is None or found.gathering.ingest.admission.sender_of(token) is None:
                raise Refused(401, "token", "the token is not valid for this hub; join again")
            return found, receive
        if not self._challenges.bears(token):
            raise no_challenge()
        known(scope)
        if run_dir is None and self._team_folder is not None:
            run_dir, receive = await self._begin(name, scope, receive)
        taking, why = (None, "no such run on this hub") if run_dir is None else await self._taking(run_dir)
        if taking is None:
            raise Refused(404, "join", why)
        return taking, receive

    async def _begin(self, name: str, scope: Scope, receive: Receive) -> tuple[Path | None, Receive]:
        """Make the folder of a run that joins by itself, for a join that is signed with the key."""
        assert self._team_folder is not None
        body = b""
        async for piece in Request(scope, receive).stream():
            body += piece
            if len(body) > JOIN_BYTES:
                raise Refused(413, "body_large", f"more than {JOIN_BYTES} bytes")

        async def replay() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        proof = dict(scope["headers"]).get(PROOF_HEADER.lower().encode(), b"").decode("latin-1")
        join = self._challenges.join_of(body, proof)
        if join.run != name or (join.node, join.nnodes) != TEAM_PLACE:
            return None, replay
        async with self._joining:
            if (found := self._run_dir_of(name)) is not None:
                return found, replay
            if sum(taking.joined for taking in self._open.values()) >= MOST_JOINED:
                raise Refused(429, "busy", "too many runs are being received at once", retry_s=_BUSY_S)
            try:
                return await asyncio.to_thread(_new_run, self._team_folder / checked_name(name), join), replay
            except UsageError as error:
                raise Refused(400, "join", str(error)) from error
            except (StepscopeError, OSError) as error:
                raise Refused(507, "disk", "the hub cannot write to its disk", retry_s=_BUSY_S) from error

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
        if sum(not taking.joined for taking in self._open.values()) >= MOST_OPEN:
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
        joined = meta.get(JOINED) is True and meta.get("end") is None
        found = self._open[run_dir] = _Open(gathering=gathering, heard_s=time.monotonic(), joined=joined)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        return found, ""

    def _gathering(self, run_dir: Path, meta: Mapping[str, Any], nnodes: int) -> RunIngest:
        return RunIngest(
            run_dir,
            _unread_model(run_dir.name),
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
            agents = sum(taking.gathering.ingest.admission.agents for taking in self._open.values())
            for run_dir, taking in list(self._open.items()):
                admission = taking.gathering.ingest.admission
                admission.elsewhere = agents - admission.agents
                taking.gathering.tick()
                idle_s = max(self._idle_s, TEAM_IDLE_S) if taking.joined else self._idle_s
                if time.monotonic() - taking.heard_s > idle_s or (taking.joined and taking.gathering.all_ended):
                    self._shut(run_dir)

    def _shut(self, run_dir: Path) -> None:
        taking = self._open.pop(run_dir)
        self._before = _sum([self._before, taking.gathering.ingest.figures])
        taking.gathering.close()
        if not taking.gathering.ingest.figures.frames:
            return  # nothing came: the run and its summary stay as they are
        task = asyncio.create_task(self._finish(run_dir, joined=taking.joined))
        self._finishing[run_dir] = task
        task.add_done_callback(lambda _: self._finishing.pop(run_dir, None))

    async def _finish(self, run_dir: Path, *, joined: bool) -> None:
        """Merge what came: one run after the other, since each takes memory."""
        async with self._one_at_a_time:
            if joined:
                await asyncio.to_thread(_end_joined, run_dir)
            await asyncio.to_thread(self._done, run_dir)


TEAM_PLACE: Final = (1, 2)
"""Node and number of nodes of such a run: its hub is node 0, without ranks."""
_BUSY_S: Final = 5.0
_DESCRIBED: Final = {
    "command": list,
    "cwd": str,
    "python": str,
    "executable": str,
    "platform": str,
    "environment": dict,
}
"""What a join says about the run, and the type of each."""
_CHARS: Final = 128
"""In a name that a join says."""
OLDEST_NS: Final = 90 * 86_400 * 10**9
"""A run that says it began earlier began now: the clock of its node is wrong."""
STATUSES: Final[tuple[RunStatus, ...]] = get_args(RunStatus)


def _new_run(run_dir: Path, join: Join) -> Path:
    """The folder of a run that its node described; RunUnwritable if it cannot be made."""
    about = {name: join.meta[name] for name, kind in _DESCRIBED.items() if isinstance(join.meta.get(name), kind)}
    more = {
        **about,
        # None where the node did not say it: the hub's own would be wrong.
        **{name: _short(join.meta.get(name)) or None for name in ("driver", "file_system")},
        "git": _git(join.meta.get("git")),
        **_begun(join.meta.get("created_wall_ns")),
        "nnodes": TEAM_PLACE[1],
        "user": _short(join.meta.get("user")),
        "host": join.host,
        JOINED: True,
    }
    return create_run_at(run_dir, run_dir / "rings", [], version=join.stepscope, more=more).run_dir


def _short(text: object) -> str:
    return text if isinstance(text, str) and text.isprintable() and len(text) <= _CHARS else ""


def _git(reported: object) -> dict[str, Any] | None:
    if not isinstance(reported, Mapping) or not (commit := _short(reported.get("commit"))):
        return None
    dirty = reported.get("dirty")
    branch = _short(reported.get("branch")) or None
    return {"commit": commit, "branch": branch, "dirty": dirty if isinstance(dirty, bool) else None}


def _begun(wall_ns: object) -> dict[str, int]:
    """When a run began, as its node said: it may join late, or be sent when it is over."""
    here = run_clock.begun()
    ago_ns = here["created_wall_ns"] - wall_ns if type(wall_ns) is int else 0
    if not 0 < ago_ns < OLDEST_NS:
        return {}
    return {"created_wall_ns": here["created_wall_ns"] - ago_ns, "created_mono_ns": here["created_mono_ns"] - ago_ns}


def _end_joined(run_dir: Path) -> None:
    """Record how a run ended, as its node said; without a word from it the run is unfinished."""
    byes = [node.bye for node in read_nodes(run_dir) if node.bye is not None and not node.replaced_by]
    if not byes:
        return
    reported, code = byes[-1].get("status"), byes[-1].get("exit_code")
    status = next((known for known in STATUSES if known == reported), None)
    if status is not None:
        with suppress(RunError):  # what is wrong with the folder is reported when it is finalized
            began_ns, ended_ns = read_meta(run_dir)["created_wall_ns"], byes[-1].get("wall_ns")
            known = isinstance(ended_ns, int) and began_ns < ended_ns <= run_clock.wall_ns()
            end_run(
                run_dir,
                exit_code=code if isinstance(code, int) else None,
                status=status,
                wall_ns=ended_ns if known else None,
            )


def _unread_model(name: str) -> LiveRun:
    """A model as a place for what is received: the runs of a folder are read from their files."""
    return LiveRun(
        name=name,
        planes=Planes(budget_bytes=UNREAD_BYTES, room=1),
        digests=DigestLog(1),
        received=Lines(most_bytes=UNREAD_BYTES, most_of_node=1, layers=LayerLines(UNREAD_BYTES)),
    )


def _nnodes(meta: Mapping[str, Any]) -> int | None:
    said = meta.get("nnodes")
    return said if type(said) is int and said > 1 else None


def _sum(figures: list[IngestFigures]) -> IngestFigures:
    names = ("frames", "bytes", "rows", "duplicates", "gaps", "joins")
    return IngestFigures(**{name: sum(getattr(one, name) for one in figures) for name in names})

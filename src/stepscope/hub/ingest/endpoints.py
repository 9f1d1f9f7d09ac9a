"""The endpoints for agents: ``POST …/hello``, ``…/join``, ``…/frames``; and the hub's own events about a run.

    token ── body, within limits ── read_frame ── its own spool and ranks? ── Inbox.accept ── LiveRun ── answer

Plain ASGI, since a large job sends 600 requests a second.  Everything runs in the hub's event loop, one frame after
the other.  A frame is accepted completely or not at all: a refusal is counted (``hub/limits.py``) and changes nothing
else.  ``in_front`` puts these endpoints in front of the rest of the hub.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from stepscope.errors import FrameError
from stepscope.hub.audit import AuditLog, route_and_run
from stepscope.hub.ingest.auth import Admission, Admitted, Challenges, Sender
from stepscope.hub.limits import Refusals, Refused, address_of, plain_address, source_of
from stepscope.hub.server import AGENT, known
from stepscope.records import run_clock
from stepscope.records.files import folder_mode
from stepscope.records.text import duration_text, say
from stepscope.store.file_io import append_jsonl
from stepscope.store.inbox.journal import BlockRows, sidecars_of
from stepscope.store.inbox.receiver import Accepted, Gap, Inbox
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.paths import EVENTS, HUB_EVENTS
from stepscope.wire.frames import FRAME_BYTES, HELLO_BYTES, JOIN_BYTES, Frame, read_frame
from stepscope.wire.handshake import HELLO_PATH, PROOF_HEADER

__all__ = ["Agents", "HubJournal", "IngestApp", "IngestFigures", "in_front"]


# -- hub events -------------------------------------------------------------------------------------------------------
# Events that the hub itself writes about a run: nodes that join, fall silent or return, clock skew, refusals.
#
# They have a separate file, since ``events.jsonl`` belongs to the agent.  Events that cannot be written are kept,
# within bounds, and retried; the live model gets them at once.

_WAITING: Final = 2000
_NODE: Final = "0"


class LineSink(Protocol):
    """The part of ``LiveRun`` that takes lines."""

    def lines(self, file: str, lines: Sequence[bytes], *, node: str, offset_ns: int) -> None: ...


class HubJournal:
    def __init__(self, run_dir: Path, live: LineSink, *, wall: Callable[[], int] = run_clock.wall_ns) -> None:
        self.run_dir = run_dir
        self._path = run_dir / HUB_EVENTS
        self._live = live
        self._wall = wall
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_WAITING)
        self._full = False

    def event(self, event: str, **fields: Any) -> None:
        if line := _line(event, fields):
            say(line)
        record = {"schema": 1, "wall_ns": self._wall(), "event": event, **fields}
        self._waiting.append(record)
        self._live.lines(EVENTS, [json.dumps(record).encode()], node=_NODE, offset_ns=0)

    def flush(self) -> None:
        """Write the pending events, if possible."""
        if not self._waiting:
            return
        try:
            self._path.parent.mkdir(mode=folder_mode(self.run_dir), exist_ok=True)  # a run on one node has none yet
            append_jsonl(self._path, self._waiting)
        except OSError as error:
            self.refused(error)
            return
        self._waiting.clear()

    def refused(self, error: OSError) -> None:
        """Report that the disk cannot be written; only once until it can be again."""
        if self._full:
            return
        self._full = True
        message = f"the hub cannot write to {self._path.parent}: {error.strerror}"
        self.event("warning", message=message)
        say(f"{message}; the other nodes keep their data")

    def accepted(self) -> None:
        """Note that a frame was written."""
        if self._full:
            self._full = False
            self.event("warning", message=f"the hub can write to {self._path.parent} again")


def _line(event: str, fields: Mapping[str, Any]) -> str:
    """Return the message for the user at node 0 while the job runs; empty: it can wait for the summary."""
    who = f"node {fields.get('node')} ({fields.get('host')})"
    if event == "node_lost":
        return f"{who} has sent nothing for {duration_text(fields['silent_s'], whole=True)}"
    if event == "node_back":
        return f"{who} is back"
    if event == "node_absent":
        numbers = ", ".join(str(number) for number in fields["nodes"][:8])
        return f"waiting for nodes that have not joined: {numbers}{' …' if len(fields['nodes']) > 8 else ''}"
    if event == "node_bye" and (end := fields["end"]).get("status") not in ("finished", "orphaned", None):
        return f"{who} ended: {end['status']} (exit code {end.get('exit_code')})"
    if event == "refused" and fields["reason"] == "key":
        return f"{fields['source']} tried to join with a different key; see docs/several-nodes.md"
    return ""


# -- endpoints --------------------------------------------------------------------------------------------------------

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_RUNS: Final = "/api/v1/runs/"
_BODIES_BYTES: Final = 128 << 20
"""The limit for all bodies being read at one time."""
_DISK_RETRY_S: Final = 5.0
_BUSY_RETRY_S: Final = 1.0
_SKEW_NS: Final = 1_000_000_000
_LARGEST: Final = (1 << 63) - 1
_JSON: Final = (b"content-type", b"application/json")
_CLOSE: Final = (b"connection", b"close")
_NUMBERS: Final = ("pid", "start_ticks", "anchor_mono_ns", "anchor_wall_ns", "live_since_ns", "live_step")


class Live(LineSink, Protocol):
    """The part of ``LiveRun`` that ingest feeds."""

    @property
    def watched(self) -> bool: ...

    def ring(self, about: RingSidecar, *, node: str) -> None: ...

    def rows(self, taken: BlockRows) -> None: ...


@dataclass(slots=True)
class IngestFigures:
    """What was received since the hub started, for ``/metrics``."""

    frames: int = 0
    bytes: int = 0
    rows: int = 0
    duplicates: int = 0
    """Parts that were already there."""
    gaps: int = 0
    """Frames that began too late; the answer gives the position to resume from."""
    joins: int = 0


class IngestApp:
    def __init__(
        self,
        *,
        admission: Admission,
        inbox: Inbox,
        live: Live,
        journal: HubJournal,
        refusals: Refusals,
        audit: AuditLog | None = None,
        wall: Callable[[], int] = run_clock.wall_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.admission = admission
        self.refusals = refusals
        self._audit = audit
        self.figures = IngestFigures()
        self._inbox, self._live, self._journal = inbox, live, journal
        self._wall, self._clock = wall, clock
        self.capture: Callable[[], bytes] = lambda: b"null"
        """The order of a capture that agents get, as JSON; set when the run's judge is there."""
        self._reading = 0
        self._paths = {f"{_RUNS}{name}/{what}": what for name in admission.names for what in ("join", "frames")}

    def wants(self, path: str) -> bool:
        """Whether a path is for agents, including those of other runs, which get an error."""
        return path in self._paths or for_agents(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = address_of(scope) or "local"
        sender = None
        try:
            path = scope["path"]
            if scope["method"] != "POST":
                raise Refused(405, "http", "agents must use POST")
            if path == HELLO_PATH:
                await self._hello(scope, receive, send, address)
                return
            token = _header(scope, b"authorization")
            if path.endswith("/join"):
                if not self.admission.challenges.bears(token):
                    raise no_challenge()
                known(scope)
                self._check_run(path)
                await self._join(scope, receive, send, address)
                return
            sender = self.admission.sender_of(token)
            if sender is None:
                refused = Refused(401, "token", "the token is not valid for this hub; join again")
                if not self.admission.was_ours(token):
                    raise refused
                await answer_refused(send, refused, close=False)
                return
            known(scope)
            self._check_run(path)
            scope.setdefault("state", {})[AGENT] = True
            await self._frames(sender, scope, receive, send)
        except Refused as refused:
            source = address if sender is None else f"node {sender.node}"
            first = self.refusals.count(refused.reason, source)
            if first if refused.tell is None else refused.tell:
                self._journal.event("refused", reason=refused.reason, why=refused.why, source=source)
            if sender is not None:
                self._inbox.refuse(sender.spool)
            note_refused(self._audit, scope, refused, address, sender)
            await answer_refused(send, refused, close=refused.status in (401, 403))

    # -- joins -------------------------------------------------------------------------------------------------------

    def _check_run(self, path: str) -> None:
        """Refuse unknown runs; called only for authenticated clients, since it reveals which runs exist."""
        if path not in self._paths:
            raise Refused(404, "join", "no such run on this hub")

    async def _hello(self, scope: Scope, receive: Receive, send: Send, address: str) -> None:
        self.admission.may_join(address)
        body = await self._body(scope, receive, HELLO_BYTES)
        if body is not None:
            await answer_hello(self.admission.challenges, scope, body, send)

    async def _join(self, scope: Scope, receive: Receive, send: Send, address: str) -> None:
        body = await self._body(scope, receive, JOIN_BYTES)
        if body is None:
            return
        proof = _header(scope, PROOF_HEADER.encode()).decode("latin-1")
        hub_address = plain_address(scope["server"][0]) if scope.get("server") else ""
        admitted = self.admission.join(
            body, proof, address=address, hub_address=hub_address, positions=self._inbox.positions
        )
        scope.setdefault("state", {})[AGENT] = True
        self.figures.joins += 1
        self._tell_join(admitted)
        if self._audit is not None:
            if (before := admitted.before) is not None and not (before.bye or before.lost):
                note_end(self._audit, self.admission.names[0], before, "replaced")
            note_begin(self._audit, self.admission.names[0], admitted.sender, scope["path"])
        proved = (PROOF_HEADER.encode(), admitted.proof.encode())
        await _answer(send, 200, admitted.body, proved)

    def _tell_join(self, admitted: Admitted) -> None:
        sender, join = admitted.sender, admitted.join
        who = {"node": sender.node, "host": sender.host, "address": sender.address}
        if admitted.how != "late":
            self._inbox.introduce(
                sender.spool, node=sender.node, host=sender.host, address=sender.address, meta=join.meta
            )
        if admitted.how == "replaced" and admitted.before is not None:
            self._journal.event("node_replaced", **who, before=admitted.before.host)
        elif admitted.how != "again":
            self._journal.event("node_joined", **who, late=admitted.how == "late")

    # -- frames ------------------------------------------------------------------------------------------------------

    async def _frames(self, sender: Sender, scope: Scope, receive: Receive, send: Send) -> None:
        received_wall_ns = self._wall()
        now_s = self._clock()
        wait_s = sender.frames.take(1, now_s)
        if wait_s > 0:
            raise Refused(429, "rate", "too many frames from this node", retry_s=wait_s)
        raw = await self._body(scope, receive, FRAME_BYTES)
        if raw is None:
            return
        wait_s = sender.volume.take(len(raw), now_s)
        if wait_s > 0:
            raise Refused(429, "rate", "too many bytes from this node", retry_s=wait_s)
        try:
            frame = read_frame(raw)
            self._check(sender, frame)
            accepted = self._inbox.accept(frame, raw)
        except Gap as gap:
            self.figures.gaps += 1
            self._hear(sender, frame)
            await _answer(send, 409, json.dumps({"positions": asdict(gap.positions)}).encode())
            return
        except FrameError as error:
            raise Refused(400, "frame", str(error)) from error
        except OSError as error:
            self._journal.refused(error)
            raise Refused(507, "disk", "the hub cannot write to its disk", retry_s=_DISK_RETRY_S) from error
        self._take(sender, frame, accepted, len(raw))
        await _answer(send, 200, self._acknowledged(sender, received_wall_ns))

    def _check(self, sender: Sender, frame: Frame) -> None:
        """Check that the frame names its own sender (else Refused) and that its rings are valid (else FrameError)."""
        head = frame.head
        if head.spool != sender.spool or head.node != sender.node:
            raise Refused(403, "spool", f"node {sender.node} sent a frame in the name of node {head.node}")
        if sender.local and frame.parts:
            raise FrameError("the hub reads this spool directly")
        for part in frame.parts:
            if part.kind != "rings":
                continue
            rings = sidecars_of(part)
            for about in rings:
                _check_ring(about)
            refused = self.admission.contest(sender, rings)
            if refused is not None:
                raise refused

    def _take(self, sender: Sender, frame: Frame, accepted: Accepted, size: int) -> None:
        """Put an accepted frame, which is now on disk, into the model."""
        sender.taken_frames += 1
        sender.taken_bytes += size
        self._journal.accepted()
        figures, node = self.figures, str(sender.node)
        figures.frames += 1
        figures.bytes += size
        figures.duplicates += accepted.duplicate_parts
        self.admission.claims.take(sender.spool, accepted.new_rings)
        for about in accepted.new_rings:
            self._live.ring(about, node=node)
        for block in accepted.blocks:
            figures.rows += len(block.slots)
            self._live.rows(block)
        for file, lines in accepted.lines.items():
            self._live.lines(file, lines, node=node, offset_ns=frame.head.offset_ns or 0)
        self._hear(sender, frame)

    def _hear(self, sender: Sender, frame: Frame) -> None:
        head = frame.head
        said_bye = sender.bye
        silent_s = sender.silent_s(self._clock())
        who = {"node": sender.node, "host": sender.host}
        if self.admission.heard(sender, bye=head.bye is not None):
            self._journal.event("node_back", **who, silent_s=round(silent_s, 1))
            if self._audit is not None:
                note_begin(self._audit, self.admission.names[0], sender, f"{_RUNS}{self.admission.names[0]}/frames")
        if sender.bye and not said_bye:
            self._journal.event("node_bye", **who, end=dict(head.bye or {}))
            if self._audit is not None:
                note_end(self._audit, self.admission.names[0], sender, "bye")
        if not sender.skewed and head.offset_ns is not None and head.rtt_ns is not None:
            off_ns = abs(head.offset_ns) - abs(head.rtt_ns) // 2
            if off_ns > _SKEW_NS:
                sender.skewed = True
                self._journal.event("clock_skew", **who, offset_ns=head.offset_ns, rtt_ns=head.rtt_ns)

    def _acknowledged(self, sender: Sender, received_wall_ns: int) -> bytes:
        peers = self.admission.peers_for(sender)
        listed = b"null" if peers is None else json.dumps([asdict(peer) for peer in peers]).encode()
        form = b'{"next_s":%.3f,"watched":%b,"received_wall_ns":%d,"sent_wall_ns":%d,"peers":%b,"capture":%b}'
        return form % (
            self.admission.next_s,
            b"true" if self._live.watched else b"false",
            received_wall_ns,
            self._wall(),
            listed,
            self.capture(),
        )

    async def _body(self, scope: Scope, receive: Receive, most: int) -> bytes | None:
        """Read the body; None if the sender left.  Refused if it is too large, or too much is being read."""
        said = _header(scope, b"content-length")
        length = int(said) if said.isdigit() else most
        if length > most:
            raise Refused(413, "body_large", f"more than {most} bytes")
        if self._reading + length > _BODIES_BYTES:
            raise Refused(429, "busy", "the hub is busy", retry_s=_BUSY_RETRY_S)
        self._reading += length
        try:
            pieces, size = [], 0
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                pieces.append(message["body"])
                size += len(message["body"])
                if size > most:
                    raise Refused(413, "body_large", f"more than {most} bytes")
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            self._reading -= length


def who_of(sender: Sender) -> str:
    return f"node {sender.node} ({sender.host})"


def note_begin(audit: AuditLog, run: str, sender: Sender, path: str) -> None:
    """Log that a node's session begins, or continues after a silence."""
    who, route = who_of(sender), route_and_run(path)[0]
    audit.note("joined", via="node", who=who, address=sender.address, method="POST", route=route, run=run, status=200)


def note_end(audit: AuditLog, run: str, sender: Sender, why: str) -> None:
    """Log that a node's session is over, and what it sent.  The counters restart."""
    audit.note(
        "ended",
        via="node",
        who=who_of(sender),
        address=sender.address,
        run=run,
        frames=sender.taken_frames,
        bytes=sender.taken_bytes,
        why=why,
    )
    sender.taken_frames = sender.taken_bytes = 0


def note_refused(
    audit: AuditLog | None, scope: Scope, refused: Refused, address: str, sender: Sender | None = None
) -> None:
    """Log a refused request; ``sender``: a node that had joined."""
    if audit is None:
        return
    route, run = route_and_run(scope["path"])
    audit.note(
        "refused",
        via="node" if sender is not None else "unknown",
        who=who_of(sender) if sender is not None else "",
        address=address if sender is not None else source_of(address),
        method=scope["method"],
        route=route,
        run=run,
        status=refused.status,
        why=refused.reason,
    )


def for_agents(path: str) -> bool:
    return path == HELLO_PATH or (path.startswith(_RUNS) and path.endswith(("/join", "/frames")))


def no_challenge() -> Refused:
    why = "a join must follow a hello (protocol 2); install the same Stepscope on all nodes"
    return Refused(401, "token", why)


async def answer_hello(challenges: Challenges, scope: Scope, body: bytes, send: Send) -> None:
    """Answer a hello; Refused without the key."""
    given = _header(scope, PROOF_HEADER.encode()).decode("latin-1")
    try:
        answer, proof = challenges.answer(body, given)
    except Refused as refused:
        if refused.reason != "key" or not challenges.behind_s:
            raise
        await asyncio.sleep(challenges.behind_s)
        answer, proof = challenges.answer(body, given)
    known(scope)
    await _answer(send, 200, answer, (PROOF_HEADER.encode(), proof.encode()))


class Agents(Protocol):
    """A receiver of agents' requests: ``IngestApp`` for one run, ``FolderIngest`` for a folder of runs."""

    @property
    def figures(self) -> IngestFigures: ...

    def wants(self, path: str) -> bool: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def in_front(ingest: Agents, app: App) -> App:
    """Route agents' requests to ``ingest``, all others to ``app``."""

    async def entry(scope: Scope, receive: Receive, send: Send) -> None:
        chosen: App | Agents = ingest if scope["type"] == "http" and ingest.wants(scope["path"]) else app
        await chosen(scope, receive, send)

    return entry


def _check_ring(about: RingSidecar) -> None:
    """Reject impossible numbers: a ring's fields are stored in 63 bits, but a process may send more."""
    numbers: Sequence[int] = [getattr(about, name) for name in _NUMBERS]
    identity = about.identity
    if max(*numbers, about.ended_wall_ns or 0) > _LARGEST or min(identity.rank, identity.attempt) < 0:
        raise FrameError("a ring has impossible values")


def _header(scope: Scope, name: bytes) -> bytes:
    for given, value in scope["headers"]:
        if given == name:
            found: bytes = value
            return found
    return b""


async def answer_refused(send: Send, refused: Refused, *, close: bool) -> None:
    """``close``: a client without access must connect again, which is counted."""
    said: dict[str, Any] = {"why": refused.why}
    if refused.retry_s is not None:
        said["retry_s"] = round(refused.retry_s, 3)
    await _answer(send, refused.status, json.dumps(said).encode(), *([_CLOSE] if close else []))


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    sent = [_JSON, (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})

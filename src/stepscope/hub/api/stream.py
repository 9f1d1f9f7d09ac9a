"""Server-sent events of a run: new steps, redigested steps, events, findings and status, as they come.

Nothing is queued for a client.  Each has a cursor (attempt, step, event, findings), which is also the id of the last
message it was sent; when the model changes, it gets everything after its cursor at once.  A slow client therefore gets
fewer and larger messages.  One that fell too far behind for that must fetch everything again (``reset``); one that
reads nothing at all is disconnected by the server.  A client that reconnects sends the last id it saw
(``Last-Event-ID``) and continues from there, even after a restart of the hub.  A hub that exits with its run announces
it (``end``), so that it is not mistaken for a broken connection.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stepscope.hub.api.responses import failure, json_body
from stepscope.hub.api.runs import findings_of, status_of
from stepscope.hub.open_run import OpenRun
from stepscope.records import run_clock
from stepscope.reports.event_text import event_document

__all__ = ["Cursor", "Streams"]

MOST_CLIENTS = 128
HEARTBEAT_S = 5.0
PAUSE_S = 0.2
"""The shortest pause between two messages to one client: what comes meanwhile is sent together."""
BEHIND_S = 2.0
"""The same after a reset because it fell behind: while a hub catches up with hours of a run, all clients do."""
SLOW_S = 5.0
"""A client that leaves a message unread for longer, and then is gone, counts as slow."""
MOST_STEPS = 512
"""The largest distance behind the newest step; beyond, the client gets a reset."""
MOST_EVENTS = 256
MEDIA_TYPE = "text/event-stream"
_STATUS = (
    *("status", "status_text", "over", "attempt", "world_size", "ranks", "live_ranks", "hung_ranks", "hung_steps"),
    "states",
)
"""The fields of the status that cause a message when they change; steps are sent anyway."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """What a client already has."""

    attempt: int = -1
    step: int = -1
    event: int = 0
    findings: int = 0
    """A checksum; 0: no findings were sent."""
    redone: int = 0
    """The value of ``redigests`` when last sent; not part of the id."""
    status: str = ""
    """The whole status as text; not part of the id, so a client that reconnects gets it again."""

    def to_id(self) -> str:
        return f"{self.attempt}.{self.step}.{self.event}.{self.findings}"

    @classmethod
    def from_id(cls, text: str) -> Cursor | None:
        """Parse an id; None if it is invalid."""
        words = text.split(".")
        if len(words) != 4 or not all(word.removeprefix("-").isdecimal() and len(word) < 19 for word in words):
            return None
        if not text.isascii():
            return None
        attempt, step, event, findings = map(int, words)
        return cls(attempt=attempt, step=step, event=event, findings=findings)


class Streams:
    """The number of clients, and why others were dropped."""

    def __init__(
        self,
        *,
        most: int = MOST_CLIENTS,
        heartbeat_s: float = HEARTBEAT_S,
        pause_s: float = PAUSE_S,
        behind_s: float = BEHIND_S,
        slow_s: float = SLOW_S,
    ) -> None:
        self.most = most
        self.heartbeat_s = heartbeat_s
        self.pause_s = pause_s
        self.behind_s = behind_s
        self.slow_s = slow_s
        self.clients = 0
        self.dropped: Counter[str] = Counter()
        """By reason."""

    def open(self, run: OpenRun, find: Callable[[], Any], last_event_id: str) -> Response:
        if self.clients >= self.most:
            self.dropped["full"] += 1
            return failure(503, "too many clients are connected to this hub", headers={"Retry-After": "10"})
        return EventStream(self, run, find, Cursor.from_id(last_event_id) or Cursor())


class EventStream(Response):
    """``find``: returns the run again, since a run that was closed and reopened is a different object."""

    media_type = MEDIA_TYPE

    def __init__(self, streams: Streams, run: OpenRun, find: Callable[[], Any], cursor: Cursor) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._streams = streams
        self._run = run
        self._find = find
        self._cursor = cursor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams.clients += 1
        gone = asyncio.create_task(_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._follow(send, gone)
        finally:
            self._streams.clients -= 1
            gone.cancel()

    async def _follow(self, send: Send, gone: asyncio.Task[None]) -> None:
        version, beat_s = -1, time.monotonic()  # beat_s: when something was last sent
        run: OpenRun | None = self._run
        body = b"retry: 2000\n\n" + _heartbeat(self._run)  # first, so that the client knows the time there
        while run is not None:
            messages, self._cursor = news(run, self._cursor)
            body += b"".join(_message(event, data, cursor) for event, data, cursor in messages)
            now_s = time.monotonic()
            if not body and now_s - beat_s >= self._streams.heartbeat_s:
                body = _heartbeat(run)
            if body:
                beat_s = now_s
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body = b""
                if gone.done() and time.monotonic() - now_s > self._streams.slow_s:
                    self._streams.dropped["slow"] += 1
            if gone.done():
                return
            if run.leaving:
                await _last_word(send, "end", "the run is over and its hub is stopping")
                return
            behind = any(event == "reset" and data["why"] == "behind" for event, data, _ in messages)
            pause_s = self._streams.behind_s if behind else self._streams.pause_s
            seen = run.live
            version = await self._wait(run, version, gone, beat_s + pause_s)
            run = await self._find()
            if run is not None and seen.partial and run.live is not seen:
                self._cursor = replace(self._cursor, step=-1)  # the model has more: the client must load it again
        await _last_word(send, "gone", "the run no longer exists")

    async def _wait(self, run: OpenRun, version: int, gone: asyncio.Task[None], not_before_s: float) -> int:
        """Wait until there is a change, a heartbeat is due, or the client left; and until the pause is over."""
        changed = asyncio.create_task(run.live.changed(version, self._streams.heartbeat_s))
        await asyncio.wait((changed, gone), return_when=asyncio.FIRST_COMPLETED)
        if not changed.done():
            changed.cancel()
            return version
        if not gone.done() and (left_s := not_before_s - time.monotonic()) > 0:
            await asyncio.wait((gone,), timeout=left_s)
        return changed.result()


def _heartbeat(run: OpenRun) -> bytes:
    return _message("heartbeat", {"wall_ns": run_clock.now_of(run.live.meta)}, None)


def news(run: OpenRun, cursor: Cursor) -> tuple[list[tuple[str, Mapping[str, Any], Cursor]], Cursor]:
    """Return everything after the cursor, each message with the cursor that follows it."""
    found: list[tuple[str, Mapping[str, Any], Cursor]] = []
    for event, data, after in _news(run, cursor):
        cursor = after
        found.append((event, data, after))
    return found, cursor


def _news(run: OpenRun, cursor: Cursor) -> Iterator[tuple[str, Mapping[str, Any], Cursor]]:
    live = run.live
    attempt, newest = live.registry.attempt, live.frontier
    if cursor.attempt != attempt or newest - cursor.step > MOST_STEPS or cursor.step > newest:
        why = "first" if cursor.attempt < 0 else "attempt" if cursor.attempt != attempt else "behind"
        cursor = replace(cursor, attempt=attempt, step=newest, redone=live.redigests)
        yield "reset", {"why": why, "attempt": attempt, "last_step": newest}, cursor
    elif cursor.redone < live.redigests:
        # Before the new steps, whose digests are the newest anyway.
        again = live.steps_redone(cursor.redone)
        cursor = replace(cursor, redone=live.redigests)
        if again is not None:
            yield "again", again, cursor
    if newest > cursor.step:
        steps = live.steps(cursor.step + 1, newest, bins=MOST_STEPS)
        # A sampled step is sent with the one after it, which hides how much longer it took.
        if newest - cursor.step > 1 or sum(steps["sampled"]) < sum(steps["steps"]) or run.over:
            cursor = replace(cursor, step=newest)
            yield "steps", steps, cursor
    seen = live.received.events_seen
    if cursor.event > seen:
        cursor = replace(cursor, event=0)
    if seen > cursor.event:
        events = live.events(max(cursor.event, seen - MOST_EVENTS))
        cursor = replace(cursor, event=seen)
        yield "events", {"events": [event_document(event, over=run.over) for event in events]}, cursor
    findings = findings_of(run)
    tag = zlib.crc32(json_body(findings)) or 1
    if tag != cursor.findings:
        cursor = replace(cursor, findings=tag)
        yield "findings", findings, cursor
    status = status_of(run)
    word = json_body({name: status[name] for name in _STATUS}).decode()
    if word != cursor.status:
        cursor = replace(cursor, status=word)
        yield "status", status, cursor


def _message(event: str, data: Mapping[str, Any], cursor: Cursor | None) -> bytes:
    """Encode a message; JSON contains no line ends, so one ``data`` line is enough."""
    head = f"event: {event}\n" + (f"id: {cursor.to_id()}\n" if cursor is not None else "")
    return head.encode() + b"data: " + json_body(data) + b"\n\n"


async def _last_word(send: Send, event: str, why: str) -> None:
    await send({"type": "http.response.body", "body": _message(event, {"why": why}, None), "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

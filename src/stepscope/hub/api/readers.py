"""Who may read: everybody who has the reader's token, as a header or as a cookie that was given for it.

    Authorization: Bearer TOKEN                     tools, Prometheus, the terminal view
    Cookie: stepscope-PORT-XXXX=EXPIRES.SIGNATURE   a browser, after POST /api/v1/session: EventSource sends no headers

Besides the hub's own token there are those with a name, a scope and an end (``reader_tokens.py``).  They are for
headers only: a cookie would outlive the day on which one is revoked.

The cookie is signed with the token and says until when it holds; the hub keeps nothing, so that one that was restarted
with its old token knows its readers again.  Browsers do not keep cookies apart by port: they send ours to every server
of this host, also to one of another user.  So it is worth something only here (the port is signed), only to whoever it
was given to (the address and, on this machine, the user are signed), and only until its end: asking with a cookie gives
no new one.  The token itself is in no cookie, no URL and no log.  All comparisons take
the same time whatever is wrong.  A wrong one is counted by address, and each next answer to that address comes later;
those who have the token never wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepscope.hub.api.answers import failure
from stepscope.hub.api.reader_tokens import NamedToken, ReaderTokens
from stepscope.hub.audit import AuditLog, Via, route_and_run
from stepscope.hub.gate.entrance import plain_address, source_of

__all__ = ["OPEN_FOLDER", "OPEN_PATHS", "SESSION_PATH", "Reader", "Readers", "ReadersOnly", "TrustedProxy"]

SESSION_PATH = "/api/v1/session"
OPEN_PATHS = frozenset({"/", "/healthz", SESSION_PATH})
"""What needs no token: nothing of a run is there.  (POST to the session looks at the token by itself.)"""
OPEN_FOLDER = "/assets/"
"""The script and the style sheet of the page."""
SESSION_S = 12 * 3600
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0
FORGET_AFTER_S = 60.0
"""A wrong token counts for so long."""
ADDRESSES = 1024
"""That are remembered; the longest silent goes first."""
WAITING = 64
"""Answers that may be held back at once; beyond, the answer is 429 right away."""


@dataclass(frozen=True, kw_only=True)
class TrustedProxy:
    """A reverse proxy on this machine that has authenticated whoever asks, and says so in a header.

    Anybody on this machine can connect and write a header.  So only connections of these users count, by the kernel's
    word (``records/peers.py``); where it does not tell, none do.
    """

    header: str
    uids: frozenset[int]

    def vouches_for(self, scope: Scope) -> str:
        """The user that it names; empty: nobody."""
        said = Headers(scope=scope).getlist(self.header)
        peer = scope.get("state", {}).get("stepscope.peer")
        return said[0].strip() if len(said) == 1 and peer is not None and peer() in self.uids else ""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Somebody who may read, and how they were recognized."""

    via: Via
    name: str = ""
    """Of a named token, or of the user for whom a proxy vouches."""
    token: NamedToken | None = None


class Readers:
    """The token, and who got it wrong.  Used from one event loop."""

    def __init__(
        self,
        token: str,
        *,
        secure: bool = False,
        port: int = 0,
        named: ReaderTokens | None = None,
        trusted: TrustedProxy | None = None,
        audit: AuditLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if not token:
            raise ValueError("a hub without a token would be open to everybody")
        self._token = hashlib.sha256(token.encode()).digest()
        self._signing = hmac.new(token.encode(), b"session %d" % port, hashlib.sha256).digest()
        self._secure = secure
        self._named = named
        self._trusted = trusted
        self._audit = audit
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._waiting = 0
        self.refused = 0
        """Since the start: wrong tokens and wrong cookies."""
        self.cookie = f"{'__Host-' if secure else ''}stepscope-{port}-{hashlib.sha256(self._signing).hexdigest()[:8]}"
        """One name per port and token: two hubs on one host do not take each other's cookie away."""

    def right(self, token: str) -> bool:
        """Whether that is the token."""
        given = hashlib.sha256(token.encode(errors="replace")).digest()
        return hmac.compare_digest(given, self._token)

    def admits(self, headers: Headers, whose: str = "") -> bool | None:
        """None: nobody tried, there is neither a token nor a cookie of ours.  ``whose``: as ``browser_of`` says."""
        given = headers.get("authorization")
        if given is not None:
            kind, _, token = given.partition(" ")
            return kind.lower() == "bearer" and self.right(token.strip())
        cookie = cookie_parser(headers.get("cookie", "")).get(self.cookie)
        return None if cookie is None else self._left_s(cookie, whose) > 0

    def reader_of(self, scope: Scope) -> Reader | Literal[False] | None:
        """Who asks.  None: nobody tried.  False: a token or a cookie that is wrong."""
        if self._trusted is not None and (user := self._trusted.vouches_for(scope)):
            return Reader(via="proxy", name=user)
        headers = Headers(scope=scope)
        admitted = self.admits(headers, browser_of(scope))
        if admitted:
            return Reader(via="hub token")
        token = self.named(headers)
        return Reader(via="named token", name=token.name, token=token) if token is not None else admitted

    def note(
        self,
        event: Literal["read", "signed in", "signed out", "refused"],
        scope: Scope,
        reader: Reader | None,
        status: int,
    ) -> None:
        """For the audit log, if there is one."""
        if self._audit is None:
            return
        route, run = route_and_run(scope["path"])
        self._audit.note(
            event,
            via=reader.via if reader is not None else "unknown",
            who=reader.name if reader is not None else "",
            address=address_of(scope) if reader is not None else source_of(address_of(scope)),
            method=scope["method"],
            route=route,
            run=run,
            status=status,
        )

    def named(self, headers: Headers) -> NamedToken | None:
        """The token with a name that came as a header; one that ran out or was revoked is none."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        if self._named is None or kind.lower() != "bearer":
            return None
        return self._named.find(token.strip(), self._now())

    def open_session(self, response: Response, whose: str = "") -> None:
        expires = int(self._now()) + SESSION_S
        self._set(response, f"{expires}.{self._signature(expires, whose)}", SESSION_S)

    def session_left_s(self, headers: Headers, whose: str) -> int:
        """Of the cookie that came along; 0: there is none that holds."""
        return self._left_s(cookie_parser(headers.get("cookie", "")).get(self.cookie, ""), whose)

    def end_session(self, response: Response) -> None:
        self._set(response, "", 0)

    async def refuse(self, scope: Scope, *, tried: bool) -> Response:
        """The answer to somebody who may not read; whoever tried a wrong token waits for it."""
        response = await self._refusal(address_of(scope), tried=tried)
        self.note("refused", scope, None, response.status_code)
        return response

    async def _refusal(self, address: str, *, tried: bool) -> Response:
        if tried:
            self.refused += 1
            delay_s = self._delay(address)
            if self._waiting >= WAITING:
                return failure(429, "too many wrong tokens; try again later", headers={"Retry-After": "5"})
            self._waiting += 1
            try:
                await self._sleep(delay_s)
            finally:
                self._waiting -= 1
        why = "that is not this hub's token" if tried else "a token is needed: Authorization: Bearer TOKEN"
        return failure(401, why, headers={"WWW-Authenticate": 'Bearer realm="stepscope"'})

    def _delay(self, address: str) -> float:
        now = self._clock()
        count, heard = self._wrong.pop(address, (0, now))
        count = 1 if now - heard > FORGET_AFTER_S else count + 1
        self._wrong[address] = (count, now)
        while len(self._wrong) > ADDRESSES:
            self._wrong.popitem(last=False)
        return float(min(FIRST_DELAY_S * 2 ** min(count - 1, 16), LONGEST_DELAY_S))

    def _signature(self, expires: int, whose: str) -> str:
        return hmac.new(self._signing, f"{expires} {whose}".encode(), hashlib.sha256).hexdigest()

    def _left_s(self, cookie: str, whose: str) -> int:
        until, _, signature = cookie.partition(".")
        expires = int(until) if until.isascii() and until.isdecimal() and len(until) <= 12 else 0
        right = hmac.compare_digest(self._signature(expires, whose).encode(), signature.encode(errors="replace"))
        return max(0, expires - int(self._now())) if right else 0

    def _set(self, response: Response, value: str, seconds: int) -> None:
        response.set_cookie(
            self.cookie, value, max_age=seconds, path="/", httponly=True, samesite="strict", secure=self._secure
        )


class ReadersOnly:
    """A pure ASGI layer: whatever is not open to all is for readers, also a path that is none."""

    def __init__(self, app: ASGIApp, readers: Readers) -> None:
        self._app = app
        self._readers = readers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDER):
            await self._app(scope, receive, send)
            return
        readers, reader = self._readers, self._readers.reader_of(scope)
        if not reader:
            refusal = await readers.refuse(scope, tried=reader is False)
            await refusal(scope, receive, send)
            return
        if reader.token is not None and not reader.token.allows(scope["path"]):
            readers.note("refused", scope, reader, 403)
            await failure(403, f"this token is for {reader.token.scope} only")(scope, receive, send)
            return
        if (told := scope.get("state", {}).get("stepscope.known")) is not None:
            told()  # ``hub/gate/guard.py``: it is no stranger to the entrance

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                readers.note("read", scope, reader, message["status"])
            await send(message)

        await self._app(scope, receive, answer)


def browser_of(scope: Scope) -> str:
    """Who a cookie belongs to: an address and, on this machine, a user."""
    peer = scope.get("state", {}).get("stepscope.peer")  # of ``hub/gate/guard.py``
    uid = peer() if peer is not None else None
    return f"{address_of(scope)} {'' if uid is None else uid}"


def address_of(scope: Scope) -> str:
    """Whoever is at the other end; a proxy's word for it is not believed."""
    client = scope.get("client")
    return plain_address(str(client[0])) if client else ""

"""Authentication of readers: a token in a header, or a browser session in a cookie.

    Authorization: Bearer TOKEN                        tools, Prometheus, the terminal view
    Cookie: stepscope-PORT-XXXX=EXPIRES.ID.SESSION.SIGNATURE   a browser, after POST /api/v1/session: EventSource has
    no headers

Besides the hub's own token there are tokens with a name, a scope, roles and an expiry (``ReaderTokens``), and users
that a reverse proxy names (``TrustedProxy``).  Everyone may view what the scope covers; whatever changes something
needs a role, which is looked up at each request and checked where it is routed (``resource.py``).  A cookie says
which token it was given for (``ID``; empty for the hub's own), and everything else is looked up at each request: when
the token is revoked or expires, its sessions and open streams end too.

The cookie is signed with the hub's token and includes its expiry.  The hub stores only which sessions were ended by
signing out, until they would have expired, so a hub that is restarted with its old token recognizes its readers.
Browsers do not separate cookies by port: they send ours to every server on this host, including those of other users.
It is therefore valid only here (the port is signed), only for the client it was given to (the address and, on this
machine, the user are signed), and only until it expires: a request with a cookie does not renew it.  No token is in a
cookie, a URL or a log.  Starlette's SessionMiddleware and itsdangerous sign as we do, in ten lines here; the rest,
which client and token a cookie belongs to and that a session can be ended, they leave to the application.  All
comparisons take constant time.  Wrong tokens are counted by address, and each further
answer to that address is delayed more; clients with the right token never wait.

Named tokens are for all hubs of this user: create, look up, revoke (``stepscope token``).

    ~/.config/stepscope/tokens.json      names, scopes, roles, expiry, and the SHA-256 of each token; readable only by
    its owner

A token is shown once, when it is created; since it is random, its hash reveals nothing.  A hub rereads the file when
it changes, so a revoked token is refused at the next request.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request, cookie_parser
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepscope.errors import UsageError
from stepscope.hub.api.responses import JSON, failure, json_body
from stepscope.hub.audit import AuditLog, Via, route_and_run
from stepscope.hub.limits import address_of, source_of
from stepscope.records.files import key_path, private_folder, write_private

__all__ = [
    "ALL",
    "METRICS",
    "ONLY_RUN",
    "OPEN_PATHS",
    "ROLES",
    "SESSION_PATH",
    "NamedToken",
    "Reader",
    "ReaderTokens",
    "Readers",
    "ReadersOnly",
    "Role",
    "TrustedProxy",
    "checked_roles",
    "reader_name",
    "roles_in",
    "run_scope",
    "session_routes",
    "tokens_path",
    "why_forged",
]

# -- roles ------------------------------------------------------------------------------------------------------------

Role = Literal["label", "alerts", "capture", "delete"]
ROLES: tuple[Role, ...] = get_args(Role)
"""What may be granted besides viewing: name, tags and notes of runs; acknowledging incidents and silencing alerts;
requesting captures; deleting runs.  The hub's own token has all of them."""
VIEW = "view"
"""What every reader may do; accepted where roles are listed."""
_OFTEN: frozenset[Role] = frozenset(("alerts", "capture"))
"""Offered by the hub of a job, which neither labels nor deletes its run."""


def checked_roles(text: str) -> frozenset[Role]:
    """The roles in ``label,delete``; UsageError for an unknown word."""
    words = {word.strip() for word in text.split(",") if word.strip()}
    for word in sorted(words - {VIEW, *ROLES}):
        raise UsageError(f"there is no role {word!r}; the roles are {', '.join((VIEW, *ROLES))}")
    return frozenset(role for role in ROLES if role in words)


# -- named tokens -----------------------------------------------------------------------------------------------------

ALL, METRICS = "all runs", "/metrics"
_RUN = "the run "
_RUNS = "/api/v1/runs"
_ID_CHARS = 32


@dataclass(frozen=True, kw_only=True)
class NamedToken:
    name: str
    scope: str
    """``ALL``, ``METRICS`` or the result of ``run_scope``."""
    created_s: float
    expires_s: float
    sha256: str
    roles: tuple[Role, ...] = ()

    @property
    def id(self) -> str:
        """Identifies the token in a cookie: it grants nothing, and another token with that name has a different id."""
        return self.sha256[:_ID_CHARS]

    @property
    def only_run(self) -> str | None:
        return self.scope.removeprefix(_RUN) if self.scope.startswith(_RUN) else None

    def allows(self, path: str) -> bool:
        """Whether the scope covers a path.  A token for one run may also list the runs, but sees only that run."""
        if self.scope == ALL:
            return True
        if self.scope == METRICS:
            return path == "/metrics"
        own = f"{_RUNS}/{self.only_run}"
        return self.only_run is not None and (path in (_RUNS, own) or path.startswith(f"{own}/"))


def run_scope(run: str) -> str:
    return f"{_RUN}{run}"


def tokens_path(environ: Mapping[str, str]) -> Path:
    return key_path(environ).with_name("tokens.json")


class ReaderTokens:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._known: tuple[NamedToken, ...] = ()

    def all(self) -> tuple[NamedToken, ...]:
        """Return all tokens; an empty tuple if the file is missing, foreign, or writable by others."""
        try:
            found = self._path.stat()
            seen = (found.st_mtime_ns, found.st_ino, found.st_size)
            if seen != self._seen:
                ours = found.st_uid == os.getuid() and not found.st_mode & 0o077
                self._known = _read(self._path) if ours else ()
                self._seen = seen
        except (OSError, ValueError, TypeError, KeyError):
            self._known, self._seen = (), None
        return self._known

    def find(self, token: str, now_s: float) -> NamedToken | None:
        given = hashlib.sha256(token.encode(errors="replace")).hexdigest()
        found = [token for token in self.all() if hmac.compare_digest(token.sha256, given)]
        return found[0] if found and found[0].expires_s > now_s else None

    def with_id(self, token_id: str, now_s: float) -> NamedToken | None:
        """Return the token that a cookie was given for; None once it is revoked or expired."""
        found = [token for token in self.all() if token.id == token_id and len(token.sha256) > _ID_CHARS]
        return found[0] if found and found[0].expires_s > now_s else None

    def create(
        self, name: str, scope: str, *, now_s: float, seconds: float, roles: Collection[Role] = frozenset()
    ) -> str:
        """Create a token and return it; it cannot be read again.  UsageError if the name exists or the disk is full."""
        token = secrets.token_urlsafe(32)
        digest = hashlib.sha256(token.encode()).hexdigest()
        made = NamedToken(
            name=name,
            scope=scope,
            created_s=now_s,
            expires_s=now_s + seconds,
            sha256=digest,
            roles=tuple(role for role in ROLES if role in roles),
        )
        with self._alone():
            if any(token.name == name for token in self.all()):
                raise UsageError(f"a token named {name} already exists; revoke it or choose another name")
            self._write((*self.all(), made))
        return token

    def revoke(self, name: str) -> None:
        with self._alone():
            left = tuple(token for token in self.all() if token.name != name)
            if len(left) == len(self.all()):
                raise UsageError(f"no token named {name}; `stepscope token list` lists all tokens")
            self._write(left)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Serialize commands: otherwise one that creates could bring back a token that another revoked meanwhile."""
        lock = self._path.with_name(f".{self._path.name}.lock")
        try:
            private_folder(self._path.parent)
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"cannot write {lock}: {error.strerror}") from error
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _write(self, tokens: tuple[NamedToken, ...]) -> None:
        try:
            write_private(self._path, json.dumps({"schema": 1, "tokens": [asdict(token) for token in tokens]}))
        except OSError as error:
            raise UsageError(f"cannot write {self._path}: {error.strerror}") from error


def _read(path: Path) -> tuple[NamedToken, ...]:
    return tuple(
        NamedToken(
            name=str(row["name"]),
            scope=str(row["scope"]),
            created_s=float(row["created_s"]),
            expires_s=float(row["expires_s"]),
            sha256=str(row["sha256"]),
            roles=tuple(role for role in ROLES if role in row.get("roles", ())),
        )
        for row in json.loads(path.read_bytes())["tokens"]
    )


# -- readers ----------------------------------------------------------------------------------------------------------

SESSION_PATH = "/api/v1/session"
OPEN_PATHS = frozenset({"/", "/healthz", SESSION_PATH})
"""Paths that need no token: they show nothing from a run.  (POST to the session checks the token itself.)"""
OPEN_FOLDER = "/assets/"
"""The script and the style sheet of the page."""
ONLY_RUN = "stepscope.only_run"
"""In ``scope["state"]``: the only run that the reader may read; None or missing: all runs."""
_ROLES_HERE = "stepscope.roles"
"""In ``scope["state"]``: the roles that the reader has and that this hub offers."""
_READER_NAME = "stepscope.reader"
"""In ``scope["state"]``: the name of the reader."""
SESSION_S = 12 * 3600
CLOCK_SLACK_S = 60
"""The clock may be set back by this much without ending new sessions."""
ENDED_SESSIONS = 10_000
"""Sessions remembered after they were signed out; only holders of a token can begin one."""
_SESSION_BYTES = 16
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0
FORGET_AFTER_S = 60.0
"""How long a wrong token counts."""
ADDRESSES = 1024
"""Addresses remembered; the one silent longest is dropped first."""
WAITING = 64
"""Answers that may be delayed at once; beyond, the answer is 429 immediately."""


EVERY_USER = "*"
MOST_NAME_CHARS = 128


@dataclass(frozen=True, kw_only=True)
class TrustedProxy:
    """A reverse proxy that authenticates users and names them in a header.

    Anyone who can connect can write a header.  On this machine only connections of some users count, according to the
    kernel (``hub/transport.py``); from other machines only those of the listed addresses.  From all others the header
    is ignored.
    """

    header: str
    uids: frozenset[int] = frozenset()
    addresses: frozenset[str] = frozenset()
    """As ``address_of`` returns them."""
    roles: Mapping[str, frozenset[Role]] = field(default_factory=dict)
    """By user; those of ``EVERY_USER`` are added to each."""

    def vouches_for(self, scope: Scope) -> str:
        """Return the user named by the proxy, or an empty string."""
        values = Headers(scope=scope).getlist(self.header)
        name = values[0].strip() if len(values) == 1 and self._is_from_proxy(scope) else ""
        return name if name.isprintable() and len(name) <= MOST_NAME_CHARS else ""

    def roles_of(self, user: str) -> frozenset[Role]:
        return self.roles.get(user, frozenset()) | self.roles.get(EVERY_USER, frozenset())

    def _is_from_proxy(self, scope: Scope) -> bool:
        if address_of(scope) in self.addresses:
            return True
        peer = scope.get("state", {}).get("stepscope.peer")
        return peer is not None and peer() in self.uids


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A client that may read, and how it was identified."""

    via: Via
    name: str = ""
    """The name of the token, or of the user named by a proxy."""
    token: NamedToken | None = None
    session: str = field(default="", compare=False)
    """The session of a cookie."""


class Readers:
    """Checks tokens and cookies, and counts wrong ones.  Used from one event loop."""

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
            raise ValueError("a hub without a token would be open to anyone")
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
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Sessions that were signed out.  Not dropped by time: the clock may be set back."""
        self.refused = 0
        """Wrong tokens and wrong cookies since the start."""
        self.cookie = f"{'__Host-' if secure else ''}stepscope-{port}-{hashlib.sha256(self._signing).hexdigest()[:8]}"
        """One name per port and token: two hubs on one host do not overwrite each other's cookie."""

    def right(self, token: str) -> bool:
        """Whether this is the hub's token."""
        given = hashlib.sha256(token.encode(errors="replace")).digest()
        return hmac.compare_digest(given, self._token)

    def with_token(self, token: str) -> Reader | Literal[False]:
        """Return the reader with this token; False if it is wrong, expired or revoked."""
        if self.right(token):
            return Reader(via="hub token")
        named = self._named.find(token, self._now()) if self._named is not None else None
        return False if named is None else _named(named)

    def admits(self, headers: Headers, whose: str = "") -> Reader | Literal[False] | None:
        """Return the reader; None: neither a token nor a cookie was given.  ``whose``: from ``browser_of``."""
        given = headers.get("authorization")
        if given is not None:
            kind, _, token = given.partition(" ")
            return self.with_token(token.strip()) if kind.lower() == "bearer" else False
        cookie = cookie_parser(headers.get("cookie", "")).get(self.cookie)
        return None if cookie is None else self._with_cookie(cookie, whose)[0]

    def holds(self, reader: Reader, path: str) -> bool:
        """Whether an admitted reader would still be admitted: it may have signed out, or its token been revoked."""
        if reader.session in self._ended:
            return False
        if reader.token is None or self._named is None:
            return True
        token = self._named.with_id(reader.token.id, self._now())
        return token is not None and token.allows(path)

    def reader_of(self, scope: Scope) -> Reader | Literal[False] | None:
        """Return the reader.  None: no credentials were given.  False: a wrong token or cookie."""
        if self._trusted is not None and (user := self._trusted.vouches_for(scope)):
            return Reader(via="proxy", name=user)
        return self.admits(Headers(scope=scope), browser_of(scope))

    def roles_of(self, reader: Reader) -> frozenset[Role]:
        """Return what an admitted reader may do besides viewing."""
        if reader.via == "hub token":
            return frozenset(ROLES)
        if reader.via == "proxy" and self._trusted is not None:
            return self._trusted.roles_of(reader.name)
        return frozenset(() if reader.token is None else reader.token.roles)

    def note(
        self,
        event: Literal["read", "changed", "signed in", "signed out", "refused"],
        scope: Scope,
        reader: Reader | None,
        status: int,
    ) -> None:
        """Write to the audit log, if there is one."""
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

    def session_s(self, token: NamedToken | None) -> int:
        """Return how long a session opened now lasts: never longer than its named token."""
        return SESSION_S if token is None else int(min(SESSION_S, token.expires_s - self._now()))

    def open_session(self, response: Response, whose: str = "", token: NamedToken | None = None) -> None:
        seconds, token_id = self.session_s(token), "" if token is None else token.id
        expires, session = int(self._now()) + seconds, secrets.token_hex(_SESSION_BYTES)
        signature = self._signature(expires, token_id, session, whose)
        self._set(response, f"{expires}.{token_id}.{session}.{signature}", seconds)

    def session(self, headers: Headers, whose: str) -> tuple[Reader | Literal[False], int]:
        """Return the cookie's reader, and for how many seconds it is still valid."""
        return self._with_cookie(cookie_parser(headers.get("cookie", "")).get(self.cookie, ""), whose)

    def end_session(self, response: Response, reader: Reader | Literal[False]) -> None:
        """End the session of a cookie, also for copies of it."""
        if reader and reader.session:
            self._ended[reader.session] = None
        while len(self._ended) > ENDED_SESSIONS:
            self._ended.popitem(last=False)
        self._set(response, "", 0)

    async def refuse(self, scope: Scope, *, tried: bool) -> Response:
        """Return the answer for a client that may not read, delayed if it tried a wrong token."""
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
        why = "the token is not valid for this hub" if tried else "token required: Authorization: Bearer TOKEN"
        return failure(401, why, headers={"WWW-Authenticate": 'Bearer realm="stepscope"'})

    def _delay(self, address: str) -> float:
        now = self._clock()
        count, heard = self._wrong.pop(address, (0, now))
        count = 1 if now - heard > FORGET_AFTER_S else count + 1
        self._wrong[address] = (count, now)
        while len(self._wrong) > ADDRESSES:
            self._wrong.popitem(last=False)
        return float(min(FIRST_DELAY_S * 2 ** min(count - 1, 16), LONGEST_DELAY_S))

    def _signature(self, expires: int, token_id: str, session: str, whose: str) -> str:
        signed = f"{expires} {token_id} {session} {whose}".encode(errors="replace")
        return hmac.new(self._signing, signed, hashlib.sha256).hexdigest()

    def _with_cookie(self, cookie: str, whose: str) -> tuple[Reader | Literal[False], int]:
        until, token_id, session, signature = (*cookie.split(".", 3), "", "", "", "")[:4]
        expires = int(until) if until.isascii() and until.isdecimal() and len(until) <= 12 else 0
        made = self._signature(expires, token_id, session, whose)
        left_s = expires - int(self._now())
        if not hmac.compare_digest(made.encode(), signature.encode(errors="replace")):
            return False, 0
        if not 0 < left_s <= SESSION_S + CLOCK_SLACK_S:  # over, or from before the clock was set back
            return False, 0
        if session in self._ended:
            return False, 0
        if not token_id:
            return Reader(via="hub token", session=session), left_s
        named = self._named.with_id(token_id, self._now()) if self._named is not None else None
        return (False, 0) if named is None else (replace(_named(named), session=session), left_s)

    def _set(self, response: Response, value: str, seconds: int) -> None:
        response.set_cookie(
            self.cookie, value, max_age=seconds, path="/", httponly=True, samesite="strict", secure=self._secure
        )


def _named(token: NamedToken) -> Reader:
    return Reader(via="named token", name=token.name, token=token)


CHANGING = ("POST", "DELETE")
"""Methods of requests that change something."""


def why_forged(request: Request) -> str:
    """Return why a request that changes something may come from a page of another site; empty if it does not.

    A cookie says who the user is, not which page sent the request, and browsers also send ours for pages on other
    ports of this host.  They say where a request comes from, and send neither JSON nor DELETE to another origin without
    asking it first, which this hub never allows.
    """
    headers = request.headers
    if request.method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != JSON:
        return f"the body must be {JSON}"
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return "" if site == "same-origin" else "the request comes from another page"
    if origin is not None:
        return "" if origin.partition("://")[2] == headers.get("host") else "the request comes from another page"
    return "" if "authorization" in headers else "the request does not say which page it comes from"


class _RevokedError(Exception):
    """Raised through an answer that is being sent."""


class ReadersOnly:
    """A pure ASGI layer: everything that is not open to all needs a reader, even a path that does not exist."""

    def __init__(self, app: ASGIApp, readers: Readers, *, changes: bool = False, requests: bool = False) -> None:
        self._app = app
        self._readers = readers
        self._offered: frozenset[Role] = frozenset(ROLES if changes else _OFTEN if requests else ())

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
        if (mark_known := scope.get("state", {}).get("stepscope.known")) is not None:
            mark_known()  # ``hub/server.py``: the entrance no longer counts it as a stranger

        state = scope.setdefault("state", {})
        state[_ROLES_HERE], state[_READER_NAME] = readers.roles_of(reader) & self._offered, reader.name
        if reader.token is not None:
            state[ONLY_RUN] = reader.token.only_run

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                changing, status = scope["method"] in CHANGING, message["status"]
                did: Literal["read", "changed", "refused"] = "read" if not changing else "changed"
                readers.note("refused" if changing and status >= 400 else did, scope, reader, status)
            elif message.get("more_body") and not readers.holds(reader, scope["path"]):
                raise _RevokedError
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except _RevokedError:
            readers.note("refused", scope, reader, 401)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def roles_in(scope: Scope) -> frozenset[Role]:
    """Return what the reader of an admitted request may do besides viewing."""
    return scope.get("state", {}).get(_ROLES_HERE, frozenset())  # type: ignore[no-any-return]


def reader_name(scope: Scope) -> str:
    """Return the name of the reader of an admitted request; empty with the hub's own token, which has none."""
    return str(scope.get("state", {}).get(_READER_NAME, ""))


def browser_of(scope: Scope) -> str:
    """Return the owner of a cookie: an address and, on this machine, a user."""
    peer = scope.get("state", {}).get("stepscope.peer")  # from ``hub/server.py``
    uid = peer() if peer is not None else None
    return f"{address_of(scope)} {'' if uid is None else uid}"


# -- sessions ---------------------------------------------------------------------------------------------------------
# ``/api/v1/session``: a browser trades a token for a cookie, because EventSource can send no headers.

SESSION_BODY_BYTES = 4096


class _GivenToken(msgspec.Struct):
    token: str


def session_routes(readers: Readers) -> list[Route]:
    async def begin(request: Request) -> Response:
        """Begin a session.  The token is in the body, ``{"token": …}``, or in the same header as without a session."""
        whose = browser_of(request.scope)
        token = None if "authorization" in request.headers else await _token(request)
        reader = readers.admits(request.headers, whose) if token is None else readers.with_token(token)
        if not reader:
            return await readers.refuse(request.scope, tried=reader is False)
        if reader.token is not None and reader.token.scope == METRICS:
            readers.note("refused", request.scope, reader, 403)
            return failure(403, f"this token is for {reader.token.scope} only")
        if token is None and "authorization" not in request.headers:
            _, left_s = readers.session(request.headers, whose)
            return Response(json_body({"seconds": left_s}), media_type=JSON)  # a cookie does not renew itself
        response = Response(json_body({"seconds": readers.session_s(reader.token)}), media_type=JSON)
        readers.open_session(response, whose, reader.token)
        readers.note("signed in", request.scope, reader, 200)
        return response

    async def over(request: Request) -> Response:
        reader, _ = readers.session(request.headers, browser_of(request.scope))
        if reader:
            readers.note("signed out", request.scope, reader, 200)
        response = Response(json_body({"seconds": 0}), media_type=JSON)
        readers.end_session(response, reader)
        return response

    async def other(_request: Request) -> Response:
        return failure(405, "use POST to start a session, DELETE to end it", headers={"Allow": "POST, DELETE"})

    return [
        Route(SESSION_PATH, begin, methods=["POST"]),
        Route(SESSION_PATH, over, methods=["DELETE"]),
        Route(SESSION_PATH, other),
    ]


async def _token(request: Request) -> str | None:
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > SESSION_BODY_BYTES:
                return None
    except ClientDisconnect:
        return None
    try:
        return msgspec.json.decode(body, type=_GivenToken).token
    except msgspec.MsgspecError:
        return None

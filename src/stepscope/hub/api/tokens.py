"""Named tokens for readers, for all hubs of this user: create, look up, revoke (``stepscope token``).

    ~/.config/stepscope/tokens.json      names, scopes, expiry, and the SHA-256 of each token; readable only by its
    owner

A token is shown once, when it is created; since it is random, its hash reveals nothing.  A hub rereads the file when
it changes, so a revoked token is refused at the next request.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from stepscope.errors import UsageError
from stepscope.wire.keys import key_path

__all__ = ["ALL", "METRICS", "NamedToken", "ReaderTokens", "run_scope", "tokens_path"]

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
        found = [one for one in self.all() if hmac.compare_digest(one.sha256, given)]
        return found[0] if found and found[0].expires_s > now_s else None

    def with_id(self, token_id: str, now_s: float) -> NamedToken | None:
        """Return the token that a cookie was given for; None once it is revoked or expired."""
        found = [one for one in self.all() if one.id == token_id and len(one.sha256) > _ID_CHARS]
        return found[0] if found and found[0].expires_s > now_s else None

    def create(self, name: str, scope: str, *, now_s: float, seconds: float) -> str:
        """Create a token and return it; it cannot be read again.  UsageError if the name exists or the disk is full."""
        token = secrets.token_urlsafe(32)
        digest = hashlib.sha256(token.encode()).hexdigest()
        made = NamedToken(name=name, scope=scope, created_s=now_s, expires_s=now_s + seconds, sha256=digest)
        with self._alone():
            if any(one.name == name for one in self.all()):
                raise UsageError(f"a token named {name} already exists; revoke it or choose another name")
            self._write((*self.all(), made))
        return token

    def revoke(self, name: str) -> None:
        with self._alone():
            left = tuple(one for one in self.all() if one.name != name)
            if len(left) == len(self.all()):
                raise UsageError(f"no token named {name}; `stepscope token list` lists all tokens")
            self._write(left)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Serialize commands: otherwise one that creates could bring back a token that another revoked meanwhile."""
        lock = self._path.with_name(f".{self._path.name}.lock")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
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
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                json.dump({"schema": 1, "tokens": [asdict(one) for one in tokens]}, file)
            temporary.replace(self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UsageError(f"cannot write {self._path}: {error.strerror}") from error


def _read(path: Path) -> tuple[NamedToken, ...]:
    return tuple(
        NamedToken(
            name=str(one["name"]),
            scope=str(one["scope"]),
            created_s=float(one["created_s"]),
            expires_s=float(one["expires_s"]),
            sha256=str(one["sha256"]),
        )
        for one in json.loads(path.read_bytes())["tokens"]
    )

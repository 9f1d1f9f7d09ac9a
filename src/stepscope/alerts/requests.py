"""What people requested about incidents: acknowledgments, and silences for some time.

    RUN/alerts/requests.jsonl                   about this run: one line each, appended by the command line and the hub
    $XDG_STATE_HOME/stepscope/silences.json     silences of the user for all runs, or for runs by name; private

The times of the first are on the run's clock, as those of its incidents are; the second has times of day.

Several processes append to the first and replace the second, each under a lock on the file.  A silence suppresses
messages, not incidents: when it ends and the cause is still there, the message is sent then.
"""

from __future__ import annotations

import json
import os
import pwd
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from stepscope.alerts.model import Incident
from stepscope.alerts.outbox import LineTail
from stepscope.errors import UsageError
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.files import private_folder, write_private
from stepscope.store.file_io import read_document
from stepscope.store.locks import append_requests, file_locked
from stepscope.store.paths import ALERT_REQUESTS
from stepscope.store.user_runs import state_path

__all__ = [
    "Acknowledgment",
    "RequestDesk",
    "Silence",
    "acknowledge",
    "add_silence",
    "add_user_silence",
    "end_silence",
    "end_user_silence",
    "run_silences",
    "silences_path",
    "user_name",
    "user_silences",
]

SILENCES_FILE = "silences.json"
MOST_SILENCES = 200
MOST_BYTES = 1 << 20
LONGEST_TEXT = 500
LONGEST_S = 366 * 86_400
REREAD_S = 5.0
HOME_S = 1.0
"""How long the user's file may take to be read; judging does not wait longer for it."""


@dataclass(frozen=True, kw_only=True)
class Acknowledgment:
    incident: int
    by: str = ""
    wall_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Silence:
    """No messages about incidents that match all of it; an empty field matches everything.  ``*`` and ``?`` match."""

    id: str
    until_wall_ns: int
    from_wall_ns: int = 0
    run: str = ""
    kind: str = ""
    """Of a finding, or a measure."""
    host: str = ""
    why: str = ""
    by: str = ""

    def active(self, wall_ns: int) -> bool:
        return self.from_wall_ns <= wall_ns < self.until_wall_ns

    def covers(self, incident: Incident, run: str, wall_ns: int) -> bool:
        """Whether it applies now; a silence of a host only if no other host is affected."""
        if not self.active(wall_ns) or (self.run and not fnmatchcase(run, self.run)):
            return False
        if self.kind and not fnmatchcase(incident.kind, self.kind):
            return False
        return not self.host or (bool(incident.hosts) and all(fnmatchcase(host, self.host) for host in incident.hosts))


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A line of ``requests.jsonl``."""

    action: Literal["acknowledge", "silence", "end_silence"]
    wall_ns: int
    by: str = ""
    incident: int | None = None
    silence: Silence | None = None
    silence_id: str = ""


# -- the hub's side ---------------------------------------------------------------------------------------------------


class RequestDesk:
    """What was requested about one run; the engine asks it before it sends anything.  Call it from one thread."""

    def __init__(self, run_dir: Path, environ: Mapping[str, str], *, now_ns: Callable[[], int] = time.time_ns) -> None:
        """``now_ns``: the time of day, for silences of the user."""
        self._run = run_dir.name
        self._now_ns = now_ns
        self._tail = LineTail(run_dir / ALERT_REQUESTS)
        self._user = _UserSilences(silences_path(environ))
        self._acknowledged: list[Acknowledgment] = []
        self._silences: dict[str, Silence] = {}

    def acknowledgments(self) -> Sequence[Acknowledgment]:
        """Those since the last call; at first, all of the run so far."""
        self._read()
        found, self._acknowledged = self._acknowledged, []
        return found

    def silenced(self, incident: Incident, wall_ns: int) -> bool:
        """``wall_ns``: now, on the run's clock."""
        self._read()
        if any(silence.covers(incident, self._run, wall_ns) for silence in self._silences.values()):
            return True
        now_ns = self._now_ns()
        return any(silence.covers(incident, self._run, now_ns) for silence in self._user.silences())

    def _read(self) -> None:
        with suppress(OSError):  # a link or pipe in its place, or the file system has gone
            while lines := self._tail.read():
                for request in _requests(lines):
                    self._take(request)

    def _take(self, request: _Request) -> None:
        if request.action == "acknowledge" and request.incident is not None:
            taken = Acknowledgment(incident=request.incident, by=request.by, wall_ns=request.wall_ns)
            self._acknowledged = [*self._acknowledged[-MOST_SILENCES:], taken]
        else:
            _fold(self._silences, request)


class _UserSilences:
    """The user's file, read again when it changed.  A home directory that does not respond costs ``HOME_S`` once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._found: tuple[Silence, ...] = ()
        self._read_s = -REREAD_S
        self._thread: threading.Thread | None = None

    def silences(self) -> tuple[Silence, ...]:
        alive = self._thread is not None and self._thread.is_alive()
        if not alive and time.monotonic() - self._read_s >= REREAD_S:
            self._read_s = time.monotonic()
            self._thread = threading.Thread(target=self._read, name="user-silences", daemon=True)
            self._thread.start()
            self._thread.join(HOME_S)
        return self._found

    def _read(self) -> None:
        try:
            about = self._path.stat()
            seen = (about.st_mtime_ns, about.st_ino)
            if seen != self._seen:
                self._found, self._seen = _user_file(self._path), seen
        except OSError:
            self._found, self._seen = (), None


# -- requests about a run ---------------------------------------------------------------------------------------------


def acknowledge(run_dir: Path, incidents: Sequence[int], *, by: str, wall_ns: int) -> None:
    """Append acknowledgments; RunUnwritable if that is not possible."""
    by = by[:LONGEST_TEXT]
    _append(run_dir, [_Request(action="acknowledge", wall_ns=wall_ns, by=by, incident=number) for number in incidents])


def add_silence(run_dir: Path, silence: Silence, *, wall_ns: int) -> Silence:
    """Silence incidents of one run; return the silence with its id.  RunUnwritable if that is not possible.

    Its times and ``wall_ns``, which is now, are on the run's clock.
    """
    silence = replace(_checked(silence, wall_ns), run="")
    _append(run_dir, [_Request(action="silence", wall_ns=wall_ns, by=silence.by, silence=silence)])
    return silence


def end_silence(run_dir: Path, silence_id: str, *, by: str, wall_ns: int) -> bool:
    """End a silence of a run; return whether there was one with this id."""
    if silence_id not in {silence.id for silence in run_silences(run_dir)}:
        return False
    _append(run_dir, [_Request(action="end_silence", wall_ns=wall_ns, by=by[:LONGEST_TEXT], silence_id=silence_id)])
    return True


def run_silences(run_dir: Path) -> list[Silence]:
    """The silences of a run that were not ended, also those whose time is over."""
    found: dict[str, Silence] = {}
    tail = LineTail(run_dir / ALERT_REQUESTS)
    with suppress(OSError):
        while lines := tail.read():
            for request in _requests(lines):
                _fold(found, request)
    return list(found.values())


def _append(run_dir: Path, requests: Sequence[_Request]) -> None:
    append_requests(run_dir, run_dir / ALERT_REQUESTS, list(map(encoded, requests)), most_bytes=MOST_BYTES)


def _requests(lines: Sequence[dict[str, Any]]) -> Iterator[_Request]:
    for line in lines:
        try:
            yield decoded(_Request, line)
        except (ValueError, RecursionError):
            continue


def _fold(silences: dict[str, Silence], request: _Request) -> None:
    if request.action == "end_silence":
        silences.pop(request.silence_id, None)
    elif request.silence is not None and (request.silence.id in silences or len(silences) < MOST_SILENCES):
        silences[request.silence.id] = request.silence


# -- silences of the user ---------------------------------------------------------------------------------------------


def silences_path(environ: Mapping[str, str]) -> Path:
    return state_path(environ) / SILENCES_FILE


def user_silences(environ: Mapping[str, str]) -> tuple[Silence, ...]:
    """The user's silences, also those whose time is over."""
    try:
        return _user_file(silences_path(environ))
    except OSError:
        return ()


def add_user_silence(environ: Mapping[str, str], silence: Silence, *, wall_ns: int) -> Silence:
    """Silence incidents of all runs, or of runs by name; those whose time is over are removed from the file."""
    silence = _checked(silence, wall_ns)
    with _user_change(environ) as silences:
        silences[:] = [old for old in silences if old.until_wall_ns > wall_ns]
        if len(silences) >= MOST_SILENCES:
            raise UsageError(f"there are {MOST_SILENCES} silences already; remove some")
        silences.append(silence)
    return silence


def end_user_silence(environ: Mapping[str, str], silence_id: str) -> bool:
    """End a silence of the user; return whether there was one with this id."""
    with _user_change(environ) as silences:
        before = len(silences)
        silences[:] = [silence for silence in silences if silence.id != silence_id]
        return len(silences) < before


@contextmanager
def _user_change(environ: Mapping[str, str]) -> Iterator[list[Silence]]:
    path = silences_path(environ)
    try:
        private_folder(path.parent)
        with file_locked(path.with_suffix(".lock"), 0o600):
            silences = list(user_silences(environ))
            before = list(silences)
            yield silences
            if silences != before:
                document = {"schema": 1, "silences": [encoded(silence) for silence in silences]}
                write_private(path, json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or type(error).__name__}") from None


def user_name(environ: Mapping[str, str]) -> str:
    """Who requests something, unless they say so."""
    if name := environ.get("USER") or environ.get("LOGNAME"):
        return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _user_file(path: Path) -> tuple[Silence, ...]:
    try:
        rows = json.loads(read_document(path, most=MOST_BYTES))["silences"]
        return tuple(decoded(Silence, row) for row in rows[:MOST_SILENCES])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()


def _checked(silence: Silence, wall_ns: int) -> Silence:
    """The silence with an id and texts of bounded length; UsageError if it never applies."""
    start_ns = silence.from_wall_ns or wall_ns
    if silence.until_wall_ns <= max(start_ns, wall_ns):
        raise UsageError("a silence must end in the future")
    if silence.until_wall_ns - start_ns > LONGEST_S * 1_000_000_000:
        raise UsageError("a silence can last a year at most")
    texts = {name: getattr(silence, name)[:LONGEST_TEXT] for name in ("run", "kind", "host", "why", "by")}
    return replace(silence, id=silence.id or os.urandom(4).hex(), from_wall_ns=start_ns, **texts)

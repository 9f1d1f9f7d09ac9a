"""Connect to a hub: its address and token, the HTTP client, and a private hub for a run that has none.

The client asks on one persistent connection and receives the event stream on another. The token goes into a header. A
hub with a self-signed certificate is identified by its fingerprint; without a fingerprint a trusted authority must have
signed the certificate. ``close`` may be called from another thread and interrupts whatever the client waits for.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from stepscope.agent.shipping.client import connected, encrypted, plain, split_url
from stepscope.errors import HubError, HubMissing, HubRefused, UsageError
from stepscope.records.paths import helper_command, helper_environment
from stepscope.store.documents import HubFile
from stepscope.terminal.documents import Runs, decode

__all__ = ["HubReader", "PrivateHub", "RunAddress", "address_from_hub_file", "fingerprint_from", "token_from"]


# -- address of a run -------------------------------------------------------------------------------------------------

ENV_TOKEN = "STEPSCOPE_TOKEN"
_TOKEN = re.compile(r"[!-~]{1,1024}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class RunAddress:
    url: str
    token: str = field(repr=False)
    run: str
    """ID of the run; empty: the newest run of that hub."""
    fingerprint: str = ""
    """SHA-256 of the certificate, hexadecimal; empty: a trusted authority must have signed the certificate."""

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid address, HubError for an invalid token."""
        split_url(self.url)
        if not _TOKEN.fullmatch(self.token):
            raise HubError("invalid token: it is empty or contains invalid characters")


def address_from_hub_file(about: HubFile, run: str) -> RunAddress:
    return RunAddress(url=about.url, token=about.token, run=run, fingerprint=about.fingerprint)


def token_from(file: Path | None, environ: Mapping[str, str] | None = None) -> str:
    """The token of a remote hub, never from the command line, which others could read."""
    environ = os.environ if environ is None else environ
    if file is None:
        token = environ.get(ENV_TOKEN, "").strip()
        if not token:
            raise UsageError(f"the hub requires a token: pass --token-file FILE or set {ENV_TOKEN}")
        return token
    try:
        return file.read_text(errors="replace").strip()
    except OSError as error:
        raise UsageError(f"cannot read the token file {file}: {error.strerror}") from None


def fingerprint_from(said: str) -> str:
    """Normalize a fingerprint as written by `hub.json`, ``serve`` or ``openssl``."""
    plain = said.replace(":", "").lower()
    if plain and not _FINGERPRINT.fullmatch(plain):
        raise UsageError("--fingerprint must be the SHA-256 of the hub's certificate: 64 hexadecimal digits")
    return plain


# -- client -----------------------------------------------------------------------------------------------------------

PATIENCE_S = 30.0
"""Timeout of a request; a hub that opens a large run takes a few seconds for its first answer."""
SILENCE_S = 20.0
"""The hub sends something every five seconds; a stream that is silent for longer is dead."""
MOST_BYTES = 64 << 20
CHUNK = 1 << 16
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FileTail:
    """The end of a file."""

    data: bytes
    offset: int
    size: int


class HubReader:
    """One thread asks; any thread may close."""

    def __init__(self, place: RunAddress) -> None:
        self._place = place
        self._tls, self._host, self._port, self._prefix = split_url(place.url)
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        """Duplicate handles of open sockets, used to shut them down; TLS takes over the originals."""
        self._closed = False
        self.run = place.run

    def find_run(self) -> str:
        """ID of the named run or, without a name, of the newest, preferably one that is running."""
        if not self.run:
            rows = self.get("runs", {"limit": 100}, Runs, of_run=False).runs
            if not rows:
                raise HubMissing(f"{self._where} has no runs yet")
            self.run = next((row.id for row in rows if row.status == "running"), rows[0].id)
        return self.run

    def get(self, path: str, params: Mapping[str, Any], kind: type[T], *, of_run: bool = True) -> T:
        """A document below the run; raises HubError."""
        return decode(self._ask(self._path(path, params, of_run=of_run))[0], kind)

    def file(self, path: str, *, tail: int) -> FileTail:
        """The end of a file of the run."""
        data, headers = self._ask(self._path(f"files/{path}", {"tail": tail}))
        size, offset = (_number(headers.get(f"X-Stepscope-{name}")) for name in ("Size", "Offset"))
        return FileTail(data=data, offset=offset, size=max(size, len(data)))

    def stream(self, after: str) -> Iterator[bytes]:
        """Stream data after that ID as it arrives, until the connection ends; a lost connection raises HubError."""
        path = self._path("stream", {})
        headers = {**self._headers("text/event-stream"), **({"Last-Event-ID": after} if after else {})}
        connection, handle = self._connect()
        sock = connection.sock  # http.client drops it if the other side will close
        try:
            connection.request("GET", path, headers=headers)
            with connection.getresponse() as response:
                self._check(response, lambda: response.read(CHUNK))
                sock.settimeout(SILENCE_S)
                while piece := response.read1(CHUNK):
                    yield piece
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._trouble(error) from None
        finally:
            self._let_go(connection, handle)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for handle in self._open:
                try:
                    handle.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the hub was faster

    def forget(self) -> None:
        """Close the persistent connection; call it in the thread that asks."""
        if self._connection is not None:
            self._let_go(self._connection, self._handle)
            self._connection = None

    @property
    def _where(self) -> str:
        return f"the hub at {self._host}:{self._port}"

    def _path(self, path: str, params: Mapping[str, Any], *, of_run: bool = True) -> str:
        run = f"runs/{quote(self.find_run(), safe='')}" if of_run else ""
        words = "/".join(filter(None, (run, quote(path))))
        asked = urlencode({name: value for name, value in params.items() if value is not None})
        return f"{self._prefix}/api/v1/{words}{'?' if asked else ''}{asked}"

    def _headers(self, accept: str) -> dict[str, str]:
        return {"Accept": accept, "Accept-Encoding": "identity", "Authorization": f"Bearer {self._place.token}"}

    def _ask(self, path: str) -> tuple[bytes, http.client.HTTPMessage]:
        """Send a request; if the hub closed the idle connection, reconnect once."""
        kept = self._connection is not None
        while True:
            try:
                return self._ask_once(path)
            except (OSError, http.client.HTTPException) as error:
                self.forget()
                if not kept or isinstance(error, TimeoutError) or self._closed:
                    raise self._trouble(error) from None
                kept = False

    def _ask_once(self, path: str) -> tuple[bytes, http.client.HTTPMessage]:
        if self._connection is None:
            self._connection, self._handle = self._connect()
        self._connection.request("GET", path, headers=self._headers("*/*"))
        response = self._connection.getresponse()
        data = response.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            self.forget()
            raise HubError(f"the response of {self._where} is too long")
        self._check(response, lambda: data)
        if response.will_close:
            self.forget()
        return data, response.headers

    def _check(self, response: http.client.HTTPResponse, body: Any) -> None:
        if response.status == 200:
            return
        if response.status == 401:
            raise HubRefused(f"{self._where} rejected this token")
        why = _reason(body()) or f"HTTP status {response.status}"
        if response.status == 404:
            raise HubMissing(f"{self._where}: {why}")
        raise HubError(f"{self._where}: {why}")

    def _connect(self) -> tuple[http.client.HTTPConnection, socket.socket]:
        deadline_s = time.monotonic() + PATIENCE_S
        try:
            sock = connected(self._host, self._port, deadline_s)
        except OSError as error:
            raise self._trouble(error) from None
        handle = sock.dup()
        with self._lock:
            self._open.add(handle)
        connection = http.client.HTTPConnection(self._host, self._port)
        try:
            if self._closed:
                raise ConnectionError("closed")
            if self._tls:
                sock = encrypted(sock, self._host, deadline_s, trusted=not self._place.fingerprint)
                self._check_certificate(sock)
        except OSError as error:
            sock.close()
            self._let_go(connection, handle)
            raise self._trouble(error) from None
        except HubError:
            sock.close()
            self._let_go(connection, handle)
            raise
        sock.settimeout(PATIENCE_S)
        connection.sock = sock
        return connection, handle

    def _check_certificate(self, sock: Any) -> None:
        wanted = self._place.fingerprint
        if wanted and hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest() != wanted:
            raise HubRefused(f"the certificate of {self._where} does not match --fingerprint")

    def _let_go(self, connection: http.client.HTTPConnection, handle: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._open.discard(handle)
            handle.close()

    def _trouble(self, error: Exception) -> HubError:
        verify = getattr(error, "verify_message", "")
        if verify:
            return HubRefused(f"the certificate of {self._where} is not trusted ({verify}): pass --fingerprint")
        if isinstance(error, TimeoutError):
            return HubError(f"{self._where} does not answer")
        if isinstance(error, OSError):
            return HubError(f"{self._where} cannot be reached: {error.strerror or type(error).__name__}")
        return HubError(f"the response of {self._where} is not HTTP")


def _reason(body: bytes) -> str:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return plain(said.get("error")) if isinstance(said, dict) else ""


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 19 else 0


# -- private hub ------------------------------------------------------------------------------------------------------
# A run without a hub is served to this process alone, with ``stepscope serve`` on loopback and a private token. The
# server ends with its standard input, so also if we are killed.

PRIVATE_HUB_START_S = 60.0
PRIVATE_HUB_END_S = 5.0


class PrivateHub:
    """A hub for this process. ``place`` starts it; ``close`` may come from another thread and interrupts a start."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = tempfile.TemporaryDirectory(prefix="stepscope-watch-")
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._closed = False
        self._lock = threading.Lock()

    def place(self) -> RunAddress:
        """The address of the hub; raises HubError if it cannot be started."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            token = (Path(self._folder.name) / "token").read_text().strip()
        except OSError as error:
            raise HubError(f"cannot serve {self._run_dir}: {error.strerror}") from None
        return RunAddress(url=self._url, token=token, run=self._run_dir.resolve().name)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._process is not None:
                _end_process(self._process)
        self._folder.cleanup()

    def _start(self) -> None:
        place = Path(self._folder.name)
        words = ["serve", str(self._run_dir), "--port", "0", "--token-file", str(place / "token"), "--until-eof"]
        words += ["--audit-log", str(place / "audit.jsonl")]  # only this process reads there
        with self._lock:
            if self._closed:
                raise HubError("the view was closed")
            with (place / "stderr").open("wb") as errors:
                self._process = process = subprocess.Popen(
                    helper_command("stepscope", *words),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=helper_environment(os.environ),
                    start_new_session=True,  # Ctrl-C is for us
                )
        self._url = self._first_line(process)
        if not self._url.startswith("http://"):
            with self._lock:
                _end_process(process)
            raise HubError(f"cannot serve {self._run_dir}: {_last_line(place / 'stderr')}")

    def _first_line(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        until_s = time.monotonic() + PRIVATE_HUB_START_S
        line = b""
        with process.stdout as stream:
            while not line.endswith(b"\n") and time.monotonic() < until_s and not self._closed:
                if select.select([stream], [], [], 0.1)[0]:
                    piece = os.read(stream.fileno(), 4096)
                    if not piece:
                        break
                    line += piece
        return line.decode("ascii", "replace").strip()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(PRIVATE_HUB_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(path: Path) -> str:
    try:
        said = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        said = []
    return said[-1].removeprefix("stepscope: ") if said else "the server printed no error"

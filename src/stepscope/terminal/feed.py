"""Connects to a hub and keeps a snapshot of a run in sync with it, using two threads.

One thread follows the event stream and reconnects after a lost connection, a little later each time. The other thread
requests what the stream does not contain (the visible rows of the table, a rank, a log, the machines) when something
changed, for at most a fraction of the time. Readers take ``feed.now``, an immutable value.

Connections: a hub's address and token, the HTTP client, and a private hub for a run that has none.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from stepscope.agent.shipping.client import connected, encrypted, plain, split_url
from stepscope.errors import HubError, HubMissing, HubRefused, UsageError
from stepscope.records.paths import helper_command, helper_environment
from stepscope.store.documents import HubFile
from stepscope.terminal.documents import (
    KEPT_STEPS,
    Heartbeat,
    Link,
    Machines,
    Message,
    MessageDecoder,
    Output,
    Rank,
    Ranks,
    Run,
    Runs,
    Samples,
    Snapshot,
    Steps,
    SummaryAnswer,
    Wanted,
    apply_message,
    decode,
    window_steps,
    with_run,
    with_steps,
)

__all__ = ["Feed", "HubReader", "PrivateHub", "RunAddress", "address_from_hub_file", "fingerprint_from", "token_from"]

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


def fingerprint_from(text: str) -> str:
    """Normalize a fingerprint as written by `hub.json`, ``serve`` or ``openssl``."""
    plain = text.replace(":", "").lower()
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
        query = urlencode({name: value for name, value in params.items() if value is not None})
        return f"{self._prefix}/api/v1/{words}{'?' if query else ''}{query}"

    def _headers(self, accept: str) -> dict[str, str]:
        return {"Accept": accept, "Accept-Encoding": "identity", "Authorization": f"Bearer {self._place.token}"}

    def _ask(self, path: str) -> tuple[bytes, http.client.HTTPMessage]:
        """Send a request; if the hub closed the idle connection, reconnect once."""
        reused = self._connection is not None
        while True:
            try:
                return self._ask_once(path)
            except (OSError, http.client.HTTPException) as error:
                self.forget()
                if not reused or isinstance(error, TimeoutError) or self._closed:
                    raise self._trouble(error) from None
                reused = False

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
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return plain(document.get("error")) if isinstance(document, dict) else ""


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
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].removeprefix("stepscope: ") if lines else "the server printed no error"


# -- feed -------------------------------------------------------------------------------------------------------------

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
LAST_TRIES = 7
"""Attempts to find a hub again after the run is over."""
ASK_S = 1.0
ASKING_SHARE = 0.2
"""Maximum share of the time spent on requests: with thousands of ranks the hub takes long for the table."""
SAMPLES_S = 5.0
LOG_BYTES = 32 << 10
RANK_STEPS = 120
SAMPLE_BINS = 120
MOST_SERIES = 64
"""Maximum number of GPUs or hosts to request; with more, the line says that it covers a part."""
TERMINAL_LOG = "logs/terminal.log"
OUTPUTS = (TERMINAL_LOG, "logs/rank-0.log", "logs/main.log")
"""Files with the output of a job, the best first."""
GPU_FIELDS = "util_percent,mem_used,mem_total,power_w,temperature_c"
HOST_FIELDS = "cpu_percent,mem_total,mem_available"
PROCESS_FIELDS = "rss,rss_file"


class Feed:
    """A snapshot in sync with a hub. ``where`` returns its address; HubError: not available yet.

    ``where`` is called for each connection, since the address may change. It may block; ``close`` calls ``end`` to make
    it return.
    """

    def __init__(self, where: Callable[[], RunAddress], *, end: Callable[[], None] = lambda: None) -> None:
        self._where = where
        self._end = end
        self._now = Snapshot()
        self._ahead_ns: int | None = None
        self._wanted = Wanted()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._poke = threading.Event()
        self._readers: set[HubReader] = set()
        self._place: RunAddress | None = None
        """The hub's address while connected."""
        self._threads = [
            threading.Thread(target=self._follow, name="live stream", daemon=True),
            threading.Thread(target=self._keep_asking, name="live questions", daemon=True),
        ]

    @property
    def now(self) -> Snapshot:
        return self._now

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        self._poke.set()
        with self._lock:
            for reader in self._readers:
                reader.close()
        self._end()
        for thread in self._threads:
            thread.join()

    def want(self, wanted: Wanted) -> None:
        if wanted != self._wanted:
            self._wanted = wanted
            self._poke.set()

    def wall_ns(self) -> int:
        """Current time on the run's clock as reported by the hub, advanced by the monotonic clock."""
        return time.time_ns() if self._ahead_ns is None else time.monotonic_ns() + self._ahead_ns

    def _change(self, change: Callable[[Snapshot], Snapshot]) -> None:
        with self._lock:
            self._now = change(self._now)

    def _linked(self, link: Link, why: str = "") -> None:
        self._change(lambda now: replace(now, link=link, why=why))

    # ── the stream ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self) -> None:
        wait_s, last_id, last_tries = FIRST_WAIT_S, "", LAST_TRIES
        while not self._stop.is_set():
            before = self._now.beat
            link: Link = "lost"
            try:
                last_id = self._once(self._where(), last_id)
                why = "the hub closed the connection"
            except HubRefused as error:
                link, why = "refused", str(error)
            except HubMissing as error:
                link, why = "missing", str(error)
            except (HubError, UsageError) as error:
                why = str(error)
            if self._now.over and link != "refused":
                # The hub of a job ends with it; another one may have the summary a little later.
                last_tries -= 1
                link, why = ("over" if last_tries else "ended"), ""
            if self._stop.is_set():
                return
            self._linked(link, why)
            if link in ("refused", "ended"):
                return
            wait_s = FIRST_WAIT_S if self._now.beat != before else min(2 * wait_s, LONGEST_WAIT_S)
            self._stop.wait(wait_s)

    def _once(self, place: RunAddress, last_id: str) -> str:
        """Handle one connection to its end; return the ID of the last message."""
        reader = self._join(place)
        try:
            place = replace(place, run=reader.find_run())
            self._load(reader)
            messages = MessageDecoder()
            for piece in reader.stream(last_id):
                if self._place is None:
                    self._place = place
                    self._linked("live")
                    self._poke.set()
                for message in messages.feed(piece):
                    last_id = message.id or last_id
                    self._take(reader, message)
            return last_id
        finally:
            self._place = None
            self._leave(reader)

    def _load(self, reader: HubReader) -> None:
        run = reader.get("", {}, Run)
        # For a finished run the hub holds more steps than are kept here, so that it combines several into one row.
        first = max(0, run.step - max(KEPT_STEPS, window_steps(run)) + 1)
        steps = reader.get("steps", {"first": first, "bins": KEPT_STEPS, "worst": 1}, Steps)
        self._change(lambda now: with_steps(with_run(replace(now, steps=(), stepped_wall_ns=0), run), steps))

    def _take(self, reader: HubReader, message: Message) -> None:
        before = self._now

        if message.event == "heartbeat":
            self._ahead_ns = decode(message.data, Heartbeat).wall_ns - time.monotonic_ns()

        def change(now: Snapshot) -> Snapshot:
            seen_ns = self.wall_ns()
            stepped_ns = seen_ns if message.event == "steps" else now.stepped_wall_ns
            return replace(apply_message(now, message), seen_wall_ns=seen_ns, stepped_wall_ns=stepped_ns)

        self._change(change)
        if message.event == "gone":
            raise HubMissing("the run no longer exists")
        if message.event == "reset" or (self._now.over and not before.over):
            # A job that restarted, or is over, has other figures than before. Steps between our request and the first
            # message of the stream are in neither, so load again.
            self._load(reader)
        if message.event == "status" and _fewer_live(before, self._now):
            self._poke.set()  # the table must show it immediately

    # ── questions ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _keep_asking(self) -> None:
        pause_s = ASK_S
        asker: _Asker | None = None
        while not self._stop.is_set():
            poked = self._poke.wait(pause_s)
            self._poke.clear()
            place = self._place
            if asker is not None and asker.place is not place:
                self._leave(asker.reader)
                asker = None
            if place is None or self._stop.is_set():
                continue
            if asker is None:
                asker = _Asker(place, self._join(place))
                self._change(lambda known, place=place: replace(known, page=place.url))  # type: ignore[misc]
            began_s = time.monotonic()
            try:
                found = asker.ask(self._now, self._wanted, poked=poked)
                self._change(lambda now, found=found: found(now))  # type: ignore[misc]
            except HubError:
                asker.forget()  # the stream thread reports the problem and the recovery
            pause_s = max(ASK_S, (time.monotonic() - began_s) / ASKING_SHARE)
        if asker is not None:
            self._leave(asker.reader)

    def _join(self, place: RunAddress) -> HubReader:
        """A reader that ``close`` interrupts; each thread has its own."""
        reader = HubReader(place)
        with self._lock:
            self._readers.add(reader)
            if self._stop.is_set():
                reader.close()
        return reader

    def _leave(self, reader: HubReader) -> None:
        reader.forget()
        with self._lock:
            self._readers.discard(reader)


class _Asker:
    """Remembers the last request and its time."""

    def __init__(self, place: RunAddress, reader: HubReader) -> None:
        self.place = place
        self.reader = reader
        self._beat = -1
        self._wanted: Wanted | None = None
        self._sampled_s = float("-inf")
        self._over = False
        self._output = ""

    def forget(self) -> None:
        self._beat = -1

    def ask(self, now: Snapshot, wanted: Wanted, *, poked: bool) -> Callable[[Snapshot], Snapshot]:
        """The change to apply to the snapshot; raises HubError if the hub does not answer."""
        found: dict[str, Any] = {}
        if now.beat != self._beat or wanted != self._wanted:
            found |= self._table(wanted, device=now.on_device)
            if wanted.rank is not None:
                found["rank"] = self._rank(wanted.rank, device=now.on_device)
            if not now.over:
                found["run"] = self.reader.get("", {}, Run)
            self._beat, self._wanted = now.beat, wanted
        now_s = time.monotonic()
        due = now_s - self._sampled_s >= SAMPLES_S or now.over != self._over
        if due and (not now.over or now.machines is None):
            found["processes"] = self._samples("process", PROCESS_FIELDS)
            found["machines"] = self._machines() if now.over else None
            if not now.over:
                found["gpus"] = self._samples("gpu", GPU_FIELDS)
                found["hosts"] = self._samples("host", HOST_FIELDS)
            self._sampled_s, self._over = now_s, now.over
        if wanted.output and (poked or not now.over or now.output is None):
            rank = found.get("rank", now.rank)
            found["output"] = self._log(rank.log if wanted.rank is not None and rank is not None else None)
        return lambda known: _with(known, found)

    def _table(self, wanted: Wanted, *, device: bool) -> dict[str, Any]:
        order = wanted.order
        ranks = self._ranks(order, wanted.start, max(1, wanted.limit), device=device)
        if order == "work" and wanted.start == 0:
            return {"ranks": ranks, "slowest": ranks}
        return {"ranks": ranks, "slowest": self._ranks("work", 0, 1, device=device)}

    def _ranks(self, order: str, start: int, limit: int, *, device: bool) -> Ranks:
        """Ask for rows of the table by the clock of the findings."""
        by = f"device:{order}" if device and order != "rank" else order
        found = self.reader.get("ranks", {"order": by, "start": start, "limit": limit}, Ranks)
        if not (device and found.device_mean_ns):
            return found
        return msgspec.structs.replace(found, order=order, mean_ns=found.device_mean_ns)

    def _rank(self, rank: int, *, device: bool) -> Rank | None:
        try:
            found = self.reader.get(f"ranks/{rank}", {"bins": RANK_STEPS}, Rank)
        except HubMissing:
            return None  # no step yet
        if device and found.device_mean_ns:
            return msgspec.structs.replace(found, mean_ns=found.device_mean_ns)
        return found

    def _samples(self, kind: str, fields: str) -> Samples:
        params = {"kind": kind, "fields": fields, "bins": SAMPLE_BINS, "stat": "mean", "limit": MOST_SERIES}
        try:
            return self.reader.get("samples", params, Samples)
        except HubError:
            return Samples()  # too many at once for a very large job

    def _machines(self) -> Machines | None:
        """Figures from the summary, for the steady steps; samples would include start-up."""
        try:
            return self.reader.get("summary", {"keys": "host"}, SummaryAnswer).summary.host
        except HubError:
            return None  # may not be written yet

    def _log(self, wanted: str | None) -> Output | None:
        """The requested log; else the output of the whole job, under the best name that exists."""
        if wanted is None and self._output:
            wanted = self._output
        for path in (wanted,) if wanted is not None else OUTPUTS:
            try:
                piece = self.reader.file(path, tail=LOG_BYTES)
            except HubMissing:
                continue
            if path in OUTPUTS and piece.size:
                self._output = path
            if piece.size or wanted is not None:
                return Output(path=path, text=piece.data, size=piece.size)
        return None


def _fewer_live(before: Snapshot, now: Snapshot) -> bool:
    return before.status is not None and now.status is not None and now.status.live_ranks < before.status.live_ranks


def _with(known: Snapshot, found: Mapping[str, Any]) -> Snapshot:
    run = found.get("run")
    if run is not None:
        known = with_run(known, run)
    return replace(known, **{name: value for name, value in found.items() if name != "run"})

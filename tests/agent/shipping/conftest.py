"""A small real hub with faults at command, and a run directory that grows at command: at the end they must be equal."""

from __future__ import annotations

import copy
import json
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stepscope.hub.transport import TlsFiles, make_certificate, server_context
from stepscope.records.identity import RankIdentity
from stepscope.records.steps import SLOT_BYTES, SLOT_HEAD, STEP
from stepscope.ring import RingBatch
from stepscope.store.create import create_run
from stepscope.store.file_io import append_jsonl
from stepscope.store.live.ring_files import RingSidecar, SegmentWriter, guess_sidecar, read_segment, write_sidecar
from stepscope.store.paths import segment_path, sidecar_path
from stepscope.wire.frames import Frame, inflate_part, read_block, read_frame, ring_id, rows_of
from stepscope.wire.handshake import (
    HELLO_PATH,
    PROOF_HEADER,
    Join,
    Peer,
    Positions,
    Welcome,
    read_hello,
    read_join,
    write_challenge,
    write_welcome,
)

KEY = b"k" * 32
PATIENCE_S = 30.0


class Gap(Exception):
    pass


class StoredSpool:
    """What the hub has of one spool."""

    def __init__(self) -> None:
        self.sidecars: dict[str, dict[str, Any]] = {}
        self.last_seq: dict[str, int] = {}
        self.slots: dict[str, bytes] = {}
        self.lost: dict[str, int] = {}
        self.live: dict[str, tuple[int, int, int, int]] = {}
        self.files: dict[str, bytes] = {}
        self.whole: dict[str, bytes] = {}
        self.byes: list[Any] = []
        self.duplicates = 0

    def positions(self) -> Positions:
        return Positions(rings=dict(self.last_seq), files={name: len(data) for name, data in self.files.items()})

    def accept(self, frame: Frame) -> None:
        """All of it or, with Gap, nothing."""
        ids = {ring_id(key): key for key in self.sidecars}
        for part in frame.parts:
            raw = inflate_part(part)
            if part.kind == "rings":
                for document in json.loads(raw):
                    key = RingSidecar.from_dict(document).key
                    self.sidecars[key] = document
                    self.last_seq.setdefault(key, 0)
                    ids[ring_id(key)] = key
            elif part.kind == "steps":
                self._rows(raw, ids)
            elif part.kind == "file":
                self.whole[part.name] = raw
            else:
                self._bytes(part.kind, part.name, part.offset, raw)
        if frame.head.bye is not None:
            self.byes.append(dict(frame.head.bye))

    def _rows(self, raw: bytes, ids: dict[bytes, str]) -> None:
        for rows in rows_of(read_block(raw)):
            key = ids[rows.ring]  # a block of a ring that was not told of is a fault
            if rows.after_seq > self.last_seq[key]:
                raise Gap
            if rows.last_seq < self.last_seq[key] or (rows.slots and rows.last_seq == self.last_seq[key]):
                self.duplicates += 1
                continue
            new = [slot for slot in rows.slots if SLOT_HEAD.unpack_from(slot)[3] > self.last_seq[key]]
            self.slots[key] = self.slots.get(key, b"") + b"".join(new)
            self.lost[key] = self.lost.get(key, 0) + rows.lost
            self.last_seq[key] = rows.last_seq
            self.live[key] = (rows.live_step, rows.live_since_ns, rows.live_phase, rows.state)

    def _bytes(self, kind: str, name: str, offset: int, raw: bytes) -> None:
        assert kind == "log" or raw.endswith(b"\n")
        answer = self.files.get(name, b"")
        if offset > len(answer):
            raise Gap
        if offset + len(raw) <= len(answer):
            self.duplicates += 1
        self.files[name] = answer + raw[len(answer) - offset :]


class Hub:
    """``faults``: what is to go wrong with the next requests, one each; None: nothing.

    A status; "drop": the connection closes before the frame is taken; "drop ack": after it; "garbage", "no http", "no
    json": an answer that is none; "silence": no answer until the hub is stopped.
    """

    def __init__(self, *, key: bytes = KEY, tls: TlsFiles | None = None, local: bool = False) -> None:
        self.key = key
        self.tls = tls
        self.local = local
        self.stored: dict[str, StoredSpool] = {}
        self.joins: list[Join] = []
        self.frames: list[Frame] = []
        self.tokens: dict[str, str] = {}
        self.faults: deque[Any] = deque()
        self.join_faults: deque[Any] = deque()
        self.retry_s: float = 0.05
        self.next_s: float = 0.05
        self.watched: bool | None = None
        self.peers: list[dict[str, Any]] | None = None
        self.ahead_ns = 0
        self.paths: list[str] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._over = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    @property
    def certificate(self) -> bytes:
        return self.tls.fingerprint if self.tls else b""

    def start(self) -> Hub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_POST(self) -> None:
                hub.handle(self)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = False
            block_on_close = True

            def get_request(self) -> tuple[socket.socket, Any]:
                connection, address = super().get_request()
                if hub.tls:
                    context = server_context(hub.tls)
                    connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                hub._open.add(connection)
                return connection, address

            def handle_error(self, *_: Any) -> None:
                pass  # the client went away, or talks no TLS

            def shutdown_request(self, request: Any) -> None:
                hub._open.discard(request)
                super().shutdown_request(request)

        self._over.clear()
        self._server = Server(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def stop(self) -> None:
        """As killed: connections are cut, tokens forgotten."""
        if self._server is None:
            return
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._server.server_close()
        self._server = None
        self.tokens.clear()

    def spool(self) -> StoredSpool:
        (stored,) = self.stored.values()
        return stored

    def lose(self, earlier: dict[str, StoredSpool]) -> None:
        """The disk lost what came after."""
        self.stored = copy.deepcopy(earlier)

    def keep(self) -> dict[str, StoredSpool]:
        return copy.deepcopy(self.stored)

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        received_ns = time.time_ns() + self.ahead_ns
        body = request.rfile.read(int(request.headers["Content-Length"]))
        if request.path.endswith(HELLO_PATH):
            self._hello(request, body)
            return
        self.paths.append(request.path)
        joining = request.path.endswith("/join")
        faults = self.join_faults if joining else self.faults
        with self._lock:
            fault = faults.popleft() if faults else None
            if fault == "drop":
                request.close_connection = True
                return
            if joining and fault is None:
                status, said, proof = self._join(request, body)
            elif fault in (None, "drop ack"):
                status, said, proof = self._frame(request, body, received_ns)
            else:
                status, said, proof = fault, {"why": "a fault", "retry_s": self.retry_s}, ""
                if fault == 409:
                    said = {"positions": self._positions(read_frame(body).head.spool)}
        if fault == "drop ack":
            request.close_connection = True
        elif fault == "silence":
            self._over.wait(PATIENCE_S)
            request.close_connection = True
        elif fault == "no http":
            request.wfile.write(b"\x00\xff\r\n\r\n" * 10)
            request.close_connection = True
        elif fault in ("garbage", "no json"):
            self._answer(request, 200, b"[1, 2" if fault == "no json" else b'{"next_s": "x", "peers": 7}', proof="")
        else:
            text = said if isinstance(said, bytes) else json.dumps(said).encode()
            self._answer(request, int(status), text, proof)

    def _answer(self, request: BaseHTTPRequestHandler, status: int, text: bytes, proof: str) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(text)))
        request.send_header(PROOF_HEADER, proof)
        request.end_headers()
        request.wfile.write(text)

    def _hello(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        nonce = read_hello(body, request.headers.get(PROOF_HEADER, ""), self.key, self.certificate)
        if nonce is None:
            self._answer(request, 403, b'{"why": "another key"}', "")
        else:
            self._answer(request, 200, *write_challenge("0" * 32, nonce, self.key, self.certificate))

    def _join(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, Any, str]:
        join = read_join(body, request.headers.get(PROOF_HEADER, ""), self.key, self.certificate)
        if join is None:
            return 403, {"why": "another key"}, ""
        self.joins.append(join)
        token = secrets.token_urlsafe(16)
        self.tokens[token] = join.spool
        self.stored.setdefault(join.spool, StoredSpool())
        welcome = Welcome(
            run=f"{join.run}-2",
            token=token,
            positions=self.stored[join.spool].positions(),
            probe_key="ee" * 16,
            next_s=self.next_s,
            peers=(Peer(node=0, host="a", address="10.0.0.1", port=5),),
            local=self.local,
        )
        return 200, *write_welcome(welcome, join.nonce, self.key, self.certificate)

    def _frame(self, request: BaseHTTPRequestHandler, body: bytes, received_ns: int) -> tuple[int, Any, str]:
        spool = self.tokens.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if spool is None:
            return 401, {}, ""
        frame = read_frame(body)
        assert frame.head.spool == spool
        attempt = copy.copy(self.stored[spool])
        for name, value in vars(attempt).items():
            setattr(attempt, name, copy.copy(value))
        try:
            attempt.accept(frame)
        except Gap:
            return 409, {"positions": self._positions(spool)}, ""
        self.stored[spool] = attempt
        self.frames.append(frame)
        sent_ns = time.time_ns() + self.ahead_ns
        document = {
            "next_s": self.next_s,
            "received_wall_ns": received_ns,
            "sent_wall_ns": sent_ns,
            "peers": self.peers,
        }
        return 200, document if self.watched is None else {**document, "watched": self.watched}, ""

    def _positions(self, spool: str) -> dict[str, Any]:
        positions = self.stored.setdefault(spool, StoredSpool()).positions()
        return {"rings": dict(positions.rings), "files": dict(positions.files)}


class Spool:
    """A run directory that grows as an agent makes it grow."""

    def __init__(self, folder: Path) -> None:
        command = ["python", "train.py"]
        paths = create_run(folder / "runs", "job.node1", command, environ={}, sessions=folder / "sessions")
        self.run_dir = paths.run_dir
        (self.run_dir / "flight").mkdir()
        (self.run_dir / "hangs").mkdir()
        self._segments: dict[int, SegmentWriter] = {}
        self._abouts: dict[int, RingSidecar] = {}

    def key(self, rank: int) -> str:
        return f"node-{100 + rank}-{1000 + rank:x}"

    def ring(self, rank: int, **changes: Any) -> None:
        """Make it, or change what it says of itself."""
        about = self._abouts.get(rank)
        if about is None:
            about = guess_sidecar(self.key(rank))
            changes = {"state": "running", "identity": RankIdentity(host="node", pid=100 + rank, rank=rank), **changes}
            self._segments[rank] = SegmentWriter(segment_path(self.run_dir, self.key(rank)))
        self._abouts[rank] = type(about)(**{**vars(about), **changes})
        write_sidecar(self.run_dir, self._abouts[rank])

    def steps(self, rank: int, count: int, *, lost: int = 0) -> None:
        writer = self._segments[rank]
        first = writer.last_seq + 10
        slots = [_slot(rank, seq) for seq in range(first, first + 10 * count, 10)]
        last_seq = first + 10 * (count - 1) if count else writer.last_seq + 5
        writer.append(RingBatch(slots=slots, last_seq=last_seq, lost=lost, torn=0))

    def lines(self, name: str, *records: dict[str, Any]) -> None:
        append_jsonl(self.run_dir / name, records)

    def write(self, name: str, data: bytes, *, mode: str = "ab") -> None:
        with (self.run_dir / name).open(mode) as file:
            file.write(data)

    def equals(self, stored: StoredSpool) -> None:
        """Every file and ring; lines and frames as far as they are whole."""
        segments = {path.stem: read_segment(path) for path in (self.run_dir / "steps").glob("*.seg")}
        for key, segment in segments.items():
            assert stored.slots.get(key, b"") == segment.slots
            assert (stored.last_seq[key], stored.lost.get(key, 0)) == (segment.last_seq, segment.lost)
        sidecars = {path.stem: json.loads(path.read_bytes()) for path in (self.run_dir / "steps").glob("*.json")}
        assert stored.sidecars == sidecars
        lines = {path.name: path.read_bytes() for path in self.run_dir.glob("*.jsonl")}
        whole = {name: data[: data.rfind(b"\n") + 1] for name, data in lines.items()}
        logs = {f"logs/{path.name}": path.read_bytes() for path in (self.run_dir / "logs").iterdir()}
        expected = {name: data for name, data in {**whole, **logs}.items() if data}
        assert {name: data for name, data in stored.files.items() if data} == expected
        files = [path for folder in ("errors", "hangs", "flight") for path in (self.run_dir / folder).iterdir()]
        for path in files:
            assert stored.whole[f"{path.parent.name}/{path.name}"] == path.read_bytes()

    def about(self, rank: int) -> dict[str, Any]:
        about: dict[str, Any] = json.loads(sidecar_path(self.run_dir, self.key(rank)).read_bytes())
        return about


def _slot(rank: int, seq: int) -> bytes:
    head = SLOT_HEAD.pack(0, STEP, 0, seq)
    return head + struct.pack("<QQ", rank, seq * 7919) + bytes(SLOT_BYTES - len(head) - 16)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path)


@pytest.fixture
def new_spool(tmp_path: Path) -> Callable[[], Spool]:
    """One after the other, for tests that need many."""
    return lambda: Spool(tmp_path / secrets.token_hex(4))


@pytest.fixture
def new_hub() -> Iterator[Callable[..., Hub]]:
    made: list[Hub] = []

    def make(**options: Any) -> Hub:
        made.append(Hub(**options))
        return made[-1]

    yield make
    for hub in made:
        hub.stop()


@pytest.fixture
def hub(new_hub: Callable[..., Hub]) -> Hub:
    return new_hub().start()


@pytest.fixture
def certificates(tmp_path: Path) -> Callable[[], TlsFiles]:
    return lambda: make_certificate(folder=tmp_path)

"""What the tests of the hub's entrance share: a hub in a process of its own, honest agents, and frames to be bent.

Run as a script it is that process: ``gate_parts.py FD RUN_DIR LIMITS [CERTIFICATES]``.  It serves until its standard
input ends, and answers ``GET /counters`` with what it counted.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import socket
import ssl
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import uvloop

from stepscope.hub.audit import AuditLog
from stepscope.hub.ingest.auth import Admission, SenderLimits
from stepscope.hub.ingest.endpoints import HubJournal, IngestApp, in_front
from stepscope.hub.ingest.run_ingest import NodeWatch
from stepscope.hub.limits import Refusals, ServerLimits
from stepscope.hub.server import Server
from stepscope.hub.transport import TlsFiles, user_certificate
from stepscope.records.steps import SLOT_BYTES
from stepscope.store.inbox.journal import BlockRows
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.live.ring_files import RingSidecar, guess_sidecar
from stepscope.wire.frames import FrameHead, Part, RingRows, pack_block, pack_frame, part_of, ring_id
from stepscope.wire.handshake import (
    HELLO_PATH,
    PROOF_HEADER,
    Join,
    Positions,
    Welcome,
    read_challenge,
    read_welcome,
    write_hello,
    write_join,
)

KEY = b"k" * 32
RUN = "night"
NODES = 1000
PATIENCE_S = 20.0


class Fed:
    """A live model that only counts; the real one has tests of its own."""

    def __init__(self) -> None:
        self.rings: list[tuple[str, str]] = []
        self.row_count = 0
        self.watched = False
        self.received: dict[str, list[bytes]] = {}

    def ring(self, about: RingSidecar, *, node: str) -> None:
        self.rings.append((about.key, node))

    def rows(self, taken: BlockRows) -> None:
        self.row_count += len(taken.slots)

    def lines(self, file: str, lines: Sequence[bytes], *, node: str, offset_ns: int) -> None:
        self.received.setdefault(file, []).extend(lines)

    def events(self) -> list[dict[str, Any]]:
        """Those that can be read: an agent may send any bytes as a line."""
        found = []
        for line in self.received.get("events.jsonl", []):
            with suppress(ValueError):
                found.append(json.loads(line))
        return [event for event in found if isinstance(event, dict)]


class Parts:
    """The hub's insides, put together as the hub does it."""

    def __init__(
        self,
        run_dir: Path,
        *,
        certificate: bytes = b"",
        nnodes: int = NODES,
        limits: SenderLimits | None = None,
        clock: Callable[[], float] | None = None,
        local_spool: str = "",
        audit: AuditLog | None = None,
        keys: Callable[[], Sequence[bytes]] = lambda: (KEY,),
    ) -> None:
        times: dict[str, Any] = {} if clock is None else {"clock": clock}
        self.run_dir = run_dir
        self.refusals, self.live, self.inbox = Refusals(), Fed(), Inbox(run_dir)
        self.journal = HubJournal(run_dir, self.live)
        self.admission = Admission(
            keys=keys,
            certificate=certificate,
            names=(f"{RUN}-2", RUN),
            nnodes=nnodes,
            limits=limits,
            local_spool=local_spool,
            **times,
        )
        shared: dict[str, Any] = {
            "admission": self.admission,
            "inbox": self.inbox,
            "journal": self.journal,
            "refusals": self.refusals,
            "audit": audit,
            **times,
        }
        self.ingest = IngestApp(live=self.live, **shared)
        self.watch = NodeWatch(**shared)

    async def ask(
        self, what: str, body: bytes, headers: dict[str, str] | None = None, *, address: str = "10.0.0.9"
    ) -> tuple[int, dict[str, Any], dict[bytes, bytes]]:
        """``POST`` without a socket: status, JSON and headers of the answer."""
        messages: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        sent = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/api/v1/runs/{RUN}/{what}",
            "client": (address, 5),
            "server": ("10.0.0.1", 29555),
            "headers": [*sent, (b"content-length", str(len(body)).encode())],
        }
        await self.ingest(scope, receive, send)
        return messages[0]["status"], json.loads(messages[1]["body"]), dict(messages[0]["headers"])

    def asked(self, what: str, body: bytes, headers: dict[str, str] | None = None, **where: str) -> int:
        """The status alone."""
        return asyncio.run(self.ask(what, body, headers, **where))[0]

    def welcome(self, join: Join, *, address: str = "10.0.0.9", key: bytes = KEY) -> Welcome:
        body, proof = write_join(self.challenged(join, key), key, b"")
        admitted = self.admission.join(
            body, proof, address=address, hub_address="10.0.0.1", positions=lambda _: Positions()
        )
        return read_welcome(admitted.body, admitted.proof, join.nonce, key, b"")

    def challenged(self, join: Join, key: bytes = KEY) -> Join:
        """After a hello."""
        body, proof = self.admission.challenges.answer(*write_hello(join.nonce, key, b""))
        return replace(join, challenge=read_challenge(body, proof, join.nonce, key, b""))

    def close(self) -> None:
        self.inbox.close()


def join_of(node: int, **others: Any) -> Join:
    values: dict[str, Any] = {
        "run": RUN,
        "node": node,
        "nnodes": NODES,
        "host": f"h{node}",
        "spool": secrets.token_hex(16),
        "nonce": secrets.token_hex(16),
    }
    return Join(**{**values, **others})


def ring_of(node: int, rank: int, *, attempt: int = 0, world_size: int = 8, **others: Any) -> RingSidecar:
    guessed = guess_sidecar(f"h{node}-{100 + rank}-{1 + attempt:x}")
    identity = replace(guessed.identity, rank=rank, attempt=attempt, world_size=world_size)
    return replace(guessed, identity=identity, **{"state": "running", "heard_wall_ns": 1, **others})


def rings_part(*rings: RingSidecar) -> Part:
    return part_of("rings", json.dumps([about.to_dict() for about in rings]).encode())


def steps_part(about: RingSidecar, after: int, rows: int) -> Part:
    slots = [bytes(8) + struct.pack("<Q", after + n + 1) + bytes(SLOT_BYTES - 16) for n in range(rows)]
    return part_of(
        "steps",
        pack_block([RingRows(ring=ring_id(about.key), after_seq=after, last_seq=after + rows, slots=slots)]),
    )


def bent(frame: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A frame whose header says something else, and whose checksum is right."""
    (length,) = struct.unpack_from("<I", frame, 12)
    document = json.loads(frame[16 : 16 + length])
    change(document)
    text = json.dumps(document).encode()
    rest = struct.pack("<I", len(text)) + text + frame[16 + length :]
    return summed(frame[:12] + rest)


def summed(frame: bytes) -> bytes:
    """With the checksum that its bytes have."""
    return frame[:8] + struct.pack("<I", zlib.crc32(frame[12:])) + frame[12:]


class HubProcess:
    """A hub that listens on loopback, and what it says of itself."""

    def __init__(self, run_dir: Path, *, limits: dict[str, Any], tls: TlsFiles | None = None) -> None:
        run_dir.mkdir(parents=True)
        self.run_dir, self.tls = run_dir, tls
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(512)
            self.port = listening.getsockname()[1]
            fd = listening.fileno()
            words = [str(fd), str(run_dir), json.dumps(limits), *([str(tls.certificate.parent)] if tls else [])]
            self.process = subprocess.Popen(
                [sys.executable, __file__, *words],
                pass_fds=[fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._memory = psutil.Process(self.process.pid)

    def connect(self, source: str = "127.0.0.1", *, plain: bool = False) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S, (source, 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is None or plain:
            return sock
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context.wrap_socket(sock)

    @contextmanager
    def many(self, count: int, *sources: str, first: bytes = b"", plain: bool = False) -> Iterator[list[socket.socket]]:
        """Open ones, each of which has sent ``first``; closed in the end, whatever happens."""
        with ExitStack() as opened:
            found = []
            for n in range(count):
                sock = self.connect(sources[n % len(sources)] if sources else "127.0.0.1", plain=plain)
                found.append(opened.enter_context(sock))
                sock.sendall(first)
            yield found

    def exchange(self, data: bytes, source: str = "127.0.0.1") -> bytes:
        """Everything that is answered until the hub closes."""
        with self.connect(source) as sock:
            try:
                sock.sendall(data)
            except OSError:
                pass  # it said no before all was sent
            return everything(sock)

    def counters(self) -> dict[str, Any]:
        answer = self.exchange(b"GET /counters HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        counters: dict[str, Any] = json.loads(answer.split(b"\r\n\r\n", 1)[1])
        return counters

    def refused(self, reason: str) -> int:
        return int(self.counters()["refused"][reason])

    def rss_bytes(self) -> int:
        return int(self._memory.memory_info().rss)

    def stop(self) -> str:
        """What it printed; it must end by itself, and well."""
        try:
            said, _ = self.process.communicate("", timeout=PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
        assert self.process.returncode == 0, said
        return said


class Agent:
    """An honest one, with one rank: joins, and sends frames over one connection."""

    def __init__(self, hub: HubProcess, node: int, source: str = "127.0.0.1") -> None:
        self.hub, self.node, self.source = hub, node, source
        self.join = join_of(node)
        self.about = ring_of(node, node, world_size=NODES)
        self.after = 0
        self._connection: http.client.HTTPConnection | None = None
        fingerprint = hub.tls.fingerprint if hub.tls else b""
        self.join = self.hello(self.join)
        status, text, headers = self.say(self.join)
        assert status == 200, text
        self.welcome = read_welcome(text, headers[PROOF_HEADER], self.join.nonce, KEY, fingerprint)
        self.token = self.welcome.token

    def hello(self, join: Join) -> Join:
        """The same with a challenge."""
        fingerprint = self.hub.tls.fingerprint if self.hub.tls else b""
        body, proof = write_hello(join.nonce, KEY, fingerprint)
        status, text, headers = self.post("", body, {PROOF_HEADER: proof}, path=HELLO_PATH)
        assert status == 200, text
        return replace(join, challenge=read_challenge(text, headers[PROOF_HEADER], join.nonce, KEY, fingerprint))

    def say(self, join: Join) -> tuple[int, bytes, Any]:
        body, proof = write_join(join, KEY, self.hub.tls.fingerprint if self.hub.tls else b"")
        return self.post("join", body, {PROOF_HEADER: proof, "Authorization": f"Bearer {join.challenge}"})

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def frame(self, rows: int = 1) -> bytes:
        """The next one; the first also says who its ring is."""
        parts = [] if self.after else [rings_part(self.about)]
        parts.append(steps_part(self.about, self.after, rows))
        self.after += rows
        return pack_frame(FrameHead(node=self.node, spool=self.join.spool, sent_wall_ns=1), parts)

    def send(self, frame: bytes | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
        sent = {"Authorization": f"Bearer {self.token}", **headers}
        status, text, _ = self.post("frames", self.frame() if frame is None else frame, sent)
        return status, json.loads(text)

    def post(self, what: str, body: bytes, headers: dict[str, str], *, path: str = "") -> tuple[int, bytes, Any]:
        if self._connection is None or self._connection.sock is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.hub.port, timeout=PATIENCE_S)
            self._connection.sock = self.hub.connect(self.source)
        self._connection.request("POST", path or f"/api/v1/runs/{RUN}/{what}", body, headers)
        with self._connection.getresponse() as response:
            return response.status, response.read(), response.headers

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def everything(sock: socket.socket) -> bytes:
    found = b""
    try:
        while piece := sock.recv(1 << 16):
            found += piece
    except OSError:
        pass  # reset
    return found


# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def _serve(parts: Parts, sock: socket.socket, tls: TlsFiles | None, limits: ServerLimits) -> None:
    async def rest(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError
        if scope["path"] == "/fault":
            raise ValueError("on purpose")
        if scope["path"] == "/slow":
            await asyncio.sleep(0.3)
        body = b"x" * (64 << 20) if scope["path"] == "/large" else json.dumps(counted()).encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    def counted() -> dict[str, Any]:
        return {
            "refused": parts.refusals.by_reason(),
            "figures": asdict(parts.ingest.figures),
            "connections": server.connections,
            "rows": parts.live.row_count,
            "rings": parts.live.rings,
            "events": [{**event, "wall_ns": 0} for event in parts.live.events()],
        }

    server = Server(in_front(parts.ingest, rest), sock, tls=tls, limits=limits, refusals=parts.refusals)
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(told.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    running = asyncio.ensure_future(server.run())
    while not told.is_set():
        parts.watch.tick()
        await asyncio.wait([asyncio.ensure_future(told.wait()), running], timeout=0.5, return_when="FIRST_COMPLETED")
        if running.done():
            break
    server.stop()
    await running
    parts.watch.close()


def main(fd: str, run_dir: str, limits: str, folder: str = "") -> None:
    os.umask(0o077)
    tls = user_certificate(Path(folder, "hub.crt"), Path(folder, "hub.key")) if folder else None
    document = json.loads(limits)
    senders = SenderLimits(**document.pop("senders", {}))
    parts = Parts(Path(run_dir), certificate=tls.fingerprint if tls else b"", limits=senders)
    with socket.socket(fileno=int(fd)) as sock:
        uvloop.run(_serve(parts, sock, tls, ServerLimits(**document)))
    parts.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

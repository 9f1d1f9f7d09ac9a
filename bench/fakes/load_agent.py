"""One agent of the load generator: an HTTP connection of the least there can be, and what it says over it."""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fakes.load_rows import LoadRanks
from stepscope.wire.frames import FrameHead, Part, pack_frame, part_of
from stepscope.wire.handshake import (
    HELLO_PATH,
    PROOF_HEADER,
    Join,
    positions_of,
    read_challenge,
    read_welcome,
    write_hello,
    write_join,
)

__all__ = ["LoadAgent", "Reply"]


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int
    """0: the connection went before an answer came."""
    body: bytes = b""
    proof: str = ""


class LoadAgent(asyncio.Protocol):
    """Says one thing at a time; its ranks' steps up to ``step`` are with the hub."""

    def __init__(
        self,
        *,
        ranks: LoadRanks,
        run: str,
        node: int,
        nnodes: int,
        spool: str,
        key: bytes,
        certificate: bytes = b"",
    ) -> None:
        self.node = node
        self.step = 0
        self.next_s = 1.0
        self.finished = False
        self.task: asyncio.Task[None] | None = None
        self._ranks, self._run, self._nnodes, self._spool = ranks, run, nnodes, spool
        self._key, self._certificate = key, certificate
        self._introduced = False
        self._transport: asyncio.Transport | None = None
        self._answered: Callable[[Reply], None] | None = None
        self._received = b""
        self._head = b""

    # -- what it says ---------------------------------------------------------------------------------------------

    async def connect(self, host: str, port: int, *, source: str, tls: ssl.SSLContext | None) -> None:
        """``source``: the address to come from; empty: any."""
        loop = asyncio.get_running_loop()
        come_from = (source, 0) if source else None
        await loop.create_connection(lambda: self, host, port, local_addr=come_from, ssl=tls)

    async def join(self) -> str:
        """Empty when it was welcome; else why not."""
        nonce = secrets.token_hex(16)
        body, proof = write_hello(nonce, self._key, self._certificate)
        reply = await self._asked(HELLO_PATH, f"{PROOF_HEADER}: {proof}\r\n", body)
        if reply.status != 200:
            return f"{reply.status} {reply.body.decode(errors='replace')}"
        join = Join(
            run=self._run,
            node=self.node,
            nnodes=self._nnodes,
            host=self._ranks.host,
            spool=self._spool,
            nonce=nonce,
            challenge=read_challenge(reply.body, reply.proof, nonce, self._key, self._certificate),
        )
        body, proof = write_join(join, self._key, self._certificate)
        headers = f"{PROOF_HEADER}: {proof}\r\nauthorization: Bearer {join.challenge}\r\n"
        reply = await self._asked(f"/api/v1/runs/{self._run}/join", headers, body)
        if reply.status != 200:
            return f"{reply.status} {reply.body.decode(errors='replace')}"
        welcome = read_welcome(reply.body, reply.proof, nonce, self._key, self._certificate)
        self._head = (
            f"POST /api/v1/runs/{self._run}/frames HTTP/1.1\r\nhost: hub\r\n"
            f"authorization: Bearer {welcome.token}\r\ncontent-length: "
        ).encode()
        self.next_s = welcome.next_s
        self._at(welcome.positions.rings)
        return ""

    def frame(self, upto: int, *, bye: bool = False) -> tuple[bytes, int]:
        """The steps from where the hub is, up to that one; and how many rows."""
        parts: list[Part] = []
        if not self._introduced:
            parts.append(part_of("rings", json.dumps(self._ranks.sidecars()).encode()))
        rows = (upto - self.step) * len(self._ranks.table)
        if rows:
            parts.append(part_of("steps", self._ranks.block(self.step, upto)))
        head = FrameHead(
            node=self.node,
            spool=self._spool,
            sent_wall_ns=time.time_ns(),
            offset_ns=0,
            rtt_ns=1_000_000,
            bye={"exit_code": 0, "status": "finished"} if bye else None,
        )
        return pack_frame(head, parts), rows

    def send(self, frame: bytes, answered: Callable[[Reply], None]) -> None:
        if self._transport is None or self._transport.is_closing():
            asyncio.get_running_loop().call_soon(answered, Reply(status=0))
            return
        self._answered = answered
        self._transport.write(b"".join([self._head, b"%d\r\n\r\n" % len(frame), frame]))

    def took(self, upto: int) -> None:
        self.step = upto
        self._introduced = True

    def go_back(self, positions: Any) -> None:
        self._at(positions_of(positions).rings)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _at(self, rings: Mapping[str, int]) -> None:
        """Where the hub says that we are; its rings all stand at the same step."""
        own = [rings.get(self._ranks.key(local)) for local in range(len(self._ranks.table))]
        self._introduced = all(seq is not None for seq in own)
        self.step = min((seq or 0 for seq in own), default=0)

    async def _asked(self, path: str, headers: str, body: bytes) -> Reply:
        done: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._answered = lambda reply: _settle(done, reply)
        head = f"POST {path} HTTP/1.1\r\nhost: hub\r\n{headers}content-length: {len(body)}\r\n"
        if self._transport is not None:
            self._transport.write(head.encode() + b"\r\n" + body)
        return await done

    # -- the connection -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a stream
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        length = int(headers.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        self._received = rest[length:]
        proof = headers.get(PROOF_HEADER.encode(), b"").decode()
        self._reply(Reply(status=int(lines[0].split()[1]), body=rest[:length], proof=proof))

    def connection_lost(self, error: Exception | None) -> None:
        self._reply(Reply(status=0))

    def _reply(self, reply: Reply) -> None:
        answered, self._answered = self._answered, None
        if answered is not None:
            answered(reply)


def _settle(done: asyncio.Future[Reply], reply: Reply) -> None:
    if not done.done():
        done.set_result(reply)

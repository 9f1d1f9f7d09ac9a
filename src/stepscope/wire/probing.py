"""The packets that agents send one another to see how long a round trip takes.

    0    4s   magic  b"STPR"
    4    u8   version
    5    u8   kind: 1 a question, 2 its answer
    6    u16  zero
    8    u32  node that asks
    12   u32  node that is asked
    16   16s  boot: random, of the agent that asks, one for as long as it runs
    32   u64  number of the question, counting up
    40   u64  of an answer: nanoseconds from the question's arrival (by the kernel) to the answer's departure
    48   16s  HMAC-SHA256 of all that stands before it, with the run's probe key; the first 16 bytes

An answer is exactly as long as its question, so nobody can be flooded through us, and both are 64 bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Literal

__all__ = ["PACKET_BYTES", "Packet", "pack_packet", "read_packet"]

_MAGIC = b"STPR"
_VERSION = 1
_BODY = struct.Struct("<4sBBHII16sQQ")
_KINDS: tuple[Literal["question", "answer"], ...] = ("question", "answer")
PROOF_BYTES = 16
PACKET_BYTES = _BODY.size + PROOF_BYTES


@dataclass(frozen=True, kw_only=True)
class Packet:
    kind: Literal["question", "answer"]
    asks: int
    """Number of a node; so is the next."""
    asked: int
    boot: bytes
    number: int
    dwell_ns: int = 0


def pack_packet(packet: Packet, key: bytes) -> bytes:
    kind = _KINDS.index(packet.kind) + 1
    body = _BODY.pack(_MAGIC, _VERSION, kind, 0, packet.asks, packet.asked, packet.boot, packet.number, packet.dwell_ns)
    return body + _proof(body, key)


def read_packet(data: bytes, key: bytes) -> Packet | None:
    """None: not from somebody who has the key, or nothing of this version."""
    body, proof = data[: _BODY.size], data[_BODY.size :]
    if len(data) != PACKET_BYTES or not hmac.compare_digest(_proof(body, key), proof):
        return None
    magic, version, kind, _, asks, asked, boot, number, dwell_ns = _BODY.unpack(body)
    if magic != _MAGIC or version != _VERSION or not 1 <= kind <= len(_KINDS):
        return None
    return Packet(kind=_KINDS[kind - 1], asks=asks, asked=asked, boot=boot, number=number, dwell_ns=dwell_ns)


def _proof(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, body, hashlib.sha256)[:PROOF_BYTES]

"""The packets that agents send one another to see how long a round trip takes, and who sends them to whom.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["PACKET_BYTES", "Packet", "pack_packet", "probed_by", "read_packet"]

_MAGIC = b"STPR"
_VERSION = 1
_BODY = struct.Struct("<4sBBHII16sQQ")
_KINDS: tuple[Literal["question", "answer"], ...] = ("question", "answer")
PROOF_BYTES = 16
PACKET_BYTES = _BODY.size + PROOF_BYTES
EVERY_PAIR = 16
"""Nodes among which every one asks every other; in a larger job each has as many peers as chords below give it."""
CHORDS = 4
"""Distances along the ring of a larger job, in both directions: its neighbours, and ever further away."""


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


def probed_by(own: int, nodes: Sequence[int]) -> list[int]:
    """Whom a node asks, of all nodes of the job: everybody in a small one, else eight that stand far apart.

    In a larger job the nodes are a ring, and each asks along chords of lengths 1, n^¼, n^½ and n^¾, both ways: from any
    node to any other it is a few of them, so a slow part of the network shows wherever it is.  Asking is mutual.
    """
    ring = sorted({*nodes, own})
    if len(ring) <= EVERY_PAIR:
        return [node for node in ring if node != own]
    at = ring.index(own)
    lengths = {round(len(ring) ** (power / CHORDS)) for power in range(CHORDS)}
    places = {(at + sign * length) % len(ring) for length in lengths for sign in (1, -1)} - {at}
    return [ring[place] for place in sorted(places)]


def _proof(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, body, hashlib.sha256)[:PROOF_BYTES]

"""A sender: one spool of one node, as the hub knows it while it lives; and whom of the others it probes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from stepscope.hub.gate.buckets import Bucket
from stepscope.wire.joining import Join, Peer

__all__ = ["Sender", "SenderLimits", "neighbours", "sender_of_join"]

ALL_TO_ALL: Final = 16
"""Up to so many nodes each probes all others; beyond, a handful of them, so that the cost of probing stays linear."""


@dataclass(frozen=True, kw_only=True)
class SenderLimits:
    """Tests make them small."""

    joins_per_s: float = 20.0
    joins: int = 200
    """From one address, in the long run and at once …"""
    spare_local: bool = True
    """… unless it is this machine's own."""
    again_per_s: float = 0.5
    again: int = 10
    """Joins of one spool."""
    frames_per_s: float = 20.0
    frames: int = 100
    bytes_per_s: float = 16 << 20
    bytes: int = 64 << 20
    """Frames and bytes of one spool; an agent that catches up after a cut of an hour needs some."""
    contest_s: float = 3.0
    """How long two may claim a rank before that is told: in an elastic job it moves from one node to another, and the
    first to know is the new one."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sender:
    spool: str
    node: int
    host: str
    address: str
    """As the hub sees it."""
    hub_address: str
    """The hub's own, as this sender reaches it."""
    probe_port: int
    local: bool
    """It is the run directory itself, which the hub reads by itself."""
    heard_s: float
    joins: Bucket
    frames: Bucket
    volume: Bucket
    key: bytes = field(default=b"", repr=False)
    """With which it joined."""
    taken_frames: int = 0
    taken_bytes: int = 0
    """Since it joined, or was back; for the audit log."""
    token: bytes = b""
    """The SHA-256 of it."""
    current: bool = True
    """It speaks for its node; not so one that was replaced."""
    bye: bool = False
    lost: bool = False
    skewed: bool = False
    """Its clock was told to be off."""
    contested_s: float | None = None
    """Since when it claims a rank that another has."""
    contest_told: bool = False
    peers: tuple[Peer, ...] = ()
    """As it was last told."""
    peers_version: int = -1
    """When they were last looked at."""

    def silent_s(self, now_s: float) -> float:
        return now_s - self.heard_s


def sender_of_join(
    join: Join, limits: SenderLimits, *, address: str, hub_address: str, local: bool, now_s: float
) -> Sender:
    return Sender(
        spool=join.spool,
        node=join.node,
        host=join.host,
        address=address,
        hub_address=hub_address,
        probe_port=join.probe_port,
        local=local,
        heard_s=now_s,
        joins=Bucket(rate=limits.again_per_s, burst=limits.again, now_s=now_s),
        frames=Bucket(rate=limits.frames_per_s, burst=limits.frames, now_s=now_s),
        volume=Bucket(rate=limits.bytes_per_s, burst=limits.bytes, now_s=now_s),
    )


def neighbours(node: int, nnodes: int) -> Iterator[int]:
    """The nodes that one probes: all others of a few, else those 1, 2, 4, 8 … further on.

    Every node is then probed by as many as it probes, and any two are a few hops apart.
    """
    if nnodes <= ALL_TO_ALL:
        yield from (other for other in range(nnodes) if other != node)
        return
    stride = 1
    while stride < nnodes:
        yield (node + stride) % nnodes
        stride *= 2

"""Probes: a few small UDP packets a second between a job's hosts, whose round trips reveal a slow or lossy host.

A separate thread asks the peers in turn and answers their questions; the agent's loop fetches the lines (``samples``).
The measurement must show the network and not the load of the machines, so the kernel stamps arrivals (SO_TIMESTAMPNS),
and an answer says how long its question waited, which is subtracted. A late answer still counts as an answer. Packets
are signed; foreign or repeated ones are ignored and counted. If packets arrive faster than any job would send them,
they stay in the kernel's queue, and the measurements from that time are discarded.

    probes = Probes("gpu-07", 7)
    probes.port                       # for the hub, which passes it on to the others
    probes.peers(welcome.peers, welcome.probe_key)
    journal.samples(probes.samples())
    probes.close()
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import select
import socket
import statistics
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from stepscope.records import run_clock
from stepscope.wire.handshake import Peer

__all__ = ["PACKET_BYTES", "Packet", "ProbeLimits", "Probes", "pack_packet", "read_packet"]


# -- Probe packets ----------------------------------------------------------------------------------------------------
# The packets with which agents measure round trips.
#
#     0    4s   magic  b"STPR"
#     4    u8   version
#     5    u8   kind: 1 a question, 2 its answer
#     6    u16  zero
#     8    u32  asking node
#     12   u32  asked node
#     16   16s  boot: random bytes that identify the asking agent while it runs
#     32   u64  number of the question, increasing
#     40   u64  in an answer: nanoseconds from the question's arrival (by the kernel) to the answer's departure
#     48   16s  HMAC-SHA256 of everything before it, with the run's probe key; the first 16 bytes
#
# Both are 64 bytes. An answer has the size of its question, so we cannot be used to amplify a flood.

_MAGIC = b"STPR"
_VERSION = 1
_BODY = struct.Struct("<4sBBHII16sQQ")
_KINDS: tuple[Literal["question", "answer"], ...] = ("question", "answer")
PROOF_BYTES = 16
PACKET_BYTES = _BODY.size + PROOF_BYTES


@dataclass(frozen=True, kw_only=True)
class Packet:
    kind: Literal["question", "answer"]
    sender: int
    """A node's number, like ``asked``."""
    target: int
    boot: bytes
    number: int
    dwell_ns: int = 0


def pack_packet(packet: Packet, key: bytes) -> bytes:
    kind = _KINDS.index(packet.kind) + 1
    body = _BODY.pack(
        _MAGIC, _VERSION, kind, 0, packet.sender, packet.target, packet.boot, packet.number, packet.dwell_ns
    )
    return body + _proof(body, key)


def read_packet(data: bytes, key: bytes) -> Packet | None:
    """Return None if the sender does not have the key, or the packet is not of this version."""
    body, proof = data[: _BODY.size], data[_BODY.size :]
    if len(data) != PACKET_BYTES or not hmac.compare_digest(_proof(body, key), proof):
        return None
    magic, version, kind, _, sender, target, boot, number, dwell_ns = _BODY.unpack(body)
    if magic != _MAGIC or version != _VERSION or not 1 <= kind <= len(_KINDS):
        return None
    return Packet(kind=_KINDS[kind - 1], sender=sender, target=target, boot=boot, number=number, dwell_ns=dwell_ns)


def _proof(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, body, hashlib.sha256)[:PROOF_BYTES]


# -- Probes -----------------------------------------------------------------------------------------------------------

ASK_S = 0.2
"""Interval between questions, over all peers."""
LINES_S = 5.0
MANY_LINES_S = 30.0
"""Intervals between lines about a peer; the longer one is for larger jobs."""
MANY_NODES = 16
"""Larger jobs have at least this many nodes, and their hub has enough to read."""
MOST_PEERS = 64
"""The hub chooses the peers; this only bounds what is kept."""
BOOTS = 4096
"""Number of agents whose last question is remembered."""
SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@ll")
_ANCILLARY = socket.CMSG_SPACE(_TIMESPEC.size)


@dataclass(frozen=True, kw_only=True)
class ProbeLimits:
    patience_s: float = 3.0
    """Limit for an answer. Longer than any network takes: a busy machine may not run its agent for a second or two."""
    blocked_s: float = 60.0
    """After this long without any packet, UDP is considered blocked."""
    taken_per_s: int = 500
    """Packets processed per second; peers send a handful."""


@dataclass
class _Seen:
    """Counts for one peer since the last line about it."""

    sent: int = 0
    lost: int = 0
    rtts_us: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Question:
    peer: Peer
    wall_ns: int
    mono_ns: int


class Probes:
    """Exchanges probes with peers. If no socket is available, ``port`` is 0 and nothing happens."""

    def __init__(
        self, node: str, number: int, *, address: str = "", ask_s: float = ASK_S, limits: ProbeLimits | None = None
    ) -> None:
        """``node`` is this host's name. ``address`` is where to listen, by default everywhere."""
        self._limits = limits or ProbeLimits()
        self._node, self._number, self._ask_s = node, number, ask_s
        self._boot = secrets.token_bytes(16)
        self._socket = _bound(address)
        self.port: int = self._socket.getsockname()[1] if self._socket is not None else 0
        self._lock = threading.Lock()
        # Shared with the thread, under the lock:
        self._peers: list[Peer] = []
        self._key = b""
        self._seen: dict[int, tuple[Peer, _Seen]] = {}
        self._ignored = {"foreign": 0, "replayed": 0}
        self._heard = self._crowded = False
        # Used only by the thread:
        self._open_questions: OrderedDict[int, _Question] = OrderedDict()
        self._boots: OrderedDict[bytes, int] = OrderedDict()
        self._count = 0
        self._tokens, self._tokens_s = float(self._limits.taken_per_s), 0.0
        # Used only by the loop:
        self._line_s = self._began_s = time.monotonic()
        self._reported_blocked = False
        self._thread: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False

    # -- for the agent's loop and its shipper -----------------------------------------------------------------------

    def peers(self, peers: Iterable[Peer], key: str) -> None:
        """Set the peers to ask and the run's probe key (hexadecimal). May be called again with other values."""
        known = {peer.node: peer for peer in peers if peer.port and _is_address(peer.address)}
        known.pop(self._number, None)
        chosen = [known[node] for node in sorted(known)][:MOST_PEERS]
        try:
            secret = bytes.fromhex(key)
        except ValueError:
            return
        with self._lock:
            self._peers, self._key = chosen, secret
        if self._thread is None and self._socket is not None and secret:
            self._began_s = self._line_s = time.monotonic()
            self._thread = threading.Thread(target=self._work, name="probes", daemon=True)
            self._thread.start()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def samples(self) -> list[dict[str, Any]]:
        """Return a line for each peer with results every few seconds; otherwise nothing."""
        with self._lock:
            many = max((peer.node for peer in self._peers), default=0) >= MANY_NODES
            if time.monotonic() - self._line_s < (MANY_LINES_S if many else LINES_S):
                return []
        return self.last_samples()

    def last_samples(self) -> list[dict[str, Any]]:
        """Return the current results immediately."""
        self._line_s = time.monotonic()
        with self._lock:
            seen, self._seen = self._seen, {}
            crowded, self._crowded = self._crowded, False
        common = {
            "wall_ns": run_clock.wall_ns(),
            "mono_ns": time.perf_counter_ns(),
            "node": self._node,
            "kind": "probe",
        }
        return [] if crowded else [{**common, **_line(peer, own)} for peer, own in seen.values() if own.sent]

    def notice(self) -> str | None:
        """Return a message that is worth an event, once."""
        with self._lock:
            silent = self._thread is not None and self._peers and not self._heard
        if self._reported_blocked or not silent or time.monotonic() - self._began_s < self._limits.blocked_s:
            return None
        self._reported_blocked = True
        return "no agent on another node answers probes; UDP may be blocked, so round trips are unknown"

    @property
    def ignored(self) -> dict[str, int]:
        """Packets: ``foreign`` (not signed by this run) and ``replayed`` (seen before, or never asked for)."""
        with self._lock:
            return dict(self._ignored)

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        os.close(self._wake)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        assert self._socket is not None
        turn, next_s = 0, time.monotonic()
        while not self._closing:
            now_s = time.monotonic()
            room = self._has_room(now_s)
            fds = [self._wake, *([self._socket.fileno()] if room else [])]
            readable = select.select(fds, [], [], max(0.0, next_s - now_s))[0]
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            if len(readable) > (self._wake in readable):
                self._take()
            if time.monotonic() >= next_s:
                self._give_up()
                turn = self._ask(turn)
                next_s = max(next_s + self._ask_s, time.monotonic())

    def _has_room(self, now_s: float) -> bool:
        since_s, self._tokens_s = now_s - self._tokens_s, now_s
        self._tokens = min(self._tokens + since_s * self._limits.taken_per_s, float(self._limits.taken_per_s))
        return self._tokens >= 1.0

    def _ask(self, turn: int) -> int:
        with self._lock:
            peers, key = self._peers, self._key
        if not peers or not key:
            return turn
        peer = peers[turn % len(peers)]
        self._count += 1
        question = Packet(kind="question", sender=self._number, target=peer.node, boot=self._boot, number=self._count)
        data = pack_packet(question, key)
        self._open_questions[self._count] = _Question(
            peer=peer, wall_ns=run_clock.wall_ns(), mono_ns=time.perf_counter_ns()
        )
        self._send(data, (peer.address, peer.port))
        return turn + 1

    def _send(self, data: bytes, where: tuple[str, int]) -> None:
        assert self._socket is not None
        host, port = where
        if self._socket.family == socket.AF_INET6 and "." in host and ":" not in host:
            host = f"::ffff:{host}"
        with contextlib.suppress(OSError):  # no route: the packet is lost
            self._socket.sendto(data, (host, port))

    def _take(self) -> None:
        """Process the packets that have arrived, within the rate limit."""
        assert self._socket is not None
        with self._lock:
            key = self._key
        while self._tokens >= 1.0:
            try:
                data, ancillary, _, where = self._socket.recvmsg(PACKET_BYTES + 1, _ANCILLARY)
            except OSError:
                return
            self._tokens -= 1.0
            packet = read_packet(data, key)
            if packet is None:
                self._ignore("foreign")
            elif packet.kind == "question":
                self._answer(packet, key, (where[0], where[1]), _arrived_ns(ancillary))
            else:
                self._answered(packet, _arrived_ns(ancillary))
        with self._lock:
            self._crowded = True

    def _answer(self, packet: Packet, key: bytes, where: tuple[str, int], arrived_ns: int | None) -> None:
        known = self._boots.get(packet.boot, 0)
        if packet.target != self._number or packet.number <= known:
            self._ignore("replayed")
            return
        self._boots[packet.boot] = packet.number
        self._boots.move_to_end(packet.boot)
        if len(self._boots) > BOOTS:
            self._boots.popitem(last=False)
        most_ns = int(self._limits.patience_s * 1e9)
        dwell_ns = 0 if arrived_ns is None else min(max(time.time_ns() - arrived_ns, 0), most_ns)
        answer = Packet(
            kind="answer",
            sender=packet.sender,
            target=packet.target,
            boot=packet.boot,
            number=packet.number,
            dwell_ns=dwell_ns,
        )
        self._send(pack_packet(answer, key), where)
        with self._lock:
            self._heard = True

    def _answered(self, packet: Packet, arrived_ns: int | None) -> None:
        question = self._open_questions.get(packet.number)
        if question is None or packet.boot != self._boot or packet.target != question.peer.node:
            self._ignore("replayed")
            return
        del self._open_questions[packet.number]
        most_ns = time.perf_counter_ns() - question.mono_ns
        took_ns = most_ns if arrived_ns is None else arrived_ns - question.wall_ns
        if not 0 <= took_ns <= most_ns:  # the clock was set in between
            took_ns = most_ns
        with self._lock:
            self._heard = True
            own = self._seen.setdefault(packet.target, (question.peer, _Seen()))[1]
            own.sent += 1
            own.rtts_us.append(max(took_ns - packet.dwell_ns, 0) / 1e3)

    def _give_up(self) -> None:
        late_ns = time.perf_counter_ns() - int(self._limits.patience_s * 1e9)
        with self._lock:
            while self._open_questions:
                number, question = next(iter(self._open_questions.items()))
                if question.mono_ns > late_ns:
                    return
                del self._open_questions[number]
                own = self._seen.setdefault(question.peer.node, (question.peer, _Seen()))[1]
                own.sent += 1
                own.lost += 1

    def _ignore(self, why: str) -> None:
        with self._lock:
            self._ignored[why] += 1


def _line(peer: Peer, own: _Seen) -> dict[str, Any]:
    line: dict[str, Any] = {"peer": peer.host, "peer_node": peer.node, "sent": own.sent, "lost": own.lost}
    if own.rtts_us:
        line["rtt_us_min"] = round(min(own.rtts_us), 1)
        line["rtt_us_p50"] = round(statistics.median(own.rtts_us), 1)
        line["rtt_us_max"] = round(max(own.rtts_us), 1)
    return line


def _bound(address: str) -> socket.socket | None:
    """Bind a socket for both IPv6 and IPv4 where the kernel has both."""
    v4 = (socket.AF_INET, address or "0.0.0.0")
    families = [v4] if "." in address else [(socket.AF_INET6, address or "::"), v4]
    for family, where in families:
        try:
            made = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        except OSError:
            continue
        try:
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.bind((where, 0))
        except OSError:
            made.close()
            continue
        with contextlib.suppress(OSError):  # another system: Python's clocks will do
            made.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        return made
    return None


def _arrived_ns(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """Return the kernel's time stamp, on the wall clock."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            return int(seconds * 1_000_000_000 + nanoseconds)
    return None


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_multicast
    except ValueError:
        return False

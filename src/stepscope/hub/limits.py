"""Limits for requests: connections, rates, sizes and deadlines; and counts of what was refused, by reason.

Used by one event loop.  A connection costs its owner nothing, and the hub a file and some memory.  Strangers, who have
shown neither key nor token, therefore have a separate budget: in total, and per address (for IPv6, per /64).  When it
is used up, the oldest stranger is disconnected, whatever it is doing (its handshake, a slow body, an answer that it
does not read), not the newcomer: a real request is served within milliseconds, no matter how many sockets another
client holds open.  The other connections are reserved for authenticated agents and readers.  These no longer count as
strangers, and are disconnected only while they are idle.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, get_args

from stepscope.errors import HubError
from stepscope.wire.frames import FRAME_BYTES, HELLO_BYTES, JOIN_BYTES

__all__ = [
    "REASONS",
    "Bucket",
    "Buckets",
    "Entrance",
    "Reason",
    "Refusals",
    "Refused",
    "ServerLimits",
    "address_of",
    "is_local",
    "plain_address",
    "source_of",
]


# -- token buckets ----------------------------------------------------------------------------------------------------
# How often something may happen: a bucket of tokens that fills at a steady rate.  Pure arithmetic; the caller passes
# the time.  Libraries (limits, aiolimiter) read a clock themselves, and remember each source for as long as its window:
# an attacker with many addresses decides how much memory that takes.

Key = TypeVar("Key", bound=Hashable)


class Bucket:
    """Lets ``burst`` through at once and ``rate`` per second in the long run."""

    __slots__ = ("_at_s", "_left", "burst", "rate")

    def __init__(self, *, rate: float, burst: float, now_s: float) -> None:
        self.rate, self.burst = rate, burst
        self._left = burst
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> float:
        """Take tokens and return 0, or return how many seconds to wait for them.

        An amount larger than the bucket passes when the bucket is full, and leaves it in debt.
        """
        self._left = min(self.burst, self._left + (now_s - self._at_s) * self.rate)
        self._at_s = now_s
        needed = min(amount, self.burst)
        if self._left >= needed:
            self._left -= amount
            return 0.0
        return (needed - self._left) / self.rate

    def full(self, now_s: float) -> bool:
        return self._left + (now_s - self._at_s) * self.rate >= self.burst


class Buckets(Generic[Key]):
    """One bucket per source, for a bounded number of sources; full buckets are forgotten first."""

    def __init__(self, *, rate: float, burst: float, most: int) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._buckets: dict[Key, Bucket] = {}

    def take(self, key: Key, now_s: float) -> float:
        """Like ``Bucket.take(1)``; without room for another source, that source has to wait."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._most:
                self._buckets = {known: bucket for known, bucket in self._buckets.items() if not bucket.full(now_s)}
                if len(self._buckets) >= self._most:
                    return self._burst / self._rate
            bucket = self._buckets[key] = Bucket(rate=self._rate, burst=self._burst, now_s=now_s)
        return bucket.take(1, now_s)


# -- refusals ---------------------------------------------------------------------------------------------------------
# What the hub refused, by reason: counted here, shown by ``/metrics``, ``nodes.json`` and the summary.
#
# Every refusal has one of ``REASONS``, so the counters are bounded for any input; sources are kept only for the first
# few.  Nothing of the refused content is kept.

Reason = Literal[
    "connections",  # too many open
    "connection_rate",  # too many from one address in a short time
    "tls",  # the handshake is missing, invalid or too late
    "http",  # not a request, or an ambiguous one
    "head_large",
    "head_slow",
    "body_large",
    "body_slow",
    "reader_slow",  # does not read the answer
    "key",  # a join that was not signed with our key
    "join",  # a join that does not fit: another run, a node that does not exist
    "join_rate",
    "node_taken",  # another spool already represents this node
    "token",
    "spool",  # a frame that names another spool
    "rank",  # a frame with a rank that another node has
    "frame",  # not a frame, or not from Stepscope
    "rate",  # more frames or bytes than one agent may send
    "busy",  # more at one time than there is memory for
    "disk",  # nothing can be written
    "fault",  # an internal error; the connection was closed
]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
REFUSED_SOURCES: Final = 256


class Refused(HubError):
    """A request that is answered with ``status`` and counted under ``reason``.

    ``tell``: whether to log an event; None: only the first time that this source is refused for this reason.
    """

    def __init__(
        self, status: int, reason: Reason, why: str, *, retry_s: float | None = None, tell: bool | None = None
    ) -> None:
        super().__init__(why)
        self.status = status
        self.reason: Reason = reason
        self.why = why
        self.retry_s = retry_s
        self.tell = tell


class Refusals:
    """Counters of one hub.  Used only by its event loop."""

    def __init__(self) -> None:
        self._counts: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._sources: set[tuple[Reason, str]] = set()
        self.total = 0

    def count(self, reason: Reason, source: str) -> bool:
        """Count a refusal; True the first time for this reason and source, while there is room to remember it."""
        self._counts[reason] += 1
        self.total += 1
        if (reason, source) in self._sources or len(self._sources) >= REFUSED_SOURCES:
            return False
        self._sources.add((reason, source))
        return True

    def by_reason(self) -> dict[str, int]:
        """Return the count of every reason, including zeros."""
        return {str(reason): count for reason, count in self._counts.items()}


# -- entrance ---------------------------------------------------------------------------------------------------------

_BODIES: Final = {b"/frames": FRAME_BYTES, b"/join": JOIN_BYTES, b"/hello": HELLO_BYTES}
_RATED_ADDRESSES: Final = 4096
_IN_64: Final = 4
"""How many addresses a /64 counts for: it may be one machine, or a cluster."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of one server.  Tests make the times short."""

    connections: int = 2048
    """Open at one time; strangers get three quarters.  An agent keeps one."""
    per_address: int = 128
    """Strangers from one address; four times as many from one IPv6 /64, which may be a whole cluster."""
    spare_local: bool = True
    """Whether strangers on this machine may use three quarters of all connections, without a rate limit."""
    arrivals_per_s: float = 50.0
    """New connections per address in the long run: a handshake is the most a stranger can make the hub compute."""
    arrivals: int = 256
    """New connections per address at once."""
    handshake_s: float = 10.0
    head_bytes: int = 16 << 10
    head_s: float = 10.0
    """From the first byte (or the connection) to the end of the head."""
    bodies: Mapping[bytes, int] = field(default_factory=lambda: dict(_BODIES))
    """The largest body in bytes, by the end of the path."""
    body_bytes: int = 16 << 10
    """The largest body for all other paths."""
    body_s: float = 20.0
    body_bytes_per_s: int = 32 << 10
    """The slowest acceptable transfer; a large body gets additional time at this rate."""
    answer_s: float = 30.0
    """How long a client may leave an answer unread."""
    idle_s: float = 5.0
    """The longest pause between two requests."""
    agent_idle_s: float = 75.0
    """The same for an agent, which has announced how often it sends."""
    linger_s: float = 10.0
    """How long the rest of an already answered request is read and discarded, so that its sender sees the answer."""
    linger_bytes: int = 1 << 20
    """How many bytes of an oversized request are discarded that way."""
    grace_s: float = 2.0
    """For answers in progress when the server stops."""

    @classmethod
    def for_nodes(cls, nnodes: int) -> ServerLimits:
        """Make room for every agent twice: in a large job all may reconnect before their old connections are gone."""
        return cls(connections=max(cls.connections, 2 * nnodes + 512))

    def body_cap(self, path: bytes) -> int:
        end = path.rfind(b"/")
        return self.bodies.get(path[end:], self.body_bytes) if end >= 0 else self.body_bytes


class Visitor(Protocol):
    """A connection."""

    address: str

    def send_away(self) -> None: ...

    def sweep(self, now_s: float) -> None: ...


class _Address:
    __slots__ = ("strangers",)

    def __init__(self) -> None:
        self.strangers: dict[Visitor, None] = {}


class Entrance:
    def __init__(self, limits: ServerLimits, refusals: Refusals) -> None:
        self.limits = limits
        self.refusals = refusals
        self._inside: dict[Visitor, None] = {}
        self._addresses: dict[str, _Address] = {}
        self._strangers: dict[Visitor, None] = {}
        self._waiting: dict[Visitor, None] = {}
        """Authenticated connections that are idle.  Oldest first, like ``_strangers`` and those of each address."""
        self._arrivals: Buckets[str] = Buckets(rate=limits.arrivals_per_s, burst=limits.arrivals, most=_RATED_ADDRESSES)
        self._arrivals_64: Buckets[str] = Buckets(
            rate=_IN_64 * limits.arrivals_per_s, burst=_IN_64 * limits.arrivals, most=_RATED_ADDRESSES
        )

    @property
    def open(self) -> int:
        return len(self._inside)

    def inside(self) -> tuple[Visitor, ...]:
        return tuple(self._inside)

    def sweep(self, now_s: float) -> None:
        """Disconnect all visitors that are past a deadline."""
        for visitor in self.inside():
            visitor.sweep(now_s)

    def turned_away(self, address: str, now_s: float) -> Reason | None:
        """Return why a newcomer is refused, or None; makes room for it if possible."""
        local = self.limits.spare_local and is_local(address)
        source, many = source_of(address), _IN_64 if ":" in address else 1
        arrivals = self._arrivals_64 if many > 1 else self._arrivals
        if not local and arrivals.take(source, now_s) > 0:
            return "connection_rate"
        most = self.limits.connections * 3 // 4
        own = self._addresses.get(source)
        if own is not None and len(own.strangers) >= (most if local else min(most, many * self.limits.per_address)):
            self._make_room(own.strangers)
        if len(self._strangers) >= most:
            self._make_room(self._strangers)
        full = self.open >= self.limits.connections
        if full and not self._make_room(self._waiting) and not self._make_room(self._strangers):
            return "connections"
        return None

    def enter(self, visitor: Visitor) -> None:
        """Add a connection, as a stranger until it is ``known``."""
        self._inside[visitor] = None
        self._strangers[visitor] = None
        self._addresses.setdefault(source_of(visitor.address), _Address()).strangers[visitor] = None

    def leave(self, visitor: Visitor) -> None:
        """Remove a connection that is gone or about to be; harmless if repeated."""
        if visitor not in self._inside:
            return
        del self._inside[visitor]
        self._waiting.pop(visitor, None)
        self._forget_stranger(visitor)

    def known(self, visitor: Visitor) -> None:
        """Mark a connection as authenticated; while it has a request it cannot be disconnected in favor of another."""
        if visitor in self._inside:
            self._forget_stranger(visitor)
            self._waiting.pop(visitor, None)

    def waits(self, visitor: Visitor) -> None:
        """Mark an authenticated connection as idle: it may be disconnected, after those idle longer.

        Strangers may be disconnected at any time.
        """
        if visitor in self._inside and visitor not in self._strangers:
            self._waiting[visitor] = None

    def _forget_stranger(self, visitor: Visitor) -> None:
        if visitor not in self._strangers:
            return
        del self._strangers[visitor]
        source = source_of(visitor.address)
        own = self._addresses[source]
        del own.strangers[visitor]
        if not own.strangers:
            del self._addresses[source]

    def _make_room(self, waiting: dict[Visitor, None]) -> bool:
        oldest = next(iter(waiting), None)
        if oldest is None:
            return False
        self.refusals.count("connections", oldest.address)
        self.leave(oldest)  # now, so that newcomers find room before it is really gone
        oldest.send_away()
        return True


def address_of(scope: Mapping[str, Any]) -> str:
    """Return the client's address, empty for a local socket; addresses forwarded by a proxy are not trusted."""
    client = scope.get("client")
    return plain_address(str(client[0])) if client else ""


def plain_address(host: str) -> str:
    """Convert an IPv4 address that came through an IPv6 socket back to IPv4."""
    return host.removeprefix("::ffff:") if "." in host else host


def source_of(address: str) -> str:
    """Return the source to count an address under: itself, or its IPv6 /64, since one owner usually has all of it."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return address if found.version == 4 else str(ip_network((int(found), 64), strict=False))


def is_local(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False

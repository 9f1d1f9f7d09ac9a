"""Where requests are limited: connections, rates, sizes and deadlines; and what was refused, by reason.

Who may come in: how many connections are open, from where, and which of them have to go for another.

Used by one event loop.  A connection costs its owner nothing and us a file and some memory.  So strangers, who have
shown neither key nor token, have a budget of their own: in all, and from one address (of IPv6, one /64).  When it is
used up, the stranger that has been there longest goes, whatever it is doing (its handshake, a slow body, an answer that
it does not take), and not the newcomer: whoever really asks for something is served within milliseconds, however many
sockets somebody else holds open.  The rest of the connections is kept for agents and readers, who have shown that they
are known.  They count no more, and are sent away only while they ask for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Final, Generic, Literal, Protocol, TypeVar, get_args

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
    "is_local",
    "plain_address",
    "source_of",
]


# -- buckets ----------------------------------------------------------------------------------------------------------
# How often something may happen: a bucket of tokens that fills at a steady rate.  Pure arithmetic; time is given.

Key = TypeVar("Key", bound=Hashable)


class Bucket:
    """Lets ``burst`` through at once and ``rate`` a second in the long run."""

    __slots__ = ("_at_s", "_left", "burst", "rate")

    def __init__(self, *, rate: float, burst: float, now_s: float) -> None:
        self.rate, self.burst = rate, burst
        self._left = burst
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> float:
        """0 when it may pass (and it is taken), else how many seconds to wait before it may.

        What is more than the bucket ever holds passes when the bucket is full, and leaves it in debt.
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
    """One bucket each for a bounded number of sources; those that are full again are forgotten first."""

    def __init__(self, *, rate: float, burst: float, most: int) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._buckets: dict[Key, Bucket] = {}

    def take(self, key: Key, now_s: float) -> float:
        """As ``Bucket.take(1)``; when there is no room for another source, that source has to wait."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._most:
                self._buckets = {known: kept for known, kept in self._buckets.items() if not kept.full(now_s)}
                if len(self._buckets) >= self._most:
                    return self._burst / self._rate
            bucket = self._buckets[key] = Bucket(rate=self._rate, burst=self._burst, now_s=now_s)
        return bucket.take(1, now_s)


# -- refusals ---------------------------------------------------------------------------------------------------------
# What the hub refused, by reason: counted here, shown by ``/metrics``, ``nodes.json`` and the summary.
#
# Everything that is turned away is turned away for one of ``REASONS``, so the counters are bounded whatever comes; whom
# it came from is kept for the first few sources only.  Nothing of what was sent is kept.

Reason = Literal[
    "connections",  # more of them than may be open
    "connection_rate",  # more of them in a short time than one address may make
    "tls",  # no handshake, or none of ours, or none in time
    "http",  # what came is no request, or one that could be read in two ways
    "head_large",
    "head_slow",
    "body_large",
    "body_slow",
    "reader_slow",  # does not take the answer
    "key",  # a join that was not signed with our key
    "join",  # a join that makes no sense here: another run, a node that does not exist
    "join_rate",
    "node_taken",  # another spool speaks for this node
    "token",
    "spool",  # a frame in the name of another spool
    "rank",  # a frame with a rank that another node has
    "frame",  # no frame, or not of ours
    "rate",  # more frames or bytes than one agent may send
    "busy",  # more at one time than there is memory for
    "disk",  # nothing can be written
    "fault",  # an error of ours; the connection was given up
]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
REFUSED_SOURCES: Final = 256


class Refused(HubError):
    """A request that is answered with ``status`` and counted under ``reason``.

    ``tell``: whether it is worth an event; None: the first time that this source is refused for this reason.
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
    """Counters of one hub.  Used by its event loop only."""

    def __init__(self) -> None:
        self._counts: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._sources: set[tuple[Reason, str]] = set()
        self.total = 0

    def count(self, reason: Reason, source: str) -> bool:
        """True the first time that ``source`` is refused for this reason, as long as there is room to remember it."""
        self._counts[reason] += 1
        self.total += 1
        if (reason, source) in self._sources or len(self._sources) >= REFUSED_SOURCES:
            return False
        self._sources.add((reason, source))
        return True

    def by_reason(self) -> dict[str, int]:
        """Of every reason, also of those that never came up."""
        return {str(reason): count for reason, count in self._counts.items()}


# -- entrance ---------------------------------------------------------------------------------------------------------

_BODIES: Final = {b"/frames": FRAME_BYTES, b"/join": JOIN_BYTES, b"/hello": HELLO_BYTES}
_RATED_ADDRESSES: Final = 4096
_IN_64: Final = 4
"""How many addresses a /64 counts for: it may be one machine, or a cluster."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Of one server.  Tests make the times short."""

    connections: int = 2048
    """Open at one time, of which strangers get three in four.  An agent keeps one."""
    per_address: int = 128
    """Strangers from one address; from one /64 of IPv6, where a whole cluster may be, four times as many …"""
    spare_local: bool = True
    """… but from this machine three in four of all, and as fast as they come."""
    arrivals_per_s: float = 50.0
    """New connections from one address in the long run: a handshake is the most that a stranger can make us compute."""
    arrivals: int = 256
    """And at once."""
    handshake_s: float = 10.0
    head_bytes: int = 16 << 10
    head_s: float = 10.0
    """From the first byte (or the connection) to the end of the head."""
    bodies: Mapping[bytes, int] = field(default_factory=lambda: dict(_BODIES))
    """By how the path ends, the bytes of a body."""
    body_bytes: int = 16 << 10
    """Of all others."""
    body_s: float = 20.0
    body_bytes_per_s: int = 32 << 10
    """What a large body may take longer: as long as the slowest line worth having needs."""
    answer_s: float = 30.0
    """How long somebody may leave an answer untaken."""
    idle_s: float = 5.0
    """Between two requests …"""
    agent_idle_s: float = 75.0
    """… of an agent, who has said how often it comes."""
    linger_s: float = 10.0
    """How long the rest of a request that is answered already is passed over, so that its sender sees the answer …"""
    linger_bytes: int = 1 << 20
    """… and how much, of one that was larger than it may be."""
    grace_s: float = 2.0
    """For answers under way when the server stops."""

    @classmethod
    def for_nodes(cls, nnodes: int) -> ServerLimits:
        """Room for every agent twice, as when all of a large job come again before their old connections are gone."""
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
        """Known ones that ask for nothing.  Both: longest first; likewise in each address."""
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
        """Send away all that are past a deadline of theirs."""
        for visitor in self.inside():
            visitor.sweep(now_s)

    def turned_away(self, address: str, now_s: float) -> Reason | None:
        """Whether a newcomer has to go, and why; makes room for it if that can be."""
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
        """A stranger, until it is ``known``."""
        self._inside[visitor] = None
        self._strangers[visitor] = None
        self._addresses.setdefault(source_of(visitor.address), _Address()).strangers[visitor] = None

    def leave(self, visitor: Visitor) -> None:
        """It is gone, or as good as gone; more than once does no harm."""
        if visitor not in self._inside:
            return
        del self._inside[visitor]
        self._waiting.pop(visitor, None)
        self._forget_stranger(visitor)

    def known(self, visitor: Visitor) -> None:
        """It has shown a key or a token; while it asks for something it may not be sent away for another."""
        if visitor in self._inside:
            self._forget_stranger(visitor)
            self._waiting.pop(visitor, None)

    def waits(self, visitor: Visitor) -> None:
        """One that is known may be sent away for another, after those that wait already; a stranger always may."""
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
        self.leave(oldest)  # now, for those who come before it is really gone
        oldest.send_away()
        return True


def plain_address(host: str) -> str:
    """An IPv4 address that came through an IPv6 socket, as IPv4."""
    return host.removeprefix("::ffff:") if "." in host else host


def source_of(address: str) -> str:
    """Who an address stands for: itself, or of IPv6 its /64, since whoever has one address there has them all."""
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

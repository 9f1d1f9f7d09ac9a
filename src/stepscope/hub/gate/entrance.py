"""Who may come in: how many connections are open, from where, and which of them have to go for another.

Used by one event loop.  A connection costs its owner nothing and us a file and some memory.  So strangers, who have
shown neither key nor token, have a budget of their own: in all, and from one address (of IPv6, one /64).  When it is
used up, the stranger that has been there longest goes, whatever it is doing (its handshake, a slow body, an answer that
it does not take), and not the newcomer: whoever really asks for something is served within milliseconds, however many
sockets somebody else holds open.  The rest of the connections is kept for agents and readers, who have shown that they
are known.  They count no more, and are sent away only while they ask for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Final, Protocol

from stepscope.hub.gate.buckets import Buckets
from stepscope.hub.gate.refusals import Reason, Refusals
from stepscope.wire.limits import FRAME_BYTES, HELLO_BYTES, JOIN_BYTES

__all__ = ["Entrance", "ServerLimits", "Visitor", "is_local", "plain_address", "source_of"]

_BODIES: Final = {b"/frames": FRAME_BYTES, b"/join": JOIN_BYTES, b"/hello": HELLO_BYTES}
_RATED: Final = 4096
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
        self._arrivals: Buckets[str] = Buckets(rate=limits.arrivals_per_s, burst=limits.arrivals, most=_RATED)
        self._arrivals_64: Buckets[str] = Buckets(
            rate=_IN_64 * limits.arrivals_per_s, burst=_IN_64 * limits.arrivals, most=_RATED
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

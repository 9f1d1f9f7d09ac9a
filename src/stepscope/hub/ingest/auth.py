"""Authentication of agents and their frames: hellos, joins, tokens, and which node has which ranks.

A hello and a join are signed with the user's key (``wire/handshake.py``).  The token in the answer is random, is
stored only as its SHA-256, and is valid until this process ends: after a restart of the hub every agent joins again (a
mark in the token distinguishes them from strangers).  A node number belongs to one spool at a time.  Another spool
gets it when the first has said bye or was silent for a while: the node was replaced.  A replaced spool may come back
to deliver what it has, but does not get its number back while the other is there.  Used only by the hub's event loop.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from stepscope.errors import FrameError
from stepscope.hub.limits import Bucket, Buckets, Refused, is_local, source_of
from stepscope.records.text import duration_text
from stepscope.store.live.ring_files import RingSidecar
from stepscope.wire.frames import ring_id
from stepscope.wire.handshake import (
    Join,
    KeyRing,
    Peer,
    Positions,
    Welcome,
    read_hello,
    read_join,
    sign,
    signed,
    write_challenge,
    write_welcome,
)

__all__ = ["Admission", "Admitted", "Challenges", "RankClaims", "Sender", "SenderLimits", "neighbors"]


# -- senders ----------------------------------------------------------------------------------------------------------
# A sender is one spool of one node, as the hub knows it; each is assigned other nodes to probe.

ALL_TO_ALL: Final = 16
"""Up to this many nodes each probes all others; beyond, only a handful, so that the cost of probing stays linear."""


@dataclass(frozen=True, kw_only=True)
class SenderLimits:
    """Limits for senders.  Tests make them small."""

    joins_per_s: float = 20.0
    joins: int = 200
    """Joins from one address, in the long run and at once."""
    spare_local: bool = True
    """Whether this machine's own addresses are exempt."""
    again_per_s: float = 0.5
    again: int = 10
    """Joins by one spool."""
    frames_per_s: float = 20.0
    frames: int = 100
    bytes_per_s: float = 16 << 20
    bytes: int = 64 << 20
    """Frames and bytes from one spool; enough for an agent to catch up after an hour without a connection."""
    contest_s: float = 3.0
    """How long two spools may claim a rank before it is reported: elastic jobs move ranks, and the new node knows
    first.
    """


@dataclass(slots=True, kw_only=True, eq=False)
class Sender:
    spool: str
    node: int
    host: str
    address: str
    """As the hub sees it."""
    hub_address: str
    """The hub's address, as this sender reaches it."""
    probe_port: int
    local: bool
    """Whether its spool is the run directory, which the hub reads directly."""
    heard_s: float
    joins: Bucket
    frames: Bucket
    volume: Bucket
    key: bytes = field(default=b"", repr=False)
    """The key it joined with."""
    taken_frames: int = 0
    taken_bytes: int = 0
    """Since it joined or came back; for the audit log."""
    token: bytes = b""
    """The SHA-256 of the token."""
    current: bool = True
    """Whether it represents its node; False once it was replaced."""
    bye: bool = False
    lost: bool = False
    skewed: bool = False
    """Whether its clock skew was reported."""
    contested_s: float | None = None
    """Since when it has claimed a rank that another spool has."""
    contest_told: bool = False
    peers: tuple[Peer, ...] = ()
    """The peers it was last sent."""
    peers_version: int = -1
    """The version of the senders when its peers were last computed."""

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


def neighbors(node: int, nnodes: int) -> Iterator[int]:
    """Yield the nodes that one probes: all others if there are few, otherwise those 1, 2, 4, 8 … positions ahead.

    Every node is then probed by as many as it probes, and any two are a few hops apart.
    """
    if nnodes <= ALL_TO_ALL:
        yield from (other for other in range(nnodes) if other != node)
        return
    stride = 1
    while stride < nnodes:
        yield (node + stride) % nnodes
        stride *= 2


# -- rank claims ------------------------------------------------------------------------------------------------------
# Which sender has which ranks and rings, so that no sender can send data for another's.
#
# A rank belongs to the spool whose live ring claimed it first, while that ring is live and that spool is heard from;
# the ring itself, which is one process, belongs to its spool for good.  Processes without a distributed world claim no
# rank: each of them thinks that it is rank 0.

_ATTEMPT_BITS = 40


class RankClaims:
    """Owners of ranks and rings.  Keys are numbers, not names: there may be a hundred thousand ranks."""

    def __init__(self) -> None:
        self._ranks: dict[int, str] = {}
        """The spool by attempt and rank."""
        self._rings: dict[int, str] = {}

    def contested(
        self, spool: str, rings: Iterable[RingSidecar], is_live: Callable[[str], bool]
    ) -> tuple[RingSidecar, str] | None:
        """Return the first of ``rings`` that belongs to another spool, and that spool."""
        for about in rings:
            owner = self._rings.get(_ring_number(about), spool)
            if owner != spool:
                return about, owner
            rank = _claimed_rank(about)
            holder = self._ranks.get(rank, spool) if rank is not None else spool
            if holder != spool and is_live(holder):
                return about, holder
        return None

    def take(self, spool: str, rings: Iterable[RingSidecar]) -> None:
        """Assign rings to this spool; a ring that ended releases its rank."""
        for about in rings:
            self._rings[_ring_number(about)] = spool
            rank = _claimed_rank(about)
            if rank is not None:
                self._ranks[rank] = spool
            elif self._ranks.get(_rank_number(about)) == spool:
                del self._ranks[_rank_number(about)]


def _ring_number(about: RingSidecar) -> int:
    return int.from_bytes(ring_id(about.key)[:8], "little")


def _claimed_rank(about: RingSidecar) -> int | None:
    """Return the claimed rank; None if it claims no rank."""
    ended = about.ended_wall_ns is not None or about.state not in ("starting", "running")
    return None if ended or about.identity.world_size <= 1 else _rank_number(about)


def _rank_number(about: RingSidecar) -> int:
    return about.identity.attempt << _ATTEMPT_BITS | about.identity.rank


# -- admission --------------------------------------------------------------------------------------------------------

SILENT_S: Final = 15.0
ROUNDS: Final = 3
"""A node is lost if it was silent for both: this many seconds, and this many of its rounds."""
ROUND_S: Final = 0.5
WATCHED_ROUND_S: Final = 0.25
"""The same while a client is watching."""
FRAMES_PER_S: Final = 600
"""From all agents together; the more agents, the less often each sends."""
NONCES: Final = 1 << 16
ADDRESSES: Final = 4096
LATE_SPOOLS: Final = 4096
"""Replaced spools that are still remembered."""
CHALLENGE_S: Final = 60.0
"""The longest time between a hello and its join."""
OTHER_KEY: Final = (
    "the keys differ; copy ~/.config/stepscope/key from node 0, or set the same STEPSCOPE_KEY on all nodes"
)
Keys = Callable[[], Sequence[bytes]]
T = TypeVar("T")
_BEARER: Final = b"bearer "
_PURPOSE: Final = "token"


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """An accepted join, and its answer."""

    sender: Sender
    join: Join
    how: Literal["joined", "again", "replaced", "late"]
    """``again``: the same spool as before.  ``late``: a replaced spool delivers what it has."""
    before: Sender | None
    """The sender that was replaced."""
    body: bytes
    proof: str


def _first_proved(keys: Keys, read: Callable[[bytes], T | None]) -> tuple[T, bytes]:
    """Return what ``read`` returns for the first key that proves it, and that key; Refused without one."""
    for key in keys():
        try:
            found = read(key)
        except FrameError as error:
            raise Refused(400, "join", str(error)) from error
        if found is not None:
            return found, key
    raise Refused(403, "key", OTHER_KEY)


class Challenges:
    """Answers to hellos.  No state is kept: a challenge carries its own proof, valid for this process."""

    def __init__(self, keys: Keys, certificate: bytes, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._certificate, self._clock = keys, certificate, clock
        self._secret = secrets.token_bytes(32)

    @property
    def behind_s(self) -> float:
        """How long to wait before rejecting an unknown key: it may have been changed just now."""
        return self._keys.behind_s if isinstance(self._keys, KeyRing) else 0.0

    def answer(self, body: bytes, proof: str) -> tuple[bytes, str]:
        """Return the body and the proof of the answer to a hello; Refused without the key."""
        nonce, key = _first_proved(self._keys, lambda key: read_hello(body, proof, key, self._certificate))
        issued = f"{int(self._clock() + CHALLENGE_S)}.{secrets.token_hex(16)}"
        return write_challenge(f"{issued}.{self._sum(issued)}", nonce, key, self._certificate)

    def join_of(self, body: bytes, proof: str) -> Join:
        """Return the join that is signed with a key, with a valid challenge; Refused otherwise."""
        join, _ = _first_proved(self._keys, lambda key: read_join(body, proof, key, self._certificate))
        if not self.holds(join.challenge):
            raise Refused(403, "join", "this join was already used")
        return join

    def holds(self, challenge: str) -> bool:
        issued, _, given = challenge.rpartition(".")
        right = hmac.compare_digest(self._sum(issued).encode(), given.encode(errors="replace"))
        return right and int(issued.partition(".")[0]) > self._clock()

    def bears(self, authorization: bytes) -> bool:
        """Whether a header (``Bearer …``) has a valid challenge: proves the key before more of the request is read."""
        bearer = authorization[: len(_BEARER)].lower() == _BEARER
        return bearer and self.holds(authorization[len(_BEARER) :].decode("latin-1"))

    def _sum(self, issued: str) -> str:
        return sign(self._secret, "challenge", issued.encode(errors="replace"))


class Admission:
    def __init__(
        self,
        *,
        keys: Keys,
        certificate: bytes,
        names: Sequence[str],
        nnodes: int,
        local_spool: str = "",
        limits: SenderLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        challenges: Challenges | None = None,
    ) -> None:
        """``names``: the possible names of the run, its real name first.  ``certificate``: its fingerprint, or empty.

        ``keys``: those accepted now (``KeyRing``).

        ``challenges``: from a server that admits agents to several runs.
        """
        self.challenges = challenges if challenges is not None else Challenges(keys, certificate, clock=clock)
        self.nnodes = nnodes
        self.names = tuple(names)
        self.senders: dict[str, Sender] = {}
        """The senders that joined since the hub started, by spool."""
        self.claims = RankClaims()
        self.local_spool = local_spool
        self.next_s = ROUND_S
        self.watched = False
        """Whether a client is watching: agents then send more often, if there are few of them."""
        self.probe_key = secrets.token_hex(32)
        self._keys, self._certificate = keys, certificate
        self._believed = keys()
        self._limits = limits if limits is not None else SenderLimits()
        self._clock = clock
        self._nodes: dict[int, Sender] = {}
        self._tokens: dict[bytes, Sender] = {}
        self._ended: set[bytes] = set()
        """Tokens that ended with the key they were issued for."""
        self._nonces: dict[str, None] = {}
        self._known: dict[str, None] = {}
        self._arrivals: Buckets[str] = Buckets(rate=self._limits.joins_per_s, burst=self._limits.joins, most=ADDRESSES)
        self.elsewhere = 0
        """Agents of other runs that send to the same server."""
        self._agents = 0
        self._version = 0
        """Changes with the set of senders; used for peers."""

    # -- joining -----------------------------------------------------------------------------------------------------

    def may_join(self, address: str) -> None:
        """Check before a join is read; Refused if too many come from this address."""
        if self._limits.spare_local and is_local(address):
            return
        wait_s = self._arrivals.take(source_of(address), self._clock())
        if wait_s > 0:
            raise Refused(429, "join_rate", "too many joins from this address", retry_s=wait_s)

    def join(
        self,
        body: bytes,
        proof: str,
        *,
        address: str,
        hub_address: str = "",
        positions: Callable[[str], Positions],
    ) -> Admitted:
        """Admit a sender and return the welcome, with a unique token; otherwise Refused, with the reason."""
        join, key = self._read(body, proof)
        self._check(join)
        now_s = self._clock()
        sender = self.senders.get(join.spool)
        before = self._nodes.get(join.node)
        other = before if before is not None and before.spool != join.spool else None
        how: Literal["joined", "again", "replaced", "late"] = "joined" if sender is None else "again"
        if other is not None:
            how = self._beside(other, join, now_s)
        if sender is None:
            local = join.spool == self.local_spool
            sender = sender_of_join(
                join, self._limits, address=address, hub_address=hub_address, local=local, now_s=now_s
            )
        wait_s = sender.joins.take(1, now_s)
        if wait_s > 0:
            raise Refused(429, "join_rate", "this node joins too often", retry_s=wait_s)
        sender.host, sender.address, sender.hub_address = join.host, address, hub_address
        sender.probe_port, sender.heard_s, sender.peers_version = join.probe_port, now_s, -1
        sender.current, sender.key = how != "late", key
        self._settle(sender, other if how == "replaced" else None)
        token = self._mint(sender)
        return self._welcome(sender, join, token, how, other if how == "replaced" else None, positions(join.spool))

    def _read(self, body: bytes, proof: str) -> tuple[Join, bytes]:
        """Return the join and the key that signed it."""
        return _first_proved(self._keys, lambda key: read_join(body, proof, key, self._certificate))

    def _check(self, join: Join) -> None:
        if join.run not in self.names:
            raise Refused(403, "join", f"this hub serves the run {self.names[0]}, not {join.run}")
        if join.nnodes != self.nnodes or join.node >= self.nnodes:
            who = f"node {join.node} of {join.nnodes}"
            raise Refused(403, "join", f"{who} cannot join a run of {self.nnodes} nodes")
        if join.nonce in self._nonces or not self.challenges.holds(join.challenge):
            raise Refused(403, "join", "this join was already used")
        self._nonces[join.nonce] = None
        if len(self._nonces) > NONCES:
            del self._nonces[next(iter(self._nonces))]

    def _beside(self, other: Sender, join: Join, now_s: float) -> Literal["replaced", "late"]:
        """Decide how to admit a spool whose node another spool represents."""
        limit_s = self.silence_s
        if other.bye or other.silent_s(now_s) > limit_s:
            return "replaced"
        if join.spool in self._known:
            return "late"
        ago = duration_text(other.silent_s(now_s), whole=True)
        why = f"{other.host} is already node {join.node}, and sent data {ago} ago"
        raise Refused(403, "node_taken", why, retry_s=max(1.0, limit_s - other.silent_s(now_s)))

    def _settle(self, sender: Sender, replaced: Sender | None) -> None:
        if replaced is not None:
            self._tokens.pop(replaced.token, None)
            replaced.current = False
            self.senders.pop(replaced.spool, None)
        if sender.current:
            self._nodes[sender.node] = sender
        self._know(sender.spool)
        if sender.spool not in self.senders or sender.bye:
            self._agents += 1
        sender.bye = sender.lost = False
        self.senders[sender.spool] = sender
        self._version += 1
        self._pace()

    def _know(self, spool: str) -> None:
        self._known[spool] = None
        if len(self._known) > self.nnodes + LATE_SPOOLS:
            del self._known[next(iter(self._known))]

    def recall(self, spools: Sequence[str]) -> None:
        """Remember spools that joined before the hub restarted: they may deliver what they have."""
        for spool in spools:
            self._know(spool)

    def _mint(self, sender: Sender) -> str:
        token = secrets.token_urlsafe(32)
        token = f"{token}.{sign(sender.key, _PURPOSE, token.encode())}"
        self._tokens.pop(sender.token, None)
        sender.token = hashlib.sha256(token.encode()).digest()
        self._tokens[sender.token] = sender
        return token

    def _welcome(
        self,
        sender: Sender,
        join: Join,
        token: str,
        how: Literal["joined", "again", "replaced", "late"],
        before: Sender | None,
        positions: Positions,
    ) -> Admitted:
        self.peers_for(sender)
        welcome = Welcome(
            run=self.names[0],
            token=token,
            positions=positions,
            probe_key=self.probe_key,
            next_s=self.next_s,
            peers=sender.peers,
            local=sender.local,
        )
        body, proof = write_welcome(welcome, join.nonce, sender.key, self._certificate)
        return Admitted(sender=sender, join=join, how=how, before=before, body=body, proof=proof)

    # -- sending -----------------------------------------------------------------------------------------------------

    def sender_of(self, authorization: bytes) -> Sender | None:
        """Return the owner of a token (``Bearer …``).  Its SHA-256 is looked up, so timing reveals nothing."""
        if authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        digest = hashlib.sha256(authorization[len(_BEARER) :]).digest()
        sender = self._tokens.get(digest)
        return sender if sender is not None and hmac.compare_digest(sender.token, digest) else None

    def was_ours(self, authorization: bytes) -> bool:
        """Whether an unknown token was issued by a hub with our key, such as this one before a restart."""
        given = authorization[len(_BEARER) :]
        token, _, proof = given.partition(b".")
        marked = (signed(key, proof.decode("latin-1"), _PURPOSE, token) for key in self._keys())
        return any(marked) or hashlib.sha256(given).digest() in self._ended

    def heard(self, sender: Sender, *, bye: bool) -> bool:
        """Note that a sender sent a frame; True if it was lost before."""
        back, sender.lost = sender.lost, False
        sender.heard_s = self._clock()
        self._agents += back
        if bye and not sender.bye:
            sender.bye = True
            self._agents -= 1
            self._version += 1
        return back

    def is_live(self, spool: str) -> bool:
        """Whether a spool still holds its ranks; the hub's own run directory always does."""
        sender = self.senders.get(spool)
        if sender is None:
            return spool == self.local_spool
        return sender.local or not (sender.bye or sender.silent_s(self._clock()) > self.silence_s)

    def contest(self, sender: Sender, rings: Sequence[RingSidecar]) -> Refused | None:
        """Return the refusal for a sender that claims a rank, or a process, of another node."""
        contested = self.claims.contested(sender.spool, rings, self.is_live)
        if contested is None:
            sender.contested_s = None
            return None
        about, owner = contested
        other = self.senders.get(owner)
        whose = f"{other.host} (node {other.node})" if other is not None else "another node"
        now_s = self._clock()
        sender.contested_s = now_s if sender.contested_s is None else sender.contested_s
        tell = not sender.contest_told and now_s - sender.contested_s >= self._limits.contest_s
        sender.contest_told |= tell
        identity = about.identity
        return Refused(
            403, "rank", f"rank {identity.rank} of attempt {identity.attempt} already runs on {whose}", tell=tell
        )

    def look(self) -> list[Sender]:
        """Return the senders lost since the last call; called about once a second."""
        self._end_retired()
        now_s = self._clock()
        limit_s = self.silence_s
        active = [sender for sender in self.senders.values() if not (sender.bye or sender.lost)]
        quiet = [sender for sender in active if sender.silent_s(now_s) > limit_s]
        for sender in quiet:
            sender.lost = True
        self._agents = len(active) - len(quiet)
        self._version += bool(quiet)
        self._pace()
        return quiet

    def _end_retired(self) -> None:
        """End the tokens of keys that are no longer accepted: their senders must join again with another key."""
        believed = self._keys()
        if believed == self._believed:
            return
        self._believed = believed
        ended = {sender.token: sender for sender in self._tokens.values() if sender.key not in believed}
        for token in ended:
            del self._tokens[token]
        self._ended = (self._ended if len(self._ended) < ADDRESSES else set()) | ended.keys()

    def awaited(self) -> list[Sender]:
        """Return the senders that are present and have not said bye, except the hub's own run directory."""
        return [sender for sender in self.senders.values() if not (sender.bye or sender.lost or sender.local)]

    @property
    def agents(self) -> int:
        return self._agents

    @property
    def silence_s(self) -> float:
        return max(SILENT_S, ROUNDS * self.next_s + SILENT_S / ROUNDS)

    def _pace(self) -> None:
        least_s = WATCHED_ROUND_S if self.watched else ROUND_S
        self.next_s = max(least_s, (self._agents + self.elsewhere) / FRAMES_PER_S)

    def peers_for(self, sender: Sender) -> tuple[Peer, ...] | None:
        """Return the peers that a sender should probe; None if unchanged."""
        if sender.peers_version == self._version:
            return None
        sender.peers_version = self._version
        found = []
        for node in neighbors(sender.node, self.nnodes):
            other = self._nodes.get(node)
            if other is None or not other.probe_port or other.bye or other.lost:
                continue
            # Node 0 reaches the hub over loopback; the others reach node 0 at the hub's address.
            address = sender.hub_address if is_local(other.address) and sender.hub_address else other.address
            found.append(Peer(node=node, host=other.host, address=address, port=other.probe_port))
        peers = tuple(found)
        if peers == sender.peers:
            return None
        sender.peers = peers
        return peers

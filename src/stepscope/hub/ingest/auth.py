"""Where agents and their frames are authenticated: hellos, joins, tokens, and which node has which ranks.

Who may send: joins, the tokens handed out for them, and which sender speaks for which node.

A hello and a join are signed with the user's key (``wire/handshake.py``); the token that answers them is random, is
kept as its SHA-256 only, and lives as long as this process: after a restart of the hub everybody joins again (a mark
in the token tells these from strangers).  A node number belongs to one spool at a time.  Another one gets it when the
first has said bye or was silent for a while: that node was replaced.  A spool that was replaced may come back to hand
in what it has, but does not get its number back as long as the other is there.  Used by the hub's event loop only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from stepscope.errors import FrameError
from stepscope.hub.limits import Bucket, Buckets, Refused, is_local, source_of
from stepscope.store.live.ring_files import RingSidecar
from stepscope.wire.frames import ring_id
from stepscope.wire.handshake import (
    Join,
    Peer,
    Positions,
    Welcome,
    read_hello,
    read_join,
    write_challenge,
    write_welcome,
)
from stepscope.wire.keys import KeyRing, sign, signed

__all__ = ["Admission", "Admitted", "Challenges", "RankClaims", "Sender", "SenderLimits", "neighbours"]


# -- senders ----------------------------------------------------------------------------------------------------------
# A sender: one spool of one node, as the hub knows it while it lives; and whom of the others it probes.

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


# -- claims -----------------------------------------------------------------------------------------------------------
# Which sender has which ranks and rings, so that none can speak for another's.
#
# A rank belongs to the spool whose live ring claimed it first, for as long as that ring is live and that spool is heard
# of; the ring itself, which is one process, belongs to its spool for good.  Processes that know of no world claim no
# rank: each of them thinks that it is rank 0.

_ATTEMPT_BITS = 40


class RankClaims:
    """Numbers, not names: there may be a hundred thousand ranks."""

    def __init__(self) -> None:
        self._ranks: dict[int, str] = {}
        """By attempt and rank, the spool."""
        self._rings: dict[int, str] = {}

    def contested(
        self, spool: str, rings: Iterable[RingSidecar], is_live: Callable[[str], bool]
    ) -> tuple[RingSidecar, str] | None:
        """The first of ``rings`` that is another spool's, and whose."""
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
        """They are this spool's; a ring that ended lets go of its rank."""
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
    """None for one that claims none."""
    ended = about.ended_wall_ns is not None or about.state not in ("starting", "running")
    return None if ended or about.identity.world_size <= 1 else _rank_number(about)


def _rank_number(about: RingSidecar) -> int:
    return about.identity.attempt << _ATTEMPT_BITS | about.identity.rank


# -- admission --------------------------------------------------------------------------------------------------------

SILENT_S: Final = 15.0
ROUNDS: Final = 3
"""A node that is not heard of for so long, and for so many of its rounds, is lost."""
ROUND_S: Final = 0.5
WATCHED_ROUND_S: Final = 0.25
"""While somebody looks."""
FRAMES_PER_S: Final = 600
"""Of all agents together; with more of them each comes less often."""
NONCES: Final = 1 << 16
ADDRESSES: Final = 4096
LATE_SPOOLS: Final = 4096
"""Spools that were replaced and are still known."""
CHALLENGE_S: Final = 60.0
"""Between a hello and its join."""
OTHER_KEY: Final = "its key is another; copy ~/.config/stepscope/key of node 0, or set STEPSCOPE_KEY alike on all nodes"
Keys = Callable[[], Sequence[bytes]]
_BEARER: Final = b"bearer "
_PURPOSE: Final = "token"


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A join that was taken, and its answer."""

    sender: Sender
    join: Join
    how: Literal["joined", "again", "replaced", "late"]
    """``again``: the same spool as before.  ``late``: one that was replaced hands in what it has."""
    before: Sender | None
    """Who was replaced."""
    body: bytes
    proof: str


class Challenges:
    """What hellos are answered with.  Nothing is kept of them: a challenge carries its own proof, for this process."""

    def __init__(self, keys: Keys, certificate: bytes, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._certificate, self._clock = keys, certificate, clock
        self._secret = secrets.token_bytes(32)

    @property
    def behind_s(self) -> float:
        """How long to wait before a key that is not known is another one: somebody may have changed it just now."""
        return self._keys.behind_s if isinstance(self._keys, KeyRing) else 0.0

    def answer(self, body: bytes, proof: str) -> tuple[bytes, str]:
        """The body and the proof of the answer to a hello; Refused to those who do not have the key."""
        for key in self._keys():
            try:
                nonce = read_hello(body, proof, key, self._certificate)
            except FrameError as error:
                raise Refused(400, "join", str(error)) from error
            if nonce is not None:
                said = f"{int(self._clock() + CHALLENGE_S)}.{secrets.token_hex(16)}"
                return write_challenge(f"{said}.{self._sum(said)}", nonce, key, self._certificate)
        raise Refused(403, "key", OTHER_KEY)

    def holds(self, challenge: str) -> bool:
        said, _, given = challenge.rpartition(".")
        right = hmac.compare_digest(self._sum(said).encode(), given.encode(errors="replace"))
        return right and int(said.partition(".")[0]) > self._clock()

    def bears(self, authorization: bytes) -> bool:
        """Whether a header (``Bearer …``) has one: then whoever asks has the key, before more of it is read."""
        bearer = authorization[: len(_BEARER)].lower() == _BEARER
        return bearer and self.holds(authorization[len(_BEARER) :].decode("latin-1"))

    def _sum(self, said: str) -> str:
        return sign(self._secret, "challenge", said.encode(errors="replace"))


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
        """``names``: what the run may be called, its real name first.  ``certificate``: its fingerprint, or nothing.

        ``keys``: those that are believed now (``KeyRing``).

        ``challenges``: of a server that admits to several runs.
        """
        self.challenges = challenges if challenges is not None else Challenges(keys, certificate, clock=clock)
        self.nnodes = nnodes
        self.names = tuple(names)
        self.senders: dict[str, Sender] = {}
        """By spool, all that joined since the hub was started."""
        self.claims = RankClaims()
        self.local_spool = local_spool
        self.next_s = ROUND_S
        self.watched = False
        """Whether somebody looks: then agents come more often, as far as there are few of them."""
        self.probe_key = secrets.token_hex(32)
        self._keys, self._certificate = keys, certificate
        self._believed = keys()
        self._limits = limits if limits is not None else SenderLimits()
        self._clock = clock
        self._nodes: dict[int, Sender] = {}
        self._tokens: dict[bytes, Sender] = {}
        self._ended: set[bytes] = set()
        """Tokens that ended with the key they were given for."""
        self._nonces: dict[str, None] = {}
        self._known: dict[str, None] = {}
        self._arrivals: Buckets[str] = Buckets(rate=self._limits.joins_per_s, burst=self._limits.joins, most=ADDRESSES)
        self._agents = 0
        self._version = 0
        """Of who is there, for peers."""

    # ── joining ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def may_join(self, address: str) -> None:
        """Before anything of a join is read: Refused when too many come from there."""
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
        """Refused, with the reason; else the welcome, with a token that nobody else has."""
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
            raise Refused(429, "join_rate", "this node joins again and again", retry_s=wait_s)
        sender.host, sender.address, sender.hub_address = join.host, address, hub_address
        sender.probe_port, sender.heard_s, sender.peers_version = join.probe_port, now_s, -1
        sender.current, sender.key = how != "late", key
        self._settle(sender, other if how == "replaced" else None)
        token = self._mint(sender)
        return self._welcome(sender, join, token, how, other if how == "replaced" else None, positions(join.spool))

    def _read(self, body: bytes, proof: str) -> tuple[Join, bytes]:
        """And the key that it was signed with."""
        for key in self._keys():
            try:
                join = read_join(body, proof, key, self._certificate)
            except FrameError as error:
                raise Refused(400, "join", str(error)) from error
            if join is not None:
                return join, key
        raise Refused(403, "key", OTHER_KEY)

    def _check(self, join: Join) -> None:
        if join.run not in self.names:
            raise Refused(403, "join", f"this hub serves the run {self.names[0]}, not {join.run}")
        if join.nnodes != self.nnodes or join.node >= self.nnodes:
            said = f"node {join.node} of {join.nnodes}"
            raise Refused(403, "join", f"{said} wants to join a run of {self.nnodes} nodes")
        if join.nonce in self._nonces or not self.challenges.holds(join.challenge):
            raise Refused(403, "join", "this join was used before")
        self._nonces[join.nonce] = None
        if len(self._nonces) > NONCES:
            del self._nonces[next(iter(self._nonces))]

    def _beside(self, other: Sender, join: Join, now_s: float) -> Literal["replaced", "late"]:
        """What a spool is for whose node another one speaks."""
        limit_s = self.silence_s
        if other.bye or other.silent_s(now_s) > limit_s:
            return "replaced"
        if join.spool in self._known:
            return "late"
        why = f"{other.host} speaks for node {join.node}, and was heard of {other.silent_s(now_s):.0f} s ago"
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
        """Spools that joined before the hub was started again: they may hand in what they have."""
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

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def sender_of(self, authorization: bytes) -> Sender | None:
        """Who has this token (``Bearer …``).  Found by its SHA-256: how long that takes says nothing about a token."""
        if authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        digest = hashlib.sha256(authorization[len(_BEARER) :]).digest()
        sender = self._tokens.get(digest)
        return sender if sender is not None and hmac.compare_digest(sender.token, digest) else None

    def was_ours(self, authorization: bytes) -> bool:
        """Whether a token that is not known was given out by a hub with our key, as by this one before a restart."""
        given = authorization[len(_BEARER) :]
        token, _, proof = given.partition(b".")
        marked = (signed(key, proof.decode("latin-1"), _PURPOSE, token) for key in self._keys())
        return any(marked) or hashlib.sha256(given).digest() in self._ended

    def heard(self, sender: Sender, *, bye: bool) -> bool:
        """It sent a frame; True if it was lost before."""
        back, sender.lost = sender.lost, False
        sender.heard_s = self._clock()
        self._agents += back
        if bye and not sender.bye:
            sender.bye = True
            self._agents -= 1
            self._version += 1
        return back

    def is_live(self, spool: str) -> bool:
        """Whether a spool still speaks for its ranks; the hub's own run directory always does."""
        sender = self.senders.get(spool)
        if sender is None:
            return spool == self.local_spool
        return sender.local or not (sender.bye or sender.silent_s(self._clock()) > self.silence_s)

    def contest(self, sender: Sender, rings: Sequence[RingSidecar]) -> Refused | None:
        """What to say to one that claims a rank, or a process, that another node has."""
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
        return Refused(403, "rank", f"rank {identity.rank} of attempt {identity.attempt} is on {whose}", tell=tell)

    def look(self) -> list[Sender]:
        """Once a second or so: those who are lost since the last look."""
        self._end_retired()
        now_s = self._clock()
        limit_s = self.silence_s
        quiet = [one for one in self.senders.values() if not (one.bye or one.lost) and one.silent_s(now_s) > limit_s]
        for sender in quiet:
            sender.lost = True
        self._agents = sum(not (one.bye or one.lost) for one in self.senders.values())
        self._version += bool(quiet)
        self._pace()
        return quiet

    def _end_retired(self) -> None:
        """Whoever joined with a key that is not believed any more joins again, with one that is."""
        believed = self._keys()
        if believed == self._believed:
            return
        self._believed = believed
        ended = {sender.token: sender for sender in self._tokens.values() if sender.key not in believed}
        for token in ended:
            del self._tokens[token]
        self._ended = (self._ended if len(self._ended) < ADDRESSES else set()) | ended.keys()

    def awaited(self) -> list[Sender]:
        """Who is there and has not said bye; the hub's own run directory aside."""
        return [one for one in self.senders.values() if not (one.bye or one.lost or one.local)]

    @property
    def agents(self) -> int:
        return self._agents

    @property
    def silence_s(self) -> float:
        return max(SILENT_S, ROUNDS * self.next_s + SILENT_S / ROUNDS)

    def _pace(self) -> None:
        least_s = WATCHED_ROUND_S if self.watched else ROUND_S
        self.next_s = max(least_s, self._agents / FRAMES_PER_S)

    def peers_for(self, sender: Sender) -> tuple[Peer, ...] | None:
        """Whom it should probe; None when that is as it was told."""
        if sender.peers_version == self._version:
            return None
        sender.peers_version = self._version
        found = []
        for node in neighbours(sender.node, self.nnodes):
            other = self._nodes.get(node)
            if other is None or not other.probe_port or other.bye or other.lost:
                continue
            # Node 0 reaches the hub over loopback; the others reach node 0 where they reach the hub.
            address = sender.hub_address if is_local(other.address) and sender.hub_address else other.address
            found.append(Peer(node=node, host=other.host, address=address, port=other.probe_port))
        peers = tuple(found)
        if peers == sender.peers:
            return None
        sender.peers = peers
        return peers

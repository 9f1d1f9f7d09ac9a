"""The rings of a run, one row each: 100,000 take tens of megabytes.

A ring is registered by its sidecar and found by its id.  Values that many rings share (host, node, names of phases,
facts, groups, versions) are stored once and referred to by number; what exceeds ``FACTS_BYTES`` is left out.  The rest
of a sidecar can be rebuilt from here: ``identity``, ``facts``, ``groups``.

A ring has a *column* (its place in the planes) from its first step on, while its attempt is the last.  A helper
process that inherited a rank's environment and never makes a step therefore takes up no column.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.collectives import ProcessGroup
from stepscope.records.identity import RankIdentity
from stepscope.records.series import RankSeries, RankState
from stepscope.ring.layout import RingState
from stepscope.store.attempts import RankClaim, settle_attempts
from stepscope.store.live.ring_files import RingSidecar, groups_as_kept
from stepscope.wire.frames import ring_id

__all__ = ["ENDED", "STATES", "Registry"]

STATES: tuple[RankState, ...] = ("starting", "running", "exited", "exception", "vanished")
"""By number: those of ``RingState``, and ``vanished``, which a process cannot report about itself."""
ENDED = RingState.EXITED
"""States from this number on mean that the process is gone."""
NOWHERE = -1
FACTS_BYTES = 24 << 20
"""The limit for facts and groups, as JSON, over all rings."""
FIRST_ROOM = 64

_COLUMNS: dict[str, str] = {
    "rank": "i4",
    "shown": "i4",
    "attempt": "i4",
    "restarts": "i4",
    "local_rank": "i4",
    "world_size": "i4",
    "pid": "i8",
    "started_by": "i8",
    "node": "i4",
    "host": "i4",
    "state": "u1",
    "column": "i4",
    "last_step": "i8",
    "live_step": "i8",
    "live_since_ns": "i8",
    "live_phase": "u1",
    "heard_s": "f8",
    "rows": "i8",
    "lost": "i8",
    "torn": "i8",
    "hook_failures": "i8",
    "anchor_mono_ns": "i8",
    "anchor_wall_ns": "i8",
    "ended_wall_ns": "i8",
    "imported_ns": "i8",
    "joined_ns": "i8",
    "names": "i4",
    "facts": "i4",
    "groups": "i4",
    "kind": "i4",
    "device_index": "i2",
    "device_uuid": "S40",
}
_SETTLED = (
    *("rank", "world_size", "host", "restarts", "node", "state", "last_step"),
    *("anchor_wall_ns", "anchor_mono_ns", "live_since_ns", "ended_wall_ns"),
)
"""What decides about attempts."""
_LARGEST = (1 << 63) - 1


class Registry:
    """Columns by name in ``self.of``: ``registry.of["rank"][: registry.count]``."""

    def __init__(self) -> None:
        self.count = 0
        self.of: dict[str, NDArray[Any]] = {name: np.zeros(FIRST_ROOM, kind) for name, kind in _COLUMNS.items()}
        self.by_id: dict[bytes, int] = {}
        self.attempt = 0
        """The last attempt."""
        self.some_ended = False
        self.doubtful = False
        """Whether a ring has arrived whose attempt is not yet known."""
        self.hosts: list[str] = []
        self.nodes: list[str] = []
        self.names: list[tuple[str, ...]] = []
        self.world_size = 0
        self.facts_left_out = 0
        self._facts: list[dict[str, Any]] = [{}]
        self._groups: list[tuple[ProcessGroup, ...]] = [()]
        self._kinds: list[dict[str, Any]] = []
        self._numbers: dict[Hashable, int] = {}
        self._facts_bytes = 0
        self._taken: dict[tuple[int, int], int] = {}

    def put(self, about: RingSidecar, *, node: str, now_s: float) -> int:
        """Register a ring, or update what is known about it; return its number."""
        at = self._put(about, ring_id(about.key), node, now_s)
        self.of["pid"][at], self.of["live_step"][at] = about.pid, min(about.live_step, _LARGEST)
        return at

    def put_series(self, series: RankSeries, *, node: str, now_s: float) -> int:
        """Register a process of a finished run, of the last attempt so far; return its number."""
        at, of = self._put(series, str(self.count).encode(), node, now_s), self.of
        of["pid"][at] = series.identity.pid
        of["lost"][at], of["torn"][at] = (min(count, _LARGEST) for count in (series.lost, series.torn))
        if len(series.steps):
            of["live_step"][at], of["shown"][at] = int(series.steps["step"][-1]) + 1, series.rank
        self.attempt, self.doubtful = int(of["attempt"][at]), False
        return at

    def _put(self, about: RingSidecar | RankSeries, ident: bytes, node: str, now_s: float) -> int:
        identity = about.identity
        at = self.by_id.get(ident)
        if at is None:
            at = self._new(ident)
            for name in ("column", "last_step", "shown"):
                self.of[name][at] = NOWHERE
            self.of["attempt"][at] = _small(identity.attempt)
            self.doubtful |= self.some_ended or self.attempt != identity.attempt
        of = self.of
        of["rank"][at], of["restarts"][at] = _small(identity.rank), _small(identity.attempt)
        self.some_ended |= about.ended_wall_ns is not None
        of["local_rank"][at], of["world_size"][at] = _small(identity.local_rank), _small(identity.world_size)
        of["started_by"][at] = identity.started_by
        of["host"][at] = self._number("host", identity.host, self.hosts)
        of["node"][at] = self._number("node", node, self.nodes)
        of["state"][at] = STATES.index(about.state)
        of["live_phase"][at] = about.live_phase
        of["live_since_ns"][at], of["heard_s"][at] = min(about.live_since_ns, _LARGEST), now_s
        of["hook_failures"][at] = min(about.hook_failures, _LARGEST)
        of["anchor_mono_ns"][at] = min(about.anchor_mono_ns, _LARGEST)
        of["anchor_wall_ns"][at] = min(about.anchor_wall_ns, _LARGEST)
        of["ended_wall_ns"][at] = about.ended_wall_ns or 0
        of["imported_ns"][at], of["joined_ns"][at] = identity.imported_ns, identity.joined_ns
        of["names"][at] = self._number("names", about.phase_names, self.names)
        of["device_index"][at], of["device_uuid"][at] = _small(identity.device_index) & 0x7FFF, _ascii(identity)
        if identity.device_index < 0:
            of["device_index"][at] = NOWHERE
        kind = _kind(identity)
        of["kind"][at] = self._number(("kind", *kind.values()), kind, self._kinds)
        of["facts"][at] = self._bulky("facts", about.facts, self._facts, about.facts)
        of["groups"][at] = self._bulky(
            "groups", groups_as_kept(about.groups) if about.groups else None, self._groups, about.groups
        )
        if self.count == 1:
            self.attempt = int(of["attempt"][at])
        self.world_size = max(self.world_size, int(of["world_size"][at]))
        return at

    def settle_attempts(self, offsets_ns: NDArray[np.int64]) -> bool:
        """Assign rings to attempts (``store/attempts.py``); return whether the last attempt changed.

        ``offsets_ns``: how far the clock of each of ``nodes`` is ahead.
        """
        own = np.flatnonzero(~self.helpers())
        of = {name: self.of[name][own] for name in _SETTLED}
        offset = offsets_ns[of["node"]]
        ended = of["ended_wall_ns"]
        claims = zip(
            *(of[name].tolist() for name in ("rank", "world_size", "host", "restarts")),
            (of["anchor_wall_ns"] - offset).tolist(),
            np.where(ended > 0, ended - offset, 0).tolist(),
            (of["live_since_ns"] - of["anchor_mono_ns"] + of["anchor_wall_ns"] - offset).tolist(),
            (of["last_step"] != NOWHERE).tolist(),
            (of["state"] == RingState.EXITED).tolist(),
            strict=True,
        )
        self.of["attempt"][own] = settle_attempts(
            [
                RankClaim(
                    rank=rank,
                    world_size=world_size,
                    host=str(host),
                    restarts=restarts,
                    began_ns=began,
                    until_ns=until or None,
                    active_ns=active,
                    made_steps=made_steps,
                    in_order=in_order,
                )
                for rank, world_size, host, restarts, began, until, active, made_steps, in_order in claims
            ]
        )
        last = int(self.of["attempt"][own].max(initial=0))
        before, self.attempt, self.doubtful = self.attempt, last, False
        return self.attempt != before

    def helpers(self) -> NDArray[np.bool_]:
        """Mark the processes that a rank started and that train as well: no ranks, and no attempts of their own."""
        n, of = self.count, self.of
        found = np.zeros(n, bool)
        trained: set[tuple[int, ...]] | None = None
        for at in np.flatnonzero(of["started_by"][:n]):
            if trained is None:
                names = ("host", "pid", "rank", "world_size")
                made = np.flatnonzero(of["last_step"][:n] != NOWHERE)
                trained = set(zip(*(of[name][made].tolist() for name in names), strict=True))
            key = tuple(int(of[name][at]) for name in ("host", "started_by", "rank", "world_size"))
            found[at] = key in trained
        return found

    def number(self, at: int) -> int:
        """Return the displayed rank: the ring's own, or the next free one if another ring of its attempt has that."""
        of = self.of
        if of["shown"][at] == NOWHERE:
            attempt, rank = int(of["attempt"][at]), int(of["rank"][at])
            while self._taken.setdefault((attempt, rank), at) != at:
                rank += 1
            of["shown"][at] = rank
        return int(of["shown"][at])

    def live(self, since_s: float) -> NDArray[np.bool_]:
        """Mark the rings that are not known to have ended and were heard from since then."""
        n, of = self.count, self.of
        going: NDArray[np.bool_] = (of["state"][:n] < ENDED) & (of["ended_wall_ns"][:n] == 0)
        return going & (of["heard_s"][:n] >= since_s)

    def states(self) -> NDArray[np.uint8]:
        """By ring: one that made a step is running, even if its last report is from before that."""
        n, of = self.count, self.of
        made_steps = of["last_step"][:n] != NOWHERE
        return np.where(made_steps, np.maximum(of["state"][:n], RingState.RUNNING), of["state"][:n]).astype(np.uint8)

    def state(self, at: int) -> RankState:
        state = STATES[self.of["state"][at]]
        if state == "starting" and self.of["last_step"][at] != NOWHERE:
            state = "running"
        gone = state in ("starting", "running") and self.of["ended_wall_ns"][at]
        return "vanished" if gone else state

    def identity(self, at: int) -> RankIdentity:
        of = self.of
        numbers = ("pid", "rank", "local_rank", "world_size", "attempt", "device_index", "imported_ns", "joined_ns")
        known: dict[str, Any] = {name: int(of[name][at]) for name in numbers}
        known |= self._kinds[int(of["kind"][at])]
        return RankIdentity(host=self.hosts[int(of["host"][at])], device_uuid=of["device_uuid"][at].decode(), **known)

    def facts(self, at: int) -> dict[str, Any]:
        return self._facts[int(self.of["facts"][at])]

    def groups(self, at: int) -> tuple[ProcessGroup, ...]:
        return self._groups[int(self.of["groups"][at])]

    def phase_names(self, at: int) -> tuple[str, ...]:
        return self.names[int(self.of["names"][at])]

    def _new(self, ident: bytes) -> int:
        at = self.count
        if at == len(self.of["rank"]):
            self.of = {name: np.concatenate([column, np.zeros_like(column)]) for name, column in self.of.items()}
        self.by_id[ident] = at
        self.count += 1
        return at

    def _number(self, kind: Hashable, value: Any, values: list[Any]) -> int:
        key = (kind, value) if isinstance(kind, str) else kind
        number = self._numbers.setdefault(key, len(values))
        if number == len(values):
            values.append(value)
        return number

    def _bulky(self, what: str, content: Any, values: list[Any], value: Any) -> int:
        """Like ``_number``, within bounds; 0 means nothing."""
        if not content:
            return 0
        text = json.dumps(content, sort_keys=True)
        number = self._numbers.get((what, text))
        if number is not None:
            return number
        if self._facts_bytes + len(text) > FACTS_BYTES:
            self.facts_left_out += 1
            return 0
        self._facts_bytes += 2 * len(text)
        self._numbers[what, text] = len(values)
        values.append(value)
        return len(values) - 1


def _kind(identity: RankIdentity) -> dict[str, Any]:
    """Return the fields of an identity that many ranks share."""
    shared = ("backend", "device", "device_name", "device_bytes", "device_timed", "torch", "python", "script")
    return {name: getattr(identity, name) for name in shared}


def _ascii(identity: RankIdentity) -> bytes:
    return identity.device_uuid.encode("ascii", "replace")[:40]


def _small(number: int) -> int:
    return max(0, min(number, 0x7FFFFFFF))

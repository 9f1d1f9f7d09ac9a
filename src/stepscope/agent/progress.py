"""Who makes progress: ranks that belong together, and since when none of them has written a word.

A look at a ring costs a few microseconds (``RingReader.mark``), so it is made at every look of the agent's.  Ranks of
one world (of the same attempt) wait for one another and belong together; a process without others is on its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from stepscope.agent.drain import RingDrain
from stepscope.ring import RingState

__all__ = ["Departed", "Member", "Progress", "World", "WorldKey"]

WorldKey = tuple[str, int, int]

GAP_S = 3.0
"""A longer pause between our own looks: we were stopped, or the machine slept.  What came before counts for nothing."""


@dataclass(kw_only=True)
class Member:
    """A rank whose process lives."""

    drain: RingDrain
    mark: object
    moved_s: float
    """When it was last seen to write a word, or first seen at all."""
    failed_s: float | None = None
    """Since when its ring says that an exception ended it, although the process is still there."""

    @property
    def rank(self) -> int:
        return self.drain.header.identity.rank


@dataclass(frozen=True, kw_only=True)
class Departed:
    """A rank whose process is gone."""

    rank: int
    pid: int
    ended: str
    """How, in words; empty: not known."""
    in_order: bool
    at_s: float
    step: int | None
    phase: str


@dataclass(kw_only=True)
class World:
    """Ranks that wait for each other."""

    key: WorldKey
    size: int
    members: list[Member] = field(default_factory=list)
    departed: list[Departed] = field(default_factory=list)
    counted_from_s: float = 0.0
    """When we began to look, or to look again."""

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(member.drain.header.pid for member in self.members)

    def moved_s(self) -> float:
        """When any of them was last heard of."""
        return max(member.moved_s for member in self.members)

    def quiet_since_s(self) -> float:
        """The same, or since when we look."""
        return max(self.moved_s(), self.counted_from_s)

    def lost_s(self) -> float | None:
        """When the last of those went that did not go in order; None: none did."""
        gone = [one.at_s for one in self.departed if not one.in_order]
        return max([*gone, *(m.failed_s for m in self.members if m.failed_s is not None)], default=None)

    def step_s(self) -> float | None:
        """How long a step takes, of late; None before there were any."""
        medians = [statistics.median(m.drain.recent_ns) for m in self.members if m.drain.recent_ns]
        return statistics.median(medians) / 1e9 if medians else None


class Progress:
    """Call ``look`` at every look at the rings."""

    def __init__(self) -> None:
        self._members: dict[RingDrain, Member] = {}
        self._departed: dict[WorldKey, list[Departed]] = {}
        self._looked_s = float("-inf")
        self._counted_from_s = 0.0

    def look(self, drains: Iterable[RingDrain], now_s: float) -> list[World]:
        """The worlds that have a rank alive."""
        if now_s - self._looked_s > GAP_S:
            self._counted_from_s = now_s
        self._looked_s = now_s
        members = {}
        for drain in drains:
            if drain.ended_wall_ns is not None:
                continue
            mark = drain.reader.mark()
            member = self._members.get(drain) or Member(drain=drain, mark=mark, moved_s=now_s)
            if member.mark != mark:
                member.mark, member.moved_s = mark, now_s
            if drain.reader.state() is not RingState.EXCEPTION:
                member.failed_s = None
            elif member.failed_s is None:
                member.failed_s = now_s
            members[drain] = member
        self._members = members
        return self._worlds()

    def depart(self, drain: RingDrain, departed: Departed) -> World | None:
        """A rank's process is gone; the world it leaves behind, if it was not the last of it."""
        self._members.pop(drain, None)
        key = world_of(drain)
        self._departed.setdefault(key, []).append(departed)
        return next((world for world in self._worlds() if world.key == key), None)

    def _worlds(self) -> list[World]:
        worlds: dict[WorldKey, World] = {}
        for member in self._members.values():
            key = world_of(member.drain)
            if key not in worlds:
                size, gone = member.drain.header.identity.world_size, self._departed.get(key, [])
                worlds[key] = World(key=key, size=size, departed=gone, counted_from_s=self._counted_from_s)
            worlds[key].members.append(member)
        self._departed = {key: gone for key, gone in self._departed.items() if key in worlds}
        return list(worlds.values())


def world_of(drain: RingDrain) -> WorldKey:
    identity = drain.header.identity
    if identity.world_size > 1:
        return "world", identity.attempt, identity.world_size
    return "process", identity.attempt, identity.pid

"""Which ranks make progress, and what the rings say about those that do not or are gone.

A look at a ring takes a few microseconds (``RingReader.mark``), so it is done on every turn of the agent's loop. Ranks
of one world (of the same attempt) wait for each other and are treated together; a single process is its own world.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.agent.drain import RingDrain
from stepscope.agent.hangs.rank_evidence import Subject
from stepscope.agent.procfs import read_process
from stepscope.agent.stacks import StackOffers
from stepscope.hangs.evidence import LastCollective, RankEvidence
from stepscope.records.collectives import OPS
from stepscope.records.paths import SERVER_SUFFIX, error_path
from stepscope.ring import RingHeader, RingState

__all__ = ["Progress", "Subjects", "World", "WorldKey", "departed_of", "last_call"]


# -- Progress ---------------------------------------------------------------------------------------------------------

WorldKey = tuple[str, int, int]

GAP_S = 3.0
"""After a longer gap between looks we were stopped, or the machine slept. What came before does not count."""


@dataclass(kw_only=True)
class Member:
    """A rank whose process is alive."""

    drain: RingDrain
    mark: object
    moved_s: float
    """When it was last seen to write a word, or first seen at all."""
    failed_s: float | None = None
    """Since when its ring reports an uncaught exception while the process still exists."""

    @property
    def rank(self) -> int:
        return self.drain.header.identity.rank


@dataclass(frozen=True, kw_only=True)
class Departed:
    """A rank whose process is gone."""

    rank: int
    pid: int
    ended: str
    """How it ended, in words; empty if unknown."""
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
    """When we started to look, or started again."""

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(member.drain.header.pid for member in self.members)

    def moved_s(self) -> float:
        """Return when any of them last made progress."""
        return max(member.moved_s for member in self.members)

    def quiet_since_s(self) -> float:
        """Return the same, but not before we started to look."""
        return max(self.moved_s(), self.counted_from_s)

    def lost_s(self) -> float | None:
        """Return when the last rank was lost that did not exit normally; None if there was none."""
        gone = [one.at_s for one in self.departed if not one.in_order]
        return max([*gone, *(m.failed_s for m in self.members if m.failed_s is not None)], default=None)

    def step_s(self) -> float | None:
        """Return the duration of recent steps; None before there were any."""
        medians = [statistics.median(m.drain.recent_ns) for m in self.members if m.drain.recent_ns]
        return statistics.median(medians) / 1e9 if medians else None


class Progress:
    """Tracks all ranks. Call ``look`` whenever the rings are checked."""

    def __init__(self) -> None:
        self._members: dict[RingDrain, Member] = {}
        self._departed: dict[WorldKey, list[Departed]] = {}
        self._looked_s = float("-inf")
        self._counted_from_s = 0.0

    def look(self, drains: Iterable[RingDrain], now_s: float) -> list[World]:
        """Return the worlds with at least one live rank."""
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
        """Note that a rank's process is gone; return the world it leaves behind, unless it was the last one in it."""
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


# -- Subjects ---------------------------------------------------------------------------------------------------------
# What the rings say about ranks that are stalled or gone. All evidence starts from this.

LONGEST_MESSAGE = 300
ENDED = (RingState.EXITED, RingState.EXCEPTION)
"""States that the ring may report while the process still exists: shutting down may take seconds."""


class Subjects:
    """Creates subjects and remembers the last GPU utilization."""

    def __init__(self, meta: dict[str, Any]) -> None:
        launcher = meta.get("launcher")
        self._launcher = launcher.get("pid") if isinstance(launcher, dict) else None
        self._gpus: dict[str | int, float] = {}
        """Utilization by uuid and by index."""

    def saw_gpus(self, samples: Iterable[dict[str, Any]]) -> None:
        for sample in samples:
            if isinstance(used := sample.get("util_percent"), (int, float)):
                uuid = str(sample.get("uuid", "")).removeprefix("GPU-")  # torch omits the prefix
                self._gpus |= dict.fromkeys((uuid, sample.get("index", -1)), float(used))

    def suspended(self) -> bool:
        """Return whether the job was stopped together with its launcher, for example by Ctrl-Z."""
        reading = read_process(self._launcher) if isinstance(self._launcher, int) else None
        return reading is not None and reading.state in ("T", "t")

    def of(self, world: World, now_s: float) -> list[Subject]:
        living = [self._subject(member, now_s) for member in world.members]
        return [*living, *(Subject(evidence=_evidence_of(one, now_s)) for one in world.departed)]

    def servers(self, members: Iterable[Member]) -> dict[int, Path]:
        """Return the worker server sockets by rank."""
        return {m.rank: path for m in members if (path := _server(m.drain)) is not None}

    def _subject(self, member: Member, now_s: float) -> Subject:
        drain = member.drain
        header = drain.header = drain.reader.header()
        identity = header.identity
        silent_s = max(now_s - member.moved_s, 0.0)
        if header.live_since_ns:  # it may have gone silent before we started to look
            silent_s = max(silent_s, (time.perf_counter_ns() - header.live_since_ns) / 1e9)
        evidence = RankEvidence(
            rank=identity.rank,
            pid=header.pid,
            ended=_how_it_ended(drain, oom_killed=False) if header.state in ENDED else "",
            step=header.live_step or None,
            phase=header.phase_names[header.live_phase],
            silent_s=round(silent_s, 1),
            collective=_last_collective(drain, header),
            groups=header.groups,
            device=identity.device,
            gpu_util_percent=self._gpus.get(
                identity.device_uuid.removeprefix("GPU-"), self._gpus.get(identity.device_index)
            )
            if identity.device != "cpu"
            else None,
        )
        return Subject(
            evidence=evidence,
            pidfd=_copy_pidfd(drain.pidfd),
            offers=StackOffers(
                ring=drain.reader.path,
                threads=drain.reader.thread_offer(),
                stacks=drain.reader.stack_offer(),
                running=drain.reader.running_offer(),
                trains=drain.reader.training_thread(),
            ),
            server=_server(drain),
        )


def departed_of(drain: RingDrain, *, at_s: float, oom_killed: bool) -> Departed:
    """Describe a rank whose process is gone and whose ring is still open."""
    header = drain.header
    return Departed(
        rank=header.identity.rank,
        pid=header.pid,
        ended=_how_it_ended(drain, oom_killed=oom_killed),
        in_order=header.state is RingState.EXITED,
        at_s=at_s,
        step=header.live_step or None,
        phase=header.phase_names[header.live_phase],
    )


def last_call(drain: RingDrain) -> dict[str, Any] | None:
    """Return the collective that a rank called last, for its ``rank_end``; None if none is known."""
    last = _last_collective(drain, drain.header)
    if last is None or last.group is None:
        return None
    return {"op": last.op, "group": last.group.name, "bytes": last.bytes}


def _evidence_of(departed: Departed, now_s: float) -> RankEvidence:
    return RankEvidence(
        rank=departed.rank,
        pid=departed.pid,
        alive=False,
        ended=departed.ended,
        step=departed.step,
        phase=departed.phase,
        silent_s=round(now_s - departed.at_s, 1),
    )


def _how_it_ended(drain: RingDrain, *, oom_killed: bool) -> str:
    """Return how a rank ended, in words; empty if unknown."""
    if drain.header.state is RingState.EXITED:
        return "exited in order"
    if oom_killed:
        return "killed by the kernel, which ran out of memory"
    try:
        error = json.loads(error_path(drain.run_dir, drain.header.pid).read_bytes())
        return f"raised {error['type']}: {error['message']}"[:LONGEST_MESSAGE].rstrip(": \n")
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return ""


def _last_collective(drain: RingDrain, header: RingHeader) -> LastCollective | None:
    last = drain.reader.last_collective()
    if last is None:
        return None
    return LastCollective(
        op=OPS[last.op] if last.op < len(OPS) else OPS[0],
        group=next((group for group in header.groups if group.slot == last.group), None),
        bytes=last.size_bytes,
        called_s=round(max(0.0, (time.perf_counter_ns() - last.called_ns) / 1e9), 1),
        waiting=last.waiting,
        peer=last.peer,
    )


def _server(drain: RingDrain) -> Path | None:
    return drain.reader.path.with_suffix(SERVER_SUFFIX) if drain.reader.server_offer() else None


def _copy_pidfd(pidfd: int | None) -> int | None:
    """Return a duplicate that stays open after the rank is buried."""
    with suppress(OSError):
        return None if pidfd is None else os.dup(pidfd)
    return None

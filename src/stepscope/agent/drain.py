"""From rings to segments.

A ``RingDrain`` holds one ring's mapping (one file descriptor) and, where the system has them, a pidfd of its process;
both go when the process does.  What was written is known from the segment itself, so a second agent goes on exactly
where the first one was killed, and a write that fails moves nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import RingForeign, RingVersion
from stepscope.records import run_clock
from stepscope.records.collectives import ProcessGroup, merged_groups
from stepscope.records.paths import BESIDE_RING, RING_SUFFIX
from stepscope.records.series import RankState
from stepscope.records.steps import SLOT_BYTES, STEP, STEP_SLOT
from stepscope.ring import RingBatch, RingHeader, RingReader, split
from stepscope.store.live.ring_files import (
    FRAME_SLOTS,
    SegmentWriter,
    last_slots,
    read_sidecars,
    sidecar_of,
    write_sidecar,
)
from stepscope.store.liveness import process_alive
from stepscope.store.paths import segment_path, sidecar_path

if TYPE_CHECKING:
    from stepscope.agent.flight_records import FlightRecords

__all__ = ["RingDrain", "Rings", "drain_leftovers"]

BATCH_WORDS = 4096
"""So many words of a ring make a frame worth writing at once …"""
BATCH_S = 2.0
"""… and so old may a word get otherwise: small frames pack badly …"""
WATCHED_BATCH_S = 0.15
"""… unless somebody looks on: at each turn of the agent's."""
SIDECAR_S = 5.0
FLIGHTS_AT_ONCE = FRAME_SLOTS // 2
"""Records of collectives on the device that go into one frame; those of one seq must fit into it."""
EARLIER_SLOTS = 4096
"""Of a segment, in which steps are looked for whose collectives may still be in the Flight Recorder."""
RECENT_STEPS = 20
RECENT_RECORDS = 100
"""Among so many records at the end of a batch are the steps that count as recent."""


class RingDrain:
    """One ring and its segment."""

    def __init__(self, reader: RingReader, run_dir: Path) -> None:
        """OSError when an existing segment cannot be read."""
        self.reader = reader
        self.header: RingHeader = reader.header()
        self.run_dir = run_dir
        key = sidecar_of(self.header).key
        self.segment = SegmentWriter(segment_path(run_dir, key))
        self.resumed = sidecar_path(run_dir, key).exists()
        """An agent before this one already knew this ring."""
        earlier = read_sidecars(run_dir)[0].get(key) if self.resumed else None
        self.ended_wall_ns = earlier.ended_wall_ns if earlier else None
        self.pidfd = _open_pidfd(self.header.pid)
        self.recent_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        """How long the last steps took."""
        self.flights: FlightRecords | None = None
        """What NCCL's Flight Recorder of this rank says, once somebody reads it."""
        self._found = _not_said(earlier.groups if earlier else (), self.header.groups)
        self._written_s = time.monotonic()
        self._sidecar_s = float("-inf")

    def record_flights(self) -> FlightRecords:
        """From here on the ring's steps get the collectives of its rank's Flight Recorder."""
        from stepscope.agent.flight_records import FlightRecords  # msgspec is for ranks on NCCL only

        if self.flights is None:
            self.flights = FlightRecords(
                said=lambda: self.reader.header().groups,
                found=self._found,
                world_size=self.reader.header().identity.world_size,
            )
            self.flights.see_earlier_steps(self._last_slots())
            self.reader.follow_phases()
        return self.flights

    def _last_slots(self) -> list[bytes]:
        """Of what was written before somebody asked for it: by this agent, or by one before it."""
        slots = last_slots(self.segment.path, EARLIER_SLOTS) if self.segment.last_seq else b""
        return [slots[at : at + SLOT_BYTES] for at in range(0, len(slots), SLOT_BYTES)]

    def alive(self) -> bool:
        return process_alive(self.header.pid, self.header.start_ticks)

    def pending(self) -> int:
        return max(0, self.reader.head() - self.segment.last_seq)

    def crowded(self) -> bool:
        """More than a quarter full: at this pace the writer will soon overwrite what was not read."""
        return self.pending() * 4 > self.reader.capacity

    def due(self, *, watched: bool = False) -> bool:
        pending, oldest_s = self.pending(), WATCHED_BATCH_S if watched else BATCH_S
        return pending >= BATCH_WORDS or (pending > 0 and time.monotonic() - self._written_s >= oldest_s)

    def drain(self) -> None:
        """Write what the ring has now; OSError when the disk refuses, and then nothing was lost."""
        batch = self.reader.read(self.segment.last_seq)
        flights, taken = self.flights, 0
        if flights is not None and batch.last_seq > self.segment.last_seq:
            # In one frame with what is new in the ring: readers tell frames apart by how far in it they go.
            slots, taken = flights.records(batch.last_seq, FLIGHTS_AT_ONCE)
            batch = replace(batch, slots=[*batch.slots, *slots])
            self._save_found(flights)
        for part in split(batch, FRAME_SLOTS):
            self.segment.append(part)
            if flights is not None:
                flights.see_steps(part.slots)
        if flights is not None:
            flights.taken(taken)
            flights.see_phases(self.reader.phase_changes())
            flights.settle()
        self._written_s = time.monotonic()
        self.recent_ns.extend(_step_times(batch.slots[-RECENT_RECORDS:]))

    def drain_to_end(self) -> None:
        """The same for a ring whose writer is gone."""
        self.drain()
        if self.flights is not None:
            self._write_flights(self.flights)
        self.header = self.reader.header()

    def _write_flights(self, flights: FlightRecords) -> None:
        """What is left, though nothing new comes in the ring: it counts as the word after its last one."""
        while True:
            seq = self.segment.last_seq + 1
            slots, taken = flights.records(seq, FLIGHTS_AT_ONCE)
            if not slots:
                return
            self._save_found(flights)
            self.segment.append(RingBatch(slots=slots, last_seq=seq, lost=0, torn=0))
            flights.taken(taken)

    def _save_found(self, flights: FlightRecords) -> None:
        """The names of groups are on disk before the rows that need them."""
        if len(flights.found) != len(self._found):
            self._found = tuple(flights.found)
            self.save_last_sidecar()

    def state(self) -> RankState:
        """How the process ended, given that it has."""
        claimed = sidecar_of(self.header).state
        return "vanished" if claimed in ("starting", "running") else claimed

    def save_sidecar(self) -> None:
        """Every now and then; call it as often as you like."""
        if time.monotonic() - self._sidecar_s >= SIDECAR_S:
            self.save_last_sidecar()

    def save_last_sidecar(self) -> None:
        self.header = self.reader.header()
        about = replace(
            sidecar_of(self.header, heard_wall_ns=run_clock.wall_ns()),
            groups=merged_groups(self.header.groups, self._found),
            usual_step_ns=round(statistics.median(self.recent_ns)) if self.recent_ns else 0,
        )
        if self.ended_wall_ns is not None:
            about = replace(about, state=self.state(), ended_wall_ns=self.ended_wall_ns)
        write_sidecar(self.run_dir, about)
        self._sidecar_s = time.monotonic()

    def remove(self) -> None:
        """The ring is drained and its process gone: free its memory."""
        self.reader.path.unlink(missing_ok=True)
        for suffix in BESIDE_RING:
            self.reader.path.with_suffix(suffix).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.reader.close()


class Rings:
    """All rings of this node; new ones are found by looking."""

    def __init__(self, run_dir: Path, session: Path) -> None:
        self._run_dir = run_dir
        self._folders = {session, run_dir / "rings"}
        self._unusable: set[tuple[str, int]] = set()
        self.known: dict[Path, RingDrain] = {}
        self.problems: list[str] = []
        """Sentences about rings that cannot be read, for the journal to take."""

    def discover(self) -> list[RingDrain]:
        """Rings that were not there before; OSError when a segment of theirs cannot be read."""
        found = []
        for entry in self._entries():
            path, mark = Path(entry.path), (entry.path, entry.inode())
            if path in self.known or mark in self._unusable:
                continue
            try:
                reader = RingReader(path)
            except (RingForeign, FileNotFoundError):
                continue  # not yet a ring; or never one, which whoever opens the run will say
            except (RingVersion, OSError) as error:
                self._unusable.add(mark)
                self.problems.append(f"A ring could not be read: {error}.")
                continue
            try:
                self.known[path] = RingDrain(reader, self._run_dir)
            except OSError:
                reader.close()
                raise
            found.append(self.known[path])
        return found

    def forget(self, drain: RingDrain) -> None:
        self.known.pop(drain.reader.path, None)

    def _entries(self) -> list[os.DirEntry[str]]:
        entries: list[os.DirEntry[str]] = []
        for folder in self._folders:
            with suppress(OSError), os.scandir(folder) as found:
                entries += [entry for entry in found if entry.name.endswith(RING_SUFFIX)]
        return entries


def drain_leftovers(run_dir: Path, session: Path) -> None:
    """Rings that no agent was left to drain, of processes that are gone; OSError when the disk refuses."""
    for drain in Rings(run_dir, session).discover():
        try:
            if not drain.alive():
                drain.ended_wall_ns = drain.ended_wall_ns or run_clock.wall_ns()
                drain.drain_to_end()
                drain.save_last_sidecar()
                drain.remove()
        finally:
            drain.close()


def _not_said(groups: Iterable[ProcessGroup], said: Iterable[ProcessGroup]) -> tuple[ProcessGroup, ...]:
    slots = {group.slot for group in said}
    return tuple(group for group in groups if group.slot not in slots)


def _step_times(slots: Iterable[bytes]) -> Iterator[int]:
    for slot in slots:
        kind, _, _, _, _, wall_ns, *_ = STEP_SLOT.unpack(slot)
        if kind == STEP:
            yield wall_ns


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where there is no such thing or no process."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None

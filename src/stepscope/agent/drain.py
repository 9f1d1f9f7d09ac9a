"""Drains rings into segments.

A ``RingDrain`` holds one ring's mapping (one file descriptor) and, where the system supports it, a pidfd of its
process; both are closed when the process ends. The segment itself shows what was written, so a second agent continues
exactly where the first one was killed, and a failed write loses nothing.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.agent.journal import Journal
from stepscope.errors import RingForeign, RingVersion
from stepscope.records import run_clock
from stepscope.records.collectives import ProcessGroup, merged_groups
from stepscope.records.paths import BESIDE_RING, LAYERS_SUFFIX, RING_SUFFIX
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
"""This many pending words make a frame worth writing immediately."""
BATCH_S = 2.0
"""Otherwise, how old a word may get. Small frames compress badly."""
WATCHED_BATCH_S = 0.15
"""The same while the run is being viewed: every turn of the agent's loop."""
SIDECAR_S = 5.0
FLIGHTS_AT_ONCE = FRAME_SLOTS // 2
"""Records of collectives on the device per frame. Those with the same seq must fit into one frame."""
EARLIER_SLOTS = 4096
"""Slots at the end of a segment to search for steps whose collectives may still be in the Flight Recorder."""
LAYERS_AT_ONCE = 8 << 20
PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE."""
RECENT_STEPS = 20
RECENT_RECORDS = 100
"""The recent steps are among this many records at the end of a batch."""


class RingDrain:
    """One ring and its segment."""

    def __init__(self, reader: RingReader, run_dir: Path) -> None:
        """Raise OSError if an existing segment cannot be read."""
        self.reader = reader
        self.header: RingHeader = reader.header()
        self.run_dir = run_dir
        key = sidecar_of(self.header).key
        self.segment = SegmentWriter(segment_path(run_dir, key))
        self.resumed = sidecar_path(run_dir, key).exists()
        """Whether an earlier agent already knew this ring."""
        earlier = read_sidecars(run_dir)[0].get(key) if self.resumed else None
        self.ended_wall_ns = earlier.ended_wall_ns if earlier else None
        self.pidfd = _open_pidfd(self.header.pid)
        self.recent_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        """Durations of the last steps."""
        self.flights: FlightRecords | None = None
        """Records from this rank's NCCL Flight Recorder, once it is read."""
        self._layers = LayerLines(reader.path.with_suffix(LAYERS_SUFFIX))
        self._found = _unknown_to(earlier.groups if earlier else (), self.header.groups)
        self._written_s = time.monotonic()
        self._sidecar_s = float("-inf")

    def record_flights(self) -> FlightRecords:
        """Add collectives from the rank's Flight Recorder to the ring's steps from now on."""
        from stepscope.agent.flight_records import FlightRecords  # needs msgspec, so only for ranks on NCCL

        if self.flights is None:
            self.flights = FlightRecords(
                known=lambda: self.reader.header().groups,
                found=self._found,
                world_size=self.reader.header().identity.world_size,
            )
            self.flights.see_earlier_steps(self._last_slots())
            self.reader.follow_phases()
        return self.flights

    def _last_slots(self) -> list[bytes]:
        """Return what this agent or an earlier one wrote before ``record_flights`` was called."""
        slots = last_slots(self.segment.path, EARLIER_SLOTS) if self.segment.last_seq else b""
        return [slots[at : at + SLOT_BYTES] for at in range(0, len(slots), SLOT_BYTES)]

    def alive(self) -> bool:
        return process_alive(self.header.pid, self.header.start_ticks)

    def pending(self) -> int:
        return max(0, self.reader.head() - self.segment.last_seq)

    def crowded(self) -> bool:
        """Return whether more than a quarter is unread: at this pace the writer will soon overwrite it."""
        return self.pending() * 4 > self.reader.capacity

    def due(self, *, watched: bool = False) -> bool:
        pending, oldest_s = self.pending(), WATCHED_BATCH_S if watched else BATCH_S
        return pending >= BATCH_WORDS or (pending > 0 and time.monotonic() - self._written_s >= oldest_s)

    def drain(self) -> None:
        """Write what the ring has now. If a write fails, raise OSError; nothing is lost."""
        batch = self.reader.read(self.segment.last_seq)
        flights, taken = self.flights, 0
        if flights is not None and batch.last_seq > self.segment.last_seq:
            # Use the same frame as the ring's new records: readers distinguish frames by their position in the ring.
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
        """Do the same for a ring whose writer is gone."""
        self.drain()
        if self.flights is not None:
            self._write_flights(self.flights)
        self.header = self.reader.header()

    def _write_flights(self, flights: FlightRecords) -> None:
        """Write the rest although the ring has nothing new: use the position after its last word."""
        while True:
            seq = self.segment.last_seq + 1
            slots, taken = flights.records(seq, FLIGHTS_AT_ONCE)
            if not slots:
                return
            self._save_found(flights)
            self.segment.append(RingBatch(slots=slots, last_seq=seq, lost=0, torn=0))
            flights.taken(taken)

    def _save_found(self, flights: FlightRecords) -> None:
        """Write the names of groups to disk before the rows that need them."""
        if len(flights.found) != len(self._found):
            self._found = tuple(flights.found)
            self.save_last_sidecar()

    def move_layers(self, journal: Journal) -> bool:
        """Write what the process wrote about its layers since the last time; False if the disk refuses."""
        while journal.takes_layers and (lines := self._layers.read()):
            who = self.reader.header().identity
            journal.layers(lines, rank=who.rank, attempt=who.attempt, pid=self.header.pid)
            journal.flush()
        return journal.takes_layers

    def state(self) -> RankState:
        """Return how the process ended, given that it has."""
        claimed = sidecar_of(self.header).state
        return "vanished" if claimed in ("starting", "running") else claimed

    def save_sidecar(self) -> None:
        """Save the sidecar if it is due. Call this as often as you like."""
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
        """Free the memory of a drained ring whose process is gone."""
        self.reader.path.unlink(missing_ok=True)
        for suffix in BESIDE_RING:
            self.reader.path.with_suffix(suffix).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.reader.close()


class LayerLines:
    """The file next to a ring in which a process writes what sampled steps showed of its layers.

    It is in memory, and only ever grows: what was read is cut out of it once it is on disk, and reads as zeros from
    then on.  So a second agent finds only what the first one has not read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0
        self._freed = 0

    def read(self) -> list[bytes]:
        """Return the lines since the last time; frees those returned before, which are on disk by now."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            size = os.fstat(fd).st_size
            if self._end > self._freed:
                self._free(fd)
            data = os.pread(fd, min(size - self._end, LAYERS_AT_ONCE), self._end) if size > self._end else b""
        finally:
            os.close(fd)
        data = data[: data.rfind(b"\n") + 1]
        self._end += len(data)
        return data.replace(b"\0", b"").splitlines(keepends=True)

    def _free(self, fd: int) -> None:
        punch = getattr(_LIBC, "fallocate", None)
        if (
            punch is not None
            and punch(fd, PUNCH_HOLE, ctypes.c_long(self._freed), ctypes.c_long(self._end - self._freed)) == 0
        ):
            self._freed = self._end


class Rings:
    """All rings on this node. New ones are found by scanning."""

    def __init__(self, run_dir: Path, session: Path) -> None:
        self._run_dir = run_dir
        self._folders = {session, run_dir / "rings"}
        self._unusable: set[tuple[str, int]] = set()
        self.known: dict[Path, RingDrain] = {}
        self.problems: list[str] = []
        """Sentences about unreadable rings, for the journal."""

    def discover(self) -> list[RingDrain]:
        """Return new rings; raise OSError if one of their segments cannot be read."""
        found = []
        for entry in self._entries():
            path, mark = Path(entry.path), (entry.path, entry.inode())
            if path in self.known or mark in self._unusable:
                continue
            try:
                reader = RingReader(path)
            except (RingForeign, FileNotFoundError):
                continue  # not a ring yet, or never one, which is reported when the run is opened
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
    """Drain rings of dead processes that have no agent left; raise OSError if a write fails."""
    journal = Journal(run_dir)
    for drain in Rings(run_dir, session).discover():
        try:
            if not drain.alive():
                drain.ended_wall_ns = drain.ended_wall_ns or run_clock.wall_ns()
                drain.drain_to_end()
                drain.save_last_sidecar()
                drain.move_layers(journal)
                drain.remove()
        finally:
            drain.close()


_LIBC = ctypes.CDLL(None)


def _unknown_to(groups: Iterable[ProcessGroup], known: Iterable[ProcessGroup]) -> tuple[ProcessGroup, ...]:
    slots = {group.slot for group in known}
    return tuple(group for group in groups if group.slot not in slots)


def _step_times(slots: Iterable[bytes]) -> Iterator[int]:
    for slot in slots:
        kind, _, _, _, _, wall_ns, *_ = STEP_SLOT.unpack(slot)
        if kind == STEP:
            yield wall_ns


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if unsupported or the process is gone."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None

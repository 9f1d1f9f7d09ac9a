"""Follow a run directory on this machine: what its agent appends goes into the live model.

    tail = Tail(run_dir, live)
    tail.poll()                 # a few times a second; reads only what is new

Segments are read frame by frame from where the last poll ended, a little of each in turn, so that the steps of all
ranks arrive together however much there is to catch up with.  Where a rank is right now its sidecar says, which the
agent writes every few seconds.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.lines import KEPT_BYTES
from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.model.registry import STATES
from stepscope.records.slot import SLOT_BYTES
from stepscope.store.jsonl import lines_from
from stepscope.store.paths import SAMPLES, SEGMENT_SUFFIX, SIDECAR_SUFFIX, STEPS
from stepscope.store.sample_segments import SamplePiece, first_within, read_samples
from stepscope.store.segments import SegmentPart, parts_from
from stepscope.store.sidecar import RingSidecar, guess_sidecar
from stepscope.wire.blocks import TABLE_FIELDS, ring_id
from stepscope.wire.frames import LINE_FILES
from stepscope.wire.limits import LINES_BYTES

__all__ = ["Tail"]

NODE = "0"
SLOTS_AT_ONCE = 512
"""Of one ring, before the others have their turn."""
LINES_AT_ONCE = 1 << 20
MOST_S = 0.1
"""Of one poll: there may be much to catch up with, and others wait …"""
SAMPLES_S = 0.03
"""… and of that, for samples."""


@dataclass
class _Ring:
    about: RingSidecar
    introduced: bool = False
    stamp: tuple[int, int] = (0, 0)
    """Of its sidecar: when it was written, and its size."""
    offset: int = 0
    after_seq: int = 0
    size: int = 0
    """Of the segment, when it was last read to its end."""


@dataclass(frozen=True, kw_only=True)
class _Read:
    slots: NDArray[np.uint8]
    table: NDArray[Any]


@dataclass
class Tail:
    run_dir: Path
    live: LiveRun
    clock: Callable[[], float] = time.monotonic
    node: str = NODE
    _rings: dict[str, _Ring] = field(default_factory=dict)
    _offsets: dict[str, int] = field(default_factory=dict)

    def poll(self) -> int:
        """Take in what is new, for a while at most; how many rows and lines that were."""
        began_s = self.clock()
        found = sum(self._lines(name) for name in LINE_FILES if name != SAMPLES)
        sizes = self._look()
        while rows := self._round(sizes):
            found += rows
            self.live.tick()
            if self.clock() - began_s > MOST_S:
                break
        return found + self._lines(SAMPLES, self.clock() + SAMPLES_S)

    def _look(self) -> dict[str, int]:
        """Bring sidecars up to date; the sizes of the segments, by key."""
        sizes: dict[str, int] = {}
        try:
            entries = list(os.scandir(self.run_dir / STEPS))
        except FileNotFoundError:
            return sizes  # nobody has made a step yet, or the run is sealed
        for entry in entries:
            path = Path(entry.path)
            key, suffix = path.stem, path.suffix
            if suffix not in (SEGMENT_SUFFIX, SIDECAR_SUFFIX):
                continue
            try:
                stat = entry.stat()
            except FileNotFoundError:
                continue
            if suffix == SEGMENT_SUFFIX:
                sizes[key] = stat.st_size
            elif (ring := self._rings.get(key)) is None or ring.stamp != (stat.st_mtime_ns, stat.st_size):
                self._hear(key, path, (stat.st_mtime_ns, stat.st_size))
        return sizes

    def _hear(self, key: str, path: Path, stamp: tuple[int, int]) -> None:
        try:
            about = RingSidecar.from_dict(json.loads(path.read_bytes()))
        except (OSError, ValueError, RecursionError):
            return  # half written, gone or of another hand: the next one may be better
        ring = self._rings.setdefault(key, _Ring(about))
        ring.about, ring.stamp, ring.introduced = about, stamp, True
        self.live.ring(about, node=self.node)

    def _round(self, sizes: dict[str, int]) -> int:
        """Some of what is new of each ring; how many rows."""
        parts: list[tuple[_Ring, str, SegmentPart]] = []
        for key, size in sizes.items():
            ring = self._rings.get(key)
            if ring is None:
                ring = self._rings[key] = _Ring(guess_sidecar(key))
            if ring.size == size:
                continue
            if not ring.introduced:
                ring.introduced = True
                self.live.ring(ring.about, node=self.node)
            path = self.run_dir / STEPS / f"{key}{SEGMENT_SUFFIX}"
            try:
                found, ring.offset = parts_from(path, ring.offset, after_seq=ring.after_seq, most_slots=SLOTS_AT_ONCE)
            except OSError:
                continue
            if not found:
                ring.size = size
                continue
            ring.after_seq = found[-1].last_seq
            parts.append((ring, key, _joined(found)))
        if not parts:
            return 0
        self.live.rows(_taken(parts))
        return sum(len(part.slots) // SLOT_BYTES for _, _, part in parts)

    def _lines(self, name: str, until_s: float = math.inf) -> int:
        count = 0
        if name == SAMPLES and name not in self._offsets:
            self._offsets[name] = first_within(self.run_dir, KEPT_BYTES)  # no more would be kept
        while True:
            offset = self._offsets.get(name, 0)
            piece = self._piece(name, offset)
            if piece.end == offset:
                return count
            self._offsets[name] = piece.end
            lines = [line for line in piece.data.split(b"\n") if line.strip()]
            self.live.lines(name, lines, node=self.node, offset_ns=0)
            count += len(lines)
            if self.clock() > until_s:
                return count

    def _piece(self, name: str, offset: int) -> SamplePiece:
        if name == SAMPLES:
            return read_samples(self.run_dir, offset, most_bytes=LINES_AT_ONCE, longest=LINES_BYTES)
        data, _ = lines_from(self.run_dir / name, offset, most_bytes=LINES_AT_ONCE, longest=LINES_BYTES)
        return SamplePiece(data=data, end=offset + len(data))


def _joined(parts: Sequence[SegmentPart]) -> SegmentPart:
    """Frames of one ring that follow each other as one: a night has a hundred thousand."""
    return SegmentPart(
        first_seq=parts[0].first_seq,
        last_seq=parts[-1].last_seq,
        lost=sum(part.lost for part in parts),
        torn=sum(part.torn for part in parts),
        slots=b"".join([part.slots for part in parts]),
    )


def _taken(parts: list[tuple[_Ring, str, SegmentPart]]) -> _Read:
    table = np.zeros(len(parts), TABLE_FIELDS)
    for entry, (ring, key, part) in zip(table, parts, strict=True):
        about = ring.about
        entry["ring"] = np.void(ring_id(key))
        entry["after_seq"], entry["last_seq"] = part.first_seq - 1, part.last_seq
        entry["rows"], entry["lost"], entry["torn"] = len(part.slots) // SLOT_BYTES, part.lost, part.torn
        entry["live_step"], entry["live_since_ns"] = about.live_step, about.live_since_ns
        entry["live_phase"], entry["state"] = about.live_phase, STATES.index(about.state)
    slots = np.frombuffer(b"".join([part.slots for _, _, part in parts]), np.uint8)
    return _Read(slots=slots.reshape(-1, SLOT_BYTES), table=table)

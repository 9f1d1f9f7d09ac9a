"""Tails: follow a run on disk into the live model, from this node's own files and the inbox of the other nodes.

    tail = Tail(run_dir, live)
    tail.poll()                 # a few times a second; reads only what is new

Segments are read frame by frame from where the last poll ended, a little of each in turn, so that the steps of all
ranks arrive together, no matter how large the backlog is.  A rank's current position is in its sidecar, which the
agent writes every few seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepscope.errors import FrameError
from stepscope.hub.ingest.auth import RankClaims
from stepscope.hub.live.lines import KEPT_BYTES
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.registry import STATES
from stepscope.records.steps import SLOT_BYTES
from stepscope.step_table import STEP_DTYPE
from stepscope.store.file_io import lines_from, read_document
from stepscope.store.inbox.journal import (
    LIVE_FIELDS,
    TABLE_DTYPE,
    BlockRows,
    JournalFrame,
    Live,
    journal_path,
    journals,
    read_journal,
    read_positions,
    sidecars_of,
    unpack_block,
)
from stepscope.store.inbox.parts import (
    leaves_rest,
    leaves_samples,
    part_steps,
    read_part_steps,
    rest_path,
    sample_parts,
)
from stepscope.store.live.ring_files import RingSidecar, SegmentPart, guess_sidecar, parts_from
from stepscope.store.live.sample_files import SamplePiece, first_within, read_samples
from stepscope.store.paths import SAMPLES, SEGMENT_SUFFIX, SIDECAR_SUFFIX, STEPS
from stepscope.wire.frames import LINE_FILES, LINES_BYTES, TABLE_FIELDS, Frame, inflate_part, read_frame, ring_id

__all__ = ["InboxTail", "Tail", "is_long"]


# -- tail of this node's files ----------------------------------------------------------------------------------------

NODE = "0"
SLOTS_AT_ONCE = 512
"""Slots read from one ring before the others get a turn."""
LINES_AT_ONCE = 1 << 20
TAIL_POLL_S = 0.1
"""The duration of one poll: there may be a large backlog, and other tasks wait."""
SAMPLES_S = 0.03
"""The part of it for samples."""
LONG_BYTES = 8 << 20
"""Reading more steps than this takes seconds."""
RECENT_BYTES = 64 << 10
"""Of each ring: a few hundred steps, which fill a chart."""
RECENT_SAMPLES_BYTES = 1 << 20


def is_long(run_dir: Path) -> bool:
    """Whether it takes seconds to read this node's part of a run, so that its last steps should be shown first."""
    with suppress(OSError), os.scandir(run_dir / STEPS) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(SEGMENT_SUFFIX)) > LONG_BYTES
    return False


@dataclass
class _Ring:
    about: RingSidecar
    introduced: bool = False
    stamp: tuple[int, int] = (0, 0)
    """The sidecar's modification time and size."""
    offset: int = 0
    after_seq: int = 0
    size: int = 0
    """The segment's size when it was last read to its end."""


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
    recent: bool = False
    """Whether to begin with the last steps and samples instead of the first."""
    _rings: dict[str, _Ring] = field(default_factory=dict)
    _offsets: dict[str, int] = field(default_factory=dict)

    def poll(self) -> int:
        """Take in what is new, for a limited time; return the number of rows and lines."""
        began_s = self.clock()
        until_s = began_s + TAIL_POLL_S
        found = sum(self._lines(name, until_s) for name in LINE_FILES if name != SAMPLES)
        sizes = self._look()
        while rows := self._round(sizes):
            found += rows
            self.live.tick()
            if self.clock() - began_s > TAIL_POLL_S:
                break
        return found + self._lines(SAMPLES, self.clock() + SAMPLES_S)

    def _look(self) -> dict[str, int]:
        """Read changed sidecars; return the sizes of the segments by key."""
        sizes: dict[str, int] = {}
        try:
            entries = list(os.scandir(self.run_dir / STEPS))
        except FileNotFoundError:
            return sizes  # no step was made yet, or the run is sealed
        for entry in entries:
            key, dot, ending = entry.name.rpartition(".")  # without paths: there may be thousands, every two seconds
            suffix = dot + ending
            if not key or suffix not in (SEGMENT_SUFFIX, SIDECAR_SUFFIX):
                continue
            try:
                stat = entry.stat()
            except FileNotFoundError:
                continue
            if suffix == SEGMENT_SUFFIX:
                sizes[key] = stat.st_size
            elif (ring := self._rings.get(key)) is None or ring.stamp != (stat.st_mtime_ns, stat.st_size):
                self._hear(key, Path(entry.path), (stat.st_mtime_ns, stat.st_size))
        return sizes

    def _hear(self, key: str, path: Path, stamp: tuple[int, int]) -> None:
        try:
            about = RingSidecar.from_dict(json.loads(read_document(path)))
        except (OSError, ValueError, RecursionError):
            return  # half written, gone or foreign: the next version may be readable
        ring = self._rings.setdefault(key, _Ring(about))
        ring.about, ring.stamp, ring.introduced = about, stamp, True
        self.live.ring(about, node=self.node)

    def _round(self, sizes: dict[str, int]) -> int:
        """Read some of what is new from each ring; return the number of rows."""
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
            if self.recent and not ring.offset:
                ring.offset = max(0, size - RECENT_BYTES)  # in the middle of a frame: the next one is found
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

    def _lines(self, name: str, until_s: float) -> int:
        count = 0
        if name == SAMPLES and name not in self._offsets:
            # No more would be kept.
            self._offsets[name] = first_within(self.run_dir, RECENT_SAMPLES_BYTES if self.recent else KEPT_BYTES)
        elif name != SAMPLES and _size(self.run_dir / name) <= self._offsets.get(name, 0):
            return 0  # nothing new, without opening the file
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _joined(parts: Sequence[SegmentPart]) -> SegmentPart:
    """Join consecutive frames of one ring: a night has a hundred thousand."""
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


# -- tail of the inbox ------------------------------------------------------------------------------------------------
# Reads what other nodes sent to a run from its inbox into the live model: once, or repeatedly while it grows.
#
#     tail = InboxTail(run_dir, live)
#     tail.catch_up()             # a restarted hub: everything there is
#     tail.poll()                 # a reader that only follows: what is new, for a limited time
#
# From journals sealed before the first poll only rings and lines are read, not the steps.  Frames are read from where
# the last poll ended, journal by journal.  A journal is sealed seconds after the next one begins; a tail that was too
# slow continues in its part (``store/inbox/parts.py``).

TICK_ROWS = 1 << 16
"""The model digests after this many rows."""
INBOX_POLL_S = 0.5
"""The duration of one poll."""
ALL_PARTS = ("rings", "steps", "lines")
PARTS_WITHOUT_STEPS = ("rings", "lines")
"""The kinds read from a journal before its steps, or without them."""


class _Left(NamedTuple):
    rest: bool
    samples: bool


class InboxTail:
    def __init__(
        self,
        run_dir: Path,
        live: LiveRun,
        claims: RankClaims | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``claims``: receives the owner of each ring."""
        self._run_dir = run_dir
        self._live = live
        self._claims = RankClaims() if claims is None else claims
        self._clock = clock
        self._begun = False
        self._journal = 0
        self._offset = 0
        self._rests = 0
        """How many frames read from this journal leave a rest in its part, once it is sealed."""
        self._samples = 0
        """How many of them leave samples in its part."""
        self._late: Iterator[int] = iter(())
        self._rows = 0

    def catch_up(self) -> None:
        """Read everything there is now.  OSError if it cannot be read."""
        self._take(float("inf"))

    def poll(self) -> int:
        """Read what is new, for a limited time; return the number of frames."""
        try:
            return self._take(INBOX_POLL_S)
        except OSError:
            return 0  # sealed meanwhile, or the run is gone

    def _take(self, most_s: float) -> int:
        began_s, taken = self._clock(), 0
        if not self._begun:
            self._begun = True
            sealed = read_positions(self._run_dir)
            self._journal = sealed.through + 1
            for part in sample_parts(self._run_dir, sealed.parts):
                for received in read_journal(part.path(self._run_dir)):
                    self._tell(received, PARTS_WITHOUT_STEPS)
            for number in sealed.parts:
                for received in read_journal(rest_path(self._run_dir, number)):
                    self._tell(received, PARTS_WITHOUT_STEPS)
        for frames in chain(self._overtaken(), self._received()):
            taken += frames
            if self._clock() - began_s > most_s:
                break
        self._rows = 0
        self._live.tick()
        return taken

    def _received(self) -> Iterator[int]:
        """Process all frames after the last one processed."""
        there = journals(self._run_dir, after=self._journal - 1)
        if there[:1] != [self._journal]:
            return  # not begun yet; or just sealed, and the next poll finds its part
        for number in there:
            if number > self._journal:
                self._begin_journal(number)
            for received in read_journal(journal_path(self._run_dir, number), self._offset):
                self._offset = received.end
                left = self._tell(received, ALL_PARTS)
                self._rests += left.rest
                self._samples += left.samples
                yield 1

    def _overtaken(self) -> Iterator[int]:
        """Process what was sealed before it was read here, a stretch at a time."""
        there = journals(self._run_dir, after=self._journal - 1)
        for late in (self._late, self._parts(there)):
            self._late = late
            while (frames := next(late, None)) is not None:  # not ``yield from``: the end of a poll would close it
                yield frames

    def _parts(self, there: list[int]) -> Iterator[int]:
        """Read parts if our journal was sealed, that is, missing in ``there``, the remaining journals."""
        if not there or there[0] <= self._journal:
            return
        sealed = read_positions(self._run_dir)
        senders = sealed.spools.values()
        rings = {ring.number: (ident, ring.live) for spool in senders for ident, ring in spool.rings.items()}
        while self._journal in sealed.parts:
            number, told, told_samples = self._journal, self._rests, self._samples
            self._begin_journal(number + 1)  # a part that cannot be read is skipped
            rest = rest_path(self._run_dir, number)
            for received in islice(read_journal(rest), told, None):
                self._tell(received, PARTS_WITHOUT_STEPS)
                yield 1
            for part in sample_parts(self._run_dir, range(number, number + 1)):
                if not part.span_s and part.last == number:  # otherwise it is hours old, and thinned
                    for received in islice(read_journal(part.path(self._run_dir)), told_samples, None):
                        self._tell(received, PARTS_WITHOUT_STEPS)
                        yield 1
            for path in part_steps(self._run_dir, [number]):
                self._live.rows(self._steps(path, rings))
                yield 0
            for received in islice(read_journal(rest), told, None):
                self._tell(received, ("steps",))  # after the steps that these rows belong to
            self._live.rows(_stand(list(rings.values())))
        if self._journal < there[0]:
            self._begin_journal(there[0])  # anything before it no longer exists

    def _begin_journal(self, number: int) -> None:
        self._journal, self._offset, self._rests, self._samples = number, 0, 0, 0

    def _steps(self, path: Path, rings: dict[int, tuple[bytes, Live]]) -> BlockRows:
        """Read the steps that the model does not have; part of the journal may have been read before."""
        self._live.settle()
        known = self._live.registry
        whose, slots = [], []
        for number, steps in read_part_steps([path]):
            ident, live = rings[number]
            ring = known.by_id.get(ident)
            last = -1 if ring is None else int(known.of["last_step"][ring])
            fresh = steps[steps.view(STEP_DTYPE).reshape(-1)["step"].astype(np.int64) > last]
            whose.append((ident, live))
            slots.append(fresh)
        stand = _stand(whose)
        stand.table["rows"] = [len(own) for own in slots]
        return BlockRows(table=stand.table, slots=np.concatenate(slots))

    def _tell(self, received: JournalFrame, kinds: tuple[str, ...]) -> _Left:
        """Process these kinds of parts; return which files of a sealed part keep something of the frame."""
        try:
            frame = read_frame(received.raw)
        except FrameError:
            return _Left(rest=True, samples=False)  # from another version
        blocks = self._put(frame, kinds)
        self._rows += sum(len(block.slots) for block in blocks)
        if self._rows >= TICK_ROWS:
            self._rows = 0
            self._live.tick()
        return _Left(rest=leaves_rest(frame, blocks), samples=leaves_samples(frame))

    def _put(self, frame: Frame, kinds: tuple[str, ...]) -> list[BlockRows]:
        """Put these parts into the model; return the blocks of steps."""
        node, blocks = str(frame.head.node), []
        for part in frame.parts:
            if part.kind not in kinds:
                continue
            if part.kind == "rings":
                rings = sidecars_of(part)
                self._claims.take(frame.head.spool, rings)
                for about in rings:
                    self._live.ring(about, node=node)
            elif part.kind == "steps":
                blocks.append(unpack_block(part.data))
                self._live.rows(blocks[-1])
            else:
                lines = [line for line in inflate_part(part).split(b"\n") if line]
                self._live.lines(part.name, lines, node=node, offset_ns=frame.head.offset_ns or 0)
        return blocks


def _stand(rings: list[tuple[bytes, Live]]) -> BlockRows:
    """Return the live positions of these rings, without rows."""
    table = np.zeros(len(rings), TABLE_DTYPE)
    table["ring"] = np.frombuffer(b"".join(ident for ident, _ in rings), TABLE_DTYPE["ring"])
    for at, name in enumerate(LIVE_FIELDS):
        table[name] = [live[at] for _, live in rings]
    return BlockRows(table=table, slots=np.zeros((0, SLOT_BYTES), np.uint8))

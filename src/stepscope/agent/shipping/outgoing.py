"""Finds what the hub is missing from a run directory, ring by ring and file by file, and packs it into frame parts.

The hub says how far it is (``Positions``). Everything after that is read from the files. Nothing counts as sent before
``acked``, so a lost batch is simply collected again. A batch is limited to a few megabytes, however much there is to
send. Its parts, in this order:

    files    errors, hangs, dumps: sent whole when they changed
    rings    sidecars: before the ring's first records, and again when anything but the rank's position changed
    steps    whole frames of segments, and the current position of each rank
    lines    whole lines; one that exceeds a part's limit is sent as blanks, so that offsets stay valid
    logs     any bytes
    traces   the same, of captures; not to the hub of a team, because captures stay where they were recorded

Rare and important data comes first; what only people read comes last.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from stepscope.agent.disk_space import claim_of
from stepscope.records.files import open_file
from stepscope.records.paths import CAPTURES, FLIGHT, HANGS
from stepscope.records.series import RankState
from stepscope.records.steps import SLOT_BYTES, SLOT_HEAD
from stepscope.store.file_io import blank_line, file_size, lines_from, read_document
from stepscope.store.live.ring_files import RingSidecar, SegmentPart, guess_sidecar, parts_from
from stepscope.store.live.sample_files import read_samples, sample_bytes, samples_end
from stepscope.store.paths import SAMPLES, SEGMENT_SUFFIX, SIDECAR_SUFFIX, STEPS, segment_path, sidecar_path
from stepscope.wire.frames import (
    BLOCK_RINGS,
    FILE_BYTES,
    FRAME_BYTES,
    HEAD_BYTES,
    LINE_FILES,
    LINES_BYTES,
    PARTS,
    Part,
    PartKind,
    RingRows,
    may_be_named,
    pack_block,
    part_of,
    ring_id,
)
from stepscope.wire.handshake import Positions

__all__ = ["Batch", "Outgoing"]


# -- Rings ------------------------------------------------------------------------------------------------------------
# One ring of a run directory: its identity, its position, and the records that the hub is missing.

LIVE_FIELDS = ("live_phase", "live_since_ns", "live_step", "heard_wall_ns")
"""Sidecar fields that change all the time. The first three are sent with every block."""
STATES = get_args(RankState)

Whereabouts = tuple[int, int, int, int]
"""Step, start of the phase, phase, state."""


@dataclass(frozen=True, kw_only=True)
class RingClaim:
    """What the hub knows about a ring once it has the batch."""

    after_seq: int
    offset: int
    reported: bytes
    live: Whereabouts | None


class OutgoingRing:
    def __init__(self, run_dir: Path, key: str, after_seq: int) -> None:
        """``after_seq`` is the last record that the hub has. The sidecar is sent again."""
        self.key = key
        self.about: Mapping[str, Any] | None = None
        """The sidecar as a dictionary."""
        self._segment = segment_path(run_dir, key)
        self._sidecar = sidecar_path(run_dir, key)
        self._id = ring_id(key)
        self._stamp: tuple[int, int] | None = None
        self._lasting = b""
        self._entire = b""
        self._live: Whereabouts | None = None
        self._has = RingClaim(after_seq=after_seq, offset=0, reported=b"", live=None)

    def refresh(self, *, final: bool) -> None:
        """Read the sidecar if it changed. At the end, make up a missing one from the ring's name."""
        try:
            status = self._sidecar.stat()
            if (status.st_mtime_ns, status.st_ino) == self._stamp:
                return
            raw = json.loads(read_document(self._sidecar))
            known = RingSidecar.from_dict(raw)
            self._stamp = (status.st_mtime_ns, status.st_ino)
        except (FileNotFoundError, ValueError, RecursionError):
            if self.about is not None or not final or self._has.after_seq or not self.behind_bytes():
                return
            known = guess_sidecar(self.key)
            raw = known.to_dict()
        if known.key == self.key:
            self._keep(raw, known)

    def news(self, *, final: bool) -> bool:
        """Return whether the hub still needs the sidecar."""
        return self.about is not None and self._has.reported != self._to_report(final)

    def as_reported(self, *, final: bool) -> RingClaim:
        """Return what the hub will know once it has the sidecar."""
        return replace(self._has, reported=self._to_report(final))

    @property
    def known(self) -> bool:
        return bool(self._has.reported)

    def behind_bytes(self, offset: int | None = None) -> int:
        """Return how many bytes of the segment were not sent, or lie after ``offset``."""
        try:
            return max(0, self._segment.stat().st_size - (self._has.offset if offset is None else offset))
        except FileNotFoundError:
            return 0

    def rows(self, claim: RingClaim | None, *, most: int) -> tuple[RingRows, RingClaim] | None:
        """Return about ``most`` records that the hub is missing, with the ring's position; None if it has both.

        ``claim`` is what the batch already says about the ring.
        """
        has, parts, offset = self._has, list[SegmentPart](), self._has.offset
        if self.behind_bytes():
            parts, offset = parts_from(self._segment, offset, after_seq=has.after_seq, most_slots=most)
        if not parts:
            self._has = replace(has, offset=offset)  # the hub has what was skipped
            if self._live in (None, has.live):
                return None
        slots = [slot for part in parts for slot in _slots_after(part, has.after_seq)]
        fresh = [part for part in parts if part.first_seq > has.after_seq]
        step, since_ns, phase, state = self._live or (0, 0, 0, 0)
        last_seq = parts[-1].last_seq if parts else has.after_seq
        rows = RingRows(
            ring=self._id,
            after_seq=has.after_seq,
            last_seq=last_seq,
            slots=slots,
            lost=sum(part.lost for part in fresh),
            torn=sum(part.torn for part in fresh),
            live_step=step,
            live_since_ns=since_ns,
            live_phase=phase,
            state=state,
        )
        reported = claim.reported if claim is not None else has.reported
        return rows, RingClaim(after_seq=last_seq, offset=offset, reported=reported, live=self._live)

    def take(self, claim: RingClaim) -> None:
        """Note that the hub has it."""
        self._has = claim

    def _keep(self, raw: dict[str, Any], known: RingSidecar) -> None:
        entire = json.dumps(raw)
        if len(entire) > LINES_BYTES // 2:
            raw = {**raw, "groups": [], "facts": {}}  # too large for a part, and the identity matters more
            entire = json.dumps(raw)
        self.about = raw
        self._entire = _digest(entire)
        self._lasting = _digest(json.dumps({name: value for name, value in raw.items() if name not in LIVE_FIELDS}))
        self._live = (known.live_step, known.live_since_ns, known.live_phase, STATES.index(known.state))

    def _to_report(self, final: bool) -> bytes:
        return self._entire if final else self._lasting


def _slots_after(part: SegmentPart, after_seq: int) -> list[bytes]:
    """Return the later slots; for a frame that the hub has in part, the rest of it."""
    slots = [part.slots[at : at + SLOT_BYTES] for at in range(0, len(part.slots), SLOT_BYTES)]
    if part.first_seq > after_seq:
        return slots
    return [slot for slot in slots if SLOT_HEAD.unpack_from(slot)[3] > after_seq]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


# -- Batches ----------------------------------------------------------------------------------------------------------

ROWS = 8192
"""Records in a batch, approximately: two megabytes, which packing copies several times."""
TEXT_BYTES = 512 << 10
"""Lines per file in a batch."""
LOG_BYTES = 1 << 20
"""Bytes of all logs in a batch."""
TRACE_BYTES = 2 << 20
"""Bytes of all traces in a batch; they are compressed already."""
SIDECARS_BYTES = 1 << 20
SMALLEST = 1 / 64
"""The smallest scale of these limits when the hub finds frames too large."""
ROOM = FRAME_BYTES - HEAD_BYTES - 4096
MOST_BYTES = 16 << 20
"""Limit for a batch, unpacked. Data that compresses well is large before."""
MOST_PARTS = PARTS // 2
LOGS = "logs"
WHOLE = ("errors", HANGS, FLIGHT)

Thing = TypeVar("Thing")


class Stamp(NamedTuple):
    """Changes when the file does."""

    mtime_ns: int
    size: int
    inode: int


@dataclass(kw_only=True)
class Batch:
    """The parts of one frame, and what the hub has once it has received them."""

    parts: list[Part] = field(default_factory=list)
    size: int = 0
    """Bytes of the parts as sent."""
    unpacked: int = 0
    more: bool = False
    """More data is left that did not fit."""
    problem: str = ""
    """Why something could not be read."""
    rings: dict[str, RingClaim] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """The offset after this batch, by name."""
    whole: dict[str, Stamp] = field(default_factory=dict)
    long_lines: int = 0

    def takes(self, part: Part) -> bool:
        """Add a part if there is room; return whether there was."""
        large = self.size + len(part.data) > ROOM or self.unpacked + part.size > MOST_BYTES
        if large or len(self.parts) >= MOST_PARTS:
            self.more = True
            return False
        self.parts.append(part)
        self.size += len(part.data)
        self.unpacked += part.size
        return True


class Outgoing:
    """The unsent data of one run directory."""

    def __init__(self, run_dir: Path, *, traces: bool = True) -> None:
        """``traces``: whether traces of captures are sent, too."""
        self._run_dir = run_dir
        self._with_traces = traces
        self._rings: dict[str, OutgoingRing] = {}
        self._at: dict[str, int] = {}
        self._whole: dict[str, Stamp] = {}
        self._turn = 0
        self._scale = self._most_scale = 1.0
        self.samples = claim_of(run_dir)
        self.long_lines = 0
        """Lines that were sent as blanks."""
        self.unsent: set[str] = set()
        """Names of files that cannot be sent: too large, or not named like ours."""

    def rewind(self, positions: Positions) -> None:
        """Move to the hub's positions. What has no position is sent again."""
        self._rings = {key: OutgoingRing(self._run_dir, key, seq) for key, seq in positions.rings.items()}
        self._at = dict(positions.files)
        self.samples.sent(self._at.get(SAMPLES, 0))
        self._whole = {}

    def shrink(self, *, for_good: bool = False) -> None:
        """Make batches smaller: the hub finds them too large, or sending takes too long."""
        self._scale = max(self._scale / 2, SMALLEST)
        if for_good:
            self._most_scale = self._scale

    def collect(self, *, final: bool = False) -> Batch:
        """Collect new data. ``final``: nothing is written any more, so send the final state of volatile fields, too."""
        batch = Batch()
        try:
            self._add_files(batch)
            self._find_rings()
            self._report_rings(batch, final=final)
            self._add_steps(batch)
            for name in LINE_FILES:
                if name == SAMPLES:
                    self._add_samples(batch)
                else:
                    self._add_lines(batch, name)
            self._add_bytes(batch, list(self._named("log", [LOGS])), LOG_BYTES)
            self._add_bytes(batch, list(self._traces()), TRACE_BYTES)
        except OSError as error:
            batch.problem = f"cannot read {self._run_dir}: {error.strerror}"
        return batch

    def acked(self, batch: Batch) -> None:
        """Note that the hub has the batch."""
        for key, claim in batch.rings.items():
            self._rings[key].take(claim)
        self._at |= batch.files
        self.samples.sent(self._at.get(SAMPLES, 0))
        self._whole |= batch.whole
        self.long_lines += batch.long_lines
        self._turn += 1
        self._scale = min(self._scale * 2, self._most_scale)

    def left_bytes(self) -> int:
        """Return roughly how many bytes were not sent: files are still being written, and some may be unreadable."""
        try:
            return self._count_left()
        except OSError:
            return 0

    def _count_left(self) -> int:
        self._find_rings()
        left = sum(ring.behind_bytes() for ring in self._rings.values())
        lines = [(name, file_size(self._run_dir / name)) for name in LINE_FILES if name != SAMPLES]
        left += min(max(0, samples_end(self._run_dir) - self._at.get(SAMPLES, 0)), sample_bytes(self._run_dir))
        logs = [(name, stamp.size) for name, stamp in (*self._named("log", [LOGS]), *self._traces())]
        left += sum(max(0, size - self._at.get(name, 0)) for name, size in (*lines, *logs))
        return left + sum(stamp.size for name, stamp in self._named("file", WHOLE) if self._whole.get(name) != stamp)

    def _find_rings(self) -> None:
        for name, _ in _entries(self._run_dir / STEPS):
            key, dot, suffix = name.rpartition(".")
            if dot + suffix in (SEGMENT_SUFFIX, SIDECAR_SUFFIX) and key not in self._rings:
                self._rings[key] = OutgoingRing(self._run_dir, key, 0)

    def _report_rings(self, batch: Batch, *, final: bool) -> None:
        sidecars: dict[str, str] = {}
        size = 0
        for ring in self._rings.values():
            ring.refresh(final=final)
            if not ring.news(final=final):
                continue
            text = json.dumps(ring.about, separators=(",", ":"))
            if sidecars and size + len(text) > SIDECARS_BYTES * self._scale:
                batch.more = True
                break
            sidecars[ring.key] = text
            size += len(text)
        if sidecars and batch.takes(part_of("rings", f"[{','.join(sidecars.values())}]".encode())):
            batch.rings |= {key: self._rings[key].as_reported(final=final) for key in sidecars}

    def _add_steps(self, batch: Batch) -> None:
        rings = self._in_turn([ring for ring in self._rings.values() if ring.known or ring.key in batch.rings])
        share = max(int(ROWS * self._scale) // max(sum(bool(ring.behind_bytes()) for ring in rings), 1), 1)
        block: list[RingRows] = []
        claims: dict[str, RingClaim] = {}
        rows, more = 0, False
        for ring in rings:
            if rows >= ROWS or len(block) >= BLOCK_RINGS:
                more = more or ring.behind_bytes() > 0
            elif (found := ring.rows(batch.rings.get(ring.key), most=share)) is not None:
                part, claims[ring.key] = found
                block.append(part)
                rows += len(part.slots)
                more = more or (part.last_seq > part.after_seq and ring.behind_bytes(claims[ring.key].offset) > 0)
        if block and batch.takes(part_of("steps", pack_block(block))):
            batch.rings |= claims
            batch.more = batch.more or more

    def _add_lines(self, batch: Batch, name: str) -> None:
        at, size = self._at.get(name, 0), file_size(self._run_dir / name)
        if size <= at:
            return
        most = int(TEXT_BYTES * self._scale)
        raw, too_long = lines_from(self._run_dir / name, at, most_bytes=most, longest=LINES_BYTES)
        if raw and batch.takes(part_of("lines", raw, name=name, offset=at)):
            batch.files[name] = at + len(raw)
            batch.long_lines += too_long
            batch.more = batch.more or batch.files[name] < size

    def _add_samples(self, batch: Batch) -> None:
        """Add samples as lines. Of those thinned before they were sent, add what is left and pad with blanks."""
        at, end = self._at.get(SAMPLES, 0), samples_end(self._run_dir)
        if end <= at:
            return
        self.samples.reading(at + LINES_BYTES)
        most = int(TEXT_BYTES * self._scale)
        piece = read_samples(self._run_dir, at, most_bytes=most, longest=LINES_BYTES)
        raw = piece.data or (blank_line(min(piece.end - at, LINES_BYTES)) if piece.end > at else b"")
        if raw and batch.takes(part_of("lines", raw, name=SAMPLES, offset=at)):
            batch.files[SAMPLES] = at + len(raw)
            batch.long_lines += piece.too_long
            batch.more = batch.more or batch.files[SAMPLES] < end

    def _add_files(self, batch: Batch) -> None:
        for name, stamp in self._named("file", WHOLE):
            if self._whole.get(name) == stamp or name in self.unsent:
                continue
            if batch.unpacked + stamp.size > MOST_BYTES:
                batch.more = True  # no need to read it now
                continue
            raw = _read(self._run_dir / name, 0, FILE_BYTES + 1)
            if name not in self._whole and self._at.get(name) == zlib.crc32(raw):
                self._whole[name] = stamp  # the hub has this version
                continue
            part = part_of("file", raw, name=name)
            if len(raw) > FILE_BYTES or len(part.data) > ROOM:
                self.unsent.add(name)
            elif batch.takes(part):
                batch.whole[name] = stamp

    def _add_bytes(self, batch: Batch, files: Sequence[tuple[str, Stamp]], most: int) -> None:
        """Add what these files got since the last time; ``most``: bytes of all of them."""
        room = int(most * self._scale)
        for name, stamp in self._in_turn(files):
            at = self._at.get(name, 0)
            if stamp.size <= at:
                continue
            raw = _read(self._run_dir / name, at, room)
            if raw and batch.takes(part_of("log", raw, name=name, offset=at)):
                batch.files[name] = at + len(raw)
                room -= len(raw)
            batch.more = batch.more or at + len(raw) < stamp.size

    def _in_turn(self, things: Sequence[Thing]) -> Sequence[Thing]:
        """Rotate the order, so that with much to send nothing waits until all others are done."""
        begin = self._turn % max(len(things), 1)
        return [*things[begin:], *things[:begin]]

    def _named(self, kind: PartKind, folders: Sequence[str]) -> Iterator[tuple[str, Stamp]]:
        """Yield the files in these folders that may be sent; note the others in ``unsent``."""
        for folder in folders:
            for file, stamp in _entries(self._run_dir / folder):
                name = f"{folder}/{file}"
                if may_be_named(kind, name):
                    yield name, stamp
                elif not file.endswith(".tmp"):
                    self.unsent.add(name)

    def _traces(self) -> Iterator[tuple[str, Stamp]]:
        """Yield the traces of all captures that are to be sent; each is complete when it has its name."""
        for capture in _folders(self._run_dir / CAPTURES) if self._with_traces else ():
            for file, stamp in _entries(self._run_dir / CAPTURES / capture):
                if may_be_named("log", name := f"{CAPTURES}/{capture}/{file}"):
                    yield name, stamp


def _folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _entries(folder: Path) -> list[tuple[str, Stamp]]:
    """Return regular files sorted by name; none if the folder is missing."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    found.append((entry.name, Stamp(status.st_mtime_ns, status.st_size, status.st_ino)))
    except FileNotFoundError:
        return []
    return sorted(found)


def _read(path: Path, offset: int, most: int) -> bytes:
    """Read from a file; return nothing if it no longer exists."""
    try:
        file = open_file(path, buffering=0)
    except FileNotFoundError:
        return b""
    with file:
        return os.pread(file.fileno(), most, offset)

"""The samples in the parts of a hub, thinned with age as those of a node are (``store/sample_segments.py``).

    parts/samples-FIRST-LAST-SPAN-BEGIN-END.frames

Frames (``store/journal.py``) with nothing in them but lines of ``samples.jsonl``, out of the journals FIRST to LAST,
received from BEGIN to END (seconds of the hub's clock).  SPAN 0: as they came; else one line per source and SPAN
seconds.

    the last two or three hours    all of them
    the day before                 one a minute of each source
    the 30 days before             one in ten minutes
    beyond                         one an hour

Age is how long before the newest frame something was received.  A coarser file is written beside those that it
replaces, and then these are removed; killed in between, the coarser one counts.  Samples are thinned sender by sender,
so what it takes in memory is what one node has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from stepscope.errors import FrameError
from stepscope.store import atomic
from stepscope.store.coarse_samples import Coarsener
from stepscope.store.journal import JournalWriter, Received, read_journal
from stepscope.store.jsonl import record_in
from stepscope.store.paths import PARTS, SAMPLES
from stepscope.wire.frames import Frame, FrameHead, inflate_part, pack_frame, part_of, read_frame

__all__ = [
    "AGES",
    "SMALL_AGES",
    "SamplePart",
    "SamplePartWriter",
    "leaves_samples",
    "remove_sample_parts",
    "sample_parts",
    "samples_in",
    "thin_sample_parts",
]

_NAME = re.compile(r"samples-(\d{6,9})-(\d{6,9})-(\d{1,6})-(\d{1,12})-(\d{1,12})\.frames")
_UNFINISHED = "samples.unfinished"
_LINES_BYTES = 1 << 20
"""Of one frame of thinned samples, about."""
_MOST_FILES = 256
"""Of one rate beyond its age: then they become one, however little time they cover."""
HOUR_S = 3600


class _Age(NamedTuple):
    span_s: int
    after_s: int
    """Files at this rate that are older …"""
    covering_s: int
    """… and together cover so much …"""
    then_s: int
    """… become one file at this rate."""


AGES = (
    _Age(span_s=0, after_s=2 * HOUR_S, covering_s=HOUR_S, then_s=60),
    _Age(span_s=60, after_s=26 * HOUR_S, covering_s=24 * HOUR_S, then_s=600),
    _Age(span_s=600, after_s=32 * 24 * HOUR_S, covering_s=30 * 24 * HOUR_S, then_s=3600),
)

SMALL_AGES = (
    _Age(span_s=0, after_s=0, covering_s=0, then_s=600),
    _Age(span_s=60, after_s=0, covering_s=0, then_s=600),
    _Age(span_s=600, after_s=4 * HOUR_S, covering_s=4 * HOUR_S, then_s=3600),
)
"""When the run takes nearly all the disk that it may."""


@dataclass(frozen=True, order=True)
class SamplePart:
    first: int
    last: int
    """Numbers of the journals."""
    span_s: int
    begin_s: int
    end_s: int

    @property
    def name(self) -> str:
        return f"samples-{self.first:06d}-{self.last:06d}-{self.span_s}-{self.begin_s}-{self.end_s}.frames"

    def path(self, run_dir: Path) -> Path:
        return run_dir / PARTS / self.name


def sample_parts(run_dir: Path, numbers: range) -> list[SamplePart]:
    """Those of these journals that count, in order."""
    there = (one for one in _listed(run_dir) if one.first in numbers)
    kept: list[SamplePart] = []
    for one in sorted(there, key=lambda one: (one.first, -one.last, -one.span_s)):
        if not kept or one.first > kept[-1].last:
            kept.append(one)
    return kept


def leaves_samples(frame: Frame) -> bool:
    """Whether there are samples in it."""
    return any(part.kind == "lines" and part.name == SAMPLES for part in frame.parts)


def samples_in(frame: Frame) -> bytes:
    """A frame with the samples of ``frame`` alone; empty when there are none."""
    parts = [part for part in frame.parts if part.kind == "lines" and part.name == SAMPLES]
    return pack_frame(replace(frame.head, bye=None), parts) if parts else b""


class SamplePartWriter:
    """Write the frames of one file; it has its name when it is closed, and is on disk then."""

    def __init__(self, run_dir: Path, first: int, last: int, span_s: int) -> None:
        self._run_dir = run_dir
        self._part = SamplePart(first, last, span_s, 0, 0)
        unfinished = run_dir / PARTS / _UNFINISHED
        unfinished.unlink(missing_ok=True)
        self._journal = JournalWriter(unfinished, 0)
        self._begin_ns = self._end_ns = 0

    def append(self, raw: bytes, *, wall_ns: int) -> None:
        self._begin_ns = min(self._begin_ns or wall_ns, wall_ns)
        self._end_ns = max(self._end_ns, wall_ns)
        self._journal.append(raw, wall_ns=wall_ns)

    def finish(self, *, begin_s: int | None = None, end_s: int | None = None) -> None:
        """``begin_s``, ``end_s``: what it covers, where the frames do not say so themselves."""
        if self._journal.end:
            self._journal.sync()
            begin_s = self._begin_ns // 10**9 if begin_s is None else begin_s
            end_s = self._end_ns // 10**9 if end_s is None else end_s
            part = replace(self._part, begin_s=begin_s, end_s=end_s)
            self._journal.path.rename(part.path(self._run_dir))
        else:
            self._journal.path.unlink(missing_ok=True)
        self._journal.close()

    def abandon(self) -> None:
        self._journal.path.unlink(missing_ok=True)
        self._journal.close()


def remove_sample_parts(run_dir: Path, number: int) -> None:
    """What was written of a journal that did not become a part."""
    for one in _listed(run_dir):
        if one.first == number:
            one.path(run_dir).unlink(missing_ok=True)


def thin_sample_parts(run_dir: Path, numbers: range, *, ages: Sequence[_Age] = AGES) -> None:
    """Make coarser what is old enough.  For whoever has the lock of the parts; OSError when there is no room."""
    while True:
        counting = sample_parts(run_dir, numbers)
        for left in set(_listed(run_dir)) - set(counting):
            if left.last in numbers:
                left.path(run_dir).unlink(missing_ok=True)
        due = _due(counting, ages)
        if due is None:
            return
        _thin(run_dir, *due)


def _due(counting: Sequence[SamplePart], ages: Sequence[_Age]) -> tuple[Sequence[SamplePart], int] | None:
    newest_s = max((one.end_s for one in counting), default=0)
    for age in ages:
        old = [one for one in counting if one.span_s == age.span_s and one.end_s < newest_s - age.after_s]
        for end in range(1, len(old) + 1):
            if old[end - 1].end_s - old[0].begin_s >= age.covering_s or end >= _MOST_FILES:
                return old[:end], age.then_s
    return None


def _thin(run_dir: Path, group: Sequence[SamplePart], span_s: int) -> None:
    """One file out of these, sender by sender."""
    by_spool: dict[str, list[tuple[SamplePart, int]]] = {}
    for one in group:
        start = 0
        for received in read_journal(one.path(run_dir)):
            frame = _frame(received)
            if frame is not None:
                by_spool.setdefault(frame.head.spool, []).append((one, start))
            start = received.end
    writer = SamplePartWriter(run_dir, group[0].first, group[-1].last, span_s)
    try:
        for places in by_spool.values():
            for raw, wall_ns in _thinned(run_dir, places, span_s):
                writer.append(raw, wall_ns=wall_ns)
    except BaseException:
        writer.abandon()
        raise
    writer.finish(begin_s=min(one.begin_s for one in group), end_s=max(one.end_s for one in group))
    atomic.fsync_folder(run_dir / PARTS)
    for one in group:
        one.path(run_dir).unlink(missing_ok=True)


def _thinned(run_dir: Path, places: Sequence[tuple[SamplePart, int]], span_s: int) -> Iterator[tuple[bytes, int]]:
    """Frames with the samples of one sender, and when the last of what is in them was received."""
    coarsener = Coarsener(span_s)
    head: FrameHead | None = None
    wall_ns = 0
    for one, start in places:
        received = next(read_journal(one.path(run_dir), start))
        frame = _frame(received)
        if frame is None:
            continue
        head = frame.head if head is None or frame.head.offset_ns is not None else head
        wall_ns = max(wall_ns, received.wall_ns)
        for part in frame.parts:
            for line in inflate_part(part).splitlines():
                record = record_in(line)
                if record is not None:
                    coarsener.add(record)
    if head is None:
        return
    lines: list[bytes] = []
    size = 0
    for sample in sorted(coarsener.samples(), key=lambda sample: _number(sample.get("wall_ns"))):
        lines.append(json.dumps(sample, separators=(",", ":")).encode() + b"\n")
        size += len(lines[-1])
        if size >= _LINES_BYTES:
            yield pack_frame(head, [part_of("lines", b"".join(lines), name=SAMPLES)]), wall_ns
            lines, size = [], 0
    if lines:
        yield pack_frame(head, [part_of("lines", b"".join(lines), name=SAMPLES)]), wall_ns


def _frame(received: Received) -> Frame | None:
    try:
        return read_frame(received.raw)
    except FrameError:
        return None


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _listed(run_dir: Path) -> list[SamplePart]:
    try:
        names = [path.name for path in (run_dir / PARTS).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (_NAME.fullmatch(name) for name in names)
    return sorted(SamplePart(*map(int, one.groups())) for one in found if one)

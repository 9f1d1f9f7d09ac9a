"""The samples of a run on disk while it lasts: the newest at full rate, older ones thinned.

    samples.jsonl                      what the agent appends to
    samples/BEGIN-END-SPAN.jsonl       what it was before; one line per source and SPAN seconds, 0: all of them

All that was ever written is one stream of bytes, and BEGIN and END (16 hex digits each) are where in it a segment was
before it was thinned: a position in the stream stays what it is, whatever becomes of the files.  ``samples.jsonl``
begins where the last segment ends.

A segment is made by renaming ``samples.jsonl`` and thinned by writing another file, with another name, before the first
one is removed.  Killed in between, both are there; then the coarser one counts, and so does one that covers several.
One writer, the agent; any number of readers, which open what they find and look again when something moved meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stepscope.records.modes import folder_mode
from stepscope.store import atomic
from stepscope.store.jsonl import lines_in
from stepscope.store.paths import SAMPLES, SAMPLES_FOLDER
from stepscope.store.reading import open_file

__all__ = [
    "SamplePiece",
    "Segment",
    "first_within",
    "open_sample_files",
    "read_samples",
    "remove_samples",
    "rotate",
    "sample_bytes",
    "samples_end",
    "segments",
    "superseded",
]

_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9]{1,6})\.jsonl")
_LOOKS = 20
"""Before a reader gives up on a folder that changes each time; it does twice an hour."""


@dataclass(frozen=True, order=True)
class Segment:
    begin: int
    end: int
    """In the stream, as it was written."""
    span_s: int

    @property
    def name(self) -> str:
        return f"{self.begin:016x}-{self.end:016x}-{self.span_s}.jsonl"

    def path(self, run_dir: Path) -> Path:
        return run_dir / SAMPLES_FOLDER / self.name


@dataclass(frozen=True, kw_only=True)
class SamplePiece:
    """Some whole lines of the stream, and where the next ones are."""

    data: bytes
    """Empty with ``end`` beyond the beginning: of these bytes nothing is left."""
    end: int
    too_long: int = 0


def segments(run_dir: Path) -> list[Segment]:
    """Those that count, in order."""
    return _counting(_listed(run_dir))


def superseded(run_dir: Path) -> list[Segment]:
    """Those that a coarser one replaces, and that nobody removed."""
    there = _listed(run_dir)
    counting = set(_counting(there))
    return [one for one in there if one not in counting]


def rotate(run_dir: Path) -> Segment | None:
    """Make ``samples.jsonl`` a segment; None when there is nothing in it.  OSError when the disk refuses."""
    live = run_dir / SAMPLES
    try:
        size = live.stat().st_size
    except FileNotFoundError:
        return None
    if not size:
        return None
    there = segments(run_dir)
    begin = there[-1].end if there else 0
    segment = Segment(begin, begin + size, 0)
    (run_dir / SAMPLES_FOLDER).mkdir(mode=folder_mode(run_dir), exist_ok=True)
    live.rename(segment.path(run_dir))
    return segment


def samples_end(run_dir: Path) -> int:
    """How many bytes were ever written."""
    with _opened(run_dir) as (there, live, _):
        return _base(there) + (0 if live is None else os.fstat(live.fileno()).st_size)


def sample_bytes(run_dir: Path) -> int:
    """How many are on disk."""
    sizes = 0
    for path in (run_dir / SAMPLES, *(one.path(run_dir) for one in _listed(run_dir))):
        with contextlib.suppress(FileNotFoundError):
            sizes += path.stat().st_size
    return sizes


def read_samples(run_dir: Path, at: int, *, most_bytes: int, longest: int) -> SamplePiece:
    """Whole lines from position ``at`` on; as ``lines_from`` of those that are too long or still being written."""
    with _opened(run_dir) as (there, live, _):
        base = _base(there)
        if at >= base or not there:
            if live is None:
                return SamplePiece(data=b"", end=at)
            data, too_long = lines_in(live.fileno(), at - base, most_bytes=most_bytes, longest=longest)
            return SamplePiece(data=data, end=at + len(data), too_long=too_long)
        segment = next(one for one in there if at < one.end)
        if at < segment.begin:
            return SamplePiece(data=b"", end=segment.begin)
        try:
            file = open_file(segment.path(run_dir))
        except FileNotFoundError:  # it was thinned just now
            return read_samples(run_dir, at, most_bytes=most_bytes, longest=longest)
    with file:
        size = os.fstat(file.fileno()).st_size
        if at - segment.begin >= size:
            return SamplePiece(data=b"", end=segment.end)
        data, too_long = lines_in(file.fileno(), at - segment.begin, most_bytes=most_bytes, longest=longest)
    if not data:  # a line that was cut off: nobody ends it any more
        return SamplePiece(data=b"", end=segment.end)
    return SamplePiece(data=data, end=at + len(data), too_long=too_long)


def first_within(run_dir: Path, most_bytes: int) -> int:
    """The position from which on there are about ``most_bytes`` on disk, at the beginning of a segment."""
    with _opened(run_dir) as (there, live, _):
        left = most_bytes - (0 if live is None else os.fstat(live.fileno()).st_size)
        at = _base(there)
        if left < 0:
            return at - left
    for segment in reversed(there):
        with contextlib.suppress(FileNotFoundError):
            left -= segment.path(run_dir).stat().st_size
        if left < 0:
            break
        at = segment.begin
    return at


@contextmanager
def open_sample_files(run_dir: Path) -> Iterator[list[BinaryIO]]:
    """All of them, in order, as they were at one moment: no line is missing and none is there twice."""
    with _opened(run_dir, files=True) as (_, live, files):
        yield [*files, *([] if live is None else [live])]


def remove_samples(run_dir: Path) -> None:
    (run_dir / SAMPLES).unlink(missing_ok=True)
    for one in _listed(run_dir):
        one.path(run_dir).unlink(missing_ok=True)
    folder = run_dir / SAMPLES_FOLDER
    if not folder.is_dir():
        return
    for left in atomic.leftovers(folder):
        left.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()  # what a stranger put there stays


def _listed(run_dir: Path) -> list[Segment]:
    try:
        names = [path.name for path in (run_dir / SAMPLES_FOLDER).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (_NAME.fullmatch(name) for name in names)
    there = [Segment(int(one[1], 16), int(one[2], 16), int(one[3])) for one in found if one]
    return sorted(one for one in there if one.begin < one.end)


def _counting(there: Sequence[Segment]) -> list[Segment]:
    """Without those that another one covers; few are there at once, so all are compared with their neighbours."""
    kept: list[Segment] = []
    for one in sorted(there, key=lambda one: (one.begin, -one.end, -one.span_s)):
        if not kept or one.begin >= kept[-1].end:
            kept.append(one)
    return kept


def _base(there: Sequence[Segment]) -> int:
    return there[-1].end if there else 0


@contextmanager
def _opened(run_dir: Path, *, files: bool = False) -> Iterator[tuple[list[Segment], BinaryIO | None, list[BinaryIO]]]:
    """The segments and ``samples.jsonl``, open, as they were at one moment; ``files``: the segments, open, as well.

    ``samples.jsonl`` is opened first.  If it still has its name when the folder was read, it was none of the segments
    then; an open file's inode is not given to another one.
    """
    for look in range(_LOOKS):
        with ExitStack() as stack:
            live = _live(run_dir)
            if live is not None:
                stack.enter_context(live)
            there = segments(run_dir)
            found: list[BinaryIO] = []
            try:
                for one in there if files else ():
                    found.append(stack.enter_context(open_file(one.path(run_dir))))  # noqa: PERF401 - closed in any case
            except FileNotFoundError:
                if look < _LOOKS - 1:
                    continue
                raise
            if _is_live(run_dir, live) or look == _LOOKS - 1:
                yield there, live, found
                return


def _live(run_dir: Path) -> BinaryIO | None:
    try:
        return open_file(run_dir / SAMPLES)
    except FileNotFoundError:
        return None


def _is_live(run_dir: Path, live: BinaryIO | None) -> bool:
    try:
        now = (run_dir / SAMPLES).stat()
    except FileNotFoundError:
        return live is None
    return live is not None and os.path.samestat(now, os.fstat(live.fileno()))

"""Samples on disk while the run is active: the newest at full rate, older ones thinned; and which ones to load.

    samples.jsonl                      the agent appends here
    samples/BEGIN-END-SPAN.jsonl       older samples; one line per source and SPAN seconds, 0: all of them

All samples ever written form one stream of bytes.  BEGIN and END (16 hex digits each) are a segment's position in that
stream before it was thinned, so positions in the stream remain valid whatever happens to the files.  ``samples.jsonl``
begins where the last segment ends.

A segment is made by renaming ``samples.jsonl``.  It is thinned by writing another file with another name before the
first one is removed.  After a kill in between, both exist; then the coarser one counts, and so does one that covers
several.  One writer, the agent; any number of readers, which open what they find and retry if something moved.

    layers.jsonl                       what sampled steps showed of the layers (``records/layers.py``)
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from stepscope.records.files import folder_mode, open_file
from stepscope.store import file_io
from stepscope.store.file_io import MOST_STREAM_BYTES, bounded_lines, lines_in, record_in
from stepscope.store.live.failures import RankNumbers
from stepscope.store.paths import LAYERS, SAMPLES, SAMPLES_FOLDER

__all__ = [
    "MOST_SAMPLES",
    "OVER",
    "SOURCE",
    "Coarsener",
    "LayerChoice",
    "SamplePiece",
    "SampleSegment",
    "Thinner",
    "first_within",
    "layer_as_shown",
    "layer_records",
    "layers_on_disk",
    "newest_of",
    "open_sample_files",
    "read_samples",
    "remove_samples",
    "rotate_samples",
    "sample_bytes",
    "sample_segments",
    "samples_end",
    "source_of",
    "span_of",
    "strides",
    "superseded_segments",
    "thinned",
]


# -- sample segments --------------------------------------------------------------------------------------------------

_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9]{1,6})\.jsonl")
_ATTEMPTS = 20
"""Attempts before a reader gives up on a folder that keeps changing; it normally changes twice an hour."""


@dataclass(frozen=True, order=True)
class SampleSegment:
    begin: int
    end: int
    """Position in the stream, as written."""
    span_s: int

    @property
    def name(self) -> str:
        return f"{self.begin:016x}-{self.end:016x}-{self.span_s}.jsonl"

    def path(self, run_dir: Path) -> Path:
        return run_dir / SAMPLES_FOLDER / self.name


@dataclass(frozen=True, kw_only=True)
class SamplePiece:
    """Some complete lines of the stream, and the position of the next ones."""

    data: bytes
    """Empty with ``end`` advanced: nothing remains of these bytes."""
    end: int
    too_long: int = 0


def sample_segments(run_dir: Path) -> list[SampleSegment]:
    """Return the segments that count, in order."""
    return _counting(_listed(run_dir))


def superseded_segments(run_dir: Path) -> list[SampleSegment]:
    """Return the segments that a coarser one replaces and that still exist."""
    there = _listed(run_dir)
    counting = set(_counting(there))
    return [segment for segment in there if segment not in counting]


def rotate_samples(run_dir: Path) -> SampleSegment | None:
    """Turn ``samples.jsonl`` into a segment; None if it is empty.  OSError if the disk refuses."""
    live = run_dir / SAMPLES
    try:
        size = live.stat().st_size
    except FileNotFoundError:
        return None
    if not size:
        return None
    there = sample_segments(run_dir)
    begin = there[-1].end if there else 0
    segment = SampleSegment(begin, begin + size, 0)
    (run_dir / SAMPLES_FOLDER).mkdir(mode=folder_mode(run_dir), exist_ok=True)
    live.rename(segment.path(run_dir))
    return segment


def samples_end(run_dir: Path) -> int:
    """Return the number of bytes ever written."""
    with _opened(run_dir) as (there, live, _):
        return _base(there) + (0 if live is None else os.fstat(live.fileno()).st_size)


def sample_bytes(run_dir: Path) -> int:
    """Return the number of bytes on disk."""
    sizes = 0
    for path in (run_dir / SAMPLES, *(segment.path(run_dir) for segment in _listed(run_dir))):
        with contextlib.suppress(FileNotFoundError):
            sizes += path.stat().st_size
    return sizes


def read_samples(run_dir: Path, at: int, *, most_bytes: int, longest: int) -> SamplePiece:
    """Return complete lines from position ``at``; ``lines_from`` says which lines are blanked or left out."""
    with _opened(run_dir) as (there, live, _):
        base = _base(there)
        if at >= base or not there:
            if live is None:
                return SamplePiece(data=b"", end=at)
            data, too_long = lines_in(live.fileno(), at - base, most_bytes=most_bytes, longest=longest)
            return SamplePiece(data=data, end=at + len(data), too_long=too_long)
        segment = next(found for found in there if at < found.end)
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
    if not data:  # a line that was cut off and will never be completed
        return SamplePiece(data=b"", end=segment.end)
    return SamplePiece(data=data, end=at + len(data), too_long=too_long)


def first_within(run_dir: Path, most_bytes: int) -> int:
    """Return the position, at the beginning of a segment, from which about ``most_bytes`` are on disk."""
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
    """Open all sample files in order, as of one moment: no line is missing or duplicated."""
    with _opened(run_dir, files=True) as (_, live, files):
        yield [*files, *([] if live is None else [live])]


def remove_samples(run_dir: Path) -> None:
    (run_dir / SAMPLES).unlink(missing_ok=True)
    for segment in _listed(run_dir):
        segment.path(run_dir).unlink(missing_ok=True)
    folder = run_dir / SAMPLES_FOLDER
    if not folder.is_dir():
        return
    for left in file_io.leftovers(folder):
        left.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()  # files that are not ours stay


def _listed(run_dir: Path) -> list[SampleSegment]:
    try:
        names = [path.name for path in (run_dir / SAMPLES_FOLDER).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (_NAME.fullmatch(name) for name in names)
    there = [SampleSegment(int(match[1], 16), int(match[2], 16), int(match[3])) for match in found if match]
    return sorted(segment for segment in there if segment.begin < segment.end)


def _counting(there: Sequence[SampleSegment]) -> list[SampleSegment]:
    """Drop segments that another one covers; only few exist at once, so each is compared with its neighbor."""
    counting: list[SampleSegment] = []
    for segment in sorted(there, key=lambda segment: (segment.begin, -segment.end, -segment.span_s)):
        if not counting or segment.begin >= counting[-1].end:
            counting.append(segment)
    return counting


def _base(there: Sequence[SampleSegment]) -> int:
    return there[-1].end if there else 0


@contextmanager
def _opened(
    run_dir: Path, *, files: bool = False
) -> Iterator[tuple[list[SampleSegment], BinaryIO | None, list[BinaryIO]]]:
    """Yield the segments and the open ``samples.jsonl`` as of one moment; ``files``: also the segments' open files.

    ``samples.jsonl`` is opened first.  If it still has its name after the folder was read, it was not a segment at that
    time; the inode of an open file is not reused.
    """
    for attempt in range(_ATTEMPTS):
        with ExitStack() as stack:
            live = _live(run_dir)
            if live is not None:
                stack.enter_context(live)
            there = sample_segments(run_dir)
            found: list[BinaryIO] = []
            try:
                for segment in there if files else ():
                    found.append(stack.enter_context(open_file(segment.path(run_dir))))  # noqa: PERF401 - closed in any case
            except FileNotFoundError:
                if attempt < _ATTEMPTS - 1:
                    continue
                raise
            if _is_live(run_dir, live) or attempt == _ATTEMPTS - 1:
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


# -- thinning ---------------------------------------------------------------------------------------------------------
# Which samples of a long run are loaded into memory.  Pure.
#
# Agents write one sample per second for every host, process and GPU: hundreds of thousands per night.  Older samples
# are thinned on disk and represent more than a second (see "coarse samples" below).  Rules and curves need a fraction.
# Above MOST_SAMPLES, samples of each source are chosen at about equal distances in time, so that shares and medians are
# preserved and the last hours do not outweigh the days before; samples farther apart on disk are all taken.  The newest
# of each source are taken in addition: users ask about the end of a run.

MOST_SAMPLES = 50_000
"""At full rate, three hours of a job with one GPU, or 50 minutes of one with eight."""
NEWEST = 120
"""The number of newest samples per source that are all taken …"""
LEAST_NEWEST = 8
"""… or, with very many sources, at least this many."""
SOURCE = ("node", "kind", "pid", "index", "peer")
"""The fields that identify a host, process, GPU or probe."""

Item = TypeVar("Item")


def strides(counts: Mapping[int, int], most: int | None = None) -> dict[int, int]:
    """Return the stride (every n-th sample is taken) by the seconds that a sample represents (0: not thinned).

    ``counts``: the number of samples of each.  ``most``: about how many to take, by default MOST_SAMPLES.
    """
    most = MOST_SAMPLES if most is None else most
    low, high = 1, max(1, sum(counts.values())) * max(1, *counts, 1)
    while low < high:  # find the smallest distance that leaves few enough, or all that are that coarse
        middle = (low + high) // 2
        if sum(-(-count // every) for count, every in _at(counts, middle)) <= most:
            high = middle
        else:
            low = middle + 1
    return dict(zip(counts, (every for _, every in _at(counts, low)), strict=True))


def _at(counts: Mapping[int, int], apart_s: int) -> list[tuple[int, int]]:
    """Return each count with the stride that gives the wanted distance."""
    return [(count, max(1, apart_s // max(1, span_s))) for span_s, count in counts.items()]


def newest_of(sources: int) -> int:
    """Return how many of the newest samples to take per source."""
    return max(LEAST_NEWEST, min(NEWEST, MOST_SAMPLES // (4 * max(1, sources))))


def source_of(sample: Mapping[str, Any]) -> Hashable:
    """Return the sample's source; the values may be anything."""
    source = tuple(sample.get(name) for name in SOURCE)
    try:
        hash(source)
    except TypeError:
        return repr(source)
    return source


def span_of(sample: Mapping[str, Any]) -> int:
    """Return how many seconds a sample represents; 0: it is not thinned."""
    span_s = sample.get("span_s")
    return span_s if type(span_s) is int and span_s > 0 else 0


class Thinner(Generic[Item]):
    """Takes samples one by one, in order, and returns those to keep."""

    def __init__(self, every: Mapping[int, int]) -> None:
        """``every``: the result of ``strides``."""
        self._every = every
        self._numbers: dict[Hashable, int] = {}
        self._places: dict[tuple[Hashable, int], int] = {}
        self._count = 0
        self._chosen: list[tuple[int, Item]] = []
        self._last: dict[Hashable, deque[tuple[int, int, Item]]] = {}

    def add(self, source: Hashable, span_s: int, item: Item) -> None:
        number = self._numbers.get(source, 0)
        self._numbers[source] = number + 1
        place = self._places.get((source, span_s), 0)
        self._places[source, span_s] = place + 1
        if place % self._every.get(span_s, 1) == 0:
            self._chosen.append((self._count, item))
        else:
            self._last.setdefault(source, deque(maxlen=NEWEST)).append((number, self._count, item))
        self._count += 1

    def chosen(self) -> list[Item]:
        newest = newest_of(len(self._numbers))
        late = [
            (place, item)
            for source, last in self._last.items()
            for number, place, item in last
            if number >= self._numbers[source] - newest
        ]
        return [item for _, item in sorted([*self._chosen, *late], key=itemgetter(0))]


def thinned(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples to keep."""
    if len(samples) <= MOST_SAMPLES:
        return list(samples)
    thinner: Thinner[dict[str, Any]] = Thinner(strides(Counter(map(span_of, samples))))
    for sample in samples:
        thinner.add(source_of(sample), span_of(sample), sample)
    return thinner.chosen()


# -- coarse samples ---------------------------------------------------------------------------------------------------
# One sample that represents a stretch of time.  Pure.
#
# A coarse sample is the first of its stretch, unchanged, so medians and shares over many of them are preserved.  It
# also says what a single instant cannot:
#
#     span_s    how many seconds it represents
#     over      for the whole stretch: "samples" (their number) and, by figure, "mean", "max" and "min"
#
# Counts of a probe (``sent``, ``lost``) are added up.  Coarse samples can be made coarser in the same way.

SPAN = "span_s"
OVER = "over"
LEVELS = {
    "gpu": ("power_w", "temperature_c", "util_percent", "mem_used", "sm_clock_mhz"),
    "host": ("cpu_percent", "mem_available", "swap_used"),
    "process": ("cpu_percent", "rss", "own"),
}
"""By kind, the figures whose mean and extremes are kept.  ``own``: resident memory without mapped files."""
_SUMS = ("sent", "lost")
_LOWEST = ("rtt_us_min",)
_HIGHEST = ("rtt_us_max",)


class Coarsener:
    """Takes samples one by one, in file order, and returns one for each source and stretch."""

    def __init__(self, span_s: int) -> None:
        self._span_s = span_s
        self._found: dict[tuple[Hashable, int], _Stretch] = {}

    def add(self, sample: Mapping[str, Any]) -> None:
        wall_ns = sample.get("wall_ns")
        at = wall_ns // (self._span_s * 1_000_000_000) if type(wall_ns) is int else 0
        key = (source_of(sample), at)
        stretch = self._found.get(key)
        if stretch is None:
            self._found[key] = _Stretch(sample)
        else:
            stretch.add(sample)

    def samples(self) -> list[dict[str, Any]]:
        return [stretch.sample(self._span_s) for stretch in self._found.values()]


class _Stretch:
    def __init__(self, first: Mapping[str, Any]) -> None:
        self._first = dict(first)
        self._sums = {name: 0 for name in _SUMS if name in first}
        self._samples = 0
        self._totals: dict[str, tuple[float, int]] = {}
        self._max: dict[str, float] = {}
        self._min: dict[str, float] = {}
        kind = first.get("kind")
        self._figures = LEVELS.get(kind, ()) if isinstance(kind, str) else ()
        self.add(first)

    def add(self, sample: Mapping[str, Any]) -> None:
        over = sample.get(OVER)
        over = over if isinstance(over, dict) else {}
        count = over.get("samples", 1)
        count = count if type(count) is int and count > 0 else 1
        self._samples += count
        for name in self._figures:
            value = _figure(sample, name)
            mean = most = least = value
            if over:
                mean, most, least = (_number(_part(over, part), name, value) for part in ("mean", "max", "min"))
            if mean is None or most is None or least is None:
                continue
            total, counted = self._totals.get(name, (0.0, 0))
            self._totals[name] = (total + mean * count, counted + count)
            self._max[name] = max(most, self._max.get(name, most))
            self._min[name] = min(least, self._min.get(name, least))
        for name in self._sums:
            self._sums[name] += int(_number(sample, name, 0) or 0)
        for names, better in ((_LOWEST, min), (_HIGHEST, max)):
            for name in names:
                value = _number(sample, name, None)
                if value is not None:
                    self._first[name] = better(value, _number(self._first, name, value) or value)

    def sample(self, span_s: int) -> dict[str, Any]:
        means = {name: _rounded(total / counted) for name, (total, counted) in self._totals.items()}
        over = {"samples": self._samples, **({"mean": means, "max": self._max, "min": self._min} if means else {})}
        return {**self._first, **self._sums, SPAN: span_s, OVER: over}


def _figure(sample: Mapping[str, Any], name: str) -> float | None:
    if name != "own":
        return _number(sample, name, None)
    rss, mapped = _number(sample, "rss", None), _number(sample, "rss_file", None)
    return None if rss is None or mapped is None else max(rss - mapped, 0)


def _part(over: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = over.get(name)
    return part if isinstance(part, dict) else {}


def _number(values: Mapping[str, Any], name: str, default: float | None) -> float | None:
    value = values.get(name, default)
    return value if type(value) in (int, float) and -1e300 < value < 1e300 else default


def _rounded(value: float) -> float:
    """Round a mean to the digits it is worth; means of bytes are large numbers."""
    return round(value, 3) if abs(value) < 1e6 else round(value)


# -- layers -----------------------------------------------------------------------------------------------------------
# ``layers.jsonl`` has one line for each rank and sampled step, which can be long.  Of very many, only those of some
# steps are parsed: the first, the last and evenly spaced ones, the same for all ranks, and the first step of each rank
# in which something was not finite.

MOST_LAYER_STEPS = 2_000
MOST_LAYER_BYTES = 16 << 20
"""Of all ranks together; in memory they take several times as much."""
_LAYER_HEAD = re.compile(
    rb'\{"rank":(\d{1,9}),"attempt":(\d{1,9}),(?:"pid":\d{1,9},)?"kind":"sample","step":(\d{1,18}),'
)
_NOT_FINITE = b'"nonfinite_'


class LayerChoice:
    """Which lines of one or more ``layers.jsonl`` to parse; all of them must be seen first."""

    def __init__(self, *, most_steps: int = MOST_LAYER_STEPS, most_bytes: int = MOST_LAYER_BYTES) -> None:
        self._most_steps = most_steps
        self._most_bytes = most_bytes
        self._bytes: Counter[tuple[int, int]] = Counter()
        """By attempt and step."""
        self._first_bad: dict[tuple[int, int], tuple[int, int]] = {}
        """By attempt and rank: attempt and step."""
        self._chosen: set[tuple[int, int]] | None = None

    def see(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            head = _LAYER_HEAD.match(line)
            if head is not None:
                rank, attempt, step = map(int, head.groups())
                self._bytes[attempt, step] += len(line)
                if _NOT_FINITE in line:
                    before = self._first_bad.get((attempt, rank), (attempt, step))
                    self._first_bad[attempt, rank] = min(before, (attempt, step))

    def takes(self, line: bytes) -> bool:
        if self._chosen is None:
            self._chosen = self._choose()
        head = _LAYER_HEAD.match(line)
        return head is None or (int(head[2]), int(head[3])) in self._chosen

    def _choose(self) -> set[tuple[int, int]]:
        steps = sorted(self._bytes)
        typical = sum(self._bytes.values()) // max(len(steps), 1) or 1
        most = max(2, min(self._most_steps, self._most_bytes // typical))
        if len(steps) > most:
            last = len(steps) - 1
            steps = [steps[round(at * last / (most - 1))] for at in range(most)]
        return {*steps, *self._first_bad.values()}


def layers_on_disk(run_dir: Path) -> Iterator[bytes]:
    """Yield the lines of ``layers.jsonl``; none if it is missing."""
    try:
        file = open_file(run_dir / LAYERS)
    except FileNotFoundError:
        return
    with file:
        yield from bounded_lines(file, most_bytes=MOST_STREAM_BYTES)


def layer_records(
    lines: Iterable[bytes], numbers: RankNumbers, host: str | None = None, offset_ns: int = 0
) -> tuple[list[dict[str, Any]], int]:
    """Return parsed lines of ``layers.jsonl`` under the ranks that are shown, and the number that are no records.

    ``offset_ns``: how far the clock of ``host`` is ahead.
    """
    records, bad = [], 0
    for line in lines:
        record = record_in(line)
        if record is None:
            bad += bool(line.strip())
            continue
        if offset_ns and type(record.get("wall_ns")) is int:
            record["wall_ns"] = max(record["wall_ns"] - offset_ns, 1)
        records.append(layer_as_shown(record, numbers, host))
    return records, bad


def layer_as_shown(record: dict[str, Any], numbers: RankNumbers, host: str | None = None) -> dict[str, Any]:
    """Put a record of ``layers.jsonl`` under the rank and attempt that its process is shown as."""
    pid = record.get("pid")
    series = numbers.series(pid, host) if type(pid) is int else None
    return record if series is None else {**record, "rank": series.rank, "attempt": series.identity.attempt}

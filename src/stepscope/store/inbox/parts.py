"""Parts: full journals of a hub, rewritten as Parquet steps and thinned samples while the run is active.

    parts/steps-NNNNNN.K.parquet   the steps of journal N, sorted by ring and sequence number
    parts/samples-….frames         its samples, and those of earlier journals (see "sample parts" below)
    parts/rest-NNNNNN.frames       everything else that is stored nowhere else, as frames (``store/inbox/journal.py``)
    positions.json                 the senders' positions; replaced last, which makes the part count

    python -m stepscope.store.inbox.parts RUN NUMBER       the hub starts this for each full journal

Journals are rewritten in order and in bounded memory.  Steps are kept as they arrived, so a run reads the same from
journals, from parts or from both.  If a process is killed before the last write, the journal still exists and is
rewritten again; if it is killed later, the journal is removed the next time.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stepscope.errors import FrameError, RunError, StepscopeError
from stepscope.records.files import folder_mode, open_file, sql_input_path, sql_output_path
from stepscope.records.steps import PHASE_SLOTS, SLOT_BYTES, STEP
from stepscope.records.text import say
from stepscope.step_table import STEP_DTYPE
from stepscope.store import file_io
from stepscope.store.documents import read_meta
from stepscope.store.file_io import NEARLY_FULL, disk_limit, record_in, run_bytes
from stepscope.store.inbox.journal import (
    BlockRows,
    JournalFrame,
    JournalWriter,
    SealedPositions,
    Spool,
    advance_journaled,
    journal_path,
    live_of,
    read_journal,
    read_positions,
    repack_block,
    unpack_block,
    write_positions,
)
from stepscope.store.live.sample_files import Coarsener
from stepscope.store.locks import locked
from stepscope.store.paths import PARTS, SAMPLES
from stepscope.store.rank_series import BUILTIN_COLUMNS, STEP_COLUMNS
from stepscope.wire.frames import Frame, FrameHead, Part, inflate_part, pack_frame, part_of, read_frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "PHASE_COLUMNS",
    "leaves_rest",
    "leaves_samples",
    "main",
    "part_steps",
    "parts_locked",
    "read_part_steps",
    "rest_path",
    "rewrite_journal",
    "sample_parts",
    "seal_journal",
]


# -- sample parts -----------------------------------------------------------------------------------------------------
# The samples in a hub's parts, thinned with age like those of a node (``store/live/sample_files.py``).
#
#     parts/samples-FIRST-LAST-SPAN-BEGIN-END.frames
#
# Frames (``store/inbox/journal.py``) that contain only lines of ``samples.jsonl``, from the journals FIRST to LAST,
# received from BEGIN to END (seconds of the hub's clock).  SPAN 0: as they arrived; else one line per source and SPAN
# seconds.
#
#     the last two or three hours    all of them
#     the day before                 one per minute and source
#     the 30 days before             one per ten minutes
#     beyond                         one per hour
#
# Age is measured from the newest frame.  A coarser file is written next to the files that it replaces, which are then
# removed; after a kill in between, the coarser one counts.  Samples are thinned sender by sender, so memory is bounded
# by what one node has.

_NAME = re.compile(r"samples-(\d{6,9})-(\d{6,9})-(\d{1,6})-(\d{1,12})-(\d{1,12})\.frames")
_UNFINISHED = "samples.unfinished"
_LINES_BYTES = 1 << 20
"""Approximate size of one frame of thinned samples."""
_MOST_FILES = 256
"""Limit for files of one rate beyond their age: at this number they become one, however little time they cover."""
HOUR_S = 3600


class _Age(NamedTuple):
    span_s: int
    after_s: int
    """Files at this rate that are older than this …"""
    covering_s: int
    """… and together cover this much …"""
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
"""For a run that has used nearly all of its disk limit."""


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
    """Return the sample parts of these journals that count, in order."""
    there = (part for part in _listed(run_dir) if part.first in numbers)
    counting: list[SamplePart] = []
    for part in sorted(there, key=lambda part: (part.first, -part.last, -part.span_s)):
        if not counting or part.first > counting[-1].last:
            counting.append(part)
    return counting


def leaves_samples(frame: Frame) -> bool:
    """Whether the frame contains samples."""
    return any(part.kind == "lines" and part.name == SAMPLES for part in frame.parts)


def samples_in(frame: Frame) -> bytes:
    """Return a frame with only the samples of ``frame``; empty if it has no samples."""
    parts = [part for part in frame.parts if part.kind == "lines" and part.name == SAMPLES]
    return pack_frame(replace(frame.head, bye=None), parts) if parts else b""


class SamplePartWriter:
    """Writes the frames of one file, which gets its final name, durably, in ``finish``."""

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
        """``begin_s``, ``end_s``: the covered time, if the frames do not determine it."""
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
    """Remove what was written for a journal that did not become a part."""
    for part in _listed(run_dir):
        if part.first == number:
            part.path(run_dir).unlink(missing_ok=True)


def thin_sample_parts(run_dir: Path, numbers: range, *, ages: Sequence[_Age] = AGES) -> None:
    """Make old samples coarser.  The caller holds the lock of the parts; OSError if the disk is full."""
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
    newest_s = max((part.end_s for part in counting), default=0)
    for age in ages:
        old = [part for part in counting if part.span_s == age.span_s and part.end_s < newest_s - age.after_s]
        for end in range(1, len(old) + 1):
            if old[end - 1].end_s - old[0].begin_s >= age.covering_s or end >= _MOST_FILES:
                return old[:end], age.then_s
    return None


def _thin(run_dir: Path, group: Sequence[SamplePart], span_s: int) -> None:
    """Combine these parts into one file, sender by sender."""
    by_spool: dict[str, list[tuple[SamplePart, int]]] = {}
    for part in group:
        start = 0
        for received in read_journal(part.path(run_dir)):
            frame = _frame(received)
            if frame is not None:
                by_spool.setdefault(frame.head.spool, []).append((part, start))
            start = received.end
    writer = SamplePartWriter(run_dir, group[0].first, group[-1].last, span_s)
    try:
        for places in by_spool.values():
            for raw, wall_ns in _thinned(run_dir, places, span_s):
                writer.append(raw, wall_ns=wall_ns)
    except BaseException:
        writer.abandon()
        raise
    writer.finish(begin_s=min(part.begin_s for part in group), end_s=max(part.end_s for part in group))
    file_io.fsync_folder(run_dir / PARTS)
    for part in group:
        part.path(run_dir).unlink(missing_ok=True)


def _thinned(run_dir: Path, places: Sequence[tuple[SamplePart, int]], span_s: int) -> Iterator[tuple[bytes, int]]:
    """Yield frames with the samples of one sender, and when the newest of their contents was received."""
    coarsener = Coarsener(span_s)
    head: FrameHead | None = None
    wall_ns = 0
    for place, start in places:
        received = next(read_journal(place.path(run_dir), start))
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


def _frame(received: JournalFrame) -> Frame | None:
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
    return sorted(SamplePart(*map(int, match.groups())) for match in found if match)


# -- journals to parts ------------------------------------------------------------------------------------------------

CHUNK_ROWS = 1 << 17
"""Steps that are sorted and written at a time: 32 MB."""
MEMORY = "96MB"
"""The database's memory limit, in addition to that."""
PHASE_COLUMNS = (*BUILTIN_COLUMNS, *(f"slot_{slot}_ns" for slot in range(len(BUILTIN_COLUMNS), PHASE_SLOTS)))
"""The columns of the sixteen slots; the ring's sidecar has the names of user phases."""
_FIELDS = ("seq", *STEP_COLUMNS, "ddp_exposed_ns")
_ALWAYS = ("ring", "seq", "step", "start_ns", "wall_ns")
_KIND_AT = 4
_COPY = "(FORMAT parquet, PARQUET_VERSION v2, COMPRESSION zstd, COMPRESSION_LEVEL 1, DICTIONARY_SIZE_LIMIT 100)"


def seal_journal(run_dir: Path, number: int) -> None:
    """Rewrite journal ``number``, which is no longer written, as a part.  Journals must be sealed in order.

    RunError if it is not its turn, OSError if the disk is full; the journal remains until the part exists.
    """
    with parts_locked(run_dir):
        rewrite_journal(run_dir, number)


def rewrite_journal(run_dir: Path, number: int) -> None:
    """``seal_journal`` for a caller that holds the lock."""
    sealed = read_positions(run_dir)
    path = journal_path(run_dir, number)
    if number > sealed.through + 1 or (number > sealed.through and not path.exists()):
        raise RunError(f"{path} cannot be sealed: {journal_path(run_dir, sealed.through + 1).name} comes first")
    if number > sealed.through:
        for left in [rest_path(run_dir, number), *part_steps(run_dir, [number])]:
            left.unlink(missing_ok=True)
        remove_sample_parts(run_dir, number)
        steps = _write(run_dir, number, read_journal(path), sealed)
        file_io.fsync_folder(run_dir / PARTS)
        sealed = replace(sealed, through=number, steps=sealed.steps + steps)
        write_positions(run_dir, sealed)
    path.unlink(missing_ok=True)
    limit = disk_limit(read_meta(run_dir))
    small = limit > 0 and run_bytes(run_dir) >= NEARLY_FULL * limit
    thin_sample_parts(run_dir, sealed.parts, ages=SMALL_AGES if small else AGES)


@contextmanager
def parts_locked(run_dir: Path) -> Iterator[None]:
    """Lock the parts: a helper of a killed hub may still be writing."""
    (run_dir / PARTS).mkdir(mode=folder_mode(run_dir), exist_ok=True)
    with locked(run_dir / PARTS):
        yield


def rest_path(run_dir: Path, number: int) -> Path:
    return run_dir / PARTS / f"rest-{number:06d}.frames"


def part_steps(run_dir: Path, numbers: Iterable[int]) -> list[Path]:
    """Return the Parquet files of these parts."""
    wanted = {f"{number:06d}" for number in numbers}
    found = (run_dir / PARTS).glob("steps-*.parquet")
    return sorted((path for path in found if path.name[6:].partition(".")[0] in wanted), key=_order)


def read_part_steps(paths: Sequence[Path], rings: Sequence[int] | None = None) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield ring numbers and their steps as slots, in order; all rings, or only these."""
    import duckdb

    if not paths:
        return
    for path in paths:
        open_file(path).close()
    files = ", ".join(sql_input_path(path) for path in paths)
    where = "" if rings is None else f"WHERE ring IN ({', '.join(str(int(ring)) for ring in rings) or 'NULL'})"
    with duckdb.connect(config={"threads": 2}) as con:
        con.execute("SET enable_progress_bar = false")
        columns = con.execute(
            f"SELECT * FROM read_parquet([{files}], union_by_name = true) {where} ORDER BY ring, seq"
        ).fetchnumpy()
    whose = np.ma.getdata(columns["ring"])
    steps = np.zeros(len(whose), STEP_DTYPE)
    steps["kind"] = STEP
    for name in _FIELDS:
        if name in columns:
            steps[name] = np.ma.filled(columns[name], 0).astype(np.int64).astype(STEP_DTYPE[name])
    for slot, name in enumerate(PHASE_COLUMNS):
        if name in columns:
            steps["phase_ns"][:, slot] = np.ma.filled(columns[name], 0).astype(np.int64).astype(np.uint64)
    slots = steps.view(np.uint8).reshape(-1, SLOT_BYTES)
    starts = np.flatnonzero(np.diff(whose, prepend=-1))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(whose)], strict=True):
        yield int(whose[start]), slots[start:end]


def _write(run_dir: Path, number: int, frames: Iterable[JournalFrame], sealed: SealedPositions) -> int:
    """Write the files of a part, advance ``sealed``, and return the number of steps."""
    numbers = 1 + max((ring.number for spool in sealed.spools.values() for ring in spool.rings.values()), default=-1)
    chunk: list[tuple[NDArray[Any], NDArray[Any]]] = []
    rows = chunks = waiting = 0
    rest = JournalWriter(rest_path(run_dir, number), 0)
    samples = SamplePartWriter(run_dir, number, number, 0)
    try:
        for received in frames:
            try:
                frame = read_frame(received.raw)
                blocks = {id(part): unpack_block(part.data) for part in frame.parts if part.kind == "steps"}
                spool = sealed.spools.setdefault(frame.head.spool, Spool(frame.head.spool))
                advance_journaled(spool, frame, {key: block.table for key, block in blocks.items()})
            except FrameError:
                rest.append(received.raw, wall_ns=received.wall_ns)
                continue
            for ring in spool.rings.values():
                if ring.number < 0:
                    ring.number, numbers = numbers, numbers + 1
            chunk += [_steps_in(spool, block) for block in blocks.values()]
            waiting += sum(len(block.slots) for block in blocks.values())
            own = samples_in(frame)
            if own:
                samples.append(own, wall_ns=received.wall_ns)
            remainder = _rest(frame, blocks)
            if remainder:
                rest.append(remainder, wall_ns=received.wall_ns)
            if waiting >= CHUNK_ROWS:
                rows += _write_chunk(run_dir / PARTS / f"steps-{number:06d}.{chunks}.parquet", chunk)
                chunks, waiting, chunk = chunks + 1, 0, []
        rows += _write_chunk(run_dir / PARTS / f"steps-{number:06d}.{chunks}.parquet", chunk)
    except BaseException:
        samples.abandon()
        raise
    finally:
        rest.close()
    samples.finish()
    file_io.fsync_file(rest.path)
    return rows


def _steps_in(spool: Spool, block: BlockRows) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the ring number and the slot of each step."""
    rings = [spool.rings.get(ident) for ident, _ in live_of(block.table)]
    numbers = np.array([-1 if ring is None else ring.number for ring in rings], np.int32)
    whose = np.repeat(numbers, block.rows)
    chosen = (_kinds(block.slots) == STEP) & (whose >= 0)
    return (whose, block.slots) if chosen.all() else (whose[chosen], block.slots[chosen])


def leaves_rest(frame: Frame, blocks: Iterable[BlockRows]) -> bool:
    """Whether ``rest`` contains anything from a frame with these blocks: its readers must know its position."""
    plain = frame.head.bye is not None or any(map(_is_plain, frame.parts))
    return plain or any(_beside_steps(block) is not None for block in blocks)


def _rest(frame: Frame, blocks: dict[int, BlockRows]) -> bytes:
    """Return what a frame contains that no other file has; empty if nothing."""
    if not leaves_rest(frame, blocks.values()):
        return b""
    parts: list[Part] = []
    for part in frame.parts:
        if _is_plain(part):
            parts.append(part)
        elif part.kind == "steps":
            block = blocks[id(part)]
            others = _beside_steps(block)
            if others is not None:
                whose = np.repeat(np.arange(len(block.table)), block.rows)
                table = block.table.copy()
                table["rows"] = np.bincount(whose[others], minlength=len(table))
                parts.append(part_of("steps", repack_block(BlockRows(table=table, slots=block.slots[others]))))
    return pack_frame(frame.head, parts)


def _is_plain(part: Part) -> bool:
    return part.kind == "rings" or (part.kind == "lines" and part.name != SAMPLES)


def _beside_steps(block: BlockRows) -> NDArray[np.bool_] | None:
    """Return which rows are not steps; None: only steps, none lost or torn."""
    others: NDArray[np.bool_] = _kinds(block.slots) != STEP
    return others if others.any() or block.table["lost"].any() or block.table["torn"].any() else None


def _write_chunk(path: Path, chunk: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> int:
    import duckdb

    if not sum(len(slots) for _, slots in chunk):
        return 0
    whose = np.concatenate([numbers for numbers, _ in chunk])
    steps = np.concatenate([slots for _, slots in chunk]).view(STEP_DTYPE).reshape(-1)
    order = np.lexsort((steps["seq"], whose))
    fields = {name: steps[name] for name in _FIELDS}
    fields |= {name: steps["phase_ns"][:, slot] for slot, name in enumerate(PHASE_COLUMNS)}
    columns: dict[str, NDArray[Any]] = {"ring": whose[order]}
    columns |= {
        name: values[order].astype(np.int64) for name, values in fields.items() if name in _ALWAYS or values.any()
    }
    try:
        with duckdb.connect(config={"threads": 1, "memory_limit": MEMORY}) as con:
            con.register("columns", columns)
            con.execute(f"COPY (SELECT * FROM columns) TO {sql_output_path(path)} {_COPY}")
    except duckdb.Error as error:
        raise OSError(str(error).strip().splitlines()[0]) from error
    file_io.fsync_file(path)
    return len(steps)


def _kinds(slots: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(slots[:, _KIND_AT : _KIND_AT + 2]).view("<u2").reshape(-1)


def _order(path: Path) -> tuple[int, int]:
    number, chunk = path.name[6:].split(".")[:2]
    return int(number), int(chunk)


def main(words: Sequence[str]) -> int:
    """Seal one journal; on failure print a line to standard error and return 1."""
    run_dir, number = words
    try:
        seal_journal(Path(run_dir), int(number))
    except (StepscopeError, OSError) as error:
        say(f"journal {number} was not sealed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Parts: journals of the hub rewritten in columns while the run goes on, one after the other, in bounded memory.

    parts/steps-NNNNNN.K.parquet   the steps of journal N, sorted by ring and sequence number
    parts/samples-….frames         its samples, and those of journals before it (``store/sample_parts.py``)
    parts/rest-NNNNNN.frames       all else of it that is not in its place already, as frames (``store/journal.py``)
    positions.json                 how far the senders came; replaced last, and only then the part counts

    python -m stepscope.store.parts RUN NUMBER       what the hub starts for a journal that is full

Steps are kept as they came, so that a run reads the same from journals, from parts or from both.  Killed before the
last step, the journal is still there and is done again; killed after it, the journal is removed the next time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import FrameError, RunError, StepscopeError
from stepscope.records.messages import say
from stepscope.records.modes import folder_mode
from stepscope.records.phases import PHASE_SLOTS
from stepscope.records.slot import SLOT_BYTES, STEP
from stepscope.records.sql_paths import quoted, unglobbed
from stepscope.store import atomic
from stepscope.store.assemble import STEP_DTYPE
from stepscope.store.columns import BUILTIN_COLUMNS, PLAIN
from stepscope.store.disk_use import NEARLY, disk_limit, run_bytes
from stepscope.store.journal import JournalWriter, Received, journal_path, read_journal
from stepscope.store.locks import locked
from stepscope.store.meta import read_meta
from stepscope.store.paths import PARTS, SAMPLES
from stepscope.store.positions import Sealed, read_positions, write_positions
from stepscope.store.sample_parts import (
    AGES,
    SMALL_AGES,
    SamplePartWriter,
    remove_sample_parts,
    samples_in,
    thin_sample_parts,
)
from stepscope.store.spools import Spool, live_of, take_journalled
from stepscope.store.taken import TakenRows, repack_block, unpack_block
from stepscope.wire.frames import Frame, Part, pack_frame, part_of, read_frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "PHASE_COLUMNS",
    "leaves_rest",
    "main",
    "part_steps",
    "parts_locked",
    "read_part_steps",
    "rest_path",
    "rewrite_journal",
    "seal_journal",
]

CHUNK_ROWS = 1 << 17
"""Steps that are sorted and written at a time: 32 MB of them."""
MEMORY = "96MB"
"""That the database may use beside."""
PHASE_COLUMNS = (*BUILTIN_COLUMNS, *(f"slot_{slot}_ns" for slot in range(len(BUILTIN_COLUMNS), PHASE_SLOTS)))
"""Of the sixteen slots; what a user's phase is called, its ring's sidecar says."""
_FIELDS = ("seq", *PLAIN, "ddp_exposed_ns")
_ALWAYS = ("ring", "seq", "step", "start_ns", "wall_ns")
_KIND_AT = 4
_COPY = "(FORMAT parquet, PARQUET_VERSION v2, COMPRESSION zstd, COMPRESSION_LEVEL 1, DICTIONARY_SIZE_LIMIT 100)"


def seal_journal(run_dir: Path, number: int) -> None:
    """Rewrite journal ``number``, which nobody writes any more, as a part.  In order: the one before comes first.

    RunError when it is not its turn, OSError when there is no room; the journal is there as long as the part is not.
    """
    with parts_locked(run_dir):
        rewrite_journal(run_dir, number)


def rewrite_journal(run_dir: Path, number: int) -> None:
    """The same for whoever has the lock."""
    sealed = read_positions(run_dir)
    path = journal_path(run_dir, number)
    if number > sealed.through + 1 or (number > sealed.through and not path.exists()):
        raise RunError(f"{path} cannot be sealed: {journal_path(run_dir, sealed.through + 1).name} comes first")
    if number > sealed.through:
        for left in [rest_path(run_dir, number), *part_steps(run_dir, [number])]:
            left.unlink(missing_ok=True)
        remove_sample_parts(run_dir, number)
        steps = _write(run_dir, number, read_journal(path), sealed)
        atomic.fsync_folder(run_dir / PARTS)
        sealed = replace(sealed, through=number, steps=sealed.steps + steps)
        write_positions(run_dir, sealed)
    path.unlink(missing_ok=True)
    limit = disk_limit(read_meta(run_dir))
    small = limit > 0 and run_bytes(run_dir) >= NEARLY * limit
    thin_sample_parts(run_dir, sealed.parts, ages=SMALL_AGES if small else AGES)


@contextmanager
def parts_locked(run_dir: Path) -> Iterator[None]:
    """Nobody else makes parts meanwhile: a helper of a hub that was killed may still be at it."""
    (run_dir / PARTS).mkdir(mode=folder_mode(run_dir), exist_ok=True)
    with locked(run_dir / PARTS):
        yield


def rest_path(run_dir: Path, number: int) -> Path:
    return run_dir / PARTS / f"rest-{number:06d}.frames"


def part_steps(run_dir: Path, numbers: Iterable[int]) -> list[Path]:
    """The Parquet files of these parts."""
    wanted = {f"{number:06d}" for number in numbers}
    found = (run_dir / PARTS).glob("steps-*.parquet")
    return sorted((path for path in found if path.name[6:].partition(".")[0] in wanted), key=_order)


def read_part_steps(paths: Sequence[Path], rings: Sequence[int] | None = None) -> Iterator[tuple[int, NDArray[Any]]]:
    """Ring by ring, by number, the steps as slots in order; of all rings, or of these."""
    import duckdb

    if not paths:
        return
    files = ", ".join(unglobbed(path) for path in paths)
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


def _write(run_dir: Path, number: int, frames: Iterable[Received], sealed: Sealed) -> int:
    """The files of a part; ``sealed`` is moved on.  How many steps there were."""
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
                take_journalled(spool, frame, {key: block.table for key, block in blocks.items()})
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
            kept = _rest(frame, blocks)
            if kept:
                rest.append(kept, wall_ns=received.wall_ns)
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
    atomic.fsync_file(rest.path)
    return rows


def _steps_in(spool: Spool, block: TakenRows) -> tuple[NDArray[Any], NDArray[Any]]:
    """Of each step the number of its ring, and its slot."""
    rings = [spool.rings.get(ident) for ident, _ in live_of(block.table)]
    numbers = np.array([-1 if ring is None else ring.number for ring in rings], np.int32)
    whose = np.repeat(numbers, block.rows)
    chosen = (_kinds(block.slots) == STEP) & (whose >= 0)
    return (whose, block.slots) if chosen.all() else (whose[chosen], block.slots[chosen])


def leaves_rest(frame: Frame, blocks: Iterable[TakenRows]) -> bool:
    """Whether anything of a frame with these blocks stands in ``rest``: who reads there needs to know how far it is."""
    plain = frame.head.bye is not None or any(map(_is_plain, frame.parts))
    return plain or any(_beside_steps(block) is not None for block in blocks)


def _rest(frame: Frame, blocks: dict[int, TakenRows]) -> bytes:
    """What of a frame is in no other file; nothing where all of it is."""
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
                parts.append(part_of("steps", repack_block(TakenRows(table=table, slots=block.slots[others]))))
    return pack_frame(frame.head, parts)


def _is_plain(part: Part) -> bool:
    return part.kind == "rings" or (part.kind == "lines" and part.name != SAMPLES)


def _beside_steps(block: TakenRows) -> NDArray[np.bool_] | None:
    """Which rows are no steps; None: the steps are all that it says."""
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
            con.execute(f"COPY (SELECT * FROM columns) TO {quoted(path)} {_COPY}")
    except duckdb.Error as error:
        raise OSError(str(error).strip().splitlines()[0]) from error
    atomic.fsync_file(path)
    return len(steps)


def _kinds(slots: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(slots[:, _KIND_AT : _KIND_AT + 2]).view("<u2").reshape(-1)


def _order(path: Path) -> tuple[int, int]:
    number, chunk = path.name[6:].split(".")[:2]
    return int(number), int(chunk)


def main(words: Sequence[str]) -> int:
    """Seal one journal; 1 with a line on standard error when that did not work."""
    run_dir, number = words
    try:
        seal_journal(Path(run_dir), int(number))
    except (StepscopeError, OSError) as error:
        say(f"journal {number} was not sealed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

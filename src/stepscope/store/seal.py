"""Seal a run that is over: everything columnar into Parquet, then the files it came from are removed.

    1  read the run as it lies
    2  write steps.parquet, samples.parquet, ranks.json and the collectives, if any, beside it and read them back
    3  move them in, and events.jsonl with the notes in it
    4  run.json says "sealed": from here on readers take the new files
    5  remove segments, samples.jsonl and rings

Killed before 4, the run is as before and can be sealed again; killed after 4, sealing again does 5.  Two that seal at
the same time wait for one another.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import RingError, RunError, RunUnwritable
from stepscope.records.series import RankSeries, RunData
from stepscope.ring import RingReader
from stepscope.store import atomic
from stepscope.store.load import open_run
from stepscope.store.meta import read_meta, write_meta
from stepscope.store.paths import (
    COLLECTIVES_PARQUET,
    COMM_PARQUET,
    EVENTS,
    RANKS,
    SAMPLES,
    SAMPLES_PARQUET,
    STEPS,
    STEPS_PARQUET,
)
from stepscope.store.processes import process_alive, processes_alive, remove_session, ring_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["seal"]

_STAGE = ".sealing"


def seal(run_dir: Path) -> None:
    """Seal a run; does nothing to one that is sealed.  RunError while its processes still run."""
    read_meta(run_dir)
    try:
        with _locked(run_dir):
            if read_meta(run_dir).get("sealed") is not True:
                if processes_alive(run_dir):
                    raise RunError(f"{run_dir} cannot be sealed: its processes still run")
                _write(run_dir)
            _clean(run_dir)
    except OSError as error:
        raise RunUnwritable(f"cannot seal {run_dir}: {error.strerror or error}") from error


def _write(run_dir: Path) -> None:
    data = open_run(run_dir)
    stage = run_dir / _STAGE
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    _write_and_verify(stage, data)
    if data.events:
        lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in data.events)
        atomic.write_bytes(run_dir / EVENTS, lines.encode(), durable=True)
    for name in (STEPS_PARQUET, SAMPLES_PARQUET, COMM_PARQUET, COLLECTIVES_PARQUET, RANKS):
        if (stage / name).exists():
            (stage / name).replace(run_dir / name)
    atomic.fsync_folder(run_dir)
    write_meta(run_dir, {**data.meta, "sealed": True})


def _write_and_verify(stage: Path, data: RunData) -> None:
    import duckdb

    from stepscope.store.parquet import read_ranks, read_samples, write_ranks, write_samples

    try:
        write_ranks(stage, data.ranks, data.notices)
        write_samples(stage, data.samples)
        ranks, notices = read_ranks(stage)
        samples = read_samples(stage)
    except duckdb.Error as error:
        raise RunUnwritable(f"cannot seal {data.path}: {str(error).strip().splitlines()[0]}") from error
    same = len(ranks) == len(data.ranks) and all(map(_same, ranks, data.ranks)) and len(samples) == len(data.samples)
    if not same or notices != list(data.notices):
        raise RunUnwritable(f"cannot seal {data.path}: what was written does not read back the same")


def _same(one: RankSeries, other: RankSeries) -> bool:
    fields = ("identity", "rank", "state", "phase_names", "anchor_mono_ns", "anchor_wall_ns", "lost", "torn", "facts")
    tables = ("steps", "device_steps", "comm", "collectives")
    return all(getattr(one, field) == getattr(other, field) for field in (*fields, "groups")) and all(
        _bytes_of(getattr(one, table)) == _bytes_of(getattr(other, table)) for table in tables
    )


def _bytes_of(rows: NDArray[Any] | None) -> bytes | None:
    return None if rows is None else rows.tobytes()


def _clean(run_dir: Path) -> None:
    """Remove what the sealed files replace; a ring that we cannot read stays, and so does its folder."""
    meta = read_meta(run_dir)
    shutil.rmtree(run_dir / STEPS, ignore_errors=True)
    shutil.rmtree(run_dir / _STAGE, ignore_errors=True)
    (run_dir / SAMPLES).unlink(missing_ok=True)
    for path in ring_files(run_dir, meta):
        with suppress(RingError, OSError):
            reader = RingReader(path)
            header = reader.header()
            reader.close()
            if not process_alive(header.pid, header.start_ticks):
                path.unlink()
    session = meta.get("session")
    if isinstance(session, str) and session and Path(session) != run_dir / "rings":
        remove_session(Path(session))


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)

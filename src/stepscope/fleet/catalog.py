"""The catalog: a record of each run in a DuckDB file, kept up to date from the folders of runs and archives.

    $XDG_STATE_HOME/stepscope/fleet/catalog.duckdb    the tables
    $XDG_STATE_HOME/stepscope/fleet/.lock             one process at a time

Without ``XDG_STATE_HOME`` it is ``~/.local/state``; only this user can read it.

Tables: ``about`` (the version), ``files`` (what has been read: folder, name of the run's folder, the stamp of its files
and its line of a list as JSON), and ``runs``, ``run_hosts``, ``run_findings`` and ``run_gpus`` (``fleet/record.py``).
``number`` joins them.

The run folders are the truth, the catalog is a copy: an update compares stamps (time, size and inode of ``run.json``,
``summary.json``, ``findings.json`` and ``labels.json``) and reads only what changed, in one transaction.  A file
that is damaged, of another version, or readable by others is made again; without room on the disk or in memory it
stays as it is.  DuckDB lets one process write, or several read, so every use is short and holds the lock: shared to
read, exclusively to write.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.archive.manifest import entry_of_facts, run_facts
from stepscope.errors import NotARun, RunError, UsageError
from stepscope.fleet.columns import Fleet, read_fleet
from stepscope.fleet.record import (
    FINDING_COLUMNS,
    GPU_COLUMNS,
    HOST_COLUMNS,
    RUN_COLUMNS,
    RunRecord,
    record_of,
)
from stepscope.records.files import private_folder
from stepscope.records.text import Progress, no_progress
from stepscope.store.catalog import ACTIVE, KnownRuns, RunEntry, known_stamp, run_entry
from stepscope.store.documents import load_summary, read_meta
from stepscope.store.sealed.sql import QUERY_S, QueryResult, ask
from stepscope.store.user_runs import folder_tag, state_path

if TYPE_CHECKING:
    from stepscope.archive.cache import Archive

__all__ = ["RunCatalog", "Update", "catalog_path", "fleet_of", "known_runs"]

VERSION = 1
"""Of the tables; a catalog of another version is made again."""
FILE = "catalog.duckdb"
LOCK = ".lock"
WAIT_S = 120.0
"""For the lock: building the catalog of the largest folders takes about a minute."""
PAUSE_S = 0.05
RUNS_AT_ONCE = 1000
"""Records in memory before they are written."""
NO_ROOM = tuple(map(os.strerror, (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)))
"""What DuckDB's messages quote when a file cannot grow."""
_QUOTE = "'"
MEMORY = "256MB"
"""DuckDB's limit for its own buffers."""

FILE_COLUMNS: Mapping[str, str] = {
    "number": "BIGINT", "folder": "VARCHAR", "name": "VARCHAR", "stamp": "VARCHAR", "active": "BOOLEAN",
    "facts": "VARCHAR", "problem": "VARCHAR",
}  # fmt: skip
TABLES: Mapping[str, Mapping[str, str]] = {
    "files": FILE_COLUMNS,
    "runs": {"number": "BIGINT", **RUN_COLUMNS},
    "run_hosts": {"number": "BIGINT", **HOST_COLUMNS},
    "run_findings": {"number": "BIGINT", **FINDING_COLUMNS},
    "run_gpus": {"number": "BIGINT", **GPU_COLUMNS},
}
NUMPY_TYPES: Mapping[str, Any] = {"BIGINT": np.int64, "INTEGER": np.int32, "DOUBLE": np.float64, "BOOLEAN": np.bool_}


def catalog_path(environ: Mapping[str, str]) -> Path:
    return state_path(environ) / "fleet" / FILE


@dataclass(kw_only=True)
class Update:
    """What an update did."""

    runs: int = 0
    read: int = 0
    """Folders that were read because they are new or changed."""
    removed: int = 0
    rebuilt: str = ""
    """Why an existing catalog was made again; empty: it was not."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each run that could not be read."""


class _Damaged(Exception):
    """DuckDB could not read the file."""


@dataclass(kw_only=True)
class _Batch:
    """Rows to be written."""

    files: list[dict[str, Any]] = field(default_factory=list)
    records: list[tuple[int, RunRecord]] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    """Numbers of the rows to be removed."""


class RunCatalog:
    """The catalog in a file; safe for several processes and threads."""

    def __init__(self, path: Path, *, wait_s: float = WAIT_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._wait_s = wait_s
        self._now_s = now_s

    @classmethod
    def of_user(cls, environ: Mapping[str, str]) -> RunCatalog:
        return cls(catalog_path(environ))

    # -- update -------------------------------------------------------------------------------------------------------

    def update(
        self,
        folders: Mapping[str, Path],
        archives: Sequence[Archive] = (),
        *,
        progress: Progress = no_progress,
    ) -> Update:
        """Bring the rows of these folders up to date; ``folders``: by their key, under which their runs are found.

        Rows of other folders stay.  RunError if the file cannot be written.
        """
        try:
            return self._update(folders, archives, progress)
        except _Damaged as error:  # found while it was read
            self._discard()
            try:
                done = self._update(folders, archives, progress)
            except _Damaged as second:
                raise RunError(f"the catalog {self.path} cannot be used: {second}") from second
            done.rebuilt = str(error)
            return done

    def _update(self, folders: Mapping[str, Path], archives: Sequence[Archive], progress: Progress) -> Update:
        done = Update()
        with self._open(write=True, update=done) as con:
            known = _known_files(con)
            con.execute("BEGIN")
            try:
                number = con.execute("SELECT coalesce(max(number), 0) FROM files").fetchall()[0][0]
                for place, (key, folder) in enumerate(folders.items()):
                    own = known.get(key, {})
                    share = _share(progress, place, len(folders) + len(archives))
                    number = self._update_folder(con, key, folder, own, number, done, share)
                for place, archive in enumerate(archives, len(folders)):
                    key = str(archive.url)
                    share = _share(progress, place, len(folders) + len(archives))
                    number = self._update_archive(con, archive, known.get(key, {}), number, done, share)
                con.execute("COMMIT")
            except BaseException:
                import duckdb

                with suppress(duckdb.Error):  # what failed is reported; closing rolls back, too
                    con.execute("ROLLBACK")
                raise
        return done

    def _discard(self) -> None:
        """Remove a damaged file."""
        with self._locked(exclusive=True):
            for path in (self.path, self.path.with_name(f"{self.path.name}.wal")):
                path.unlink(missing_ok=True)

    def _update_folder(
        self, con: Any, key: str, folder: Path, known: _Known, number: int, done: Update, progress: Progress
    ) -> int:
        batch, gone = _Batch(), dict(known)
        names = _run_names(folder)
        for place, name in enumerate(names):
            progress(place, len(names))
            old = gone.pop(name, None)
            stamp = known_stamp(folder / name)
            if stamp is None:  # being made or deleted
                gone |= {name: old} if old is not None else {}
                continue
            done.runs += 1
            text = json.dumps(stamp)
            if old is not None and old.stamp == text and not old.active:
                done.problems += [old.problem] if old.problem else []
                continue
            number += 1
            done.read += 1
            _read_run(batch, folder / name, key, number, text, done)
            if old is not None:
                batch.replaced.append(old.number)
            if len(batch.files) >= RUNS_AT_ONCE:
                _write(con, batch)
                batch = _Batch()
        batch.replaced += [old.number for old in gone.values()]
        _write(con, batch)
        done.removed += len(gone)
        return number

    def _update_archive(
        self, con: Any, archive: Archive, known: _Known, number: int, done: Update, progress: Progress
    ) -> int:
        """An archived run never changes under its digest, which is in the path of its copy on this disk."""
        entries, problems = archive.entries()
        done.problems += problems
        gone = dict(known)
        fresh: list[RunEntry] = []
        for entry in entries:
            done.runs += 1
            old = gone.pop(entry.path.name, None)
            if old is not None and old.stamp != entry.path.parent.name:
                _remove(con, [old.number])
                old = None
            if old is None:
                fresh.append(entry)
        for at in range(0, len(fresh), RUNS_AT_ONCE):
            batch = _Batch()
            part = archive.summaries(fresh[at : at + RUNS_AT_ONCE], progress=progress)
            for original, entry in zip(fresh[at:], part, strict=False):
                number += 1
                done.read += 1
                with suppress(NotARun):
                    record = record_of(
                        entry.url, run_facts(entry), read_meta(entry.path), load_summary(entry.path) or {}
                    )
                    batch.records.append((number, record))
                stamp = original.path.parent.name
                batch.files.append(_file_row(number, str(archive.url), original, stamp))
            _write(con, batch)
        _remove(con, [old.number for old in gone.values()])
        done.removed += len(gone)
        return number

    # -- reading ------------------------------------------------------------------------------------------------------

    def entries(self, key: str, folder: Path) -> KnownRuns:
        """The finished runs of a folder as the last update saw them, for ``list_runs(known=)``; empty without any."""
        found = KnownRuns()
        with self._reading() as con:
            if con is None:
                return found
            rows = con.execute(
                "SELECT name, stamp, facts FROM files WHERE folder = ? AND NOT active AND facts IS NOT NULL", [key]
            ).fetchall()
        for name, stamp, facts in rows:
            entry = entry_of_facts(json.loads(facts), name, folder / name)
            found[name] = tuple(None if each is None else tuple(each) for each in json.loads(stamp)), entry
        return found

    def fleet(self, keys: Iterable[str] | None = None, *, since_wall_ns: int | None = None) -> Fleet:
        """The runs of these folders (all) that started since then, as arrays."""
        with self._reading() as con:
            if con is None:
                return Fleet()
            chosen = None if keys is None else list(keys)
            return read_fleet(con.execute, chosen, since_wall_ns)

    def query(self, sql: str, *, keys: Sequence[str] | None = None, limit_s: float = QUERY_S) -> QueryResult:
        """Run one query on the runs of these folders (all); UsageError, in one line, if it is invalid or too slow.

        On a copy in memory: a long query blocks nobody, and no query can change the catalog.
        """
        import duckdb

        with duckdb.connect(config={"threads": 2}) as con:
            _make_tables(con)
            with self._reading() as own:
                if own is None:
                    raise UsageError("there is no catalog yet; `stepscope fleet` makes it")
                own.close()
                con.execute(f"ATTACH '{str(self.path).replace(_QUOTE, _QUOTE * 2)}' AS fleet (READ_ONLY)")
                marks = "" if keys is None else f" WHERE folder IN ({', '.join('?' * len(keys)) or 'NULL'})"
                values = [] if keys is None else list(keys)
                for table in TABLES:
                    chosen = f" WHERE number IN (SELECT number FROM fleet.files{marks})"
                    con.execute(f"INSERT INTO {table} SELECT * FROM fleet.{table}{chosen}", values)
                con.execute("DETACH fleet")
            return ask(con, sql, limit_s=limit_s)

    # -- the file -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """A connection to read; None if there is no catalog that can be used.  RunError if it turns out damaged."""
        try:
            with self._open(write=False) as con:
                yield con
        except _Damaged as error:
            self._discard()
            raise RunError(f"the catalog was damaged and has been removed ({error}); try again") from error

    @contextmanager
    def _open(self, *, write: bool, update: Update | None = None) -> Iterator[Any]:
        """A connection while the lock is held; to read: None if there is no catalog that can be used.

        _Damaged if DuckDB fails to read it meanwhile.
        """
        import duckdb

        try:
            private_folder(self.path.parent)
            with self._locked(exclusive=write):
                con = self._connect(write=write, update=update or Update())
                try:
                    yield con
                finally:
                    if con is not None:
                        con.close()
        except duckdb.Error as error:
            text = str(error).splitlines()[0]
            if _is_short_of_room(error):
                raise RunError(f"the catalog {self.path} cannot be used: {text}") from error
            raise _Damaged(text) from error
        except OSError as error:
            raise RunError(f"the catalog {self.path} cannot be used: {error.strerror or error}") from error

    def _connect(self, *, write: bool, update: Update) -> Any:
        import duckdb

        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": 2,
            "memory_limit": MEMORY,
            "autoinstall_known_extensions": False,
        }
        if self.path.exists():
            try:
                self._check_owner()
                con = duckdb.connect(str(self.path), read_only=not write, config=config)
                try:
                    _check(con)
                except BaseException:
                    con.close()
                    raise
                return con
            except (duckdb.Error, ValueError) as error:
                if _is_short_of_room(error):
                    raise
                update.rebuilt = str(error).splitlines()[0]
        if not write:
            return None
        for path in (self.path, self.path.with_name(f"{self.path.name}.wal")):
            path.unlink(missing_ok=True)
        before = os.umask(0o077)
        try:
            con = duckdb.connect(str(self.path), config=config)
        except duckdb.Error as error:
            raise OSError(errno.EIO, str(error).splitlines()[0]) from error
        finally:
            os.umask(before)
        _make_tables(con)
        return con

    def _check_owner(self) -> None:
        about = self.path.lstat()
        if about.st_uid != os.getuid() or about.st_mode & 0o177077 != 0o100000:
            raise ValueError("it is not a private file of this user")

    @contextmanager
    def _locked(self, *, exclusive: bool) -> Iterator[None]:
        fd = os.open(self.path.with_name(LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._take(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)

    def _take(self, fd: int, kind: int) -> None:
        until_s = self._now_s() + self._wait_s
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._now_s() >= until_s:
                    raise OSError(errno.EBUSY, "another process is updating it; try again in a moment") from None
            time.sleep(PAUSE_S)


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _File:
    number: int
    stamp: str
    active: bool
    problem: str


_Known = dict[str, _File]
"""By name of the run's folder."""


def _is_short_of_room(error: Exception) -> bool:
    """Whether DuckDB lacks disk or memory: then the file is not at fault."""
    import duckdb

    return isinstance(error, duckdb.OutOfMemoryException) or any(text in str(error) for text in NO_ROOM)


def _make_tables(con: Any) -> None:
    con.execute("BEGIN")
    for name, columns in TABLES.items():
        declared = ", ".join(f'"{column}" {kind}' for column, kind in columns.items())
        con.execute(f"CREATE TABLE {name} ({declared})")
    con.execute(f"CREATE TABLE about AS SELECT {VERSION} AS version")
    con.execute("COMMIT")


def _check(con: Any) -> None:
    """ValueError or a DuckDB error if the tables are not those of this version."""
    found = con.execute("SELECT version FROM about").fetchall()
    if found != [(VERSION,)]:
        raise ValueError(f"it has version {found}; this Stepscope has {VERSION}")
    for name, columns in TABLES.items():
        result = con.execute(f"SELECT * FROM {name} LIMIT 0")
        names = [row[0] for row in result.description]
        if result.fetchall() or names != list(columns):
            raise ValueError(f"its table {name} has other columns")


def _known_files(con: Any) -> dict[str, _Known]:
    known: dict[str, _Known] = {}
    rows = con.execute("SELECT folder, name, number, stamp, active, problem FROM files").fetchall()
    for folder, name, number, stamp, active, problem in rows:
        known.setdefault(folder, {})[name] = _File(number=number, stamp=stamp, active=active, problem=problem or "")
    return known


def _write(con: Any, batch: _Batch) -> None:
    _remove(con, batch.replaced)
    _insert(con, "files", batch.files)
    _insert(con, "runs", [{"number": number, **record.run} for number, record in batch.records])
    for table in ("run_hosts", "run_findings", "run_gpus"):
        part = table.removeprefix("run_")
        rows = ({"number": number, **row} for number, record in batch.records for row in getattr(record, part))
        _insert(con, table, list(rows))


def _insert(con: Any, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    kinds = TABLES[table]
    con.register("staged", {column: _column([row.get(column) for row in rows], kind) for column, kind in kinds.items()})
    selected = ", ".join(f'CAST("{column}" AS {kind}) AS "{column}"' for column, kind in kinds.items())
    con.execute(f"INSERT INTO {table} BY NAME SELECT {selected} FROM staged")
    con.unregister("staged")


def _column(values: Sequence[Any], kind: str) -> NDArray[Any]:
    if kind in NUMPY_TYPES:
        missing = [value is None for value in values]
        filled = np.array([0 if value is None else value for value in values], NUMPY_TYPES[kind])
        return np.ma.masked_array(filled, mask=missing)
    column = np.empty(len(values), object)
    column[:] = list(values)
    return column


def _remove(con: Any, numbers: Sequence[int]) -> None:
    if not numbers:
        return
    con.register("gone", {"number": np.array(numbers, np.int64)})
    for table in TABLES:
        con.execute(f"DELETE FROM {table} WHERE number IN (SELECT number FROM gone)")
    con.unregister("gone")


# -- reading runs -----------------------------------------------------------------------------------------------------


def _run_names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as found:
            return sorted(entry.name for entry in found if not entry.name.startswith("."))
    except OSError:
        return []


def _read_run(batch: _Batch, path: Path, key: str, number: int, stamp: str, done: Update) -> None:
    try:
        meta, summary = read_meta(path), load_summary(path) or {}
        entry = run_entry(path, meta=meta, summary=summary)
        record = record_of(_id_of(key, path.name), run_facts(entry), meta, summary)
    except NotARun as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one run, the others are in the catalog
        problem = f"{path} cannot be read: {type(error).__name__}: {error}"
    else:
        batch.records.append((number, record))
        batch.files.append(_file_row(number, key, entry, stamp))
        return
    done.problems.append(problem)
    row = {"number": number, "folder": key, "name": path.name, "stamp": stamp, "active": False, "problem": problem}
    batch.files.append(row)


def _id_of(key: str, name: str) -> str:
    """The ID of a run; ``key``: the tag of its folder (``store/user_runs.py``)."""
    return f"{name}~{key}"


def _file_row(number: int, key: str, entry: RunEntry, stamp: str) -> dict[str, Any]:
    facts = json.dumps(run_facts(entry), separators=(",", ":"))
    active = entry.status in ACTIVE
    return {"number": number, "folder": key, "name": entry.path.name, "stamp": stamp, "active": active, "facts": facts}


def _share(progress: Progress, place: int, places: int) -> Progress:
    """Progress of one of several folders, as if all had as many runs."""
    return lambda done, total: progress(place * max(total, 1) + done, places * max(total, 1))


# -- lists ------------------------------------------------------------------------------------------------------------


def known_runs(folder: Path, environ: Mapping[str, str]) -> KnownRuns:
    """What the user's catalog knows of a folder, for ``list_runs``; empty without a catalog, or if it is in use."""
    path = catalog_path(environ)
    try:
        return RunCatalog(path, wait_s=0.0).entries(folder_tag(folder), folder) if path.exists() else {}
    except (OSError, RunError):
        return {}


# -- records without folders ------------------------------------------------------------------------------------------


def fleet_of(records: Iterable[RunRecord]) -> Fleet:
    """The fleet of these records, in memory."""
    import duckdb

    with duckdb.connect(config={"threads": 2}) as con:
        _make_tables(con)
        _write(con, _Batch(records=list(enumerate(records))))
        return read_fleet(con.execute, None, None)

"""Numbers and texts from an untrusted SQLite file, as columns.

The file is opened read-only and immutable, so its locks, journals and triggers are never used. Only tables with known
names are read, no views and no virtual tables, and only their stored columns, never generated ones. Every value is
cast, so text in a numeric column becomes a number. Damage detected by SQLite is a TraceError.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from stepscope.errors import TraceError
from stepscope.traces.model.columns import Ints

__all__ = ["MAGIC", "Database"]

MAGIC: Final = b"SQLite format 3\0"
CHUNK: Final = 1 << 16
LONGEST_VALUE: Final = 64 << 20


class Database:
    """A read-only database.

    ``with Database(path) as database: database.numbers("TABLE", {"start": 0})``
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: dict[str, frozenset[str]] = {}
        try:
            self._connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
        except sqlite3.Error as error:
            raise self._damaged(error) from None

    def __enter__(self) -> Database:
        try:
            if sys.version_info >= (3, 11):
                self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
            self._connection.text_factory = lambda data: data.decode(errors="replace")
            for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
                self._connection.execute(f"PRAGMA {pragma}")
            found = self._connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
            self.tables = frozenset(
                name
                for name, sql in found
                if isinstance(sql, str) and not sql[:30].upper().startswith("CREATE VIRTUAL")
            )
        except (sqlite3.Error, ValueError, OverflowError) as error:
            self._connection.close()
            raise self._damaged(error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        if isinstance(error, (sqlite3.Error, ValueError, OverflowError)):
            raise self._damaged(error) from None

    def columns(self, table: str) -> frozenset[str]:
        """Return the stored columns; empty if there is no such table."""
        if table not in self._columns:
            found = self._connection.execute(f"PRAGMA table_info({table})") if table in self.tables else ()
            self._columns[table] = frozenset(str(row[1]) for row in found)
        return self._columns[table]

    def numbers(self, table: str, wanted: Mapping[str, int]) -> dict[str, Ints]:
        """Read integer columns; ``wanted`` maps names to the default for a missing value or column."""
        chunks = [numbers for numbers, _ in self.chunks(table, wanted, ())]
        joined = np.concatenate(chunks) if chunks else np.empty((0, len(wanted)), np.int64)
        return {name: np.ascontiguousarray(joined[:, at]) for at, name in enumerate(wanted)}

    def chunks(
        self, table: str, wanted: Mapping[str, int], texts: Sequence[str]
    ) -> Iterator[tuple[Ints, list[tuple[Any, ...]]]]:
        """Yield numbers [rows, wanted], and the texts (or bytes, or None) of each row."""
        there = self.columns(table)
        if not there:
            return
        numbers = [
            f'COALESCE(CAST("{name}" AS INTEGER), {missing})' if name in there else str(missing)
            for name, missing in wanted.items()
        ]
        others = [f'"{name}"' if name in there else "NULL" for name in texts]
        count = len(numbers)
        cursor = self._connection.execute(f"SELECT {', '.join([*numbers, *others])} FROM {table}")
        while others and (rows := cursor.fetchmany(CHUNK)):
            yield np.array([row[:count] for row in rows], np.int64), [row[count:] for row in rows]
        while not others:
            values = np.fromiter(chain.from_iterable(islice(cursor, CHUNK)), np.int64)
            if not len(values):
                return
            yield values.reshape(-1, count), []

    def pairs(self, table: str, key: str, value: str) -> dict[int, str]:
        """Read a table of names."""
        found: dict[int, str] = {}
        if {key, value} <= self.columns(table):
            for numbers, texts in self.chunks(table, {key: -1}, [value]):
                found.update(zip(numbers[:, 0].tolist(), (str(text[0] or "") for text in texts), strict=True))
        return found

    def records(self, table: str, limit: int = 4096) -> list[dict[str, Any]]:
        """Read the first rows of a small table."""
        names = sorted(self.columns(table))
        if not names:
            return []
        columns = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}"' for name in names)
        rows = self._connection.execute(f"SELECT {columns} FROM {table} LIMIT {limit}").fetchall()
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _damaged(self, error: BaseException) -> TraceError:
        return TraceError(f"{self._path} is not a readable SQLite database: {' '.join(str(error).split())}")

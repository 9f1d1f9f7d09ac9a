"""Small records as DuckDB tables: events, findings, ranks and samples, each with columns that do not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import duckdb
    from numpy.typing import NDArray

__all__ = ["Column", "declared", "insert_columns", "make_table"]

_LIST_GLUE = "\x1f"
_DTYPES = {"BIGINT": np.int64, "DOUBLE": np.float64, "BOOLEAN": np.bool_}


def make_table(
    con: duckdb.DuckDBPyConnection, name: str, types: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> None:
    """``CREATE TABLE name`` with these columns; a value that is missing or None is NULL."""
    con.execute(f"CREATE TABLE {name} {declared(types)}")
    columns = {column: Column(kind, len(rows)) for column, kind in types.items()}
    for column, made in columns.items():
        there = [(place, value) for place, row in enumerate(rows) if (value := row.get(column)) is not None]
        made.put(np.array([place for place, _ in there], np.intp), [value for _, value in there])
    insert_columns(con, name, types, columns)


def declared(types: Mapping[str, str]) -> str:
    return f"({', '.join(f'{_quoted(column)} {kind}' for column, kind in types.items())})"


def insert_columns(
    con: duckdb.DuckDBPyConnection, table: str, types: Mapping[str, str], columns: Mapping[str, Column]
) -> None:
    """Rows; columns that are not given are NULL."""
    casts = []
    for column in columns:
        kind, quoted = types[column], _quoted(column)
        cast = f"CAST({quoted} AS {kind})"
        if kind == "VARCHAR[]":
            text = f"CAST({quoted} AS VARCHAR)"
            cast = f"CASE {text} WHEN '' THEN [] ELSE string_split({text}, chr({ord(_LIST_GLUE)})) END::VARCHAR[]"
        casts.append(f"{cast} AS {quoted}")
    con.register("staged", {column: made.array() for column, made in columns.items()})
    con.execute(f"INSERT INTO {table} BY NAME SELECT {', '.join(casts)} FROM staged")
    con.unregister("staged")


def _quoted(name: str) -> str:
    return '"' + name + '"'


class Column:
    """One of a table in the making: so many rows, NULL but for those that are put in."""

    def __init__(self, kind: str, length: int) -> None:
        self._dtype = _DTYPES.get(kind)
        self._values = np.full(length, None, object) if self._dtype is None else np.zeros(length, self._dtype)
        self._missing = np.ones(length, np.bool_)

    def put(self, rows: NDArray[np.intp], values: Sequence[Any]) -> None:
        """Values, none of them missing, into these rows."""
        if self._dtype is not None:
            self._values[rows] = np.array(values, self._dtype)
        else:
            self._values[rows] = [_LIST_GLUE.join(value) if isinstance(value, list) else value for value in values]
        self._missing[rows] = False

    def array(self) -> NDArray[Any]:
        return self._values if self._dtype is None else np.ma.masked_array(self._values, mask=self._missing)

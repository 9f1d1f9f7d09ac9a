"""Data frames without a data frame library: what ``stepscope.open``, ``compare`` and ``traces.open`` answer with.

A ``Frame`` is columns by name, as numpy arrays. ``to_pandas``, ``to_polars`` and ``to_arrow`` convert it if that
library is installed; numpy arrays are handed over as they are.
"""

from __future__ import annotations

import csv
import html
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Frame", "frame_of_database", "frame_of_findings", "frame_of_records", "frame_of_rows"]

SHOWN_ROWS = 20
"""Rows in a notebook cell."""
FINDING_COLUMNS = (
    "kind", "severity", "title", "ranks", "phase", "first_step", "last_step", "cost_share", "cost_seconds",
    "cost_rank_hours", "confidence", "advice",
)  # fmt: skip


class Frame:
    """Columns of equal length by name; units are in the names (``_ns``, ``_bytes``, ``_share``).

    Unknown numbers are NaN, unknown texts None. ``left_out`` counts rows beyond the limit of a table (mostly 1,000).
    """

    def __init__(
        self, columns: Mapping[str, Sequence[Any] | NDArray[Any]], *, note: str = "", left_out: int = 0
    ) -> None:
        self._columns = {name: _column(values) for name, values in columns.items()}
        if len({len(column) for column in self._columns.values()}) > 1:
            raise ValueError("the columns of a frame have different lengths")
        self.note = note
        """What a reader of these figures should know."""
        self.left_out = left_out

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def keys(self) -> tuple[str, ...]:
        """Return the names, so that ``dict(frame)`` has the columns."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; columns: {', '.join(self._columns)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self._columns.values()), ()))

    def __repr__(self) -> str:
        return f"Frame({len(self)} rows: {', '.join(self._columns)})"

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as plain values; unknown ones are None."""
        return self._rows(slice(None))

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame``; pandas must be installed."""
        return _library("pandas").DataFrame(dict(self._columns))

    def to_polars(self) -> Any:
        """Return a ``polars.DataFrame``; polars must be installed."""
        return _library("polars").DataFrame(self._for_arrow())

    def to_arrow(self) -> Any:
        """Return a ``pyarrow.Table``; pyarrow must be installed."""
        return _library("pyarrow").table(self._for_arrow())

    def write_csv(self, path: str | PathLike[str]) -> None:
        """Write the rows to a file, under a line with the names; unknown values are empty, lists words in a cell."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            for row in self.rows():
                writer.writerow([_cell(value) for value in row.values()])

    def _repr_html_(self) -> str:
        """Return the first rows as a table, which a notebook shows."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        lines = [
            "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values()) + "</tr>"
            for row in self._rows(slice(SHOWN_ROWS))
        ]
        rest = len(self) - len(lines)
        below = f"<p>{rest:,} more rows</p>" if rest else ""
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{below}{note}"

    def _rows(self, chosen: slice) -> list[dict[str, Any]]:
        lists = {name: [_plain(value) for value in column[chosen].tolist()] for name, column in self._columns.items()}
        return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]

    def _for_arrow(self) -> dict[str, Any]:
        return {name: column.tolist() if column.dtype == object else column for name, column in self._columns.items()}


# -- making frames ----------------------------------------------------------------------------------------------------


def frame_of_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, note: str = "", left_out: int = 0) -> Frame:
    """Return rows, whose values are in the order of ``columns``, as a frame."""
    values = zip(*rows, strict=True) if rows else ([] for _ in columns)
    named = {name: list(column) for name, column in zip(columns, values, strict=True)}
    return Frame(named, note=note, left_out=left_out)


def frame_of_records(columns: Sequence[str], records: Sequence[Mapping[str, Any]], *, note: str = "") -> Frame:
    """Return these keys of documents as a frame; a missing key is unknown."""
    return frame_of_rows(columns, [[record.get(name) for name in columns] for record in records], note=note)


def frame_of_findings(findings: Sequence[Mapping[str, Any]]) -> Frame:
    """Return findings of a run or of traces, in the form of ``summary.json``, as a frame."""
    rows = []
    for found in findings:
        first, last = found.get("steps") or (None, None)
        cost = found.get("cost") or {}
        flat = {
            **found,
            "ranks": tuple(found.get("ranks") or ()),
            "advice": tuple(found.get("advice") or ()),
            "first_step": first,
            "last_step": last,
            **{f"cost_{name}": cost.get(name) for name in ("share", "seconds", "rank_hours")},
        }
        rows.append([flat.get(name) for name in FINDING_COLUMNS])
    return frame_of_rows(FINDING_COLUMNS, rows)


def frame_of_database(columns: Mapping[str, NDArray[Any]]) -> Frame:
    """Return columns as DuckDB gives them, masked where a value is unknown, as a frame."""
    return Frame({name: _unmasked(values) for name, values in columns.items()})


def _unmasked(values: NDArray[Any]) -> NDArray[Any]:
    missing = np.ma.getmaskarray(values)
    data: NDArray[Any] = np.asarray(np.ma.getdata(values))
    if data.dtype.kind in "iuf" and missing.any():
        data = data.astype(np.float64)
        data[missing] = np.nan
    elif data.dtype.kind == "M" and missing.any():
        data = data.copy()
        data[missing] = np.datetime64("NaT")
    elif data.dtype == object or missing.any():
        out = np.empty(len(data), object)
        pairs = zip(data.tolist(), missing.tolist(), strict=True)
        out[:] = [None if unknown else _plain_list(value) for value, unknown in pairs]
        data = out
    return data


def _plain_list(value: Any) -> Any:
    return tuple(value.tolist()) if isinstance(value, np.ndarray) else value


def _column(values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        if len(known) == len(values):
            return np.array(values)
        return np.array([np.nan if value is None else value for value in values], np.float64)
    if known and len(known) == len(values) and all(isinstance(value, bool) for value in known):
        return np.array(values, np.bool_)
    out = np.empty(len(values), object)
    out[:] = values
    return out


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and value != value else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _library(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise ImportError(
            f"{name} is not installed; use .rows(), or the columns as numpy arrays: dict(frame)"
        ) from None

"""The Parquet table of an operation-level trace, a row per operation: read by DuckDB, checked, as plain columns.

``dp_rank``, ``stage``, ``rank``, ``step``, ``seq_id`` (whole numbers), ``optype`` (a name), ``start_ts`` and
``duration`` (seconds) must be there; ``mc`` and ``gmc`` (model chunk of the stage, and of the model) may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.errors import TraceError
from stepscope.records.sql_paths import unglobbed
from stepscope.whatif.kinds import KINDS

__all__ = ["Table", "read_table"]

WHOLE = ("dp_rank", "stage", "rank", "step", "seq_id")
CHUNKS = ("mc", "gmc")
"""−1 or nothing where they do not apply."""
TIMES = ("start_ts", "duration")
_INTEGER_TYPES = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
_NUMBER_TYPES = (*_INTEGER_TYPES, "UBIGINT", "HUGEINT", "FLOAT", "DOUBLE")
_NAMES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Table:
    """Operations of known kinds only; no value missing, no time that is none."""

    columns: Mapping[str, Any]
    """int64 and float64 arrays by the names above, and ``kind``: the place in ``KINDS``."""
    unknown: int
    unknown_names: tuple[str, ...]


def read_table(path: Path) -> Table:
    """TraceError, in one sentence, when there is no such table."""
    import duckdb

    if not path.is_file():
        raise TraceError(f"{path} is not a file" if path.exists() else f"{path} is not there")
    source = f"read_parquet({unglobbed(path)})"
    kinds = "[" + ", ".join(f"'{kind}'" for kind in KINDS) + "]"
    try:
        with duckdb.connect(config={"threads": 2}) as con:
            con.execute("SET autoinstall_known_extensions = false")
            con.execute("SET autoload_known_extensions = false")
            types = {name: kind for name, kind, *_ in con.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
            _check_types(path, types)
            chunks = [
                f"coalesce(try_cast({name} AS BIGINT), -1) AS {name}" if name in types else f"-1::BIGINT AS {name}"
                for name in CHUNKS
            ]
            selected = [f"{name}::BIGINT AS {name}" for name in WHOLE] + chunks
            selected += [f"{name}::DOUBLE AS {name}" for name in TIMES]
            selected += [f"CASE WHEN optype IS NOT NULL THEN coalesce(list_position({kinds}, optype), 0) END AS optype"]
            fetched: dict[str, Any] = con.execute(f"SELECT {', '.join(selected)} FROM {source}").fetchnumpy()
            others = f"SELECT DISTINCT optype FROM {source} WHERE list_position({kinds}, optype) IS NULL"
            names = [str(name) for (name,) in con.execute(f"{others} ORDER BY 1 LIMIT {_NAMES_SHOWN}").fetchall()]
    except duckdb.Error as error:
        raise TraceError(f"{path} cannot be read as Parquet: {str(error).strip().splitlines()[0]}") from error
    return _checked(path, fetched, names)


def _check_types(path: Path, types: Mapping[str, str]) -> None:
    missing = [name for name in (*WHOLE, "optype", *TIMES) if name not in types]
    if missing:
        raise TraceError(f"{path} is no operation trace: it has no column {', '.join(missing)}")
    wanted = dict.fromkeys(WHOLE, _INTEGER_TYPES) | dict.fromkeys((*TIMES, *CHUNKS), _NUMBER_TYPES)
    for name, allowed in (wanted | {"optype": ("VARCHAR",)}).items():
        if name in types and types[name] not in allowed:
            raise TraceError(f"{path}: column {name} has the wrong type ({types[name]})")


def _checked(path: Path, fetched: Mapping[str, Any], names: list[str]) -> Table:
    if not len(fetched["step"]):
        raise TraceError(f"{path} is empty: no operation in it")
    for name, values in fetched.items():
        _refuse(path, np.ma.getmaskarray(values), f"{name} is missing")
    columns = {name: np.ma.getdata(values) for name, values in fetched.items()}
    columns["kind"] = columns.pop("optype").astype(np.int64) - 1
    known = columns["kind"] >= 0
    if not known.any():
        raise TraceError(f"{path} holds no operation of a kind the model knows (forward-compute, optimizer …)")
    columns = {name: values[known] for name, values in columns.items()}
    for name in TIMES:
        _refuse(path, ~np.isfinite(columns[name]), f"{name} is not a number")
    for name in ("duration", "dp_rank", "stage", "rank", "seq_id"):
        _refuse(path, columns[name] < 0, f"{name} is negative")
    return Table(columns=columns, unknown=int((~known).sum()), unknown_names=tuple(names))


def _refuse(path: Path, bad: Any, what: str) -> None:
    count = int(bad.sum())
    if count:
        raise TraceError(f"{path}: {what} in {count:,} of {len(bad):,} rows")

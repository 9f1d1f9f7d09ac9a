"""Small records as DuckDB tables: samples, events, findings and ranks, each with columns that do not change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import duckdb

__all__ = ["make_table", "sample_rows", "sample_table"]

SAMPLE_COLUMNS = {
    "wall_ns": "BIGINT",
    "mono_ns": "BIGINT",
    "node": "VARCHAR",
    "kind": "VARCHAR",
    "pid": "BIGINT",
    "rank": "BIGINT",
    "index": "BIGINT",
    "uuid": "VARCHAR",
    "name": "VARCHAR",
    "cpu_percent": "DOUBLE",
    "cpu_count": "BIGINT",
    "own_cpu_percent": "DOUBLE",
    "load1": "DOUBLE",
    "procs_running": "BIGINT",
    "cpu_pressure": "DOUBLE",
    "io_pressure": "DOUBLE",
    "memory_pressure": "DOUBLE",
    "mem_total": "BIGINT",
    "mem_available": "BIGINT",
    "mem_used": "BIGINT",
    "swap_used": "BIGINT",
    "rss": "BIGINT",
    "rss_file": "BIGINT",
    "threads": "BIGINT",
    "net_rx_bps": "DOUBLE",
    "net_tx_bps": "DOUBLE",
    "net_errors_ps": "DOUBLE",
    "net_drops_ps": "DOUBLE",
    "net_speed_bps": "DOUBLE",
    "tcp_out_ps": "DOUBLE",
    "tcp_retrans_ps": "DOUBLE",
    "tcp_errors_ps": "DOUBLE",
    "tcp_timeouts_ps": "DOUBLE",
    "ib_rx_bps": "DOUBLE",
    "ib_tx_bps": "DOUBLE",
    "ib_errors_ps": "DOUBLE",
    "ib_link_downed_ps": "DOUBLE",
    "ib_xmit_wait_ps": "DOUBLE",
    "ib_speed_bps": "DOUBLE",
    "peer": "VARCHAR",
    "peer_node": "BIGINT",
    "sent": "BIGINT",
    "lost": "BIGINT",
    "rtt_us_min": "DOUBLE",
    "rtt_us_p50": "DOUBLE",
    "rtt_us_max": "DOUBLE",
    "disk_read_bps": "DOUBLE",
    "disk_write_bps": "DOUBLE",
    "io_read_bps": "DOUBLE",
    "io_write_bps": "DOUBLE",
    "util_percent": "DOUBLE",
    "mem_util_percent": "DOUBLE",
    "temperature_c": "DOUBLE",
    "power_w": "DOUBLE",
    "power_limit_w": "DOUBLE",
    "sm_clock_mhz": "DOUBLE",
    "mem_clock_mhz": "DOUBLE",
    "throttle_reasons": "VARCHAR[]",
    "extra": "VARCHAR",
}
"""``extra``: JSON of whatever has no column of its own or does not fit its type."""

_LARGEST = 1 << 53
_LIST_GLUE = "\x1f"
_DTYPES = {"BIGINT": np.int64, "DOUBLE": np.float64, "BOOLEAN": np.bool_}


def make_table(
    con: duckdb.DuckDBPyConnection, name: str, types: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> None:
    """``CREATE TABLE name`` with these columns; a value that is missing or None is NULL."""
    staged, casts = {}, []
    for column, kind in types.items():
        staged[column] = _array(kind, [row.get(column) for row in rows])
        quoted = '"' + column + '"'
        cast = f"CAST({quoted} AS {kind})"
        if kind == "VARCHAR[]":
            text = f"CAST({quoted} AS VARCHAR)"
            cast = f"CASE {text} WHEN '' THEN [] ELSE string_split({text}, chr({ord(_LIST_GLUE)})) END::VARCHAR[]"
        casts.append(f"{cast} AS {quoted}")
    con.register("staged", staged)
    con.execute(f"CREATE TABLE {name} AS SELECT {', '.join(casts)} FROM staged")
    con.unregister("staged")


def sample_table(con: duckdb.DuckDBPyConnection, samples: Sequence[Mapping[str, Any]]) -> None:
    make_table(con, "samples", SAMPLE_COLUMNS, [_fitted(sample) for sample in samples])


def sample_rows(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Undo ``sample_table``."""
    samples = []
    for row in rows:
        sample = {name: value for name, value in zip(names, row, strict=True) if value is not None}
        extra = sample.pop("extra", None)
        samples.append({**sample, **json.loads(extra)} if extra else sample)
    return samples


def _fitted(sample: Mapping[str, Any]) -> dict[str, Any]:
    fitting: dict[str, Any] = {}
    extra = {}
    for name, value in sample.items():
        if name != "extra" and _fits(SAMPLE_COLUMNS.get(name), value):
            fitting[name] = value
        elif value is not None:
            extra[name] = value
    if extra:
        fitting["extra"] = json.dumps(extra)
    return fitting


def _fits(kind: str | None, value: Any) -> bool:
    if kind == "BIGINT":
        return type(value) is int and -(1 << 63) <= value < 1 << 63
    if kind == "DOUBLE":
        return type(value) is float or (type(value) is int and abs(value) <= _LARGEST)
    if kind == "VARCHAR":
        return _is_text(value)
    return kind == "VARCHAR[]" and isinstance(value, list) and all(v and _is_text(v) for v in value)


def _is_text(value: Any) -> bool:
    """Text that the database can hold: no lone surrogates, no zero bytes, nothing we glue lists with."""
    return isinstance(value, str) and value.isprintable()


def _array(kind: str, values: list[Any]) -> Any:
    missing = [value is None for value in values]
    dtype = _DTYPES.get(kind)
    if dtype is not None:
        return np.ma.masked_array(np.array([0 if v is None else v for v in values], dtype), mask=missing)
    texts = [_LIST_GLUE.join(value) if isinstance(value, list) else value for value in values]
    return np.array(texts, dtype=object)

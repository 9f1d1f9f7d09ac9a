"""Samples as columns of a table, and back.

Those that an agent of ours writes fit their columns, and are turned into them many at a time; whatever else a line says
is kept as JSON in ``extra``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.store.tables import Column, declared, insert_columns

if TYPE_CHECKING:
    import duckdb
    from numpy.typing import NDArray

__all__ = ["SAMPLE_COLUMNS", "add_samples", "sample_rows"]

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
    "rss_answers": "BIGINT",
    "threads": "BIGINT",
    "log_bytes": "BIGINT",
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
    "span_s": "BIGINT",
    "extra": "VARCHAR",
}
"""``extra``: JSON of whatever has no column of its own or does not fit its type."""

_LARGEST = 1 << 53
_ALWAYS = "wall_ns"
"""So that a sample that says nothing is a row all the same."""


def add_samples(con: duckdb.DuckDBPyConnection, samples: Sequence[Mapping[str, Any]]) -> None:
    """Rows for the table ``samples``, which is made where it is not there."""
    con.execute(f"CREATE TABLE IF NOT EXISTS samples {declared(SAMPLE_COLUMNS)}")
    insert_columns(con, "samples", SAMPLE_COLUMNS, _columns_of(samples))


def _columns_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Samples of one kind have the same fields in the same order: those are made into columns at once."""
    columns = {_ALWAYS: Column(SAMPLE_COLUMNS[_ALWAYS], len(samples))}
    for names, rows in _alike(samples):
        own = [samples[row] for row in rows]
        values = [*zip(*(sample.values() for sample in own), strict=True)]
        if all(map(_all_fit, names, values)):
            _put(columns, len(samples), rows, names, values)
            continue
        fitting = [_fitted(sample) for sample in own]
        for fields, places in _alike(fitting):
            values = [*zip(*(fitting[place].values() for place in places), strict=True)]
            _put(columns, len(samples), [rows[place] for place in places], fields, values)
    return columns


def _alike(samples: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """The fields that samples have, and which have them."""
    found: dict[tuple[str, ...], list[int]] = {}
    for row, sample in enumerate(samples):
        found.setdefault(tuple(sample), []).append(row)
    return list(found.items())


def _put(
    columns: dict[str, Column], length: int, rows: list[int], names: Sequence[str], values: Sequence[Sequence[Any]]
) -> None:
    places = np.array(rows, np.intp)
    for name, own in zip(names, values, strict=True):
        if name not in columns:
            columns[name] = Column(SAMPLE_COLUMNS[name], length)
        columns[name].put(places, own)


def _all_fit(name: str, values: tuple[Any, ...]) -> bool:
    """Told for all of them at once, where that is possible."""
    kind, found = SAMPLE_COLUMNS.get(name), set(map(type, values))
    if name == "extra":
        return False
    if kind == "DOUBLE" and found == {float}:
        return True
    if found == {int}:
        return _fits(kind, min(values)) and _fits(kind, max(values))
    return all(_fits(kind, value) for value in (set(values) if found == {str} else values))


def sample_rows(columns: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """Undo ``add_samples``; ``columns`` as DuckDB gives them, masked where a value is missing.

    Here, too, those that have the same fields are made at once.
    """
    there = {name: ~np.ma.getmaskarray(values) for name, values in columns.items()}
    names = [name for name, mask in there.items() if mask.any()]
    samples: list[dict[str, Any]] = [{} for _ in next(iter(there.values()), ())]
    if not names:
        return samples
    bits = np.packbits(np.stack([there[name] for name in names], axis=1), axis=1)
    alike: dict[bytes, list[int]] = {}
    for row, key in enumerate(bits.view(f"V{bits.shape[1]}").reshape(-1).tolist()):
        alike.setdefault(key, []).append(row)
    for rows in alike.values():
        own = [name for name in names if there[name][rows[0]]]
        if not own:
            continue
        values = [_plain(name, np.ma.getdata(columns[name])[rows].tolist()) for name in own]
        for row, one in zip(rows, zip(*values, strict=True), strict=True):
            samples[row] = _unfolded(dict(zip(own, one, strict=True)))
    return samples


def _plain(name: str, values: list[Any]) -> list[Any]:
    return [list(value) for value in values] if SAMPLE_COLUMNS.get(name) == "VARCHAR[]" else values


def _unfolded(sample: dict[str, Any]) -> dict[str, Any]:
    extra = sample.pop("extra", None)
    return {**sample, **json.loads(extra)} if extra else sample


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

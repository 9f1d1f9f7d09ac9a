"""Small traces, written row by row or made from lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.store.sealed.parquet import connect

TYPES = {
    "dp_rank": "TINYINT", "stage": "TINYINT", "rank": "SMALLINT", "step": "BIGINT", "optype": "VARCHAR",
    "start_ts": "DOUBLE", "duration": "DOUBLE", "seq_id": "INTEGER", "mc": "TINYINT", "mb_id": "TINYINT",
    "gmc": "SMALLINT",
}  # fmt: skip

Row = dict[str, Any]


class Files:
    """A trace and a meta file in one folder."""

    def __init__(self, folder: Path) -> None:
        self.trace = folder / "trace.parquet"
        self.meta = folder / "meta.yaml"

    def write(self, rows: Sequence[Mapping[str, Any]], types: Mapping[str, str] = TYPES, **sizes: Any) -> Files:
        self.meta.write_text("".join(f"{name}: {value}\n" for name, value in sizes.items()))
        with connect(0) as con:
            con.execute(f"CREATE TEMP TABLE t ({', '.join(f'{name} {kind}' for name, kind in types.items())})")
            values = [[row.get(name) for name in types] for row in rows]
            if values:
                con.executemany(f"INSERT INTO t VALUES ({', '.join('?' for _ in types)})", values)
            con.execute(f"COPY t TO '{self.trace}' (FORMAT parquet)")
        return self


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(scope="session")
def op() -> Callable[..., Row]:
    """A row: kind, start, end; the rest by name."""

    def make(kind: str, start: float, end: float, **rest: Any) -> Row:
        where = {"dp_rank": 0, "stage": 0, "step": 0, "seq_id": 0, "mc": 0, "mb_id": 0, **rest}
        where = {"rank": where["stage"] * 100 + where["dp_rank"], "gmc": where["stage"], **where}
        return {**where, "optype": kind, "start_ts": start, "duration": end - start}

    return make


@pytest.fixture(scope="session")
def two_lanes(op: Callable[..., Row]) -> list[Row]:
    """One stage, two data-parallel ranks; the second computes at half the pace.  15 s, 12 s without that."""
    rows = []
    for lane, (forward, backward) in enumerate(((2.0, 4.0), (4.0, 8.0))):
        done = 1 + forward + backward
        rows += [
            op("params-all-gather", 0, 1, dp_rank=lane),
            op("forward-compute", 1, 1 + forward, dp_rank=lane),
            op("backward-compute", 1 + forward, done, dp_rank=lane),
            op("grads-reduce-scatter", done, 14, dp_rank=lane),
            op("optimizer", 14, 15, dp_rank=lane),
        ]
    return rows


@pytest.fixture(scope="session")
def two_stages(op: Callable[..., Row]) -> list[Row]:
    """Two stages, one micro-batch, one data-parallel rank; the second stage computes at half the pace.  11 s."""
    return [
        op("forward-compute", 0, 1),
        op("forward-send", 1, 1.5),
        op("forward-recv", 0, 1.5, stage=1),
        op("forward-compute", 1.5, 3.5, stage=1),
        op("backward-compute", 3.5, 7.5, stage=1),
        op("backward-send", 7.5, 8, stage=1),
        op("backward-recv", 1, 8),
        op("backward-compute", 8, 10),
        op("optimizer", 7.5, 8.5, stage=1),
        op("optimizer", 10, 11),
    ]

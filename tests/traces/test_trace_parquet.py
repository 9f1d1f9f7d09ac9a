"""Our Parquet is Parquet: DuckDB reads it, and it comes back as it was."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.reading import cache
from stepscope.traces.reading.cache import Places, read_column, read_strings, write_table

TYPES = ("uint8", "int16", "int32", "int64", "float32", "float64")


def written(columns: dict[str, Any]) -> tuple[memoryview, Places]:
    file = io.BytesIO()
    places = write_table(file, columns)
    return memoryview(file.getvalue()), places


def extremes(name: str) -> np.ndarray[Any, Any]:
    if name.startswith("float"):
        return np.array([0.0, -1.5, np.nan, np.inf, np.finfo(name).max, np.finfo(name).tiny], name)
    return np.array([0, 1, np.iinfo(name).min, np.iinfo(name).max, 7, 7], name)


@pytest.mark.parametrize("group_rows", [2, 5, 6, 100])
def test_there_and_back_and_to_duckdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int) -> None:
    monkeypatch.setattr(cache, "GROUP_ROWS", group_rows)
    columns: dict[str, Any] = {name: extremes(name) for name in TYPES}
    columns["text"] = ["", "a", "ä 日本", "x" * 1000, "line\nbreak", "'quoted'"]
    path = tmp_path / "t.parquet"
    with path.open("xb") as file:
        places = write_table(file, columns)
    data = memoryview(path.read_bytes())
    with duckdb.connect() as database:
        theirs = database.execute("SELECT * FROM read_parquet(?)", [str(path)]).fetchnumpy()
    for name in TYPES:
        ours = read_column(data, places[name], 6, name)
        for got in (ours, np.ma.getdata(theirs[name])):
            assert got.dtype == columns[name].dtype
            assert got.tobytes() == columns[name].tobytes()
    assert read_strings(data, places["text"], 6) == columns["text"]
    assert list(theirs["text"]) == columns["text"]


def test_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with path.open("xb") as file:
        places = write_table(file, {"a": np.empty(0, np.int64), "b": []})
    assert places == {"a": [], "b": []}
    assert read_column(memoryview(b""), [], 0, np.int64).tolist() == []
    with duckdb.connect() as database:
        found = database.execute("DESCRIBE SELECT * FROM read_parquet(?)", [str(path)]).fetchall()
        assert [row[:2] for row in found] == [("a", "BIGINT"), ("b", "VARCHAR")]
        assert database.execute("SELECT count(*) FROM read_parquet(?)", [str(path)]).fetchall() == [(0,)]


def test_many_columns(tmp_path: Path) -> None:
    """Thrift writes lists of 15 and more in another way."""
    path = tmp_path / "t.parquet"
    with path.open("xb") as file:
        write_table(file, {f"c{at}": np.array([at]) for at in range(200)})
    with duckdb.connect() as database:
        assert database.execute("SELECT * FROM read_parquet(?)", [str(path)]).fetchall() == [tuple(range(200))]


def test_views_of_arrays_that_are_not_contiguous() -> None:
    values = np.arange(20, dtype=np.int64)[::3]
    data, places = written({"a": values})
    assert read_column(data, places["a"], len(values), np.int64).tolist() == values.tolist()


@pytest.mark.parametrize(
    "pages",
    [
        [],
        [(0, 10, 40)],
        [(10**9, 10, 40)],
        [(-5, 10, 40)],
        [(4, -1, 40)],
        [(4, 3, 40)],
    ],
)
def test_pages_that_cannot_be(pages: list[tuple[int, int, int]]) -> None:
    data, _ = written({"a": np.arange(5, dtype=np.int64)})
    with pytest.raises((ValueError, cache.zstandard.ZstdError)):
        read_column(data, pages, 5, np.int64)


def test_other_rows_or_types_than_there_are() -> None:
    data, places = written({"a": np.arange(5, dtype=np.int64), "b": ["a", "b", "c", "", "d"]})
    for rows, dtype in ((4, "int64"), (6, "int64"), (5, "int32")):
        with pytest.raises(ValueError, match=r"page|rows"):
            read_column(data, places["a"], rows, dtype)
    for rows in (4, 6):
        with pytest.raises(ValueError, match="rows"):
            read_strings(data, places["b"], rows)
    with pytest.raises(ValueError, match=r"page|rows"):
        read_strings(data, places["a"], 5)


@settings(max_examples=examples(200))
@given(st.data())
def test_a_changed_byte_of_a_page_is_noticed(data: st.DataObject) -> None:
    whole, places = written({"a": np.arange(100, dtype=np.int64)})
    start, packed, _ = places["a"][0]
    at = data.draw(st.integers(start, start + packed - 1))
    change = data.draw(st.integers(1, 255))
    damaged = bytearray(whole)
    damaged[at] ^= change
    try:
        found = read_column(memoryview(bytes(damaged)), places["a"], 100, np.int64)
    except (ValueError, cache.zstandard.ZstdError):
        return
    # A bit that Zstandard does not use.
    assert found.tolist() == list(range(100))

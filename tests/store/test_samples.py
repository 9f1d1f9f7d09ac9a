"""Samples of long runs: all of them on disk, of very many some in memory, the same ones from either form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
from example_counts import examples
from fakes.cluster import Cluster
from fakes.samples import with_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import record

from stepscope.agent.disk_space import SEGMENT_S, SampleKeeper
from stepscope.store.file_io import append_jsonl
from stepscope.store.live import sample_files
from stepscope.store.live.sample_files import Thinner, sample_segments, source_of, thinned
from stepscope.store.load import open_run
from stepscope.store.sealed import samples, seal
from stepscope.store.sealed.samples import add_samples, sample_rows
from stepscope.store.sealed.sql import query

HOST = {"node": "a", "kind": "host", "cpu_percent": 1.5}
GPU = {"node": "a", "kind": "gpu", "index": 0, "throttle_reasons": ["x", "y"], "util_percent": 97}


def lines_of(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"wall_ns": number, **fields} for number in range(count)]


def test_few_are_all_kept() -> None:
    few = lines_of(sample_files.MOST_SAMPLES, **HOST)
    assert thinned(few) == few


def test_every_nth_of_each_source_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_files, "MOST_SAMPLES", 100)
    both = [sample for number in range(200) for sample in ({"at": number, **HOST}, {"at": number, **GPU})]
    thin = thinned(both)
    assert sample_files.strides({0: 400}) == {0: 4}
    assert sample_files.newest_of(2) == 12
    expected = sorted({*range(0, 200, 4), *range(188, 200)})
    assert [row["at"] for row in thin if row["kind"] == "host"] == expected
    assert [row["at"] for row in thin if row["kind"] == "gpu"] == expected
    assert thin == sorted(thin, key=lambda sample: (sample["at"], sample["kind"] == "gpu")), (
        "in the order in which they came"
    )


def test_a_long_run_is_chosen_evenly_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last hours are at one a second, the days before at one a minute: they do not outweigh these."""
    monkeypatch.setattr(sample_files, "MOST_SAMPLES", 1000)
    monkeypatch.setattr(sample_files, "NEWEST", 5)
    minutes = [{**HOST, "wall_ns": at * 60 * 10**9, "span_s": 60} for at in range(1440)]
    seconds = [{**HOST, "wall_ns": (86400 + at) * 10**9} for at in range(7200)]
    thin = thinned([*minutes, *seconds])
    assert sample_files.strides({60: 1440, 0: 7200}) == {60: 2, 0: 120}
    assert len([sample for sample in thin if "span_s" in sample]) == 720
    assert [row["wall_ns"] // 10**9 - 86400 for row in thin if "span_s" not in row] == [
        *range(0, 7200, 120),
        *range(7195, 7200),
    ]
    assert sample_files.strides({600: 900, 0: 7200}) == {600: 1, 0: 72}, "those that are farther apart are all taken"


def test_of_very_many_sources_a_few_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_files, "MOST_SAMPLES", 100)
    many = [{"pid": pid, "at": number} for number in range(50) for pid in range(40)]
    thin = thinned(many)
    for pid in range(40):
        assert [row["at"] for row in thin if row["pid"] == pid] == [0, 20, 40, *range(42, 50)]


@given(st.lists(st.tuples(st.integers(0, 3), st.none() | st.lists(st.integers()) | st.text(max_size=2)), max_size=60))
def test_whatever_is_in_a_line(drawn: list[tuple[int, Any]]) -> None:
    thinner: Thinner[int] = Thinner({0: 3})
    for number, (pid, node) in enumerate(drawn):
        thinner.add(source_of({"pid": pid, "node": node}), 0, number)
    indexes = thinner.chosen()
    assert indexes == sorted(set(indexes))
    assert indexes == list(range(len(drawn))), "fewer than the last that are always kept"


@pytest.fixture(params=[1, pytest.param(1 << 30, marks=pytest.mark.soak)], ids=["large", "small"])
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Path, int]:
    """An open run with more samples than are read, and how many; chosen by the database, or after reading."""
    monkeypatch.setattr(sample_files, "MOST_SAMPLES", 400)
    monkeypatch.setattr(samples, "BATCH", 130)
    monkeypatch.setattr(samples, "LARGE_BYTES", request.param)
    run = with_samples(Cluster(ranks=2, steps=300, device_timed=True), every_s=0.05)
    assert len(run.samples) > 1000
    return record(tmp_path, "night", run, sealed=False), len(run.samples)


def test_open_and_sealed_are_thinned_alike_and_all_are_kept(night: tuple[Path, int]) -> None:
    path, total = night
    before = open_run(path).samples
    seal.seal(path)
    after = open_run(path).samples
    assert after == before
    assert 400 <= len(after) <= 400 + 5 * sample_files.newest_of(5)
    assert query(path, "select count(*) from samples").rows == ((total,),)
    assert sorted(child.name for child in path.iterdir() if "part" in child.name) == []
    ordered = query(path, "select wall_ns from samples").rows
    assert list(ordered) == sorted(ordered)


def test_thinned_segments_are_sealed_with_what_they_stand_for(tmp_path: Path) -> None:
    run = with_samples(Cluster(ranks=2, steps=300, device_timed=True), every_s=0.05)
    path = record(tmp_path, "weeks", run, sealed=False)
    hour = iter(range(10**9))
    keeper = SampleKeeper(path, clock=lambda: next(hour) * SEGMENT_S)
    keeper.check()
    append_jsonl(path / "samples.jsonl", [{"wall_ns": 5, "node": "a", "kind": "host", "cpu_percent": 3.0}])
    for _ in range(4):
        keeper.check()
    assert [segment.span_s for segment in sample_segments(path)] == [60, 0]
    append_jsonl(path / "samples.jsonl", [{"wall_ns": 6, "node": "a", "kind": "host", "cpu_percent": 4.0}])
    before = open_run(path).samples
    assert sum(row["over"]["samples"] if "over" in row else 1 for row in before) == len(run.samples) + 2
    counts_sql = "select count(*), max(span_s), sum(coalesce((extra->'over'->>'samples')::int, 1)) from samples"
    expected = ((len(before), 60, len(run.samples) + 2),)
    assert query(path, counts_sql).rows == expected
    seal.seal(path)
    assert open_run(path).samples == before
    assert query(path, counts_sql).rows == expected
    assert not (path / "samples.jsonl").exists()
    assert not (path / "samples").exists()


@pytest.mark.parametrize("large", [1, pytest.param(1 << 30, marks=pytest.mark.soak)], ids=["large", "small"])
def test_thinned_and_whole_ones_are_chosen_alike_open_and_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(sample_files, "MOST_SAMPLES", 300)
    monkeypatch.setattr(sample_files, "NEWEST", 20)
    monkeypatch.setattr(samples, "BATCH", 130)
    monkeypatch.setattr(samples, "LARGE_BYTES", large)
    path = record(tmp_path, "long", with_samples(Cluster(ranks=2, steps=50), every_s=1.0), sealed=False)
    (path / "samples.jsonl").unlink(missing_ok=True)
    minutes = [{"wall_ns": at * 60 * 10**9, "span_s": 60, "over": {"samples": 60}} for at in range(400)]
    seconds = [{"wall_ns": (24_000 + at) * 10**9} for at in range(3000)]
    append_jsonl(
        path / "samples.jsonl", [{**minute, **whose} for minute in (*minutes, *seconds) for whose in (HOST, GPU)]
    )
    before = open_run(path).samples
    spans = [sample.get("span_s", 0) for sample in before if sample["kind"] == "host"]
    assert 90 < spans.count(60) < 140, "a day at one a minute weighs more than its last fifty minutes"
    assert 20 <= spans.count(0) < 40 + 20
    seal.seal(path)
    assert open_run(path).samples == before


def test_lines_that_are_none_are_counted_in_long_files_too(night: tuple[Path, int]) -> None:
    path, total = night
    with (path / "samples.jsonl").open("ab") as file:
        file.write(b'{"wall_ns": NaN, "kind": "host"}\n[1]\n{"half": \n\n{"node": [1], "kind": {}}\n')
    run = open_run(path)
    assert [notice for notice in run.notices if "samples.jsonl" in notice] == [
        "2 lines of samples.jsonl could not be read."
    ]
    assert run.samples[-1] == {"node": [1], "kind": {}}
    assert query(path, "select count(*) from samples").rows == ((total + 2,),)
    seal.seal(path)
    assert open_run(path).samples[-1] == {"node": [1], "kind": {}}
    assert query(path, "select count(*) from samples").rows == ((total + 2,),)


def test_columns_of_a_later_version_are_passed_over(night: tuple[Path, int]) -> None:
    path, total = night
    seal.seal(path)
    sealed = path / "samples.parquet"
    duckdb.execute(f"COPY (SELECT *, 7 AS later FROM '{sealed}') TO '{sealed}.more' (FORMAT parquet)")
    sealed.with_name("samples.parquet.more").replace(sealed)
    assert query(path, "select count(*) from samples").rows == ((total,),)
    assert {sample["later"] for sample in open_run(path).samples} == {7}


@pytest.mark.faults
def test_what_does_not_read_back_the_same_is_not_sealed(
    night: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = night
    real = samples.file_io.fsync_file

    def loses(written: Path) -> None:
        if written.name == "samples.parquet":
            duckdb.execute(f"COPY (SELECT * FROM '{written}' OFFSET 1) TO '{written}.less' (FORMAT parquet)")
            written.with_name("samples.parquet.less").replace(written)
        real(written)

    with monkeypatch.context() as patch, pytest.raises(seal.RunUnwritable, match="do not read back the same"):
        patch.setattr(samples.file_io, "fsync_file", loses)
        seal.seal(path)
    assert (path / "samples.jsonl").exists()


value = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
value |= st.lists(st.text(max_size=3) | st.integers(), max_size=2)
fields = st.sampled_from(["wall_ns", "kind", "pid", "cpu_percent", "throttle_reasons", "extra", "own", "name"])


@settings(max_examples=examples(60))
@given(st.lists(st.dictionaries(fields, value, max_size=5), max_size=12))
def test_any_samples_come_back(drawn: list[dict[str, Any]]) -> None:
    with duckdb.connect() as con:
        for batch in (drawn[:5], drawn[5:]):
            add_samples(con, batch)
        back = sample_rows(con.execute("SELECT * FROM samples").fetchnumpy())
    without_nulls = [{name: own for name, own in line.items() if own is not None} for line in drawn]
    assert json.dumps(back, sort_keys=True) == json.dumps([_as_kept(line) for line in without_nulls], sort_keys=True)


def _as_kept(sample: dict[str, Any]) -> dict[str, Any]:
    """A whole number where there may be others is one of those."""
    level = sample.get("cpu_percent")
    whole = type(level) is int and abs(level) <= 1 << 53
    return {**sample, "cpu_percent": float(level)} if whole else sample  # type: ignore[arg-type]

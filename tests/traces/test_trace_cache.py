"""Traces that were read before."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.traces import MadeTrace
from nsight import MadeReport

from stepscope.traces.engine import decode_analyses, encode_analyses
from stepscope.traces.model.columns import TABLES, Trace, side_columns
from stepscope.traces.rank_analysis import analyze_rank
from stepscope.traces.reading import cache as cache_module
from stepscope.traces.reading.cache import Cache, Entry, open_traces
from stepscope.traces.reading.files import read_traces

REAL = (
    "param_dlrm_8rank/worker0_step_12.1694128201545.pt.trace.json.gz",
    "hta_nccl_data_1of2/nccl_data.json.gz",
    "hta_cp_event_sync/event_sync_trace.json.gz",
    "kineto_resnet50_w0/worker0.1623143089861.pt.trace.json.gz",
)


def assert_same(expected: Any, found: Any) -> None:
    """Equal all the way down, types too."""
    assert type(expected) is type(found)
    if isinstance(expected, np.ndarray):
        assert expected.dtype == found.dtype
        assert expected.shape == found.shape
        assert expected.tobytes() == found.tobytes()
        assert expected.flags.writeable == found.flags.writeable
    elif is_dataclass(expected):
        for each in fields(expected):
            assert_same(getattr(expected, each.name), getattr(found, each.name))
    elif isinstance(expected, dict):
        assert list(expected) == list(found)
        for key in expected:
            assert_same(expected[key], found[key])
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(found)
        for mine, theirs in zip(expected, found, strict=True):
            assert_same(mine, theirs)
    else:
        assert expected == found or (expected != expected and found != found)


def refuse(path: Path) -> list[Trace]:
    raise AssertionError(f"{path} is read again")


def entry_of(cache: Cache, path: Path) -> Entry:
    entry = cache.entry(path)
    assert entry is not None
    return entry


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(folder=tmp_path / "cache" / "traces")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = MadeTrace(rank=3, world_size=8)
    made.step(1, 0, 100)
    made.op("aten::mm", 1, 10, **{"Input Dims": [[2, 3]], "Sequence number": 7})
    made.launched("gemm ä", at=2, start=20, dur=30.125, **{"est. achieved occupancy %": 40})
    made.memory(5, 1024, 2048, 4096)
    made.forward_backward(1, 2, 40)
    return made.write(tmp_path / "trace.json.gz")


def test_everything_comes_back(cache: Cache, path: Path) -> None:
    (first,) = open_traces(path, cache)
    entry = entry_of(cache, path)
    (second,) = entry.traces(refuse)
    assert_same(first, second)
    assert_same(first, read_traces(path)[0])
    for table in TABLES:
        if table not in ("copies", "collectives", "syncs", "pythons"):
            assert len(next(iter(side_columns(getattr(first, table)).values()))), table


@pytest.mark.few(2)
@pytest.mark.parametrize("name", REAL)
def test_real_files_come_back(cache: Cache, shared_data: Path, name: str) -> None:
    path = shared_data / "traces" / name
    (first,) = open_traces(path, cache)
    (second,) = entry_of(cache, path).traces(refuse)
    assert_same(first, second)
    found = analyze_rank(first, 0)
    data = encode_analyses([found])
    assert data is not None
    assert_same([found], decode_analyses(data))
    assert_same([found], [analyze_rank(second, 0)])


def test_several_traces_of_one_file(cache: Cache, tmp_path: Path) -> None:
    made = MadeReport()
    for pid in (10, 20):
        made.pid = pid
        made.launched(f"gemm {pid}", at=0, start=10, end=20)
    path = made.write(tmp_path / "report.sqlite")
    first = open_traces(path, cache)
    assert_same(first, entry_of(cache, path).traces(refuse))
    assert len(first) == 2


def test_no_cache(path: Path) -> None:
    assert_same(open_traces(path, None), read_traces(path))


def test_what_is_no_file_has_no_entry(cache: Cache, tmp_path: Path) -> None:
    assert cache.entry(tmp_path / "none") is None
    assert cache.entry(tmp_path) is None
    os.mkfifo(tmp_path / "pipe")
    assert cache.entry(tmp_path / "pipe") is None


def test_a_changed_file_is_read_again(cache: Cache, path: Path) -> None:
    open_traces(path, cache)
    old = entry_of(cache, path)
    made = MadeTrace(rank=4)
    made.kernel("other", 0, 1)
    made.write(path)
    (trace,) = open_traces(path, cache)
    assert trace.meta.rank == 4
    assert not old.folder.exists()
    assert len(list(cache.folder.iterdir())) == 1
    os.utime(path, ns=(1, 1))
    assert entry_of(cache, path).load() is None


def test_a_file_that_changes_while_it_is_read_is_not_kept(cache: Cache, path: Path) -> None:
    entry = entry_of(cache, path)

    def read(path: Path) -> list[Trace]:
        traces = read_traces(path)
        path.write_bytes(b"changed")
        return traces

    assert len(entry.traces(read)) == 1
    assert entry.load() is None
    assert not entry.folder.exists()


def test_other_code_is_another_entry(cache: Cache, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_traces(path, cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "code_version", lambda: "another")
        assert entry_of(cache, path).load() is None
    assert entry_of(cache, path).load() is not None


def test_paths_are_as_they_are_given(cache: Cache, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_traces(path, cache)
    with monkeypatch.context() as patch:
        patch.chdir(path.parent)
        (trace,) = entry_of(cache, Path(path.name)).traces(refuse)
    assert trace.meta.path == path.name


def test_nobody_else_may_read_it(cache: Cache, path: Path) -> None:
    before = os.umask(0)
    try:
        open_traces(path, cache)
        entry = entry_of(cache, path)
        assert entry.keep("results", b"x")
    finally:
        os.umask(before)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert entry.folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in entry.folder.iterdir()} == {0o600}


def test_a_folder_that_others_may_write_is_not_used(cache: Cache, path: Path) -> None:
    open_traces(path, cache)
    entry = entry_of(cache, path)
    cache.folder.chmod(0o777)
    assert entry.load() is None
    assert entry.results("x", bytes) is None
    assert not entry.save([])
    assert not entry.keep("x", b"")


@pytest.mark.parametrize("place", ["/proc/none/traces", "/dev/null/traces"])
def test_a_place_that_cannot_be_written_is_no_cache(path: Path, place: str) -> None:
    cache = Cache(folder=Path(place))
    assert_same(open_traces(path, cache), read_traces(path))
    entry = entry_of(cache, path)
    assert entry.load() is None
    assert not entry.keep("results", b"")


def test_a_full_disk_is_no_cache(cache: Cache, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "save_traces", full)
        assert len(open_traces(path, cache)) == 1
    assert list(cache.folder.iterdir()) == []


def test_damage_is_noticed_and_mended(cache: Cache, path: Path) -> None:
    """Whatever byte is changed, whatever is cut off or missing: what comes back is right, or nothing."""
    whole = open_traces(path, cache)
    folder = entry_of(cache, path).folder
    files = sorted(folder.iterdir())
    chance = random.Random(3)
    noticed = 0
    for turn in range(120):
        file = files[turn % len(files)]
        before = file.read_bytes()
        data = bytearray(before)
        if turn % 4 == 0:
            del data[chance.randrange(len(data)) :]
        elif turn % 4 == 1:
            data = bytearray(chance.randbytes(len(data)))
        else:
            data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
        file.write_bytes(data)
        found = entry_of(cache, path).load()
        if found is None:
            noticed += 1
        else:
            assert_same(found, whole)
        file.write_bytes(before)
    assert noticed > 30
    (folder / "0-ops.parquet").unlink()
    assert entry_of(cache, path).load() is None
    assert_same(open_traces(path, cache), whole)
    assert_same(entry_of(cache, path).traces(refuse), whole)


def test_codes_that_point_at_nothing(cache: Cache, path: Path) -> None:
    (trace,) = read_traces(path)
    entry = entry_of(cache, path)
    for table, column, value in (
        ("slices", "name", -1),
        ("slices", "name", 10**6),
        ("slices", "thread", -1),
        ("kernels", "row", 10**6),
        ("ops", "module", 10**6),
        ("flows", "to_thread", 77),
    ):
        values = getattr(getattr(trace, table), column)
        original, values[0] = values[0], value
        assert entry.save([trace])
        assert entry.load() is None, (table, column)
        values[0] = original
    assert entry.save([trace])
    assert_same(entry.load(), [trace])


def test_an_empty_trace(cache: Cache, tmp_path: Path) -> None:
    path = MadeTrace().write(tmp_path / "empty.json")
    first = open_traces(path, cache)
    assert_same(first, entry_of(cache, path).traces(refuse))


def test_the_unused_go_first(tmp_path: Path, path: Path) -> None:
    room = Cache(folder=tmp_path / "cache")
    copies = [path.with_name(f"{number}.json.gz") for number in range(3)]
    for number, copy in enumerate(copies):
        shutil.copy(path, copy)
        open_traces(copy, room)
        os.utime(entry_of(room, copy).folder, (number, number))
    assert entry_of(room, copies[0]).load() is not None  # used now
    size = sum(file.stat().st_size for file in entry_of(room, copies[0]).folder.iterdir())
    stranger = room.folder / "not-ours"
    stranger.mkdir()
    (stranger / "big").write_bytes(bytes(10 * size))
    abandoned = room.folder / "new-abandoned"
    abandoned.mkdir()
    os.utime(abandoned, (1, 1))
    Cache(folder=room.folder, limit_bytes=int(size * 2.5)).make_room()
    assert [entry_of(room, copy).load() is not None for copy in copies] == [True, False, True]
    assert stranger.exists()
    assert not abandoned.exists()


def test_one_that_does_not_fit_at_all(tmp_path: Path, path: Path) -> None:
    small = Cache(folder=tmp_path / "cache", limit_bytes=10)
    assert_same(open_traces(path, small), read_traces(path))
    assert list(small.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"STEPSCOPE_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c/traces"),
        ({"STEPSCOPE_CACHE": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/stepscope/traces"),
        ({"HOME": "/h"}, "/h/.cache/stepscope/traces"),
        ({"HOME": "/h", "STEPSCOPE_CACHE_GB": "0"}, None),
        ({}, None),
    ],
)
def test_where_it_is(environment: dict[str, str], folder: str | None) -> None:
    found = Cache.of_environment(environment)
    assert (found and str(found.folder)) == folder


@pytest.mark.parametrize(("setting", "limit"), [("", 20e9), ("1.5", 1.5e9), ("many", 20e9)])
def test_how_large_it_may_be(setting: str, limit: float) -> None:
    found = Cache.of_environment({"HOME": "/h", "STEPSCOPE_CACHE_GB": setting})
    assert found is not None
    assert found.limit_bytes == limit


OPENS = """
import sys
from pathlib import Path
from stepscope.traces.reading.cache import Cache
from stepscope.traces.reading.cache import open_traces
cache = Cache(folder=Path(sys.argv[1]))
print(sum(len(open_traces(Path(sys.argv[2]), cache)[0]) for _ in range(20)))
"""


def test_many_processes_at_once(cache: Cache, path: Path) -> None:
    whole = read_traces(path)
    command = [sys.executable, "-c", OPENS, str(cache.folder), str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    readers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [reader.communicate(timeout=120)[0] for reader in readers]
    assert list(map(int, outputs)) == [20 * len(whole[0])] * 3
    assert_same(entry_of(cache, path).traces(refuse), whole)
    assert len(list(cache.folder.iterdir())) == 1


def test_results_are_kept_beside(cache: Cache, path: Path) -> None:
    entry = entry_of(cache, path)
    assert not entry.keep("found", b"1")
    entry.traces(read_traces)
    assert entry.results("found", bytes) is None
    assert entry.keep("found", b"1")
    assert entry.keep("found", b"2")
    assert entry.results("found", bytes) == b"2"
    assert entry.results("found", decode_analyses) is None
    assert len(list(cache.folder.iterdir())) == 1

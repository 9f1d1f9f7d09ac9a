"""hangs/HOST-N.json: written whole, read by whoever opens the run, sealed or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hang_jobs import Job
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.records.hang import HangRecord
from stepscope.store.live.failures import read_hangs, write_hang
from stepscope.store.paths import hang_path


@pytest.fixture
def hang() -> HangRecord:
    return Job(ranks=2).alone(1).hang()


def test_there_and_back_in_order_of_time(tmp_path: Path, hang: HangRecord) -> None:
    later = replace(hang, host="node1", stopped_wall_ns=hang.stopped_wall_ns + 5)
    second = replace(hang, number=2, stopped_wall_ns=hang.stopped_wall_ns + 9)
    for record in (second, later, hang):
        write_hang(tmp_path, record)
    assert read_hangs(tmp_path) == ((hang, later, second), ())
    assert sorted(path.name for path in (tmp_path / "hangs").iterdir()) == [
        "node0-1.json",
        "node0-2.json",
        "node1-1.json",
    ]


def test_a_hang_that_is_over_replaces_itself(tmp_path: Path, hang: HangRecord) -> None:
    path = write_hang(tmp_path, hang)
    over = replace(hang, over="recovered", over_wall_ns=5)
    assert write_hang(tmp_path, over) == path == hang_path(tmp_path, "node0", 1)
    assert read_hangs(tmp_path) == ((over,), ())


def test_a_host_with_an_odd_name_stays_in_its_folder(tmp_path: Path, hang: HangRecord) -> None:
    path = write_hang(tmp_path, replace(hang, host="../../a b-1"))
    assert path.parent == tmp_path / "hangs"
    assert read_hangs(tmp_path)[0][0].host == "../../a b-1"


def test_no_folder_is_no_hang(tmp_path: Path) -> None:
    assert read_hangs(tmp_path) == ((), ())


def test_what_is_none_is_named_and_passed(tmp_path: Path, hang: HangRecord) -> None:
    good = write_hang(tmp_path, hang)
    folder = good.parent
    (folder / "a-1.json").write_text("{")
    (folder / "b-1.json").write_bytes(b"\xff\xfe")
    (folder / "c-1.json").write_text("[" * 100_000)
    (folder / "d-1.json").mkdir()
    (folder / "e-1.json").write_text(json.dumps({**hang.to_dict(), "schema": 99}))
    (folder / ".e-2.json.77.tmp").write_text("{")
    (folder / "notes.txt").write_text("mine")
    found, bad = read_hangs(tmp_path)
    assert found == (hang,)
    assert bad == tuple(f"hangs/{name}-1.json" for name in "abcde")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=64), st.integers(0, 2000))
def test_damaged_bytes_never_raise(tmp_path: Path, hang: HangRecord, noise: bytes, at: int) -> None:
    path = write_hang(tmp_path, hang)
    data = path.read_bytes()
    path.write_bytes(data[:at] + noise + data[at + len(noise) :])
    found, bad = read_hangs(tmp_path)
    assert len(found) + len(bad) == 1

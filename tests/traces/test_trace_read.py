"""Which files are traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.traces import MadeTrace

from stepscope.errors import TraceError
from stepscope.store.paths import CAPTURE_ANALYSIS, CAPTURE_RECORD
from stepscope.traces.reading.files import CAPTURE_FILES, find_traces, read_trace


def small(rank: int = 0) -> MadeTrace:
    made = MadeTrace(rank=rank, world_size=2)
    made.op("aten::mm", 0, 5)
    return made


def test_a_folder_of_the_tensorboard_handler(tmp_path: Path) -> None:
    first = small(0).write(tmp_path / "node1_4000.1694128201545.pt.trace.json")
    second = small(1).write(tmp_path / "node2_4001.1694128201546.pt.trace.json.gz")
    assert find_traces([tmp_path]) == ([first, second], [])
    assert [read_trace(path).meta.rank for path in (first, second)] == [0, 1]


def test_folders_are_searched_and_foreign_files_passed_over(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    trace = small().write(tmp_path / "deep" / "er" / "a.json")
    bare = tmp_path / "b.json"
    bare.write_text(json.dumps(small().events))
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "notes.txt").write_text("x")
    found, notices = find_traces([tmp_path, trace])
    assert found == [bare, trace]
    assert notices == [f"skipped, not a trace (or a --perfetto timeline): {tmp_path / 'config.json'} and 1 more"]


def test_files_that_are_named_are_taken_as_they_are(tmp_path: Path) -> None:
    named = [tmp_path / "config.json", tmp_path / "not there"]
    assert find_traces([*named, named[0]]) == (named, [])


def test_a_file_that_cannot_be_opened_says_so_later(tmp_path: Path) -> None:
    broken = tmp_path / "a.json"
    broken.write_bytes(b"PK\x03\x04")
    assert find_traces([tmp_path]) == ([broken], [])


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    with pytest.raises(TraceError, match="no traces found in this folder"):
        find_traces([tmp_path])


def test_the_documents_beside_the_traces_of_a_capture_are_no_surprise(tmp_path: Path) -> None:
    assert set(CAPTURE_FILES) == {CAPTURE_RECORD, CAPTURE_ANALYSIS}
    MadeTrace().write(tmp_path / "rank-0.pt.trace.json.gz")
    (tmp_path / CAPTURE_ANALYSIS).write_text("{}")
    assert len(find_traces([tmp_path])[1]) == 1
    (tmp_path / CAPTURE_RECORD).write_text("{}")
    assert find_traces([tmp_path]) == ([tmp_path / "rank-0.pt.trace.json.gz"], [])

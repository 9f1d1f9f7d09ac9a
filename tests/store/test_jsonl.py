"""Lines of JSON and files that are replaced: a torn line costs itself and no more."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stepscope.store import file_io
from stepscope.store.file_io import append_jsonl, fsync_file, read_jsonl
from stepscope.store.inbox import parts


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_jsonl(path, [{"a": 1}, {"b": "ü\n"}])
    append_jsonl(path, [])
    append_jsonl(path, [{"c": None}])
    assert read_jsonl(path) == ([{"a": 1}, {"b": "ü\n"}, {"c": None}], 0)


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none") == ([], 0)


def test_a_cut_line_costs_one_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":')
    append_jsonl(path, [{"c": 3}])
    assert read_jsonl(path) == ([{"a": 1}, {"c": 3}], 1)


def test_what_is_no_record_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n  \n[1]\n7\n\xff\xfe\n{"a":1}\n' + b"[" * 100_000 + b"\n")
    assert read_jsonl(path) == ([{"a": 1}], 4)


def test_a_full_disk_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    append_jsonl(path, [{"a": 1}])
    real = os.pwrite
    tries = iter([3])

    def full(fd: int, data: memoryview, offset: int) -> int:
        for size in tries:
            return real(fd, data[:size], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        append_jsonl(path, [{"b": 2}])
    assert path.read_bytes() == b'{"a":1}\n'


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    file_io.write_json(path, {"a": 1}, durable=True)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        file_io.write_json(path, {"a": 2}, durable=True)
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


# -- Files that are replaced or synced: never by way of a pipe or a link that somebody put in their place -------------


def test_a_pipe_or_a_link_in_place_of_a_file_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    fsync_file(tmp_path / "file")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=r"Invalid argument|symbolic links"):
            fsync_file(tmp_path / name)


def test_a_journal_that_is_not_sealed_is_told_without_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "a\x1b[31mb"
    run_dir.mkdir()
    assert parts.main([str(run_dir), "7"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("stepscope: journal 7 was not sealed: ")
    assert "\x1b" not in errors
    assert "a\\x1b[31mb" in errors

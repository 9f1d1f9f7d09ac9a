"""Files that are replaced or synced: never by way of a pipe or a link that somebody put in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepscope.store.file_io import fsync_file
from stepscope.store.inbox import parts


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

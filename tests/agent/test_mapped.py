"""Pages of mapped files in a process's resident memory."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from stepscope.agent.sampling.off_cpu import read_status

STATUS = b"Name:\tpython\nVmRSS:\t  4096 kB\nRssAnon:\t  1024 kB\nRssFile:\t  3000 kB\nRssShmem:\t     72 kB\n"


def mapped_here() -> int | None:
    return read_status(Path("/proc"), os.getpid()).mapped_bytes


def told(tmp_path: Path, status: bytes) -> int | None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_bytes(status)
    return read_status(tmp_path, 7).mapped_bytes


def test_it_is_read_in_bytes(tmp_path: Path) -> None:
    assert told(tmp_path, STATUS) == 3000 * 1024


@pytest.mark.parametrize("status", [b"", b"Name:\tx\n", b"RssFile:\n", b"RssFile:\tmany kB\n", b"RssFile:\t\xff kB\n"])
def test_what_is_not_told_is_none(tmp_path: Path, status: bytes) -> None:
    assert told(tmp_path, status) is None


def test_a_process_that_is_gone_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path, 7).mapped_bytes is None


@pytest.mark.skipif(sys.platform != "linux" or mapped_here() is None, reason="not known on this system")
def test_a_mapped_file_that_was_read_counts(tmp_path: Path) -> None:
    size = 16 << 20
    path = tmp_path / "data"
    path.write_bytes(b"x" * size)
    before = mapped_here() or 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert sum(data[at] for at in range(0, size, 4096)) == size // 4096 * ord("x")
        assert (mapped_here() or 0) - before >= size // 2

"""The copy of what a process prints, where it waits in memory for an agent that may be held up."""

from __future__ import annotations

import io
import os
from pathlib import Path

from stepscope.recorder.output import MISSED, _Tee

PAGE = 4096


def test_no_more_than_its_share_of_the_memory_is_held_and_what_is_missing_is_said(tmp_path: Path) -> None:
    copy = os.memfd_create("printed")
    raw = io.FileIO(tmp_path / "terminal", "w")
    tee = _Tee(raw, copy, 2 * PAGE)
    lines = [b"%05d " % number + b"x" * 1017 + b"\n" for number in range(20)]
    for line in lines[:15]:
        raw.write(line)
    assert os.pread(copy, 1 << 20, 0) == b"".join(lines[:5])  # the fifth began the second page
    os.ftruncate(copy, 0)  # the agent took it
    os.lseek(copy, 0, os.SEEK_SET)
    for line in lines[15:17]:
        raw.write(line)
    assert os.pread(copy, 1 << 20, 0) == MISSED + b"".join(lines[15:17])
    assert (tmp_path / "terminal").read_bytes() == b"".join(lines[:17])
    tee.copy_to(-1, None)
    raw.close()
    os.close(copy)

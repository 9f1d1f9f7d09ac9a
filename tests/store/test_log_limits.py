"""Logs of weeks: the beginning and the end stay where they are, the middle takes no room, and no writer notices."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.hub.api.runs import read_piece
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.live.logs import bound_log, bound_logs, log_share, punch_hole
from stepscope.wire.frames import FrameHead, pack_frame, part_of, read_frame

SHARE = 1 << 20
LINE = b"step %9d loss 0.12345 and so on, and so on\n"
SPOOL = "ab" * 16


def lines(first: int, count: int) -> bytes:
    return b"".join(LINE % number for number in range(first, first + count))


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "rank-0.log"
    path.write_bytes(lines(0, 1))
    fd = os.open(path, os.O_RDWR)
    able = punch_hole(fd, 0, 4096)
    os.close(fd)
    if not able:
        pytest.skip("this file system cannot make holes")
    return path


def test_the_first_and_the_last_part_stay_where_they_were(log: Path) -> None:
    data = lines(0, 100_000)
    log.write_bytes(data)
    assert bound_log(log, SHARE)
    content = log.read_bytes()
    assert len(content) == len(data), "no byte changes its position"
    assert allocated(log) < SHARE + (2 << 16)
    assert content[: (1 << 16) - 120] == data[: (1 << 16) - 120]
    assert content[-(SHARE - (2 << 16)) :] == data[-(SHARE - (2 << 16)) :]
    text = content[(1 << 16) - 120 : 1 << 16].decode()
    dropped = content.count(0)
    assert text.strip() == f"[stepscope: {dropped:,} bytes of output were dropped here to limit the size of this log]"
    assert text.startswith("\n")
    assert text.endswith("\n")


def test_a_process_goes_on_appending_and_its_last_words_are_there(log: Path) -> None:
    log.unlink()
    script = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "for number in range(100):\n"
        "    os.write(fd, b'x' * 99_999 + b'\\n')\n"
        "    print(flush=True)\n"
        "    sys.stdin.readline()\n"
        "os.write(fd, b'RuntimeError: the end\\n')\n"
    )
    command = [sys.executable, "-c", script, str(log)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for _ in process.stdout:
            assert bound_logs(log.parent.parent, all_bytes=SHARE)
            assert allocated(log) < 2 * SHARE
            process.stdin.write(b"\n")
            process.stdin.flush()
    assert process.returncode == 0
    content = log.read_bytes()
    assert len(content) == 100 * 100_000 + len(b"RuntimeError: the end\n")
    assert content.endswith(b"x\nRuntimeError: the end\n")
    assert content.count(b"[stepscope: ") == 1


def test_a_short_log_a_link_and_a_file_with_two_names_are_left_alone(log: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(lines(0, 100_000))
    (log.parent / "link.log").symlink_to(elsewhere)
    (log.parent / "twice.log").hardlink_to(elsewhere)
    log.write_bytes(lines(0, 20_000))
    before = log.read_bytes()
    assert bound_logs(tmp_path, all_bytes=SHARE)
    assert log.read_bytes() == before
    assert elsewhere.read_bytes() == lines(0, 100_000)


def test_a_file_system_without_holes_is_said_and_changes_nothing(log: Path) -> None:
    data = lines(0, 100_000)
    log.write_bytes(data)
    assert not bound_logs(log.parent.parent, all_bytes=SHARE, punch=lambda *_: False)
    assert log.read_bytes() == data


def test_a_disk_error_is_one(log: Path) -> None:
    log.write_bytes(lines(0, 100_000))

    def fails(*args: Any) -> bool:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        bound_logs(log.parent.parent, all_bytes=SHARE, punch=fails)


def test_readers_pass_what_was_dropped(log: Path) -> None:
    log.write_bytes(lines(0, 100_000))
    bound_log(log, SHARE)
    at, found = 0, b""
    while True:
        piece = read_piece(log.parent.parent, "logs/rank-0.log", offset=at, tail=None, most=1 << 18)
        assert piece is not None
        if not piece.data:
            break
        found += piece.data
        at = piece.offset + len(piece.data)
    assert at == log.stat().st_size
    assert b"\0" not in found
    assert len(found) <= allocated(log)
    assert found.endswith(LINE % 99_999)
    whole = read_piece(log.parent.parent, "logs/rank-0.log", offset=None, tail=4 << 20, most=4 << 20)
    assert whole is not None
    assert b"\0" not in whole.data
    assert whole.data.endswith(LINE % 99_999)


@pytest.mark.usefixtures("log")
def test_a_hub_bounds_what_it_is_sent(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    inbox = Inbox(hub, log_bytes=SHARE)
    data = lines(0, 200_000) + bytes(3 << 18) + lines(200_000, 10_000)
    for at in range(0, len(data), 1 << 18):
        piece = data[at : at + (1 << 18)]
        raw = pack_frame(
            FrameHead(node=1, spool=SPOOL, sent_wall_ns=0), [part_of("log", piece, name="logs/rank-1.log", offset=at)]
        )
        inbox.accept(read_frame(raw), raw)
    inbox.close()
    (found,) = (hub / "logs").iterdir()
    assert found.stat().st_size == len(data)
    assert allocated(found) < 2 * SHARE
    assert found.read_bytes()[-400_000:] == data[-400_000:]


def test_many_logs_share_the_room() -> None:
    assert log_share(8) == 64 << 20
    assert log_share(1024) == 4 << 20
    assert log_share(10**6) == 1 << 20

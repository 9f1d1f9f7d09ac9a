"""Output that goes into files is copied from there: whole files whole, of shared ones what says whose it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster, Death

from stepscope.records.paths import output_note
from stepscope.store.live.logs import OutputCopier, copy_rest, read_native
from stepscope.store.liveness import mark_session


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for folder in ("logs", "outputs"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    return tmp_path / "run"


def note(run_dir: Path, path: Path, *, pid: int = 2**22 + 1, rank: int | None = None, whole: bool = True) -> Path:
    """What a process says that is gone by now; its log."""
    info = path.stat()
    log = "logs/main.log" if rank is None else f"logs/rank-{rank}.log"
    source: dict[str, Any] = {"path": str(path), "dev": info.st_dev, "ino": info.st_ino, "from": info.st_size}
    about = {"schema": 1, "pid": pid, "rank": rank, "log": log, "sources": [{**source, "fds": [2], "whole": whole}]}
    output_note(run_dir, pid).write_text(json.dumps(about))
    return run_dir / log


def test_a_file_of_one_process_from_where_it_began(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "err"
    file.write_bytes(b"earlier\n")
    log = note(run_dir, file)
    copier = OutputCopier(run_dir)
    copier.copy()
    assert not log.exists()
    with file.open("ab") as output:
        output.write(b"one\ntw")
    copier.copy()
    assert log.read_bytes() == b"one\ntw"
    copier.close()  # and another agent comes
    copier = OutputCopier(run_dir)
    with file.open("ab") as output:
        output.write(b"o\n" + b"x" * 200_000)
    copier.copy()
    copier.close()
    assert log.read_bytes() == b"one\ntwo\n" + b"x" * 200_000


def test_one_that_was_emptied_begins_again(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "err"
    file.write_bytes(b"a long line of before\n")
    log = note(run_dir, file)
    copier = OutputCopier(run_dir)
    copier.copy()
    file.write_bytes(b"new\n")
    copier.copy()
    copier.close()
    assert log.read_bytes() == b"new\n"


def test_of_a_shared_file_each_gets_its_own(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "err"
    file.touch()
    logs = [note(run_dir, file, pid=2**22 + rank, rank=rank, whole=False) for rank in (0, 1)]
    copier = OutputCopier(run_dir)
    with file.open("ab") as output:
        output.write(b"python\nnode:%d:9 [0] NCCL WARN of 0\n[rank1]:[W1116 12:00 a.cpp:1] of 1\nterminate ca" % 2**22)
    copier.copy()
    with file.open("ab") as output:
        output.write(b"lled without an active exception\nfree(): last")
    copier.copy()
    assert logs[0].read_bytes() == b"node:%d:9 [0] NCCL WARN of 0\n" % 2**22
    assert logs[1].read_bytes() == b"[rank1]:[W1116 12:00 a.cpp:1] of 1\n"
    assert (run_dir / "logs" / "main.log").read_bytes() == b"terminate called without an active exception\n"
    copier.close()
    copy_rest(run_dir)
    assert (run_dir / "logs" / "main.log").read_bytes().endswith(b"exception\nfree(): last\n")
    assert not (run_dir / "outputs").exists()


def test_what_is_no_note_or_of_another_file_is_passed(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "err"
    file.write_bytes(b"")
    log = note(run_dir, file)
    file.rename(tmp_path / "kept")  # its number stays taken
    file.write_bytes(b"of somebody else\n")
    (run_dir / "outputs" / "1.json").write_text("{")
    (run_dir / "outputs" / "2.json").write_text('{"sources": [{}, 3]}')
    copy_rest(run_dir)
    assert not log.exists()


def test_a_process_that_is_there_is_asked_for_a_file_that_was_removed(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "err"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    log = note(run_dir, path, pid=os.getpid())
    about = json.loads(output_note(run_dir, os.getpid()).read_text())
    about["sources"][0]["fds"] = [fd]
    output_note(run_dir, os.getpid()).write_text(json.dumps(about))
    path.unlink()
    os.write(fd, b"all the same\n")
    copier = OutputCopier(run_dir)
    copier.copy(last=True)
    copier.close()
    os.close(fd)
    assert log.read_bytes() == b"all the same\n"


def test_last_lines_of_ranks_that_died(run_dir: Path) -> None:
    run = Cluster(ranks=2, steps=20, deaths=(Death(rank=1, step=10),)).run()
    (run_dir / "logs" / "rank-0.log").write_text("malloc(): of one that is well\n")
    (run_dir / "logs" / "rank-1.log").write_text("step 1\n" * 100_000 + "free(): invalid pointer\nstep 2\n")
    (run_dir / "logs" / "main.log").write_text("nothing\n")
    assert read_native(run_dir, run.ranks, ()) == {1: ("free(): invalid pointer",)}


def printed_in_memory(run_dir: Path, session: Path) -> tuple[Path, Path]:
    """A file of ours in a session, as a rank of a run on a remote file system prints into; and its log."""
    session.mkdir()
    (run_dir / "run.json").write_text(
        json.dumps({"schema": 1, "name": "run", "session": str(session), "spool": "of this run"})
    )
    file = session / "7.printed"
    file.touch()
    return file, note(run_dir, file)


def test_what_was_copied_of_a_file_of_ours_in_memory_is_given_back(run_dir: Path, tmp_path: Path) -> None:
    session = tmp_path / "session"
    file, log = printed_in_memory(run_dir, session)
    mark_session(session, "of this run")
    copier = OutputCopier(run_dir)
    text = b"".join(b"line %d\n" % number for number in range(100_000))
    for half in (text[:500_000], text[500_000:]):
        with file.open("ab") as output:
            output.write(half)
        assert file.stat().st_blocks * 512 > 400_000
        copier.copy()
        assert file.stat().st_blocks * 512 <= 8192
    copier.close()
    assert log.read_bytes() == text


def test_nobody_elses_file_is_ever_emptied(run_dir: Path, tmp_path: Path) -> None:
    """The note may come from a stranger: only what lies in a session that names this run is ours."""
    file, log = printed_in_memory(run_dir, tmp_path / "not a session of this run")
    file.write_bytes(b"x" * 100_000)
    copier = OutputCopier(run_dir)
    copier.copy()
    copier.close()
    assert log.read_bytes() == file.read_bytes() == b"x" * 100_000

"""A full disk at the hub: nothing is taken, nothing changes, and when there is room again all of it comes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from full_disk import fill_disk

from stepscope.errors import RunUnwritable
from stepscope.store.create import create_run
from stepscope.store.documents import end_run
from stepscope.store.inbox.journal import journal_path
from stepscope.store.inbox.parts import seal_journal
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.load import open_run
from stepscope.store.sealed.seal import seal

pytestmark = pytest.mark.faults


@pytest.fixture
def small(small_disk: Path, tmp_path: Path) -> Path:
    """A run on it."""
    return create_run(small_disk / "runs", "test", ["x"], environ={}, sessions=tmp_path / "sessions").run_dir


def snapshot(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and "places" not in path.name}


def test_nothing_is_taken_and_nothing_changes(small: Path, sender: Any, send: Any, plain: Any) -> None:
    node = sender(1)
    inbox = Inbox(small, journal_bytes=4000)
    send(inbox, node.frame([node.sidecars(), node.block([0, 0], [2, 2]), node.stretch("logs/main.log", 0, 2)]))
    had, files = inbox.positions(node.spool), snapshot(small)
    filler = fill_disk(small.parent.parent)
    rows = node.block([2, 2], [6, 6])
    noise = node.frame([node.stretch("logs/main.log", 2, 5), node.error_part(), rows])
    rotated = 0
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            send(inbox, noise)
        rotated += inbox.journal
    assert (inbox.positions(node.spool), rotated) == (had, 3)
    assert snapshot(small) == files
    filler.unlink()
    assert send(inbox, node.everything()).rows == len(node.rings) * sum(map(len, node.rings[0].groups[2:]))
    inbox.close()
    assert b"".join(node.files["logs/main.log"]) == (small / "logs" / "node1.main.log").read_bytes()
    end_run(small, exit_code=0, status="finished", wall_ns=9)
    data = open_run(small)
    assert [rank.steps["step"].tolist() for rank in data.ranks] == [[0, 1, 2, 3, 4, 5]] * 2
    assert len(data.errors) == 1


def test_sealing_waits_for_room(small: Path, sender: Any, send: Any, plain: Any) -> None:
    inbox = Inbox(small, journal_bytes=1)
    send(inbox, sender(1).everything(), sender(2).everything())
    inbox.close()
    end_run(small, exit_code=0, status="finished", wall_ns=9)
    expected = plain(open_run(small))
    filler = fill_disk(small.parent.parent)
    with pytest.raises(OSError, match="No space left"):
        seal_journal(small, 1)
    with pytest.raises(RunUnwritable, match="cannot seal"):
        seal(small)
    assert journal_path(small, 1).exists()
    assert plain(open_run(small)) == expected
    os.truncate(filler, 0)
    seal_journal(small, 1)
    seal(small)
    assert plain(open_run(small)) == expected

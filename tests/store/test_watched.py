"""Whether somebody looks at a run, as its agent sees it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rings import RingStream, write_steps

from stepscope.agent.drain import RingDrain
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.open_run import OpenRun
from stepscope.records.identity import RankIdentity
from stepscope.ring import RingReader
from stepscope.store.liveness import is_watched, mark_watched


def long_ago(session: Path) -> None:
    then_s = time.time() - 3600
    os.utime(session, (then_s, then_s))


def test_it_is_for_a_while_after_somebody_looked(tmp_path: Path) -> None:
    long_ago(tmp_path)
    assert not is_watched(tmp_path)
    mark_watched(tmp_path)
    assert is_watched(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_not(tmp_path: Path) -> None:
    mark_watched(tmp_path / "gone")
    mark_watched(Path("\0"))
    assert not is_watched(tmp_path / "gone")


def test_who_asks_about_a_run_that_goes_on_looks_at_it(tmp_path: Path) -> None:
    session = tmp_path / "session"
    session.mkdir()
    for fed in (False, True):
        long_ago(session)
        run = OpenRun(tmp_path, LiveRun(meta={"session": str(session)}), fed=fed)
        assert not run.live.watched
        run.note_request()
        assert (run.live.watched, is_watched(session)) == (True, fed)


def test_a_ring_is_written_down_sooner(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    path = tmp_path / "1.ring"
    stream = RingStream(path, RankIdentity(host="node", pid=os.getpid()))
    drain = RingDrain(RingReader(path), tmp_path)
    try:
        drain.drain()
        write_steps(stream, 1)
        drain._written_s -= 1.0
        assert (drain.due(), drain.due(watched=True)) == (False, True)
        drain._written_s -= 1.0
        assert drain.due()
    finally:
        drain.close()
        stream.close()

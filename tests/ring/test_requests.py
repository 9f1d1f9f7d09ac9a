"""The request word: another process counts a request, and the writer of the ring sees it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepscope.errors import RingForeign
from stepscope.records.identity import RankIdentity
from stepscope.ring import RingReader, RingState, RingWriter, announce_request
from stepscope.ring.layout import MIN_CAPACITY, REQUESTS_WORD


def test_each_request_is_seen_by_the_writer_and_changes_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "1.ring"
    ring = RingWriter(path, RankIdentity(host="node", pid=os.getpid(), rank=3), capacity=MIN_CAPACITY)
    ring.set_state(RingState.RUNNING)
    before = path.read_bytes()
    assert announce_request(path)
    assert announce_request(path)
    assert ring.header[REQUESTS_WORD] == 2
    at = REQUESTS_WORD * 8
    after = path.read_bytes()
    assert (after[:at], after[at + 8 :]) == (before[:at], before[at + 8 :])
    ring.header[REQUESTS_WORD] = (1 << 64) - 1
    assert announce_request(path)
    assert ring.header[REQUESTS_WORD] == 0
    reader = RingReader(path)
    assert reader.header().identity.rank == 3
    reader.close()
    ring.close()


def test_a_ring_that_is_gone_or_is_none_is_left_alone(tmp_path: Path) -> None:
    assert not announce_request(tmp_path / "gone.ring")
    other = tmp_path / "other.ring"
    for content in (b"", b"x" * 20_000):
        other.write_bytes(content)
        with pytest.raises(RingForeign, match="is not a ring"):
            announce_request(other)
        assert other.read_bytes() == content
    os.mkfifo(tmp_path / "pipe.ring")
    with pytest.raises(RingForeign):
        announce_request(tmp_path / "pipe.ring")

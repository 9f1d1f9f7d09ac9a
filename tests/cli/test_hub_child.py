"""Who may start the hub of a job of one node."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.cli.launch import hub
from stepscope.cli.launch.helpers import Helper
from stepscope.cli.launch.hub import HubChild, HubOptions, may_start, open_hub


def test_other_users_of_the_machine_may_not() -> None:
    mine = os.getuid()
    assert [may_start(uid, loopback=True) for uid in (mine, 0, None, 4711, -1)] == [True, True, True, False, False]
    assert [may_start(uid, loopback=False) for uid in (4711, -1)] == [False, True]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[HubChild]:
    child = open_hub(tmp_path, HubOptions(), name="night", nnodes=1, address="")
    yield child
    child.close()


def test_a_connection_of_another_user_is_closed_and_starts_nothing(
    child: HubChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(Helper, "start", lambda _self, _mask, caller=-1: started.append(caller))
    port = int(child.url.rpartition(":")[2])
    uids = iter([4711, os.getuid()])
    monkeypatch.setattr(hub, "peer_uid", lambda *_: next(uids))
    with socket.create_connection(("127.0.0.1", port), 10) as stranger:
        child.keep_alive()
        assert (started, stranger.recv(1)) == ([], b"")
    with socket.create_connection(("127.0.0.1", port), 10):
        child.keep_alive()
    assert len(started) == 1
    assert started[0] >= 10, "the connection is handed over: whoever made it is answered"

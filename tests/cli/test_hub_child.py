"""Who may start the hub of a job of one node."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.cli.launch import helpers
from stepscope.cli.launch.helpers import Helper, HubChild, HubOptions, may_start, open_hub
from stepscope.cli.main import run_command
from stepscope.errors import HubError


def test_other_users_of_the_machine_may_not() -> None:
    mine = os.getuid()
    assert [may_start(uid, loopback=True) for uid in (mine, 0, None, 4711, -1)] == [True, True, True, False, False]
    assert [may_start(uid, loopback=False) for uid in (4711, -1)] == [False, True]


def test_a_port_in_use_says_which_to_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        why = f"the hub cannot listen on port {port} of 127.0.0.1: Address already in use; "
        with pytest.raises(HubError) as caught:
            open_hub(tmp_path, HubOptions(port=port), name="night", nnodes=1, address="")
        assert str(caught.value) == f"{why}omit --hub-port to use any free port"
        with pytest.raises(HubError) as caught:
            run_command(["serve", str(tmp_path), "--port", str(port)])
        assert str(caught.value) == f"{why}use --port 0 for any free port, or --port N for another one"


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
    monkeypatch.setattr(helpers, "peer_uid", lambda *_: next(uids))
    with socket.create_connection(("127.0.0.1", port), 10) as stranger:
        child.keep_alive()
        assert (started, stranger.recv(1)) == ([], b"")
    with socket.create_connection(("127.0.0.1", port), 10):
        child.keep_alive()
    assert len(started) == 1
    assert started[0] >= 10, "the connection is handed over: whoever made it is answered"

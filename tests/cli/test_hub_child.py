"""When the hub of a job of one node starts, and who may connect to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.cli.launch.helpers import Helper, HubChild, HubOptions, open_hub
from stepscope.cli.main import run_command
from stepscope.errors import HubError
from stepscope.hub.transport import may_connect


def test_other_users_of_the_machine_may_not() -> None:
    mine = os.getuid()
    assert [may_connect(uid, loopback=True) for uid in (mine, 0, None, 4711, -1)] == [True, True, True, False, False]
    assert [may_connect(uid, loopback=False) for uid in (4711, -1)] == [False, True]


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
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The starts of helper processes, none of which is made."""
    starts: list[str] = []
    monkeypatch.setattr(Helper, "start", lambda self, _mask: starts.append(self._what))
    monkeypatch.setattr(Helper, "running", property(lambda _self: bool(starts)))
    return starts


@pytest.fixture
def child(tmp_path: Path) -> Iterator[HubChild]:
    child = open_hub(tmp_path, HubOptions(), name="night", nnodes=1, address="")
    yield child
    child.close()


def test_the_hub_of_one_node_starts_when_somebody_connects(child: HubChild, started: list[str]) -> None:
    child.start(set())
    assert started == []
    with socket.create_connection(("127.0.0.1", int(child.url.rpartition(":")[2])), 10):
        child.keep_alive()
    assert started == ["hub"]


def test_it_starts_with_the_job_if_alerts_are_configured(tmp_path: Path, started: list[str]) -> None:
    child = open_hub(tmp_path, HubOptions(), name="night", nnodes=1, address="", at_once=True)
    child.start(set())
    assert started == ["hub"]
    child.close()

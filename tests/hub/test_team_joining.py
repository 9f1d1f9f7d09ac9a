"""Runs that join a team's hub by themselves: made for a proved key alone, received, and ended as their node says."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster

from stepscope.agent.shipping.sender import Sender, Shipper
from stepscope.cli.main import run_command
from stepscope.hub.api.auth import Readers
from stepscope.hub.app import make_app
from stepscope.hub.ingest.run_ingest import FolderIngest
from stepscope.hub.limits import Refusals
from stepscope.hub.runs import Runs
from stepscope.store.catalog import run_entry
from stepscope.store.documents import (
    TEAM_HUB,
    Destination,
    awaits_delivery,
    note_delivered,
    read_meta,
    read_nodes,
    write_meta,
    write_nodes,
)
from stepscope.store.load import open_run
from stepscope.store.sealed.seal import needs_seal
from stepscope.wire.handshake import load_keys
from tests.hub.run_parts import READER, Feed, Hub

KEY = "a key of the team's hub"
TURNS = 400


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_KEY", KEY)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    feed = Feed(tmp_path / "here", "night", Cluster(ranks=4, steps=30))
    feed.make(30)
    run_dir = tmp_path / "here" / "night"
    write_meta(run_dir, {**read_meta(run_dir), "user": "anna", "command": ["train.py"], "end": None})
    return run_dir


class TeamHub:
    """A hub that accepts new runs; ``done``: the runs that it finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[str] = []
        folder.mkdir(exist_ok=True)

        def make() -> Any:
            runs = Runs.of_folder(folder)
            self.ingest = FolderIngest(
                runs.path_of,
                Refusals(),
                fingerprint=b"",
                done=lambda path: self.done.append(path.name),
                idle_s=0.05,
                team_folder=folder,
            )
            return make_app(runs, Readers(READER), self.ingest)

        self.hub = Hub(make)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.ingest.close(), self.hub.loop).result(60)
        self.hub.close()


@pytest.fixture
def team(tmp_path: Path) -> Iterator[TeamHub]:
    hub = TeamHub(tmp_path / "team")
    yield hub
    hub.close()


def sender_of(spool: Path, hub: Hub, run: str = "night-1", **place: int) -> Sender:
    to = Destination(url=hub.url, run=run, **{"node": 1, "nnodes": 2, **place})
    return Sender(spool, to, load_keys)


def deliver(sender: Sender, end: dict[str, Any]) -> None:
    for _ in range(TURNS):
        if sender.turn(bye=end).delivered:
            break
    else:
        raise AssertionError(sender.trouble)
    sender.close()


def until(holds: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(wait(), 60))


def test_a_run_joins_is_received_and_ends(team: TeamHub, spool: Path) -> None:
    sender = sender_of(spool, team.hub)
    assert not sender.turn().delivered
    assert read_meta(team.folder / "night-1")["end"] is None
    deliver(sender, {"status": "failed", "exit_code": 3})
    until(lambda: team.done == ["night-1"])
    meta = read_meta(team.folder / "night-1")
    assert (meta["user"], meta["command"], meta["nnodes"], meta["launcher"]) == ("anna", ["train.py"], 2, None)
    assert (meta["end"]["status"], meta["end"]["exit_code"]) == ("failed", 3)
    assert oct((team.folder / "night-1").stat().st_mode & 0o777) == "0o700"
    received, sent = open_run(team.folder / "night-1"), open_run(spool)
    assert len(received.ranks) == len(sent.ranks) == 4
    assert run_entry(team.folder / "night-1").user == "anna"
    rows = team.hub.get("/api/v1/runs?user=anna").json["runs"]
    assert [row["id"] for row in rows] == ["night-1"]


def test_a_run_continues_where_it_was_after_the_hub_was_away(team: TeamHub, spool: Path, tmp_path: Path) -> None:
    sender = sender_of(spool, team.hub)
    sender.turn()
    sender.close()
    team.close()
    second = TeamHub(tmp_path / "team")
    try:
        delayed = sender_of(spool, second.hub)
        deliver(delayed, {"status": "finished", "exit_code": 0})
        until(lambda: second.done == ["night-1"])
    finally:
        second.close()
    assert read_meta(tmp_path / "team" / "night-1")["end"]["status"] == "finished"
    assert sorted(path.name for path in (tmp_path / "team").iterdir()) == ["night-1"]
    team.hub = second.hub  # closed already; the fixture closes it again
    team.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"key": "another key of 16 characters"}, "the keys differ"),
        ({"node": 0}, "no such run on this hub"),
        ({"nnodes": 3}, "no such run on this hub"),
        ({"run": "../night"}, ""),
        ({"run": ".night"}, ""),
    ],
)
def test_nothing_is_made_for_others(
    team: TeamHub, spool: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], why: str
) -> None:
    if "key" in change:
        wrong = load_keys({"STEPSCOPE_KEY": change.pop("key")})
        sender = Sender(spool, Destination(url=team.hub.url, run="night-1", node=1, nnodes=2), lambda: wrong)
    else:
        sender = sender_of(spool, team.hub, **{"run": "night-1", **change})
    assert not sender.turn().delivered
    assert why in sender.trouble
    assert sender.trouble
    assert list(team.folder.iterdir()) == []
    sender.close()


def test_a_run_has_the_driver_file_system_and_commit_of_its_node(team: TeamHub, spool: Path) -> None:
    own = {"driver": "550.54.15", "file_system": "lustre", "git": {"commit": "a" * 40, "branch": None, "dirty": True}}
    write_meta(spool, {**read_meta(spool), **own})
    sender = sender_of(spool, team.hub)
    deliver(sender, {"status": "finished", "exit_code": 0})
    meta = read_meta(team.folder / "night-1")
    assert {name: meta[name] for name in own} == own


@pytest.mark.parametrize("value", [None, 3, "x" * 129, "a\nb", {"commit": "x" * 200}, {"commit": 3}])
def test_what_its_node_did_not_say_is_not_taken_from_the_hub(team: TeamHub, spool: Path, value: object) -> None:
    write_meta(spool, {**read_meta(spool), "driver": value, "file_system": value, "git": value})
    sender = sender_of(spool, team.hub)
    assert not sender.turn().delivered
    sender.close()
    meta = read_meta(team.folder / "night-1")
    assert (meta["driver"], meta["file_system"], meta["git"]) == (None, None, None)


def test_a_run_that_may_continue_is_not_deleted_before_a_day_of_silence(
    team: TeamHub, spool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = team.folder / "night-1"
    sender = sender_of(spool, team.hub)
    assert not sender.turn().delivered
    sender.close()
    team.close()
    team.close = lambda: None  # type: ignore[method-assign]
    silent(run_dir, 0.99)
    assert run_command(["delete", "--yes", str(run_dir)]) != 0
    assert "has not reported its end; it can be deleted after a day of silence\n" in capsys.readouterr().err
    silent(run_dir, 1.01)
    assert run_command(["delete", "--yes", str(run_dir)]) == 0
    assert not run_dir.exists()


def test_a_run_that_ended_can_be_deleted_at_once(team: TeamHub, spool: Path) -> None:
    deliver(sender_of(spool, team.hub), {"status": "finished", "exit_code": 0})
    until(lambda: team.done == ["night-1"])
    assert run_command(["delete", "--yes", str(team.folder / "night-1")]) == 0
    assert list(team.folder.glob("night*")) == []


def silent(run_dir: Path, days: float) -> None:
    """As if the hub had last heard of the run so long ago."""
    then_ns = time.time_ns() - int(days * 86_400e9)
    nodes = [replace(node, heard_wall_ns=then_ns) for node in read_nodes(run_dir)]
    write_nodes(run_dir, nodes)
    os.utime(run_dir / "run.json", ns=(then_ns, then_ns))


def test_traces_of_captures_stay_where_they_were_recorded(team: TeamHub, spool: Path) -> None:
    trace = spool / "captures" / "step-9" / "rank-0.pt.trace.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"trace" * 1000)
    to = Destination(url=team.hub.url, run="night-1", node=1, nnodes=2)
    shipper = Shipper(spool, to, keys=load_keys, traces=False)
    shipper.start()
    assert shipper.finish({"status": "finished", "exit_code": 0}, 60.0).whole
    assert list((team.folder / "night-1").rglob("*.trace.json.gz")) == []
    away = Shipper(spool, replace(to, url="http://127.0.0.1:1"), keys=load_keys, traces=False)
    sent_too = Shipper(spool, replace(to, url="http://127.0.0.1:1"), keys=load_keys)
    assert sent_too.finish({}, 0.0).left_bytes - away.finish({}, 0.0).left_bytes == 5000


def test_what_is_sent_later_to_the_team_is_without_traces(
    team: TeamHub, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = spool / "captures" / "step-9" / "rank-0.pt.trace.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"trace" * 1000)
    monkeypatch.setenv("STEPSCOPE_HUB_KEY", KEY)
    to = {"url": team.hub.url, "run": "night-1", "node": 1, "nnodes": 2}
    end = {"status": "finished", "exit_code": 0, "wall_ns": read_meta(spool)["created_wall_ns"] + 1}
    write_meta(spool, {**read_meta(spool), "sealed": False, "end": end, TEAM_HUB: to})
    assert run_command(["send", str(spool)]) == 0
    until(lambda: team.done == ["night-1"])
    assert list((team.folder / "night-1").rglob("*.trace.json.gz")) == []
    assert trace.exists()


def test_a_run_is_not_sealed_before_the_hub_has_it(spool: Path) -> None:
    to = Destination(url="http://127.0.0.1:1", run="night-1", node=1, nnodes=2)
    meta = {**read_meta(spool), "sealed": False}
    write_meta(spool, meta)
    assert needs_seal(spool)
    write_meta(spool, {**meta, TEAM_HUB: {"url": to.url, "run": to.run, "node": 1, "nnodes": 2}})
    assert Destination.from_meta(read_meta(spool), TEAM_HUB) == to
    assert Destination.from_meta(read_meta(spool)) is None
    assert awaits_delivery(read_meta(spool))
    assert not needs_seal(spool)
    note_delivered(spool)
    assert not awaits_delivery(read_meta(spool))
    assert needs_seal(spool)

"""Frames on their way in, without a socket: limits, a full disk, what the model and the journal hear."""

from __future__ import annotations

import asyncio
import errno
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clock import SecondsClock

from stepscope.errors import FrameError
from stepscope.hub.ingest.auth import SenderLimits
from stepscope.store.documents import read_nodes, read_refused
from stepscope.store.live.ring_files import write_sidecar
from stepscope.wire.frames import FRAME_BYTES, FrameHead, pack_frame, part_of
from stepscope.wire.handshake import Join
from tests.hub.gate_parts import Parts, join_of, ring_of, rings_part, steps_part


class Node:
    """One agent and the hub's insides."""

    def __init__(self, parts: Parts, join: Join) -> None:
        self.parts, self.join = parts, join
        self.token = parts.welcome(join).token
        parts.inbox.introduce(join.spool, node=join.node, host=join.host)

    def send(self, *sent: Any, **head: Any) -> tuple[int, dict[str, Any]]:
        about = FrameHead(**{"node": self.join.node, "spool": self.join.spool, "sent_wall_ns": 1, **head})
        frame = pack_frame(about, sent)
        status, said, _ = asyncio.run(self.parts.ask("frames", frame, {"Authorization": f"Bearer {self.token}"}))
        return status, said


@pytest.fixture
def clock() -> SecondsClock:
    return SecondsClock(100.0)


@pytest.fixture
def parts(tmp_path: Path, clock: SecondsClock) -> Iterator[Parts]:
    limits = SenderLimits(frames=5, frames_per_s=1.0, bytes=1 << 20, bytes_per_s=1 << 20)
    parts = Parts(tmp_path, clock=clock, limits=limits, local_spool="ab" * 16)
    yield parts
    parts.close()


@pytest.fixture
def node(parts: Parts) -> Node:
    return Node(parts, join_of(1))


def names(parts: Parts) -> list[str]:
    return [event["event"] for event in parts.live.events()]


def test_what_is_taken_reaches_the_model(parts: Parts, node: Node) -> None:
    about = ring_of(1, 0)
    line = b'{"event":"x"}\n'
    assert node.send(rings_part(about), steps_part(about, 0, 3), part_of("lines", line, name="samples.jsonl"))[0] == 200
    assert parts.live.rings == [(about.key, "1")]
    assert (parts.live.row_count, parts.live.received["samples.jsonl"]) == (3, [b'{"event":"x"}'])
    figures = parts.ingest.figures
    assert (figures.frames, figures.rows, figures.duplicates, figures.gaps) == (1, 3, 0, 0)


def test_agents_are_told_whether_somebody_looks(parts: Parts, node: Node) -> None:
    assert node.send()[1]["watched"] is False
    parts.live.watched = True
    assert node.send()[1]["watched"] is True


def test_too_many_frames_wait(node: Node, clock: SecondsClock, parts: Parts) -> None:
    assert [node.send()[0] for _ in range(6)] == [200] * 5 + [429]
    assert node.send()[1] == {"why": "too many frames from this node", "retry_s": 1.0}
    clock.now_s += 1
    assert node.send()[0] == 200
    assert parts.refusals.by_reason()["rate"] == 2


def test_too_many_bytes_wait(node: Node, clock: SecondsClock) -> None:
    noise = random.Random(1).randbytes(700_000)
    assert node.send(part_of("log", noise, name="logs/a.log"))[0] == 200
    status, answer = node.send(part_of("log", noise, name="logs/a.log", offset=len(noise)))
    assert (status, answer["why"]) == (429, "too many bytes from this node")
    clock.now_s += answer["retry_s"]
    assert node.send(part_of("log", noise, name="logs/a.log", offset=len(noise)))[0] == 200


def test_a_full_disk_takes_nothing_and_is_told_once(
    parts: Parts, node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = ring_of(1, 0)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("stepscope.store.inbox.journal.JournalWriter.append", full)
        for _ in range(2):
            status, answer = node.send(rings_part(about))
            assert (status, answer["retry_s"]) == (507, 5.0)
        patch.setattr("stepscope.hub.ingest.endpoints.append_jsonl", full)
        parts.journal.flush()
    assert (parts.live.rings, names(parts)) == ([], ["warning", "refused"])
    assert capsys.readouterr().err.count("No space left on device; the other nodes keep their data") == 1
    assert node.send(rings_part(about))[0] == 200
    parts.journal.flush()
    assert parts.live.rings == [(about.key, "1")]
    written = (parts.run_dir / "inbox" / "hub-events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in written] == ["warning", "refused", "warning"], "nothing was lost"


def test_the_journal_tells_what_becomes_of_nodes(parts: Parts, clock: SecondsClock) -> None:
    bearer = {"Authorization": f"Bearer {parts.challenged(join_of(1)).challenge}"}
    joined = asyncio.run(parts.ask("join", b"{}", bearer))[0]
    assert joined == 403
    node = Node(parts, join_of(1, host="b"))
    node.send(offset_ns=120_000_000_000, rtt_ns=1_000_000)
    node.send(offset_ns=120_000_000_000, rtt_ns=1_000_000)
    parts.watch.tick()
    clock.now_s += 20
    parts.watch.tick()
    node.send()
    node.send(bye={"exit_code": 0})
    parts.watch.tick()
    parts.watch.close()
    events = parts.live.events()
    kinds = [event["event"] for event in events]
    assert kinds == ["refused", "clock_skew", "refusals", "node_lost", "node_back", "node_bye", "refused_in_all"]
    assert (events[1]["node"], events[1]["host"], events[1]["offset_ns"]) == (1, "b", 120_000_000_000)
    assert (events[3]["silent_s"], events[4]["silent_s"]) == (20.0, 20.0)
    assert events[5]["end"] == {"exit_code": 0}
    assert events[6]["counts"] == {"key": 1}
    (kept,) = read_nodes(parts.run_dir)
    assert (kept.node, kept.host, kept.bye, kept.offset_ns) == (1, "b", {"exit_code": 0}, 120_000_000_000)
    assert read_refused(parts.run_dir)["key"] == 1


def test_a_clock_within_what_the_round_trip_leaves_open_is_not_told(parts: Parts, node: Node) -> None:
    node.send(offset_ns=1_400_000_000, rtt_ns=1_000_000_000)
    assert names(parts) == []


def test_the_run_directory_itself_sends_nothing(parts: Parts) -> None:
    local = Node(parts, join_of(0, spool="ab" * 16))
    assert local.send()[0] == 200
    status, answer = local.send(rings_part(ring_of(0, 0)))
    assert (status, answer["why"]) == (400, "the hub reads this spool directly")


def test_ranks_of_the_first_node_are_its_own(parts: Parts, node: Node) -> None:
    (parts.run_dir / "steps").mkdir()
    write_sidecar(parts.run_dir, ring_of(0, 5))
    parts.watch.tick()
    assert node.send(rings_part(ring_of(1, 6)))[0] == 200
    status, answer = node.send(rings_part(ring_of(1, 5)))
    assert (status, answer["why"]) == (403, "rank 5 of attempt 0 already runs on another node")


def test_a_rank_that_moves_is_no_forgery(parts: Parts, node: Node, clock: SecondsClock) -> None:
    """In an elastic job the new node is heard of before the old one has said that its process is gone."""
    other = Node(parts, join_of(2))
    old, new = ring_of(2, 5), ring_of(1, 5)
    assert other.send(rings_part(old))[0] == 200
    assert node.send(rings_part(new))[0] == 403
    assert other.send(rings_part(replace(old, state="exited", ended_wall_ns=5)))[0] == 200
    clock.now_s += 1
    assert node.send(rings_part(new))[0] == 200
    assert names(parts) == []
    for told in ([], ["refused"], ["refused"]):
        assert other.send(rings_part(replace(old, anchor_wall_ns=7)))[0] == 403
        assert names(parts) == told
        clock.now_s += 3


@pytest.mark.parametrize("what", [{"pid": 1 << 63}, {"live_step": 1 << 63}, {"ended_wall_ns": 1 << 63}])
def test_numbers_that_no_process_has(parts: Parts, node: Node, what: dict[str, int]) -> None:
    assert node.send(rings_part(ring_of(1, 0, **what)))[0] == 400
    assert parts.live.rings == []


def test_another_run_and_other_methods(parts: Parts) -> None:
    found = []
    for path, method in (("/api/v1/runs/x/frames", "POST"), ("/api/v1/runs/night/frames", "GET")):
        assert parts.ingest.wants(path)
        messages: list[Any] = []

        async def send(message: Any, messages: list[Any] = messages) -> None:
            messages.append(message)

        scope = {"type": "http", "path": path, "method": method, "client": None, "headers": []}
        asyncio.run(parts.ingest(scope, lambda: pytest.fail("nothing is read"), send))
        found.append(messages[0]["status"])
    assert found == [401, 405], "which runs there are is not said to strangers"
    assert not parts.ingest.wants("/api/v1/runs/night/ranks")


def test_bodies_are_bounded_all_together(parts: Parts, node: Node) -> None:
    """So many are being read that there is no room for another; when they are done there is."""
    parts.ingest._reading = (128 << 20) - 100
    assert node.send() == (429, {"why": "the hub is busy", "retry_s": 1.0})
    parts.ingest._reading = 0
    assert node.send()[0] == 200
    assert parts.ingest._reading == 0


def test_a_sender_that_leaves_gives_its_room_back(parts: Parts, node: Node) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_message: Any) -> None:
        pytest.fail("nobody is there")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/runs/night/frames",
        "client": ("10.0.0.9", 1),
        "headers": [(b"authorization", f"Bearer {node.token}".encode()), (b"content-length", b"%d" % FRAME_BYTES)],
    }
    asyncio.run(parts.ingest(scope, receive, send))
    assert parts.ingest._reading == 0


def test_frame_errors_are_the_senders(parts: Parts, node: Node) -> None:
    """What the inbox finds wrong is a 400 with its words."""
    status, answer = node.send(part_of("rings", b"{}"))
    assert (status, answer["why"]) == (400, "rings are not a list")
    assert issubclass(FrameError, Exception)
    (kept,) = [one for one in parts.inbox.nodes() if one.spool == node.join.spool]
    assert kept.refused == 1

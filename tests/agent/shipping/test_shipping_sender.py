"""Turns of sending against a real hub that fails in every way: in the end it has everything, once."""

from __future__ import annotations

from typing import Any

from stepscope.agent.shipping.sender import Destination, Sender

KEY = b"k" * 32
BYE = {"exit_code": 0, "status": "finished"}
FAULTS = [401, 409, 413, 429, 507, 400, 403, 500, "drop", "drop ack", "garbage", "no http", "no json"]


def sender(spool: Any, hub: Any, **options: Any) -> Sender:
    to = Destination(url=hub.url, run="job", node=1, nnodes=2)
    return Sender(spool.run_dir, to, lambda: KEY, **options)


def deliver(sending: Sender, *, most: int = 200) -> None:
    for _ in range(most):
        if sending.turn(bye=BYE, patience_s=5.0).delivered:
            sending.close()
            return
    raise AssertionError(f"never delivered: {sending.trouble}")


def fill(spool: Any) -> None:
    for rank in (0, 1):
        spool.ring(rank)
        spool.steps(rank, 20 + rank)
    spool.lines("events.jsonl", {"event": "agent_start"}, {"event": "rank_start"})
    spool.lines("samples.jsonl", {"kind": "host"})
    spool.write("logs/rank-0.log", b"hello\nwor")
    spool.write("errors/100.json", b'{"pid": 100}')
    spool.write("hangs/node-1.json", b"{}")
    spool.write("flight/stacks_0.txt", b"File")


def test_everything_comes_once(spool: Any, hub: Any) -> None:
    fill(spool)
    sending = sender(spool, hub, probe_port=77)
    sending.turn()
    sending.turn()
    spool.steps(0, 5, lost=3)
    spool.steps(0, 0)
    spool.lines("events.jsonl", {"event": "note"})
    spool.write("logs/rank-0.log", b"ld\n")
    deliver(sending)
    kept = hub.spool()
    spool.equals(kept)
    assert (kept.byes, kept.duplicates, len(hub.joins)) == ([BYE], 0, 1)
    (join,) = hub.joins
    assert (join.run, join.node, join.nnodes, join.probe_port) == ("job", 1, 2, 77)
    assert join.meta["command"] == ["python", "train.py"]
    assert hub.paths == ["/api/v1/runs/job/join", *["/api/v1/runs/job-2/frames"] * len(hub.frames)]
    assert [frame.head.bye for frame in hub.frames][:-1] == [None] * (len(hub.frames) - 1)
    assert (sending.counts.joins, sending.counts.frames, sending.counts.failed) == (1, len(hub.frames), 0)
    assert sending.left_bytes() == 0

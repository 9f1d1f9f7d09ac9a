"""Turns of sending against a real hub that fails in every way: in the end it has everything, once."""

from __future__ import annotations

from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.agent.shipping.sender import LONGEST_PAUSE_S, Sender
from stepscope.store.documents import Destination

KEY = b"k" * 32
BYE = {"exit_code": 0, "status": "finished"}
FAULTS = [401, 409, 413, 429, 507, 400, 403, 500, "drop", "drop ack", "garbage", "no http", "no json"]


def sender(spool: Any, hub: Any, **options: Any) -> Sender:
    to = Destination(url=hub.url, run="job", node=1, nnodes=2)
    return Sender(spool.run_dir, to, lambda: (KEY,), **options)


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


@pytest.mark.faults
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_nothing(spool: Any, hub: Any, fault: Any) -> None:
    fill(spool)
    sending = sender(spool, hub)
    sending.turn()
    hub.faults.extend([None, fault, fault])
    sending.turn()
    spool.steps(1, 3)
    sending.turn()
    deliver(sending)
    spool.equals(hub.spool())
    assert hub.spool().byes == [BYE]
    assert hub.spool().duplicates == (1 if fault == "drop ack" else 0)
    assert sending.counts.refused == (2 if isinstance(fault, int) else 0)
    failed = {"drop": 1, "drop ack": 1, "garbage": 2, "no http": 2, "no json": 2, 400: 2, 403: 2, 500: 2}
    assert sending.counts.failed == failed.get(fault, 0)


@pytest.mark.faults
def test_the_hub_comes_back_without_its_tail(spool: Any, hub: Any) -> None:
    fill(spool)
    sending = sender(spool, hub)
    sending.turn()
    sending.turn()
    earlier = hub.keep()
    spool.steps(0, 30)
    spool.write("errors/101.json", b'{"pid": 101}')
    spool.lines("events.jsonl", {"event": "note"})
    sending.turn()
    hub.stop()
    hub.lose(earlier)
    spool.steps(0, 1)
    assert sending.turn().wait_s > 0
    assert "cannot be reached" in sending.trouble
    hub.start()
    deliver(sending)
    spool.equals(hub.spool())
    assert hub.spool().byes == [BYE]


def test_a_new_sender_goes_on(spool: Any, hub: Any) -> None:
    fill(spool)
    for count in (0, 5, 9):
        spool.steps(0, count)
        sending = sender(spool, hub)
        sending.turn()
        sending.turn()
        sending.close()
    deliver(sender(spool, hub))
    spool.equals(hub.spool())
    assert (len(hub.joins), hub.spool().duplicates) == (4, 0)


deeds = st.lists(
    st.one_of(
        st.sampled_from(["steps", "lines", "log", "file", "live", "turn", "turn"]),
        st.sampled_from(["new sender", "restart", "lose tail"]),
        st.sampled_from(FAULTS),
    ),
    max_size=40,
)


@pytest.mark.faults
@given(deeds)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_the_hub_has_everything_once(new_spool: Any, new_hub: Any, deeds: list[Any]) -> None:
    spool, hub = new_spool(), new_hub().start()
    sending = sender(spool, hub)
    earlier = hub.keep()
    for number, deed in enumerate(deeds):
        if deed == "steps":
            spool.ring(number % 2, heard_wall_ns=number)
            spool.steps(number % 2, number * 7, lost=number % 3)
        elif deed == "lines":
            spool.lines("samples.jsonl", {"n": number}, {"more": "x" * number})
        elif deed == "log":
            spool.write("logs/rank-0.log", b"y" * number)
        elif deed == "file":
            spool.write("errors/1.json", b"%d" % number, mode="wb")
        elif deed == "live":
            spool.ring(0, live_step=number, heard_wall_ns=number)
        elif deed == "turn":
            sending.turn(patience_s=5.0)
        elif deed == "new sender":
            sending.close()
            sending = sender(spool, hub)
            earlier = hub.keep()
        elif deed in ("restart", "lose tail"):
            hub.stop()
            if deed == "lose tail":
                hub.lose(earlier)
            sending.turn(patience_s=5.0)
            hub.start()
        else:
            hub.faults.append(deed)
            sending.turn(patience_s=5.0)
    deliver(sending)
    hub.stop()
    spool.equals(hub.spool())
    repeated = deeds.count("drop ack")  # its acknowledgement may be lost as well
    assert hub.spool().byes in [[BYE] * (1 + count) for count in range(repeated + 1)]


def test_it_knows_whether_somebody_looks(spool: Any, hub: Any) -> None:
    sending, seen = sender(spool, hub), []
    for watched in (None, True, False, None):
        hub.watched = watched
        spool.write("logs/main.log", b"x")
        sending.turn()
        sending.turn()
        seen.append(sending.watched)
    sending.close()
    assert seen == [False, True, False, False]


def test_it_waits_as_the_hub_says(spool: Any, hub: Any) -> None:
    hub.next_s = 3.0
    sending = sender(spool, hub)
    assert 0 <= sending.turn().wait_s <= 3.0
    assert sending.turn().wait_s == 3.0  # it is there, and says so
    frames = len(hub.frames)
    assert sending.turn().wait_s == 3.0  # nothing new: not so soon again
    assert len(hub.frames) == frames == 1
    for fault in (429, 507):
        spool.write("logs/main.log", b"x")
        hub.faults.append(fault)
        hub.retry_s = 7.0
        assert 7.0 <= sending.turn().wait_s <= 7.0 * 1.25
    hub.next_s = 0
    assert sending.turn().wait_s == 0.05
    spool.write("logs/main.log", bytes(3 << 20))
    hub.next_s = 60
    assert [sending.turn().wait_s for _ in range(3)] == [0.25, 0.25, 60.0]  # with much to catch up on, not at its pace
    hub.retry_s = float("inf")
    hub.faults.append(429)
    spool.write("logs/main.log", b"x")
    assert sending.turn().wait_s <= 600 * 1.25
    sending.close()


@pytest.mark.faults
@pytest.mark.parametrize("fault", [401, 409, 413])
def test_a_hub_that_says_the_same_again_and_again_is_not_asked_without_a_pause(
    spool: Any, hub: Any, fault: int
) -> None:
    hub.faults.extend([fault] * 100)
    sending = sender(spool, hub)
    waits = [sending.turn().wait_s for _ in range(60)]
    assert waits.count(0.0) <= 31  # every other turn is a join, after a 401
    assert max(waits) > LONGEST_PAUSE_S / 2
    assert max(waits) <= LONGEST_PAUSE_S
    sending.close()


@pytest.mark.faults
def test_an_absent_hub_is_asked_less_and_less_often_and_told_of_once(spool: Any, new_hub: Any) -> None:
    hub = new_hub()
    sending = sender(spool, hub, lost_after_s=0.0)
    waits = [sending.turn(patience_s=1.0).wait_s for _ in range(12)]
    most = [0.25, 0.5, 1, 2, 4, 8, *[10] * 6]
    assert all(0.5 * bound <= wait <= bound for wait, bound in zip(waits, most, strict=True))
    hub.start()
    sending.turn()
    sending.turn()
    (lost, why), (found, how_long) = sending.news
    assert (lost, found) == ("hub_lost", "hub_found")
    assert why["why"] == f"the hub at 127.0.0.1:{hub.port} cannot be reached: Connection refused"
    assert how_long["away_s"] >= why["away_s"]
    assert sending.trouble == ""
    hub.stop()
    spool.write("logs/main.log", b"x")
    sending.turn()
    hub.start()
    sending.turn()
    sending.turn()
    assert [event for event, _ in sending.news] == ["hub_lost", "hub_found"] * 2
    sending.close()


@pytest.mark.faults
def test_a_hub_that_is_away_for_a_moment_is_not_told_of(spool: Any, new_hub: Any) -> None:
    hub = new_hub()
    sending = sender(spool, hub)
    sending.turn()
    hub.start()
    deliver(sending)
    assert list(sending.news) == []


def test_a_local_hub_only_hears_that_we_are_there(spool: Any, new_hub: Any) -> None:
    fill(spool)
    hub = new_hub(local=True).start()
    sending = sender(spool, hub)
    sending.turn()
    sending.turn()
    assert sending.local
    deliver(sending)
    assert [frame.parts for frame in hub.frames] == [(), ()]
    assert hub.spool().byes == [BYE]


def test_peers_and_the_clock(spool: Any, hub: Any) -> None:
    hub.ahead_ns = -90_000_000_000
    sending = sender(spool, hub)
    sending.turn()
    assert [(peer.node, peer.address) for peer in sending.peers] == [(0, "10.0.0.1")]
    assert sending.probe_key == "ee" * 16
    sending.turn()
    assert [peer.node for peer in sending.peers] == [0]  # null: as before
    hub.peers = [{"node": 3, "host": "c", "address": "10.0.0.3", "port": 9}]
    deliver(sending)
    assert [(peer.node, peer.port) for peer in sending.peers] == [(3, 9)]
    first, last = (frame.head for frame in hub.frames)
    assert (first.offset_ns, first.rtt_ns) == (None, None)
    assert last.rtt_ns is not None
    assert last.offset_ns is not None
    assert abs(last.offset_ns - 90_000_000_000) <= last.rtt_ns // 2 + 1


def test_a_run_that_says_much_of_itself_still_joins(spool: Any, hub: Any) -> None:
    from stepscope.store.documents import read_meta, write_meta

    meta = {**read_meta(spool.run_dir), "environment": {"SLURM_X": "y" * 50_000}, "command": ["z" * 50_000]}
    write_meta(spool.run_dir, meta)
    deliver(sender(spool, hub))
    (join,) = hub.joins
    assert join.meta.keys() >= {"python", "command"}
    assert "environment" not in join.meta


def test_where_to_send_is_read_from_the_run() -> None:
    hub = {"url": "https://a:1", "run": "job", "node": 1, "nnodes": 2}
    assert Destination.from_meta({"hub": hub}) == Destination(url="https://a:1", run="job", node=1, nnodes=2)
    for broken in (None, [], {**hub, "node": "1"}, {**hub, "node": True}, {"url": "x"}):
        assert Destination.from_meta({"hub": broken}) is None

"""What other nodes sent, followed while it comes: each frame once, over journals, restarts and what a kill cut off."""

from __future__ import annotations

import asyncio
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster
from hub_feed import sidecar_of, taken_of

from stepscope.hub.ingest.tail import InboxTail
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.runs import Runs
from stepscope.records.run_clock import process_start_ticks
from stepscope.store.create import create_run
from stepscope.store.documents import read_meta, write_meta
from stepscope.store.inbox.journal import journal_path, journals
from stepscope.store.inbox.parts import seal_journal
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.live.ring_files import RingSidecar
from stepscope.wire.frames import FrameHead, Part, RingRows, pack_block, pack_frame, part_of, read_frame, ring_id
from tests.hub.gate_parts import rings_part

SPOOL = "ab" * 8


class Sent:
    """What node 1 with its two ranks sends, a stretch of steps at a time, and the inbox that takes it."""

    def __init__(self, folder: Path, *, journal_bytes: int = 1 << 20, device_timed: bool = False) -> None:
        self.run_dir = create_run(folder / "runs", "night", ["train.py"], sessions=folder / "sessions").run_dir
        self.inbox = Inbox(self.run_dir, journal_bytes=journal_bytes)
        self.inbox.introduce(SPOOL, node=1, host="b", address="", meta={})
        self.series = Cluster(ranks=2, steps=100, unfinished={0: 100, 1: 100}, device_timed=device_timed).series()
        self.rings = [RingSidecar.from_dict(sidecar_of(rank_series, state="running")) for rank_series in self.series]
        self.accept(rings_part(*self.rings))

    def steps(self, first: int, last: int, *, said: bool = True, lost: int = 0) -> None:
        """``said``: with a line of an event; ``lost``: steps of each rank, right before these."""
        rows = []
        for rank_series, about in zip(self.series, self.rings, strict=True):
            slots = [bytes(slot) for slot in taken_of([rank_series], range(first, last)).slots]
            rows.append(RingRows(ring=ring_id(about.key), after_seq=first, last_seq=last, slots=slots, lost=lost))
        offset = self.inbox.positions(SPOOL).files.get("events.jsonl", 0)
        line = part_of("lines", b'{"event":"x"}\n', name="events.jsonl", offset=offset)
        self.accept(part_of("steps", pack_block(rows)), *([line] if said else []))

    def next_journal(self) -> None:
        self.inbox.close()
        self.inbox = Inbox(self.run_dir, journal_bytes=1)

    def accept(self, *parts: Part) -> None:
        raw = pack_frame(FrameHead(node=1, spool=SPOOL, sent_wall_ns=1, offset_ns=None, rtt_ns=None, bye=None), parts)
        self.inbox.accept(read_frame(raw), raw)


@pytest.fixture
def sent(tmp_path: Path) -> Any:
    made = Sent(tmp_path)
    yield made
    made.inbox.close()


def seen(live: LiveRun) -> tuple[int, int, int, int]:
    return live.frontier, live.rows_taken, live.rows_repeated, live.received.events_seen


def test_each_frame_is_told_once(sent: Sent) -> None:
    live = LiveRun()
    tail = InboxTail(sent.run_dir, live)
    assert (tail.poll(), tail.poll(), seen(live)) == (1, 0, (-1, 0, 0, 0))
    sent.steps(0, 20)
    sent.steps(20, 50)
    assert (tail.poll(), tail.poll(), seen(live)) == (2, 0, (49, 100, 0, 2))
    assert live.registry.nodes == ["1"]
    sent.steps(50, 60)
    assert (tail.poll(), seen(live)) == (1, (59, 120, 0, 3))


def test_a_frame_that_is_not_whole_waits_until_it_is(sent: Sent) -> None:
    live = LiveRun()
    tail = InboxTail(sent.run_dir, live)
    sent.steps(0, 20)
    (number,) = journals(sent.run_dir, after=0)
    path = journal_path(sent.run_dir, number)
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 300):
        path.write_bytes(whole[:cut])
        tail.poll()
        assert live.rows_taken == 0
    path.write_bytes(whole)
    assert (tail.poll(), live.rows_taken) == (1, 40)


@pytest.mark.parametrize("caught_up", [True, False])
def test_journals_that_are_full_and_sealed(tmp_path: Path, caught_up: bool) -> None:
    """Every frame has a journal of its own here; who comes when some are sealed still learns who sends."""
    sent, live = Sent(tmp_path, journal_bytes=1), LiveRun()
    tail = InboxTail(sent.run_dir, live)
    sent.steps(0, 20)
    sent.steps(20, 40)
    if caught_up:
        assert (tail.poll(), live.frontier) == (3, 39)
    for number in journals(sent.run_dir, after=0)[:2]:
        seal_journal(sent.run_dir, number)
    sent.steps(40, 60)
    tail.poll()
    assert (live.frontier, live.rows_taken) == ((59, 120) if caught_up else (59, 80))
    sent.inbox.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("device_timed", [False, True])
@pytest.mark.parametrize("told", [1, 3, 5])
def test_what_was_sealed_before_it_was_read_is_told_from_its_part(
    tmp_path: Path, told: int, device_timed: bool
) -> None:
    """``told``: how many of five frames a slow poller had come to when their journals were sealed."""
    sent, now_s = Sent(tmp_path, device_timed=device_timed), iter(range(1000))
    in_time, late = LiveRun(), LiveRun()
    quick = InboxTail(sent.run_dir, in_time)
    slow = InboxTail(sent.run_dir, late, clock=lambda: float(next(now_s)))  # one frame a poll
    sent.steps(0, 20, said=False)
    sent.steps(20, 30)
    sent.steps(30, 60, said=False, lost=4)
    sent.steps(60, 80)
    assert [slow.poll() for _ in range(told)] == [1] * told
    sent.next_journal()
    sent.steps(80, 90)
    sent.next_journal()
    sent.steps(90, 95)
    quick.poll()
    for number in journals(sent.run_dir, after=0)[:2]:
        seal_journal(sent.run_dir, number)
    for _ in range(20):
        slow.poll()
    sent.inbox.close()
    assert seen(late) == seen(in_time) == (94, 190, 0, 4)
    assert late.info()["lost"] == in_time.info()["lost"] == 8
    assert late.ranks() == in_time.ranks()
    assert late.steps() == in_time.steps()
    assert set(late.planes.arrays) == set(in_time.planes.arrays)
    assert all(np.array_equal(late.planes.arrays[name], plane) for name, plane in in_time.planes.arrays.items())


def test_poll_stops_after_a_while_and_goes_on_where_it_was(sent: Sent) -> None:
    now_s = iter(range(100))
    live = LiveRun()
    tail = InboxTail(sent.run_dir, live, clock=lambda: float(next(now_s)))
    sent.steps(0, 20)
    assert [tail.poll() for _ in range(3)] == [1, 1, 0]
    assert live.frontier == 19


def test_serve_follows_a_job_of_several_nodes(sent: Sent) -> None:
    parent = {"pid": os.getppid(), "start_ticks": process_start_ticks(os.getppid())}
    meta = {**read_meta(sent.run_dir), "launcher": parent, "host": platform.node(), "nnodes": 2}
    write_meta(sent.run_dir, meta)
    sent.steps(0, 20)
    runs = Runs.of_folder(sent.run_dir.parent)

    async def work() -> tuple[bool, bool, list[str]]:
        run = await runs.open("night")
        assert run is not None
        before = run.live.frontier
        sent.steps(20, 60)
        while run.live.frontier < 59:
            await asyncio.sleep(0.01)
        file = await runs.open("night")
        await runs.close()
        return before == 19, file is run, run.live.ranks()["node"]

    assert asyncio.run(work()) == (True, True, ["1", "1"])

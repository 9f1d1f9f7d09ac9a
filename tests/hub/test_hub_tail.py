"""What agents and other nodes write, followed while it comes: the same as the run has when it is opened, each once."""

from __future__ import annotations

import asyncio
import json
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster
from fakes.records import records_of
from hub_feed import key_of, sidecar_of, taken_of
from rings import RingStream

from stepscope.hub.ingest import tail as tail_module
from stepscope.hub.ingest.tail import InboxTail, Tail
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.runs import Runs
from stepscope.records.identity import RankIdentity
from stepscope.records.run_clock import process_start_ticks
from stepscope.records.series import RankSeries
from stepscope.records.steps import COMM, FIRST_USER_SLOT, OTHER
from stepscope.ring import RingBatch, RingReader
from stepscope.store.create import create_run
from stepscope.store.documents import read_meta, write_meta
from stepscope.store.inbox.journal import journal_path, journals
from stepscope.store.inbox.parts import seal_journal
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.live.ring_files import RingSidecar, SegmentWriter, write_sidecar
from stepscope.store.live.ring_files import sidecar_of as ring_sidecar
from stepscope.store.paths import EVENTS, SAMPLES, STEPS, segment_path
from stepscope.wire.frames import FrameHead, Part, RingRows, pack_block, pack_frame, part_of, read_frame, ring_id
from tests.hub.gate_parts import rings_part

writer_of = cache(SegmentWriter)
"""Making one reads the whole file."""


def append(run_dir: Path, rank_series: RankSeries, steps: range) -> None:
    rows, _ = records_of(rank_series)
    own = [row.tobytes() for row in rows[np.isin(rows["step"], steps)]]
    writer = writer_of(segment_path(run_dir, key_of(rank_series)))
    writer.append(RingBatch(slots=own, last_seq=steps.stop, lost=0, torn=0))


def test_everything_is_read_once_however_it_was_written(tmp_path: Path) -> None:
    (tmp_path / STEPS).mkdir()
    series = Cluster(ranks=3, steps=700).series()
    live = LiveRun()
    tail = Tail(tmp_path, live)
    assert tail.poll() == 0
    for rank_series in series[:2]:
        write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(rank_series, state="running")))
    for first in (0, 100, 400):
        for rank_series in series:
            append(tmp_path, rank_series, range(first, {0: 100, 100: 400, 400: 700}[first]))
        if first:
            while tail.poll():
                pass
        write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(series[2], state="running")))
    info = live.info()
    assert (info["rows"], info["rows_repeated"], info["rows_unknown"], info["step"]) == (2100, 0, 0, 699)
    steps = live.steps(bins=1000)
    assert steps["first"] == list(range(700))
    assert set(steps["ranks"]) == {3}
    walls = np.array([rank_series.steps["wall_ns"] for rank_series in series]).astype(np.float32)
    assert [q[-1] for q in steps["ns"]["wall"]] == np.round(walls.max(axis=0)).astype(int).tolist()
    assert live.ranks()["rank"] == [0, 1, 2]


def test_phases_that_are_called_as_other_figures_are(tmp_path: Path) -> None:
    (tmp_path / STEPS).mkdir()
    who = RankIdentity(host="node", pid=os.getpid())
    stream = RingStream(tmp_path / "rank.ring", who)
    spent = {"work": 5_000_000, "wall": 7_000_000, "step": 2_000_000, "augment": 1_000_000}
    for slot, name in enumerate(spent, FIRST_USER_SLOT):
        stream.ring.set_phase_name(slot, name)
    for step in range(3):
        outer = stream.ledger.enter(COMM)
        stream.clock.advance(4_000_000)
        stream.ledger.leave(outer)
        for slot, ns in enumerate(spent.values(), FIRST_USER_SLOT):
            outer = stream.ledger.enter(slot)
            stream.clock.advance(ns)
            stream.ledger.leave(outer)
        stream.ledger.end_step(OTHER, step, 0, ())
    reader = RingReader(tmp_path / "rank.ring")
    about = ring_sidecar(reader.header())
    write_sidecar(tmp_path, about)
    SegmentWriter(segment_path(tmp_path, about.key)).append(reader.read(0))
    reader.close()
    stream.close()
    live = LiveRun()
    Tail(tmp_path, live).poll()
    live.tick()
    own = ["work_phase", "wall_phase", "step_phase", "augment"]
    steps = live.steps(1, 1)
    assert {name: ns[0] for name, ns in steps["mean_ns"].items()} == {
        "wall": 19_000_000, "work": 15_000_000, "comm": 4_000_000, **dict(zip(own, spent.values(), strict=True))
    }  # fmt: skip
    assert (steps["worst"][0][0]["step"], steps["worst"][0][0]["step_phase"]) == (1, 2_000_000)
    assert live.info()["phases"] == ["comm", *own]
    assert list(live.ranks(order="work")["mean_ns"]) == ["wall", "work", "comm", *own]


def test_half_a_frame_and_half_a_line_wait(tmp_path: Path) -> None:
    (tmp_path / STEPS).mkdir()
    series = Cluster(ranks=1, steps=20).series()
    write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(series[0], state="running")))
    append(tmp_path, series[0], range(10))
    path = segment_path(tmp_path, key_of(series[0]))
    size = path.stat().st_size
    append(tmp_path, series[0], range(10, 20))
    whole = path.read_bytes()
    path.write_bytes(whole[: size + 40])
    event = json.dumps({"event": "note", "wall_ns": 1}).encode()
    (tmp_path / EVENTS).write_bytes(event + b"\n" + event[:5])
    live = LiveRun()
    tail = Tail(tmp_path, live)
    tail.poll()
    assert (live.planes.newest, len(live.events())) == (9, 1)
    path.write_bytes(whole)
    (tmp_path / EVENTS).write_bytes(event + b"\n" + event + b"\n")
    (tmp_path / SAMPLES).write_bytes(json.dumps({"kind": "host", "wall_ns": 5}).encode() + b"\n")
    tail.poll()
    assert (live.planes.newest, len(live.events())) == (19, 2)
    assert live.samples(kinds=["host"]) == [{"kind": "host", "wall_ns": 5}]


def test_a_rank_that_ended_is_seen(tmp_path: Path) -> None:
    (tmp_path / STEPS).mkdir()
    series = Cluster(ranks=2, steps=20).series()
    live = LiveRun()
    tail = Tail(tmp_path, live)
    for rank_series in series:
        write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(rank_series, state="running")))
        append(tmp_path, rank_series, range(10))
    tail.poll()
    write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(series[0], state="vanished")))
    append(tmp_path, series[1], range(10, 20))
    tail.poll()
    assert live.frontier == 19
    assert live.ranks()["state"] == ["vanished", "running"]


def test_who_comes_late_sees_the_same_as_who_was_there(tmp_path: Path) -> None:
    """Many small frames, and more steps than are kept one by one: caught up with at once, or as they come."""
    (tmp_path / STEPS).mkdir()
    series = Cluster(ranks=3, steps=3000, missing={1: range(700, 720)}).series()
    for rank_series in series:
        write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(rank_series, state="running")))
    there = LiveRun()
    tail = Tail(tmp_path, there)
    for first in range(0, 3000, 20):
        for rank_series in series:
            append(tmp_path, rank_series, range(first, first + 20))
        while tail.poll():
            pass
    late = LiveRun()
    tail = Tail(tmp_path, late)
    while tail.poll():
        pass
    assert late.planes.newest == there.planes.newest == 2999
    assert late.info()["rows"] == there.info()["rows"] == 8980
    both = [live.steps(bins=4096) for live in (late, there)]
    assert both[0] == both[1]
    assert sum(both[0]["steps"]) == 3000


def test_of_the_samples_of_a_night_the_newest_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"wall_ns": number, "kind": "host"}) + "\n" for number in range(1000)]
    (tmp_path / SAMPLES).write_text("".join(lines))
    monkeypatch.setattr(tail_module, "KEPT_BYTES", 100 * len(lines[-1]) + 7)
    live = LiveRun()
    tail = Tail(tmp_path, live)
    assert tail.poll() == 100
    assert [sample["wall_ns"] for sample in live.samples()] == list(range(900, 1000))
    with (tmp_path / SAMPLES).open("a") as file:
        file.write('{"wall_ns": 1000}\n')
    assert tail.poll() == 1
    assert live.samples()[-1]["wall_ns"] == 1000


def test_a_tail_of_the_last_steps_begins_in_the_middle_and_follows_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "RECENT_BYTES", 4096)
    (tmp_path / STEPS).mkdir()
    series = Cluster(ranks=2, steps=700).series()
    for rank_series in series:
        for first in range(0, 600, 2):
            append(tmp_path, rank_series, range(first, first + 2))
    live = LiveRun()
    tail = Tail(tmp_path, live, recent=True)
    while tail.poll():
        pass
    first = live.steps(bins=1000)["first"]
    assert (0 < first[0] < 599, first) == (True, list(range(first[0], 600)))
    for rank_series in series:
        append(tmp_path, rank_series, range(600, 602))
    tail.poll()
    assert live.info()["step"] == 601
    assert live.info()["rows_repeated"] == 0


# -- What other nodes sent, followed while it comes: each frame once, over journals, restarts and what a kill cut off -


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

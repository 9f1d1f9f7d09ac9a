"""Samples that are thinned while they are sent: the hub has each one once, as it was taken or within a coarser one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.agent.disk_space import SEGMENT_S, SampleKeeper
from stepscope.agent.shipping import outgoing as module
from stepscope.agent.shipping.outgoing import Outgoing
from stepscope.store.file_io import append_jsonl
from stepscope.store.inbox.receiver import Gap, Inbox
from stepscope.store.live.sample_files import open_sample_files, sample_segments
from stepscope.wire.frames import FrameHead, pack_frame, read_frame

SPOOL = "ab" * 16
EVERY_S = 15
"""Between samples, to be quick."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour takes several frames, and the limits of what is read fall into the middle of it."""
    monkeypatch.setattr(module, "TEXT_BYTES", 9000)
    monkeypatch.setattr(module, "LINES_BYTES", 20_000)


class Node:
    """An agent with a run that others send to, hours long in a moment."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.now_s = 0.0
        self.written = 0
        self.restart()

    def restart(self) -> None:
        self.outgoing = Outgoing(self.run_dir)
        self.keeper = SampleKeeper(self.run_dir, self.outgoing.samples, clock=lambda: self.now_s)

    def hour(self) -> None:
        at = range(int(self.now_s), int(self.now_s + SEGMENT_S), EVERY_S)
        append_jsonl(self.run_dir / "samples.jsonl", [_sample(second, index) for second in at for index in range(2)])
        self.written += 2 * len(at)
        self.now_s += SEGMENT_S
        self.thin()

    def thin(self) -> None:
        before_s = self.now_s
        for _ in range(4):
            self.keeper.check()
            while self.keeper.busy:
                self.keeper.check()
            self.now_s += 11
        self.now_s = before_s


class Hub:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.received: list[bytes] = []
        self.inbox = Inbox(run_dir)

    def restart(self) -> None:
        self.inbox.close()
        self.inbox = Inbox(self.run_dir)

    def take(self, outgoing: Outgoing, *, ack: bool = True) -> bool:
        """Whether there was something to take."""
        batch = outgoing.collect()
        raw = pack_frame(FrameHead(node=1, spool=SPOOL, sent_wall_ns=0), batch.parts)
        try:
            accepted = self.inbox.accept(read_frame(raw), raw)
        except Gap as gap:
            outgoing.rewind(gap.positions)
            return True
        self.received += [line for line in accepted.lines.get("samples.jsonl", []) if line.strip()]
        if ack:
            outgoing.acked(batch)
        return bool(batch.parts)

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.received]


def _sample(second: int, index: int) -> dict[str, Any]:
    return {"wall_ns": second * 10**9, "node": "a", "kind": "gpu", "index": index, "power_w": 300.0 + second % 7}


def _stood_for(samples: list[dict[str, Any]]) -> Counter[int]:
    """By GPU, how many samples as they were taken."""
    counted: Counter[int] = Counter()
    for sample in samples:
        counted[sample["index"]] += sample["over"]["samples"] if "over" in sample else 1
    return counted


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Any]:
    numbers = iter(range(10**6))

    def make() -> tuple[Node, Hub]:
        place = tmp_path / str(next(numbers))
        for name in ("node", "hub"):
            (place / name).mkdir(parents=True)
        return Node(place / "node"), Hub(place / "hub")

    return make


@given(
    st.lists(
        st.sampled_from(["hour", "hours", "send", "send", "send", "lose ack", "agent", "hub", "late rewind"]),
        max_size=20,
    )
)
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_sample_is_received_once_whatever_is_thinned_or_cut(fresh: Any, deeds: list[str]) -> None:
    node, hub = fresh()
    for deed in deeds:
        if deed == "hour":
            node.hour()
        elif deed == "hours":
            for _ in range(27):
                node.hour()
        elif deed == "agent":
            node.restart()
        elif deed == "hub":
            hub.restart()
        elif deed == "late rewind":
            node.outgoing.rewind(hub.inbox.positions(SPOOL))
            node.thin()
        else:
            hub.take(node.outgoing, ack=deed == "send")
    node.outgoing.rewind(hub.inbox.positions(SPOOL))
    while hub.take(node.outgoing):
        pass
    hub.inbox.close()
    each = node.written // 2
    assert _stood_for(hub.samples()) == +Counter({0: each, 1: each})
    with open_sample_files(node.run_dir) as files:
        assert _stood_for([json.loads(line) for file in files for line in file]) == +Counter({0: each, 1: each})


def test_a_hub_that_was_away_for_days_gets_them_thinned(fresh: Any) -> None:
    node, hub = fresh()
    for _ in range(72):
        node.hour()
    while hub.take(node.outgoing):
        pass
    hub.inbox.close()
    spans = Counter(sample.get("span_s", 0) for sample in hub.samples())
    assert _stood_for(hub.samples()) == {0: 72 * 240, 1: 72 * 240}
    assert set(spans) == {0, 60, 600}
    assert spans[0] == 480, "the last hour is there in full"
    assert spans[600] == 24 * 6 * 2, "a day in steps of ten minutes"
    assert spans[60] == 47 * 60 * 2


def test_what_it_has_in_part_waits_and_is_thinned_when_it_has_all(fresh: Any) -> None:
    node, hub = fresh()
    node.hour()
    hub.take(node.outgoing)  # the link is cut in the middle of the first hour
    for _ in range(3):
        node.hour()
    assert [segment.span_s for segment in sample_segments(node.run_dir)] == [0, 60, 60, 0]
    node.restart()  # another agent takes over; it cannot know what was on its way
    node.thin()
    assert [segment.span_s for segment in sample_segments(node.run_dir)] == [0, 60, 60, 0]
    node.outgoing.rewind(hub.inbox.positions(SPOOL))
    while hub.take(node.outgoing):
        pass
    node.now_s += 60
    node.thin()
    assert [segment.span_s for segment in sample_segments(node.run_dir)] == [60, 60, 60, 0]
    hub.inbox.close()
    assert _stood_for(hub.samples()) == {0: 960, 1: 960}

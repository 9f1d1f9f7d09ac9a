"""A year of a run in seconds: what it takes on disk, on its node and at its hub, ends up flat.

On a short calendar, so that it is seconds: a day has six hours, and a month five days.  (With the real one, ten days on
a node are in ``test_sample_keeper.py`` and three weeks at a hub in ``tests/store/test_sample_parts.py``.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.agent import disk_space
from stepscope.agent.disk_space import DiskKeeper, SampleKeeper, _ThinningRate
from stepscope.agent.journal import Journal
from stepscope.agent.shipping import outgoing as outgoing_module
from stepscope.agent.shipping.outgoing import Outgoing
from stepscope.store.documents import write_meta
from stepscope.store.file_io import run_bytes
from stepscope.store.inbox import parts
from stepscope.store.inbox.journal import journals, read_positions
from stepscope.store.inbox.parts import _Age
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.inbox.remote import read_remote
from stepscope.store.live import logs
from stepscope.store.live.sample_files import open_sample_files, samples_end
from stepscope.wire.frames import FrameHead, pack_frame, read_frame

HOUR_S = 3600
DAY_H = 6
MONTH_H = 5 * DAY_H
EVERY_S = 60
RATES = (
    _ThinningRate(span_s=0, newest=1, group=1, then_s=60),
    _ThinningRate(span_s=60, newest=DAY_H, group=DAY_H, then_s=600),
    _ThinningRate(span_s=600, newest=5, group=5, then_s=3600),
)
AGES = (
    _Age(span_s=0, after_s=2 * HOUR_S, covering_s=HOUR_S, then_s=60),
    _Age(span_s=60, after_s=(DAY_H + 2) * HOUR_S, covering_s=DAY_H * HOUR_S, then_s=600),
    _Age(span_s=600, after_s=(MONTH_H + 2 * DAY_H) * HOUR_S, covering_s=MONTH_H * HOUR_S, then_s=3600),
)
SPOOL = "ab" * 16
LOG_BYTES = 1 << 20
PRINTED = (b"x" * 99 + b"\n") * 300
"""In an hour."""


class Job:
    """A node that is recorded and sends, and its hub, on clocks of their own."""

    def __init__(self, folder: Path) -> None:
        self.node, self.hub = folder / "node", folder / "hub"
        for place in (self.node, self.hub):
            (place / "logs").mkdir(parents=True)
            write_meta(place, {"schema": 1, "name": "weeks"})
        self.now_s = 0
        self.written = 0
        self.printed = 0
        self.inbox = Inbox(self.hub, journal_bytes=10_000, clock=lambda: self.now_s * 10**9)
        self.journal = Journal(self.node)
        self.start_agent()

    def start_agent(self) -> None:
        self.outgoing = Outgoing(self.node)
        self.outgoing.rewind(self.inbox.positions(SPOOL))
        self.samples = SampleKeeper(self.node, self.outgoing.samples, clock=lambda: float(self.now_s))
        self.keeper = DiskKeeper(
            self.node, 20 << 30, journal=self.journal, samples=self.samples, clock=lambda: float(self.now_s)
        )

    def hour(self, *, away: bool) -> None:
        """``away``: the hub cannot be reached."""
        at = range(self.now_s, self.now_s + HOUR_S, EVERY_S)
        about = {"node": "a", "kind": "gpu", "index": 0, "power_w": 300.0, "util_percent": 97}
        self.journal.samples([{"wall_ns": second * 10**9, **about} for second in at])
        self.journal.flush()
        self.written += len(at)
        with (self.node / "logs" / "rank-0.log").open("ab") as log:
            log.write(PRINTED)
        self.printed += len(PRINTED)
        self.now_s += HOUR_S
        self.poll()
        if not away:
            self.send()
        for number in journals(self.hub, after=0):
            if number < self.inbox.journal:
                parts.seal_journal(self.hub, number)

    def poll(self) -> None:
        """As often as there is something to do; an agent looks every ten seconds."""
        before_s = self.now_s
        for _ in range(3):
            self.keeper.check()
            while self.samples.busy:
                self.keeper.check()
            self.now_s += 30
        self.now_s = before_s

    def send(self) -> None:
        while (batch := self.outgoing.collect()).parts:
            raw = pack_frame(FrameHead(node=1, spool=SPOOL, sent_wall_ns=0, offset_ns=0), batch.parts)
            self.inbox.accept(read_frame(raw), raw)
            self.outgoing.acked(batch)


def stood_for(samples: list[dict[str, Any]]) -> int:
    return sum(sample["over"]["samples"] if "over" in sample else 1 for sample in samples)


@pytest.mark.soak  # near: ten days in test_sample_keeper.py
def test_after_a_year_node_and_hub_take_what_they_took_after_four_months(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_space, "RATES", RATES)
    monkeypatch.setattr(parts, "AGES", AGES)
    monkeypatch.setattr(logs, "EACH_BYTES", LOG_BYTES)
    monkeypatch.setattr(outgoing_module, "LINES_BYTES", 1 << 16)
    job = Job(tmp_path)
    taken: dict[str, list[int]] = {"node": [], "hub": []}
    for hour in range(12 * MONTH_H):
        job.hour(away=hour % 20 > 16)  # cut off now and then
        if hour % 100 == 99:
            job.start_agent()  # it was killed
        taken["node"].append(run_bytes(job.node))
        taken["hub"].append(run_bytes(job.hub))
    job.send()
    job.inbox.close()

    for name, sizes in taken.items():
        before, after = max(sizes[: 4 * MONTH_H]), max(sizes[4 * MONTH_H :])
        assert after < 1.1 * before, f"{name}: {sizes[::MONTH_H]}"
        assert after < 3 * LOG_BYTES, f"{name}: {sizes[::MONTH_H]}"
    assert job.printed > 10 * LOG_BYTES
    assert samples_end(job.node) > 2_000_000

    with open_sample_files(job.node) as files:
        here = [json.loads(line) for file in files for line in file]
    there = read_remote(job.hub, read_positions(job.hub), lost=lambda node: False).records("samples.jsonl")
    assert stood_for(here) == stood_for(there) == job.written, "each one counts, once"
    for samples in (here, there):
        assert {sample.get("span_s", 0) for sample in samples} >= {0, 600, 3600}
        assert all("over" not in sample for sample in samples if sample["wall_ns"] >= (job.now_s - HOUR_S) * 10**9)
    for log in (job.node / "logs" / "rank-0.log", *(job.hub / "logs").iterdir()):
        assert log.stat().st_size == job.printed
        assert log.read_bytes().endswith(PRINTED)

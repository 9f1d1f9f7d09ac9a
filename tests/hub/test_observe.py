"""What the alerts' rules see of a live run."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, slow_at
from hub_feed import sidecar_of, taken_of

from stepscope.alerts.observation import NodeSilence, NotFinite, Observation
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.observe import Observer
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.steps import NOTE, NOTE_SLOT
from stepscope.store.live.ring_files import RingSidecar

S = 1_000_000_000
MEASURES = ("step_time", "memory_growth", "gpu_idle", "not_finite")


class Feed:
    """A model of a job that is fed step by step, and its observer."""

    def __init__(self, cluster: Cluster) -> None:
        self.series = cluster.series()
        self.clock_s = 0.0
        self.live = LiveRun(clock=lambda: self.clock_s)
        self.now_ns = ANCHOR_WALL_NS
        for series in self.series:
            self.live.ring(RingSidecar.from_dict(sidecar_of(series, state="running")), node=series.identity.host)
        self.observer = Observer(self.live, measures=MEASURES, now_ns=lambda: self.now_ns)

    def steps(self, *span: int) -> None:
        self.live.rows(taken_of(self.series, range(*span)))
        self.live.tick()

    def lines(self, file: str, *records: dict[str, Any], node: str = "host-0") -> None:
        self.live.lines(file, [json.dumps(record).encode() for record in records], node=node, offset_ns=0)

    def notes(self, values: dict[int, str], rank: int = 0) -> None:
        slots = [NOTE_SLOT.pack(NOTE, 0, 1, step, len(text), text.encode()) for step, text in values.items()]
        self.live.noted.take(np.frombuffer(b"".join(slots), np.uint8).reshape(-1, 256), [(rank, 1)] * len(slots))

    def see(self) -> Observation:
        return self.observer.observe(())


def test_steps_their_times_and_the_last_checkpoint() -> None:
    feed = Feed(Cluster(ranks=4, steps=60, hosts=2, noise=0.0, faults=(slow_at(1, "checkpoint", 50.0, range(20, 21)),)))
    before = feed.see()
    assert (before.step, before.last_step_wall_ns, before.doing) == (None, None, "starts")
    feed.steps(40)
    seen = feed.see()
    assert (seen.step, seen.ranks, seen.attempt, seen.checkpoint_step) == (39, 4, 0, 20)
    assert (seen.steps[0], seen.steps[-1], len(seen.steps)) == (
        1,
        39,
        37,
    )  # without the first, the checkpoint's and its next
    assert {round(length / 1e6) for length in seen.step_ns} == {39}
    walls = dict(seen.step_walls)
    assert walls[30] - walls[29] == 39_000_000
    assert seen.last_step_wall_ns == walls[39] + 39_000_000
    assert seen.checkpoint_wall_ns == walls[20] + 89_000_000
    assert sorted(set(seen.hosts.values())) == sorted({series.identity.host for series in feed.series})
    feed.steps(40, 60)
    assert feed.see().checkpoint_step == 20


def test_memory_at_the_beginning_of_epochs_is_that_of_the_device() -> None:
    feed = Feed(Cluster(ranks=2, steps=50, epoch_every=10, allocated_mb=lambda rank, step: 100.0 * rank + step))
    feed.steps(50)
    seen = [(each.rank, each.step, each.bytes >> 20) for each in feed.see().memory]
    assert [entry for entry in seen if entry[0] == 1] == [(1, step, 100 + step) for step in (0, 10, 20, 30, 40)]


def test_memory_of_processes_counts_without_a_device() -> None:
    feed = Feed(Cluster(ranks=1, steps=500, epoch_every=100))
    host = feed.series[0].identity.host
    began = ANCHOR_WALL_NS
    for second in range(25):
        sample = {"kind": "process", "rank": 0, "node": host, "rss": (500 + second) << 20, "rss_file": 100 << 20}
        feed.lines("samples.jsonl", {**sample, "wall_ns": began + second * S}, node=host)
    feed.steps(500)
    found = feed.see().memory
    assert [each.step for each in found] == [0, 100, 200, 300, 400]
    walls_s = [(each.wall_ns - began) / S for each in found]
    middles_s = [0.0, *((before + after) / 2 for before, after in pairwise(walls_s))]  # of the epochs before
    assert [each.bytes >> 20 for each in found] == pytest.approx([400 + at_s for at_s in middles_s], abs=1)


@pytest.mark.parametrize("delay_ms", [-400, 0, 400])
def test_memory_that_jumps_where_epochs_meet_grows_evenly(delay_ms: int) -> None:
    """Samples nearest to the beginning of an epoch are from before the jump now and then."""
    feed = Feed(Cluster(ranks=1, steps=500, epoch_every=100))
    epoch_s, host = 3.9, feed.series[0].identity.host
    for tick in range(25):
        wall_ns = ANCHOR_WALL_NS + round(tick * 1.05 * S)
        jumps = int(max(0.0, (wall_ns - ANCHOR_WALL_NS) / 1e9 - delay_ms / 1e3) // epoch_s)
        sample = {"kind": "process", "rank": 0, "rss": (500 + 110 * jumps) << 20, "wall_ns": wall_ns}
        feed.lines("samples.jsonl", sample, node=host)
    feed.steps(500)
    levels = [each.bytes >> 20 for each in feed.see().memory]
    assert [after - before for before, after in pairwise(levels[1:])] == [110, 110, 110]


def test_values_that_are_not_finite() -> None:
    feed = Feed(Cluster(ranks=2, steps=20))
    feed.steps(20)
    feed.notes({3: '{"~loss":2.0}', 4: '{"~loss":"nan"}', 5: '{"~loss":"nan"}'})
    feed.notes({4: '{"~loss":1.0}'}, rank=1)
    nan = NotFinite(name="loss", ranks=(0,), first_step=4, last_step=5, steps=2, finite_steps=0)
    assert feed.see().not_finite == (nan,)
    feed.notes({6: '{"~loss":"inf"}', 7: '{"~loss":1.0}', 8: '{"~loss":1.0}'})
    (seen,) = feed.see().not_finite
    assert (seen.steps, seen.last_step, seen.finite_steps) == (3, 6, 2)


def test_nodes_gpus_and_excuses() -> None:
    feed = Feed(Cluster(ranks=4, steps=20, hosts=2))
    feed.steps(20)
    host = feed.series[-1].identity.host
    feed.now_ns += 100 * S
    lost = {"event": "node_lost", "node": 1, "host": host, "silent_s": 8.0, "wall_ns": feed.now_ns}
    feed.lines("events.jsonl", lost)
    (silent,) = feed.see().nodes_silent
    ranks = tuple(series.rank for series in feed.series if series.identity.host == host)
    assert silent == NodeSilence(host=host, since_wall_ns=feed.now_ns - 8 * S, ranks=ranks)
    feed.lines("events.jsonl", {"event": "node_back", "host": host, "wall_ns": feed.now_ns})
    excuse = {"event": "not_a_hang", "reason": "Rank 1 compiles at train.py:3.", "wall_ns": feed.now_ns}
    feed.lines("events.jsonl", excuse)
    seen = feed.see()
    assert (seen.nodes_silent, seen.doing) == ((), "is not hung: Rank 1 compiles at train.py:3")
    for second, used in enumerate((90, 2, 0, 3)):
        sample = {"kind": "gpu", "node": host, "index": 0, "util_percent": used, "wall_ns": feed.now_ns + second * S}
        feed.lines("samples.jsonl", sample, node=host)
        (gpu,) = feed.see().gpus
    assert (gpu.busy_wall_ns, gpu.sample_wall_ns) == (feed.now_ns, feed.now_ns + 3 * S)


def test_a_node_is_quiet_although_all_ranks_of_the_others_have_ended() -> None:
    feed = Feed(Cluster(ranks=4, steps=20, hosts=2))
    feed.steps(20)
    first, last = feed.series[0].identity.host, feed.series[-1].identity.host
    feed.clock_s += 2.0
    for series in feed.series:
        if series.identity.host == first:
            feed.live.ring(RingSidecar.from_dict(sidecar_of(series, state="exception")), node=first)
    assert feed.see().nodes_quiet == ()
    feed.clock_s += 2.0
    (quiet,) = feed.see().nodes_quiet
    assert (quiet.host, quiet.since_wall_ns) == (last, feed.now_ns - 4 * S)


def test_the_line_in_which_a_phase_became_long() -> None:
    feed = Feed(Cluster(ranks=2, steps=40))
    feed.steps(40)
    for step, line in ((5, 94), (6, 94), (21, 51), (22, 51), (30, 51)):
        stack = {"rank": 0, "step": step, "phase": "input", "wall_ns": feed.now_ns}
        frames = [{"file": "/usr/lib/python3.11/random.py", "line": 3}, {"file": "/jobs/train.py", "line": line}]
        feed.lines("stacks.jsonl", {**stack, "frames": frames})
    found = {"kind": "change_point", "phase": "input", "ranks": [], "steps": [20, 39], "evidence": {}, "title": ""}
    episode = FindingEpisode(
        number=1, change="opened", finding=found, attempt=0, first_step=30, first_wall_ns=1, step=30, wall_ns=1
    )
    assert feed.observer.observe((episode,)).lines_by_phase == {"input": "train.py:51"}
    assert feed.observer.observe(()).lines_by_phase == {}


def test_the_line_of_a_slow_rank_that_the_rules_had_too_few_stacks_for() -> None:
    """Rank 1 sleeps after the model's forward: its time counts as forward, and its stacks are outside all phases."""
    feed = Feed(Cluster(ranks=3, steps=40, noise=0.0, faults=(slow_at(1, "forward", 100.0, range(20, 40)),)))
    feed.steps(40)
    script = {"file": "/scripts/train.py", "function": "main"}
    for rank, step, between, line in (
        *((0, 22, False, 13), (1, 5, True, 14), (1, 6, False, 13), (1, 21, False, 11), (1, 24, True, 14)),
    ):
        stack = {"rank": rank, "step": step, "phase": "other", "between": between, "wall_ns": feed.now_ns}
        feed.lines("stacks.jsonl", {**stack, "frames": [{**script, "line": line}]})
    found = {
        "kind": "compute_straggler",
        "phase": "forward",
        "ranks": [1],
        "steps": [20, 35],
        "evidence": {"clock": "host", "place": None},
        "title": "Rank 1 is slow.",
    }
    episode = FindingEpisode(
        number=7, change="opened", finding=found, attempt=0, first_step=30, first_wall_ns=1, step=30, wall_ns=1
    )
    assert feed.observer.observe((episode,)).lines_by_finding == {}  # a single stack may have been taken anywhere
    stack = {"rank": 1, "step": 38, "phase": "other", "between": False, "wall_ns": feed.now_ns}
    feed.lines("stacks.jsonl", {**stack, "frames": [{**script, "line": 11}]})
    assert feed.observer.observe((episode,)).lines_by_finding == {7: "train.py:11"}
    assert feed.observer.observe(()).lines_by_finding == {}

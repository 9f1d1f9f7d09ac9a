"""A recorded run as a timeline: which steps, which bars, and a file that viewers open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster, slow_at
from fakes.traces import MadeTrace
from fakes.traffic import Exchange, Traffic
from trace_events import checked_events, tracks_of

from stepscope.records.hang import Culprit, HangRecord
from stepscope.records.series import RunData
from stepscope.reports.run_timeline import MOST_CELLS, chosen_steps, run_timeline
from stepscope.traces.exports import write_run

LEADING: dict[str, Any] = {"kind": "straggler", "severity": "critical", "title": "Rank 2 is slow", "steps": [250, 399]}
REMARK: dict[str, Any] = {"kind": "warmup", "severity": "info", "title": "The first step", "steps": [0, 0]}


@pytest.fixture(scope="module")
def run() -> RunData:
    traffic = Traffic(mesh={"dp": 4}, exchanges=(Exchange(dimension="dp", op="all_reduce", count=2),))
    return Cluster(ranks=4, steps=400, traffic=traffic, faults=(slow_at(2, "backward", 30, range(250, 400)),)).run()


def test_the_steps_around_the_onset(run: RunData) -> None:
    assert chosen_steps(run, [REMARK, LEADING], None)[:2] == (200, 399)
    assert "around the onset of the leading finding" in chosen_steps(run, [LEADING], None)[2]
    assert chosen_steps(run, [{**LEADING, "steps": [120, 400]}], None)[:2] == (70, 269)
    assert chosen_steps(run, [{**LEADING, "steps": [3, 9]}], None)[:2] == (0, 199)
    assert chosen_steps(run, [REMARK], None)[:2] == (200, 399)
    assert chosen_steps(run, [], (10, 30))[:2] == (10, 30)
    assert chosen_steps(run, [], (390, 9000))[:2] == (390, 399)


def test_no_steps(run: RunData) -> None:
    with pytest.raises(ValueError, match="steps 0 to 399, none of them in 400 to 500"):
        chosen_steps(run, [], (400, 500))
    with pytest.raises(ValueError, match="no steps"):
        chosen_steps(replace(run, ranks=()), [], None)


def test_a_large_job_has_fewer_steps() -> None:
    run = Cluster(ranks=600, steps=300).run()
    first, last, _ = chosen_steps(run, [], None)
    assert (last - first + 1) * 600 <= MOST_CELLS
    with pytest.raises(ValueError, match="at most 166 steps"):
        chosen_steps(run, [], (0, 299))


def test_steps_and_phases_have_their_lengths(run: RunData) -> None:
    timeline = run_timeline(run, [LEADING], (240, 260))
    assert (timeline.first, timeline.last) == (240, 260)
    for series in run.ranks:
        own = {track.name: track.bars for track in timeline.tracks if track.rank == series.rank}
        chosen = (series.steps["step"] >= 240) & (series.steps["step"] <= 260)
        assert [bar.name for bar in own["steps"]] == [f"step {step}" for step in range(240, 261)]
        lengths = np.array([bar.end_ns - bar.start_ns for bar in own["steps"]])
        assert np.abs(lengths - series.steps["wall_ns"][chosen]).max() <= 2
        for at, step in enumerate(own["steps"]):
            parts = [bar for bar in own["phases"] if bar.args["step"] == 240 + at]
            assert parts[0].start_ns == step.start_ns
            assert abs(parts[-1].end_ns - step.end_ns) <= len(parts)
            backward = next(bar for bar in parts if bar.name == "backward")
            exact = series.steps.phase("backward")[chosen][at]
            assert abs(backward.end_ns - backward.start_ns - exact) <= 1


def test_collectives_of_the_steps_that_have_them(run: RunData) -> None:
    timeline = run_timeline(run, [], (240, 260))
    found = [track for track in timeline.tracks if track.rank == 1 and track.name.startswith("collectives")]
    bars = [bar for track in found for bar in track.bars]
    # Every sixteenth step has its collectives one by one.
    assert {bar.args["step"] for bar in bars} == {240, 256}
    assert {bar.name for bar in bars} == {"all_reduce"}


def test_findings_hangs_and_events(run: RunData) -> None:
    at_ns = run_timeline(run, [], (300, 310)).start_ns
    hang = HangRecord(
        number=1,
        host="node0",
        kind="hang",
        title="Rank 3 hangs the job.",
        declared_wall_ns=at_ns + 60 * 10**9,
        stopped_wall_ns=at_ns + 10**6,
        threshold_s=30.0,
        culprits=(Culprit(rank=3, reason="blocked"),),
        over="recovered",
        over_wall_ns=at_ns + 61 * 10**9,
    )
    noted = {"event": "seen", "rank": 0, "wall_ns": at_ns + 4, "values": {"loss": 1.0}}
    events = (
        {"event": "checkpoint", "rank": 0, "wall_ns": at_ns + 5},
        {"event": "late", "wall_ns": at_ns * 2},
        {},
        noted,
    )
    timeline = run_timeline(
        replace(run, hangs=(hang,), events=events), [LEADING, {**LEADING, "title": "b"}], (300, 310)
    )
    own = {track.name: track.bars for track in timeline.tracks if track.rank == -1}
    assert [(name, [bar.name for bar in bars]) for name, bars in own.items()] == [
        ("findings", ["Rank 2 is slow"]),
        ("findings (2)", ["b"]),
        ("hangs and stalls", ["Rank 3 hangs the job."]),
        ("events", ["checkpoint"]),
    ]
    (stall,) = own["hangs and stalls"]
    assert (stall.end_ns - stall.start_ns, stall.args["ranks"]) == (61 * 10**9 - 10**6, [3])


def test_a_single_slow_step_is_a_stall_with_its_rank_and_phase() -> None:
    run = Cluster(ranks=4, steps=100, faults=(slow_at(1, "input", 2000, range(40, 41)),)).run()
    own = [track for track in run_timeline(run, [], (20, 99)).tracks if track.rank == -1]
    (stall,) = next(track.bars for track in own if track.name == "hangs and stalls")
    assert (stall.args["step"], stall.args["rank"], stall.args["phase"]) == (40, 1, "input")
    assert stall.args["lost_ms"] == pytest.approx(2000, rel=0.02)
    assert stall.name.startswith("Step 40 takes 2.")
    assert 1.9e9 < stall.end_ns - stall.start_ns < 2.3e9
    assert [track.name for track in run_timeline(run, [], (50, 90)).tracks if track.rank == -1] == []


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_file_that_viewers_open(run: RunData, tmp_path: Path, name: str) -> None:
    """With a capture of rank 2 on the same clock."""
    timeline = run_timeline(run, [LEADING], (240, 260))
    made = MadeTrace(rank=2)
    made.step(245, 0, 100)
    made.launched("gemm", at=10, start=20, dur=30)
    trace = made.trace()
    trace = replace(trace, meta=replace(trace.meta, origin_ns=timeline.start_ns + 10**6))
    written = write_run(timeline.tracks, timeline.hosts, [(2, trace)], tmp_path / name, zero_ns=timeline.start_ns)
    events = checked_events(tmp_path / name)
    assert len(events) == written
    tracks = tracks_of(events)
    assert list(tracks) == ["run", "rank 0 · node0", "rank 1 · node0", "rank 2 · node0", "rank 3 · node0"]
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[pid] for pid in sorted(order, key=lambda pid: order[pid])] == list(tracks)
    assert len(tracks["rank 1 · node0"]["steps"]) == 21
    assert [event["ts"] for event in tracks["rank 2 · node0"]["stream 7"]] == [1020]
    assert tracks["run"]["findings"][0]["name"] == "Rank 2 is slow"

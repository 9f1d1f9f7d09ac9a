"""Samples thin out with age: bounded after weeks, with true means and peaks, and nothing that a hub has in part."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from clock import SecondsClock

from stepscope.agent.disk_space import SEGMENT_S, SampleClaim, SampleKeeper
from stepscope.store.file_io import append_jsonl
from stepscope.store.live.sample_files import (
    open_sample_files,
    read_samples,
    sample_bytes,
    sample_segments,
    samples_end,
)

GPUS = 2
EVERY_S = 20
"""Between samples, to be quick; an hour is 180 of each."""


def gpu(second: int, index: int) -> dict[str, Any]:
    power = 900.0 if second == 7220 and index == 1 else 300.0 + second // EVERY_S % 3
    return {"wall_ns": second * 10**9, "node": "a", "kind": "gpu", "index": index, "power_w": power}


def record(run_dir: Path, keeper: SampleKeeper, clock: SecondsClock, hours: int) -> None:
    for _ in range(hours):
        begin = int(clock.now_s)
        rows = [gpu(begin + at, index) for at in range(0, int(SEGMENT_S), EVERY_S) for index in range(GPUS)]
        append_jsonl(run_dir / "samples.jsonl", rows)
        clock.now_s += SEGMENT_S
        work(keeper, clock)


def work(keeper: SampleKeeper, clock: SecondsClock) -> None:
    before = clock.now_s
    for _ in range(4):
        keeper.check()
        while keeper.busy:
            keeper.check()
        clock.now_s += 11
    clock.now_s = before


def lines(run_dir: Path) -> list[dict[str, Any]]:
    with open_sample_files(run_dir) as files:
        return [json.loads(line) for file in files for line in file]


@pytest.mark.soak  # near: tests/agent/shipping/test_thinned_samples.py
def test_ten_days_stay_small_and_keep_mean_and_peak(tmp_path: Path) -> None:
    clock = SecondsClock()
    keeper = SampleKeeper(tmp_path, clock=clock)
    record(tmp_path, keeper, clock, 24 * 10)
    there = sample_segments(tmp_path)
    assert there[0].begin == 0
    assert all(one.end == after.begin for one, after in itertools.pairwise(there))
    assert sample_bytes(tmp_path) < samples_end(tmp_path) / 4
    found = lines(tmp_path)
    total = 24 * 10 * int(SEGMENT_S) // EVERY_S * GPUS
    assert sum(row["over"]["samples"] if "over" in row else 1 for row in found) == total
    peaks = [row["over"]["max"]["power_w"] if "over" in row else row["power_w"] for row in found]
    assert max(peaks) == 900.0
    means = [(row["over"]["mean"]["power_w"], row["over"]["samples"]) for row in found if "over" in row]
    mean = sum(value * count for value, count in means) / sum(count for _, count in means)
    assert mean == pytest.approx(301.0, abs=0.01)


def test_what_a_hub_has_in_part_stays_until_it_has_the_rest(tmp_path: Path) -> None:
    clock, claim = SecondsClock(), SampleClaim()
    keeper = SampleKeeper(tmp_path, claim, clock=clock)
    claim.reading(100)
    record(tmp_path, keeper, clock, 4)
    assert [segment.span_s for segment in sample_segments(tmp_path)] == [0, 60, 60, 0]
    claim.sent(sample_segments(tmp_path)[0].end)
    clock.now_s += 60
    work(keeper, clock)
    assert [segment.span_s for segment in sample_segments(tmp_path)] == [60, 60, 60, 0]


def test_killed_before_the_old_segment_was_removed_nothing_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SecondsClock()
    keeper = SampleKeeper(tmp_path, clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)
        record(tmp_path, keeper, clock, 2)
    assert len(list((tmp_path / "samples").iterdir())) == 3
    assert [segment.span_s for segment in sample_segments(tmp_path)] == [60, 0]
    clock.now_s += 60
    work(SampleKeeper(tmp_path, clock=SecondsClock()), clock)
    assert [segment.span_s for segment in sample_segments(tmp_path)] == [60, 0]


def test_positions_hold_while_segments_are_thinned(tmp_path: Path) -> None:
    clock = SecondsClock()
    keeper = SampleKeeper(tmp_path, clock=clock)
    record(tmp_path, keeper, clock, 30)
    at, found = 0, []
    while (piece := read_samples(tmp_path, at, most_bytes=1 << 16, longest=1 << 20)).end > at:
        found += [json.loads(line) for line in piece.data.splitlines()]
        at = piece.end
    assert at == samples_end(tmp_path)
    assert found == lines(tmp_path)

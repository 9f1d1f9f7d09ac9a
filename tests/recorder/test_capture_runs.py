"""Scheduled captures of real jobs: every profiled rank's trace is in the run, and the job computes the same."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.records import records_of

from stepscope.records.steps import FLAG_CAPTURED, FLAG_COMPILED
from stepscope.store.load import open_run
from tests.conftest import Completed

JOB = Path(__file__).with_name("capture_job.py")
WHEN = "wait=8,warmup=1,active=6,no-stacks"
"""Steps 9 to 14: an epoch, with workers of its own, begins with step 10."""


def losses(done: Completed) -> list[str]:
    assert done.code == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("loss "))


def traces_of(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(gzip.decompress(path.read_bytes())) for path in run_dir.glob("captures/*/rank-*")}


def steps_in(trace: dict[str, Any]) -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")]


@pytest.mark.soak  # near: two ranks in tests/launch/test_captures.py; losses and workers in test_captures.py
@pytest.mark.ranks
def test_two_ranks_and_workers(
    run_stepscope: Callable[..., Completed], run_python: Callable[..., Completed], forked_ranks: Path
) -> None:
    bare = run_python(forked_ranks, "2", JOB)
    done = run_stepscope("run", "--profile", f"{WHEN},ranks=all", forked_ranks, "2", JOB)
    assert losses(done) == losses(bare)
    assert done.run_dir is not None
    traces = traces_of(done.run_dir)
    assert sorted(traces) == ["rank-0.pt.trace.json.gz", "rank-1.pt.trace.json.gz"]
    for name, trace in traces.items():
        assert steps_in(trace) == [f"ProfilerStep#{step}" for step in range(9, 15)]
        assert trace["distributedInfo"]["rank"] == trace["stepscope"]["rank"] == int(name[5])
    for rank in open_run(done.run_dir).ranks:
        flags = records_of(rank)[0]["flags"]
        assert [step for step, flag in enumerate(flags) if flag & FLAG_CAPTURED] == list(range(7, 16))


@pytest.mark.soak  # near: the same in one process that only seems to compile, and forks, in test_captures.py
def test_compiling_is_not_captured_and_a_forked_child_ends_as_usual(
    run_stepscope: Callable[..., Completed], run_python: Callable[..., Completed]
) -> None:
    bare = run_python(JOB, "compile", "fork")
    done = run_stepscope("run", "--profile", "wait=0,warmup=1,active=2,no-stacks", JOB, "compile", "fork")
    assert losses(done) == losses(bare)
    assert {"buffered by C", "child ended with 7"} <= set(done.stdout.splitlines())
    assert done.run_dir is not None
    (rank,) = open_run(done.run_dir).ranks
    compiled = [step for step, flag in enumerate(records_of(rank)[0]["flags"]) if flag & FLAG_COMPILED]
    (trace,) = traces_of(done.run_dir).values()
    captured = [int(name.partition("#")[2]) for name in steps_in(trace)]
    assert len(captured) == 2
    assert captured[0] > compiled[-1] + 3

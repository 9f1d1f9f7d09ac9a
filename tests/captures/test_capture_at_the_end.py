"""A job that ends in the steps of its capture: the trace has the steps so far, and the job ends as usual."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.store.load import open_run
from tests.conftest import Completed

JOB = Path(__file__).parents[1] / "recorder" / "capture_job.py"


@pytest.mark.soak
def test_a_job_that_ends_in_its_capture_leaves_the_steps_so_far(run_stepscope: Callable[..., Completed]) -> None:
    done = run_stepscope("run", "--profile", "wait=26,warmup=1,active=1000,no-stacks", JOB)
    assert done.code == 0, done.stderr
    assert done.run_dir is not None
    (rank,) = open_run(done.run_dir).ranks
    assert 27 <= int(rank.steps["step"][-1]) < 1000
    (path,) = done.run_dir.glob("captures/step-27/rank-0.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert "ProfilerStep#27" in {event.get("name") for event in events}

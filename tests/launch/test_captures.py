"""A capture of a real job: requested from a shell, profiled by two ranks, analyzed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from stepscope.store.captures import read_captures, trace_sizes


def test_a_job_is_captured_while_it_runs(commands: Any, forked_ranks: Path, job: Path, tmp_path: Path) -> None:
    script = [forked_ranks, "2", job, "--steps", "100000", "--pause-ms", "20"]
    running = commands.start("run", "--name", "job", "--quiet", *script)
    run = tmp_path / "runs" / "job"
    deadline = time.monotonic() + 120.0
    while not (run / "hub.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    captured = commands.finish(commands.start("capture", "job", "--ranks", "all", "--steps", "3"), timeout_s=300.0)
    assert captured.code == 0, captured.stderr
    (record,) = read_captures(run)
    assert (record.state, record.order.ranks, record.reason, record.problem) == ("done", (0, 1), "request", "")
    assert [(report.rank, report.state) for report in record.reports] == [(0, "delivered"), (1, "delivered")]
    assert {report.last_step - report.first_step for report in record.reports} == {2}
    assert record.files == tuple(trace_sizes(run, record.order.id)) and len(record.files) == 2
    assert record.size_bytes == sum(trace_sizes(run, record.order.id).values())
    assert record.verdict and captured.stdout.splitlines()[0] == record.verdict
    assert captured.stdout.splitlines()[-1] == f"runs/job/captures/{record.order.id}"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert sorted(event["rank"] for event in events if event["event"] == "capture_rank") == [0, 1]
    refused = commands.finish(commands.start("capture", "job", "--ranks", "7"))
    assert (refused.code, refused.stderr) == (
        3,
        "stepscope: no capture: There is no rank 7: the run has the ranks 0 to 1.\n",
    )
    running.terminate()
    commands.finish(running)
    over = commands.finish(commands.start("capture", "job"))
    assert (over.code, over.stderr) == (
        3,
        "stepscope: runs/job has ended; a capture needs a running job (--list shows those that it has)\n",
    )
    listed = commands.finish(commands.start("capture", "job", "--list"))
    assert record.order.id in listed.stdout

"""Four real ranks over gloo, traced by torch.profiler: the rank that was made slow is found, at the price it had."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.traces.across_ranks.arrivals import match
from stepscope.traces.exports import write_perfetto
from stepscope.traces.job import distributed_table
from stepscope.traces.rank_analysis import analyze_rank
from stepscope.traces.reading.files import blocks_of, read_trace
from stepscope.traces.reading.kineto import read_kineto

pytestmark = pytest.mark.ranks

JOB = Path(__file__).parents[1] / "support" / "jobs" / "trace_job.py"
RANKS, STEPS, SLOW_MS = 4, 4, 80

JOBS = {
    "ddp": ("--exchange", "ddp", "--where", "forward"),
    "explicit": ("--exchange", "explicit", "--where", "comm", "--plain", "--shapes"),
}

FORKS = """
import json, os, runpy, sys
import torch._dynamo, torch.distributed.nn, torch.nn.parallel, torch.profiler

script, *jobs = sys.argv[1:]
for job in map(json.loads, jobs):
    ranks = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": job["port"]}
            sys.argv = [script, *job["options"]]
            runpy.run_path(script, run_name="__main__")
            os._exit(0)
    if any([os.waitpid(rank, 0)[1] for rank in ranks]):
        sys.exit(1)
"""
"""Importing torch is most of what such jobs cost: it is done once, for all ranks of all of them."""


def run(out: Path) -> None:
    """The traces of each job in a folder of its name."""
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))
        ports = [str(free.getsockname()[1]) for free in (first, second)]
    common = ("--steps", str(STEPS), "--slow-rank", "2", "--slow-ms", str(SLOW_MS))
    jobs = [
        json.dumps({"port": port, "options": ["--out", str(out / name), *common, *options]})
        for port, (name, options) in zip(ports, JOBS.items(), strict=True)
    ]
    here = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(JOB), *jobs],
        env={**os.environ, **here},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.soak  # near: test_trace_collectives.py on captured traces, and test_trace_late_ranks.py
def test_the_slow_rank_is_last_in_all_collectives(tmp_path: Path) -> None:
    run(tmp_path)
    for name, options in JOBS.items():
        check(sorted((tmp_path / name).iterdir()), tmp_path / f"{name}.json.gz", shapes="--shapes" in options)


def check(paths: list[Path], together: Path, *, shapes: bool) -> None:
    traces = [read_trace(path) for path in paths]
    assert sorted(trace.meta.rank or 0 for trace in traces) == list(range(RANKS))
    analyses = sorted((analyze_rank(trace, trace.meta.rank or 0) for trace in traces), key=lambda each: each.rank)
    found = match(analyses)
    counted = STEPS - 1  # the last step is left out
    assert found.count == counted
    assert found.last_counts == {0: 0, 1: 0, 2: counted, 3: 0}
    assert found.wait_ns[2] == 0
    assert found.notices == ()
    # No less than was slept; the rest is what a crowded machine adds, which has no bound.
    assert found.cost_by_rank_ns[2] == found.cost_ns > counted * (SLOW_MS - 40) * 1_000_000
    assert found.cost_ns >= max(found.wait_ns.values())
    (kind,) = found.tables["collectives"].to_rows()
    assert (kind["op"], kind["ranks"], kind["description"]) == ("all_reduce", RANKS, "default_pg")
    assert (kind["bytes"] is None) == (not shapes)
    rows = distributed_table(analyses, found).to_rows()
    assert [row["measured"] for row in rows] == ["host"] * RANKS
    assert min(rows, key=lambda row: row["comm_ns"])["rank"] == 2
    assert found.clocks.shifts == dict.fromkeys(range(RANKS), 0)  # one host
    written = write_perfetto(((trace.meta.rank or 0, trace) for trace in traces), found.clocks, together)
    assert len(read_kineto(blocks_of(together), "together")) == sum(map(len, traces)) < written

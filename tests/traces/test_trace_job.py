"""Four real ranks over gloo, traced by torch.profiler: the rank that was made slow is found, at the price it had."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.traces.collectives import match
from stepscope.traces.distributed import distributed_table
from stepscope.traces.perfetto import write_perfetto
from stepscope.traces.rank import analyse_rank
from stepscope.traces.read import read_trace

pytestmark = pytest.mark.ranks

JOB = Path(__file__).parents[2] / "src" / "stepscope" / "testing" / "scripts" / "trace_job.py"
RANKS, STEPS, SLOW_MS = 4, 4, 80

FORKS = """
import os, runpy, sys
import torch.distributed.fsdp, torch.nn.parallel, torch.profiler

ranks = []
for rank in range(int(os.environ["WORLD_SIZE"])):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
sys.exit(max(os.waitpid(rank, 0)[1] for rank in ranks) != 0)
"""
"""Importing torch is most of what such a job costs: it is done once for all ranks."""


def run(out: Path, *options: str) -> list[Path]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", FORKS, str(JOB), "--out", str(out), "--steps", str(STEPS), *options]
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env={**os.environ, **common}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout
    return sorted(out.iterdir())


@pytest.mark.parametrize(
    ("exchange", "where", "naming"), [("ddp", "forward", ()), ("explicit", "comm", ("--plain", "--shapes"))]
)
def test_the_slow_rank_is_last_in_all_collectives(
    tmp_path: Path, exchange: str, where: str, naming: tuple[str, ...]
) -> None:
    options = ("--slow-rank", "2", "--slow-ms", str(SLOW_MS), "--exchange", exchange, "--where", where, *naming)
    traces = [read_trace(path) for path in run(tmp_path / "traces", *options)]
    assert sorted(trace.meta.rank or 0 for trace in traces) == list(range(RANKS))
    analyses = sorted((analyse_rank(trace, trace.meta.rank or 0) for trace in traces), key=lambda each: each.rank)
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
    assert (kind["bytes"] is None) == (not naming)
    rows = distributed_table(analyses, found).to_rows()
    assert [row["measured"] for row in rows] == ["host"] * RANKS
    assert min(rows, key=lambda row: row["comm_ns"])["rank"] == 2
    assert found.clocks.shifts == dict.fromkeys(range(RANKS), 0)  # one host
    written = write_perfetto(
        ((trace.meta.rank or 0, trace) for trace in traces), found.clocks, tmp_path / "all.json.gz"
    )
    assert len(read_trace(tmp_path / "all.json.gz")) == sum(map(len, traces)) < written

"""One job on several hosts without a common disk: cut, killed, skewed and filled up, it is told whole and once.

The hosts are network namespaces; their folders are their own.  Losses are those of a job without Stepscope, to the bit.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from stepscope.hub.audit import read_audit
from stepscope.store.captures import read_captures, trace_name
from stepscope.wire.handshake import load_keys, retire_key, rotate_key

pytestmark = [pytest.mark.ranks, pytest.mark.faults]

AGENT = "stepscope.agent"
HUB = "stepscope.hub"
STEPS = 120
MakeCluster = Callable[..., Any]


def steps_of(run_dir: Path) -> dict[int, list[int]]:
    """By rank, the steps in the sealed run."""
    rows = duckdb.sql(f"SELECT rank, list(step ORDER BY step) FROM '{run_dir}/steps.parquet' GROUP BY rank").fetchall()
    return dict(rows)


def skewed_clock(folder: Path, seconds: int) -> dict[str, str]:
    """The environment of a host whose clock is so much ahead; nothing where there is no compiler."""
    if shutil.which("cc") is None:
        return {}
    library = folder / "skewed_clock.so"
    source = Path(__file__).with_name("skewed_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "SKEW_S": str(seconds)}


@pytest.mark.soak  # near: two hosts above, tests/agent/shipping, and tests/launch/test_two_nodes.py
def test_cut_slowed_killed_and_skewed(
    cluster: MakeCluster, tmp_path: Path, run_python: Callable[..., Any], job: Path, forked_ranks: Path
) -> None:
    three = cluster(3)
    skew = skewed_clock(tmp_path, 300)
    three.start("--steps", str(STEPS), "--pause-ms", "50", environment={2: skew})
    first, second, third = three.nodes
    three.until(lambda: first.steps() > 15)
    second.host.cut()
    time.sleep(3)
    second.host.heal()
    three.until(lambda: first.steps() > 30)
    first.kill(HUB)
    three.until(lambda: first.steps() > 45)
    second.kill(AGENT)
    third.host.slow(delay_ms=20)
    three.until(lambda: first.steps() > 60)
    third.host.heal()
    assert three.wait() == [0, 0, 0], three.stderr_text()
    # Nothing lost, nothing twice.
    assert steps_of(three.run_dir) == {rank: list(range(STEPS)) for rank in range(3)}
    starts = [(event["rank"], event["host"]) for event in three.events("rank_start")]
    assert sorted(starts) == [(0, "host0"), (1, "host1"), (2, "host2")]
    # Training did not notice.
    bare = run_python(forked_ranks, "3", job, "--steps", str(STEPS))
    assert sorted(line for node in three.nodes for line in node.losses()) == sorted(
        line for line in bare.stdout.splitlines() if line.startswith("rank ")
    )
    # What happened is told.
    summary = three.summary()
    assert summary["status"] == "finished"
    agents = [event["host"] for event in three.events("agent_start")]
    assert sorted(agents) == ["host0", "host1", "host1", "host2"]
    assert len(three.events("hub_start")) == 2
    assert "The hub died 1 time and was restarted; no data was lost." in summary["notices"]
    if skew:
        (skewed,) = [node for node in summary["nodes"] if node["node"] == 2]
        assert 299_000 < skewed["clock_offset_ms"] < 301_000
        assert any("host2" in notice and "clock" in notice for notice in summary["notices"])
        spread = dict(
            duckdb.sql(
                "SELECT coalesce(node, 'all'), max(wall_ns) - min(wall_ns) "
                f"FROM '{three.run_dir}/samples.parquet' WHERE kind = 'host' GROUP BY ROLLUP (node)"
            ).fetchall()
        )
        # However long the run took here: by its own clock host2 would be five minutes after the others.
        assert spread["all"] < max(spread["host0"], spread["host1"]) + 60e9, "times of host2 are shown by host0's clock"


@pytest.mark.soak
def test_a_hub_whose_disk_is_full(cluster: MakeCluster, toy: Path) -> None:
    two = cluster(2, toy)
    runs = two.nodes[0].folder / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(runs)], check=True)
    try:
        two.start("--steps", "80", "--pause-ms", "50")
        two.until(lambda: two.nodes[0].steps() > 15)
        filler = runs / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(os.urandom(4096))
        at = two.nodes[0].steps()
        two.until(lambda: two.nodes[0].steps() > at + 25)
        filler.unlink()
        assert two.wait() == [0, 0], two.stderr_text()
        assert steps_of(two.run_dir) == {rank: list(range(80)) for rank in range(2)}
        folder = two.nodes[0].folder / "kept"
        shutil.copytree(two.run_dir, folder)
    finally:
        subprocess.run(["umount", "-l", str(runs)], check=True)


@pytest.mark.soak
def test_a_node_that_cannot_deliver_keeps_its_part(cluster: MakeCluster, tmp_path: Path, toy: Path) -> None:
    """The network fails for good; the run is told without the node, and is whole after ``stepscope send``."""
    two = cluster(2, toy)
    first, second = two.nodes
    two.start("--steps", "40", "--pause-ms", "20", environment={1: {"STEPSCOPE_KEY": "another secret, by mistake"}})
    assert two.wait() == [0, 0], two.stderr_text()
    assert steps_of(two.run_dir) == {0: list(range(40))}
    assert "Node 1 never joined; its data is missing." in two.summary()["notices"]
    assert second.run_dir.exists()
    assert "stepscope send" in second.stderr_text()
    assert "key" in second.stderr_text()
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    environment.pop("STEPSCOPE_KEY", None)
    stepscope = [sys.executable, "-m", "stepscope"]
    serving = first.host.start(
        [*stepscope, "serve", "runs", "--accept", "--host", first.host.address, "--port", "7070"],
        cwd=first.folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        assert "https://" in serving.stdout.readline()
        send = [*stepscope, "send", str(second.run_dir), "--to", f"https://{first.host.address}:7070"]
        sent = subprocess.run(second.host.command(send), env=environment, capture_output=True, text=True)
        assert sent.returncode == 0, sent.stderr
    finally:
        serving.terminate()
        serving.wait(30)
        serving.stdout.close()
    assert not second.run_dir.exists()
    reported = subprocess.run([*stepscope, "report", str(two.run_dir)], capture_output=True, text=True)
    assert reported.returncode == 0, reported.stderr
    assert steps_of(two.run_dir) == {0: list(range(40)), 1: list(range(40))}


@pytest.mark.soak
def test_a_new_key_while_the_job_runs(cluster: MakeCluster, toy: Path, tmp_path: Path) -> None:
    """Rotated, with an agent and the hub killed meanwhile, and the old key retired before the job is over."""
    two, steps = cluster(2, toy), 200
    two.start("--steps", str(steps), "--pause-ms", "100")
    first, second = two.nodes
    environ = {"HOME": str(tmp_path / "home")}

    def noted(event: str) -> int:
        """How many lines of node 1 in the audit log, counted ones included."""
        lines = [line for line in read_audit(two.run_dir / "audit.jsonl") if line.get("event") == event]
        return sum(line.get("count", 1) for line in lines if line["who"] == "node 1 (host1)")

    two.until(lambda: first.steps() > 5 and noted("joined") == 1)
    (old,) = load_keys(environ)
    rotate_key(environ)
    second.kill(AGENT)
    two.until(lambda: first.steps() > 20)
    first.kill(HUB)
    two.until(lambda: noted("joined") == 2)  # at the hub that was started again
    retire_key(environ)
    assert two.wait() == [0, 0], two.stderr_text()
    assert load_keys(environ) != (old,)
    assert steps_of(two.run_dir) == {rank: list(range(steps)) for rank in range(2)}
    assert "different key" not in two.stderr_text()
    assert noted("ended") >= 1
    assert (two.run_dir / "audit.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.soak  # near: tests/launch/test_captures.py, and the traces in tests/store/test_inbox.py
def test_the_trace_of_another_host_is_delivered(cluster: MakeCluster, job: Path) -> None:
    """Requested where the hub is; the rank on the other host is profiled, too, and its trace comes over the network."""
    two = cluster(2, job)
    two.start("--steps", "4000", "--pause-ms", "20")
    first, second = two.nodes
    two.until(lambda: first.steps() > 20 and second.steps() > 20)
    command = [sys.executable, "-m", "stepscope", "capture", str(two.run_dir), "--ranks", "all", "--steps", "3"]
    captured = subprocess.run(first.host.command(command), capture_output=True, text=True, timeout=100)
    assert captured.returncode == 0, captured.stderr
    (record,) = read_captures(two.run_dir)
    assert [(report.rank, report.state) for report in record.reports] == [(0, "delivered"), (1, "delivered")]
    for rank in range(2):
        path = two.run_dir / "captures" / record.order.id / trace_name(rank)
        trace = json.loads(gzip.decompress(path.read_bytes()))
        assert trace["distributedInfo"]["rank"] == rank
    for node in two.nodes:
        node.process.terminate()
    two.wait()

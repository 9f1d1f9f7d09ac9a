"""A job of two nodes that really stands still: each sees its own rank, the hub sees both and tells who it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.store.live.failures import read_evidence, read_hangs
from stepscope.store.load import open_run

TRAIN = """
import pathlib, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def load(step):
    while rank == 1 and step == 4 and not pathlib.Path("go").exists():
        time.sleep(0.01)
    return torch.ones(2, 4)

for step in range(8):
    batch = load(step)
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(512))
dist.destroy_process_group()
"""


@pytest.mark.soak  # near: tests/hangs_real on one node, and tests/hangs/test_joined.py
@pytest.mark.faults
def test_the_hub_names_the_rank_that_sleeps_on_another_node(
    commands: Any, nodes: Any, port: Callable[[], int], script: Callable[..., Path], tmp_path: Path
) -> None:
    train = script(TRAIN, "train.py")
    master = str(port())
    for node in (0, 1):
        line = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--name", "two")
        where = ("--hub-port", str(nodes.port), "--dir", str(node), "--hang-after", "1", "--quiet")
        env = {"STEPSCOPE_KEY": "a key of the tests alone", "RANK": str(node), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": master, "OMP_NUM_THREADS": "1"}
        nodes.processes[node] = commands.start("run", *line, *where, sys.executable, str(train), env=env)
    run_dir = tmp_path / "0" / "two"
    nodes.until(lambda: len(read_evidence(run_dir)[0]) == len(read_hangs(run_dir)[0]) == 2)
    alone = {record.ranks[0].rank: record for record in read_hangs(run_dir)[0]}
    assert (alone[0].kind, alone[0].undecidable) == ("rank_lost", True)  # all that its own host can know
    nodes.until(lambda: len(open_run(run_dir).ranks) == 2)
    (hang,) = open_run(run_dir).hangs
    assert (hang.kind, [culprit.rank for culprit in hang.culprits], hang.victims) == (
        "hang_missing_collective",
        [1],
        (0,),
    )
    assert "train.py:13" in hang.title or "train.py:12" in hang.title, hang.title
    assert len(hang.parts) == 2
    (tmp_path / "go").touch()
    done = [nodes.finish(0), nodes.finish(1)]
    assert [one.code for one in done] == [0, 0], [one.stderr for one in done]
    summary = nodes.summary()
    (row,) = summary["hangs"]
    assert (row["over"], [culprit["rank"] for culprit in row["culprits"]]) == ("recovered", [1])
    (stall,) = [finding for finding in summary["findings"] if finding["kind"] == "stall"]
    assert "Rank 1 had not called" in stall["title"]

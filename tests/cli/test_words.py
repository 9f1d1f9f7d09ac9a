"""The command that starts the job: the words as they are, or a torchrun before them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stepscope.cli.launch.command import Nodes, Torchrun, job_command
from stepscope.errors import UsageError

TWO = Nodes(count=2, least=2, rank=1, address="head")


@pytest.mark.parametrize(
    ("torchrun", "line"),
    [
        (Torchrun(ranks="4"), "--standalone --nproc-per-node 4"),
        (Torchrun(ranks="gpu", nodes=TWO), "--nnodes 2 --node-rank 1 --master-addr head --master-port 29500 gpu"),
        (Torchrun(nodes=TWO, port=1234), "--nnodes 2 --node-rank 1 --master-addr head --master-port 1234 1"),
        (
            Torchrun(nodes=Nodes(count=2, least=2, rank=0), port=1234),
            "--nnodes 2 --node-rank 0 --master-port 1234 1",
        ),
        (
            Torchrun(ranks="2", nodes=Nodes(count=4, least=1, rank=3, address="fd00::1"), name="big"),
            "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint [fd00::1]:29500 --rdzv-id big 2",
        ),
    ],
)
def test_a_torchrun_for_the_script(torchrun: Torchrun, line: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    *words, ranks = line.split()
    if "--nproc-per-node" not in words:
        words += ["--nproc-per-node"]
    expected = [sys.executable, "-m", "torch.distributed.run", *words, ranks, str(script), "--lr", "3"]
    assert job_command([str(script), "--lr", "3"], torchrun) == expected


def test_a_launcher_of_its_own_is_left_alone() -> None:
    words = ["sh", "-c", "true", "--nnodes", "2"]
    assert job_command(words, Torchrun(nodes=TWO))[1:] == words[1:]
    with pytest.raises(UsageError, match="--nproc-per-node starts torchrun for a script; use the flags of sh"):
        job_command(words, Torchrun(ranks="2", nodes=TWO))

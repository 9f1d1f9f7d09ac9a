"""The job scripts of ``deploy/slurm``, without Slurm: its commands are stand-ins (with Slurm: tests/launch)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"


@pytest.mark.parametrize(
    ("newest_last", "expected"),
    [
        (["train-slurm-12", "train-slurm-123"], "train-slurm-12"),
        (["train-slurm-12", "train-slurm-12-2", "train-slurm-12-2.node1", "train-slurm-123-2"], "train-slurm-12-2"),
        (["train-slurm-12-2", "train-slurm-12-10", "other-slurm-12"], "train-slurm-12-10"),
        (["train-slurm-12", "train-slurm-12.1", "train-slurm-12.1.node1"], "train-slurm-12.1"),
    ],
)
def test_a_job_asks_for_advice_about_its_own_newest_run(tmp_path: Path, newest_last: list[str], expected: str) -> None:
    for second, name in enumerate(newest_last):
        (tmp_path / "runs" / name).mkdir(parents=True)
        os.utime(tmp_path / "runs" / name, (second, second))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": "exit 7", "stepscope": 'echo "$@" > advised; exit 1'}.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPTS / "requeue.sbatch"],
        cwd=tmp_path,
        env={"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert (tmp_path / "advised").read_text() == f"advise runs/{expected}\n"

"""The job scripts of ``deploy/slurm``, without Slurm: its commands are stand-ins (with Slurm: tests/launch)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
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
        stand_in(commands / name, text)
    done = subprocess.run(
        ["bash", SCRIPTS / "requeue.sbatch"],
        cwd=tmp_path,
        env={"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert (tmp_path / "advised").read_text() == f"advise runs/{expected}\n"


CHECKS = {
    "unfit": (
        'echo "✖ n0 is unfit: slow."; exit 3',
        1,
        "NodeName=n0 State=DRAIN Reason=stepscope probe: ✖ n0 is unfit: slow.",
    ),
    "fit": ("exit 0", 0, ""),
    "broken": ("echo broken; exit 1", 0, ""),
    "missing": (None, 0, ""),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_prolog_drains_its_node_only_if_the_check_calls_it_unfit(tmp_path: Path, name: str) -> None:
    check, code, update = CHECKS[name]
    stand_in(tmp_path / "scontrol", f'shift; echo "$@" > {tmp_path}/update')
    if check is not None:
        stand_in(tmp_path / "check", check)
    # Slurm gives a prolog neither a search path nor a home.
    environment = {"STEPSCOPE_PROBE": str(tmp_path / "check"), "SLURMD_NODENAME": "n0", "PATH": str(tmp_path)}
    done = subprocess.run(["/bin/bash", SCRIPTS / "prolog-probe.sh"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    found = (tmp_path / "update").read_text().strip() if (tmp_path / "update").exists() else ""
    assert found == update


def test_a_prolog_that_slurm_kills_leaves_no_check_behind(tmp_path: Path) -> None:
    stand_in(tmp_path / "check", f"echo $$ > {tmp_path}/pid.part; mv {tmp_path}/pid.part {tmp_path}/pid; exec sleep 60")
    environment = {**os.environ, "STEPSCOPE_PROBE": str(tmp_path / "check")}
    with subprocess.Popen(["bash", SCRIPTS / "prolog-probe.sh"], env=environment, start_new_session=True) as prolog:
        while not (tmp_path / "pid").exists():
            assert prolog.poll() is None
            time.sleep(0.01)
        check = psutil.Process(int((tmp_path / "pid").read_text()))
        os.killpg(prolog.pid, signal.SIGKILL)
    try:
        check.wait(10)
    finally:
        with suppress(psutil.NoSuchProcess):
            check.kill()


def stand_in(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)

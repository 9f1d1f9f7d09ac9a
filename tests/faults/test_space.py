"""No room: the job runs, exits as it would, and what could not be written is read as soon as there is room again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full_disk import fill_disk

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("taken", ["runs", "elsewhere/runs"])
def test_a_run_directory_that_cannot_be_made(
    run_stepscope: Callable[..., Any], script: Callable[..., Path], tmp_path: Path, taken: str
) -> None:
    script("import os, sys; print(sorted(n for n in os.environ if n in ('STEPSCOPE_SESSION',))); sys.exit(4)\n")
    (tmp_path / taken.partition("/")[0]).write_text("a file, not a folder")
    done = run_stepscope("run", "--dir", taken, "script.py")
    assert (done.code, done.stdout, done.run_dir) == (4, "[]\n", None)
    reason = "File exists" if taken == "runs" else "Not a directory"
    assert done.stderr == f"stepscope: cannot create a run in {taken}: {reason}; the job runs unrecorded\n"


def test_a_full_disk_from_the_start(
    run_stepscope: Callable[..., Any], script: Callable[..., Path], small_disk: Path
) -> None:
    script("print('ran'); raise SystemExit(4)\n")
    fill_disk(small_disk)
    done = run_stepscope("run", "--dir", small_disk / "runs", "script.py")
    assert (done.code, done.stdout) == (4, "ran\n")
    assert done.stderr.endswith("No space left on device; the job runs unrecorded\n")
    assert done.stderr.count("\n") == 1


def test_a_disk_that_fills_up_while_it_runs(
    start: Callable[..., Any], toy: Path, small_disk: Path, run_stepscope: Callable[..., Any]
) -> None:
    patient = start("run", "--dir", small_disk / "runs", "--name", "one", toy, "--steps", "120", "--pause-ms", "5")
    patient.wait_for("step 10 ")
    patient.until(patient.ranks)
    filler = fill_disk(small_disk)
    done = patient.finish()
    run_dir = small_disk / "runs" / "one"
    assert done.code == 0
    assert (patient.printed + done.stdout).count(" loss ") == 120
    assert f"stepscope: cannot write to {run_dir}: No space left on device" in done.stderr
    # The summary is shown all the same, from what the rings hold.
    assert "120 steps" in done.stderr
    assert "finished" in done.stderr
    assert "Not saved" in done.stderr
    session = Path(json.loads((run_dir / "run.json").read_text())["session"])
    assert sorted(path.suffix for path in session.iterdir() if path.name != "run") == [".ring"]
    filler.unlink()
    assert run_stepscope("report", "--quiet", run_dir).code == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"]["total"], summary["ranks"][0]["lost"]) == (120, 0)
    assert summary["status"] == "finished"
    assert not session.exists()


TINY_MEMORY = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"'


def test_no_room_in_memory(run_stepscope: Callable[..., Any], commands: Any, toy: Path, small_disk: Path) -> None:
    """A container's /dev/shm is often tiny: the ring goes to the disk, with a line saying so, and never a SIGBUS."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this needs a mount namespace")
    words = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        TINY_MEMORY,
        sys.executable,
        "-m",
        "stepscope",
        "run",
        "--quiet",
        str(toy),
    ]
    process = commands.start_python(
        "-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *words, "--steps", "30"
    )
    done = commands.finish(process)
    assert done.code == 0, done.stderr
    assert done.stdout.count(" loss ") == 30
    (line,) = done.stderr.splitlines()
    assert line.startswith("stepscope: cannot reserve ")
    assert "No space left on device; steps are recorded on disk instead, at " in line
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert (summary["steps"]["total"], summary["ranks"][0]["lost"], summary["status"]) == (30, 0, "finished")
    assert list((done.run_dir / "rings").iterdir()) == []

"""``stepscope report`` from another PID namespace with the same host name, as in a container, while a run goes on."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = 60
TRAINING = f"""
import pathlib, time
import stepscope
for step in range({STEPS}):
    with stepscope.step():
        pass
    if step == {STEPS // 2}:
        pathlib.Path("halfway").touch()
        while not pathlib.Path("go-on").exists():
            time.sleep(0.01)
"""


@pytest.mark.soak  # near: tests/store/test_foreign_runs.py
def test_a_report_from_another_container_loses_no_step(
    commands: Any, script: Callable[..., Path], tmp_path: Path
) -> None:
    inside = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")
    script(TRAINING)
    job = commands.start("run", "--quiet", "--name", "mine", "script.py")
    while not (tmp_path / "halfway").exists():
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)
    run_dir = tmp_path / "runs" / "mine"
    report = subprocess.run(
        [*inside, sys.executable, "-m", "stepscope", "report", "--json", str(run_dir)],
        env=commands.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(report.stdout)["status"] == "running"
    (tmp_path / "go-on").touch()
    done = commands.finish(job)
    assert done.code == 0, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]["total"]) == ("finished", STEPS)
    # And nobody else can read any of it.
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (run_dir, *run_dir.rglob("*"))}
    assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}

"""The loads, each in a process of its own, for a moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["processor", "memory", "disk"])
def test_a_load_prints_its_rates_and_what_kept_it_from_running(name: str, tmp_path: Path) -> None:
    where = str(min(os.sched_getaffinity(0))) if name == "processor" else str(tmp_path)
    command = [sys.executable, "-m", "stepscope.node_check.loads", name, "0.01", where, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found["rates"]) >= 3
    assert min(found["rates"]) > 0
    assert found["waited_s"] >= 0
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_there_is_nothing_of_it(tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, "-m", "stepscope.node_check.loads", "gpu", "0.01", str(tmp_path), str(os.getpid())]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "{}\n"

"""What we start beside the job stays small, also when summary and page are made after it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

WHILE_IT_TRAINS = 100e6
AT_THE_END = 121e6 if platform.machine() == "x86_64" else 116e6
"""The code of the same libraries is larger on the one.  110 MB were measured on Arm."""
OWN_AT_THE_END = 59e6
"""Without what the kernel can take back at any time: more than half is the code of libraries, as it lies on disk."""


@pytest.mark.soak  # near: tests/agent/test_memory_limit.py
def test_everything_beside_the_job_together(commands: Any, job: Path) -> None:
    # As users start it, without what the tests do at the start of each process (tests/support/job_startup).
    path = commands.environment()["PYTHONPATH"].split(os.pathsep)
    plain = os.pathsep.join(one for one in path if "job_startup" not in one)
    env = {"STEPSCOPE_HTML": "1", "PYTHONPATH": plain}
    process = commands.start("run", "--quiet", job, "--steps", "20", env=env)
    highest = at_end = own_at_end = 0
    loaded = ""
    while process.poll() is None:
        beside, own, training = 0, 0, False
        for one in commands.survivors():
            try:
                if "STEPSCOPE_SESSION" not in one.environ():
                    held = one.memory_info()
                    beside, own = beside + held.rss, own + held.rss - held.shared
                    continue
                training = True
                if one.ppid() == process.pid:
                    loaded = Path(f"/proc/{process.pid}/maps").read_text()
            except psutil.Error:
                continue
        if training:
            highest = max(highest, beside)
        else:
            at_end, own_at_end = max(at_end, beside), max(own_at_end, own)
        time.sleep(0.01)
    assert commands.finish(process).code == 0
    assert 0 < highest < WHILE_IT_TRAINS
    assert 0 < at_end < AT_THE_END
    assert 0 < own_at_end < OWN_AT_THE_END
    # While the job ran, its memory was not shared with what only the summary needs.
    assert loaded
    assert [name for name in ("numpy", "duckdb") if f"/{name}/" in loaded] == []

"""What we start beside the job stays small: 100 MB for all of it together, also when summary and page are made."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

LIMIT = 100e6


def test_everything_beside_the_job_together(commands: Any, job: Path) -> None:
    process = commands.start("run", "--quiet", job, "--steps", "20", env={"STEPSCOPE_HTML": "1"})
    highest = at_end = 0
    loaded = ""
    while process.poll() is None:
        beside, training = 0, False
        for one in commands.survivors():
            try:
                if "STEPSCOPE_SESSION" not in one.environ():
                    beside += one.memory_info().rss
                    continue
                training = True
                if one.ppid() == process.pid:
                    loaded = Path(f"/proc/{process.pid}/maps").read_text()
            except psutil.Error:
                continue
        highest, at_end = (max(highest, beside), at_end) if training else (highest, max(at_end, beside))
        time.sleep(0.01)
    assert commands.finish(process).code == 0
    assert 0 < highest < LIMIT
    assert 0 < at_end < LIMIT
    # While the job ran, its memory was not shared with what only the summary needs.
    assert loaded
    assert [name for name in ("numpy", "duckdb") if f"/{name}/" in loaded] == []

"""Make the time of day differ from a run's clock, as after the time was set while the run was active."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

__all__ = ["shift_clock"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def shift_clock(run_dir: Path, ahead_ns: int) -> int:
    """Let the clock of a run on this machine be so far ahead of the time of day; return now, on that clock."""
    path = run_dir / "run.json"
    meta: dict[str, Any] = {"schema": 1, "name": run_dir.name, "command": []}
    if path.exists():
        meta = json.loads(path.read_text())
    mono_ns, now_ns = time.monotonic_ns(), time.time_ns() + ahead_ns
    meta |= {"created_wall_ns": now_ns, "created_mono_ns": mono_ns}
    meta["place"] = {**meta.get("place", {}), "boot": BOOT_ID.read_text().strip()}
    path.write_text(json.dumps(meta))
    return now_ns

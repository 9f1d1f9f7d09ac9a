"""``hangs/HOST-N.json``: the times the job stood still, each as the watchdog of that host found it."""

from __future__ import annotations

import json
from pathlib import Path

from stepscope.records.hang import HangRecord
from stepscope.records.places import HANGS
from stepscope.store import atomic
from stepscope.store.paths import hang_path

__all__ = ["read_hangs", "write_hang"]


def write_hang(run_dir: Path, record: HangRecord) -> Path:
    """Write a hang, in place of what was known of it before; OSError when there is no room."""
    path = hang_path(run_dir, record.host, record.number)
    path.parent.mkdir(exist_ok=True)
    atomic.write_json(path, record.to_dict())
    return path


def read_hangs(run_dir: Path) -> tuple[tuple[HangRecord, ...], tuple[str, ...]]:
    """The hangs of all hosts in order of time, and the names of files that are none."""
    found: list[HangRecord] = []
    bad: list[str] = []
    for path in sorted((run_dir / HANGS).glob("*.json")):
        try:
            found.append(HangRecord.from_dict(json.loads(path.read_bytes())))
        except (OSError, ValueError, RecursionError):
            bad.append(f"{HANGS}/{path.name}")
    return tuple(sorted(found, key=lambda hang: (hang.stopped_wall_ns, hang.host, hang.number))), tuple(bad)

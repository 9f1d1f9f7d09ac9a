"""``hangs/HOST-N.json``: the times the job stood still, each as the watchdog of that host found it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
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


def read_hangs(
    run_dir: Path, offsets: Mapping[str, int] | None = None
) -> tuple[tuple[HangRecord, ...], tuple[str, ...]]:
    """The hangs of all hosts in order of time, and the names of files that are none.

    ``offsets``: what the clocks of other nodes are ahead, by spool.
    """
    found: list[HangRecord] = []
    bad: list[str] = []
    for path in sorted((run_dir / HANGS).glob("*.json")):
        try:
            raw = json.loads(path.read_bytes())
            record = HangRecord.from_dict(raw)
            found.append(_shifted(record, (offsets or {}).get(str(raw.get("spool")), 0)))
        except (OSError, ValueError, RecursionError):
            bad.append(f"{HANGS}/{path.name}")
    return tuple(sorted(found, key=lambda hang: (hang.stopped_wall_ns, hang.host, hang.number))), tuple(bad)


def _shifted(record: HangRecord, offset_ns: int) -> HangRecord:
    if not offset_ns:
        return record
    return replace(
        record,
        declared_wall_ns=record.declared_wall_ns - offset_ns,
        stopped_wall_ns=record.stopped_wall_ns - offset_ns,
        over_wall_ns=None if record.over_wall_ns is None else record.over_wall_ns - offset_ns,
    )

"""``hangs/``: the times the job stood still, each as the watchdog of that host found it, and what it went by.

hangs/HOST-N.json            the verdict
hangs/HOST-N.evidence.json   in jobs of several hosts, what was gathered: to be judged with the others'
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stepscope.hangs.kept import KeptEvidence, evidence_from_dict, evidence_to_dict
from stepscope.records.hang import HangRecord
from stepscope.records.naming import EVIDENCE_SUFFIX, evidence_name
from stepscope.records.places import HANGS
from stepscope.store import atomic
from stepscope.store.paths import hang_path

__all__ = ["read_evidence", "read_hangs", "write_evidence", "write_hang"]

EVIDENCE_BYTES = 8 << 20
"""Of one file: more does not travel (``wire/limits.py``), and is none of ours."""
EVIDENCE_READ = 256 << 20
"""Of all together."""

T = TypeVar("T")


def write_hang(run_dir: Path, record: HangRecord) -> Path:
    """Write a hang, in place of what was known of it before; OSError when there is no room."""
    path = hang_path(run_dir, record.host, record.number)
    path.parent.mkdir(exist_ok=True)
    atomic.write_json(path, record.to_dict())
    return path


def write_evidence(run_dir: Path, kept: KeptEvidence) -> None:
    """The same for what was gathered; one that is larger than may travel is not kept."""
    raw = json.dumps(evidence_to_dict(kept), separators=(",", ":")).encode()
    if len(raw) <= EVIDENCE_BYTES:
        path = run_dir / HANGS / evidence_name(kept.evidence.host, kept.number)
        path.parent.mkdir(exist_ok=True)
        atomic.write_bytes(path, raw)


def read_hangs(run_dir: Path) -> tuple[tuple[HangRecord, ...], tuple[str, ...]]:
    """The hangs of all hosts in order of time, and the names of files that are none."""
    paths = [path for path in (run_dir / HANGS).glob("*.json") if not path.name.endswith(EVIDENCE_SUFFIX)]
    found, bad = _read(paths, HangRecord.from_dict)
    return tuple(sorted(found, key=lambda hang: (hang.stopped_wall_ns, hang.host, hang.number))), bad


def read_evidence(run_dir: Path) -> tuple[tuple[KeptEvidence, ...], tuple[str, ...]]:
    """What the hosts gathered, in order of their names, and the names of files that are none."""
    room = EVIDENCE_READ
    paths = []
    for path in sorted((run_dir / HANGS).glob(f"*{EVIDENCE_SUFFIX}")):
        size = path.stat().st_size
        room -= size
        if size <= EVIDENCE_BYTES and room >= 0:
            paths.append(path)
    found, bad = _read(paths, evidence_from_dict)
    return tuple(found), bad


def _read(paths: list[Path], decode: Callable[[Any], T]) -> tuple[list[T], tuple[str, ...]]:
    found: list[T] = []
    bad: list[str] = []
    for path in sorted(paths):
        try:
            found.append(decode(json.loads(path.read_bytes())))
        except (OSError, ValueError, RecursionError):
            bad.append(f"{HANGS}/{path.name}")
    return found, tuple(bad)

"""``hangs/``: the times the job stood still, each as the watchdog of that host found it, and what it went by.

    hangs/HOST-N.json            the verdict
    hangs/HOST-N.evidence.json   in jobs of several hosts, what was gathered: to be judged with the others'

Those of other nodes have the name of their spool in them (``store/received.py``), and may have been renamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from stepscope.hangs.kept import KeptEvidence, evidence_from_dict, evidence_to_dict
from stepscope.records.hang import HangRecord
from stepscope.records.naming import EVIDENCE, evidence_name
from stepscope.records.places import HANGS
from stepscope.store import atomic
from stepscope.store.paths import hang_path
from stepscope.store.reading import read_document
from stepscope.wire.limits import FILE_BYTES

__all__ = ["read_evidence", "read_hangs", "read_records", "write_evidence", "write_hang"]

EVIDENCE_READ = 256 << 20
"""Of all together."""

T = TypeVar("T")
Sent = tuple[str, T]
"""The spool that it came in, empty for this node's own, and what it is."""


def write_hang(run_dir: Path, record: HangRecord) -> Path:
    """Write a hang, in place of what was known of it before; OSError when there is no room."""
    path = hang_path(run_dir, record.host, record.number)
    path.parent.mkdir(exist_ok=True)
    atomic.write_json(path, record.to_dict())
    return path


def write_evidence(run_dir: Path, kept: KeptEvidence) -> None:
    """The same for what was gathered; what is larger than may travel is not kept."""
    raw = json.dumps(evidence_to_dict(kept), separators=(",", ":")).encode()
    if len(raw) <= FILE_BYTES:
        path = run_dir / HANGS / evidence_name(kept.evidence.host, kept.number)
        path.parent.mkdir(exist_ok=True)
        atomic.write_bytes(path, raw)


def read_hangs(
    run_dir: Path, offsets: Mapping[str, int] | None = None
) -> tuple[tuple[HangRecord, ...], tuple[str, ...]]:
    """The hangs of all hosts in order of time, and the names of files that are none.

    ``offsets``: what the clocks of other nodes are ahead, by spool.
    """
    found, bad = read_records(run_dir, offsets)
    return tuple(record for _, record in found), bad


def read_records(
    run_dir: Path, offsets: Mapping[str, int] | None = None
) -> tuple[list[Sent[HangRecord]], tuple[str, ...]]:
    """The same, each with the spool that it came in."""
    paths = [path for path in (run_dir / HANGS).glob("*.json") if EVIDENCE not in path.name]
    sent, bad = _read(paths, HangRecord.from_dict)
    found = [(spool, _shifted(record, (offsets or {}).get(spool, 0))) for spool, record in sent]
    return sorted(found, key=lambda one: (one[1].stopped_wall_ns, one[1].host, one[1].number)), bad


def read_evidence(
    run_dir: Path, offsets: Mapping[str, int] | None = None
) -> tuple[list[Sent[KeptEvidence]], tuple[str, ...]]:
    """What the hosts gathered, in order of their names, and the names of files that are none."""
    room = EVIDENCE_READ
    paths = []
    for path in sorted((run_dir / HANGS).glob(f"*{EVIDENCE}*json")):
        size = path.stat().st_size
        room -= size
        if size <= 2 * FILE_BYTES and room >= 0:
            paths.append(path)
    sent, bad = _read(paths, evidence_from_dict)
    return [(spool, _kept_shifted(kept, (offsets or {}).get(spool, 0))) for spool, kept in sent], bad


def _read(paths: Sequence[Path], decode: Callable[[Any], T]) -> tuple[list[Sent[T]], tuple[str, ...]]:
    found: list[Sent[T]] = []
    bad: list[str] = []
    for path in sorted(paths):
        try:
            raw = json.loads(read_document(path))
            found.append((str(raw.get("spool", "")), decode(raw)) if isinstance(raw, dict) else ("", decode(raw)))
        except (OSError, ValueError, RecursionError):
            bad.append(f"{HANGS}/{path.name}")
    return found, tuple(bad)


def _shifted(record: HangRecord, offset_ns: int) -> HangRecord:
    if not offset_ns:
        return record
    return replace(
        record,
        declared_wall_ns=record.declared_wall_ns - offset_ns,
        stopped_wall_ns=record.stopped_wall_ns - offset_ns,
        over_wall_ns=None if record.over_wall_ns is None else record.over_wall_ns - offset_ns,
    )


def _kept_shifted(kept: KeptEvidence, offset_ns: int) -> KeptEvidence:
    return replace(
        kept,
        stopped_wall_ns=kept.stopped_wall_ns - offset_ns,
        gathered_wall_ns=kept.gathered_wall_ns - offset_ns,
        over_wall_ns=None if kept.over_wall_ns is None else kept.over_wall_ns - offset_ns,
    )

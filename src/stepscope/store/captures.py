"""Captures in a run directory: requests, records, traces.

    captures/requests.jsonl                  one line per request, appended by the command line, the API and the hub
    captures/ID/capture.json                 the record (``CaptureRecord``); written by the run's hub, at the end by the
                                             analysis that it started
    captures/ID/rank-R.pt.trace.json.gz      the trace of a rank, from its agent; of another node, from the hub's ingest
    captures/ID/analysis.json                the document of ``stepscope trace --json``

A run may come from anyone: ids and names are checked, no link is followed, and everything is read within limits.
Standard library only: agents load this.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from stepscope.errors import UsageError
from stepscope.records.capture import CaptureRecord, CaptureRequest
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.files import folder_mode, open_file
from stepscope.records.paths import CAPTURES, capture_folder
from stepscope.store.file_io import read_document, write_bytes
from stepscope.store.locks import append_requests
from stepscope.store.paths import CAPTURE_ANALYSIS, CAPTURE_RECORD, CAPTURE_REQUESTS

__all__ = [
    "CAPTURES_BYTES",
    "CAPTURES_JUDGED",
    "MOST_STEPS",
    "MOST_WARMUP",
    "CaptureSettings",
    "capture_settings",
    "checked_request",
    "is_capture_id",
    "left_behind",
    "make_capture_folder",
    "open_trace",
    "prune_traces",
    "read_analysis",
    "read_capture",
    "read_captures",
    "request_capture",
    "trace_name",
    "trace_sizes",
    "write_capture",
]

CAPTURES_BYTES = 2 << 30
"""The default limit for the traces of one run; the oldest are removed first."""
CAPTURES_JUDGED = 16
"""The newest captures of a run, whose records are read for its findings."""
MOST_STEPS = 100
MOST_WARMUP = 20
MOST_RANKS = 4096
MOST_CAPTURES = 1000
RECORD_BYTES = 8 << 20
ANALYSIS_BYTES = 64 << 20
REQUESTS_BYTES = 1 << 20
LONGEST_TEXT = 200
MOST_PER_HOUR = 60
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(MB|GB|TB)", re.IGNORECASE)
_UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12}
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_TRACE = re.compile(r"rank-(\d{1,6})\.pt\.trace\.json\.gz")


# -- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    most_per_hour: int = 4
    """Captures because of findings; 0: only what is requested.  Each slows a few steps."""
    on_gpus: bool = False
    """Whether also jobs on GPUs are captured because of findings: only if the number was chosen, or if the job has
    ``TEARDOWN_CUPTI=1``.  Otherwise torch keeps CUPTI loaded after a capture, which slows the steps of a job that is
    bound by its host by 17 to 21% until it ends (bench/capture_after.py, H200)."""
    most_bytes: int = CAPTURES_BYTES
    """Of all traces of the run."""


def capture_settings(text: str, *, unloads_cupti: bool = False) -> CaptureSettings:
    """Read ``off``, ``2``, ``keep=10GB`` or ``2,keep=10GB``; UsageError if it is something else."""
    found = CaptureSettings(on_gpus=unloads_cupti)
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, _, value = word.rpartition("=")
        size = _SIZE.fullmatch(value)
        if word == "off":
            found = replace(found, most_per_hour=0)
        elif not name and word.isascii() and word.isdecimal() and int(word) <= MOST_PER_HOUR:
            found = replace(found, most_per_hour=int(word), on_gpus=True)
        elif name == "keep" and size is not None:
            found = replace(found, most_bytes=int(float(size[1]) * _UNITS[size[2].upper()]))
        else:
            raise UsageError(f"{word!r} is not `off`, captures per hour (0 to {MOST_PER_HOUR}) or keep=SIZE")
    return found


def is_capture_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def trace_name(rank: int) -> str:
    return f"rank-{rank}.pt.trace.json.gz"


# -- requests ---------------------------------------------------------------------------------------------------------


def request_capture(run_dir: Path, request: CaptureRequest) -> CaptureRequest:
    """Append a request; return it as written, with an id.  UsageError, or RunUnwritable if that is not possible."""
    request = checked_request(request)
    append_requests(run_dir, run_dir / CAPTURE_REQUESTS, [encoded(request)], most_bytes=REQUESTS_BYTES)
    return request


def checked_request(request: CaptureRequest) -> CaptureRequest:
    """The request with an id and texts of bounded length; UsageError if no capture could answer it."""
    if not 1 <= request.steps <= MOST_STEPS:
        raise UsageError(f"a capture has from 1 to {MOST_STEPS} steps, not {request.steps}")
    if not 0 <= request.warmup <= MOST_WARMUP:
        raise UsageError(f"a capture has from 0 to {MOST_WARMUP} warm-up steps, not {request.warmup}")
    if request.choose == "listed" and not request.ranks:
        raise UsageError("no ranks are listed")
    if len(request.ranks) > MOST_RANKS or any(rank < 0 for rank in request.ranks):
        raise UsageError(f"ranks are numbers from 0, at most {MOST_RANKS} of them")
    texts = {name: getattr(request, name)[:LONGEST_TEXT] for name in ("id", "finding", "by")}
    texts["id"] = texts["id"] or os.urandom(6).hex()
    return replace(request, ranks=tuple(sorted(set(request.ranks))), **texts)


# -- records ----------------------------------------------------------------------------------------------------------


def write_capture(run_dir: Path, record: CaptureRecord) -> None:
    """Replace ``capture.json``; OSError if the disk refuses."""
    folder = make_capture_folder(run_dir, record.order.id)
    data = json.dumps({"schema": 1, **encoded(record)}, indent=1).encode() + b"\n"
    write_bytes(folder / CAPTURE_RECORD, data)


def make_capture_folder(run_dir: Path, capture: str) -> Path:
    """Create the folder of a capture; OSError if that is not possible, or a link is in its place."""
    if not is_capture_id(capture):
        raise OSError(f"{capture!r} is not the id of a capture")
    folder = capture_folder(run_dir, capture)
    for path in (folder.parent, folder):
        with suppress(FileExistsError):
            path.mkdir(mode=folder_mode(run_dir))
        if path.is_symlink() or not path.is_dir():
            raise OSError(f"{path} is not a folder")
    return folder


def read_capture(run_dir: Path, capture: str) -> CaptureRecord | None:
    """The record of one capture, or None if it cannot be read."""
    folder = _folder(run_dir, capture)
    if folder is None:
        return None
    try:
        record = decoded(CaptureRecord, json.loads(read_document(folder / CAPTURE_RECORD, most=RECORD_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    return replace(record, figures=_valid_figures(record.figures)) if record.order.id == capture else None


def _valid_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """Without a ``baseline`` that does not name a capture and its steps; the other figures are checked where used."""
    baseline = figures.get("baseline")
    if isinstance(baseline, dict):
        name, steps = baseline.get("id"), baseline.get("steps")
        known = isinstance(steps, list) and len(steps) == 2 and all(type(step) is int for step in steps)
        if known and isinstance(name, str) and is_capture_id(name):
            return figures
    return {key: value for key, value in figures.items() if key != "baseline"}


def left_behind(record: CaptureRecord) -> CaptureRecord:
    """The record of a capture in a run that is over: one that its hub did not finish, because it died, has failed."""
    if record.state in ("done", "failed"):
        return record
    problem = record.problem or "The run ended before the capture was complete."
    return replace(record, state="failed", problem=problem)


def read_captures(run_dir: Path, *, most: int | None = None) -> tuple[CaptureRecord, ...]:
    """All captures of a run, the oldest first; those that cannot be read are left out.

    ``most``: read only so many records, those that were written last.
    """
    names = _ids(run_dir)
    if most is not None and len(names) > most:
        names = sorted(names, key=lambda name: _written_ns(run_dir, name))[-most:]
    records = [record for name in names if (record := read_capture(run_dir, name)) is not None]
    return tuple(sorted(records, key=lambda record: (record.requested_wall_ns, record.order.id)))


def _written_ns(run_dir: Path, name: str) -> int:
    try:
        return (capture_folder(run_dir, name) / CAPTURE_RECORD).stat(follow_symlinks=False).st_mtime_ns
    except OSError:
        return 0


def read_analysis(run_dir: Path, capture: str) -> dict[str, Any] | None:
    """The document of ``analysis.json``, or None if it cannot be read."""
    folder = _folder(run_dir, capture)
    if folder is None:
        return None
    try:
        document = json.loads(read_document(folder / CAPTURE_ANALYSIS, most=ANALYSIS_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _ids(run_dir: Path) -> list[str]:
    folder = run_dir / CAPTURES
    if folder.is_symlink():
        return []
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_capture_id(entry.name) and entry.is_dir(follow_symlinks=False):
                    found.append(entry.name)
                    if len(found) >= MOST_CAPTURES:
                        break
    except OSError:
        return []
    return found


def _folder(run_dir: Path, capture: str) -> Path | None:
    """Its folder, if it is one and not a link."""
    if not is_capture_id(capture):
        return None
    folder = capture_folder(run_dir, capture)
    return None if folder.is_symlink() or folder.parent.is_symlink() else folder


# -- traces -----------------------------------------------------------------------------------------------------------


def trace_sizes(run_dir: Path, capture: str) -> dict[str, int]:
    """The traces of a capture and their sizes in bytes, in order of ranks."""
    folder = _folder(run_dir, capture)
    found: dict[int, int] = {}
    if folder is None:
        return {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                named = _TRACE.fullmatch(entry.name)
                if named is not None and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        found[int(named[1])] = entry.stat(follow_symlinks=False).st_size
    except OSError:
        return {}
    return {trace_name(rank): found[rank] for rank in sorted(found)}


def open_trace(run_dir: Path, capture: str, name: str) -> BinaryIO:
    """Open a trace of a capture; FileNotFoundError if the name is unknown, OSError if it cannot be read."""
    folder = _folder(run_dir, capture)
    if folder is None or _TRACE.fullmatch(name) is None:
        raise FileNotFoundError(name)
    return open_file(folder / name)


def prune_traces(run_dir: Path, most_bytes: int, *, without: Collection[str] = ()) -> tuple[str, ...]:
    """Remove traces of the oldest captures until all have ``most_bytes``; return whose traces were removed.

    Those of ``without`` and of the newest capture are never removed; records and analyses never are.
    """
    by_age: list[tuple[int, str, dict[str, int]]] = []
    for name in _ids(run_dir):
        if sizes := trace_sizes(run_dir, name):
            with suppress(OSError):
                by_age.append((capture_folder(run_dir, name).stat().st_mtime_ns, name, sizes))
    by_age.sort()
    used = sum(sum(sizes.values()) for _, _, sizes in by_age)
    removed = []
    for _, name, sizes in by_age[:-1]:
        if used <= most_bytes:
            break
        if name in without:
            continue
        for trace in sizes:
            (capture_folder(run_dir, name) / trace).unlink(missing_ok=True)
        used -= sum(sizes.values())
        removed.append(name)
    return tuple(removed)

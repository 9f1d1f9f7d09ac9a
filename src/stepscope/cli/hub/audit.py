"""``stepscope audit``: who read your runs, and which nodes sent what."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from stepscope.cli.arguments import existing
from stepscope.cli.output import format_table
from stepscope.records.text import bytes_text, count_text, printable, say
from stepscope.store.paths import META

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "show who read your runs, and which nodes sent what"
EPILOG = """\
examples:
  stepscope audit                    all runs in runs/, and requests to `stepscope serve`
  stepscope audit runs/NAME          one run
  stepscope audit audit.jsonl        a file written by `stepscope serve --audit-log`
  stepscope audit --json             every field, for other programs

Repeated requests within ten minutes are counted and shown as one line.  docs/security.md explains the fields.
"""
DEFAULT = Path("runs")
COLUMNS = ("time", "who", "from", "did", "run", "what", "status", "times")
NUMERIC = (6, 7)
LONGEST = 160
"""Maximum characters of a cell. All rows are as wide as the widest, and a run may come from a stranger."""
LARGEST = 1 << 63
_BEFORE = "/api/v1/runs/{run}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "place", metavar="PLACE", type=Path, nargs="?", default=DEFAULT, help="a folder of runs, a run, or a log"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")


def run(args: argparse.Namespace) -> int:
    place: Path = args.place
    if place != DEFAULT:
        existing(place)
    lines = sorted(_lines(place), key=lambda line: str(line.get("time")))
    if args.json:
        print(json.dumps(lines, indent=2))
    elif lines:
        rows = [[_cut(cell) for cell in _cells(line)] for line in lines]
        print(format_table(COLUMNS, rows, numeric=NUMERIC))
    else:
        print(printable(f"The audit log of {place} is empty."))
    return 0


def _lines(place: Path) -> Iterator[dict[str, Any]]:
    """Lines from the hubs of runs, each with its run's name, and from ``stepscope serve``."""
    from stepscope.hub.audit import AUDIT, audit_path, read_audit

    def read(path: Path) -> Iterator[dict[str, Any]]:
        try:
            yield from read_audit(path)
        except OSError as error:
            say(f"cannot read {path}: {error.strerror}")

    if place.is_file():
        yield from read(place)
        return
    is_run = (place / META).is_file()
    for run_dir in [place] if is_run else sorted(place.iterdir()) if place.is_dir() else []:
        if run_dir.is_dir():
            for line in read(run_dir / AUDIT):
                yield {**line, "run": run_dir.resolve().name}  # a run's log has no say about other runs
    folder = place.resolve()
    for line in read(audit_path(os.environ)):
        served = Path(str(line.get("served", "")))
        ours = served in (folder, folder.parent) and line.get("run") == folder.name
        if ours if is_run else folder in (served, served.parent):
            yield line


def _cells(line: Mapping[str, Any]) -> Sequence[str]:
    who = str(line.get("who") or {"hub token": "the hub's token", "unknown": "unknown"}.get(str(line.get("via")), ""))
    if lost := _number(line, "lost"):
        return (_time(line), "", "", "", "", "lines that could not be written", "", f"{lost:,}")
    what = str(line.get("route", "")).removeprefix(_BEFORE)
    if line.get("others"):
        what = "other requests"
    if line.get("event") == "ended":
        sent = f"{count_text(_number(line, 'frames'), 'frame')}, {bytes_text(_number(line, 'bytes'))}"
        what = f"{sent} ({line.get('why')})"
    elif line.get("why"):
        what = f"{what} ({line['why']})"
    count = f"{_number(line, 'count', 1):,}"
    words = (line.get("address"), line.get("event"), line.get("run"))
    return (_time(line), who, *(str(word or "") for word in words), what, str(line.get("status") or ""), count)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _number(line: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = line.get(name, default)
    return value if isinstance(value, int) and abs(value) < LARGEST else default


def _time(line: Mapping[str, Any]) -> str:
    """Local time, as in all our tables."""
    try:
        when = datetime.fromisoformat(str(line.get("time")).replace("Z", "+00:00"))
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when.timestamp()))
    except (ValueError, OverflowError, OSError):
        return ""

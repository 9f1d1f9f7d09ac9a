"""``stepscope list``: the runs in a folder, newest first."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from stepscope.cli.arguments import RUNS_FOLDER, count, run_or_url, runs_of_folder
from stepscope.cli.catalog import catalog_runs
from stepscope.cli.output import format_table
from stepscope.errors import UsageError
from stepscope.records.text import count_text, did_you_mean, printable
from stepscope.reports.layout import MARKS
from stepscope.store.catalog import RunEntry

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "list the runs in a folder, newest first"
EPILOG = """\
examples:
  stepscope list                                     the runs in runs/
  stepscope list --limit 5                           the five newest
  stepscope list --status failed --status crashed    those that failed or crashed
  stepscope list --sort severity                     the most severe verdict first
  stepscope list --tag baseline                      those with a tag (see `stepscope tag`)
  stepscope list s3://bucket/team                    archived runs (see `stepscope archive`)

Before each verdict: ✖ critical, ▲ warning, ● information, ✔ nothing is wrong.
"""

COLUMNS = ("run", "started", "status", "ranks", "steps", "median step", "tags", "verdict")
NUMERIC = (3, 4, 5)
LEFT_OUT = (3, 4, 1, 6, 5)
"""Columns left out on a narrow terminal, in this order."""
TAGS = COLUMNS.index("tags")
VERDICT_COLUMNS = 32
"""Width that the verdict gets; other columns are left out for it."""
SEVERITIES = ("critical", "warning", "info")
STATUSES = ("finished", "failed", "crashed", "interrupted", "running", "unfinished")

ORDERS: dict[str, Callable[[RunEntry], Any]] = {
    "started": lambda entry: -entry.created_wall_ns,
    "name": lambda entry: entry.path.name.lower(),
    "status": lambda entry: entry.status,
    "ranks": lambda entry: -(entry.ranks or 0),
    "steps": lambda entry: -(entry.steps or 0),
    "step-time": lambda entry: -(entry.median_step_ms or 0.0),
    "cost": lambda entry: -(entry.cost_share or 0.0),
    "severity": lambda entry: (
        (*SEVERITIES, None).index(entry.severity if entry.severity in SEVERITIES else None),
        entry.healthy,
    ),
}
"""For ``--sort``; ties stay in order of start, newest first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        metavar="DIR",
        type=run_or_url,
        nargs="?",
        default=RUNS_FOLDER,
        help="folder of runs, or an archive such as s3://bucket/prefix (default: runs)",
    )
    parser.add_argument(
        "--status",
        action="append",
        metavar="STATUS",
        help=f"only runs with this status: {', '.join(STATUSES)}; may be repeated",
    )
    parser.add_argument(
        "--tag", action="append", metavar="TAG", help="only runs with this tag; if repeated, with all of them"
    )
    parser.add_argument(
        "--sort",
        choices=tuple(ORDERS),
        default="started",
        metavar="ORDER",
        help="sort by: started (default, newest first), name or status; or ranks, steps, step-time, cost or severity "
        "(highest first)",
    )
    parser.add_argument("--limit", type=count("runs"), metavar="N", help="show only the first N runs")
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")


def run(args: argparse.Namespace) -> int:
    entries = runs_of_folder(args.dir, known=catalog_runs(args.dir))
    tagged = [entry for entry in entries if set(args.tag or ()) <= set(entry.labels.tags)]
    found = sorted(_with_status(tagged, args.status), key=ORDERS[args.sort])
    shown = found[: args.limit]
    if args.json:
        print(json.dumps([entry.to_dict() for entry in shown], indent=2))
    elif shown:
        # Output for another program is not cut.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(_table(shown, width))
        if width is not None and len(shown) < len(found):
            print(f"({len(shown)} of {count_text(len(found), 'run')})")
    elif entries:
        filters = [f"the status {' or '.join(args.status)}"] if args.status else []
        filters += [f"the tag {' and '.join(args.tag)}"] if args.tag else []
        print(printable(f"No runs in {args.dir} with {' and '.join(filters)}."))
    else:
        print(printable(f"No runs in {args.dir} yet."))
    return 0


def _with_status(entries: Sequence[RunEntry], wanted: Sequence[str] | None) -> list[RunEntry]:
    """The runs whose status is one of these, or begins like it; UsageError for a word that is no status."""
    if not wanted:
        return list(entries)
    for word in wanted:
        if word not in STATUSES and not any(_has_status(entry, word) for entry in entries):
            known = f"must be one of {', '.join(STATUSES)}, not {word!r}"
            raise UsageError(f"--status: {known}{did_you_mean(word, STATUSES)}")
    return [entry for entry in entries if any(_has_status(entry, word) for word in wanted)]


def _has_status(entry: RunEntry, word: str) -> bool:
    """By the status itself, or by the words that the table shows for it (``killed``)."""
    return bool(word) and (entry.status.startswith(word) or entry.status_text.startswith(word))


def _table(entries: Sequence[RunEntry], width: int | None) -> str:
    """The column of tags is left out if no run has any."""
    dropped = set() if any(entry.labels.tags for entry in entries) else {TAGS}
    columns = [place for place in range(len(COLUMNS)) if place not in dropped]
    return format_table(
        [COLUMNS[place] for place in columns],
        [[cells[place] for place in columns] for cells in map(_cells, entries)],
        numeric=[columns.index(place) for place in NUMERIC],
        width=width,
        left_out=[columns.index(place) for place in LEFT_OUT if place in columns],
        least=VERDICT_COLUMNS,
    )


def _cells(entry: RunEntry) -> Sequence[str]:
    from stepscope.records.text import ms_text

    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created_wall_ns / 1e9))
    counts = ["" if count is None else f"{count:,}" for count in (entry.ranks, entry.steps)]
    median = "" if entry.median_step_ms is None else ms_text(entry.median_step_ms)
    mark = MARKS.get("healthy" if entry.healthy else entry.severity or "", " ")
    verdict = f"{mark} {entry.verdict}" if entry.verdict else ""
    renamed = f" ({entry.labels.name})" if entry.labels.name else ""
    tags = " ".join(entry.labels.tags)
    return (f"{entry.path.name}{renamed}", started, entry.status_text, *counts, median, tags, verdict)

"""``stepscope list``: the runs in a folder, newest first."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stepscope.cli.output import format_table, progress_bar
from stepscope.errors import UsageError
from stepscope.records.text import printable, say
from stepscope.store.catalog import RunEntry, list_runs

__all__ = ["HELP", "add_arguments", "run"]

HELP = "list the runs in a folder, newest first"

DEFAULT = Path("runs")
COLUMNS = ("run", "started", "status", "ranks", "steps", "median step", "verdict")
NUMERIC = (3, 4, 5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", type=Path, nargs="?", default=DEFAULT, help="folder of runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="a JSON array instead of a table")


def run(args: argparse.Namespace) -> int:
    if not args.dir.is_dir() and args.dir != DEFAULT:
        raise UsageError(f"{args.dir} is not a folder")
    with progress_bar("reading runs") as told:
        entries, problems = list_runs(args.dir, progress=told)
    for problem in problems:
        say(problem)
    if args.json:
        print(json.dumps([entry.to_dict() for entry in entries], indent=2))
    elif entries:
        # Output for another program is not cut.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(format_table(COLUMNS, [_cells(entry) for entry in entries], numeric=NUMERIC, width=width))
    else:
        print(printable(f"No runs in {args.dir} yet."))
    return 0


def _cells(entry: RunEntry) -> Sequence[str]:
    from stepscope.records.text import ms_text

    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created_wall_ns / 1e9))
    counts = ["" if count is None else f"{count:,}" for count in (entry.ranks, entry.steps)]
    median = "" if entry.median_step_ms is None else ms_text(entry.median_step_ms)
    return (entry.path.name, started, entry.status_text, *counts, median, entry.verdict)

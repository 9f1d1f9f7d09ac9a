"""``stepscope delete``: delete runs that are over, after a confirmation."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from stepscope.cli.arguments import locate_run
from stepscope.cli.output import progress_bar
from stepscope.errors import RunError, UsageError
from stepscope.records.text import bytes_text, count_text, printable, say
from stepscope.store.catalog import delete_run, run_entry
from stepscope.store.file_io import run_bytes

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "delete runs that are over"
EPILOG = """\
examples:
  stepscope delete runs/night               asks before it deletes
  stepscope delete --yes try-1 try-2        does not ask

A run that is still active is never deleted, nor one of another user, nor one that another process is working on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories, or names of runs in runs/")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def run(args: argparse.Namespace) -> int:
    found = list(dict.fromkeys(locate_run(path) for path in args.runs))
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError("standard input is not a terminal, so nothing can be confirmed; use --yes")
        for run_dir in found:
            print(_about(run_dir), file=sys.stderr)
        question = f"Delete {'this run' if len(found) == 1 else f'these {len(found)} runs'} for good? [y/N] "
        print(question, end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("nothing was deleted")
            return 1
    failed = 0
    for run_dir in found:
        try:
            with progress_bar(f"watching {run_dir}") as progress:
                delete_run(run_dir, progress=progress)
        except RunError as error:
            say(str(error))
            failed += 1
        else:
            say(f"deleted {run_dir}")
    return RunError.exit_code if failed else 0


def _about(run_dir: Path) -> str:
    entry = run_entry(run_dir)
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created_wall_ns / 1e9))
    steps = "" if entry.steps is None else f", {count_text(entry.steps, 'step')}"
    return printable(f"  {run_dir}: {entry.status_text}, {began}{steps}, {bytes_text(run_bytes(run_dir))}")

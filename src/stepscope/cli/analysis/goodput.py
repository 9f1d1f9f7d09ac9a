"""``stepscope goodput``: which part of the time was useful training, over all attempts of a run or all runs."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from stepscope.cli.arguments import RUN_HELP, RUNS_FOLDER, locate_run, runs_of_folder
from stepscope.cli.output import format_table
from stepscope.errors import UsageError
from stepscope.records.text import printable

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "show how much of the time was useful training, over all attempts of a run"
EPILOG = """\
examples:
  stepscope goodput                  the newest run in runs/, also while it is active
  stepscope goodput runs/NAME        its parts: start-up, compile, training, lost steps, restarts …
  stepscope goodput --all            all runs in runs/, those of the same job together
  stepscope goodput --all DIR        all runs in another folder
  stepscope goodput NAME --json      the document (docs/goodput.md)
"""
COLUMNS = ("run", "status", "time", "goodput", "restarts", "lost steps", "most of the rest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, nargs="?", help=f"{RUN_HELP}; with --all: a folder of runs")
    parser.add_argument("--all", action="store_true", help="all runs of a folder (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    if args.all:
        return _all(args.path or RUNS_FOLDER, as_json=args.json)
    if args.path is not None and args.path.is_dir() and not (args.path / "run.json").exists():
        raise UsageError(f"{args.path} is not a run; for a folder of runs, use `stepscope goodput --all {args.path}`")
    from stepscope.cli.ledger import ledger_document
    from stepscope.reports.goodput_text import goodput_lines

    document, _ = ledger_document(locate_run(args.path, prefer_live=True))
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print(printable("\n".join(goodput_lines(document, width=width)), keep="\n"))
    return 0


def _all(folder: Path, *, as_json: bool) -> int:
    from stepscope.cli.ledger import job_runs
    from stepscope.goodput.jobs import job_document, jobs_of
    from stepscope.reports.goodput_text import job_lines

    found = job_runs([entry.path for entry in runs_of_folder(folder)])
    jobs = [job_document(job) for job in jobs_of(found)]
    runs: dict[str, dict[str, Any]] = {run.name: {**run.ledger, "status": run.status} for run in found}
    if as_json:
        print(json.dumps({"jobs": jobs, "runs": runs}, indent=2, allow_nan=False))
    elif not found:
        print(printable(f"No runs in {folder} yet."))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(format_table(COLUMNS, job_lines(jobs, runs), numeric=(2, 3, 4, 5), width=width))
    return 0

"""``stepscope delete``: delete runs that are over, named ones or by age and size, after a confirmation."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stepscope.cli.arguments import RUNS_FOLDER, age, locate_run, runs_of_folder, size
from stepscope.cli.output import progress_bar
from stepscope.errors import RunError, UsageError
from stepscope.records.text import bytes_text, count_text, printable, say
from stepscope.store.catalog import ACTIVE, RunEntry, delete_run, read_labels, run_entry
from stepscope.store.file_io import run_bytes

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "delete runs that are over"
EPILOG = """\
examples:
  stepscope delete runs/night               asks before it deletes
  stepscope delete --yes try-1 try-2        does not ask
  stepscope delete --older-than 90d         those in runs/ that started longer ago and have no tag
  stepscope delete --keep-size 500G DIR     the oldest in this folder, until the rest takes no more than that
  stepscope delete --older-than 90d --dry-run    only show which

A run that is still active is never deleted, nor one of another user, nor one that another process is working on.  By
age or size, no run that has a tag is deleted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="*",
        help="run directories, or names of runs in runs/; by age or size: folders of runs (default: runs)",
    )
    parser.add_argument(
        "--older-than", "--older_than", type=age, metavar="TIME", help="runs that started longer ago: 24h, 90d, 8w"
    )
    parser.add_argument(
        "--keep-size",
        "--keep_size",
        type=size,
        metavar="SIZE",
        help="the oldest runs, until the others take no more than this: 20G, 2T",
    )
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="only show what would be deleted")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def run(args: argparse.Namespace) -> int:
    by_rule = args.older_than is not None or args.keep_size is not None
    if by_rule:
        folders = list(dict.fromkeys(args.runs or [RUNS_FOLDER]))
        found = [path for folder in folders for path in _expired(folder, args.older_than, args.keep_size)]
        if not found:
            say("no runs to delete")
            return 0
    elif args.runs:
        found = list(dict.fromkeys(locate_run(path) for path in args.runs))
    else:
        raise UsageError("name the runs to delete, or use --older-than or --keep-size")
    if args.dry_run:
        for run_dir in found:
            print(_about(run_dir))
        total = sum(map(run_bytes, found))
        say(f"{count_text(len(found), 'run')} with {bytes_text(total)} would be deleted")
        return 0
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
                if by_rule:
                    delete_run(run_dir, watch=False, unless=partial(_why_kept, run_dir), progress=progress)
                else:
                    delete_run(run_dir, progress=progress)
        except RunError as error:
            say(str(error))
            failed += 1
        else:
            say(f"deleted {run_dir}")
    return RunError.exit_code if failed else 0


def _expired(folder: Path, older_than_s: float | None, keep_bytes: int | None) -> list[Path]:
    """The runs of a folder that are too old or too much, oldest first; none that is active or tagged."""
    entries = sorted(runs_of_folder(folder), key=lambda entry: entry.created_wall_ns)
    over = [entry for entry in entries if entry.status not in ACTIVE and not entry.labels.tags]
    now_s = time.time()
    chosen = [
        entry.path for entry in over if older_than_s is not None and now_s - entry.created_wall_ns / 1e9 > older_than_s
    ]
    return chosen if keep_bytes is None else [*chosen, *_too_much(entries, over, set(chosen), keep_bytes)]


def _too_much(entries: Sequence[RunEntry], over: Sequence[RunEntry], chosen: set[Path], keep_bytes: int) -> list[Path]:
    sizes = {entry.path: run_bytes(entry.path) for entry in entries if entry.path not in chosen}
    total, more = sum(sizes.values()), list[Path]()
    for entry in over:
        if total <= keep_bytes:
            break
        if entry.path not in chosen:
            total -= sizes[entry.path]
            more.append(entry.path)
    return more


def _why_kept(run_dir: Path) -> str | None:
    """Checked again when nothing else can change the run: a tag may have been added meanwhile."""
    return "it has a tag" if read_labels(run_dir).tags else None


def _about(run_dir: Path) -> str:
    entry = run_entry(run_dir)
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created_wall_ns / 1e9))
    steps = "" if entry.steps is None else f", {count_text(entry.steps, 'step')}"
    return printable(f"  {run_dir}: {entry.status_text}, {began}{steps}, {bytes_text(run_bytes(run_dir))}")

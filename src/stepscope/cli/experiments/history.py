"""``stepscope history``: the step time of many runs of one job, and where it changed."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.archive.location import ArchiveUrl
from stepscope.cli.arguments import RUNS_FOLDER, count, run_or_url, runs_of_folder
from stepscope.cli.catalog import catalog_runs
from stepscope.cli.output import format_table, progress_bar
from stepscope.errors import UsageError
from stepscope.records.text import count_text, ms_text, printable
from stepscope.store.catalog import RunEntry

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "show how the step time changed from run to run, and with which commit"
EPILOG = """\
examples:
  stepscope history                          the last 20 runs in runs/ of the command that has most of them
  stepscope history --last 100 --tag nightly
  stepscope history --name 'night-*' --markdown
  stepscope history --any-command --tag model-a

Runs are compared by the mean of their steady steps, from their summaries. How far runs differ by chance is measured
from run to run; only what is more than that is reported as a change. docs/history.md explains how.
"""
COLUMNS = ("run", "started", "commit", "steps", "mean step", "", "change")
NUMERIC = (3, 4)
BAR_CELLS = 16


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
        "--last", type=count("runs"), default=20, metavar="N", help="use the newest N runs (default: 20)"
    )
    parser.add_argument(
        "--tag", action="append", metavar="TAG", help="only runs with this tag; if repeated, with all of them"
    )
    parser.add_argument("--name", metavar="PATTERN", help="only runs whose name matches, such as 'night-*'")
    parser.add_argument(
        "--any-command", action="store_true", help="also runs of other commands, or with another number of ranks"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the document (docs/history.md)")
    form.add_argument("--markdown", action="store_true", help="print Markdown, for a CI summary or an issue")


def run(args: argparse.Namespace) -> int:
    from stepscope.comparison.history import history_document, history_points, same_job

    entries = runs_of_folder(args.dir, known=catalog_runs(args.dir))
    found = [entry for entry in entries if _matches(entry, args.tag or (), args.name)]
    if not found:
        filtered = " with that name or tag" if entries else ""
        raise UsageError(f"no runs in {args.dir}{filtered}")
    like, others = (found, []) if args.any_command else same_job(found)
    chosen = sorted(like, key=lambda entry: -entry.created_wall_ns)[: args.last]
    if isinstance(args.dir, ArchiveUrl):
        chosen = _with_summaries(args.dir, chosen)
    document = history_document(*history_points(chosen))
    document["command"] = None if args.any_command else list(chosen[0].command)
    document["other_commands"] = len(others)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        print(printable(_markdown(document) if args.markdown else _text(document), keep="\n"))
    return 0


def _with_summaries(url: ArchiveUrl, entries: Sequence[RunEntry]) -> list[RunEntry]:
    from stepscope.archive.cache import Archive

    with progress_bar("fetching summaries") as progress:
        return Archive(url, os.environ).summaries(entries, progress=progress)


def _matches(entry: RunEntry, tags: Sequence[str], pattern: str | None) -> bool:
    names = (entry.path.name, entry.name)
    return set(tags) <= set(entry.labels.tags) and (
        pattern is None or any(fnmatch.fnmatchcase(name, pattern) for name in names)
    )


# -- text -------------------------------------------------------------------------------------------------------------


def _lines(document: Mapping[str, Any]) -> list[str]:
    from stepscope.comparison.history import history_sentences

    lines = history_sentences(document)
    for row in document["changes"]:
        if row["settings"]:
            lines.append(f"Settings that changed in {row['run']}: {_settings(row['settings'])}.")
        if row["commit"] and row["before_commit"] and row["commit"] != row["before_commit"]:
            lines.append(f"The commits in between: git log --oneline {row['before_commit'][:10]}..{row['commit'][:10]}")
    return lines


def _settings(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [f"{row['name']} {row['before']} → {row['after']}" for row in rows[:4]]
    return ", ".join([*shown, *([f"{len(rows) - 4} more"] if len(rows) > 4 else [])])


def _notices(document: Mapping[str, Any]) -> list[str]:
    lines = []
    if document["other_commands"]:
        others = count_text(document["other_commands"], "run")
        lines.append(f"{others} with another command or number of ranks not shown (--any-command).")
    return [*lines, *(f"{row['run']} left out: {row['why']}." for row in document["left_out"])]


def _rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    changes = {row["run"]: row for row in document["changes"]}
    times = [row["step_ms"] for row in document["runs"]]
    low, high = (min(times), max(times)) if times else (0.0, 0.0)
    rows: list[tuple[str, ...]] = []
    for row in document["runs"]:
        change = changes.get(row["run"])
        mark = ("▲ " if change["change"] > 0 else "▼ ") + f"{change['change']:+.1%}" if change else ""
        if row["run"] in document["unusual"]:
            mark = "unusual"
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created_wall_ns"] / 1e9))
        commit = f"{row['commit'][:10]}{'*' if row['dirty'] else ''}"
        share = (row["step_ms"] - low) / (high - low) if high > low else 0.0
        bar = " " * round(share * (BAR_CELLS - 1)) + "●"
        rows.append((row["run"], started, commit, f"{row['steps']:,}", ms_text(row["step_ms"]), bar, mark))
    return rows


def _text(document: Mapping[str, Any]) -> str:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    command = "" if document["command"] is None else f" of {shlex.join(document['command'])}"
    parts = ["\n".join(_lines(document))]
    if document["runs"]:
        table = format_table(COLUMNS, _rows(document), numeric=NUMERIC, width=width, left_out=(3, 1, 2), least=8)
        parts += [f"{count_text(len(document['runs']), 'run')}{command}, oldest first:", table]
    return "\n\n".join([*parts, *(["\n".join(notices)] if (notices := _notices(document)) else [])])


def _markdown(document: Mapping[str, Any]) -> str:
    heads = [head or " " for head in COLUMNS if head]
    rows = [[cell for head, cell in zip(COLUMNS, row, strict=True) if head] for row in _rows(document)]
    table = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    table += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    sentences = "\n".join(f"- {line}" for line in [*_lines(document), *_notices(document)])
    return f"### Step time of {count_text(len(document['runs']), 'run')}\n\n{sentences}\n\n" + "\n".join(table)

"""``stepscope compare``: did a change make training slower?"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.archive.location import ArchiveUrl
from stepscope.cli.arguments import run_or_url, run_path
from stepscope.cli.output import progress_bar, protect_inputs, write_page

if TYPE_CHECKING:
    from stepscope.comparison.inputs import Input

__all__ = ["EPILOG", "HELP", "add_arguments", "add_input_arguments", "read_inputs", "run"]

HELP = "compare two runs: is one slower, by how much, in which phase and on which rank"
EPILOG = """\
An input is a run directory, the name of a run in runs/, an archived run (s3://bucket/prefix/RUN), a summary.json, or
CSV or JSON with one number per step from any logger. With more than two inputs, the last is compared with all others:
several baselines show how much runs of this job differ anyway. With two runs, further runs of the first in its folder
(same command and commit, or same tag) are used as baselines, too, unless you say --only (docs/compare.md).

examples:
  stepscope compare before after               two runs in runs/
  stepscope compare base1 base2 base3 after    three baselines: finds smaller changes
  stepscope compare before after --json        the document, for scripts
  stepscope compare before after --markdown    for a pull request
  stepscope compare old.csv new.csv --column iteration_ms

Exit codes: 0 compared, whatever the result; 2 too few steps; 3 an input cannot be used. `stepscope gate` judges.
"""
WIDEST = 100
READERS = 2
"""Inputs read at once; each needs the memory of a whole run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", metavar="RUN|FILE", type=run_or_url, nargs="+", help="the baselines, then the run to compare"
    )
    add_input_arguments(parser)
    parser.add_argument(
        "--only", action="store_true", help="compare only these runs, without further baselines from their folder"
    )
    parser.add_argument(
        "--unfinished", action="store_true", help="also compare runs that failed, hung or are still active"
    )


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that ``compare`` and ``gate`` share: which column of a file to read, and the form of the result."""
    parser.add_argument("--column", metavar="NAME", help="the column or key with the numbers, in CSV and JSON files")
    parser.add_argument("--unit", choices=("ms", "s", "throughput"), help="what the numbers in such files are")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    form.add_argument("--markdown", action="store_true", help="print Markdown, for a pull request")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a page to this file")


def more_words(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Accept ``compare A --json B``: B is an input as well."""
    args.inputs += map(run_or_url, words)


def run(args: argparse.Namespace) -> int:
    # numpy and the readers are loaded only now: `stepscope --help` must not wait for them.
    from stepscope.comparison.repeats import compare_with_repeats
    from stepscope.errors import UsageError

    if len(args.inputs) < 2:
        raise UsageError("name at least two inputs: a baseline and what to compare with it")
    *baselines, candidate = read_inputs(args.inputs, args)
    document = compare_with_repeats(baselines, candidate, only=args.only, unfinished=args.unfinished)
    print_document(document, args)
    return 0


def read_inputs(paths: Sequence[Path | ArchiveUrl], args: argparse.Namespace) -> list[Input]:
    from stepscope.comparison import read_input

    found = [run_path(path) for path in paths]
    protect_inputs([args.html], found)
    inputs = []
    # Large runs take a second or two each, most of it outside of Python's lock.
    with progress_bar("reading", None) as progress, ThreadPoolExecutor(READERS) as pool:
        for source in pool.map(lambda path: read_input(path, column=args.column, unit=args.unit), found):
            inputs.append(source)
            progress(len(inputs), len(found))
    return inputs


def print_document(document: dict[str, object], args: argparse.Namespace) -> None:
    """Print a comparison in the requested form, and write the page."""
    from stepscope.comparison.text import comparison_page, render_comparison, render_markdown

    if args.html is not None:
        write_page(args.html, comparison_page(document))
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    elif args.markdown:
        print(render_markdown(document), end="")
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
        print(render_comparison(document, width=width, color=color), end="")

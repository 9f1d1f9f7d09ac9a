"""``stepscope flight``: which rank is blocking a job, from the Flight Recorder dumps of its ranks."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from stepscope.cli.arguments import existing
from stepscope.cli.output import page_name, progress_bar, protect_inputs, require_page, write_page
from stepscope.errors import DumpError

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "analyze Flight Recorder dumps to find the rank blocking the job"
EPILOG = """\
Reads dumps of any torch version, pickled or JSON, NCCL or gloo, with any file names; also, if they are in the same
folder, stacks (stacks_N.txt, written by faulthandler), errors (err_N.txt) and torchtitan's structured_logs/.

examples:
  stepscope flight comm_traces/                         all dumps in a folder
  stepscope flight /tmp/nccl_trace_rank_*               dumps by name
  stepscope flight dumps/ --json                        the result as JSON
  stepscope flight dumps/ --html hang.html              also write a page with a diagram
"""
WIDEST = 100
PAGE = b"<!doctype html>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="DIR|FILE", type=Path, nargs="+", help="folders or files of one job")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the result as a page to this file")


def run(args: argparse.Namespace) -> int:
    from stepscope.flight.read import read_paths
    from stepscope.hangs.judge import judge_dumps
    from stepscope.reports.flight_text import render_flight

    for path in args.paths:
        existing(path)
    require_page(args.html)
    if args.html is not None:
        protect_inputs([args.html], [*args.paths, *_existing_output(args.html, args.paths)])
    with progress_bar("reading dumps") as progress:
        reading = read_paths(args.paths, progress=progress)
    if not reading.dumps:
        raise DumpError(" ".join(["no dump found:", *reading.problems[:4]]))
    document = judge_dumps(
        reading.dumps,
        stacks=reading.stacks,
        errors=reading.errors,
        logs=reading.logs,
        unreadable=reading.unreadable,
        problems=reading.problems,
    )
    if args.html is not None:
        from stepscope.reports.page.documents import flight_page

        write_page(args.html, flight_page(document, name=page_name(args.paths)))
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
        print(render_flight(document, width=width), end="")
    return 0


def _existing_output(out: Path, paths: Sequence[Path]) -> list[Path]:
    """The output file if it exists in one of the folders, unless it is a page that we wrote before."""
    place = out.resolve()
    if not place.is_file() or not any(path.is_dir() and place.is_relative_to(path.resolve()) for path in paths):
        return []
    with place.open("rb") as file:
        return [] if file.read(len(PAGE)).lower() == PAGE else [out]

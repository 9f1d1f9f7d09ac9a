"""``stepscope capture --pid PID``: a trace of processes that Stepscope did not start, analyzed.

Not a separate command: ``capture`` adds these options to its own and calls ``run_process_capture`` if there is a pid.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.cli.arguments import count, whole_number
from stepscope.errors import CaptureError, UsageError
from stepscope.records.text import TIME_IN_NAME, say

if TYPE_CHECKING:
    from stepscope.captures.kineto_process import TracedProcess

__all__ = ["DEFAULT_MS", "add_process_arguments", "run_process_capture"]

DEFAULT_MS = 500
MOST_MS = 60_000
SUFFIX = ".pt.trace.json.gz"
WIDEST = 120


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only ``--pid`` has; ``--steps``, ``--stacks``, ``--shapes`` and ``--json`` are the command's."""
    parser.add_argument(
        "--pid",
        metavar="PID",
        type=whole_number,
        action="append",
        default=[],
        help="capture a process that has KINETO_USE_DAEMON=1 and was not started by Stepscope; may be repeated",
    )
    parser.add_argument(
        "--ms", metavar="N", type=count("milliseconds"), help=f"with --pid: record N ms (default {DEFAULT_MS})"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        type=Path,
        help="with --pid: write the trace to this file, or traces into this folder",
    )


def run_process_capture(
    pids: Iterable[int],
    *,
    ms: int | None = None,
    steps: int | None = None,
    stacks: bool = True,
    shapes: bool = False,
    output: Path | None = None,
    as_json: bool = False,
) -> int:
    """Record these processes, write their traces, analyze them like ``stepscope trace`` and print the verdict."""
    from stepscope.captures.kineto_daemon import capture_processes
    from stepscope.captures.kineto_process import find_processes
    from stepscope.captures.kineto_protocol import TraceOptions

    if ms is not None and steps is not None:
        raise UsageError(
            "--ms and --steps exclude each other: a process is recorded for a time or for a number of steps"
        )
    if ms is not None and ms > MOST_MS:
        raise UsageError(
            f"--ms: must be at most {MOST_MS} milliseconds, not {ms}; longer traces are too large to analyze"
        )
    processes = find_processes(pids)
    paths = _output_paths(processes, output)
    options = TraceOptions(duration_ms=ms or DEFAULT_MS, steps=steps, stacks=stacks, shapes=shapes)
    captured = capture_processes(
        processes, options, paths, report=lambda process, doing: say(f"{process.name}: {doing}")
    )
    problems = [capture.problem for capture in captured if capture.problem]
    written = [capture.path for capture in captured if capture.path is not None]
    if not written:
        raise CaptureError(problems[0] + (f" (and {len(problems) - 1} more such processes)" if problems[1:] else ""))
    for text in (*problems, *(capture.notice for capture in captured if capture.notice)):
        say(text)
    for path in written:
        say(f"wrote {path}")
    _print_analysis(written, as_json=as_json)
    return CaptureError.exit_code if problems else 0


def _output_paths(processes: Iterable[TracedProcess], output: Path | None) -> dict[int, Path]:
    """A trace of one process is the file that was named; several are files of the folder."""
    processes = tuple(processes)
    stamp = time.strftime(TIME_IN_NAME)
    if len(processes) == 1 and not (output is not None and output.is_dir()):
        (process,) = processes
        path = output or Path(f"pid-{process.pid}-{stamp}{SUFFIX}")
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
        return {process.pid: path}
    folder = output or Path(f"captures-{stamp}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the folder {folder}: {error.strerror}") from None
    ranks = [process.rank for process in processes]
    by_rank = None not in ranks and len(set(ranks)) == len(ranks)
    return {
        process.pid: folder / ((f"rank-{process.rank}" if by_rank else f"pid-{process.pid}") + SUFFIX)
        for process in processes
    }


def _print_analysis(paths: list[Path], *, as_json: bool) -> None:
    from stepscope.cli.analysis.trace import analyze_traces
    from stepscope.reports.trace import document_of, render_trace
    from stepscope.traces.engine import Options

    document = document_of(analyze_traces(paths, (), Options(cache=None), "local"))
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
        return
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    print(render_trace(document, width=width, color=color), end="")
